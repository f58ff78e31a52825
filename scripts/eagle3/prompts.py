"""What 01_generate asks: prompt rows of files and data sets, mixed by weight, as conversations.

A source's rows are numbered; only their offsets are held in memory. All of them are looked at before anything is paid,
so that a bad line or an id that stands twice ends the run at its start.
"""
from __future__ import annotations

import array
import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import numpy as np

from eagle3.responses import Drop, drop_row, reasoning_of, row_at
from eagle3.stage import UserError, sha256_file

KEYS = ("split", "config", "revision", "weight", "id", "messages", "prompt", "system", "tools")  # of NAME,key=value
COLUMNS = {"messages": ("messages", "conversations", "conversation"), "prompt": ("prompt", "question", "instruction")}
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "function_response": "tool",
         "observation": "tool"}  # other spellings in public data sets
FILE_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


# ---- sources ----
@dataclass
class Source:
    """Rows of one file or data set by number. rows: byte offsets of a JSONL, or a map-style data set."""
    name: str
    path: Path | None
    rows: object
    options: dict  # the key=value pairs behind its name
    digest: str  # changes when the rows do

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict:
        return self.rows[number] if self.path is None else row_at(self.path, self.rows[number])

    @property
    def weight(self) -> float | None:
        """Its share of the mix, where one was given."""
        return float(self.options["weight"]) if "weight" in self.options else None


def open_sources(files: list[str], datasets: list[str]) -> list[Source]:
    """The sources of --prompts and --dataset, no id twice in all of them. Raises UserError."""
    seen: set[str] = set()
    return [open_jsonl(spec, seen) for spec in files] + [open_dataset(spec, seen) for spec in datasets]


def open_jsonl(spec: str, seen: set[str]) -> Source:
    """Offsets and hash of a JSONL file in one pass; every line is parsed. Raises UserError."""
    name, options = split_spec(spec)
    path, offsets, digest, offset = Path(name), array.array("q"), hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                    prompt_column(row, options)
                    claim(seen, prompt_id(path.stem, len(offsets), row.get(options.get("id", "id"))))
                    offsets.append(offset)
                digest.update(line)
                offset += len(line)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Name an existing JSONL file with --prompts.") from None
    except ValueError as error:
        raise UserError(f"{path}:{number}: not a prompt row: {error}") from None
    except UserError as error:
        raise UserError(f"{path}:{number}: {error}") from None
    return Source(path.stem, path, offsets, options, digest.hexdigest())


def open_dataset(spec: str, seen: set[str]) -> Source:
    """A data set on disk (save_to_disk, json(l), parquet, csv, a folder of those) or on the hub. Raises UserError."""
    import datasets  # slow to import, and most runs have a JSONL
    datasets.disable_progress_bars()
    name, options = split_spec(spec)
    split, path = options.get("split", "train"), Path(name)
    try:
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            data = datasets.load_from_disk(name)
            data = data[split] if isinstance(data, datasets.DatasetDict) else data
        elif path.is_file() and path.suffix in FILE_KINDS:
            data = datasets.load_dataset(FILE_KINDS[path.suffix], data_files=name, split=split)
        else:
            data = datasets.load_dataset(name, options.get("config"), split=split, revision=options.get("revision"))
    except Exception as error:  # the library raises dozens of types here; every one means: this name cannot be read
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"--dataset {spec}: {reason}. Check name, split and network.") from None
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem if path.exists() else name)
    try:
        prompt_column(dict.fromkeys(data.column_names, ""), options)
        id_column = options.get("id", "id")
        ids = data[id_column] if id_column in data.column_names else [None] * len(data)
        for number, given in enumerate(ids):
            claim(seen, prompt_id(name, number, given))
    except UserError as error:
        raise UserError(f"--dataset {spec}: {error}") from None
    # the library's fingerprint of a file changes with its modification time
    digest = f"{sha256_file(path)} {split}" if path.is_file() else data._fingerprint
    return Source(name, None, data, options, digest)


def split_spec(spec: str) -> tuple[str, dict]:
    """(name, {key: value}) of NAME,key=value,... Raises UserError."""
    name, *pairs = spec.split(",")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = set(options) - set(KEYS)
    if unknown:
        raise UserError(f"{spec}: unknown key {sorted(unknown)}. Known: {', '.join(KEYS)}.")
    try:
        if "weight" in options and not 0 < float(options["weight"]) < float("inf"):
            raise ValueError
    except ValueError:
        raise UserError(f"{spec}: the weight must be a number above 0.") from None
    return name, options


def prompt_column(row: dict, options: dict) -> tuple[str, str]:
    """("messages" or "prompt", its column) of a row; a mapped column wins. Raises UserError when there is none."""
    mapped = {kind: (options[kind],) for kind in COLUMNS if kind in options}
    for kind, names in (mapped or COLUMNS).items():
        for column in names:
            if column in row:
                return kind, column
    raise UserError(f"no prompt among the columns {sorted(row)}. Map one with ,messages=COLUMN or ,prompt=COLUMN.")


# ---- ids ----
def prompt_id(source: str, number: int, given: object) -> str:
    return safe_id(f"{source}-{number}" if given is None else str(given))


