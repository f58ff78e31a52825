"""From which accept_length on speculation pays: step times measured with simulated acceptance, before any training.

At one level and number of draft steps a token takes

    seconds a token = overhead + step / a        a: tokens that a verify step emits

`step` is the time of drafting and verifying once over the streams that share it; it does not hang on what is accepted.
`overhead` is what no step costs: the prefill, and what is done around it. Servers that accept more and less (the
points) give both by a straight line in 1/a. With t seconds a token of plain decoding, speculation pays where
a > step / (t - overhead), and with N steps a is at most N + 1.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable

import numpy as np

from eagle3.contexts import context_tokens
from eagle3.figures import level_figures
from eagle3.report import figures_table, how_measured, markdown_table, number
from eagle3.spec_releases import REAL_DRAFTS_FROM, has

POINT = re.compile(r"steps(\d+)-accept([\d.]+)")  # a variant: draft steps, and tokens a step as asked for
CLOSE = 0.05  # a predicted speed-up that is no further from the measured one


def name_of(steps: int, accept_length: float) -> str:
    return f"steps{steps}-accept{accept_length:g}"


def points_of(steps: int, count: int) -> list[float]:
    """The accept_lengths that are simulated: from nothing right to all right."""
    return [round(float(a), 2) for a in np.linspace(1, steps + 1, count)]


# ---- the line ----
@dataclass(frozen=True)
class Line:
    """Seconds a token against tokens a step. spread: how far, relatively, a point lies from it; None of two points."""
    overhead: float
    step: float
    spread: float | None

    def seconds(self, emitted: float) -> float:
        return self.overhead + self.step / emitted

    def pays_from(self, plain: float) -> float | None:
        """Tokens a step from which on it is faster than `plain` seconds a token; None: never, however many."""
        return self.step / (plain - self.overhead) if plain > self.overhead else None


def emitted(figures: dict) -> float | None:
    """Tokens a verify step emitted, in figures of report.json: accept_length without what lay behind an answer's end.

    The first token of an answer comes from its prefill.
    """
    if not figures["accept"]:
        return None
    begun = sum(figures["finish"].values()) - figures["empty"]
    return (figures["output_tokens"] - begun) / figures["accept"]["verify_steps"]


def line_through(points: list[tuple[float, float]]) -> Line | None:
    """points: (tokens a step, seconds a token). None where they tell no step: too few, or no faster with more."""
    a, seconds = map(np.array, zip(*points)) if points else (np.zeros(0), np.zeros(0))
    if len({round(float(x), 2) for x in a}) < 2:
        return None
    step, overhead = (float(value) for value in np.polyfit(1 / a, seconds, 1))
    if step <= 0:
        return None
    spread = float(np.max(np.abs((overhead + step / a) / seconds - 1))) if len(points) > 2 else None
    return Line(overhead, step, spread)


def share_right(accept_length: float, steps: int) -> float | None:
    """The chance p of a draft to be right, each as the one before, at which 1 + p + ... + p^steps = accept_length."""
    if not 1 <= accept_length <= steps + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        p = (low + high) / 2
        low, high = (p, high) if sum(p ** k for k in range(steps + 1)) < accept_length else (low, p)
    return (low + high) / 2


# ---- of a measurement ----
def places_of(units: list[dict], wanted: Callable[[str], object]) -> dict[tuple, dict[str, list[dict]]]:
    """{(level, context): {variant: its units}} of the variants that are wanted."""
    found: dict[tuple, dict[str, list]] = {}
    for unit in units:
        if wanted(unit["variant"]):
            place = unit["level"], unit.get("context")
            found.setdefault(place, {}).setdefault(unit["variant"], []).append(unit)
    return found


@dataclass(frozen=True)
class Timed:
    """What units say. Both by place, which is (level, context)."""
    lines: dict[tuple, dict[int, Line]]  # by number of steps
    plain: dict[tuple, float]  # seconds a token
    streams: dict[tuple, float]  # requests in flight, on average

    @classmethod
    def of(cls, units: list[dict]) -> Timed:
        lines, plain, streams = {}, {}, {}
        for place, variants in places_of(units, POINT.fullmatch).items():
            points: dict[int, list] = {}
            for variant, of in variants.items():
                figures = level_figures(of)
                if figures["tok_s"] and (a := emitted(figures)):
                    points.setdefault(int(POINT.fullmatch(variant)[1]), []).append((a, 1 / figures["tok_s"]))
            found = {steps: line for steps, of in sorted(points.items()) if (line := line_through(sorted(of)))}
            lines |= {place: found} if found else {}
        for place, variants in places_of(units, "plain".__eq__).items():
            figures = level_figures(variants["plain"])
            if figures["tok_s"]:
                plain[place], streams[place] = 1 / figures["tok_s"], figures["in_flight"]
        return cls({place: lines[place] for place in lines if place in plain}, plain, streams)

    def pays_from(self, place: tuple, steps: int) -> float | None:
        line = self.lines.get(place, {}).get(steps)
        return line.pays_from(self.plain[place]) if line else None

    def speed_up(self, place: tuple, steps: int | None, a: float) -> float | None:
        """Of a drafter that emits so many tokens a step; None where such steps were not timed."""
        line = self.lines.get(place, {}).get(steps)
        return self.plain[place] / line.seconds(a) if line else None


def rows_of(units: list[dict]) -> list[dict]:
    """A row for each level, context and number of steps.

    step_ms: of all that are in flight. pays_from: None for never. at_most: the speed-up if every draft is right.
    between: lowest and highest pays_from of single repeats.
    """
    timed, rows, repeats = Timed.of(units), [], sorted({unit["repeat"] for unit in units})
    each = [Timed.of([unit for unit in units if unit["repeat"] == repeat]) for repeat in repeats if len(repeats) > 1]
    for place, lines in timed.lines.items():
        for steps, line in lines.items():
            needs, most, plain = timed.pays_from(place, steps), steps + 1, timed.plain[place]
            between = [one.pays_from(place, steps) for one in each]
            rows.append({
                "level": place[0], "context": place[1], "steps": steps, "most": most, "needs": needs,
                "step_ms": 1000 * line.step * timed.streams[place], "overhead_share": line.overhead / plain,
                "spread": line.spread, "pays_from": needs if needs and needs <= most else None,
                "share_right": share_right(max(1.0, needs), steps) if needs else None,
                "between": [min(between), max(between)] if between and all(between) else None,
                "at_most": timed.speed_up(place, steps, most)})
    return sorted(rows, key=lambda row: (row["level"], length_of(row["context"]), row["steps"]))


def length_of(context: str | None) -> int:
    return context_tokens(context) if context else 0


def sentence(rows: list[dict]) -> str:
    """About one level's rows: the steps that need the fewest drafts right, or how far the nearest are from paying."""
    paying = [row for row in rows if row["pays_from"]]
    if paying:
        row = min(paying, key=lambda row: row["share_right"])
        right = f", {row['share_right']:.0%} of drafts right" if row["pays_from"] > 1 else " (always)"
        pay = "step pays" if row["steps"] == 1 else "steps pay"
        return (f"{row['steps']} {pay} from accept_length {row['pays_from']:.2f} on{right}; "
                f"at most {max(r['at_most'] for r in paying):.2f}x, if all drafts are right")
    needing = [row for row in rows if row["needs"]]
    if not needing:
        return "never: even a drafter that takes no step's time would be slower"
    row = min(needing, key=lambda row: row["needs"] / row["most"])
    return (f"never: {row['steps']} step{'s' * (row['steps'] > 1)} would need {row['needs']:.2f} of at most "
            f"{row['most']}")


