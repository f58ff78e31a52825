"""What a training run keeps on the disk as it goes, and what it goes on from: checkpoints, best/, metrics.jsonl.

state.json of a checkpoint: {"step", "best": {"step", "accept_length"} or null} and, where there is something to say,
    "seen"       what --follow has found up to here
    "unread"     {id: times} that a sample could not be read
    "cut_short"  it was saved because of a SIGTERM, in the middle of what follows a step: {"ended": whether that step's
                 log line, evaluation and checkpoint were done, "windows": of each rank since the last log line,
                 "grad_norm"}
"""
from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from eagle3.checkpoints import (check_room, checkpoint_bytes, load_checkpoint, newest_good, restore_best,
                                save_checkpoint, set_aside, write_val_ids, writing)
from eagle3.hosts import hand_out
from eagle3.metrics import Metrics, Window
from eagle3.processes import SAVING, Process, all_ranks, meet
from eagle3.stage import log, sync_folder, write_atomic
from eagle3.trainer import HostCopy
from eagle3.write_behind import SPARE, Behind, Snapshot, host_memory_left


class Keeper:
    """Of all ranks; only the first one writes. As a context it encloses the steps.

    state: of the checkpoint that the run goes on from, {} at the start; saved: its step, then that of the last one
    begun (after `settle` it is on the disk); damaged: what is wrong with later ones, if anything; left_out: {id:
    times} that this rank could not read it, since then.
    """

    def __init__(self, args, process: Process, inputs, trainer):
        """Fills the trainer from the newest good checkpoint, if there is one. Raises UserError."""
        self.args, self.process, self.inputs, self.trainer = args, process, inputs, trainer
        found = newest_good(args.output_dir, trainer.tensors()) if process.rank == 0 else None
        self.found, self.state = all_ranks(found, process)[0], {}
        self.damaged = str(self.found)
        if self.damaged:
            process.say(f"{self.damaged}: going on from the one before, {self.found.folder}")
        if self.found.folder:
            read = load_checkpoint(self.found.folder, trainer) if process.rank == 0 else {}
            self.state = hand_out(trainer, read, process)
            process.say(f"resume {self.found.folder}")
        self.saved, self.left_out = trainer.step, Counter()
        self.behind, self.snapshot, self.in_line = Behind(), None, True
        self.bytes = checkpoint_bytes(args, trainer)
        self.unread = Counter(self.state.get("unread", {}))  # by all ranks, up to that checkpoint

    def cut_short(self, window: Window, ended: bool) -> dict:
        """What a checkpoint says that a SIGTERM made: see above."""
        windows = [kept for kept in all_ranks(window.kept(), self.process) if kept]
        return {"cut_short": {"ended": ended, "windows": windows, "grad_norm": float(self.trainer.grad_norm)}}

    def take_up(self, window: Window) -> bool:
        """Go on from such a checkpoint, if it was one; whether what follows its step is still to be done."""
        cut_short = self.state.get("cut_short")
        if not cut_short:
            return False
        self.trainer.grad_norm.fill_(cut_short["grad_norm"])
        if windows := cut_short["windows"]:
            window.take_up(windows[0]["counts"], windows[self.process.rank::self.process.world], self.process.device)
        return not cut_short["ended"]

    def open(self, saves: int, last_row: int, val: list | None) -> dict | None:
        """Before the first step: room for `saves` checkpoints, metrics.jsonl, val_ids.json, best/. Returns the best.

        last_row: the step up to which metrics.jsonl holds; val: None where the samples are known later only. Raises
        UserError.
        """
        best, output = None, self.args.output_dir
        if self.process.rank == 0:
            check_room(self.args, self.trainer, saves)
            set_aside(self.found)
            with writing(output):
                self.metrics = Metrics(output, last_row, self.args.tensorboard)
                best = restore_best(output, self.state.get("best"))
            if saves:
                self.take_memory()
        if val is not None:
            self.name_validation(val)
        best, self.in_line = all_ranks((best, self.snapshot is None), self.process)[0]
        return best

    def take_memory(self) -> None:
        """For checkpoints that are written beside the steps; without it they are written in line."""
        state, model = self.bytes
        needed, left = state + 2 * model, host_memory_left()  # the drafter as it is exported, in two precisions
        if needed + SPARE > left:
            self.process.say(f"checkpoints are written in line, while training waits: beside it they would take "
                             f"{needed / 1e9:,.1f} GB of host memory, {left / 1e9:,.1f} GB are free")
            return
        self.snapshot = Snapshot(self.trainer.tensors())
        kind = "pinned memory" if self.snapshot.pinned else "memory"
        self.process.say(f"checkpoints are written beside the steps | {state / 1e9:,.1f} GB of host {kind} taken for "
                         f"them, {2 * model / 1e9:,.1f} GB more while one is written, of {left / 1e9:,.1f} GB free")

    def name_validation(self, val: list) -> None:
        if self.process.rank == 0:
            with writing(self.args.output_dir):
                write_val_ids(self.args.output_dir, val)

    def record(self, row: dict) -> None:
        """A row of metrics.jsonl."""
        if self.process.rank == 0:
            with writing(self.args.output_dir):
                self.metrics.add(row)

    def spoilt(self) -> list[str]:
        """What must not be saved: what on any rank is not finite."""
        return sorted({name for names in all_ranks(self.trainer.not_finite(), self.process) for name in names})

    def save(self, best: dict | None, prediction: dict | None, agreement: float, state: dict) -> None:
        """Write checkpoint-<step> of the trainer as it is: beside the next steps, where there is memory for that.

        Raises UserError where the disk does not take it, or did not take the one before.
        """
        begun, step = time.monotonic(), self.trainer.step
        if unread := self.count_unread():
            state = state | {"unread": unread}
        self.settle()
        self.saved = step
        if self.process.rank == 0:
            tensors = self.trainer.tensors() if self.in_line else self.snapshot.take(self.trainer.tensors())
            provenance = self.inputs.provenance(self.args, step, prediction, agreement)
            state = json.loads(json.dumps({"step": step, "best": best, **state}))  # as it is now
            stall = None if self.in_line else time.monotonic() - begun

            def write() -> None:
                with writing(self.args.output_dir):
                    sync_folder(self.metrics.path)  # its rows come no later than the checkpoint, after a power cut too
                save_checkpoint(self.args, self.trainer.draft, tensors, self.inputs, provenance, state)
                seconds = time.monotonic() - begun
                log(f"checkpoint {self.args.output_dir}/checkpoint-{step} | {sum(self.bytes) / 1e9:.2f} GB | "
                    f"stall {seconds if stall is None else stall:.2f} s | written after {seconds:.1f} s")

            self.behind.start(write)
        if self.in_line:
            self.settle()

    def settle(self) -> None:
        """Until the checkpoint that is being written is on the disk; the others wait for it too. Raises UserError."""
        if self.process.rank == 0:
            self.behind.wait()
        meet(self.process, SAVING)

    def check(self) -> None:
        """Raises UserError where the disk did not take a checkpoint."""
        self.behind.check()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind, *_) -> None:
        """Whatever ends the steps: what is being written is written before the folder is another process's."""
        if kind:
            with contextlib.suppress(BaseException):  # it is logged, and what ended the steps is said
                self.behind.wait()
        if self.snapshot:
            self.snapshot.free()

    def count_unread(self) -> dict[str, int]:
        """{id: times} that a sample could not be read, by all ranks."""
        return dict(sorted(sum(all_ranks(self.left_out, self.process), self.unread.copy()).items()))


def stop_if_not_finite(step: int, sums: HostCopy, path: Path, samples: list) -> None:
    if not torch.isfinite(sums.read()).all():
        batch = {"step": step, "samples": [str(sample.path) for sample in samples]}
        with contextlib.suppress(OSError):  # on a full disk it goes without
            write_atomic(path, json.dumps(batch, indent=1) + "\n")
        log(f"loss is not finite in step {step}: stopped; the batch is named in {path}, the last checkpoint is "
            "untouched. Look at its samples, or lower --lr in another --output-dir")
        sys.exit(1)
