"""04 on several hosts: folders of their own or shared, one set of checkpoints, the bytes of one host; else one line on every rank."""
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file

import preloaded
from conftest import ROOT, free_port
from test_train_faults import ends
from train_reference import random_sample, write_hidden_states, write_mapping, write_target
from eagle3 import hosts
from eagle3.checked import Checked
from eagle3.checkpoints import checkpoints
from eagle3.processes import Process
from eagle3.stage import UserError
from eagle3.states import sample_path

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# 04, which leaves the ids of the samples that this rank trains or is evaluated on in READ-<rank>
NOTED = f"""
import os, runpy, sys, time
sys.path.insert(0, {str(ROOT / 'scripts')!r})
from eagle3 import loader, trainer
collate, update = loader.collate, trainer.Trainer.update
def noted(samples, *args):
    with open(os.environ["READ"] + "-" + os.environ["RANK"], "a") as file:
        file.write("".join(sample.id + chr(10) for sample in samples))
    return collate(samples, *args)
def paced(*args):
    time.sleep(float(os.environ.get("PACE", 0)))
    return update(*args)
loader.collate, trainer.Trainer.update = noted, paced
runpy.run_path({str(ROOT / '04_train.py')!r}, run_name="__main__")
"""


def write_host(root: Path) -> Path:
    """A host's folders: target/, vocab_mapping/ and hidden_states/, 24 samples of hidden 16."""
    target = write_target(root / "target", vocab=33, hidden=16, heads=2, head_dim=8, intermediate=16)
    head = load_file(target / "model.safetensors")["language_model.lm_head.weight"]
    rng = np.random.default_rng(5)
    write_mapping(root / "vocab_mapping", np.sort(rng.choice(33, 20, replace=False)), 33)
    write_hidden_states(root / "hidden_states", {f"s{i:02d}": random_sample(int(rng.integers(16, 40)), "tail", head, rng)
                                                 for i in range(24)})
    return root


@pytest.fixture
def two(tmp_path) -> tuple[Path, Path]:
    """The folders of two hosts: copies."""
    first = write_host(tmp_path / "a")
    return first, Path(shutil.copytree(first, tmp_path / "b"))


def flags(host: Path, output: Path | None = None, *more) -> list[str]:
    return list(map(str, ["--verifier-path", host / "target", "--data-dir", host / "hidden_states", "--vocab-mapping-dir",
                          host / "vocab_mapping", "--output-dir", output or host / "output", "--epochs", 1, "--lr", 1e-3,
                          "--batch-tokens", 64, "--max-seq-len", 64, "--num-workers", 1, "--log-every", 1, "--save-every", 2,
                          "--keep-checkpoints", 9, "--val-ratio", 0, *more]))


def ranks(*argvs: list[str], env=None) -> list[subprocess.Popen]:
    """A rank each, the only one of its host, as torchrun would start it."""
    shared = {**ENV, **(env or {}), "WORLD_SIZE": str(len(argvs)), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port())}
    return [preloaded.popen([sys.executable, "-c", NOTED, *argv], env=shared | {"RANK": str(rank)}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank, argv in enumerate(argvs)]


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in (".lock", "training.png")}


# ------------------------------------------------------------------ what is compared
def gathered(monkeypatch, parts: list) -> Process:
    """Rank 1 of two, of which `all_ranks` gathers `parts`."""
    monkeypatch.setattr(hosts, "all_ranks", lambda value, process: parts)
    monkeypatch.setattr(hosts, "meet", lambda *args: None)
    return Process(1, 2, SimpleNamespace(type="cpu"), None)


def test_what_differs_is_named_on_both_sides():
    """Paths may differ, what they name and what the ranks do in step may not."""
    config = {"data-dir": "/a", "log-every": 10, "lr": 1e-3, "num-workers": 4,
              "inputs": {"hidden_states": ["1" * 64, "2" * 64], "vocab_mapping": "3" * 64}}
    agreed = Process(0, 1, SimpleNamespace(type="cpu"), None)
    hosts.agree(agreed, config)
    facts = lambda config: {f"--{key}": value for key, value in config.items()}  # noqa: E731
    assert hosts.differences(facts(config), facts(config)) is None
    assert hosts.differences({"--log-every": 5, "--lr": 1}, {"--log-every": 10, "--lr": 1}) == ("--log-every 5", "--log-every 10")
    assert hosts.differences({"--data-dir": ["1" * 64, "4" * 64]}, {"--data-dir": ["1" * 64, "2" * 64]}) == (
        f"--data-dir {'1' * 12}+{'4' * 12}", f"--data-dir {'1' * 12}+{'2' * 12}")


