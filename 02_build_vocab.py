"""Stage 02: choose the draft vocabulary from the tokens the target answered with.

Reads   <data-dir>/part-*.jsonl of 01_generate.py (its manifest pins their hashes) and the target's tokenizer folder.
Writes  <output-dir>/d2t.npy, t2d.npy, vocab_mapping.json (coverage), coverage.png, manifest.json (last: the folder is
        complete).

    python3 -u 02_build_vocab.py --data-dir /data/eagle3/run/responses --tokenizer /shared/kimi-k2.5-int4 \\
      --trust-remote-code --output-dir /data/eagle3/run/vocab_mapping --draft-vocab-size 32000

Time and size: one pass over the rows, two processes count about 4M tokens/s; memory does not grow with the corpus.

The draft can only propose tokens of its own vocabulary, so each token outside of it ends a run of accepted drafts.
Kept: the special tokens that a turn is made of, then the most frequent tokens (ties: lower id first), then, when too
few were seen, unseen ones by ascending id.
Names: Vt target vocabulary, Vd draft vocabulary; d2t is an OFFSET: target_id = draft_id + d2t[draft_id].
"""
import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
from eagle3.drafter_files import DrafterFiles, vocabulary_of, weights_sha256  # noqa: E402
from eagle3.growth import grown_from, set_back  # noqa: E402
from eagle3.stage import (SCHEMA, UserError, bar, log, open_stage, parse_args, read_manifest, run,  # noqa: E402
                          sha256_file, write_atomic, write_manifest)
from eagle3.store import DISK_ERRORS, cannot_write, check_room  # noqa: E402
from eagle3.target import text_config  # noqa: E402
from eagle3.tokens import load_tokenizer, token_id, tokenizer_hash  # noqa: E402
from eagle3.turn_tokens import find_turn_tokens  # noqa: E402
from eagle3.vocabulary import FILES, choose, covered, read_mapping, read_reused, write_mapping  # noqa: E402

STAGE = "02_build_vocab"
MAY_CHANGE = {"data_dir", "tokenizer", "output_dir", "workers", "config", "trust_remote_code", "rechoose",
              "from_drafter"}  # hashed in `inputs`, or below
TABLE = (256, 512, 1024, 2048, 4096, 8192, 16384, 32000, 65536, 131072)  # sizes in the coverage table
BATCH = 1 << 20  # tokens counted at once: bincount touches all of Vt each time


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", required=True, type=Path, metavar="DIR", help="responses/ of 01_generate.py")
    add("--tokenizer", required=True, type=Path, metavar="DIR", help="the target's folder")
    add("--trust-remote-code", action="store_true",
        help="run the tokenizer code that lies in that folder (Kimi-K2.5 needs it)")
    add("--output-dir", required=True, type=Path)
    add("--draft-vocab-size", type=int, metavar="N",
        help="up to the target's own size (default: 32000; with --from-drafter its own)")
    add("--target-vocab-size", type=int, metavar="N",
        help="rows of the target's lm_head (default: vocab_size in its config.json)")
    add("--count", choices=["response", "all"], default="response", help="all: prompt tokens too")
    add("--special-tokens", nargs="*", metavar="NAME",
        help="always in the draft vocabulary (default: the tokens of a turn with which 01_generate.py ran)")
    add("--held-out", type=float, default=0.05, metavar="F",
        help="share of rows on which the coverage of the rest's vocabulary is measured")
    add("--seed", type=int, default=0, metavar="N", help="picks those rows, by sha256 of seed and id")
    add("--reuse", type=Path, metavar="DIR",
        help="take the map of this older vocab_mapping/ and say what it covers here")
    add("--from-drafter", type=Path, metavar="DIR",
        help="take the map of this drafter, whoever trained it, to finetune or evaluate it; special tokens that it "
             "lacks are named")
    add("--rechoose", action="store_true",
        help="where the responses have grown since: choose the map anew (without it the map stays as it is, and what "
             "it covers of them now is said)")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="processes that count")
    return parser


