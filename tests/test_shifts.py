"""Proof 3: which token, hidden state, position, keys and target each TTT step uses, written out by hand for prompt 5 + answer 3.

The numbers are chosen so that they can be read off what 04_train feeds into its operations: a token's embedding, a position's aux state and a position's
final state are one-hot; attention and MLP are switched off but for a counter, so that a hidden state says which position it is of and how many passes it has seen.
"""
import numpy as np
import torch

from train_reference import write_hidden_states
from eagle3.acceptance import walk
from eagle3.batches import Sample, collate
from eagle3.drafter import Drafter, Shape
from eagle3.states import sample_path
from eagle3 import ttt
from eagle3.ttt import ttt_pass

TOKENS = [10, 11, 12, 13, 14, 15, 16, 17]  # x0..x4 prompt, x5 x6 x7 answer
P, T, STEPS = 5, 8, 3
H = D = 32  # one head as wide as the hidden state
COUNTER = 31

# (TTT step k, position p): token fed, passes that its hidden state has seen, RoPE position, row of last_hidden_states that is the target,
# token predicted, in the loss?  A row that predicts a prompt token has no target.
# Row p of step k: x[p+1+k], h'_(k-1)[p], p + k, last_hidden[p+1+k], x[p+2+k]; x5 is the first response token, nothing follows x7.
BY_HAND = {
    (0, 1): ("x2", 0, 1, None, "x3", False),
    (0, 2): ("x3", 0, 2, None, "x4", False),
    (0, 3): ("x4", 0, 3, "last4", "x5", True),
    (0, 4): ("x5", 0, 4, "last5", "x6", True),
    (0, 5): ("x6", 0, 5, "last6", "x7", True),
    (1, 1): ("x3", 1, 2, None, "x4", False),
    (1, 2): ("x4", 1, 3, "last4", "x5", True),
    (1, 3): ("x5", 1, 4, "last5", "x6", True),
    (1, 4): ("x6", 1, 5, "last6", "x7", True),
    (2, 1): ("x4", 2, 3, "last4", "x5", True),
    (2, 2): ("x5", 2, 4, "last5", "x6", True),
    (2, 3): ("x6", 2, 5, "last6", "x7", True),
}
# Left out, since nothing in the loss depends on them: position 0 as a query, position 6 (it would predict past the end), and the rest of steps 1 and 2.
QUERIES = [1, 2, 3, 4, 5]
# Step-0 keys: positions 0..p. Position p's key is made of x[p+1] and aux[p].
STEP_0_KEYS = {0: "x1", 1: "x2", 2: "x3", 3: "x4", 4: "x5", 5: "x6"}


def one_hot(rows, width=H):
    return torch.eye(width)[torch.as_tensor(rows)]


