"""Stage 01: ask the target for answers and write them down with the exact token ids, each answer paid for once.

Reads   prompts: JSONL rows {"id", "messages"} or {"id", "prompt"} (also "tools", "system"), or data sets through `datasets`.
Writes  <output-dir>/part-*.jsonl (one row per assistant turn, schema in configs/artifacts.json), dropped.jsonl (id, reason),
        report.json (lengths, finish reasons, cost), manifest.json (last: the folder is complete).
Needs   the target's tokenizer folder and a server: SGLang, or any OpenAI-compatible API.

    python3 -u 01_generate.py --prompts prompts.jsonl --base-url http://127.0.0.1:30000 --model kimi-k2.5 \\
      --tokenizer /shared/kimi-k2.5-int4 --trust-remote-code --output-dir /data/eagle3/run/responses --concurrency 64

Time and size: the server sets the pace (this client does over 200 answers/s on one core); about 10 bytes a token.

Token ids. One rule for every SGLang from 0.5.10 to 0.5.23: the prompt is rendered here with the target's own template and sent
as `input_ids` to the native /generate, whose `output_ids` are what the sampler emitted, the stop token included
(ids_source "server"). The chat route returns ids only in later versions, and cuts them through parsers that depend on server flags.
A text API gives no ids: they are rebuilt from its text (ids_source "rebuilt"), compared with `usage.completion_tokens`, and
  - equal: kept; short by just the stop token, which some APIs do not count: kept, flagged "stop_not_counted";
  - usage larger by more than max(4, 2 %): the text lacks tokens the model emitted (hidden reasoning): dropped, "ids_missing";
  - any other difference: kept, flagged "ids_mismatch". `--on-mismatch keep|drop` does one thing with every difference.

Exactly once. A row is written and fsynced before its worker asks for the next answer, so a kill -9 loses at most
`--concurrency` answers that were in flight or not yet on disk; whatever is on disk is never asked for again.
"""
import argparse
import array
import asyncio
import email.utils
import errno
import fcntl
import hashlib
import importlib.metadata
import inspect
import json
import os
import random
import re
import shutil
import signal
import ssl
import struct
import sys
import time
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Iterator

import httpx
import numpy as np
import openai
import yaml

STAGE = "01_generate"
SCHEMA = 1

# ---- The block below is the same in every numbered script; tests/test_scripts.py compares the copies ----
CONFIG_SECTIONS = {"run_dir", "target", "generate", "build_vocab", "extract", "train", "benchmark", "servers"}


class UserError(Exception):
    """Bad input or configuration. The message says what, where and what to do; the script ends with exit code 2."""


def log(event: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {STAGE[3:]} {event}", flush=True)


def read_config(path: Path) -> dict:
    """The run's YAML file with `{run_dir}` and `{target}` filled in. Raises UserError."""
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not a readable YAML file ({' '.join(str(error).split())}).") from None
    if not isinstance(document, dict) or not set(document) <= CONFIG_SECTIONS:
        unknown = sorted(set(document) - CONFIG_SECTIONS) if isinstance(document, dict) else document
        raise UserError(f"{path}: unknown section {unknown}; known: {sorted(CONFIG_SECTIONS)}.")
    names = {f"{{{key}}}": str(document.get(key, "")) for key in ("run_dir", "target")}

    def fill(value):
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        for name, text in names.items():
            value = value.replace(name, text) if isinstance(value, str) else value
        return value

    return fill(document)


def parse_args(parser: argparse.ArgumentParser, section: str, argv: list[str]) -> argparse.Namespace:
    """Flags, over `section` of the --config file, over the defaults. An unknown key is a UserError."""
    def fail(message):
        raise UserError(f"{message}. See --help.")

    parser.error = fail
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help=f"run file; its section `{section}` holds flags")
    probe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    probe.add_argument("--config", type=Path)
    path, tokens = probe.parse_known_args(argv)[0].config, []
    actions = {option[2:]: action for action in parser._actions for option in action.option_strings}
    for key, value in ((read_config(path).get(section) or {}) if path else {}).items():
        if key not in actions or key in ("config", "help"):
            raise UserError(f"{path}: {section}.{key} is not a flag of {STAGE}.py. See --help.")
        if value is None or any(word.split("=")[0] in actions[key].option_strings for word in argv):
            continue  # the command line wins
        if isinstance(value, bool) and actions[key].choices:
            value = "on" if value else "off"  # what YAML makes of an unquoted on or off
        if isinstance(value, bool):
            tokens += [f"--{key}"] if value else [f"--no-{key}"] if f"no-{key}" in actions else []
        elif isinstance(value, list):
            repeated = isinstance(actions[key], argparse._AppendAction)
            tokens += [f"--{key}={item}" for item in value] if repeated else [f"--{key}", *map(str, value)]
        else:
            tokens.append(f"--{key}={value}")
    return parser.parse_args(tokens + argv)


def sync_folder(folder: Path) -> None:
    """A file's name is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write, fsync, rename: after a crash `path` holds the old bytes or all of the new ones."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path, stage: str) -> dict:
    """The manifest.json that `stage` wrote last into `folder`, so: the folder is complete. Raises UserError."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder}: no readable manifest.json, so {stage} has not finished there. Run {stage}.py first.") from None
    if manifest.get("stage") != stage or manifest.get("schema") != SCHEMA:
        raise UserError(f"{folder}: written by {manifest.get('stage')} (schema {manifest.get('schema')}), "
                        f"expected {stage} (schema {SCHEMA}). Name the right folder.")
    return manifest


def open_stage(folder: Path, config: dict, may_change: set[str]) -> IO:
    """Lock `folder` for this process and refuse what another config began there (`stage.json`). Keep the handle open."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it when the process dies, however it dies
    except BlockingIOError:
        raise UserError(f"{folder}: another process is writing there. Wait for it, or use another folder.") from None
    fixed = json.loads(json.dumps({key: value for key, value in config.items() if key not in may_change}, default=str))
    path = folder / "stage.json"
    old = json.loads(path.read_text()) if path.exists() else fixed
    differs = [f"{key}: {old.get(key)!r} there, {fixed.get(key)!r} now"
               for key in sorted(old.keys() | fixed.keys()) if old.get(key) != fixed.get(key)]
    if differs:
        raise UserError(f"{folder}: begun with another config ({'; '.join(differs)}). Use the old values or another folder.")
    write_atomic(path, json.dumps(fixed, indent=1, sort_keys=True) + "\n")
    return lock


def run(main) -> None:
    """Call main(argv); bad input ends in one line and exit code 2, Ctrl-C in 130, anything else in a traceback and 1."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"{STAGE}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{STAGE}: interrupted. The same command goes on from here.", file=sys.stderr, flush=True)
        sys.exit(130)
# ---- end of the common block ----

ROWS_PER_PART = 10_000
UNASKED = ("base_url", "concurrency", "api_key_env", "log_interval", "config", "output_dir", "prompts", "dataset", "tokenizer",
           "limit", "max_cost_usd", "max_tokens_total", "usd_per_mtok", "timeout_s", "outage_s", "max_attempts", "backoff_s",
           "max_failed_share", "trust_remote_code", "check_template")  # flags that may differ when a run is resumed
BUSY = {408, 409, 425, 429, 502, 503, 504, 520, 522, 524, 529}  # says nothing about the sample: retried until --outage-s
PROBE_S = 2.0  # between two tries at a server that cannot be reached
TOOL_NAMES = ("section_begin", "section_end", "call_begin", "argument_begin", "call_end")


