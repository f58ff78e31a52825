"""raw.jsonl of a report: everything that was measured, in the order in which it was, one JSON object a line.

{"kind": "request", "variant", "level", "repeat", ...}   one request: what load.stream_answer returns, or its error
{"kind": "unit", "variant", "level", "repeat", ...}      closes the requests before it: all prompts once, finished
{"kind": "server", "variant", "info"}                    what the server of a variant said of itself
{"kind": endpoints.probe_difference's, "key", ...}       what the target itself holds of two tokens where answers part
"""
from __future__ import annotations

import json
import os
from pathlib import Path


class Measured:
    """What stands in `path`: `units` (each with its `requests`), `servers` by variant, `probes` by difference_key.

    Opening it cuts off what a kill left behind the last finished unit.
    """

    def __init__(self, path: Path):
        self.path = path
        self.units: list[dict] = []
        self.servers: dict[str, dict] = {}
        self.probes: dict[str, dict] = {}
        good = self._read()
        if path.exists() and good < path.stat().st_size:
            os.truncate(path, good)

    def _read(self) -> int:
        """The bytes up to the end of the last row that closes something."""
        requests, good, at = [], 0, 0
        for line in self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []:
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is None:
                break
            at += len(line)
            kind = row.pop("kind")
            if kind == "request":
                requests.append(row)
                continue
            good = at
            if kind == "unit":
                self.units.append({**row, "requests": requests})
                requests = []
            elif kind == "server":
                self.servers[row["variant"]] = row["info"]
            else:
                key = row.pop("key")
                self.probes[key] = {"kind": kind, **row}
        return good

    def _append(self, rows: list[dict]) -> None:
        """On the disk when this returns."""
        with open(self.path, "ab") as file:
            file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())

    def add_unit(self, about: dict, result: dict, requests: list[dict]) -> None:
        """A finished unit; about: its variant, level and repeat; result: wall_s and watts."""
        self.units.append({**about, **result, "requests": requests})
        self._append([{"kind": "request", **about, **request} for request in requests]
                     + [{"kind": "unit", **about, **result}])

    def add_server(self, variant: str, info: dict) -> None:
        if variant not in self.servers:
            self._append([{"kind": "server", "variant": variant, "info": info}])
        self.servers[variant] = info

    def add_probe(self, key: str, probe: dict) -> None:
        self.probes[key] = probe
        self._append([{"kind": probe["kind"], "key": key, **probe}])
