"""Folders that grow and end early: closed with what they have, gone on with more prompts, responses or a higher limit; and
what the later stages make of it.
"""
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess

import pytest

from api_server import ApiServer
from eagle3.growth import as_of, earlier, grown_from, set_back, wants_more
from eagle3.stage import UserError, sha256_file
from eagle3.states import sample_path
from conftest import load_script
from stand_in import StandIn, extract_here, write_responses
from test_extract import ORDER, Stage, command, contents, stage  # noqa: F401  stage: a fixture
from test_follow import drafter, toy, toy_arguments  # noqa: F401  toy: a fixture
from test_generate import dropped_of, fine, flags, rows_of, run_here, start, write_jsonl
from test_vocab import build, maps, responses

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
    assert stage() == "" and sorted(stage.servers[0].asked) == sorted(ORDER[8:])
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
    stage.servers[0].before = lambda name, folder: (400, {}) if name in ORDER[15:17] else None
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
    manifest = manifest_of(data) | {"index_sha256": sha256_file(data / "index.jsonl"), **more}
    manifest["counts"]["kept"] = len(rows)
    (data / "manifest.json").write_text(json.dumps(manifest))


def test_04_trains_on_a_closed_folder_and_does_not_follow_one(toy, tmp_path):
    data = shutil.copytree(toy / "hidden_states", tmp_path / "data", ignore=shutil.ignore_patterns("checked"))
    leave_out(data, [f"s{number:03d}" for number in range(20, 150)], closed=130)
    train.main(toy_arguments(toy, data, tmp_path / "output"))
    counts = manifest_of(tmp_path / "output")["counts"]
    assert counts["train"] + counts["validation"] == 20
    with pytest.raises(UserError, match="--close left out 130 of the samples by which this run has planned its steps"):
        train.main(toy_arguments(toy, data, tmp_path / "followed", "--follow"))


# ---- more prompts ----
def questions(first: int, end: int, word: str = "question") -> list[dict]:
    return [{"id": f"p{number:02d}", "prompt": f"{word} {number}"} for number in range(first, end)]


def append(path, rows: list[dict], before: str = "") -> None:
    with open(path, "a") as file:
        file.write(before + "".join(json.dumps(row) + "\n" for row in rows))


def made_by_01(folder) -> dict[str, bytes]:
    """What must not depend on the way there."""
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.is_file() and path.name not in ("manifest.json", "stage.json", ".lock", ".unsettled")}


def after_01(tmp_path, capsys, url: str, incoming) -> str:
    """02 and 03 on what 01 made; what they said."""
    code, out, err = build(capsys, tmp_path / "out", tmp_path / "map", "--draft-vocab-size", 300)
    done = extract_here(["--data-dir", tmp_path / "out", "--output-dir", tmp_path / "states", "--base-url", url,
                         "--capture-dir", incoming, "--concurrency", 2])
    assert code == 0 and done.returncode == 0, err + done.stderr
    return out + done.stdout


