"""03 where something is wrong: servers that ask for a key, hang, die of a row or came back with other weights, disks that
damage journals or know no locks, states that are not what they are called. Each ends in its right place, in one line."""
import errno
import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from eagle3 import extraction, layer_stats, prefill_server
from eagle3.journal import Journal, Tail, read_plan
from eagle3.samples import Sample
from eagle3.stage import UserError, lock_file, open_stage
from eagle3.states import StateFile, sample_path
from stand_in import StandIn, captured, write_responses
from test_extract import ORDER, Stage, arguments, contents, restamp, rewrite, stage  # noqa: F401  stage: a fixture

IDS = [5, 6, 7, 0, 0, 0, 0]  # of each of a Stage's samples
NAMES = [f"s{number:02d}" for number in range(20)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Silence is noticed soon."""
    monkeypatch.setattr(prefill_server, "SILENT_S", 0.3)
    monkeypatch.setattr(prefill_server, "HEALTH_S", 0.5)


def line(stage, *more) -> str:
    """What 03 ends with where it refuses: one line, nobody blamed."""
    said = stage(*more)
    assert said and stage.quarantine() == {}, said
    return said


# ---- a key ----
def test_a_server_with_a_key(stage, monkeypatch):
    server = stage.servers[0]
    server.key = "sk-very-secret-1"
    assert "Name the variable that holds its key with --api-key-env" in line(stage) and server.asked == []
    monkeypatch.setenv("SOME_KEY", "sk-very-wrong-2")
    assert "The key that --api-key-env names is not this server's" in line(stage, "--api-key-env", "SOME_KEY")
    monkeypatch.setenv("SOME_KEY", f" {server.key}\r\n")  # as `cat` of a file makes it
    assert stage("--api-key-env", "SOME_KEY") == "" and stage.quarantine() == {} and len(server.asked) == 20
    written = [path for path in stage.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if b"very-secret" in path.read_bytes()] and "very-secret" not in stage.out


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_ends_amid_the_run(stage, monkeypatch, status):
    """It ends the run; no sample is put aside for it, and the same command goes on with the new key."""
    server = stage.servers[0]
    server.before = lambda name, folder: (status, {"error": "key expired"}) if name in ORDER[10:] else None
    said = line(stage, "--concurrency", 1)
    assert f"HTTP {status}" in said and "key expired" in said and server.asked == ORDER[:11]
    server.before = lambda name, folder: None
    assert stage() == "" and "in place 10 " in stage.out


@pytest.mark.parametrize("value, words", [(None, "this variable is empty"), ("  ", "this variable is empty"),
                                          ("sk-a\nb", "no HTTP header can carry"), ("schlüssel", "no HTTP header")])
def test_a_key_that_cannot_be_one(stage, monkeypatch, value, words):
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    assert words in line(stage, "--api-key-env", "SOME_KEY") and stage.servers[0].asked == []


@pytest.mark.parametrize("status", [404, 405, 308, 302, 501, 410])
def test_an_address_that_is_no_sglang_ends_the_run(stage, status):
    stage.servers[0].before = lambda name, folder: (status, {"detail": "Not Found"})
    assert f"no SGLang answers there (HTTP {status}" in line(stage)


# ---- ids ----
def with_ids(stage, **largest: int) -> None:
    """Responses of the stage, in which the samples named so hold such an id."""
    shutil.rmtree(stage.responses)
    write_responses(stage.responses, [{"id": name, "prompt_ids": IDS[:3], "response_ids": [0, 0, largest.get(name, 0), 0]}
                                      for name in NAMES])


def target(folder: Path, vocab_size: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 8, "vocab_size": vocab_size}}))
    return folder


@pytest.mark.parametrize("known_by", ["--verifier-path", "/model_info", "/get_model_info"])
def test_a_row_with_ids_beyond_the_vocabulary_is_not_sent(stage, tmp_path, known_by):
    """It would end the server's scheduler, and the next one's."""
    with_ids(stage, s03=2432, s11=2431)
    folder, server, flags = target(tmp_path / "target", 2432), stage.servers[0], []
    if known_by == "--verifier-path":
        flags = [known_by, folder]
    else:
        server.get = lambda path: ((200, {"model_path": str(folder)}) if path == known_by else
                                   (404, {}) if path.endswith("model_info") else (200, {}))
    assert stage(*flags) == "" and stage.quarantine() == {"s03": "ids beyond the vocabulary"}
    assert sorted(server.asked) == [name for name in NAMES if name != "s03"]
    assert "token 2432, the target has 2432" in stage.out
    counts = json.loads((stage.folder / "manifest.json").read_text())["counts"]
    assert counts["kept"] == 19 and counts["dropped"] == {"ids beyond the vocabulary": 1}


def test_rows_of_another_tokenizer_are_refused_as_a_whole(stage, tmp_path):
    with_ids(stage, **{name: 9000 + number for number, name in enumerate(NAMES[4:])})
    said = line(stage, "--verifier-path", target(tmp_path / "target", 2432))
    first = next(name for name in ORDER if name in NAMES[4:])
    assert f"16 of 20 samples hold tokens beyond the target's vocabulary of 2,432 ({first}: {9000 + NAMES[4:].index(first)})" in said
    assert stage.servers[0].asked == []


def test_ids_beyond_a_cut_do_not_count_and_an_unknown_vocabulary_is_told(stage, tmp_path):
    with_ids(stage, s03=5000)  # at position 5
    folder = target(tmp_path / "target", 2432)
    assert stage("--verifier-path", folder, "--max-length", 5) == "" and stage.quarantine() == {}
    shutil.rmtree(stage.folder)
    assert stage() == "" and "token ids are not checked" in stage.out and "s03" in stage.servers[0].asked


# ---- what a server takes ----
LIMITED = {"/server_info": {"max_req_input_len": 7, "max_total_num_tokens": 13, "context_length": None},
           "/v1/models": {"data": [{"id": "x", "max_model_len": 20}]}}


def test_samples_longer_than_the_server_takes_are_not_sent(stage):
    """Few are left out by name, many end the run before anything is sent; of two servers the smaller one counts."""
    shutil.rmtree(stage.responses)
    write_responses(stage.responses, [{"id": name, "prompt_ids": [5], "response_ids": [0] * (7 if name == "s03" else 5)}
                                      for name in NAMES])
    server = stage.servers[0]
    server.get = lambda path: (200, LIMITED.get(path, {}))
    assert stage() == "" and stage.quarantine() == {"s03": "longer than the server takes"}
    assert sorted(server.asked) == [name for name in NAMES if name != "s03"]
    assert f"limits of {server.url} | context 20, KV pool 13, longest sample that it takes 6\n" in stage.out
    assert f"quarantined s03: longer than the server takes: 8 tokens, {server.url} takes 6" in stage.out
    shutil.rmtree(stage.folder)
    stage.servers.append(StandIn(stage.incoming))
    stage.servers[1].get = lambda path: (200, {"data": [{"max_model_len": 6}]} if path == "/v1/models" else {})
    said = line(stage)
    assert said.startswith(f"{stage.servers[1].url} takes samples of up to 5 tokens (context 6, longest") and not stage.servers[1].asked
    assert "20 of 20 are longer, s03 with 8 the longest" in said and "cut with --max-length 5" in said
    assert stage("--max-length", 5) == "" and len(server.asked + stage.servers[1].asked) == 19 + 20


def dies_of(server: StandIn, *poison: str):
    """The server ends, for good, when it gets one of these; what is in flight with it is lost too."""
    dead = threading.Event()

    def before(name, folder):
        if name in poison:
            time.sleep(0.2)  # others come in
            server.http.socket.close()  # nobody gets in any more when those who wait are told
            dead.set()
            threading.Thread(target=server.close).start()
        elif not dead.is_set():
            dead.wait(0.05)
        if dead.is_set():
            raise ConnectionAbortedError

    server.before = before


def test_a_row_that_kills_every_server_is_set_aside_after_two(stage):
    """Over restarts of both: once among others, once alone; those that were in flight with it go through."""
    asked = []
    for restart in range(3):
        if restart:
            stage.servers[0] = StandIn(stage.incoming)
        dies_of(stage.servers[0], "s05")
        said = stage("--server-wait", 0.5, "--concurrency", 6)
        asked.append(stage.servers[0].asked)
        if not said:
            break
        assert "away for 0 s" in said or "no server answers" in said, said
    assert restart == 2 and stage.complete()
    assert [names.count("s05") for names in asked] == [1, 1, 0]
    assert stage.quarantine() == {"s05": f"the server died {extraction.DEATHS} times"}
    assert len(list(stage.folder.rglob("*.safetensors"))) == 19 and not (stage.folder / "deaths.jsonl").exists()


def test_redo_gives_a_killer_two_more_tries(stage):
    (stage.folder).mkdir()
    (stage.folder / "deaths.jsonl").write_text('{"id": "s05"}\n{"id": "s06"}\n{"id": "s0')  # torn by a kill
    stage.servers[0].before = lambda name, folder: (400, {}) if name == "s07" else None
    assert stage("--max-failed", 0.1) == "" and stage.quarantine() == {"s07": "rejected by the server"}
    stage.servers[0].before = lambda name, folder: None
    (stage.folder / "deaths.jsonl").write_text('{"id": "s07"}\n')
    assert stage("--redo-failed") == "" and stage.complete() and stage.quarantine() == {}
    assert not (stage.folder / "deaths.jsonl").exists()


def test_a_suspect_goes_alone(stage):
    """While one that saw a server die is in flight, nothing else is."""
    server, beside = stage.servers[0], {}
    (stage.folder).mkdir()
    (stage.folder / "deaths.jsonl").write_text('{"id": "s05"}\n{"id": "s06"}\n')

    def before(name, folder):
        time.sleep(0.05)
        beside[name] = max(beside.get(name, 0), server.in_flight)

    server.before = before
    assert stage("--concurrency", 8) == "" and stage.quarantine() == {}
    assert beside["s05"] == beside["s06"] == 1 and server.most > 1


def test_a_death_after_the_answer_counts_too(stage, monkeypatch):
    """A server that answers, dies while it writes the file, and does so each time."""
    server, deaths = stage.servers[0], []

    def probe(self):
        if deaths and deaths.pop():
            self.lost(ConnectionRefusedError("as a server that died"))
        else:
            self.away_since, self.gone = None, False

    def before(name, folder):
        if name == "s05":
            deaths.append(name)
            return "silent"

    server.before = before
    monkeypatch.setattr(prefill_server.Server, "probe", probe)
    assert stage("--concurrency", 1) == "" and stage.quarantine() == {"s05": "the server died 2 times"}
    assert server.asked.count("s05") == 2


# ---- a scheduler that hangs ----
def hangs(server: StandIn, at: str, until: threading.Event, health):
    """From `at` on neither requests nor /health_generate are answered, until the event; `health`: what the latter gets,
    or "wait"."""
    stands = threading.Event()

    def before(name, folder):
        if name == at:
            stands.set()
        if stands.is_set():
            until.wait(30)

    def get(path):
        if stands.is_set() and not until.is_set() and path == "/health_generate":
            if health == "wait":
                until.wait(30)
            else:
                return health, {}
        return 200, {}

    server.before, server.get = before, get


@pytest.mark.parametrize("health", [503, "wait"])
@pytest.mark.parametrize("patience", ["--request-timeout=900", "--request-timeout=0.6"])
def test_a_scheduler_that_hangs_is_waited_for(stage, health, patience):
    """As a server that is away; however often its requests run out of time meanwhile, no sample is blamed."""
    goes_on = threading.Event()
    hangs(stage.servers[0], "s05", goes_on, health)
    threading.Timer(4, goes_on.set).start()
    assert stage(patience) == "" and stage.quarantine() == {}
    assert "is away (connected, but /health_generate" in stage.out and " is back after " in stage.out
    assert not (stage.folder / "deaths.jsonl").exists()


def test_a_scheduler_that_hangs_for_ever_ends_the_run_in_one_line(stage):
    hangs(stage.servers[0], "s05", never := threading.Event(), 503)
    assert "away for 1 s. Start the server again" in line(stage, "--server-wait", 1, "--request-timeout", 0.6)
    never.set()
    assert stage() == "" and stage.quarantine() == {}


def test_a_server_that_is_loading_is_waited_for(stage, monkeypatch):
    """It does not listen, then it says 503, then it is ready: a line now and then, and everything is extracted."""
    monkeypatch.setattr(prefill_server, "LINE_S", 0.8)
    server = stage.servers[0]
    server.http.server_close(), server.http.shutdown()
    stage.servers[0] = loading = StandIn.__new__(StandIn)  # nobody listens at its port until it begins
    loading.url = server.url

    def load():
        time.sleep(1.5)
        StandIn.__init__(loading, stage.incoming, port=server.http.server_port)
        warm = time.monotonic() + 1.5
        loading.get = lambda path: (503 if "health" in path and time.monotonic() < warm else 200, {})

    threading.Thread(target=load).start()
    assert stage() == "" and len(loading.asked) == 20 and stage.quarantine() == {}
    lines = [text for text in stage.out.splitlines() if "waiting for a server to be ready | " in text]
    assert 2 <= len(lines) <= 6 and "no server answers there (ConnectionRefusedError) | 0s of 30m00s (--server-wait)" in lines[0]
    assert "does not answer well: HTTP 503) | " in lines[-1]


@pytest.mark.parametrize("answer, wait, words", [
    (503, 0, "not healthy (its /health_generate does not answer well: HTTP 503). Start the server, or mend --base-url"),
    (503, 0.4, "longer than 0s raise --server-wait"), (404, 60, "no SGLang answers there (it has neither"),
    (401, 60, "it asks for a key (HTTP 401)")])
def test_a_server_that_is_never_ready_is_one_line_within_the_bound(stage, answer, wait, words):
    stage.servers[0].get = lambda path: (answer if "health" in path else 200, {})
    assert words in line(stage, "--server-wait", wait) and stage.servers[0].asked == []


def test_a_host_that_is_none_is_not_waited_for(stage):
    said = line(stage, "--base-url", "http://no.such.host.invalid:30000")
    assert "http://no.such.host.invalid:30000: no such host" in said and stage.servers[0].asked == []


def test_a_proxy_that_knows_no_health_generate_is_asked_for_health(stage):
    stage.servers[0].get = lambda path: (404 if path == "/health_generate" else 200, {})
    assert stage() == ""


def test_one_slow_request_is_not_a_hang(stage):
    """The scheduler answers health checks while it works."""
    stage.servers[0].before = lambda name, folder: time.sleep(1.5 if name == "s05" else 0)
    assert stage("--concurrency", 1) == "" and "is away" not in stage.out


def test_a_file_that_a_hung_scheduler_owes_is_waited_for(stage, monkeypatch):
    """It answered, and stopped before the file was written."""
    goes_on, server = threading.Event(), stage.servers[0]
    monkeypatch.setattr(extraction, "FIRST_FILE_S", 0.4)
    monkeypatch.setattr(extraction, "NEXT_FILE_S", 0.6)

    def before(name, folder):
        if name == "s05" and not goes_on.is_set():
            def later():
                goes_on.wait(30)
                (folder / "s05").write_bytes(captured("s05", 3, IDS, "1,2,3"))
                (folder / "s05").rename(folder / "s05.safetensors")
            threading.Thread(target=later, daemon=True).start()
            return "silent"

    server.before = before
    server.get = lambda path: (200 if goes_on.is_set() or "s05" not in server.asked else 503, {})
    threading.Timer(3, goes_on.set).start()
    assert stage("--concurrency", 1) == "" and stage.quarantine() == {} and "is away" in stage.out
    assert server.asked.count("s05") == 1


# ---- a disk that stands still, a queue that stays full ----
def stalls(name: str, times: int):
    left = [times]

    def before(sample_id, folder):
        if sample_id == name and left[0]:
            left[0] -= 1
            (folder / f"{sample_id}.error").write_text("stalled: no write ended in 100 s, the disk stands still\n")
            return "silent"

    return before


def test_a_disk_that_stands_still_is_waited_for_and_nobody_blamed(stage):
    stage.servers[0].before = stalls("s05", 2)
    assert stage() == "" and stage.quarantine() == {} and "is busy (no write ended in 100 s" in stage.out
    assert stage.servers[0].asked.count("s05") == 3


@pytest.mark.parametrize("trouble", ["disk", "queue"])
def test_trouble_that_stays_ends_the_run_and_not_the_sample(stage, trouble):
    full = (503, {"message": "queue full"})
    stage.servers[0].before = stalls("s05", 99) if trouble == "disk" else lambda name, folder: full
    said = line(stage, "--server-wait", 1)
    assert said.startswith("busy for 1 s: ") and "with --server-wait" in said
    assert ("the disk stands still" if trouble == "disk" else "queue full") in said
    stage.servers[0].before = lambda name, folder: None
    assert stage() == ""


# ---- file systems without locks ----
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(stage, tmp_path, monkeypatch, number):
    """A second process of this machine is still kept out; what cannot be known is said."""
    real, mine = fcntl.flock, tmp_path / "tmp"
    mine.mkdir()
    monkeypatch.setenv("TMPDIR", str(mine))
    monkeypatch.setattr("tempfile.tempdir", None)

    def flock(file, how):
        if Path(file.name).is_relative_to(stage.folder) and file.mode == "w":  # not let_go's
            raise OSError(number, os.strerror(number))
        return real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert stage("--limit", 2) == ""
    assert f"this file system has no locks ({os.strerror(number)})" in stage.out and "another machine" in stage.out
    first = lock_file(stage.folder / ".lock")
    assert lock_file(stage.folder / ".lock") is None
    with pytest.raises(UserError, match="another process is writing there"):
        open_stage(stage.folder, {}, set())
    assert lock_file(tmp_path / "hidden_states/.follow.lock") is not None  # each lock has its own stand-in
    first.close()
    lock_file(stage.folder / ".lock").close()
    assert len(list(mine.glob("eagle3-*.lock"))) == 2


def test_other_troubles_with_a_lock_are_one_line(stage, monkeypatch):
    def flock(file, how):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(UserError, match="cannot be written to"):
            open_stage(stage.folder, {}, set())


# ---- a server that came back with other weights ----
FIRST, OTHER = {"weights": "embed:aa head:bb norm:cc layers:dd"}, {"weights": "embed:aa head:99 norm:cc layers:88"}


def half(stage, metadata: dict) -> None:
    """The folder with ten samples in place, from a server of these weights."""
    server = stage.servers[0]
    server.metadata, server.before = metadata, lambda name, _: (401, {}) if name in ORDER[10:] else None
    assert "asks for a key" in stage("--concurrency", 1)
    server.before = lambda name, _: None


def test_a_server_with_other_weights_of_the_same_name_is_refused(stage):
    half(stage, FIRST)
    stage.servers[0].metadata = OTHER
    said = line(stage)
    assert "was captured from other weights of stub than the folder's (head, layers differ)" in said
    assert "Start the server as the run began, or use another --output-dir" in said
    assert len(list(stage.folder.glob("??/*.safetensors"))) == 10
    stage.servers[0].metadata = FIRST | {"weights": "embed:aa norm:cc"}  # one that sees less, or loads with more ranks
    assert stage() == "" and "in place 10 " in stage.out
    assert json.loads((stage.folder / "manifest.json").read_text())["weights"] == FIRST["weights"]


def test_a_folder_without_fingerprints_goes_on_and_has_one_from_then_on(stage):
    half(stage, {})
    stage.servers[0].metadata, stage.servers[0].before = FIRST, lambda name, _: (401, {}) if name in ORDER[15:] else None
    assert "asks for a key" in stage("--concurrency", 1)
    stage.servers[0].metadata, stage.servers[0].before = OTHER, lambda name, _: None
    assert "head, layers differ" in line(stage)
    stage.servers[0].metadata = FIRST
    assert stage("--verify") == "" and stage.complete()
    assert json.loads((stage.folder / "manifest.json").read_text())["weights"] == FIRST["weights"]


def test_verify_finds_a_sample_of_other_weights(stage):
    stage.servers[0].metadata = FIRST
    assert stage() == ""
    sample_path(stage.folder, "s04").write_bytes(captured("s04", 3, IDS, "1,2,3", **OTHER))
    restamp(stage.folder)
    assert "1 of 20 samples failed (was captured from other weights of stub than the folder's: 1)" in stage("--verify")
    assert list(json.loads((stage.folder / "verify.json").read_text())["failed"]) == ["s04"]


def test_two_servers_of_other_weights_do_not_mix(stage):
    stage.servers.append(StandIn(stage.incoming))
    stage.servers[0].metadata, stage.servers[1].metadata = FIRST, OTHER
    assert "was captured from other weights of stub" in line(stage)
    weights = set()
    for path in stage.folder.glob("??/*.safetensors"):
        with StateFile(path) as file:
            weights.add(file.metadata["weights"])
    assert len(weights) <= 1


# ---- damaged journals ----
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete stage that nobody changes."""
    made = Stage(tmp_path_factory.mktemp("whole"))
    made.servers[0].metadata = FIRST
    assert made() == ""
    made.servers[0].close()
    return made


@pytest.fixture
def copied(whole, stage):
    """The same, to be damaged; not complete any more, so that the journal counts."""
    shutil.copytree(whole.folder, stage.folder)
    (stage.folder / "manifest.json").unlink()
    stage.servers[0].metadata = FIRST
    return stage


def index(folder: Path, next_tokens: bool = True) -> list[dict]:
    rows = [json.loads(row) for row in (folder / "index.jsonl").read_text().splitlines()]
    return rows if next_tokens else [{**row, "next_token": None} for row in rows]


def line_at(data: bytes, number: int) -> tuple[int, int]:
    """(first byte, byte after the line end) of line `number`, from 1."""
    ends = [0] + [at + 1 for at, byte in enumerate(data) if byte == 10]
    return ends[number - 1], ends[number]


def damages(data: bytes):
    """(name, landed.jsonl damaged in one place)"""
    first, end = line_at(data, 5)
    row = data[first:end]
    yield "NULs", data[:first] + bytes(len(row) - 1) + b"\n" + data[end:]
    yield "no line end", data[:end - 1] + b"x" + data[end:]
    yield "line end within", data[:first + 40] + b"\n" + data[first + 41:]
    yield "carriage return", data[:first + 40] + b"\r" + data[first + 41:]
    yield "not utf-8", data[:first + 9] + b"\xff\xfe" + data[first + 11:]
    yield "half a line", data[:first] + row[:60] + b"\n" + data[end:]
    yield "empty line", data[:first] + b"\n" + data[first:]
    yield "an array", data[:first] + b"[1, 2]".ljust(len(row) - 1) + b"\n" + data[end:]
    yield "other keys", data[:first] + row.replace(b"checksum", b"chexksum") + data[end:]
    yield "another number", data[:first] + row.replace(b'"tokens": 7', b'"tokens": 3') + data[end:]
    yield "the facts", b"{" + b"!" + data[2:]
    yield "the last", data[:-30] + b"!" + data[-29:]
    yield "torn", data[:-30]
    yield "three blocks", data[:first] + bytes(600) + data[first + 600:]
    yield "everything", b"\0" * len(data)
    yield "nothing left", b""


@pytest.mark.parametrize("name", [name for name, _ in damages(b'{"facts": 1}\n' + b"x" * 200 + b"\n" * 40)])
def test_a_damaged_journal_is_made_anew_from_the_files(copied, whole, name):
    """Nothing is asked for again, and the index is the same, but for tokens that nobody can know any more."""
    path = copied.folder / "landed.jsonl"
    path.write_bytes(dict(damages(path.read_bytes()))[name])
    assert copied() == "" and copied.servers[0].asked == []
    assert index(copied.folder, False) == index(whole.folder, False)
    known = sum(row["next_token"] is not None for row in index(copied.folder))
    assert known >= (0 if name in ("everything", "nothing left") else 16 if name == "three blocks" else 19)
    manifests = [json.loads((stage.folder / "manifest.json").read_text()) for stage in (copied, whole)]
    assert [manifest["weights"] for manifest in manifests] == [FIRST["weights"]] * 2
    (copied.folder / "manifest.json").unlink()  # and again: what was mended is whole
    assert copied("--verify") == "" and copied.servers[0].asked == []
    assert "lines damaged" not in copied.out and "made anew" not in copied.out
    rows = list(Tail(path).new_rows())
    assert rows[-1] and {row["id"] for row in rows if "id" in row} == set(NAMES)


def test_each_byte_of_a_line_may_be_damaged(copied, whole, capsys):
    """Whatever bit of it flips: each sample is in place, none is taken for another."""
    path, usual = copied.folder / "landed.jsonl", index(whole.folder, False)
    data = path.read_bytes()
    samples = [Sample(name, 0, 0, 3, 7, False, 7) for name in NAMES]
    first, end = line_at(data, 5)
    for at in range(first, end):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 7]) + data[at + 1:])
        found = Journal(copied.folder)
        assert all(found.in_place(sample, lambda: IDS) for sample in samples), at
        found.write_index(NAMES)
        assert index(copied.folder, False) == usual, at
        found.file.close()


