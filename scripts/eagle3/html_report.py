"""report.html: a benchmark for who decides about it, in one file that needs no network and runs no script.

A headline, what to do at each level, the pictures, the tables, the conditions, and what was not measured. Every text
that comes from elsewhere (prompts' sources, names of models, what servers said) goes through `svg.escaped`.
"""
from __future__ import annotations

import shlex
from pathlib import Path
from typing import Callable, Iterable

from eagle3 import svg
from eagle3.charts import about_variants, charts, rows_of, tables_in
from eagle3.html_parts import POLICY, STYLE, bullets, chapters_in, folded, lines_of, section, table
from eagle3.report import accept_table, figures_table, level_remarks, number, prediction_sentence
from eagle3.stage import log
from eagle3.summary import SERVE, SWITCH_OFF, decisions, headline, not_measured
from eagle3.svg import escaped

SERVER_WORDS = {"version": "SGLang", "model_path": "target", "dtype": "dtype", "quantization": "quantization",
                "kv_cache_dtype": "KV cache", "tp_size": "tensor parallel", "attention_backend": "attention",
                "context_length": "context length", "speculative_algorithm": "speculation",
                "speculative_draft_model_path": "drafter", "speculative_num_steps": "steps",
                "speculative_eagle_topk": "top-k", "speculative_num_draft_tokens": "draft tokens",
                "speculative_draft_model_quantization": "drafter's quantization"}
def html_report(report: dict, chapters: Iterable[str] = ()) -> str:
    """The page. report: as build_report and 05 make it; what it lacks is left out. chapters: those of others, as
    report.md has them."""
    target, drafter = served(report)
    sections = [part for make in (by_level, pictures, all_figures, acceptances, best_flags, doctor)
                if (part := guarded(make, report))]
    sections += [f"<section>\n{part}\n</section>"] if (part := chapters_in(chapters)) else []
    sections += [part for make in (conditions, missing) if (part := guarded(make, report))]
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Drafter benchmark{escaped(f': {target}' if target else '', 80)}</title>",
        f"<style>{STYLE}{svg.STYLE}</style>", "</head>", "<body>", *top(report, target, drafter), *sections,
        "</body>", "</html>", ""])


def guarded(make: Callable[[dict], str], report: dict) -> str:
    """A section; where it cannot be made it says so: hours of measuring do not hang on a page."""
    try:
        return make(report)
    except Exception as error:
        name = make.__name__.replace("_", " ")
        log(f"note: report.html lacks `{name}`: {type(error).__name__}: {error}")
        return f'<p class="warning">{escaped(f"{name}: not made ({type(error).__name__}: {error}). ")}' \
               "report.md and report.json hold the figures.</p>"


def served(report: dict) -> tuple[str, str]:
    """(name of the target, name of the drafter), each "" where no server told it."""
    servers = tables_in(report.get("servers")).values()
    return tuple(next((Path(str(info[key])).name for info in servers if info.get(key)), "")
                 for key in ("model_path", "speculative_draft_model_path"))


# ---- its sections ----
def top(report: dict, target: str, drafter: str) -> list[str]:
    of = f" of {drafter}" * bool(drafter) + f" on {target}" * bool(target)
    parts = [f"<h1>Drafter benchmark{escaped(of)}</h1>", f'<p class="headline">{escaped(headline(report))}</p>']
    done, planned = report.get("units_done"), report.get("units_planned")
    if done is not None and planned is not None and done < planned:
        parts.append(f'<p class="warning">Incomplete: {done} of {planned} units measured. The same command goes on.'
                     "</p>")
    return parts


def by_level(report: dict) -> str:
    if report.get("break_even"):  # nobody's answers were compared
        return ""
    rows = [["streams", "do", "speed-up", "95 % interval", "plain tok/s", "tok/s", "with"]]
    for found in decisions(report):
        row = rows_of(report)[found.level]
        held = all(row.get(name, {}).get("held") is not False for name in ("plain", found.variant))
        rows.append([found.level + " (not held)" * (not held), found.word, number(found.speed_up, "{:.2f}x"),
                     "{:.2f} to {:.2f}".format(*found.interval) if found.interval else found.why or "-",
                     number((row.get("plain") or {}).get("tok_s"), "{:,.1f}"),
                     number(row.get(found.variant, {}).get("tok_s"), "{:,.1f}"), found.variant or "-"])
    words = {row[1]: "good" if row[1] == SERVE else "bad" if row[1] == SWITCH_OFF else "open" for row in rows[1:]}
    return section("What to do at each level", table(rows, words)) if rows[1:] else ""


