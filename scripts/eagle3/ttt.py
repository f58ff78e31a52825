"""Training-time test (TTT; EAGLE-3, arXiv 2503.01840) in plain autograd: the definition of how a drafter is trained.

Step k of the draft is trained on its own hidden state of step k-1, as in serving. Step k at position p: token
x[p+1+k], hidden h'_{k-1}[p] (step 0: fc of the target's aux states), RoPE position p+k; it sees the step-0 keys of
positions <= p of its sample and its own position's keys of steps 1..k (the diagonal), and predicts token p+2+k. Its
target is softmax(lm_head_target(last[p+1+k])) over the draft vocabulary, and it counts where token p+2+k is a
response token.

It runs anywhere, in float32 and float64 too. `fused.py` computes the same faster on a GPU; tests hold it to this.

Shapes: C context rows (positions of the packed samples), R query rows (those that carry loss in some step: the tail
of each sample), H hidden, D head_dim, Q = heads*D, KV = 2*kv_heads*D, K TTT steps, Vd draft vocabulary.
`batches.Batch` has the rows.
"""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from eagle3.drafter import layer_weights, sum_dtype

LOSSES = ("ce", "kl", "lk")
FAST = False
LARGE = 1 << 26  # numbers of a score matrix or of logits from which they are not kept for the backward


def rms_norm(x, weight, eps: float):
    """x / rms(x) * weight over the last dimension (weight None: without it)."""
    exact = x.to(sum_dtype(x))
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rope(x, positions, table, head_dim: int):
    """x (N, heads*D) rotated by its positions (N,), halves paired as in SGLang's neox style.

    table: cos and sin, (P, D/2) each.
    """
    cos, sin = (part[positions][:, None] for part in table)
    first, second = x.view(len(x), -1, head_dim).to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).flatten(1).to(x.dtype)


# ---- from the products of q and kv to the queries, keys and values of heads ----
def plain_queries(draft, w, q, positions):
    """q (N, Q), rotated."""
    return rope(q, positions, draft.rope_table, draft.shape.head_dim)


def plain_keys(draft, w, kv, positions):
    """kv (N, KV) -> keys, rotated, and values."""
    key, value = kv.split(draft.shape.key_columns, 1)
    return rope(key, positions, draft.rope_table, draft.shape.head_dim), value


def latent_queries(draft, w, q, positions):
    """q (N, q_lora_rank) -> (N, Q): of multi-head latent attention (mla.py)."""
    shape, latent = draft.shape, draft.shape.latent
    q = rms_norm(q, w["q_a_norm"], shape.rms_norm_eps) @ w["q_b"].t()
    plain, turned = q.view(len(q), shape.heads, -1).split([latent.qk_nope_head_dim, shape.rope_dim], -1)
    turned = rope(turned.flatten(1), positions, draft.rope_table, shape.rope_dim).view_as(turned)
    return torch.cat([plain, turned], -1).flatten(1)


def latent_keys(draft, w, kv, positions):
    """kv (N, kv_lora_rank + rotated columns) -> keys (N, Q), values (N, heads * v_head_dim)."""
    shape, latent = draft.shape, draft.shape.latent
    state, turned = kv.split([latent.kv_lora_rank, shape.rope_dim], 1)
    state = rms_norm(state, w["kv_a_norm"], shape.rms_norm_eps)
    turned = rope(turned, positions, draft.rope_table, shape.rope_dim)[:, None].expand(-1, shape.heads, -1)
    plain = (state @ w["k_b"].t()).view(len(kv), shape.heads, -1)
    return torch.cat([plain, turned], -1).flatten(1), state @ w["v_b"].t()


def spared(numbers: int, function, *given):
    """function(*given); where its inner tensors are this large, computed once more in the backward: the same numbers.

    At Kimi's width the scores of a step take 2 GB a sample of 2,048 tokens, its logits 4 GB a pack of 8,192.
    """
    if numbers < LARGE:
        return function(*given)
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)


def unseen_keys(queries: int, keys: int, device):
    """(queries, keys) bool: keys behind a query's own position.

    The queries are the last rows: i sits at key keys - queries + i.
    """
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)


