"""05 against what goes wrong around it: remote code, secrets, runs that differ, damaged files, full disks, other
people's drafters.
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from conftest import CAPTURE_LAYERS, ROOT, TINY_KIMI, free_port, load_script, run_here
from eagle3 import bench_flags, binding, charts, masking, plots, stage
from eagle3.doctor import Facts, examine
from eagle3.endpoints import read_key, split_login
from eagle3.figures import level_figures, resampled, speed_up
from eagle3.measured import Measured
from eagle3.report import verdict
from eagle3.drafter_files import first_release
from eagle3.sglang_draft import loaded, parameter_of, wanted
from eagle3.stage import UserError, sha256_file
from eagle3.variants import same_folder
from paced_server import Paced
from test_benchmark import HEAD_DIM, HEADS, HIDDEN, answer, make_drafter, patient, units_of  # noqa: F401

bench = load_script("05_benchmark")


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    monkeypatch.setattr(masking, "_hidden", set())


def rows(folder: Path, count=6, **more) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "prompt_ids": [n + 1, 2], **more}) + "\n" for n in range(count)))
    return path


def pair(pace_s=0.002, **both) -> tuple[Paced, Paced]:
    return Paced(pace_s, seed=1, **both), Paced(pace_s, seed=2, speculative_algorithm="EAGLE3", **both)


def flags(plain: Paced, fast: Paced, prompts: Path, out: Path, *more) -> list[str]:
    return list(map(str, ["--base-url", fast.url, "--baseline-url", plain.url, "--prompts", prompts, "--concurrency", 1,
                          "--max-tokens", 8, "--warmup", 0, "--output-dir", out, *more]))


def report_of(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


# ---- remote code ----
def test_code_of_a_tokenizer_runs_only_when_it_is_asked_for(tmp_path):
    """The path comes from the server, which can name any folder or any repository."""
    folder, marker = tmp_path / "model", tmp_path / "it_ran"
    folder.mkdir()
    for path in TINY_KIMI.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((TINY_KIMI / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    config["chat_template"] = config.get("chat_template") or "{{ messages[0].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n"
                                    "class Evil(PreTrainedTokenizerFast):\n    pass\n")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"id": f"p{n}", "prompt": "hello"}) + "\n" for n in range(6)))
    with Paced(model_path=str(folder), speculative_algorithm="EAGLE3") as server:
        argv = ["--base-url", server.url, "--prompts", tmp_path / "p.jsonl", "--concurrency", 1, "--max-tokens", 4,
                "--warmup", 0, "--repeats", 1, "--output-dir", tmp_path / "report"]
        done = run_here("05_benchmark", *argv)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "--trust-remote-code" in done.stderr, done.stderr
        assert not marker.exists() and server.asked == 0
        done = subprocess.run([sys.executable, ROOT / "05_benchmark.py", *map(str, argv), "--trust-remote-code"], text=True,
                              capture_output=True, env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache")})
        assert done.returncode == 0, done.stderr
        assert marker.exists() and server.asked == 6


# ---- secrets ----
def test_no_secret_of_a_run_file_stands_in_any_file_of_a_run_or_in_what_it_prints(tmp_path):
    """The servers print theirs, as SGLang does, and repeat it in a refusal."""
    secrets = {"api-key": "sk-run\"file'key", "HF_TOKEN": "hf_of_the_run_file"}
    plain = {"model-path": str(TINY_KIMI), "port": free_port(), "api-key": secrets["api-key"]}
    document = {"run_dir": str(tmp_path / "run"), "servers": {
        "plain": {"command": ["{python}", str(ROOT / "tests/paced_server.py")], "flags": plain,
                  "env": {"HF_TOKEN": secrets["HF_TOKEN"]}},
        "speculative": {"extends": "plain", "flags": {"speculative-algorithm": "EAGLE3"}}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    argv = [sys.executable, ROOT / "05_benchmark.py", "--config", tmp_path / "run.yaml", "--launch", "--sweep",
            "--sweep-grid", "1,1,2",
            "--prompts", rows(tmp_path), "--concurrency", 2, "--max-tokens", 4, "--output-dir",
            tmp_path / "run" / "report"]

    def run(**env):
        return subprocess.run(list(map(str, argv)), text=True, capture_output=True, env={**os.environ, **env},
                              timeout=120)

    def seen(done) -> list[str]:
        files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
        assert {"stage.json", "raw.jsonl", "report.json", "report.md", "server_plain.log"} <= {path.name
                                                                                               for path in files}
        texts = {path.name: path.read_bytes().decode(errors="replace") for path in files} | {"out": done.stdout,
                                                                                             "err": done.stderr}
        return [name for name, text in texts.items()
                if any(part in text for part in ("sk-run", "file'key", "hf_of_the"))]

    done = run()  # its key reaches the servers without --api-key-env
    assert done.returncode == 0, done.stderr
    assert seen(done) == []
    assert "--api-key" in done.stdout and "HF_TOKEN=" in done.stdout  # the command is shown, less the secrets
    assert "--api-key" in report_of(tmp_path / "run" / "report")["sweep"]["2"]["command"]
    # another key is no other measurement
    document["servers"]["plain"]["flags"] |= {"api-key": "sk-run-another-one", "port": free_port()}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    again = run()
    assert again.returncode == 0 and "complete already" in again.stdout, again.stderr
    assert seen(again) == []
    # a server that repeats the key it was given
    argv += ["--repeats", 2, "--api-key-env", "MY_KEY"]
    refused = run(MY_KEY="sk-run-wrong")
    assert refused.returncode == 2 and "refuses the API key (401)" in refused.stderr
    assert seen(refused) == []


def test_a_folder_of_before_gives_its_secrets_up_and_goes_on(tmp_path):
    """Older reports hold the run file's servers as they stand there."""
    out, old = tmp_path / "report", {"plain": {"flags": {"api-key": "sk-in-an-old-file", "port": 1, "tp-size": 8}},
                                     "speculative": {"extends": "plain"}, "extract": {"extends": "plain"}}
    out.mkdir()
    (out / "raw.jsonl").write_text('{"kind":"unit","variant":"plain","level":1,"repeat":0,"wall_s":1.0,"watts":null}\n')
    config = {"max-tokens": 8}
    stale = {**config, "inputs": {"prompts": "x"}, "servers": old, "repeats": 1, "prompts": ["spelled/so"]}
    (out / "stage.json").write_text(json.dumps(stale))
    new = json.loads(json.dumps(old) .replace('"port": 1', '"port": 2'))
    wanted_now = binding.bound({**config, "repeats": 2, "prompts": ["spelled/otherwise"]}, {"prompts": "x"}, new)
    stage.open_stage(out, wanted_now, bench_flags.MAY_CHANGE, lambda found: binding.renewed(found, out)).close()
    assert "sk-in-an-old-file" not in (out / "stage.json").read_text()
    (out / "stage.json").write_text(json.dumps(stale | {"servers": json.loads(json.dumps(old).replace("8}", "4}"))}))
    with pytest.raises(UserError, match="begun with another config") as caught:
        stage.open_stage(out, wanted_now, bench_flags.MAY_CHANGE, lambda found: binding.renewed(found, out))
    assert "sk-in" not in str(caught.value) and "tp-size" in str(caught.value)


