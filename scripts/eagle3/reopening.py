"""03's output folder as 03 finds it: new, begun, complete, closed, or to grow."""
from __future__ import annotations

import time
from pathlib import Path

from eagle3.growth import set_back
from eagle3.journal import Journal, read_plan
from eagle3.samples import Sample, read_ids, read_samples
from eagle3.stage import UserError, log, open_stage, read_manifest
from eagle3.states import KINDS, StateFile, check_ids, kind_of, sample_path

STAGE = "03_extract"
CLOSED = "closed"  # why a sample was left out that --close did not wait for


def open_folder(args, folder: Path, inputs: dict, parts: list[Path]):
    """The lock of the output folder, to be kept. Raises UserError: begun with another config, or at work.

    Until a sample has landed any config goes: what 03 advises before must be possible in the folder that hears it.
    Afterwards --limit may change, and the responses (`parts`) may grow.
    """
    landed, bounded = folder / "landed.jsonl", {"bounded": True} if args.max_disk_gb else {}
    states = {"states": args.states} if args.states != KINDS[0] else {}  # as in folders of before there were others
    config = {"max_length": args.max_length, "limit": args.limit, "inputs": inputs} | states | bounded

    def renew(old: dict) -> dict | None:
        if not landed.exists() or not landed.stat().st_size:
            return None
        if kind_of(old) != args.states:
            raise UserError(f"{folder}: begun with --states {kind_of(old)}, now {args.states}. One folder cannot hold "
                            "both: use the old value or another folder.")
        if bounded or old.get("bounded"):  # 04 has planned its releases by all samples
            return old
        if old.get("inputs") != inputs and old.get("max_length") == args.max_length:
            check_grown(args, folder, parts)
            old = old | {"inputs": inputs}
        return old | {"limit": args.limit}

    lock = open_stage(folder, config, set(), renew)
    if not bounded:
        (folder / "bound.json").unlink(missing_ok=True)  # of a begin without samples
    return lock


def check_grown(args, folder: Path, parts: list[Path]) -> None:
    """That the responses hold all that this folder was begun with, as it was. Raises UserError where they do not.

    By id and length for what was planned; for what lies in place its file's token ids are the response's, too.
    """
    samples = {sample.id: sample for sample in read_samples(parts, args.max_length, 0)[0]}
    journal = Journal(folder)
    journal.file.close()
    planned = {row["id"]: row for row in read_plan(folder)} | journal.rows
    told = time.monotonic()
    for number, (sample_id, row) in enumerate(planned.items(), 1):
        if why := changed(samples.get(sample_id), row, folder, parts):
            raise UserError(f"{args.data_dir}: has not only grown since {folder} was begun with it: {sample_id} {why}. "
                            "Use the old responses or another --output-dir.")
        if time.monotonic() - told > args.log_interval:
            told = time.monotonic()
            log(f"the responses are others: comparing {number:,}/{len(planned):,} samples")
    log(f"the responses have grown: the {len(planned):,} samples planned here are in them as they were, of "
        f"{len(samples):,} now")


def changed(sample: Sample | None, row: dict, folder: Path, parts: list[Path]) -> str:
    """How a response differs from the line of a plan or journal about it, and from its file; "" where it does not."""
    if sample is None:
        return "is not in it any more"
    if (sample.tokens, sample.prompt_len) != (row["tokens"], row["prompt_len"]):
        return (f"has {sample.tokens} tokens, {sample.prompt_len} of them prompt, where it had {row['tokens']} and "
                f"{row['prompt_len']}")
    try:
        with StateFile(sample_path(folder, sample.id)) as file:
            check_ids(file, read_ids(parts, sample), sample.prompt_len)
    except FileNotFoundError:
        return ""  # not in place, so it is extracted as it is now
    except (OSError, ValueError) as error:
        return f"differs from its file ({error})"
    return ""


def is_complete(args, folder: Path, inputs: dict) -> bool:
    """Whether manifest.json stands there, and for what is asked for now; another one is set back."""
    if not (folder / "manifest.json").exists():
        return False
    manifest = read_manifest(folder, STAGE)
    before, closed = manifest.get("config", {}).get("limit", 0), manifest.get("closed", 0)
    same = manifest.get("inputs") == inputs
    if before == args.limit and same and (args.close or not closed):
        return True
    was = f"closed with {closed:,} samples left out" if closed else f"complete with --limit {before}"
    log(f"{was}, now --limit {args.limit}{'' if same else ' of more responses'}: going on")
    set_back(folder, STAGE)
    return False
