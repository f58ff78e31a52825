"""A drafter to train, which pass trains it, and one optimizer step."""
from __future__ import annotations

import math

import torch
import torch.distributed as dist

from eagle3 import fused, ttt
from eagle3.drafter import Drafter, NamedTensors
from eagle3.optimizers import AdamW, Gradients, Muon
from eagle3.stage import UserError


def choose_pass(draft: Drafter):
    """The module whose `ttt_pass` trains this drafter: `fused` where it runs, else `ttt`, the slow definition."""
    return fused if fused.runs(draft) else ttt


def loss_weights(args) -> list[float]:
    """Weight of each TTT step in the loss."""
    return args.step_weights or [args.step_decay ** k for k in range(args.ttt_steps)]


def learning_rate(step: int, total: int, peak: float, warmup: int, scheduler: str, floor: float = 0.0,
                  decay_ratio: float = 0.2) -> float:
    """Of step `step` (from 0) of `total`: linear warm-up to `peak`, then by `scheduler`.

        cosine, linear  down over all steps that are left
        constant        `peak`
        wsd             warm-up, stable, decay (MiniCPM, arXiv 2404.06395): `peak`, and over the last `decay_ratio` of
                        all steps down as 1 - sqrt, which beats a linear decay and, over a fifth of the steps, does as
                        well as cosine (arXiv 2405.18392)

    What goes down goes down to floor * peak, which the step behind the last one would have.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    begin = max(warmup, total - round(decay_ratio * total)) if scheduler == "wsd" else warmup
    progress = max(0, step - begin) / max(1, total - begin)
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0,
            "wsd": 1 - math.sqrt(progress)}[scheduler]
    return peak * (left + floor * (1 - left))


def average_decay(decay: float, step: int) -> float:
    """Weight of the old average after step `step` (from 1).

    Small at first, as TensorFlow's ExponentialMovingAverage has it with `num_updates`. After 6 steps less than 0.1 %
    of the random start is left, however large `decay` is; with 0.999 from the first step on, 94 % would be left after
    60.
    """
    return min(decay, (1 + step) / (10 + step))


def make_drafter(args, inputs, head: torch.Tensor, process) -> Drafter:
    """Fresh weights, or another drafter's. Raises UserError.

    args: max_seq_len, ttt_steps and seed; inputs: inputs.Inputs; head (Vt, H).
    """
    draft = Drafter(inputs.shape, process.dtype, process.device, inputs.target.tensor("embed"), head[inputs.draft_ids],
                    inputs.draft_ids, args.max_seq_len + args.ttt_steps)
    if inputs.begin_with:
        try:
            draft.load(inputs.begin_with.tensors(head))
        except UserError as error:
            raise UserError(f"{inputs.begin_with.folder}: {error}") from None
        return draft
    draft.initialise(args.seed)
    if process.world > 1:  # GPUs of two models draw other numbers from one seed
        dist.broadcast(draft.master.flat, 0)
        draft.refresh()
    return draft


class Trainer:
    """A drafter with its gradients and optimizer. One `update` is one optimizer step."""

    def __init__(self, draft: Drafter, args):
        """args: optimizer, beta1, beta2, weight_decay, max_grad_norm, ema, loss, ttt_steps, step_weights, step_decay.
        """
        self.draft, self.args, self.step = draft, args, 0
        master, weights = draft.master.flat, draft.shape.weights()
        self.ttt = choose_pass(draft)
        self.grads = Gradients(weights, draft.dtype, master.device)
        optimizer = {"adamw": AdamW, "muon": Muon}[args.optimizer]
        self.optimizer = optimizer(draft, (args.beta1, args.beta2), args.weight_decay)
        self.average = NamedTensors(weights, master.dtype, master.device) if args.ema else draft.master
        self.average.flat.copy_(master)
        self.grad_norm = master.new_zeros(())  # of the last step, before clipping; on the device

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of the state that a checkpoint holds besides the step.

        Random numbers depend on seed, epoch and batch alone, so there is no state of theirs.
        """
        kept = {"master": self.draft.master.flat, **self.optimizer.state()}
        return kept | ({"average": self.average.flat} if self.args.ema else {})

    def not_finite(self) -> list[str]:
        """What of all this is not finite, or too large for the exported dtype. Waits for the device."""
        named = {name: torch.linalg.vector_norm(tensor, math.inf) for name, tensor in self.tensors().items()}
        named = {"weights" if name == "master" else name: norm for name, norm in named.items()}
        named["gradient norm"] = self.grad_norm
        largest = dict(zip(named, torch.stack([norm.double() for norm in named.values()]).tolist()))
        found = [name for name, value in largest.items() if not math.isfinite(value)]
        exported = largest["average" if self.args.ema else "weights"]
        if not found and exported > torch.finfo(getattr(torch, self.args.export_dtype)).max:
            found = [f"weights as {self.args.export_dtype} (--export-dtype)"]
        return found

    def update(self, batches, turns: int, counts, lr: float) -> torch.Tensor:
        """Take `turns` micro-batches (or None) from the iterator `batches` and change the weights once.

        counts (K,): loss rows of the whole step, on all ranks: the loss is a mean over them, whoever computes which
        part. Returns the pass's sums of this rank (K, 4).
        """
        args, draft, grads = self.args, self.draft, self.grads
        master = draft.master.flat
        step_weights = [weight / max(1, n) for weight, n in zip(loss_weights(args), counts)]
        sums = torch.zeros(len(counts), 4, dtype=master.dtype, device=master.device)
        grads.begin(first=True, last=not turns)
        if not turns:  # fewer micro-batches were left than ranks
            grads.done(*self.ttt.reduce_order(draft.shape))
        for turn in range(turns):
            grads.begin(first=turn == 0, last=turn == turns - 1)
            batch = next(batches)
            if batch:
                sums += self.ttt.ttt_pass(draft, batch, step_weights, grads, args.loss)[0]
            else:  # nothing of it could be read
                grads.done(*self.ttt.reduce_order(draft.shape))
        grads.wait()
        self.ttt.finish(grads, draft)
        self.grad_norm = torch.linalg.vector_norm(grads.flat, dtype=master.dtype)
        clip = (args.max_grad_norm / (self.grad_norm + 1e-6)).clamp_(max=1)  # stays on the device
        self.step += 1
        self.optimizer.update(grads, clip, lr, self.step)
        if args.ema:
            self.average.flat.lerp_(master, 1 - average_decay(args.ema, self.step))
        return sums


class HostCopy:
    """A small tensor on its way to the host.

    Reading it waits for this copy alone, not for what was launched after it.
    """

    def __init__(self, tensor: torch.Tensor):
        self.event = torch.cuda.Event() if tensor.is_cuda else None
        self.value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.value.copy_(tensor, non_blocking=True)
        if self.event:
            self.event.record()

    def read(self) -> torch.Tensor:
        if self.event:
            self.event.synchronize()
        return self.value
