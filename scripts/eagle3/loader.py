"""The loader: threads read bins of samples ahead, and copies to the device run beside the computation.

A sample that the disk does not give is left out.
"""
from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from eagle3.batches import Batch, Sample, Unread, collate
from eagle3.checked import MAX_BAD
from eagle3.stage import UserError, log

UNREAD_IN_A_ROW = 8  # the disk is gone


@dataclass
class Loaded:
    """A bin's batch (None: nothing of it could be read), the samples in it, and those left out."""
    batch: Batch | None
    samples: list[Sample]
    left_out: list[Sample]


class Reader:
    """Loads a bin, less the samples that the disk does not give.

    Such a sample is named and counted in `unread` {id: times}, and tried again whenever it is due. The weights of a
    step's loss stay those of its planned rows, with which the other ranks have computed already: the lost rows add
    nothing to the gradient, and no other row weighs more. A run that goes on from an earlier checkpoint reads anew, so
    it is equal to the bytes only where the disk fails as before.
    """

    def __init__(self, steps: int, shape, pin: bool, total: int):
        """steps: of TTT; shape: of the drafter; total: samples that there are."""
        self.steps, self.shape, self.pin, self.total = steps, shape, pin, total
        self.unread, self.in_a_row = Counter(), 0

    def load(self, samples: list[Sample]) -> Loaded:
        """Raises UserError when too many are lost."""
        left_out = []
        while samples:
            try:
                batch = collate(samples, self.steps, self.shape.hidden, self.shape.aux_states, self.pin)
                self.in_a_row = 0
                return Loaded(batch, samples, left_out)
            except Unread as lost:
                self.leave_out(lost)
                left_out.append(lost.sample)
                samples = [sample for sample in samples if sample is not lost.sample]
        return Loaded(None, [], left_out)

    def leave_out(self, lost: Unread) -> None:
        path = getattr(lost.error, "filename", None) or lost.sample.path  # or what the check found in it
        why = " ".join(str(getattr(lost.error, "strerror", None) or lost.error).split())
        log(f"skipped {path} | {why}; it was whole when it was checked")
        self.unread[lost.sample.id] += 1
        self.in_a_row += 1
        if self.in_a_row >= UNREAD_IN_A_ROW or len(self.unread) > max(1, MAX_BAD * self.total):
            raise UserError(f"{path}: not readable ({why}); {len(self.unread)} samples by now, {self.in_a_row} in a "
                            "row. They were whole when they were checked: see to the disk, then run the same command "
                            "again; it goes on from the last checkpoint.")


def feed(bins: Iterable, load, workers: int, device, dtype, take=lambda samples: samples):
    """Yields (bin, what load(samples) made of it, its batch on the device; seconds waited for files).

    take(bin) gives a bin's samples ([]: none is left, the bin is passed over), or None where they are not there yet:
    those of the batch that is asked for must be. load: `Reader.load`.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    todo, ahead = iter(bins), deque()
    following = next(todo, None)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        def fill() -> None:
            nonlocal following
            while following is not None and len(ahead) <= workers and (samples := take(following)) is not None:
                if samples:
                    ahead.append((following, pool.submit(load, samples)))
                following = next(todo, None)

        fill()
        while ahead:
            begun = time.monotonic()
            item, future = ahead.popleft()
            loaded = future.result()
            waited = time.monotonic() - begun
            fill()
            if loaded.batch:
                loaded.batch = on_device(loaded.batch, device, dtype, copies)
            yield item, loaded, waited
            fill()


def on_device(batch: Batch, device, dtype, copies) -> Batch:
    """The batch on the device, copied on the stream `copies` if there is one."""
    if not copies:
        return batch.to(device, dtype)
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        moved = batch.to(device, dtype)
    current.wait_stream(copies)
    for value in vars(moved).values():
        if torch.is_tensor(value):
            value.record_stream(current)  # allocated on the other stream, used here
    return moved
