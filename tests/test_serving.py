"""Proof 4: what 04 predicts is what SGLang serves, request by request, in float32 on the real engine.

How SGLang (0.5.15.post1 and 0.5.23 alike) counts, read from its scheduler (batch_result_processor.py,
_resolve_spec_v2_tokens) and EAGLE worker:
- the first response token comes from the prefill; it belongs to no verify step;
- a verify step with k correct drafts adds 1 to spec_verify_ct, k to spec_num_correct_drafts, 1 to histogram[k], and
  emits k + 1 tokens;
- that happens BEFORE the stop token or max_new_tokens is looked for: correct drafts behind the end of the answer are
  counted, though cut off it, and the chain is not shortened near the end. So tokens cut off = 1 + correct + verify_ct -
  completion_tokens, all but the bonus token counted as correct. Training has no target state behind the end and stops
  its walk there; only the last step of a request can differ, by exactly that number.
"""
import itertools
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from conftest import ROOT, TINY_KIMI, free_port, load_script, post, run_here, run_script
from eagle3.acceptance import Sampled, walk
from eagle3.adaptive import check as adaptive_check
from eagle3.adaptive import written
from eagle3.batches import Sample, collate
from eagle3.drafter import Drafter, read_shape
from eagle3.endpoints import server_info
from eagle3.figures import beyond_answer, prediction_check
from eagle3.load import spec_counts
from eagle3.responses import part_files, read_jsonl
from eagle3.sampling import Sampling
from eagle3.states import sample_path
from eagle3.target import Target
from eagle3.ttt import ttt_pass

MAX_TOKENS, STEPS = 64, 3
SUBJECTS = ["a list", "a dictionary", "a generator", "the with statement", "an exception", "a decorator", "a module",
            "a class", "a lambda", "an iterator", "str.join", "os.path", "a tuple", "a set", "slicing",
            "the import statement", "a closure", "an integer", "a float", "a byte string", "the for statement",
            "the yield expression", "an attribute", "a descriptor", "inheritance", "the global statement", "a package",
            "assert", "a comprehension", "the else clause", "a coroutine", "garbage collection"]


