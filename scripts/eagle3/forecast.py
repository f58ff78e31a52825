"""What a run takes: bytes, hours, money. Each figure stands beside its formula in words.

The settings are those of scripts/plan.py: a run file's values under its flags. N samples, T mean tokens of a stored
sample, H hidden, K TTT steps, Vd draft vocabulary. GB is 1e9 bytes, GiB and TiB are powers of 1024.
"""
from __future__ import annotations

import argparse
import math
import os
import re
import shutil
from pathlib import Path

from eagle3 import bench_plan
from eagle3.drafter import Shape
from eagle3.host_plan import GRADIENT, gradient_bytes, host_figures
from eagle3.mla import latent_of
from eagle3.recipe import usual_kv_heads
from eagle3.stage import UserError, raising, read_json
from eagle3.states import IN_FP8, KINDS, token_bytes
from eagle3.target import with_sizes

KIMI = dict(hidden_size=7168, num_hidden_layers=61, num_attention_heads=64, q_lora_rank=1536, kv_lora_rank=512,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=384, n_shared_experts=1,
            first_k_dense_replace=1, intermediate_size=18432, moe_intermediate_size=2048, vocab_size=163840,
            quantization_config={})
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
MEAN_LENGTH = 1730   # tokens of a sample of the run of 10,000
SIGMA = 0.6          # of the logarithm of sample lengths, as scripts/bench_train.py draws them
FILL = 7518 / 8192   # of a packed micro-batch, seen on the real mix
INT4 = 4.5 / 8       # bytes of a weight: 4 bits and a 16-bit scale for each group of 32
ADAM = 14            # bytes of a checkpoint per trained parameter: float32 weight and two moments, bf16 export
RESPONSE_BYTES = 10  # of a row of responses/, per token
ONE_STREAM = 90      # tok/s of plain decoding, Kimi-K2.5 on 8x RTX PRO 6000


