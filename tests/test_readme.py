"""Commands that people copy: the README's, in blocks, sentences and tables, and those of the scripts' own docstrings. Each one parses."""
import argparse
import ast
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, load_script

SCRIPTS = sorted([*ROOT.glob("0*.py"), *(ROOT / "scripts").glob("*.py"), *(ROOT / "patches").glob("sglang_patch.py")])
SHELL = sorted((ROOT / "scripts").glob("*.sh"))


def words_of(line: str) -> list[str]:
    """The command in a line, up to a redirection, pipe or &."""
    words = shlex.split(line, comments=True)
    for end in (">", "2>&1", "|", "&", "&&", ";"):
        words = words[:words.index(end)] if end in words else words
    return words


def is_ours(words: list[str]) -> bool:
    return len(words) > 1 and any(re.fullmatch(r"(?:python3?|torchrun|bash|pytest|nohup|taskset)", word) for word in words[:4]) \
        and any(word.endswith((".py", ".sh")) for word in words) and "..." not in words


def commands() -> dict[str, list[str]]:
    """{command line: its words} of all code in the README, blocks and inline, and of the examples in docstrings, headers and run files."""
    readme = (ROOT / "README.md").read_text()
    lines = re.findall(r"`((?:[^`\n])+)`", re.sub(r"```.*?```", "", readme, flags=re.S))
    texts = re.findall(r"```(?:sh|bash|shell)\n(.*?)```", readme, re.S)
    texts += [ast.get_docstring(ast.parse(path.read_text()), clean=False) or "" for path in SCRIPTS]
    texts += [re.sub(r"^# ?", "", path.read_text(), flags=re.M) for path in [*SHELL, *(ROOT / "configs").glob("*.yaml")]]
    for text in texts:
        joined = re.sub(r"\\\n\s*", " ", text)
        lines += [line.strip() for line in joined.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", joined) + re.findall(r"^train: +# (.+)$", joined, re.M)
    found = {}
    for line in lines:
        line = re.split(r"\s{2,}(?![\s-])", line)[0]  # what stands behind a gap is prose, unless it is a flag
        starts = re.match(r"(?:\w+=\S+ )*(?:python|torchrun|bash|pytest|nohup|taskset)", line)
        if starts and re.search(r"\.(py|sh)\b", line) and not re.search(r"[$({]|\.\.\.", line):
            words = words_of(line)
            if is_ours(words):
                found[" ".join(words)] = words
    return found


COMMANDS = commands()


def test_commands_are_found_where_they_stand():
    """The search itself: one of each kind it must know."""
    scripts = {Path(word).name for words in COMMANDS.values() for word in words if word.endswith((".py", ".sh"))}
    assert {"01_generate.py", "03_extract.py", "04_train.py", "05_benchmark.py", "quickstart.sh", "test.sh", "rehearse.sh", "serve.py", "sglang_patch.py",
            "bench_generate.py", "bench_train.py", "plan.py", "preflight.py"} <= scripts
    assert any(words[0] == "torchrun" for words in COMMANDS.values()) and len(COMMANDS) > 30


def test_torchrun_behind_nohup_is_out_of_a_hangups_reach():
    """torchrun sets its own SIGHUP handler over the one that nohup ignores it with: a dropped connection would end it."""
    behind = [words for words in COMMANDS.values() if words[0] == "nohup" and "torchrun" in words]
    assert behind and all(words[1] == "setsid" for words in behind)


def parse(script: Path, argv: list[str], monkeypatch) -> None:
    """Run the script's main() up to where its own parser has read argv. Raises what the parser raises."""
    module = load_script(script.stem)

    class Parsed(Exception):
        pass

    real = argparse.ArgumentParser.parse_args

    def stop(self, *args, **kwargs):
        raise Parsed(real(self, *args, **kwargs))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [str(script), *argv])
    with pytest.raises(Parsed):
        module.main(*[argv][:len(inspect.signature(module.main).parameters)])


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_command_parses(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = COMMANDS[line]
    at = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh")) and not word.startswith("-"))
    script, argv = ROOT / words[at], words[at + 1:]
    assert script.is_file(), words[at]
    if "--config" in argv and "X.yaml" not in argv[argv.index("--config") + 1] and "FILE" not in line:
        assert (ROOT / argv[argv.index("--config") + 1]).is_file()
    if "--help" in argv or "X.yaml" in line or "FILE" in line or script.name == "serve.py" and "cpu_engine" in str(script):
        return  # a placeholder; the engine hands its flags on to SGLang
    if "pytest" in words[:at]:
        return
    if script.suffix == ".sh":
        text = script.read_text()
        for word in argv:
            assert not word.startswith("--") or re.search(rf"{re.escape(word)}[)|\" ]", text), word
        return
    parse(script, argv, monkeypatch)


def test_a_wrong_flag_would_be_seen(monkeypatch):
    for script in ("scripts/plan.py", "scripts/serve.py", "03_extract.py"):
        with pytest.raises((SystemExit, Exception)) as caught:
            parse(ROOT / script, ["--no-such-flag"], monkeypatch)
        assert "Parsed" not in repr(caught.value)


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_scripts_parse(path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0
    help_text = subprocess.run(["bash", str(path), "--help"], capture_output=True, text=True, timeout=60).stdout if "--help)" in path.read_text() else None
    if help_text is not None:  # the header is the help; every flag that is taken is told
        taken = set(re.findall(r"(--[a-z-]+)[)|]", path.read_text())) - {"--help"}
        assert taken and all(flag in help_text for flag in taken), taken


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.parent != ROOT], ids=lambda path: path.name)
def test_scripts_say_how_they_are_called(path):
    """Each script under scripts/ and patches/ shows a command of its own in its docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert re.search(rf"(?:python3?|torchrun).*{re.escape(path.name)}", docstring)
