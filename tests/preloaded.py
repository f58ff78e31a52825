"""Processes that begin as copies of one that has imported what they need: `Preloaded` is the side of the tests, and
run as a script this file is that process.

A start of 04 takes 3 seconds of processor time for the import of torch alone, one of SGLang 7. A copy is a process like
any other, with its own arguments, environment, folder, output and signals, and a child of the tests; it has none of the
project's own modules yet.
"""
import base64
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path

SERVE = Path(__file__).resolve().parent.parent / "scripts/cpu_engine/serve.py"
# What a numbered script imports, of others' packages, some of it late, and what faults that are planted in it do
# (transformers would bring in Triton, whose binding names all that is frozen below as leaks)
PACKAGES = ("aiohttp", "matplotlib.pyplot", "numpy", "openai", "pynvml", "pytest", "safetensors.torch", "torch",
            "torch.distributed.run", "tqdm", "yaml")
MOST = 1 << 17  # bytes of an order
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg==")
PR_SET_CHILD_SUBREAPER = 36


def undrawn(figure, path, **_) -> None:
    """Of matplotlib's Figure.savefig, where no picture is the point: to draw one takes longer than to train a toy."""
    Path(path).write_bytes(PIXEL)


@contextlib.contextmanager
def adopting():
    """Processes whose parent ends meanwhile become children of this one."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Copy(subprocess.Popen):
    """A copy of `preloaded`; else as subprocess.Popen."""

    def __init__(self, preloaded: "Preloaded", args: list[str], **more):
        self.preloaded = preloaded
        super().__init__(args, **more)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                       shell, *rest):
        assert not (preexec_fn or pass_fds or shell), "not of a copy: take subprocess.Popen"
        ends, (*_, new_session, _) = rest[:6], rest  # of the pipes: (stdin read, write, stdout ..., stderr ...)
        places = [own if end == -1 else end for own, end in enumerate((ends[0], ends[3], ends[5]))]
        order = {"argv": list(map(str, args)), "cwd": str(cwd or os.getcwd()),
                 "env": dict(os.environ if env is None else env), "new_session": bool(new_session)}
        with self.preloaded.lock, adopting():
            socket.send_fds(self.preloaded.socket, [json.dumps(order).encode()], places)
            told = self.preloaded.socket.recv(100)
        assert told, "what is preloaded could not be imported: see above"
        self.pid, self._child_created = int(told), True
        self._close_pipe_fds(*ends)


class Preloaded:
    """A process that has imported PACKAGES or SGLang, and ends with this one; its copies do not.

    what: "scripts" or "sglang". python_path: where its copies find their modules first ("": nowhere).
    """

    def __init__(self, what: str, python_path: str = ""):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lock = threading.Lock()  # an order and its answer
        env = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-u", __file__, what, str(theirs.fileno())], env=env,
                                            pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL)

    def popen(self, args: list[str], **more) -> Copy:
        """args: of "sglang" those of serve.py; of "scripts" what comes after `python`: a script, -c CODE or -m MODULE."""
        return Copy(self, args, **more)


@functools.cache
def scripts() -> Preloaded:
    """For this project's scripts; of one worker."""
    return Preloaded("scripts")


def popen(command: list, **more) -> Copy:
    """As subprocess.Popen; command: this Python and what it shall do.

    What is read while Python starts (PYTHON* variables, -B) and while a package is imported (HF_HOME) is that of the
    tests.
    """
    python, *args = command
    assert python == sys.executable
    return scripts().popen(args[args[0] == "-u":], **more)


def run(command: list, timeout: float = 600, check=False, text=True, capture_output=True, **more) -> subprocess.CompletedProcess:
    """As subprocess.run, with `popen`."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if capture_output and "stdout" not in more else {}
    with popen(command, text=text, **streams | more) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0 or not check, (process.returncode, out, error)
    return subprocess.CompletedProcess(command, process.returncode, out, error)


# ---- the process that is copied ----
def enter_sglang() -> tuple[dict, types.FunctionType]:
    """(variables that SGLang set, what a copy does)."""
    before = dict(os.environ)
    sys.path.insert(0, str(SERVE.parent))
    serve = importlib.import_module("serve")
    serve.prepare()
    for name in ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.server_args"):
        importlib.import_module(name)
    serve.prepare = lambda: None  # it was

    def enter(argv: list[str]) -> None:
        code = 1
        try:
            serve.main(argv)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # at once, as below

    return {name: value for name, value in os.environ.items() if name not in before}, enter


def enter_scripts() -> tuple[dict, types.FunctionType]:
    for name in PACKAGES:
        importlib.import_module(name)
    sys.modules["matplotlib.figure"].Figure.savefig = undrawn
    return {}, as_python


def as_python(argv: list[str]) -> None:
    """What `python ARGV` does."""
    if argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        sys.modules["__main__"] = main_module = types.ModuleType("__main__")
        exec(compile(argv[1], "<string>", "exec"), vars(main_module))
    elif argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def fork_twice(mine: socket.socket) -> bool:
    """Whether this is the copy. Its parent has ended when the tests hear of it, so they are its parent now."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        if (copy := os.fork()) == 0:
            os.close(reading), os.close(writing)
            return True
        os.write(writing, str(copy).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        pid = told.read()
    os.waitpid(between, 0)
    mine.send(pid)
    return False


def become(order: dict, fds: list[int], added: dict[str, str]) -> None:
    """In the copy: its session, output, folder and environment."""
    if order["new_session"]:
        os.setsid()
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
    for fd in fds:
        os.close(fd)
    for fd, name in ((1, "stdout"), (2, "stderr")):  # as of `python -u`; those of before are for what stood there then
        stream = io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), "utf-8", "strict" if fd == 1 else "backslashreplace",
                                  write_through=True)
        setattr(sys, name, stream), setattr(sys, f"__{name}__", stream)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"] | added)
    random.seed()  # SGLang draws ports: no two copies the same


def main(what: str, fd: int) -> None:
    mine = socket.socket(fileno=fd)
    added, enter = {"sglang": enter_sglang, "scripts": enter_scripts}[what]()
    gc.collect()
    gc.freeze()  # a collection in a copy would write to all of its pages
    while True:
        data, fds, *_ = socket.recv_fds(mine, MOST, 3)
        if not data:
            os._exit(0)  # at once: all that was imported would be taken down piece by piece
        if fork_twice(mine):
            mine.close()
            order = json.loads(data)
            become(order, fds, added)
            return enter(order["argv"])
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