@pytest.mark.parametrize("key, why", [
    ("sk with space", "its character 3 can stand in no HTTP header"), ("sk-key\n", "its character 7"),
    ("schlüssel", "its character 5"),
    ("", "is not set")])
def test_keys_that_no_header_takes_are_one_line_without_the_key(monkeypatch, key, why):
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(UserError, match=why) as caught:
        read_key("MY_KEY")
    assert "MY_KEY" in str(caught.value) and (not key or key not in str(caught.value))
    assert len(str(caught.value).splitlines()) == 1


def test_a_key_in_the_place_of_its_variables_name_is_not_repeated(monkeypatch):
    with pytest.raises(UserError, match="takes the name of an environment variable") as caught:
        read_key("sk-0123456789abcdef")
    assert "sk-0123" not in str(caught.value)
    monkeypatch.setenv("lower_case", "sk-fine")
    assert read_key("lower_case") == "sk-fine" and read_key(None) is None


def test_a_login_in_a_url_is_used_and_never_shown(tmp_path, capsys):
    assert split_login("base-url", "http://me:p%40ss-word@host:30000/v1/") == (
        "http://host:30000/v1", "Basic bWU6cEBzcy13b3Jk")  # base64 of me:p@ss-word
    assert split_login("base-url", "http://host:30000") == ("http://host:30000", None)
    for bad in ("me:pass-word@host:30000", "http://me:pass-word@", "ftp://me:pass-word@host", "http://host:http",
                "http://host:99999",
                "http://host?api_key=pass-word", "http://me:pass-word@host#x"):
        with pytest.raises(UserError) as caught:
            split_login("base-url", bad)
        assert "pass-word" not in masking.clean(str(caught.value)) and "--base-url" in str(caught.value), bad
    prompts = rows(tmp_path)
    with pytest.raises(UserError, match="no SGLang answers there"):
        bench.main(["--base-url", f"http://me:pass-word@127.0.0.1:{free_port()}", "--prompts", str(prompts),
                    "--tokenizer", "none",
                    "--output-dir", str(tmp_path / "report")])
    texts = [path.read_text() for path in (tmp_path / "report").iterdir()] + [*capsys.readouterr()]
    assert all("pass-word" not in text for text in texts)


# ---- intervals ----
def made_up(runs: list[float], prompts: int = 40, spread: float = 0.0, seed: int = 0,
            speed: float = 100.0) -> list[dict]:
    """Units whose runs are so many times as slow as one another; prompts are as long as the prompts are."""
    random, units = np.random.default_rng(seed), []
    lengths = random.integers(50, 150, prompts)
    for repeat, slow in enumerate(runs):
        seconds = lengths / speed * slow * np.exp(random.normal(0, spread, prompts))
        requests = [{"id": f"p{n}", "completion_tokens": int(length), "latency_s": float(second),
                     "times_s": [0.0, float(second)],
                     "counts": [1, int(length)], "finish": "stop", "spec": None, "output_ids": []}
                    for n, (length, second) in enumerate(zip(lengths, seconds))]
        units.append({"variant": "x", "level": 1, "repeat": repeat, "wall_s": float(seconds.sum()), "watts": None,
                      "requests": requests})
    return units


def test_the_interval_is_students_where_only_runs_differ():
    """Two runs 2 % apart on each side: standard error 0.02 of the ratio's log, two degrees of freedom."""
    one = made_up([np.exp(-0.01), np.exp(0.01)])
    found = speed_up(one, one)
    assert found["speed_up"] == pytest.approx(1) and found["no_interval"] is None
    error = np.sqrt((2 * 0.01**2 + 2 * 0.01**2) / 2 * (1 / 2 + 1 / 2))
    assert np.log(found["interval"]) == pytest.approx([-4.303 * error, 4.303 * error], rel=0.1)  # t(2) at 97.5 %
    four = made_up([np.exp(sign * 0.01) for sign in (-1, 1, -1, 1)])
    error = np.sqrt(8 * 0.01**2 / 6 * (1 / 4 + 1 / 4))
    assert np.log(speed_up(four, four)["interval"]) == pytest.approx([-2.447 * error, 2.447 * error], rel=0.1)  # t(6)


