"""What 05 adds to a run's plan: how long its units take, one after the other.

A unit is all prompts once, at one level (streams, or arrivals a second) and one length of --context. Counted as if one
request were answered at a time, so more than it takes; not counted: server starts, 05's --sweep, --thinking on off,
more than one drafter.
"""
from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from eagle3.bench_flags import SHORT, WARM_UP
from eagle3.contexts import context_tokens
from eagle3.stage import UserError

SEVERAL = ("bench_rates", "bench_contexts")  # settings that are lists


@dataclass(frozen=True)
class Units:
    """Of one variant in one repeat."""
    count: int
    what: str
    seconds: float  # each


def add_bench_flags(add) -> None:
    add("--bench-prompts", type=int, default=54)
    add("--bench-levels", type=int, default=3, help="how many numbers of streams")
    add("--bench-rates", type=float, nargs="+", default=[], metavar="R", help="05's --request-rate")
    add("--bench-contexts", nargs="+", default=[], metavar="N", help="05's --context, as 8k")
    add("--bench-turns", type=int, default=1, help="05's --turns, of every prompt")
    add("--bench-tokens", type=int, default=512)
    add("--bench-repeats", type=int, default=2)


def bench_settings(section: dict) -> dict:
    """Those flags, as a run file's `benchmark` has them. Raises TypeError, ValueError."""
    levels = section.get("concurrency", [1, 8, 64])
    return {"bench_prompts": section.get("limit"), "bench_tokens": section.get("max-tokens"),
            "bench_levels": len(levels) if isinstance(levels, list) else 1, "bench_turns": section.get("turns"),
            "bench_rates": [float(rate) for rate in listed(section.get("request-rate"))],
            "bench_contexts": [str(length) for length in listed(section.get("context"))],
            "bench_repeats": section.get("repeats")}


def listed(value: object) -> list:
    """What a run file may also have as one value, or not at all."""
    return value if isinstance(value, list) else [] if value is None else [value]


def check_bench(a: argparse.Namespace) -> None:
    """Raises UserError."""
    numbers = (a.bench_prompts, a.bench_levels, a.bench_turns, a.bench_tokens, a.bench_repeats, *a.bench_rates)
    if not all(0 < number < math.inf for number in numbers):
        raise UserError("--bench-prompts, --bench-levels, --bench-rates, --bench-turns, --bench-tokens and "
                        "--bench-repeats must be above 0.")
    for length in a.bench_contexts:
        try:
            context_tokens(length)
        except ValueError:
            raise UserError(f"--bench-contexts: {length!r:.40} is no number of tokens, as in 8192 or 8k.") from None


def units(a: argparse.Namespace) -> list[Units]:
    """a: the settings, with mean_length, prompt_share, extract_rate and stream_rate; its prompts are read as 03's are.

    At a rate the last prompt comes when 05 says (its number / rate), and its answer is awaited.
    """
    found = []
    for length in a.bench_contexts or [None]:
        reading = (context_tokens(length) if length else a.mean_length * a.prompt_share) / a.extract_rate[0]
        prompt = a.bench_turns * (reading + a.bench_tokens / a.stream_rate)
        warm_up = min(WARM_UP, a.bench_prompts) * (reading + min(SHORT, a.bench_tokens) / a.stream_rate)
        whole, at = a.bench_prompts * prompt, f" of {length}" if length else ""
        found.append(Units(a.bench_levels, f"levels{at}", warm_up + whole))
        found += [Units(1, f"at {rate:g}/s{at}", warm_up + max(whole, a.bench_prompts / rate + prompt))
                  for rate in a.bench_rates]
    return found


def counted(a: argparse.Namespace) -> str:
    """How, in words."""
    prompts = " or ".join(a.bench_contexts) or f"{a.mean_length * a.prompt_share:,.0f}"
    turns = f"{a.bench_turns} turns of " if a.bench_turns > 1 else ""
    return (f"a unit: {a.bench_prompts:,} prompts x {turns}({prompts} tokens read at 03's {a.extract_rate[0]:,.0f} "
            f"tok/s + {a.bench_tokens:,} / {a.stream_rate:,.0f} tok/s), as if one stream at a time"
            + (", or as they arrive" if a.bench_rates else "") + f"; and {WARM_UP} short answers")
