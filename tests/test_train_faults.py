"""04 where disks, ranks and schedulers fail it: nothing that was written is lost, and one line says what to do."""
import contextlib
import errno
import gc
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import preloaded
from conftest import ROOT, free_port, load_script
from train_reference import random_sample, write_hidden_states, write_index, write_mapping, write_sample, write_target
from eagle3 import batches, checked, checkpoints, file_stat, loader, patience
from eagle3.batches import Sample
from eagle3.checkpoints import make_best, repair, restore_best
from eagle3.schedule import plan_epochs
from eagle3.stage import UserError
from eagle3.states import StateFile, sample_path

train = load_script("04_train")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A run folder with target/, vocab_mapping/ and hidden_states/: 40 samples, hidden 16."""
    root = tmp_path_factory.mktemp("toy")
    target = write_target(root / "target", vocab=33, hidden=16, heads=2, head_dim=8, intermediate=16)
    head = load_file(target / "model.safetensors")["language_model.lm_head.weight"]
    rng = np.random.default_rng(5)
    write_mapping(root / "vocab_mapping", np.sort(rng.choice(33, 20, replace=False)), 33)
    write_hidden_states(root / "hidden_states", {f"s{i:02d}": random_sample(int(rng.integers(16, 40)), "tail", head, rng)
                                                 for i in range(40)})
    return root


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No picture is drawn, no pause is made, and sums run in one thread, as in ENV."""
    monkeypatch.setattr(train, "plot", lambda rows, path: None)
    monkeypatch.setattr(patience, "PAUSES", (0, 0, 0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def argv(toy: Path, output: Path, *more, data=None) -> list[str]:
    return list(map(str, ["--verifier-path", toy / "target", "--data-dir", data or toy / "hidden_states", "--vocab-mapping-dir",
                          toy / "vocab_mapping", "--output-dir", output, "--epochs", 2, "--lr", 1e-3, "--batch-tokens", 128,
                          "--max-seq-len", 64, "--num-workers", 1, "--log-every", 3, "--save-every", 4, "--keep-checkpoints", 9,
                          "--noise-std", 0.05, *more]))


def trained(toy: Path, output: Path, *more, data=None) -> list[str]:
    """Train in this process; the lines that were logged."""
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main(argv(toy, output, *more, data=data))
    return logged.getvalue().splitlines()


def ended(toy: Path, output: Path, *more, data=None) -> tuple[int, list[str]]:
    """(exit code, lines) of a run that ends early."""
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        try:
            train.main(argv(toy, output, *more, data=data))
            code = 0
        except SystemExit as end:
            code = end.code
    gc.collect()  # the lock that a process loses as it ends
    return code, logged.getvalue().splitlines()


@contextlib.contextmanager
def refused(match: str):
    """A UserError of one line in here, and the lock is free again."""
    with pytest.raises(UserError, match=match) as caught:
        yield
    assert len(str(caught.value).splitlines()) == 1
    del caught
    gc.collect()  # the lock that a process loses as it ends


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != ".lock" and not path.relative_to(folder).parts[0].endswith(".damaged")}


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps(output: Path) -> list[int]:
    return [step for step, _ in checkpoints.checkpoints(output)]


@pytest.fixture(scope="module")
def unbroken(toy, tmp_path_factory) -> Path:
    """The output folder of an undisturbed run."""
    output = tmp_path_factory.mktemp("unbroken") / "output"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "plot", lambda rows, path: None)
        torch.set_num_threads(1)
        trained(toy, output)
    return output


def unfinished(unbroken: Path, output: Path) -> Path:
    """A copy of it, killed before its manifest was written."""
    shutil.copytree(unbroken, output)
    (output / "manifest.json").unlink()
    return output


# ------------------------------------------------------------------ what is not finite is not saved
def plant(monkeypatch, step: int, spoil) -> None:
    """spoil(trainer) after the update of `step`, whose loss is finite."""
    update = train.Trainer.update

    def spoils(self, *args):
        sums = update(self, *args)
        if self.step == step:
            spoil(self)
        return sums

    monkeypatch.setattr(train.Trainer, "update", spoils)


