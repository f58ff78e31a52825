"""How SGLang reads a drafter: which tensor fills which parameter, and what of config.json it computes or ignores.

Read in models/llama_eagle3.py and models/llama.py of SGLang 0.5.10, 0.5.12, 0.5.15, 0.5.17 and 0.5.23 (class
LlamaForCausalLMEagle3), and in models/kimi_k25_eagle3.py of 0.5.12 to 0.5.23 (Eagle3DeepseekV2ForCausalLM: `mla`
below). It drops tensors of other names in silence and leaves what none fills as it came from memory. Parameters are
named here as there, without their `model.`, q, k, v, gate and up apart; the layer is layers.0 in both.

Shapes: H hidden, D head_dim, A aux states, I intermediate, V vocabulary, Vd draft vocabulary.
"""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from eagle3.rope import given_rope, other_rope, rope_of
from eagle3.target import version_numbers

ARCHITECTURE, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NEWEST = (0, 5, 23)
LAYERS_FROM = (0, 5, 12)  # before: one layer, called midlayer and nothing else, three aux states, none of the norms
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OTHER_NAMES = {"midlayer": "layers.0", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1",
               "aux_norm_high": "fc_norm.2"}  # that it takes for these
LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
          "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
# Keys of config.json by what becomes of them; the rest of what SGLang reads is in `completed`, `norms` and rope.py
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
LLAMA_DEFAULTS = ("num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
READ = {*SIZES, *LLAMA_DEFAULTS, *MLA_SIZES, "rope_interleave", "architectures", "model_type", "draft_vocab_size",
        "hidden_act", "attention_bias", "bias", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
        "partial_rotary_factor", "original_max_position_embeddings", "rope_is_neox_style", "eagle_config",
        "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "num_aux_hidden_states", "target_hidden_size",
        "final_logit_softcapping", "quantization_config", "compression_config", "norm_before_residual", "mlp_bias",
        "sliding_window", "use_sliding_window", LAYER_IDS}
INERT = {"torch_dtype", "dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",
         "initializer_range", "pretraining_tp", "attention_dropout", "_name_or_path", "name_or_path", "auto_map",
         "max_window_layers", "rope_interleaved", "layer_types", "_attn_implementation", "speculators_version"}


# ---- config.json ----
def is_known(config: dict) -> bool:
    return is_mla(config) or (config.get("architectures") or [None])[0] == ARCHITECTURE


def is_mla(config: dict) -> bool:
    return (config.get("architectures") or [None])[0] == MLA


def completed(config: dict) -> dict:
    """`config` with what LlamaConfig and SGLang take where it says nothing. Raises KeyError, TypeError."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    defaults = {"num_key_value_heads": heads, "head_dim": hidden // heads, "rms_norm_eps": 1e-6,
                "max_position_embeddings": 2048, "hidden_act": "silu", "draft_vocab_size": config["vocab_size"],
                "num_hidden_layers": 32, "attention_bias": False, "bias": False, "tie_word_embeddings": False}
    said = {key: value for key, value in config.items() if value is not None}
    return {**defaults, **said, "rope_theta": rope_of(config)[1],
            "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm"))}


def eagle(config: dict) -> dict:
    return config.get("eagle_config") or {}


def norms(config: dict) -> dict[str, bool]:
    """The norms that SGLang computes: `norm_before_fc` it looks for in eagle_config first, the others at the top."""
    before = eagle(config).get("norm_before_fc", config.get("norm_before_fc", False))
    before = before and not is_mla(config)  # which does not look for it
    return {"fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")), "norm_before_fc": bool(before),
            "norm_output": bool(config.get("norm_output"))}


def aux_states(config: dict) -> int:
    return config.get("num_aux_hidden_states") or len(eagle(config).get(LAYER_IDS) or range(3))


def takes_targets_head(config: dict) -> bool:
    """Whether SGLang gives it the target's lm_head, whatever lies in its files."""
    return config.get("draft_vocab_size") is None and not config.get("tie_word_embeddings")


def ignored(config: dict) -> list[str]:
    """What config.json sets and SGLang ignores in silence, though it makes another drafter of it."""
    inner, window = eagle(config), config.get("sliding_window") and config.get("use_sliding_window", True)
    found = [key for key in ("norm_before_residual",) if config.get(key) or inner.get(key)]
    found += [key for key in ("mlp_bias",) if config.get(key)]
    found += ["sliding_window"] if window else []
    if is_mla(config):
        found += [key for key in ("attention_bias", "norm_before_fc") if config.get(key) or inner.get(key)]
    found += [f"eagle_config.{key} (which SGLang reads at the top of config.json)"
              for key in ("fc_norm", "use_aux_norm", "norm_output") if inner.get(key) and not config.get(key)]
    return found + (["attention_factor of the RoPE"] if given_rope(config).get("attention_factor") else [])


def beyond(config: dict) -> list[str]:
    """What SGLang computes or refuses of this config.json and no drafter of this pipeline can have."""
    kind, hidden = config.get("model_type", "llama"), config.get("hidden_size")
    width = config.get("target_hidden_size", hidden)
    latent, layers = is_mla(config), config.get("num_hidden_layers")
    needed = (*MLA_SIZES, *(set(LLAMA_DEFAULTS) - {"num_key_value_heads", "head_dim"})) if latent else LLAMA_DEFAULTS
    unsaid = sorted(key for key in needed if config.get(key) is None) if kind != "llama" or latent else []
    unsaid += ["rope_theta"] if kind != "llama" and not (config.get("rope_theta") or given_rope(config)) else []
    asked = {f"model_type {kind}": kind == "llama4_text",
             f"model_type {kind} without {', '.join(unsaid)} (what it then takes is not known here)": bool(unsaid),
             f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
             "eagle_config.use_aux_hidden_state false": not eagle(config).get("use_aux_hidden_state", True),
             f"target_hidden_size {width}": width != hidden,
             "tie_word_embeddings true": config.get("tie_word_embeddings"),
             "rope_is_neox_style false": not latent and not config.get("rope_is_neox_style", True),
             "rope_interleave false": latent and config.get("rope_interleave") is False,
             f"{rope_of(config)[0]} RoPE of this kind with latent attention": latent and not latent_rope(config),
             f"{layers} layers with latent attention": latent and layers not in (None, 1),
             "fc_norm and norm_before_fc at once": norms(config)["fc_norm"] and norms(config)["norm_before_fc"],
             **{key: config.get(key) for key in ("final_logit_softcapping", "quantization_config",
                                                 "compression_config")}}
    odd = other_rope(config)
    return [what for what, there in asked.items() if there] + ([odd] if odd else [])


def latent_rope(config: dict) -> bool:
    """Whether latent attention computes the RoPE that rope.py reads: it takes any kind but the plain one as YaRN."""
    kind, _, numbers = rope_of(config)
    alike = ("mscale" in numbers) == ("mscale_all_dim" in numbers) and numbers.get("truncate", True)
    return kind == "default" or kind == "yarn" and alike


def unread(config: dict) -> list[str]:
    """Keys that neither SGLang's drafter nor this pipeline reads."""
    inner = {"use_aux_hidden_state", "norm_before_fc", "norm_before_residual", "fc_norm", "use_aux_norm", "norm_output",
             LAYER_IDS}
    return sorted({key for key, value in config.items() if value is not None} - READ - INERT) + [
        f"eagle_config.{key}" for key in sorted(eagle(config).keys() - inner)]


# ---- tensors ----
def mla_attention(c: dict) -> dict[str, list[int]]:
    """{parameter: shape} of multi-head latent attention, of the first layer. Raises KeyError, TypeError."""
    q, kv, plain, turned, value = (c[name] for name in MLA_SIZES)
    H, heads = c["hidden_size"], c["num_attention_heads"]
    shapes = {"q_a_proj": [q, 2 * H], "q_a_layernorm": [q], "q_b_proj": [heads * (plain + turned), q],
              "kv_a_proj_with_mqa": [kv + turned, 2 * H], "kv_a_layernorm": [kv],
              "kv_b_proj": [heads * (plain + value), kv], "o_proj": [H, heads * value]}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def wanted(config: dict) -> dict[str, list[int]]:
    """{parameter: shape} that a folder of this config.json must fill. Raises KeyError, TypeError."""
    c, has = completed(config), norms(config)
    H, I, D = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    A, into = aux_states(c), c.get("target_hidden_size", H)
    found = {"fc.weight": [H, A * into], "norm.weight": [H]}
    if c["bias"]:
        found["fc.bias"] = [H]
    if has["norm_before_fc"]:
        found["input_norm.weight"] = [A * into]
    if has["fc_norm"]:
        found |= {f"fc_norm.{i}.weight": [into] for i in range(A)}
    for layer in range(c["num_hidden_layers"]):
        inner = {"self_attn.q_proj": [q, H], "self_attn.k_proj": [kv, H], "self_attn.v_proj": [kv, H],
                 "self_attn.o_proj": [H, q], "mlp.gate_proj": [I, H], "mlp.up_proj": [I, H], "mlp.down_proj": [H, I],
                 **{name: [H] for name in LAYER_NORMS}}
        if is_mla(c):
            inner = {name: shape for name, shape in inner.items() if "self_attn" not in name} | mla_attention(c)
        elif layer == 0:
            inner |= {name: [rows, 2 * H] for name, (rows, _) in list(inner.items())[:3]}  # [embedding, hidden]
        else:
            del inner["input_layernorm"]  # it has one and does not use it
        found |= {f"layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
        if (c["attention_bias"] or c["bias"]) and not is_mla(c):
            found[f"layers.{layer}.self_attn.o_proj.bias"] = [H]
    if config.get("draft_vocab_size") is not None and not c["tie_word_embeddings"]:
        found["lm_head.weight"] = [c["draft_vocab_size"], H]
    if c["draft_vocab_size"] != c["vocab_size"]:
        found["d2t"] = [c["draft_vocab_size"]]
    return found


def harmless(parameter: str) -> bool:
    """Tensors that may be there or not: SGLang takes the target's embedding, makes the others itself or needs none."""
    return parameter in ("t2d", "d2t", "embed_tokens.weight", "lm_head.weight") or parameter.endswith(
        ("rotary_emb.inv_freq", "input_layernorm.weight"))


def parameter_of(name: str, version: tuple[int, ...], mla: bool = False) -> str:
    """The parameter that SGLang fills with the tensor `name`; one that it does not have is returned as it came."""
    if mla:
        kept = name.rsplit(".", 1)[-1]
        return kept if kept in ("d2t", "t2d") else re.sub(r"^midlayer\.", "layers.0.", name)
    if version >= LAYERS_FROM:
        for other, own in OTHER_NAMES.items():
            name = name.replace(other, own)
    elif name.removeprefix("model.").startswith("midlayer."):
        name = name.replace("midlayer", "layers.0", 1)
    elif "layers.0" in name:
        return f"{name} (SGLang {'.'.join(map(str, version))} knows it as midlayer)"
    if "d2t" in name or "t2d" in name:
        return "d2t" if "d2t" in name else "t2d"
    return name if name == "model.lm_head.weight" else name.removeprefix("model.")


def filled(parameter: str, shape: list[int], needed: dict[str, list[int]]) -> dict[str, tuple[slice, list[int]]]:
    """{parameter: (rows of the tensor, shape of that part)}: of a merged tensor that fits: q, k, v or gate, up."""
    whole = next((name for name in MERGED if f".{name}." in parameter), None)
    if not whole:
        return {parameter: (slice(0, shape[0] if shape else 0), list(shape))}
    parts = [parameter.replace(whole, part) for part in MERGED[whole]]
    rows, found, begin = [needed.get(part, [0])[0] for part in parts], {}, 0
    if sum(rows) != shape[0]:
        return {f"{parameter} ({shape[0]} rows, its parts take {sum(rows)})": (slice(0, shape[0]), list(shape))}
    for part, count in zip(parts, rows):
        found[part] = slice(begin, begin + count), [count, *shape[1:]]
        begin += count
    return found


@dataclass(frozen=True)
class Loaded:
    """A drafter's tensors as SGLang loads them."""
    shapes: dict[str, list[int]]  # of parameters
    places: dict[str, tuple[str, slice]]  # parameter: the tensor that fills it, and its rows there
    missing: list[str]  # parameters
    dropped: list[str]  # tensors that no parameter takes
    twice: list[str]  # parameters that two tensors fill: the one that is read last counts


def loaded(shapes: dict[str, list[int]], config: dict, version: str | None = None) -> Loaded:
    """shapes: of the folder's tensors; version: the server's (None: the newest).

    Raises KeyError, TypeError, UserError.
    """
    numbers = version_numbers(version) if version else NEWEST
    needed, taken, places, dropped, times = wanted(config), {}, {}, [], Counter()
    for name, shape in shapes.items():
        parts = filled(parameter_of(name, numbers, is_mla(config)), shape, needed)
        if odd := [part for part in parts if part not in needed and not harmless(part)]:
            dropped.append(odd[0] if odd[0].endswith(")") else name)
            continue
        times.update(list(parts))
        for part, (rows, own) in parts.items():
            taken[part], places[part] = own, (name, rows)
    return Loaded(taken, places, sorted(needed.keys() - taken.keys()), sorted(dropped),
                  sorted(part for part, count in times.items() if count > 1))


def misshapen(found: Loaded, config: dict) -> list[str]:
    """What of the tensors has not the shape that config.json asks for. Raises KeyError, TypeError."""
    wrong = [f"{name} is {found.shapes[name]}, config.json asks for {shape}"
             for name, shape in wanted(config).items() if name in found.shapes and found.shapes[name] != shape]
    c = completed(config)
    whole, embedding = [c["vocab_size"]], [c["vocab_size"], c["hidden_size"]]
    if config.get("draft_vocab_size") is None and not wrong and found.shapes.get("d2t", whole) != whole:
        wrong = [f"d2t has {found.shapes['d2t'][0]} rows, and without draft_vocab_size SGLang gives the draft the "
                 "target's whole lm_head"]
    if found.shapes.get("embed_tokens.weight", embedding) != embedding:
        wrong.append(f"embed_tokens.weight is {found.shapes['embed_tokens.weight']}, config.json asks for {embedding}")
    return wrong
