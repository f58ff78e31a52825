"""Make "tiny Kimi", the target of the quickstart and the tests: of Kimi-K2.5's kind, in under 12 MB.

A KimiK25ForConditionalGeneration wrapper around a DeepSeek-V3 text model (MLA, sigmoid + noaux_tc routing over 8
experts, YaRN) of 8 layers and 5.8M parameters, and a byte-level BPE of 2,400 tokens followed by Kimi's special tokens
in Kimi's order. It is trained on what every CPython ships, its reference topics and the docstrings and short
functions of its standard library, cast as questions and answers in Kimi's turn format, thinking and instant, with
system messages, second turns and tool calls. 5 % of the subjects are held out. Its answers are readable and keep
their form; what they say about a name often belongs to another one. It is there to run pipelines on, not to be asked.

Writes into --output-dir (default: over the one in this repository): config.json, generation_config.json,
model.safetensors (bf16), tokenizer.json, tokenizer_config.json, chat_template.jinja, the processor SGLang wants and
card.json (held-out loss, sizes, versions, hardware); into --prompts: 2,300 prompts.

    # random weights, half a minute on a CPU
    python3 scripts/make_tiny_kimi.py --steps 0 --output-dir .run/random_kimi --prompts .run/prompts.jsonl
    python3 scripts/make_tiny_kimi.py --facts facts.json --write-facts   # read the standard library once, here ...
    python3 scripts/make_tiny_kimi.py --facts facts.json --minutes 2     # ... train on a GPU elsewhere

Needs torch, transformers >= 5 and tokenizers. The same --facts give the same tokenizer, prompts and samples on any
machine. Shapes: B rows, T tokens of a row, H hidden, V vocabulary.
"""
import argparse
import collections
import json
import math
import platform
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.stage import UserError, log, run  # noqa: E402
from tiny_target.architecture import (ID, MAX_POSITIONS, N_BPE, N_SPECIAL, SPECIALS, build_model,  # noqa: E402
                                      text_config, use_serving_norms, vision_tensors, wrapper_config)
from tiny_target.conversations import conversations, exchange, held_out, make_prompts  # noqa: E402
from tiny_target.facts import collect_facts  # noqa: E402

HOME = Path(__file__).resolve().parent / "tiny_kimi"
MAX_BYTES = 12_000_000
WRITTEN_BY_HAND = ("chat_template.jinja", "kimi_k25_processor.py", "processor_config.json", "preprocessor_config.json")


# ---- tokens ----
def train_tokenizer(facts: list[dict]):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    texts = []
    for fact in facts:
        if not held_out(fact):
            texts += [*fact.get("chunks", [fact["doc"] or ""]), fact.get("source") or "",
                      *(exchange(fact, "what", random.Random(0)) or [])[:2]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=N_BPE, initial_alphabet=alphabet,
                                                             show_progress=False))
    # As in Kimi's tokenizer, think and tool marks survive skip_special_tokens: parsers of the text need them.
    tokenizer.add_tokens([AddedToken(name, special="think" not in name and "tool_call" not in name, normalized=False)
                          for name in SPECIALS])
    assert [tokenizer.token_to_id(name) for name in SPECIALS] == list(range(N_BPE, N_BPE + N_SPECIAL))
    return tokenizer


def response_text(message: dict, thinking: bool) -> str:
    """What the model emits for an assistant message after the prompt that ends in `<think>` or `<think></think>`."""
    calls = "".join(f"<|tool_call_begin|>{call['id']}<|tool_call_argument_begin|>{call['function']['arguments']}"
                    "<|tool_call_end|>" for call in message.get("tool_calls", []))
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    reasoning = message["reasoning_content"] + "</think>" if thinking else ""
    return reasoning + message["content"] + section + "<|im_end|>"


