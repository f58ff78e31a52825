"""The report of a benchmark: every figure of every level and variant, a verdict to act on, and both in Markdown."""
from __future__ import annotations

from pathlib import Path
from typing import Callable, Iterable

from eagle3.bench_prompts import about_requests, contexts_of
from eagle3.figures import (BOOTSTRAP, CONTEXT_BUCKETS, acceptance, answered, context_bucket, count, difference_key,
                            grouped, level_figures, paired, pooled, prediction_check, same_text, speed_up,
                            tok_s_interval)
from eagle3.measured import Measured
from eagle3.sampled_serving import sampled_check, sampled_sentence
from eagle3.sampling import Sampling


# ---- figures of the whole run ----
def build_report(measured: Measured, prompts: list[dict], predictions: dict[str, dict | None], config: dict) -> dict:
    """Everything that is said about the run. predictions: training's, by variant; config: flag -> value."""
    # a rate is no level of streams: traffic.py has those
    units = [unit for unit in pooled(measured.units, contexts_of(prompts)) if isinstance(unit["level"], int)]
    levels, names = sorted({unit["level"] for unit in units}), dict.fromkeys(unit["variant"] for unit in units)
    variants = sorted(names, key=lambda name: name != "plain")  # it may have been measured again, after the others
    steps = {name: measured.servers.get(name, {}).get("speculative_num_steps") or 0 for name in variants}
    report = {"levels": {}, "variants": {}, "servers": measured.servers, "config": config, "prompts": {
        "count": len(prompts), "sources": count(prompt["source"] for prompt in prompts),
        "thinking": count(prompt["thinking"] for prompt in prompts)}}
    for level in levels:
        of = {name: found for name in variants
              if (found := [unit for unit in units if unit["variant"] == name and unit["level"] == level])}
        report["levels"][str(level)] = level_rows(of, steps, measured.probes, config)
    for name in variants:
        if name != "plain":
            of = [unit for unit in measured.units if unit["variant"] == name]
            # one level's answers: at another level the same prompt may get another text
            lowest = [record for unit in of if unit["level"] in levels[:1] for record in unit["requests"]]
            server, note, prediction = measured.servers.get(name, {}), None, predictions.get(name)
            setting = Sampling(config["temperature"], config.get("top-p", 1.0))
            check = prediction_check(prediction, lowest, server, setting.temperature)
            if setting.temperature:
                check, note = sampled_check(prediction, lowest, server, setting, repeated(units, name))
            report["variants"][name] = {**acceptance_groups(answered(of), prompts, steps[name]), "prediction": check,
                                        "sampling_note": note}
    report["verdict"] = {level: verdict(row) for level, row in report["levels"].items()}
    return report


def level_rows(of: dict[str, list[dict]], steps: dict[str, int], probes: dict, config: dict,
               basis: Callable | None = None) -> dict[str, dict]:
    """{variant: figures} of one level; of: {variant: its units}, plain first.

    basis: what makes of units those whose tok/s are compared, where they are not these.
    """
    row, greedy, price = {}, config["temperature"] == 0, config["usd-per-hour"]
    for variant, units in of.items():
        row[variant] = figures = level_figures(units, steps[variant])
        if price and figures["tok_s"]:
            figures["usd_per_million_tokens"] = price / 3600 / figures["tok_s"] * 1e6
        if variant == "plain" or "plain" not in of:
            continue
        figures |= speed_up(of["plain"], units) if basis is None else speed_up(basis(of["plain"]), basis(units))
        base, step = row["plain"]["decode_step_s"], figures["decode_step_s"]
        # what one verify step costs in plain steps: the emitted tokens a step above which speculation pays
        figures["break_even"] = step / base if base and step else None
        if greedy:
            figures["same_text"] = text = same_text(of["plain"], units)
            for difference in text["differences"]:
                difference |= probes.get(difference_key(difference), {})
    runs = [figures["tok_s_repeats"] for figures in row.values()]
    for variant, figures in row.items() if basis is None else ():
        figures["tok_s_interval"] = tok_s_interval(of[variant], figures["tok_s_repeats"], runs)
    if greedy and len(of.get("plain", [])) > 1:
        row["plain"]["same_text_as_itself"] = same_as_itself(of["plain"])
    return row


