"""The folders of hidden states of a run, read as one set of samples: those it trains on, and the one held out.

Each folder is checked by itself (checked.py). A sample that several folders hold (the same id, prompt and tokens) is
used once, and never trained on when it is held out. Other samples that share an id (two runs may both number theirs
from 0) are all used, under the name <number of the folder, from 1>/<id>.
"""
from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eagle3.batches import Sample
from eagle3.checked import Checked, usable_samples
from eagle3.checkpoints import begun
from eagle3.hosts import good_everywhere
from eagle3.inputs import begun_with, read_index
from eagle3.patience import patiently
from eagle3.sample_table import SampleTable, joined
from eagle3.stage import UserError, read_manifest, sha256_file
from eagle3.states import StateFile, kind_of, layer_list
from eagle3.target import Target

HELD_OUT, REPEATED = "held out by --val-data-dir", "also in an earlier --data-dir"


@dataclass
class Source:
    """A folder of hidden states that 03 has finished, as `checked` reads it."""
    folder: Path
    facts: dict  # its manifest
    index: Sequence  # index.jsonl's rows
    target: Target
    draft_ids: torch.Tensor  # (Vd,)
    manifest_sha256: str
    cache: Path  # where what is found in its files is kept, if not beside them (check_records.py)
    weight: float = 1.0  # how often a sample of it is seen in an epoch
    prompts: bool = False  # whether the prompts carry loss, too
    begun: bool = False  # whether a checkpoint was trained without those that were found bad
    of: str = ""  # where `index` has not all rows: which it has


@dataclass
class Sources:
    train: list[Source]
    held_out: Source | None


@dataclass
class Found:
    """What the folders hold."""
    samples: SampleTable  # of those to train on
    held_out: SampleTable | None  # None: there is no such folder
    dropped: dict  # {reason: count}
    agreement: float  # share of response tokens that are the target's argmax
    repeated: set  # ids left out, because an earlier folder or the held-out one has the same sample


# ---- folders ----
def read_source(folder: Path, target: Target, draft_ids: torch.Tensor, cache: Path,
                place: Path | None = None) -> Source:
    """Raises UserError where 03 has not finished there, or the states are of another target.

    place: where its manifest and index lie, if not in `folder` itself (inputs.begun_with).
    """
    place = place or folder
    facts = read_manifest(place, "03_extract")
    if facts.get("bounded"):
        raise UserError(f"{folder}: extracted in bounded mode, so most of its samples are gone. Name another folder.")
    if facts["hidden_size"] != target.config["hidden_size"]:
        raise UserError(f"{folder}: states of hidden size {facts['hidden_size']}, the target at {target.folder} has "
                        f"{target.config['hidden_size']}.")
    manifest_sha256 = sha256_file(place / "manifest.json")
    return Source(folder, facts, read_index(place, facts["index_sha256"]), target, draft_ids, manifest_sha256, cache)


def read_sources(args, inputs, say) -> Sources:
    """All folders that the flags name; their hashes go into `inputs.hashes`. Raises UserError.

    args: data_dirs (the first one is what `inputs` was read from), data_weight, val_data_dir, output_dir, follow and
    loss_on.
    """
    cache, several = args.output_dir / "checked", len(args.data_dirs) > 1
    sources = [Source(args.data_dir, inputs.facts, inputs.index, inputs.target, inputs.draft_ids,
                      inputs.hashes.get("hidden_states", ""), cache / "1" if several else cache)]
    sources += [read_source(folder, inputs.target, inputs.draft_ids, cache / str(number),
                            begun_with(args, folder, "hidden_states", number - 1, say))
                for number, folder in enumerate(args.data_dirs[1:], 2)]
    held_out = None
    if args.val_data_dir:
        held_out = read_source(args.val_data_dir, inputs.target, inputs.draft_ids, cache / "val",
                               begun_with(args, args.val_data_dir, "val_hidden_states", 0, say))
        inputs.hashes["val_hidden_states"] = held_out.manifest_sha256
    for source in [*sources[1:], *([held_out] if held_out else [])]:
        fits_first(source, sources[0], source is not held_out, say)
    if several:
        inputs.hashes["hidden_states"] = [source.manifest_sha256 for source in sources]
    for source, weight in zip(sources, args.data_weight or [1.0] * len(sources), strict=True):
        source.weight, source.prompts = weight, args.loss_on == "all"
    for source in [*sources, *([held_out] if held_out else [])]:
        source.begun = begun(args.output_dir)
    return Sources(sources, held_out)


def fits_first(source: Source, first: Source, in_one_batch: bool, say) -> None:
    """Raises UserError unless a drafter can be fed both (in_one_batch: mixed); says what else they differ by."""
    for fact, value, wanted in (("capture layers", layer_list(source.facts), layer_list(first.facts)),
                                ("dtype", source.facts["dtype"], first.facts["dtype"]),
                                ("kind of states", kind_of(source.facts), kind_of(first.facts))):
        if value != wanted and (in_one_batch or fact == "capture layers"):
            raise UserError(f"{source.folder}: {fact} {value}, {first.folder} has {wanted}. One drafter cannot be fed "
                            "both: extract one of them anew, or leave it out.")
    for fact in ("target", "sglang_version", "patch_hash"):
        if source.facts.get(fact) != first.facts.get(fact):
            say(f"{source.folder} | {fact} {source.facts.get(fact)}, that of {first.folder} is {first.facts.get(fact)}")