SPOILT = {
    "weights": lambda trainer: trainer.draft.master.flat[7:8].fill_(float("inf")),  # the weights that compute are fine yet
    "second": lambda trainer: trainer.tensors()["second"][7:8].fill_(float("inf")),  # that weight stands still for ever
    "first": lambda trainer: trainer.tensors()["first"][7:8].fill_(float("nan")),
    "gradient norm": lambda trainer: trainer.grad_norm.fill_(float("inf")),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_not_finite_is_not_saved(toy, unbroken, tmp_path, monkeypatch, what):
    plant(monkeypatch, 8, SPOILT[what])
    code, lines = ended(toy, tmp_path / "o", "--val-ratio", 0)  # so no validation sees it
    assert code == 1 and f"not finite: {what}, after step 8: stopped, checkpoint-4 is untouched. Lower --lr" in lines[-1]
    assert steps(tmp_path / "o") == [4] and not (tmp_path / "o/manifest.json").exists()
    assert json.loads((tmp_path / "o/best/eagle3.json").read_text())["step"] == 4


def test_weights_that_the_exported_dtype_cannot_hold_are_not_saved(toy, tmp_path, monkeypatch):
    plant(monkeypatch, 4, lambda trainer: trainer.draft.master.flat[7:8].fill_(1e5))
    code, lines = ended(toy, tmp_path / "o", "--export-dtype", "float16", "--max-steps", 4)
    assert code == 1 and "weights as float16 (--export-dtype), after step 4: stopped, there is no checkpoint yet" in lines[-1]
    assert not steps(tmp_path / "o")


# ------------------------------------------------------------------ checkpoints that are damaged
def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


STATE = "training_state/state.safetensors"
DAMAGE = {
    "a flipped byte of the state": (lambda folder: flip(folder / STATE), f"{STATE} is not what was written"),
    "a truncated state": (lambda folder: truncate(folder / STATE), f"{STATE} is not what was written"),
    "no state": (lambda folder: (folder / STATE).unlink(), f"{STATE} is missing"),
    "a flipped byte of the weights": (lambda folder: flip(folder / "model.safetensors"), "model.safetensors is not what was written"),
    "a flipped digit of the step": (lambda folder: flip(folder / "training_state/state.json", 9), "training_state/state.json is not what"),
    "an empty state.json": (lambda folder: (folder / "training_state/state.json").write_text(""), "training_state/state.json is not what"),
    "truncated sums": (lambda folder: truncate(folder / "training_state/SHA256SUMS"), "SHA256SUMS does not name"),
    "empty sums": (lambda folder: (folder / "training_state/SHA256SUMS").write_text(""), "SHA256SUMS does not name"),
    "an empty folder": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "No such file"),
    "its config": (lambda folder: (folder / "config.json").write_text("{}"), "config.json is not what was written"),
    # written before there were sums
    "an old one, truncated": (lambda folder: ((folder / "training_state/SHA256SUMS").unlink(), truncate(folder / STATE)), "incomplete"),
    "an old one, of another drafter": (lambda folder: ((folder / "training_state/SHA256SUMS").unlink(), save_file(
        {"master": torch.zeros(3)}, folder / STATE)), f"{STATE} has no master of this drafter"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_gone_on_from(toy, unbroken, tmp_path, what):
    damage, said = DAMAGE[what]
    output = unfinished(unbroken, tmp_path / "o")
    *_, before, newest = steps(output)
    damage(output / f"checkpoint-{newest}")
    lines = trained(toy, output)
    [line] = [line for line in lines if " is damaged (" in line]
    assert f"{output}/checkpoint-{newest} is damaged (" in line and said in line and line.endswith(f"{output}/checkpoint-{before}")
    assert any(line.endswith(f"resume {output}/checkpoint-{before}") for line in lines)
    assert contents(output) == contents(unbroken) and (output / f"checkpoint-{newest}.damaged").is_dir()


def test_two_damaged_ones_and_then_none_that_is_good(toy, unbroken, tmp_path):
    output = unfinished(unbroken, tmp_path / "o")
    oldest, *later = steps(output)
    for step in later:
        flip(output / f"checkpoint-{step}" / STATE)
    shutil.copytree(output, tmp_path / "all")
    assert any(line.endswith(f"resume {output}/checkpoint-{oldest}") for line in trained(toy, output))
    assert contents(output) == contents(unbroken)
    flip(tmp_path / "all" / f"checkpoint-{oldest}" / STATE)
    before = contents(tmp_path / "all")
    with refused(r"no older one is there\. Put it back from a copy, or remove it"):
        trained(toy, tmp_path / "all")
    assert contents(tmp_path / "all") == before


def test_checkpoints_without_sums_load(toy, unbroken, tmp_path):
    """They were written before there were any; and `sha256sum` reads those that there are."""
    for step in steps(unbroken):
        subprocess.run(["sha256sum", "--quiet", "-c", "training_state/SHA256SUMS"], cwd=unbroken / f"checkpoint-{step}", check=True)
    output = unfinished(unbroken, tmp_path / "o")
    for path in output.glob("*/training_state/SHA256SUMS"):
        path.unlink()
    assert any(line.endswith(f"resume {output}/checkpoint-{steps(output)[-1]}") for line in trained(toy, output))


def test_a_damaged_line_of_metrics_costs_its_row(toy, unbroken, tmp_path):
    output = unfinished(unbroken, tmp_path / "o")
    lines = (output / "metrics.jsonl").read_text().splitlines()
    (output / "metrics.jsonl").write_bytes("\n".join([lines[0], lines[1][:40] + "\x00", '{"step": "x"}', "[1]", *lines[2:], lines[-1][:30]]).encode())
    said = trained(toy, output)
    assert sum("metrics.jsonl: a damaged line is left out" in line for line in said) == 3
    assert (output / "metrics.jsonl").read_text().splitlines() == [lines[0], *lines[2:]]


@pytest.mark.parametrize("at", [-3, 200, 20])
def test_what_was_found_in_samples_is_found_again_where_it_is_damaged(toy, unbroken, tmp_path, at, monkeypatch):
    """A byte of the masses, of the records, of the header."""
    output, data = unfinished(unbroken, tmp_path / "o"), shutil.copytree(toy / "hidden_states", tmp_path / "data")
    shutil.rmtree(output / f"checkpoint-{steps(output)[-1]}")
    shutil.rmtree(data / "checked", ignore_errors=True)
    monkeypatch.setattr(file_stat, "SETTLED_NS", 0)
    trained(toy, tmp_path / "other", "--max-steps", 1, data=data)
    [found] = data.glob("checked/*/*.safetensors")
    flip(found, at)
    said = trained(toy, output, data=data)
    assert any(f"{found}: damaged" in line for line in said) and any("0 samples known" in line for line in said)
    assert contents(output) == contents(unbroken)


def exported(folder: Path, step: int, weights: bytes = b"w") -> Path:
    folder.mkdir(parents=True)
    (folder / "eagle3.json").write_text(json.dumps({"step": step}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_best_is_made_again_where_it_is_another_or_damaged(tmp_path):
    exported(tmp_path / "checkpoint-4", 4, b"four"), exported(tmp_path / "best", 8, b"eight")
    assert restore_best(tmp_path, {"step": 4, "accept_length": 2.0}) == {"step": 4, "accept_length": 2.0}
    assert (tmp_path / "best/model.safetensors").read_bytes() == b"four"
    (tmp_path / "best/model.safetensors").unlink()
    (tmp_path / "best/model.safetensors").write_bytes(b"fovr")
    make_best(tmp_path, 4)
    assert (tmp_path / "best/model.safetensors").read_bytes() == b"four"
    # best was step 2's, whose checkpoint is gone; step 8, damaged now, was better: the next evaluations decide anew
    exported(tmp_path / "later/best", 8)
    assert restore_best(tmp_path / "later", {"step": 2, "accept_length": 1.5}) is None
    assert restore_best(tmp_path / "later", {"step": 8, "accept_length": 2.5}) == {"step": 8, "accept_length": 2.5}


# ------------------------------------------------------------------ what is the user's stays
def test_repair_touches_only_what_04_made(unbroken, toy, tmp_path):
    output = unfinished(unbroken, tmp_path / "o")
    theirs = ["notes.old", "best.backup", "my.tmp", "checkpoint-4.mine", "metrics.jsonl.old", "checkpoint-x.tmp"]
    for name in theirs[:3]:
        (output / name).write_text("mine")
    (output / "checkpoints.old").mkdir()
    (output / "checkpoints.old/a").write_text("mine")
    for name in theirs[3:]:
        (output / name).write_text("mine")
    kept = contents(output)
    (output / "checkpoint-99.tmp/training_state").mkdir(parents=True)
    (output / "best.tmp").mkdir()
    for name in ("metrics.jsonl.tmp", "val_ids.json.tmp", "training.tmp", "not-finite-3-rank1.json.tmp", f".{uuid.uuid4().hex}.seen"):
        (output / name).write_text("torn")
    repair(output)
    assert contents(output) == kept and not (output / "checkpoint-99.tmp").exists() and not (output / "best.tmp").exists()
    for name in ("best.old", "checkpoint-7.old", "checkpoint-9.tmp"):  # in a finished folder they are nobody's but the user's
        shutil.copytree(unbroken / "best", output / name)
    shutil.copy(unbroken / "manifest.json", output)
    before = contents(output)
    assert "complete already" in "".join(trained(toy, output)) and contents(output) == before


# ------------------------------------------------------------------ samples that the disk does not give
def fails(monkeypatch, which, times=10 ** 9, error=errno.EIO):
    """Reading the rows of the samples of which `which(id)` is true fails so often each; how often it was tried."""
    tried, read = Counter(), StateFile.read_into

    def reads(self, name, tensor, row=0):
        if which(self.path.stem):
            tried[self.path.stem] += 1
            if tried[self.path.stem] <= times:
                raise OSError(error, os.strerror(error))
        return read(self, name, tensor, row)

    monkeypatch.setattr(StateFile, "read_into", reads)
    return tried


def trained_on(unbroken: Path, toy: Path) -> list[str]:
    """Ids of the samples that are not for validation."""
    val = json.loads((unbroken / "val_ids.json").read_text())["ids"]
    return [f"s{i:02d}" for i in range(40) if f"s{i:02d}" not in val]


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_for_a_moment_changes_nothing(toy, unbroken, tmp_path, monkeypatch, error):
    name = trained_on(unbroken, toy)[5]
    fails(monkeypatch, name.__eq__, 3, error)
    lines = trained(toy, tmp_path / "o")
    assert sum(f"{name}.safetensors: {os.strerror(error)}; read again in 0 s" in line for line in lines) == 3
    assert contents(tmp_path / "o") == contents(unbroken)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOENT])
def test_a_sample_that_cannot_be_read_is_skipped_named_and_counted(toy, unbroken, tmp_path, monkeypatch, error):
    """Its rows are missing from the step's figures and add nothing to its gradient; resumed, the count goes on."""
    name = trained_on(unbroken, toy)[5]
    tried = fails(monkeypatch, name.__eq__, error=error)
    updates, update = [], train.Trainer.update

    def noted(self, given, turns, counts, lr):
        sums = update(self, given, turns, counts, lr)
        updates.append((sums.clone(), np.array(counts)))
        return sums

    monkeypatch.setattr(train.Trainer, "update", noted)
    lines = trained(toy, tmp_path / "o", "--log-every", 1)
    assert sum(f"skipped {sample_path(toy / 'hidden_states', name)} | {os.strerror(error)}" in line for line in lines) == 2
    assert tried[name] == (8 if error == errno.EIO else 2)  # in each of two epochs four times, or once: it will not come
    assert json.loads((tmp_path / "o/manifest.json").read_text())["counts"]["unread"] == 2
    last = steps(tmp_path / "o")[-1]
    assert json.loads((tmp_path / f"o/checkpoint-{last}/training_state/state.json").read_text())["unread"] == {name: 2}
    figures, whole = [row for row in rows(tmp_path / "o") if "loss_0" in row], []
    length = json.loads((StateFile(sample_path(toy / "hidden_states", name)).metadata)["prompt_len"])
    tokens = next(row["tokens"] for row in map(json.loads, (toy / "hidden_states/index.jsonl").read_text().splitlines()) if row["id"] == name)
    missing = np.array(Sample(name, Path(), tokens, length, None).counts(3))
    for row, (sums, counts) in zip(figures, updates, strict=True):
        left = [sums[k, 0].item() / (counts - missing)[k] for k in range(3)]
        whole.append(all(row[f"loss_{k}"] == pytest.approx(sums[k, 0].item() / counts[k], rel=1e-6) for k in range(3)))
        assert whole[-1] or [row[f"loss_{k}"] for k in range(3)] == pytest.approx(left, rel=1e-6)
    assert whole.count(False) == 2
    (tmp_path / "o/manifest.json").unlink()
    shutil.rmtree(tmp_path / f"o/checkpoint-{last}")  # killed before its last checkpoint: the second time was after the one before
    trained(toy, tmp_path / "o", "--log-every", 1)
    assert json.loads((tmp_path / "o/manifest.json").read_text())["counts"]["unread"] == 2


def test_masses_that_cannot_be_read_any_more_end_the_run_in_a_line(toy, tmp_path, monkeypatch):
    """The file of checked/ was cut short after it was read: its samples are as lost as if theirs were."""
    data, make = shutil.copytree(toy / "hidden_states", tmp_path / "data", ignore=shutil.ignore_patterns("checked")), train.make_drafter

    def cut(*args):
        for path in data.glob("checked/*/*.safetensors"):
            os.truncate(path, path.stat().st_size - 2000)
        return make(*args)

    monkeypatch.setattr(train, "make_drafter", cut)
    with refused(r"data/checked/\S+: not readable \(ends early\); 2 samples by now.*see to the disk, then run the same command again"):
        trained(toy, tmp_path / "o", data=data)
    monkeypatch.undo()
    monkeypatch.setattr(train, "plot", lambda rows, path: None)
    assert any(line.endswith("done: " + str(tmp_path / "o")) for line in trained(toy, tmp_path / "o", data=data))


def test_a_micro_batch_of_which_nothing_can_be_read(toy, unbroken, tmp_path, monkeypatch):
    """The step is made of the others; a step of nothing leaves the weights as they were (AdamW without moments)."""
    monkeypatch.setattr(loader, "MAX_BAD", 1)
    monkeypatch.setattr(loader, "UNREAD_IN_A_ROW", 100)
    names = set(trained_on(unbroken, toy))
    fails(monkeypatch, names.__contains__)
    lines = trained(toy, tmp_path / "none", "--max-steps", 1, "--export-dtype", "float32")
    monkeypatch.undo()
    monkeypatch.setattr(train, "plot", lambda rows, path: None)
    trained(toy, tmp_path / "lr0", "--max-steps", 1, "--lr", 0, "--export-dtype", "float32")
    none, still = (load_file(tmp_path / name / "best/model.safetensors") for name in ("none", "lr0"))
    assert all(torch.equal(none[name], still[name]) for name in none) and "skipped" in "".join(lines)


def test_too_many_that_cannot_be_read_end_the_run(toy, unbroken, tmp_path, monkeypatch):
    names = trained_on(unbroken, toy)
    with monkeypatch.context() as patch:
        fails(patch, {names[3], names[9]}.__contains__)
        with refused(r"Input/output error\); 2 samples by now.*see to the disk, then run the same command"):
            trained(toy, tmp_path / "o")
    with monkeypatch.context() as patch:
        patch.setattr(loader, "MAX_BAD", 1)
        tried = fails(patch, names.__contains__)
        with refused("8 samples by now, 8 in a row"):
            trained(toy, tmp_path / "p")
        assert len(tried) <= 10  # the disk is gone: it does not try them all
    trained(toy, tmp_path / "p")
    assert contents(tmp_path / "p") == contents(unbroken)


def test_a_validation_sample_that_cannot_be_read(toy, unbroken, tmp_path, monkeypatch):
    val = json.loads((unbroken / "val_ids.json").read_text())["ids"]
    with monkeypatch.context() as patch:
        fails(patch, val[1].__eq__)
        lines = trained(toy, tmp_path / "o", "--max-steps", 2)
    prediction = json.loads((tmp_path / "o/best/eagle3.json").read_text())["prediction"]
    assert sorted(prediction["samples"]) == sorted(set(val) - {val[1]}) and any(f"skipped {sample_path(toy / 'hidden_states', val[1])}" in line for line in lines)
    fails(monkeypatch, val.__contains__)
    monkeypatch.setattr(loader, "MAX_BAD", 1)
    with refused("none of the 4 validation samples could be read"):
        trained(toy, tmp_path / "p", "--max-steps", 2)


def test_a_disk_that_fails_while_the_data_is_checked(toy, unbroken, tmp_path, monkeypatch):
    """For a moment: nothing. For good: the sample is skipped; too many: the same folder looks at them again."""
    data = shutil.copytree(toy / "hidden_states", tmp_path / "data", ignore=shutil.ignore_patterns("checked"))
    read, left = StateFile.read_bytes_into, Counter()

    def reads(self, view, offset):
        if left[self.path.stem]:
            left[self.path.stem] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, view, offset)

    monkeypatch.setattr(StateFile, "read_bytes_into", reads)
    left.update({"s03": 3, "s07": 1})
    trained(toy, tmp_path / "o", data=data)
    assert contents(tmp_path / "o") == contents(unbroken)
    left.update({"s03": 4})
    monkeypatch.setattr(checked, "MAX_BAD", 0.03)
    trained(toy, tmp_path / "p", "--max-steps", 1, data=data)
    assert json.loads((tmp_path / "p/manifest.json").read_text())["counts"]["dropped"] == {"cannot be read": 1}
    monkeypatch.setattr(checked, "MAX_BAD", 0.01)
    left.update({"s03": 4})
    with refused(r"1 of 40 samples are bad \({'cannot be read': 1}.*See to the disk"):
        trained(toy, tmp_path / "q", data=data)
    trained(toy, tmp_path / "q", data=data)
    assert contents(tmp_path / "q") == contents(unbroken)


# ------------------------------------------------------------------ SIGTERM
def terminates(monkeypatch, step: int, times: int = 1) -> None:
    plant(monkeypatch, step, lambda trainer: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(times)])


