"""04's loop around the pass: schedules, the average, evaluations, several folders, and what all of them leave behind."""
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import preloaded
from conftest import ROOT, free_port, load_script
from train_reference import (learnable_samples, one_thread, random_sample, write_hidden_states,  # noqa: F401
                             write_learnable_run, write_mapping, write_target)
from eagle3 import file_stat, supply, training_plot
from eagle3.batches import seen_in_epoch
from eagle3.checkpoints import checkpoints
from eagle3.metrics import listed, step_metrics
from eagle3.stage import UserError
from eagle3.trainer import average_decay, learning_rate
from eagle3.training_plot import draw, points

train = load_script("04_train")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A run folder with target/, vocab_mapping/, hidden_states/ (40 samples), more/ (20) and held_out/ (10)."""
    return write_learnable_run(tmp_path_factory.mktemp("toy"), {
        "hidden_states": {"r": (40, 40)}, "more": {"m": (20, 20)}, "held_out": {"h": (10, 10)}})


@pytest.fixture
def undrawn(monkeypatch):
    """Without training.png, which takes longer than these few steps."""
    monkeypatch.setattr(train, "plot", lambda rows, path: None)


def arguments(toy: Path, output: Path, *more, data=("hidden_states",)) -> list[str]:
    argv = ["--verifier-path", toy / "target", "--vocab-mapping-dir", toy / "vocab_mapping", "--output-dir", output,
            "--epochs", 1, "--lr", 4e-3, "--max-seq-len", 64, "--batch-tokens", 256, "--num-workers", 1,
            "--log-every", 3]
    for folder in data:
        argv += ["--data-dir", toy / folder]
    return list(map(str, [*argv, *more]))


def trained(toy: Path, output: Path, *more, data=("hidden_states",)) -> list[str]:
    """Train in this process; the lines of the log."""
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main(arguments(toy, output, *more, data=data))
    return logged.getvalue().splitlines()


def rows_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def digests(folder: Path, leave_out=()) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock" and path.name not in leave_out}


# ---- the learning rate ----
def rate(step, scheduler, floor=0.0, decay_ratio=0.2):
    """Of 100 steps, 10 of them warm-up, peak 2."""
    return learning_rate(step, 100, 2.0, 10, scheduler, floor, decay_ratio)


@pytest.mark.parametrize("scheduler, values", [
    ("cosine", {0: 0.2, 9: 2.0, 10: 2.0, 55: 0.2 + 1.8 / 2, 100: 0.2}),  # half-way: half of what lies above the floor
    ("linear", {4: 1.0, 10: 2.0, 28: 0.2 + 1.8 * 0.8, 55: 1.1, 100: 0.2}),
    ("wsd", {9: 2.0, 10: 2.0, 79: 2.0, 80: 2.0, 85: 0.2 + 1.8 * (1 - 0.5), 100: 0.2}),  # a quarter in: 1 - sqrt(1/4)
    ("constant", {0: 0.2, 10: 2.0, 99: 2.0})])
def test_schedules_end_at_the_floor(scheduler, values):
    for step, value in values.items():
        assert rate(step, scheduler, floor=0.1) == pytest.approx(value, rel=1e-12), step
    falling = [rate(step, scheduler, floor=0.1) for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)


def test_wsd_decays_over_the_share_it_is_given():
    assert rate(63, "wsd", decay_ratio=0.4) == pytest.approx(2 * (1 - (3 / 40) ** 0.5))
    assert rate(60, "wsd", decay_ratio=0.4) == 2
    assert [rate(step, "wsd", decay_ratio=0.0) for step in (10, 50, 99)] == [2, 2, 2]
    # never before the warm-up has ended
    assert rate(9, "wsd", decay_ratio=1.0) == 2
    assert rate(10 + 40, "wsd", decay_ratio=1.0) == pytest.approx(2 * (1 - (40 / 90) ** 0.5))


def test_schedule_without_a_floor_is_what_it_was():
    """To the bit: folders begun before go on."""
    import math
    for step in range(10, 100):
        progress = (step - 10) / 90
        assert rate(step, "cosine") == 2.0 * (0.5 * (1 + math.cos(math.pi * progress)))
        assert rate(step, "linear") == 2.0 * (1 - progress) and rate(step, "constant") == 2.0


def test_wsd_in_a_run_and_after_a_kill(toy, tmp_path, undrawn):
    flags = ["--scheduler", "wsd", "--min-lr-ratio", 0.1, "--decay-ratio", 0.5, "--warmup-ratio", 0, "--log-every", 1,
             "--save-every", 2, "--keep-checkpoints", 9, "--ema", 0.9]
    trained(toy, tmp_path / "one", *flags)
    total = read(tmp_path / "one/manifest.json")["counts"]["steps"]
    rates = [row["lr"] for row in rows_of(tmp_path / "one") if "lr" in row]
    assert total == 6
    assert rates == pytest.approx([4e-3] * 4 + [4e-3 * (0.1 + 0.9 * (1 - (i / 3) ** 0.5)) for i in (1, 2)])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for gone in ("checkpoint-4", "checkpoint-6", "best"):
        shutil.rmtree(tmp_path / "two" / gone)
    (tmp_path / "two/manifest.json").unlink()
    assert any("resume" in line for line in trained(toy, tmp_path / "two", *flags))
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    with pytest.raises(UserError, match="decay-ratio: 0.5 there, None now"):
        trained(toy, tmp_path / "one", *flags, "--decay-ratio", 0.2)


# ---- the average ----
def test_average_follows_short_runs():
    assert average_decay(0.999, 1) == 2 / 11 and average_decay(0.999, 90) == 0.91
    assert average_decay(0.999, 8990) == 0.999 and average_decay(0.5, 100) == 0.5


NO_NORMS = "--no-fc-norm", "--no-norm-output"


def test_average_of_a_short_run_has_forgotten_its_random_start(toy, tmp_path, undrawn):
    """At 0.999 alone 97 % of what is exported after 30 steps would be the start."""
    trained(toy, tmp_path / "plain", "--epochs", 5, *NO_NORMS)
    trained(toy, tmp_path / "averaged", "--epochs", 5, "--ema", 0.999, *NO_NORMS)
    length = {name: read(tmp_path / name / "best/eagle3.json")["prediction"]["accept_length"]
              for name in ("plain", "averaged")}
    assert length["plain"] > 2 and length["averaged"] > 0.9 * length["plain"], length
    state = load_file(tmp_path / "averaged/checkpoint-30/training_state/state.safetensors")
    assert not torch.equal(state["master"], state["average"])


def test_average_is_the_recursion_by_hand(toy, tmp_path, undrawn):
    trained(toy, tmp_path / "o", "--ema", 0.3, "--max-steps", 3, "--save-every", 1, "--keep-checkpoints", 3)
    states = [load_file(tmp_path / f"o/checkpoint-{step}/training_state/state.safetensors") for step in (1, 2, 3)]
    # (1 + 2) / (10 + 2); from step 3 on (4 / 13) the flag is the smaller one
    for step, decay in ((2, 3 / 12), (3, 0.3)):
        before, now = states[step - 2], states[step - 1]
        torch.testing.assert_close(now["average"], decay * before["average"] + (1 - decay) * now["master"])


# ---- grad_norm and what is undefined ----
def test_grad_norm_is_that_of_the_last_step_before_clipping(toy, tmp_path, undrawn, monkeypatch):
    norms, update = [], train.Trainer.update

    def noted(self, *args):
        sums = update(self, *args)
        norms.append(float(self.grads.flat.double().square().sum().sqrt()))
        return sums

    monkeypatch.setattr(train.Trainer, "update", noted)
    lines = trained(toy, tmp_path / "o", "--max-grad-norm", 1e-3)
    found = {row["step"]: row["grad_norm"] for row in rows_of(tmp_path / "o") if "loss" in row}
    assert found == pytest.approx({step: norms[step - 1] for step in (1, 3, 6)}) and min(norms) > 1e-2
    assert all(f"| grad_norm {norms[0]:.3g} |" in line for line in lines if "step 1/" in line and "loss " in line)


def test_what_nothing_was_counted_for_is_undefined():
    """Sums of K = 3 steps: losses, rows counted, right in 0..k, right in 0..k-1."""
    sums = torch.tensor([[6.0, 4, 0, 4], [9.0, 3, 0, 0], [0.0, 0, 0, 0]])
    found = step_metrics(sums, np.array([4, 3, 0]))
    assert found == {"loss_0": 1.5, "full_acc_0": 0.0, "cond_acc_0": 0.0, "loss_1": 3.0, "full_acc_1": 0.0,
                     "cond_acc_1": None, "loss_2": None, "full_acc_2": None, "cond_acc_2": None}
    assert listed(found, "cond_acc", 3, 2) == "0.00 - -" and json.loads(json.dumps(found))["cond_acc_1"] is None


# ---- evaluations between checkpoints ----
def test_evaluations_write_no_checkpoint_and_change_no_weight(toy, tmp_path, undrawn):
    flags = ["--epochs", 2, "--save-every", 8, "--keep-checkpoints", 9]
    trained(toy, tmp_path / "without", *flags)
    lines = trained(toy, tmp_path / "with", *flags, "--eval-every", 3)
    evaluated = [row["step"] for row in rows_of(tmp_path / "with") if "val_accept_length" in row]
    assert evaluated == [3, 6, 8, 9, 12] and [step for step, _ in checkpoints(tmp_path / "with")] == [6, 8, 12]
    assert sum("validation step" in line for line in lines) == 5
    left_out = "metrics.jsonl", "training.png", "manifest.json"
    assert digests(tmp_path / "with", left_out) == digests(tmp_path / "without", left_out)  # stage.json as well


def test_best_is_one_of_the_checkpoints(toy, tmp_path, undrawn, monkeypatch):
    """An evaluation between two checkpoints may be the best of the run: nothing of it is on the disk."""
    told, evaluate = iter([9.0, 2.0, 8.0, 1.5]), train.evaluate

    def tells(*args):
        evaluation, length = evaluate(*args), next(told)
        return SimpleNamespace(metrics=evaluation.metrics | {"accept_length": length},
                               prediction=evaluation.prediction | {"accept_length": length})

    monkeypatch.setattr(train, "evaluate", tells)
    trained(toy, tmp_path / "o", "--epochs", 2, "--eval-every", 3, "--save-every", 20)
    found = {row["step"]: row["val_accept_length"] for row in rows_of(tmp_path / "o") if "val_accept_length" in row}
    assert found == {3: 9.0, 6: 2.0, 9: 8.0, 12: 1.5}
    assert read(tmp_path / "o/manifest.json")["best"] == {"step": 6, "accept_length": 2.0} == {
        "step": read(tmp_path / "o/best/eagle3.json")["step"], "accept_length": 2.0}


def test_killed_between_evaluations_ends_in_the_same_bytes(toy, tmp_path, monkeypatch):
    flags = ["--epochs", 2, "--eval-every", 2, "--ema", 0.99]
    trained(toy, tmp_path / "whole", *flags)
    drawn = []

    def dies(rows, path):
        drawn.append(path.exists())
        if len(drawn) == 5:  # at the evaluation of step 10, behind the checkpoint of step 6
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "plot", dies)
        trained(toy, tmp_path / "killed", *flags)
    assert [step for step, _ in checkpoints(tmp_path / "killed")] == [6]
    assert rows_of(tmp_path / "killed")[-1]["step"] == 10
    trained(toy, tmp_path / "killed", *flags)
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_a_folder_begun_by_the_version_before_goes_on(toy, tmp_path, undrawn):
    """Its stage.json has no newer flag, its metrics no grad_norm and a 0 where nothing was counted."""
    trained(toy, tmp_path / "o", "--epochs", 2, *NO_NORMS)
    assert set(read(tmp_path / "o/stage.json")) == {
        "batch-tokens", "beta1", "beta2", "bins-per-step", "draft", "dtype", "ema", "epochs", "export-dtype",
        "finetune-from", "follow", "head-dim", "inputs", "intermediate-size", "loss", "lr", "max-grad-norm",
        "max-position-embeddings", "max-seq-len", "max-steps", "noise-std", "num-draft-steps", "num-heads",
        "num-kv-heads", "order", "rope-theta", "save-every", "scheduler", "seed", "serve-sglang-version", "step-decay",
        "step-weights", "ttt-steps", "val-ratio", "warmup-ratio", "weight-decay"}
    weights = digests(tmp_path / "o/best")
    shutil.rmtree(tmp_path / "o/checkpoint-12"), (tmp_path / "o/manifest.json").unlink()
    before = [{key: value or 0 for key, value in row.items() if key != "grad_norm"} for row in rows_of(tmp_path / "o")]
    (tmp_path / "o/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in before))
    assert any("resume" in line for line in trained(toy, tmp_path / "o", "--epochs", 2))
    after = rows_of(tmp_path / "o")
    kept = [row for row in before if row["step"] <= 6]
    assert after[:len(kept)] == kept and digests(tmp_path / "o/best") == weights and "grad_norm" in after[-2]


# ---- the plot ----
def test_undefined_values_are_left_out_of_the_plot():
    rows = [{"step": 1, "cond_acc_1": None}, {"step": 2, "cond_acc_1": 0.0}, {"step": 3},
            {"step": 4, "cond_acc_1": 0.5}]
    assert points(rows, "cond_acc_1") == ([2, 4], [0.0, 0.5])


@pytest.mark.parametrize("steps", [3, 7])
def test_plot_has_all_four_figures_and_its_legend_below_them(steps):
    def row(step, prefix=""):
        values = {f"{prefix}{name}_{k}": k + step / 10 for name in ("loss", "cond_acc") for k in range(steps)}
        return {"step": step, **values, f"{prefix}accept_length": 1.5}

    rows = [{**row(step), "loss": 3.0, "lr": 1e-4 * step} for step in range(1, 10)] + [row(9, "val_")]
    figure = draw(rows)
    figure.draw_without_rendering()
    assert [axis.get_title().split(" of ")[0] for axis in figure.axes] == ["loss", "conditional accuracy",
                                                                           "accept_length", "learning rate"]
    assert [len(axis.lines) for axis in figure.axes] == [2 * steps, 2 * steps, 2, 1]
    assert list(figure.axes[3].lines[0].get_ydata()) == [row["lr"] for row in rows[:9]]
    [legend] = figure.legends
    assert len(legend.get_texts()) == steps + 2 and not any(axis.get_legend() for axis in figure.axes)
    top = legend.get_window_extent().y1
    assert all(axis.get_tightbbox().y0 >= top for axis in figure.axes)


@pytest.mark.drawn
def test_the_same_rows_draw_the_same_bytes(tmp_path):
    rows = [{"step": step, "loss_0": 3 / step, "cond_acc_0": 0.1 * step, "accept_length": 1.5} for step in range(1, 6)]
    for name in "ab":
        training_plot.plot(rows, tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes() and (tmp_path / "a.png").stat().st_size > 10_000


def test_a_plot_that_cannot_be_drawn_fails_no_run(toy, tmp_path, monkeypatch):
    def broken(rows):
        raise RuntimeError("no fonts\nat all")

    monkeypatch.setattr(training_plot, "draw", broken)
    lines = trained(toy, tmp_path / "o")
    said = [line for line in lines if "not drawn" in line]
    # evaluated; done
    assert len(said) == 2 and said[0].endswith("training.png not drawn: RuntimeError: no fonts at all")
    assert lines[-1].endswith(f"done: {tmp_path / 'o'}") and not list((tmp_path / "o").glob("training.*"))


# ---- several folders, and a held-out one ----
def ids_in(output: Path) -> list[str]:
    return read(output / "val_ids.json")["ids"]


def seen(monkeypatch) -> list[str]:
    """The ids of the samples that are trained on, in order, as the run goes."""
    names = []

    class Noted(supply.Reader):
        def load(self, samples):
            names.extend(sample.id for sample in samples)
            return super().load(samples)

    monkeypatch.setattr(supply, "Reader", Noted)
    return names


def test_weights_are_whole_copies_and_a_share_that_goes_on_by_epoch():
    """Samples 0 to 9 at 2.25, 10 to 13 at 0.5, 14 at 1."""
    weights = [2.25] * 10 + [0.5] * 4 + [1.0]
    epochs = [seen_in_epoch(weights, 0, epoch) for epoch in range(4)]
    times = [np.bincount(order, minlength=15) for order in epochs]
    assert [int(counts[:10].sum()) for counts in times] == [22, 23, 22, 23] and {2, 3} == set(times[0][:10].tolist())
    assert [int(counts[10:14].sum()) for counts in times] == [2] * 4
    assert [int(counts[14]) for counts in times] == [1] * 4
    assert sum(times).tolist() == [9] * 10 + [2] * 4 + [4]  # four epochs: each sample equally often
    assert epochs[0] == seen_in_epoch(weights, 0, 0) != seen_in_epoch(weights, 1, 0)
    assert seen_in_epoch([1.0] * 5, 0, 3) == [0, 1, 2, 3, 4]


def test_several_folders_with_weights(toy, tmp_path, monkeypatch, undrawn):
    names = seen(monkeypatch)
    flags = ["--data-weight", 0.5, 2, "--epochs", 2, "--val-data-dir", toy / "held_out"]
    lines = trained(toy, tmp_path / "o", *flags, data=("hidden_states", "more"))
    times = {name: names.count(name) for name in set(names)}
    assert times == {f"r{i}": 1 for i in range(40)} | {f"m{i}": 4 for i in range(20)}
    assert any(f"{toy / 'more'} | 20 samples | weight 2" in line for line in lines)
    assert ids_in(tmp_path / "o") == sorted(f"h{i}" for i in range(10)) == sorted(
        read(tmp_path / "o/best/eagle3.json")["prediction"]["samples"])
    manifest, stage = read(tmp_path / "o/manifest.json"), read(tmp_path / "o/stage.json")
    sums = [hashlib.sha256((toy / name / "manifest.json").read_bytes()).hexdigest()
            for name in ("hidden_states", "more", "held_out")]
    assert (manifest["inputs"]["hidden_states"], manifest["inputs"]["val_hidden_states"]) == (sums[:2], sums[2])
    assert manifest["counts"] | {"steps": 0} == {"kept": 70, "dropped": {}, "train": 60, "validation": 10,
                                                 "truncated": 0, "steps": 0}
    assert stage["inputs"] == manifest["inputs"] and stage["data-weight"] == [0.5, 2.0] and "val-data-dir" not in stage
    assert sum("| 0 samples known" in line or " 0 read" in line for line in lines) == 3  # one for each folder
    with pytest.raises(UserError, match="begun with another config"):
        trained(toy, tmp_path / "o", *flags, data=("more", "hidden_states"))


def test_killed_over_several_folders_ends_in_the_same_bytes(toy, tmp_path, undrawn):
    flags = ["--data-weight", 1, 1.5, "--epochs", 2, "--keep-checkpoints", 2]
    trained(toy, tmp_path / "one", *flags, data=("hidden_states", "more"))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    last = checkpoints(tmp_path / "two")[-1][1]
    shutil.rmtree(last), shutil.rmtree(tmp_path / "two/best"), (tmp_path / "two/manifest.json").unlink()
    lines = trained(toy, tmp_path / "two", *flags, data=("hidden_states", "more"))
    assert any("resume" in line for line in lines) and digests(tmp_path / "one") == digests(tmp_path / "two")
    assert {name[0] for name in ids_in(tmp_path / "one")} == {"r", "m"}  # a share of both, by a hash of the id


def test_one_folder_is_split_and_kept_as_it_was(toy, tmp_path, undrawn):
    trained(toy, tmp_path / "o", "--max-steps", 1)
    ranked = sorted((f"r{i}" for i in range(40)), key=lambda name: hashlib.sha256(f"0:{name}".encode()).hexdigest())
    assert ids_in(tmp_path / "o") == sorted(ranked[:4])


def test_two_ranks_over_several_folders_equal_one(toy, tmp_path, undrawn):
    flags = ["--data-dir", toy / "more", "--data-weight", 1, 1.5, "--val-data-dir", toy / "held_out", "--eval-every", 2,
             "--ema", 0.9, "--dtype", "float64"]
    trained(toy, tmp_path / "one", "--grad-accum", 2, *flags)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(),
               ROOT / "04_train.py", *arguments(toy, tmp_path / "two", *flags)]
    done = preloaded.run(list(map(str, command)), env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
                         text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [line for line in done.stdout.splitlines() if re.search(r" step \d+/", line) and "tok/s" in line]
    assert steps and all(re.search(r" \| rank wait \d+% \| eta", line) for line in steps)
    one, two = (load_file(checkpoints(tmp_path / name)[-1][1] / "training_state/state.safetensors")
                for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-9, atol=1e-12)
    for left, right in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        assert {k: v or 0 for k, v in left.items()} == pytest.approx({k: v or 0 for k, v in right.items()}, rel=1e-9)
    assert ids_in(tmp_path / "one") == ids_in(tmp_path / "two")


@pytest.fixture
def shared_ids(toy, tmp_path) -> Path:
    """A folder of 30 samples: r0 to r9 as in hidden_states/, r10 to r19 by that name only, m0 to m9 of more/."""
    tensors = load_file(toy / "target/model.safetensors")
    embed, head = (tensors[f"language_model.{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    same, others = learnable_samples(embed, head, 40, 40), learnable_samples(embed, head, 20, 77)
    samples = {f"r{i}": (same if i < 10 else others)[f"r{i}"] for i in range(20)}
    samples["r5"] = {name: tensor[:30].clone() for name, tensor in same["r5"].items()}  # cut shorter: the same sample
    samples |= {name: s for name, s in learnable_samples(embed, head, 20, 20, "m").items() if int(name[1:]) < 10}
    return write_hidden_states(tmp_path / "shared", samples)


def test_a_sample_in_two_folders_is_used_once_and_a_shared_id_is_not_one(toy, tmp_path, shared_ids, monkeypatch,
                                                                         undrawn):
    names = seen(monkeypatch)
    lines = trained(toy, tmp_path / "o", "--val-ratio", 0, data=("hidden_states", shared_ids))
    assert sorted(names) == sorted([f"r{i}" for i in (*range(10), *range(20, 40))] + [f"m{i}" for i in range(10)]
                                   + [f"{folder}/r{i}" for folder in (1, 2) for i in range(10, 20)])
    assert any(f"10 samples of {shared_ids} are left out: {toy / 'hidden_states'} has them too" in line
               for line in lines)
    counts = read(tmp_path / "o/manifest.json")["counts"]
    assert counts["dropped"] == {"also in an earlier --data-dir": 10} and counts["train"] == counts["kept"] == 60


@pytest.mark.parametrize("order", ["shuffle", "plan"])
def test_what_is_held_out_is_not_trained_on(toy, tmp_path, shared_ids, monkeypatch, undrawn, order):
    names, data = seen(monkeypatch), tmp_path / "with_plan"
    shutil.copytree(toy / "hidden_states", data)
    rows = [{"id": f"r{i}", "tokens": 40, "prompt_len": 8} for i in range(40)]
    (data / "plan.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = trained(toy, tmp_path / "o", "--val-data-dir", shared_ids, "--order", order, data=(data,))
    assert sorted(names) == sorted(f"r{i}" for i in range(10, 40))  # r10 to r19 share the name only
    assert any(f"10 samples of {data} are left out: {shared_ids} has them too" in line for line in lines)
    assert len(ids_in(tmp_path / "o")) == 30
    assert read(tmp_path / "o/manifest.json")["counts"]["dropped"] == {"held out by --val-data-dir": 10}


@pytest.mark.drawn
def test_without_validation_the_last_checkpoint_is_the_best(toy, tmp_path):
    flags = ["--val-ratio", 0, "--save-every", 2, "--keep-checkpoints", 9, "--log-every", 1]
    lines = trained(toy, tmp_path / "o", *flags)
    eagle3, manifest = read(tmp_path / "o/best/eagle3.json"), read(tmp_path / "o/manifest.json")
    assert eagle3["prediction"] is None and eagle3["step"] == manifest["counts"]["steps"] == 7
    assert manifest["best"] == {"step": 7, "accept_length": None} and manifest["counts"]["validation"] == 0
    assert ids_in(tmp_path / "o") == [] and "best step 7 | the last one: no validation samples" in lines[-2]
    assert not any("val_accept_length" in row for row in rows_of(tmp_path / "o"))
    assert (tmp_path / "o/training.png").stat().st_size > 10_000
    shutil.copytree(tmp_path / "o", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoint-7"), (tmp_path / "killed/manifest.json").unlink()
    trained(toy, tmp_path / "killed", *flags)
    assert digests(tmp_path / "killed") == digests(tmp_path / "o")


def test_weights_that_are_not_finite_are_not_saved_without_validation(toy, tmp_path, monkeypatch, undrawn):
    update = train.Trainer.update

    def spoils(self, *args):
        sums = update(self, *args)
        self.draft.master.flat[3] = float("nan")
        return sums

    monkeypatch.setattr(train.Trainer, "update", spoils)
    with pytest.raises(SystemExit) as caught:
        trained(toy, tmp_path / "o", "--val-ratio", 0, "--max-steps", 1)
    assert caught.value.code == 1 and not checkpoints(tmp_path / "o")


def another(change):
    """A copy of more/ in which `change(manifest)` was done."""
    def make(toy, tmp_path):
        shutil.copytree(toy / "more", tmp_path / "other")
        manifest = read(tmp_path / "other/manifest.json")
        change(manifest)
        (tmp_path / "other/manifest.json").write_text(json.dumps(manifest))
        return tmp_path / "other"
    return make


REFUSED = {
    "the same folder twice": (lambda toy, tmp: ("--data-dir", toy / "more" / ".." / "hidden_states"), "named twice"),
    "one weight for two": (lambda toy, tmp: ("--data-dir", toy / "more", "--data-weight", 2),
                           "for each of 2 --data-dir"),
    "weight 0": (lambda toy, tmp: ("--data-weight", 0), "one above 0"),
    "plan over two": (lambda toy, tmp: ("--data-dir", toy / "more", "--order", "plan"),
                      "one --data-dir as 03 planned it"),
    "weights of a plan": (lambda toy, tmp: ("--data-weight", 2, "--order", "plan"), "without --data-weight"),
    "no sample in an epoch": (lambda toy, tmp: ("--data-weight", 0.01), "epoch 1 has no sample"),
    "evaluating nothing": (lambda toy, tmp: ("--eval-every", 2, "--val-ratio", 0),
                           "--eval-every needs validation samples"),
    "not finished": (lambda toy, tmp: ("--data-dir", tmp), "03_extract has not finished there"),
    "other layers": (lambda toy, tmp: ("--data-dir", another(lambda m: m.update(capture_layers=[2, 4, 7]))(toy, tmp)),
                     "capture layers [2, 4, 7], "),
    "other dtype": (lambda toy, tmp: ("--data-dir", another(lambda m: m.update(dtype="bfloat16"))(toy, tmp)),
                    "dtype bfloat16, "),
    "other width": (lambda toy, tmp: ("--val-data-dir", another(lambda m: m.update(hidden_size=64))(toy, tmp)),
                    "states of hidden size 64"),
    "released": (lambda toy, tmp: ("--val-data-dir", another(lambda m: m.update(bounded=True))(toy, tmp)),
                 "extracted in bounded mode"),
    "all held out": (lambda toy, tmp: ("--val-data-dir", toy / "hidden_states"),
                     "0 usable samples {'held out by --val-data-dir': 40}"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_folders_that_cannot_be_are_refused_in_one_line(toy, tmp_path, what):
    flags, message = REFUSED[what]
    with pytest.raises(UserError) as caught:
        trained(toy, tmp_path / "o", *flags(toy, tmp_path))
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_folder_of_another_server_is_said(toy, tmp_path, undrawn):
    other = another(lambda manifest: manifest.update(sglang_version="0.5.12"))(toy, tmp_path)
    lines = trained(toy, tmp_path / "o", "--max-steps", 1, data=("hidden_states", other))
    assert any(f"{other} | sglang_version 0.5.12, that of {toy / 'hidden_states'} is 0.5.23" in line for line in lines)


# ---- --loss-on all ----
def master_of(output: Path, step: int) -> torch.Tensor:
    return load_file(output / f"checkpoint-{step}/training_state/state.safetensors")["master"]


def test_loss_on_all_is_training_on_masks_of_ones(tmp_path, undrawn):
    """The same weights, to the bit; validation stays on the responses."""
    head = load_file(write_target(tmp_path / "target") / "model.safetensors")["language_model.lm_head.weight"]
    write_mapping(tmp_path / "vocab_mapping", np.sort(np.random.default_rng(1).choice(97, 61, replace=False)), 97)
    rng = np.random.default_rng(2)
    samples = {f"s{i}": random_sample(int(rng.integers(5, 60)), "tail", head, rng) for i in range(24)}
    ones = {name: sample | {"loss_mask": torch.ones_like(sample["loss_mask"])} for name, sample in samples.items()}
    write_hidden_states(tmp_path / "responses", samples)
    write_hidden_states(tmp_path / "whole", ones)
    flags = "--lr", 1e-3, "--max-seq-len", 50  # cuts some
    lines = trained(tmp_path, tmp_path / "all", "--loss-on", "all", *flags, data=["responses"])
    masks = trained(tmp_path, tmp_path / "masks", *flags, data=["whole"])
    trained(tmp_path, tmp_path / "response", *flags, data=["responses"])
    last = read(tmp_path / "all/manifest.json")["counts"]["steps"]
    assert torch.equal(master_of(tmp_path / "all", last), master_of(tmp_path / "masks", last))
    assert not torch.equal(master_of(tmp_path / "all", last), master_of(tmp_path / "response", last))
    share = [[line.split(" | ")[1] for line in log if " in the loss" in line] for log in (lines, masks)]
    assert share[0] == share[1] and len(share[0]) == 1

    def validated(output: Path) -> dict:
        trained(tmp_path, output, "--loss-on", output.name, "--lr", 1e-12, "--max-steps", 1, data=["responses"])
        return {key: value for row in rows_of(output) for key, value in row.items() if key.startswith("val_")}

    (tmp_path / "still").mkdir()
    assert validated(tmp_path / "still/all") == validated(tmp_path / "still/response")


def test_what_was_checked_without_prompts_is_checked_again_for_them(toy, tmp_path, undrawn, monkeypatch):
    """Records of --loss-on response have no mass of the prompts' tokens."""
    monkeypatch.setattr(file_stat, "SETTLED_NS", 0)
    shutil.copytree(toy / "hidden_states", tmp_path / "hidden_states", ignore=shutil.ignore_patterns("checked"))
    flags = dict(data=(tmp_path / "hidden_states",))
    known = [next(line for line in trained(toy, tmp_path / str(number), "--max-steps", 1, "--loss-on", loss_on, **flags) if " known " in line)
             for number, loss_on in enumerate(("response", "all", "response", "all"))]
    assert [" 0 read" in line for line in known] == [False, False, True, True]
    for left, right in ((0, 2), (1, 3)):
        assert torch.equal(master_of(tmp_path / str(left), 1), master_of(tmp_path / str(right), 1))