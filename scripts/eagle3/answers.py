"""05's --check-answers: whether answers are right, and whether speculation changes how often.

A prompt carries what its answer is held against: {"answer": "42"}, a number (of GSM8K's own answers what stands behind
####), or {"tests": "assert f(1) == 2"}, Python that fails where the answer's code is wrong ("entry_point": the name of
its function; HumanEval's `check(candidate)` is called with it). Rows of --prompts have these keys, --dataset gsm8k and
humaneval bring them; of what bench_prompts.py reads they are the prompt's "check".

Code of an answer runs with --run-code alone, each in a process group of its own: TIMEOUT_S, MEMORY_BYTES, files of at
most FILE_BYTES, an empty folder that goes with it, nothing of this environment. That keeps accidents small, not malice:
it reads what this user reads, reaches the network, and can leave its group. What ran is kept in raw.jsonl and does not
run again.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np

from eagle3.figures import paired, prompt_of, resampled
from eagle3.measured import Measured
from eagle3.stage import UserError, log
from eagle3.tokens import load_tokenizer

TIMEOUT_S, MEMORY_BYTES, FILE_BYTES = 10, 1 << 30, 1 << 20
THINK, THOUGHT, TAIL = "<think>", "</think>", 16  # tokens of a prompt's end in which they are looked for
NUMBER = re.compile(r"(?<![\w.])-?\$?\d[\d,]*(?:\.\d+)?|(?<![\w.])-?\.\d+")
MARK = re.compile(r"<\|[^|<>]*\|>")
FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S | re.I)
# Limits first, then the file. Where that comes to its end, and is not left by sys.exit or the like, a token is written.
# What the program itself prints goes nowhere: it would come before the token or after it. prctl: it ends when 05 does
LAUNCH = """
import ctypes, os, resource, sys
ctypes.CDLL(None).prctl(1, 9)
seconds, memory, size = map(int, sys.argv[1:4])
for what, most in (("AS", memory), ("FSIZE", size), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + what), (most, most))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first tells SIGXCPU from a kill
token, end = sys.argv[4].encode(), os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.argv = ["program.py"]
exec(compile(open("program.py").read(), "program.py", "exec"), {"__name__": "__main__"})
os.write(end, token)
"""


# ---- what an answer says ----
def spoken(before: str, text: str) -> str:
    """An answer without its reasoning and the marks of turns. "" where the reasoning has no end.

    before: the end of the prompt, which may have begun the reasoning.
    """
    whole = before[max(0, before.rfind(THOUGHT)):] + text
    if whole.rfind(THINK) > whole.rfind(THOUGHT):
        return ""
    return MARK.sub("", text.rpartition(THOUGHT)[2])


def number_in(text: str) -> Decimal | None:
    """The number behind the last ####, else the last one."""
    marked = NUMBER.search(text.rpartition("####")[2]) if "####" in text else None
    found = [marked[0]] if marked else NUMBER.findall(text)
    with contextlib.suppress(InvalidOperation):
        return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None
    return None


def code_in(text: str, check: dict) -> str:
    """The code of an answer: its last fenced block that defines the wanted function, else the last one, else all.

    Where the function is nowhere defined, the answer is what follows on the prompt (HumanEval's own form).
    """
    blocks, name = FENCED.findall(text) or [text], check.get("entry_point")
    defines = re.compile(rf"^\s*(?:async\s+)?def\s+{re.escape(name)}\b" if name else r"^", re.M)
    code = next((block for block in reversed(blocks) if defines.search(block)), None)
    return code if code is not None else check.get("prompt", "") + blocks[-1]


def program_of(text: str, check: dict) -> str:
    called = f"\ncheck({check['entry_point']})" if "def check(" in check["tests"] and check.get("entry_point") else ""
    return f"{code_in(text, check)}\n\n{check['tests']}{called}\n"


