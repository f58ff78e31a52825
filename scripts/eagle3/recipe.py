"""Defaults that hang on the run: what was seen to give the drafter that is accepted most.

A flag that is given stays as it is. The measurements are in scripts/README.md ("The recipe"). A folder that was begun
goes on with the values it began with.
"""
from __future__ import annotations

import math
from pathlib import Path

from eagle3 import mla
from eagle3.checkpoints import begun
from eagle3.drafter import kind_of
from eagle3.sglang_draft import completed
from eagle3.stage import UserError, read_json
from eagle3.target import version_numbers

# What the absence of a flag meant before it existed, or before its default hung on the run
BEFORE = {"optimizer": "adamw", "lr": 3e-5, "architecture": "llama", "draft_layers": 1, "fc_norm": False,
          "norm_before_fc": False, "norm_output": False, "loss_on": "response"}
KIND = ("architecture", "draft_layers", "fc_norm", "norm_before_fc", "norm_output")
NORMS_FROM = {"llama": "0.5.12", "mla": mla.NORMS_FROM}  # the SGLang release that serves fc_norm and norm_output
# Best peak rate at width 576 and 8,192 tokens a step, and the power of the width by which it falls: fitted on a real
# target of width 576 and on made-up ones of 576, 2,048 and 7,168
RATES = {"adamw": (1.5e-3, 1.3), "muon": (2.0e-3, 1.15)}
WIDTH, STEP_TOKENS = 576, 8192
FAR_OFF = 4


def old_config(output: Path) -> dict | None:
    """The config that a folder was begun with; None for a new one. Raises UserError."""
    path = output / "stage.json"
    return read_json(path) if path.exists() and begun(output) else None


def flag(name: str) -> str:
    return name.replace("_", "-")


def fill_kind(args, version: str) -> None:
    """The kind of the drafter where flags leave it open. Raises UserError.

    As the folder began, as --finetune-from is, else one layer with EAGLE-3.1's norms (fc_norm and norm_output) if the
    SGLang that serves it (`version`) knows them.
    """
    old = old_config(args.output_dir) if args.output_dir else None
    norms = version_numbers(version) >= version_numbers(NORMS_FROM[args.architecture or "llama"])
    kind = {"architecture": "llama", "draft_layers": 1, "fc_norm": norms and not args.norm_before_fc,
            "norm_before_fc": False, "norm_output": norms}
    if args.finetune_from:
        kind = kind_of(completed(read_json(args.finetune_from / "config.json")))
    if old is not None:
        kind = {name: old.get(flag(name), BEFORE[name]) for name in KIND}
    for name in KIND:
        if getattr(args, name) is None:
            setattr(args, name, kind[name])
    if args.fc_norm and args.norm_before_fc:
        raise UserError("--fc-norm and --norm-before-fc both norm what fc is fed. Choose one.")
    if args.architecture == "mla" and (args.norm_before_fc or args.draft_layers > 1):
        raise UserError("--architecture mla is served with one layer and without --norm-before-fc. Leave out "
                        "--draft-layers and --norm-before-fc.")


def usual_kv_heads(target: dict, heads: int) -> int:
    """KV heads of a drafter with so many heads where nothing names them. target: its text config.

    The target's own where it has some (MHA, GQA); where its attention is MLA, whose config names as many KV heads as
    heads, 8, for the drafter's cache to stay small.
    """
    own = target.get("num_key_value_heads")
    if own and "kv_lora_rank" not in target and heads % own == 0:
        return own
    return 8 if heads % 8 == 0 else heads


def usual_rate(optimizer: str, hidden: int, step_tokens: int) -> float:
    """The peak learning rate for a drafter of this width and so many tokens an optimizer step, two digits of it."""
    rate, power = RATES[optimizer]
    return float(f"{rate * (WIDTH / hidden) ** power * math.sqrt(step_tokens / STEP_TOKENS):.1e}")


def fill_rate(args, hidden: int, world: int) -> list[str]:
    """--optimizer and --lr where flags leave them open; lines for the log, why they are what they are.

    An --lr without an --optimizer is AdamW's, as it was before there was a choice. hidden: the drafter's width.
    """
    old, said = old_config(args.output_dir), []
    if args.optimizer is None and old is not None:
        args.optimizer = old.get("optimizer", BEFORE["optimizer"])
    elif args.optimizer is None:
        args.optimizer = "muon" if args.lr is None else "adamw"
        if args.lr is not None:
            said.append("optimizer adamw: --lr without --optimizer is AdamW's; without both it would be muon")
    tokens = args.batch_tokens * args.grad_accum * world
    usual = usual_rate(args.optimizer, hidden, tokens)
    if args.lr is None and old is not None:
        args.lr = old.get("lr", BEFORE["lr"])
        said.append(f"lr {args.lr:g}: as this folder began")
    elif args.lr is None:
        args.lr = usual
        said.append(f"lr {usual:g}: the usual one for {args.optimizer} at width {hidden} and {tokens:,} tokens a step")
    elif args.lr and not 1 / FAR_OFF <= args.lr / usual <= FAR_OFF:
        said.append(f"lr {args.lr:g} is {max(args.lr / usual, usual / args.lr):.0f} times off the usual {usual:g} for "
                    f"{args.optimizer} at this width; kept")
    return said


def recorded(config: dict) -> dict:
    """A stage's config without what says the same as its absence did before the flag existed."""
    before = {flag(name): value for name, value in BEFORE.items() if name != "lr"}
    return {key: value for key, value in config.items() if key not in before or value != before[key]}
