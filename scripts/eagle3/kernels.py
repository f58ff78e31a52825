"""Triton kernels of the fused training pass, and what launches them.

One program handles one row (or one block of a row), computes in float32 and reads and writes each element of memory
once or twice. tests/test_kernels.py holds each to its plain form in `ttt.py`, on a CPU under Triton's interpreter;
`scripts/bench_train.py --check-only` does on a GPU.

Shapes: N rows, H hidden, I intermediate, D head_dim, C context rows, R query rows, Vd draft vocabulary.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl


# ---- norms, activation, positions ----
def rms_norm(x, weight, eps: float):
    """x / rms(x) * weight (weight None: without it), and 1 / rms(x). x (N, H) -> (N, H), (N,)."""
    y, scale = torch.empty_like(x), torch.empty(len(x), device=x.device)
    if len(x):
        rms_norm_kernel[(len(x),)](x, x if weight is None else weight, y, scale, x.shape[1], eps,
                                   HAS_WEIGHT=weight is not None, BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return y, scale


def rms_norm_backward(dy, x, scale, weight, residual=None):
    """Gradients of rms_norm: dx (N, H), to which `residual` is added, and dweight (H,)."""
    dx, programs = torch.empty_like(x), max(1, min(len(x), 528))
    partial = torch.empty(programs, x.shape[1], device=x.device)
    rms_norm_backward_kernel[(programs,)](dy, x, scale, weight, x if residual is None else residual, dx, partial,
                                          len(x), x.shape[1], HAS_RESIDUAL=residual is not None,
                                          BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return dx, partial.sum(0)


def swiglu(gate_up):
    """silu(gate) * up. (N, 2I) -> (N, I)."""
    n, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(n, width)
    if n:
        swiglu_kernel[(n, triton.cdiv(width, 2048))](gate_up, out, width, BLOCK=2048, num_warps=4)
    return out


def swiglu_backward(d_out, gate_up):
    """d_out (N, I), gate_up (N, 2I) -> gradient of gate_up."""
    n, width = d_out.shape
    grad = torch.empty_like(gate_up)
    if n:
        swiglu_backward_kernel[(n, triton.cdiv(width, 2048))](d_out, gate_up, grad, width, BLOCK=2048, num_warps=4)
    return grad


def rope_(x, positions, table, head_dim: int, inverse=False, pitch=None):
    """Rotate x (N, heads*D; rows may lie apart) in place by its positions (N,), halves paired as SGLang's neox style.

    table: cos and sin, (positions, D/2) each. inverse: for the gradient. pitch: columns from one head's first to the
    next one's, where a head has others behind those that are rotated.
    """
    pitch = pitch or head_dim
    heads = triton.cdiv(x.shape[1], pitch)
    if len(x):
        blocks = {"HEADS": triton.next_power_of_2(heads), "BLOCK": triton.next_power_of_2(head_dim // 2)}
        rope_kernel[(len(x),)](x, positions, *table, x.stride(0), heads, pitch, -1.0 if inverse else 1.0,
                               HALF=head_dim // 2, **blocks, num_warps=4)
    return x


# ---- attention to a position's own keys of earlier TTT steps, merged by log-sum-exp into that to the step-0 keys ----
def merge_diagonal(q, diagonal, out, lse, shape) -> None:
    """Adds the keys and values `diagonal` (k, R, KV) of each row itself to out (R, Q) and lse (heads, R), in place."""
    grid, blocks = diagonal_launch(q, shape)
    diagonal_kernel[grid](q, diagonal, out, lse, len(q), len(diagonal), shape.softmax_scale, **blocks)


def merge_diagonal_backward(d_out, q, diagonal, out, lse, dq, d_diagonal, shape) -> None:
    """Adds to dq (R, Q) and d_diagonal (k, R, KV) the diagonal keys' part of the gradient; out, lse: merged."""
    grid, blocks = diagonal_launch(q, shape)
    diagonal_backward_kernel[grid](d_out, q, diagonal, out, lse, dq, d_diagonal, len(q), len(diagonal),
                                   shape.softmax_scale, **blocks)


