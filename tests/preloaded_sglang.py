"""Servers that begin as copies of one process that has imported SGLang, and so without the 7 seconds of processor time
that its import takes: Preloaded is the side of the tests; run as a script, this file is that process."""
import contextlib
import json
import os
import random
import select
import subprocess
import sys
import traceback
from pathlib import Path

SERVE = Path(__file__).resolve().parent.parent / "scripts/cpu_engine/serve.py"


class Copy:
    """One server, its process group's leader: of subprocess.Popen's interface what the tests use."""

    def __init__(self, pid: int):
        self.pid, self.end = pid, os.pidfd_open(pid)

    def ended(self, timeout: float | None) -> bool:
        return bool(select.select([self.end], [], [], timeout)[0])

    def poll(self) -> int | None:
        """-1: it ended; how is not known to a process that is not its parent."""
        return -1 if self.ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended(timeout):
            raise subprocess.TimeoutExpired("serve.py", timeout)
        return -1


class Preloaded:
    """A process with SGLang imported, which ends with this one; its copies do not.

    python_path: where they find their modules first ("": nowhere).
    """

    def __init__(self, python_path: str):
        env = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen([sys.executable, __file__], env=env, text=True, start_new_session=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, argv: list[str], env: dict[str, str], log: Path) -> Copy:
        """serve.py with these arguments and this environment, its output appended to `log`."""
        self.process.stdin.write(json.dumps({"argv": argv, "env": env, "log": str(log)}) + "\n")
        self.process.stdin.flush()
        pid = self.process.stdout.readline()
        assert pid, "SGLang could not be imported: see above"
        return Copy(int(pid))


def serve_as(order: dict, added: dict[str, str], serve) -> None:
    """In the copy: become the server that `order` describes; does not return. added: variables that SGLang set."""
    os.setsid()
    out, nothing = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)
    for source, place in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, place)
    os.environ.clear()
    os.environ.update(order["env"] | added)
    random.seed()  # SGLang draws ports: no two copies the same
    code = 1
    try:
        serve.main(order["argv"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    pids, before = os.dup(1), dict(os.environ)
    os.dup2(2, 1)  # what SGLang prints as it is imported is no pid
    sys.path.insert(0, str(SERVE.parent))
    import serve
    serve.prepare()
    import sglang.launch_server  # noqa: F401
    import sglang.srt.entrypoints.http_server  # noqa: F401
    import sglang.srt.server_args  # noqa: F401
    serve.prepare = lambda: None  # it was
    added = {name: value for name, value in os.environ.items() if name not in before}
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # copies that ended, each long after the tests took hold of it
        pid = os.fork()
        if pid == 0:
            os.close(pids)
            serve_as(json.loads(line), added, serve)
        os.write(pids, f"{pid}\n".encode())
    os._exit(0)  # at once: all of SGLang would be taken down piece by piece


if __name__ == "__main__":
    main()
