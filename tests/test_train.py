"""04_train: exact losses and gradients against the slow reference, the same result on any packing, rank count and after any kill; bad input."""
import contextlib
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import preloaded
from conftest import ROOT, free_port, load_script, run_script
from train_reference import learnable_samples, one_thread, random_sample, ttt_losses, write_hidden_states, write_index, write_mapping, write_sample, write_target  # noqa: F401
from eagle3.batches import Sample, collate, pack, plan_epoch, split_samples
from eagle3.check_records import Records
from eagle3.checked import read_checked, response_mass
from eagle3.checkpoints import checkpoints, repair
from eagle3.drafter import Drafter, Shape
from eagle3.mla import Latent
from eagle3.optimizers import Gradients, adamw_
from eagle3.schedule import plan_epochs
from eagle3.stage import UserError
from eagle3.states import sample_path
from eagle3.target import Target
from eagle3 import checked, ttt
from eagle3.processes import Process
from eagle3.trainer import learning_rate
from eagle3.ttt import ttt_pass

train = load_script("04_train")
SHAPE = Shape(32, 4, 2, 8, 48, 97, 61, 1e-5, 50000.0, 4096)
MLA = Shape(32, 4, 4, 10, 48, 97, 61, 1e-5, 50000.0, 4096, latent=Latent(20, 12, 6, 4, 7))
STEP_WEIGHTS = [1.0, 0.7, 0.3]
K = len(STEP_WEIGHTS)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(folder, embed, head, draft ids) of a small random target."""
    folder = write_target(tmp_path_factory.mktemp("target") / "t")
    tensors = load_file(folder / "model.safetensors")
    draft_ids = torch.from_numpy(np.sort(np.random.default_rng(0).choice(97, 61, replace=False)))
    return folder, tensors["language_model.model.embed_tokens.weight"], tensors["language_model.lm_head.weight"], draft_ids


def make_drafter(target, dtype=torch.float64, shape=SHAPE):
    _, embed, head, draft_ids = target
    draft = Drafter(shape, dtype, torch.device("cpu"), embed, head[draft_ids], draft_ids, 256)
    draft.initialise(0)
    generator = torch.Generator().manual_seed(5)
    for view in draft.master.views.values():
        if view.dim() == 1:
            view.add_(torch.randn(view.shape, generator=generator) * 0.2)
    draft.refresh()
    return draft


def make_samples(target, tmp_path, lengths_and_masks):
    """Files of random samples; those with a row in the loss as 04's Samples; and all of them as tensors."""
    _, _, head, draft_ids = target
    rng, samples, tensors = np.random.default_rng(7), [], []
    for i, (length, mask) in enumerate(lengths_and_masks):
        data = random_sample(length, mask, head, rng)
        write_sample(tmp_path, f"s{i}", data)
        tensors.append(data)
        start = length - int(data["loss_mask"].sum())
        wide = {**data, "last_hidden_states": data["last_hidden_states"].double()}
        mass, _, _ = response_mass(wide, start, head.double(), draft_ids)
        sample = Sample(f"s{i}", sample_path(tmp_path, f"s{i}"), length, start, mass.numpy())
        if sample.counts(1)[0]:
            samples.append(sample)
    return samples, tensors


def passed(draft, samples, step_weights=STEP_WEIGHTS, kind="ce"):
    """Sums and gradients of one packed pass."""
    grads = Gradients(draft.shape.weights(), draft.dtype, "cpu")
    grads.begin(first=True, last=True)
    sums, right = ttt_pass(draft, collate(samples, len(step_weights), 32).to("cpu", draft.dtype), step_weights, grads, kind)
    grads.wait()
    return sums, right, {name: view.clone() for name, view in grads.views.items()}


def assert_close(found, wanted, tolerance):
    for name in wanted:
        assert (found[name] - wanted[name]).norm() <= tolerance * wanted[name].norm(), name


def reference(target, draft, tensors, kind="ce"):
    """Losses per step, their number and right rows from the slow loops, and the gradients of the weighted sum under 04's names."""
    _, embed, head, draft_ids = target
    named = {name: tensor if name == "d2t" else tensor.requires_grad_() for name, tensor in draft.export(draft.master, torch.float64).items()}
    wide = [{name: t.double() if t.is_floating_point() else t for name, t in data.items()} for data in tensors]
    losses, right = ttt_losses(named, draft.shape, embed.double(), head.double(), draft_ids, wide, K, kind)
    per_step = [sum(loss for (_, _, k), loss in losses.items() if k == step) for step in range(K)]
    sum(weight * loss for weight, loss in zip(STEP_WEIGHTS, per_step)).backward()
    holder = make_drafter(target, shape=draft.shape)
    holder.load({name: tensor if name == "d2t" else tensor.grad for name, tensor in named.items()})
    counts = [sum(k == step for _, _, k in losses) for step in range(K)]
    return torch.stack(per_step).detach(), counts, right, holder.master.views