def test_to_follow_all_hosts_need_one_folder(monkeypatch, tmp_path):
    """A copy of 03's folder lands no samples."""
    (tmp_path / "plan.jsonl").write_text("{}\n")
    shutil.copytree(tmp_path, tmp_path / "copy")
    here, copy = (hosts.identity(folder / "plan.jsonl") for folder in (tmp_path, tmp_path / "copy"))
    assert here != copy and here == hosts.identity(tmp_path / "plan.jsonl") and hosts.identity(tmp_path / "none") is None
    process = gathered(monkeypatch, [("nodea", {}, here), ("nodeb", {}, copy)])
    with pytest.raises(UserError, match="^rank 1 on nodeb sees another .*plan.jsonl than rank 0 on nodea. With --follow"):
        hosts.agree(process, {"inputs": {}}, tmp_path / "plan.jsonl")


def test_a_problem_of_one_rank_is_everyones(monkeypatch):
    def fails():
        raise UserError("/b: no such folder.")

    process = gathered(monkeypatch, [("nodea", None), ("nodeb", "/b: no such folder.")])
    for work in (fails, lambda: 5):
        with pytest.raises(UserError, match="^rank 1 on nodeb: /b: no such folder.$"):
            hosts.on_all(process, work)
    process = gathered(monkeypatch, [("nodea", "/b: no such folder.")] * 2)
    with pytest.raises(UserError, match="^/b: no such folder.$"):
        hosts.on_all(process, fails)


def test_checkpoints_on_another_host_than_rank_0s_are_not_begun_anew():
    hosts.refuse_moved([("a", (1, 9), 4, "/out"), ("b", (2, 9), 0, "/out"), ("b", (1, 9), 4, "/out")])
    hosts.refuse_moved([("a", (1, 9), 4, "/out"), ("b", (2, 9), 4, "/out")])  # a copy of before
    for last, there in ((0, "none"), (2, "only checkpoint-2")):
        with pytest.raises(UserError, match=f"^rank 1 on b: /out there has checkpoint-4, that of rank 0 on a {there}. Start b as rank 0"):
            hosts.refuse_moved([("a", (1, 9), last, "/out"), ("b", (2, 9), 4, "/out")])


def test_what_is_bad_on_one_host_is_left_out_on_all(monkeypatch):
    process = gathered(monkeypatch, [({"s1": "torn"}, 5, 9), ({"s1": "missing", "s2": "checksum"}, 6, 10)])
    near = Process(0, 1, process.device, None)
    mine = Checked([SimpleNamespace(id=f"s{i}") for i in (0, 3)], {}, 6, 10, {"s1": "missing", "s2": "checksum"})
    assert hosts.good_everywhere(mine, process) is mine  # all see the same folder
    found = hosts.good_everywhere(mine, Process(1, 2, process.device, None, near=near))
    assert [sample.id for sample in found.samples] == ["s0", "s3"] and found.problems == {"s1": "torn", "s2": "checksum"}
    assert (found.agreed, found.predicted) == (5, 9)  # the same on all ranks: the first one's


# ------------------------------------------------------------------ two ranks, each with folders of its own
def test_another_manifest_is_refused_in_the_same_line_on_every_rank(two):
    path = two[1] / "hidden_states/manifest.json"
    path.write_text(path.read_text() + "\n")
    done = ends(ranks(flags(two[0]), flags(two[1])))
    assert [code for code, *_ in done] == [2, 2], done
    first, second = (hashlib.sha256((host / "hidden_states/manifest.json").read_bytes()).hexdigest()[:12] for host in two)
    lines = {error.splitlines()[-1] for *_, error in done}
    assert len(lines) == 1 and re.search(rf"rank 1 on \S+ has --data-dir {second}, rank 0 on \S+ --data-dir {first}\. All hosts", *lines)
    assert not list(two[0].glob("output/*")) and not list(two[1].glob("output/*"))


def test_hosts_with_folders_of_their_own(two, tmp_path):
    """The bytes of two ranks of one host; checkpoints on the first host alone; each rank reads what it trains on."""
    shared = ends(ranks(*[flags(two[0], tmp_path / "one")] * 2, env={"READ": str(tmp_path / "one-read")}))
    done = ends(ranks(flags(two[0]), flags(two[1]), env={"READ": str(tmp_path / "read")}))
    assert [code for code, *_ in shared + done] == [0] * 4, shared + done
    assert contents(two[0] / "output") == contents(tmp_path / "one")
    assert set(contents(two[1] / "output")) == {"stage.json"}
    each = [sorted((tmp_path / f"read-{rank}").read_text().split()) for rank in (0, 1)]
    assert sorted(sum(each, [])) == [f"s{i:02d}" for i in range(24)] and all(each)  # one epoch: each rank only its own
    assert "each checks its own samples | checkpoints and metrics lie in" in done[0][1]
    assert "log, checkpoints and metrics are rank 0's on" in done[1][1]


