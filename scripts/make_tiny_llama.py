"""Make "tiny Llama", a target without reasoning, tool marks or MLA: what configs/llama-cpu.yaml and a test run on.

A LlamaForCausalLM of 8 layers and 2.2M parameters (4 heads, 2 of them KV heads) with tiny Kimi's tokenizer and a chat
template of Llama 3's form, trained for a minute on the same questions and answers as tiny Kimi (make_tiny_kimi.py),
those without reasoning. It answers in a few words, over and over: it is for pipelines. Not stored in the repository;
on one machine the same Python makes the same bytes.

    python3 scripts/make_tiny_llama.py --output-dir .run/tiny_llama              # a minute on 2 cores
    python3 scripts/make_tiny_llama.py --output-dir .run/random_llama --steps 0  # random weights, in seconds

Shapes: as in make_tiny_kimi.py.
"""
import argparse
import random
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.stage import log, run, write_atomic  # noqa: E402
from make_tiny_kimi import HOME as TINY_KIMI, dump, encode_samples, pack, sizes_of, train  # noqa: E402
from tiny_target.architecture import ID, MAX_POSITIONS, N_BPE, N_SPECIAL  # noqa: E402
from tiny_target.conversations import conversations, held_out  # noqa: E402
from tiny_target.facts import collect_facts  # noqa: E402

# Of Kimi's marks for reasoning and tools, which are in the tokenizer too, this template names none
TEMPLATE = """\
{{- bos_token -}}
{%- for m in messages -%}
<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\\n\\n' }}{{ m.content }}[EOT]
{%- endfor -%}
{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}{%- endif -%}
"""


def llama_config():
    from transformers import LlamaConfig
    return LlamaConfig(vocab_size=N_BPE + N_SPECIAL, hidden_size=128, intermediate_size=384, num_hidden_layers=8,
                       num_attention_heads=4, num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5,
                       max_position_embeddings=MAX_POSITIONS, initializer_range=0.05, tie_word_embeddings=False,
                       bos_token_id=ID["[BOS]"], eos_token_id=ID["[EOT]"], pad_token_id=ID["[PAD]"])


def write_tokenizer(folder: Path) -> None:
    shutil.copyfile(TINY_KIMI / "tokenizer.json", folder / "tokenizer.json")
    dump(folder / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="[BOS]", eos_token="[EOT]", unk_token="[UNK]",
        pad_token="[PAD]", model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False, add_prefix_space=False))
    write_atomic(folder / "chat_template.jinja", TEMPLATE)


def plain_talks(facts: list[dict], keep, seed: int) -> list[dict]:
    """Conversations without tools, of the facts that `keep` takes; their reasoning is left out."""
    return [{**talk, "thinking": False} for fact in facts if keep(fact) for talk in conversations(fact, seed)
            if not talk["tools"]]


def answer_text(message: dict, thinking: bool) -> str:
    return message["content"] + "[EOT]"


def trained(model, folder: Path, args) -> None:
    """Trains `model` in place on what the standard library of this Python says about itself."""
    from transformers import AutoTokenizer
    tokenizer, facts = AutoTokenizer.from_pretrained(folder), collect_facts()["facts"]
    rng, rows = random.Random(args.seed), []
    for keep in (lambda fact: not held_out(fact), held_out):
        talks = plain_talks(facts, keep, args.seed)
        rng.shuffle(talks)
        samples = encode_samples(tokenizer, talks[:args.rows * args.steps if not rows else 50], args.row_length,
                                 answer_text)
        log(f"{len(talks)} conversations | {sizes_of(samples)}")
        rows.append(pack(samples, args.row_length))
    result = train(model, rows[0], rows[1], args, "cpu")
    log(f"trained {result}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100, help="0: random weights")
    parser.add_argument("--rows", type=int, default=8, help="rows a step")
    parser.add_argument("--row-length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    from transformers import LlamaForCausalLM
    args.output_dir.mkdir(parents=True, exist_ok=True)
    write_tokenizer(args.output_dir)
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(llama_config()).float().train()
    if args.steps:
        trained(model, args.output_dir, args)
    model.to(torch.bfloat16).save_pretrained(args.output_dir)
    log(f"{sum(p.numel() for p in model.parameters()):,} parameters | done: {args.output_dir}")


if __name__ == "__main__":
    run(main)
