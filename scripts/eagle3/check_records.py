"""What the check of a folder's samples found, kept beside them: the next run on the same data reads none of them again.

<hidden_states>/checked/<key>/<first row of the index>-<sum>.safetensors holds up to CHECK_CHUNK samples: `mass` of
their response tokens, one after the other, and in its metadata a record each: {"id", "stat", "problem"} and, where
there is no problem, "tokens", "spans": [[first, end of the response]], "agreed", "predicted", and with --loss-on all
"mass_from": 1, as the prompt's tokens have a mass, too. Where the data's folder cannot be written to, such files lie
in <output>/checked/<key>/.

The key is of all that a record hangs on besides its own file: 03's manifest (and by it the index with its checksums),
the target's head and norm, the vocabulary map, and what the masses are computed with and for. A record counts as long
as the file is the one that was read: `stat` is its size, its times of change (of the content, and of anything) and its
inode. What was found bad is looked at again, but for a run that has begun without it. Such a file is never changed (its
name holds its sum), so that runs side by side can share it; without it, its samples are read again.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eagle3.checkpoints import writing
from eagle3.processes import Process, all_ranks
from eagle3.stage import log, write_atomic

RULES = 1  # of what a check looks at: whoever changes it counts on, so that all is looked at anew
OLD_S = 3600  # a temporary file of a process that was killed
LOOK_AGAIN_S = 5  # what other runs have found meanwhile


def key_of(source, head: torch.Tensor, process: Process) -> str:
    """What the records of a folder (`sources.Source`) hang on, as a folder's name. head (Vt, H)."""
    def digest(tensor):
        return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()

    norm = source.target.final_norm()
    parts = [RULES, source.manifest_sha256, source.of, digest(head), None if norm is None else digest(norm),
             digest(source.draft_ids), source.prompts, process.device.type, str(process.dtype)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


class Records:
    """The records of one folder of samples: where they are looked for, and where new ones go.

    On several ranks all must make it at the same time.
    """

    def __init__(self, beside: Path, own: Path, process: Process):
        """beside: the folder of records in the data's, own: that in the run's output."""
        self.own, self.listed, self.files = own, 0.0, {}
        self.beside = beside if self.reached(beside, process) else None

    def reached(self, beside: Path, process: Process) -> bool:
        """Whether all ranks see the same folder there. Says so where it cannot be written to."""
        probe, refused = beside / f".probe-{uuid.uuid4().hex}.tmp", None
        try:
            beside.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            refused = error.strerror
        found = all_ranks((probe.name, refused), process)
        self.writable = not any(refused for _, refused in found)
        mine = [name for name, _ in found if (beside / name).exists()]
        seen = all_ranks((mine, sorted(chunk_names(beside))), process)
        with contextlib.suppress(OSError):
            probe.unlink()
        if self.writable:
            shared = all(len(names) == process.world for names, _ in seen)
        else:
            shared = all(names == seen[0][1] for _, names in seen)
        if not (self.writable and shared):
            why = next((refused for _, refused in found if refused), "not the same folder for every rank")
            process.say(f"{beside.parents[1]}: {why}, so what is found in its samples is kept in {self.own.parent}, "
                        "for this run alone")
        return shared

    def candidates(self, start: int) -> list[Path]:
        """The files that hold the samples from row `start` of the index on."""
        if time.monotonic() - self.listed > LOOK_AGAIN_S:
            self.files = {}
            for folder in filter(None, (self.beside, self.own)):
                for name in chunk_names(folder):
                    self.files.setdefault(int(name.split("-")[0]), []).append(folder / name)
            self.listed = time.monotonic()
        return self.files.get(start, [])

    def keep(self, start: int, mass: torch.Tensor, records: list[dict]) -> Path:
        """Write a file of samples from row `start` on. Raises UserError where no disk takes it."""
        while self.beside and self.writable:
            try:
                return write_chunk(self.beside, start, mass, records)
            except OSError as error:
                log(f"{self.beside}: cannot be written to ({error.strerror}): going on in {self.own}")
                self.writable = False
        with writing(self.own):
            self.own.mkdir(parents=True, exist_ok=True)
            return write_chunk(self.own, start, mass, records)


# ---- a file of checked/ ----
def chunk_names(folder: Path) -> list[str]:
    """Also removes what processes that were killed have left half written."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    with contextlib.suppress(OSError):
        for entry in entries:
            if entry.name.endswith(".tmp") and time.time() - entry.stat().st_mtime > OLD_S:
                os.unlink(entry)
    return [entry.name for entry in entries if entry.name[:8].isdecimal() and entry.name.endswith(".safetensors")]


def write_chunk(folder: Path, start: int, mass: torch.Tensor, found: list[dict]) -> Path:
    """`sha256`, of both, is a tensor: two keys of metadata come in no fixed order."""
    records = json.dumps(found)
    digest = hashlib.sha256(mass.numpy().tobytes() + records.encode()).digest()
    tensors = {"mass": mass, "sha256": torch.frombuffer(bytearray(digest), dtype=torch.uint8)}
    path = folder / f"{start:08d}-{digest.hex()[:16]}.safetensors"
    own = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.tmp")  # another run may be writing the same
    write_atomic(own, save(tensors, {"samples": records}))
    os.replace(own, path)
    return path


def read_chunk(path: Path) -> tuple[np.ndarray, list[dict]]:
    """(mass, records). Raises what says that it is not what was written."""
    with safe_open(path, "np") as file:
        mass, records = file.get_tensor("mass"), file.metadata()["samples"]
        written = file.get_tensor("sha256").tobytes()
    if written != hashlib.sha256(mass.tobytes() + records.encode()).digest():
        raise ValueError("not what was written")
    return mass, json.loads(records)


def read_records(path: Path) -> tuple[list[dict], int]:
    """(records, byte of the file at which their masses begin), of one that `read_chunk` has found whole.

    Raises what says that it cannot be read.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return json.loads(header["__metadata__"]["samples"]), 8 + length + header["mass"]["data_offsets"][0]


def mass_size(record: dict) -> int:
    """Tokens that have a mass: those from `mass_from` on, or of the response; none where there is a problem."""
    return 0 if record["problem"] else record["spans"][0][1] - record.get("mass_from", record["spans"][0][0])


def masses_of(mass: np.ndarray, records: list[dict]) -> list[np.ndarray]:
    """Each record's part of `mass`."""
    return np.split(mass, np.cumsum([mass_size(record) for record in records])[:-1])


def still_true(paths: list[Path], ids: list[str], stats: list, begun: bool) -> tuple[Path | None, dict]:
    """(the file of `paths` whose records all count, if one does, {id: (record, mass)} of those that do in any).

    stats: of the samples `ids` now; begun: whether the run has trained without those that were found bad.
    """
    now, found = dict(zip(ids, stats)), {}
    for path in paths:
        try:
            mass, records = read_chunk(path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            log(f"{path}: damaged ({' '.join(str(error).split())}); its samples are checked again")
            continue
        good = {record["id"]: (record, part) for record, part in zip(records, masses_of(mass, records))
                if record["stat"] and record["stat"] == now.get(record["id"]) and (begun or not record["problem"])}
        if len(good) == len(ids) == len(records):
            return path, good
        found |= good
    return None, found
