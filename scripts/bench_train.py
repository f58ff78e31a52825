"""Speed and memory of 04_train's own training step, at the size of Kimi-K2.5's drafter, on the GPU at hand.

    python3 scripts/bench_train.py                  # check, ceilings, table: some minutes on an H200, 4.7 GB of files
    python3 scripts/bench_train.py --profile        # besides: where the time of a step goes, kernel by kernel
    python3 scripts/bench_train.py --check-only     # only: the fused pass in bfloat16 against the plain in float32
    python3 scripts/bench_train.py --architecture mla     # check, and the drafter with latent attention alone
    torchrun --nproc_per_node 2 scripts/bench_train.py --cases t4096     # the same work on one and on two GPUs

It times Trainer.update (forward, backward, clipping, optimizer) on packed batches of random states that already lie
on the GPU; `files` reads samples through 04's loader instead, out of the page cache, and `files-fp8` FP8 ones. Random
numbers, since zeros run faster than data. All positions carry loss in t4096; in `mix` lengths are log-normal with mean
1,730, cut at 2,048, and the first third of each sample is prompt.

floor: the arithmetic of Shape.flops at --peak (the rate of a large bf16 product, measured first). tok/s counts all
tokens of the samples, prompts included.
"""
import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "patches")]
import eagle3_capture_files as capture_files  # noqa: E402
from eagle3 import fused, optimizers, ttt  # noqa: E402
from eagle3.batches import Sample, batch_of, pack  # noqa: E402
from eagle3.drafter import Drafter, Shape  # noqa: E402
from eagle3.loader import Reader, feed  # noqa: E402
from eagle3.mla import Latent  # noqa: E402
from eagle3.states import token_bytes  # noqa: E402
from eagle3.trainer import HostCopy, Trainer  # noqa: E402

SIZES = {
    "kimi": dict(hidden=7168, heads=64, head_dim=128, intermediate=18432, vocab=163840, draft_vocab=32000,
                 rms_norm_eps=1e-5, rope_theta=5e4, max_positions=262144),
    "toy": dict(hidden=128, heads=8, head_dim=16, intermediate=192, vocab=1000, draft_vocab=320, rms_norm_eps=1e-5,
                rope_theta=5e4, max_positions=4096)}
LATENTS = {"kimi": Latent(1536, 512, 128, 64, 128), "toy": Latent(48, 32, 16, 8, 16)}


@dataclass
class Case:
    what: str
    kv_heads: int
    steps: int  # TTT
    goal: int = 0  # tok/s
    peers: str = ""  # tok/s, measured on an H200 with their own code
    optimizer: str = "adamw"
    kind: tuple = ()  # of drafter: items of Shape
    architecture: str = "llama"
    length: int = 0  # of the one sample of a batch (0: two of the longest)
    states: str = "bf16"  # of files


CASES = {
    "t4096": Case("2 samples of 4096, all loss, TTT 3, 64 KV heads", 64, 3, 30000,
                  "TorchSpec 18.9k, speculators 21.5k (head frozen), SpecForge 17.3k"),
    "ttt7": Case("2 samples of 4096, all loss, TTT 7, 64 KV heads", 64, 7, 14000, "7.2k (T 2048)"),
    "mix": Case("real mix, TTT 3, 64 KV heads", 64, 3, 40000, "under 13.9k unpacked, about 21k packed"),
    "files": Case("the mix from files through the loader", 64, 3),
    "t8k": Case("1 sample of 8,192, all loss, TTT 3, 64 KV heads", 64, 3, length=8192),
    "t16k": Case("1 sample of 16,384", 64, 3, length=16384),
    "t32k": Case("1 sample of 32,768", 64, 3, length=32768),
    "t32k-ttt7": Case("1 sample of 32,768, TTT 7", 64, 7, length=32768),
    "t32k-8": Case("1 sample of 32,768, 8 KV heads", 8, 3, length=32768),
    "files-fp8": Case("files of FP8 states (03 --states fp8)", 64, 3, states="fp8"),
    "t4096-8": Case("t4096 with 8 KV heads", 8, 3),
    "mix-8": Case("mix with 8 KV heads", 8, 3),
    "muon": Case("t4096-8 with Muon", 8, 3, optimizer="muon"),
    "norms": Case("t4096-8, EAGLE-3.1's norms", 8, 3, kind=(("aux_norm", "each"), ("norm_output", True))),
    "layers": Case("t4096-8, two layers", 8, 3, kind=(("layers", 2),)),
    "aux5": Case("t4096-8, five aux states", 8, 3, kind=(("aux_states", 5),)),
    "mla": Case("t4096, MLA", 64, 3, 20000, architecture="mla"),
    "mla-mix": Case("mix, MLA", 64, 3, architecture="mla"),
    "mla-norms": Case("t4096, MLA, EAGLE-3.1's norms", 64, 3, architecture="mla",
                      kind=(("aux_norm", "each"), ("norm_output", True))),
    "mla-muon": Case("t4096, MLA, Muon", 64, 3, optimizer="muon", architecture="mla"),
}


