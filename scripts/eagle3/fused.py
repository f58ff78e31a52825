"""The training pass of `ttt.py`, made fast on a GPU: the same losses and gradients, with a backward written by hand.

What it saves, in the order of weight: rows without loss need only keys and values in step 0; the embedding half of q,
k and v is computed once for all TTT steps (its input is frozen, so its norm's weight is folded into the matrix and no
gradient goes back through it); gradients of weights are added in place; logits never lie whole in memory; attention
to the step-0 keys is one flash call over the packed samples, the few diagonal keys are merged by log-sum-exp; the
rest are Triton kernels. What differs between kinds of attention is in `heads.py`.

Shapes: C context rows, R query rows, H hidden, D head_dim, Q = heads*D, KV = 2*kv_heads*D, I intermediate, K TTT
steps, Vd draft vocabulary. A layer's step 0 takes all C rows below the last layer, and the R query rows in the last.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from eagle3.drafter import IN_EVERY_LAYER, chunks, layer_weights, logits_of, sum_dtype
from eagle3.heads import LatentHeads, PlainHeads
from eagle3.optimizers import triton_runs
from eagle3.ttt import Tally

FAST = True
FOLDED = {"q_embed": "input_norm", "kv_embed": "input_norm", "fc": "aux_norm"}  # matrix: the norm of its frozen input


def runs(draft) -> bool:
    """Whether this pass can train this drafter where it lies; one with biases, a rare kind, the plain pass trains."""
    shape = draft.shape
    if shape.o_bias or shape.fc_bias or shape.value_dim > shape.head_dim:
        return False
    return draft.master.flat.is_cuda and draft.dtype in (torch.bfloat16, torch.float16) and triton_runs()


@torch.no_grad()
def ttt_pass(draft, batch, step_weights, grads=None, kind="ce", drafts=None):
    """See ttt.ttt_pass.

    Of the matrices in FOLDED, `grads` gets the gradient of (matrix * norm weight): `finish` parts them.
    """
    return FusedPass(draft, batch, step_weights, grads, kind).run(drafts)


def reduce_order(shape) -> list[str]:
    """The order in which this pass completes gradients: the same on all ranks."""
    order, heads = ["lm_head", "norm"], LatentHeads if shape.latent else PlainHeads
    for layer in reversed(range(shape.layers)):
        suffix = f".{layer}" if layer else ""
        order += [f"{name}{suffix}" for name in ("down", "gate_up", "post_norm", "o", *heads.of_queries, "q_hidden")]
        order += [f"{name}{suffix}" for name in (*heads.of_keys, "kv_hidden", "hidden_norm")]
    return [*order, "q_embed", "fc", "kv_embed"]


def finish(grads, draft) -> None:
    """Once an optimizer step, on complete gradients: part those of FOLDED.

    From the gradient G of W * norm come those of W, G * norm, and of the norm, the sum of G * W over its rows.
    """
    totals = {}
    for name, norm in FOLDED.items():
        if norm in grads.views:
            part = (grads[name] * draft.weights[name]).sum(0, dtype=sum_dtype(grads.flat))
            totals[norm] = totals[norm] + part if norm in totals else part
            grads[name].mul_(draft.weights[norm])
    for norm, total in totals.items():
        grads[norm].copy_(total)


def spares(shape, batch, steps: int) -> bool:
    """Whether the backward must compute the MLP's inner rows (3I + H of a row's numbers) once more: they would not fit.

    Counted: what a row keeps of each TTT step and of all, and its largest gradients, with a fifth more for the
    allocator. A pack of 8,192 tokens needs 12 GB, a sample of 32,768 four times that.
    """
    if not batch.aux.is_cuda:
        return False
    kept = 5 * shape.hidden + 2 * shape.heads * shape.head_dim + 3 * shape.intermediate  # of a layer in a step
    once = shape.draft_vocab + 4 * shape.key_columns * steps + 5 * shape.intermediate + 8 * shape.hidden
    wanted = 1.2 * batch.aux.element_size() * len(batch.mask) * (kept * steps * shape.layers + once)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return wanted > free


# ---- shifts and attention ----
def padded(x, rows: int):
    """x with `rows` rows of zeros behind it: step k reads from row k on."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows))


