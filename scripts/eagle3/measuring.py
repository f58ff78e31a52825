"""How a benchmark goes: which units there are, in which order, and how each is measured, once."""
from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from eagle3 import adaptive, bench_flags, simulated
from eagle3.bench_prompts import contexts_of
from eagle3.endpoints import Endpoints, contact, flush_cache, probe_difference, server_info
from eagle3.figures import difference_key, level_figures, pooled, same_text
from eagle3.gpu_state import Power
from eagle3.load import Connection, NextTurn, poisson_arrivals, run_unit, silence
from eagle3.measured import Measured
from eagle3.servers import ServerGone
from eagle3.stage import UserError, log
from eagle3.variants import DraftFolder, same_folder

MAX_PROBES = 200
STANDSTILL_S, STANDSTILL_SHARE, STANDSTILL_TIMES = 2.0, 0.1, 3  # seconds; of a unit's time; of the warm-up's silence
FOLDERS = ("model_path", "speculative_draft_model_path")  # of what a server tells


@dataclass(frozen=True)
class Unit:
    """All prompts once, of one variant at one level. context: the length that they were padded to, as --context has it.

    level: streams, or a rate of arrivals as bench_flags.rate_name says it.
    """
    variant: str
    level: int | str
    repeat: int
    context: str | None = None

    def __str__(self) -> str:
        level = f"c{self.level}" if isinstance(self.level, int) else self.level
        return f"{self.variant} {level}{f'@{self.context}' if self.context else ''} r{self.repeat}"

    def row(self) -> dict:
        """Of raw.jsonl."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass
class Benchmark:
    """What is measured, and where; the rest is filled in as it becomes known."""
    args: argparse.Namespace
    endpoints: Endpoints
    variants: list[str]
    drafters: dict[str, DraftFolder]  # by variant; a variant that is not here serves the first
    config: dict  # flag: value
    prompts: list[dict] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # hashes
    planned: list[Unit] = field(default_factory=list)
    repeats: int = 1
    measured: Measured | None = None
    next_turn: NextTurn | None = None  # where prompts have several
    settled: adaptive.Settled | None = None  # by a sweep that is finished
    met: str | None = None  # the variant whose server has been looked at
    tokenizer: str = ""  # the folder of what renders prompts
    unable: dict[str, str] = field(default_factory=dict)  # sweep points that were left out, and why

    @property
    def report_path(self) -> Path:
        return self.args.output_dir / "report.md"

    def most_at(self, level: int | str) -> int | None:
        """How many of the prompts a unit has; None: all."""
        return simulated.prompts_needed(level) if self.args.break_even else None

    def drafter(self, variant: str) -> DraftFolder:
        return self.drafters.get(variant) or next(iter(self.drafters.values()), DraftFolder(None))

    def unfinished(self) -> list[Unit]:
        finished = {Unit(unit["variant"], unit["level"], unit["repeat"], unit.get("context"))
                    for unit in self.measured.units}
        return [unit for unit in self.planned if unit not in finished]

    def prompts_at(self, context: str | None) -> list[dict]:
        return [prompt for prompt in self.prompts if prompt.get("context") == context]

    def unmet(self) -> list[str]:
        """Variants of whose server nothing is known: its line was damaged."""
        return [variant for variant in dict.fromkeys(unit["variant"] for unit in self.measured.units)
                if variant not in self.measured.servers]


# ---- the order ----
def plan(bench: Benchmark, complete: bool) -> None:
    """The order of the units. Each repeat turns the variants round, so that a drift of the machine hits both.

    complete: a finished report is asked for more only by more --repeats.
    """
    args = bench.args
    few = args.sweep or args.doctor
    bench.repeats = args.repeats or (bench_flags.REPEATS_OF_SWEEP if few else bench_flags.REPEATS)
    if complete and not args.repeats:
        bench.repeats = 1 + max((unit["repeat"] for unit in bench.measured.units if unit["repeat"] < adaptive.JUDGED),
                                default=0)
    bench.config["repeats"] = bench.repeats
    bench.planned = [Unit(variant, level, repeat, context) for repeat in range(bench.repeats)
                     for variant in (bench.variants if repeat % 2 == 0 else reversed(bench.variants))
                     for context in contexts_of(bench.prompts)
                     for level in (*args.concurrency, *map(bench_flags.rate_name, args.request_rate))]
    if args.break_even:  # servers start slowly, and there are many: each once
        bench.planned.sort(key=lambda unit: (bench.variants.index(unit.variant), unit.repeat))


def settle(bench: Benchmark) -> None:
    """Once a sweep is finished: steps by batch size; with --adaptive also the units that judge. Raises UserError."""
    args, endpoints = bench.args, bench.endpoints
    if not args.sweep or bench.settled or any(unit.variant not in bench.unable for unit in bench.unfinished()):
        return
    contexts = contexts_of(bench.prompts)
    version = next((info["version"] for info in bench.measured.servers.values()), None)  # plain's line may be damaged
    bench.settled = found = adaptive.settle(pooled(bench.measured.units, contexts), version, args.output_dir)
    if found.none:
        return log(f"no adaptive steps: {found.none}")
    endpoints.variants[adaptive.VARIANT] = adaptive.flags(found.entries, found.path)
    endpoints.environments[adaptive.VARIANT] = adaptive.environment(found.entries)
    log(f"adaptive steps in {found.path}: {adaptive.spelled(found.entries)}")
    if args.adaptive:
        bench.planned += [Unit(variant, level, repeat, context) for variant, level, repeat in found.runs()
                          for context in contexts]


# ---- unit by unit ----
def measure(bench: Benchmark, after_unit: Callable[[Benchmark], object]) -> None:
    """All units that are not finished; after each `after_unit(bench)`. Raises UserError, ServerGone."""
    for unit in bench.unfinished():
        if unit.variant in bench.unable:
            continue
        try:
            url = bench.endpoints.use(unit.variant)
        except UserError as error:
            leave_out(bench, unit.variant, error)
            continue
        meet(bench, unit.variant, url)
        try:
            measure_unit(bench, unit, url)
            after_unit(bench)  # before the line that calls it finished
            say_unit(bench, unit)
        except ServerGone as error:
            leave_out(bench, unit.variant, ServerGone(f"{error}{bench.endpoints.reason()}"))
        except UserError as error:  # all of its requests failed
            leave_out(bench, unit.variant, error)
    for variant in bench.unmet():
        meet(bench, variant, bench.endpoints.use(variant))


def leave_out(bench: Benchmark, variant: str, error: Exception) -> None:
    """Go on without a point of --sweep whose server does not start, dies, or answers nothing.

    Raises `error` for any other variant, and where no point has been measured yet: then the cause is not the point.
    """
    if not bench.args.sweep or variant == "plain" or all(unit["variant"] == "plain" for unit in bench.measured.units):
        raise error
    log(f"note: {variant} is left out: {error}")
    bench.unable[variant] = str(error)
    bench.endpoints.close()


def meet(bench: Benchmark, variant: str, url: str) -> None:
    """Look at a server before the first unit there: is it the one it should be, and was? Raises UserError."""
    if variant == bench.met:
        return
    bench.met, servers, args = variant, bench.measured.servers, bench.args
    info = contact(url, variant, bench.endpoints.headers, bench.drafter(variant))
    if variant == adaptive.VARIANT:
        adaptive.check(server_info(url, bench.endpoints.headers), bench.endpoints)
    for name, known in servers.items():
        if Path(known["model_path"]).name != Path(info["model_path"]).name:
            raise UserError(f"{bench.endpoints}: serves {info['model_path']}, {name} {known['model_path']}: "
                            "not one target.")
    before = servers.get(variant, info)
    differs = sorted(key for key in info if before.get(key, info[key]) != info[key] and not (
        key in FOLDERS and before.get(key) and info[key] and same_folder(before[key], info[key])))
    if differs:
        raise UserError(f"{bench.endpoints}: other {', '.join(differs)} than in {bench.measured.path}. "
                        "Start it as it was, or use another --output-dir.")
    bench.measured.add_server(variant, info)
    bench_flags.check_lengths(bench.prompts, args.max_tokens, info.get("context_length"), str(bench.endpoints))
    log(f"{variant} at {url} | " + " | ".join(f"{key} {value}" for key, value in info.items() if value is not None))


def measure_unit(bench: Benchmark, unit: Unit, url: str) -> None:
    """Measure; once more where the server stood still meanwhile. Raises UserError, ServerGone."""
    requests, result = measure_once(bench, unit, url)
    if silent := stood_still(requests, result):
        first = {"wall_s": result["wall_s"], "silent_s": round(silent, 3)}
        log(f"note: {unit}: for {silent:.1f} of {first['wall_s']:.1f} s nothing came from the server, as when it "
            "compiles kernels for its first batch of a size. Measured again")
        requests, result = measure_once(bench, unit, url)
        result["first_try"] = first
    simulated.check({**unit.row(), **result, "requests": requests}, bench.endpoints)
    bench.measured.add_unit(unit.row(), result, requests)


def stood_still(requests: list[dict], result: dict) -> float:
    """Seconds in which nothing came, where that is far more than in the warm-up and much of the unit's time; else 0."""
    silent = silence(requests)
    usual = max(STANDSTILL_S, STANDSTILL_SHARE * result["wall_s"], STANDSTILL_TIMES * result["warmup"]["silent_s"])
    return silent if silent > usual else 0.0


