"""Very many samples: what 03 remembers between its calls is never stale, and 04's tables are what lists of samples were."""
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT
from stand_in import StandIn, extract_here, write_responses
from eagle3 import batches, file_stat, journal, restart
from eagle3.batches import Sample, plan_epoch, seen_in_epoch, split_samples
from eagle3.inputs import read_index
from eagle3.sample_table import Builder, StoredMass, joined
from eagle3.schedule import Schedule, plan_epochs
from eagle3.sources import once
from eagle3.stage import UserError, sha256_file
from eagle3.states import sample_path

ROWS = [{"id": f"r{i:02d}", "prompt_ids": [1, 2, 3], "response_ids": [4 + i % 5, 5, 6, 7]} for i in range(24)]


# ---- 03 ----
@pytest.fixture
def folder(tmp_path, monkeypatch):
    """03 over 24 samples, which count as very many; folder(*flags) runs it and says what was opened on the way."""
    monkeypatch.setattr(restart, "REMEMBER", 20)
    monkeypatch.setattr(file_stat, "SETTLED_NS", 0)
    server = StandIn(tmp_path / "incoming", width=2)
    data, output, opened = write_responses(tmp_path / "responses", ROWS), tmp_path / "hidden_states", []
    init, read = journal.StateFile.__init__, restart.read_samples

    def noted(self, path):
        init(self, path)
        opened.append(Path(path).stem)

    def noted_read(*args):
        opened.append("responses")
        return read(*args)

    monkeypatch.setattr(journal.StateFile, "__init__", noted)
    monkeypatch.setattr(restart, "read_samples", noted_read)

    def run(*flags):
        opened.clear(), server.asked.clear()
        done = extract_here(["--data-dir", data, "--output-dir", output, "--base-url", server.url, "--capture-dir", server.folder,
                             "--concurrency", 2, *flags])
        run.said = done.stdout + done.stderr
        return sorted(opened)

    run.server, run.data, run.output = server, data, output
    yield run
    server.close()


def cut_short(folder) -> None:
    """As killed at its very end: everything lies in place, the stage is not complete."""
    (folder.output / "manifest.json").unlink()


def test_a_restart_opens_neither_responses_nor_samples(folder):
    folder()
    before = {name: (folder.output / name).read_bytes() for name in ("plan.jsonl", "index.jsonl", "landed.jsonl", "manifest.json")}
    assert len(folder.server.asked) == 24 and {"samples.npz", "placed.bin"} <= set(os.listdir(folder.output))
    cut_short(folder)
    assert folder() == [] and folder.server.asked == [] and "in place 24 " in folder.said
    assert {name: (folder.output / name).read_bytes() for name in before} == before


def test_fewer_samples_leave_nothing_beside_them(folder, monkeypatch):
    monkeypatch.setattr(restart, "REMEMBER", 25)
    folder()
    assert not {"samples.npz", "placed.bin"} & set(os.listdir(folder.output))


def test_a_folder_of_before_remembers_from_its_next_start_on(folder):
    folder()
    (folder.output / "samples.npz").unlink(), (folder.output / "placed.bin").unlink()
    cut_short(folder)
    assert folder() == sorted(["responses", *(row["id"] for row in ROWS)])
    cut_short(folder)
    assert folder() == []