def json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    if taken := value.keys() & {"max_tokens", "max_completion_tokens", "max_new_tokens", "n", "stream"}:
        raise argparse.ArgumentTypeError(f"{sorted(taken)} would break the budgets or the reading of answers")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", action="append", default=[], metavar="FILE.jsonl[,key=value]",
        help="prompt rows; may be repeated; keys as for --dataset")
    add("--dataset", action="append", default=[], metavar="NAME[,key=value]",
        help="folder, file or hub name for `datasets`; may be repeated. Keys: split (train), config, revision, weight "
             "(default: its rows), and the columns id, messages, prompt, system, tools")
    add("--shuffle", action=argparse.BooleanOptionalAction, default=False, help="shuffle each source by --seed")
    add("--dedup", action=argparse.BooleanOptionalAction, default=True,
        help="drop prompts equal to an earlier one but for case, width, space")
    add("--system", metavar="TEXT", help="system prompt for rows without one")
    add("--limit", type=int, metavar="N", help="take the first N prompts of the mix; may grow later")
    add("--base-url", action="append", default=[], metavar="URL", help="server; may be repeated: the least busy healthy one is asked")
    add("--api", choices=["auto", "sglang", "openai", "moonshot", "openrouter"], default="auto",
        help="auto: by host, then by SGLang's /server_info")
    add("--model", metavar="NAME", help="model name to ask for; with SGLang it must be the served name")
    add("--api-key-env", metavar="VAR", help="environment variable that holds the key")
    add("--provider", action="append", default=[], metavar="NAME", help="openrouter: only these providers, in this order")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="fields for the request body (sglang: for sampling_params)")
    add("--tokenizer", required=True, type=Path, metavar="DIR", help="the target's folder")
    add("--trust-remote-code", action="store_true", help="run the tokenizer code that lies in that folder (Kimi-K2.5 needs it)")
    add("--output-dir", required=True, type=Path)
    add("--concurrency", type=int, default=64, metavar="N")
    add("--max-tokens", type=int, default=4096, metavar="N", help="most tokens of one answer")
    add("--temperature", type=float, default=1.0, metavar="F")
    add("--top-p", type=float, default=0.95, metavar="F")
    add("--seed", type=int, default=0, metavar="N", help="order of the mix, and a sampling seed per row for servers that take one")
    add("--thinking", choices=["on", "off"], default="on")
    add("--answers", choices=["generate", "given"], default="generate",
        help="given: ask nobody, take the assistant turns of the prompt rows")
    add("--on-mismatch", choices=["rule", "keep", "drop"], default="rule", help="rebuilt ids that differ from usage; see above")
    add("--stop-token", default="<|im_end|>", help="ends a turn")
    add("--think-tokens", nargs="*", default=["<think>", "</think>"], help="begin and end of reasoning; nothing: the target has none")
    add("--tool-tokens", nargs="*", default=["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                                             "<|tool_call_argument_begin|>", "<|tool_call_end|>"], help="five marks, or nothing")
    add("--max-cost-usd", type=float, metavar="F", help="stop before this is passed, earlier sessions and requests in flight included")
    add("--max-tokens-total", type=int, metavar="N", help="the same for prompt + answer tokens")
    add("--usd-per-mtok", nargs=2, type=float, metavar=("IN", "OUT"), help="prices, for an API whose usage holds no cost")
    add("--timeout-s", type=float, default=1800, help="for one answer")
    add("--outage-s", type=float, default=600, help="stop when nothing has succeeded for so long")
    add("--max-attempts", type=int, default=6, help="failures of one sample before it is set aside (busy servers do not count)")
    add("--backoff-s", type=float, default=1.0, help="first pause after a failure; doubles up to 60 s, with jitter; Retry-After wins")
    add("--max-failed-share", type=float, default=0.01,
        help="samples set aside: up to this share is dropped, more ends the run with exit 1")
    add("--check-template", action=argparse.BooleanOptionalAction, default=True,
        help="sglang: compare the ids of each kind of prompt with its chat route")
    add("--log-interval", type=float, default=5.0, metavar="S")
    return parser


def printable(text: object) -> str:
    """One line that any file takes: a server's message may hold half a surrogate pair."""
    return " ".join(f"{text}".split())[:200].encode(errors="replace").decode()


class Drop(Exception):
    """This sample cannot be used; str() is the reason, a fixed word for counting. `usage`: what it cost all the same."""

    def __init__(self, reason: str, detail: str = "", usage: dict | None = None):
        super().__init__(reason)
        self.detail, self.usage = detail, usage


class Retry(Exception):
    """This attempt failed. after: seconds the server asked for; blame: counts against the sample; billed: it may have cost."""

    def __init__(self, kind: str, detail: object = "", after: float | None = None, blame: bool = True, billed: bool = False):
        super().__init__(kind)
        self.detail, self.after, self.blame, self.billed = printable(detail), after, blame, billed


class Halt(Exception):
    """The run ends early: str() says why, `code` is the exit code (0: a budget is reached, the folder is finished)."""

    def __init__(self, why: str, code: int):
        super().__init__(why)
        self.code = code


# ---- prompts

@dataclass
class Source:
    """Rows of one file or data set by number. rows: JSONL byte offsets or a map-style data set; options: the key=value pairs."""
    name: str
    path: Path | None
    rows: object
    options: dict
    digest: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict:
        if self.path is None:
            return self.rows[number]
        with open(self.path, "rb") as file:
            file.seek(self.rows[number])
            return json.loads(file.readline())


def open_jsonl(spec: str, seen: set[str]) -> Source:
    """Offsets and hash of a JSONL file in one pass; every line is parsed, so that nothing is paid before a bad one is found.

    seen: ids of all sources so far. Raises UserError.
    """
    name, options = split_spec(spec)
    path, offsets, digest, offset = Path(name), array.array("q"), hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                    columns(row, options)
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
    """A data set on disk (save_to_disk, json, jsonl, parquet, csv, or a folder of those) or on the hub. Raises UserError."""
    import datasets  # slow to import, and most runs have a JSONL
    datasets.disable_progress_bars()
    name, options = split_spec(spec)
    split, path = options.get("split", "train"), Path(name)
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
    try:
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            data = datasets.load_from_disk(name)
            data = data[split] if isinstance(data, datasets.DatasetDict) else data
        elif path.is_file() and path.suffix in kinds:
            data = datasets.load_dataset(kinds[path.suffix], data_files=name, split=split)
        else:
            data = datasets.load_dataset(name, options.get("config"), split=split, revision=options.get("revision"))
    except Exception as error:  # the library raises dozens of types here; every one means: this name cannot be read
        raise UserError(f"--dataset {spec}: {' '.join(str(error).split())[:300]}. Check name, split and network.") from None
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem if path.exists() else name)
    try:
        columns(dict.fromkeys(data.column_names, ""), options)
        ids = data[options.get("id", "id")] if options.get("id", "id") in data.column_names else [None] * len(data)
        for number, given in enumerate(ids):
            claim(seen, prompt_id(name, number, given))
    except UserError as error:
        raise UserError(f"--dataset {spec}: {error}") from None
    # the library's fingerprint of a file changes with its modification time
    digest = f"{sha256_file(path)} {split}" if path.is_file() else data._fingerprint
    return Source(name, None, data, options, digest)


def prompt_id(source: str, number: int, given: object) -> str:
    return safe_id(f"{source}-{number}" if given is None else str(given))


def claim(seen: set[str], name: str) -> None:
    if name in seen:
        raise UserError(f"the id {name} appears twice. Make ids unique, leave them out, or map another column with ,id=COLUMN.")
    seen.add(name)


def split_spec(spec: str) -> tuple[str, dict]:
    name, *pairs = spec.split(",")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    unknown = set(options) - {"split", "config", "revision", "weight", "id", "messages", "prompt", "system", "tools"}
    if unknown:
        raise UserError(f"{spec}: unknown key {sorted(unknown)}. "
                        "Known: split, config, revision, weight, id, messages, prompt, system, tools.")
    try:
        if "weight" in options and not 0 < float(options["weight"]) < float("inf"):
            raise ValueError
    except ValueError:
        raise UserError(f"{spec}: the weight must be a number above 0.") from None
    return name, options


def columns(row: dict, options: dict) -> tuple[str, str]:
    """(kind, column) of the prompt in a row: kind "messages" or "prompt"; a mapped column wins. Raises UserError when there is none."""
    wanted = {kind: (options[kind],) for kind in ("messages", "prompt") if kind in options} or {
        "messages": ("messages", "conversations", "conversation"), "prompt": ("prompt", "question", "instruction")}
    for kind, names in wanted.items():
        for column in names:
            if column in row:
                return kind, column
    raise UserError(f"no prompt among the columns {sorted(row)}. Map one with ,messages=COLUMN or ,prompt=COLUMN.")


def mix(sizes: list[int], weights: list[float | None], seed: int, shuffle: bool) -> Iterator[tuple[int, int]]:
    """(source, row) in an order whose every prefix holds the weights to within one row.

    Without a weight a source counts by its rows. The mix ends when the next row would have to come from an exhausted source.
    """
    order = [np.random.default_rng([seed, i]).permutation(n) if shuffle else range(n) for i, n in enumerate(sizes)]
    weights = [size if weight is None else weight for size, weight in zip(sizes, weights)]
    taken, able = [0] * len(sizes), [i for i, weight in enumerate(weights) if weight > 0]
    while able:
        source = min(able, key=lambda i: (taken[i] + 1) / weights[i])
        if taken[source] == sizes[source]:
            return
        yield source, int(order[source][taken[source]])
        taken[source] += 1


ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "function_response": "tool",
         "observation": "tool"}  # other spellings in public data sets


def without_none(value):
    """The same value without the keys that Arrow filled with None because another row has them."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def as_messages(row: dict, options: dict, system: str | None) -> tuple[list[dict], list | None]:
    """The chat messages and tools of one row, in OpenAI's form; reasoning of any spelling as `reasoning_content`. Raises Drop."""
    kind, column = columns(row, options)
    row = without_none(row)
    given = row.get(column)
    if isinstance(given, str):
        given = json.loads(given) if kind == "messages" else [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise Drop("bad_prompt", f"{column} is {type(given).__name__}")
    messages = []
    for message in given:
        message = dict(message)
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
        messages.append(message)
    system = row.get(options.get("system", "system")) or system
    if system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "user" and message.get("content") for message in messages):
        raise Drop("empty_prompt")
    tools = row.get(options.get("tools", "tools")) or None
    return messages, json.loads(tools) if isinstance(tools, str) else tools


