"""Very many samples in little memory: columns of numbers, from which a Sample is made when it is asked for.

A million samples take 45 MB, and their names. Their masses (4 bytes a token with loss) stay in the files of checked/
until a batch needs them.
"""
from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from eagle3.batches import Sample
from eagle3.patience import patiently
from eagle3.states import sample_path

# name_end: bytes of all names up to its own end; mass: in the file number `chunk`, byte at which its mass begins;
# number: of the folder, where its name alone is not its id, else 0
ROW = np.dtype([("name", "<i8"), ("name_end", "<i8"), ("mass", "<i8"), ("tokens", "<i4"), ("start", "<i4"),
                ("loss_from", "<i4"), ("chunk", "<i4"), ("folder", "<u2"), ("number", "<u2"), ("truncated", "?")])
PACKED = struct.Struct("<qqqiiiiHH?")


class StoredMass:
    """What `Sample.mass` holds, as it lies in a file: read when an array is made of it (raises OSError)."""
    __slots__ = "path", "begin", "end"  # bytes

    def __init__(self, path: Path, begin: int, end: int):
        self.path, self.begin, self.end = path, begin, end

    def __len__(self) -> int:
        return (self.end - self.begin) // 4

    def __getitem__(self, part: slice) -> StoredMass:
        first, last, _ = part.indices(len(self))
        return StoredMass(self.path, self.begin + 4 * first, self.begin + 4 * max(first, last))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        def read() -> bytes:
            with open(self.path, "rb") as file:
                file.seek(self.begin)
                data = file.read(self.end - self.begin)
            if len(data) < self.end - self.begin:
                raise OSError(None, "ends early", str(self.path))
            return data

        return np.frombuffer(patiently(read, self.path), "<f4").astype(dtype or np.float32)


class SampleTable(Sequence):
    """Samples. rows (N,) of ROW; names: of all, one after the other; folders: (path, weight) each.

    chunks: files of masses; [None] where no mass is known yet.
    """

    def __init__(self, rows: np.ndarray, names: bytes, folders: list[tuple[Path, float]],
                 chunks: list[Path | None]):
        self.rows, self.names, self.folders, self.chunks = rows, names, folders, chunks

    @classmethod
    def empty(cls) -> SampleTable:
        return cls(np.empty(0, ROW), b"", [], [])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at):
        """The sample at a position, or the table of a slice."""
        if isinstance(at, slice):
            return self.take(at)
        name, name_end, mass, tokens, start, loss_from, chunk, folder, number, truncated = self.rows[at].item()
        name, (path, weight) = self.names[name:name_end].decode(), self.folders[folder]
        path_of_mass = self.chunks[chunk]
        stored = path_of_mass and StoredMass(path_of_mass, mass, mass + 4 * max(0, tokens - loss_from))
        return Sample(f"{number}/{name}" if number else name, sample_path(path, name), tokens, start, stored, truncated,
                      weight, loss_from)

    def take(self, order) -> SampleTable:
        """Those at the positions `order`."""
        return SampleTable(self.rows[order], self.names, self.folders, self.chunks)

    def column(self, name: str) -> Iterable:
        """A field of every sample, without making them: id, tokens, start, loss_from, truncated or weight."""
        if name == "id":
            return self.ids()
        if name == "weight":
            return np.array([weight for _, weight in self.folders] or [1.0])[self.rows["folder"]]
        return self.rows[name]

    def ids(self) -> Iterator[str]:
        for begin, end, number in zip(*(self.rows[name] for name in ("name", "name_end", "number"))):
            name = self.names[begin:end].decode()
            yield f"{number}/{name}" if number else name

    def weighted(self, weight: float) -> SampleTable:
        return SampleTable(self.rows, self.names, [(path, weight) for path, _ in self.folders], self.chunks)

    def of_response(self) -> SampleTable:
        """As `Sample.of_response`."""
        rows = self.rows.copy()
        rows["mass"] += 4 * (rows["start"] - rows["loss_from"])
        rows["loss_from"] = rows["start"]
        return SampleTable(rows, self.names, self.folders, self.chunks)

    def called_by_folder(self, at: list[int], numbers: list[int]) -> None:
        """From now on the ids of those at `at` begin with a folder's number."""
        self.rows["number"][at] = numbers


class Builder:
    """Adds samples of one folder to what becomes a table."""

    def __init__(self, folder: Path):
        self.folder, self.rows, self.names, self.chunks = folder, bytearray(), bytearray(), []

    def add(self, name: str, tokens: int, start: int, loss_from: int, truncated: bool,
            chunk: Path | None = None, mass: int = 0) -> None:
        """mass: the byte of `chunk` at which that of token `loss_from` lies."""
        if not self.chunks or self.chunks[-1] != chunk:
            self.chunks.append(chunk)
        begin = len(self.names)
        self.names += name.encode()
        self.rows += PACKED.pack(begin, len(self.names), mass, tokens, start, loss_from, len(self.chunks) - 1, 0, 0,
                                 truncated)

    def table(self) -> SampleTable:
        return SampleTable(np.frombuffer(self.rows, ROW), bytes(self.names), [(self.folder, 1.0)], self.chunks)


def joined(tables: list[SampleTable]) -> SampleTable:
    """One after the other; the folders of each keep their places behind those of the one before."""
    if len(tables) == 1:
        return tables[0]
    whole = SampleTable.empty()
    for table in tables:
        rows = table.rows.copy()
        for name, by in (("name", len(whole.names)), ("name_end", len(whole.names)), ("chunk", len(whole.chunks)),
                         ("folder", len(whole.folders))):
            rows[name] += by
        whole = SampleTable(np.concatenate([whole.rows, rows]), whole.names + table.names,
                            whole.folders + table.folders, whole.chunks + table.chunks)
    return whole
