"""03_extract on the real engine: killed and resumed it ends in the same bytes; each kind of damage is found; a full
disk loses nothing."""
import asyncio
import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import eagle3.stage
import preloaded
from conftest import CAPTURE_LAYERS, ONE_AT_A_TIME, ROOT, TINY_KIMI, Engine, free_port, load_script
from eagle3 import extraction, verify as verifying
from eagle3.api import discover
from eagle3.incoming import own_runs, run_prefix
from eagle3.journal import Journal, plan_order
from eagle3.limits import read_limits
from eagle3.prefill_server import Server
from eagle3.states import KINDS, SAME_CAPTURE, StateFile, check_header, sample_path
from eagle3.states_server import StatesServer
from stand_in import StandIn, capture_hash, captured, extract_here, file_of, let_go, write_responses
from test_capture import text_model

SAMPLES, ANSWER = 120, 8  # of the fixture `extracted`: samples, and tokens of each response


def capturing(engine) -> Engine:
    """The server of all these tests and of tests/test_follow.py; started anew where a test has left it dead."""
    return engine(capture_dir=True, **ONE_AT_A_TIME)


@pytest.fixture
def server(engine):
    return capturing(engine)


@pytest.fixture(scope="module")
def capture_dir(engine):
    return capturing(engine).capture_dir


@pytest.fixture(scope="module")
def responses(extracted):
    return extracted / "responses"


@pytest.fixture(scope="module")
def rows(responses):
    return [json.loads(line) for part in sorted(responses.glob("part-*.jsonl")) for line in part.read_text().splitlines()]


def arguments(responses: Path, output: Path, url: str, capture_dir: Path, *more) -> list[str]:
    return ["--data-dir", str(responses), "--output-dir", str(output), "--base-url", url,
            "--capture-dir", str(capture_dir), "--concurrency", "4", "--log-interval", "1", *map(str, more)]


def command(*argv) -> list[str]:
    return [sys.executable, "-u", str(ROOT / "03_extract.py"), *arguments(*argv)]


def extract(*argv, code=0, process=False):
    """03 with `argv` as `arguments` takes them, in this process or in one of its own; checks how it ends."""
    if process:
        done = preloaded.run(command(*argv), timeout=400, cwd=ROOT)
    else:
        done = extract_here(arguments(*argv))
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    assert "\r" not in done.stdout
    if code == 0:
        assert done.stdout.splitlines()[-1].endswith(f"done: {argv[1]}") and done.stderr == ""
    else:
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("03_extract: ")
    return done


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file that the stage leaves, journal apart (its lines are in the order of arrival)."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in ("landed.jsonl", ".lock")}


@pytest.fixture(scope="module")
def undisturbed(extracted):
    return extracted / "hidden_states"


@pytest.fixture
def copy(undisturbed, tmp_path):
    return shutil.copytree(undisturbed, tmp_path / "hidden_states")


def test_every_sample_is_there_with_its_ids(undisturbed, rows, capture_dir, responses):
    manifest = json.loads((undisturbed / "manifest.json").read_text())
    index = [json.loads(line) for line in (undisturbed / "index.jsonl").read_text().splitlines()]
    assert manifest["index_sha256"] == hashlib.sha256((undisturbed / "index.jsonl").read_bytes()).hexdigest()
    tokens = sum(row["tokens"] for row in index)
    assert manifest["counts"] == {"kept": SAMPLES, "dropped": {}, "truncated": 0, "tokens": tokens}
    assert manifest["inputs"] == {"responses": hashlib.sha256((responses / "manifest.json").read_bytes()).hexdigest()}
    facts = {"capture_layers": [2, 4, 6], "hidden_size": 256, "target": TINY_KIMI.name, "sglang_version": "0.5.23",
             "dtype": "float32"}
    assert {key: manifest[key] for key in facts} == facts
    assert [row["id"] for row in index] == sorted(row["id"] for row in rows)
    for row, entry in zip(sorted(rows, key=lambda row: row["id"]), index):
        tensors = load_file(sample_path(undisturbed, row["id"]))
        ids = row["prompt_ids"] + row["response_ids"]
        assert tensors["input_ids"].tolist() == ids and entry["tokens"] == len(ids)
        assert tensors["loss_mask"].tolist() == [0] * len(row["prompt_ids"]) + [1] * len(row["response_ids"])
    # Nothing is left of it, nothing of the requests that made the responses
    assert own_runs(capture_dir, undisturbed) == []
    assert all(re.fullmatch(r"[0-9a-f]{12}-\d+-\d+\.\d+", path.name) for path in capture_dir.iterdir())