def attention(q, cache, spans, shape):
    """Attention of one TTT step, (rows, Q). q (rows, Q), in each sample its last rows.

    cache: [(keys, values)] of the steps so far, each (C or R, kv_heads * a head's columns). The first are step 0's,
    of all context rows: a row sees those up to its position. Later ones are seen by their own row alone. spans: per
    sample ((q0, q1), (k0, k1)).
    """
    q = q.view(len(q), shape.kv_heads, -1, shape.head_dim) * shape.softmax_scale  # (rows, kv_heads, group, D)
    (key, value), later, out = cache[0], cache[1:], []
    key, value = (x.view(len(x), shape.kv_heads, -1) for x in (key, value))
    diagonal = [x.view(len(x), shape.kv_heads, 1, -1) for pair in later for x in pair]
    for (q0, q1), (k0, k1) in spans:
        own = [x[q0:q1] for x in diagonal]
        scores = (q1 - q0) * (k1 - k0) * shape.heads
        out.append(spared(scores, attention_of_sample, q[q0:q1], key[k0:k1], value[k0:k1], *own))
    return torch.cat(out)


def attention_of_sample(q, key, value, *diagonal):
    """q (rows, kv_heads, group, D), scaled; key, value (keys, kv_heads, ...) of step 0 -> (rows, ...).

    diagonal: key, value, key, value ... of later steps, (rows, kv_heads, 1, ...) each.
    """
    scores = torch.einsum("qhgd,khd->qhgk", q, key)
    scores = scores.masked_fill(unseen_keys(len(q), len(key), q.device)[:, None, None], -math.inf)
    on_diagonal = [(q * k).sum(-1, keepdim=True) for k in diagonal[::2]]
    weights = torch.cat([scores, *on_diagonal], -1).softmax(-1, dtype=sum_dtype(q)).to(q.dtype)
    mixed = torch.einsum("qhgk,khd->qhgd", weights[..., :len(key)], value)
    for i, v in enumerate(diagonal[1::2], len(key)):
        mixed = mixed + weights[..., i, None] * v
    return mixed.flatten(1)


def draft_layer(draft, w, hidden, embedded, positions, cache, batch, last: bool):
    """One layer in one TTT step. hidden (C or R, H) -> (C or R, H); appends its keys and values to `cache`.

    embedded: the normed embedding of the rows' tokens, for the first layer; None for the others. In step 0 the last
    layer goes on with the query rows alone: of the other rows only keys and values are needed.
    """
    shape = draft.shape
    queries, keys = (latent_queries, latent_keys) if shape.latent else (plain_queries, plain_keys)
    normed = rms_norm(hidden, w["hidden_norm"], shape.rms_norm_eps)
    q, kv = normed @ w["q_hidden"].t(), normed @ w["kv_hidden"].t()
    if embedded is not None:
        q, kv = q + embedded @ w["q_embed"].t(), kv + embedded @ w["kv_embed"].t()
    cache.append(keys(draft, w, kv, positions))
    if last and len(cache) == 1:
        q, hidden, positions = batch.pick(q), batch.pick(hidden), batch.pick(positions)
    q = queries(draft, w, q, positions)
    spans = batch.spans if len(q) == len(batch.mask) else [(keys, keys) for _, keys in batch.spans]
    middle = hidden + attention(q, cache, spans, shape) @ w["o"].t()  # the residual is the raw hidden state
    middle = middle + w["o_bias"] if shape.o_bias else middle
    gate, up = (rms_norm(middle, w["post_norm"], shape.rms_norm_eps) @ w["gate_up"].t()).chunk(2, -1)
    return middle + (F.silu(gate) * up) @ w["down"].t()


def fc_input(draft, w, aux):
    """The target's aux states (C, A*H) as fc takes them.

    Each one normed (`fc_norm`), all together (`norm_before_fc`), or raw.
    """
    shape = draft.shape
    if shape.aux_norm == "each":
        aux = aux.view(len(aux), shape.aux_states, shape.hidden)
        return rms_norm(aux, w["aux_norm"].view(shape.aux_states, shape.hidden), shape.rms_norm_eps).flatten(1)
    return rms_norm(aux, w["aux_norm"], shape.rms_norm_eps) if shape.aux_norm == "all" else aux


def row_loss(logits, target, kind: str):
    """Loss of each row. logits, target (N, Vd) -> (N,).

    With p the target's probabilities (summing to the mass m inside the draft vocabulary) and q = softmax(logits):

        ce  -sum p log q
        kl  the same less p's entropy
        lk  -log sum min(p, q): the acceptance probability itself (LK losses, arXiv 2602.23881)

    Mass outside the draft vocabulary cannot be drafted: it scales a row's gradient by m in ce and kl and bounds the
    acceptance in lk.
    """
    log_q = logits.log_softmax(-1)
    if kind == "lk":
        return -torch.minimum(log_q.exp(), target).sum(-1).clamp_min(1e-30).log()
    loss = -(target * log_q).sum(-1)
    return loss + torch.special.xlogy(target, target).sum(-1) if kind == "kl" else loss


