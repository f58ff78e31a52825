"""05 --adaptive: steps by batch size from a sweep, as SGLang's --speculative-adaptive takes them: never slower than plain decoding."""
import importlib.util
import json
import re
import sys
import types

import pytest
import yaml

from conftest import ROOT, TINY_KIMI, free_port, load_script, run_here, sglang_package
from eagle3 import adaptive
from eagle3.adaptive import Choice, Settled, check, choose, environment, flags, judged, read, said_of, settle, summary, written
from eagle3.stage import UserError
from test_benchmark import make_drafter
from test_break_even import unit

bench = load_script("05_benchmark")
S1, S3, TREE = "steps1-topk1-drafts2", "steps3-topk1-drafts4", "steps3-topk4-drafts8"


def choice(fewest=0, **levels) -> Choice:
    """choice(c8={"plain": 10.0, ...}, ...)"""
    return Choice({int(name[1:]): of for name, of in levels.items()}, fewest)


@pytest.fixture
def sglang():
    """SGLang's own file that reads the adaptive steps, of the installed release; what it imports for other purposes is left away."""
    file = sglang_package() / "srt/speculative/adaptive_spec_params.py"
    others = {"sglang.srt.arg_groups.overrides": ("resolved_view", "resolving_view"), "sglang.srt.runtime_context": ("attn_dp_enabled_of",),
              "sglang.srt.speculative.spec_info": ("SpeculativeAlgorithm",), "sglang.srt.utils": ("log_info_on_rank0",)}
    names = [name for full in others for name in (".".join(full.split(".")[:n]) for n in range(1, 5)) if name not in sys.modules]
    for full in names:
        sys.modules[full] = types.ModuleType(full)
        for name in others.get(full, ()):
            setattr(sys.modules[full], name, lambda *args: None)
    spec = importlib.util.spec_from_file_location("adaptive_spec_params", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for full in names:
        sys.modules.pop(full, None)


# ---- what a sweep chooses ----
def test_each_level_gets_its_winner_and_the_switch_stands_where_the_speeds_cross():
    found = choice(c1={"plain": 100, S1: 140, S3: 180}, c8={"plain": 600, S1: 660, S3: 640}, c64={"plain": 2000, S1: 1500, S3: 1000})
    assert found.winners == {1: S3, 8: S1, 64: "plain"} and found.off_from == 64
    assert list(found.entries.values()) == [3, 1, 0] and list(found.entries)[0] == 1
    # log(180/140) ahead at 1, log(660/640) behind at 8: the lines cross at 8 ** 0.891
    assert list(found.entries)[1] == 7 and 8 < list(found.entries)[2] <= 64
    same = choice(c1={"plain": 1, S3: 2}, c8={"plain": 1, S3: 2}, c64={"plain": 2, S3: 1.9})
    assert same.entries == {1: 3, 56: 0}, "the switch stands near the level where both are nearly equal"
    assert choice(c1={"plain": 1, S3: 2}, c2={"plain": 3, S3: 1}).entries == {1: 3, 2: 0}
    assert choice(c1={"plain": 1, S1: 2}, c8={"plain": 1, S3: 2}).entries == {1: 1, 8: 3}, "S3 was left out at 1"


def test_what_an_entry_cannot_be_wins_no_entry():
    found = choice(c1={"plain": 100, S3: 150, TREE: 170}, c8={"plain": 100, S3: 90, TREE: 95})
    assert found.winners == {1: S3, 8: "plain"} and found.fastest(1, False) == TREE and found.off_from == 8
    old = choice(1, c1={"plain": 100, S1: 150, S3: 140}, c8={"plain": 100, S1: 90, S3: 50})
    assert old.entries == {1: 1} and old.winners[8] == S1 and old.off_from == 8
    units = [unit("plain", 1, 1.0), unit(S3, 1, 0.5, 2.0), {**unit(S3, 1, 0.1, 2.0), "repeat": adaptive.JUDGED},
             {**unit(S3, 1, 0.1, 2.0), "level": "2/s"}, unit(adaptive.VARIANT, 1, 0.1, 2.0)]
    assert choose(units, "0.5.23").tok_s == {1: {"plain": pytest.approx(1.0), S3: pytest.approx(2.0)}}


@pytest.mark.parametrize("version, tok_s, said", [
    ("0.5.12.post1", {1: {"plain": 1, S3: 2}, 8: {"plain": 1, S3: 0.5}},
     "SGLang 0.5.12.post1 has no steps by batch size (--speculative-adaptive of 0.5.13 and newer): serve without a drafter from 8 streams on"),
    ("0.5.10", {1: {"plain": 1, S3: 2}}, "the best flags of each level are above"),
    ("0.5.23", {1: {"plain": 2, S3: 1}, 8: {"plain": 2, S3: 1}}, "plain decoding is the fastest at every level: serve without a drafter"),
    ("0.5.13", {1: {"plain": 1, TREE: 2}}, "no chain of drafts (topk 1) gains")])
def test_where_no_file_helps_one_line_says_what_does(tmp_path, version, tok_s, said):
    units = [unit(name, level, 1 / speed, 1.0 if name != "plain" else None) for level, of in tok_s.items() for name, speed in of.items()]
    found = settle(units, version, tmp_path)
    assert said in found.none and not list(tmp_path.iterdir()) and not found.runs()
    assert said in "\n".join(adaptive.chapter(found.found(units, None)))


# ---- what SGLang makes of it ----
def test_sglangs_own_loader_takes_the_file_and_serves_the_steps(sglang, tmp_path):
    entries = {1: 3, 5: 1, 24: 0}
    path = tmp_path / "adaptive.json"
    path.write_text(written(entries))
    assert sglang.resolve_candidate_steps_from_config(str(path)) == [0, 1, 3] and read(path) == entries
    server = flags(entries, path)
    assert server["speculative-num-steps"] == 3 and server["speculative-num-draft-tokens"] == 4  # must be a candidate
    params = sglang.AdaptiveSpeculativeParams(server["speculative-num-steps"], str(path))
    wanted = {1: 3, 2: 3, 4: 3, 5: 1, 8: 1, 23: 1, 24: 0, 64: 0, 500: 0}
    assert {size: params.get_steps_for_batch(size) for size in wanted} == wanted
    for accepted in ([3] * 8, [0] * 8):  # whatever is accepted: nothing to choose within an entry
        assert all(params.on_verify_complete(accepted, size) is None for size in wanted for _ in range(40))
    assert {size: params.get_steps_for_batch(size) for size in wanted} == wanted
    params.set_cuda_graph_bs([1, 2, 4, 8, 16, 24, 32])
    assert params.cuda_graph_bs_for_step(1) == [8, 16] and params.get_steps_for_batch(17) == 0  # padded to 24
    assert environment(entries) and not environment({1: 3, 8: 1})
    path.write_text("{}")
    with pytest.raises(ValueError):
        sglang.resolve_candidate_steps_from_config(str(path))


def test_a_file_of_before_that_is_none_and_a_server_that_does_not_switch_are_one_line(tmp_path):
    (tmp_path / "adaptive.json").write_text('{"1": {"steps": 3}}')
    with pytest.raises(UserError, match="Delete it"):
        read(tmp_path / "adaptive.json")
    with pytest.raises(UserError, match="http://here: serves fixed steps"):
        check({"speculative_adaptive": False}, "http://here")
    check({"speculative_adaptive": True}, "http://here")
    assert "--adaptive measures what a sweep chose" in run_here("05_benchmark", "--base-url", "http://127.0.0.1:1", "--adaptive").stderr


# ---- how it did ----
def test_what_was_measured_is_judged_by_runs_of_its_own():
    found = choice(c1={"plain": 100, S3: 180}, c8={"plain": 100, S1: 120, TREE: 130}, c64={"plain": 100, S3: 50})
    settled = Settled(found, found.entries, "adaptive.json", None)
    order = settled.runs()
    assert order[:3] == [("plain", 1, 1000), ("plain", 8, 1000), ("plain", 64, 1000)] and (S3, 1, 1000) in order and (TREE, 8, 1001) in order
    assert len(order) == 2 * (3 + 1 + 1 + 3) and order[-3:] == [("plain", level, 1001) for level in (1, 8, 64)]
    assert [name for name, _, repeat in order].count(S1) == 0  # an entry, but not the best

    def runs(variant, level, speed, repeat=1000):
        return [{**unit(variant, level, 1 / (speed + at), None if variant == "plain" else 2.0), "repeat": repeat + at} for at in range(2)]

    units = (runs("plain", 1, 100) + runs(S3, 1, 180) + runs("adaptive", 1, 179) + runs("plain", 8, 100) + runs(TREE, 8, 130)
             + runs("adaptive", 8, 120) + runs("plain", 64, 100) + runs("adaptive", 64, 90) + runs("plain", 1, 10, repeat=0))
    rows = judged(units, found, found.entries)
    assert [(row["level"], row["holds"]) for row in rows] == [(1, True), (8, True), (64, False)]
    assert rows[0]["plain"]["speed_up"] == pytest.approx(1.786, abs=0.01) and rows[0]["best"]["speed_up"] == pytest.approx(179.5 / 180.5)
    assert said_of(rows[0]) == "1.79x plain with 3 steps, 0.99 of steps3-topk1-drafts4"
    assert "(which adaptive steps cannot be)" in said_of(rows[1]) and said_of(rows[2]) == "0.90x plain with 0 steps: below 0.98"
    assert summary(rows) == "adaptive is slower than plain at 64 stream(s): there serve without a drafter"
    assert summary(rows[:2]) == "adaptive is nowhere slower than plain decoding or the best fixed setting"
    assert judged(runs("plain", 1, 100), found, found.entries) == []
    # the steps are those of the file that was served, whatever more runs of the sweep would choose
    assert [row["steps"] for row in judged(units, found, {1: 2, 9: 0})] == [2, 2, 0]


# ---- the whole of it, with servers of known step times ----
def run_file(tmp_path, out, **flags) -> dict:
    """The document of a sweep with servers of known step times. flags: of the role speculative."""
    drafter = make_drafter(tmp_path / "draft", range(0, 256, 2))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"id": f"p{n}", "prompt_ids": [300 + n]}) + "\n" for n in range(8)))
    return {"run_dir": str(tmp_path / "run"), "servers": {
        "plain": {"command": ["{python}", str(ROOT / "tests/stepping_server.py")], "flags": {"model-path": str(TINY_KIMI), "port": free_port()}},
        "speculative": {"extends": "plain", "flags": {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": str(drafter), **flags}}},
        "benchmark": {"launch": True, "sweep": True, "sweep-grid": ["3,1,4"], "draft-path": str(drafter), "warmup": 0, "concurrency": [1, 4],
                      "max-tokens": 8, "fixed-length": True, "prompts": str(tmp_path / "prompts.jsonl"), "output-dir": str(out)}}


def test_a_point_that_answers_no_request_is_left_out(tmp_path, capsys):
    """It would end the sweep at the same place each time."""
    out = tmp_path / "run/report"
    document = run_file(tmp_path, out, refuses=2)
    document["benchmark"] |= {"sweep-grid": ["3,1,4", "2,1,3", "1,1,2"], "concurrency": [1]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    done = run_here("05_benchmark", "--config", tmp_path / "run.yaml")
    assert done.returncode == 1 and "lacks 1 of 3 sweep points (steps2-topk1-drafts3)" in done.stderr + capsys.readouterr().err
    report = json.loads((out / "report.json").read_text())
    assert "all 8 requests of steps2-topk1-drafts3 c1 r0 failed; the first with http 503" in report["left_out"]["steps2-topk1-drafts3"]
    assert set(report["levels"]["1"]) == {"plain", S3, S1}


def test_a_sweep_ends_in_steps_by_batch_size_that_are_then_measured(tmp_path):
    """At one stream three steps win, at four plain decoding does; the file lies there, the server is started with it, and both hold."""
    out = tmp_path / "run/report"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_file(tmp_path, out)))
    done = run_here("05_benchmark", "--config", tmp_path / "run.yaml")
    assert done.returncode == 0, done.stderr
    report, markdown = json.loads((out / "report.json").read_text()), (out / "report.md").read_text()
    entries = read(out / "adaptive.json")
    assert list(entries.values()) == [3, 0] and report["adaptive"]["rows"] == []
    assert f"--speculative-adaptive --speculative-adaptive-config {out / 'adaptive.json'} --speculative-num-steps 3" in markdown
    assert "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND=1" in markdown and "Not measured: `--adaptive` does that." in markdown

    before = (out / "adaptive.json").read_bytes()
    done = run_here("05_benchmark", "--config", tmp_path / "run.yaml", "--adaptive")
    assert done.returncode == 0, done.stderr
    finished = re.findall(r"(\S+ c\d r\d+) finished \|", done.stdout)
    assert finished == ["plain c1 r1000", "plain c4 r1000", f"{S3} c1 r1000", "adaptive c1 r1000", "adaptive c4 r1000", "adaptive c1 r1001",
                        "adaptive c4 r1001", f"{S3} c1 r1001", "plain c1 r1001", "plain c4 r1001"]
    rows = json.loads((out / "report.json").read_text())["adaptive"]["rows"]
    assert [row["steps"] for row in rows] == [3, 0] and rows[0]["plain"]["speed_up"] > 1.2
    assert rows[0]["best"]["speed_up"] == pytest.approx(1, abs=0.2) and rows[1]["plain"]["speed_up"] == pytest.approx(1, abs=0.2)
    assert "adaptive at 4 stream(s): " in done.stdout and (out / "adaptive.json").read_bytes() == before
    again = run_here("05_benchmark", "--config", tmp_path / "run.yaml", "--adaptive")
    assert again.returncode == 0 and "complete already" in again.stdout and "finished |" not in again.stdout
    raw = (out / "raw.jsonl").read_bytes()
    (out / "raw.jsonl").write_bytes(raw.replace(b'"server","variant":"plain","info":{"version":"0.5.23"', b'"server","variant":"plain","info":{"version":"0.5.22"'))
    assert (out / "raw.jsonl").read_bytes() != raw
    again = run_here("05_benchmark", "--config", tmp_path / "run.yaml", "--adaptive")
    assert again.returncode == 0 and "plain is not what was written" in again.stdout and "finished |" not in again.stdout, again.stderr