PACKS = {
    "packed": [(1, "all"), (7, "tail"), (127, "tail"), (129, "end"), (5, "end")],
    "1": [(1, "all")],
    "7": [(7, "all")],
    "127": [(127, "end")],
    "129": [(129, "all")],
}


@pytest.mark.parametrize("pack, shape", [*((pack, SHAPE) for pack in PACKS), ("packed", MLA)], ids=[*PACKS, "MLA"])
def test_losses_and_gradients_equal_the_slow_reference(target, tmp_path, pack, shape):
    draft = make_drafter(target, shape=shape)
    samples, tensors = make_samples(target, tmp_path, PACKS[pack])
    if pack == "1":
        assert not samples  # one token predicts nothing: dropped as "no response token"
        return
    losses, counts, right, gradients = reference(target, draft, tensors)
    sums, rows_right, found = passed(draft, samples)
    assert [sum(s.counts(K)[k] for s in samples) for k in range(K)] == counts
    torch.testing.assert_close(sums[:, 0], losses, rtol=1e-6, atol=0)
    assert_close(found, gradients, 1e-6)
    batch = collate(samples, K, 32)
    for sample, ((q0, q1), _) in zip(samples, batch.spans):
        for row in range(q1 - q0):
            for k in range(K):
                if row + k < q1 - q0:
                    assert bool(rows_right[k, q0 + row]) == right[int(sample.id[1:]), sample.rows(K)[0] + row, k]
    single = make_drafter(target, torch.float32, shape)
    single.master.flat.copy_(draft.master.flat)
    sums, _, found = passed(single, samples)
    torch.testing.assert_close(sums[:, 0].double(), losses, rtol=1e-4, atol=0)
    assert_close(found, gradients, 1e-4)


def test_large_scores_and_logits_are_computed_again_and_change_nothing(target, tmp_path, monkeypatch):
    draft = make_drafter(target, shape=MLA)
    samples, _ = make_samples(target, tmp_path, [(23, "tail"), (40, "end")])
    kept = passed(draft, samples)
    again, original = [], ttt.attention_of_sample
    monkeypatch.setattr(ttt, "attention_of_sample", lambda *given: (again.append(1), original(*given))[1])
    monkeypatch.setattr(ttt, "LARGE", 1)
    spared = passed(draft, samples)
    assert len(again) == 2 * K * len(samples)  # of each step and sample: forward, and once more in the backward
    assert all(torch.equal(left, right) for left, right in zip(kept[:2], spared[:2]))
    assert all(torch.equal(kept[2][name], spared[2][name]) for name in kept[2])


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_other_losses_equal_the_slow_reference(target, tmp_path, kind):
    draft = make_drafter(target)
    samples, tensors = make_samples(target, tmp_path, [(23, "tail"), (40, "end")])
    losses, _, _, gradients = reference(target, draft, tensors, kind)
    sums, _, found = passed(draft, samples, kind=kind)
    torch.testing.assert_close(sums[:, 0], losses, rtol=1e-6, atol=0)
    assert_close(found, gradients, 1e-6)


def test_packed_equals_unpacked(target, tmp_path):
    draft = make_drafter(target)
    samples, _ = make_samples(target, tmp_path, [(9, "tail"), (64, "end"), (33, "all"), (12, "tail")])
    sums, _, together = passed(draft, samples)
    apart = [passed(draft, [sample]) for sample in samples]
    torch.testing.assert_close(sums, sum(part[0] for part in apart), rtol=1e-12, atol=1e-12)
    assert_close(together, {name: sum(part[2][name] for part in apart) for name in together}, 1e-12)