def head_loss(normed, head, target, kind: str):
    """Row losses (R,) and the draft token of highest probability (R,). normed (R, H), head (Vd, H), target (R, Vd)."""
    logits = (normed @ head.t()).to(sum_dtype(normed))
    return row_loss(logits, target, kind), logits.argmax(-1)


class Tally:
    """What a pass finds: per TTT step the sums of its losses and of its hits, and which drafts were right."""

    def __init__(self, draft, batch, steps: int, drafts: list | None = None):
        """drafts: gets the draft tokens of each step, (R,) ids of the target."""
        self.draft_ids, self.batch, self.sums, self.right, self.drafts = draft.draft_ids, batch, [], [], drafts
        self.labels, self.mask = (F.pad(x, (0, steps)) for x in (batch.labels, batch.mask))
        self.chain = torch.ones_like(batch.mask)  # rows whose drafts of the steps so far were all right
        self.counted = self.chain.clone()  # rows that counted in all steps so far

    def counts(self, k: int):
        """(R,) rows that carry loss in step k: token x[p+2+k] is a response token of the same sample."""
        return self.mask[k:k + len(self.batch.mask)] & (self.batch.rows_left > k)

    def add(self, k: int, losses, best) -> None:
        """losses, best (R,): row losses of step k and the draft token of highest probability."""
        counts, tokens = self.counts(k), self.draft_ids[best]
        hit = tokens == self.labels[k:k + len(best)]
        before = self.chain & self.counted & counts
        self.counted, self.chain = self.counted & counts, self.chain & hit
        flags = (self.counted, self.counted & self.chain, before)
        self.sums.append(torch.stack([(losses * counts).sum(), *(flag.sum(dtype=losses.dtype) for flag in flags)]))
        self.right.append(hit)
        if self.drafts is not None:
            self.drafts.append(tokens)

    def result(self):
        """sums (K, 4) and right (K, R).

        sums: row losses, rows whose steps 0..k all count, of those right in 0..k, right in 0..k-1.
        """
        return torch.stack(self.sums), torch.stack(self.right)


def ttt_pass(draft, batch, step_weights, grads=None, kind="ce", drafts=None):
    """Forward, and with `grads` backward, of all TTT steps over one packed batch.

    step_weights: K floats; the loss whose gradient is added to `grads` (optimizers.Gradients) is the sum over k of
    step_weights[k] * row losses of step k. Returns Tally.result().
    """
    shape, K, eps, C = draft.shape, len(step_weights), draft.shape.rms_norm_eps, len(batch.positions)
    tally, loss = Tally(draft, batch, K, drafts), 0.0
    with torch.set_grad_enabled(grads is not None):
        w = {name: view.detach().requires_grad_(grads is not None) for name, view in draft.weights.views.items()}
        layers, caches = layer_weights(shape, w), [[] for _ in range(shape.layers)]
        target = (batch.last @ draft.target_head.t()).to(sum_dtype(batch.last)).softmax(-1) * batch.mass[:, None]
        target, next_ids = F.pad(target, (0, 0, 0, K)), F.pad(batch.next_ids, (0, K))  # (R + K, Vd), (C + K,)
        hidden = fc_input(draft, w, batch.aux) @ w["fc"].t()  # (C, H)
        hidden = hidden + w["fc_bias"] if shape.fc_bias else hidden
        for k in range(K):
            embedded = rms_norm(draft.embed[next_ids[k:k + C]], w["input_norm"], eps)  # x[p+1+k]
            positions = batch.positions
            if k:  # only query rows are left
                embedded, positions = batch.pick(embedded), batch.pick(positions)
            for layer, cache in zip(layers, caches):
                last, fed = layer is layers[-1], embedded if layer is layers[0] else None
                hidden = draft_layer(draft, layer, hidden, fed, positions + k, cache, batch, last)
            normed = rms_norm(hidden, w["norm"], eps)
            target_rows = target[k:k + len(normed)]
            losses, best = spared(target_rows.numel(), head_loss, normed, w["lm_head"], target_rows, kind)
            loss = loss + step_weights[k] * (losses * tally.counts(k)).sum()
            tally.add(k, losses.detach(), best)
            hidden = normed if shape.norm_output else hidden  # what the next draft step is fed
        if grads:
            gradients = torch.autograd.grad(loss, list(w.values()), allow_unused=True, materialize_grads=True)
            for name, gradient in zip(w, gradients):
                grads.add_tensor(name, gradient)
            grads.done(*reduce_order(shape))
    return tally.result()


def reduce_order(shape) -> list[str]:
    """The order in which this pass completes gradients: the same on all ranks."""
    return list(shape.weights())


def finish(grads, draft) -> None:
    """Once an optimizer step, on complete gradients: autograd leaves nothing to do."""
