"""Measure a drafter in SGLang against plain decoding: is it worth serving, with which flags, and if it does not hit, why.

    python3 -u 05_benchmark.py --config configs/quickstart.yaml       # starts the run file's two servers, one after the other
    python3 -u 05_benchmark.py --base-url http://127.0.0.1:30001 --baseline-url http://127.0.0.1:30000 --draft-path output/best \\
      --prompts responses --ids output/val_ids.json --concurrency 1 8 64 --max-tokens 1024 --output-dir report

Reads   prompts (JSONL, a folder of it, a responses/ folder, data sets by name), the drafter's folder, and what SGLang's /generate answers
Writes  <output-dir>/raw.jsonl (one row a request: ids, times, counts), report.json, report.md, *.png, manifest.json
Time    each prompt once per variant, level and repeat: 100 prompts of 512 tokens at 90 tok/s take 10 minutes at one stream
Resume  the same command goes on with the first unit that is not finished

Words. variant: plain, speculative, or one point of --sweep. level: requests in flight at a time. unit: all prompts once, of one variant
at one level. accept_length: 1 + correct drafts / verify steps, summed over requests first, as SGLang counts. A request's last step also
counts drafts that were right *beyond* the stop token or --max-tokens; accept_length_in_answer leaves those out: training can predict it.
"""
import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path
from typing import IO, Iterator

import aiohttp
import numpy as np
import pynvml
import yaml

STAGE = "05_benchmark"
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

# ---- The block below is the same in scripts/serve.py and 05_benchmark.py; tests/test_scripts.py compares the copies ----
def server_command(servers: dict, role: str) -> tuple[list[str], dict[str, str]]:
    """argv and added environment of `role` in a run file's `servers`; `extends` is merged key by key. Raises UserError."""
    chain, name = [], role
    while name is not None:
        if name not in servers:
            raise UserError(f"servers.{name}: no such role in the run file; there are {sorted(servers)}.")
        if name in [seen for seen, _ in chain]:
            raise UserError(f"servers.{role}: `extends` goes in a circle.")
        if not isinstance(servers[name], dict):
            raise UserError(f"servers.{name}: no keys in it; known: extends, command, flags, env.")
        chain.append((name, servers[name]))
        unknown = sorted(set(servers[name]) - {"extends", "command", "flags", "env"})
        if unknown:
            raise UserError(f"servers.{name}: unknown key {unknown}; known: extends, command, flags, env.")
        name = servers[name].get("extends")
    command, flags, env = ["{python}", "-m", "sglang.launch_server"], {}, {}
    for _, spec in reversed(chain):
        command = spec.get("command", command)
        flags.update(spec.get("flags") or {})
        env.update(spec.get("env") or {})
    argv = [sys.executable if word == "{python}" else word for word in command]
    for flag, value in flags.items():
        if value is True:
            argv.append(f"--{flag}")
        elif value is not None and value is not False:
            argv += [f"--{flag}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return argv, {key: str(value) for key, value in env.items()}


def flag_value(argv: list[str], flag: str, default: str) -> str:
    return argv[argv.index(flag) + 1] if flag in argv else default


def healthy(url: str, timeout: float = 2.0) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=timeout).status == 200
    except (OSError, urllib.error.URLError):
        return False


def start_server(servers: dict, role: str, log_path: Path, wait_s: float) -> tuple[subprocess.Popen, str]:
    """Start `role` in a process group of its own, wait until it is healthy, return (process, base URL). Raises UserError.

    The kernel kills the server when this process dies, even by kill -9 (PR_SET_PDEATHSIG); SGLang's own children do the same.
    """
    argv, env = server_command(servers, role)
    host, port = flag_value(argv, "--host", "127.0.0.1"), int(flag_value(argv, "--port", "30000"))
    model = flag_value(argv, "--model-path", "")
    if os.sep in model and not (Path(model) / "config.json").is_file():
        raise UserError(f"servers.{role}: {model} holds no config.json. Set --model-path to the target's folder.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            raise UserError(f"servers.{role}: port {port} is taken. Stop what listens there or set another port in the run file.") from None
    log(f"starting {role}: {' '.join(f'{key}={shlex.quote(value)}' for key, value in env.items())} {shlex.join(argv)}")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None)  # loaded before the fork: the child must not import anything
    with open(log_path, "ab") as out:
        process = subprocess.Popen(argv, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                   start_new_session=True, preexec_fn=lambda: libc.prctl(1, signal.SIGKILL))
    url, began = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}", time.monotonic()
    try:
        while not healthy(url):
            if process.poll() is not None:
                raise UserError(f"servers.{role}: the server ended with code {process.returncode} before it was ready. Read {log_path}.")
            if time.monotonic() - began > wait_s:
                raise UserError(f"servers.{role}: not healthy after {wait_s:.0f} s. Read {log_path}, or allow more time.")
            time.sleep(0.5)
    except BaseException:
        stop_server(process)
        raise
    log(f"{role} ready at {url} after {time.monotonic() - began:.0f} s")
    return process, url


def stop_server(process: subprocess.Popen) -> None:
    """End the server's whole process group: SIGTERM, 10 s, SIGKILL; SIGKILL also when only its children are left."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=10)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            pass
# ---- end of the server block ----

# SGLang 0.5.12 to 0.5.23, then 0.5.10: correct drafts of a request, and how many of its verify steps had 0, 1, ... of them
SPEC_FIELDS = (("spec_num_correct_drafts", "spec_correct_drafts_histogram"), ("spec_accept_token_num", "spec_accept_histogram"))
# name -> (dataset on the hub, configuration, split, column with the question or the list of turns)
DATASETS = {
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
    "gsm8k": ("openai/gsm8k", "main", "test", "question"),
    "humaneval": ("openai/openai_humaneval", None, "test", "prompt"),
    "math-500": ("HuggingFaceH4/MATH-500", None, "test", "problem"),
}
DEFAULT_SWEEP = ["1,1,2", "2,1,3", "3,1,4", "4,1,5", "5,1,6", "3,2,6", "3,4,8", "5,4,16"]  # num_steps,topk,draft_tokens
SERVER_KEYS = ["version", "model_path", "dtype", "quantization", "kv_cache_dtype", "tp_size", "attention_backend", "context_length",
               "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
               "speculative_num_draft_tokens", "speculative_draft_model_quantization", "incremental_streaming_output"]
BOOTSTRAP = 2000
PROGRESS_S = 5.0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", metavar="URL", help="running server with EAGLE3")
    add("--baseline-url", metavar="URL", help="running server without speculation")
    add("--launch", action="store_true", help="start the roles `plain` and `speculative` of --config one after the other, and stop them")
    add("--draft-path", type=Path, metavar="DIR", help="the drafter that is served (its eagle3.json holds training's prediction)")
    add("--prompts", type=Path, action="append", default=[], metavar="PATH", help="JSONL file, folder of them, or responses/; repeatable")
    add("--dataset", action="append", default=[], metavar="NAME[=FILE]", help=f"{', '.join(DATASETS)}; repeatable")
    add("--ids", type=Path, metavar="FILE", help='only these ids: {"ids": [...]} or one a line (val_ids.json)')
    add("--limit", type=int, metavar="N", help="at most N prompts of each source")
    add("--tokenizer", metavar="DIR", help="renders messages; default: the served model's")
    add("--thinking", nargs="+", choices=["on", "off"], default=["on"], help="mode of rendered prompts; both: each prompt twice")
    add("--concurrency", nargs="+", type=int, default=[1, 8, 64], metavar="N")
    add("--max-tokens", type=int, default=512, metavar="N")
    add("--fixed-length", action="store_true", help="ignore stop tokens: every answer has --max-tokens")
    add("--temperature", type=float, default=0.0, metavar="F")
    add("--top-p", type=float, default=1.0, metavar="F")
    add("--repeats", type=int, default=1, metavar="N", help="measure all N times, the order of the variants turned round each time")
    add("--warmup", type=int, default=4, metavar="N", help="unrecorded requests before each level")
    add("--output-dir", type=Path, default=Path("report"), metavar="DIR")
    add("--sweep", action="store_true", help="with --launch: try --sweep-grid and name the best flags of each level")
    add("--sweep-grid", nargs="+", default=DEFAULT_SWEEP, metavar="STEPS,TOPK,DRAFTS")
    add("--doctor", action="store_true", help="compare the served acceptance with training's prediction and look for the cause of a gap")
    add("--run-dir", type=Path, metavar="DIR", help="for --doctor: holds responses/, vocab_mapping/, hidden_states/")
    add("--usd-per-hour", type=float, metavar="F", help="price of the machine, for the cost of a million tokens")
    add("--api-key-env", metavar="VAR", help="environment variable with the servers' API key")
    add("--launch-timeout", type=float, default=3600, metavar="S")
    add("--request-timeout", type=float, default=3600, metavar="S")
    return parser


MAY_CHANGE = {"base-url", "baseline-url", "api-key-env", "launch-timeout", "request-timeout", "usd-per-hour", "run-dir", "config"}


# ---- prompts ----
def jsonl_rows(path: Path) -> Iterator[dict]:
    """The objects of a JSONL file, one at a time: a responses/ folder may be larger than the memory. Raises UserError."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):  # not str.splitlines(): a text in it may hold U+2028 as it is
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("no object")
                    yield row
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSONL (line {number}: {error}).") from None


def read_ids(path: Path) -> set[str]:
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"--ids: {path} is not readable ({error.strerror}).") from None
    try:
        return set(json.loads(text)["ids"])
    except (ValueError, TypeError, KeyError):
        return {line.strip() for line in text.split("\n") if line.strip()}


