"""FP8 states: e4m3 numbers, and one float32 scale for each layer of each row; what they stand for is their product.

Files hold them (states.py), the loader hands them to the device as they are, and there they become numbers of the dtype
that the target computes in: the passes see what they always saw. patches/eagle3_capture_files.py makes them, on the
GPU of the server.

Shapes: N rows, H hidden, S layers side by side in a row.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn


@dataclass
class Quantised:
    """N rows of FP8 states. Sliced it is a view, as a tensor is: rows are read straight into it."""
    values: torch.Tensor  # (N, S*H), FP8
    scales: torch.Tensor  # (N, S), float32
    dtype: torch.dtype  # of the numbers that they were

    @classmethod
    def empty(cls, rows: int, width: int, layers: int, dtype: torch.dtype, pin: bool = False) -> Quantised:
        """For `rows` rows of `layers` states of H = width / layers each, on the host."""
        return cls(torch.empty(rows, width, dtype=FP8, pin_memory=pin),
                   torch.empty(rows, layers, dtype=torch.float32, pin_memory=pin), dtype)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> Quantised:
        return Quantised(self.values[rows], self.scales[rows], self.dtype)

    def to(self, device, dtype: torch.dtype, non_blocking: bool = False) -> torch.Tensor:
        """(N, S*H) numbers on the device: FP8 values cross over to it, and are multiplied there."""
        values, scales = (part.to(device, non_blocking=non_blocking) for part in (self.values, self.scales))
        numbers = values.to(self.dtype)  # exact: 16 bits hold every e4m3 number
        # In place, in float32 and rounded once: no second copy of the states
        numbers.view(*scales.shape, -1).mul_(scales[:, :, None])
        return numbers.to(dtype)

    def float(self) -> torch.Tensor:
        """(N, S*H) float32 on the host."""
        return self.to("cpu", torch.float32)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def finite(states: torch.Tensor | Quantised) -> bool:
    """Whether all numbers of a tensor of states are, or of scales."""
    if isinstance(states, Quantised):
        return finite(states.values) and finite(states.scales)
    if not states.numel():
        return True
    if states.dtype == FP8:  # which has no infinity, and two NaNs: all bits but the sign's
        return int((states.view(torch.uint8) & 0x7F).max()) < 0x7F
    return all(bool(extreme.isfinite()) for extreme in states.aminmax())  # of a tensor with a NaN they are NaN
