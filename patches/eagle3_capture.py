"""Write the hidden states that SGLang computes in prefill to safetensors files, as it serves: EAGLE-3 training data.

`sglang_patch.py apply` copies this file into `sglang/srt/` and inserts one call of `capture` into the target's forward.
Without EAGLE3_CAPTURE_DIR in the environment that call returns at once and the server behaves as the original.

    EAGLE3_CAPTURE_DIR=/data/incoming EAGLE3_CAPTURE_LAYERS=3,31,59 \
    python3 -m sglang.launch_server ... --disable-radix-cache

Captured are only requests whose rid is `eagle3:<run>:<prompt_len>:<tokens>:<id>`; the file appears (by a rename) as
`<EAGLE3_CAPTURE_DIR>/<run>/<id>.safetensors` when it is whole. A sample that could not be written leaves `<id>.error`
with one line, `<kind>: <text>`; kind is `refused` (this server cannot capture: its flags), `retry` (send it again),
`data` (not finite) or `write` (OSError).

EAGLE3_CAPTURE_BUFFER_MB (2048) bounds the host memory for rows in flight: a prefill that finds none free waits.

Shapes: N rows of a batch, T tokens of a sample, H hidden, A captured layers (3 to 5). "Layer L" is the residual stream
entering layer L.
"""
import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import threading
import time
import types
from pathlib import Path

import torch

DIR_VARIABLE = "EAGLE3_CAPTURE_DIR"
SCHEMA = 1
RID = re.compile(r"eagle3:(\w[\w.-]{0,80}):(\d+):(\d+):([A-Za-z0-9._-]{1,120})")
SLOT_BYTES = 32 << 20
LAYERS = range(3, 6)  # how many layers a drafter can take its aux states from
MAX_OPEN = 64  # chunked samples with a file begun; SGLang prefills one at a time, the others were left by their client
SAFETENSORS_DTYPE = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

logger = logging.getLogger(__name__)
_enabled = bool(os.environ.get(DIR_VARIABLE))
_state = None  # Capture, Refused, or None before the first forward


class Refused(RuntimeError):
    """This server's flags or model do not allow a faithful capture."""


class NotFinite(ValueError):
    """A hidden state is NaN or infinite."""


def server_settings() -> dict:
    """The server's resolved flags by name, in any SGLang from 0.5.10 to 0.5.23."""
    try:
        from sglang.srt.runtime_context import get_context
    except ImportError:  # before 0.5.14
        from sglang.srt.server_args import get_global_server_args

        return vars(get_global_server_args())
    context = get_context()
    resolved = getattr(context, "resolved_server_args_dict", None)
    return resolved() if resolved else vars(context.server_args)


def prefill_graphs(settings: dict) -> bool:
    """Whether prefill replays CUDA graphs: Python, and so the capture, does not run then."""
    config = settings.get("cuda_graph_config")
    if config is None:  # before 0.5.14
        return not settings.get("disable_piecewise_cuda_graph", True)
    prefill = config.get("prefill") if isinstance(config, dict) else getattr(config, "prefill", None)
    backend = prefill.get("backend") if isinstance(prefill, dict) else getattr(prefill, "backend", None)
    return backend not in (None, "disabled")


def check_settings(settings: dict) -> None:
    """Raise Refused, with the flag to change, where rows of a sample would be missing, split or out of order."""
    refusals = {
        "the radix cache is on, so shared prefixes would not be computed. Add --disable-radix-cache":
            not settings.get("disable_radix_cache"),
        "DP attention splits the rows of a batch over ranks. Remove --enable-dp-attention":
            settings.get("enable_dp_attention"),
        "pipeline parallelism hides the first layers from the last rank. Use --pp-size 1":
            (settings.get("pp_size") or 1) > 1,
        "two-batch overlap leaves capture layers out. Remove --enable-two-batch-overlap":
            settings.get("enable_two_batch_overlap"),
        "context parallelism reorders rows. Use --attn-cp-size 1":
            (settings.get("attn_cp_size") or 1) > 1 or settings.get("enable_prefill_cp"),
        "prefill CUDA graphs are on. Add --disable-prefill-cuda-graph (--disable-piecewise-cuda-graph before 0.5.14)":
            prefill_graphs(settings),
        f"--speculative-algorithm {settings.get('speculative_algorithm')} captures in its own way. Use EAGLE3 or none":
            settings.get("speculative_algorithm") not in (None, "EAGLE3"),
    }
    for text, refused in refusals.items():
        if refused:
            raise Refused(f"{text}.")


