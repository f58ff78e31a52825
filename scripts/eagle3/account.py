"""What became of every row that 01_generate read, by source; the sums must hold.

A prompt row counts as kept when one of its turns was kept, else as dropped, set aside or not answered. Set aside: no
server gave an answer, the same command asks again. Not answered: the run ended before it was (a budget, a signal, a
full disk).
"""
from __future__ import annotations

from collections import Counter

from eagle3.stage import log

FATES = ("kept", "dropped", "set_aside", "not_answered")
WORDS = 5  # different messages of a server that are logged for each reason


def fate_of(row: dict | None) -> str:
    """Of one turn, by its answer or drop row; None: it has none yet."""
    if row is None or "reason" not in row:
        return "not_answered" if row is None else "kept"
    waits = row["reason"].startswith("no_answer_") and row["reason"] != "no_answer_given"
    return "set_aside" if waits else "dropped"


class Account:
    """Counts of one session over all rows of its sources, those of earlier sessions included.

    sources: as `sources.open_sources` gives them; known by their place in this list, for two may have one name.
    """

    def __init__(self, sources: list):
        self.sources = sources
        self.read = Counter()  # source -> rows taken from it
        self.rows = {fate: Counter() for fate in FATES}  # fate -> source -> rows
        self.turns = {fate: Counter() for fate in FATES}
        self.planned = Counter()  # source -> turns that its rows ask for
        self.unread_differs = {}  # (source, column) -> duplicates that differ from the first one there
        self.words = {}  # reason of a drop -> what was said about it, the first few

    def settle(self, source: int, fates: list[str]) -> None:
        """One row has been dealt with; fates: of its turns."""
        self.planned[source] += len(fates)
        for fate in fates:
            self.turns[fate][source] += 1
        order = ("kept", "not_answered", "set_aside", "dropped")  # the first of these is the row's
        self.rows[min(fates, key=order.index)][source] += 1

    def unkeep(self, name: str, row_id: str) -> None:
        """A row that counted as kept was left out of the finished folder."""
        source = next((number for number, source in enumerate(self.sources)
                       if source.name == name and self.turns["kept"][number]), None)
        if source is None:
            return  # of an earlier session with more rows
        for counts in (self.turns, self.rows) if row_id.endswith("-t0") else (self.turns,):
            counts["kept"][source] -= 1
            counts["dropped"][source] += 1

    def differs(self, source: int, number: int, columns: list[str]) -> None:
        """A duplicate differs from the first of its kind in columns that are not read."""
        for column in columns:
            if (source, column) not in self.unread_differs:
                log(f"{self.sources[source].name}: row {number} is dropped as a duplicate although it differs from the "
                    f"first one in the column {column!r}, which is not read. If prompts need it, map it "
                    f"(,prompt= ,input= ,system=); --no-dedup asks all")
            self.unread_differs[source, column] = self.unread_differs.get((source, column), 0) + 1

    def note(self, reason: str, detail: str, where: str) -> None:
        """Why something was dropped, in the server's words: the first few different ones are logged."""
        said = self.words.setdefault(reason, [])
        if detail and detail not in said and len(said) < WORDS:
            said.append(detail)
            log(f"dropped {where}: {reason}: {detail}")

    # ---- the end ----
    def name(self, source: int) -> str:
        return f"{source}:{self.sources[source].name}"

    def report(self) -> dict:
        """{source: rows read, what became of them, the same for turns, columns} for report.json."""
        told = {}
        for number, source in enumerate(self.sources):
            named = {key: value for key, value in source.options.items() if key not in ("split", "config", "revision",
                                                                                         "weight")}
            read = source.columns_read()
            told[self.name(number)] = {
                "rows": len(source), "read": self.read[number],
                **{fate: self.rows[fate][number] for fate in FATES},
                "turns": {"planned": self.planned[number], **{fate: self.turns[fate][number] for fate in FATES}},
                "columns": {"named": named, "found": {what: source.columns[column] for what, column in read.items()},
                            "not_read": sorted(source.columns.keys() - set(read.values()))},
                "duplicates_that_differ_in": {column: n for (at, column), n in sorted(self.unread_differs.items())
                                              if at == number}}
        return told

    def lines(self) -> list[str]:
        """The same for the log, one line a source."""
        lines = []
        for name, told in self.report().items():
            sums = " + ".join(f"{told[fate]:,} {fate.replace('_', ' ')}" for fate in FATES
                              if told[fate] or fate != "not_answered")
            turns = " + ".join(f"{told['turns'][fate]:,} {fate.replace('_', ' ')}" for fate in FATES
                               if told["turns"][fate] or fate != "not_answered")
            found = ", ".join(f"{what} {n:,}" for what, n in told["columns"]["found"].items())
            unread = ", ".join(told["columns"]["not_read"][:12]) or "none"
            lines.append(f"source {name}: {told['read']:,} of {told['rows']:,} rows read = {sums} | "
                         f"{told['turns']['planned']:,} turns = {turns} | columns {found} | not read: {unread}")
        return lines

    def balanced(self) -> bool:
        """Rows read = kept + dropped + set aside + not answered, and so for the turns, in every source."""
        return all(told["read"] == sum(told[fate] for fate in FATES)
                   and told["turns"]["planned"] == sum(told["turns"][fate] for fate in FATES)
                   for told in self.report().values())


def over_half(counts: dict, flags: dict, kept: int, bare: int = 0) -> list[str]:
    """Warnings: flags of kept rows, and reasons of dropped ones, that cover more than half. bare: without reasoning."""
    total, lines = kept + sum(counts.values()), []
    for reason, n in counts.items():
        if n > total / 2:
            lines.append(f"WARNING: {reason} dropped {n:,} of {total:,} rows; dropped.jsonl says why")
    for flag, n in {**flags, "thinking is on, and no reasoning came:": bare}.items():
        if n > kept / 2:
            what = f"the flag {flag} is on" if flag in flags else flag
            lines.append(f"WARNING: {what} {n:,} of {kept:,} kept rows. "
                         "If you cannot say why, do not train on them")
    return lines