def collect_rows(args: argparse.Namespace) -> Iterator[dict]:
    """Rows {"id", "source", and "prompt_ids" | "messages" | "prompt"} from --prompts and --dataset, before --ids and --limit."""
    for path in args.prompts or ([] if args.dataset else [Path(__file__).resolve().parent / "configs" / "bench_prompts"]):
        responses = sorted(path.glob("part-*.jsonl"))
        files = responses or sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path}: no *.jsonl in it. Name prompts with --prompts or --dataset.")
        for file in files:
            for row in jsonl_rows(file):
                source = str(row.get("source") or "responses") if responses else file.stem
                yield {"source": source, **{key: row[key] for key in ("id", "prompt_ids", "messages", "prompt") if key in row}}
    for spec in args.dataset:
        name, _, local = spec.partition("=")
        if name not in DATASETS:
            raise UserError(f"--dataset {name}: unknown; known: {', '.join(DATASETS)}.")
        hub, configuration, split, column = DATASETS[name]
        from datasets import load_dataset  # here: it takes seconds to import
        try:
            data = load_dataset("json", data_files=local, split="train") if local else load_dataset(hub, configuration, split=split)
            questions = data[column]
        except Exception as error:  # the library raises its own, the hub's and the file system's errors
            raise UserError(f"--dataset {spec}: {' '.join(str(error).split())[:300]}. Offline, name a JSONL file: {name}=FILE.") from None
        for number, question in enumerate(questions):
            # of MT-Bench the first turn: the second one would hang on the answer to the first
            yield {"id": f"{name}-{number}", "source": name, "prompt": question[0] if isinstance(question, list) else question}


def load_prompts(args: argparse.Namespace, tokenizer_path: str) -> list[dict]:
    """[{"id", "source", "thinking", "prompt_ids"}]; the tokenizer is loaded only when something has to be rendered. Raises UserError."""
    wanted = read_ids(args.ids) if args.ids else None
    kept, read, per_source, tokenizer, prompts = [], 0, Counter(), None, []
    for read, row in enumerate(collect_rows(args), 1):
        if not isinstance(row.get("id"), str) or not row.keys() & {"prompt_ids", "messages", "prompt"}:
            raise UserError(f"prompts of {row['source']}: a row needs a text `id` and `messages`, `prompt` or `prompt_ids`.")
        if wanted is None or row["id"] in wanted:
            per_source[row["source"]] += 1
            if args.limit is None or per_source[row["source"]] <= args.limit:
                kept.append(row)
    if not kept:
        raise UserError(f"--ids {args.ids}: none of its {len(wanted)} ids is among the {read} prompts." if wanted else
                        "no prompts. Name some with --prompts or --dataset.")
    if any("prompt_ids" not in row for row in kept):
        from transformers import AutoTokenizer  # here: it takes seconds to import
        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=True)
        except Exception as error:  # a remote-code tokenizer can raise anything
            raise UserError(f"--tokenizer {tokenizer_path}: {' '.join(str(error).split())[:300]}") from None
    for row in kept:
        about = {"id": row["id"], "source": row["source"]}
        if "prompt_ids" in row:
            prompts.append({**about, "thinking": "recorded", "prompt_ids": row["prompt_ids"]})
            continue
        for mode in args.thinking:
            suffix = f"@{mode}" if len(args.thinking) > 1 else ""
            try:
                ids = render(tokenizer, row, mode)
            except Exception as error:  # templates raise what they like
                raise UserError(f"prompts of {row['source']}: the chat template refuses {row['id']!r} "
                                f"({' '.join(str(error).split())[:300]}).") from None
            prompts.append({**about, "id": row["id"] + suffix, "thinking": mode, "prompt_ids": ids})
    name, times = Counter(prompt["id"] for prompt in prompts).most_common(1)[0]
    if times > 1:
        raise UserError(f"prompts: the id {name!r} stands more than once. Ids must differ over all --prompts and --dataset.")
    return prompts


def render(tokenizer, row: dict, mode: str) -> list[int]:
    """Token ids of the prompt in the target's own turn format. Kimi's template reads `thinking`, other models' `enable_thinking`."""
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, thinking=mode == "on",
                                        enable_thinking=mode == "on")
    return list(map(int, ids))


# ---- talking to SGLang ----
def headers_of(args: argparse.Namespace) -> dict[str, str]:
    key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
    if args.api_key_env and not key:
        raise UserError(f"--api-key-env: the environment variable {args.api_key_env} is not set.")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def call(url: str, headers: dict, body: dict | None = None, timeout: float = 60) -> dict | list | str:
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        text = response.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text


def flush_cache(url: str, headers: dict) -> None:
    """Empty the radix cache: else a level finds prompts of its warm-up and of the level before in it, and its TTFT is too good."""
    try:
        call(f"{url}/flush_cache?timeout=30", headers, {})  # the last step of the warm-up may still run
    except (OSError, http.client.HTTPException) as error:
        log(f"note: {url}/flush_cache: {error}; prompts may be cached from before")


def drafter_hashes(folder: Path) -> dict[str, str]:
    """What a drafter's figures hang on; one trained further differs in nothing but the bytes of its weights."""
    return {name: sha256_file(folder / name) for name in ("config.json", "model.safetensors") if (folder / name).is_file()}


def contact(url: str, variant: str, headers: dict, draft_path: Path | None, provenance: dict) -> dict:
    """SERVER_KEYS of a server that fits `variant`. Raises UserError: not there, with or without EAGLE3, other model, other drafter."""
    for route in ("/server_info", "/get_server_info"):  # the second: before 0.5.10
        try:
            info = call(url + route, headers)
            if isinstance(info, dict) and "model_path" in info:
                break
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise UserError(f"{url}: refuses the API key ({error.code}). Name its variable with --api-key-env.") from None
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{url}: no SGLang answers there ({getattr(error, 'reason', error)}). Start it, or use --launch.") from None
    else:
        raise UserError(f"{url}: answers, but not as SGLang does (no /server_info).")
    target, served = provenance.get("target"), Path(info["model_path"]).name
    if target and target != served:
        raise UserError(f"{url}: serves {served}, but the drafter in {draft_path} was trained for {target}.")
    algorithm = info.get("speculative_algorithm")
    if variant == "plain" and algorithm:
        raise UserError(f"{url}: runs with --speculative-algorithm {algorithm}, so it is no baseline. Start it without.")
    if variant != "plain" and algorithm != "EAGLE3":
        raise UserError(f"{url}: runs without EAGLE3 (speculative_algorithm: {algorithm}). Start it with --speculative-algorithm EAGLE3.")
    there = Path(info.get("speculative_draft_model_path") or "")
    elsewhere = variant != "plain" and draft_path and (there / "config.json").is_file() and there.resolve() != draft_path.resolve()
    if elsewhere and drafter_hashes(there) != drafter_hashes(draft_path):
        raise UserError(f"{url}: serves the drafter {there}, which is not --draft-path {draft_path}.")
    return {key: info.get(key) for key in SERVER_KEYS}


class ServerGone(Exception):
    """A server went away in the middle: one line, and exit code 1."""


class Dropped(Exception):
    """A request that did not end in an answer: kind (counted in the report) and a sentence."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def spec_counts(meta: dict) -> dict | None:
    """Verify steps, correct drafts and their histogram from a final meta_info, by the names of 0.5.10 to 0.5.23; None if it has none."""
    for correct, histogram in SPEC_FIELDS:
        if meta.get("spec_verify_ct") is not None and correct in meta:
            return {"verify_steps": meta["spec_verify_ct"], "correct_drafts": meta[correct], "histogram": meta.get(histogram)}
    return None


async def stream_answer(session: aiohttp.ClientSession, url: str, body: bytes, incremental: bool) -> dict:
    """One streamed /generate: ids, token count at each arrival, counts. Raises Dropped, OSError, aiohttp.ClientError.

    Without --incremental-streaming-output every event repeats the whole answer so far, so only the last one is parsed; of the others
    the completion_tokens of meta_info are read from their end (the text before it cannot: quotes in it are escaped).
    """
    times, counts, ids, buffer, last, began = [], [], [], b"", b"", time.perf_counter()
    async with session.post(url, data=body) as response:
        if response.status != 200:
            raise Dropped(f"http {response.status}", (await response.content.read(300)).decode(errors="replace"))
        async for chunk in response.content.iter_any():
            now = time.perf_counter() - began
            *events, buffer = (buffer + chunk).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: ") or event == b"data: [DONE]":
                    continue
                at = event.rfind(b'"completion_tokens":')
                if at < 0:
                    raise Dropped("error event", event[6:300].decode(errors="replace"))
                times.append(now)
                counts.append(int(re.match(rb"\s*(\d+)", event[at + 20:at + 40])[1]))
                last = event
                if incremental:
                    ids += json.loads(event[6:])["output_ids"]
    answer = json.loads(last[6:]) if last else {"meta_info": {}}
    meta, finish = answer["meta_info"], answer["meta_info"].get("finish_reason")
    if not finish:
        raise Dropped("cut", f"the stream ended after {counts[-1] if counts else 0} tokens without a finish_reason")
    if finish["type"] == "abort":
        raise Dropped("aborted", str(finish.get("message")))
    return {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": meta["completion_tokens"], "finish": finish["type"],
            "cached_tokens": meta.get("cached_tokens"), "latency_s": times[-1], "times_s": [round(at, 5) for at in times], "counts": counts,
            "spec": spec_counts(meta), "output_ids": ids if incremental else answer["output_ids"]}


async def run_unit(url: str, prompts: list[dict], streams: int, sampling: dict, headers: dict, incremental: bool, timeout: float,
                   server: "Endpoints", label: str) -> tuple[list[dict], float]:
    """All prompts, `streams` in flight at a time -> (records in prompt order, wall seconds). Raises ServerGone.

    One thread for all streams: with a thread a stream the same server gave 5,183 tok/s instead of 6,195 at 64 streams (H200).
    """
    records, todo, gone = {}, iter(range(len(prompts))), False
    bodies = [json.dumps({"input_ids": prompt["prompt_ids"], "sampling_params": sampling, "stream": True}).encode() for prompt in prompts]

    async def worker():
        nonlocal gone
        for number in todo:  # shared: each stream takes the next prompt
            if gone:
                break
            try:
                records[number] = await stream_answer(session, url.rstrip("/") + "/generate", bodies[number], incremental)
            except Exception as error:  # one bad answer is a failed request, not the end of the measurement
                name = error.kind if isinstance(error, Dropped) else "timeout" if isinstance(error, TimeoutError) else \
                    "connection" if isinstance(error, (OSError, aiohttp.ClientError)) else type(error).__name__
                records[number] = {"error": name, "message": str(error)[:300]}
                gone = gone or name in ("connection", "timeout") and not await asyncio.to_thread(server.alive)

    async def progress():
        while True:
            await asyncio.sleep(PROGRESS_S)
            log_progress(label, list(records.values()), len(prompts), time.perf_counter() - began)

    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20,
                                     timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)) as session:
        began = time.perf_counter()
        reporter = asyncio.create_task(progress())
        await asyncio.gather(*(worker() for _ in range(min(streams, len(prompts)))))
        wall = time.perf_counter() - began
        reporter.cancel()
    if gone:
        raise ServerGone(f"{server}: the server went away during {label}. Start it again; the same command goes on with this level.")
    return [{"id": prompt["id"], **records[number]} for number, prompt in enumerate(prompts)], wall


def log_progress(label: str, done: list[dict], total: int, spent: float) -> None:
    answers = [record for record in done if "error" not in record]
    accept = acceptance(answers)
    log(f"{label} {len(done)}/{total} | {sum(record['completion_tokens'] for record in answers) / spent:,.1f} tok/s"
        + (f" | accept_length {accept['accept_length']:.2f}" if accept else "") + f" | failed {len(done) - len(answers)}"
        + (f" | eta {spent / len(done) * (total - len(done)):.0f}s" if done else ""))


@functools.cache
def gpus() -> list:
    """NVML handles of this machine's GPUs; none without a driver. Its first call can hold the GPU up for seconds: not while one measures."""
    try:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def energy(handles: list) -> float | None:
    """Joules that these GPUs have taken since the driver was loaded; None where one does not count them (before Volta)."""
    try:
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000 if handles else None
    except pynvml.NVMLError:
        return None


