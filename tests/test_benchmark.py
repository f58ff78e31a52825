"""05: figures by hand, every fault of a drafter found and none on a healthy one, whole runs on the real engine."""
import argparse
import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import preloaded
from conftest import CAPTURE_LAYERS, ROOT, TINY_KIMI, free_port, load_script, post, run_script
from eagle3 import gpu_state, load
from eagle3.answers import program_of, run_program
from eagle3.bench_prompts import all_rows, load_prompts, prompts_of_training
from eagle3.doctor import Facts, diagnose
from eagle3.endpoints import contact, flush_cache, probe_difference
from eagle3.figures import (CONTEXT_BUCKETS, acceptance, beyond_answer, context_bucket, first_difference, gaps_of,
                            level_figures, prediction_check, same_text, speed_up)
from eagle3.measured import Measured
from eagle3.report import level_remarks, verdict
from eagle3.servers import ServerGone, healthy
from eagle3.stage import UserError, read_manifest, sha256_file
from eagle3.target import Target
from eagle3.variants import DraftFolder, sweep_variants

bench = load_script("05_benchmark")
HIDDEN, HEAD_DIM, HEADS, DRAFT_VOCAB = 256, 32, 4, 64


def make_drafter(folder: Path, tokens) -> Path:
    """A drafter with random weights and the draft vocabulary `tokens` that SGLang serves beside the tiny target."""
    generator = torch.Generator().manual_seed(0)
    vocab = json.loads((TINY_KIMI / "config.json").read_text())["text_config"]["vocab_size"]

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.02

    attention, mlp, tokens = "midlayer.self_attn.", "midlayer.mlp.", torch.tensor(sorted(tokens))
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights = {"fc.weight": random(HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN),
               "lm_head.weight": random(len(tokens), HIDDEN),
               attention + "q_proj.weight": random(HEADS * HEAD_DIM, 2 * HIDDEN),
               attention + "k_proj.weight": random(2 * HEAD_DIM, 2 * HIDDEN),
               attention + "v_proj.weight": random(2 * HEAD_DIM, 2 * HIDDEN),
               attention + "o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
               mlp + "gate_proj.weight": random(512, HIDDEN), mlp + "up_proj.weight": random(512, HIDDEN),
               mlp + "down_proj.weight": random(HIDDEN, 512), "d2t": tokens - torch.arange(len(tokens)),
               **{f"midlayer.{name}.weight": torch.ones(HIDDEN) for name in norms}}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": vocab,
              "draft_vocab_size": len(tokens), "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 1,
              "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "hidden_act": "silu",
              "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
              "tie_word_embeddings": False, "torch_dtype": "float32",
              "eagle_config": {"eagle_aux_hidden_state_layer_ids": CAPTURE_LAYERS, "use_aux_hidden_state": True}}
    (folder / "config.json").write_text(json.dumps(config))
    prediction = {"num_steps": 3, "accept_length": 1.5, "accept_by_position": [0.3, 0.15, 0.05]}
    (folder / "eagle3.json").write_text(json.dumps({"target": TINY_KIMI.name, "capture_layers": CAPTURE_LAYERS,
                                                    "config": config, "prediction": prediction,
                                                    "weights_sha256": sha256_file(folder / "model.safetensors")}))
    return folder


