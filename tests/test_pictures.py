"""The pictures and the page of 05's report: what they show, of whatever a report holds, and that foreign text is text."""
import copy
import html.parser
import io
import json
import re
import unicodedata
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from eagle3 import charts, html_report, masking, svg
from eagle3.charts import Chart, Point, Series, extent, label, reach, steps_to
from eagle3.figures import level_figures, tok_s_interval
from eagle3.html_report import html_report as page_of
from eagle3.plots import draw_plots
from eagle3.summary import headline, not_measured
from eagle3.text_chart import SIGNS, text_chart, text_charts

SECRET = 'sk-"run"<key>&1'


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    monkeypatch.setattr(masking, "_hidden", set())


# ---- a report, made by hand ----
def accept(length=2.5, shares=(0.8, 0.5, 0.2)):
    return {"requests": 8, "verify_steps": 10, "correct_drafts": 15, "accept_length": length,
            "accept_by_position": list(shares)}


def figures(tok_s, speed=None, interval=None, **more):
    times = {"p50": 0.1, "p95": 0.2, "p99": 0.3}
    return {"requests": 8, "failed": {}, "finish": {"stop": 8}, "empty": 0, "output_tokens": 80, "tok_s": tok_s,
            "tok_s_repeats": [tok_s - 1, tok_s + 1] if tok_s else [], "tok_s_spread": 0.02, "in_flight": 1.0, "held": True,
            "latency_s": times, "cached_share": 0.0, "retracted": 0, "ttft_s": times, "itl_s": times,
            "joule_per_token": None, "watts": None, "accept": accept() if speed else None, "speed_up": speed,
            "interval": interval, "no_interval": None if interval else "measured once", "break_even": 1.2} | more


def a_report(levels, variants=("speculative",), **more):
    """levels: {level: {variant: (speed_up, interval)}}; plain makes 100 tok/s at each."""
    rows = {level: {"plain": figures(100.0), **{name: figures(100 * speed, speed, interval)
                                                for name, (speed, interval) in row.items()}}
            for level, row in levels.items()}
    check = {"predicted": 2.4, "served": 2.5, "ratio": 1.04, "answers": 8, "of_validation": True, "equal_answers": 3,
             "predicted_by_position": [0.7, 0.4, 0.1]}
    about = {"accept": accept(), "by_source": {"chat": accept(2.0), "code": accept(3.0)},
             "by_thinking": {"on": accept()}, "by_context": {"<= 128": accept(3.0), "<= 256": accept(2.0)},
             "prediction": check}
    server = {"version": "0.5.23", "model_path": "/models/Kimi", "tp_size": 8}
    return {"levels": rows, "variants": {name: copy.deepcopy(about) for name in variants},
            "servers": {"plain": server, **{name: server for name in variants}},
            "config": {"temperature": 0.0, "concurrency": [1, 8], "max-tokens": 64, "launch": False, "limit": None},
            "prompts": {"count": 8, "sources": {"chat": 4, "code": 4}, "thinking": {"on": 8}},
            "rates": {}, "contexts": {}, "groups": {}, "drafters": {}, "gpus": None, "verdict": {}, "units_planned": 8, "units_done": 8, "not_drawn": {}} | more


PAYS = {"1": {"speculative": (1.5, [1.4, 1.6])}, "8": {"speculative": (1.2, [1.1, 1.3])},
        "64": {"speculative": (0.5, [0.4, 0.6])}}


def many(variants=9, levels=14):
    rows = {str(2 ** n): {f"steps{k}": (2 - 0.1 * abs(k - 4) - 0.1 * n, [1.0, 2.0]) for k in range(variants)}
            for n in range(levels)}
    return a_report(rows, [f"steps{k}" for k in range(variants)])


