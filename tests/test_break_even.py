"""05 --break-even: from which accept_length on speculation pays, before a drafter is trained."""
import json

import numpy as np
import pytest
import yaml

from conftest import ROOT, TINY_KIMI, free_port, load_script, run_here
from eagle3 import random_drafter
from eagle3.break_even import (Timed, compared, emitted, line_through, name_of, points_of, rows_of, sentence, served_before, served_here,
                               share_right, verdict)
from eagle3.drafter_files import read_drafter
from eagle3.figures import level_figures
from eagle3.simulated import check, prompts_needed, some, tokens_of
from eagle3.spec_releases import fewest_steps, has, simulating, why_not_adaptive
from eagle3.stage import UserError
from eagle3.target import Target
from stepping_server import accepted, step_s
from test_benchmark import make_drafter

bench = load_script("05_benchmark")
LEVEL = 2  # of the servers with known step times
TOKENS = 61  # an answer: the prefill's and 60 of steps that emit 1, 2, 3 or 4


# ---- the arithmetic ----
def unit(variant: str, level: int, seconds_a_token: float, a: float | None = None, repeat: int = 0) -> dict:
    """All answers of one unit at a known speed, so many tokens a step."""
    verify = round((TOKENS - 1) / a) if a else 0
    spec = {"verify_steps": verify, "correct_drafts": TOKENS - 1 - verify, "histogram": [verify]} if a else None
    record = {"id": "p", "prompt_tokens": 4, "completion_tokens": TOKENS, "cached_tokens": 0, "finish": "length",
              "latency_s": seconds_a_token * TOKENS * level,  # so many were in flight
              "times_s": [0.1, 1.0], "counts": [1, TOKENS], "spec": spec, "output_ids": [7] * TOKENS}
    return {"variant": variant, "level": level, "repeat": repeat, "wall_s": seconds_a_token * 4 * TOKENS, "watts": None, "requests": [record] * 4}


def known(level: int, plain: float, overhead: float, steps: dict[int, float], repeat=0, factor=1.0) -> list[dict]:
    """Units of a server whose step takes steps[n] with n draft steps, in seconds a token of the batch."""
    units = [unit("plain", level, plain, repeat=repeat)]
    return units + [unit(name_of(n, a), level, factor * (overhead + step / a), a, repeat)
                    for n, step in steps.items() for a in points_of(n, 2)]


def test_the_line_gives_back_the_step_time_that_made_it():
    units = known(8, 0.010, 0.001, {1: 0.012, 3: 0.018})
    rows = rows_of(units)
    assert [(row["level"], row["steps"]) for row in rows] == [(8, 1), (8, 3)]
    for row, step in zip(rows, (0.012, 0.018)):
        assert row["step_ms"] == pytest.approx(8 * 1000 * step)  # eight streams share it
        assert row["pays_from"] == pytest.approx(step / (0.010 - 0.001))
        assert row["at_most"] == pytest.approx(0.010 / (0.001 + step / (row["steps"] + 1)))
        assert row["spread"] is None and row["between"] is None
    assert rows[0]["share_right"] == pytest.approx(1 / 3) and share_right(4.0, 3) == pytest.approx(1) and share_right(4.1, 3) is None
    prompts = some([{"id": str(n), "context": context} for n in range(90) for context in ("1k", "8k")], 8, 100)
    assert len(prompts) == 2 * 32 and [len(some(prompts, level, 8)) for level in (1, 2)] == [2 * 8, 2 * 8]
    lengths = [prompt["max_tokens"] for prompt in prompts if prompt["context"] == "1k"]
    assert 50 <= min(lengths) < 55 and 95 < max(lengths) <= 100 and len(set(lengths)) > 25 and sum(lengths[:8]) == pytest.approx(600, abs=40)