@pytest.mark.parametrize("where", ["same file", "another file"])
def test_more_prompts_go_on_killed_or_not(where, tmp_path, capsys):
    """Only the new rows are asked; kill -9 amid them, and the end is that of one run over all. 02 and 03 go on, too."""
    server = StandIn(tmp_path / "incoming")
    with ApiServer(fine) as api:
        argv = flags(api.url, write_jsonl(tmp_path / "p.jsonl", questions(0, 12)), tmp_path / "out")
        section = {"prompts": str(tmp_path / "p.jsonl")}
        assert wants_more(section, tmp_path / "out", tmp_path / "out") and run_here(argv, capsys)[0] == 0
        assert not wants_more(section, tmp_path / "out", tmp_path / "out")
        assert "have grown" not in after_01(tmp_path, capsys, server.url, server.folder)
        if where == "same file":
            append(tmp_path / "p.jsonl", questions(12, 40))
        else:
            more = write_jsonl(tmp_path / "more.jsonl", questions(12, 40))
            argv, section = ["--prompts", tmp_path / "p.jsonl", "--prompts", more, *argv[2:]], {
                "prompts": [f"{tmp_path / 'p.jsonl'}", f"{more}"]}
        assert wants_more(section, tmp_path / "out", tmp_path / "out")
        process = start(argv, tmp_path / "log")
        api.kill_at(13, process)
        assert process.wait() == -signal.SIGKILL and not (tmp_path / "out/manifest.json").exists()
        assert "the prompts have grown: 12 rows as they were, 28 more" in (tmp_path / "log").read_text()
        assert 12 < len(rows_of(tmp_path / "out")) < 40
        assert run_here(argv, capsys)[0] == 0 and "complete already" in run_here(argv, capsys)[1]
        assert not wants_more(section, tmp_path / "out", tmp_path / "out")
        assert all(api.asked[f"question {number}"] == 1 for number in range(12)) and sum(api.asked.values()) <= 40 + 4
        out = argv.index("--output-dir") + 1
        assert run_here([*argv[:out], tmp_path / "once", *argv[out + 1:]], capsys)[0] == 0
    grown, once = made_by_01(tmp_path / "out"), made_by_01(tmp_path / "once")
    for report in (grown, once):
        report["report.json"] = json.loads(report["report.json"]) | {"cost": 0}  # what was in flight counts as spent
    assert grown == once and len(rows_of(tmp_path / "out")) == 40
    grown, once = manifest_of(tmp_path / "out"), manifest_of(tmp_path / "once")
    assert [entry["kept"] for entry in grown.pop("grown_from")] == [12]
    assert grown["config"].pop("grown", None) == (None if where == "same file" else [[12]]) and grown == once
    said = after_01(tmp_path, capsys, server.url, server.folder)
    assert "the map, left as it is, covers" in said and "the responses have grown: the 12 samples planned here" in said
    assert sorted(server.asked) == [f"p{number:02d}-t0" for number in range(40)]
    server.close()


def test_the_old_file_may_end_without_a_line_end(tmp_path, capsys):
    with ApiServer(fine) as api:
        for number, end in enumerate(("\n", "\r\n")):
            path = tmp_path / f"{number}.jsonl"
            path.write_text(json.dumps(questions(0, 1)[0]))
            argv = flags(api.url, path, tmp_path / f"{number}")
            assert run_here(argv, capsys)[0] == 0
            append(path, questions(1, 3), before=end)
            assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / f"{number}")) == 3
        assert set(api.asked.values()) == {2}  # once for each file


def test_what_was_asked_stays_where_a_new_file_repeats_it(tmp_path, capsys):
    """The mix of a fresh run would begin with the new file's row; here the old answer is kept, and the new row dropped."""
    old = write_jsonl(tmp_path / "old.jsonl", questions(0, 2))
    new = write_jsonl(tmp_path / "new.jsonl", [{"id": "n0", "prompt": "question 1"}, {"id": "n1", "prompt": "new"}] + [
        {"id": f"n{number}", "prompt": f"more {number}"} for number in range(2, 9)])
    with ApiServer(fine) as api:
        argv = flags(api.url, old, tmp_path / "out")
        assert run_here(argv, capsys)[0] == 0
        assert run_here([*argv[:2], "--prompts", new, *argv[2:]], capsys)[0] == 0
        assert set(api.asked.values()) == {1} and sum(api.asked.values()) == 10
        assert dropped_of(tmp_path / "out") == {"n0-t0": "duplicate"} and "p01-t0" in rows_of(tmp_path / "out")
        third = write_jsonl(tmp_path / "third.jsonl", questions(20, 22))
        argv = [*argv[:2], "--prompts", new, "--prompts", third, *argv[2:]]
        assert run_here(argv, capsys)[0] == 0 and sum(api.asked.values()) == 12
        assert dropped_of(tmp_path / "out") == {"n0-t0": "duplicate"} and len(rows_of(tmp_path / "out")) == 12
        assert manifest_of(tmp_path / "out")["config"]["grown"] == [[2], [2, 9]]


