"""What 04 writes into its output folder: checkpoints and best/.

A kill between any two steps is mended, and damage to what was written is found.

checkpoint-<step>/ holds the drafter as SGLang loads it (config.json, model.safetensors, eagle3.json) and
training_state/ beside it; best/ is a copy of the best one without that state. training_state/SHA256SUMS names all
that was written (`sha256sum -c training_state/SHA256SUMS` in the checkpoint's folder checks it, too).
"""
from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from eagle3.drafter import Drafter, NamedTensors
from eagle3.patience import patiently
from eagle3.stage import UserError, read_json, sha256_file, sync_folder, write_atomic
from eagle3.tensor_file import save_file

SUMS = Path("training_state/SHA256SUMS")
STATE, STATE_TENSORS = Path("training_state/state.json"), Path("training_state/state.safetensors")
OWN_FOLDER = re.compile(r"(checkpoint-\d+|best)\.(tmp|old)")  # between two renames
OWN_FILE = re.compile(r"(metrics\.jsonl|val_ids\.json|stage\.json|manifest\.json|training|not-finite-\d+-rank\d+\.json)"
                      r"\.tmp|\.[0-9a-f]{32}\.seen")  # the latter: hosts.seen_of


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
    """Ends what a kill cut short. Only what 04 itself makes is touched: a user's own *.old and *.tmp stay."""
    for path in sorted(output.iterdir()):
        if OWN_FILE.fullmatch(path.name) and path.is_file():
            path.unlink()
        elif OWN_FOLDER.fullmatch(path.name) and path.is_dir():
            final = path.with_suffix("")
            if path.suffix == ".old" and not final.exists():
                os.replace(path, final)
            else:
                shutil.rmtree(path)


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each, ascending."""
    found = [path for path in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((int(path.name.split("-")[1]), path) for path in found)


def begun(output: Path) -> bool:
    """Whether something in there hangs on the config that it was begun with: a checkpoint, if only half renamed."""
    return (output / "manifest.json").exists() or any(
        re.fullmatch(r"checkpoint-\d+(\.old|\.damaged)?", path.name) for path in output.glob("checkpoint-*"))


def link(source, target):
    try:
        os.link(source, target)
    except OSError:  # a filesystem without hard links
        shutil.copy2(source, target)


def make_best(output: Path, step: int) -> None:
    """best/ = the drafter of checkpoint-<step>, without its training state."""
    best, checkpoint = output / "best", output / f"checkpoint-{step}"
    if best_step(output) == step and (not checkpoint.exists() or same_weights(best, checkpoint)):
        return
    left_out = shutil.ignore_patterns("training_state")
    shutil.copytree(checkpoint, output / "best.tmp", ignore=left_out, copy_function=link)
    replace_folder(output / "best.tmp", best)


def best_step(output: Path) -> int | None:
    try:
        return json.loads((output / "best/eagle3.json").read_text())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def same_weights(best: Path, checkpoint: Path) -> bool:
    """Whether best/ holds what was written as `checkpoint`: the same file, or one of the same bytes."""
    files = [folder / "model.safetensors" for folder in (best, checkpoint)]
    if not all(map(Path.exists, files)):
        return False
    return os.path.samefile(*files) or sha256_file(files[0]) == sha256_file(files[1])


# ---- saving ----
@contextlib.contextmanager
def writing(output: Path):
    """A full or failing disk in here is a UserError that says what to do; what lay there before stays as it is."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        number = getattr(error, "errno", None) or int((re.search(r"os error (\d+)", reason) or [0, 0])[1])
        full = number in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Make room" if full else "See to that disk"
        raise UserError(f"{output}: could not be written to ({reason}). The checkpoints there are untouched. "
                        f"{remedy}, then run the same command again; it goes on from the last one.") from None


