"""scripts/eagle3/servers.py and server_log.py, scripts/serve.py: what is left of a server that was stopped, why one
ended, and that no log holds its secrets. The rest is proven by 05.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml

from conftest import ROOT, free_port, load_script, sglang_package
from eagle3.server_log import STARTED, why_ended
from eagle3.servers import call, flag_value, healthy, server_command, start_server, stop_server, url_of
from eagle3.stage import UserError

SLOW_TO_STOP = """import http.server, os, signal, sys, time
if os.fork() == 0:  # as a scheduler that hangs
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[0] + ".child", "w").write(str(os.getpid()))
    time.sleep(60)
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(0)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
        self.wfile.write(b"words")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_server_stops_does_not_leave_half_of_it(tmp_path, sign):
    """A hangup comes from the kernel and from the shell, and who waits presses Ctrl-C again."""
    class Ended(Exception):
        pass

    def end(*_):
        raise Ended

    (tmp_path / "stub.py").write_text(SLOW_TO_STOP)
    servers = {"plain": {"command": ["{python}", str(tmp_path / "stub.py")], "flags": {"port": free_port()}}}
    before = signal.signal(sign, end)
    try:
        process, url = start_server(servers, "plain", tmp_path / "log", 60)
        child = int((tmp_path / "stub.py.child").read_text())
        assert call(f"{url}/health") == "words"
        with pytest.raises(httpx.HTTPStatusError, match="^HTTP Error 503: Service Unavailable$"):
            call(f"{url}/other")
        threading.Timer(0.2, os.kill, (os.getpid(), sign)).start()
        with pytest.raises(Ended):  # afterwards it has its effect
            stop_server(process)
    finally:
        signal.signal(sign, before)
    assert process.poll() is not None and not healthy(url)
    deadline = time.monotonic() + 10
    while runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- why a server ended, in its own words ----
SGLANG_DIES = r"""
[2026-11-30 19:55:38] server_args={'model_path': 'x', 'api_key': None, 'error': 1}
[2026-11-30 19:55:39] A warning with error in it
[2026-11-30 19:55:40 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 5994, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/x/model_runner.py", line 336, in __init__
    self.initialize()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
Raise --mem-fraction-static.

[2026-11-30 19:55:40] Received sigquit from a child process. It usually means the child failed.
Traceback (most recent call last):
  File "/x/launch_server.py", line 1, in <module>
RuntimeError: Initialization failed. Please see the error messages above.
"""
CAPTURE_REFUSES = """
[2026-11-30 19:55:40] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/deepseek_v2.py", line 9, in forward
sglang.srt.eagle3_capture.Refused: the radix cache is on, so shared prefixes would not be computed. Add --disable-radix-cache.
"""
HARMLESS_THEN_KILLED = """
Traceback (most recent call last):
  File "/x/connectionpool.py", line 793, in urlopen
requests.exceptions.ConnectionError: Max retries exceeded with url: /freeze_gc
[2026-11-30 19:55:41] The server is fired up and ready to roll!
[2026-11-30 19:55:42] INFO:     127.0.0.1:47682 - "GET /health HTTP/1.1" 200 OK
"""


@pytest.mark.parametrize("said, code, reason", [
    (SGLANG_DIES, -9,
     ": torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. Raise --mem-fraction-static"),
    (CAPTURE_REFUSES, -9,
     ": sglang.srt.eagle3_capture.Refused: the radix cache is on, so shared prefixes would not be computed. "
                          "Add --disable-radix-cache"),
    (HARMLESS_THEN_KILLED, -9, ": (killed, perhaps for want of memory: see dmesg)"),
    (HARMLESS_THEN_KILLED, 1, ""),
    ("usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --nonsense\n", 2,
     ": launch_server.py: error: unrecognized arguments: --nonsense"),
    ("loading\ncpu_engine: --model-path x: no such folder.\n", 2, ": cpu_engine: --model-path x: no such folder"),
    ("", 1, ""),
    ("loading shards 17 of 64\n", -9, ": loading shards 17 of 64 ... (killed, perhaps for want of memory: see dmesg)"),
])
def test_the_reason_of_a_server_is_its_own(tmp_path, said, code, reason):
    (tmp_path / "log").write_text(f"RuntimeError: of an older start\n{STARTED}now: cmd\n{said}")
    assert why_ended(tmp_path / "log", code) == reason
    assert why_ended(tmp_path / "none", code) in ("", ": (killed, perhaps for want of memory: see dmesg)")


