"""What makes a script a stage: its log, its flags, its folder, its exit code.

A stage reads a run file's section under its flags, locks its output folder, refuses another config there, writes every
file whole, and writes manifest.json last: where that stands, the stage is complete.
"""
from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Callable

import yaml
from tqdm import tqdm

from eagle3.masking import clean, hide, secrets_in

SCHEMA = 1  # of every artifact
SCRIPTS = {"generate": "01_generate", "build_vocab": "02_build_vocab", "extract": "03_extract", "train": "04_train",
           "benchmark": "05_benchmark"}  # a run file's sections and whose flags they hold
NAMED = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM,
         errno.EROFS)  # what is wrong with a path that somebody named
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
SECTIONS = {"run_dir", "target", "servers", *SCRIPTS}
PROGRAM = Path(sys.argv[0]).stem  # "04_train"


class UserError(Exception):
    """Bad input or configuration. The message says what, where and what to do; the script ends with exit code 2."""


class OutputGone(Exception):
    """Nothing more can be written to stdout. No OSError: it is no trouble of the disk that a stage writes to."""


# ---- what the user sees ----
def log(event: str) -> None:
    """One line, flushed: `2026-11-29T12:00:00 train step 420/12000 | ...`. A bar on the terminal stays below it.

    Raises OutputGone.
    """
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {re.sub(r'^[0-9]+_', '', PROGRAM)} {one_line(event)}"
    try:
        if getattr(tqdm, "_instances", None):
            tqdm.write(line, file=sys.stdout)
        else:
            print(line, flush=True)
    except OSError as error:
        raise OutputGone(error.strerror) from None


def one_line(text: object) -> str:
    """For a terminal: no secrets, and a line break in a name is no line break."""
    return "\\n".join(clean(str(text)).splitlines())


def bar(total: int | None, unit: str, done: int = 0) -> tqdm:
    """A bar for long work, where stdout is a terminal; nothing elsewhere. Use as a context; `update(n)` moves it on."""
    return tqdm(total=total, unit=unit, initial=done, file=sys.stdout, disable=not sys.stdout.isatty(),
                dynamic_ncols=True, leave=False)


def duration(seconds: float) -> str:
    """45s, 3m20s, 5h07m."""
    minutes = int(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{int(seconds) % 60:02d}s" if minutes else f"{int(seconds)}s"


def run(main: Callable[[list[str]], int | None], leave: Callable[[int], None] = sys.exit) -> None:
    """Exit (by `leave`) with main(argv)'s code; bad input ends in a line and 2, Ctrl-C in 130, the rest in 1.

    What the machine refused (a path, a disk, a limit, a reader of the output that went away) is a line too, what is
    left a traceback.
    """
    for name in ("stdin", "stdout", "stderr"):  # closed: its descriptor would become that of the next file
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows only ASCII gets escapes, not a traceback
        stream.reconfigure(errors="backslashreplace")
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except SystemExit as end:
        code = end.code
    except UserError as error:
        code = ended(str(error), 2)
    except KeyboardInterrupt:
        code = ended("interrupted. The same command goes on from here.", 130)
    except (OutputGone, BrokenPipeError) as error:
        code = ended(f"its output cannot be written any more ({error}). The same command goes on from here; write the "
                     "output to a file on a disk with room.", 1)
    except OSError as error:
        if error.errno is None:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        code = ended(f"{error.filename or 'a file'}: {error.strerror} ({Path(frame.filename).name}, line "
                     f"{frame.lineno}). Mend that and run the same command again.", 2 if error.errno in NAMED else 1)
    leave(code)


def ended(why: str, code: int) -> int:
    """Say why a script ends, where anybody hears it."""
    with contextlib.suppress(OSError):
        print(f"{PROGRAM}: {one_line(why)}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):  # nothing more goes into a pipe without a reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


# ---- the run file and the flags ----
class RunFile(yaml.SafeLoader):
    """A key that stands twice in one mapping is a mistake, not the last of both."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands there twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def read_run_file(path: Path) -> dict:
    """The run's YAML file with `{run_dir}` and `{target}` filled in. Raises UserError."""
    try:
        document = yaml.load(path.read_bytes(), RunFile)
    except yaml.MarkedYAMLError as error:  # its own words repeat the line, which may hold a key
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}: not a readable YAML file ({error.problem}{line}).") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not a readable YAML file ({' '.join(str(error).split())}).") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: not a readable run file: no sections in it, but "
                        f"{'nothing' if document is None else f'a {type(document).__name__}'}.")
    if unknown := sorted(map(str, set(document) - SECTIONS)):
        raise UserError(f"{path}: unknown section {unknown}; known: {sorted(SECTIONS)}.")
    hide(*secrets_in(document))
    for name, value in document.items():
        path_like = name in ("run_dir", "target")
        if not isinstance(value, (str, int, float) if path_like else (dict, type(None))):
            raise UserError(f"{path}: {name}: must be {'a path' if path_like else 'keys'}, not {value!r:.80}.")
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


