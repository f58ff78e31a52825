"""What the target tells: its text config, three of its tensors, and which layers an id of SGLang's means.

Shapes: H hidden, Vt target vocabulary.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eagle3.stage import UserError, read_json

TENSORS = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}
FLOATS = ("BF16", "F16", "F32")  # safetensors' names
VERSIONS = Path(__file__).resolve().parents[2] / "patches/versions.json"
NEEDED_KEYS = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
SIZES = {*NEEDED_KEYS, "num_hidden_layers", "num_key_value_heads", "head_dim", "v_head_dim", "kv_lora_rank",
         "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "moe_intermediate_size"}


def text_config(folder: Path) -> dict:
    """The target's config.json; of a multimodal wrapper its `text_config`. Raises UserError."""
    config = read_json(folder / "config.json")
    return with_sizes(config.get("text_config") or config, folder / "config.json")


def with_sizes(config: object, path: Path) -> dict:
    """`config`, whose sizes are whole numbers, as far as they are there. Raises UserError."""
    if not isinstance(config, dict):
        raise UserError(f"{path}: its text_config is no JSON object. Name the target's folder.")
    for key in SIZES & config.keys():
        value, least = config[key], 1 if key in NEEDED_KEYS else 0
        if type(value) is not int or not least <= value < 2**31:
            if value is not None or key in NEEDED_KEYS:
                raise UserError(f"{path}: {key} is {value!r:.40}, not a whole number above 0. Download it again.")
    return config


class Target:
    """The target's text config (`config`), and single tensors of its safetensors, sharded or not. Raises UserError."""

    def __init__(self, folder: Path):
        self.folder, self.config = folder, text_config(folder)
        missing = [key for key in NEEDED_KEYS if key not in self.config]
        if missing:
            raise UserError(f"{folder}/config.json: no {', '.join(missing)} there. "
                            "--verifier-path must name the target's folder.")
        self.files = tensor_files(folder)

    def name(self, what: str) -> str | None:
        """The full name of "embed", "head" or "norm", bare or under a wrapper's `language_model.`; or None."""
        plain = TENSORS[what]
        names = (f"language_model.{plain}", plain, plain.replace("model.", "model.language_model.", 1))
        return next((name for name in names if name in self.files), None)

    def place(self, what: str) -> tuple[Path, str]:
        """(file, tensor name) of "embed", "head" (tied: the embedding) or "norm", from the file's header alone.

        Raises UserError: missing, quantised, another shape than config.json says.
        """
        from safetensors import SafetensorError, safe_open

        name = self.name(what)
        if what == "head" and not name and self.config.get("tie_word_embeddings"):
            name = self.name("embed")
        if not name:
            packed = [key for key in self.files if TENSORS[what].rsplit(".", 1)[0] in key]
            raise UserError(f"{self.folder}: no {TENSORS[what]} among its tensors" +
                            (f", but {packed[0]}: quantised? It must be bf16, fp16 or fp32." if packed else "."))
        path = self.folder / self.files[name]
        try:
            with safe_open(path, "np") as file:
                entry = file.get_slice(name)
                dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not readable ({error}).") from None
        if dtype not in FLOATS:
            raise UserError(f"{self.folder}: {name} is quantised ({dtype}). It must be bf16, fp16 or fp32.")
        hidden = self.config["hidden_size"]
        wanted = (hidden,) if what == "norm" else (self.config["vocab_size"], hidden)
        if shape != wanted:
            raise UserError(f"{self.folder}: {name} has shape {shape}, config.json says {wanted}.")
        return path, name

    def tensor(self, what: str):
        """"embed" and "head" (Vt, H), "norm" (H,), as they are stored. Raises UserError."""
        from safetensors import SafetensorError, safe_open

        path, name = self.place(what)
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not readable ({error}).") from None

    def final_norm(self):
        """(H,) the final norm's weight in float32; None where the checkpoint holds none."""
        return self.tensor("norm").float() if self.name("norm") else None


