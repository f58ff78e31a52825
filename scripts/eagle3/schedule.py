"""Which samples make up which step of the whole run, decided before its first step."""
from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from eagle3.batches import each, plan_epoch, split_samples
from eagle3.checked import NO_LOSS
from eagle3.follow import QUARANTINED, planned_samples
from eagle3.sources import Sources, find_samples
from eagle3.stage import UserError

PLANNED_AT_MOST = 10 ** 8  # samples, each counted as often as it is trained on: 8 bytes and a while each


class Schedule(Sequence):
    """The steps of a run: (epoch, bins of indices into its training samples) each, in 4 bytes a sample and epoch."""

    def __init__(self, bins_per_step: int):
        self.bins_per_step, self.epochs = bins_per_step, []  # of each: (indices of all bins, where each bin ends)
        self.first_steps, self.part = [0], slice(None)  # the step that each epoch begins with; which steps this is of

    def add_epoch(self, steps: list[list[list[int]]]) -> None:
        indices, ends = array("i"), array("q")
        for bins in steps:
            for members in bins:
                indices.extend(members)
                ends.append(len(indices))
        self.epochs.append((indices, ends))
        self.first_steps.append(self.first_steps[-1] + len(steps))

    def steps(self) -> range:
        return range(self.first_steps[-1])[self.part]

    def __len__(self) -> int:
        return len(self.steps())

    def __getitem__(self, at):
        if isinstance(at, slice):
            chosen, some = self.steps()[at], Schedule(self.bins_per_step)
            some.epochs, some.first_steps = self.epochs, self.first_steps
            some.part = slice(chosen.start, chosen.stop, chosen.step)
            return some
        step = self.steps()[at]
        epoch = bisect_right(self.first_steps, step) - 1
        (indices, ends), first = self.epochs[epoch], (step - self.first_steps[epoch]) * self.bins_per_step
        last = min(first + self.bins_per_step, len(ends))
        return epoch, [indices[ends[i - 1] if i else 0:ends[i]].tolist() for i in range(first, last)]

    def __eq__(self, other) -> bool:
        return list(self) == list(other)


@dataclass
class Plan:
    """The whole run, decided before its first step."""
    train: Sequence  # samples, indexed by the schedule's bins
    val: Sequence
    schedule: Schedule  # a step each: (epoch, bins of indices into train), bins of all ranks
    epoch_ends: list  # steps
    kept: Sequence = ()  # all usable samples of the folders to train on; unknown yet with --follow
    found: dict | None = None  # --order plan: {id: sample} that is usable; else all of `train` are
    dropped: dict = field(default_factory=dict)  # {reason: count}
    agreement: float = 0.0  # share of response tokens that are the target's argmax
    planned: list = field(default_factory=list)  # --order plan: samples in 03's order
    rows: list = field(default_factory=list)  # plan.jsonl's

    @property
    def total(self) -> int:
        return len(self.schedule)

    def without(self, problems: dict[str, str]) -> tuple[list, dict]:
        """(samples kept, dropped {reason: count}) of --follow, which found `problems` {id: reason} on its way."""
        reasons = [*problems.values(), *[NO_LOSS] * (len(self.rows) - len(self.planned))]
        kept = [sample for sample in self.planned if sample.id not in problems]
        return kept, dict(sorted(Counter(reasons).items()))