def raising(parser: argparse.ArgumentParser, where: str = "",
            advice: str = " See --help.") -> argparse.ArgumentParser:
    """`parser`, which raises its complaints as a UserError instead of ending the process.

    It refuses numbers and paths that no script could do anything with, and says defaults in --help.
    """
    def fail(message):
        raise UserError(f"{where}{message}.{advice}")

    for action in parser._actions:
        name = action.option_strings[-1] if action.option_strings else ""
        number = a_time if re.search(r"(-s|wait|timeout|-interval)$", name) else a_number
        action.type = {Path: a_path, int: a_whole_number, float: number}.get(action.type, action.type)
    parser.error = fail
    say_defaults(parser)
    return parser


def say_defaults(parser: argparse.ArgumentParser) -> None:
    """In --help, of each flag that has a default and does not speak of it."""
    for action in parser._actions:
        value, told, switch = action.default, action.help or "", isinstance(action, argparse.BooleanOptionalAction)
        if value in (None, argparse.SUPPRESS, [], {}) or value is False and not switch or "default" in told:
            continue
        text = ("off", "on")[value] if switch else " ".join(map(str, value if isinstance(value, list) else [value]))
        action.help = f"{told} (default: {text.replace('%', '%%')})".strip()


def parse_args(parser: argparse.ArgumentParser, section: str, argv: list[str]) -> argparse.Namespace:
    """Flags, over `section` of the --config file, over the defaults. An unknown key is a UserError."""
    raising(parser).add_argument("--config", type=Path, metavar="FILE.yaml",
                        help=f"run file; its section `{section}` holds flags")
    hide(*secrets_in(argv))  # a key on the command line by mistake stands in argparse's complaint
    probe = raising(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    probe.add_argument("--config", type=Path)
    path = probe.parse_known_args(argv)[0].config
    values = (read_run_file(path).get(section) or {}) if path else {}
    return parser.parse_args(tokens_of(parser, section, values, path, argv) + argv)


def tokens_of(parser: argparse.ArgumentParser, section: str, values: dict, path: Path | None,
              argv: list[str]) -> list[str]:
    """A run file's section as command-line tokens, less what `argv` sets itself. Raises UserError."""
    tokens, actions = [], {option[2:]: action for action in parser._actions for option in action.option_strings}
    for key, value in values.items():
        if key not in actions or key in ("config", "help"):
            raise UserError(f"{path}: {section}.{key} is not a flag of {SCRIPTS[section]}.py. See --help.")
        if value is None or any(word.split("=")[0] in actions[key].option_strings for word in argv):
            continue  # the command line wins
        if problem := misfit(value, actions[key]):
            raise UserError(f"{path}: {section}.{key}: {problem}.")
        if isinstance(value, bool) and actions[key].choices:
            value = "on" if value else "off"  # what YAML makes of an unquoted on or off
        if isinstance(value, bool):
            tokens += [f"--{key}"] if value else [f"--no-{key}"] if f"no-{key}" in actions else []
        elif isinstance(value, list):
            repeated = isinstance(actions[key], argparse._AppendAction)
            tokens += [f"--{key}={item}" for item in value] if repeated else [f"--{key}", *map(str, value)]
        else:
            tokens.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return tokens


def misfit(value: object, action: argparse.Action) -> str | None:
    """Why a run file's value cannot be one of this flag, where argparse would not see it."""
    if isinstance(value, bool) and action.nargs != 0 and not action.choices:
        return f"must be a value, not {value}"
    several = action.nargs not in (None, 0, "?") or isinstance(action, argparse._AppendAction)
    if isinstance(value, list) and not several:
        return f"must be one value, not the list {value}"
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, (list, type(None))) for item in items):
        return "holds an entry that is no value"
    simple = (None, str, a_whole_number, a_number, a_time, a_path)
    if any(isinstance(item, dict) for item in items) and action.type in simple:
        return "must be a value, not a mapping"
    return None


def a_whole_number(text: str) -> int:
    """A flag's; not beyond what other libraries count with."""
    if not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number of at most 18 digits")
    return int(text)


