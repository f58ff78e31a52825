"""03 whose servers are on other hosts: states over HTTP, the same files as through a shared folder, whatever is killed or breaks."""
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT, free_port
from eagle3 import extraction, incoming, states_client
from eagle3.incoming import run_prefix
from eagle3.stage import UserError
from eagle3.states_client import Away, Source
from eagle3.states_server import StatesServer
from stand_in import StandIn, captured
from test_extract import ORDER, Stage, contents, stage  # noqa: F401  stage: a fixture

TOKEN = "a-token-of-this-test"
NAMES = [f"s{number:02d}" for number in range(20)]


@contextlib.contextmanager
def offered(folder: Path, port: int = 0):
    """A states server in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    with StatesServer(("127.0.0.1", port), folder, TOKEN) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def there(tmp_path, monkeypatch) -> Path:
    """The capture folder of another host."""
    monkeypatch.setenv("STATES_TOKEN", TOKEN)
    return tmp_path / "there/incoming"


class Remote(Stage):
    """A Stage whose server captures into `there`, which `url` offers."""

    def __init__(self, folder: Path, there: Path, url: str):
        super().__init__(folder)
        self.servers[0].folder, self.url = there, url

    def arguments(self, *more) -> list[str]:
        urls = [] if "--states-url" in more else ["--states-url", self.url]
        return [*super().arguments(*urls, *([] if "--states-token-env" in more else ["--states-token-env", "STATES_TOKEN"]), *more)]


@pytest.fixture
def remote(tmp_path, there):
    with offered(there) as server:
        stage = Remote(tmp_path / "here", there, url_of(server))
        stage.offer = server
        yield stage
        stage.servers[0].close()


def url_of(server: StatesServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def samples(folder: Path) -> dict[str, bytes]:
    """What 04 reads: the samples and their index."""
    return {name: data for name, data in contents(folder).items() if name.endswith(".safetensors") or name == "index.jsonl"}


# ---- as through a shared folder ----
def test_the_same_files_as_through_a_shared_folder(stage, remote, there):  # noqa: F811
    assert stage() == "" and remote() == ""
    assert samples(remote.folder) == samples(stage.folder) and len(samples(stage.folder)) == 21
    assert not files_in(there) and not files_in(remote.incoming)  # nothing is left on either host
    assert f"states come from {remote.url} | {there} on {socket.gethostname()} | disk free there" in remote.out
    assert remote() == "" and "complete already" in remote.out


def test_two_servers_each_with_a_states_server_of_its_own(remote, there, tmp_path):
    """Each is asked for what it captured; one states server for all of them is another way to say it."""
    other = StandIn(tmp_path / "elsewhere")
    remote.servers.append(other)
    with offered(other.folder) as second:
        assert remote("--states-url", remote.url, "--states-url", url_of(second)) == ""
        assert all(server.asked for server in remote.servers) and second.files == len(other.asked)
        assert not files_in(there) + files_in(other.folder)
    other.close()


@pytest.mark.parametrize("mode", [[], ["--max-disk-gb", 1]])
def test_what_a_killed_03_left_is_removed_there_and_nothing_else(remote, there, mode, monkeypatch):
    """In bounded mode nothing is asked for until the server has written what the dead one asked for, which no bound counts."""
    own, foreign, ended, early = run_prefix(remote.folder, remote=True), "0123456789ab-77-1.1", threading.Event(), []
    for run in (f"{own}9-9.1", foreign, run_prefix(remote.folder) + "9-9.1"):  # the last: the same path on another host
        (there / run).mkdir(parents=True)
        (there / run / "s03.safetensors.tmp").write_bytes(b"begun")
    (there / f"{own}8-8.1").mkdir()
    (there / f"{own}8-8.1/s04.safetensors").write_bytes(b"not taken")
    sizes = iter(range(1, 7))

    def writes_on(seconds: float) -> None:
        """In each pause of 03's, until it has ended."""
        if size := next(sizes, 0):
            (there / f"{own}7-7.1").mkdir(exist_ok=True)
            (there / f"{own}7-7.1/s05.safetensors.tmp").write_bytes(bytes(size))
        else:
            ended.set()

    monkeypatch.setattr(incoming, "time", SimpleNamespace(monotonic=time.monotonic, sleep=writes_on))
    remote.servers[0].before = lambda name, folder: early.append(name) if mode and not ended.is_set() else None
    assert remote(*mode) == "" and not early and ended.is_set() == bool(mode)
    assert {path.parent.name for path in files_in(there)} == {foreign, run_prefix(remote.folder) + "9-9.1"}