def test_the_interval_is_the_bootstraps_where_only_prompts_differ():
    fast = made_up([1.0, 1.0], speed=150.0)
    for unit in fast:
        for request in unit["requests"][::2]:  # half of the prompts gain nothing
            request["latency_s"] *= 1.5
        unit["wall_s"] = sum(request["latency_s"] for request in unit["requests"])
    found = speed_up(made_up([1.0, 1.0]), fast)
    low, high = found["interval"]
    assert low < found["speed_up"] < high and 0.03 < np.log(high / low) < 0.3
    once = speed_up(made_up([1.0]), fast[:1])
    assert once["speed_up"] == found["speed_up"] and once["interval"] is None


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_equal_servers_are_found_equal_in_nearly_all_of_many_measurements(repeats):
    """Runs that differ by 3 %, requests by 20 %: a prompts-only bootstrap of one run each holds 1.0 in a third of
    them.
    """
    random, held, said, narrow = np.random.default_rng(5), 0, [], 0
    for trial in range(50):
        plain, other = (made_up(np.exp(random.normal(0, 0.03, repeats)), spread=0.2, seed=3 + trial) for _ in range(2))
        found = speed_up(plain, other)
        low, high = found["interval"]
        held += low <= 1 <= high
        narrow += high / low < 1.01
        said.append(verdict({"plain": level_figures(plain), "s": level_figures(other) | found}))
    assert held >= 45 and narrow < 3, (held, narrow)
    assert sum("undecided" in word for word in said) == held


def test_few_prompts_hold_the_truth_about_as_often_as_many():
    """Of five prompts the middle 95 % of a bootstrap hold it in 83 %."""
    random, held = np.random.default_rng(1), 0
    for _ in range(300):
        steps = random.integers(20, 60, 5).astype(float)
        low, high = resampled(np.stack([steps, steps * (1.3 + random.normal(0, 0.3, 5))], 1), lambda s: s[1] / s[0])
        held += low <= 1.3 <= high
    assert held >= 0.88 * 300, held


def test_eight_equal_measurements_of_a_paced_server_hold_one(tmp_path, capsys):
    """05 itself, over HTTP; the two servers' runs differ by 4 % in pace."""
    plain, fast = pair(jitter=0.04, tokens=6)
    # Of ten seeds eight held all and two held seven; this one's draws have the most to spare, so that what misses is no chance of the draws
    plain.random.seed(15), fast.random.seed(16)
    held, wide, prompts = 0, [], rows(tmp_path, 8)
    with plain, fast:
        for trial in range(8):
            out = tmp_path / f"report{trial}"
            assert not bench.main(flags(plain, fast, prompts, out, "--repeats", 2))
            figures = report_of(out)["levels"]["1"]["speculative"]
            low, high = figures["interval"]
            held += low <= 1 <= high
            wide.append(high / low)
            assert len(figures["tok_s_repeats"]) == 2 and (out / "manifest.json").exists()
    assert held >= 7, (held, wide)
    order = [line.split(" finished")[0].split()[-3] for line in capsys.readouterr().out.splitlines()
             if " finished | " in line]
    assert order[:4] == ["plain", "speculative", "speculative", "plain"]


def test_one_prompt_or_one_run_gives_no_verdict(tmp_path, capsys):
    def said(prompts, runs, speed=200.0):
        plain, fast = made_up([1.0] * runs, prompts), made_up([1.0] * runs, prompts, speed=speed)
        return verdict({"plain": level_figures(plain), "speculative": level_figures(fast) | speed_up(plain, fast)})

    assert said(1, 4) == "speculative: no verdict (2.00x; 1 prompt with an answer of both, 5 are needed)"
    assert "4 prompts with an answer of both, 5 are needed" in said(4, 4)
    assert said(40, 1).startswith("speculative: no verdict (2.00x; measured once, so how far two runs of the same differ is not known")
    assert said(40, 2).startswith("speculative: serve it (2.00x, 95 % interval")
    assert said(40, 2, 50.0).startswith("speculative: do not serve it: slower (0.50x")
    plain, fast = pair()
    with plain, fast:
        argv = flags(plain, fast, rows(tmp_path), tmp_path / "report")
        assert not bench.main([*argv, "--repeats", "1"])
        out = capsys.readouterr().out
        assert "note: measured once" in out and "no verdict" in out and "serve it" not in out
        # the remedy works in the same folder, and measures only what is not there
        asked = plain.asked
        assert not bench.main([*argv, "--repeats", "2"])
        out = capsys.readouterr().out
        assert plain.asked - asked == 6 and "2 finished before" in out and "95 % interval" in out
        assert not bench.main(argv)  # without the flag a finished report is what it is
        assert "complete already" in capsys.readouterr().out


# ---- answers of nothing ----
def test_answers_without_a_token_are_counted_and_averaged_into_nothing(tmp_path, capsys):
    plain, fast = pair(empty=[2, 4])  # of six prompts
    with plain, fast:
        assert not bench.main(flags(plain, fast, rows(tmp_path), tmp_path / "some"))
        figures = report_of(tmp_path / "some")["levels"]["1"]["plain"]
        assert figures["empty"] == 4 and figures["failed"] == {} and figures["output_tokens"] == 2 * 4 * 8
        assert figures["ttft_s"]["p50"] == pytest.approx(0.002, abs=0.01)
        assert figures["decode_step_s"] == pytest.approx(0.002, abs=0.002)
        verdicts = report_of(tmp_path / "some")["verdict"]["1"]
        assert "4 of 12 answers of plain are empty" in verdicts
        assert "a verify step takes" in (tmp_path / "some" / "report.md").read_text()
        emitted = [line for line in (tmp_path / "some" / "report.md").read_text().splitlines() if "emits" in line]
        assert "emits 1.00 tokens" in emitted[0]  # 7 steps for 7 tokens of each answer that has one
    plain, fast = pair(empty=range(1, 9))
    with plain, fast:
        assert not bench.main(flags(plain, fast, rows(tmp_path), tmp_path / "none"))
    found, out = report_of(tmp_path / "none"), capsys.readouterr()
    assert "no token came back" in out.out and found["verdict"]["1"] == "no token came back, so no speed-up"
    assert found["levels"]["1"]["plain"]["tok_s"] is None and found["levels"]["1"]["plain"]["empty"] == 12


