"""Ranks on several hosts: what all must have in common, and what each host has for itself.

The folders that 04's flags name may be shared by all hosts or each host's own, under the same path or another:

    data, vocabulary map, target   a copy of its own must be the same to the hash of its manifest, and each host checks
                                   its copy (checked.py); what is bad on one host is left out on all
    output                         checkpoints, metrics, plots and the log are rank 0's. Where another host does not
                                   see its folder, that host keeps stage.json and a lock in its own, and gets what it
                                   needs of a checkpoint from rank 0
"""
from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import IO, Callable, Iterator, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from eagle3.batches import each, some
from eagle3.checked import Checked
from eagle3.checkpoints import checkpoints
from eagle3.processes import LONG_WORK, Process, all_ranks, meet
from eagle3.stage import UserError, log

# What of a config may be another on each host: paths (of what they name the hashes are compared), and its own devices
PER_HOST = {"config", "verifier-path", "data-dir", "vocab-mapping-dir", "output-dir", "val-data-dir", "finetune-from",
            "num-workers", "device"}
FLAG_OF = {"hidden_states": "--data-dir", "plan": "--data-dir", "val_hidden_states": "--val-data-dir",
           "vocab_mapping": "--vocab-mapping-dir", "target_config": "--verifier-path",
           "finetune_from": "--finetune-from"}
Result = TypeVar("Result")


def on_all(process: Process, work: Callable[[], Result]) -> Result:
    """What `work()` returns. A UserError of one rank is raised on all, with its host. No collective in `work`."""
    if process.world == 1:
        return work()
    result, problem = None, None
    try:
        result = work()
    except UserError as error:
        problem = str(error)
    meet(process, LONG_WORK)
    problems = all_ranks((socket.gethostname(), problem), process)
    for rank, (host, text) in enumerate(problems):
        if text:
            same = all(other == text for _, other in problems)
            raise UserError(text if same else f"rank {rank} on {host}: {text}")
    return result


# ---- the same inputs ----
def agree(process: Process, config: dict, shared: Path | None = None) -> None:
    """Raises UserError, the same on all ranks, where a flag or the hash of an input is another on one of them.

    config: {flag: value, "inputs": {name: hash}}; shared: a file of a folder that must be one for all (--follow's).
    """
    facts = {f"--{key}": value for key, value in config.items() if key not in PER_HOST | {"inputs"}}
    facts |= {FLAG_OF.get(name, name): digest for name, digest in config["inputs"].items()}
    parts = all_ranks((socket.gethostname(), facts, identity(shared) if shared else None), process)
    first, wanted, one_folder = parts[0]
    for rank, (host, found, seen) in enumerate(parts):
        if differs := differences(found, wanted):
            raise UserError(f"rank {rank} on {host} has {differs[0]}, rank 0 on {first} {differs[1]}. All hosts need "
                            "the same flags and the same inputs, by the hashes of their manifests: copy the folders "
                            "whole, or name one that all see.")
        if seen != one_folder:
            raise UserError(f"rank {rank} on {host} sees another {shared} than rank 0 on {first}. With --follow 03 "
                            "and 04 talk over the files of one --data-dir: put it where all hosts see it.")


def differences(found: dict, wanted: dict) -> tuple[str, str] | None:
    """What is another in each, in words; None where nothing is."""
    keys = [key for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)]
    return tuple(", ".join(f"{key} {brief(facts.get(key))}" for key in keys) for facts in (found, wanted)) \
        if keys else None


def brief(value: object) -> str:
    """Of a hash its first letters, as one compares them by eye."""
    if isinstance(value, list):
        return "+".join(map(brief, value))
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


