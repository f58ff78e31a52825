"""What the target tells: its text config, three of its tensors, and which layers an id of SGLang's means.

Shapes: H hidden, Vt target vocabulary.
"""
from __future__ import annotations

import re
from pathlib import Path

from eagle3.stage import UserError, read_json

TENSORS = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}
FLOATS = ("BF16", "F16", "F32")  # safetensors' names
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


# ---- layers: "layer L" is the residual stream entering layer L; SGLang's ids mean other layers to other versions ----
def version_numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 15) of "0.5.15.post1". Raises UserError: the layer ids hang on them."""
    numbers = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if not numbers:
        raise UserError(f"{version!r} is no version of SGLang. Name one with --serve-sglang-version, like 0.5.23.")
    return tuple(map(int, numbers.groups()))


def captured_layers(ids: list[int] | None, version: str, num_layers: int | None = None) -> list[int]:
    """The layers whose input SGLang captures for `eagle_aux_hidden_state_layer_ids`, in its order; for None its own.

    DeepseekV2ForCausalLM.set_eagle3_layers_to_capture: up to 0.5.12 it adds 1 to each id, later only if the first is 1.
    """
    if ids is None:
        return [2, num_layers // 2, num_layers - 3]
    always_adds = version_numbers(version) <= (0, 5, 12)
    return [layer + 1 for layer in ids] if always_adds or ids[0] == 1 else list(ids)


def layer_ids(layers: list[int], version: str) -> list[int]:
    """The ids that make this SGLang version capture `layers`. Raises UserError where none do."""
    below = [layer - 1 for layer in layers]
    # [1, ...] means the same to every version: take it where it can be had
    for ids in (below, layers) if layers[0] == 2 else (layers, below):
        if captured_layers(ids, version) == layers and min(ids) >= 0:
            return list(ids)
    raise UserError(f"SGLang {version} cannot capture layers {layers}: no eagle_aux_hidden_state_layer_ids lead there. "
                    "Extract other layers.")