@dataclass
class Rows:
    """Which rows ask in a call of attention, for the flash kernel: the bounds of the samples among queries and keys."""
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int


def flash_forward(q, kv, rows: Rows, shape):
    """q (rows, Q), kv (C, KV) -> out (rows, Q), lse (heads, rows), and what the backward wants."""
    keys, heads, dim = shape.key_columns, shape.heads, shape.head_dim
    out, lse, *state = torch.ops.aten._flash_attention_forward(
        q.view(-1, heads, dim), kv[:, :keys].view(-1, shape.kv_heads, dim), kv[:, keys:].view(-1, shape.kv_heads, dim),
        rows.cu_q, rows.cu_k, rows.max_q, rows.max_k, 0.0, True, False, scale=shape.softmax_scale)
    return out.view(len(q), -1), lse, state[:2]


def flash_backward(d_out, q, kv, out, lse, state, rows: Rows, shape):
    """-> dq (rows, Q), dk, dv (C, KV / 2).

    Softmax gradients need only the final out and lse, so given those of attention to more keys, this is exact for its
    part of the keys.
    """
    keys, heads, dim = shape.key_columns, shape.heads, shape.head_dim
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        d_out.view(-1, heads, dim), q.view(-1, heads, dim), kv[:, :keys].view(-1, shape.kv_heads, dim),
        kv[:, keys:].view(-1, shape.kv_heads, dim), out.view(-1, heads, dim), lse, rows.cu_q, rows.cu_k, rows.max_q,
        rows.max_k, 0.0, True, *state, scale=shape.softmax_scale)
    return dq.view(len(q), -1), dk.view(len(kv), -1), dv.view(len(kv), -1)


# ---- the pass ----
@dataclass
class LayerStep:
    """What one layer keeps of one TTT step for its backward. N is C or R."""
    rows: Rows
    hidden: torch.Tensor  # (N, H) the raw input, and residual
    normed: torch.Tensor  # (N, H)
    scale: torch.Tensor  # (N,) 1 / rms of hidden
    q: torch.Tensor = None  # (N, Q), rotated
    q_kept: tuple = None  # what the backward of its heads needs (heads.py)
    kv_kept: tuple = None
    out: torch.Tensor = None  # (N, Q)
    lse: torch.Tensor = None  # (heads, N)
    flash_state: list = None
    middle: torch.Tensor = None  # (N, H) after attention
    mlp_in: torch.Tensor = None  # (N, H)
    mlp_scale: torch.Tensor = None  # (N,)
    gate_up: torch.Tensor = None  # (N, 2I)
    activated: torch.Tensor = None  # (N, I)


@dataclass
class Layer:
    """A layer's weights, keys and values, and what it keeps for the backward."""
    suffix: str  # of its weights' names
    weights: dict
    diagonal: torch.Tensor  # (K-1, R, KV) keys and values of steps 1..K-1, each seen by its own row only
    kv: torch.Tensor = None  # (C, KV) of step 0
    context: LayerStep = None  # step 0 before query rows are picked: hidden, normed and scale of all C rows
    steps: list = field(default_factory=list)
    d_kv: torch.Tensor = None
    d_diagonal: torch.Tensor = None


