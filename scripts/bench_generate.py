"""How fast is 01_generate.py itself?

    python scripts/bench_generate.py stub --rows 20000 --concurrency 256
    python scripts/bench_generate.py engine --base-url http://127.0.0.1:30000 --prompts configs/quickstart_prompts.jsonl

stub: against a server that answers at once: answers/s on one client core, and memory over the rows. It is a process
of its own, on another core where there is one. CPU seconds are the client's own, from its first request to its last.

engine: against a real server: its tok/s and those of a bare load generator, in turns.
"""
import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from eagle3.responses import part_files, read_jsonl  # noqa: E402
from eagle3.prompt_sources import safe_id  # noqa: E402

TINY = ROOT / "scripts/tiny_kimi"


def stub(port: int, n_words: int) -> None:
    """Answers POST with one fixed chat completion, GET /stats with [requests, seconds between first and last]."""
    text = "the value of the object is returned as it was given to the call " * (n_words // 13 + 1)
    message = {"role": "assistant", "content": text, "reasoning_content": text[:200]}
    body = json.dumps({"id": "gen", "model": "m", "usage": {"prompt_tokens": 20, "completion_tokens": n_words},
                       "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
    seen = [0, 0.0, 0.0]

    async def serve(reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    answer = json.dumps([seen[0], seen[2] - seen[1]]).encode() if b"/stats" in head else b"{}"
                else:
                    await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
                    seen[0], seen[1], seen[2] = seen[0] + 1, seen[1] or time.monotonic(), time.monotonic()
                    answer = body
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
                writer.write(head + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=1024)
        await server.serve_forever()
    asyncio.run(main())


def cpu_and_rss(pid: int) -> tuple[float, float]:
    """CPU seconds used so far and resident MiB now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    rss = next(line.split()[1] for line in status if line.startswith("VmRSS"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(rss) / 1024


def bench_stub(args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, url = Path(folder) / "p.jsonl", f"http://127.0.0.1:{args.port}"
        with open(file, "w") as out:
            for i in range(args.rows):
                prompt = f"Question {i}: what does the function return, and when?"
                out.write(json.dumps({"id": f"p{i}", "prompt": prompt}) + "\n")
        cores = sorted(os.sched_getaffinity(0))
        server = subprocess.Popen([sys.executable, __file__, "serve", str(args.port), str(args.words)],
                                  preexec_fn=lambda: os.sched_setaffinity(0, cores[-1:]))
        argv = ["--prompts", file, "--base-url", f"{url}/v1", "--api", "openai", "--model", "m", "--tokenizer", TINY,
                "--output-dir", f"{folder}/out", "--concurrency", args.concurrency, "--on-mismatch", "keep",
                "--log-interval", 60]
        client = subprocess.Popen([sys.executable, "-u", ROOT / "01_generate.py", *map(str, argv)],
                                  env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                                  preexec_fn=lambda: os.sched_setaffinity(0, cores[:1]))
        try:
            begin, marks, last = None, {}, 0.0  # marks: share of the rows -> (CPU seconds, MiB)
            while client.poll() is None:
                time.sleep(0.1)
                try:
                    n, seconds = json.load(urllib.request.urlopen(f"{url}/stats"))
                    now = cpu_and_rss(client.pid)
                except (OSError, StopIteration):
                    continue
                if n and begin is None:
                    begin, first_n = now[0], n
                for share in (0.1, 0.25, 0.5, 0.75, 1.0):
                    if n >= share * args.rows:
                        marks.setdefault(share, now)
                last = max(last, now[1])
            assert client.returncode == 0
        finally:
            server.kill()
        per_cpu = (args.rows - first_n) / (marks[1.0][0] - begin)
        print(f"{args.rows:,} answers of {args.words} words at concurrency {args.concurrency}: {n / seconds:.0f} "
              f"answers/s, {per_cpu:.0f} a CPU second of the client")
        print("resident MiB of the client at 10, 25, 50, 75, 100 % of the rows: "
              + ", ".join(f"{rss:.0f}" for _, rss in marks.values())
              + f"; most of all, sorting and report included: {last:.0f}")


async def bare(url: str, requests: list[dict], concurrency: int) -> tuple[int, float]:
    """(answer tokens, seconds): the least a client can do."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=concurrency)) as client:
        queue, tokens, begin = iter(requests), 0, time.monotonic()

        async def worker():
            nonlocal tokens
            for body in queue:
                response = await client.post(f"{url}/generate", json=body)
                tokens += len(response.json()["output_ids"])
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return tokens, time.monotonic() - begin


def bench_engine(args) -> None:
    speeds = {"01": [], "bare": []}
    names = [safe_id(row["id"]) for row in read_jsonl(Path(args.prompts))][:args.limit]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.repeats + 1):  # the first round warms the server up and is not counted
            out = Path(folder) / str(turn)
            argv = ["--prompts", args.prompts, "--limit", args.limit, "--base-url", args.base_url, "--tokenizer",
                    args.tokenizer, "--output-dir", out, "--concurrency", args.concurrency, "--max-tokens",
                    args.max_tokens, "--temperature", 0, "--log-interval", 600]
            done = subprocess.run([sys.executable, "-u", ROOT / "01_generate.py", *map(str, argv)], check=True,
                                  stdout=subprocess.PIPE, text=True)
            line = [line for line in done.stdout.splitlines() if " answers/s " in line][-1]
            rows = {row["id"]: row for part in part_files(out) for row in read_jsonl(part)}
            rows = [rows[f"{name}-t0"] for name in names]  # the bare generator asks in the same order
            requests = [{"input_ids": row["prompt_ids"], "sampling_params": {
                "max_new_tokens": args.max_tokens, "temperature": 0,
                "stop_token_ids": row["response_ids"][-1:] if row["finish_reason"] == "stop" else []}} for row in rows]
            tokens, seconds = asyncio.run(bare(args.base_url, requests, args.concurrency))
            if turn:
                speeds["01"].append(float(re.search(r"([\d,]+) tok/s", line)[1].replace(",", "")))
                speeds["bare"].append(tokens / seconds)
                print(f"round {turn}: 01 {speeds['01'][-1]:.0f} tok/s, bare {speeds['bare'][-1]:.0f} tok/s", flush=True)
    ours, bare_speed = (statistics.median(values) for values in speeds.values())
    print(f"concurrency {args.concurrency}, {len(rows)} prompts, median of {args.repeats}: 01 {ours:.0f} tok/s, "
          f"bare {bare_speed:.0f} tok/s, {100 * ours / bare_speed:.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_subparsers(dest="which", required=True)
    one = which.add_parser("stub")
    one.add_argument("--rows", type=int, default=20000)
    one.add_argument("--words", type=int, default=200, help="of one answer; about 1.2 tokens each")
    one.add_argument("--concurrency", type=int, default=256)
    one.add_argument("--port", type=int, default=39181)
    two = which.add_parser("engine")
    two.add_argument("--base-url", required=True)
    two.add_argument("--prompts", required=True)
    two.add_argument("--tokenizer", default=str(TINY))
    two.add_argument("--limit", type=int, default=128)
    two.add_argument("--concurrency", type=int, default=16)
    two.add_argument("--max-tokens", type=int, default=128)
    two.add_argument("--repeats", type=int, default=3)
    if sys.argv[1:2] == ["serve"]:
        return stub(int(sys.argv[2]), int(sys.argv[3]))
    args = parser.parse_args()
    (bench_stub if args.which == "stub" else bench_engine)(args)


if __name__ == "__main__":
    main()
