"""Proofs 2 and 5: SGLang's own LlamaForCausalLMEagle3 and Eagle3DeepseekV2ForCausalLM, loading what 04 exports, computes what 04 trained; and captures the layers 04 was fed.

Run as a script, this file is the SGLang side: `python test_draft_forward.py WORK...` loads each WORK/draft in its own process on the CPU engine
(which replaces modules, so not in pytest's), extends requests of several lengths in one batch, decodes, and writes the logits to
WORK/sglang.safetensors.
"""
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_runner import load_runner

ROOT = Path(__file__).resolve().parent.parent
PREFIXES, STEPS = [3, 17, 29], 4  # tokens of the prefixes drafted after; TTT steps
LENGTH = 40


def sglang_side(work: Path, serve) -> None:
    one_batch, runner, _ = load_runner(work / "draft", serve.DEFAULTS)
    inner = runner.model.model
    data = load_file(work / "input.safetensors")
    inner.embed_tokens.weight.data.copy_(data["embed"])  # as SGLang's worker does with the target's
    ids, aux = data["input_ids"], data["aux_hidden_states"]
    fed, seen = [], []

    def give(module, args, kwargs):  # what the EAGLE worker puts into the batch: the target's states, later the draft's own
        (kwargs.get("forward_batch") or args[2]).spec_info = SimpleNamespace(hidden_states=fed[-1])

    def take(module, args, kwargs, output):
        (kwargs.get("forward_batch") or args[2]).spec_info = None
        seen.append(output)

    inner.register_forward_pre_hook(give, with_kwargs=True)
    inner.register_forward_hook(take, with_kwargs=True)
    out = {}
    fed.append(torch.cat([aux[:n] for n in PREFIXES]))  # positions 0..n-1 with tokens x[1..n]
    _, last, batch = one_batch.extend(one_batch.prepare_synthetic_inputs_for_latency_test(0, 0, [ids[1:n + 1].tolist() for n in PREFIXES]), runner)
    normed, (pre_norm,) = seen[-1]
    logits = normed @ runner.model.lm_head.weight[:last.shape[1]].t()  # SGLang pads the vocabulary
    ends = np.cumsum(PREFIXES) - 1
    torch.testing.assert_close(logits[ends], last, rtol=1e-5, atol=1e-5)
    for n, part in zip(PREFIXES, logits.split(PREFIXES)):
        out[f"extend-{n}"] = part
    fed.append(pre_norm[ends])
    for k in range(1, STEPS):
        _, logits = one_batch.decode(torch.tensor([ids[n + k] for n in PREFIXES]), batch, runner)
        fed.append(seen[-1][1][0])
        for n, row in zip(PREFIXES, logits):
            out[f"decode-{n}-{k}"] = row
    out["hot_token_id"] = runner.model.get_hot_token_id()
    # What this drafter need not bring: the target's embedding; a norm that layers above the first do not use
    own = {name for name, _ in runner.model.named_parameters()}
    layer = "midlayer" if "model.midlayer.hidden_norm.weight" in own else "layers.0"
    brought = {name.replace("midlayer", layer) for name in load_file(work / "draft/model.safetensors")} - {"d2t"}
    brought = {f"model.{name}" if name != "lm_head.weight" else name for name in brought}
    for stacked, parts in {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
                           "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}.items():
        brought |= {name.replace(parts[0], stacked) for name in brought if parts[0] in name}
    uninitialised = own - brought - {"model.embed_tokens.weight"}
    uninitialised -= {f"model.layers.{layer}.input_layernorm.weight" for layer in range(1, 4)}
    assert not uninitialised, uninitialised
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in out.items()}, work / "sglang.safetensors")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "scripts/cpu_engine"))
    import serve
    serve.prepare()
    import sglang.benchmark.one_batch  # noqa: F401  once for all of them: it takes 7 s
    torch.set_grad_enabled(False)
    for folder in sys.argv[1:]:
        if os.fork() == 0:
            try:
                sglang_side(Path(folder), serve)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.wait()
    sys.exit()

