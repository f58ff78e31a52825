"""Stage 02: choose the draft vocabulary from the tokens the target answered with.

Reads   <data-dir>/part-*.jsonl of 01_generate.py (its manifest pins their hashes) and the target's tokenizer folder.
Writes  <output-dir>/d2t.npy, t2d.npy, vocab_mapping.json (coverage), coverage.png, manifest.json (last: the folder is complete).

    python3 -u 02_build_vocab.py --data-dir /data/eagle3/run/responses --tokenizer /shared/kimi-k2.5-int4 --trust-remote-code \\
      --output-dir /data/eagle3/run/vocab_mapping --draft-vocab-size 32000

Time and size: one pass over the rows, two processes count about 4M tokens/s; memory does not grow with the corpus.

The draft can only propose tokens of its own vocabulary, so each token outside of it ends a run of accepted drafts. Kept: the special
tokens that a turn is made of, then the most frequent tokens (ties: lower id first), then, when too few were seen, unseen ones by
ascending id.
Names: Vt target vocabulary, Vd draft vocabulary; d2t is an OFFSET: target_id = draft_id + d2t[draft_id].
"""
import argparse
import fcntl
import hashlib
import io
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import yaml

STAGE = "02_build_vocab"
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

TABLE = (256, 512, 1024, 2048, 4096, 8192, 16384, 32000, 65536, 131072)  # sizes in the coverage table, below 4096 for small targets only
BATCH = 1 << 20  # tokens counted at once: bincount touches all of Vt each time
SPECIAL = ["<|im_end|>", "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
           "<|tool_call_argument_begin|>", "<|tool_call_end|>"]  # Kimi's names


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", required=True, type=Path, metavar="DIR", help="responses/ of 01_generate.py")
    add("--tokenizer", required=True, type=Path, metavar="DIR", help="the target's folder")
    add("--trust-remote-code", action="store_true", help="run the tokenizer code that lies in that folder (Kimi-K2.5 needs it)")
    add("--output-dir", required=True, type=Path)
    add("--draft-vocab-size", type=int, default=32000, metavar="N", help="up to the target's own size")
    add("--target-vocab-size", type=int, metavar="N", help="rows of the target's lm_head (default: vocab_size in its config.json)")
    add("--count", choices=["response", "all"], default="response", help="all: prompt tokens too")
    add("--special-tokens", nargs="*", default=SPECIAL, metavar="NAME", help="always in the draft vocabulary (default: Kimi's)")
    add("--held-out", type=float, default=0.05, metavar="F",
        help="share of rows on which the coverage of the rest's vocabulary is measured")
    add("--seed", type=int, default=0, metavar="N", help="picks those rows, by sha256 of seed and id")
    add("--reuse", type=Path, metavar="DIR", help="take the map of this older vocab_mapping/ and say what it covers here")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), metavar="N", help="processes that count")
    return parser


def ids_of(line: bytes, key: bytes) -> np.ndarray:
    """The int array behind `"key":[` in a row of 01. rfind on raw bytes is exact: inside a JSON string the quotes would be escaped."""
    begin = line.rfind(b'"' + key + b'":[')
    if begin < 0:  # somebody rewrote the rows with other spacing
        return np.array(json.loads(line)[key.decode()], dtype=np.int64)
    begin += len(key) + 4
    return np.fromstring(line[begin:line.index(b"]", begin)], dtype=np.int64, sep=",")


def row_id(line: bytes) -> bytes:
    """01 writes `{"id":"..."` first, and its ids need no escapes."""
    return line[7:line.index(b'"', 7)] if line.startswith(b'{"id":"') else json.loads(line)["id"].encode()


