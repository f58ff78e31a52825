"""What does 05_benchmark.py's own client cost? Its tok/s beside those of SGLang's serving benchmark, in turns.

    python3 scripts/serve.py --config configs/quickstart-gpu.yaml --role speculative --log server.log    # another shell
    python3 scripts/bench_client.py --base-url http://127.0.0.1:30212 \\
      --prompts configs/quickstart_prompts.jsonl --tokenizer scripts/tiny_kimi
    python3 scripts/bench_client.py --paced 14 \\
      --prompts configs/quickstart_prompts.jsonl --tokenizer scripts/tiny_kimi      # needs no server

Both send the same prompts (05 as ids, SGLang's benchmark as their text) to one running server, the same number in
flight, answers of --max-tokens tokens at temperature 0, and empty the radix cache first. The first round warms both
up and is not counted. Needs a server with EAGLE3: 05 refuses another; the counts of speculation are part of what it
reads.

--paced MS: a stand-in that sends every stream an event of two or three tokens each MS milliseconds, written
beforehand in SGLang's form. A real server swings by more than a client costs; here what is missing to the known rate
is the client's. It shares the machine with the client.
"""
import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterable

import torch
from aiohttp import web
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from eagle3.responses import read_jsonl  # noqa: E402

# As `-m sglang.bench_serving`, where SGLang cannot be imported without the CPU engine's stand-ins
SERVING_ON_CPU = f"""import runpy, sys
sys.path.insert(0, {str(ROOT / "scripts/cpu_engine")!r})
import serve
serve.prepare()
runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)"""


def paced_events(max_tokens: int) -> list[bytes]:
    """One answer of /generate as SGLang streams it: each event holds all of it so far."""
    events, tokens = [], 0
    while tokens < max_tokens:
        tokens, step = min(max_tokens, tokens + (2, 3, 2)[len(events) % 3]), len(events) + 1
        finish = {"type": "length", "length": max_tokens} if tokens == max_tokens else None
        meta = {"id": "a" * 32, "finish_reason": finish, "prompt_tokens": 30, "weight_version": "default",
                "total_retractions": 0, "completion_tokens": tokens, "cached_tokens": 0, "spec_verify_ct": step,
                "spec_num_correct_drafts": tokens - step, "spec_correct_drafts_histogram": [0, step]}
        event = {"text": "word " * tokens, "output_ids": list(range(300, 300 + tokens)), "meta_info": meta}
        events.append(b"data: " + json.dumps(event).encode() + b"\n\n")
    return events


def serve_paced(listener: socket.socket, events: list[bytes], step_s: float) -> None:
    async def main() -> None:
        tick = asyncio.Event()

        async def generate(request: web.Request) -> web.StreamResponse:
            if not (await request.json()).get("stream"):
                return web.json_response(json.loads(events[-1].removeprefix(b"data: ")))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in events:
                await tick.wait()
                await response.write(event)
            await response.write(b"data: [DONE]\n\n")
            return response

        def always(answer: dict):
            async def handler(request: web.Request) -> web.Response:
                return web.json_response(answer)

            return handler

        info = {"model_path": "paced", "version": "0.5.23", "speculative_algorithm": "EAGLE3"}
        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.post("/flush_cache", always({})),
                        web.get("/v1/models", always({"data": [{"id": "paced"}]})),
                        web.get("/server_info", always(info))])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        at = time.monotonic()
        while True:
            at = max(at + step_s, time.monotonic())
            await asyncio.sleep(at - time.monotonic())
            tick.set()
            tick = asyncio.Event()

    asyncio.run(main())


def run(command: list, what: str) -> None:
    done = subprocess.run([sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    if done.returncode:
        sys.exit(f"bench_client: {what} failed:\n{done.stdout[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url")
    where.add_argument("--paced", type=float, metavar="MS", help="milliseconds between the events of a stream")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with `messages` or `prompt`")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer's folder run its own code")
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.paced:
        start_paced(args)
    rows = list(read_jsonl(args.prompts))[:args.limit]
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=args.trust_remote_code)
    texts = [tokenizer.apply_chat_template(row.get("messages") or [{"role": "user", "content": row["prompt"]}],
                                           add_generation_prompt=True, tokenize=False) for row in rows]
    rounds = []  # (05's tok/s, SGLang's)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "ours.jsonl", ({"id": str(i), "prompt_ids": tokenizer.encode(text)}
                                           for i, text in enumerate(texts)))
        write_rows(folder / "theirs.jsonl", ({"conversations": [{"content": text}, {"content": "unused"}]}
                                             for text in texts))
        for turn in range(args.rounds + 1):
            ours, theirs = ours_and_theirs(args, folder, folder / f"report{turn}", len(rows))
            print(f"round {turn}{'' if turn else ' (warm-up)'}: 05 {ours:,.1f} tok/s, "
                  f"SGLang's benchmark {theirs:,.1f}, ratio {ours / theirs:.3f}", flush=True)
            if turn:
                rounds.append((ours, theirs))
    ours, theirs = map(statistics.mean, zip(*rounds))
    ratios = [mine / other for mine, other in rounds]
    print(f"{len(rows)} prompts, {args.concurrency} streams, {args.max_tokens} tokens each, "
          f"mean of {args.rounds} rounds: 05 {ours:,.1f} tok/s, SGLang's benchmark {theirs:,.1f}, "
          f"{100 * ours / theirs:.1f} % | ratios of the rounds {min(ratios):.3f} to {max(ratios):.3f}, "
          f"median {statistics.median(ratios):.3f}")


def start_paced(args) -> None:
    """The paced server, in a process of its own that ends with this one; sets args.base_url."""
    listener, events = socket.create_server(("127.0.0.1", 0), backlog=1024), paced_events(args.max_tokens)
    multiprocessing.Process(target=serve_paced, args=(listener, events, args.paced / 1000), daemon=True).start()
    args.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    most = args.concurrency * args.max_tokens / len(events) / args.paced * 1000
    print(f"the paced server sends at most {most:,.0f} tok/s to {args.concurrency} streams")


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours_and_theirs(args, folder: Path, report: Path, n_prompts: int) -> tuple[float, float]:
    """tok/s of 05 and of SGLang's benchmark, one after the other."""
    run([ROOT / "05_benchmark.py", "--base-url", args.base_url, "--prompts", folder / "ours.jsonl", "--fixed-length",
         "--max-tokens", args.max_tokens, "--concurrency", args.concurrency, "--repeats", 1, "--output-dir", report],
        "05_benchmark.py")
    serving = ["-m", "sglang.bench_serving"] if torch.cuda.is_available() else ["-c", SERVING_ON_CPU]
    run([*serving, "--backend", "sglang", "--base-url", args.base_url, "--model", args.tokenizer, "--tokenizer",
         args.tokenizer, "--dataset-name", "custom", "--dataset-path", folder / "theirs.jsonl", "--sharegpt-output-len",
         args.max_tokens, "--num-prompts", n_prompts, "--max-concurrency", args.concurrency, "--flush-cache",
         "--disable-tqdm", "--output-file", folder / "figures.jsonl"], "sglang.bench_serving")
    mine = json.loads((report / "report.json").read_text())["levels"][str(args.concurrency)]["speculative"]
    other = list(read_jsonl(folder / "figures.jsonl"))[-1]
    if mine["output_tokens"] != other["total_output_tokens"]:
        sys.exit(f"bench_client: 05 counted {mine['output_tokens']:,} tokens, "
                 f"SGLang's benchmark {other['total_output_tokens']:,}.")
    return mine["tok_s"], other["output_throughput"]


if __name__ == "__main__":
    main()
