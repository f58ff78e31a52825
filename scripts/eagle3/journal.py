"""The files over which 03_extract and `04_train --follow` talk while both are at work, and the room they share.

03 writes   plan.jsonl        the samples in the order of one pass: {"id", "tokens", "prompt_len"}; written first
            landed.jsonl      {"facts": ...} first, then a line a sample, which {"id", "redo": true} takes back:
                              {"id", "tokens", "prompt_len", "truncated", "next_token", "checksum"}
            quarantine.jsonl  {"id", "reason", "detail"}: will not come
            bound.json        {"max_disk_gb"}: only in bounded mode
            index.jsonl       at the end: the lines of landed.jsonl that stand, sorted by id
04 writes   released.jsonl    {"id", "checksum"}: may be removed, and counts as extracted

The order of writing is what makes a kill harmless. A line of landed.jsonl is written before its file is renamed into
place, so no file stands there without one; a line of released.jsonl is on the disk before its file goes, so a released
sample can be told from a lost one. A last line without its line end was torn by a kill and does not count.
"""
from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Callable

from eagle3.stage import UserError, append_lines, log, read_json, sha256_file, whole_lines, write_atomic
from eagle3.states import HEADER_BYTES, StateFile, check_header, facts_token_bytes, sample_path


# ---- read by both sides ----
class Tail:
    """The whole lines that were appended to a journal since the last call."""

    def __init__(self, path: Path):
        self.path, self.offset = path, 0

    def new_rows(self) -> list[dict]:
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size <= self.offset:
                    return []
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[:data.rfind(b"\n") + 1]
        self.offset += len(data)
        return [json.loads(line) for line in data.splitlines()]


def cut_torn_line(path: Path) -> None:
    """Before a journal's writer appends to it: drop what a kill has torn. Makes the file where there is none."""
    size = len(whole_lines(path))
    with open(path, "ab") as file:
        file.truncate(size)


