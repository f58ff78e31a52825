"""scripts/preflight.py: nothing found on a healthy setup; each planted fault found, with its remedy, and nothing else."""
import contextlib
import http.server
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from conftest import ROOT, TINY_KIMI, free_port, load_script, run_here
from eagle3 import gpu_links, machine_look, run_file_look
from eagle3.findings import Findings, read_run
from eagle3.gpu_links import acs_bridges, check_all_reduce, check_between, iommu_translates, try_all_reduce
from eagle3.machine_look import check_gpus
from eagle3.run_file_look import check_urls
from eagle3.servers import server_command
from eagle3.target_look import check_tokenizer

preflight = load_script("preflight")


@pytest.fixture
def run_file(tmp_path):
    """run_file(change=None, target=None) -> path of a copy of the quickstart's run file with a free port, in tmp_path."""
    def write(change=lambda run: None, target: Path = TINY_KIMI) -> Path:
        run = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
        run |= {"run_dir": str(tmp_path / "run"), "target": str(target)}
        port = run["servers"]["plain"]["flags"]["port"] = free_port()
        run["generate"]["base-url"] = run["extract"]["base-url"] = [f"http://127.0.0.1:{port}"]
        change(run)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        return tmp_path / "run.yaml"
    return write


@pytest.fixture
def target(tmp_path):
    """A copy of the tiny target that a test may break, cut into two shards with an index as Kimi's is."""
    folder = tmp_path / "target"
    shutil.copytree(TINY_KIMI, folder)
    with safe_open(TINY_KIMI / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    index = {}
    for number, wanted in ((1, "embed"), (2, "")):
        part = {name: tensors.pop(name) for name in list(tensors) if wanted in name}
        save_file(part, folder / f"model-{number:05d}-of-00002.safetensors")
        index |= dict.fromkeys(part, f"model-{number:05d}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "model.safetensors").unlink()
    return folder


def errors(capsys, path: Path, *argv) -> list[str]:
    """The error lines found in this process; each has its three parts, and the exit code fits them."""
    code = preflight.main(["--config", str(path), *argv])
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines[:-1] if not line.startswith("preflight: warning: ")]
    assert all(line.count(" | ") >= 2 for line in lines[:-1]) and code == (2 if found else 0)
    assert lines[-1].startswith("preflight: ready" if not found else f"preflight: {len(found)} to mend")
    return found


def only(found: list[str], text: str) -> None:
    assert len(found) == 1 and text in found[0], found


# ---- healthy ----
def test_nothing_stands_in_the_way_of_the_quickstart(run_file):
    done = run_here("preflight", "--config", run_file())
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1].startswith("preflight: ready") and "GPU" not in done.stdout
    assert all(line.startswith("preflight: warning: ") and ": original | role extract | " in line for line in lines[:-1])


def test_a_sharded_target_is_fine_too(run_file, target, capsys):
    assert errors(capsys, run_file(target=target)) == []


# ---- faults of the target ----
def shard(target: Path) -> Path:
    return target / "model-00001-of-00002.safetensors"


def cut(target):
    shard(target).write_bytes(shard(target).read_bytes()[:-100])


def rewrite(target, change):
    """The first shard (the embedding) with its tensors changed."""
    with safe_open(shard(target), "pt") as file:
        tensors = change({name: file.get_tensor(name) for name in file.keys()})
    save_file(tensors, shard(target))
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    kept = {name: file for name, file in index.items() if file != shard(target).name}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept | dict.fromkeys(tensors, shard(target).name)}))


def rename(target):
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["NobodysForCausalLM"]}))