CHANGES = {
    "touched": lambda path: os.utime(path),
    "copied over, with its times": lambda path: (shutil.copy2(path, f"{path}.new"), os.replace(f"{path}.new", path)),
    "another byte under the old time": lambda path: (stat := path.stat(), path.write_bytes(path.read_bytes()[:-1] + b"\2"),
                                                     os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "gone": lambda path: path.unlink()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_another_one_is_opened_and_no_other(folder, change):
    folder()
    cut_short(folder)
    CHANGES[change](sample_path(folder.output, "r07"))
    opened = folder()
    assert set(opened) == {"r07"} and (folder.server.asked == ["r07"]) == (change in ("torn", "gone"))
    cut_short(folder)
    assert folder() == [] and "in place 24 " in folder.said


def test_a_line_that_says_otherwise_or_takes_back_is_heard(folder):
    folder()
    cut_short(folder)
    lines = (folder.output / "landed.jsonl").read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if '"r07"' in line)
    lines[number] = lines[number].replace("sha256:", "sha256:0")
    (folder.output / "landed.jsonl").write_text("".join(lines))
    assert folder() == ["r07"] and "made anew from the file" in folder.said
    cut_short(folder)
    with open(folder.output / "landed.jsonl", "a") as file:
        file.write('{"id": "r08", "redo": true}\n')
    assert "r08" in folder() and folder.server.asked == ["r08"]


def test_facts_that_were_damaged_are_taken_from_a_file(folder):
    """They stand in the first line of landed.jsonl alone; remembered samples must not leave the folder without."""
    folder()
    manifest = (folder.output / "manifest.json").read_bytes()
    cut_short(folder)
    journal = folder.output / "landed.jsonl"
    journal.write_bytes(b"!" + journal.read_bytes()[1:])
    assert "r07" in folder() and folder.server.asked == []
    assert (folder.output / "manifest.json").read_bytes() == manifest
    cut_short(folder)
    assert folder() == []


def test_a_file_that_is_gone_again_is_not_remembered(tmp_path, monkeypatch):
    """04 --follow may release and remove one that 03, which begins again, has just looked at."""
    monkeypatch.setattr(restart, "REMEMBER", 1)
    placed = restart.Placed(tmp_path, 1)
    placed.add(SimpleNamespace(id="r07", tokens=7, prompt_len=3), "sha256:0", tmp_path / "gone")
    placed.flush()
    assert not placed.path.exists()


def test_other_responses_or_other_limits_are_read_again(folder):
    folder("--limit", 22)
    assert folder("--limit", 22) == []
    opened = folder("--limit", 24)
    assert opened.count("responses") == 1 and sorted(folder.server.asked) == ["r22", "r23"]
    part = folder.data / "part-00000.jsonl"
    os.utime(part)
    cut_short(folder)
    assert folder("--limit", 24) == ["responses"]
    part.write_text(part.read_text().replace("[4, 5, 6, 7]", "[5, 5, 6, 7]"))  # of a folder without hashes of its parts
    cut_short(folder)
    assert "responses" in folder("--limit", 24)
    manifest = json.loads((folder.data / "manifest.json").read_text())
    (folder.data / "manifest.json").write_text(json.dumps(manifest | {"files": {part.name: "0" * 64}}))
    folder("--limit", 24)
    assert "not the file that 01_generate.py finished with" in folder.said


def test_responses_that_are_just_being_written_are_not_remembered(folder, monkeypatch):
    monkeypatch.setattr(file_stat, "SETTLED_NS", 3600 * 10 ** 9)
    folder()
    assert "samples.npz" not in os.listdir(folder.output)


def encrypted(data: bytes) -> bytes:
    """A zip file whose first entry says that it needs a password: what one flipped bit can make of it."""
    at = data.index(b"PK\1\2") + 8
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]


@pytest.mark.parametrize("name, harm", [("samples.npz", lambda data: data[:-30]), ("samples.npz", lambda data: b""),
                                        ("samples.npz", encrypted),
                                        ("samples.npz", lambda data: data[:900] + bytes([data[900] ^ 4]) + data[901:]),
                                        ("placed.bin", lambda data: data[:-7]),
                                        ("placed.bin", lambda data: data[:5] + bytes(9) + data[14:]), ("placed.bin", lambda data: b"")])
def test_what_is_remembered_may_be_damaged(folder, name, harm):
    folder()
    cut_short(folder)
    path, index = folder.output / name, (folder.output / "index.jsonl").read_bytes()
    path.write_bytes(harm(path.read_bytes()))
    folder()
    assert "in place 24 " in folder.said and (folder.output / "index.jsonl").read_bytes() == index
    cut_short(folder)
    assert folder() == []


def test_plan_is_written_again_where_it_is_another(folder):
    folder()
    plan = (folder.output / "plan.jsonl").read_bytes()
    cut_short(folder)
    (folder.output / "plan.jsonl").write_bytes(plan[:-40])
    folder()
    assert (folder.output / "plan.jsonl").read_bytes() == plan


