"""The draft vocabulary: the target tokens that a drafter can propose, and the two arrays that say so on the disk.

A drafter's head has Vd rows, the target's Vt (Kimi-K2.5: 32,000 of 163,840). Draft id i means the i-th of the kept
target ids, in ascending order. On the disk, as SGLang wants it in a drafter's safetensors:
    d2t  (Vd,) int64, an OFFSET: target_id = draft_id + d2t[draft_id]
    t2d  (Vt,) bool, the target ids that are kept
so always nonzero(t2d) == arange(Vd) + d2t. In memory it is one array: the ascending target ids, (Vd,) int64.
"""
from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from eagle3.stage import UserError, read_manifest, write_atomic

BUILT_BY = "02_build_vocab"
FILES = ("d2t.npy", "t2d.npy")


def choose(counts: np.ndarray, special: list[int], size: int) -> np.ndarray:
    """Ascending target ids (size,): the special ids, then the most frequent of `counts` (Vt,), then unseen ids.

    Of two ids counted equally often the lower one comes first; so it is with the unseen.
    """
    order = np.argsort(-counts, kind="stable")  # unseen ids come last, ascending
    order = np.concatenate([np.array(special, dtype=np.int64), order[~np.isin(order, special)]])
    return np.sort(order[:size])


def covered(counts: np.ndarray, target_ids: np.ndarray) -> float | None:
    """Share of the counted tokens (Vt,) that a draft vocabulary holds; None where nothing was counted."""
    total = int(counts.sum())
    return int(counts[target_ids].sum()) / total if total else None


def to_arrays(target_ids: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """d2t (Vd,) int64 and t2d (Vt,) bool of ascending target ids."""
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[target_ids] = True
    return target_ids - np.arange(len(target_ids), dtype=np.int64), t2d


def from_arrays(d2t: np.ndarray, t2d: np.ndarray) -> np.ndarray | None:
    """Ascending target ids (Vd,) int64; None where the arrays contradict each other (d2t holding ids, for one)."""
    if d2t.dtype != np.int64 or t2d.dtype != np.bool_ or d2t.ndim != 1 or t2d.ndim != 1:
        return None
    target_ids = np.flatnonzero(t2d)
    return target_ids if np.array_equal(target_ids, np.arange(len(d2t)) + d2t) else None


def write_mapping(folder: Path, target_ids: np.ndarray, vocab_size: int) -> None:
    """d2t.npy and t2d.npy of ascending target ids (Vd,)."""
    d2t, t2d = to_arrays(target_ids, vocab_size)
    assert from_arrays(d2t, t2d) is not None
    for name, array in zip(FILES, (d2t, t2d)):
        buffer = io.BytesIO()
        np.save(buffer, array)
        write_atomic(folder / name, buffer.getvalue())


def load_arrays(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """d2t and t2d as they lie in `folder`, unchecked. Raises ValueError, whatever was wrong with the files."""
    try:
        d2t, t2d = (np.load(folder / name) for name in FILES)
    except (OSError, EOFError) as error:  # a torn file can be any of the three
        raise ValueError(str(error)) from None
    return d2t, t2d


def read_mapping(folder: Path, vocab_size: int) -> np.ndarray:
    """The draft vocabulary to train with: ascending target ids (Vd,) int64.

    Raises UserError when it cannot be read, is another target's, or contradicts itself.
    """
    try:
        d2t, t2d = load_arrays(folder)
    except ValueError as error:
        raise UserError(f"{folder}: no readable vocabulary map ({error}). Run {BUILT_BY}.py first.") from None
    if t2d.shape != (vocab_size,):
        raise UserError(f"{folder}/t2d.npy: made for {t2d.size} target tokens, the target has {vocab_size}. "
                        f"Run {BUILT_BY}.py for this target.")
    target_ids = from_arrays(d2t, t2d)
    if target_ids is None:
        raise UserError(f"{folder}: d2t.npy and t2d.npy do not agree (draft id + d2t must be the ids that t2d marks). "
                        f"Run {BUILT_BY}.py again.")
    return target_ids


def read_reused(folder: Path, size: int, vocab_size: int, tokenizer: str) -> np.ndarray:
    """An older draft vocabulary to use again: ascending target ids (size,) int64.

    tokenizer: `tokens.tokenizer_hash` of the target. Raises UserError when it is broken or was made for something else.
    """
    manifest = read_manifest(folder, BUILT_BY)
    again = f"Run {BUILT_BY}.py again without --reuse."
    try:
        d2t, t2d = load_arrays(folder)
    except ValueError as error:
        raise UserError(f"{folder}: d2t.npy or t2d.npy cannot be read ({error}). {again}") from None
    if manifest["inputs"]["tokenizer"] != tokenizer:
        raise UserError(f"{folder}: made for another tokenizer. {again}")
    if d2t.shape != (size,) or t2d.shape != (vocab_size,):
        raise UserError(f"{folder}: maps {d2t.size} draft tokens into {t2d.size}, wanted {size} into {vocab_size}. "
                        "Change --draft-vocab-size or leave out --reuse.")
    target_ids = from_arrays(d2t, t2d)
    if target_ids is None:
        raise UserError(f"{folder}: d2t.npy and t2d.npy contradict each other (d2t holds offsets). {again}")
    return target_ids
