"""Each Triton kernel against its plain form, and the whole fused pass against ttt.py, the definition.

On a CPU the kernels run under Triton's interpreter (conftest.py switches it on), in float32, so the two agree to 1e-6;
on a GPU the same tests run compiled kernels.
"""
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from eagle3 import fused, optimizers, ttt
from eagle3.batches import Sample, batch_of
from eagle3.drafter import Drafter, Shape
from eagle3.mla import Latent

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of columns that a kernel masks out
pytest.importorskip("triton", reason="triton is not installed (scripts/requirements-test.txt has it)")
from eagle3 import kernels  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 1e-6 if DEVICE.type == "cpu" else 1e-5
EPS = 1e-5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def normal(*size, grad=False):
    return torch.randn(*size, device=DEVICE).requires_grad_(grad)


def assert_close(found, wanted, tolerance=TOLERANCE):
    assert found.shape == wanted.shape
    assert (found - wanted).norm() <= tolerance * wanted.norm(), float((found - wanted).norm() / wanted.norm())


# ---- norms, activation, positions ----
@pytest.mark.parametrize("rows, width", [(5, 40), (1, 64), (0, 40)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(rows, width, weighted):
    x, weight = normal(rows, width), normal(width) if weighted else None
    found, scale = kernels.rms_norm(x, weight, EPS)
    assert_close(found, ttt.rms_norm(x, weight, EPS))
    assert_close(scale, torch.rsqrt(x.square().mean(-1) + EPS))


@pytest.mark.parametrize("residual", [True, False])
def test_rms_norm_backward(residual):
    x, weight, dy = normal(7, 40, grad=True), normal(40, grad=True), normal(7, 40)
    more = normal(7, 40) if residual else None
    dx, d_weight = torch.autograd.grad(ttt.rms_norm(x, weight, EPS), (x, weight), dy)
    found = kernels.rms_norm_backward(dy, x.detach(), kernels.rms_norm(x.detach(), None, EPS)[1], weight.detach(), more)
    assert_close(found[0], dx if more is None else dx + more)
    assert_close(found[1], d_weight)


def test_swiglu_and_its_backward():
    x, d_out = normal(5, 2 * 2100, grad=True), normal(5, 2100)  # wider than a block of 2048
    gate, up = x.chunk(2, -1)
    out = F.silu(gate) * up
    assert_close(kernels.swiglu(x.detach()), out)
    assert_close(kernels.swiglu_backward(d_out, x.detach()), torch.autograd.grad(out, x, d_out)[0])


@pytest.mark.parametrize("heads, dim", [(3, 8), (2, 12)])
def test_rope_in_place_on_rows_that_lie_apart(heads, dim):
    angles = torch.arange(50, device=DEVICE)[:, None] * 10000.0 ** -(torch.arange(0, dim, 2, device=DEVICE) / dim)
    table, positions = (angles.cos(), angles.sin()), torch.tensor([0, 7, 49, 7], device=DEVICE)
    wide = normal(4, heads * dim + 5)
    x, before = wide[:, :heads * dim], wide.clone()
    kernels.rope_(x, positions, table, dim)
    assert_close(x, ttt.rope(before[:, :heads * dim], positions, table, dim))
    assert torch.equal(wide[:, heads * dim:], before[:, heads * dim:])
    kernels.rope_(x, positions, table, dim, inverse=True)
    assert_close(x, before[:, :heads * dim])
    apart = normal(4, heads * (dim + 3))  # 3 columns before those of each head that are rotated
    wanted = ttt.rope(apart.view(4, heads, -1)[..., 3:].flatten(1), positions, table, dim).view(4, heads, dim)
    wanted = torch.cat([apart.view(4, heads, -1)[..., :3], wanted], -1).flatten(1)
    kernels.rope_(apart[:, 3:], positions, table, dim, pitch=dim + 3)
    assert_close(apart, wanted)


# ---- the diagonal ----
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 8), (3, 3, 12), (6, 1, 16)])
@pytest.mark.parametrize("steps", [1, 3])
def test_diagonal_keys_are_merged_into_the_others_and_back(heads, kv_heads, dim, steps):
    """`own`: keys and values (steps, R, KV) that one row alone sees, beside `shared` ones that all rows see."""
    shape, R, C, scale = Shape(1, heads, kv_heads, dim, 1, 1, 1, EPS, 1e4, 1), 5, 6, dim ** -0.5
    q = normal(R, heads * dim, grad=True)
    q_own = q.detach().clone().requires_grad_()  # apart, so that its gradient is that of the own keys alone
    shared, own, d_out = normal(2, C, kv_heads, dim), normal(steps, R, 2 * shape.key_columns, grad=True), normal(R, heads * dim)
    group = heads // kv_heads
    key, value = (part.repeat_interleave(group, 1) for part in shared)  # (C, heads, D)
    own_key, own_value = (part.view(steps, R, kv_heads, dim).repeat_interleave(group, 2) for part in own.chunk(2, -1))
    scores = torch.einsum("rhd,chd->rhc", q.view(R, heads, dim), key) * scale
    own_scores = torch.einsum("rhd,srhd->rhs", q_own.view(R, heads, dim), own_key) * scale
    both = torch.cat([scores, own_scores], -1)
    weights = both.softmax(-1)
    wanted = torch.einsum("rhc,chd->rhd", weights[..., :C], value) + torch.einsum("rhs,srhd->rhd", weights[..., C:], own_value)
    wanted = wanted.flatten(1)
    out = torch.einsum("rhc,chd->rhd", scores.softmax(-1), value).flatten(1).detach().clone()
    lse = scores.logsumexp(-1).t().detach().contiguous()  # (heads, R)
    kernels.merge_diagonal(q.detach(), own.detach(), out, lse, shape)
    assert_close(out, wanted.detach())
    assert_close(lse, both.logsumexp(-1).t().detach())

    dq_own, d_own = torch.autograd.grad(wanted, (q_own, own), d_out)
    dq, d_found = normal(R, heads * dim), normal(steps, R, 2 * shape.key_columns)
    before = dq.clone(), d_found.clone()
    kernels.merge_diagonal_backward(d_out, q.detach(), own.detach(), out, lse, dq, d_found, shape)
    assert_close(dq, before[0] + dq_own)
    assert_close(d_found, before[1] + d_own)


