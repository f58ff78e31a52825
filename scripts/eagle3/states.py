"""The hidden-state format: one safetensors file a sample, its header, its meaning, and what is wrong with it.

<2 hex of sha256(id)>/<id>.safetensors holds aux_hidden_states (T, A*H), last_hidden_states (T, H: after the final
norm), input_ids (T,) int32 and loss_mask (T,) uint8 (0 over the prompt, then 1), in this order; its metadata say id,
target, capture layers, versions and checksum. Of FP8 states ("fp8" all, "fp8-aux" the captured layers alone; metadata
`states`) aux_scales (T, A) and last_scales (T, 1) stand before the ids, and quantised.py says what they are for.

The loader reads rows with preadv straight into (pinned) batch tensors. safetensors' own safe_open(...).get_slice was
measured beside it: 0.74 of its rate from the page cache, and it maps the file, so that a disk that fails under it ends
the process where a read raises OSError.

Shapes: T tokens of the sample, H hidden, A captured layers.
"""
from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from eagle3.patience import patiently
from eagle3.stage import SCHEMA

# The same in every file of a folder
FACTS = ("target", "capture_layers", "sglang_version", "patch_hash", "dtype", "hidden_size")
# Beside them the loaded target's fingerprint, which older files lack, and the kind of states, where it is not the first
MORE_FACTS = ("weights", "states")
KINDS = ("bf16", "fp8", "fp8-aux")  # bf16: as they come, be the target's dtype another
IN_FP8 = {"bf16": (), "fp8": ("aux_hidden_states", "last_hidden_states"), "fp8-aux": ("aux_hidden_states",)}
SCALES = {"aux_hidden_states": "aux_scales", "last_hidden_states": "last_scales"}
# sha256 of the patches/eagle3_capture*.py that write the same bytes of states for the same rows: a folder begun with
# one of them (its `patch_hash`) goes on with another. Whoever edits these adds their hash here, or, where the states
# become other ones, empties the set first.
SAME_CAPTURE = {
    "2b4093189eaed67976ebea313bf1d394f955d9eeebe21420c53179ebbd64dec9",
    "788cebaa1be430fa5ddf19a94bcf9bba667b1e7945d269640f7e470f2c035603",
    "7c0feccf78c6373e07f9c28ef396df4959553712487eff4324205a7e3a958120",
    "7c498414ce0bdcd2b8c86e6a520526d154619ad1828ae784543d240a02139f8c",
    "9530e0ca06ce82a9f4cdc8f6b9ade3ab3995067db739e43aa20e07a30f17d99c",
    "9b08a1a63f69d11306367d543fec0330d9012b29c67461ccaae1683fa6c8bdef",
    "e4bafcec6eb1bc00805ed8fd66172e2ee3359e37ebb51a5cbbf860c67c12658e",
}
DTYPES = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}  # safetensors' name: torch's, bytes
STORED = {**{name: dtype for name, (dtype, _) in DTYPES.items()}, "F8_E4M3": "float8_e4m3fn", "I32": "int32",
          "U8": "uint8"}
HEADER_BYTES = 4096  # of a file, at most: its length depends on names and numbers in it
MAX_HEADER = 1 << 20
UNREADABLE = "cannot be read"  # the disk's fault, not the file's
OTHER_KIND = "another kind"  # nobody's accident


def sample_path(folder: Path, sample_id: str) -> Path:
    return folder / hashlib.sha256(sample_id.encode()).hexdigest()[:2] / f"{sample_id}.safetensors"


def token_bytes(hidden_size: int, dtype: str, aux_states: int = 3, kind: str = KINDS[0]) -> int:
    """Bytes that a token takes: 57,349 for Kimi-K2.5, 28,693 in FP8. dtype: the target's, as torch calls it."""
    name = next(name for name, (torch_name, _) in DTYPES.items() if torch_name == dtype)
    return expected_tensors(name, 1, hidden_size, aux_states, kind)["loss_mask"][2][1]


def kind_of(facts: dict) -> str:
    """Of KINDS."""
    return facts.get("states", KINDS[0])


