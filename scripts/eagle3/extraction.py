"""03's work: samples are sent to patched SGLang servers, their files awaited, checked and put in place.

A server answers a request when it has read the sample; the file of hidden states follows a moment later, in the folder
that the request's rid names. What may go wrong on the way, and what becomes of the sample:

    the server goes away         the sample is sent again, alone: nothing else is in flight then. A sample that servers
                                 had when they died, DEATHS times and the last time alone, is quarantined; these deaths
                                 are written down, so that a row which kills servers does so twice, and not for ever
    it hangs                     waited for as if it were away; no sample is blamed
    it is busy (429, 503, ...)   sent again, for --server-wait seconds; so where the server's disk stands still
    it fails otherwise           sent again, ATTEMPTS times in all
    it rejects the sample        quarantined at once; so is a sample with a state that is not finite, or with a token
                                 beyond the target's vocabulary, which is not sent at all
    it asks for another key,     the run ends with one line (UserError)
    nothing can be written, or
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
import threading
import time
from pathlib import Path
from typing import Callable, Iterator

from eagle3.bounded import Room
from eagle3.incoming import PREFILL, free_bytes, move, run_prefix
from eagle3.journal import Deaths, Journal, Quarantine, plan_order
from eagle3.masking import clean
from eagle3.prefill_server import Busy, Hung, Lost, Quarantined, Retry, Server, api_key, next_token
from eagle3.restart import Placed
from eagle3.samples import Sample, read_ids
from eagle3.stage import UserError, log
from eagle3.states import KINDS, StateFile, check_header, check_ids, kind_of, sample_path
from eagle3.states_client import Away, sources_of

ATTEMPTS = 3          # of one sample, where the server answered
DEATHS = 2            # of servers while they had one sample, the last time nothing else: because of it
# A request's rid names its kind of states, so nothing of it has to be said when a server is started, and no two servers
# can differ: --states and the folder are the one place
RID = {kind: "eagle3" if kind == KINDS[0] else f"eagle3-{kind}" for kind in KINDS}
FULL = (errno.ENOSPC, errno.EDQUOT)
FIRST_FILE_S = 30.0   # after the first answer: the server writes within a second
NEXT_FILE_S = 180.0   # without any file: a disk that is merely slow still finishes some


class Gate:
    """Lets many in at a time, or one alone, who goes before those that come later."""

    def __init__(self):
        self.changed, self.inside, self.alone, self.wanted = threading.Condition(), 0, False, 0

    @contextlib.contextmanager
    def enter(self, alone: bool, stopped: Callable[[], bool]) -> Iterator[None]:
        """Inside, alone or not. Comes in without further waiting when `stopped()`."""
        def free() -> bool:
            return stopped() or not (self.inside if alone else self.alone or self.wanted)

        with self.changed:
            self.wanted += alone
            while not self.changed.wait_for(free, 0.2):
                pass
            self.wanted -= alone
            self.inside += 1
            self.alone = alone
        try:
            yield
        finally:
            with self.changed:
                self.inside -= 1
                self.alone = False
                self.changed.notify_all()


# ---- the samples on their way ----
class Extraction:
    """Worker threads take samples from `work`; `stop` holds what ends the run, for the main thread to raise.

    to_do: what neither lies in place nor was released nor is in quarantine. done_*: put in place since the start.
    """

    def __init__(self, args, samples: list[Sample], parts: list[Path], journal: Journal, incoming: Path):
        self.args, self.parts, self.journal, self.folder, self.incoming = args, parts, journal, journal.folder, incoming
        key = api_key(args.api_key_env)
        self.servers = [Server(url, key) for url in args.base_url]
        self.sources = dict(zip(self.servers, sources_of(args)))  # of states on other hosts; {} through a shared folder
        self.room = Room(self.folder, int(args.max_disk_gb * 1e9), journal, samples) if args.max_disk_gb else None
        self.quarantine, self.deaths = Quarantine(self.folder), Deaths(self.folder)
        self.quarantine.keep({sample.id for sample in samples})
        gone = self.quarantine.reasons.keys() | (self.room.released.keys() if self.room else set())
        self.placed = Placed(self.folder, len(samples))
        gone |= self.placed.known(samples, journal)
        to_do = [sample for sample in samples if sample.id not in gone and not self.in_place(sample)]
        self.placed.flush()
        if self.room:
            self.room.poll()  # what went while this looked: its line was written first
            to_do = [sample for sample in to_do if sample.id not in self.room.released]
        self.to_do = sorted(to_do, key=lambda sample: plan_order(sample.id))  # in which 04 --follow trains
        self.samples, self.total = samples, len(samples)
        # The servers write into a folder of this process alone: what an earlier one asked for may still arrive there
        self.name = f"{run_prefix(self.folder, bool(self.sources))}{os.getpid()}-{int(time.time())}"
        self.work: queue.SimpleQueue = queue.SimpleQueue()
        self.lock, self.turn, self.gate = threading.Lock(), threading.Lock(), Gate()
        self.stop: BaseException | None = None
        self.finished = False
        self.last_file: float | None = None
        self.done_samples = self.done_tokens = self.done_bytes = 0

    def in_place(self, sample: Sample) -> bool:
        found = self.journal.in_place(sample, lambda: read_ids(self.parts, sample))
        if found:
            self.placed.add(sample, self.journal.rows[sample.id]["checksum"], sample_path(self.folder, sample.id))
        return found

    @contextlib.contextmanager
    def working(self):
        """Inside, the worker threads (a list) do what is to do; an error there stops them. Their own is in `stop`."""
        for sample in self.to_do:
            self.work.put(sample)
        threads = [threading.Thread(target=self.worker, daemon=True)
                   for _ in range(min(self.args.concurrency, len(self.to_do)))]
        for thread in threads + [threading.Thread(target=self.look_after, args=(server,), daemon=True)
                                 for server in self.servers]:
            thread.start()
        try:
            yield threads
        except BaseException as error:
            self.stop = self.stop or error
            raise
        finally:
            self.finished = True
            self.placed.flush()

    def look_after(self, server: Server) -> None:
        """Know within a second when it goes or is back. A thread each: one that hangs takes long to say so."""
        while not self.stopped() and not self.finished:
            server.probe()
            time.sleep(1)

    def check_away(self) -> int:
        """How many servers are away. Raises UserError where all of them are, longer than --server-wait."""
        away = [server for server in self.servers if server.away_since is not None]
        since = max((server.away_since or math.inf for server in away), default=math.inf)
        if len(away) == len(self.servers) and time.monotonic() - since > self.args.server_wait:
            raise UserError(f"{', '.join(server.url for server in away)}: away for {self.args.server_wait:.0f} s. "
                            "Start the server again, then run the same command.")
        return len(away)

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
        self.quarantine.add(sample.id, reason, clean(detail))
        log(f"quarantined {sample.id}: {reason}: {detail}")

    def check_failed(self) -> None:
        """Raises UserError when too many samples are in quarantine."""
        reasons = dict(self.quarantine.reasons)
        if len(reasons) > max(1, self.args.max_failed * self.total):
            counts = collections.Counter(reasons.values()).most_common()
            raise UserError(f"{self.quarantine.path}: {len(reasons)} of {self.total} samples failed ({counts}), more "
                            "than --max-failed allows. Mend the cause, then run the same command with --redo-failed.")

    def leave_out_unknown_ids(self, vocab_size: int) -> None:
        """Quarantine what holds a token without an embedding in the target: it would end the server, not the request.

        Raises UserError where that is more than --max-failed allows: these are another tokenizer's.
        """
        bad = [sample for sample in self.to_do if sample.largest >= vocab_size]
        if len(bad) > max(1, self.args.max_failed * self.total):
            raise UserError(f"{self.args.data_dir}: {len(bad)} of {self.total} samples hold tokens beyond the target's "
                            f"vocabulary of {vocab_size:,} ({bad[0].id}: {bad[0].largest}). Name the responses of this "
                            "target, or the target of these responses.")
        for sample in bad:
            self.put_aside(sample, "ids beyond the vocabulary", f"token {sample.largest}, the target has {vocab_size}")
        self.to_do = [sample for sample in self.to_do if sample.largest < vocab_size]

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
                    chosen = min(up, key=lambda server: (server.in_flight, server.asked))
                    chosen.in_flight += 1
                    chosen.asked += 1
                    return chosen
            time.sleep(0.2)
        return None

    def extract(self, sample: Sample) -> None:
        """Try until the sample is in place. Raises Quarantined, UserError."""
        ids = read_ids(self.parts, sample)
        failures = tries = 0
        busy_since: float | None = None
        while not self.stopped():
            if tries:
                self.sweep(sample)
            tries += 1
            alone = self.deaths.counts[sample.id] > 0  # so that only the cause sees more
            try:
                # A folder for each try: an aborted request of the same name may still be writing
                with self.gate.enter(alone, self.stopped):
                    if self.send(sample, ids, f"{self.name}.{tries}"):
                        return
            except Hung:
                continue
            except Lost as error:
                if self.deaths.add(sample.id) >= DEATHS and alone:
                    raise Quarantined(f"the server died {DEATHS} times", str(error)) from None
            except Busy as error:
                busy_since = busy_since or time.monotonic()
                if time.monotonic() - busy_since > self.args.server_wait:
                    raise UserError(f"busy for {self.args.server_wait:.0f} s: {error}. Mend that, or allow more time "
                                    "with --server-wait, and run the same command again.") from None
                time.sleep(1)
            except Retry as error:
                failures += 1
                if failures == ATTEMPTS:
                    raise Quarantined(f"failed {ATTEMPTS} times", str(error)) from None
                time.sleep(failures)

    def send(self, sample: Sample, ids: list[int], run: str) -> bool:
        """Ask a server, wait for the file in `incoming/run`, put it in place; False when the run is to stop.

        Raises Lost, Hung, Retry, Busy, Quarantined, UserError.
        """
        rid = f"{RID[self.args.states]}:{run}:{sample.prompt_len}:{sample.tokens}:{sample.id}"
        body = json.dumps({"input_ids": ids, "rid": rid, "sampling_params": PREFILL}).encode()
        server = self.server()
        if server is None:
            return False
        epoch = server.epoch
        try:
            token = next_token(server.generate(body, self.args.request_timeout), sample)
            path = self.wait(self.incoming / run, sample, server, epoch)
            if path is not None:
                self.land(path, sample, ids, token)
            return path is not None
        finally:
            with self.lock:
                server.in_flight -= 1
            if server in self.sources:
                self.sources[server].drop(run, sample.id)

    def wait(self, folder: Path, sample: Sample, server: Server, epoch: int) -> Path | None:
        """The file of `sample` once it is whole; None when the run is to stop. Raises Lost and what its .error says."""
        path, failed = folder / f"{sample.id}.safetensors", folder / f"{sample.id}.error"
        asked = time.monotonic()
        pause = 0.002
        source = self.sources.get(server)
        while not self.stopped():
            if source:
                asked += source.bring(folder.name, sample.id, folder, self.stopped)
            if path.exists():
                self.last_file = time.monotonic()
                return path
            if failed.exists():
                kind, _, text = failed.read_text().strip().partition(": ")
                failed.unlink()
                raise self.told(kind, text, server)
            if server.epoch != epoch:
                raise Lost("it went away before the file was written")
            waited = time.monotonic() - max(asked, self.last_file or asked)
            if waited > FIRST_FILE_S and not server.working():
                asked = time.monotonic()  # what hangs does not write
            elif waited > FIRST_FILE_S and self.last_file is None and not any(self.incoming.rglob("*.safetensors*")):
                raise UserError(f"{server.url} answered, but nothing appeared in {self.where(server)}. "
                                f"{server.how_to_capture()} and start it with EAGLE3_CAPTURE_DIR set to that folder."
                                + ("" if self.args.states == KINDS[0] else " A patch from before there was --states "
                                   f"{self.args.states} knows nothing of it: apply it anew."))
            elif waited > NEXT_FILE_S:
                raise UserError(f"{server.url} answered, but the file of {sample.id} did not appear in {waited:.0f} s "
                                f"({free_bytes(self.folder) / 1e9:,.1f} GB free). Read the server's log, then run the "
                                "same command again.")
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        return None

    def where(self, server: Server) -> str:
        """The folder into which it should capture."""
        source = self.sources.get(server)
        return f"{source.where()} ({source.url})" if source else str(self.incoming)

    def greet_sources(self) -> None:
        """The states servers are there, and nothing of an earlier process is left in them. Raises UserError."""
        for source in set(self.sources.values()):
            source.greet()
            try:
                source.clean(run_prefix(self.folder, remote=True))
            except Away as error:
                raise source.silent(error) from None
            log(f"states come from {source.url} | {source.where()} | "
                f"disk free there {source.about.get('free_bytes', 0) / 1e9:,.1f} GB")

    def left_there(self) -> list:
        """What runs into this folder have on other hosts. Raises UserError."""
        found = []
        for source in set(self.sources.values()):
            try:
                found += map(tuple, source.left(run_prefix(self.folder, remote=True)))
            except Away as error:
                raise source.silent(error) from None
        return found

    def tidy(self) -> None:
        """Nothing is left on other hosts of what they captured for this folder. One that is away is only told of."""
        for source in set(self.sources.values()):
            try:
                source.clean(run_prefix(self.folder, remote=True))
            except Away as error:
                log(f"{source.url} is away ({error}): what 03 did not take lies in {source.where()} until the next 03 "
                    "of this folder")

    def told(self, kind: str, text: str, server: Server) -> Exception:
        """What to raise for a line of a sample's .error; patches/eagle3_capture.py names the kinds."""
        if kind == "data":
            return Quarantined("not finite", text)
        if kind == "retry":
            return Retry(text)
        if kind == "stalled":
            server.busy(text)
            return Busy(f"{server.url}: {text}")
        if kind == "write" and any(f"Errno {number}" in text for number in FULL):
            free = "" if server in self.sources else f" ({free_bytes(self.folder) / 1e9:,.1f} GB free now)"
            return UserError(f"{self.where(server)}: the disk is full{free}. Make room and run the same command again.")
        if kind == "write":
            return UserError(f"{self.where(server)}: {server.url} cannot write there ({text}). "
                             "Mend that and run this again.")
        return UserError(f"{server.url}: {text} Start the server anew, then run the same command again.")

    def land(self, path: Path, sample: Sample, ids: list[int], next_token: int) -> None:
        """Put a whole file in place. Raises Retry, UserError."""
        known = self.journal
        try:
            with StateFile(path) as file:
                with self.lock:  # of two servers that differ, one states the facts
                    facts = check_header(file, sample.id, sample.tokens, sample.prompt_len, known.facts)
                    if kind_of(facts) != self.args.states:
                        raise ValueError(f"holds {kind_of(facts)} states, --states {self.args.states} was asked for")
                    if known.facts is None:
                        known.add({"facts": facts})
                    elif "weights" in facts and "weights" not in known.facts:  # begun by a capture that did not say
                        known.add({"facts": known.facts | {"weights": facts["weights"]}})
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
        self.journal.add_sample(sample, checksum, next_token)
        if self.room:
            # Before 04 sees the file, and may release it: from then on the line is all that is left of it
            self.journal.sync()
        move(path, place)
        if self.room:
            self.room.landed(sample, size)
        else:
            self.placed.add(sample, checksum, place)
        with self.lock:
            self.done_samples += 1
            self.done_tokens += sample.tokens
            self.done_bytes += size
