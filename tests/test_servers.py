"""scripts/eagle3/servers.py: what is left of a server that was stopped. The rest of it is proven by serve.py and 05."""
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from conftest import free_port
from eagle3.servers import call, healthy, start_server, stop_server

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