def test_leaving_rows_out_changes_no_gradient(target, tmp_path, monkeypatch):
    draft = make_drafter(target)
    samples, _ = make_samples(target, tmp_path, [(60, "tail"), (90, "tail")])
    sums, _, some = passed(draft, samples)
    rows = [sample.rows(K) for sample in samples]
    assert all(query < context for _, context, query in rows)  # there was something to leave out
    monkeypatch.setattr(Sample, "rows", lambda self, steps: (0, self.tokens - 2, self.tokens - 2))
    all_sums, _, all_rows = passed(draft, samples)
    torch.testing.assert_close(sums[:, 0], all_sums[:, 0], rtol=1e-12, atol=1e-12)
    assert_close(some, all_rows, 1e-12)


def test_gradient_is_the_loss_changes_in_small_steps(target, tmp_path):
    """Needs no reference: central differences of the pass's own loss along random directions."""
    draft = make_drafter(target)
    samples, _ = make_samples(target, tmp_path, [(19, "tail"), (31, "end")])
    _, _, gradients = passed(draft, samples)
    weights = torch.tensor(STEP_WEIGHTS, dtype=torch.float64)
    for name, view in draft.master.views.items():
        direction = torch.randn(view.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        ends = []
        for sign in (1, -2):
            view.add_(direction, alpha=sign * 1e-5)
            ends.append(float((passed(draft, samples)[0][:, 0] * weights).sum()))
        view.add_(direction, alpha=1e-5)
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(float((gradients[name] * direction).sum()), rel=1e-6), name


def test_adamw_equals_torchs(target):
    draft = make_drafter(target, torch.float64)
    weight = draft.master.flat.clone().requires_grad_()
    theirs = torch.optim.AdamW([weight], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, 4):
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        weight.grad = gradient * 0.5
        theirs.step()
        adamw_(draft.master.flat, draft.weights.flat, gradient, first, second, torch.tensor(0.5, dtype=torch.float64), 3e-3, step, (0.9, 0.95), 0.1)
    torch.testing.assert_close(draft.master.flat, weight.detach(), rtol=1e-12, atol=1e-15)


def test_a_plan_of_steps_uses_every_sample_once_and_fits_the_bins():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 300).tolist()
    bins = pack(lengths, list(range(300)), 256)
    assert sorted(i for indices in bins for i in indices) == list(range(300))
    assert all(sum(lengths[i] for i in indices) <= 256 for indices in bins)
    assert sum(lengths) / (256 * len(bins)) > 0.9  # how full they are
    samples = [Sample(f"s{i}", Path(), length, 0, None) for i, length in enumerate(lengths)]
    one, two = (plan_epoch(samples, 256, 2, seed, 0) for seed in (0, 1))
    assert one == plan_epoch(samples, 256, 2, 0, 0) != two and one != plan_epoch(samples, 256, 2, 0, 1)
    held = {seed: {s.id for s in split_samples(samples, 0.1, seed)[1]} for seed in (0, 1)}
    assert len(held[0]) == 30 and held[0] != held[1]
    fewer = {s.id for s in split_samples(samples[:200], 0.1, 0)[1]}
    assert len(fewer & held[0]) >= 15  # a hash of the id decides: other samples move few


def test_learning_rates():
    rates = [learning_rate(step, 100, 1.0, 10, "cosine") for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10] == 1.0 and rates[55] == pytest.approx(0.5) and 0 < rates[99] < 0.001
    assert learning_rate(55, 100, 1.0, 10, "linear") == 0.5 and learning_rate(99, 100, 2.0, 0, "constant") == 2.0


# ------------------------------------------------------------------ the script

@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, target):
    """A run folder whose stages 02 and 03 are done: 40 samples."""
    folder, _, head, draft_ids = target
    root = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(3)
    write_mapping(root / "vocab_mapping", draft_ids.numpy(), 97)
    write_hidden_states(root / "hidden_states", {f"s{i:02d}": random_sample(int(rng.integers(8, 60)), "tail", head, rng) for i in range(40)})
    return root, folder


def arguments(run_folder, output, *more, data=None):
    root, folder = run_folder
    return ["--verifier-path", folder, "--data-dir", data or root / "hidden_states", "--vocab-mapping-dir", root / "vocab_mapping", "--output-dir", output,
            "--epochs", 2, "--lr", 1e-3, "--max-seq-len", 64, "--batch-tokens", 128, "--num-workers", 1, "--log-every", 3, *more]


ENV = {"OMP_NUM_THREADS": "1"}


def trained(run_folder, output, *more) -> str:
    """Train in this process; what was logged."""
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main(list(map(str, arguments(run_folder, output, *more))))
    return logged.getvalue()