@pytest.mark.parametrize("step", [1, 2, 5, 6, 8])
def test_sigterm_saves_and_the_same_command_ends_in_the_same_bytes(toy, unbroken, tmp_path, monkeypatch, step):
    """After the first step (logged), between log lines, at a log line, at a checkpoint that is due; a second SIGTERM is no news."""
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        terminates(patch, step, 1 + step % 2)
        code, lines = ended(toy, tmp_path / "o")
    assert code == 143 and lines[-1].endswith(f"terminated after step {step}: checkpoint-{step} is on the disk. The same command goes on from here")
    assert steps(tmp_path / "o")[-1] == step and not any(f"step {step}/" in line for line in lines)  # it did not stop to evaluate
    assert signal.getsignal(signal.SIGTERM) == before
    lines = trained(toy, tmp_path / "o")
    assert any(line.endswith(f"resume {tmp_path}/o/checkpoint-{step}") for line in lines)
    assert contents(tmp_path / "o") == contents(unbroken)


def test_sigterm_again_and_again(toy, unbroken, tmp_path, monkeypatch):
    for step in (1, 3, 4, 5, 9, 10):
        with monkeypatch.context() as patch:
            terminates(patch, step)
            code, _ = ended(toy, tmp_path / "o")
        assert code == 143 and len(steps(tmp_path / "o")) <= 4  # those that count, and this one
    trained(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)