def set_layers(model, layers: list[int]) -> bool:
    """Make `model` capture the streams entering `layers`; True when SGLang itself does it already (a draft is loaded).

    Up to 0.5.12 set_eagle3_layers_to_capture adds 1 to every id; from 0.5.13 only when the first is 1. Raises Refused.
    """
    captured = model.model.layers_to_capture
    if captured:
        if list(captured) != layers:
            raise Refused("the draft's eagle_aux_hidden_state_layer_ids (or --return-aux-hidden-state-layer-ids) make "
                          f"this server capture layers {list(captured)}, EAGLE3_CAPTURE_LAYERS says {layers}. "
                          "Serve without the draft, or make them equal.")
        return True
    for ids in (layers, [layer - 1 for layer in layers]):
        model.set_eagle3_layers_to_capture(list(ids))
        if list(model.model.layers_to_capture) == layers:
            return False
    raise Refused(f"no layer ids lead this SGLang to capture {layers} (it gave {model.model.layers_to_capture}). "
                  "Choose other layers.")


def wanted_rows(forward_batch) -> list[tuple[int, int, int, str, tuple]]:
    """(first row in the batch, its position in the sample, rows, rid, parts of the rid) of each request to capture."""
    if forward_batch.forward_mode.name not in ("EXTEND", "MIXED") or not forward_batch.rids:
        return []  # decode, idle, verification, graph capture, warm-up
    found, row = [], 0
    starts, counts = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    for rid, start, count in zip(forward_batch.rids, starts, counts):
        match, start, count = RID.fullmatch(rid), int(start), int(count)
        if match and start < int(match[3]):  # past it: a token of the answer, decoded in a MIXED batch
            found.append((row, start, count, rid, (match[1], int(match[2]), int(match[3]), match[4])))
        row += count
    return found


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
    """One file being written. `add` runs on one writer thread only, in the order of the rows."""

    def __init__(self, capture: "Capture", run: str, prompt_len: int, tokens: int, sample_id: str):
        self.capture, self.prompt_len, self.tokens, self.id = capture, prompt_len, tokens, sample_id
        self.folder = capture.folder / run
        self.thread = min(capture.threads, key=lambda thread: thread.rows)  # all its rows: they must stay in order
        self.taken = 0    # rows copied out of forward passes (scheduler thread)
        self.written = 0  # rows in the file (writer thread)
        self.file = None
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
        at += self.begin + self.offsets[name][0]
        while data:
            count = os.pwrite(self.file, data, at)
            data, at = data[count:], at + count

    def finish(self, slot: Slot) -> None:
        # The checksum runs in file order; rows come in pieces, so the second tensor is read back (from the page cache)
        buffer = view(slot.aux)  # its rows are in the file already
        at, end = (self.begin + offset for offset in self.offsets["last_hidden_states"])
        while at < end:
            count = os.preadv(self.file, [buffer[:min(len(buffer), end - at)]], at)
            self.sha256.update(buffer[:count])
            at += count
        for name, data in (("input_ids", bytes(self.ids)),
                           ("loss_mask", bytes(self.prompt_len) + b"\1" * (self.tokens - self.prompt_len))):
            self.sha256.update(data)
            self.put(memoryview(data), name, 0)
        os.pwrite(self.file, self.header(self.width, self.dtype, self.sha256.hexdigest()), 0)
        os.fsync(self.file)
        os.close(self.file)
        self.file = None
        os.replace(f"{self.path}.tmp", self.path)

    def drop(self, reason: str | None) -> None:
        """Take the begun file away and, with a `reason`, tell the client."""
        if self.failed:
            return
        self.failed = True
        if self.file is not None:
            os.close(self.file)
            self.file = None
            Path(f"{self.path}.tmp").unlink(missing_ok=True)  # makes room, too
        if reason:
            tell(self.folder, self.id, reason)


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
            if slot is None:
                sample.drop(argument)
                continue
            try:
                sample.add(slot, argument)
            except NotFinite as error:
                sample.drop(f"data: {error}")
            except OSError as error:
                sample.drop(f"write: {error}")
            except BaseException as error:  # a thread that dies would keep its slots, and prefill would wait for ever
                logger.exception("eagle3_capture: %s", sample.id)
                sample.drop(f"write: {type(error).__name__}: {error}")
            finally:
                self.rows -= argument
                self.free.put(slot)


