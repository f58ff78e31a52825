"""Every sample is read whole and checked once before training; what is found is kept in <output>/checked/.

A file of checked/ holds CHECK_CHUNK samples of the index: `mass` of their response tokens, one after the other, and
in its metadata a record each: {"id", "problem"} or {"id", "problem": null, "tokens", "spans": [[first, end of the
response]], "agreed", "predicted"}, and with --loss-on all "mass_from": 1, as the prompt's tokens have a mass, too.

Shapes: T tokens of a sample, S its first response token, Vt target vocabulary, Vd draft vocabulary, H hidden.
"""
from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eagle3.batches import Sample
from eagle3.checkpoints import writing
from eagle3.drafter import chunks, logits_of
from eagle3.processes import LONG_WORK, meet
from eagle3.stage import UserError, bar, duration, log, write_atomic
from eagle3.states import UNREADABLE, check_sample, response_start, sample_path

CHECK_CHUNK = 256
MIN_AGREEMENT = 0.05  # less of the response being the target's argmax means: other states, other target
MAX_BAD = 0.01  # share of samples that may be damaged
NO_LOSS = "no response token within --max-seq-len"


@torch.no_grad()
def response_mass(tensors: dict, start: int, head: torch.Tensor, draft_ids: torch.Tensor,
                  mass_from: int | None = None):
    """(mass (T - S,), how many response tokens are the target's argmax, how many were predicted).

    mass: the target's probability inside the draft vocabulary where each response token was predicted, or each token
    from `mass_from` on (1 at least; (T - mass_from,)). head (Vt, H), draft_ids (Vd,).
    """
    mass_from = start if mass_from is None else mass_from
    begin = max(mass_from, 1)  # token 0 is predicted by nothing
    last, ids = tensors["last_hidden_states"][begin - 1:-1], tensors["input_ids"][begin:].long()
    mass, agreed, before = [torch.zeros(begin - mass_from)], 0, max(0, start - begin)  # rows before the response
    for rows in chunks(len(ids), len(head)):
        logits = logits_of(last[rows].to(head.device, head.dtype), head)
        mass.append((logits[:, draft_ids].logsumexp(-1) - logits.logsumexp(-1)).exp().float().cpu())
        agreed += int((logits.argmax(-1).cpu() == ids[rows])[max(0, before - rows.start):].sum())
    return torch.cat(mass).clamp_(max=1), agreed, len(ids) - before


def other_target(folder: Path, agreement: float) -> UserError:
    return UserError(f"{folder}: only {agreement:.1%} of the response tokens are the argmax of "
                     "lm_head(last_hidden_states). The states are not of this target: extract again.")


def check_files(folder: Path, cache: Path, inputs, head: torch.Tensor, process, workers: int) -> None:
    """Read this rank's share of the files once, and keep what is found in `cache`.

    inputs: of its facts, index, target, draft_ids and prompts (`sources.Source`).
    """
    with writing(cache):
        cache.mkdir(exist_ok=True, parents=True)
    index, norm = inputs.index, inputs.target.final_norm()
    head, draft_ids = head.to(process.device, process.dtype), inputs.draft_ids.to(process.device)
    # A rank's share must not depend on what others have finished when it looks
    mine = range(0, len(index), CHECK_CHUNK)[process.rank::process.world]
    todo = [start for start in mine if not is_whole(cache / f"{start:08d}.safetensors", inputs.prompts)]
    begun = told = time.monotonic()
    read = 0
    with ThreadPoolExecutor(max(1, workers)) as pool, bar(len(todo) * CHECK_CHUNK, "sample") as progress:
        def submit(row):
            return pool.submit(check_sample, sample_path(folder, row["id"]), row, inputs.facts, len(head), norm)

        for number, start in enumerate(todo, 1):
            rows, records, masses = index[start:start + CHECK_CHUNK], [], [torch.zeros(0)]
            for row, (problem, tensors) in in_order(rows, submit, 2 * workers + 1):
                record = {"id": row["id"], "problem": problem}
                if not problem:
                    first = response_start(tensors["loss_mask"].numpy())
                    mass_from = {"mass_from": 1} if inputs.prompts else {}
                    mass, agreed, predicted = response_mass(tensors, first, head, draft_ids, **mass_from)
                    record |= {"tokens": row["tokens"], "spans": [[first, row["tokens"]]], "agreed": agreed,
                               "predicted": predicted, **mass_from}
                    masses.append(mass)
                    read += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
                records.append(record)
            with writing(cache):
                write_chunk(cache / f"{start:08d}.safetensors", torch.cat(masses), json.dumps(records))
            progress.update(CHECK_CHUNK)
            if process.rank == 0 and time.monotonic() - told > 10:
                told = time.monotonic()
                log(f"check {min(len(index), start + process.world * CHECK_CHUNK)}/{len(index)} | "
                    f"{read / 1e9 / (told - begun):.2f} GB/s a rank | "
                    f"eta {duration((told - begun) / number * (len(todo) - number))}")