# ---- what cannot be ----
@pytest.mark.parametrize("flags, words", [
    (["--states-url", "http://127.0.0.1:1"], "no states server answers there (ConnectionRefusedError"),
    (["--states-url", "https://127.0.0.1:1"], "expected http://HOST:PORT"),
    (["--states-url", "http://a:1", "--states-url", "http://b:1"], "2 for 1 --base-url. Name one for each, in their order, or one for all"),
    (["--states-token-env", "NO_SUCH"], "--states-token-env NO_SUCH: this variable is empty"),
    (["--states-token-env", "OTHER"], "it asks for another token. --states-token-env and the --token-env"),
])
def test_what_cannot_be_is_one_line_before_anything_is_sent(remote, monkeypatch, flags, words):
    monkeypatch.setenv("OTHER", "another-token-than-that")
    assert words in remote(*flags) and remote.servers[0].asked == [] and "another-token" not in remote.out


@pytest.mark.parametrize("what, mode", [("remove_runs", []), ("listing", ["--max-disk-gb", 1])])
def test_a_states_server_that_goes_before_anything_is_sent_is_one_line(remote, monkeypatch, what, mode):
    """It says what it is, and dies of the next request."""
    def dies(self, prefix):
        raise ConnectionAbortedError

    monkeypatch.setattr(StatesServer, what, dies)
    said = remote(*mode)
    assert said.startswith(f"{remote.url}: no states server answers there (RemoteDisconnected") and not remote.servers[0].asked


def test_an_address_that_is_no_states_server(remote):
    assert f"{remote.servers[0].url}: no states server answers there" in remote("--states-url", remote.servers[0].url)


def test_another_capture_folder_is_one_line(remote, tmp_path, monkeypatch):
    """The states server of another run, or of another server: what was asked for never appears there."""
    monkeypatch.setattr(extraction, "FIRST_FILE_S", 0.5)
    with offered(tmp_path / "another") as other:
        said = remote("--states-url", url_of(other))
    assert f"answered, but nothing appeared in {tmp_path}/another on" in said and url_of(other) in said
    assert "start it with EAGLE3_CAPTURE_DIR set to that folder" in said and remote.quarantine() == {}


def test_a_full_disk_on_either_side_is_one_line(remote, there, monkeypatch):
    def full_there(name, folder):
        (folder / f"{name}.error").write_text("write: [Errno 28] No space left on device\n")
        return "silent"

    remote.servers[0].before = full_there
    assert f"{there} on {socket.gethostname()} ({remote.url}): the disk is full. Make room" in remote()
    remote.servers[0].before = lambda name, folder: None

    write = os.pwrite
    def full_here(file, data, at):  # noqa: E306
        if os.readlink(f"/proc/self/fd/{file}").endswith("s07.safetensors.part"):
            raise OSError(28, "No space left on device")
        return write(file, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full_here)
        assert f"{remote.folder}: the disk is full. Make room" in remote()
    assert remote() == "" and remote.quarantine() == {} and not files_in(there)