def build_parser(description: str) -> argparse.ArgumentParser:
    """The settings; their defaults are Kimi-K2.5 on 8x RTX PRO 6000."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.yaml", help="run file")
    add("--target-config", type=Path, metavar="FILE",
        help="the target's config.json (default: the run file's target, else Kimi-K2.5's sizes)")
    add("--samples", type=int, default=10000, metavar="N")
    add("--mean-length", type=float, default=MEAN_LENGTH, metavar="T",
        help="tokens of a stored sample, prompt and answer (the 10K run: 1,730; the larger: 2,353)")
    add("--prompt-share", type=float, default=1 / 3, metavar="F", help="of those, in the prompt")
    add("--max-length", type=int, default=4096, help="03's cut; --mean-length is meant after it")
    add("--capture-layers", type=int, default=3, metavar="N", help="states kept per token besides the last one")
    add("--states", choices=KINDS, default=KINDS[0], help="how 03 stores them")
    add("--draft-vocab-size", type=int, default=32000)
    add("--num-kv-heads", type=int, help="of the drafter (default as in 04: the target's, with MLA 8)")
    add("--architecture", choices=("llama", "mla"), default="llama", help="of the drafter, as in 04")
    add("--max-disk-gb", type=float, metavar="GB",
        help="03's bound on samples that lie on the disk (04 --follow trains on them meanwhile)")
    add("--epochs", type=int, default=5)
    add("--max-steps", type=int)
    add("--val-ratio", type=float, default=0.1)
    add("--max-seq-len", type=int, default=2048)
    add("--batch-tokens", type=int, default=8192)
    add("--ttt-steps", type=int, default=3)
    add("--save-every", type=int, default=0)
    add("--keep-checkpoints", type=int, default=2)
    add("--unpacked", action="store_true", help="another trainer: each step takes one sample")
    add("--gpus", type=int, default=8, help="that serve the target")
    add("--gpu-memory", type=float, default=96, metavar="GB", help="of one of them")
    add("--train-gpus", type=int, default=1, help="that train, on each host")
    add("--hosts", type=int, default=1, metavar="N",
        help="machines like this one, each with a server for 03 and with --train-gpus for 04 (configs/README.md)")
    add("--disk", metavar="SIZE|DIR",
        help="free disk, as 4T, 900G, 4.6TiB, or a folder whose disk is asked (default: the run folder's)")
    add_rates(add)
    return parser


def add_rates(add) -> None:
    """How fast each stage is; the help says where a default was measured."""
    add("--gpu-tflops", type=float, default=504,
        help="dense bf16 of a training GPU by its data sheet (RTX PRO 6000 504, H200 989)")
    add("--train-efficiency", type=float, default=0.577,
        help="share of it that 04 turns into arithmetic: 46,524 tok/s on an H200, real mix, TTT 3 (47,035 since: "
             "scripts/README.md); on other GPUs an assumption until 04's log says its MFU")
    add("--train-rate", type=float, metavar="TOK/S",
        help="of one training GPU, instead of the two above (an unpacked trainer on the known run: 2,800)")
    add("--link-gbps", type=float, default=20, metavar="GB/S",
        help="between training GPUs, as nccl-tests call it busbw (an assumption: PCIe 5 x16 through host memory; by "
             "NVLink 200 and more; several hosts: their network), none of it behind the arithmetic, so an upper bound "
             "until 04's log says its rank wait")
    add("--extract-rate", type=float, nargs=2, default=[1700, 2800], metavar=("LOW", "HIGH"),
        help="tok/s of 03 (seen on eight GPUs, one request at a time, for Kimi-K2.5)")
    add("--generate-rate", type=float, default=ONE_STREAM, metavar="TOK/S",
        help="of 01, all requests together (default: one stream alone, so an upper bound in hours; "
             "01 logs the real one within minutes)")
    add("--count-rate", type=float, default=4.4e6, metavar="TOK/S", help="of 02 (88M tokens in 20.1 s on two cores)")
    add("--stream-rate", type=float, default=ONE_STREAM, metavar="TOK/S",
        help="plain decoding of one stream, for 05 (known for Kimi-K2.5 on 8x RTX PRO 6000)")
    bench_plan.add_bench_flags(add)
    add("--usd-per-mtok", type=float, nargs=2, metavar=("IN", "OUT"), help="an API's prices for a million tokens")


def run_file_settings(run: dict, path: Path) -> dict:
    """The settings that a run file holds. Raises UserError."""
    section = {name: run.get(name) or {} for name in ("generate", "build_vocab", "extract", "train", "benchmark",
                                                      "servers")}
    try:
        plain = section["servers"].get("plain", {}).get("flags") or {}
        env = section["servers"].get("extract", {}).get("env") or {}
        found = {"samples": section["generate"].get("limit"), "max_length": section["extract"].get("max-length"),
                 "max_disk_gb": section["extract"].get("max-disk-gb"), "states": section["extract"].get("states"),
                 "gpus": plain.get("tp-size", 1),
                 "capture_layers": len(str(env.get("EAGLE3_CAPTURE_LAYERS", "0,0,0")).split(",")),
                 "draft_vocab_size": section["build_vocab"].get("draft-vocab-size"), "disk": run.get("run_dir"),
                 **bench_plan.bench_settings(section["benchmark"])}
        for key in ("epochs", "max-steps", "val-ratio", "max-seq-len", "batch-tokens", "ttt-steps", "save-every",
                    "keep-checkpoints", "num-kv-heads", "architecture"):
            found[key.replace("-", "_")] = section["train"].get(key)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a readable run file ({' '.join(str(error).split())}).") from None
    if isinstance(found["max_length"], (int, float)) and found["max_length"] > 0:
        found["mean_length"] = min(found["max_length"], MEAN_LENGTH)
    target = Path(str(run.get("target"))) / "config.json"
    if target.is_file():
        found["target_config"] = target
    return {key: value if key in bench_plan.SEVERAL else str(value)  # argparse makes the latter what they are
            for key, value in found.items() if value is not None}


def run_folders(run: dict) -> set[Path]:
    """Where a run file's stages write."""
    place = run.get("run_dir", ".")
    return {Path(place), Path((run.get("train") or {}).get("output-dir", place))}


def check_settings(a: argparse.Namespace) -> None:
    """Raises UserError."""
    for name in ("samples", "mean_length", "epochs", "max_steps", "batch_tokens", "ttt_steps", "gpus", "gpu_memory",
                 "train_gpus", "hosts", "gpu_tflops", "train_efficiency", "train_rate", "extract_rate", "generate_rate",
                 "count_rate", "stream_rate", "max_disk_gb", "link_gbps"):
        value = getattr(a, name)
        if value is not None and not all(0 < one < math.inf for one in (value if isinstance(value, list) else [value])):
            raise UserError(f"--{name.replace('_', '-')} {value} must be above 0.")
    if not 0 <= a.prompt_share <= 1 or not 0 <= a.val_ratio < 1 or a.samples * (1 - a.val_ratio) < 1:
        raise UserError("--prompt-share must lie in [0, 1], --val-ratio in [0, 1) and leave a sample to train on.")
    if a.unpacked and not a.train_rate:
        raise UserError("--unpacked: another trainer's speed is unknown here. Give --train-rate.")
    bench_plan.check_bench(a)