def test_what_is_not_finite_is_not_saved_at_a_sigterm_either(toy, tmp_path, monkeypatch):
    def spoil(trainer):
        os.kill(os.getpid(), signal.SIGTERM)
        SPOILT["second"](trainer)

    plant(monkeypatch, 5, spoil)
    code, lines = ended(toy, tmp_path / "o")
    assert code == 1 and "checkpoint-4 is untouched" in lines[-1] and steps(tmp_path / "o") == [4]


# ------------------------------------------------------------------ several ranks
# A rank of 04 to which something happens: `what` is run with `trainer` (after the update of step STEP) and RANK
HAPPENS = f"""
import datetime, os, runpy, signal, sys, time
sys.path.insert(0, {str(ROOT / 'scripts')!r})
from eagle3 import checked, patience, processes, trainer as room
from eagle3.states import StateFile
RANK, what, before = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
sys.argv = sys.argv[3:]
patience.PAUSES = (0, 0, 0)
exec(before)
update = room.Trainer.update
def happens(trainer, *args):
    sums = update(trainer, *args)
    exec(what, dict(globals(), trainer=trainer, STEP=trainer.step))
    return sums
room.Trainer.update = happens
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# How long the collectives wait, from now on
SHORT = """
def wait_seconds(seconds):
    limit = datetime.timedelta(seconds=seconds)
    processes.ANSWER = limit
    processes.dist.distributed_c10d._set_pg_timeout(limit)