# ---- figures by hand ----
def answer(name, ids, verify=0, correct=0, histogram=(), times=None):
    times = times or [0.5 + 0.1 * index for index in range(len(ids))]
    counts = [1 + index * (len(ids) - 1) // max(1, len(times) - 1) for index in range(len(times))]
    spec = {"verify_steps": verify, "correct_drafts": correct, "histogram": list(histogram)} if verify else None
    return {"id": name, "prompt_tokens": 10, "completion_tokens": len(ids), "cached_tokens": 0, "finish": "stop",
            "latency_s": times[-1], "times_s": times, "counts": counts, "output_ids": ids, "spec": spec}


def test_acceptance_counts_before_it_divides():
    # 9 tokens: 1 from prefill, then steps of 2+1, 0+1, and a last one of 3+1 of which only 4 fit: nothing fell off
    whole = answer("a", list(range(9)), verify=3, correct=5, histogram=[1, 0, 1, 1])
    # 5 tokens: 1, then 1+1, then a step with 3 right drafts of which only 2 tokens are the answer: one right draft and
    # the bonus fell off
    cut = answer("b", list(range(5)), verify=2, correct=4, histogram=[0, 1, 0, 1])
    assert beyond_answer(whole) == 0 and beyond_answer(cut) == 1
    found = acceptance([whole, cut], steps=3)
    assert found["accept_length"] == 1 + 9 / 5 and found["accept_length_in_answer"] == 1 + 8 / 5
    assert found["histogram"] == [1, 1, 1, 2] and found["accept_by_position"] == [4 / 5, 3 / 5, 2 / 5]
    # a mean of the requests' own ratios would be (1 + 5/3 + 1 + 4/2) / 2
    assert found["accept_length"] != pytest.approx((1 + 5 / 3 + 1 + 4 / 2) / 2)


def test_histogram_that_sglang_cut_short_has_a_share_for_every_draft():
    found = acceptance([answer("a", [1, 2, 3], verify=2, correct=0, histogram=[2])], steps=3)
    assert found["accept_by_position"] == [0, 0, 0]


@pytest.mark.parametrize("meta", [
    {"spec_verify_ct": 4, "spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 12,
     "spec_correct_drafts_histogram": [1, 0, 3]},  # 0.5.12 on
    {"spec_verify_ct": 4, "spec_accept_token_num": 6, "spec_draft_token_num": 12,
     "spec_accept_histogram": [1, 0, 3]},  # 0.5.10
])
def test_both_families_of_field_names(meta):
    assert load.spec_counts(meta) == {"verify_steps": 4, "correct_drafts": 6, "histogram": [1, 0, 3]}
    assert load.spec_counts({"completion_tokens": 5}) is None


def test_gaps_share_an_arrival_between_its_tokens():
    record = {"times_s": [1.0, 1.3, 1.3, 1.5], "counts": [1, 4, 4, 5]}
    assert gaps_of(record) == pytest.approx([0.1, 0.1, 0.1, 0.2])


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def units_of(variant, seconds, ids):
    requests = [answer(f"p{n}", ids(n), times=[0.1, seconds * (n + 1)]) for n in range(8)]
    return [{"variant": variant, "level": 1, "repeat": 0, "wall_s": sum(r["latency_s"] for r in requests),
             "watts": None, "requests": requests}]


def same_answers(variant):
    """Eight prompts of ten tokens, of a second more each."""
    return units_of(variant, 1.0, lambda n: [n] * 10)


def again(units):
    """The same in a second run."""
    return units + [{**unit, "repeat": 1} for unit in units]


def test_speed_up_its_interval_and_same_text():
    plain = same_answers("plain")
    fast = units_of("speculative", 0.5, lambda n: [n] * 10 if n else [0] * 6 + [7] * 4)
    found = speed_up(again(plain), again(fast))
    # each prompt is twice as fast, in both runs: no spread
    assert found["speed_up"] == pytest.approx(2) and found["interval"] == pytest.approx([2, 2])
    fast[0]["requests"][3]["latency_s"] *= 3
    low, high = speed_up(again(plain), again(fast))["interval"]
    assert low < high
    text = same_text(plain, fast)
    assert (text["compared"], text["equal"], text["share"]) == (8, 7, 7 / 8)
    assert text["differences"] == [{"id": "p0", "position": 6, "tokens": [0, 7]}]


def test_failed_requests_are_counted_and_not_averaged():
    units = same_answers("plain")
    units[0]["requests"] += [{"id": "x", "error": "http 500", "message": "broken"}]
    figures = level_figures(units)
    assert figures["failed"] == {"http 500": 1} and figures["requests"] == 9 and figures["output_tokens"] == 80
    assert figures["latency_s"]["p50"] == pytest.approx(4.5) and figures["tok_s"] == pytest.approx(80 / 36)


def test_verdict_follows_the_interval():
    def said(speed, interval, failed={}):
        figures = {"speed_up": speed, "interval": interval, "failed": failed, "requests": 9}
        return verdict({"plain": {"failed": {}, "requests": 9}, "speculative": figures})

    assert "serve it (1.40x" in said(1.4, [1.2, 1.6]) and "do not" not in said(1.4, [1.2, 1.6])
    assert "do not serve it" in said(0.66, [0.6, 0.7])
    assert "undecided" in said(1.02, [0.9, 1.1]) and "failed" not in said(1.02, [0.9, 1.1])
    failed = said(1.4, [1.2, 1.6], {"http 500": 2, "cut": 1})
    assert failed.endswith("; 3 of 9 requests of speculative failed: look at them first")


def test_faults_come_first_among_the_differences_and_all_are_counted():
    differences = [{"id": f"p{n}", "position": n, "tokens": [1, 2], "kind": "near-tie", "gap": 0.01}
                   for n in range(11)]
    differences += [{"id": "bad", "position": 3, "tokens": [1, 2], "kind": "fault", "gap": 9.0},
                    {"id": "late", "position": 3, "tokens": [1, 2]}]
    figures = level_figures(same_answers("speculative")) | {"same_text": {"differences": differences}}
    spoken = level_remarks("8", "steps1", figures, "")
    assert "13 answers part (fault 1, near-tie 11, not probed 1)" in spoken[1] and len(spoken) == 12
    assert "bad parts at token 3: plain 1, steps1 2, 9.0000 apart in log-probability: fault" in spoken[2]


def test_contexts_of_any_length_stand_in_order():
    lengths = (100, 127, 128, 9000, 200_000, 300_000)
    names = [context_bucket({"prompt_tokens": length, "completion_tokens": 1}) for length in lengths]
    assert names == ["<= 128", "<= 128", "<= 256", "<= 16384", "<= 262144", "> 262144"]
    assert list(CONTEXT_BUCKETS)[-2:] == ["<= 262144", "> 262144"]


def test_absent_metrics_and_energy_are_said():
    spoken = level_remarks("8", "speculative", level_figures(same_answers("speculative")), "0.5.9")
    assert spoken == ["- 8 stream(s), speculative: the answers of SGLang 0.5.9 carry no speculative counts, "
                      "so there is no accept_length."]
    units = same_answers("plain")
    units[0]["watts"] = 400.0
    figures = level_figures(units)
    assert figures["joule_per_token"] == pytest.approx(400 * 36 / 80)
    spoken = level_remarks("8", "plain", figures, "")[0]
    assert "400 W over all GPUs of this machine, 50.00 kWh a million output tokens." in spoken


def test_power_is_the_energy_of_all_gpus_over_the_time_between(monkeypatch):
    def energy_of(handle):  # mJ; GPU n takes 100 (n + 1) W
        return round(1e6 + 1e5 * (handle + 1) * time.perf_counter())

    gpu_state.gpus.cache_clear()
    with gpu_state.Power("http://127.0.0.1:1") as power:
        time.sleep(0.1)
    assert (power.watts is None) == (gpu_state.energy(gpu_state.gpus()) is None)  # the driver's own library, where there is one
    monkeypatch.setattr(gpu_state, "gpus", lambda: [0, 1])
    monkeypatch.setattr(gpu_state.pynvml, "nvmlDeviceGetTotalEnergyConsumption", energy_of)
    with gpu_state.Power("http://127.0.0.1:1") as power, gpu_state.Power("http://192.0.2.1:1") as elsewhere:
        time.sleep(0.2)
    assert power.watts == pytest.approx(300, rel=0.05) and elsewhere.watts is None  # these GPUs are not that server's

    def none(handle):
        raise gpu_state.pynvml.NVMLError(gpu_state.pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(gpu_state.pynvml, "nvmlDeviceGetTotalEnergyConsumption", none)
    with gpu_state.Power("http://127.0.0.1:1") as power:
        pass
    assert power.watts is None


@pytest.mark.gpu
def test_power_of_a_gpu_is_that_of_a_gpu():
    if gpu_state.energy(gpu_state.gpus()) is None:
        pytest.skip("this driver counts no energy")
    with gpu_state.Power("http://127.0.0.1:1") as power:
        time.sleep(1)
    assert 5 < power.watts / len(gpu_state.gpus()) < 1500


def test_a_torn_end_of_raw_is_cut_off(tmp_path):
    raw, key = tmp_path / "raw.jsonl", {"variant": "plain", "level": 1, "repeat": 0}
    begun = Measured(raw)
    begun.add_server("plain", {"version": "0.5.23"})
    begun.add_unit(key, {"wall_s": 1.0, "watts": None}, [{"id": "a"}])
    whole = raw.read_bytes()
    lines = (b'{"kind":"server","variant":"plain","info":{"version":"0.5.23"}}\n',
             b'{"kind":"request","variant":"plain","level":1,"repeat":0,"id":"a"}\n',
             b'{"kind":"unit","variant":"plain","level":1,"repeat":0,"wall_s":1.0,"watts":null}\n')
    server, unit = (hashlib.sha256(data).hexdigest().encode() for data in (lines[0], lines[1] + lines[2]))
    assert whole == b"".join([lines[0].replace(b"}\n", b',"sha256":"' + server + b'"}\n'), lines[1],
                              lines[2].replace(b"}\n", b',"sha256":"' + unit + b'"}\n')])
    # the last row is whole but for its newline: it was not finished
    raw.write_bytes(whole + b'{"kind":"request","id":"b"}\n'
                    b'{"kind":"unit","variant":"plain","level":3,"repeat":0,"wall_s":1.0,"watts":null}')
    found = Measured(raw)
    assert [(unit["wall_s"], [r["id"] for r in unit["requests"]]) for unit in found.units] == [(1.0, ["a"])]
    assert found.servers == {"plain": {"version": "0.5.23"}} and not found.probes
    assert raw.read_bytes() == whole
    found.add_probe("a:3:[1, 2]", {"gap": 9.0, "kind": "fault"})
    assert Measured(raw).probes == {"a:3:[1, 2]": {"gap": 9.0, "kind": "fault"}}


# ---- prompts ----
def prompt_args(**given):
    return argparse.Namespace(**{"prompts": [], "dataset": [], "ids": None, "limit": None, "thinking": ["on"],
                                 "trust_remote_code": False, "turns": 1, "context": [], "context_text": [], "check_answers": False}
                              | given)


def test_prompts_are_rendered_in_the_targets_format_in_both_modes(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "prompt": "What is a list?"}\n{"id": "b", "prompt_ids": [5, 6, 7]}\n')
    found = load_prompts(prompt_args(prompts=[path], thinking=["on", "off"]), str(TINY_KIMI))
    prompts = {prompt["id"]: prompt for prompt in found}
    assert set(prompts) == {"a@on", "a@off", "b"}
    assert prompts["b"]["prompt_ids"] == [5, 6, 7] and prompts["b"]["thinking"] == "recorded"
    tokenizer = __import__("transformers").AutoTokenizer.from_pretrained(TINY_KIMI)
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<think>", "</think>")]
    assert prompts["a@on"]["prompt_ids"][-1] == ends[0] and prompts["a@off"]["prompt_ids"][-2:] == ends


def test_shipped_prompts_load_and_are_many_kinds():
    prompts = load_prompts(prompt_args(), str(TINY_KIMI))
    assert {p["source"] for p in prompts} == {"chat", "code", "math", "reasoning", "summary", "chinese"}
    assert len(prompts) >= 50
    assert max(len(p["prompt_ids"]) for p in prompts if p["source"] == "summary") > 1000


@pytest.mark.parametrize("name, row, text", [
    ("mt-bench", {"prompt": ["first turn", "second turn"]}, "first turn"), ("gsm8k", {"question": "2 + 2?"}, "2 + 2?"),
    ("humaneval", {"prompt": "def f():"}, "def f():"), ("math-500", {"problem": "Solve."}, "Solve.")])
def test_data_sets_by_name_from_a_local_copy(tmp_path, name, row, text):
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    rows = all_rows(prompt_args(dataset=[f"{name}={tmp_path / 'd.jsonl'}"]))
    assert [(r["id"], r["source"], r["prompt"]) for r in rows] == [(f"{name}-{n}", name, text) for n in range(2)]


def test_rows_of_a_data_set_bring_what_their_answers_are_held_against(tmp_path):
    (tmp_path / "g.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"}) + "\n")
    (tmp_path / "h.jsonl").write_text(json.dumps({"prompt": "def f():\n", "test": "def check(c):\n    assert c() == 1\n", "entry_point": "f"}) + "\n")
    data = [f"gsm8k={tmp_path / 'g.jsonl'}", f"humaneval={tmp_path / 'h.jsonl'}"]
    number, code = load_prompts(prompt_args(dataset=data, check_answers=True), str(TINY_KIMI))
    assert number["check"] == {"answer": "2 + 2 = 4\n#### 4", "prompt": "2 + 2?"} and code["check"]["entry_point"] == "f"
    assert [run_program(program_of(f"    return {n}", code["check"])) for n in (1, 2)] == ["passed", "wrong"]
    assert not any("check" in prompt for prompt in load_prompts(prompt_args(dataset=data), str(TINY_KIMI)))