# ---- loss and optimizer ----
def target_probabilities(logits, mass, out) -> None:
    """out (N, Vd) = softmax(logits (N, Vd)) * mass (N,)."""
    if len(logits):
        target_kernel[(len(logits),)](logits, mass, out, logits.shape[1], BLOCK=4096, num_warps=8)


def soft_cross_entropy(logits, target, weight, kind: str):
    """Row losses (N,), argmax (N,) and d(sum of weight * loss)/d logits (N, Vd) in target's dtype; see ttt.row_loss."""
    loss, best = torch.empty_like(weight), torch.empty(len(weight), dtype=torch.int64, device=weight.device)
    grad = torch.empty_like(target)
    if len(logits):
        loss_kernel[(len(logits),)](logits, target, weight, loss, best, grad, logits.shape[1],
                                    KIND=("ce", "kl", "lk").index(kind), BLOCK=4096, num_warps=8)
    return loss, best, grad


def adamw_(master, weights, grads, first, second, clip, lr, betas, eps, decay, corrections) -> None:
    """One AdamW step over flat tensors (see optimizers.adamw_); `weights` gets the rounded result."""
    adamw_kernel[(triton.cdiv(len(master), 2048),)](master, weights, grads, first, second, clip, len(master), lr,
                                                    *betas, eps, decay, *corrections, BLOCK=2048, num_warps=8)


def nesterov_(momentum, gradient, clip, decay: float):
    """Muon's momentum (see optimizers.nesterov_), over contiguous tensors of one shape."""
    out = torch.empty_like(gradient)
    grid = (triton.cdiv(momentum.numel(), 2048),)
    nesterov_kernel[grid](momentum, gradient, out, clip, momentum.numel(), decay, BLOCK=2048, num_warps=8)
    return out


def scaled(x, scale, dtype):
    """x * scale in `dtype`; x contiguous, scale float32 of one element."""
    out = torch.empty_like(x, dtype=dtype)
    scaled_kernel[(triton.cdiv(x.numel(), 4096),)](x, out, scale, x.numel(), BLOCK=4096, num_warps=8)
    return out


def apply_(master, weight, update, lr: float, keep: float) -> None:
    """Muon's step (see optimizers.apply_). master, weight, update (m, n): rows of each may lie apart."""
    rows, width = master.shape
    grid = (rows, triton.cdiv(width, 2048))
    apply_kernel[grid](master, weight, update, width, master.stride(0), weight.stride(0), update.stride(0), lr, keep,
                       BLOCK=2048, num_warps=4)


# ---- the kernels ----
@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, scale_ptr, H, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * H + cols, cols < H, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
    y = x * scale
    if HAS_WEIGHT:
        y *= tl.load(w_ptr + cols, cols < H, 0.0).to(tl.float32)
    tl.store(y_ptr + row * H + cols, y, cols < H)
    tl.store(scale_ptr + row, scale)


