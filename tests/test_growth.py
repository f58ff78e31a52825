"""Folders that grow and end early: closed with what they have, gone on with more prompts, responses or a higher limit; and
what the later stages make of it."""
import json
import shutil

import pytest

from eagle3.growth import as_of, earlier, set_back
from eagle3.stage import UserError, sha256_file
from eagle3.states import sample_path
from conftest import load_script
from stand_in import StandIn
from test_extract import Stage, contents, stage  # noqa: F401  stage: a fixture
from test_follow import toy, toy_arguments  # noqa: F401  toy: a fixture

train = load_script("04_train")


def manifest_of(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def artifacts(folder) -> dict[str, str]:
    """sha256 of every file but what records the way there: earlier states, the manifest, the plan of a smaller limit."""
    return {name: digest for name, digest in contents(folder).items()
            if not name.startswith("before/") and name != "manifest.json"}


def dies_after(stage, count: int) -> None:
    """The server answers `count` samples; then it refuses all, which ends 03 as a kill would: without a manifest."""
    server = stage.servers[0]
    server.before = lambda name, folder: (401, {}) if len(server.asked) > count else None


# ---- --close ----
def test_a_closed_folder_holds_what_landed_and_goes_on(stage):
    dies_after(stage, 8)
    assert "asks for a key" in stage("--concurrency", 1) and not stage.complete()
    asked = len(stage.servers[0].asked)
    stage.servers[0].close()  # nobody is asked
    assert stage("--close") == "" and len(stage.servers[0].asked) == asked
    manifest = manifest_of(stage.folder)
    assert manifest["counts"]["kept"] == 8 == len((stage.folder / "index.jsonl").read_text().splitlines())
    assert manifest["counts"]["dropped"] == {"closed": 12} and manifest["closed"] == 12 and "grown_from" not in manifest
    assert "closing with 8 of 20 samples | quarantined 0 | left out 12" in stage.out
    assert stage("--close", "--verify") == "" and stage("--close") == "" and "complete already" in stage.out
    stage.servers[0] = StandIn(stage.incoming)
    assert stage() == "" and sorted(stage.servers[0].asked) == [f"s{number:02d}" for number in range(8, 20)]
    assert "closed with 12 samples left out, now --limit 0: going on" in stage.out
    grown = manifest_of(stage.folder)
    assert grown["counts"]["dropped"] == {} and "closed" not in grown
    assert [entry["kept"] for entry in grown["grown_from"]] == [8]
    before = as_of(stage.folder, grown["grown_from"][0]["manifest"])
    assert manifest_of(before) == manifest and len((before / "index.jsonl").read_text().splitlines()) == 8
    fresh = Stage(stage.folder.parent / "fresh")
    assert fresh() == ""
    fresh.servers[0].close()
    (stage.folder / "verify.json").unlink()
    assert artifacts(stage.folder) == artifacts(fresh.folder)
    assert {**grown, "grown_from": 0} == {**manifest_of(fresh.folder), "grown_from": 0}


def test_what_cannot_be_closed_is_one_line(stage):
    assert "no sample has landed, so there is nothing to close with" in stage("--close")
    assert "--close is not for --max-disk-gb" in stage("--close", "--max-disk-gb", 1)
    assert stage() == "" and stage("--close") == "" and "complete already" in stage.out


def test_too_many_failures_can_be_closed_with_what_there_is(stage):
    stage.servers[0].before = lambda name, folder: (400, {}) if name in ("s15", "s16") else None
    assert "2 of 20 samples failed" in stage("--concurrency", 1)
    assert stage("--close") == ""
    counts = manifest_of(stage.folder)["counts"]
    assert counts["dropped"]["rejected by the server"] == 2
    assert counts["kept"] + sum(counts["dropped"].values()) == 20 and counts["kept"] >= 15


def test_killed_between_two_steps_of_setting_back(stage, monkeypatch):
    """The folder is as it was, or as afterwards, and is set back once."""
    assert stage("--limit", 5) == ""
    manifest = (stage.folder / "manifest.json").read_bytes()
    (stage.folder / "before/1.tmp").mkdir(parents=True)
    (stage.folder / "before/1.tmp/index.jsonl").write_text("half of it")
    set_back(stage.folder, "03_extract")
    (stage.folder / "manifest.json").write_bytes(manifest)  # as a kill before its removal leaves it
    assert stage("--limit", 9) == "" and len(earlier(stage.folder)) == 1
    assert manifest_of(stage.folder)["grown_from"][0]["kept"] == 5
    assert (stage.folder / "before/1/manifest.json").read_bytes() == manifest


def leave_out(data, gone: list[str], **more) -> None:
    """A finished folder without these samples, its manifest with `more` in it."""
    rows = [line for line in (data / "index.jsonl").read_text().splitlines(True) if json.loads(line)["id"] not in gone]
    (data / "index.jsonl").write_text("".join(rows))
    for name in gone:
        sample_path(data, name).unlink()
    lines = [line for line in (data / "landed.jsonl").read_text().splitlines(True)
             if json.loads(line).get("id") not in gone]
    (data / "landed.jsonl").write_text("".join(lines))
    changed = {"index_sha256": sha256_file(data / "index.jsonl"), **more}
    (data / "manifest.json").write_text(json.dumps({**manifest_of(data), **changed}))


def test_04_trains_on_a_closed_folder_and_does_not_follow_one(toy, tmp_path):
    data = shutil.copytree(toy / "hidden_states", tmp_path / "data", ignore=shutil.ignore_patterns("checked"))
    leave_out(data, [f"s{number:03d}" for number in range(20, 150)], closed=130)
    train.main(toy_arguments(toy, data, tmp_path / "output"))
    counts = manifest_of(tmp_path / "output")["counts"]
    assert counts["train"] + counts["validation"] == 20
    with pytest.raises(UserError, match="--close left out 130 of the samples by which this run has planned its steps"):
        train.main(toy_arguments(toy, data, tmp_path / "followed", "--follow"))