# ---- loss and optimizer ----
def test_target_probabilities():
    logits, mass = normal(5, 4100) * 3, torch.rand(5, device=DEVICE)
    out = torch.empty_like(logits)
    kernels.target_probabilities(logits, mass, out)
    assert_close(out, logits.softmax(-1) * mass[:, None])


@pytest.mark.parametrize("kind", ttt.LOSSES)
def test_soft_cross_entropy(kind):
    logits, weight = (normal(6, 4100) * 3).requires_grad_(), torch.rand(6, device=DEVICE)
    target = (normal(6, 4100) * 3).softmax(-1) * torch.rand(6, 1, device=DEVICE)
    losses = ttt.row_loss(logits, target, kind)
    loss, best, grad = kernels.soft_cross_entropy(logits.detach(), target, weight, kind)
    assert_close(loss, losses.detach())
    assert torch.equal(best, logits.argmax(-1))
    assert_close(grad, torch.autograd.grad((losses * weight).sum(), logits)[0])


def test_adamw():
    grads, clip = normal(5000), torch.tensor(0.5, device=DEVICE)
    ours = [normal(5000), normal(5000), normal(5000) * 0.1, torch.rand(5000, device=DEVICE) * 0.01]
    plain = [tensor.double() for tensor in ours]  # the plain form is taken for float64, also on a GPU
    kernels.adamw_(*ours[:2], grads, *ours[2:], clip, 1e-2, (0.9, 0.95), optimizers.EPSILON, 0.1, (1 - 0.9 ** 3, 1 - 0.95 ** 3))
    optimizers.adamw_(*plain[:2], grads, *plain[2:], clip, 1e-2, 3, (0.9, 0.95), 0.1)
    for found, wanted in zip(ours, plain):
        assert_close(found, wanted.float())


