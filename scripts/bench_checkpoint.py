"""What a checkpoint costs 04's steps, at the size of Kimi-K2.5's drafter: in line, and written beside the steps.

    python3 scripts/bench_checkpoint.py --output-dir /data/bench          # on a GPU; 34 GB of files, removed at the end
    python3 scripts/bench_checkpoint.py --size toy --output-dir /tmp/b    # on a CPU, to try the script itself

It steps on one batch of random states (T 4096), saves through 04's own Keeper, and goes on stepping until the file is
on the disk. stall: how long save() holds the steps; written: until the checkpoint has its name; step: median of the
steps before, and median and longest of those while it is written. What it then holds must be the weights of its own
step, whatever was trained since.
"""
import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_train import SIZES, loss_rows, make_trainer, random_batch  # noqa: E402
from eagle3 import keeper as room  # noqa: E402
from eagle3.checkpoints import STATE_TENSORS  # noqa: E402
from eagle3.drafter import Shape  # noqa: E402
from eagle3.keeper import Keeper  # noqa: E402
from eagle3.processes import Process  # noqa: E402


def stepping(trainer, batch, counts, steps: int = 0, until=lambda: False) -> list[float]:
    """Seconds of each step: so many of them, or until something holds."""
    times = []
    while len(times) < steps or steps == 0 and not until():
        begun = time.monotonic()
        trainer.update(iter([batch]), 1, counts, 1e-5)
        if batch.aux.is_cuda:
            torch.cuda.synchronize()
        times.append(time.monotonic() - begun)
    return times


def measure(kind: str, keeper: Keeper, batch, counts, folder: Path) -> None:
    """One row of the table."""
    trainer = keeper.trainer
    before = stepping(trainer, batch, counts, 8)[3:]
    master = trainer.draft.master.flat.cpu().clone()
    begun = time.monotonic()
    keeper.save(None, None, 0.0, {})
    stall = time.monotonic() - begun
    meanwhile = stepping(trainer, batch, counts, until=lambda: not keeper.behind.thread or
                         not keeper.behind.thread.is_alive())
    written = time.monotonic() - begun
    keeper.settle()
    path = folder / f"checkpoint-{keeper.saved}"
    size = sum(file.stat().st_size for file in path.rglob("*"))
    during = f"{statistics.median(meanwhile) * 1000:.0f} ms, longest {max(meanwhile) * 1000:.0f}" if meanwhile else "-"
    print(f"| {kind} | {size / 1e9:.2f} GB | {stall:.2f} s | {written:.1f} s | "
          f"{statistics.median(before) * 1000:.0f} ms | {during} | {len(meanwhile)} |", flush=True)
    with safe_open(path / STATE_TENSORS, "pt") as file:
        assert torch.equal(file.get_tensor("master"), master), f"{path} does not hold what was when it was saved"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True, help="on the disk that is measured; must be empty")
    parser.add_argument("--size", choices=SIZES, default="kimi")
    parser.add_argument("--kv-heads", type=int, default=64)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size, folder = SIZES[args.size], args.output_dir / "checkpoints"
    folder.mkdir(parents=True)
    shape = Shape(kv_heads=min(args.kv_heads, size["heads"]), **size)
    trainer = make_trainer(shape, device, dtype, "adamw")
    vars(trainer.args).update(output_dir=folder, export_dtype="bfloat16", keep_checkpoints=9, tensorboard=False)
    length = 4096 if args.size == "kimi" else 128
    batch = random_batch(shape, [length] * 2, [0] * 2, 3, device, dtype)
    counts = loss_rows(batch, 3)
    inputs = SimpleNamespace(config_json={}, provenance=lambda *_: {})
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"torch {torch.__version__} | {gpu}\n\n| checkpoint | size | stall | written after | step before | step "
          "meanwhile | steps meanwhile |\n|---|---|---|---|---|---|---|", flush=True)
    left = room.host_memory_left
    for kind in ("in line", "beside the steps"):
        room.host_memory_left = left if kind != "in line" else lambda: 0
        stepping(trainer, batch, counts, 2)
        keeper = Keeper(trainer.args, Process(0, 1, device, dtype), inputs, trainer)
        begun = time.monotonic()
        keeper.open(1, 0, None)
        taken = time.monotonic() - begun
        with keeper:
            measure(kind, keeper, batch, counts, folder)
    print(f"\nmemory taken in {taken:.1f} s before the first step", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
