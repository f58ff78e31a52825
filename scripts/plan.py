"""What a run takes: bytes, hours, money, and what of it does not fit. Every figure stands beside its formula.

    python3 scripts/plan.py --config configs/kimi-k2.5-10k.yaml --train-gpus 4
    python3 scripts/plan.py --samples 37312 --mean-length 2353 --train-gpus 4 --disk 4T
    python3 scripts/plan.py --known          # the formulas against the two runs whose figures are known; exit 1 where one is off by over 10 %

Flags win over the run file, the run file over the defaults (Kimi-K2.5 on 8x RTX PRO 6000). Rates are flags too: their help says where each
default was measured. `--json` prints the figures alone. Exit 0, also when something does not fit: scripts/preflight.py refuses, this tells.

N samples, T mean tokens of a stored sample, H hidden, K TTT steps, Vd draft vocabulary. GB is 1e9 bytes, GiB and TiB are powers of 1024.
"""
import argparse
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import yaml

STAGE = "plan"
KIMI = dict(hidden_size=7168, num_hidden_layers=61, num_attention_heads=64, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
            v_head_dim=128, n_routed_experts=384, n_shared_experts=1, first_k_dense_replace=1, intermediate_size=18432, moe_intermediate_size=2048,
            vocab_size=163840, quantization_config={})
SIGMA = 0.6          # of the logarithm of sample lengths, as scripts/bench_train.py draws them
FILL = 7518 / 8192   # of a packed micro-batch, seen on the real mix
INT4 = 4.5 / 8       # bytes of a weight: 4 bits and a 16-bit scale for each group of 32
ADAM = 14            # bytes of a checkpoint per trained parameter: float32 weight and two moments, bf16 export
TOLERANCE = 0.10
KNOWN = [  # (what, flags, known figures)
    ("10K run", ["--samples", "10000", "--mean-length", "1730"], {"tokens": 17.3e6, "hidden_states_bytes": 924 * 2**30}),
    ("37,312 samples, 4 GPUs, unpacked trainer", ["--samples", "37312", "--mean-length", "2353", "--train-gpus", "4", "--epochs", "5", "--val-ratio", "0.05",
                                                  "--max-seq-len", "4096", "--unpacked", "--train-rate", "2800"],
     {"tokens": 87.8e6, "hidden_states_bytes": 4.6 * 2**40, "train_steps": 177230, "train_hours": 10.8}),
]


