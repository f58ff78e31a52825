"""A report in a few words: whether it is worth serving the drafter, where, by how much, and what nobody measured."""
from __future__ import annotations

from dataclasses import dataclass

from eagle3.charts import about_variants, finite, rows_of, variants_of

SERVE, SWITCH_OFF, UNDECIDED, UNKNOWN = "serve it", "serve plain", "undecided", "no verdict"


@dataclass(frozen=True)
class Decision:
    """What to do at one level, by its fastest variant."""
    level: str
    word: str
    variant: str | None = None
    speed_up: float | None = None
    interval: tuple[float, float] | None = None
    why: str = ""  # there is no verdict


def decide(level: str, row: dict[str, dict]) -> Decision:
    rivals = {name: of for name, of in row.items() if name != "plain" and finite(of.get("speed_up"))}
    if not rivals:
        why = "plain decoding was not measured" if "plain" not in row else "no token came back" if len(row) > 1 else \
            "plain decoding alone was measured"
        return Decision(level, UNKNOWN, why=why)
    name = max(rivals, key=lambda key: rivals[key]["speed_up"])
    speed, interval = rivals[name]["speed_up"], rivals[name].get("interval")
    if not interval or not all(map(finite, interval)):
        return Decision(level, UNKNOWN, name, speed, why=str(rivals[name].get("no_interval") or "no interval"))
    low, high = interval
    return Decision(level, SERVE if low > 1 else SWITCH_OFF if high < 1 else UNDECIDED, name, speed, (low, high))


def decisions(report: dict) -> list[Decision]:
    return [decide(level, row) for level, row in rows_of(report).items()]


# ---- one sentence ----
def headline(report: dict) -> str:
    """Is it worth it, where, how much. Of simulated servers: what they tell of that."""
    if report.get("break_even"):
        return " ".join(f"At {level} stream{'s' * (level != '1')}: {said}." for level, said in
                        (report.get("verdict") or {}).items()) or "Nothing has been measured yet."
    of = {}
    for decision in decisions(report):
        of.setdefault(decision.word, []).append(decision)
    if not of:
        return "No verdict: nothing has been measured yet."
    serve, off, open_, unknown = (of.get(word, []) for word in (SERVE, SWITCH_OFF, UNDECIDED, UNKNOWN))
    if serve:
        said = [f"Worth serving at {streams(serve)}: {gain(serve)} the output of plain decoding{with_variants(serve)}."]
    elif off:
        said = ["Not worth serving at any level measured." if not open_ + unknown else "Nowhere shown to be worth it."]
    else:
        said = []
    if off:
        said.append(f"Slower than plain decoding at {streams(off)} ({gain(off)}): serve plain there.")
    if open_:
        said.append(f"Undecided at {streams(open_)} ({gain(open_)}): its interval holds 1.00x. Measure more prompts or "
                    "repeats.")
    for why in dict.fromkeys(decision.why for decision in unknown):
        these = [decision for decision in unknown if decision.why == why]
        speeds = f" ({gain(these)})" if all(decision.speed_up for decision in these) else ""
        said.append(f"No verdict at {streams(these)}{speeds}: {why.rstrip('.')}.")
    return " ".join(said + [complaint for complaint in [failures(report)] if complaint])


def streams(found: list[Decision]) -> str:
    levels = [decision.level for decision in found]
    if len(levels) > 4:
        return f"the {len(levels)} levels from {levels[0]} to {levels[-1]} streams"
    return listed(levels) + (" stream" if levels == ["1"] else " streams")


def listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def gain(found: list[Decision]) -> str:
    """1.42x (95 % interval 1.35 to 1.49), or from one to the other of several."""
    if len(found) == 1:
        interval = found[0].interval
        return f"{found[0].speed_up:.2f}x" + (
            f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else "")
    speeds = [decision.speed_up for decision in found]
    return f"{min(speeds):.2f}x to {max(speeds):.2f}x"