def encode_samples(tokenizer, talks: list[dict], max_length: int, respond=response_text) -> list[tuple[list, list]]:
    """(prompt ids, response ids) of every assistant message, the prompt exactly as serving renders it.

    respond: (message, thinking) -> the text of what the model emits.

    Longer ones are left out.
    """
    prompts, responses = [], []
    for talk in talks:
        for i, message in enumerate(talk["messages"]):
            if message["role"] == "assistant":
                prompts.append(tokenizer.apply_chat_template(
                    talk["messages"][:i], tools=talk["tools"], thinking=talk["thinking"], add_generation_prompt=True,
                    tokenize=False))
                responses.append(respond(message, talk["thinking"]))
    batches = [tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
               for texts in (prompts, responses)]
    return [pair for pair in zip(*batches) if len(pair[0]) + len(pair[1]) <= max_length]


def pack(samples: list, T: int) -> tuple:
    """Rows of T tokens, next fit: ids, positions, sample number, learned; each (rows, T).

    Positions count from 0 in each sample; sample number -1: padding; learned: a response token.
    """
    rows, room = [], 0
    for prompt, response in samples:
        if room < len(prompt) + len(response):
            rows.append(([], [], [], []))
            room = T
        ids, positions, owner, learned = rows[-1]
        n, number = len(prompt) + len(response), (owner[-1] + 1 if owner else 0)
        ids += prompt + response
        positions += range(n)
        owner += [number] * n
        learned += [False] * len(prompt) + [True] * len(response)
        room -= n

    def pad(column, value):
        return torch.tensor([row[column] + [value] * (T - len(row[column])) for row in rows])

    return pad(0, ID["[PAD]"]), pad(1, 0), pad(2, -1), pad(3, False)


# ---- training ----
def row_loss(model, ids, positions, owner, learned):
    """Summed cross-entropy and number of the response tokens in rows (B, T), each sample attending only to itself."""
    T = ids.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
    mask = (owner[:, None, :, None] == owner[:, None, None, :]) & causal  # (B, 1, T, T)
    hidden = model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1]).float()  # position p predicts token p+1
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    return (loss * learned[:, 1:]).sum(), learned[:, 1:].sum()


@torch.no_grad()
def held_out_loss(model, data, B: int, device: str, autocast: bool) -> float:
    model.eval()
    total = torch.zeros(2, device=device)
    for i in range(0, len(data[0]), B):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            sums = row_loss(model, *(column[i:i + B].to(device) for column in data))
            total += torch.stack([value.float() for value in sums])
    model.train()
    return (total[0] / total[1]).item()


