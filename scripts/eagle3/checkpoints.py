"""What 04 writes into its output folder: checkpoints, best/, metrics.jsonl and the plot. A kill between any two steps
is mended.
 checkpoint-<step>/ holds the drafter as SGLang loads it (config.json, model.safetensors, eagle3.json) and
training_state/ beside it; best/ is a copy of the best one without that state. """
from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle3.stage import read_json, sha256_file, sync_folder, write_atomic


# ---- folders ----
def replace_folder(temporary: Path, final: Path) -> None:
    """Put `temporary` in the place of `final`. `repair` ends what a crash cut short between the two renames."""
    for path in [*temporary.rglob("*"), temporary]:
        sync_folder(path)  # files as well
    old = final.with_name(final.name + ".old")
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    sync_folder(final.parent)  # before older ones go
    shutil.rmtree(old, ignore_errors=True)


def repair(output: Path) -> None:
    for old in output.glob("*.old"):
        final = old.with_suffix("")
        shutil.rmtree(old) if final.exists() else os.replace(old, final)
    for temporary in output.glob("*.tmp"):
        shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each, ascending."""
    found = [path for path in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((int(path.name.split("-")[1]), path) for path in found)


def link(source, target):
    try:
        os.link(source, target)
    except OSError:  # a filesystem without hard links
        shutil.copy2(source, target)


def make_best(output: Path, step: int) -> None:
    """best/ = the drafter of checkpoint-<step>, without its training state."""
    best, checkpoint = output / "best", output / f"checkpoint-{step}"
    if best.exists() and read_json(best / "eagle3.json").get("step") == step:
        return
    left_out = shutil.ignore_patterns("training_state")
    shutil.copytree(checkpoint, output / "best.tmp", ignore=left_out, copy_function=link)
    replace_folder(output / "best.tmp", best)


# ---- checkpoints ----
def save_checkpoint(args, trainer, inputs, provenance: dict, state: dict) -> None:
    """checkpoint-<trainer.step>/, then best/ if state["best"] names a step, then the oldest go.

    provenance: eagle3.json; state: what the loop needs to go on, {"best": {"step", "accept_length"} or None, ...}.
    """
    output, step = args.output_dir, trainer.step
    folder, temporary = output / f"checkpoint-{step}", output / f"checkpoint-{step}.tmp"
    (temporary / "training_state").mkdir(parents=True)
    exported = trainer.draft.export(trainer.average, getattr(torch, args.export_dtype))
    save_file(exported, temporary / "model.safetensors", {"format": "pt"})
    (temporary / "config.json").write_text(json.dumps(inputs.config_json, indent=1) + "\n")
    provenance = {**provenance, "weights_sha256": sha256_file(temporary / "model.safetensors")}
    (temporary / "eagle3.json").write_text(json.dumps(provenance, indent=1) + "\n")
    save_file(trainer.tensors(), temporary / "training_state" / "state.safetensors")
    (temporary / "training_state" / "state.json").write_text(json.dumps({"step": step, **state}) + "\n")
    replace_folder(temporary, folder)
    if state["best"]:
        make_best(output, state["best"]["step"])
    for _, old in checkpoints(output)[:-args.keep_checkpoints]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, trainer) -> dict:
    """Fills the trainer; returns the state that was saved beside it."""
    state = read_json(folder / "training_state" / "state.json")
    stored = load_file(folder / "training_state" / "state.safetensors")
    for name, tensor in trainer.tensors().items():
        tensor.copy_(stored[name])
    trainer.draft.refresh()
    trainer.step = state["step"]
    return state


def write_val_ids(output: Path, val: list) -> None:
    write_atomic(output / "val_ids.json", json.dumps({"ids": [sample.id for sample in val]}, indent=1) + "\n")
