"""From samples on the disk to packed batches, and which samples make up which step.

Shapes: B samples packed one after the other, C context rows, R query rows (those that carry loss in some TTT step:
the tail of each sample), H hidden, A aux states.
"""
from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from eagle3.patience import patiently
from eagle3.quantised import Quantised
from eagle3.states import StateFile

OPEN_BINS = 32  # while packing
OPEN_BINS_IN_ORDER = 8  # in the plan's order: each keeps samples on the disk until it is full; 32 pack little tighter


@dataclass
class Sample:
    """One sample: its file, its response (the tokens from `start` to `tokens`), and what of it carries loss."""
    id: str
    path: Path
    tokens: int
    start: int
    # (tokens - loss_from,) each token's: the target's probability inside the draft vocabulary; an array, or what
    # becomes one when it is needed (sample_table.StoredMass)
    mass: np.ndarray | None
    truncated: bool = False
    weight: float = 1.0  # how often it is seen in an epoch
    loss_from: int | None = None  # the first token that carries loss: `start`, or 1 where the prompt does, too

    def __post_init__(self):
        if self.loss_from is None:
            self.loss_from = self.start

    def of_response(self) -> Sample:
        """The same with loss on its response alone."""
        mass = None if self.mass is None else self.mass[self.start - self.loss_from:]
        return replace(self, loss_from=self.start, mass=mass)

    def counts(self, steps: int) -> list[int]:
        """Loss rows of each TTT step: tokens t = p + 2 + k that carry loss, with p >= 0."""
        return [max(0, self.tokens - max(self.loss_from, 2 + k)) for k in range(steps)]

    def rows(self, steps: int) -> tuple[int, int, int]:
        """(first query row, context rows, query rows). The last row predicts the last token."""
        context, first = self.tokens - 2, max(0, self.loss_from - 1 - steps)
        return first, context, context - first


