"""03's work: samples are sent to patched SGLang servers, their files awaited, checked and put in place.

A server answers a request when it has read the sample; the file of hidden states follows a moment later, in the folder
that the request's rid names. What may go wrong on the way, and what becomes of the sample:

    the server goes away         the sample is sent again, to whichever server is there; DEATHS times
    it is busy (429, 503, ...)   sent again, for --server-wait seconds
    it fails otherwise           sent again, ATTEMPTS times in all
    it rejects the sample        quarantined at once; so is a sample with a state that is not finite
    nothing can be written, or   the run ends with one line (UserError)
    the files are of another run
"""
from __future__ import annotations

import collections
import contextlib
import errno
import json
import math
import os
import queue
import socket
import threading
import time
import urllib.parse
from pathlib import Path

import httpx

from eagle3.incoming import PREFILL, free_bytes, move, run_prefix
from eagle3.journal import Journal, Quarantine, Room, plan_order
from eagle3.samples import Sample, read_ids
from eagle3.stage import UserError, log
from eagle3.states import StateFile, check_header, check_ids, sample_path

ATTEMPTS = 3          # of one sample, where the server answered
DEATHS = 5            # of servers while they had one sample: perhaps because of it
BUSY = (429, 502, 503, 504)  # a full queue, or a proxy before a server that restarts
FULL = (errno.ENOSPC, errno.EDQUOT)
FIRST_FILE_S = 30.0   # after the first answer: the server writes within a second
NEXT_FILE_S = 180.0   # without any file: a disk that is merely slow still finishes some