# ---- what breaks on the way ----
class Cutting:
    """A proxy that closes a connection after as many bytes of answers as `budgets` says, one after the other; later ones stay."""

    def __init__(self, port: int, budgets: list[int]):
        self.port, self.budgets, self.passed = port, budgets, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                upstream = socket.create_connection(("127.0.0.1", self.port))
                for source, sink, answers in ((client, upstream, False), (upstream, client, True)):
                    threading.Thread(target=self.pump, args=(source, sink, answers), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        budget = self.budgets.pop(0) if answers and self.budgets else 1 << 60
        with contextlib.suppress(OSError):
            while data := source.recv(min(1 << 16, budget)):
                sink.sendall(data)
                budget -= len(data)
                self.passed += len(data) * answers
                if not budget:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def test_a_broken_connection_is_taken_up_where_it_broke(there, tmp_path):
    name, ids = run_prefix(tmp_path, remote=True) + "1-1.1", list(range(4096))
    data = captured("big", 5, ids, "1,2,3", width=64)  # 4 MB
    (there / name).mkdir(parents=True)
    (there / name / "big.safetensors").write_bytes(data)
    with offered(there) as server:
        proxy = Cutting(server.server_port, [50, len(data) // 3, len(data) // 2])  # amid a header's header, and twice amid the states
        source = Source(proxy.url, TOKEN, 5)
        source.bring(name, "big", tmp_path / "here", lambda: False)
        assert (tmp_path / "here/big.safetensors").read_bytes() == data and len(files_in(tmp_path / "here")) == 1
        assert proxy.passed < 1.1 * len(data)
        source.drop(name, "big")
        assert not files_in(there)
        proxy.close()


def test_what_arrives_with_another_checksum_is_fetched_and_then_captured_again(remote, monkeypatch):
    monkeypatch.setattr(extraction.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.1)))
    seen = []

    def before(name, folder):
        seen.append(name)
        if name == "s05" and seen.count(name) == 1:
            folder.mkdir(exist_ok=True)
            data = bytearray(captured(name, 3, [5, 6, 7, 0, 0, 0, 0], "1,2,3"))
            data[-1] ^= 1
            (folder / f"{name}.safetensors").write_bytes(data)
            return "silent"
        return None

    remote.servers[0].before = before
    assert remote() == "" and remote.quarantine() == {} and seen.count("s05") == 2 and len(seen) == 21


def test_a_states_server_that_stays_away_is_one_line(remote):
    port = free_port()
    server = offer(remote.servers[0].folder, port)
    remote.servers[0].before = lambda name, folder: server.kill() or server.wait() and None if name == ORDER[3] else None
    said = remote("--states-url", f"http://127.0.0.1:{port}", "--server-wait", 1, "--concurrency", 1)
    assert f"http://127.0.0.1:{port}: away for 1 s. Start scripts/offer_states.py on that host again" in said
    assert remote.quarantine() == {} and landed(remote.folder) == 3


def test_a_states_server_that_hangs_is_away_and_no_sample_is_blamed(tmp_path, monkeypatch):
    """Stopped, say: its kernel takes connections, and nobody answers."""
    monkeypatch.setattr(states_client, "SILENT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(f"http://127.0.0.1:{silent.getsockname()[1]}", TOKEN, 1)
        with pytest.raises(UserError, match="away for 1 s. Start scripts/offer_states.py"):
            source.bring("0123456789ab-1.1", "x", tmp_path / "here", lambda: False)
    assert not files_in(tmp_path)


# ---- what is killed ----
def offer(there: Path, port: int) -> subprocess.Popen:
    """scripts/offer_states.py, once it listens."""
    process = subprocess.Popen([sys.executable, str(ROOT / "scripts/offer_states.py"), "--capture-dir", str(there), "--port", str(port),
                                "--token-env", "STATES_TOKEN"], stdout=subprocess.PIPE, text=True)
    assert f"offering {there} at http://127.0.0.1:{port}" in process.stdout.readline()
    return process


def landed(folder: Path) -> int:
    return len(list(folder.glob("??/*.safetensors")))


def test_either_side_killed_the_same_command_ends_in_the_same_files(stage, there, tmp_path):  # noqa: F811
    """The states server amid the run, which goes on when it is back; then 03, which is given the same command again."""
    assert stage() == ""
    port = free_port()
    remote = Remote(tmp_path / "here", there, f"http://127.0.0.1:{port}")
    remote.servers[0].before = lambda name, folder: time.sleep(0.1)
    command = [sys.executable, "-u", str(ROOT / "03_extract.py"), *map(str, remote.arguments("--concurrency", 2))]
    servers = [offer(there, port)]
    try:
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        for count, kill in ((4, lambda: servers[-1].send_signal(signal.SIGKILL)), (10, process.kill)):
            deadline = time.monotonic() + 30
            while landed(remote.folder) < count:
                assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.005)
            kill()
            if count == 4:
                servers[-1].wait()
                time.sleep(0.5)
                servers.append(offer(there, port))
        assert process.wait() == -signal.SIGKILL and 10 <= landed(remote.folder) < 20
        said = (tmp_path / "log").read_text()
        assert "is away (" in said and f"http://127.0.0.1:{port} is back after" in said
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        servers[-1].terminate()
        assert servers[-1].wait(10) == 0
    finally:
        for process in servers:
            process.kill()
        remote.servers[0].close()
    assert samples(remote.folder) == samples(stage.folder)
    assert not files_in(there) and not files_in(remote.incoming)


# ---- who may ask for what ----
@pytest.mark.parametrize("path", ["/states/../../secret", "/states/0123456789ab-1.1/..%2f..%2fsecret", "/states/..%2f/x", "//etc/passwd",
                                  "/states/0123456789ab-1.1/../x", "/states/other/x", "/runs/", "/runs/0123456789a", "/runs/0123456789ab-/..",
                                  "/runs/.*", "/states/0123456789ab-1.1/x.safetensors/", "/states/0123456789ab-" + "x" * 61 + "/x", "/x"])
def test_no_path_leads_out_of_the_folder(there, path):
    there.mkdir(parents=True)
    for outside in (there.parent / "secret", there.parent / "secret.safetensors", there / "x.safetensors"):
        outside.write_text("secret")
    before = files_in(there.parent)
    with offered(there) as server:
        for method in ("GET", "DELETE"):
            assert asked(server, method, path)[0] == 400
    assert files_in(there.parent) == before


def asked(server: StatesServer, method: str, path: str, token: str | None = TOKEN) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={"Authorization": f"Bearer {token}"} if token is not None else {})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_links_are_not_followed_and_without_the_token_nothing_happens(there, tmp_path):
    run = "0123456789ab-1.1"
    (there / run).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    for path in (tmp_path / "outside/x.safetensors", there / run / "x.safetensors"):
        path.write_text("states")
    (there / run / "link.safetensors").symlink_to(tmp_path / "outside/x.safetensors")
    (there / "0123456789ab-2.1").symlink_to(tmp_path / "outside")
    os.mkfifo(there / run / "pipe.safetensors")
    with offered(there) as server:
        for token in (None, "", "another", TOKEN + "x", TOKEN[:-1]):
            for method, path in (("GET", "/"), ("GET", f"/states/{run}/x"), ("DELETE", f"/states/{run}/x"), ("DELETE", "/runs/0123456789ab-")):
                assert asked(server, method, path, token)[0] == 401
        assert asked(server, "GET", f"/states/{run}/x") == (200, b"states")
        for path in (f"/states/{run}/link", "/states/0123456789ab-2.1/x", f"/states/{run}/pipe", f"/states/{run}/none"):
            assert asked(server, "GET", path)[0] == 404
        assert asked(server, "DELETE", "/states/0123456789ab-2.1/x")[0] == 200
        assert asked(server, "DELETE", "/runs/0123456789ab-")[0] == 200
    assert [path.name for path in files_in(tmp_path / "outside")] == ["x.safetensors"] and not (there / run).exists()