def plan_turns(messages: list[dict]) -> list[tuple[list[dict], dict | None]]:
    """(messages before it, the row's own answer or None) for every assistant turn to be generated, in order.

    An assistant message that tool results follow stays as given, for the results answer its calls; so does one before any user turn.
    Every other assistant message is a turn: it is asked for anew, and what the target said then takes its place.
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
    """64 bits that are equal for prompts with equal tools, equal but for case, Unicode width and white space (assistant turns left out)."""
    text = "\n".join(f"{m['role']}\n{m.get('content')}" for m in messages if m["role"] != "assistant")
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split()) + (json.dumps(tools) if tools else "")
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def safe_id(prompt_id: str) -> str:
    """The id itself if it can be a file name with `-t<turn>` behind it, else a slug + 12 hex digits of its sha256."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,110}", prompt_id):
        return prompt_id
    digest = hashlib.sha256(prompt_id.encode("utf-8", "surrogatepass")).hexdigest()
    return re.sub(r"[^A-Za-z0-9._-]+", "_", prompt_id)[:80] + "-" + digest[:12]


@dataclass
class Prompt:
    id: str
    source: str
    turns: list  # of plan_turns
    tools: list | None


def source_weights(sources: list[Source]) -> list[float | None]:
    return [float(source.options["weight"]) if "weight" in source.options else None for source in sources]


def read_prompts(sources: list[Source], args) -> Iterator[Prompt | dict]:
    """The prompts of the mix one by one; for one that cannot be asked its drop row, which does not count towards --limit."""
    seen, count = set(), 0
    for which, number in mix([len(source) for source in sources], source_weights(sources), args.seed, args.shuffle):
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


# ---- the target's tokens

def tokenizer_hash(folder: Path) -> str:
    """One hash over the files that decide token ids and the template."""
    wanted = ("tokenizer", "tokenization", "vocab", "merges", "chat_template", "special_tokens", "added_tokens", "tiktoken")
    files = sorted(path for path in folder.glob("*")
                   if path.is_file() and (path.name.startswith(wanted) or path.suffix in (".model", ".tiktoken")))
    return hashlib.sha256("".join(f"{path.name} {sha256_file(path)}\n" for path in files).encode()).hexdigest()


def load_tokenizer(folder: Path, trust_remote_code: bool):
    from transformers import AutoTokenizer  # imports torch: after the flags were checked
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # any failure here means: this folder holds no tokenizer that can be loaded
        raise UserError(f"{folder}: no tokenizer can be loaded ({' '.join(str(error).split())[:200]}). "
                        "Name the target's folder; Kimi's needs --trust-remote-code.") from None


def reasoning_of(message: dict) -> str | None:
    """Reasoning of an API message in whichever of the three fields it came. Raises Drop when only a summary or a cipher came."""
    details = message.get("reasoning_details") or []  # looked at first: a summary stands in `reasoning` too
    if any(part.get("type") != "reasoning.text" for part in details):
        raise Drop("reasoning_encrypted" if any(part.get("type") == "reasoning.encrypted" for part in details) else "reasoning_summary")
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str):
            return message[key]
    return "".join(part.get("text") or "" for part in details) if details else None


@dataclass
class Answer:
    """One assistant turn. ids: as the engine emitted them, or None (text API). finish: stop, length, tool_calls, or what the API said."""
    content: str
    reasoning: str | None
    tool_calls: list
    finish: str
    usage: dict | None
    ids: list[int] | None = None
    model: str | None = None
    provider: str | None = None
    flags: list[str] = field(default_factory=list)


FILLED = {"description": None, "name": None, "parameters": None, "strict": False}
TOOL_FORMS = [  # a tool definition as SGLang's chat route hands it to the template: as it came, or with the fields its versions fill in
    lambda tool: tool,
    lambda tool: {**tool, "defer_loading": None},  # 0.5.23
    lambda tool: {"type": "function", **tool, "function": FILLED | tool["function"], "defer_loading": None},  # 0.5.15
    lambda tool: {"type": "function", **tool, "function": FILLED | tool["function"]},  # 0.5.10
]


def with_object(call: dict) -> dict:
    """A tool call whose arguments are an object, not its JSON text (where that can be parsed)."""
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
    except (ValueError, TypeError, KeyError):
        return call