def main(argv: list[str]) -> None:
    args = parse_args(build_parser(), "build_vocab", argv)
    if not args.tokenizer.is_dir():
        raise UserError(f"{args.tokenizer}: no such folder. Name the target's folder with --tokenizer.")
    responses = read_manifest(args.data_dir, "01_generate")
    if missing := [key for key in ("inputs", "files", "counts") if not isinstance(responses.get(key), dict)]:
        raise UserError(f"{args.data_dir}/manifest.json: no {', '.join(missing)} in it. Run 01_generate.py again.")
    inputs = {"responses": sha256_file(args.data_dir / "manifest.json"), "tokenizer": tokenizer_hash(args.tokenizer)}
    if responses["inputs"].get("tokenizer") != inputs["tokenizer"]:
        raise UserError(f"{args.data_dir}: its ids come from another tokenizer than {args.tokenizer}. "
                        "Name the one 01_generate.py used.")
    vocab_size = vocab_size_of(args.tokenizer) if args.target_vocab_size is None else args.target_vocab_size
    reused = drafters_map(args, vocab_size) if args.from_drafter else None
    if args.draft_vocab_size is None:
        args.draft_vocab_size = 32000 if reused is None else len(reused)
    if not 0 < args.draft_vocab_size <= vocab_size < 1 << 24 or not 0 <= args.held_out < 1 or args.workers < 1:
        raise UserError(f"--draft-vocab-size {args.draft_vocab_size} must lie in 1..{vocab_size} (the target's, below "
                        f"2^24), --held-out {args.held_out} in [0, 1), --workers {args.workers} above 0.")
    if args.special_tokens is None:
        args.special_tokens = turn_tokens_of(responses, args)
    log("config " + json.dumps({**vars(args), "target_vocab_size": vocab_size, "inputs": inputs}, default=str))
    log(f"versions python {sys.version.split()[0]}, numpy {np.__version__} | "
        f"input {args.data_dir}: {responses['counts']}")
    if args.reuse:
        reused = read_reused(args.reuse, args.draft_vocab_size, vocab_size, inputs["tokenizer"])
    config = {key: value for key, value in vars(args).items() if key not in MAY_CHANGE} | {
        "target_vocab_size": vocab_size, "inputs": inputs,
        "reuse": sha256_file(args.reuse / "manifest.json") if args.reuse else None}
    if args.from_drafter:  # a folder of before there was the flag says nothing of it
        config["from_drafter"] = weights_sha256(args.from_drafter)
    of_before = grown_since(args.output_dir, responses)
    grown = of_before is not None
    if grown and not args.rechoose:
        config["inputs"] = inputs | {"responses": of_before}
    with open_stage(args.output_dir, config, set(), lambda old: old | {"inputs": config["inputs"]} if grown else old):
        if (args.output_dir / "manifest.json").exists() and grown and args.rechoose:
            set_back(args.output_dir, STAGE)
            (args.output_dir / "grown.json").unlink(missing_ok=True)  # of the map before
        if (args.output_dir / "manifest.json").exists():
            log(f"complete already: {read_manifest(args.output_dir, STAGE)['counts']}")
            if grown:
                say_coverage(args, responses, vocab_size)
        else:
            try:
                check_room(args.output_dir, vocab_size + 8 * args.draft_vocab_size + 1_000_000)
                build(args, responses, reused, config)
            except OSError as error:
                if error.errno not in DISK_ERRORS:
                    raise
                raise UserError(cannot_write(args.output_dir, error)) from None
            except BrokenProcessPool:
                raise UserError("a counting process was ended from outside, by lack of memory, say. "
                                "Use fewer --workers.") from None
            finally:
                if not (args.output_dir / "manifest.json").exists():  # nothing is worth keeping: the mended command
                    (args.output_dir / "stage.json").unlink(missing_ok=True)  # may begin in this folder
    log(f"done: {args.output_dir}")


def grown_since(folder: Path, responses: dict) -> str | None:
    """The hash of the responses that a complete map was chosen for, where these (01's manifest) grew from them."""
    if not (folder / "manifest.json").exists():
        return None
    known = read_manifest(folder, STAGE).get("inputs", {}).get("responses")
    return known if known in [entry["manifest"] for entry in responses.get("grown_from", [])] else None