def measure_once(bench: Benchmark, unit: Unit, url: str) -> tuple[list[dict], dict]:
    """Warm up, empty the cache, measure: (requests, what else its line says). Raises UserError, ServerGone."""
    args, info = bench.args, bench.measured.servers[unit.variant]
    prompts = bench.prompts_at(unit.context)[:bench.most_at(unit.level)]
    sampling = {"max_new_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p,
                "ignore_eos": args.fixed_length}
    connection = Connection(url, bench.endpoints.headers, bool(info["incremental_streaming_output"]),
                            args.request_timeout, bench.endpoints)
    streams, arrivals, power = unit.level, None, Power(url)
    if unit.level in (rates := {bench_flags.rate_name(rate): rate for rate in args.request_rate}):
        rate, streams = rates[unit.level], len(prompts)
        # the same arrivals for each variant; in another repeat others
        arrivals = poisson_arrivals(rate, len(prompts), [unit.repeat, round(rate * 1e6)])
    # First of all: prompts that a cache holds are not read again, and the prefill of this level would stay cold
    emptied = flush_cache(url, bench.endpoints.headers)
    warmup = warm_up(connection, prompts[:args.warmup], min(streams, args.warmup), sampling, f"{unit} warm-up")
    emptied = emptied and flush_cache(url, bench.endpoints.headers)
    with power:
        requests, wall = asyncio.run(run_unit(connection, prompts, streams, sampling, str(unit), arrivals,
                                              bench.next_turn))
    if all("error" in request for request in requests):
        raise UserError(f"{bench.endpoints}: all {len(requests)} requests of {unit} failed; the first with "
                        f"{requests[0]['error']}: {' '.join(requests[0]['message'].split())}")
    return requests, {"wall_s": wall, "watts": power.watts, "warmup": warmup, "emptied": emptied, "gpus": power.state}