# ---- damage ----
KEYS = [("plain", 1, 0), ("speculative", 1, 0), ("speculative", 1, 1), ("plain", 1, 1)]


@pytest.fixture
def raw(tmp_path):
    """raw.jsonl of four units of three requests, with a server and a probe; and its lines."""
    path = tmp_path / "raw.jsonl"
    begun = Measured(path, ["a", "b", "c"])
    begun.add_server("plain", {"version": "0.5.23", "context_length": 4096})
    for variant, level, repeat in KEYS:
        begun.add_unit({"variant": variant, "level": level, "repeat": repeat}, {"wall_s": 1.5, "watts": None},
                       [{"id": name, "latency_s": 0.25} for name in "abc"])
    begun.add_probe("a:3:[1, 2]", {"gap": 9.0, "kind": "fault"})
    return path, path.read_bytes().splitlines(keepends=True)


def left(path: Path) -> list[tuple]:
    return [(unit["variant"], unit["level"], unit["repeat"]) for unit in Measured(path, ["a", "b", "c"]).units]


@pytest.mark.parametrize("damage", [
    lambda line: b"\0" * (len(line) - 1) + b"\n", lambda line: line[:9] + b"\n", lambda line: b"\xff\xfe" + line[2:],
    lambda line: line.replace(b"0.25", b"0.26").replace(b"1.5", b"1.6"), lambda line: b"", lambda line: line + line,
    lambda line: b"[1, 2]\n", lambda line: line.replace(b'"level":1', b'"level":null')])
@pytest.mark.parametrize("number", range(1, 17))
def test_a_damaged_line_costs_its_own_unit_and_no_other(raw, number, damage):
    """1 to 16 are the four units: three requests, then the row that closes them."""
    path, lines = raw
    lines[number] = damage(lines[number])
    path.write_bytes(b"".join(lines))
    lost = KEYS[(number - 1) // 4]
    if number % 4 == 0 and lines[number].count(b"\n") == 2:  # a second end of a unit takes nothing from it
        lost = None
    assert left(path) == [key for key in KEYS if key != lost]
    found = Measured(path, ["a", "b", "c"])
    assert not found.damage and found.servers and found.probes  # mended on the disk, and the rest is there
    if lost:
        found.add_unit(dict(zip(("variant", "level", "repeat"), lost)), {"wall_s": 1.5, "watts": None},
                   [{"id": name, "latency_s": 0.25} for name in "abc"])
    assert sorted(left(path)) == sorted(KEYS)


def test_damage_is_said_and_its_lines_are_kept_and_a_torn_end_is_no_damage(raw, capsys):
    path, lines = raw
    bad = lines[2][:-20] + b"\n"
    path.write_bytes(b"".join([*lines[:2], bad, *lines[3:]]))
    assert len(left(path)) == 3
    said = capsys.readouterr().out
    assert "line 3 is damaged" in said and "measured again" in said and len(said.splitlines()) == 2
    assert bad in (path.parent / "raw.damaged.jsonl").read_bytes()
    path.write_bytes(b"".join(lines[:14]) + lines[14][:-5])
    assert left(path) == KEYS[:3] and capsys.readouterr().out == ""
    assert path.read_bytes() == b"".join(lines[:13])


@pytest.mark.parametrize("number", [0, 17])
def test_a_damaged_server_or_probe_costs_only_itself(raw, number):
    path, lines = raw
    lines[number] = lines[number].replace(b"4096", b"4097").replace(b"9.0", b"8.0")
    path.write_bytes(b"".join(lines))
    found = Measured(path, ["a", "b", "c"])
    assert len(found.units) == 4 and (bool(found.servers), bool(found.probes)) == (number != 0, number != 17)


def test_rows_of_before_have_no_checksums_and_count(raw):
    path, lines = raw
    path.write_bytes(b"".join(json.dumps({k: v for k, v in json.loads(line).items() if k != "sha256"}).encode() + b"\n"
                              for line in lines))
    assert left(path) == KEYS and Measured(path, ["a", "b", "c"]).probes


def test_a_whole_run_goes_on_after_damage_and_measures_one_unit(tmp_path, capsys):
    plain, fast = pair()
    with plain, fast:
        argv, raw = flags(plain, fast, rows(tmp_path), tmp_path / "report"), tmp_path / "report" / "raw.jsonl"
        assert not bench.main(argv)
        lines = raw.read_bytes().splitlines(keepends=True)
        for number, asked in ((0, 0), (1, 6)):  # the row of the server, then a request of the first unit
            before = plain.asked
            raw.write_bytes(b"".join([*lines[:number], b"\0" + lines[number], *lines[number + 1:]]))
            assert not bench.main(argv)
            assert plain.asked - before == asked
            out = capsys.readouterr().out
            assert out.count(" finished | ") == 4 * (number == 0) + asked // 6
            assert set(Measured(raw).servers) == {"plain", "speculative"}
            assert (tmp_path / "report" / "manifest.json").exists()


# ---- before hours of measuring ----
def test_what_has_to_be_there_is_looked_at_first(tmp_path, monkeypatch, capsys):
    plain, fast = pair()
    with plain, fast:
        prompts = rows(tmp_path)
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="cannot be written to"):
            bench.main(flags(plain, fast, prompts, tmp_path / "file" / "report"))
        monkeypatch.setattr(bench_flags.shutil, "disk_usage", lambda path: argparse.Namespace(free=100))
        with pytest.raises(UserError, match="0.0 MB are free, raw.jsonl takes up to"):
            bench.main(flags(plain, fast, prompts, tmp_path / "full"))
        monkeypatch.undo()
        monkeypatch.setattr(bench_flags.resource, "getrlimit", lambda _: (64, 66))
        with pytest.raises(UserError, match=r"2 streams|6 streams need 70 open files, the limit here is 66"):
            bench.main([*flags(plain, fast, prompts, tmp_path / "few"), "--concurrency", "8"])
        limits = []
        monkeypatch.setattr(bench_flags.resource, "setrlimit", lambda _, limit: limits.append(limit))
        monkeypatch.setattr(bench_flags.resource, "getrlimit", lambda _: (64, 4096))
        bench_flags.check_descriptors(1024)
        assert limits == [(1024 + 64, 4096)]
        monkeypatch.undo()
        assert plain.asked == fast.asked == 0
        # the folders of these refusals are bound to nothing: the remedy may be another value
        assert not bench.main([*flags(plain, fast, prompts, tmp_path / "full"), "--max-tokens", "4"])
        assert "measured" not in capsys.readouterr().err


