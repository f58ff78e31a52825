"""Which samples make up which step of the whole run, decided before its first step."""
from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from eagle3.batches import each, plan_epoch, split_samples
from eagle3.checked import NO_LOSS, QUARANTINED
from eagle3.journal import read_plan
from eagle3.sample_table import Builder, SampleTable
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
class Planned:
    """03's plan.jsonl: N samples in its order, those without loss too. They have no mass until they are checked."""
    samples: SampleTable
    file_tokens: np.ndarray  # (N,) before --max-seq-len cuts them
    train_at: np.ndarray | None = None  # positions of the samples to train on
    val_at: np.ndarray | None = None  # of those to validate on
    # --follow: (N,) the step that has each behind it, the last one + 1: it validates; {id: position}
    step_of: np.ndarray | None = None
    position: dict[str, int] | None = None

    def usable(self) -> SampleTable:
        """Those with loss."""
        rows = self.samples.rows
        return self.samples.take(np.flatnonzero(rows["tokens"] > rows["start"].clip(2)))  # Sample.counts

    def split(self, usable: SampleTable, args, ratio: float) -> tuple[SampleTable, SampleTable]:
        """(those of them to train on, in the plan's order, those to validate on)."""
        train, val = split_samples(usable, ratio, args.seed)
        names = self.samples.rows["name"]  # where its name begins: ascending, and each one's own
        self.train_at, self.val_at = (np.searchsorted(names, part.rows["name"]) for part in (train, val))
        self.train_at.sort()
        if args.loss_on == "all":  # to train on, not to validate on
            self.samples.rows["loss_from"][self.train_at] = 1
        return self.samples.take(self.train_at), val

    def find_steps(self, schedule: Schedule) -> None:
        """Which step has which sample behind it. One without loss goes with the first step that needs a later one."""
        self.position, total = {name: at for at, name in enumerate(self.samples.ids())}, len(schedule)
        self.step_of = np.full(len(self.samples), total + 1)
        for step, (_, bins) in enumerate(schedule, 1):
            self.step_of[self.train_at[sum(bins, [])]] = step
        later, unused = np.minimum.accumulate(self.step_of[::-1])[::-1], np.ones(len(self.samples), bool)
        unused[self.train_at] = unused[self.val_at] = False
        self.step_of[unused] = later[unused].clip(max=total)

    def is_behind(self, name: str, step: int) -> bool:
        """Whether the sample of this id is needed no more after `step`."""
        return name in self.position and self.step_of[self.position[name]] <= step


@dataclass
class Plan:
    """The whole run, decided before its first step."""
    train: Sequence  # samples, indexed by the schedule's bins
    val: Sequence
    schedule: Schedule  # a step each: (epoch, bins of indices into train), bins of all ranks
    epoch_ends: list  # steps
    kept: Sequence = ()  # all usable samples of the folders to train on; unknown yet with --follow
    found: np.ndarray | None = None  # --order plan: where in `kept` each of `train` is, -1 where it is not usable
    dropped: dict = field(default_factory=dict)  # {reason: count}
    agreement: float = 0.0  # share of response tokens that are the target's argmax
    planned: Planned | None = None  # --order plan

    @property
    def total(self) -> int:
        return len(self.schedule)

    def without(self, problems: dict[str, str]) -> tuple[SampleTable, dict]:
        """(samples kept, dropped {reason: count}) of --follow, which found `problems` {id: reason} on its way."""
        usable = self.planned.usable()
        reasons = [*problems.values(), *[NO_LOSS] * (len(self.planned.samples) - len(usable))]
        kept = usable.take([i for i, name in enumerate(usable.ids()) if name not in problems])
        return kept, dict(sorted(Counter(reasons).items()))


def read_planned(args, held_out: Sequence | None) -> Planned:
    """args: data_dir, max_seq_len, follow and val_data_dir. Raises UserError."""
    samples, file_tokens = Builder(args.data_dir), array("q")
    for row in read_plan(args.data_dir):
        tokens = min(row["tokens"], args.max_seq_len)
        samples.add(row["id"], tokens, row["prompt_len"], row["prompt_len"], tokens < row["tokens"])
        file_tokens.append(row["tokens"])
    planned = Planned(samples.table(), np.array(file_tokens))
    if (usable := len(planned.usable())) < 2:
        raise UserError(f"{args.data_dir}/plan.jsonl: {usable} usable samples; at least 2 are needed, one of them to "
                        "validate.")
    if args.follow:
        refuse_held_out(args, planned.samples, held_out)
    return planned


def plan_steps(args, inputs, sources: Sources, head: torch.Tensor, process) -> Plan:
    """Every file is read and compared once, then packed into steps. Raises UserError.

    With --order plan they are packed as 03 planned, and what is bad is left out; --follow checks each sample as it
    lands.
    """
    has = find_samples(args, sources, head, process)
    found, planned, dropped = None, None, has.dropped
    ratio = args.val_ratio if has.held_out is None else 0
    if args.order == "plan":
        planned = read_planned(args, has.held_out)
        usable = planned.usable()
        own = [i for i, name in enumerate(usable.ids()) if name not in has.repeated]
        train, val = planned.split(usable.take(own), args, ratio)
    else:
        train, val = split_samples(has.samples, ratio, args.seed)
        val = val.of_response() if args.loss_on == "all" else val
    if not train:
        raise UserError(f"--val-ratio {args.val_ratio} leaves none of {len(val)} samples to train on. Lower it.")
    if args.order == "plan" and not args.follow:
        where = {name: i for i, name in enumerate(has.samples.ids())}
        found = np.array([where.get(name, -1) for name in train.ids()])
        val = has.samples.take([where[name] for name in val.ids() if name in where]).of_response()
        landed = {row["id"] for row in inputs.index}
        missing = sum(name not in landed for name in usable.ids())
        dropped |= {QUARANTINED: missing} if missing else {}
    schedule, ends = plan_epochs(args, train, process)
    if args.follow:
        planned.find_steps(schedule)
    return Plan(train, val if has.held_out is None else has.held_out, schedule, ends, has.samples, found, dropped,
                has.agreement, planned)


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


def refuse_held_out(args, planned: SampleTable, held_out: Sequence | None) -> None:
    """Raises UserError where --follow would train on what is held out: before a sample has landed it has an id only."""
    shared = sorted({*each(held_out or [], "id")}.intersection(planned.ids()))
    if shared:
        raise UserError(f"{args.val_data_dir}: {len(shared)} of its ids are in {args.data_dir}/plan.jsonl too "
                        f"({shared[0]} for one), and --follow cannot tell whether the samples are the same. Hold out "
                        "others, or train without --follow once 03 has finished.")


def say_plan(args, plan: Plan, process) -> None:
    lengths, loss_from = (np.fromiter(each(plan.train, name), np.int64) for name in ("tokens", "loss_from"))
    tokens, truncated = int(lengths.sum()), sum(each(plan.planned.usable() if args.follow else plan.kept, "truncated"))
    in_loss = (lengths - loss_from.clip(2)).clip(0).sum() / tokens  # Sample.counts
    checked = "as planned" if args.follow else f"{sum(plan.dropped.values())} skipped"
    argmax = "" if args.follow else f" | argmax {plan.agreement:.1%}"
    process.say(f"data {len(plan.train)} train, {len(plan.val)} validation, {checked}, {truncated} truncated | "
                f"{tokens:,} tokens, {in_loss:.1%} in the loss{argmax} | {plan.total} steps, "
                f"{min(plan.epoch_ends[0], plan.total)} in the first epoch")
