"""Never slower: steps by batch size for SGLang's --speculative-adaptive, from a sweep, and how they do beside it.

At each level that was measured the fastest of plain decoding and the chains (topk 1) wins. Between two levels with
different winners the switch stands where their speeds, straight lines over the logarithm of the streams, cross.
What SGLang takes, in which release: spec_releases.py.
"""
from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from eagle3.figures import level_figures, speed_up
from eagle3.report import markdown_table
from eagle3.spec_releases import SKIP_AT_ZERO, fewest_steps, why_not_adaptive
from eagle3.stage import UserError, read_json, write_atomic

VARIANT, FILE = "adaptive", "adaptive.json"
CHAIN = re.compile(r"steps(\d+)-topk1-drafts\d+")  # a point of --sweep that adaptive steps can be
SAME = 0.98  # of another speed: not slower
RUNS, JUDGED = 2, 1000  # of what is judged, after the sweep that chose; their repeats begin here


@dataclass(frozen=True)
class Choice:
    """What a sweep chose. tok_s: {level: {variant: tok/s}} of all its points."""
    tok_s: dict[int, dict[str, float]]
    fewest: int  # steps of an entry

    def steps(self, variant: str) -> int | None:
        """Of an entry; None for a variant that an entry cannot be."""
        if variant == "plain":
            return 0
        return int(found[1]) if (found := CHAIN.fullmatch(variant)) else None

    def fastest(self, level: int, entries_only: bool) -> str | None:
        """A level's fastest variant; entries_only: of those that an entry can be."""
        of = {name: speed for name, speed in self.tok_s[level].items()
              if not entries_only or (steps := self.steps(name)) is not None and steps >= self.fewest}
        return max(of, key=of.get, default=None)

    @property
    def winners(self) -> dict[int, str]:
        """{level: the entry's variant}."""
        found = {level: self.fastest(level, True) for level in sorted(self.tok_s)}
        return {level: name for level, name in found.items() if name}

    @property
    def entries(self) -> dict[int, int]:
        """{batch size from which on: steps}."""
        levels, winners, found = list(self.winners), self.winners, {}
        for before, level in zip([None, *levels], levels):
            if before is None or winners[before] != winners[level]:
                key = 1 if before is None else self.switch(before, level, winners[before], winners[level])
                found[key] = self.steps(winners[level])
        return found

    def switch(self, low: int, high: int, one: str, other: str) -> int:
        """The batch size, above level `low` and at most `high`, from which on `other` is faster than `one`."""
        a, b = self.tok_s[low], self.tok_s[high]
        if one not in b or other not in a:
            return high
        lead, behind = math.log(a[one] / a[other]), math.log(b[other] / b[one])
        share = lead / (lead + behind) if lead + behind > 0 else 1.0
        return min(high, max(low + 1, math.ceil(low * (high / low) ** share)))

    @property
    def off_from(self) -> int | None:
        """The level from which on, up to the highest, plain decoding is the fastest; None: nowhere."""
        found = None
        for level in sorted(self.tok_s, reverse=True):
            if self.fastest(level, False) != "plain":
                break
            found = level
        return found


def choose(units: list[dict], version: str | None) -> Choice:
    """From the units of a sweep, those of all its contexts as one. version: SGLang's."""
    groups: dict[tuple, list] = {}
    for unit in units:
        if unit["variant"] != VARIANT and unit["repeat"] < JUDGED and isinstance(unit["level"], int):
            groups.setdefault((unit["level"], unit["variant"]), []).append(unit)
    tok_s: dict[int, dict[str, float]] = {}
    for (level, variant), of in groups.items():
        if speed := level_figures(of)["tok_s"]:
            tok_s.setdefault(level, {})[variant] = speed
    return Choice(tok_s, fewest_steps(version))


# ---- the file and the server ----
def written(entries: dict[int, int]) -> str:
    """The file of --speculative-adaptive-config. One candidate an entry: what was measured, nothing to try out."""
    return json.dumps({str(size): {"candidate_steps": [steps]} for size, steps in entries.items()}, indent=1) + "\n"


def read(path: Path) -> dict[int, int]:
    """The entries of a file that `written` made. Raises UserError."""
    found = read_json(path)
    try:
        return {int(size): entry["candidate_steps"][0] for size, entry in found.items()}
    except (ValueError, TypeError, KeyError, IndexError):
        raise UserError(f"{path}: not what 05 wrote there. Delete it; the same command writes it again.") from None