def test_the_limits_that_are_read_are_where_the_engine_says_no(server):
    """The real engine takes the longest sample, and refuses one token more; 01 reads the same context."""
    limits = read_limits(Server(server.url))
    ask = SimpleNamespace(answers="generate", base_url=[server.url], api="auto", model=None, max_tokens=100)
    assert asyncio.run(discover(ask, None)).context == limits.context
    config = json.loads((TINY_KIMI / "config.json").read_text())
    assert limits.context == config["text_config"]["max_position_embeddings"] and limits.vocab == 2432, limits
    answers = []
    for longer in (1, 0):
        body = {"input_ids": [300] * (limits.longest + longer), "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        answers.append(httpx.post(f"{server.url}/generate", json=body, timeout=120).status_code)
    assert answers == [400, 200] and limits.longest < min(limits.context, limits.pool)


@pytest.mark.parametrize("kind", KINDS)
def test_over_http_the_real_engine_gives_the_same_files(kind, undisturbed, responses, server, capture_dir, tmp_path, monkeypatch):
    """Of each kind of states: those of the local route, byte for byte, also where --verify-again has some made anew."""
    local, remote, flags = undisturbed, tmp_path / "remote", ["--limit", 12, "--states", kind]
    if kind != KINDS[0]:
        local = tmp_path / "local"
        extract(responses, local, server.url, capture_dir, *flags)
    monkeypatch.setenv("STATES_TOKEN", "a-token-of-this-test")
    with StatesServer(("127.0.0.1", 0), capture_dir, "a-token-of-this-test") as offer:
        threading.Thread(target=offer.serve_forever, args=(0.01,), daemon=True).start()
        extract(responses, remote, server.url, tmp_path / "incoming", *flags, "--verify-again", 2, "--states-url",
                f"http://127.0.0.1:{offer.server_port}", "--states-token-env", "STATES_TOKEN")
        offer.shutdown()
    found = {path.relative_to(remote): path.read_bytes() for path in remote.glob("??/*.safetensors")}
    assert len(found) == 12 and found == {name: (local / name).read_bytes() for name in found}
    assert offer.files == 14 and json.loads((remote / "verify.json").read_text())["again"]["same_bytes"] == 2
    assert json.loads((remote / "manifest.json").read_text()).get("states", KINDS[0]) == kind
    assert not list(capture_dir.glob(f"{run_prefix(remote, remote=True)}*"))


def test_complete_already(undisturbed, responses, capture_dir):
    before = contents(undisturbed)
    done = extract(responses, undisturbed, "http://127.0.0.1:9", capture_dir)  # no server is needed
    assert "complete already" in done.stdout and contents(undisturbed) == before


# 03 in a process that is killed, kills the server, or does both after the N-th line of landed.jsonl or the N-th rename;
# argv: "line" or "file", N, the server's process group, whom, then 03's own
FAULT = """
import os, signal, sys
point, count, group, victims, argv = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
sys.path[:0] = [%r, %r]
from conftest import load_script
from eagle3 import extraction
from eagle3.journal import Journal
signal.signal(signal.SIGINT, signal.default_int_handler)
script, real = load_script("03_extract"), {"line": Journal.add, "file": extraction.move}[point]
left = [count]
def faulty(*args):
    real(*args)
    left[0] -= 1
    if left[0] == 0:
        if victims != "03":
            os.killpg(group, signal.SIGKILL)
        if victims != "server":
            os.kill(os.getpid(), signal.SIGKILL)
if point == "line":
    Journal.add = faulty
else:
    extraction.move = faulty
try:
    script.main(argv)
except KeyboardInterrupt:
    sys.exit(130)
""" % (str(ROOT / "tests"), str(ROOT / "scripts"))
Kill = namedtuple("Kill", "victims point count")


def killed(kill: Kill, responses, server, capture_dir, folder: Path, *more) -> None:
    """One run of 03 with this fault. A server that died alone is started again; 03, which goes on, is stopped."""
    argv = [sys.executable, "-u", "-c", FAULT, kill.point, str(kill.count), str(server.process.pid), kill.victims,
            *arguments(responses, folder, server.url, capture_dir, *more)]
    process = preloaded.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    if kill.victims == "server":
        said = next((line for line in process.stdout if "is away" in line), None)
        assert said, "it ended without missing the server"
        server.kill()
        server.start()
        assert any("is back" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)  # stopped politely, so that the next round has work
    out, _ = process.communicate(timeout=100)
    assert process.returncode == (130 if kill.victims == "server" else -signal.SIGKILL), out
    if kill.victims == "both":
        server.kill()
        server.start()


def test_killed_and_resumed_equals_undisturbed(undisturbed, responses, server, capture_dir, tmp_path):
    """kill -9 of 03 between a line and its file, of the server, and of both right after a file."""
    for kill in (Kill("03", "line", 9), Kill("server", "file", 17), Kill("both", "file", 30), Kill("03", "line", 1)):
        killed(kill, responses, server, capture_dir, tmp_path / "hidden_states")
    extract(responses, tmp_path / "hidden_states", server.url, capture_dir)
    assert contents(tmp_path / "hidden_states") == contents(undisturbed)


@pytest.mark.slow
def test_killed_twenty_times(undisturbed, responses, server, capture_dir, tmp_path):
    chance = random.Random(2)
    for number in range(20):
        kill = Kill(("03", "server", "both")[number % 3], chance.choice(["line", "file"]), chance.randrange(1, 7))
        killed(kill, responses, server, capture_dir, tmp_path / "hidden_states")
    extract(responses, tmp_path / "hidden_states", server.url, capture_dir)
    assert contents(tmp_path / "hidden_states") == contents(undisturbed)


def test_fp8_states_are_the_others_quantised(undisturbed, responses, server, capture_dir, tmp_path, final_norm):
    """03 --states fp8 on the engine, killed on the way: files as convert_states.py makes them of the others', byte for byte.
    --verify looks at them with the target's head, and --verify-again has samples made anew."""
    folder, converted, flags = tmp_path / "hidden_states", tmp_path / "converted", ["--states", "fp8", "--limit", 40]
    killed(Kill("03", "line", 9), responses, server, capture_dir, folder, *flags)
    extract(responses, folder, server.url, capture_dir, *flags, "--verify-again", 2, "--verifier-path", TINY_KIMI)
    report = json.loads((folder / "verify.json").read_text())
    assert report["again"]["same_bytes"] == 2 and report["engine_next_token_share"] > 0.95
    with contextlib.redirect_stdout(io.StringIO()):
        load_script("convert_states").main(["--data-dir", str(undisturbed), "--output-dir", str(converted)])
    made, others = ({name: digest for name, digest in contents(one).items() if name.endswith(".safetensors")}
                    for one in (folder, converted))
    assert len(made) == 40 and made.items() <= others.items()
    before_final_norm.weight = final_norm
    for name, change in (("p007-t0", before_final_norm), ("p008-t0", rows_shifted)):
        rewrite(sample_path(converted, name), change)
    restamp(converted)
    extract(responses, converted, "http://127.0.0.1:9", capture_dir, "--states", "fp8", "--verify", "--verifier-path",
            TINY_KIMI, code=2)
    failed = json.loads((converted / "verify.json").read_text())["failed"]
    assert failed.keys() == {"p007-t0", "p008-t0"} and "not after the final norm" in failed["p007-t0"]
    assert "response tokens" in failed["p008-t0"]
    with StateFile(sample_path(folder, "p007-t0")) as file, StateFile(sample_path(undisturbed, "p007-t0")) as other:
        T = len(file.input_ids())
        for name in ("aux_hidden_states", "last_hidden_states"):
            found, exact = (one.numbers(name, 0, T).view(T, -1, 256) for one in (file, other))
            assert 0 < ((found - exact).norm(dim=2) / exact.norm(dim=2)).max() < 0.04


def test_a_server_that_restarts_is_waited_for(undisturbed, responses, server, capture_dir, tmp_path, monkeypatch):
    folder, move, moved = tmp_path / "hidden_states", extraction.move, itertools.count(1)

    def restart(*args):
        move(*args)
        if next(moved) == 10:
            server.kill()
            threading.Thread(target=server.start).start()

    monkeypatch.setattr(extraction, "move", restart)
    done = extract(responses, folder, server.url, capture_dir)
    assert "is away" in done.stdout and "is back" in done.stdout, done.stdout
    assert contents(folder) == contents(undisturbed)


def test_a_server_that_stays_away_ends_in_one_line(stage):
    asked, server = itertools.count(1), stage.servers[0]

    def die(sample_id, folder):
        if next(asked) == 10:
            threading.Thread(target=server.close).start()  # nobody listens any more
        if len(server.asked) >= 10:
            raise ConnectionAbortedError

    server.before = die
    said = stage("--server-wait", 2)
    assert server.url in said and "away for 2 s" in said


def test_max_length_cuts_and_says_so(rows, responses, server, capture_dir, tmp_path):
    done = extract(responses, tmp_path / "cut", server.url, capture_dir, "--max-length", 145)
    manifest = json.loads((tmp_path / "cut/manifest.json").read_text())
    full = {row["id"]: len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows}
    cut = {row["id"] for row in rows if full[row["id"]] > 145 and len(row["prompt_ids"]) < 145}
    gone = {row["id"] for row in rows if len(row["prompt_ids"]) >= 145}
    assert cut and gone
    assert manifest["counts"]["dropped"] == {"prompt fills --max-length": len(gone)}
    assert manifest["counts"]["truncated"] == len(cut)
    assert f"truncated {len(cut)}" in done.stdout
    index = {row["id"]: row for row in map(json.loads, (tmp_path / "cut/index.jsonl").read_text().splitlines())}
    assert {key for key, row in index.items() if row["truncated"]} == cut and set(index) == set(full) - gone
    for key in cut:
        assert index[key]["tokens"] == 145 == len(load_file(sample_path(tmp_path / "cut", key))["input_ids"])
    refused = extract(responses, tmp_path / "cut", server.url, capture_dir, "--max-length", 146, code=2)
    assert "max_length: 145 there, 146 now" in refused.stderr


# ---- --verify ----
def rewrite(path: Path, change) -> None:
    """Change tensors or metadata of a file as its writer would have written them: with a checksum that fits."""
    with StateFile(path) as file:
        T, metadata = len(file.input_ids()), file.metadata
        tensors = {name: file.numbers(name, 0, T).numpy() for name in ("aux_hidden_states", "last_hidden_states")}
        tensors |= {"input_ids": file.input_ids().copy(), "loss_mask": file.loss_mask().copy()}
    change(tensors, metadata)
    del metadata["checksum"]
    path.write_bytes(file_of(tensors, metadata))


def restamp(folder: Path) -> None:
    """Write the files' checksums into journal, index and manifest, as if they had arrived so."""
    lines = [json.loads(line) for line in (folder / "landed.jsonl").read_text().splitlines()]
    for row in lines:
        if "id" in row:
            raw = sample_path(folder, row["id"]).read_bytes()
            row["checksum"] = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["checksum"]
    (folder / "landed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    rows = sorted((row for row in lines if "id" in row), key=lambda row: row["id"])
    (folder / "index.jsonl").write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["index_sha256"] = hashlib.sha256((folder / "index.jsonl").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def final_norm():
    return load_file(TINY_KIMI / "model.safetensors")["language_model.model.norm.weight"].float().numpy()


def verify(copy, responses, capture_dir, code: int) -> SimpleNamespace:
    flags = "--verify", "--verifier-path", TINY_KIMI
    return extract(responses, copy, "http://127.0.0.1:9", capture_dir, *flags, code=code)


def test_verify_finds_nothing_wrong(copy, responses, capture_dir):
    done = verify(copy, responses, capture_dir, code=0)
    report = json.loads((copy / "verify.json").read_text())
    assert report["failed"] == {} and report["engine_next_token_share"] == 1.0 and report["agreement"]["p0"] == 1.0
    assert report["positions_checked"] == SAMPLES * ANSWER and f"all {SAMPLES} samples good" in done.stdout


def nan_row(tensors, metadata):
    tensors["aux_hidden_states"][3] = np.nan


def before_final_norm(tensors, metadata):
    tensors["last_hidden_states"][:] = tensors["last_hidden_states"] / before_final_norm.weight * 2.5


def other_ids(tensors, metadata):
    tensors["input_ids"][1] += 1


def other_mask(tensors, metadata):
    tensors["loss_mask"][0] = 1


def other_layers(tensors, metadata):
    metadata["capture_layers"] = "1,3,5"


def rows_shifted(tensors, metadata):
    tensors["last_hidden_states"][:] = np.roll(tensors["last_hidden_states"], 1, axis=0)


@pytest.mark.parametrize("change, words", [
    (nan_row, "not finite"), (before_final_norm, "not after the final norm"), (other_ids, "ids are not the response's"),
    (other_mask, "loss mask is not the response's"), (other_layers, "captured with another capture_layers"),
    (rows_shifted, "response tokens")], ids=lambda value: getattr(value, "__name__", ""))
def test_verify_finds_a_sample_written_wrong(change, words, copy, responses, capture_dir, final_norm):
    before_final_norm.weight = final_norm
    rewrite(sample_path(copy, "p007-t0"), change)
    restamp(copy)
    done = verify(copy, responses, capture_dir, code=2)
    report = json.loads((copy / "verify.json").read_text())
    assert list(report["failed"]) == ["p007-t0"] and words in report["failed"]["p007-t0"]
    assert "--redo-failed" in done.stderr and not (copy / "manifest.json").exists()


@pytest.mark.parametrize("damage, words", [("torn", "its header says"), ("flipped", "checksum"),
                                           ("gone", "No such file")])
def test_verify_finds_a_damaged_file_and_redo_mends_it(damage, words, copy, undisturbed, responses, capture_dir,
                                                       server):
    path = sample_path(copy, "p011-t0")
    raw = bytearray(path.read_bytes())
    if damage == "torn":
        path.write_bytes(raw[:-100])
    elif damage == "flipped":
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    else:
        path.unlink()
    verify(copy, responses, capture_dir, code=2)
    assert words in json.loads((copy / "verify.json").read_text())["failed"]["p011-t0"]
    done = extract(responses, copy, server.url, capture_dir, "--redo-failed")
    assert "to do 1 " in done.stdout
    assert contents(copy) == contents(undisturbed)


def test_verify_finds_a_last_state_taken_one_block_early(copy, rows, responses, capture_dir, tmp_path):
    """Normed, so its size is right; but it does not choose the engine's tokens."""
    model = text_model(tmp_path / "hf", TINY_KIMI)
    def length(row: dict) -> int:
        return len(row["prompt_ids"] + row["response_ids"])

    for _, alike in itertools.groupby(sorted(rows, key=length), length):
        alike = list(alike)
        with torch.no_grad():
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"] for row in alike])
            early = model.model.norm(model(ids, output_hidden_states=True).hidden_states[-2]).numpy()
        for row, states in zip(alike, early):
            def change(tensors, metadata):
                tensors["last_hidden_states"][:] = states

            rewrite(sample_path(copy, row["id"]), change)
    restamp(copy)
    done = verify(copy, responses, capture_dir, code=2)
    assert "not the states that its logits come from" in done.stderr


# ---- Bad input, a full disk, failing samples ----
def test_bad_input_is_one_line(tmp_path):
    """A process of its own once: exit code 2 and one line."""
    def said(data: Path, output: str, url="http://127.0.0.1:9", process=False) -> str:
        return extract(data, tmp_path / output, url, tmp_path / "incoming", "--server-wait", 0, code=2,
                       process=process).stderr

    def made(name: str, *ids: str) -> Path:
        return write_responses(tmp_path / name, [{"id": key, "prompt_ids": [5], "response_ids": [6]} for key in ids])

    good = made("good", "a", "b")
    assert "Run 01_generate.py first" in said(tmp_path / "none", "out", process=True)
    assert "no server answers there (ConnectionRefusedError)" in said(good, "out", f"http://127.0.0.1:{free_port()}")
    assert "expected http://HOST:PORT" in said(good, "out", "127.0.0.1:3000")
    assert "part-00001.jsonl:1: id '../b' is no safe file name" in said(made("bad", "a", "../b"), "o2")
    assert "id 'a' is there twice" in said(made("twice", "a", "a"), "o3")
    torn = made("torn", "a", "a")
    (torn / "part-00000.jsonl").write_text('{"id": "a", "prompt_')
    assert "part-00000.jsonl:1: no row" in said(torn, "o4")


def test_other_responses_than_01_finished_with_are_refused(stage):
    manifest = stage.responses / "manifest.json"
    names = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in stage.responses.glob("part-*.jsonl")}
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "files": names}))
    assert stage("--limit", 2) == ""
    (stage.responses / "part-00007.jsonl").write_text('{"id": "b", "prompt_ids": [5], "response_ids": [6]}\n')
    assert "part-00007.jsonl: not the file that 01_generate.py finished with" in stage("--limit", 2)
    (stage.responses / "part-00007.jsonl").unlink()
    (stage.responses / "part-00001.jsonl").unlink()
    assert "part-00001.jsonl: not the file that 01_generate.py finished with" in stage("--limit", 2)


