"""Figures of training: what they are made of, metrics.jsonl, the parts of a log line, and the plot."""
from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from eagle3.stage import UserError, write_atomic

# Dense bf16 by the makers' data sheets: what MFU is counted against
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "RTX PRO 6000": 504}


def step_metrics(sums: torch.Tensor, counts) -> dict:
    """loss_k, full_acc_k, cond_acc_k from the sums of a pass over all ranks and the loss rows of each step."""
    metrics = {}
    for k, (loss, counted, chain, before) in enumerate(sums.tolist()):
        metrics |= {f"loss_{k}": loss / max(1, counts[k]), f"full_acc_{k}": chain / max(1, counted),
                    f"cond_acc_{k}": chain / max(1, before)}
    return metrics


class Window:
    """What happened since the last log line."""

    def __init__(self, steps: int):
        self.sums, self.counts = 0, np.zeros(steps, np.int64)
        self.tokens = self.flops = self.waited = 0
        self.begun = time.monotonic()

    def add(self, sums: torch.Tensor, counts: np.ndarray, tokens: int) -> None:
        self.sums, self.counts, self.tokens = self.sums + sums.double(), self.counts + counts, self.tokens + tokens


def listed(metrics: dict, name: str, steps: int, digits=3) -> str:
    return " ".join(f"{metrics[f'{name}_{k}']:.{digits}f}" for k in range(steps))


def gpu_use(flops: float, device) -> str:
    """What the log says about the GPU; flops: a second, of this rank."""
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    peak = next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
    rate = f"MFU {flops / 1e12 / peak:.0%}" if peak else f"{flops / 1e12:.0f} TFLOP/s"
    return f" | {rate} | {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"


class Metrics:
    """metrics.jsonl (and TensorBoard): rows {"step", ...}. Nothing in it depends on time: a resumed run ends in the
    same bytes.
    """

    def __init__(self, output: Path, step: int, tensorboard: bool):
        self.path, self.writer = output / "metrics.jsonl", None
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows = (json.loads(line) for line in lines if line.endswith("}"))
        # A killed run may have written past its last checkpoint
        self.rows = [row for row in rows if row["step"] <= step]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("--tensorboard: the package tensorboard is not installed.") from None
            self.writer = SummaryWriter(output / "tensorboard", purge_step=step + 1)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        for key, value in row.items() if self.writer else ():
            self.writer.add_scalar(key, value, row["step"])


def plot(metrics: list[dict], path: Path) -> None:
    """training.png: loss and conditional accuracy of each TTT step, in training and on validation samples."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    training = [row for row in metrics if "loss" in row]
    validation = [row for row in metrics if "val_accept_length" in row]
    for axis, name in zip(axes, ("loss", "cond_acc")):
        for k in range(sum(key.startswith("loss_") for key in training[0])):
            for rows, prefix, style in ((training, "", f"C{k}"), (validation, "val_", f"C{k}o--")):
                axis.plot([row["step"] for row in rows], [row[f"{prefix}{name}_{k}"] for row in rows], style,
                          label=None if prefix else f"{name}_{k}")
    for axis, title in zip(axes, ("loss (dashed: validation)", "conditional accuracy (dashed: validation)")):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".tmp"), format="png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    os.replace(path.with_suffix(".tmp"), path)
