"""Training beside 03_extract: samples as they land, and in bounded mode their release.

journal.py has the files over which 03 and 04 talk. 03 sends in the plan's order and 04 trains in it, so each step's
samples come; one that fails, there or here, is left out of its batch, and the batches stay as planned. A sample is
released (may be removed) once a checkpoint has it behind it: trained on, or known to be of no use. Validation samples
stay to the end.
"""
from __future__ import annotations

import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from eagle3.batches import Sample
from eagle3.checked import MAX_BAD, MIN_AGREEMENT, other_target, response_mass
from eagle3.journal import (Tail, append_released, cut_torn_line, read_bound, read_plan, read_quarantine, read_released,
                            sizes_in_place)
from eagle3.patience import patiently
from eagle3.stage import UserError, duration, lock_file, log, read_manifest, sha256_file, sync_folder
from eagle3.states import HEADER_BYTES, check_sample, facts_token_bytes, response_start, sample_path
from eagle3.processes import all_ranks

QUARANTINED = "quarantined by 03_extract"


def planned_samples(folder: Path, max_tokens: int) -> tuple[list[dict], list[Sample]]:
    """(plan.jsonl's rows, those of them that carry loss as samples without `mass`), in its order. Raises UserError.
    """
    rows, planned = read_plan(folder), []
    for row in rows:
        tokens = min(row["tokens"], max_tokens)
        path = sample_path(folder, row["id"])
        sample = Sample(row["id"], path, tokens, row["prompt_len"], None, tokens < row["tokens"])
        if sample.counts(1)[0]:
            planned.append(sample)
    if len(planned) < 2:
        raise UserError(f"{folder}/plan.jsonl: {len(planned)} usable samples; at least 2 are needed, one of them to "
                        "validate.")
    return rows, planned


# ---- when to release, from the plan alone ----
def last_needed(step_of: np.ndarray, total: int) -> np.ndarray:
    """(total + 1,) the last position in the plan that steps 1..s need.

    For the last step it is the end, as 03 ends before 04 does. step_of (N,): of each file in the plan's order, the
    step that trains on it; `total` + 1 for validation.
    """
    last, trained_on = np.full(total + 1, -1), step_of <= total
    np.maximum.at(last, step_of[trained_on], np.flatnonzero(trained_on))
    last[total] = len(step_of) - 1
    return np.maximum.accumulate(last)


def release_steps(sizes: np.ndarray, step_of: np.ndarray, total: int, bound: int, share: float,
                  done: int) -> tuple[list[int], int]:
    """(steps after which to save a checkpoint and release, the least bound that would do).

    sizes (N,): most bytes of each file, in the plan's order; step_of: see last_needed; share: of the bound, less
    validation, after which to release; done: the step that is behind already.

    03 sends in the plan's order. So before step s can be taken, all files up to the last one that steps 1..s need may
    lie there, except those released at the last checkpoint c: these must fit. Where they always do, 03 and 04 never
    both wait.
    """
    last, trained_on = last_needed(step_of, total), step_of <= total
    # (total + 1,) bytes up to the last file that steps 1..s need
    upto = np.concatenate([[0], np.cumsum(sizes)])[last + 1]
    trained = np.bincount(step_of[trained_on], sizes[trained_on], total + 1)
    trained = np.cumsum(trained).astype(np.int64)  # (total + 1,) bytes of steps 1..s
    room = share * (bound - int(sizes[~trained_on].sum()))
    saves, saved = [], done
    for step in range(done + 1, total):
        if trained[step] - trained[saved] >= room or upto[step + 1] - trained[saved] > bound:
            saves.append(step)
            saved = step
    return saves, int((upto[done + 1:] - trained[done:-1]).max(initial=0))


