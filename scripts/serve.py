"""Start one server of a run file in the foreground, printing its full command first; it ends when this script does.

    python3 scripts/serve.py --config configs/quickstart.yaml --role extract \\
      --log .run/quickstart/logs/server_extract.log

Behind `nohup ... &` it outlives the shell and the SSH connection; `kill` of its pid stops it and the server.

Reads   the section `servers` of the run file (roles: plain, extract, speculative, or your own)
Writes  the server's output to --log, its API key and tokens masked; to stdout the command, one `ready` line; to stderr
        why it ended, in the server's own words
Exit    0 stopped by a signal; 2 port taken, target missing, server died or not healthy in time
"""
import argparse
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.servers import ending, start_server, stop_server  # noqa: E402
from eagle3.stage import UserError, raising, read_run_file, run  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--wait", type=float, default=3600,
                        help="seconds until it must be healthy (a 1T model loads slowly)")
    return parser


def main(argv: list[str]) -> None:
    args = raising(build_parser()).parse_args(argv)
    if args.wait <= 0:
        raise UserError(f"--wait {args.wait:g}: must be above 0.")
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if sign != signal.SIGHUP or signal.getsignal(sign) != signal.SIG_IGN:  # nohup has it ignored
            signal.signal(sign, lambda *_: sys.exit(0))
    process, _ = start_server(read_run_file(args.config).get("servers") or {}, args.role, args.log, args.wait)
    try:
        while process.poll() is None:
            time.sleep(0.5)
        raise UserError(ending(args.role, process, args.log))
    finally:
        stop_server(process)


if __name__ == "__main__":
    run(main)