def say_coverage(args, responses: dict, vocab_size: int) -> None:
    """Of the map as it is, over responses that have grown since; also into grown.json. Raises UserError."""
    target_ids = read_mapping(args.output_dir, vocab_size)
    every = count_files(args, responses, vocab_size)[0].sum(0)
    forced = sorted(special_ids(args.tokenizer, args.trust_remote_code, args.special_tokens).values())
    now, anew = covered(every, target_ids), covered(every, choose(every, forced, args.draft_vocab_size))
    result = {"responses": sha256_file(args.data_dir / "manifest.json"), "kept": responses["counts"]["kept"],
              "tokens": int(every.sum()), "coverage": now, "coverage_chosen_anew": anew}
    write_atomic(args.output_dir / "grown.json", json.dumps(result, indent=1) + "\n")
    log(f"the responses have grown: the map, left as it is, covers {100 * now:.3f} % of their {result['tokens']:,} "
        f"tokens; chosen anew it would cover {100 * anew:.3f} % (--rechoose; 04 then needs another --output-dir)")


def build(args, responses: dict, reused: np.ndarray | None, config: dict) -> None:
    """Count, choose, write. responses: 01's manifest; reused: target ids of an older map; config: for our manifest."""
    # 1. what must be in it: {name: id}
    vocab_size = config["target_vocab_size"]
    special = special_ids(args.tokenizer, args.trust_remote_code, args.special_tokens)

    # 2. count the tokens, file by file: (2, Vt), of kept and of held-out rows
    counts, n_rows = count_files(args, responses, vocab_size)
    every = counts.sum(0)  # (Vt,)
    if not every.any():
        raise UserError(f"{args.data_dir}: holds no tokens to count. Generate answers first.")

    # 3. choose, and say what the choice covers
    if max(special.values(), default=0) >= vocab_size or len(special) > args.draft_vocab_size:
        raise UserError(f"{len(special)} special tokens up to id {max(special.values())} do not fit a draft vocabulary "
                        f"of {args.draft_vocab_size} over {vocab_size} target tokens.")
    forced = sorted(special.values())
    target_ids = choose(every, forced, args.draft_vocab_size) if reused is None else reused
    missing = [name for name, token in special.items() if token not in target_ids]
    if missing and args.from_drafter:
        log(f"{args.from_drafter} cannot draft the special tokens {missing}: each ends a run of accepted drafts")
    elif missing:
        raise UserError(f"{args.reuse}: lacks the special tokens {missing}. Leave out --reuse, "
                        "or drop them from --special-tokens.")
    coverage, seen = covered(every, target_ids), int(np.count_nonzero(every))
    table = coverage_table(counts, forced, args.draft_vocab_size)
    for row in table:
        log(f"draft vocabulary {row['size']:>7,} | covers {100 * row['coverage']:.3f} %"
            + ("" if row["held_out"] is None else f" | held-out {100 * row['held_out']:.3f} %")
            + (" | <- chosen" if row["size"] == args.draft_vocab_size else ""))
    log(f"{'map' if reused is None else 'reused map'} covers {100 * coverage:.3f} % of {int(every.sum()):,} tokens; "
        f"{seen:,} of {vocab_size:,} ids seen, {int(np.count_nonzero(every[target_ids] == 0)):,} of the map's unseen")

    # 4. write
    write_mapping(args.output_dir, target_ids, vocab_size)
    without_held_out = choose(counts[0], forced, args.draft_vocab_size) if reused is None else reused
    result = {"schema": SCHEMA, "draft_vocab_size": args.draft_vocab_size, "target_vocab_size": vocab_size,
              "counted": args.count, "tokens": int(every.sum()), "held_out_tokens": int(counts[1].sum()),
              "distinct_tokens": seen, "special_tokens": special, "coverage": coverage,
              "held_out_coverage": covered(counts[1], without_held_out), "reused": reused is not None, "table": table}
    write_atomic(args.output_dir / "vocab_mapping.json", json.dumps(result, indent=1) + "\n")
    try:
        plot(args.output_dir / "coverage.png", table, args.draft_vocab_size, coverage)
    except Exception as error:  # a picture is no reason to lose the map: no matplotlib, no room for its cache, ...
        log(f"no coverage.png: {type(error).__name__}: {error}")
    write_manifest(args.output_dir, STAGE, config=json.loads(json.dumps(config, default=str)), inputs=config["inputs"],
                   counts={"kept": n_rows, "dropped": {}},
                   files={name: sha256_file(args.output_dir / name) for name in (*FILES, "vocab_mapping.json")},
                   versions={"python": sys.version.split()[0], "numpy": np.__version__}, **grown_from(args.output_dir))