def traffic():
    """Arrivals, goodput, lengths of context; simulated servers."""
    kept = {"goodput": {"share": 0.9, "requests_s": 2.0}}
    rates = {"2/s": {"plain": figures(9.0, **kept), "speculative": figures(12.0, 1.3, [1.2, 1.4], **kept)}}
    contexts = {name: {"levels": {level: {"plain": figures(9.0), "speculative": figures(9 * speed, speed, [0.5, 2.0])}
                                  for level in ("1", "8")}} for name, speed in (("1k", 1.4), ("32k", 0.8))}
    rows = [{"level": level, "context": None, "steps": steps, "most": steps + 1, "needs": needs,
             "pays_from": needs if needs <= steps + 1 else None}
            for level, steps, needs in ((1, 1, 1.2), (64, 1, 2.4), (1, 3, 1.5), (64, 3, 99.0))]
    return a_report(PAYS, rates=rates, contexts=contexts, break_even={"rows": rows, "checks": []},
                    verdict={"1": "1 step pays from accept_length 1.20 on", "64": "never"})


# ---- what they show ----
def test_the_charts_hold_the_reports_figures():
    found = {chart.name: chart for chart in charts.charts(a_report(PAYS))}
    assert list(found) == ["tok_s", "speed_up", "acceptance", "by_source", "by_context"]
    plain, fast = found["tok_s"].series
    assert (plain.name, plain.points["8"], fast.points["8"]) == ("plain", Point(100.0, 99.0, 101.0), Point(120.0, 119.0, 121.0))
    assert found["tok_s"].note == "Bars: the slowest and the fastest run."
    speed, = found["speed_up"].series
    assert speed.points == {"1": Point(1.5, 1.4, 1.6), "8": Point(1.2, 1.1, 1.3), "64": Point(0.5, 0.4, 0.6)}
    assert found["speed_up"].line == (1.0, "break-even") and found["speed_up"].ticks == ["1", "8", "64"]
    served, predicted = found["acceptance"].series
    assert predicted.dotted and [at.value for at in served.points.values()] == [0.8, 0.5, 0.2]
    assert [at.value for at in predicted.points.values()] == [0.7, 0.4, 0.1] and served.colour == predicted.colour
    assert {name: at.value for name, at in found["by_source"].series[0].points.items()} == {"chat": 2.0, "code": 3.0}
    assert found["by_context"].ticks == ["<= 128", "<= 256"]


def test_an_interval_of_tok_s_stands_before_the_range_of_its_runs():
    report = a_report(PAYS)
    report["levels"]["1"]["plain"]["tok_s_interval"] = [90.0, 112.0]
    chart = charts.tok_s(report)
    assert chart.series[0].points["1"] == Point(100.0, 90.0, 112.0) and chart.note == "Bars: 95 % interval."


def test_of_many_variants_the_fastest_at_some_level_are_drawn_and_the_rest_counted():
    report = many()
    report["levels"]["1"]["steps8"]["tok_s"] = 999.0  # slow but there
    chart = charts.tok_s(report)
    names = [of.name for of in chart.series]
    assert names[0] == "plain" and len(names) == charts.MOST_LINES and {"steps4", "steps8"} < set(names)
    assert chart.note.endswith("3 more variants in the tables.")
    assert len({of.colour for of in chart.series}) == len(names) and chart.series[0].colour == 0
    assert len(charts.by_source(report).series) == charts.MOST_BARS


def test_axes_end_at_a_round_number_beyond_all_that_is_shown():
    assert steps_to(104) == [0, 25, 50, 75, 100, 125] and steps_to(1.5) == [0, 0.5, 1.0, 1.5]
    assert steps_to(0.0031)[-1] >= 0.0031 and len(steps_to(7e9)) <= 6
    points = {"1": Point(1.2, 1.1, 1.3), "8": Point(0.9, 0.1, 50.0)}
    chart = Chart("c", "t", "x", "y", ["1", "8"], [Series("a", points)], line=(1.0, "break-even"))
    assert 1.3 < extent(chart) < 4 and reach(chart) >= extent(chart)  # an interval that knows nothing is cut
    below = Chart("c", "t", "x", "y", ["1"], [Series("a", {"1": Point(0.3)})], line=(1.0, "break-even"))
    assert extent(below) > 1
    nothing = Chart("c", "t", "x", "y", ["1"], [Series("a", {"1": Point(0.0)})])
    assert extent(nothing) == 1.0 and reach(nothing) >= 1.0