def test_bad_prompts_are_one_line(tmp_path):
    path = tmp_path / "p.jsonl"
    row = '{"id": "a", "prompt_ids": [1]}\n'
    for text, why in (('{"id": "a"}\n', "a row needs"), (row * 2, "more than once"), ("{", "not readable"),
                      (row + "[1]\n", "line 2: no object"), ('{"id": "a", "messages": 7}\n', "refuses 'a'")):
        path.write_text(text)
        with pytest.raises(UserError, match=why):
            load_prompts(prompt_args(prompts=[path]), str(TINY_KIMI))
    (tmp_path / "ids").write_text("nobody")
    path.write_text('{"id": "a", "prompt_ids": [1]}\n')
    with pytest.raises(UserError, match="none of its 1 ids"):
        load_prompts(prompt_args(prompts=[path], ids=tmp_path / "ids"), "")
    (tmp_path / "val_ids.json").write_text('{"ids": []}')
    with pytest.raises(UserError, match="no ids in it: its drafter was trained without validation samples"):
        load_prompts(prompt_args(prompts=[path], ids=tmp_path / "val_ids.json"), "")
    with pytest.raises(UserError, match="unknown; known: mt-bench"):
        load_prompts(prompt_args(dataset=["nonsense"]), "")


def test_the_doctor_of_a_drafter_without_validation_samples_asks_some_it_was_trained_on(tmp_path):
    """--val-ratio 0 leaves val_ids.json without ids and eagle3.json without a prediction."""
    (tmp_path / "responses").mkdir(), (tmp_path / "output").mkdir()
    (tmp_path / "responses/part-00000.jsonl").write_text("".join(
        json.dumps({"id": f"p{i}", "source": "chat", "prompt_ids": [1]}) + "\n" for i in range(100)))
    for ids, wanted in (([], [f"p{i}" for i in range(64)]), (["p70", "p3"], ["p3", "p70"])):
        (tmp_path / "output/val_ids.json").write_text(json.dumps({"ids": ids}))
        args = prompt_args(run_dir=tmp_path, draft_path=[tmp_path / "output/best"])
        prompts_of_training(args)
        assert [prompt["id"] for prompt in load_prompts(args, "")] == wanted
    record = {"id": "p3", "spec": {"verify_steps": 3, "correct_drafts": 2, "histogram": [1, 2]}, "completion_tokens": 6}
    assert prediction_check(None, [record], CHAIN, 0) is None
    found = diagnose(Facts(make_drafter(tmp_path / "draft", range(9)), {"prediction": None}, None, None, []), acceptance([record]), None)
    assert found["summary"].startswith("No comparison with training")


