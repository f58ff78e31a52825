"""What preflight looks at in the target's folder: config, shards, tensors, token ids, template, stop tokens.

Each check takes the run file and adds findings.
"""
from __future__ import annotations

import re
from pathlib import Path

from eagle3.findings import Findings, one_line, role, whole
from eagle3.stage import UserError, read_json
from eagle3.target import TENSORS, Target, layer_rule, text_config
from eagle3.tokens import as_ids, load_tokenizer, token_id
from eagle3.turn_tokens import is_one_id

KIMI_IDS = {"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588,
            "<|im_system|>": 163594, "<|tool_calls_section_begin|>": 163595, "<|tool_calls_section_end|>": 163596,
            "<|tool_call_begin|>": 163597, "<|tool_call_argument_begin|>": 163598, "<|tool_call_end|>": 163599,
            "<|im_middle|>": 163601, "<think>": 163606, "</think>": 163607, "[PAD]": 163839}
KIMI_VOCABULARY = 163840
TOKEN_FLAGS = {"generate": ("stop-token", "think-tokens", "tool-tokens"), "build_vocab": ("special-tokens",)}
OTHER_TOKENIZER = "use the tokenizer that came with the target"
OTHER_TEMPLATE = "download chat_template.jinja of the target"


def check_target(run_file: dict, found: Findings, sglang: str | None) -> dict | None:
    """The text config, if it can be read.

    Findings: shards that are missing or cut short, tensors that are missing or quantised, what the run file asks of a
    smaller target, and layers that no ids of a drafter's name to the release that serves it (sglang: the one here).
    """
    folder = Path(str(run_file["target"]))
    try:
        config = text_config(folder)
        layers, vocab = (whole(config, key, -1) for key in ("num_hidden_layers", "vocab_size"))
        if min(layers, vocab) < 1:
            raise ValueError("no num_hidden_layers or vocab_size above 0")
    except (UserError, ValueError, AttributeError) as error:
        return found.add(f"no readable config.json of a target ({one_line(error)})", folder,
                         "set `target` in the run file to the model's folder")
    try:
        check_tensors(Target(folder), found)
    except UserError as error:
        found.add(str(error), folder, "download the target's files again")
    wanted = str(role(run_file, "extract")["env"].get("EAGLE3_CAPTURE_LAYERS", ""))
    numbers, train = [int(layer) for layer in re.findall(r"-?\d+", wanted)], run_file["train"]
    if any(not 0 < layer < layers for layer in numbers):
        found.add(f"capture layers {wanted}, the target has {layers}", "servers.extract.env",
                  f"name layers from 1 to {layers - 1}")
    elif numbers and (version := train.get("serve-sglang-version") or sglang):
        try:
            layer_rule(folder, str(version), train.get("layer-id-rule")).ids(numbers)
        except UserError as error:
            what, remedy = str(error).split(". ", 1)
            found.add(what, "train", remedy)
    draft_vocab = whole(run_file["build_vocab"], "draft-vocab-size", 0)
    if draft_vocab > vocab:
        found.add(f"draft vocabulary {draft_vocab}, the target's is {vocab}", "build_vocab",
                  f"set draft-vocab-size to at most {vocab}")
    return config


def check_tensors(target: Target, found: Findings) -> None:
    """Every shard is whole, and the three tensors that 04 reads are there as floats."""
    from safetensors import SafetensorError, safe_open

    damaged = set()
    for name in sorted(set(map(str, target.files.values()))):
        try:
            with safe_open(target.folder / name, "np"):
                pass  # its header is whole, and so long is the file
        except FileNotFoundError:
            damaged.add(name)
            found.add("missing, though the index names it", target.folder / name, "download that file")
        except (OSError, SafetensorError) as error:
            damaged.add(name)
            found.add(f"damaged or cut short ({one_line(error)})", target.folder / name, "download that file again")
    for what in TENSORS:
        try:
            if target.files.get(target.name(what)) not in damaged:
                target.place(what)
        except UserError as error:
            found.add(str(error).removeprefix(f"{target.folder}: "), target.folder,
                      "04 needs it in bf16, fp16 or fp32: use a checkpoint that keeps it so")


