"""Train an EAGLE-3 drafter on the target's own hidden states, and export it as SGLang loads it.

Reads   hidden_states/ (03_extract), vocab_mapping/ (02_build_vocab), and of the target only `embed_tokens`, `lm_head` and the final norm's weight.
Writes  output/best/ and output/checkpoint-<step>/ (config.json, model.safetensors, eagle3.json; checkpoints also training_state/),
        metrics.jsonl, val_ids.json, training.png, manifest.json (last).

    python3 -u 04_train.py --verifier-path /shared/kimi-k2.5-int4 --data-dir /data/eagle3/run/hidden_states \\
      --vocab-mapping-dir /data/eagle3/run/vocab_mapping --output-dir /data/eagle3/run/output --epochs 5 --lr 3e-5
    torchrun --nproc_per_node 4 04_train.py ...        # several GPUs: the same flags

The same command goes on after a crash from the last checkpoint, to the same bytes. Disk: 14 GB a checkpoint at Kimi's size (17 with 64 KV heads).

    python3 -u 04_train.py ... --follow --epochs 1     # beside 03_extract: one pass in 03's order, over samples as they land
Where 03 runs with --max-disk-gb, samples are released (removed) once a checkpoint has them behind it; nowhere else is anything removed.
Steps and batches are planned from 03's plan.jsonl, so they are those of `--order plan --epochs 1` on a complete folder.

Training-time test (TTT; EAGLE-3, arXiv 2503.01840): step k of the draft is trained on its own hidden state of step k-1, as in serving.
Step k at position p: token x[p+1+k], hidden h'_{k-1}[p] (step 0: fc of the target's aux states), RoPE position p+k; it sees the step-0 keys
of positions <= p of its sample and its own position's keys of steps 1..k, and predicts token p+2+k. Target: softmax(lm_head_target(last[p+1+k])).
It counts where token p+2+k is a response token.

Shapes: B samples packed one after the other, C context rows, R query rows (those that carry loss in some step: the tail of each
sample), H hidden, D head_dim, Q = heads*D, KV = 2*kv_heads*D, I intermediate, K TTT steps, Vt target vocabulary, Vd draft vocabulary.
Glossary: loss_k mean loss of TTT step k | full_acc_k steps 0..k all right | cond_acc_k step k right, given that 0..k-1 were |
accept_length tokens emitted per target step, bonus included: in validation lines by a walk as greedy serving makes it; in step lines
1 + the sum of full_acc, which is larger, since it counts every row and not only those where a verify step would begin. A draft is right when
it is the token that the target emitted: on greedy responses that is what greedy serving checks, on sampled ones it has the probability with
which serving at that temperature accepts it.
"""
from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import random
import re
import shutil
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import IO

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

STAGE = "04_train"
SCHEMA = 1

# ---- The block below is the same in every numbered script; tests/test_scripts.py compares the copies ----
CONFIG_SECTIONS = {"run_dir", "target", "generate", "build_vocab", "extract", "train", "benchmark", "servers"}


class UserError(Exception):
    """Bad input or configuration. The message says what, where and what to do; the script ends with exit code 2."""


def log(event: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {STAGE[3:]} {event}", flush=True)


def read_config(path: Path) -> dict:
    """The run's YAML file with `{run_dir}` and `{target}` filled in. Raises UserError."""
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not a readable YAML file ({' '.join(str(error).split())}).") from None
    if not isinstance(document, dict) or not set(document) <= CONFIG_SECTIONS:
        unknown = sorted(set(document) - CONFIG_SECTIONS) if isinstance(document, dict) else document
        raise UserError(f"{path}: unknown section {unknown}; known: {sorted(CONFIG_SECTIONS)}.")
    names = {f"{{{key}}}": str(document.get(key, "")) for key in ("run_dir", "target")}

    def fill(value):
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        for name, text in names.items():
            value = value.replace(name, text) if isinstance(value, str) else value
        return value

    return fill(document)


def parse_args(parser: argparse.ArgumentParser, section: str, argv: list[str]) -> argparse.Namespace:
    """Flags, over `section` of the --config file, over the defaults. An unknown key is a UserError."""
    def fail(message):
        raise UserError(f"{message}. See --help.")

    parser.error = fail
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help=f"run file; its section `{section}` holds flags")
    probe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    probe.add_argument("--config", type=Path)
    path, tokens = probe.parse_known_args(argv)[0].config, []
    actions = {option[2:]: action for action in parser._actions for option in action.option_strings}
    for key, value in ((read_config(path).get(section) or {}) if path else {}).items():
        if key not in actions or key in ("config", "help"):
            raise UserError(f"{path}: {section}.{key} is not a flag of {STAGE}.py. See --help.")
        if value is None or any(word.split("=")[0] in actions[key].option_strings for word in argv):
            continue  # the command line wins
        if isinstance(value, bool) and actions[key].choices:
            value = "on" if value else "off"  # what YAML makes of an unquoted on or off
        if isinstance(value, bool):
            tokens += [f"--{key}"] if value else [f"--no-{key}"] if f"no-{key}" in actions else []
        elif isinstance(value, list):
            repeated = isinstance(actions[key], argparse._AppendAction)
            tokens += [f"--{key}={item}" for item in value] if repeated else [f"--{key}", *map(str, value)]
        else:
            tokens.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return parser.parse_args(tokens + argv)


def sync_folder(folder: Path) -> None:
    """A file's name is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write, fsync, rename: after a crash `path` holds the old bytes or all of the new ones."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path, stage: str) -> dict:
    """The manifest.json that `stage` wrote last into `folder`, so: the folder is complete. Raises UserError."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder}: no readable manifest.json, so {stage} has not finished there. Run {stage}.py first.") from None
    if manifest.get("stage") != stage or manifest.get("schema") != SCHEMA:
        raise UserError(f"{folder}: written by {manifest.get('stage')} (schema {manifest.get('schema')}), "
                        f"expected {stage} (schema {SCHEMA}). Name the right folder.")
    return manifest


def open_stage(folder: Path, config: dict, may_change: set[str]) -> IO:
    """Lock `folder` for this process and refuse what another config began there (`stage.json`). Keep the handle open. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}). Name another --output-dir.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it when the process dies, however it dies
    except BlockingIOError:
        raise UserError(f"{folder}: another process is writing there. Wait for it, or use another folder.") from None
    fixed = json.loads(json.dumps({key: value for key, value in config.items() if key not in may_change}, default=str))
    path = folder / "stage.json"
    old = json.loads(path.read_text()) if path.exists() else fixed
    differs = [f"{key}: {old.get(key)!r} there, {fixed.get(key)!r} now"
               for key in sorted(old.keys() | fixed.keys()) if old.get(key) != fixed.get(key)]
    if differs:
        raise UserError(f"{folder}: begun with another config ({'; '.join(differs)}). Use the old values or another folder.")
    write_atomic(path, json.dumps(fixed, indent=1, sort_keys=True) + "\n")
    return lock


def run(main) -> None:
    """Call main(argv); bad input ends in one line and exit code 2, Ctrl-C in 130, anything else in a traceback and 1."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"{STAGE}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{STAGE}: interrupted. The same command goes on from here.", file=sys.stderr, flush=True)
        sys.exit(130)
# ---- end of the common block ----


# ------------------------------------------------------------------ constants and arguments
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "RTX PRO 6000": 504}  # dense bf16, the makers' data sheets; MFU is counted against them
MIN_AGREEMENT = 0.05  # less of the response being the target's argmax means: other states, other target
MAX_BAD = 0.01


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--verifier-path", type=Path, help="the target's folder")
    p.add_argument("--data-dir", type=Path, help="hidden_states/ of 03_extract")
    p.add_argument("--vocab-mapping-dir", type=Path, help="vocab_mapping/ of 02_build_vocab")
    p.add_argument("--output-dir", type=Path)
    p.add_argument("--finetune-from", type=Path, metavar="DIR", help="start from this drafter (a best/ or checkpoint folder) instead of fresh weights")
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--order", choices=("shuffle", "plan"), default="shuffle", help="plan: in the order of 03's plan.jsonl, that of --follow")
    p.add_argument("--follow", action="store_true", help="train on samples as 03_extract lands them: one pass (--epochs 1) in its order, validation at "
                   "the end: every batch is new to the drafter, so each step's figures are held-out ones")
    p.add_argument("--release-share", type=float, default=0.25, metavar="F", help="--follow, bounded: save a checkpoint and release what it has behind it "
                   "whenever that is this share of 03's bound (less validation). Smaller: 03 waits less, more checkpoints (14 GB each at Kimi's size)")
    p.add_argument("--max-steps", type=int, help="stop after this many optimizer steps (the schedule ends there)")
    p.add_argument("--lr", type=float, default=3e-5, help="peak learning rate")
    p.add_argument("--scheduler", choices=("cosine", "linear", "constant"), default="cosine")
    p.add_argument("--warmup-ratio", type=float, default=0.01)
    p.add_argument("--weight-decay", type=float, default=0.0)
    p.add_argument("--beta1", type=float, default=0.9)
    p.add_argument("--beta2", type=float, default=0.95)
    p.add_argument("--max-grad-norm", type=float, default=1.0)
    p.add_argument("--max-seq-len", type=int, default=2048, help="tokens of a sample used; the rest is cut off and counted")
    p.add_argument("--batch-tokens", type=int, default=8192, help="tokens packed into a micro-batch of one GPU")
    p.add_argument("--grad-accum", type=int, default=1, help="micro-batches of a GPU in an optimizer step")
    p.add_argument("--ttt-steps", type=int, default=3, help="training-time-test steps; serving with N steps needs at least N")
    p.add_argument("--step-decay", type=float, default=0.8, help="TTT step k weighs this to the k in the loss")
    p.add_argument("--step-weights", type=float, nargs="+", metavar="W", help="the weights of the TTT steps, one each, instead of --step-decay")
    p.add_argument("--num-draft-steps", type=int, help="speculative steps of the predicted accept_length (default: --ttt-steps)")
    p.add_argument("--loss", choices=("ce", "kl", "lk"), default="ce", help="soft cross-entropy, KL, or -log of the acceptance probability")
    p.add_argument("--noise-std", type=float, default=0.0, help="EAGLE's uniform noise on the target's states")
    p.add_argument("--ema", type=float, default=0.0, metavar="DECAY", help="evaluate and export an exponential moving average of the weights")
    p.add_argument("--val-ratio", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--num-heads", type=int, help="attention heads (default: the target's)")
    p.add_argument("--num-kv-heads", type=int, help="default: 8, or all heads where 8 does not divide them")
    p.add_argument("--head-dim", type=int, help="default: the target's v_head_dim, else head_dim, else hidden / heads")
    p.add_argument("--intermediate-size", type=int, help="default: the target's")
    p.add_argument("--rope-theta", type=float, help="default: the target's")
    p.add_argument("--max-position-embeddings", type=int, help="at least the served context (default: the target's)")
    p.add_argument("--serve-sglang-version", help="the SGLang that will serve the drafter: decides the layer ids (default: the one that captured)")
    p.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), help="of the matrix products (default: bfloat16 on a GPU, float32 on a CPU)")
    p.add_argument("--export-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one; CUDA_VISIBLE_DEVICES says which")
    p.add_argument("--resume", action="store_true", help="on by itself: the same command goes on from the last checkpoint in --output-dir")
    p.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="evaluate and save every so many steps besides each epoch's end")
    p.add_argument("--keep-checkpoints", type=int, default=2, help="the latest checkpoints kept; best/ stays besides")
    p.add_argument("--num-workers", type=int, default=4, help="threads that read samples ahead")
    p.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    p.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events to output-dir/tensorboard")
    return p


MAY_CHANGE = {"config", "verifier-path", "data-dir", "vocab-mapping-dir", "output-dir", "num-workers", "log-every", "keep-checkpoints", "tensorboard", "device",
              "resume", "grad-accum", "release-share"}


# ------------------------------------------------------------------ operations
# Each has a plain form (CPU, float32 and float64: the definition) and, on a GPU, a fused Triton kernel that computes the same.
# Gradients are written out by hand: the pass has one layer, and knowing its backward is what lets weights' gradients be added in place,
# rows without loss be left out and the embedding half be computed once.
FUSED = {"rms_norm", "swiglu", "rope", "diagonals", "loss", "target", "adamw"}  # a GPU uses these kernels; scripts/bench_train.py compares each


