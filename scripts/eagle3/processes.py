"""The processes that train together: joining them, waiting for them, and leaving at the same step.

A rank that hangs must not hold the others for ever, and one that is rightly behind must not end the run. So the
collectives of the loop wait for minutes, and only `meet` waits as long as it is told.
"""
from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from eagle3.stage import PROGRAM, UserError, log

# How long a rank waits for the others. In the loop: longer than a compilation or a file server's pause
LOOP = timedelta(minutes=15)
ANSWER = timedelta(minutes=14)  # less, so that it is this one that ends in a line, before NCCL ends the process
SAVING = timedelta(hours=1)  # while rank 0 writes a checkpoint
LONG_WORK = timedelta(hours=12)  # where each reads its own share of all samples
# What gloo, NCCL and the store say when a rank does not answer or its connection breaks
LOST = "gloo|nccl|barrier|time.?out|timed out|connection|reset by peer|closed by peer|pair closure"
TERMINATED = 128 + signal.SIGTERM  # exit code


@dataclass(frozen=True)
class Process:
    """One of `world` processes that train together, and where it computes. A single one takes the same path as many."""
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype
    patient: dist.ProcessGroup | None = None  # for `meet`
    group: dist.ProcessGroup | None = None  # of these ranks; None: of all
    near: Process | None = None  # where not all ranks see the same folders: those that do, this one as one of them

    def say(self, event: str) -> None:
        if self.rank == 0:
            log(event)


def join_processes(device: str | None, dtype: str | None) -> Process:
    """Joins the other ranks, if torchrun started any. Raises UserError."""
    rank, world, local = (int(os.environ.get(name, default))
                          for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(f"rank {rank} wants GPU {local}, torch sees {torch.cuda.device_count()}. "
                            "Start as many processes as GPUs, or --device cpu.")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=LOOP)
    patient = dist.new_group(backend="gloo", timeout=LONG_WORK) if world > 1 else None
    dtype = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    return Process(rank, world, device, dtype, patient)


def all_ranks(value, process: Process) -> list:
    """`value` of each rank."""
    parts = [value] * process.world
    if process.world > 1:
        dist.all_gather_object(parts, value, process.group)
    return parts


def meet(process: Process, within: timedelta) -> None:
    """Until all ranks are here, or that long."""
    if process.world > 1:
        dist.monitored_barrier(process.patient, timeout=within)


@contextlib.contextmanager
def together(process: Process):
    """Where a collective in here fails or waits too long, this process ends at once, with a line and exit code 1.

    Ending as usual could wait for the lost rank again: for what lies in the queue of a GPU. torchrun ends the others.
    """
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if process.world == 1 or not (isinstance(error, dist.DistError) or re.search(LOST, reason, re.I)):
            raise
        print(f"{PROGRAM}: another rank hangs or has died. Its own last lines say why; else look at its GPU and disk. "
              f"The same command goes on from the last checkpoint. ({reason[:200]})", file=sys.stderr, flush=True)
        leave(1)


def leave(code: int) -> None:
    """End this process; one of several ranks at once: gloo's threads may abort a Python that ends as usual."""
    if not dist.is_initialized():
        sys.exit(code)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


class Leaving:
    """SIGTERM: not the end at once, but at the end of a step, and on all ranks of the same one.

    torchrun passes the signal on to all ranks, and a scheduler may send it to them as well: a second one is no news.
    """

    def __init__(self, process: Process):
        self.process, self.heard, self.asked = process, False, None
        self.handles = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Leaving:
        if self.handles:
            self.before = signal.signal(signal.SIGTERM, self.hear)
        return self

    def __exit__(self, *_) -> None:
        if self.handles:
            signal.signal(signal.SIGTERM, self.before)

    def hear(self, *_) -> None:
        self.heard = True

    def agreed(self, at_once: bool = False) -> bool:
        """Whether to leave: the same answer on all ranks, which must ask at the same places.

        Without `at_once` it is what they had heard when they asked before, so that none waits for the slowest to
        answer.
        """
        if self.process.world == 1:
            return self.heard
        answers = [self.asked] if self.asked else []
        flag = torch.tensor(int(self.heard))
        self.asked = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True), flag
        if at_once:
            answers, self.asked = [*answers, self.asked], None
        for work, _ in answers:
            work.wait(ANSWER)
        return any(bool(flag) for _, flag in answers)
