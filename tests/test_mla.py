"""04 --architecture mla: what it refuses, what a run leaves and goes on from, and what 05's doctor makes of the drafter.

That its losses, gradients and logits are right: test_train.py, test_kernels.py, test_draft_forward.py; served: test_serving.py.
"""
import contextlib
import hashlib
import io
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import load_script
from train_reference import one_thread, write_learnable_run  # noqa: F401
from eagle3 import mla
from eagle3.doctor import Facts, examine
from eagle3.stage import UserError

train = load_script("04_train")
SIZES = mla.Latent(q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A run folder with hidden_states/ (40 samples) and an MLA target, and output/: 6 steps with Muon, exported in float32."""
    root = write_learnable_run(tmp_path_factory.mktemp("toy"), {"hidden_states": {"r": (40, 40)}})
    config = json.loads((root / "target/config.json").read_text())
    config["text_config"] |= asdict(SIZES)
    (root / "target/config.json").write_text(json.dumps(config))
    trained(root, root / "output", *MUON)
    return root


MUON = ["--optimizer", "muon", "--lr", 4e-3, "--save-every", 3, "--export-dtype", "float32"]


def trained(root: Path, output: Path, *more) -> str:
    argv = ["--verifier-path", root / "target", "--data-dir", root / "hidden_states", "--vocab-mapping-dir", root / "vocab_mapping",
            "--output-dir", output, "--epochs", 1, "--max-seq-len", 64, "--batch-tokens", 256, "--num-workers", 1, "--architecture", "mla", *more]
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        train.main(list(map(str, argv)))
    return logged.getvalue()


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"}


def test_a_run_goes_on_to_the_same_bytes(toy, tmp_path):
    output = shutil.copytree(toy / "output", tmp_path / "output")
    for gone in ("checkpoint-6", "best"):
        shutil.rmtree(output / gone)
    (output / "manifest.json").unlink()
    assert "resume" in trained(toy, output, *MUON) and digests(output) == digests(toy / "output")


def test_what_it_leaves_and_what_can_be_made_of_it(toy, tmp_path):
    best, config = toy / "output/best", json.loads((toy / "output/stage.json").read_text())
    assert config["architecture"] == "mla" and config["draft"]["latent"] == asdict(SIZES)
    exported = json.loads((best / "config.json").read_text())
    assert exported["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and exported["fc_norm"] and exported["norm_output"]
    assert not {"head_dim", "norm_before_fc"} & set(exported) and exported["rope_scaling"] is None
    assert json.loads((best / "eagle3.json").read_text())["served_from"] == "0.5.13"
    # From it, without its flag: the kind is the folder's; at a rate of 0 the weights stay what they were
    argv = ["--max-steps", 1, "--lr", 0, "--export-dtype", "float32", "--finetune-from", best]
    trained(toy, tmp_path / "again", *argv)
    before, after = (load_file(folder / "model.safetensors") for folder in (best, tmp_path / "again/best"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = evaluated(toy, tmp_path / "e", best)
    assert found["histogram"] == json.loads((best / "eagle3.json").read_text())["prediction"]["histogram"]


def evaluated(toy, output, drafter) -> dict:
    trained(toy, output, "--evaluate", drafter, "--ids", toy / "output/val_ids.json")
    found, = json.loads((output / "evaluate.json").read_text())["drafters"].values()
    return found


def other_layout(toy, tmp_path, change=lambda config, tensors: None) -> Path:
    """The drafter as another trainer might have written it."""
    folder = shutil.copytree(toy / "output/best", tmp_path / "other")
    (folder / "eagle3.json").unlink()
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    parts = [tensors.pop(f"layers.0.self_attn.{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    tensors |= {"layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight": torch.cat(parts), "t2d": torch.ones(97, dtype=torch.bool)}
    config |= {"n_routed_experts": 8, "model_type": "kimi_k2"}
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_one_of_another_trainer_is_read(toy, tmp_path):
    own, other = (evaluated(toy, tmp_path / str(i), folder)
                  for i, folder in enumerate((toy / "output/best", other_layout(toy, tmp_path))))
    assert own["walks"] == other["walks"] and own["correct_drafts"] > 0


OTHERS = {"llama3 RoPE of this kind with latent attention": lambda config, tensors: config.update(rope_scaling={
              "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
          "yarn RoPE of this kind": lambda config, tensors: config.update(rope_scaling={"type": "yarn", "factor": 4.0, "mscale": 1.0}),
          "rope_interleave false": lambda config, tensors: config.update(rope_interleave=False),
          "2 layers with latent attention": lambda config, tensors: config.update(num_hidden_layers=2),
          "without kv_lora_rank": lambda config, tensors: config.pop("kv_lora_rank"),
          "attention_bias, which SGLang ignores": lambda config, tensors: config.update(attention_bias=True),
          "dropped by SGLang": lambda config, tensors: tensors.update({"model.fc.weight": tensors.pop("fc.weight")})}


@pytest.mark.parametrize("why", OTHERS)
def test_one_that_is_none_of_ours_is_refused_by_name(toy, tmp_path, why):
    with pytest.raises(UserError, match=why):
        evaluated(toy, tmp_path / "e", other_layout(toy, tmp_path, OTHERS[why]))


REFUSED = {"--norm-before-fc": "served with one layer and without --norm-before-fc", "--draft-layers 2": "served with one layer",
           "--num-kv-heads 2": "Leave out --num-kv-heads", "--serve-sglang-version 0.5.11": "SGLang 0.5.11 does not serve",
           "--serve-sglang-version 0.5.12 --fc-norm": "SGLang 0.5.12 does not serve"}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_is_not_served_is_refused(toy, tmp_path, flags):
    with pytest.raises(UserError, match=REFUSED[flags]):
        trained(toy, tmp_path / "output", *flags.split())


def test_a_target_without_latent_sizes_is_refused(toy, tmp_path):
    shutil.copytree(toy / "target", tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    config["text_config"]["q_lora_rank"] = None
    (tmp_path / "target/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no q_lora_rank: an MLA drafter takes these from an MLA target"):
        trained(toy, tmp_path / "output", "--verifier-path", tmp_path / "target")


def test_norms_are_on_from_the_release_that_serves_them(toy, tmp_path):
    trained(toy, tmp_path / "output", "--max-steps", 1, "--serve-sglang-version", "0.5.12")
    exported = json.loads((tmp_path / "output/best/config.json").read_text())
    assert "fc_norm" not in exported and "norm_output" not in exported
    assert json.loads((tmp_path / "output/best/eagle3.json").read_text())["served_from"] == "0.5.12"


# ---- 05's doctor ----
CHANGES = {"nothing": (lambda config, tensors: None, None),
           "a size": (lambda config, tensors: config.update(kv_lora_rank=10), "config.json against training"),
           "halves": (lambda config, tensors: config.update(rope_interleave=False), "config.json against training"),
           "a missing tensor": (lambda config, tensors: tensors.pop("midlayer.self_attn.kv_a_layernorm.weight"), "weights"),
           "names of the other class": (lambda config, tensors: tensors.update(
               {f"model.{name}": tensors.pop(name) for name in list(tensors) if "mlp" in name}), "weights"),
           "YaRN": (lambda config, tensors: config.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "RoPE")}


@pytest.mark.parametrize("what", CHANGES)
def test_the_doctor_knows_it(toy, tmp_path, what):
    change, cause = CHANGES[what]
    folder = shutil.copytree(toy / "output/best", tmp_path / "best")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    if cause == "weights":
        save_file(tensors, folder / "model.safetensors")
    findings, unchecked = examine(Facts(folder, json.loads((folder / "eagle3.json").read_text()), None, toy, []))
    assert "weights" not in unchecked and "config.json against training" not in unchecked
    found = {finding["cause"] for finding in findings} - {"weights changed since training"}
    assert found - {"weights"} == ({cause} if cause else set()) - {"weights"} and (cause is None) == (not found)