@pytest.mark.slow
def test_each_host_checks_its_own_copy(two, tmp_path):
    damaged = sample_path(two[1] / "hidden_states", "s07")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    done = ends(ranks(flags(two[0]), flags(two[1]), env={"READ": str(tmp_path / "read")}))
    assert [code for code, *_ in done] == [1, 2], done  # 1 of 24 is more than 04 bears, wherever it lies
    assert "1 of 24 samples are bad" in done[1][2] and "checksum" in done[1][2]
    assert "another rank hangs or has died. Its own last lines say why" in done[0][2]


# ------------------------------------------------------------------ two network namespaces, torchrun on each
def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def network():
    """The names of two network namespaces that only a pair of devices joins: 10.77.0.1 and 10.77.0.2, both `veth0`."""
    names = [f"eagle3-{os.getpid()}-{side}" for side in "ab"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
            for number, name in enumerate(names, 1):
                ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "veth0")
                for device in ("lo", "veth0"):
                    ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        yield names
    finally:
        for name in names:
            dies(name)
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", name)


STATIC = ["--master_addr", "10.77.0.1", "--master_port", "29400"]


def start(network, two, tmp_path, rendezvous=lambda rank: [*STATIC, "--node_rank", str(rank)], pace="0") -> list[subprocess.Popen]:
    """torchrun in each namespace; what it prints goes to LOG-<rank>."""
    started = []
    for rank, (name, host) in enumerate(zip(network, two)):
        script = tmp_path / "noted.py"
        script.write_text(NOTED)
        env = {**ENV, "GLOO_SOCKET_IFNAME": "veth0", "READ": str(tmp_path / "read"), "PACE": pace}
        with open(tmp_path / f"log-{rank}", "w") as log:
            started.append(subprocess.Popen(["ip", "netns", "exec", name, *TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1",
                                             *rendezvous(rank), str(script), *flags(host)], env=env, stdout=log,
                                            stderr=subprocess.STDOUT))
    return started


def dies(name: str) -> None:
    """Everything that runs in a namespace, by SIGKILL; torchrun's workers are in sessions of their own."""
    for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow
def test_two_hosts_over_a_network_one_of_which_dies(network, two, tmp_path):
    """Killed with -9 on one host, the other ends by itself; started again, both end in the bytes of one host."""
    one = subprocess.run([*TORCHRUN, "--nproc_per_node", "2", "--master_port", str(free_port()), str(ROOT / "04_train.py"),
                          *flags(two[0], tmp_path / "one")], env=ENV, capture_output=True, text=True, timeout=300)
    assert one.returncode == 0, one.stderr[-2000:]
    first, second = start(network, two, tmp_path, pace="0.7")
    try:
        deadline = time.monotonic() + 120
        while not re.search(r"step 3/", said := (tmp_path / "log-0").read_text()):
            assert first.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.05)
        dies(network[1])
        assert first.wait(60) == 1
    finally:
        for process, name in zip((first, second), network):
            dies(name)
            process.wait()
    assert "another rank hangs or has died" in (tmp_path / "log-0").read_text()
    kept = [step for step, _ in checkpoints(two[0] / "output")]
    assert kept and not (two[0] / "output/manifest.json").exists() and not checkpoints(two[1] / "output")
    # the other rendezvous, which orders hosts by their addresses
    both = start(network, two, tmp_path, lambda rank: ["--rdzv_backend", "c10d", "--rdzv_endpoint", "10.77.0.1:29401", "--rdzv_id", "1",
                                                       "--local_addr", f"10.77.0.{rank + 1}",
                                                       "--rdzv_conf", f"is_host={int(rank == 0)}"])
    assert [process.wait(180) for process in both] == [0, 0], (tmp_path / "log-0").read_text()
    assert f"resume {two[0]}/output/checkpoint-{kept[-1]}" in (tmp_path / "log-0").read_text()
    assert contents(two[0] / "output") == contents(tmp_path / "one")
    assert set(contents(two[1] / "output")) == {"stage.json"}
    assert json.loads((two[1] / "output/stage.json").read_text()) == json.loads((two[0] / "output/stage.json").read_text())
