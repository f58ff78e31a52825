"""What does 05_benchmark.py's own client cost? Its tok/s beside that of SGLang's serving benchmark, in turns, on one running server.

    python3 scripts/serve.py --config configs/quickstart-gpu.yaml --role speculative --log server.log      # in another shell
    python3 scripts/bench_client.py --base-url http://127.0.0.1:30212 --prompts configs/quickstart_prompts.jsonl --tokenizer scripts/tiny_kimi
    python3 scripts/bench_client.py --paced 14 --prompts configs/quickstart_prompts.jsonl --tokenizer scripts/tiny_kimi      # needs no server

Both send the same prompts (05 as ids, SGLang's benchmark as their text), the same number in flight, answers of --max-tokens tokens at
temperature 0, and empty the radix cache first. The first round warms both up and is not counted. Needs a server with EAGLE3: 05 refuses
another; the counts of speculation are part of what it reads.

--paced MS: a stand-in that sends every stream an event of two or three tokens each MS milliseconds, written beforehand in SGLang's form. A
real server swings by more than a client costs; here what is missing to the known rate is the client's. It shares the machine with the client.
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

from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
# SGLang's benchmark imports all of SGLang, which without a GPU needs the CPU engine's stand-ins
SERVING = ("import runpy, sys, torch\nif not torch.cuda.is_available():\n sys.path.insert(0, sys.argv.pop(1))\n import serve\n serve.prepare()\n"
           "else:\n sys.argv.pop(1)\nrunpy.run_module('sglang.bench_serving', run_name='__main__', alter_sys=True)")


def paced_events(max_tokens: int) -> list[bytes]:
    """One answer of /generate as SGLang streams it: each event holds all of it so far."""
    events, tokens = [], 0
    while tokens < max_tokens:
        tokens, step = min(max_tokens, tokens + (2, 3, 2)[len(events) % 3]), len(events) + 1
        meta = {"id": "a" * 32, "finish_reason": {"type": "length", "length": max_tokens} if tokens == max_tokens else None, "prompt_tokens": 30,
                "weight_version": "default", "total_retractions": 0, "completion_tokens": tokens, "cached_tokens": 0, "spec_verify_ct": step,
                "spec_num_correct_drafts": tokens - step, "spec_correct_drafts_histogram": [0, step]}
        event = {"text": "word " * tokens, "output_ids": list(range(300, 300 + tokens)), "meta_info": meta}
        events.append(b"data: " + json.dumps(event).encode() + b"\n\n")
    return events


def serve_paced(listener: socket.socket, events: list[bytes], step_s: float) -> None:
    def chunk(data: bytes) -> bytes:
        return b"%x\r\n" % len(data) + data + b"\r\n"

    answers = {"/server_info": {"model_path": "paced", "version": "0.5.23", "speculative_algorithm": "EAGLE3"}, "/v1/models": {"data": [{"id": "paced"}]},
               "/generate": json.loads(events[-1][6:])}
    chunks = [chunk(event) for event in events]

    async def main() -> None:
        tick = asyncio.Event()

        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    size = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
                    body = json.loads(await reader.readexactly(size) or b"{}")
                    if body.get("stream"):
                        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                        for part in chunks:
                            await tick.wait()
                            writer.write(part)
                        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                    else:
                        answer = json.dumps(answers.get(head.split()[1].split("?")[0], {})).encode()
                        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        await asyncio.start_server(client, sock=listener)
        at = time.monotonic()
        while True:
            at = max(at + step_s, time.monotonic())
            await asyncio.sleep(at - time.monotonic())
            tick.set()
            tick = asyncio.Event()

    asyncio.run(main())


def run(command: list, what: str) -> None:
    done = subprocess.run([sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"bench_client: {what} failed:\n{done.stdout[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url")
    where.add_argument("--paced", type=float, metavar="MS", help="milliseconds between the events of a stream")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with `messages` or `prompt`")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.paced:
        listener, events = socket.create_server(("127.0.0.1", 0), backlog=1024), paced_events(args.max_tokens)
        multiprocessing.Process(target=serve_paced, args=(listener, events, args.paced / 1000), daemon=True).start()
        args.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        print(f"the paced server sends at most {args.concurrency * args.max_tokens / len(events) / args.paced * 1000:,.0f} tok/s to {args.concurrency} streams")
    rows = [json.loads(line) for line in args.prompts.open()][:args.limit]
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=True)
    texts = [tokenizer.apply_chat_template(row.get("messages") or [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True,
                                           tokenize=False) for row in rows]
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours, theirs, figures = folder / "ours.jsonl", folder / "theirs.jsonl", folder / "figures.jsonl"
        ours.write_text("".join(json.dumps({"id": str(i), "prompt_ids": tokenizer.encode(text)}) + "\n" for i, text in enumerate(texts)))
        theirs.write_text("".join(json.dumps({"conversations": [{"content": text}, {"content": "unused"}]}) + "\n" for text in texts))
        for turn in range(args.rounds + 1):
            report = folder / f"report{turn}"
            run([ROOT / "05_benchmark.py", "--base-url", args.base_url, "--prompts", ours, "--fixed-length", "--max-tokens", args.max_tokens,
                 "--concurrency", args.concurrency, "--output-dir", report], "05_benchmark.py")
            run(["-c", SERVING, ROOT / "scripts/cpu_engine", "--backend", "sglang", "--base-url", args.base_url, "--model", args.tokenizer, "--tokenizer",
                 args.tokenizer, "--dataset-name", "custom", "--dataset-path", theirs, "--sharegpt-output-len", args.max_tokens,
                 "--num-prompts", len(rows), "--max-concurrency", args.concurrency, "--flush-cache", "--disable-tqdm", "--output-file",
                 figures], "sglang.bench_serving")
            mine = json.loads((report / "report.json").read_text())["levels"][str(args.concurrency)]["speculative"]
            other = json.loads(figures.read_text().splitlines()[-1])
            if mine["output_tokens"] != other["total_output_tokens"]:
                sys.exit(f"bench_client: 05 counted {mine['output_tokens']:,} tokens, SGLang's benchmark {other['total_output_tokens']:,}.")
            pair = {"05": mine["tok_s"], "SGLang": other["output_throughput"]}
            print(f"round {turn}{'' if turn else ' (warm-up)'}: 05 {pair['05']:,.1f} tok/s, SGLang's benchmark {pair['SGLang']:,.1f}, "
                  f"ratio {pair['05'] / pair['SGLang']:.3f}", flush=True)
            rounds += [pair] if turn else []
    ours, theirs = (statistics.mean(pair[client] for pair in rounds) for client in ("05", "SGLang"))
    ratios = sorted(pair["05"] / pair["SGLang"] for pair in rounds)
    print(f"{len(rows)} prompts, {args.concurrency} streams, {args.max_tokens} tokens each, mean of {args.rounds} rounds: 05 {ours:,.1f} tok/s, "
          f"SGLang's benchmark {theirs:,.1f}, {100 * ours / theirs:.1f} % | ratios of the rounds {ratios[0]:.3f} to {ratios[-1]:.3f}, "
          f"median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
