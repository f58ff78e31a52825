"""05 under traffic as it is: drafters beside each other, requests that arrive, later turns, lengths of context; and
what tells whether its figures are honest ones.
"""
import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import preloaded
from conftest import ROOT, TINY_KIMI, free_port, load_script, run_here, run_script
from eagle3 import gpu_state, load
from eagle3.bench_prompts import about_requests, load_prompts, render, request_ids
from eagle3.contexts import Padding, context_tokens
from eagle3.figures import level_figures, pooled, speed_up
from eagle3.load import silence
from eagle3.measuring import stood_still
from eagle3.report import level_remarks, verdict
from eagle3.servers import ServerGone
from eagle3.stage import UserError
from eagle3.tokens import load_tokenizer
from eagle3.traffic import (Slo, arrival_figures, beside_the_first, goodput, goodput_difference, gpu_report, group_rows,
                            per_request, queue)
from eagle3.traffic_report import gpu_remarks, rate_verdict
from eagle3.variants import drafter_variants
from paced_server import Paced
from test_benchmark import answer, killed_at, make_drafter, prompt_args, workplace  # noqa: F401
from test_benchmark_faults import flags, made_up, pair, report_of, rows

bench = load_script("05_benchmark")


COMPARISONS = 50  # simulated; configs/README.md has the figures of 400


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]


def texts(folder: Path, count: int, **more) -> Path:
    """A file of prompts in words."""
    path = folder / "texts.jsonl"
    words = ["lists", "strings", "loops", "modules", "classes", "files", "sets", "errors"]
    path.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"Question {n}: what are {words[n % 8]} for? " * 3} | more)
                            + "\n" for n in range(count)))
    return path


# ---- are the intervals honest ----
@pytest.mark.parametrize("truth, drift, repeats", [(1.0, 0.0, 2), (1.0, 0.1, 2), (1.3, 0.0, 2), (0.8, 0.0, 4)])
def test_the_interval_holds_the_truth_in_nearly_all_of_many_comparisons(truth, drift, repeats):
    """Runs that differ by 3 %, requests by 20 %; a machine that slows down by `drift` in all, the
    variants measured in turned order.
    """
    random, held = np.random.default_rng(11), 0
    for trial in range(COMPARISONS):
        runs = np.exp(random.normal(0, 0.03, (2, repeats)))
        turns = list(itertools.chain.from_iterable(
            [(0, r), (1, r)] if r % 2 == 0 else [(1, r), (0, r)] for r in range(repeats)))
        for at, (side, repeat) in enumerate(turns):
            runs[side, repeat] *= 1 + drift * at / (len(turns) - 1)
        plain = made_up(runs[0], spread=0.2, seed=3 + trial)
        other = made_up(runs[1], spread=0.2, seed=3 + trial, speed=100.0 * truth)
        low, high = speed_up(plain, other)["interval"]
        held += low <= truth <= high
    assert held >= 0.9 * COMPARISONS, held


def test_the_spread_between_runs_and_a_level_that_was_not_held_are_said():
    """Runs of 100 and 110 tok/s; 4 streams of which 2 were in flight on average."""
    def unit(repeat, wall, level=4):
        record = answer("a", list(range(100)), times=[0.1, wall])
        return {"variant": "plain", "level": level, "repeat": repeat, "wall_s": wall, "watts": None,
                "requests": [record, {**answer("b", [1], times=[wall]), "completion_tokens": 0, "counts": [0]}]}

    figures = level_figures([unit(0, 1.0), unit(1, 100 / 110)])
    assert figures["tok_s_repeats"] == pytest.approx([100, 110]) and figures["tok_s_spread"] == pytest.approx(10 / 105)
    assert figures["in_flight"] == pytest.approx(2) and figures["held"] is False
    said = level_remarks("4", "plain", figures, "")
    assert said[0] == "- 4 stream(s), plain: tok/s of its runs: 100.0, 110.0, 9.5% apart."
    assert "not held: 2.0 requests in flight on average" in said[1]
    row = {"plain": figures, "speculative": figures | {"speed_up": 1.5, "interval": [1.4, 1.6]}}
    assert "serve it" in verdict(row) and verdict(row).count("not held: 2.0 requests in flight") == 2
    assert level_figures([unit(0, 1.0, 2)])["held"] is True and level_figures([unit(0, 1.0, "2/s")])["held"] is None
    # what a failed request took counts as in flight, too
    failed = unit(0, 1.0, 3)
    failed["requests"].append({"id": "c", "error": "timeout", "message": "", "spent_s": 1.0})
    assert level_figures([failed])["in_flight"] == pytest.approx(3)


def test_what_a_server_took_back_is_counted():
    meta = {"prompt_tokens": 1, "completion_tokens": 1, "finish_reason": {"type": "stop"}, "num_retractions": 2}

    class Session:
        def post(self, url, data):
            class Response:
                status = 200
                content = SimpleNamespace(iter_any=lambda: chunks())

                async def __aenter__(self):
                    return self

                async def __aexit__(self, *_):
                    pass

            async def chunks():
                yield b"data: " + json.dumps({"output_ids": [5], "meta_info": meta}).encode() + b"\n\n"
            return Response()

    record = asyncio.run(load.stream_answer(Session(), "", b"", False))
    assert record["retracted"] == 2
    units = [{"variant": "x", "level": 1, "repeat": 0, "wall_s": 1.0, "watts": None, "requests": [record]}]
    assert "took 2 requests back" in " ".join(level_remarks("1", "x", level_figures(units), ""))