from conftest import load_script  # noqa: E402
from train_reference import random_sample, write_hidden_states, write_target  # noqa: E402
from eagle3.batches import Sample, collate  # noqa: E402
from eagle3.drafter import Drafter, Shape, draft_config, read_shape  # noqa: E402
from eagle3.inputs import draft_shape  # noqa: E402
from eagle3.mla import Latent  # noqa: E402
from eagle3.stage import UserError  # noqa: E402
from eagle3.states import sample_path  # noqa: E402
from eagle3.target import layer_rule  # noqa: E402
from eagle3 import ttt  # noqa: E402
from eagle3.ttt import ttt_pass  # noqa: E402

train = load_script("04_train")


LATENT = Latent(q_lora_rank=40, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20)  # all apart
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.2,
        "mscale_all_dim": 0.7}  # as Kimi's, but for the two scales, which are 1 there and cancel out in cosine and sine
# What SGLang 0.5.23 serves unpatched; each kind is off in one of them and on in another
KINDS = {"EAGLE-3": {}, "EAGLE-3.1": {"aux_norm": "each", "norm_output": True},
         "norm before fc, five aux states": {"aux_norm": "all", "aux_states": 5},
         "two layers of EAGLE-3.1, four aux states": {"layers": 2, "aux_norm": "each", "norm_output": True, "aux_states": 4},
         "two layers": {"layers": 2},
         "MLA of EAGLE-3.1, four aux states, Kimi's YaRN": {"latent": LATENT, "aux_norm": "each", "norm_output": True, "aux_states": 4,
                                                            "rope_scaling": YARN}}


def make_drafter(work: Path, **kind) -> Drafter:
    """A random drafter with the widths and vocabulary of the tiny target, exported to work/draft, and one sample in work/input.safetensors."""
    target = write_target(work / "target", vocab=512, hidden=64)
    tensors = load_file(target / "model.safetensors")
    embed, head = tensors["language_model.model.embed_tokens.weight"], tensors["language_model.lm_head.weight"]
    draft_ids = torch.from_numpy(np.sort(np.random.default_rng(1).choice(512, 300, replace=False)))
    kv_heads, head_dim = (4, kind["latent"].head_dim) if "latent" in kind else (2, 32)  # grouped heads, wider than 64 / 4
    shape = Shape(64, 4, kv_heads, head_dim, 96, 512, 300, 1e-5, 50000.0, 4096, **kind)
    draft = Drafter(shape, torch.float32, torch.device("cpu"), embed, head[draft_ids], draft_ids, 128)
    draft.initialise(0)
    generator = torch.Generator().manual_seed(5)
    for view in draft.master.views.values():
        if view.dim() == 1:
            view.add_(torch.randn(view.shape, generator=generator) * 0.2)  # norm weights of 1 would hide a swapped one
    (work / "draft").mkdir()
    save_file(draft.export(draft.master, torch.float32), work / "draft/model.safetensors", {"format": "pt"})
    layers = [1, 3, 5, 7, 9][:shape.aux_states]
    config = draft_config(shape, {"bos_token_id": 0, "eos_token_id": 1}, layers, "float32")
    assert read_shape(config) == shape
    (work / "draft/config.json").write_text(json.dumps(config))
    sample = random_sample(LENGTH, "all", head, np.random.default_rng(2), aux_states=shape.aux_states)
    save_file({"embed": embed, **sample}, work / "input.safetensors")
    write_hidden_states(work / "hidden_states", {"a": sample})
    return draft


