"""03's restart and 04's memory over very many samples: a folder of tiny ones is made, and the real scripts run on it.

    python3 scripts/bench_million.py --output-dir /data/million --make      # a million; 16 GB of disk, an inode each
    python3 scripts/bench_million.py --output-dir /data/million --restart
    python3 scripts/bench_million.py --output-dir /data/million --records --train --ranks 8
    python3 scripts/bench_million.py --output-dir /data/million --train --epochs 1 --order follow   # or plan

--make: responses/, hidden_states/ as 03 leaves it when it is killed at its very end (every sample in place, no index,
no manifest), a target and a vocabulary map; hidden 16, 24 to 56 tokens. --restart: 03 on that folder, twice: what it
takes until it knows what is in place, and until it is done. --records: what 04's first check would leave beside the
samples, without opening each (of this size 04 checks a thousand a second and core). --train: 04 on the CPU, in so
many ranks, with all epochs planned, ended after a few steps. With each line of the log, the processor's seconds so
far, and the most memory of all processes until the next one (Pss: what several share counts once), with what of it
lies in no file.
"""
import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from eagle3.check_records import key_of, write_chunk  # noqa: E402
from eagle3.checked import CHECK_CHUNK, record_of  # noqa: E402
from eagle3.file_stat import stat_of  # noqa: E402
from eagle3.journal import plan_order  # noqa: E402
from eagle3.processes import Process  # noqa: E402
from eagle3.sources import read_source  # noqa: E402
from eagle3.stage import sha256_file, write_manifest  # noqa: E402
from eagle3.states import check_sample, sample_path  # noqa: E402
from eagle3.target import Target  # noqa: E402

VOCAB, HIDDEN, KINDS = 97, 16, 500
NAME = "m{:09d}-t0"


# ---- the folder ----
def make_target(folder: Path) -> torch.Tensor:
    """A target of which only what 04 reads exists; returns its head (Vt, H)."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    embed, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    text = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_attention_heads": 2, "v_head_dim": 8,
            "intermediate_size": 32, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 4096,
            "bos_token_id": 0, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps({"architectures": ["KimiK25ForConditionalGeneration"],
                                                    "text_config": text}))
    save_file({"language_model.model.embed_tokens.weight": embed, "language_model.lm_head.weight": head,
               "language_model.model.norm.weight": torch.ones(HIDDEN)}, folder / "model.safetensors")
    return head


def make_kinds(head: torch.Tensor) -> list[dict]:
    """KINDS samples without a name: what stands in the file of each, and in its rows. The last states choose tokens."""
    rng, kinds = np.random.default_rng(0), []
    facts = {"target": "tiny", "capture_layers": "2,4,6", "sglang_version": "0.5.23", "patch_hash": "none",
             "dtype": "float32"}
    for _ in range(KINDS):
        T, P = int(rng.integers(24, 57)), int(rng.integers(4, 16))
        ids = torch.from_numpy(rng.integers(0, VOCAB, T + 1))
        last = head[ids[1:]]
        tensors = {"aux_hidden_states": torch.randn(T, 3 * HIDDEN), "last_hidden_states":
                   last / last.square().mean(-1, keepdim=True).sqrt(), "input_ids": ids[:-1].int(),
                   "loss_mask": (torch.arange(T) >= P).to(torch.uint8)}
        metadata = {"schema": "1", "id": NAME.format(0), "prompt_len": str(P), **facts,
                    "checksum": "sha256:" + 64 * "0"}
        data = save(tensors, metadata)
        digest = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little"):]).hexdigest()
        ids = ids[:-1].tolist()
        kinds.append({"file": data.replace(64 * b"0", digest.encode()), "tokens": T, "prompt_len": P, "ids": ids,
                      "checksum": f"sha256:{digest}"})
    return kinds


def make(folder: Path, count: int) -> None:
    kinds = make_kinds(make_target(folder / "target"))
    mapping, responses, states = (folder / name for name in ("vocab_mapping", "responses", "hidden_states"))
    for made in (mapping, responses, states):
        made.mkdir()
    np.save(mapping / "t2d.npy", np.ones(VOCAB, bool)), np.save(mapping / "d2t.npy", np.zeros(VOCAB, np.int64))
    write_manifest(mapping, "02_build_vocab")
    for shard in range(256):
        (states / f"{shard:02x}").mkdir()

    def put(number: int) -> None:
        name = NAME.format(number)
        data = kinds[number % KINDS]["file"].replace(NAME.format(0).encode(), name.encode(), 1)
        sample_path(states, name).write_bytes(data)

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(put, range(count), chunksize=1000):
            pass
    for part in range(0, count, 10_000):
        with open(responses / f"part-{part // 10_000:05d}.jsonl", "w") as file:
            for number in range(part, min(count, part + 10_000)):
                kind = kinds[number % KINDS]
                ids, P = kind["ids"], kind["prompt_len"]
                row = {"id": NAME.format(number), "prompt_ids": ids[:P], "response_ids": ids[P:]}
                file.write(json.dumps(row) + "\n")
    write_manifest(responses, "01_generate", counts={"kept": count},
                   files={path.name: sha256_file(path) for path in sorted(responses.glob("part-*.jsonl"))})
    facts = {"target": "tiny", "capture_layers": [2, 4, 6], "sglang_version": "0.5.23", "patch_hash": "none",
             "dtype": "float32", "hidden_size": HIDDEN}
    with open(states / "landed.jsonl", "w") as file:
        file.write(json.dumps({"facts": facts}) + "\n")
        for number in sorted(range(count), key=lambda number: plan_order(NAME.format(number))):
            kind = kinds[number % KINDS]
            file.write(json.dumps({"id": NAME.format(number), "tokens": kind["tokens"], "prompt_len":
                                   kind["prompt_len"], "truncated": False, "next_token": 1, "checksum":
                                   kind["checksum"]}) + "\n")


# ---- what is measured ----
def memory(pids: list[int]) -> tuple[float, float]:
    """(Pss, of it what lies in no file) of some processes, in MiB."""
    sums = {"Pss": 0, "Pss_Anon": 0}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        for name in sums:
            sums[name] += int(re.search(rf"^{name}:\s+(\d+)", text, re.M)[1])
    return sums["Pss"] / 1024, sums["Pss_Anon"] / 1024


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in tree(int(child)))]


def cpu_seconds(pids: list[int]) -> float:
    """What they have used of the processor so far."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def watched(command: list, env: dict | None = None, until: str = "done: ") -> None:
    """Run it, print its lines with the most memory until the next one, and end it at a line that holds `until`."""
    begun, lines = time.monotonic(), []
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, **(env or {})})
    with ThreadPoolExecutor(1) as pool:
        def read() -> None:
            for line in process.stdout:
                cpu = cpu_seconds(tree(process.pid))
                lines.append([time.monotonic() - begun, f"{cpu:7.1f} s CPU | {line.rstrip()[20:150]}", 0, 0])
                print(f"{lines[-1][0]:7.1f} s | {lines[-1][1]}", file=sys.stderr, flush=True)
                if until in line:
                    process.terminate()

        reading = pool.submit(read)
        while not reading.done():
            whole, anonymous = memory(tree(process.pid))
            if lines:
                lines[-1][2:] = max(lines[-1][2], whole), max(lines[-1][3], anonymous)
            time.sleep(0.5)
    for seconds, line, whole, anonymous in lines:
        print(f"{seconds:7.1f} s | {whole:8,.0f} MiB | {anonymous:8,.0f} MiB in no file | {line}", flush=True)
    process.wait()
    if not any(until in line for _, line, *_ in lines):
        sys.exit(f"ended with {process.returncode}, before a line with {until!r}")
    print(f"most: {max(line[2] for line in lines):,.0f} MiB, {max(line[3] for line in lines):,.0f} MiB in no file")


