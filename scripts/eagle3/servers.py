"""The servers of a run: a role of the run file as a command, started, waited for and stopped; single calls to SGLang.

A run file's `servers` names roles (plain, extract, speculative, or one's own), each with `command`, `flags` and `env`;
a role that `extends` another takes its keys and lays its own over them.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import httpx

from eagle3.masking import masked
from eagle3.server_log import opened, why_ended
from eagle3.stage import UserError, log

ROLE_KEYS = {"extends", "command", "flags", "env"}
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
FIND_SGLANG = ("import importlib.util as u; found = u.find_spec('sglang'); "
               "print(*(found and found.submodule_search_locations or [])[:1])")
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL)  # what `call` raises


class ServerGone(Exception):
    """A server went away in the middle of a measurement: one line, and exit code 1."""


# ---- a role's command ----
def role_chain(servers: dict, role: str) -> list[dict]:
    """`role` and the roles it extends, itself first. Raises UserError."""
    chain, seen, name = [], set(), role
    while name is not None:
        if not isinstance(servers, dict) or not isinstance(name, str) or name not in servers:
            there = sorted(map(str, servers)) if isinstance(servers, dict) else "none: it is no mapping of roles"
            raise UserError(f"servers.{name}: no such role in the run file; there are {there}.")
        if name in seen:
            raise UserError(f"servers.{role}: `extends` goes in a circle.")
        if not isinstance(servers[name], dict):
            raise UserError(f"servers.{name}: no keys in it; known: extends, command, flags, env.")
        check_role(name, servers[name])
        chain.append(servers[name])
        seen.add(name)
        name = servers[name].get("extends")
    return chain


def check_role(name: str, spec: dict) -> None:
    """Raises UserError."""
    unknown = sorted(map(str, set(spec) - ROLE_KEYS))
    if unknown:
        raise UserError(f"servers.{name}: unknown key {unknown}; known: extends, command, flags, env.")
    command = spec.get("command", ["{python}"])
    if not isinstance(command, list) or not command or not all(isinstance(word, (str, int, float)) for word in command):
        raise UserError(f"servers.{name}.command: must be a list of words, as in [\"{{python}}\", -m, "
                        "sglang.launch_server].")
    for part in ("flags", "env"):
        if not isinstance(spec.get(part) or {}, dict):
            raise UserError(f"servers.{name}.{part}: must be `name: value` pairs, not a {type(spec[part]).__name__}.")
    nested = [f"flags.{key}" for key, value in (spec.get("flags") or {}).items() if isinstance(value, dict)]
    nested += [f"env.{key}" for key, value in (spec.get("env") or {}).items() if isinstance(value, (dict, list))]
    if nested:
        raise UserError(f"servers.{name}.{nested[0]}: must be one value, or of a flag a list of them.")


def role_settings(servers: dict, role: str) -> dict:
    """{"command", "flags", "env"} of `role`; what it extends is merged in key by key. Raises UserError."""
    merged = {"command": ["{python}", "-m", "sglang.launch_server"], "flags": {}, "env": {}}
    for spec in reversed(role_chain(servers, role)):
        merged["command"] = spec.get("command", merged["command"])
        for part in ("flags", "env"):
            merged[part].update(spec.get(part) or {})
    return merged


def server_command(servers: dict, role: str) -> tuple[list[str], dict[str, str]]:
    """argv and added environment of `role` in a run file's `servers`. Raises UserError."""
    command, flags, env = role_settings(servers, role).values()
    argv = [sys.executable if word == "{python}" else str(word) for word in command]
    for flag, value in flags.items():
        if value is True:
            argv.append(f"--{flag}")
        elif value is not None and value is not False:
            argv += [f"--{flag}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return argv, {str(key): str(value) for key, value in env.items() if value is not None}


def needs_patch(servers: dict) -> bool:
    """Whether the role `extract` captures, and by the patch, not by SGLang's own hooks. Raises UserError."""
    settings = role_settings(servers, "extract")
    return "EAGLE3_CAPTURE_DIR" in {**os.environ, **settings["env"]} and not settings["flags"].get("forward-hooks")


def python_of(command: list) -> str:
    """The Python that serves: the one that a role's command names, or this one."""
    first = str(command[0]) if command else ""
    return first if Path(first).name.startswith("python") else sys.executable


def flag_value(argv: list[str], flag: str, default: str) -> str:
    """The value of `flag` in a command: of its last mention, as argparse reads it."""
    for at in reversed(range(len(argv))):
        if argv[at].startswith(f"{flag}="):
            return argv[at].partition("=")[2]
        if argv[at] == flag and at + 1 < len(argv):
            return argv[at + 1]
    return default


def command_line(argv: list[str], env: dict[str, str]) -> str:
    """The line that starts it in a shell; where it needs a secret, `***` stands for it."""
    env, argv = masked(env), masked(argv)
    return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in env.items()), shlex.join(argv)])


# ---- single calls ----
@functools.cache
def client() -> httpx.Client:
    """One client for all calls. They are rare: no connection is kept, so that none is found dead.

    Without the environment's proxies, as the streams of load.py: servers of a run are near.
    """
    return httpx.Client(verify=ssl.create_default_context(), trust_env=False, follow_redirects=True,
                        limits=httpx.Limits(max_keepalive_connections=0))


