"""Sampled serving: what SGLang's verify accepts at a temperature above 0, and what is to be expected of it.

Read in SGLang 0.5.23, for a chain of drafts (topk 1):

- speculative/eagle_worker_v2.py, draft_forward: a draft is the argmax of the drafter, whatever the temperature.
- speculative/eagle_utils.py, eagle_sample: p = softmax(logits / temperature) of the target, cut to top_k, then to
  top_p, and summing to 1 again. min_p has no part in it.
- kernels/jit/include/sgl_kernel/speculative/sampling.cuh, TreeSpeculativeSamplingTargetOnly ("target only": the
  drafter's probabilities have no part in it): a draft x is accepted where a uniform coin lies below p(x). Where it is
  not, the token that follows is drawn from p without x. So what is emitted is distributed as p, and x is accepted
  exactly where it is what was emitted: with probability p(x), not with sum min(p, q).
  (--speculative-accept-threshold-single and -acc, 1 by default, accept more and change the answers.)
- eagle_utils.py, _verify_uses_greedy: on a CPU, an XPU, and an AMD GPU without rejection sampling the argmax is
  emitted, and the temperature ignored.
- --speculative-use-rejection-sampling draws the draft from q and accepts it with min(1, p / q), in all sum min(p, q).
  It needs q over the target's vocabulary: alloc_memory_pool of eagle_worker_v2.py refuses a drafter of fewer tokens.

What is expected. A verify step behind a prefix of a held-out answer drafts d1, d2, ...: d1 is accepted with p(d1), d2
then with p(d2 | d1), and so on. The stored states give p behind the answer's own tokens: p(d1) always, p(d2 | d1) where
the answer itself goes on with d1. So rates are estimated, one a draft position: of draft j the mean p(d_j) over the
verify steps whose first j - 1 drafts the answer has, and their product is the share of steps in which j are accepted.
Of answers that were sampled at the same temperature this is exact but for the number of steps, and surer than counting
which drafts they have. Of others it assumes that their prefixes, and their steps that go on with the drafts, stand for
those of sampled answers; `text_share` beside `text_expected` shows how far the answers are from it.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NOTICEABLE = 4.0  # standard errors between the share of first drafts that the answers have and the one expected


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""
    temperature: float
    top_p: float = 1.0

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")

    @property
    def key(self) -> str:
        """Its part in the name of a metric."""
        return f"t{self.temperature:g}" + (f"_p{self.top_p:g}" if self.top_p < 1 else "")


def samplings(args) -> list[Sampling]:
    """Of 04's --temperature and --top-p."""
    return [Sampling(temperature, args.top_p) for temperature in args.temperature or ()]


def reach(right: np.ndarray, accept: np.ndarray, start: int, end: int, first: int) -> np.ndarray:
    """Sums over the verify steps of one sample, (2K + 1,): see `expected_length`.

    right, accept (K, rows): whether draft k of position first + i is the answer's own token, and the target's
    probability of it. The steps begin where those of acceptance.walk do; drafts behind the end are not accepted.
    """
    K, p = len(right), max(start, 1) - 1
    reached, expected = np.zeros(K + 1), np.zeros(K)
    while p + 2 < end:
        k = 0
        while True:
            reached[k] += 1
            if k == K or p + 2 + k >= end:
                break
            expected[k] += accept[k, p - first]
            if not right[k, p - first]:
                break
            k += 1
        p += k + 1
    return np.concatenate([reached, expected])


def by_position(sums: np.ndarray) -> np.ndarray:
    """(K, ...) share of verify steps in which drafts 0..j are expected to be accepted.

    sums (2K + 1, ...): verify steps that reach draft 0, ..., K - 1 along the answer, those in which it has all K, and
    the sum of p over those that reach draft 0, ..., K - 1.
    """
    K = len(sums) // 2
    reached, expected = sums[:K], sums[K + 1:]
    return np.cumprod(np.divide(expected, reached, out=np.zeros_like(expected), where=reached > 0), 0)


def expected_length(sums: np.ndarray) -> np.ndarray:
    """accept_length of summed sums (2K + 1, ...)."""
    return 1 + by_position(sums).sum(0)


def expectation(setting: Sampling, sums: dict[str, list[float]]) -> dict:
    """One entry of `sampled` in eagle3.json's prediction. sums: {sample id: reach()}, of at least one sample."""
    sums = dict(sorted(sums.items()))  # so that the sum hangs on no order
    total = np.sum(list(sums.values()), 0)
    K, steps = len(total) // 2, max(1.0, float(total[0]))
    taken, expected = float(total[1] / steps), float(total[K + 1] / steps)
    error = np.sqrt(max(expected * (1 - expected), 1 / steps) / steps)
    return {"temperature": setting.temperature, "top_p": setting.top_p, "num_steps": K,
            "accept_length": float(expected_length(total)), "verify_steps": int(total[0]),
            "accept_by_position": by_position(total).tolist(), "text_share": taken, "text_expected": expected,
            "text_fits": bool(abs(taken - expected) <= NOTICEABLE * error), "samples": sums}


def said(entry: dict) -> str:
    """Part of a log line."""
    setting = Sampling(entry["temperature"], entry["top_p"])
    return f"at {setting} {entry['accept_length']:.3f}" + ("" if entry["text_fits"] else " (answers drawn otherwise)")


def misfit(entry: dict) -> str:
    """A sentence about answers that were not drawn so; "" of others."""
    if entry["text_fits"]:
        return ""
    colder = "colder" if entry["text_share"] > entry["text_expected"] else "hotter"
    return (f"the held-out answers are {colder} than {Sampling(entry['temperature'], entry['top_p'])} (they have the "
            f"first draft in {entry['text_share']:.1%} of the verify steps, answers drawn so in "
            f"{entry['text_expected']:.1%}): the prediction assumes that their beginnings stand for those of such "
            "answers")