# ---- samples ----
def find_samples(args, sources: Sources, head: torch.Tensor, process) -> Found:
    """Every file of every folder read and checked, each sample once. The same on every rank. Raises UserError.

    args: max_seq_len, num_workers, val_ratio, follow; head (Vt, H). With --follow only the held-out folder is read.
    """
    def usable(source: Source) -> Checked:
        found = usable_samples(source, args.max_seq_len, args.num_workers, head, process.near or process)
        return good_everywhere(found, process)

    parts, held_out, dropped, agreed, predicted = [], None, Counter(), 0, 0
    for source in [] if args.follow else sources.train:
        checked = usable(source)
        parts.append(checked.samples.weighted(source.weight))
        dropped, agreed, predicted = dropped + checked.dropped, agreed + checked.agreed, predicted + checked.predicted
    if sources.held_out:
        checked = usable(sources.held_out)
        held_out, dropped = checked.samples, dropped + checked.dropped
        if not held_out:
            raise UserError(f"{sources.held_out.folder}: no usable sample to validate on {dict(checked.dropped)}.")
    folders = [source.folder for source in sources.train]
    samples, repeated = once(parts, held_out, args.num_workers)
    for (number, earlier), names in sorted(repeated.items()):
        where = folders[earlier - 1] if earlier else sources.held_out.folder
        process.say(f"{len(names)} samples of {folders[number - 1]} are left out: {where} has them too (same id, "
                    f"prompt and tokens), {names[0]} for one")
        dropped[REPEATED if earlier else HELD_OUT] += len(names)
    per_folder = np.bincount(samples.rows["folder"], minlength=len(folders))
    for source, count in zip(sources.train, per_folder) if len(folders) > 1 else ():
        process.say(f"{source.folder} | {count} samples | weight {source.weight:g}")
    needed = 1 + (args.val_ratio > 0 and held_out is None)
    if not args.follow and len(samples) < needed:
        more = ", one of them to validate" if needed > 1 else ""
        raise UserError(f"{', '.join(map(str, folders))}: {len(samples)} usable samples {dict(dropped) or ''}; at "
                        f"least {needed} are needed{more}.")
    return Found(samples, held_out, dict(sorted(dropped.items())), agreed / max(1, predicted),
                 {name for names in repeated.values() for name in names})


def once(parts: list[SampleTable], held_out: SampleTable | None, workers: int) -> tuple[SampleTable, dict]:
    """(the samples of all folders, each once and under a name of its own, {(folder, the one that has them too): ids}).

    Folders by number: 0 is the held-out one, whose samples are not among those returned.
    """
    held_out = SampleTable.empty() if held_out is None else held_out
    places = shared_ids([held_out, *parts])
    if not places:
        return joined(parts), {}
    shared = [[(number, (held_out, *parts)[number][at]) for number, at in same_id] for same_id in places]
    gone, kept_at, repeated = [set() for _ in range(1 + len(parts))], [], {}
    for same_id in places:
        for number, at in same_id:
            gone[number].add(at)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for same_id, where, earlier in zip(shared, places, pool.map(repeats, shared)):
            kept = [(number, at) for (number, at), other in zip(where, earlier) if number and other is None]
            kept_at += [(number, at, number if len(kept) > 1 else 0) for number, at in kept]
            for (number, sample), other in zip(same_id, earlier):
                if other is not None:
                    repeated.setdefault((number, other), []).append(sample.id)
    offsets = np.cumsum([0, *map(len, parts)])
    single = [np.delete(np.arange(len(part)), np.array(sorted(gone[number]), np.int64)) + offsets[number - 1]
              for number, part in enumerate(parts, 1)]
    last = np.array([offsets[number - 1] + at for number, at, _ in kept_at], np.int64)
    samples = joined(parts).take(np.concatenate([*single, last]))
    samples.called_by_folder(range(len(samples) - len(kept_at), len(samples)), [name for *_, name in kept_at])
    return samples, repeated


def shared_ids(tables: list[SampleTable]) -> list[list[tuple[int, int]]]:
    """[(table, position) of each sample of one id] of every id that stands in several tables."""
    if sum(map(bool, map(len, tables))) < 2:
        return []
    digests = [np.frombuffer(b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in table.ids()),
                             np.uint64) for table in tables]
    values, counts = np.unique(np.concatenate(digests), return_counts=True)
    several, found = values[counts > 1], {}
    for number, (table, own) in enumerate(zip(tables, digests)):
        for at in np.flatnonzero(np.isin(own, several)).tolist():
            found.setdefault(table[at].id, []).append((number, at))
    return [places for places in found.values() if len(places) > 1]


def repeats(same_id: list[tuple[int, Sample]]) -> list[int | None]:
    """Of the samples of one id: the number of the first folder before that has the same one, or None."""
    return [next((number for number, other in same_id[:i] if same(sample, other)), None)
            for i, (_, sample) in enumerate(same_id)]


def same(one: Sample, other: Sample) -> bool:
    """Whether two samples of one id are the same response, be one cut shorter. Reads both files' token ids."""
    if one.start != other.start:
        return False
    ids = [token_ids(sample) for sample in (one, other)]
    length = min(map(len, ids))
    return np.array_equal(ids[0][:length], ids[1][:length])


def token_ids(sample: Sample) -> np.ndarray:
    """(T,) of its file, whole. Raises UserError."""
    def read():
        with StateFile(sample.path) as file:
            return file.input_ids()
    try:
        return patiently(read, sample.path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{sample.path}: not readable ({error}). It was whole when it was checked: see to the "
                        "disk.") from None