@triton.jit
def rms_norm_backward_kernel(dy_ptr, x_ptr, scale_ptr, w_ptr, residual_ptr, dx_ptr, partial_ptr, rows, H,
                             HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    begin = tl.program_id(0).to(tl.int64) * 0  # makes the sums below 64 bits wide
    w = tl.load(w_ptr + cols, cols < H, 0.0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = (begin + row) * H + cols
        scale = tl.load(scale_ptr + row)
        normed = tl.load(x_ptr + offsets, cols < H, 0.0).to(tl.float32) * scale
        dy = tl.load(dy_ptr + offsets, cols < H, 0.0).to(tl.float32)
        d_weight += dy * normed
        g = dy * w
        dx = scale * (g - normed * (tl.sum(g * normed, 0) / H))
        if HAS_RESIDUAL:
            dx += tl.load(residual_ptr + offsets, cols < H, 0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, dx, cols < H)
    tl.store(partial_ptr + tl.program_id(0) * H + cols, d_weight, cols < H)


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, I, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * I + cols, cols < I, 0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * I + I + cols, cols < I, 0.0).to(tl.float32)
    tl.store(out_ptr + row * I + cols, gate * tl.sigmoid(gate) * up, cols < I)


@triton.jit
def swiglu_backward_kernel(d_ptr, x_ptr, dx_ptr, I, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(d_ptr + row * I + cols, cols < I, 0.0).to(tl.float32)
    gate = tl.load(x_ptr + row * 2 * I + cols, cols < I, 0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * I + I + cols, cols < I, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(dx_ptr + row * 2 * I + cols, d * up * sigmoid * (1 + gate * (1 - sigmoid)), cols < I)
    tl.store(dx_ptr + row * 2 * I + I + cols, d * gate * sigmoid, cols < I)


@triton.jit
def rope_kernel(x_ptr, position_ptr, cos_ptr, sin_ptr, stride, heads, pitch, sign, HALF: tl.constexpr,
                HEADS: tl.constexpr, BLOCK: tl.constexpr):
    row, head, cols = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    position = tl.load(position_ptr + row)
    cos = tl.load(cos_ptr + position * HALF + cols, cols < HALF, 0.0)
    sin = tl.load(sin_ptr + position * HALF + cols, cols < HALF, 0.0) * sign
    inside = (head < heads) & (cols < HALF)
    offsets = row * stride + head * pitch + cols
    first = tl.load(x_ptr + offsets, inside, 0.0).to(tl.float32)
    second = tl.load(x_ptr + offsets + HALF, inside, 0.0).to(tl.float32)
    tl.store(x_ptr + offsets, first * cos - second * sin, inside)
    tl.store(x_ptr + offsets + HALF, second * cos + first * sin, inside)


def diagonal_launch(q, shape) -> tuple[tuple, dict]:
    """Grid and block sizes.

    A program takes one row and as many kv heads, with their query heads, as make about 1024 elements.
    """
    group = shape.heads // shape.kv_heads
    blocks = {"BG": triton.next_power_of_2(group), "BD": triton.next_power_of_2(shape.head_dim)}
    blocks["BH"] = min(max(1, 1024 // (blocks["BG"] * blocks["BD"])), triton.next_power_of_2(shape.kv_heads))
    sizes = {"KV_HEADS": shape.kv_heads, "GROUP": group, "DIM": shape.head_dim}
    return (len(q), triton.cdiv(shape.kv_heads, blocks["BH"])), sizes | blocks


@triton.jit
def diagonal_offsets(row, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BG: tl.constexpr,
                     BD: tl.constexpr, BH: tl.constexpr):
    """Of this program's kv heads: where their keys lie in a row, their query heads, where those lie, which exist."""
    h, g, d = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BG), tl.arange(0, BD)
    head = h[:, None] * GROUP + g[None, :]  # (BH, BG)
    head_ok = (h < KV_HEADS)[:, None] & (g < GROUP)[None, :]
    inside = head_ok[:, :, None] & (d < DIM)[None, None, :]
    kv_ok = (h < KV_HEADS)[:, None, None] & (d < DIM)[None, None, :]
    q_at = row * (KV_HEADS * GROUP * DIM) + head[:, :, None] * DIM + d[None, None, :]
    return h[:, None, None] * DIM + d[None, None, :], kv_ok, head, head_ok, q_at, inside


@triton.jit
def diagonal_kernel(q_ptr, diagonal_ptr, out_ptr, lse_ptr, rows, steps, scale, KV_HEADS: tl.constexpr,
                    GROUP: tl.constexpr, DIM: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    in_row, kv_ok, head, head_ok, q_at, inside = diagonal_offsets(row, KV_HEADS, GROUP, DIM, BG, BD, BH)
    q = tl.load(q_ptr + q_at, inside, 0.0).to(tl.float32)
    out = tl.load(out_ptr + q_at, inside, 0.0).to(tl.float32)
    lse_at = head.to(tl.int64) * rows + row
    lse = tl.load(lse_ptr + lse_at, head_ok, 0.0)
    for i in range(steps):
        kv_at = (row + i * rows) * (2 * KV_HEADS * DIM) + in_row
        key = tl.load(diagonal_ptr + kv_at, kv_ok, 0.0).to(tl.float32)
        value = tl.load(diagonal_ptr + kv_at + KV_HEADS * DIM, kv_ok, 0.0).to(tl.float32)
        score = tl.sum(q * key, 2) * scale  # (BH, BG)
        top = tl.maximum(lse, score)
        merged = top + tl.log(tl.exp(lse - top) + tl.exp(score - top))
        out = out * tl.exp(lse - merged)[:, :, None] + tl.exp(score - merged)[:, :, None] * value
        lse = merged
    tl.store(out_ptr + q_at, out, inside)
    tl.store(lse_ptr + lse_at, lse, head_ok)


@triton.jit
def diagonal_backward_kernel(d_ptr, q_ptr, diagonal_ptr, out_ptr, lse_ptr, dq_ptr, d_diagonal_ptr, rows, steps, scale,
                             KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BG: tl.constexpr,
                             BD: tl.constexpr, BH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    in_row, kv_ok, head, head_ok, q_at, inside = diagonal_offsets(row, KV_HEADS, GROUP, DIM, BG, BD, BH)
    q = tl.load(q_ptr + q_at, inside, 0.0).to(tl.float32)
    d_out = tl.load(d_ptr + q_at, inside, 0.0).to(tl.float32)
    delta = tl.sum(d_out * tl.load(out_ptr + q_at, inside, 0.0).to(tl.float32), 2)
    lse = tl.load(lse_ptr + head.to(tl.int64) * rows + row, head_ok, 0.0)
    dq = tl.load(dq_ptr + q_at, inside, 0.0).to(tl.float32)
    for i in range(steps):
        kv_at = (row + i * rows) * (2 * KV_HEADS * DIM) + in_row
        key = tl.load(diagonal_ptr + kv_at, kv_ok, 0.0).to(tl.float32)
        value = tl.load(diagonal_ptr + kv_at + KV_HEADS * DIM, kv_ok, 0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * key, 2) * scale - lse)
        weight = tl.where(head_ok, weight, 0.0)
        d_score = weight * (tl.sum(d_out * value, 2) - delta) * scale
        dq += d_score[:, :, None] * key
        d_key = tl.sum(d_score[:, :, None] * q, 1, keep_dims=True)  # (BH, 1, BD)
        d_value = tl.sum(weight[:, :, None] * d_out, 1, keep_dims=True)
        for_key, for_value = d_diagonal_ptr + kv_at, d_diagonal_ptr + kv_at + KV_HEADS * DIM
        tl.store(for_key, tl.load(for_key, kv_ok, 0.0).to(tl.float32) + d_key, kv_ok)
        tl.store(for_value, tl.load(for_value, kv_ok, 0.0).to(tl.float32) + d_value, kv_ok)
    tl.store(dq_ptr + q_at, dq, inside)


@triton.jit
def target_kernel(z_ptr, mass_ptr, out_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, total = -float("inf"), 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + cols, cols < V, -float("inf"))
        new = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), 0)
        top = new
    share = tl.load(mass_ptr + row) / total
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + row * V + cols, cols < V, -float("inf"))
        tl.store(out_ptr + row * V + cols, tl.exp(z - top) * share, cols < V)


@triton.jit
def loss_kernel(z_ptr, p_ptr, weight_ptr, loss_ptr, best_ptr, d_ptr, V, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr, p_ptr, d_ptr = z_ptr + row * V, p_ptr + row * V, d_ptr + row * V
    weight = tl.load(weight_ptr + row)
    top, total, dot, mass, entropy, best = -float("inf"), 0.0, 0.0, 0.0, 0.0, 0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + cols, cols < V, -float("inf"))
        p = tl.load(p_ptr + cols, cols < V, 0.0).to(tl.float32)
        block_top = tl.max(z, 0)
        best = tl.where(block_top > top, start + tl.argmax(z, 0), best)
        new = tl.maximum(top, block_top)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), 0)
        top = new
        dot += tl.sum(tl.where(cols < V, p * z, 0.0), 0)
        mass += tl.sum(p, 0)
        if KIND == 1:
            entropy += tl.sum(tl.where(p > 0, p * tl.log(tl.maximum(p, 1e-37)), 0.0), 0)
    if KIND == 2:
        accept, under_mass = 0.0, 0.0
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            q = tl.exp(tl.load(z_ptr + cols, cols < V, -float("inf")) - top) / total
            p = tl.load(p_ptr + cols, cols < V, 0.0).to(tl.float32)
            accept += tl.sum(tl.minimum(p, q), 0)
            under_mass += tl.sum(tl.where(q < p, q, 0.0), 0)
        accept = tl.maximum(accept, 1e-30)
        tl.store(loss_ptr + row, -tl.log(accept))
    else:
        tl.store(loss_ptr + row, mass * (top + tl.log(total)) - dot + entropy)
    tl.store(best_ptr + row, best.to(tl.int64))
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        q = tl.exp(tl.load(z_ptr + cols, cols < V, -float("inf")) - top) / total
        p = tl.load(p_ptr + cols, cols < V, 0.0).to(tl.float32)
        if KIND == 2:
            d = q / accept * (under_mass - tl.where(q < p, 1.0, 0.0))
        else:
            d = q * mass - p
        tl.store(d_ptr + cols, d * weight, cols < V)


