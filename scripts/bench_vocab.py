"""How fast is 02_build_vocab.py, and how much memory does it take?

    python scripts/bench_vocab.py --tokens 88000000      about 1.2 GB of rows in a temporary folder, then one timed run

The answers are made up, at Kimi's vocabulary and the real length mix. Rows look as 01 writes them: log-normal lengths
of mean 1,730 cut at 4,096, a third of them prompt, Zipf ids, text of 4 bytes a token.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from eagle3.responses import Answer, Question, answer_row, part_name  # noqa: E402
from eagle3.stage import sha256_file, write_manifest  # noqa: E402
from eagle3.store import ROWS_PER_PART  # noqa: E402
from eagle3.tokens import tokenizer_hash  # noqa: E402

TINY = ROOT / "scripts/tiny_kimi"
VOCAB = 163840


def write_rows(folder: Path, tokens: int) -> tuple[dict, int]:
    """({part: sha256}, rows): `tokens` answer tokens in rows of 01's form."""
    generator, files, n_rows, left = np.random.default_rng(0), {}, 0, tokens
    id_of_rank = generator.permutation(VOCAB)  # frequent ids have as many digits as rare ones
    text = "The value of the object is returned as it was given. " * 400
    while left > 0:
        name = part_name(len(files))
        with open(folder / name, "wb") as file:
            for _ in range(ROWS_PER_PART):
                length = int(min(4096, max(32, generator.lognormal(np.log(1730) - 0.32, 0.8))))
                n_prompt = length // 3
                n_answer = min(length - n_prompt, left)
                ids = id_of_rank[np.minimum(generator.zipf(1.2, n_prompt + n_answer), VOCAB) - 1].tolist()
                messages = [{"role": "user", "content": text[:4 * n_prompt]}]
                usage = {"prompt_tokens": n_prompt, "completion_tokens": n_answer}
                answer = Answer(text[:4 * n_answer], None, [], "stop", usage, model="m", provider="sglang")
                row = answer_row(Question(f"row-{n_rows}-t0", "bench", messages, None, ids[:n_prompt]), answer,
                                 ids[n_prompt:], "server")
                file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
                n_rows, left = n_rows + 1, left - n_answer
                if left <= 0:
                    break
        files[name] = sha256_file(folder / name)
    return files, n_rows


def memory_of(pid: int) -> float:
    """MiB of a process and its children, shared pages counted once (PSS)."""
    total, todo = 0, [pid]
    while todo:
        pid = todo.pop()
        try:
            total += next(int(line.split()[1]) for line in open(f"/proc/{pid}/smaps_rollup") if line.startswith("Pss:"))
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except (OSError, StopIteration):
            pass
    return total / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=88_000_000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "responses"
        data.mkdir()
        files, n_rows = write_rows(data, args.tokens)
        write_manifest(data, "01_generate", inputs={"tokenizer": tokenizer_hash(TINY)},
                       counts={"kept": n_rows, "dropped": {}}, files=files)
        size = sum(path.stat().st_size for path in data.iterdir())
        print(f"{n_rows:,} rows, {args.tokens:,} answer tokens, {size / 1e9:.2f} GB written", flush=True)
        begin, peak = time.monotonic(), 0.0
        argv = ["--data-dir", data, "--tokenizer", TINY, "--output-dir", f"{folder}/vocab", "--draft-vocab-size", 32000,
                "--target-vocab-size", VOCAB, "--workers", args.workers]
        process = subprocess.Popen([sys.executable, "-u", ROOT / "02_build_vocab.py", *map(str, argv)])
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.2)
        seconds = time.monotonic() - begin
        assert process.returncode == 0
        used = os.times()
        print(f"{args.tokens:,} tokens in {seconds:.1f} s ({args.tokens / seconds / 1e6:.1f}M tok/s) "
              f"with {args.workers} workers; at most {peak:.0f} MiB for all its processes; "
              f"{used.children_user + used.children_system:.0f} CPU seconds")


if __name__ == "__main__":
    main()