def count_file(path: Path, sha256: str, vocab_size: int, keys: tuple[bytes, ...], held_out: float, seed: int) -> tuple[np.ndarray, int]:
    """(counts (2, Vt): [kept, held-out] rows, number of rows). Raises UserError on an id beyond the vocabulary and on a changed file."""
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
    except FileNotFoundError:
        raise UserError(f"{path}: missing, though the manifest names it. Copy the folder again.") from None
    with file:
        for line in file:
            digest.update(line)
            n_rows += 1
            try:
                part = int(int.from_bytes(hashlib.sha256(b"%d:%s" % (seed, row_id(line))).digest()[:8], "big") < threshold)
                found = [ids_of(line, key) for key in keys]
            except (ValueError, KeyError):
                raise UserError(f"{path}:{n_rows}: not a row of 01_generate.py. Copy the folder again.") from None
            batch[part].extend(found)
            size[part] += sum(map(len, found))
            if size[part] > BATCH:
                flush(part)
    flush(0), flush(1)
    if digest.hexdigest() != sha256:
        raise UserError(f"{path}: changed since 01_generate.py finished (sha256 differs). Copy the folder again.")
    return counts, n_rows


def choose(counts: np.ndarray, special: list[int], size: int) -> np.ndarray:
    """Ascending target ids (Vd,) of the draft vocabulary: special ids, then by frequency, then unseen ids from below."""
    order = np.argsort(-counts, kind="stable")  # unseen ids come last, ascending
    order = np.concatenate([np.array(special, dtype=np.int64), order[~np.isin(order, special)]])
    return np.sort(order[:size])


def arrays(kept: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """d2t (Vd,) int64 offsets and t2d (Vt,) bool of ascending target ids."""
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[kept] = True
    return kept - np.arange(len(kept), dtype=np.int64), t2d


def covered(counts: np.ndarray, kept: np.ndarray) -> float | None:
    """Share of the counted tokens that a draft vocabulary holds; None of nothing."""
    total = int(counts.sum())
    return int(counts[kept].sum()) / total if total else None


def read_map(folder: Path, size: int, vocab_size: int, tokenizer: str) -> np.ndarray:
    """Ascending target ids of an older map. Raises UserError when it is broken or made for something else."""
    manifest = read_manifest(folder, STAGE)
    try:
        d2t, t2d = np.load(folder / "d2t.npy"), np.load(folder / "t2d.npy")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{folder}: d2t.npy or t2d.npy cannot be read ({error}). Run {STAGE}.py again without --reuse.") from None
    if manifest["inputs"]["tokenizer"] != tokenizer:
        raise UserError(f"{folder}: made for another tokenizer. Run {STAGE}.py again without --reuse.")
    if d2t.shape != (size,) or t2d.shape != (vocab_size,):
        raise UserError(f"{folder}: maps {d2t.size} draft tokens into {t2d.size}, wanted {size} into {vocab_size}. "
                        "Change --draft-vocab-size or leave out --reuse.")
    if d2t.dtype != np.int64 or t2d.dtype != np.bool_ or not np.array_equal(np.flatnonzero(t2d), np.arange(size) + d2t):
        raise UserError(f"{folder}: d2t.npy and t2d.npy contradict each other (d2t holds offsets). Run {STAGE}.py again without --reuse.")
    return np.flatnonzero(t2d)


def tokenizer_hash(folder: Path) -> str:
    """One hash over the files that decide token ids and the template; the same function as in 01_generate.py."""
    wanted = ("tokenizer", "tokenization", "vocab", "merges", "chat_template", "special_tokens", "added_tokens", "tiktoken")
    files = sorted(path for path in folder.glob("*")
                   if path.is_file() and (path.name.startswith(wanted) or path.suffix in (".model", ".tiktoken")))
    return hashlib.sha256("".join(f"{path.name} {sha256_file(path)}\n" for path in files).encode()).hexdigest()


def vocab_size_of(target: Path) -> int:
    try:
        config = json.loads((target / "config.json").read_text())
        size = config.get("text_config", config)["vocab_size"]
        if not isinstance(size, int):
            raise TypeError
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{target}: no config.json with a vocab_size there. Give --target-vocab-size.") from None
    return size


def special_ids(folder: Path, trust_remote_code: bool, names: list[str]) -> dict[str, int]:
    """{name: id}. Raises UserError when a name is not one id."""
    from transformers import AutoTokenizer  # imports torch: after the flags were checked and the counting is done
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # any failure here means: this folder holds no tokenizer that can be loaded
        raise UserError(f"{folder}: no tokenizer can be loaded ({' '.join(str(error).split())[:200]}). "
                        "Name the target's folder; Kimi's needs --trust-remote-code.") from None
    found = {}
    for name in names:
        token_id = tokenizer.convert_tokens_to_ids(name)
        if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != name:
            raise UserError(f"{folder}: {name} is no token of this tokenizer. Name the target's own with --special-tokens.")
        found[name] = token_id
    return found


def plot(path: Path, table: list[dict], size: int, coverage: float) -> None:
    import matplotlib  # slow to import
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    sizes = [row["size"] for row in table]
    for key, label, style in (("coverage", "all rows", "o-"), ("held_out", "held-out rows, vocabulary of the others", "s--")):
        if table[0][key] is None:
            continue
        axis.plot(sizes, [100 * row[key] for row in table], style, markersize=4, label=label)
    axis.axvline(size, color="0.5", linewidth=1)
    axis.annotate(f"{size:,}: {100 * coverage:.2f} %", (size, 100 * coverage), xytext=(-6, 6), textcoords="offset points", ha="right")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45, ha="right")
    axis.set_xlabel("draft vocabulary (tokens)")
    axis.set_ylabel("counted tokens in it (%)")
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.savefig(path.with_name(path.name + ".tmp"), dpi=120, format="png", metadata={"Software": None})
    os.replace(path.with_name(path.name + ".tmp"), path)
    plt.close(figure)