def test_line_separators_in_texts_and_spaces_in_ids_are_no_borders(tmp_path):
    (tmp_path / "part-00000.jsonl").write_text(
        '{"id": "a b", "prompt_ids": [1], "content": "one\u2028two\u0085three"}\n{"id": "a", "prompt_ids": [2]}\n')
    (tmp_path / "ids").write_text("a b\n")
    found = load_prompts(prompt_args(prompts=[tmp_path], ids=tmp_path / "ids"), "")
    assert [prompt["prompt_ids"] for prompt in found] == [[1]]


@pytest.mark.parametrize("argv, why", [
    (["--base-url", "host:30000"], "is no URL"),
    (["--base-url", "http://h", "--concurrency", "8", "1", "8"], "a value stands twice"),
    (["--base-url", "http://h", "--warmup", "-1"], "--warmup at least 0")])
def test_bad_flags_are_one_line(argv, why):
    with pytest.raises(UserError, match=why):
        bench.main(argv)


def test_a_drafter_that_changed_is_not_mixed_into_a_begun_report(tmp_path):
    drafter, prompts = make_drafter(tmp_path / "draft", range(9)), tmp_path / "p.jsonl"
    prompts.write_text('{"id": "a", "prompt_ids": [1]}\n')
    argv = ["--base-url", f"http://127.0.0.1:{free_port()}", "--draft-path", str(drafter), "--prompts", str(prompts),
            "--tokenizer", "none", "--output-dir", str(tmp_path / "report")]
    for name in (None, "config.json", "eagle3.json"):
        before = (drafter / name).read_text() if name else None
        if name:
            (drafter / name).write_text(json.dumps(json.loads(before) | {"capture_layers": [1, 2, 3]}))
            # something hangs on it: a unit was finished
            Measured(tmp_path / "report" / "raw.jsonl").add_unit({"variant": "plain", "level": 1, "repeat": 0},
                                                                 {"wall_s": 1.0, "watts": None}, [{"id": "a"}])
        with pytest.raises(UserError, match="begun with another config" if name else "no SGLang answers"):
            bench.main(argv)
        if name:
            (drafter / name).write_text(before)


def test_sweep_grid_is_checked():
    assert sweep_variants(["3,1,4"]) == {"steps3-topk1-drafts4": {
        "speculative-num-steps": 3, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4}}
    for bad in ("3,1", "3,1,5", "0,1,1", "2,2,9"):
        with pytest.raises(UserError):
            sweep_variants([bad])


