"""Load on a server: so many prompts in flight at a time, each answer streamed and timed, and the energy it took."""
from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import socket
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

import aiohttp
import pynvml

from eagle3.figures import acceptance
from eagle3.servers import ServerGone
from eagle3.stage import bar, log

# SGLang 0.5.12 to 0.5.23, then 0.5.10: correct drafts of a request, and how many of its verify steps had 0, 1, ...
SPEC_FIELDS = (("spec_num_correct_drafts", "spec_correct_drafts_histogram"),
               ("spec_accept_token_num", "spec_accept_histogram"))
PROGRESS_S = 5.0  # between two lines of the log


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
            "finish": finish["type"], "cached_tokens": meta.get("cached_tokens"), "latency_s": times[-1],
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
async def run_unit(connection: Connection, prompts: list[dict], streams: int, sampling: dict,
                   label: str) -> tuple[list[dict], float]:
    """All prompts, `streams` in flight at a time -> (records in prompt order, wall seconds). Raises ServerGone.

    One thread for all streams: with a thread each the same server gave 5,183 tok/s instead of 6,195 (64 streams, H200).
    """
    records, todo, gone = {}, iter(range(len(prompts))), False
    url = connection.url.rstrip("/") + "/generate"
    bodies = [json.dumps({"input_ids": prompt["prompt_ids"], "sampling_params": sampling, "stream": True}).encode()
              for prompt in prompts]

    async def worker() -> None:
        nonlocal gone
        for number in todo:  # shared: each stream takes the next prompt
            if gone:
                break
            try:
                records[number] = await stream_answer(session, url, bodies[number], connection.incremental)
            except Exception as error:  # one bad answer is a failed request, not the end of the measurement
                records[number] = {"error": kind_of(error), "message": str(error)[:300]}
                broken = records[number]["error"] in ("connection", "timeout")
                if broken and not gone and not await asyncio.to_thread(connection.server.alive):
                    gone = True
            shown.update()

    async def progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            log(progress_line(label, list(records.values()), len(prompts), time.perf_counter() - began))

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connection.timeout_s, sock_read=connection.timeout_s)
    with bar(len(prompts), "prompt") as shown:
        shown.set_description(label)
        async with aiohttp.ClientSession(headers=connection.headers, connector=aiohttp.TCPConnector(limit=0),
                                         read_bufsize=1 << 20, timeout=timeout) as session:
            began = time.perf_counter()
            reporter = asyncio.create_task(progress())
            await asyncio.gather(*(worker() for _ in range(min(streams, len(prompts)))))
            wall = time.perf_counter() - began
            reporter.cancel()
    if gone:
        raise ServerGone(f"{connection.server}: the server went away during {label}. Start it again; "
                         "the same command goes on with this level.")
    return [{"id": prompt["id"], **records[number]} for number, prompt in enumerate(prompts)], wall


def progress_line(label: str, done: list[dict], total: int, spent: float) -> str:
    answers = [record for record in done if "error" not in record]
    accept = acceptance(answers)
    return (f"{label} {len(done)}/{total} | {sum(r['completion_tokens'] for r in answers) / spent:,.1f} tok/s"
            + (f" | accept_length {accept['accept_length']:.2f}" if accept else "")
            + f" | failed {len(done) - len(answers)}"
            + (f" | eta {spent / len(done) * (total - len(done)):.0f}s" if done else ""))


# ---- energy ----
@functools.cache
def gpus() -> list:
    """NVML handles of this machine's GPUs; none without a driver.

    The first call can hold the GPU up for seconds: not while something is measured.
    """
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def energy(handles: list) -> float | None:
    """Joules that these GPUs have taken since the driver was loaded; None where one counts none (before Volta)."""
    try:
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000 if handles else None
    except pynvml.NVMLError:
        return None


class Power:
    """Mean power of this machine's GPUs over a `with` block, in watts.

    None where the server at `url` runs on another machine, or the driver counts no energy. Counters are read before and
    after: with `nvidia-smi` polled meanwhile a server gave 0.8 of its throughput (64 streams, H200).
    """

    def __init__(self, url: str):
        self.watts, self.gpus = None, []
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((urllib.parse.urlsplit(url).hostname, 0))  # only an address of this machine can be bound
            self.gpus = gpus()

    def __enter__(self) -> Power:
        self.began, self.energy = time.perf_counter(), energy(self.gpus)
        return self

    def __exit__(self, *_) -> None:
        after = energy(self.gpus)
        if None not in (self.energy, after):
            self.watts = (after - self.energy) / (time.perf_counter() - self.began)
