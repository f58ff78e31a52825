"""Figures beside the levels' own: goodput, arrivals at a rate, groups of prompts, lengths of context, drafters.

All of rows of raw.jsonl, as figures.py has them.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable

import numpy as np

from eagle3.bench_prompts import about_requests, contexts_of
from eagle3.figures import (FEWEST_PROMPTS, FEWEST_RUNS, acceptance, answered, interval_over, level_figures, pooled,
                            prompt_of, seconds_of, speed_up)
from eagle3.measured import Measured
from eagle3.report import level_rows

GREW, GREW_BY = 1.6, 4  # a queue: so many times as long in the last quarter as in the second, and by so many requests


# ---- goodput ----
@dataclass(frozen=True)
class Slo:
    """What a request must keep to count: seconds to its first token, seconds a token after that on average."""
    ttft_s: float | None
    itl_s: float | None

    @classmethod
    def of(cls, config: dict) -> Slo | None:
        """Of --slo-ttft-ms and --slo-itl-ms; None without either."""
        ttft, itl = (config.get(f"slo-{name}-ms") for name in ("ttft", "itl"))
        return cls(ttft and ttft / 1000, itl and itl / 1000) if ttft or itl else None

    def kept(self, record: dict) -> bool:
        """By a request; one that failed or brought no token keeps nothing."""
        if "error" in record or not record["completion_tokens"]:
            return False
        first, tokens = record["times_s"][0], record["completion_tokens"]
        each = (record["latency_s"] - first) / (tokens - 1) if tokens > 1 else 0.0
        return first <= (self.ttft_s or np.inf) and each <= (self.itl_s or np.inf)


def goodput(units: list[dict], slo: Slo) -> dict:
    """Requests that kept the SLO: their share of all that were sent, and how many a second."""
    kept, requests = sum(shares_kept(units, slo).values()), sum(len(unit["requests"]) for unit in units)
    return {"share": kept / requests, "requests_s": kept / sum(unit["wall_s"] for unit in units)}


def shares_kept(units: list[dict], slo: Slo) -> dict[tuple, int]:
    """{(repeat, prompt): requests of it that kept the SLO}"""
    found = {}
    for unit in units:
        for record in unit["requests"]:
            key = unit["repeat"], prompt_of(record)
            found[key] = found.get(key, 0) + slo.kept(record)
    return found


def goodput_difference(plain: list[dict], variant: list[dict], slo: Slo) -> dict:
    """Share of `variant` less that of `plain`: {"difference", "interval" (95 %)}, over prompts and runs."""
    shares = [[goodput([unit], slo)["share"] for unit in units] for units in (plain, variant)]
    found = {"difference": goodput(variant, slo)["share"] - goodput(plain, slo)["share"], "interval": None}
    values = np.array(list(by_prompt((plain, variant), lambda record: (slo.kept(record), 1), failed=True).values()))
    if len(values) >= FEWEST_PROMPTS and min(map(len, shares)) >= FEWEST_RUNS:
        low, high = interval_over(values, lambda s: s[2] / s[3] - s[0] / s[1], shares)
        found["interval"] = [max(-1.0, low), min(1.0, high)]
    return found


def by_prompt(sides: Iterable[list[dict]], values: Callable[[dict], tuple], failed: bool = False) -> dict[str, list]:
    """{prompt: sums of `values` over its requests of the one side, then of the other}; prompts that both sides have."""
    sums = []
    for units in sides:
        sums.append({})
        for record in ([r for unit in units for r in unit["requests"]] if failed else answered(units)):
            sums[-1][prompt_of(record)] = sums[-1].get(prompt_of(record), 0) + np.array(values(record), float)
    return {name: [*sums[0][name], *sums[1][name]] for name in sums[0] if name in sums[1]}


# ---- arrivals at a rate ----
def per_request(units: list[dict], ids: set[str] | None = None) -> list[dict]:
    """The same units with the sum of latencies for their wall time: their tok/s is what one stream gets.

    ids: only these requests. Where requests arrive by themselves, the wall time is that of the arrivals.
    """
    found = []
    for unit in units:
        requests = [record for record in unit["requests"] if ids is None or record["id"] in ids]
        spent = sum(record["latency_s"] for record in requests if "error" not in record)
        if spent:
            found.append({**unit, "requests": requests, "wall_s": spent, "watts": None})
    return found


def queue(units: list[dict]) -> dict | None:
    """Requests in flight at the arrivals of the second quarter and of the last, means over the runs; and `grew`.

    A server that takes less than arrives has 2.3 times as many in the last quarter.
    """
    lengths = []
    for unit in units:
        spans = [(r["start_s"], r["start_s"] + seconds_of(r)) for r in unit["requests"] if "due_s" in r]
        if spans:
            seen = [sum(begin <= at < end for begin, end in spans) for at in sorted(begin for begin, _ in spans)]
            quarters = np.array_split(seen, 4) if len(seen) >= 4 else [seen] * 4
            lengths.append([np.mean(quarters[1]), np.mean(quarters[3])])
    if not lengths:
        return None
    second, last = np.mean(lengths, 0)
    return {"second_quarter": float(second), "last_quarter": float(last),
            "grew": bool(last >= GREW * second and last - second >= GREW_BY)}


def arrival_figures(units: list[dict]) -> dict:
    """What only requests that arrive have: the rate that came to be, how late the client sent them, the queue."""
    first = [[record for record in unit["requests"] if "due_s" in record] for unit in units]
    spans = sum(max(record["due_s"] for record in of) for of in first if len(of) > 1)
    gaps = sum(len(of) - 1 for of in first if len(of) > 1)
    late = max((record["start_s"] - record["due_s"] for of in first for record in of), default=0.0)
    return {"offered_s": gaps / spans if spans else None, "late_s": late, "queue": queue(units)}


# ---- groups of prompts ----
def group_rows(of: dict[str, list[dict]], prompts: list[dict]) -> list[dict]:
    """Figures of one level by source, mode of thinking and turn, where that makes more than one group.

    of: {variant: its units}, plain first. tok_s: what one stream gets, prefill included.
    """
    about, groups = about_requests(prompts), {}
    for name, request in about.items():
        groups.setdefault((request["source"], request["thinking"], request["turn"]), set()).add(name)
    rows = []
    for (source, thinking, turn), ids in sorted(groups.items()) if len(groups) > 1 else ():
        parts = {variant: per_request(units, ids) for variant, units in of.items()}
        figures = {}
        for variant, units in parts.items():
            if not units:
                continue
            accept = acceptance(answered(units))
            figures[variant] = {"tok_s": level_figures(units)["tok_s"],
                                "accept_length": accept and accept["accept_length"]}
            if variant != "plain" and parts.get("plain"):
                figures[variant] |= speed_up(parts["plain"], units)
        rows.append({"source": source, "thinking": thinking, "turn": turn, "requests": len(ids), "variants": figures})
    return rows


# ---- several drafters ----
def beside_the_first(of: dict[str, list[dict]], drafters: list[str]) -> dict[str, dict]:
    """{drafter: how it differs from the first one} at one level: speed as `speed_up` has it, and accept_length.

    Of accept_length the difference and its 95 % interval, over the prompts that both answered and over runs.
    """
    first, *others = [name for name in drafters if name in of] or [None]
    found = {}
    for name in others:
        sides = of[first], of[name]
        found[name] = {"against": first, **speed_up(*sides), "accept_difference": None, "accept_interval": None}
        runs = [[accept["accept_length"] for unit in units if (accept := acceptance(answered([unit])))]
                for units in sides]
        whole = [acceptance(answered(units)) for units in sides]
        if not all(whole):
            continue
        found[name]["accept_difference"] = whole[1]["accept_length"] - whole[0]["accept_length"]
        values = np.array(list(by_prompt(sides, counts).values()))
        if len(values) >= FEWEST_PROMPTS and min(map(len, runs)) >= FEWEST_RUNS:
            found[name]["accept_interval"] = interval_over(
                values, lambda s: s[3] / np.maximum(s[2], 1) - s[1] / np.maximum(s[0], 1), runs)
    return found


def counts(record: dict) -> tuple[int, int]:
    """Verify steps and correct drafts."""
    spec = record.get("spec") or {"verify_steps": 0, "correct_drafts": 0}
    return spec["verify_steps"], spec["correct_drafts"]


# ---- the report's part ----
def at_level(units: list[dict], level: int | str, variants: list[str]) -> dict[str, list[dict]]:
    """{variant: its units at a level}, without those that have none."""
    return {name: found for name in variants
            if (found := [unit for unit in units if unit["variant"] == name and unit["level"] == level])}


def add_goodput(rows: dict[str, dict], of: dict[str, list[dict]], slo: Slo | None) -> None:
    """To the figures of one level's variants; of: their units."""
    for name, figures in rows.items() if slo else ():
        figures["goodput"] = goodput(of[name], slo)
        if name != "plain" and "plain" in of:
            figures["goodput"] |= goodput_difference(of["plain"], of[name], slo)


