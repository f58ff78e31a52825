"""The bounded mode: 03 with --max-disk-gb beside 04 with --follow ends in the drafter of an unbounded run, and never takes more disk than its bound."""
import contextlib
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import preloaded
from conftest import ONE_AT_A_TIME, ROOT, TINY_KIMI, free_port, load_script, run_script
from train_reference import random_sample, write_hidden_states, write_mapping, write_target
from eagle3.bounded import Releases, release_steps
from eagle3.checkpoints import checkpoints
from eagle3 import checked, follow
from eagle3.sample_table import Builder
from eagle3.schedule import Planned
from eagle3.stage import UserError, lock_file
from eagle3.states import HEADER_BYTES, sample_path

train, extract = load_script("04_train"), load_script("03_extract")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
SAMPLES, BOUND_GB = 120, 0.012  # of the fixture `extracted`


def drafter(output: Path) -> dict[str, str]:
    """sha256 of what training made: the drafter and its whole training state at the end."""
    last = checkpoints(output)[-1][1]
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in
            {"drafter": output / "best/model.safetensors", "config": output / "best/config.json", "state": last / "training_state/state.safetensors",
             "val_ids": output / "val_ids.json"}.items()}


def written(folder: Path) -> dict:
    """What 03 leaves beside the samples, the mark of the bounded mode apart."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("bounded", None)
    return {"manifest": manifest, "index": (folder / "index.jsonl").read_text(), "plan": (folder / "plan.jsonl").read_text()}


def disk_use(folder: Path) -> int:
    """Bytes of samples in `folder` and on their way into it; others move and remove files meanwhile."""
    sizes = {}  # by inode: a file may move from one folder to the other
    for top in (folder.parent / "incoming", folder):
        for path in [*top.glob("*/*.safetensors"), *top.glob("*/*.safetensors.tmp")]:
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


class DiskWatch(threading.Thread):
    """The most bytes of samples that ever lay in `folder`, looked at again and again."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.most, self.looks, self.stop = folder, 0, 0, False
        self.start()

    def run(self):
        while not self.stop:
            self.most, self.looks = max(self.most, disk_use(self.folder)), self.looks + 1
            time.sleep(0.02)


@contextlib.contextmanager
def watched(folder: Path, limit: float):
    watch = DiskWatch(folder)
    yield watch
    watch.stop = True
    watch.join()
    assert watch.looks > 50 and 0.5 * limit < watch.most <= limit, (watch.looks, watch.most, limit)


# ------------------------------------------------------------------ on the real engine
@pytest.fixture
def server(engine):
    return engine(capture_dir=True, **ONE_AT_A_TIME)


@pytest.fixture(scope="module")
def run(extracted, tmp_path_factory):
    """A run folder with responses/, vocab_mapping/, and the unbounded result: hidden_states/ and the drafter trained on them in the plan's order."""
    root = tmp_path_factory.mktemp("follow")
    for name, place in (("incoming", "incoming"), ("responses", "responses"), ("unbounded", "hidden_states")):
        (root / name).symlink_to(extracted / place)
    write_mapping(root / "vocab_mapping", np.arange(0, 2048, 2), json.loads((TINY_KIMI / "config.json").read_text())["text_config"]["vocab_size"])
    preloaded.run(train_command(root, root / "unbounded", root / "output", "--order", "plan"), check=True, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL)
    return root


def extract_command(root: Path, url: str, *more) -> list[str]:
    return [sys.executable, "-u", str(ROOT / "03_extract.py"), "--data-dir", str(root / "responses"), "--output-dir", str(root / "hidden_states"),
            "--base-url", url, "--capture-dir", str(root / "incoming"), "--concurrency", "4", "--log-interval", "1", *map(str, more)]


def train_command(root: Path, data: Path, output: Path, *more) -> list[str]:
    return [sys.executable, "-u", str(ROOT / "04_train.py"), "--verifier-path", str(TINY_KIMI), "--data-dir", str(data), "--vocab-mapping-dir",
            str(root / "vocab_mapping"), "--output-dir", str(output), "--epochs", "1", "--lr", "1e-3", "--batch-tokens", "256", "--max-seq-len", "256",
            "--num-workers", "2", "--log-every", "5", "--noise-std", "0.05", "--val-ratio", "0.05", "--export-dtype", "float32", *map(str, more)]


def bounded(run: Path, url: str, bound=BOUND_GB) -> tuple[list[str], list[str]]:
    return extract_command(run, url, "--max-disk-gb", bound), train_command(run, run / "hidden_states", run / "followed", "--follow")


@pytest.fixture
def clean(run):
    for name in ("hidden_states", "followed"):
        shutil.rmtree(run / name, ignore_errors=True)