def test_a_redo_that_was_damaged_still_counts(copied):
    """A file that was found bad does not come back because the line that took it back is illegible."""
    path, bad = copied.folder / "landed.jsonl", sample_path(copied.folder, "s05")
    redo = b'{"id": "s05", "redo": trve}\n'
    path.write_bytes(path.read_bytes() + redo)
    assert bad.exists()  # killed before it was removed
    assert copied() == "" and copied.servers[0].asked == ["s05"]
    path.write_bytes(path.read_bytes().replace(b'"redo": true', b'"redo": trve', 1))  # and one that came again since
    (copied.folder / "manifest.json").unlink()
    assert copied() == "" and copied.servers[0].asked == ["s05"]


def test_a_follower_misses_nothing_of_a_mended_journal(copied):
    """04 reads by offsets, from before the damage or behind it."""
    path = copied.folder / "landed.jsonl"
    data = path.read_bytes()
    first, end = line_at(data, 5)
    damaged = json.loads(data[first:end])["id"]
    path.write_bytes(data[:first + 3] + b"\n!" + data[first + 5:])
    early, late = Tail(path), Tail(path)
    list(late.new_rows())
    assert copied() == ""
    assert {row["id"] for row in early.new_rows() if "id" in row} == set(NAMES)
    assert [row["id"] for row in late.new_rows()] == [damaged]


