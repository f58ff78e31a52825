"""What a page is made of: its style, sections, tables, lists, and chapters of a report.md. All text is foreign."""
from __future__ import annotations

import itertools
import re
from typing import Iterable

from eagle3.report import Table
from eagle3.svg import escaped

# No source but this file: a browser that obeys it loads nothing
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--quiet:#57606a;--faint:#d8dee4;--tint:#f3f5f7;
--good:#116b3a;--bad:#a8201a;--warn:#7d5600}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--ink:#e8ebee;--quiet:#a0a9b3;--faint:#363d45;--tint:#1e2329;
--good:#58d08c;--bad:#ff8d85;--warn:#efc15a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:24px 16px 64px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.1rem;font-weight:600;color:var(--quiet);margin:0 0 8px}
h2{font-size:1.2rem;margin:40px 0 12px;border-bottom:1px solid var(--faint);padding-bottom:4px}
h3{font-size:1rem;margin:24px 0 8px}
.headline{font-size:1.5rem;line-height:1.35;font-weight:600;margin:0 0 12px}
.warning{border-left:4px solid var(--warn);background:var(--tint);padding:8px 12px}
.quiet,figure p{color:var(--quiet);font-size:.875rem;margin:4px 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;margin:8px 0}
th,td{text-align:left;padding:5px 12px 5px 0;border-bottom:1px solid var(--faint);vertical-align:top;
overflow-wrap:normal}
th{color:var(--quiet);font-weight:600}
td{min-width:3.5em;max-width:24em;overflow-wrap:break-word}
.good,.bad,.open{font-weight:600;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}.open{color:var(--warn)}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:28px 40px}
figure{margin:0;max-width:520px}
figcaption{font-weight:600;margin-bottom:6px}
figure>svg{display:block;width:100%;height:auto}
.legend{list-style:none;margin:6px 0 0;padding:0;display:flex;flex-wrap:wrap;gap:2px 18px;font-size:.875rem}
.legend li{display:flex;gap:8px;align-items:center;min-width:0}
.legend svg{flex:none}
pre{background:var(--tint);padding:10px 12px;font-size:.8125rem;white-space:pre-wrap;overflow-wrap:anywhere}
li{margin:2px 0}
summary{cursor:pointer;color:var(--quiet);margin:8px 0}
@media print{body{max-width:none}.wide{overflow:visible}figure,table{break-inside:avoid}}
"""


# ---- parts ----
def section(title: str, *parts: str) -> str:
    return "\n".join([f"<section>\n<h2>{escaped(title)}</h2>", *parts, "</section>"]) if any(parts) else ""


def table(rows: list[list[str]], marked: dict[str, str] | None = None) -> str:
    """First row: the heads. marked: {a cell's text: its class}."""
    tags = {cell: f'<td class="{kind}">' for cell, kind in (marked or {}).items()}
    head = "".join(f"<th>{escaped(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"{tags.get(cell, '<td>')}{escaped(cell)}</td>" for cell in row) + "</tr>\n"
                   for row in rows[1:])
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def bullets(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escaped(line)}</li>\n" for line in lines) + "</ul>" if lines else ""


def folded(title: str, inner: str) -> str:
    return f"<details><summary>{escaped(title)}</summary>{inner}</details>" if inner else ""


def lines_of(words: str) -> str:
    return "\n".join(map(escaped, words.splitlines()))


# ---- chapters in Markdown ----
def kind_of(line: str) -> str:
    """Of a line of report.md."""
    starts = {"|": "table", "- ": "item", "    ": "code", "#": "head", "![": "picture"}
    return next((kind for start, kind in starts.items() if line.startswith(start)), "text" if line.strip() else "gap")


def inline(line: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escaped(line))


def chapters_in(lines: Iterable[str]) -> str:
    """Chapters of report.md, as its writers make them: lines, or several in one; tables with their rows or without.

    Its title and its pictures are left out: the page has its own.
    """
    out, single = [], []
    for line in lines:
        single += [line] if isinstance(line, Table) else line.split("\n")
    for kind, group in itertools.groupby(single, kind_of):
        found = list(group)
        if kind == "table":
            out += [table(of.rows) for of in found if isinstance(of, Table)]
            out += [table(rows)] if (rows := rows_in(line for line in found if not isinstance(line, Table))) else []
        elif kind == "item":
            out.append("<ul>" + "".join(f"<li>{inline(line[2:])}</li>\n" for line in found) + "</ul>")
        elif kind == "code":
            out.append("<pre>" + "\n".join(escaped(line.strip()) for line in found) + "</pre>")
        elif kind == "head":
            out += [f"<h{min(level, 3)}>{inline(line[level:].strip())}</h{min(level, 3)}>" for line in found
                    if (level := len(line) - len(line.lstrip("#"))) > 1]
        elif kind == "text":
            out += [f"<p>{inline(line)}</p>" for line in found]
    return "\n".join(out)


def rows_in(lines: Iterable[str]) -> list[list[str]]:
    """Of a table's lines."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [row for row in cells if set("".join(row)) - set("-: ")]