@pytest.mark.parametrize("flags, words", [
    (["--token-env", "NO_SUCH"], "--token-env NO_SUCH: this variable is empty"),
    (["--capture-dir", "/proc/none"], "--capture-dir /proc/none: "), (["--port", "70000"], ":70000: "), (["--host", "192.0.2.1"], "192.0.2.1:")])
def test_what_cannot_be_offered_is_one_line(there, flags, words):
    argv = ["--capture-dir", str(there), "--port", "0", "--token-env", "STATES_TOKEN", *flags]
    done = subprocess.run([sys.executable, str(ROOT / "scripts/offer_states.py"), *argv], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_only_a_whole_file_is_ever_in_place(there, tmp_path):
    """An answer that ends early without an end leaves nothing behind."""
    name = run_prefix(tmp_path, remote=True) + "1-1.1"
    (there / name).mkdir(parents=True)
    (there / name / "x.safetensors").write_bytes(captured("x", 3, [1] * 500, "1,2,3"))
    with offered(there) as server:
        proxy = Cutting(server.server_port, [3000] * 99)
        source = Source(proxy.url, TOKEN, 1)
        calls = iter(range(99))
        source.bring(name, "x", tmp_path / "here", lambda: next(calls) > 3)
        assert not files_in(tmp_path / "here")
        proxy.close()
        source.hang_up()
        with pytest.raises(Away):
            source.left(run_prefix(tmp_path, remote=True))
