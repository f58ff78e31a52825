"""A drafter: its sizes, its weights, and how SGLang's LlamaForCausalLMEagle3 sees it (config.json, tensor names).

Shapes: H hidden, D head_dim, Q = heads*D, KV = 2*kv_heads*D (keys, then values), I intermediate, Vt target vocabulary,
Vd draft vocabulary.
"""
from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields

import torch

from eagle3.stage import UserError

ATTENTION, MLP = "midlayer.self_attn.", "midlayer.mlp."
# Ours: SGLang's
NORMS = {"input_norm": "midlayer.input_layernorm.weight", "hidden_norm": "midlayer.hidden_norm.weight",
         "post_norm": "midlayer.post_attention_layernorm.weight", "norm": "norm.weight"}
IN_EVERY_LAYER = ("down", "gate_up", "o", "q_hidden", "kv_hidden", "hidden_norm", "post_norm")
# Every tensor of an exported drafter: SGLang drops unknown names in silence and leaves missing ones uninitialised
EXPORTED = {"fc.weight", "lm_head.weight", "d2t", *NORMS.values(),
            *(f"{ATTENTION}{part}_proj.weight" for part in "qkvo"),
            *(f"{MLP}{part}_proj.weight" for part in ("gate", "up", "down"))}


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

    def as_config(self) -> dict:
        """For a stage's config: what has its default stays out, so that older folders agree with it."""
        kinds = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        return {name: value for name, value in asdict(self).items() if name not in kinds or value != kinds[name]}

    @property
    def key_columns(self) -> int:
        """Columns of keys in a row of keys and values."""
        return self.kv_heads * self.head_dim

    def weights(self) -> dict[str, tuple[int, ...]]:
        """The trained tensors in the order in which a checkpoint's flat state holds them; `name.1` is the second
        layer's.

        The embedding and the hidden half of q, k and v lie apart: the first can be applied once for all TTT steps.
        """
        h, q, kv = self.hidden, self.heads * self.head_dim, 2 * self.key_columns
        found = {"lm_head": (self.draft_vocab, h), "down": (h, self.intermediate),
                 "gate_up": (2 * self.intermediate, h), "o": (h, q), "q_hidden": (q, h), "kv_hidden": (kv, h),
                 "q_embed": (q, h), "kv_embed": (kv, h), "fc": (h, self.aux_states * h), "input_norm": (h,),
                 "hidden_norm": (h,), "post_norm": (h,), "norm": (h,)}
        if self.aux_norm:
            found["aux_norm"] = (self.aux_states * h,)
        return found | {f"{name}.{layer}": found[name] for layer in range(1, self.layers) for name in IN_EVERY_LAYER}

    def flops(self, context: int, query: int, pairs: int, steps: int) -> float:
        """Arithmetic that one forward and backward pass needs; pairs: (query, step-0 key) pairs. The yardstick of
        MFU.
        """
        size = {name: math.prod(shape) for name, shape in self.weights().items()}
        layer = size["q_hidden"] + size["o"] + size["gate_up"] + size["down"]
        # No gradient goes to the inputs of fc and of the embedding half. Below the last layer, step 0 takes all rows.
        once = (2 * size["fc"] + 2 * size["kv_embed"] + 3 * self.layers * size["kv_hidden"]) * context
        once += 2 * size["q_embed"] * (query if self.layers == 1 else context)
        once += 3 * (self.layers - 1) * layer * (context - query)
        every = 3 * (steps * (self.layers * layer + size["lm_head"]) + (steps - 1) * self.layers * size["kv_hidden"])
        every += size["lm_head"]  # the target's probabilities
        return 2.0 * (once + every * query) + 14.0 * self.layers * steps * pairs * self.heads * self.head_dim


def layer_weights(shape: Shape, tensors: dict) -> list[dict]:
    """Of each layer its own tensors, without the layer in their names; the first has also those of the embedding."""
    first = {name: tensor for name, tensor in tensors.items() if "." not in name}
    return [first] + [{name: tensors[f"{name}.{layer}"] for name in IN_EVERY_LAYER} for layer in range(1, shape.layers)]