# ---- servers ----
class Server:
    """One --base-url. `epoch` counts how often it was found away: a file asked for before will not come any more."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        parts = urllib.parse.urlsplit(self.url)
        try:
            self.host, self.port = parts.hostname, parts.port or 80
        except ValueError:
            self.host = None
        if parts.scheme != "http" or not self.host:
            raise UserError(f"--base-url {url}: expected http://HOST:PORT.")
        # A connection each: one that the server closed while it was idle would look like a server that died. No client
        # around it: redirects, cookies and proxies are not for these servers, and cost half of a request's time here
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.transport = httpx.HTTPTransport(limits=limits, trust_env=False)
        self.away_since: float | None = None
        self.epoch = self.in_flight = 0
        self.said_busy = -math.inf

    def probe(self) -> None:
        """Whether somebody listens; a restarted server listens again only when its model is loaded."""
        try:
            socket.create_connection((self.host, self.port), 5).close()
            if self.away_since is not None and self.ask("GET", "/health", None, 30)[0] == 200:
                log(f"{self.url} is back after {time.monotonic() - self.away_since:.0f} s")
                self.away_since = None
        except OSError as error:
            self.lost(error)

    def lost(self, error: Exception) -> None:
        if self.away_since is None:
            self.away_since, self.epoch = time.monotonic(), self.epoch + 1
            log(f"{self.url} is away ({type(error).__name__}: {error}): waiting for it")

    def busy(self, detail: str) -> None:
        if time.monotonic() - self.said_busy > 60:
            self.said_busy = time.monotonic()
            log(f"{self.url} is busy ({detail}): asking again")

    def ask(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        """(status, body). `timeout`: seconds of silence. Raises OSError, of it TimeoutError where the time is over."""
        request = httpx.Request(method, self.url + path, content=body, headers={"Content-Type": "application/json"},
                                extensions={"timeout": httpx.Timeout(timeout).as_dict()})
        try:
            answer = self.transport.handle_request(request)
            return answer.status_code, answer.read()
        except httpx.TimeoutException as error:
            raise TimeoutError(str(error)) from None
        except httpx.TransportError as error:
            cause: BaseException | None = error
            while cause and not isinstance(cause, OSError):  # what the socket said, below two layers of names
                cause = cause.__cause__ or cause.__context__
            raise cause or ConnectionError(str(error)) from None


class Quarantined(Exception):
    """This sample cannot be extracted. args: reason (one of few), detail."""


class Lost(Exception):
    """The server went away before it answered."""


class Retry(Exception):
    """The sample is to be sent again."""


class Busy(Retry):
    """As soon as the server has room for it."""


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


# ---- the samples on their way ----
class Extraction:
    """Worker threads take samples from `work`; `stop` holds what ends the run, for the main thread to raise.

    to_do: what neither lies in place nor was released nor is in quarantine. done_*: put in place since the start.
    """

    def __init__(self, args, samples: list[Sample], parts: list[Path], journal: Journal, incoming: Path):
        self.args, self.parts, self.journal, self.folder, self.incoming = args, parts, journal, journal.folder, incoming
        self.servers = [Server(url) for url in args.base_url]
        self.room = Room(self.folder, int(args.max_disk_gb * 1e9), journal) if args.max_disk_gb else None
        self.quarantine = Quarantine(self.folder)
        gone = self.quarantine.reasons.keys() | (self.room.released.keys() if self.room else set())
        self.to_do = [sample for sample in samples if sample.id not in gone and not journal.in_place(sample)]
        if self.room:
            self.to_do.sort(key=lambda sample: plan_order(sample.id))
        self.samples, self.total = samples, len(samples)
        # The servers write into a folder of this process alone: what an earlier one asked for may still arrive there
        self.name = f"{run_prefix(self.folder)}{os.getpid()}-{int(time.time())}"
        self.work: queue.SimpleQueue = queue.SimpleQueue()
        self.lock, self.turn, self.alone = threading.Lock(), threading.Lock(), threading.Lock()
        self.stop: BaseException | None = None
        self.last_file: float | None = None
        self.done_samples = self.done_tokens = self.done_bytes = 0

    @contextlib.contextmanager
    def working(self):
        """Inside, the worker threads (a list) do what is to do; an error there stops them. Their own is in `stop`."""
        for sample in self.to_do:
            self.work.put(sample)
        threads = [threading.Thread(target=self.worker, daemon=True)
                   for _ in range(min(self.args.concurrency, len(self.to_do)))]
        for thread in threads:
            thread.start()
        try:
            yield threads
        except BaseException as error:
            self.stop = self.stop or error
            raise

    def stopped(self) -> bool:
        return self.stop is not None

    def worker(self) -> None:
        while not self.stopped():
            try:
                with self.turn:
                    sample = self.work.get_nowait()
                    if self.room:
                        self.room.enter(sample, self.stopped)
            except queue.Empty:
                return
            except BaseException as error:
                self.stop = self.stop or error
                return
            try:
                try:
                    self.extract(sample)
                except Quarantined as error:
                    self.put_aside(sample, *error.args)
            except BaseException as error:
                self.stop = self.stop or error
            if self.room:
                self.room.gave_up(sample)  # or it has landed

    def put_aside(self, sample: Sample, reason: str, detail: str) -> None:
        self.sweep(sample)
        self.quarantine.add(sample.id, reason, detail)
        log(f"quarantined {sample.id}: {reason}: {detail}")

    def check_failed(self) -> None:
        """Raises UserError when too many samples are in quarantine."""
        reasons = dict(self.quarantine.reasons)
        if len(reasons) > max(1, self.args.max_failed * self.total):
            counts = collections.Counter(reasons.values()).most_common()
            raise UserError(f"{self.quarantine.path}: {len(reasons)} of {self.total} samples failed ({counts}), more "
                            "than --max-failed allows. Mend the cause, then run the same command with --redo-failed.")

    def sweep(self, sample: Sample) -> None:
        """Remove what a server that died or was too slow has left of `sample`: there is room for one try."""
        for suffix in ("safetensors", "safetensors.tmp"):
            for path in self.incoming.glob(f"{self.name}.*/{sample.id}.{suffix}"):
                path.unlink(missing_ok=True)

    def server(self) -> Server | None:
        """The server with the fewest requests, waiting while all are away; None when the run is to stop."""
        while not self.stopped():
            with self.lock:
                up = [server for server in self.servers if server.away_since is None]
                if up:
                    chosen = min(up, key=lambda server: server.in_flight)
                    chosen.in_flight += 1
                    return chosen
            time.sleep(0.2)
        return None

    def extract(self, sample: Sample) -> None:
        """Try until the sample is in place. Raises Quarantined, UserError."""
        ids = read_ids(self.parts, sample)
        failures = tries = deaths = 0
        busy_since: float | None = None
        while not self.stopped():
            if tries:
                self.sweep(sample)
            tries += 1
            try:
                # Those that have seen servers die go one at a time, so that only the cause sees more. A folder for each
                # try: an aborted request of the same name may still be writing
                with self.alone if deaths > 1 else contextlib.nullcontext():
                    if self.send(sample, ids, f"{self.name}.{tries}"):
                        return
            except Lost as error:
                deaths += 1
                if deaths == DEATHS:
                    raise Quarantined(f"the server died {DEATHS} times", str(error)) from None
            except Retry as error:
                if isinstance(error, Busy):
                    busy_since = busy_since or time.monotonic()
                    if time.monotonic() - busy_since < self.args.server_wait:
                        time.sleep(1)
                        continue
                failures += 1
                if failures == ATTEMPTS:
                    raise Quarantined(f"failed {ATTEMPTS} times", str(error)) from None
                time.sleep(failures)

    def send(self, sample: Sample, ids: list[int], run: str) -> bool:
        """Ask a server, wait for the file in `incoming/run`, put it in place; False when the server went away after its
        answer. Raises Lost, Retry, Quarantined, UserError."""
        rid = f"eagle3:{run}:{sample.prompt_len}:{sample.tokens}:{sample.id}"
        body = json.dumps({"input_ids": ids, "rid": rid, "sampling_params": PREFILL}).encode()
        server = self.server()
        if server is None:
            return False
        epoch = server.epoch
        try:
            status, answer = server.ask("POST", "/generate", body, self.args.request_timeout)
            if status != 200:
                detail = f"HTTP {status}: {' '.join(answer.decode(errors='replace').split())[:300]}"
                if status in (400, 413, 422):
                    raise Quarantined("rejected by the server", detail)
                if status in BUSY:
                    server.busy(detail)
                    raise Busy(detail)
                raise Retry(detail)
        except TimeoutError:
            raise Retry(f"no answer in {self.args.request_timeout:.0f} s") from None
        except OSError as error:
            server.lost(error)
            raise Lost(str(error)) from None
        else:
            token = next_token(answer, sample)
            path = self.wait(self.incoming / run, sample, server, epoch)
            if path is not None:
                self.land(path, sample, ids, token)
            return path is not None
        finally:
            with self.lock:
                server.in_flight -= 1

    def wait(self, folder: Path, sample: Sample, server: Server, epoch: int) -> Path | None:
        """The file of `sample`, once it is whole; None when the server died before. Raises what its .error says."""
        path, failed = folder / f"{sample.id}.safetensors", folder / f"{sample.id}.error"
        asked = time.monotonic()
        pause = 0.002
        while not self.stopped():
            if path.exists():
                self.last_file = time.monotonic()
                return path
            if failed.exists():
                kind, _, text = failed.read_text().strip().partition(": ")
                failed.unlink()
                raise self.told(kind, text, server)
            if server.epoch != epoch:
                return None
            waited = time.monotonic() - max(asked, self.last_file or asked)
            if waited > FIRST_FILE_S and self.last_file is None and not any(self.incoming.rglob("*.safetensors*")):
                raise UserError(f"{server.url} answered, but nothing appeared in {self.incoming}. Patch its SGLang "
                                "(patches/sglang_patch.py apply) and start it with EAGLE3_CAPTURE_DIR set to that "
                                "folder.")
            if waited > NEXT_FILE_S:
                raise UserError(f"{server.url} answered, but the file of {sample.id} did not appear in {waited:.0f} s "
                                f"({free_bytes(self.folder) / 1e9:,.1f} GB free). Read the server's log, then run the "
                                "same command again.")
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        return None

    def told(self, kind: str, text: str, server: Server) -> Exception:
        """What to raise for a line of a sample's .error; patches/eagle3_capture.py names the kinds."""
        if kind == "data":
            return Quarantined("not finite", text)
        if kind == "retry":
            return Retry(text)
        if kind == "write" and any(f"Errno {number}" in text for number in FULL):
            return UserError(f"{self.incoming}: the disk is full ({free_bytes(self.folder) / 1e9:,.1f} GB free now). "
                             "Make room and run the same command again.")
        if kind == "write":
            return UserError(f"{self.incoming}: {server.url} cannot write there ({text}). "
                             "Mend that and run this again.")
        return UserError(f"{server.url}: {text} Start the server anew, then run the same command again.")

    def land(self, path: Path, sample: Sample, ids: list[int], next_token: int) -> None:
        """Put a whole file in place. Raises Retry, UserError."""
        try:
            with StateFile(path) as file:
                with self.lock:  # of two servers that differ, one states the facts
                    facts = check_header(file, sample.id, sample.tokens, sample.prompt_len, self.journal.facts)
                    if self.journal.facts is None:
                        self.journal.add({"facts": facts})
                size, checksum = file.size, file.metadata["checksum"]
                try:
                    check_ids(file, ids, sample.prompt_len)
                except ValueError as error:
                    raise Retry(f"{error}: the server wrote rows of something else") from None
        except ValueError as error:
            raise UserError(f"{path}: {error}. Start the server as the run began, "
                            "or use another --output-dir.") from None
        place = sample_path(self.folder, sample.id)
        place.parent.mkdir(exist_ok=True)
        self.journal.add({"id": sample.id, "tokens": sample.tokens, "prompt_len": sample.prompt_len,
                          "truncated": sample.truncated, "next_token": next_token, "checksum": checksum})
        if self.room:
            # Before 04 sees the file, and may release it: from then on the line is all that is left of it
            self.journal.sync()
        move(path, place)
        if self.room:
            self.room.landed(sample, size)
        with self.lock:
            self.done_samples += 1
            self.done_tokens += sample.tokens
            self.done_bytes += size