def gpu(sm, limit=700.0, why=()):
    return {"name": "NVIDIA H200", "power_limit_w": limit, "max_sm_mhz": 1980, "sm_mhz": sm, "memory_mhz": 3201,
            "temperature_c": 50, "held_back_by": list(why)}


def test_clocks_and_power_limits_of_the_gpus_are_noted(monkeypatch):
    nvml = gpu_state.pynvml
    told = {"nvmlDeviceGetName": lambda h: b"NVIDIA H200", "nvmlDeviceGetEnforcedPowerLimit": lambda h: 700_000,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda h: 4 | 1,
            "nvmlDeviceGetMaxClockInfo": lambda h, kind: 1980,
            "nvmlDeviceGetClockInfo": lambda h, kind: 1755 if kind == nvml.NVML_CLOCK_SM else 3201}
    for name, function in told.items():
        monkeypatch.setattr(nvml, name, function)

    def none(*_):
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(nvml, "nvmlDeviceGetTemperature", none)
    assert gpu_state.look([0]) == [gpu(1755, why=["power limit"]) | {"temperature_c": None}]
    units = [{"variant": name, "gpus": [gpu(clock, why=why), gpu(clock)]}
             for name, clock, why in (("plain", 1700, ()), ("speculative", 1800, ["power limit"]))]
    found = gpu_report([*units, {"variant": "plain"}])  # a unit of an older report has none
    assert found["count"] == 2 and found["sm_mhz"] == {"plain": 1700, "speculative": 1800}
    said = gpu_remarks(found)
    assert "2 x NVIDIA H200; power limit 700 W; SM clock right after the units plain 1,700, speculative 1,800 MHz of " \
        "1980. Held back by: power limit." in said[0] and "differ by more than 3 %" in said[1] and len(said) == 2
    changed = gpu_remarks(gpu_report([{"variant": "plain", "gpus": [gpu(1700, limit)]} for limit in (700.0, 500.0)]))
    assert "power limits changed" in changed[1]
    assert gpu_report([{"variant": "plain", "gpus": []}]) is None and gpu_remarks(None) == []


@pytest.mark.gpu
def test_a_gpu_says_what_it_is_held_to():
    found = gpu_state.look(gpu_state.gpus())
    assert found and all(gpu["name"] and gpu["sm_mhz"] > 0 and gpu["power_limit_w"] > 0 for gpu in found)


# ---- a server that stands still ----
def test_the_longest_silence_by_hand():
    def request(start, times):
        return {"start_s": start, "times_s": times, "latency_s": times[-1]}

    assert silence([]) == silence([{"error": "no answer before"}]) == 0
    assert silence([request(1.0, [0.5, 2.0]), request(1.2, [1.0, 1.5])]) == pytest.approx(0.7)  # heard at 1.5, 2.2, 2.7, 3
    assert silence([request(0.0, [1.0]), request(5.0, [0.5])]) == pytest.approx(1.0)  # in between none was in flight
    assert silence([request(0.0, [1.0]), {"start_s": 0.5, "error": "timeout", "spent_s": 9.0}]) == pytest.approx(8.5)
    # one is sent as another is answered: from then on it is waited for
    assert silence([request(0.0, [1.0]), request(1.0, [3.0])]) == pytest.approx(3.0)


def test_a_unit_in_which_the_server_stood_still_is_measured_again(tmp_path, monkeypatch, capsys):
    """A stall of the first batch, as of kernels that are compiled then, is no property of the variant that met it."""
    monkeypatch.setattr("eagle3.measuring.STANDSTILL_S", 0.5)
    plain, fast = pair()
    asked = []

    def answer(ids):
        asked.append(ids)
        if len(asked) == 3:  # two are the warm-up's
            time.sleep(1.5)
        return [7] * 8

    plain.answer = answer
    with plain, fast:
        assert not bench.main([*flags(plain, fast, rows(tmp_path), tmp_path / "r"), "--warmup", "2", "--concurrency", "1"])
    units = [json.loads(line) for line in (tmp_path / "r/raw.jsonl").read_text().splitlines() if '"kind":"unit"' in line]
    first = [unit["first_try"] for unit in units if "first_try" in unit]
    assert len(first) == 1 and first[0]["silent_s"] > 1.4 and units[0]["first_try"] == first[0] and units[0]["wall_s"] < 1.4
    assert "note: plain c1 r0: for 1.5 of" in capsys.readouterr().out
    assert report_of(tmp_path / "r")["stood_still"] == 1
    assert "1 of 4 units were measured again" in (tmp_path / "r/report.md").read_text()


def test_prompts_that_take_long_to_read_are_no_standstill():
    requests = [{"start_s": 0.0, "times_s": [4.0, 4.5], "latency_s": 4.5}]
    result = {"wall_s": 4.5, "warmup": {"silent_s": 3.9}}
    assert not stood_still(requests, result) and stood_still(requests, result | {"warmup": {"silent_s": 0.1}})
    assert not stood_still(requests, result | {"warmup": {"silent_s": 0.1}, "wall_s": 60.0})  # little of all


# ---- several drafters ----
def test_drafters_are_called_by_the_end_of_their_path_that_tells_them_apart(tmp_path):
    a, b = (make_drafter(tmp_path / name / "best", range(9)) for name in ("output_a", "output_b"))
    c = make_drafter(tmp_path / "c", range(9))
    assert list(drafter_variants([a])) == ["speculative"] and drafter_variants([]) == {}
    assert list(drafter_variants([a, b])) == ["output_a-best", "output_b-best"]
    assert list(drafter_variants([a, c])) == ["best", "c"]
    plain = make_drafter(tmp_path / "plain", range(9))
    assert list(drafter_variants([plain, c]))[0].endswith("-plain")
    with pytest.raises(UserError, match="stands there twice"):
        drafter_variants([a, tmp_path / "output_b" / ".." / "output_a" / "best"])
    with pytest.raises(UserError, match="holds no config.json"):
        drafter_variants([a, tmp_path])