# ---- servers with bad manners ----
class Rude(BaseHTTPRequestHandler):
    """Answers /generate as the first input id says."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = body["input_ids"][0] if "input_ids" in body else 1
        if kind == 1:
            self.send_response(500)
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"broken")
            return
        if kind == 2:
            self.close_connection = True
            return
        if kind == 7:
            time.sleep(1)  # longer than the client waits
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        meta = {"prompt_tokens": 1, "completion_tokens": 1, "finish_reason": None}
        events = [{"text": 'a "completion_tokens":9', "output_ids": [8], "meta_info": meta}]
        if kind == 3:
            events.append({"error": {"message": "out of memory"}})
        elif kind == 4:
            events.append({"output_ids": [8, 9], "meta_info": {
                **meta, "completion_tokens": 2, "finish_reason": {"type": "abort", "message": "no"}}})
        elif kind != 5:  # 5: the stream just ends
            ids = [9] if kind == 6 else [8, 9]  # 6: as --incremental-streaming-output sends it
            events.append({"output_ids": ids, "meta_info": {
                **meta, "completion_tokens": 2, "finish_reason": {"type": "length"}, "spec_verify_ct": 1,
                "spec_num_correct_drafts": 0, "spec_correct_drafts_histogram": [1]}})
        for event in events:
            data = b"data: " + json.dumps(event).encode() + b"\n\n"
            for part in (data[:7], data[7:]):  # an event may arrive in pieces
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")


class Given:
    """Stands for Endpoints: a server at a fixed URL, which answers /health or does not say that it is gone."""

    def __init__(self, url, says_it_is_alive=False):
        self.url, self.says_it_is_alive = url, says_it_is_alive

    def alive(self):
        return self.says_it_is_alive or healthy(self.url)


def sent(url, kinds, streams=1, incremental=False, timeout=10.0, says_it_is_alive=True):
    """The records of one request of each kind of Rude, and the wall time."""
    connection = load.Connection(url, {}, incremental, timeout, Given(url, says_it_is_alive))
    prompts = [{"id": str(kind), "prompt_ids": [kind]} for kind in kinds]
    return asyncio.run(load.run_unit(connection, prompts, streams, {}, "test"))


def test_every_bad_answer_is_a_failed_request_of_its_kind():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rude)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url, kinds = f"http://127.0.0.1:{server.server_port}", (0, 1, 2, 3, 4, 5, 0)
    records, wall = sent(url, kinds, streams=2)
    assert [record.get("error") for record in records] == [None, "http 500", "connection", "error event", "aborted",
                                                           "cut", None]
    assert records[0]["output_ids"] == [8, 9] and records[0]["counts"] == [1, 2]
    assert records[0]["spec"]["verify_steps"] == 1 and wall > 0
    assert "broken" in records[1]["message"] and "out of memory" in records[3]["message"]
    assert sent(url, [6], incremental=True)[0][0]["output_ids"] == [8, 9]
    assert sent(url, [7], timeout=0.2)[0][0]["error"] == "timeout"
    with pytest.raises(ServerGone, match="went away"):  # nor does its /health answer: not to be waited for every time
        sent(url, [7] * 9, timeout=0.2, says_it_is_alive=False)
    flush_cache(url, {})  # a server that will not is no failure
    assert probe_difference(url, {}, [1], [3, 4], 1) == {"kind": "not probed: http 500"}
    server.shutdown()
    server.server_close()
    with pytest.raises(ServerGone, match="went away"):
        probe_difference(url, {}, [1], [3, 4], 1)
    with pytest.raises(ServerGone, match="went away"):
        sent(url, kinds, streams=2, says_it_is_alive=False)


def test_only_an_sglang_with_this_drafter_will_do(tmp_path):
    class Info(BaseHTTPRequestHandler):
        body = b"<html>"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.body)))
            self.end_headers()
            self.wfile.write(self.body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Info)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for body in (b"<html>", b"[1]", b'{"model": "other"}'):
        Info.body = body
        with pytest.raises(UserError, match="not as SGLang does"):
            contact(url, "plain", {}, DraftFolder(None))
    ours, copy, later = (make_drafter(tmp_path / name, range(9)) for name in ("ours", "copy", "later"))
    weights = later / "model.safetensors"
    save_file({**load_file(weights), "norm.weight": torch.full([HIDDEN], 2.0)}, weights)  # of the same size
    named = DraftFolder(ours, {"target": TINY_KIMI.name})
    for served, fits in ((ours, True), (copy, True), (later, False)):
        Info.body = json.dumps({"model_path": str(TINY_KIMI), "speculative_algorithm": "EAGLE3",
                                "speculative_draft_model_path": str(served)}).encode()
        if fits:
            assert contact(url, "speculative", {}, named)["model_path"] == str(TINY_KIMI)
        else:
            with pytest.raises(UserError, match="which is not --draft-path"):
                contact(url, "speculative", {}, named)
    server.shutdown()
    server.server_close()


# ---- the doctor ----
@pytest.fixture
def patient(tmp_path):
    """A healthy drafter, its run folder and the facts of a healthy server; returns examine(**changes of the server)."""
    tokens = np.arange(100, 100 + 2 * DRAFT_VOCAB, 2)
    folder, run_dir = make_drafter(tmp_path / "output" / "best", tokens.tolist()), tmp_path
    (run_dir / "vocab_mapping").mkdir()
    np.save(run_dir / "vocab_mapping" / "d2t.npy", tokens - np.arange(DRAFT_VOCAB))
    (run_dir / "responses").mkdir()
    (run_dir / "responses" / "part-00000.jsonl").write_text(json.dumps({"id": "a", "prompt_ids": [1, 2, 3, 4]}) + "\n")
    norm = Target(TINY_KIMI).final_norm()
    state = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)) * 3
    (run_dir / "hidden_states" / "ab").mkdir(parents=True)
    sample = run_dir / "hidden_states" / "ab" / "a.safetensors"

    def save(states):
        save_file({"last_hidden_states": states.to(torch.bfloat16)}, sample, {"checksum": ""})

    save(state / state.pow(2).mean(1, keepdim=True).sqrt() * norm)
    server = {"version": "0.5.23", "model_path": str(TINY_KIMI), "context_length": None,
              "speculative_draft_model_quantization": None}

    def edit(**changes):
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(config))

    def store(**changes):
        weights = load_file(folder / "model.safetensors") | changes
        weights = {name: value for name, value in weights.items() if value is not None}
        save_file(weights, folder / "model.safetensors")
        tell(weights_sha256=sha256_file(folder / "model.safetensors"))

    def tell(**changes):
        provenance = json.loads((folder / "eagle3.json").read_text())
        (folder / "eagle3.json").write_text(json.dumps(provenance | changes))

    def causes(prompts=None, accept=None, check=None, **changes):
        facts = Facts(folder, json.loads((folder / "eagle3.json").read_text()), server | changes, run_dir,
                            prompts or [{"id": "a", "prompt_ids": [9, 3, 4]}])
        found = diagnose(facts, accept, check)
        assert not found["unchecked"], found["unchecked"]
        return [finding["cause"] for finding in found["findings"]]

    def trained_with(d2t):
        tell(d2t_sha256=hashlib.sha256(d2t.astype("<i8").tobytes()).hexdigest())

    return argparse.Namespace(folder=folder, run_dir=run_dir, edit=edit, store=store, causes=causes, save=save,
                              state=state, tokens=tokens, trained_with=trained_with, tell=tell, server=server)


def test_a_healthy_drafter_has_nothing(patient):
    assert patient.causes() == []
    assert patient.causes(accept={"correct_drafts": 5, "verify_steps": 9}) == []


LAYERS = {"eagle_aux_hidden_state_layer_ids": CAPTURE_LAYERS}
PLANTED = {
    "capture layers": lambda p: p.edit(eagle_config={
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in CAPTURE_LAYERS]}),
    "eagle_config misplaced": lambda p: p.edit(eagle_config="absent", **LAYERS),
    "head_dim": lambda p: p.edit(head_dim="absent"),
    "RoPE": lambda p: p.edit(rope_theta=10000.0),
    # 2048 is what transformers takes then
    "max positions below the context": lambda p: p.edit(max_position_embeddings="absent"),
    "d2t read as ids": lambda p: p.store(d2t=torch.tensor(p.tokens)),
    "stale vocabulary map": lambda p: p.store(d2t=torch.tensor(p.tokens + 1 - np.arange(DRAFT_VOCAB))),
    "embedding not shared": lambda p: p.edit(target_hidden_size=HIDDEN // 2),
    "final state before the norm": lambda p: p.save(p.state),
    "norm flags": lambda p: p.edit(norm_output=True),
    "weights": lambda p: p.store(**{"fc.weight": None}),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_the_doctor_names_the_planted_cause_and_no_other(patient, cause):
    PLANTED[cause](patient)
    assert patient.causes() == [cause]


def test_the_doctor_names_faults_of_the_server_and_the_prompts(patient):
    assert patient.causes(version="0.5.12.post1") == ["capture layers"]  # adds 1 to every id
    assert patient.causes(context_length=8192) == ["max positions below the context"]
    assert patient.causes(speculative_draft_model_quantization="fp8") == ["quantised draft"]
    assert patient.causes(prompts=[{"id": "a", "prompt_ids": [9, 4, 5]}]) == ["chat template or thinking mode"]
    assert patient.causes(accept={"correct_drafts": 0, "verify_steps": 9}) == ["accept_length exactly 1.00"]
    patient.edit(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert patient.causes() == ["RoPE"]
    patient.edit(rope_scaling=None, eagle_config=LAYERS | {"use_aux_hidden_state": False})
    assert patient.causes() == ["capture layers"]


def test_the_doctor_reads_layer_ids_by_the_targets_own_file(patient, tmp_path):
    """Layers 5, 15, 25: Llama's ids are 4, 14, 24 in every release; of a target in no table only what its maker said."""
    def causes(ids, architecture, version="0.5.23"):
        config = json.loads((TINY_KIMI / "config.json").read_text()) | {"architectures": [architecture]}
        (target / "config.json").write_text(json.dumps(config))
        patient.edit(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
        return patient.causes(model_path=str(target), version=version)

    target = shutil.copytree(TINY_KIMI, tmp_path / "target")
    patient.tell(capture_layers=[5, 15, 25])
    below = [4, 14, 24]
    for version in ("0.5.10", "0.5.23"):
        assert causes(below, "LlamaForCausalLM", version) == []
        assert causes([5, 15, 25], "LlamaForCausalLM", version) == ["capture layers"]
        wrong = causes(below, "KimiK25ForConditionalGeneration", version)
        assert wrong == ([] if version == "0.5.10" else ["capture layers"])
    with pytest.raises(AssertionError, match="say with 04_train.py --layer-id-rule"):
        causes(below, "NobodysForCausalLM")  # unchecked, not healthy
    patient.tell(layer_id_rule="add-one")
    assert causes(below, "NobodysForCausalLM") == []
    assert causes([5, 15, 25], "NobodysForCausalLM") == ["capture layers"]


def test_training_knows_its_map_also_where_the_run_folder_holds_another(patient):
    offsets = patient.tokens - np.arange(DRAFT_VOCAB)
    patient.trained_with(offsets)
    np.save(patient.run_dir / "vocab_mapping" / "d2t.npy", np.arange(9))
    assert patient.causes() == []
    patient.store(d2t=torch.tensor(patient.tokens))
    assert patient.causes() == ["d2t read as ids"]
    patient.store(d2t=torch.tensor(offsets + 1))
    assert patient.causes() == ["stale vocabulary map"]


def test_both_modes_are_looked_for_in_all_training_prompts(patient):
    rows = [{"id": f"a{n:04}", "prompt_ids": [1, 2, 3, 4]} for n in range(2500)]
    rows += [{"id": "b", "prompt_ids": [1, 2, 4, 5]}]
    (patient.run_dir / "responses" / "part-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def causes(*prompts):
        return patient.causes(prompts=[{"id": str(number), "prompt_ids": ids} for number, ids in enumerate(prompts)])

    assert causes([9, 3, 4], [9, 4, 5]) == []
    assert causes([9, 3, 4], [9, 5, 5]) == ["chat template or thinking mode"]


@pytest.mark.parametrize("plant", [
    lambda p: p.store(**{"midlayer.self_attn.q_proj.weight": None}),
    lambda p: p.edit(num_key_value_heads=4), lambda p: p.edit(intermediate_size=256),
    lambda p: p.store(d2t=torch.arange(9)), lambda p: p.edit(num_attention_heads="absent"),
    lambda p: p.edit(draft_vocab_size=None)])
def test_weights_that_do_not_fit_config_json_end_in_a_finding_and_not_in_a_traceback(patient, plant):
    plant(patient)
    found = diagnose(Facts(patient.folder, {}, None, None, []), None, None)
    assert [finding["cause"] for finding in found["findings"]] == ["weights"] or "weights" in found["unchecked"]


def test_a_drafter_that_was_copied_in_part_is_one_line(patient):
    whole = (patient.folder / "model.safetensors").read_bytes()
    for data in (whole[:-9], whole[:50], b"version https://git-lfs.github.com/spec/v1"):
        (patient.folder / "model.safetensors").write_bytes(data)
        with pytest.raises(UserError, match="Export or copy it again"):
            Facts(patient.folder, {}, None, None, [])


def test_positions_below_the_context_are_named_before_the_server_that_refuses_them(tmp_path, capsys):
    drafter = make_drafter(tmp_path / "draft", range(9))
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt_ids": [1]}\n')
    flags = {"model-path": str(TINY_KIMI), "context-length": 8192, "port": free_port()}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"servers": {
        "plain": {"command": ["false"], "flags": flags},
        "speculative": {"extends": "plain", "flags": {"speculative-draft-model-path": str(drafter)}}}}))
    with pytest.raises(UserError, match="ended with code 1"):
        bench.main(["--config", str(tmp_path / "run.yaml"), "--launch", "--doctor", "--draft-path", str(drafter),
                    "--prompts", str(tmp_path / "p.jsonl"), "--output-dir", str(tmp_path / "report")])
    assert ("doctor: max positions below the context: max_position_embeddings is 4096, "
            "the server takes contexts of 8192") in capsys.readouterr().out