def test_bounded_gives_the_same_drafter_and_manifests(run, server, clean):
    commands = bounded(run, server.url)
    with watched(run / "hidden_states", BOUND_GB * 1e9):
        first = preloaded.popen(commands[0], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while not (run / "hidden_states").exists():
            time.sleep(0.05)
        second = preloaded.run(commands[1], cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
        out, _ = first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), out + second.stdout
    total = sum(path.stat().st_size for path in (run / "unbounded").glob("??/*"))
    assert total > 2.5 * BOUND_GB * 1e9, total  # more data than the bound allows
    assert drafter(run / "followed") == drafter(run / "output")
    assert written(run / "hidden_states") == written(run / "unbounded")
    val = set(json.loads((run / "followed/val_ids.json").read_text())["ids"])
    left = {path.name.removesuffix(".safetensors") for path in (run / "hidden_states").glob("??/*")}
    released = [json.loads(line) for line in (run / "hidden_states/released.jsonl").read_text().splitlines()]
    index = {row["id"]: row["checksum"] for row in map(json.loads, (run / "hidden_states/index.jsonl").read_text().splitlines())}
    assert left == val and len(released) == len(index) - len(val)  # validation stays, every other sample was released once
    assert all(index[row["id"]] == row["checksum"] for row in released)
    assert "released" in second.stdout and "GB | released" in out
    counts = [json.loads((run / name / "manifest.json").read_text())["counts"] for name in ("followed", "output")]
    assert counts[0] == counts[1]
    again = preloaded.run(commands[0], cwd=ROOT, capture_output=True, text=True)
    assert "complete already" in again.stdout and again.returncode == 0


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_time_both_end_in_the_same(run, server, clean, seed):
    """kill -9 of 03, of 04 and of both, at random points of what is landed and released, then the same commands again."""
    commands, chance, running, codes = bounded(run, server.url), random.Random(seed), [None, None], []
    folder, logs = run / "hidden_states", [run / "log0", run / "log1"]

    def start(which: int) -> None:
        with open(logs[which], "a") as log:
            running[which] = preloaded.popen(commands[which], cwd=ROOT, env=ENV, stdout=log, stderr=log)

    for log in logs:
        log.unlink(missing_ok=True)
    folder.mkdir()
    with watched(folder, BOUND_GB * 1e9):
        start(0), start(1)
        for at, victims in zip(sorted(chance.sample(range(10, 200), 4)), chance.sample([[0], [1], [0, 1], [1]], 4)):
            while lines(folder / "landed.jsonl") + lines(folder / "released.jsonl") < at and None in [process.poll() for process in running]:
                time.sleep(0.002)
            for which in victims:
                running[which].kill()
                codes.append(running[which].wait())
            for which in victims:
                start(which)
        ends = [process.wait(timeout=300) for process in running]
    said = [log.read_text() for log in logs]
    assert ends == [0, 0], said[0][-3000:] + said[1][-3000:]
    assert codes.count(-9) >= 4 and " resume " in said[1], codes  # they were at work, past a checkpoint
    assert drafter(run / "followed") == drafter(run / "output")
    assert written(folder) == written(run / "unbounded")


def test_03_does_not_extract_released_samples_again(run, server, clean, monkeypatch):
    folder = shutil.copytree(run / "unbounded", run / "hidden_states")
    for name in ("manifest.json", "index.jsonl"):
        (folder / name).unlink()
    stage = json.loads((folder / "stage.json").read_text())
    (folder / "stage.json").write_text(json.dumps(stage | {"bounded": True}))
    rows = [row for row in map(json.loads, (folder / "landed.jsonl").read_text().splitlines()) if "id" in row]
    for row in rows[:60]:
        sample_path(folder, row["id"]).unlink()
    with open(folder / "released.jsonl", "w") as file:
        for row in rows[:40]:
            file.write(json.dumps({"id": row["id"], "checksum": row["checksum"]}) + "\n")
        file.write('{"id": "p1')  # torn by a kill of 04
    done = preloaded.run(extract_command(run, server.url, "--max-disk-gb", 1), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"in place {SAMPLES - 20} " in done.stdout and "to do 20 " in done.stdout  # lost is not released
    assert written(folder) == written(run / "unbounded") and len(list(folder.glob("??/*"))) == SAMPLES - 40


def test_03_waits_for_room_and_says_so(run, server, clean):
    """No 04 is there: 03 fills the bound and no more, and goes on when room is made."""
    commands, folder = bounded(run, server.url), run / "hidden_states"
    process = preloaded.popen(commands[0], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if "waiting for 04_train.py --follow to release" in line:
            break
    landed = len(list(folder.glob("??/*")))
    time.sleep(1)
    assert 10 < landed == len(list(folder.glob("??/*"))) < SAMPLES
    process.kill()
    process.communicate()
    small = preloaded.run(bounded(run, server.url, 1e-5)[0], cwd=ROOT, capture_output=True, text=True)
    assert small.returncode == 2 and len(small.stderr.splitlines()) == 1 and "alone takes" in small.stderr
    verify = preloaded.run([*commands[0], "--verify"], cwd=ROOT, capture_output=True, text=True)
    assert verify.returncode == 2 and len(verify.stderr.splitlines()) == 1
    other = preloaded.run(extract_command(run, server.url), cwd=ROOT, capture_output=True, text=True)
    assert other.returncode == 2 and "bounded: True there, None now" in other.stderr


# ------------------------------------------------------------------ 04 alone, fed by the writer of its own tests
@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(root, samples in the plan's order): a target, a vocabulary map, and 03's finished unbounded folder, plan.jsonl and landed.jsonl included."""
    root = tmp_path_factory.mktemp("toy")
    target = write_target(root / "target")
    head = load_file(target / "model.safetensors")["language_model.lm_head.weight"]
    rng = np.random.default_rng(3)
    write_mapping(root / "vocab_mapping", np.sort(rng.choice(97, 61, replace=False)), 97)
    samples = {f"s{i:03d}": random_sample(int(rng.integers(8, 60)), "tail", head, rng) for i in range(150)}
    write_hidden_states(root / "hidden_states", samples)
    rows = [json.loads(line) for line in (root / "hidden_states/index.jsonl").read_text().splitlines()]
    by_hash = sorted(rows, key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())
    (root / "hidden_states/plan.jsonl").write_text("".join(json.dumps(
        {"id": row["id"], "tokens": row["tokens"], "prompt_len": int(samples[row["id"]]["loss_mask"].argmax())}) + "\n" for row in by_hash))
    facts = {key: json.loads((root / "hidden_states/manifest.json").read_text())[key] for key in ("target", "capture_layers", "sglang_version", "dtype", "hidden_size")}
    (root / "hidden_states/landed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"facts": facts}, *by_hash]))
    return root


def toy_arguments(root: Path, data: Path, output: Path, *more) -> list[str]:
    return list(map(str, ["--verifier-path", root / "target", "--data-dir", data, "--vocab-mapping-dir", root / "vocab_mapping", "--output-dir", output,
                          "--epochs", 1, "--lr", 1e-3, "--max-seq-len", 64, "--batch-tokens", 128, "--num-workers", 1, "--log-every", 50, "--noise-std", 0.05, *more]))


def names(folder: Path) -> set[str]:
    return {path.name.removesuffix(".safetensors") for path in folder.glob("??/*.safetensors")}


@pytest.fixture(scope="module")
def in_order(toy):
    """The drafter of the ordinary run in the plan's order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in ENV: the last bits of a sum depend on the threads
    train.main(toy_arguments(toy, toy / "hidden_states", toy / "output", "--order", "plan"))
    yield drafter(toy / "output")
    torch.set_num_threads(threads)


def test_following_an_unbounded_folder_deletes_nothing(toy, in_order, tmp_path):
    before = names(toy / "hidden_states")
    train.main(toy_arguments(toy, toy / "hidden_states", tmp_path / "output", "--follow"))
    assert names(toy / "hidden_states") == before and not (toy / "hidden_states/released.jsonl").exists()
    assert drafter(tmp_path / "output") == in_order
    assert json.loads((tmp_path / "output/manifest.json").read_text())["counts"] == json.loads((toy / "output/manifest.json").read_text())["counts"]


def test_following_with_loss_on_the_prompts_is_the_ordinary_run(toy, in_order, tmp_path):
    for name, flag in (("followed", ["--follow"]), ("ordinary", ["--order", "plan"])):
        train.main(toy_arguments(toy, toy / "hidden_states", tmp_path / name, "--loss-on", "all", *flag))
    assert drafter(tmp_path / "followed") == drafter(tmp_path / "ordinary") != in_order


def test_the_order_is_another_than_shuffled_and_trains_on_the_same(toy, in_order, tmp_path):
    train.main(toy_arguments(toy, toy / "hidden_states", tmp_path / "output"))
    shuffled = drafter(tmp_path / "output")
    assert shuffled["val_ids"] == in_order["val_ids"] and shuffled["drafter"] != in_order["drafter"]


class Lander(threading.Thread):
    """Plays 03 in bounded mode from a finished folder: lands each sample in order, as soon as there is room; journal line first, then the rename.

    It counts the most that each file can take, so that a bound that just does leaves nothing over.
    """

    def __init__(self, source: Path, folder: Path, bound: int, failed=(), damaged=(), last=True):
        """last: whether it ends as 03 does, by its manifest."""
        super().__init__(daemon=True)
        self.source, self.folder, self.bound, self.failed, self.damaged, self.last = source, folder, bound, failed, damaged, last
        folder.mkdir()
        shutil.copy(source / "plan.jsonl", folder)
        (folder / "bound.json").write_text(json.dumps({"max_disk_gb": bound / 1e9}))
        self.lines = (source / "landed.jsonl").read_text().splitlines()
        (folder / "landed.jsonl").write_text(self.lines[0] + "\n")
        self.start()

    def run(self):
        rows = [json.loads(line) for line in self.lines[1:]]
        most = {row["id"]: row["tokens"] * (4 * 32 * 4 + 5) + HEADER_BYTES for row in rows}
        for row in rows:
            if row["id"] in self.failed:
                with open(self.folder / "quarantine.jsonl", "a") as file:
                    file.write(json.dumps({"id": row["id"], "reason": "not finite", "detail": ""}) + "\n")
                continue
            source, place = sample_path(self.source, row["id"]), sample_path(self.folder, row["id"])
            while sum(map(most.get, names(self.folder))) + most[row["id"]] > self.bound:
                time.sleep(0.005)
            data = bytearray(source.read_bytes())
            if row["id"] in self.damaged:
                data[-100] ^= 1
            with open(self.folder / "landed.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            place.parent.mkdir(exist_ok=True)
            (self.folder / "tmp").write_bytes(data)
            (self.folder / "tmp").rename(place)
        if self.last:
            self.finish()

    def finish(self):
        for name in ("index.jsonl", "manifest.json"):
            shutil.copy(self.source / name, self.folder / name)


TOY_BOUND = 1_500_000


def test_samples_that_failed_are_left_out_as_in_the_unbounded_run(toy, tmp_path, monkeypatch, capsys):
    """One quarantined by 03, one damaged on the disk, one of them for validation, too: the other samples stay in the batches planned for them."""
    for room in (checked, follow):
        monkeypatch.setattr(room, "MAX_BAD", 0.05)
    val = json.loads((toy / "output/val_ids.json").read_text())["ids"] if (toy / "output/val_ids.json").exists() else []
    plan = [json.loads(line)["id"] for line in (toy / "hidden_states/plan.jsonl").read_text().splitlines()]
    failed, damaged = {plan[3], plan[40], *val[:1]}, {plan[77]}
    lander = Lander(toy / "hidden_states", tmp_path / "bounded", TOY_BOUND, failed, damaged)
    train.main(toy_arguments(toy, tmp_path / "bounded", tmp_path / "followed", "--follow"))
    lander.join(timeout=20)
    said = capsys.readouterr().out
    assert all(f"{name}.safetensors | {reason}" in said for some, reason in ((failed, "quarantined by 03_extract"), (damaged, "checksum")) for name in some)

    unbounded = shutil.copytree(toy / "hidden_states", tmp_path / "unbounded")
    rows = [json.loads(line) for line in (unbounded / "index.jsonl").read_text().splitlines()]
    (unbounded / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["id"] not in failed))
    manifest = json.loads((unbounded / "manifest.json").read_text())
    manifest["index_sha256"] = hashlib.sha256((unbounded / "index.jsonl").read_bytes()).hexdigest()
    (unbounded / "manifest.json").write_text(json.dumps(manifest))
    for name in damaged:
        path = sample_path(unbounded, name)
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    train.main(toy_arguments(toy, unbounded, tmp_path / "output", "--order", "plan"))
    assert drafter(tmp_path / "followed") == drafter(tmp_path / "output")
    counts = [json.loads((tmp_path / name / "manifest.json").read_text())["counts"] for name in ("followed", "output")]
    assert counts[0] == counts[1] and counts[0]["dropped"] == {"checksum": 1, "quarantined by 03_extract": len(failed)}


def test_following_with_a_held_out_folder_evaluates_all_along_and_releases_every_sample(toy, tmp_path, monkeypatch):
    """Nothing that lands is held out, so that nothing stays; the drafter is that of the same flags on the finished folder."""
    monkeypatch.setattr(train, "plot", lambda rows, path: None)
    head = load_file(toy / "target/model.safetensors")["language_model.lm_head.weight"]
    rng = np.random.default_rng(8)
    held_out = write_hidden_states(tmp_path / "held_out", {f"h{i}": random_sample(30, "tail", head, rng) for i in range(8)})
    flags = ["--val-data-dir", held_out, "--eval-every", 5, "--save-every", 12]
    lander = Lander(toy / "hidden_states", tmp_path / "bounded", TOY_BOUND)
    train.main(toy_arguments(toy, tmp_path / "bounded", tmp_path / "followed", "--follow", *flags))
    lander.join(timeout=20)
    assert names(tmp_path / "bounded") == set()
    train.main(toy_arguments(toy, toy / "hidden_states", tmp_path / "output", "--order", "plan", *flags))
    last = [drafter(tmp_path / name) for name in ("followed", "output")]
    assert last[0]["state"] == last[1]["state"] and last[0]["val_ids"] == last[1]["val_ids"]
    evaluated = [{row["step"]: row["val_accept_length"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
                  if "val_accept_length" in (row := json.loads(line))} for name in ("followed", "output")]
    assert {5, 10, 12, 15} < set(evaluated[0]) and evaluated[0].items() >= evaluated[1].items()  # it also saves where it releases
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("followed", "output")]
    assert manifests[0]["counts"] == manifests[1]["counts"] and manifests[0]["counts"]["validation"] == 8
    with pytest.raises(UserError, match="150 of its ids are in .*plan.jsonl too .s000 for one."):
        train.main(toy_arguments(toy, toy / "hidden_states", tmp_path / "refused", "--follow", "--val-data-dir", toy / "hidden_states"))


def test_following_without_validation_keeps_the_last_checkpoint(toy, tmp_path):
    lander = Lander(toy / "hidden_states", tmp_path / "bounded", TOY_BOUND)
    train.main(toy_arguments(toy, tmp_path / "bounded", tmp_path / "followed", "--follow", "--val-ratio", 0))
    lander.join(timeout=20)
    manifest = json.loads((tmp_path / "followed/manifest.json").read_text())
    assert manifest["best"] == {"step": manifest["counts"]["steps"], "accept_length": None} and names(tmp_path / "bounded") == set()
    assert json.loads((tmp_path / "followed/best/eagle3.json").read_text())["prediction"] is None


def test_samples_without_loss_are_released_like_the_others(toy, tmp_path):
    """--max-seq-len leaves nothing of their responses: nobody trains on them, and they must not keep the room of others."""
    lander = Lander(toy / "hidden_states", tmp_path / "bounded", TOY_BOUND)
    train.main(toy_arguments(toy, tmp_path / "bounded", tmp_path / "followed", "--follow", "--max-seq-len", 12, "--batch-tokens", 32))
    lander.join(timeout=20)
    assert names(tmp_path / "bounded") == set(json.loads((tmp_path / "followed/val_ids.json").read_text())["ids"])
    train.main(toy_arguments(toy, toy / "hidden_states", tmp_path / "output", "--order", "plan", "--max-seq-len", 12, "--batch-tokens", 32))
    assert drafter(tmp_path / "followed") == drafter(tmp_path / "output")
    counts = [json.loads((tmp_path / name / "manifest.json").read_text())["counts"] for name in ("followed", "output")]
    assert counts[0] == counts[1] and counts[0]["dropped"][checked.NO_LOSS] > 10 and counts[0]["truncated"] > 10


def test_two_ranks_follow_as_one(toy, tmp_path):
    Lander(toy / "hidden_states", tmp_path / "one", TOY_BOUND)
    train.main(toy_arguments(toy, tmp_path / "one", tmp_path / "output1", "--follow", "--grad-accum", 2, "--dtype", "float64"))
    Lander(toy / "hidden_states", tmp_path / "two", TOY_BOUND)
    done = preloaded.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()), str(ROOT / "04_train.py"),
                          *toy_arguments(toy, tmp_path / "two", tmp_path / "output2", "--follow", "--dtype", "float64")], env=ENV, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(checkpoints(tmp_path / name)[-1][1] / "training_state/state.safetensors") for name in ("output1", "output2"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-9, atol=1e-12)
    assert names(tmp_path / "one") == names(tmp_path / "two") == set(json.loads((tmp_path / "output2/val_ids.json").read_text())["ids"])


def test_a_bound_that_is_too_small_is_one_line_at_the_start(toy, tmp_path):
    """The least bound that it names does: with it the run ends, with 100 kB less it is refused before a sample is waited for."""
    Lander(toy / "hidden_states", tmp_path / "data", 100_000)
    done = run_script("04_train", *toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow"), env=ENV, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "is too small: validation" in done.stderr, done.stderr
    least = float(done.stderr.split("need at least ")[1].split()[0].rstrip("."))
    (tmp_path / "data/bound.json").write_text(json.dumps({"max_disk_gb": least - 1e-4}))
    done = run_script("04_train", *toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow"), env=ENV, timeout=60)
    assert done.returncode == 2 and "is too small" in done.stderr
    Lander(toy / "hidden_states", tmp_path / "enough", int(least * 1e9))
    done = run_script("04_train", *toy_arguments(toy, tmp_path / "enough", tmp_path / "followed", "--follow"), env=ENV, timeout=120)
    assert done.returncode == 0, done.stderr
    assert drafter(tmp_path / "followed")["state"]


def test_killed_between_a_checkpoint_and_its_release(toy, in_order, tmp_path, monkeypatch):
    """With the least bound that does, 03 can only go on when 04, begun again, releases first what its checkpoint has behind it."""
    (tmp_path / "data").mkdir()
    for name in ("plan.jsonl", "landed.jsonl"):
        shutil.copy(toy / "hidden_states" / name, tmp_path / "data")
    (tmp_path / "data/bound.json").write_text('{"max_disk_gb": 1e-6}')
    arguments = toy_arguments(toy, tmp_path / "bounded", tmp_path / "followed", "--follow", "--release-share", 1)  # it saves when it must
    with pytest.raises(UserError) as refused:
        train.main(toy_arguments(toy, tmp_path / "data", tmp_path / "refused", "--follow"))
    Lander(toy / "hidden_states", tmp_path / "bounded", int(float(str(refused.value).split("need at least ")[1].split()[0].rstrip(".")) * 1e9))

    def killed(self, step):
        if step:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Releases, "release", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train.main(arguments)
    let_go(tmp_path / "bounded")
    assert checkpoints(tmp_path / "followed") and not (tmp_path / "bounded/released.jsonl").read_text()
    done = run_script("04_train", *arguments, env=ENV, timeout=100)
    assert done.returncode == 0 and " resume " in done.stdout, done.stderr
    assert drafter(tmp_path / "followed") == in_order


def test_04_says_what_it_waits_for_and_ends_when_told(toy, tmp_path):
    lander = Lander(toy / "hidden_states", tmp_path / "data", TOY_BOUND)
    while not len(names(tmp_path / "data")) > 20:
        time.sleep(0.01)
    lander.bound = 0  # 03 stops here
    process = subprocess.Popen([sys.executable, "-u", str(ROOT / "04_train.py"), *toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow")],
                               env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background job ignores it
    said = next(line for line in process.stdout if "waiting for sample" in line)
    assert "03 has not written for" in said
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


# ------------------------------------------------------------------ faults: nothing is released that is not safe
def spoils(monkeypatch, step: int) -> None:
    """An infinity in AdamW's second moment after `step`: all losses stay finite, one weight never moves again."""
    update = train.Trainer.update

    def spoilt(self, *args):
        sums = update(self, *args)
        if self.step == step:
            self.tensors()["second"][3] = float("inf")
        return sums

    monkeypatch.setattr(train.Trainer, "update", spoilt)


def let_go(data: Path) -> None:
    """Until a run that ended in this process has lost its lock: with the last thread that checks samples, and a collection."""
    path = data / ".follow.lock"
    for _ in range(300):
        gc.collect()
        if not path.exists():
            return
        if lock := lock_file(path):
            return lock.close()
        time.sleep(0.1)
    pytest.fail("the run still holds its lock")


def stopped(argv: list[str], capsys) -> tuple[int, list[str]]:
    """(exit code, lines) of a run in this process that ends early."""
    capsys.readouterr()
    try:
        train.main(argv)
        code = 0
    except SystemExit as end:
        code = end.code
    let_go(Path(argv[argv.index("--data-dir") + 1]))
    return code, capsys.readouterr().out.splitlines()


def test_an_infinity_releases_and_saves_nothing(toy, tmp_path, monkeypatch, capsys):
    lander = Lander(toy / "hidden_states", tmp_path / "data", TOY_BOUND)
    arguments = toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow")
    with monkeypatch.context() as patch:
        spoils(patch, 2)
        code, said = stopped(arguments, capsys)
    assert code == 1 and "not finite: second, after step" in said[-1] and "there is no checkpoint yet. Lower --lr in another --output-dir" in said[-1]
    assert not checkpoints(tmp_path / "output") and not (tmp_path / "data/released.jsonl").read_text()

    with monkeypatch.context() as patch:  # and after samples were released: these had a good checkpoint
        release = Releases.release

        def then_spoils(self, step):
            release(self, step)
            if step:
                spoils(patch, step + 1)

        patch.setattr(Releases, "release", then_spoils)
        code, said = stopped(arguments, capsys)
    [(step, good)] = checkpoints(tmp_path / "output")
    assert code == 1 and f"checkpoint-{step} is untouched. No sample was released since." in said[-1]
    assert "begin both stages in new folders, with a lower --lr" in said[-1] and f"--finetune-from {good} keeps" in said[-1]
    released = {json.loads(line)["id"] for line in (tmp_path / "data/released.jsonl").read_text().splitlines()}
    there = {json.loads(line)["id"] for line in (tmp_path / "data/landed.jsonl").read_text().splitlines()[1:]} - released
    assert released and names(tmp_path / "data") >= there - {max(there)}  # the last one may be on its way
    assert all(torch.isfinite(tensor).all() for tensor in load_file(good / "training_state/state.safetensors").values())
    train.main(arguments)  # it was the memory of a GPU: the same command goes on
    lander.join(timeout=20)


def test_an_undamaged_run_after_an_infinity_is_the_ordinary_one(toy, in_order, tmp_path, monkeypatch, capsys):
    Lander(toy / "hidden_states", tmp_path / "data", TOY_BOUND)
    arguments = toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow")
    with monkeypatch.context() as patch:
        spoils(patch, 20)
        assert stopped(arguments, capsys)[0] == 1
    train.main(arguments)
    assert drafter(tmp_path / "output") == in_order


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_behind_which_samples_were_released_is_refused(toy, in_order, tmp_path, monkeypatch, capsys):
    """The one before would need them again. Put back, the damaged one is gone on from."""
    Lander(toy / "hidden_states", tmp_path / "data", TOY_BOUND)
    arguments, releases = toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow"), []
    with monkeypatch.context() as patch:
        release = Releases.release

        def third(self, step):
            release(self, step)
            releases.append(step)
            if len(releases) == 4:  # the first one was at the start
                sys.exit(9)

        patch.setattr(Releases, "release", third)
        assert stopped(arguments, capsys)[0] == 9
    (older, _), (newest, folder) = checkpoints(tmp_path / "output")[-2:]
    shutil.copytree(folder, tmp_path / "copy")
    flip(folder / "training_state/state.safetensors")
    let_go(tmp_path / "data")
    with pytest.raises(UserError, match=f"checkpoint-{newest} is damaged .*samples were released since the good one of step {older}: they are gone. Put the "
                                        f"damaged one back from a copy, or begin both stages in new folders; --finetune-from .*checkpoint-{older} keeps"):
        train.main(arguments)
    let_go(tmp_path / "data")
    assert [step for step, _ in checkpoints(tmp_path / "output")] == [older, newest]  # nothing was set aside
    shutil.rmtree(folder)
    (tmp_path / "copy").rename(folder)
    train.main(arguments)
    assert drafter(tmp_path / "output") == in_order


def test_a_damaged_checkpoint_where_nothing_was_released(toy, in_order, tmp_path, capsys):
    arguments = toy_arguments(toy, toy / "hidden_states", tmp_path / "output", "--follow", "--save-every", 10)
    train.main(arguments)
    assert drafter(tmp_path / "output") == in_order
    (tmp_path / "output/manifest.json").unlink()
    (_, before), (_, newest) = checkpoints(tmp_path / "output")[-2:]
    flip(newest / "training_state/state.safetensors")
    code, said = stopped(arguments, capsys)
    assert code == 0 and any(f"{newest} is damaged (" in line for line in said) and any(line.endswith(f"resume {before}") for line in said)
    assert drafter(tmp_path / "output") == in_order


def terminated_after(step: int, patch) -> None:
    """This process gets a SIGTERM when 04 has taken this step."""
    update = train.Trainer.update

    def terminates(self, *args):
        sums = update(self, *args)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return sums

    patch.setattr(train.Trainer, "update", terminates)


@pytest.mark.parametrize("step", [1, 15])
def test_sigterm_between_releases(toy, in_order, tmp_path, monkeypatch, capsys, step):
    Lander(toy / "hidden_states", tmp_path / "data", TOY_BOUND)
    arguments = toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow")
    with monkeypatch.context() as patch:
        terminated_after(step, patch)
        code, said = stopped(arguments, capsys)
    assert code == 143 and f"terminated after step {step}: checkpoint-{step} is on the disk" in said[-1]
    train.main(arguments)
    assert drafter(tmp_path / "output") == in_order


@pytest.mark.parametrize("at_release", [False, True])
def test_sigterm_moves_neither_releases_nor_evaluations(toy, tmp_path, monkeypatch, capsys, at_release):
    """With a held-out folder 04 evaluates where it releases: the same steps, wherever the signal fell."""
    monkeypatch.setattr(train, "plot", lambda rows, path: None)
    head = load_file(toy / "target/model.safetensors")["language_model.lm_head.weight"]
    rng, said = np.random.default_rng(8), {}
    held_out = write_hidden_states(tmp_path / "held_out", {f"h{i}": random_sample(30, "tail", head, rng) for i in range(8)})

    def followed(name: str):
        Lander(toy / "hidden_states", tmp_path / f"{name}_data", TOY_BOUND)
        arguments = toy_arguments(toy, tmp_path / f"{name}_data", tmp_path / f"{name}_output", "--follow", "--val-data-dir", held_out)
        code, said[name] = stopped(arguments, capsys)
        return code, arguments

    def rows(name: str) -> list[dict]:
        return [json.loads(line) for line in (tmp_path / f"{name}_output/metrics.jsonl").read_text().splitlines()]

    assert followed("whole")[0] == 0
    releases = [row["step"] for row in rows("whole") if "val_accept_length" in row]
    step = releases[1] if at_release else releases[1] + 1
    assert len(releases) > 4 and releases[1] + 1 < releases[2]
    with monkeypatch.context() as patch:
        terminated_after(step, patch)
        code, arguments = followed("cut")
    assert code == 143 and f"terminated after step {step}" in said["cut"][-1]
    train.main(arguments)
    assert rows("cut") == rows("whole") and names(tmp_path / "cut_data") == set()
    assert drafter(tmp_path / "cut_output")["state"] == drafter(tmp_path / "whole_output")["state"]


def test_sigterm_while_03_is_silent_and_while_its_end_is_awaited(toy, in_order, tmp_path):
    """04 waits for a sample that does not come, later for 03's manifest: both times it saves what it has, and goes."""
    lander = Lander(toy / "hidden_states", tmp_path / "data", TOY_BOUND, last=False)
    while not len(names(tmp_path / "data")) > 55:
        time.sleep(0.01)
    lander.bound = 0  # 03 stops here

    def terminated(when: str) -> str:
        process = preloaded.popen([sys.executable, "-u", str(ROOT / "04_train.py"), *toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow")],
                                  env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = [next(line for line in process.stdout if when in line)]
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
        said.append(process.communicate(timeout=60)[0])
        assert process.returncode == 143, said
        return said[1].splitlines()[-1]

    line = terminated("waiting for sample")
    first = checkpoints(tmp_path / "output")[-1][0]
    assert f"terminated after step {first}: checkpoint-{first} is on the disk" in line
    lander.bound = TOY_BOUND
    line = terminated("waiting for 03_extract to write its manifest")
    last = checkpoints(tmp_path / "output")[-1][0]
    assert last > first and f"terminated after step {last}: checkpoint-{last} is on the disk" in line
    lander.finish()
    train.main(toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow"))
    assert drafter(tmp_path / "output") == in_order


def test_samples_released_to_another_output_are_not_missed_in_silence(toy, tmp_path):
    Lander(toy / "hidden_states", tmp_path / "data", TOY_BOUND).join(0.1)
    train.main(toy_arguments(toy, tmp_path / "data", tmp_path / "output", "--follow"))
    with pytest.raises(UserError, match="released to another output folder"):
        train.main(toy_arguments(toy, tmp_path / "data", tmp_path / "second", "--follow"))
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest | {"bounded": True}))
    with pytest.raises(UserError, match="bounded mode, so most of its samples are gone"):
        train.main(toy_arguments(toy, tmp_path / "data", tmp_path / "third"))


@pytest.mark.parametrize("more", [["--epochs", 2], ["--max-steps", 3], ["--release-share", 0]])
def test_flags_that_cannot_be(toy, tmp_path, more):
    with pytest.raises(UserError, match="--follow is one pass"):
        train.main(toy_arguments(toy, toy / "hidden_states", tmp_path / "output", "--follow", *more))


def test_which_step_has_a_sample_behind_it_by_hand(tmp_path):
    """Positions 1, 3, 6 train in steps 2, 1, 2, position 4 validates; the others have no loss: the step that needs a later one, or the last."""
    samples = Builder(tmp_path)
    for name in "abcdefgh":
        samples.add(name, 10, 5, 5, False)
    planned = Planned(samples.table(), np.full(8, 10), np.array([1, 3, 6]), np.array([4]))
    planned.find_steps([(0, [[1]]), (0, [[0], [2]])])
    assert planned.step_of.tolist() == [1, 2, 1, 1, 3, 2, 2, 2]
    assert [name for name in "abcdefghx" if planned.is_behind(name, 1)] == ["a", "c", "d"]


def test_release_steps_by_hand():
    """Files of 10 bytes; positions 0..7 go to steps 1 1 2 1 2 3, one stays, 3."""
    sizes, step_of = np.full(8, 10), np.array([1, 1, 2, 1, 2, 3, 4, 3])
    # Before step 1: positions 0-3; before step 2, released after 1: 0-4 less three; before 3: all eight less five
    assert release_steps(sizes, step_of, 3, 80, 1.0, 0) == ([], 40)
    assert release_steps(sizes, step_of, 3, 40, 1.0, 0) == ([1, 2], 40)
    assert release_steps(sizes, step_of, 3, 50, 1.0, 0)[0] == [2]
    assert release_steps(sizes, step_of, 3, 80, 0.4, 0)[0] == [1]
    assert release_steps(sizes, step_of, 3, 39, 1.0, 0)[1] == 40
    assert release_steps(sizes, step_of, 3, 40, 1.0, 2) == ([], 30)
