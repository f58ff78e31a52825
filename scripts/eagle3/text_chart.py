"""The pictures of a report for a terminal: at most 100 columns, plain ASCII where the terminal knows no more."""
from __future__ import annotations

import shutil
import unicodedata
from typing import TextIO

from eagle3.charts import Chart, Point, Series, charts, extent, label, named

WIDEST, NARROWEST = 100, 60  # columns
LONGEST_NAME, MOST_ROWS = 26, 16
DRAWN = ("tok_s", "speed_up", "acceptance")
# a value, the ends of its interval, what lies between them, the way to the value, the line to compare with, cut
SIGNS = {"unicode": "●├┤─━│…", "ascii": "o[]-=|~"}


def signs_for(stream: TextIO) -> str:
    try:
        SIGNS["unicode"].encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return SIGNS["ascii"]
    return SIGNS["unicode"]


def text_charts(report: dict, stream: TextIO) -> str:
    """What a reader of `stream` can read: over levels and by draft position; "" where there is nothing to show."""
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    signs = signs_for(stream)
    drawn = [text_chart(chart, signs, width) for chart in charts(report) if chart.name in DRAWN]
    return "\n\n".join(drawn)


def text_chart(chart: Chart, signs: str, width: int) -> str:
    """One row a value: its tick, its series, the value, and where it lies between 0 and the end of the longest row."""
    shown, note = rows_of(chart)
    rows = [(cell(label(tick, 14), 14, signs), cell(named(of, LONGEST_NAME), LONGEST_NAME, signs),
             chart.form.format(of.points[tick].value), of.points[tick]) for tick, of in shown]
    first = max(columns(text) for text in [chart.x, *(row[0] for row in rows)])
    second, third = (max(columns(row[n]) for row in rows) for n in (1, 2))
    second = max(second, columns(chart.y) - third - 2)
    room, top = width - first - second - third - 6, extent(chart)
    lines = [title(chart, signs), pad(chart.x, first, True) + pad(chart.y, second + third + 4, True)
             + "  0" + chart.form.format(top).rjust(room - 1)]
    before = None
    for tick, name, value, at in rows:
        cells = [pad("" if tick == before else tick, first, True), pad(name, second, False), pad(value, third, True)]
        lines.append(("  ".join(cells) + "  " + drawn(chart, at, top, room, signs)).rstrip())
        before = tick
    return "\n".join([*lines, *filter(None, [note])])


def rows_of(chart: Chart) -> tuple[list[tuple[str, Series]], str]:
    """(tick, series) of each row and what was left out: of many plain and the highest at some of the ticks."""
    each = {tick: [of for of in chart.series if tick in of.points] for tick in chart.ticks}
    if sum(map(len, each.values())) <= MOST_ROWS:
        return [(tick, of) for tick, found in each.items() for of in found], ""
    for tick, found in each.items():
        rivals = sorted((of for of in found if of.colour and not of.dotted), key=lambda of: -of.points[tick].value)
        each[tick] = [of for of in found if not of.colour] + rivals[:1]
    ticks = [tick for tick, found in each.items() if found]
    every = -(-sum(map(len, each.values())) // MOST_ROWS)
    kept = ticks[::every]
    return [(tick, of) for tick in kept for of in each[tick]], "the highest ones; all are in report.html"


def title(chart: Chart, signs: str) -> str:
    at, low, high, between, _, line, _ = signs
    ranged = any(point.low is not None for of in chart.series for point in of.points.values())
    meaning = chart.note.split(".")[0].removeprefix("Bars: ")
    key = [f"{low}{between}{at}{between}{high} {meaning}"] if ranged and meaning else []
    key += [f"{line} {chart.form.format(chart.line[0])} {chart.line[1]}"] if chart.line else []
    return chart.title + (f"   {', '.join(key)}" if key else "")


def drawn(chart: Chart, at: Point, top: float, room: int, signs: str) -> str:
    value, low, high, between, way, line, _ = signs

    def place(number: float) -> int:
        return max(0, min(room - 1, round(number / top * (room - 1))))

    cells = [" "] * room
    if chart.line:
        cells[place(chart.line[0])] = line
    else:
        cells[:place(at.value)] = way * place(at.value)
    if at.low is not None and place(at.low) < place(at.high):
        first, last = place(at.low), place(at.high)
        cells[first:last + 1] = low + between * (last - first - 1) + high
    cells[place(at.value)] = value
    return "".join(cells)


# ---- cells ----
def columns(text: str) -> int:
    """What it takes on a terminal: signs of Chinese two each, accents none."""
    return sum(0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
               for sign in text)


def pad(text: str, wide: int, right: bool) -> str:
    room = " " * (wide - columns(text))
    return room + text if right else text + room


def cell(text: str, most: int, signs: str) -> str:
    """A name as the terminal can show it."""
    if signs == SIGNS["ascii"]:
        text = text.replace("…", signs[-1]).encode("ascii", "replace").decode()
    while columns(text) > most:
        text = text[:-1]
    return text