def fused(name: str, x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and name in FUSED and triton is not None


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype that sums run in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x, weight, eps: float):
    """x / rms(x) * weight (weight None: without it), and 1 / rms(x). x (N, H) -> (N, H), (N,)."""
    if fused("rms_norm", x):
        y, scale = torch.empty_like(x), torch.empty(len(x), device=x.device)
        if len(x):
            rms_norm_kernel[(len(x),)](x, weight if weight is not None else x, y, scale, x.shape[1], eps, HAS_WEIGHT=weight is not None,
                                       BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
        return y, scale
    x_wide = x.to(wide(x))
    scale = torch.rsqrt(x_wide.square().mean(-1) + eps)
    y = x_wide * scale[:, None]
    return (y if weight is None else y * weight).to(x.dtype), scale


def rms_norm_backward(dy, x, scale, weight, residual=None):
    """Gradients of rms_norm: dx (N, H), to which `residual` is added, and dweight (H,)."""
    if fused("rms_norm", x) and len(x):
        dx, programs = torch.empty_like(x), min(len(x), 528)
        partial = torch.empty(programs, x.shape[1], device=x.device)
        rms_norm_backward_kernel[(programs,)](dy, x, scale, weight, residual if residual is not None else x, dx, partial, len(x), x.shape[1], HAS_RESIDUAL=residual is not None,
                                              BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
        return dx, partial.sum(0)
    normed, dy_wide = x.to(wide(x)) * scale[:, None], dy.to(wide(x))
    g = dy_wide * weight
    dx = scale[:, None] * (g - normed * (g * normed).mean(-1, keepdim=True))
    return (dx if residual is None else dx + residual).to(x.dtype), (dy_wide * normed).sum(0)


def swiglu(gate_up):
    """silu(gate) * up. (N, 2I) -> (N, I)."""
    if fused("swiglu", gate_up) and len(gate_up):
        n, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(n, width)
        swiglu_kernel[(n, triton.cdiv(width, 2048))](gate_up, out, width, BLOCK=2048, num_warps=4)
        return out
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(d_out, gate_up):
    if fused("swiglu", gate_up) and len(gate_up):
        n, width = d_out.shape
        grad = torch.empty_like(gate_up)
        swiglu_backward_kernel[(n, triton.cdiv(width, 2048))](d_out, gate_up, grad, width, BLOCK=2048, num_warps=4)
        return grad
    gate, up = gate_up.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    return torch.cat([d_out * up * sigmoid * (1 + gate * (1 - sigmoid)), d_out * gate * sigmoid], -1)


def rope_(x, positions, table, head_dim: int, inverse=False):
    """Rotate x (N, heads*D; rows may lie apart) in place by its positions (N,), halves paired as SGLang's neox style. inverse: the gradient."""
    cos, sin = table  # (positions, D/2) each
    heads = x.view(len(x), -1, head_dim)
    if fused("rope", x) and len(x):
        rope_kernel[(len(x),)](x, positions, cos, sin, x.stride(0), heads.shape[1], -1.0 if inverse else 1.0, HALF=head_dim // 2,
                               HEADS=triton.next_power_of_2(heads.shape[1]), BLOCK=triton.next_power_of_2(head_dim // 2), num_warps=4)
        return x
    cos, sin = cos[positions][:, None], sin[positions][:, None] * (-1 if inverse else 1)
    first, second = heads[..., :head_dim // 2].to(cos.dtype), heads[..., head_dim // 2:].to(cos.dtype)
    heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
    return x


def causal_scores(q, k, heads: int, kv_heads: int):
    """Scaled scores of one sample's query tail against its keys, (kv_heads, heads/kv_heads, q, k); query i sits at key k - q + i."""
    q = q.view(len(q), kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("qhgd,khd->hgqk", q, k.view(len(k), kv_heads, -1)) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    return scores.masked_fill_(hidden, -math.inf)


def attention(q, kv, own, rows, shape):
    """Attention of one TTT step: step-0 keys of the sample up to the position, merged by log-sum-exp with the position's own later keys.

    q (R, Q), kv (C, KV) of step 0, own (k, R, KV) of steps 1..k -> out (R, Q), lse (heads, R), what the flash kernel's backward wants.
    """
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    key, value = kv[:, :kv_heads * dim], kv[:, kv_heads * dim:]
    if flash(q):
        out, lse, *state = torch.ops.aten._flash_attention_forward(
            q.view(-1, heads, dim), key.view(-1, kv_heads, dim), value.view(-1, kv_heads, dim), rows.cu_q, rows.cu_k, rows.max_q, rows.max_k,
            0.0, True, False, scale=dim ** -0.5)
        out = out.view(len(q), -1)
    else:
        state, out, lse = (), torch.empty_like(q), q.new_empty(heads, len(q), dtype=wide(q))
        for (q0, q1), (k0, k1) in rows.spans:
            scores = causal_scores(q[q0:q1], key[k0:k1], heads, kv_heads).to(wide(q))
            lse[:, q0:q1] = scores.logsumexp(-1).flatten(0, 1)
            weights = (scores - lse[:, q0:q1].view(*scores.shape[:3], 1)).exp_().to(q.dtype)
            out[q0:q1] = torch.einsum("hgqk,khd->qhgd", weights, value[k0:k1].view(k1 - k0, kv_heads, dim)).flatten(1)
    if len(own):
        merge_own_keys(q, own, out, lse, shape)
    return out, lse, state


def own_views(q, own, shape):
    group = shape.heads // shape.kv_heads
    key, value = own.view(len(own), len(q), 2, shape.kv_heads, 1, shape.head_dim).unbind(2)  # (k, R, kv_heads, 1, D)
    return q.view(len(q), shape.kv_heads, group, shape.head_dim), key, value


def merge_own_keys(q, own, out, lse, shape) -> None:
    """Add the position's own keys to out (R, Q) and lse (heads, R), in place."""
    if fused("diagonals", q):
        grid, blocks = own_launch(q, shape)
        own_keys_kernel[grid](q, own, out, lse, len(q), len(own), shape.head_dim ** -0.5, **blocks)
        return
    queries, key, value = own_views(q, own, shape)
    scores = (queries * key).sum(-1).to(lse.dtype) * shape.head_dim ** -0.5  # (k, R, kv_heads, group)
    old = lse.t().reshape(scores.shape[1:])
    new = torch.logaddexp(old, scores.logsumexp(0))
    merged = out.view_as(queries) * (old - new).exp()[..., None] + ((scores - new).exp()[..., None] * value).sum(0)
    out.copy_(merged.reshape(out.shape))
    lse.copy_(new.reshape(len(q), -1).t())


def attention_backward(d_out, q, kv, own, out, lse, state, d_kv, d_own, rows, shape):
    """Returns dq (R, Q); adds to d_kv (C, KV) and d_own (k, R, KV). Softmax gradients need only the final out and lse, so the flash kernel's
    backward, given those of the merged attention, is exact for its part of the keys."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    key, value = kv[:, :kv_heads * dim], kv[:, kv_heads * dim:]
    if flash(q):
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            d_out.view(-1, heads, dim), q.view(-1, heads, dim), key.view(-1, kv_heads, dim), value.view(-1, kv_heads, dim),
            out.view(-1, heads, dim), lse, rows.cu_q, rows.cu_k, rows.max_q, rows.max_k, 0.0, True, state[0], state[1], scale=dim ** -0.5)
        dq = dq.view(len(q), -1)
        d_kv[:, :kv_heads * dim] += dk.view(len(kv), -1)
        d_kv[:, kv_heads * dim:] += dv.view(len(kv), -1)
    else:
        dq = torch.empty_like(q)
        delta = (d_out * out).view(len(q), heads, dim).sum(-1, dtype=wide(q)).t()  # (heads, R)
        for (q0, q1), (k0, k1) in rows.spans:
            ks, vs = key[k0:k1].view(k1 - k0, kv_heads, dim), value[k0:k1].view(k1 - k0, kv_heads, dim)
            qs, ds = (x[q0:q1].view(q1 - q0, kv_heads, -1, dim) for x in (q, d_out))
            scores = causal_scores(q[q0:q1], key[k0:k1], heads, kv_heads).to(wide(q))
            weights = (scores - lse[:, q0:q1].view(*scores.shape[:3], 1)).exp_()
            d_scores = (torch.einsum("qhgd,khd->hgqk", ds, vs) - delta[:, q0:q1].view(*scores.shape[:3], 1)) * weights * dim ** -0.5
            weights, d_scores = weights.to(q.dtype), d_scores.to(q.dtype)
            dq[q0:q1] = torch.einsum("hgqk,khd->qhgd", d_scores, ks).flatten(1)
            d_kv[k0:k1, :kv_heads * dim] += torch.einsum("hgqk,qhgd->khd", d_scores, qs).flatten(1)
            d_kv[k0:k1, kv_heads * dim:] += torch.einsum("hgqk,qhgd->khd", weights, ds).flatten(1)
    if len(own) and fused("diagonals", q):
        grid, blocks = own_launch(q, shape)
        own_keys_backward_kernel[grid](d_out, q, own, out, lse, dq, d_own, len(q), len(own), dim ** -0.5, **blocks)
    elif len(own):
        queries, own_key, own_value = own_views(q, own, shape)
        d_key, d_value = own_views(q, d_own, shape)[1:]
        grads, lse_rows = d_out.view_as(queries), lse.t().reshape(queries.shape[:3])
        weights = ((queries * own_key).sum(-1) * dim ** -0.5 - lse_rows).exp()
        delta = (grads * out.view_as(queries)).sum(-1)
        d_scores = weights * ((grads * own_value).sum(-1) - delta) * dim ** -0.5
        dq += (d_scores[..., None] * own_key).sum(0).reshape(dq.shape).to(dq.dtype)
        d_key += (d_scores[..., None] * queries).sum(3, keepdim=True).to(dq.dtype)
        d_value += (weights[..., None] * grads).sum(3, keepdim=True).to(dq.dtype)
    return dq


def flash(x) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def logits_of(x, head):
    """x (N, H) @ head (V, H).T, in float32 out of the matrix units also where x is bfloat16."""
    return torch.mm(x, head.t(), out_dtype=torch.float32) if flash(x) else torch.mm(x, head.t()).to(wide(x))


def target_probabilities(last, head, mass, pad: int):
    """The target's probabilities of the draft vocabulary's tokens, (R + pad, Vd); rows sum to `mass` (R,), the rest lies outside it."""
    out = last.new_zeros(len(last) + pad, len(head))
    for rows in chunks(len(last), len(head)):
        logits = logits_of(last[rows], head)
        if fused("target", last):
            target_kernel[(len(logits),)](logits, mass[rows], out[rows], logits.shape[1], BLOCK=4096, num_warps=8)
        else:
            out[rows] = logits.softmax(-1).mul_(mass[rows, None])
    return out


def chunks(rows: int, width: int, budget=1 << 28):
    """Row slices of which `width` float32 columns fit 1 GiB: whole logits never lie in memory."""
    step = max(1, budget // width)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def soft_cross_entropy(logits, target, weight, kind: str):
    """Row losses, argmax and d(sum of weight * loss)/d logits. logits, target (N, Vd), weight (N,) -> (N,), (N,), (N, Vd) in target's dtype.

    With p the target's probabilities (summing to the mass m inside the draft vocabulary) and q = softmax(logits):
    ce -sum p log q | kl the same less p's entropy | lk -log sum min(p, q), the acceptance probability itself (LK losses, arXiv 2602.23881).
    Mass outside the draft vocabulary cannot be drafted: it scales a row's gradient by m in ce and kl and bounds the acceptance in lk.
    """
    if fused("loss", logits):
        loss, best = torch.empty_like(weight), torch.empty(len(weight), dtype=torch.int64, device=weight.device)
        grad = torch.empty_like(target)
        loss_kernel[(len(logits),)](logits, target, weight, loss, best, grad, logits.shape[1], KIND=("ce", "kl", "lk").index(kind), BLOCK=4096, num_warps=8)
        return loss, best, grad
    target = target.to(logits.dtype)
    log_q = logits.log_softmax(-1)
    q, best = log_q.exp(), logits.argmax(-1)
    if kind == "lk":
        under = q < target
        accept = torch.minimum(q, target).sum(-1, keepdim=True).clamp_min(1e-30)
        return -accept.log()[:, 0], best, (q / accept * ((q * under).sum(-1, keepdim=True) - under.to(q.dtype)) * weight[:, None])
    loss = -(target * log_q).sum(-1)
    if kind == "kl":
        loss = loss + torch.special.xlogy(target, target).sum(-1)
    return loss, best, (q * target.sum(-1, keepdim=True) - target) * weight[:, None]


# ------------------------------------------------------------------ fused GPU kernels of the operations above (triton comes with torch on Linux)
# One program handles one row (or one block of a row), computes in float32 and reads and writes each element of memory once or twice.
if triton is not None:
    @triton.jit
    def rms_norm_kernel(x_ptr, w_ptr, y_ptr, scale_ptr, H, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
        row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * H + cols, cols < H, 0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
        y = x * scale
        if HAS_WEIGHT:
            y *= tl.load(w_ptr + cols, cols < H, 0.0).to(tl.float32)
        tl.store(y_ptr + row * H + cols, y, cols < H)
        tl.store(scale_ptr + row, scale)

    @triton.jit
    def rms_norm_backward_kernel(dy_ptr, x_ptr, scale_ptr, w_ptr, residual_ptr, dx_ptr, partial_ptr, rows, H,
                                 HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
        cols = tl.arange(0, BLOCK)
        begin = tl.program_id(0).to(tl.int64) * 0  # makes the sums below 64 bits wide
        w = tl.load(w_ptr + cols, cols < H, 0.0).to(tl.float32)
        d_weight = tl.zeros([BLOCK], tl.float32)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = (begin + row) * H + cols
            scale = tl.load(scale_ptr + row)
            normed = tl.load(x_ptr + offsets, cols < H, 0.0).to(tl.float32) * scale
            dy = tl.load(dy_ptr + offsets, cols < H, 0.0).to(tl.float32)
            d_weight += dy * normed
            g = dy * w
            dx = scale * (g - normed * (tl.sum(g * normed, 0) / H))
            if HAS_RESIDUAL:
                dx += tl.load(residual_ptr + offsets, cols < H, 0.0).to(tl.float32)
            tl.store(dx_ptr + offsets, dx, cols < H)
        tl.store(partial_ptr + tl.program_id(0) * H + cols, d_weight, cols < H)

    @triton.jit
    def swiglu_kernel(x_ptr, out_ptr, I, BLOCK: tl.constexpr):
        row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(x_ptr + row * 2 * I + cols, cols < I, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * I + I + cols, cols < I, 0.0).to(tl.float32)
        tl.store(out_ptr + row * I + cols, gate * tl.sigmoid(gate) * up, cols < I)

    @triton.jit
    def swiglu_backward_kernel(d_ptr, x_ptr, dx_ptr, I, BLOCK: tl.constexpr):
        row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        d = tl.load(d_ptr + row * I + cols, cols < I, 0.0).to(tl.float32)
        gate = tl.load(x_ptr + row * 2 * I + cols, cols < I, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * I + I + cols, cols < I, 0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        tl.store(dx_ptr + row * 2 * I + cols, d * up * sigmoid * (1 + gate * (1 - sigmoid)), cols < I)
        tl.store(dx_ptr + row * 2 * I + I + cols, d * gate * sigmoid, cols < I)

    @triton.jit
    def rope_kernel(x_ptr, position_ptr, cos_ptr, sin_ptr, stride, heads, sign, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
        row, head, cols = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
        position = tl.load(position_ptr + row)
        cos = tl.load(cos_ptr + position * HALF + cols, cols < HALF, 0.0)
        sin = tl.load(sin_ptr + position * HALF + cols, cols < HALF, 0.0) * sign
        inside = (head < heads) & (cols < HALF)
        offsets = row * stride + head * (2 * HALF) + cols
        first = tl.load(x_ptr + offsets, inside, 0.0).to(tl.float32)
        second = tl.load(x_ptr + offsets + HALF, inside, 0.0).to(tl.float32)
        tl.store(x_ptr + offsets, first * cos - second * sin, inside)
        tl.store(x_ptr + offsets + HALF, second * cos + first * sin, inside)

    def own_launch(q, shape) -> tuple[tuple, dict]:
        """Grid and block sizes: a program takes one row and as many kv heads, with their query heads, as make about 1024 elements."""
        group = shape.heads // shape.kv_heads
        blocks = {"BG": triton.next_power_of_2(group), "BD": triton.next_power_of_2(shape.head_dim)}
        blocks["BH"] = min(max(1, 1024 // (blocks["BG"] * blocks["BD"])), triton.next_power_of_2(shape.kv_heads))
        return (len(q), triton.cdiv(shape.kv_heads, blocks["BH"])), {"KV_HEADS": shape.kv_heads, "GROUP": group, "DIM": shape.head_dim, **blocks}

    @triton.jit
    def own_keys_kernel(q_ptr, own_ptr, out_ptr, lse_ptr, rows, steps, scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                        BG: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr):
        row, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
        g, d = tl.arange(0, BG), tl.arange(0, BD)
        head = h[:, None] * GROUP + g[None, :]  # (BH, BG)
        head_ok = (h < KV_HEADS)[:, None] & (g < GROUP)[None, :]
        inside = head_ok[:, :, None] & (d < DIM)[None, None, :]
        kv_ok = (h < KV_HEADS)[:, None, None] & (d < DIM)[None, None, :]
        q_at = row * (KV_HEADS * GROUP * DIM) + head[:, :, None] * DIM + d[None, None, :]
        q = tl.load(q_ptr + q_at, inside, 0.0).to(tl.float32)
        out = tl.load(out_ptr + q_at, inside, 0.0).to(tl.float32)
        lse_at = head.to(tl.int64) * rows + row
        lse = tl.load(lse_ptr + lse_at, head_ok, 0.0)
        for i in range(steps):
            kv_at = (row + i * rows) * (2 * KV_HEADS * DIM) + h[:, None, None] * DIM + d[None, None, :]
            key = tl.load(own_ptr + kv_at, kv_ok, 0.0).to(tl.float32)
            value = tl.load(own_ptr + kv_at + KV_HEADS * DIM, kv_ok, 0.0).to(tl.float32)
            score = tl.sum(q * key, 2) * scale  # (BH, BG)
            top = tl.maximum(lse, score)
            merged = top + tl.log(tl.exp(lse - top) + tl.exp(score - top))
            out = out * tl.exp(lse - merged)[:, :, None] + tl.exp(score - merged)[:, :, None] * value
            lse = merged
        tl.store(out_ptr + q_at, out, inside)
        tl.store(lse_ptr + lse_at, lse, head_ok)

    @triton.jit
    def own_keys_backward_kernel(d_ptr, q_ptr, own_ptr, out_ptr, lse_ptr, dq_ptr, d_own_ptr, rows, steps, scale, KV_HEADS: tl.constexpr,
                                 GROUP: tl.constexpr, DIM: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr):
        row, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
        g, d = tl.arange(0, BG), tl.arange(0, BD)
        head = h[:, None] * GROUP + g[None, :]
        head_ok = (h < KV_HEADS)[:, None] & (g < GROUP)[None, :]
        inside = head_ok[:, :, None] & (d < DIM)[None, None, :]
        kv_ok = (h < KV_HEADS)[:, None, None] & (d < DIM)[None, None, :]
        q_at = row * (KV_HEADS * GROUP * DIM) + head[:, :, None] * DIM + d[None, None, :]
        q = tl.load(q_ptr + q_at, inside, 0.0).to(tl.float32)
        d_out = tl.load(d_ptr + q_at, inside, 0.0).to(tl.float32)
        delta = tl.sum(d_out * tl.load(out_ptr + q_at, inside, 0.0).to(tl.float32), 2)
        lse = tl.load(lse_ptr + head.to(tl.int64) * rows + row, head_ok, 0.0)
        dq = tl.load(dq_ptr + q_at, inside, 0.0).to(tl.float32)
        for i in range(steps):
            kv_at = (row + i * rows) * (2 * KV_HEADS * DIM) + h[:, None, None] * DIM + d[None, None, :]
            key = tl.load(own_ptr + kv_at, kv_ok, 0.0).to(tl.float32)
            value = tl.load(own_ptr + kv_at + KV_HEADS * DIM, kv_ok, 0.0).to(tl.float32)
            weight = tl.exp(tl.sum(q * key, 2) * scale - lse)
            weight = tl.where(head_ok, weight, 0.0)
            d_score = weight * (tl.sum(d_out * value, 2) - delta) * scale
            dq += d_score[:, :, None] * key
            d_key = tl.sum(d_score[:, :, None] * q, 1, keep_dims=True)  # (BH, 1, BD)
            d_value = tl.sum(weight[:, :, None] * d_out, 1, keep_dims=True)
            tl.store(d_own_ptr + kv_at, tl.load(d_own_ptr + kv_at, kv_ok, 0.0).to(tl.float32) + d_key, kv_ok)
            tl.store(d_own_ptr + kv_at + KV_HEADS * DIM, tl.load(d_own_ptr + kv_at + KV_HEADS * DIM, kv_ok, 0.0).to(tl.float32) + d_value, kv_ok)
        tl.store(dq_ptr + q_at, dq, inside)

    @triton.jit
    def target_kernel(z_ptr, mass_ptr, out_ptr, V, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        top, total = -float("inf"), 0.0
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = tl.load(z_ptr + row * V + cols, cols < V, -float("inf"))
            new = tl.maximum(top, tl.max(z, 0))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), 0)
            top = new
        share = tl.load(mass_ptr + row) / total
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = tl.load(z_ptr + row * V + cols, cols < V, -float("inf"))
            tl.store(out_ptr + row * V + cols, tl.exp(z - top) * share, cols < V)

    @triton.jit
    def loss_kernel(z_ptr, p_ptr, weight_ptr, loss_ptr, best_ptr, d_ptr, V, KIND: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        z_ptr, p_ptr, d_ptr = z_ptr + row * V, p_ptr + row * V, d_ptr + row * V
        weight = tl.load(weight_ptr + row)
        top, total, dot, mass, entropy, best = -float("inf"), 0.0, 0.0, 0.0, 0.0, 0
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            z = tl.load(z_ptr + cols, cols < V, -float("inf"))
            p = tl.load(p_ptr + cols, cols < V, 0.0).to(tl.float32)
            block_top = tl.max(z, 0)
            best = tl.where(block_top > top, start + tl.argmax(z, 0), best)
            new = tl.maximum(top, block_top)
            total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), 0)
            top = new
            dot += tl.sum(tl.where(cols < V, p * z, 0.0), 0)
            mass += tl.sum(p, 0)
            if KIND == 1:
                entropy += tl.sum(tl.where(p > 0, p * tl.log(tl.maximum(p, 1e-37)), 0.0), 0)
        if KIND == 2:
            accept, under_mass = 0.0, 0.0
            for start in range(0, V, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                q = tl.exp(tl.load(z_ptr + cols, cols < V, -float("inf")) - top) / total
                p = tl.load(p_ptr + cols, cols < V, 0.0).to(tl.float32)
                accept += tl.sum(tl.minimum(p, q), 0)
                under_mass += tl.sum(tl.where(q < p, q, 0.0), 0)
            accept = tl.maximum(accept, 1e-30)
            tl.store(loss_ptr + row, -tl.log(accept))
        else:
            tl.store(loss_ptr + row, mass * (top + tl.log(total)) - dot + entropy)
        tl.store(best_ptr + row, best.to(tl.int64))
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            q = tl.exp(tl.load(z_ptr + cols, cols < V, -float("inf")) - top) / total
            p = tl.load(p_ptr + cols, cols < V, 0.0).to(tl.float32)
            if KIND == 2:
                d = q / accept * (under_mass - tl.where(q < p, 1.0, 0.0))
            else:
                d = q * mass - p
            tl.store(d_ptr + cols, d * weight, cols < V)

    @triton.jit
    def adamw_kernel(master_ptr, weight_ptr, grad_ptr, first_ptr, second_ptr, clip_ptr, n, lr, beta1, beta2, eps, decay, correct1, correct2,
                     BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32) * tl.load(clip_ptr)
        first = tl.load(first_ptr + at, inside, 0.0)
        first += (grad - first) * (1 - beta1)
        second = tl.load(second_ptr + at, inside, 0.0) * beta2 + grad * grad * (1 - beta2)
        master = tl.load(master_ptr + at, inside, 0.0) * (1 - lr * decay)
        master -= lr * (first / correct1) / (tl.sqrt(second / correct2) + eps)
        tl.store(first_ptr + at, first, inside)
        tl.store(second_ptr + at, second, inside)
        tl.store(master_ptr + at, master, inside)
        tl.store(weight_ptr + at, master, inside)


# ------------------------------------------------------------------ the draft model
@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter. They are in its config.json."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int

    def weights(self) -> dict[str, tuple[int, ...]]:
        """The trained tensors. The embedding and the hidden half of q, k, v lie apart: the first is applied once for all TTT steps."""
        h, q, kv = self.hidden, self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        return {"lm_head": (self.draft_vocab, h), "down": (h, self.intermediate), "gate_up": (2 * self.intermediate, h), "o": (h, q),
                "q_hidden": (q, h), "kv_hidden": (kv, h), "q_embed": (q, h), "kv_embed": (kv, h), "fc": (h, 3 * h),
                "input_norm": (h,), "hidden_norm": (h,), "post_norm": (h,), "norm": (h,)}

    def flops(self, context: int, query: int, pairs: int, steps: int) -> float:
        """Arithmetic that one forward and backward pass needs; pairs: (query, step-0 key) pairs. The yardstick of MFU."""
        size = {name: math.prod(shape) for name, shape in self.weights().items()}
        per_step = size["q_hidden"] + size["o"] + size["gate_up"] + size["down"] + size["lm_head"]
        first = (2 * size["fc"] + 2 * size["kv_embed"] + 3 * size["kv_hidden"]) * context + 2 * size["q_embed"] * query  # no gradient to the inputs
        later = 3 * (steps * per_step + (steps - 1) * size["kv_hidden"]) * query + size["lm_head"] * query  # the last: target probabilities
        return 2.0 * (first + later) + 14.0 * steps * pairs * self.heads * self.head_dim


class Flat:
    """Named tensors that lie one after the other in one buffer: one optimizer launch, one norm."""

    def __init__(self, shapes: dict, dtype, device):
        self.flat = torch.zeros(sum(map(math.prod, shapes.values())), dtype=dtype, device=device)
        self.views = {name: part.view(shape) for (name, shape), part in
                      zip(shapes.items(), self.flat.split([math.prod(shape) for shape in shapes.values()]))}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.views[name]


class Gradients(Flat):
    """Weights' gradients, added up in place over TTT steps and micro-batches; each is all-reduced as soon as it is complete."""

    def begin(self, first: bool, last: bool) -> None:
        """Start a micro-batch. first: of its optimizer step (what lies in the buffer is old); last: all-reduce what gets done."""
        if first:
            self.stale, self.waiting = set(self.views), []
        self.last = last

    def add(self, name: str, d_out: torch.Tensor, x: torch.Tensor) -> None:
        """d_out (N, out), x (N, in): adds d_out.T @ x."""
        if name in self.stale:
            torch.mm(d_out.t(), x, out=self[name])
            self.stale.discard(name)
        else:
            self[name].addmm_(d_out.t(), x)

    def add_vector(self, name: str, value: torch.Tensor) -> None:
        self[name].copy_(value) if name in self.stale else self[name].add_(value)
        self.stale.discard(name)

    def done(self, *names: str) -> None:
        if self.last and dist.is_initialized():
            for name in names:
                if name in self.stale:  # this rank had no rows
                    self[name].zero_()
                    self.stale.discard(name)
                self.waiting.append(dist.all_reduce(self[name], async_op=True))

    def wait(self) -> None:
        for name in self.stale:
            self[name].zero_()
        for work in self.waiting:
            work.wait()


REDUCE_ORDER = ("lm_head", "norm", "down", "gate_up", "post_norm", "o", "q_hidden", "q_embed", "kv_hidden", "hidden_norm", "fc", "kv_embed")


class Drafter:
    """Weights of the draft layer, and the target's frozen parts.

    master holds the weights as the optimizer changes them (float32, or float64 in tests); `weights` is what is multiplied: the same
    tensor, or in bfloat16 its rounding. A bfloat16 weight alone would lose updates below 2^-9 of itself, and lr 3e-5 makes such updates.
    """

    def __init__(self, shape: Shape, dtype, device, embed: torch.Tensor, target_head: torch.Tensor, draft_ids: torch.Tensor, positions: int):
        self.shape, self.dtype = shape, dtype
        self.master = Flat(shape.weights(), torch.float64 if dtype == torch.float64 else torch.float32, device)
        self.weights = self.master if self.master.flat.dtype == dtype else Flat(shape.weights(), dtype, device)
        self.embed, self.target_head = embed.to(device, dtype), target_head.to(device, dtype)  # (Vt, H), (Vd, H)
        self.draft_ids = draft_ids.to(device)  # (Vd,) target ids
        angle_dtype = self.master.flat.dtype
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=angle_dtype, device=device) / shape.head_dim)
        angles = torch.arange(positions, dtype=angle_dtype, device=device)[:, None] * inverse
        self.rope_table = angles.cos(), angles.sin()

    def initialise(self, seed: int) -> None:
        """Fresh weights: norms at 1, lm_head the target's rows, the rest uniform as torch.nn.Linear's."""
        generator = torch.Generator(self.master.flat.device).manual_seed(seed)
        for name, view in self.master.views.items():
            if name == "lm_head":
                view.copy_(self.target_head)
            elif view.dim() == 1:
                view.fill_(1)
            else:
                fan_in = view.shape[1] * (2 if name.startswith(("q_", "kv_")) else 1)  # their input is [embedding, hidden]
                view.uniform_(-1, 1, generator=generator).mul_(fan_in ** -0.5)
        self.refresh()

    def refresh(self) -> None:
        if self.weights is not self.master:
            self.weights.flat.copy_(self.master.flat)

    @contextmanager
    def using(self, source: Flat):
        """Compute with the weights `source` instead (an average of them) for a while."""
        if source.flat.dtype == self.dtype:
            self.weights = source
            yield
            self.weights = self.master
        else:
            self.weights.flat.copy_(source.flat)
            yield
            self.refresh()

    def export(self, source: Flat, dtype) -> dict[str, torch.Tensor]:
        """The tensors of SGLang's LlamaForCausalLMEagle3 by its names, on the CPU."""
        key_rows = self.shape.kv_heads * self.shape.head_dim
        both = {part: torch.cat([source[f"{part}_embed"], source[f"{part}_hidden"]], 1) for part in ("q", "kv")}  # [embedding, hidden]
        gate, up = source["gate_up"].chunk(2)
        named = {"fc.weight": source["fc"], "midlayer.input_layernorm.weight": source["input_norm"],
                 "midlayer.hidden_norm.weight": source["hidden_norm"], "midlayer.post_attention_layernorm.weight": source["post_norm"],
                 "midlayer.self_attn.q_proj.weight": both["q"], "midlayer.self_attn.k_proj.weight": both["kv"][:key_rows],
                 "midlayer.self_attn.v_proj.weight": both["kv"][key_rows:], "midlayer.self_attn.o_proj.weight": source["o"],
                 "midlayer.mlp.gate_proj.weight": gate, "midlayer.mlp.up_proj.weight": up, "midlayer.mlp.down_proj.weight": source["down"],
                 "norm.weight": source["norm"], "lm_head.weight": source["lm_head"]}
        named = {name: tensor.detach().to("cpu", dtype).clone().contiguous() for name, tensor in named.items()}
        named["d2t"] = (self.draft_ids - torch.arange(len(self.draft_ids), device=self.draft_ids.device)).cpu()
        assert set(named) == EXPORTED  # SGLang drops unknown names in silence and leaves missing ones uninitialised
        return named

    def load(self, named: dict[str, torch.Tensor]) -> None:
        """The inverse of `export`. Raises UserError when names or sizes differ."""
        if set(named) != EXPORTED:
            raise UserError(f"the drafter has tensors {sorted(named)}, expected {sorted(EXPORTED)}.")
        attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
        q_embed, q_hidden = named[attention + "q_proj.weight"].chunk(2, 1)
        kv_embed, kv_hidden = torch.cat([named[attention + "k_proj.weight"], named[attention + "v_proj.weight"]]).chunk(2, 1)
        new = {"lm_head": named["lm_head.weight"], "down": named[mlp + "down_proj.weight"], "o": named[attention + "o_proj.weight"],
               "gate_up": torch.cat([named[mlp + "gate_proj.weight"], named[mlp + "up_proj.weight"]]), "fc": named["fc.weight"],
               "q_embed": q_embed, "q_hidden": q_hidden, "kv_embed": kv_embed, "kv_hidden": kv_hidden, "norm": named["norm.weight"],
               "input_norm": named["midlayer.input_layernorm.weight"], "hidden_norm": named["midlayer.hidden_norm.weight"],
               "post_norm": named["midlayer.post_attention_layernorm.weight"]}
        for name, view in self.master.views.items():
            if new[name].shape != view.shape:
                raise UserError(f"the drafter's {name} has shape {tuple(new[name].shape)}, this run's {tuple(view.shape)}.")
            view.copy_(new[name])
        if not torch.equal(named["d2t"] + torch.arange(len(named["d2t"])), self.draft_ids.cpu()):
            raise UserError("the drafter was trained with another vocabulary map.")
        self.refresh()


@dataclass
class Batch:
    """Samples packed one after the other. Row c of a sample stands for its position p = c; the last rows of each are its query rows.

    Per context row: aux (C, 3H) at p, next_ids (C,) = x[p+1], positions (C,). Per query row: last (R, H) = last_hidden[p+1], labels (R,) = x[p+2],
    mask (R,) = x[p+2] is a response token, mass (R,) the target's probability inside the draft vocabulary, left (R,) rows of its sample from here on.
    What TTT step k needs at row r is row r + k of the last four and of the embedding part: a shift, as long as k < left.
    """
    aux: torch.Tensor
    next_ids: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    mass: torch.Tensor
    left: torch.Tensor
    length: torch.Tensor  # (C,) tokens of the row's sample
    cu_q: torch.Tensor  # (B + 1,) int32
    cu_k: torch.Tensor
    spans: list  # per sample ((q0, q1), (k0, k1)), the same bounds on the host
    tokens: int = 0

    def pick(self, x):
        """The query rows of x (C, ...) -> (R, ...)."""
        return x if len(self.mask) == len(self.positions) else torch.cat([x[k1 - q1 + q0:k1] for (q0, q1), (_, k1) in self.spans])

    def add_to_query_rows(self, x, y) -> None:
        """x (C, ...) += y (R, ...) on the query rows."""
        for (q0, q1), (_, k1) in self.spans if len(y) < len(x) else [((0, len(y)), (0, len(y)))]:
            x[k1 - q1 + q0:k1] += y[q0:q1]

    @property
    def max_q(self):
        return max(q1 - q0 for (q0, q1), _ in self.spans)

    @property
    def max_k(self):
        return max(k1 - k0 for _, (k0, k1) in self.spans)

    def flops(self, shape: Shape, steps: int) -> float:
        pairs = sum((q1 - q0) * (k1 - k0) - (q1 - q0) * (q1 - q0 - 1) // 2 for (q0, q1), (k0, k1) in self.spans)
        return shape.flops(len(self.positions), len(self.mask), pairs, steps)

    def to(self, device, dtype):
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items() if torch.is_tensor(value)}
        moved |= {name: moved[name].to(dtype) for name in ("aux", "last")}
        return replace(self, **moved)


@torch.no_grad()
def ttt_pass(draft: Drafter, batch: Batch, step_weights, grads: Gradients | None = None, kind="ce"):
    """Forward, and with `grads` backward, of all TTT steps over one packed batch.

    step_weights: K floats; the loss whose gradient is added to `grads` is the sum over k of step_weights[k] * row losses of step k.
    Returns per-step sums (K, 4): row losses, rows whose steps 0..k all count, of those right in 0..k, right in 0..k-1;
    and right (K, R) bool: the draft of step k at this row is the token x[p+2+k].
    """
    w, shape, K, eps = draft.weights, draft.shape, len(step_weights), draft.shape.rms_norm_eps
    R, positions, key_columns = len(batch.mask), batch.positions, shape.kv_heads * shape.head_dim

    def shifted(x):
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, K - 1))

    # Once for all steps: the target's probabilities, and the embedding half of q, k, v with input_layernorm's weight folded into the matrices
    # (so that the frozen embedding, normalised, is the input: no gradient goes back through it).
    target = target_probabilities(batch.last, draft.target_head, batch.mass, K - 1)  # (R+K-1, Vd)
    labels, mask = shifted(batch.labels), shifted(batch.mask)
    embedded, _ = rms_norm(draft.embed[batch.next_ids], None, eps)  # (C, H), x[p+1]
    embedded_query = batch.pick(embedded)
    q_embed = shifted(embedded_query @ (w["q_embed"] * w["input_norm"]).t())  # (R+K-1, Q)
    kv_embed = embedded @ (w["kv_embed"] * w["input_norm"]).t()  # (C, KV)
    kv_embed_query = shifted(batch.pick(kv_embed)) if K > 1 else None

    fc_out = batch.aux @ w["fc"].t()  # (C, H)
    context, context_scale = rms_norm(fc_out, w["hidden_norm"], eps)
    kv = kv_embed.addmm_(context, w["kv_hidden"].t())  # in place: kv_embed_query holds a copy
    rope_(kv[:, :key_columns], positions, draft.rope_table, shape.head_dim)
    own = kv.new_empty(K - 1, R, kv.shape[1])  # keys and values of steps 1..K-1, each seen by its own position only
    hidden, normed, scale, query_positions = (batch.pick(x) for x in (fc_out, context, context_scale, positions))

    sums, right, saved = [], [], []
    chain = torch.ones(R, dtype=torch.bool, device=kv.device)
    counted = chain.clone()
    for k in range(K):
        # Position p, token x[p+1+k], hidden of step k-1, RoPE position p+k, predicts x[p+2+k].
        q = torch.addmm(q_embed[k:k + R], normed, w["q_hidden"].t())
        rope_(q, query_positions + k, draft.rope_table, shape.head_dim)
        if k:
            torch.addmm(kv_embed_query[k:k + R], normed, w["kv_hidden"].t(), out=own[k - 1])
            rope_(own[k - 1][:, :key_columns], query_positions + k, draft.rope_table, shape.head_dim)
        out, lse, state = attention(q, kv, own[:k], batch, shape)
        middle = torch.addmm(hidden, out, w["o"].t())  # the residual is the raw hidden state
        mlp_in, mlp_scale = rms_norm(middle, w["post_norm"], eps)
        gate_up = mlp_in @ w["gate_up"].t()
        activated = swiglu(gate_up)
        h_next = torch.addmm(middle, activated, w["down"].t())
        head_in, head_scale = rms_norm(h_next, w["norm"], eps)

        counts = mask[k:k + R] & (batch.left > k)
        row_weight = counts.to(wide(kv)) * step_weights[k]
        loss, best, d_head_in = [], [], torch.empty_like(head_in)
        for rows in chunks(R, shape.draft_vocab):
            shifted_rows = slice(rows.start + k, rows.stop + k)
            row_loss, row_best, d_logits = soft_cross_entropy(logits_of(head_in[rows], w["lm_head"]), target[shifted_rows], row_weight[rows], kind)
            loss.append(row_loss), best.append(row_best)
            if grads:
                d_logits = d_logits.to(head_in.dtype)
                torch.mm(d_logits, w["lm_head"], out=d_head_in[rows])
                grads.add("lm_head", d_logits, head_in[rows])
            del d_logits
        before = chain & counted & counts
        hit = draft.draft_ids[torch.cat(best)] == labels[k:k + R]
        counted, chain = counted & counts, chain & hit
        sums.append(torch.stack([(torch.cat(loss) * counts).sum()] + [flags.sum(dtype=wide(kv)) for flags in (counted, counted & chain, before)]))
        right.append(hit)
        if grads:
            saved.append((hidden, normed, scale, q, out, lse, state, middle, mlp_in, mlp_scale, gate_up, activated, h_next, head_scale, d_head_in))
        hidden = h_next
        if k + 1 < K:
            normed, scale = rms_norm(h_next, w["hidden_norm"], eps)
    del target
    if grads:
        grads.done("lm_head")
        backward(draft, batch, grads, saved, kv, own, fc_out, context, context_scale, embedded, embedded_query)
    return torch.stack(sums), torch.stack(right)


def backward(draft, batch, grads, saved, kv, own, fc_out, context, context_scale, embedded, embedded_query) -> None:
    """The gradient of ttt_pass, last step first, added to `grads`; the two embed matrices' for their folded form (see `unfold`)."""
    w, shape, K, R = draft.weights, draft.shape, len(saved), len(batch.mask)
    key_columns = shape.kv_heads * shape.head_dim
    positions = batch.pick(batch.positions)
    d_kv, d_own = torch.zeros_like(kv), torch.zeros_like(own)
    dq_embed = torch.zeros(R + K - 1, shape.heads * shape.head_dim, dtype=kv.dtype, device=kv.device)
    dkv_embed = torch.zeros(R + K - 1, kv.shape[1], dtype=kv.dtype, device=kv.device)
    d_next = None  # gradient of h' of this step, from the step after it
    for k in reversed(range(K)):
        hidden, normed, scale, q, out, lse, state, middle, mlp_in, mlp_scale, gate_up, activated, h_next, head_scale, d_head_in = saved.pop()
        d_next, d_norm = rms_norm_backward(d_head_in, h_next, head_scale, w["norm"], d_next)
        grads.add_vector("norm", d_norm)
        grads.add("down", d_next, activated)
        d_gate_up = swiglu_backward(d_next @ w["down"], gate_up)
        grads.add("gate_up", d_gate_up, mlp_in)
        d_middle, d_norm = rms_norm_backward(d_gate_up @ w["gate_up"], middle, mlp_scale, w["post_norm"], d_next)
        grads.add_vector("post_norm", d_norm)
        grads.add("o", d_middle, out)
        if k == 0:
            grads.done("norm", "down", "gate_up", "post_norm", "o")
        dq = attention_backward(d_middle @ w["o"], q, kv, own[:k], out, lse, state, d_kv, d_own[:k], batch, shape)
        rope_(dq, positions + k, draft.rope_table, shape.head_dim, inverse=True)
        # A row at or past its sample's end in step k has a gradient of exactly 0, so the shift may run over the sample's border.
        dq_embed[k:k + R] += dq
        grads.add("q_hidden", dq, normed)
        d_normed = dq @ w["q_hidden"]
        if k:
            rope_(d_own[k - 1][:, :key_columns], positions + k, draft.rope_table, shape.head_dim, inverse=True)
            dkv_embed[k:k + R] += d_own[k - 1]
            grads.add("kv_hidden", d_own[k - 1], normed)
            d_normed.addmm_(d_own[k - 1], w["kv_hidden"])
            d_next, d_norm = rms_norm_backward(d_normed, hidden, scale, w["hidden_norm"], d_middle)
            grads.add_vector("hidden_norm", d_norm)
    grads.add("q_embed", dq_embed[:R], embedded_query)
    grads.done("q_hidden", "q_embed")
    rope_(d_kv[:, :key_columns], batch.positions, draft.rope_table, shape.head_dim, inverse=True)
    grads.add("kv_hidden", d_kv, context)
    d_context, residual = d_kv @ w["kv_hidden"], torch.zeros_like(fc_out)
    batch.add_to_query_rows(d_context, d_normed)
    batch.add_to_query_rows(residual, d_middle)
    d_fc_out, d_norm = rms_norm_backward(d_context, fc_out, context_scale, w["hidden_norm"], residual)
    grads.add_vector("hidden_norm", d_norm)
    grads.done("kv_hidden", "hidden_norm")
    grads.add("fc", d_fc_out, batch.aux)
    batch.add_to_query_rows(d_kv, dkv_embed[:R])
    grads.add("kv_embed", d_kv, embedded)
    grads.done("fc", "kv_embed")


def unfold(grads: Gradients, weights: Flat) -> None:
    """From the gradient G of W * input_norm to those of W and of input_norm, once an optimizer step: G * input_norm, and sum of G * W over rows."""
    total = 0
    for name in ("q_embed", "kv_embed"):
        total = total + (grads[name] * weights[name]).sum(0, dtype=wide(grads.flat))
        grads[name].mul_(weights["input_norm"])
    grads["input_norm"].copy_(total)


@torch.no_grad()
def adamw_(master, weights, grads, first, second, clip, lr: float, step: int, beta1: float, beta2: float, decay: float) -> None:
    """AdamW (arXiv 1711.05101) over flat tensors; clip: device scalar that scales the gradient; step counts from 1."""
    correct1, correct2 = 1 - beta1 ** step, 1 - beta2 ** step
    if fused("adamw", master):
        adamw_kernel[(triton.cdiv(len(master), 2048),)](master, weights, grads, first, second, clip, len(master), lr, beta1, beta2, 1e-8, decay,
                                                       correct1, correct2, BLOCK=2048, num_warps=8)
        return
    grads = grads.to(master.dtype) * clip
    first.lerp_(grads, 1 - beta1)
    second.mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    master.mul_(1 - lr * decay).addcdiv_(first / correct1, (second / correct2).sqrt_().add_(1e-8), value=-lr)
    if weights is not master:
        weights.copy_(master)


def loss_weights(args) -> list[float]:
    return args.step_weights or [args.step_decay ** k for k in range(args.ttt_steps)]


class Trainer:
    """A drafter with its gradients and AdamW's state. One `update` is one optimizer step."""

    def __init__(self, draft: Drafter, args):
        self.draft, self.args, self.step = draft, args, 0
        self.grads = Gradients(draft.shape.weights(), draft.dtype, draft.master.flat.device)
        self.first, self.second = torch.zeros_like(draft.master.flat), torch.zeros_like(draft.master.flat)
        self.average = Flat(draft.shape.weights(), draft.master.flat.dtype, draft.master.flat.device) if args.ema else draft.master
        self.average.flat.copy_(draft.master.flat)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: all of the state, besides the step; random numbers depend on seed, epoch and batch alone."""
        kept = {"master": self.draft.master.flat, "first": self.first, "second": self.second}
        return kept | ({"average": self.average.flat} if self.args.ema else {})

    def update(self, batches, turns: int, counts, lr: float) -> torch.Tensor:
        """Take `turns` micro-batches from the iterator `batches` and change the weights once. counts (K,): loss rows of the whole step,
        on all ranks: the loss is a mean over them, whoever computes which part. Returns `ttt_pass`'s sums of this rank (K, 4)."""
        args, draft, grads = self.args, self.draft, self.grads
        step_weights = [weight / max(1, n) for weight, n in zip(loss_weights(args), counts)]
        sums = torch.zeros(len(counts), 4, dtype=draft.master.flat.dtype, device=draft.master.flat.device)
        grads.begin(first=True, last=not turns)
        if not turns:  # fewer micro-batches were left than ranks
            grads.done(*REDUCE_ORDER)
        for turn in range(turns):
            grads.begin(first=turn == 0, last=turn == turns - 1)
            sums += ttt_pass(draft, next(batches), step_weights, grads, args.loss)[0]
        grads.wait()
        unfold(grads, draft.weights)
        norm = torch.linalg.vector_norm(grads.flat, dtype=draft.master.flat.dtype)
        clip = (args.max_grad_norm / (norm + 1e-6)).clamp_(max=1)  # stays on the device
        self.step += 1
        adamw_(draft.master.flat, draft.weights.flat, grads.flat, self.first, self.second, clip, lr, self.step, args.beta1, args.beta2, args.weight_decay)
        if args.ema:
            self.average.flat.lerp_(draft.master.flat, 1 - args.ema)
        return sums


# ------------------------------------------------------------------ the target
def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable ({' '.join(str(error).split())}).") from None


class Target:
    """The target's text config, and single tensors of its (sharded) safetensors by name. Raises UserError."""

    NAMES = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}

    def __init__(self, folder: Path):
        self.folder = folder
        config = read_json(folder / "config.json")
        self.config = config.get("text_config") or config
        missing = [key for key in ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "max_position_embeddings") if key not in self.config]
        if missing:
            raise UserError(f"{folder}/config.json: no {', '.join(missing)} there. --verifier-path must name the target's folder.")
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.files = read_json(index).get("weight_map", {})
        else:
            self.files = {}
            for path in sorted(folder.glob("*.safetensors")):
                try:
                    with safe_open(path, "pt") as file:
                        self.files |= {name: path.name for name in file.keys()}
                except (OSError, SafetensorError) as error:
                    raise UserError(f"{path}: not readable ({error}).") from None
        if not self.files:
            raise UserError(f"{folder}: no safetensors there. --verifier-path must name the target's folder.")

    def name(self, what: str) -> str | None:
        plain = self.NAMES[what]
        return next((name for name in (f"language_model.{plain}", plain, plain.replace("model.", "model.language_model.", 1)) if name in self.files), None)

    def tensor(self, what: str) -> torch.Tensor:
        name = self.name(what)
        if what == "head" and not name and self.config.get("tie_word_embeddings"):
            name = self.name("embed")
        if not name:
            packed = [key for key in self.files if self.NAMES[what].rsplit(".", 1)[0] in key]
            raise UserError(f"{self.folder}: no {self.NAMES[what]}" + (f", but {packed[0]}: quantised? It must be bf16, fp16 or fp32." if packed else "."))
        try:
            with safe_open(self.folder / self.files[name], "pt") as file:
                tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self.folder / self.files[name]}: not readable ({error}).") from None
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(f"{self.folder}: {name} is {tensor.dtype}: quantised? It must be bf16, fp16 or fp32.")
        hidden = self.config["hidden_size"]
        wanted = (hidden,) if what == "norm" else (self.config["vocab_size"], hidden)
        if tensor.shape != wanted:
            raise UserError(f"{self.folder}: {name} has shape {tuple(tensor.shape)}, config.json says {wanted}.")
        return tensor