class Power:
    """Mean power of this machine's GPUs over a `with` block, in watts; None where the server at `url` runs on another machine, or the
    driver counts no energy.

    Counters are read before and after: with `nvidia-smi` polled meanwhile a server gave 0.8 of its throughput (64 streams, H200).
    """

    def __init__(self, url: str):
        self.watts, self.gpus = None, []
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((urllib.parse.urlsplit(url).hostname, 0))  # only an address of this machine can be bound
            self.gpus = gpus()

    def __enter__(self):
        self.began, self.energy = time.perf_counter(), energy(self.gpus)
        return self

    def __exit__(self, *_):
        after = energy(self.gpus)
        if None not in (self.energy, after):
            self.watts = (after - self.energy) / (time.perf_counter() - self.began)


# ---- figures (pure: rows of raw.jsonl in, numbers out) ----
def beyond_answer(record: dict) -> int:
    """Correct drafts of one answer that lay behind its end.

    SGLang counts the last verify step before it looks for the end, so `1 + correct + verify - completion` tokens fell off; all but
    the bonus token were counted as correct drafts. (0.5.10's first worker cuts before it counts: 0.)
    """
    return max(0, record["spec"]["correct_drafts"] + record["spec"]["verify_steps"] - record["completion_tokens"])


def acceptance(records: list[dict], steps: int = 0) -> dict | None:
    """Counts summed over requests, then divided; None when no request carries them. `accept_by_position[j]`: share of verify steps
    in which drafts 0..j were all right; of `steps` drafts."""
    counted = [record for record in records if record.get("spec")]
    verify = sum(record["spec"]["verify_steps"] for record in counted)
    if not verify:
        return None
    correct = sum(record["spec"]["correct_drafts"] for record in counted)
    beyond = sum(map(beyond_answer, counted))
    histograms = [record["spec"]["histogram"] for record in counted if record["spec"]["histogram"]]
    # SGLang's list ends at the most correct drafts it saw; `steps` drafts were tried
    total = [sum(h[k] for h in histograms if k < len(h)) for k in range(max(steps + 1, *map(len, histograms)))] if histograms else []
    return {"requests": len(counted), "verify_steps": verify, "correct_drafts": correct, "beyond_answer": beyond,
            "accept_length": 1 + correct / verify, "accept_length_in_answer": 1 + (correct - beyond) / verify,
            "histogram": total or None, "accept_by_position": [sum(total[k:]) / verify for k in range(1, len(total))] if total else None}


def resampled(values: np.ndarray, statistic) -> list[float] | None:
    """95 % bootstrap interval of statistic(column sums) over the rows of `values` (N prompts, K); None for fewer than 5 prompts."""
    if len(values) < 5:
        return None
    draw = np.random.default_rng(0)
    sums = np.stack([np.bincount(draw.integers(0, len(values), len(values)), minlength=len(values)) @ values for _ in range(BOOTSTRAP)])
    with np.errstate(divide="ignore", invalid="ignore"):
        return [float(value) for value in np.nanpercentile(statistic(sums.T), [2.5, 97.5])]


def percentiles(values: list[float]) -> dict | None:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)} if values else None


def gaps_of(record: dict) -> list[float]:
    """Seconds per token after the first: an arrival that brings n tokens gives n equal gaps, as SGLang's own benchmark counts."""
    gaps, times, counts = [], record["times_s"], record["counts"]
    for index in range(1, len(times)):
        new = counts[index] - counts[index - 1]
        gaps += [(times[index] - times[index - 1]) / new] * new if new else []
    return gaps


def level_figures(units: list[dict], steps: int = 0) -> dict:
    """Figures of one variant at one level over its repeats; `units` as read from raw.jsonl; steps: drafts in a row."""
    records = [record for unit in units for record in unit["requests"]]
    answers = [record for record in records if "error" not in record]
    wall, tokens = sum(unit["wall_s"] for unit in units), sum(record["completion_tokens"] for record in answers)
    watts = [unit["watts"] for unit in units]
    decode = sum(record["latency_s"] - record["times_s"][0] for record in answers)
    accept = acceptance(answers, steps)
    forward = accept["verify_steps"] if accept else sum(record["completion_tokens"] - 1 for record in answers)
    return {
        "requests": len(records), "failed": count(r["error"] for r in records if "error" in r), "finish": count(r["finish"] for r in answers),
        "output_tokens": tokens, "wall_s": wall, "tok_s": tokens / wall if tokens else None,
        "tok_s_repeats": [sum(r.get("completion_tokens", 0) for r in unit["requests"]) / unit["wall_s"] for unit in units],
        "ttft_s": percentiles([record["times_s"][0] for record in answers]),
        "itl_s": percentiles([gap for record in answers for gap in gaps_of(record)]),
        "latency_s": percentiles([record["latency_s"] for record in answers]),
        "decode_step_s": decode / forward if forward else None, "accept": accept,
        "watts": float(np.mean(watts)) if all(w is not None for w in watts) else None,
        "joule_per_token": sum(w * unit["wall_s"] for w, unit in zip(watts, units)) / tokens if tokens and all(watts) else None}


def count(names) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def paired(one: list[dict], other: list[dict]) -> list[tuple[dict, dict]]:
    """Answers to the same prompt in the same repeat, of two variants at one level."""
    answers = {(unit["repeat"], r["id"]): r for unit in other for r in unit["requests"] if "error" not in r}
    return [(r, answers[unit["repeat"], r["id"]]) for unit in one for r in unit["requests"]
            if "error" not in r and (unit["repeat"], r["id"]) in answers]


def speed_up(plain: list[dict], variant: list[dict]) -> dict:
    """Ratio of tok/s, with the interval over prompts. In a resample the sum of latencies stands for the wall time."""
    figures = [level_figures(units) for units in (plain, variant)]
    ratio = figures[1]["tok_s"] / figures[0]["tok_s"] if all(f["tok_s"] for f in figures) else None
    sums = {}
    for a, b in paired(plain, variant):
        sums.setdefault(a["id"], np.zeros(4))
        sums[a["id"]] += [a["completion_tokens"], a["latency_s"], b["completion_tokens"], b["latency_s"]]
    if not ratio or not sums:
        return {"speed_up": ratio, "interval": None}

    def statistic(s):
        return (s[2] / s[3]) / (s[0] / s[1])

    values = np.stack(list(sums.values()))
    interval = resampled(values, statistic)
    scale = ratio / statistic(values.sum(0))
    return {"speed_up": ratio, "interval": [bound * scale for bound in interval] if interval else None}


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token in which two answers differ; the shorter one's length if the other begins with it; None if equal."""
    if a == b:
        return None
    return next((index for index, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))


def same_text(plain: list[dict], variant: list[dict]) -> dict:
    """Share of answers with the same token ids, and where the others part."""
    pairs, differences = paired(plain, variant), []
    for a, b in pairs:
        at = first_difference(a["output_ids"], b["output_ids"])
        if at is not None:
            tokens = [x["output_ids"][at] if at < len(x["output_ids"]) else None for x in (a, b)]
            differences.append({"id": a["id"], "position": at, "tokens": tokens})
    return {"compared": len(pairs), "equal": len(pairs) - len(differences), "share": 1 - len(differences) / len(pairs) if pairs else None,
            "differences": differences}


CONTEXT_BUCKETS = {f"<= {2 ** power}": 2 ** power for power in range(7, 19)} | {f"> {2 ** 18}": float("inf")}


