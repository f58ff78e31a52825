"""04 --evaluate: the accept_length of finished drafters on held-out states, its intervals, and how two of them compare."""
import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import preloaded
from conftest import ROOT, free_port, load_script
from train_reference import one_thread, write_learnable_run, write_mapping  # noqa: F401
from eagle3.acceptance import Sampled, predicted
from eagle3.batches import Sample, collate
from eagle3.drafter_files import read_drafter
from eagle3.evaluation import accept_figures, difference, make_drafter, with_interval
from eagle3.processes import Process
from eagle3.sampling import Sampling
from eagle3.stage import UserError
from eagle3.target import Target
from eagle3.ttt import ttt_pass

train = load_script("04_train")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A run folder with a target, hidden_states/ (40 samples), held_out/ (12 of gsm, 8 of code), and two drafters trained on the first:
    short/ (12 steps) and long/ (36), exported in float32."""
    root = write_learnable_run(tmp_path_factory.mktemp("toy"), {
        "hidden_states": {"r": (40, 40)}, "held_out": {"gsm-": (12, 5), "code-": (8, 6)}})
    write_mapping(root / "half", np.arange(0, 97, 2), 97)
    for name, epochs in (("short", 2), ("long", 6)):
        call(toy_flags(root, "hidden_states"), "--vocab-mapping-dir", root / "vocab_mapping", "--output-dir",
             root / name, "--epochs", epochs,
             "--lr", 4e-3, "--export-dtype", "float32", "--save-every", 100)
    return root


def toy_flags(root: Path, data: str) -> list:
    return ["--verifier-path", root / "target", "--data-dir", root / data, "--max-seq-len", 64, "--batch-tokens", 256,
            "--num-workers", 1]


def call(*argv) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main([str(word) for part in argv for word in (part if isinstance(part, list) else [part])])
    return logged.getvalue().splitlines()


def evaluated(toy: Path, output: Path, *more, data="held_out") -> tuple[dict, list[str]]:
    """(evaluate.json, the lines that were said)"""
    said = call("--evaluate", *more, toy_flags(toy, data), "--output-dir", output)
    return json.loads((output / "evaluate.json").read_text()), said


# ---- figures, by hand ----
def test_prediction_is_the_sum_over_samples():
    """Verify steps with 0, 1, 2 correct drafts: a has 1, 0, 2 (3 steps, 4 correct), b 2, 1, 0 (3 steps, 1 correct)."""
    found = predicted({"b": [2, 1, 0], "a": [1, 0, 2]})
    assert found == {"num_steps": 2, "accept_length": 1 + 5 / 6, "verify_steps": 6, "correct_drafts": 5,
                     "histogram": [3, 1, 2],
                     "accept_by_position": [3 / 6, 2 / 6], "val_ids_file": "val_ids.json",
                     "samples": {"a": [3, 4], "b": [3, 1]}}
    assert list(found["samples"]) == ["a", "b"]


def test_intervals_by_hand():
    """Samples that are all alike leave no doubt; three of ten twice as long do; fewer than five say nothing."""
    alike = {f"s{i}": [1, 1] for i in range(10)}
    assert accept_figures(alike)["interval"] == [1.5, 1.5] and accept_figures(alike)["accept_length"] == 1.5
    assert accept_figures(dict(list(alike.items())[:4]))["interval"] is None
    mixed = {f"s{i}": [0, 2] if i < 3 else [2, 0] for i in range(10)}  # of two verify steps each: all right, or none
    low, high = accept_figures(mixed)["interval"]
    # the share of the good ones in a resample is binomial(10, 0.3) / 10: 0.9 and 99.1 % of it (few samples) at 0 and 0.7
    assert accept_figures(mixed)["accept_length"] == 1.3 and low == 1.0 and high == pytest.approx(1.7)


def test_a_paired_difference_is_surer_than_the_lengths():
    """The second drafter gets one draft of four more in every sample, however they differ: the difference has no spread."""
    first = {f"s{i}": [4 - i % 3, i % 3] for i in range(12)}
    second = {name: [left - 1, right + 1] for name, (left, right) in first.items()}
    found = difference(first, dict(reversed(second.items())))  # paired by id, not by place
    assert found["accept_length"] == 0.25 and found["interval"] == pytest.approx([0.25, 0.25])
    low, high = accept_figures(first)["interval"]
    assert high - low > 0.1 and with_interval(found, "+.3f") == "+0.250 (+0.250 to +0.250)"
    # by hand: 1 + 4/8 less 1 + 2/8
    assert difference({"a": [3, 1], "b": [3, 1]}, {"a": [2, 2], "b": [2, 2]}) == {"accept_length": 0.25,
                                                                                  "interval": None}


# ---- the command ----
def test_of_the_validation_samples_it_is_the_prediction_of_training(toy, tmp_path):
    found, said = evaluated(toy, tmp_path, toy / "long/best", "--ids", toy / "long/val_ids.json", data="hidden_states")
    eagle3 = json.loads((toy / "long/best/eagle3.json").read_text())
    prediction, own = eagle3["prediction"], found["drafters"][str(toy / "long/best")]
    for key in ("accept_length", "verify_steps", "correct_drafts", "histogram", "accept_by_position"):
        assert own[key] == prediction[key]
    assert {name: [sum(walk), walk[1] + 2 * walk[2] + 3 * walk[3]] for name,
            walk in own["walks"].items()} == prediction["samples"]
    rows = [json.loads(line) for line in (toy / "long/metrics.jsonl").read_text().splitlines()]
    last = next(row for row in rows if "val_loss_0" in row and row["step"] == eagle3["step"])
    assert own["metrics"] == pytest.approx({key[4:]: value for key, value in last.items() if key.startswith("val_")},
                                           rel=1e-6)
    assert not any("were trained on" in line or "was trained on" in line for line in said)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluate.json"]


def test_several_drafters_beside_each_other(toy, tmp_path):
    folders = toy / "short/best", toy / "long/best"
    found, said = evaluated(toy, tmp_path, *folders)
    short, long = (found["drafters"][str(folder)] for folder in folders)
    assert short["difference"] is None
    assert long["difference"]["accept_length"] == pytest.approx(long["accept_length"] - short["accept_length"])
    low, high = long["difference"]["interval"]
    assert 0 < low < long["difference"]["accept_length"] < high
    assert short["interval"][0] < short["accept_length"] < short["interval"][1]
    assert short["by_source"].keys() == {"gsm", "code"} and long["by_source"]["gsm"]["samples"] == 12
    for key in ("verify_steps", "correct_drafts"):
        assert sum(group[key] for group in long["by_source"].values()) == long[key]
    one = {name: walk for name, walk in long["walks"].items() if name.startswith("code-")}
    assert long["by_source"]["code"] == accept_figures(one)
    table = [re.split(r"\s*\|\s*", line)[1:-1] for line in said if line.startswith("|")]
    assert table[0] == ["drafter", "accept_length", "difference to the first", "by draft position"]
    assert table[3] == [str(folders[1]), with_interval(long, ".3f"), with_interval(long["difference"], "+.3f"),
                        " ".join(f"{share:.3f}" for share in long["accept_by_position"])]
    assert table[6] == ["code", "8", with_interval(short["by_source"]["code"], ".3f"),
                        with_interval(long["by_source"]["code"], ".3f")]
    assert said[-1].endswith(f"done: {tmp_path / 'evaluate.json'}")
    assert found["drafters"][str(folders[0])]["weights_sha256"] != long["weights_sha256"]
    again, _ = evaluated(toy, tmp_path, *reversed(folders))
    assert again["drafters"][str(folders[0])]["difference"]["interval"] == pytest.approx([-high, -low])


def test_fewer_draft_steps_are_the_same_walk_cut_short(toy, tmp_path):
    found, _ = evaluated(toy, tmp_path, toy / "long/best", "--num-draft-steps", 1)
    own = found["drafters"][str(toy / "long/best")]
    assert len(own["histogram"]) == 2 and own["accept_length"] == 1 + own["accept_by_position"][0]
    assert found["config"]["num_draft_steps"] == 1


def test_sources_come_from_the_responses_or_are_unknown(toy, tmp_path):
    (tmp_path / "responses").mkdir()
    rows = [{"id": f"gsm-{i}", "source": "math" if i < 9 else "chat"} for i in range(12)]
    (tmp_path / "responses/part-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = evaluated(toy, tmp_path / "o", toy / "long/best", "--responses", tmp_path / "responses")
    groups = found["drafters"][str(toy / "long/best")]["by_source"]
    assert {name: group["samples"] for name, group in groups.items()} == {"math": 9, "chat": 3, "unknown": 8}
    # r0, r1, ...: ids that name no source
    found, _ = evaluated(toy, tmp_path / "o", toy / "long/best", data="hidden_states")
    assert found["drafters"][str(toy / "long/best")]["by_source"].keys() == {"unknown"}
    with pytest.raises(UserError, match="has none of the 40 samples"):
        evaluated(toy, tmp_path / "o", toy / "long/best", "--responses", tmp_path / "responses", data="hidden_states")


def test_drafters_with_other_vocabulary_maps_and_kinds(toy, tmp_path):
    """Each is held to the probabilities inside its own map; a token outside it is never drafted."""
    call(toy_flags(toy, "hidden_states"), "--vocab-mapping-dir", toy / "half", "--output-dir", tmp_path / "half",
         "--epochs", 6, "--lr", 4e-3,
         "--draft-layers", 2, "--fc-norm", "--norm-output", "--export-dtype", "float32", "--save-every", 100)
    found, _ = evaluated(toy, tmp_path / "o", toy / "long/best", tmp_path / "half/best", "--ids",
                         tmp_path / "half/val_ids.json", data="hidden_states")
    own = found["drafters"][str(tmp_path / "half/best")]
    prediction = json.loads((tmp_path / "half/best/eagle3.json").read_text())["prediction"]
    assert own["histogram"] == prediction["histogram"]
    assert own["accept_length"] < found["drafters"][str(toy / "long/best")]["accept_length"]
    losses = [row["val_loss_0"] for row in map(json.loads, (tmp_path / "half/metrics.jsonl").read_text().splitlines())
              if "val_loss_0" in row]
    assert min(abs(own["metrics"]["loss_0"] - loss) for loss in losses) < 1e-5


def test_several_folders_and_what_was_trained_on(toy, tmp_path):
    """A sample in both counts once; that the drafter has seen the states of one of them is said."""
    data = ["--data-dir", toy / "hidden_states", "--data-dir",
            shutil.copytree(toy / "hidden_states", tmp_path / "copy")]
    found, said = evaluated(toy, tmp_path / "o", toy / "long/best", data)
    own = found["drafters"][str(toy / "long/best")]
    assert own["samples"] == 60 and found["dropped"] == {"also in an earlier --data-dir": 40}
    assert len(found["hidden_states"]) == 3
    assert sum("was trained on these states" in line for line in said) == 1


def spoiled(toy: Path, tmp_path: Path, change) -> Path:
    """A copy of a drafter in which `change(config, eagle3, tensors)` was done."""
    folder = shutil.copytree(toy / "long/best", tmp_path / "spoiled")
    parts = [json.loads((folder / name).read_text())
             for name in ("config.json", "eagle3.json")] + [load_file(folder / "model.safetensors")]
    change(*parts)
    (folder / "config.json").write_text(json.dumps(parts[0])), (folder / "eagle3.json").write_text(json.dumps(parts[1]))
    save_file(parts[2], folder / "model.safetensors")
    return folder


REFUSED = {
    "no drafter": (lambda toy, tmp: [toy / "target"], "is no drafter that this reads"),
    "no folder": (lambda toy, tmp: [tmp / "nowhere"], "config.json: not readable"),
    "other layers": (lambda toy, tmp: [spoiled(toy, tmp, lambda c, e, t: e.update(capture_layers=[1, 2, 3]))],
                     "trained on layers [1, 2, 3] (3 states)"),
    "other width": (lambda toy, tmp: [spoiled(toy, tmp, lambda c, e, t: c.update(hidden_size=64))],
                    "a drafter for hidden size 64"),
    "config of another": (lambda toy, tmp: [spoiled(toy, tmp, lambda c, e, t: c.update(intermediate_size=8))],
                          "mlp.gate_proj.weight is [48, 32], config.json asks for [8, 32]"),
    "no d2t": (lambda toy, tmp: [spoiled(toy, tmp, lambda c, e, t: (c.update(draft_vocab_size=96), t.pop("d2t")))],
               "missing ['d2t']"),
    "other ids": (lambda toy, tmp: [toy / "long/best", "--ids", toy / "long/val_ids.json"], "none of the 4 ids of"),
    "no states": (lambda toy, tmp: [toy / "long/best", "--data-dir", tmp], "03_extract has not finished there"),
    "no target": (lambda toy, tmp: [toy / "long/best", "--verifier-path", tmp], "config.json: not readable"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_one_line(toy, tmp_path, what):
    flags, message = REFUSED[what]
    with pytest.raises(UserError) as caught:
        call(toy_flags(toy, "held_out"), "--evaluate", *flags(toy, tmp_path))
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_flags_of_the_one_are_not_those_of_the_other(toy, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--ids and --responses are of --evaluate"):
        call(toy_flags(toy, "hidden_states"), "--vocab-mapping-dir", toy / "half", "--output-dir", tmp_path / "o",
             "--ids", toy / "long/val_ids.json")
    with pytest.raises(UserError, match="--verifier-path not given"):
        call("--evaluate", toy / "long/best", "--data-dir", toy / "held_out")
    monkeypatch.setattr(train, "join_processes", lambda *flags: Process(0, 2, torch.device("cpu"), torch.float32))
    with pytest.raises(UserError, match="Start it without torchrun"):
        call("--evaluate", toy / "long/best", toy_flags(toy, "held_out"))


# ---- sampled serving (test_sampling.py) ----
def test_each_draft_has_the_probability_that_the_target_gives_it_at_its_place(toy):
    """Row by row in float64, with the state read where the draft stands."""
    goal = Target(toy / "target")
    stored, head = read_drafter(toy / "long/best", goal), goal.tensor("head")
    draft = make_drafter(stored, goal.tensor("embed"), head, 64, Process(0, 1, torch.device("cpu"), torch.float32))
    index = [json.loads(line) for line in (toy / "held_out/index.jsonl").read_text().splitlines()][:3]
    files = {row["id"]: next((toy / "held_out").glob(f"*/{row['id']}.safetensors")) for row in index}
    samples = [Sample(name, file, int(len(load_file(file)["input_ids"])), int((load_file(file)["loss_mask"] == 0).sum()), None)
               for name, file in files.items()]
    for sample in samples:
        sample.mass = np.ones(sample.tokens - sample.start, np.float32)
    batch, drafts, seen = collate(samples, 3, 32).to("cpu", torch.float32), [], 0
    _, right = ttt_pass(draft, batch, [1.0] * 3, drafts=drafts)
    found = Sampled([Sampling(0.7), Sampling(1.0, 0.5)], head.float()).accept(batch, drafts)
    for sample, ((q0, q1), _) in zip(samples, batch.spans):
        tensors, first = load_file(sample.path), sample.rows(3)[0]
        for row, k in itertools.product(range(q0, q1), range(3)):
            at = first + row - q0 + 2 + k  # the token that is drafted
            if at < sample.tokens:
                logits = (head.double() @ tensors["last_hidden_states"][at - 1].double()).numpy() / 0.7
                token = int(drafts[k][row])
                assert found[0, k, row] == pytest.approx(math.exp(logits[token] - np.logaddexp.reduce(logits)), rel=1e-4)
                assert bool(right[k, row]) == (token == int(tensors["input_ids"][at]))
                seen += 1
    assert seen > 50 and (found[1] == 0).any() and found.max() <= 1


def test_what_04_says_of_sampled_serving(toy, tmp_path):
    """Whatever is packed together; nearly at temperature 0 it is the greedy walk, since these answers are greedy."""
    found, said = evaluated(toy, tmp_path / "a", toy / "short/best", toy / "long/best", "--temperature", 0.001, 20)
    small, _ = evaluated(toy, tmp_path / "b", toy / "short/best", toy / "long/best", "--temperature", 0.001, 20, "--batch-tokens", 64)
    plain, _ = evaluated(toy, tmp_path / "c", toy / "short/best", toy / "long/best")
    for name, own in found["drafters"].items():
        cold, warm = own["sampled"]
        assert plain["drafters"][name]["sampled"] == [] and plain["drafters"][name]["accept_length"] == own["accept_length"]
        assert cold["accept_length"] == pytest.approx(own["accept_length"], abs=2e-3)
        assert cold["accept_by_position"] == pytest.approx(own["accept_by_position"], abs=2e-3) and cold["text_fits"]
        assert 1 < warm["accept_length"] < cold["accept_length"] and warm["interval"][0] < warm["accept_length"] < warm["interval"][1]
        assert small["drafters"][name]["sampled"][1]["accept_length"] == pytest.approx(warm["accept_length"], rel=1e-5)
        assert own["metrics"]["accept_length_t20"] == warm["accept_length"]
    difference = list(found["drafters"].values())[1]["sampled"][1]["difference"]
    lengths = [own["sampled"][1]["accept_length"] for own in found["drafters"].values()]
    assert difference["accept_length"] == pytest.approx(lengths[1] - lengths[0]) and difference["interval"]
    assert any("| temperature 20 " in line for line in said) and any("colder than temperature 20" in line for line in said)


def test_training_writes_it_beside_the_greedy_prediction(toy, tmp_path):
    argv = [*toy_flags(toy, "hidden_states"), "--vocab-mapping-dir", toy / "vocab_mapping", "--epochs", 1, "--lr", 4e-3]
    said = call(*argv, "--output-dir", tmp_path / "with", "--temperature", 1, 0.6, "--top-p", 0.95)
    call(*argv, "--output-dir", tmp_path / "without")
    own, other = (json.loads((tmp_path / name / "best/eagle3.json").read_text())["prediction"] for name in ("with", "without"))
    sampled = own.pop("sampled")
    assert own == other
    assert [(entry["temperature"], entry["top_p"]) for entry in sampled] == [(1.0, 0.95), (0.6, 0.95)]
    assert all(entry["samples"].keys() == own["samples"].keys() and entry["num_steps"] == 3 for entry in sampled)
    assert all(entry["verify_steps"] == own["verify_steps"] for entry in sampled)
    assert any("at temperature 1, top-p 0.95 " in line for line in said)
    with pytest.raises(UserError, match="temperature"):  # it is written into the drafter, so a folder is bound to it
        call(*argv, "--output-dir", tmp_path / "with", "--temperature", 1)


def test_two_ranks_expect_of_sampled_serving_what_one_does(toy, tmp_path):
    """Each evaluates its own held-out samples: of all of them together the same, before the first step and after the last."""
    argv = [*toy_flags(toy, "hidden_states"), "--vocab-mapping-dir", toy / "vocab_mapping", "--val-data-dir", toy / "held_out",
            "--finetune-from", toy / "long/best", "--temperature", 1, 20, "--top-p", 0.9, "--dtype", "float64", "--max-steps", 2,
            "--lr", 1e-3]
    call(*argv, "--output-dir", tmp_path / "one", "--grad-accum", 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(),
               ROOT / "04_train.py", *argv, "--output-dir", tmp_path / "two"]
    done = preloaded.run(list(map(str, command)), env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                         timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (json.loads((tmp_path / name / "best/eagle3.json").read_text())["prediction"] for name in ("one", "two"))
    assert one["accept_length"] == two["accept_length"] and len(one["samples"]) == 20
    for own, other in zip(one["sampled"], two["sampled"], strict=True):
        samples, others = own.pop("samples"), other.pop("samples")
        assert list(samples) == list(others) == list(one["samples"])
        assert all(samples[name] == pytest.approx(others[name], abs=2e-5) for name in samples)
        assert own["accept_length"] > 1.02 and all(own[key] == pytest.approx(other[key], rel=1e-6) for key in own)
    rows = [[row for row in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()) if "val_loss_0" in row]
            for name in ("one", "two")]
    assert [row["step"] for row in rows[0]] == [0, 2]
    for key in ("val_accept_length", "val_accept_length_t1_p0.9", "val_accept_length_t20_p0.9"):
        assert [row[key] for row in rows[0]] == pytest.approx([row[key] for row in rows[1]], rel=1e-6)


@pytest.mark.parametrize("words, named", [(["--temperature", "0"], "above 0"), (["--temperature", "-1"], "above 0"),
                                          (["--temperature", "1", "1.0"], "twice"), (["--top-p", "0.9"], "--temperature"),
                                          (["--temperature", "1", "--top-p", "0"], "--top-p"),
                                          (["--temperature", "1", "--top-p", "1.5"], "--top-p")])
def test_what_cannot_be_is_refused(toy, words, named):
    with pytest.raises(UserError, match=named):
        train.main(list(map(str, ["--evaluate", toy / "long/best", *toy_flags(toy, "held_out"), *words])))