def say_unit(bench: Benchmark, unit: Unit) -> None:
    """What the last unit came to."""
    figures, info = level_figures([bench.measured.units[-1]]), bench.measured.servers[unit.variant]
    accept = figures["accept"]
    spoken = f"{figures['tok_s']:,.1f} tok/s | ttft p50 {figures['ttft_s']['p50'] * 1000:.0f} ms" \
        if figures["tok_s"] else "no token came back"
    log(f"{unit} finished | {spoken}"
        + (f" | accept_length {accept['accept_length']:.3f}" if accept else "")
        + f" | failed {sum(figures['failed'].values())} | {figures['wall_s']:.1f} s")
    if unit.variant != "plain" and not accept:
        log(f"note: the answers of SGLang {info['version']} carry no speculative counts: no accept_length")


def warm_up(connection: Connection, prompts: list[dict], streams: int, sampling: dict, label: str) -> dict:
    """Short answers that count in no figure: {"requests", "failed", "wall_s", "silent_s"}."""
    if not prompts:
        return {"requests": 0, "failed": 0, "wall_s": 0.0, "silent_s": 0.0}
    first_turns = [{key: value for key, value in prompt.items() if key != "turns"} for prompt in prompts]
    short = {**sampling, "max_new_tokens": min(bench_flags.SHORT, sampling["max_new_tokens"])}
    requests, wall = asyncio.run(run_unit(connection, first_turns, streams, short, label))
    failed = [request["message"] for request in requests if "error" in request]
    if failed:
        log(f"note: {len(failed)} of {len(requests)} requests of the warm-up failed: {failed[0]}")
    return {"requests": len(requests), "failed": len(failed), "wall_s": round(wall, 3),
            "silent_s": round(silence(requests), 3)}


# ---- where greedy answers part: a near-tie or a fault ----
def probe_differences(bench: Benchmark) -> None:
    """Ask a server for the target's own log-probabilities of the two tokens. Raises UserError, ServerGone."""
    measured, about = bench.measured, {prompt["id"]: prompt for prompt in bench.prompts}
    probed = sum(probe["kind"] != "code" for probe in measured.probes.values())  # answers.py has its results there
    pairs = [(unit, plain) for plain in measured.units if plain["variant"] == "plain" and bench.args.temperature == 0
             for unit in measured.units if unit["variant"] != "plain" and unit["level"] == plain["level"]]
    for unit, plain in pairs:
        answers = {record["id"]: record for record in plain["requests"]}
        for difference in same_text([plain], [unit])["differences"]:
            key = difference_key(difference)
            if key in measured.probes or probed >= MAX_PROBES:
                continue
            probed += 1
            url = bench.endpoints.use(bench.endpoints.variant or "plain")  # any server will do: take the one that runs
            near_tie = 1e-3 if measured.servers["plain"].get("dtype") == "float32" else 0.25
            answer = answers[difference["id"]]
            asked = answer.get("prompt_ids") or about[difference["id"]]["prompt_ids"]  # the first: of a later turn
            context = asked + answer["output_ids"][:difference["position"]]
            measured.add_probe(key, probe_difference(url, bench.endpoints.headers, context, difference["tokens"],
                                                     near_tie))