# ---- counting ----
def count_files(args, responses: dict, vocab_size: int) -> tuple[np.ndarray, int]:
    """(counts (2, Vt): [kept, held-out] rows, number of rows) over all part files, in --workers processes."""
    keys = (b"response_ids",) if args.count == "response" else (b"prompt_ids", b"response_ids")
    count = partial(count_file, vocab_size=vocab_size, keys=keys, held_out=args.held_out, seed=args.seed)
    files, names = responses["files"], sorted(responses["files"])
    counts, n_rows, began = np.zeros((2, vocab_size), dtype=np.int64), 0, time.monotonic()
    with contextlib.ExitStack() as stack, bar(responses["counts"]["kept"], " rows") as progress:
        try:
            spread = stack.enter_context(ProcessPoolExecutor(min(args.workers, max(1, len(names))))).map
        except OSError as error:
            spread = map
            log(f"counting in this process: others need shared memory, and /dev/shm gives none ({error.strerror})")
        counted = spread(count, [args.data_dir / name for name in names], [files[name] for name in names])
        for number, (part, rows) in enumerate(counted, 1):
            counts, n_rows = counts + part, n_rows + rows
            progress.update(rows)
            log(f"file {number}/{len(names)} | {n_rows:,} rows | {int(counts.sum()):,} tokens | "
                f"{counts.sum() / (time.monotonic() - began):,.0f} tok/s")
    return counts, n_rows


def count_file(path: Path, sha256: str, vocab_size: int, keys: tuple[bytes, ...], held_out: float,
               seed: int) -> tuple[np.ndarray, int]:
    """(counts (2, Vt): [kept, held-out] rows, number of rows). Hashes the file in the same pass.

    Raises UserError on an id beyond the vocabulary and on a changed file.
    """
    counts, digest, n_rows, size = np.zeros((2, vocab_size), dtype=np.int64), hashlib.sha256(), 0, [0, 0]
    batch: tuple[list, list] = ([], [])

    def flush(part: int) -> None:
        if batch[part]:
            ids = np.concatenate(batch[part])
            if (beyond := ids[(ids < 0) | (ids >= vocab_size)]).size:
                raise UserError(f"{path}: token id {beyond[0]} is outside the target's vocabulary of {vocab_size}. "
                                "Give the rows of the target's lm_head with --target-vocab-size.")
            counts[part] += np.bincount(ids, minlength=vocab_size)
            batch[part].clear()
            size[part] = 0

    threshold = int(held_out * 2**64)
    try:
        file = open(path, "rb")
    except OSError as error:
        what = "missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise UserError(f"{path}: {what}, though the manifest names it. Copy the folder again.") from None
    with file:
        for line in file:
            digest.update(line)
            n_rows += 1
            try:
                hashed = hashlib.sha256(b"%d:%s" % (seed, row_id(line))).digest()
                part = int(int.from_bytes(hashed[:8], "big") < threshold)
                found = [ids_of(line, key) for key in keys]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UserError(f"{path}:{n_rows}: not a row of 01_generate.py. Copy the folder again.") from None
            batch[part].extend(found)
            size[part] += sum(map(len, found))
            if size[part] > BATCH:
                flush(part)
    flush(0), flush(1)
    if digest.hexdigest() != sha256:
        raise UserError(f"{path}: changed since 01_generate.py finished (sha256 differs). Copy the folder again.")
    return counts, n_rows


def ids_of(line: bytes, key: bytes) -> np.ndarray:
    """The int array behind `"key":[` in a row of 01, without parsing the row.

    rfind on raw bytes is exact: inside a JSON string the quotes would be escaped.
    """
    begin = line.rfind(b'"' + key + b'":[')
    if begin < 0:  # somebody rewrote the rows with other spacing
        return np.array(json.loads(line)[key.decode()], dtype=np.int64)
    begin += len(key) + 4
    return np.fromstring(line[begin:line.index(b"]", begin)], dtype=np.int64, sep=",")