def context_bucket(record: dict) -> str:
    length = record["prompt_tokens"] + record["completion_tokens"]
    return next(name for name, edge in CONTEXT_BUCKETS.items() if length <= edge)


def grouped(records: list[dict], key, steps: int) -> dict[str, dict]:
    """{group: acceptance}; groups without counts are left out."""
    groups = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    found = {name: acceptance(members, steps) for name, members in groups.items()}
    return {name: accept for name, accept in found.items() if accept}


def prediction_check(prediction: dict | None, records: list[dict], server: dict, temperature: float) -> dict | None:
    """Training's predicted accept_length beside the served one, on the validation samples among `records` (one level's), else on all.

    None where the two are different things: the prediction is for greedy answers and one chain of so many drafts.
    """
    predicted, known = (prediction or {}).get("accept_length"), (prediction or {}).get("samples") or {}
    counted = [record for record in records if record.get("spec")]
    same = [record for record in counted if record["id"] in known]
    served = acceptance(same or counted)
    chain = (prediction or {}).get("num_steps"), 1
    if not predicted or not served or temperature or chain != (server.get("speculative_num_steps"), server.get("speculative_eagle_topk")):
        return None
    # served and predicted counts of one sample stay together in a resample: what the samples differ by is no gap
    sums, equal, as_long = {}, 0, 0
    for r in same or counted:
        verify, correct = known[r["id"]] if same else (0, 0)
        here = r["spec"]["verify_steps"], r["spec"]["correct_drafts"] - beyond_answer(r)
        equal += here == (verify, correct)
        as_long += r["completion_tokens"] - verify - correct in (0, 1)  # the last step may emit one token less than it counts
        sums[r["id"]] = sums.get(r["id"], 0) + np.array([*here, verify, correct], float)
    values = np.stack(list(sums.values()))
    if same:
        predicted = 1 + values[:, 3].sum() / max(1, values[:, 2].sum())
    value = served["accept_length_in_answer"]
    return {"predicted": predicted, "served": value, "ratio": value / predicted,
            "answers": len(same or counted), "of_validation": bool(same),
            "interval": resampled(values, lambda s: (1 + s[1] / s[0]) / (1 + s[3] / s[2] if same else predicted)),  # of the ratio
            "equal_answers": equal, "as_long_answers": as_long,
            "predicted_by_position": prediction.get("accept_by_position"), "served_by_position": served["accept_by_position"]}


def build_report(units: list[dict], prompts: list[dict], provenance: dict, config: dict, servers: dict, probes: dict,
                 usd_per_hour: float | None) -> dict:
    """Everything that is said about the run, from raw.jsonl's rows. `units`: finished ones; nothing is measured here."""
    about = {prompt["id"]: prompt for prompt in prompts}
    variants, levels = list(dict.fromkeys(unit["variant"] for unit in units)), sorted({unit["level"] for unit in units})
    of = {(v, c): [u for u in units if u["variant"] == v and u["level"] == c] for v in variants for c in levels}
    steps = {v: servers.get(v, {}).get("speculative_num_steps") or 0 for v in variants}
    report = {"levels": {}, "variants": {}, "servers": servers, "config": config, "prompts": {
        "count": len(prompts), "sources": count(prompt["source"] for prompt in prompts), "thinking": count(p["thinking"] for p in prompts)}}
    for level in levels:
        row = report["levels"][str(level)] = {}
        for variant in variants:
            if not of[variant, level]:
                continue
            row[variant] = figures = level_figures(of[variant, level], steps[variant])
            if usd_per_hour and figures["tok_s"]:
                figures["usd_per_million_tokens"] = usd_per_hour / 3600 / figures["tok_s"] * 1e6
            if variant != "plain" and of.get(("plain", level)):
                figures |= speed_up(of["plain", level], of[variant, level])
                base = row["plain"]["decode_step_s"]
                # what one verify step costs in plain steps; the emitted tokens a step above which speculation pays
                figures["break_even"] = figures["decode_step_s"] / base if base and figures["decode_step_s"] else None
                if config["temperature"] == 0:
                    figures["same_text"] = text = same_text(of["plain", level], of[variant, level])
                    for difference in text["differences"]:
                        difference |= probes.get(f"{difference['id']}:{difference['position']}:{difference['tokens']}", {})
        if config["temperature"] == 0 and len(of.get(("plain", level), [])) > 1:
            first, *others = of["plain", level]
            pairs = [pair for other in others for pair in paired([first], [{**other, "repeat": first["repeat"]}])]
            row["plain"]["same_text_as_itself"] = sum(a["output_ids"] == b["output_ids"] for a, b in pairs) / len(pairs) if pairs else None
    for variant in variants:
        if variant == "plain":
            continue
        records = [r for u in units if u["variant"] == variant for r in u["requests"] if "error" not in r]
        report["variants"][variant] = {
            "accept": acceptance(records, steps[variant]),
            "by_source": grouped(records, lambda r: about[r["id"]]["source"], steps[variant]),
            "by_thinking": grouped(records, lambda r: about[r["id"]]["thinking"], steps[variant]),
            "by_context": dict(sorted(grouped(records, context_bucket, steps[variant]).items(), key=lambda item: CONTEXT_BUCKETS[item[0]])),
            "prediction": prediction_check(provenance.get("prediction"), [r for unit in of[variant, levels[0]] for r in unit["requests"]],
                                           servers.get(variant, {}), config["temperature"])}
    report["verdict"] = verdict(report)
    return report


def verdict(report: dict) -> dict[str, str]:
    """Per level one sentence to act on."""
    said = {}
    for level, row in report["levels"].items():
        rivals = {name: f for name, f in row.items() if name != "plain" and f.get("speed_up")}
        if not rivals:
            said[level] = "no baseline at this level, so no speed-up"
            continue
        name = max(rivals, key=lambda key: rivals[key]["speed_up"])
        figures, interval = rivals[name], rivals[name]["interval"]
        low, high = interval or (figures["speed_up"],) * 2
        word = "serve it" if low > 1 else "do not serve it: slower" if high < 1 else \
            "undecided: the interval holds 1.00, measure more prompts or repeats"
        said[level] = f"{name}: {word} ({figures['speed_up']:.2f}x" + (f", 95 % interval {low:.2f} to {high:.2f})" if interval else ")")
        for variant in ("plain", name):
            failed, requests = sum(row[variant]["failed"].values()), row[variant]["requests"]
            said[level] += f"; {failed} of {requests} requests of {variant} failed: look at them first" if failed else ""
    return said