# ---- sizes ----
def target_sizes(path: Path | None) -> dict:
    """The text config of the target whose config.json is `path`; Kimi-K2.5's sizes without one. Raises UserError."""
    if path is None:
        return KIMI
    config = read_json(path)
    text = with_sizes(config.get("text_config") or config, path)
    missing = [key for key in NEEDED if key not in text]
    if missing:
        raise UserError(f"{path}: no config.json of a target: {', '.join(missing)} not in it.")
    plain = {"q_lora_rank": None, "n_routed_experts": 0, "n_shared_experts": 0,
             "first_k_dense_replace": text["num_hidden_layers"]}
    quantised = {key: config[key] for key in ("quantization_config",) if key in config}
    return {**plain, **text, **quantised}


def target_bytes(c: dict, folder: Path | None) -> tuple[float, str]:
    """(bytes of the weights, how counted). Raises UserError.

    MLA, dense and shared experts, embedding and head in bf16, routed experts in INT4 where the config is quantised.
    Of a target without MLA: what its files take.
    """
    if "kv_lora_rank" not in c:
        files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no MLA in config.json and no *.safetensors beside it, "
                            "so the size of this target is unknown. Download the weights first.")
        return files, "its files"
    H, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q = c["q_lora_rank"] * (H + heads * (nope + rope)) if c["q_lora_rank"] else H * heads * (nope + rope)
    attention = q + H * (c["kv_lora_rank"] + rope) + c["kv_lora_rank"] * heads * (nope + v) + heads * v * H
    dense, expert = c["first_k_dense_replace"], 3 * H * c.get("moe_intermediate_size", 0)
    sparse = c["num_hidden_layers"] - dense
    plain = (c["num_hidden_layers"] * attention + dense * 3 * H * c["intermediate_size"]
             + sparse * (c["n_shared_experts"] * expert + c["n_routed_experts"] * H) + 2 * c["vocab_size"] * H)
    int4 = "quantization_config" in c
    routed = sparse * c["n_routed_experts"] * expert
    return 2 * plain + routed * (INT4 if int4 else 2), f"{'INT4' if int4 else 'bf16'} experts, the rest bf16"


def drafter_shape(c: dict, draft_vocab: int, kv_heads: int | None, architecture: str = "llama") -> Shape:
    """The drafter that 04 makes for this target when nothing else is asked for. Raises UserError."""
    heads = c["num_attention_heads"]
    if architecture == "mla":
        latent = latent_of(c, "the target's config.json")
        return Shape(c["hidden_size"], heads, heads, latent.head_dim, c["intermediate_size"], c["vocab_size"],
                     draft_vocab, 1e-5, 1e4, 0, latent=latent)
    head_dim = c.get("v_head_dim") or c.get("head_dim") or c["hidden_size"] // heads
    return Shape(c["hidden_size"], heads, kv_heads or usual_kv_heads(c, heads), head_dim, c["intermediate_size"],
                 c["vocab_size"], draft_vocab, 1e-5, 1e4, 0)


def parameters(shape: Shape) -> dict[str, int]:
    """Trained parameters by part, as they are spoken of."""
    size = {name: math.prod(of) for name, of in shape.weights().items()}
    q, kv = size["q_embed"] + size["q_hidden"], size["kv_embed"] + size["kv_hidden"]
    return {"fc": size["fc"], "q": q + size.get("q_b", 0), "kv": kv + size.get("k_b", 0) + size.get("v_b", 0),
            "o": size["o"], "mlp": size["gate_up"] + size["down"], "head": size["lm_head"],
            "norms": sum(size[name] for name in size if name.endswith("norm"))}


def token_flops(shape: Shape, T: float, loss_share: float, K: int) -> float:
    """Forward and backward of one token of a sample of T whose last `loss_share` carries the loss."""
    query = loss_share * T
    return shape.flops(T, query, query * T * (1 - loss_share / 2), K) / T


def cut_mean(mean: float, cut: int) -> float:
    """E[min(X, cut)] of a log-normal X with this mean and SIGMA."""
    def below(x):
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    z = (math.log(cut / mean) + SIGMA**2 / 2) / SIGMA
    return mean * below(z - SIGMA) + cut * (1 - below(z))