def restart(folder: Path) -> None:
    for number in (1, 2):
        (folder / "hidden_states/manifest.json").unlink(missing_ok=True)
        print(f"restart {number}", flush=True)
        watched([sys.executable, "-u", ROOT / "03_extract.py", "--data-dir", folder / "responses", "--base-url",
                 "http://127.0.0.1:9", "--output-dir", folder / "hidden_states"])


def records(folder: Path) -> None:
    """What 04's first check would leave in hidden_states/checked/: of each kind it is computed once."""
    process, target = Process(0, 1, torch.device("cpu"), torch.float32), Target(folder / "target")
    head, draft_ids = target.tensor("head"), torch.arange(VOCAB)
    source = read_source(folder / "hidden_states", target, draft_ids, folder / "none")
    beside, known = source.folder / "checked" / key_of(source, head, process), {}
    beside.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(source.index), CHECK_CHUNK):
        rows, found = source.index[start:start + CHECK_CHUNK], []
        for row in rows:
            path, kind = sample_path(source.folder, row["id"]), int(row["id"][1:10]) % KINDS
            if kind not in known:
                problem, tensors = check_sample(path, row, source.facts, len(head), target.final_norm())
                known[kind] = record_of(row, None, problem, tensors, head, draft_ids, False)
            record, mass = known[kind]
            found.append((record | {"id": row["id"], "stat": stat_of(path)}, mass))
        write_chunk(beside, start, torch.cat([mass for _, mass in found]), [record for record, _ in found])


ORDERS = {"shuffle": [], "plan": ["--order", "plan"], "follow": ["--follow"]}


def train(folder: Path, ranks: int, epochs: int, order: str) -> None:
    shutil.rmtree(folder / "output", ignore_errors=True)
    ranked = ["-m", "torch.distributed.run", "--nproc_per_node", ranks] if ranks > 1 else []
    watched([sys.executable, "-u", *ranked, ROOT / "04_train.py", "--verifier-path", folder / "target",
             "--data-dir", folder / "hidden_states", "--vocab-mapping-dir", folder / "vocab_mapping",
             "--output-dir", folder / "output", "--epochs", epochs, "--lr", 1e-3, "--val-ratio", 0.0001,
             "--batch-tokens", 512, "--num-workers", 2, "--log-every", 1, *ORDERS[order]],
            {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}, until="step 6/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--records", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--order", choices=ORDERS, default="shuffle")
    args = parser.parse_args()
    if args.make:
        begun = time.monotonic()
        make(args.output_dir, args.samples)
        print(f"made {args.samples:,} samples in {time.monotonic() - begun:.0f} s", flush=True)
    if args.restart:
        restart(args.output_dir)
    if args.records:
        records(args.output_dir)
    if args.train:
        train(args.output_dir, args.ranks, args.epochs, args.order)


if __name__ == "__main__":
    main()
