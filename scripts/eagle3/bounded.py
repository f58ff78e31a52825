"""Bounded mode, for more data than disk: the room that 03 --max-disk-gb and `04 --follow` beside it share.

03 writes   bound.json      {"max_disk_gb"}
04 writes   released.jsonl  {"id", "checksum"}: may be removed, and counts as extracted

03 sends in the plan's order, and a sample only when it fits (Room). 04 trains in that order and releases (removes) what
a checkpoint has behind it: trained on, or known to be of no use (Releases). Validation samples stay to the end. A line
of released.jsonl is on the disk before its file goes, so a released sample can be told from a lost one.
"""
from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Callable

import numpy as np

from eagle3.journal import Journal, Tail, cut_torn_line, rows_of
from eagle3.patience import patiently
from eagle3.stage import UserError, append_lines, lock_file, read_json, sync_folder, whole_lines, write_atomic
from eagle3.states import HEADER_BYTES, facts_token_bytes, sample_path


# ---- both halves ----
def read_bound(folder: Path) -> int | None:
    """The most bytes of samples on the disk in bounded mode; None in the other. Raises UserError."""
    path = folder / "bound.json"
    return int(read_json(path)["max_disk_gb"] * 1e9) if path.exists() else None


def read_released(folder: Path) -> dict[str, str]:
    """{id: checksum} of the samples that 04 has released."""
    path = folder / "released.jsonl"
    rows = rows_of(whole_lines(path).split(b"\n")[:-1], path)
    return {row["id"]: row["checksum"] for row in rows if "checksum" in row}