def test_two_processes_on_one_folder(stage):
    asked, go_on = threading.Event(), threading.Event()
    stage.servers[0].before = lambda sample_id, folder: asked.set() or go_on.wait(60) and None
    here = stage.responses, stage.folder, stage.servers[0].url, stage.incoming
    first = preloaded.popen(command(*here), stdout=subprocess.DEVNULL, cwd=ROOT)
    assert asked.wait(60)
    assert "another process is writing there" in extract(*here, code=2, process=True).stderr
    go_on.set()
    assert first.wait(timeout=60) == 0


def test_a_server_of_other_layers_is_refused(responses, server, capture_dir, tmp_path, copy, undisturbed):
    """The folder was begun with other layers than this server captures."""
    journal = copy / "landed.jsonl"
    first = journal.read_text().splitlines(keepends=True)[0]
    journal.write_text(first.replace('"capture_layers": [2, 4, 6]', '"capture_layers": [1, 3, 5]'))
    (copy / "manifest.json").unlink()
    said = extract(responses, copy, server.url, capture_dir, code=2).stderr
    assert "captured with another capture_layers [2, 4, 6] (the folder: [1, 3, 5])" in said


def test_a_capture_that_writes_the_same_states_goes_on(stage):
    """An edit of patches/eagle3_capture.py that leaves its states as they are does not cost a folder begun before."""
    current = capture_hash()
    assert current in SAME_CAPTURE, "patches/eagle3_capture*.py were edited: see SAME_CAPTURE in scripts/eagle3/states.py"
    before = "2b4093189eaed67976ebea313bf1d394f955d9eeebe21420c53179ebbd64dec9"
    server = stage.servers[0]
    for first, then in ((before, current), (current, before)):
        shutil.rmtree(stage.folder, ignore_errors=True)
        server.metadata, server.before = {"patch_hash": first}, lambda name, _: (400, {}) if name in ORDER[10:] else None
        assert "of 20 samples failed" in stage("--concurrency", 1)
        kept = len(list(stage.folder.rglob("*.safetensors")))
        server.metadata, server.before = {"patch_hash": then}, lambda name, _: None
        assert stage("--redo-failed") == "" and f"in place {kept} " in stage.out and kept == 10
        assert stage("--verify") == "" and stage.complete()
        assert json.loads((stage.folder / "manifest.json").read_text())["patch_hash"] == first
    (stage.folder / "manifest.json").unlink()
    server.metadata = {"patch_hash": "1" * 64}
    sample_path(stage.folder, "s03").unlink()
    assert f"captured with another patch_hash {'1' * 64} (the folder: {current})" in stage()


