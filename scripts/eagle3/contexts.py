"""`--context`: prompts padded with real text to a length in tokens, so that figures can be told by context.

What is laid before a question are other prompts' texts (or files that are named), each at most once: text that repeats
itself would be drafted better than any user's.
"""
from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Iterable

from eagle3.stage import UserError

NEAR = 0.005  # of the length: how far below it a padded prompt may stay
MOST_TRIES = 40  # of a cut


def context_tokens(name: str) -> int:
    """Tokens of a value of --context: 8k are 8192. Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d{0,8})([kK]?)", name.strip())
    if not found:
        raise ValueError(name)
    return int(found[1]) * (1024 if found[2] else 1)


def texts_of_files(paths: Iterable[Path]) -> list[str]:
    """Paragraphs of text files. Raises UserError."""
    texts = []
    for path in paths:
        try:
            texts += re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"--context-text: {path} is not readable as text "
                            f"({getattr(error, 'strerror', None) or error}).") from None
    return texts


def texts_of_rows(rows: Iterable[dict]) -> list[str]:
    """What users say in prompt rows."""
    texts = []
    for row in rows:
        said = row.get("messages") or row.get("turns") or [row.get("prompt")]
        said = [part.get("content") if isinstance(part, dict) else part for part in said
                if not isinstance(part, dict) or part.get("role") == "user"] if isinstance(said, list) else []
        texts += [text for text in said if isinstance(text, str)]
    return texts


class Padding:
    """Text to lay before questions. encode: text -> token ids."""

    def __init__(self, texts: list[str], encode: Callable[[str], list[int]]):
        self.texts = list(dict.fromkeys(stripped for text in texts if (stripped := text.strip())))
        self.lengths = [len(encode(text)) for text in self.texts]

    def text(self, tokens: int, start: int, own: set[str]) -> str:
        """At least so many tokens of text, from the text number `start` on, without `own`. Raises UserError."""
        found, there = [], 0
        for at in (number % len(self.texts) for number in range(start, start + len(self.texts))):
            if self.texts[at] not in own:
                found.append(self.texts[at])
                there += self.lengths[at]
            if there >= tokens:
                return "\n\n".join(found)
        raise UserError(f"--context: {there:,} tokens of other text are at hand, a prompt of that length needs "
                        f"{tokens:,}. Name more prompts, or files of text with --context-text.")

    def padded(self, messages: list[dict], start: int, tokens: int,
               render: Callable[[list[dict]], list[int]]) -> tuple[list[dict], list[int]] | None:
        """(the messages with text before the first question, their ids): at most `tokens` of them, and hardly less.

        None where the question alone is longer. start: which text comes first, another one for each prompt, so that no
        two begin with the same tokens. Raises UserError.
        """
        first = next((at for at, message in enumerate(messages) if message.get("role") == "user"), None)
        if first is None or not isinstance(messages[first].get("content"), str):
            raise UserError("--context: a prompt without a question in plain text cannot be padded.")
        question, low, low_ids = messages[first]["content"], 0, render(messages)
        if len(low_ids) > tokens:
            return None
        text = self.text(tokens - len(low_ids) + 8, start, {question.strip()})

        def cut(characters: int) -> list[dict]:
            before = f"{text[:characters]}\n\n" if characters else ""
            return [*messages[:first], {**messages[first], "content": before + question}, *messages[first + 1:]]

        high, high_length = len(text) + 1, tokens + 8
        for tried in range(MOST_TRIES):
            missing = tokens - len(low_ids)
            if missing <= NEAR * tokens or high - low <= 1:
                break
            # as if all its text were alike; every second time the middle, since it is not
            at = low + (high - low) * missing // (high_length - len(low_ids)) if tried % 2 == 0 else (low + high) // 2
            at = min(high - 1, max(low + 1, at))
            ids = render(cut(at))
            if len(ids) <= tokens:
                low, low_ids = at, ids
            else:
                high, high_length = at, len(ids)
        return cut(low), low_ids