# ---- one sentence ----
@pytest.mark.parametrize("levels, said", [
    (PAYS, "Worth serving at 1 and 8 streams: 1.20x to 1.50x the output of plain decoding. Slower than plain decoding at "
           "64 streams (0.50x (95 % interval 0.40 to 0.60)): serve plain there."),
    ({"1": {"speculative": (1.5, [1.4, 1.6])}}, "Worth serving at 1 stream: 1.50x (95 % interval 1.40 to 1.60) the output "
                                                "of plain decoding."),
    ({"1": {"speculative": (0.5, [0.4, 0.6])}, "8": {"speculative": (0.4, [0.3, 0.5])}},
     "Not worth serving at any level measured. Slower than plain decoding at 1 and 8 streams (0.40x to 0.50x): serve plain "
     "there."),
    ({"8": {"speculative": (1.1, [0.9, 1.3])}}, "Undecided at 8 streams (1.10x (95 % interval 0.90 to 1.30)): its interval "
                                                "holds 1.00x. Measure more prompts or repeats."),
    ({"8": {"speculative": (1.1, None)}}, "No verdict at 8 streams (1.10x): measured once."),
    ({"1": {"a": (1.2, [1.1, 1.3]), "b": (1.3, [1.2, 1.4])}}, "Worth serving at 1 stream: 1.30x (95 % interval 1.20 to "
                                                              "1.40) the output of plain decoding, with b."),
    ({}, "No verdict: nothing has been measured yet.")])
def test_the_headline_says_whether_where_and_how_much(levels, said):
    assert headline(a_report(levels)) == said


def test_the_headline_tells_of_failures_and_of_what_is_no_comparison():
    report = a_report(PAYS)
    report["levels"]["8"]["speculative"] |= {"failed": {"http 500": 2, "cut": 1}, "empty": 4}
    assert headline(report).endswith(" 3 of 48 requests failed, 4 answers are empty: look at that first.")
    for row in report["levels"].values():
        del row["plain"]
        row["speculative"]["speed_up"] = None
    assert headline(report).startswith("No verdict at 1, 8 and 64 streams: plain decoding was not measured.")
    assert "Plain decoding: so there is no speed-up." in not_measured(report)


def test_what_was_not_measured_is_said():
    said = "\n".join(not_measured(a_report(PAYS, units_done=5, not_drawn={"tok_s.png": "no matplotlib"},
                                           left_out={"steps3": "its server died"})))
    for words in ("3 of 8 units", "streams than 1, 8 and 64", "Sampled answers", "thinking off", "longer than 256 tokens",
                  "steps3: its server died", "tok_s.png is not drawn: no matplotlib", "Energy", "Cost"):
        assert words in said, words


