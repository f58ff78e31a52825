"""Muon against its definition and torch's own; AdamW for what is no matrix; the same on one rank and on several; the wait between ranks."""
import time

import numpy as np
import pytest
import torch

from eagle3.drafter import Drafter, Shape
from eagle3.mla import Latent
from eagle3.optimizers import AdamW, Gradients, Muon, muon_matrices, orthogonal_factor, shared_out, symmetric_product

SHAPE = Shape(32, 4, 2, 8, 48, 97, 61, 1e-5, 5e4, 256)
BETAS = (0.9, 0.95)


def drafter(shape=SHAPE, dtype=torch.float64):
    torch.manual_seed(0)
    draft = Drafter(shape, dtype, torch.device("cpu"), torch.randn(97, 32), torch.randn(61, 32), torch.arange(61), 64)
    draft.initialise(0)
    return draft


def gradients(draft, seed=1):
    torch.manual_seed(seed)
    grads = Gradients(draft.shape.weights(), draft.dtype, "cpu")
    grads.flat.copy_(torch.randn(grads.flat.shape))
    return grads


def singular(least: float, m=40, n=100, seed=0):
    """A matrix with known factors and singular values from `least` to 1, evenly in their logarithm."""
    torch.manual_seed(seed)
    u, v = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64))[0], torch.linalg.qr(torch.randn(n, m, dtype=torch.float64))[0]
    return (u * torch.from_numpy(np.geomspace(least, 1, m))) @ v.t(), u @ v.t()


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_orthogonal_factor_is_near_the_svds(tall, scale):
    matrix, factor = singular(0.03)
    matrix, factor = (matrix.t(), factor.t()) if tall else (matrix, factor)
    found = orthogonal_factor(matrix * scale)
    values = torch.linalg.svdvals(found)
    assert 0.73 <= values.min() and values.max() <= 1.27
    assert (found * factor).sum() / found.norm() / factor.norm() > 0.98
    assert torch.allclose(found @ found.t() if not tall else found.t() @ found,
                          (found @ found.t() if not tall else found.t() @ found).t())


@pytest.mark.parametrize("least, less", [(0.1, 0.0), (0.03, 0.0), (3e-3, 0.06)])
def test_three_iterations_do_nearly_what_torchs_five_do(least, less):
    from torch.optim._muon import _zeropower_via_newtonschulz
    matrix, factor = singular(least)
    theirs = _zeropower_via_newtonschulz(matrix.float(), (3.4445, -4.7750, 2.0315), 5, 1e-7).double()
    near = [(found * factor).sum() / found.norm() / factor.norm() for found in (orthogonal_factor(matrix), theirs)]
    assert near[0] > near[1] - less - 0.01


def test_a_gradient_of_zeros_moves_nothing():
    assert torch.equal(orthogonal_factor(torch.zeros(5, 9)), torch.zeros(5, 9))


def test_muon_turns_the_matrices_as_sglang_has_them():
    draft = drafter()
    exported = draft.export(draft.master, torch.float64)
    found = muon_matrices(draft.shape, draft.master.views)
    names = {"q.0": "midlayer.self_attn.q_proj", "k.0": "midlayer.self_attn.k_proj", "v.0": "midlayer.self_attn.v_proj",
             "o.0": "midlayer.self_attn.o_proj", "gate.0": "midlayer.mlp.gate_proj", "up.0": "midlayer.mlp.up_proj",
             "down.0": "midlayer.mlp.down_proj", "fc": "fc"}
    assert set(found) == set(names)
    for ours, theirs in names.items():
        assert torch.equal(torch.cat(found[ours].views, 1), exported[f"{theirs}.weight"])


def test_muon_turns_the_matrices_of_latent_attention_by_their_heads():
    draft = drafter(Shape(32, 4, 4, 10, 48, 97, 61, 1e-5, 5e4, 256, latent=Latent(20, 12, 6, 4, 7)))
    exported = draft.export(draft.master, torch.float64)
    found = {name: (torch.cat(matrix.views, 1), matrix.heads) for name, matrix in muon_matrices(draft.shape, draft.master.views).items()}
    attn = {name.split(".")[2]: tensor for name, tensor in exported.items() if "self_attn" in name}
    kv_b = attn["kv_b_proj"].view(4, 13, 12)  # in each head: 6 rows of the key, 7 of the value
    kv_a = attn["kv_a_proj_with_mqa"]
    q_b = attn["q_b_proj"].view(4, 10, 20)  # the last 4 of each head in pairs
    wanted = {"q_a.0": (attn["q_a_proj"], 1), "kv_a.0": (kv_a[:12], 1), "k_rope.0": (kv_a[[12, 14, 13, 15]], 1),
              "q_b.0": (q_b[:, [0, 1, 2, 3, 4, 5, 6, 8, 7, 9]].flatten(0, 1), 4), "k_b.0": (kv_b[:, :6].flatten(0, 1), 4),
              "v_b.0": (kv_b[:, 6:].flatten(0, 1), 4), "o.0": (attn["o_proj"], 4)}
    assert set(found) - set(wanted) == {"fc", "gate.0", "up.0", "down.0"}
    for name, (matrix, heads) in wanted.items():
        assert torch.equal(found[name][0], matrix) and found[name][1] == heads, name
    Muon(draft, BETAS, 0.1).update(gradients(draft), torch.tensor(1.0, dtype=torch.float64), 1e-2, 1)
    assert torch.isfinite(draft.master.flat).all()