def drafted(variant: str, correct: list[int], pace: float = 1.0) -> list[dict]:
    """Two runs of prompts with so many right drafts in 10 verify steps each."""
    def unit(repeat):
        requests = [answer(f"p{n}", list(range(11 + right)), verify=10, correct=right, histogram=[10],
                           times=[0.1, pace * (1 + n)]) for n, right in enumerate(correct)]
        return {"variant": variant, "level": 1, "repeat": repeat, "wall_s": sum(r["latency_s"] for r in requests),
                "watts": None, "requests": requests}
    return [unit(0), unit(1)]


def test_of_two_drafters_the_difference_is_paired():
    """Prompts from easy to hard, each of which gains three drafts: so does the whole, within nothing."""
    first = list(range(0, 24, 3))
    of = {"plain": drafted("plain", first), "a": drafted("a", first), "b": drafted("b", [n + 3 for n in first], 0.5)}
    found = beside_the_first(of, ["a", "b"])["b"]
    assert found["against"] == "a" and found["accept_difference"] == pytest.approx(0.3)
    assert found["accept_interval"] == pytest.approx([0.3, 0.3])
    tokens = 8 * 11 + sum(first)
    assert found["speed_up"] == pytest.approx(2 * (tokens + 24) / tokens) and found["interval"][0] > 1
    assert beside_the_first(of, ["b", "a"])["a"]["accept_difference"] == pytest.approx(-0.3)
    assert beside_the_first({"plain": of["plain"]}, ["a", "b"]) == {}  # not measured yet


def test_two_drafters_in_one_report(tmp_path, capsys):
    a, b = (make_drafter(tmp_path / name, range(9)) for name in ("first", "second"))
    both = dict(model_path=str(TINY_KIMI), speculative_algorithm="EAGLE3", speculative_num_steps=3,
                speculative_eagle_topk=1)
    servers = (Paced(0.002, model_path=str(TINY_KIMI)), Paced(0.004, accept=1, speculative_draft_model_path=str(a), **both),
               Paced(0.001, accept=2, speculative_draft_model_path=str(b), **both))
    with servers[0] as plain, servers[1] as slow, servers[2] as fast:
        argv = ["--base-url", slow.url, fast.url, "--baseline-url", plain.url, "--draft-path", a, b, "--prompts",
                rows(tmp_path, 8), "--concurrency", 1, "--max-tokens", 8, "--warmup", 0, "--output-dir", tmp_path / "r"]
        argv = list(map(str, argv))
        assert not bench.main(argv)
        found = report_of(tmp_path / "r")
        assert list(found["levels"]["1"]) == ["plain", "first", "second"]
        beside = found["drafters"]["1"]["second"]
        assert beside["against"] == "first" and 1.3 < beside["speed_up"] < 5 and beside["interval"]
        assert beside["accept_difference"] == pytest.approx(7 / 4 - 1) and beside["accept_interval"][0] > 0.5
        # each is held against its own prediction
        assert {name: about["prediction"]["served"] for name, about in found["variants"].items()} == {
            "first": 1, "second": pytest.approx(7 / 4)}
        out = capsys.readouterr().out
        assert "Drafters" in out and "against" in (tmp_path / "r" / "report.md").read_text()
        order = [line.split(" finished")[0].split()[-3] for line in out.splitlines() if " finished | " in line]
        assert order == ["plain", "first", "second", "second", "first", "plain"]
        # each must be served where it is said to be
        swapped = [*argv[:1], fast.url, slow.url, *argv[3:-1], str(tmp_path / "other")]
        (a / "model.safetensors").write_bytes((a / "model.safetensors").read_bytes()[:-1] + b"\1")
        with pytest.raises(UserError, match="which is not --draft-path"):
            bench.main(swapped)


# ---- requests that arrive ----
def test_arrivals_are_poisson_and_the_same_again():
    times = load.poisson_arrivals(5.0, 4001, [0, 5])
    gaps = np.diff(times)
    assert times[0] == 0 and times == load.poisson_arrivals(5.0, 4001, [0, 5]) != load.poisson_arrivals(5.0, 4001, [1, 5])
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.06) and np.std(gaps) == pytest.approx(0.2, rel=0.1)


def test_a_server_that_goes_while_requests_arrive_is_not_waited_for():
    class Server:
        def alive(self):
            return False

    connection = load.Connection(f"http://127.0.0.1:{free_port()}", {}, False, 5.0, Server())
    prompts, began = [{"id": str(n), "prompt_ids": [1]} for n in range(3)], time.perf_counter()
    with pytest.raises(ServerGone, match="went away during test"):
        asyncio.run(load.run_unit(connection, prompts, 3, {}, "test", arrivals=[0.0, 0.1, 600.0]))
    assert time.perf_counter() - began < 20


def timed(name, start, first, total, tokens=11, due=None):
    record = answer(name, list(range(tokens)), times=[first, total])
    return record | {"start_s": start} | ({} if due is None else {"due_s": due})


