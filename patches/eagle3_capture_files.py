"""Files of hidden states, written beside a serving SGLang: what eagle3_capture.py takes out of forward passes.

Rows come in slots (pinned host memory), each sample's to one of a few threads, which hash and write. Whatever a disk
does to such a thread, it goes on with the next sample and its slots return: without slots prefill would stand still.

Shapes: N rows, T tokens of a sample, H hidden, A captured layers.
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
SAFETENSORS_DTYPE = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

logger = logging.getLogger("eagle3_capture")


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


class Slot:
    """A block of pinned host memory: up to `rows` rows of one sample, (N, A*H) + (N, H) + ids, and whether finite."""

    def __init__(self, rows: int, aux_states: int, width: int, dtype: torch.dtype, pinned: bool):
        ends = [0]
        for size in (rows * aux_states * width * dtype.itemsize, rows * width * dtype.itemsize, rows * 4, 1):
            ends.append(ends[-1] + size)
        # In one piece: the allocator of pinned memory rounds each up to a power of two
        buffer = torch.empty(max(SLOT_BYTES, ends[-1]), dtype=torch.uint8, pin_memory=pinned)
        aux, last, ids, finite = (buffer[begin:end] for begin, end in zip(ends, ends[1:]))
        self.aux = aux.view(dtype).view(rows, aux_states * width)
        self.last = last.view(dtype).view(rows, width)
        self.ids, self.finite = ids.view(torch.int32), finite.view(torch.bool)
        self.copied = None  # CUDA event; None on a CPU


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied (numpy knows no bfloat16)."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class Sample:
    """One file being written. `add` runs on one writer thread only, in the order of the rows.

    capture: eagle3_capture.Capture, of which it takes folder, threads, aux_states and metadata.
    """

    def __init__(self, capture, run: str, prompt_len: int, tokens: int, sample_id: str):
        self.capture, self.prompt_len, self.tokens, self.id = capture, prompt_len, tokens, sample_id
        self.folder = capture.folder / run
        self.thread = min(capture.threads, key=lambda thread: thread.rows)  # all its rows: they must stay in order
        self.taken = 0    # rows copied out of forward passes (scheduler thread)
        self.written = 0  # rows in the file (writer thread)
        self.file = self.path = None
        self.failed = False

    def header(self, width: int, dtype: torch.dtype, checksum: str) -> bytes:
        """Length and JSON as safetensors has them, as long for every checksum. Sets self.offsets (of the data)."""
        T, aux, size, kind = self.tokens, self.capture.aux_states * width, dtype.itemsize, SAFETENSORS_DTYPE[dtype]
        tensors, end = {}, 0
        # The widest first, so that every tensor is aligned to its element
        for name, dtype, shape, size in (("aux_hidden_states", kind, [T, aux], T * aux * size),
                                         ("last_hidden_states", kind, [T, width], T * width * size),
                                         ("input_ids", "I32", [T], 4 * T), ("loss_mask", "U8", [T], T)):
            tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        self.offsets = {name: tensor["data_offsets"] for name, tensor in tensors.items()}
        metadata = {**self.capture.metadata, "id": self.id, "prompt_len": str(self.prompt_len),
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
        aux, last, ids = view(slot.aux[:rows]), view(slot.last[:rows]), view(slot.ids[:rows])
        if self.file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path = self.folder / f"{self.id}.safetensors"
            self.file = os.open(f"{self.path}.tmp", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            self.dtype, self.width = slot.last.dtype, slot.last.shape[1]
            self.begin = len(self.header(self.width, self.dtype, "0" * 64))
            self.sha256 = hashlib.sha256()
            self.ids = bytearray()
        self.sha256.update(aux)  # the GIL is released in update, pwrite and fsync
        self.put(aux, "aux_hidden_states", self.written * len(aux) // rows)
        self.put(last, "last_hidden_states", self.written * len(last) // rows)
        self.ids += ids
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
        buffer = view(slot.aux)  # its rows are in the file already
        at, end = (self.begin + offset for offset in self.offsets["last_hidden_states"])
        while at < end:
            count = os.preadv(self.file, [buffer[:min(len(buffer), end - at)]], at)
            if not count:
                raise OSError("the file has become shorter")
            self.sha256.update(buffer[:count])
            at += count
        for name, data in (("input_ids", bytes(self.ids)),
                           ("loss_mask", bytes(self.prompt_len) + b"\1" * (self.tokens - self.prompt_len))):
            self.sha256.update(data)
            self.put(memoryview(data), name, 0)
        self.write(memoryview(self.header(self.width, self.dtype, self.sha256.hexdigest())), 0)
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
