"""The CPU engine without a server: each stand-in kernel against an obvious loop, and its refusals."""
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch

from conftest import ROOT, TINY_KIMI, free_port

SERVE = ROOT / "scripts/cpu_engine/serve.py"
spec = importlib.util.spec_from_file_location("sgl_kernel_stand_in", SERVE.parent / "sgl_kernel/__init__.py")
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)


# ---- attention ----
def attend_one(q, keys, values, scale):
    """One query [H, D] over keys [L, Hk, D] and values [L, Hk, Dv], head by head, in float64."""
    rows = []
    for head in range(q.shape[0]):
        shared = head * keys.shape[1] // q.shape[0]
        weights = torch.softmax(keys[:, shared].double() @ q[head].double() * scale, dim=0)
        rows.append(weights @ values[:, shared].double())
    return torch.stack(rows).float()


def make_cache(lens, Hk, D, Dv, mla, seed=0):
    """A cache whose used slots hold numbers and all others NaN, and the slot table with leftovers behind each request."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(sum(lens) + 20, generator=generator)
    k_buffer = torch.full((len(slots), Hk, D), torch.nan)
    v_buffer = k_buffer[..., :Dv] if mla else torch.full((len(slots), Hk, Dv), torch.nan)
    table = slots[:20].repeat(5, 5)[:, :max(lens) + 8].to(torch.int32)  # leftovers: slots whose rows are NaN
    pool, first = torch.tensor([3, 0, 4, 1])[:len(lens)], 20
    for request, n in zip(pool.tolist(), lens):
        own = slots[first:first + n]
        table[request, :n] = own.to(torch.int32)
        k_buffer[own] = torch.randn(n, Hk, D, generator=generator)
        if not mla:
            v_buffer[own] = torch.randn(n, Hk, Dv, generator=generator)
        first += n
    return k_buffer, v_buffer, table, pool


@pytest.mark.parametrize("mla, Hk, D, Dv", [(True, 1, 24, 16), (False, 2, 8, 8), (False, 4, 8, 4)])
@pytest.mark.parametrize("window", [0, 5])
def test_decode_attention(mla, Hk, D, Dv, window):
    lens, H, scale = [1, 17, 9, 4], 4, 0.3
    k_buffer, v_buffer, table, pool = make_cache(lens, Hk, D, Dv, mla)
    q, k = torch.randn(len(lens), H, D), torch.randn(len(lens), Hk, D)
    v = k[..., :Dv] if mla else torch.randn(len(lens), Hk, Dv)
    out = torch.empty(len(lens), H, Dv)
    loc = torch.stack([table[request, n - 1] for request, n in zip(pool.tolist(), lens)]).long()
    kernels.decode_attention_cpu(q, k_buffer, v_buffer, 1.0, 1.0, out, k, v, loc, None, table, pool, torch.tensor(lens), scale, 0.0, False,
                                 window, None, None)
    for i, (request, n) in enumerate(zip(pool.tolist(), lens)):
        seen = table[request, max(0, n - window) if window else 0:n].long()
        assert torch.equal(k_buffer[loc[i]], k[i]) and torch.equal(v_buffer[loc[i]], v[i])
        assert torch.allclose(out[i], attend_one(q[i], k_buffer[seen], v_buffer[seen], scale), atol=1e-5)


@pytest.mark.parametrize("before, news", [([0, 0, 0], [5, 1, 9]), ([7, 0, 3], [2, 6, 1]), ([7, 1, 3], [4, 4, 4]), ([0, 0], [3, 3])])
@pytest.mark.parametrize("given", [True, False])  # the new keys come as arguments, or are in the cache already
@pytest.mark.parametrize("window", [0, 4])
def test_extend_attention(before, news, given, window):
    lens, H, Hk, D, Dv, scale = [b + n for b, n in zip(before, news)], 4, 2, 8, 6, 0.4
    k_buffer, v_buffer, table, pool = make_cache(lens, Hk, D, Dv, mla=False)
    new_slots = torch.cat([table[request, b:n] for request, b, n in zip(pool.tolist(), before, lens)]).long()
    k, v = k_buffer[new_slots].clone(), v_buffer[new_slots].clone()
    if given:
        k_buffer[new_slots] = v_buffer[new_slots] = torch.nan  # must not be read
    starts = [sum(news[:i]) for i in range(len(news))]
    q, out = torch.randn(sum(news), H, D), torch.full((sum(news), H, Dv), torch.nan)
    kernels.extend_attention_cpu(q, k if given else None, v if given else None, out, k_buffer, v_buffer, 1.0, 1.0, table, pool,
                                 torch.tensor(lens), torch.tensor(news), torch.tensor(starts), max(news), scale, 0.0, False, window, None,
                                 None, None)
    k_buffer[new_slots], v_buffer[new_slots] = k, v
    for request, b, n, start in zip(pool.tolist(), before, news, starts):
        for i in range(n):
            seen = table[request, max(0, b + i + 1 - window) if window else 0:b + i + 1].long()
            assert torch.allclose(out[start + i], attend_one(q[start + i], k_buffer[seen], v_buffer[seen], scale), atol=1e-5)


def test_extend_attention_first_prefill_of_mla_ignores_the_latent_cache():
    k_buffer, _, table, pool = make_cache([3, 5], 1, 12, 8, mla=True)  # latents are 12 wide, the keys given 16
    q, k, v, out = torch.randn(8, 2, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 4), torch.empty(8, 2, 4)
    kernels.extend_attention_cpu(q, k, v, out, k_buffer, k_buffer[..., :8], 1.0, 1.0, table, pool, torch.tensor([3, 5]), torch.tensor([3, 5]),
                                 torch.tensor([0, 3]), 5, 0.2, 0.0, False, 0, None, None, None)
    for start, n in ((0, 3), (3, 5)):
        for i in range(n):
            assert torch.allclose(out[start + i], attend_one(q[start + i], k[start:start + i + 1], v[start:start + i + 1], 0.2), atol=1e-5)


def test_extend_attention_tree_mask():
    before, n, H, D = [4, 2], 3, 2, 8
    lens = [b + n for b in before]
    k_buffer, v_buffer, table, pool = make_cache(lens, H, D, D, mla=False)
    q, out = torch.randn(2 * n, H, D), torch.empty(2 * n, H, D)
    see = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]).bool()  # siblings; a chain
    kernels.extend_attention_cpu(q, None, None, out, k_buffer, v_buffer, 1.0, 1.0, table, pool, torch.tensor(lens), torch.tensor([n, n]),
                                 torch.tensor([0, n]), n, 0.5, 0.0, False, 0, None, None, see.flatten())
    for b, (request, prefix) in enumerate(zip(pool.tolist(), before)):
        for i in range(n):
            at = list(range(prefix)) + [prefix + j for j in range(n) if see[b, i, j]]
            seen = table[request, at].long()
            assert torch.allclose(out[b * n + i], attend_one(q[b * n + i], k_buffer[seen], v_buffer[seen], 0.5), atol=1e-5)


def test_attention_refuses_what_it_does_not_compute():
    nothing = [None] * 5
    with pytest.raises(NotImplementedError):
        kernels.decode_attention_cpu(None, None, None, 1.0, 1.0, *nothing, None, None, None, 1.0, 30.0, False, 0, None, None)
    with pytest.raises(NotImplementedError):
        kernels.decode_attention_cpu(None, None, None, 0.5, 1.0, *nothing, None, None, None, 1.0, 0.0, False, 0, None, None)


# ---- slots ----
def test_slot_kernels():
    table, pool = torch.zeros(4, 12, dtype=torch.int32), torch.tensor([2, 0])
    start, end = torch.tensor([1, 4]), torch.tensor([4, 6])
    kernels.assign_req_to_token_pool_cpu(pool, table, start, end, torch.tensor([11, 12, 13, 14, 15]), 12)
    expected = torch.zeros(4, 12, dtype=torch.int32)
    expected[2, 1:4], expected[0, 4:6] = torch.tensor([11, 12, 13], dtype=torch.int32), torch.tensor([14, 15], dtype=torch.int32)
    assert torch.equal(table, expected)
    out = torch.full((7,), -1)
    kernels.assign_extend_cache_locs_cpu(pool, table, start, end, out, 12)
    assert out.tolist() == [11, 12, 13, 14, 15, -1, -1]

    table = torch.arange(48, dtype=torch.int32).view(4, 12)
    out = torch.empty(2 * 2 * 3, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(pool, table, torch.tensor([3, 5]), out, 12, 2, 3)
    assert out.tolist() == [27, 28, 29, 30, 31, 32, 5, 6, 7, 8, 9, 10]
    drafts = kernels.build_draft_decode_metadata_cpu(table, pool, torch.tensor([3, 5]), 2, 3, 12)
    assert drafts.tolist() == [[24, 25, 26, 27, 28, 29, 0, 0], [24, 25, 26, 30, 31, 32, 0, 0],
                               [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8, 9, 10]]


def test_copy_all_layer_kv_cache_reads_before_it_writes():
    layers = [torch.arange(20.0).view(5, 4), torch.arange(10, dtype=torch.int16).view(5, 2)]
    before = [layer.clone() for layer in layers]
    pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    strides = torch.tensor([layer.stride(0) * layer.element_size() for layer in layers])
    kernels.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([2, 3]), torch.tensor([3, 2]))  # a swap
    for layer, old in zip(layers, before):
        assert torch.equal(layer, old[[0, 1, 3, 2, 4]])


# ---- EAGLE ----
def test_fill_kernels():
    bonus = torch.zeros(2, dtype=torch.int64)
    kernels.fill_bonus_tokens_cpu(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 1], dtype=torch.int32), bonus, 3)
    assert bonus.tolist() == [7, 8]
    out = torch.zeros(4, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.tensor([40, 41, 42, 43]), out)
    assert out.tolist() == [40, 42, 43, 0]


def build_tree(parent_list, selected, seq_lens, topk, depth, n):
    B = len(seq_lens)
    mask, positions = torch.zeros(B * n * n, dtype=torch.bool), torch.empty(B * n, dtype=torch.int64)
    index, child, sibling = torch.full((3, B, n), -1)
    kernels.build_tree_kernel_efficient_cpu(parent_list, selected, torch.tensor(seq_lens), mask, positions, index, child, sibling, topk, depth, n, 1)
    return mask.view(B, n, n), positions.view(B, n), index, child, sibling


def test_build_tree_chain():
    """topk 1, three drafts: candidates 0, 1, 2, each below the one before."""
    mask, positions, index, child, sibling = build_tree(torch.tensor([[-1, 0, 1], [-1, 0, 1]]), torch.tensor([[0, 1, 2]] * 2), [7, 20], 1, 3, 4)
    assert torch.equal(mask, torch.ones(4, 4).tril().bool().expand(2, 4, 4))
    assert positions.tolist() == [[7, 8, 9, 10], [20, 21, 22, 23]]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert child.tolist() == [[1, 2, 3, -1]] * 2 and sibling.tolist() == [[-1] * 4] * 2


def test_build_tree_one_step_has_no_parents():
    mask, positions, _, child, sibling = build_tree(torch.empty(1, 0, dtype=torch.int64), torch.tensor([[0, 1]]), [5], 2, 1, 3)
    assert mask.int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]
    assert positions.tolist() == [[5, 6, 6]] and child.tolist() == [[1, -1, -1]] and sibling.tolist() == [[-1, 2, -1]]


def test_build_tree_branches():
    """topk 2, two steps. Candidates 0, 1 hang below the root; 2, 3 below candidate 0 (parent_list[1]); 4, 5 below candidate 1 (parent_list[2]).
    Chosen: 0, 1, 3, 4, so tokens 1, 2 are children of the root, token 3 of token 1, token 4 of token 2."""
    mask, positions, _, child, sibling = build_tree(torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 3, 4]]), [10], 2, 2, 5)
    assert mask[0].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert positions.tolist() == [[10, 11, 11, 12, 12]]
    assert child.tolist() == [[1, 3, 4, -1, -1]] and sibling.tolist() == [[-1, 2, -1, -1, -1]]


def verify(candidates, child, sibling, target, steps):
    B, n = candidates.shape
    predicts, accept_index, accepted = torch.full((B * n,), -1), torch.full((B, steps + 1), -1), torch.full((B,), -1)
    kernels.verify_tree_greedy_cpu(predicts=predicts, accept_index=accept_index, accept_token_num=accepted, candidates=candidates,
                                   retrive_index=torch.arange(B * n).view(B, n), retrive_next_token=child, retrive_next_sibling=sibling,
                                   target_predict=target)
    return predicts.tolist(), accept_index.tolist(), accepted.tolist()


def test_verify_chain():
    child, sibling = torch.tensor([[1, 2, 3, -1]] * 3), torch.full((3, 4), -1)
    candidates = torch.tensor([[50, 51, 52, 53], [60, 61, 62, 63], [70, 71, 72, 73]])  # the first of each is the last emitted token
    target = torch.tensor([[51, 52, 99, 5], [98, 62, 63, 5], [71, 72, 73, 97]])  # two drafts right, none, all three
    predicts, accept_index, accepted = verify(candidates, child, sibling, target, 3)
    assert accepted == [2, 0, 3]
    assert accept_index == [[0, 1, 2, -1], [4, -1, -1, -1], [8, 9, 10, 11]]
    assert predicts == [51, 52, 99, -1, 98, -1, -1, -1, 71, 72, 73, 97]


def test_verify_tree_takes_the_sibling():
    child, sibling = torch.tensor([[1, 3, 4, -1, -1]]), torch.tensor([[-1, 2, -1, -1, -1]])  # the tree of test_build_tree_branches
    candidates, target = torch.tensor([[9, 20, 21, 30, 31]]), torch.tensor([[21, 0, 31, 0, 77]])
    assert verify(candidates, child, sibling, target, 2) == ([21, -1, 31, -1, 77], [[0, 2, 4]], [2])


# ---- the start script ----
def serve(*flags, **env):
    return subprocess.run([sys.executable, str(SERVE), *map(str, flags)], env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


def refused(result):
    """The one line that a refusal ends in; nothing else may be on stderr."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("cpu_engine: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


