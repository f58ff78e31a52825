"""The capture module under disks that fail, fill up or stand still: prefill goes on, each client learns its reason."""
import errno
import os
import threading
import time
import types

import pytest
import torch
from safetensors.torch import load_file

from test_capture import GOOD, H, FakeModel, batch, module, rid, rule_from_0_5_13, wait_for  # noqa: F401  module: a fixture

ROWS = 40


def feed(module, name: str, rows: int = ROWS):
    """One sample in one forward pass; (aux, last)."""
    return module.feed(batch((rid("r", range(rows), name), 0, rows)))


@pytest.fixture
def small(module, monkeypatch):
    """Two slots of 15 rows, so that a lost one would soon be missed."""
    monkeypatch.setattr(module.capture.files, "SLOT_BYTES", 4 << 10)
    monkeypatch.setenv("EAGLE3_CAPTURE_BUFFER_MB", "0")
    return module


def state(module):
    return module.capture._state


def check_all_right(module, count: int = 12) -> None:
    """Every thread and every slot still works: samples of several slots each are written, more than there are threads."""
    states = {number: feed(module, f"after{number}") for number in range(count)}
    for number, (aux, last) in states.items():
        written = load_file(wait_for(module.folder / f"after{number}.safetensors"))
        assert torch.equal(written["aux_hidden_states"], aux) and torch.equal(written["last_hidden_states"], last)
    assert all(thread.is_alive() for thread in state(module).threads)
    wait_for_slots(module)


def wait_for_slots(module) -> None:
    deadline = time.monotonic() + 20
    while state(module).free.qsize() < state(module).made:
        assert time.monotonic() < deadline, f"{state(module).free.qsize()} of {state(module).made} slots returned"
        time.sleep(0.01)


def wake(module, gate: threading.Event) -> None:
    """The disk works again, and this machine may be slow from here on."""
    state(module).patience = 60
    gate.set()
    wait_for_slots(module)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ESTALE, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("places", [["pwrite"], ["close"], ["fsync"], ["replace"], ["open"], ["preadv"],
                                    ["pwrite", "close"], ["pwrite", "unlink"], ["fsync", "close", "unlink"],
                                    ["pwrite", "close", "unlink", "replace"]], ids="+".join)
def test_a_disk_that_fails_costs_its_sample_alone(small, monkeypatch, places, number):
    """Also where clearing away fails for the same reason: quotas and stale handles speak up in close and unlink."""
    failing = [True]

    def faulty(real):
        def call(*args, **kwargs):
            mine = threading.current_thread().name == "eagle3_capture" and ".error" not in str(args[0])
            if failing[0] and mine:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)
        return call

    for place in places:
        monkeypatch.setattr(os, place, faulty(getattr(os, place)))
    for name in ("a", "b", "c"):
        feed(small, name)
        assert wait_for(small.folder / f"{name}.error").read_text() == f"write: [Errno {number}] {os.strerror(number)}\n"
    failing[0] = False
    check_all_right(small)
    left = {path.name for path in small.folder.iterdir() if path.name.endswith(".tmp")}
    assert left <= ({"a.safetensors.tmp", "b.safetensors.tmp", "c.safetensors.tmp"} if "unlink" in places else set())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error"), KeyboardInterrupt()])
def test_a_writer_survives_whatever_its_clean_up_raises(small, monkeypatch, error):
    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(small.capture.files.Sample, "remove", fail)
        patch.setattr(small.capture.files.Sample, "add", fail)
        for name in ("a", "b", "c", "d", "e"):
            feed(small, name)
        wait_for_slots(small)
    check_all_right(small)


def test_nothing_written_and_no_reason_is_an_error(small, monkeypatch):
    """A pwrite or preadv that returns 0 would be asked again for ever."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *args: 0)
        feed(small, "a")
        assert "nothing was written" in wait_for(small.folder / "a.error").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *args: 0)
        feed(small, "b")
        assert "has become shorter" in wait_for(small.folder / "b.error").read_text()
    check_all_right(small)


def test_a_header_written_in_pieces_is_whole(small, monkeypatch):
    """pwrite may write less than it is given, near the end of a quota above all."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[:100], at))
    check_all_right(small, 2)


def test_a_disk_that_stands_still_does_not_stop_prefill(small, monkeypatch):
    """Its samples are given up within the watchdog's time, the next ones at once; awake again, it loses nothing."""
    gate, real = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: gate.wait(60) and real(*args))
    monkeypatch.setattr(small.capture, "STALL_S", 0.5)
    began = time.monotonic()
    feed(small, "a")  # two slots are in flight, the rest of its rows finds none
    assert 0.4 < time.monotonic() - began < 5
    told = wait_for(small.folder / "a.error").read_text()
    assert told == f"stalled: no write ended in 0 s, the disk of {small.folder.parent} stands still\n"
    began = time.monotonic()
    for name in "bcdefgh":
        feed(small, name)
    assert time.monotonic() - began < 0.4  # no pass waits again
    for name in "bcdefgh":
        assert wait_for(small.folder / f"{name}.error").read_text().startswith("stalled: ")
    wake(small, gate)
    check_all_right(small)
    assert not list(small.folder.glob("*.tmp")) and not (small.folder / "a.safetensors").exists()


