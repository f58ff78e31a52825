"""Of the fused pass: from the products of q and kv to the heads that the flash kernel takes, and back, by hand.

The definition is in `ttt.py` (plain_queries, plain_keys, latent_queries, latent_keys). Flash attention wants queries,
keys and values of one width D: values of multi-head latent attention (mla.py) get columns of zeros behind them.

Shapes: N rows (C or R), D head_dim, Q = heads*D, KV = 2*kv_heads*D (keys, then values).
"""
from __future__ import annotations

import torch
import torch.nn.functional as F


class PlainHeads:
    """The products are the heads: keys and queries get rotated where they lie."""
    of_queries, of_keys = (), ()  # weights that only the way from a product to the heads has

    def __init__(self, ops, draft, grads):
        self.ops, self.shape, self.table, self.grads = ops, draft.shape, draft.rope_table, grads

    def place(self, kv):
        """Where the product belongs that becomes `kv` (R, KV)."""
        return kv

    def queries(self, w, q, positions):
        """Product (N, ...) -> (N, Q), and what its backward needs."""
        return self.ops.rope_(q, positions, self.table, self.shape.head_dim), None

    def keys(self, w, product, positions, kv=None):
        """Product (N, ...) -> kv (N, KV), and what its backward needs. kv: where to, if not anywhere."""
        self.ops.rope_(product[:, :self.shape.key_columns], positions, self.table, self.shape.head_dim)
        return product, None

    def attended(self, out):
        """Out of the flash kernel (N, Q) -> what `o` takes."""
        return out

    # ---- from gradients of the heads to those of the products; may change what they are given ----
    def d_out(self, d_attended):
        return d_attended

    def d_queries(self, w, dq, kept, positions):
        return self.ops.rope_(dq, positions, self.table, self.shape.head_dim, inverse=True)

    def d_keys(self, w, d_kv, kept, positions):
        self.ops.rope_(d_kv[:, :self.shape.key_columns], positions, self.table, self.shape.head_dim, inverse=True)
        return d_kv


class LatentHeads(PlainHeads):
    """Multi-head latent attention. The products are small; all heads come of them (mla.py)."""
    of_queries, of_keys = ("q_b", "q_a_norm"), ("k_b", "v_b", "kv_a_norm")

    def place(self, kv):
        return kv.new_empty(len(kv), self.shape.latent.cached)

    def rotate(self, q, positions, inverse=False):
        """In place, the last columns of each head of q (N, Q)."""
        shape = self.shape
        self.ops.rope_(q[:, shape.head_dim - shape.rope_dim:], positions, self.table, shape.rope_dim, inverse,
                       shape.head_dim)

    def parts(self, kv):
        """Views of kv (N, KV): keys without and with rotation, values and the zeros behind them, (N, heads, ...)."""
        shape = self.shape
        key, value = kv.view(len(kv), 2, shape.heads, shape.head_dim).unbind(1)
        plain = shape.head_dim - shape.rope_dim
        return key[..., :plain], key[..., plain:], value[..., :shape.value_dim], value[..., shape.value_dim:]

    def queries(self, w, q, positions):
        normed, scale = self.ops.rms_norm(q, w["q_a_norm"], self.shape.rms_norm_eps)
        full = normed @ w["q_b"].t()
        self.rotate(full, positions)
        return full, (q, normed, scale)

    def keys(self, w, product, positions, kv=None):
        shape, rank = self.shape, self.shape.latent.kv_lora_rank
        state = product[:, :rank].contiguous()
        normed, scale = self.ops.rms_norm(state, w["kv_a_norm"], shape.rms_norm_eps)
        shared = self.ops.rope_(product[:, rank:], positions, self.table, shape.rope_dim)
        kv = product.new_empty(len(product), 2 * shape.key_columns) if kv is None else kv
        plain, turned, value, behind = self.parts(kv)
        plain.copy_((normed @ w["k_b"].t()).view(plain.shape))
        turned.copy_(shared[:, None].expand_as(turned))
        value.copy_((normed @ w["v_b"].t()).view(value.shape))
        behind.zero_()
        return kv, (state, normed, scale)

    def attended(self, out):
        return out.view(len(out), self.shape.heads, -1)[..., :self.shape.value_dim].reshape(len(out), -1)

    def d_out(self, d_attended):
        apart = d_attended.view(len(d_attended), self.shape.heads, -1)
        return F.pad(apart, (0, self.shape.head_dim - self.shape.value_dim)).flatten(1)

    def d_queries(self, w, dq, kept, positions):
        q, normed, scale = kept
        self.rotate(dq, positions, inverse=True)
        self.grads.add("q_b", dq, normed)
        dq, d_norm = self.ops.rms_norm_backward(dq @ w["q_b"], q, scale, w["q_a_norm"])
        self.grads.add_tensor("q_a_norm", d_norm)
        return dq

    def d_keys(self, w, d_kv, kept, positions):
        state, normed, scale = kept
        d_plain, d_turned, d_value, _ = self.parts(d_kv)
        d_plain, d_value = d_plain.flatten(1), d_value.flatten(1)
        d_shared = d_turned.sum(1, dtype=scale.dtype).to(d_kv.dtype)
        self.ops.rope_(d_shared, positions, self.table, self.shape.rope_dim, inverse=True)
        self.grads.add("k_b", d_plain, normed)
        self.grads.add("v_b", d_value, normed)
        d_state = (d_plain @ w["k_b"]).addmm_(d_value, w["v_b"])
        d_state, d_norm = self.ops.rms_norm_backward(d_state, state, scale, w["kv_a_norm"])
        self.grads.add_tensor("kv_a_norm", d_norm)
        return torch.cat([d_state, d_shared], 1)