def test_muons_momentum_scale_and_step():
    momentum, gradient, clip = normal(70, 90), normal(70, 90), torch.tensor(0.5, device=DEVICE)
    kept = momentum.clone()
    out = kernels.nesterov_(momentum, gradient, clip, 0.95)
    moved = 0.95 * kept + 0.05 * gradient * clip
    assert_close(momentum, moved)
    assert_close(out, 0.05 * gradient * clip + 0.95 * moved)

    scale = torch.tensor([[0.37]], device=DEVICE)
    assert_close(kernels.scaled(gradient, scale, gradient.dtype), gradient * 0.37)
    assert_close(kernels.scaled(gradient, scale, torch.float16).float(), gradient * 0.37, 1e-3)

    wide, weight, update = normal(6, 50), normal(6, 30), normal(6, 40)  # rows of each lie apart
    master, before, update = wide[:, :30], wide.clone(), update[:, :30]
    kernels.apply_(master, weight, update, 0.1, 0.99)
    assert_close(wide[:, :30], before[:, :30] * 0.99 - update * 0.1)
    assert torch.equal(weight, wide[:, :30]) and torch.equal(wide[:, 30:], before[:, 30:])


# ---- the whole pass ----
def flash_forward(q, kv, rows, shape):
    """Plain stand-in for the flash kernel, which a CPU has only in other layouts."""
    out, lse = [], []
    for q0, q1, k0, k1 in zip(rows.cu_q.tolist(), rows.cu_q.tolist()[1:], rows.cu_k.tolist(), rows.cu_k.tolist()[1:]):
        key, value, query, unseen = parts(q[q0:q1], kv[k0:k1], shape)
        scores = (torch.einsum("qhd,khd->hqk", query, key) * shape.softmax_scale).masked_fill(unseen, -math.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1))
        lse.append(scores.logsumexp(-1))
    return torch.cat(out), torch.cat(lse, 1), None


def flash_backward(d_out, q, kv, out, lse, state, rows, shape):
    """Its gradients from the final `out` and `lse`, which may be those of attention to more keys."""
    dq, d_kv, keys = torch.zeros_like(q), torch.zeros_like(kv), shape.key_columns
    for q0, q1, k0, k1 in zip(rows.cu_q.tolist(), rows.cu_q.tolist()[1:], rows.cu_k.tolist(), rows.cu_k.tolist()[1:]):
        key, value, query, unseen = parts(q[q0:q1], kv[k0:k1], shape)
        d, o = (x[q0:q1].view(q1 - q0, shape.heads, -1) for x in (d_out, out))
        scores = (torch.einsum("qhd,khd->hqk", query, key) * shape.softmax_scale).masked_fill(unseen, -math.inf)
        weights = (scores - lse[:, q0:q1, None]).exp()
        delta = (d * o).sum(-1).t()[..., None]  # (heads, q, 1)
        d_scores = weights * (torch.einsum("qhd,khd->hqk", d, value) - delta) * shape.softmax_scale
        dq[q0:q1] = torch.einsum("hqk,khd->qhd", d_scores, key).flatten(1)
        for part, grad in ((slice(keys), torch.einsum("hqk,qhd->khd", d_scores, query)),
                           (slice(keys, None), torch.einsum("hqk,qhd->khd", weights, d))):
            d_kv[k0:k1, part] += grad.view(k1 - k0, shape.kv_heads, -1, shape.head_dim).sum(2).flatten(1)
    return dq, d_kv[:, :keys], d_kv[:, keys:]


