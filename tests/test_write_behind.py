"""04 writes its checkpoints beside the steps: the same bytes, whole at every moment, and a disk that fails ends the run."""
import contextlib
import errno
import gc
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save_file as library_save_file

from conftest import ROOT, load_script
from train_reference import one_thread, write_learnable_run  # noqa: F401
from eagle3 import checkpoints, keeper, tensor_file
from eagle3.stage import UserError
from eagle3.write_behind import Behind, Snapshot, host_memory_left

train = load_script("04_train")
SLOW = 0.4  # s that a file of checkpoint-4 takes: many steps of these


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return write_learnable_run(tmp_path_factory.mktemp("behind"), {"hidden_states": {"r": (60, 40)}})


def argv(toy: Path, output: Path, *more) -> list[str]:
    return list(map(str, ["--verifier-path", toy / "target", "--data-dir", toy / "hidden_states", "--vocab-mapping-dir",
                          toy / "vocab_mapping", "--output-dir", output, "--epochs", 2, "--lr", 1e-3, "--batch-tokens", 200,
                          "--max-seq-len", 64, "--num-workers", 1, "--log-every", 1, "--save-every", 4, "--keep-checkpoints", 9,
                          "--ema", 0.9, *more]))


@pytest.fixture(autouse=True)
def undrawn(monkeypatch, one_thread):  # noqa: F811
    monkeypatch.setattr(train, "plot", lambda rows, path: None)


def run(toy: Path, output: Path, *more) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        try:
            train.main(argv(toy, output, *more))
        except SystemExit as end:
            logged.write(f"exit code {end.code}\n")
    gc.collect()
    return logged.getvalue().splitlines()


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in (".lock", "training.png")}


@pytest.fixture(scope="module")
def unbroken(toy, tmp_path_factory) -> Path:
    """The output of a run that waits for each checkpoint."""
    output = tmp_path_factory.mktemp("unbroken") / "output"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "host_memory_left", lambda: 0)
        patch.setattr(train, "plot", lambda rows, path: None)
        lines = run(toy, output)
    assert any("checkpoints are written in line, while training waits: beside it they would take 0.0 GB of host memory, 0.0 GB are free" in line for line in lines)
    return output


@pytest.fixture
def slow(monkeypatch) -> list:
    """Each file of checkpoint-4 takes SLOW s. (checkpoint, whether in the main thread) of each file, one after the other."""
    written, save = [], checkpoints.save_file

    def slowly(tensors, path, metadata=None):
        written.append((path.parts[-2] if path.name == "model.safetensors" else path.parts[-3], threading.current_thread() is threading.main_thread()))
        time.sleep(SLOW * ("checkpoint-4." in str(path)))
        return save(tensors, path, metadata)

    monkeypatch.setattr(checkpoints, "save_file", slowly)
    return written


def place(lines: list[str], what: str) -> int:
    return next(i for i, line in enumerate(lines) if re.search(what, line))


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was(toy, unbroken, tmp_path, slow):
    lines = run(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)
    assert place(lines, "step 7/") < place(lines, "checkpoint .*/checkpoint-4 ") < place(lines, "checkpoint .*/checkpoint-8 ")
    found = [re.search(r"/checkpoint-(\d+) \| ([\d.]+) GB \| stall ([\d.]+) s \| written after ([\d.]+) s", line) for line in lines]
    steps = {int(match[1]): (float(match[3]), float(match[4])) for match in found if match}
    assert list(steps) == [step for step, _ in checkpoints.checkpoints(unbroken)] and not any(main for _, main in slow)
    assert steps[4][0] < SLOW < 2 * SLOW <= steps[4][1] + 0.1  # the writing is no part of its stall
    assert any("checkpoints are written beside the steps | 0.0 GB of host memory taken" in line for line in lines)
    assert place(lines, "done: ") == len(lines) - 1 > place(lines, f"checkpoint .*/checkpoint-{max(steps)} ")