FAULTS = {
    "a shard is missing": (lambda t: shard(t).rename(t / "x"), ["missing, though the index names it"]),
    "a shard is cut short": (cut, ["damaged or cut short"]),
    "a shard is no safetensors": (lambda t: shard(t).write_bytes(b"\x00" * 100), ["damaged or cut short"]),
    "the index is broken": (lambda t: (t / "model.safetensors.index.json").write_text("{"), ["index.json: not readable"]),
    "the embedding is quantised": (lambda t: rewrite(t, lambda w: {k + "_packed": v for k, v in w.items()}), ["quantised?"]),
    "the embedding is no float": (lambda t: rewrite(t, lambda w: {k: v.char() for k, v in w.items()}), ["quantised (I8)"]),
    "no config.json": (lambda t: (t / "config.json").unlink(), ["no readable config.json"]),
    "an architecture that nobody has": (rename, ["in no file that this patch knows", "what layer ids mean to SGLang 0.5.23"]),
    "no tokenizer": (lambda t: [path.unlink() for path in t.glob("tokenizer*")], ["no tokenizer can be loaded"]),
    "another template": (lambda t: (t / "chat_template.jinja").write_text("{{ messages[0].content }}"), ["thinking on", "thinking off"]),
    "a generation config of other bytes": (lambda t: (t / "generation_config.json").write_bytes(b"{}\0"), ["generation_config.json: not readable"]),
    "no template": (lambda t: (t / "chat_template.jinja").unlink(), ["the chat template fails"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_target_is_found(fault, run_file, target, capsys):
    plant, texts = FAULTS[fault]
    plant(target)
    found = errors(capsys, run_file(target=target))
    assert len(found) == len(texts) and all(text in line for text, line in zip(texts, found)), found


def test_another_id_of_a_special_token_is_found(run_file, target, capsys):
    text = (target / "tokenizer.json").read_text()
    assert '"</think>"' in text
    (target / "tokenizer.json").write_text(text.replace('"</think>"', '"</thought>"'))
    found = errors(capsys, run_file(target=target))
    assert any("</think> is not one id" in line for line in found)


def test_kimis_own_ids_are_demanded_of_kimis_vocabulary(tmp_path, capsys):
    make = ROOT / "tests/kimi_tokenizer/make.py"
    config = {"vocab_size": 163840}
    run = {"target": tmp_path / "kimi", "generate": {"trust-remote-code": True}}
    subprocess.run([sys.executable, str(make), str(tmp_path / "kimi")], check=True)
    (tmp_path / "kimi/config.json").write_text('{"model_type": "kimi_k25"}')
    found = Findings()
    check_tokenizer(run, found, config)
    assert found == []
    path = tmp_path / "kimi/tokenizer_config.json"
    decoder = json.loads(path.read_text())
    names = decoder["added_tokens_decoder"]
    names["163606"], names["163607"] = names["163607"], names["163606"]
    path.write_text(json.dumps(decoder))
    check_tokenizer(run, found, config)
    lines = capsys.readouterr().out
    assert "<think> is 163607, in Kimi-K2.5 it is 163606" in lines and "</think> is 163606" in lines
    run["generate"] = {}
    check_tokenizer(run, found, config)
    assert "Kimi's needs generate.trust-remote-code: true" in capsys.readouterr().out


def test_of_another_target_no_token_of_kimis_is_asked(run_file, target, capsys):
    """Its template says what ends a turn; what the run file names must be there."""
    config = json.loads((target / "config.json").read_text()) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}{{ m.content }}{{ '<|im_middle|>' if m.role == 'assistant' }}{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    text = (target / "tokenizer.json").read_text().replace('"</think>"', '"</thought>"').replace('"<|im_end|>"', '"<|end|>"')
    (target / "tokenizer.json").write_text(text)
    assert errors(capsys, run_file(target=target)) == []
    assert preflight.main(["--config", str(run_file(target=target))]) == 0
    assert "generation stops at 2402, <|im_middle|> is " in capsys.readouterr().out
    found = errors(capsys, run_file(lambda run: run["generate"].update({"stop-token": "<|end|>", "think-tokens": ["<think>", "</think>"]}), target))
    only(found, "</think> is not one id")


def test_a_stop_token_that_serving_does_not_know_is_a_warning(run_file, target, capsys):
    (target / "generation_config.json").write_text('{"eos_token_id": 1}')
    path = run_file(target=target)
    assert preflight.main(["--config", str(path)]) == 0
    assert "generation stops at 1, <|im_end|> is 2402" in capsys.readouterr().out


# ---- faults of the run file ----
def edit(*keys, value):
    def change(run):
        place = run
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
    return change


@pytest.mark.parametrize("change, text", [
    (edit("servers", "extract", "flags", value={}), "the radix cache is on"),
    (edit("servers", "extract", "flags", "enable-dp-attention", value=True), "DP attention splits the rows"),
    (edit("servers", "extract", "flags", "pp-size", value=2), "Use --pp-size 1"),
    (edit("servers", "extract", "flags", "enable-two-batch-overlap", value=True), "two-batch overlap leaves"),
    (edit("servers", "extract", "flags", "context-length", value=512), "takes 512 tokens, extract.max-length is 1024"),
    (edit("train", "lrr", value=1), "train.lrr is not a flag of 04_train.py"),
    (edit("extract", "max-lenght", value=1), "extract.max-lenght is not a flag of 03_extract.py"),
    (edit("train", "num-workers", value="many"), "argument --num-workers: "),
    (edit("servers", "extract", "env", value={}), "is not set, so nothing would be captured"),
    (edit("servers", "extract", "env", "EAGLE3_CAPTURE_DIR", value="/elsewhere"), "03 waits at"),
    (edit("servers", "extract", "env", "EAGLE3_CAPTURE_LAYERS", value="2,4,8"), "capture layers 2,4,8, the target has 8"),
    (edit("servers", "extract", "env", "EAGLE3_CAPTURE_LAYERS", value="1,4,6"), "cannot capture layers [1, 4, 6]"),
    (edit("servers", "speculative", "flags", "speculative-num-steps", value=5), "serving with 5 steps, training with 3 TTT steps"),
    (edit("servers", value={"plain": {"command": ["scripts/cpu_engine/serve.py"]}}), "the role"),
    (edit("build_vocab", "draft-vocab-size", value=5000), "draft vocabulary 5000, the target's is 2432"),
    (edit("target", value="/no/such/target"), "/no/such/target"),
    (edit("train", "epochs", value=0), "--epochs 0 "),
    (edit("generate", "top-p", value=2), "--top-p 2.0: must lie above 0"),
    (edit("extract", "max-length", value=float("nan")), "max-length"),
    (edit("servers", "extract", "flags", "attn-dp-size", value=2), "DP attention splits the rows"),
    (edit("servers", "extract", "flags", "cuda-graph-backend-prefill", value="breakable"), "prefill CUDA graphs are on"),
    (edit("servers", "extract", "flags", "cuda-graph-config", value='{"prefill": {"backend": "full"}}'), "prefill CUDA graphs are on"),
    (edit("servers", "extract", "flags", "enforce-piecewise-cuda-graph", value=True), "prefill CUDA graphs are on"),
    (edit("servers", "extract", "flags", "cuda-graph-config", value="prefill"), "is no JSON object of phases"),
    (edit("servers", "plain", "flags", "port", value="many"), "(port 'many' is no whole number)"),
    (edit("servers", "plain", "flags", "port", value=70000), "port 70000 is no port"),
    (edit("generate", "limit", value=[1]), "[1]"),
    (edit("servers", "speculative", "flags", "speculative-num-steps", value="4"), "serving with 4 steps"),
])
def test_a_fault_of_the_run_file_is_found(change, text, run_file, capsys):
    found = errors(capsys, run_file(change))
    assert found and all(text in line for line in found), found


def test_a_capture_folder_of_another_host_need_not_be_03s(run_file, capsys):
    def remote(run):
        run["servers"]["extract"]["env"]["EAGLE3_CAPTURE_DIR"] = "/data/incoming"
        run["extract"] |= {"states-url": ["http://gpu-host:31000"], "states-token-env": "STATES_TOKEN"}

    assert errors(capsys, run_file(remote)) == []


def check_one_url(url: str, capsys, section="extract") -> tuple[list, str]:
    found = Findings()
    run = {"generate": {}, "build_vocab": {}, "extract": {}, "train": {}, "benchmark": {}, "servers": {}, section: {"base-url": [url]}}
    check_urls(run, found, preflight.STAGES)
    return [severity for severity, _ in found], capsys.readouterr().out


def test_a_base_url_that_nobody_serves_is_a_warning(run_file, capsys, monkeypatch):
    assert preflight.main(["--config", str(run_file(edit("extract", "base-url", value=["http://localhost:1"])))]) == 0
    assert "nobody answers at http://localhost:1 (ConnectError: [Errno 111] Connection refused); no role listens there" in capsys.readouterr().out
    assert check_one_url("http://127.0.0.1:1", capsys)[0] == ["warning"]


@pytest.mark.parametrize("url, severity, text", [
    ("http://no.such.host.invalid:1", "error", "nobody answers at http://no.such.host.invalid:1 (ConnectError: "),
    ("30000", "error", "extract.base-url 30000: not an http(s) URL"),
    ("http://user:secret@127.0.0.1:1", "warning", "Connection refused"),
])
def test_an_address_that_cannot_be_is_an_error(url, severity, text, capsys):
    severities, said = check_one_url(url, capsys)
    assert severities == [severity] and text in said and "secret" not in said


def test_who_answers_is_found_and_who_keeps_silent_is_not_waited_for(capsys, monkeypatch):
    """Any answer is one; a proxy of the environment is asked for 01 alone."""
    monkeypatch.setattr(run_file_look, "SECONDS", 0.3)
    with answering(404) as url:
        assert check_one_url(url, capsys) == ([], "")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert check_one_url(url, capsys) == ([], "")
        assert check_one_url(url, capsys, "generate")[0] == ["warning"]
    with answering(503) as url:
        assert "(HTTP 503)" in check_one_url(url, capsys)[1]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert "(no answer within 0.3 s)" in check_one_url("http://127.0.0.1:%d" % silent.getsockname()[1], capsys)[1]


@contextlib.contextmanager
def answering(status: int):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("flags, gpu, backend", [
    ({}, True, "on"), ({}, False, "disabled"), ({"disable-prefill-cuda-graph": True}, True, "disabled"),
    ({"disable-cuda-graph": True}, True, "disabled"), ({"disable-piecewise-cuda-graph": True}, True, "disabled"),
    ({"disable-cuda-graph": True, "cuda-graph-backend-prefill": "breakable"}, True, "breakable"),
    ({"cuda-graph-backend-prefill": "full", "cuda-graph-config": {"prefill": {"backend": "disabled"}}}, True, "disabled"),
    ({"cuda-graph-config": '{"decode": {"max_bs": 8}}'}, True, "on"),
])
def test_what_replays_prefill(flags, gpu, backend):
    assert run_file_look.prefill_backend(flags, gpu) == backend


def test_captures_on_another_file_system_are_found(run_file, capsys):
    if os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev:
        pytest.skip("one file system here")

    def change(run):
        run["extract"]["capture-dir"] = run["servers"]["extract"]["env"]["EAGLE3_CAPTURE_DIR"] = "/dev/shm/captures"
    only(errors(capsys, run_file(change)), "different file systems")


def test_a_drafter_that_is_not_the_trained_one_is_a_warning(run_file, capsys):
    path = run_file(edit("servers", "speculative", "flags", "speculative-draft-model-path", value="other"))
    assert preflight.main(["--config", str(path)]) == 0
    assert "warning: the server takes the drafter other" in capsys.readouterr().out


# ---- faults of the machine ----
def test_a_port_that_is_taken_is_found(run_file, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        path = run_file(lambda run: run["servers"]["plain"]["flags"].update(port=other.getsockname()[1]))
        only(errors(capsys, path), f"port {other.getsockname()[1]} is taken")
        assert errors(capsys, path, "--stage", "04_train") == []  # it starts no server


def test_too_little_disk_is_found(run_file, capsys):
    found = errors(capsys, run_file(lambda run: run["generate"].update(limit=10**9)))
    only(found, "GB more will be written")


def test_a_run_folder_that_cannot_be_written_is_found(run_file, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    found = errors(capsys, run_file(lambda run: run.update(run_dir=str(tmp_path / "file" / "run"))))
    assert found and all("nothing can be written there" in line for line in found)


def test_few_open_files_are_found(run_file, capsys, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (500, 500))
    only(errors(capsys, run_file(), "--stage", "04_train"), "500 open files are allowed (hard limit 500) | ulimit -n | ")


def test_a_missing_package_is_found(run_file, capsys, monkeypatch):
    version = importlib.metadata.version

    def without(name):
        if name == "datasets":
            raise importlib.metadata.PackageNotFoundError
        return version(name)
    monkeypatch.setattr(importlib.metadata, "version", without)
    only(errors(capsys, run_file()), "the package datasets is missing")


def test_an_unknown_sglang_is_found(run_file, tmp_path, monkeypatch, capsys):
    """The one that this Python imports: another release's folder first on its path."""
    package = tmp_path / "path/sglang"
    (package / "srt/models").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text("__version__ = version = '0.4.9'\n")
    (package / "srt/models/deepseek_v2.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    found = errors(capsys, run_file())
    only(found, "SGLang cannot be patched: ")
    assert "0.4.9" in found[0]


FAKE_GPUS = ["NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, {used}, 12.0"]


@pytest.mark.parametrize("lines, change, text", [
    ([], {}, "no CUDA GPU is seen"),
    (FAKE_GPUS * 4, {}, "4 GPUs, tp-size is 8"),
    (FAKE_GPUS * 8, {"mem-fraction-static": 0.5}, "74.3 GB of weights on each GPU do not fit into 0.5 of 103 GB"),
    (FAKE_GPUS * 8, {"attention-backend": "fa3"}, "warning: attention-backend fa3 on SM120"),
    (FAKE_GPUS * 8, {}, None),
    (["NVIDIA H200, 143771, {used}, 9.0"] * 8, {"attention-backend": "fa3"}, None),
])
def test_gpus_are_held_against_the_run_file(lines, change, text, tmp_path, monkeypatch, capsys):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo '{line.format(used=3)}'\n" for line in lines) + ("exit 9\n" if not lines else ""))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**11))
    run = read_run(ROOT / "configs/kimi-k2.5-10k.yaml")
    run["servers"]["plain"]["flags"] |= change
    for name in ("extract", "speculative"):
        run["servers"][name]["flags"].pop("mem-fraction-static", None)
    found = Findings()
    check_gpus(run, found, {"plain", "extract", "speculative"}, {"target_bytes": 594.2e9}, 0)
    severities = [] if text is None else ["warning" if "warning" in text else "error"]
    assert [severity for severity, _ in found] == severities and (text or "") in capsys.readouterr().out


def test_gpus_in_use_and_little_shared_memory_are_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + f"echo '{FAKE_GPUS[0].format(used=40000)}'\n" * 8)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=64 * 2**20))
    found = Findings()
    check_gpus(read_run(ROOT / "configs/kimi-k2.5-10k.yaml"), found, {"plain"}, {"target_bytes": 594.2e9}, 0)
    assert [severity for severity, _ in found] == ["warning", "error"]
    assert "41.9 GB of a GPU are in use" in (said := capsys.readouterr().out) and "/dev/shm has 0.07 GB free" in said


# ---- between the GPUs ----
def pci_device(folder: Path, vendor: str, kind: str, config: bytes = bytes(64), group: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")
    (folder / "config").write_bytes(config)
    if group:
        (folder / "iommu_group").mkdir()
        (folder / "iommu_group/type").write_text(f"{group}\n")
    return folder


def with_acs(control: int) -> bytes:
    """A configuration space of 4 KiB with two extended capabilities: AER (0001h) at 100h, ACS (000Dh) at 148h."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x148 << 20 | 2 << 16 | 0x0001).to_bytes(4, "little")
    config[0x148:0x150] = (1 << 16 | 0x000D).to_bytes(4, "little") + (0x5F).to_bytes(2, "little") + control.to_bytes(2, "little")
    return bytes(config)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(control, group): a fake /sys with two GPUs below a switch, and a network card below a bridge of its own."""
    def make(bridge_config: bytes, group: str = "") -> Path:
        system = tmp_path / "sys"
        root = pci_device(system / "devices/pci0000:00/0000:00:01.0", "0x8086", "0x060400", bridge_config)
        devices = [root]
        for at, number in enumerate((2, 3)):
            down = pci_device(root / f"0000:0{number}:00.0", "0x1000", "0x060400", with_acs(0))
            devices += [down, pci_device(down / f"0000:1{number}:00.0", "0x10de", "0x030200" if at else "0x030000", group=group)]
        other = pci_device(system / "devices/pci0000:80/0000:80:01.0", "0x8086", "0x060400", with_acs(0x1D))
        devices += [other, pci_device(other / "0000:81:00.0", "0x15b3", "0x020000")]
        (system / "bus/pci/devices").mkdir(parents=True)
        for device in devices:
            (system / "bus/pci/devices" / device.name).symlink_to(device)
        monkeypatch.setattr(gpu_links, "SYS", system)
        monkeypatch.setattr(gpu_links, "COMMAND_LINE", tmp_path / "cmdline")
        return system
    return make


@pytest.mark.parametrize("config, redirecting, unread", [
    (with_acs(0x1D), ["0000:00:01.0"], []), (with_acs(0x04), ["0000:00:01.0"], []),
    (with_acs(0x01), [], []), (with_acs(0), [], []),  # source validation alone redirects nothing
    (bytes(64), [], ["0000:00:01.0"]),  # what a user other than root gets
    (bytes(256), [], []), (bytes(4096), [], []),  # no extended capabilities
    (bytes(0x100) + (0x100 << 20 | 1).to_bytes(4, "little") * 2, [], []),  # a list in a circle
])
def test_acs_is_read_from_the_bridges_above_the_gpus(config, redirecting, unread, machine, capsys):
    machine(config)
    assert acs_bridges() == (redirecting, unread)
    found = Findings()
    check_between(found)
    said = capsys.readouterr().out
    assert len(found) == bool(redirecting or unread) and all(severity == "warning" for severity, _ in found)
    assert ("ECAP_ACS+6.w=0" in said) == bool(redirecting) and ("without root" in said) == bool(unread)


def test_an_iommu_that_translates(machine, tmp_path, capsys):
    system = machine(with_acs(0))
    assert not iommu_translates()
    (system / "class/iommu/dmar0").mkdir(parents=True)
    assert iommu_translates()
    (tmp_path / "cmdline").write_text("quiet iommu=pt\n")
    assert not iommu_translates()
    found = Findings()
    check_between(found)
    assert found == []


@pytest.mark.parametrize("group, translates", [("DMA-FQ", True), ("DMA", True), ("identity", False)])
def test_the_groups_of_the_gpus_say_whether_an_iommu_translates(group, translates, machine, tmp_path, capsys):
    machine(with_acs(0), group)
    assert iommu_translates() == translates
    check_between(Findings())
    assert ("boot with iommu=pt (or iommu=off)" in capsys.readouterr().out) == translates


def test_an_all_reduce_on_two_processes():
    assert try_all_reduce(sys.executable, [0, 1], 2, {}, 120, backend="gloo") is None


def test_an_all_reduce_that_hangs_is_killed_as_a_whole(tmp_path):
    """A rank that never joins: the other waits for it."""
    began = time.monotonic()
    assert try_all_reduce(sys.executable, [0], 2, {"MARK": str(tmp_path)}, 8, backend="gloo") == "hung for 8 s"
    assert time.monotonic() - began < 30 and not [path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path) in environment(path)]


def environment(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_an_all_reduce_with_a_wrong_sum_says_so(tmp_path):
    text = gpu_links.ALL_REDUCE.read_text()
    assert "(rank + 1)" in text
    (tmp_path / "rank.py").write_text(text.replace("(rank + 1)", "(rank + 2)"))
    assert try_all_reduce(sys.executable, [0, 1], 2, {}, 120, backend="gloo", script=tmp_path / "rank.py") == \
        "failed (1,019 of 1,024 sums are wrong)"  # arange(1024) % 251 is 0 five times


NCCL_FAILS = """
[rank0]: Traceback (most recent call last):
host:1:1 [0] misc/shmutils.cc:81 NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes
torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)
Last error:
[W1130 ProcessGroupNCCL.cpp] Warning: destroy_process_group() was not called
"""


@pytest.mark.parametrize("text, says", [
    (NCCL_FAILS, "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for "
                 "details) host:1:1 [0] misc/shmutils.cc:81 NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes"),
    ("words\nlast\n\n", "last"), ("", ""),
])
def test_the_last_words_of_a_rank(text, says, tmp_path):
    (tmp_path / "0").write_text(text)
    assert gpu_links.last_words(tmp_path, [0]) == says
    assert try_all_reduce(sys.executable, [0], 1, {}, 20, script=bad_rank(tmp_path, text)) == f"failed ({says or 'exit code 1'})"


def bad_rank(tmp_path, text: str) -> Path:
    (tmp_path / "rank.py").write_text(f"print({text!r})\nraise SystemExit(1)\n")
    return tmp_path / "rank.py"


@pytest.mark.parametrize("passes_without, level, says", [
    (True, "SYS", "with NCCL_P2P_DISABLE=1 it works | servers: env | boot with iommu=pt (or iommu=off) and PCIe ACS off in the BIOS; until then set "
                  "NCCL_P2P_DISABLE=1 (slower) in every role's env, or NCCL_P2P_LEVEL=PHB instead of SYS"),
    (False, None, "with NCCL_P2P_DISABLE=1 too | servers: env | set NCCL_DEBUG=INFO"),
])
def test_the_remedy_of_a_hang_is_tried(passes_without, level, says, monkeypatch, capsys):
    monkeypatch.setattr(gpu_links, "try_all_reduce", lambda python, ranks, world, env, seconds:
                        None if passes_without and env.get("NCCL_P2P_DISABLE") else f"hung for {seconds} s")
    for needed in (True, False):
        found = Findings()
        check_all_reduce(found, sys.executable, 8, {"NCCL_P2P_LEVEL": level} if level else {}, 7, needed)
        said = capsys.readouterr().out
        assert [severity for severity, _ in found] == ["error" if needed else "warning"] and "over 8 GPUs hung for 7 s; " in said and says in said


def test_a_full_gpu_is_not_asked_for_an_all_reduce(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine_look, "gpus", lambda: [{"name": "H200", "gb": 150.0, "used_gb": used, "capability": 9.0} for used in (0.0, 149.0)])
    monkeypatch.setattr(machine_look, "check_all_reduce", lambda *args: pytest.fail("tried"))
    run = read_run(ROOT / "configs/quickstart-gpu.yaml")
    check_gpus(run, Findings(), {"plain"}, {}, 60)
    assert "a GPU is too full to try an all-reduce" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    check_gpus(run, Findings(), {"plain"}, {}, 60)
    assert "all-reduce" not in capsys.readouterr().out


def test_the_sglang_that_is_looked_at_is_the_servers_own(run_file, tmp_path, capsys):
    """A Python of the servers' own: here one that finds no SGLang, then none at all."""
    (tmp_path / "python3").write_text(f"#!/bin/sh\nexec {sys.base_prefix}/bin/python3 -S -I \"$@\"\n")
    (tmp_path / "python3").chmod(0o755)
    change = edit("servers", "plain", "command", value=[str(tmp_path / "python3"), "scripts/cpu_engine/serve.py"])
    only(errors(capsys, run_file(change)), f"| {tmp_path / 'python3'} |")
    (tmp_path / "python3").unlink()
    only(errors(capsys, run_file(change)), "the servers' Python cannot be run (No such file or directory)")


def test_roles_that_extend_each_other_are_one_line_and_exit_2(run_file):
    path = run_file(edit("servers", "plain", "extends", value="extract"))
    done = run_here("preflight", "--config", path)
    assert done.returncode == 2 and done.stderr == "preflight: servers.extract: `extends` goes in a circle.\n"


def test_a_bound_on_disk_is_what_must_fit(run_file, monkeypatch, capsys):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    only(errors(capsys, run_file(edit("generate", "limit", value=1000))), "GB more will be written")  # 2.1 GB of states

    def change(run):
        run["generate"]["limit"], run["extract"]["max-disk-gb"], run["extract"]["verify"] = 1000, 0.5, False
    assert errors(capsys, run_file(change)) == []


@pytest.mark.parametrize("text", ["[", "run_dir: x\n", ""])
def test_an_unreadable_run_file_is_one_line_and_exit_2(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    argv = "preflight", "--config", tmp_path / "run.yaml"
    done = run_here(*argv) if text else subprocess.run([sys.executable, str(ROOT / "scripts/preflight.py"), *map(str, argv[1:])], text=True, capture_output=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and "not a readable" in done.stderr


# ---- the run files' servers, as SGLang reads them ----
PARSE = """
import argparse, importlib.util, json, sys
sys.path.insert(0, "scripts/cpu_engine")
spec = importlib.util.spec_from_file_location("cpu_engine", "scripts/cpu_engine/serve.py")
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)
engine.prepare()  # what SGLang needs to be imported without a GPU
from sglang.srt.server_args import ServerArgs
for name, argv in json.load(sys.stdin).items():
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    try:
        print(name, parser.parse_args(argv).model_path)
    except SystemExit:
        print(name, "refused")
from sglang.srt.arg_groups.cuda_graph_hook import parse_cuda_graph_config
from sglang.srt.arg_groups.overrides import resolving_view
B, C, D = "cuda-graph-backend-prefill", "cuda-graph-config", "disable-prefill-cuda-graph"
for flags in ({}, {D: True}, {B: "full"}, {B: "breakable", D: True}, {B: "full", C: '{"prefill": {"backend": "disabled"}}'},
              {C: '{"prefill": {"max_bs": 4}}', B: "breakable"}):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    argv = sum(([f"--{flag}"] + ([] if value is True else [value]) for flag, value in flags.items()), ["--model-path", "m"])
    args = ServerArgs.from_cli_args(parser.parse_args(argv))
    parse_cuda_graph_config(args)
    print("resolved", json.dumps([flags, resolving_view(args).cuda_graph_config.prefill.backend]))
"""


def server_argvs() -> dict[str, list[str]]:
    found = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        servers = read_run(path)["servers"]
        for name in servers:
            argv, _ = server_command(servers, name)
            found[f"{path.stem}:{name}"] = argv[argv.index("--model-path"):]
    return found


def test_sglangs_own_parser_takes_every_server_of_every_run_file():
    """And refuses a flag or a parser it does not know. Of prefill graphs its resolution says what preflight says."""
    argvs = server_argvs()
    assert len(argvs) >= 18
    wrong = {flag: ["--model-path", "m", flag, "kimi_k9"] for flag in ("--no-such-flag", "--reasoning-parser", "--tool-call-parser")}
    done = subprocess.run([sys.executable, "-c", PARSE], cwd=ROOT, input=json.dumps(argvs | wrong), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0] in argvs | wrong)
    assert {name for name, model in said.items() if model == "refused"} == set(wrong) and len(said) == len(argvs) + 3, done.stderr[-2000:]
    resolved = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("resolved ")]
    assert len(resolved) == 6 and [backend for _, backend in resolved] == [run_file_look.prefill_backend(flags, False) for flags, _ in resolved]


def test_the_two_kimi_runs_serve_alike():
    """Same servers but for their folders: what is measured on one holds for the other."""
    ten, hundred = ((ROOT / f"configs/kimi-k2.5-{size}.yaml").read_text() for size in ("10k", "100k"))
    assert ten[ten.index("servers:"):].replace("10k", "100k") == hundred[hundred.index("servers:"):]


def test_the_kimi_runs_have_what_the_drafter_needs():
    for size in ("10k", "100k"):
        servers = read_run(ROOT / f"configs/kimi-k2.5-{size}.yaml")["servers"]
        (plain, nccl), (extract, env), (speculative, _) = (server_command(servers, name) for name in ("plain", "extract", "speculative"))
        assert nccl == {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS"}
        assert env == {**nccl, "EAGLE3_CAPTURE_DIR": f"/data/eagle3/synth_{size}_sglang/hidden_states/.incoming", "EAGLE3_CAPTURE_LAYERS": "3,31,59"}
        assert {"--disable-radix-cache", "--disable-prefill-cuda-graph"} <= set(extract) and "--disable-radix-cache" not in plain
        assert " --attention-backend triton " in " ".join(plain)
        assert ("--speculative-algorithm EAGLE3 --speculative-draft-model-path /data/eagle3/output_"
                f"{size}_sglang/best --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
                "--speculative-draft-model-quantization unquant") in " ".join(speculative)