# ---- whatever a report holds ----
def paths_of(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths_of(value[key], (*path, key))


def without(report, path, put):
    """A copy in which what stands there is gone, or something else."""
    report = copy.deepcopy(report)
    inner = report
    for key in path[:-1]:
        inner = inner[key]
    if put is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = put
    return report


def test_a_report_that_lacks_anything_is_shown_as_far_as_it_goes(monkeypatch):
    """Every key of it gone, and null, one at a time."""
    monkeypatch.setattr(html_report, "log", lambda said: None)
    report = a_report({"1": {"speculative": (1.5, [1.4, 1.6])}})
    paths = [path for path in paths_of(report) if path]
    assert len(paths) > 100
    for path in paths:
        for put in (KeyError, None):
            page = page_of(without(report, path, put))
            assert 'class="headline"' in page and page.endswith("</html>\n"), path
            text_charts(without(report, path, put), io.StringIO())
            if len(path) == 1:  # a whole part of it: no section stumbles over that
                assert "not made" not in page, path
    assert "nothing has been measured yet" in page_of({})


@pytest.mark.parametrize("report", [
    a_report(PAYS), many(), many(1, 1), a_report({}), {}, traffic(),
    a_report({"1": {"speculative": (float("nan"), [float("nan"), float("inf")])}}),
    without(a_report(PAYS), ("variants", "speculative", "by_source"), {f"source {n}": accept(n + 1) for n in range(60)})])
def test_every_picture_is_well_formed_and_keeps_within_its_frame(report, monkeypatch):
    monkeypatch.setattr(html_report, "log", pytest.fail)
    page = page_of(report)
    assert "not made" not in page
    for drawn in re.findall(r"<svg viewBox=.*?</svg>", page):
        assert "nan" not in drawn and "inf" not in drawn
        root = ElementTree.fromstring(drawn)
        wide, high = map(float, root.get("viewBox").split()[2:])
        for text in root.iter("text"):
            room = len(text.text) * svg.LETTER
            x, y = float(text.get("x")), float(text.get("y"))
            first = x - {"start": 0, "middle": room / 2, "end": room}[text.get("text-anchor")]
            assert text.get("transform") or 0 <= first + 2 and first + room <= wide + 2, (text.text, x)
            assert 0 <= y <= high
        for bar in root.iter("rect"):
            assert float(bar.get("x")) + float(bar.get("width")) <= wide
        for path in root.iter("path"):
            assert all(0 <= float(y) <= high for y in re.findall(r"[ML]-?[\d.]+,(-?[\d.]+)", path.get("d"))
                       if "axis" in path.get("class") or "curve" in path.get("class"))


def test_a_value_stands_where_the_axis_says():
    drawn = ElementTree.fromstring(svg.curves(charts.speed_up(a_report(PAYS))))
    line = next(path for path in drawn.iter("path") if path.get("class") == "line")
    height = float(re.search(r",([\d.]+)", line.get("d"))[1])
    at = {text.text: float(text.get("y")) - 4 for text in drawn.iter("text") if text.get("text-anchor") == "end"}
    assert at["1"] == pytest.approx(height, abs=0.1)
    marks = [float(group.get("transform").split()[1].rstrip(")")) for group in drawn.iter("g") if group.get("transform")]
    scale = (at["0"] - at["1"])
    assert marks == pytest.approx([at["0"] - scale * value for value in (1.5, 1.2, 0.5)], abs=0.1)


def test_arrivals_contexts_and_simulated_servers_have_their_pictures(tmp_path):
    found = {chart.name: chart for chart in charts.charts(traffic())}
    assert list(found) == list(charts.CHARTS)
    assert found["rates"].series[0].points == {"2/s": Point(1.3, 1.2, 1.4)}
    assert [(of.name, of.points["2/s"].value) for of in found["goodput"].series] == [("plain", 0.9), ("speculative", 0.9)]
    assert [of.name for of in found["contexts"].series] == ["speculative, 1 streams", "speculative, 8 streams"]
    assert [at.value for at in found["contexts"].series[0].points.values()] == [1.4, 0.8]
    one, three = found["break_even"].series
    assert one.points == {"1": Point(1.2), "64": Point(2.4, beyond=True)} and list(three.points) == ["1"]  # 99: far off
    drawn, failed = draw_plots(traffic(), tmp_path)
    assert not failed and len(drawn) == len(found)
    assert headline(traffic()) == "At 1 stream: 1 step pays from accept_length 1.20 on. At 64 streams: never."
    page = page_of(traffic())
    assert "What to do at each level" not in page and svg.curves(found["break_even"]).count("hollow") == 1


def test_a_level_that_was_not_held_is_marked():
    report = a_report(PAYS)
    report["levels"]["8"]["plain"] |= {"held": False, "in_flight": 5.2}
    assert "Fewer streams in flight than asked for: 8." in charts.speed_up(report).note
    assert "8 (held 5.2)" in page_of(report)
    assert "<td>8 (not held)</td>" in page_of(report) and "<td>1</td>" in page_of(report)  # where it says what to do


def test_chapters_of_the_markdown_report_are_on_the_page():
    page = page_of(a_report(PAYS), CHAPTERS)
    for part in ("<p><strong>Bold</strong> words.</p>", "<h2>Goodput</h2>", "<th>a</th><th>b</th>", "<td>1</td><td>2</td>",
                 "<li>an item</li>", "<pre>python3 -m sglang</pre>", "<h3>A part</h3>"):
        assert part in page, part
    assert "the title" not in page and "tok_s.png" not in page


# ---- foreign text ----
class Reader(html.parser.HTMLParser):
    """The tags, attributes and words of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.words = set(), set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.words += [value or "" for _, value in attrs]

    def handle_data(self, data):
        self.words.append(data)


EVIL = '</style></svg><script src="http://x/"></script><img src=x onerror=alert(1)>"\'&amp;\u202e\x1b[31m\x00'


def poisoned(value, poison, keys=()):
    """Every text of a report, and every key that is somebody's name, followed by it."""
    if isinstance(value, str):
        return value + poison
    if isinstance(value, list):
        return [poisoned(item, poison) for item in value]
    if isinstance(value, dict):
        named = keys and keys[0]
        return {key + poison if named else key: poisoned(item, poison, NAMED.get(key, keys[1:] if named else ()))
                for key, item in value.items()}
    return value


NAMED = {"servers": (True,), "levels": (False, True), "by_source": (True,), "by_context": (True,), "sources": (True,),
         "failed": (True,), "left_out": (True,), "not_drawn": (True,), "sweep": (True,), "thinking": (True,)}


CHAPTERS = ["", "**Bold** words.", "", "## Goodput", "", "| a | b |\n|---|---|\n| 1 | 2 |", "- an item\n- another", "",
            "    python3 -m sglang", "### A part", "# the title", "![tok_s](tok_s.png)"]


def full_report():
    doctor = {"summary": "one cause", "facts": ["a fact"], "unchecked": {"vocabulary": "not there"},
              "findings": [{"cause": "layers", "finding": "shifted", "remedy": "export"}]}
    return a_report(PAYS, doctor=doctor, left_out={"steps3": "died"}, not_drawn={"tok_s.png": "no room"},
                    sweep={"1": {"variant": "steps3", "tok_s": 9.0, "command": "python3 -m sglang"}},
                    commands={"plain": "python3 -m sglang"}, gpus={"names": ["RTX"], "count": 8})


def test_foreign_text_is_shown_as_text_and_nothing_is_loaded():
    calm = Reader(page_of(full_report(), CHAPTERS))
    page = page_of(poisoned(full_report(), EVIL), poisoned(CHAPTERS, EVIL))
    found = Reader(page)
    assert page.count("&lt;script") > 20
    assert found.tags == calm.tags and found.attributes == calm.attributes
    assert not {"script", "img", "link", "iframe", "object"} & found.tags
    assert not [name for name in found.attributes if name.startswith("on") or name in ("src", "href", "srcset")]
    assert "url(" not in html_report.STYLE + svg.STYLE and "@import" not in html_report.STYLE + svg.STYLE
    assert "default-src 'none'" in found.words[found.words.index("Content-Security-Policy") + 1]
    assert not [sign for sign in page if unicodedata.category(sign) in ("Cc", "Cf") and sign != "\n"]


def test_no_secret_is_on_the_page_or_in_the_log_in_any_spelling():
    masking.hide(SECRET)
    report = poisoned(full_report(), " " + SECRET)
    page = page_of(report, poisoned(CHAPTERS, " " + SECRET))
    assert SECRET not in html.unescape(page) and page.count("***") > 20
    for part in ("sk-", "key&gt;"):
        assert part not in page
    for stream in (io.StringIO(), io.TextIOWrapper(io.BytesIO(), encoding="ascii")):
        assert "sk-" not in text_charts(report, stream)


def test_names_are_one_line_and_lose_their_middle():
    assert label("a\nb\u202ec") == "a\\nb\\u202ec"
    assert label("x" * 50, 20) == "x" * 13 + "…" + "x" * 6 and label("short", 20) == "short"
    masking.hide("secret-value")
    assert label("my secret-value") == "my ***"


# ---- a terminal ----
@pytest.mark.parametrize("report", [a_report(PAYS), many(), poisoned(full_report(), "摘要" * 30), a_report({})])
@pytest.mark.parametrize("columns", [None, 72])
def test_text_charts_fit_a_terminal_and_its_encoding(report, columns, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    for encoding in ("utf-8", "ascii", "latin-1", "no-such-thing"):
        stream = type("Stream", (), {"encoding": encoding})()
        said = text_charts(report, stream)
        for line in said.splitlines():
            room = sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in line)
            assert room <= (columns or 100), line
        assert encoding == "utf-8" or said.isascii()
        assert max(map(len, (block.splitlines() for block in said.split("\n\n")))) <= 20
        assert ("●" in said) == (encoding == "utf-8" and bool(report["levels"]))


def test_a_text_chart_by_hand():
    chart = Chart("c", "Speed-up", "streams", "x", ["1", "64"],
                  [Series("a", {"1": Point(2.0, 1.0, 3.0), "64": Point(0.5)})], "{:.2f}x", line=(1.5, "even"), top=4.0)
    assert text_chart(chart, SIGNS["ascii"], 60).splitlines() == [
        "Speed-up   | 1.50x even",
        "streams         x  0                                   4.00x",
        "      1  a  2.00x  " + " " * 10 + "[---------o---------]",
        "     64  a  0.50x  " + " " * 5 + "o" + " " * 9 + "|"]


# ---- files ----
@pytest.mark.drawn
def test_pngs_of_odd_names_are_drawn(tmp_path):
    report = poisoned(full_report(), "$\\frac{1}$ 摘要\x00")
    drawn, failed = draw_plots(report, tmp_path)
    assert not failed and drawn == [f"{chart.name}.png" for chart in charts.charts(report)] and len(drawn) == 5
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_a_section_that_cannot_be_made_costs_itself_alone(monkeypatch):
    said = []
    monkeypatch.setattr(html_report, "log", said.append)
    monkeypatch.setattr(html_report, "charts", lambda report: 1 / 0)
    page = page_of(a_report(PAYS))
    assert "pictures: not made (ZeroDivisionError: division by zero)" in page and "What to do at each level" in page
    assert len(said) == 1 and "report.html lacks `pictures`" in said[0]


def test_the_page_holds_the_conditions_and_the_command(tmp_path):
    page = html.unescape(page_of(full_report()))
    assert "python3 05_benchmark.py --temperature 0.0 --concurrency 1 8 --max-tokens 64" in page
    assert "/models/Kimi" in page and "Hardware: 8 x RTX." in page and json.dumps("--launch")[1:-1] not in page


# ---- the interval of tok/s ----
def test_the_interval_of_tok_s_holds_the_truth_in_nearly_all_of_many_measurements():
    """Prompts of different lengths, two runs that differ by 3 %."""
    held, draw, prompts = 0, np.random.default_rng(5), 24
    for _ in range(60):
        seconds, row = draw.lognormal(0, 0.2, prompts), []
        for variant in ("plain", "speculative"):
            row.append([])
            for repeat in range(2):
                pace = np.exp(draw.normal(0, 0.03))
                requests = [{"id": f"p{n}", "completion_tokens": 10, "latency_s": pace * s, "times_s": [0.1 * pace],
                             "counts": [10], "finish": "stop", "output_ids": [1] * 10, "spec": None}
                            for n, s in enumerate(seconds)]
                row[-1].append({"variant": variant, "level": 1, "repeat": repeat, "watts": None, "requests": requests,
                                "wall_s": sum(one["latency_s"] for one in requests)})
        runs = [level_figures(units)["tok_s_repeats"] for units in row]
        low, high = tok_s_interval(row[1], runs[1], runs)
        held += low <= 10 / np.exp(0.02) <= high  # the mean of that lognormal
    assert held >= 54
    assert tok_s_interval(row[1][:1], runs[1][:1], [runs[0], runs[1][:1]]) is None