def test_goodput_counts_what_kept_both_limits():
    """10 tokens after the first: 0.5 s for the first, 0.1 s each."""
    slo = Slo.of({"slo-ttft-ms": 500.0, "slo-itl-ms": 100.0})
    kept = timed("a", 0, 0.5, 1.5)
    late, slow = timed("b", 0, 0.6, 1.0), timed("c", 0, 0.1, 1.2)
    empty = timed("d", 0, 0.1, 0.1) | {"completion_tokens": 0}
    failed = {"id": "e", "error": "http 503", "message": ""}
    assert [slo.kept(record) for record in (kept, late, slow, empty, failed)] == [True, False, False, False, False]
    assert Slo.of({"slo-ttft-ms": 500.0}).kept(slow) and not Slo.of({"slo-ttft-ms": 500.0}).kept(late)
    assert Slo.of({}) is None and Slo.of({"slo-ttft-ms": None}) is None
    units = [{"variant": "x", "level": "2/s", "repeat": 0, "wall_s": 4.0, "watts": None,
              "requests": [kept, late, slow, empty, failed]}]
    assert goodput(units, slo) == {"share": 0.2, "requests_s": 0.25}

    def measured(fine):  # two runs of 10 prompts of which `fine` keep it
        return [{**units[0], "repeat": repeat, "requests": [timed(f"p{n}", 0, 0.1 if n < fine else 0.9, 1.0)
                                                            for n in range(10)]} for repeat in (0, 1)]
    found = goodput_difference(measured(3), measured(8), slo)
    assert found["difference"] == pytest.approx(0.5) and 0.1 < found["interval"][0] < 0.5 < found["interval"][1] < 0.9
    assert goodput_difference(measured(3)[:1], measured(8)[:1], slo)["interval"] is None  # measured once


def test_a_queue_that_grows_and_a_client_that_is_late_are_seen():
    def unit(seconds):  # twenty arrivals, one a second
        return {"variant": "x", "level": "1/s", "repeat": 0, "wall_s": 40.0, "watts": None,
                "requests": [timed(f"p{n}", n + 0.2, 0.1, seconds(n), due=float(n)) for n in range(20)]}

    steady, growing = unit(lambda n: 2.5), unit(lambda n: 1.0 + n)
    assert queue([steady]) == {"second_quarter": 3, "last_quarter": 3, "grew": False}
    # at arrival n those of m <= n with 2m + 1 > n are in flight
    assert queue([growing]) == {"second_quarter": pytest.approx(4.2), "last_quarter": pytest.approx(9.2), "grew": True}
    assert queue([{**steady, "requests": [answer("a", [1, 2])]}]) is None
    found = arrival_figures([steady])
    assert found["offered_s"] == pytest.approx(1.0) and found["late_s"] == pytest.approx(0.2)
    # at a rate tok/s hang on the arrivals: what one stream gets is compared
    fast = unit(lambda n: 1.25)
    assert level_figures([steady])["tok_s"] == level_figures([fast])["tok_s"]
    both = [[{**one, "repeat": repeat} for repeat in (0, 1)] for one in (steady, fast)]
    assert speed_up(*map(per_request, both))["speed_up"] == pytest.approx(2)


def test_a_cache_of_prompts_that_was_not_emptied_is_said(tmp_path):
    plain, fast = pair()
    plain.empties = False
    with plain, fast:
        assert not bench.main(flags(plain, fast, rows(tmp_path), tmp_path / "r"))
    assert report_of(tmp_path / "r")["not_emptied"] == 2
    assert "emptied (it refused before 2 of 4 units: their TTFT" in (tmp_path / "r" / "report.md").read_text()


def test_rates_beside_levels_with_goodput(tmp_path, capsys):
    # a first token that comes 60 ms late makes those of 20 ms each after it no faster than the 11 ms asked for
    plain, fast = Paced(0.020, seed=1), Paced(0.003, seed=2, speculative_algorithm="EAGLE3")
    with plain, fast:
        argv = flags(plain, fast, rows(tmp_path, 8), tmp_path / "r", "--request-rate", 40, 80, "--slo-itl-ms", 11)
        assert not bench.main(argv)
        found = report_of(tmp_path / "r")
        assert list(found["levels"]) == ["1"] and list(found["rates"]) == ["40/s", "80/s"]
        row = found["rates"]["40/s"]
        good = row["speculative"]["goodput"]  # all of it on a machine that does nothing else
        assert row["plain"]["goodput"]["share"] == 0 and good["share"] >= 0.8 and good["difference"] == good["share"]
        assert row["speculative"]["speed_up"] > 1.3 and row["speculative"]["interval"]
        assert row["plain"]["late_s"] < 0.2 and 15 < row["plain"]["offered_s"] < 110
        assert found["levels"]["1"]["speculative"]["goodput"]["share"] >= 0.8
        out = capsys.readouterr().out
        assert f"verdict at 40/s: {rate_verdict(row)}" in out and "Requests that arrive" in out
        certain = {"plain": row["plain"], "speculative": row["speculative"] | {"speed_up": 2.0, "interval": [1.8, 2.2]}}
        assert rate_verdict(certain).startswith("speculative: answers come faster (2.00x (1.80-2.20)); goodput ")
        # the same arrivals for each variant, others in another repeat
        due = {}
        for row in lines(tmp_path / "r"):
            if row["kind"] == "request" and row["level"] == "40/s":
                due.setdefault((row["variant"], row["repeat"]), []).append(row["due_s"])
        assert due["plain", 0] == due["speculative", 0] != due["plain", 1] == due["speculative", 1]
        # another limit is no other measurement: the finished report is written anew
        asked = plain.asked
        assert not bench.main([*argv[:-1], "50"])
        assert report_of(tmp_path / "r")["rates"]["40/s"]["plain"]["goodput"]["share"] >= 0.8 and plain.asked == asked
        with pytest.raises(UserError, match="request-rate"):
            bench.main([*argv, "--request-rate", "40"])


