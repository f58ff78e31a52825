"""How fast 03_extract.py is beside the plain prefill of the same samples, and what it costs: one table.

    python3 scripts/bench_extract.py --size kimi --layers 24 --samples 256 --output-dir /tmp/bench   # one GPU
    python3 scripts/bench_extract.py --size kimi --layers 24 --states bf16 fp8 --output-dir /tmp/bench
    python3 scripts/bench_extract.py --size toy --samples 64 --output-dir /tmp/bench                 # a CPU, to try it

Target  random weights (made by SGLang, nothing on disk): Kimi-K2.5's width, attention and dense MLP, --layers of them
Samples lengths log-normal, cut at --cut, mean --mean after the cut, a third of each the prompt; random ids
Runs    the disk alone, before and after; plain server: every sample, --concurrency at a time; capture server:
        03_extract.py on the same samples, then on the first of them one request at a time. The server's SGLang must be
        patched (patches/sglang_patch.py apply). An --output-dir in /dev/shm leaves the disk out.
Writes  <output-dir>/bench_extract.json and the table on stdout; the hidden states are removed again
"""
import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import pynvml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from eagle3.extraction import Server  # noqa: E402
from eagle3.incoming import PREFILL  # noqa: E402
from eagle3.servers import start_server, stop_server  # noqa: E402
from eagle3.stage import UserError, log, run, write_atomic  # noqa: E402
from eagle3.states import KINDS  # noqa: E402

SIZES = {  # the target's config, and the server as a role of a run file
    "kimi": {"config": {"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64,
                        "num_key_value_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
                        "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 163840, "torch_dtype": "bfloat16",
                        "dtype": "bfloat16", "rms_norm_eps": 1e-5},
             "server": {"flags": {"attention-backend": "triton", "sampling-backend": "pytorch",
                                  "grammar-backend": "none", "moe-runner-backend": "triton",
                                  "mem-fraction-static": 0.6, "disable-cuda-graph": True,
                                  "disable-prefill-cuda-graph": True, "skip-server-warmup": True,
                                  # No chunks: one request that goes on from an earlier chunk sends its whole batch
                                  # through the slower kernel for prefixes
                                  "chunked-prefill-size": -1, "max-prefill-tokens": 16384}}},
    "toy": {"config": {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
                       "kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
                       "v_head_dim": 32, "vocab_size": 2048, "torch_dtype": "float32", "dtype": "float32",
                       "rms_norm_eps": 1e-5},
            "server": {"command": ["{python}", str(ROOT / "scripts/cpu_engine/serve.py")],
                       "flags": {"max-total-tokens": 32768, "chunked-prefill-size": 4096}}}}
COMMON = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
          "hidden_act": "silu", "moe_intermediate_size": 2048, "n_routed_experts": 8, "num_experts_per_tok": 2,
          "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
          "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "max_position_embeddings": 8192,
          "rope_theta": 50000.0, "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "bos_token_id": 0,
          "eos_token_id": 1, "initializer_range": 0.02, "use_cache": True, "rope_interleave": True, "ep_size": 1,
          "rope_scaling": {"type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "mscale": 1.0,
                           "mscale_all_dim": 1.0, "original_max_position_embeddings": 1024}}


def lengths(count: int, mean: float, cut: int, seed: int) -> list[int]:
    """`count` log-normal lengths (sigma 0.8) from 16 to `cut` with this mean: mu is found by bisection."""
    chance = random.Random(seed)
    normal = [chance.gauss(0, 0.8) for _ in range(count)]

    def cast(mu: float) -> list[int]:
        return [min(cut, max(16, round(math.exp(mu + value)))) for value in normal]

    low, high = math.log(16), math.log(4 * cut)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cast(middle)) < mean * count else (low, middle)
    return cast(low)