def read_mapping(folder: Path, vocab: int) -> torch.Tensor:
    """The draft vocabulary as target ids, ascending (Vd,). Raises UserError."""
    try:
        d2t, t2d = np.load(folder / "d2t.npy"), np.load(folder / "t2d.npy")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no readable vocabulary map ({error}). Run 02_build_vocab.py first.") from None
    if t2d.shape != (vocab,):
        raise UserError(f"{folder}/t2d.npy: made for {t2d.shape[0]} target tokens, the target has {vocab}. Run 02_build_vocab.py for this target.")
    ids = np.arange(len(d2t)) + d2t
    if d2t.dtype != np.int64 or t2d.dtype != bool or not np.array_equal(np.nonzero(t2d)[0], ids):
        raise UserError(f"{folder}: d2t.npy and t2d.npy do not agree (draft id + d2t must be the ids that t2d marks). Run 02_build_vocab.py again.")
    return torch.from_numpy(ids)


def release(version: str) -> tuple[int, ...]:
    """The numbers of "0.5.15.post1", three of them. Raises UserError: the layer ids hang on them."""
    numbers = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if not numbers:
        raise UserError(f"{version!r} is no version of SGLang. Name one with --serve-sglang-version, like 0.5.23.")
    return tuple(map(int, numbers.groups()))


