"""How fast states come from another host, over HTTP, beside a shared folder: one table.

    python3 scripts/bench_offer.py --folder /dev/shm --files 20           # without a disk
    python3 scripts/bench_offer.py --folder /tmp --files 20 --concurrency 8

Files   of 1,730 tokens at Kimi-K2.5's width, 99 MB each, random bytes, as a server captures them
Runs    over loopback: scripts/offer_states.py in a process of its own, taken by 03's own client, --concurrency at a
        time, with checksum and fsync; through a shared folder: 03's rename, and its copy where the folder lies on
        another file system (--copy-to DIR)
Writes  a table on stdout; its files are removed again
"""
import argparse
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.incoming import move, run_prefix  # noqa: E402
from eagle3.stage import UserError, raising, run  # noqa: E402
from eagle3.states import token_bytes  # noqa: E402
from eagle3.states_client import Source  # noqa: E402

TOKENS, HIDDEN = 1730, 7168


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="both sides lie in it")
    add("--copy-to", type=Path, metavar="DIR", help="a folder on another file system, for the copy")
    add("--files", type=int, default=20)
    add("--concurrency", type=int, default=8)
    return parser


def write_files(folder: Path, count: int) -> int:
    """Files as a capture leaves them, as far as their checksum goes. Returns the bytes of one."""
    folder.mkdir(parents=True)
    data = os.urandom(1 << 20) * (token_bytes(HIDDEN, "bfloat16") * TOKENS // (1 << 20))
    checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
    text = json.dumps({"__metadata__": {"checksum": checksum},
                       "states": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    for number in range(count):
        (folder / f"s{number}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    os.sync()
    return 8 + len(text) + len(data)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(what: str, work: Callable[[int], object], args, size: int, server: int | None = None) -> None:
    """Do `work` for each file and print a row."""
    before, begun = (cpu_seconds(os.getpid()), cpu_seconds(server) if server else 0.0), time.monotonic()
    with ThreadPoolExecutor(args.concurrency) as pool:
        list(pool.map(work, range(args.files)))
    seconds, gigabytes = time.monotonic() - begun, args.files * size / 1e9
    spent = cpu_seconds(os.getpid()) - before[0], (cpu_seconds(server) - before[1] if server else 0.0)
    there = f"{spent[1] / gigabytes:.2f}" if server else "-"
    print(f"{what:<40} {gigabytes * 1e3 / seconds:>9,.0f} MB/s {spent[0] / gigabytes:>9.2f} {there:>9}", flush=True)


@contextlib.contextmanager
def offering(folder: Path):
    """(URL, token, pid) of scripts/offer_states.py."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, str(Path(__file__).with_name("offer_states.py")), "--capture-dir", str(folder),
               "--port", str(port), "--token-env", "BENCH_TOKEN"]
    process = subprocess.Popen(command, env={**os.environ, "BENCH_TOKEN": token}, stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        yield f"http://127.0.0.1:{port}", token, process.pid
    finally:
        process.kill()
        process.wait()


def main(argv: list[str]) -> None:
    args = raising(build_parser()).parse_args(argv)
    if args.files < 1 or args.concurrency < 1:
        raise UserError("--files and --concurrency must be at least 1.")
    root = Path(tempfile.mkdtemp(prefix="bench_offer-", dir=args.folder))
    run_name, here = f"{run_prefix(root)}1.1", root / "here"
    try:
        there = root / "there" / run_name
        size = write_files(there, args.files)
        print(f"{args.files} files of {size / 1e6:,.0f} MB, {args.concurrency} at a time"
              f"\n{'':<40} {'':>14} {'s a GB: 03':>9} {'server':>8}")
        with offering(root / "there") as (url, token, pid):
            source = Source(url, token, 10)

            def bring(number: int) -> None:
                source.bring(run_name, f"s{number}", here, lambda: False)

            timed("HTTP over loopback", bring, args, size, pid)
        timed("shared folder, renamed", lambda i: move(here / f"s{i}.safetensors", root / f"s{i}"), args, size)
        if args.copy_to:
            with tempfile.TemporaryDirectory(dir=args.copy_to) as other:
                timed("shared folder, copied", lambda i: move(root / f"s{i}", Path(other) / f"s{i}"), args, size)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    run(main)