"""


def ranks(toy: Path, output: Path, *more, what="pass", before="pass") -> list[subprocess.Popen]:
    """Two ranks that torchrun did not start, so that nobody ends one because of the other."""
    shared = {**ENV, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [preloaded.popen([sys.executable, "-c", HAPPENS, what, before, str(ROOT / "04_train.py"), *argv(toy, output, *more)],
                            env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(2)]


def ends(processes: list[subprocess.Popen], timeout=120) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said)]


@pytest.fixture(scope="module")
def two(toy, tmp_path_factory) -> Path:
    """The output folder of two undisturbed ranks."""
    output = tmp_path_factory.mktemp("two") / "output"
    assert [code for code, *_ in ends(ranks(toy, output))] == [0, 0]
    return output


def test_ranks_leave_at_the_same_step(toy, two, tmp_path):
    """Only one of them gets the signal; both go, and two ranks go on to the same bytes."""
    done = ends(ranks(toy, tmp_path / "o", what="if RANK == 1 and STEP == 2: os.kill(os.getpid(), signal.SIGTERM)"))
    assert [code for code, *_ in done] == [143, 143], done
    [step] = steps(tmp_path / "o")
    assert step in (2, 3) and f"terminated after step {step}: checkpoint-{step} is on the disk" in done[0][1]
    assert [code for code, *_ in ends(ranks(toy, tmp_path / "o"))] == [0, 0]
    left, right = contents(tmp_path / "o"), contents(two)
    assert {name: left[name] for name in left if name != "training.png"} == {name: right[name] for name in right if name != "training.png"}


# What a rank says at Python's end, if it comes to that: whether the others' threads of gloo are still there, which abort it now and then
LEFT = "import atexit\natexit.register(lambda: print('left', processes.dist.is_initialized(), flush=True))\n"


def test_no_rank_leaves_python_with_gloos_threads(toy, two, tmp_path):
    """Not where all is done already (exit code -6 in one of ten runs), nor where something is not finite, nor at a Ctrl-C."""
    done = ends(ranks(toy, two, before=LEFT))
    assert [code for code, *_ in done] == [0, 0] and "complete already" in done[0][1], done
    spoil = "if STEP == 5: trainer.draft.master.flat[7:8].fill_(float('inf'))"
    spoilt = ends(ranks(toy, tmp_path / "o", before=LEFT, what=spoil))
    assert [code for code, *_ in spoilt] == [1, 1] and "after step 5: stopped, checkpoint-4 is untouched" in spoilt[0][1], spoilt
    interrupted = ends(ranks(toy, tmp_path / "p", before=LEFT + "signal.signal(signal.SIGINT, signal.default_int_handler)",
                             what="if RANK == 1 and STEP == 5: os.kill(os.getpid(), signal.SIGINT)"))
    assert [code for code, *_ in interrupted] == [1, 130], interrupted
    assert not any("left True" in out for _, out, _ in done + spoilt + interrupted)


@pytest.mark.parametrize("more", [True, False])
def test_another_number_of_ranks_goes_on_from_a_sigterm(toy, two, tmp_path, monkeypatch, more):
    """At a log line that is still to be written: its window is that of all ranks of before, however many there are now."""
    if more:
        terminates(monkeypatch, 3)
        assert ended(toy, tmp_path / "o", "--grad-accum", 2)[0] == 143
        done = ends(ranks(toy, tmp_path / "o"))
        assert [code for code, *_ in done] == [0, 0], done
    else:
        done = ends(ranks(toy, tmp_path / "o", what="if STEP == 2: os.kill(os.getpid(), signal.SIGTERM)"))  # heard a step later
        assert [code for code, *_ in done] == [143, 143] and steps(tmp_path / "o") == [3], done
        trained(toy, tmp_path / "o", "--grad-accum", 2)
    for left, right in zip(rows(tmp_path / "o"), rows(two), strict=True):
        assert {k: v or 0 for k, v in left.items()} == pytest.approx({k: v or 0 for k, v in right.items()}, rel=1e-3), left["step"]


def test_other_ranks_do_not_wait_for_the_disk(toy, two, tmp_path):
    """Rank 0 writes checkpoint-4 for seconds: both go on with their steps, to the same bytes."""
    before = ("from eagle3 import checkpoints\nsave = checkpoints.save_file\n"
              "def slowly(tensors, path, metadata=None):\n"
              "    time.sleep(1.5 * ('checkpoint-4.' in str(path)))\n    print('file', time.monotonic(), flush=True)\n"
              "    return save(tensors, path, metadata)\ncheckpoints.save_file = slowly")
    done = ends(ranks(toy, tmp_path / "o", before=before, what="print('step', STEP, time.monotonic(), flush=True)"))
    assert [code for code, *_ in done] == [0, 0], done
    written = [float(line.split()[1]) for line in done[0][1].splitlines() if line.startswith("file ")][1]  # the second one of checkpoint-4
    for _, out, _ in done:
        times = {int(line.split()[1]): float(line.split()[2]) for line in out.splitlines() if line.startswith("step ")}
        assert times[5] < written - 2, times
    left, right = contents(tmp_path / "o"), contents(two)
    assert {name: left[name] for name in left if name != "training.png"} == {name: right[name] for name in right if name != "training.png"}


def test_torchrun_passes_sigterm_on(toy, tmp_path):
    slow = HAPPENS.replace("sys.argv[1], sys.argv[2]", "'time.sleep(0.3)', 'pass'").replace("sys.argv = sys.argv[3:]", "sys.argv = sys.argv[1:]")
    (tmp_path / "slow.py").write_text(slow)
    process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()), tmp_path / "slow.py",
                                str(ROOT / "04_train.py"), *argv(toy, tmp_path / "o")], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    for line in process.stdout:
        said.append(line)
        if " step 1/" in line:
            process.send_signal(signal.SIGTERM)
            break
    said += process.communicate(timeout=60)[0].splitlines()
    [line] = [line for line in said if "terminated after step" in line]
    [step] = steps(tmp_path / "o")
    assert f"terminated after step {step}: checkpoint-{step} is on the disk" in line and step < 5, said


def test_a_rank_that_hangs_does_not_hold_the_others_for_hours(toy, tmp_path):
    """After so many minutes (here, once both are at work: seconds) the other one ends, with one line that says what to do."""
    both = ranks(toy, tmp_path / "o", before=SHORT, what="if STEP == 6: wait_seconds(8)\nif RANK == 1 and STEP == 6: os.kill(os.getpid(), signal.SIGSTOP)")
    try:
        begun = time.monotonic()
        out, error = both[0].communicate(timeout=100)
        assert both[0].returncode == 1 and time.monotonic() - begun < 90
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert len(error.splitlines()) == 1 and "another rank hangs or has died" in error and "goes on from the last checkpoint" in error
    assert steps(tmp_path / "o") == [4, 5]  # 5: the first epoch's end


def test_a_rank_may_be_long_behind_while_the_data_is_checked(toy, tmp_path):
    slow = ("check, read = checked.check_files, checked.read_checked\n"
            "def slow(*args):\n    wait_seconds(4)\n    time.sleep(9 * RANK)\n    return check(*args)\n"
            "def then(*args):\n    wait_seconds(900)\n    return read(*args)\n"
            "checked.check_files, checked.read_checked = slow, then")
    done = ends(ranks(toy, tmp_path / "o", "--max-steps", 1, before=SHORT + slow))
    assert [code for code, *_ in done] == [0, 0], done


def test_a_micro_batch_that_one_rank_cannot_read(toy, two, tmp_path):
    """The ranks stay together: rank 1 has nothing to add in some steps. Both end with the same weights."""
    before = ("from eagle3 import loader\nloader.MAX_BAD = 1\nread = StateFile.read_into\n"
              "def fails(self, *args):\n    if RANK == 1 and self.path.stem < 's30':\n        raise OSError(5, 'Input/output error')\n    return read(self, *args)\n"
              "StateFile.read_into = fails\nloader.UNREAD_IN_A_ROW = 1000")
    what = "print('weights', STEP, float(trainer.draft.master.flat.double().sum()).hex(), flush=True)"
    done = ends(ranks(toy, tmp_path / "o", "--val-ratio", "0.02", before=before, what=what))
    assert [code for code, *_ in done] == [0, 0], done
    sums = [[line for line in out.splitlines() if line.startswith("weights")] for _, out, _ in done]
    assert sums[0] == sums[1] and len(sums[0]) > 5
    unread = json.loads((tmp_path / "o/manifest.json").read_text())["counts"]["unread"]
    assert unread == done[1][1].count("skipped ") - done[1][1].count("validation skipped") > 3
    losses = [row["loss_0"] for row in rows(tmp_path / "o") if "loss_0" in row]
    assert all(0.5 * losses[0] < loss < 2 * losses[0] for loss in losses)  # of the rows that were read, not of all


# ------------------------------------------------------------------ configs
def test_a_refused_attempt_pins_nothing(toy, unbroken, tmp_path):
    with refused("--val-ratio 0.99 leaves none"):
        trained(toy, tmp_path / "o", "--val-ratio", 0.99, "--seed", 3)
    trained(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)
    (tmp_path / "o/manifest.json").unlink()
    before = contents(tmp_path / "o")
    with refused("seed: 0 there, 3 now"):
        trained(toy, tmp_path / "o", "--seed", 3)
    assert contents(tmp_path / "o") == before


def test_what_a_refused_attempt_found_in_other_data_is_forgotten(toy, unbroken, tmp_path):
    """The same ids, other states: what was kept of the first folder's samples must not be taken for the second's."""
    other = tmp_path / "hidden_states"
    shutil.copytree(toy / "hidden_states", other)
    head = load_file(toy / "target/model.safetensors")["language_model.lm_head.weight"]
    index = [json.loads(line) for line in (other / "index.jsonl").read_text().splitlines()]
    rng = np.random.default_rng(9)
    write_index(other, [write_sample(other, row["id"], random_sample(row["tokens"], "tail", head, rng)) for row in index])
    with refused("leaves none"):
        trained(toy, tmp_path / "o", "--val-ratio", 0.99, data=other)
    assert list(other.glob("checked/*/*.safetensors"))
    trained(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)


def test_a_path_is_known_by_what_it_holds(toy, unbroken, tmp_path, monkeypatch):
    flags = ["--max-steps", 2, "--save-every", 1]
    (tmp_path / "link").symlink_to(unbroken)
    trained(toy, tmp_path / "o", *flags, "--finetune-from", unbroken / "best")
    monkeypatch.chdir(unbroken)
    for spelled in ("best", "./best/", f"{unbroken}/../output/best", tmp_path / "link/best"):
        (tmp_path / "o/manifest.json").unlink()
        assert "resume" in "".join(trained(toy, tmp_path / "o", *flags, "--finetune-from", spelled))
    monkeypatch.chdir(toy)
    (tmp_path / "o/manifest.json").unlink()
    lines = trained(Path("."), Path(os.path.relpath(tmp_path / "o")), *flags, "--finetune-from", unbroken / "best", data="hidden_states/")
    assert "resume" in "".join(lines)
    for other in ([], ["--finetune-from", unbroken / f"checkpoint-{steps(unbroken)[0]}"]):
        if not other or contents(other[1])["model.safetensors"] != contents(unbroken / "best")["model.safetensors"]:
            with refused("begun with another config"):
                trained(toy, tmp_path / "o", *flags, *other)


# ------------------------------------------------------------------ room on the disk
def test_too_little_room_for_the_checkpoints_is_said_before_the_first_step(toy, tmp_path, monkeypatch):
    trained(toy, tmp_path / "size", "--max-steps", 1)
    size = sum(path.stat().st_size for path in (tmp_path / "size/checkpoint-1").rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(3.5 * size)))
    with refused(r"6 checkpoints of .* GB and best/ take .*--keep-checkpoints 9.* lower --keep-checkpoints"):
        trained(toy, tmp_path / "o")
    assert not steps(tmp_path / "o") and not (tmp_path / "o/metrics.jsonl").exists()
    trained(toy, tmp_path / "o", "--keep-checkpoints", 1)
    trained(toy, tmp_path / "few", "--max-steps", 2)  # one checkpoint is all that will come
    (tmp_path / "o/manifest.json").unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    trained(toy, tmp_path / "o", "--keep-checkpoints", 1)  # nothing is left to be saved


def test_room_for_a_last_checkpoint_that_a_sigterm_made(toy, unbroken, tmp_path, monkeypatch):
    """It is still to be written as the last step's: with its evaluation, beside the one that is there."""
    last = steps(unbroken)[-1]
    with monkeypatch.context() as patch:
        terminates(patch, last)
        assert ended(toy, tmp_path / "o")[0] == 143
    with monkeypatch.context() as patch, refused(" checkpoints of .* GB and best/ take "):
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
        trained(toy, tmp_path / "o")
    trained(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)