def read_plan(folder: Path) -> list[dict]:
    """plan.jsonl: {"id", "tokens", "prompt_len"} of each sample, as 03 sends and 04 takes them. Raises UserError."""
    try:
        return [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        raise UserError(f"{folder}: no readable plan.jsonl, which 03_extract.py writes when it begins. "
                        "Run 03_extract.py there first.") from None


def read_facts(folder: Path) -> dict | None:
    """What 03 says of all its samples (states.FACTS), written with the first of them; None until then."""
    try:
        with open(folder / "landed.jsonl", "rb") as file:
            lines = file.read(1 << 16).split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    return next((row["facts"] for row in map(json.loads, lines) if "facts" in row), None)


def read_bound(folder: Path) -> int | None:
    """The most bytes of samples on the disk in bounded mode; None in the other. Raises UserError."""
    path = folder / "bound.json"
    return int(read_json(path)["max_disk_gb"] * 1e9) if path.exists() else None


def read_quarantine(folder: Path) -> dict[str, str]:
    """{id: reason} of the samples that will not come."""
    lines = whole_lines(folder / "quarantine.jsonl").splitlines()
    return {row["id"]: row["reason"] for row in map(json.loads, lines)}


def read_released(folder: Path) -> dict[str, str]:
    """{id: checksum} of the samples that 04 has released."""
    lines = whole_lines(folder / "released.jsonl").splitlines()
    return {row["id"]: row["checksum"] for row in map(json.loads, lines)}


def append_released(folder: Path, checksums: dict[str, str]) -> None:
    """04's side: {id: checksum} may go. On the disk when this returns, and only then may their files be removed."""
    rows = [{"id": sample_id, "checksum": checksum} for sample_id, checksum in checksums.items()]
    append_lines(folder / "released.jsonl", rows)


def sizes_in_place(folder: Path) -> dict[str, int]:
    """{id: bytes} of the samples that lie in place."""
    return {path.stem: path.stat().st_size for path in folder.glob("[0-9a-f][0-9a-f]/*.safetensors")}


# ---- written by 03 ----
def plan_order(sample_id: str) -> str:
    """Sort key of the plan: 01 sorts by id, so that alike samples lie together; a hash of the id parts them."""
    return hashlib.sha256(sample_id.encode()).hexdigest()


def write_plan(folder: Path, samples: list) -> None:
    """plan.jsonl, where it is not there yet. samples: anything with id, tokens and prompt_len."""
    if not (folder / "plan.jsonl").exists():
        rows = [{"id": sample.id, "tokens": sample.tokens, "prompt_len": sample.prompt_len}
                for sample in sorted(samples, key=lambda sample: plan_order(sample.id))]
        write_atomic(folder / "plan.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def write_bound(folder: Path, max_disk_gb: float) -> None:
    write_atomic(folder / "bound.json", json.dumps({"max_disk_gb": max_disk_gb}) + "\n")


class Journal:
    """landed.jsonl: what lies in place. A sample counts when its line and its file agree; lines are only ever appended.

    rows: {id: line}; facts: what all files of the folder state (states.FACTS), None before the first of them.
    """

    def __init__(self, folder: Path):
        self.folder, self.path, self.lock = folder, folder / "landed.jsonl", threading.Lock()
        self.rows: dict[str, dict] = {}
        self.facts: dict | None = None
        good = 0
        if self.path.exists():
            with open(self.path, "rb") as file:
                for raw in file:
                    try:
                        row = json.loads(raw)
                    except ValueError:
                        break
                    if not raw.endswith(b"\n"):
                        break  # torn by a kill
                    good += len(raw)
                    self.take(row)
        self.file = open(self.path, "ab")
        self.file.truncate(good)

    def take(self, row: dict) -> None:
        if "facts" in row:
            self.facts = row["facts"]
        elif row.get("redo"):
            self.rows.pop(row["id"], None)
        else:
            self.rows[row["id"]] = row

    def add(self, row: dict) -> None:
        with self.lock:
            self.take(row)
            self.file.write(json.dumps(row).encode() + b"\n")
            self.file.flush()

    def sync(self) -> None:
        with self.lock:
            os.fsync(self.file.fileno())

    def in_place(self, sample) -> bool:
        """Whether `sample` (id, tokens, prompt_len) lies in place: line and file agree on size, facts and checksum.

        The checksum is the one in the file's header; --verify computes it.
        """
        row, path = self.rows.get(sample.id), sample_path(self.folder, sample.id)
        if row is None or row["tokens"] != sample.tokens or not path.exists():
            return False
        try:
            with StateFile(path) as file:
                check_header(file, sample.id, sample.tokens, sample.prompt_len, self.facts)
                if file.metadata["checksum"] != row["checksum"]:
                    raise ValueError("its checksum is not the one written down")
        except ValueError as error:
            log(f"{path}: {error}: extracting it again")
            return False
        return True

    def write_index(self, ids: list[str]) -> str:
        """index.jsonl of `ids`; returns its sha256. Every rename before it is made to last first."""
        self.sync()
        handle = os.open(self.folder, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):  # one call for 256 folders
            raise OSError(ctypes.get_errno(), "syncfs", str(self.folder))
        os.close(handle)
        rows = [json.dumps(self.rows[sample_id], sort_keys=True) + "\n" for sample_id in sorted(ids)]
        write_atomic(self.folder / "index.jsonl", "".join(rows))
        return sha256_file(self.folder / "index.jsonl")


class Quarantine:
    """quarantine.jsonl: samples that were tried and given up. reasons: {id: one of few}."""

    def __init__(self, folder: Path):
        self.path, self.lock = folder / "quarantine.jsonl", threading.Lock()
        if self.path.exists():
            cut_torn_line(self.path)  # that sample is tried again
        self.reasons = read_quarantine(folder)

    def add(self, sample_id: str, reason: str, detail: str) -> None:
        with self.lock:
            self.reasons[sample_id] = reason
            append_lines(self.path, [{"id": sample_id, "reason": reason, "detail": detail}])


# ---- bounded mode ----
class Room:
    """The bytes under --max-disk-gb: in place until 04 has released and removed them, and on their way."""

    def __init__(self, folder: Path, limit: int, journal: Journal):
        self.folder, self.limit, self.journal, self.lock = folder, limit, journal, threading.Lock()
        self.sizes = sizes_in_place(folder)
        self.coming: dict[str, int] = {}  # sent: the most bytes that each can take
        self.tail = Tail(folder / "released.jsonl")
        self.released: dict[str, str] = {}  # {id: checksum}
        self.leaving: set[str] = set()  # released, but the file still stands
        self.waiting: str | None = None  # the next sample, while there is no room for it
        self.last_release = time.monotonic()
        self.poll()
        for sample_id, checksum in self.released.items():
            if journal.rows.get(sample_id, {}).get("checksum") != checksum:
                raise UserError(f"{self.tail.path}: {sample_id} was released with a checksum that landed.jsonl does "
                                "not have. The two files are of different runs: begin a new --output-dir.")

    def poll(self) -> None:
        for row in self.tail.new_rows():
            self.released[row["id"]] = row["checksum"]
            self.leaving.add(row["id"])
        for sample_id in list(self.leaving):
            if not sample_path(self.folder, sample_id).exists():
                self.leaving.discard(sample_id)
                self.sizes.pop(sample_id, None)
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
            need = sample.tokens * facts_token_bytes(facts) + HEADER_BYTES if facts else 0
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
            self.coming.pop(sample.id, None)
            self.sizes[sample.id] = size
            if sample.id in self.released:  # 04 was quicker than this line
                self.leaving.add(sample.id)

    def gave_up(self, sample) -> None:
        with self.lock:
            self.coming.pop(sample.id, None)

    def status(self) -> str:
        with self.lock:
            return (f"disk {self.used() / 1e9:,.3f}/{self.limit / 1e9:,.3f} GB | "
                    f"released {len(self.released) - len(self.leaving):,}")
