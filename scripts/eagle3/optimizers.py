"""Gradients as the passes add them up, and the optimizer that turns them into new weights."""
from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from eagle3.drafter import NamedTensors

EPSILON = 1e-8  # AdamW's


@functools.cache
def triton_runs() -> bool:
    """Whether this GPU and this torch can run the fused kernels: flash attention needs compute capability 8.0."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        import triton  # noqa: F401  comes with torch on Linux
    except ImportError:
        return False
    return True


class Gradients(NamedTensors):
    """The weights' gradients, added up in place over TTT steps and micro-batches; each is all-reduced once it is
    complete.
    """

    def begin(self, first: bool, last: bool) -> None:
        """Start a micro-batch. first: of its optimizer step (what lies in the buffer is old); last: all-reduce what
        gets done.
        """
        if first:
            self.stale, self.waiting = set(self.views), []
        self.last = last

    def add(self, name: str, d_out: torch.Tensor, x: torch.Tensor) -> None:
        """d_out (N, out), x (N, in): adds d_out.T @ x."""
        if name in self.stale:
            torch.mm(d_out.t(), x, out=self[name])
            self.stale.discard(name)
        else:
            self[name].addmm_(d_out.t(), x)

    def add_tensor(self, name: str, value: torch.Tensor) -> None:
        self[name].copy_(value) if name in self.stale else self[name].add_(value)
        self.stale.discard(name)

    def done(self, *names: str) -> None:
        """These are complete in this micro-batch. All ranks must call it with the same names in the same order."""
        if self.last and dist.is_initialized():
            for name in names:
                if name in self.stale:  # this rank had no rows
                    self[name].zero_()
                    self.stale.discard(name)
                self.waiting.append(dist.all_reduce(self[name], async_op=True))

    def wait(self) -> None:
        for name in self.stale:
            self[name].zero_()
        for work in self.waiting:
            work.wait()


@torch.no_grad()
def adamw_(master, weights, grads, first, second, clip, lr: float, step: int, betas: tuple[float, float],
           decay: float) -> None:
    """AdamW (arXiv 1711.05101) over flat tensors; `weights` gets the new master in its own dtype.

    clip: device scalar that scales the gradient; step counts from 1.
    """
    corrections = tuple(1 - beta ** step for beta in betas)
    if master.is_cuda and master.dtype != torch.float64 and triton_runs():
        from eagle3 import kernels
        kernels.adamw_(master, weights, grads, first, second, clip, lr, betas, EPSILON, decay, corrections)
        return
    grads = grads.to(master.dtype) * clip
    first.lerp_(grads, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(grads, grads, value=1 - betas[1])
    denominator = (second / corrections[1]).sqrt_().add_(EPSILON)
    master.mul_(1 - lr * decay).addcdiv_(first / corrections[0], denominator, value=-lr)
    if weights is not master:
        weights.copy_(master)