def test_other_samples_of_a_batch_that_stalls(small, monkeypatch):
    """Those whose rows found slots are written when the disk wakes up."""
    gate, real = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: gate.wait(60) and real(*args))
    monkeypatch.setattr(small.capture, "STALL_S", 0.3)
    aux, _ = small.feed(batch((rid("r", range(15), "a"), 0, 15), (rid("r", range(40), "b"), 0, 40)))
    assert wait_for(small.folder / "b.error").read_text().startswith("stalled: ")
    wake(small, gate)
    assert torch.equal(load_file(wait_for(small.folder / "a.safetensors"))["aux_hidden_states"], aux[:15])
    check_all_right(small)


def test_later_chunks_of_a_sample_that_was_given_up_say_nothing_else(small, monkeypatch):
    """The client, which is told after the last chunk, would blame the sample for rows that came after a gap."""
    gate, real = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: gate.wait(60) and real(*args))
    monkeypatch.setattr(small.capture, "STALL_S", 0.3)
    name = rid("r", range(3 * ROWS), "a")
    for chunk in range(2):
        small.feed(batch((name, chunk * ROWS, ROWS)))
    wake(small, gate)
    small.feed(batch((name, 2 * ROWS, ROWS)))  # finds slots again
    check_all_right(small)
    assert (small.folder / "a.error").read_text().startswith("stalled: no write ended")
    assert not list(small.folder.glob("a.safetensors*")) and not state(small).samples


@pytest.mark.parametrize("watchdog, patience", [(300, 100), (60, 20), (3600, 120), (None, 120), (0, 120)])
def test_patience_ends_before_the_watchdogs(module, monkeypatch, watchdog, patience):
    monkeypatch.setattr(module.capture, "server_settings", lambda: GOOD | {"watchdog_timeout": watchdog})
    feed(module, "a")
    assert state(module).patience == patience


def test_fewer_slots_where_memory_ends(small, monkeypatch):
    monkeypatch.setenv("EAGLE3_CAPTURE_BUFFER_MB", "64")
    real, made = small.capture.files.Slot, []

    def scarce(*args):
        if len(made) == 3:
            raise RuntimeError("CUDA error: out of memory (pinned)")
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(small.capture.files, "Slot", scarce)
    check_all_right(small)
    assert state(small).made == len(made) <= 3
    monkeypatch.setattr(small.capture, "_state", None)
    made[:] = [None] * 3
    with pytest.raises(small.capture.Refused, match="no memory for rows on their way to the disk"):
        feed(small, "x")


def test_a_folder_that_cannot_be_made_is_refused_in_words(module, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EAGLE3_CAPTURE_DIR", str(tmp_path / "file/incoming"))
    with pytest.raises(module.capture.Refused, match=r"EAGLE3_CAPTURE_DIR: .*/file/incoming cannot be made \(Not a dir"):
        feed(module, "a")


# ---- which weights are loaded ----
def loaded(seed: int = 0, vocabulary: int = 1000, rows: int | None = None, **replaced: torch.Tensor):
    """A model of random weights; `rows`: of its vocabulary, as the first of several ranks holds them."""
    torch.manual_seed(seed)

    def part(name: str, *shape: int):
        weight = torch.randn(shape, dtype=torch.bfloat16)
        return types.SimpleNamespace(weight=replaced.get(name, weight)[:rows if weight.dim() > 1 else None])

    model = FakeModel(rule_from_0_5_13)
    model.model.embed_tokens, model.lm_head = part("embed", vocabulary, H), part("head", vocabulary, H)
    model.model.norm = part("norm", H)
    model.model.layers = [types.SimpleNamespace(input_layernorm=part(f"layer{number}", H)) for number in range(4)]
    return model


def test_a_fingerprint_tells_weights_apart_and_not_machines():
    from conftest import load_script
    fingerprint = load_script("eagle3_capture").fingerprint
    first = fingerprint(loaded())
    assert [part.split(":")[0] for part in first.split()] == ["embed", "head", "norm", "layers"]
    assert fingerprint(loaded()) == first == fingerprint(loaded(rows=256))  # as on the first of four ranks
    assert all(a != b for a, b in zip(first.split(), fingerprint(loaded(seed=1)).split()))
    for name, size in (("embed", (1000, H)), ("head", (1000, H)), ("norm", (H,)), ("layer3", (H,))):
        other = fingerprint(loaded(**{name: torch.ones(size, dtype=torch.bfloat16)})).split()
        changed = [part.split(":")[0] for part, before in zip(other, first.split()) if part != before]
        assert changed == [name.replace("layer3", "layers")]
    assert fingerprint(FakeModel(rule_from_0_5_13)) == ""  # what cannot be seen is not said
    model = loaded()
    model.lm_head.use_intel_amx_backend = True
    assert fingerprint(model).split() == [part for part in first.split() if not part.startswith("head")]