def disk_bytes(text: str) -> int:
    """Bytes of `4T`, `900G`, `4.6TiB`, or free on the disk that holds (or will hold) a folder. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP])(i?)B?", text, re.IGNORECASE)
    if match:
        return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGTP".index(match[2].upper()) + 1))
    folder = Path(text).absolute()
    if re.fullmatch(r"[\d.,]+\s*\w{0,3}", text) and not folder.exists():
        raise UserError(f"--disk {text}: neither a size like 4T, 900G or 4.6TiB nor a folder.")
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def bytes_there(*folders: Path) -> int:
    """What lies in them already; a file with several names counts once."""
    sizes = {}
    for folder in folders:
        for place, _, files in os.walk(folder):
            for name in files:
                try:
                    state = os.stat(os.path.join(place, name))
                    sizes[state.st_dev, state.st_ino] = state.st_size
                except OSError:
                    pass  # renamed meanwhile
    return sum(sizes.values())


def size(value: float) -> str:
    if value < 1e9:
        return f"{value / 1e6:,.1f} MB"
    binary = f"{value / 2**40:.2f} TiB" if value >= 1e12 else f"{value / 2**30:,.0f} GiB"
    return f"{value / 1e9:,.1f} GB ({binary})"


def hours(value: float) -> str:
    if value >= 1:
        return f"{value:,.1f} h"
    return f"{60 * value:,.1f} min" if value >= 1 / 60 else f"{3600 * value:,.1f} s"


class Forecast:
    """figures: by name; rows: (stage, what, figure, formula) of a table; problems: what does not fit."""

    def __init__(self, a: argparse.Namespace, folders: tuple | set = ()):
        """a: the settings, checked; folders: what lies in them is written already."""
        self.a, self.figures, self.rows, self.problems = a, {}, [], []
        self.ranks = a.train_gpus * a.hosts
        self.target = target_sizes(a.target_config)
        self.shape = drafter_shape(self.target, a.draft_vocab_size, a.num_kv_heads, a.architecture)
        self.per_token = token_bytes(self.shape.hidden, "bfloat16", a.capture_layers, a.states)
        self.generating()
        self.extracting()
        self.training()
        self.rows += [(stage, key.replace("_", " "), size(value), how) for stage, key, value, how in self.between()]
        self.benchmarking()
        self.fitting(folders)

    @classmethod
    def of_run(cls, run: dict, path: Path) -> Forecast:
        """Of the run file `path`, read into `run`; nothing else set. Raises UserError."""
        parser = raising(build_parser(""), f"{path}: ", advice="")
        parser.set_defaults(**run_file_settings(run, path))
        settings = parser.parse_args([])
        check_settings(settings)
        return cls(settings, run_folders(run))

    def put(self, stage: str, key: str, value: float, shown: str, formula: str) -> None:
        self.figures[key] = value
        self.rows.append((stage, key.replace("_", " "), shown, formula))

    def generating(self) -> None:
        """01 and 02."""
        a, tokens = self.a, self.a.samples * self.a.mean_length
        self.put("01", "tokens", tokens, f"{tokens:,.0f}", f"{a.samples:,} samples x {a.mean_length:,.0f} tokens")
        answer = tokens * (1 - a.prompt_share)
        took = answer / a.generate_rate / 3600
        alone = " (one stream alone: an upper bound)" if a.generate_rate == ONE_STREAM else ""
        self.put("01", "generate_hours", took, hours(took),
                 f"{answer:,.0f} answer tokens / {a.generate_rate:,.0f} tok/s{alone}")
        if a.usd_per_mtok:
            of_prompts, of_answers = a.usd_per_mtok
            usd = (tokens - answer) / 1e6 * of_prompts + answer / 1e6 * of_answers
            self.put("01", "usd", usd, f"${usd:,.2f}", f"{(tokens - answer) / 1e6:,.1f}M prompt tokens x "
                     f"${of_prompts:g} + {answer / 1e6:,.1f}M answer tokens x ${of_answers:g}, by the million")
        else:
            self.rows.append(("01", "usd", "-",
                              "with an API: prompt tokens x IN + answer tokens x OUT (--usd-per-mtok IN OUT)"))
        written = RESPONSE_BYTES * tokens
        self.put("01", "responses_bytes", written, size(written), f"{RESPONSE_BYTES} bytes a token")
        took = answer / a.count_rate / 3600
        self.put("02", "count_hours", took, hours(took), f"{answer:,.0f} / {a.count_rate:,.0f} tok/s")

    def extracting(self) -> None:
        a, tokens, layers = self.a, self.figures["tokens"], self.a.capture_layers
        states = tokens * self.per_token
        self.put("03", "hidden_states_bytes", states, size(states), f"tokens x {self.per_token:,} "
                 f"({self.counted(layers)} + id 4 + mask 1)")
        self.figures["states_on_disk"] = states
        if a.max_disk_gb and a.max_disk_gb * 1e9 < states:
            self.put("03", "states_on_disk", a.max_disk_gb * 1e9, size(a.max_disk_gb * 1e9),
                     "--max-disk-gb; 04 --follow releases what it has trained on")
        slow, fast = (tokens / rate / a.hosts / 3600 for rate in a.extract_rate)
        self.figures["extract_hours_low"] = fast
        self.put("03", "extract_hours", slow, f"{hours(fast)} to {hours(slow)}",
                 f"tokens / {a.extract_rate[1]:,.0f} to {a.extract_rate[0]:,.0f} tok/s"
                 + (f" / {a.hosts} hosts" if a.hosts > 1 else ""))

    def counted(self, layers: int) -> str:
        """The states of a token in words."""
        kind, hidden = self.a.states, f"x {self.shape.hidden:,} x"
        if not IN_FP8[kind]:
            return f"{layers + 1} states {hidden} 2 bytes"
        if kind == "fp8":
            return f"{layers + 1} states {hidden} 1 byte + {layers + 1} scales x 4"
        return f"{layers} states {hidden} 1 byte + {layers} scales x 4 + 1 state {hidden} 2 bytes"

    def training(self) -> None:
        a, parts = self.a, parameters(self.shape)
        trained = sum(parts.values())
        self.put("04", "draft_parameters", trained, f"{trained / 1e6:,.0f}M",
                 " + ".join(f"{name} {value / 1e6:,.0f}" for name, value in parts.items() if name != "norms"))
        uncut = not a.max_seq_len or a.max_length and a.max_seq_len >= a.max_length
        cut = a.mean_length if uncut else cut_mean(a.mean_length, a.max_seq_len)
        n_train = math.floor(a.samples * (1 - a.val_ratio) + 1e-9)
        passes = self.steps(n_train, cut)
        flops = token_flops(self.shape, cut, 1 - a.prompt_share, a.ttt_steps)
        rate = a.train_rate or a.train_efficiency * a.gpu_tflops * 1e12 / flops
        self.put("04", "train_rate", rate, f"{rate:,.0f} tok/s a GPU", "--train-rate" if a.train_rate else
                 f"{a.train_efficiency:.3f} x {a.gpu_tflops:,.0f} TFLOP/s / {flops / 1e9:.1f} GFLOP a token "
                 f"(TTT {a.ttt_steps})")
        saves = math.ceil(passes) + (self.figures["train_steps"] // a.save_every if a.save_every else 0)
        saves = 0 if a.unpacked else saves
        validating = saves * (a.samples - n_train) * cut / 3
        also = f" + {saves} validations x {(a.samples - n_train) * cut / 1e6:,.2f}M / 3" if validating else ""
        all_gpus, epoch = rate * self.ranks, n_train * cut
        waiting, sending = self.sending(trained)
        took = (passes * epoch + validating) / all_gpus / 3600 + waiting
        self.put("04", "train_hours", took, hours(took), f"({passes:.3g} x {epoch / 1e6:,.2f}M tokens{also}) / "
                 f"({rate:,.0f} tok/s x {self.ranks} GPUs){sending}")
        host_reads = rate * a.train_gpus * self.per_token
        self.put("04", "train_read_rate", host_reads, f"{host_reads / 1e9:.1f} GB/s "
                 "from disk", f"{self.per_token:,} bytes x {rate:,.0f} tok/s x {a.train_gpus} GPUs")
        kept = ADAM * trained * (a.keep_checkpoints + 1)
        self.put("04", "checkpoint_bytes", kept, size(kept),
                 f"{ADAM} bytes x {trained / 1e6:,.0f}M x ({a.keep_checkpoints} kept + 1 being written)")

    def sending(self, trained: int) -> tuple[float, str]:
        """(hours for the gradients to go between the ranks, what to say of it), as if nothing were done meanwhile."""
        if self.ranks == 1 or self.a.train_rate:  # a log's rate has it in it
            return 0, ""
        each = gradient_bytes(trained, self.ranks) / self.a.link_gbps / 1e9
        took = each * self.figures["train_steps"] / 3600
        self.put("04", "rank_wait", took, f"under {hours(took)}", f"{self.figures['train_steps']:,} steps x 2 x "
                 f"{self.ranks - 1}/{self.ranks} x {GRADIENT} bytes x {trained / 1e6:,.0f}M / "
                 f"{self.a.link_gbps:g} GB/s = {each * 1e3:,.0f} ms each, all of it counted in train hours")
        return took, " + rank wait"

    def steps(self, n_train: int, cut: float) -> float:
        """Puts train_steps; returns the passes over the data that they make."""
        a = self.a
        if a.unpacked:
            self.put("04", "train_steps", a.epochs * n_train, f"{a.epochs * n_train:,}",
                     f"{a.epochs} epochs x floor({a.samples:,} x (1 - {a.val_ratio:g})), one sample a step")
            return a.epochs
        in_epoch = math.ceil(n_train * cut / (a.batch_tokens * FILL * self.ranks))
        steps = min(a.epochs * in_epoch, a.max_steps or 10**12)
        self.put("04", "train_steps", steps, f"{steps:,}", f"{a.epochs} epochs x {n_train:,} x {cut:,.0f} tokens / "
                 f"({a.batch_tokens:,} x {FILL:.2f} full x {self.ranks} GPUs)"
                 + (f", at most {a.max_steps:,}" if a.max_steps else ""))
        return steps / in_epoch

    def between(self) -> list:
        """Rows of what several hosts add."""
        rows = host_figures(self.a, self.figures, self.per_token)
        self.figures |= {key: value for _, key, value, _ in rows}
        return rows

    def benchmarking(self) -> None:
        a = self.a
        units = bench_plan.units(a)
        took = 2 * a.bench_repeats * sum(of.count * of.seconds for of in units) / 3600
        each = " + ".join(f"{of.count} {of.what} x {hours(of.seconds / 3600)}" for of in units)
        self.put("05", "benchmark_hours", took, f"under {hours(took)}",
                 f"2 variants x {a.bench_repeats} repeats x ({each}) | {bench_plan.counted(a)}")
        self.drafting()

    def drafting(self) -> None:
        """What the drafter takes where it is served, in bfloat16."""
        shape, parts = self.shape, parameters(self.shape)
        if shape.latent:
            cached, how = shape.latent.cached, "latent state and shared key, whole on each GPU"
        else:
            cached, how = 2 * shape.key_columns, f"keys and values of {shape.kv_heads} heads, shared out over the GPUs"
        self.put("05", "draft_kv_bytes", 2 * cached, f"{2 * cached:,} bytes a token", f"2 bytes x {cached:,}: {how}")
        read = 2 * (sum(parts.values()) - parts["fc"])
        self.put("05", "draft_step_bytes", read, size(read), "2 bytes x its weights without fc, in each draft step")

    def fitting(self, folders: tuple | set) -> None:
        a, f = self.a, self.figures
        weights, counted = target_bytes(self.target, a.target_config and a.target_config.parent)
        share = weights / a.gpus / 1e9
        self.put("all", "target_bytes", weights, size(weights), f"{counted}; {share:.1f} GB on each of {a.gpus} GPUs")
        need = f["responses_bytes"] + f["states_on_disk"] + f["checkpoint_bytes"]
        self.put("all", "disk_bytes", need, size(need), "responses + hidden states + checkpoints (without the target)")
        if a.disk:
            free, there = disk_bytes(a.disk), bytes_there(*folders)
            f.update(disk_free=free, disk_there=there)
            if need - there > free:
                of_sample = (f["responses_bytes"] + f["hidden_states_bytes"]) / a.samples
                fitting = max(0, int((free + there - f["checkpoint_bytes"]) / of_sample))
                bounded = f["states_on_disk"] != f["hidden_states_bytes"]
                self.problems.append(f"disk: {size(need - there)} more are needed, {size(free)} are free at {a.disk}. "
                                     f"{fitting:,} samples would fit"
                                     + (", or take a lower --max-disk-gb." if bounded else "."))
        if share > a.gpu_memory * 0.9:
            self.problems.append(f"target: {share:.1f} GB of weights on each of {a.gpus} GPUs leave no room for KV in "
                                 f"{a.gpu_memory:g} GB. Use more GPUs.")