def captured_layers(ids: list[int], version: str) -> list[int]:
    """The layers whose input SGLang captures for `eagle_aux_hidden_state_layer_ids` (DeepseekV2ForCausalLM.set_eagle3_layers_to_capture)."""
    always_adds = release(version) <= (0, 5, 12)
    return [layer + 1 for layer in ids] if always_adds or ids[0] == 1 else list(ids)


def layer_ids(layers: list[int], version: str) -> list[int]:
    """The ids that make this SGLang version capture `layers`. Raises UserError where none do."""
    below = [layer - 1 for layer in layers]
    for ids in (below, layers) if layers[0] == 2 else (layers, below):  # [1, ...] means the same to every version: take it where it can be had
        if captured_layers(ids, version) == layers and min(ids) >= 0:
            return list(ids)
    raise UserError(f"SGLang {version} cannot capture layers {layers}: no eagle_aux_hidden_state_layer_ids lead there. Extract other layers.")


# ------------------------------------------------------------------ samples
FILE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass
class Sample:
    """One sample: its file and what of it carries loss. `spans`: [start, end) of its response tokens, within `tokens`."""
    id: str
    path: Path
    tokens: int
    spans: list
    mass: np.ndarray | None  # per response token t, in order: the target's probability inside the draft vocabulary, at position t - 1
    truncated: bool = False

    def counts(self, steps: int) -> list[int]:
        """Loss rows of each TTT step: response tokens t = p + 2 + k with p >= 0."""
        return [sum(max(0, end - max(start, 2 + k)) for start, end in self.spans) for k in range(steps)]

    def rows(self, steps: int) -> tuple[int, int, int]:
        """(first query row, context rows, query rows). The last row predicts the last response token."""
        context = self.spans[-1][1] - 2
        first = max(0, self.spans[0][0] - 1 - steps)
        return first, context, context - first