def random_batch(shape, lengths, prompts, steps, device, dtype):
    """What `collate` makes of samples of these lengths, with random states."""
    sizes = [Sample("", Path(), n, p, None).rows(steps) for n, p in zip(lengths, prompts)]
    C, R = (sum(size[i] for size in sizes) for i in (1, 2))
    mask = np.concatenate([np.arange(first, context) + 2 >= p for (first, context, _), p in zip(sizes, prompts)])
    columns = {"next_ids": torch.randint(shape.vocab, (C,)), "labels": torch.randint(shape.vocab, (R,)), "mask": mask,
               "mass": np.ones(R, np.float32), "length": np.repeat(lengths, [context for _, context, _ in sizes])}
    aux = torch.randn(C, shape.aux_states * shape.hidden, device=device, dtype=dtype)
    last = torch.randn(R, shape.hidden, device=device, dtype=dtype)
    return batch_of(sizes, aux, last, columns, sum(lengths)).to(device, dtype)


def mix_lengths(count: int, longest: int) -> list[int]:
    """Log-normal, mean 1,730 before the cut, sigma 0.6, cut at 2,048, then scaled to `longest`.

    The 56 of the table have 1,477 on average.
    """
    lengths = np.random.default_rng(0).lognormal(math.log(1730) - 0.6 ** 2 / 2, 0.6, count)
    return [max(8, int(n)) for n in np.minimum(lengths, 2048) * longest / 2048]


def loss_rows(batch, steps) -> list[int]:
    padded = torch.nn.functional.pad(batch.mask, (0, steps))
    return [int((padded[k:k + len(batch.mask)] & (batch.rows_left > k)).sum()) for k in range(steps)]