def main(argv: list[str]) -> None:
    args = parse_args(build_parser(), "build_vocab", argv)
    if not args.tokenizer.is_dir():
        raise UserError(f"{args.tokenizer}: no such folder. Name the target's folder with --tokenizer.")
    responses = read_manifest(args.data_dir, "01_generate")
    inputs = {"responses": sha256_file(args.data_dir / "manifest.json"), "tokenizer": tokenizer_hash(args.tokenizer)}
    if responses["inputs"]["tokenizer"] != inputs["tokenizer"]:
        raise UserError(f"{args.data_dir}: its ids come from another tokenizer than {args.tokenizer}. Name the one 01_generate.py used.")
    vocab_size = vocab_size_of(args.tokenizer) if args.target_vocab_size is None else args.target_vocab_size
    if not 0 < args.draft_vocab_size <= vocab_size or not 0 <= args.held_out < 1 or args.workers < 1:
        raise UserError(f"--draft-vocab-size {args.draft_vocab_size} must lie in 1..{vocab_size} (the target's), "
                        f"--held-out {args.held_out} in [0, 1), --workers {args.workers} above 0.")
    log("config " + json.dumps({**vars(args), "target_vocab_size": vocab_size, "inputs": inputs}, default=str))
    log(f"versions python {sys.version.split()[0]}, numpy {np.__version__} | input {args.data_dir}: {responses['counts']}")
    kept = read_map(args.reuse, args.draft_vocab_size, vocab_size, inputs["tokenizer"]) if args.reuse else None
    may_change = {"data_dir", "tokenizer", "output_dir", "workers", "config", "trust_remote_code"}  # the hashes in `inputs` stand for them
    fixed = {key: value for key, value in vars(args).items() if key not in may_change} | {
        "target_vocab_size": vocab_size, "inputs": inputs, "reuse": sha256_file(args.reuse / "manifest.json") if args.reuse else None}
    with open_stage(args.output_dir, fixed, set()):
        if (args.output_dir / "manifest.json").exists():
            log(f"complete already: {read_manifest(args.output_dir, STAGE)['counts']}")
        else:
            try:
                build(args, responses["files"], vocab_size, kept, fixed)
            except UserError:
                (args.output_dir / "stage.json").unlink()  # nothing here is worth keeping: the mended command may begin in this folder
                raise
    log(f"done: {args.output_dir}")


