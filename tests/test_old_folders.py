"""Folders that an earlier version of the scripts left behind go on, and nothing in them is made again.

tests/data/old_folders was written by the scripts of revision fc7ad90, with the answers of tests/api_server.py and the
files of tests/stand_in.py (states of width 2):
    responses/              complete, 6 rows
    responses_half/         01 killed after 3 of the same 6
    hidden_states/          complete
    hidden_states_half/     03 killed between the fourth line of its journal and that file's rename
    hidden_states_bounded/  the same under --max-disk-gb 1, and two samples released
"""
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from api_server import ApiServer, Reply, chat
from conftest import TINY_KIMI, load_script
from eagle3.states import sample_path
from stand_in import StandIn, extract_here

OLD = Path(__file__).parent / "data/old_folders"


@pytest.fixture
def old(tmp_path) -> Path:
    return shutil.copytree(OLD, tmp_path / "run")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# ---- 01 ----
def generate(old: Path, folder: str) -> tuple[dict[str, dict], set[str]]:
    """(rows by id, questions that were asked) of 01 on a copy of an old folder."""
    def answer(body, nth):
        return Reply(chat("fine " * (1 + int(body["messages"][-1]["content"][-1])), completion_tokens=3))

    with ApiServer(answer) as api:
        load_script("01_generate").main([
            "--prompts", str(old / "prompts.jsonl"), "--base-url", api.url, "--model", "m",
            "--tokenizer", str(TINY_KIMI), "--output-dir", str(old / folder), "--concurrency", "1"])
    found = [row for path in sorted((old / folder).glob("part-*.jsonl")) for row in rows(path)]
    return {row["id"]: row for row in found}, set(api.asked)


def test_responses_go_on_where_they_stopped(old):
    found, asked = generate(old, "responses_half")
    assert asked == {"question 3", "question 4", "question 5"}
    assert found == {row["id"]: row for row in rows(old / "responses/part-00000.jsonl")}
    manifests = [json.loads((old / name / "manifest.json").read_text()) for name in ("responses_half", "responses")]
    assert manifests[0]["counts"] == manifests[1]["counts"] and manifests[0]["config"] == manifests[1]["config"]


def test_responses_that_are_complete_stay(old):
    before = contents(old / "responses")
    _, asked = generate(old, "responses")
    assert asked == set() and contents(old / "responses") == before


def test_responses_go_on_with_more_prompts(old):
    """What an earlier version noted of the prompts is enough to see that they have only grown."""
    with open(old / "prompts.jsonl", "a") as file:
        file.write('{"id": "p6", "prompt": "question 6"}\n')
    for folder, asked in (("responses", {"question 6"}), ("responses_half", {f"question {i}" for i in range(3, 7)})):
        found, now_asked = generate(old, folder)
        assert now_asked == asked and found.pop("p6-t0") and len(found) == 6
    assert found == {row["id"]: row for row in rows(OLD / "responses/part-00000.jsonl")}


# ---- 03 ----
@pytest.fixture
def server(tmp_path):
    server = StandIn(tmp_path / "incoming", width=2)
    yield server
    server.close()


def extract(old: Path, folder: str, server: StandIn, *more):
    return extract_here(["--data-dir", old / "responses", "--output-dir", old / folder, "--base-url", server.url,
                         "--capture-dir", server.folder, "--concurrency", "1", *more])


def test_hidden_states_go_on_where_they_stopped(old, server):
    """What lies in place is not asked for again; the end is the folder that the earlier version made at one stretch."""
    before = contents(old / "hidden_states_half")
    done = extract(old, "hidden_states_half", server)
    assert done.returncode == 0 and "in place 3 " in done.stdout and "to do 3 " in done.stdout, done.stderr
    assert sorted(server.asked) == ["p3-t0", "p4-t0", "p5-t0"]
    after, whole = contents(old / "hidden_states_half"), contents(old / "hidden_states")
    assert {name: after[name] for name in before if name != "landed.jsonl"} == {
        name: before[name] for name in before if name != "landed.jsonl"}
    assert after.keys() == whole.keys() and {name for name in whole if after[name] != whole[name]} <= {"landed.jsonl"}
    begun = (OLD / "hidden_states_half/landed.jsonl").read_text()
    assert (old / "hidden_states_half/landed.jsonl").read_text().startswith(begun)


def test_hidden_states_that_are_complete_stay_and_verify(old, server):
    before = contents(old / "hidden_states")
    done = extract(old, "hidden_states", server)
    assert "complete already" in done.stdout and contents(old / "hidden_states") == before
    done = extract(old, "hidden_states", server, "--verify")
    assert done.returncode == 0 and "all 6 samples good" in done.stdout, done.stderr
    assert {name: digest for name, digest in contents(old / "hidden_states").items() if name != "verify.json"} == before
    assert server.asked == []


def test_hidden_states_in_bounded_mode_go_on(old, server):
    """Released samples count as extracted."""
    folder = old / "hidden_states_bounded"
    done = extract(old, "hidden_states_bounded", server, "--max-disk-gb", 1)
    assert done.returncode == 0 and "in place 3 " in done.stdout, done.stderr
    assert server.asked == [row["id"] for row in rows(folder / "plan.jsonl")][3:]
    for name in ("index.jsonl", "plan.jsonl"):
        assert (folder / name).read_bytes() == (old / "hidden_states" / name).read_bytes()
    gone = {row["id"] for row in rows(folder / "index.jsonl") if not sample_path(folder, row["id"]).exists()}
    assert gone == {row["id"] for row in rows(folder / "released.jsonl")}
    assert json.loads((folder / "manifest.json").read_text())["bounded"] is True
