"""raw.jsonl of a report: everything that was measured, in the order in which it was, one JSON object a line.

{"kind": "request", "variant", "level", "repeat", ...}   one request: what load.stream_answer returns, or its error
{"kind": "unit", "variant", "level", "repeat", ...}      closes the requests before it: all prompts once, finished
{"kind": "server", "variant", "info"}                    what the server of a variant said of itself
{"kind": endpoints.probe_difference's, "key", ...}       what the target itself holds of two tokens where answers part

`level` is a number of streams, or a rate of arrivals as text ("2.5/s"); requests and unit of prompts that were padded
to a length also have "context" ("8k"). A request says when it was sent (`start_s`, and `due_s` where it arrives), how
long it took to fail (`spent_s`), in a later turn its `prompt_ids`, and the `question` that several prompts share; a
unit has "warmup", "emptied" (the server's cache of prompts was), "gpus" (gpu_state.look) and, where it was measured
again since the server had stood still, "first_try". Older reports lack these.

All but the requests end in "sha256": of the line without it, after the lines of the requests that it closes. Older
reports have none.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from eagle3.masking import cleaned
from eagle3.stage import UserError, log, write_atomic

UNIT_KEYS = ("variant", "level", "repeat")
SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"}\n$')


@dataclass
class Group:
    """The lines of one unit's requests, as they are read."""
    lines: list[bytes] = field(default_factory=list)
    requests: list[dict] = field(default_factory=list)


# ---- lines ----
def encoded(row: dict) -> bytes:
    """A line; without the secrets that a server may have repeated."""
    return json.dumps(cleaned(row), separators=(",", ":")).encode() + b"\n"


def digest_of(parts: list[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def sealed(row: dict, requests: list[bytes]) -> bytes:
    """The line of a row that closes `requests`, with its checksum."""
    line = encoded(row)
    return line[:-2] + f',"sha256":"{digest_of([*requests, line])}"}}\n'.encode()


def unchanged(line: bytes, requests: list[bytes]) -> bool:
    """Whether a closing line and its requests are what was written; also where it has no checksum."""
    seal = SEAL.search(line)
    return not seal or digest_of([*requests, line[:seal.start()], b"}\n"]) == seal[1].decode()


def key_of(row: dict) -> tuple:
    return *(row[key] for key in UNIT_KEYS), row.get("context")


def parsed(line: bytes) -> dict | None:
    """A row that has what its kind needs, less its checksum; None of any other line."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    needs = {"request": UNIT_KEYS, "unit": (*UNIT_KEYS, "wall_s", "watts"), "server": ("variant", "info")}
    kind = row.get("kind")
    whole = isinstance(kind, str) and all(key in row for key in needs.get(kind, ("key",)))
    row.pop("sha256", None)
    return row if whole and all(isinstance(row[key], (str, int)) for key in UNIT_KEYS if key in row) else None


class Measured:
    """What stands in `path`: `units` (each with its `requests`), `servers` by variant, `probes` by difference_key.

    Opening it cuts off what a kill left behind the last finished unit. A damaged line costs the unit that it belongs
    to, or the one thing that it says, which is measured again; what is taken out is kept in raw.damaged.jsonl.
    """

    def __init__(self, path: Path, ids: list[str] | dict[str | None, list[str]] | None = None,
                 most_at: Callable[[int | str], int | None] = lambda level: None):
        """ids: of the requests in their order, as each unit must have them, or {context: those}; None: not known.

        most_at: how many of them a unit at a level has; None: all. Raises UserError.
        """
        self.path, self.ids, self.most_at = path, ids if isinstance(ids, dict) or ids is None else {None: ids}, most_at
        self.units: list[dict] = []
        self.servers: dict[str, dict] = {}
        self.probes: dict[str, dict] = {}
        self.damage: list[str] = []  # a sentence of each
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise UserError(f"{path}: not readable ({error.strerror}).") from None
        kept, lost = map(b"".join, self._read(data))
        if self.damage:
            with open(path.with_suffix(".damaged.jsonl"), "ab") as file:
                file.write(lost)
            write_atomic(path, kept)
            for what in self.damage:
                log(f"note: {path}: {what}, and is measured again (the lines: {path.stem}.damaged.jsonl)")
        elif lost:
            os.truncate(path, len(kept))

    def _read(self, data: bytes) -> tuple[list[bytes], list[bytes]]:
        """(the lines that count, those that do not)."""
        unclosed: dict[tuple, Group] = {}
        kept, lost, torn = [], [], []
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            row = parsed(line)
            if row is None:
                (lost if line.endswith(b"\n") else torn).append(line)  # a kill tears the last one
                if line.endswith(b"\n"):
                    self.damage.append(f"line {number} is damaged: what it belongs to is lost")
            elif row["kind"] == "request":
                group = unclosed.setdefault(key_of(row), Group())
                group.lines.append(line)
                group.requests.append({key: value for key, value in row.items() if key != "kind"})
            else:
                group = unclosed.pop(key_of(row), Group()) if row["kind"] == "unit" else Group()
                if self._take(row, line, group):
                    kept += [*group.lines, line]
                else:
                    named = " ".join(str(row[key]) for key in UNIT_KEYS if key in row) or "it"
                    self.damage.append(f"line {number}: {named} is not what was written")
                    lost += [*group.lines, line]
        left = [line for group in unclosed.values() for line in group.lines]
        if len(unclosed) > 1 or left and not data.startswith(b"".join([*kept, *left])):
            self.damage.append("a unit has no end")
        return kept, [*lost, *left, *torn]

    def _take(self, row: dict, line: bytes, group: Group) -> bool:
        """A row that closes something; False where it is not what was written."""
        kind, right = row.pop("kind"), unchanged(line, group.lines)
        if kind == "unit":
            wanted = self.ids and self.ids.get(row.get("context"), [])[:self.most_at(row["level"])]
            right &= self.ids is None or [request.get("id") for request in group.requests] == wanted
            self.units += [{**row, "requests": group.requests}] if right else []
        elif kind == "server" and right:
            self.servers[row["variant"]] = row["info"]
        elif right:
            key = row.pop("key")
            self.probes[key] = {"kind": kind, **row}
        return right

    def _append(self, lines: list[bytes]) -> None:
        """On the disk when this returns."""
        with open(self.path, "ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def add_unit(self, about: dict, result: dict, requests: list[dict]) -> None:
        """A finished unit; about: its variant, level, repeat (and context); result: wall_s, watts and the like."""
        lines = [encoded({"kind": "request", **about, **request}) for request in requests]
        self._append([*lines, sealed({"kind": "unit", **about, **result}, lines)])
        self.units.append({**about, **result, "requests": requests})

    def add_server(self, variant: str, info: dict) -> None:
        if variant not in self.servers:
            self._append([sealed({"kind": "server", "variant": variant, "info": info}, [])])
        self.servers[variant] = info

    def add_probe(self, key: str, probe: dict) -> None:
        self.probes[key] = probe
        self._append([sealed({"kind": probe["kind"], "key": key, **probe}, [])])
