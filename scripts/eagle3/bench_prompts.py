"""What a benchmark sends: prompts from JSONL files, a responses/ folder or a public data set, as token ids."""
from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Iterator, Mapping

from eagle3.contexts import Padding, context_tokens, texts_of_files, texts_of_rows
from eagle3.responses import part_files, read_jsonl
from eagle3.stage import UserError, log
from eagle3.target import text_config
from eagle3.tokens import load_tokenizer

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "bench_prompts"
# name -> (dataset on the hub, configuration, split, column with the question or the list of turns)
DATASETS = {
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
    "gsm8k": ("openai/gsm8k", "main", "test", "question"),
    "humaneval": ("openai/openai_humaneval", None, "test", "prompt"),
    "math-500": ("HuggingFaceH4/MATH-500", None, "test", "problem"),
}
WITHOUT_VALIDATION = 64  # prompts of each source
ROOM_OF_TEXT = 20  # characters kept to pad with, for each token of the longest --context
FORMS = ("prompt_ids", "messages", "prompt", "turns")  # of a row; the first one that is there counts
CHECKS = ("answer", "tests", "entry_point")  # of a row: what its answer is held against (answers.py)
CHECK_COLUMNS = {"gsm8k": {"answer": "answer"}, "humaneval": {"tests": "test", "entry_point": "entry_point"}}


def load_prompts(args: argparse.Namespace, tokenizer_path: str) -> list[dict]:
    """[{"id", "source", "thinking", "prompt_ids"}] of --prompts, --dataset, --ids, --limit, --thinking and --context.

    Where a row makes several prompts, each has the row's id as its "question".
    With --context also "context", and the prompts of one length stand together; with several turns (--turns) also
    "turns", the later questions, and "messages"; with --check-answers also "check", of rows that have one.
    The tokenizer is loaded only when something has to be rendered. Raises UserError.
    """
    rows, others = wanted_rows(args)
    tokenizer = None
    if args.context or any("prompt_ids" not in row for row in rows):
        tokenizer = load_tokenizer(tokenizer_path, args.trust_remote_code)
    if args.context:
        padding = Padding(texts_of_files(args.context_text) if args.context_text else texts_of_rows(others),
                          lambda text: tokenizer.encode(text, add_special_tokens=False))
        prompts = [prompt for name in args.context for prompt in padded_prompts(rows, name, padding, args, tokenizer)]
    else:
        prompts = [prompt for row in rows for prompt in prompts_of_row(row, args, tokenizer)]
    name, times = Counter(name for prompt in prompts for name in request_ids(prompt)).most_common(1)[0]
    if times > 1:
        raise UserError(f"prompts: the id {name!r} stands more than once. "
                        "Ids must differ over all --prompts and --dataset.")
    longer = sum(len(row.get("turns") or ()) > args.turns for row in rows)
    if longer:
        log(f"note: {longer} of {len(rows)} prompts have more turns; asked: {args.turns} (--turns)")
    return prompts


def messages_of(row: dict) -> list[dict]:
    """Of a row's first question. Raises UserError."""
    if "turns" in row and not (isinstance(row["turns"], list) and row["turns"]
                               and all(isinstance(turn, str) and turn.strip() for turn in row["turns"])):
        raise UserError(f"prompts of {row['source']}: the `turns` of {row['id']!r} must be a list of texts, a question "
                        "each.")
    return row.get("messages") or [{"role": "user", "content": row["prompt"] if "prompt" in row else row["turns"][0]}]


def prompts_of_row(row: dict, args: argparse.Namespace, tokenizer) -> Iterator[dict]:
    """One a mode; a row's own ids as they are. Raises UserError."""
    about = {"id": row["id"], "source": row["source"], **check_of(row, args)}
    if "prompt_ids" in row:
        yield {**about, "thinking": "recorded", "prompt_ids": row["prompt_ids"]}
        return
    messages = messages_of(row)
    for mode in args.thinking:
        suffix = f"@{mode}" if len(args.thinking) > 1 else ""
        ids = render(tokenizer, {**row, "messages": messages}, mode)
        yield {**about, **question_of(row, args), "id": row["id"] + suffix, "thinking": mode, "prompt_ids": ids,
               **later_turns(row, messages, args)}


def later_turns(row: dict, messages: list[dict], args: argparse.Namespace) -> dict:
    later = (row.get("turns") or ())[1:args.turns]
    return {"turns": later, "messages": messages} if later else {}