def call(url: str, headers: dict | None = None, body: dict | None = None, timeout: float = 60) -> dict | list | str:
    """GET, or POST where there is a `body`; the answer as JSON where it is that, else its text.

    Raises NO_ANSWER: nobody there, or httpx.HTTPStatusError where the status is not 2xx.
    """
    request = client().build_request("GET" if body is None else "POST", url, headers=headers, timeout=timeout,
                                     content=None if body is None else json.dumps(body))
    response = client().send(request)
    if not response.is_success:
        message = f"HTTP Error {response.status_code}: {response.reason_phrase}"  # httpx's own has two lines
        raise httpx.HTTPStatusError(message, request=request, response=response)
    try:
        return response.json()
    except ValueError:
        return response.text


def healthy(url: str, timeout: float = 2.0, headers: dict | None = None) -> bool:
    """Whether /health answers well within so many seconds."""
    try:
        call(f"{url}/health", headers, timeout=timeout)
        return True
    except NO_ANSWER:
        return False


# ---- start and stop ----
def address(servers: dict, role: str) -> tuple[str, int]:
    """Where `role` will listen: (host, port). Raises UserError: the target is not there, or the port cannot be had."""
    argv, _ = server_command(servers, role)
    host, port = flag_value(argv, "--host", "127.0.0.1"), flag_value(argv, "--port", "30000")
    model = flag_value(argv, "--model-path", "")
    if os.sep in model and not (Path(model) / "config.json").is_file():
        raise UserError(f"servers.{role}: {model} holds no config.json. Set --model-path to the target's folder.")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"servers.{role}: --port {port} is no port. Name one from 1 to 65535.")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"servers.{role}: port {port} is taken. Stop what listens there or set another port "
                            "in the run file.") from None
        raise UserError(f"servers.{role}: cannot listen at {host}, port {port} ({error.strerror}). "
                        "Set another --host or --port in the run file.") from None
    return host, int(port)


def url_of(host: str, port: int) -> str:
    """Where a client of this machine asks a server that listens at `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def using_sglang(role: str, argv: list[str], env: dict[str, str]) -> int | None:
    """A shared lock on the sglang folder that this server imports, for the server to inherit; None without one.

    While it lasts patches/sglang_patch.py does not take its patch out. Raises UserError: a server that is to capture
    would do so with an SGLang that is not patched.
    """
    try:
        done = subprocess.run([python_of(argv), "-c", FIND_SGLANG], env={**os.environ, **env}, text=True, timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True)
        folder = Path(done.stdout.strip().rpartition("\n")[2] or "/no/sglang")
        lock = os.open(folder, os.O_RDONLY)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_SH)
    patched = (folder / "srt/eagle3_capture.py").exists() or any(word.startswith("--forward-hooks") for word in argv)
    if env.get("EAGLE3_CAPTURE_DIR") and not patched:
        os.close(lock)
        target = flag_value(argv, "--model-path", "")
        apply = f"{python_of(argv)} patches/sglang_patch.py apply{f' --target {target}' if target else ''}"
        raise UserError(f"servers.{role}: the SGLang at {folder} is not patched (or the patch was taken out again), so "
                        f"nothing would be captured. Run `{apply}`, then this.")
    return lock


def start_server(servers: dict, role: str, log_path: Path, wait_s: float) -> tuple[subprocess.Popen, str]:
    """Start `role` in a process group of its own, wait until it is healthy, return (process, base URL).

    The kernel kills the server when this process dies, even by kill -9 (PR_SET_PDEATHSIG); SGLang's own children do the
    same. Raises UserError: the target is not there, the port is taken, the server ended or is not healthy in time.
    """
    argv, env = server_command(servers, role)
    host, port = address(servers, role)
    log(f"starting {role}: {command_line(argv, env)}")
    libc = ctypes.CDLL(None)  # loaded before the fork: the child must not import anything
    lock = using_sglang(role, argv, env)
    with opened(log_path, command_line(argv, env)) as out:
        try:
            process = subprocess.Popen(argv, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=out,
                                       stderr=out, start_new_session=True, pass_fds=() if lock is None else (lock,),
                                       preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"servers.{role}: {argv[0]} cannot be started ({why}). "
                            "Correct its `command` or `env` in the run file.") from None
        finally:
            if lock is not None:
                os.close(lock)
    url, began = url_of(host, port), time.monotonic()
    try:
        while not healthy(url):
            if process.poll() is not None:
                raise UserError(ending(role, process, log_path, " before it was ready"))
            if time.monotonic() - began > wait_s:
                raise UserError(f"servers.{role}: not healthy after {wait_s:.0f} s{why_ended(log_path)}. "
                                f"Read {log_path}, or allow more time.")
            time.sleep(0.5)
        log(f"{role} ready at {url} after {time.monotonic() - began:.0f} s")
    except BaseException:
        stop_server(process)
        raise
    return process, url


def ending(role: str, process: subprocess.Popen, log_path: Path, when: str = "") -> str:
    """One line about a server that has ended: its exit code, and what it said."""
    time.sleep(0.2)  # its last words may still be on their way
    return (f"servers.{role}: the server ended with code {process.returncode}{when}"
            f"{why_ended(log_path, process.returncode)}. Read {log_path}.")


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """What would end this process meanwhile is kept, and has its effect afterwards. For the main thread."""
    kept, before = [], {}
    try:
        for sign in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            before[sign] = signal.signal(sign, lambda number, _: kept.append(number))
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
        for sign in kept:
            signal.raise_signal(sign)


def stop_server(process: subprocess.Popen) -> None:
    """End the server's whole process group: SIGTERM, 10 s, SIGKILL; SIGKILL also when only its children are left.

    A hangup comes twice (the kernel's and the shell's), and who waits presses Ctrl-C again: that must not break the
    stopping off, or the server's children are left.
    """
    with signals_held():
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sign)
                process.wait(timeout=10)
