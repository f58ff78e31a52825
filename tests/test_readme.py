"""Commands that people copy: the READMEs', in blocks, sentences and tables, and those of the scripts' own docstrings. Each one parses.
And what the READMEs name is there: tests, files."""
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
from eagle3.stage import UserError

SCRIPTS = sorted([*ROOT.glob("0*.py"), *(ROOT / "scripts").glob("*.py"), *(ROOT / "patches").glob("sglang_patch.py")])
SHELL = sorted((ROOT / "scripts").glob("*.sh"))
READMES = sorted(path for path in ROOT.glob("*/README.md") if not path.parent.name.startswith(".")) + [ROOT / "README.md"]


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
    """{command line: its words} of all code in the READMEs, blocks and inline, and of the examples in docstrings, headers and run files."""
    readmes = "\n".join(path.read_text() for path in READMES)
    lines = re.findall(r"`((?:[^`\n])+)`", re.sub(r"```.*?```", "", readmes, flags=re.S))
    texts = re.findall(r"```(?:sh|bash|shell)\n(.*?)```", readmes, re.S)
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


@pytest.mark.parametrize("script", ["plan.py", "serve.py", "bench_train.py", "sglang_patch.py", "03_extract.py", "04_train.py"])
def test_a_wrong_flag_would_be_seen(script, monkeypatch, capsys):
    """In a command that parses without it; the flag is named as the reason, not whatever else may go wrong in main()."""
    monkeypatch.chdir(ROOT)
    words = next(words for words in COMMANDS.values() if script in [Path(word).name for word in words] and not re.search("FILE|--help", " ".join(words)))
    at = next(i for i, word in enumerate(words) if Path(word).name == script)
    parse(ROOT / words[at], words[at + 1:], monkeypatch)
    with pytest.raises((SystemExit, UserError)) as caught:
        parse(ROOT / words[at], [*words[at + 1:], "--no-such-flag"], monkeypatch)
    assert caught.type is UserError or caught.value.code == 2
    assert "--no-such-flag" in str(caught.value) + capsys.readouterr().err


def test_every_named_test_is_there():
    """tests/README.md: each name stands in the file that is named before it; each file of tests is named."""
    file, named = None, set()
    for word in re.findall(r"(test_\w+\.py)|`(test_\w+)`", (ROOT / "tests/README.md").read_text()):
        file = word[0] or file
        if word[1]:
            named.add(file)
            assert re.search(rf"^def {word[1]}\(", (ROOT / "tests" / file).read_text(), re.M), f"{file} has no {word[1]}"
    assert named == {path.name for path in (ROOT / "tests").glob("test_*.py")}


def test_every_linked_file_is_there():
    for path in READMES:
        for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert (path.parent / link).is_file(), f"{path.relative_to(ROOT)} links {link}"


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
