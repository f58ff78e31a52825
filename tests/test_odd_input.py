"""What no script should ever be given: run files in other encodings, values that cannot be, output that nobody reads, machines without this
or that. One line and exit code 2, whatever the script; what can be meant is taken.
"""
import argparse
import contextlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, TINY_KIMI, load_script, run_here
from eagle3 import bench_flags, forecast, stage, train_flags
from eagle3.server_log import opened
from eagle3.stage import UserError, parse_args, raising, read_json, read_run_file
from eagle3.target import text_config

RUN_FILE = "run_dir: /r\ntarget: /t\ngenerate:\n  output-dir: '{run_dir}/ü'\n  limit: 5\n"


# ---- run files ----
@pytest.mark.parametrize("data", [
    b"\xef\xbb\xbf" + RUN_FILE.encode(), RUN_FILE.encode("utf-16"), RUN_FILE.replace("\n", "\r\n").encode(), RUN_FILE.encode(),
], ids=["utf-8 with a mark", "utf-16", "crlf", "utf-8"])
def test_a_run_file_in_any_unicode_is_read(data, tmp_path, monkeypatch):
    """Whatever the locale is."""
    (tmp_path / "run.yaml").write_bytes(data)
    assert read_run_file(tmp_path / "run.yaml")["generate"] == {"output-dir": "/r/ü", "limit": 5}
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    assert read_run_file(tmp_path / "run.yaml")["generate"]["output-dir"] == "/r/ü"
    (tmp_path / "x.json").write_bytes(json.dumps({"a": "ü"}, ensure_ascii=False).encode("utf-16"))
    assert read_json(tmp_path / "x.json") == {"a": "ü"}


