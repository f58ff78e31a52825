"""A chart as inline SVG for a page, its colours the page's own (light or dark), its names escaped.

Small enough to be read on a phone without zooming: 400 units wide, letters of 12. All names are foreign text.
"""
from __future__ import annotations

import html
import math

from eagle3.charts import COLOURS, COLOURS_ON_DARK, Chart, Point, Series, label, named, reach, steps_to

WIDTH, HEIGHT, LETTER = 400, 250, 6.6  # LETTER: how wide one is, at 12
TOP, RIGHT, BOTTOM = 12, 14, 42  # around the curves
BAR, GAP = 13, 9  # of bars: the height of one, the room between groups
MARKS = ("M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z", "M-4,-4h8v8h-8z", "M0,-5l5,9h-10z", "M0,-6l5,6l-5,6l-5,-6z",
         "M0,5l5,-9h-10z", "M-5,-1.7h3.3v-3.3h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3z", "M-5,-2h10v4h-10z")
STYLE = """
:root{%s}
@media (prefers-color-scheme:dark){:root{%s}}
svg text{fill:var(--ink);font-size:12px}
svg .axis{stroke:var(--faint);stroke-width:1}
svg .line{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:6 4}
svg .small{fill:var(--quiet)}
svg .curve{fill:none;stroke-width:2;stroke:var(--c)}
svg .dotted{stroke-dasharray:2 4}
svg .mark{fill:var(--c);stroke:none}
svg .hollow{fill:var(--paper);stroke:var(--c);stroke-width:1.5}
svg .reach{stroke:var(--c);stroke-width:1.5}
""" % tuple("".join(f"--c{n}:{colour};" for n, colour in enumerate(of)) for of in (COLOURS, COLOURS_ON_DARK)) + "".join(
    f".c{n}{{--c:var(--c{n})}}\n" for n in range(len(COLOURS)))


def escaped(text: object, most: int | None = None) -> str:
    """Foreign text for a page: no secrets, no control signs, no markup."""
    return html.escape(label(text, most))


def figure(chart: Chart) -> str:
    """The chart with its title, legend and note. The names of many variants wrap: the browser sets them."""
    signs = [('<path class="mark" d="M-11,-5h22v10h-22z"/>' if chart.bars else
              f'<path class="curve{" dotted" * of.dotted}" d="M-13,0h26"/>{mark(of)}', of.colour, named(of))
             for of in chart.series]
    if chart.line:
        signs.append(('<path class="line" d="M-13,0h26"/>', 0, f"{chart.line[1]}: {chart.form.format(chart.line[0])}"))
    entries = [f'<li class="c{colour}"><svg width="26" height="14" viewBox="-13 -7 26 14" aria-hidden="true">{sign}'
               f"</svg>{escaped(name)}</li>" for sign, colour, name in signs]
    drawn = bars(chart) if chart.bars else curves(chart)
    note = f"<p>{escaped(chart.note)}</p>" if chart.note else ""
    return (f"<figure><figcaption>{escaped(chart.title)}</figcaption>{drawn}"
            f'<ul class="legend">{"".join(entries)}</ul>{note}</figure>')


def frame(chart: Chart, height: float, parts: list[str]) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escaped(chart.title)}">'
            + "".join(parts) + "</svg>")