def test_weighted_files_grow_in_the_order_of_one_run(tmp_path, capsys):
    """Both have a weight and no row moves; --limit takes what it takes of a run over the long files."""
    with ApiServer(fine) as api:
        for name in "ab":
            write_jsonl(tmp_path / f"{name}.jsonl", [row | {"id": name + row["id"]} for row in questions(0, 6, name)])
        argv = ["--prompts", f"{tmp_path}/a.jsonl,weight=2", "--prompts", f"{tmp_path}/b.jsonl,weight=1", "--limit", 8,
                *flags(api.url, "", tmp_path / "out")[2:]]
        assert run_here(argv, capsys)[0] == 0
        append(tmp_path / "a.jsonl", [row | {"id": "a" + row["id"]} for row in questions(6, 20, "a")])
        argv[argv.index(8)] = 14
        assert run_here(argv, capsys)[0] == 0 and set(api.asked.values()) == {1}
        assert run_here([word if word != tmp_path / "out" else tmp_path / "once" for word in argv], capsys)[0] == 0
    assert made_by_01(tmp_path / "out") == made_by_01(tmp_path / "once")
    assert len(rows_of(tmp_path / "out")) == 14 and "grown" not in manifest_of(tmp_path / "out")["config"]


def other_rows(path, change) -> None:
    rows = path.read_text().splitlines(True)
    path.write_text("".join(change(rows)))


@pytest.mark.parametrize("change, before, now, words", [
    (lambda path: other_rows(path / "a.jsonl", lambda rows: ["{\"prompt\": \"other\"}\n", *rows[1:], *rows[:1]]), [], [],
     "a.jsonl is not the old file with rows behind its end: rows of it were changed"),
    (lambda path: other_rows(path / "a.jsonl", lambda rows: rows[:-1]), [], [], "a.jsonl is not the old file"),
    (lambda path: other_rows(path / "a.jsonl", lambda rows: ["\n", *rows]), [], [], "a.jsonl is not the old file"),
    (None, [], ["--prompts", "{a}"], "1:b is not among those of now"),
    (None, [], ["--prompts", "{b}", "--prompts", "{a}"], "0:a is not among those of now, or not in its place"),
    (None, [], ["--prompts", "{a},weight=2", "--prompts", "{b}"], "0:a had nothing behind it, now weight=2"),
    (None, [], ["--prompts", "{a}", "--prompts", "{b}", "--prompts", "{c},weight=2"], "with these weights their rows"),
    (None, [], ["--prompts", "{a}", "--prompts", "{b}", "--prompts", "{c}", "--limit", 8],
     "the mix of several sources orders them anew with each row more, and --limit 8 takes the first ones"),
    (lambda path: append(path / "a.jsonl", [{"id": "x", "prompt": "x"}]), ["--shuffle"], ["--limit", 5],
     "--shuffle orders them anew with each row more, and --limit 5 takes the first ones"),
    (lambda path: append(path / "set.jsonl", [{"id": "x", "prompt": "x"}]), ["--dataset", "{set}"], [],
     "the data set set has changed, and only files of --prompts can grow"),
    (lambda path: append(path / "a.jsonl", [{"id": "x", "prompt": "x"}]), [], ["--temperature", 0.5],
     "temperature: 1.0 there, 0.5 now")],
    ids=["changed", "shorter", "shifted", "one less", "swapped", "weight", "new weight", "mix and limit", "shuffle",
         "data set", "grown and more"])