def parts(q, kv, shape):
    """One sample's keys and values (k, heads, D) and queries (q, heads, D), and what those must not see (q, k)."""
    key, value = (x.view(len(kv), shape.kv_heads, -1).repeat_interleave(shape.heads // shape.kv_heads, 1)
                  for x in kv.chunk(2, -1))
    unseen = torch.ones(len(q), len(kv), dtype=torch.bool, device=q.device).triu(len(kv) - len(q) + 1)
    return key, value, q.view(len(q), shape.heads, -1), unseen


def random_batch(shape, lengths, prompts, steps):
    sizes = [Sample("", Path(), n, p, None).rows(steps) for n, p in zip(lengths, prompts)]
    C, R = (sum(size[i] for size in sizes) for i in (1, 2))
    rng = np.random.default_rng(0)
    mask = np.concatenate([np.arange(first, context) + 2 >= p for (first, context, _), p in zip(sizes, prompts)])
    columns = {"next_ids": rng.integers(shape.vocab, size=C), "labels": rng.integers(shape.vocab, size=R), "mask": mask,
               "length": np.repeat(lengths, [context for _, context, _ in sizes]),
               "mass": (mask * rng.uniform(0.5, 1, R)).astype(np.float32)}
    batch = batch_of(sizes, torch.randn(C, shape.aux_states * shape.hidden), torch.randn(R, shape.hidden), columns, sum(lengths))
    return batch.to(DEVICE, torch.float32)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0}
KINDS = {"EAGLE-3": {}, "two layers": {"layers": 2}, "EAGLE-3.1": {"aux_norm": "each", "norm_output": True},
         "norm before fc, five states": {"aux_norm": "all", "aux_states": 5},
         "MLA of EAGLE-3.1, YaRN": {"latent": Latent(20, 12, 6, 4, 7), "aux_norm": "each", "norm_output": True, "rope_scaling": YARN}}


@pytest.mark.parametrize("kind, loss", [*((kind, "ce") for kind in KINDS), ("EAGLE-3", "lk")])
def test_the_fused_pass_is_the_plain_one(kind, loss, monkeypatch):
    """Losses, right drafts and every gradient; flash attention alone is stood in for."""
    monkeypatch.setattr(fused, "flash_forward", flash_forward)
    monkeypatch.setattr(fused, "flash_backward", flash_backward)
    kv_heads, head_dim = (4, 10) if "latent" in KINDS[kind] else (2, 8)
    shape = Shape(32, 4, kv_heads, head_dim, 48, 97, 61, EPS, 5e4, 4096, **KINDS[kind])
    batch = random_batch(shape, [13, 5, 8, 3], [8, 2, 4, 1], steps=3)
    draft = Drafter(shape, torch.float32, DEVICE, torch.randn(97, 32) * 0.3, torch.randn(61, 32) * 0.3, torch.arange(61) + 20, 256)
    draft.initialise(0)
    for view in draft.master.views.values():
        if view.dim() == 1:
            view.add_(normal(*view.shape) * 0.2)
    draft.refresh()
    found = []
    short_of_memory = [(fused, True)] if (kind, loss) == ("EAGLE-3", "ce") else []
    for engine, spare in [(fused, False), (ttt, False), *short_of_memory]:
        monkeypatch.setattr(fused, "spares", lambda *_: spare)
        grads = optimizers.Gradients(shape.weights(), torch.float32, DEVICE)
        grads.begin(first=True, last=True)
        sums, right = engine.ttt_pass(draft, batch, [1.0, 0.7, 0.3], grads, loss)
        grads.wait()
        engine.finish(grads, draft)
        found.append((sums, right, grads.views))
    assert_close(found[0][0], found[1][0], 3e-6)
    assert torch.equal(found[0][1], found[1][1])
    for name, wanted in found[1][2].items():
        assert wanted.norm() > 0, name
        assert_close(found[0][2][name], wanted, 2e-5)
        assert all(torch.equal(again[2][name], found[0][2][name]) for again in found[2:])
