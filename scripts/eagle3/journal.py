"""The files over which 03_extract and `04_train --follow` talk while both are at work.

03 writes   plan.jsonl        the samples in the order of one pass: {"id", "tokens", "prompt_len"}; written first
            landed.jsonl      {"facts": ...} first, then a line a sample, which {"id", "redo": true} takes back:
                              {"id", "tokens", "prompt_len", "truncated", "next_token", "checksum"}
            quarantine.jsonl  {"id", "reason", "detail"}: will not come
            deaths.jsonl      {"id"}: a server died while it had this sample; gone when the stage is complete
            index.jsonl       at the end: the lines of landed.jsonl that stand, sorted by id

Those of bounded mode: bounded.py. The order of writing is what makes a kill harmless: a line of landed.jsonl is written
before its file is renamed into place, so no file stands there without one. A last line without its line end was torn by
a kill and does not count. A line that a disk has damaged costs no more than itself: readers pass over it, and 03 makes
landed.jsonl's anew from the file.
"""
from __future__ import annotations

import collections
import ctypes
import hashlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Callable, Iterable, Iterator

from eagle3.stage import UserError, append_lines, log, sha256_file, whole_lines, write_atomic
from eagle3.states import FACTS, StateFile, check_header, check_ids, sample_path


# ---- read by both sides ----
def rows_of(lines: Iterable[bytes], path: Path | None = None) -> list[dict]:
    """The JSON objects of a journal's lines. What is none was damaged: passed over and, with its `path`, told."""
    rows, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged.append(number)
    if damaged and path:
        log(f"{path}: line {', '.join(map(str, damaged[:9]))} of it damaged: going on without")
    return rows


class Tail:
    """The whole lines that were appended to a journal since the last call."""

    def __init__(self, path: Path):
        self.path, self.offset = path, 0

    def new_rows(self) -> Iterator[dict]:
        while lines := self.new_lines():
            yield from rows_of(lines)

    def new_lines(self) -> list[bytes]:
        """The next ones: not all of a long journal, whose rows would take much memory."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                lines = file.readlines(1 << 22)
        except FileNotFoundError:
            return []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        self.offset += sum(map(len, lines))
        return lines


def cut_torn_line(path: Path) -> None:
    """Before a journal's writer appends to it: drop what a kill has torn. Makes the file where there is none."""
    size = len(whole_lines(path))
    with open(path, "ab") as file:
        file.truncate(size)


def read_plan(folder: Path) -> Iterator[dict]:
    """plan.jsonl: {"id", "tokens", "prompt_len"} of each sample, as 03 sends and 04 takes them. Raises UserError."""
    try:
        with open(folder / "plan.jsonl", "rb") as file:
            yield from map(json.loads, file)
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
    return next((row["facts"] for row in rows_of(lines) if "facts" in row), None)


def read_quarantine(folder: Path) -> dict[str, str]:
    """{id: reason} of the samples that will not come."""
    path = folder / "quarantine.jsonl"
    return {row["id"]: row["reason"] for row in rows_of(whole_lines(path).split(b"\n")[:-1], path) if "reason" in row}


# ---- written by 03 ----
LEGIBLE = (rb'"id": "([\w.-]{1,120})"', rb'"next_token": (\d+)[,}]')  # of a damaged line: what is looked for


def plan_order(sample_id: str) -> str:
    """Sort key of the plan: 01 sorts by id, so that alike samples lie together; a hash of the id parts them."""
    return hashlib.sha256(sample_id.encode()).hexdigest()


def write_plan(folder: Path, samples: list) -> None:
    """plan.jsonl, where it is not there yet, or is another --limit's. samples: anything with id, tokens, prompt_len."""
    rows = [{"id": sample.id, "tokens": sample.tokens, "prompt_len": sample.prompt_len}
            for sample in sorted(samples, key=lambda sample: plan_order(sample.id))]
    path, data = folder / "plan.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()
    if not path.exists() or path.read_bytes() != data:
        write_atomic(path, data)


def is_line(row: dict) -> bool:
    """Whether `row` is one of landed.jsonl's."""
    if "facts" in row:
        return isinstance(row["facts"], dict) and set(FACTS) <= row["facts"].keys()
    kinds = {"tokens": int, "prompt_len": int, "truncated": bool, "checksum": str}
    return isinstance(row.get("id"), str) and (row.get("redo") is True or "next_token" in row and all(
        isinstance(row.get(key), kind) for key, kind in kinds.items()))


def recovered(raw: bytes) -> list[dict]:
    """What of a damaged line is a line of landed.jsonl: two where the line end between them was hit, or a redo."""
    found = [row for text in re.findall(rb"\{[^{}]*\}", raw) for row in rows_of([text]) if is_line(row)]
    sample_id = re.search(LEGIBLE[0], raw)
    if not found and sample_id and b'"redo"' in raw:
        found = [{"id": sample_id[1].decode(), "redo": True}]
    return found