def add_traffic(report: dict, measured: Measured, prompts: list[dict], drafters: list[str],
                with_groups: bool) -> None:
    """To what report.build_report made: "rates", "contexts", "groups", "gpus", "drafters", and goodput by level.

    Also "not_emptied": units whose server kept its cache of prompts, "stood_still": those that were measured again.
    drafters: the variants of --draft-path. Groups are many where sources are: not for a report amid a run.
    """
    contexts, slo, config = contexts_of(prompts), Slo.of(report["config"]), report["config"]
    units = pooled(measured.units, contexts)
    variants = sorted(dict.fromkeys(unit["variant"] for unit in measured.units), key=lambda name: name != "plain")
    steps = {name: measured.servers.get(name, {}).get("speculative_num_steps") or 0 for name in variants}

    def rows(units: list[dict]) -> dict[str, dict]:
        found = {}
        for level in sorted_levels(units):
            of, rate = at_level(units, level, variants), isinstance(level, str)
            found[str(level)] = level_rows(of, steps, measured.probes, config, per_request if rate else None)
            for name, figures in found[str(level)].items() if rate else ():
                figures |= arrival_figures(of[name])
            add_goodput(found[str(level)], of, slo)
        return found

    for level, row in report["levels"].items():
        add_goodput(row, at_level(units, int(level), variants), slo)
    report |= {
        "rates": rows([unit for unit in units if isinstance(unit["level"], str)]),
        "contexts": {context: {"levels": rows([unit for unit in measured.units if unit.get("context") == context])}
                     for context in contexts if context},
        "groups": {}, "drafters": {}, "gpus": gpu_report(measured.units),
        "not_emptied": sum(unit.get("emptied") is False for unit in measured.units),
        "stood_still": sum("first_try" in unit for unit in measured.units)}
    for level in sorted_levels(units):
        of = at_level(units, level, variants)
        if with_groups and (groups := group_rows(of, prompts)):
            report["groups"][str(level)] = groups
        if len(drafters) > 1:
            of = {name: per_request(found) for name, found in of.items()} if isinstance(level, str) else of
            report["drafters"][str(level)] = beside_the_first(of, drafters)


