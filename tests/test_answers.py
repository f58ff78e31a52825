"""05 --check-answers: what counts as right, how code of answers is run, and the figures of two variants beside each other."""
import hashlib
import json
import os
import subprocess
import sys
import time
from decimal import Decimal
from types import SimpleNamespace

import pytest

from conftest import ROOT, TINY_KIMI, run_here
from eagle3 import answers, measuring
from eagle3.answers import (answer_chapter, answer_lines, answer_sentence, by_level, check_prompts, code_in, judged, number_in, program_of, run_program,
                            sign_test, spoken)
from eagle3.measured import Measured
from eagle3.stage import UserError
from paced_server import Paced


# ---- what an answer says ----
@pytest.mark.parametrize("text, number", [
    ("so 3 + 4 = 7 apples.\n#### 7", "7"), ("#### 1,234.50 dollars, not 9", "1234.5"), ("It costs $18. That is all.", "18"),
    ("first 5, then -12", "-12"), ("pages 3-5", "5"), ("x2 is .5", "0.5"), ("####\nno number here, but 4 before? 6", "4"), ("100%", "100"),
    ("#### $2,000", "2000"), ("-$3", "-3"), ("v1.2.3", None), ("none", None), ("", None)])
def test_the_number_behind_the_mark_else_the_last_one(text, number):
    assert number_in(text) == (None if number is None else Decimal(number))


def test_reasoning_and_marks_are_no_answer():
    assert spoken("<|im_middle|><think>", "maybe 3</think>It is 4.<|im_end|>") == "It is 4."
    assert spoken("<|im_middle|><think>", "maybe 3, or 5") == ""  # cut off amid its reasoning
    assert spoken("<think></think>", "It is 4.") == spoken("", "It is 4.") == "It is 4."
    assert spoken("", "<think>3</think>4") == "4" and spoken("", "<think>3") == ""


def test_the_code_of_an_answer():
    check = {"prompt": "def f(x):\n    ", "tests": "def check(c):\n    assert c(1) == 2", "entry_point": "f"}
    block = "```python\ndef f(x):\n    return x + 1\n```"
    assert code_in(f"Here:\n{block}\nUse it:\n```\nprint(f(1))\n```", check) == "def f(x):\n    return x + 1\n"
    assert code_in("return x + 1", check) == "def f(x):\n    return x + 1"  # what follows on the prompt
    assert code_in("```\nx = 1", {"tests": ""}) == "x = 1"  # a block that was cut off
    assert program_of(block, check).endswith("assert c(1) == 2\ncheck(f)\n")
    assert "check(" not in program_of(block, {"tests": "assert f(1) == 2", "entry_point": "f"})


# ---- running it ----
def test_a_program_that_is_right_and_one_that_is_wrong():
    assert run_program("assert 1 + 1 == 2") == "passed"
    assert run_program("assert 1 + 1 == 3") == run_program("def f(:") == run_program("\0") == "wrong"


@pytest.mark.parametrize("program, result", [
    ("import sys; sys.exit(0)", "wrong"), ("import os; os._exit(0)", "wrong"), ("while True: pass", "timeout"),
    ("import time; time.sleep(60)", "timeout"), ("x = bytearray(1 << 31)", "wrong"), ("open('f', 'wb').write(bytes(1 << 21))", "wrong"),
    ("import os; os.kill(os.getpid(), 9)", "killed"),
    ("print('an example')", "passed"), ("print('an example', flush=True); import sys; sys.exit(0)", "wrong"),
    ("print('x' * (1 << 21))", "passed"), ("print(open('program.py').read()); assert False", "wrong"),
    ("import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')", "passed"),  # too deep for shutil.rmtree
    ("import os; assert set(os.environ) <= {'PATH', 'HOME', 'OMP_NUM_THREADS', 'LC_CTYPE'}, os.environ", "passed"),
    ("import os; assert os.listdir() == ['program.py']", "passed"),
    ("import sys; assert sys.stdin.read() == ''", "passed")])