class Follow:
    """Samples as 03 lands them: waited for, checked, and released. Each rank checks its own; rank 0 releases."""

    def __init__(self, args, inputs, head: torch.Tensor, process, rows: list[dict]):
        """args: data_dir, output_dir, num_workers and release_share; head (Vt, H); rows: plan.jsonl's."""
        self.args, self.folder, self.process, self.rows, self.facts = args, args.data_dir, process, rows, inputs.facts
        self.head, self.draft_ids = head.to(process.device, process.dtype), inputs.draft_ids.to(process.device)
        self.norm, self.workers = inputs.target.final_norm(), max(1, args.num_workers)
        self.pool = ThreadPoolExecutor(self.workers)
        self.journal, self.quarantine_size = Tail(self.folder / "landed.jsonl"), 0
        self.landed, self.fresh = {}, {}  # {id: 03's line}; those of them whose file was not seen yet
        self.there, self.failed, self.released = set(), set(), set()  # ids: file seen; in quarantine; released
        self.unchecked, self.checks, self.busy = deque(), {}, []  # of this rank: ids, {id: future}, futures at work
        self.seen, self.mine = self.nothing(), self.nothing()  # by all ranks up to the last checkpoint; by this since
        self.bound = read_bound(self.folder)
        self.stopped = lambda: False  # whether waiting has no use any more: the run is about to leave

    @staticmethod
    def nothing() -> dict:
        return {"samples": 0, "problems": {}, "agreed": 0, "predicted": 0}

    def check(self, row: dict, sample: Sample):
        """(problem, sample with its mass, response tokens that are the target's argmax, those predicted)"""
        problem, tensors = check_sample(sample.path, row, self.facts, len(self.head), self.norm)
        if not problem and response_start(tensors["loss_mask"].numpy()) != sample.start:
            problem = "loss mask is not the plan's"
        if problem:
            return problem, None, 0, 0
        mass, agreed, predicted = response_mass(tensors, sample.start, self.head, self.draft_ids, sample.loss_from)
        return None, replace(sample, mass=mass[:sample.tokens - sample.loss_from].numpy()), agreed, predicted

    # ---- before the first step ----
    def plan(self, train: list[Sample], val: list[Sample], schedule: list) -> None:
        """Which step has which sample behind it. One without loss goes with the first step that needs a later one."""
        self.total = len(schedule)
        self.step_of = {sample.id: self.total + 1 for sample in val}
        for step, (_, bins) in enumerate(schedule, 1):
            self.step_of |= {train[i].id: step for indices in bins for i in indices}
        last = last_needed(np.array([self.step_of.get(row["id"], self.total + 1) for row in self.rows]), self.total)
        self.unused = {}  # {step: samples}: it waits for them, so that none of them lands after their release
        for i, row in enumerate(self.rows):
            if row["id"] not in self.step_of:
                self.step_of[row["id"]] = step = int(np.searchsorted(last, i))
                path = sample_path(self.folder, row["id"])
                self.unused.setdefault(step, []).append(Sample(row["id"], path, row["tokens"], row["tokens"], None))
        self.schedule, self.train, self.val = schedule, train, val

    def begin(self, done: int, seen: dict | None, damaged: str = "") -> set[int]:
        """Go on after step `done`. Returns the steps at which to save and release. Raises UserError.

        damaged: what is wrong with later checkpoints, if anything.
        """
        self.seen = seen or self.nothing()
        rank, world = self.process.rank, self.process.world
        bins = (indices for _, step in self.schedule[done:] for indices in step[rank::world])
        ours = [self.train[i] for indices in bins for i in indices] + self.val[rank::world]
        self.ours = {sample.id: sample for sample in ours}  # of this rank, to come
        self.awaited = {name for name, step in self.step_of.items() if step > done}
        if self.bound is None:
            return set()
        self.take_over_released(done, damaged)
        sizes = np.array([row["tokens"] * facts_token_bytes(self.facts) + HEADER_BYTES for row in self.rows])
        step_of = np.array([self.step_of[row["id"]] for row in self.rows])
        saves, least = release_steps(sizes, step_of, self.total, self.bound, self.args.release_share, done)
        held = int(sizes[step_of > self.total].sum())
        if least > self.bound:
            raise UserError(f"{self.folder}: 03's --max-disk-gb {self.bound / 1e9:g} is too small: validation "
                            f"({held / 1e9:.3f} GB) and the batches being filled need at least "
                            f"{math.ceil(least / 1e5) / 1e4:.4f}. Start 03_extract.py anew with more, or lower "
                            "--val-ratio or --batch-tokens.")
        self.release(done)  # killed between the checkpoint and its release
        self.process.say(f"bounded {self.bound / 1e9:,.3f} GB | least that would do {least / 1e9:,.3f} GB | "
                         f"validation stays: {held / 1e9:,.3f} GB | {len(saves) + 1} releases to come")
        return set(saves)

    def take_over_released(self, done: int, damaged: str) -> None:
        """What an earlier process released: all of it must be behind step `done`. Raises UserError."""
        path = self.folder / "released.jsonl"
        self.released = set(read_released(self.folder))
        unknown = sum(self.step_of.get(name, self.total + 1) > done for name in self.released)
        if unknown and damaged:
            raise UserError(f"{damaged}, and {unknown} samples were released since the good one of step {done}: they "
                            "are gone. Put the damaged one back from a copy, or begin both stages in new folders; "
                            f"--finetune-from {self.args.output_dir}/checkpoint-{done} keeps what it has learnt.")
        if unknown:
            raise UserError(f"{path}: names {unknown} samples that step {done} in {self.args.output_dir} has not "
                            "behind it: they were released to another output folder, or to a checkpoint that is gone. "
                            "Name that "
                            "--output-dir, or begin both stages in new folders.")
        if self.process.rank == 0:
            self.lock = lock_file(self.folder / ".follow.lock")
            if not self.lock:
                raise UserError(f"{self.folder}: another 04_train.py --follow is at work there. Stop it first.")
            cut_torn_line(path)
            sync_folder(self.folder)
            for name in self.released:  # killed between its line and this
                sample_path(self.folder, name).unlink(missing_ok=True)

    # ---- waiting and checking ----
    def poll(self) -> None:
        """Take in what 03 has written."""
        patiently(self.look, self.folder)

    def look(self) -> None:
        """A file's line comes before the file: seen in this order, the line is that file's."""
        arrived = [name for name in self.fresh if sample_path(self.folder, name).exists()]
        for row in self.journal.new_rows():
            if row.get("redo"):
                self.landed.pop(row["id"], None)
            elif "id" in row and row["id"] not in self.released:
                self.landed[row["id"]] = row
                if row["id"] in self.awaited and row["id"] not in self.there:
                    self.fresh[row["id"]] = None
        for name in sorted(arrived, key=self.step_of.get):
            if name in self.landed:
                del self.fresh[name]
                self.there.add(name)
                if name in self.ours:
                    self.unchecked.append(name)
        self.busy = [future for future in self.busy if not future.done()]
        while self.unchecked and len(self.busy) < 4 * self.workers:  # few, so that they do not hold up an end
            name = self.unchecked.popleft()
            self.checks[name] = self.pool.submit(self.check, self.landed[name], self.ours[name])
            self.busy.append(self.checks[name])
        path = self.folder / "quarantine.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self.quarantine_size:
            self.quarantine_size, self.failed = size, set(read_quarantine(self.folder))

    def known(self, sample: Sample) -> bool:
        """Whether it is clear what becomes of it: failed, or there and, if it is this rank's, checked."""
        if sample.id in self.there:
            return sample.id not in self.ours or sample.id in self.checks and self.checks[sample.id].done()
        return sample.id in self.failed

    def wait(self, samples: list[Sample]) -> None:
        """Until all of them are known, or the run is about to leave. Raises UserError when 03's bound shrinks."""
        told = time.monotonic() - 25  # the first line comes soon
        while (open_ones := [sample for sample in samples if not self.known(sample)]) and not self.stopped():
            self.poll()
            self.refuse_closed(open_ones)
            if time.monotonic() - told > 30 and open_ones[0].id not in self.there:
                told = time.monotonic()
                self.process.say(f"waiting for sample {open_ones[0].id} and {len(open_ones) - 1} more | "
                                 f"{self.silence()}")
                if self.bound and (read_bound(self.folder) or 0) < self.bound:
                    raise UserError(f"{self.folder}/bound.json: 03's --max-disk-gb is smaller than when this began. "
                                    "Run the same command again.")
            time.sleep(0.02)

    def refuse_closed(self, samples: list[Sample]) -> None:
        """Raises UserError where 03 has ended its folder (--close) without one of these."""
        if not (self.folder / "manifest.json").exists():
            return
        closed = read_manifest(self.folder, "03_extract").get("closed")
        if closed and any(sample.id not in self.landed for sample in samples):
            raise UserError(f"{self.folder}: 03_extract.py --close left out {closed:,} of the samples by which this "
                            "run has planned its steps. Train on what landed without --follow, in another "
                            "--output-dir (--finetune-from keeps what was learnt here), or let 03 go on without "
                            "--close.")

    def silence(self) -> str:
        silent = time.time() - (self.folder / "landed.jsonl").stat().st_mtime
        return f"03 has not written for {duration(max(0, silent))}"

    def usable(self, samples: list[Sample]) -> list[Sample]:
        """Of this rank's samples, all known, those to train on."""
        checked = [self.checks[sample.id].result()[1] for sample in samples if sample.id in self.there]
        return [sample for sample in checked if sample]

    def take(self, samples: list[Sample], wait: bool) -> list[Sample] | None:
        """The usable ones; None where some are not known yet and it shall not wait."""
        if wait:
            self.wait(samples)
        elif not all(map(self.known, samples)):
            self.poll()
        return self.usable(samples) if all(map(self.known, samples)) else None

    def behind(self, samples: list[Sample]) -> None:
        """These are done with: count what was found, forget the rest. Raises UserError when too much is wrong."""
        for sample in samples:
            quarantined = QUARANTINED, None, 0, 0
            found = self.checks.pop(sample.id).result() if sample.id in self.there else quarantined
            problem, _, agreed, predicted = found
            self.mine["samples"] += 1
            self.mine["agreed"] += agreed
            self.mine["predicted"] += predicted
            if problem:
                self.mine["problems"][sample.id] = problem
                log(f"skipped {sample.path} | {problem}")
        count, agreed, predicted = (self.seen[key] + self.mine[key] for key in ("samples", "agreed", "predicted"))
        problems = self.seen["problems"] | self.mine["problems"]
        damaged = {name: problem for name, problem in problems.items() if problem != QUARANTINED}
        if len(damaged) > max(1, MAX_BAD * count):
            name = max(damaged)
            raise UserError(f"{self.folder}: {len(damaged)} of {count} samples were bad, one of them "
                            f"{sample_path(self.folder, name)} ({damaged[name]}). See to the disk and the server; then "
                            "begin both stages in new folders.")
        if predicted >= 100 and agreed < MIN_AGREEMENT * predicted:
            raise other_target(self.folder, agreed / predicted)

    def agreement(self) -> float:
        """Share of response tokens, up to the last `gather`, that are the target's argmax."""
        return self.seen["agreed"] / max(1, self.seen["predicted"])

    def gather(self) -> dict:
        """What was seen so far on all ranks; it belongs into the checkpoint."""
        for part in all_ranks(self.mine, self.process):
            self.seen = {key: self.seen[key] | value if key == "problems" else self.seen[key] + value
                         for key, value in part.items()}
        self.seen["problems"] = dict(sorted(self.seen["problems"].items()))
        self.mine = self.nothing()
        return self.seen

    def validation(self) -> list[Sample]:
        """The usable validation samples, known by now, the same on every rank. Raises UserError."""
        ours = self.val[self.process.rank::self.process.world]
        found = {sample.id: sample for part in all_ranks(self.usable(ours), self.process) for sample in part}
        self.behind(ours)
        if not found:
            raise UserError(f"{self.folder}: none of the {len(self.val)} validation samples is usable. "
                            "Raise --val-ratio (in a new --output-dir).")
        return [found[sample.id] for sample in self.val if sample.id in found]

    # ---- release ----
    def release(self, step: int) -> None:
        """Remove the files that steps 1..`step` have behind them. A checkpoint of that step must be on the disk."""
        if self.bound is None or self.process.rank:
            return
        sync_folder(self.args.output_dir)  # the checkpoint's name
        sync_folder(self.folder / "landed.jsonl")  # 03 knows a released sample by its line there, after a power cut too
        sizes = sizes_in_place(self.folder)
        self.poll()
        going = [name for name in sizes if name in self.landed and self.step_of.get(name, self.total + 1) <= step]
        if not going:
            return
        append_released(self.folder, {name: self.landed[name]["checksum"] for name in going})
        for name in going:
            sample_path(self.folder, name).unlink()
            del self.landed[name]
            self.there.discard(name)
        self.released.update(going)
        freed = sum(sizes[name] for name in going)
        held = sum(sizes.values()) - freed
        self.process.say(f"released {len(going):,} samples behind step {step}, {len(self.released):,} in all | "
                         f"{freed / 1e9:,.3f} GB | disk {held / 1e9:,.3f}/{self.bound / 1e9:,.3f} GB")

    def wait_for_end(self) -> None:
        """Until 03 is done and the validation samples are checked, or the run is about to leave."""
        told = time.monotonic() - 25
        while not (self.folder / "manifest.json").exists() and not self.stopped():
            if time.monotonic() - told > 30:
                told = time.monotonic()
                self.process.say(f"waiting for 03_extract to write its manifest | {self.silence()}")
            time.sleep(0.1)
        self.wait(self.val)

    def finish(self) -> str:
        """sha256 of 03's manifest."""
        read_manifest(self.folder, "03_extract")
        return sha256_file(self.folder / "manifest.json")