@pytest.mark.parametrize("data, why", [
    (RUN_FILE.encode("latin-1"), "not a readable YAML file (unacceptable character #x00fc"), (RUN_FILE.encode() + b"\0", "unacceptable character #x0000"),
    (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not a readable YAML file"), (b"[" * 500, "maximum recursion depth"),
    (b"", "no sections in it, but nothing"), (b"# words\n", "no sections in it, but nothing"), (b"[1, 2]", "but a list"), (b"run_dir", "but a str"),
    (b"generate: 5\n", "generate: must be keys, not 5"), (b"train: [epochs]\n", "train: must be keys, not ['epochs']"),
    (b"run_dir: [a]\n", "run_dir: must be a path, not ['a']"), (b"trian: {}\n", "unknown section ['trian']"),
    (b"train: {epochs: 1}\ntrain: {epochs: 2}\n", "train stands there twice in line 2"),
    (b"train:\n  epochs: 1\n  lr: 1\n  epochs: 2\n", "epochs stands there twice in line 4"), (b"a: &a [*a, *b]\n", "undefined alias"),
])
def test_a_run_file_that_is_none_is_one_line(data, why, tmp_path):
    (tmp_path / "run.yaml").write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_run_file(tmp_path / "run.yaml")
    assert why in str(caught.value) and str(caught.value).startswith(f"{tmp_path}/run.yaml: ") and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("place", [".", "missing.yaml", "/proc/self/mem", "a\nb.yaml"])
def test_a_run_file_that_cannot_be_read_is_one_line(place, tmp_path):
    with pytest.raises(UserError, match="not a readable YAML file"):
        read_run_file(tmp_path / place)


# ---- every flag of every stage ----
PARSERS = {"generate": lambda: load_script("01_generate").build_parser(), "build_vocab": lambda: load_script("02_build_vocab").build_parser(),
           "extract": lambda: load_script("03_extract").build_parser(), "train": lambda: train_flags.build_parser(""),
           "benchmark": lambda: bench_flags.build_parser("")}
NEVER = {int: [float("nan"), float("inf"), 10**30, "1e5", "", " ", 1.5, "0x10", True, False, {"a": 1}, "many"],
         float: [float("nan"), float("-inf"), "", "1,5", True, {"a": 1}, 10**400],
         Path: ["", " ", "a\0b", "x" * 300, "/".join(["x" * 99] * 60), {"a": 1}, True]}


@pytest.mark.parametrize("section", PARSERS)
def test_no_flag_takes_what_it_cannot_be(section, tmp_path):
    """From a run file and from the command line; the line names the flag."""
    tried = 0
    for action in PARSERS[section]()._actions:
        if action.type not in NEVER or action.dest == "config":
            continue
        flag, several = action.option_strings[0], action.nargs or isinstance(action, argparse._AppendAction)
        required = [word for other in PARSERS[section]()._actions if other.required and other.dest != action.dest
                    for word in (other.option_strings[0], "x")]
        for value in NEVER[action.type] + ([] if several else [[1], [1, 2], []]) + ([[None], [[1]]] if several else []):
            if isinstance(action.nargs, int) and not isinstance(value, (list, bool)):
                value = [value] * action.nargs
            (tmp_path / "run.yaml").write_text(json.dumps({section: {flag[2:]: value}}), encoding="utf-8")
            with pytest.raises(UserError) as caught:
                print(flag, value, parse_args(PARSERS[section](), section, ["--config", f"{tmp_path}/run.yaml", *required]))
            assert flag[2:] in str(caught.value) and len(str(caught.value)) < 400, (flag, value)
            tried += 1
            if isinstance(value, str) and "\0" not in value:
                with pytest.raises(UserError, match=flag):
                    parse_args(PARSERS[section](), section, [f"{flag}={value}", *required])
    assert tried > 10


@pytest.mark.parametrize("argv", [["--samples", "1e5"], ["--gpu-tflops", "nan"], ["--generate-rate", "inf"], ["--target-config", ""]])
def test_the_plan_takes_no_such_values_either(argv):
    done = run_here("plan", *argv)
    assert done.returncode == 2 and argv[0] in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("section, key, value", [("generate", "limit", [1]), ("train", "epochs", "many"), ("extract", "max-length", float("nan")),
                                                 ("train", "val-ratio", {"a": 1}), ("train", "lr", "fast"), ("benchmark", "limit", 1.5)])
def test_a_forecast_of_values_that_cannot_be_is_one_line(section, key, value, tmp_path):
    def figures():
        return forecast.Forecast.of_run({"run_dir": str(tmp_path), section: {key: value}}, Path("run.yaml")).figures

    if key == "lr":
        assert figures()  # no forecast hangs on it
        return
    with pytest.raises(UserError):
        figures()


@pytest.mark.parametrize("value", ["yes", [], [True], 1, {"a": 1}])
def test_a_switch_is_on_or_off(value, tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps({"train": {"follow": value}}))
    with pytest.raises(UserError, match="follow"):
        parse_args(train_flags.build_parser(""), "train", ["--config", f"{tmp_path}/run.yaml"])


def test_times_are_those_that_clocks_take():
    parser = raising(argparse.ArgumentParser())
    assert not parser.error.__doc__
    for flag in ("--timeout-s", "--server-wait", "--request-timeout", "--log-interval"):
        parser = argparse.ArgumentParser()
        parser.add_argument(flag, type=float)
        with pytest.raises(UserError, match="more than three years"):
            raising(parser).parse_args([flag, "1e10"])


def test_paths_with_odd_letters_are_paths(tmp_path):
    for name in ("with space", "ünï/cödé", "a\nb", "-x", "{run_dir}", "~"):
        assert stage.a_path(str(tmp_path / name)) == tmp_path / name


@pytest.mark.parametrize("value", [-1, 0, "x", 1.5, [1], 10**30, True, None])
@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"])
def test_a_target_whose_sizes_are_none_is_one_line(key, value, tmp_path):
    config = json.loads((TINY_KIMI / "config.json").read_text())
    config["text_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (lambda: text_config(tmp_path), lambda: forecast.target_sizes(tmp_path / "config.json")):
        with pytest.raises(UserError, match=f"config.json: {key} is "):
            read()


# ---- how a script ends ----
def script(tmp_path, body: str) -> list[str]:
    (tmp_path / "odd.py").write_text(f"import sys, os\nsys.path.insert(0, {str(ROOT / 'scripts')!r})\nfrom eagle3.stage import *\nfrom eagle3.stage import log, run\n"
                                     f"def main(argv):\n    {body}\nrun(main)\n")
    return [sys.executable, str(tmp_path / "odd.py")]


@pytest.mark.parametrize("body, code, says", [
    ("raise UserError('a\\nb: no such folder.')", 2, r"odd: a\nb: no such folder."),
    ("open('/nope/x')", 2, "odd: /nope/x: No such file or directory (odd.py, line 6). Mend that and run the same command again."),
    ("raise OSError(122, 'Disk quota exceeded', 'y')", 1, "odd: y: Disk quota exceeded (odd.py, line 6). Mend that"),
    ("open(sys.argv[0] + '.out', 'wb').write(b'x' * 9000)", 1, "odd: a file: File too large (odd.py, line 6). Mend that"),
    ("return 1 / 0", 1, None),
])
def test_how_a_script_ends(body, code, says, tmp_path):
    done = subprocess.run(["bash", "-c", 'ulimit -f 4; exec "$@"', "-", *script(tmp_path, body)], text=True, capture_output=True)
    assert done.returncode == code and (done.stderr.startswith(says) and len(done.stderr.splitlines()) == 1 if says else "Traceback" in done.stderr), done.stderr


@pytest.mark.parametrize("shell, code, says", [
    ('"$@" | head -c 1 > /dev/null; exit ${PIPESTATUS[0]}', 1, "odd: its output cannot be written any more (Broken pipe). The same command goes on from here"),
    ('(ulimit -f 0; "$@" > out)', 1, "odd: its output cannot be written any more (File too large)"),
    ('"$@" >&-', 0, ""), ('"$@" >&- 2>&- <&-', 0, ""),
    ('mkdir gone; cd gone; rmdir ../gone; "$@" > /dev/null', 0, ""),
    ('env -i LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 "$@" > /dev/null', 0, ""),
    ('HOME=/nope TMPDIR=/nope "$@" > /dev/null', 0, ""),
])
def test_where_its_output_goes(shell, code, says, tmp_path):
    """Each line is flushed, so a script of days ends at the first that nobody takes, and can go on; without an output it works on."""
    body = "[log('ü' * 999) for _ in range(99)]; bar(5, 'x').update(1); open(sys.argv[0] + '.done', 'w').close()"
    argv = script(tmp_path, "from eagle3.stage import bar; " + body)
    done = subprocess.run(["bash", "-c", shell, "-", *argv], cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert done.returncode == code and done.stderr.startswith(says) and len(done.stderr.splitlines()) == bool(says), done.stderr
    assert (tmp_path / "odd.py.done").exists() == (code == 0)


# ---- machines ----
@contextlib.contextmanager
def largest_file(size: int):
    """As `ulimit -f`; Python ignores the signal, and a write fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_quota_is_one_line(tmp_path):
    with largest_file(0):
        with pytest.raises(UserError, match="cannot be written to .File too large"):
            stage.open_stage(tmp_path / "out", {}, set())
        with pytest.raises(UserError, match="server's log cannot be written there .File too large"):
            with opened(tmp_path / "log", "serve"):
                pass
