"""Figures of training: what they are made of, metrics.jsonl, the parts of a log line."""
from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch

from eagle3.stage import UserError, log, write_atomic

# Dense bf16 by the makers' data sheets: what MFU is counted against
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "RTX PRO 6000": 504}


def step_metrics(sums: torch.Tensor, counts) -> dict:
    """loss_k, full_acc_k, cond_acc_k from the sums of a pass over all ranks and the loss rows of each step.

    None where nothing was counted: no draft of the step before was right, or no response is that long.
    """
    metrics = {}
    for k, (loss, counted, chain, before) in enumerate(sums.tolist()):
        metrics |= {f"loss_{k}": share(loss, counts[k]), f"full_acc_{k}": share(chain, counted),
                    f"cond_acc_{k}": share(chain, before)}
    return metrics


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class Window:
    """What happened since the last log line."""

    def __init__(self, steps: int):
        self.steps = steps  # of TTT
        self.clear()

    def clear(self) -> None:
        self.sums, self.counts = 0, np.zeros(self.steps, np.int64)
        self.missing = np.zeros(self.steps)  # of these counts: rows of this rank that could not be read
        self.tokens = self.flops = self.waited = 0
        self.begun = time.monotonic()

    def add(self, sums: torch.Tensor, counts: np.ndarray, tokens: int) -> None:
        self.sums, self.counts, self.tokens = self.sums + sums.double(), self.counts + counts, self.tokens + tokens

    def totals(self) -> torch.Tensor:
        """(K, 5) on the device: the pass's sums, and the rows missing; of this rank."""
        missing = torch.as_tensor(self.missing, dtype=self.sums.dtype, device=self.sums.device)
        return torch.cat([self.sums, missing[:, None]], 1)

    def split(self, totals: torch.Tensor) -> tuple[torch.Tensor, list]:
        """(sums (K, 4), loss rows that were read) of what `totals` gave, flattened, summed over the ranks."""
        totals = totals.view(-1, 5)
        return totals[:, :4], (self.counts - totals[:, 4].numpy()).tolist()

    def kept(self) -> dict | None:
        """What a checkpoint keeps of it, bit by bit; None where nothing happened yet."""
        if not torch.is_tensor(self.sums):
            return None
        return {"sums": self.sums.tolist(), "counts": self.counts.tolist(), "missing": self.missing.tolist()}

    def take_up(self, counts: list[int], kept: list[dict], device) -> None:
        """Go on from what `kept` gave on the ranks of before: this rank's share, none where they were fewer.

        counts: that of any of them, since they are of whole steps.
        """
        self.sums, self.counts = torch.zeros(self.steps, 4, dtype=torch.float64, device=device), np.array(counts)
        for own in kept:
            self.sums = self.sums + torch.tensor(own["sums"], dtype=torch.float64, device=device)
            self.missing = self.missing + np.array(own["missing"])


def listed(metrics: dict, name: str, steps: int, digits=3) -> str:
    values = [metrics[f"{name}_{k}"] for k in range(steps)]
    return " ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def step_line(metrics: dict, steps: int) -> str:
    return (f"loss {metrics['loss']:.3f} | loss_k {listed(metrics, 'loss', steps)} | "
            f"full_acc {listed(metrics, 'full_acc', steps, 2)} | cond_acc {listed(metrics, 'cond_acc', steps, 2)} | "
            f"accept_length {metrics['accept_length']:.2f} | lr {metrics['lr']:.2e} | "
            f"grad_norm {metrics['grad_norm']:.3g}")


def validation_line(metrics: dict, by_position: list[float], steps: int) -> str:
    return (f"loss_k {listed(metrics, 'loss', steps)} | full_acc {listed(metrics, 'full_acc', steps)} | "
            f"cond_acc {listed(metrics, 'cond_acc', steps)} | accept_length {metrics['accept_length']:.3f} | "
            f"by position {' '.join(f'{share:.3f}' for share in by_position)}")


def gpu_use(flops: float, device) -> str:
    """What the log says about the GPU; flops: a second, of this rank."""
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    peak = next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
    rate = f"MFU {flops / 1e12 / peak:.0%}" if peak else f"{flops / 1e12:.0f} TFLOP/s"
    return f" | {rate} | {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"


class Metrics:
    """metrics.jsonl (and TensorBoard): rows {"step", ...}.

    Nothing in it depends on time: a resumed run ends in the same bytes.
    """

    def __init__(self, output: Path, step: int, tensorboard: bool):
        self.path, self.writer = output / "metrics.jsonl", None
        rows = self.read_rows() if self.path.exists() else []
        # A killed run may have written past its last checkpoint
        self.rows = [row for row in rows if row["step"] <= step]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("--tensorboard: the package tensorboard is not installed.") from None
            self.writer = SummaryWriter(output / "tensorboard", purge_step=step + 1)

    def read_rows(self) -> list[dict]:
        """Its rows, less what a kill has torn and what is damaged."""
        rows, lines = [], self.path.read_text(errors="replace").splitlines()
        for line in lines:
            try:
                row = json.loads(line)
                rows.append(row | {"step": int(row["step"])})
            except (ValueError, KeyError, TypeError):
                if line != lines[-1]:
                    log(f"{self.path}: a damaged line is left out: {line[:60]!r}")
        return rows

    def add(self, row: dict) -> None:
        self.rows.append(row)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        for key, value in row.items() if self.writer else ():
            if value is not None:
                self.writer.add_scalar(key, value, row["step"])