@pytest.mark.parametrize("layers", ["1,2,3,4", "1,2,3,4,5"])
def test_four_and_five_layers_go_through(stage, layers):
    stage.servers[0].layers = layers
    assert stage("--verify") == ""
    count = layers.count(",") + 1
    assert f"({(count + 1) * WIDTH * 4 + 5} bytes a token)" in stage.out
    assert json.loads((stage.folder / "manifest.json").read_text())["capture_layers"] == list(range(1, count + 1))
    assert "all 20 samples good" in stage.out


def test_a_server_without_the_patch_is_named(stage, monkeypatch):
    """It answers and writes nothing."""
    monkeypatch.setattr(extraction, "FIRST_FILE_S", 0.3)
    stage.servers[0].before = lambda sample_id, folder: "silent"
    said = stage()
    assert "nothing appeared in " in said and "EAGLE3_CAPTURE_DIR" in said


def test_samples_that_the_server_rejects_are_quarantined(rows, server, capture_dir, tmp_path):
    """Too long for its context: named, counted, never sent, the others done; too many of them: stop."""
    long = [{"id": f"long{n}", "prompt_ids": [5] * 30000, "response_ids": [6, 7]} for n in range(2)]
    responses = write_responses(tmp_path / "responses", [*rows[:20], *long])
    said = extract(responses, tmp_path / "out", server.url, capture_dir, code=2).stderr
    assert "2 of 22 are longer, long" in said and len(said.splitlines()) == 1
    done = extract(responses, tmp_path / "out", server.url, capture_dir, "--max-failed", 0.2)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["counts"]["kept"] == 20
    assert manifest["counts"]["dropped"] == {"longer than the server takes": 2}
    listed = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert {row["id"] for row in listed} == {"long0", "long1"} and all("30,002 tokens" in row["detail"] for row in listed)
    assert "dropped {'longer than the server takes': 2}" in done.stdout