def repeated(units: list[dict], name: str) -> tuple[float | None, float | None]:
    """same_as_itself at one level: of the variant `name`, and of plain."""
    level = next(unit["level"] for unit in units if unit["variant"] == name)
    of = [[unit for unit in units if (unit["variant"], unit["level"]) == (own, level)] for own in (name, "plain")]
    return tuple(same_as_itself(own) if len(own) > 1 else None for own in of)


def same_as_itself(units: list[dict]) -> float | None:
    """Share of a server's answers that are the same in a later repeat."""
    first, *others = units
    pairs = [pair for other in others for pair in paired([first], [{**other, "repeat": first["repeat"]}])]
    return sum(a["output_ids"] == b["output_ids"] for a, b in pairs) / len(pairs) if pairs else None


def acceptance_groups(records: list[dict], prompts: list[dict], steps: int) -> dict:
    """Acceptance of one variant's answers, whole and by what their prompts are."""
    about = about_requests(prompts)
    by_context = grouped(records, context_bucket, steps)
    return {"accept": acceptance(records, steps),
            "by_source": grouped(records, lambda record: about[record["id"]]["source"], steps),
            "by_thinking": grouped(records, lambda record: about[record["id"]]["thinking"], steps),
            "by_context": {name: by_context[name] for name in CONTEXT_BUCKETS if name in by_context}}


def verdict(row: dict[str, dict]) -> str:
    """One sentence to act on, about one level; none without an interval that holds prompts and runs."""
    rivals = {name: figures for name, figures in row.items() if name != "plain" and figures.get("speed_up")}
    if not rivals:
        compared = "plain" in row and len(row) > 1
        return f"{'no token came back' if compared else 'no baseline at this level'}, so no speed-up"
    name = max(rivals, key=lambda key: rivals[key]["speed_up"])
    speed, interval = rivals[name]["speed_up"], rivals[name]["interval"]
    if interval:
        low, high = interval
        word = "serve it" if low > 1 else "do not serve it: slower" if high < 1 else \
            "undecided: the interval holds 1.00, measure more prompts or repeats"
        said = f"{name}: {word} ({speed:.2f}x, 95 % interval {low:.2f} to {high:.2f})"
    else:
        said = f"{name}: no verdict ({speed:.2f}x; {rivals[name].get('no_interval')})"
    for variant in ("plain", name):
        failed, requests = sum(row[variant]["failed"].values()), row[variant]["requests"]
        said += f"; {failed} of {requests} requests of {variant} failed: look at them first" if failed else ""
        empty = row[variant].get("empty")
        said += f"; {empty} of {requests} answers of {variant} are empty" if empty else ""
        if row[variant].get("held") is False:
            said += f"; not held: {row[variant]['in_flight']:.1f} requests in flight with {variant}"
    return said


# ---- tables ----
class Table(str):
    """A table in Markdown that still knows its rows (the first one: the heads), for who shows it otherwise."""
    rows: list[list[str]]