@triton.jit
def adamw_kernel(master_ptr, weight_ptr, grad_ptr, first_ptr, second_ptr, clip_ptr, n, lr, beta1, beta2, eps, decay,
                 correct1, correct2, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32) * tl.load(clip_ptr)
    first = tl.load(first_ptr + at, inside, 0.0)
    first += (grad - first) * (1 - beta1)
    second = tl.load(second_ptr + at, inside, 0.0) * beta2 + grad * grad * (1 - beta2)
    master = tl.load(master_ptr + at, inside, 0.0) * (1 - lr * decay)
    master -= lr * (first / correct1) / (tl.sqrt(second / correct2) + eps)
    tl.store(first_ptr + at, first, inside)
    tl.store(second_ptr + at, second, inside)
    tl.store(master_ptr + at, master, inside)
    tl.store(weight_ptr + at, master, inside)


@triton.jit
def nesterov_kernel(momentum_ptr, grad_ptr, out_ptr, clip_ptr, n, decay, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32) * tl.load(clip_ptr)
    momentum = tl.load(momentum_ptr + at, inside, 0.0)
    momentum += (grad - momentum) * (1 - decay)
    tl.store(momentum_ptr + at, momentum, inside)
    tl.store(out_ptr + at, grad + (momentum - grad) * decay, inside)


@triton.jit
def scaled_kernel(x_ptr, out_ptr, scale_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, inside, 0.0).to(tl.float32) * tl.load(scale_ptr), inside)


@triton.jit
def apply_kernel(master_ptr, weight_ptr, update_ptr, width, master_stride, weight_stride, update_stride, lr, keep,
                 BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    master = tl.load(master_ptr + row * master_stride + cols, inside, 0.0) * keep
    master -= tl.load(update_ptr + row * update_stride + cols, inside, 0.0).to(tl.float32) * lr
    tl.store(master_ptr + row * master_stride + cols, master, inside)
    tl.store(weight_ptr + row * weight_stride + cols, master, inside)