FULL = {"the state": ("save_file", 4), "the weights": ("save_file", 3), "the folder": ("replace_folder", 3)}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_while_saving_leaves_the_checkpoints_good(toy, unbroken, tmp_path, monkeypatch, what):
    name, left = FULL[what]
    original = getattr(checkpoints, name)

    def full(*args, **more):
        nonlocal left
        left -= 1
        if not left:
            if name == "save_file":
                Path(args[1]).write_bytes(b"torn")
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
        return original(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, name, full)
        with refused(r"could not be written to \(.*No space left on device.*Make room, then run the same command again"):
            trained(toy, tmp_path / "o")
    assert not list((tmp_path / "o").glob("*.tmp"))
    [step] = steps(tmp_path / "o")
    assert contents(tmp_path / f"o/checkpoint-{step}") == contents(unbroken / f"checkpoint-{step}")
    trained(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)


@pytest.mark.parametrize("room, name", [("metrics", "Metrics.add"), ("check_records", "write_atomic"), ("checkpoints", "write_atomic")])
def test_other_files_on_a_full_disk(toy, unbroken, tmp_path, monkeypatch, room, name):
    """metrics.jsonl, what was found in the samples, val_ids.json."""
    module = sys.modules[f"eagle3.{room}"]
    owner, attribute = (module.Metrics, "add") if "." in name else (module, name)

    def full(*args):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    shutil.rmtree(toy / "hidden_states/checked", ignore_errors=True)
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, full)
        with refused("Disk quota exceeded.*Make room"):
            trained(toy, tmp_path / "o")
    trained(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)