def test_a_cause_that_cannot_be_checked_is_said(patient):
    found = diagnose(Facts(patient.folder, {}, None, None, []), None, None)
    unchecked = {"capture layers", "quantised draft", "stale vocabulary map", "final state before the norm"}
    assert not found["findings"] and unchecked <= set(found["unchecked"])


CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}


def checked(samples, records, server=CHAIN, temperature=0.0):
    return prediction_check({"num_steps": 3, "accept_length": 2.0, "samples": samples}, records, server, temperature)


def test_gap_between_prediction_and_serving(patient):
    records = [answer(f"p{n}", list(range(21)), verify=10, correct=10, histogram=[0, 10]) for n in range(10)]
    samples = {f"p{n}": [10, 10] for n in range(10)}
    facts = Facts(patient.folder, {}, None, None, [])
    check = checked(samples, records)
    assert check["predicted"] == check["served"] == 2 and check["of_validation"]
    assert check["equal_answers"] == check["as_long_answers"] == 10
    assert diagnose(facts, None, check)["gap"] is False
    check = checked({name: [8, 12] for name in samples}, records)
    assert check["predicted"] == 2.5 and check["ratio"] == pytest.approx(0.8) and check["equal_answers"] == 0
    assert check["interval"] == pytest.approx([0.8, 0.8])  # every sample falls short by the same
    said = diagnose(facts, None, check)
    assert said["gap"] is True and "other texts" not in said["summary"]
    said = diagnose(facts, None, checked({name: [80, 120] for name in samples}, records))
    assert said["gap"] is True and "10 answers are not as long as the sample" in said["summary"]


