"""Speed and memory of 04_train's own training step, at the size of Kimi-K2.5's drafter, on the GPU at hand.

    python3 scripts/bench_train.py                  # checks, ceilings, table (a few minutes on an H200; `files` writes 4.7 GB)
    python3 scripts/bench_train.py --profile        # besides: where the time of a step goes, kernel by kernel
    python3 scripts/bench_train.py --check-only     # only: each fused kernel against its plain form; exit code 1 if one differs
    torchrun --nproc_per_node 2 scripts/bench_train.py --cases t4096     # the same work on one and on two GPUs

It imports 04_train.py by path and times Trainer.update (forward, backward, clipping, AdamW) on packed batches of random states that already lie on the
GPU; `files` reads samples through 04's loader instead, out of the page cache. Random numbers, since zeros run faster than data. All positions carry
loss in t4096; in `mix` lengths are log-normal with mean 1,730, cut at 2,048, and the first third of each sample is prompt.
floor: the arithmetic of Shape.flops at --peak (the rate of a large bf16 product, measured first). tok/s counts all tokens of the samples, prompts included.
"""
import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

spec = importlib.util.spec_from_file_location("train", Path(__file__).resolve().parent.parent / "04_train.py")
train = sys.modules["train"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)

KIMI = dict(hidden=7168, heads=64, head_dim=128, intermediate=18432, vocab=163840, draft_vocab=32000, rms_norm_eps=1e-5, rope_theta=5e4, max_positions=262144)
TOY = dict(hidden=128, heads=8, head_dim=16, intermediate=192, vocab=1000, draft_vocab=320, rms_norm_eps=1e-5, rope_theta=5e4, max_positions=4096)
# name: (what, kv heads, TTT steps, goal in tok/s, peers in tok/s as measured on an H200 by others' own code)
CASES = {
    "t4096": ("2 samples of 4096, all loss, TTT 3, 64 KV heads", 64, 3, 30000, "TorchSpec 18.9k, speculators 21.5k (head frozen), SpecForge 17.3k"),
    "ttt7": ("2 samples of 4096, all loss, TTT 7, 64 KV heads", 64, 7, 14000, "7.2k (T 2048)"),
    "mix": ("real mix, TTT 3, 64 KV heads", 64, 3, 40000, "under 13.9k unpacked, about 21k packed"),
    "files": ("the mix from files through the loader", 64, 3, 0, ""),
    "t4096-8": ("t4096 with 8 KV heads", 8, 3, 0, ""),
    "mix-8": ("mix with 8 KV heads", 8, 3, 0, ""),
}


def random_batch(shape, lengths, prompts, steps, device, dtype):
    """What 04's `collate` makes of samples of these lengths, with random states."""
    sizes = [train.Sample("", Path(), n, [[p, n]], np.ones(0)).rows(steps) for n, p in zip(lengths, prompts)]
    cu_k, cu_q = (np.cumsum([0] + [size[i] for size in sizes]) for i in (1, 2))
    C, R = int(cu_k[-1]), int(cu_q[-1])
    spans = [((q0, q1), (k0, k1)) for q0, q1, k0, k1 in zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist())]
    mask = torch.cat([torch.arange(first, context) + 2 >= p for (first, context, _), p in zip(sizes, prompts)])
    return train.Batch(
        aux=torch.randn(C, 3 * shape.hidden, device=device, dtype=dtype), last=torch.randn(R, shape.hidden, device=device, dtype=dtype),
        next_ids=torch.randint(shape.vocab, (C,), device=device), labels=torch.randint(shape.vocab, (R,), device=device),
        positions=torch.cat([torch.arange(context) for _, context, _ in sizes]).to(device), mask=mask.to(device), mass=torch.ones(R, device=device),
        left=torch.cat([torch.arange(query, 0, -1) for *_, query in sizes]).to(device),
        length=torch.cat([torch.full((context,), n) for (_, context, _), n in zip(sizes, lengths)]).to(device),
        cu_q=torch.tensor(cu_q, dtype=torch.int32, device=device), cu_k=torch.tensor(cu_k, dtype=torch.int32, device=device), spans=spans, tokens=sum(lengths))


def mix_lengths(count: int, longest: int) -> list[int]:
    """Log-normal, mean 1,730 before the cut, sigma 0.6, cut at 2,048: the 56 of the table then have 1,477 on average. Scaled to `longest`."""
    lengths = np.random.default_rng(0).lognormal(math.log(1730) - 0.6 ** 2 / 2, 0.6, count)
    return [max(8, int(n)) for n in np.minimum(lengths, 2048) * longest / 2048]


