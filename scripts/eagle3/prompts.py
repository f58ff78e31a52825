"""What 01_generate asks: rows of its sources, mixed by weight, as conversations; each prompt once.

A run may be given more rows and sources later: behind those of before, which keep their ids and their order.
"""
from __future__ import annotations

import hashlib
import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import numpy as np

from eagle3.account import Account
from eagle3.growth import noted
from eagle3.responses import Drop, content_of, drop_row, reasoning_of
from eagle3.prompt_sources import Source, filled, prompt_column
from eagle3.stage import UserError, log

ROLES = {"human": "user", "prompter": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant",
         "bing": "assistant", "bard": "assistant", "ai": "assistant", "bot": "assistant", "developer": "system",
         "function_response": "tool", "observation": "tool"}  # other spellings in public data sets
NO_INPUT = "<noinput>"  # what Alpaca's first release has for an empty input


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


def mixes(sizes: list[list[int]], weights: list[float | None], seed: int, shuffle: bool) -> Iterator[tuple[int, int]]:
    """`mix` of the last of these sizes, behind what those of the earlier ones held: a run that has grown since."""
    taken = [0] * len(weights)
    for now in sizes:
        before = list(taken)
        for source, row in mix(now, weights[:len(now)], seed, shuffle):
            if row >= before[source]:  # rows_before lets only those mixes stand before another that took every row
                taken[source] += 1
                yield source, row


def mixed(sources: list[Source], seed: int, shuffle: bool,
          earlier: list[list[int]] = ()) -> Iterator[tuple[int, int]]:
    """`mixes` of sources by their own weights. earlier: of `rows_before`."""
    return mixes([*earlier, [len(source) for source in sources]], [source.weight for source in sources], seed, shuffle)


# ---- more prompts than a run began with ----
def rows_before(sources: list[Source], begun: dict, inputs: dict, args) -> list[list[int]]:
    """The rows of each source when a run began, and each time that it grew, as far as their mixes are to come first.

    Empty where the mix of now begins with that of then anyway. begun: the config of the run so far; inputs:
    {number:name: digest} of now. Raises UserError: its prompts are others, and not only more behind the old ones.
    """
    earlier, options = begun.get("grown", []), [source.options for source in sources]
    old, new = ({name: digest for name, digest in found.items() if name != "tokenizer"}
                for found in (begun.get("inputs", {}), inputs))
    if "columns" not in begun or (old, begun["columns"]) == (new, options):
        return earlier
    sizes = []
    for number, name in enumerate(sorted(old, key=lambda name: int(name.partition(":")[0]))):
        if name not in new:
            raise others(args, f"{name} is not among those of now, or not in its place")
        if begun["columns"][number] != options[number]:
            raise others(args, f"{name} had {spelled(begun['columns'][number])} behind it, now "
                               f"{spelled(options[number])}")
        sizes.append(old_rows(sources[number], old[name], new[name], args))
    rows, weights = [len(source) for source in sources], [source.weight for source in sources]
    before, now = (mixes(sizes, weights, args.seed, args.shuffle) for sizes in ([*earlier, sizes], [rows]))
    continued = all(place == next(now, None) for place in before)
    if not continued and len(sources) > 1 and any(weights):
        raise others(args, "with these weights their rows would come in another order than they were asked in")
    if not continued and args.limit is not None and args.limit < sum(rows):
        how = "--shuffle orders" if args.shuffle else "the mix of several sources orders"
        raise others(args, f"{how} them anew with each row more, and --limit {args.limit} takes the first ones. It can "
                           "go on without --limit")
    log(f"the prompts have grown: {sum(sizes):,} rows as they were, {sum(rows) - sum(sizes):,} more")
    return [] if continued else [*earlier, sizes]


def old_rows(source: Source, old: str, new: str, args) -> int:
    """How many rows a source had when its digest was `old`. Raises UserError: it has not only grown."""
    if old == new:
        return len(source)
    if source.path is None:
        raise others(args, f"the data set {source.name} has changed, and only files of --prompts can grow")
    if (rows := source.rows_until(old)) is None:
        raise others(args, f"{source.path} is not the old file with rows behind its end: rows of it were changed, "
                           "moved or taken away")
    return rows