def test_pictures_that_cannot_be_drawn_are_said_before_and_fail_nothing(tmp_path, monkeypatch, capsys):
    def missing():
        raise ModuleNotFoundError("No module named 'matplotlib'")

    def broken(report):
        raise OSError(28, "No space left on device")

    plain, fast = pair()
    with plain, fast:
        monkeypatch.setattr(plots, "pyplot", missing)
        assert not bench.main(flags(plain, fast, rows(tmp_path), tmp_path / "without"))
        out = capsys.readouterr().out
        assert out.index("no plots will be drawn (ModuleNotFoundError: No module named 'matplotlib')") < out.index("finished |")
        assert (tmp_path / "without" / "manifest.json").exists() and not list((tmp_path / "without").glob("*.png"))
        assert "no speed_up.png: ModuleNotFoundError" in (tmp_path / "without" / "report.md").read_text()
        monkeypatch.undo()
        monkeypatch.setitem(charts.CHARTS, "acceptance", broken)
        assert not bench.main(flags(plain, fast, rows(tmp_path), tmp_path / "one"))
        assert "acceptance.png is not drawn: OSError: [Errno 28] No space left on device" in capsys.readouterr().out
        assert {path.name for path in (tmp_path / "one").glob("*.png")} == {"tok_s.png", "speed_up.png"}
        assert (tmp_path / "one" / "manifest.json").exists()
        for name in ("without", "one"):  # the page draws its own, and is there
            page = (tmp_path / name / "report.html").read_text()
            assert page.endswith("</html>\n") and "Speed-up over plain decoding</figcaption><svg" in page
        assert "acceptance.png is not drawn: OSError: [Errno 28]" in page


def test_a_disk_that_fills_up_is_one_line_and_what_was_measured_stays(tmp_path, monkeypatch, capsys):
    plain, fast = pair()
    with plain, fast:
        argv = flags(plain, fast, rows(tmp_path), tmp_path / "report")
        write = Measured._append

        def full(self, lines):
            if len(self.units) == 2:
                raise OSError(28, "No space left on device", str(self.path))
            write(self, lines)

        monkeypatch.setattr(Measured, "_append", full)
        assert bench.main(argv) == 1
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1 and "No space left on device" in said and "the same command goes on" in said
        monkeypatch.undo()
        asked = plain.asked + fast.asked
        assert not bench.main(argv)
        assert plain.asked + fast.asked - asked == 12 and (tmp_path / "report" / "manifest.json").exists()


def test_a_folder_is_bound_by_what_was_measured_and_not_by_how_it_is_spelled(tmp_path, capsys):
    plain, fast = pair()
    with plain, fast:
        prompts, out = rows(tmp_path), tmp_path / "report"
        argv = flags(plain, fast, prompts, out)
        with pytest.raises(UserError, match="is no baseline"):
            bench.main([*argv, "--baseline-url", fast.url, "--max-tokens", "4"])
        assert not bench.main(argv)  # nothing came of those 4 tokens
        with pytest.raises(UserError, match="max-tokens: 8 there, 9 now"):
            bench.main([*argv, "--max-tokens", "9"])
        copy = tmp_path / "elsewhere" / "prompts.jsonl"
        copy.parent.mkdir()
        copy.write_bytes(prompts.read_bytes())
        os.chdir(tmp_path)
        try:
            for spelled in (copy, "prompts.jsonl", f"{tmp_path}/elsewhere/../prompts.jsonl"):
                assert not bench.main([word if word != str(prompts) else str(spelled) for word in argv])
                assert "complete already" in capsys.readouterr().out
        finally:
            os.chdir(ROOT)
        prompts.write_text(prompts.read_text().replace("[1, 2]", "[1, 3]"))
        with pytest.raises(UserError, match="begun with another config"):
            bench.main(argv)


def test_the_remedies_of_a_launched_server_are_not_refused_by_the_folder(tmp_path, capsys):
    """Its port is taken, its memory too small, its command wrong: the run file is changed, the same command goes on."""
    document = {"run_dir": str(tmp_path), "servers": {
        "plain": {"command": ["{python}", str(ROOT / "tests/paced_server.py")],
                  "flags": {"model-path": str(TINY_KIMI), "port": free_port(), "mem-fraction-static": 0.9}},
        "speculative": {"extends": "plain", "command": ["false"], "flags": {"speculative-algorithm": "EAGLE3"}}}}

    def run() -> int | None:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
        return bench.main(["--config", str(tmp_path / "run.yaml"), "--launch", "--prompts", str(rows(tmp_path)),
                           "--concurrency", "1",
                           "--max-tokens", "4", "--warmup", "0", "--output-dir", str(tmp_path / "report")])

    plain = document["servers"]["plain"]
    plain["command"], good = ["false"], plain["command"]
    with pytest.raises(UserError, match="the server ended with code 1 before it was ready"):
        run()
    plain["command"], plain["flags"]["mem-fraction-static"] = good, 0.8
    with pytest.raises(UserError, match="servers.speculative: the server ended with code 1"):
        run()  # plain is measured
    plain["flags"]["port"], document["servers"]["extract"] = free_port(), {"extends": "plain"}
    with pytest.raises(UserError, match="servers.speculative: the server ended with code 1"):
        run()
    assert "1 finished before" in capsys.readouterr().out
    plain["flags"]["mem-fraction-static"] = 0.7
    with pytest.raises(UserError, match="begun with another config"):
        run()  # now it would be another measurement
    plain["flags"]["mem-fraction-static"] = 0.8


