"""A drafter's folder, ours or anyone's: its config.json, its tensors in whatever files, the layers that it is fed.

One way in for 02 --from-drafter, 04 --finetune-from and --evaluate, 05 and its doctor. Names, layouts and keys are
taken as SGLang takes them (sglang_draft.py); what it would drop, ignore or leave unfilled is refused by name.

Shapes: H hidden, Vt target vocabulary, Vd draft vocabulary.
"""
from __future__ import annotations

import functools
import hashlib
import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from eagle3.sglang_draft import (ARCHITECTURE, LAYER_IDS, MLA, Loaded, beyond, completed, eagle, ignored, is_known,
                                 loaded, misshapen, takes_targets_head, unread)
from eagle3.stage import UserError, read_json, sha256_file
from eagle3.target import layer_rule, version_numbers

INDEX = "model.safetensors.index.json"
NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
FLOATS = ("BF16", "F16", "F32", "torch.bfloat16", "torch.float16", "torch.float32")
OLD_RULE = "0.5.12"  # up to here SGLang reads layer ids otherwise
SAID_AS = {"hidden": "hidden size", "kv_heads": "KV heads", "vocab": "vocabulary", "draft_vocab": "draft vocabulary",
           "rms_norm_eps": "rms_norm_eps", "rope_theta": "rope_theta", "rope_scaling": "RoPE scaling",
           "max_positions": "max positions", "aux_states": "aux states", "aux_norm": "norm of the aux states",
           "norm_output": "norm_output", "latent": "latent attention", "o_bias": "bias of o_proj",
           "fc_bias": "bias of fc"}


# ---- files ----
def weight_files(folder: Path) -> list[Path]:
    """The files whose tensors SGLang loads: safetensors (those of an index, where one is), else what torch writes."""
    found = sorted(folder.glob("*.safetensors"))
    if found and (folder / INDEX).is_file():
        named = {folder / str(name) for name in index_of(folder).values()}
        return sorted(path for path in named if path in found)
    kept = [path for path in sorted(folder.glob("*.bin")) or sorted(folder.glob("*.pt")) if path.name not in NO_WEIGHTS]
    return found or kept


def index_of(folder: Path) -> dict[str, str]:
    """{tensor: file} of a sharded drafter. Raises UserError."""
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise UserError(f"{folder / INDEX}: no weight_map in it. Copy the folder again.")
    return found


def weights_sha256(folder: Path) -> str:
    """Of the file of weights; of several, of their names and hashes. Raises OSError, UserError."""
    files = weight_files(folder)
    if len(files) == 1:
        return sha256_file(files[0])
    return hashlib.sha256("".join(f"{path.name} {sha256_file(path)}\n" for path in files).encode()).hexdigest()


def unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: not readable ({' '.join(str(error).split())}). Export or copy it again.")


