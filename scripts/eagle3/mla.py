"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) of a drafter: its sizes, and what SGLang calls it.

SGLang serves it as Eagle3DeepseekV2ForCausalLM (models/kimi_k25_eagle3.py, from 0.5.12): the draft layer of EAGLE-3
whose attention is models/deepseek_v2.py's. Queries and keys come of two small latent states, one for all heads:

    [q latent], [kv latent, shared rotated key] = products of [embedding, hidden], as q and kv of other attention
    query of a head = q_b (norm(q latent)), its last columns rotated
    key of a head   = k_b (norm(kv latent)), then the shared rotated key
    value of a head = v_b (norm(kv latent))

The cache holds the kv latent and the shared key alone. SGLang computes the same in another order where that is
cheaper ("absorbed": k_b applied to the query, v_b behind attention). What is rotated lies in halves here, as in the
rest of the drafter, and in pairs in SGLang (rope_interleave): rows are put in its order on the way out.

Shapes: H hidden, L = q_lora_rank or kv_lora_rank, N = qk_nope_head_dim, P = qk_rope_head_dim, V = v_head_dim.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from eagle3.sglang_draft import MLA, MLA_SIZES
from eagle3.stage import UserError

SERVED_FROM, NORMS_FROM = "0.5.12", "0.5.13"  # the latter: fc_norm and norm_output


@dataclass(frozen=True)
class Latent:
    """Sizes of the attention, by config.json's names."""
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Columns of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached(self) -> int:
        """Numbers a token that SGLang's cache holds."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def weights(self, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
        """The trained tensors of the attention, in place of those of other attention by the same names."""
        q, kv = (self.q_lora_rank, hidden), (self.cached, hidden)
        return {"o": (hidden, heads * self.v_head_dim), "q_hidden": q, "kv_hidden": kv, "q_embed": q, "kv_embed": kv,
                "q_b": (heads * self.head_dim, self.q_lora_rank),
                "k_b": (heads * self.qk_nope_head_dim, self.kv_lora_rank),
                "v_b": (heads * self.v_head_dim, self.kv_lora_rank),
                "q_a_norm": (self.q_lora_rank,), "kv_a_norm": (self.kv_lora_rank,)}


def latent_of(config: dict, where: str) -> Latent:
    """The sizes in a config.json. where: whose it is. Raises UserError."""
    if missing := [name for name in MLA_SIZES if not config.get(name)]:
        raise UserError(f"{where} has no {', '.join(missing)}: an MLA drafter takes these from an MLA target. Train "
                        "with --architecture llama.")
    return Latent(**{name: config[name] for name in MLA_SIZES})


def read_latent(config: dict) -> Latent:
    """The sizes in a drafter's config.json. Raises UserError."""
    if config.get("rope_interleave") is False:
        raise UserError("config.json: rope_interleave false (rotated halves) is not read here. Write the rotated rows "
                        "in pairs.")
    return latent_of(config, "the drafter's config.json")


def config_keys(latent: Latent) -> dict:
    """What config.json says of it, in place of num_key_value_heads and head_dim."""
    return {"architectures": [MLA], "model_type": "deepseek_v3", **asdict(latent), "rope_interleave": True,
            "rope_scaling": None}


# ---- SGLang's tensors ----
PARTS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")


def turned(rows, heads: int, latent: Latent, into_pairs: bool):
    """rows (heads * (any + P), n): the last P of each head from halves into pairs (x0 x_P/2 x1 ...), or back."""
    apart = rows.view(heads, -1, rows.shape[1])
    first, last = apart.split([apart.shape[1] - latent.qk_rope_head_dim, latent.qk_rope_head_dim], 1)
    sides = (2, -1) if into_pairs else (-1, 2)
    last = last.reshape(heads, *sides, rows.shape[1]).transpose(1, 2).reshape(last.shape)
    return torch.cat([first, last], 1).reshape(rows.shape)


def exported(latent: Latent, heads: int, w: dict) -> dict:
    """SGLang's tensors of the attention from ours."""
    q, kv = (torch.cat([w[f"{part}_embed"], w[f"{part}_hidden"]], 1) for part in ("q", "kv"))
    apart = [w[name].view(heads, -1, latent.kv_lora_rank) for name in ("k_b", "v_b")]  # in each head: keys, values
    tensors = (q, w["q_a_norm"], turned(w["q_b"], heads, latent, True), turned(kv, 1, latent, True), w["kv_a_norm"],
               torch.cat(apart, 1).flatten(0, 1), w["o"])
    return {f"self_attn.{part}": tensor for part, tensor in zip(PARTS, tensors)}


def imported(latent: Latent, heads: int, part: dict) -> dict:
    """The inverse of `exported`."""
    q, q_norm, q_b, kv, kv_norm, kv_b, o = (part[f"self_attn.{name}"] for name in PARTS)
    found = {"q_a_norm": q_norm, "kv_a_norm": kv_norm, "q_b": turned(q_b, heads, latent, False), "o": o}
    (found["q_embed"], found["q_hidden"]), kv = q.chunk(2, 1), turned(kv, 1, latent, False)
    found["kv_embed"], found["kv_hidden"] = kv.chunk(2, 1)
    sizes = [latent.qk_nope_head_dim, latent.v_head_dim]
    apart = kv_b.view(heads, sum(sizes), latent.kv_lora_rank).split(sizes, 1)
    found["k_b"], found["v_b"] = (half.flatten(0, 1) for half in apart)
    return found