def test_more_than_all_drafts_right_is_never():
    never = rows_of(known(64, 0.010, 0.001, {1: 0.040, 3: 0.045}))
    assert [row["pays_from"] for row in never] == [None, None] and never[1]["needs"] == pytest.approx(5.0)
    assert sentence(never) == "never: 3 steps would need 5.00 of at most 4"
    assert sentence(rows_of(known(64, 0.010, 0.001, {1: 0.040}))) == "never: 1 step would need 4.44 of at most 2"
    assert "even a drafter that takes no step's time" in sentence(rows_of(known(64, 0.010, 0.011, {1: 0.01})))
    paying = rows_of(known(8, 0.010, 0.001, {1: 0.014, 3: 0.0165}))
    assert sentence(paying).startswith("3 steps pay from accept_length 1.83 on, 48% of drafts right; at most 1.95x")
    assert "from accept_length 0.89 on (always)" in sentence(rows_of(known(8, 0.010, 0.001, {1: 0.008})))


def test_repeats_say_between_what_it_lies_and_three_points_how_straight_the_line_is():
    units = known(1, 0.010, 0.0, {1: 0.012}) + known(1, 0.010, 0.0, {1: 0.012}, repeat=1, factor=1.1)
    (row,) = rows_of(units)
    assert row["between"] == pytest.approx([1.2, 1.32]) and row["pays_from"] == pytest.approx(1.26)
    bent = [(1.0, 0.012), (1.5, 0.012 / 1.5 * 1.05), (2.0, 0.006)]
    assert 0.02 < line_through(bent).spread < 0.05
    assert line_through(bent[:1]) is None and line_through([(1.0, 0.01), (2.0, 0.02)]) is None and line_through([]) is None
    assert points_of(3, 3) == [1.0, 2.5, 4.0]


def test_predicted_beside_measured():
    units = known(8, 0.010, 0.001, {3: 0.018})
    figures = level_figures([unit("speculative", 8, 0.008, 2.4)])
    assert emitted(figures) == pytest.approx(60 / 25)
    server = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
    report = {"levels": {"8": {"speculative": figures | {"speed_up": 1.25}, "plain": figures | {"accept": None}},
                         "32": {"speculative": figures | {"speed_up": 1.25}}},
              "servers": {"speculative": server}}
    (row,) = compared(Timed.of(units), served_before(report), "report.json")
    assert row["predicted"] == pytest.approx(0.010 / (0.001 + 0.018 / 2.4)) and row["ratio"] == pytest.approx(row["predicted"] / 1.25)
    for other in ({"speculative_eagle_topk": 4}, {"speculative_num_steps": 5}):
        assert not compared(Timed.of(units), served_before({**report, "servers": {"speculative": server | other}}), "there")
    (here,) = compared(Timed.of(units), served_here(units + [unit("trained-1", 8, 0.008, 2.4)], {"trained-1": server}), "here")
    assert here["measured"] == pytest.approx(1.25) and here["predicted"] == row["predicted"]


def test_each_length_of_context_has_its_own_step_times():
    units = [{**of, "context": context} for context, slower in (("1k", 1.0), ("8k", 1.5))
             for of in known(8, 0.010, 0.001, {3: 0.018 * slower})]
    rows = rows_of(units)
    assert [(row["context"], row["needs"]) for row in rows] == [("1k", pytest.approx(2.0)), ("8k", pytest.approx(3.0))]
    assert verdict(rows).startswith("1k: 3 steps pay from accept_length 2.00 on") and "; 8k: 3 steps pay from accept_length 3.00" in verdict(rows)


def batched(level: int, lengths: list[int], step_ms, emitting) -> tuple[float, float]:
    """(tokens a step, seconds a token) of a server that decodes all in flight together, and stops for each prefill."""
    todo, flying, spent, steps = list(lengths), [], 0.0, 0
    while todo or flying:
        if todo and len(flying) < level:
            begun, todo = todo[:level - len(flying)], todo[level - len(flying):]
            flying, spent = flying + [tokens - 1 for tokens in begun], spent + 8 + 0.5 * len(begun)  # ms
        else:
            spent, steps = spent + step_ms(len(flying)), steps + len(flying)
            flying = [left for left in (left - new for left, new in zip(flying, emitting(len(flying)))) if left > 0]
    return (sum(lengths) - len(lengths)) / steps, spent / 1000 / sum(lengths)