# ---- beside a drafter that was served ----
def served_here(units: list[dict], servers: dict) -> list[dict]:
    """Drafters that were served beside the simulated ones: {"place", "variant", "steps", "emitted", "measured"}."""
    plain, rows = Timed.of(units).plain, []
    for place, variants in places_of(units, lambda name: name != "plain" and not POINT.fullmatch(name)).items():
        for variant, of in variants.items():
            figures = level_figures(of)
            if place in plain and figures["tok_s"]:
                rows.append(served(place, variant, figures, plain[place] * figures["tok_s"], servers))
    return [row for row in rows if row]


def served_before(report: dict) -> list[dict]:
    """The same of a report.json."""
    rows = [served((int(level), None), variant, figures, figures.get("speed_up"), report["servers"])
            for level, row in report["levels"].items() for variant, figures in row.items()]
    return [row for row in rows if row]


def served(place: tuple, variant: str, figures: dict, speed_up: float | None, servers: dict) -> dict | None:
    """A row of the two above; None of what is no chain of drafts."""
    server, a = servers.get(variant) or {}, emitted(figures)
    if not speed_up or not a or server.get("speculative_eagle_topk") != 1:
        return None
    return {"place": place, "variant": variant, "steps": server.get("speculative_num_steps"), "emitted": a,
            "measured": speed_up}