class Journal:
    """landed.jsonl: what lies in place. A sample counts when its line and its file agree; lines are only ever appended.

    rows: {id: line}; facts: what all files of the folder state (states.FACTS), None before the first; redone: ids taken
    back, whose files count no more. Lines that a disk has damaged are blanked out and made anew: what they said
    stands in the files, but for the engine's next token (`salvaged`, where it was legible).
    """

    def __init__(self, folder: Path):
        self.folder, self.path, self.lock = folder, folder / "landed.jsonl", threading.Lock()
        self.rows: dict[str, dict] = {}
        self.facts: dict | None = None
        self.redone: set[str] = set()
        self.salvaged: dict[str, int] = {}
        end, damaged = 0, []  # of the last whole line; (offset, line)
        if self.path.exists():
            with open(self.path, "rb") as file:
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # torn by a kill
                    row = next(iter(rows_of([raw])), None)
                    if raw.strip() and (row is None or row and not is_line(row)):
                        damaged.append((end, raw))
                        for found in recovered(raw):
                            self.take(found)
                    elif row:  # {} is what was blanked out
                        self.take(row)
                    end += len(raw)
        self.file = open(self.path, "ab")
        self.file.truncate(end)
        if damaged:
            self.mend(damaged)

    def mend(self, damaged: list[tuple[int, bytes]]) -> None:
        """Blank out `damaged` lines, (offset, line) each, in their place: who reads beside this goes by offsets.

        What of them is legible and still holds is written anew at the end.
        """
        log(f"{self.path}: {len(damaged)} lines damaged: what they said is taken from their files")
        with open(self.path, "rb+") as file:
            for offset, raw in damaged:
                for row in recovered(raw):
                    if row["id"] in self.redone if row.get("redo") else self.rows.get(row["id"]) == row:
                        self.add(row)
                sample_id, token = (re.search(pattern, raw) for pattern in LEGIBLE)
                if sample_id and token:
                    self.salvaged[sample_id[1].decode()] = int(token[1])
                if len(raw) > 2:
                    file.seek(offset)
                    file.write(b"{}".ljust(len(raw) - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def take(self, row: dict) -> None:
        if "facts" in row:
            self.facts = row["facts"]
        elif row.get("redo"):
            self.rows.pop(row["id"], None)
            self.redone.add(row["id"])
        else:
            self.rows[row["id"]] = row
            self.redone.discard(row["id"])

    def add(self, row: dict) -> None:
        with self.lock:
            self.take(row)
            self.file.write(json.dumps(row).encode() + b"\n")
            self.file.flush()

    def add_sample(self, sample, checksum: str, next_token: int | None) -> None:
        """The line of `sample` (id, tokens, prompt_len, truncated)."""
        self.add({"id": sample.id, "tokens": sample.tokens, "prompt_len": sample.prompt_len,
                  "truncated": sample.truncated, "next_token": next_token, "checksum": checksum})

    def sync(self) -> None:
        with self.lock:
            os.fsync(self.file.fileno())

    def in_place(self, sample, ids: Callable[[], list[int]]) -> bool:
        """Whether `sample` (as for add_sample) lies in place: line and file agree on size, facts and checksum.

        A file whose line is lost or says otherwise, but which is this sample's (`ids`), gets a new line. The checksum
        is the one in the file's header; --verify computes it. Raises UserError.
        """
        row, path = self.rows.get(sample.id), sample_path(self.folder, sample.id)
        if sample.id in self.redone or not path.exists():
            return False
        try:
            with StateFile(path) as file:
                facts = check_header(file, sample.id, sample.tokens, sample.prompt_len, self.facts)
                checksum = file.metadata["checksum"]
                if self.facts is None:
                    self.add({"facts": facts})
                if row is None or (row["tokens"], row["checksum"]) != (sample.tokens, checksum):
                    check_ids(file, ids(), sample.prompt_len)
                    log(f"{path}: its line in {self.path.name} is lost or damaged: made anew from the file")
                    self.add_sample(sample, checksum, (row or {}).get("next_token", self.salvaged.get(sample.id)))
        except ValueError as error:
            log(f"{path}: {error}: extracting it again")
            return False
        except FileNotFoundError:  # 04 has released it meanwhile
            return False
        except OSError as error:  # of one file, or of the whole disk: not a reason to make all of it again
            raise UserError(f"{path}: cannot be read ({error.strerror}). Mend the disk, or remove this file, which is "
                            "extracted again then.") from None
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


class Deaths:
    """deaths.jsonl: which samples a server had when it died, over restarts of 03. counts: {id: deaths}."""

    def __init__(self, folder: Path):
        self.path, self.lock = folder / "deaths.jsonl", threading.Lock()
        if self.path.exists():
            cut_torn_line(self.path)
        rows = rows_of(whole_lines(self.path).split(b"\n")[:-1], self.path)
        self.counts = collections.Counter(row.get("id") for row in rows)

    def add(self, sample_id: str) -> int:
        """One more death; how many these are."""
        with self.lock:
            self.counts[sample_id] += 1
            append_lines(self.path, [{"id": sample_id}])
            return self.counts[sample_id]

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


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

    def keep(self, ids: set[str]) -> None:
        """Count only these: another --limit may have named more."""
        self.reasons = {sample_id: reason for sample_id, reason in self.reasons.items() if sample_id in ids}