@pytest.fixture(scope="module")
def in_sglang(tmp_path_factory):
    """{kind: (folder, drafter)}: a drafter of each kind, loaded and run by SGLang."""
    made = {}
    for kind, different in KINDS.items():
        work = tmp_path_factory.mktemp("kind")
        made[kind] = work, make_drafter(work, **different)
    done = subprocess.run([sys.executable, __file__, *(str(work) for work, _ in made.values())], capture_output=True, text=True, cwd=ROOT)
    missing = [kind for kind, (work, _) in made.items() if not (work / "sglang.safetensors").is_file()]
    assert not missing, (missing, done.stderr[-3000:])
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_computes_the_same_logits(kind, in_sglang, monkeypatch):
    work, draft = in_sglang[kind]
    theirs = load_file(work / "sglang.safetensors")

    ours, original = [], ttt.row_loss
    monkeypatch.setattr(ttt, "row_loss", lambda logits, *rest: (ours.append(logits.clone()), original(logits, *rest))[1])
    packed = Sample("a", sample_path(work / "hidden_states", "a"), LENGTH, 0, np.ones(LENGTH, np.float32))
    ttt_pass(draft, collate([packed], STEPS, 64, draft.shape.aux_states), [1.0] * STEPS)
    assert packed.rows(STEPS) == (0, LENGTH - 2, LENGTH - 2) and len(ours) == STEPS  # row p of ours[k]: step k at position p
    assert ours[0].abs().max() > 1
    for n in PREFIXES:
        torch.testing.assert_close(theirs[f"extend-{n}"], ours[0][:n], rtol=0, atol=1e-4)
        for k in range(1, STEPS):
            torch.testing.assert_close(theirs[f"decode-{n}-{k}"], ours[k][n - 1], rtol=0, atol=1e-4)
    assert torch.equal(theirs["hot_token_id"], draft.draft_ids)


def adds_one(layer_ids, num_layers):
    """SGLang's srt/models/llama.py in all releases, deepseek_v2.py up to 0.5.12: set_eagle3_layers_to_capture."""
    if layer_ids is None:
        return [2, num_layers // 2, num_layers - 3]
    return [val + 1 for val in layer_ids]


def first_id_rule(layer_ids, num_layers):
    """deepseek_v2.py from 0.5.13 on."""
    if layer_ids is None:
        return [2, num_layers // 2, num_layers - 3]
    if layer_ids and layer_ids[0] == 1:
        return [val + 1 for val in layer_ids]
    return list(layer_ids)


def gpt_oss_from_0_5_17(layer_ids, num_layers):
    if layer_ids is None:
        return [2, num_layers // 2, num_layers - 3]
    if layer_ids and max(layer_ids) == num_layers:
        return list(layer_ids)
    return [val + 1 for val in layer_ids]


def target_of(folder: Path, architecture: str, layers: int = 61) -> Path:
    """A target's config.json; wrappers have the text model's below."""
    text = {"num_hidden_layers": layers}
    wrapped = {"text_config": text} if architecture.endswith("ConditionalGeneration") else text
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **wrapped}))
    return folder


OLD, NEW = ("0.5.10", "0.5.11.post1", "0.5.12", "0.5.12.post1"), ("0.5.13", "0.5.15.post1", "0.5.23", "0.5.23.dev7+g1")
SERVED = [("KimiK25ForConditionalGeneration", OLD, adds_one), ("KimiK25ForConditionalGeneration", NEW, first_id_rule),
          ("DeepseekV3ForCausalLM", OLD, adds_one), ("DeepseekV3ForCausalLM", NEW, first_id_rule),
          *((name, OLD + NEW, adds_one) for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM",
                                                     "Llama4ForConditionalGeneration", "Qwen3MoeForCausalLM")),
          ("GptOssForCausalLM", ("0.5.16",), adds_one), ("GptOssForCausalLM", ("0.5.17", "0.5.23"), gpt_oss_from_0_5_17)]