class Capture:
    """Everything behind one server process. Raises Refused."""

    def __init__(self, model):
        import sglang

        settings = server_settings()
        check_settings(settings)
        try:
            layers = [int(word) for word in os.environ.get("EAGLE3_CAPTURE_LAYERS", "").split(",")]
        except ValueError:
            layers = []
        count = model.config.num_hidden_layers
        if len(layers) not in LAYERS or layers != sorted(set(layers)) or not 0 < layers[0] <= layers[-1] < count:
            raise Refused(f"EAGLE3_CAPTURE_LAYERS is {os.environ.get('EAGLE3_CAPTURE_LAYERS')!r}. Name three to five "
                          f"ascending layers from 1 to {count - 1}, like 3,31,59.")
        buffer = os.environ.get("EAGLE3_CAPTURE_BUFFER_MB", "2048")
        if not buffer.isdecimal():
            raise Refused(f"EAGLE3_CAPTURE_BUFFER_MB is {buffer!r}. Give a number of MB, like 2048.")
        self.buffer_bytes = int(buffer) << 20
        self.needed_by_sglang = set_layers(model, layers)
        self.aux_states = len(layers)
        self.folder = Path(os.environ[DIR_VARIABLE]).absolute()
        self.metadata = {"schema": str(SCHEMA), "target": Path(settings["model_path"]).name,
                         "capture_layers": ",".join(map(str, layers)), "sglang_version": sglang.__version__,
                         "patch_hash": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
        # Every rank of a tensor-parallel group holds whole rows: the first writes. (PP and DP attention are refused.)
        self.writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.samples: dict[str, Sample] = {}  # by rid: rows are missing yet
        self.slots = None
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            logger.info("eagle3_capture: layers %s of %s to %s", layers, self.metadata["target"], self.folder)

    def start_writing(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """For the first rows, not before: CUDA graph capture allows no allocation of pinned memory."""
        self.row_bytes = (self.aux_states + 1) * width * dtype.itemsize + 4
        self.slot_rows = max(1, (SLOT_BYTES - 1) // self.row_bytes)
        self.slots = max(2, self.buffer_bytes // max(SLOT_BYTES, self.row_bytes + 1))  # how many may still be made
        self.free: queue.SimpleQueue = queue.SimpleQueue()
        self.threads = [Writer(self.free) for _ in range(min(8, max(4, (os.cpu_count() or 4) // 2)))]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.metadata["dtype"] = str(dtype).removeprefix("torch.")
        logger.info("eagle3_capture: %d bytes a token, %d slots of %d rows, %d threads", self.row_bytes, self.slots,
                    self.slot_rows, len(self.threads))

    def slot(self, last: torch.Tensor) -> Slot:
        """A free slot; waits, and so slows prefill down, when all that the limit allows are in flight."""
        if self.free.empty() and self.slots > 0:
            self.slots -= 1
            return Slot(self.slot_rows, self.aux_states, last.shape[1], last.dtype, self.stream is not None)
        return self.free.get()

    def take(self, wanted: list, aux, last: torch.Tensor, input_ids: torch.Tensor) -> None:
        """Copy the wanted rows of this forward pass into slots and hand them to the writers.

        aux: (N, A*H), packed (SGLang 0.5.23), or a list of A (N, H) (up to 0.5.15); last: (N, H); input_ids: (N,).
        """
        if self.slots is None:
            self.start_writing(last.shape[1], last.dtype, last.device)
        aux = [aux] if isinstance(aux, torch.Tensor) else list(aux)
        # A copy of the ids, made in the order of the forward passes: SGLang (0.5.15, 0.5.23) keeps them in one buffer
        # for all batches, and the next batch's are in it before the side stream comes to read. (Hidden states are new
        # tensors in every pass.)
        input_ids = input_ids.to(torch.int32, copy=True)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(last.device))
            for tensor in (*aux, last, input_ids):
                tensor.record_stream(self.stream)
        for row, start, count, rid, parts in wanted:
            sample = self.samples.pop(rid, None)
            if sample is None or start == 0:
                sample = Sample(self, *parts)
            if sample.taken != start or start + count > sample.tokens:
                sample.thread.drop(sample, f"retry: positions {start} to {start + count - 1} of {sample.tokens} came, "
                                           f"expected those from {sample.taken}")
                continue
            if row + count > min(tensor.shape[0] for tensor in (*aux, last, input_ids)):
                sample.thread.drop(sample, "refused: this server splits the rows of a batch over ranks")
                continue
            self.copy(sample, slice(row, row + count), aux, last, input_ids)
            if sample.taken < sample.tokens:
                self.samples[rid] = sample
                if len(self.samples) > MAX_OPEN:
                    oldest = self.samples.pop(next(iter(self.samples)))
                    oldest.thread.drop(oldest, None)


    def copy(self, sample: Sample, rows: slice, aux: list[torch.Tensor], last: torch.Tensor, input_ids) -> None:
        """`rows` of a forward pass into slots, without waiting for the GPU, and to the sample's writer."""
        for first in range(rows.start, rows.stop, self.slot_rows):
            piece = slice(first, min(first + self.slot_rows, rows.stop))
            slot, number = self.slot(last), piece.stop - piece.start
            with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
                # Packed on the GPU: a copy into strided host memory would go through unpinned memory and block
                packed = aux[0][piece] if len(aux) == 1 else torch.cat([tensor[piece] for tensor in aux], dim=-1)
                slot.aux[:number].copy_(packed, non_blocking=True)
                slot.last[:number].copy_(last[piece], non_blocking=True)
                slot.ids[:number].copy_(input_ids[piece], non_blocking=True)
                slot.finite.copy_((packed.isfinite().all() & last[piece].isfinite().all()).view(1), non_blocking=True)
                if self.stream:
                    slot.copied = torch.cuda.Event()
                    slot.copied.record(self.stream)
            sample.taken += number
            sample.thread.add(sample, slot, number)


def capture(model, positions: torch.Tensor, forward_batch, hidden_states: torch.Tensor, aux_hidden_states):
    """Called by the patched forward between model and logits; returns the `aux_hidden_states` that SGLang goes on with.

    model: a ...ForCausalLM; positions: (N,); hidden_states: (N, H) after the final norm; aux_hidden_states: None,
    (N, A*H) or a list of (N, H). Raises Refused, which ends the server: capturing wrong rows is worse than none.
    """
    global _state
    if not _enabled:
        return aux_hidden_states
    wanted = wanted_rows(forward_batch)
    if _state is None:
        try:
            _state = Capture(model)
        except Refused as error:
            for *_, (run, _, _, sample_id) in wanted:
                tell(Path(os.environ[DIR_VARIABLE]).absolute() / run, sample_id, f"refused: {error}")
            raise
    if wanted and aux_hidden_states is not None:
        if _state.writes:
            _state.take(wanted, aux_hidden_states, hidden_states, forward_batch.input_ids)
    elif wanted and forward_batch.contains_mm_inputs():
        for *_, (run, _, _, sample_id) in wanted:
            tell(_state.folder / run, sample_id, "retry: capture was switched on by this batch, which held an image")
    elif wanted:
        # Switched on just now, after the model ran on this batch, the server's first: run it again (it comes back here)
        # and drop those logits. The ids are embedded anew, since layers may have worked in place on the `input_embeds`.
        model.forward(forward_batch.input_ids, positions, forward_batch)
    return aux_hidden_states if _state.needed_by_sglang else None


def forward_hook(config: dict):
    """Factory for SGLang 0.5.23's own hooks: capture without the patch, from targets that SGLang serves with EAGLE3.

    PYTHONPATH=patches ... --enable-return-aux-hidden-states --speculative-algorithm EAGLE3
    --return-aux-hidden-state-layer-ids 3 31 59
    --forward-hooks '[{"target_modules": ["model"], "hook_factory": "eagle3_capture:forward_hook"}]'
    target_modules: the decoder without its head ("language_model.model" in a multimodal wrapper). Some models (Llama)
    add 1 to the ids: give 2 30 58 for them. What the server then captures is compared with EAGLE3_CAPTURE_LAYERS.
    Qwen3-VL and GLM5-Next hand the batch over by keyword, which such hooks do not see: refused.
    """
    def hook(module, args, output):
        if not _enabled:
            return
        forward_batch = next((argument for argument in args if hasattr(argument, "extend_seq_lens_cpu")), None)
        if forward_batch is None:
            raise Refused(f"{type(module).__name__} gets its batch by keyword, which SGLang's hooks do not see. "
                          "Choose another target.")
        if not isinstance(output, tuple):
            raise Refused(f"{type(module).__name__} returns no captured layers. Name the decoder without its head in "
                          "target_modules, and start the server with --enable-return-aux-hidden-states and "
                          "--return-aux-hidden-state-layer-ids.")
        model = types.SimpleNamespace(model=module, config=module.config)
        hidden_states, aux_hidden_states = output
        capture(model, None, forward_batch, hidden_states, aux_hidden_states)

    return hook
