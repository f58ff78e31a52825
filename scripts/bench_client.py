"""What does 05_benchmark.py's own client cost? Its tok/s beside that of SGLang's serving benchmark, in turns, on one running server.

    python3 scripts/serve.py --config configs/quickstart-gpu.yaml --role speculative --log server.log      # in another shell
    python3 scripts/bench_client.py --base-url http://127.0.0.1:30212 --prompts configs/quickstart_prompts.jsonl --tokenizer scripts/tiny_kimi

Both send the same prompts (05 as ids, SGLang's benchmark as their text), the same number in flight, answers of --max-tokens tokens at
temperature 0, and empty the radix cache first. The first round warms both up and is not counted. Needs a server with EAGLE3: 05 refuses
another; the counts of speculation are part of what it reads.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent


def run(command: list, what: str) -> None:
    done = subprocess.run([sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"bench_client: {what} failed:\n{done.stdout[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with `messages` or `prompt`")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.prompts.open()][:args.limit]
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=True)
    texts = [tokenizer.apply_chat_template(row.get("messages") or [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True,
                                           tokenize=False) for row in rows]
    speeds = {"05": [], "SGLang": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours, theirs, figures = folder / "ours.jsonl", folder / "theirs.jsonl", folder / "figures.jsonl"
        ours.write_text("".join(json.dumps({"id": str(i), "prompt_ids": tokenizer.encode(text)}) + "\n" for i, text in enumerate(texts)))
        theirs.write_text("".join(json.dumps({"conversations": [{"content": text}, {"content": "unused"}]}) + "\n" for text in texts))
        for turn in range(args.rounds + 1):
            report = folder / f"report{turn}"
            run([ROOT / "05_benchmark.py", "--base-url", args.base_url, "--prompts", ours, "--fixed-length", "--max-tokens", args.max_tokens,
                 "--concurrency", args.concurrency, "--output-dir", report], "05_benchmark.py")
            run(["-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", args.base_url, "--model", args.tokenizer, "--tokenizer",
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
            for client in speeds if turn else ():
                speeds[client].append(pair[client])
    ours, theirs = (statistics.median(values) for values in speeds.values())
    print(f"{len(rows)} prompts, {args.concurrency} streams, {args.max_tokens} tokens each, median of {args.rounds}: 05 {ours:,.1f} tok/s, "
          f"SGLang's benchmark {theirs:,.1f}, {100 * ours / theirs:.1f} %")


if __name__ == "__main__":
    main()
