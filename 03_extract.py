"""Have the target, served by a patched SGLang, compute the hidden states of every response, and keep them as safetensors.

    python3 -u 03_extract.py --data-dir responses/ --base-url http://127.0.0.1:30000 --output-dir hidden_states/ \\
      --concurrency 32 --max-length 4096 --verify --verifier-path /shared/kimi-k2.5-int4 > extract.log 2>&1 &

The server: patches/sglang_patch.py apply, then start it with EAGLE3_CAPTURE_DIR=<output-dir>/.incoming EAGLE3_CAPTURE_LAYERS=3,31,59
and --disable-radix-cache. It sees this machine's output folder (one machine, or a shared file system). It writes each sample whole;
this script sends the token ids, checks what arrives and renames it into place.

More data than disk: with --max-disk-gb the samples present never take more than that; when they do, 03 waits until a `04_train.py --follow`
beside it has trained on some and released them (released.jsonl). What was released counts as extracted and is not asked for again.

Reads   responses/ (part-*.jsonl, manifest.json); with --verify, lm_head and the final norm of --verifier-path
Writes  <output-dir>/<2 hex>/<id>.safetensors, plan.jsonl (all samples in the order of one pass), landed.jsonl (journal), quarantine.jsonl,
        index.jsonl, verify.json, manifest.json (last)
Size    8 * hidden_size * bytes per element + 5 bytes a token: 57,349 for Kimi-K2.5, 5.0 TB for 87.8M tokens. Time: the prefill's.
Stop it any way, at any time; the same command goes on. Exit 2 with one line for what you can mend (server away, disk full, ...).
Legend: T tokens of a sample, H hidden size, K positions checked.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import http.client
import json
import math
import os
import queue
import re
import shutil
import socket
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml

STAGE = "03_extract"
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
            tokens.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
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
    """Lock `folder` for this process and refuse what another config began there (`stage.json`). Keep the handle open. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}). Name another --output-dir.") from None
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

ID = re.compile(r"[A-Za-z0-9._-]{1,120}")
FACTS = ("target", "capture_layers", "sglang_version", "patch_hash", "dtype", "hidden_size")  # the same in every file of a folder
ELEMENT = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
ATTEMPTS = 3          # of one sample, where the server answered
DEATHS = 5            # of servers while they had one sample: perhaps because of it
BUSY = (429, 502, 503, 504)  # a full queue, or a proxy before a server that restarts: asked again for --server-wait seconds
FULL = (errno.ENOSPC, errno.EDQUOT)
FIRST_FILE_S = 30.0   # after the first answer: the server writes within a second
NEXT_FILE_S = 180.0   # without any file: a disk that is merely slow still finishes some
NEXT_TOKEN_SHARE = 0.9  # of samples whose last state must give the token the engine itself chose (bf16 ties allow for the rest)
NORM_TOLERANCE = 0.1
HEADER_BYTES = 4096     # of a file, at most: its length depends on names and numbers in it


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, help="responses/ of 01_generate (needed)")
    add("--output-dir", type=Path, help="hidden_states/ (needed)")
    add("--base-url", action="append", help="a patched SGLang server; repeat for several (needed)")
    add("--capture-dir", type=Path, help="the servers' EAGLE3_CAPTURE_DIR (default: <output-dir>/.incoming)")
    add("--concurrency", type=int, default=32, help="requests in flight, over all servers")
    add("--max-length", type=int, default=0, metavar="T", help="cut longer samples to their first T tokens, and say so (0: never cut)")
    add("--limit", type=int, default=0, help="only the first N samples (0: all)")
    add("--server-wait", type=float, default=1800, metavar="S", help="how long all servers may be away or busy (a restart, a full queue)")
    add("--request-timeout", type=float, default=900, metavar="S")
    add("--max-failed", type=float, default=0.01, metavar="SHARE",
        help="stop when more than this share of the samples, and more than one, is quarantined")
    add("--disk-check", action=argparse.BooleanOptionalAction, default=True, help="refuse to begin what does not fit on the disk")
    add("--max-disk-gb", type=float, metavar="F", help="bounded mode: never more than F GB (10^9 bytes) of samples on the disk, those on their way "
        "included; 04_train.py --follow trains on them as they land and releases them. F may change between calls, the mode may not")
    add("--log-interval", type=float, default=10, metavar="S")
    add("--verify", action=argparse.BooleanOptionalAction, default=False, help="afterwards, or on a complete folder: re-read and check everything")
    add("--verifier-path", type=Path, metavar="DIR", help="the target's folder: --verify then also recomputes greedy tokens")
    add("--verify-positions", type=int, default=64, metavar="K", help="response positions a sample to recompute (0: all)")
    add("--min-agreement", type=float, default=0.2, metavar="SHARE",
        help="--verify: least share of a sample's checked response tokens that the target would choose greedily")
    add("--redo-failed", action="store_true", help="first drop the samples that the last --verify found bad, and those in quarantine")
    return parser


# ---- Samples and files ----
@dataclass(slots=True)
class Sample:
    """Where a response stands; its ids are read again when they are sent, so that millions of samples need little memory."""
    id: str
    file: int       # index of the part file
    offset: int     # of the row, bytes
    prompt_len: int
    tokens: int     # T, after --max-length
    truncated: bool


def read_samples(parts: list[Path], max_length: int, limit: int) -> tuple[list[Sample], collections.Counter]:
    """All samples in file order, and how many were dropped, by reason. Raises UserError naming the line."""
    samples, seen, dropped = [], set(), collections.Counter()
    for number, path in enumerate(parts):
        with open(path, "rb") as file:
            offset, line = 0, 0
            for raw in file:
                line += 1
                try:
                    row = json.loads(raw)
                    sample_id, prompt, response = row["id"], row["prompt_ids"], row["response_ids"]
                    if not isinstance(sample_id, str) or not all(isinstance(token, int) and token >= 0 for token in prompt + response):
                        raise ValueError
                except (ValueError, KeyError, TypeError):
                    raise UserError(f"{path}:{line}: no row with id, prompt_ids and response_ids. Run 01_generate.py again.") from None
                if not ID.fullmatch(sample_id) or sample_id in seen:
                    raise UserError(f"{path}:{line}: id {sample_id!r} is {'there twice' if sample_id in seen else 'no safe file name'}. "
                                    "Run 01_generate.py again.")
                seen.add(sample_id)
                full = len(prompt) + len(response)
                tokens = min(full, max_length) if max_length else full
                if not response:
                    dropped["empty response"] += 1
                elif tokens <= len(prompt):
                    dropped["prompt fills --max-length"] += 1
                else:
                    samples.append(Sample(sample_id, number, offset, len(prompt), tokens, tokens < full))
                offset += len(raw)
                if limit and len(samples) == limit:
                    return samples, dropped
    return samples, dropped


