"""One SGLang server as 03 sees it: up, hung, gone or busy; what it tells of itself; and the token that it chooses.

A server that nobody can connect to is gone: what it was asked for will not come. One that takes connections and lets
its health check wait has a scheduler that hangs (stopped, or waiting for another rank): what it was asked for may still
come, and no sample is to blame. Both are waited for alike.
"""
from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
import urllib.parse
from pathlib import Path

import httpx

from eagle3.masking import hide
from eagle3.samples import Sample
from eagle3.stage import UserError, duration, log
from eagle3.target import text_config

BUSY = (429, 502, 503, 504)  # a full queue, or a proxy before a server that restarts
REJECTED = (400, 413, 422)   # this very request
NO_RIGHT = (401, 403, 407)
SILENT_S = 60.0       # with requests in flight, before a server is asked whether it still works
HEALTH_S = 30.0       # for that answer; SGLang itself gives its scheduler 20
LINE_S = 60.0         # between two lines about servers that are loading


class Quarantined(Exception):
    """This sample cannot be extracted. args: reason (one of few), detail."""


class Lost(Exception):
    """The server went away while it had this sample."""


class Retry(Exception):
    """The sample is to be sent again."""


class Busy(Retry):
    """As soon as the server has room for it."""


class Hung(Exception):
    """The server stands still: the sample is to be sent again when it does not."""


def api_key(variable: str | None) -> str | None:
    """The key in this environment variable. Raises UserError."""
    return secret_of(variable, "--api-key-env") if variable else None


def secret_of(variable: str, flag: str) -> str:
    """The key in the environment variable that `flag` names; it is never shown. Raises UserError."""
    key = os.environ.get(variable, "").strip()  # a file's line end is no part of a key
    if not key:
        raise UserError(f"{flag} {variable}: this variable is empty. Export the key in it.")
    if not key.isascii() or not key.isprintable():
        raise UserError(f"{flag} {variable}: the key in it has characters that no HTTP header can carry. "
                        "Export it anew.")
    hide(key)
    return key