def sizes_in_place(folder: Path) -> dict[str, int]:
    """{id: bytes} of the samples that lie in place."""
    sizes = {}
    for path in folder.glob("[0-9a-f][0-9a-f]/*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # 03 looks while 04 releases
            sizes[path.stem] = path.stat().st_size
    return sizes


def most_bytes(tokens, facts: dict):
    """The most that a file of so many tokens can take: a number, or an array of them."""
    return tokens * facts_token_bytes(facts) + HEADER_BYTES


# ---- 03's half ----
def write_bound(folder: Path, incoming: Path, max_disk_gb: float) -> None:
    """Check and write down the bound, by which 04 plans its releases. Raises UserError."""
    if os.stat(incoming).st_dev != os.stat(folder).st_dev:
        raise UserError(f"--capture-dir {incoming}: --max-disk-gb needs it on the file system of {folder}, "
                        "so that no sample lies there twice.")
    write_atomic(folder / "bound.json", json.dumps({"max_disk_gb": max_disk_gb}) + "\n")


class Room:
    """The bytes under --max-disk-gb: in place until 04 has released and removed them, and on their way."""

    def __init__(self, folder: Path, limit: int, journal: Journal, samples: list):
        """samples: all of this run, each with id, tokens, prompt_len, truncated. Raises UserError."""
        self.folder, self.limit, self.journal, self.lock = folder, limit, journal, threading.Lock()
        self.sizes = sizes_in_place(folder)
        self.coming: dict[str, int] = {}  # sent: the most bytes that each can take
        self.tail, self.released = Tail(folder / "released.jsonl"), {}  # {id: checksum}
        self.waiting: str | None = None  # the next sample, while there is no room for it
        self.last_release = time.monotonic()
        self.poll()
        for sample in samples:  # whose line was damaged, and whose file is gone: from what 04 wrote down
            if sample.id in self.released and sample.id not in journal.rows and sample.id not in journal.redone:
                journal.add_sample(sample, self.released[sample.id], journal.salvaged.get(sample.id))
        for sample_id, checksum in self.released.items():
            if journal.rows.get(sample_id, {}).get("checksum") != checksum:
                raise UserError(f"{self.tail.path}: {sample_id} was released with a checksum that landed.jsonl does "
                                "not have. The two files are of different runs: begin a new --output-dir.")

    def leaving(self) -> set[str]:
        """Released, but the file still stands."""
        return self.released.keys() & self.sizes.keys()

    def poll(self) -> None:
        self.released |= {row["id"]: row["checksum"] for row in self.tail.new_rows() if "checksum" in row}
        for sample_id in self.leaving():
            if not sample_path(self.folder, sample_id).exists():
                del self.sizes[sample_id]
                self.last_release = time.monotonic()

    def used(self) -> int:
        return sum(self.sizes.values()) + sum(self.coming.values())

    def enter(self, sample, stopped: Callable[[], bool]) -> None:
        """Wait until `sample` fits beside all that is there or on its way, or until `stopped()`. Raises UserError.

        Called by one thread at a time, in the order of the plan: no sample takes the room that an earlier one waits
        for, so what 04 needs next always comes.
        """
        while not stopped():
            facts = self.journal.facts
            need = most_bytes(sample.tokens, facts) if facts else 0
            with self.lock:
                self.poll()
                # Before the first file its size is unknown: that one goes alone
                if self.used() + need <= self.limit if facts else not self.coming:
                    self.coming[sample.id], self.waiting = need, None
                    return
                self.waiting = f"{sample.id} ({need / 1e9:,.3f} GB)"
            if need > self.limit:
                raise UserError(f"--max-disk-gb {self.limit / 1e9:g}: {sample.id} alone takes {need / 1e9:,.3f} GB. "
                                "Allow more, or cut with --max-length.")
            time.sleep(0.05)

    def landed(self, sample, size: int) -> None:
        with self.lock:
            del self.coming[sample.id]
            self.sizes[sample.id] = size

    def gave_up(self, sample) -> None:
        with self.lock:
            self.coming.pop(sample.id, None)

    def status(self) -> str:
        with self.lock:
            return (f"disk {self.used() / 1e9:,.3f}/{self.limit / 1e9:,.3f} GB | "
                    f"released {len(self.released) - len(self.leaving()):,}")


# ---- 04's half: when to release, from the plan alone ----
def release_steps(sizes: np.ndarray, step_of: np.ndarray, total: int, bound: int, share: float,
                  done: int) -> tuple[list[int], int]:
    """(steps after which to save a checkpoint and release, the least bound that would do).

    sizes (N,): most bytes of each file, in the plan's order; step_of (N,): the step that has it behind it, `total` + 1
    for validation; share: of the bound, less validation, after which to release; done: the step that is behind already.

    03 sends in the plan's order. So before step s can be taken, all files up to the last one that steps 1..s need may
    lie there, except those released at the last checkpoint c: these must fit. Where they always do, 03 and 04 never
    both wait.
    """
    trained_on, files = step_of <= total, np.zeros(total + 1, np.int64)
    np.maximum.at(files, step_of[trained_on], np.flatnonzero(trained_on) + 1)
    files[total] = len(sizes)  # 03 ends before 04 does
    # (total + 1,) bytes of the files up to the last one that steps 1..s need, and of those that these steps train on
    upto = np.concatenate([[0], np.cumsum(sizes)])[np.maximum.accumulate(files)]
    trained = np.cumsum(np.bincount(step_of[trained_on], sizes[trained_on], total + 1)).astype(np.int64)
    room = share * (bound - int(sizes[~trained_on].sum()))
    saves, saved = [], done
    for step in range(done + 1, total):
        if trained[step] - trained[saved] >= room or upto[step + 1] - trained[saved] > bound:
            saves.append(step)
            saved = step
    return saves, int((upto[done + 1:] - trained[done:-1]).max(initial=0))


class Releases:
    """04's half: files go once a checkpoint has them behind it. Of all ranks; the first one removes.

    saves: the steps after which to save a checkpoint and release; released: ids of what is gone.
    """

    def __init__(self, args, process, plan, facts: dict, bound: int, done: int, damaged: str):
        """Go on after step `done`; what it has behind it and an earlier process could not release goes now.

        args: data_dir, output_dir, release_share; plan: schedule.Plan; damaged: what is wrong with later checkpoints,
        if anything. Raises UserError.
        """
        self.folder, self.output, self.process = args.data_dir, args.output_dir, process
        self.planned, self.bound = plan.planned, bound
        self.tail, self.checksums = Tail(self.folder / "landed.jsonl"), {}  # {id: checksum} of what was not released
        self.released = set(read_released(self.folder))
        self.refuse_another_output(done, damaged)
        if process.rank == 0:
            self.lock = lock_file(self.folder / ".follow.lock")
            if not self.lock:
                raise UserError(f"{self.folder}: another 04_train.py --follow is at work there. Stop it first.")
            cut_torn_line(self.folder / "released.jsonl")
            sync_folder(self.folder)
        sizes, step_of = most_bytes(self.planned.file_tokens, facts), self.planned.step_of
        # From the start, wherever a SIGTERM has cut the run: at these steps it evaluates, too
        (saves, _), (_, least) = (release_steps(sizes, step_of, plan.total, bound, args.release_share, since)
                                  for since in (0, done))
        self.saves, held = set(saves), int(sizes[step_of > plan.total].sum())
        if least > bound:
            raise UserError(f"{self.folder}: 03's --max-disk-gb {bound / 1e9:g} is too small: validation "
                            f"({held / 1e9:.3f} GB) and the batches being filled need at least "
                            f"{math.ceil(least / 1e5) / 1e4:.4f}. Start 03_extract.py anew with more, or lower "
                            "--val-ratio or --batch-tokens.")
        self.release(done)  # killed between the checkpoint and its release
        process.say(f"bounded {bound / 1e9:,.3f} GB | least that would do {least / 1e9:,.3f} GB | "
                    f"validation stays: {held / 1e9:,.3f} GB | "
                    f"{sum(step > done for step in saves) + 1} releases to come")

    def refuse_another_output(self, done: int, damaged: str) -> None:
        """Raises UserError where step `done` has not all behind it that earlier processes released."""
        unknown = sum(not self.planned.is_behind(name, done) for name in self.released)
        if unknown and damaged:
            raise UserError(f"{damaged}, and {unknown} samples were released since the good one of step {done}: they "
                            "are gone. Put the damaged one back from a copy, or begin both stages in new folders; "
                            f"--finetune-from {self.output}/checkpoint-{done} keeps what it has learnt.")
        if unknown:
            raise UserError(f"{self.folder}/released.jsonl: names {unknown} samples that step {done} in {self.output} "
                            "has not behind it: they were released to another output folder, or to a checkpoint that "
                            "is gone. Name that --output-dir, or begin both stages in new folders.")

    def read_lines(self) -> None:
        for row in self.tail.new_rows():
            if row.get("redo"):
                self.checksums.pop(row["id"], None)
            elif "checksum" in row and row["id"] not in self.released:
                self.checksums[row["id"]] = row["checksum"]

    def release(self, step: int) -> None:
        """Remove the files that steps 1..`step` have behind them. A checkpoint of that step must be on the disk."""
        if self.process.rank:
            return
        sync_folder(self.output)  # the checkpoint's name
        sync_folder(self.tail.path)  # 03 knows a released sample by its line there, after a power cut too
        sizes = sizes_in_place(self.folder)
        patiently(self.read_lines, self.tail.path)  # each file's line comes before the file
        going = [{"id": name, "checksum": self.checksums.pop(name)} for name in sizes
                 if name in self.checksums and self.planned.is_behind(name, step)]
        if going:
            append_lines(self.folder / "released.jsonl", going)
        self.released.update(row["id"] for row in going)
        gone = self.released & sizes.keys()  # what an earlier process was killed at, too
        if not gone:
            return
        for name in gone:
            sample_path(self.folder, name).unlink()
        freed = sum(sizes[name] for name in gone)
        held = sum(sizes.values()) - freed
        self.process.say(f"released {len(gone):,} samples behind step {step}, {len(self.released):,} in all | "
                         f"{freed / 1e9:,.3f} GB | disk {held / 1e9:,.3f}/{self.bound / 1e9:,.3f} GB")

    def refuse_smaller(self) -> None:
        """Raises UserError where 03's bound has shrunk: what is waited for may never come."""
        if (read_bound(self.folder) or 0) < self.bound:
            raise UserError(f"{self.folder}/bound.json: 03's --max-disk-gb is smaller than when this began. "
                            "Run the same command again.")