def loss_rows(batch, steps) -> list[int]:
    padded = torch.nn.functional.pad(batch.mask, (0, steps))
    return [int((padded[k:k + len(batch.mask)] & (batch.left > k)).sum()) for k in range(steps)]


def make_trainer(shape, device, dtype):
    scale = shape.hidden ** -0.5
    embed, head = (torch.randn(rows, shape.hidden, device=device, dtype=dtype) * scale for rows in (shape.vocab, shape.draft_vocab))
    draft_ids = torch.arange(shape.draft_vocab, device=device) * (shape.vocab // shape.draft_vocab)
    draft = train.Drafter(shape, dtype, device, embed, head, draft_ids, 4200)
    draft.initialise(0)
    return train.Trainer(draft, SimpleNamespace(ema=0, step_weights=[0.8 ** k for k in range(8)], loss="ce", max_grad_norm=1.0, beta1=0.9, beta2=0.95, weight_decay=0.0))


class Clock:
    """Milliseconds between two moments of the GPU's queue (or of the host, without one)."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.moments = []

    def tick(self):
        if self.cuda:
            self.moments.append(torch.cuda.Event(enable_timing=True))
            self.moments[-1].record()
        else:
            self.moments.append(time.perf_counter())

    def steps(self) -> list[float]:
        if self.cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.moments, self.moments[1:])]
        return [1000 * (b - a) for a, b in zip(self.moments, self.moments[1:])]


def timed(trainer, batches, counts, warm_up: int, repeats: int) -> list[float]:
    """Milliseconds of each step, cycling through the batches, after `warm_up` rounds: a shape's first product picks its kernel and takes memory."""
    clock, warm_up = Clock(trainer.draft.master.flat.device), warm_up * len(batches)
    for i in range(warm_up + repeats * len(batches)):
        if i >= warm_up:
            clock.tick()
        trainer.update(iter([batches[i % len(batches)]]), 1, counts[i % len(batches)], 1e-5)
    clock.tick()
    return clock.steps()


def report(name, what, tokens, seconds, flops, peak_tflops, goal, peers, extra="", world=1):
    rate, floor = tokens / seconds, tokens / (flops / peak_tflops / 1e12)
    memory = torch.cuda.max_memory_allocated() / 2 ** 30 if torch.cuda.is_available() else 0
    print(f"{name:9} | {rate:9,.0f} tok/s | floor {floor:9,.0f} | {rate / floor:4.0%} of it | {flops / seconds / 1e12:5.0f} TFLOP/s | MFU {flops / seconds / 989e12 / world:4.0%} "
          f"| peak {memory:5.1f} GiB | goal {goal or '-'} | {what}{' | peers ' + peers if peers else ''}{extra}", flush=True)
    return rate


# ------------------------------------------------------------------ checks

@contextmanager
def plain():
    """04's plain operations instead of its kernels."""
    kept = set(train.FUSED)
    train.FUSED.clear()
    yield
    train.FUSED.update(kept)


def check(device) -> dict[str, float]:
    """Relative error of each fused operation on bfloat16 inputs against its plain form in float32: {operation: error}; and of the whole pass."""
    torch.manual_seed(0)
    shape = train.Shape(512, 8, 4, 128, 384, 3000, 1100, 1e-5, 5e4, 4096)
    lengths, prompts, K = [129, 40, 300, 7], [30, 3, 120, 2], 4
    batch = random_batch(shape, lengths, prompts, K, device, torch.bfloat16)
    R, C, errors = len(batch.mask), len(batch.positions), {}

    def normal(*size):
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    def compare(name, ours, theirs):
        pairs = list(zip(ours, theirs)) if isinstance(ours, (tuple, list)) else [(ours, theirs)]
        error = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
        errors[name] = max(error, errors.get(name, 0.0)) if error == error else math.inf

    def both(name, function, *inputs):
        ours = function(*(x.clone() if torch.is_tensor(x) else x for x in inputs))
        with plain():
            theirs = function(*(x.clone().float() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs))
        compare(name, ours, theirs)

    x, dy, w, residual = normal(R, 512), normal(R, 512), normal(512), normal(R, 512)
    both("rms_norm", lambda x, w: train.rms_norm(x, w, 1e-5), x, w)
    both("rms_norm", lambda x: train.rms_norm(x, None, 1e-5)[0], x)
    scale = train.rms_norm(x, w, 1e-5)[1]
    both("rms_norm", lambda *a: train.rms_norm_backward(*a), dy, x, scale, w, residual)
    both("rms_norm", lambda *a: train.rms_norm_backward(*a), dy, x, scale, w)
    gate_up, d = normal(R, 2 * 384), normal(R, 384)
    both("swiglu", train.swiglu, gate_up)
    both("swiglu", train.swiglu_backward, d, gate_up)
    draft = make_trainer(shape, device, torch.bfloat16).draft
    wide = normal(C, 2 * 512)
    for inverse in (False, True):
        both("rope", lambda x: train.rope_(x[:, :512], batch.positions + 2, draft.rope_table, 128, inverse=inverse), wide)
    logits, target = torch.randn(R, 1100, device=device) * 3, torch.randn(R, 1100, device=device).softmax(-1).bfloat16()
    weight = torch.rand(R, device=device)
    for kind in ("ce", "kl", "lk"):
        both("loss", lambda z, p, wt: train.soft_cross_entropy(z, p, wt, kind), logits, target, weight)
    both("target", lambda *a: train.target_probabilities(*a, 3), normal(R, 512) / 5, normal(1100, 512), weight)
    q, kv, own, d_out = normal(R, 1024), normal(C, 1024), normal(K - 1, R, 1024), normal(R, 1024)
    wide_inputs = [t.float() for t in (q, kv, own, d_out)]
    found = []
    for q_, kv_, own_, d_ in ((q, kv, own, d_out), wide_inputs):
        out, lse, state = train.attention(q_, kv_, own_, batch, shape)
        d_kv, d_own = torch.zeros_like(kv_), torch.zeros_like(own_)
        assert lse.shape == (shape.heads, R), f"flash attention's log-sum-exp has shape {tuple(lse.shape)}, expected {(shape.heads, R)}"
        dq = train.attention_backward(d_, q_, kv_, own_, out, lse, state, d_kv, d_own, batch, shape)
        found.append((out, lse, dq, d_kv, d_own))
    compare("attention", *found)
    master, grads = torch.randn(5000, device=device), torch.randn(5000, device=device).bfloat16()
    states = []
    for forms in (train.FUSED, None):
        tensors = [t.clone() for t in (master, master.bfloat16(), grads, master * 0.1, master.abs() * 0.01)]
        arguments = (*tensors, torch.tensor(0.5, device=device), 1e-2, 3, 0.9, 0.95, 0.1)
        if forms is None:
            with plain():
                train.adamw_(*arguments)
        else:
            train.adamw_(*arguments)
        states.append(tensors)
    compare("adamw", *states)

    single = make_trainer(shape, device, torch.float32).draft
    single.master.flat.copy_(draft.weights.flat.float())
    single.embed, single.target_head = draft.embed.float(), draft.target_head.float()
    results = []
    for drafter in (draft, single):
        gradients = train.Gradients(shape.weights(), drafter.dtype, device)
        gradients.begin(first=True, last=False)
        sums, _ = train.ttt_pass(drafter, batch.to(device, drafter.dtype), [1 / R] * K, gradients)
        gradients.wait()
        train.unfold(gradients, drafter.weights)
        results.append([sums[:, 0], *gradients.views.values()])
    compare("whole pass, losses", results[0][0], results[1][0])
    compare("whole pass, gradients", *(result[1:] for result in results))
    return errors


TOLERANCE = {"whole pass, gradients": 0.08, "whole pass, losses": 5e-3, "attention": 0.02, "adamw": 4e-3}  # bfloat16 holds 8 bits: 2e-3 of a rounding, several of them


def run_checks(device) -> bool:
    if train.triton is None or device.type != "cuda":
        print("checks: no GPU or no triton here, nothing is fused", flush=True)
        return True
    fine = True
    for name, error in check(device).items():
        good = error < TOLERANCE.get(name, 0.01)
        fine &= good
        print(f"check {name:24} relative error {error:.1e} {'' if good else f'ABOVE {TOLERANCE.get(name, 0.01)}: not used below'}", flush=True)
        if not good:
            train.FUSED.discard(name if name != "attention" else "diagonals")
    return fine


# ------------------------------------------------------------------ ceilings, files, profile

def ceilings(device) -> float:
    """TFLOP/s of a large bf16 product on random data; and the rates of the step's own products and of a copy, printed."""
    def rate(function, work, repeats=10):
        for _ in range(3):
            function()
        clock = Clock(device)
        clock.tick()
        for _ in range(repeats):
            function()
        clock.tick()
        return work * repeats / (clock.steps()[0] / 1000)

    def normal(*size):
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    a, b = normal(8192, 8192), normal(8192, 8192)
    peak = rate(lambda: a @ b, 2 * 8192 ** 3) / 1e12
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copied = rate(lambda: source.clone(), 2 * source.numel()) / 1e9
    print(f"ceilings | {peak:.0f} TFLOP/s for 8192 x 8192 x 8192 | copy {copied / 1000:.2f} TB/s, read + written", flush=True)
    for name, (out, inp) in {"gate_up": (36864, 7168), "down": (7168, 18432), "q": (8192, 7168), "kv": (16384, 7168), "o": (7168, 8192), "fc": (7168, 21504),
                             "head": (32000, 7168)}.items():
        x, w, dy = normal(8192, inp), normal(out, inp), normal(8192, out)
        flops = 2 * 8192 * out * inp
        grad = torch.zeros_like(w)
        rates = {"y": rate(lambda: x @ w.t(), flops), "dx": rate(lambda: dy @ w, flops), "dw": rate(lambda: grad.addmm_(dy.t(), x), flops)}
        if name == "head":
            rates["y in float32"] = rate(lambda: torch.mm(x, w.t(), out_dtype=torch.float32), flops)
        print(f"  {name:8} {out} x {inp}: " + " | ".join(f"{key} {value / 1e12:.0f}" for key, value in rates.items()) + " TFLOP/s", flush=True)
    return peak


def write_samples(folder: Path, shape, lengths, dtype) -> list:
    """Files of the layout that 03_extract leaves; they are in the page cache afterwards."""
    samples = []
    for i, n in enumerate(lengths):
        path = folder / f"{i}.safetensors"
        aux, last = (torch.randn(n, width * shape.hidden, dtype=torch.float32, device="cuda" if torch.cuda.is_available() else "cpu").to(dtype).cpu() for width in (3, 1))
        save_file({"input_ids": torch.randint(shape.vocab, (n,), dtype=torch.int32), "loss_mask": (torch.arange(n) >= n // 3).to(torch.uint8),
                   "aux_hidden_states": aux, "last_hidden_states": last}, path)
        samples.append(train.Sample(str(i), path, n, [[n // 3, n]], np.ones(n - n // 3, np.float32)))
    return samples


def from_files(trainer, folder, lengths, bins, steps, device, dtype, workers, epochs=4):
    """(tokens, seconds, share of it spent waiting for files) of steps whose batches come through `collate` and `feed`."""
    shape = trainer.draft.shape
    samples = write_samples(folder, shape, lengths, dtype)
    todo = [[samples[i] for i in indices] for _ in range(epochs) for indices in bins]

    def load(members):
        return train.collate(members, steps, shape.hidden, pin=device.type == "cuda")

    waited, tokens, begun, copies = 0.0, 0, None, []
    for i, (members, batch, seconds) in enumerate(train.feed(todo, load, workers, device, dtype)):
        if i == len(bins):  # the first pass warms up: pinned buffers, allocator
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun, waited, tokens = time.perf_counter(), 0.0, 0
        counts = np.sum([sample.counts(steps) for sample in members], 0)
        sums = trainer.update(iter([batch]), 1, counts, 1e-5)
        copies.append(train.HostCopy(sums))
        if len(copies) > 1:
            copies.pop(0).read()  # as main() does: the host runs at most one step ahead
        waited, tokens = waited + seconds, tokens + batch.tokens
    copies[-1].read()
    return tokens, time.perf_counter() - begun, waited / (time.perf_counter() - begun)


def profile(trainer, batch, counts):
    from torch.profiler import ProfilerActivity
    timed(trainer, [batch], [counts], 2, 1)
    steps = 3
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        begun = time.perf_counter()
        timed(trainer, [batch], [counts], 0, steps)
        wall = (time.perf_counter() - begun) * 1000 / steps
    kernels = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total, calls = kernels.get(event.name, (0.0, 0))
            kernels[event.name] = (total + event.time_range.elapsed_us() / 1000 / steps, calls + 1)
    groups = {"flash attention": ("flash",), "products": ("nvjet", "gemm", "cutlass", "xmma", "sm90_"), "fused kernels": tuple(name for name in dir(train) if name.endswith("_kernel")),
              "copies": ("Memcpy", "Memset", "copy", "cat", "CatArray", "pad"), "all-reduce": ("nccl",)}
    sums = dict.fromkeys([*groups, "other"], 0.0)
    for name, (ms, _) in kernels.items():
        sums[next((group for group, words in groups.items() if any(word in name for word in words)), "other")] += ms
    print(f"profile | {wall:.1f} ms a step under the profiler | kernels {sum(sums.values()):.1f} ms: " + " | ".join(f"{name} {ms:.1f}" for name, ms in sums.items()), flush=True)
    for name, (ms, calls) in sorted(kernels.items(), key=lambda item: -item[1][0])[:40]:
        print(f"  {ms:8.3f} ms {calls / steps:5.1f} x {name[:150]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--size", choices=("kimi", "toy"), default="kimi", help="toy: seconds on a CPU, to try the script itself")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peak", type=float, help="TFLOP/s of the floor (default: measured)")
    parser.add_argument("--files", type=Path, help="folder for the samples of `files` (default: a temporary one)")
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()

    rank, world, local = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if rank:
            sys.stdout = open(os.devnull, "w")
    print(f"torch {torch.__version__} | {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'} x {world}", flush=True)
    good = run_checks(device)
    if args.check_only:
        sys.exit(0 if good else 1)
    peak = args.peak or (ceilings(device) if device.type == "cuda" else 0.1)

    longest = min(4096, args.batch_tokens // 2)
    lengths = mix_lengths(56 if args.size == "kimi" else 24, longest // 2)
    bins = train.pack(lengths, list(range(len(lengths))), args.batch_tokens)
    trainers = {}

    def prepared(name):
        """(trainer, batches, loss rows, FLOPs) of a case; the drafter is kept while the KV heads stay the same."""
        _, kv_heads, steps, _, _ = CASES[name]
        if kv_heads not in trainers:
            trainers.clear()
            shape = train.Shape(kv_heads=min(kv_heads, (KIMI if args.size == "kimi" else TOY)["heads"]), **(KIMI if args.size == "kimi" else TOY))
            trainers[kv_heads] = make_trainer(shape, device, dtype)
        shape = trainers[kv_heads].draft.shape
        if name.startswith("mix"):
            batches = [random_batch(shape, [lengths[i] for i in indices], [lengths[i] // 3 for i in indices], steps, device, dtype) for indices in bins]
        else:
            batches = [random_batch(shape, [longest] * 2, [0] * 2, steps, device, dtype)]
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return trainers[kv_heads], batches, [loss_rows(batch, steps) for batch in batches], [batch.flops(shape, steps) for batch in batches]

    rates = {}
    for name in args.cases:
        what, kv_heads, steps, goal, peers = CASES[name]
        trainer = batches = None  # free the last one's memory before the next is made
        if name == "files":
            trainer = prepared("mix")[0]
            with tempfile.TemporaryDirectory(dir=args.files) as folder:
                tokens, seconds, waited = from_files(trainer, Path(folder), lengths, bins, steps, device, dtype, args.num_workers)
            shape = trainer.draft.shape
            flops = sum(random_batch(shape, [lengths[i] for i in indices], [lengths[i] // 3 for i in indices], steps, "cpu", torch.bfloat16).flops(shape, steps) for indices in bins)
            against = f" | {tokens / seconds / rates['mix'] - 1:+.1%} against mix" if "mix" in rates else ""
            rates[name] = report(name, what, tokens, seconds, flops * tokens / sum(lengths), peak, goal, peers,
                                 f" | waited for files {waited:.1%} | {8 * shape.hidden * tokens / seconds / 1e9:.2f} GB/s of states{against}")
            continue
        trainer, batches, counts, flops = prepared(name)
        repeats = args.repeats if len(batches) == 1 else max(1, args.repeats // 5)
        if world > 1:  # alone, side by side; then together
            together, train.dist.is_initialized = train.dist.is_initialized, lambda: False
            alone = timed(trainer, batches, counts, 2, repeats)
            train.dist.is_initialized = together
            dist.barrier()
        times = timed(trainer, batches, counts, 2 if len(batches) > 1 else 4, repeats)
        if len(batches) == 1:
            seconds, tokens, work = statistics.median(times) / 1000, batches[0].tokens, flops[0]
        else:
            seconds, tokens, work = sum(times) / 1000, repeats * sum(batch.tokens for batch in batches), repeats * sum(flops)
        spread = f" | {min(times):.1f} to {max(times):.1f} ms" if len(batches) == 1 else f" | {len(batches)} batches, {sum(b.tokens for b in batches) / len(batches):,.0f} tokens each"
        rates[name] = report(name, what, world * tokens, seconds, world * work, world * peak, goal, peers, spread, world)
        if world > 1:
            one = statistics.median(alone) / 1000 if len(batches) == 1 else sum(alone) / 1000
            print(f"          {world} GPUs {world * one / seconds:.3f} times one ({one * 1000:.1f} ms alone, {seconds * 1000:.1f} ms together)", flush=True)
        if args.profile:
            profile(trainer, batches[0], counts[0])
    if world > 1:
        dist.destroy_process_group()
    print(json.dumps({"tok_s": {name: round(rate) for name, rate in rates.items()}}), flush=True)


if __name__ == "__main__":
    main()
