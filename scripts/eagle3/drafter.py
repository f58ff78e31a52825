"""A drafter: its sizes, its weights, and how SGLang sees it (config.json, tensor names).

SGLang has two classes for it: LlamaForCausalLMEagle3, and for multi-head latent attention the one that mla.py tells of.

Shapes: H hidden, D head_dim, Q = heads*D, KV = 2*kv_heads*D (keys, then values), I intermediate, Vt target vocabulary,
Vd draft vocabulary.
"""
from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields

import torch

from eagle3 import mla, rope
from eagle3.sglang_draft import is_mla
from eagle3.stage import UserError

IN_EVERY_LAYER = ("down", "gate_up", "o", "q_hidden", "kv_hidden", "hidden_norm", "post_norm", "o_bias")


@dataclass(frozen=True)
class Shape:
    """Sizes and kind of a drafter. They are in its config.json."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    layers: int = 1
    aux_states: int = 3  # A, of the target, concatenated
    aux_norm: str = ""  # of them before fc: "each" (SGLang's fc_norm), "all" (norm_before_fc), or none
    norm_output: bool = False  # the next draft step gets norm(h') instead of h'
    rope_scaling: dict | None = None  # config.json's, where it is no plain RoPE (rope.py)
    o_bias: bool = False  # of o_proj; SGLang gives q, k and v none
    fc_bias: bool = False
    latent: mla.Latent | None = None  # multi-head latent attention: kv_heads and head_dim are those of its heads

    def as_config(self) -> dict:
        """For a stage's config: what has its default stays out, so that older folders agree with it."""
        kinds = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        return {name: value for name, value in asdict(self).items() if name not in kinds or value != kinds[name]}

    @property
    def key_columns(self) -> int:
        """Columns of keys in a row of keys and values."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Columns of a head's value."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """How many of a head's columns are rotated: the last ones."""
        return self.latent.qk_rope_head_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Of queries times keys. Latent attention puts YaRN's magnitude of all columns into it (deepseek_v2.py)."""
        scaling, scale = self.rope_scaling or {}, self.head_dim ** -0.5
        if self.latent and scaling:
            scale *= rope.magnitude(scaling.get("factor", 1.0), scaling.get("mscale_all_dim", 0.0)) ** 2
        return scale

    def weights(self) -> dict[str, tuple[int, ...]]:
        """The trained tensors in the order in which a checkpoint's flat state holds them.

        `name.1` is the second layer's. The embedding and the hidden half of q, k and v lie apart: the first can be
        applied once for all TTT steps.
        """
        h, q, kv = self.hidden, self.heads * self.head_dim, 2 * self.key_columns
        found = {"lm_head": (self.draft_vocab, h), "down": (h, self.intermediate),
                 "gate_up": (2 * self.intermediate, h), "o": (h, q), "q_hidden": (q, h), "kv_hidden": (kv, h),
                 "q_embed": (q, h), "kv_embed": (kv, h), "fc": (h, self.aux_states * h), "input_norm": (h,),
                 "hidden_norm": (h,), "post_norm": (h,), "norm": (h,)}
        if self.latent:
            found |= self.latent.weights(h, self.heads)
        if self.aux_norm:
            found["aux_norm"] = (self.aux_states * h,)
        found |= {name: (h,) for name in ("o_bias", "fc_bias") if getattr(self, name)}
        return found | {f"{name}.{layer}": found[name] for layer in range(1, self.layers) for name in IN_EVERY_LAYER
                        if name in found}

    def flops(self, context: int, query: int, pairs: int, steps: int) -> float:
        """Arithmetic of one forward and backward pass: the yardstick of MFU.

        pairs: (query, step-0 key) pairs.
        """
        size = {name: math.prod(shape) for name, shape in self.weights().items()}
        layer = size["q_hidden"] + size["o"] + size["gate_up"] + size["down"] + size.get("q_b", 0)
        keys = size["kv_hidden"] + size.get("k_b", 0) + size.get("v_b", 0)
        # No gradient goes to the inputs of fc and of the embedding half. Below the last layer, step 0 takes all rows.
        once = (2 * size["fc"] + 2 * size["kv_embed"] + 3 * self.layers * keys) * context
        once += 2 * size["q_embed"] * (query if self.layers == 1 else context)
        once += 3 * (self.layers - 1) * layer * (context - query)
        every = 3 * (steps * (self.layers * layer + size["lm_head"]) + (steps - 1) * self.layers * keys)
        every += size["lm_head"]  # the target's probabilities
        a_pair = 8.0 * self.head_dim + 6.0 * self.value_dim  # two products forward, five backward
        return 2.0 * (once + every * query) + a_pair * self.layers * steps * pairs * self.heads