# In every process of a server: writes of samples fail as on a disk that holds no more than the bytes that `limit` names
SMALL_DISK = """
import contextlib, os
from pathlib import Path
folder, real = Path(%r), os.pwrite
def pwrite(file, data, at):
    there = 0
    for path in folder.rglob("*.safetensors*"):
        with contextlib.suppress(FileNotFoundError):  # 03 moves them meanwhile
            there += path.stat().st_size
    if there + len(data) > int((folder.parent / "limit").read_text()):
        raise OSError(28, os.strerror(28))
    return real(file, data, at)
os.pwrite = pwrite
"""


def test_a_full_disk_ends_in_one_line_and_resumes(undisturbed, responses, patched_sglang, tmp_path, monkeypatch):
    """The server's write fails, the client says so; with more room the same command ends well."""
    folder = tmp_path / "hidden_states"
    (tmp_path / "small").mkdir()
    (tmp_path / "small/sitecustomize.py").write_text(SMALL_DISK % str(folder))
    (tmp_path / "limit").write_text(str(6 << 20))
    flags = {"disable-radix-cache": True} | {flag.replace("_", "-"): value for flag, value in ONE_AT_A_TIME.items()}
    server = Engine(tmp_path / "log", TINY_KIMI, flags, {
        "PYTHONPATH": f"{tmp_path / 'small'}:{patched_sglang}", "EAGLE3_CAPTURE_DIR": str(folder / ".incoming"),
        "EAGLE3_CAPTURE_LAYERS": ",".join(map(str, CAPTURE_LAYERS))}, cold=True)
    here = responses, folder, server.url, folder / ".incoming"
    try:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=6 << 20))
            refused = extract(*here, "--verifier-path", TINY_KIMI, code=2)
        assert "GB are to come" in refused.stderr and not list(folder.rglob("*.safetensors"))
        full = extract(*here, "--no-disk-check", code=2)
        assert "the disk is full" in full.stderr and "run the same command again" in full.stderr
        landed = len(list(folder.glob("[0-9a-f][0-9a-f]/*.safetensors")))  # not what still lies in .incoming
        assert 0 < landed < SAMPLES
        (tmp_path / "limit").write_text(str(200 << 20))
        done = extract(*here, "--no-disk-check")
        assert f"in place {landed} " in done.stdout
        assert contents(folder) == contents(undisturbed)
    finally:
        server.kill()