def sorted_levels(units: list[dict]) -> list[int | str]:
    """Streams, then rates, each from the lowest."""
    return sorted(dict.fromkeys(unit["level"] for unit in units),
                  key=lambda level: (isinstance(level, str), level if isinstance(level, int) else float(level[:-2])))


def gpu_report(units: list[dict]) -> dict | None:
    """The GPUs that served: what they are, the power limits and clocks that were seen right after units, by variant.

    None where they are not this machine's.
    """
    seen = [(unit["variant"], gpu) for unit in units for gpu in unit.get("gpus") or ()]
    if not seen:
        return None

    def values(key: str, variant: str | None = None) -> list:
        return sorted({gpu[key] for name, gpu in seen if gpu[key] is not None and variant in (None, name)})

    clocks = {variant: float(np.mean(of)) for variant in dict.fromkeys(name for name, _ in seen)
              if (of := [gpu["sm_mhz"] for name, gpu in seen if name == variant and gpu["sm_mhz"] is not None])}
    return {"names": values("name"), "count": max(len(unit.get("gpus") or ()) for unit in units),
            "power_limit_w": values("power_limit_w"), "max_sm_mhz": values("max_sm_mhz"), "sm_mhz": clocks,
            "temperature_c": values("temperature_c")[-1:],
            "held_back_by": sorted({why for _, gpu in seen for why in gpu["held_back_by"]})}
