"""Write the hidden states that SGLang computes in prefill to safetensors files, as it serves: EAGLE-3 training data.

`sglang_patch.py apply` copies this file and eagle3_capture_files.py into `sglang/srt/` and inserts one call of
`capture` into the target's forward. Without EAGLE3_CAPTURE_DIR in the environment that call returns at once and the
server behaves as the original.

    EAGLE3_CAPTURE_DIR=/data/incoming EAGLE3_CAPTURE_LAYERS=3,31,59 \
    python3 -m sglang.launch_server ... --disable-radix-cache

Captured are only requests whose rid is `eagle3:<run>:<prompt_len>:<tokens>:<id>`; the file appears (by a rename) as
`<EAGLE3_CAPTURE_DIR>/<run>/<id>.safetensors` when it is whole. `eagle3-fp8:...` and `eagle3-fp8-aux:...` ask for FP8
states (eagle3_capture_files.py): quantised where the model is, so that half the bytes are copied and written. A
sample that could not be written leaves `<id>.error` with one line, `<kind>: <text>`; kind is `refused` (this server
cannot capture: its flags), `retry` (send it again), `data` (not finite), `write` (OSError) or `stalled` (the disk
stands still: send it again later).

EAGLE3_CAPTURE_BUFFER_MB (2048) bounds the host memory for rows in flight: a prefill that finds none free waits, but not
for ever: after STALL_S its sample is given up, since SGLang's watchdog would end the server.

Shapes: N rows of a batch, T tokens of a sample, H hidden, A captured layers (3 to 5). "Layer L" is the residual stream
entering layer L.
"""
import contextlib
import hashlib
import logging
import math
import os
import queue
import re
import threading
import time
import types
from pathlib import Path

import torch

if __package__:  # inside sglang.srt
    from . import eagle3_capture_files as files
else:  # on PYTHONPATH, see forward_hook
    import eagle3_capture_files as files

DIR_VARIABLE = "EAGLE3_CAPTURE_DIR"
SCHEMA = 1
RID = re.compile(r"eagle3(?:-(fp8|fp8-aux))?:(\w[\w.-]{0,80}):(\d+):(\d+):([A-Za-z0-9._-]{1,120})")
STALL_S = 120.0  # for a free slot in one forward pass, at most; less where the watchdog's time is short
LAYERS = range(3, 6)  # how many layers a drafter can take its aux states from
MAX_OPEN = 64  # chunked samples with a file begun; SGLang prefills one at a time, the others were left by their client

logger = logging.getLogger(__name__)
_enabled = bool(os.environ.get(DIR_VARIABLE))
_state = None  # Capture, Refused, or None before the first forward


class Refused(RuntimeError):
    """This server's flags, model or disk do not allow a faithful capture."""