def compared(timed: Timed, rows: list[dict], where: str) -> list[dict]:
    """Predicted and measured speed-up of served drafters, at places and steps that were timed."""
    found = []
    for row in rows:
        if predicted := timed.speed_up(row["place"], row["steps"], row["emitted"]):
            found.append({"where": where, "level": row["place"][0], "context": row["place"][1], **row,
                          "predicted": predicted, "ratio": predicted / row["measured"]})
    return found


def check_sentence(rows: list[dict]) -> str:
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    off = abs(worst["ratio"] - 1)
    held = sum(abs(row["ratio"] - 1) <= CLOSE for row in rows)
    return (f"{held} of {len(rows)} predicted speed-ups within {CLOSE:.0%} of the measured ones; the furthest is "
            f"{off:.1%} off ({worst['predicted']:.2f}x predicted, {worst['measured']:.2f}x measured at "
            f"{where_of(worst['level'], worst['context'])})")


def expected(timed: Timed, prediction: dict | None) -> list[tuple[str, float]]:
    """[(where, speed-up)] of a drafter by training's prediction (eagle3.json), where its steps were timed."""
    steps, a = (prediction or {}).get("num_steps"), (prediction or {}).get("accept_length")
    return [(where_of(*place), speed) for place in sorted(timed.lines, key=str)
            if a and (speed := timed.speed_up(place, steps, a))]


def where_of(level: int, context: str | None) -> str:
    return f"{level} streams" + (f" and {context} of context" if context else "")


def token_note(version: str | None) -> str | None:
    """What the accepted tokens of this release make different."""
    if has(version, REAL_DRAFTS_FROM):
        return None
    return (f"SGLang {version} simulates with one token for all (from {REAL_DRAFTS_FROM} on with the drafter's own): a "
            "mixture-of-experts target then reads fewer experts a step than in service, and looks faster than it is")


# ---- the report ----
def added(report: dict, units: list[dict], predictions: dict[str, dict | None],
          others: dict[str, dict]) -> None:
    """Makes a report of simulated servers say what they tell. units: raw.jsonl's; others: {where: report.json}.

    Their texts are what the drafter made up and their speed-ups are nobody's: neither is left in it.
    """
    timed, rows = Timed.of(units), rows_of(units)
    version = next((info["version"] for info in report["servers"].values()), None)
    checks = compared(timed, served_here(units, report["servers"]), "here")
    checks += [row for where, other in others.items() for row in compared(timed, served_before(other), where)]
    report["break_even"] = {
        "rows": rows, "checks": checks, "note": token_note(version),
        "expected": {name: of for name, about in predictions.items() if (of := expected(timed, about))}}
    report["verdict"] = {level: verdict([row for row in rows if str(row["level"]) == level])
                         for level in report["levels"]}
    report["variants"] = {name: about for name, about in report["variants"].items() if not POINT.fullmatch(name)}
    report |= {key: {} for key in ("rates", "contexts", "groups", "drafters")}
    for row in report["levels"].values():
        for name, figures in row.items():
            figures.pop("same_text", None)
            if POINT.fullmatch(name):
                figures |= {"speed_up": None, "interval": None}