def safe_id(name: str) -> str:
    """The name itself if it can be a file name with `-t<turn>` behind it, else a slug + 12 hex digits of its sha256."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,110}", name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80] + "-" + digest[:12]


def claim(seen: set[str], name: str) -> None:
    if name in seen:
        raise UserError(f"the id {name} appears twice. Make ids unique, leave them out, "
                        "or map another column with ,id=COLUMN.")
    seen.add(name)


# ---- the mix ----
def mix(sizes: list[int], weights: list[float | None], seed: int, shuffle: bool) -> Iterator[tuple[int, int]]:
    """(source, row) in an order whose every prefix holds the weights to within one row.

    Without a weight a source counts by its rows. The mix ends when the next row would have to come from an exhausted
    source.
    """
    weights = [size if weight is None else weight for size, weight in zip(sizes, weights)]
    order = [np.random.default_rng([seed, i]).permutation(n) if shuffle else range(n) for i, n in enumerate(sizes)]
    taken, able = [0] * len(sizes), [i for i, weight in enumerate(weights) if weight > 0]
    while able:
        source = min(able, key=lambda i: (taken[i] + 1) / weights[i])
        if taken[source] == sizes[source]:
            return
        yield source, int(order[source][taken[source]])
        taken[source] += 1


def mixed(sources: list[Source], seed: int, shuffle: bool) -> Iterator[tuple[int, int]]:
    """`mix` of sources by their own weights."""
    return mix([len(source) for source in sources], [source.weight for source in sources], seed, shuffle)


# ---- conversations ----
def without_none(value):
    """The same value without the keys that Arrow filled with None because another row has them."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def as_message(given: dict) -> dict:
    """One message of any spelling in OpenAI's form, its reasoning as `reasoning_content`. Raises Drop."""
    message = dict(given)
    role = message.pop("from", None) or message.get("role")
    message["role"] = role = ROLES.get(role, role)
    if "value" in message:
        message["content"] = message.pop("value")
    reasoning = reasoning_of(message)
    for key in ("reasoning", "reasoning_details"):
        message.pop(key, None)
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    parts = message.get("content")
    if role not in ("system", "user", "assistant", "tool") or not isinstance(parts, (str, list, type(None))):
        raise Drop("bad_prompt", f"role {role!r}, content {type(parts).__name__}")
    if isinstance(parts, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            raise Drop("not_text")
        message["content"] = parts[0]["text"] if len(parts) == 1 else parts
    return message


def as_messages(row: dict, options: dict, system: str | None) -> tuple[list[dict], list | None]:
    """The chat messages and tools of one row, in OpenAI's form. system: for rows without one. Raises Drop."""
    kind, column = prompt_column(row, options)
    row = without_none(row)
    given = row.get(column)
    if isinstance(given, str):
        given = json.loads(given) if kind == "messages" else [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise Drop("bad_prompt", f"{column} is {type(given).__name__}")
    messages = [as_message(message) for message in given]
    system = row.get(options.get("system", "system")) or system
    if system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "user" and message.get("content") for message in messages):
        raise Drop("empty_prompt")
    tools = row.get(options.get("tools", "tools")) or None
    return messages, json.loads(tools) if isinstance(tools, str) else tools


def plan_turns(messages: list[dict]) -> list[tuple[list[dict], dict | None]]:
    """(messages before it, the row's own answer or None) of every assistant turn to be generated, in order.

    An assistant message that tool results follow stays as given, for the results answer its calls; so does one before
    any user turn. Every other one is a turn: it is asked for anew, and what the target said then takes its place.
    """
    turns, given = [], []
    for message, after in zip(messages, [*messages[1:], None]):
        calls_answered = after is not None and after["role"] == "tool"
        if message["role"] == "assistant" and not calls_answered and given and given[-1]["role"] in ("user", "tool"):
            turns.append((given, message))
            given = []
        else:
            given.append(message)
    if given and given[-1]["role"] in ("user", "tool"):
        turns.append((given, None))
    return turns


def fingerprint(messages: list[dict], tools: list | None) -> int:
    """64 bits, equal for prompts with equal tools and equal words but for case, Unicode width and white space.

    Assistant turns are left out.
    """
    text = "\n".join(f"{m['role']}\n{m.get('content')}" for m in messages if m["role"] != "assistant")
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split()) + (json.dumps(tools) if tools else "")
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


@dataclass
class Prompt:
    """One conversation. turns: of `plan_turns`."""
    id: str
    source: str
    turns: list
    tools: list | None


def read_prompts(sources: list[Source], args) -> Iterator[Prompt | dict]:
    """The prompts of the mix one by one; for one that cannot be asked its drop row, which --limit does not count."""
    seen, count = set(), 0
    for which, number in mixed(sources, args.seed, args.shuffle):
        if count == args.limit:
            return
        source = sources[which]
        row = source[number]
        name = prompt_id(source.name, number, row.get(source.options.get("id", "id")))
        try:
            try:
                messages, tools = as_messages(row, source.options, args.system)
            except (TypeError, AttributeError, KeyError, ValueError) as error:  # fields of types nobody expects
                raise Drop("bad_prompt", repr(error)) from None
            key = fingerprint(messages, tools)
            if args.dedup and key in seen:
                raise Drop("duplicate")
            seen.add(key)
        except Drop as drop:
            yield drop_row(f"{name}-t0", str(drop), drop.detail)
            continue
        count += 1
        yield Prompt(name, source.name, plan_turns(messages), tools)