def test_memory_of_a_long_list_is_flat(tmp_path):
    """30,000 rows of 400 tokens are indexed in few bytes each: ids stay on disk until they are sent. No torch."""
    row = json.dumps({"id": "ID", "prompt_ids": list(range(1000, 1200)), "response_ids": list(range(2000, 2200))})
    responses = write_responses(tmp_path / "responses", [])
    with open(responses / "part-00000.jsonl", "w") as file:
        for number in range(30000):
            file.write(row.replace("ID", f"s{number}") + "\n")
    script = ("import importlib.util, resource, sys; from pathlib import Path\n"
              "spec = importlib.util.spec_from_file_location('script', sys.argv[1])\n"
              "m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)\n"
              "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
              "samples, _ = sys.modules['eagle3.samples'].read_samples([Path(sys.argv[2])], 0, 0)\n"
              "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
              "print(len(samples), (after - before) // 1024, 'torch' in sys.modules)")
    out = subprocess.run([sys.executable, "-c", script, ROOT / "03_extract.py", responses / "part-00000.jsonl"],
                         text=True, capture_output=True, check=True)
    count, grown, torch_there = out.stdout.split()
    assert int(count) == 30000 and int(grown) < 40, f"{grown} MiB for 30,000 samples"
    assert torch_there == "False"


# ---- Against a stand-in for the server: what a real one does seldom, and what goes wrong on this side ----
WIDTH = 8
ORDER = sorted((f"s{number:02d}" for number in range(20)), key=plan_order)  # in which Stage's samples are asked for


class Stage:
    """03 in this process on 20 samples of 7 tokens: call(flags) -> the line it ends with, "" where it ends well."""

    def __init__(self, folder: Path):
        self.folder, self.incoming = folder / "hidden_states", folder / "incoming"
        rows = [{"id": f"s{number:02d}", "prompt_ids": [5, 6, 7], "response_ids": [0, 0, 0, 0]} for number in range(20)]
        self.responses = write_responses(folder / "responses", rows)
        self.servers = [StandIn(self.incoming)]
        self.out = ""

    def arguments(self, *more) -> list[str]:
        urls = [word for server in self.servers[1:] for word in ("--base-url", server.url)]
        return arguments(self.responses, self.folder, self.servers[0].url, self.incoming,
                         *urls, "--log-interval", 10, *more)

    def __call__(self, *more) -> str:
        done = extract_here(self.arguments(*more))
        self.out = done.stdout
        assert len(done.stderr.splitlines()) <= 1
        return done.stderr.removeprefix("03_extract: ").rstrip("\n")

    def quarantine(self) -> dict[str, str]:
        path = self.folder / "quarantine.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {row["id"]: row["reason"] for row in map(json.loads, lines)}

    def complete(self) -> bool:
        return (self.folder / "manifest.json").exists()


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path)
    yield stage
    for server in stage.servers:
        server.close()


def test_samples_come_in_the_order_in_which_04_follows(stage):
    """Else its first step would wait for samples that are asked for near the end."""
    assert stage("--concurrency", 1) == "" and stage.servers[0].asked == ORDER
    assert [json.loads(line)["id"] for line in (stage.folder / "plan.jsonl").read_text().splitlines()] == ORDER