def stub(tmp_path, text: str, **spec) -> dict:
    (tmp_path / "stub.py").write_text(text)
    return {"plain": {"command": ["{python}", str(tmp_path / "stub.py")], "flags": {"port": free_port()}, **spec}}


def command(tmp_path, servers: dict, *more) -> list[str]:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"servers": servers}))
    return [sys.executable, "-u", str(ROOT / "scripts/serve.py"), "--config", "run.yaml", "--role", "plain", "--log",
            "logs/server.log", *map(str, more)]


def serve(tmp_path, servers: dict, *more) -> subprocess.CompletedProcess:
    return subprocess.run(command(tmp_path, servers, *more), cwd=tmp_path, text=True, capture_output=True, timeout=60)


def test_serve_repeats_the_reason_of_a_server_that_does_not_start_and_of_one_that_dies_later(tmp_path):
    dies = f"import os, signal, sys\nsys.stderr.write({CAPTURE_REFUSES!r})\nsys.stderr.flush()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done = serve(tmp_path, stub(tmp_path, dies))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "the server ended with code -9 before it was ready: sglang.srt.eagle3_capture.Refused: the radix cache is on" in done.stderr
    assert done.stderr.rstrip().endswith("Add --disable-radix-cache. Read logs/server.log.")
    later = """import http.server, os, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        threading.Timer(0.7, die).start()
def die():
    sys.stderr.write("ImportError: the patch was taken out\\n")
    sys.stderr.flush()
    os._exit(3)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
    done = serve(tmp_path, stub(tmp_path, later))
    assert "plain ready at" in done.stdout
    assert done.returncode == 2
    assert "ended with code 3: ImportError: the patch was taken out. Read logs/server.log." in done.stderr


# ---- --restart ----
# Healthy until its health was asked twice; then it ends as the line of `ends` says whose number is that of its start
MORTAL = """import http.server, os, pathlib, signal, sys, threading
starts = len(pathlib.Path("starts").read_text()) if os.path.exists("starts") else 0
open("starts", "a").write("x")
end = (pathlib.Path("ends").read_text().split() + ["lives"] * 9)[starts]
if end == "unready":
    sys.exit("RuntimeError: no memory for the weights")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if end != "lives":
            threading.Timer(0.05, die).start()
def die():
    sys.stderr.write(f"ImportError: of start {starts}\\n")
    sys.stderr.flush()
    os.kill(os.getpid(), int(end)) if end != "0" else os._exit(0)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def mortal(tmp_path, ends: str) -> dict:
    (tmp_path / "ends").write_text(ends)
    return stub(tmp_path, MORTAL)


