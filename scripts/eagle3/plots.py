"""The pictures of a benchmark's report as PNGs, where matplotlib works; each where it has something to show."""
from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

from eagle3.charts import CHARTS, COLOURS, Chart, Series, label, named, reach, steps_to

MARKERS = "os^DvPX"
LONGEST = 34  # letters of a name


def pyplot():
    """matplotlib.pyplot, drawing into files. Raises whatever a broken installation does."""
    import matplotlib  # here: it takes a second to import
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def why_not(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def no_plots() -> str | None:
    """Why nothing can be drawn here; None where matplotlib works."""
    try:
        pyplot()
    except Exception as error:  # an installation can be broken in any way, and a report needs no pictures
        return why_not(error)
    return None


def draw_plots(report: dict, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Draws <chart>.png of every chart of charts.CHARTS.

    Returns the names of those that had something to show, and {name: why} of those that failed: a report does not
    hang on its pictures.
    """
    drawn, failed = [], {}
    for name, describe in CHARTS.items():
        path = folder / f"{name}.png"
        try:
            chart = describe(report)
            if chart:
                plt = pyplot()
                figure = draw(plt, chart)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of signs that no font here has: a box stands for them
                    figure.savefig(path, dpi=120)
                plt.close(figure)
                drawn.append(path.name)
        except Exception as error:  # also a full disk, a font cache that cannot be written
            failed[path.name] = why_not(error)
            with contextlib.suppress(OSError):
                path.unlink()  # half of a picture
    return drawn, failed


def plain_text(line: str) -> str:
    """Foreign text, which matplotlib would read as a formula from its dollar on."""
    return line.replace("$", r"\$")


def ticks_of(chart: Chart) -> list[str]:
    return [plain_text(label(tick, LONGEST)) for tick in chart.ticks]


def draw(plt, chart: Chart):
    """The figure of one chart, its legend below the curves."""
    rows = len(chart.ticks) * (len(chart.series) + 1) if chart.bars else 0
    columns = 1 if max(len(named(of, LONGEST)) for of in chart.series) > 24 else 2 if len(chart.series) > 2 else 3
    entries = -(-(len(chart.series) + bool(chart.line)) // columns)
    height = (1.1 + 0.16 * rows if chart.bars else 3.3) + 0.24 * entries
    figure, axis = plt.subplots(figsize=(6.4, height + 0.2 * bool(chart.note)), layout="constrained")
    (draw_bars if chart.bars else draw_curves)(axis, chart)
    axis.set_title(chart.title, loc="left", fontsize="medium")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize="small", title=chart.note or None,
                  title_fontsize="x-small")
    return figure


def named_line(chart: Chart) -> dict:
    value, meaning = chart.line
    return {"color": "black", "linestyle": "--", "linewidth": 1, "label": f"{meaning}: {chart.form.format(value)}"}


def draw_curves(axis, chart: Chart) -> None:
    places = {tick: n for n, tick in enumerate(chart.ticks)}
    for place, of in enumerate(chart.series):
        aside = (place - (len(chart.series) - 1) / 2) * min(0.03, 0.4 / len(chart.series))
        at = [(places[tick] + aside, point) for tick, point in of.points.items() if tick in places]
        reaches = [[point.value - (point.value if point.low is None else point.low) for _, point in at],
                   [(point.value if point.high is None else point.high) - point.value for _, point in at]]
        axis.errorbar([x for x, _ in at], [point.value for _, point in at], capsize=3, **style(of),
                      yerr=reaches if any(map(any, reaches)) else None)
        axis.plot([x for x, point in at if point.beyond], [point.value for _, point in at if point.beyond],
                  **{**style(of), "label": None, "markerfacecolor": "white", "linestyle": ""})
    if chart.line:
        axis.axhline(chart.line[0], **named_line(chart))
    every = -(-len(chart.ticks) // 16)
    axis.set_xticks(range(0, len(chart.ticks), every), ticks_of(chart)[::every])
    axis.set_yticks(values := steps_to(reach(chart)), [f"{value:,.10g}" for value in values])
    axis.set(xlabel=chart.x, ylabel=chart.y, xlim=(-0.5, len(chart.ticks) - 0.5), ylim=(0, reach(chart) * 1.02))
    axis.grid(axis="y", alpha=0.3)


def style(of: Series) -> dict:
    colour = COLOURS[of.colour % len(COLOURS)]
    return {"color": colour, "marker": MARKERS[of.colour % len(MARKERS)], "label": plain_text(named(of, LONGEST)),
            "linestyle": ":" if of.dotted else "-", "markerfacecolor": "white" if of.dotted else colour}


def draw_bars(axis, chart: Chart) -> None:
    """Groups one below the other, the first one above."""
    wide = 0.8 / len(chart.series)
    for place, of in enumerate(chart.series):
        at = [(n + (place - (len(chart.series) - 1) / 2) * wide, of.points[tick].value)
              for n, tick in enumerate(chart.ticks) if tick in of.points]
        drawn = axis.barh([y for y, _ in at], [value for _, value in at], height=wide * 0.9,
                          color=COLOURS[of.colour % len(COLOURS)], label=plain_text(named(of, LONGEST)))
        axis.bar_label(drawn, [chart.form.format(value) for _, value in at], padding=3, fontsize="x-small")
    if chart.line:
        axis.axvline(chart.line[0], **named_line(chart))
    axis.set_yticks(range(len(chart.ticks)), ticks_of(chart), fontsize="small")
    axis.set(xlabel=chart.y, xlim=(0, reach(chart) * 1.08), ylim=(len(chart.ticks) - 0.5, -0.5))
