"""How 01_generate keeps what it has paid for: rows are appended and fsynced in groups, and sorted once at the end.

A kill -9 loses at most the rows that were not on the disk yet. What it leaves (a torn last line, half a sorted copy) is
mended when the folder is opened again.
"""
from __future__ import annotations

import array
import asyncio
import errno
import json
import os
import shutil
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Iterator

from eagle3.responses import drop_row, part_files, part_name, row_at
from eagle3.stage import UserError, log, sha256_file, sync_folder, write_atomic

ROWS_PER_PART = 10_000
FILES_AT_ONCE = 64  # open while rows are sorted: a large folder has more parts than a process may open
OFFSET_BITS = 48  # a row's location in one integer: part number << OFFSET_BITS | byte offset


class Store:
    """Rows on disk: part-*.jsonl and dropped.jsonl.

    done: row id -> location; dropped: row id -> drop_row(); tokens, usd: what all rows cost together;
    kinds: {(ids_source, the engine's model or None)} of the rows that were here when the folder was opened;
    thought: (provider, how_reasoned) -> rows; n_rows: answers on the disk, those of this session included.
    prices: $ per million tokens of prompt and of answer, for rows whose usage does not tell the cost.
    """

    def __init__(self, folder: Path, prices: list[float] | None):
        self.prices = prices or (0.0, 0.0)
        self.folder, self.done, self.dropped, self.tokens, self.usd, self.kinds = folder, {}, {}, 0, 0.0, set()
        self.thought, self.n_rows = Counter(), 0
        self.pending, self.wake = [], asyncio.Event()  # pending: (row, its line, a future to settle once it is written)
        place_sorted(folder)
        self.part, self.rows_in_part = 0, 0
        for self.part, path in enumerate(part_files(folder)):
            if path.name != part_name(self.part):
                raise UserError(f"{folder}: {part_name(self.part)} is missing though {path.name} is there. "
                                "Put it back, or use another folder.")
            self.rows_in_part = 0
            for offset, row in mended_rows(path):
                self.done[row["id"]] = self.part << OFFSET_BITS | offset
                self.kinds.add((row["ids_source"], row.get("model") if row["ids_source"] == "server" else None))
                self.charge(row)
                self.rows_in_part += 1
        for _, row in mended_rows(folder / "dropped.jsonl", ("id", "reason", "usage")):
            if not row.get("again"):
                self.dropped[row["id"]] = row
                self.charge(row)

    def charge(self, row: dict) -> None:
        if "reason" not in row:
            self.thought[row.get("provider"), how_reasoned(row)] += 1
            self.n_rows += 1
        usage = row.get("usage") or {"prompt_tokens": len(row.get("prompt_ids", ())),
                                 "completion_tokens": len(row.get("response_ids", ()))}
        n_prompt, n_answer = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        self.tokens += n_prompt + n_answer
        self.usd += usage.get("cost", (n_prompt * self.prices[0] + n_answer * self.prices[1]) / 1e6)

    def knows(self, row_id: str) -> bool:
        return row_id in self.done or row_id in self.dropped

    def row(self, row_id: str) -> dict:
        """The answer or drop row of an id that `knows`."""
        if row_id not in self.done:
            return self.dropped[row_id]
        location = self.done[row_id]
        return row_at(self.folder / part_name(location >> OFFSET_BITS), location & (1 << OFFSET_BITS) - 1)

    async def put(self, row: dict) -> None:
        """Returns when the row (an answer, or a drop row) is on the disk. Raises OSError when it cannot be written."""
        try:
            line = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        except UnicodeEncodeError:  # half a surrogate pair: no tokenizer could have read it either
            row = drop_row(row["id"], "not_utf8", usage=row["usage"])
            line = (json.dumps(row) + "\n").encode()
        written = asyncio.get_running_loop().create_future()
        self.pending.append((row, line, written))
        self.wake.set()
        await written

    async def writer(self) -> None:
        """Runs beside the workers: one fsync for all rows that came while the last one ran."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            batch, self.pending = self.pending, []
            try:
                await asyncio.to_thread(self.commit, batch)
            except OSError as error:
                for *_, written in batch:
                    written.set_exception(OSError(error.errno, error.strerror))
                continue
            for row, _, written in batch:
                self.charge(row)
                if "reason" in row:
                    self.dropped[row["id"]] = row
                written.set_result(None)

    def unmarked(self) -> set[str]:
        """Providers that leave marks of reasoning in the text, and never send it in a field of its own."""
        return {provider for provider, how in self.thought if how == "marked"} - {
            provider for provider, how in self.thought if how == "parsed"}

    def commit(self, batch: list) -> None:
        groups = {}  # file name -> lines
        for row, line, _ in batch:
            if "reason" in row:
                groups.setdefault("dropped.jsonl", []).append(line)
                continue
            if self.rows_in_part == ROWS_PER_PART:
                self.part, self.rows_in_part = self.part + 1, 0
            groups.setdefault(part_name(self.part), []).append(line)
            self.rows_in_part += 1
        for name, lines in groups.items():
            append_synced(self.folder / name, b"".join(lines))


def write_dropped(folder: Path, dropped: dict[str, dict], unpaid: dict[str, dict] | None = None) -> None:
    """dropped.jsonl anew, by id. unpaid: drops of a run that did not finish, which the next one tries again."""
    rows = {**{row_id: {**row, "again": True} for row_id, row in (unpaid or {}).items()}, **dropped}
    write_atomic(folder / "dropped.jsonl",
                 "".join(json.dumps(rows[row_id], ensure_ascii=False) + "\n" for row_id in sorted(rows)))


def holds_nothing(folder: Path) -> bool:
    """No answer and no drop that was paid for lies here."""
    return not part_files(folder) and all(
        row.get("again") for _, row in mended_rows(folder / "dropped.jsonl", ("id", "reason")))


def how_reasoned(row: dict) -> str:
    """Where a row's reasoning came from: marks in the text, a field of its own (or the target's ids), or none came."""
    if "reasoning_from_text" in row["flags"]:
        return "marked"
    return "parsed" if row.get("reasoning") else "bare"


def append_synced(path: Path, data: bytes) -> None:
    """All of `data` at the end of the file and on the disk, or nothing of it and an OSError."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)  # or the next row would be appended to a torn one
            raise
    if size == 0:
        sync_folder(path.parent)


DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO, errno.ESTALE,
               errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


def cannot_write(folder: Path, error: OSError) -> str:
    return f"{folder}: cannot write ({error.strerror}). Make room; the same command goes on."


def check_room(folder: Path, needed: int) -> None:
    """Can rows be written here, `needed` bytes of them? Raises UserError: before the first request, not after it."""
    probe = folder / ".probe"
    try:
        probe.write_bytes(b"row " * 64)
        probe.unlink()
        for path in (*part_files(folder), folder / "dropped.jsonl"):
            if path.exists():
                open(path, "r+b").close()
        if not writable(folder, needed):
            raise OSError(errno.ENOSPC, f"{needed / 1e6:,.0f} MB are needed for the answers in flight, less is free")
    except OSError as error:
        raise UserError(cannot_write(folder, error)) from None


def writable(folder: Path, needed: int) -> bool:
    """Has the disk of a folder so many bytes left?"""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize >= needed


KEYS = ("id", "source", "ids_source", "prompt_ids", "response_ids", "finish_reason", "flags")  # no row lacks one


def mended_rows(path: Path, keys: tuple[str, ...] = KEYS) -> Iterator[tuple[int, dict]]:
    """(byte offset, row) of one of this folder's own files; none where there is no file.

    A last line without its newline is what a kill left: it is cut off. Raises UserError on any other damage.
    """
    offset = 0
    if not path.exists():
        return
    with open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                log(f"{path}: cut off a torn last line of {len(line)} bytes")
                file.truncate(offset)
                return
            try:
                row = json.loads(line)
                what = "" if isinstance(row, dict) and all(key in row for key in keys) else "lacks keys of a row"
            except ValueError:
                what = "is not JSON"
            if what:
                raise UserError(f"{path}: the row at byte {offset} {what}. "
                                "Delete that line; its prompt will be asked again.")
            yield offset, row
            offset += len(line)


def sort_rows(folder: Path, locations: list[int] | array.array) -> dict[str, str]:
    """{part: sha256} of the folder's rows, written anew in this order. A kill leaves the old order or the new one.

    The copy grows in sorted/, is renamed to sorted.ready/ when it is whole, and takes the parts' place from there.
    """
    temporary, files = folder / "sorted", {}
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    handles = OrderedDict()  # part number -> file, the one used last at the end
    for start in range(0, len(locations), ROWS_PER_PART):
        path = temporary / part_name(start // ROWS_PER_PART)
        with open(path, "wb") as out:
            for location in locations[start:start + ROWS_PER_PART]:
                part = location >> OFFSET_BITS
                if part not in handles:
                    handles[part] = open(folder / part_name(part), "rb")
                    if len(handles) > FILES_AT_ONCE:
                        handles.popitem(last=False)[1].close()
                handles.move_to_end(part)
                handles[part].seek(location & (1 << OFFSET_BITS) - 1)
                out.write(handles[part].readline())
            out.flush()
            os.fsync(out.fileno())
        files[path.name] = sha256_file(path)
    for handle in handles.values():
        handle.close()
    sync_folder(temporary)
    os.rename(temporary, folder / "sorted.ready")
    place_sorted(folder)
    return files


def place_sorted(folder: Path) -> None:
    """Put a complete sorted copy in place of the parts. Goes on where a kill stopped it."""
    ready = folder / "sorted.ready"
    names = [path.name for path in part_files(ready)]
    for path in part_files(folder) if names else ():
        if path.name > names[-1]:  # rows were fewer than their parts could hold: all of them are in the copy
            path.unlink()
    for name in names:
        os.replace(ready / name, folder / name)
    if ready.exists():
        ready.rmdir()
        sync_folder(folder)
