"""A safetensors file written piece by piece: the bytes of safetensors' own save_file, while other threads go on.

save_file of the library holds Python's lock from its first byte to its last, and a second copy of all tensors.
"""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

PIECE = 16 << 20  # bytes
# In the library's order: what is aligned to more bytes comes first in the file
NAMES = {torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
         torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


def save_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> str:
    """Write tensors (on any device) to `path`; returns the file's sha256. metadata: of one key at most."""
    order = list(NAMES)
    names = sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name))
    header, end = {"__metadata__": metadata} if metadata else {}, 0
    for name in names:
        tensor = tensors[name]
        size = tensor.numel() * tensor.itemsize
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        def put(data: memoryview) -> None:
            digest.update(data)
            while data:
                data = data[file.write(data):]

        put(memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            view = memoryview(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            for at in range(0, len(view), PIECE):
                put(view[at:at + PIECE])
    return digest.hexdigest()