def test_a_released_sample_whose_line_is_damaged_counts_as_extracted(stage):
    """Bounded mode: its file is gone, but what 04 wrote down of it is enough."""
    stage.servers[0].metadata = FIRST
    assert stage("--max-disk-gb", 1) == ""
    rows = index(stage.folder)
    released = [row for row in rows if row["id"] in ("s02", "s09")]
    (stage.folder / "released.jsonl").write_text("".join(
        json.dumps({"id": row["id"], "checksum": row["checksum"]}) + "\n" for row in released) + "{damaged}\n")
    for row in released:
        sample_path(stage.folder, row["id"]).unlink()
    (stage.folder / "manifest.json").unlink()
    path, asked = stage.folder / "landed.jsonl", len(stage.servers[0].asked)
    path.write_bytes(path.read_bytes().replace(b'{"id": "s09", "tokens"', b'{"id": "s09", "t0kens"'))
    assert stage("--max-disk-gb", 1) == "" and len(stage.servers[0].asked) == asked
    assert index(stage.folder) == rows


def test_what_04_releases_while_03_starts_is_not_extracted_again(stage, monkeypatch):
    """The first file goes right when 03 opens it, the second before 03 looks at it: both behind its reading of released.jsonl."""
    stage.servers[0].metadata = FIRST
    assert stage("--max-disk-gb", 1) == ""
    rows, asked, released = index(stage.folder), len(stage.servers[0].asked), []
    (stage.folder / "manifest.json").unlink()
    opened = StateFile.__init__

    def releases(file, path):
        if not released:
            released.extend([path.stem, rows[-1]["id"]])
            (stage.folder / "released.jsonl").write_text("".join(
                json.dumps({"id": row["id"], "checksum": row["checksum"]}) + "\n" for row in rows if row["id"] in released))
            for name in released:
                sample_path(stage.folder, name).unlink()
        opened(file, path)

    monkeypatch.setattr(StateFile, "__init__", releases)
    assert stage("--max-disk-gb", 1) == "" and len(stage.servers[0].asked) == asked
    assert len(set(released)) == 2 and index(stage.folder) == rows