def write_inputs(folder: Path, args, size: dict) -> tuple[Path, Path, list[list[int]]]:
    """The target's config (no weights) and a responses/ folder."""
    target, responses = folder / "target", folder / "responses"
    for path in (target, responses):
        path.mkdir(parents=True)
    width = size["config"]["qk_rope_head_dim"] + size["config"]["qk_nope_head_dim"]
    (target / "config.json").write_text(json.dumps({
        **COMMON, **size["config"], "num_hidden_layers": args.layers, "qk_head_dim": width,
        "head_dim": size["config"]["qk_rope_head_dim"], "first_k_dense_replace": args.layers}))
    # scripts/cpu_engine wants a file
    header = json.dumps({"unused": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (target / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    chance = random.Random(args.seed)
    samples = [[chance.randrange(10, size["config"]["vocab_size"] - 1) for _ in range(length)]
               for length in lengths(args.samples, args.mean, args.cut, args.seed)]
    with open(responses / "part-00000.jsonl", "w") as file:
        for number, ids in enumerate(samples):
            third = len(ids) // 3
            row = {"id": f"s{number:05d}", "prompt_ids": ids[:third], "response_ids": ids[third:]}
            file.write(json.dumps(row) + "\n")
    manifest = {"schema": 1, "stage": "01_generate", "counts": {"kept": args.samples, "dropped": {}}}
    (responses / "manifest.json").write_text(json.dumps(manifest))
    return target, responses, samples


def used_memory(folder: Path) -> float:
    """Bytes of this machine's memory in use that are no page cache.

    Shared and pinned memory counts, a folder in memory (tmpfs) does not.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    rows = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    used = rows["MemTotal"] - rows["MemFree"] - rows["Buffers"] - rows["Cached"] - rows["SReclaimable"] + rows["Shmem"]
    if str(folder).startswith("/dev/shm/"):
        place = os.statvfs(folder)
        used -= (place.f_blocks - place.f_bfree) * place.f_frsize
    return used


@functools.cache
def first_gpu():
    """Its NVML handle; None without one.

    The first call (as each start of nvidia-smi) can hold the GPU up for seconds: not while one measures.
    """
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError:
        return None


def gpu_memory() -> float:
    """Bytes in use on the first GPU; 0 without one."""
    return pynvml.nvmlDeviceGetMemoryInfo(first_gpu()).used if first_gpu() else 0.0


class Watch(threading.Thread):
    """Peak memory of the machine, of the GPU, and the resident size of one process, while it is open."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder = folder
        self.host = self.gpu = self.resident = 0.0
        self.pid, self.open = None, True
        self.start()

    def run(self) -> None:
        beat = 0
        while self.open:
            self.host = max(self.host, used_memory(self.folder))
            if beat % 10 == 0:
                self.gpu = max(self.gpu, gpu_memory())
            try:
                status = Path(f"/proc/{self.pid}/status").read_text()
                self.resident = max(self.resident, int(status.split("VmHWM:")[1].split()[0]) * 1024.0)
            except (OSError, IndexError):
                pass
            beat += 1
            time.sleep(0.1)

    def close(self) -> "Watch":
        self.open = False
        self.join()
        return self


# ---- what is measured ----
@contextlib.contextmanager
def server(size: dict, target: Path, log_path: Path, args, env: dict[str, str]) -> Iterator[str]:
    """A running SGLang's URL."""
    flags = {"model-path": str(target), "port": args.port, **size["server"]["flags"], "load-format": "dummy",
             "skip-tokenizer-init": True, "disable-radix-cache": True, "max-running-requests": args.concurrency}
    process, url = start_server({"bench": {**size["server"], "flags": flags, "env": env}}, "bench", log_path, 3600)
    try:
        yield url
    finally:
        stop_server(process)


def prefill(url: str, samples: list[list[int]], concurrency: int) -> float:
    """Seconds for all samples, `concurrency` in flight, one token each, as 03 asks for them."""
    there = Server(url)

    def ask(ids: list[int]) -> None:
        body = json.dumps({"input_ids": ids, "sampling_params": PREFILL}).encode()
        status, answer = there.ask("POST", "/generate", body, 600)
        if status != 200:
            raise UserError(f"{url}: a request failed: {answer[:300]}")

    began = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(ask, samples))
    return time.monotonic() - began


def disk_speed(folder: Path, total: int, threads: int) -> float:
    """GB/s of `threads` threads writing files of 100 MB and fsyncing each: as the capture's writers, but no hashing."""
    block = os.urandom(8 << 20)
    files, blocks = max(threads, total // (100 << 20)), 100 // 8
    folder.mkdir()

    def write(number: int) -> None:
        handle = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o600)
        for _ in range(blocks):
            os.write(handle, block)
        os.fsync(handle)
        os.close(handle)

    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(files)))
    seconds = time.monotonic() - began
    shutil.rmtree(folder)
    return files * blocks * len(block) / seconds / 1e9