def markdown_table(rows: list[list[str]]) -> Table:
    """First row: the heads. Columns padded, so that it also reads well on a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    table = Table("\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]))
    table.rows = rows
    return table


def number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def milliseconds(seconds: dict | None, quantiles: list[str], digits: int) -> str:
    return "/".join(f"{seconds[q] * 1000:.{digits}f}" for q in quantiles) if seconds else "-"


def shares(accept: dict | None) -> str:
    by_position = accept and accept["accept_by_position"]
    return " ".join(f"{share:.2f}" for share in by_position) if by_position else "-"


def figures_table(report: dict) -> Table:
    rows = [["streams", "variant", "tok/s", "speed-up", "TTFT p50/p95 ms", "ITL p50/p95/p99 ms", "accept_length",
             "by draft position", "same text", "failed"]]
    for level, row in report["levels"].items():
        for variant, f in row.items():
            text, interval = f.get("same_text") or {"compared": 0}, f.get("interval")
            failed = sum(f["failed"].values())
            rows.append([
                level + ("" if f.get("held", True) else f" (held {f['in_flight']:.1f})"), variant,
                number(f["tok_s"], "{:,.1f}"),
                number(f.get("speed_up"), "{:.2f}x") + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else ""),
                milliseconds(f["ttft_s"], ["p50", "p95"], 0), milliseconds(f["itl_s"], ["p50", "p95", "p99"], 1),
                number(f["accept"] and f["accept"]["accept_length"]), shares(f["accept"]),
                f"{'yes' if text['share'] == 1 else 'no'} {text['equal']}/{text['compared']}"
                if text["compared"] else "-",
                f"{failed} {f['failed']}" if failed else "0"])
    return markdown_table(rows)


def accept_table(head: str, groups: dict[str, dict]) -> Table:
    return markdown_table([[head, "requests", "accept_length", "by draft position"]] + [
        [name, str(accept["requests"]), number(accept["accept_length"]), shares(accept)]
        for name, accept in groups.items()])


# ---- sentences ----
def level_remarks(level: str, variant: str, f: dict, version: str | None) -> list[str]:
    """What the table has no room for: the cost of a verify step, energy, price, noise, and where answers part."""
    said = []
    if len(f.get("tok_s_repeats", ())) > 1:
        apart = f", {f['tok_s_spread']:.1%} apart" if f.get("tok_s_spread") is not None else ""
        said.append(f"tok/s of its runs: {', '.join(f'{tok_s:,.1f}' for tok_s in f['tok_s_repeats'])}{apart}.")
    if f.get("held") is False:
        said.append(f"the level was not held: {f['in_flight']:.1f} requests in flight on average. Ask more prompts.")
    if f.get("retracted"):
        said.append(f"the server took {f['retracted']} requests back out of its batch and began them again, for want "
                    "of room in its KV cache.")
    if f.get("break_even") and f["accept"]:
        begun = sum(f["finish"].values()) - f["empty"]  # answers: the first token of each came from the prefill
        emitted = (f["output_tokens"] - begun) / f["accept"]["verify_steps"]
        said.append(f"a verify step takes {f['break_even']:.2f} times a plain step and emits {emitted:.2f} tokens.")
    if variant != "plain" and not f["accept"]:
        said.append(f"the answers of SGLang {version} carry no speculative counts, so there is no accept_length.")
    if f["joule_per_token"]:
        said.append(f"{f['watts']:.0f} W over all GPUs of this machine, {f['joule_per_token'] / 3.6:.2f} kWh "
                    "a million output tokens.")
    if f.get("usd_per_million_tokens"):
        said.append(f"{f['usd_per_million_tokens']:.2f} USD a million output tokens.")
    if f.get("same_text_as_itself") is not None:
        said.append(f"the plain server repeats its own answers in {f['same_text_as_itself']:.1%} of cases: "
                    "the noise floor of `same text`.")
    said += difference_remarks(variant, (f.get("same_text") or {}).get("differences", []))
    return [f"- {level} stream(s), {variant}: {sentence}" for sentence in said]


def difference_remarks(variant: str, differences: list[dict]) -> list[str]:
    """Faults first, ten in all."""
    if not differences:
        return []
    kinds = count(d.get("kind", "not probed") for d in differences)
    said = [f"{len(differences)} answers part ({', '.join(f'{kind} {n}' for kind, n in kinds.items())}); of those:"]
    for d in sorted(differences, key=lambda d: d.get("kind") != "fault")[:10]:
        gap, (one, other) = f", {d['gap']:.4f} apart in log-probability" if "gap" in d else "", d["tokens"]
        said.append(f"{d['id']} parts at token {d['position']}: plain {one}, {variant} {other}{gap}: "
                    f"{d.get('kind', 'not probed')}.")
    return said


def prediction_sentence(check: dict) -> str:
    if "temperature" in check:
        return sampled_sentence(check)
    whose = f"its validation samples ({check['equal_answers']} with exactly the predicted counts)" \
        if check["of_validation"] else "other prompts than its validation samples"
    return (f"Training predicted {check['predicted']:.3f}, served {check['served']:.3f} on {check['answers']} answers "
            f"to {whose}, drafts beyond the end of an answer left out: ratio {check['ratio']:.3f}.")


# ---- report.md ----
def report_markdown(report: dict, plots: list[str], chapters: Iterable[str] = ()) -> str:
    """report.md. chapters: lines of others."""
    out = ["# Drafter benchmark", ""]
    if report["units_done"] < report["units_planned"]:
        out += [f"**Incomplete: {report['units_done']} of {report['units_planned']} units measured. "
                "The same command goes on.**", ""]
    out += ["## Verdict", "", *(f"- {level} stream(s): {said}" for level, said in report["verdict"].items()), "",
            figures_table(report), "", how_measured(report), ""]
    for level, row in report["levels"].items():
        for variant, figures in row.items():
            out += level_remarks(level, variant, figures, report["servers"].get(variant, {}).get("version"))
    out += ["", "Share of time in draft and verify: SGLang's HTTP API does not tell it; "
                "the cost of a verify step above holds both."]
    for variant, found in report["variants"].items():
        out += acceptance_chapter(variant, found) if found["accept"] else []
    out += chapters
    if report.get("sweep"):
        out += ["", "## Best flags", ""]
        out += [f"- {level} stream(s): {best['variant']} ({best['tok_s']:,.1f} tok/s)\n\n      {best['command']}"
                for level, best in report["sweep"].items() if best]
        out += [f"- {variant} is left out: {why}" for variant, why in report["left_out"].items()]
    if report.get("doctor"):
        doctor = report["doctor"]
        out += ["", "## Doctor", "", doctor["summary"], "", *(f"- {fact}" for fact in doctor.get("facts", ())),
                *(f"- **{f['cause']}**: {f['finding']} {f['remedy']}" for f in doctor["findings"]),
                *(f"- not checked: {name}: {why}" for name, why in doctor["unchecked"].items())]
    out += ["", *(f"- no {name}: {why}" for name, why in report.get("not_drawn", {}).items())]
    return "\n".join(out + [""] + [f"![{Path(plot).stem}]({plot})" for plot in plots]) + "\n"


def how_measured(report: dict) -> str:
    config, prompts = report["config"], report["prompts"]
    sources = ", ".join(f"{name} {n}" for name, n in prompts["sources"].items())
    return (f"{prompts['count']} prompts ({sources}; thinking {', '.join(prompts['thinking'])}), "
            f"{'exactly' if config['fixed-length'] else 'at most'} {config['max-tokens']} tokens, "
            f"temperature {config['temperature']}, repeats {config['repeats']}. tok/s: output tokens over wall time. "
            f"ITL: time per token after the first. Intervals: 95 %, over prompts ({BOOTSTRAP} resamples) and over runs "
            "(Student's t of the scatter between repeats). "
            "accept_length: 1 + correct drafts / verify steps over all requests together.")


def acceptance_chapter(variant: str, found: dict) -> list[str]:
    tables = [accept_table("source", found["by_source"]), "", accept_table("thinking", found["by_thinking"]), "",
              accept_table("context at the end, tokens", found["by_context"]), ""]
    check = [prediction_sentence(found["prediction"])] if found["prediction"] else []
    check += [f"{variant}: {found['sampling_note']}"] if found["sampling_note"] else []
    return ["", f"## Acceptance of {variant}", "", *tables, *check]