# ---- the report in words and pictures ----
def markdown_table(rows: list[list[str]]) -> str:
    """First row: the heads. Columns padded, so that it also reads well on a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def number(value, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def shares(accept: dict | None) -> str:
    return " ".join(f"{share:.2f}" for share in accept["accept_by_position"]) if accept and accept["accept_by_position"] else "-"


def figures_table(report: dict) -> str:
    rows = [["streams", "variant", "tok/s", "speed-up", "TTFT p50/p95 ms", "ITL p50/p95/p99 ms", "accept_length", "by draft position",
             "same text", "failed"]]
    for level, row in report["levels"].items():
        for variant, f in row.items():
            text, interval, failed = f.get("same_text") or {"compared": 0}, f.get("interval"), sum(f["failed"].values())
            rows.append([level, variant, number(f["tok_s"], "{:,.1f}"),
                         number(f.get("speed_up"), "{:.2f}x") + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else ""),
                         "/".join(f"{f['ttft_s'][q] * 1000:.0f}" for q in ("p50", "p95")) if f["ttft_s"] else "-",
                         "/".join(f"{f['itl_s'][q] * 1000:.1f}" for q in ("p50", "p95", "p99")) if f["itl_s"] else "-",
                         number(f["accept"] and f["accept"]["accept_length"]), shares(f["accept"]),
                         f"{'yes' if text['share'] == 1 else 'no'} {text['equal']}/{text['compared']}" if text["compared"] else "-",
                         f"{failed} {f['failed']}" if failed else "0"])
    return markdown_table(rows)


def accept_table(head: str, groups: dict[str, dict]) -> str:
    return markdown_table([[head, "requests", "accept_length", "by draft position"]] + [
        [name, str(accept["requests"]), number(accept["accept_length"]), shares(accept)] for name, accept in groups.items()])


def level_remarks(level: str, variant: str, f: dict, version: str | None) -> list[str]:
    """What the table has no room for: the cost of a verify step, energy, price, noise, and where answers part."""
    said = []
    if f.get("break_even") and f["accept"]:
        emitted = (f["output_tokens"] - sum(f["finish"].values())) / f["accept"]["verify_steps"]
        said.append(f"a verify step takes {f['break_even']:.2f} times a plain step and emits {emitted:.2f} tokens.")
    if variant != "plain" and not f["accept"]:
        said.append(f"the answers of SGLang {version} carry no speculative counts, so there is no accept_length.")
    if f["joule_per_token"]:
        said.append(f"{f['watts']:.0f} W over all GPUs of this machine, {f['joule_per_token'] / 3.6:.2f} kWh a million output tokens.")
    if f.get("usd_per_million_tokens"):
        said.append(f"{f['usd_per_million_tokens']:.2f} USD a million output tokens.")
    if f.get("same_text_as_itself") is not None:
        said.append(f"the plain server repeats its own answers in {f['same_text_as_itself']:.1%} of cases: the noise floor of `same text`.")
    differences = sorted((f.get("same_text") or {}).get("differences", []), key=lambda d: d.get("kind") != "fault")
    if differences:
        kinds = count(d.get("kind", "not probed") for d in differences)
        said.append(f"{len(differences)} answers part ({', '.join(f'{kind} {n}' for kind, n in kinds.items())}); of those:")
    for d in differences[:10]:
        gap, (one, other) = f", {d['gap']:.4f} apart in log-probability" if "gap" in d else "", d["tokens"]
        said.append(f"{d['id']} parts at token {d['position']}: plain {one}, {variant} {other}{gap}: {d.get('kind', 'not probed')}.")
    return [f"- {level} stream(s), {variant}: {sentence}" for sentence in said]


def prediction_sentence(check: dict) -> str:
    whose = f"its validation samples ({check['equal_answers']} with exactly the predicted counts)" if check["of_validation"] else \
        "other prompts than its validation samples"
    return (f"Training predicted {check['predicted']:.3f}, served {check['served']:.3f} on {check['answers']} answers to {whose}, "
            f"drafts beyond the end of an answer left out: ratio {check['ratio']:.3f}.")


def report_markdown(report: dict, plots: list[str]) -> str:
    config, prompts, out = report["config"], report["prompts"], ["# Drafter benchmark", ""]
    if report["units_done"] < report["units_planned"]:
        out += [f"**Incomplete: {report['units_done']} of {report['units_planned']} units measured. The same command goes on.**", ""]
    sources = ", ".join(f"{name} {n}" for name, n in prompts["sources"].items())
    out += ["## Verdict", "", *(f"- {level} stream(s): {said}" for level, said in report["verdict"].items()), "", figures_table(report), "",
            f"{prompts['count']} prompts ({sources}; thinking {', '.join(prompts['thinking'])}), "
            f"{'exactly' if config['fixed-length'] else 'at most'} {config['max-tokens']} tokens, temperature {config['temperature']}, "
            f"repeats {config['repeats']}. tok/s: output tokens over wall time. ITL: time per token after the first. Intervals: 95 %, "
            f"{BOOTSTRAP} resamples of the prompts. accept_length: 1 + correct drafts / verify steps over all requests together.", ""]
    for level, row in report["levels"].items():
        for variant, figures in row.items():
            out += level_remarks(level, variant, figures, report["servers"].get(variant, {}).get("version"))
    out += ["", "Share of time in draft and verify: SGLang's HTTP API does not tell it; the cost of a verify step above holds both."]
    for variant, found in report["variants"].items():
        if not found["accept"]:
            continue
        out += ["", f"## Acceptance of {variant}", "", accept_table("source", found["by_source"]), "",
                accept_table("thinking", found["by_thinking"]), "", accept_table("context at the end, tokens", found["by_context"]), ""]
        if found["prediction"]:
            out.append(prediction_sentence(found["prediction"]))
    if report.get("sweep"):
        out += ["", "## Best flags", ""]
        out += [f"- {level} stream(s): {best['variant']} ({best['tok_s']:,.1f} tok/s)\n\n      {best['command']}"
                for level, best in report["sweep"].items()]
        out += [f"- {variant} is left out: {why}" for variant, why in report["left_out"].items()]
    if report.get("doctor"):
        doctor = report["doctor"]
        out += ["", "## Doctor", "", doctor["summary"], ""]
        out += [*(f"- **{f['cause']}**: {f['finding']} {f['remedy']}" for f in doctor["findings"]),
                *(f"- not checked: {name}: {why}" for name, why in doctor["unchecked"].items())]
    return "\n".join(out + [""] + [f"![{Path(plot).stem}]({plot})" for plot in plots]) + "\n"


def draw_plots(report: dict, folder: Path) -> list[str]:
    """speed_up.png, acceptance.png (by draft position), groups.png (by source and context); those that have something to show."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    drawn, levels = [], list(report["levels"])

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(folder / name, dpi=120)
        plt.close(figure)
        drawn.append(name)

    series = {}
    for level in levels:
        for variant, f in report["levels"][level].items():
            if f.get("speed_up"):
                ratio, (low, high) = f["speed_up"], f["interval"] or [f["speed_up"]] * 2
                series.setdefault(variant, []).append((int(level), ratio, max(0, ratio - low), max(0, high - ratio)))
    if series:
        figure, axis = plt.subplots(figsize=(6, 3.6))
        for variant, points in series.items():
            streams, ratios, below, above = zip(*points)
            axis.errorbar(streams, ratios, yerr=[below, above], marker="o", capsize=3, label=variant)
        axis.axhline(1, color="grey", linestyle="--", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks([int(c) for c in levels], levels)
        axis.set(xlabel="streams", ylabel="speed-up over plain", title="tok/s against plain decoding (95 % interval)")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
        save(figure, "speed_up.png")
    shown = {v: found["accept"]["accept_by_position"] for v, found in report["variants"].items() if shares(found["accept"]) != "-"}
    if shown:
        figure, axis = plt.subplots(figsize=(6, 3.6))
        for variant, served in shown.items():
            axis.plot(range(1, len(served) + 1), served, marker="o", label=f"{variant}, served")
            check = report["variants"][variant]["prediction"]
            if check and check["predicted_by_position"]:
                predicted = check["predicted_by_position"]
                axis.plot(range(1, len(predicted) + 1), predicted, marker="x", linestyle=":", label="predicted by training")
        axis.set_xticks(range(1, max(map(len, shown.values())) + 1))
        axis.set(xlabel="draft position", ylabel="share of verify steps", ylim=(0, 1), title="drafts right up to this position")
        axis.legend()
        save(figure, "acceptance.png")
    found = next((found for found in report["variants"].values() if found["accept"]), None)
    if found:
        panels = [("by_source", "source"), ("by_context", "context at the end, tokens")]
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
        for axis, (key, title) in zip(axes, panels):
            names = list(found[key])
            axis.bar(range(len(names)), [found[key][name]["accept_length"] for name in names], width=0.6)
            axis.set_xlim(-0.7, max(3, len(names)) - 0.3)
            axis.set_xticks(range(len(names)), names, rotation=30, ha="right")
            axis.axhline(1, color="grey", linestyle="--", linewidth=1)
            axis.set(title=title, ylabel="accept_length" if axis is axes[0] else "")
        save(figure, "groups.png")
    return drawn


# ---- servers ----
class Endpoints:
    """Where each variant is served: the given URLs, or one server of the run file at a time, started when it is needed."""

    def __init__(self, args: argparse.Namespace, document: dict):
        self.args, self.servers = args, document.get("servers") or {}
        self.process = self.variant = self.url = self.log = None
        self.logs = Path(document["run_dir"]) / "logs" if document.get("run_dir") else args.output_dir

    def role(self, variant: str, flags: dict) -> tuple[dict, str]:
        """The run file's servers with `flags` laid over the role of `variant`, and that role."""
        role = "plain" if variant == "plain" else "speculative"
        if role not in self.servers:
            raise UserError(f"--launch: the run file has no servers.{role}. Add it, or give --base-url and --baseline-url.")
        spec = self.servers[role]
        return {**self.servers, role: {**spec, "flags": {**(spec.get("flags") or {}), **flags}}}, role

    def use(self, variant: str, flags: dict) -> str:
        if not self.args.launch:
            self.url = (self.args.baseline_url if variant == "plain" else self.args.base_url).rstrip("/")
        elif self.variant != variant:
            self.close()
            servers, role = self.role(variant, flags)
            self.log = self.logs / f"server_{variant}.log"
            self.process, self.url = start_server(servers, role, self.log, self.args.launch_timeout)
        self.variant = variant
        return self.url

    def alive(self) -> bool:
        return (self.process is None or self.process.poll() is None) and healthy(self.url, timeout=20)

    def __str__(self) -> str:
        return self.url + (f" (log: {self.log})" if self.log else "")

    def close(self) -> None:
        if self.process:
            stop_server(self.process)
        self.process = self.variant = None


# ---- raw.jsonl ----
def read_raw(path: Path) -> tuple[list[dict], dict, dict]:
    """(units with their `requests`, server infos by variant, probes); cuts off what a kill left behind the last finished unit."""
    units, servers, probes, requests, good, at = [], {}, {}, [], 0, 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if row is None:
            break
        at += len(line)
        kind = row.pop("kind")
        if kind == "request":
            requests.append(row)
            continue
        if kind == "unit":
            units.append({**row, "requests": requests})
            requests = []
        elif kind == "server":
            servers[row["variant"]] = row["info"]
        else:
            probes[row.pop("key")] = row
        good = at
    if path.exists() and good < path.stat().st_size:
        os.truncate(path, good)
    return units, servers, probes


def append_rows(path: Path, rows: list[dict]) -> None:
    with open(path, "ab") as file:
        file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def probe_difference(url: str, headers: dict, prompt: dict, common: list[int], tokens: list[int], near_tie: float) -> dict:
    """How far apart the target itself holds the two tokens at which two answers part: prefill of prompt + common part, one token."""
    if None in tokens:
        return {"kind": "one answer is the beginning of the other"}
    body = {"input_ids": prompt["prompt_ids"] + common, "return_logprob": True, "token_ids_logprob": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
    try:
        answer = call(f"{url}/generate", headers, body, timeout=600)
        told = {row[1]: row[0] for row in answer["meta_info"]["output_token_ids_logprobs"][0]}
    except urllib.error.HTTPError as error:
        return {"kind": f"not probed: http {error.code}"}
    except (KeyError, TypeError, IndexError):
        return {"kind": "not probed: this server gives no log-probabilities"}
    except (OSError, http.client.HTTPException) as error:
        raise ServerGone(f"{url}: the server went away during the probes ({error}). Start it again; the same command goes on.") from None
    gap = abs(told[tokens[0]] - told[tokens[1]])
    return {"gap": gap, "kind": "near-tie" if gap <= near_tie else "fault", "logprobs": [told[token] for token in tokens]}


# ---- the doctor: why a drafter that looked trained does not hit ----
class Unchecked(Exception):
    """A cause that cannot be tested here: what is missing."""


DRAFT_WEIGHTS = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", *(f"midlayer.{name}.weight" for name in (
    "input_layernorm", "hidden_norm", "post_attention_layernorm", *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))))}