# ------------------------------------------------------------------ plans
def test_no_more_epochs_are_planned_than_are_trained(toy, unbroken, tmp_path, monkeypatch):
    planned, plan_epoch = [], batches.plan_epoch

    def noted(*args):
        planned.append(args[4])
        return plan_epoch(*args)

    monkeypatch.setattr("eagle3.schedule.plan_epoch", noted)
    begun = time.monotonic()
    trained(toy, tmp_path / "o", "--epochs", 10 ** 9, "--max-steps", 2)
    assert planned == [0] and time.monotonic() - begun < 60 and steps(tmp_path / "o") == [2]
    with refused(r"36 samples in 1,000,000,000 epochs are too many to plan ahead.*Lower --epochs or --max-steps"):
        trained(toy, tmp_path / "p", "--epochs", 10 ** 9)
    with refused("too many to plan ahead"):
        trained(toy, tmp_path / "p", "--epochs", 10 ** 9, "--max-steps", 10 ** 9)
    assert planned == [0] * 3


def test_the_plan_of_a_few_steps_is_the_beginning_of_the_whole_one():
    samples = [Sample(f"s{i}", Path(), 10 + i % 7, 3, None) for i in range(50)]
    process = SimpleNamespace(world=1)
    args = SimpleNamespace(order="shuffle", grad_accum=1, epochs=4, batch_tokens=40, seed=0, max_steps=None, data_weight=None)
    whole, epoch_ends = plan_epochs(args, samples, process)
    assert epoch_ends[-1] == len(whole) and [epoch for epoch, _ in whole] == sorted(epoch for epoch, _ in whole)
    for most in (1, epoch_ends[0], epoch_ends[0] + 1, epoch_ends[2] - 1, epoch_ends[3], epoch_ends[3] + 5):
        args.max_steps = most
        some, ends_there = plan_epochs(args, samples, process)
        assert some == whole[:most] and [end for end in ends_there if end <= most] == [end for end in epoch_ends if end <= most]