@pytest.mark.parametrize("argv, why", [
    (["--limit", "0"], "--limit must be at least 1"), (["--temperature", "-1"], "--temperature must be 0 or more"),
    (["--temperature", "nan"], "--temperature"), (["--top-p", "0"], "--top-p above 0"),
    (["--request-timeout", "0"], "above 0"),
    (["--launch-timeout", "nan"], "'nan' is no number"), (["--usd-per-hour", "-2"], "--usd-per-hour 0 or more"),
    (["--usd-per-hour", "inf"], "'inf' is no number"), (["--repeats", "0"], "--repeats must be at least 1"),
    (["--thinking", "on", "on"], "a value stands twice")])
def test_numbers_that_cannot_be_are_one_line(argv, why):
    with pytest.raises(UserError, match=why):
        bench.main(["--base-url", "http://127.0.0.1:1", *argv])


@pytest.mark.parametrize("ids, why", [
    ([1, 163840], "hold 163840; the target's ids are 0 to"), ([-1], "hold -1"), ([], "at least one token id"),
    ([1.5], "at least one"),
    (["a"], "at least one"), ("abc", "at least one"), ([True], "at least one")])
def test_ids_that_would_end_the_server_are_never_sent(tmp_path, ids, why):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt_ids": ids}) + "\n")
    with Paced(speculative_algorithm="EAGLE3") as server:
        with pytest.raises(UserError, match=why):
            bench.main(["--base-url", server.url, "--prompts", str(path), "--tokenizer", str(TINY_KIMI), "--output-dir",
                        str(tmp_path / "report")])
        assert server.asked == 0


# ---- the doctor and other people's drafters ----
def described(folder: Path) -> Facts:
    server = {"version": "0.5.23", "model_path": str(TINY_KIMI), "context_length": None,
              "speculative_draft_model_quantization": None}
    provenance = json.loads((folder / "eagle3.json").read_text()) if (folder / "eagle3.json").exists() else {}
    return Facts(folder, provenance, server, None, [])


def change(folder: Path, rename=lambda name: name, drop=(), add=None, **config) -> Path:
    """A drafter by another exporter: its tensors under other names, no eagle3.json."""
    (folder / "eagle3.json").unlink(missing_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights = {rename(name): tensor for name, tensor in weights.items() if name not in drop} | (add or {})
    save_file(weights, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value != "absent"}))
    return folder