UNBROKEN = ["--save-every", 4, "--noise-std", 0.05, "--keep-checkpoints", 3]


def contents(output: Path) -> dict:
    return {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(output.rglob("*"))
            if path.is_file() and path.name not in (".lock",)}


@pytest.fixture(scope="module")
def unbroken(run_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("unbroken") / "output"
    done = run_script("04_train", *arguments(run_folder, output, *UNBROKEN), env=ENV)
    assert done.returncode == 0, done.stderr
    return output, done


def test_run_leaves_what_the_contract_names(unbroken):
    output, done = unbroken
    contract = json.loads((ROOT / "configs/artifacts.json").read_text())["stages"]["04_train"]
    for pattern in contract["files"]:
        assert list(output.glob(pattern.replace("<step>", "*").rstrip("/"))), pattern
    size = {"H": 32, "heads*d": 32, "kv_heads*d": 32, "2H": 64, "A*H": 96, "I": 48, "Vd": 61}
    weights = load_file(output / "best/model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == {
        name: [size[n] for n in shape] for name, shape in contract["weights"].items()} | {f"fc_norm.{i}.weight": [32] for i in range(3)}
    assert {tensor.dtype for name, tensor in weights.items() if name != "d2t"} == {torch.bfloat16} and weights["d2t"].dtype == torch.int64
    checkpoint = max(output.glob("checkpoint-*"))
    assert sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()) == sorted(contract["checkpoint"])
    eagle3 = json.loads((output / "best/eagle3.json").read_text())
    assert sorted(eagle3) == sorted(contract["eagle3.json"])
    assert eagle3["capture_layers"] == [2, 4, 6] and eagle3["config"] == json.loads((output / "best/config.json").read_text())
    prediction = eagle3["prediction"]
    verify, correct = (sum(numbers) for numbers in zip(*prediction["samples"].values()))
    assert (verify, correct) == (prediction["verify_steps"], prediction["correct_drafts"]) and prediction["accept_length"] == 1 + correct / verify
    assert sum(prediction["histogram"]) == verify and sum(prediction["accept_by_position"]) == pytest.approx(correct / verify)
    assert sorted(prediction["samples"]) == json.loads((output / "val_ids.json").read_text())["ids"]
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(f"done: {output}") and "\r" not in done.stdout and "config {" in lines[0] and "versions {" in lines[1]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    wanted = {f"{name}_{k}" for name in ("loss", "full_acc", "cond_acc") for k in range(3)} | {"loss", "lr", "grad_norm", "epoch", "step", "accept_length"}
    assert wanted == set(rows[0]) and {f"val_{name}" for name in wanted - {"loss", "lr", "grad_norm", "epoch", "step"}} < set(rows[-1])
    assert rows[0]["full_acc_0"] == rows[0]["cond_acc_0"]


def test_second_call_and_another_config(run_folder, unbroken):
    output, _ = unbroken
    before = contents(output)
    assert "complete already" in trained(run_folder, output, *UNBROKEN) and contents(output) == before
    with pytest.raises(UserError, match="noise-std: 0.05 there, 0.1 now"):
        trained(run_folder, output, *UNBROKEN, "--noise-std", 0.1)
    assert contents(output) == before


