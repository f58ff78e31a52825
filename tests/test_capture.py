"""The patch's capture module: what it writes is what transformers computes, whatever the batch looks like (proof 1)."""
import hashlib
import json
import os
import queue
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import CAPTURE_LAYERS, ROOT, TINY_KIMI, Engine, free_port, load_script, post, sglang
from eagle3.states import StateFile, check_header, check_ids, facts_token_bytes
from eagle3.verify import check_data
from stand_in import capture_hash

CHUNK = 256
TOLERANCE = 2e-5
GREEDY = {"temperature": 0, "ignore_eos": True}


def rid(run: str, ids: list[int], sample_id: str, prompt_len: int = 1) -> str:
    return f"eagle3:{run}:{prompt_len}:{len(ids)}:{sample_id}"


def capture_into(folder: Path) -> dict[str, str]:
    """A capturing server's environment."""
    return {"EAGLE3_CAPTURE_DIR": str(folder), "EAGLE3_CAPTURE_LAYERS": ",".join(map(str, CAPTURE_LAYERS))}


def random_ids(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 10007 + n).randrange(300, 2000) for n in range(length)]


def wait_for(path: Path, seconds: float = 30) -> Path:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)
    return path


def send(url: str, requests: list[tuple[str, list[int]]], max_new_tokens: int = 1) -> list[dict]:
    """Requests (rid, ids) as one /generate batch."""
    return post(f"{url}/generate", {"rid": [name for name, _ in requests], "input_ids": [ids for _, ids in requests],
                                    "sampling_params": {**GREEDY, "max_new_tokens": max_new_tokens}})


