"""03's output folder as 03 finds it: new, begun, complete, closed, or to grow."""
from __future__ import annotations

from pathlib import Path

from eagle3.growth import set_back
from eagle3.stage import UserError, log, open_stage, read_manifest
from eagle3.states import KINDS, kind_of

STAGE = "03_extract"
CLOSED = "closed"  # why a sample was left out that --close did not wait for


def open_folder(args, folder: Path, inputs: dict):
    """The lock of the output folder, to be kept. Raises UserError: begun with another config, or at work.

    Until a sample has landed any config goes: what 03 advises before must be possible in the folder that hears it.
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
        return old if bounded else old | {"limit": args.limit}  # bounded: 04 has planned its releases by all samples

    lock = open_stage(folder, config, set(), renew)
    if not bounded:
        (folder / "bound.json").unlink(missing_ok=True)  # of a begin without samples
    return lock


def is_complete(args, folder: Path) -> bool:
    """Whether manifest.json stands there, and for what is asked for now; another one is set back."""
    if not (folder / "manifest.json").exists():
        return False
    manifest = read_manifest(folder, STAGE)
    before, closed = manifest.get("config", {}).get("limit", 0), manifest.get("closed", 0)
    if before == args.limit and (args.close or not closed):
        return True
    was = f"closed with {closed:,} samples left out" if closed else f"complete with --limit {before}"
    log(f"{was}, now --limit {args.limit}: going on")
    set_back(folder, STAGE)
    return False
