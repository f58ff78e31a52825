"""Make a target of Kimi-K2.5's true width, and answers of it: what scripts/rehearse.sh runs on.

    python3 scripts/make_wide_kimi.py --config configs/rehearsal.yaml              # 12.7 GB, in the run file's folders
    python3 scripts/make_wide_kimi.py --config configs/rehearsal-toy.yaml --toy    # a width of 256: 0.2 GB, for a CPU

The target: 8 layers and 8 experts, Kimi's wrapper, vocabulary, YaRN, MLA sizes and a slow tokenizer of its kind
(tests/kimi_tokenizer), bf16, one safetensors file a layer. Weights are random, yet it is no noise: lm_head's row of
token n+1 is the embedding of n, in circles of 64 tokens, and what the layers add to the stream stays about as large
as the embedding in it. So every activation is finite, each greedy answer is known beforehand, and answers can be
written down without asking anyone: the stored states must reproduce them (03 --verify, 04), and a drafter has
something to learn.

The answers are a finished responses/ folder: log-normal lengths with mean 1,730, cut at 4,096 (--longest scales
both), a third of each is prompt. The same flags give the same bytes on the same kind of device. What is complete
already is left alone.
"""
import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.stage import UserError, read_run_file, run, sha256_file, write_manifest  # noqa: E402
from eagle3.tokens import tokenizer_hash  # noqa: E402
from tiny_target.architecture import vision_tensors, wrapper_config  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "scripts/tiny_kimi"
CIRCLE = 64  # tokens; 163,584 of them are no special tokens: 2,556 circles
ORDINARY, VOCABULARY = 163584, 163840
GAIN = 0.3   # of what a layer's attention or MLP adds, over the size of the embedding in the stream
WIDE = dict(hidden_size=7168, num_attention_heads=64, num_key_value_heads=64, q_lora_rank=1536, kv_lora_rank=512,
            qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, intermediate_size=18432,
            moe_intermediate_size=2048, max_position_embeddings=262144)
TOY = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=96,
           qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, intermediate_size=512, moe_intermediate_size=64,
           max_position_embeddings=262144)


def config_of(sizes: dict) -> dict:
    """Tiny Kimi's config (8 layers, 8 experts) at these sizes, with Kimi-K2.5's ids and YaRN."""
    config = wrapper_config()
    ids = dict(bos_token_id=163584, eos_token_id=163586, pad_token_id=163839)
    yarn = dict(type="yarn", factor=64.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
                mscale=1.0, mscale_all_dim=1.0)
    config["text_config"] |= dict(sizes, **ids, vocab_size=VOCABULARY, rope_scaling=yarn)
    config["vision_config"]["text_hidden_size"] = sizes["hidden_size"]
    return {**config, **ids, "media_placeholder_token_id": 163605}


def followers(vocab: int) -> torch.Tensor:
    """(Vt,) the token that the target emits after each one: the next in its circle of CIRCLE."""
    token = torch.arange(vocab)
    return token - token % CIRCLE + (token + 1) % CIRCLE


def layer_tensors(c: dict, layer: int, draw) -> dict[str, torch.Tensor]:
    """Weights of one layer; draw(rows, columns, gain) is normal with unit output for unit input, times gain."""
    H, heads, prefix = c["hidden_size"], c["num_attention_heads"], f"language_model.model.layers.{layer}."
    q, kv = c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    weights = {"self_attn.q_a_proj": (q, H), "self_attn.q_b_proj": (heads * (nope + rope), q),
               "self_attn.kv_a_proj_with_mqa": (kv + rope, H), "self_attn.kv_b_proj": (heads * (nope + v), kv),
               "self_attn.o_proj": (H, heads * v)}

    def mlp(name, inner):
        for part, shape in (("gate", (inner, H)), ("up", (inner, H)), ("down", (H, inner))):
            weights[f"mlp.{name}{part}_proj"] = shape

    if layer < c["first_k_dense_replace"]:
        mlp("", c["intermediate_size"])
    else:
        for expert in range(c["n_routed_experts"]):
            mlp(f"experts.{expert}.", c["moe_intermediate_size"])
        mlp("shared_experts.", c["moe_intermediate_size"])
        weights["mlp.gate"] = (c["n_routed_experts"], H)
    tensors = {f"{prefix}{name}.weight": draw(*shape, GAIN if name.endswith(("o_proj", "down_proj")) else 1.0)
               for name, shape in weights.items()}
    if "mlp.gate" in weights:
        bias = torch.zeros(c["n_routed_experts"], dtype=torch.float32)
        tensors[prefix + "mlp.gate.e_score_correction_bias"] = bias
    for name, width in (("input_layernorm", H), ("post_attention_layernorm", H), ("self_attn.q_a_layernorm", q),
                        ("self_attn.kv_a_layernorm", kv)):
        tensors[f"{prefix}{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    return tensors


def write_target(folder: Path, config: dict, device: str) -> None:
    """model.safetensors.index.json is written last: it means that the target is complete."""
    c, began, index = config["text_config"], time.monotonic(), {}
    generator = torch.Generator(device).manual_seed(0)
    H, V, count = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"] + 2

    def draw(rows, columns, gain=1.0):
        drawn = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.mul_(gain * columns ** -0.5)

    def write(number, tensors):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, folder / name, {"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    embed = draw(V, H, H ** 0.5)  # entries of size 1: the stream's scale
    write(1, {"language_model.model.embed_tokens.weight": embed, **vision_tensors(config["vision_config"])})
    head = torch.empty_like(embed)
    head[followers(V).to(device)] = embed * (25 / H)  # row of what follows n: the embedding of n; its logit is about 18
    write(count, {"language_model.lm_head.weight": head,
                  "language_model.model.norm.weight": torch.ones(H, dtype=torch.bfloat16)})
    del embed, head
    for layer in range(c["num_hidden_layers"]):
        write(layer + 2, layer_tensors(c, layer, draw))
    total = sum((folder / name).stat().st_size for name in set(index.values()))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}) + "\n")
    print(f"target: {count} files, {total / 1e9:.1f} GB in {time.monotonic() - began:.0f} s on {device}: {folder}",
          flush=True)