KILLED = """
import os, runpy, signal, sys, time
sys.path.insert(0, {scripts!r})
from eagle3 import checkpoints, trainer
sys.argv = sys.argv[1:]
save, update = checkpoints.save_file, trainer.Trainer.update
def slowly(tensors, path, metadata=None):
    if "checkpoint-8" in str(path) and {file!r} in str(path):
        open(path, "wb").write(b"torn")
        time.sleep(60)
    return save(tensors, path, metadata)
def dies(self, *args):
    sums = update(self, *args)
    if self.step == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return sums
checkpoints.save_file, trainer.Trainer.update = slowly, dies
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors"])
def test_killed_while_one_is_written_the_one_before_is_whole_and_the_end_the_same(toy, unbroken, tmp_path, file):
    program = KILLED.format(scripts=str(ROOT / "scripts"), file=file)
    done = subprocess.run([sys.executable, "-c", program, str(ROOT / "04_train.py"), *argv(toy, tmp_path / "o")], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == -signal.SIGKILL and "step 10/" in done.stdout, done.stderr
    assert (tmp_path / "o/checkpoint-8.tmp").is_dir()
    assert contents(tmp_path / "o/checkpoint-4") == contents(unbroken / "checkpoint-4")
    lines = run(toy, tmp_path / "o")
    assert any(line.endswith(f"resume {tmp_path}/o/checkpoint-4") for line in lines)
    assert contents(tmp_path / "o") == contents(unbroken)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_in_the_log_and_ends_the_run_at_the_next_step(toy, unbroken, tmp_path, monkeypatch, error):
    steps, failed, save, update = [], [], checkpoints.save_file, train.Trainer.update

    def fails(tensors, path, metadata=None):
        if "checkpoint-8" in str(path):
            time.sleep(0.2)
            failed.append(len(steps))
            raise OSError(error, os.strerror(error))
        return save(tensors, path, metadata)

    def updates(self, *args):
        steps.append(self.step)
        time.sleep(0.05)
        return update(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", fails)
        patch.setattr(train.Trainer, "update", updates)
        with contextlib.redirect_stdout(io.StringIO()) as logged, pytest.raises(UserError, match=f"could not be written to .*{os.strerror(error)}"):
            train.main(argv(toy, tmp_path / "o"))
    gc.collect()
    [line] = [line for line in logged.getvalue().splitlines() if "stopping: " in line]
    assert ("Make room" if error == errno.ENOSPC else "See to that disk") in line
    assert len(steps) <= failed[0] + 1 and not list((tmp_path / "o").glob("*.tmp"))
    run(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)


def test_the_rows_up_to_a_checkpoint_are_on_the_disk_before_it_is(toy, unbroken, tmp_path, monkeypatch):
    """A power cut takes what was not synced: a run that goes on from a checkpoint would lack rows of before for ever."""
    synced, named, fsync, replace = [0], {}, os.fsync, os.replace

    def syncs(handle):
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == "metrics.jsonl":
            synced.append(max([json.loads(line)["step"] for line in path.read_text().splitlines()], default=0))

    def replaces(source, target):
        replace(source, target)
        if found := re.fullmatch(r"checkpoint-(\d+)", Path(target).name):
            named[int(found[1])] = synced[-1]

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", replaces)
    run(toy, tmp_path / "o")
    assert list(named) == [step for step, _ in checkpoints.checkpoints(unbroken)]
    assert all(rows >= step for step, rows in named.items()), named


def test_sigterm_awaits_what_is_being_written(toy, unbroken, tmp_path, slow, monkeypatch):
    update = train.Trainer.update

    def terminated(self, *args):
        sums = update(self, *args)
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return sums

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "update", terminated)
        lines = run(toy, tmp_path / "o")
    assert lines[-1] == "exit code 143" and "terminated after step 6: checkpoint-6 is on the disk" in lines[-2]
    assert [name for name, _ in slow] == [name for step in (4, 6) for name in [f"checkpoint-{step}.tmp"] * 2]
    assert (tmp_path / "o/checkpoint-6/training_state/SHA256SUMS").exists()
    run(toy, tmp_path / "o")
    assert contents(tmp_path / "o") == contents(unbroken)


def test_what_ends_the_steps_waits_for_what_is_being_written(toy, tmp_path, slow, monkeypatch):
    """Else another process could take the folder, and remove what this one still writes."""
    update = train.Trainer.update

    def breaks(self, *args):
        if self.step == 5:
            raise RuntimeError("the GPU fell off")
        return update(self, *args)

    monkeypatch.setattr(train.Trainer, "update", breaks)
    with pytest.raises(RuntimeError, match="fell off"):
        run(toy, tmp_path / "o")
    assert [step for step, _ in checkpoints.checkpoints(tmp_path / "o")] == [4] and not list((tmp_path / "o").glob("*.tmp"))


# ---- the parts ----
def test_a_file_has_the_bytes_of_the_librarys(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE", 1000)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name} \u00e4": torch.randn(17, 5, generator=generator).mul(50).to(dtype) for name, dtype in zip("zyxwvutsrq", tensor_file.NAMES)}
    tensors |= {"turned": torch.randn(6, 4, generator=generator).t(), "none": torch.zeros(0, 3), "one": torch.tensor(2.5), "d2t": torch.arange(9)}
    for number, (part, metadata) in enumerate([(tensors, None), (tensors, {"format": "pt"}), ({"d2t": tensors["d2t"]}, {"format": "pt"})]):
        library_save_file({name: tensor.contiguous() for name, tensor in part.items()}, tmp_path / "theirs", metadata)
        digest = tensor_file.save_file(part, tmp_path / "ours", metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes(), number
        assert digest == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()
    loaded = load_file(tmp_path / "ours")
    assert torch.equal(loaded["d2t"], tensors["d2t"])


def test_a_snapshot_holds_still(toy):
    tensors = {"a": torch.arange(5.), "b": torch.ones(2, 3, dtype=torch.float64)}
    snapshot = Snapshot(tensors)
    taken = snapshot.take(tensors)
    tensors["a"].add_(1)
    assert taken["a"].tolist() == [0, 1, 2, 3, 4] and taken["b"].dtype == torch.float64 and not snapshot.pinned
    assert 0 < host_memory_left() < 1 << 50
    assert json.dumps(host_memory_left()).isdecimal()


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch):
    """CUDA keeps the error of the call that failed; the next kernel must not be blamed for it."""
    register, taken = Snapshot.register, []

    def refused(own):
        taken.append(own)
        return register(own) and register(own)  # it is registered already

    monkeypatch.setattr(Snapshot, "register", staticmethod(refused))
    tensors = {"a": torch.arange(5., device="cuda")}
    snapshot = Snapshot(tensors)
    tensors["a"] += 1
    assert not snapshot.pinned and snapshot.take(tensors)["a"].tolist() == [1, 2, 3, 4, 5]
    torch.cuda.cudart().cudaHostUnregister(taken[0].data_ptr())


def test_one_piece_of_work_at_a_time():
    behind, order = Behind(), []
    for i in range(3):
        behind.start(lambda i=i: (time.sleep(0.05), order.append(i)))
    behind.wait()
    assert order == [0, 1, 2]
    with contextlib.redirect_stdout(io.StringIO()):
        behind.start(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            behind.wait()
    behind.wait(), behind.check()  # said once