# ---- 04 ----
def table_of(folder: Path, count: int, seed=0, prefix="s", loss_from=None):
    """A table of samples, and the same as a list; their masses lie in one file."""
    rng, path = np.random.default_rng(seed), folder / f"{prefix}.masses"
    builder, samples, mass = Builder(folder / prefix), [], bytearray(b"head")
    for i in sorted(range(count), key=lambda i: f"{prefix}{i}"):
        tokens, start = int(rng.integers(20, 90)), int(rng.integers(1, 15))
        own = rng.random(tokens - (loss_from or start), np.float32)
        builder.add(f"{prefix}{i}", tokens, start, loss_from or start, bool(i % 3), path, len(mass))
        mass += own.tobytes()
        samples.append(Sample(f"{prefix}{i}", sample_path(folder / prefix, f"{prefix}{i}"), tokens, start, own, bool(i % 3),
                              loss_from=loss_from or start))
    path.write_bytes(mass)
    return builder.table(), samples


def same(left: Sample, right: Sample) -> bool:
    mine, theirs = ({**vars(sample), "mass": np.asarray(sample.mass).tolist()} for sample in (left, right))
    return mine == theirs


def all_same(table, samples) -> bool:
    return len(table) == len(samples) and all(map(same, table, samples))


@pytest.mark.parametrize("loss_from", [None, 1])
def test_a_table_gives_the_samples_that_it_was_made_of(tmp_path, loss_from):
    table, samples = table_of(tmp_path, 40, loss_from=loss_from)
    assert all_same(table, samples) and same(table[-1], samples[-1]) and all_same(table[3:9], samples[3:9])
    assert all_same(table.of_response(), [sample.of_response() for sample in samples])
    for name in ("id", "tokens", "start", "truncated", "weight", "loss_from"):
        assert list(batches.each(table, name)) == batches.each(samples, name), name
    with pytest.raises(IndexError):
        table[40]
    own = Builder(tmp_path)  # of a plan: no mass is known yet
    own.add("a", 20, 5, 5, False)
    assert vars(own.table()[0]) == vars(Sample("a", sample_path(tmp_path, "a"), 20, 5, None))
    mass = np.zeros(5, np.float32)
    mass[1:4] = table[7].mass[2:5]  # as collate takes it
    assert mass[1:4].tolist() == samples[7].mass[2:5].tolist()
    with pytest.raises(OSError, match="ends early"):
        np.asarray(StoredMass(tmp_path / "s.masses", 0, 1 << 30))
    with pytest.raises(FileNotFoundError):
        np.asarray(StoredMass(tmp_path / "none", 0, 4))


def test_splits_and_plans_of_a_table_are_those_of_the_list(tmp_path):
    table, samples = table_of(tmp_path, 300)
    shuffled = list(range(300))
    random.Random(1).shuffle(shuffled)
    for ratio in (0.1, 0):
        for order in (None, shuffled):
            one, two = (table, samples) if order is None else (table.take(order), [samples[i] for i in order])
            assert all(map(all_same, split_samples(one, ratio, 3), split_samples(two, ratio, 3)))
    for epoch in range(3):
        assert plan_epoch(table, 256, 2, 5, epoch) == plan_epoch(samples, 256, 2, 5, epoch)
    assert plan_epoch(table, 256, 2, 5, 0, shuffle=False) == plan_epoch(samples, 256, 2, 5, 0, shuffle=False)
    heavy = table.weighted(2.25)
    assert plan_epoch(heavy, 256, 2, 5, 1) == plan_epoch([SimpleNamespace(tokens=s.tokens, weight=2.25) for s in samples], 256, 2, 5, 1)
    order = list(range(300))
    random.Random("5:0").shuffle(order)  # as it was when it was a list: plans of runs that were begun stay theirs
    assert seen_in_epoch([1.0] * 300, 5, 0) == list(range(300))
    assert sorted(i for step in plan_epoch(table, 256, 2, 5, 0) for indices in step for i in indices) == list(range(300))
    first = batches.pack([s.tokens for s in samples], order, 256)
    random.Random("5:0:bins").shuffle(first)
    assert [indices for step in plan_epoch(table, 256, 2, 5, 0) for indices in step] == first