def make_drafter(shape, device, dtype):
    scale = shape.hidden ** -0.5
    embed, head = (torch.randn(rows, shape.hidden, device=device, dtype=dtype) * scale
                   for rows in (shape.vocab, shape.draft_vocab))
    draft_ids = torch.arange(shape.draft_vocab, device=device) * (shape.vocab // shape.draft_vocab)
    draft = Drafter(shape, dtype, device, embed, head, draft_ids, 33000)
    draft.initialise(0)
    return draft


def make_trainer(shape, device, dtype, optimizer):
    return Trainer(make_drafter(shape, device, dtype), SimpleNamespace(
        optimizer=optimizer, ema=0, step_weights=[0.8 ** k for k in range(8)], loss="ce", max_grad_norm=1.0, beta1=0.9,
        beta2=0.95, weight_decay=0.0))


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
    """Milliseconds of each step after `warm_up` rounds: a shape's first product picks its kernel and takes memory."""
    clock, warm_up = Clock(trainer.draft.master.flat.device), warm_up * len(batches)
    for i in range(warm_up + repeats * len(batches)):
        if i >= warm_up:
            clock.tick()
        trainer.update(iter([batches[i % len(batches)]]), 1, counts[i % len(batches)], 1e-5)
    clock.tick()
    return clock.steps()


BALLAST = 0.0  # GiB taken so that this GPU is as small as --gpu-memory


def report(name: str, tokens: int, seconds: float, flops: float, peak_tflops: float, extra="", world=1) -> float:
    case = CASES[name]
    rate, floor = tokens / seconds, tokens / (flops / peak_tflops / 1e12)
    memory = torch.cuda.max_memory_allocated() / 2 ** 30 - BALLAST if torch.cuda.is_available() else 0
    peers = f" | peers {case.peers}" if case.peers else ""
    print(f"{name:9} | {rate:9,.0f} tok/s | floor {floor:9,.0f} | {rate / floor:4.0%} of it | "
          f"{flops / seconds / 1e12:5.0f} TFLOP/s | MFU {flops / seconds / 989e12 / world:4.0%} | "
          f"peak {memory:5.1f} GiB | goal {case.goal or '-'} | {case.what}{peers}{extra}", flush=True)
    return rate


CHECKED = {"llama": Shape(512, 8, 4, 128, 384, 3000, 1100, 1e-5, 5e4, 4096),
           "mla": Shape(512, 4, 4, 192, 384, 3000, 1100, 1e-5, 5e4, 4096, latent=Latent(192, 96, 128, 64, 128))}


def check(architecture: str, device) -> bool:
    """Whether the fused pass in bfloat16 agrees with the plain one in float32; its relative errors, printed."""
    torch.manual_seed(0)
    shape = CHECKED[architecture]
    draft, single = (make_drafter(shape, device, dtype) for dtype in (torch.bfloat16, torch.float32))
    if not fused.runs(draft):
        print("check: no GPU or no triton here, nothing is fused", flush=True)
        return True
    single.master.flat.copy_(draft.weights.flat.float())
    single.embed, single.target_head = draft.embed.float(), draft.target_head.float()
    batch, results = random_batch(shape, [129, 40, 300, 7], [30, 3, 120, 2], 4, device, torch.bfloat16), []
    for drafter, engine in ((draft, fused), (single, ttt)):
        grads = optimizers.Gradients(shape.weights(), drafter.dtype, device)
        grads.begin(first=True, last=False)
        sums, _ = engine.ttt_pass(drafter, batch.to(device, drafter.dtype), [1 / len(batch.mask)] * 4, grads)
        grads.wait()
        engine.finish(grads, drafter)
        results.append((sums[:, 0].float(), {name: view.float() for name, view in grads.views.items()}))
    (losses, gradients), (plain_losses, plain) = results
    each = {name: float((gradients[name] - plain[name]).norm() / plain[name].norm()) for name in plain}
    worst = max(each, key=each.get)
    errors = {"losses": float((losses - plain_losses).norm() / plain_losses.norm()), "gradients": each[worst]}
    for name, error in errors.items():
        said = f" ({worst})" if name == "gradients" else ""
        print(f"check fused pass of {architecture}, {name}: relative error {error:.1e}{said}, at most "
              f"{TOLERANCE[name]}", flush=True)
    return all(error < TOLERANCE[name] for name, error in errors.items())


TOLERANCE = {"gradients": 0.08, "losses": 5e-3}  # bfloat16 holds 8 bits: 2e-3 of a rounding, several of them


# ---- ceilings, files, profile ----
PRODUCTS = {"gate_up": (36864, 7168), "down": (7168, 18432), "q": (8192, 7168), "kv": (16384, 7168), "o": (7168, 8192),
            "fc": (7168, 21504), "head": (32000, 7168)}  # (out, in) of the step's matrices


def rate_of(function, work: float, repeats=10) -> float:
    """`work` a second of a call on the GPU."""
    for _ in range(3):
        function()
    clock = Clock(torch.device("cuda"))
    clock.tick()
    for _ in range(repeats):
        function()
    clock.tick()
    return work * repeats / (clock.steps()[0] / 1000)


def ceilings(device) -> float:
    """TFLOP/s of a large bf16 product on random data.

    Printed besides: the rates of the step's own products and of a copy.
    """
    def normal(*size):
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    a, b, source = normal(8192, 8192), normal(8192, 8192), torch.empty(1 << 30, dtype=torch.uint8, device=device)
    peak = rate_of(lambda: a @ b, 2 * 8192 ** 3) / 1e12
    copied = rate_of(source.clone, 2 * source.numel()) / 1e9
    print(f"ceilings | {peak:.0f} TFLOP/s for 8192 x 8192 x 8192 | copy {copied / 1000:.2f} TB/s, read + written",
          flush=True)
    for name, (out, inp) in PRODUCTS.items():
        x, w, dy = normal(8192, inp), normal(out, inp), normal(8192, out)
        flops, grad = 2 * 8192 * out * inp, torch.zeros_like(w)
        rates = {"y": rate_of(lambda: x @ w.t(), flops), "dx": rate_of(lambda: dy @ w, flops),
                 "dw": rate_of(lambda: grad.addmm_(dy.t(), x), flops)}
        if name == "head":
            rates["y in float32"] = rate_of(lambda: torch.mm(x, w.t(), out_dtype=torch.float32), flops)
        listed = " | ".join(f"{key} {value / 1e12:.0f}" for key, value in rates.items())
        print(f"  {name:8} {out} x {inp}: {listed} TFLOP/s", flush=True)
    return peak


def write_samples(folder: Path, shape, lengths, dtype, states: str) -> list:
    """Files of the layout that 03_extract leaves; they are in the page cache afterwards."""
    samples, device = [], "cuda" if torch.cuda.is_available() else "cpu"
    for i, n in enumerate(lengths):
        path, start = folder / f"{i}.safetensors", n // 3
        tensors = {name: torch.randn(n, width * shape.hidden, device=device).to(dtype)
                   for name, width in (("aux_hidden_states", 3), ("last_hidden_states", 1))}
        for name in capture_files.IN_FP8[states]:
            tensors[name], tensors[capture_files.SCALES[name]] = capture_files.quantised(tensors[name], shape.hidden)
        tensors["input_ids"] = torch.randint(shape.vocab, (n,), dtype=torch.int32)
        tensors["loss_mask"] = (torch.arange(n) >= start).to(torch.uint8)
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        save_file(tensors, path, {"checksum": "", "dtype": str(dtype).removeprefix("torch.")})
        samples.append(Sample(str(i), path, n, start, np.ones(n - start, np.float32)))
    return samples


def from_files(trainer, folder: Path, lengths, bins, args, case: Case, epochs=4):
    """(tokens, seconds, share of it spent waiting for files) of steps whose batches come through the loader."""
    shape, steps = trainer.draft.shape, case.steps
    device, dtype = trainer.draft.master.flat.device, trainer.draft.dtype
    samples = write_samples(folder, shape, lengths, dtype, case.states)
    todo = [[samples[i] for i in indices] for _ in range(epochs) for indices in bins]
    load = Reader(steps, shape, device.type == "cuda", len(samples)).load
    waited, tokens, begun, copies = 0.0, 0, None, []
    for i, (members, loaded, seconds) in enumerate(feed(todo, load, args.num_workers, device, dtype)):
        if i == len(bins):  # the first pass warms up: pinned buffers, allocator
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun, waited, tokens = time.perf_counter(), 0.0, 0
        counts = np.sum([sample.counts(steps) for sample in members], 0)
        copies.append(HostCopy(trainer.update(iter([loaded.batch]), 1, counts, 1e-5)))
        if len(copies) > 1:
            copies.pop(0).read()  # as 04 does: the host runs at most one step ahead
        waited, tokens = waited + seconds, tokens + loaded.batch.tokens
    copies[-1].read()
    return tokens, time.perf_counter() - begun, waited / (time.perf_counter() - begun)


def profile(trainer, batch, counts) -> None:
    from torch.profiler import ProfilerActivity
    timed(trainer, [batch], [counts], 2, 1)
    steps = 3
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        begun = time.perf_counter()
        timed(trainer, [batch], [counts], 0, steps)
        wall = (time.perf_counter() - begun) * 1000 / steps
    found = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total, calls = found.get(event.name, (0.0, 0))
            found[event.name] = (total + event.time_range.elapsed_us() / 1000 / steps, calls + 1)
    groups = {"flash attention": ("flash",), "products": ("nvjet", "gemm", "cutlass", "xmma", "sm90_"),
              "fused kernels": ("_kernel",), "copies": ("Memcpy", "Memset", "copy", "cat", "CatArray", "pad"),
              "all-reduce": ("nccl",)}
    sums = dict.fromkeys([*groups, "other"], 0.0)
    for name, (ms, _) in found.items():
        sums[next((group for group, words in groups.items() if any(word in name for word in words)), "other")] += ms
    print(f"profile | {wall:.1f} ms a step under the profiler | kernels {sum(sums.values()):.1f} ms: "
          + " | ".join(f"{name} {ms:.1f}" for name, ms in sums.items()), flush=True)
    for name, (ms, calls) in sorted(found.items(), key=lambda item: -item[1][0])[:40]:
        print(f"  {ms:8.3f} ms {calls / steps:5.1f} x {name[:100]}", flush=True)


# ---- main ----
class Bench:
    """The cases on this process's device; the trainer is kept while the drafter and the optimizer stay the same."""

    def __init__(self, args, device, dtype, world: int):
        self.args, self.device, self.dtype, self.world, self.trainers, self.rates = args, device, dtype, world, {}, {}
        self.peak = args.peak or (ceilings(device) if device.type == "cuda" else 0.1)
        self.longest = min(4096, args.batch_tokens // 2)
        self.lengths = mix_lengths(56 if args.size == "kimi" else 24, self.longest // 2)
        self.bins = pack(self.lengths, list(range(len(self.lengths))), args.batch_tokens)

    def trainer(self, case: Case):
        key = case.kv_heads, case.optimizer, case.kind, case.architecture
        if key not in self.trainers:
            self.trainers.clear()
            size = dict(SIZES[self.args.size])
            if case.architecture == "mla":
                latent = LATENTS[self.args.size]
                size |= {"latent": latent, "head_dim": latent.head_dim}
            shape = Shape(kv_heads=min(case.kv_heads, size["heads"]), **size, **dict(case.kind))
            self.trainers[key] = make_trainer(shape, self.device, self.dtype, case.optimizer)
        return self.trainers[key]

    def mix(self, shape, case: Case, device) -> list:
        return [random_batch(shape, [self.lengths[i] for i in indices], [self.lengths[i] // 3 for i in indices],
                             case.steps, device, self.dtype) for indices in self.bins]

    def files(self, name: str) -> None:
        case = CASES[name]
        trainer = self.trainer(case)
        with tempfile.TemporaryDirectory(dir=self.args.files) as folder:
            tokens, seconds, waited = from_files(trainer, Path(folder), self.lengths, self.bins, self.args, case)
        shape = trainer.draft.shape
        flops = sum(batch.flops(shape, case.steps) for batch in self.mix(shape, case, "cpu"))
        rate, width = tokens / seconds, token_bytes(shape.hidden, "bfloat16", 3, case.states)
        against = f" | {rate / self.rates['mix'] - 1:+.1%} against mix" if "mix" in self.rates else ""
        extra = f" | waited for files {waited:.1%} | {width * rate / 1e9:.2f} GB/s of states{against}"
        self.rates[name] = report(name, tokens, seconds, flops * tokens / sum(self.lengths), self.peak, extra)

    def steps(self, name: str) -> None:
        case, args, world = CASES[name], self.args, self.world
        trainer = self.trainer(case)
        shape = trainer.draft.shape
        lengths = [min(case.length, 8 * self.longest)] if case.length else [self.longest] * 2
        batches = self.mix(shape, case, self.device) if name.endswith(("mix", "mix-8")) else [
            random_batch(shape, lengths, [0] * len(lengths), case.steps, self.device, self.dtype)]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        counts = [loss_rows(batch, case.steps) for batch in batches]
        flops = [batch.flops(shape, case.steps) for batch in batches]
        single = len(batches) == 1
        repeats = args.repeats if single else max(1, args.repeats // 5)
        alone = alone_times(trainer, batches, counts, repeats) if world > 1 else None
        times = timed(trainer, batches, counts, 4 if single else 2, repeats)
        share = statistics.median(times) if single else sum(times) / repeats  # ms of one round
        tokens, work = sum(batch.tokens for batch in batches), sum(flops)
        spread = f" | {min(times):.1f} to {max(times):.1f} ms" if single else \
            f" | {len(batches)} batches, {tokens / len(batches):,.0f} tokens each"
        self.rates[name] = report(name, world * tokens, share / 1000, world * work, world * self.peak, spread, world)
        if world > 1:
            one = statistics.median(alone) if single else sum(alone) / repeats
            print(f"          {world} GPUs {world * one / share:.3f} times one ({one:.1f} ms alone, {share:.1f} ms "
                  "together)", flush=True)
        if args.profile:
            profile(trainer, batches[0], counts[0])


def alone_times(trainer, batches, counts, repeats: int) -> list[float]:
    """The same steps without all-reduce: this rank alone, beside the others."""
    together, dist.is_initialized = dist.is_initialized, lambda: False
    times = timed(trainer, batches, counts, 2, repeats)
    dist.is_initialized = together
    dist.barrier()
    return times


def parse() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: all of --architecture")
    parser.add_argument("--architecture", choices=CHECKED, default="llama")
    parser.add_argument("--size", choices=SIZES, default="kimi", help="toy: seconds on a CPU, to try the script itself")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="as on a smaller GPU: the rest is taken first")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peak", type=float, help="TFLOP/s of the floor (default: measured)")
    parser.add_argument("--files", type=Path, help="folder for the samples of `files` (default: a temporary one)")
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    args.cases = args.cases or [name for name, case in CASES.items() if case.architecture == args.architecture]
    return args


def main() -> None:
    args = parse()
    rank, world, local = (int(os.environ.get(name, default))
                          for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if rank:
            sys.stdout = open(os.devnull, "w")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"torch {torch.__version__} | {gpu} x {world}", flush=True)
    good = check(args.architecture, device)
    if args.check_only:
        sys.exit(0 if good else 1)
    if args.gpu_memory and device.type == "cuda":
        global BALLAST
        BALLAST = max(0.0, torch.cuda.mem_get_info()[0] / 2 ** 30 - args.gpu_memory)
        taken = torch.empty(int(BALLAST * 2 ** 30), dtype=torch.uint8, device=device)  # noqa: F841
    bench = Bench(args, device, dtype, world)
    for name in args.cases:
        bench.files(name) if name.startswith("files") else bench.steps(name)
    if world > 1:
        dist.destroy_process_group()
    print(json.dumps({"tok_s": {name: round(rate) for name, rate in bench.rates.items()}}), flush=True)


if __name__ == "__main__":
    main()