class Tokens:
    """The target's tokenizer, its template and its special ids; works for fast and slow ones, never asks for offsets.

    Special tokens must be one id each: UserError. Text never becomes a special id (`encode`).
    """

    def __init__(self, tokenizer, stop: str, think: list[str], tool: list[str], thinking: bool):
        self.tokenizer, self.thinking, self.tool_form = tokenizer, thinking, TOOL_FORMS[0]
        if len(think) not in (0, 2) or len(tool) not in (0, 5):
            raise UserError(f"--think-tokens takes 2 names or none, --tool-tokens 5 or none; got {think} and {tool}.")
        self.stop = self.special(stop)
        self.think, self.end_think = [self.special(name) for name in think] or (None, None)
        self.tool = {key: self.special(name) for key, name in zip(TOOL_NAMES, tool)}
        self.added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        self.encode_plain = self.plain_encoder()

    def special(self, name: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(name)  # of an unknown name: None, or the id of the unknown token
        if (token_id is None or self.tokenizer.convert_ids_to_tokens(token_id) != name
                or self.tokenizer.encode(name, add_special_tokens=False) != [token_id]):
            raise UserError(f"the tokenizer does not encode {name} as one id. Name this target's tokens with "
                            "--stop-token, --think-tokens, --tool-tokens (empty: it has none).")
        return token_id

    def plain_encoder(self):
        """text -> ids that reads `<|im_end|>` in a text as characters, as the model wrote it (the one id would have ended its turn)."""
        tokenizer = self.tokenizer
        if tokenizer.is_fast:  # split_special_tokens spares only tokens marked special; <think> is often not
            spec = json.loads(tokenizer.backend_tokenizer.to_str())
            spec["added_tokens"] = []
            plain = type(tokenizer.backend_tokenizer).from_str(json.dumps(spec))
            return lambda text: plain.encode(text, add_special_tokens=False).ids
        if "allow_special_tokens" in inspect.signature(tokenizer.encode).parameters:  # Kimi's own
            return lambda text: tokenizer.encode(text, allow_special_tokens=False)
        return lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()  # fast tokenizers raise a TypeError for half a surrogate pair
        except UnicodeEncodeError:
            raise Drop("not_utf8") from None
        ids = self.encode_plain(text)
        if not self.added.isdisjoint(ids):
            raise Drop("special_in_text", "the text of a special token, which this tokenizer cannot encode as text")
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt_ids(self, messages: list[dict], tools: list | None) -> list[int]:
        """Ids up to where the answer begins, the prefilled `<think>` or `<think></think>` included, as SGLang's chat route renders them.

        It hands call arguments to the template as objects, no content as "", and tools as its own classes print them (`tool_form`).
        """
        switch = {"thinking": self.thinking, "enable_thinking": self.thinking}  # Kimi's and Qwen's name for it
        try:
            json.dumps(messages, ensure_ascii=False).encode()
            served = [{"content": "", **message} for message in messages]
            for message in served:
                if message.get("tool_calls"):
                    message["tool_calls"] = [with_object(call) for call in message["tool_calls"]]
            ids = list(self.tokenizer.apply_chat_template(served, tools=tools and [self.tool_form(tool) for tool in tools],
                                                          add_generation_prompt=True, tokenize=True, return_dict=False, **switch))
        except UnicodeEncodeError:
            raise Drop("not_utf8") from None
        except Exception as error:  # jinja raises what the template asks for, and TypeErrors for odd messages
            raise Drop("template", f"{type(error).__name__}: {error}") from None
        if self.think is not None and self.thinking != self.open_think(ids):
            raise UserError(f"--thinking {'on' if self.thinking else 'off'}, but the template's prompt ends in {self.decode(ids[-4:])!r}. "
                            "Use the other mode, or name the target's --think-tokens.")
        return ids

    def open_think(self, prompt_ids: list[int]) -> bool:
        """True when the prompt leaves the reasoning open (`<think>`, perhaps a newline, at its end)."""
        tail = [i for i in prompt_ids[-4:] if i in (self.think, self.end_think)]
        return self.think is not None and tail[-1:] == [self.think]

    def read(self, prompt_ids: list[int], ids: list[int]) -> tuple[str | None, str, list, list[str]]:
        """(reasoning, content, tool_calls, flags) of emitted ids; the split is by id, never by text."""
        body, reasoning, calls, flags = ids[:-1] if ids[-1:] == [self.stop] else ids, None, [], []
        if self.open_think(prompt_ids) or (self.think is not None and body[:1] == [self.think]):
            body = body[1:] if body[:1] == [self.think] else body
            end = body.index(self.end_think) if self.end_think in body else len(body)
            reasoning, body = self.decode(body[:end]), body[end + 1:]
        begin = self.tool.get("section_begin")
        if begin in body:
            section, body = body[body.index(begin) + 1:], body[:body.index(begin)]
            while section[:1] == [self.tool["call_begin"]] and self.tool["call_end"] in section:
                end, call = section.index(self.tool["call_end"]), section[1:]
                middle = call.index(self.tool["argument_begin"]) if self.tool["argument_begin"] in call[:end - 1] else end - 1
                call_id = self.decode(call[:middle])
                name = re.sub(r":\d+$", "", call_id.strip()).removeprefix("functions.")
                calls.append({"id": call_id, "type": "function",
                              "function": {"name": name, "arguments": self.decode(call[middle + 1:end - 1])}})
                section = section[end + 1:]
            if section != [self.tool["section_end"]]:
                flags.append("tool_calls_malformed")
        return reasoning, self.decode(body) if body else "", calls, flags

    def answer_ids(self, answer: Answer, prompt_ids: list[int], n_calls_before: int) -> list[int]:
        """Ids of an answer given as text: reasoning + </think> + content + tool section + stop. Strips nothing. Raises Drop.

        The stop token only after finish stop or tool_calls; a cut answer ends neither reasoning that nothing follows nor its last call.
        """
        ids, cut = [], answer.finish not in ("stop", "tool_calls")
        if self.open_think(prompt_ids):
            ids += self.encode(answer.reasoning or "")
            if not (cut and not answer.content and not answer.tool_calls):
                ids.append(self.end_think)
        elif answer.reasoning:
            if self.think is None or prompt_ids[-1] == self.end_think:
                raise Drop("reasoning_unasked", "reasoning came although the prompt closed it")
            ids += [self.think, *self.encode(answer.reasoning), self.end_think]
        ids += self.encode(answer.content)
        if answer.tool_calls:
            if not self.tool:
                raise Drop("tool_calls_without_marks")
            ids.append(self.tool["section_begin"])
            for n, call in enumerate(answer.tool_calls, n_calls_before):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                if not re.fullmatch(rf"\s*functions\.{re.escape(name)}:\d+\s*", call["id"]):
                    call["id"] = f"functions.{name}:{n}"  # Kimi's own form; the API made up another id
                    answer.flags.append("tool_id_rebuilt")
                ids += [self.tool["call_begin"], *self.encode(call["id"]), self.tool["argument_begin"],
                        *self.encode(arguments), self.tool["call_end"]]
            ids.append(self.tool["section_end"])
            if cut:  # somewhere in the last call: its end was not emitted
                return ids[:-2]
        return ids if cut else [*ids, self.stop]


def settle_ids(answer: Answer, prompt_ids: list[int], tokens: Tokens, n_calls_before: int, on_mismatch: str) -> tuple[list[int], str]:
    """(response_ids, ids_source) by the rule in this file's docstring; flags go to answer.flags. Raises Drop."""
    if answer.ids is not None:
        text = replace(answer, tool_calls=[dict(call) for call in answer.tool_calls], flags=[])  # what is emitted stays as it is
        try:
            if tokens.answer_ids(text, prompt_ids, n_calls_before) != answer.ids:
                answer.flags.append("rebuild_differs")  # how far a text API could be trusted with this target
        except Drop:
            answer.flags.append("rebuild_differs")
        return answer.ids, "server"
    ids = tokens.answer_ids(answer, prompt_ids, n_calls_before)
    said = (answer.usage or {}).get("completion_tokens")
    if said is None:
        answer.flags.append("ids_not_compared")
    elif said == len(ids) - 1 and ids[-1] == tokens.stop:
        answer.flags.append("stop_not_counted")
    elif said != len(ids):
        if on_mismatch == "drop" or on_mismatch == "rule" and said - len(ids) > max(4, said // 50):
            raise Drop("ids_missing" if said > len(ids) else "ids_mismatch", f"usage says {said} tokens, the text has {len(ids)}")
        answer.flags.append("ids_mismatch")
    if (said_prompt := (answer.usage or {}).get("prompt_tokens")) is not None and said_prompt != len(prompt_ids):
        answer.flags.append("prompt_tokens_differ")
    return ids, "rebuilt"


# ---- servers

def retry_after(headers) -> float | None:
    """Seconds that a Retry-After header (seconds or date) or retry-after-ms asks for."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        text = headers.get("retry-after")
        return None if text is None else max(0.0, float(text) if re.fullmatch(r"\s*[\d.]+\s*", text)
                                             else email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def refuse(status: int, message: str, headers, key_env: str | None):
    """Turn an error status (of HTTP or inside a body) into what happens next: Retry, Drop, Halt or UserError."""
    if status == 401:
        raise UserError(f"the server refused the key (401: {message}). "
                        + (f"It came from the variable {key_env}." if key_env else "None was sent: name its variable with --api-key-env."))
    if status == 402:
        raise Halt(f"out of credit (402: {message}). Everything so far is kept; the same command goes on.", code=1)
    if status == 404:
        raise UserError(f"the server knows no such route or model (404: {message}). Check --base-url, --api and --model.")
    if status in BUSY:
        raise Retry(f"http_{status}", message, retry_after(headers), blame=False)
    if status >= 500 or status == 403:  # 403: a sample that moderation refuses, or, at OpenRouter, a key whose limit is reached
        raise Retry(f"http_{status}", message, retry_after(headers))
    raise Drop(f"http_{status}", message)


class Server:
    """One base URL. Connections are spread over several clients: httpx searches its pool linearly on each request, which with 256
    connections in one pool costs more than the request itself (one core: 296 requests/s against 886 with 8 connections a pool)."""
    CONNECTIONS = 8

    def __init__(self, url: str, key: str | None, concurrency: int, timeout: float, tls: ssl.SSLContext):
        self.url, self.timeout, self.in_flight, self.failures = url, timeout, 0, 0  # failures: since its last answer
        self.down, self.down_until = False, 0.0
        timeouts = httpx.Timeout(timeout, connect=20)
        self.clients = [openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=timeouts,
                                           http_client=httpx.AsyncClient(verify=tls, timeout=timeouts))
                        for _ in range(-(-concurrency // self.CONNECTIONS))]
        self.free = [client for client in self.clients for _ in range(self.CONNECTIONS)][:concurrency]

    async def post(self, path: str, body: dict, key_env: str | None) -> dict:
        """The JSON object that came back with status 200 and no error in it. Raises Retry, Drop, Halt, UserError."""
        client = self.free.pop(0)  # first in, first out spreads the requests over the clients
        self.in_flight += 1
        try:
            async with asyncio.timeout(self.timeout):  # the client's own timeout starts anew with every byte
                response = await client.post(path, cast_to=httpx.Response, body=body)
            answer = json.loads(response.content)
        except TimeoutError:
            raise Retry("timeout", billed=True) from None
        except openai.APIStatusError as error:
            detail = error.body if isinstance(error.body, dict) else {}
            detail = detail.get("error", detail)
            message = detail.get("message") if isinstance(detail, dict) else detail
            refuse(error.status_code, printable(message or error.response.text), error.response.headers, key_env)
        except openai.APITimeoutError as error:
            sent = not isinstance(error.__cause__, (httpx.ConnectTimeout, httpx.PoolTimeout))
            raise Retry("timeout" if sent else "unreachable", repr(error.__cause__), blame=sent, billed=sent) from None
        except openai.APIConnectionError as error:
            sent = not isinstance(error.__cause__, httpx.ConnectError)
            raise Retry("connection_cut" if sent else "unreachable", repr(error.__cause__), blame=sent, billed=sent) from None
        except ValueError as error:  # truncated JSON or broken UTF-8
            raise Retry("bad_json", error, billed=True) from None
        finally:
            self.in_flight -= 1
            self.free.append(client)
        if not isinstance(answer, dict):
            raise Retry("bad_json", f"not an object but {type(answer).__name__}", billed=True)
        if error := answer.get("error"):  # some gateways send 200 and put the status here
            error = error if isinstance(error, dict) else {"message": error}
            code = error.get("code")
            code = int(code) if str(code).isdigit() else 500
            refuse(code, printable(error.get("message")), response.headers, key_env)
        return answer


def request_body(api: str, args, stop: int, row_id: str, prompt_ids: list[int], messages: list[dict],
                 tools: list | None) -> tuple[str, dict]:
    """(path, body): the same wish in each API's own terms."""
    seed = int.from_bytes(hashlib.sha256(f"{args.seed}:{row_id}".encode()).digest()[:4], "big") >> 1
    if api == "sglang":
        return "/generate", {"input_ids": prompt_ids, "sampling_params": {
            "max_new_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p, "stop_token_ids": [stop],
            "sampling_seed": seed, "skip_special_tokens": False, **args.extra_body}}
    on = args.thinking == "on"
    terms = {"openai": {"chat_template_kwargs": {"thinking": on, "enable_thinking": on}, "separate_reasoning": True},  # SGLang's and vLLM's
             "moonshot": {"thinking": {"type": "enabled" if on else "disabled"}},
             "openrouter": {"reasoning": {"enabled": on}, "usage": {"include": True}}}[api]
    if api == "openrouter":  # its name for the reasoning of earlier turns
        messages = [{"reasoning" if key == "reasoning_content" else key: value for key, value in message.items()} for message in messages]
    if args.provider:
        terms["provider"] = {"order": args.provider, "allow_fallbacks": False}
    if tools:
        terms["tools"] = tools
    return "/chat/completions", {"model": args.model, "messages": messages, "max_tokens": args.max_tokens, "temperature": args.temperature,
                                 "top_p": args.top_p, "seed": seed, **terms, **args.extra_body}


def read_native(body: dict, prompt_ids: list[int], tokens: Tokens) -> Answer:
    """Answer from SGLang's /generate. Raises Retry, Drop, UserError."""
    meta, ids = body.get("meta_info") or {}, body.get("output_ids")
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort":
        refuse(int(finish.get("status_code") or 500), str(finish.get("message")), {}, None)
    if not isinstance(ids, list):
        raise UserError(f"/generate gave no output_ids (fields {sorted(body)}). SGLang 0.5.10 to 0.5.23 gives them: check --base-url.")
    if meta.get("prompt_tokens", len(prompt_ids)) != len(prompt_ids):
        raise UserError(f"the engine read {meta['prompt_tokens']} prompt tokens of {len(prompt_ids)} sent. "
                        "Start it without --allow-auto-truncate.")
    if not ids:
        raise Drop("empty")
    reasoning, content, calls, flags = tokens.read(prompt_ids, ids)
    reason = "tool_calls" if calls and finish.get("type") == "stop" else finish.get("type") or "unknown"
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
    return Answer(content, reasoning, calls, reason, usage, ids, provider="sglang", flags=flags)


def text_calls(calls: list) -> list[dict]:
    """Tool calls with the fields that every row has, arguments as JSON text. Raises TypeError, KeyError, AttributeError."""
    calls = [{"id": str(call.get("id") or ""), "type": "function", "function": {
        "name": call["function"]["name"], "arguments": call["function"].get("arguments") or "{}"}} for call in calls]
    if not all(isinstance(text, str) for call in calls for text in call["function"].values()):
        raise TypeError("a call's name or arguments are no text")
    return calls


def read_chat(body: dict, api: str) -> Answer:
    """Answer from /chat/completions, whatever of it came. Raises Retry, Drop."""
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    usage = {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "cost") if isinstance(usage.get(key), (int, float))} or None
    try:
        choice = body["choices"][0]
        message, finish = choice["message"] or {}, choice.get("finish_reason") or "unknown"
        if finish == "error":
            raise Retry("finish_error", billed=True)
        if finish == "content_filter":
            raise Drop("content_filter")
        content, reasoning, calls = message.get("content") or "", reasoning_of(message), message.get("tool_calls") or []
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content)
        if not content and not calls and not (reasoning and finish == "length"):
            raise Drop("empty")  # reasoning alone is kept only where the limit cut it
        calls = text_calls(calls)
        if not isinstance(content, str) or not isinstance(finish, str):
            raise TypeError(f"content is {type(content).__name__}, finish_reason {type(finish).__name__}")
    except Drop as drop:
        raise Drop(str(drop), drop.detail, usage) from None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Retry("bad_answer", repr(error), billed=True) from None
    flags = [] if finish in ("stop", "length", "tool_calls") else ["finish_unknown"]  # then it counts as cut: no stop token
    return Answer(content, reasoning, calls, finish, usage, model=body.get("model"), provider=body.get("provider") or api, flags=flags)


