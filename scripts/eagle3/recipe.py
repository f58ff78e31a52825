"""Defaults that hang on the run: what was seen to give the drafter that is accepted most.

A flag that is given stays as it is. The measurements are in scripts/README.md ("The recipe"). A folder that was begun
goes on with the values it began with.
"""
from __future__ import annotations

from pathlib import Path

from eagle3.drafter import kind_of
from eagle3.stage import UserError, read_json

# What a flag that is left out means for a new folder, and what it meant before the flag existed
KIND = {"draft_layers": 1, "fc_norm": False, "norm_before_fc": False, "norm_output": False}
KIND_BEFORE = {"draft_layers": 1, "fc_norm": False, "norm_before_fc": False, "norm_output": False}
LOOP = {"optimizer": "adamw"}
LOOP_BEFORE = {"optimizer": "adamw"}


def old_config(output: Path) -> dict | None:
    """The config that a folder was begun with; None for a new one. Raises UserError."""
    path = output / "stage.json"
    return read_json(path) if path.exists() else None


def flag(name: str) -> str:
    return name.replace("_", "-")


def fill(args) -> None:
    """Fills in what was left out, before anything is read. Raises UserError."""
    old = old_config(args.output_dir)
    for name in LOOP:
        if getattr(args, name) is None:
            setattr(args, name, LOOP[name] if old is None else old.get(flag(name), LOOP_BEFORE[name]))
    source = read_json(args.finetune_from / "config.json") if args.finetune_from else None
    for name in KIND:
        if getattr(args, name) is None:
            value = KIND[name] if old is None else old.get(flag(name), KIND_BEFORE[name])
            setattr(args, name, kind_of(source)[name] if source and old is None else value)
    if args.fc_norm and args.norm_before_fc:
        raise UserError("--fc-norm and --norm-before-fc both norm what fc is fed. Choose one.")


def recorded(config: dict) -> dict:
    """A stage's config without what says the same as its absence did before the flag existed."""
    before = {flag(name): value for name, value in (KIND_BEFORE | LOOP_BEFORE).items()}
    return {key: value for key, value in config.items() if key not in before or value != before[key]}
