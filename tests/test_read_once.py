"""04 reads what it checks once: the second run on the same data opens no sample before its first step, and never trusts what is stale."""
import contextlib
import io
import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import load_script
from train_reference import write_learnable_run, write_mapping
from eagle3 import check_records, checked, file_stat, trainer
from eagle3.processes import Process
from eagle3.stage import UserError
from eagle3.states import StateFile, sample_path

train = load_script("04_train")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    root = write_learnable_run(tmp_path_factory.mktemp("once"), {"hidden_states": {"r": (40, 40)}})
    time.sleep(file_stat.SETTLED_NS / 1e9)  # what was written just now could change again without a newer time
    return root


@pytest.fixture
def data(run_folder, tmp_path, monkeypatch) -> Path:
    """The folder of states, nothing of it checked yet; no picture is drawn."""
    monkeypatch.setattr(train, "plot", lambda rows, path: None)
    shutil.rmtree(run_folder / "hidden_states/checked", ignore_errors=True)
    return run_folder / "hidden_states"


@pytest.fixture
def copied(data, tmp_path, monkeypatch) -> Path:
    """A copy of it, whose files count as settled at once."""
    monkeypatch.setattr(file_stat, "SETTLED_NS", 0)
    return Path(shutil.copytree(data, tmp_path / "hidden_states"))


@pytest.fixture
def opened(monkeypatch) -> Counter:
    """{id: times} of the samples' files that are opened, and None: bytes read of them, until the first step."""
    seen, running = Counter(), []
    init, read, update = StateFile.__init__, StateFile.read_bytes_into, trainer.Trainer.update

    def noted(self, path):
        init(self, path)
        if not running:
            seen[path.stem] += 1

    def counted(self, view, offset):
        if not running:
            seen[None] += len(view)
        return read(self, view, offset)

    def first(self, *args):
        running.append(True)
        return update(self, *args)

    monkeypatch.setattr(StateFile, "__init__", noted)
    monkeypatch.setattr(StateFile, "read_bytes_into", counted)
    monkeypatch.setattr(trainer.Trainer, "update", first)
    seen.again = lambda: (seen.clear(), running.clear())
    return seen


def trained(root: Path, data: Path, output: Path, *more, val_ratio=0.1) -> str:
    """Train in this process; what was logged."""
    argv = ["--verifier-path", root / "target", "--data-dir", data, "--vocab-mapping-dir", root / "vocab_mapping",
            "--output-dir", output, "--epochs", 1, "--lr", 1e-3, "--max-seq-len", 64, "--batch-tokens", 256,
            "--num-workers", 1, "--max-steps", 2, "--val-ratio", val_ratio, *more]
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main(list(map(str, argv)))
    return logged.getvalue()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}


def test_the_second_run_reads_no_byte_of_a_sample_before_its_first_step(run_folder, data, tmp_path, opened):
    said = trained(run_folder, data, tmp_path / "first")
    assert f"check {data} | 0 samples known from an earlier check, 40 read" in said
    names = {row["id"] for row in map(json.loads, (data / "index.jsonl").read_text().splitlines())}
    assert opened.keys() - {None} == names and opened[None] > 40 * 40 * 32 * 4 * 4
    opened.again()
    said = trained(run_folder, data, tmp_path / "second", "--lr", 2e-3)
    assert not opened and "40 samples known from an earlier check, 0 read (0.000 GB)" in said
    opened.again()
    trained(run_folder, data, tmp_path / "third")
    assert not opened and files(tmp_path / "third") == files(tmp_path / "first")
    assert not (tmp_path / "first/checked").exists()
    opened.again()
    trained(run_folder, data, tmp_path / "all", "--loss-on", "all")  # the prompts' tokens have no mass yet
    assert opened.keys() - {None} == names
    opened.again()
    root = tmp_path / "other"
    root.mkdir()
    os.symlink(run_folder / "target", root / "target")
    write_mapping(root / "vocab_mapping", np.arange(50), 97)
    trained(root, data, tmp_path / "map")  # nor is what lies inside another map known
    assert opened.keys() - {None} == names


