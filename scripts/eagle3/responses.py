"""What 01_generate writes and every later stage reads: one row per assistant turn, as JSON lines in part files.

    responses/part-00000.jsonl   rows: `answer_row` names the keys (configs/artifacts.json repeats them for machines)
    responses/dropped.jsonl      `drop_row`: the turns that gave no row, and why
    responses/manifest.json      last; `files` holds the hash of every part

A row's ids are decided once, by 01, and never computed again: prompt_ids is what the target read, the prefilled
`<think>` included; response_ids is what it emitted, the stop token included where it did stop, and what the loss is
taken over.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

from eagle3.masking import clean
from eagle3.stage import UserError, read_manifest, sha256_file

WRITTEN_BY = "01_generate"


# ---- rows ----
@dataclass
class Question:
    """One assistant turn to be answered. tools: definitions in OpenAI's form, or None; prompt_ids: once rendered."""
    row_id: str
    source: str
    messages: list[dict]
    tools: list | None
    prompt_ids: list[int] = field(default_factory=list)


@dataclass
class Answer:
    """One assistant turn. finish: stop, length, tool_calls, or whatever the API said.

    ids: as the engine emitted them, or None where only text came. tool_calls: as `text_calls` makes them.
    """
    content: str
    reasoning: str | None
    tool_calls: list
    finish: str
    usage: dict | None
    ids: list[int] | None = None
    model: str | None = None
    provider: str | None = None
    flags: list[str] = field(default_factory=list)


class Drop(Exception):
    """A turn cannot be used. str(): the reason, a fixed word for counting. usage: what it cost all the same."""

    def __init__(self, reason: str, detail: str = "", usage: dict | None = None):
        super().__init__(reason)
        self.detail, self.usage = detail, usage


def answer_row(question: Question, answer: Answer, response_ids: list[int], ids_source: str) -> dict:
    """A row of a part file. ids_source: "server" (as the engine emitted them) or "rebuilt" (from an API's text)."""
    return {"id": question.row_id, "source": question.source, "messages": question.messages,
            "reasoning": answer.reasoning, "content": answer.content, "tool_calls": answer.tool_calls,
            "finish_reason": answer.finish, "model": answer.model, "provider": answer.provider, "usage": answer.usage,
            "prompt_ids": question.prompt_ids, "response_ids": response_ids, "ids_source": ids_source,
            "flags": sorted(set(answer.flags))}


def drop_row(row_id: str, reason: str, detail: str = "", usage: dict | None = None) -> dict:
    """A row of dropped.jsonl."""
    return {"id": row_id, "reason": reason, "detail": printable(detail), "usage": usage}


def printable(text: object) -> str:
    """One line that any file and terminal takes. A server's words may hold half a surrogate, escape codes, a key."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(clean(f"{text}").split())[:200])


# ---- assistant messages, in whatever spelling an API or a data set has for them ----
def reasoning_of(message: dict) -> str | None:
    """The reasoning, in whichever of three fields it came. Raises Drop when only a summary or a cipher came."""
    details = message.get("reasoning_details") or []  # looked at first: a summary stands in `reasoning` too
    kinds = {part.get("type") for part in details}
    if kinds - {"reasoning.text"}:
        raise Drop("reasoning_encrypted" if "reasoning.encrypted" in kinds else "reasoning_summary")
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str):
            return message[key]
    return "".join(part.get("text") or "" for part in details) if details else None


def content_of(content: object) -> tuple[str, str | None]:
    """(text, reasoning or None) of a message's content: a text, parts, or nothing. Raises TypeError, Drop.

    Some APIs put the reasoning among the parts: {"type": "thinking", "thinking": a text or text parts}.
    """
    if content is None or isinstance(content, str):
        return content or "", None
    if not isinstance(content, list):
        raise TypeError(f"content is {type(content).__name__}")
    texts, thoughts = [], []
    for part in content:
        kind = part.get("type")
        if kind in ("thinking", "reasoning"):
            thought = part.get("thinking") or part.get(kind) or part.get("text") or ""
            thoughts.append(content_of(thought)[0])
        elif kind in ("redacted_thinking", "reasoning.encrypted"):
            raise Drop("reasoning_encrypted")
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind not in ("text", "output_text"):
            raise Drop("not_text", f"a part of type {kind!r}")
    return "".join(texts), "".join(thoughts) if thoughts else None


def text_calls(calls: list) -> list[dict]:
    """Tool calls with the fields of every row, arguments as JSON text.

    Raises Drop where they come in another form: asked again they would come so again, and an object does not tell which
    text, and so which tokens, the target wrote.
    """
    try:
        calls = [{"id": str(call.get("id") or ""), "type": "function", "function": {
            "name": call["function"]["name"], "arguments": call["function"].get("arguments") or "{}"}}
            for call in calls]
        wrong = [text for call in calls for text in call["function"].values() if not isinstance(text, str)]
    except (TypeError, KeyError, AttributeError) as error:
        raise Drop("bad_tool_calls", f"no list of calls with a function each: {error!r}") from None
    if wrong:
        raise Drop("bad_tool_calls", f"a call's name or arguments are no text but {type(wrong[0]).__name__}")
    return calls


def message_of(row: dict) -> dict:
    """The answer of a row, or the fields of an Answer, as the message that the next turn's prompt holds."""
    message = {"role": "assistant", "content": row["content"]}
    if row["reasoning"]:
        message["reasoning_content"] = row["reasoning"]
    if row["tool_calls"]:
        message["tool_calls"] = row["tool_calls"]
    return message


# ---- files ----
def part_name(number: int) -> str:
    return f"part-{number:05d}.jsonl"


def part_files(folder: Path) -> list[Path]:
    """The part files there, in order; finished or not."""
    return sorted(folder.glob("part-*.jsonl"))


def finished_parts(folder: Path) -> list[Path]:
    """The part files of a folder that 01 has finished, unchanged since: hashed here. Raises UserError."""
    files, parts = read_manifest(folder, WRITTEN_BY).get("files", {}), part_files(folder)
    if not parts:
        raise UserError(f"{folder}: no part-*.jsonl. Run {WRITTEN_BY}.py first.")
    for name in sorted(files.keys() | {part.name for part in parts}) if files else ():
        if not (folder / name).is_file() or sha256_file(folder / name) != files.get(name):
            raise UserError(f"{folder / name}: not the file that {WRITTEN_BY}.py finished with. "
                            f"Run {WRITTEN_BY}.py again.")
    return parts


def read_jsonl(path: Path) -> Iterator[dict]:
    """The objects of any JSONL file, one at a time: a folder may be larger than the memory. Raises UserError."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):  # not str.splitlines(): a text in it may hold U+2028 as it is
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("no object")
                    yield row
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSONL (line {number}: {error}).") from None


def row_at(path: Path, offset: int) -> dict:
    """The row that begins at a byte of a JSONL file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return json.loads(file.readline())
