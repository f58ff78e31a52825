"""A capture folder offered over HTTP: 03 on another host takes the states from there and has them removed.

    GET    /                        {"what", "folder", "host", "free_bytes"}
    GET    /states/<run>/<id>       the file, from `Range: bytes=N-` on; 409 and the line of its .error; 404 where
                                    neither was there within `?wait=S` seconds
    DELETE /states/<run>/<id>       what there is of it
    GET    /runs/<prefix>           {"files": [[name, bytes], ...]} of all runs whose names begin so
    DELETE /runs/<prefix>           those runs

Every request carries `Authorization: Bearer <token>`. Names are matched whole, and no link is followed below the
folder, so nothing outside it can be reached. A run's name begins with a hash of the 03 that asked for it
(incoming.run_prefix): nothing else is ever read or removed. Only whole files are read: a capture renames them into
place.
"""
from __future__ import annotations

import contextlib
import hmac
import http.server
import json
import os
import re
import shutil
import socket
import stat
import threading
import time
import urllib.parse
from pathlib import Path

WHAT = "eagle3 states"
RUN, PREFIX, SAMPLE = r"[0-9a-f]{12}-[A-Za-z0-9._-]{1,60}", r"[0-9a-f]{12}-", r"[A-Za-z0-9._-]{1,120}"
LONGEST_WAIT_S = 30.0
IDLE_S = 600.0  # a connection on which nothing is asked


class StatesServer(http.server.ThreadingHTTPServer):
    """files, bytes: sent so far. A thread for each connection."""
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], folder: Path, token: str):
        """Raises OSError where the address cannot be had."""
        super().__init__(address, Handler)
        self.folder, self.token, self.lock = folder, token, threading.Lock()
        self.files = self.bytes = 0

    def handle_error(self, *_) -> None:
        """A client that went away: it asks again."""

    def count(self, sent: int, whole: bool) -> None:
        with self.lock:
            self.bytes += sent
            self.files += whole

    # ---- the folder ----
    def open_file(self, run: str, name: str) -> int | None:
        """A descriptor of a regular file in a run's folder; None where there is none."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.ExitStack() as handles:
            try:
                root = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
                handles.callback(os.close, root)
                within = os.open(run, os.O_DIRECTORY | flags, dir_fd=root)
                handles.callback(os.close, within)
                file = os.open(name, flags, dir_fd=within)
            except OSError:
                return None
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        return None

    def runs(self, pattern: str) -> list[Path]:
        """Folders of runs whose whole name matches."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(Path(entry.path) for entry in os.scandir(self.folder)
                          if re.fullmatch(pattern, entry.name, re.ASCII) and entry.is_dir(follow_symlinks=False))
        return []

    def listing(self, prefix: str) -> list[tuple[str, int]]:
        found = []
        for run in self.runs(f"{prefix}.*"):
            for path in sorted(run.glob("*.safetensors*")):
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    found.append((path.name, path.lstat().st_size))
        return found

    def remove_sample(self, run: str, sample_id: str) -> None:
        for folder in self.runs(re.escape(run)):
            for suffix in ("safetensors", "safetensors.tmp", "error"):
                (folder / f"{sample_id}.{suffix}").unlink(missing_ok=True)

    def remove_runs(self, prefix: str) -> None:
        for run in self.runs(f"{prefix}.*"):
            shutil.rmtree(run, ignore_errors=True)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_S
    server: StatesServer

    def do_GET(self) -> None:
        self.answer("GET")

    def do_DELETE(self) -> None:
        self.answer("DELETE")

    def answer(self, method: str) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # bodies are not read
        wanted = f"Bearer {self.server.token}".encode()
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode("latin-1", "replace"), wanted):
            self.close_connection = True
            return self.reply(401, {"error": "another token"})
        parts = urllib.parse.urlsplit(self.path)
        try:
            if method == "GET" and parts.path == "/":
                free = shutil.disk_usage(self.server.folder).free
                return self.reply(200, {"what": WHAT, "folder": str(self.server.folder), "host": socket.gethostname(),
                                        "free_bytes": free})
            if found := re.fullmatch(rf"/states/({RUN})/({SAMPLE})", parts.path, re.ASCII):
                if method == "GET":
                    return self.send_state(*found.groups(), parts.query)
                self.server.remove_sample(*found.groups())
                return self.reply(200, {})
            if found := re.fullmatch(rf"/runs/({PREFIX})", parts.path, re.ASCII):
                if method == "GET":
                    return self.reply(200, {"files": self.server.listing(found[1])})
                self.server.remove_runs(found[1])
                return self.reply(200, {})
        except ConnectionError:
            raise
        except OSError as error:
            return self.reply(500, {"error": f"{error.filename or self.server.folder}: {error.strerror}"})
        self.reply(400, {"error": "no such path"})

    def reply(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_state(self, run: str, sample_id: str, query: str) -> None:
        wait = re.fullmatch(r"wait=(\d{1,4}(?:\.\d{1,3})?)", query)
        deadline, pause = time.monotonic() + min(LONGEST_WAIT_S, float(wait[1]) if wait else 0), 0.002
        while True:
            if (file := self.server.open_file(run, f"{sample_id}.safetensors")) is not None:
                with os.fdopen(file, "rb") as opened:
                    return self.send_file(opened)
            if (file := self.server.open_file(run, f"{sample_id}.error")) is not None:
                with os.fdopen(file, "rb") as opened:
                    return self.reply(409, {"error": opened.read(4096).decode(errors="replace").strip()})
            if time.monotonic() >= deadline:
                return self.reply(404, {"error": "not there yet"})
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)

    def send_file(self, file) -> None:
        size, asked = os.fstat(file.fileno()).st_size, re.fullmatch(r"bytes=(\d{1,18})-", self.headers.get("Range", ""))
        begin = min(size, int(asked[1]) if asked else 0)
        self.send_response(206 if begin else 200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(size - begin))
        self.end_headers()
        sent = 0
        try:
            sent = self.connection.sendfile(file, begin, size - begin) if size > begin else 0
        except OSError:  # the client went away, or this disk does not give it: what was promised cannot be kept
            self.close_connection = True
        if sent < size - begin:
            self.close_connection = True
        self.server.count(sent, sent == size - begin)

    def log_message(self, *_) -> None:
        """The log is the command's."""