# ---- artifact I/O

class Store:
    """Rows on disk: part-*.jsonl and dropped.jsonl, appended and fsynced in groups; torn tails are cut off on opening.

    done: row id -> its place; dropped: row id -> drop_row(); tokens, usd: what all rows cost together;
    kinds: {(ids_source, model of the engine)}.
    """

    def __init__(self, folder: Path, prices: list[float] | None):
        self.prices = prices or (0.0, 0.0)  # $ per million tokens of prompt and answer, where usage does not tell the cost
        self.folder, self.done, self.dropped, self.tokens, self.usd, self.kinds = folder, {}, {}, 0, 0.0, set()
        self.pending, self.wake = [], asyncio.Event()
        place_sorted(folder)
        self.part, self.rows_in_part = 0, 0
        for self.part, path in enumerate(parts(folder)):
            if path.name != part_name(self.part):
                raise UserError(f"{folder}: {part_name(self.part)} is missing though {path.name} is there. "
                                "Put it back, or use another folder.")
            self.rows_in_part = 0
            for offset, row in rows(path):
                self.done[row["id"]] = self.part << 48 | offset
                self.kinds.add((row["ids_source"], row["model"] if row["ids_source"] == "server" else None))
                self.charge(row)
                self.rows_in_part += 1
        for _, row in rows(folder / "dropped.jsonl"):
            self.dropped[row["id"]] = row
            self.charge(row)

    def charge(self, row: dict):
        usage = row["usage"] or {"prompt_tokens": len(row.get("prompt_ids", ())), "completion_tokens": len(row.get("response_ids", ()))}
        n_prompt, n_answer = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        self.tokens += n_prompt + n_answer
        self.usd += usage.get("cost", (n_prompt * self.prices[0] + n_answer * self.prices[1]) / 1e6)

    def row(self, row_id: str) -> dict:
        place = self.done[row_id]
        with open(self.folder / part_name(place >> 48), "rb") as file:
            file.seek(place & (1 << 48) - 1)
            return json.loads(file.readline())

    async def put(self, row: dict):
        """Returns when the row (an answer, or {"id", "reason", ...}) is on the disk."""
        try:
            line = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        except UnicodeEncodeError:  # half a surrogate pair: no tokenizer could have read it either
            row = drop_row(row["id"], "not_utf8", usage=row["usage"])
            line = (json.dumps(row) + "\n").encode()
        written = asyncio.get_running_loop().create_future()
        self.pending.append((row, line, written))
        self.wake.set()
        await written

    async def writer(self):
        """One fsync for all rows that came while the last one ran."""
        while True:
            await self.wake.wait()
            self.wake.clear()
            batch, self.pending = self.pending, []
            try:
                await asyncio.to_thread(self.commit, batch)
            except OSError as error:
                for *_, written in batch:
                    written.set_exception(Halt(cannot_write(self.folder, error), code=1))
                continue
            for row, _, written in batch:
                self.charge(row)
                if "reason" in row:
                    self.dropped[row["id"]] = row
                written.set_result(None)

    def commit(self, batch: list):
        groups = {}  # file name -> lines
        for row, line, _ in batch:
            if "reason" in row:
                groups.setdefault("dropped.jsonl", []).append(line)
                continue
            if self.rows_in_part == ROWS_PER_PART:
                self.part, self.rows_in_part = self.part + 1, 0
            groups.setdefault(part_name(self.part), []).append(line)
            self.rows_in_part += 1
        for name, lines in groups.items():
            with open(self.folder / name, "ab", buffering=0) as file:
                size = file.tell()
                try:
                    if file.write(data := b"".join(lines)) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)  # or the next row would be appended to a torn one
                    raise
            if size == 0:
                sync_folder(self.folder)


def cannot_write(folder: Path, error: OSError) -> str:
    return f"{folder}: cannot write ({error.strerror}). Make room; the same command goes on."


def part_name(number: int) -> str:
    return f"part-{number:05d}.jsonl"


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.jsonl"))