# ---- sampled verification ----
CHAIN = [[1, 2, -1], [-1, -1, -1]]  # first child and next sibling of each token: root - 1 - 2
FORK = [[1, -1, -1], [-1, 2, -1]]  # root - 1, 2


def verify_sampled(tree, candidates, p, coins, last_coin, **thresholds):
    """(accepted nodes, emitted tokens, draft_probs) of one request; p (n, V)."""
    child, sibling = (torch.tensor([row]) for row in tree)
    n, accepted, count = len(candidates), torch.full((1, 3), -1, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    predicts, refused = torch.zeros(n, dtype=torch.int32), torch.zeros(1, n, p.shape[1])
    kernels.tree_speculative_sampling_target_only(
        predicts=predicts, accept_index=accepted, accept_token_num=count, candidates=torch.tensor([candidates]), retrive_index=torch.arange(n)[None],
        retrive_next_token=child, retrive_next_sibling=sibling, uniform_samples=torch.tensor([coins]),
        uniform_samples_for_final_sampling=torch.tensor([last_coin]), target_probs=p[None], draft_probs=refused, deterministic=True, **thresholds)
    path = accepted[0, :int(count) + 1].tolist()
    return path, predicts[path].tolist(), refused[0]


def test_sampled_verification_of_a_chain():
    """A coin below the target's own probability accepts; what comes instead of a refused draft is drawn without it."""
    p = torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.5, 0.0, 0.25, 0.25], [0.2, 0.2, 0.2, 0.4]])
    assert verify_sampled(CHAIN, [9, 1, 2], p, [0.59, 0.24, 0.0], 0.75)[:2] == ([0, 1, 2], [1, 2, 3])  # 0.2 + 0.2 + 0.2 <= 0.75
    assert verify_sampled(CHAIN, [9, 1, 2], p, [0.59, 0.25, 0.0], 0.5)[:2] == ([0, 1], [1, 0])  # left: 0.5, 0, 0, 0.25
    path, emitted, refused = verify_sampled(CHAIN, [9, 1, 2], p, [0.6, 0.0, 0.0], 0.25)
    assert (path, emitted) == ([0], [2]) and refused[0].tolist() == pytest.approx([0, 0.6, 0, 0])  # left: 0.1, 0, 0.3; 0.1 <= 0.25 * 0.4
    assert verify_sampled(CHAIN, [9, 3, 2], p, [0.0, 0.0, 0.0], 0.0)[:2] == ([0], [0])  # one without any probability: never
    assert verify_sampled(CHAIN, [9, 1, 2], p, [0.9, 0.9, 0.0], 0.999, threshold_single=0.25)[:2] == ([0, 1, 2], [1, 2, 3])
    assert verify_sampled(CHAIN, [9, 1, 2], p, [0.9, 0.4, 0.0], 0.0, threshold_acc=0.6)[:2] == ([0, 1, 2], [1, 2, 0])
    certain = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 3)  # a greedy request among sampled ones
    assert verify_sampled(CHAIN, [9, 1, 2], certain, [0.999, 0.999, 0.0], 0.999)[:2] == ([0, 1], [1, 1])


