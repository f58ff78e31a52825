"""What a step trains on: its samples, as planned or as 03 lands them, and this rank's batches of them on the device."""
from __future__ import annotations

import time
from collections import Counter
from typing import Iterator

import numpy as np
import torch
import torch.distributed as dist

from eagle3.batches import Batch, Sample, add_noise
from eagle3.drafter import Shape
from eagle3.follow import Follow
from eagle3.loader import Reader, feed
from eagle3.metrics import Window
from eagle3.processes import Process
from eagle3.schedule import Plan


class Supply:
    """Of this rank. A bin of the plan is a list of indices of its training samples: one micro-batch."""

    def __init__(self, args, process: Process, plan: Plan, shape: Shape, follow: Follow | None, window: Window,
                 left_out: Counter):
        """args: ttt_steps, num_workers, noise_std and seed.

        window and left_out {id: times} count what could not be read, window also what was waited for.
        """
        self.args, self.process, self.plan, self.shape, self.follow = args, process, plan, shape, follow
        self.window, self.left_out, self.K = window, left_out, args.ttt_steps

    def wait(self, step: int) -> None:
        """--follow: until 03 has landed what `step` trains on, or the run is about to leave."""
        begun = time.monotonic()
        self.follow.wait(step)
        self.window.waited += time.monotonic() - begun

    def present(self, indices: list[int]) -> list[Sample] | None:
        """The samples of a bin without those that failed; None where --follow has not all of them yet."""
        plan = self.plan
        if self.follow:
            return self.follow.take(plan.planned.train_at[indices].tolist())
        if plan.found is not None:
            return [plan.kept[i] for i in plan.found[indices] if i >= 0]
        return [plan.train[i] for i in indices]

    def members_and_counts(self, bins: list[list[int]]) -> tuple[list[list[Sample]], np.ndarray]:
        """The samples of each of this rank's bins, and the step's loss rows (K,) over all ranks."""
        members = [self.present(indices) for indices in bins[self.process.rank::self.process.world]]
        counted = members if self.follow else map(self.present, bins)  # following, a rank knows only of its own samples
        each = (np.array(sample.counts(self.K)) for some in counted for sample in some)
        counts = sum(each, np.zeros(self.K, np.int64))
        if self.follow and self.process.world > 1:
            dist.all_reduce(torch.from_numpy(counts))
        return members, counts

    def batches(self, done: int) -> Iterator[Batch | None]:
        """This rank's batches of all steps behind `done`, one after the other; None where nothing of one was read."""
        args, process = self.args, self.process
        planned = ((epoch, indices) for epoch, bins in self.plan.schedule[done:]
                   for indices in bins[process.rank::process.world])
        reader = Reader(self.K, self.shape, process.device.type == "cuda", len(self.plan.train))
        for (epoch, indices), loaded, waited in feed(planned, reader.load, args.num_workers, process.device,
                                                     process.dtype, lambda item: self.present(item[1])):
            self.window.waited += waited
            for sample in loaded.left_out:
                self.window.missing += sample.counts(self.K)
                self.left_out[sample.id] += 1
            if loaded.batch:
                self.window.flops += loaded.batch.flops(self.shape, self.K)
                if args.noise_std:
                    add_noise(loaded.batch, args.noise_std, f"{args.seed}:{epoch}:{indices}")
            yield loaded.batch