def sort_rows(folder: Path, places: list[int]) -> dict[str, str]:
    """{part: sha256} of the folder's rows, written anew in the order of their places. A kill leaves the old order or the new one."""
    temporary, files = folder / "sorted", {}
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    handles = [open(path, "rb") for path in parts(folder)]
    for start in range(0, len(places), ROWS_PER_PART):
        path = temporary / part_name(start // ROWS_PER_PART)
        with open(path, "wb") as out:
            for place in places[start:start + ROWS_PER_PART]:
                handle = handles[place >> 48]
                handle.seek(place & (1 << 48) - 1)
                out.write(handle.readline())
            out.flush()
            os.fsync(out.fileno())
        files[path.name] = sha256_file(path)
    for handle in handles:
        handle.close()
    sync_folder(temporary)
    os.rename(temporary, folder / "sorted.ready")
    place_sorted(folder)
    return files


def place_sorted(folder: Path) -> None:
    """Put a complete sorted copy, which finish() made, in place of the parts. Goes on where a kill stopped it."""
    ready = folder / "sorted.ready"
    names = [path.name for path in parts(ready)]
    for path in parts(folder) if names else ():
        if path.name > names[-1]:  # rows were fewer than their parts could hold: all of them are in the copy
            path.unlink()
    for name in names:
        os.replace(ready / name, folder / name)
    if ready.exists():
        ready.rmdir()
        sync_folder(folder)


def rows(path: Path) -> Iterator[tuple[int, dict]]:
    """(offset, row) of a JSONL file; a last line without its newline is what a kill left: cut off. Raises UserError on any other damage."""
    offset = 0
    if not path.exists():
        return
    with open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                log(f"{path}: cut off a torn last line of {len(line)} bytes")
                file.truncate(offset)
                return
            try:
                yield offset, json.loads(line)
            except ValueError:
                raise UserError(f"{path}: the row at byte {offset} is not JSON. "
                                "Delete that line; its prompt will be asked again.") from None
            offset += len(line)


class Budget:
    """Upper bounds on tokens and dollars that hold with requests in flight and across kills.

    A request's worst case (prompt + --max-tokens) is reserved before it is sent. What is reserved, and what failed requests may have
    cost, is kept in `.unsettled`: after a kill it counts as spent. Without --usd-per-mtok the price is learnt from usage.cost: the first
    request runs alone, later ones reserve the dearest price per answer token seen so far for every token.
    """

    def __init__(self, args, store: Store):
        self.store, self.max_tokens, self.prices, self.in_flight = store, args.max_tokens, args.usd_per_mtok, 0
        self.limits = [float("inf") if limit is None else limit for limit in (args.max_tokens_total, args.max_cost_usd)]
        self.file = os.open(store.folder / ".unsettled", os.O_RDWR | os.O_CREAT, 0o644)
        self.lost = list(struct.unpack("<2d", os.pread(self.file, 16, 0) or bytes(16)))
        self.reserved, self.rate, self.changed = [0.0, 0.0], None, asyncio.Condition()
        self.save()

    def save(self):
        os.pwrite(self.file, struct.pack("<2d", *(lost + reserved for lost, reserved in zip(self.lost, self.reserved))), 0)

    def cost(self, n_prompt: int, n_answer: int) -> float:
        return (n_prompt * self.prices[0] + n_answer * self.prices[1]) / 1e6 if self.prices else (self.rate or 0.0) * (n_prompt + n_answer)

    def spent(self) -> tuple[float, float]:
        return self.store.tokens + self.lost[0], self.store.usd + self.lost[1]

    async def reserve(self, n_prompt: int) -> tuple[float, float]:
        """Waits while requests in flight may still leave room. Raises Halt when there is none."""
        async with self.changed:
            while True:
                need = (n_prompt + self.max_tokens, self.cost(n_prompt, self.max_tokens))
                learning = self.limits[1] < float("inf") and not self.prices and self.rate is None
                fits = all(a + b + c <= limit for a, b, c, limit in zip(self.spent(), self.reserved, need, self.limits))
                if fits and not (learning and self.in_flight):
                    break
                if not self.in_flight:
                    tokens, usd = self.spent()
                    flag = "--max-tokens-total" if tokens + need[0] > self.limits[0] else "--max-cost-usd"
                    raise Halt(f"{flag} would be passed by the next request: {tokens:,.0f} tokens, ${usd:.4f} spent", code=0)
                await self.changed.wait()
            self.in_flight += 1
            self.reserved = [a + b for a, b in zip(self.reserved, need)]
            self.save()
            return need

    async def settle(self, need: tuple[float, float], row: dict | None = None, billed: bool = False):
        """The request has ended; `row` is what it gave, written by now. Where its cost is unknown (billed: no row, but it may have cost)
        the worst case counts. Raises UserError when dollars are bounded and nothing tells what a token costs."""
        usage = row["usage"] or {} if row else {}
        untold = row is not None and self.limits[1] < float("inf") and not self.prices and "cost" not in usage
        async with self.changed:
            self.in_flight -= 1
            self.reserved = [a - b for a, b in zip(self.reserved, need)] if self.in_flight else [0.0, 0.0]
            if billed or row is not None and "reason" in row and not usage:
                self.lost = [a + b for a, b in zip(self.lost, need)]
            elif untold:
                self.lost[1] += need[1]
            if "cost" in usage and usage.get("completion_tokens"):
                self.rate = max(self.rate or 0.0, usage["cost"] / usage["completion_tokens"])
            self.save()
            self.changed.notify_all()
        if untold and self.rate is None:
            raise UserError("--max-cost-usd: this API's usage holds no cost. Give the prices with --usd-per-mtok IN OUT.")


class Run:
    """The workers of one session and what they share.

    unpaid: row id -> drop row of samples that cost nothing (unusable prompt, refused with 4xx, no answer). They are written only at
    the end, so a resumed run tries them again; answers and drops that were paid for are on the disk at once.
    """

    def __init__(self, args, key: str | None, api: str, urls: list[str], tokens: Tokens, store: Store, sources: list[Source]):
        self.args, self.api, self.tokens, self.store, self.unpaid, self.budget = args, api, tokens, store, {}, Budget(args, store)
        tls = ssl.create_default_context()  # one for all clients
        self.servers = [Server(url, key, args.concurrency, args.timeout_s, tls) for url in urls]
        self.prompts = read_prompts(sources, args)
        self.n_rows = sum(1 for _ in mix([len(source) for source in sources], source_weights(sources), args.seed, shuffle=False))
        self.halt, self.failed, self.errors = None, Counter(), Counter()  # failed: kinds of error that samples were given up for
        self.n_prompts = self.n_skipped = self.n_answers = self.n_tokens = self.n_refused = 0  # n_skipped: rows that cannot be asked
        self.n_old = 0  # prompts that an earlier session finished
        self.started, self.failing_since, self.checked, self.checking = time.monotonic(), None, set(), asyncio.Lock()

    @property
    def total(self) -> int:
        """Prompts to answer, as far as is known: rows further on may turn out to be duplicates."""
        left = self.n_rows - self.n_skipped
        return left if self.args.limit is None else min(left, self.args.limit)

    async def work(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.interrupt)
        background = [asyncio.create_task(self.store.writer()), asyncio.create_task(self.tick())]
        await asyncio.gather(*(self.worker() for _ in range(self.args.concurrency)))
        for task in background:
            task.cancel()
        for server in self.servers:
            for client in server.clients:
                await client.close()
        self.progress()

    def interrupt(self):
        if isinstance(self.halt, Halt) and self.halt.code == 130:
            os._exit(130)  # every finished row is on the disk
        self.halt = Halt("interrupted. The same command goes on from here.", code=130)
        log(f"interrupted: waiting for {self.budget.in_flight} requests in flight; once more to leave them")

    async def worker(self):
        try:
            for prompt in self.prompts:
                if isinstance(prompt, dict):
                    self.unpaid[prompt["id"]] = prompt
                    self.n_skipped += 1
                else:
                    await self.converse(prompt)
                    if self.halt:
                        return
                    self.n_prompts += 1
                await asyncio.sleep(0)  # thousands of prompts that are done already must not keep the log from ticking
        except (Halt, UserError) as error:  # the other workers finish what is in flight and paid for
            self.halt = self.halt or error

    async def converse(self, prompt: Prompt):
        """All turns of one prompt in order; those on the disk are read, not asked."""
        ids = [f"{prompt.id}-t{turn}" for turn in range(len(prompt.turns))]
        if all(row_id in self.store.done or row_id in self.store.dropped for row_id in ids):
            self.n_old += 1
            return
        messages, ended = [], None  # ended: why no later turn can follow
        for row_id, (before, given) in zip(ids, prompt.turns):
            messages = messages + before
            if row_id in self.store.done:
                row = self.store.row(row_id)
            elif row_id in self.store.dropped:
                row = self.store.dropped[row_id]
            else:
                row, need = await self.turn(row_id, prompt, messages, given, ended)
                if row is None:
                    return
                if "reason" in row and need is None:
                    self.unpaid[row_id] = row
                else:
                    try:
                        await self.store.put(row)
                    except Halt:
                        if need is not None:
                            await self.budget.settle(need, billed=True)
                        raise
                if need is not None:
                    await self.budget.settle(need, row)
            if "reason" in row:
                ended = ended or "after_dropped_turn"
                continue
            messages = messages + [{"role": "assistant", "content": row["content"]}]
            messages[-1] |= {"reasoning_content": row["reasoning"]} if row["reasoning"] else {}
            messages[-1] |= {"tool_calls": row["tool_calls"]} if row["tool_calls"] else {}
            if row["tool_calls"] or row["finish_reason"] != "stop":  # some APIs end calls with "stop"
                ended = "after_tool_call" if row["tool_calls"] else "after_cut_turn"

    async def turn(self, row_id: str, prompt: Prompt, messages: list[dict], given: dict | None,
                   ended: str | None) -> tuple[dict | None, tuple | None]:
        """(answer or drop row, reservation to settle once it is written or None). (None, None): the run was halted."""
        need = usage = None
        try:
            if ended:
                raise Drop(ended)
            if self.api == "sglang" and self.args.check_template:
                await self.check_kind(messages, prompt.tools)
            prompt_ids = self.tokens.prompt_ids(messages, prompt.tools)
            if self.args.answers == "given":
                answer = given_answer(given)
            else:
                answer, need = await self.ask(row_id, prompt_ids, messages, prompt.tools)
                if answer is None:
                    return None, None
            usage = answer.usage
            if isinstance(answer, Drop):
                raise answer
            calls_before = sum(len(message.get("tool_calls") or []) for message in messages)
            ids, ids_source = settle_ids(answer, prompt_ids, self.tokens, calls_before, self.args.on_mismatch)
        except Drop as drop:
            return drop_row(row_id, str(drop), drop.detail, usage), need
        self.n_answers, self.n_tokens = self.n_answers + 1, self.n_tokens + len(ids)
        return {"id": row_id, "source": prompt.source, "messages": messages, "reasoning": answer.reasoning, "content": answer.content,
                "tool_calls": answer.tool_calls, "finish_reason": answer.finish, "model": answer.model or self.args.model,
                "provider": answer.provider, "usage": answer.usage, "prompt_ids": prompt_ids, "response_ids": ids,
                "ids_source": ids_source, "flags": sorted(set(answer.flags))}, need

    async def check_kind(self, messages: list[dict], tools: list | None):
        """check_template() once for each kind of prompt: roles in it, tools, calls, reasoning, content in parts."""
        kind = bool(tools), *sorted({(m["role"], "tool_calls" in m, "reasoning_content" in m, isinstance(m.get("content"), list))
                                     for m in messages})
        if kind not in self.checked:
            failures = 0
            async with self.checking:
                while kind not in self.checked and (server := await self.pick(retry=True)):
                    try:
                        await check_template(server, self.args, self.tokens, messages, tools)
                        self.checked.add(kind)
                    except Drop as drop:  # the next prompt of this kind is tried
                        log(f"template not compared with the chat route of {server.url}: {drop} {drop.detail}")
                        return
                    except Retry as retry:
                        self.note_failure(server, retry)
                        failures += retry.blame
                        if failures >= self.args.max_attempts:
                            raise UserError(f"{server.url}: the chat route cannot be compared with the template ({retry}: {retry.detail}). "
                                            "Mend the server, or pass --no-check-template.") from None
                        await self.sleep(self.args.backoff_s)

    async def ask(self, row_id: str, prompt_ids: list[int], messages: list[dict],
                  tools: list | None) -> tuple[Answer | Drop | None, tuple | None]:
        """(the answer or why there is none, reservation or None if nothing was paid), through as many attempts and servers as it takes."""
        path, body = request_body(self.api, self.args, self.tokens.stop, row_id, prompt_ids, messages, tools)
        attempts = blamed = 0
        while True:
            need = await self.budget.reserve(len(prompt_ids))
            server = await self.pick(retry=attempts > 0)
            if server is None:
                await self.budget.settle(need)
                return None, None
            try:
                answer = await server.post(path, body, self.args.api_key_env)
                answer = read_native(answer, prompt_ids, self.tokens) if self.api == "sglang" else read_chat(answer, self.api)
            except Drop as drop:
                answer = drop
                if str(drop).startswith("http_"):  # refused: nothing was paid
                    await self.budget.settle(need)
                    need, self.n_refused = None, self.n_refused + 1
                    if self.n_refused >= 20 and not self.n_answers and not self.store.done:
                        raise UserError(f"{server.url} refuses every request ({drop}: {drop.detail}). "
                                        "Check --model, --max-tokens and --api.") from None
            except Retry as retry:
                await self.budget.settle(need, billed=retry.billed)
                attempts, blamed = attempts + 1, blamed + retry.blame
                pause = min(60.0, self.args.backoff_s * 2 ** (attempts - 1)) * random.uniform(0.5, 1.0)
                if retry.after is not None:
                    server.down_until = max(server.down_until, time.monotonic() + retry.after)
                    if all(other.down or other.down_until > time.monotonic() for other in self.servers):
                        pause = retry.after * random.uniform(1.0, 1.1)
                self.note_failure(server, retry)
                if blamed >= self.args.max_attempts:
                    self.failed[str(retry)] += 1
                    if self.failed.total() > max(10, self.args.max_failed_share * self.total):
                        raise Halt(self.failure_text(), code=1) from None
                    return Drop(f"no_answer_{retry}"), None
                await self.sleep(pause)
                continue
            except BaseException:
                await self.budget.settle(need)
                raise
            self.failing_since, server.failures = None, 0
            if server.down:
                server.down = False
                log(f"{server.url} answers again")
            return answer, need

    def note_failure(self, server: Server, error: Retry):
        """Count it, keep away from a server that cannot be reached, end the run after --outage-s without any success."""
        kind, now = str(error), time.monotonic()
        if kind not in self.errors:
            log(f"first {kind} from {server.url}: {error.detail}" + (f" (asks to wait {error.after:.0f} s)" if error.after else ""))
        self.errors[kind] += 1
        server.failures += 1
        # one that answers only errors has nothing in flight, so it would draw every request
        broken = server.failures >= 3 and any(not other.down for other in self.servers if other is not server)
        if kind == "unreachable" or broken:
            if not server.down:
                log(f"{server.url} {'cannot be reached' if kind == 'unreachable' else f'gives only errors ({kind})'}; trying on")
            server.down, server.down_until = True, max(server.down_until, now + PROBE_S)
        self.failing_since = self.failing_since or now
        if now - self.failing_since > self.args.outage_s:
            raise UserError(f"{', '.join(server.url for server in self.servers)}: no answer for {self.args.outage_s:.0f} s (last: {kind}). "
                            "Start the server or check --base-url; the same command goes on from here.")

    def failure_text(self) -> str:
        kinds = ", ".join(f"{kind} {n}" for kind, n in self.failed.most_common())
        return (f"{self.failed.total()} samples got no answer ({kinds}). Everything else is kept; the same command tries them again, "
                "with --max-failed-share 1 it drops those that fail again.")

    async def pick(self, retry: bool) -> Server | None:
        """The least busy healthy server; waits for one. None: the run was halted.

        A server that is down (not reached, or errors only) gets one request every PROBE_S, and no second attempt of a sample while another
        one answers.
        """
        while not self.halt:
            now = time.monotonic()
            able = [server for server in self.servers if server.down_until <= now and server.free]
            healthy = [server for server in able if not server.down]
            answering = any(not server.failures for server in healthy)
            for server in able:
                if server.down and not (retry and answering):
                    server.down_until = now + PROBE_S
                    return server
            if healthy:
                return min(healthy, key=lambda server: server.in_flight)
            await self.sleep(min(server.down_until for server in self.servers) - now + random.uniform(0.01, 0.1))
        return None

    async def sleep(self, seconds: float):
        end = time.monotonic() + seconds
        while not self.halt and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.5))

    async def tick(self):
        while True:
            await asyncio.sleep(self.args.log_interval)
            self.progress()

    def progress(self):
        took = time.monotonic() - self.started
        new = self.n_prompts - self.n_old
        left = int((self.total - self.n_prompts) * took / new) if new else 0
        eta = f"{left // 3600}h{left % 3600 // 60:02d}m{left % 60:02d}s" if new or self.n_prompts == self.total else "unknown"
        tokens, usd = self.budget.spent()
        errors = ", ".join(f"{kind} {n}" for kind, n in self.errors.most_common()) or "none"
        log(f"{self.n_prompts}/{self.total} prompts | {self.n_answers / took:.1f} answers/s | {self.n_tokens / took:,.0f} tok/s | "
            f"in flight {self.budget.in_flight} | dropped {len(self.store.dropped.keys() | self.unpaid.keys())} | errors {errors} | "
            f"{tokens:,.0f} tokens in all | ${usd:.4f} | eta {eta}")