def test_too_many_failed_samples_are_not_forgotten(stage):
    """However fast the last of them fail, and also when the same command is given again."""
    stage.servers[0].before = lambda sample_id, folder: (400, {}) if int(sample_id[1:]) % 2 else None
    assert "of 20 samples failed" in stage() and not stage.complete()
    assert "of 20 samples failed" in stage() and not stage.complete()
    assert stage("--max-failed", 0.5) == "" and stage.complete()


def test_a_busy_server_is_asked_again(stage, monkeypatch):
    monkeypatch.setattr(extraction, "ATTEMPTS", 1)
    asked = itertools.count()
    stage.servers[0].before = lambda sample_id, folder: (503, {"message": "queue full"}) if next(asked) < 3 else None
    assert stage() == "" and stage.quarantine() == {}
    assert stage.out.count("is busy (HTTP 503") == 1


def test_of_two_servers_that_differ_one_is_refused(stage, monkeypatch):
    """Also when the first file of each arrives in the same moment."""
    stage.servers.append(StandIn(stage.incoming, "4,5,6"))
    both = threading.Barrier(2)

    def check_slowly(*args):
        found = check_header(*args)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)
        return found

    monkeypatch.setattr(extraction, "check_header", check_slowly)
    assert "was captured with another capture_layers" in stage("--limit", 2)


def test_only_the_sample_that_kills_servers_is_quarantined(stage, monkeypatch):
    """Not those that were in flight with it each time."""
    server, deaths = stage.servers[0], []

    def before(sample_id, folder):
        had = len(deaths)
        time.sleep(0.3 if sample_id == "s02" else 0.6)
        if sample_id == "s02":
            deaths.append(sample_id)
        if len(deaths) > had:
            raise ConnectionAbortedError

    server.before = before
    monkeypatch.setattr(extraction, "DEATHS", 3)
    assert stage("--limit", 6) == "" and stage.quarantine() == {"s02": "the server died 3 times"}


def test_a_sample_that_the_server_cuts_is_quarantined(stage):
    def cut(sample_id, folder):
        return (200, {"output_ids": [0], "meta_info": {"prompt_tokens": 5}}) if sample_id == "s03" else None

    stage.servers[0].before = cut
    assert stage() == "" and stage.quarantine() == {"s03": "cut by the server"}


def test_rows_of_another_request_are_not_taken(stage, monkeypatch):
    """A server whose file holds other ids than were sent is asked again; one that goes on so costs those samples."""
    def mixed_up(sample_id, folder):
        if sample_id == "s03" or (sample_id == "s05" and stage.servers[0].asked.count("s05") < 3):
            (folder / f"{sample_id}.safetensors").write_bytes(captured(sample_id, 3, [5, 6, 7, 0, 0, 0, 1], "1,2,3"))
            return "silent"

    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))
    stage.servers[0].before = mixed_up
    assert stage("--max-failed", 0.1) == "" and stage.quarantine() == {"s03": f"failed {extraction.ATTEMPTS} times"}
    assert "ids are not the response's" in (stage.folder / "quarantine.jsonl").read_text()
    assert stage.servers[0].asked.count("s05") == 3 and len(list(stage.folder.rglob("*.safetensors"))) == 19


def test_a_slow_first_file_is_waited_for(stage, monkeypatch):
    def slowly(sample_id, folder):
        path = folder / f"{sample_id}.safetensors.tmp"
        path.write_bytes(captured(sample_id, 3, [5, 6, 7, 0, 0, 0, 0], "1,2,3"))

        def finish():
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_suffix(""))

        threading.Timer(0.5, finish).start()
        return "silent"

    monkeypatch.setattr(extraction, "FIRST_FILE_S", 0.2)
    stage.servers[0].before = slowly
    assert stage("--concurrency", 20) == ""
    shutil.rmtree(stage.folder)
    monkeypatch.setattr(extraction, "NEXT_FILE_S", 0.3)
    assert "the file of s" in stage("--concurrency", 20)


@pytest.mark.parametrize("error, words", [
    ("write: [Errno 28] No space left on device", "the disk is full"),
    ("write: [Errno 122] Disk quota exceeded", "the disk is full"),
    ("write: [Errno 13] Permission denied: '/x'", "cannot write there ([Errno 13] Permission denied: '/x'). Mend that"),
    ("refused: the radix cache is on.", "the radix cache is on. Start the server anew")])
def test_what_the_server_could_not_do_is_one_line(stage, error, words):
    def fail(sample_id, folder):
        (folder / f"{sample_id}.error").write_text(error + "\n")
        return "silent"

    stage.servers[0].before = fail
    assert words in stage() and stage.quarantine() == {}


@pytest.mark.parametrize("where", ["landing", "quarantine", "begin"])
@pytest.mark.parametrize("number, words", [(28, "Make room"), (122, "Make room"), (13, "Permission denied")])
def test_a_failure_on_this_side_is_not_the_servers(stage, monkeypatch, where, number, words):
    """It ends the run in one line; no sample is blamed for it, and the same command goes on."""
    def fail(*args):
        raise OSError(number, os.strerror(number), "/there")

    with monkeypatch.context() as patch:
        if where == "landing":
            patch.setattr(Journal, "add", fail)
        elif where == "begin":
            patch.setattr(eagle3.stage, "write_atomic", fail)
        else:
            stage.servers[0].before = lambda sample_id, folder: (400, {}) if sample_id == "s03" else None
            patch.setattr(extraction.Extraction, "put_aside", fail)
        assert words in stage() and not stage.complete()
    assert stage() == "" and set(stage.quarantine()) <= {"s03"}