def write_small_files(folder: Path, config: dict) -> None:
    subprocess.run([sys.executable, str(ROOT / "tests/kimi_tokenizer/make.py"), str(folder)], check=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    stops = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(stops) + "\n")
    processor = (TINY / "kimi_k25_processor.py").read_text()
    (folder / "kimi_k25_processor.py").write_text(
        processor.replace("from_pretrained(path)", "from_pretrained(path, trust_remote_code=True)"))
    for name in ("preprocessor_config.json", "processor_config.json"):
        shutil.copyfile(TINY / name, folder / name)


def samples(count: int, longest: int, draft_vocab: int, follows: np.ndarray):
    """(prompt ids, response ids) of each sample.

    Prompts jump to another circle every 16 tokens; responses are what the target emits.
    """
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(math.log(1730) - 0.6**2 / 2, 0.6, count), 4096) * longest / 4096
    few_enough = max(1, int(0.95 * draft_vocab) // CIRCLE)  # for the draft vocabulary
    circles = rng.permutation(ORDINARY // CIRCLE)[:few_enough]
    for length in np.maximum(lengths, 24).astype(int):
        n_prompt = int(length) // 3
        prompt = []
        while len(prompt) < n_prompt:
            token = int(rng.choice(circles)) * CIRCLE + int(rng.integers(CIRCLE))
            for _ in range(16):
                prompt.append(token)
                token = int(follows[token])
        prompt = prompt[:n_prompt]
        response, token = [], prompt[-1]
        while len(response) < length - n_prompt:
            response.append(token := int(follows[token]))
        yield prompt, response


def write_responses(folder: Path, target: Path, rows: list) -> None:
    """As 01_generate.py leaves it, manifest.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "part-00000.jsonl"
    with open(part, "w") as file:
        for number, (prompt, response) in enumerate(rows):
            row = {"id": f"r{number:05d}-t0", "source": "rehearsal", "messages": [], "reasoning": None, "content": "",
                   "tool_calls": [], "finish_reason": "length", "model": target.name, "provider": "none",
                   "usage": None, "prompt_ids": prompt, "response_ids": response, "ids_source": "server", "flags": []}
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    write_manifest(folder, "01_generate", config={"rehearsal": True}, inputs={"tokenizer": tokenizer_hash(target)},
                   counts={"kept": len(rows), "dropped": {}}, files={part.name: sha256_file(part)}, versions={})


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True,
                        help="run file: target, generate.output-dir, build_vocab.draft-vocab-size")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest sample")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    run_file = read_run_file(args.config)
    target, responses = Path(run_file["target"]), Path(run_file["generate"]["output-dir"])
    config = config_of(TOY if args.toy else WIDE)
    if not (target / "model.safetensors.index.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        write_small_files(target, config)
        write_target(target, config, args.device)
    if (responses / "manifest.json").exists():
        there = json.loads((responses / "manifest.json").read_text())["counts"]["kept"]
        if there != args.samples:
            raise UserError(f"{responses} holds {there} samples, --samples says {args.samples}. Take {there}, or "
                            f"remove {run_file['run_dir']}.")
    else:
        rows = list(samples(args.samples, args.longest, run_file["build_vocab"]["draft-vocab-size"],
                            followers(VOCABULARY).numpy()))
        write_responses(responses, target, rows)
        print(f"responses: {len(rows)} samples, {sum(len(p) + len(r) for p, r in rows):,} tokens: {responses}",
              flush=True)


if __name__ == "__main__":
    run(main)