def with_variants(found: list[Decision]) -> str:
    """Which one to serve, where there are several."""
    names = list(dict.fromkeys(decision.variant for decision in found))
    if names == ["speculative"]:
        return ""
    return f", with {names[0]}" if len(names) == 1 else f", with another variant at each level ({listed(names)})" \
        if len(names) < 4 else ", the best variant of each level taken"


def failures(report: dict) -> str:
    rows = [figures for row in rows_of(report).values() for figures in row.values()]
    failed = sum(sum((figures.get("failed") or {}).values()) for figures in rows)
    empty, sent = (sum(figures.get(key) or 0 for figures in rows) for key in ("empty", "requests"))
    said = [f"{failed} of {sent} requests failed"] * bool(failed) + [f"{empty} answers are empty"] * bool(empty)
    return f"{', '.join(said)}: look at that first." if said else ""


# ---- what was not measured ----
def not_measured(report: dict) -> list[str]:
    """What a reader might take for granted."""
    said, config, levels = [], report.get("config") or {}, list(rows_of(report))
    done, planned = report.get("units_done"), report.get("units_planned")
    if finite(done) and finite(planned) and done < planned:
        said.append(f"{planned - done} of {planned} units: the same command goes on.")
    if "plain" not in variants_of(report):
        said.append("Plain decoding: so there is no speed-up.")
    said += [f"How sure the speed-up at {streams([decision])} is: {decision.why.rstrip('.')}."
             for decision in decisions(report) if decision.word == UNKNOWN and decision.variant]
    if levels:
        said.append(f"Other numbers of streams than {listed(levels)}.")
    said += traffic(report, config) + answers(report, config)
    said += [f"{variant}: {why}" for variant, why in (report.get("left_out") or {}).items()]
    said += [f"Doctor, {name}: {why}" for name, why in ((report.get("doctor") or {}).get("unchecked") or {}).items()]
    said += [f"{name} is not drawn: {why}" for name, why in (report.get("not_drawn") or {}).items()]
    said.append("Share of time in draft and in verify: SGLang's HTTP API does not tell it; the cost of a verify step "
                "holds both.")
    return said


def traffic(report: dict, config: dict) -> list[str]:
    said, prompts = [], report.get("prompts") or {}
    if not config.get("request-rate"):
        said.append("Requests that come at a rate of their own: so many streams were kept busy all the time.")
    thinking = prompts.get("thinking") or {}
    modes = {"on", "off"} & set(thinking)
    said += [f"Answers with thinking {mode}." for mode in ("on", "off") if modes and mode not in modes]
    contexts = [name for found in about_variants(report).values() for name in found.get("by_context") or {}]
    if edges := [int(name.split()[-1]) for name in contexts if name.split()[-1].isdigit()]:
        said.append(f"Acceptance at contexts longer than {max(edges)} tokens.")
    return said


def answers(report: dict, config: dict) -> list[str]:
    said, rows = [], [figures for row in rows_of(report).values() for figures in row.values()]
    if finite(config.get("temperature")):
        said.append("Sampled answers: all were greedy (temperature 0)." if not config["temperature"] else
                    "Greedy answers, so whether the texts are equal: all were sampled at temperature "
                    f"{config['temperature']:g}.")
    if not config.get("check-answers"):
        said.append("Whether answers are right: only whether they are the same text, where they are greedy.")
    if not report.get("gpus"):
        said.append("Clocks and power limits of the GPUs: they are on another machine, or it has none.")
    if rows and not any(figures.get("joule_per_token") for figures in rows):
        said.append("Energy: the GPUs are on another machine, or their driver counts none.")
    if config.get("usd-per-hour") is None:
        said.append("Cost: no --usd-per-hour was given.")
    without = [name for name, found in about_variants(report).items() if not found.get("accept")]
    if without:
        said.append(f"Acceptance of {listed(without)}: the server's answers carry no speculative counts.")
    return said
