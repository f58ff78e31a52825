"""Which samples make up which step of the whole run, decided before its first step."""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from eagle3.batches import plan_epoch, split_samples
from eagle3.checked import NO_LOSS
from eagle3.follow import QUARANTINED, planned_samples
from eagle3.sources import Sources, find_samples
from eagle3.stage import UserError

PLANNED_AT_MOST = 10 ** 8  # samples, each counted as often as it is trained on: 8 bytes and a while each


@dataclass
class Plan:
    """The whole run, decided before its first step."""
    train: list  # samples, indexed by the schedule's bins
    val: list
    schedule: list  # a step each: (epoch, bins of indices into train), bins of all ranks
    epoch_ends: list  # steps
    found: dict = field(default_factory=dict)  # {id: sample} that is usable; unknown yet with --follow
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
    found, dropped, planned, rows = {sample.id: sample for sample in has.samples}, has.dropped, [], []
    ratio = args.val_ratio if has.held_out is None else 0
    if args.order == "plan":
        rows, planned = planned_samples(args.data_dir, args.max_seq_len)
        refuse_held_out(args, rows, has.held_out)
        train, val = split_samples([sample for sample in planned if sample.id not in has.repeated], ratio, args.seed)
        position = {row["id"]: i for i, row in enumerate(rows)}
        train.sort(key=lambda sample: position[sample.id])
    else:
        train, val = split_samples(has.samples, ratio, args.seed)
    if args.loss_on == "all":  # to train on, not to validate on
        train, val = [replace(sample, loss_from=1) for sample in train], [sample.of_response() for sample in val]
    if not train:
        raise UserError(f"--val-ratio {args.val_ratio} leaves none of {len(val)} samples to train on. Lower it.")
    if args.order == "plan" and not args.follow:
        val = [found[sample.id].of_response() for sample in val if sample.id in found]
        missing = {sample.id for sample in planned} - {row["id"] for row in inputs.index}
        dropped |= {QUARANTINED: len(missing)} if missing else {}
    schedule, ends = plan_epochs(args, train, process)
    return Plan(train, val if has.held_out is None else has.held_out, schedule, ends, found, dropped, has.agreement,
                planned, rows)


def plan_epochs(args, train: list, process) -> tuple[list, list[int]]:
    """(a step each: (epoch, bins of all ranks), the steps at which epochs end), no further than --max-steps.

    Raises UserError.
    """
    bins_per_step, shuffle = process.world * args.grad_accum, args.order == "shuffle"
    schedule, ends = [], []
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
        schedule += [(epoch, bins) for bins in steps]
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
    tokens = sum(sample.tokens for sample in plan.train)
    truncated = sum(sample.truncated for sample in (plan.found.values() or plan.planned))
    in_loss = sum(sample.counts(1)[0] for sample in plan.train) / tokens
    checked = "as planned" if args.follow else f"{sum(plan.dropped.values())} skipped"
    argmax = "" if args.follow else f" | argmax {plan.agreement:.1%}"
    process.say(f"data {len(plan.train)} train, {len(plan.val)} validation, {checked}, {truncated} truncated | "
                f"{tokens:,} tokens, {in_loss:.1%} in the loss{argmax} | {plan.total} steps, "
                f"{min(plan.epoch_ends[0], plan.total)} in the first epoch")