def read_ids(part: Path, sample: Sample) -> list[int]:
    with open(part, "rb") as file:
        file.seek(sample.offset)
        row = json.loads(file.readline())
    return (row["prompt_ids"] + row["response_ids"])[:sample.tokens]


def write_plan(folder: Path, samples: list[Sample]) -> None:
    """plan.jsonl: the samples in the order in which one pass trains on them, by a hash of their ids: 01 sorts by id, so that alike lie together."""
    if not (folder / "plan.jsonl").exists():
        write_atomic(folder / "plan.jsonl", "".join(json.dumps({"id": sample.id, "tokens": sample.tokens, "prompt_len": sample.prompt_len}) + "\n"
                                                    for sample in sorted(samples, key=plan_key)))


def plan_key(sample: Sample) -> str:
    return hashlib.sha256(sample.id.encode()).hexdigest()


def sample_path(folder: Path, sample_id: str) -> Path:
    return folder / hashlib.sha256(sample_id.encode()).hexdigest()[:2] / f"{sample_id}.safetensors"


def read_header(path: Path) -> tuple[dict, int]:
    """(header, where the data begin) of a safetensors file. Raises ValueError saying what is wrong, OSError."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length < 1 << 20:
            raise ValueError("no safetensors header")
        header = json.loads(file.read(length))
        size = os.fstat(file.fileno()).st_size
    try:
        end = max(tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
        header["__metadata__"]["checksum"]
    except (KeyError, TypeError, ValueError):
        raise ValueError("no tensors or no metadata in its header") from None
    if size != 8 + length + end:
        raise ValueError(f"{size} bytes, its header says {8 + length + end}")
    return header, 8 + length


def check_header(header: dict, sample: Sample, facts: dict | None) -> dict:
    """The facts (FACTS) a file states. Raises ValueError when it is not `sample`, or not of the folder's `facts`."""
    metadata, T = header["__metadata__"], sample.tokens
    try:
        dtype, (_, width) = header["last_hidden_states"]["dtype"], header["last_hidden_states"]["shape"]
        tensors = {name: (tensor["dtype"], tensor["shape"], tensor["data_offsets"])
                   for name, tensor in header.items() if name != "__metadata__"}
        found = {**{fact: metadata[fact] for fact in FACTS if fact != "hidden_size"}, "hidden_size": width}
        found["capture_layers"] = [int(layer) for layer in metadata["capture_layers"].split(",")]
        identity = (metadata["schema"], metadata["id"], metadata["prompt_len"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header lacks {error}") from None
    if identity != (str(SCHEMA), sample.id, str(sample.prompt_len)):
        raise ValueError(f"is {identity} (schema, id, prompt_len), expected {(str(SCHEMA), sample.id, str(sample.prompt_len))}")
    name, size = ELEMENT.get(dtype, ("unknown", 0))
    expected, end = {}, 0
    for tensor, kind, shape, count in (("aux_hidden_states", dtype, [T, 3 * width], T * 3 * width * size),
                                       ("last_hidden_states", dtype, [T, width], T * width * size), ("input_ids", "I32", [T], 4 * T),
                                       ("loss_mask", "U8", [T], T)):
        expected[tensor] = (kind, shape, [end, end + count])
        end += count
    if tensors != expected or name != found["dtype"]:
        raise ValueError(f"has other tensors than its tokens make ({found['dtype']} {tensors}, expected {expected})")
    if facts is not None and found != facts:
        differs = ", ".join(f"{fact} {found[fact]} (the folder: {facts[fact]})" for fact in FACTS if found[fact] != facts[fact])
        raise ValueError(f"was captured with another {differs}")
    return found


def check_ids(tail: bytes, ids: list[int], prompt_len: int) -> None:
    """`tail`: a file's input_ids and loss_mask, the last of its data. Raises ValueError when they are not the response's."""
    T = len(ids)
    if tail[:4 * T] != b"".join(token.to_bytes(4, "little") for token in ids):
        raise ValueError("ids are not the response's")
    if tail[4 * T:] != bytes(prompt_len) + b"\1" * (T - prompt_len):
        raise ValueError("loss mask is not the response's")


class Journal:
    """landed.jsonl: what lies in place. A sample counts when its line and its file agree; lines are only ever appended.

    The line is written before the file is renamed into place, so that no file stands there without one.
    """

    def __init__(self, folder: Path):
        self.path, self.lock = folder / "landed.jsonl", threading.Lock()
        self.rows: dict[str, dict] = {}
        self.facts: dict | None = None
        good = 0
        if self.path.exists():
            with open(self.path, "rb") as file:
                for raw in file:
                    try:
                        row = json.loads(raw)
                    except ValueError:
                        break
                    if not raw.endswith(b"\n"):
                        break  # torn by a kill
                    good += len(raw)
                    self.take(row)
        self.file = open(self.path, "ab")
        self.file.truncate(good)

    def take(self, row: dict) -> None:
        if "facts" in row:
            self.facts = row["facts"]
        elif row.get("redo"):
            self.rows.pop(row["id"], None)
        else:
            self.rows[row["id"]] = row

    def add(self, row: dict) -> None:
        with self.lock:
            self.take(row)
            self.file.write(json.dumps(row).encode() + b"\n")
            self.file.flush()

    def sync(self) -> None:
        with self.lock:
            os.fsync(self.file.fileno())


def landed(journal: Journal, folder: Path, sample: Sample) -> bool:
    """Whether `sample` lies in place: journal and file agree on size, facts and checksum (that of its header; --verify computes it)."""
    row, path = journal.rows.get(sample.id), sample_path(folder, sample.id)
    if row is None or row["tokens"] != sample.tokens or not path.exists():
        return False
    try:
        header, _ = read_header(path)
        check_header(header, sample, journal.facts)
        if header["__metadata__"]["checksum"] != row["checksum"]:
            raise ValueError("its checksum is not the one written down")
    except ValueError as error:
        log(f"{path}: {error}: extracting it again")
        return False
    return True


# ---- Bounded mode ----
class Tail:
    """The whole lines that were appended to a file since the last call."""

    def __init__(self, path: Path):
        self.path, self.offset = path, 0

    def new(self) -> list[dict]:
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read()
        data = data[:data.rfind(b"\n") + 1]
        self.offset += len(data)
        return [json.loads(line) for line in data.splitlines()]


class Room:
    """The bytes under --max-disk-gb: of files in place until 04 has released and removed them, and of samples on their way.

    released.jsonl is 04's: {"id", "checksum"}, on the disk before the file goes, so that a released sample can be told from a lost one.
    """

    def __init__(self, folder: Path, limit: int, journal: Journal):
        self.folder, self.limit, self.journal, self.lock = folder, limit, journal, threading.Lock()
        self.sizes = {path.name.removesuffix(".safetensors"): path.stat().st_size for path in folder.glob("[0-9a-f][0-9a-f]/*")}  # in place
        self.coming: dict[str, int] = {}  # sent: the most bytes that it can take
        self.tail, self.released, self.leaving = Tail(folder / "released.jsonl"), {}, set()
        self.waiting: str | None = None
        self.last_release = time.monotonic()
        self.poll()
        for sample_id, checksum in self.released.items():
            if journal.rows.get(sample_id, {}).get("checksum") != checksum:
                raise UserError(f"{self.tail.path}: {sample_id} was released with a checksum that landed.jsonl does not have. "
                                "The two files are of different runs: begin a new --output-dir.")

    def poll(self) -> None:
        for row in self.tail.new():
            self.released[row["id"]] = row["checksum"]
            self.leaving.add(row["id"])
        for sample_id in list(self.leaving):
            if not sample_path(self.folder, sample_id).exists():
                self.leaving.discard(sample_id)
                self.sizes.pop(sample_id, None)
                self.last_release = time.monotonic()

    def used(self) -> int:
        return sum(self.sizes.values()) + sum(self.coming.values())

    def enter(self, sample: Sample, run: "Extraction") -> None:
        """Wait until `sample` fits beside all that is there or on its way. Called by one thread at a time, in the order of the plan: a later
        sample never takes the room that an earlier one waits for, so what 04 needs next always comes. Raises UserError."""
        while run.stop is None:
            size = token_bytes(self.journal.facts, None)
            with self.lock:
                self.poll()
                if size is None:  # unknown before the first file: that one goes alone
                    fits, need = not self.coming, 0
                else:
                    need = sample.tokens * size + HEADER_BYTES
                    fits = self.used() + need <= self.limit
                if fits:
                    self.coming[sample.id], self.waiting = need, None
                    return
                self.waiting = f"{sample.id} ({need / 1e9:,.3f} GB)"
            if need > self.limit:
                raise UserError(f"--max-disk-gb {self.limit / 1e9:g}: {sample.id} alone takes {need / 1e9:,.3f} GB. Allow more, or cut with --max-length.")
            time.sleep(0.05)

    def landed(self, sample: Sample, size: int) -> None:
        with self.lock:
            self.coming.pop(sample.id, None)
            self.sizes[sample.id] = size
            if sample.id in self.released:  # 04 was quicker than this line
                self.leaving.add(sample.id)

    def gave_up(self, sample: Sample) -> None:
        with self.lock:
            self.coming.pop(sample.id, None)

    def say(self) -> str:
        with self.lock:
            return f"disk {self.used() / 1e9:,.3f}/{self.limit / 1e9:,.3f} GB | released {len(self.released) - len(self.leaving):,}"


def settle(servers: list["Server"], incoming: Path, folder: Path, token: int) -> None:
    """After a kill a server may still write what the dead process asked for, which no bound counts. It works in order: once it has answered
    a request sent now, those files are begun, if not whole. Wait until nothing changes any more, then remove them. Raises OSError, HTTPException."""
    body = json.dumps({"input_ids": [token], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).encode()
    for server in servers:
        server.ask("POST", "/generate", body, 600)

    def left() -> list:
        return sorted((path.name, path.stat().st_size) for run in own_runs(incoming, folder) for path in run.glob("*.safetensors*"))

    before, deadline = None, time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            now = left()
        except FileNotFoundError:  # renamed between the two
            now = None
        if now is not None and now == before:
            break
        before = now
        time.sleep(0.5)
    clean_incoming(incoming, folder)


# ---- Servers ----
class Server:
    """One --base-url. `epoch` counts how often it was found away: a file asked for before will not come any more."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        parts = urllib.parse.urlsplit(self.url)
        try:
            self.host, self.port = parts.hostname, parts.port or 80
        except ValueError:
            self.host = None
        if parts.scheme != "http" or not self.host:
            raise UserError(f"--base-url {url}: expected http://HOST:PORT.")
        self.away_since: float | None = None
        self.epoch = self.in_flight = 0
        self.said_busy = -math.inf

    def probe(self) -> None:
        """Whether somebody listens; a restarted server listens again only when its model is loaded."""
        try:
            socket.create_connection((self.host, self.port), 5).close()
            if self.away_since is not None and self.ask("GET", "/health", None, 30)[0] == 200:
                log(f"{self.url} is back after {time.monotonic() - self.away_since:.0f} s")
                self.away_since = None
        except (OSError, http.client.HTTPException) as error:
            self.lost(error)

    def lost(self, error: Exception) -> None:
        if self.away_since is None:
            self.away_since, self.epoch = time.monotonic(), self.epoch + 1
            log(f"{self.url} is away ({type(error).__name__}: {error}): waiting for it")

    def busy(self, detail: str) -> None:
        if time.monotonic() - self.said_busy > 60:
            self.said_busy = time.monotonic()
            log(f"{self.url} is busy ({detail}): asking again")

    def ask(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        """(status, body). Raises OSError, HTTPException."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class Quarantined(Exception):
    """This sample cannot be extracted. args: reason (one of few), detail."""


class Lost(Exception):
    """The server went away before it answered."""


class Retry(Exception):
    """The sample is to be sent again."""


class Busy(Retry):
    """As soon as the server has room for it."""


def next_token(answer: bytes, sample: Sample) -> int:
    """The token that the engine itself chose after the sample. Raises Retry, Quarantined."""
    try:
        answer = json.loads(answer)
        token, read = answer["output_ids"][0], answer["meta_info"]["prompt_tokens"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Retry(f"an answer without output_ids or prompt_tokens ({error})") from None
    if read != sample.tokens:
        raise Quarantined("cut by the server", f"it read {read} of {sample.tokens} tokens (--allow-auto-truncate)")
    return token


class Extraction:
    """The samples on their way: worker threads take them from `work`; `stop` holds what ends the run."""

    def __init__(self, args, parts: list[Path], servers: list[Server], journal: Journal, folder: Path, incoming: Path, room: Room | None):
        self.args, self.parts, self.servers, self.journal, self.folder, self.incoming = args, parts, servers, journal, folder, incoming
        # The servers write into a folder of this process alone: what an earlier one asked for may still arrive there
        self.run = f"{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}-{os.getpid()}-{int(time.time())}"
        self.work: queue.SimpleQueue = queue.SimpleQueue()
        self.lock, self.turn, self.alone, self.room = threading.Lock(), threading.Lock(), threading.Lock(), room
        self.stop: BaseException | None = None
        self.last_file: float | None = None
        self.samples = self.tokens = self.bytes = 0  # in place since the start
        self.quarantine_path = folder / "quarantine.jsonl"
        self.quarantine: dict[str, str] = {}
        if self.quarantine_path.exists():
            text = self.quarantine_path.read_bytes()
            os.truncate(self.quarantine_path, text.rfind(b"\n") + 1)  # torn by a kill: that sample is tried again
            for line in text[:text.rfind(b"\n") + 1].splitlines():
                row = json.loads(line)
                self.quarantine[row["id"]] = row["reason"]

    def worker(self) -> None:
        while self.stop is None:
            try:
                with self.turn:
                    sample = self.work.get_nowait()
                    if self.room:
                        self.room.enter(sample, self)
            except queue.Empty:
                return
            except BaseException as error:  # the main thread raises it
                self.stop = self.stop or error
                return
            try:
                try:
                    self.extract(sample)
                except Quarantined as error:
                    self.put_aside(sample, *error.args)
            except BaseException as error:  # the main thread raises it
                self.stop = self.stop or error
            if self.room:
                self.room.gave_up(sample)  # or it has landed

    def put_aside(self, sample: Sample, reason: str, detail: str) -> None:
        self.sweep(sample)
        with self.lock:
            self.quarantine[sample.id] = reason
            with open(self.quarantine_path, "a") as file:
                file.write(json.dumps({"id": sample.id, "reason": reason, "detail": detail}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        log(f"quarantined {sample.id}: {reason}: {detail}")

    def check_failed(self, total: int) -> None:
        """Raises UserError when too many of `total` samples are in quarantine."""
        if len(self.quarantine) > max(1, self.args.max_failed * total):
            with self.lock:
                reasons = collections.Counter(self.quarantine.values()).most_common()
            raise UserError(f"{self.quarantine_path}: {len(self.quarantine)} of {total} samples failed ({reasons}), more than "
                            "--max-failed allows. Mend the cause, then run the same command with --redo-failed.")

    def sweep(self, sample: Sample) -> None:
        """Remove what a server that died or was too slow has left of `sample`: there is room for one try."""
        for suffix in ("safetensors", "safetensors.tmp"):
            for path in self.incoming.glob(f"{self.run}.*/{sample.id}.{suffix}"):
                path.unlink(missing_ok=True)

    def server(self) -> Server | None:
        """The server with the fewest requests, waiting while all are away; None when the run is to stop."""
        while self.stop is None:
            with self.lock:
                up = [server for server in self.servers if server.away_since is None]
                if up:
                    chosen = min(up, key=lambda server: server.in_flight)
                    chosen.in_flight += 1
                    return chosen
            time.sleep(0.2)
        return None

    def extract(self, sample: Sample) -> None:
        """Try until the sample is in place. Raises Quarantined, UserError."""
        ids = read_ids(self.parts[sample.file], sample)
        attempt = sent = deaths = 0
        busy: float | None = None
        while self.stop is None:
            if sent:
                self.sweep(sample)
            sent += 1
            try:
                # Those that have seen servers die go one at a time, so that only the cause sees more. A folder for each try: an aborted
                # request of the same name may still be writing
                with self.alone if deaths > 1 else contextlib.nullcontext():
                    if self.send(sample, ids, f"{self.run}.{sent}"):
                        return
            except Lost as error:
                deaths += 1
                if deaths == DEATHS:
                    raise Quarantined(f"the server died {DEATHS} times", str(error)) from None
            except Retry as error:
                if isinstance(error, Busy):
                    busy = busy or time.monotonic()
                    if time.monotonic() - busy < self.args.server_wait:
                        time.sleep(1)
                        continue
                attempt += 1
                if attempt == ATTEMPTS:
                    raise Quarantined(f"failed {ATTEMPTS} times", str(error)) from None
                time.sleep(attempt)

    def send(self, sample: Sample, ids: list[int], run: str) -> bool:
        """Ask a server, wait for the file, put it in place; False when the server went away after its answer.

        Raises Lost, Retry, Quarantined, UserError.
        """
        body = json.dumps({"input_ids": ids, "rid": f"eagle3:{run}:{sample.prompt_len}:{sample.tokens}:{sample.id}",
                           "sampling_params": {"max_new_tokens": 1, "temperature": 0}}).encode()
        server = self.server()
        if server is None:
            return False
        epoch = server.epoch
        try:
            status, answer = server.ask("POST", "/generate", body, self.args.request_timeout)
            if status != 200:
                detail = f"HTTP {status}: {' '.join(answer.decode(errors='replace').split())[:300]}"
                if status in (400, 413, 422):
                    raise Quarantined("rejected by the server", detail)
                if status in BUSY:
                    server.busy(detail)
                    raise Busy(detail)
                raise Retry(detail)
        except TimeoutError:
            raise Retry(f"no answer in {self.args.request_timeout:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            server.lost(error)
            raise Lost(str(error)) from None
        else:
            token = next_token(answer, sample)
            path = self.wait(self.incoming / run, sample, server, epoch)
            if path is not None:
                self.land(path, sample, ids, token)
            return path is not None
        finally:
            with self.lock:
                server.in_flight -= 1

    def wait(self, folder: Path, sample: Sample, server: Server, epoch: int) -> Path | None:
        """The file of `sample`, once it is whole; None when the server died before. Raises what its .error says."""
        path, failed = folder / f"{sample.id}.safetensors", folder / f"{sample.id}.error"
        asked = time.monotonic()
        pause = 0.002
        while self.stop is None:
            if path.exists():
                self.last_file = time.monotonic()
                return path
            if failed.exists():
                kind, _, text = failed.read_text().strip().partition(": ")
                failed.unlink()
                if kind == "data":
                    raise Quarantined("not finite", text)
                if kind == "retry":
                    raise Retry(text)
                if kind == "write" and any(f"Errno {number}" in text for number in FULL):
                    raise UserError(f"{self.incoming}: the disk is full ({free_bytes(self.folder) / 1e9:,.1f} GB free now). "
                                    "Make room and run the same command again.")
                if kind == "write":
                    raise UserError(f"{self.incoming}: {server.url} cannot write there ({text}). Mend that and run this again.")
                raise UserError(f"{server.url}: {text} Start the server anew, then run the same command again.")
            if server.epoch != epoch:
                return None
            waited = time.monotonic() - max(asked, self.last_file or asked)
            if waited > FIRST_FILE_S and self.last_file is None and not any(self.incoming.rglob("*.safetensors*")):
                raise UserError(f"{server.url} answered, but nothing appeared in {self.incoming}. Patch its SGLang "
                                "(patches/sglang_patch.py apply) and start it with EAGLE3_CAPTURE_DIR set to that folder.")
            if waited > NEXT_FILE_S:
                raise UserError(f"{server.url} answered, but the file of {sample.id} did not appear in {waited:.0f} s "
                                f"({free_bytes(self.folder) / 1e9:,.1f} GB free). Read the server's log, then run the same command again.")
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        return None

    def land(self, path: Path, sample: Sample, ids: list[int], next_token: int) -> None:
        """Put a whole file in place. Raises Retry, UserError."""
        try:
            header, data = read_header(path)
            with self.lock:  # of two servers that differ, one states the facts
                facts = check_header(header, sample, self.journal.facts)
                if self.journal.facts is None:
                    self.journal.add({"facts": facts})
        except ValueError as error:
            raise UserError(f"{path}: {error}. Start the server as the run began, or use another --output-dir.") from None
        size = data + header["loss_mask"]["data_offsets"][1]
        with open(path, "rb") as file:
            file.seek(data + header["input_ids"]["data_offsets"][0])
            try:
                check_ids(file.read(), ids, sample.prompt_len)
            except ValueError as error:
                raise Retry(f"{error}: the server wrote rows of something else") from None
        place = sample_path(self.folder, sample.id)
        place.parent.mkdir(exist_ok=True)
        self.journal.add({"id": sample.id, "tokens": sample.tokens, "prompt_len": sample.prompt_len, "truncated": sample.truncated,
                          "next_token": next_token, "checksum": header["__metadata__"]["checksum"]})
        if self.room:
            self.journal.sync()  # before 04 sees the file, and may release it: from then on the line is all that is left of it
        try:
            os.rename(path, place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copyfile(path, f"{place}.tmp")  # another file system: the one case in which bytes are written twice
            with open(f"{place}.tmp", "rb+") as file:
                os.fsync(file.fileno())
            os.replace(f"{place}.tmp", place)
            path.unlink()
        if self.room:
            self.room.landed(sample, size)
        with self.lock:
            self.samples, self.tokens, self.bytes = self.samples + 1, self.tokens + sample.tokens, self.bytes + size


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def token_bytes(facts: dict | None, target: Path | None) -> int | None:
    """Bytes a token takes, from the files so far, else from the target's config; None when neither is there."""
    if facts is not None:
        width, size = facts["hidden_size"], dict(ELEMENT.values())[facts["dtype"]]
    else:
        try:
            config = json.loads((target / "config.json").read_text())
            width, size = config.get("text_config", config)["hidden_size"], 2
        except (TypeError, OSError, ValueError, KeyError):
            return None
    return 4 * width * size + 5


def duration(seconds: float) -> str:
    minutes = int(seconds / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes else f"{seconds:.0f}s"


def own_runs(incoming: Path, folder: Path) -> list[Path]:
    return list(incoming.glob(f"{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}-*"))


def clean_incoming(incoming: Path, folder: Path) -> None:
    """Remove what earlier processes of this output folder asked for and never took."""
    for path in own_runs(incoming, folder):
        shutil.rmtree(path, ignore_errors=True)


def forecast(args, tokens: int, journal: Journal, folder: Path, room: Room | None) -> None:
    """Say how many bytes are still to come and how many fit; refuse what does not fit. Raises UserError."""
    size = token_bytes(journal.facts, args.verifier_path)
    if size is None:
        return
    need, free = tokens * size, free_bytes(folder)
    if room:
        need = max(0, min(need, room.limit - sum(room.sizes.values())))
    log(f"forecast {need / 1e9:,.2f} GB ({size:,} bytes a token) | disk free {free / 1e9:,.2f} GB")
    if need > free and args.disk_check:
        raise UserError(f"{folder}: {need / 1e9:,.1f} GB are to come, {free / 1e9:,.1f} GB are free. Make room, take fewer samples "
                        "(--limit, --max-length), or begin anyway with --no-disk-check.")


def extract_all(args, samples: list[Sample], parts: list[Path], journal: Journal, folder: Path, incoming: Path) -> Extraction:
    """Extract what is not in place yet. Raises UserError."""
    servers = [Server(url) for url in args.base_url]
    room = Room(folder, int(args.max_disk_gb * 1e9), journal) if args.max_disk_gb else None
    run = Extraction(args, parts, servers, journal, folder, incoming, room)
    released = room.released if room else {}
    open_samples = [sample for sample in samples if sample.id not in run.quarantine and sample.id not in released and not landed(journal, folder, sample)]
    if room:
        open_samples.sort(key=plan_key)
    total, left = len(samples), sum(sample.tokens for sample in open_samples)
    in_place = total - len(open_samples) - len(run.quarantine)
    log(f"samples {total:,} | in place {in_place:,} | quarantined {len(run.quarantine):,} "
        f"| to do {len(open_samples):,} | tokens to do {left:,} | truncated {sum(sample.truncated for sample in samples):,}")
    run.check_failed(total)
    if not open_samples:
        return run
    for server in servers:
        try:
            status, _ = server.ask("GET", "/health", None, 60)
            if status != 200:
                raise UserError(f"{server.url}: not healthy (HTTP {status}). Wait until the server is ready, then run this again.")
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{server.url}: no server answers there ({type(error).__name__}). Start it, or mend --base-url.") from None
    if room:
        try:
            settle(servers, incoming, folder, read_ids(parts[open_samples[0].file], open_samples[0])[0])
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{', '.join(server.url for server in servers)}: no answer ({type(error).__name__}). Start the server again, "
                            "then run the same command.") from None
    forecast(args, left, journal, folder, room)
    for sample in open_samples:
        run.work.put(sample)
    threads = [threading.Thread(target=run.worker, daemon=True) for _ in range(min(args.concurrency, len(open_samples)))]
    for thread in threads:
        thread.start()
    began = last_log = last_probe = time.monotonic()
    size = token_bytes(journal.facts, args.verifier_path)
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        if run.stop is not None:
            journal.sync()
            raise run.stop
        now = time.monotonic()
        # The first file may say otherwise than the target's config
        if journal.facts is not None and size != (found := token_bytes(journal.facts, None)):
            size = found
            forecast(args, left - run.tokens, journal, folder, room)
        if now - last_probe > 1:
            for server in servers:
                server.probe()
            last_probe = now
        away = [server for server in servers if server.away_since is not None]
        if len(away) == len(servers) and now - max(server.away_since for server in away) > args.server_wait:
            raise UserError(f"{', '.join(server.url for server in away)}: away for {args.server_wait:.0f} s. "
                            "Start the server again, then run the same command.")
        run.check_failed(total)
        if now - last_log >= args.log_interval:
            journal.sync()
            speed = run.tokens / (now - began)
            eta = duration((left - run.tokens) / speed) if speed else "unknown"
            bound = f"{room.say()} | " if room else ""
            to_come = "" if room or size is None else f", {(left - run.tokens) * size / 1e9:,.1f} GB to come"
            if room and room.waiting and not room.coming and now - room.last_release > args.log_interval:
                log(f"waiting for 04_train.py --follow to release samples | next {room.waiting} | {bound}nothing was released for "
                    f"{duration(now - room.last_release)}")
            log(f"sample {in_place + run.samples:,}/{total:,} | {speed:,.0f} tok/s | {run.bytes / 1e9 / (now - began):.2f} GB/s | "
                f"{bound}disk free {free_bytes(folder) / 1e9:,.1f} GB{to_come} | quarantined {len(run.quarantine)} | "
                f"servers {len(servers) - len(away)}/{len(servers)} | eta {eta}")
            last_log = now
    if run.stop is not None:
        raise run.stop
    run.check_failed(total)
    seconds = time.monotonic() - began
    log(f"extracted {run.tokens:,} tokens, {run.bytes / 1e9:.3f} GB in {seconds:.1f} s | {run.tokens / seconds:,.0f} tok/s | "
        f"{run.bytes / 1e9 / seconds:.3f} GB/s")
    return run


# ---- --verify ----
def head_tensors(folder: Path) -> dict[str, tuple[Path, str]]:
    """{"norm", "head"}: (file, name) of the target's final norm weight and lm_head, from headers alone. Raises UserError."""
    def header(path: Path) -> dict:
        with open(path, "rb") as file:
            return json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 100 << 20)))

    found = {}
    try:
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        names = json.loads(index.read_text())["weight_map"] if index.exists() else dict.fromkeys(header(single), single.name)
        for key, endings in (("norm", ("model.norm.weight",)), ("head", ("lm_head.weight", "model.embed_tokens.weight"))):
            # Bare, or under the `language_model.` of a multimodal wrapper; tied weights have no lm_head
            name = next((name for ending in endings for name in (ending, f"language_model.{ending}") if name in names), None)
            if name is None:
                raise UserError(f"{folder}: no {endings[0]} among its tensors. Mend --verifier-path.")
            kind = header(folder / names[name])[name]["dtype"]
            if kind not in ELEMENT:
                raise UserError(f"{folder}: {name} is quantised ({kind}). --verify needs it in bf16, fp16 or fp32.")
            found[key] = folder / names[name], name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: no readable safetensors of the target ({error}). Mend --verifier-path.") from None
    return found


class Head:
    """The target's final norm weight (H,) and lm_head (V, H): what makes tokens out of last_hidden_states. Raises UserError."""

    def __init__(self, folder: Path):
        import torch  # only here: extraction itself stays small in memory
        from safetensors import safe_open

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        found = {}
        for key, (path, name) in head_tensors(folder).items():
            with safe_open(path, "pt") as file:
                found[key] = file.get_tensor(name)
        self.norm, self.head = found["norm"].float(), found["head"].to(self.device)

    def greedy(self, last):
        """last: (K, H) after the final norm -> the token each state chooses, (K,). The vocabulary goes by in parts: logits stay small."""
        import torch

        best, token = torch.full((len(last),), -torch.inf), torch.zeros(len(last), dtype=torch.long)
        last = last.to(self.device)
        # On a CPU in float32, since bf16 there is slow; on a GPU in the file's own precision, as the engine does
        dtype = torch.float32 if self.device == "cpu" else last.dtype
        for begin in range(0, len(self.head), 16384):
            logits = last.to(dtype) @ self.head[begin:begin + 16384].to(dtype).T  # (K, 16384)
            value, index = (part.cpu() for part in logits.float().max(dim=-1))
            token, best = torch.where(value > best, index + begin, token), torch.maximum(value, best)
        return token


def check_data(path: Path, begin: int, header: dict, ids: list[int], prompt_len: int) -> None:
    """Checksum, finite, ids and loss mask equal to the response's, in one pass. Raises ValueError."""
    import torch

    sha256, buffer = hashlib.sha256(), bytearray(8 << 20)
    _, end = header["last_hidden_states"]["data_offsets"]
    dtype = getattr(torch, ELEMENT[header["last_hidden_states"]["dtype"]][0])
    rest, finite = b"", True
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        at = 0
        while count := file.readinto(buffer):
            sha256.update(memoryview(buffer)[:count])
            floats = max(0, min(count, end - at))  # the two float tensors come first
            if floats:
                finite = finite and bool(torch.frombuffer(buffer, dtype=torch.uint8, count=floats).view(dtype).isfinite().all())
            rest += bytes(memoryview(buffer)[floats:count])
            at += count
    if f"sha256:{sha256.hexdigest()}" != header["__metadata__"]["checksum"]:
        raise ValueError("checksum")
    if not finite:
        raise ValueError("not finite")
    check_ids(rest, ids, prompt_len)


def check_meaning(path: Path, begin: int, header: dict, ids: list[int], row: dict, head: Head, positions: int) -> dict:
    """What the last states say: share of response tokens they choose, whether the engine's next token too, their size.

    norm: root mean square of (state / norm weight), 1 at every position after the final norm by its definition.
    """
    import torch

    T, prompt_len = row["tokens"], row["prompt_len"]
    offset, end = header["last_hidden_states"]["data_offsets"]
    dtype = getattr(torch, ELEMENT[header["last_hidden_states"]["dtype"]][0])
    width = (end - offset) // (T * dtype.itemsize)
    predicting = torch.arange(max(0, prompt_len - 1), T - 1)  # position p predicts token p+1
    if positions and len(predicting) > positions:
        predicting = predicting[torch.linspace(0, len(predicting) - 1, positions).long()]
    picked = torch.cat([predicting, torch.tensor([T - 1])])
    states = torch.empty((len(picked), width), dtype=dtype)
    with open(path, "rb") as file:
        for number, position in enumerate(picked.tolist()):
            file.seek(begin + offset + position * width * dtype.itemsize)
            states[number] = torch.frombuffer(bytearray(file.read(width * dtype.itemsize)), dtype=dtype)
    if width != len(head.norm):
        raise UserError(f"--verifier-path: its hidden size is {len(head.norm)}, the files have {width}. Name the target they came from.")
    token = head.greedy(states)
    norms = (states.float() / head.norm).square().mean(-1).sqrt()
    norm = norms[(norms - 1).abs().argmax()].item()  # the row farthest off: sizes before the norm differ from row to row
    right = int((token[:-1] == torch.tensor(ids)[predicting + 1]).sum())
    return {"checked": len(predicting), "right": right, "next_right": bool(token[-1] == row["next_token"]), "norm": norm}


def verify(args, samples: list[Sample], rows: dict[str, dict], facts: dict, parts: list[Path], folder: Path) -> None:
    """Re-read every file, compare it with its row, and write verify.json. Raises UserError when a sample or the whole fails."""
    import torch

    workers = min(8, os.cpu_count() or 1)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    head = Head(args.verifier_path) if args.verifier_path else None
    checks = "checksum, shapes, finite, ids, mask" + (", greedy tokens, final norm" if head else
                                                       " (greedy tokens and final norm need --verifier-path)")
    log(f"verify {len(samples):,} samples: {checks}")

    def check(sample: Sample) -> tuple[str | None, dict | None]:
        """(what is wrong with it, what its last states say)"""
        path, row, result = sample_path(folder, sample.id), rows[sample.id], None
        try:
            header, begin = read_header(path)
            check_header(header, sample, facts)
            ids = read_ids(parts[sample.file], sample)
            check_data(path, begin, header, ids, sample.prompt_len)
            if header["__metadata__"]["checksum"] != row["checksum"]:
                raise ValueError("checksum differs from index")
            if head:
                result = check_meaning(path, begin, header, ids, row, head, args.verify_positions)
                if abs(result["norm"] - 1) > NORM_TOLERANCE:
                    raise ValueError(f"last states are not after the final norm (size {result['norm']:.3f}, expected 1)")
                if result["checked"] >= 8 and result["right"] < args.min_agreement * result["checked"]:
                    raise ValueError(f"last states choose {result['right']} of {result['checked']} response tokens")
        except (ValueError, OSError) as error:
            return str(error), result
        return None, result

    failed, results, done_bytes = {}, {}, 0
    began = last_log = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        for number, (sample, (problem, result)) in enumerate(zip(samples, pool.map(check, samples)), 1):
            path = sample_path(folder, sample.id)
            done_bytes += path.stat().st_size if path.exists() else 0
            if problem:
                failed[sample.id] = problem
            if result:
                results[sample.id] = result
            if time.monotonic() - last_log >= args.log_interval:
                last_log = time.monotonic()
                log(f"verify {number:,}/{len(samples):,} | {done_bytes / 1e9 / (last_log - began):.2f} GB/s | failed {len(failed)}")
    finally:
        pool.shutdown(cancel_futures=True)
    report = {"samples": len(samples), "checks": checks, "failed": dict(sorted(failed.items()))}
    if results:
        share = sorted(result["right"] / result["checked"] for result in results.values() if result["checked"])
        next_share = sum(result["next_right"] for result in results.values()) / len(results)
        report |= {"positions_checked": sum(result["checked"] for result in results.values()), "engine_next_token_share": next_share,
                   "agreement": {f"p{at}": share[min(len(share) - 1, len(share) * at // 100)] for at in (0, 5, 25, 50, 75, 95)} if share else {},
                   "agreement_by_sample": {key: round(result["right"] / max(1, result["checked"]), 4)
                                           for key, result in sorted(results.items())}}
        log(f"verify greedy agreement with the response tokens, by sample {report['agreement']} | with the engine's own next token {next_share:.4f}")
        if next_share < NEXT_TOKEN_SHARE:
            report["failed_as_a_whole"] = (f"the last states choose the engine's next token in {next_share:.1%} of the samples, expected "
                                           f"over {NEXT_TOKEN_SHARE:.0%}: they are not the states that its logits come from. "
                                           "Mend --verifier-path if it names another target, else the server, and begin a new --output-dir")
    bad = failed or "failed_as_a_whole" in report
    if bad:
        (folder / "manifest.json").unlink(missing_ok=True)  # no longer complete
    write_atomic(folder / "verify.json", json.dumps(report, indent=1) + "\n")
    if bad:
        kinds = collections.Counter(reason.split(" (")[0] for reason in failed.values()).most_common(4)
        raise UserError(f"{folder / 'verify.json'}: " + (report.get("failed_as_a_whole") or
                        f"{len(failed)} of {len(samples)} samples failed ({', '.join(f'{reason}: {n}' for reason, n in kinds)}). "
                        "Run the same command with --redo-failed to extract them again") + ".")
    log(f"verify all {len(samples):,} samples good | {done_bytes / 1e9:.3f} GB in {time.monotonic() - began:.1f} s")


def read_report(folder: Path) -> dict:
    """verify.json of the last --verify; empty when there was none."""
    try:
        return json.loads((folder / "verify.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}


def verify_complete(args, samples: list[Sample], parts: list[Path], folder: Path) -> None:
    """--verify of a folder that is complete: against what its manifest and index say. Raises UserError."""
    manifest, path = read_manifest(folder, STAGE), folder / "index.jsonl"
    if not path.is_file() or sha256_file(path) != manifest["index_sha256"]:
        raise UserError(f"{path}: not the file that manifest.json names. Remove manifest.json and run the same command: it writes both anew.")
    rows = {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
    verify(args, [sample for sample in samples if sample.id in rows], rows, {fact: manifest[fact] for fact in FACTS}, parts, folder)


def redo_failed(journal: Journal, folder: Path) -> None:
    """Forget what --verify found bad and what was quarantined, so that it is extracted again."""
    failed = read_report(folder).get("failed", {})
    if failed or (folder / "quarantine.jsonl").exists():
        (folder / "manifest.json").unlink(missing_ok=True)  # first: killed here, the folder must not look complete
        for sample_id in failed:
            journal.add({"id": sample_id, "redo": True})
            sample_path(folder, sample_id).unlink(missing_ok=True)
        for name in ("verify.json", "quarantine.jsonl"):
            (folder / name).unlink(missing_ok=True)
    log(f"redo: {len(failed)} samples that --verify found bad, and all that were quarantined")


def write_index(samples: list[Sample], journal: Journal, folder: Path) -> str:
    """index.jsonl, sorted by id; returns its sha256. Every rename before it is made to last first."""
    journal.sync()
    handle = os.open(folder, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).syncfs(handle):  # one call for 256 folders
        raise OSError(ctypes.get_errno(), "syncfs", str(folder))
    os.close(handle)
    rows = [json.dumps(journal.rows[sample.id], sort_keys=True) + "\n" for sample in sorted(samples, key=lambda sample: sample.id)]
    write_atomic(folder / "index.jsonl", "".join(rows))
    return sha256_file(folder / "index.jsonl")


def extract(args) -> None:
    responses = read_manifest(args.data_dir, "01_generate")
    parts = sorted(args.data_dir.glob("part-*.jsonl"))
    if not parts:
        raise UserError(f"{args.data_dir}: no part-*.jsonl. Run 01_generate.py first.")
    files = responses.get("files", {})
    for name in sorted(files.keys() | {part.name for part in parts}) if files else ():
        if not (args.data_dir / name).is_file() or sha256_file(args.data_dir / name) != files.get(name):
            raise UserError(f"{args.data_dir / name}: not the file that 01_generate.py finished with. Run 01_generate.py again.")
    inputs = {"responses": sha256_file(args.data_dir / "manifest.json")}
    folder = args.output_dir.absolute()
    incoming = (args.capture_dir or folder / ".incoming").absolute()
    fixed = {"max_length": args.max_length, "limit": args.limit, "inputs": inputs}
    if args.max_disk_gb:
        fixed["bounded"] = True
    lock = open_stage(folder, fixed, set())  # noqa: F841  held until this returns
    log(f"config {json.dumps(vars(args), default=str)}")
    log(f"inputs {json.dumps(inputs)} | responses {responses.get('counts', {}).get('kept')}")
    if args.verify and args.verifier_path:
        head_tensors(args.verifier_path)  # said now, not when days of extraction are over
    incoming.mkdir(parents=True, exist_ok=True)
    if args.max_disk_gb:
        if os.stat(incoming).st_dev != os.stat(folder).st_dev:
            raise UserError(f"--capture-dir {incoming}: --max-disk-gb needs it on the file system of {folder}, so that no sample lies there twice.")
        write_atomic(folder / "bound.json", json.dumps({"max_disk_gb": args.max_disk_gb}) + "\n")  # 04 plans its releases by it
    journal = Journal(folder)
    if args.redo_failed:
        redo_failed(journal, folder)
    complete = (folder / "manifest.json").exists()
    if complete and not args.verify:
        log("complete already")
        log(f"done: {folder}")
        return
    report = read_report(folder)
    if not args.verify and (report.get("failed") or "failed_as_a_whole" in report):
        raise UserError(f"{folder / 'verify.json'}: the last --verify failed. Extract what it names with --redo-failed, or --verify once more.")
    samples, dropped = read_samples(parts, args.max_length, args.limit)
    if not samples:
        raise UserError(f"{args.data_dir}: no sample to extract (dropped: {dict(dropped)}).")
    if complete:  # nothing is extracted on the way: what is damaged is reported
        verify_complete(args, samples, parts, folder)
        log(f"done: {folder}")
        return
    write_plan(folder, samples)
    clean_incoming(incoming, folder)
    run = extract_all(args, samples, parts, journal, folder, incoming)
    clean_incoming(incoming, folder)
    samples = [sample for sample in samples if sample.id not in run.quarantine]
    if not samples:
        raise UserError(f"{run.quarantine_path}: every sample failed. Mend the cause, then run this with --redo-failed.")
    index = write_index(samples, journal, folder)
    if args.verify:
        verify(args, samples, journal.rows, journal.facts, parts, folder)
    dropped.update(run.quarantine.values())
    facts = journal.facts
    manifest = {"schema": SCHEMA, "stage": STAGE, "config": {key: fixed[key] for key in ("max_length", "limit")}, "inputs": inputs,
                "counts": {"kept": len(samples), "dropped": dict(sorted(dropped.items())),
                           "truncated": sum(sample.truncated for sample in samples), "tokens": sum(sample.tokens for sample in samples)},
                "versions": {"sglang": facts["sglang_version"], "patch": facts["patch_hash"]},
                **facts, "index_sha256": index}
    if args.max_disk_gb:
        manifest["bounded"] = True  # index.jsonl names what was extracted; most of it has been released
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    log(f"kept {manifest['counts']['kept']:,} | dropped {dict(dropped)} | truncated {manifest['counts']['truncated']:,} | "
        f"tokens {manifest['counts']['tokens']:,}")
    log(f"done: {folder}")


def main(argv: list[str]) -> None:
    args = parse_args(build_parser(), "extract", argv)
    for flag in ("data_dir", "output_dir", "base_url"):
        if not getattr(args, flag):
            raise UserError(f"--{flag.replace('_', '-')} is needed. See --help.")
    if args.concurrency < 1 or min(args.max_length, args.limit, args.verify_positions) < 0:
        raise UserError("--concurrency must be at least 1, --max-length, --limit and --verify-positions at least 0.")
    if not (args.request_timeout > 0 and args.log_interval > 0 and args.server_wait >= 0 and args.max_failed >= 0):
        raise UserError("--request-timeout and --log-interval must be above 0, --server-wait and --max-failed at least 0.")
    if args.max_disk_gb is not None and (not 0 < args.max_disk_gb < math.inf or args.verify):
        raise UserError("--max-disk-gb must be above 0, and --verify is not for it: 04_train.py --follow checks each sample before it trains on it.")
    try:
        extract(args)
    except OSError as error:
        if error.errno in FULL:
            raise UserError(f"{args.output_dir}: the disk is full. Make room and run the same command again.") from None
        if isinstance(error, PermissionError):
            raise UserError(f"{error.filename}: {error.strerror}. Give this user the right to it, or run 03 as the server's user.") from None
        raise


if __name__ == "__main__":
    run(main)