def test_what_training_did_not_predict_is_no_gap(patient):
    records = [answer(f"p{n}", list(range(16)), verify=10, correct=5, histogram=[5, 5]) for n in range(10)]
    samples = {f"p{n}": [8, 12] for n in range(10)}
    assert checked(samples, records)["ratio"] == pytest.approx(0.6)
    for server, temperature in ((CHAIN | {"speculative_num_steps": 1}, 0), (CHAIN | {"speculative_eagle_topk": 4}, 0),
                                (CHAIN, 0.7), ({}, 0)):
        assert checked(samples, records, server, temperature) is None
    said = diagnose(Facts(patient.folder, {}, None, None, []), None, checked({}, records))  # not the validation samples
    assert said["gap"] is None and "10 answers to other prompts" in said["summary"]


def test_repeats_are_no_new_prompts():
    records = [answer(f"p{n}", list(range(11 + n)), verify=10, correct=n, histogram=[10]) for n in range(8)]
    once, often = (checked({f"p{n}": [10, 4] for n in range(8)}, records * times)["interval"] for times in (1, 9))
    assert once == pytest.approx(often)


# ---- whole runs on the real engine ----
@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A run file for the tiny target and a random drafter, and prompts, as texts and as ids; write(name, **flags of 05) -> its path."""
    folder = tmp_path_factory.mktemp("bench")
    drafter = make_drafter(folder / "draft", range(0, 2 * DRAFT_VOCAB, 2))
    rows = [{"id": f"p{n}", "source": "a" if n % 2 else "b", "prompt": f"Question {n}: what is a list?"}
            for n in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "ids.jsonl").write_text("".join(json.dumps({"id": f"p{n}", "prompt_ids": [300 + n, 301]}) + "\n" for n in range(6)))

    def write(name: str, **flags) -> tuple[Path, Path]:
        run = folder / name
        command = ["{python}", str(ROOT / "scripts/cpu_engine/serve.py")]
        plain = {"model-path": str(TINY_KIMI), "port": free_port(), "dtype": "float32", "sleep-on-idle": True}
        speculative = {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": str(drafter),
                       "speculative-num-steps": 3, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4}
        benchmark = {"launch": True, "draft-path": str(drafter), "prompts": str(folder / "prompts.jsonl"),
                     "concurrency": [1, 3], "max-tokens": 24, "launch-timeout": 300, "repeats": 1,
                     "output-dir": "{run_dir}/report"} | flags
        document = {"run_dir": str(run), "benchmark": benchmark, "servers": {
            "plain": {"command": command, "flags": plain, "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}},
            "speculative": {"extends": "plain", "flags": speculative}}}
        run.mkdir()
        (run / "run.yaml").write_text(yaml.safe_dump(document))
        return run / "run.yaml", run / "report"

    return write


def start(config: Path) -> subprocess.Popen:
    argv = [sys.executable, "-u", str(ROOT / "05_benchmark.py"), "--config", str(config)]
    return preloaded.popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           env={**os.environ, "HF_HUB_OFFLINE": "1"})


def wait_for(process: subprocess.Popen, words: str) -> list[str]:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError(f"ended before {words!r}:\n{''.join(lines)}")


def port_of(config: Path) -> int:
    return yaml.safe_load(config.read_text())["servers"]["plain"]["flags"]["port"]


def port_is_free(port: int, within: float = 20) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return True
            except OSError:
                time.sleep(0.2)
    return False


def killed_at(config: Path, out: Path, words: str) -> bytes:
    """05, killed with -9 once it has said `words`; no server outlives it. What its raw.jsonl then holds."""
    process = start(config)
    wait_for(process, words)
    process.kill()
    process.wait()
    assert port_is_free(port_of(config)), "a server outlived 05"
    return (out / "raw.jsonl").read_bytes()


def test_killed_in_the_middle_it_goes_on_and_its_figures_are_those_of_the_raw_answers(workplace, capsys):
    config, out = workplace("resume")
    before = killed_at(config, out, "plain c1 r0 finished")
    assert "Incomplete: 1 of 4 units" in (out / "report.md").read_text()
    done = run_script("05_benchmark", "--config", config)
    assert done.returncode == 0, done.stderr
    assert "1 finished before" in done.stdout and "\r" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"done: {out / 'report.md'}")
    rows = [json.loads(line) for line in (out / "raw.jsonl").read_text().splitlines()]
    assert (out / "raw.jsonl").read_bytes().startswith(before)

    report = json.loads((out / "report.json").read_text())
    for level in (1, 3):
        for variant in ("plain", "speculative"):
            of = [row for row in rows if row.get("variant") == variant and row.get("level") == level]
            answers, (unit,) = ([row for row in of if row["kind"] == kind] for kind in ("request", "unit"))
            figures = report["levels"][str(level)][variant]
            assert len(answers) == 6
            assert all(len(r["output_ids"]) == r["completion_tokens"] == r["counts"][-1] for r in answers)
            assert figures["tok_s"] == pytest.approx(sum(len(r["output_ids"]) for r in answers) / unit["wall_s"])
            assert figures["ttft_s"]["p50"] == pytest.approx(np.percentile([r["times_s"][0] for r in answers], 50))
            if variant == "speculative":
                verify, correct = (sum(r["spec"][key] for r in answers) for key in ("verify_steps", "correct_drafts"))
                assert figures["accept"]["accept_length"] == 1 + correct / verify and verify > 0
                assert len(figures["accept"]["accept_by_position"]) == 3
                # SGLang's speculation is lossless
                assert figures["same_text"] == {"compared": 6, "equal": 6, "other_context": 0, "share": 1.0, "differences": []}
            else:
                assert figures["accept"] is None
    assert set(report["verdict"]) == {"1", "3"} and set(report["variants"]["speculative"]["by_source"]) == {"prompts"}
    for name in ("tok_s.png", "speed_up.png", "acceptance.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in (out / "report.md").read_text()
    manifest = read_manifest(out, "05_benchmark")
    assert manifest["counts"] == {"kept": 6, "units": 4, "failed": {}} and manifest["versions"]["sglang"] == ["0.5.23"]

    capsys.readouterr()
    assert not bench.main(["--config", str(config)])
    again = capsys.readouterr().out
    assert "complete already" in again and "accept_length" in again and "starting" not in again
    with pytest.raises(UserError, match="max-tokens: 24 there, 25 now"):
        bench.main(["--config", str(config), "--max-tokens", "25"])


def test_a_server_that_dies_is_one_line_that_names_its_log_and_sigterm_leaves_no_server(workplace):
    config, out = workplace("dies", **{"max-tokens": 2000, "fixed-length": True, "prompts": "{run_dir}/../ids.jsonl"})
    process = start(config)
    wait_for(process, "plain c1 r0 0/6")  # the first answer takes many seconds
    commands = {int(path.parent.name): path.read_bytes().decode(errors="replace")
                for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    server = next(pid for pid, command in sorted(commands.items()) if f"--port\0{port_of(config)}" in command)
    os.killpg(server, signal.SIGKILL)
    rest = process.stdout.read()
    assert process.wait() == 1 and "went away" in rest and str(config.parent / "logs" / "server_plain.log") in rest
    assert "Traceback" not in rest

    process = start(config)
    wait_for(process, "plain c1 r0 0/6")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert port_is_free(port_of(config)), "a server outlived 05"


def test_bad_input_is_one_line_and_exit_2(workplace, tmp_path, engine):
    def refused(*args) -> str:
        with pytest.raises(UserError) as caught:
            bench.main(list(map(str, args)))
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    config, _ = workplace("bad")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port_of(config)))
        taken.listen()
        assert f"port {port_of(config)} is taken" in refused("--config", config)
    nobody = f"http://127.0.0.1:{free_port()}"
    assert "no SGLang answers" in refused("--base-url", nobody, "--output-dir", tmp_path / "r1")
    done = run_script("05_benchmark", "--output-dir", tmp_path / "r2")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "--base-url" in done.stderr
    assert "holds no config.json" in refused("--config", config, "--draft-path", tmp_path)
    assert "Make them equal" in refused("--config", config, "--draft-path", make_drafter(tmp_path / "other", range(9)))
    server, prompts = engine(), config.parent.parent / "prompts.jsonl"
    # where two answers part: the target's own log-probabilities of the two tokens
    sampling = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = post(f"{server.url}/generate", {"input_ids": [7, 8, 9], "return_logprob": True, "top_logprobs_num": 2,
                                             "sampling_params": sampling})
    (best, first, _), (next_best, second, _) = answer["meta_info"]["output_top_logprobs"][2]
    context = [7, 8, 9] + answer["output_ids"][:2]
    probe = probe_difference(server.url, {"Content-Type": "application/json"}, context, [first, second],
                                       near_tie=1e-3)
    assert probe["gap"] == pytest.approx(best - next_best, abs=1e-3)
    assert probe["kind"] == ("near-tie" if probe["gap"] <= 1e-3 else "fault")
    assert probe_difference(server.url, {}, [], [None, 5], 1)["kind"] == "one answer is the beginning of the other"

    given = ["--base-url", server.url, "--prompts", prompts]
    assert "runs without EAGLE3" in refused(*given, "--output-dir", tmp_path / "r3")
    wrong = make_drafter(tmp_path / "wrong", range(9))
    (wrong / "eagle3.json").write_text(json.dumps({"target": "another-model"}))
    given += ["--baseline-url", server.url, "--draft-path", wrong]
    assert "was trained for another-model" in refused(*given, "--output-dir", tmp_path / "r4")


@pytest.mark.slow  # one server start per point
def test_sweep_names_the_best_flags_and_goes_on_without_a_point_that_does_not_start(workplace):
    """The line it names starts them."""
    grid = ["1,1,2", "3,1,4", "2,2,4"]
    config, out = workplace("sweep", sweep=True, concurrency=[2], limit=4, **{"sweep-grid": grid})
    document = yaml.safe_load(config.read_text())
    gate = config.with_name("gate.py")  # a server that has no memory for one of the points
    gate.write_text(f"""import os, sys
