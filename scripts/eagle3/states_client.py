"""States from another host: what its capture folder holds, over HTTP (states_server.py), into the local one.

A file appears in the local folder whole, on the disk and with the checksum of its header, or not at all. A connection
that breaks is taken up where it broke; a states server that is away is waited for like an SGLang that is.
"""
from __future__ import annotations

import hashlib
import http.client
import json
import os
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Callable

from eagle3.prefill_server import Retry, secret_of
from eagle3.stage import UserError, log, write_atomic
from eagle3.states import MAX_HEADER
from eagle3.states_server import WHAT

WAIT_S = 1.0       # for a file to appear, in one request: a server that died meanwhile is to be noticed
SILENT_S = 60.0    # amid a file
PIECE = 1 << 20    # bytes read at once
NO_PROGRESS = 5    # connections that break off without a byte
DAMAGED = 3        # times that a file may arrive with another checksum


class Away(Exception):
    """Nobody answers, or the connection broke."""


class Download:
    """A file on its way into `part`, which is there from the first byte on; `at`: bytes that it has.

    Raises OSError where this disk does not take it.
    """

    def __init__(self, part: Path):
        self.part, self.file = part, None
        self.begin_again()

    def add(self, data: memoryview) -> None:
        """The next bytes: safetensors' length and header, then what the checksum is of."""
        if self.file is None:
            self.file = os.open(self.part, os.O_WRONLY | os.O_CREAT, 0o666)
        if not self.at:
            os.ftruncate(self.file, 0)
        rest = data
        while len(rest) and (lacking := self.head_bytes() - len(self.head)) > 0:
            self.head += rest[:lacking]
            rest = rest[lacking:]
        self.sha256.update(rest)
        while data:
            written = os.pwrite(self.file, data, self.at)
            data, self.at = data[written:], self.at + written

    def head_bytes(self) -> int:
        return 8 + min(MAX_HEADER, int.from_bytes(self.head[:8], "little")) if len(self.head) >= 8 else 8

    def good(self) -> bool:
        """Whether it is what the capture wrote, by the checksum in its header."""
        try:
            wanted = json.loads(bytes(self.head[8:]))["__metadata__"]["checksum"]
        except (ValueError, KeyError, TypeError):
            return False
        return wanted == f"sha256:{self.sha256.hexdigest()}"

    def begin_again(self) -> None:
        self.at, self.head, self.sha256 = 0, bytearray(), hashlib.sha256()

    def finish(self, path: Path) -> None:
        os.fsync(self.file)
        os.replace(self.part, path)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.part.unlink(missing_ok=True)