def with_prompts_of(config: dict, old: dict, begun: dict, folder: Path) -> dict:
    """The config of before (`old`) with the prompts of now: `rows_before` has found them to go on from `begun`."""
    if noted(folder) != begun:
        raise UserError(f"{folder}: another process has just worked there. Run the same command again.")
    if "columns" not in begun:
        return old
    grown = {"grown": config["grown"]} if "grown" in config else {}
    inputs = config["inputs"] | {"tokenizer": (old.get("inputs") or {}).get("tokenizer")}
    return {key: value for key, value in old.items() if key != "grown"} | {
        "columns": config["columns"], "inputs": inputs} | grown


def spelled(options: dict) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items()) or "nothing"


def others(args, why: str) -> UserError:
    return UserError(f"{args.output_dir}: begun with other prompts: {why}. Put the old ones back (rows and files may "
                     "come behind them), or use another folder.")


# ---- conversations ----
def as_message(given: dict) -> dict:
    """One message of any spelling in OpenAI's form, its reasoning as `reasoning_content`. Raises Drop."""
    message = {key: value for key, value in given.items() if value is not None}
    role = message.pop("from", None) or message.get("role")
    role = role.lower() if isinstance(role, str) else role
    message["role"] = role = ROLES.get(role, role)
    if "value" in message:
        message["content"] = message.pop("value")
    reasoning = reasoning_of(message)
    for key in ("reasoning", "reasoning_details"):
        message.pop(key, None)
    parts = message.get("content")
    if role not in ("system", "user", "assistant", "tool") or not isinstance(parts, (str, list, type(None))):
        raise Drop("bad_prompt", f"role {role!r}, content {type(parts).__name__}")
    if isinstance(parts, list):
        if not all(isinstance(part, dict) for part in parts):
            raise Drop("bad_prompt", "a content part is no object")
        if role == "assistant":
            message["content"], among_parts = content_of(parts)
            reasoning = reasoning or among_parts
        else:
            parts = [{key: value for key, value in part.items() if value is not None} for part in parts]
            if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
                raise Drop("not_text")
            message["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def conversation_of(row: dict, options: dict) -> list[dict]:
    """The messages as the row has them, in whichever column and form. Raises Drop."""
    try:
        kind, column = prompt_column(row, options)
    except UserError as error:  # a data set's row whose cells are empty
        raise Drop("empty_prompt", str(error)) from None
    given = row.get(column)
    if isinstance(given, str) and kind == "messages":
        given = json.loads(given)
    elif isinstance(given, str):
        more = row.get(options.get("input", "input" if column == "instruction" else None))
        if not isinstance(more, str) and filled(more):
            raise Drop("bad_prompt", f"input is {type(more).__name__}")
        if filled(more) and more.strip() and more.strip().lower() != NO_INPUT:
            given = f"{given}\n\n{more}" if given.strip() else more
        given = [{"role": "user", "content": given}]
    if isinstance(given, dict) and len({len(values) for values in given.values() if isinstance(values, list)}) == 1:
        given = [dict(zip(given, values)) for values in zip(*given.values())]  # how `datasets` hands on a Sequence
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise Drop("bad_prompt", f"{column} is {type(given).__name__}")
    return given


def tools_of(row: dict, options: dict) -> list[dict] | None:
    """The tool definitions of a row, nulls in their schemas included. Raises Drop, ValueError."""
    tools = row.get(options.get("tools", "tools"))
    if isinstance(tools, str) and tools.strip():
        tools = json.loads(tools)
    if not filled(tools) or not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Drop("bad_prompt", f"tools is {type(tools).__name__}, no list of objects")
    return tools


def as_messages(row: dict, options: dict, system: str | None) -> tuple[list[dict], list | None]:
    """The chat messages and tools of one row, in OpenAI's form. system: for rows without one. Raises Drop.

    Fields of types that nobody expects raise TypeError, AttributeError, KeyError or ValueError.
    """
    messages = [as_message(message) for message in conversation_of(row, options)]
    own = row.get(options.get("system", "system"))
    if filled(own) and not isinstance(own, str):
        raise Drop("bad_prompt", f"system is {type(own).__name__}")
    system = own if filled(own) and own else system
    if system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    if not any(message["role"] == "user" and message.get("content") for message in messages):
        raise Drop("empty_prompt")
    tools = tools_of(row, options)
    json.dumps([messages, tools], allow_nan=False)  # ValueError: NaN is no JSON, no server would take it
    return messages, tools


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


WIDTH = {code: unicodedata.normalize("NFKC", chr(code)) for code in [0x3000, *range(0xFF00, 0xFFF0)]
         if unicodedata.decomposition(chr(code)).startswith(("<wide>", "<narrow>"))}  # not NFKC: it takes 2² for 22


def fingerprint(messages: list[dict], tools: list | None, answers: bool = False) -> int:
    """64 bits, equal for prompts with equal tools and equal words but for case, Unicode width and white space.

    Assistant turns that will be asked anew are left out; answers: those too are compared.
    """
    asked = messages if answers else [message for before, _ in plan_turns(messages) for message in before]
    text = "\n".join(f"{m['role']}\n{m.get('content')}" + (f"\n{m['tool_calls']}" if m.get("tool_calls") else "")
                     for m in asked)
    text = unicodedata.normalize("NFC", text.translate(WIDTH)).casefold()
    text = " ".join(text.split()) + (json.dumps(tools) if tools else "")
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


# ---- the prompts of a run ----
@dataclass
class Prompt:
    """One conversation. source: its number; turns: of `plan_turns`; drop: its drop row where it cannot be asked."""
    id: str
    source: int
    source_name: str
    turns: list
    tools: list | None = None
    drop: dict | None = None


class Duplicates:
    """Which prompts there were, and where the first of each kind stands."""

    def __init__(self, sources: list[Source], account: Account):
        self.sources, self.account = sources, account
        self.first: dict[int, int] = {}  # fingerprint -> source << 40 | row

    def refuse(self, key: int, which: int, number: int, row: dict) -> None:
        """Raises Drop when a prompt with this fingerprint was there before; says what else the two rows hold."""
        place = self.first.setdefault(key, which << 40 | number)
        if place == which << 40 | number:
            return
        source, at = self.sources[place >> 40], place & (1 << 40) - 1
        first, read = source[at], {*source.columns_read().values(), *self.sources[which].columns_read().values()}
        self.account.differs(which, number, [column for column, value in row.items() if column not in read
                                             and filled(value) and column in first and first[column] != value])
        raise Drop("duplicate", f"of row {at} of {source.name}")


def read_prompts(sources: list[Source], args, account: Account, earlier: list[list[int]] = ()) -> Iterator[Prompt]:
    """The prompts of the mix one by one; those that cannot be asked (`drop`) --limit does not count.

    earlier: of `rows_before`.
    """
    duplicates, count = Duplicates(sources, account), 0
    for which, number in mixed(sources, args.seed, args.shuffle, earlier):
        if count == args.limit:
            return
        source = sources[which]
        row = source[number]
        account.read[which] += 1
        name = source.id_of(number, row)
        try:
            try:
                messages, tools = as_messages(row, source.options, args.system)
                turns = plan_turns(messages)
                if not turns:
                    raise Drop("no_turn", f"nothing is to be answered after the role {messages[-1]['role']}")
                key = fingerprint(messages, tools, args.answers == "given")
            except (TypeError, AttributeError, KeyError, ValueError, RecursionError) as error:  # types nobody expects
                raise Drop("bad_prompt", repr(error)) from None
            if args.dedup:
                duplicates.refuse(key, which, number, row)
        except Drop as drop:
            yield Prompt(name, which, source.name, [], drop=drop_row(f"{name}-t0", str(drop), drop.detail))
            continue
        count += 1
        yield Prompt(name, which, source.name, turns, tools)