# ---- later turns ----
@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY_KIMI), False)


def dialogue(tokenizer, words, reasons="hm"):
    """Ids of an answer that reasons, says `words` and ends its turn."""
    end, stop = tokenizer.convert_tokens_to_ids(["</think>", "<|im_end|>"])
    return [*tokenizer.encode(reasons), end, *tokenizer.encode(words), stop]


def test_a_later_turn_stands_behind_the_servers_own_answer(tmp_path, tokenizer, capsys):
    """Each variant's own: where they differ, the second answers are not compared, nor is a turn asked whose first one
    failed.
    """
    questions = [["What is a list?", "And a set?"], ["Name a loop.", "Another?"], ["Say yes.", "Why?"]]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "turns": turns}) + "\n" for n, turns in enumerate(questions)))

    def answers(words):
        def reply(ids):
            text = tokenizer.decode(ids)
            first = "set" not in text and "Another" not in text and "Why" not in text
            if "Say yes" in text:
                return None  # refused
            if "loop" in text and first:
                return dialogue(tokenizer, "for")
            return dialogue(tokenizer, words if first else "fine")
        return reply

    plain = Paced(0.0005, model_path=str(TINY_KIMI), answer=answers("a row"))
    fast = Paced(0.0005, model_path=str(TINY_KIMI), answer=answers("a box"), speculative_algorithm="EAGLE3")
    with plain, fast:
        argv = flags(plain, fast, path, tmp_path / "r", "--turns", 2, "--repeats", 1, "--max-tokens", 64)
        assert not bench.main(argv)
        wanted = [[{"role": "user", "content": "What is a list?"},
                   {"role": "assistant", "content": words, "reasoning_content": "hm"},
                   {"role": "user", "content": "And a set?"}] for words in ("a row", "a box")]
        for server, messages in zip((plain, fast), wanted):
            assert server.inputs[1] == render(tokenizer, {"id": "x", "source": "x", "messages": messages}, "on")
        # the turn behind the refused one is not asked; where p0's first answers part, the server that runs is
        assert plain.asked == 5 and fast.asked == 6
        first, common = fast.inputs[0], dialogue(tokenizer, "a row")
        assert fast.inputs[5][:len(first)] == first and fast.inputs[5][len(first):] == common[:len(fast.inputs[5]) - len(first)]
        requests = [row for row in lines(tmp_path / "r") if row["kind"] == "request" and row["variant"] == "plain"]
        assert [row["id"] for row in requests] == ["p0", "p0#2", "p1", "p1#2", "p2", "p2#2"]
        assert requests[1]["prompt_ids"] == plain.inputs[1] and "prompt_ids" not in requests[0]
        found = report_of(tmp_path / "r")
        figures = found["levels"]["1"]["speculative"]
        assert figures["failed"] == {"http 503": 1, "no answer before": 1}
        text = figures["same_text"]  # p0 differs, p0#2 has another context; p1 and p1#2 are equal
        assert (text["compared"], text["equal"], text["other_context"]) == (3, 2, 1)
        assert [group["turn"] for group in found["groups"]["1"]] == [1, 2]
        assert "6 requests" not in capsys.readouterr().err
        assert not bench.main(argv)
        assert "complete already" in capsys.readouterr().out


def test_turns_are_asked_for_and_said_where_they_are_not(tmp_path, capsys):
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"id": "a", "turns": ["One?", "Two?", "Three?"]}) + "\n")
    found = {turns: load_prompts(prompt_args(prompts=[path], turns=turns), str(TINY_KIMI)) for turns in (1, 2, 3)}
    assert "turns" not in found[1][0] and found[2][0]["turns"] == ["Two?"] and found[3][0]["turns"] == ["Two?", "Three?"]
    assert request_ids(found[3][0]) == ["a", "a#2", "a#3"] == list(about_requests(found[3]))
    assert capsys.readouterr().out.count("1 of 1 prompts have more turns") == 2
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": ["first?", "second?"]}) + "\n")
    for turns, later in ((1, None), (2, ["second?"])):
        (prompt,) = load_prompts(prompt_args(dataset=[f"mt-bench={tmp_path / 'd.jsonl'}"], turns=turns), str(TINY_KIMI))
        assert prompt.get("turns") == later
    for bad in ([], ["a", 7], "text", ["a", " "]):
        path.write_text(json.dumps({"id": "a", "turns": bad}) + "\n")
        with pytest.raises(UserError, match="must be a list of texts"):
            load_prompts(prompt_args(prompts=[path], turns=2), str(TINY_KIMI))


def test_turns_of_one_conversation_are_drawn_together():
    """As one prompt of both: half as many prompts, and no narrower interval."""
    one = made_up([0.98, 1.02], prompts=20, spread=0.3)
    two = made_up([1.02, 0.98], prompts=20, spread=0.3, seed=7)
    turned = [[{**unit, "requests": [{**record, **({"id": f"p{n // 2}#2", "prompt_ids": [1]} if n % 2 else
                                                   {"id": f"p{n // 2}"})} for n, record in enumerate(unit["requests"])]}
               for unit in units] for units in (one, two)]
    assert speed_up(*turned)["speed_up"] == pytest.approx(speed_up(one, two)["speed_up"])
    assert speed_up(*[[{**u, "requests": u["requests"][:8]} for u in units] for units in turned])["interval"] is None