def layer_weights(shape: Shape, tensors: dict) -> list[dict]:
    """Of each layer those of `tensors` that are its own, without the layer in their names.

    The first layer has also those of the embedding.
    """
    found = [{name: tensor for name, tensor in tensors.items() if "." not in name}]
    for layer in range(1, shape.layers):
        found.append({name: tensors[f"{name}.{layer}"] for name in IN_EVERY_LAYER if f"{name}.{layer}" in tensors})
    return found


# ---- products with a vocabulary ----
def sum_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that sums run in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def logits_of(x, head):
    """x (N, H) @ head (V, H).T, in float32 out of the matrix units also where x is bfloat16."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return torch.mm(x, head.t(), out_dtype=torch.float32) if half else torch.mm(x, head.t())


def chunks(rows: int, width: int, budget=1 << 28):
    """Row slices of which `width` float32 columns fit 1 GiB: whole logits never lie in memory."""
    step = max(1, budget // width)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


# ---- weights ----
class NamedTensors:
    """Tensors by name, as views of one buffer (`flat`) in which they lie one after the other: one optimizer launch."""

    def __init__(self, shapes: dict, dtype, device, flat: torch.Tensor | None = None):
        """flat: the buffer, where it is there already."""
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device) if flat is None else flat
        self.views = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), self.flat.split(sizes))}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.views[name]


class Drafter:
    """Weights of the draft layer, and the target's frozen parts.

    master holds the weights as the optimizer changes them (float32, or float64 in tests); `weights` is what is
    multiplied: the same tensor, or in bfloat16 its rounding. A bfloat16 weight alone would lose updates below 2^-9 of
    itself, and lr 3e-5 makes such updates.
    """

    def __init__(self, shape: Shape, dtype, device, embed: torch.Tensor, target_head: torch.Tensor,
                 draft_ids: torch.Tensor, positions: int):
        """embed (Vt, H); target_head (Vd, H): the target's lm_head at draft_ids (Vd,); positions: of the RoPE table."""
        self.shape, self.dtype = shape, dtype
        self.master = NamedTensors(shape.weights(), torch.float64 if dtype == torch.float64 else torch.float32, device)
        rounded = self.master.flat.dtype != dtype
        self.weights = NamedTensors(shape.weights(), dtype, device) if rounded else self.master
        self.embed, self.target_head = embed.to(device, dtype), target_head.to(device, dtype)
        self.draft_ids = draft_ids.to(device)
        every = torch.arange(positions, dtype=self.master.flat.dtype, device=device)
        self.rope_table = rope.table(shape.rope_theta, shape.rope_scaling, shape.rope_dim, shape.max_positions,
                                     every)  # (positions, rope_dim / 2) each

    def initialise(self, seed: int) -> None:
        """Fresh weights: norms 1, biases 0, lm_head the target's rows, the rest uniform as torch.nn.Linear's."""
        generator = torch.Generator(self.master.flat.device).manual_seed(seed)
        for name, view in self.master.views.items():
            if name == "lm_head":
                view.copy_(self.target_head)
            elif view.dim() == 1:
                view.fill_("bias" not in name)
            else:
                first = name in ("q_embed", "kv_embed", "q_hidden", "kv_hidden")  # their input is [embedding, hidden]
                fan_in = view.shape[1] * (2 if first else 1)
                view.uniform_(-1, 1, generator=generator).mul_(fan_in ** -0.5)
        self.refresh()

    def refresh(self) -> None:
        if self.weights is not self.master:
            self.weights.flat.copy_(self.master.flat)

    @contextmanager
    def using(self, source: NamedTensors):
        """Compute with the weights `source` instead (an average of them) for a while."""
        if source.flat.dtype == self.dtype:
            self.weights = source
            yield
            self.weights = self.master
        else:
            self.weights.flat.copy_(source.flat)
            yield
            self.refresh()

    def export(self, source: NamedTensors, dtype) -> dict[str, torch.Tensor]:
        """The tensors by SGLang's names, on the CPU."""
        named = {"lm_head.weight": source["lm_head"], "norm.weight": source["norm"], "fc.weight": source["fc"]}
        if self.shape.fc_bias:
            named["fc.bias"] = source["fc_bias"]
        if self.shape.aux_norm:
            names = aux_norm_names(self.shape)
            named |= zip(names, source["aux_norm"].chunk(len(names)))
        for prefix, w in zip(layer_prefixes(self.shape), layer_weights(self.shape, source.views)):
            gate, up = w["gate_up"].chunk(2)
            parts = attention_exported(self.shape, w)
            parts |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": w["down"],
                      "hidden_norm": w["hidden_norm"], "post_attention_layernorm": w["post_norm"]}
            parts |= {"input_layernorm": w["input_norm"]} if "input_norm" in w else {}
            named |= {f"{prefix}{part}.weight": tensor for part, tensor in parts.items()}
            named |= {f"{prefix}self_attn.o_proj.bias": w["o_bias"]} if "o_bias" in w else {}
        named = {name: tensor.detach().to("cpu", dtype).clone().contiguous() for name, tensor in named.items()}
        named["d2t"] = (self.draft_ids - torch.arange(len(self.draft_ids), device=self.draft_ids.device)).cpu()
        assert set(named) == exported_names(self.shape)
        return named

    def load(self, named: dict[str, torch.Tensor]) -> None:
        """The inverse of `export`. Raises UserError when names or sizes differ."""
        wanted = exported_names(self.shape)
        if set(named) != wanted:
            raise UserError(f"the drafter has tensors {sorted(named)}, expected {sorted(wanted)}.")
        new = {"lm_head": named["lm_head.weight"], "norm": named["norm.weight"], "fc": named["fc.weight"]}
        if self.shape.aux_norm:
            new["aux_norm"] = torch.cat([named[name] for name in aux_norm_names(self.shape)])
        new["fc_bias"] = named.get("fc.bias")
        for layer, prefix in enumerate(layer_prefixes(self.shape)):
            suffix = f".{layer}" if layer else ""
            part = {name.removeprefix(prefix).removesuffix(".weight"): tensor for name, tensor in named.items()
                    if name.startswith(prefix)}
            found = attention_imported(self.shape, part, first=not layer)
            found |= {"gate_up": torch.cat([part["mlp.gate_proj"], part["mlp.up_proj"]]),
                      "down": part["mlp.down_proj"], "hidden_norm": part["hidden_norm"],
                      "post_norm": part["post_attention_layernorm"], "o_bias": part.get("self_attn.o_proj.bias")}
            found |= {} if layer else {"input_norm": part["input_layernorm"]}
            new |= {f"{name}{suffix}": tensor for name, tensor in found.items()}
        for name, view in self.master.views.items():
            if new[name].shape != view.shape:
                raise UserError(f"the drafter's {name} has shape {tuple(new[name].shape)}, "
                                f"this run's {tuple(view.shape)}.")
            view.copy_(new[name])
        if not torch.equal(named["d2t"] + torch.arange(len(named["d2t"])), self.draft_ids.cpu()):
            raise UserError("the drafter was trained with another vocabulary map.")
        self.refresh()