class UserError(Exception):
    """Bad input or configuration. The message says what, where and what to do; the script ends with exit code 2."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.yaml", help="run file")
    add("--target-config", type=Path, metavar="FILE", help="the target's config.json (default: the run file's target, else Kimi-K2.5's sizes)")
    add("--samples", type=int, default=10000, metavar="N")
    add("--mean-length", type=float, default=1730, metavar="T", help="tokens of a stored sample, prompt and answer (the 10K run: 1,730; the larger: 2,353)")
    add("--prompt-share", type=float, default=1 / 3, metavar="F", help="of those, in the prompt")
    add("--max-length", type=int, default=4096, help="03's cut; --mean-length is meant after it")
    add("--capture-layers", type=int, default=3, metavar="N", help="states kept per token besides the last one")
    add("--draft-vocab-size", type=int, default=32000)
    add("--num-kv-heads", type=int, help="of the drafter (default as in 04: 8)")
    add("--max-disk-gb", type=float, metavar="GB", help="03's bound on samples that lie on the disk (04 --follow trains on them meanwhile)")
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
    add("--train-gpus", type=int, default=1)
    add("--disk", metavar="SIZE|DIR", help="free disk, as 4T, 900G, 4.6TiB, or a folder whose disk is asked (default: the run folder's)")
    add("--gpu-tflops", type=float, default=504, help="dense bf16 of a training GPU by its data sheet (RTX PRO 6000 504, H200 989)")
    add("--train-efficiency", type=float, default=0.577, help="share of it that 04 turns into arithmetic: 46,524 tok/s on an H200, real mix, TTT 3 "
        "(README); on other GPUs an assumption until 04's log says its MFU")
    add("--train-rate", type=float, metavar="TOK/S", help="of one training GPU, instead of the two above (an unpacked trainer on the known run: 2,800)")
    add("--extract-rate", type=float, nargs=2, default=[1700, 2800], metavar=("LOW", "HIGH"),
        help="tok/s of 03 (seen on eight GPUs, one request at a time, for Kimi-K2.5)")
    add("--generate-rate", type=float, default=90, metavar="TOK/S", help="of 01, all requests together (default: one stream alone, so an upper bound in hours; "
        "01 logs the real one within minutes)")
    add("--count-rate", type=float, default=4.4e6, metavar="TOK/S", help="of 02 (88M tokens in 20.1 s on two cores)")
    add("--stream-rate", type=float, default=90, metavar="TOK/S", help="plain decoding of one stream, for 05 (known for Kimi-K2.5 on 8x RTX PRO 6000)")
    add("--bench-prompts", type=int, default=54)
    add("--bench-levels", type=int, default=3)
    add("--bench-tokens", type=int, default=512)
    add("--usd-per-mtok", type=float, nargs=2, metavar=("IN", "OUT"), help="an API's prices for a million tokens")
    add("--known", action="store_true")
    add("--json", action="store_true")
    return parser


def read_run(path: Path) -> tuple[dict, dict]:
    """(the run file with {run_dir} and {target} filled in, the defaults it sets for this script). Raises UserError."""
    try:
        text = path.read_text()
        document = yaml.safe_load(text)
        for key in ("run_dir", "target"):
            text = text.replace(f"{{{key}}}", str(document.get(key, "")))
        document = yaml.safe_load(text)
        section = {name: document.get(name) or {} for name in ("generate", "build_vocab", "extract", "train", "benchmark", "servers")}
        plain = section["servers"].get("plain", {}).get("flags") or {}
        layers = str((section["servers"].get("extract", {}).get("env") or {}).get("EAGLE3_CAPTURE_LAYERS", "0,0,0"))
        levels = section["benchmark"].get("concurrency", [1, 8, 64])
        found = {"samples": section["generate"].get("limit"), "max_length": section["extract"].get("max-length"), "capture_layers": len(layers.split(",")),
                 "max_disk_gb": section["extract"].get("max-disk-gb"), "draft_vocab_size": section["build_vocab"].get("draft-vocab-size"), "gpus": plain.get("tp-size", 1), "disk": document.get("run_dir"),
                 "bench_prompts": section["benchmark"].get("limit"), "bench_tokens": section["benchmark"].get("max-tokens"),
                 "bench_levels": len(levels) if isinstance(levels, list) else 1}
        found |= {key.replace("-", "_"): section["train"].get(key) for key in ("epochs", "max-steps", "val-ratio", "max-seq-len", "batch-tokens", "ttt-steps",
                                                                                "save-every", "keep-checkpoints", "num-kv-heads")}
    except (OSError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: not a readable run file ({' '.join(str(error).split())}).") from None
    if found["max_length"]:
        found["mean_length"] = min(found["max_length"], 1730)
    target = Path(str(document.get("target"))) / "config.json"
    if target.is_file():
        found["target_config"] = target
    return document, {key: value for key, value in found.items() if value is not None}


def text_config(path: Path | None) -> dict:
    if path is None:
        return KIMI
    try:
        config = json.loads(path.read_text())
        config = {**config.get("text_config", config), **{key: config[key] for key in ("quantization_config",) if key in config}}
        return {**{"q_lora_rank": None, "n_routed_experts": 0, "n_shared_experts": 0, "first_k_dense_replace": config["num_hidden_layers"]}, **config}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: no readable config.json of a target ({error}).") from None


def disk_bytes(text: str) -> int:
    """Bytes of `4T`, `900G`, `4.6TiB`, or free on the disk that holds (or will hold) a folder. Raises UserError."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP])(i?)B?", text, re.IGNORECASE)
    if size:
        return int(float(size[1]) * (1024 if size[3] else 1000) ** ("KMGTP".index(size[2].upper()) + 1))
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


def cut_mean(mean: float, cut: int) -> float:
    """E[min(X, cut)] of a log-normal X with this mean and SIGMA."""
    def below(x):
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    z = (math.log(cut / mean) + SIGMA**2 / 2) / SIGMA
    return mean * below(z - SIGMA) + cut * (1 - below(z))


