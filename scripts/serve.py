"""Start one server of a run file in the foreground, printing its full command first; it ends when this script does.

    python3 scripts/serve.py --config configs/quickstart.yaml --role extract --log .run/quickstart/logs/server_extract.log

Behind `nohup ... &` it outlives the shell and the SSH connection; `kill` of its pid stops it and the server.

Reads   the section `servers` of the run file (roles: plain, extract, speculative, or your own)
Writes  the server's output to --log; to stdout the command, one `ready` line, and why it ended
Exit    0 stopped by a signal; 2 port taken, target missing, server died or not healthy in time
"""
import argparse
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

STAGE = "serve"


class UserError(Exception):
    """Bad input or configuration. The message says what, where and what to do; the script ends with exit code 2."""


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


def log(event: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {STAGE} {event}", flush=True)


def read_servers(path: Path) -> dict:
    """`servers` of a run file with {run_dir} and {target} filled in. Raises UserError."""
    try:
        text = path.read_text()
        document = yaml.safe_load(text)
        for key in ("run_dir", "target"):
            text = text.replace(f"{{{key}}}", str(document.get(key, "")))
        return yaml.safe_load(text).get("servers") or {}
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise UserError(f"{path}: not a readable run file ({' '.join(str(error).split())}).") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--wait", type=float, default=3600, help="seconds until it must be healthy (a 1T model loads slowly)")
    args = parser.parse_args()
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if sign != signal.SIGHUP or signal.getsignal(sign) != signal.SIG_IGN:  # nohup has it ignored
            signal.signal(sign, lambda *_: sys.exit(0))
    process, _ = start_server(read_servers(args.config), args.role, args.log, args.wait)
    try:
        while process.poll() is None:
            time.sleep(0.5)
        raise UserError(f"servers.{args.role}: the server ended with code {process.returncode}. Read {args.log}.")
    finally:
        stop_server(process)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"{STAGE}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