def run_program(program: str, timeout_s: int = TIMEOUT_S) -> str:
    """Runs it in a process of its own; "passed", or why it did not: "wrong" (an exception), "timeout", "killed"."""
    token, folder = secrets.token_hex(16), tempfile.mkdtemp()
    try:
        Path(folder, "program.py").write_text(program, errors="replace")
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", LAUNCH, *map(str, (timeout_s, MEMORY_BYTES, FILE_BYTES)), token],
                cwd=folder, env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)
            try:
                code = process.wait(timeout=timeout_s + 1)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # with all of its group that is left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            ended = output.read() == token.encode()
    finally:  # shutil.rmtree fails on folders in folders without end, and on files that still come
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)
    if code is None or code == -signal.SIGXCPU:
        return "timeout"
    return "passed" if code == 0 and ended else "killed" if code < 0 else "wrong"


# ---- all of them ----
def check_prompts(prompts: list[dict], run_code: bool) -> None:
    """Says what of the prompts is checked. Raises UserError where nothing is."""
    numbers = [prompt for prompt in prompts if "answer" in prompt.get("check", ())]
    tests = sum("tests" in prompt.get("check", ()) for prompt in prompts)
    for prompt in numbers:
        if number_in(str(prompt["check"]["answer"])) is None:
            raise UserError(f"--check-answers: the answer of {prompt['id']!r} holds no number. Only numbers and tests "
                            "are checked: take the key \"answer\" out of that row.")
    if not numbers and not tests:
        raise UserError(f"--check-answers: none of the {len(prompts)} prompts carries an \"answer\" or \"tests\". Use "
                        "rows that do, or --dataset gsm8k or humaneval.")
    if tests and not run_code and not numbers:
        raise UserError(f"--check-answers: all {tests} prompts to check carry tests, and code that a model wrote runs "
                        "only with --run-code.")
    if tests and not run_code:
        log(f"note: {tests} prompts carry tests: not checked, as code that a model wrote runs only with --run-code")
    if tests and run_code:
        log(f"WARNING: --run-code runs code that a model wrote, of {tests} prompts, as this user, with limits on time, "
            f"memory and files ({TIMEOUT_S} s, {MEMORY_BYTES >> 20} MiB, {FILE_BYTES >> 20} MiB) and none on reading "
            "and the network. Do that in a container")


def judged(measured: Measured, prompts: list[dict], decode, run_code: bool) -> dict[tuple, bool]:
    """{(id, output ids): whether that answer is right} of all answers to prompts that are checked.

    decode: token ids -> text. What ran stands in raw.jsonl, so that a run that was killed goes on.
    """
    wanted = {"answer", "tests"} if run_code else {"answer"}
    about = {prompt["id"]: prompt for prompt in prompts if wanted & prompt.get("check", {}).keys()}
    found, ran = {}, 0
    for record in (record for unit in measured.units for record in unit["requests"]):
        prompt, key = about.get(record["id"]), (record["id"], tuple(record.get("output_ids", ())))
        if prompt is None or "error" in record or key in found:
            continue
        check, text = prompt["check"], spoken(decode(prompt["prompt_ids"][-TAIL:]), decode(record["output_ids"]))
        if "answer" in check:
            found[key] = number_in(text) == number_in(str(check["answer"]))
            continue
        program = program_of(text, check)
        # rows called `code ...` are of an earlier 05, which took each program that prints something for wrong
        name = f"program {record['id']} {hashlib.sha256(program.encode(errors='replace')).hexdigest()}"
        if name not in measured.probes:
            measured.add_probe(name, {"kind": "code", "result": run_program(program)})
            ran += 1
            if ran % 50 == 0:
                log(f"{ran} programs of answers ran")
        found[key] = measured.probes[name]["result"] == "passed"
    return found


def answer_figures(measured: Measured, prompts: list[dict], tokenizer: str, args: argparse.Namespace) -> dict:
    """Of `by_level`. tokenizer: its folder; args: run_code, trust_remote_code. Raises UserError."""
    decode = load_tokenizer(tokenizer, args.trust_remote_code).decode
    return by_level(measured.units, judged(measured, prompts, decode, args.run_code))