def test_other_prompts_are_refused_and_the_old_ones_are_still_good(change, before, now, words, tmp_path, capsys):
    for name in ("a", "b", "c", "set"):
        write_jsonl(tmp_path / f"{name}.jsonl", [row | {"id": name + row["id"]} for row in questions(0, 4, name)])
    old = {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in ("a", "set")}
    spell = lambda words: [f"{word}".format(**{name: tmp_path / f"{name}.jsonl" for name in ("a", "b", "c", "set")})
                           for word in words]
    two = ["--prompts", "{a}", "--prompts", "{b}"]
    with ApiServer(fine) as api:
        rest = flags(api.url, "", tmp_path / "out")[2:]
        begin = [*spell([*two, *before]), *rest]
        assert run_here(begin, capsys)[0] == 0
        asked, whole = sum(api.asked.values()), contents(tmp_path / "out")
        if change:
            change(tmp_path)
        code, _, err = run_here([*spell([*([] if "--prompts" in now else two), *before, *now]), *rest], capsys)
        assert code == 2 and words in err and "another folder" in err and len(err.splitlines()) == 1, err
        for name, data in old.items():
            (tmp_path / f"{name}.jsonl").write_bytes(data)
        code, out, err = run_here(begin, capsys)
        assert code == 0 and "complete already" in out, err
        assert contents(tmp_path / "out") == whole and sum(api.asked.values()) == asked


