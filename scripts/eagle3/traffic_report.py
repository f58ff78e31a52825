"""traffic.py's figures in Markdown: arrivals at a rate, lengths of context, groups of prompts, drafters, goodput."""
from __future__ import annotations

from eagle3.report import markdown_table, milliseconds, number


def ratio(figures: dict) -> str:
    """A speed-up with its interval."""
    interval = figures.get("interval")
    return number(figures.get("speed_up"), "{:.2f}x") + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")


def kept(figures: dict) -> str:
    """Goodput: share and requests a second."""
    good = figures.get("goodput")
    return f"{good['share']:.0%}, {good['requests_s']:.2f}/s" if good else "-"


def difference(good: dict) -> str:
    """Of two shares, in points."""
    interval = good.get("interval")
    between = f" ({100 * interval[0]:+.0f} to {100 * interval[1]:+.0f})" if interval else ""
    return f"{100 * good['difference']:+.0f} points{between}" if "difference" in good else "-"


def accept_length(figures: dict) -> str:
    return number(figures["accept"] and figures["accept"]["accept_length"])


# ---- tables ----
def rates_table(rates: dict[str, dict]) -> str:
    rows = [["requests", "variant", "tok/s a stream", "speed-up", "TTFT p50/p95 ms", "ITL p50/p95 ms",
             "latency p50/p95 s", "in flight", "goodput", "accept_length", "failed"]]
    for rate, row in rates.items():
        for variant, f in row.items():
            latency, flying = f["latency_s"], f["in_flight"]
            rows.append([rate, variant, number(stream_speed(f), "{:,.1f}"), ratio(f),
                         milliseconds(f["ttft_s"], ["p50", "p95"], 0), milliseconds(f["itl_s"], ["p50", "p95"], 1),
                         f"{latency['p50']:.2f}/{latency['p95']:.2f}" if latency else "-", f"{flying:.1f}", kept(f),
                         accept_length(f), str(sum(f["failed"].values()))])
    return markdown_table(rows)


def stream_speed(figures: dict) -> float | None:
    """tok/s of one request: tokens over the time that requests were in flight."""
    return figures["tok_s"] and figures["tok_s"] / figures["in_flight"]


def contexts_table(contexts: dict[str, dict]) -> str:
    rows = [["context", "streams", "variant", "tok/s", "speed-up", "TTFT p50/p95 ms", "ITL p50/p95 ms",
             "accept_length", "break-even", "same text", "failed"]]
    for context, found in contexts.items():
        for level, row in found["levels"].items():
            for variant, f in row.items():
                text = f.get("same_text") or {"compared": 0}
                rows.append([context, level, variant, number(f["tok_s"], "{:,.1f}"), ratio(f),
                             milliseconds(f["ttft_s"], ["p50", "p95"], 0),
                             milliseconds(f["itl_s"], ["p50", "p95"], 1), accept_length(f),
                             number(f.get("break_even")),
                             f"{text['equal']}/{text['compared']}" if text["compared"] else "-",
                             str(sum(f["failed"].values()))])
    return markdown_table(rows)


def groups_table(groups: dict[str, list[dict]]) -> str:
    rows = [["streams", "source", "thinking", "turn", "requests", "variant", "tok/s a stream", "speed-up",
             "accept_length"]]
    for level, found in groups.items():
        for group in found:
            rows += [[level, group["source"], group["thinking"], str(group["turn"]), str(group["requests"]), variant,
                      number(f["tok_s"], "{:,.1f}"), ratio(f), number(f["accept_length"])]
                     for variant, f in group["variants"].items()]
    return markdown_table(rows)


def drafters_table(drafters: dict[str, dict]) -> str:
    rows = [["streams", "drafter", "against", "speed", "accept_length"]]
    for level, found in drafters.items():
        for name, f in found.items():
            accept = number(f["accept_difference"], "{:+.3f}")
            if f["accept_interval"]:
                accept += f" ({f['accept_interval'][0]:+.3f} to {f['accept_interval'][1]:+.3f})"
            rows.append([level, name, f["against"], ratio(f), accept])
    return markdown_table(rows)


def goodput_table(levels: dict[str, dict]) -> str:
    rows = [["streams", "variant", "goodput", "share beside plain's"]]
    rows += [[level, variant, kept(f), difference(f["goodput"])]
             for level, row in levels.items() for variant, f in row.items() if "goodput" in f]
    return markdown_table(rows)


