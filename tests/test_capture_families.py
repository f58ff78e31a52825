"""Every model file that the patch knows: a toy of each hands a drafter transformers' hidden states, and captures them.

Run as a script, this file is the SGLang side: `python test_capture_families.py WORK` loads each WORK/<family>, a target,
into a process of its own on the CPU engine (forked after SGLang's imports, which take the time), prefills the samples of
WORK/samples.json as requests to capture, and writes what the logits processor was handed to WORK/<family>/handed.pt.
"""
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

from sglang_runner import load_runner

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [3, 4, 5]  # whose ids differ between the rules
LENGTHS = [3, 17, 29]


def sglang_side(work: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts/cpu_engine"))
    import serve
    serve.prepare()
    import sglang.benchmark.one_batch  # noqa: F401
    import sglang.srt.models.registry  # noqa: F401  imports every model
    gc.freeze()  # what was imported is garbage to nobody: SGLang looks for some when it counts memory
    failed = []
    for family in sorted(path.parent.name for path in work.glob("*/config.json")):
        pid = os.fork()
        if not pid:
            try:
                one_family(work / family, json.loads((work / "samples.json").read_text()))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            failed.append(family)
    sys.exit(f"failed: {failed}" if failed else 0)


def one_family(target: Path, samples: dict[str, list[int]]) -> None:
    os.environ |= {"EAGLE3_CAPTURE_DIR": str(target / "capture"), "EAGLE3_CAPTURE_LAYERS": ",".join(map(str, LAYERS))}
    import serve
    from sglang.srt import eagle3_capture
    one_batch, runner, _ = load_runner(target, serve.DEFAULTS)
    handed = {}

    def prefill(run: str) -> None:
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(0, 0, list(samples.values()))
        for request, (name, ids) in zip(requests, samples.items()):
            request.rid = f"eagle3:{run}:1:{len(ids)}:{name}"
        handed[run] = None
        one_batch.extend(requests, runner)

    def take(module, args, kwargs):
        handed[next(reversed(handed))] = [args[1], args[4] if len(args) > 4 else kwargs.get("aux_hidden_states")]

    model = getattr(runner.model, "language_model", runner.model)
    model.logits_processor.register_forward_pre_hook(take, with_kwargs=True)
    prefill("found")  # no drafter: the capture finds the ids, after the first forward pass
    eagle3_capture._state = None
    runner.model.set_eagle3_layers_to_capture(json.loads((target / "ids.json").read_text()))
    prefill("given")  # by the table's ids, as with a drafter: the logits processor hands its states on
    for path in (target / f"capture/{run}/{name}.safetensors" for run in handed for name in samples):
        while not path.exists():  # the writers end with this process
            time.sleep(0.01)
    last, aux = handed["given"]
    torch.save({"last": last, "aux": torch.cat(list(aux), -1) if isinstance(aux, (list, tuple)) else getattr(aux, "packed", aux),
                "found": handed["found"][1]}, target / "handed.pt")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sglang_side(Path(sys.argv[1]))

from safetensors.torch import load_file  # noqa: E402

from conftest import TINY_KIMI  # noqa: E402
from eagle3.target import layer_rule  # noqa: E402
from test_capture import random_ids, text_model, wait_for  # noqa: E402

SIZES = {"vocab_size": 2432, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.1,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
FAMILIES = {"llama": ("Llama", {}), "mistral": ("Mistral", {"sliding_window": None}), "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {}),
            "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 0, "decoder_sparse_step": 1}),
            "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
            "glm4_moe": ("Glm4Moe", {**GLM, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True}),
            "glm4_moe_lite": ("Glm4MoeLite", {**GLM, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
                                              "num_key_value_heads": 4}),
            "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8})}


def toy(folder: Path, name: str, more: dict):
    """A random target in `folder`; the model in transformers, float32."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | more))
    config._experts_implementation = config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)  # a norm of ones would hide one left out
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(parameter.bfloat16())  # SGLang keeps them so
    model.save_pretrained(folder)
    for module in model.modules():  # transformers builds MLA's inner norms with 1e-6, SGLang with the config's
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = config.rms_norm_eps
    return model


@pytest.fixture(scope="module")
def families(patched_sglang, tmp_path_factory):
    """{family: (its folder after SGLang's side, the model in transformers)}, and the samples."""
    work, models = tmp_path_factory.mktemp("families"), {}
    for family, (name, more) in FAMILIES.items():
        models[family] = toy(work / family, name, more)
    models["deepseek_v2"] = text_model(work / "deepseek_v2", TINY_KIMI)
    samples = {f"n{length}": random_ids(length, length) for length in LENGTHS}
    (work / "samples.json").write_text(json.dumps(samples))
    for family in models:
        (work / family / "ids.json").write_text(json.dumps(layer_rule(work / family, "0.5.23").ids(LAYERS)))
    env = {**os.environ, "PYTHONPATH": str(patched_sglang), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__, str(work)], env=env, capture_output=True, text=True, cwd=ROOT)
    return work, models, samples, done.stdout + done.stderr


@pytest.mark.engine
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2"])
def test_each_family_hands_on_and_captures_transformers_states(families, family):
    work, models, samples, said = families
    assert (work / family / "handed.pt").is_file(), said[-8000:]
    handed, states = torch.load(work / family / "handed.pt"), []
    for name, ids in samples.items():
        with torch.no_grad():
            found = models[family](torch.tensor([ids]), output_hidden_states=True).hidden_states
        states.append((torch.cat([found[layer][0] for layer in LAYERS], -1), found[-1][0]))
        for run in ("found", "given"):
            written = load_file(wait_for(work / family / f"capture/{run}/{name}.safetensors"))
            assert written["input_ids"].tolist() == ids
            for tensor, wanted in zip(("aux_hidden_states", "last_hidden_states"), states[-1]):
                assert (written[tensor] - wanted).abs().max() < 1e-4, (run, name, tensor)
    assert handed["found"] is None  # without a drafter the server goes on as it would have
    for name, number in (("aux", 0), ("last", 1)):
        assert (handed[name] - torch.cat([pair[number] for pair in states])).abs().max() < 1e-4, name
    assert max(pair[0].abs().max() for pair in states) > 0.5