def test_more_prompts_of_which_nothing_came_hold_nobody(tmp_path, capsys):
    """The server is away when the run is to go on with more; with the old file it is complete as it was."""
    path = write_jsonl(tmp_path / "p.jsonl", questions(0, 3))
    with ApiServer(fine) as api:
        assert run_here(flags(api.url, path, tmp_path / "out"), capsys)[0] == 0
        whole, old = contents(tmp_path / "out"), path.read_bytes()
        append(path, questions(3, 5))
        nobody = flags("http://127.0.0.1:9", path, tmp_path / "out", "--outage-s", 0.1)
        assert run_here(nobody, capsys)[0] == 2
        path.write_bytes(old)
        assert "complete already" in run_here(flags(api.url, path, tmp_path / "out"), capsys)[1]
        assert contents(tmp_path / "out") == whole
        append(path, questions(3, 6))
        assert run_here(flags(api.url, path, tmp_path / "out"), capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 6


def test_a_run_that_its_budget_stopped_has_not_grown_when_it_is_repeated(tmp_path, capsys):
    """Later stages would take it for more responses. A larger budget goes on, and what was stands in before/."""
    with ApiServer(fine) as api:
        argv = flags(api.url, write_jsonl(tmp_path / "p.jsonl", questions(0, 9)), tmp_path / "out", "--max-tokens", 100,
                     "--concurrency", 1)
        assert run_here([*argv, "--max-tokens-total", 150], capsys)[0] == 0
        whole, asked = contents(tmp_path / "out"), sum(api.asked.values())
        assert 0 < asked < 9 and manifest_of(tmp_path / "out")["stopped"] == "--max-tokens-total"
        assert wants_more({"prompts": f"{tmp_path / 'p.jsonl'}"}, tmp_path / "out", tmp_path / "out")
        for _ in range(2):
            assert run_here([*argv, "--max-tokens-total", 150], capsys)[0] == 0
            assert contents(tmp_path / "out") == whole and earlier(tmp_path / "out") == []
        assert run_here([*argv, "--max-tokens-total", 3000], capsys)[0] == 0 and set(api.asked.values()) == {1}
        assert [entry["kept"] for entry in manifest_of(tmp_path / "out")["grown_from"]] == [asked]
        assert not wants_more({"prompts": f"{tmp_path / 'p.jsonl'}"}, tmp_path / "out", tmp_path / "out")


def test_a_lower_limit_takes_no_row_away_and_says_so(tmp_path, capsys):
    with ApiServer(fine) as api:
        argv = flags(api.url, write_jsonl(tmp_path / "p.jsonl", questions(0, 6)), tmp_path / "out")
        assert "are here besides" not in run_here([*argv, "--limit", 5], capsys)[1]
        code, out, _ = run_here([*argv, "--limit", 2], capsys)
        assert code == 0 and len(rows_of(tmp_path / "out")) == 5
        assert "WARNING: 3 rows of an earlier, higher --limit are here besides" in out
        assert "are here besides" not in run_here(argv, capsys)[1] and len(rows_of(tmp_path / "out")) == 6


def test_compressed_prompts_are_one_line(tmp_path, capsys):
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    for flag in ("--prompts", "--dataset"):
        code, _, err = run_here([flag, tmp_path / "p.jsonl.gz", *flags(None, "", tmp_path / "out", "--answers", "given")[2:]], capsys)
        assert code == 2 and "is compressed. Unpack it first: gunzip -k" in err and len(err.splitlines()) == 1


# ---- more responses ----
def with_responses(stage, names: list[str], **other: int) -> None:
    """Responses of these ids, sorted as 01 sorts them; `other`: the last token of some."""
    shutil.rmtree(stage.responses)
    write_responses(stage.responses, [{"id": name, "prompt_ids": [5, 6, 7], "response_ids": [0, 0, 0, other.get(name, 0)]}
                                      for name in sorted(names)])


OLD = [f"s{number:02d}" for number in range(20)]
NEW = [f"r{number:02d}" for number in range(5)] + [f"s{number:02d}x" for number in range(5)]  # before and between


def test_more_responses_are_extracted_in_the_same_folder_killed_or_not(stage):
    """Only the new ones are asked for; kill -9 amid them, and the end is that of the larger run begun at once."""
    assert stage() == ""
    assert not wants_more({}, stage.folder, stage.responses)
    with_responses(stage, OLD + NEW)
    assert wants_more({}, stage.folder, stage.responses)
    server = stage.servers[0]
    argv = command(stage.responses, stage.folder, server.url, stage.incoming, "--concurrency", 1)
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        server.before = lambda name, folder: os.kill(process.pid, signal.SIGKILL) if len(server.asked) == 24 else None
        assert process.wait() == -signal.SIGKILL and not stage.complete()
    server.before = lambda name, folder: None
    assert stage() == "" and set(server.asked[20:]) == set(NEW) and 30 <= len(server.asked) <= 31
    fresh = Stage(stage.folder.parent / "fresh")
    with_responses(fresh, OLD + NEW)
    assert fresh() == ""
    fresh.servers[0].close()
    assert artifacts(stage.folder) == artifacts(fresh.folder)
    assert not wants_more({}, stage.folder, stage.responses) and wants_more({"limit": 9}, stage.folder, stage.responses)
    grown = manifest_of(stage.folder)
    assert [entry["kept"] for entry in grown.pop("grown_from")] == [20] and grown == manifest_of(fresh.folder)
    assert stage("--verify") == "" and "complete already" not in stage.out


def test_growth_says_what_it_is(stage):
    assert stage("--limit", 12) == ""
    with_responses(stage, OLD + NEW)
    assert stage() == ""
    assert "the responses have grown: the 12 samples planned here are in them as they were, of 30 now" in stage.out
    assert "complete with --limit 12, now --limit 0 of more responses: going on" in stage.out


@pytest.mark.parametrize("change, words", [
    (lambda stage: with_responses(stage, OLD[1:] + NEW), "s00 is not in it any more"),
    (lambda stage: with_responses(stage, OLD + NEW, s07=9), "s07 differs from its file (ids are not the response's)")])
def test_what_has_not_only_grown_is_refused(stage, change, words):
    assert stage() == ""
    before = contents(stage.folder)
    change(stage)
    said = stage()
    assert "has not only grown since" in said and words in said and "Use the old responses or another" in said
    assert contents(stage.folder) == before and len(stage.servers[0].asked) == 20
    with_responses(stage, OLD + NEW)
    assert "max_length: 0 there, 5 now" in stage("--max-length", 5) and contents(stage.folder) == before


# ---- what 04 and 02 make of it ----
def test_a_run_of_04_goes_on_with_the_samples_it_began_with(toy, tmp_path, monkeypatch):
    """The folder grows between two of its calls: it ends in the bytes of a folder that never grew; a new output takes
    all."""
    data = shutil.copytree(toy / "hidden_states", tmp_path / "data", ignore=shutil.ignore_patterns("checked"))
    leave_out(data, [f"s{number:03d}" for number in range(60, 150)])
    argv = toy_arguments(toy, data, tmp_path / "output", "--save-every", 3)

    class Killed(Exception):
        pass

    train.main(toy_arguments(toy, data, tmp_path / "undisturbed", "--save-every", 3))
    end_step = train.Training.end_step

    def killed(self, step):
        end_step(self, step)
        if step == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(train.Training, "end_step", killed)
        with pytest.raises(Killed):
            train.main(argv)
    set_back(data, "03_extract")
    for path in (toy / "hidden_states").glob("??/*.safetensors"):
        shutil.copy(path, data / path.parent.name) if (data / path.parent.name).is_dir() else None
    shutil.copy(toy / "hidden_states/index.jsonl", data / "whole")
    (data / "whole").rename(data / "index.jsonl")  # as write_atomic replaces it
    (data / "manifest.json").write_text(json.dumps({**manifest_of(toy / "hidden_states"), **grown_from(data)}))
    said = []
    monkeypatch.setattr("eagle3.processes.log", said.append)
    train.main(argv)
    assert drafter(tmp_path / "output") == drafter(tmp_path / "undisturbed")
    assert any("has grown since" in line and "this run goes on with the 60 samples" in line for line in said), said
    (data / "manifest.json").unlink()  # 03 at work again
    train.main(argv)
    (data / "manifest.json").write_text(json.dumps({**manifest_of(toy / "hidden_states"), **grown_from(data)}))
    train.main(toy_arguments(toy, data, tmp_path / "all"))
    counts = manifest_of(tmp_path / "all")["counts"]
    assert counts["train"] + counts["validation"] > 60


def test_02_says_what_its_map_covers_of_more_responses_and_leaves_it(tmp_path, capsys):
    answers = [[token] * 5 for token in range(300, 500)]
    data = responses(tmp_path / "responses", answers)
    size = "--draft-vocab-size", 256
    assert build(capsys, data, tmp_path / "map", *size)[0] == 0
    old, manifest = (tmp_path / "map/manifest.json").read_bytes(), (data / "manifest.json").read_bytes()
    shutil.rmtree(data)
    more = answers + [[token] * 50 for token in range(700, 800)]
    responses(data, more)
    code, _, err = build(capsys, data, tmp_path / "map", *size)
    assert code == 2 and "begun with another config (inputs" in err  # nobody says that they have grown
    shutil.rmtree(data)
    responses(data, more, grown_from=[{"manifest": hashlib.sha256(manifest).hexdigest(), "kept": 200}])
    for _ in range(2):
        code, out, _ = build(capsys, data, tmp_path / "map", *size)
        assert code == 0 and "the map, left as it is, covers" in out and "--rechoose" in out
        assert (tmp_path / "map/manifest.json").read_bytes() == old
    said = json.loads((tmp_path / "map/grown.json").read_text())
    assert said["tokens"] == 6000 and said["coverage"] < 0.2 < 0.8 < said["coverage_chosen_anew"]
    assert "draft_vocab_size: 256 there" in build(capsys, data, tmp_path / "map", "--draft-vocab-size", 300, "--rechoose")[2]
    assert build(capsys, data, tmp_path / "map", *size, "--rechoose")[0] == 0
    assert build(capsys, data, tmp_path / "fresh", *size)[0] == 0
    assert (maps(tmp_path / "map")[0] == maps(tmp_path / "fresh")[0]).all()
    assert [entry["kept"] for entry in manifest_of(tmp_path / "map")["grown_from"]] == [200]
    assert not (tmp_path / "map/grown.json").exists()  # it spoke of the map before
    assert "left as it is" not in build(capsys, data, tmp_path / "map", *size)[1]
