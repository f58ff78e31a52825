"""The samples that 03 extracts: where each response stands, not what is in it.

Millions of samples must fit into little memory, so token ids stay on the disk until they are sent.
"""
from __future__ import annotations

import collections
import json
import re
from dataclasses import dataclass
from pathlib import Path

from eagle3.responses import row_at
from eagle3.stage import UserError

ID = re.compile(r"[A-Za-z0-9._-]{1,120}")  # becomes a file name


@dataclass(slots=True)
class Sample:
    """One response. `part` and `offset` say where its row stands."""
    id: str
    part: int        # index among the part files
    offset: int      # of the row in that file, bytes
    prompt_len: int  # tokens before the first response token
    tokens: int      # T, after --max-length
    truncated: bool  # by --max-length
    largest: int     # of its token ids


def read_samples(parts: list[Path], max_length: int, limit: int) -> tuple[list[Sample], collections.Counter]:
    """All samples in file order, and how many were dropped, by reason. Limits: 0 is none. Raises UserError."""
    samples, seen, dropped = [], set(), collections.Counter()
    for number, path in enumerate(parts):
        with open(path, "rb") as file:
            offset = 0
            for line, raw in enumerate(file, 1):
                sample_id, prompt_len, ids = read_row(raw, f"{path}:{line}")
                full = len(ids)
                if sample_id in seen:
                    raise UserError(f"{path}:{line}: id {sample_id!r} is there twice. Run 01_generate.py again.")
                seen.add(sample_id)
                tokens = min(full, max_length) if max_length else full
                if full == prompt_len:
                    dropped["empty response"] += 1
                elif tokens <= prompt_len:
                    dropped["prompt fills --max-length"] += 1
                else:
                    samples.append(Sample(sample_id, number, offset, prompt_len, tokens, tokens < full,
                                          max(ids[:tokens])))
                offset += len(raw)
                if limit and len(samples) == limit:
                    return samples, dropped
    return samples, dropped


def read_row(raw: bytes, place: str) -> tuple[str, int, list[int]]:
    """(id, tokens of the prompt, token ids of prompt and response) of one line of a part file. Raises UserError."""
    try:
        row = json.loads(raw)
        sample_id, prompt, response = row["id"], row["prompt_ids"], row["response_ids"]
        ids = prompt + response
        if not isinstance(sample_id, str) or not all(isinstance(token, int) and token >= 0 for token in ids):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{place}: no row with id, prompt_ids and response_ids. Run 01_generate.py again.") from None
    if not ID.fullmatch(sample_id):
        raise UserError(f"{place}: id {sample_id!r} is no safe file name. Run 01_generate.py again.")
    return sample_id, len(prompt), ids


def read_ids(parts: list[Path], sample: Sample) -> list[int]:
    """The sample's token ids (T,), prompt and response."""
    row = row_at(parts[sample.part], sample.offset)
    return (row["prompt_ids"] + row["response_ids"])[:sample.tokens]