def facts_token_bytes(facts: dict) -> int:
    """Bytes that a token takes in a folder of these FACTS."""
    return token_bytes(facts["hidden_size"], facts["dtype"], len(layer_list(facts)), kind_of(facts))


class StateFile:
    """An open sample. Raises ValueError where it is no whole safetensors file, OSError where it cannot be read.

    header: {tensor: {"dtype", "shape", "data_offsets"}} without the metadata; begin: the byte at which offset 0 lies.
    """

    def __init__(self, path: Path):
        self.path, self.file = path, os.open(path, os.O_RDONLY)
        try:
            self.header, self.metadata, self.begin, self.size = self.read_header()
        except BaseException:
            self.close()
            raise

    def read_header(self) -> tuple[dict, dict, int, int]:
        start = os.pread(self.file, HEADER_BYTES, 0)
        length = int.from_bytes(start[:8], "little")
        if not 0 < length < MAX_HEADER:
            raise ValueError("no safetensors header")
        if len(start) < 8 + length:
            start = os.pread(self.file, 8 + length, 0)
        size = os.fstat(self.file).st_size
        try:
            header = json.loads(start[8:8 + length])
            metadata = header.pop("__metadata__")
            end = max(entry["data_offsets"][1] for entry in header.values())
            metadata["checksum"]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError("no tensors or no metadata in its header") from None
        if size != 8 + length + end:
            raise ValueError(f"{size} bytes, its header says {8 + length + end}")
        return header, metadata, 8 + length, size

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.file)

    def dtype(self, name: str):
        """torch's dtype of a tensor, as it is stored."""
        import torch  # only here: extraction itself stays small in memory
        return getattr(torch, STORED[self.header[name]["dtype"]])

    @property
    def engine_dtype(self):
        """torch's dtype of the states as they came, before they became FP8."""
        import torch
        return getattr(torch, self.metadata["dtype"])

    def empty(self, name: str, rows: int, pin: bool = False):
        """For so many rows of a tensor of states: a tensor, or Quantised (`quantised.py`). Raises KeyError."""
        import torch

        from eagle3.quantised import FP8, Quantised
        dtype, width = self.dtype(name), self.header[name]["shape"][1]
        if dtype != FP8:
            return torch.empty(rows, width, dtype=dtype, pin_memory=pin)
        return Quantised.empty(rows, width, self.header[SCALES[name]]["shape"][1], self.engine_dtype, pin)

    def read_into(self, name: str, rows, row: int = 0) -> None:
        """Fill `rows`, some of what `empty` gives, from the rows `row`, row + 1, ... of `name`.

        No copy besides the kernel's, and other threads run meanwhile. Raises ValueError where they are another kind.
        """
        if hasattr(rows, "scales"):
            self.read_tensor_into(SCALES[name], rows.scales, row)
            rows = rows.values
        self.read_tensor_into(name, rows, row)

    def numbers(self, name: str, row: int, rows: int):
        """(rows, ...) float32: what `rows` rows of a tensor of states, from `row` on, stand for. Raises OSError."""
        found = self.empty(name, rows)
        self.read_into(name, found, row)
        return found.float()

    def read_tensor_into(self, name: str, tensor, row: int) -> None:
        if not tensor.numel():
            return
        if name not in self.header or self.dtype(name) != tensor.dtype:
            raise ValueError(f"{name} is not {tensor.dtype}")
        view = memoryview(tensor.view(-1).view(torch_uint8()).numpy())
        row_bytes = tensor.itemsize * (tensor[0].numel() if tensor.dim() > 1 else 1)
        self.read_bytes_into(view, self.begin + self.header[name]["data_offsets"][0] + row * row_bytes)

    def read_bytes_into(self, view: memoryview, offset: int) -> None:
        while len(view):
            got = os.preadv(self.file, [view], offset)
            if not got:
                raise OSError("file ends early")
            view, offset = view[got:], offset + got

    def raw(self, name: str) -> bytes:
        first, end = self.header[name]["data_offsets"]
        buffer = bytearray(end - first)
        self.read_bytes_into(memoryview(buffer), self.begin + first)
        return bytes(buffer)

    def input_ids(self) -> np.ndarray:
        """(T,) int32"""
        return np.frombuffer(self.raw("input_ids"), "<i4")

    def loss_mask(self) -> np.ndarray:
        """(T,) uint8"""
        return np.frombuffer(self.raw("loss_mask"), np.uint8)