# ---- the folders of each host ----
def identity(path: Path) -> tuple | None:
    """Two ranks that see one file, written long ago, find the same; None without it. Opened: NFS asks its server."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def seen_of(process: Process, folder: Path, marks: bool) -> list[str | None]:
    """Of each rank, which of the ranks' marks it sees in its `folder`, the first one; two that see one share it.

    marks: whether this rank leaves one. A name that nobody has asked for before is in no cache of NFS.
    """
    if process.world == 1:
        return [None]
    mark = folder / f".{uuid.uuid4().hex}.seen"
    if marks:
        mark.touch()
    try:
        names = all_ranks(mark.name if marks else None, process)
        return all_ranks(next((name for name in names if name and (folder / name).exists()), None), process)
    finally:
        if marks:
            mark.unlink(missing_ok=True)


@contextlib.contextmanager
def opened(process: Process, output: Path, open_folder: Callable[[], IO], data: list[Path]) -> Iterator[Process]:
    """The output folder opened by rank 0 and, where others do not see that one, once on each of their hosts.

    open_folder: locks it (stage.open_stage); data: folders of samples. Yields the process, which then knows the ranks
    `near` it. Raises UserError on all ranks.
    """
    leads = int(os.environ.get("LOCAL_RANK", 0)) == 0
    with contextlib.ExitStack() as locks:
        if lock := on_all(process, lambda: open_folder() if process.rank == 0 else None):
            locks.enter_context(lock)
        first, *_ = seen = seen_of(process, output, process.rank == 0)
        apart = seen[process.rank] != first
        if lock := on_all(process, lambda: open_folder() if apart and leads else None):
            locks.enter_context(lock)
        seen = seen_of(process, output, process.rank == 0 or apart and leads)
        sees = (seen[process.rank], *(identity(folder / "manifest.json") for folder in data))
        last = max((step for step, _ in checkpoints(output)), default=0)
        parts = all_ranks((socket.gethostname(), sees, last, str(output)), process)
        refuse_moved(parts)
        yield neighbours(process, parts)


def refuse_moved(parts: list[tuple]) -> None:
    """Raises UserError where the checkpoints lie on another host than rank 0's: it would begin anew there.

    parts: of each rank its host, what it sees, its last checkpoint's step, its output folder.
    """
    first, (mark, *_), last, _ = parts[0]
    for rank, (host, (other, *_), step, folder) in enumerate(parts):
        if other != mark and step > last:
            raise UserError(f"rank {rank} on {host}: {folder} there has checkpoint-{step}, that of rank 0 on {first} "
                            f"{f'only checkpoint-{last}' if last else 'none'}. Start {host} as rank 0 (torchrun "
                            "--node_rank 0 with --master_addr), or move the folder to the other host.")


def neighbours(process: Process, parts: list[tuple]) -> Process:
    """`process`, which knows the ranks that see the same folders, and says where what is kept. parts: as above."""
    seen = [sees for _, sees, *_ in parts]
    hosts = list(dict.fromkeys(host for host, *_ in parts))
    groups = [[rank for rank, sees in enumerate(seen) if sees == one] for one in dict.fromkeys(seen)]
    if len(groups) == 1:
        if len(hosts) > 1:
            process.say(f"hosts {', '.join(hosts)} | all see the same folders")
        return process
    near = None
    for ranks in groups:  # every rank makes every group
        group = dist.new_group(ranks, backend="gloo", timeout=LONG_WORK)
        if process.rank in ranks:
            near = replace(process, rank=ranks.index(process.rank), world=len(ranks), patient=group, group=group)
    own = ", ".join(f"{parts[ranks[0]][0]} ranks {','.join(map(str, ranks))}" for ranks in groups)
    process.say(f"hosts {own} | each checks its own samples | checkpoints and metrics lie in {parts[0][3]} on "
                f"{parts[0][0]}")
    if process.rank and near.rank == 0:
        log(f"rank {process.rank} of {process.world} | log, checkpoints and metrics are rank 0's on {parts[0][0]}")
    return replace(process, near=near)


def good_everywhere(checked: Checked, process: Process) -> Checked:
    """What `checked` is once the samples that are bad on any host are left out. Of figures rank 0's count."""
    if not process.near:
        return checked
    meet(process, LONG_WORK)
    parts = all_ranks((checked.problems, checked.agreed, checked.predicted), process)
    problems = {}
    for found, *_ in reversed(parts):
        problems |= found
    for name in sorted(problems.keys() - parts[0][0].keys()):
        process.say(f"skipped {name} | {problems[name]} on another host")
    good = [i for i, name in enumerate(each(checked.samples, "id")) if name not in problems]
    samples = some(checked.samples, np.array(good, np.int64))
    return Checked(samples, Counter(problems.values()), *parts[0][1:], problems)


# ---- checkpoints ----
def hand_out(trainer, state: dict, process: Process) -> dict:
    """What rank 0 has read of a checkpoint becomes every rank's: the trainer's tensors, its step, and `state`."""
    if process.world > 1:
        trainer.step, state = all_ranks((trainer.step, state), process)[0]
        for tensor in trainer.tensors().values():
            dist.broadcast(tensor, 0)
        if process.rank:
            trainer.draft.refresh()
        if process.device.type == "cuda":
            torch.cuda.synchronize(process.device)
    return state