def row_id(line: bytes) -> bytes:
    """01 writes `{"id":"..."` first, and its ids need no escapes."""
    return line[7:line.index(b'"', 7)] if line.startswith(b'{"id":"') else json.loads(line)["id"].encode()


# ---- the target, and a drafter ----
def turn_tokens_of(responses: dict, args) -> list[str]:
    """Names that a turn of the target is made of: those of 01's manifest, else found anew. Raises UserError."""
    said = responses.get("config") or {}
    if said.get("stop_token"):
        return [said["stop_token"], *(said.get("think_tokens") or []), *(said.get("tool_tokens") or [])]
    return find_turn_tokens(load_tokenizer(args.tokenizer, args.trust_remote_code), args.tokenizer).all()


def drafters_map(args, vocab_size: int) -> np.ndarray:
    """(Vd,) the target ids that --from-drafter can draft, ascending. Raises UserError."""
    if args.reuse:
        raise UserError("--reuse and --from-drafter both name a map. Choose one.")
    files = DrafterFiles(args.from_drafter)
    if files.config.get("vocab_size") != vocab_size:
        raise UserError(f"{args.from_drafter}: for a target of {files.config.get('vocab_size')} tokens, this one has "
                        f"{vocab_size}. Name a drafter for this target.")
    found = vocabulary_of(files, vocab_size)
    if args.draft_vocab_size not in (None, len(found)):
        raise UserError(f"{args.from_drafter}: drafts {len(found)} tokens, not --draft-vocab-size "
                        f"{args.draft_vocab_size}. Leave that out.")
    return found


def vocab_size_of(target: Path) -> int:
    try:
        size = text_config(target)["vocab_size"]
    except (UserError, KeyError, TypeError):
        size = None
    if not isinstance(size, int):
        raise UserError(f"{target}: no config.json with a vocab_size there. Give --target-vocab-size.")
    return size


def special_ids(folder: Path, trust_remote_code: bool, names: list[str]) -> dict[str, int]:
    """{name: id}. Raises UserError when a name is not one id."""
    tokenizer = load_tokenizer(folder, trust_remote_code)
    found = {name: token_id(tokenizer, name) for name in names}
    if missing := [name for name, token in found.items() if token is None]:
        raise UserError(f"{folder}: no tokens of this tokenizer: {', '.join(missing)}. "
                        "Name the target's own with --special-tokens.")
    return found


# ---- coverage ----
def coverage_table(counts: np.ndarray, forced: list[int], chosen_size: int) -> list[dict]:
    """What draft vocabularies of several sizes cover. held_out: of rows that took no part in the choice; None without.

    counts (2, Vt): [kept, held-out]; forced: ids that are in every vocabulary. Below 4,096 only for small targets.
    """
    every, vocab_size = counts.sum(0), counts.shape[1]
    sizes = {n for n in TABLE if len(forced) <= n < vocab_size and (n >= 4096 or vocab_size < 8192)}
    return [{"size": n, "coverage": covered(every, choose(every, forced, n)),
             "held_out": covered(counts[1], choose(counts[0], forced, n))}
            for n in sorted(sizes | {chosen_size, vocab_size})]


def plot(path: Path, table: list[dict], size: int, coverage: float) -> None:
    """The table as a picture, with the chosen size marked."""
    import matplotlib  # slow to import
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    sizes = [row["size"] for row in table]
    lines = {"coverage": ("all rows", "o-"), "held_out": ("held-out rows, vocabulary of the others", "s--")}
    for key, (label, style) in lines.items():
        if table[0][key] is not None:
            axis.plot(sizes, [100 * row[key] for row in table], style, markersize=4, label=label)
    axis.axvline(size, color="0.5", linewidth=1)
    axis.annotate(f"{size:,}: {100 * coverage:.2f} %", (size, 100 * coverage), xytext=(-6, 6),
                  textcoords="offset points", ha="right")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45, ha="right")
    axis.set_xlabel("draft vocabulary (tokens)")
    axis.set_ylabel("counted tokens in it (%)")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(path.with_name(path.name + ".tmp"), dpi=120, format="png", metadata={"Software": None})
    os.replace(path.with_name(path.name + ".tmp"), path)
    plt.close(figure)


if __name__ == "__main__":
    run(main)
