"""Every sample is read whole and checked once before training; check_records.py keeps what is found.

Shapes: T tokens of a sample, S its first response token, Vt target vocabulary, Vd draft vocabulary, H hidden.
"""
from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.check_records import Records, key_of, mass_size, read_records, still_true
from eagle3.drafter import chunks, logits_of
from eagle3.file_stat import settled, stat_of
from eagle3.processes import LONG_WORK, all_ranks, meet
from eagle3.sample_table import Builder, SampleTable
from eagle3.stage import UserError, bar, duration, log
from eagle3.states import OTHER_KIND, UNREADABLE, check_sample, response_start, sample_path

CHECK_CHUNK = 256
STATS_A_TASK = 32  # of a thread: to hand over a task takes longer than to look at a file
MIN_AGREEMENT = 0.05  # less of the response being the target's argmax means: other states, other target
MAX_BAD = 0.01  # share of samples that may be damaged
NO_LOSS = "no response token within --max-seq-len"
QUARANTINED = "quarantined by 03_extract"


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


@contextlib.contextmanager
def one_core_each(workers: int):
    """A pool of threads in which torch computes on the calling thread alone.

    As it comes, each of them would spread each operation over all cores, and where several runs share a machine all
    those threads wait for each other: twelve runs on 16 cores checked 0.01 GB/s each instead of 0.3.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(max(1, workers), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # a thread's own number is also that of threads begun later


def check_files(source, records: Records, head: torch.Tensor, process,
                workers: int) -> tuple[dict[int, Path], int, int]:
    """Read what of this rank's share of the files is not known yet, and keep what is found.

    Returns ({first row of the index: where its record stands}, samples read, their bytes). source: `sources.Source`.
    """
    folder, index, norm = source.folder, source.index, source.target.final_norm()
    head, draft_ids = head.to(process.device, process.dtype), source.draft_ids.to(process.device)
    # A rank's share must not depend on what others have finished when it looks
    mine = list(range(0, len(index), CHECK_CHUNK)[process.rank::process.world])
    turn = os.getpid() % max(1, len(mine))  # runs side by side begin in different places and take over from each other
    begun = told = time.monotonic()
    files, read, read_bytes = {}, 0, 0
    with one_core_each(workers) as pool, bar(len(mine) * CHECK_CHUNK, "sample") as progress:
        def look(row):
            path = sample_path(folder, row["id"])
            stat = stat_of(path)
            sure = settled(stat)
            problem, tensors = check_sample(path, row, source.facts, len(head), norm)
            return stat if sure and stat_of(path) == stat else None, problem, tensors

        for number, start in enumerate(mine[turn:] + mine[:turn], 1):
            rows = index[start:start + CHECK_CHUNK]
            ids = [row["id"] for row in rows]
            paths = [sample_path(folder, sample_id) for sample_id in ids]
            parts = [paths[at:at + STATS_A_TASK] for at in range(0, len(paths), STATS_A_TASK)]
            stats = sum(pool.map(lambda part: [stat_of(path) for path in part], parts), [])
            files[start], known = still_true(records.candidates(start), ids, stats, source.begun)
            if not files[start]:
                unknown = [row for row in rows if row["id"] not in known]
                for row, found in in_order(unknown, lambda row: pool.submit(look, row), 2 * workers + 1):
                    known[row["id"]] = record_of(row, *found, head, draft_ids, source.prompts)
                    read += 1
                    read_bytes += tensor_bytes(found[2])
                mass = torch.cat([torch.zeros(0), *(torch.as_tensor(known[name][1]) for name in ids)])
                files[start] = records.keep(start, mass, [known[name][0] for name in ids])
            progress.update(CHECK_CHUNK)
            if process.rank == 0 and time.monotonic() - told > 10:
                told = time.monotonic()
                log(f"check {min(len(index), number * process.world * CHECK_CHUNK)}/{len(index)} | "
                    f"{read_bytes / 1e9 / (told - begun):.2f} GB/s a rank | "
                    f"eta {duration((told - begun) / number * (len(mine) - number))}")
    return files, read, read_bytes


def record_of(row: dict, stat: list | None, problem: str | None, tensors: dict | None, head: torch.Tensor,
              draft_ids: torch.Tensor, prompts: bool) -> tuple[dict, torch.Tensor]:
    """(record, mass) of a sample that was read; stat: None where it may have changed meanwhile."""
    record = {"id": row["id"], "stat": stat, "problem": problem}
    if problem:
        return record, torch.zeros(0)
    first = response_start(tensors["loss_mask"].numpy())
    mass_from = {"mass_from": 1} if prompts else {}
    mass, agreed, predicted = response_mass(tensors, first, head, draft_ids, **mass_from)
    return record | {"tokens": row["tokens"], "spans": [[first, row["tokens"]]], "agreed": agreed,
                     "predicted": predicted, **mass_from}, mass


def tensor_bytes(tensors: dict | None) -> int:
    return sum(tensor.nbytes for tensor in (tensors or {}).values())


def in_order(rows: list, submit, ahead: int):
    """(row, result) of each row in order, with `ahead` of them submitted before they are needed: few lie in memory."""
    waiting, later = deque((row, submit(row)) for row in rows[:ahead]), iter(rows[ahead:])
    while waiting:
        row, future = waiting.popleft()
        result = future.result()
        if (following := next(later, None)) is not None:
            waiting.append((following, submit(following)))
        yield row, result


def read_checked(folder: Path, files: list[Path], max_tokens: int, prompts: bool = False):
    """(SampleTable, problems {id: reason}, (response tokens that are the target's argmax, those predicted)).

    files: of records, in the index's order; prompts: loss from the first token on. Raises UserError.
    """
    samples, problems, agreed, predicted = Builder(folder), {}, 0, 0
    for path in files:
        try:
            records, mass = read_records(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not readable ({error}). Delete it and run the same command again.") from None
        for record in records:
            if record["problem"]:
                problems[record["id"]] = record["problem"]
                continue
            [[first, _]] = record["spans"]
            tokens, mass_from = min(record["tokens"], max_tokens), record.get("mass_from", first)
            loss_from = mass_from if prompts else first
            if tokens > max(first, 2):
                samples.add(record["id"], tokens, first, loss_from, tokens < record["tokens"], path,
                            mass + 4 * (loss_from - mass_from))
            else:
                problems[record["id"]] = NO_LOSS
            mass, agreed = mass + 4 * mass_size(record), agreed + record["agreed"]
            predicted += record["predicted"]
    return samples.table(), problems, (agreed, predicted)


@dataclass
class Checked:
    """What a folder holds."""
    samples: SampleTable
    dropped: Counter  # {reason: count}
    agreed: int  # response tokens that are the target's argmax
    predicted: int  # of so many
    problems: dict  # {id: reason} of those dropped


def usable_samples(source, max_tokens: int, workers: int, head: torch.Tensor, process) -> Checked:
    """The samples of a folder (`sources.Source`), each read whole once. Raises UserError when too much is wrong."""
    folder, index = source.folder, source.index
    key = all_ranks(key_of(source, head, process) if process.rank == 0 else None, process)[0]
    records = Records(folder / "checked" / key, source.cache / key, process)
    found = check_files(source, records, head, process, workers)
    meet(process, LONG_WORK)
    parts = all_ranks(found, process)
    read, read_bytes = (sum(part[i] for part in parts) for i in (1, 2))
    process.say(f"check {folder} | {len(index) - read:,} samples known from an earlier check, {read:,} read "
                f"({read_bytes / 1e9:.3f} GB)")
    files = sorted(path for part in parts for path in part[0].items())
    samples, problems, (agreed, predicted) = read_checked(folder, [path for _, path in files], max_tokens,
                                                          source.prompts)
    dropped = Counter(problems.values())
    damaged = sorted(name for name, problem in problems.items() if not problem.startswith("no response token"))
    too_many = len(damaged) > MAX_BAD * len(index) or any(problem.startswith(OTHER_KIND) for problem in dropped)
    for name in damaged[:10 if too_many else None] + sorted(problems.keys() - set(damaged))[:10]:
        process.say(f"skipped {sample_path(folder, name)} | {problems[name]}")
    if too_many:
        see = "See to the disk. " if UNREADABLE in dropped else ""
        raise UserError(f"{folder}: {len(damaged)} of {len(index)} samples are bad ({dict(sorted(dropped.items()))}; "
                        f"the first: {sample_path(folder, damaged[0])}). {see}Run 03_extract.py --verify, extract anew "
                        "what it names (--redo-failed), then this again.")
    if agreed < MIN_AGREEMENT * predicted:
        raise other_target(folder, agreed / predicted)
    return Checked(samples, dropped, agreed, predicted, problems)