def tensor_index(path: Path) -> dict[str, dict]:
    """{name: {"dtype", "shape", "at": (file, first byte, last byte)}} of a safetensors file or of a folder of shards. Raises Unchecked."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise Unchecked(f"{path} holds no safetensors")
    found = {}
    for file in files:
        try:
            with open(file, "rb") as stream:
                size = struct.unpack("<Q", stream.read(8))[0]
                header = json.loads(stream.read(size))
        except (struct.error, ValueError, MemoryError, OverflowError):
            raise Unchecked(f"{file} is no safetensors file") from None
        header.pop("__metadata__", None)
        if 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0) > file.stat().st_size:
            raise Unchecked(f"{file} is cut short")
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            found[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "at": (file, 8 + size + first, 8 + size + last)}
    return found


def read_tensor(entry: dict) -> np.ndarray:
    file, first, last = entry["at"]
    with open(file, "rb") as stream:
        stream.seek(first)
        data = stream.read(last - first)
    if entry["dtype"] == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}[entry["dtype"]]).reshape(entry["shape"])


class Facts:
    """What the checks look at. Anything that is not there raises Unchecked with its name, so that no check passes for want of data."""

    def __init__(self, draft_path: Path, provenance: dict, server: dict | None, run_dir: Path | None, prompts: list[dict]):
        self.config, self.provenance = json.loads((draft_path / "config.json").read_text()), provenance
        try:
            self.weights = tensor_index(draft_path / "model.safetensors")
        except Unchecked as why:
            raise UserError(f"--doctor: {why}. Export or copy it again.") from None
        self.prompts, self._server, self._run_dir = prompts, server, run_dir

    @property
    def server(self) -> dict:
        return self._server or self.lacks("the speculative server has not been reached")

    @property
    def target(self) -> Path:
        path = Path(self.server["model_path"])
        return path if (path / "config.json").is_file() else self.lacks(f"the target's folder {path} is not on this machine")

    @property
    def target_config(self) -> dict:
        config = json.loads((self.target / "config.json").read_text())
        return config.get("text_config", config)

    def trained(self, key: str):
        return self.provenance[key] if key in self.provenance else self.lacks(f"eagle3.json has no `{key}`")

    def folder(self, name: str) -> Path:
        path = self._run_dir / name if self._run_dir else None
        return path if path and path.is_dir() else self.lacks(f"{path or name + '/'} is not there: name its run with --run-dir")

    @staticmethod
    def lacks(why: str):
        raise Unchecked(why)


def served_layers(facts: Facts) -> list[int]:
    """The layers whose input this server hands to the draft, as SGLang reads eagle_config: up to 0.5.12 one is added to each id, later
    only when the first is 1; without ids the defaults."""
    ids = (facts.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        layers = facts.target_config["num_hidden_layers"]
        return [2, layers // 2, layers - 3]
    release = tuple(map(int, re.findall(r"\d+", facts.server["version"])[:3]))
    return sorted(i + 1 for i in ids) if release < (0, 5, 13) or ids[0] == 1 else sorted(ids)  # the model meets them in its own order


def check_capture_layers(facts: Facts):
    if not (facts.config.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        return "eagle_config.use_aux_hidden_state is false, so the draft is fed the final state and skips fc.", "Write true."
    if "eagle_aux_hidden_state_layer_ids" not in (facts.config.get("eagle_config") or {}):
        return None  # check_eagle_config's case
    served, trained = served_layers(facts), facts.trained("capture_layers")
    if served != trained:
        return (f"SGLang {facts.server['version']} feeds it layers {served}, it was trained on {trained}.",
                f"Export for this version (04_train.py --serve-sglang-version {facts.server['version']}).")


def check_eagle_config(facts: Facts):
    key = "eagle_aux_hidden_state_layer_ids"
    if key in (facts.config.get("eagle_config") or {}):
        return None
    where = f"`{key}` stands in config.json where SGLang ignores it" if key in json.dumps(facts.config) else f"config.json has no `{key}`"
    with contextlib.suppress(Unchecked):
        if served_layers(facts) == facts.trained("capture_layers"):
            return None  # the defaults are the trained layers
        where += f", so the default layers {served_layers(facts)} are fed"
    return f"{where}.", "Put it under `eagle_config`."


def check_head_dim(facts: Facts):
    heads, hidden = facts.config["num_attention_heads"], facts.config["hidden_size"]
    rows, given = facts.weights["midlayer.self_attn.q_proj.weight"]["shape"][0], facts.config.get("head_dim")
    if (given or hidden // heads) * heads != rows:
        return (f"config.json {f'says head_dim {given}' if given else f'has no head_dim, so {hidden // heads} is taken'}, "
                f"the weights have {rows // heads} a head.", f"Write head_dim {rows // heads}.")


def check_rope(facts: Facts):
    config = facts.config
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000))
    if kind != "default":
        return f"config.json asks for {kind} RoPE; the draft is trained with plain RoPE.", "Remove rope_scaling."
    trained = facts.trained("config").get("rope_theta", 10000)
    if theta != trained:
        return f"rope_theta is {theta:g}, it was trained with {trained:g}.", f"Write rope_theta {trained:g}."


def check_max_positions(facts: Facts):
    served = facts.server["context_length"] or facts.target_config["max_position_embeddings"]
    has = facts.config.get("max_position_embeddings", 2048)  # transformers' default
    if has < served:
        return (f"max_position_embeddings is {has}, the server takes contexts of {served}.",
                f"Write at least {served} (the weights do not depend on it), or serve with --context-length {has}.")


def draft_map(facts: Facts) -> np.ndarray:
    return read_tensor(facts.weights["d2t"] if "d2t" in facts.weights else facts.lacks("the drafter has no d2t"))


def trained_map(facts: Facts) -> np.ndarray:
    path = facts.folder("vocab_mapping") / "d2t.npy"
    return np.load(path) if path.is_file() else facts.lacks(f"{path} is not there")


def is_trained_map(facts: Facts, d2t: np.ndarray) -> bool:
    """Whether these offsets are those it was trained with: by their hash in eagle3.json, else by the run's vocab_mapping."""
    known = facts.provenance.get("d2t_sha256")
    return hashlib.sha256(d2t.astype("<i8").tobytes()).hexdigest() == known if known else np.array_equal(d2t, trained_map(facts))


def check_d2t_offset(facts: Facts):
    d2t, remedy = draft_map(facts), "Store offsets: d2t[i] = target_id - i."
    ids = d2t + np.arange(len(d2t))  # what SGLang reads
    with contextlib.suppress(Unchecked):
        if is_trained_map(facts, d2t):
            return None
        if is_trained_map(facts, d2t - np.arange(len(d2t))):
            return "d2t holds target ids; SGLang adds the draft id to each, so every token is shifted.", remedy
    if ids.max() >= facts.config["vocab_size"] or (np.diff(ids) < 1).any():
        return (f"read as offsets, as SGLang does, d2t leads to ids up to {ids.max()} of {facts.config['vocab_size']}, "
                f"{'not ' if (np.diff(ids) < 1).any() else ''}in ascending order.", remedy)


def check_vocabulary_map(facts: Facts):
    d2t = draft_map(facts)
    if check_d2t_offset(facts) or is_trained_map(facts, d2t):
        return None  # the first is check_d2t_offset's case
    if facts.provenance.get("d2t_sha256"):
        return "its d2t is not the one it was trained with.", "Export again."
    truth = trained_map(facts)
    same = np.isin(d2t + np.arange(len(d2t)), truth + np.arange(len(truth))).mean()
    return (f"its d2t ({len(d2t)} tokens) is not the run's vocab_mapping ({len(truth)} tokens; {same:.0%} of the drafter's are in it).",
            "Train and export with one map, or name the drafter's own run with --run-dir.")


def check_embedding(facts: Facts):
    if facts.config.get("tie_word_embeddings"):
        return "tie_word_embeddings is true: its lm_head is overwritten by the embedding.", "Write false."
    given, hidden = facts.config.get("target_hidden_size"), facts.config["hidden_size"]
    if given is not None and given != hidden:
        return (f"target_hidden_size {given} differs from hidden_size {hidden}, so SGLang does not share the target's embedding.",
                "Remove target_hidden_size.")


def check_quantised(facts: Facts):
    told = facts.server["speculative_draft_model_quantization"]
    if told and not facts.config.get("quantization_config"):
        return (f"the server quantises the draft ({told}), inherited from the target's flag.",
                "Serve with --speculative-draft-model-quantization unquant.")


def check_final_state(facts: Facts):
    weights = tensor_index(facts.target)
    name = next((name for name in weights if name.endswith("model.norm.weight")), None) or facts.lacks("no model.norm.weight in the target")
    norm = read_tensor(weights[name]).astype(np.float64)
    files = sorted(facts.folder("hidden_states").glob("*/*.safetensors"))[:4] or facts.lacks("hidden_states/ holds no samples")
    # y = x / rms(x) * w: whatever x was, y / w has a root mean square of 1
    rms = np.concatenate([np.sqrt(((read_tensor(tensor_index(file)["last_hidden_states"]) / norm) ** 2).mean(1)) for file in files])
    if not np.allclose(rms, 1, atol=0.05):
        return (f"last_hidden_states have a root mean square of {np.median(rms):.2f} over the final norm's weight, not 1: "
                "they were taken before the final norm, so it learned wrong targets.", "Extract again.")


def check_norm_output(facts: Facts):
    found = [key for key in ("norm_output", "norm_before_fc", "norm_before_residual")
             if facts.config.get(key) or (facts.config.get("eagle_config") or {}).get(key)]
    if found:
        return f"config.json sets {', '.join(found)}; the draft is trained without.", "Remove it."