@pytest.mark.gpu
def test_sampled_verification_is_that_of_the_compiled_kernel():
    """Of the SGLang that is here: random trees of four drafts (topk 2), probabilities and coins."""
    try:
        from sglang.kernels.ops.speculative.sampling import tree_speculative_sampling_target_only as compiled
    except ImportError:  # before 0.5.23
        compiled = pytest.importorskip("sgl_kernel").tree_speculative_sampling_target_only
    B, n, vocabulary, steps = 256, 5, 64, 2
    torch.manual_seed(0)
    _, _, index, child, sibling = build_tree(torch.tensor([[-1, 0, 1]] * B), torch.tensor([[0, 1, 3, 4]] * B), [10] * B, 2, 2, n)
    probs = torch.randn(B, n, vocabulary).mul_(2).softmax(-1)
    candidates = probs.topk(2, -1).indices[:, [0, 0, 0, 1, 2], [0, 0, 1, 0, 0]]  # children of the root: its two likeliest tokens
    found = []
    for function, device in ((kernels.tree_speculative_sampling_target_only, "cpu"), (compiled, "cuda")):
        torch.manual_seed(1)
        coins, last = torch.rand(B, n), torch.rand(B)
        predicts, count = torch.zeros(B * n, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
        given = [x.to(device) for x in (predicts, torch.full((B, steps + 1), -1, dtype=torch.int32), count, candidates, index, child, sibling, coins, last,
                                        probs.clone(), torch.zeros_like(probs))]
        function(*given, 1.0, 1.0, True)
        predicts, accepted, count = (x.cpu() for x in given[:3])
        found.append([(path := accepted[b, :count[b] + 1].tolist(), predicts[path].tolist()) for b in range(B)])
    assert found[0] == found[1] and {len(path) for path, _ in found[0]} == {1, 2, 3}


@pytest.mark.parametrize("tree", [CHAIN, FORK])
def test_what_is_emitted_first_is_drawn_as_the_target_draws(tree):
    """Over a grid of coins; the second branch is tried where the first is refused."""
    p, count, grid = torch.tensor([[0.15, 0.45, 0.3, 0.1]]).expand(3, 4).contiguous(), torch.zeros(4), [(i + 0.5) / 40 for i in range(40)]
    accepted = 0
    for coin in grid:
        for last in grid:
            path, emitted, _ = verify_sampled(tree, [9, 1, 2], p, [coin, 0.99, 0.99], last)
            count[emitted[0]] += 1 / 1600
            accepted += (len(path) > 1) / 1600
    assert torch.allclose(count, p[0], atol=0.013) and accepted == pytest.approx(0.45 if tree is CHAIN else 0.75, abs=0.013)


def test_the_nucleus_and_the_likeliest():
    p = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.4, 0.3, 0.3, 0.0]])
    assert torch.allclose(kernels.top_p_renorm_prob(p, torch.tensor([0.7, 0.5])), torch.tensor([[0.625, 0, 0.375, 0], [0.4, 0.3, 0.3, 0]]))
    assert torch.allclose(kernels.top_k_renorm_prob(p, torch.tensor([1, 1 << 30], dtype=torch.int32)), torch.tensor([[1.0, 0, 0, 0], [0.4, 0.3, 0.3, 0]]))


