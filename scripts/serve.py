"""Start one server of a run file in the foreground, printing its full command first; it ends when this script does.

    python3 scripts/serve.py --config configs/quickstart.yaml --role extract \\
      --log .run/quickstart/logs/server_extract.log

Behind `nohup ... &` it outlives the shell and the SSH connection; `kill` of its pid stops it and the server.

With `--restart N` a server that dies is started again, N times at most, after pauses of 1 s, 2 s, 4 s, ... up to a
minute; not one that somebody stopped (exit code 0, SIGTERM, SIGINT, SIGHUP), nor one whose first
start failed, nor one that died of each of its last three starts: that ends with its reason.

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
from eagle3.stage import UserError, log, raising, read_run_file, run  # noqa: E402

STOPPED = (0, *(-sign for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))  # exit codes: by somebody's will
SOON_S = 30.0  # to die before so long after being ready, or before that, is to die of the start
SOON_TIMES = 3  # in a row: no further start will do better
LONGEST_PAUSE_S = 60.0  # the first is 1 s: by then the group is killed, and its port and GPU memory are free


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--wait", type=float, default=3600,
                        help="seconds until it must be healthy (a 1T model loads slowly)")
    parser.add_argument("--restart", type=int, default=0, metavar="N",
                        help="start a server that died again, up to N times")
    return parser


def serve(servers: dict, args) -> None:
    """Until the server ends for good. Raises UserError with its reason."""
    soon, restarts = 0, 0
    while True:
        process = ready = None
        try:
            process, _ = start_server(servers, args.role, args.log, args.wait)
            ready = time.monotonic()
            while process.poll() is None:
                time.sleep(0.5)
            why = ending(args.role, process, args.log)
        except UserError as error:
            if not restarts:
                raise  # its flags, not its fate
            why = str(error)
        finally:
            if process:
                stop_server(process)
        if process and process.returncode in STOPPED:
            raise UserError(f"{why} Somebody stopped it: it is not started again." if args.restart else why)
        soon = 0 if ready is not None and time.monotonic() - ready > SOON_S else soon + 1
        if restarts == args.restart or soon == SOON_TIMES:
            times = "once" if restarts == 1 else f"{restarts} times, {soon} of its last starts in vain"
            raise UserError(why + (f" It was started again {times}." if restarts else ""))
        pause = min(LONGEST_PAUSE_S, 2.0 ** min(restarts, 9))
        restarts += 1
        log(f"{why} Starting it again in {pause:.0f} s ({restarts} of {args.restart})")
        time.sleep(pause)


def main(argv: list[str]) -> None:
    args = raising(build_parser()).parse_args(argv)
    if args.wait <= 0:
        raise UserError(f"--wait {args.wait:g}: must be above 0.")
    if args.restart < 0:
        raise UserError(f"--restart {args.restart}: must be at least 0.")
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if sign != signal.SIGHUP or signal.getsignal(sign) != signal.SIG_IGN:  # nohup has it ignored
            signal.signal(sign, lambda *_: sys.exit(0))
    serve(read_run_file(args.config).get("servers") or {}, args)


if __name__ == "__main__":
    run(main)