@pytest.mark.parametrize("level", [8, 32, 64])
def test_answers_of_different_lengths_foretell_within_5_percent_where_equal_ones_would_not(level):
    """A drafter that is right in 75 % of cases, each request for itself, beside batches that are accepted alike."""
    def off(lengths) -> float:
        chance = np.random.default_rng(0)
        plain = batched(level, lengths, lambda n: 2 + 0.01 * n, lambda n: [1] * n)[1]
        line = line_through([batched(level, lengths, lambda n: 3.6 + 0.04 * n, lambda n: [a] * n) for a in (1, 4)])
        a, seconds = batched(level, lengths, lambda n: 3.6 + 0.04 * n,
                             lambda n: 1 + np.minimum.accumulate(chance.random((n, 3)) < 0.75, 1).sum(1))
        return plain / line.seconds(a) / (plain / seconds) - 1

    count = prompts_needed(level)
    assert abs(off([tokens_of(number, 128) for number in range(count)])) < 0.05
    assert off([128] * count) > 0.15, "equal ones end together in a simulated batch, and their prefills with them"


def test_releases_are_told_apart():
    assert [fewest_steps(version) for version in ("0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.23", "main")] == [1, 0, 0, 0, 0]
    assert "0.5.12.post1 has no steps by batch size" in why_not_adaptive("0.5.12.post1") and why_not_adaptive("0.5.13") is None
    assert not has("0.5.14", "0.5.15") and has("0.5.15.post1", "0.5.15")
    assert simulating(2.5)["SGLANG_SIMULATE_ACC_LEN"] == "2.5" and simulating(4.0)["SGLANG_SIMULATE_ACC_LEN"] == "4"


# ---- the random drafter ----
def test_the_random_drafter_is_the_one_that_04_would_make_and_always_the_same(tmp_path):
    document = {"train": {"num-kv-heads": 1, "intermediate-size": 96}, "build_vocab": {"draft-vocab-size": 128}}
    for name in ("a", "b"):
        random_drafter.make(tmp_path / name, document, tmp_path / "run.yaml", TINY_KIMI, None)
    found = read_drafter(tmp_path / "a", Target(TINY_KIMI))  # refuses what SGLang would not load whole
    assert (found.shape.kv_heads, found.shape.intermediate, found.shape.draft_vocab) == (1, 96, 128)
    assert found.shape.hidden == 256 and len(set(found.draft_ids.tolist())) == 128
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert one == other
    written = (tmp_path / "a/config.json").stat().st_mtime_ns
    random_drafter.make(tmp_path / "a", document, tmp_path / "run.yaml", TINY_KIMI, None)
    assert (tmp_path / "a/config.json").stat().st_mtime_ns == written
    trained = make_drafter(tmp_path / "trained", range(0, 128, 2))
    random_drafter.make(tmp_path / "like", {}, tmp_path / "run.yaml", TINY_KIMI, trained)
    assert read_drafter(tmp_path / "like", Target(TINY_KIMI)).shape.weights() == read_drafter(trained, Target(TINY_KIMI)).shape.weights()