def question_of(row: dict, args: argparse.Namespace) -> dict:
    return {"question": row["id"]} if len(args.thinking) * max(1, len(args.context)) > 1 else {}


def check_of(row: dict, args: argparse.Namespace) -> dict:
    found = {key: row[key] for key in CHECKS if args.check_answers and key in row}
    return {"check": found | ({"prompt": row["prompt"]} if "prompt" in row else {})} if found else {}


def padded_prompts(rows: list[dict], name: str, padding: Padding, args: argparse.Namespace, tokenizer) -> list[dict]:
    """The rows' prompts at one length of --context; those that are longer are left out. Raises UserError."""
    tokens, prompts, longer = context_tokens(name), [], 0
    for number, row in enumerate(rows):
        if not row.keys() & {"messages", "prompt", "turns"}:
            raise UserError(f"prompts of {row['source']}: {row['id']!r} has only prompt_ids, which cannot be padded. "
                            "Name prompts with `messages` or `prompt`, or leave out --context.")
        messages = messages_of(row)
        for which, mode in enumerate(args.thinking):
            start = int((number + which / len(args.thinking)) * len(padding.texts) / len(rows))
            found = padding.padded(messages, start, tokens,
                                   lambda padded: render(tokenizer, {**row, "messages": padded}, mode))
            if not found:
                longer += 1
                continue
            suffix = f"@{mode}" if len(args.thinking) > 1 else ""
            prompts.append({"id": f"{row['id']}{suffix}@{name}", "source": row["source"], "thinking": mode,
                            "prompt_ids": found[1], "context": name, **question_of(row, args),
                            **check_of(row, args), **later_turns(row, found[0], args)})
    if not prompts:
        raise UserError(f"--context {name}: every prompt is longer than {tokens} tokens. Name a greater length.")
    log(f"context {name}: {len(prompts)} prompts of {min(len(prompt['prompt_ids']) for prompt in prompts)} to "
        f"{max(len(prompt['prompt_ids']) for prompt in prompts)} tokens"
        + (f", {longer} that are longer left out" if longer else ""))
    return prompts


def request_ids(prompt: dict) -> list[str]:
    """Names of a prompt's requests in the order in which they are asked: one a turn."""
    return [prompt["id"], *(f"{prompt['id']}#{turn}" for turn in range(2, 2 + len(prompt.get("turns", ()))))]


def about_requests(prompts: list[dict]) -> dict[str, dict]:
    """{a request's id: its prompt and "turn"}"""
    return {name: {**prompt, "turn": turn} for prompt in prompts
            for turn, name in enumerate(request_ids(prompt), 1)}


def contexts_of(prompts: list[dict]) -> list[str | None]:
    """The lengths of --context, in order; [None] without."""
    return list(dict.fromkeys(prompt.get("context") for prompt in prompts))


def check_ids(prompts: list[dict], folders: list) -> None:
    """An id that the target does not have would end SGLang's scheduler, and the run.

    folders: of models; the first that is here and has a config.json tells how many tokens the target has. Raises
    UserError.
    """
    here = [Path(folder) for folder in folders if folder and (Path(folder) / "config.json").is_file()]
    vocabulary = text_config(here[0]).get("vocab_size") if here else None
    for prompt in prompts:
        ids, where = prompt["prompt_ids"], f"prompts of {prompt['source']}: prompt_ids of {prompt['id']!r}"
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise UserError(f"{where} must be a list of at least one token id.")
        if min(ids) < 0 or vocabulary and max(ids) >= vocabulary:
            odd = min(ids) if min(ids) < 0 else max(ids)
            raise UserError(f"{where} hold {odd}; the target's ids are 0 to {(vocabulary or 0) - 1}. Use prompts of "
                            "this target." if vocabulary else f"{where} hold {odd}, which is no token id.")


