"""What SGLang makes of a drafter's folder: which tensor fills which parameter, and how it reads config.json.

Read in models/llama_eagle3.py of SGLang 0.5.10, 0.5.12, 0.5.15 and 0.5.23 (class LlamaForCausalLMEagle3), and in
models/kimi_k25_eagle3.py of 0.5.12 to 0.5.23 (Eagle3DeepseekV2ForCausalLM: `mla` below). It drops tensors of other
names in silence and leaves what none fills as it came from memory. Parameters are named here as there, without their
`model.`, q, k, v, gate and up apart; the layer is layers.0 in both.

Shapes: H hidden, D head_dim, A aux states, I intermediate, V vocabulary, Vd draft vocabulary.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.stage import UserError
from eagle3.target import version_numbers

ARCHITECTURE, MLA = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NEWEST = (0, 5, 23)
LAYERS_FROM = (0, 5, 12)  # before: one layer, called midlayer and nothing else, three aux states, none of the norms
OTHER_NAMES = {"midlayer": "layers.0", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1",
               "aux_norm_high": "fc_norm.2"}  # that it takes for these
LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def weight_files(folder: Path) -> list[Path]:
    """The files whose tensors SGLang loads: safetensors, else what torch writes."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")) or sorted(folder.glob("*.pt"))


# ---- config.json ----
def is_known(config: dict) -> bool:
    return is_mla(config) or (config.get("architectures") or [None])[0] == ARCHITECTURE


def is_mla(config: dict) -> bool:
    return (config.get("architectures") or [None])[0] == MLA


def completed(config: dict) -> dict:
    """`config` with what LlamaConfig and SGLang take where it says nothing. Raises KeyError, TypeError."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or {}
    defaults = {"num_key_value_heads": heads, "head_dim": hidden // heads, "rms_norm_eps": 1e-6,
                "rope_theta": rope.get("rope_theta", 10000.0), "max_position_embeddings": 2048, "hidden_act": "silu",
                "draft_vocab_size": config["vocab_size"], "num_hidden_layers": 1, "attention_bias": False,
                "bias": False, "tie_word_embeddings": False}
    said = {key: value for key, value in config.items() if value is not None}
    return {**defaults, **said, "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm"))}


def norms(config: dict) -> dict[str, bool]:
    """The norms that SGLang computes: `norm_before_fc` it looks for in eagle_config first, the others at the top."""
    before = (config.get("eagle_config") or {}).get("norm_before_fc", config.get("norm_before_fc", False))
    before = before and not is_mla(config)  # which does not look for it
    return {"fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")), "norm_before_fc": bool(before),
            "norm_output": bool(config.get("norm_output"))}


def aux_states(config: dict) -> int:
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return config.get("num_aux_hidden_states") or len(ids or range(3))


def first_release(config: dict) -> str | None:
    """The first SGLang that computes a drafter of this kind; None where config.json describes no such drafter."""
    from eagle3.drafter import read_shape, served_from  # here: it imports torch
    try:
        return served_from(replace(read_shape(completed(config)), aux_states=aux_states(config)))
    except (KeyError, TypeError, AttributeError, UserError):
        return None


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
    c, eagle = completed(config), norms(config)
    H, I, D = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    A, into = aux_states(c), c.get("target_hidden_size", H)
    found = {"fc.weight": [H, A * into], "norm.weight": [H]}
    if c["bias"]:
        found["fc.bias"] = [H]
    if eagle["norm_before_fc"]:
        found["input_norm.weight"] = [A * into]
    if eagle["fc_norm"]:
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
        for kept in ("d2t", "t2d"):
            if name == kept or name.endswith(f".{kept}"):
                return kept
        return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
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


@dataclass(frozen=True)
class Loaded:
    """A drafter's tensors as SGLang loads them."""
    shapes: dict[str, list[int]]  # of parameters
    missing: list[str]  # parameters
    dropped: list[str]  # tensors that no parameter takes


def loaded(shapes: dict[str, list[int]], config: dict, version: str | None = None) -> Loaded:
    """shapes: of the folder's tensors; version: the server's (None: the newest).

    Raises KeyError, TypeError, UserError.
    """
    numbers = version_numbers(version) if version else NEWEST
    names = {name: parameter_of(name, numbers, is_mla(config)) for name in shapes}
    needed = wanted(config)
    taken = {parameter: list(shapes[name]) for name, parameter in names.items()
             if parameter in needed or harmless(parameter)}
    return Loaded(taken, sorted(needed.keys() - taken.keys()),
                  sorted(name for name, parameter in names.items() if parameter not in taken))