class Source:
    """One --states-url. Many threads may use it: each has a connection of its own.

    about: what it says of itself, once `greet` was called.
    """

    def __init__(self, url: str, token: str, patience: float):
        """patience: seconds that it may be away. Raises UserError."""
        self.url, self.token, self.patience = url.rstrip("/"), token, patience
        parts = urllib.parse.urlsplit(self.url)
        try:
            self.host, self.port = parts.hostname, parts.port or 80
        except ValueError:
            self.host = None
        if parts.scheme != "http" or not self.host or parts.path or parts.username is not None:
            raise UserError(f"--states-url {url}: expected http://HOST:PORT.")
        self.own, self.lock, self.about = threading.local(), threading.Lock(), {}
        self.away_since: float | None = None
        self.to_drop: set[tuple[str, str]] = set()

    # ---- asking ----
    def ask(self, method: str, path: str, begin: int = 0) -> http.client.HTTPResponse:
        """An answer whose body is still to be read. Raises Away, UserError."""
        headers = {"Authorization": f"Bearer {self.token}"} | ({"Range": f"bytes={begin}-"} if begin else {})
        for kept in (True, False):  # a connection that was idle may have been closed: only a new one tells
            connection = getattr(self.own, "connection", None)
            if connection is None or not kept:
                self.hang_up()
                connection, kept = http.client.HTTPConnection(self.host, self.port, timeout=SILENT_S), False
                self.own.connection = connection
            try:
                connection.request(method, path, headers=headers)
                answer = connection.getresponse()
                break
            except (OSError, http.client.HTTPException) as error:
                self.hang_up()
                if not kept:
                    raise Away(f"{type(error).__name__}: {error}") from None
        if answer.status in (401, 403):
            raise UserError(f"{self.url}: it asks for another token. --states-token-env and the --token-env of its "
                            "offer_states.py must hold the same.")
        if answer.status not in (200, 206, 404, 409, 500):
            raise UserError(f"{self.url}: no states server answers there (HTTP {answer.status} to {path}). Mend "
                            "--states-url.")
        if answer.status == 500:
            raise UserError(f"{self.url}: {self.body(answer).get('error')} there. Mend that and run the same command "
                            "again.")
        return answer

    def hang_up(self) -> None:
        connection, self.own.connection = getattr(self.own, "connection", None), None
        if connection is not None:
            connection.close()

    def body(self, answer: http.client.HTTPResponse) -> dict:
        try:
            found = json.loads(answer.read(1 << 24))
            return found if isinstance(found, dict) else {}
        except ValueError:
            return {}
        except (OSError, http.client.HTTPException) as error:
            self.hang_up()
            raise Away(f"{type(error).__name__}: {error}") from None

    def greet(self) -> None:
        """Raises UserError where no states server answers, or it wants another token."""
        try:
            self.about = self.body(self.ask("GET", "/"))
        except Away as error:
            raise self.silent(error) from None
        if self.about.get("what") != WHAT:
            raise UserError(f"{self.url}: no states server answers there. Mend --states-url.")

    def silent(self, error: Away) -> UserError:
        """Of one that does not answer before anything is sent."""
        return UserError(f"{self.url}: no states server answers there ({error}). Start scripts/offer_states.py on the "
                         "server's host, or mend --states-url.")

    def where(self) -> str:
        """Its folder, in words."""
        return f"{self.about.get('folder', 'its folder')} on {self.about.get('host', self.host)}"

    # ---- a sample ----
    def bring(self, run: str, sample_id: str, folder: Path, stopped: Callable[[], bool]) -> float:
        """Have `<folder>/<id>.safetensors` or `.error` here where the states server has it within a moment.

        Returns the seconds in which it was away or sending. Raises UserError, Retry, OSError (this disk).
        """
        begun, broken, damaged = time.monotonic(), 0, 0
        folder.mkdir(parents=True, exist_ok=True)
        download = Download(folder / f"{sample_id}.safetensors.part")
        try:
            while not stopped():
                before = download.at
                try:
                    if not self.fetch(run, sample_id, download, folder):
                        self.here()
                        return max(0.0, time.monotonic() - begun - WAIT_S)
                    self.here()
                    if download.good():
                        download.finish(folder / f"{sample_id}.safetensors")
                        break
                    download.begin_again()
                    if (damaged := damaged + 1) == DAMAGED:
                        raise Retry(f"{self.url} sent it with another checksum than its header's, {DAMAGED} times")
                except Away as error:
                    if self.answers():
                        broken = 0 if download.at > before else broken + 1
                        if broken == NO_PROGRESS:
                            raise Retry(f"{self.url} breaks off ({error})") from None
                    else:
                        self.gone(error)
                    time.sleep(0.2)
            return time.monotonic() - begun
        finally:
            download.close()

    def fetch(self, run: str, sample_id: str, download: Download, folder: Path) -> bool:
        """Go on with it; False where there is nothing to fetch. Raises Away, UserError, OSError (this disk)."""
        answer = self.ask("GET", f"/states/{run}/{sample_id}?wait={WAIT_S:g}", download.at)
        if answer.status in (404, 409):
            told = self.body(answer).get("error")
            if answer.status == 409:
                write_atomic(folder / f"{sample_id}.error", f"{told}\n")
            return False
        buffer = memoryview(bytearray(PIECE))
        left = answer.length or 0
        while left:
            try:
                got = answer.readinto(buffer[:min(PIECE, left)])
            except (OSError, http.client.HTTPException) as error:
                self.hang_up()
                raise Away(f"{type(error).__name__}: {error}") from None
            if not got:
                self.hang_up()
                raise Away("it broke off")
            download.add(buffer[:got])
            left -= got
        answer.read()  # nothing is left: the connection can be used again
        return True

    # ---- is it there ----
    def answers(self) -> bool:
        """Whether it does now: one that hangs takes connections and says nothing. Raises UserError."""
        self.hang_up()
        try:
            self.body(self.ask("GET", "/"))
            return True
        except Away:
            return False

    def here(self) -> None:
        with self.lock:
            if self.away_since is not None:
                log(f"{self.url} is back after {time.monotonic() - self.away_since:.0f} s")
                self.away_since = None

    def gone(self, error: Exception) -> None:
        """Raises UserError where it has been away for too long."""
        with self.lock:
            if self.away_since is None:
                self.away_since = time.monotonic()
                log(f"{self.url} is away ({error}): waiting for it")
            if time.monotonic() - self.away_since > self.patience:
                raise UserError(f"{self.url}: away for {self.patience:.0f} s. Start scripts/offer_states.py on that "
                                "host again, then run the same command.")

    # ---- room over there ----
    def drop(self, run: str, sample_id: str) -> None:
        """It was taken, or is not wanted any more. What cannot be said now is said with the next one."""
        with self.lock:
            self.to_drop.add((run, sample_id))
            waiting = list(self.to_drop)
        for one in waiting:
            try:
                self.body(self.ask("DELETE", f"/states/{one[0]}/{one[1]}"))
            except Away:
                return
            with self.lock:
                self.to_drop.discard(one)

    def left(self, prefix: str) -> list:
        """[[name, bytes]] of what runs that begin so have there. Raises Away, UserError."""
        return self.body(self.ask("GET", f"/runs/{prefix}")).get("files", [])

    def clean(self, prefix: str) -> None:
        """Remove what such runs have left. Raises Away, UserError."""
        self.body(self.ask("DELETE", f"/runs/{prefix}"))


def sources_of(args) -> list[Source]:
    """The states server of each --base-url, in their order; [] where states come through a shared folder.

    args: base_url, states_url (one for all, or one each), states_token_env, server_wait. Raises UserError.
    """
    urls = args.states_url or []
    if not urls:
        return []
    if len(urls) not in (1, len(args.base_url)):
        raise UserError(f"--states-url: {len(urls)} for {len(args.base_url)} --base-url. Name one for each, in their "
                        "order, or one for all.")
    if not args.states_token_env:
        raise UserError("--states-url needs --states-token-env: the variable that holds the token of offer_states.py.")
    token = secret_of(args.states_token_env, "--states-token-env")
    made = {url: Source(url, token, args.server_wait) for url in urls}
    return [made[url] for url in (urls if len(urls) > 1 else urls * len(args.base_url))]