# ---- how SGLang sees it ----
def attention_exported(shape: Shape, w: dict) -> dict:
    """SGLang's tensors of a layer's attention from ours."""
    if shape.latent:
        return mla.exported(shape.latent, shape.heads, w)
    # The input of the first layer's q, k and v is [embedding, hidden]
    halves = ([w[name] for name in (f"{part}_embed", f"{part}_hidden") if name in w] for part in ("q", "kv"))
    q, kv = (torch.cat(half, 1) for half in halves)
    keys = shape.key_columns
    return {"self_attn.q_proj": q, "self_attn.k_proj": kv[:keys], "self_attn.v_proj": kv[keys:],
            "self_attn.o_proj": w["o"]}


def attention_imported(shape: Shape, part: dict, first: bool) -> dict:
    """The inverse. first: it is the first layer's."""
    if shape.latent:
        return mla.imported(shape.latent, shape.heads, part)
    q, kv = part["self_attn.q_proj"], torch.cat([part["self_attn.k_proj"], part["self_attn.v_proj"]])
    found = {"o": part["self_attn.o_proj"]}
    if first:
        (found["q_embed"], q), (found["kv_embed"], kv) = q.chunk(2, 1), kv.chunk(2, 1)
    return found | {"q_hidden": q, "kv_hidden": kv}


def layer_prefixes(shape: Shape) -> list[str]:
    """Of the tensors of each layer. SGLang reads `midlayer` as layers.0."""
    return ["midlayer.", *(f"layers.{layer}." for layer in range(1, shape.layers))]


def aux_norm_names(shape: Shape) -> list[str]:
    if shape.aux_norm == "each":
        return [f"fc_norm.{i}.weight" for i in range(shape.aux_states)]
    return ["input_norm.weight"]