@pytest.mark.parametrize("architecture, releases, theirs", SERVED)
def test_exported_layer_ids_lead_every_rule_to_the_layers(architecture, releases, theirs, tmp_path):
    target = target_of(tmp_path, architecture)
    for version in releases:
        rule = layer_rule(target, version)
        for layers in ([3, 31, 59], [5, 15, 25], [2, 4, 6], [2, 30, 58], [1, 4, 6], [3, 31, 60], [0, 4, 6]):
            try:
                ids = rule.ids(layers)
            except UserError as why:
                assert "cannot capture" in str(why)
                tries = [[layer - by for layer in layers] for by in (0, 1)]
                assert not any(theirs(ids, 61) == layers for ids in tries if min(ids) >= 0)
                assert layers[0] == (1 if theirs is first_id_rule else 0)
            else:
                assert theirs(ids, 61) == layers == rule.captured(ids), version
        for ids in (None, [1, 2, 3], [2, 30, 58], [3, 31, 61]):
            assert rule.captured(ids) == theirs(ids, 61), (version, ids)


def test_the_ids_of_layers_5_15_25(tmp_path):
    """Llama's are 4, 14, 24 in every release; DeepSeek's became 5, 15, 25 with 0.5.13."""
    llama, deepseek = target_of(tmp_path / "l", "LlamaForCausalLM"), target_of(tmp_path / "d", "DeepseekV3ForCausalLM")
    for version, theirs in (("0.5.10", [4, 14, 24]), ("0.5.23", [5, 15, 25])):
        assert layer_rule(llama, version).ids([5, 15, 25]) == [4, 14, 24]
        assert layer_rule(deepseek, version).ids([5, 15, 25]) == theirs
    config = draft_config(Shape(64, 4, 4, 16, 96, 512, 300, 1e-5, 5e4, 4096), {}, [4, 14, 24], "bfloat16")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [4, 14, 24]  # the only place SGLang looks at


@pytest.mark.parametrize("architecture, version", [
    ("NobodysForCausalLM", "0.5.23"), ("Qwen3_5ForCausalLM", "0.5.21"), ("MindSporeForCausalLM", "0.5.23"),
    ("LlamaForCausalLM", "0.5.9"), ("LlamaForCausalLM", "0.5.24"), ("LlamaForCausalLM", "0.6.0")])
def test_a_target_or_release_that_the_table_lacks_is_refused(architecture, version, tmp_path):
    target = target_of(tmp_path, architecture)
    with pytest.raises(UserError, match="say with 04_train.py --layer-id-rule what it does: add-one or as-given") as refused:
        layer_rule(target, version)
    assert f"SGLang {version} with {architecture}" in str(refused.value)
    assert layer_rule(target, version, "add-one").ids([5, 15, 25]) == [4, 14, 24]
    assert layer_rule(target, version, "as-given").ids([5, 15, 25]) == [5, 15, 25]
    with pytest.raises(UserError, match="'nightly' is no version of SGLang"):
        layer_rule(target, "nightly")


def test_kimis_sizes_are_exported_as_they_are():
    """7168 / 64 would be 112; Kimi's heads are 128 wide. target_hidden_size, norm_output and norm_before_residual stay out."""
    target = {"hidden_size": 7168, "vocab_size": 163840, "num_attention_heads": 64, "v_head_dim": 128, "intermediate_size": 18432,
              "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 262144}
    args = train.build_parser().parse_args([])
    args.draft_layers, args.fc_norm, args.norm_before_fc, args.norm_output = 1, False, False, False
    shape = draft_shape(args, target, 32000)
    config = draft_config(shape, target, [3, 31, 59], "bfloat16")
    assert (config["head_dim"], config["num_key_value_heads"], config["max_position_embeddings"]) == (128, 8, 262144)
    assert not {"target_hidden_size", "norm_output", "norm_before_residual", "rope_scaling"} & set(config)
    assert shape.weights()["q_hidden"] == (8192, 7168) and shape.weights()["fc"] == (7168, 21504)
    assert round(sum(map(np.prod, Shape(7168, 64, 64, 128, 18432, 163840, 32000, 1e-5, 5e4, 262144).weights().values())) / 1e6) == 1191  # DESIGN 8