def is_kimi(folder: Path) -> bool:
    """Whether this is Kimi-K2 or K2.5, bare or in its wrapper."""
    try:
        return str(read_json(folder / "config.json").get("model_type")).startswith("kimi_k2")
    except UserError:
        return False


def check_tokenizer(run_file: dict, found: Findings, config: dict) -> None:
    """Tokens that a turn is made of are one id each, turns can be rendered, and generation ends where a turn does.

    Of Kimi these are Kimi's, and in its vocabulary the ids are its own; of other targets those that the run file names.
    """
    folder, target = Path(str(run_file["generate"].get("tokenizer") or run_file["target"])), Path(
        str(run_file["target"]))
    trust, kimi = bool(run_file["generate"].get("trust-remote-code")), is_kimi(target)
    try:
        tokenizer = load_tokenizer(folder, trust)
    except UserError as error:
        return found.add(str(error).removeprefix(f"{folder}: "), folder, "download the tokenizer's files"
                         + ("" if trust or not kimi else "; Kimi's needs generate.trust-remote-code: true"))
    for name in KIMI_IDS if kimi else named_tokens(run_file):
        at = token_id(tokenizer, name)
        if not is_one_id(tokenizer, name):
            found.add(f"{name} is not one id", folder, OTHER_TOKENIZER)
        elif kimi and config.get("vocab_size") == KIMI_VOCABULARY and at != KIMI_IDS[name]:
            found.add(f"{name} is {at}, in Kimi-K2.5 it is {KIMI_IDS[name]}", folder, OTHER_TOKENIZER)
    check_template(tokenizer, folder, kimi, found)
    end = "<|im_end|>" if kimi else end_of_turn(tokenizer)
    check_stops(target, end, token_id(tokenizer, end) if end else None, found)


def named_tokens(run_file: dict) -> list[str]:
    """Those that the run file names itself."""
    values = [run_file[section].get(key) or [] for section, keys in TOKEN_FLAGS.items() for key in keys]
    return list(dict.fromkeys(str(name) for value in values for name in
                              (value if isinstance(value, list) else [value])))


def check_template(tokenizer, folder: Path, kimi: bool, found: Findings) -> None:
    """It renders a question, with thinking on and off; Kimi's to Kimi's turns."""
    for thinking in (True, False):
        try:
            shown = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True,
                                                  tokenize=False, thinking=thinking)
        except Exception as error:  # jinja, or a tokenizer without a template
            return found.add(f"the chat template fails ({one_line(error)[:160]})", folder, OTHER_TEMPLATE)
        wanted = "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
        wanted += "" if thinking else "</think>"
        if kimi and not shown.endswith(wanted):
            found.add(f"the template writes {shown!r}, expected ...{wanted!r} (thinking {'on' if thinking else 'off'})",
                      folder, OTHER_TEMPLATE)


def end_of_turn(tokenizer) -> str | None:
    """The token that the template writes behind an answer; None where it writes none."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, yes"}]
    try:
        behind = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("well, yes")[2]
    except Exception:  # a template that cannot do this is no template that fails: check_template has said so
        return None
    ids = as_ids(tokenizer.encode(behind, add_special_tokens=False)) if behind.strip() else []
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    return next((tokenizer.convert_ids_to_tokens(token) for token in ids if token in special), None)


def check_stops(target: Path, name: str | None, end: int | None, found: Findings) -> None:
    """What ends a turn ends generation."""
    path = target / "generation_config.json"
    if not path.exists():
        return  # SGLang then takes config.json's
    try:
        stops = read_json(path).get("eos_token_id")
    except UserError as error:
        return found.add(str(error), path, "download that file again")
    if end is not None and end not in (stops if isinstance(stops, list) else [stops]):
        found.add(f"generation stops at {stops}, {name} is {end}", path,
                  "add it to eos_token_id, or answers will run on past the end of their turn", "warning")
