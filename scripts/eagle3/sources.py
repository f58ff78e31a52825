"""The folders of hidden states of a run, read as one set of samples: those it trains on, and the one held out.

Each folder is checked by itself (checked.py). A sample that several folders hold (the same id, prompt and tokens) is
used once, and never trained on when it is held out. Other samples that share an id (two runs may both number theirs
from 0) are all used, under the name <number of the folder, from 1>/<id>.
"""
from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from eagle3.batches import Sample
from eagle3.checked import Checked, usable_samples
from eagle3.checkpoints import begun
from eagle3.hosts import good_everywhere
from eagle3.inputs import read_index
from eagle3.patience import patiently
from eagle3.stage import UserError, read_manifest, sha256_file
from eagle3.states import StateFile, kind_of, layer_list
from eagle3.target import Target

HELD_OUT, REPEATED = "held out by --val-data-dir", "also in an earlier --data-dir"


@dataclass
class Source:
    """A folder of hidden states that 03 has finished, as `checked` reads it."""
    folder: Path
    facts: dict  # its manifest
    index: list  # index.jsonl's rows
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
    samples: list[Sample]  # of those to train on
    held_out: list[Sample] | None  # None: there is no such folder
    dropped: dict  # {reason: count}
    agreement: float  # share of response tokens that are the target's argmax
    repeated: set  # ids left out, because an earlier folder or the held-out one has the same sample


# ---- folders ----
def read_source(folder: Path, target: Target, draft_ids: torch.Tensor, cache: Path) -> Source:
    """Raises UserError where 03 has not finished there, or the states are of another target."""
    facts = read_manifest(folder, "03_extract")
    if facts.get("bounded"):
        raise UserError(f"{folder}: extracted in bounded mode, so most of its samples are gone. Name another folder.")
    if facts["hidden_size"] != target.config["hidden_size"]:
        raise UserError(f"{folder}: states of hidden size {facts['hidden_size']}, the target at {target.folder} has "
                        f"{target.config['hidden_size']}.")
    manifest_sha256 = sha256_file(folder / "manifest.json")
    return Source(folder, facts, read_index(folder, facts["index_sha256"]), target, draft_ids, manifest_sha256, cache)


def read_sources(args, inputs, say) -> Sources:
    """All folders that the flags name; their hashes go into `inputs.hashes`. Raises UserError.

    args: data_dirs (the first one is what `inputs` was read from), data_weight, val_data_dir, output_dir, follow and
    loss_on.
    """
    cache, several = args.output_dir / "checked", len(args.data_dirs) > 1
    sources = [Source(args.data_dir, inputs.facts, inputs.index, inputs.target, inputs.draft_ids,
                      inputs.hashes.get("hidden_states", ""), cache / "1" if several else cache)]
    sources += [read_source(folder, inputs.target, inputs.draft_ids, cache / str(number))
                for number, folder in enumerate(args.data_dirs[1:], 2)]
    held_out = None
    if args.val_data_dir:
        held_out = read_source(args.val_data_dir, inputs.target, inputs.draft_ids, cache / "val")
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
        parts.append([replace(sample, weight=source.weight) for sample in checked.samples])
        dropped, agreed, predicted = dropped + checked.dropped, agreed + checked.agreed, predicted + checked.predicted
    if sources.held_out:
        checked = usable(sources.held_out)
        held_out, dropped = checked.samples, dropped + checked.dropped
        if not held_out:
            raise UserError(f"{sources.held_out.folder}: no usable sample to validate on {dict(checked.dropped)}.")
    folders = [source.folder for source in sources.train]
    samples, repeated = once(parts, held_out or [], args.num_workers)
    for (number, earlier), names in sorted(repeated.items()):
        where = folders[earlier - 1] if earlier else sources.held_out.folder
        process.say(f"{len(names)} samples of {folders[number - 1]} are left out: {where} has them too (same id, "
                    f"prompt and tokens), {names[0]} for one")
        dropped[REPEATED if earlier else HELD_OUT] += len(names)
    per_folder = Counter(sample.path.parents[1] for sample in samples)
    for source in sources.train if len(folders) > 1 else ():
        process.say(f"{source.folder} | {per_folder[source.folder]} samples | weight {source.weight:g}")
    needed = 1 + (args.val_ratio > 0 and held_out is None)
    if not args.follow and len(samples) < needed:
        more = ", one of them to validate" if needed > 1 else ""
        raise UserError(f"{', '.join(map(str, folders))}: {len(samples)} usable samples {dict(dropped) or ''}; at "
                        f"least {needed} are needed{more}.")
    return Found(samples, held_out, dict(sorted(dropped.items())), agreed / max(1, predicted),
                 {name for names in repeated.values() for name in names})


def once(parts: list[list[Sample]], held_out: list[Sample], workers: int) -> tuple[list[Sample], dict]:
    """(the samples of all folders, each once and under a name of its own, {(folder, the one that has them too): ids}).

    Folders by number: 0 is the held-out one, whose samples are not among those returned.
    """
    holders = {}  # {id: [(number, sample)]}
    for number, part in enumerate([held_out, *parts]):
        for sample in part:
            holders.setdefault(sample.id, []).append((number, sample))
    samples, repeated = [same_id[0][1] for same_id in holders.values() if len(same_id) == 1 and same_id[0][0]], {}
    shared = [same_id for same_id in holders.values() if len(same_id) > 1]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for same_id, earlier in zip(shared, pool.map(repeats, shared)):
            kept = [(number, sample) for (number, sample), other in zip(same_id, earlier) if number and other is None]
            samples += [replace(sample, id=f"{number}/{sample.id}") if len(kept) > 1 else sample
                        for number, sample in kept]
            for (number, sample), other in zip(same_id, earlier):
                if other is not None:
                    repeated.setdefault((number, other), []).append(sample.id)
    return samples, repeated


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