def test_a_look_at_the_folder_that_a_kill_cut_short_leaves_nothing_for_good(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(check_records, "all_ranks", killed)
    with pytest.raises(KeyboardInterrupt):
        check_records.Records(tmp_path / "checked", tmp_path / "own", Process(0, 1, None, None))
    [left] = (tmp_path / "checked").iterdir()
    check_records.chunk_names(tmp_path / "checked")
    assert left.exists()  # another process's, perhaps
    os.utime(left, (0, 0))
    check_records.chunk_names(tmp_path / "checked")
    assert not left.exists()


def restore_times(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def rewritten(path: Path) -> None:
    """A byte of the states is another; size, inode and the time of change are those of before."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(-2000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-2000, os.SEEK_END)
        file.write(bytes([byte[0] ^ 0xFF]))
    restore_times(path, before)


def replaced(path: Path) -> None:
    """By a copy with the same times."""
    before = path.stat()
    shutil.copy2(path, f"{path}.new")
    os.replace(f"{path}.new", path)
    restore_times(path, before)


CHANGES = {"touched": os.utime, "rewritten": rewritten, "replaced": replaced}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_touched_is_read_again_and_no_other(run_folder, copied, tmp_path, opened, change, monkeypatch):
    trained(run_folder, copied, tmp_path / "first")
    path = sample_path(copied, "r7")
    before = path.stat()
    CHANGES[change](path)
    assert path.stat().st_size == before.st_size and (change == "touched" or path.stat().st_mtime_ns == before.st_mtime_ns)
    opened.again()
    monkeypatch.setattr("eagle3.checked.MAX_BAD", 0.1)
    said = trained(run_folder, copied, tmp_path / "second")
    assert opened.keys() - {None} == {"r7"} and "39 samples known from an earlier check, 1 read" in said
    assert (f"skipped {path} | checksum" in said) == (change == "rewritten")
    if change == "rewritten":  # what is bad is looked at again: the disk may have been mended
        opened.again()
        trained(run_folder, copied, tmp_path / "third")
        assert opened.keys() - {None} == {"r7"}
    else:
        assert files(tmp_path / "second") == files(tmp_path / "first")


def test_a_run_that_has_begun_without_a_bad_sample_goes_on_without_it(run_folder, copied, tmp_path, opened, monkeypatch):
    monkeypatch.setattr("eagle3.checked.MAX_BAD", 0.1)
    rewritten(sample_path(copied, "r7"))
    trained(run_folder, copied, tmp_path / "o", "--save-every", 1)
    (tmp_path / "o/manifest.json").unlink()
    opened.again()
    assert "0 read" in trained(run_folder, copied, tmp_path / "o", "--save-every", 1) and not opened


def test_a_missing_file_and_another_manifest(run_folder, copied, tmp_path, opened, monkeypatch):
    monkeypatch.setattr("eagle3.checked.MAX_BAD", 0.1)
    trained(run_folder, copied, tmp_path / "first")
    sample_path(copied, "r7").unlink()
    said = trained(run_folder, copied, tmp_path / "second")
    assert f"skipped {sample_path(copied, 'r7')} | missing" in said
    facts = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(facts | {"note": 1}))
    opened.again()
    trained(run_folder, copied, tmp_path / "third")
    assert len(opened.keys() - {None}) == 39


def test_a_thread_that_checks_computes_alone(run_folder, copied, tmp_path, monkeypatch):
    """As torch comes, each of them would take all cores: runs side by side checked at a thirtieth of the speed."""
    check, seen, before = checked.check_sample, [], torch.get_num_threads()
    monkeypatch.setattr(checked, "check_sample", lambda *args: (seen.append(torch.get_num_threads()), check(*args))[1])
    try:
        torch.set_num_threads(3)
        trained(run_folder, copied, tmp_path / "o")
        assert seen == [1] * 40 and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_was_written_as_it_was_checked_is_not_trusted(run_folder, copied, tmp_path, opened, monkeypatch):
    """Within the grain of the clock it could have changed again, under the same time."""
    monkeypatch.setattr(file_stat, "SETTLED_NS", 3600 * 10 ** 9)
    trained(run_folder, copied, tmp_path / "first")
    opened.again()
    assert "0 samples known from an earlier check, 40 read" in trained(run_folder, copied, tmp_path / "second")
    monkeypatch.setattr(file_stat, "SETTLED_NS", 0)
    stat = file_stat.stat_of

    def changing(path):
        if path.stem == "r7":
            os.utime(path)  # someone is at work on it
        return stat(path)

    monkeypatch.setattr("eagle3.checked.stat_of", changing)
    trained(run_folder, copied, tmp_path / "third")
    monkeypatch.setattr("eagle3.checked.stat_of", stat)
    opened.again()
    trained(run_folder, copied, tmp_path / "fourth")
    assert opened.keys() - {None} == {"r7"}


def test_where_the_data_cannot_be_written_to_the_output_keeps_what_is_found(run_folder, copied, tmp_path, opened):
    (copied / "checked").write_text("")
    said = trained(run_folder, copied, tmp_path / "o", "--save-every", 1)
    assert f"{copied}: Not a directory, so what is found in its samples is kept in {tmp_path}/o/checked, for this run alone" in said
    assert len(list((tmp_path / "o/checked").glob("*/00000000-*.safetensors"))) == 1
    (tmp_path / "o/manifest.json").unlink()
    opened.again()
    assert "40 samples known" in trained(run_folder, copied, tmp_path / "o", "--save-every", 1) and not opened


def test_a_full_disk_beside_the_data_goes_on_in_the_output(run_folder, copied, tmp_path, opened, monkeypatch):
    write = check_records.write_atomic

    def full(path, data):
        if copied in path.parents:
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(check_records, "write_atomic", full)
    said = trained(run_folder, copied, tmp_path / "o")
    assert f"cannot be written to (No space left on device): going on in {tmp_path}/o/checked" in said
    assert list((tmp_path / "o/checked").glob("*/00000000-*.safetensors"))


def test_runs_side_by_side_write_the_same_and_leave_nothing_half(tmp_path):
    import torch
    record = {"id": "a", "stat": [1, 2, 3, 4], "problem": None, "tokens": 5, "spans": [[2, 5]], "agreed": 1, "predicted": 3}
    paths = {check_records.write_chunk(tmp_path, 256, torch.arange(3.), [record]) for _ in range(2)}
    other = check_records.write_chunk(tmp_path, 256, torch.arange(3.) + 1, [record])
    assert len(paths) == 1 and other not in paths and sorted(tmp_path.iterdir()) == sorted([*paths, other])
    mass, records = check_records.read_chunk(other)
    assert records == [record] and mass.tolist() == [1, 2, 3]
    (tmp_path / ".half.tmp").touch()
    os.utime(tmp_path / ".half.tmp", (0, 0))
    (tmp_path / ".at-work.tmp").touch()
    assert len(check_records.chunk_names(tmp_path)) == 2
    assert [path.name for path in tmp_path.glob("*.tmp")] == [".at-work.tmp"]


def test_an_evaluation_of_some_ids_takes_no_others(run_folder, copied, tmp_path, opened):
    """--evaluate --ids: its few rows stand in other places than those of the whole folder."""
    trained(run_folder, copied, tmp_path / "o")
    (tmp_path / "ids.json").write_text(json.dumps({"ids": ["r1", "r2", "r3"]}))
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main(list(map(str, ["--evaluate", tmp_path / "o/best", "--verifier-path", run_folder / "target", "--data-dir", copied,
                                  "--ids", tmp_path / "ids.json", "--num-workers", 1])))
    assert "3 read" in logged.getvalue() and "3 samples" in logged.getvalue()


def test_too_many_bad_ones_are_all_looked_at_again_once_they_are_mended(run_folder, copied, tmp_path, opened):
    kept = {name: sample_path(copied, name).read_bytes() for name in ("r7", "r8")}
    for name in kept:
        rewritten(sample_path(copied, name))
    with pytest.raises(UserError, match="2 of 40 samples are bad"):
        trained(run_folder, copied, tmp_path / "o")
    for name, bytes_before in kept.items():
        sample_path(copied, name).write_bytes(bytes_before)
    opened.again()
    assert "38 samples known from an earlier check, 2 read" in trained(run_folder, copied, tmp_path / "o")