# ---- products with a vocabulary ----
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

    def __init__(self, shapes: dict, dtype, device):
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
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
        angle_dtype = self.master.flat.dtype
        exponents = torch.arange(0, shape.head_dim, 2, dtype=angle_dtype, device=device) / shape.head_dim
        inverse = shape.rope_theta ** -exponents
        angles = torch.arange(positions, dtype=angle_dtype, device=device)[:, None] * inverse
        self.rope_table = angles.cos(), angles.sin()  # (positions, D/2) each

    def initialise(self, seed: int) -> None:
        """Fresh weights: norms at 1, lm_head the target's rows, the rest uniform as torch.nn.Linear's."""
        generator = torch.Generator(self.master.flat.device).manual_seed(seed)
        for name, view in self.master.views.items():
            if name == "lm_head":
                view.copy_(self.target_head)
            elif view.dim() == 1:
                view.fill_(1)
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
        """The tensors of SGLang's LlamaForCausalLMEagle3 by its names, on the CPU."""
        keys = self.shape.key_columns
        # The input of q, k and v is [embedding, hidden]
        q, kv = (torch.cat([source[f"{part}_embed"], source[f"{part}_hidden"]], 1) for part in ("q", "kv"))
        gate, up = source["gate_up"].chunk(2)
        named = {"fc.weight": source["fc"], "lm_head.weight": source["lm_head"], f"{ATTENTION}q_proj.weight": q,
                 f"{ATTENTION}k_proj.weight": kv[:keys], f"{ATTENTION}v_proj.weight": kv[keys:],
                 f"{ATTENTION}o_proj.weight": source["o"], f"{MLP}gate_proj.weight": gate, f"{MLP}up_proj.weight": up,
                 f"{MLP}down_proj.weight": source["down"]} | {theirs: source[ours] for ours, theirs in NORMS.items()}
        named = {name: tensor.detach().to("cpu", dtype).clone().contiguous() for name, tensor in named.items()}
        named["d2t"] = (self.draft_ids - torch.arange(len(self.draft_ids), device=self.draft_ids.device)).cpu()
        assert set(named) == EXPORTED
        return named

    def load(self, named: dict[str, torch.Tensor]) -> None:
        """The inverse of `export`. Raises UserError when names or sizes differ."""
        if set(named) != EXPORTED:
            raise UserError(f"the drafter has tensors {sorted(named)}, expected {sorted(EXPORTED)}.")
        q_embed, q_hidden = named[f"{ATTENTION}q_proj.weight"].chunk(2, 1)
        kv = torch.cat([named[f"{ATTENTION}k_proj.weight"], named[f"{ATTENTION}v_proj.weight"]])
        kv_embed, kv_hidden = kv.chunk(2, 1)
        new = {"lm_head": named["lm_head.weight"], "fc": named["fc.weight"], "o": named[f"{ATTENTION}o_proj.weight"],
               "down": named[f"{MLP}down_proj.weight"], "q_embed": q_embed, "q_hidden": q_hidden,
               "kv_embed": kv_embed, "kv_hidden": kv_hidden,
               "gate_up": torch.cat([named[f"{MLP}gate_proj.weight"], named[f"{MLP}up_proj.weight"]]),
               **{ours: named[theirs] for ours, theirs in NORMS.items()}}
        for name, view in self.master.views.items():
            if new[name].shape != view.shape:
                raise UserError(f"the drafter's {name} has shape {tuple(new[name].shape)}, "
                                f"this run's {tuple(view.shape)}.")
            view.copy_(new[name])
        if not torch.equal(named["d2t"] + torch.arange(len(named["d2t"])), self.draft_ids.cpu()):
            raise UserError("the drafter was trained with another vocabulary map.")
        self.refresh()


def draft_config(shape: Shape, target: dict, ids: list[int], dtype: str) -> dict:
    """config.json for SGLang's LlamaForCausalLMEagle3. `eagle_config` is the only place where it looks for the layer
    ids.
    """
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_act": "silu", "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
            "vocab_size": shape.vocab,
            "draft_vocab_size": shape.draft_vocab, "max_position_embeddings": shape.max_positions,
            "rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta, "tie_word_embeddings": False,
            "attention_bias": False, "torch_dtype": dtype, "bos_token_id": target.get("bos_token_id"),
            "eos_token_id": target.get("eos_token_id"),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}