def a_number(text: str) -> float:
    """A flag's: nan and inf stand for no setting."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no number")
    return number


def a_time(text: str) -> float:
    """A flag's, in seconds: a few years at most, as clocks and sockets take no more."""
    if abs(number := a_number(text)) > 1e8:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is more than three years")
    return number


def a_path(text: str) -> Path:
    """A flag's path: an empty one would be the working directory, others no file system takes."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError("an empty path" if not text.strip() else f"{text!r} holds a zero byte")
    if max(len(os.fsencode(part)) for part in text.split(os.sep)) > 255 or len(os.fsencode(text)) > 4000:
        raise argparse.ArgumentTypeError(f"{text[:40]}...: too long a name for a path")
    return Path(text)


# ---- files ----
def sync_folder(folder: Path) -> None:
    """A file's name is on the disk only when its folder is. Works for a file as well."""
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


def append_lines(path: Path, rows: list[dict]) -> None:
    """Add JSON lines to a journal; on the disk when this returns."""
    with open(path, "ab") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> bytes:
    """A journal's bytes up to its last line end (the rest was torn by a kill); b"" where there is none."""
    data = path.read_bytes() if path.exists() else b""
    return data[:data.rfind(b"\n") + 1]


def read_json(path: Path) -> dict:
    """A JSON file. Raises UserError."""
    try:
        found = json.loads(path.read_bytes())  # in UTF-8, -16 or -32, with or without a mark
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable ({' '.join(str(error).split())}).") from None


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- a stage's folder ----
def read_manifest(folder: Path, stage: str) -> dict:
    """The manifest.json that `stage` wrote last into `folder`, so: the folder is complete. Raises UserError."""
    try:
        manifest = read_json(folder / "manifest.json")
    except UserError:
        raise UserError(f"{folder}: no readable manifest.json, so {stage} has not finished there. "
                        f"Run {stage}.py first.") from None
    if manifest.get("stage") != stage or manifest.get("schema") != SCHEMA:
        raise UserError(f"{folder}: written by {manifest.get('stage')} (schema {manifest.get('schema')}), "
                        f"expected {stage} (schema {SCHEMA}). Name the right folder.")
    return manifest


def write_manifest(folder: Path, stage: str, **content) -> None:
    """manifest.json, the last file that `stage` writes into `folder`."""
    write_atomic(folder / "manifest.json", json.dumps({"schema": SCHEMA, "stage": stage, **content}, indent=1) + "\n")


def lock_file(path: Path) -> IO | None:
    """Open and lock `path` until the handle is closed or the process dies, even by kill -9; None if another has it.

    Where the file system has no locks (NFS without its daemon, Lustre without `flock`) a file of this machine's own is
    locked for it: that keeps a second process out here, which is what happens; of other machines it says so.
    """
    lock = open(path, "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if isinstance(error, BlockingIOError):
            return None
        if error.errno not in NO_LOCKS:
            raise
        digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
        here = Path(tempfile.gettempdir()) / f"eagle3-{os.getuid()}-{digest}.lock"
        if path == here:
            raise
        log(f"{path}: this file system has no locks ({error.strerror}), so {here} is locked instead. Start no second "
            "process on this folder from another machine: it would not be noticed")
        return lock_file(here)
    return lock


def open_stage(folder: Path, config: dict, may_change: set[str],
               renew: Callable[[dict], dict | None] = lambda old: old) -> IO:
    """Lock `folder` for this process and refuse what another config began there (`stage.json`). Keep the handle open.

    renew: gets the config of before, once the folder is locked, and returns it as it counts now; None where nothing
    came of it, so that nothing hangs on it. Raises UserError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / ".lock")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}). Name another --output-dir.") from None
    if not lock:
        raise UserError(f"{folder}: another process is writing there. Wait for it, or use another folder.")
    fixed = json.loads(json.dumps({key: value for key, value in config.items() if key not in may_change}, default=str))
    path = folder / "stage.json"
    old = (renew(read_json(path)) if path.exists() else None) or fixed
    differs = [f"{key}: {old.get(key)!r} there, {fixed.get(key)!r} now"
               for key in sorted(old.keys() | fixed.keys()) if old.get(key) != fixed.get(key)]
    if differs:
        raise UserError(f"{folder}: begun with another config ({'; '.join(differs)}). "
                        "Use the old values or another folder.")
    try:
        write_atomic(path, json.dumps(fixed, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to ({error.strerror}). Make room, or name another --output-dir."
                        ) from None
    return lock