def by_level(units: list[dict], right: dict[tuple, bool]) -> dict[str, dict[str, dict]]:
    """{level: {variant: how often its answers and the plain ones are right}}; units: all, right: of `judged`."""
    found = {}
    for level in dict.fromkeys(unit["level"] for unit in units):
        of = [unit for unit in units if unit["level"] == level]
        plain = [unit for unit in of if unit["variant"] == "plain"]
        for variant in dict.fromkeys(unit["variant"] for unit in of):
            own = [unit for unit in of if unit["variant"] == variant]
            pairs = [(a, b) for a, b in paired(plain, own) if known(a, right) is not None]
            alone = [record for unit in own for record in unit["requests"] if known(record, right) is not None]
            if alone:
                found.setdefault(str(level), {})[variant] = {
                    "checked": len(alone), "right": sum(known(record, right) for record in alone),
                    "cut": sum(record.get("finish") == "length" for record in alone),
                    **(beside_plain(pairs, right) if variant != "plain" and pairs else {})}
    return found


def known(record: dict, right: dict[tuple, bool]) -> bool | None:
    return right.get((record["id"], tuple(record["output_ids"]))) if "error" not in record else None


def beside_plain(pairs: list[tuple[dict, dict]], right: dict[tuple, bool]) -> dict:
    """Accuracy of two variants on answers to the same prompts in the same runs.

    `interval`: 95 %, of the difference, over prompts (bootstrap). `only_plain`, `only_this`: prompts that one of the
    two has right more often; `p`: the chance that equal servers part at least so far (McNemar's exact test).
    """
    rows = {}
    for plain, own in pairs:
        row = np.array([known(plain, right), known(own, right), 1], float)
        rows[prompt_of(plain)] = rows.get(prompt_of(plain), 0) + row
    values = np.stack(list(rows.values()))
    total = values.sum(0)
    only_plain, only_this = int((values[:, 0] > values[:, 1]).sum()), int((values[:, 1] > values[:, 0]).sum())
    return {"compared": len(pairs), "prompts": len(rows), "accuracy_plain": total[0] / total[2],
            "accuracy": total[1] / total[2], "difference": (total[1] - total[0]) / total[2],
            "interval": resampled(values, lambda s: (s[1] - s[0]) / s[2]),
            "only_plain": only_plain, "only_this": only_this, "p": sign_test(only_plain, only_this)}


def sign_test(one: int, other: int) -> float:
    """Two-sided: the chance that fair coins part as far as `one` to `other` or further."""
    tosses, least = one + other, min(one, other)
    return min(1.0, 2 * sum(math.comb(tosses, k) for k in range(least + 1)) / 2 ** tosses)


# ---- said ----
def answer_sentence(level: str, variant: str, f: dict) -> str:
    """Of one variant at one level."""
    cut = f" {f['cut']} of {f['checked']} were cut off at --max-tokens." if f["cut"] else ""
    where = f"{level} stream(s)" if level.isdigit() else level
    if "difference" not in f:
        return (f"{where}, {variant}: {f['right']} of {f['checked']} answers are right "
                f"({f['right'] / f['checked']:.1%}).{cut}")
    interval, points = f["interval"], 100 * f["difference"]
    if interval is None:
        word, bounds = "too few prompts to tell", ""
    else:
        bounds = f" (95 % interval {100 * interval[0]:+.1f} to {100 * interval[1]:+.1f})"
        word = "no harm seen" if interval[0] <= 0 <= interval[1] else "too few prompts to tell" if f["p"] >= 0.05 else \
            "harmed" if interval[1] < 0 else "better"  # resamples of few prompts alone say harm in 1 of 9 equal cases
        if not f["only_plain"] + f["only_this"]:  # of which no resample can tell how rare parting is
            bounds = f" (95 %: fewer than {1 - 0.05 ** (1 / f['prompts']):.1%} of prompts part)"
    return (f"{where}, {variant}: {word}: {f['accuracy']:.1%} right, plain {f['accuracy_plain']:.1%}, "
            f"difference {points:+.1f} points{bounds}, on {f['compared']} pairs of answers to {f['prompts']} prompts; "
            f"only plain right on {f['only_plain']}, only this on {f['only_this']} (McNemar p {f['p']:.2g}).{cut}")


def answer_lines(report: dict) -> list[str]:
    return [answer_sentence(level, variant, f) for level, row in report.get("answers", {}).items()
            for variant, f in row.items()]


def answer_chapter(report: dict) -> list[str]:
    """Of report.md."""
    lines = answer_lines(report)
    return ["", "## Answers", "", "Numbers, and code by its tests, right or wrong; intervals over prompts.", "",
            *(f"- {line}" for line in lines)] if lines else []