def wanted_rows(args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """(the rows that --ids and --limit leave, all that were read as far as --context needs them). Raises UserError."""
    wanted = read_ids(args.ids) if args.ids else None
    kept, others, read, per_source = [], [], 0, Counter()
    room = ROOM_OF_TEXT * max(map(context_tokens, args.context), default=0)  # characters
    for read, row in enumerate(all_rows(args), 1):
        if not isinstance(row.get("id"), str) or not row.keys() & set(FORMS):
            raise UserError(f"prompts of {row['source']}: a row needs a text `id` "
                            "and `messages`, `prompt`, `turns` or `prompt_ids`.")
        if room > 0:
            others.append(row)
            room -= sum(map(len, texts_of_rows([row])))
        if wanted is None or row["id"] in wanted:
            per_source[row["source"]] += 1
            if args.limit is None or per_source[row["source"]] <= args.limit:
                kept.append(row)
    if wanted is not None and not wanted:
        raise UserError(f"--ids {args.ids}: no ids in it: its drafter was trained without validation samples "
                        "(--val-ratio 0). Name prompts that it has not seen, and leave out --ids.")
    if not kept:
        raise UserError(f"--ids {args.ids}: none of its {len(wanted)} ids is among the {read} prompts. Name the "
                        "responses/ that they are of with --prompts." if wanted else
                        "no prompts. Name some with --prompts or --dataset.")
    return kept, others


def prompts_of_training(args: argparse.Namespace) -> None:
    """The prompts of --doctor without prompts: those of the samples that training's prediction is about.

    Where training validated on none (04's --val-ratio 0), or is another's (no eagle3.json): some of the run's.
    """
    drafter = args.draft_path[0]
    args.prompts, held_out = [args.run_dir / "responses"], drafter.parent / "val_ids.json"
    ours = held_out.exists() or (drafter / "eagle3.json").exists()
    args.ids = args.ids or (held_out if ours else None)
    if not args.ids or not read_ids(args.ids):
        args.ids, args.limit = None, args.limit or WITHOUT_VALIDATION


def read_ids(path: Path) -> set[str]:
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise UserError(f"--ids: {path} is not readable ({getattr(error, 'strerror', None) or error}).") from None
    try:
        return set(json.loads(text)["ids"])
    except (ValueError, TypeError, KeyError):
        return {line.strip() for line in text.split("\n") if line.strip()}


def all_rows(args: argparse.Namespace) -> Iterator[dict]:
    """Rows {"id", "source", and one of FORMS} of all --prompts and --dataset. Raises UserError."""
    for path in args.prompts or ([] if args.dataset else [SHIPPED]):
        yield from rows_of_path(path)
    for spec in args.dataset:
        yield from rows_of_dataset(spec)


def rows_of_path(path: Path) -> Iterator[dict]:
    responses = part_files(path)
    files = responses or sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no *.jsonl in it. Name prompts with --prompts or --dataset.")
    for file in files:
        for row in read_jsonl(file):
            source = str(row.get("source") or "responses") if responses else file.stem
            yield {"source": source, **{key: row[key] for key in ("id", *FORMS, *CHECKS) if key in row}}


def rows_of_dataset(spec: str) -> Iterator[dict]:
    """spec: NAME, from the hub, or NAME=FILE.jsonl."""
    name, _, local = spec.partition("=")
    if name not in DATASETS:
        raise UserError(f"--dataset {name}: unknown; known: {', '.join(DATASETS)}.")
    hub, configuration, split, column = DATASETS[name]
    from datasets import load_dataset  # here: it takes seconds to import
    try:
        data = load_dataset("json", data_files=local, split="train") if local else \
            load_dataset(hub, configuration, split=split)
        questions = data[column]
        checks = {key: data[of] for key, of in CHECK_COLUMNS.get(name, {}).items() if of in data.column_names}
    except Exception as error:  # the library raises its own, the hub's and the file system's errors
        raise UserError(f"--dataset {spec}: {' '.join(str(error).split())[:300]}. "
                        f"Offline, name a JSONL file: {name}=FILE.") from None
    for number, question in enumerate(questions):
        turns = question if isinstance(question, list) else [question]  # MT-Bench has two
        yield {"id": f"{name}-{number}", "source": name, "prompt": turns[0], "turns": turns,
               **{key: column[number] for key, column in checks.items()}}


# ---- rendering ----
def render(tokenizer, row: dict, mode: str) -> list[int]:
    """Token ids of the prompt in the target's own turn format. Raises UserError.

    Kimi's template reads `thinking`, other models' `enable_thinking`.
    """
    try:
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False,
                                            thinking=mode == "on", enable_thinking=mode == "on")
        ids = ids["input_ids"] if isinstance(ids, Mapping) else ids  # a tokenizer's own code may ignore return_dict
        return [int(token) for token in (ids[0] if len(ids) and isinstance(ids[0], list) else ids)]
    except Exception as error:  # templates raise what they like
        raise UserError(f"prompts of {row['source']}: the chat template refuses {row['id']!r} "
                        f"({' '.join(str(error).split())[:300]}).") from None
