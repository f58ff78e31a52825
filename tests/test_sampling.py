"""Sampled serving: what is expected of it against every way in which it can go. On states: test_evaluate.py."""
import itertools

import numpy as np
import pytest
import torch

from eagle3.acceptance import probabilities
from eagle3.sampling import Sampling, expectation, expected_length, misfit, reach

V, END, LONGEST, STEPS = 4, 0, 6, 3  # tokens, the one that ends an answer, tokens of an answer, drafts in a row
PROMPT = (1, 2)
RNG = np.random.default_rng(1)
LOGITS = RNG.normal(0, 1.5, (V, V, V))  # of a target that looks at two tokens
DRAFTS = RNG.integers(0, V, (V, V))  # of a drafter that does, too
for one, other in itertools.product(range(V), range(V)):
    if RNG.random() < 0.8:
        DRAFTS[one, other] = LOGITS[one, other].argmax()


def target(tokens, temperature) -> np.ndarray:
    weights = np.exp(LOGITS[tokens[-2], tokens[-1]] / temperature)
    return weights / weights.sum()


def served(tokens: tuple, temperature: float) -> np.ndarray:
    """Expected (verify steps, accepted drafts that are in the answer) from `tokens` on: every coin and draw of the kernel, in turn."""
    answer = tokens[len(PROMPT):]
    if answer and (answer[-1] == END or len(answer) == LONGEST):
        return np.zeros(2)
    if not answer:  # the prefill's own token
        return sum(p * served((*tokens, token), temperature) for token, p in enumerate(target(tokens, temperature)))
    drafts = []
    for _ in range(STEPS):
        drafts.append(int(DRAFTS[(*tokens, *drafts)[-2], (*tokens, *drafts)[-1]]))
    found, chance, emitted = np.array([1.0, 0.0]), 1.0, tokens
    for draft in [*drafts, None]:
        p = target(emitted, temperature)
        left = p.copy()
        if draft is not None:
            left[draft] = 0
        for token in range(V):  # refused, or none is left: another token is drawn
            if left[token]:
                found += chance * left[token] * served((*emitted, token), temperature)
        if draft is None:
            break
        chance, emitted = chance * p[draft], (*emitted, draft)
        found += [0, chance]
        if draft == END or len(emitted) - len(PROMPT) == LONGEST:
            break  # the answer ends in it; what follows is behind its end
    return found


def answers(temperature: float):
    """(tokens with the prompt, probability) of every answer."""
    open_ones = [(PROMPT, 1.0)]
    while open_ones:
        tokens, chance = open_ones.pop()
        for token, p in enumerate(target(tokens, temperature)):
            grown = (*tokens, token)
            if token == END or len(grown) - len(PROMPT) == LONGEST:
                yield grown, chance * p
            else:
                open_ones.append((grown, chance * p))


def expected(at: float, drawn_at: float) -> np.ndarray:
    """The mean of `reach` over all answers that are drawn at one temperature, for serving at another."""
    total = 0
    for tokens, chance in answers(drawn_at):
        rows = len(tokens) - 2
        right, accept = np.zeros((STEPS, rows), bool), np.zeros((STEPS, rows))
        for k, p in itertools.product(range(STEPS), range(rows)):
            if p + 2 + k < len(tokens):  # the drafter is fed the answer's own tokens
                draft, prefix = DRAFTS[tokens[p + k], tokens[p + k + 1]], tokens[:p + 2 + k]
                right[k, p], accept[k, p] = draft == tokens[p + 2 + k], target(prefix, at)[draft]
        total = total + chance * reach(right, accept, len(PROMPT), len(tokens), 0)
    return total


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_the_expectation_is_that_over_every_way_in_which_serving_can_go(temperature):
    steps, accepted = served(PROMPT, temperature)
    sums = expected(temperature, temperature)
    assert sums[0] == pytest.approx(steps, rel=1e-12)
    assert expected_length(sums) == pytest.approx(1 + accepted / steps, rel=1e-12) and 1.1 < expected_length(sums) < 3.5


def test_answers_that_were_drawn_otherwise_are_found_out():
    entry = expectation(Sampling(1.0), {"a": (1e4 * expected(1.0, 0.3)).tolist()})
    assert not entry["text_fits"] and entry["text_share"] > entry["text_expected"] and "colder" in misfit(entry)
    own = expectation(Sampling(1.0), {"a": (1e4 * expected(1.0, 1.0)).tolist()})
    assert own["text_fits"] and misfit(own) == "" and own["text_share"] == pytest.approx(own["text_expected"])
    assert "hotter" in misfit(expectation(Sampling(0.3), {"a": (1e4 * expected(0.3, 1.0)).tolist()}))


def test_reach_by_hand():
    """A response of x4 ... x9, two drafts. Step behind x4: both right, then behind x7 (emitted by it): the first wrong; behind x8: x9 is the
    last, right, and nothing is left for the second draft."""
    right, accept = np.zeros((2, 10), bool), np.full((2, 10), 0.5)
    right[0, 3] = right[1, 3] = right[0, 7] = True
    accept[:, 3], accept[0, 6], accept[0, 7] = [0.9, 0.8], 0.1, 0.7
    sums = reach(right, accept, 4, 10, 0)
    assert sums.tolist() == pytest.approx([3, 2, 1, 0.9 + 0.1 + 0.7, 0.8 + 0])
    assert expected_length(sums) == pytest.approx(1 + 1.7 / 3 + 1.7 / 3 * 0.8 / 2)
    assert reach(right, accept, 4, 5, 0).tolist() == [0] * 5  # one token: no verify step
    assert expected_length(np.zeros(5)) == 1


def test_top_p_keeps_what_sglang_keeps():
    """0.5 + 0.3 reach 0.7, the third token is not needed; two that are as likely as the last stay both."""
    logits, tokens = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.3, 0.3]]).log(), torch.tensor([[0, 1, 2]] * 2)
    assert probabilities(logits, tokens, Sampling(1.0, 0.7)).tolist() == [pytest.approx([0.625, 0.375, 0]), pytest.approx([0.4, 0.3, 0.3])]
    assert probabilities(logits, tokens, Sampling(1.0, 0.05)).tolist() == [[1, 0, 0]] * 2  # never none
    squared = np.array([0.5, 0.3, 0.2]) ** 2
    assert probabilities(logits[:1], tokens[:1], Sampling(0.5)).tolist() == [pytest.approx((squared / squared.sum()).tolist())]