class FusedPass:
    """One pass over one packed batch; see `ttt_pass`."""

    def __init__(self, draft, batch, step_weights, grads, kind):
        from eagle3 import kernels  # needs triton
        self.ops, self.draft, self.batch, self.grads, self.kind = kernels, draft, batch, grads, kind
        self.shape, self.w, self.step_weights = draft.shape, draft.weights, step_weights
        self.K, self.R, self.C = len(step_weights), len(batch.mask), len(batch.positions)
        self.query_positions = batch.pick(batch.positions)
        self.query_rows = Rows(batch.cu_q, batch.cu_k, batch.max_q, batch.max_k)
        self.all_rows = Rows(batch.cu_k, batch.cu_k, batch.max_k, batch.max_k)
        self.heads = (LatentHeads if self.shape.latent else PlainHeads)(kernels, draft, grads)
        self.spare = bool(grads) and spares(self.shape, batch, self.K)
        columns = 2 * self.shape.key_columns
        self.layers = [Layer(f".{i}" if i else "", tensors, batch.aux.new_empty(self.K - 1, self.R, columns))
                       for i, tensors in enumerate(layer_weights(self.shape, self.w.views))]
        self.ends = []  # per step: (h' (R, H), 1 / rms, gradient of the normed state)

    def run(self, drafts=None):
        tally, target = Tally(self.draft, self.batch, self.K, drafts), self.target_probabilities()
        self.embed_once()
        hidden = self.fc_in @ self.folded("fc").t()  # (C, H)
        for k in range(self.K):
            for layer in self.layers:
                hidden = self.layer_forward(layer, k, hidden)
            normed, scale = self.ops.rms_norm(hidden, self.w["norm"], self.shape.rms_norm_eps)
            self.ends.append((hidden, scale, self.head_step(k, normed, target, tally)))
            hidden = normed if self.shape.norm_output else hidden
        del target
        if self.grads:
            self.grads.done("lm_head")
            self.backward()
        return tally.result()

    def folded(self, name: str) -> torch.Tensor:
        """A matrix with the weight of its input's norm in it."""
        norm = FOLDED[name]
        return self.w[name] * self.w[norm] if norm in self.w.views else self.w[name]

    def target_probabilities(self) -> torch.Tensor:
        """The target's probabilities of the draft vocabulary's tokens, (R + K - 1, Vd); a row sums to its mass."""
        batch, head = self.batch, self.draft.target_head
        out = batch.last.new_zeros(self.R + self.K - 1, len(head))
        for rows in chunks(self.R, len(head)):
            self.ops.target_probabilities(logits_of(batch.last[rows], head), batch.mass[rows], out[rows])
        return out

    def embed_once(self) -> None:
        """The embedding half of q, k and v for all TTT steps, and fc's normed input."""
        batch, eps, alone = self.batch, self.shape.rms_norm_eps, len(self.layers) == 1
        self.embedded, _ = self.ops.rms_norm(self.draft.embed[batch.next_ids], None, eps)  # (C, H), x[p+1]
        # Below another layer all rows ask in step 0
        self.asking = batch.pick(self.embedded) if alone else self.embedded
        self.q_embed = self.asking @ self.folded("q_embed").t()  # (R or C, Q)
        self.q_embed_later = padded(self.q_embed if alone else batch.pick(self.q_embed), self.K - 1)
        if alone:
            self.q_embed = self.q_embed_later[:self.R]  # frees the other copy
        self.kv_embed = self.embedded @ self.folded("kv_embed").t()  # (C, KV)
        self.kv_embed_later = padded(batch.pick(self.kv_embed), self.K - 1) if self.K > 1 else None
        self.fc_in = batch.aux
        if self.shape.aux_norm:
            width = self.shape.hidden * (1 if self.shape.aux_norm == "each" else self.shape.aux_states)
            self.fc_in = self.ops.rms_norm(batch.aux.view(-1, width), None, eps)[0].view_as(batch.aux)

    def layer_forward(self, layer: Layer, k: int, hidden: torch.Tensor) -> torch.Tensor:
        """One layer in one TTT step.

        Position p: token x[p+1+k], hidden of step k-1, RoPE position p+k; predicts x[p+2+k].
        """
        w, shape, ops, first = layer.weights, self.shape, self.ops, layer is self.layers[0]
        normed, scale = ops.rms_norm(hidden, w["hidden_norm"], shape.rms_norm_eps)
        step, positions = LayerStep(self.query_rows, hidden, normed, scale), self.query_positions
        if k == 0:
            # In place: kv_embed_later holds a copy
            product = self.kv_embed.addmm_(normed, w["kv_hidden"].t()) if first else normed @ w["kv_hidden"].t()
            layer.kv, step.kv_kept = self.heads.keys(w, product, self.batch.positions)
            layer.context = step
            if layer is self.layers[-1]:
                step = LayerStep(self.query_rows, *(self.batch.pick(x) for x in (hidden, normed, scale)))
            else:
                step.rows, positions = self.all_rows, self.batch.positions
        else:
            product = self.heads.place(layer.diagonal[k - 1])
            if first:
                torch.addmm(self.kv_embed_later[k:k + self.R], normed, w["kv_hidden"].t(), out=product)
            else:
                torch.mm(normed, w["kv_hidden"].t(), out=product)
            _, step.kv_kept = self.heads.keys(w, product, positions + k, layer.diagonal[k - 1])
        q_embed = self.q_embed if k == 0 else self.q_embed_later[k:k + self.R]
        product = torch.addmm(q_embed, step.normed, w["q_hidden"].t()) if first else step.normed @ w["q_hidden"].t()
        step.q, step.q_kept = self.heads.queries(w, product, positions + k)
        step.out, step.lse, step.flash_state = flash_forward(step.q, layer.kv, step.rows, shape)
        if k:
            ops.merge_diagonal(step.q, layer.diagonal[:k], step.out, step.lse, shape)
        # The residual is the raw hidden state
        step.middle = torch.addmm(step.hidden, self.heads.attended(step.out), w["o"].t())
        self.mlp(w, step)
        if self.grads:
            layer.steps.append(step)
        out = torch.addmm(step.middle, step.activated, w["down"].t())
        if self.spare:
            step.mlp_in = step.gate_up = step.activated = None
        return out

    def mlp(self, w, step: LayerStep) -> None:
        """Up to the product that ends it."""
        step.mlp_in, step.mlp_scale = self.ops.rms_norm(step.middle, w["post_norm"], self.shape.rms_norm_eps)
        step.gate_up = step.mlp_in @ w["gate_up"].t()
        step.activated = self.ops.swiglu(step.gate_up)

    def head_step(self, k: int, normed, target, tally) -> torch.Tensor | None:
        """Loss of step k in chunks of rows. normed (R, H); returns the gradient of normed and adds lm_head's."""
        head, counts = self.w["lm_head"], tally.counts(k)
        row_weight = counts.to(sum_dtype(normed)) * self.step_weights[k]
        losses, best, d_normed = [], [], torch.empty_like(normed) if self.grads else None
        for rows in chunks(self.R, self.shape.draft_vocab):
            target_rows = target[rows.start + k:rows.stop + k]
            loss, found, d_logits = self.ops.soft_cross_entropy(logits_of(normed[rows], head), target_rows,
                                                                row_weight[rows], self.kind)
            losses.append(loss), best.append(found)
            if self.grads:
                d_logits = d_logits.to(normed.dtype)
                torch.mm(d_logits, head, out=d_normed[rows])
                self.grads.add("lm_head", d_logits, normed[rows])
            del d_logits
        tally.add(k, torch.cat(losses), torch.cat(best))
        return d_normed

    # ---- backward: the last step first ----
    def backward(self) -> None:
        grads, w, shape = self.grads, self.w, self.shape
        for layer in self.layers:
            layer.d_kv, layer.d_diagonal = torch.zeros_like(layer.kv), torch.zeros_like(layer.diagonal)
        self.dq_embed = torch.zeros_like(self.q_embed_later)
        self.dkv_embed = self.kv_embed.new_zeros(self.R + self.K - 1, self.kv_embed.shape[1])
        d_hidden = None  # gradient of what the step after this one was fed
        for k in reversed(range(self.K)):
            hidden, scale, d_normed = self.ends.pop()
            if shape.norm_output and d_hidden is not None:
                d_normed, d_hidden = d_normed.add_(d_hidden), None
            d_hidden, d_norm = self.ops.rms_norm_backward(d_normed, hidden, scale, w["norm"], d_hidden)
            grads.add_tensor("norm", d_norm)
            if k == 0:
                grads.done("norm")
            for layer in reversed(self.layers):
                d_hidden = self.layer_backward(layer, k, d_hidden)
        dq_embed = self.dq_embed[:self.R]
        if len(self.layers) > 1:
            self.batch.add_to_query_rows(self.dq_embed_all, dq_embed)
            dq_embed = self.dq_embed_all
        grads.add("q_embed", dq_embed, self.asking)
        grads.done("q_embed")
        grads.add("fc", d_hidden, self.fc_in)
        d_kv = self.layers[0].d_kv
        self.batch.add_to_query_rows(d_kv, self.dkv_embed[:self.R])
        grads.add("kv_embed", d_kv, self.embedded)
        grads.done("fc", "kv_embed")

    def layer_backward(self, layer: Layer, k: int, d_next: torch.Tensor) -> torch.Tensor:
        """From the gradient of a layer's output in step k to that of its input; d_next (C or R, H)."""
        grads, w, ops, step = self.grads, layer.weights, self.ops, layer.steps.pop()
        name = {part: part + layer.suffix for part in IN_EVERY_LAYER}
        if self.spare:
            self.mlp(w, step)
        grads.add(name["down"], d_next, step.activated)
        d_gate_up = ops.swiglu_backward(d_next @ w["down"], step.gate_up)
        grads.add(name["gate_up"], d_gate_up, step.mlp_in)
        d_middle, d_norm = ops.rms_norm_backward(d_gate_up @ w["gate_up"], step.middle, step.mlp_scale, w["post_norm"],
                                                 d_next)
        grads.add_tensor(name["post_norm"], d_norm)
        grads.add(name["o"], d_middle, self.heads.attended(step.out))
        if k == 0:
            grads.done(*(name[part] for part in ("down", "gate_up", "post_norm", "o")))
        dq = self.attention_backward(layer, k, step, self.heads.d_out(d_middle @ w["o"]))
        grads.add(name["q_hidden"], dq, step.normed)
        d_normed = dq @ w["q_hidden"]
        if k == 0:
            grads.done(*self.heads.of_queries, name["q_hidden"])
            return self.context_backward(layer, step, d_normed, d_middle, name)
        d_keys = self.heads.d_keys(w, layer.d_diagonal[k - 1], step.kv_kept, self.query_positions + k)
        if layer is self.layers[0]:
            self.dkv_embed[k:k + self.R] += d_keys
        grads.add(name["kv_hidden"], d_keys, step.normed)
        d_normed.addmm_(d_keys, w["kv_hidden"])
        d_hidden, d_norm = ops.rms_norm_backward(d_normed, step.hidden, step.scale, w["hidden_norm"], d_middle)
        grads.add_tensor(name["hidden_norm"], d_norm)
        return d_hidden

    def attention_backward(self, layer: Layer, k: int, step: LayerStep, d_out) -> torch.Tensor:
        """Adds to the layer's d_kv and d_diagonal; returns the gradient of q before its rotation, (C or R, Q)."""
        shape, keys = self.shape, self.shape.key_columns
        dq, dk, dv = flash_backward(d_out, step.q, layer.kv, step.out, step.lse, step.flash_state, step.rows, shape)
        layer.d_kv[:, :keys] += dk
        layer.d_kv[:, keys:] += dv
        if k:
            self.ops.merge_diagonal_backward(d_out, step.q, layer.diagonal[:k], step.out, step.lse, dq,
                                             layer.d_diagonal[:k], shape)
        positions = self.batch.positions if step.rows is self.all_rows else self.query_positions
        dq = self.heads.d_queries(layer.weights, dq, step.q_kept, positions + k)
        if layer is self.layers[0] and step.rows is self.all_rows:
            self.dq_embed_all = dq.clone()
        elif layer is self.layers[0]:
            # A row at or past its sample's end in step k has a gradient of exactly 0: the shift may run over the border
            self.dq_embed[k:k + self.R] += dq
        return dq

    def context_backward(self, layer: Layer, step: LayerStep, d_normed, d_residual, name: dict) -> torch.Tensor:
        """Step 0 of a layer, below its queries.

        The gradient of its input (C, H), through the keys and values of all rows.
        """
        grads, w, context = self.grads, layer.weights, layer.context
        layer.d_kv = self.heads.d_keys(w, layer.d_kv, context.kv_kept, self.batch.positions)
        grads.add(name["kv_hidden"], layer.d_kv, context.normed)
        d_context = layer.d_kv @ w["kv_hidden"]
        if step.rows is self.all_rows:
            d_context.add_(d_normed)
        else:
            residual = torch.zeros_like(context.hidden)
            self.batch.add_to_query_rows(d_context, d_normed)
            self.batch.add_to_query_rows(residual, d_residual)
            d_residual = residual
        d_hidden, d_norm = self.ops.rms_norm_backward(d_context, context.hidden, context.scale, w["hidden_norm"],
                                                      d_residual)
        grads.add_tensor(name["hidden_norm"], d_norm)
        grads.done(*self.heads.of_keys, name["kv_hidden"], name["hidden_norm"])
        return d_hidden