def mark(of: Series, hollow: bool = False) -> str:
    return f'<path class="{"hollow" if hollow or of.dotted else "mark"}" d="{MARKS[of.colour % len(MARKS)]}"/>'


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "") -> str:
    """words: escaped."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind and f" class={kind!r}"}>{words}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}"/>'


def said(chart: Chart, tick: str, of: Series, at: Point) -> str:
    """What a pointer that rests on it reads."""
    between = f" ({chart.form.format(at.low)} to {chart.form.format(at.high)})" if at.low is not None else ""
    return f"<title>{escaped(f'{tick}, {named(of)}: {chart.form.format(at.value)}{between}')}</title>"


# ---- curves ----
def curves(chart: Chart) -> str:
    top = reach(chart)
    values = steps_to(top)
    axis = [f"{value:,.10g}" for value in values]
    left = 28 + LETTER * max(map(len, axis))
    wide, high = WIDTH - left - RIGHT, HEIGHT - TOP - BOTTOM
    slot = wide / len(chart.ticks)

    def y(value: float) -> float:
        return TOP + high * (1 - max(0.0, min(value / top, 1.0)))

    parts = []
    for value, words in zip(values, axis):
        if value <= top * 1.0001:
            parts += [rule(left, y(value), WIDTH - RIGHT, y(value), "axis"),
                      text(left - 6, y(value) + 4, words, "end", "small")]
    names = [label(tick, 14) for tick in chart.ticks]
    every = math.ceil((max(map(len, names)) + 1.5) * LETTER / slot)
    for n, name in enumerate(names):
        if n % every == 0:
            parts.append(text(left + slot * (n + 0.5), HEIGHT - BOTTOM + 17, html.escape(name), kind="small"))
    parts.append(text(left + wide / 2, HEIGHT - 6, escaped(chart.x)))
    middle = TOP + high / 2
    parts.append(f'<text x="12" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 12 {middle:.1f})">'
                 f"{escaped(chart.y)}</text>")
    if chart.line:
        parts.append(rule(left, y(chart.line[0]), WIDTH - RIGHT, y(chart.line[0]), "line"))
    beside = min(7, slot / (len(chart.series) + 1))  # one series a little beside the other, or intervals hide another's
    for place, of in enumerate(chart.series):
        aside = (place - (len(chart.series) - 1) / 2) * beside
        parts.append(curve(chart, of, [(left + slot * (n + 0.5) + aside, y) for n in range(len(chart.ticks))]))
    return frame(chart, HEIGHT, parts)


def curve(chart: Chart, of: Series, places: list) -> str:
    """places: (x, y of a value) of each tick."""
    at = [(x, y, tick, of.points[tick]) for (x, y), tick in zip(places, chart.ticks) if tick in of.points]
    line = "L".join(f"{x:.1f},{y(point.value):.1f}" for x, y, _, point in at)
    parts = [f'<path class="curve{" dotted" * of.dotted}" d="M{line}"/>'] if len(at) > 1 else []
    for x, y, tick, point in at:
        ends = [] if point.low is None else [
            f"M{x:.1f},{y(point.low):.1f}V{y(point.high):.1f}", *(f"M{x - 4:.1f},{y(end):.1f}h8"
                                                                  for end in (point.low, point.high))]
        parts.append(f'<g>{said(chart, tick, of, point)}<path class="reach" d="{"".join(ends)}"/>'
                     f'<g transform="translate({x:.1f} {y(point.value):.1f})">{mark(of, point.beyond)}</g></g>')
    return f'<g class="c{of.colour}">{"".join(parts)}</g>'


# ---- bars ----
def bars(chart: Chart) -> str:
    """Groups one below the other, the name above its bars: long ones fit a phone as well."""
    top, parts, y = reach(chart), [], 0.0
    wide = WIDTH - 3 - LETTER * (1 + max(len(chart.form.format(at.value))
                                         for of in chart.series for at in of.points.values()))
    for tick in chart.ticks:
        parts.append(text(2, y + 13, escaped(tick, int(WIDTH / LETTER) - 2), "start"))
        y += 18
        above = y
        for of in chart.series:
            if at := of.points.get(tick):
                end = wide * at.value / top
                parts.append(f'<g class="c{of.colour}">{said(chart, tick, of, at)}'
                             f'<rect class="mark" x="2" y="{y:.1f}" width="{end:.1f}" height="{BAR - 2}"/></g>'
                             + text(end + 6, y + BAR - 3, escaped(chart.form.format(at.value)), "start", "small"))
                y += BAR
        if chart.line:  # over the bars, not through the names
            x = 2 + wide * chart.line[0] / top
            parts.append(rule(x, above - 2, x, y, "line"))
        y += GAP
    return frame(chart, y, parts)
