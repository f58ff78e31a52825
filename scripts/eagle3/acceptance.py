"""What serving would accept: losses and accuracies on held-out samples, the walk of a greedy server over them, and what
a sampling one is expected to accept."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from eagle3.batches import Sample, pack
from eagle3.drafter import chunks, logits_of
from eagle3.loader import Reader, feed
from eagle3.metrics import step_metrics
from eagle3.processes import all_ranks
from eagle3.sampling import Sampling, expectation, reach
from eagle3.stage import UserError
from eagle3.trainer import choose_pass


SORTED = 6  # times the memory of logits that a nucleus takes


def walk(right: np.ndarray, start: int, end: int, steps: int, first: int) -> list[int]:
    """Correct drafts of each verify step of a greedy server over the response tokens [start, end) of one sample.

    right (K, rows): row i is position first + i. The target itself emits token `start`; a verify step after token p +
    1 drafts x[p+2], x[p+3], ...
    """
    accepted, p = [], max(start, 1) - 1
    while p + 2 < end:
        k = 0
        while k < min(steps, end - p - 2) and right[k, p - first]:
            k += 1
        accepted.append(k)
        p += k + 1
    return accepted


@dataclass
class Sampled:
    """How answers are drawn where sampled serving is to be foretold, and the target's lm_head for it, (Vt, H)."""
    settings: list[Sampling]
    head: torch.Tensor

    def accept(self, batch, drafts: list[torch.Tensor]) -> np.ndarray:
        """(settings, K, R): the target's probability of each draft, behind the answer's own tokens.

        drafts: of each TTT step, (R,) target ids. Draft k of row r stands behind the state of row r + k; where that is
        no row of the same sample the number means nothing.
        """
        K, R = len(drafts), len(batch.last)
        tokens = torch.stack([F.pad(own, (k, 0))[:R] for k, own in enumerate(drafts)], 1)  # (R, K) by row of the state
        parts = []
        for rows in chunks(R, SORTED * len(self.head)):
            logits = logits_of(batch.last[rows], self.head)
            parts.append(torch.stack([probabilities(logits, tokens[rows], setting) for setting in self.settings]))
        found = F.pad(torch.cat(parts, 1), (0, 0, 0, K))
        return torch.stack([found[:, k:k + R, k] for k in range(K)], 1).float().cpu().numpy()


def sampled_at(settings: list[Sampling], head: torch.Tensor, draft) -> Sampled | None:
    """head (Vt, H), on any device."""
    return Sampled(settings, head.to(draft.target_head.device, draft.target_head.dtype)) if settings else None


def probabilities(logits: torch.Tensor, tokens: torch.Tensor, setting: Sampling) -> torch.Tensor:
    """The probability with which SGLang's verify (sampling.py) draws each of `tokens` (N, K) from logits (N, V).

    The nucleus of top_p holds the likeliest tokens before which less than top_p lies, and those as likely as its last.
    """
    p = (logits / setting.temperature).softmax(-1)
    own = p.gather(1, tokens)
    if setting.top_p >= 1:
        return own
    ranked = p.sort(-1, descending=True).values
    last = ((ranked.cumsum(-1) - ranked) < setting.top_p).sum(-1, keepdim=True) - 1
    least = ranked.gather(1, last.clamp_min(0))
    mass = (p * (p >= least)).sum(-1, keepdim=True)
    return torch.where(own >= least, own / mass, 0)


@dataclass
class Evaluation:
    """What a drafter does on some samples."""
    metrics: dict  # loss_k, full_acc_k, cond_acc_k and accept_length
    walks: dict  # {sample id: verify steps with 0, 1, ... correct drafts}
    sampled: dict = field(default_factory=dict)  # {Sampling: {sample id: sampling.reach()}}

    @property
    def prediction(self) -> dict:
        """What eagle3.json keeps of it."""
        sampled = [expectation(setting, sums) for setting, sums in self.sampled.items()]
        return predicted(self.walks) | ({"sampled": sampled} if sampled else {})


def evaluate(draft, samples: list[Sample], args, process, sampled: Sampled | None = None) -> Evaluation:
    """Losses and accuracies over `samples`, and the accept_length that greedy serving will show on them.

    With `sampled` also what sampled serving is expected to show. Samples that cannot be read are left out. The same on
    every rank. Raises UserError. args: ttt_steps, num_draft_steps, batch_tokens, num_workers and loss.
    """
    K, draft_steps, world, device = args.ttt_steps, args.num_draft_steps, process.world, process.device
    bins = pack([sample.tokens for sample in samples], list(range(len(samples))), args.batch_tokens)
    bins = [[samples[i] for i in indices] for indices in bins[process.rank::world]]
    sums, walks = torch.zeros(K, 4, dtype=torch.float64, device=device), {}
    settings = sampled.settings if sampled else []
    expected = {setting: {} for setting in settings}
    reader = Reader(K, draft.shape, device.type == "cuda", len(samples))
    ttt_pass = choose_pass(draft).ttt_pass
    for _, loaded, _ in feed(bins, reader.load, args.num_workers, device, draft.dtype):
        if not loaded.batch:  # nothing of it could be read
            continue
        drafts = [] if sampled else None
        step_sums, right = ttt_pass(draft, loaded.batch, [1.0] * K, kind=args.loss, drafts=drafts)
        sums += step_sums
        right = right.cpu().numpy()
        accept = sampled.accept(loaded.batch, drafts[:draft_steps]) if sampled else ()
        for sample, ((q0, q1), _) in zip(loaded.samples, loaded.batch.spans):
            first, own = sample.rows(K)[0], right[:, q0:q1]
            accepted = walk(own, sample.start, sample.tokens, draft_steps, first)
            walks[sample.id] = np.bincount(accepted, minlength=draft_steps + 1).tolist()
            for setting, probability in zip(settings, accept):
                found = reach(own[:draft_steps], probability[:, q0:q1], sample.start, sample.tokens, first)
                expected[setting][sample.id] = np.round(found, 5).tolist()
    if world > 1:
        dist.all_reduce(sums)
    walks, expected = gathered(walks, process), {name: gathered(own, process) for name, own in expected.items()}
    if not walks:
        raise UserError(f"none of the {len(samples)} validation samples could be read. See to the disk, then run the "
                        "same command again; it goes on from the last checkpoint.")
    counts = np.sum([sample.counts(K) for sample in samples if sample.id in walks], 0)
    metrics = step_metrics(sums.cpu(), counts) | {"accept_length": predicted(walks)["accept_length"]}
    metrics |= {f"accept_length_{setting.key}": expectation(setting, own)["accept_length"]
                for setting, own in expected.items()}
    return Evaluation(metrics, walks, expected)


def gathered(found: dict, process) -> dict:
    """{sample id: ...} of all ranks."""
    return {name: value for part in all_ranks(found, process) for name, value in part.items()}


def predicted(walks: dict[str, list[int]]) -> dict:
    """eagle3.json's `prediction`. walks: as Evaluation's, of at least one sample."""
    histogram = np.sum(list(walks.values()), 0).tolist()
    samples = {name: [sum(own), sum(k * n for k, n in enumerate(own))] for name, own in sorted(walks.items())}
    verify, correct = (sum(counted) for counted in zip(*samples.values()))
    by_position = [sum(histogram[j + 1:]) / max(1, verify) for j in range(len(histogram) - 1)]
    return {"num_steps": len(histogram) - 1, "accept_length": 1 + correct / max(1, verify), "verify_steps": verify,
            "correct_drafts": correct, "histogram": histogram, "accept_by_position": by_position,
            "val_ids_file": "val_ids.json", "samples": samples}
