"""The pictures of a benchmark's report; each is drawn where it has something to show."""
from __future__ import annotations

import contextlib
from pathlib import Path

from eagle3 import break_even
from eagle3.report import shares


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
    """Draws speed_up.png, acceptance.png (by draft position), groups.png (by source and context).

    Returns the names of those that had something to show, and {name: why} of those that failed: a report does not
    hang on its pictures.
    """
    drawn, failed = [], {}
    for name, draw in PLOTS.items():
        try:
            plt = pyplot()
            figure = draw(plt, report)
            if figure:
                figure.tight_layout()
                figure.savefig(folder / name, dpi=120)
                plt.close(figure)
                drawn.append(name)
        except Exception as error:  # also a full disk, a font cache that cannot be written
            failed[name] = why_not(error)
            with contextlib.suppress(OSError):
                (folder / name).unlink()  # half of a picture
    return drawn, failed


def draw_speed_up(plt, report: dict):
    series = {}  # variant: [(streams, ratio, how far the interval reaches below and above it)]
    for level, row in report["levels"].items():
        for variant, figures in row.items():
            ratio = figures.get("speed_up")
            if ratio:
                low, high = figures["interval"] or (ratio, ratio)
                series.setdefault(variant, []).append((int(level), ratio, max(0, ratio - low), max(0, high - ratio)))
    if not series:
        return None
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for variant, points in series.items():
        streams, ratios, below, above = zip(*points)
        axis.errorbar(streams, ratios, yerr=[below, above], marker="o", capsize=3, label=variant)
    axis.axhline(1, color="grey", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_xticks([int(level) for level in report["levels"]], list(report["levels"]))
    axis.set(xlabel="streams", ylabel="speed-up over plain", title="tok/s against plain decoding (95 % interval)")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="small")
    return figure


def draw_acceptance(plt, report: dict):
    shown = {variant: found for variant, found in report["variants"].items() if shares(found["accept"]) != "-"}
    if not shown:
        return None
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for variant, found in shown.items():
        served = found["accept"]["accept_by_position"]
        axis.plot(range(1, len(served) + 1), served, marker="o", label=f"{variant}, served")
        predicted = (found["prediction"] or {}).get("predicted_by_position")
        if predicted:
            positions = range(1, len(predicted) + 1)
            axis.plot(positions, predicted, marker="x", linestyle=":", label="predicted by training")
    most = max(len(found["accept"]["accept_by_position"]) for found in shown.values())
    axis.set_xticks(range(1, most + 1))
    axis.set(xlabel="draft position", ylabel="share of verify steps", ylim=(0, 1),
             title="drafts right up to this position")
    axis.legend()
    return figure


def draw_groups(plt, report: dict):
    """Of the first variant with counts."""
    found = next((found for found in report["variants"].values() if found["accept"]), None)
    if not found:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, (key, title) in zip(axes, [("by_source", "source"), ("by_context", "context at the end, tokens")]):
        names = list(found[key])
        axis.bar(range(len(names)), [found[key][name]["accept_length"] for name in names], width=0.6)
        axis.set_xlim(-0.7, max(3, len(names)) - 0.3)
        axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axis.axhline(1, color="grey", linestyle="--", linewidth=1)
        axis.set(title=title, ylabel="accept_length" if axis is axes[0] else "")
    return figure


PLOTS = {"speed_up.png": draw_speed_up, "acceptance.png": draw_acceptance, "groups.png": draw_groups,
         "break_even.png": break_even.draw}
