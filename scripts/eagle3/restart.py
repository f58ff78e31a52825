"""What 03 remembers of very many samples between its calls, so that a million of them take seconds to begin with.

samples.npz   what was read of responses/, as long as its manifest and part files are those that were read
placed.bin    of each sample in place: its file, and the line of landed.jsonl that it was found to agree with

Both only where there are REMEMBER samples. Either may be removed, or damaged: then all is read again.
"""
from __future__ import annotations

import collections
import hashlib
import io
import json
import os
import struct
import threading
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np

from eagle3.file_stat import numbers, settled, stat_of
from eagle3.journal import Journal, write_plan
from eagle3.responses import finished_parts, part_files
from eagle3.samples import Sample, read_samples
from eagle3.stage import log, sha256_file, write_atomic

REMEMBER = 10_000  # samples; of fewer, reading all takes a second
FLUSH_S = 5.0      # a kill loses no more than that of placed.bin
COLUMNS = ("part", "offset", "prompt_len", "tokens", "truncated", "largest")  # of samples.Sample, besides its id
RECORD = np.dtype([("name", "<u8"), ("line", "<u8"), ("stat", "<i8", 4)])
PACKED = struct.Struct("<QQ4q")


# ---- responses/ ----
class Rows:
    """The samples of responses/: read once, and remembered in 03's folder.

    parts: its part files. Raises UserError where they are not those that 01 has finished.
    """

    def __init__(self, data_dir: Path, folder: Path, max_length: int, limit: int):
        self.folder, self.path, self.max_length, self.limit = folder, folder / "samples.npz", max_length, limit
        self.stats = [[path.name, stat_of(path)] for path in part_files(data_dir)]
        manifest = data_dir / "manifest.json"
        self.key = [1, sha256_file(manifest) if manifest.is_file() else None, self.stats, max_length, limit]
        self.known = self.remembered()
        self.parts = part_files(data_dir) if self.known else finished_parts(data_dir)

    def remembered(self) -> tuple[list[Sample], collections.Counter, list | None] | None:
        """(samples, dropped by reason, plan.jsonl's stat), where nothing that they hang on has changed since."""
        try:
            with np.load(self.path) as file:
                facts = json.loads(file["facts"].tobytes())
                if facts["key"] != self.key:
                    return None
                names = file["names"].tobytes().decode().split("\n")
                samples = [Sample(*row) for row in zip(names, *(file[name].tolist() for name in COLUMNS), strict=True)]
            return samples, collections.Counter(facts["dropped"]), facts["plan"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zlib.error,
                zipfile.BadZipFile) as error:
            log(f"{self.path}: damaged ({' '.join(str(error).split())}); responses are read again")
            return None

    def read(self) -> tuple[list[Sample], collections.Counter]:
        """All samples in file order, and how many were dropped, by reason. Raises UserError."""
        if self.known:
            return self.known[:2]
        return read_samples(self.parts, self.max_length, self.limit)

    def write_plan(self, samples: list[Sample], dropped: collections.Counter) -> None:
        """plan.jsonl of `samples`, as `read` gave them, where it is not the one that was written last; remember them.
        """
        plan = self.folder / "plan.jsonl"
        if self.known and self.known[2] and self.known[2] == stat_of(plan):
            return
        write_plan(self.folder, samples)
        unchanged = all(settled(stat) and stat == stat_of(path) for path, (_, stat) in zip(self.parts, self.stats))
        if len(samples) < REMEMBER or not unchanged:
            return
        columns = {name: np.array([getattr(sample, name) for sample in samples]) for name in COLUMNS}
        facts = json.dumps({"key": self.key, "dropped": dropped, "plan": stat_of(plan)})
        texts = {"facts": facts, "names": "\n".join(sample.id for sample in samples)}
        data = io.BytesIO()
        np.savez(data, **columns, **{name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()})
        write_atomic(self.path, data.getvalue())


# ---- files in place ----
def number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[1:9], "little")  # [0] is the folder


def line_of(sample: Sample, checksum: str) -> int:
    return number_of(f"{checksum} {sample.tokens} {sample.prompt_len}")


class Placed:
    """Which files were found in place: a file that is no other since needs not be opened again."""

    def __init__(self, folder: Path, total: int):
        """total: samples that there are."""
        self.folder, self.path, self.used = folder, folder / "placed.bin", total >= REMEMBER
        self.lock, self.fresh, self.flushed = threading.Lock(), bytearray(), time.monotonic()

    def known(self, samples: list[Sample], journal: Journal) -> set[str]:
        """Ids of those whose file is the one that agreed with the line that it has in the journal."""
        if not self.used or not self.path.exists() or journal.facts is None:  # a lost line of facts comes from a file
            return set()
        data = self.path.read_bytes()
        records = np.frombuffer(data[:len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
        records = records[np.argsort(records["name"], kind="stable")]  # of one name the last one is behind
        folders, found = [[] for _ in range(256)], set()
        for sample in samples:
            if sample.id in journal.rows and journal.rows[sample.id]["tokens"] == sample.tokens:
                folders[hashlib.sha256(sample.id.encode()).digest()[0]].append(sample)
        for number, members in enumerate(folders):
            found |= self.known_in(self.folder / f"{number:02x}", members, journal, records)
        return found

    def known_in(self, folder: Path, samples: list[Sample], journal: Journal, records: np.ndarray) -> set[str]:
        try:
            with os.scandir(folder) as entries:
                stats = {entry.name: numbers(entry.stat()) for entry in entries}
        except FileNotFoundError:
            return set()
        there = [sample for sample in samples if f"{sample.id}.safetensors" in stats]
        if not there or not len(records):
            return set()
        now = np.zeros(len(there), RECORD)
        now["name"] = [number_of(sample.id) for sample in there]
        now["line"] = [line_of(sample, journal.rows[sample.id]["checksum"]) for sample in there]
        now["stat"] = [stats[f"{sample.id}.safetensors"] for sample in there]
        at = np.searchsorted(records["name"], now["name"], side="right") - 1
        same = records[at] == now
        return {sample.id for sample, known in zip(there, same.tolist()) if known}

    def add(self, sample: Sample, checksum: str, path: Path) -> None:
        """The file of `sample` was found in place, with its line."""
        stat = stat_of(path) if self.used else None
        if stat is None:  # or 04 has released it since
            return
        record = PACKED.pack(number_of(sample.id), line_of(sample, checksum), *stat)
        with self.lock:
            self.fresh += record
            due = time.monotonic() - self.flushed > FLUSH_S
        if due:
            self.flush()

    def flush(self) -> None:
        with self.lock:
            if self.fresh:
                with open(self.path, "ab") as file:
                    file.truncate(file.tell() // RECORD.itemsize * RECORD.itemsize)  # what a kill has torn
                    file.write(self.fresh)
            self.fresh, self.flushed = bytearray(), time.monotonic()
