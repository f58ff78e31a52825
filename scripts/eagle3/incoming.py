"""The servers' EAGLE3_CAPTURE_DIR: files of hidden states on their way, and how it is left clean.

A server writes `<capture dir>/<run>/<id>.safetensors` for a request whose rid names both (patches/eagle3_capture.py).
Runs into one output folder share a prefix, so that several output folders may share one capture dir.
"""
from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Callable

PREFILL = {"max_new_tokens": 1, "temperature": 0}  # the least that a server can be asked for


def move(path: Path, place: Path) -> None:
    """Rename; between two file systems, the one case in which bytes are written twice, copy: `place` is never torn."""
    try:
        os.rename(path, place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(path, f"{place}.tmp")
        with open(f"{place}.tmp", "rb+") as file:
            os.fsync(file.fileno())
        os.replace(f"{place}.tmp", place)
        path.unlink()


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def run_prefix(folder: Path, remote: bool = False) -> str:
    """What the names of all runs into an output folder begin with.

    remote: for capture folders of other hosts, where another host's 03 may have a folder of the same path.
    """
    place = f"{socket.gethostname()}:{folder}" if remote else str(folder)
    return f"{hashlib.sha256(place.encode()).hexdigest()[:12]}-"


def own_runs(incoming: Path, folder: Path) -> list[Path]:
    return [path for remote in (False, True) for path in incoming.glob(f"{run_prefix(folder, remote)}*")]


def clean_incoming(incoming: Path, folder: Path) -> None:
    """Remove what earlier processes of this output folder asked for and never took."""
    for path in own_runs(incoming, folder):
        shutil.rmtree(path, ignore_errors=True)


def settle(servers: list, incoming: Path, folder: Path, token: int, remote: Callable[[], list] = list) -> None:
    """After a kill a server may still write what the dead process asked for, which no bound counts.

    It works in order: once it has answered a request sent now, those files are begun, if not whole. Wait until nothing
    changes any more, then remove them. servers: prefill_server.Server; token: any of the target's; remote: what lies on
    other hosts. Raises OSError where a server does not answer.
    """
    body = json.dumps({"input_ids": [token], "sampling_params": PREFILL}).encode()
    for server in servers:
        server.ask("POST", "/generate", body, 600)

    def left() -> list:
        return remote() + sorted((path.name, path.stat().st_size)
                                 for run in own_runs(incoming, folder) for path in run.glob("*.safetensors*"))

    before, deadline = None, time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            now = left()
        except FileNotFoundError:  # renamed between the two
            now = None
        if now is not None and now == before:
            break
        before = now
        time.sleep(0.5)
    clean_incoming(incoming, folder)