def tensor_files(folder: Path) -> dict[str, str]:
    """{tensor: file name} of a folder of safetensors, by its index or by the files' headers. Raises UserError."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = read_json(index).get("weight_map", {})
    else:
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, "np") as file:
                    files |= {name: path.name for name in file.keys()}
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: not readable ({error}).") from None
    if not files:
        raise UserError(f"{folder}: no safetensors there. --verifier-path must name the target's folder.")
    return files


# ---- layers: "layer L" is the residual stream entering layer L ----
def version_numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 15) of "0.5.15.post1". Raises UserError: the layer ids hang on them."""
    return release_numbers(version)[:3]


def release_numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 15, 1) of "0.5.15.post1"; what else a version may say (dev, +cu128) changes no order."""
    numbers = re.match(r"v?(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    if not numbers:
        raise UserError(f"{version!r} is no version of SGLang. Name one with --serve-sglang-version, like 0.5.23.")
    return tuple(int(number or 0) for number in numbers.groups())


# What set_eagle3_layers_to_capture makes of a drafter's eagle_aux_hidden_state_layer_ids, of N layers. Which target has
# which rule in which release stands in patches/versions.json, read in SGLang's sources by scripts/layer_rules.py.
RULES = {"as-given": lambda ids, N: ids,
         "add-one": lambda ids, N: [i + 1 for i in ids],
         "add-one-if-first-is-1": lambda ids, N: [i + 1 for i in ids] if ids[:1] == [1] else ids,
         "add-one-unless-max-is-N": lambda ids, N: ids if max(ids, default=0) == N else [i + 1 for i in ids],
         "add-one-default-too": lambda ids, N: [i + 1 for i in ids]}


@dataclass(frozen=True)
class LayerRule:
    """How one SGLang release reads the layer ids for one target. `layer_rule` finds it."""
    name: str  # of RULES
    num_layers: int | None
    where: str  # for messages: target and release

    def captured(self, ids: list[int] | None) -> list[int]:
        """The layers whose input is captured for these ids, in their order; for None the server's own choice."""
        N = self.num_layers
        if N is None and (ids is None or self.name == "add-one-unless-max-is-N"):
            raise UserError(f"{self.where}: config.json has no num_hidden_layers, on which the captured layers hang.")
        default = [2, N // 2, N - 3] if ids is None else []
        if ids is None and self.name != "add-one-default-too":
            return default
        return list(RULES[self.name](default or list(ids), N))

    def ids(self, layers: list[int]) -> list[int]:
        """The ids for which `layers` are captured: what a drafter's config.json must say. Raises UserError: none do."""
        below = [layer - 1 for layer in layers]
        # [1, ...] means the same to every release and model: take it where it can be had
        for ids in (below, layers) if layers[0] == 2 else (layers, below):
            if min(ids) >= 0 and self.captured(ids) == layers:
                return list(ids)
        raise UserError(f"{self.where} cannot capture layers {layers}: no eagle_aux_hidden_state_layer_ids lead there "
                        f"({self.name}). Extract other layers.")


def layer_rule(folder: Path, version: str, meant: str | None = None) -> LayerRule:
    """How SGLang `version` reads layer ids for the target in `folder`; meant: the rule's name, where the user says it.

    Raises UserError where the table knows neither release nor target: a wrong guess is a drafter that drafts nothing.
    """
    N = text_config(folder).get("num_hidden_layers")
    architecture = (read_json(folder / "config.json").get("architectures") or ["a target of no named architecture"])[0]
    where = f"SGLang {version} with {architecture}"
    if meant:
        return LayerRule(meant, N, where)
    table, here = read_json(VERSIONS), release_numbers(version)
    if release_numbers(table["releases"][0]) <= here <= release_numbers(table["releases"][-1]):
        for since in table["layer_rules"].values():
            entries = [entry for first, entry in since.items() if release_numbers(first) <= here]
            rule, _, architectures = ((entries or [""])[-1] or "").partition(": ")
            if architecture in re.findall(r"\w+", architectures):
                return LayerRule(rule, N, where)
    raise UserError(f"{folder}: what layer ids mean to {where} is not in {VERSIONS.name} ({table['releases'][0]} to "
                    f"{table['releases'][-1]}). Look at set_eagle3_layers_to_capture in the file of srt/models/ that "
                    "serves it, and say with 04_train.py --layer-id-rule what it does: add-one or as-given.")