def build(args, files: dict[str, str], vocab_size: int, kept: np.ndarray | None, config: dict) -> None:
    """Count, choose, write. files: {part: sha256}; kept: target ids of a reused map; config: for the manifest."""
    # 1. count, file by file
    keys = (b"response_ids",) if args.count == "response" else (b"prompt_ids", b"response_ids")
    counts, n_rows, began, names = np.zeros((2, vocab_size), dtype=np.int64), 0, time.monotonic(), sorted(files)
    count = partial(count_file, vocab_size=vocab_size, keys=keys, held_out=args.held_out, seed=args.seed)
    with ProcessPoolExecutor(min(args.workers, max(1, len(names)))) as pool:
        counted = pool.map(count, [args.data_dir / name for name in names], [files[name] for name in names])
        for number, (part, rows) in enumerate(counted, 1):
            counts, n_rows = counts + part, n_rows + rows
            log(f"file {number}/{len(names)} | {n_rows:,} rows | {int(counts.sum()):,} tokens | "
                f"{counts.sum() / (time.monotonic() - began):,.0f} tok/s")
    every = counts.sum(0)  # (Vt,)
    if not every.any():
        raise UserError(f"{args.data_dir}: holds no tokens to count. Generate answers first.")

    # 2. choose, and say what the choice covers
    special = special_ids(args.tokenizer, args.trust_remote_code, args.special_tokens)
    if max(special.values(), default=0) >= vocab_size or len(special) > args.draft_vocab_size:
        raise UserError(f"{len(special)} special tokens up to id {max(special.values())} do not fit a draft vocabulary of "
                        f"{args.draft_vocab_size} over {vocab_size} target tokens.")
    forced, seen = sorted(special.values()), int(np.count_nonzero(every))
    if kept is None:
        kept = choose(every, forced, args.draft_vocab_size)
    elif missing := [name for name, token_id in special.items() if token_id not in kept]:
        raise UserError(f"{args.reuse}: lacks the special tokens {missing}. Leave out --reuse, or drop them from --special-tokens.")
    coverage = covered(every, kept)
    sizes = {n for n in TABLE if len(forced) <= n < vocab_size and (n >= 4096 or vocab_size < 8192)} | {args.draft_vocab_size, vocab_size}
    table = [{"size": n, "coverage": covered(every, choose(every, forced, n)), "held_out": covered(counts[1], choose(counts[0], forced, n))}
             for n in sorted(sizes)]
    for row in table:
        log(f"draft vocabulary {row['size']:>7,} | covers {100 * row['coverage']:.3f} %"
            + ("" if row["held_out"] is None else f" | held-out {100 * row['held_out']:.3f} %")
            + (" | <- chosen" if row["size"] == args.draft_vocab_size else ""))
    log(f"{'reused map' if args.reuse else 'map'} covers {100 * coverage:.3f} % of {int(every.sum()):,} tokens; "
        f"{seen:,} of {vocab_size:,} ids seen, {int(np.count_nonzero(every[kept] == 0)):,} of the map's unseen")

    # 3. write
    d2t, t2d = arrays(kept, vocab_size)
    assert np.array_equal(np.flatnonzero(t2d), np.arange(args.draft_vocab_size) + d2t) and d2t.dtype == np.int64
    for name, array in (("d2t", d2t), ("t2d", t2d)):
        buffer = io.BytesIO()
        np.save(buffer, array)
        write_atomic(args.output_dir / f"{name}.npy", buffer.getvalue())
    result = {"schema": SCHEMA, "draft_vocab_size": args.draft_vocab_size, "target_vocab_size": vocab_size, "counted": args.count,
              "tokens": int(every.sum()), "held_out_tokens": int(counts[1].sum()), "distinct_tokens": seen, "special_tokens": special,
              "coverage": coverage,
              "held_out_coverage": covered(counts[1], kept if args.reuse else choose(counts[0], forced, args.draft_vocab_size)),
              "reused": bool(args.reuse), "table": table}
    write_atomic(args.output_dir / "vocab_mapping.json", json.dumps(result, indent=1) + "\n")
    plot(args.output_dir / "coverage.png", table, args.draft_vocab_size, coverage)
    hashes = {name: sha256_file(args.output_dir / name) for name in ("d2t.npy", "t2d.npy", "vocab_mapping.json")}
    manifest = {"schema": SCHEMA, "stage": STAGE, "config": json.loads(json.dumps(config, default=str)), "inputs": config["inputs"],
                "counts": {"kept": n_rows, "dropped": {}}, "files": hashes,
                "versions": {"python": sys.version.split()[0], "numpy": np.__version__}}
    write_atomic(args.output_dir / "manifest.json", json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