def exported_names(shape: Shape) -> set[str]:
    """Every tensor of an exported drafter.

    SGLang drops unknown names in silence and leaves missing ones uninitialised.
    """
    attention = mla.PARTS if shape.latent else [f"{part}_proj" for part in "qkvo"]
    parts = [*(f"self_attn.{part}" for part in attention), *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
             "hidden_norm", "post_attention_layernorm"]
    names = {f"{prefix}{part}.weight" for prefix in layer_prefixes(shape) for part in parts}
    names |= {"fc.weight", "lm_head.weight", "norm.weight", "d2t", "midlayer.input_layernorm.weight"}
    names |= {f"{prefix}self_attn.o_proj.bias" for prefix in layer_prefixes(shape) if shape.o_bias}
    names |= {"fc.bias"} if shape.fc_bias else set()
    return names | set(aux_norm_names(shape)) if shape.aux_norm else names


def draft_config(shape: Shape, target: dict, ids: list[int], dtype: str) -> dict:
    """config.json for SGLang.

    `eagle_config` is the only place where it looks for the layer ids, and for `norm_before_fc`; `fc_norm` and
    `norm_output` it reads from the top.
    """
    attention = mla.config_keys(shape.latent) if shape.latent else {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "head_dim": shape.head_dim}
    return {**attention, "num_hidden_layers": shape.layers,
            "hidden_act": "silu", "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab,
            "draft_vocab_size": shape.draft_vocab, "max_position_embeddings": shape.max_positions,
            "rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta, "tie_word_embeddings": False,
            "attention_bias": shape.o_bias, "torch_dtype": dtype, "bos_token_id": target.get("bos_token_id"),
            "eos_token_id": target.get("eos_token_id"),
            **({"fc_norm": True} if shape.aux_norm == "each" else {}),
            **({"norm_output": True} if shape.norm_output else {}),
            **({"bias": True} if shape.fc_bias else {}),
            **({"rope_scaling": shape.rope_scaling} if shape.rope_scaling else {}),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True,
                             **({"norm_before_fc": True} if shape.aux_norm == "all" else {})}}


def kind_of(config: dict) -> dict:
    """04's flags for the kind of drafter that a config.json describes."""
    eagle = config.get("eagle_config") or {}
    before = eagle.get("norm_before_fc", config.get("norm_before_fc", False))
    architecture = "mla" if is_mla(config) else "llama"
    return {"architecture": architecture, "draft_layers": config.get("num_hidden_layers", 1),
            "fc_norm": bool(config.get("fc_norm")), "norm_before_fc": bool(before),
            "norm_output": bool(config.get("norm_output"))}


def aux_norm_of(kind) -> str:
    """Shape.aux_norm from those flags (a dict)."""
    return "each" if kind["fc_norm"] else "all" if kind["norm_before_fc"] else ""


def read_shape(config: dict) -> Shape:
    """The Shape that a config.json describes, complete as sglang_draft.completed leaves it. Raises KeyError."""
    kind, theta = kind_of(config), rope.rope_of(config)[1]
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    latent, biased = mla.read_latent(config) if kind["architecture"] == "mla" else None, bool(config.get("bias"))
    heads = config["num_attention_heads"]
    return Shape(config["hidden_size"], heads, heads if latent else config["num_key_value_heads"],
                 latent.head_dim if latent else config["head_dim"], config["intermediate_size"],
                 config["vocab_size"], config["draft_vocab_size"], config["rms_norm_eps"], theta,
                 config["max_position_embeddings"], kind["draft_layers"],
                 config.get("num_aux_hidden_states") or len(ids or range(3)), aux_norm_of(kind), kind["norm_output"],
                 rope.rope_scaling(config), not latent and bool(config.get("attention_bias") or biased), biased, latent)


def served_from(shape: Shape) -> str:
    """The first SGLang release that computes what this drafter was trained as.

    Read in their wheels; older ones ignore its keys in silence.
    """
    if shape.latent:
        return mla.NORMS_FROM if shape.aux_norm or shape.norm_output else mla.SERVED_FROM
    scaling = shape.rope_scaling or {}
    if not scaling.get("truncate", True):
        return "0.5.21"
    if shape.aux_norm == "all":
        return "0.5.17"
    if {"mscale", "mscale_all_dim"} <= scaling.keys():
        return "0.5.16"
    return "0.5.12" if shape.aux_norm or shape.norm_output or shape.layers > 1 or shape.aux_states != 3 else "0.5.10"