def save_checkpoint(args, draft: Drafter, tensors: dict[str, torch.Tensor], inputs, provenance: dict,
                    state: dict) -> None:
    """checkpoint-<step>/, then best/ if state["best"] names a step, then the oldest go.

    tensors: `Trainer.tensors`, on any device; provenance: eagle3.json; state: what the loop needs to go on, {"step",
    "best": {"step", "accept_length"} or None, ...}. Of `draft` only what never changes is used: this may run beside
    the steps. Raises UserError where the disk does not take it.
    """
    output, step = args.output_dir, state["step"]
    folder, temporary = output / f"checkpoint-{step}", output / f"checkpoint-{step}.tmp"
    with writing(output), removing(temporary, output / "best.tmp"):
        (temporary / "training_state").mkdir(parents=True)
        weights = tensors["average" if args.ema else "master"]
        exported = draft.export(NamedTensors(draft.shape.weights(), weights.dtype, weights.device, weights),
                                getattr(torch, args.export_dtype))
        sums = {"model.safetensors": save_file(exported, temporary / "model.safetensors", {"format": "pt"})}
        del exported
        (temporary / "config.json").write_text(json.dumps(inputs.config_json, indent=1) + "\n")
        provenance = provenance | {"weights_sha256": sums["model.safetensors"]}
        (temporary / "eagle3.json").write_text(json.dumps(provenance, indent=1) + "\n")
        sums[str(STATE_TENSORS)] = save_file(tensors, temporary / STATE_TENSORS)
        (temporary / STATE).write_text(json.dumps(state) + "\n")
        sums = sums_of(temporary, sums)
        (temporary / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
        replace_folder(temporary, folder)
        if state["best"]:
            make_best(output, state["best"]["step"])
        for path in superseded(output, step, args.keep_checkpoints):
            shutil.rmtree(path)


@contextlib.contextmanager
def removing(*temporary: Path):
    """Where it fails in here, these go: their room is needed more than their bytes."""
    try:
        yield
    except (OSError, SafetensorError):
        for folder in temporary:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def checkpoint_bytes(args, trainer) -> tuple[int, int]:
    """(of the training state, of the exported drafter)."""
    state = sum(tensor.numel() * tensor.itemsize for tensor in trainer.tensors().values())
    return state, trainer.draft.master.flat.numel() * getattr(torch, args.export_dtype).itemsize


def superseded(output: Path, step: int, keep: int) -> list[Path]:
    """Checkpoints that may go once that of `step` is there: all but the last `keep`.

    Those of a SIGTERM do not count, so that the others are the same whether there was one or not.
    """
    found = [path for other, path in checkpoints(output) if other <= step]
    regular = [path for path in found if not cut_short(path)]
    stay = {*regular[-keep:], output / f"checkpoint-{step}"}
    return [path for path in found if path not in stay]


def cut_short(folder: Path) -> bool:
    """Whether it was saved because of a SIGTERM, so not at the end of a step that saves."""
    try:
        return "cut_short" in json.loads((folder / STATE).read_text())
    except (OSError, ValueError, TypeError):
        return False


def sums_of(folder: Path, known: dict[str, str] | None = None) -> dict[str, str]:
    """{path in `folder`: sha256} of all files but SHA256SUMS itself; those in `known` are not read."""
    sums = dict(known or {})
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {str(SUMS), *sums}
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        return sums | dict(zip(names, pool.map(lambda name: sha256_file(folder / name), names)))


# ---- loading ----
@dataclass
class Found:
    """The newest good checkpoint (None: there is none yet) and what is newer and damaged: {folder: what is wrong}."""
    folder: Path | None = None
    damaged: dict[Path, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(f"{folder} is damaged ({problem})" for folder, problem in self.damaged.items())


def newest_good(output: Path, tensors: dict[str, torch.Tensor]) -> Found:
    """Raises UserError where all that there are are damaged. tensors: what a training state must hold."""
    found = Found()
    for _, folder in reversed(checkpoints(output)):
        problem = problem_of(folder, tensors)
        if not problem:
            found.folder = folder
            return found
        found.damaged[folder] = problem
    if found.damaged:
        raise UserError(f"{found}, and no older one is there. Put it back from a copy, or remove it to begin anew.")
    return found


def problem_of(folder: Path, tensors: dict[str, torch.Tensor]) -> str | None:
    """What is wrong with a checkpoint's files, or None. One written before there were SHA256SUMS is opened only."""
    try:
        if (folder / SUMS).exists():
            lines = patiently((folder / SUMS).read_text, folder / SUMS).splitlines()
            wanted = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
            found = patiently(lambda: sums_of(folder), folder)
            needed = {*map(str, (STATE, STATE_TENSORS)), "model.safetensors", "config.json", "eagle3.json"}
            if unnamed := sorted(needed - wanted.keys()):
                return f"{SUMS} does not name {unnamed[0]}"
            for name, digest in sorted(wanted.items()):
                if digest != found.get(name):
                    return f"{name} is not what was written" if name in found else f"{name} is missing"
        state = json.loads((folder / STATE).read_text())
        if f"checkpoint-{state['step']}" != folder.name:
            return f"{STATE} is of step {state['step']}"
        with safe_open(folder / "model.safetensors", "pt"), safe_open(folder / STATE_TENSORS, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        return " ".join(f"{error}".split())[:200] or type(error).__name__
    differs = [name for name, tensor in tensors.items() if shapes.get(name) != list(tensor.shape)]
    return f"{STATE_TENSORS} has no {differs[0]} of this drafter" if differs else None


def load_checkpoint(folder: Path, trainer) -> dict:
    """Fills the trainer; returns the state that was saved beside it."""
    state = read_json(folder / STATE)
    stored = load_file(folder / STATE_TENSORS)
    for name, tensor in trainer.tensors().items():
        tensor.copy_(stored[name])
    trainer.draft.refresh()
    trainer.step = state["step"]
    return state


def set_aside(found: Found) -> None:
    """Damaged checkpoints become checkpoint-<step>.damaged.

    They are looked at no more, and stay until someone removes them.
    """
    for folder in found.damaged:
        aside = folder.with_name(folder.name + ".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)


def restore_best(output: Path, best: dict | None) -> dict | None:
    """best/ as `best` ({"step", "accept_length"}) says, and what it then is.

    None where the checkpoint that it would be made of is gone, since a later one that is damaged now was better: that
    one is made again.
    """
    if best and best_step(output) != best["step"] and not (output / f"checkpoint-{best['step']}").exists():
        return None
    if best:
        make_best(output, best["step"])
    return best


# ---- room ----
def check_room(args, trainer, saves: int) -> None:
    """Raises UserError where the disk has no room for the checkpoints to come; saves: how many they are."""
    state, model = checkpoint_bytes(args, trainer)
    there = checkpoints(args.output_dir)
    held = sum(path.stat().st_size for _, folder in there for path in folder.rglob("*") if path.is_file())
    most = min(args.keep_checkpoints + 1 + sum(cut_short(folder) for _, folder in there), len(there) + saves)
    needed = most * (state + model) + model  # best/ may be of one that is gone
    free = shutil.disk_usage(args.output_dir).free
    if saves and needed > held + free:
        raise UserError(f"{args.output_dir}: {most} checkpoints of {(state + model) / 1e9:,.1f} GB and best/ take "
                        f"{needed / 1e9:,.1f} GB (--keep-checkpoints {args.keep_checkpoints}, and the next one before "
                        f"the oldest goes); {(held + free) / 1e9:,.1f} GB are there for them. Make room, or lower "
                        "--keep-checkpoints.")


def write_val_ids(output: Path, val: list) -> None:
    write_atomic(output / "val_ids.json", json.dumps({"ids": [sample.id for sample in val]}, indent=1) + "\n")
