"""Drafters of other trainers: whatever SGLang loads, 02, 04, 05 and the doctor read, and compute what it computes.

Run as a script, this file is the SGLang side: `python test_public_drafters.py WORK` lets the real SGLang find, read and load each
WORK/<layout> in one process on the CPU engine, drafts after a prefix, and writes logits and RoPE tables to WORK/sglang.safetensors.
"""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_runner import load_runner

ROOT = Path(__file__).resolve().parent.parent
PREFIX, STEPS, LENGTH, VOCAB, HIDDEN = 17, 3, 24, 512, 64
ROPES = {"llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
         "linear": {"rope_type": "linear", "factor": 4.0}, "dynamic": {"rope_type": "dynamic", "factor": 4.0},
         "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512},
         "yarn of Kimi": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 1.0, "beta_slow": 1.0,
                          "mscale": 1.0, "mscale_all_dim": 0.5},
         "yarn of gpt-oss": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}}


def sglang_side(work: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts/cpu_engine"))
    import serve
    serve.prepare()
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.model_loader import get_model
    layouts = json.loads((work / "layouts.json").read_text())
    one_batch, runner, server_args = load_runner(work / layouts[0], serve.DEFAULTS)
    data, out = load_file(work / "input.safetensors"), {}
    ids, aux = data["input_ids"], data["aux_hidden_states"]
    for name, given in ROPES.items():
        given = {"rope_type": given.get("type"), **given}
        out[f"rope {name}"] = get_rope(32, 32, 4096, 5e4, True, given).cos_sin_cache[:600]
    for layout in layouts:
        if layout != layouts[0]:
            config = ModelConfig.from_server_args(server_args, model_path=str(work / layout))
            runner.model = get_model(model_config=config, load_config=runner.load_config, device_config=DeviceConfig("cpu"))
        model, fed, seen = runner.model, [aux[:PREFIX]], []
        if model.load_lm_head_from_target:  # as SGLang's worker does with the target's
            model.set_embed_and_head(torch.nn.Parameter(data["embed"]), torch.nn.Parameter(data["head"]))
        else:
            model.model.embed_tokens.weight.data.copy_(data["embed"])

        def give(module, args, kwargs):  # what the EAGLE worker puts into the batch: the target's states, later the draft's own
            (kwargs.get("forward_batch") or args[2]).spec_info = SimpleNamespace(hidden_states=fed[-1])

        def take(module, args, kwargs, output):
            (kwargs.get("forward_batch") or args[2]).spec_info = None
            seen.append(output)

        model.model.register_forward_pre_hook(give, with_kwargs=True)
        model.model.register_forward_hook(take, with_kwargs=True)
        _, logits, batch = one_batch.extend(one_batch.prepare_synthetic_inputs_for_latency_test(0, 0, [ids[1:PREFIX + 1].tolist()]), runner)
        rows = [logits[0]]
        fed.append(seen[-1][1][0][-1:])
        for k in range(1, STEPS):
            _, logits = one_batch.decode(torch.tensor([ids[PREFIX + k]]), batch, runner)
            fed.append(seen[-1][1][0])
            rows.append(logits[0])
        out[f"logits {layout}"] = torch.stack(rows)
        hot = model.get_hot_token_id()
        out[f"hot {layout}"] = torch.arange(VOCAB) if hot is None else hot
    save_file({name: tensor.detach().float().clone().contiguous() for name, tensor in out.items()}, work / "sglang.safetensors")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sglang_side(Path(sys.argv[1]))
    sys.exit()

from conftest import load_script  # noqa: E402
from train_reference import (one_thread, random_sample, write_hidden_states, write_learnable_run,  # noqa: E402, F401
                             write_mapping, write_target)
from eagle3 import rope, ttt  # noqa: E402
from eagle3.batches import Sample, collate  # noqa: E402
from eagle3.drafter import Drafter, Shape, draft_config  # noqa: E402
from eagle3.drafter_files import DrafterFiles, check_layers, read_drafter  # noqa: E402
from eagle3.stage import UserError  # noqa: E402
from eagle3.states import sample_path  # noqa: E402
from eagle3.target import Target  # noqa: E402


# ---- public layouts ----
def shard(tensors: dict, folder: Path) -> None:
    """Two safetensors files, their index, and a file of before that no index names."""
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({"fc.weight": torch.zeros(1)}, folder / "old.safetensors")


def merge(tensors: dict) -> dict:
    found = dict(tensors)
    for name in tensors:
        for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if f".{parts[0]}." in name:
                found[name.replace(parts[0], whole)] = torch.cat([found.pop(name.replace(parts[0], part)) for part in parts])
    return found


def sharded(tensors, config, folder):
    """`model.layers.0.*` in shards with t2d and the embedding, an int32 d2t, transformers 5's rope_parameters."""
    names = {name: name if name in ("d2t", "lm_head.weight") else f"model.{name.replace('midlayer', 'layers.0')}" for name in tensors}
    tensors = {names[name]: tensor for name, tensor in tensors.items()}
    t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
    t2d[tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = True
    tensors |= {"d2t": tensors["d2t"].int(), "t2d": t2d, "model.embed_tokens.weight": torch.zeros(config["vocab_size"], config["hidden_size"])}
    shard(tensors, folder)
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    return config | {"rope_parameters": {**scaling, "rope_theta": config.pop("rope_theta")}, "dtype": config.pop("torch_dtype")}


def merged_bin(tensors, config, folder):
    """qkv_proj and gate_up_proj in pytorch_model.bin beside a trainer's own state; the older names of fc_norm."""
    older = {f"fc_norm.{i}.": f"aux_norm_{level}." for i, level in enumerate(("low", "mid", "high"))}
    tensors = merge(tensors)
    for new, old in older.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "training_args.bin").write_bytes(b"no weights")
    if config.pop("fc_norm", False):
        config["use_aux_norm"] = True
    return config


def layers_0(tensors, config, folder):
    """`layers.0.*` in one file; a draft with the whole vocabulary brings no d2t, and no lm_head where that is the target's."""
    whole = config["draft_vocab_size"] == config["vocab_size"]
    left_out = {"d2t"} if whole else set()
    if whole and config.get("head") == "the target's":
        left_out, config["draft_vocab_size"] = {"d2t", "lm_head.weight"}, None
    config.pop("head", None)
    save_file({name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items() if name not in left_out}, folder / "model.safetensors")
    return config


LAYOUTS = {"sharded": sharded, "merged_bin": merged_bin, "layers_0": layers_0}


def write_layout(layout: str, tensors: dict, config: dict, folder: Path) -> Path:
    """A drafter of ours (its exported tensors and config.json) as other trainers write theirs: no eagle3.json, other names and files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LAYOUTS[layout](dict(tensors), dict(config), folder)))
    return folder


def relayout(ours: Path, layout: str, folder: Path) -> Path:
    return write_layout(layout, load_file(ours / "model.safetensors"), json.loads((ours / "config.json").read_text()), folder)


# ---- the same logits as SGLang's ----
KINDS = {"sharded": dict(aux_norm="each", norm_output=True, rope_scaling=ROPES["llama3"]),
         "merged_bin": dict(aux_norm="each", o_bias=True, fc_bias=True),
         "layers_0": dict(layers=2, draft_vocab=VOCAB, rope_scaling=ROPES["yarn of Kimi"], aux_norm="all")}


@pytest.fixture(scope="module")
def beside_sglang(tmp_path_factory):
    """(folder of the three drafters, SGLang's logits and tables)."""
    work = tmp_path_factory.mktemp("layouts")
    tensors = load_file(write_target(work / "target", vocab=VOCAB, hidden=HIDDEN) / "model.safetensors")
    embed, head = tensors["language_model.model.embed_tokens.weight"], tensors["language_model.lm_head.weight"]
    for layout, kind in KINDS.items():
        draft_ids = torch.from_numpy(np.sort(np.random.default_rng(1).choice(VOCAB, kind.get("draft_vocab", 300), replace=False)))
        shape = Shape(**{**dict(hidden=HIDDEN, heads=4, kv_heads=2, head_dim=32, intermediate=96, vocab=VOCAB, draft_vocab=300, rms_norm_eps=1e-5,
                                rope_theta=5e4, max_positions=4096), **kind})
        draft = Drafter(shape, torch.float32, torch.device("cpu"), embed, head[draft_ids], draft_ids, 64)
        draft.initialise(0)
        for view in draft.master.views.values():
            if view.dim() == 1:
                view.add_(torch.randn(view.shape, generator=torch.Generator().manual_seed(5)) * 0.2)
        config = draft_config(shape, {}, [2, 4, 6], "float32") | ({"head": "the target's"} if layout == "layers_0" else {})
        write_layout(layout, draft.export(draft.master, torch.float32), config, work / layout)
    sample = random_sample(LENGTH, "all", head, np.random.default_rng(2))
    save_file({"embed": embed, "head": head, **sample}, work / "input.safetensors")
    write_hidden_states(work / "hidden_states", {"a": sample})
    (work / "layouts.json").write_text(json.dumps(sorted(KINDS)))  # the first one sizes the cache: that with two layers
    done = subprocess.run([sys.executable, __file__, str(work)], capture_output=True, text=True, cwd=ROOT)
    assert (work / "sglang.safetensors").is_file(), done.stderr[-3000:]
    return work, load_file(work / "sglang.safetensors")


@pytest.mark.parametrize("layout", KINDS)
def test_a_public_layout_computes_sglangs_logits(beside_sglang, layout, monkeypatch):
    work, theirs = beside_sglang
    target = Target(work / "target")
    stored, head = read_drafter(work / layout, target), target.tensor("head")
    draft_ids = torch.from_numpy(stored.draft_ids)
    draft = Drafter(stored.shape, torch.float32, torch.device("cpu"), target.tensor("embed"), head[draft_ids], draft_ids, 64)
    draft.load(stored.tensors(head))
    ours, original = [], ttt.row_loss
    monkeypatch.setattr(ttt, "row_loss", lambda logits, *rest: (ours.append(logits.clone()), original(logits, *rest))[1])
    packed = Sample("a", sample_path(work / "hidden_states", "a"), LENGTH, 0, np.ones(LENGTH, np.float32))
    ttt.ttt_pass(draft, collate([packed], STEPS, HIDDEN, 3), [1.0] * STEPS)
    assert ours[0].abs().max() > 1
    for k in range(STEPS):
        torch.testing.assert_close(theirs[f"logits {layout}"][k], ours[k][PREFIX - 1], rtol=0, atol=1e-4)
    assert torch.equal(theirs[f"hot {layout}"].long(), draft_ids)
    assert all(getattr(stored.shape, key) == value for key, value in KINDS[layout].items() if key != "rope_scaling")


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_is_sglangs(beside_sglang, name):
    config = {"rope_scaling": ROPES[name], "rope_theta": 5e4}
    cos, sin = rope.table(5e4, rope.rope_scaling(config), 32, 4096, torch.arange(600, dtype=torch.float32))
    torch.testing.assert_close(torch.cat([cos, sin], -1), beside_sglang[1][f"rope {name}"], rtol=0, atol=1e-4)
    assert rope.other_rope(config) is None


# ---- 04: --evaluate and step 0 of --finetune-from ----
train = load_script("04_train")


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A run folder with a trained drafter of the whole vocabulary (ours/best), and one of half of it (half/best)."""
    root = write_learnable_run(tmp_path_factory.mktemp("toy"), {"hidden_states": {"r": (24, 5)}})
    write_mapping(root / "half_map", np.arange(0, 97, 2), 97)
    for name, mapping, more in (("ours", "vocab_mapping", ["--fc-norm", "--norm-output"]), ("half", "half_map", ["--draft-layers", 2, "--fc-norm"])):
        train_toy(root, mapping, root / name, "--epochs", 4, "--lr", 4e-3, *more)
    return root


def train_toy(root: Path, mapping: str, output: Path, *more) -> None:
    train.main([str(word) for word in (
        "--verifier-path", root / "target", "--data-dir", root / "hidden_states", "--vocab-mapping-dir", root / mapping, "--output-dir", output,
        "--max-seq-len", 64, "--batch-tokens", 256, "--num-workers", 1, "--export-dtype", "float32", "--val-ratio", 0.5, "--save-every", 100, *more)])


def evaluate_toy(root: Path, output: Path, *folders, more=()) -> dict:
    train.main([str(word) for word in ("--evaluate", *folders, "--verifier-path", root / "target", "--data-dir", root / "hidden_states",
                                       "--ids", root / "ours/val_ids.json", "--max-seq-len", 64, "--num-workers", 1, "--output-dir", output, *more)])
    return json.loads((output / "evaluate.json").read_text())["drafters"]


def best(root: Path, name: str) -> dict:
    return json.loads((root / name / "best/eagle3.json").read_text())


@pytest.mark.parametrize("ours, layout", [("half", "sharded"), ("ours", "merged_bin"), ("ours", "layers_0")])
def test_finetuning_begins_at_what_the_drafter_is(toy, tmp_path, capsys, ours, layout):
    """Learning nothing (lr 0), the run's validation before the first step and its prediction are those of the drafter in 04's own layout."""
    public = relayout(toy / ours / "best", layout, tmp_path / layout)
    mapping = {"ours": "vocab_mapping", "half": "half_map"}[ours]
    train_toy(toy, mapping, tmp_path / "out", "--finetune-from", public, "--epochs", 1, "--lr", 0)
    said = capsys.readouterr().out
    wanted = best(toy, ours)["prediction"]
    assert json.loads((tmp_path / "out/best/eagle3.json").read_text())["prediction"] == wanted
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 0 and rows[0]["val_accept_length"] == wanted["accept_length"]
    lines = [line for line in said.splitlines() if f"finetune from {public} | " in line]
    assert said.index(lines[0]) < said.index("config {") and ("2 layer(s)" if ours == "half" else "fc_norm, norm_output") in lines[0]
    assert any("its embed_tokens are not used" in line for line in lines) == (layout == "sharded")
    if ours == "half":
        assert any("as a fresh drafter of this run would be (in brackets): layers 2 (1)" in line for line in lines)
        evaluated = evaluate_toy(toy, tmp_path / "e", toy / "half/best", public)
        one, other = (evaluated[str(folder)] for folder in (toy / "half/best", public))
        assert one["walks"] == other["walks"] and other["difference"]["accept_length"] == 0
    again = load_file(tmp_path / "out/best/model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in load_file(toy / ours / "best/model.safetensors").items())


def edited(toy: Path, folder: Path, change, ours="ours") -> Path:
    """A drafter without eagle3.json in which `change(config, tensors)` was done."""
    tensors, config = load_file(toy / ours / "best/model.safetensors"), json.loads((toy / ours / "best/config.json").read_text())
    change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))
    return folder


def ids_of(config, ids):
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids


BIAS = {"midlayer.self_attn.q_proj.bias": torch.zeros(32)}
REFUSED = {
    "architectures ['LlamaForCausalLM'] is no drafter": lambda c, t: c.update(architectures=["LlamaForCausalLM"]),
    "no draft_vocab_size, without which SGLang does not start": lambda c, t: c.update(draft_vocab_size="absent"),
    "sets norm_before_residual, which SGLang ignores": lambda c, t: c.update(norm_before_residual=True),
    "sets mlp_bias, sliding_window, which SGLang ignores": lambda c, t: c.update(mlp_bias=True, sliding_window=64),
    "eagle_config.norm_output (which SGLang reads at the top": lambda c, t: c["eagle_config"].update(norm_output=c.pop("norm_output")),
    "attention_factor of the RoPE": lambda c, t: c.update(rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}),
    "RoPE of type longrope": lambda c, t: c.update(rope_scaling={"rope_type": "longrope", "factor": 4.0}),
    "default RoPE with mrope_section": lambda c, t: c.update(rope_scaling={"type": "default", "mrope_section": [1, 1, 2]}),
    "default RoPE with partial_rotary_factor": lambda c, t: c.update(partial_rotary_factor=0.5),
    "hidden_act gelu": lambda c, t: c.update(hidden_act="gelu"),
    "eagle_config.use_aux_hidden_state false": lambda c, t: c["eagle_config"].update(use_aux_hidden_state=False),
    "target_hidden_size 64": lambda c, t: c.update(target_hidden_size=64), "target_hidden_size None": lambda c, t: c.update(target_hidden_size=None),
    "tie_word_embeddings true": lambda c, t: c.update(tie_word_embeddings=True),
    "fc_norm and norm_before_fc at once": lambda c, t: c["eagle_config"].update(norm_before_fc=True),
    "quantization_config: this pipeline": lambda c, t: c.update(quantization_config={"quant_method": "fp8"}),
    "final_logit_softcapping": lambda c, t: c.update(final_logit_softcapping=30.0),
    "model_type qwen3 without head_dim": lambda c, t: c.update(model_type="qwen3", head_dim="absent"),
    "dropped by SGLang ['midlayer.self_attn.q_proj.bias']": lambda c, t: t.update(BIAS),
    "filled twice ['norm.weight']": lambda c, t: t.update({"model.norm.weight": torch.ones(32)}),
    "missing ['norm.weight']": lambda c, t: t.pop("norm.weight"),
    "missing ['layers.0.self_attn.o_proj.bias']": lambda c, t: c.update(attention_bias=True),
    "fc.weight is quantised (I8)": lambda c, t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}),
    "embed_tokens.weight is [9, 32]": lambda c, t: t.update({"embed_tokens.weight": torch.ones(9, 32)}),
    "KeyError at 'num_attention_heads'": lambda c, t: c.update(num_attention_heads="absent"),
    "is no map of 97 draft tokens": lambda c, t: t.update(d2t=torch.arange(97)),
    "feeds it layers [3, 5, 7] (3 states)": lambda c, t: ids_of(c, [3, 5, 7]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_would_be_served_otherwise_is_refused_by_name(toy, tmp_path, why):
    folder = edited(toy, tmp_path / "d", REFUSED[why])
    with pytest.raises(UserError) as caught:
        evaluate_toy(toy, tmp_path / "e", folder)
    assert why in str(caught.value) and len(str(caught.value).splitlines()) == 1, str(caught.value)


def test_a_map_or_flags_that_are_not_the_drafters_are_refused_before_the_data_are_read(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "plan_steps", lambda *rest: pytest.fail("the data were read"))
    for mapping, more, why in (("half_map", [], "drafts 97 tokens, 49 of them among the 49 of"),
                               ("vocab_mapping", ["--no-fc-norm"], "another drafter than it is: norm of the aux states none (each)"),
                               ("vocab_mapping", ["--num-heads", 8, "--intermediate-size", 64], "heads 8 (4), "),
                               ("vocab_mapping", ["--serve-sglang-version", "0.5.10"], "does not serve a drafter of this kind")):
        with pytest.raises(UserError) as caught:
            train_toy(toy, mapping, tmp_path / "out", "--finetune-from", toy / "ours/best", *more)
        assert why in str(caught.value), str(caught.value)


def test_layer_ids_are_read_as_the_serving_sglang_reads_them(toy, tmp_path, capsys):
    """Of the data's layers 3, 31, 59: as DeepSeek's model file has them to the newest SGLang, up to 0.5.12, and left to its default."""
    def told(ids, version, layers=(3, 31, 59), num_layers=61):
        stored = read_drafter(edited(toy, tmp_path / "d", lambda c, t: ids_of(c, ids)), Target(toy / "target"))
        target = tmp_path / f"target-{num_layers}"
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": num_layers}))
        return check_layers(stored, list(layers), Path("data"), target, version, None)

    assert told([3, 31, 59], "0.5.23") is None and told([2, 30, 58], "0.5.12") is None
    assert "mean the data's layers [3, 31, 59] to SGLang up to 0.5.12, and [2, 30, 58] to 0.5.23" in told([2, 30, 58], "0.5.23")
    assert told(None, "0.5.23", (2, 30, 58)) is None and "names no layers" in told(None, "0.5.23", num_layers=None)
    for ids, version in (([3, 31, 59], "0.5.12"), ([2, 30, 57], "0.5.23"), (None, "0.5.23")):
        with pytest.raises(UserError, match="data holds"):
            told(ids, version)
    evaluate_toy(toy, tmp_path / "e", edited(toy, tmp_path / "d", lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[9], eagle_config="absent", odd=1)))
    out = capsys.readouterr().out
    assert "at the top of its config.json is ignored" in out and "neither SGLang nor this reads odd" in out


def test_no_code_of_a_pickle_runs(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "config.json").write_text("{}")
    torch.save({"fc.weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="loading more would run code"):
        DrafterFiles(tmp_path)
    torch.save([torch.zeros(1)], tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="no table of tensors"):
        DrafterFiles(tmp_path)
    assert not (tmp_path / "ran").exists()
    torch.save({"fc.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)  # of before torch 1.6
    assert DrafterFiles(tmp_path).tensor("fc.weight").tolist() == [1, 1]


def test_a_shard_that_is_missing_is_named(toy, tmp_path):
    folder = relayout(toy / "half/best", "sharded", tmp_path / "s")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="model-00002-of-00002.safetensors: missing, though"):
        DrafterFiles(folder)


# ---- 02 --from-drafter ----
from test_vocab import SIZE, build, maps, responses, specials  # noqa: E402


def drafter_of(folder: Path, ids: np.ndarray | None, **config) -> Path:
    """What 02 reads of a drafter: config.json and an int32 d2t (None: the whole vocabulary)."""
    folder.mkdir()
    tensors = {"norm.weight": torch.ones(4)} | ({} if ids is None else {"model.d2t": torch.from_numpy(ids - np.arange(len(ids))).int()})
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": SIZE, "draft_vocab_size": None if ids is None else len(ids), **config}))
    return folder


def test_a_drafters_map_is_taken_and_its_coverage_said(tmp_path, capsys):
    data = responses(tmp_path / "responses", [[5, 6, 7, 8], [5, 5, 900, 7]])
    kept = np.array(sorted({5, 7, 20, *list(specials())[1:]}))
    assert build(capsys, data, tmp_path / "plain", "--draft-vocab-size", 64)[0] == 0
    code, out, err = build(capsys, data, tmp_path / "map", "--from-drafter", drafter_of(tmp_path / "d", kept))
    d2t, t2d, said = maps(tmp_path / "map")
    assert code == 0 and np.array_equal(np.flatnonzero(t2d), kept) and said["coverage"] == 5 / 8 and said["reused"]
    assert "cannot draft the special tokens [" in out and "reused map covers 62.500 % of 8 tokens" in out
    code, out, _ = build(capsys, data, tmp_path / "map", "--from-drafter", tmp_path / "d")
    assert code == 0 and "complete already" in out
    assert build(capsys, data, tmp_path / "whole", "--from-drafter", drafter_of(tmp_path / "w", None))[0] == 0
    assert maps(tmp_path / "whole")[1].all() and maps(tmp_path / "whole")[2]["coverage"] == 1


@pytest.mark.parametrize("ids, config, more, why", [
    (np.array([3, 5]), {"vocab_size": 9}, [], "for a target of 9 tokens, this one has"), (np.array([3, 5]), {}, ["--draft-vocab-size", 3], "drafts 2 tokens, not"),
    (np.array([5, 3]), {}, [], "is no map of 2 draft tokens"), (np.array([3, SIZE]), {}, [], "is no map of 2 draft tokens"),
    (None, {"draft_vocab_size": 7}, [], "no d2t among its tensors"), (np.array([3, 5]), {}, ["--reuse", "x"], "Choose one")])
def test_a_map_that_cannot_be_is_refused(tmp_path, capsys, ids, config, more, why):
    data = responses(tmp_path / "responses", [[5, 6, 7]])
    code, _, err = build(capsys, data, tmp_path / "map", "--from-drafter", drafter_of(tmp_path / "d", ids, **config), *more)
    assert code == 2 and why in err, err


# ---- the doctor ----
from test_benchmark import HIDDEN as WIDTH, make_drafter  # noqa: E402
from test_benchmark_faults import VOCAB as TINY_VOCAB, described  # noqa: E402
from eagle3.doctor import diagnose  # noqa: E402


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_healthy_public_drafter_the_doctor_tells_facts_alone(tmp_path, layout):
    """Other names, files and layer ids, no eagle3.json: no finding, and what cannot be known is said."""
    ours = make_drafter(tmp_path / "ours", range(0, 128, 2))
    config = json.loads((ours / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3, 5, 6]
    folder = write_layout(layout, load_file(ours / "model.safetensors"), config | {"odd_key": 1}, tmp_path / "public")
    found = diagnose(described(folder), None, None)
    assert found["findings"] == [] and found["summary"].endswith("No cause found."), found
    assert "weights" not in found["unchecked"] and "no eagle3.json" in found["facts"][0]
    assert "feed it the states entering layers [3, 5, 6]" in found["facts"][-1] and any("odd_key" in fact for fact in found["facts"])
    assert any("1 layer(s), 4/2 heads of 32" in fact for fact in found["facts"])


TOP = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}  # SGLang's own choice of 8 layers
FAULTS = {
    "keys that SGLang ignores": [dict(mlp_bias=True), dict(use_sliding_window=True, sliding_window=9),
                                 dict(rope_scaling={"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0})],
    "keys that SGLang refuses": [dict(target_hidden_size=None), dict(draft_vocab_size="absent")],
    "eagle_config misplaced": [dict(eagle_config="absent", eagle_aux_hidden_state_layer_ids=[1, 2, 3])],
    "weights": [dict(attention_bias=True), dict(num_key_value_heads=4), dict(num_hidden_layers=2), dict(fc_norm=True)],
    None: [dict(eagle_config="absent", **TOP), dict(rope_parameters={"rope_type": "llama3", "factor": 2.0}), dict(sliding_window=None, mlp_bias=False)],
}


@pytest.mark.parametrize("cause, config", [(cause, config) for cause, configs in FAULTS.items() for config in configs])
def test_each_fault_of_a_public_drafter_has_its_finding(tmp_path, cause, config):
    ours = make_drafter(tmp_path / "ours", range(64))
    whole = json.loads((ours / "config.json").read_text()) | config
    folder = write_layout("merged_bin", load_file(ours / "model.safetensors"), {k: v for k, v in whole.items() if v != "absent"}, tmp_path / "public")
    assert [finding["cause"] for finding in diagnose(described(folder), None, None)["findings"]] == ([cause] if cause else [])


def test_tensors_that_sglang_reads_otherwise_are_named(tmp_path):
    """A bias of q, two tensors for one parameter, an embedding of another size; the order is that of the checks."""
    for extra, why in (({"midlayer.self_attn.q_proj.bias": torch.zeros(128)}, "unknown ['midlayer.self_attn.q_proj.bias']"),
                       ({"layers.0.hidden_norm.weight": torch.ones(WIDTH)}, "two tensors fill each of ['layers.0.hidden_norm.weight']"),
                       ({"embed_tokens.weight": torch.zeros(TINY_VOCAB - 1, WIDTH)}, "embed_tokens.weight is [")):
        folder = make_drafter(tmp_path / why[:9], range(64))
        (folder / "eagle3.json").unlink()
        save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors")
        findings = diagnose(described(folder), None, None)["findings"]
        assert len(findings) == 1 and why in findings[0]["finding"], findings
