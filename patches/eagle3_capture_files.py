"""Files of hidden states, written beside a serving SGLang: what eagle3_capture.py takes out of forward passes.

Rows come in slots (pinned host memory), each sample's to one of a few threads, which hash and write. Whatever a disk
does to such a thread, it goes on with the next sample and its slots return: without slots prefill would stand still.

A client asks for states as they come ("bf16", whatever the model's dtype is) or as FP8: "fp8" (all), "fp8-aux" (the
captured layers alone). A row of each layer is then e4m3 numbers times one float32 scale of its own, so that neither the
huge channels of one layer nor those of one token make others coarse.

Shapes: N rows, T tokens of a sample, H hidden, A captured layers, S states side by side in a row (A, or 1).
"""
import hashlib
import json
import logging
import os
import queue
import threading
import time
from pathlib import Path

import torch

SLOT_BYTES = 32 << 20
FP8 = torch.float8_e4m3fn
SAFETENSORS_DTYPE = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", FP8: "F8_E4M3",
                     torch.int32: "I32"}
AUX, LAST = "aux_hidden_states", "last_hidden_states"
IN_FP8 = {"bf16": (), "fp8": (AUX, LAST), "fp8-aux": (AUX,)}  # kind of states: which tensors
SCALES = {AUX: "aux_scales", LAST: "last_scales"}
LARGEST = 448.0  # of e4m3
# Of a scale: above, scale * 448 would be no finite number any more; below, row / scale
SCALE_RANGE = 2.0 ** -126, 7.5e35

logger = logging.getLogger("eagle3_capture")