class DrafterFiles:
    """config.json, and the shapes of all tensors; a tensor is read when it is asked for.

    Raises UserError: a file that is missing or cannot be read, or that holds more than tensors.
    """

    def __init__(self, folder: Path):
        self.folder, self.config, self.files = folder, read_json(folder / "config.json"), weight_files(folder)
        self.shapes, self.dtypes, self.holders, self.states = {}, {}, {}, {}
        if (folder / INDEX).is_file():
            for name in sorted({str(name) for name in index_of(folder).values()} - {path.name for path in self.files}):
                raise UserError(f"{folder}/{name}: missing, though {INDEX} names it. Copy the folder again.")
        for path in self.files:
            if path.suffix == ".safetensors":
                self.read_header(path)
            else:
                self.read_state(path)

    def read_header(self, path: Path) -> None:
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():
                    entry = file.get_slice(name)
                    self.shapes[name], self.dtypes[name] = list(entry.get_shape()), entry.get_dtype()
                    self.holders[name] = path
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from None

    def read_state(self, path: Path) -> None:
        """What torch.save wrote: tensors only, so that no code of its author runs here."""
        import torch  # here: the doctor needs none for safetensors

        try:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # a file of before torch 1.6 cannot be mapped
                state = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, OSError, RuntimeError, EOFError, ValueError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"{path}: is not read ({why}). It must hold tensors and nothing else: loading more would "
                            "run code. Convert it to safetensors where you trust it.") from None
        if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
            raise UserError(f"{path}: is no table of tensors. SGLang would not load it. Convert it to safetensors.")
        for name, tensor in state.items():
            self.shapes[name], self.dtypes[name] = list(tensor.shape), str(tensor.dtype)
            self.holders[name], self.states[name] = path, tensor

    def tensor(self, name: str):
        """The torch tensor of that name. Raises UserError."""
        if name in self.states:
            return self.states[name]
        try:
            with safe_open(self.holders[name], "pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise unreadable(self.holders[name], error) from None

    @functools.cached_property
    def d2t(self) -> np.ndarray | None:
        """(Vd,) int64 offsets, as SGLang reads them; None without."""
        name = next((name for name in self.shapes if "d2t" in name), None)
        if name in self.states or name is None:
            return self.states[name].numpy().astype(np.int64) if name else None
        with safe_open(self.holders[name], "np") as file:
            return file.get_tensor(name).astype(np.int64)


def read_about(folder: Path) -> dict:
    """eagle3.json; another trainer's drafter has none. Raises UserError."""
    return read_json(folder / "eagle3.json") if (folder / "eagle3.json").exists() else {}


# ---- what it is ----
def check_config(files: DrafterFiles) -> None:
    """Raises UserError: another architecture, or keys that SGLang or this pipeline does not compute."""
    folder, config = files.folder, files.config
    if not is_known(config):
        raise UserError(f"{folder}/config.json: architectures {config.get('architectures')} is no drafter that this "
                        f"reads ({ARCHITECTURE}, {MLA}). Name a folder of one.")
    if not files.files:
        raise UserError(f"{folder}: no weights there (*.safetensors, *.bin). Name a drafter's folder, as 04_train.py's "
                        "best/ or checkpoint-<step>/.")
    if "draft_vocab_size" not in config:
        raise UserError(f"{folder}/config.json: no draft_vocab_size, without which SGLang does not start. Write it; "
                        "null where the draft has the target's whole vocabulary and lm_head.")
    if lost := ignored(config):
        raise UserError(f"{folder}/config.json: sets {', '.join(lost)}, which SGLang ignores in silence: it would "
                        "serve another drafter than was trained. Take out what it was not trained with.")
    if other := beyond(config):
        raise UserError(f"{folder}/config.json: {', '.join(other)}: this pipeline trains no such drafter.")


def check_tensors(files: DrafterFiles) -> Loaded:
    """Raises UserError unless every parameter is filled, once, by a tensor of its shape, and none is dropped."""
    found = loaded(files.shapes, files.config)
    wrong = [f"{label} {names[:4]}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
             for label, names in (("missing", found.missing), ("dropped by SGLang", found.dropped),
                                  ("filled twice", found.twice)) if names]
    wrong += misshapen(found, files.config)
    wrong += [f"{name} is quantised ({files.dtypes[name]})" for parameter, (name, _) in found.places.items()
              if parameter not in ("d2t", "t2d") and files.dtypes[name] not in FLOATS][:1]
    if wrong:
        raise UserError(f"{files.folder}: its tensors are not those of its config.json: {'; '.join(wrong)}. Mend "
                        "config.json, or export it again.")
    return found


def vocabulary_of(files: DrafterFiles, vocab_size: int) -> np.ndarray:
    """(Vd,) the target ids that it can draft, ascending. Raises UserError; vocab_size: the target's."""
    size, d2t = files.config.get("draft_vocab_size") or vocab_size, files.d2t
    if d2t is None:
        if size != vocab_size:
            raise UserError(f"{files.folder}: {size} draft tokens of {vocab_size}, and no d2t among its tensors says "
                            "which. Export it again.")
        return np.arange(vocab_size)
    ids = d2t + np.arange(len(d2t))
    if len(ids) != size or ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size or (np.diff(ids) < 1).any():
        raise UserError(f"{files.folder}: its d2t, read as offsets as SGLang does, is no map of {size} draft tokens to "
                        f"ascending ids of {vocab_size}. If it holds ids, store offsets: d2t[i] = target_id - i.")
    return ids


@dataclass
class Stored:
    """A drafter's folder, read and found to be one that this pipeline can go on with. `read_drafter` makes it."""
    files: DrafterFiles
    about: dict  # eagle3.json, {} of another trainer's
    shape: object  # drafter.Shape
    draft_ids: np.ndarray  # (Vd,) ascending target ids
    loaded: Loaded
    notes: list[str] = field(default_factory=list)  # what is worth saying of it

    @property
    def folder(self) -> Path:
        return self.files.folder

    def tensors(self, head) -> dict:
        """Its tensors under the names of drafter.Drafter.export. head (Vt, H): the target's lm_head."""
        import torch

        found = {}
        for parameter, (name, rows) in self.loaded.places.items():
            own = parameter.replace("layers.0.", "midlayer.")
            later = own.startswith("layers.") and own.endswith("input_layernorm.weight")  # there and unused
            if not (later or own in ("d2t", "t2d", "embed_tokens.weight") or own.endswith("rotary_emb.inv_freq")):
                found[own] = self.files.tensor(name)[rows]
        if takes_targets_head(self.files.config):
            found["lm_head.weight"] = head[torch.from_numpy(self.draft_ids).to(head.device)].cpu()
        found["d2t"] = torch.from_numpy(self.draft_ids - np.arange(len(self.draft_ids)))
        return found


def read_drafter(folder: Path, target) -> Stored:
    """A drafter to evaluate or to go on from. target: target.Target.

    Raises UserError where it is not whole, is for another target, or SGLang would serve another function.
    """
    from eagle3.drafter import read_shape  # here: it imports torch

    files, about = DrafterFiles(folder), read_about(folder)
    try:
        check_config(files)
        shape = read_shape(completed(files.config))
        if (shape.hidden, shape.vocab) != (target.config["hidden_size"], target.config["vocab_size"]):
            raise UserError(f"{folder}: a drafter for hidden size {shape.hidden} and {shape.vocab} tokens, the target "
                            f"at {target.folder} has {target.config['hidden_size']} and {target.config['vocab_size']}.")
        found = check_tensors(files)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{folder}/config.json: {type(error).__name__} at {error}: no drafter that SGLang loads. Name "
                        "a drafter's folder, as 04_train.py's best/ or checkpoint-<step>/.") from None
    return Stored(files, about, shape, vocabulary_of(files, shape.vocab), found, notes(files.config, found))