def check_template(facts: Facts):
    parts = sorted(facts.folder("responses").glob("part-*.jsonl")) or facts.lacks("responses/ holds no part-*.jsonl")
    ends, unseen = set(), {tuple(prompt["prompt_ids"][-2:]) for prompt in facts.prompts}
    for row in (row for part in parts for row in jsonl_rows(part)):  # not the first rows only: sorted by id, one mode may follow the other
        end = tuple(row["prompt_ids"][-2:])
        ends.add(end)
        unseen.discard(end)
        if not unseen:
            return None
    odd = [prompt["prompt_ids"][-2:] for prompt in facts.prompts if tuple(prompt["prompt_ids"][-2:]) in unseen]
    return (f"{len(odd)} of {len(facts.prompts)} prompts end in tokens {odd[0]}, the training prompts in "
            f"{', '.join(map(str, map(list, sorted(ends)[:3])))}.", "Use the training data's --thinking mode and chat template.")


def check_weights(facts: Facts):
    missing = sorted(DRAFT_WEIGHTS - set(facts.weights))
    unknown = sorted(set(facts.weights) - DRAFT_WEIGHTS - {"t2d", "embed_tokens.weight"})
    if missing or unknown:
        return (f"missing {missing}, unknown {unknown}: SGLang drops unknown names and leaves missing weights as they come, in silence.",
                "Export again.")
    config, rows = facts.config, {name: entry["shape"][0] for name, entry in facts.weights.items()}
    head_dim = rows["midlayer.self_attn.q_proj.weight"] // config["num_attention_heads"]
    wanted = {"midlayer.self_attn.k_proj.weight": ("num_key_value_heads", head_dim),
              "midlayer.mlp.gate_proj.weight": ("intermediate_size", 1),
              "fc.weight": ("hidden_size", 1), "lm_head.weight": ("draft_vocab_size", 1), "d2t": ("draft_vocab_size", 1)}
    wrong = [f"{name} has {rows[name]} rows, {key} is {config[key]}"
             for name, (key, each) in wanted.items() if rows[name] != config[key] * each]
    if wrong:
        return f"{'; '.join(wrong)}.", "Mend config.json, or export again."


# cause, check: None | (finding, remedy); raises Unchecked
CHECKS = [("eagle_config misplaced", check_eagle_config), ("capture layers", check_capture_layers), ("head_dim", check_head_dim),
          ("RoPE", check_rope), ("max positions below the context", check_max_positions), ("d2t read as ids", check_d2t_offset),
          ("stale vocabulary map", check_vocabulary_map), ("embedding not shared", check_embedding), ("quantised draft", check_quantised),
          ("final state before the norm", check_final_state), ("norm flags", check_norm_output),
          ("chat template or thinking mode", check_template), ("weights", check_weights)]


def examine(facts: Facts) -> tuple[list[dict], dict[str, str]]:
    """(findings, what could not be checked)."""
    findings, unchecked = [], {}
    for cause, check in CHECKS:
        try:
            found = check(facts)
        except Unchecked as why:
            unchecked[cause] = str(why)
            continue
        except (KeyError, TypeError) as error:  # a key of config.json, a weight, or what this server does not tell
            unchecked[cause] = f"what it looks at is missing ({error})"
            continue
        if found:
            findings.append({"cause": cause, "finding": found[0], "remedy": found[1]})
    return findings, unchecked


def diagnose(facts: Facts, accept: dict | None, check: dict | None) -> dict:
    """The doctor's chapter of the report: is there a gap between training's prediction and serving, and which cause explains it."""
    findings, unchecked = examine(facts)
    if accept and accept["correct_drafts"] == 0 and not findings:
        findings.append({"cause": "accept_length exactly 1.00",
                         "finding": f"not one draft was right in {accept['verify_steps']} verify steps, and no listed cause explains it.",
                         "remedy": "If training's own cond_acc was good, compare one drafted token by hand."})
    gap, summary = None, ("No comparison with training: it needs eagle3.json's prediction, temperature 0, and answers with speculative "
                          "counts from a server with topk 1 and the predicted number of draft steps.")
    if check:
        low, high = check["interval"] or (check["ratio"],) * 2
        if check["of_validation"]:
            gap = not 0.97 <= check["ratio"] <= 1.03 and not low <= 1 <= high
        word = f"its validation samples: {'a gap' if gap else 'no gap'}" if check["of_validation"] else \
            "other prompts, which proves neither a gap nor none"
        summary = (f"Training predicted an accept_length of {check['predicted']:.3f}, serving gives {check['served']:.3f} on "
                   f"{check['answers']} answers to {word}.")
        if gap and check["as_long_answers"] < 0.9 * check["answers"]:
            summary += (f" But {check['answers'] - check['as_long_answers']} answers are not as long as the sample, so they are other "
                        "texts (another temperature or --max-tokens than in 01): the comparison is rough.")
    found = f"Found: {', '.join(f['cause'] for f in findings)}." if findings else "Healthy." if gap is False else "No cause found."
    return {"summary": f"{summary} {found}", "gap": gap, "findings": findings, "unchecked": unchecked}


# ---- main ----
def sweep_variants(grid: list[str]) -> list[tuple[str, dict]]:
    variants = []
    for point in grid:
        try:
            steps, topk, drafts = map(int, point.split(","))
        except ValueError:
            raise UserError(f"--sweep-grid: {point!r} is not STEPS,TOPK,DRAFTS, as in 3,1,4.") from None
        most = steps + 1 if topk == 1 else 1 + topk + (steps - 1) * topk * topk
        if min(steps, topk) < 1 or not 2 <= drafts <= most or topk == 1 and drafts != most:
            raise UserError(f"--sweep-grid: {point}: DRAFTS must be {'' if topk == 1 else 'at most '}{most} for these STEPS and TOPK.")
        variants.append((f"steps{steps}-topk{topk}-drafts{drafts}", {
            "speculative-num-steps": steps, "speculative-eagle-topk": topk, "speculative-num-draft-tokens": drafts}))
    return variants


def best_flags(row: dict, commands: dict) -> dict:
    """The fastest variant of a level and the line that starts it."""
    name = max((name for name in row if row[name]["tok_s"]), key=lambda name: row[name]["tok_s"])
    argv, env = commands[name]
    words = [*(f"{key}={shlex.quote(value)}" for key, value in env.items()), shlex.join(argv)]
    return {"variant": name, "tok_s": row[name]["tok_s"], "command": " ".join(words)}


def read_provenance(args: argparse.Namespace) -> dict:
    """eagle3.json of the drafter; {} without one. Raises UserError when --draft-path holds no drafter."""
    if not args.draft_path:
        return {}
    if not (args.draft_path / "config.json").is_file():
        raise UserError(f"--draft-path: {args.draft_path} holds no config.json. Name a folder that 04_train.py exported (output/best).")
    if args.doctor and not (args.draft_path / "model.safetensors").is_file():
        raise UserError(f"--doctor: {args.draft_path} holds no model.safetensors.")
    path = args.draft_path / "eagle3.json"
    try:
        json.loads((args.draft_path / "config.json").read_text())
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"--draft-path: config.json or eagle3.json in {args.draft_path} is not readable as JSON ({error}).") from None


