"""What serving would accept: losses and accuracies on held-out samples, and the walk of a greedy server over them."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from eagle3.batches import Sample, pack
from eagle3.loader import Reader, feed
from eagle3.metrics import step_metrics
from eagle3.processes import all_ranks
from eagle3.stage import UserError
from eagle3.trainer import choose_pass


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
class Evaluation:
    """What a drafter does on some samples."""
    metrics: dict  # loss_k, full_acc_k, cond_acc_k and accept_length
    walks: dict  # {sample id: verify steps with 0, 1, ... correct drafts}

    @property
    def prediction(self) -> dict:
        """What eagle3.json keeps of it."""
        return predicted(self.walks)


def evaluate(draft, samples: list[Sample], args, process) -> Evaluation:
    """Losses and accuracies over `samples`, and the accept_length that greedy serving will show on them.

    Samples that cannot be read are left out. The same on every rank. Raises UserError. args: ttt_steps,
    num_draft_steps, batch_tokens, num_workers and loss.
    """
    K, draft_steps, world, device = args.ttt_steps, args.num_draft_steps, process.world, process.device
    bins = pack([sample.tokens for sample in samples], list(range(len(samples))), args.batch_tokens)
    bins = [[samples[i] for i in indices] for indices in bins[process.rank::world]]
    sums, walks = torch.zeros(K, 4, dtype=torch.float64, device=device), {}
    reader = Reader(K, draft.shape, device.type == "cuda", len(samples))
    ttt_pass = choose_pass(draft).ttt_pass
    for _, loaded, _ in feed(bins, reader.load, args.num_workers, device, draft.dtype):
        if not loaded.batch:  # nothing of it could be read
            continue
        step_sums, right = ttt_pass(draft, loaded.batch, [1.0] * K, kind=args.loss)
        sums += step_sums
        right = right.cpu().numpy()
        for sample, ((q0, q1), _) in zip(loaded.samples, loaded.batch.spans):
            accepted = walk(right[:, q0:q1], sample.start, sample.tokens, draft_steps, sample.rows(K)[0])
            walks[sample.id] = np.bincount(accepted, minlength=draft_steps + 1).tolist()
    if world > 1:
        dist.all_reduce(sums)
    walks = {name: value for part in all_ranks(walks, process) for name, value in part.items()}
    if not walks:
        raise UserError(f"none of the {len(samples)} validation samples could be read. See to the disk, then run the "
                        "same command again; it goes on from the last checkpoint.")
    counts = np.sum([sample.counts(K) for sample in samples if sample.id in walks], 0)
    metrics = step_metrics(sums.cpu(), counts) | {"accept_length": predicted(walks)["accept_length"]}
    return Evaluation(metrics, walks)


def predicted(walks: dict[str, list[int]]) -> dict:
    """eagle3.json's `prediction`. walks: as Evaluation's, of at least one sample."""
    histogram = np.sum(list(walks.values()), 0).tolist()
    samples = {name: [sum(own), sum(k * n for k, n in enumerate(own))] for name, own in sorted(walks.items())}
    verify, correct = (sum(counted) for counted in zip(*samples.values()))
    by_position = [sum(histogram[j + 1:]) / max(1, verify) for j in range(len(histogram) - 1)]
    return {"num_steps": len(histogram) - 1, "accept_length": 1 + correct / max(1, verify), "verify_steps": verify,
            "correct_drafts": correct, "histogram": histogram, "accept_by_position": by_position,
            "val_ids_file": "val_ids.json", "samples": samples}