# Runs 04 in its own process and kills that with SIGKILL when a function of eagle3.checkpoints is called for the N-th time
DIES_AT = f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(ROOT / 'scripts')!r})
from eagle3 import checkpoints
name, left, *sys.argv = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
original = getattr(checkpoints, name)
def dies(*args, **more):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **more)
setattr(checkpoints, name, dies)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_killed_three_times_equals_unbroken(run_folder, unbroken, tmp_path):
    """kill -9 while a checkpoint is written, before best/ is made of it, and before a later one is renamed: the same bytes in the end."""
    wanted, _ = unbroken
    output = tmp_path / "output"
    command = [str(ROOT / "04_train.py"), *map(str, arguments(run_folder, output, *UNBROKEN))]
    for name, call, left in (("save_file", 2, "checkpoint-4.tmp"), ("make_best", 1, "checkpoint-4"), ("replace_folder", 2, "checkpoint-8.tmp")):
        killed = preloaded.run([sys.executable, "-c", DIES_AT, name, str(call), *command], env={**os.environ, **ENV}, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL and (output / left).exists(), killed.stderr
    done = preloaded.run([sys.executable, *command], env={**os.environ, **ENV}, capture_output=True, text=True)
    assert done.returncode == 0 and "resume" in done.stdout, done.stderr
    assert contents(output) == contents(wanted)


def test_best_is_restored_when_a_crash_tore_it(run_folder, unbroken, tmp_path):
    output = tmp_path / "output"
    subprocess.run(["cp", "-r", unbroken[0], output], check=True)
    before = contents(output)
    for lost in ("best", "checkpoint-16"):  # between the two renames: the old one aside, the new one not yet there
        (output / lost).rename(output / f"{lost}.old")
    (output / "checkpoint-99.tmp").mkdir()
    repair(output)
    assert contents(output) == before and not list(output.glob("*.old")) + list(output.glob("*.tmp"))


def test_two_ranks_equal_one(run_folder, tmp_path):
    trained(run_folder, tmp_path / "one", "--grad-accum", 2, "--dtype", "float64", "--noise-std", 0.05)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()), str(ROOT / "04_train.py"),
               *map(str, arguments(run_folder, tmp_path / "two", "--dtype", "float64", "--noise-std", 0.05))]
    done = preloaded.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = checkpoints(tmp_path / "one")[-1][0]
    one, two = (load_file(tmp_path / name / f"checkpoint-{steps}/training_state/state.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-9, atol=1e-12)
    rows = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("one", "two")]
    for left, right in zip(*rows, strict=True):
        assert [key for key, value in left.items() if value is None] == [key for key, value in right.items() if value is None]
        assert {k: v or 0 for k, v in left.items()} == pytest.approx({k: v or 0 for k, v in right.items()}, rel=1e-9)
    assert contents(tmp_path / "one")["val_ids.json"] == contents(tmp_path / "two")["val_ids.json"]


def test_options_change_what_they_should(run_folder, tmp_path):
    trained(run_folder, tmp_path / "a", "--max-steps", 4, "--export-dtype", "float32")
    first = load_file(tmp_path / "a/best/model.safetensors")
    trained(run_folder, tmp_path / "b", "--max-steps", 1, "--lr", 0, "--export-dtype", "float32", "--finetune-from", tmp_path / "a/best")
    again = load_file(tmp_path / "b/best/model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)  # lr 0: the weights it started from
    eagle3 = json.loads((tmp_path / "a/best/eagle3.json").read_text())
    (tmp_path / "a/best/eagle3.json").write_text(json.dumps(eagle3 | {"capture_layers": [3, 5, 7]}))
    with pytest.raises(UserError, match=r"trained on layers \[3, 5, 7\]"):
        trained(run_folder, tmp_path / "d", "--finetune-from", tmp_path / "a/best")
    (tmp_path / "a/best/eagle3.json").unlink()  # another trainer's drafter has none
    (tmp_path / "a/best/model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(UserError, match="a/best/model.safetensors: "):
        trained(run_folder, tmp_path / "d", "--finetune-from", tmp_path / "a/best")
    (tmp_path / "a/best/model.safetensors").unlink()
    with pytest.raises(UserError, match="a/best: no weights there"):
        trained(run_folder, tmp_path / "d", "--finetune-from", tmp_path / "a/best")
    trained(run_folder, tmp_path / "c", "--max-steps", 4, "--export-dtype", "float32", "--ema", 0.9, "--loss", "lk", "--scheduler", "linear",
            "--step-weights", 1, 0.5, 0.25)
    state = load_file(tmp_path / "c/checkpoint-4/training_state/state.safetensors")
    exported = load_file(tmp_path / "c/checkpoint-4/model.safetensors")
    assert not torch.equal(state["average"], state["master"])
    assert torch.equal(exported["lm_head.weight"].flatten(), state["average"][:61 * 32])  # lm_head lies first


def test_training_learns(target, tmp_path, monkeypatch):
    """Answers in which each token decides the next are learnt within a hundred steps: the walk finds whole drafts accepted."""
    folder, embed, head, _ = target
    samples = learnable_samples(embed, head, 60)
    monkeypatch.setattr(train, "plot", lambda rows, path: None)  # 20 pictures take longer than the steps
    write_hidden_states(tmp_path / "hidden_states", samples)
    write_mapping(tmp_path / "vocab_mapping", np.arange(97), 97)
    trained((tmp_path, folder), tmp_path / "output", "--epochs", 20, "--lr", 4e-3, "--batch-tokens", 256, "--save-every", 1000,
            "--num-draft-steps", 2)
    assert json.loads((tmp_path / "output/best/eagle3.json").read_text())["prediction"]["accept_length"] > 2.7  # 3 at most
    rows = [json.loads(line) for line in (tmp_path / "output/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row][-1]
    assert last["full_acc_2"] > 0.5 and last["accept_length"] == 1 + last["full_acc_0"] + last["full_acc_1"]  # of 2 draft steps, not of 3 TTT steps


# ------------------------------------------------------------------ bad input

def spoiled(run_folder, tmp_path, change, count=1):
    """A copy of hidden_states/ in which `change(path, row)` was done to the first `count` samples. It may return a new index row."""
    root, _ = run_folder
    data = tmp_path / "hidden_states"
    subprocess.run(["cp", "-r", root / "hidden_states", data], check=True)
    rows = [json.loads(line) for line in (data / "index.jsonl").read_text().splitlines()]
    for i in range(count):
        rows[i] = change(sample_path(data, rows[i]["id"]), rows[i]) or rows[i]
    write_index(data, rows)
    return data


def rewrite(**changed):
    """Change tensors (functions of the old ones) or metadata of a file, with a checksum that fits."""
    def change(path, row):
        tensors = load_file(path)
        tensors |= {name: changed[name](tensors[name]) for name in tensors if name in changed}
        return write_sample(path.parent.parent, row["id"], tensors, layers=changed.get("layers", "2,4,6"), target=changed.get("target", "toy"))
    return change


def poke(value):
    def change(tensor):
        tensor[1, 2] = value
        return tensor
    return change


def flip_byte(path, row):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


BAD_SAMPLES = {
    "other shape or dtype": rewrite(last_hidden_states=lambda t: t[:, :-1].contiguous()),
    "no response token": rewrite(loss_mask=torch.zeros_like),
    "not finite": rewrite(aux_hidden_states=poke(float("nan"))),
    "ids beyond the vocabulary": rewrite(input_ids=lambda t: t + 97),
    "checksum": flip_byte,
    "torn": lambda path, row: path.write_bytes(path.read_bytes()[:-10]) and None,
    "missing": lambda path, row: path.unlink(),
    "other target, layers or id": rewrite(layers="3,4,6"),
    "states from before the final norm": rewrite(last_hidden_states=lambda t: 3 * t),
}


@pytest.mark.parametrize("reason", BAD_SAMPLES)
def test_a_bad_sample_is_named_skipped_and_counted(run_folder, tmp_path, reason, monkeypatch, capsys):
    data = spoiled(run_folder, tmp_path, BAD_SAMPLES[reason])
    monkeypatch.setattr(checked, "MAX_BAD", 0.1)
    argv = list(map(str, arguments(run_folder, tmp_path / "output", "--max-steps", 1, data=data)))
    train.main(argv)
    assert json.loads((tmp_path / "output/manifest.json").read_text())["counts"]["dropped"] == {reason: 1}
    assert f"skipped {sample_path(data, 's00')} | {reason}" in capsys.readouterr().out


def test_every_damaged_sample_is_named(run_folder, tmp_path, monkeypatch):
    without_mask = rewrite(loss_mask=torch.zeros_like)
    data = spoiled(run_folder, tmp_path, lambda path, row: without_mask(path, row) if row["id"] == "s00" else flip_byte(path, row), count=16)
    with pytest.raises(UserError, match=re.escape(f"15 of 40 samples are bad ({{'checksum': 15, 'no response token': 1}}; the first: {sample_path(data, 's01')})")):
        train.main(list(map(str, arguments(run_folder, tmp_path / "output", data=data))))
    monkeypatch.setattr(checked, "MAX_BAD", 0.5)
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main(list(map(str, arguments(run_folder, tmp_path / "second", "--max-steps", 1, data=data))))
    assert [re.search(r"(s\d\d).safetensors \| checksum", line)[1] for line in logged.getvalue().splitlines() if "checksum" in line] == [f"s{i:02d}" for i in range(1, 16)]


def test_ranks_check_all_files_whenever_they_begin(run_folder, target, tmp_path, monkeypatch):
    """A rank that begins when another is through takes its own share, no other one; and what is missing is not passed over."""
    root, _ = run_folder
    index = [json.loads(line) for line in (root / "hidden_states/index.jsonl").read_text().splitlines()]
    facts = {"hidden_size": 32, "dtype": "float32", "target": "toy", "capture_layers": [2, 4, 6]}
    source = SimpleNamespace(folder=root / "hidden_states", index=index, facts=facts, draft_ids=target[3], prompts=False, begun=False,
                             target=SimpleNamespace(final_norm=lambda: None))
    monkeypatch.setattr(checked, "CHECK_CHUNK", 6)
    records = Records(tmp_path / "checked", tmp_path / "own", Process(0, 1, torch.device("cpu"), torch.float32))
    files = {}
    for rank in range(2):
        process = Process(rank, 2, torch.device("cpu"), torch.float32)
        own, read, _ = checked.check_files(source, records, target[2], process, 1)
        assert read == sum(len(index[start:start + 6]) for start in own) and not own.keys() & files.keys()
        files |= own
    files = [files[start] for start in sorted(files)]
    samples, problems, _ = read_checked(root / "hidden_states", files, 64)
    assert sorted([sample.id for sample in samples] + list(problems)) == [row["id"] for row in index]
    files[1].write_bytes(b"")
    with pytest.raises(UserError, match="00000006-.*.safetensors: not readable"):
        read_checked(root / "hidden_states", files, 64)


def test_too_many_bad_samples_stop_the_run(run_folder, tmp_path):
    data = spoiled(run_folder, tmp_path, flip_byte, count=2)
    done = run_script("04_train", *arguments(run_folder, tmp_path / "output", data=data), env=ENV)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "2 of 40 samples are bad" in done.stderr and "checksum" in done.stderr and str(sample_path(data, "s00")) in done.stderr


def test_states_of_another_target_stop_the_run(run_folder, tmp_path):
    data = spoiled(run_folder, tmp_path, rewrite(last_hidden_states=lambda t: -t), count=40)
    with pytest.raises(UserError, match="are the argmax of lm_head"):
        train.main(list(map(str, arguments(run_folder, tmp_path / "output", data=data))))


@pytest.mark.parametrize("spoilt, steps", [("master", 6), ("first", 4)])
def test_a_loss_that_is_not_finite_stops_and_names_the_batch(run_folder, tmp_path, capsys, spoilt, steps):
    """master: the loss of step 4 shows it. first (AdamW's moment): step 4, the last, has a finite loss and ruins the weights; its validation shows it."""
    trained(run_folder, tmp_path / "output", "--max-steps", 3)
    (tmp_path / "output/manifest.json").unlink()
    state = tmp_path / "output/checkpoint-3/training_state"
    tensors = load_file(state / "state.safetensors")
    tensors[spoilt][5] = float("inf")
    save_file(tensors, state / "state.safetensors")
    (state / "SHA256SUMS").unlink()
    stage = json.loads((tmp_path / "output/stage.json").read_text())
    (tmp_path / "output/stage.json").write_text(json.dumps(stage | {"max-steps": steps}))
    before = contents(tmp_path / "output/checkpoint-3")
    with pytest.raises(SystemExit) as caught:
        train.main(list(map(str, arguments(run_folder, tmp_path / "output", "--max-steps", steps))))
    said = capsys.readouterr().out
    assert caught.value.code == 1 and contents(tmp_path / "output/checkpoint-3") == before and checkpoints(tmp_path / "output")[-1][0] == 3
    if spoilt == "first":
        assert "validation loss is not finite after step 4" in said
        return
    assert "not finite in step 4" in said
    named = json.loads((tmp_path / "output/not-finite-4-rank0.json").read_text())
    assert named["samples"] and all(Path(path).is_file() for path in named["samples"])


def quantised(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace("lm_head.weight", "lm_head.weight_packed"): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


def as_int8(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, folder / "model.safetensors")


BAD_RUNS = {
    "no target there": (lambda root, target: target.rename(target.with_name("elsewhere")), "config.json"),
    "a target without weights": (lambda root, target: (target / "model.safetensors").unlink(), "no safetensors"),
    "packed head": (lambda root, target: quantised(target), "lm_head.weight_packed: quantised"),
    "int8 head": (lambda root, target: as_int8(target), "quantised"),
    "target of another width": (lambda root, target: (target / "config.json").write_text((target / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 48')), "hidden size"),
    "vocabulary map of another target": (lambda root, target: np.save(root / "vocab_mapping/t2d.npy", np.ones(98, bool)), "02_build_vocab"),
    "d2t that are ids": (lambda root, target: np.save(root / "vocab_mapping/d2t.npy", np.nonzero(np.load(root / "vocab_mapping/t2d.npy"))[0]), "do not agree"),
    "no vocabulary map": (lambda root, target: (root / "vocab_mapping/manifest.json").unlink(), "02_build_vocab"),
    "03 not finished": (lambda root, target: (root / "hidden_states/manifest.json").unlink(), "03_extract"),
    "one sample": (lambda root, target: write_index(root / "hidden_states", [json.loads((root / "hidden_states/index.jsonl").read_text().split("\n")[0])]), "1 usable samples"),
    "another index": (lambda root, target: (root / "hidden_states/index.jsonl").write_text(""), "manifest.json was written for"),
    "target without a size": (lambda root, target: (target / "config.json").write_text((target / "config.json").read_text().replace("vocab_size", "size")), "no vocab_size there"),
    "embedding of another size": (lambda root, target: save_file({name: t[:-1].clone() if "embed" in name else t for name, t in load_file(target / "model.safetensors").items()},
                                                                target / "model.safetensors"), "embed_tokens.weight has shape (96, 32), config.json says (97, 32)"),
    "torn target": (lambda root, target: (target / "model.safetensors").write_bytes(b"x" * 20), "model.safetensors: not readable"),
}


@pytest.mark.parametrize("what", BAD_RUNS)
def test_bad_input_is_one_line_and_exit_2(run_folder, tmp_path, what, capsys):
    root, folder = run_folder
    subprocess.run(["cp", "-r", root, tmp_path / "run"], check=True)
    subprocess.run(["cp", "-r", folder, tmp_path / "target"], check=True)
    change, message = BAD_RUNS[what]
    change(tmp_path / "run", tmp_path / "target")
    argv = list(map(str, arguments((tmp_path / "run", tmp_path / "target"), tmp_path / "output")))
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        train.main(argv)
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "output/manifest.json").exists()


@pytest.mark.parametrize("flags", [["--ttt-steps", 0], ["--val-ratio", 1.5], ["--step-weights", 1, 2], ["--num-draft-steps", 4, "--ttt-steps", 3],
                                   ["--num-workers", -1], ["--max-grad-norm", 0], ["--lr", "nan"], ["--warmup-ratio", 5], ["--device", "cuda:1"], ["--val-ratio", 0.99],
                                   ["--step-weights", 1, 1, -1], ["--serve-sglang-version", "latest"], ["--serve-sglang-version", "0.5.12"]], ids=str)
def test_flags_that_cannot_be(run_folder, tmp_path, flags):
    argv = list(map(str, arguments(run_folder, tmp_path / "output", *flags)))
    if flags[1] == "0.5.12":
        train.main(argv + ["--max-steps", "1"])  # layers 2,4,6 can be had in every version
        assert json.loads((tmp_path / "output/best/config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
        return
    with pytest.raises(UserError):
        train.main(argv)


def test_fewer_micro_batches_than_ranks_are_refused():
    samples = [Sample(f"s{i}", Path(), 40, 3, None) for i in range(36)]
    args = SimpleNamespace(order="shuffle", grad_accum=1, epochs=2, batch_tokens=128, seed=0, max_steps=None, data_weight=None)
    with pytest.raises(UserError, match="36 training samples fill 12 micro-batches, fewer than the 50 ranks"):
        plan_epochs(args, samples, SimpleNamespace(world=50))


@pytest.mark.parametrize("prefix, dtype", [("", torch.float16), ("language_model.", torch.bfloat16)])
def test_reads_single_tensors_of_a_sharded_target(tmp_path, prefix, dtype):
    folder = write_target(tmp_path / "t", prefix=prefix, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-{i:05d}-of-00004.safetensors" for i, name in enumerate(tensors)}
    for name, shard in shards.items():
        save_file({name: tensors[name]}, folder / shard)
    (folder / "model-00003-of-00004.safetensors").write_bytes(b"never read")
    weight_map = shards | {f"{prefix}model.layers.0.mlp.gate_proj.weight_packed": "model-00003-of-00004.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = Target(folder)
    assert torch.equal(read.tensor("embed"), tensors[f"{prefix}model.embed_tokens.weight"])
    assert torch.equal(read.tensor("head"), tensors[f"{prefix}lm_head.weight"]) and read.tensor("head").dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "mla"])
def test_fused_kernels_equal_the_plain_operations(architecture):
    done = subprocess.run([sys.executable, ROOT / "scripts/bench_train.py", "--check-only", "--architecture", architecture], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