class Stalled(RuntimeError):
    """No slot came free in time: the writers wait for the disk."""


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

    set_eagle3_layers_to_capture adds 1 to every id in most model files; deepseek_v2.py from 0.5.13 on only when the
    first is 1. Raises Refused.
    """
    captured = model.model.layers_to_capture
    if captured:
        if list(captured) != layers:
            raise Refused("the draft's eagle_aux_hidden_state_layer_ids (or --return-aux-hidden-state-layer-ids) make "
                          f"this server capture layers {list(captured)}, EAGLE3_CAPTURE_LAYERS says {layers}. "
                          "Serve without the draft, or make them equal.")
        return True
    # In this order: a file that adds 1 may mark the layers themselves, where no second call takes the marks away
    for ids in ([layer - 1 for layer in layers], layers):
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
        if match and start < int(match[4]):  # past it: a token of the answer, decoded in a MIXED batch
            parts = match[2], int(match[3]), int(match[4]), match[5], match[1] or "bf16"
            found.append((row, start, count, rid, parts))
        row += count
    return found


def fingerprint(model) -> str:
    """Which weights are loaded: "embed:<8 hex> head:<8 hex> norm:<8 hex> layers:<8 hex>", those parts that are there.

    Of matrices 16 of the first 256 rows, which the first rank of every tensor-parallel group holds: another number of
    GPUs gives the same. `layers`: the norms before each attention.
    """
    def weights(*modules) -> list[torch.Tensor]:
        found = [getattr(module, "weight", None) for module in modules
                 if not getattr(module, "use_intel_amx_backend", False)]  # packed in an order that the machine chooses
        return [weight for weight in found if isinstance(weight, torch.Tensor)]

    decoder, parts = model.model, []
    layers = [getattr(layer, "input_layernorm", None) for layer in getattr(decoder, "layers", [])]
    for name, found in (("embed", weights(getattr(decoder, "embed_tokens", None))),
                        ("head", weights(getattr(model, "lm_head", None))),
                        ("norm", weights(getattr(decoder, "norm", None))), ("layers", weights(*layers))):
        if found:
            sha256 = hashlib.sha256()
            for weight in found:
                rows = weight[:256:16] if weight.dim() > 1 else weight
                sha256.update(files.view(rows.detach().cpu().contiguous()))
            parts.append(f"{name}:{sha256.hexdigest()[:8]}")
    return " ".join(parts)


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
        self.model, self.folder = model, Path(os.environ[DIR_VARIABLE]).absolute()
        # SGLang's watchdog ends a scheduler whose forward pass takes longer than its time
        self.patience = min(STALL_S, (settings.get("watchdog_timeout") or math.inf) / 3)
        self.stalled = False
        sources = (Path(__file__), Path(files.__file__))
        self.metadata = {"schema": str(SCHEMA), "target": Path(settings["model_path"]).name,
                         "capture_layers": ",".join(map(str, layers)), "sglang_version": sglang.__version__,
                         "patch_hash": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()}
        # Every rank of a tensor-parallel group holds whole rows: the first writes. (PP and DP attention are refused.)
        self.writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.samples: dict[str, files.Sample] = {}  # by rid: rows are missing yet
        self.slots = None
        if self.writes:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Refused(f"{DIR_VARIABLE}: {self.folder} cannot be made ({error.strerror}). "
                              "Name a folder that this user may write to.") from None
            logger.info("eagle3_capture: layers %s of %s to %s", layers, self.metadata["target"], self.folder)

    def start_writing(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """For the first rows, not before: CUDA graph capture allows no allocation of pinned memory."""
        self.layouts = {states: files.Layout(states, self.aux_states, width, dtype) for states in files.IN_FP8}
        row_bytes = self.layouts["bf16"].row_bytes
        self.slot_bytes = max(files.SLOT_BYTES, row_bytes + 1)
        self.slots = max(2, self.buffer_bytes // self.slot_bytes)  # how many may still be made
        self.free: queue.SimpleQueue = queue.SimpleQueue()
        self.made = 0
        self.threads = [files.Writer(self.free) for _ in range(min(8, max(4, (os.cpu_count() or 4) // 2)))]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.metadata |= {"dtype": str(dtype).removeprefix("torch."), "weights": fingerprint(self.model)}
        logger.info("eagle3_capture: %d bytes a token (%d in FP8), %d slots of %d MiB, %d threads", row_bytes,
                    self.layouts["fp8"].row_bytes, self.slots, self.slot_bytes >> 20, len(self.threads))

    def slot(self) -> files.Slot:
        """A free slot; waits, and so slows prefill down, when all that there may be are in flight. Raises Stalled."""
        if self.free.empty() and self.slots > 0:
            try:
                slot = files.Slot(self.slot_bytes, self.stream is not None)
                self.slots, self.made = self.slots - 1, self.made + 1
                return slot
            except RuntimeError as error:  # no memory of that kind is left: the slots that there are must do
                if not self.made:
                    raise Refused(f"no memory for rows on their way to the disk ({error}).") from None
                logger.warning("eagle3_capture: %d slots, no more: %s", self.made, error)
                self.slots = 0
        try:
            slot = self.free.get(timeout=max(0.0, self.until - time.monotonic()))
        except queue.Empty:
            self.stalled = True
            raise Stalled(f"no write ended in {self.patience:.0f} s, the disk of {self.folder} stands still") from None
        if self.stalled:  # it writes again: the other rows of this pass are worth waiting for
            self.stalled, self.until = False, time.monotonic() + self.patience
        return slot

    def take(self, wanted: list, aux, last: torch.Tensor, input_ids: torch.Tensor) -> None:
        """Copy the wanted rows of this forward pass into slots and hand them to the writers.

        aux: (N, A*H), packed (SGLang 0.5.23), or a list of A (N, H) (up to 0.5.15); last: (N, H); input_ids: (N,).
        """
        if self.slots is None:
            self.start_writing(last.shape[1], last.dtype, last.device)
        # Once the disk is known to stand still no pass waits for it, until a slot has come back
        self.until = time.monotonic() + (0.0 if self.stalled else self.patience)
        aux = [aux] if isinstance(aux, torch.Tensor) else list(aux)
        # A copy of the ids, made in the order of the forward passes: SGLang (0.5.15, 0.5.23) keeps them in one buffer
        # for all batches, and the next batch's are in it before the side stream comes to read. (Hidden states are new
        # tensors in every pass.)
        input_ids = input_ids.to(torch.int32, copy=True)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(last.device))
            for tensor in (*aux, last, input_ids):
                tensor.record_stream(self.stream)
        there = min(tensor.shape[0] for tensor in (*aux, last, input_ids))
        for row, start, count, rid, parts in wanted:
            sample = self.samples.pop(rid, None)
            if sample is None or start == 0:
                sample = files.Sample(self, *parts)
            if sample.taken != start or start + count > sample.tokens:
                sample.thread.drop(sample, f"retry: positions {start} to {start + count - 1} of {sample.tokens} came, "
                                           f"expected those from {sample.taken}")
            elif row + count > there:
                sample.thread.drop(sample, "refused: this server splits the rows of a batch over ranks")
            elif sample.layout.in_fp8 and last.shape[1] % 4:
                sample.thread.drop(sample, "refused: FP8 states need a hidden size that 4 divides. Use --states bf16.")
            else:
                try:
                    self.copy(sample, slice(row, row + count), aux, last, input_ids)
                except Stalled as error:
                    sample.thread.drop(sample, None)  # once it can
                    # By a thread that nobody waits for: it writes to the same disk
                    told = sample.folder, sample.id, f"stalled: {error}"
                    threading.Thread(target=files.tell, args=told, daemon=True).start()
            # Of one that was given up, too: its later chunks would be lost rows, and that the client's last word
            sample.taken = start + count
            if sample.taken < sample.tokens:
                self.samples[rid] = sample
                if len(self.samples) > MAX_OPEN:
                    oldest = self.samples.pop(next(iter(self.samples)))
                    oldest.thread.drop(oldest, None)

    def copy(self, sample: files.Sample, rows: slice, aux: list[torch.Tensor], last: torch.Tensor, input_ids) -> None:
        """`rows` of a forward pass into slots, not waiting for the GPU, and to the sample's writer. Raises Stalled."""
        layout, first = sample.layout, rows.start
        while first < rows.stop:
            slot = self.slot()
            slot.lay_out(layout)
            number = min(slot.rows(layout), rows.stop - first)
            piece = slice(first, first + number)
            with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
                # Packed on the GPU: a copy into strided host memory would go through unpinned memory and block
                packed = aux[0][piece] if len(aux) == 1 else torch.cat([tensor[piece] for tensor in aux], dim=-1)
                parts = {files.AUX: packed, files.LAST: last[piece], "input_ids": input_ids[piece]}
                finite = packed.isfinite().all() & last[piece].isfinite().all()
                for name in layout.in_fp8:
                    parts[name], parts[files.SCALES[name]] = files.quantised(parts[name], layout.width)
                for name, part in parts.items():
                    slot.parts[name][:number].copy_(part, non_blocking=True)
                slot.finite.copy_(finite.view(1), non_blocking=True)
                if self.stream:
                    slot.copied = torch.cuda.Event()
                    slot.copied.record(self.stream)
            first += number
            sample.thread.add(sample, slot, number)