def quantised(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows (N, S*H), finite -> ((N, S*H) FP8, (N, S) float32 scales): what was x is FP8 * scale.

    The largest of the H numbers that share a scale becomes 448; all else is rounded to nearest even. Zeros: scale 1.
    """
    states = rows.view(len(rows), -1, width)
    largest = states.abs().amax(-1).float()
    # The same on every device: CUDA makes this of a division by a number, a CPU does not
    scales = (largest * (1 / LARGEST)).clamp_(*SCALE_RANGE).masked_fill_(largest == 0, 1.0)
    # In float32, and not in place: SGLang goes on with the rows. Clamped: beyond 448 would be NaN
    scaled = (states / scales[:, :, None]).clamp_(-LARGEST, LARGEST)
    return scaled.to(FP8).reshape(rows.shape), scales


class NotFinite(ValueError):
    """A hidden state is NaN or infinite."""


def tell(folder: Path, sample_id: str, reason: str) -> None:
    """Leave `<id>.error`. Raises nothing: where not even that can be written, the client's own time limit speaks."""
    logger.error("eagle3_capture: %s: %s", sample_id, reason)
    for _ in range(20):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f"{sample_id}.error.tmp"
            temporary.write_text(" ".join(reason.split()) + "\n")
            os.replace(temporary, folder / f"{sample_id}.error")
            return
        except OSError:
            time.sleep(0.1)


class Layout:
    """What a row of a sample is made of.

    columns: {tensor: (dtype, how many, None where it has no second dimension)}, in the order of the file.
    """

    def __init__(self, states: str, aux_states: int, width: int, dtype: torch.dtype):
        self.states, self.width, self.in_fp8 = states, width, IN_FP8[states]
        counts = {AUX: aux_states, LAST: 1}
        self.columns = {name: (FP8 if name in self.in_fp8 else dtype, counts[name] * width) for name in counts}
        self.columns |= {SCALES[name]: (torch.float32, counts[name]) for name in self.in_fp8}
        self.columns["input_ids"] = torch.int32, None
        self.row_bytes = sum(dtype.itemsize * (count or 1) for dtype, count in self.columns.values())


class Slot:
    """A block of pinned host memory: rows of one sample, in `parts` {tensor: rows}, and whether they are `finite`."""

    def __init__(self, size: int, pinned: bool):
        # In one piece: the allocator of pinned memory rounds each up to a power of two
        self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.finite = self.buffer[-1:].view(torch.bool)
        self.copied = None  # CUDA event; None on a CPU

    def rows(self, layout: Layout) -> int:
        """How many find room."""
        return (len(self.buffer) - 1) // layout.row_bytes

    def lay_out(self, layout: Layout) -> None:
        rows, at, self.parts = self.rows(layout), 0, {}
        # The widest first, so that every part is aligned to its element
        for name, (dtype, count) in sorted(layout.columns.items(), key=lambda item: -item[1][0].itemsize):
            size = rows * dtype.itemsize * (count or 1)
            part = self.buffer[at:at + size].view(dtype)
            self.parts[name] = part if count is None else part.view(rows, count)
            at += size


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied (numpy knows no bfloat16)."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class Sample:
    """One file being written. `add` runs on one writer thread only, in the order of the rows.

    capture: eagle3_capture.Capture, of which it takes folder, threads, layouts and metadata.
    """

    def __init__(self, capture, run: str, prompt_len: int, tokens: int, sample_id: str, states: str):
        self.capture, self.prompt_len, self.tokens, self.id = capture, prompt_len, tokens, sample_id
        self.layout = capture.layouts[states]
        self.folder = capture.folder / run
        self.thread = min(capture.threads, key=lambda thread: thread.rows)  # all its rows: they must stay in order
        self.taken = 0    # rows that forward passes have come to (scheduler thread)
        self.written = 0  # rows in the file (writer thread)
        self.file = self.path = None
        self.failed = False

    def header(self, checksum: str) -> bytes:
        """Length and JSON as safetensors has them, as long for every checksum. Sets self.offsets (of the data)."""
        T, tensors, end = self.tokens, {}, 0
        for name, (dtype, count) in [*self.layout.columns.items(), ("loss_mask", (torch.uint8, None))]:
            size = T * dtype.itemsize * (count or 1)
            tensors[name] = {"dtype": SAFETENSORS_DTYPE.get(dtype, "U8"), "shape": [T] if count is None else [T, count],
                             "data_offsets": [end, end + size]}
            end += size
        self.offsets = {name: tensor["data_offsets"] for name, tensor in tensors.items()}
        kind = {"states": self.layout.states} if self.layout.in_fp8 else {}
        metadata = {**self.capture.metadata, **kind, "id": self.id, "prompt_len": str(self.prompt_len),
                    "checksum": f"sha256:{checksum}"}
        text = json.dumps({"__metadata__": metadata, **tensors}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def add(self, slot: Slot, rows: int) -> None:
        """Write `rows` rows; after the last one finish the file. Raises OSError, NotFinite."""
        if self.failed:
            return
        if slot.copied is not None:
            slot.copied.synchronize()
        if not slot.finite:
            raise NotFinite(f"a hidden state at positions {self.written} to {self.written + rows - 1} is not finite")
        parts = {name: view(part[:rows]) for name, part in slot.parts.items()}
        if self.file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path = self.folder / f"{self.id}.safetensors"
            self.file = os.open(f"{self.path}.tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            self.begin = len(self.header("0" * 64))
            self.sha256 = hashlib.sha256()
            self.small = {name: bytearray() for name in self.layout.columns if name not in SCALES}
        self.sha256.update(parts[AUX])  # the GIL is released in update, pwrite and fsync
        for name, part in parts.items():
            if name in SCALES:
                self.put(part, name, self.written * len(part) // rows)
            else:
                self.small[name] += part
        self.written += rows
        if self.written == self.tokens:
            self.finish(slot)

    def put(self, data: memoryview, name: str, at: int) -> None:
        self.write(data, self.begin + self.offsets[name][0] + at)

    def write(self, data: memoryview, at: int) -> None:
        while data:
            count = os.pwrite(self.file, data, at)
            if not count:
                raise OSError("nothing was written, and no reason given")
            data, at = data[count:], at + count

    def finish(self, slot: Slot) -> None:
        # The checksum runs in file order; rows come in pieces, so the second tensor is read back (from the page cache)
        buffer = view(slot.buffer)  # its rows are in the file already, or in self.small
        at, end = (self.begin + offset for offset in self.offsets[LAST])
        while at < end:
            count = os.preadv(self.file, [buffer[:min(len(buffer), end - at)]], at)
            if not count:
                raise OSError("the file has become shorter")
            self.sha256.update(buffer[:count])
            at += count
        self.small["loss_mask"] = bytes(self.prompt_len) + b"\1" * (self.tokens - self.prompt_len)
        for name, data in self.small.items():
            self.sha256.update(data)
            self.put(memoryview(data), name, 0)
        self.write(memoryview(self.header(self.sha256.hexdigest())), 0)
        os.fsync(self.file)
        self.close()  # where a quota or a server of files says what it has kept back so far
        os.replace(f"{self.path}.tmp", self.path)

    def close(self) -> None:
        file, self.file = self.file, None  # first: a close that fails has closed, and the number may be another's next
        if file is not None:
            os.close(file)

    def drop(self, reason: str | None) -> None:
        """Take the begun file away and, with a `reason`, tell the client. Raises nothing that a disk can cause."""
        if self.failed:
            return
        self.failed = True
        for undo in (self.close, self.remove):
            try:
                undo()
            except OSError as error:
                logger.error("eagle3_capture: %s: cannot be cleared away: %s", self.id, error)
        if reason:
            tell(self.folder, self.id, reason)

    def remove(self) -> None:
        if self.path is not None:
            Path(f"{self.path}.tmp").unlink(missing_ok=True)  # makes room, too


class Writer(threading.Thread):
    """Does the work on the samples given to it, in order: hashing and writing, which release the GIL."""

    def __init__(self, free: queue.SimpleQueue):
        super().__init__(daemon=True, name="eagle3_capture")
        self.work, self.free, self.rows = queue.SimpleQueue(), free, 0
        self.start()

    def add(self, sample: Sample, slot: Slot, rows: int) -> None:
        self.rows += rows  # only a hint for choosing a thread: a lost update does no harm
        self.work.put((sample, slot, rows))

    def drop(self, sample: Sample, reason: str | None) -> None:
        """Give up `sample`; `reason` is for the client, None when it is gone."""
        self.work.put((sample, None, reason))

    def run(self) -> None:
        while True:
            sample, slot, argument = self.work.get()
            try:
                if slot is None:
                    sample.drop(argument)
                else:
                    self.write(sample, slot, argument)
            except BaseException:  # a thread that dies keeps its slots and samples, and prefill would wait for ever
                logger.exception("eagle3_capture: %s", sample.id)
            finally:
                if slot is not None:
                    self.rows -= argument
                    self.free.put(slot)

    def write(self, sample: Sample, slot: Slot, rows: int) -> None:
        """`rows` rows of `slot` into the sample's file; what goes wrong is the client's to know."""
        try:
            sample.add(slot, rows)
        except NotFinite as error:
            sample.drop(f"data: {error}")
        except OSError as error:
            sample.drop(f"write: {error}")
        except BaseException as error:
            logger.exception("eagle3_capture: %s", sample.id)
            sample.drop(f"write: {type(error).__name__}: {error}")
