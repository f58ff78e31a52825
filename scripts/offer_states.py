"""Offer a server's capture folder over HTTP, so that 03 on another host needs no shared file system.

    export STATES_TOKEN="$(openssl rand -hex 24)"      # the same on both hosts
    nohup python3 scripts/offer_states.py --capture-dir /data/incoming --host 0.0.0.0 --port 31000 \\
      --token-env STATES_TOKEN > offer.log 2>&1 &      # beside SGLang with EAGLE3_CAPTURE_DIR=/data/incoming

and 03 with `--states-url http://SERVER:31000 --states-token-env STATES_TOKEN`. It hands out whole files only, removes
what 03 has taken, and may be stopped and started at any time. The token and the states travel as they are: offer them
in a network that you trust, or leave --host as it is and take an SSH tunnel (`ssh -N -L 31000:127.0.0.1:31000 SERVER`).

Reads   --capture-dir (made where it is missing)
Writes  nothing but its log; removes samples that 03 has taken, and what an earlier 03 of the same folder has left
Exit    0 stopped by a signal; 2 no token, no folder, port taken
"""
import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.prefill_server import secret_of  # noqa: E402
from eagle3.stage import UserError, log, raising, run  # noqa: E402
from eagle3.states_server import StatesServer  # noqa: E402

LINE_S = 60.0  # between two lines of the log, where anything was sent


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--capture-dir", type=Path, required=True, help="EAGLE3_CAPTURE_DIR of the SGLang on this host")
    add("--host", default="127.0.0.1", help="address to listen at (0.0.0.0: all of this host's)")
    add("--port", type=int, required=True)
    add("--token-env", metavar="VAR", required=True, help="environment variable that holds the token")
    return parser


def begin(args) -> StatesServer:
    """Raises UserError."""
    token, folder = secret_of(args.token_env, "--token-env"), args.capture_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.scandir(folder).close()
    except OSError as error:
        raise UserError(f"--capture-dir {folder}: {error.strerror}. Name the folder that EAGLE3_CAPTURE_DIR names, and "
                        "run this as SGLang's user.") from None
    try:
        return StatesServer((args.host, args.port), folder, token)
    except (OSError, OverflowError) as error:
        raise UserError(f"{args.host}:{args.port}: {getattr(error, 'strerror', None) or error}. Name another --port or "
                        "--host.") from None


def main(argv: list[str]) -> None:
    args = raising(build_parser()).parse_args(argv)
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if sign != signal.SIGHUP or signal.getsignal(sign) != signal.SIG_IGN:  # nohup has it ignored
            signal.signal(sign, lambda *_: sys.exit(0))
    with begin(args) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        log(f"offering {server.folder} at http://{args.host}:{server.server_port}")
        said = 0
        while True:
            time.sleep(LINE_S)
            if server.bytes != said:
                log(f"sent {server.files:,} files, {server.bytes / 1e9:,.3f} GB | "
                    f"{(server.bytes - said) / 1e6 / LINE_S:,.0f} MB/s")
                said = server.bytes


if __name__ == "__main__":
    run(main)