def sample_path(folder: Path, name: str) -> Path:
    return folder / hashlib.sha256(name.encode()).hexdigest()[:2] / f"{name}.safetensors"


def tensor_places(file: int) -> dict:
    """Of an open safetensors file: {tensor: (dtype, offset in the file)}. Raises ValueError where it is torn."""
    head = os.pread(file, 1 << 16, 0)
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 + length < 1 << 24:
        head = os.pread(file, 8 + length, 0)
    if len(head) < 8 + length:
        raise ValueError("torn header")
    entries = json.loads(head[8:8 + length])
    entries.pop("__metadata__", None)
    if os.fstat(file).st_size != 8 + length + max(entry["data_offsets"][1] for entry in entries.values()):
        raise ValueError("torn")
    return {name: (FILE_DTYPES.get(entry["dtype"]), 8 + length + entry["data_offsets"][0]) for name, entry in entries.items()}


def read_into(file: int, tensor: torch.Tensor, offset: int) -> None:
    """Fill a contiguous CPU tensor from the file. No copy besides the kernel's; the lock of the interpreter is free meanwhile."""
    if not tensor.numel():
        return
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while len(view):
        got = os.preadv(file, [view], offset)
        if not got:
            raise OSError("file ends early")
        view, offset = view[got:], offset + got


