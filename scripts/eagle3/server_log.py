"""The log of a server: one start after the other in one file, no secret in it, and the reason why the last one ended.

SGLang logs all of its settings, its API key included. Where this process has secrets to hide, a small process of its
own stands between the server and the file: no thread of a client that measures, and no more than a pipe for the server.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Iterator

from eagle3.masking import MASK, clean, hidden
from eagle3.stage import UserError

STARTED = "==== started: "  # begins the line before what one server says
READY = "The server is fired up and ready to roll!"  # SGLang's line
TAIL_BYTES = 1 << 20
LONGEST = 600  # characters of a reason
# Argument 1: the file; on stdin what the server says. EAGLE3_HIDE: what to replace, the longest first.
FILTER = f"""import json, os, sys
hide = [secret.encode() for secret in json.loads(os.environ["EAGLE3_HIDE"])]
with open(sys.argv[1], "ab", buffering=0) as file:
    for line in sys.stdin.buffer:
        for secret in hide:
            line = line.replace(secret, b"{MASK}")
        file.write(line)
"""
# What SGLang's other processes say once one of them has failed: the reason stands before it
CONSEQUENCES = re.compile(r"Initialization failed\. Please see|died during initialization|Received sigquit|"
                          r"^(EOFError|KeyboardInterrupt|SystemExit|BrokenPipeError|asyncio\.\w+\.CancelledError)\b|"
                          r"leaked \w+ objects|resource_tracker|^Killed$|process group has NOT been destroyed")
STAMP = re.compile(r"^\[\d{4}-\d\d-\d\d[^\]]*\]\s*")  # SGLang's own: time, rank
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: |$)")
COMPLAINT = re.compile(r"\b(error|exception|fatal|refused|out of memory|no space left|not found)\b", re.I)


def open_file(path: Path, line: str = "") -> IO:
    """To append to, after `line`. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab", buffering=0)
        file.write(line.encode())
        return file
    except OSError as error:
        raise UserError(f"{path}: the server's log cannot be written there ({error.strerror}). "
                        "Name another place.") from None


def check_writable(folder: Path) -> None:
    """That logs can be written into `folder`. Raises UserError."""
    probe = folder / f".writable.{os.getpid()}"
    open_file(probe).close()
    probe.unlink()


@contextlib.contextmanager
def opened(path: Path, command: str) -> Iterator[int]:
    """A file descriptor for what a server says, after a line with its `command`. Raises UserError."""
    with open_file(path, f"{STARTED}{time.strftime('%Y-%m-%dT%H:%M:%S')} {clean(command)}\n") as out:
        secrets = hidden()
        if not secrets:
            yield out.fileno()
            return
        reader = subprocess.Popen([sys.executable, "-c", FILTER, str(path)], stdin=subprocess.PIPE,
                                  stdout=subprocess.DEVNULL, start_new_session=True,  # it ends when the server has
                                  env={**os.environ, "EAGLE3_HIDE": json.dumps(secrets)})
        with reader.stdin:
            yield reader.stdin.fileno()


# ---- why it ended ----
def last_words(path: Path) -> list[str]:
    """Lines of the last server that began there; [] where there is nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    words = text.rpartition(STARTED)[2].split("\n")
    return [line.rstrip("\r") for line in (words[1:] if STARTED in text else words)]


def exceptions(lines: list[str]) -> list[str]:
    """What each traceback ends in: its exception with its message."""
    found, inside = [], False
    for number, line in enumerate(lines):
        bare = STAMP.sub("", line)
        if "Traceback (most recent call last):" in bare:
            inside = True
        elif inside and bare and not bare[0].isspace() and EXCEPTION.match(bare):
            inside = False
            more = [bare]
            for after in lines[number + 1:number + 4]:  # a message of several lines
                if not after.strip() or STAMP.match(after) or "Traceback" in after:
                    break
                more.append(after.strip())
            found.append(" ".join(more))
    return found


def why_ended(path: Path, code: int | None = None) -> str:
    """The server's own reason as the end of a sentence (": ..."), out of its log; "" where it says nothing.

    The last exception that is no mere consequence of another, else the last line that sounds like a complaint, else
    the last line of one that was never ready. code: its exit code.
    """
    lines = [line for line in last_words(path) if line.strip()]
    ready = max((number for number, line in enumerate(lines) if READY in line), default=None)
    lines = lines[ready + 1:] if ready is not None else lines  # what it got over by then is no reason
    bare = [STAMP.sub("", line).strip() for line in lines]
    found = [text for text in exceptions(lines) if not CONSEQUENCES.search(text)]
    candidates = (found or [text for text in bare if COMPLAINT.search(text) and not CONSEQUENCES.search(text)
                            and not text.startswith("server_args=")]
                  or [text for text in bare if not CONSEQUENCES.search(text) and ready is None])
    said = " ".join(candidates[-1].split())[:LONGEST] if candidates else ""
    if code == -9 and not found:
        said += f"{' ... ' if said else ''}(killed, perhaps for want of memory: see dmesg)"
    return f": {clean(said).rstrip('.')}" if said else ""
