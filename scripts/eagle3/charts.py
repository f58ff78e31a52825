"""What the pictures of a benchmark's report show, as data: for PNGs, inline SVG and a terminal alike.

A picture is drawn of what a report holds; what it does not hold is left out, and nothing is drawn of nothing.
"""
from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Iterable

from eagle3.masking import clean

MOST_LINES, MOST_BARS = 7, 4  # variants in one picture; more cannot be told apart
MOST_GROUPS = 24  # sources
EVEN = 1.0, "break-even"
# of the variants, plain first; told apart by the colour-blind as well (after Okabe and Ito)
COLOURS = ("#6b6b6b", "#0072b2", "#d55e00", "#009e73", "#a8508a", "#b07d00", "#2b9bd6")
COLOURS_ON_DARK = ("#a9a9a9", "#56b0f0", "#ff8c4d", "#35cfa0", "#e79ccb", "#f0bb4b", "#a7d8f7")


@dataclass(frozen=True)
class Point:
    value: float
    low: float | None = None  # of its interval
    high: float | None = None
    beyond: bool = False  # out of reach


@dataclass(frozen=True)
class Series:
    name: str
    points: dict[str, Point]  # by tick
    colour: int = 0  # of COLOURS
    dotted: bool = False  # predicted, not measured


@dataclass(frozen=True)
class Chart:
    """ticks: what stands along the x axis, in order, evenly spaced; of `bars` the groups, one below the other."""
    name: str  # of its file, without a suffix
    title: str
    x: str
    y: str
    ticks: list[str]
    series: list[Series]
    form: str = "{:.2f}"  # of a value
    line: tuple[float, str] | None = None  # a value to compare with, and what it means
    bars: bool = False
    top: float | None = None  # of the y axis; None: what the values need
    note: str = ""


# ---- names and numbers ----
def label(text: object, most: int | None = None) -> str:
    """Foreign text as one line without secrets and control signs, of at most so many signs: its middle goes first."""
    line = "".join(sign if sign.isprintable() else sign.encode("unicode_escape", "backslashreplace").decode()
                   for sign in clean(str(text)))
    if most is None or len(line) <= most:
        return line
    tail = (most - 1) // 3
    return line[:most - 1 - tail] + "…" + line[len(line) - tail:]


def named(of: Series, most: int | None = None) -> str:
    """The series' name as text of at most so many signs."""
    more = ", predicted" * of.dotted
    return label(of.name, most and most - len(more)) + more


def finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def point(value: object, interval: object = None) -> Point | None:
    """None where there is no number; an interval that does not hold the value is widened to it."""
    if not finite(value):
        return None
    bounds = list(interval) if isinstance(interval, (list, tuple)) else []
    if len(bounds) != 2 or not all(map(finite, bounds)):
        return Point(value)
    return Point(value, min(bounds[0], value), max(bounds[1], value))


def extent(chart: Chart) -> float:
    """Just above all that is shown: the line to compare with is no edge."""
    points = [at for of in chart.series for at in of.points.values()]
    values = max([*(at.value for at in points), chart.line[0] if chart.line else 0])
    # one interval that knows nothing would press all the rest together: such a one is cut
    most = max([values, *(min(at.high, 2.5 * values) for at in points if at.high is not None)])
    return chart.top or most * 1.04 or 1.0


def reach(chart: Chart) -> float:
    """The upper end of the values' axis, a round number."""
    return chart.top or steps_to(extent(chart))[-1]


def steps_to(most: float) -> list[float]:
    """Round numbers from 0 to `most` (above 0) or beyond it, five steps at the most."""
    raw = most / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * (1 - 1e-9))
    return [step * n for n in range(math.ceil(most / step - 1e-9) + 1)]


# ---- which variants ----
def rows_of(report: dict) -> dict[str, dict[str, dict]]:
    """{level: {variant: figures}}"""
    return {level: tables_in(row) for level, row in tables_in(report.get("levels")).items()}


def about_variants(report: dict) -> dict[str, dict]:
    """{variant: its acceptance}"""
    return tables_in(report.get("variants"))


def tables_in(value: object) -> dict[str, dict]:
    """Of what should be a table of tables all that is one: a report of another version may hold something else."""
    return {key: inner for key, inner in value.items() if isinstance(inner, dict)} if isinstance(value, dict) else {}


def variants_of(report: dict) -> list[str]:
    """plain first."""
    names = dict.fromkeys(name for row in rows_of(report).values() for name in row)
    return sorted(names, key=lambda name: name != "plain")


def chosen(report: dict, most: int) -> dict[str, int]:
    """{variant: its colour}: all, or where there are too many plain and those that are fastest at some level."""
    names, wins = variants_of(report), {}
    for row in rows_of(report).values():
        spoken = [name for name in row if name != "plain" and finite(row[name].get("tok_s"))]
        for place, name in enumerate(sorted(spoken, key=lambda name: -row[name]["tok_s"])):
            wins[name] = min(place, wins.get(name, place))
    if len(names) - ("plain" in names) > most - 1:
        rest = sorted((name for name in names if name != "plain"), key=lambda name: wins.get(name, len(names)))
        kept = {*rest[:most - 1], "plain"}
        names = [name for name in names if name in kept]
    return {name: 0 if name == "plain" else number for number, name in enumerate(names, "plain" not in names)}