def test_a_question_at_two_lengths_of_context_is_one_prompt():
    """Asked twice it tells no more of other questions."""
    one, two = made_up([0.98, 1.02], prompts=12, spread=0.3), made_up([1.02, 0.98], prompts=12, spread=0.3, seed=7)
    twice = [[{**unit, "wall_s": 2 * unit["wall_s"], "requests": [
        {**record, "id": f"{record['id']}@{context}", "question": record["id"]} for context in ("1k", "8k")
        for record in unit["requests"]]} for unit in units] for units in (one, two)]
    assert speed_up(*twice)["interval"] == pytest.approx(speed_up(one, two)["interval"])


# ---- lengths of context ----
def test_lengths_in_words_and_numbers():
    assert [context_tokens(name) for name in ("1k", "8K", "500", "32k")] == [1024, 8192, 500, 32768]
    for bad in ("", "0", "1m", "-8k", "1.5k", "k"):
        with pytest.raises(ValueError):
            context_tokens(bad)


def test_prompts_are_padded_with_each_others_text_to_the_token(tmp_path, tokenizer):
    """Real text, none of it twice in a prompt, nor the same one at the beginning of two."""
    args = prompt_args(context=["600", "1k"], limit=6)
    prompts = load_prompts(args, str(TINY_KIMI))
    pool = {row["messages"][-1]["content"] for path in (ROOT / "configs/bench_prompts").glob("*.jsonl")
            for row in map(json.loads, path.read_text().splitlines())}
    by_context = {name: [p for p in prompts if p["context"] == name] for name in ("600", "1k")}
    assert prompts == [*by_context["600"], *by_context["1k"]] and len(by_context["600"]) <= 36 == len(by_context["1k"]) + 6
    for name, of in by_context.items():
        tokens = context_tokens(name)
        assert all(tokens * 0.995 - 1 <= len(p["prompt_ids"]) <= tokens for p in of)
        assert all(p["id"].endswith(f"@{name}") for p in of)
        assert len({tuple(p["prompt_ids"][5:25]) for p in of}) == len(of)
    text = tokenizer.decode(by_context["1k"][0]["prompt_ids"])
    whole = [piece for piece in pool if piece in text]
    assert len(whole) > 3 and all(text.count(piece) == 1 for piece in whole)
    both = load_prompts(prompt_args(context=["600"], limit=1, thinking=["on", "off"]), str(TINY_KIMI))
    firsts = [tuple(p["prompt_ids"][5:25]) for p in both]
    assert {p["id"].removesuffix(f"@{p['thinking']}@600") for p in both} == {p["question"] for p in both}
    assert both[0]["id"].endswith("@on@600") and len(set(firsts)) == len(firsts)  # nothing is cached from the other mode


def test_what_cannot_be_padded_is_one_line(tmp_path, capsys):
    path = texts(tmp_path, 8)

    def refused(why, **given):
        with pytest.raises(UserError, match=why):
            load_prompts(prompt_args(**{"prompts": [path], "context": ["1k"]} | given), str(TINY_KIMI))

    refused("tokens of other text are at hand, a prompt of that length needs")
    refused("every prompt is longer than 20 tokens", context=["20"])
    refused("is not readable as text", context_text=[tmp_path / "none.txt"])
    (tmp_path / "book.txt").write_text("\n\n".join(f"Paragraph {n} tells of {n * n}." for n in range(400)))
    found = load_prompts(prompt_args(prompts=[path], context=["1k"], context_text=[tmp_path / "book.txt"]), str(TINY_KIMI))
    assert len(found) == 8 and all(1018 <= len(prompt["prompt_ids"]) <= 1024 for prompt in found)
    path.write_text(json.dumps({"id": "a", "prompt_ids": [1]}) + "\n")
    refused("'a' has only prompt_ids, which cannot be padded")
    # a row of responses/ has both: rendered anew
    path.write_text(json.dumps({"id": "a", "prompt_ids": [1], "messages": [{"role": "user", "content": "Why?"}]}) + "\n")
    (prompt,) = load_prompts(prompt_args(prompts=[path], context=["64"], context_text=[tmp_path / "book.txt"]), str(TINY_KIMI))
    assert prompt["thinking"] == "on" and 60 < len(prompt["prompt_ids"]) <= 64
    assert Padding(["a b", " a b ", ""], str.split).texts == ["a b"]


def test_levels_by_context_and_their_mix(tmp_path, capsys):
    path = texts(tmp_path, 8)
    both = dict(model_path=str(TINY_KIMI), context_length=140)
    plain, fast = Paced(0.002, seed=1, **both), Paced(0.001, seed=2, speculative_algorithm="EAGLE3", **both)
    with plain, fast:
        argv = flags(plain, fast, path, tmp_path / "r", "--context", 64, 128)
        assert not bench.main(argv)
        found = report_of(tmp_path / "r")
        assert list(found["contexts"]) == ["64", "128"] and list(found["contexts"]["64"]["levels"]) == ["1"]
        here = [found["contexts"][name]["levels"]["1"]["plain"] for name in ("64", "128")]
        whole = found["levels"]["1"]["plain"]
        assert whole["requests"] == sum(f["requests"] for f in here) == 32
        assert whole["wall_s"] == pytest.approx(sum(f["wall_s"] for f in here)) and len(whole["tok_s_repeats"]) == 2
        assert found["contexts"]["128"]["levels"]["1"]["speculative"]["interval"]
        assert "Length of context" in (tmp_path / "r" / "report.md").read_text()
        assert "speculative c1@128 r1 finished" in capsys.readouterr().out
        asked = [row for row in lines(tmp_path / "r") if row["kind"] == "request"]
        assert all(row["id"] == f"{row['question']}@{row['context']}" for row in asked)
        with pytest.raises(UserError, match="takes contexts of 140 tokens; --context asks for prompts of 1.. and --max-tokens for 8 more"):
            bench.main(flags(plain, fast, path, tmp_path / "long", "--context", 140))
        assert not any(len(ids) > 128 for ids in plain.inputs)