def drop_row(row_id: str, reason: str, detail: str = "", usage: dict | None = None) -> dict:
    return {"id": row_id, "reason": reason, "detail": printable(detail), "usage": usage}


def given_answer(message: dict | None) -> Answer:
    """The answer that stands in the prompt row itself (--answers given). Raises Drop."""
    if message is None:
        raise Drop("no_answer_given")
    content = message.get("content") or ""
    content = content if isinstance(content, str) else "".join(part["text"] for part in content)
    try:
        calls = text_calls(message.get("tool_calls") or [])
    except (TypeError, KeyError, AttributeError) as error:
        raise Drop("bad_prompt", repr(error)) from None
    if not content and not calls:
        raise Drop("empty")
    return Answer(content, message.get("reasoning_content"), calls, "tool_calls" if calls else "stop", None, provider="given")


async def discover(args, key: str | None) -> tuple[str, str | None, list[str]]:
    """(api, SGLang's version, URLs to post to); sets args.model to the name SGLang serves.

    Raises UserError when no server answers, or when they are not alike.
    """
    if args.answers == "given":
        return "given", None, []
    if not args.base_url:
        raise UserError("no server: name at least one --base-url.")
    api, found, down = args.api, {}, {}  # url -> /server_info of an SGLang, or {}; url -> error
    for url in args.base_url:
        try:
            host, scheme = httpx.URL(url).host, httpx.URL(url).scheme
        except httpx.InvalidURL:
            host = scheme = None
        if scheme not in ("http", "https") or not host:
            raise UserError(f"--base-url {url}: not an http(s) URL.")
        if api == "auto":
            api = next((name for name in ("openrouter", "moonshot") if name in host), "auto")
        try:
            async with httpx.AsyncClient(timeout=20, headers={"Authorization": f"Bearer {key}"} if key else {}) as client:
                response = await client.get(url.rstrip("/").removesuffix("/v1") + "/server_info" if api in ("auto", "sglang") else url)
            if response.status_code >= 500 and api in ("auto", "sglang"):  # a gateway whose SGLang is not up yet is no text API
                down[url] = f"HTTP {response.status_code}"
                continue
            info = response.json() if response.status_code == 200 and api in ("auto", "sglang") else {}
        except httpx.TransportError as error:
            down[url] = type(error).__name__
            continue
        except ValueError:  # a page, no JSON
            info = {}
        found[url] = info if isinstance(info, dict) and {"version", "served_model_name"} <= set(info) else {}
    if not found:
        raise UserError(f"no server answers: {', '.join(f'{url} ({error})' for url, error in down.items())}. "
                        "Start it or check --base-url and --api.")
    if down:
        log(f"not up yet, will be tried: {', '.join(down)}")
    served = {(info.get("version"), info.get("served_model_name")) for info in found.values()}
    if api == "sglang" and (None, None) in served or api == "auto" and len(served) > 1:
        raise UserError("--base-url: not all of them are the same SGLang and model: "
                        f"{sorted(served, key=str)} (None: no /server_info there).")
    version, model = served.pop()
    if api == "auto":
        api = "sglang" if version else "openai"
    if version and args.model not in (None, model):
        raise UserError(f"{next(iter(found))} serves {model}, not {args.model}. Give the served name as --model.")
    args.model = model or args.model
    if not args.model:
        raise UserError("--model is needed: this API serves several models.")
    if api == "sglang":
        return api, version, [url.rstrip("/").removesuffix("/v1") for url in args.base_url]
    return api, version, [url if httpx.URL(url).path.strip("/") else f"{url.rstrip('/')}/v1" for url in args.base_url]