def first_release(config: dict) -> str | None:
    """The first SGLang that computes a drafter of this kind; None where config.json describes no such drafter."""
    from eagle3.drafter import read_shape, served_from  # here: it imports torch
    try:
        return served_from(read_shape(completed(config)))
    except (KeyError, TypeError, AttributeError, ValueError, UserError):
        return None


def notes(config: dict, found: Loaded) -> list[str]:
    """What is no fault and worth knowing."""
    said = {"its lm_head is the target's (draft_vocab_size null)": takes_targets_head(config),
            "its embed_tokens are not used: SGLang takes the target's": "embed_tokens.weight" in found.shapes,
            f"{LAYER_IDS} at the top of its config.json is ignored: SGLang looks under eagle_config":
                LAYER_IDS in config,
            f"of its config.json neither SGLang nor this reads {', '.join(unread(config))}": unread(config)}
    return [line for line, there in said.items() if there]


def check_layers(stored: Stored, layers: list[int], where: Path, target: Path, version: str,
                 meant: str | None) -> str | None:
    """That it is fed the layers which `where` holds; None, or what is to be said of its ids. Raises UserError.

    By eagle3.json, else by its ids as the serving SGLang (`version`) reads them for `target` (target.layer_rule). Ids
    that mean these layers to other releases alone are taken, and said: what 04 exports has ids for the release that
    serves it.
    """
    if "capture_layers" in stored.about:
        fed, of = stored.about["capture_layers"], "trained on"
    else:
        ids = eagle(stored.files.config).get(LAYER_IDS)
        rule = layer_rule(target, version, meant)
        if not ids and rule.num_layers is None:
            return "it names no layers; those of the data are taken"
        ids = ids or None
        fed, of = sorted(rule.captured(ids)), f"by its ids {ids} SGLang {version} feeds it"
        old = sorted(layer_rule(target, OLD_RULE, meant).captured(ids))
        if fed != layers == old and version_numbers(version) > version_numbers(OLD_RULE):
            return (f"its ids {ids} mean the data's layers {layers} to SGLang up to {OLD_RULE}, and {fed} to "
                    f"{version}: taken as written for the old ones")
    if fed != layers or stored.shape.aux_states != len(layers):
        raise UserError(f"{stored.folder}: {of} layers {fed} ({stored.shape.aux_states} states), {where} holds "
                        f"{layers}. Extract those.")


# ---- what to say of it ----
def summary(shape) -> str:
    """A drafter's kind and sizes in one line."""
    norm = {"each": ", fc_norm", "all": ", norm_before_fc", "": ""}[shape.aux_norm]
    rope = (shape.rope_scaling or {}).get("rope_type", "plain")
    latent = f", latent {shape.latent.q_lora_rank} and {shape.latent.kv_lora_rank}" if shape.latent else ""
    return (f"{shape.layers} layer(s), {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}{latent}, intermediate "
            f"{shape.intermediate}, draft vocabulary {shape.draft_vocab:,} of {shape.vocab:,}, {shape.aux_states} aux "
            f"states{norm}{', norm_output' if shape.norm_output else ''}"
            f"{', biases' if shape.o_bias else ''}, {rope} RoPE {shape.rope_theta:g}, eps {shape.rms_norm_eps:g}")


def differing(shape, other) -> list[str]:
    """What two shapes differ in: ["KV heads 64 (8)", ...], the second in brackets."""
    return [f"{SAID_AS.get(part.name, part.name.replace('_', ' '))} {getattr(shape, part.name) or 'none'} "
            f"({getattr(other, part.name) or 'none'})"
            for part in fields(shape) if getattr(shape, part.name) != getattr(other, part.name)]