def test_of_a_run_that_goes_on_only_whole_mixes_are_pooled():
    units = [{"variant": "plain", "level": 1, "repeat": repeat, "context": context, "wall_s": 1.0, "watts": 100.0 * wide,
              "requests": [{"id": f"a@{context}"}]}
             for repeat, context, wide in ((0, "1k", 1), (0, "8k", 3), (1, "1k", 1))]
    (mix,) = pooled(units, ["1k", "8k"])
    assert mix["wall_s"] == 2 and mix["watts"] == 200 and [r["id"] for r in mix["requests"]] == ["a@1k", "a@8k"]
    assert pooled(units, [None]) == units


# ---- groups ----
def test_groups_have_their_own_speed_and_acceptance():
    """Of four sources and modes of thinking; half of the prompts gain nothing."""
    prompts = [{"id": f"p{n}", "source": "code" if n < 12 else "chat", "thinking": "on" if n % 2 else "off",
                "prompt_ids": [1]} for n in range(24)]
    plain = [{"variant": "plain", "level": 2, "repeat": repeat, "wall_s": 40.0, "watts": None, "requests": [
        answer(f"p{n}", [1] * 10, times=[0.1, 2.0]) for n in range(24)]} for repeat in (0, 1)]
    fast = [{**unit, "variant": "s", "requests": [
        {**record, "latency_s": 2.0 if n % 2 else 1.0} for n, record in enumerate(unit["requests"])]} for unit in plain]
    found = group_rows({"plain": plain, "s": fast}, prompts)
    assert [(row["source"], row["thinking"], row["requests"]) for row in found] == [
        ("chat", "off", 6), ("chat", "on", 6), ("code", "off", 6), ("code", "on", 6)]
    assert [row["variants"]["s"]["speed_up"] for row in found] == pytest.approx([2, 1, 2, 1])
    assert found[0]["variants"]["plain"]["tok_s"] == pytest.approx(5) and found[0]["variants"]["s"]["interval"]
    assert group_rows({"plain": plain}, [{**prompt, "source": "x", "thinking": "on"} for prompt in prompts]) == []


# ---- flags ----
@pytest.mark.parametrize("argv, why", [
    (["--request-rate", "0"], "--request-rate must be 0.001 to 10000"), (["--request-rate", "-1"], "--request-rate must"),
    (["--request-rate", "nan"], "'nan' is no number"), (["--request-rate", "x"], "'x' is no number"),
    (["--request-rate", "2", "2.0"], "a value stands twice in 2/s 2/s"), (["--request-rate"], "expected at least one"),
    (["--slo-ttft-ms", "0"], "--slo-ttft-ms must be above 0"), (["--slo-itl-ms", "-3"], "--slo-itl-ms must be above 0"),
    (["--slo-itl-ms", "inf"], "'inf' is no number"), (["--turns", "0"], "--turns must be at least 1"),
    (["--turns", "two"], "is no whole number"), (["--context", "8m"], "'8m' is no number of tokens, as in 8192 or 8k"),
    (["--context", "0"], "'0' is no number of tokens"), (["--context", "1k", "1024"], "a value stands twice"),
    (["--context-text", "book.txt"], "is laid before prompts by --context"), (["--context-text", ""], "an empty path"),
    (["--draft-path", "{folder}", "{folder}"], "1 servers for 2 drafters"),
    (["--base-url", "http://127.0.0.1:1", "http://127.0.0.1:2"], "2 servers for 0 drafters"),
    (["--base-url", "http://h:1", "http://h:2", "--draft-path", "{folder}", "{folder}"], "stands there twice"),
    (["--base-url", "http://h:1", "http://h:2", "--draft-path", "{folder}", "/none"], "holds no config.json"),
    (["--base-url", "http://h:1", "http://h:2", "--draft-path", "a", "b", "--doctor"], "take one drafter"),
    (["--thinking", "maybe"], "invalid choice")])
def test_bad_values_are_one_line_and_exit_2(tmp_path, argv, why):
    (tmp_path / "config.json").write_text("{}")
    argv = [word.format(folder=tmp_path) for word in argv]
    done = run_here("05_benchmark", "--base-url", "http://127.0.0.1:1", "--output-dir", tmp_path / "r", *argv)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and why in done.stderr, done.stderr
    assert not (tmp_path / "r").exists()