def sha256_speed() -> float:
    block, began, count = os.urandom(32 << 20), time.monotonic(), 0
    while time.monotonic() - began < 0.5:
        hashlib.sha256(block)
        count += 1
    return count * len(block) / (time.monotonic() - began) / 1e9


@dataclass
class Run:
    """One run of 03. size: bytes written; seconds: by its own clock, without start-up; watch: memory meanwhile."""
    tokens: int
    size: int
    seconds: float
    watch: Watch

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def extract(url: str, responses: Path, output: Path, concurrency: int, limit: int, states: str) -> Run:
    """03_extract.py as its users run it; what it wrote is removed again."""
    argv = [sys.executable, "-u", str(ROOT / "03_extract.py"), "--data-dir", str(responses),
            "--output-dir", str(output), "--base-url", url, "--concurrency", str(concurrency), "--limit", str(limit),
            "--capture-dir", str(output.parent / "incoming"), "--no-disk-check", "--log-interval", "5",
            "--states", states]
    watch = Watch(output.parent)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watch.pid = process.pid
    last = ""
    for line in process.stdout:
        print(f"    {line.rstrip()}", flush=True)
        last = line if " extracted " in line else last
    if process.wait() != 0 or not last:
        raise UserError("03_extract.py failed: see above.")
    words = last.split(" extracted ")[1].split()
    size = sum(path.stat().st_size for path in output.rglob("*.safetensors"))
    shutil.rmtree(output)
    return Run(int(words[0].replace(",", "")), size, float(words[5]), watch.close())


# ---- the table ----
def report_of(runs: list[Run], one: Run, plain: list[float], single_plain: float, base: Watch) -> dict:
    """What bench_extract.json says of the runs. plain: tok/s; one: one request at a time; base: the plain server's."""
    best = max(runs, key=lambda run: run.speed)
    resident = max(run.watch.resident for run in runs)
    host, gpu = (max(getattr(run.watch, name) for run in runs) - getattr(base, name) for name in ("host", "gpu"))
    return {"bytes_per_token": best.size / best.tokens, "plain_tok_s": plain,
            "extract_tok_s": [run.speed for run in runs],
            "extract_GB_s": [run.size / run.seconds / 1e9 for run in runs], "share_of_plain": best.speed / max(plain),
            "one_at_a_time_tok_s": one.speed, "plain_one_at_a_time_tok_s": single_plain,
            "times_one_at_a_time": best.speed / one.speed,
            "server_host_memory_beyond_plain_GiB": (host - resident) / 2 ** 30,
            "gpu_memory_beyond_plain_GiB": gpu / 2 ** 30,
            "extract_resident_GiB": resident / 2 ** 30}