def flags(entries: dict[int, int], path: Path) -> dict:
    """Of the server. Its own --speculative-num-steps must be one of the entries."""
    steps = max(entries.values())
    return {"speculative-adaptive": True, "speculative-adaptive-config": str(path.resolve()),
            "speculative-num-steps": steps, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": steps + 1}


def environment(entries: dict[int, int]) -> dict[str, str]:
    return SKIP_AT_ZERO if 0 in entries.values() else {}


def check(info: dict, where: object) -> None:
    """That a server switches; info: what it tells of itself. Raises UserError."""
    if info.get("speculative_adaptive") is not True:
        raise UserError(f"{where}: serves fixed steps, though --speculative-adaptive was asked for; its log says why "
                        "(speculative_adaptive disabled). Leave out the flag that it names there, or --adaptive.")


def why_none(choice: Choice, version: str | None) -> str | None:
    """Why there is no file, and what to serve instead; None where there is one."""
    off, why = choice.off_from, why_not_adaptive(version)
    if choice.tok_s and off == min(choice.tok_s):
        return "plain decoding is the fastest at every level: serve without a drafter"
    if not any(choice.entries.values()):
        return f"no chain of drafts (topk 1) gains, and SGLang switches nothing else by batch size: {advice(off)}"
    return f"{why}: {advice(off)}" if why else None


def advice(off: int | None) -> str:
    return f"serve without a drafter from {off} streams on" if off else "the best flags of each level are above"


@dataclass(frozen=True)
class Settled:
    """What came of a sweep. none: why no file; else `entries` are in it."""
    choice: Choice
    entries: dict[int, int]
    path: Path
    none: str | None

    def runs(self) -> list[tuple[str, int, int]]:
        """(variant, level, repeat) of what is measured after the sweep, in turned order; nothing without a file.

        The best setting is measured where it was the best: who won by luck does not win again.
        """
        levels, best = list(self.choice.winners), {}
        for level in levels if not self.none else ():
            best.setdefault(self.choice.fastest(level, False), []).append(level)
        order = [("plain", levels), *((name, of) for name, of in best.items() if name != "plain"), (VARIANT, levels)]
        return [(name, level, JUDGED + run) for run in range(RUNS) if not self.none
                for name, of in (order if run % 2 == 0 else reversed(order)) for level in of]

    def found(self, units: list[dict], command: str | None) -> dict:
        """Of report.json. units: those of all contexts as one; command: the line that starts the server."""
        return {"none": self.none, "entries": {str(size): steps for size, steps in self.entries.items()},
                "file": str(self.path), "command": command, "off_from": self.choice.off_from,
                "forced": self.choice.fewest > 0 and self.choice.off_from is not None,
                "rows": judged(units, self.choice, self.entries)}


def settle(units: list[dict], version: str | None, out: Path) -> Settled:
    """Chooses from a finished sweep, and writes the file into `out`; one that was measured stays. Raises UserError."""
    choice, path = choose(units, version), out / FILE
    if none := why_none(choice, version):
        return Settled(choice, {}, path, none)
    if path.is_file() and any(unit["variant"] == VARIANT for unit in units):
        return Settled(choice, read(path), path, None)
    write_atomic(path, written(choice.entries))
    return Settled(choice, choice.entries, path, None)


# ---- how it did ----
def judged(units: list[dict], choice: Choice, entries: dict[int, int]) -> list[dict]:
    """A row for each level: adaptive beside plain and the best fixed setting, of the runs after the sweep.

    entries: those that were served; a sweep that was measured further may choose others since.
    """
    rows = []
    for level in choice.winners if entries else ():
        def of(name, level=level):
            return [unit for unit in units if (unit["variant"], unit["level"]) == (name, level)
                    and unit["repeat"] >= JUDGED]

        best, steps = choice.fastest(level, False), entries[max(size for size in entries if size <= level)]
        if not of(VARIANT) or not of("plain") or not of(best):
            continue
        beside = {"plain": speed_up(of("plain"), of(VARIANT)), "best": speed_up(of(best), of(VARIANT))}
        if not all(found["speed_up"] for found in beside.values()):
            continue
        reachable = choice.steps(best) is not None and choice.steps(best) >= choice.fewest
        rows.append({"level": level, "steps": steps, "best_fixed": best, **beside, "reachable": reachable,
                     "holds": all(found["speed_up"] >= SAME for name, found in beside.items()
                                  if name == "plain" or reachable)})
    return rows


def said_of(row: dict) -> str:
    """One sentence about a level."""
    plain, best = row["plain"], row["best"]
    interval = f" ({plain['interval'][0]:.2f}-{plain['interval'][1]:.2f})" if plain["interval"] else ""
    said = f"{plain['speed_up']:.2f}x plain{interval} with {row['steps']} steps"
    if row["best_fixed"] != "plain":
        said += f", {best['speed_up']:.2f} of {row['best_fixed']}"
        said += "" if row["reachable"] else " (which adaptive steps cannot be)"
    return said + ("" if row["holds"] else f": below {SAME}")


def spelled(entries: dict) -> str:
    """`3 steps from batch size 1 on, plain from 24 on`"""
    return ", ".join(f"{f'{steps} steps' if steps else 'plain'} from {'batch size ' * (not at)}{size} on"
                     for at, (size, steps) in enumerate(entries.items()))


def summary(rows: list[dict]) -> str:
    slower = [row for row in rows if row["plain"]["speed_up"] < SAME]
    if slower:
        return (f"adaptive is slower than plain at {', '.join(str(row['level']) for row in slower)} stream(s): there "
                "serve without a drafter")
    short = [str(row["level"]) for row in rows if not row["holds"]]
    return "adaptive is nowhere slower than plain decoding" + (
        f", but less than the best fixed setting at {', '.join(short)} stream(s)" if short else
        " or the best fixed setting")


def chapter(found: dict) -> list[str]:
    """Of report.md; found: report.json's `adaptive`."""
    out = ["", "## Steps by batch size", ""]
    if found["none"]:
        return out + [f"No adaptive steps: {found['none']}."]
    out += [markdown_table([["batch size from", "draft steps"]] + [[size, str(steps) if steps else "0 (plain)"]
                                                                   for size, steps in found["entries"].items()]), ""]
    if found["forced"]:
        out += [f"This release cannot switch drafting off: {advice(found['off_from'])}.", ""]
    out += [f"In `{found['file']}`; the server:", "", f"      {found['command']}", ""]
    if not found["rows"]:
        return out + ["Not measured: `--adaptive` does that."]
    return out + [f"{summary(found['rows'])[0].upper()}{summary(found['rows'])[1:]} (within {1 - SAME:.0%}).", "",
                  *(f"- {row['level']} stream(s): {said_of(row)}" for row in found["rows"])]
