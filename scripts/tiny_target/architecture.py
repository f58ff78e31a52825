"""Tiny Kimi's sizes, configs and modules: Kimi-K2.5's wrapper around a DeepSeek-V3 text model.

Shapes: N tokens, H hidden, E experts, I intermediate of an expert.
"""
from __future__ import annotations

import types

import torch
import torch.nn.functional as F

N_BPE, N_SPECIAL = 2400, 32
MAX_POSITIONS = 4096
# MLA's sizes are bound by the triton kernels of SGLang 0.5.15. Decode takes keys as values, so it does not compile
# unless next_power_of_2(kv_lora_rank + qk_rope_head_dim) == next_power_of_2(kv_lora_rank). Prefill gives wrong values,
# now and then an illegal memory access, for v_head_dim 32 beside a qk head above 32 (seen with Triton 3.6 on an H200;
# right for v_head_dim 64 and 128).
KV_LORA_RANK, QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM, V_HEAD_DIM = 96, 64, 32, 64
# Kimi-K2.5's ids minus 163584. [UNK] and [PAD] close Kimi's block of 256, and ours of 32; the ids between are reserved
# tokens, as there.
SPECIAL_AT = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|start_header_id|>": 6,
    "<|end_header_id|>": 7, "[EOT]": 9, "<|im_system|>": 10, "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13, "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15, "<|im_middle|>": 17, "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20,
    "<|media_pad|>": 21, "<think>": 22, "</think>": 23, "[UNK]": 30, "[PAD]": 31,
}
SPECIAL_NAMES = {at: name for name, at in SPECIAL_AT.items()}
SPECIALS = [SPECIAL_NAMES.get(at, f"<|reserved_token_{N_BPE + at}|>") for at in range(N_SPECIAL)]
ID = {name: N_BPE + at for at, name in enumerate(SPECIALS)}


def text_config() -> dict:
    return dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", vocab_size=N_BPE + N_SPECIAL,
        hidden_size=256, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=96,
        kv_lora_rank=KV_LORA_RANK, qk_rope_head_dim=QK_ROPE_HEAD_DIM, qk_nope_head_dim=QK_NOPE_HEAD_DIM,
        v_head_dim=V_HEAD_DIM, intermediate_size=512, first_k_dense_replace=1, moe_layer_freq=1, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=64, scoring_func="sigmoid",
        topk_method="noaux_tc", n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.827,
        rms_norm_eps=1e-5, rope_theta=50000.0,
        rope_scaling=dict(type="yarn", factor=8.0, original_max_position_embeddings=512, beta_fast=32.0, beta_slow=1.0,
                          mscale=1.0, mscale_all_dim=1.0),
        max_position_embeddings=MAX_POSITIONS, hidden_act="silu", attention_bias=False, attention_dropout=0.0,
        initializer_range=0.03, num_nextn_predict_layers=0, tie_word_embeddings=False, use_cache=True,
        bos_token_id=ID["[BOS]"], eos_token_id=ID["<|im_end|>"], pad_token_id=ID["[PAD]"], dtype="bfloat16")


def wrapper_config() -> dict:
    """No vocab_size at the top: SGLang takes the text model's. Names with `vt_` are the hub's, plain ones SGLang's."""
    sizes = dict(num_attention_heads=2, num_hidden_layers=1, hidden_size=16, intermediate_size=32)
    vision = dict(model_type="kimi_k25", patch_size=14, init_pos_emb_height=8, init_pos_emb_width=8,
                  init_pos_emb_time=4, pos_emb_type="divided_fixed", merge_kernel_size=[2, 2],
                  video_attn_type="spatial_temporal", merge_type="sd2_tpool", mm_projector_type="patchmerger",
                  mm_hidden_size=sizes["hidden_size"], projector_hidden_act="gelu", projector_ln_eps=1e-5,
                  text_hidden_size=text_config()["hidden_size"], **sizes,
                  **{f"vt_{key}": value for key, value in sizes.items()})
    return dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text_config(),
                vision_config=vision, ignore_index=-100, media_placeholder_token_id=ID["<|media_pad|>"],
                bos_token_id=ID["[BOS]"], eos_token_id=ID["<|im_end|>"], pad_token_id=ID["[PAD]"], dtype="bfloat16",
                torch_dtype="bfloat16", tie_word_embeddings=False)


def vision_tensors(vision: dict) -> dict[str, torch.Tensor]:
    """Small random vision weights: SGLang would serve whatever lay in memory for tensors that the checkpoint lacks."""
    generator = torch.Generator().manual_seed(0)
    H, inner, merged = vision["hidden_size"], vision["intermediate_size"], 4 * vision["hidden_size"]
    block, tensors = "vision_tower.encoder.blocks.0.", {}
    for name, shape in {"vision_tower.patch_embed.proj": (H, 3, 14, 14), block + "wqkv": (3 * H, H),
                        block + "wo": (H, H), block + "mlp.fc0": (inner, H), block + "mlp.fc1": (H, inner),
                        "mm_projector.proj.0": (merged, merged),
                        "mm_projector.proj.2": (vision["text_hidden_size"], merged)}.items():
        tensors[name + ".weight"] = torch.randn(*shape, generator=generator) * 0.02
        tensors[name + ".bias"] = torch.zeros(shape[0])
    for name in (block + "norm0", block + "norm1", "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"):
        tensors[name + ".weight"], tensors[name + ".bias"] = torch.ones(H), torch.zeros(H)
    tensors["vision_tower.patch_embed.pos_emb.weight"] = torch.randn(8, 8, H, generator=generator) * 0.02
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def dense_experts(self, x, index, weights):
    """All experts on all tokens, unchosen ones weighted 0: two products of static shape instead of a loop.

    x (N, H) -> (N, H). Equal to DeepseekV3Experts.forward, whose parameters (gate_up_proj (E, 2I, H), down_proj
    (E, H, I)) it uses; counts the load on the way.
    """
    share = torch.zeros(len(x), self.num_experts, device=x.device).scatter(1, index, weights.float())  # (N, E)
    if self.training:
        self.load += (share.detach() > 0).sum(0)
    gate_up = F.linear(x, self.gate_up_proj.flatten(0, 1)).view(len(x), self.num_experts, -1)
    gate, up = gate_up.chunk(2, dim=-1)  # (N, E, I)
    inner = self.act_fn(gate) * up * share[..., None]
    return F.linear(inner.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


def build_model(device: str, dropout: float):
    """DeepseekV3ForCausalLM in float32 with SGLang's norms.

    For training with dense experts, and dropout on what enters the residual.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    model = DeepseekV3ForCausalLM._from_config(DeepseekV3Config(**text_config()), attn_implementation="sdpa",
                                               dtype=torch.float32)
    model.to(device)
    use_serving_norms(model)

    def drop(module, _, out):
        if torch.is_tensor(out):
            return F.dropout(out, dropout, module.training)
        return F.dropout(out[0], dropout, module.training), *out[1:]

    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            part.register_forward_hook(drop)
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = types.MethodType(dense_experts, layer.mlp.experts)
            layer.mlp.experts.load = torch.zeros(layer.mlp.experts.num_experts, device=device)
    return model


def use_serving_norms(model) -> None:
    """Give MLA's two inner norms the epsilon of the config (1e-5), as SGLang does.

    transformers gives them 1e-6 whatever the config says.
    """
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = text_config()["rms_norm_eps"]
