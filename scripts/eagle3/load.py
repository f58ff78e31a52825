"""Load on a server: so many prompts in flight, or prompts that arrive; each answer streamed and timed."""
from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import aiohttp
import numpy as np

from eagle3.bench_prompts import request_ids
from eagle3.figures import acceptance, seconds_of
from eagle3.servers import ServerGone
from eagle3.stage import bar, log

# SGLang 0.5.12 to 0.5.23, then 0.5.10: correct drafts of a request, and how many of its verify steps had 0, 1, ...
SPEC_FIELDS = (("spec_num_correct_drafts", "spec_correct_drafts_histogram"),
               ("spec_accept_token_num", "spec_accept_histogram"))
PROGRESS_S = 5.0  # between two lines of the log
NextTurn = Callable[[dict, list[dict]], list[int]]


class Dropped(Exception):
    """A request that did not end in an answer: kind (counted in the report) and a sentence."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Connection:
    """How a server is spoken to."""
    url: str
    headers: dict[str, str]
    incremental: bool  # --incremental-streaming-output: an event holds only what is new
    timeout_s: float  # without a byte from it
    server: Any  # its alive() is asked when a connection breaks; its str() names it in messages


# ---- one answer ----
def spec_counts(meta: dict) -> dict | None:
    """Verify steps, correct drafts and their histogram from a final meta_info; None if it has none."""
    for correct, histogram in SPEC_FIELDS:
        if meta.get("spec_verify_ct") is not None and correct in meta:
            return {"verify_steps": meta["spec_verify_ct"], "correct_drafts": meta[correct],
                    "histogram": meta.get(histogram)}
    return None


async def stream_answer(session: aiohttp.ClientSession, url: str, body: bytes, incremental: bool) -> dict:
    """One streamed /generate: ids, token count at each arrival, counts. Raises Dropped, OSError, aiohttp.ClientError.

    Without --incremental-streaming-output every event repeats the whole answer so far, so only the last one is parsed;
    of the others the completion_tokens of meta_info are read from their end (the text before it cannot: quotes in it
    are escaped).
    """
    times, counts, ids, buffer, last, began = [], [], [], b"", b"", time.perf_counter()
    async with session.post(url, data=body) as response:
        if response.status != 200:
            message = (await response.content.read(300)).decode(errors="replace")
            raise Dropped(f"http {response.status}", message)
        async for chunk in response.content.iter_any():
            now = time.perf_counter() - began
            *events, buffer = (buffer + chunk).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: ") or event == b"data: [DONE]":
                    continue
                at = event.rfind(b'"completion_tokens":')
                number = re.match(rb"\s*(\d+)", event[at + 20:at + 40]) if at >= 0 else None
                if not number:
                    raise Dropped("error event", event[6:300].decode(errors="replace"))
                times.append(now)
                counts.append(int(number[1]))
                last = event
                if incremental:
                    ids += json.loads(event[6:])["output_ids"]
    answer = json.loads(last[6:]) if last else {"meta_info": {}}
    meta, finish = answer["meta_info"], answer["meta_info"].get("finish_reason")
    if not finish:
        raise Dropped("cut", f"the stream ended after {counts[-1] if counts else 0} tokens without a finish_reason")
    if finish["type"] == "abort":
        raise Dropped("aborted", str(finish.get("message")))
    return {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": meta["completion_tokens"],
            "finish": finish["type"], "cached_tokens": meta.get("cached_tokens"),
            **({"retracted": meta["num_retractions"]} if meta.get("num_retractions") else {}), "latency_s": times[-1],
            "times_s": [round(at, 5) for at in times], "counts": counts, "spec": spec_counts(meta),
            "output_ids": ids if incremental else answer["output_ids"] if counts[-1] else []}


def kind_of(error: Exception) -> str:
    """Under which name a failed request is counted."""
    if isinstance(error, Dropped):
        return error.kind
    if isinstance(error, TimeoutError):
        return "timeout"
    return "connection" if isinstance(error, (OSError, aiohttp.ClientError)) else type(error).__name__


# ---- many in flight ----
def poisson_arrivals(rate: float, count: int, seed: list[int]) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second on average, each on its own; the first one at once."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(at) for at in np.cumsum(gaps) - gaps[0]]


class Sending:
    """The requests of one unit as they are sent, and what came of them: `records`, by prompt, a list of its turns."""

    def __init__(self, connection: Connection, prompts: list[dict], sampling: dict, next_turn: NextTurn | None):
        self.connection, self.prompts, self.sampling, self.next_turn = connection, prompts, sampling, next_turn
        self.url = connection.url.rstrip("/") + "/generate"
        self.bodies = [self.body(prompt["prompt_ids"], prompt.get("max_tokens")) for prompt in prompts]
        self.records: dict[int, list[dict]] = {}
        self.began, self.shown, self.session = 0.0, None, None
        self.gone = asyncio.Event()  # the server is

    def body(self, ids: list[int], most: int | None = None) -> bytes:
        """most: where this prompt's answer ends before those of the others."""
        sampling = {**self.sampling, "max_new_tokens": min(most, self.sampling["max_new_tokens"])} if most else \
            self.sampling
        return json.dumps({"input_ids": ids, "sampling_params": sampling, "stream": True}).encode()

    def done(self) -> list[dict]:
        return [record for records in self.records.values() for record in records]

    async def ask(self, body: bytes) -> dict:
        """One request. It is sent once: what fails is counted, since asked again it would be another load."""
        started = time.perf_counter()
        try:
            record = await stream_answer(self.session, self.url, body, self.connection.incremental)
        except Exception as error:  # one bad answer is a failed request, not the end of the measurement
            record = {"error": kind_of(error), "message": str(error)[:300],
                      "spent_s": round(time.perf_counter() - started, 5)}
            broken = record["error"] in ("connection", "timeout")
            if broken and not self.gone.is_set() and not await asyncio.to_thread(self.connection.server.alive):
                self.gone.set()
        self.shown.update()
        return {"start_s": round(started - self.began, 5), **record}

    def follow_up(self, prompt: dict, before: list[dict]) -> tuple[list[int], bytes]:
        """The next question's ids and its request."""
        ids = self.next_turn(prompt, before)
        return ids, self.body(ids)

    async def converse(self, number: int) -> None:
        """A prompt, turn by turn. Raises UserError where the template refuses a later turn."""
        prompt, asked = self.prompts[number], self.records.setdefault(number, [])
        asked.append(await self.ask(self.bodies[number]))
        for _ in prompt.get("turns", ()):
            if "error" in asked[-1]:
                asked.append({"error": "no answer before", "message": "the turn before it failed"})
                self.shown.update()
                continue
            ids, body = await asyncio.to_thread(self.follow_up, prompt, asked)  # rendering must not hold up the others
            asked.append({"prompt_ids": ids, **await self.ask(body)})

    async def stream(self, todo: Iterator[int]) -> None:
        """One stream: the next prompt as soon as the one before is answered. todo: shared by all streams."""
        for number in todo:
            if self.gone.is_set():
                break
            await self.converse(number)

    async def arrive(self, number: int, due_s: float) -> None:
        """A prompt at its time, however many others are in flight."""
        with contextlib.suppress(TimeoutError):  # it is time
            async with asyncio.timeout(max(0.0, self.began + due_s - time.perf_counter())):
                await self.gone.wait()
        if not self.gone.is_set():
            await self.converse(number)
            self.records[number][0]["due_s"] = round(due_s, 5)