def check_args(args: argparse.Namespace) -> None:
    if args.launch and (args.base_url or args.baseline_url):
        raise UserError("--launch starts its own servers: leave out --base-url and --baseline-url.")
    if not args.launch and not args.base_url:
        raise UserError("name the running server with --base-url (and --baseline-url), or use --launch with --config.")
    if args.launch and not args.config:
        raise UserError("--launch needs --config: the run file's `servers` say what to start.")
    if args.doctor and not args.draft_path:
        raise UserError("--doctor examines a drafter: name it with --draft-path.")
    if args.sweep and not args.launch:
        raise UserError("--sweep restarts the server with other flags, so it needs --launch.")
    if min(args.concurrency) < 1 or args.max_tokens < 1 or args.repeats < 1 or args.warmup < 0:
        raise UserError("--concurrency, --max-tokens and --repeats must be at least 1, --warmup at least 0.")
    for flag, values in (("concurrency", args.concurrency), ("sweep-grid", args.sweep_grid)):
        if len(set(values)) < len(values):
            raise UserError(f"--{flag}: a value stands twice in {' '.join(map(str, values))}. Use --repeats to measure it again.")
    for flag, url in (("base-url", args.base_url), ("baseline-url", args.baseline_url)):
        if url and not url.startswith(("http://", "https://")):
            raise UserError(f"--{flag}: {url!r} is no URL, as in http://127.0.0.1:30000.")


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `kill` also stops the servers
    args = parse_args(build_parser(), "benchmark", argv)
    check_args(args)
    document = read_config(args.config) if args.config else {}
    provenance = read_provenance(args)
    args.run_dir = args.run_dir or (Path(document["run_dir"]) if document.get("run_dir") else None)
    if args.doctor and not args.prompts and not args.dataset and args.run_dir:  # the samples that training's prediction is about
        args.prompts, args.ids = [args.run_dir / "responses"], args.ids or args.draft_path.parent / "val_ids.json"
    headers, endpoints = headers_of(args), Endpoints(args, document)
    variants = [("plain", {})] if args.launch or args.baseline_url else []
    variants += sweep_variants(args.sweep_grid) if args.sweep else [("speculative", {})]
    try:
        measure_and_report(args, endpoints, headers, variants, provenance)
    except ServerGone as error:
        print(f"{STAGE}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        endpoints.close()


def measure_and_report(args, endpoints, headers, variants, provenance) -> None:
    # 1. what to send, and where
    tokenizer_path = args.tokenizer
    if not tokenizer_path and args.launch:
        tokenizer_path = flag_value(server_command(*endpoints.role(*variants[0]))[0], "--model-path", "")
    elif not tokenizer_path:
        tokenizer_path = contact(endpoints.use("speculative", {}), "speculative", headers, args.draft_path, provenance)["model_path"]
    if args.launch:
        for variant, flags in variants:
            argv = server_command(*endpoints.role(variant, flags))[0]
            served = flag_value(argv, "--speculative-draft-model-path", "")
            if variant != "plain" and args.draft_path and Path(served).resolve() != args.draft_path.resolve():
                raise UserError(f"servers.speculative serves the drafter {served or '(none)'}, --draft-path names {args.draft_path}. "
                                "Make them equal.")
    prompts = load_prompts(args, tokenizer_path)
    config = json.loads(json.dumps({key.replace("_", "-"): value for key, value in vars(args).items()}, default=str))
    inputs = {"prompts": hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest(),
              "prediction": hashlib.sha256(json.dumps(provenance, sort_keys=True).encode()).hexdigest(),
              **(drafter_hashes(args.draft_path) if args.draft_path else {})}
    lock = open_stage(args.output_dir, {**config, "inputs": inputs, "servers": endpoints.servers if args.launch else None}, MAY_CHANGE)
    log(f"config {json.dumps(config)}")
    log(f"inputs {json.dumps(inputs)}")
    if (args.output_dir / "manifest.json").exists():
        read_manifest(args.output_dir, STAGE)
        log("complete already")
        print(figures_table(json.loads((args.output_dir / "report.json").read_text())), flush=True)
        log(f"done: {args.output_dir / 'report.md'}")
        return
    raw = args.output_dir / "raw.jsonl"
    units, servers, probes = read_raw(raw)
    unable: dict[str, str] = {}  # sweep points that were left out, and why
    planned = [(variant, flags, level, repeat) for repeat in range(args.repeats)
               for variant, flags in (variants if repeat % 2 == 0 else variants[::-1]) for level in args.concurrency]
    finished = {(unit["variant"], unit["level"], unit["repeat"]) for unit in units}
    log(f"{len(prompts)} prompts | {len(planned)} units: {len(variants)} variants x {len(args.concurrency)} levels x {args.repeats} repeats | "
        f"{len(finished)} finished before")
    for level in args.concurrency:
        if len(prompts) < 2 * level:
            log(f"note: {len(prompts)} prompts at {level} streams: the ramp up and down is a large part of that level's tok/s")

    def spare(variant: str, error: Exception) -> None:
        """Go on without a sweep point whose server does not start or dies, unless none has been measured: then the cause is not the point."""
        if not args.sweep or variant == "plain" or all(unit["variant"] == "plain" for unit in units):
            raise error
        log(f"note: {variant} is left out: {error}")
        unable[variant] = str(error)
        endpoints.close()

    def examined(found: dict) -> dict:
        """Of the variant that training's prediction is about, else of the last one."""
        variant = next((v for v, about in found["variants"].items() if about["prediction"]), variants[-1][0])
        about, server = found["variants"].get(variant, {}), servers.get(variant)
        if args.launch and not server:  # not met yet: what its command says
            argv = server_command(*endpoints.role(*variants[-1]))[0]
            length = flag_value(argv, "--context-length", "")
            server = {"model_path": flag_value(argv, "--model-path", ""), "context_length": int(length) if length.isdigit() else None}
        return diagnose(Facts(args.draft_path, provenance, server, args.run_dir, prompts), about.get("accept"), about.get("prediction"))

    def report(plots: bool) -> dict:
        found = build_report(units, prompts, provenance, config, servers, probes, args.usd_per_hour)
        found |= {"units_planned": len(planned), "units_done": len(units)}
        if args.sweep:
            found["left_out"] = unable
            found["sweep"] = {level: best_flags(row, {v: server_command(*endpoints.role(v, flags)) for v, flags in variants})
                              for level, row in found["levels"].items()}
        if args.doctor:
            found["doctor"] = examined(found)
        drawn = draw_plots(found, args.output_dir) if plots else []
        write_atomic(args.output_dir / "report.json", json.dumps(found, indent=1) + "\n")
        write_atomic(args.output_dir / "report.md", report_markdown(found, drawn))
        return found

    if args.doctor:  # before any server runs: a faulty folder may keep it from starting
        for finding in examined({"variants": {}})["findings"]:
            log(f"doctor: {finding['cause']}: {finding['finding']} {finding['remedy']}")

    # 2. measure, unit by unit
    sampling = {"max_new_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p, "ignore_eos": args.fixed_length}
    met = None  # the variant whose server has been looked at
    for variant, flags, level, repeat in planned:
        if (variant, level, repeat) in finished or variant in unable:
            continue
        try:
            url = endpoints.use(variant, flags)
        except UserError as error:
            spare(variant, error)
            continue
        if variant != met:
            met = variant
            info = contact(url, variant, headers, args.draft_path, provenance)
            for name, known in servers.items():
                if Path(known["model_path"]).name != Path(info["model_path"]).name:
                    raise UserError(f"{endpoints}: serves {info['model_path']}, {name} {known['model_path']}: not one target.")
            differs = sorted(key for key in info if servers.get(variant, info)[key] != info[key])
            if differs:
                raise UserError(f"{endpoints}: other {', '.join(differs)} than in {raw}. Start it as it was, or use another --output-dir.")
            if variant not in servers:
                append_rows(raw, [{"kind": "server", "variant": variant, "info": info}])
            servers[variant] = info
            log(f"{variant} at {url} | " + " | ".join(f"{key} {value}" for key, value in info.items() if value is not None))
        label, warm = f"{variant} c{level} r{repeat}", prompts[:min(args.warmup, len(prompts))]
        run = (headers, bool(servers[variant]["incremental_streaming_output"]), args.request_timeout, endpoints)
        try:
            power = Power(url)
            if warm:
                asyncio.run(run_unit(url, warm, level, {**sampling, "max_new_tokens": min(16, args.max_tokens)}, *run, f"{label} warm-up"))
            flush_cache(url, headers)
            with power:
                requests, wall = asyncio.run(run_unit(url, prompts, level, sampling, *run, label))
        except ServerGone as error:
            spare(variant, error)
            continue
        key = {"variant": variant, "level": level, "repeat": repeat}
        if all("error" in request for request in requests):
            raise UserError(f"{endpoints}: all {len(requests)} requests of {label} failed; the first with {requests[0]['error']}: "
                            f"{' '.join(requests[0]['message'].split())}")
        units.append({**key, "wall_s": wall, "watts": power.watts, "requests": requests})
        append_rows(raw, [{"kind": "request", **key, **request} for request in requests]
                    + [{"kind": "unit", **key, "wall_s": wall, "watts": power.watts}])
        report(plots=False)  # a killed run says what it has
        figures = level_figures([units[-1]])
        accept = figures["accept"]
        log(f"{label} finished | {figures['tok_s']:,.1f} tok/s | ttft p50 {figures['ttft_s']['p50'] * 1000:.0f} ms"
            + (f" | accept_length {accept['accept_length']:.3f}" if accept else "")
            + f" | failed {sum(figures['failed'].values())} | {wall:.1f} s")
        if variant != "plain" and not accept:
            log(f"note: the answers of SGLang {servers[variant]['version']} carry no speculative counts: no accept_length")

    # 3. where greedy answers part: a near-tie or a fault
    pairs = [(unit, other) for other in units if other["variant"] == "plain" and args.temperature == 0
             for unit in units if unit["variant"] != "plain" and unit["level"] == other["level"]]
    about = {prompt["id"]: prompt for prompt in prompts}
    for unit, other in pairs:
        answers = {record["id"]: record for record in other["requests"]}
        for difference in same_text([other], [unit])["differences"]:
            key = f"{difference['id']}:{difference['position']}:{difference['tokens']}"
            if key in probes or len(probes) >= 200:
                continue
            variant = endpoints.variant or "plain"
            url = endpoints.use(variant, dict(variants)[variant])
            near_tie = 1e-3 if servers["plain"]["dtype"] == "float32" else 0.25  # log-probability gap below which two answers may part
            common = answers[difference["id"]]["output_ids"][:difference["position"]]
            probes[key] = probe_difference(url, headers, about[difference["id"]], common, difference["tokens"], near_tie)
            append_rows(raw, [{"kind": "probe", "key": key, **probes[key]}])

    # 4. say it
    endpoints.close()
    found = report(plots=True)
    print(figures_table(found), flush=True)
    for variant, served in found["variants"].items():
        if served["prediction"]:
            log(f"{variant}: {prediction_sentence(served['prediction'])}")
    for level, said in found["verdict"].items():
        log(f"verdict at {level} stream(s): {said}")
    for finding in found.get("doctor", {}).get("findings", []):
        log(f"doctor: {finding['cause']}: {finding['finding']} {finding['remedy']}")
    if args.doctor:
        log(f"doctor: {found['doctor']['summary']}")
    if unable:
        raise ServerGone(f"{args.output_dir / 'report.md'} lacks {len(unable)} of {len(variants) - 1} sweep points ({', '.join(unable)}). The same "
                         "command tries them again; what it has measured stays.")
    manifest = {
        "schema": SCHEMA, "stage": STAGE, "config": {key: value for key, value in config.items() if key not in MAY_CHANGE}, "inputs": inputs,
        "counts": {"kept": len(prompts), "units": len(units), "failed": count(r["error"] for u in units for r in u["requests"] if "error" in r)},
        "versions": {"python": sys.version.split()[0], "numpy": np.__version__, "sglang": sorted({s["version"] for s in servers.values()})}}
    write_atomic(args.output_dir / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    lock.close()
    log(f"done: {args.output_dir / 'report.md'}")


if __name__ == "__main__":
    run(main)
