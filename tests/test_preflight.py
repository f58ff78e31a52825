"""scripts/preflight.py: nothing found on a healthy setup; each planted fault found, with its remedy, and nothing else."""
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from conftest import ROOT, TINY_KIMI, free_port, load_script, run_here
from eagle3.servers import server_command

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
    found = preflight.Findings()
    preflight.check_tokenizer(run, found, config)
    assert found == []
    path = tmp_path / "kimi/tokenizer_config.json"
    decoder = json.loads(path.read_text())
    names = decoder["added_tokens_decoder"]
    names["163606"], names["163607"] = names["163607"], names["163606"]
    path.write_text(json.dumps(decoder))
    preflight.check_tokenizer(run, found, config)
    lines = capsys.readouterr().out
    assert "<think> is 163607, in Kimi-K2.5 it is 163606" in lines and "</think> is 163606" in lines
    run["generate"] = {}
    preflight.check_tokenizer(run, found, config)
    assert "Kimi's needs generate.trust-remote-code: true" in capsys.readouterr().out


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
    (edit("target", value="/no/such/target"), "no readable config.json"),
    (edit("servers", "plain", "flags", "port", value="many"), "a value of the wrong kind stops check_"),
    (edit("servers", "speculative", "flags", "speculative-num-steps", value="4"), "serving with 4 steps"),
])
def test_a_fault_of_the_run_file_is_found(change, text, run_file, capsys):
    found = errors(capsys, run_file(change))
    assert found and all(text in line for line in found), found


def test_a_base_url_that_nobody_serves_is_a_warning(run_file, capsys):
    assert preflight.main(["--config", str(run_file(edit("extract", "base-url", value=["http://localhost:1"])))]) == 0
    assert "no role listens at localhost:1; their ports: " in capsys.readouterr().out


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


def test_few_open_files_are_found(run_file):
    command = f"ulimit -n 500; exec {sys.executable} {ROOT}/scripts/preflight.py --config {run_file()} --stage 04_train"
    done = subprocess.run(["bash", "-c", command], text=True, capture_output=True)
    assert done.returncode == 2 and "500 open files are allowed (hard limit 500) | ulimit -n | " in done.stdout


def test_a_missing_package_is_found(run_file, capsys, monkeypatch):
    version = preflight.importlib.metadata.version

    def without(name):
        if name == "datasets":
            raise preflight.importlib.metadata.PackageNotFoundError
        return version(name)
    monkeypatch.setattr(preflight.importlib.metadata, "version", without)
    only(errors(capsys, run_file()), "the package datasets is missing")


def test_an_unknown_sglang_is_found(run_file, tmp_path):
    """The one that this Python imports: another release's folder first on its path."""
    package = tmp_path / "path/sglang"
    (package / "srt/models").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text("__version__ = version = '0.4.9'\n")
    (package / "srt/models/deepseek_v2.py").write_text("")
    done = subprocess.run([sys.executable, str(ROOT / "scripts/preflight.py"), "--config", str(run_file())], text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "path")})
    assert done.returncode == 2 and "SGLang cannot be patched: " in done.stdout and "0.4.9" in done.stdout


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
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage._replace(free=10**11))
    run = preflight.read_run(ROOT / "configs/kimi-k2.5-10k.yaml")
    run["servers"]["plain"]["flags"] |= change
    for name in ("extract", "speculative"):
        run["servers"][name]["flags"].pop("mem-fraction-static", None)
    found = preflight.Findings()
    preflight.check_gpus(run, found, {"plain", "extract", "speculative"}, {"target_bytes": 594.2e9})
    severities = [] if text is None else ["warning" if "warning" in text else "error"]
    assert [severity for severity, _ in found] == severities and (text or "") in capsys.readouterr().out


def test_gpus_in_use_and_little_shared_memory_are_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + f"echo '{FAKE_GPUS[0].format(used=40000)}'\n" * 8)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage._replace(free=64 * 2**20))
    found = preflight.Findings()
    preflight.check_gpus(preflight.read_run(ROOT / "configs/kimi-k2.5-10k.yaml"), found, {"plain"}, {"target_bytes": 594.2e9})
    assert [severity for severity, _ in found] == ["warning", "error"]
    assert "41.9 GB of a GPU are in use" in (said := capsys.readouterr().out) and "/dev/shm has 0.07 GB free" in said


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
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    only(errors(capsys, run_file(edit("generate", "limit", value=1000))), "GB more will be written")  # 2.1 GB of states

    def change(run):
        run["generate"]["limit"], run["extract"]["max-disk-gb"] = 1000, 0.5
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
"""


def server_argvs() -> dict[str, list[str]]:
    found = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        servers = preflight.read_run(path)["servers"]
        for name in servers:
            argv, _ = server_command(servers, name)
            found[f"{path.stem}:{name}"] = argv[argv.index("--model-path"):]
    return found


def test_sglangs_own_parser_takes_every_server_of_every_run_file():
    """And refuses a flag or a parser it does not know."""
    argvs = server_argvs()
    assert len(argvs) >= 18
    wrong = {flag: ["--model-path", "m", flag, "kimi_k9"] for flag in ("--no-such-flag", "--reasoning-parser", "--tool-call-parser")}
    done = subprocess.run([sys.executable, "-c", PARSE], cwd=ROOT, input=json.dumps(argvs | wrong), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0] in argvs | wrong)
    assert {name for name, model in said.items() if model == "refused"} == set(wrong) and len(said) == len(argvs) + 3, done.stderr[-2000:]


def test_the_two_kimi_runs_serve_alike():
    """Same servers but for their folders: what is measured on one holds for the other."""
    ten, hundred = ((ROOT / f"configs/kimi-k2.5-{size}.yaml").read_text() for size in ("10k", "100k"))
    assert ten[ten.index("servers:"):].replace("10k", "100k") == hundred[hundred.index("servers:"):]


def test_the_kimi_runs_have_what_the_drafter_needs():
    for size in ("10k", "100k"):
        servers = preflight.read_run(ROOT / f"configs/kimi-k2.5-{size}.yaml")["servers"]
        (plain, nccl), (extract, env), (speculative, _) = (server_command(servers, name) for name in ("plain", "extract", "speculative"))
        assert nccl == {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS"}
        assert env == {**nccl, "EAGLE3_CAPTURE_DIR": f"/data/eagle3/synth_{size}_sglang/hidden_states/.incoming", "EAGLE3_CAPTURE_LAYERS": "3,31,59"}
        assert {"--disable-radix-cache", "--disable-prefill-cuda-graph"} <= set(extract) and "--disable-radix-cache" not in plain
        assert " --attention-backend triton " in " ".join(plain)
        assert ("--speculative-algorithm EAGLE3 --speculative-draft-model-path /data/eagle3/output_"
                f"{size}_sglang/best --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
                "--speculative-draft-model-quantization unquant") in " ".join(speculative)
