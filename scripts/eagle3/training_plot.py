"""training.png: how a run goes, from the rows of metrics.jsonl."""
from __future__ import annotations

import os
from pathlib import Path

from eagle3.stage import log

# What is drawn: its name in a row (`<name>_k` of each TTT step k, or alone), title, whether validation has it
PANELS = (("loss", "loss of each TTT step", True), ("cond_acc", "conditional accuracy of each TTT step", True),
          ("accept_length", "accept_length", True), ("lr", "learning rate", False))


def plot(rows: list[dict], path: Path) -> None:
    """Draws `path` anew. Where it cannot be drawn the run goes on, with a line in the log."""
    temporary = path.with_suffix(".tmp")
    try:
        draw(rows).savefig(temporary, format="png", dpi=110, metadata={"Software": None})
        os.replace(temporary, path)
    except Exception as error:  # matplotlib raises what it likes, also when it is imported; a disk may be full
        temporary.unlink(missing_ok=True)
        log(f"{path} not drawn: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}")


def draw(rows: list[dict]):
    """The figure. Solid lines: training; dashed ones with points: validation; one colour a TTT step."""
    from matplotlib.figure import Figure  # here: it takes a second to import
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    training, validation = ([row for row in rows if key in row] for key in ("loss", "val_accept_length"))
    steps = sum(key.startswith("loss_") for key in (training or [{}])[0])
    for axis, (name, title, validated) in zip(figure.subplots(2, 2).flat, PANELS):
        each = [(f"{name}_{k}", f"C{k}") for k in range(steps)] if name in ("loss", "cond_acc") else [(name, "black")]
        for key, colour in each:
            axis.plot(*points(training, key), color=colour, linewidth=1.2)
            if validated:
                axis.plot(*points(validation, f"val_{key}"), "o--", color=colour, markersize=3.5, linewidth=1.2)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    figure.legend(handles=legend(steps, bool(validation)), loc="outside lower center", ncols=min(steps + 2, 9),
                  frameon=False)
    return figure


def points(rows: list[dict], key: str) -> tuple[list, list]:
    """(steps, values) of a key, without the rows in which it is undefined or that an earlier version wrote."""
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def legend(steps: int, validated: bool) -> list:
    """Below all four panels, off their curves."""
    from matplotlib.lines import Line2D
    handles = [Line2D([], [], color=f"C{k}", label=f"k = {k}") for k in range(steps)]
    handles.append(Line2D([], [], color="black", label="training"))
    return handles + [Line2D([], [], color="black", linestyle="--", marker="o", markersize=3.5,
                             label="validation")] * validated