def capture(model, positions: torch.Tensor, forward_batch, hidden_states: torch.Tensor, aux_hidden_states):
    """Called by the patched forward between model and logits; returns the `aux_hidden_states` that SGLang goes on with.

    model: a ...ForCausalLM; positions: (N,); hidden_states: (N, H) after the final norm; aux_hidden_states: None,
    (N, A*H) or a list of (N, H). Raises Refused, which ends the server: capturing wrong rows is worse than none.
    """
    global _state
    if not _enabled or hasattr(model, "hot_token_id"):  # a draft: LlamaForCausalLMEagle3 runs in Llama's own forward
        return aux_hidden_states
    wanted = wanted_rows(forward_batch)
    if _state is None:
        try:
            _state = Capture(model)
        except Refused as error:
            for *_, (run, _, _, sample_id, _) in wanted:
                files.tell(Path(os.environ[DIR_VARIABLE]).absolute() / run, sample_id, f"refused: {error}")
            raise
    if wanted and aux_hidden_states is not None:
        if _state.writes:
            _state.take(wanted, aux_hidden_states, hidden_states, forward_batch.input_ids)
    elif wanted and forward_batch.contains_mm_inputs():
        for *_, (run, _, _, sample_id, _) in wanted:
            files.tell(_state.folder / run, sample_id, "retry: this batch, which held an image, switched capture on")
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
    target_modules: the decoder without its head ("language_model.model" in a multimodal wrapper). Most model files add
    1 to the ids: give 2 30 58 to them. What the server then captures is compared with EAGLE3_CAPTURE_LAYERS.
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