def text_model(folder: Path, target: Path):
    """The target's text model in transformers, float32, attention in plain matrix products."""
    from transformers import AutoModelForCausalLM

    config = json.loads((target / "config.json").read_text())["text_config"]
    folder.mkdir(parents=True, exist_ok=True)
    config |= {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(target / "model.safetensors")
    save_file({name.removeprefix("language_model."): tensor.float() for name, tensor in weights.items()
               if name.startswith("language_model.")}, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                       experts_implementation="eager", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for module in model.modules():
        # transformers builds q_a_layernorm and kv_a_layernorm with 1e-6, SGLang with the config's
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = config["rms_norm_eps"]
    return model.eval()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("hf"), TINY_KIMI)


def expected(model, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(aux (T, 3H), last (T, H)) by transformers: hidden_states[L] enters layer L, the final one is after the norm."""
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in CAPTURE_LAYERS], dim=-1), states[-1][0]


def check(path: Path, model, ids: list[int], prompt_len: int = 1) -> None:
    found = load_file(wait_for(path))
    aux, last = expected(model, ids)
    assert found["input_ids"].dtype == torch.int32 and found["input_ids"].tolist() == ids
    assert found["loss_mask"].dtype == torch.uint8
    assert found["loss_mask"].tolist() == [0] * prompt_len + [1] * (len(ids) - prompt_len)
    for number, layer in enumerate(CAPTURE_LAYERS):
        columns = slice(number * aux.shape[1] // 3, (number + 1) * aux.shape[1] // 3)
        assert (found["aux_hidden_states"][:, columns] - aux[:, columns]).abs().max() < TOLERANCE, f"layer {layer}"
    assert (found["last_hidden_states"] - last).abs().max() < TOLERANCE


@pytest.fixture
def capturing(engine):
    return engine(capture_dir=True, chunked_prefill_size=CHUNK)


@pytest.fixture
def capture_dir(capturing):
    return capturing.capture_dir


def prefill_batches(log: Path) -> list[tuple[int, int]]:
    """(sequences, tokens) of each prefill batch the server logged."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Prefill batch" in line]
    return [tuple(int(line.split(f"#{key}: ")[1].split(",")[0]) for key in ("new-seq", "new-token")) for line in lines]


# ---- On the real engine ----
def test_four_lengths_in_one_prefill_batch(capturing, capture_dir, reference):
    samples = {f"n{length}": random_ids(length, length) for length in (1, 7, 61, 127)}
    for attempt in range(5):  # the scheduler takes what has arrived: usually all four, always in the end
        before = len(prefill_batches(capturing.log))
        send(capturing.url, [(rid(f"four{attempt}", ids, name), ids) for name, ids in samples.items()])
        if (4, sum(map(len, samples.values()))) in prefill_batches(capturing.log)[before:]:
            break
    else:
        pytest.fail("the four samples never were one prefill batch")
    for name, ids in samples.items():
        check(capture_dir / f"four{attempt}" / f"{name}.safetensors", reference, ids)


def test_sample_longer_than_the_prefill_chunk(capturing, capture_dir, reference):
    ids = random_ids(2 * CHUNK + 77, 5)
    before = len(prefill_batches(capturing.log))
    send(capturing.url, [(rid("long", ids, "long", prompt_len=300), ids)])
    check(capture_dir / "long/long.safetensors", reference, ids, prompt_len=300)
    assert len(prefill_batches(capturing.log)) - before == 3


def test_two_samples_that_share_a_long_prefix(capturing, capture_dir, reference):
    shared = random_ids(90, 6)
    first, second = shared + random_ids(11, 7), shared + random_ids(23, 8)
    for name, ids in (("first", first), ("second", second)):  # in turn: a radix cache would have the prefix by then
        send(capturing.url, [(rid("prefix", ids, name), ids)])
    check(capture_dir / "prefix/first.safetensors", reference, first)
    check(capture_dir / "prefix/second.safetensors", reference, second)


def test_last_states_choose_the_tokens_that_greedy_decoding_emits(capturing, capture_dir, reference):
    prompt = random_ids(9, 9)
    sampling = {**GREEDY, "max_new_tokens": 40}
    answer = post(f"{capturing.url}/generate", {"input_ids": prompt, "sampling_params": sampling})["output_ids"]
    ids = prompt + answer[:-1]
    send(capturing.url, [(rid("greedy", ids, "greedy", len(prompt)), ids)])
    last = load_file(wait_for(capture_dir / "greedy/greedy.safetensors"))["last_hidden_states"]
    assert (last @ reference.lm_head.weight.T).argmax(-1)[len(prompt) - 1:].tolist() == answer


def test_foreign_requests_leave_no_files(capturing, capture_dir):
    ids = random_ids(12, 11)
    before = sorted(capture_dir.rglob("*"))
    # A rid of SGLang's own
    post(f"{capturing.url}/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}})
    for name in ("mine", "eagle3:run:1:12", "eagle3:../up:1:12:x", "eagle3:run:1:12:../../x", "eagle3:run:1:x:y"):
        send(capturing.url, [(name, ids)], max_new_tokens=3)
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    answer = post(f"{capturing.url}/generate", {"text": "hello", "sampling_params": sampling})
    assert answer["meta_info"]["completion_tokens"] == 2
    assert sorted(capture_dir.rglob("*")) == before


def test_capture_amid_other_traffic_and_decoding(capturing, capture_dir, reference):
    """Captured requests that go on decoding, mixed with foreign ones in the same batches."""
    samples = {f"m{number}": random_ids(20 + 31 * number, 20 + number) for number in range(5)}
    requests = [item for name, ids in samples.items()
                for item in ((rid("mixed", ids, name), ids), (f"other-{name}", ids[:17]))]
    answers = send(capturing.url, requests, max_new_tokens=6)
    assert all(answer["meta_info"]["completion_tokens"] == 6 for answer in answers)
    for name, ids in samples.items():
        check(capture_dir / f"mixed/{name}.safetensors", reference, ids)


def test_file_is_a_contract(capturing, capture_dir):
    ids = random_ids(33, 30)
    send(capturing.url, [(rid("meta", ids, "meta.1_a", 4), ids)])
    path = wait_for(capture_dir / "meta/meta.1_a.safetensors")
    contract = json.loads((ROOT / "configs/artifacts.json").read_text())["stages"]["03_extract"]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == set(contract["tensors"])
    assert set(metadata) == set(contract["metadata"])
    stated = {"id": "meta.1_a", "target": TINY_KIMI.name, "capture_layers": "2,4,6", "prompt_len": "4",
              "sglang_version": "0.5.23", "dtype": "float32"}
    assert {key: metadata[key] for key in stated} == stated
    raw = path.read_bytes()
    assert metadata["checksum"] == "sha256:" + hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little"):]).hexdigest()
    assert metadata["patch_hash"] == capture_hash()
    parts = dict(part.split(":") for part in metadata["weights"].split())
    assert list(parts) == ["embed", "head", "norm", "layers"]
    weights = load_file(TINY_KIMI / "model.safetensors")
    for part, name in (("embed", "model.embed_tokens.weight"), ("head", "lm_head.weight"), ("norm", "model.norm.weight")):
        rows = weights[f"language_model.{name}"].float()
        rows = rows[:256:16].contiguous() if rows.dim() > 1 else rows
        assert parts[part] == hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:8], part


def test_client_that_leaves_amid_the_chunks_costs_nothing(capturing, capture_dir, reference):
    ids = random_ids(12 * CHUNK, 40)
    request = {"input_ids": ids, "rid": rid("left", ids, "left"), "sampling_params": {"max_new_tokens": 1}}
    body = json.dumps(request).encode()
    with socket.create_connection(("127.0.0.1", capturing.port)) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(capture_dir / "left/left.safetensors.tmp")
    again = random_ids(50, 41)
    send(capturing.url, [(rid("left", again, "again"), again)])
    check(capture_dir / "left/again.safetensors", reference, again)
    left = capture_dir / "left/left.safetensors"  # finished nevertheless, or never to be: not a torn file
    assert not left.exists() or load_file(left)["input_ids"].tolist() == ids


def test_the_servers_very_first_request_is_captured(patched_sglang, tmp_path, reference, monkeypatch):
    """No warm-up, no health check that generates: capture is switched on after the model ran on this batch."""
    monkeypatch.setenv("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "false")
    server = Engine(tmp_path / "log", TINY_KIMI, {"disable-radix-cache": True, "chunked-prefill-size": CHUNK},
                    {"PYTHONPATH": str(patched_sglang), **capture_into(tmp_path / "capture")})
    try:
        assert not (tmp_path / "capture").exists()
        ids = random_ids(70, 50)
        answer = send(server.url, [(rid("first", ids, "first"), ids)])[0]["output_ids"]
        check(tmp_path / "capture/first/first.safetensors", reference, ids)
        assert answer == [int((expected(reference, ids)[1][-1] @ reference.lm_head.weight.T).argmax())]
    finally:
        server.kill()


def constant_target(folder: Path) -> Path:
    """A target whose layer i adds the constant i to channel 0 of a stream that begins as (16, 0, 0, ...) everywhere.

    The norm of such a stream is (sqrt(H), 0, ...) whatever its size, so an MLP that reads channel 0 alone adds a
    constant.
    """
    shutil.copytree(TINY_KIMI, folder)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    width = json.loads((folder / "config.json").read_text())["text_config"]["hidden_size"]
    for name, tensor in weights.items():
        if name.endswith(("embed_tokens.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight",
                          "o_proj.weight")):
            weights[name] = torch.zeros_like(tensor)
        elif name.endswith("layernorm.weight"):
            weights[name] = torch.ones_like(tensor)
    weights["language_model.model.embed_tokens.weight"][:, 0] = 16
    for name in weights:
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else None
        if layer is not None and ".experts." not in name:  # the dense MLP of layer 0, the shared experts of the others
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                weights[name][0, 0] = 1 / width ** 0.5  # so the gate and the up projection are 1
            elif name.endswith("down_proj.weight"):
                weights[name][0, 0] = layer / torch.nn.functional.silu(torch.tensor(1.0))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_captured_layers_are_the_streams_that_enter_them(engine, tmp_path):
    server = engine(model=constant_target(tmp_path / "constant"), capture_dir=tmp_path / "capture")
    ids = random_ids(6, 60)
    send(server.url, [(rid("constant", ids, "constant"), ids)])
    aux = load_file(wait_for(tmp_path / "capture/constant/constant.safetensors"))["aux_hidden_states"]
    width = aux.shape[1] // 3
    streams = [16 + sum(range(layer)) for layer in CAPTURE_LAYERS]  # what layers 0 .. L-1 added to the embedding's 16
    assert streams == [17, 22, 31]
    for number, stream in enumerate(streams):
        assert torch.allclose(aux[:, number * width], torch.full((6,), float(stream)), atol=1e-3)


def llama_target(folder: Path):
    """A random Llama of 8 layers in `folder`, a target that the patch knows nothing of; the model in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=2432, hidden_size=128, intermediate_size=256, num_hidden_layers=8,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
                         initializer_range=0.05)
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.engine
@pytest.mark.parametrize("target", [pytest.param("kimi", marks=pytest.mark.slow), "llama"])
def test_capture_by_sglangs_own_hooks(target, reference, tmp_path):
    """--forward-hooks: an SGLang that nobody edited, and targets other than deepseek_v2."""
    model = reference if target == "kimi" else llama_target(tmp_path / "llama")
    decoder = "language_model.model" if target == "kimi" else "model"
    hooks = [{"target_modules": [decoder], "hook_factory": "eagle3_capture:forward_hook"}]
    layer_ids = [layer - (target == "llama") for layer in CAPTURE_LAYERS]  # SGLang's Llama adds 1
    flags = {"disable-radix-cache": True, "chunked-prefill-size": CHUNK, "skip-tokenizer-init": True,
             "forward-hooks": json.dumps(hooks), "enable-return-aux-hidden-states": True,
             "speculative-algorithm": "EAGLE3", "return-aux-hidden-state-layer-ids": layer_ids}
    server = Engine(tmp_path / "log", TINY_KIMI if target == "kimi" else tmp_path / "llama", flags,
                    {"PYTHONPATH": str(ROOT / "patches"), **capture_into(tmp_path / "capture")}, cold=True)
    try:
        samples = {f"n{length}": random_ids(length, length) for length in (1, 61, CHUNK + 77)}
        send(server.url, [(rid("hooks", ids, name), ids) for name, ids in samples.items()])
        for name, ids in samples.items():
            check(tmp_path / f"capture/hooks/{name}.safetensors", model, ids)
    finally:
        server.kill()


def greedy(model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt):]


def memorising_draft(folder: Path, model, texts: list[list[int]]) -> Path:
    """A drafter that knows `texts` by heart through its hidden states: its head points, from the stream entering the
    last capture layer at position p, to token p+2. With other aux states than it was made from it would guess wrong."""
    text = json.loads((TINY_KIMI / "config.json").read_text())["text_config"]
    H, V, L = text["hidden_size"], text["vocab_size"], CAPTURE_LAYERS[-1]
    head = torch.zeros(V, H)
    for ids in texts:
        with torch.no_grad():
            stream = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[L][0]
        for position, token in enumerate(ids[2:]):
            head[token] += torch.nn.functional.normalize(stream[position], dim=-1)
    fc = torch.zeros(H, 3 * H)
    fc[:, 2 * H:] = torch.eye(H)
    draft = {"fc.weight": fc, "norm.weight": torch.ones(H), "d2t": torch.zeros(V, dtype=torch.int64),
             "lm_head.weight": torch.nn.functional.normalize(head, dim=-1)}
    for name, shape in {**dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (256, 2 * H)),
                        "self_attn.o_proj": (H, 256),
                        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), (H, H))}.items():
        draft[f"midlayer.{name}.weight"] = torch.zeros(shape)  # so the hidden state passes through unchanged
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        draft[f"midlayer.{name}.weight"] = torch.ones(H)
    folder.mkdir()
    save_file(draft, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": V, "draft_vocab_size": V,
        "hidden_size": H, "intermediate_size": H, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": text["rms_norm_eps"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": CAPTURE_LAYERS, "use_aux_hidden_state": True}}))
    return folder


def test_speculation_is_unharmed_while_capturing(engine, tmp_path, reference):
    """The same tokens and the same accepted drafts with the patch and capture as with SGLang's original."""
    prompts = [random_ids(length, 70 + length) for length in (5, 18, 40)]
    texts = [ids + greedy(reference, ids, 32) for ids in prompts]
    draft = memorising_draft(tmp_path / "draft", reference, texts)

    def speculate(server):
        sampling = {**GREEDY, "max_new_tokens": 32}
        answers = [post(f"{server.url}/generate", {"input_ids": ids, "sampling_params": sampling}) for ids in prompts]
        return [(answer["output_ids"], answer["meta_info"]["spec_correct_drafts_histogram"]) for answer in answers]

    original = speculate(engine(draft=draft))
    assert [ids + answer for ids, (answer, _) in zip(prompts, original)] == texts
    for _, histogram in original:
        assert sum(histogram[1:]) > histogram[0], "most steps must accept a draft: else this shows nothing"
    server = engine(draft=draft, capture_dir=tmp_path / "capture")
    ids = random_ids(55, 80)
    send(server.url, [(rid("speculative", ids, "s"), ids)])
    assert speculate(server) == original
    check(tmp_path / "capture/speculative/s.safetensors", reference, ids)


def test_radix_cache_is_refused_in_words(patched_sglang, tmp_path):
    """The client that waits and the server's log both say which flag to set; the server ends."""
    port, capture = free_port(), tmp_path / "capture"
    env = {**os.environ, "PYTHONPATH": str(patched_sglang), **capture_into(capture),
           "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "HF_HUB_OFFLINE": "1"}
    with open(tmp_path / "log", "wb") as log:
        server = sglang(str(patched_sglang)).popen(["--model-path", TINY_KIMI, "--port", port], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                   start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                ids = random_ids(9, 90)
                send(f"http://127.0.0.1:{port}", [(rid("radix", ids, "r"), ids)])
                pytest.fail("the server captured with its radix cache on")
            except urllib.error.HTTPError:
                pass  # it is going down
            except (urllib.error.URLError, ConnectionError, OSError):
                pass
            if (capture / "radix/r.error").exists():
                break
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert (capture / "radix/r.error").read_text() == (
            "refused: the radix cache is on, so shared prefixes would not be computed. Add --disable-radix-cache.\n")
        server.wait(timeout=60)
        assert "Add --disable-radix-cache" in (tmp_path / "log").read_text(errors="replace")
    finally:
        try:
            os.killpg(server.pid, 9)
        except ProcessLookupError:
            pass
        server.wait()


# ---- The module by itself ----
GOOD = {"model_path": "/models/kimi", "disable_radix_cache": True, "pp_size": 1, "attn_cp_size": 1,
        "speculative_algorithm": None,
        "cuda_graph_config": {"prefill": {"backend": "disabled"}, "decode": {"backend": "full"}}}


@pytest.mark.parametrize("change, words", [
    ({"disable_radix_cache": False}, "--disable-radix-cache"), ({"enable_dp_attention": True}, "--enable-dp-attention"),
    ({"pp_size": 2}, "--pp-size 1"), ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ({"attn_cp_size": 2}, "--attn-cp-size"),
    ({"cuda_graph_config": {"prefill": {"backend": "breakable"}}}, "--disable-prefill-cuda-graph"),
    ({"cuda_graph_config": types.SimpleNamespace(prefill=types.SimpleNamespace(backend="tc_piecewise"))},
     "--disable-prefill-cuda-graph"),
    ({"cuda_graph_config": None, "disable_piecewise_cuda_graph": False}, "--disable-piecewise-cuda-graph"),
    ({"speculative_algorithm": "DFLASH"}, "Use EAGLE3 or none")])
def test_settings_that_would_lose_rows_are_refused(change, words):
    capture = load_script("eagle3_capture")
    capture.check_settings(GOOD)
    with pytest.raises(capture.Refused, match=words):
        capture.check_settings(GOOD | change)


class FakeModel:
    """What the module uses of a ...ForCausalLM; `rule` is how its SGLang turns ids into layers."""

    def __init__(self, rule, layers=()):
        self.model, self.rule = types.SimpleNamespace(layers_to_capture=list(layers)), rule
        self.config = types.SimpleNamespace(num_hidden_layers=61)

    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = self.rule(ids)


def rule_to_0_5_12(ids):
    return [layer + 1 for layer in ids]


def rule_from_0_5_13(ids):
    return [layer + 1 for layer in ids] if ids[0] == 1 else list(ids)


@pytest.mark.parametrize("rule, inexpressible", [(rule_to_0_5_12, []), (rule_from_0_5_13, [[1, 30, 58]])])
def test_layers_are_the_wanted_ones_under_both_rules(rule, inexpressible):
    capture = load_script("eagle3_capture")
    for layers in ([3, 31, 59], [2, 30, 58], [1, 2, 3], [1, 30, 58]):
        model = FakeModel(rule)
        if layers in inexpressible or (rule is rule_from_0_5_13 and layers == [1, 2, 3]):
            with pytest.raises(capture.Refused, match="Choose other layers"):
                capture.set_layers(model, layers)
        else:
            assert capture.set_layers(model, layers) is False and model.model.layers_to_capture == layers
    assert capture.set_layers(FakeModel(rule, [3, 31, 59]), [3, 31, 59]) is True
    with pytest.raises(capture.Refused, match=r"capture layers \[2, 30, 58\]"):
        capture.set_layers(FakeModel(rule, [2, 30, 58]), [3, 31, 59])


def test_no_layer_keeps_a_mark_of_a_first_try():
    """Qwen's MoE marks the layers themselves (SGLang 0.5.23, qwen2_moe.py), and what is marked is captured."""
    capture, model = load_script("eagle3_capture"), FakeModel(lambda ids: [layer + 1 for layer in ids])
    model.model.layers = [types.SimpleNamespace() for _ in range(61)]
    real = model.set_eagle3_layers_to_capture

    def marking(ids):
        real(ids)
        for layer in model.model.layers_to_capture:
            model.model.layers[layer]._is_layer_to_capture = True

    model.set_eagle3_layers_to_capture = marking
    capture.set_layers(model, [3, 31, 60])  # the last: one above it there is none
    assert [at for at, layer in enumerate(model.model.layers) if vars(layer)] == [3, 31, 60]


H = 16


def batch(*requests: tuple[str, int, int], mode="EXTEND"):
    """A ForwardBatch of (rid, position of the first row, rows); ids count up from each sample's position."""
    ids = [position for _, start, count in requests for position in range(start, start + count)]
    return types.SimpleNamespace(forward_mode=types.SimpleNamespace(name=mode), rids=[name for name, _, _ in requests],
                                 extend_prefix_lens_cpu=[start for _, start, _ in requests],
                                 extend_seq_lens_cpu=[count for _, _, count in requests], input_ids=torch.tensor(ids),
                                 contains_mm_inputs=lambda: False)


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The capture module switched on for a fake target of hidden 16; feed(batch, states) is one forward pass."""
    capture = load_script("eagle3_capture")
    monkeypatch.setenv("EAGLE3_CAPTURE_DIR", str(tmp_path / "capture"))
    monkeypatch.setenv("EAGLE3_CAPTURE_LAYERS", "3,31,59")
    monkeypatch.setattr(capture, "_enabled", True)
    monkeypatch.setattr(capture, "_state", None)
    monkeypatch.setattr(capture, "server_settings", lambda: GOOD)
    # The real one's import needs the CPU engine's stubs
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(__version__="0.5.23"))
    model = FakeModel(rule_from_0_5_13)

    def feed(forward_batch, aux=None, last=None):
        rows = len(forward_batch.input_ids)
        torch.manual_seed(rows)
        aux = torch.randn(rows, 3 * H) if aux is None else aux
        last = torch.randn(rows, H) if last is None else last
        capture.capture(model, torch.arange(rows), forward_batch, last, aux)
        return (torch.cat(aux, -1) if isinstance(aux, list) else aux), last

    return types.SimpleNamespace(capture=capture, feed=feed, folder=tmp_path / "capture/r", model=model)


def test_packed_and_listed_aux_states_give_the_same_file(module):
    """0.5.23 hands over one tensor, 0.5.15 a list of three."""
    name = rid("r", range(5), "a")
    parts = [torch.randn(5, H, dtype=torch.bfloat16) for _ in range(3)]
    last = torch.randn(5, H, dtype=torch.bfloat16)
    files = []
    for aux in (torch.cat(parts, -1), parts):
        module.feed(batch((name, 0, 5)), aux, last)
        path = wait_for(module.folder / "a.safetensors")
        files.append(path.read_bytes())
        path.unlink()
    assert files[0] == files[1]


@pytest.mark.parametrize("layers", [[3, 20, 40, 59], [2, 15, 30, 45, 58]])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("slot_bytes", [4 << 10, 32 << 20])
def test_four_and_five_layers(module, monkeypatch, layers, packed, slot_bytes):
    """Several slots a sample and two chunks; the file is one that 03 takes as of its facts, its size the forecast."""
    monkeypatch.setenv("EAGLE3_CAPTURE_LAYERS", ",".join(map(str, layers)))
    monkeypatch.setattr(module.capture.files, "SLOT_BYTES", slot_bytes)
    name, states, last = rid("r", range(40), "a", 5), [torch.randn(40, H) for _ in layers], torch.randn(40, H)
    for rows in (slice(0, 13), slice(13, 40)):
        aux = [state[rows] for state in states]
        module.feed(batch((name, rows.start, rows.stop - rows.start)), torch.cat(aux, -1) if packed else aux, last[rows])
    path = wait_for(module.folder / "a.safetensors")
    found = load_file(path)
    assert torch.equal(found["aux_hidden_states"], torch.cat(states, -1))
    assert torch.equal(found["last_hidden_states"], last)
    with StateFile(path) as file:
        facts = check_header(file, "a", 40, 5, None)
        assert facts["capture_layers"] == layers
        assert file.size - file.begin == 40 * facts_token_bytes(facts) == 40 * ((len(layers) + 1) * H * 4 + 5)
        check_ids(file, list(range(40)), 5)
        check_data(file)


def test_rows_go_to_their_samples(module):
    """Two whole samples, a foreign one between, the middle chunk of a third; then its last chunk, padding behind."""
    names = {name: rid("r", range(length), name) for name, length in (("a", 4), ("b", 6), ("c", 9))}
    module.feed(batch((names["c"], 0, 3)))
    aux0, _ = module.feed(batch((names["a"], 0, 4), ("foreign", 0, 5), (names["c"], 3, 4), (names["b"], 0, 6)))
    aux1, last1 = module.feed(batch((names["c"], 7, 2), ("x", 0, 3)))
    c = load_file(wait_for(module.folder / "c.safetensors"))
    assert torch.equal(load_file(wait_for(module.folder / "a.safetensors"))["aux_hidden_states"], aux0[:4])
    assert torch.equal(load_file(wait_for(module.folder / "b.safetensors"))["aux_hidden_states"], aux0[13:19])
    assert torch.equal(c["aux_hidden_states"][3:7], aux0[9:13]) and torch.equal(c["aux_hidden_states"][7:], aux1[:2])
    assert torch.equal(c["last_hidden_states"][7:], last1[:2]) and c["input_ids"].tolist() == list(range(9))
    assert sorted(path.name for path in module.folder.iterdir()) == ["a.safetensors", "b.safetensors", "c.safetensors"]


@pytest.mark.parametrize("mode", ["DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_other_forward_modes_are_skipped(module, mode):
    module.feed(batch((rid("r", range(5), "a"), 0, 5), mode=mode))
    assert not module.folder.exists()


def test_a_token_decoded_in_a_mixed_batch_is_not_a_row(module):
    name = rid("r", range(5), "a")
    aux, _ = module.feed(batch((name, 0, 5)))
    module.feed(batch((name, 5, 1), mode="MIXED"))
    assert torch.equal(load_file(wait_for(module.folder / "a.safetensors"))["aux_hidden_states"], aux)


@pytest.mark.parametrize("where", ["aux", "last"])
def test_a_nan_row_is_told_and_leaves_no_file(module, where):
    states = {"aux": torch.randn(5, 3 * H), "last": torch.randn(5, H)}
    states[where][3, 2] = float("nan")
    module.feed(batch((rid("r", range(5), "a"), 0, 5)), states["aux"], states["last"])
    assert wait_for(module.folder / "a.error").read_text() == "data: a hidden state at positions 0 to 4 is not finite\n"
    assert [path.name for path in module.folder.iterdir()] == ["a.error"]


def test_a_draft_that_runs_in_a_patched_file_is_left_alone(module):
    """LlamaForCausalLMEagle3 inherits Llama's forward; its rows are no target's."""
    module.model.hot_token_id = None
    module.feed(batch((rid("r", range(5), "a"), 0, 5)))
    assert module.capture._state is None and not module.folder.exists()


def test_lost_rows_are_told(module):
    name = rid("r", range(9), "a")
    module.feed(batch((name, 0, 3)))
    module.feed(batch((name, 5, 4)))
    told = wait_for(module.folder / "a.error").read_text()
    assert told.startswith("retry: positions 5 to 8 of 9 came, expected those from 3")
    module.feed(batch((rid("r", range(4), "b"), 0, 6)))
    assert wait_for(module.folder / "b.error").read_text().startswith("retry: ")


def test_a_failed_write_is_told_and_the_next_sample_is_written(module, monkeypatch):
    real, failing = os.pwrite, [True]

    def pwrite(*args):
        if failing[0]:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(module.capture.os, "pwrite", pwrite)
    module.feed(batch((rid("r", range(5), "a"), 0, 5)))
    assert wait_for(module.folder / "a.error").read_text() == "write: [Errno 28] No space left on device\n"
    failing[0] = False
    module.feed(batch((rid("r", range(5), "b"), 0, 5)))
    wait_for(module.folder / "b.safetensors")


def test_a_slow_disk_slows_prefill_and_loses_no_row(module, monkeypatch):
    """Host memory is bounded by the slots; the forward pass waits for a free one."""
    monkeypatch.setattr(module.capture.files, "SLOT_BYTES", 8 << 10)
    monkeypatch.setenv("EAGLE3_CAPTURE_BUFFER_MB", "0")  # so: the least, two slots
    made, real = [], module.capture.files.Slot
    monkeypatch.setattr(module.capture.files, "Slot", lambda *args: made.append(real(*args)) or made[-1])
    gate, real_pwrite = threading.Semaphore(0), os.pwrite
    monkeypatch.setattr(module.capture.os, "pwrite", lambda *args: gate.acquire() and real_pwrite(*args))
    fed = queue.SimpleQueue()
    states = {}

    def scheduler():
        for number in range(6):
            states[number] = module.feed(batch((rid("r", range(100), f"s{number}"), 0, 100)))
            fed.put(number)

    thread = threading.Thread(target=scheduler, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive() and fed.qsize() == 0 and len(made) == 2  # a sample fills four slots of 31 rows: it waits
    gate.release(10 ** 6)
    thread.join(20)
    assert not thread.is_alive() and len(made) == 2
    for number in range(6):
        written = load_file(wait_for(module.folder / f"s{number}.safetensors"))
        assert torch.equal(written["aux_hidden_states"], states[number][0])


def test_a_long_sample_takes_the_memory_of_its_slots(module, monkeypatch):
    """65,536 tokens in chunks, 269 MB: no more of them are held than two slots of 32 MiB and the pass itself."""
    monkeypatch.setenv("EAGLE3_CAPTURE_BUFFER_MB", "64")
    T, chunk, width = 65_536, 4096, 256
    name, generator = rid("r", range(T), "a"), torch.Generator().manual_seed(0)
    aux, last = (torch.randn(chunk, columns, generator=generator) for columns in (3 * width, width))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here on
    before = resident()["VmRSS"]
    for start in range(0, T, chunk):
        module.feed(batch((name, start, chunk)), aux + start, last + start)
    written = wait_for(module.folder / "a.safetensors")
    assert resident()["VmHWM"] - before < 180, resident()
    found = load_file(written)
    for start in range(0, T, chunk):
        rows = slice(start, start + chunk)
        assert torch.equal(found["aux_hidden_states"][rows], aux + start), start
        assert torch.equal(found["last_hidden_states"][rows], last + start), start


def resident() -> dict[str, int]:
    """MiB of this process: VmRSS now, VmHWM at most."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0][:-1]: int(words[1]) // 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}


@pytest.mark.gpu
def test_the_next_batch_may_overwrite_the_buffer_of_the_ids(module):
    """SGLang keeps the ids of all batches in one buffer; rows are copied out beside the next pass, here long after it
    began."""
    ids = torch.arange(4096, device="cuda")
    for number in range(3):
        count = 4096 - number  # as in `batch`, ids count up from 0
        forward_batch = batch((rid("r", range(count), f"s{number}"), 0, count))
        forward_batch.input_ids = ids[:count].copy_(torch.arange(count, device="cuda"))
        module.feed(forward_batch, torch.randn(count, 3 * H, device="cuda"), torch.randn(count, H, device="cuda"))
        ids.fill_(7)
        with torch.cuda.stream(module.capture._state.stream):
            torch.cuda._sleep(10 ** 8)  # cycles: the copies of the next turn start 50 ms late
    for number in range(3):
        written = load_file(wait_for(module.folder / f"s{number}.safetensors"))
        assert written["input_ids"].tolist() == list(range(4096 - number))


def test_only_the_first_rank_writes(module, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    module.feed(batch((rid("r", range(5), "a"), 0, 5)))
    time.sleep(0.2)
    assert not module.folder.exists()


def test_rows_split_over_ranks_are_refused(module):
    module.feed(batch((rid("r", range(5), "a"), 0, 5)), torch.randn(3, 3 * H), torch.randn(3, H))
    assert wait_for(module.folder / "a.error").read_text().startswith("refused: ")


def test_without_its_variable_nothing_happens(monkeypatch):
    capture = load_script("eagle3_capture")
    monkeypatch.setattr(capture, "_enabled", False)
    aux = object()
    assert capture.capture(None, None, None, None, aux) is aux  # it looks at nothing else


@pytest.mark.parametrize("layers", ["", "3,31", "3,31,61", "31,3,59", "0,31,59", "a,b,c", "3,3,59", "1,2,3,4,5,6"])
def test_bad_layers_are_refused(module, monkeypatch, layers):
    monkeypatch.setenv("EAGLE3_CAPTURE_LAYERS", layers)
    with pytest.raises(module.capture.Refused, match="Name three to five ascending layers"):
        module.feed(batch((rid("r", range(5), "a"), 0, 5)))
    assert (module.folder / "a.error").read_text().startswith("refused: EAGLE3_CAPTURE_LAYERS")


def test_a_hook_that_cannot_capture_is_refused_in_words(module):
    hook, forward_batch = module.capture.forward_hook({}), batch((rid("r", range(2), "a"), 0, 2))
    states = torch.randn(2, H)  # two rows: they would unpack
    with pytest.raises(module.capture.Refused, match="Tensor gets its batch by keyword"):
        hook(states, (), (states, states))
    with pytest.raises(module.capture.Refused, match="Tensor returns no captured layers. Name the decoder"):
        hook(states, (None, None, forward_batch), states)


@pytest.mark.parametrize("buffer", ["2 GB", "-1"])
def test_a_buffer_that_is_no_number_is_refused(module, monkeypatch, buffer):
    monkeypatch.setenv("EAGLE3_CAPTURE_BUFFER_MB", buffer)
    with pytest.raises(module.capture.Refused, match="Give a number of MB"):
        module.feed(batch((rid("r", range(5), "a"), 0, 5)))
    assert (module.folder / "a.error").read_text().startswith("refused: EAGLE3_CAPTURE_BUFFER_MB")