def check_sample(path: Path, row: dict, expected: dict, vocab: int, norm: torch.Tensor | None):
    """Read one file whole and compare it with the index and the manifest. Returns (problem, None) or (None, tensors).

    norm (H,): weight of the target's final RMSNorm, if it is known: what comes out of that norm, divided by it, has a mean square of 1.
    """
    try:
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8:begin])["__metadata__"]
        tensors = load(data)
    except FileNotFoundError:
        return "missing", None
    except (OSError, ValueError, KeyError, SafetensorError):
        return "torn", None
    T, hidden, states = row["tokens"], expected["hidden_size"], getattr(torch, expected["dtype"])
    if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} != {
            "input_ids": (torch.int32, (T,)), "loss_mask": (torch.uint8, (T,)),
            "aux_hidden_states": (states, (T, 3 * hidden)), "last_hidden_states": (states, (T, hidden))}:
        return "other shape or dtype", None
    if metadata.get("id") != row["id"] or any(metadata.get(key) != str(expected[key]) for key in ("target", "capture_layers")):
        return "other target, layers or id", None
    if f"sha256:{hashlib.sha256(memoryview(data)[begin:]).hexdigest()}" != row["checksum"]:
        return "checksum", None
    low, high = tensors["input_ids"].aminmax()
    if low < 0 or high >= vocab:
        return "ids beyond the vocabulary", None
    if not tensors["loss_mask"].any():
        return "no response token", None
    if not all(torch.isfinite(extreme) for name in ("aux_hidden_states", "last_hidden_states") for extreme in tensors[name].aminmax()):
        return "not finite", None  # the extremes of a tensor with a NaN are NaN
    if norm is not None:
        used = norm.abs() > 1e-3 * norm.abs().max()
        some = tensors["last_hidden_states"][::max(1, T // 256)]  # enough for a median
        sizes = (some[:, used].float() / norm[used]).square().mean(-1).sqrt()
        if not 0.8 < sizes.median() < 1.25:
            return "states from before the final norm", None
    return None, tensors


def mask_spans(mask: torch.Tensor) -> list[list[int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.numpy() != 0, [0]]).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


@torch.no_grad()
def response_mass(tensors: dict, spans: list, head: torch.Tensor, draft_ids: torch.Tensor):
    """Per response token: the target's probability inside the draft vocabulary where it was predicted; and how many are the target's argmax."""
    tokens = torch.cat([torch.arange(max(start, 1), end) for start, end in spans])
    last, ids = tensors["last_hidden_states"][tokens - 1], tensors["input_ids"][tokens].long()
    mass, agreed = [], 0
    for rows in chunks(len(tokens), len(head)):
        logits = logits_of(last[rows].to(head.device, head.dtype), head)
        mass.append((logits[:, draft_ids].logsumexp(-1) - logits.logsumexp(-1)).exp())
        agreed += int((logits.argmax(-1).cpu() == ids[rows]).sum())
    zero = torch.zeros(sum(start == 0 for start, _ in spans))  # token 0 is predicted by nothing
    return torch.cat([zero, *(part.float().cpu() for part in mass)]).clamp_(max=1), agreed, len(tokens)


def other_target(folder: Path, agreement: float) -> UserError:
    return UserError(f"{folder}: only {agreement:.1%} of the response tokens are the argmax of lm_head(last_hidden_states). "
                     "The states are not of this target: extract again.")


CHECK_CHUNK = 256


def check_data(folder: Path, index: list[dict], expected: dict, cache: Path, head: torch.Tensor, norm, draft_ids: torch.Tensor, place, workers: int) -> None:
    """Read every file once: what is wrong with it, its response spans and its `response_mass`, kept in `cache` (so it is done once a run)."""
    rank, world = place.rank, place.world
    cache.mkdir(exist_ok=True)
    # A rank's share must not depend on what others have finished when it looks
    starts = [start for start in range(0, len(index), CHECK_CHUNK)[rank::world] if not (cache / f"{start:08d}.safetensors").exists()]
    begun = told = time.monotonic()
    read = 0
    with ThreadPoolExecutor(max(1, workers)) as pool:
        def submit(row):
            return pool.submit(check_sample, sample_path(folder, row["id"]), row, expected, len(head), norm)

        for start in starts:
            rows, records, masses = index[start:start + CHECK_CHUNK], [], [torch.zeros(0)]
            waiting = deque((row, submit(row)) for row in rows[:2 * workers + 1])
            for later in [*rows[2 * workers + 1:], *[None] * len(waiting)]:
                row, future = waiting.popleft()
                problem, tensors = future.result()
                if later is not None:
                    waiting.append((later, submit(later)))
                record = {"id": row["id"], "problem": problem}
                if not problem:
                    spans = mask_spans(tensors["loss_mask"])
                    mass, agreed, predicted = response_mass(tensors, spans, head, draft_ids)
                    record |= {"tokens": row["tokens"], "spans": spans, "agreed": agreed, "predicted": predicted}
                    masses.append(mass)
                    read += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
                records.append(record)
            write_atomic(cache / f"{start:08d}.safetensors", save({"mass": torch.cat(masses)}, {"samples": json.dumps(records)}))
            if rank == 0 and time.monotonic() - told > 10:
                told = time.monotonic()
                done = starts.index(start) + 1
                log(f"check {min(len(index), start + world * CHECK_CHUNK)}/{len(index)} | {read / 1e9 / (told - begun):.2f} GB/s a rank"
                    f" | eta {duration((told - begun) / done * (len(starts) - done))}")


def read_checked(folder: Path, cache: Path, index: list[dict], max_tokens: int):
    """(samples, problems {id: reason}, share of response tokens that are the target's argmax) from `check_data`'s cache. Raises UserError."""
    samples, problems, agreed, predicted = [], {}, 0, 0
    for start in range(0, len(index), CHECK_CHUNK):
        path = cache / f"{start:08d}.safetensors"
        try:
            with safe_open(path, "np") as file:
                mass, records = file.get_tensor("mass"), json.loads(file.metadata()["samples"])
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not readable ({error}). Delete it and run the same command again.") from None
        at = 0
        for record in records:
            if record["problem"]:
                problems[record["id"]] = record["problem"]
                continue
            count = sum(end - start for start, end in record["spans"])
            tokens = min(record["tokens"], max_tokens)
            spans = [[start, min(end, tokens)] for start, end in record["spans"] if start < tokens]
            sample = Sample(record["id"], sample_path(folder, record["id"]), tokens, spans, mass[at:at + count], tokens < record["tokens"])
            at, agreed, predicted = at + count, agreed + record["agreed"], predicted + record["predicted"]
            if spans and sample.counts(1)[0]:
                samples.append(sample)
            else:
                problems[record["id"]] = NO_LOSS
    return samples, problems, agreed / max(1, predicted)


def collate(samples: list[Sample], steps: int, hidden: int, pin=False) -> Batch:
    """Read what the rows of these samples need, straight into (pinned) batch tensors."""
    sizes = [sample.rows(steps) for sample in samples]
    cu_k = np.cumsum([0] + [context for _, context, _ in sizes])
    cu_q = np.cumsum([0] + [query for _, _, query in sizes])
    C, R = int(cu_k[-1]), int(cu_q[-1])
    next_ids, labels = torch.empty(C, dtype=torch.int64), torch.empty(R, dtype=torch.int64)
    positions, left, length = (np.empty(n, np.int64) for n in (C, R, C))
    mask, mass = np.zeros(R, bool), np.zeros(R, np.float32)
    aux = last = None
    for sample, (first, context, rows), k0, q0 in zip(samples, sizes, cu_k.tolist(), cu_q.tolist()):
        file = os.open(sample.path, os.O_RDONLY)
        try:
            places = tensor_places(file)
            dtype, offset = places["aux_hidden_states"]
            if aux is None:
                aux = torch.empty(C, 3 * hidden, dtype=dtype, pin_memory=pin)
                last = torch.empty(R, hidden, dtype=dtype, pin_memory=pin)
            read_into(file, aux[k0:k0 + context], offset)
            read_into(file, last[q0:q0 + rows], places["last_hidden_states"][1] + (first + 1) * hidden * dtype.itemsize)
            ids = torch.empty(context + 2, dtype=torch.int32)
            read_into(file, ids, places["input_ids"][1])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{sample.path}: not readable ({error}). It was whole when it was checked: see to the disk.") from None
        finally:
            os.close(file)
        next_ids[k0:k0 + context] = ids[1:-1]
        labels[q0:q0 + rows] = ids[first + 2:]
        positions[k0:k0 + context] = np.arange(context)
        length[k0:k0 + context] = sample.tokens
        left[q0:q0 + rows] = np.arange(rows, 0, -1)
        seen = 0
        for start, end in sample.spans:
            begin = max(start, first + 2)
            if end > begin:
                mask[q0 + begin - first - 2:q0 + end - first - 2] = True
                mass[q0 + begin - first - 2:q0 + end - first - 2] = sample.mass[seen + begin - start:seen + end - start]
            seen += end - start
    pinned = (lambda tensor: tensor.pin_memory()) if pin else (lambda tensor: tensor)
    spans = [((q0, q1), (k0, k1)) for q0, q1, k0, k1 in zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist())]
    small = {name: pinned(torch.as_tensor(array)) for name, array in dict(
        next_ids=next_ids, positions=positions, labels=labels, mask=mask, mass=mass, left=left, length=length,
        cu_q=cu_q.astype(np.int32), cu_k=cu_k.astype(np.int32)).items()}
    return Batch(aux=aux, last=last, spans=spans, tokens=sum(sample.tokens for sample in samples), **small)


# ------------------------------------------------------------------ the plan: which samples make up which step, on any number of ranks
def split_samples(samples: list[Sample], ratio: float, seed: int):
    """(train, validation): by sample, by a hash of its id, so that a new sample moves no other one."""
    ranked = sorted(samples, key=lambda sample: hashlib.sha256(f"{seed}:{sample.id}".encode()).hexdigest())
    held_out = max(1, round(ratio * len(ranked)))
    train, val = (sorted(part, key=lambda sample: sample.id) for part in (ranked[held_out:], ranked[:held_out]))
    return train, val


def pack(lengths: list[int], order: list[int], capacity: int, window: int = 32) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`: each goes into the first of `window` open bins that has room."""
    full, bins = [], []  # open bins: [room, indices]
    for i in order:
        fits = next((entry for entry in bins if entry[0] >= lengths[i]), None)
        if fits is None:
            if len(bins) == window:
                full.append(bins.pop(min(range(window), key=lambda j: bins[j][0]))[1])
            fits = [capacity, []]
            bins.append(fits)
        fits[0] -= lengths[i]
        fits[1].append(i)
    return full + [indices for _, indices in bins]


def plan_epoch(samples: list[Sample], capacity: int, bins_per_step: int, seed: int, epoch: int, shuffle: bool = True) -> list[list[list[int]]]:
    """Steps of bins of sample indices. It knows nothing of ranks: 2 ranks with 1 bin each train as 1 rank with 2."""
    order, lengths = list(range(len(samples))), [sample.tokens for sample in samples]
    if shuffle:
        random.Random(f"{seed}:{epoch}").shuffle(order)
        bins = pack(lengths, order, capacity)
        random.Random(f"{seed}:{epoch}:bins").shuffle(bins)  # the fullest close first
    else:
        bins = pack(lengths, order, capacity, OPEN_BINS)
    return [bins[start:start + bins_per_step] for start in range(0, len(bins), bins_per_step)]


def learning_rate(step: int, total: int, peak: float, warmup: int, scheduler: str) -> float:
    """Of step `step` (from 0) of `total`: linear warm-up, then cosine or linear to 0, or constant."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}[scheduler]


def feed(bins: list, load, workers: int, device, dtype, take=lambda samples, wait: samples):
    """Yields (bin, its batch on the device, seconds waited for files); `workers` threads read ahead, copies run beside the computation.

    take(bin, wait) gives a bin's samples ([]: none is left, the bin is passed over), or None where they are not there yet and it shall not wait.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    todo, ahead = deque(bins), deque()
    with ThreadPoolExecutor(max(1, workers)) as pool:
        def fill(wait: bool) -> None:
            while todo and len(ahead) <= workers and (samples := take(todo[0], wait and not ahead)) is not None:
                item = todo.popleft()
                if samples:
                    ahead.append((item, pool.submit(load, samples)))

        fill(True)
        while ahead:
            begun = time.monotonic()
            item, future = ahead.popleft()
            batch = future.result()
            waited = time.monotonic() - begun
            fill(False)  # never waits while a batch is here: what it would wait for may need the room that this one frees
            if copies:
                with torch.cuda.stream(copies):
                    moved = batch.to(device, dtype)
                torch.cuda.current_stream(device).wait_stream(copies)
                for value in vars(moved).values():
                    if torch.is_tensor(value):
                        value.record_stream(torch.cuda.current_stream(device))  # allocated on the other stream, used here
                yield item, moved, waited
            else:
                yield item, batch.to(device, dtype), waited
            fill(True)


def add_noise(batch: Batch, std: float, seed: str) -> None:
    """EAGLE's noise on the input states (arXiv 2401.15077, its code): uniform, (u - 1/2) * std * 512 / T, the same on any rank."""
    generator = torch.Generator(batch.aux.device).manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big"))
    noise = torch.rand(batch.aux.shape, dtype=batch.aux.dtype, device=batch.aux.device, generator=generator)
    batch.aux += noise.sub_(0.5).mul_((512 * std / batch.length)[:, None].to(noise.dtype))


# ------------------------------------------------------------------ one pass in the order of 03's plan, over samples as they land
OPEN_BINS = 8  # each keeps its samples on the disk until it is full; 32 would pack little tighter
HEADER_BYTES = 4096  # of a sample's file, at most (03 counts so, too)
QUARANTINED, NO_LOSS = "quarantined by 03_extract", "no response token within --max-seq-len"


def read_plan(folder: Path, max_tokens: int) -> tuple[list[dict], list[Sample]]:
    """plan.jsonl: its rows {"id", "tokens", "prompt_len"}, and as samples without `mass` those of them that carry loss, in its order. Raises UserError."""
    try:
        rows = [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        raise UserError(f"{folder}: no readable plan.jsonl, which 03_extract.py writes when it begins. Run 03_extract.py there first.") from None
    planned = []
    for row in rows:
        tokens = min(row["tokens"], max_tokens)
        sample = Sample(row["id"], sample_path(folder, row["id"]), tokens, [[row["prompt_len"], tokens]], None, tokens < row["tokens"])
        if row["prompt_len"] < tokens and sample.counts(1)[0]:
            planned.append(sample)
    if len(planned) < 2:
        raise UserError(f"{folder}/plan.jsonl: {len(planned)} usable samples; at least 2 are needed, one of them to validate.")
    return rows, planned


def last_needed(step_of: np.ndarray, total: int) -> np.ndarray:
    """(total + 1,) the last position in the plan that steps 1..s need; the end for the last step, since 03 ends before 04 does."""
    last, trained_on = np.full(total + 1, -1), step_of <= total
    np.maximum.at(last, step_of[trained_on], np.flatnonzero(trained_on))
    last[total] = len(step_of) - 1
    return np.maximum.accumulate(last)


def release_steps(sizes: np.ndarray, step_of: np.ndarray, total: int, bound: int, share: float, done: int) -> tuple[list[int], int]:
    """(steps after which to save a checkpoint and release, least bound that would do), from the plan alone.

    sizes (N,): most bytes of each file, in the plan's order; step_of (N,): the step that trains on it, `total` + 1 for validation, which stays.
    03 sends in the plan's order. So before step s can be taken, all files up to the last one that steps 1..s need may lie there, except those
    released at the last checkpoint c: these must fit. Where they always do, 03 and 04 never both wait.
    """
    last, trained_on = last_needed(step_of, total), step_of <= total
    upto = np.concatenate([[0], np.cumsum(sizes)])[last + 1]  # (total + 1,) bytes up to the last file that steps 1..s need
    trained = np.cumsum(np.bincount(step_of[trained_on], sizes[trained_on], total + 1)).astype(np.int64)  # (total + 1,) of steps 1..s
    room = share * (bound - int(sizes[~trained_on].sum()))
    saves, saved = [], done
    for step in range(done + 1, total):
        if trained[step] - trained[saved] >= room or upto[step + 1] - trained[saved] > bound:
            saves.append(step)
            saved = step
    return saves, int((upto[done + 1:] - trained[done:-1]).max(initial=0))


class Follow:
    """Samples as 03_extract lands them: waited for, checked, and released once a checkpoint has them behind it.

    03 says what is there: landed.jsonl (the line, then the file), quarantine.jsonl (what will not come), bound.json (bounded mode).
    04 says what may go: released.jsonl (the line {"id", "checksum"} is on the disk before the file goes). A sample that fails, there or here, is
    left out of its batch; the batches stay as planned.
    """

    def __init__(self, args, inputs, head: torch.Tensor, place, rows: list[dict]):
        self.args, self.folder, self.place, self.rows = args, args.data_dir, place, rows
        expected, norm = inputs.expected(), inputs.final_norm()
        head, draft_ids, vocab = head.to(place.device, place.dtype), inputs.draft_ids.to(place.device), len(head)
        self.token_bytes = 4 * inputs.shape.hidden * getattr(torch, inputs.data["dtype"]).itemsize + 5

        def check(row: dict, sample: Sample):
            """(problem, sample with its mass, response tokens that are the target's argmax, those predicted)"""
            problem, tensors = check_sample(sample.path, row, expected, vocab, norm)
            if problem:
                return problem, None, 0, 0
            spans = mask_spans(tensors["loss_mask"])
            if [[start, min(end, sample.tokens)] for start, end in spans] != sample.spans:
                return "loss mask is not the plan's", None, 0, 0
            mass, agreed, predicted = response_mass(tensors, spans, head, draft_ids)
            return None, replace(sample, mass=mass.numpy()), agreed, predicted

        self.check, self.workers = check, max(1, args.num_workers)
        self.pool = ThreadPoolExecutor(self.workers)
        self.landed, self.offset, self.fresh = {}, 0, {}  # by id: 03's line; those whose file was not seen yet
        self.failed, self.failed_size, self.released = set(), 0, set()
        self.there, self.unchecked, self.checks, self.busy = set(), deque(), {}, []  # files seen; of this rank's: to check; futures; those at work
        self.seen, self.mine = self.nothing(), self.nothing()  # up to the last checkpoint, of all ranks; since then, of this one
        self.bound = self.read_bound()

    @staticmethod
    def nothing() -> dict:
        return {"samples": 0, "problems": {}, "agreed": 0, "predicted": 0}

    def read_bound(self) -> int | None:
        path = self.folder / "bound.json"
        return int(read_json(path)["max_disk_gb"] * 1e9) if path.exists() else None

    def plan(self, train: list[Sample], val: list[Sample], schedule: list) -> None:
        """Which step has which sample behind it. One without loss, which no step uses, goes with the first step that needs a later one."""
        self.total = len(schedule)
        self.step_of = {sample.id: self.total + 1 for sample in val}
        for step, (_, bins) in enumerate(schedule, 1):
            self.step_of |= {train[i].id: step for indices in bins for i in indices}
        last = last_needed(np.array([self.step_of.get(row["id"], self.total + 1) for row in self.rows]), self.total)
        self.unused = {}  # by step; it waits for them, so that none of them lands after their release
        for i, row in enumerate(self.rows):
            if row["id"] not in self.step_of:
                self.step_of[row["id"]] = step = int(np.searchsorted(last, i))
                self.unused.setdefault(step, []).append(Sample(row["id"], sample_path(self.folder, row["id"]), row["tokens"], [], None))
        self.schedule, self.train, self.val = schedule, train, val

    def begin(self, done: int, seen: dict | None) -> set[int]:
        """Go on after step `done`. Returns the steps at which to save and release. Raises UserError."""
        self.seen = seen or self.nothing()
        rank, world = self.place.rank, self.place.world
        own = [self.train[i] for _, bins in self.schedule[done:] for indices in bins[rank::world] for i in indices] + self.val[rank::world]
        self.own = {sample.id: sample for sample in own}
        self.awaited = {name for name, step in self.step_of.items() if step > done}
        if self.bound is None:
            return set()
        path = self.folder / "released.jsonl"
        data = path.read_bytes() if path.exists() else b""
        data = data[:data.rfind(b"\n") + 1]  # the rest was torn by a kill
        self.released = {json.loads(line)["id"] for line in data.splitlines()}
        unknown = sum(self.step_of.get(name, self.total + 1) > done for name in self.released)
        if unknown:
            raise UserError(f"{path}: names {unknown} samples that step {done} in {self.args.output_dir} has not behind it: they were released to "
                            "another output folder, or to a checkpoint that is gone. Name that --output-dir, or begin both stages in new folders.")
        if rank == 0:
            self.lock = open(self.folder / ".follow.lock", "w")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.folder}: another 04_train.py --follow is at work there. Stop it first.") from None
            with open(path, "ab") as file:
                file.truncate(len(data))
            sync_folder(self.folder)
            for name in self.released:  # killed between its line and this
                sample_path(self.folder, name).unlink(missing_ok=True)
        sizes = np.array([row["tokens"] * self.token_bytes + HEADER_BYTES for row in self.rows])
        step_of = np.array([self.step_of[row["id"]] for row in self.rows])
        saves, least = release_steps(sizes, step_of, self.total, self.bound, self.args.release_share, done)
        held = int(sizes[step_of > self.total].sum())
        if least > self.bound:
            raise UserError(f"{self.folder}: 03's --max-disk-gb {self.bound / 1e9:g} is too small: validation ({held / 1e9:.3f} GB) and the batches being "
                            f"filled need at least {math.ceil(least / 1e5) / 1e4:.4f}. Start 03_extract.py anew with more, or lower --val-ratio or --batch-tokens.")
        self.release(done)  # killed between the checkpoint and its release
        self.place.say(f"bounded {self.bound / 1e9:,.3f} GB | least that would do {least / 1e9:,.3f} GB | validation stays: {held / 1e9:,.3f} GB"
                       f" | {len(saves) + 1} releases to come")
        return set(saves)

    def poll(self) -> None:
        """Take in what 03 has written. A file's line comes before the file: seen in this order, the line is that file's."""
        arrived = [name for name in self.fresh if sample_path(self.folder, name).exists()]
        with open(self.folder / "landed.jsonl", "rb") as file:
            if os.fstat(file.fileno()).st_size > self.offset:
                file.seek(self.offset)
                data = file.read()
                lines = data[:data.rfind(b"\n") + 1]
                self.offset += len(lines)
                for row in map(json.loads, lines.splitlines()):
                    if row.get("redo"):
                        self.landed.pop(row["id"], None)
                    elif "id" in row and row["id"] not in self.released:
                        self.landed[row["id"]] = row
                        if row["id"] in self.awaited and row["id"] not in self.there:
                            self.fresh[row["id"]] = None
        for name in sorted(arrived, key=self.step_of.get):
            if name in self.landed:
                del self.fresh[name]
                self.there.add(name)
                if name in self.own:
                    self.unchecked.append(name)
        self.busy = [future for future in self.busy if not future.done()]
        while self.unchecked and len(self.busy) < 4 * self.workers:  # few, so that they do not hold up an end
            name = self.unchecked.popleft()
            self.checks[name] = self.pool.submit(self.check, self.landed[name], self.own[name])
            self.busy.append(self.checks[name])
        quarantine = self.folder / "quarantine.jsonl"
        size = quarantine.stat().st_size if quarantine.exists() else 0
        if size != self.failed_size:
            data = quarantine.read_bytes() if size else b""
            self.failed, self.failed_size = {json.loads(line)["id"] for line in data[:data.rfind(b"\n") + 1].splitlines()}, len(data)

    def known(self, sample: Sample) -> bool:
        """Whether it is clear what becomes of it: failed, or there and, if it is this rank's, checked."""
        if sample.id in self.there:
            return sample.id not in self.own or sample.id in self.checks and self.checks[sample.id].done()
        return sample.id in self.failed

    def wait(self, samples: list[Sample]) -> None:
        """Until all of them are known. Raises UserError when 03's bound shrinks meanwhile."""
        told = time.monotonic() - 25  # the first line comes soon
        while open_ones := [sample for sample in samples if not self.known(sample)]:
            self.poll()
            if time.monotonic() - told > 30 and open_ones[0].id not in self.there:
                told = time.monotonic()
                self.place.say(f"waiting for sample {open_ones[0].id} and {len(open_ones) - 1} more | {self.silence()}")
                if self.bound and (self.read_bound() or 0) < self.bound:
                    raise UserError(f"{self.folder}/bound.json: 03's --max-disk-gb is smaller than when this began. Run the same command again.")
            time.sleep(0.02)

    def silence(self) -> str:
        return f"03 has not written for {duration(max(0, time.time() - (self.folder / 'landed.jsonl').stat().st_mtime))}"

    def usable(self, samples: list[Sample]) -> list[Sample]:
        """Of this rank's samples, all known, those to train on."""
        return [found for sample in samples if sample.id in self.there and (found := self.checks[sample.id].result()[1])]

    def take(self, samples: list[Sample], wait: bool) -> list[Sample] | None:
        if wait:
            self.wait(samples)
        elif not all(map(self.known, samples)):
            self.poll()
        return self.usable(samples) if all(map(self.known, samples)) else None

    def behind(self, samples: list[Sample]) -> None:
        """These are done with: count what was found, forget the rest. Raises UserError when too much is wrong."""
        for sample in samples:
            problem, _, agreed, predicted = self.checks.pop(sample.id).result() if sample.id in self.there else (QUARANTINED, None, 0, 0)
            self.mine["samples"] += 1
            self.mine["agreed"] += agreed
            self.mine["predicted"] += predicted
            if problem:
                self.mine["problems"][sample.id] = problem
                log(f"skipped {sample.path} | {problem}")
        count, agreed, predicted = (self.seen[key] + self.mine[key] for key in ("samples", "agreed", "predicted"))
        damaged = {name: problem for name, problem in (self.seen["problems"] | self.mine["problems"]).items() if problem != QUARANTINED}
        if len(damaged) > max(1, MAX_BAD * count):
            name = max(damaged)
            raise UserError(f"{self.folder}: {len(damaged)} of {count} samples were bad, one of them {sample_path(self.folder, name)} ({damaged[name]}). "
                            "See to the disk and the server; then begin both stages in new folders.")
        if predicted >= 100 and agreed < MIN_AGREEMENT * predicted:
            raise other_target(self.folder, agreed / predicted)

    def gather(self) -> dict:
        """What was seen so far on all ranks; it belongs into the checkpoint."""
        for part in all_ranks(self.mine, self.place):
            self.seen = {key: self.seen[key] | value if key == "problems" else self.seen[key] + value for key, value in part.items()}
        self.seen["problems"] = dict(sorted(self.seen["problems"].items()))
        self.mine = self.nothing()
        return self.seen

    def validation(self) -> list[Sample]:
        """The usable validation samples, the same on every rank. Raises UserError."""
        self.wait(self.val)
        own = self.val[self.place.rank::self.place.world]
        found = {sample.id: sample for part in all_ranks(self.usable(own), self.place) for sample in part}
        self.behind(own)
        if not found:
            raise UserError(f"{self.folder}: none of the {len(self.val)} validation samples is usable. Raise --val-ratio (in a new --output-dir).")
        return [found[sample.id] for sample in self.val if sample.id in found]

    def release(self, step: int) -> None:
        """Remove the files that steps 1..`step` have behind them. A checkpoint of that step must be on the disk."""
        if self.bound is None or self.place.rank:
            return
        sync_folder(self.args.output_dir)  # the checkpoint's name
        sync_folder(self.folder / "landed.jsonl")  # 03 knows a released sample by its line there, after a power cut too
        files = {path.name.removesuffix(".safetensors"): (path, path.stat().st_size) for path in self.folder.glob("[0-9a-f][0-9a-f]/*.safetensors")}
        self.poll()
        going = [name for name in files if name in self.landed and self.step_of.get(name, self.total + 1) <= step]
        if not going:
            return
        with open(self.folder / "released.jsonl", "a") as file:
            file.write("".join(json.dumps({"id": name, "checksum": self.landed[name]["checksum"]}) + "\n" for name in going))
            file.flush()
            os.fsync(file.fileno())
        freed = 0
        for name in going:
            path, size = files[name]
            path.unlink()
            freed += size
            del self.landed[name]
            self.there.discard(name)
        self.released.update(going)
        held = sum(size for _, size in files.values()) - freed
        self.place.say(f"released {len(going):,} samples behind step {step}, {len(self.released):,} in all | {freed / 1e9:,.3f} GB"
                       f" | disk {held / 1e9:,.3f}/{self.bound / 1e9:,.3f} GB")

    def finish(self) -> str:
        """sha256 of 03's manifest, once 03 is done, too."""
        told = time.monotonic() - 25
        while not (self.folder / "manifest.json").exists():
            if time.monotonic() - told > 30:
                told = time.monotonic()
                self.place.say(f"waiting for 03_extract to write its manifest | {self.silence()}")
            time.sleep(0.1)
        read_manifest(self.folder, "03_extract")
        return sha256_file(self.folder / "manifest.json")


def all_ranks(value, place) -> list:
    parts = [value] * place.world
    if place.world > 1:
        dist.all_gather_object(parts, value)
    return parts


def wait_for_facts(folder: Path, say) -> dict:
    """What 03 says of all its samples (target, layers, dtype, width), written with the first of them. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Start 03_extract.py first.")
    told = time.monotonic() - 25
    while True:
        try:
            with open(folder / "landed.jsonl", "rb") as file:
                lines = file.read(1 << 16).split(b"\n")[:-1]
            for row in map(json.loads, lines):
                if "facts" in row and (folder / "plan.jsonl").exists():
                    return row["facts"]
        except FileNotFoundError:
            pass
        if time.monotonic() - told > 30:
            told = time.monotonic()
            say(f"waiting for the first sample in {folder}: 03_extract has not written one yet")
        time.sleep(0.2)


# ------------------------------------------------------------------ what serving would accept
def walk(right: np.ndarray, start: int, end: int, steps: int, first: int) -> list[int]:
    """Correct drafts of each verify step of a greedy server over the response tokens [start, end) of one sample.

    right (K, rows): row i is position first + i. The target itself emits token `start`; a verify step after token p + 1 drafts x[p+2], x[p+3], ...
    """
    accepted, p = [], max(start, 1) - 1
    while p + 2 < end:
        k = 0
        while k < min(steps, end - p - 2) and right[k, p - first]:
            k += 1
        accepted.append(k)
        p += k + 1
    return accepted


def evaluate(draft: Drafter, samples: list[Sample], args, place) -> dict:
    """Losses and accuracies over `samples`, and the accept_length that greedy serving will show on them. The same on every rank."""
    K, draft_steps, world, device = args.ttt_steps, args.num_draft_steps, place.world, place.device
    bins = pack([sample.tokens for sample in samples], list(range(len(samples))), args.batch_tokens)[place.rank::world]
    bins = [[samples[i] for i in indices] for indices in bins]
    sums = torch.zeros(K, 4, dtype=torch.float64, device=device)
    histogram, walks = np.zeros(draft_steps + 1, np.int64), {}
    load = functools.partial(collate, steps=K, hidden=draft.shape.hidden, pin=device.type == "cuda")
    for members, batch, _ in feed(bins, load, args.num_workers, device, draft.dtype):
        step_sums, right = ttt_pass(draft, batch, [1.0] * K, kind=args.loss)
        sums += step_sums
        right = right.cpu().numpy()
        for sample, ((q0, q1), _) in zip(members, batch.spans):
            accepted = [k for start, end in sample.spans for k in walk(right[:, q0:q1], start, end, draft_steps, sample.rows(K)[0])]
            histogram += np.bincount(accepted, minlength=draft_steps + 1)
            walks[sample.id] = [len(accepted), sum(accepted)]
    histogram = torch.from_numpy(histogram).to(device)
    if world > 1:
        dist.all_reduce(sums), dist.all_reduce(histogram)
    walks = {name: value for part in all_ranks(walks, place) for name, value in part.items()}
    sums, histogram = sums.cpu(), histogram.tolist()
    verify, correct = sum(histogram), sum(k * n for k, n in enumerate(histogram))
    accept_length = 1 + correct / max(1, verify)
    counts = np.sum([sample.counts(K) for sample in samples], 0)
    return step_metrics(sums, counts) | {"accept_length": accept_length, "prediction": {
        "num_steps": draft_steps, "accept_length": accept_length, "verify_steps": verify, "correct_drafts": correct,
        "histogram": histogram, "accept_by_position": [sum(histogram[j + 1:]) / max(1, verify) for j in range(draft_steps)],
        "val_ids_file": "val_ids.json", "samples": dict(sorted(walks.items()))}}


def step_metrics(sums: torch.Tensor, counts) -> dict:
    """loss_k, full_acc_k, cond_acc_k from the sums of `ttt_pass` over all ranks and the loss rows of each step."""
    metrics = {}
    for k, (loss, counted, chain, before) in enumerate(sums.tolist()):
        metrics |= {f"loss_{k}": loss / max(1, counts[k]), f"full_acc_{k}": chain / max(1, counted), f"cond_acc_{k}": chain / max(1, before)}
    return metrics


# ------------------------------------------------------------------ output
EXPORTED = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
            "midlayer.post_attention_layernorm.weight", *(f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"),
            *(f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))}


def draft_config(shape: Shape, target: dict, ids: list[int], dtype: str) -> dict:
    """config.json for SGLang's LlamaForCausalLMEagle3. `eagle_config` is the only place where it looks for the layer ids."""
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
            "vocab_size": shape.vocab, "draft_vocab_size": shape.draft_vocab, "max_position_embeddings": shape.max_positions,
            "rms_norm_eps": shape.rms_norm_eps, "rope_theta": shape.rope_theta, "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": dtype,
            "bos_token_id": target.get("bos_token_id"), "eos_token_id": target.get("eos_token_id"),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}}


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
    for old in output.glob("*.old"):
        final = old.with_suffix("")
        shutil.rmtree(old) if final.exists() else os.replace(old, final)
    for temporary in output.glob("*.tmp"):
        shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()


def checkpoints(output: Path) -> list[tuple[int, Path]]:
    found = [(int(path.name.split("-")[1]), path) for path in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found)


def link(source, target):
    try:
        os.link(source, target)
    except OSError:  # a filesystem without hard links
        shutil.copy2(source, target)


def make_best(output: Path, step: int) -> None:
    """best/ = the drafter of checkpoint-<step>, without its training state."""
    best, checkpoint = output / "best", output / f"checkpoint-{step}"
    if best.exists() and read_json(best / "eagle3.json").get("step") == step:
        return
    shutil.copytree(checkpoint, output / "best.tmp", ignore=shutil.ignore_patterns("training_state"), copy_function=link)
    replace_folder(output / "best.tmp", best)


def plot(metrics: list[dict], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    training, validation = [row for row in metrics if "loss" in row], [row for row in metrics if "val_accept_length" in row]
    for k in range(sum(key.startswith("loss_") for key in training[0])):
        axes[0].plot([row["step"] for row in training], [row[f"loss_{k}"] for row in training], f"C{k}", label=f"loss_{k}")
        axes[0].plot([row["step"] for row in validation], [row[f"val_loss_{k}"] for row in validation], f"C{k}o--")
        axes[1].plot([row["step"] for row in training], [row[f"cond_acc_{k}"] for row in training], f"C{k}", label=f"cond_acc_{k}")
        axes[1].plot([row["step"] for row in validation], [row[f"val_cond_acc_{k}"] for row in validation], f"C{k}o--")
    for axis, title in zip(axes, ("loss (dashed: validation)", "conditional accuracy (dashed: validation)")):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".tmp"), format="png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    os.replace(path.with_suffix(".tmp"), path)


def duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{int(seconds) % 60:02d}s"


# ------------------------------------------------------------------ main
@dataclass(frozen=True)
class Place:
    """Where this process computes. A single process takes the same path as many."""
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype

    def say(self, event: str) -> None:
        if self.rank == 0:
            log(event)


def set_up(args) -> Place:
    """Joins the other ranks, if torchrun started any. Raises UserError."""
    rank, world, local = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(f"rank {rank} wants GPU {local}, torch sees {torch.cuda.device_count()}. Start as many processes as GPUs, or --device cpu.")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if world > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=12))
    return Place(rank, world, device, getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32")))


def draft_shape(args, target: dict, draft_vocab: int) -> Shape:
    """The drafter's sizes: flags, else those of --finetune-from, else the target's. Raises UserError."""
    old = read_json(args.finetune_from / "config.json") if args.finetune_from else {}
    heads = args.num_heads or old.get("num_attention_heads") or target["num_attention_heads"]
    theta = target.get("rope_theta") or (target.get("rope_parameters") or {}).get("rope_theta") or 10000.0
    shape = Shape(
        hidden=target["hidden_size"], heads=heads, kv_heads=args.num_kv_heads or old.get("num_key_value_heads") or (8 if heads % 8 == 0 else heads),
        head_dim=args.head_dim or old.get("head_dim") or target.get("v_head_dim") or target.get("head_dim") or target["hidden_size"] // heads,
        intermediate=args.intermediate_size or old.get("intermediate_size") or target["intermediate_size"],
        vocab=target["vocab_size"], draft_vocab=draft_vocab, rms_norm_eps=old.get("rms_norm_eps") or target.get("rms_norm_eps", 1e-5),
        rope_theta=float(args.rope_theta or old.get("rope_theta") or theta),
        max_positions=args.max_position_embeddings or old.get("max_position_embeddings") or target["max_position_embeddings"])
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise UserError(f"{shape.heads} heads, {shape.kv_heads} kv heads, head_dim {shape.head_dim}: kv heads must divide the heads, head_dim must be even.")
    return shape


@dataclass
class Inputs:
    """What the flags name, read and found to fit together."""
    data: dict  # the manifest of hidden_states/
    index: list
    target: Target
    draft_ids: torch.Tensor
    layers: list
    shape: Shape
    config_json: dict  # the drafter's
    hashes: dict

    def expected(self) -> dict:
        """What each sample's file must be like (check_sample)."""
        return {"hidden_size": self.shape.hidden, "dtype": self.data["dtype"], "target": self.data["target"], "capture_layers": ",".join(map(str, self.layers))}

    def final_norm(self) -> torch.Tensor | None:
        """(H,) its weight in float32; None where the checkpoint holds none."""
        return self.target.tensor("norm").float() if self.target.name("norm") else None


def read_inputs(args, say) -> Inputs:
    read_manifest(args.vocab_mapping_dir, "02_build_vocab")
    data = wait_for_facts(args.data_dir, say) if args.follow else read_manifest(args.data_dir, "03_extract")
    if data.get("bounded"):
        raise UserError(f"{args.data_dir}: extracted in bounded mode, so most of its samples are gone. Only the --follow run that trained on them can go on.")
    target = Target(args.verifier_path)
    if target.config["hidden_size"] != data["hidden_size"]:
        raise UserError(f"{args.data_dir}: states of hidden size {data['hidden_size']}, the target at {args.verifier_path} has {target.config['hidden_size']}.")
    draft_ids = read_mapping(args.vocab_mapping_dir, target.config["vocab_size"])
    layers = [int(layer) for layer in str(data["capture_layers"]).strip("[]").split(",")]
    shape = draft_shape(args, target.config, len(draft_ids))
    config_json = draft_config(shape, target.config, layer_ids(layers, args.serve_sglang_version or data["sglang_version"]), args.export_dtype)
    source = {"plan": "plan.jsonl"} if args.follow else {"hidden_states": "manifest.json"}
    hashes = {**{name: sha256_file(args.data_dir / file) for name, file in source.items()}, "vocab_mapping": sha256_file(args.vocab_mapping_dir / "manifest.json"),
              "target_config": sha256_file(args.verifier_path / "config.json")}
    if args.finetune_from:
        old = args.finetune_from / "eagle3.json"
        old_layers = read_json(old).get("capture_layers") if old.exists() else layers
        if old_layers != layers:
            raise UserError(f"{old}: trained on capture layers {old_layers}, {args.data_dir} holds {layers}. Extract those, or start without --finetune-from.")
        try:
            hashes["finetune_from"] = sha256_file(args.finetune_from / "model.safetensors")
        except OSError as error:
            raise UserError(f"--finetune-from: {error}. Name a folder that 04_train.py exported (best/ or checkpoint-<step>/).") from None
    index, path = [], args.data_dir / "index.jsonl"
    if not args.follow:
        if not path.is_file() or sha256_file(path) != data["index_sha256"]:
            raise UserError(f"{path}: missing, or not the one that manifest.json was written for. Run 03_extract.py again.")
        index = [json.loads(line) for line in path.read_text().splitlines()]
    return Inputs(data, index, target, draft_ids, layers, shape, config_json, hashes)


def usable_samples(args, inputs: Inputs, head: torch.Tensor, place: Place):
    """(samples, dropped {reason: n}, share of response tokens that are the target's argmax). Raises UserError when too much is wrong."""
    cache = args.output_dir / "checked"
    check_data(args.data_dir, inputs.index, inputs.expected(), cache, head.to(place.device, place.dtype), inputs.final_norm(),
               inputs.draft_ids.to(place.device), place, args.num_workers)
    if place.world > 1:
        dist.barrier()
    samples, problems, agreement = read_checked(args.data_dir, cache, inputs.index, args.max_seq_len)
    dropped = {reason: sum(value == reason for value in problems.values()) for reason in sorted(set(problems.values()))}
    damaged = sorted(name for name, problem in problems.items() if not problem.startswith("no response token"))
    too_many = len(damaged) > MAX_BAD * len(inputs.index)
    for name in damaged[:10 if too_many else None] + sorted(problems.keys() - set(damaged))[:10]:
        place.say(f"skipped {sample_path(args.data_dir, name)} | {problems[name]}")
    if too_many:
        raise UserError(f"{args.data_dir}: {len(damaged)} of {len(inputs.index)} samples are bad ({dropped}; the first: {sample_path(args.data_dir, damaged[0])}). "
                        "Run 03_extract.py --verify, extract anew what it names (--redo-failed), then this with another --output-dir.")
    if agreement < MIN_AGREEMENT and samples:
        raise other_target(args.data_dir, agreement)
    if len(samples) < 2:
        raise UserError(f"{args.data_dir}: {len(samples)} usable samples {dropped or ''}; at least 2 are needed, one of them to validate.")
    return samples, dropped, agreement


class Journal:
    """metrics.jsonl (and TensorBoard): rows {"step", ...}. It holds nothing that depends on time: a resumed run ends in the same bytes."""

    def __init__(self, output: Path, step: int, tensorboard: bool):
        self.path, self.writer = output / "metrics.jsonl", None
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows = (json.loads(line) for line in lines if line.endswith("}"))
        self.rows = [row for row in rows if row["step"] <= step]  # a killed run may have written past its last checkpoint
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("--tensorboard: the package tensorboard is not installed.") from None
            self.writer = SummaryWriter(output / "tensorboard", purge_step=step + 1)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        for key, value in row.items() if self.writer else ():
            self.writer.add_scalar(key, value, row["step"])


def save_checkpoint(args, trainer: Trainer, inputs: Inputs, best: dict | None, prediction: dict | None, agreement: float, seen: dict | None) -> None:
    """checkpoint-<step>/ as SGLang loads it, with training_state/ in it; then best/; then the oldest go. seen: what --follow has behind it."""
    output, step = args.output_dir, trainer.step
    folder, temporary = output / f"checkpoint-{step}", output / f"checkpoint-{step}.tmp"
    (temporary / "training_state").mkdir(parents=True)
    save_file(trainer.draft.export(trainer.average, getattr(torch, args.export_dtype)), temporary / "model.safetensors", {"format": "pt"})
    (temporary / "config.json").write_text(json.dumps(inputs.config_json, indent=1) + "\n")
    (temporary / "eagle3.json").write_text(json.dumps(provenance(args, inputs, step, prediction, agreement), indent=1) + "\n")
    save_file(trainer.tensors(), temporary / "training_state" / "state.safetensors")
    (temporary / "training_state" / "state.json").write_text(json.dumps({"step": step, "best": best} | ({"seen": seen} if seen else {})) + "\n")
    replace_folder(temporary, folder)
    if best:
        make_best(output, best["step"])
    for _, old in checkpoints(output)[:-args.keep_checkpoints]:
        shutil.rmtree(old)


def write_val_ids(output: Path, val: list[Sample]) -> None:
    write_atomic(output / "val_ids.json", json.dumps({"ids": [sample.id for sample in val]}, indent=1) + "\n")


def load_checkpoint(folder: Path, trainer: Trainer) -> tuple[dict | None, dict | None]:
    """Fills the trainer; returns the best so far, {"step", "accept_length"}, and what --follow had behind it."""
    state = read_json(folder / "training_state" / "state.json")
    stored = load_file(folder / "training_state" / "state.safetensors")
    for name, tensor in trainer.tensors().items():
        tensor.copy_(stored[name])
    trainer.draft.refresh()
    trainer.step = state["step"]
    return state["best"], state.get("seen")


def provenance(args, inputs: Inputs, step: int, prediction: dict | None, agreement: float) -> dict:
    """eagle3.json: what the drafter was made from, and what serving it should show (05_benchmark compares)."""
    offsets = inputs.draft_ids - torch.arange(len(inputs.draft_ids))
    return {"schema": SCHEMA, "step": step, "prediction": prediction, "capture_layers": inputs.layers, "target": inputs.data["target"],
            "sglang_version": inputs.data["sglang_version"], "serve_sglang_version": args.serve_sglang_version or inputs.data["sglang_version"],
            "hidden_states_manifest": inputs.hashes.get("hidden_states"), "vocab_mapping_manifest": inputs.hashes["vocab_mapping"],
            "hidden_size": inputs.shape.hidden, "draft_vocab_size": inputs.shape.draft_vocab, "max_seq_len": args.max_seq_len,
            "target_argmax_share": agreement, "config": inputs.config_json, "d2t_sha256": hashlib.sha256(offsets.numpy().tobytes()).hexdigest()}


def usage(flops: float, place: Place) -> str:
    """What the log says about the GPU; flops: a second, of this rank."""
    if place.device.type != "cuda":
        return ""
    peak = next((peak for name, peak in PEAK_TFLOPS.items() if name in torch.cuda.get_device_name(place.device)), None)
    rate = f"MFU {flops / 1e12 / peak:.0%}" if peak else f"{flops / 1e12:.0f} TFLOP/s"
    return f" | {rate} | {torch.cuda.max_memory_allocated(place.device) / 2**30:.1f} GiB"


def listed(metrics: dict, name: str, steps: int, digits=3) -> str:
    return " ".join(f"{metrics[f'{name}_{k}']:.{digits}f}" for k in range(steps))


class Window:
    """What happened since the last log line."""

    def __init__(self, steps: int):
        self.sums, self.counts = 0, np.zeros(steps, np.int64)
        self.tokens = self.flops = self.waited = 0
        self.begun = time.monotonic()


class HostCopy:
    """A small tensor on its way to the host; reading it waits for this copy alone, not for what was launched after it."""

    def __init__(self, tensor: torch.Tensor):
        self.event = torch.cuda.Event() if tensor.is_cuda else None
        self.value = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
        if self.event:
            self.event.record()

    def read(self) -> torch.Tensor:
        if self.event:
            self.event.synchronize()
        return self.value


def stop_if_not_finite(step: int, sums: HostCopy, path: Path, samples: list[Sample]) -> None:
    if not torch.isfinite(sums.read()).all():
        write_atomic(path, json.dumps({"step": step, "samples": [str(sample.path) for sample in samples]}, indent=1) + "\n")
        log(f"loss is not finite in step {step}: stopped; the batch is named in {path}, the last checkpoint is untouched. "
            "Look at its samples, or lower --lr in another --output-dir")
        sys.exit(1)


def check_args(args) -> None:
    missing = [f"--{name}" for name in ("verifier-path", "data-dir", "vocab-mapping-dir", "output-dir") if getattr(args, name.replace("-", "_")) is None]
    if missing:
        raise UserError(f"{', '.join(missing)} not given. See --help.")
    for limits, fits, flags in (
            ("at least 1", lambda x: x >= 1, "epochs max-steps max-seq-len batch-tokens grad-accum ttt-steps num-draft-steps log-every keep-checkpoints "
                                             "num-heads num-kv-heads head-dim intermediate-size max-position-embeddings"),
            ("at least 0", lambda x: 0 <= x < math.inf, "lr weight-decay step-decay noise-std num-workers save-every"),
            ("above 0", lambda x: 0 < x < math.inf, "max-grad-norm rope-theta"),
            ("from 0 to 1", lambda x: 0 <= x <= 1, "warmup-ratio"),
            ("at least 0 and below 1", lambda x: 0 <= x < 1, "beta1 beta2 ema"),
            ("between 0 and 1", lambda x: 0 < x < 1, "val-ratio")):
        for flag in flags.split():
            value = getattr(args, flag.replace("-", "_"))
            if value is not None and not fits(value):
                raise UserError(f"--{flag} {value} cannot be: it must be {limits}.")
    args.num_draft_steps = args.num_draft_steps or args.ttt_steps
    args.batch_tokens = max(args.batch_tokens, args.max_seq_len)
    if args.follow and (args.epochs != 1 or args.max_steps or not 0 < args.release_share <= 1):
        raise UserError("--follow is one pass: it needs --epochs 1, no --max-steps (cut with 03's --limit), and a --release-share above 0, at most 1.")
    if args.follow:
        args.order = "plan"
    if args.step_weights and (len(args.step_weights) != args.ttt_steps or not all(0 <= weight < math.inf for weight in args.step_weights)):
        raise UserError(f"--step-weights {args.step_weights}: --ttt-steps {args.ttt_steps} needs as many, none below 0.")
    if args.num_draft_steps > args.ttt_steps:
        raise UserError(f"--num-draft-steps {args.num_draft_steps} needs --ttt-steps of at least as many, not {args.ttt_steps}.")


def main(argv: list[str]) -> None:
    args = parse_args(build_parser(), "train", argv)
    check_args(args)
    place = set_up(args)
    inputs = read_inputs(args, place.say)
    K, output, shape, say = args.ttt_steps, args.output_dir, inputs.shape, place.say

    config = {key.replace("_", "-"): str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    config |= {"dtype": str(place.dtype).split(".")[1], "bins-per-step": place.world * args.grad_accum, "inputs": dict(inputs.hashes), "draft": asdict(shape)}
    if place.rank == 0:
        lock = open_stage(output, config, MAY_CHANGE)  # noqa: F841  held till the process ends
        repair(output)
    if place.world > 1:
        dist.barrier()
        if not (output / "stage.json").exists():
            raise UserError(f"{output}: rank {place.rank} does not see what rank 0 wrote there. All nodes must share the filesystem of --output-dir.")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "sglang": inputs.data["sglang_version"]}
    gpu = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "cpu"
    say(f"config {json.dumps(config)}")
    say(f"versions {json.dumps(versions)} | {place.world} x {gpu}")
    if (output / "manifest.json").exists():
        say("complete already")
        say(f"done: {output}")
        return

    # Data: every file is read and compared once, then packed into steps; with --order plan they are packed as planned, and what is bad left out.
    head = inputs.target.tensor("head")
    follow, found, dropped, agreement = None, {}, {}, 0.0
    if not args.follow:
        samples, dropped, agreement = usable_samples(args, inputs, head, place)
        found = {sample.id: sample for sample in samples}
    if args.order == "plan":
        rows, planned = read_plan(args.data_dir, args.max_seq_len)
        train, val = split_samples(planned, args.val_ratio, args.seed)
        position = {row["id"]: i for i, row in enumerate(rows)}
        train.sort(key=lambda sample: position[sample.id])
    else:
        train, val = split_samples(samples, args.val_ratio, args.seed)
    if not train:
        raise UserError(f"--val-ratio {args.val_ratio} leaves none of {len(val)} samples to train on. Lower it.")
    epochs = [plan_epoch(train, args.batch_tokens, place.world * args.grad_accum, args.seed, epoch, args.order == "shuffle") for epoch in range(args.epochs)]
    if len(epochs[0][0]) < place.world:
        raise UserError(f"{len(train)} training samples fill {len(epochs[0][0])} micro-batches, fewer than the {place.world} ranks. Use fewer, or a lower --batch-tokens.")
    schedule = [(epoch, bins) for epoch, steps in enumerate(epochs) for bins in steps][:args.max_steps]
    total, warmup = len(schedule), math.ceil(args.warmup_ratio * len(schedule))
    saves = set(np.cumsum([len(steps) for steps in epochs]).tolist()) | {total} | set(range(0, total, args.save_every or total))
    tokens = sum(sample.tokens for sample in train)
    if args.follow:
        follow = Follow(args, inputs, head, place, rows)
        follow.plan(train, val, schedule)
    elif args.order == "plan":
        val = [found[sample.id] for sample in val if sample.id in found]
        missing = {sample.id for sample in planned} - {row["id"] for row in inputs.index}
        dropped |= {QUARANTINED: len(missing)} if missing else {}
    truncated = sum(sample.truncated for sample in (found.values() if found else planned))
    checked = ("as planned", "") if follow else (f"{sum(dropped.values())} skipped", f" | argmax {agreement:.1%}")
    say(f"data {len(train)} train, {len(val)} validation, {checked[0]}, {truncated} truncated | {tokens:,} tokens, "
        f"{sum(sample.counts(1)[0] for sample in train) / tokens:.1%} in the loss{checked[1]} | {total} steps, {len(epochs[0])} in the first epoch")

    # The drafter: fresh, another one's weights, or the last checkpoint of this run.
    draft = Drafter(shape, place.dtype, place.device, inputs.target.tensor("embed"), head[inputs.draft_ids], inputs.draft_ids, args.max_seq_len + K)
    del head
    if args.finetune_from:
        try:
            draft.load(load_file(args.finetune_from / "model.safetensors"))
        except (SafetensorError, UserError) as error:
            raise UserError(f"{args.finetune_from}/model.safetensors: {error}") from None
    else:
        draft.initialise(args.seed)
        if place.world > 1:  # GPUs of two models draw other numbers from one seed
            dist.broadcast(draft.master.flat, 0)
            draft.refresh()
    trainer, best, seen = Trainer(draft, args), None, None
    if checkpoints(output):
        best, seen = load_checkpoint(checkpoints(output)[-1][1], trainer)
        say(f"resume {checkpoints(output)[-1][1]}")
    say(f"drafter {draft.master.flat.numel() / 1e6:.2f}M trained | {json.dumps(inputs.config_json['eagle_config'])}")
    if place.rank == 0:
        journal = Journal(output, trainer.step, args.tensorboard)
        if not follow:
            write_val_ids(output, val)
        if best:
            make_best(output, best["step"])
    if follow:
        saves |= follow.begin(trainer.step, seen)

    def validate_and_save(best, val):
        """Evaluate, write checkpoint-<step> and, if it predicts the longest accept_length so far, best/. Returns the best."""
        share, seen = agreement, None
        if follow:
            if trainer.step == total:  # before, some of the validation samples have not landed
                inputs.hashes["hidden_states"], val = follow.finish(), follow.validation()
            seen = follow.gather()
            share = seen["agreed"] / max(1, seen["predicted"])
            if trainer.step < total:
                if place.rank == 0:
                    save_checkpoint(args, trainer, inputs, None, None, share, seen)
                return None
            if place.rank == 0:
                write_val_ids(output, val)
        with draft.using(trainer.average):
            found = evaluate(draft, val, args, place)
        prediction = found.pop("prediction")
        if not all(map(math.isfinite, found.values())):  # the weights went wrong in this very step, after its loss
            say(f"validation loss is not finite after step {trainer.step}: stopped, the last checkpoint is untouched. Lower --lr in another --output-dir")
            sys.exit(1)
        if not best or found["accept_length"] > best["accept_length"]:
            best = {"step": trainer.step, "accept_length": found["accept_length"]}
        if place.rank == 0:
            journal.add({"step": trainer.step, **{f"val_{key}": value for key, value in found.items()}})
            say(f"validation step {trainer.step}/{total} | loss_k {listed(found, 'loss', K)} | full_acc {listed(found, 'full_acc', K)} | cond_acc {listed(found, 'cond_acc', K)}"
                f" | accept_length {found['accept_length']:.3f} | by position {' '.join(f'{share:.3f}' for share in prediction['accept_by_position'])}")
            save_checkpoint(args, trainer, inputs, best, prediction, share, seen)
        if place.world > 1:
            dist.barrier()
        return best

    # Train.
    done, window, pending = trainer.step, Window(K), None
    rank, world = place.rank, place.world
    mine = [(epoch, indices) for epoch, bins in schedule[done:] for indices in bins[rank::world]]
    load = functools.partial(collate, steps=K, hidden=shape.hidden, pin=place.device.type == "cuda")

    def present(indices, wait=True):
        """The samples of a planned micro-batch without those that failed; None where --follow would have to wait and shall not."""
        members = [train[i] for i in indices]
        return follow.take(members, wait) if follow else [found[sample.id] for sample in members if sample.id in found]

    def micro_batches():
        for (epoch, indices), batch, waited in feed(mine, load, args.num_workers, place.device, place.dtype, lambda planned, wait: present(planned[1], wait)):
            window.waited += waited
            window.flops += batch.flops(shape, K)
            if args.noise_std:
                add_noise(batch, args.noise_std, f"{args.seed}:{epoch}:{indices}")
            yield batch

    batches, started = micro_batches(), time.monotonic()
    for step, (epoch, bins) in enumerate(schedule[done:], done + 1):
        ours = bins[rank::world]
        if follow:
            begun = time.monotonic()
            follow.wait([train[i] for indices in bins for i in indices] + follow.unused.get(step, []))
            window.waited += time.monotonic() - begun
        counts = sum((np.array(sample.counts(K)) for indices in (ours if follow else bins) for sample in present(indices)), np.zeros(K, np.int64))
        if follow and world > 1:  # a rank knows which of its own samples are good
            dist.all_reduce(torch.from_numpy(counts))
        members = [present(indices) for indices in ours]
        lr = learning_rate(step - 1, total, args.lr, warmup, args.scheduler)
        sums = trainer.update(batches, sum(map(bool, members)), counts, lr)
        window.sums, window.counts = window.sums + sums.double(), window.counts + counts
        window.tokens += sum(train[i].tokens for indices in bins for i in indices)
        if pending:  # the step before this one: the GPU is done with it, or nearly so, and has this one to go on with
            stop_if_not_finite(*pending)
        pending = step, HostCopy(sums), output / f"not-finite-{step}-rank{rank}.json", sum(members, [])
        if follow:
            follow.behind([train[i] for indices in ours for i in indices])

        saving = step in saves
        if saving or step % args.log_every == 0 or step == 1:
            stop_if_not_finite(*pending)
            if world > 1:
                dist.all_reduce(window.sums)
            metrics = step_metrics(window.sums.cpu(), window.counts)
            metrics |= {"loss": sum(weight * metrics[f"loss_{k}"] for k, weight in enumerate(loss_weights(args))),
                        "accept_length": 1 + sum(metrics[f"full_acc_{k}"] for k in range(args.num_draft_steps)), "lr": lr, "epoch": epoch}
            seconds = time.monotonic() - window.begun
            if rank == 0:
                journal.add({"step": step, **metrics})
            say(f"step {step}/{total} | epoch {epoch + 1}/{args.epochs} | loss {metrics['loss']:.3f} | loss_k {listed(metrics, 'loss', K)} | full_acc {listed(metrics, 'full_acc', K, 2)}"
                f" | cond_acc {listed(metrics, 'cond_acc', K, 2)} | accept_length {metrics['accept_length']:.2f} | lr {lr:.2e} | {window.tokens / seconds:,.0f} tok/s"
                f"{usage(window.flops / seconds, place)} | data wait {window.waited / seconds:.0%}"
                f" | eta {duration((time.monotonic() - started) / (step - done) * (total - step))}")
            if saving:
                best = validate_and_save(best, val)
                if follow and step < total:
                    follow.release(step)
            window = Window(K)

    if follow:
        inputs.hashes["hidden_states"] = follow.finish()
        follow.release(total)
        problems = follow.seen["problems"]
        samples, val = ([sample for sample in some if sample.id not in problems] for some in (planned, val))
        truncated = sum(sample.truncated for sample in samples)
        reasons = [*problems.values(), *[NO_LOSS] * (len(rows) - len(planned))]
        dropped = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
    if place.rank == 0:
        plot(journal.rows, output / "training.png")
        fixed = {key: value for key, value in config.items() if key not in MAY_CHANGE}
        manifest = {"schema": SCHEMA, "stage": STAGE, "config": fixed, "inputs": inputs.hashes,
                    "counts": {"kept": len(samples), "dropped": dropped, "train": len(train), "validation": len(val), "truncated": truncated, "steps": total},
                    "versions": versions, "best": best}
        write_atomic(output / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    if place.world > 1:
        dist.barrier()
        dist.destroy_process_group()
    say(f"best step {best['step']} | accept_length {best['accept_length']:.3f}")
    say(f"done: {output}")


if __name__ == "__main__":
    run(main)