def test_figures_of_the_log_are_those_of_this_folder(stage, tmp_path):
    """The size of a token is the files', whatever the target's config says; samples whose files are gone are not
    counted as done."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": WIDTH}))
    stage.servers[0].before = lambda sample_id, folder: time.sleep(0.1)
    assert stage("--verifier-path", tmp_path) == ""
    assert "(69 bytes a token)" in stage.out and "(133 bytes a token)" in stage.out  # bf16 expected, float32 seen
    (stage.folder / "manifest.json").unlink()
    for number in range(5, 20):
        sample_path(stage.folder, f"s{number:02d}").unlink()
    assert stage("--log-interval", 0.05) == ""
    counts = [int(line.split(" sample ")[1].split("/20 ")[0]) for line in stage.out.splitlines() if " sample " in line]
    assert counts[0] < 10 and counts == sorted(counts) and counts[-1] <= 20


@pytest.mark.parametrize("flags", [["--concurrency", 0], ["--verify-positions", -1], ["--request-timeout", 0],
                                   ["--log-interval", 0], ["--server-wait", "nan"], ["--max-failed", -1],
                                   ["--max-disk-gb", "inf"], ["--max-disk-gb", "nan"]])
def test_flags_out_of_range_are_one_line(stage, flags):
    assert flags[0] in stage(*flags) and not stage.folder.exists()


# ---- --verify, its report and what follows from it ----
def test_a_flipped_bit_of_a_header_is_found(tmp_path):
    good = captured("a", 3, [5, 6, 7, 0, 0, 0, 0], "1,2,3")
    path = tmp_path / "a.safetensors"
    path.write_bytes(good)
    with StateFile(path) as file:
        facts, begin, checksum = check_header(file, "a", 7, 3, None), file.begin, file.metadata["checksum"]
    for at in range(begin):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1:])
        try:
            with StateFile(path) as file:
                check_header(file, "a", 7, 3, facts)
        except ValueError:
            continue
        assert file.metadata["checksum"] != checksum, at  # which is compared with the index


def test_verify_of_a_complete_folder_trusts_nothing_else_than_its_manifest(stage):
    assert stage() == "" and stage("--verify") == ""
    journal = stage.folder / "landed.jsonl"
    journal.write_bytes(journal.read_bytes()[:300])  # its end is lost: the index has it all
    assert stage("--verify") == ""
    index = stage.folder / "index.jsonl"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:3]))
    assert "not the file that manifest.json names" in stage("--verify")
    index.unlink()
    assert "not the file that manifest.json names" in stage("--verify")
    (stage.folder / "manifest.json").unlink()
    assert stage("--verify") == "" and len(index.read_text().splitlines()) == 20


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)


def test_a_failed_verify_is_not_forgotten(stage):
    assert stage() == ""
    damage(sample_path(stage.folder, "s05"))
    assert "1 of 20 samples failed (checksum: 1)" in stage("--verify") and not stage.complete()
    assert "the last --verify failed" in stage() and not stage.complete()
    assert stage("--redo-failed") == "" and stage("--verify") == "" and stage.complete()


def test_killed_while_it_writes_the_report_or_redoes(stage, monkeypatch):
    """At no moment does a folder with known damage look complete."""
    def killed(*args):
        raise RuntimeError("killed")

    assert stage() == ""
    damage(sample_path(stage.folder, "s05"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(verifying, "write_atomic", lambda path, data: killed() if path.name == "verify.json" else None)
        stage("--verify")
    let_go(stage.folder)
    assert not stage.complete()
    assert "1 of 20 samples failed" in stage("--verify")
    (stage.folder / "manifest.json").write_text("{}")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(Journal, "add", killed)
        stage("--redo-failed")
    let_go(stage.folder)
    assert not stage.complete()
    assert stage("--redo-failed") == "" and stage.complete()


def test_a_target_that_verify_cannot_use_is_named_before_anything_is_sent(stage, tmp_path):
    def said() -> str:
        return stage("--verify", "--verifier-path", target)

    target = tmp_path / "target"
    target.mkdir()
    assert "config.json: not readable" in said()
    sizes = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    (target / "config.json").write_text(json.dumps(dict.fromkeys(sizes, WIDTH)))
    assert "no safetensors there. --verifier-path must name the target's folder" in said()
    head, norm = torch.eye(WIDTH), {"model.norm.weight": torch.ones(WIDTH)}
    save_file({**norm, "lm_head.weight": head.to(torch.uint8)}, target / "model.safetensors")
    assert "lm_head.weight is quantised (U8)" in said()
    save_file(norm, target / "model.safetensors")
    assert "no lm_head.weight among its tensors" in said()
    (target / "model.safetensors").write_bytes(b"x" * 100)
    assert "model.safetensors: not readable" in said()
    places = dict.fromkeys(("model.norm.weight", "lm_head.weight"), "a.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "a.safetensors" in said() and stage.servers[0].asked == []
    save_file({**norm, "lm_head.weight": head}, target / "a.safetensors")
    assert said() == ""  # every state chooses token 0, as the responses do