def in_order(rows: list, submit, ahead: int):
    """(row, result) of each row in order, with `ahead` of them submitted before they are needed: few lie in memory."""
    waiting, later = deque((row, submit(row)) for row in rows[:ahead]), iter(rows[ahead:])
    while waiting:
        row, future = waiting.popleft()
        result = future.result()
        if (following := next(later, None)) is not None:
            waiting.append((following, submit(following)))
        yield row, result


# ---- a file of checked/ ----
def write_chunk(path: Path, mass: torch.Tensor, records: str) -> None:
    """`sha256`, of both, is a tensor: two keys of metadata come in no fixed order."""
    digest = hashlib.sha256(mass.numpy().tobytes() + records.encode()).digest()
    tensors = {"mass": mass, "sha256": torch.frombuffer(bytearray(digest), dtype=torch.uint8)}
    write_atomic(path, save(tensors, {"samples": records}))


def read_chunk(path: Path) -> tuple[np.ndarray, list[dict]]:
    """(mass, records). Raises what says that it is not what was written; one of before there were sums is not asked."""
    with safe_open(path, "np") as file:
        mass, records = file.get_tensor("mass"), file.metadata()["samples"]
        written = file.get_tensor("sha256").tobytes() if "sha256" in file.keys() else None
    if written not in (None, hashlib.sha256(mass.tobytes() + records.encode()).digest()):
        raise ValueError("not what was written")
    return mass, json.loads(records)


def is_whole(path: Path, prompts: bool) -> bool:
    """prompts: only with the mass of the prompts' tokens."""
    try:
        _, records = read_chunk(path)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        log(f"{path}: damaged ({error}); its samples are checked again")
        return False
    return not prompts or all(record["problem"] or "mass_from" in record for record in records)


def read_checked(folder: Path, cache: Path, index: list[dict], max_tokens: int, prompts: bool = False):
    """(samples, problems {id: reason}, (response tokens that are the target's argmax, those predicted)).

    prompts: loss from the first token on. Raises UserError.
    """
    samples, problems, agreed, predicted = [], {}, 0, 0
    for start in range(0, len(index), CHECK_CHUNK):
        path = cache / f"{start:08d}.safetensors"
        try:
            mass, records = read_chunk(path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(f"{path}: not readable ({error}). Delete it and run the same command again.") from None
        at = 0
        for record in records:
            if record["problem"]:
                problems[record["id"]] = record["problem"]
                continue
            [[first, end]] = record["spans"]
            tokens, mass_from = min(record["tokens"], max_tokens), record.get("mass_from", first)
            sample = Sample(record["id"], sample_path(folder, record["id"]), tokens, first,
                            mass[at:at + max(0, tokens - mass_from)], tokens < record["tokens"], loss_from=mass_from)
            at, agreed, predicted = at + end - mass_from, agreed + record["agreed"], predicted + record["predicted"]
            if sample.of_response().counts(1)[0]:
                samples.append(sample if prompts else sample.of_response())
            else:
                problems[record["id"]] = NO_LOSS
    return samples, problems, (agreed, predicted)


def forget(cache: Path) -> None:
    """What was found is found anew."""
    for path in cache.rglob("*.safetensors"):
        if re.fullmatch(r"\d{8}\.safetensors", path.name):
            path.unlink()


@dataclass
class Checked:
    """What a folder holds."""
    samples: list[Sample]
    dropped: Counter  # {reason: count}
    agreed: int  # response tokens that are the target's argmax
    predicted: int  # of so many


def usable_samples(source, max_tokens: int, workers: int, head: torch.Tensor, process) -> Checked:
    """The samples of a folder (`sources.Source`), each read whole once. Raises UserError when too much is wrong."""
    folder, index = source.folder, source.index
    check_files(folder, source.cache, source, head, process, workers)
    meet(process, LONG_WORK)
    samples, problems, (agreed, predicted) = read_checked(folder, source.cache, index, max_tokens,
                                                             source.prompts)
    dropped = Counter(problems.values())
    damaged = sorted(name for name, problem in problems.items() if not problem.startswith("no response token"))
    too_many = len(damaged) > MAX_BAD * len(index)
    for name in damaged[:10 if too_many else None] + sorted(problems.keys() - set(damaged))[:10]:
        process.say(f"skipped {sample_path(folder, name)} | {problems[name]}")
    if too_many:
        meet(process, LONG_WORK)  # all have read it
        if process.rank == 0:
            forget(source.cache)  # what is mended is looked at again
        see = "See to the disk. " if UNREADABLE in dropped else ""
        raise UserError(f"{folder}: {len(damaged)} of {len(index)} samples are bad ({dict(sorted(dropped.items()))}; "
                        f"the first: {sample_path(folder, damaged[0])}). {see}Run 03_extract.py --verify, extract anew "
                        "what it names (--redo-failed), then this again.")
    if agreed < MIN_AGREEMENT * predicted:
        raise other_target(folder, agreed / predicted)
    return Checked(samples, dropped, agreed, predicted)