def torch_uint8():
    import torch
    return torch.uint8


# ---- is it the file that it should be ----
def check_header(file: StateFile, sample_id: str, tokens: int, prompt_len: int, facts: dict | None) -> dict:
    """The facts (FACTS, weights) a file states.

    Raises ValueError: it is not this sample, or not of the folder's `facts`.
    """
    try:
        _, width = file.header["last_hidden_states"]["shape"]
        tensors = {name: (entry["dtype"], entry["shape"], entry["data_offsets"]) for name, entry in file.header.items()}
        found = {**{fact: file.metadata[fact] for fact in FACTS if fact != "hidden_size"}, "hidden_size": width}
        found["capture_layers"] = [int(layer) for layer in file.metadata["capture_layers"].split(",")]
        found |= {fact: file.metadata[fact] for fact in MORE_FACTS if fact in file.metadata}
        identity = (file.metadata["schema"], file.metadata["id"], file.metadata["prompt_len"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header lacks {error}") from None
    if identity != (str(SCHEMA), sample_id, str(prompt_len)):
        wanted = (str(SCHEMA), sample_id, str(prompt_len))
        raise ValueError(f"is {identity} (schema, id, prompt_len), expected {wanted}")
    if kind_of(found) not in KINDS:
        raise ValueError(f"holds {kind_of(found)} states, of which these scripts know nothing")
    dtype = next((name for name, (torch_name, _) in DTYPES.items() if torch_name == found["dtype"]), "unknown")
    expected = expected_tensors(dtype, tokens, width, len(found["capture_layers"]), kind_of(found))
    if tensors != expected:
        raise ValueError(f"has other tensors than its tokens make ({found['dtype']} {tensors}, expected {expected})")
    if facts is not None:
        compare_facts(found, facts)
    return found


def compare_facts(found: dict, facts: dict) -> None:
    """Raises ValueError where a file's facts are not those of its folder."""
    if kind_of(found) != kind_of(facts):
        raise ValueError(f"holds {kind_of(found)} states, the folder {kind_of(facts)}: one folder cannot hold both")
    differs = [f"{fact} {found[fact]} (the folder: {facts[fact]})" for fact in FACTS if found[fact] != facts[fact]
               and not (fact == "patch_hash" and {found[fact], facts[fact]} <= SAME_CAPTURE)]
    if differs:
        raise ValueError(f"was captured with another {', '.join(differs)}")
    here, there = (dict(part.split(":", 1) for part in source.get("weights", "").split() if ":" in part)
                   for source in (found, facts))
    other = [part for part in here.keys() & there.keys() if here[part] != there[part]]
    if other:
        raise ValueError(f"was captured from other weights of {facts['target']} than the folder's "
                         f"({', '.join(sorted(other))} differ)")


def expected_tensors(dtype: str, T: int, width: int, aux_states: int, kind: str = KINDS[0]) -> dict[str, tuple]:
    """{tensor: (dtype, shape, data_offsets)} of a sample of T tokens whose target computes in safetensors' `dtype`."""
    expected, end, size, in_fp8 = {}, 0, DTYPES.get(dtype, ("unknown", 0))[1], IN_FP8[kind]
    columns = {"aux_hidden_states": aux_states, "last_hidden_states": 1}
    tensors = [(name, *(("F8_E4M3", 1) if name in in_fp8 else (dtype, size)), [T, columns[name] * width])
               for name in columns]
    tensors += [(SCALES[name], "F32", 4, [T, columns[name]]) for name in in_fp8]
    for name, stored, size, shape in [*tensors, ("input_ids", "I32", 4, [T]), ("loss_mask", "U8", 1, [T])]:
        count = T * size * (shape[1] if len(shape) > 1 else 1)
        expected[name] = (stored, shape, [end, end + count])
        end += count
    return expected


def check_ids(file: StateFile, ids: list[int], prompt_len: int) -> None:
    """Raises ValueError when the file's ids and loss mask are not the response's."""
    if not np.array_equal(file.input_ids(), ids):
        raise ValueError("ids are not the response's")
    if response_start(file.loss_mask()) != prompt_len:
        raise ValueError("loss mask is not the response's")


def response_start(mask: np.ndarray) -> int | None:
    """The first response token of a mask that is 0 over the prompt and 1 from there to the end; None for any other."""
    start = len(mask) - int(np.count_nonzero(mask))
    return start if start < len(mask) and (mask[start:] == 1).all() else None


def check_sample(path: Path, row: dict, facts: dict, vocab_size: int, norm):
    """Read one file whole and compare it with its index row and the folder's facts: (problem, None) or (None, tensors).

    tensors: by name, FP8 states with their scales as one Quantised. norm (H,): weight of the target's final RMSNorm, or
    None.
    """
    import torch

    from eagle3.quantised import Quantised

    def read_whole():
        with StateFile(path) as file:
            data = torch.empty(file.size - file.begin, dtype=torch.uint8)
            file.read_bytes_into(memoryview(data.numpy()), file.begin)
            return file.header, file.metadata, data

    try:
        header, metadata, data = patiently(read_whole, path)
    except FileNotFoundError:
        return "missing", None
    except (OSError, ValueError) as error:
        return UNREADABLE if getattr(error, "errno", None) else "torn", None
    T, hidden = row["tokens"], facts["hidden_size"]
    dtype = next(name for name, (torch_name, _) in DTYPES.items() if torch_name == facts["dtype"])
    layers = layer_list(facts)
    kind = kind_of(facts)
    if kind_of(metadata) != kind:
        return f"{OTHER_KIND}: {kind_of(metadata)} states, the folder has {kind}", None
    expected = {name: entry[:2] for name, entry in expected_tensors(dtype, T, hidden, len(layers), kind).items()}
    if {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()} != expected:
        return "other shape or dtype", None
    found = metadata.get("id"), metadata.get("target"), metadata.get("capture_layers")
    if found != (row["id"], facts["target"], ",".join(map(str, layers))):
        return "other target, layers or id", None
    if f"sha256:{hashlib.sha256(data.numpy()).hexdigest()}" != row["checksum"]:
        return "checksum", None
    tensors = {name: data[slice(*entry["data_offsets"])].view(getattr(torch, STORED[entry["dtype"]]))
               .view(entry["shape"]) for name, entry in header.items()}
    for name in IN_FP8[kind]:
        tensors[name] = Quantised(tensors[name], tensors.pop(SCALES[name]), getattr(torch, facts["dtype"]))
    problem = problem_of(tensors, vocab_size, norm)
    return (problem, None) if problem else (None, tensors)


def problem_of(tensors: dict, vocab_size: int, norm) -> str | None:
    """What is wrong with a sample's values, or None."""
    from eagle3.quantised import finite

    low, high = tensors["input_ids"].aminmax()
    if low < 0 or high >= vocab_size:
        return "ids beyond the vocabulary"
    if not tensors["loss_mask"].any():
        return "no response token"
    if response_start(tensors["loss_mask"].numpy()) is None:
        return "loss mask is not one response at the end"
    states = tensors["aux_hidden_states"], tensors["last_hidden_states"]
    if not all(finite(tensor) for tensor in states):
        return "not finite"
    if norm is not None:
        some = tensors["last_hidden_states"][::max(1, len(tensors["input_ids"]) // 256)]  # enough for a median
        if not 0.8 < normed_sizes(some.float(), norm).median() < 1.25:
            return "states from before the final norm"
    return None


def normed_sizes(last, norm):
    """(N,) root mean squares of rows (N, H) over `norm` (H,): 1 for what comes out of that RMSNorm, by its definition.

    Channels that it all but removes are left out: there rounding is as large as what is rounded.
    """
    used = norm.abs() > 1e-3 * norm.abs().max()
    return (last[:, used] / norm[used]).square().mean(-1).sqrt()


# ---- what 03 says of all its samples ----
def layer_list(facts: dict) -> list[int]:
    """The capture layers of a manifest or of 03's facts."""
    return [int(layer) for layer in str(facts["capture_layers"]).strip("[]").split(",")]