def target_bytes(c: dict, folder: Path | None) -> tuple[float, str]:
    """(bytes of the weights, how counted): MLA, dense and shared experts, embedding and head in bf16, routed experts in INT4 where the
    config is quantised. Of a target without MLA: what its files take. Raises UserError.
    """
    if "kv_lora_rank" not in c:
        files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no MLA in config.json and no *.safetensors beside it, so the size of this target is unknown. Download the weights first.")
        return files, "its files"
    H, heads, nope, rope, v = c["hidden_size"], c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q = c["q_lora_rank"] * (H + heads * (nope + rope)) if c["q_lora_rank"] else H * heads * (nope + rope)
    attention = q + H * (c["kv_lora_rank"] + rope) + c["kv_lora_rank"] * heads * (nope + v) + heads * v * H
    expert, sparse = 3 * H * c.get("moe_intermediate_size", 0), c["num_hidden_layers"] - c["first_k_dense_replace"]
    plain = (c["num_hidden_layers"] * attention + c["first_k_dense_replace"] * 3 * H * c["intermediate_size"]
             + sparse * (c["n_shared_experts"] * expert + c["n_routed_experts"] * H) + 2 * c["vocab_size"] * H)
    int4 = "quantization_config" in c
    return 2 * plain + sparse * c["n_routed_experts"] * expert * (INT4 if int4 else 2), f"{'INT4' if int4 else 'bf16'} experts, the rest bf16"


def draft_sizes(c: dict, vocab: int, kv_heads: int | None) -> dict:
    H, heads = c["hidden_size"], c["num_attention_heads"]
    d = c.get("v_head_dim") or c.get("head_dim") or H // heads
    kv = 2 * (kv_heads or (8 if heads % 8 == 0 else heads)) * d
    return {"width": heads * d, "fc": 3 * H * H, "q": heads * d * 2 * H, "kv": kv * 2 * H, "o": H * heads * d, "mlp": 3 * H * c["intermediate_size"],
            "head": vocab * H, "norms": 4 * H}


def draft_flops(s: dict, T: float, loss_share: float, K: int) -> float:
    """Forward and backward of one token of a sample of T: 04_train.py's own count (Shape.flops). Rows without loss need step 0's keys only."""
    first = 2 * s["fc"] + 2.5 * s["kv"] + s["q"] * loss_share
    later = (3 * (K * (s["q"] / 2 + s["o"] + s["mlp"] + s["head"]) + (K - 1) * s["kv"] / 2) + s["head"]) * loss_share
    return 2 * (first + later) + 14 * K * loss_share * T * (1 - loss_share / 2) * s["width"]


def size(value: float) -> str:
    if value < 1e9:
        return f"{value / 1e6:,.1f} MB"
    return f"{value / 1e9:,.1f} GB ({value / 2**40:.2f} TiB)" if value >= 1e12 else f"{value / 1e9:,.1f} GB ({value / 2**30:,.0f} GiB)"


def hours(value: float) -> str:
    return f"{value:,.1f} h" if value >= 1 else f"{60 * value:,.1f} min" if value >= 1 / 60 else f"{3600 * value:,.1f} s"


