"""Training beside 03_extract: samples as they land.

journal.py has the files over which 03 and 04 talk. 03 sends in the plan's order and 04 trains in it, so each step's
samples come; one that fails, there or here, is left out of its batch, and the batches stay as planned.
"""
from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from eagle3.batches import Sample
from eagle3.checked import MAX_BAD, MIN_AGREEMENT, QUARANTINED, other_target, response_mass
from eagle3.journal import Tail, read_quarantine
from eagle3.patience import patiently
from eagle3.processes import all_ranks
from eagle3.schedule import Plan
from eagle3.stage import UserError, duration, log, read_manifest, sha256_file
from eagle3.states import check_sample, response_start, sample_path


class Follow:
    """Samples of a plan as 03 lands them: waited for and checked. They go by their positions in plan.jsonl.

    Each rank checks its own, those that it trains and validates on, and waits for all.
    """

    def __init__(self, args, inputs, head: torch.Tensor, process, plan: Plan):
        """args: data_dir, num_workers; head (Vt, H)."""
        self.folder, self.process, self.facts = args.data_dir, process, inputs.facts
        self.plan, self.planned = plan, plan.planned
        self.head, self.draft_ids = head.to(process.device, process.dtype), inputs.draft_ids.to(process.device)
        self.norm, self.workers = inputs.target.final_norm(), max(1, args.num_workers)
        alone = (torch.set_num_threads, (1,)) if process.device.type == "cuda" else ()  # as checked.one_core_each says
        self.pool = ThreadPoolExecutor(self.workers, "check", *alone)
        self.journal, self.quarantine_size = Tail(self.folder / "landed.jsonl"), 0
        self.fresh = {}  # {position: checksum}: landed, but the file was not seen yet
        self.failed = set()  # positions of what is in quarantine
        self.unchecked, self.checks, self.busy = deque(), {}, []  # own: (position, checksum); {position: future}
        self.seen, self.mine = self.nothing(), self.nothing()  # by all ranks up to the last checkpoint; by this since
        self.stopped = lambda: False  # whether waiting has no use any more: the run is about to leave
        self.waited_long = lambda: None  # raises UserError where it has no use

    @staticmethod
    def nothing() -> dict:
        return {"samples": 0, "problems": {}, "agreed": 0, "predicted": 0}

    def begin(self, done: int, seen: dict | None) -> None:
        """Go on after step `done`, with what was seen up to there."""
        self.seen, rank, world = seen or self.seen, self.process.rank, self.process.world
        self.there = self.planned.step_of <= done  # (N,) bool: its file was seen, or is not needed any more
        self.own = np.zeros(len(self.there), bool)  # of this rank, to come
        for _, bins in self.plan.schedule[done:]:
            self.own[self.planned.train_at[sum(bins[rank::world], [])]] = True
        self.own[self.planned.val_at[rank::world]] = True

    # ---- waiting and checking ----
    def check(self, at: int, checksum: str):
        """(problem, sample with its mass, response tokens that are the target's argmax, those predicted)"""
        sample = self.planned.samples[at]
        row = {"id": sample.id, "tokens": int(self.planned.file_tokens[at]), "checksum": checksum}
        problem, tensors = check_sample(sample.path, row, self.facts, len(self.head), self.norm)
        if not problem and response_start(tensors["loss_mask"].numpy()) != sample.start:
            problem = "loss mask is not the plan's"
        if problem:
            return problem, None, 0, 0
        mass, agreed, predicted = response_mass(tensors, sample.start, self.head, self.draft_ids, sample.loss_from)
        return None, replace(sample, mass=mass[:sample.tokens - sample.loss_from].numpy()), agreed, predicted

    def poll(self) -> None:
        """Take in what 03 has written."""
        patiently(self.look, self.folder)

    def look(self) -> None:
        """A file's line comes before the file: seen in this order, the line is that file's."""
        arrived = [at for at in self.fresh if self.planned.samples[at].path.exists()]
        for row in self.journal.new_rows():
            at = self.planned.position.get(row.get("id"))
            if at is None or self.there[at]:
                continue
            if row.get("redo"):
                self.fresh.pop(at, None)
            elif "checksum" in row:
                self.fresh[at] = row["checksum"]
        for at in sorted(arrived, key=self.planned.step_of.__getitem__):
            if checksum := self.fresh.pop(at, None):
                self.there[at] = True
                if self.own[at]:
                    self.unchecked.append((at, checksum))
        self.busy = [future for future in self.busy if not future.done()]
        while self.unchecked and len(self.busy) < 4 * self.workers:  # few, so that they do not hold up an end
            at, checksum = self.unchecked.popleft()
            self.checks[at] = self.pool.submit(self.check, at, checksum)
            self.busy.append(self.checks[at])
        path = self.folder / "quarantine.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self.quarantine_size:
            failed = map(self.planned.position.get, read_quarantine(self.folder))
            self.quarantine_size, self.failed = size, set(failed)

    def known(self, at: int) -> bool:
        """Whether it is clear what becomes of it: failed, or there and, if it is this rank's, checked."""
        if self.there[at]:
            return not self.own[at] or at in self.checks and self.checks[at].done()
        return at in self.failed

    def wait(self, step: int) -> None:
        """Until all that `step` has behind it is known, so that none of it lands later, or the run is about to leave.

        Raises UserError where it cannot come.
        """
        members = np.flatnonzero(self.planned.step_of == step).tolist()
        told = time.monotonic() - 25  # the first line comes soon
        while (open_ones := [at for at in members if not self.known(at)]) and not self.stopped():
            self.poll()
            self.refuse_closed(open_ones)
            if time.monotonic() - told > 30 and not self.there[open_ones[0]]:
                told = time.monotonic()
                self.process.say(f"waiting for sample {self.planned.samples[open_ones[0]].id} and {len(open_ones) - 1} "
                                 f"more | {self.silence()}")
                self.waited_long()
            time.sleep(0.02)

    def refuse_closed(self, members: list[int]) -> None:
        """Raises UserError where 03 has ended its folder (--close) without one of these."""
        if not (self.folder / "manifest.json").exists():
            return
        closed = read_manifest(self.folder, "03_extract").get("closed")
        if closed and any(not self.there[at] and at not in self.fresh for at in members):
            raise UserError(f"{self.folder}: 03_extract.py --close left out {closed:,} of the samples by which this "
                            "run has planned its steps. Train on what landed without --follow, in another "
                            "--output-dir (--finetune-from keeps what was learnt here), or let 03 go on without "
                            "--close.")

    def silence(self) -> str:
        silent = time.time() - (self.folder / "landed.jsonl").stat().st_mtime
        return f"03 has not written for {duration(max(0, silent))}"

    def usable(self, members: list[int]) -> list[Sample]:
        """Of this rank's samples, all known, those to train on."""
        checked = [self.checks[at].result()[1] for at in members if self.there[at]]
        return [sample for sample in checked if sample]

    def take(self, members: list[int]) -> list[Sample] | None:
        """The usable ones; None where some are not known yet: to wait for them here could be for ever in bounded mode.
        """
        if not all(map(self.known, members)):
            self.poll()
        return self.usable(members) if all(map(self.known, members)) else None

    def behind(self, members: list[int]) -> None:
        """These are done with: count what was found, forget the rest. Raises UserError when too much is wrong."""
        for at in members:
            quarantined = QUARANTINED, None, 0, 0
            problem, _, agreed, predicted = self.checks.pop(at).result() if self.there[at] else quarantined
            self.mine["samples"] += 1
            self.mine["agreed"] += agreed
            self.mine["predicted"] += predicted
            if problem:
                sample = self.planned.samples[at]
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
        ours = self.planned.val_at[self.process.rank::self.process.world].tolist()
        found = {sample.id: sample for part in all_ranks(self.usable(ours), self.process) for sample in part}
        self.behind(ours)
        if not found:
            raise UserError(f"{self.folder}: none of the {len(self.plan.val)} validation samples is usable. "
                            "Raise --val-ratio (in a new --output-dir).")
        return [found[name] for name in self.plan.val.ids() if name in found]

    def wait_for_end(self) -> None:
        """Until 03 is done and the validation samples are checked, or the run is about to leave."""
        told = time.monotonic() - 25
        while not (self.folder / "manifest.json").exists() and not self.stopped():
            if time.monotonic() - told > 30:
                told = time.monotonic()
                self.process.say(f"waiting for 03_extract to write its manifest | {self.silence()}")
            time.sleep(0.1)
        self.wait(self.plan.total + 1)

    def finish(self) -> str:
        """sha256 of 03's manifest."""
        read_manifest(self.folder, "03_extract")
        return sha256_file(self.folder / "manifest.json")
