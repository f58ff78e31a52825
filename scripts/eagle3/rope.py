"""The RoPE of a drafter: which one its config.json asks for, and its table, both as SGLang has them.

Read in SGLang 0.5.10 and 0.5.23 (layers/rotary_embedding/, models/llama.py) and in transformers 5, which all of them
bring: `rope_scaling` counts before `rope_parameters`, and a `rope_theta` in either before the one at the top.

Shapes: D head_dim.
"""
from __future__ import annotations

import math

KINDS = {"default": (), "linear": ("factor",), "dynamic": ("factor",),
         "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
         "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "extrapolation_factor",
                  "attn_factor", "mscale", "mscale_all_dim", "truncate")}
# What makes another RoPE of one of these kinds, in SGLang or (attention_factor) where it was trained
OTHERS = ("mrope_section", "use_fope", "alpha", "attention_factor", "full_attention")


def given_rope(config: dict) -> dict:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rope_of(config: dict) -> tuple[str, float, dict]:
    """(kind, theta, the numbers that a scaled one hangs on) that a config.json asks for."""
    given, original = given_rope(config), config.get("original_max_position_embeddings")
    kind = given.get("rope_type") or given.get("type") or "default"
    if original:
        given = {**given, "original_max_position_embeddings": original}
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    return kind, float(theta), {key: given[key] for key in KINDS.get(kind, given) if given.get(key) is not None}


def rope_scaling(config: dict) -> dict | None:
    """config.json's `rope_scaling` for the same, without theta; None for the plain one."""
    kind, _, numbers = rope_of(config)
    return None if kind == "default" else {"rope_type": kind, **numbers}


def other_rope(config: dict) -> str | None:
    """What of the RoPE that config.json asks for is none that `table` computes, by name."""
    given = given_rope(config)
    kind = rope_of(config)[0]
    if kind not in KINDS:
        return f"RoPE of type {kind}"
    odd = [key for key in OTHERS if given.get(key) is not None]
    if {config.get("partial_rotary_factor"), given.get("partial_rotary_factor")} - {None, 1, 1.0}:
        odd.append("partial_rotary_factor")
    return f"{kind} RoPE with {', '.join(odd)}" if odd else None


def frequencies(theta: float, scaling: dict | None, head_dim: int, max_positions: int, like):
    """(angles of one position (D/2,), the factor on cosine and sine). like: a tensor of the dtype and device."""
    exponents = like.new_tensor(range(0, head_dim, 2)) / head_dim
    plain, given = theta ** -exponents, scaling or {}
    kind, factor = given.get("rope_type", "default"), given.get("factor", 1.0)
    original = given.get("original_max_position_embeddings", max_positions)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "dynamic":  # SGLang stretches it once, for the longest context: whatever the length of a request
        stretched = theta * (factor * factor - factor + 1) ** (head_dim / (head_dim - 2))
        return stretched ** -exponents, 1.0
    if kind == "llama3":
        low, high = given.get("low_freq_factor", 1.0), given.get("high_freq_factor", 4.0)
        turns = original * plain / (2 * math.pi)  # within the original context
        kept = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns > high).to(plain)
        return plain * (kept + (1 - kept) / factor), 1.0
    return plain * yarn_share(theta, given, head_dim, original, plain), yarn_magnitude(given, factor)


def yarn_share(theta: float, given: dict, head_dim: int, original: int, like):
    """(D/2,) what each frequency is multiplied by: 1 for fast ones, 1 / factor for slow ones, a ramp between."""
    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(given.get("beta_fast", 32)), dimension(given.get("beta_slow", 1))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((like.new_tensor(range(head_dim // 2)) - low) / (high - low or 0.001)).clamp(0, 1)
    kept = (1 - ramp) * given.get("extrapolation_factor", 1)
    return kept + (1 - kept) / given.get("factor", 1.0)


def magnitude(factor: float, scale: float) -> float:
    """SGLang's yarn_get_mscale."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_magnitude(given: dict, factor: float) -> float:
    both = given.get("mscale") is not None and given.get("mscale_all_dim") is not None
    of_all = magnitude(factor, given["mscale_all_dim"]) if both else 1.0
    return magnitude(factor, given["mscale"] if both else 1.0) / of_all * given.get("attn_factor", 1)


def table(theta: float, scaling: dict | None, head_dim: int, max_positions: int, positions):
    """(cosines, sines), each (P, D/2), of `positions` (P,), a float tensor."""
    inverse, magnitude = frequencies(theta, scaling, head_dim, max_positions, positions)
    angles = positions[:, None] * inverse
    return angles.cos() * magnitude, angles.sin() * magnitude