def test_refuses_another_sglang_version(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/_version.py").write_text("__version__ = version = '0.5.22'\n")
    line = refused(serve("--model-path", TINY_KIMI, "--port", free_port(), PYTHONPATH=str(tmp_path)))
    assert "SGLang 0.5.22" in line and "0.5.23" in line


def test_refuses_a_model_that_is_not_there(tmp_path):
    assert "no such folder" in refused(serve("--model-path", tmp_path / "nothing"))
    assert "no readable config.json" in refused(serve("--model-path", tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "no architectures" in refused(serve("--model-path", tmp_path))
    shutil.copy(TINY_KIMI / "config.json", tmp_path)
    assert "no *.safetensors" in refused(serve("--model-path", tmp_path))
    shutil.copy(TINY_KIMI / "model.safetensors", tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5_000_000)
    assert "damaged or incomplete" in refused(serve("--model-path", tmp_path))
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "damaged or incomplete" in refused(serve("--model-path", tmp_path))
    assert "--speculative-draft-model-path" in refused(serve("--model-path", TINY_KIMI, "--speculative-draft-model-path", tmp_path / "nothing"))


def test_refuses_bad_flags():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use" in refused(serve("--model-path", TINY_KIMI, "--port", taken.getsockname()[1]))
    assert "--port" in refused(serve("--model-path", TINY_KIMI, "--port", "many"))
    assert "--model-path" in refused(serve())


def test_torchvision_stub_leaves_transformers_alone():
    code = ("import serve; serve.stub_torchvision(); import transformers, torchvision.transforms.functional as f; f.InterpolationMode.BICUBIC;"
            "assert not transformers.utils.is_torchvision_available();"
            f"print(len(transformers.AutoTokenizer.from_pretrained({str(TINY_KIMI)!r})))")
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SERVE.parent)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == json.loads((TINY_KIMI / "config.json").read_text())["text_config"]["vocab_size"]