if "3" in sys.argv[sys.argv.index("--speculative-num-steps"):][1:2]:
    sys.exit("out of memory")
os.execv(sys.executable, [sys.executable, {str(ROOT / "scripts/cpu_engine/serve.py")!r}, *sys.argv[1:]])
""")
    document["servers"]["speculative"]["command"] = ["{python}", str(gate)]
    config.write_text(yaml.safe_dump(document))
    done = run_script("05_benchmark", "--config", config, timeout=900)
    assert done.returncode == 1 and "lacks 1 of 3 sweep points (steps3-topk1-drafts4)" in done.stderr.splitlines()[-1]
    report = json.loads((out / "report.json").read_text())
    assert "ended with code 1" in report["left_out"]["steps3-topk1-drafts4"]
    assert "steps3-topk1-drafts4 is left out" in (out / "report.md").read_text()
    # there is memory now: the same command measures the rest
    gate.write_text(gate.read_text().replace('"3" in', '"3" * 9 in'))
    done = run_script("05_benchmark", "--config", config, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished |") == 1 and (out / "manifest.json").exists()
    report = json.loads((out / "report.json").read_text())
    assert set(report["levels"]["2"]) == {"plain", "steps1-topk1-drafts2", "steps3-topk1-drafts4",
                                          "steps2-topk2-drafts4"}
    assert not report["left_out"]
    assert all(len(report["variants"][name]["accept"]["accept_by_position"]) == steps for name, steps in
               (("steps1-topk1-drafts2", 1), ("steps2-topk2-drafts4", 2)))
    assert all(report["levels"]["2"][name]["same_text"]["share"] == 1 for name in report["variants"])
    best = report["sweep"]["2"]
    fastest = max(report["levels"]["2"], key=lambda name: report["levels"]["2"][name]["tok_s"])
    assert best["variant"] == fastest and "--model-path" in best["command"]
    if fastest != "plain":
        for flag, value in (("num-steps", fastest[5]), ("eagle-topk", fastest[11])):
            assert f"--speculative-{flag} {value}" in best["command"]