def run_recorded(tmp_path, monkeypatch, wrong_best=False):
    aux = torch.zeros(T, 3 * H)
    aux[:, :H] = one_hot(range(T))
    sample = {"input_ids": torch.tensor(TOKENS, dtype=torch.int32), "loss_mask": (torch.arange(T) >= P).to(torch.uint8),
              "aux_hidden_states": aux, "last_hidden_states": one_hot(range(T))}
    write_hidden_states(tmp_path / "hidden_states", {"a": sample})
    vocab = 40
    embed = torch.zeros(vocab, H)
    embed[TOKENS] = one_hot(range(T))  # token x_i is marked at i
    head = torch.zeros(T, H)
    head[:, :T] = 50 * torch.eye(T)  # the target's distribution after position i: all on draft token i
    draft_ids = torch.tensor(TOKENS)
    shape = Shape(H, 1, 1, D, 4, vocab, T, 1e-12, 1e4, 64)
    draft = Drafter(shape, torch.float32, torch.device("cpu"), embed, head, draft_ids, 64)
    w = draft.master
    for name in ("input_norm", "hidden_norm", "post_norm", "norm"):
        w[name].fill_(1)
    w["fc"][:, :H] = torch.eye(H)
    for name in ("q", "kv"):  # q and k: the token in the first half, the hidden state in the second
        w[f"{name}_embed"][:D // 2, :D // 2] = torch.eye(D // 2)
        w[f"{name}_hidden"][D // 2:D, :T] = torch.eye(D)[:D // 2, :T]
        w[f"{name}_hidden"][D - 1, COUNTER] = 1
    w["gate_up"][0, :T] = w["gate_up"][4, :T] = 10  # silu(gate) * up > 0 wherever the state is that of a position ...
    w["down"][COUNTER, 0] = 0.01  # ... counts the passes through the layer

    seen = {"q": [], "keys": [], "own": [], "target": [], "weight": []}
    rope, attention, unseen, loss, add = ttt.rope, ttt.attention, ttt.unseen_keys, ttt.row_loss, ttt.Tally.add

    def spy_rope(x, positions, table, head_dim):
        seen["q"].append((x.clone(), positions.clone()))
        return rope(x, positions, table, head_dim)

    def spy_attention(q, cache, spans, shape):
        seen["own"].append(len(cache) - 1)
        return attention(q, cache, spans, shape)

    def spy_unseen(*sizes):
        seen["keys"].append(~unseen(*sizes))
        return unseen(*sizes)

    def spy_loss(logits, target, kind):
        seen["target"].append(target.clone())
        return loss(logits, target, kind)

    def spy_add(tally, k, losses, best):
        seen["weight"].append(tally.counts(k).float())
        best = (seen["target"][-1].argmax(-1) + (0 if wrong_best else 1)) % T  # "drafts" the token after the target row: the right one
        add(tally, k, losses, best)

    for owner, name, spy in ((ttt, "rope", spy_rope), (ttt, "attention", spy_attention), (ttt, "unseen_keys", spy_unseen),
                             (ttt, "row_loss", spy_loss), (ttt.Tally, "add", spy_add)):
        monkeypatch.setattr(owner, name, spy)
    packed = Sample("a", sample_path(tmp_path / "hidden_states", "a"), T, P, np.ones(T - P, np.float32))
    sums, right = ttt_pass(draft, collate([packed], STEPS, H), [1.0] * STEPS)
    return packed, seen, sums, right


def test_each_step_is_fed_what_stands_in_the_table(tmp_path, monkeypatch):
    packed, seen, sums, right = run_recorded(tmp_path, monkeypatch)
    first, context, queries = packed.rows(STEPS)
    assert list(range(first, first + queries)) == QUERIES and list(range(context)) == list(STEP_0_KEYS)

    (keys, key_positions), *calls = seen["q"]  # rotated in this order: step-0 keys; then per step its queries, and from step 1 on its own keys
    assert key_positions.tolist() == list(STEP_0_KEYS)
    for p, token in STEP_0_KEYS.items():
        assert f"x{keys[p, :D // 2].argmax()}" == token and keys[p, D // 2:D - 1].argmax() == p
    fed = {0: [calls[0]], 1: calls[1:3], 2: calls[3:5]}
    found, counters = {}, {}
    for k in range(STEPS):
        for q, positions in fed[k]:  # queries and own keys are made of the same token, hidden state and position
            for row, p in enumerate(QUERIES):
                if (k, p) in BY_HAND:
                    assert q[row, D // 2:D - 1].argmax() == p  # the hidden state is position p's
                    counters[k, p] = float(q[row, D - 1])
                    found.setdefault((k, p), []).append((f"x{q[row, :D // 2].argmax()}", int(positions[row])))
        for row, p in enumerate(QUERIES):
            if (k, p) in BY_HAND:
                token, passes, position, last, predicted, in_loss = BY_HAND[k, p]
                assert set(found[k, p]) == {(token, position)}, (k, p)
                assert bool(seen["weight"][k][row] > 0) == in_loss == (last is not None) == (predicted in ("x5", "x6", "x7")), (k, p)
                if in_loss:
                    assert f"last{seen['target'][k][row].argmax()}" == last, (k, p)
                    assert bool(right[k, row]) and f"x{(seen['target'][k][row].argmax() + 1) % T}" == predicted, (k, p)  # and x[p+2+k] is that token
                assert (counters[k, p] > (counters[k - 1, p] if k else -1)) and (passes == 0) == (counters[k, p] == 0), (k, p)
            else:
                assert seen["weight"][k][row] == 0, (k, p)
    for k, (visible, own) in enumerate(zip(seen["keys"], seen["own"], strict=True)):
        assert own == k  # this position's own keys of steps 1..k
        assert [int(row.sum()) for row in visible] == [p + 1 for p in QUERIES] and all(row[:p + 1].all() for row, p in zip(visible, QUERIES))
    assert sums[:, 1].tolist() == [3, 2, 1]  # rows of which steps 0..k all count: (0,3) (0,4) (0,5); (1,3) (1,4); (2,3)
    assert sums[:, 2].tolist() == [3, 2, 1]


def test_the_table_can_fail(tmp_path, monkeypatch):
    """A draft of the target row's own token, one too early, is right nowhere."""
    _, _, sums, right = run_recorded(tmp_path, monkeypatch, wrong_best=True)
    assert not right[0].any() and sums[:, 2].tolist() == [0, 0, 0]


def test_walk_by_hand():
    """Response tokens 4..11 of a sample of 12. The target itself emits x4; drafts start at position 3."""
    right = np.zeros((3, 12), bool)
    right[0, 3] = right[1, 3] = True  # drafts x5 x6, not x7 -> emits x5 x6 x7
    right[1, 6] = True                # draft 0 wrong: what comes after it does not count -> emits x8
    right[:, 7] = True                # x9 x10 x11: all three, and that is the end; a fourth token would be past it
    assert walk(right, 4, 12, 3, 0) == [2, 0, 3]
    assert walk(right, 4, 12, 1, 0) == [1, 0, 0, 1, 0]  # one draft step; x4 | x5 x6 | x7 | x8 | x9 x10 | x11
    right[:] = True
    assert walk(right, 4, 12, 3, 0) == [3, 3]  # x4 | x5-x8 | x9-x11: drafts past the end are not counted
    assert walk(right, 4, 5, 3, 0) == []  # one token: no verify step
    assert walk(right[:, 3:], 4, 12, 3, 3) == [3, 3]  # rows that begin at position 3