@dataclass
class Batch:
    """Samples packed one after the other.

    Row c of a sample stands for its position p = c; its last rows are its query rows. What TTT step k needs at query
    row r is row r + k of last, labels, mask, mass: a shift, as long as k < rows_left.
    """
    aux: torch.Tensor  # (C, A*H) of position p; as `last` Quantised where files hold FP8, a tensor after `to`
    next_ids: torch.Tensor  # (C,) x[p+1]
    positions: torch.Tensor  # (C,)
    length: torch.Tensor  # (C,) tokens of the row's sample
    last: torch.Tensor  # (R, H) last_hidden[p+1]
    labels: torch.Tensor  # (R,) x[p+2]
    mask: torch.Tensor  # (R,) bool: x[p+2] carries loss
    mass: torch.Tensor  # (R,) the target's probability inside the draft vocabulary, where x[p+2] is predicted
    rows_left: torch.Tensor  # (R,) rows of its sample from here on, this one included
    cu_q: torch.Tensor  # (B + 1,) int32, where the samples' query rows begin
    cu_k: torch.Tensor  # (B + 1,) int32, where their context rows begin
    spans: list  # per sample ((q0, q1), (k0, k1)), the same bounds on the host
    tokens: int = 0

    def pick(self, x):
        """The query rows of x (C, ...) -> (R, ...)."""
        if len(self.mask) == len(self.positions):
            return x
        return torch.cat([x[k1 - q1 + q0:k1] for (q0, q1), (_, k1) in self.spans])

    def add_to_query_rows(self, x, y) -> None:
        """x (C, ...) += y (R, ...) on the query rows."""
        for (q0, q1), (_, k1) in self.spans if len(y) < len(x) else [((0, len(y)), (0, len(y)))]:
            x[k1 - q1 + q0:k1] += y[q0:q1]

    @property
    def max_q(self) -> int:
        return max(q1 - q0 for (q0, q1), _ in self.spans)

    @property
    def max_k(self) -> int:
        return max(k1 - k0 for _, (k0, k1) in self.spans)

    def flops(self, shape, steps: int) -> float:
        queries = [(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in self.spans]
        pairs = sum(q * k - q * (q - 1) // 2 for q, k in queries)
        return shape.flops(len(self.positions), len(self.mask), pairs, steps)

    def to(self, device, dtype) -> Batch:
        """On the device, its states as numbers of `dtype`."""
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        for name in ("aux", "last"):
            states = getattr(self, name)
            moved[name] = (states.to(device, dtype, non_blocking=True) if isinstance(states, Quantised) else
                           moved[name].to(dtype))
        return replace(self, **moved)


def batch_of(sizes: list[tuple[int, int, int]], aux, last, columns: dict, tokens: int, pin=False) -> Batch:
    """A Batch of the samples whose `Sample.rows` are `sizes`, from its float tensors and its other columns (arrays)."""
    cu_k = np.cumsum([0] + [context for _, context, _ in sizes])
    cu_q = np.cumsum([0] + [query for _, _, query in sizes])
    bounds = zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist())
    columns = columns | {
        "positions": np.concatenate([np.arange(context) for _, context, _ in sizes]),
        "rows_left": np.concatenate([np.arange(query, 0, -1) for *_, query in sizes]),
        "cu_q": cu_q.astype(np.int32), "cu_k": cu_k.astype(np.int32)}
    small = {name: torch.as_tensor(column) for name, column in columns.items()}
    if pin:
        small = {name: tensor.pin_memory() for name, tensor in small.items()}
    return Batch(aux=aux, last=last, spans=[((q0, q1), (k0, k1)) for q0, q1, k0, k1 in bounds], tokens=tokens, **small)


class Unread(Exception):
    """`sample` could not be read, `error` says why."""

    def __init__(self, sample: Sample, error: Exception):
        self.sample, self.error = sample, error


def collate(samples: list[Sample], steps: int, hidden: int, aux_states: int = 3, pin=False) -> Batch:
    """Read what the rows of these samples need, straight into (pinned) batch tensors. Raises Unread."""
    sizes = [sample.rows(steps) for sample in samples]
    C, R = (sum(size[i] for size in sizes) for i in (1, 2))
    next_ids, length, labels = np.empty(C, np.int64), np.empty(C, np.int64), np.empty(R, np.int64)
    mask, mass = np.zeros(R, bool), np.zeros(R, np.float32)
    aux = last = None
    k0 = q0 = 0
    for sample, (first, context, rows) in zip(samples, sizes):
        def read():
            nonlocal aux, last
            with StateFile(sample.path) as file:
                if aux is None:
                    aux, last = file.empty("aux_hidden_states", C, pin), file.empty("last_hidden_states", R, pin)
                file.read_into("aux_hidden_states", aux[k0:k0 + context])
                file.read_into("last_hidden_states", last[q0:q0 + rows], first + 1)
                return file.input_ids()[:context + 2]
        begin = max(sample.loss_from, first + 2)  # the first token with loss that a query row predicts
        try:
            ids = patiently(read, sample.path)
            mass[q0 + begin - first - 2:q0 + rows] = sample.mass[begin - sample.loss_from:]  # perhaps from a file, too
        except (OSError, ValueError, KeyError) as error:
            raise Unread(sample, error) from None
        next_ids[k0:k0 + context] = ids[1:-1]
        length[k0:k0 + context] = sample.tokens
        labels[q0:q0 + rows] = ids[first + 2:]
        mask[q0 + begin - first - 2:q0 + rows] = True
        k0, q0 = k0 + context, q0 + rows
    columns = {"next_ids": next_ids, "length": length, "labels": labels, "mask": mask, "mass": mass}
    return batch_of(sizes, aux, last, columns, sum(sample.tokens for sample in samples), pin)


# ---- the plan: which samples make up which step, on any number of ranks ----
def each(samples: Sequence[Sample], name: str) -> Iterable:
    """A field of each of them, for which a SampleTable need not make them."""
    column = getattr(samples, "column", None)
    return column(name) if column else [getattr(sample, name) for sample in samples]


def some(samples: Sequence[Sample], order: Iterable[int]) -> Sequence[Sample]:
    """Those at the positions `order`, in a table or a list as all are."""
    take = getattr(samples, "take", lambda order: [samples[i] for i in order])
    return take(order)


def split_samples(samples: Sequence[Sample], ratio: float, seed: int) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """(train, validation): by sample, by a hash of its id, so that a new sample moves no other one.

    At least one sample validates, unless ratio is 0.
    """
    digests, before, ascending = bytearray(), "", True
    for name in each(samples, "id"):
        digests += hashlib.sha256(f"{seed}:{name}".encode()).digest()
        before, ascending = name, ascending and before <= name
    ranked = np.lexsort(np.frombuffer(digests, ">u8").reshape(-1, 4).T[::-1])
    held_out = max(1, round(ratio * len(ranked))) if ratio else 0
    names = None if ascending else list(each(samples, "id"))
    train, val = (np.sort(part) if ascending else sorted(part.tolist(), key=names.__getitem__)
                  for part in (ranked[held_out:], ranked[:held_out]))
    return some(samples, train), some(samples, val)


def pack(lengths: list[int], order: list[int], capacity: int, open_bins: int = OPEN_BINS) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`: each goes into the first open bin that has room."""
    full, bins = [], []  # open bins: [room, indices]
    for i in order:
        fits = next((entry for entry in bins if entry[0] >= lengths[i]), None)
        if fits is None:
            if len(bins) == open_bins:
                full.append(bins.pop(min(range(open_bins), key=lambda j: bins[j][0]))[1])
            fits = [capacity, []]
            bins.append(fits)
        fits[0] -= lengths[i]
        fits[1].append(i)
    return full + [indices for _, indices in bins]


def seen_in_epoch(weights: list[float], seed: int, epoch: int) -> list[int]:
    """Indices of samples, each as often as its weight says.

    That is: whole copies, and a seeded share of the samples once more (weight 2.25: each twice, a quarter of them
    thrice). The next epoch's share begins where this one's ends.
    """
    order = []
    for weight in sorted(set(weights)):
        members = [i for i, own in enumerate(weights) if own == weight]
        order += members * int(weight)
        turns, share = list(members), weight % 1 * len(members)
        random.Random(f"{seed}:share of {weight}").shuffle(turns)
        order += [turns[i % len(turns)] for i in range(int(epoch * share), int((epoch + 1) * share))]
    return order


def plan_epoch(samples: list[Sample], capacity: int, bins_per_step: int, seed: int, epoch: int,
               shuffle: bool = True) -> list[list[list[int]]]:
    """Steps of bins of sample indices. It knows nothing of ranks: 2 ranks with 1 bin each train as 1 rank with 2."""
    # A million entries in arrays, not in lists: each of several ranks plans for itself
    order, lengths = array("i", range(len(samples))), array("i", each(samples, "tokens"))
    if shuffle:
        weights = array("d", each(samples, "weight"))
        order = order if set(weights) == {1.0} else seen_in_epoch(weights, seed, epoch)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        bins = pack(lengths, order, capacity)
        random.Random(f"{seed}:{epoch}:bins").shuffle(bins)  # the fullest close first
    else:
        bins = pack(lengths, order, capacity, OPEN_BINS_IN_ORDER)
    return [bins[start:start + bins_per_step] for start in range(0, len(bins), bins_per_step)]


def add_noise(batch: Batch, std: float, seed: str) -> None:
    """EAGLE's noise on the input states (arXiv 2401.15077, its code): uniform, (u - 1/2) * std * 512 / T.

    seed: the same on any rank.
    """
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big")
    generator = torch.Generator(batch.aux.device).manual_seed(number)
    noise = torch.rand(batch.aux.shape, dtype=batch.aux.dtype, device=batch.aux.device, generator=generator)
    batch.aux += noise.sub_(0.5).mul_((512 * std / batch.length)[:, None].to(noise.dtype))