async def check_template(server: Server, args, tokens: Tokens, messages: list[dict], tools: list | None):
    """SGLang's chat route must read this prompt as the ids we send. It returns them from 0.5.15 on; before, their number has to do.
    Settles tokens.tool_form by trying. Raises UserError, Drop, Retry."""
    mode = args.thinking == "on"
    body = {"model": args.model, "messages": messages, "max_tokens": 1, "temperature": 0, "return_prompt_token_ids": True,
            "chat_template_kwargs": {"thinking": mode, "enable_thinking": mode}, **({"tools": tools} if tools else {})}
    answer = await server.post("/v1/chat/completions", body, args.api_key_env)
    try:
        theirs, count = answer["choices"][0].get("prompt_token_ids"), answer["usage"]["prompt_tokens"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Retry("bad_answer", repr(error)) from None
    what = "+".join(dict.fromkeys(message["role"] for message in messages)) + (" with tools" if tools else "")
    for form in (tokens.tool_form, *TOOL_FORMS):
        tokens.tool_form = form
        ours = tokens.prompt_ids(messages, tools)
        if count == len(ours) and theirs in (None, ours):
            log(f"template: {server.url} reads a prompt of {what} as the same {count} ids"
                + ("" if theirs else " (as many; it does not return them)"))
            return
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs or [])) if a != b), None)
    raise UserError(f"{server.url} renders a prompt of {what} as {count} ids, {args.tokenizer} as {len(ours)}"
                    + (f", different from position {at} on" if at is not None else "") + ". Name the folder that the server serves with "
                    "--tokenizer, or pass --no-check-template if the difference is wanted.")


def finish(folder: Path, dropped: dict[str, dict], head: dict, cost: dict):
    """Sort all rows by id, so that order of completion leaves no trace; then dropped.jsonl, report.json and, last, manifest.json."""
    ids, places, prompt_lens, response_lens = [], array.array("q"), array.array("i"), array.array("i")
    seen = {name: Counter() for name in ("finish_reasons", "flags", "sources", "ids_source")}
    for number, path in enumerate(parts(folder)):
        for offset, row in rows(path):
            ids.append(row["id"])
            places.append(number << 48 | offset)
            prompt_lens.append(len(row["prompt_ids"]))
            response_lens.append(len(row["response_ids"]))
            seen["finish_reasons"][row["finish_reason"]] += 1
            seen["flags"].update(row["flags"])
            seen["sources"][row["source"]] += 1
            seen["ids_source"][row["ids_source"]] += 1
    reasons = Counter(row["reason"] for row in dropped.values())
    if not ids:
        raise UserError(f"{folder}: not one answer was kept; dropped: {dict(reasons)}.")
    assert len(set(ids)) == len(ids), "an id was written twice"
    files = sort_rows(folder, [places[i] for i in sorted(range(len(ids)), key=ids.__getitem__)])
    write_atomic(folder / "dropped.jsonl", "".join(json.dumps(dropped[row_id], ensure_ascii=False) + "\n" for row_id in sorted(dropped)))
    lengths = {name: {f"p{q}": int(np.percentile(values, q)) for q in (1, 10, 50, 90, 99, 100)} | {"mean": round(float(np.mean(values)), 1)}
               for name, values in (("prompt", prompt_lens), ("response", response_lens)) if values}
    counts = {"kept": len(ids), "dropped": dict(sorted(reasons.items()))}
    seen = {name: dict(sorted(counter.items())) for name, counter in seen.items()} | {
        "tokens": {"prompt": sum(prompt_lens), "response": sum(response_lens)}, "lengths": lengths}
    write_atomic(folder / "report.json", json.dumps({"counts": counts, **seen, "cost": cost}, indent=1) + "\n")
    write_atomic(folder / "manifest.json", json.dumps({**head, "counts": counts, **seen, "files": files}, indent=1) + "\n")
    log(f"kept {len(ids):,} | dropped {sum(reasons.values()):,} {dict(reasons)} "
        f"| finish {seen['finish_reasons']} | flags {seen['flags']}")
    for name, values in lengths.items():
        log(f"{name} tokens: " + " | ".join(f"{key} {value:,}" for key, value in values.items()))
    log("cost: " + " | ".join(f"{key} {value}" for key, value in cost.items()))
    if n := seen["ids_source"].get("server"):
        same = n - seen["flags"].get("rebuild_differs", 0)
        log(f"ids rebuilt from text would equal the engine's in {same:,} of {n:,} rows ({100 * same / n:.2f} %)")


def main(argv: list[str]) -> None:
    args = parse_args(build_parser(), "generate", argv)
    for name in ("concurrency", "max_tokens", "max_attempts", "limit", "max_tokens_total"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1.")
    for name in ("max_cost_usd", "timeout_s", "outage_s", "backoff_s", "log_interval"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0.")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: must not be negative.")
    if not args.tokenizer.is_dir():
        raise UserError(f"{args.tokenizer}: no such folder. Name the target's folder with --tokenizer.")
    key = os.environ.get(args.api_key_env, "").strip() if args.api_key_env else None  # a file's \r is no part of a key
    if args.api_key_env and not key:
        raise UserError(f"--api-key-env {args.api_key_env}: this variable is empty. Export the key in it.")

    # 1. what to ask, and whether this folder began with the same wish
    seen = set()
    sources = [open_jsonl(spec, seen) for spec in args.prompts] + [open_dataset(spec, seen) for spec in args.dataset]
    if not sources:
        raise UserError("nothing to ask: name --prompts or --dataset.")
    inputs = {"tokenizer": tokenizer_hash(args.tokenizer)} | {
        f"{number}:{source.name}": source.digest for number, source in enumerate(sources)}
    config = {name: value for name, value in vars(args).items() if name not in UNASKED} | {
        "columns": [source.options for source in sources], "inputs": inputs}
    log("config " + json.dumps({**vars(args), "inputs": inputs}, default=str))
    with open_stage(args.output_dir, config, set()):
        if (args.output_dir / "manifest.json").exists():
            manifest = read_manifest(args.output_dir, STAGE)
            if manifest["stopped"] is None and manifest["limit"] == args.limit:
                log(f"complete already: {manifest['counts']}")
                log(f"done: {args.output_dir}")
                return
        store = Store(args.output_dir, args.usd_per_mtok)
        try:
            answer_all(args, key, store, sources, config, inputs)
        except UserError:
            if not parts(args.output_dir) and not (args.output_dir / "dropped.jsonl").exists():
                (args.output_dir / "stage.json").unlink()  # nothing was answered under this config: the mended one may begin here
            raise
    log(f"done: {args.output_dir}")


def answer_all(args, key: str | None, store: Store, sources: list[Source], config: dict, inputs: dict) -> None:
    # 2. the target's tokens and the servers
    api, version, urls = asyncio.run(discover(args, key))
    if other := store.kinds - {("server", args.model) if api == "sglang" else ("rebuilt", None)}:
        raise UserError(f"{args.output_dir}: holds rows with (ids_source, model) {sorted(other, key=str)}, "
                        f"api {api} with model {args.model} gives others. Use another folder.")
    tokenizer = load_tokenizer(args.tokenizer, args.trust_remote_code)
    tokens = Tokens(tokenizer, args.stop_token, args.think_tokens, args.tool_tokens, args.thinking == "on")
    versions = {"python": sys.version.split()[0], "sglang": version} | {
        name: importlib.metadata.version(name) for name in ("openai", "transformers")}
    log(f"versions {versions} | api {api} | model {args.model} | {len(store.done)} rows here already, {len(store.dropped)} dropped")

    # 3. ask
    (args.output_dir / "manifest.json").unlink(missing_ok=True)  # of a smaller --limit or budget: this session goes on from it
    run = Run(args, key, api, urls, tokens, store, sources)
    asyncio.run(run.work())
    if run.halt is None and run.failed.total() > args.max_failed_share * run.total:
        run.halt = Halt(run.failure_text(), code=1)
    if isinstance(run.halt, UserError):
        raise run.halt
    if run.halt is not None and run.halt.code:
        print(f"{STAGE}: {run.halt}", file=sys.stderr, flush=True)
        sys.exit(run.halt.code)

    # 4. the finished folder
    if run.halt is not None:
        log(f"stopped: {run.halt}. The folder is finished with what is there; a larger budget goes on from it.")
    tokens_spent, usd_spent = run.budget.spent()
    try:
        finish(args.output_dir, store.dropped | run.unpaid,
               {"schema": SCHEMA, "stage": STAGE, "config": config, "inputs": inputs, "versions": versions, "limit": args.limit,
                "stopped": str(run.halt).split()[0] if run.halt else None},
               {"usd": round(usd_spent, 6), "tokens": int(tokens_spent), "tokens of failed requests, at most": int(run.budget.lost[0])})
    except OSError as error:
        print(f"{STAGE}: {cannot_write(args.output_dir, error)}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    run(main)