@torch.no_grad()
def balance_experts(model) -> None:
    """The router's bias follows the load of the step (noaux_tc)."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            load = layer.mlp.experts.load
            layer.mlp.gate.e_score_correction_bias += 1e-3 * (load.mean() - load).sign()
            load.zero_()


def learning_rate(peak: float, done: float) -> float:
    """Warm-up over 2 % of the training, then a cosine down to 2 % of the peak."""
    return peak * min(1.0, (done + 1e-3) / 0.02) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(model, data, validation, args, device: str) -> dict:
    """AdamW, cosine over --steps or --minutes of wall clock.

    Ends with the weights that did best on the held-out subjects, which are the last ones unless the model has begun
    to learn by heart.
    """
    decay = [p for p in model.parameters() if p.dim() >= 2]
    scales = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95), fused=True)
    order, generator = [], torch.Generator().manual_seed(args.seed)
    began, step, done, seen, next_check, best = time.monotonic(), 0, 0.0, 0, 0.1, (math.inf, None)
    while done < 1.0:
        if len(order) < args.rows:
            order += torch.randperm(len(data[0]), generator=generator).tolist()
        rows, order = order[:args.rows], order[args.rows:]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args.lr, done)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            total, count = row_loss(model, *(column[rows] for column in data))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance_experts(model)
        step, seen = step + 1, seen + len(rows) * data[0].shape[1]
        if step % 10 == 0 or args.steps:
            loss = (total / count).item()  # waits for the device, so that the clock below is an honest one
        elapsed = time.monotonic() - began
        done = min(1.0, step / args.steps if args.steps else elapsed / (60 * args.minutes))
        if step % 100 == 0:
            log(f"step {step} | done {done:.0%} | loss {loss:.3f} | lr {optimizer.param_groups[0]['lr']:.1e} | "
                f"{seen / elapsed:,.0f} tok/s")
        if done >= next_check or done == 1.0:
            next_check += 0.1
            value = held_out_loss(model, validation, args.rows, device, device == "cuda")
            log(f"step {step} | held-out loss {value:.4f}")
            if value < best[0]:
                best = value, {name: tensor.clone() for name, tensor in model.state_dict().items()}
                best_step = step
    model.load_state_dict(best[1])
    return dict(steps=step, kept_step=best_step, tokens_seen=seen, seconds=round(time.monotonic() - began, 1))


# ---- artifacts ----
def dump(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_static_files(folder: Path, tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    dump(folder / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token="[BOS]", eos_token="<|im_end|>", unk_token="[UNK]",
        pad_token="[PAD]", model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False, add_prefix_space=False))
    for name in WRITTEN_BY_HAND if folder.resolve() != HOME else ():
        shutil.copyfile(HOME / name, folder / name)
    dump(folder / "config.json", wrapper_config())
    dump(folder / "generation_config.json", dict(eos_token_id=ID["<|im_end|>"], pad_token_id=ID["[PAD]"],
                                                 max_length=MAX_POSITIONS))


def write_weights(model, folder: Path) -> tuple:
    """model.safetensors with the hub's names -> (a model read back from it, the largest difference of its logits).

    It is read into an untouched DeepseekV3ForCausalLM: logits must be equal.
    """
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3ForCausalLM
    with tempfile.TemporaryDirectory() as temporary:
        for name, tensor in model.state_dict().items():
            if "e_score_correction_bias" not in name:  # float32 in Kimi's checkpoint too
                tensor.copy_(tensor.to(torch.bfloat16).float())  # the model now computes with what is saved
        model.save_pretrained(temporary)
        text = load_file(f"{temporary}/model.safetensors")
        text = {name: tensor if "e_score_correction_bias" in name else tensor.to(torch.bfloat16)
                for name, tensor in text.items()}
        save_file(text, f"{temporary}/model.safetensors", metadata={"format": "pt"})
        dump(Path(temporary) / "config.json", text_config())
        stock = DeepseekV3ForCausalLM.from_pretrained(temporary, dtype=torch.float32, attn_implementation="sdpa")
        stock.to(model.device).eval()
    use_serving_norms(stock)
    generator = torch.Generator(model.device).manual_seed(0)
    ids = torch.randint(0, N_BPE, (2, 64), device=model.device, generator=generator)
    with torch.no_grad():
        difference = (stock(ids).logits - model.eval()(ids).logits).abs().max().item()
    if not difference < 1e-3:
        raise RuntimeError(f"the exported weights give other logits than the trained model (by {difference}).")
    tensors = {f"language_model.{name}": tensor for name, tensor in text.items()}
    tensors |= vision_tensors(wrapper_config()["vision_config"])
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return stock, difference


def sizes_of(samples: list) -> dict:
    return dict(answers=len(samples), answer_tokens=sum(len(response) for _, response in samples),
                tokens=sum(len(prompt) + len(response) for prompt, response in samples))


def card_of(model, collected: dict, splits: dict, prompts: list, training: dict, loss, difference: float) -> dict:
    """card.json: what this target is made from."""
    import tokenizers
    import transformers
    facts, ids = collected["facts"], collections.Counter(row["id"][0] for row in prompts)
    return dict(
        model="tiny Kimi: Kimi-K2.5's architecture and turn format, trained by scripts/make_tiny_kimi.py; made for "
              "tests, its answers are not to be relied on",
        parameters=sum(p.numel() for p in model.parameters()), held_out_loss_per_answer_token=loss and round(loss, 4),
        corpus=dict(python=collected["python"], facts=len(facts), facts_held_out=sum(map(held_out, facts)),
                    **{name: sizes_of(samples) for name, samples in splits.items()}),
        prompts=dict(trained_subjects=ids["t"], held_out_subjects=ids["h"],
                     ids="t-... trained, h-... held out; the phrasing of a t- prompt need not have been trained on"),
        training=training, export_logit_difference=difference,
        versions=dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__,
                      tokenizers=tokenizers.__version__))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=HOME)
    parser.add_argument("--prompts", type=Path, default=HOME.parent.parent / "configs/quickstart_prompts.jsonl",
                        help="where the quickstart's prompts go")
    parser.add_argument("--facts", type=Path,
                        help="corpus facts, from a run with --write-facts (default: read this Python's library)")
    parser.add_argument("--write-facts", action="store_true", help="write --facts and stop")
    parser.add_argument("--minutes", type=float, default=2.0, help="training time by the wall clock")
    parser.add_argument("--steps", type=int, help="train so many steps instead; 0: random weights")
    parser.add_argument("--rows", type=int, default=32, help="rows a step")
    parser.add_argument("--row-length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.facts is None and args.write_facts or args.facts and not args.write_facts and not args.facts.is_file():
        raise UserError(f"--facts {args.facts}: name the file to write or an existing one to read.")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # 1. the corpus
    if args.write_facts or args.facts is None:
        collected = collect_facts()
    else:
        collected = json.loads(args.facts.read_text())
    if args.write_facts:
        args.facts.write_text(json.dumps(collected))
        return log(f"{len(collected['facts'])} facts of Python {collected['python']} | done: {args.facts}")
    facts = collected["facts"]
    log(f"{len(facts)} facts of Python {collected['python']}, {sum(map(held_out, facts))} held out")

    # 2. tokenizer and everything that needs no training
    args.output_dir.mkdir(parents=True, exist_ok=True)
    prompts = make_prompts(facts, args.seed)
    write_static_files(args.output_dir, train_tokenizer(facts))
    args.prompts.write_text("".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
                                    for row in prompts))
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)

    # 3. samples in packed rows
    rng, splits = random.Random(args.seed), {}
    for name, keep in (("train", lambda fact: not held_out(fact)), ("held_out", held_out)):
        chosen = [fact for fact in facts if keep(fact)] if args.steps != 0 else []
        talks = [talk for fact in chosen for talk in conversations(fact, args.seed)]
        splits[name] = encode_samples(tokenizer, talks, args.row_length)
        rng.shuffle(splits[name])
        sizes = sizes_of(splits[name])
        log(f"{name}: {len(talks)} conversations, {sizes['answers']} answers, {sizes['answer_tokens']:,} answer tokens "
            f"of {sizes['tokens']:,}")

    # 4. training
    torch.manual_seed(args.seed)
    model = build_model(device, args.dropout).train()
    result, loss = dict(steps=0), None
    if args.steps != 0:
        rows, validation = pack(splits["train"], args.row_length), pack(splits["held_out"], args.row_length)
        result = train(model, [column.to(device) for column in rows], validation, args, device)

    # 5. export, then measure what was exported
    stock, difference = write_weights(model, args.output_dir)
    if args.steps != 0:
        loss = held_out_loss(stock, validation, args.rows, device, False)
        for prompt, _ in splits["held_out"][:3]:
            output = stock.generate(torch.tensor([prompt], device=device), max_new_tokens=120, do_sample=False)
            log(f"sample: {tokenizer.decode(output[0])!r}")
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    training = dict(**result, seed=args.seed, lr=args.lr, dropout=args.dropout, rows=args.rows,
                    row_length=args.row_length, hardware=hardware)
    dump(args.output_dir / "card.json", card_of(model, collected, splits, prompts, training, loss, difference))
    size = sum(path.stat().st_size for path in args.output_dir.iterdir() if path.is_file())
    if size > MAX_BYTES:
        raise RuntimeError(f"{args.output_dir} holds {size:,} bytes, more than {MAX_BYTES:,}.")
    log(f"held-out loss {loss} | {size:,} bytes | done: {args.output_dir}")


if __name__ == "__main__":
    run(main)