# ---- sentences ----
def rate_verdict(row: dict[str, dict]) -> str:
    """To act on, about one rate."""
    said = []
    for name, f in row.items():
        if name != "plain" and f.get("speed_up"):
            low, high = f["interval"] or (0, 2)
            word = "answers come faster" if low > 1 else "answers come slower" if high < 1 else "undecided"
            said.append(f"{name}: {word} ({ratio(f)}{'' if f['interval'] else '; ' + str(f['no_interval'])})")
            if "difference" in f.get("goodput", ()):
                said.append(f"goodput {kept(f)} beside {kept(row['plain'])}: {difference(f['goodput'])}")
    return "; ".join(said) or "no baseline at this rate, so no speed-up"


def rate_remarks(rate: str, row: dict[str, dict]) -> list[str]:
    said = []
    for name, f in row.items():
        queue = f["queue"] or {"grew": False}
        if queue["grew"]:
            said.append(f"- {rate}, {name}: the queue grew, {queue['second_quarter']:.1f} in flight in the second "
                        f"quarter and {queue['last_quarter']:.1f} in the last: more than this server takes for long.")
        if f["late_s"] > 0.1:
            said.append(f"- {rate}, {name}: a request was sent {f['late_s']:.2f} s late: this client was the limit.")
    return said


def gpu_remarks(gpus: dict | None) -> list[str]:
    if not gpus:
        return []
    limits, clocks = gpus["power_limit_w"], gpus["sm_mhz"]
    said = (f"GPUs of this machine: {gpus['count']} x {', '.join(map(str, gpus['names']))}; power limit "
            f"{', '.join(f'{limit:.0f} W' for limit in limits) or 'not told'}; SM clock right after the units "
            + (", ".join(f"{name} {clock:,.0f}" for name, clock in clocks.items()) or "not told")
            + f" MHz of {', '.join(map(str, gpus['max_sm_mhz'])) or '-'}.")
    if gpus["held_back_by"]:
        said += f" Held back by: {', '.join(gpus['held_back_by'])}."
    said = [said]
    if clocks and max(clocks.values()) > 1.03 * min(clocks.values()):
        said.append("The clocks of the variants differ by more than 3 %: that is part of their speed-up.")
    if len(limits) > gpus["count"]:
        said.append("The power limits changed between units: the runs are no equal ones.")
    return said


def warm_up_remark(report: dict) -> str:
    config, kept, again = report["config"], report.get("not_emptied"), report.get("stood_still")
    return (f"Apart from the figures, before each unit: {config.get('warmup', 0)} short requests to warm up, and the "
            "server's cache of prompts emptied"
            + (f" (it refused before {kept} of {report['units_done']} units: their TTFT may be that of prompts that it "
               "knew)" if kept else "")
            + ". Each request was sent once; one that failed is counted, not retried."
            + (f" {again} of {report['units_done']} units were measured again, since the server had stood still in "
               "them (the log says how long)." if again else ""))


# ---- chapters ----
def traffic_tables(report: dict, with_groups: bool = True) -> list[tuple[str, str]]:
    """[(head, table)] of what was measured beside the levels; the groups' can be long."""
    found = [("Goodput", goodput_table(report["levels"]))] \
        if any("goodput" in f for row in report["levels"].values() for f in row.values()) else []
    for head, key, table in (("Requests that arrive", "rates", rates_table),
                             ("Length of context", "contexts", contexts_table),
                             ("Drafters", "drafters", drafters_table), ("Groups of prompts", "groups", groups_table)):
        if any(report[key].values()) and (with_groups or key != "groups"):
            found.append((head, table(report[key])))
    return found


def traffic_chapters(report: dict) -> list[str]:
    """Lines of report.md."""
    out = ["", warm_up_remark(report), *gpu_remarks(report["gpus"])]
    for head, table in traffic_tables(report):
        out += ["", f"## {head}", "", table]
        if head == "Requests that arrive":
            out += ["", "Poisson arrivals, the same for every variant. speed-up: of the tok/s that one request gets, "
                    "waiting included.", ""]
            out += [f"- {rate}: {rate_verdict(row)}" for rate, row in report["rates"].items()]
            out += [said for rate, row in report["rates"].items() for said in rate_remarks(rate, row)]
        if head == "Groups of prompts":
            out += ["", "tok/s a stream: tokens over latencies of the group's own requests, prefill included."]
    return out
