"""What FP8 states cost in acceptance: drafters trained on each kind of the same states, judged on bf16 ones.

    python3 scripts/bench_states.py --data-dir hidden_states/ --work-dir /data/kinds --seeds 0 1 2 --jobs 4 -- \\
      --config configs/kimi-k2.5-10k.yaml

Behind `--`: flags of 04_train.py, the same for every drafter. A share of the samples, the same for all, is held out and
stays in bf16, as it is when the drafter is served. `one-scale`, which 03 does not write, is FP8 with a single scale for
all layers of a token.

Reads   --data-dir: bf16 states, complete
Writes  --work-dir: a folder of states for each kind, one held out, an output folder for each drafter; kinds.json
Stop it any way, at any time; the same command goes on.
"""
import argparse
import concurrent.futures
import hashlib
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "patches")]
import eagle3_capture_files as capture_files  # noqa: E402
from eagle3.checked import one_core_each  # noqa: E402
from eagle3.inputs import read_index  # noqa: E402
from eagle3.journal import plan_order  # noqa: E402
from eagle3.quantised import Quantised  # noqa: E402
from eagle3.stage import (UserError, log, raising, read_json, read_manifest, run, write_atomic,  # noqa: E402
                          write_manifest)
from eagle3.states import (IN_FP8, KINDS, SCALES, StateFile, check_sample, kind_of, sample_path,  # noqa: E402
                           token_bytes)

ONE_SCALE = "one-scale"


def write_folder(folder: Path, manifest: dict, rows: list[dict]) -> None:
    """Index and manifest of a folder of states whose samples lie in place."""
    data = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode()
    write_atomic(folder / "index.jsonl", data)
    rest = {key: value for key, value in manifest.items() if key not in ("schema", "stage", "index_sha256")}
    write_manifest(folder, "03_extract", **rest, index_sha256=hashlib.sha256(data).hexdigest())


def hold_out(source: Path, folder: Path, manifest: dict, rows: list[dict], share: float) -> None:
    """Links to `share` of the samples of `source`, always the same."""
    held_out = sorted(sorted(rows, key=lambda row: plan_order(row["id"]))[:max(1, round(share * len(rows)))],
                      key=lambda row: row["id"])
    for row in held_out:
        link = sample_path(folder, row["id"])
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(sample_path(source, row["id"]))
    write_folder(folder, manifest, held_out)


def with_one_scale(source: Path, folder: Path, manifest: dict, row: dict) -> dict:
    """Write what FP8 with one scale for all layers of a token makes of a sample. Its row. Raises UserError."""
    problem, tensors = check_sample(sample_path(source, row["id"]), row, manifest, (1 << 31) - 1, None)
    if problem:
        raise UserError(f"{sample_path(source, row['id'])}: {problem}. Run 03_extract.py --verify there.")
    states, dtype = torch.cat([tensors[name] for name in SCALES], 1), getattr(torch, manifest["dtype"])
    numbers = Quantised(*capture_files.quantised(states, states.shape[1]), dtype).to("cpu", dtype)
    for name, part in zip(SCALES, numbers.split([tensors[name].shape[1] for name in SCALES], 1)):
        tensors[name] = part.contiguous()
    with StateFile(sample_path(source, row["id"])) as file:
        data = save(tensors, file.metadata | {"checksum": ""})
    place = sample_path(folder, row["id"])
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(place, data)
    digest = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little"):]).hexdigest()
    return row | {"checksum": f"sha256:{digest}"}


def make_folders(source: Path, work: Path, kinds: list[str], share: float) -> dict[str, Path]:
    """{kind: folder of states}. Raises UserError."""
    manifest = read_manifest(source, "03_extract")
    if IN_FP8[kind_of(manifest)]:
        raise UserError(f"{source}: holds {kind_of(manifest)} states. Name a folder of bf16 states.")
    rows = read_index(source, manifest["index_sha256"])
    hold_out(source, work / "held_out", manifest, rows, share)
    folders = {kind: source if kind == KINDS[0] else work / "states" / kind for kind in kinds}
    for kind, folder in folders.items():
        if kind in KINDS[1:]:
            done = subprocess.run([sys.executable, "-u", str(ROOT / "scripts/convert_states.py"), "--data-dir",
                                   str(source), "--output-dir", str(folder), "--states", kind])
            if done.returncode:
                raise UserError(f"{folder}: convert_states.py failed: see above.")
        elif kind == ONE_SCALE and not (folder / "manifest.json").exists():
            with one_core_each(8) as pool:
                made = list(pool.map(lambda row: with_one_scale(source, folder, manifest, row), rows))
            write_folder(folder, manifest, made)
    return folders


def train(data: Path, work: Path, name: str, seed: int, flags: list[str]) -> float:
    """accept_length, on what is held out, of a drafter trained on `data`. Raises UserError."""
    output = work / "drafters" / f"{name}-{seed}"
    output.mkdir(parents=True, exist_ok=True)
    with open(f"{output}.log", "w") as file:
        done = subprocess.run([sys.executable, "-u", str(ROOT / "04_train.py"), *flags, "--data-dir", str(data),
                               "--val-data-dir", str(work / "held_out"), "--output-dir", str(output),
                               "--seed", str(seed)], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        last = Path(f"{output}.log").read_text().splitlines()[-1:] or [""]
        raise UserError(f"{output}.log: 04 failed ({last[0]}).")
    found = read_json(output / "best/eagle3.json")["prediction"]["accept_length"]
    log(f"{name} | seed {seed} | accept_length {found:.4f}")
    return found


def main(argv: list[str]) -> None:
    parser = raising(argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                             formatter_class=argparse.RawDescriptionHelpFormatter))
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help="hidden_states/ of 03_extract.py, bf16")
    add("--work-dir", type=Path, required=True)
    add("--kinds", nargs="+", choices=(*KINDS, ONE_SCALE), default=[*KINDS, ONE_SCALE])
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--jobs", type=int, default=1, help="drafters that train at a time, on the same GPU")
    add("--held-out", type=float, default=0.03, metavar="SHARE")
    own = argv[:argv.index("--")] if "--" in argv else argv
    args, flags = parser.parse_args(own), argv[len(own) + 1:]
    source, work = args.data_dir.absolute(), args.work_dir.absolute()
    folders = make_folders(source, work, args.kinds, args.held_out)
    with concurrent.futures.ThreadPoolExecutor(max(1, args.jobs)) as pool:
        trained = {kind: [pool.submit(train, folder, work, kind, seed, flags) for seed in args.seeds]
                   for kind, folder in folders.items()}
        found = {kind: [one.result() for one in some] for kind, some in trained.items()}
    write_atomic(work / "kinds.json", json.dumps({"seeds": args.seeds, "accept_length": found}, indent=1) + "\n")
    manifest, first = read_manifest(source, "03_extract"), statistics.mean(found[args.kinds[0]])
    print(f"\n| states | bytes a token | accept_length, seeds {' '.join(map(str, args.seeds))} | mean | "
          f"against {args.kinds[0]} |\n|---|---|---|---|---|")
    for kind, values in found.items():
        stored, layers = KINDS[1] if kind == ONE_SCALE else kind, len(manifest["capture_layers"])
        size = token_bytes(manifest["hidden_size"], manifest["dtype"], layers, stored)
        size -= 4 * layers if kind == ONE_SCALE else 0
        print(f"| {kind} | {size:,} | {' '.join(f'{value:.4f}' for value in values)} | {statistics.mean(values):.4f} | "
              f"{statistics.mean(values) / first - 1:+.2%} |")
    log(f"done: {work / 'kinds.json'}")


if __name__ == "__main__":
    run(main)