# ---- it goes on ----
def test_killed_in_the_middle_of_each_new_kind_of_unit_it_goes_on(tmp_path, tokenizer):
    """kill -9 of a process of its own, then the same command here: what was finished is not asked again."""
    path, drafters = texts(tmp_path, 6), [make_drafter(tmp_path / name, range(9)) for name in ("a", "b")]
    path.write_text("".join(json.dumps({"id": f"p{n}", "turns": [f"Question {n}: what is a list of {n}?", "Why?"]}) + "\n"
                            for n in range(6)))
    both = dict(model_path=str(TINY_KIMI), answer=lambda ids: dialogue(tokenizer, "so it is"))
    servers = [Paced(0.001, **both)] + [Paced(0.001, speculative_algorithm="EAGLE3", **both,
                                              speculative_draft_model_path=str(drafter)) for drafter in drafters]
    with servers[0] as plain, servers[1] as one, servers[2] as other:
        argv = list(map(str, [
            "--base-url", one.url, other.url, "--baseline-url", plain.url, "--draft-path", *drafters, "--prompts", path,
            "--turns", 2, "--context", 40, 60, "--request-rate", 200, "--concurrency", 2, "--thinking", "on", "off",
            "--max-tokens", 16, "--warmup", 1, "--repeats", 1, "--output-dir", tmp_path / "r"]))
        process = preloaded.popen([sys.executable, "-u", str(ROOT / "05_benchmark.py"), *argv], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = []
        for line in process.stdout:
            said.append(line)
            if "b c2@60 r0 finished" in line:  # the next unit is one of arrivals
                break
        process.kill()
        process.wait()
        assert said and "b c2@60 r0 finished" in said[-1], "".join(said)
        before = lines(tmp_path / "r")
        done = [row for row in before if row["kind"] == "unit"]
        assert {(row["level"], row["context"]) for row in done} == {(2, "40"), ("200/s", "40"), (2, "60"), ("200/s", "60")}
        assert "Incomplete" in (tmp_path / "r" / "report.md").read_text()
        assert not bench.main(argv)
    after = lines(tmp_path / "r")
    assert after[:len(before)] == before and (tmp_path / "r" / "manifest.json").exists()
    units = [(row["variant"], row["level"], row["context"], row["repeat"]) for row in after if row["kind"] == "unit"]
    assert len(units) == len(set(units)) == 3 * 2 * 2
    assert all(row["warmup"]["requests"] == 1 and row["gpus"] is not None for row in after if row["kind"] == "unit")
    assert [row["id"] for row in after if row["kind"] == "request"][:4] == ["p0@on@40", "p0@on@40#2", "p0@off@40",
                                                                            "p0@off@40#2"]


OLD = Path(__file__).parent / "data/old_folders"


@pytest.mark.parametrize("folder, units", [("report_half", 3), ("report_done", 8)])
def test_a_report_that_an_earlier_version_began_goes_on(tmp_path, folder, units, capsys):
    """Written by the 05_benchmark.py of revision e5bb6f1 against paced servers; report_half was cut amid a row."""
    out = shutil.copytree(OLD / folder, tmp_path / "r")
    before = (out / "raw.jsonl").read_bytes()
    plain, fast = pair()
    with plain, fast:
        argv = flags(plain, fast, OLD / "report_prompts.jsonl", out, "--concurrency", 1, 2)
        assert not bench.main(argv)
        said = capsys.readouterr().out
        assert f"{units} finished before" in said or "complete already" in said
        assert said.count(" finished | ") == 8 - units == (plain.asked + fast.asked) / 6
        whole = before[:before.rfind(b"\n") + 1]
        assert (out / "raw.jsonl").read_bytes().startswith(whole)
        assert not bench.main([*argv, "--repeats", "3"])  # what is finished takes more
        assert {len(f["tok_s_repeats"]) for row in report_of(out)["levels"].values() for f in row.values()} == {3}
        with pytest.raises(UserError, match="turns"):
            bench.main([*argv, "--turns", "2"])


@pytest.mark.slow  # four starts of a server
def test_all_of_it_on_the_real_engine_killed_in_the_middle(workplace):  # noqa: F811
    """Two drafters that 05 launches, requests that arrive, second turns, two lengths, both modes: lossless throughout."""
    questions = [{"id": f"p{n}", "turns": [f"Question {n}: what is a list?", "Show one."]} for n in range(6)]
    config, out = workplace("traffic", turns=2, context=[128, 256], thinking=["on", "off"], concurrency=[2],
                            **{"request-rate": [4], "slo-ttft-ms": 2000, "max-tokens": 12, "prompts": "{run_dir}/q.jsonl",
                               "context-text": str(ROOT / "README.md"), "fixed-length": True})
    (config.parent / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    first = Path(yaml.safe_load(config.read_text())["benchmark"]["draft-path"])
    other = make_drafter(config.parent / "other", range(1, 129, 2))
    document = yaml.safe_load(config.read_text())
    document["benchmark"]["draft-path"] = [str(first), str(other)]
    config.write_text(yaml.safe_dump(document))
    before = killed_at(config, out, "other c2@128 r0 finished")
    done = run_script("05_benchmark", "--config", config)
    assert done.returncode == 0 and "9 finished before" in done.stdout, done.stdout + done.stderr
    assert (out / "raw.jsonl").read_bytes().startswith(before[:before.rfind(b"\n") + 1])
    found = report_of(out)
    for rows_of in (found["levels"], found["rates"], *(about["levels"] for about in found["contexts"].values())):
        for row in rows_of.values():
            assert list(row) == ["plain", "draft", "other"] and all(f["failed"] == {} for f in row.values())
            for name in ("draft", "other"):  # greedy in float32: the same answers, so the same second contexts
                text = row[name]["same_text"]
                assert text["share"] == 1 and text["other_context"] == 0 and text["compared"] == row[name]["requests"]
                assert row[name]["goodput"]["share"] > 0.5 and "measured once" in row[name]["no_interval"]
    assert {(group["thinking"], group["turn"]) for group in found["groups"]["2"]} == {
        ("on", 1), ("on", 2), ("off", 1), ("off", 2)}
    beside = found["drafters"]["2"]["other"]
    assert beside["against"] == "draft" and -1 < beside["accept_difference"] < 1 and beside["speed_up"] > 0
    second = [row for row in lines(out) if row["kind"] == "request" and row["id"] == "p0@off@256#2"]
    assert len({tuple(row["prompt_ids"]) for row in second}) == 1 and second[0]["cached_tokens"] > 200