def test_one_step_by_its_definition():
    """Momentum from zero, Nesterov, orthogonal factor, 0.2 sqrt(max), decay; lm_head and norms as AdamW alone moves them."""
    draft, other = drafter(), drafter()
    before = {name: view.clone() for name, view in draft.master.views.items()}
    muon, grads, clip = Muon(draft, BETAS, 0.1), gradients(draft), torch.tensor(0.5, dtype=torch.float64)
    muon.update(grads, clip, 1e-2, 1)
    AdamW(other, BETAS, 0.1).update(gradients(other), clip, 1e-2, 1)
    for name in ("lm_head", "input_norm", "norm"):
        torch.testing.assert_close(draft.master[name], other.master[name], rtol=1e-12, atol=0)
    def nesterov(gradient):  # the momentum before was 0
        return 0.05 * gradient + 0.95 * 0.05 * gradient

    wanted = before["down"] * (1 - 1e-3) - 1e-2 * 0.2 * 48 ** 0.5 * orthogonal_factor(nesterov(grads["down"] * 0.5))
    torch.testing.assert_close(draft.master["down"], wanted, rtol=1e-10, atol=1e-12)
    heads = [orthogonal_factor(head) for head in nesterov(grads["o"] * 0.5).split(8, 1)]  # of 8 columns each
    wanted = before["o"] * (1 - 1e-3) - 1e-2 * 0.2 * 32 ** 0.5 * torch.cat(heads, 1)
    torch.testing.assert_close(draft.master["o"], wanted, rtol=1e-10, atol=1e-12)
    both = nesterov(torch.cat([grads["q_embed"], grads["q_hidden"]], 1) * 0.5)
    turned = torch.cat([orthogonal_factor(head) for head in both.split(8)])[:, 32:]  # the hidden half
    wanted = before["q_hidden"] * (1 - 1e-3) - 1e-2 * 0.2 * 64 ** 0.5 * turned
    torch.testing.assert_close(draft.master["q_hidden"], wanted, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(draft.master["gate_up"], other.master["gate_up"])


def test_rest_state_is_smaller_and_all_of_it_is_saved():
    draft = drafter()
    muon = Muon(draft, BETAS, 0.0)
    sizes = {name: tensor.numel() for name, tensor in muon.state().items()}
    rest = draft.master["lm_head"].numel() + sum(view.numel() for view in draft.master.views.values() if view.dim() == 1)
    assert sizes == {"momentum": draft.master.flat.numel() - rest, "first": rest, "second": rest}


def test_ranks_share_the_matrices():
    shape = Shape(7168, 64, 8, 128, 18432, 163840, 32000, 1e-5, 5e4, 4096)
    sizes = {name: torch.empty(size, device="meta") for name, size in shape.weights().items()}
    owner = shared_out(muon_matrices(shape, sizes), 4)
    assert set(owner.values()) == {0, 1, 2, 3} and len(owner) == 8
    assert len({owner[name] for name in ("fc", "gate.0", "up.0", "down.0")}) == 4


def test_symmetric_product_of_blocks(monkeypatch):
    import eagle3.optimizers as optimizers
    a = torch.randn(100, 30, dtype=torch.float64)
    monkeypatch.setattr(optimizers, "LARGE", 16)
    torch.testing.assert_close(symmetric_product(a, a.t()), a @ a.t(), rtol=1e-12, atol=1e-12)


# ---- what a rank waited for the others ----
def one_rank(rank: int, store: str, late: float, answers) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    grads = Gradients({"a": (4, 4), "b": (3,)}, torch.float32, "cpu")
    for step in range(2):  # two steps, then one more after it was asked
        grads.begin(first=True, last=True)
        time.sleep(late * rank)
        for name in ("a", "b"):
            grads.add_tensor(name, torch.full(grads[name].shape, rank + 1.0))
            grads.done(name)
        grads.wait()
    answers.put((rank, grads.waited(), grads.waited(), grads["a"].sum().item()))
    torch.distributed.barrier()


def test_a_rank_says_how_long_it_waited_for_another(tmp_path):
    """Rank 1 is late by half a second in each of two steps: rank 0 waits for a second, rank 1 does not."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    torch.multiprocessing.start_processes(one_rank, (str(tmp_path / "store"), 0.5, answers), nprocs=2, start_method="spawn")
    waits = {rank: (waited, again, total) for rank, waited, again, total in (answers.get(), answers.get())}
    assert 0.6 < waits[0][0] and waits[1][0] < waits[0][0] - 0.5 and waits[0][1] == waits[1][1] == 0
    assert waits[0][2] == waits[1][2] == 16 * 3