def pictures(report: dict) -> str:
    drawn = "\n".join(map(svg.figure, charts(report)))
    return section("Pictures", f'<div class="pictures">{drawn}</div>' if drawn else
                   "<p>There is nothing to draw yet.</p>")


def all_figures(report: dict) -> str:
    rows = rows_of(report)
    if not rows:
        return ""
    remarks = [remark.removeprefix("- ") for level, row in rows.items() for variant, figures in row.items()
               for remark in level_remarks(level, variant, figures,
                                           tables_in(report.get("servers")).get(variant, {}).get("version"))]
    return section("All figures", table(figures_table(report).rows),
                   '<p class="quiet">tok/s: output tokens over wall time. TTFT: time to the first token; ITL: time per '
                   "token after it. accept_length: 1 + correct drafts / verify steps, over all requests together. By "
                   "draft position: share of verify steps in which the drafts up to this one were right.</p>",
                   folded(f"Remarks on each level ({len(remarks)})", bullets(remarks)))


def acceptances(report: dict) -> str:
    parts = []
    for variant, found in about_variants(report).items():
        if not found.get("accept"):
            continue
        parts.append(f"<h3>{escaped(variant)}</h3>")
        parts += [table(accept_table(head, found[key]).rows) for key, head in (
            ("by_source", "source"), ("by_thinking", "thinking"), ("by_context", "context at the end, tokens"))
            if found.get(key)]
        if found.get("prediction"):
            parts.append(f"<p>{escaped(prediction_sentence(found['prediction']))}</p>")
    return section("Acceptance", *parts)


def best_flags(report: dict) -> str:
    return section("Best flags", *(
        f"<h3>{escaped(level)} stream(s): {escaped(best['variant'])} ({number(best.get('tok_s'), '{:,.1f}')} tok/s)"
        "</h3>"
        f"<pre>{lines_of(best['command'])}</pre>" for level, best in tables_in(report.get("sweep")).items()))


def doctor(report: dict) -> str:
    found = report.get("doctor")
    if not found:
        return ""
    said = [f"{one['cause']}: {one['finding']} {one['remedy']}" for one in found.get("findings") or ()]
    return section("Doctor", f"<p>{escaped(found.get('summary', ''))}</p>",
                   bullets([*(found.get("facts") or ()), *said]))


def missing(report: dict) -> str:
    return section("What was not measured", bullets(not_measured(report)))


# ---- under which conditions ----
def conditions(report: dict) -> str:
    parts = [table([["", *servers], *told])] if (told := server_rows(report)) and (
        servers := tables_in(report.get("servers"))) else []
    parts += [f"<p>{escaped(line)}</p>" for line in sent(report)]
    if command := command_of(report.get("config") or {}):
        parts += ["<h3>Command</h3>", f"<pre>{lines_of(command)}</pre>"]
    return section("Conditions", *parts)


def server_rows(report: dict) -> list[list[str]]:
    """What the servers told of themselves: a column for each, and rows in which some said something."""
    servers = tables_in(report.get("servers"))
    keys = dict.fromkeys([*SERVER_WORDS, *(key for info in servers.values() for key in info)])
    rows = [[SERVER_WORDS.get(key, key), *(str(info[key]) if info.get(key) is not None else "-"
                                           for info in servers.values())] for key in keys]
    return [row for row in rows if set(row[1:]) - {"-"}]


def sent(report: dict) -> list[str]:
    prompts, said = report.get("prompts") or {}, []
    if prompts.get("count") is not None:
        of = [f"{name} {n}" for name, n in (prompts.get("sources") or {}).items()]
        said.append(f"{prompts['count']} prompts" + f" ({', '.join(of)})" * bool(of)
                    + (f"; thinking {', '.join(prompts['thinking'])}" if prompts.get("thinking") else "") + ".")
    gpus = report.get("gpus")
    if isinstance(gpus, dict) and gpus.get("names"):
        said.append(f"Hardware: {gpus.get('count')} x {', '.join(map(str, gpus['names']))}.")
    return said


def command_of(config: dict) -> str:
    """05's command line, less its secrets; "" where the flags are not known."""
    words = []
    for flag, value in config.items():
        if value is None or value is False or value == []:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{flag}", *map(str, values)]
    return "python3 05_benchmark.py " + shlex.join(words) if words else ""