def verdict(rows: list[dict]) -> str:
    """About one level: a sentence, or one for each context."""
    contexts = dict.fromkeys(row["context"] for row in rows)
    said = {context: sentence([row for row in rows if row["context"] == context]) for context in contexts}
    return "; ".join(f"{context}: {of}" if context else of for context, of in said.items()) or "not measured yet"


def table(report: dict) -> str:
    rows = [["streams", "context", "draft steps", "step ms", "pays from accept_length", "between repeats", "of at most",
             "drafts right", "speed-up at most"]]
    for row in report["break_even"]["rows"]:
        never = "never" + (f" ({row['needs']:.2f})" if row["needs"] else "")
        between, right = row["between"], row["share_right"]
        rows.append([str(row["level"]), row["context"] or "-", str(row["steps"]), f"{row['step_ms']:.2f}",
                     number(row["pays_from"]) if row["pays_from"] else never,
                     f"{between[0]:.2f}-{between[1]:.2f}" if between else "-", str(row["most"]),
                     number(right, "{:.0%}") if row["pays_from"] else "-", f"{row['at_most']:.2f}x"])
    return markdown_table(rows)


def check_table(checks: list[dict]) -> str:
    heads = ["streams", "context", "drafter", "steps", "tokens a step", "predicted", "measured", "ratio"]
    return markdown_table([heads] + [
        [str(row["level"]), row["context"] or "-", f"{row['variant']}, {row['where']}", str(row["steps"]),
         f"{row['emitted']:.2f}", f"{row['predicted']:.2f}x", f"{row['measured']:.2f}x", f"{row['ratio']:.3f}"]
        for row in checks])


def remarks(report: dict) -> list[str]:
    """What the table has no room for."""
    found = report["break_even"]
    said = [f"by training's prediction {name} gains " + ", ".join(f"{speed:.2f}x at {where}" for where, speed in of)
            for name, of in found["expected"].items()]
    spreads = [row["spread"] for row in found["rows"] if row["spread"] is not None]
    said += [f"step times are straight lines within {max(spreads):.1%}"] if spreads else []
    said += [found["note"]] if found["note"] else []
    return said + ([check_sentence(found["checks"])] if found["checks"] else [])


def chapters(report: dict) -> list[str]:
    """Lines of report.md: what was found, and beside what was measured."""
    found = report["break_even"]
    out = ["## What speculation needs", "", table(report), "",
           "A drafter with random weights was served, and SGLang's simulated acceptance let so many of its tokens "
           "pass. `step ms`: drafting and verifying once. `pays from`: tokens a verify step must emit to be faster "
           "than plain decoding; with N steps at most N + 1. `drafts right`: the share that gives so many, if each "
           "draft is right as often as the one before. `speed-up at most`: if every draft is right.", "",
           *(f"- {said[0].upper()}{said[1:]}." for said in remarks(report)), ""]
    if found["checks"]:
        out += ["## Predicted beside measured", "", check_table(found["checks"]), ""]
    return out


def markdown(report: dict, plots: list[str]) -> str:
    """report.md."""
    incomplete = [f"**Incomplete: {report['units_done']} of {report['units_planned']} units measured. "
                  "The same command goes on.**", ""] if report["units_done"] < report["units_planned"] else []
    out = ["# From which accept_length on speculation pays", "", *incomplete,
           *(f"- {level} stream(s): {said}" for level, said in report["verdict"].items()), "", *chapters(report)]
    out += ["## All that was measured", "", figures_table(report), "", how_measured(report), "",
            "Answers have from half to all of these tokens: in a simulated batch all are accepted alike, and equal "
            "ones would end together.", ""]
    out += [f"- no {name}: {why}" for name, why in report.get("not_drawn", {}).items()]
    return "\n".join(out + [""] + [f"![{plot.partition('.')[0]}]({plot})" for plot in plots]) + "\n"