async def run_unit(connection: Connection, prompts: list[dict], streams: int, sampling: dict, label: str,
                   arrivals: list[float] | None = None,
                   next_turn: NextTurn | None = None) -> tuple[list[dict], float]:
    """All prompts -> (records in the order of prompts and turns, wall seconds). Raises ServerGone, UserError.

    `streams` in flight at a time; with `arrivals` each prompt so many seconds after the beginning instead. next_turn:
    ids of the next question to a prompt with `turns`, from the records of those before.

    One thread for all streams: with a thread each the same server gave 5,183 tok/s instead of 6,195 (64 streams, H200).
    """
    sending, total = Sending(connection, prompts, sampling, next_turn), sum(map(len, map(request_ids, prompts)))

    async def progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            log(progress_line(label, sending.done(), total, time.perf_counter() - sending.began))

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connection.timeout_s, sock_read=connection.timeout_s)
    with bar(total, "request") as sending.shown:
        sending.shown.set_description(label)
        async with aiohttp.ClientSession(headers=connection.headers, connector=aiohttp.TCPConnector(limit=0),
                                         read_bufsize=1 << 20, timeout=timeout) as sending.session:
            sending.began, todo = time.perf_counter(), iter(range(len(prompts)))
            reporter = asyncio.create_task(progress())
            await asyncio.gather(*map(sending.arrive, range(len(prompts)), arrivals) if arrivals else
                                 (sending.stream(todo) for _ in range(min(streams, len(prompts)))))
            wall = time.perf_counter() - sending.began
            reporter.cancel()
    if sending.gone.is_set():
        raise ServerGone(f"{connection.server}: the server went away during {label}. Start it again; "
                         "the same command goes on with this level.")
    return [{"id": name, **{key: prompt[key] for key in ("question",) if key in prompt}, **record}
            for number, prompt in enumerate(prompts)
            for name, record in zip(request_ids(prompt), sending.records[number])], wall


def silence(requests: list[dict]) -> float:
    """The longest time, in seconds, in which some of a unit's requests were in flight and nothing came of any."""
    events = []
    for record in requests:
        if "start_s" in record:
            sent, spent = record["start_s"], seconds_of(record)
            events += [(sent, 1), *((sent + at, 0) for at in record.get("times_s", ())), (sent + spent, -1)]
    longest, flying, heard = 0.0, 0, 0.0
    for at, change in sorted(events):
        if flying and change < 1:
            longest = max(longest, at - heard)
        if not flying or change < 1:
            heard = at
        flying += change
    return longest


def progress_line(label: str, done: list[dict], total: int, spent: float) -> str:
    answers = [record for record in done if "error" not in record]
    accept = acceptance(answers)
    return (f"{label} {len(done)}/{total} | {sum(r['completion_tokens'] for r in answers) / spent:,.1f} tok/s"
            + (f" | accept_length {accept['accept_length']:.2f}" if accept else "")
            + f" | failed {len(done) - len(answers)}"
            + (f" | eta {spent / len(done) * (total - len(done)):.0f}s" if done else ""))