# ---- the whole of it, with servers of known step times ----
@pytest.fixture
def run_file(tmp_path):
    """write(**flags of 05) -> a run file whose servers are stepping_server.py."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"id": f"p{n}", "prompt_ids": [300 + n, 301]}) + "\n" for n in range(40)))

    def write(server=(), **flags):
        plain = {"command": ["{python}", str(ROOT / "tests/stepping_server.py"), *server],
                 "flags": {"model-path": str(TINY_KIMI), "port": free_port()}}
        benchmark = {"launch": True, "prompts": str(tmp_path / "prompts.jsonl"), "concurrency": [LEVEL], "max-tokens": 17, "warmup": 1,
                     "repeats": 1, "output-dir": "{run_dir}/report"} | flags
        document = {"run_dir": str(tmp_path / "run"), "build_vocab": {"draft-vocab-size": 128}, "servers": {"plain": plain},
                    "benchmark": benchmark}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
        return tmp_path / "run.yaml"

    return write


def test_before_anything_is_trained_and_then_beside_a_drafter(run_file, tmp_path):
    config, out = run_file(**{"draft-path": str(tmp_path / "trained")}), tmp_path / "run/report/break_even"  # it is not there yet
    done = run_here("05_benchmark", "--config", config, "--break-even", "--steps", 3)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    (row,) = report["break_even"]["rows"]
    assert row["step_ms"] == pytest.approx(1000 * step_s(3, LEVEL), rel=0.2)
    assert row["needs"] == pytest.approx(step_s(3, LEVEL) / step_s(0, LEVEL), rel=0.2)
    assert "no drafter in" in done.stdout and "pays from accept_length" in done.stdout and not report["break_even"]["checks"] and not report["variants"]
    assert (out / "break_even.png").read_bytes().startswith(b"\x89PNG") and "same_text" not in str(report["levels"])
    assert "3 steps pay from accept_length " in (out / "report.md").read_text()

    make_drafter(tmp_path / "trained", range(0, 256, 2))
    (tmp_path / "trained/config.json").write_text((out / "drafter/config.json").read_text())
    done = run_here("05_benchmark", "--config", config, "--break-even", "--steps", 3)
    assert done.returncode == 0, done.stderr
    (measured,) = [line for line in done.stdout.splitlines() if " finished |" in line]  # and nothing again
    assert " trained-" in measured
    (check,) = json.loads((out / "report.json").read_text())["break_even"]["checks"]
    assert check["variant"].startswith("trained-") and check["emitted"] == pytest.approx(accepted(3), rel=0.15)
    assert check["ratio"] == pytest.approx(1, abs=0.15)
    assert " of 1 predicted speed-ups within 5%" in done.stdout
    assert "by training's prediction trained-" in done.stdout  # its eagle3.json says 1.5 with 3 steps
    again = run_here("05_benchmark", "--config", config, "--break-even", "--steps", 3)
    assert again.returncode == 0 and "complete already" in again.stdout and "pays from accept_length" in again.stdout


def test_a_server_that_does_not_simulate_is_refused():
    heeding, deaf = (unit("steps3-accept4", 1, 0.01, a) for a in (4.0, 1.0))
    check(heeding, "http://here")
    with pytest.raises(UserError, match="http://here: accept_length 1.00, though 4 was to be simulated"):
        check(deaf, "http://here")
    check(unit("trained-0", 1, 0.01, 1.0), "http://here")


@pytest.mark.parametrize("more, why", [
    (["--steps", 0], "--steps must be from 1 to 16"), (["--steps", 17], "from 1 to 16"), (["--steps", 2, 2], "stands twice"),
    (["--accept-points", 1], "from 2 to 5"), (["--accept-points", 6], "from 2 to 5"), (["--sweep"], "Leave them out"),
    (["--doctor", "--draft-path", TINY_KIMI], "Leave them out"), (["--steps", "two"], "--steps")])
def test_flags_that_cannot_be_are_one_line(run_file, tmp_path, more, why):
    done = run_here("05_benchmark", "--config", run_file(), "--break-even", *more)
    assert done.returncode == 2 and why in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_what_break_even_needs_is_said(run_file, tmp_path):
    with pytest.raises(UserError, match="needs --launch"):
        bench.main(["--base-url", "http://127.0.0.1:1", "--break-even"])
    config = run_file()
    document = yaml.safe_load(config.read_text())
    document["servers"]["plain"]["flags"]["model-path"] = "moonshotai/Kimi-K2.5"
    config.write_text(yaml.safe_dump(document))
    done = run_here("05_benchmark", "--config", config, "--break-even")
    assert done.returncode == 2 and "moonshotai/Kimi-K2.5, where no config.json lies" in done.stderr
