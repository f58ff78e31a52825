"""04's loop around the pass: schedules, the average, evaluations, several folders, and what all of them leave behind."""
import contextlib
import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import load_script
from train_reference import learnable_samples, write_hidden_states, write_mapping, write_target
from eagle3 import training_plot
from eagle3.checkpoints import checkpoints
from eagle3.metrics import listed, step_metrics
from eagle3.stage import UserError
from eagle3.trainer import average_decay, learning_rate
from eagle3.training_plot import draw, points

train = load_script("04_train")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A run folder with target/, vocab_mapping/, hidden_states/ (40 samples), more/ (20) and held_out/ (10)."""
    root = tmp_path_factory.mktemp("toy")
    tensors = load_file(write_target(root / "target") / "model.safetensors")
    embed, head = (tensors[f"language_model.{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    for folder, count, prefix in (("hidden_states", 40, "r"), ("more", 20, "m"), ("held_out", 10, "h")):
        write_hidden_states(root / folder, learnable_samples(embed, head, count, count, prefix))
    write_mapping(root / "vocab_mapping", np.arange(97), 97)
    return root


@pytest.fixture
def undrawn(monkeypatch):
    """Without training.png, which takes longer than these few steps."""
    monkeypatch.setattr(train, "plot", lambda rows, path: None)


def trained(toy: Path, output: Path, *more, data=("hidden_states",)) -> list[str]:
    """Train in this process; the lines of the log."""
    argv = ["--verifier-path", toy / "target", "--vocab-mapping-dir", toy / "vocab_mapping", "--output-dir", output,
            "--epochs", 1, "--lr", 4e-3, "--max-seq-len", 64, "--batch-tokens", 256, "--num-workers", 1,
            "--log-every", 3, *more]
    for folder in data:
        argv += ["--data-dir", toy / folder]
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main(list(map(str, argv)))
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
    assert rate(63, "wsd", decay_ratio=0.4) == pytest.approx(2 * (1 - (3 / 40) ** 0.5)) and rate(60, "wsd", decay_ratio=0.4) == 2
    assert [rate(step, "wsd", decay_ratio=0.0) for step in (10, 50, 99)] == [2, 2, 2]
    # never before the warm-up has ended
    assert rate(9, "wsd", decay_ratio=1.0) == 2 and rate(10 + 40, "wsd", decay_ratio=1.0) == pytest.approx(2 * (1 - (40 / 90) ** 0.5))


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
    assert total == 6 and rates == pytest.approx([4e-3] * 4 + [4e-3 * (0.1 + 0.9 * (1 - (i / 3) ** 0.5)) for i in (1, 2)])
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


def test_average_of_a_short_run_has_forgotten_its_random_start(toy, tmp_path, undrawn):
    """At 0.999 alone 97 % of what is exported after 30 steps would be the start."""
    trained(toy, tmp_path / "plain", "--epochs", 5)
    trained(toy, tmp_path / "averaged", "--epochs", 5, "--ema", 0.999)
    length = {name: read(tmp_path / name / "best/eagle3.json")["prediction"]["accept_length"] for name in ("plain", "averaged")}
    assert length["plain"] > 2 and length["averaged"] > 0.9 * length["plain"], length
    state = load_file(tmp_path / "averaged/checkpoint-30/training_state/state.safetensors")
    assert not torch.equal(state["master"], state["average"])


def test_average_is_the_recursion_by_hand(toy, tmp_path, undrawn):
    trained(toy, tmp_path / "o", "--ema", 0.3, "--max-steps", 3, "--save-every", 1, "--keep-checkpoints", 3)
    states = [load_file(tmp_path / f"o/checkpoint-{step}/training_state/state.safetensors") for step in (1, 2, 3)]
    for step, decay in ((2, 3 / 12), (3, 0.3)):  # (1 + 2) / (10 + 2); from step 3 on (4 / 13) the flag is the smaller one
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
        evaluation = evaluate(*args)
        evaluation.metrics["accept_length"] = evaluation.prediction["accept_length"] = next(told)
        return evaluation

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
    assert [step for step, _ in checkpoints(tmp_path / "killed")] == [6] and rows_of(tmp_path / "killed")[-1]["step"] == 10
    trained(toy, tmp_path / "killed", *flags)
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_a_folder_begun_by_the_version_before_goes_on(toy, tmp_path, undrawn):
    """Its stage.json has no newer flag, its metrics no grad_norm and a 0 where nothing was counted."""
    trained(toy, tmp_path / "o", "--epochs", 2)
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
    rows = [{"step": 1, "cond_acc_1": None}, {"step": 2, "cond_acc_1": 0.0}, {"step": 3}, {"step": 4, "cond_acc_1": 0.5}]
    assert points(rows, "cond_acc_1") == ([2, 4], [0.0, 0.5])


@pytest.mark.parametrize("steps", [3, 7])
def test_plot_has_all_four_figures_and_its_legend_below_them(steps):
    def row(step, prefix=""):
        values = {f"{prefix}{name}_{k}": k + step / 10 for name in ("loss", "cond_acc") for k in range(steps)}
        return {"step": step, **values, f"{prefix}accept_length": 1.5}

    rows = [{**row(step), "loss": 3.0, "lr": 1e-4 * step} for step in range(1, 10)] + [row(9, "val_")]
    figure = draw(rows)
    figure.draw_without_rendering()
    assert [axis.get_title().split(" of ")[0] for axis in figure.axes] == ["loss", "conditional accuracy", "accept_length", "learning rate"]
    assert [len(axis.lines) for axis in figure.axes] == [2 * steps, 2 * steps, 2, 1]
    assert list(figure.axes[3].lines[0].get_ydata()) == [row["lr"] for row in rows[:9]]
    [legend] = figure.legends
    assert len(legend.get_texts()) == steps + 2 and not any(axis.get_legend() for axis in figure.axes)
    top = legend.get_window_extent().y1
    assert all(axis.get_tightbbox().y0 >= top for axis in figure.axes)


def test_a_plot_that_cannot_be_drawn_fails_no_run(toy, tmp_path, monkeypatch):
    def broken(rows):
        raise RuntimeError("no fonts\nat all")

    monkeypatch.setattr(training_plot, "draw", broken)
    lines = trained(toy, tmp_path / "o")
    said = [line for line in lines if "not drawn" in line]
    assert len(said) == 2 and said[0].endswith("training.png not drawn: RuntimeError: no fonts at all")  # evaluated; done
    assert lines[-1].endswith(f"done: {tmp_path / 'o'}") and not list((tmp_path / "o").glob("training.*"))