@pytest.mark.parametrize("name", ["quarantine.jsonl", "deaths.jsonl", "plan.jsonl", "index.jsonl"])
def test_other_journals_that_are_damaged_do_not_end_the_run(copied, whole, name):
    (copied.folder / name).write_bytes(b'{"id": "s0\xff", "rea\n\0\0\0\n[]\n{"x": 1}\n' + b"torn")
    assert copied() == "" and copied.servers[0].asked == []
    assert index(copied.folder) == index(whole.folder) and list(read_plan(copied.folder)) == list(read_plan(whole.folder))


def test_a_file_of_another_sample_is_not_adopted(copied):
    """Only what the file says of itself counts, and whether it holds the response."""
    (copied.folder / "landed.jsonl").write_bytes(b"")
    sample_path(copied.folder, "s03").write_bytes(captured("s03", 3, [5, 6, 7, 0, 0, 0, 1], "1,2,3", **FIRST))
    sample_path(copied.folder, "s04").write_bytes(captured("s05", 3, IDS, "1,2,3", **FIRST))
    sample_path(copied.folder, "s06").write_bytes(sample_path(copied.folder, "s06").read_bytes()[:-5])
    assert copied("--concurrency", 1) == "" and sorted(copied.servers[0].asked) == ["s03", "s04", "s06"]
    assert copied("--verify") == ""


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_cannot_be_read_does_not_cost_the_samples_on_it(copied, monkeypatch, number):
    def fail(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        said = line(copied)
    assert f"cannot be read ({os.strerror(number)})" in said and copied.servers[0].asked == []
    assert copied() == "" and copied.servers[0].asked == []


@pytest.mark.parametrize("where", ["write_index", "add_sample"])
def test_any_trouble_with_the_disk_is_one_line(stage, monkeypatch, where):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/there")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, where, fail)
        assert line(stage) == "/there: Input/output error. Mend that and run the same command again."
    assert stage() == ""


# ---- --limit ----
def test_limit_may_change_in_a_folder(stage, monkeypatch):
    """Up and down, complete or not; what was extracted is not asked for again, and each end is that of a fresh folder."""
    server = stage.servers[0]
    for limit, kept, asked in ((5, 5, 5), (12, 12, 12), (0, 20, 20), (3, 3, 20), (0, 20, 20)):
        assert stage("--limit", limit) == "" and len(server.asked) == asked, limit
        manifest = json.loads((stage.folder / "manifest.json").read_text())
        assert manifest["counts"]["kept"] == len(index(stage.folder)) == len(list(read_plan(stage.folder))) == kept
        assert manifest["config"]["limit"] == limit == json.loads((stage.folder / "stage.json").read_text())["limit"]
        assert stage("--limit", limit, "--verify") == ""
    fresh = Stage(stage.folder.parent / "fresh")
    assert fresh() == ""
    differ = {name for name, digest in contents(stage.folder).items()
              if contents(fresh.folder).get(name) != digest and not name.startswith("before/")}
    fresh.servers[0].close()
    assert differ == {"verify.json", "manifest.json"}, differ
    again, once = (json.loads((run.folder / "manifest.json").read_text()) for run in (stage, fresh))
    assert [entry["kept"] for entry in again.pop("grown_from")] == [5, 12, 20, 3] and again == once


def test_samples_quarantined_beyond_the_limit_do_not_count(stage):
    stage.servers[0].before = lambda name, folder: (400, {}) if name in ("s15", "s16") else None
    assert "2 of 20 samples failed" in stage("--concurrency", 1)
    assert stage("--limit", 10) == ""
    counts = json.loads((stage.folder / "manifest.json").read_text())["counts"]
    assert counts["kept"] == 10 and counts["dropped"] == {}


def test_what_the_disk_check_advises_can_be_done(stage, monkeypatch, tmp_path):
    """In the folder that heard it: fewer samples always, shorter ones before the first has landed."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    flags = "--verifier-path", tmp_path
    monkeypatch.setattr(extraction, "free_bytes", lambda folder: 1000)
    import stand_in
    script = stand_in.load_script("03_extract")
    monkeypatch.setattr(script, "free_bytes", lambda folder: 69 * 7 * 10)  # of ten samples in bf16
    said = stage(*flags)
    assert "take fewer or shorter samples (--limit, --max-length)" in said and not stage.servers[0].asked
    monkeypatch.setattr(script, "free_bytes", lambda folder: 133 * 7 * 10)
    assert stage(*flags, "--limit", 9, "--max-length", 6) == ""
    monkeypatch.setattr(script, "free_bytes", lambda folder: 100)
    said = stage(*flags, "--max-length", 6)
    assert "take fewer samples (--limit), or begin" in said and "--max-length" not in said
    assert stage(*flags, "--limit", 9, "--max-length", 6) == ""
    assert "max_length: 6 there, 7 now" in stage(*flags, "--limit", 9, "--max-length", 7)


def test_limit_stays_in_bounded_mode(stage):
    """04 has planned its releases by the samples that there are."""
    assert stage("--max-disk-gb", 1, "--limit", 5) == ""
    assert "limit: 5 there, 6 now" in stage("--max-disk-gb", 1, "--limit", 6)


def test_a_mode_may_change_before_the_first_sample(stage):
    stage.servers[0].get = lambda path: (503, {})
    assert "not healthy" in line(stage, "--max-disk-gb", 1, "--server-wait", 0) and (stage.folder / "bound.json").exists()
    stage.servers[0].get = lambda path: (200, {})
    assert stage() == "" and not (stage.folder / "bound.json").exists()
    assert "bounded" not in json.loads((stage.folder / "manifest.json").read_text())


# ---- layers ----
def speaking_states(ids: list[int], layers: int, width: int, noise: float = 0.0, seed: int = 0):
    """Streams as a transformer has them: what a position says grows from layer to layer, around a direction of each
    depth."""
    own, stream = np.random.default_rng(seed), np.zeros((len(ids), width))
    words = np.random.default_rng(1).normal(size=(4096, width))
    found = []
    for layer in range(layers + 1):
        depth = np.random.default_rng(100 + layer)
        mixed = np.cumsum(words[np.array(ids)] @ depth.normal(size=(width, width)), 0) / np.sqrt(width)
        stream = 1.5 * stream + words[np.array(ids)] + mixed / np.arange(1, len(ids) + 1)[:, None]
        stream = stream + 4 * depth.normal(size=width) + noise * own.normal(size=stream.shape) * np.abs(stream).mean()
        found.append(stream.astype(np.float32))
    return np.concatenate(found[:-1], 1), found[-1]


WIDE = 32


@pytest.fixture
def speaking(tmp_path):
    """Twenty samples of 70 to 400 tokens, from a server whose layers say something; complete."""
    stage = Stage(tmp_path)
    chance = np.random.default_rng(7)
    rows = [{"id": name, "prompt_ids": [int(token) for token in chance.integers(0, 4096, 3)], "response_ids": [
        int(token) for token in chance.integers(0, 4096, 40 * (number % 9) + 70)]} for number, name in enumerate(NAMES)]
    shutil.rmtree(stage.responses)
    write_responses(stage.responses, rows)
    stage.servers[0].width, stage.servers[0].states = WIDE, speaking_states
    stage.rows = {row["id"]: row["prompt_ids"] + row["response_ids"] for row in rows}
    yield stage
    for server in stage.servers:
        server.close()


def layer(tensors, number: int):
    return tensors["aux_hidden_states"][:, number * WIDE:(number + 1) * WIDE]


def zeroed(tensors, metadata):
    layer(tensors, 1)[:] = 0


def zeroed_row(tensors, metadata):
    layer(tensors, 2)[10] = 0


def swapped(tensors, metadata):
    layer(tensors, 0)[:], layer(tensors, 1)[:] = layer(tensors, 1).copy(), layer(tensors, 0).copy()


def copied_layer(tensors, metadata):
    layer(tensors, 2)[:] = layer(tensors, 1)


def shifted_down(tensors, metadata):
    layer(tensors, 1)[:] = np.roll(layer(tensors, 1), 1, axis=0)


def shifted_up(tensors, metadata):
    layer(tensors, 2)[:] = np.roll(layer(tensors, 2), -1, axis=0)


def all_shifted(tensors, metadata):
    tensors["aux_hidden_states"][:] = np.roll(tensors["aux_hidden_states"], 1, axis=0)


def shifted_far(tensors, metadata):
    layer(tensors, 0)[:] = np.roll(layer(tensors, 0), 7, axis=0)


def backwards(tensors, metadata):
    layer(tensors, 0)[:] = layer(tensors, 0)[::-1].copy()


def doubled(tensors, metadata):
    layer(tensors, 1)[:] *= 4


def negated(tensors, metadata):
    layer(tensors, 0)[:] *= -1


CHANGES = {zeroed: "captured layer 2 of 3 is all zero", zeroed_row: "captured layer 3 of 3 is all zero at position 10",
           swapped: "looks like layer", copied_layer: "layer 3 looks like layer 2", shifted_far: "do not go with",
           shifted_down: "of another position", shifted_up: "of another position", all_shifted: "of another position",
           backwards: "do not go with", doubled: "layer 2 ", negated: "layer 1 "}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_verify_finds_layers_that_are_not_what_they_are_called(speaking, change):
    """Their checksums are right and their values finite."""
    assert speaking() == "" and speaking("--verify") == ""
    rewrite(sample_path(speaking.folder, "s08"), change)
    restamp(speaking.folder)
    assert "1 of 20 samples failed" in speaking("--verify") and not speaking.complete()
    failed = json.loads((speaking.folder / "verify.json").read_text())["failed"]
    assert list(failed) == ["s08"] and CHANGES[change] in failed["s08"], failed
    assert speaking("--redo-failed") == "" and speaking("--verify") == ""


def test_a_sample_of_unusual_tokens_is_not_taken_for_another_layer():
    """Nearer to another layer than to its own, but neither swapped with it nor a copy of it."""
    margin, other = np.full((20, 3), 1.0) + np.linspace(0, 0.1, 20)[:, None], np.ones((20, 3), int)
    other[:, 1] = 0
    profiles = np.tile(np.eye(3, 8), (20, 1, 1))
    margin[7, 1] = -0.6  # of unusual tokens
    assert not layer_stats.misplaced(margin, other, profiles).any()
    margin[7, 0] = -0.6  # swapped
    assert layer_stats.misplaced(margin, other, profiles)[7].tolist() == [True, True, False]
    margin[7, 0], profiles[7, 1] = 1.0, profiles[7, 0]  # a copy
    assert layer_stats.misplaced(margin, other, profiles)[7].tolist() == [False, True, False]


def test_verify_says_what_its_layers_look_like(speaking):
    assert speaking("--verify") == ""
    said = json.loads((speaking.folder / "verify.json").read_text())["layers"]
    assert list(said) == ["1", "2", "3"] and said["1"]["size"] < said["2"]["size"] < said["3"]["size"]
    for one in said.values():
        assert one["link"][1] > 2 * max(one["link"][0], one["link"][2])


def test_a_server_whose_rows_are_shifted_in_all_samples_fails_as_a_whole(speaking):
    def shifted_states(*args):
        aux, last = speaking_states(*args)
        return np.roll(aux, 1, axis=0), last

    speaking.servers[0].states = shifted_states
    said = speaking("--verify")
    assert "the rows of layer 3 resemble those of another position in the next layer" in said, said
    assert not speaking.complete()


def test_samples_that_are_merely_unlike_the_others_are_good(speaking):
    """Short ones, one token again and again, a noisy layer, half the size."""
    odd = dict(zip(("s01", "s02", "s03"), ([9] * 80, [4, 4, 4, 5], [7, 8] * 60)))
    rows = [{"id": name, "prompt_ids": (ids := odd.get(name, speaking.rows[name]))[:3], "response_ids": ids[3:]}
            for name in NAMES]
    shutil.rmtree(speaking.responses)
    write_responses(speaking.responses, rows)
    calls = iter(range(100))

    def varied(ids, layers, width):
        aux, last = speaking_states(ids, layers, width, 0.1, next(calls))
        size = np.float32(np.random.default_rng(len(ids)).uniform(0.75, 1.3))
        return aux * size, last * size

    speaking.servers[0].states = varied
    assert speaking("--verify") == ""


def test_few_samples_say_nothing_of_each_other(speaking):
    assert speaking("--limit", layer_stats.LEAST_SAMPLES - 1) == ""
    rewrite(sample_path(speaking.folder, "s08"), swapped)
    restamp(speaking.folder)
    assert speaking("--limit", layer_stats.LEAST_SAMPLES - 1, "--verify") == ""
    rewrite(sample_path(speaking.folder, "s08"), zeroed)  # what is zero is wrong in any company
    restamp(speaking.folder)
    assert "1 of 11 samples failed" in speaking("--limit", layer_stats.LEAST_SAMPLES - 1, "--verify")


# ---- --verify-again ----
def report_of(stage) -> dict:
    return json.loads((stage.folder / "verify.json").read_text())


def test_verify_again_extracts_some_anew_each_alone(speaking):
    server = speaking.servers[0]
    assert speaking("--verify-again", 5, "--concurrency", 8) == ""  # extracted, verified, and five of them again
    assert server.most > 1 and len(server.asked) == 25 and len(set(server.asked)) == 20
    before, server.most = contents(speaking.folder), 0
    assert speaking("--verify-again", 5) == "" and server.most == 1
    assert report_of(speaking)["again"] | {"largest_relative_error": 0} == {
        "samples": 5, "same_bytes": 5, "one_request_at_a_time": False, "largest_relative_error": 0}
    assert contents(speaking.folder) == before  # nothing of it stays
    assert not [path for path in speaking.incoming.rglob("*") if path.is_file()]
    assert speaking("--verify-again", 500) == "" and report_of(speaking)["again"]["samples"] == 20


def test_verify_again_allows_for_batches_and_for_no_more(speaking):
    server, calls = speaking.servers[0], iter(range(1000))
    assert speaking() == ""
    server.states = lambda *args: speaking_states(*args, noise=1e-5, seed=next(calls))
    assert speaking("--verify-again", 5) == ""
    again = report_of(speaking)["again"]
    assert again["same_bytes"] == 0 and all(0 < error < 1e-3 for error in again["largest_relative_error"].values())
    server.get = lambda path: (200, {"max_running_requests": 1})
    assert "5 of 20 samples failed (extracted again it has other bytes: 5)" in speaking("--verify-again", 5)
    server.states = lambda *args: speaking_states(*args, noise=1e-2, seed=next(calls))
    server.get = lambda path: (200, {})
    assert "5 of 20 samples failed (extracted again " in speaking("--verify-again", 5)
    assert not speaking.complete()


@pytest.mark.parametrize("change", [swapped, shifted_down, all_shifted, zeroed], ids=lambda change: change.__name__)
def test_verify_again_finds_what_is_wrong_everywhere(speaking, change):
    """Where each file was written wrong alike, their own statistics agree; a server that does it right does not."""
    def wrong(*args):
        aux, last = speaking_states(*args)
        tensors = {"aux_hidden_states": aux + np.float32(1e-3) if change is zeroed else aux}
        change(tensors, {}) if change is not zeroed else layer(tensors, 1).__imul__(np.float32(1e-3))
        return tensors["aux_hidden_states"], last

    speaking.servers[0].states = wrong
    assert speaking() == ""
    speaking.servers[0].states = speaking_states
    said = speaking("--verify-again", 3)
    failed = report_of(speaking)["failed"]
    assert said and len(failed) == 3 and all(problem.startswith("extracted again layer ") for problem in failed.values())


def test_verify_again_by_other_weights_or_without_a_server_is_one_line(speaking):
    server = speaking.servers[0]
    server.metadata = FIRST
    assert speaking() == ""
    server.metadata = OTHER
    assert "was captured from other weights of stub" in speaking("--verify-again", 2) and speaking.complete()
    server.metadata = FIRST
    server.before = lambda name, folder: (500, {"error": "broken"})
    said = speaking("--verify-again", 1)
    assert "1 of 20 samples failed (extracted again: failed 3 times: HTTP 500" in said
    assert speaking.quarantine() == {}
    server.close()
    assert "no server answers there" in speaking("--verify-again", 1, "--server-wait", 0)
    assert "--verify-again at least 0" in speaking("--verify-again", -1)