def test_a_schedule_is_the_list_of_its_steps(tmp_path):
    table, _ = table_of(tmp_path, 100)
    args = SimpleNamespace(order="shuffle", grad_accum=3, epochs=3, batch_tokens=200, seed=0, max_steps=None, data_weight=None)
    schedule, ends = plan_epochs(args, table, SimpleNamespace(world=1))
    wanted = [(epoch, bins) for epoch in range(3) for bins in plan_epoch(table, 200, 3, 0, epoch)]
    assert schedule == wanted and len(schedule) == ends[-1] == len(wanted) and isinstance(schedule, Schedule)
    assert [schedule[i] for i in range(-3, 3)] == [wanted[i] for i in range(-3, 3)]
    for part in (slice(5, None), slice(None, 7), slice(4, 9), slice(len(wanted), None), slice(2, -1)):
        assert schedule[part] == wanted[part] and schedule[part][1:] == wanted[part][1:], part
    with pytest.raises(IndexError):
        schedule[len(wanted)]


def test_a_long_journal_is_read_whole_and_its_torn_line_later(tmp_path):
    rows = [{"id": f"s{i}", "checksum": 500 * "0"} for i in range(20_000)]
    path = tmp_path / "landed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"id": "s')
    tail = journal.Tail(path)
    assert list(tail.new_rows()) == rows and list(tail.new_rows()) == []
    with open(path, "a") as file:
        file.write('9"}\n\n')
    assert list(tail.new_rows()) == [{"id": "s9"}] and list(tail.new_rows()) == [] and list(journal.Tail(tmp_path / "none").new_rows()) == []


def test_samples_of_several_folders_once(tmp_path):
    """An id in two folders is a sample of each, under the folder's number; the rest keep their names."""
    one, listed = table_of(tmp_path, 30, seed=1, prefix="a")
    two, other = table_of(tmp_path, 20, seed=2, prefix="b")
    samples, repeated = once([one, two.weighted(2.0)], None, 1)
    for sample in other:
        sample.weight = 2.0
    assert all_same(samples, listed + other) and not repeated
    own = Builder(tmp_path / "c")
    for sample in [*listed[:3], other[5]]:
        own.add(sample.id, sample.tokens, sample.start + 1, sample.start + 1, False, tmp_path / "c.masses", 0)
    samples, repeated = once([one, own.table()], two, 1)  # other prompts: other samples, also than what is held out
    names = [sample.id for sample in listed[:3]]
    assert sorted(samples.ids()) == sorted([*(s.id for s in listed[3:]), *(f"{n}/{name}" for n in (1, 2) for name in names), other[5].id])
    assert {sample.path.parents[1].name for sample in samples if sample.id.startswith("2/")} == {"c"} and not repeated
    assert len(joined([one, two, one])) == 80


def test_an_index_is_read_where_it_is_asked_for(tmp_path):
    rows = [{"id": f"s{i}", "tokens": i * 7919 ** (i % 3)} for i in range(2500)]
    path = tmp_path / "index.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = read_index(tmp_path, sha256_file(path))
    assert list(index) == rows and len(index) == 2500 and index[-1] == rows[-1] and index[256:512] == rows[256:512] and index[2500:] == []
    (tmp_path / "next").write_text("other\n")
    os.replace(tmp_path / "next", path)  # as 03 puts a later one in its place
    assert index[7] == rows[7]
    os.replace(path, tmp_path / "gone")
    for sha in ("0" * 64, sha256_file(tmp_path / "gone")):
        with pytest.raises(UserError, match="index.jsonl: missing, or not the one"):
            read_index(tmp_path, sha)


@pytest.mark.slow
def test_the_bench_makes_a_folder_that_03_and_04_take(tmp_path):
    """scripts/bench_million.py, of 300 samples."""
    command = [sys.executable, ROOT / "scripts/bench_million.py", "--output-dir", tmp_path / "m", "--samples", 300, "--make", "--restart", "--train",
               "--epochs", 2]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "in place 300 " in done.stdout and "step 6/" in done.stdout, done.stdout + done.stderr