def test_a_server_that_dies_is_brought_back_and_lives_until_somebody_stops_it(tmp_path):
    """By kill -9, by an error, and while it starts; then SIGTERM to serve.py ends both, with 0 and without a restart."""
    servers = mortal(tmp_path, "9 unready")
    port = servers["plain"]["flags"]["port"]
    with subprocess.Popen(command(tmp_path, servers, "--restart", 5), cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if sum("plain ready at" in said for said in lines) == 2:
                break
        assert healthy(f"http://127.0.0.1:{port}")
        process.terminate()
        assert process.wait(20) == 0 and process.stdout.read() == "" == process.stderr.read()
    again = [line.partition(" serve ")[2].strip() for line in lines if "Starting it again" in line]
    assert len(again) == 2 and "ended with code -9: ImportError: of start 0" in again[0]
    assert again[0].endswith("Starting it again in 1 s (1 of 5)") and again[1].endswith("in 2 s (2 of 5)")
    assert "code 1 before it was ready: RuntimeError: no memory for the weights" in again[1]
    assert not healthy(f"http://127.0.0.1:{port}") and (tmp_path / "starts").read_text() == "xxx"


@pytest.mark.parametrize("ends, restart, starts, words", [
    ("9 9 9 9 9 9", 100, 3, "code -9: ImportError: of start 2.* It was started again 2 times, 3 of its last starts in vain"),
    ("9 9", 1, 2, "code -9: ImportError: of start 1.* It was started again once"),
    ("unready", 5, 1, "before it was ready: RuntimeError: no memory for the weights. Read .*log.$"),
    ("15", 5, 1, "code -15: ImportError: of start 0.* Somebody stopped it: it is not started again"),
    ("0", 5, 1, "code 0: ImportError: of start 0.* Somebody stopped it: it is not started again"),
])
def test_a_server_that_is_not_brought_back_ends_with_its_reason(tmp_path, monkeypatch, ends, restart, starts, words):
    script = load_script("scripts/serve")
    monkeypatch.setattr(script, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.chdir(tmp_path)
    argv = command(tmp_path, mortal(tmp_path, ends), "--restart", restart)
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with pytest.raises(UserError, match=words):
            script.main(argv[argv.index("--config"):])
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
    assert len((tmp_path / "starts").read_text()) == starts


def test_sigterm_in_the_pause_before_a_restart_ends_it(tmp_path):
    with subprocess.Popen(command(tmp_path, mortal(tmp_path, "9"), "--restart", 5), cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if "Starting it again in 1 s" in line:
                process.terminate()
                break
        assert process.wait(20) == 0
    assert (tmp_path / "starts").read_text() == "x"


def test_no_secret_of_the_run_file_is_in_what_serve_prints_or_in_the_servers_log(tmp_path):
    tells = """import json, os, sys
print(f"server_args={{'api_key': {sys.argv[2]!r}, 'command': {sys.argv!r}}}")
print(json.dumps(dict(os.environ)))
sys.exit("the token " + os.environ["HF_TOKEN"] + " is refused by the hub")
"""
    secrets = {"api-key": "sk-\"odd' key\\1", "HF_TOKEN": "hf_of_the_run"}
    servers = stub(tmp_path, tells, env={"HF_TOKEN": secrets["HF_TOKEN"], "NCCL_ALGO": "Ring"})
    servers["plain"]["flags"]["api-key"] = secrets["api-key"]
    done = serve(tmp_path, servers)
    log = (tmp_path / "logs" / "server.log").read_text()
    for text in (done.stdout, done.stderr, log):
        assert "hf_of_the_run" not in text and "odd" not in text, text
    assert "--api-key" in done.stdout and "NCCL_ALGO=Ring" in done.stdout and "HF_TOKEN=" in done.stdout
    assert "'api_key': '***'" in log and '"HF_TOKEN": "***"' in log
    assert "the token *** is refused by the hub. Read" in done.stderr


@pytest.mark.parametrize("change, why", [
    ({"command": "python3 -m sglang.launch_server"}, "servers.plain.command: must be a list of words"),
    ({"command": ["/no/python"]}, "servers.plain: /no/python cannot be started (No such file or directory)"),
    ({"flags": ["port"]}, "servers.plain.flags: must be `name: value` pairs, not a list"),
    ({"env": "HF_TOKEN"}, "servers.plain.env: must be `name: value` pairs, not a str"),
    ({"env": {"A": ["b"]}}, "servers.plain.env.A: must be one value"),
    ({"flags": {"port": "http"}}, "--port http is no port"), ({"flags": {"port": 70000}}, "--port 70000 is no port"),
    ({"flags": {"host": "no.such.host.invalid", "port": 30000}}, "cannot listen at no.such.host.invalid, port 30000"),
    ({"flags": {"host": "192.0.2.1", "port": 30000}}, "cannot listen at 192.0.2.1, port 30000"),
    ({"extends": ["plain"]}, "no such role in the run file"), ({"falgs": {}}, "unknown key ['falgs']"),
])
def test_every_bad_role_is_one_line(tmp_path, change, why):
    servers = stub(tmp_path, "")
    servers["plain"].update(change)
    with pytest.raises(UserError) as caught:
        start_server(servers, "plain", tmp_path / "log", 5)
    assert why in str(caught.value) and len(str(caught.value).splitlines()) == 1
    with pytest.raises(UserError, match="no mapping of roles"):
        start_server(["plain"], "plain", tmp_path / "log", 5)


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="log cannot be written there"):
        start_server(stub(tmp_path, ""), "plain", tmp_path / "file" / "server.log", 5)


def test_flags_are_read_as_argparse_reads_them_and_addresses_as_a_client_reaches_them():
    assert flag_value(["x", "--port", "1", "--port=2"], "--port", "3") == "2"
    assert flag_value(["x", "--port"], "--port", "3") == "3" == flag_value(["--ports", "1"], "--port", "3")
    assert server_command({"a": {"env": {"A": None, "B": 1}, "command": ["x", 5]}}, "a") == (["x", "5"], {"B": "1"})
    assert [url_of(host, 1) for host in ("0.0.0.0", "::", "::1", "h")] == [
        "http://127.0.0.1:1", "http://[::1]:1", "http://[::1]:1", "http://h:1"]


# ---- who needs the patch ----
HEALTHY = SLOW_TO_STOP.replace("if os.fork() == 0:", "if False:")
PATCH = [sys.executable, str(ROOT / "patches/sglang_patch.py")]


@pytest.fixture
def patched(tmp_path):
    """What is patched of an sglang, in a folder of its own; the environment in which a Python imports that one."""
    folder = tmp_path / "path/sglang"
    (folder / "srt/models").mkdir(parents=True)
    for name in ("__init__.py", "_version.py", "srt/models/deepseek_v2.py"):
        shutil.copy(sglang_package() / name, folder / name) if (sglang_package() / name).exists() else None
    for info in sglang_package().parent.glob("sglang-*.dist-info"):
        shutil.copytree(info, folder.parent / info.name)
    (folder / "__init__.py").write_text("")
    env = {"PYTHONPATH": str(folder.parent)}
    subprocess.run([*PATCH, "apply"], env={**os.environ, **env}, check=True)
    return folder, env


def restore(env: dict) -> subprocess.CompletedProcess:
    return subprocess.run([*PATCH, "restore"], env={**os.environ, **env}, text=True, capture_output=True)


def test_the_patch_stays_while_a_server_needs_it_and_is_missed_by_name(tmp_path, patched):
    """Two serve.py of one Python: the one that ends does not take the patch from under the other."""
    folder, env = patched
    servers = stub(tmp_path, HEALTHY, env=env)
    servers["other"] = {"extends": "plain", "flags": {"port": free_port()}}
    servers["extract"] = {"extends": "plain", "env": {"EAGLE3_CAPTURE_DIR": "incoming"}}
    first, second = (start_server(servers, name, tmp_path / "log", 60)[0] for name in ("extract", "other"))
    stop_server(first)
    done = restore(env)
    assert done.returncode == 2 and done.stderr.startswith(f"sglang_patch: {folder} stays patched: ") and len(done.stderr.splitlines()) == 1
    assert f"(pid {os.getpid()}) needs it. Stop that server" in done.stderr and (folder / "srt/eagle3_capture.py").exists()
    stop_server(second)
    assert restore(env).returncode == 0 and not (folder / "srt/eagle3_capture.py").exists()
    with pytest.raises(UserError, match="is not patched .or the patch was taken out again.*sglang_patch.py apply`, then this"):
        start_server(servers, "extract", tmp_path / "log", 60)


def test_a_server_that_is_killed_needs_no_patch(tmp_path, patched):
    _, env = patched
    process, _ = start_server(stub(tmp_path, HEALTHY, env=env), "plain", tmp_path / "log", 60)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert restore(env).returncode == 0


@pytest.mark.parametrize("needed", (False, True))
def test_quickstart_leaves_the_patch_to_who_needs_it(needed, tmp_path, patched):
    """The script's own stop_server, in a shell whose lock a second process shares or does not."""
    folder, env = patched
    function = re.search(r"^stop_server\(\) \{.*?^\}", (ROOT / "scripts/quickstart.sh").read_text(), re.M | re.S)[0]
    with subprocess.Popen(["flock", "-s", str(folder), "sleep", "60" if needed else "0"]) as other:
        time.sleep(0.5)
        done = subprocess.run(["bash", "-euc", f"py={sys.executable} logs={tmp_path} patched=1; say() {{ echo $*; }}; {function}\nexec 9<{folder}; "
                               "flock -s 9; sleep 60 & server=$!; stop_server"], cwd=ROOT, env={**os.environ, **env}, text=True,
                              capture_output=True, timeout=30)
        other.kill()
    assert done.returncode == 0, done.stderr
    assert ("stays patched: flock -s" in done.stdout) == needed == (folder / "srt/eagle3_capture.py").exists()


def test_an_sglang_that_nobody_may_write_to(tmp_path, patched):
    """Looked at, used and left as it is; what would have to be written is one line."""
    folder, env = patched
    home = folder.parent

    def read_only(*argv) -> subprocess.CompletedProcess:
        script = f"mount --bind {home} {home} && mount -o remount,ro,bind {home} || exit 77; exec \"$@\""
        done = subprocess.run(["unshare", "-m", "bash", "-c", script, "-", *argv], env={**os.environ, **env}, text=True, capture_output=True)
        if done.returncode == 77 or done.stderr.startswith("unshare: "):
            pytest.skip("this user may not mount anything")
        return done

    assert "patched (patch" in read_only(*PATCH, "status").stdout
    done = read_only(*PATCH, "restore")
    assert done.returncode == 2 and done.stderr.endswith(": Read-only file system. Mend that and run this again.\n") and len(done.stderr.splitlines()) == 1
    assert restore(env).returncode == 0
    assert read_only(*PATCH, "restore").returncode == 0  # nothing to take out
    done = read_only("bash", "-c", f"{' '.join(PATCH)} status | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0 and done.stderr == ""
