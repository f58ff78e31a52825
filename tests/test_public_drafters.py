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
    from sglang.benchmark import one_batch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import PortArgs, prepare_server_args
    layouts = json.loads((work / "layouts.json").read_text())
    argv = ["--model-path", str(work / layouts[0]), "--tokenizer-path", str(ROOT / "scripts/tiny_kimi"), "--disable-radix-cache"]
    for flag, value in (serve.DEFAULTS | {"--max-total-tokens": "1024"}).items():
        argv += [flag] if value is True else [flag, value]
    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    one_batch.publish(server_args, role="scheduler",
                      ranks=one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0), gpu_id=0))
    one_batch._init_process_global_configs()
    runner = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)[0].torch_runner
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
from eagle3.drafter_files import DrafterFiles, read_drafter  # noqa: E402
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