VOCAB = json.loads((TINY_KIMI / "config.json").read_text())["text_config"]["vocab_size"]
FULL = {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
PUBLIC = {
    "as 04 writes it": {},
    "layers.0": dict(rename=lambda name: name.replace("midlayer", "layers.0")),
    "model.": dict(rename=lambda name: name if name in ("d2t", "lm_head.weight") else f"model.{name}"),
    "model.layers.0": dict(rename=lambda name: name if name in ("d2t", "lm_head.weight") else
                           f"model.{name}".replace("midlayer", "layers.0")),
    "t2d and embed_tokens": dict(add={"t2d": torch.zeros(VOCAB, dtype=torch.bool),
                                      "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}),
    "d2t in int32": dict(drop=["d2t"], add={"d2t": torch.arange(64, dtype=torch.int32)}),
    "whole vocabulary": dict(drop=["d2t", "lm_head.weight"], add=FULL, draft_vocab_size=VOCAB),
    "the target's lm_head": dict(drop=["d2t", "lm_head.weight"], draft_vocab_size=None),
    "layer ids left to SGLang": dict(eagle_config="absent"),
    "YaRN": dict(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}),
    "rope_parameters": dict(rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 50000.0}),
    "inv_freq": dict(add={"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(HEAD_DIM // 2)}),
    "EAGLE-3.1": dict(add={f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}, fc_norm=True,
                      norm_output=True),
    "its older names": dict(add={f"aux_norm_{name}.weight": torch.ones(HIDDEN) for name in ("low", "mid", "high")},
                            use_aux_norm=True),
    "norm_before_fc": dict(add={"input_norm.weight": torch.ones(3 * HIDDEN)},
                           eagle_config={"eagle_aux_hidden_state_layer_ids": CAPTURE_LAYERS, "norm_before_fc": True}),
    "five aux states": dict(add={"fc.weight": torch.zeros(HIDDEN, 5 * HIDDEN)},
                            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}),
    "two layers": dict(add={f"layers.1.{name}.weight": torch.zeros(shape) for name, shape in {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (2 * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (2 * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (512, HIDDEN), "mlp.up_proj": (512, HIDDEN), "mlp.down_proj": (HIDDEN, 512),
        "hidden_norm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}.items()}, num_hidden_layers=2),
    "bias of fc": dict(add={"fc.bias": torch.zeros(HIDDEN), "midlayer.self_attn.o_proj.bias": torch.zeros(HIDDEN)},
                       bias=True),
    "another architecture": dict(architectures=["Eagle3DeepseekV2ForCausalLM"], drop=["fc.weight"]),
    "quantised": dict(quantization_config={"quant_method": "fp8"}, drop=["fc.weight"]),
}


@pytest.mark.parametrize("kind", PUBLIC)
def test_a_drafter_whose_names_sglang_loads_is_not_called_broken(tmp_path, kind):
    facts = described(change(make_drafter(tmp_path / "draft", range(64)), **PUBLIC[kind]))
    findings, unchecked = examine(facts)
    assert findings == [], findings
    assert ("weights" in unchecked) == (kind in ("another architecture", "quantised"))


def test_a_drafter_in_shards_or_as_torch_saves_it_is_read_or_named(tmp_path):
    folder = change(make_drafter(tmp_path / "draft", range(64)))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for number, part in enumerate((names[:5], names[5:]), 1):
        save_file({name: weights[name] for name in part}, folder / f"model-{number:05d}-of-00002.safetensors")
    assert examine(described(folder))[0] == [] and "weights" not in examine(described(folder))[1]
    for path in folder.glob("*.safetensors"):
        path.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert examine(described(folder))[0] == [] and "weights" not in examine(described(folder))[1]


BROKEN = {
    "unknown ['model.model.fc.weight']": dict(rename=lambda name: "model.model.fc.weight" if name == "fc.weight"
                                              else name),
    "missing ['d2t']": dict(drop=["d2t"]),
    "missing ['lm_head.weight']": dict(drop=["lm_head.weight"]),
    "missing ['fc_norm.0.weight', 'fc_norm.1.weight', 'fc_norm.2.weight']": dict(fc_norm=True),
    "missing ['input_norm.weight']": dict(norm_before_fc=True),
    "fc.weight is [256, 768], config.json asks for [256, 1280]": dict(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}),
    "no draft_vocab_size": dict(draft_vocab_size="absent"),
    "without draft_vocab_size SGLang gives the draft": dict(draft_vocab_size=None, drop=["lm_head.weight"]),
    "self_attn.q_proj.weight is [128, 256], config.json asks for [128, 512]": dict(
        add={"midlayer.self_attn.q_proj.weight": torch.zeros(HEADS * HEAD_DIM, HIDDEN)}),
    "which SGLang drops: config.json does not set the flag": dict(add={f"fc_norm.{i}.weight": torch.ones(HIDDEN)
                                                                       for i in range(3)}),
    "which SGLang ignores in silence": dict(norm_before_residual=True),
    "which SGLang reads at the top of config.json": dict(
        eagle_config={"eagle_aux_hidden_state_layer_ids": CAPTURE_LAYERS, "norm_output": True}),
    "tie_word_embeddings is true": dict(tie_word_embeddings=True),
}


@pytest.mark.parametrize("why", BROKEN)
def test_what_sglang_would_drop_or_leave_unfilled_is_named(tmp_path, why):
    findings, _ = examine(described(change(make_drafter(tmp_path / "draft", range(64)), **BROKEN[why])))
    assert len(findings) == 1 and why in findings[0]["finding"], findings


def test_names_that_an_older_sglang_does_not_know(tmp_path):
    folder = change(make_drafter(tmp_path / "draft", range(64)), **PUBLIC["layers.0"])
    facts = described(folder)
    facts._server = facts._server | {"version": "0.5.11"}
    causes = {finding["cause"]: finding["finding"] for finding in examine(facts)[0]}
    assert "unknown" in causes["weights"] and "layers.0.mlp.down_proj.weight" in causes["weights"]


AGAINST_TRAINING = {
    "norm flags": [dict(norm_output=True), dict(fc_norm=True), dict(eagle_config={
        "eagle_aux_hidden_state_layer_ids": CAPTURE_LAYERS, "norm_before_fc": True})],
    "config.json against training": [dict(rms_norm_eps=1e-6), dict(rms_norm_eps="absent"), dict(hidden_act="gelu"),
                                     dict(num_hidden_layers=2), dict(num_aux_hidden_states=4)],
    "RoPE": [dict(rope_theta="absent"), dict(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
             dict(rope_scaling={"type": "linear", "factor": 2.0})],
}


@pytest.mark.parametrize("cause, config",
                         [(cause, config) for cause, configs in AGAINST_TRAINING.items() for config in configs])
def test_the_doctor_sees_what_eagle3_json_tells(patient, cause, config):  # noqa: F811
    assert patient.causes() == []
    patient.edit(**config)
    assert cause in patient.causes()


def test_the_doctor_sees_weights_that_are_not_those_of_training(patient):  # noqa: F811
    weights = load_file(patient.folder / "model.safetensors")
    weights["norm.weight"][3] += 1e-3  # its names and shapes are as they were
    save_file(weights, patient.folder / "model.safetensors")
    assert patient.causes() == ["weights changed since training"]
    patient.tell(weights_sha256=sha256_file(patient.folder / "model.safetensors"))
    assert patient.causes() == []
    provenance = json.loads((patient.folder / "eagle3.json").read_text())
    del provenance["weights_sha256"]  # of a drafter of before
    _, unchecked = examine(Facts(patient.folder, provenance, patient.server, patient.run_dir,
                                 [{"id": "a", "prompt_ids": [9, 3, 4]}]))
    assert list(unchecked) == ["weights changed since training"]


def test_kinds_of_drafters_as_training_describes_them_are_healthy(tmp_path):
    """Each kind that 04 exports: names, shapes and config.json by its own code."""
    from eagle3.drafter import Shape, draft_config, exported_names
    for kind in (dict(), dict(aux_norm="each", norm_output=True), dict(aux_norm="all"), dict(layers=2, aux_states=5),
                 dict(layers=2, aux_norm="each", aux_states=4, norm_output=True)):
        shape = Shape(HIDDEN, HEADS, 2, HEAD_DIM, 512, VOCAB, 64, 1e-5, 50000.0, 4096, **kind)
        config = draft_config(shape, {}, list(range(1, 1 + shape.aux_states)), "float32")
        needed = wanted(config)
        assert {parameter_of(name, (0, 5, 23)) for name in exported_names(shape)} == set(needed)
        shapes = {name: needed[parameter_of(name, (0, 5, 23))] for name in exported_names(shape)}
        assert not loaded(shapes, config).missing and not loaded(shapes, config).dropped


SGLANG_SIDE = """
import json, sys, types
sys.path.insert(0, sys.argv[1])
import serve
serve.prepare()
import torch
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
parameters, cases = json.loads(sys.stdin.read())
found = []
for names in cases:
    filled = []
    def fake(name):
        def weight_loader(param, tensor, shard=None):
            filled.append([name, shard])
        return types.SimpleNamespace(weight_loader=weight_loader)
    model = types.SimpleNamespace(named_parameters=lambda: [(name, fake(name)) for name in parameters], hot_token_id=None)
    LlamaForCausalLMEagle3.load_weights(model, [(name, torch.zeros(1, dtype=torch.int64)) for name in names])
    found.append([sorted(map(str, filled)), model.hot_token_id is not None])
print("FOUND" + json.dumps(found))
"""


def test_sglangs_own_load_weights_takes_the_same_names(tmp_path):
    """Every spelling above, tensor by tensor, through LlamaForCausalLMEagle3.load_weights of the installed release."""
    config = json.loads((make_drafter(tmp_path / "draft", range(64)) / "config.json").read_text())
    config |= {"fc_norm": True, "norm_before_fc": True, "num_hidden_layers": 2, "bias": True}
    ours = set(wanted(config)) - {"d2t"}
    stacked = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
               "up_proj": "gate_up_proj"}

    def module(name: str) -> str:  # SGLang's parameter
        for part, whole in stacked.items():
            name = name.replace(f".{part}.", f".{whole}.")
        return name if name.startswith("lm_head") else f"model.{name}"

    shard = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}
    names = sorted(ours | {"d2t", "t2d", "model.d2t"} | {name.replace("layers.0", "midlayer") for name in ours}
                   | {f"model.{name}" for name in ours}
                   | {f"model.{name}".replace("layers.0", "midlayer") for name in ours}
                   | {"aux_norm_low.weight", "aux_norm_mid.weight", "model.aux_norm_high.weight", "eagle.fc.weight",
                      "model.model.fc.weight",
                      "layers.2.mlp.up_proj.weight", "fc_norm.3.weight", "nonsense"})
    done = subprocess.run([sys.executable, "-c", SGLANG_SIDE, str(ROOT / "scripts/cpu_engine")], text=True,
                          capture_output=True,
                          input=json.dumps([sorted(map(module, ours)), [[name] for name in names]]), timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.split("FOUND")[1])
    for name, (filled, mapped) in zip(names, found):
        mine = loaded({name: [1]}, config)
        assert mapped == ("d2t" in mine.shapes), name
        parameter = next(iter(set(mine.shapes) & ours), None)
        expected = [str([module(parameter),
                         next((shard[part] for part in shard if f".{part}." in parameter), None)])] if parameter else []
        assert filled == expected, name
        assert (name in mine.dropped) == (not filled and not mapped and name != "t2d"), name


# ---- a server that is too old for the drafter ----
@pytest.mark.parametrize("version, provenance, config, refused", [
    ("0.5.11", {}, {"fc_norm": True}, "0.5.12"), ("0.5.12", {}, {"fc_norm": True}, None), ("0.5.16.post1", {}, {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": CAPTURE_LAYERS, "norm_before_fc": True}}, "0.5.17"),
    ("0.5.11", {}, {"num_hidden_layers": 2}, "0.5.12"), ("0.5.10", {}, {}, None),
    ("0.5.22", {"served_from": "0.5.23"}, {}, "0.5.23"),
    ("0.5.23", {"served_from": "0.5.23"}, {}, None),
    ("0.5.11", {}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}},
                                                      "0.5.12"),
    ("0.5.11", {}, {"num_aux_hidden_states": 4}, "0.5.12"), ("nightly", {"served_from": "0.5.23"}, {}, None)])
def test_a_server_older_than_the_drafter_is_refused_before_anything_is_sent(tmp_path, capsys, version, provenance,
                                                                            config, refused):
    folder = change(make_drafter(tmp_path / "draft", range(9)), **config)
    (folder / "eagle3.json").write_text(json.dumps(provenance))
    with Paced(speculative_algorithm="EAGLE3", version=version) as server:
        argv = ["--base-url", server.url, "--draft-path", str(folder), "--prompts", str(rows(tmp_path)), "--tokenizer",
                "none",
                "--concurrency", "1", "--max-tokens", "2", "--warmup", "0", "--repeats", "1", "--output-dir",
                str(tmp_path / "report")]
        if refused:
            with pytest.raises(UserError, match=f"is SGLang {version}; the drafter in .* is of a kind that {refused} and newer serve"):
                bench.main(argv)
            assert server.asked == 0
        else:
            assert not bench.main(argv)
            assert ("calls itself SGLang nightly" in capsys.readouterr().out) == (version == "nightly")


def test_what_describes_no_such_drafter_needs_no_release():
    assert first_release({}) is None and first_release({"hidden_size": 8}) is None


def test_models_are_one_by_what_they_are(tmp_path):
    ours, copy = (make_drafter(tmp_path / name, range(9)) for name in ("ours", "copy"))
    (tmp_path / "link").symlink_to(ours)
    assert same_folder(str(ours), str(tmp_path / "link")) and same_folder(str(ours), f"{ours}/../ours")
    assert same_folder(str(ours), str(copy))
    (copy / "config.json").write_text("{}")
    assert not same_folder(str(ours), str(copy)) and not same_folder("org/name", "org/other")
    assert same_folder("org/name", "org/name")