def run_stage(name, *args):
    done = run_script(name, *args, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{name}: {done.stderr}\n{done.stdout[-2000:]}"


@pytest.fixture(scope="module")
def run(tmp_path_factory, engine):
    """A whole small run: greedy answers of the tiny target, their hidden states, a drafter; half are validation."""
    folder = tmp_path_factory.mktemp("run")
    rows = [{"id": f"q{n}", "prompt": f"What is {subject}?"} for n, subject in enumerate(SUBJECTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses, vocabulary, states = folder / "responses", folder / "vocab_mapping", folder / "hidden_states"
    server = engine(capture_dir=True, chunked_prefill_size=256)  # the server of tests/test_capture.py
    run_stage("01_generate", "--prompts", folder / "prompts.jsonl", "--base-url", server.url, "--tokenizer", TINY_KIMI,
              "--output-dir", responses, "--max-tokens", MAX_TOKENS, "--temperature", 0, "--top-p", 1,
              "--concurrency", 8)
    run_stage("02_build_vocab", "--data-dir", responses, "--tokenizer", TINY_KIMI, "--output-dir", vocabulary,
              "--draft-vocab-size", 256)
    run_stage("03_extract", "--data-dir", responses, "--base-url", server.url, "--output-dir", states,
              "--concurrency", 8, "--capture-dir", server.capture_dir)
    train(folder, folder / "output", 3)
    return folder


def train(folder, output, epochs, *more):
    run_stage("04_train", "--verifier-path", TINY_KIMI, "--data-dir", folder / "hidden_states", "--vocab-mapping-dir",
              folder / "vocab_mapping", "--output-dir", output, "--epochs", epochs, "--data-weight", 10, "--lr", 3e-3,
              "--max-seq-len", 512, "--ttt-steps", STEPS, "--val-ratio", 0.5, "--noise-std", 0, "--batch-tokens", 512, "--num-workers", 0,
              "--export-dtype", "float32", *more)


@pytest.fixture(scope="module")
def rows(run):
    return {row["id"]: row for part in part_files(run / "responses") for row in read_jsonl(part)}


def served(server, row: dict, max_tokens: int) -> dict:
    sampling = {"max_new_tokens": max_tokens, "temperature": 0}
    answer = post(f"{server.url}/generate", {"input_ids": row["prompt_ids"], "sampling_params": sampling})
    assert answer["output_ids"] == row["response_ids"][:max_tokens], "speculation changed the text"
    return {"completion_tokens": answer["meta_info"]["completion_tokens"], "spec": spec_counts(answer["meta_info"])}


def test_training_predicts_the_counts_of_every_validation_request(run, rows, engine):
    served_as_predicted(run / "output" / "best", rows, engine)


def served_as_predicted(drafter, rows, engine):
    server = engine(draft=drafter)
    prediction = json.loads((drafter / "eagle3.json").read_text())["prediction"]
    assert len(prediction["samples"]) == len(SUBJECTS) // 2
    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(lambda name: {"id": name, **served(server, rows[name], MAX_TOKENS)}, prediction["samples"]))
    for name, record in zip(prediction["samples"], records):
        (verify, correct), spec = prediction["samples"][name], record["spec"]
        assert (spec["verify_steps"], spec["correct_drafts"] - beyond_answer(record)) == (verify, correct), name
    chain = {"speculative_num_steps": STEPS, "speculative_eagle_topk": 1}
    check = prediction_check(prediction, records, chain, 0.0)
    assert check["served"] == pytest.approx(check["predicted"]) == pytest.approx(prediction["accept_length"])
    assert check["equal_answers"] == len(records)
    assert check["as_long_answers"] == len(records)
    assert prediction["accept_length"] > 1.1, "nothing was accepted: the proof would be empty"


@pytest.mark.slow  # half a minute; the same without a server: test_public_drafters.py
def test_a_drafter_in_a_public_layout_serves_what_step_0_of_its_finetuning_says(run, rows, engine, tmp_path):
    """Shards of model.layers.0.*, int32 d2t, t2d, rope_parameters, no eagle3.json: its map by 02, a run at lr 0 by 04, the doctor by 05."""
    from test_public_drafters import relayout
    public = relayout(run / "output/best", "sharded", tmp_path / "public")
    for name, *more in (("02_build_vocab", "--data-dir", run / "responses", "--tokenizer", TINY_KIMI, "--from-drafter", public, "--workers", 1),
                        ("04_train", "--verifier-path", TINY_KIMI, "--data-dir", run / "hidden_states", "--vocab-mapping-dir",
                         tmp_path / "02_build_vocab", "--finetune-from", public, "--lr", 0, "--max-steps", 1, "--max-seq-len", 512, "--ttt-steps", STEPS,
                         "--val-ratio", 0.5, "--batch-tokens", 512, "--num-workers", 0)):
        done = run_here(name, *more, "--output-dir", tmp_path / name)
        assert done.returncode == 0, done.stderr
    prediction = json.loads((tmp_path / "04_train/best/eagle3.json").read_text())["prediction"]
    first = json.loads((tmp_path / "04_train/metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and first["val_accept_length"] == prediction["accept_length"] > 1.1
    server = engine(draft=public)
    for name, (verify, correct) in prediction["samples"].items():
        record = {"id": name, **served(server, rows[name], MAX_TOKENS)}
        assert (record["spec"]["verify_steps"], record["spec"]["correct_drafts"] - beyond_answer(record)) == (verify, correct), name
    found = doctor(run, public, server, tmp_path / "doctor")
    assert found["findings"] == [] and "No cause found" in found["summary"] and "another trainer's" in found["facts"][0], found
    assert "feed it the states entering layers [2, 4, 6]" in found["facts"][-1]


def own_drafter(run) -> tuple[Drafter, torch.Tensor]:
    """04's drafter with the exported weights, and the target's head."""
    config = json.loads((run / "output" / "best" / "config.json").read_text())
    target, weights = Target(TINY_KIMI), load_file(run / "output" / "best" / "model.safetensors")
    draft_ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    shape = read_shape(config)
    embed, head = target.tensor("embed").float(), target.tensor("head").float()
    draft = Drafter(shape, torch.float32, torch.device("cpu"), embed, head[draft_ids], draft_ids, 1024)
    draft.load(weights)
    return draft, head


def offline(run):
    """04's own drafter: (row, tokens) -> correct drafts of every verify step."""
    draft, _ = own_drafter(run)

    def accepted(row: dict, max_tokens: int) -> list[int]:
        start = len(row["prompt_ids"])
        end = start + len(row["response_ids"][:max_tokens])
        path = sample_path(run / "hidden_states", row["id"])
        sample = Sample(row["id"], path, end, start, np.ones(end - start, np.float32))
        _, right = ttt_pass(draft, collate([sample], STEPS, draft.shape.hidden), [1.0] * STEPS)
        return walk(right.numpy(), start, end, STEPS, sample.rows(STEPS)[0])

    return accepted


@pytest.mark.parametrize("max_tokens", [1, 2, 17, 40, MAX_TOKENS])
def test_accepted_drafts_of_every_verify_step(run, rows, engine, max_tokens):
    """Also where max_new_tokens cuts through a chain, and for samples the drafter was trained on."""
    server, predicted, cut, all_correct = engine(draft=run / "output" / "best"), offline(run), 0, 0
    chosen = list(rows.values())[:20]
    with ThreadPoolExecutor(8) as pool:
        records = pool.map(lambda row: served(server, row, max_tokens), chosen)
    for row, record in zip(chosen, records):
        accepted = predicted(row, max_tokens)
        if min(max_tokens, len(row["response_ids"])) == 1:
            assert accepted == [] and record["spec"] is None  # no verify step, and SGLang sends no counts
            continue
        beyond = beyond_answer(record)
        accepted[-1] += beyond
        wanted = np.bincount(accepted, minlength=STEPS + 1).tolist()
        histogram = record["spec"]["histogram"] + [0] * (STEPS + 1 - len(record["spec"]["histogram"]))
        assert histogram == wanted, (row["id"], accepted, record)
        assert record["spec"]["verify_steps"] == len(accepted) and record["spec"]["correct_drafts"] == sum(accepted)
        assert accepted[-1] <= STEPS
        cut, all_correct = cut + (beyond > 0), all_correct + sum(accepted)
    assert max_tokens < 17 or all_correct > 20
    assert max_tokens != 17 or cut, "no request was cut inside a chain: that case was not tested"


SETTINGS = [Sampling(1.0), Sampling(1.6), Sampling(1.6, 0.8)]


def test_a_sampling_server_accepts_a_draft_with_the_targets_own_probability(run, rows, engine):
    """Answers go on from held-out beginnings; where the next token is the held-out one, the draft behind it is known, and so is its chance."""
    server, (draft, head) = engine(draft=run / "output" / "best"), own_drafter(run)
    asked, chances = [], {}
    long = [row for row in rows.values() if len(row["response_ids"]) > 16]
    for row, at in zip(long[:24], itertools.cycle([2, 5, 9, 14])):
        start, end = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row["response_ids"])
        sample = Sample(row["id"], sample_path(run / "hidden_states", row["id"]), end, start, np.ones(end - start, np.float32))
        batch, drafts = collate([sample], STEPS, draft.shape.hidden), []
        ttt_pass(draft, batch, [1.0] * STEPS, drafts=drafts)
        accept = Sampled(SETTINGS, head).accept(batch, drafts)[:, 0, start + at - 1 - sample.rows(STEPS)[0]]  # behind token start + at
        for setting, chance in zip(SETTINGS, accept):
            chances[row["id"], setting] = float(chance)
            asked += [(row["id"], setting, row["prompt_ids"] + row["response_ids"][:at], row["response_ids"][at])] * 6

    def ask(name, setting, ids, token):
        body = {"max_new_tokens": 2, "temperature": setting.temperature, "top_p": setting.top_p, "ignore_eos": True}
        answer = post(f"{server.url}/generate", {"input_ids": ids, "sampling_params": body})
        right = answer["meta_info"]["spec_correct_drafts_histogram"][1:] if answer["output_ids"][0] == token else None
        return (setting, chances[name, setting], bool(sum(right)), answer["output_ids"][1]) if right is not None else None

    with ThreadPoolExecutor(16) as pool:
        found = [one for one in pool.map(lambda one: ask(*one), asked) if one]
    for setting in SETTINGS:
        own = [(chance, accepted) for of, chance, accepted, _ in found if of == setting]
        expected, accepted = sum(chance for chance, _ in own), sum(accepted for _, accepted in own)
        error = sum(chance * (1 - chance) for chance, _ in own) ** 0.5
        print(setting, len(own), expected, accepted, error)
        assert len(own) > 60 and error > 1.5 and abs(accepted - expected) < 4 * error, (setting, expected, accepted, error)


def doctor(run, drafter, server, out) -> dict:
    argv = ["--base-url", server.url, "--draft-path", drafter, "--run-dir", run, "--doctor", "--concurrency", 4,
            "--max-tokens", MAX_TOKENS, "--output-dir", out]
    assert not load_script("05_benchmark").main(list(map(str, argv)))
    return json.loads((out / "report.json").read_text())["doctor"]


def test_the_doctor_finds_nothing_on_the_healthy_drafter_and_the_planted_cause_on_the_sick_one(run, engine, tmp_path):
    healthy = doctor(run, run / "output" / "best", engine(draft=run / "output" / "best"), tmp_path / "healthy")
    assert healthy["findings"] == [] and healthy["gap"] is False and healthy["unchecked"] == {}, healthy
    sick = tmp_path / "output" / "best"
    shutil.copytree(run / "output" / "best", sick)
    config = json.loads((sick / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]  # it was trained on 2, 4, 6
    (sick / "config.json").write_text(json.dumps(config))
    shutil.copy(run / "output" / "val_ids.json", tmp_path / "output")
    found = doctor(run, sick, engine(draft=sick), tmp_path / "sick")
    assert [finding["cause"] for finding in found["findings"]] == ["capture layers"] and found["gap"] is True, found


def test_a_drafter_with_latent_attention_is_served_as_predicted(run, rows, engine, tmp_path):
    """Last: its server is another one. The doctor of the same run finds nothing on it. Norms: test_draft_forward.py."""
    train(run, tmp_path / "mla", 2, "--architecture", "mla", "--no-fc-norm", "--no-norm-output")
    drafter = tmp_path / "mla" / "best"
    served_as_predicted(drafter, rows, engine)
    found = doctor(run, drafter, engine(draft=drafter), tmp_path / "report")
    assert found["findings"] == [] and found["gap"] is False and found["unchecked"] == {}, found


@pytest.mark.slow  # seven server starts; the same with servers of known step times: test_break_even.py
def test_simulated_acceptance_is_heeded_and_this_drafter_is_compared(run, tmp_path):
    """05 --break-even on the real engine: SGLang heeds the simulation to the token, and a trained drafter is timed and compared beside it."""
    command = ["{python}", str(ROOT / "scripts/cpu_engine/serve.py")]
    plain = {"model-path": str(TINY_KIMI), "port": free_port(), "dtype": "float32", "max-running-requests": 32}
    served = {"speculative-algorithm": "EAGLE3", "speculative-num-steps": STEPS, "speculative-eagle-topk": 1,
              "speculative-num-draft-tokens": STEPS + 1}
    document = {"run_dir": str(tmp_path), "build_vocab": {"draft-vocab-size": 256}, "servers": {
        "plain": {"command": command, "flags": plain, "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}},
        "speculative": {"extends": "plain", "flags": served}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    done = run_script("05_benchmark", "--config", tmp_path / "run.yaml", "--launch", "--break-even", "--steps", 1, STEPS, "--repeats", 1,
                      "--concurrency", 1, 8, "--max-tokens", MAX_TOKENS, "--prompts", run / "responses", "--draft-path", run / "output/best",
                      "--output-dir", tmp_path / "report", "--tokenizer", TINY_KIMI, timeout=900)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report/break_even/report.json").read_text())
    print(done.stdout[-3000:])
    for level, row in report["levels"].items():
        for name, figures in row.items():
            if name.startswith("steps"):  # no draft of a random drafter was right: the simulation let them pass
                assert figures["accept"]["accept_length"] == float(name.split("accept")[1]), (level, name)
    rows = {(row["level"], row["steps"]): row for row in report["break_even"]["rows"]}
    assert set(rows) == {(level, steps) for level in (1, 8) for steps in (1, STEPS)}
    checks = report["break_even"]["checks"]
    assert [row["level"] for row in checks] == [1, 8] and all(row["emitted"] > 1.1 for row in checks)
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in checks)  # how near they are: on a machine of its own


@pytest.mark.slow  # half a minute; SGLang's own reading of the file: test_adaptive.py
def test_steps_by_batch_size_switch_on_the_real_engine_and_change_no_answer(run, rows, engine, tmp_path):
    """One stream drafts 3, four draft 1, eight nothing (a batch is smaller for moments): SGLang says so in its log, and every answer is plain decoding's."""
    path = tmp_path / "adaptive.json"
    path.write_text(written({1: 3, 3: 1, 6: 0}))
    server = engine(draft=run / "output/best", speculative_adaptive=True, speculative_adaptive_config=path)
    adaptive_check(server_info(server.url, {}), server.url)
    kept = [row for row in rows.values() if len(row["response_ids"]) == MAX_TOKENS][:16]  # they stay together to their end
    length = {}
    for streams in (1, 4, 8):
        with ThreadPoolExecutor(streams) as pool:
            spec = [record["spec"] for record in pool.map(lambda row: served(server, row, MAX_TOKENS), kept[:2 * streams])]
        length[streams] = 1 + sum(of["correct_drafts"] for of in spec) / sum(of["verify_steps"] for of in spec)
    switched = re.findall(r"Switch adaptive runtime state: steps \d -> (\d)", server.log.read_text(errors="replace"))
    assert switched[0] == "1" and "0" in switched, switched
    assert length[1] > length[4] > length[8] and length[1] > 1.5, length