def show(report: dict, args, total: int, threads: int) -> None:
    speed, disk = max(report["extract_tok_s"]), report["disk_GB_s"]
    written = speed * report["bytes_per_token"] / 1e9
    rows = [(f"plain prefill, concurrency {args.concurrency}", f"{max(report['plain_tok_s']):,.0f} tok/s"),
            ("extraction, same samples", f"{speed:,.0f} tok/s = {100 * report['share_of_plain']:.1f} % of plain"),
            ("written", f"{written:.2f} GB/s ({report['bytes_per_token']:,.0f} bytes a token)"),
            (f"the disk alone, {total / 1e9:.1f} GB", f"{disk[0]:.2f}, after {disk[1]:.2f} GB/s; "
                                                      f"sha256 {report['sha256_GB_s_thread']:.2f} x {threads} threads"),
            ("one request at a time", f"{report['one_at_a_time_tok_s']:,.0f} tok/s: "
                                      f"extraction is {report['times_one_at_a_time']:.1f} times as fast"),
            ("server's host memory beyond plain", f"{report['server_host_memory_beyond_plain_GiB']:.2f} GiB"),
            ("GPU memory beyond plain", f"{report['gpu_memory_beyond_plain_GiB']:.2f} GiB"),
            ("03_extract.py resident", f"{report['extract_resident_GiB']:.2f} GiB")]
    rows += [(f"--states {kind}", f"{', '.join(f'{rate:,.0f}' for rate in found['extract_tok_s'])} tok/s, "
                                  f"{found['bytes_per_token']:,.0f} bytes a token")
             for kind, found in report["by_states"].items() if len(report["by_states"]) > 1]
    print(f"\n{args.size}, {args.layers} layers, {args.samples} samples, {report['tokens']:,} tokens")
    for name, value in rows:
        print(f"| {name:36} | {value:52} |")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--single", type=int, default=24, help="samples to extract one request at a time")
    parser.add_argument("--mean", type=float, default=1730)
    parser.add_argument("--cut", type=int, default=4096)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2,
                        help="passes over the samples; the best counts, all are reported")
    parser.add_argument("--states", nargs="+", choices=KINDS, default=[KINDS[0]],
                        help="03's, in turns, each with a line of its own; all other figures are of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--output-dir", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    size, folder = SIZES[args.size], args.output_dir.absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty. Name another --output-dir.")
    patched = subprocess.run([sys.executable, str(ROOT / "patches/sglang_patch.py"), "status"],
                             capture_output=True, text=True)
    if ": patched (" not in patched.stdout:
        raise UserError(f"{(patched.stdout + patched.stderr).strip()}. Run patches/sglang_patch.py apply first.")
    first_gpu()
    target, responses, samples = write_inputs(folder, args, size)
    tokens = sum(map(len, samples))
    threads = min(8, max(4, (os.cpu_count() or 4) // 2))
    log(f"{patched.stdout.strip()} | {args.samples} samples, {tokens:,} tokens, mean {tokens / args.samples:,.0f}, "
        f"longest {max(map(len, samples))}")
    total = tokens * 8 * size["config"]["hidden_size"]  # bf16, three layers and the final state: as one pass writes
    disk, sha = [disk_speed(folder / "disk", total, threads)], sha256_speed()
    log(f"disk {disk[0]:.2f} GB/s ({threads} threads, fsync) | sha256 {sha:.2f} GB/s a thread")

    with server(size, target, folder / "plain.log", args, {}) as url:
        prefill(url, samples[:args.concurrency], args.concurrency)  # kernels are compiled
        watch = Watch(folder)
        plain = [tokens / prefill(url, samples, args.concurrency) for _ in range(args.repeats)]
        base = watch.close()
        single_plain = sum(map(len, samples[:args.single])) / prefill(url, samples[:args.single], 1)
    speeds = ", ".join(f"{speed:,.0f}" for speed in plain)
    log(f"plain prefill {speeds} tok/s | one at a time {single_plain:,.0f} tok/s")

    layers = ",".join(map(str, (2, args.layers // 2, args.layers - 2)))
    env = {"EAGLE3_CAPTURE_DIR": str(folder / "incoming"), "EAGLE3_CAPTURE_LAYERS": layers}
    with server(size, target, folder / "capture.log", args, env) as url:
        prefill(url, samples[:args.concurrency], args.concurrency)
        runs = {kind: [] for kind in args.states}  # in turns
        for kind in args.states * args.repeats:
            runs[kind].append(extract(url, responses, folder / "hidden_states", args.concurrency, 0, kind))
        one = extract(url, responses, folder / "hidden_states", 1, args.single, args.states[0])
    disk.append(disk_speed(folder / "disk", total, threads))
    report = {"size": args.size, "layers": args.layers, "capture_layers": layers, "samples": args.samples,
              "tokens": tokens, "cpus": os.cpu_count(), "disk_GB_s": disk, "sha256_GB_s_thread": sha,
              **report_of(runs[args.states[0]], one, plain, single_plain, base),
              "by_states": {kind: {"bytes_per_token": some[0].size / some[0].tokens,
                                   "extract_tok_s": [run.speed for run in some]} for kind, some in runs.items()}}
    write_atomic(folder / "bench_extract.json", json.dumps(report, indent=1) + "\n")
    show(report, args, total, threads)
    log(f"done: {folder / 'bench_extract.json'}")


if __name__ == "__main__":
    run(main)