def omitted(names: Iterable[str], shown: Iterable[str], what: str) -> str:
    missing = len(set(names) - set(shown))
    plural = "s" * (missing > 1 and not what.endswith("s"))
    return f"{missing} more {what}{plural} in the tables." if missing else ""


# ---- the pictures ----
def over(rows: dict[str, dict[str, dict]], names: dict[str, int], value: str, interval: str) -> list[Series]:
    """A series for each variant. rows: {tick: {variant: figures}}; names: {variant: its colour}."""
    series = []
    for name, colour in names.items():
        each = {tick: point(row[name].get(value), row[name].get(interval)) for tick, row in rows.items() if name in row}
        if points := {tick: at for tick, at in each.items() if at}:
            series.append(Series(name, points, colour))
    return series


def note_of(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def meaning_of(series: list[Series], meaning: str = "95 % interval") -> str:
    return f"Bars: {meaning}." if any(at.low is not None for of in series for at in of.points.values()) else ""


def not_held(rows: dict[str, dict[str, dict]]) -> str:
    levels = [level for level, row in rows.items() if any(of.get("held") is False for of in row.values())]
    return f"Fewer streams in flight than asked for: {', '.join(levels)}." if levels else ""


def tok_s(report: dict) -> Chart | None:
    rows = rows_of(report)
    series = over(rows, chosen(report, MOST_LINES), "tok_s", "tok_s_interval")
    if not series:
        return None
    meaning = meaning_of(series)
    if not meaning:
        series = [Series(of.name, {level: spread(at, rows[level][of.name]) for level, at in of.points.items()},
                         of.colour) for of in series]
        meaning = meaning_of(series, "the slowest and the fastest run")
    note = note_of(meaning, not_held(rows), omitted(variants_of(report), [of.name for of in series], "variant"))
    return Chart("tok_s", "Output tokens a second", "streams", "tok/s", list(rows), series, "{:,.1f}", note=note)


def spread(at: Point, figures: dict) -> Point:
    """With the range of its runs, where there are several."""
    runs = [run for run in figures.get("tok_s_repeats") or () if finite(run)]
    return point(at.value, [min(runs), max(runs)]) if len(runs) > 1 else at


def speed_up(report: dict) -> Chart | None:
    rows, rivals = rows_of(report), [name for name in variants_of(report) if name != "plain"]
    series = over(rows, chosen(report, MOST_LINES), "speed_up", "interval")
    if not series:
        return None
    note = note_of(meaning_of(series), not_held(rows), omitted(rivals, [of.name for of in series], "variant"))
    return Chart("speed_up", "Speed-up over plain decoding", "streams", "times plain tok/s", list(rows), series,
                 "{:.2f}x", line=EVEN, note=note)


def rates(report: dict) -> Chart | None:
    """Requests that arrive by themselves."""
    rows = {rate: tables_in(row) for rate, row in tables_in(report.get("rates")).items()}
    series = over(rows, chosen({"levels": rows}, MOST_LINES), "speed_up", "interval")
    if not series:
        return None
    return Chart("rates", "Speed-up of a request, by requests that arrive", "requests a second",
                 "times plain tok/s", list(rows), series, "{:.2f}x", line=EVEN, note=meaning_of(series))


def goodput(report: dict) -> Chart | None:
    """At levels and rates alike."""
    rows = {**rows_of(report), **{rate: tables_in(row) for rate, row in tables_in(report.get("rates")).items()}}
    shares = {tick: {name: of["goodput"] for name, of in row.items() if isinstance(of.get("goodput"), dict)}
              for tick, row in rows.items()}
    series = over(shares, chosen({"levels": rows}, MOST_LINES), "share", "")
    if not series:
        return None
    return Chart("goodput", "Requests that kept the limits on their times", "streams, or requests a second",
                 "share of requests", [tick for tick, row in shares.items() if row], series, "{:.0%}", top=1.0)


def contexts(report: dict) -> Chart | None:
    """Of prompts padded to each length, a series for each variant and level."""
    found = {name: {level: tables_in(row) for level, row in tables_in(of.get("levels")).items()}
             for name, of in tables_in(report.get("contexts")).items()}
    levels, series = list(dict.fromkeys(level for rows in found.values() for level in rows)), []
    for level in levels:
        rows = {name: of[level] for name, of in found.items() if level in of}
        for of in over(rows, chosen({"levels": rows}, MOST_LINES), "speed_up", "interval"):
            name = f"{of.name}, {level}" + " streams" * level.isdigit() if len(levels) > 1 else of.name
            series.append(Series(name, of.points, 1 + len(series)))
    shown = series[:MOST_LINES - 1]
    if not shown:
        return None
    return Chart("contexts", "Speed-up by length of the context", "tokens of context", "times plain tok/s", list(found),
                 shown, "{:.2f}x", line=EVEN,
                 note=note_of(meaning_of(shown), omitted(range(len(series)), range(len(shown)), "series")))


def break_even(report: dict) -> Chart | None:
    """accept_length from which on speculation pays, simulated; and those that were served beside it."""
    told = report.get("break_even") if isinstance(report.get("break_even"), dict) else {}
    rows = [row for row in told.get("rows") or () if isinstance(row, dict)]
    places = {(level, context): f"{level}, {context}" if context else str(level)
              for level, context in ((row.get("level"), row.get("context")) for row in rows)}
    most, series = max([row["most"] for row in rows if finite(row.get("most"))], default=1), []
    for steps in dict.fromkeys(row.get("steps") for row in rows):
        points = {places[row.get("level"), row.get("context")]: Point(row["needs"], beyond=row.get("pays_from") is None)
                  for row in rows if row.get("steps") == steps and finite(row.get("needs")) and row["needs"] < 2 * most}
        if points:
            series.append(Series(f"{steps} step{'s' * (steps != 1)}", points, 1 + len(series)))
    shown = series[:MOST_LINES - 2]
    for name, points in served(told.get("checks"), places).items():
        shown.append(Series(name, points, 1 + len(shown)))
    shown = shown[:MOST_LINES - 1]
    if not shown:
        return None
    beyond = any(at.beyond for of in shown for at in of.points.values())
    return Chart("break_even", "From which accept_length on speculation pays", "streams", "accept_length",
                 list(places.values()), shown, line=(1.0, "no draft right"),
                 note="Hollow: more than so many steps can give." * beyond)


def served(checks: object, places: dict[tuple, str]) -> dict[str, dict[str, Point]]:
    """{drafter: what it emitted at each place} of those that were served beside the simulated ones."""
    found = {}
    for row in checks if isinstance(checks, list) else ():
        place = places.get((row.get("level"), row.get("context")))
        if place and finite(row.get("emitted")):
            found.setdefault(f"{row.get('variant')}, served", {})[place] = Point(row["emitted"])
    return found


def acceptance(report: dict) -> Chart | None:
    """By draft position, served and predicted."""
    series, found = [], about_variants(report)
    for name, colour in chosen(report, MOST_LINES).items():
        about = found.get(name, {})
        served = (about.get("accept") or {}).get("accept_by_position")
        predicted = served and (about.get("prediction") or {}).get("predicted_by_position")
        for shares, dotted in ((served, False), (predicted, True)):
            points = {str(n): point(share) for n, share in enumerate(shares or (), 1) if finite(share)}
            if points:
                series.append(Series(name, points, colour, dotted))
    if not series:
        return None
    most = max(int(tick) for of in series for tick in of.points)
    return Chart("acceptance", "Drafts right up to each position", "draft position", "share of verify steps",
                 [str(n) for n in range(1, most + 1)], series, top=1.0,
                 note=omitted(found, [of.name for of in series], "variant"))


def grouped(report: dict, key: str, title: str, x: str) -> Chart | None:
    """accept_length of each group."""
    found, series = about_variants(report), []
    for name, colour in chosen(report, MOST_BARS + 1).items():
        groups = tables_in(found.get(name, {}).get(key))
        points = {group: at for group, accept in groups.items() if (at := point(accept.get("accept_length")))}
        if points:
            series.append(Series(name, points, colour))
    if not series or len(series) == 1 and len(series[0].points) == 1:  # one bar says nothing that the tables do not
        return None
    # in the order of the variant that has most of them
    ticks = list(dict.fromkeys(tick for of in sorted(series, key=lambda of: -len(of.points)) for tick in of.points))
    notes = [omitted(ticks, ticks[:MOST_GROUPS], "group"), omitted(found, [of.name for of in series], "variant")]
    return Chart(key, title, x, "accept_length", ticks[:MOST_GROUPS], series, line=(1.0, "no draft right"), bars=True,
                 note=" ".join(filter(None, notes)))


def by_source(report: dict) -> Chart | None:
    return grouped(report, "by_source", "Acceptance by source of the prompts", "source")


def by_context(report: dict) -> Chart | None:
    return grouped(report, "by_context", "Acceptance by context at the end of an answer", "tokens of context")


CHARTS = {"tok_s": tok_s, "speed_up": speed_up, "rates": rates, "goodput": goodput, "contexts": contexts,
          "break_even": break_even, "acceptance": acceptance, "by_source": by_source, "by_context": by_context}


def charts(report: dict) -> list[Chart]:
    """All that have something to show. One that cannot be described costs itself alone; plots.draw_plots says why."""
    found = []
    for describe in CHARTS.values():
        with contextlib.suppress(Exception):
            found.append(describe(report))
    return [chart for chart in found if chart]