def test_limits_of_a_program(program, result):
    began = time.monotonic()
    assert run_program(program, timeout_s=1) == result and time.monotonic() - began < 8


def test_what_a_program_leaves_behind_ends_with_it(tmp_path):
    alive = tmp_path / "alive"
    child = f"import time; [(time.sleep(0.05), open({str(alive)!r}, 'a').write('x')) for _ in range(200)]"
    assert run_program(f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(0.4)") == "passed"
    size = alive.stat().st_size
    time.sleep(0.3)
    assert alive.stat().st_size <= size + 1


def test_a_program_ends_with_the_process_that_runs_it(tmp_path):
    """Killed with -9, that cannot end it itself."""
    alive = tmp_path / "alive"
    program = f"import time\nwhile True:\n    time.sleep(0.05)\n    open({str(alive)!r}, 'a').write('x')"
    runs = subprocess.Popen([sys.executable, "-c", "import sys; from eagle3.answers import run_program; run_program(sys.argv[1], 60)", program],
                            env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")})
    for _ in range(600):
        if alive.exists():
            break
        time.sleep(0.05)
    runs.kill()
    runs.wait()
    time.sleep(0.3)
    size = alive.stat().st_size
    time.sleep(0.5)
    assert alive.stat().st_size == size


# ---- of a measurement ----
WORDS = {1: "#### 4", 2: "#### 5", 3: "```python\ndef f():\n    return 1\n```", 4: "```python\ndef f():\n    return 2\n```", 9: ""}


def decode(ids):
    return "".join(WORDS[token] for token in ids)


def unit(variant, repeat, words, level=1):
    return {"variant": variant, "level": level, "repeat": repeat, "wall_s": 1.0, "watts": None,
            "requests": [{"id": f"p{n}", "output_ids": [word]} if word else {"id": f"p{n}", "error": "timeout", "message": ""}
                         for n, word in enumerate(words)]}


def measured(path, units):
    raw = Measured(path)
    for one in units:
        raw.add_unit({key: one[key] for key in ("variant", "level", "repeat")}, {"wall_s": 1.0, "watts": None}, one["requests"])
    return raw


def test_figures_by_hand(tmp_path):
    """Ten prompts with the answer 4. Plain: all right but p9; this: p0, p1, p2 wrong, p9 right, p8 failed. In the second run both are right."""
    units = [unit("plain", 0, [1] * 9 + [2]), unit("speculative", 0, [2, 2, 2] + [1] * 5 + [None, 1]),
             unit("plain", 1, [1] * 10), unit("speculative", 1, [1] * 10)]
    prompts = [{"id": f"p{n}", "prompt_ids": [9], "check": {"answer": "4"}} for n in range(10)]
    right = judged(measured(tmp_path / "raw.jsonl", units), prompts, decode, False)
    assert right["p0", (1,)] is True and right["p0", (2,)] is False
    found = by_level(units, right)["1"]
    assert found["plain"] == {"checked": 20, "right": 19, "cut": 0}
    own = found["speculative"]
    assert (own["checked"], own["right"], own["compared"], own["prompts"]) == (19, 16, 19, 10)
    assert own["accuracy_plain"] == 18 / 19 and own["accuracy"] == 16 / 19 and own["difference"] == pytest.approx(-2 / 19)
    assert (own["only_plain"], own["only_this"]) == (3, 1) and own["p"] == sign_test(3, 1) == 2 * (1 + 4) / 16
    assert own["interval"][0] < own["difference"] < own["interval"][1]
    lines = answer_lines({"answers": {"1": found}})
    assert lines[0].startswith("1 stream(s), plain: 19 of 20 answers are right (95.0%)") and "no harm seen" in lines[1]
    assert "84.2% right, plain 94.7%, difference -10.5 points" in lines[1] and "only plain right on 3, only this on 1" in lines[1]


def test_harm_is_said():
    harmed = {"difference": -0.2, "interval": [-0.3, -0.1], "accuracy": 0.7, "accuracy_plain": 0.9, "compared": 50, "prompts": 50,
              "only_plain": 11, "only_this": 1, "p": sign_test(11, 1), "checked": 50, "cut": 9}
    assert "speculative: harmed: 70.0% right" in answer_sentence("8", "speculative", harmed) and harmed["p"] < 0.01
    assert answer_sentence("2 requests a second", "speculative", harmed).startswith("2 requests a second, speculative: harmed")
    assert "9 of 50 were cut off at --max-tokens" in answer_sentence("8", "speculative", harmed)
    assert "- 8 stream(s), speculative: harmed" in "\n".join(answer_chapter({"answers": {"8": {"speculative": harmed}}})) and answer_chapter({}) == []
    assert "too few prompts" in answer_sentence("8", "s", harmed | {"interval": None})
    assert "better" in answer_sentence("8", "s", harmed | {"interval": [0.1, 0.2]})
    few = harmed | {"compared": 5, "prompts": 5, "only_plain": 3, "only_this": 0, "p": sign_test(3, 0)}  # a chance of 1 in 4
    assert "too few prompts to tell" in answer_sentence("8", "s", few) and "harmed" not in answer_sentence("8", "s", few)
    alike = harmed | {"difference": 0.0, "interval": [0.0, 0.0], "prompts": 20, "only_plain": 0, "only_this": 0, "p": 1.0}
    assert "no harm seen" in answer_sentence("8", "s", alike) and "+0.0 points (95 %: fewer than 13.9% of prompts part)" in answer_sentence("8", "s", alike)
    assert sign_test(0, 0) == 1 and sign_test(1, 0) == 1 and sign_test(0, 10) == 2 / 1024


def test_a_question_in_two_modes_is_one_prompt(tmp_path):
    units = [unit("plain", 0, [1] * 10), unit("speculative", 0, [2, 2] + [1] * 8)]
    for one in units:
        one["requests"] = [{**record, "question": f"q{n // 2}"} for n, record in enumerate(one["requests"])]
    prompts = [{"id": f"p{n}", "prompt_ids": [9], "check": {"answer": "4"}} for n in range(10)]
    own = by_level(units, judged(measured(tmp_path / "raw.jsonl", units), prompts, decode, False))["1"]["speculative"]
    assert (own["compared"], own["prompts"], own["only_plain"]) == (10, 5, 1)


def test_results_of_code_leave_room_for_the_probes_of_answers_that_part(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "MAX_PROBES", 1)
    with Paced(0.001) as server:
        raw = measured(tmp_path / "raw.jsonl", [unit("plain", 0, [1, 1]), unit("speculative", 0, [2, 2])])
        raw.add_server("plain", {"dtype": "bfloat16"})
        raw.add_probe("code p0 abc", {"kind": "code", "result": "passed"})
        endpoints = SimpleNamespace(variant="plain", headers={}, use=lambda variant: server.url)
        measuring.probe_differences(SimpleNamespace(measured=raw, endpoints=endpoints, args=SimpleNamespace(temperature=0),
                                                    prompts=[{"id": f"p{n}", "prompt_ids": [9]} for n in range(2)]))
    assert len(raw.probes) == 2 and server.asked == 1


def test_code_runs_once_also_over_a_kill(tmp_path, monkeypatch):
    units = [unit("plain", 0, [3, 4]), unit("plain", 1, [3, 4])]
    prompts = [{"id": f"p{n}", "prompt_ids": [9], "check": {"tests": "assert f() == 1", "entry_point": "f"}} for n in range(2)]
    ran = []
    monkeypatch.setattr(answers, "run_program", lambda program: ran.append(program) or run_program(program))
    raw = measured(tmp_path / "raw.jsonl", units)
    earlier = hashlib.sha256(program_of(WORDS[3], prompts[0]["check"]).encode()).hexdigest()
    raw.add_probe(f"code p0 {earlier}", {"kind": "code", "result": "wrong"})  # of a version that was wrong about it
    right = judged(raw, prompts, decode, True)
    assert right == {("p0", (3,)): True, ("p1", (4,)): False} and len(ran) == 2
    lines = (tmp_path / "raw.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "raw.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # killed as the last result was written
    assert judged(Measured(tmp_path / "raw.jsonl"), prompts, decode, True) == right and len(ran) == 3
    assert judged(Measured(tmp_path / "raw.jsonl"), prompts, decode, True) == right and len(ran) == 3
    assert json.loads((tmp_path / "raw.jsonl").read_text().splitlines()[-1])["result"] == "wrong"
    assert judged(Measured(tmp_path / "raw.jsonl"), prompts, decode, False) == {} and len(ran) == 3  # nothing runs unasked


def test_what_is_checked_is_said_and_nothing_to_check_is_refused(capsys):
    number, code, bare = {"id": "a", "check": {"answer": "1 #### 4"}}, {"id": "b", "check": {"tests": "assert True"}}, {"id": "c"}
    check_prompts([number, bare], False)
    assert capsys.readouterr().out == ""
    check_prompts([number, code], False)
    assert "1 prompts carry tests: not checked" in capsys.readouterr().out
    check_prompts([code], True)
    assert "WARNING: --run-code runs code that a model wrote" in capsys.readouterr().out
    for prompts, named in (([bare], "none of the 1 prompts"), ([code, bare], "only with --run-code"), ([{"id": "d", "check": {"answer": "x"}}], "'d' holds no number")):
        with pytest.raises(UserError, match=named):
            check_prompts(prompts, False)


# ---- 05 ----
def test_a_measurement_of_before_is_checked_without_asking_anybody(tmp_path):
    """The plain server says 77, the other one 88."""
    rows = [{"id": f"p{n}", "prompt_ids": [n + 1, 2], "answer": "it is #### 77"} for n in range(6)]
    rows.append({"id": "code", "prompt_ids": [9, 2], "tests": "assert 78 - 1 == 77"})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Paced(0.001, answer=lambda ids: [22, 22]) as plain, Paced(0.001, answer=lambda ids: [23, 23], speculative_algorithm="EAGLE3") as fast:
        argv = ["--base-url", fast.url, "--baseline-url", plain.url, "--prompts", tmp_path / "p.jsonl", "--concurrency", 2, "--warmup", 0,
                "--tokenizer", TINY_KIMI, "--output-dir", tmp_path / "report"]

        def report(*more) -> tuple[dict, str]:
            done = run_here("05_benchmark", *argv, *more)
            assert done.returncode == 0, done
            return json.loads((tmp_path / "report/report.json").read_text()), done.stdout

        found, _ = report()
        asked = plain.asked + fast.asked
        assert "answers" not in found
        found, said = report("--check-answers")
        own = found["answers"]["2"]["speculative"]
        assert (own["checked"], own["right"], own["only_plain"], own["prompts"]) == (12, 0, 6, 6) and own["interval"] == [-1, -1]
        assert "2 stream(s), speculative: harmed: 0.0% right, plain 100.0%" in said and "not checked" in said
        assert "## Answers" in (tmp_path / "report/report.md").read_text() and "kind\":\"code" not in (tmp_path / "report/raw.jsonl").read_text()
        found, said = report("--check-answers", "--run-code")
        assert found["answers"]["2"]["plain"]["right"] == 14 and found["answers"]["2"]["speculative"]["right"] == 2  # both programs run
        assert "WARNING: --run-code" in said and (tmp_path / "report/raw.jsonl").read_text().count("kind\":\"code") == 2
        assert plain.asked + fast.asked == asked
        done = run_here("05_benchmark", *argv, "--run-code")
        assert done.returncode == 2 and "--run-code is for --check-answers" in done.stderr
        done = run_here("05_benchmark", *argv, "--check-answers", "--break-even")
        assert done.returncode == 2 and "--check-answers: with --break-even" in done.stderr