def make_plan(a: argparse.Namespace, folders: tuple = ()) -> tuple[dict, list[tuple[str, str, str, str]], list[str]]:
    """(figures by name, table rows (stage, what, figure, formula), what does not fit)."""
    c = text_config(a.target_config)
    H, N, s = c["hidden_size"], a.samples, draft_sizes(c, a.draft_vocab_size, a.num_kv_heads)
    f, rows = {}, []

    def put(stage, key, value, shown, formula):
        f[key] = value
        rows.append((stage, key.replace("_", " "), shown, formula))

    put("01", "tokens", N * a.mean_length, f"{N * a.mean_length:,.0f}", f"{N:,} samples x {a.mean_length:,.0f} tokens")
    answer = f["tokens"] * (1 - a.prompt_share)
    put("01", "generate_hours", answer / a.generate_rate / 3600, hours(answer / a.generate_rate / 3600),
        f"{answer:,.0f} answer tokens / {a.generate_rate:,.0f} tok/s" + (" (one stream alone: an upper bound)" if a.generate_rate == 90 else ""))
    if a.usd_per_mtok:
        usd = (f["tokens"] - answer) / 1e6 * a.usd_per_mtok[0] + answer / 1e6 * a.usd_per_mtok[1]
        put("01", "usd", usd, f"${usd:,.2f}", f"{(f['tokens'] - answer) / 1e6:,.1f}M prompt tokens x ${a.usd_per_mtok[0]:g} "
            f"+ {answer / 1e6:,.1f}M answer tokens x ${a.usd_per_mtok[1]:g}, by the million")
    else:
        rows.append(("01", "usd", "-", "with an API: prompt tokens x IN + answer tokens x OUT (--usd-per-mtok IN OUT)"))
    put("01", "responses_bytes", 10 * f["tokens"], size(10 * f["tokens"]), "10 bytes a token")
    put("02", "count_hours", answer / a.count_rate / 3600, hours(answer / a.count_rate / 3600), f"{answer:,.0f} / {a.count_rate:,.0f} tok/s")
    per_token = (a.capture_layers + 1) * H * 2 + 5
    put("03", "hidden_states_bytes", f["tokens"] * per_token, size(f["tokens"] * per_token),
        f"tokens x {per_token:,} ({a.capture_layers + 1} states x {H:,} x 2 bytes + id 4 + mask 1)")
    f["states_on_disk"] = f["hidden_states_bytes"]
    if a.max_disk_gb and a.max_disk_gb * 1e9 < f["hidden_states_bytes"]:
        put("03", "states_on_disk", a.max_disk_gb * 1e9, size(a.max_disk_gb * 1e9), "--max-disk-gb; 04 --follow releases what it has trained on")
    slow, fast = (f["tokens"] / rate / 3600 for rate in a.extract_rate)
    f["extract_hours_low"] = fast
    put("03", "extract_hours", slow, f"{hours(fast)} to {hours(slow)}", f"tokens / {a.extract_rate[1]:,.0f} to {a.extract_rate[0]:,.0f} tok/s")

    trained = sum(value for key, value in s.items() if key != "width")
    put("04", "draft_parameters", trained, f"{trained / 1e6:,.0f}M",
        " + ".join(f"{key} {s[key] / 1e6:,.0f}" for key in ("fc", "q", "kv", "o", "mlp", "head")))
    cut = a.mean_length if not a.max_seq_len or a.max_length and a.max_seq_len >= a.max_length else cut_mean(a.mean_length, a.max_seq_len)
    n_train = math.floor(N * (1 - a.val_ratio) + 1e-9)
    epoch, passes = n_train * cut, a.epochs
    if a.unpacked:
        put("04", "train_steps", a.epochs * n_train, f"{a.epochs * n_train:,}",
            f"{a.epochs} epochs x floor({N:,} x (1 - {a.val_ratio:g})), one sample a step")
    else:
        in_epoch = math.ceil(epoch / (a.batch_tokens * FILL * a.train_gpus))
        steps = min(a.epochs * in_epoch, a.max_steps or 10**12)
        put("04", "train_steps", steps, f"{steps:,}", f"{a.epochs} epochs x {n_train:,} x {cut:,.0f} tokens / "
            f"({a.batch_tokens:,} x {FILL:.2f} full x {a.train_gpus} GPUs)" + (f", at most {a.max_steps:,}" if a.max_steps else ""))
        passes = steps / in_epoch
    flops = draft_flops(s, cut, 1 - a.prompt_share, a.ttt_steps)
    rate = a.train_rate or a.train_efficiency * a.gpu_tflops * 1e12 / flops
    put("04", "train_rate", rate, f"{rate:,.0f} tok/s a GPU", "--train-rate" if a.train_rate else
        f"{a.train_efficiency:.3f} x {a.gpu_tflops:,.0f} TFLOP/s / {flops / 1e9:.1f} GFLOP a token (TTT {a.ttt_steps})")
    saves = 0 if a.unpacked else math.ceil(passes) + (f["train_steps"] // a.save_every if a.save_every else 0)
    validating = saves * (N - n_train) * cut / 3
    all_gpus, also = rate * a.train_gpus, f" + {saves} validations x {(N - n_train) * cut / 1e6:,.2f}M / 3" if validating else ""
    training = (passes * epoch + validating) / all_gpus / 3600
    put("04", "train_hours", training, hours(training),
        f"({passes:.3g} x {epoch / 1e6:,.2f}M tokens{also}) / ({rate:,.0f} tok/s x {a.train_gpus} GPUs)")
    put("04", "train_read_rate", all_gpus * per_token, f"{all_gpus * per_token / 1e9:.1f} GB/s from disk",
        f"{per_token:,} bytes x {rate:,.0f} tok/s x {a.train_gpus} GPUs")
    put("04", "checkpoint_bytes", ADAM * trained * (a.keep_checkpoints + 1), size(ADAM * trained * (a.keep_checkpoints + 1)),
        f"{ADAM} bytes x {trained / 1e6:,.0f}M x ({a.keep_checkpoints} kept + 1 being written)")
    bench = 2 * a.bench_levels * a.bench_prompts * a.bench_tokens / a.stream_rate / 3600
    put("05", "benchmark_hours", bench, f"under {hours(bench)}", f"2 variants x {a.bench_levels} levels x {a.bench_prompts} prompts "
        f"x {a.bench_tokens} tokens / {a.stream_rate:,.0f} tok/s, as if one stream at a time")
    weights, counted = target_bytes(c, a.target_config and a.target_config.parent)
    put("all", "target_bytes", weights, size(weights), f"{counted}; {weights / a.gpus / 1e9:.1f} GB on each of {a.gpus} GPUs")
    need = f["responses_bytes"] + f["states_on_disk"] + f["checkpoint_bytes"]
    put("all", "disk_bytes", need, size(need), "responses + hidden states + checkpoints (without the target)")

    problems = []
    if a.disk:
        free, there = disk_bytes(a.disk), bytes_there(*folders)
        f |= {"disk_free": free, "disk_there": there}
        if need - there > free:
            fitting = max(0, int((free + there - f["checkpoint_bytes"]) / ((f["responses_bytes"] + f["hidden_states_bytes"]) / N)))
            problems.append(f"disk: {size(need - there)} more are needed, {size(free)} are free at {a.disk}. {fitting:,} samples would fit"
                            + ("." if f["states_on_disk"] == f["hidden_states_bytes"] else ", or take a lower --max-disk-gb."))
    if weights / a.gpus > a.gpu_memory * 1e9 * 0.9:
        problems.append(f"target: {weights / a.gpus / 1e9:.1f} GB of weights on each of {a.gpus} GPUs leave no room for KV in {a.gpu_memory:g} GB. Use more GPUs.")
    return f, rows, problems


def check_known() -> bool:
    print(f"{'run':<42} {'figure':<20} {'known':>20} {'plan':>20}   off by")
    good = True
    for what, flags, known in KNOWN:
        found, _, _ = make_plan(build_parser().parse_args(flags))
        for key, value in known.items():
            off = found[key] / value - 1
            good &= abs(off) <= TOLERANCE
            print(f"{what:<42} {key:<20} {value:>20,.1f} {found[key]:>20,.1f}   {off:+.1%}")
    return good


def main(argv: list[str]) -> int:
    parser = build_parser()

    def fail(message):
        raise UserError(f"{message}. See --help.")

    parser.error = fail
    args, folders = parser.parse_args(argv), ()
    if args.config:
        document, found = read_run(args.config)
        parser.set_defaults(**found)
        args = parser.parse_args(argv)
        folders = {Path(document.get("run_dir", ".")), Path((document.get("train") or {}).get("output-dir", document.get("run_dir", ".")))}
    if args.known:
        return 0 if check_known() else 1
    for name in ("samples", "mean_length", "epochs", "max_steps", "batch_tokens", "ttt_steps", "gpus", "gpu_memory", "train_gpus", "gpu_tflops", "train_efficiency",
                 "train_rate", "extract_rate", "generate_rate", "count_rate", "stream_rate", "max_disk_gb"):
        value = getattr(args, name)
        if value is not None and min(value if isinstance(value, list) else [value]) <= 0:
            raise UserError(f"--{name.replace('_', '-')} {value} must be above 0.")
    if not 0 <= args.prompt_share <= 1 or not 0 <= args.val_ratio < 1 or args.samples * (1 - args.val_ratio) < 1:
        raise UserError("--prompt-share must lie in [0, 1], --val-ratio in [0, 1) and leave a sample to train on.")
    if args.unpacked and not args.train_rate:
        raise UserError("--unpacked: another trainer's speed is unknown here. Give --train-rate.")
    figures, rows, problems = make_plan(args, folders)
    if args.json:
        print(json.dumps({**figures, "problems": problems}))
        return 0
    for stage, what, figure, formula in rows:
        print(f"{stage:<4} {what:<20} {figure:>26}   {formula}")
    for problem in problems:
        print(f"does not fit | {problem}")
    if not problems:
        print(f"fits | {size(figures['disk_bytes'] - figures['disk_there'])} more are needed, {size(figures['disk_free'])} are free at "
              f"{args.disk}" if args.disk else "fits | no --disk given, so only the GPUs were looked at")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"{STAGE}: {error}", file=sys.stderr)
        sys.exit(2)