def plan_steps(args, inputs, sources: Sources, head: torch.Tensor, process) -> Plan:
    """Every file is read and compared once, then packed into steps. Raises UserError.

    With --order plan they are packed as 03 planned, and what is bad is left out; --follow checks each sample as it
    lands.
    """
    has = find_samples(args, sources, head, process)
    found, dropped, planned, rows = None, has.dropped, [], []
    ratio = args.val_ratio if has.held_out is None else 0
    if args.order == "plan":
        found = {sample.id: sample for sample in has.samples}
        rows, planned = planned_samples(args.data_dir, args.max_seq_len)
        refuse_held_out(args, rows, has.held_out)
        train, val = split_samples([sample for sample in planned if sample.id not in has.repeated], ratio, args.seed)
        position = {row["id"]: i for i, row in enumerate(rows)}
        train.sort(key=lambda sample: position[sample.id])
    else:
        train, val = split_samples(has.samples, ratio, args.seed)
    if args.loss_on == "all":  # to train on, not to validate on
        train = [replace(sample, loss_from=1) for sample in train] if args.order == "plan" else train  # as checked
        val = val.of_response() if args.order == "shuffle" else [sample.of_response() for sample in val]
    if not train:
        raise UserError(f"--val-ratio {args.val_ratio} leaves none of {len(val)} samples to train on. Lower it.")
    if args.order == "plan" and not args.follow:
        val = [found[sample.id].of_response() for sample in val if sample.id in found]
        missing = {sample.id for sample in planned} - {row["id"] for row in inputs.index}
        dropped |= {QUARANTINED: len(missing)} if missing else {}
    schedule, ends = plan_epochs(args, train, process)
    return Plan(train, val if has.held_out is None else has.held_out, schedule, ends, has.samples, found, dropped,
                has.agreement, planned, rows)


def plan_epochs(args, train: Sequence, process) -> tuple[Schedule, list[int]]:
    """(a step each: (epoch, bins of all ranks), the steps at which epochs end), no further than --max-steps.

    Raises UserError.
    """
    bins_per_step, shuffle = process.world * args.grad_accum, args.order == "shuffle"
    schedule, ends = Schedule(bins_per_step), []
    for epoch in range(args.epochs):
        steps = plan_epoch(train, args.batch_tokens, bins_per_step, args.seed, epoch, shuffle)
        if not steps:
            raise UserError(f"--data-weight {args.data_weight}: epoch {epoch + 1} has no sample. Raise it.")
        if not epoch and len(steps[0]) < process.world:
            raise UserError(f"{len(train)} training samples fill {len(steps[0])} micro-batches, fewer than the "
                            f"{process.world} ranks. Use fewer, or a lower --batch-tokens.")
        epochs = min(args.epochs, math.ceil(args.max_steps / len(steps))) if args.max_steps else args.epochs
        if epochs * len(train) > PLANNED_AT_MOST:
            raise UserError(f"{len(train):,} samples in {epochs:,} epochs are too many to plan ahead (at most "
                            f"{PLANNED_AT_MOST:,} samples, each counted once an epoch). Lower --epochs or "
                            "--max-steps.")
        schedule.add_epoch(steps)
        ends.append(len(schedule))
        if args.max_steps and len(schedule) >= args.max_steps:
            break
    return schedule[:args.max_steps], ends


def refuse_held_out(args, rows: list[dict], held_out: list | None) -> None:
    """Raises UserError where --follow would train on what is held out: before a sample has landed it has an id only."""
    shared = sorted({row["id"] for row in rows} & {sample.id for sample in held_out or []}) if args.follow else []
    if shared:
        raise UserError(f"{args.val_data_dir}: {len(shared)} of its ids are in {args.data_dir}/plan.jsonl too "
                        f"({shared[0]} for one), and --follow cannot tell whether the samples are the same. Hold out "
                        "others, or train without --follow once 03 has finished.")


def say_plan(args, plan: Plan, process) -> None:
    lengths, loss_from = (np.fromiter(each(plan.train, name), np.int64) for name in ("tokens", "loss_from"))
    tokens, truncated = int(lengths.sum()), sum(each(plan.planned if args.follow else plan.kept, "truncated"))
    in_loss = (lengths - loss_from.clip(2)).clip(0).sum() / tokens  # Sample.counts
    checked = "as planned" if args.follow else f"{sum(plan.dropped.values())} skipped"
    argmax = "" if args.follow else f" | argmax {plan.agreement:.1%}"
    process.say(f"data {len(plan.train)} train, {len(plan.val)} validation, {checked}, {truncated} truncated | "
                f"{tokens:,} tokens, {in_loss:.1%} in the loss{argmax} | {plan.total} steps, "
                f"{min(plan.epoch_ends[0], plan.total)} in the first epoch")