class Server:
    """One --base-url. `epoch` counts how often it was found gone: a file asked for before will not come any more.

    away_since: since when it is gone or hung, None while it is up; in_flight, asked: samples that it has, and has had.
    """

    def __init__(self, url: str, key: str | None = None):
        self.url = url.rstrip("/")
        parts = urllib.parse.urlsplit(self.url)
        try:
            self.host, self.port = parts.hostname, parts.port or 80
        except ValueError:
            self.host = None
        if parts.scheme != "http" or not self.host:
            raise UserError(f"--base-url {url}: expected http://HOST:PORT.")
        # A connection each: one that the server closed while it was idle would look like a server that died
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.client = httpx.Client(base_url=self.url, limits=limits, trust_env=False, headers=headers)
        self.key, self.lock = key, threading.Lock()
        self.away_since: float | None = None
        self.gone = False
        self.epoch = self.in_flight = self.asked = self.unanswered = 0
        self.heard = time.monotonic()  # the last answer, or the first request after a pause
        self.said_busy = -math.inf

    # ---- is it there ----
    def probe(self) -> None:
        """Find out whether it is gone, hung or back; a restarted server listens again only when its model is loaded."""
        try:
            socket.create_connection((self.host, self.port), 5).close()
            if self.away_since is not None and self.healthy():
                log(f"{self.url} is back after {time.monotonic() - self.away_since:.0f} s")
                with self.lock:
                    self.away_since, self.gone, self.heard = None, False, time.monotonic()
            elif self.unanswered and time.monotonic() - self.heard > SILENT_S:
                self.alive()
        except OSError as error:
            self.lost(error)

    def health(self) -> int:
        """The status with which its scheduler answers, 0 where it keeps silent. Raises OSError: nobody can be asked."""
        try:
            status, _ = self.ask("GET", "/health_generate", None, HEALTH_S)
            if status == 404:  # something before it that knows no such route
                status, _ = self.ask("GET", "/health", None, HEALTH_S)
        except TimeoutError:
            return 0
        return status

    def healthy(self) -> bool:
        """Whether its scheduler answers well. Raises OSError where nobody can be asked."""
        return self.health() == 200

    def not_ready(self) -> str:
        """Why it cannot be asked yet, "" where it can. Raises UserError where no waiting helps.

        One that loads its model does not listen yet, or says 503 until it has warmed up.
        """
        try:
            status = self.health()
        except socket.gaierror as error:
            raise UserError(f"{self.url}: no such host ({error.strerror}). Mend --base-url.") from None
        except OSError as error:
            return f"no server answers there ({type(error).__name__})"
        if status in NO_RIGHT:
            raise self.no_right(f"HTTP {status}")
        if status == 404:
            raise UserError(f"{self.url}: no SGLang answers there (it has neither /health_generate nor /health). "
                            "Mend --base-url.")
        said = f"HTTP {status}" if status else f"silent for {HEALTH_S:.0f} s"
        return "" if status == 200 else f"not healthy (its /health_generate does not answer well: {said})"

    def alive(self) -> bool:
        """Whether it answers now; where it does not, it is hung or gone from here on."""
        try:
            if self.healthy():
                self.heard = time.monotonic()
                return True
        except OSError as error:
            self.lost(error)
            return False
        with self.lock:
            if self.away_since is None:
                self.away_since = time.monotonic()
                log(f"{self.url} is away (connected, but /health_generate does not answer well): waiting for it")
        return False

    def working(self) -> bool:
        """Whether it is up and has answered lately, or does so now."""
        if self.away_since is None and time.monotonic() - self.heard < SILENT_S:
            return True
        return self.away_since is None and self.alive()

    def lost(self, error: Exception) -> None:
        with self.lock:
            if not self.gone:
                self.gone, self.epoch = True, self.epoch + 1
                self.away_since = self.away_since or time.monotonic()
                log(f"{self.url} is away ({type(error).__name__}: {error}): waiting for it")

    def busy(self, detail: str) -> None:
        if time.monotonic() - self.said_busy > 60:
            self.said_busy = time.monotonic()
            log(f"{self.url} is busy ({detail}): asking again")

    # ---- asking ----
    def ask(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        """(status, body). `timeout`: seconds of silence. Raises OSError, of it TimeoutError where the time is over."""
        try:
            answer = self.client.request(method, path, content=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise TimeoutError(str(error)) from None
        except httpx.TransportError as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, OSError):  # what the socket said, below two layers of names
                cause = cause.__cause__ or cause.__context__
            raise cause or ConnectionError(str(error)) from None
        return answer.status_code, answer.content

    def generate(self, body: bytes, timeout: float) -> bytes:
        """The answer to a request. Raises Quarantined, Retry, Busy, Hung, Lost, UserError."""
        with self.lock:
            self.unanswered += 1
            self.heard = time.monotonic() if self.unanswered == 1 else self.heard
        try:
            status, answer = self.ask("POST", "/generate", body, timeout)
            self.heard = time.monotonic()
        except TimeoutError:
            if self.away_since is not None or not self.alive():
                raise Hung(f"{self.url} does not answer") from None
            raise Retry(f"no answer in {timeout:.0f} s") from None
        except OSError as error:
            self.lost(error)
            raise Lost(str(error)) from None
        finally:
            with self.lock:
                self.unanswered -= 1
        if status != 200:
            raise self.refusal(status, answer)
        return answer

    def refusal(self, status: int, answer: bytes) -> Exception:
        """What to raise for an answer that is not 200."""
        detail = f"HTTP {status}: {' '.join(answer.decode(errors='replace').split())[:300]}"
        if status in NO_RIGHT:
            return self.no_right(detail)
        if status in REJECTED:
            return Quarantined("rejected by the server", detail)
        if status in BUSY:
            self.busy(detail)
            return Busy(detail)
        if status in (404, 405, 410, 501) or 300 <= status < 400:
            return UserError(f"{self.url}/generate: no SGLang answers there ({detail}). Mend --base-url.")
        return Retry(detail)

    def no_right(self, detail: str) -> UserError:
        remedy = ("The key that --api-key-env names is not this server's" if self.key else
                  "Name the variable that holds its key with --api-key-env")
        return UserError(f"{self.url}: it asks for a key ({detail}). {remedy}.")

    # ---- what it tells of itself ----
    def describe(self, path: str) -> dict:
        """/model_info or /server_info (before 0.5.8 /get_...); {} where it has neither. Raises OSError, UserError."""
        for name in (path, f"/get_{path[1:]}"):
            status, answer = self.ask("GET", name, None, 60)
            if status in NO_RIGHT:
                raise self.no_right(f"HTTP {status}")
            if status == 200:
                try:
                    found = json.loads(answer)
                    return found if isinstance(found, dict) else {}
                except ValueError:
                    return {}
        return {}

    def how_to_capture(self) -> str:
        """What to do with a server that captures nothing, by the way in which it was started to. Raises OSError."""
        told = self.describe("/server_info")
        if told.get("forward_hooks"):
            return ("Its --forward-hooks must name eagle3_capture:forward_hook for the decoder without its head "
                    "(patches/README.md): put patches/ on its PYTHONPATH")
        target = f" --target {told['model_path']}" if told.get("model_path") else ""
        return f"Patch its SGLang (patches/sglang_patch.py apply{target})"

    def vocab_size(self) -> int | None:
        """Of its model, where that is a folder that can be read here. Raises OSError, UserError (no right)."""
        folder = self.describe("/model_info").get("model_path")
        if not isinstance(folder, str) or not (Path(folder) / "config.json").is_file():
            return None
        try:
            size = text_config(Path(folder)).get("vocab_size")
        except UserError:
            return None
        return size if isinstance(size, int) else None


def wait_until_ready(servers: list[Server], within: float) -> None:
    """Until all of them can be asked, with a line a minute; at most so many seconds. Raises UserError."""
    began, told = time.monotonic(), -math.inf
    while waiting := [f"{server.url}: {why}" for server in servers if (why := server.not_ready())]:
        now, words = time.monotonic(), "; ".join(waiting)
        if now - began >= within:
            raise UserError(f"{words}. Start the server, or mend --base-url; for one that loads longer than "
                            f"{duration(within)} raise --server-wait. Then run this again.")
        if now - told >= LINE_S:
            told = now
            log(f"waiting for a server to be ready | {words} | {duration(now - began)} of {duration(within)} "
                "(--server-wait)")
        time.sleep(min(1.0, within))


def next_token(answer: bytes, sample: Sample) -> int:
    """The token that the engine itself chose after the sample. Raises Retry, Quarantined."""
    try:
        answer = json.loads(answer)
        token, read = answer["output_ids"][0], answer["meta_info"]["prompt_tokens"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Retry(f"an answer without output_ids or prompt_tokens ({error})") from None
    if read != sample.tokens:
        raise Quarantined("cut by the server", f"it read {read} of {sample.tokens} tokens (--allow-auto-truncate)")
    return token
