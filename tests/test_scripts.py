"""What all scripts share: copies that must not drift, commands that must parse, the contract for machines."""
import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from conftest import ROOT, free_port, load_script
from eagle3.servers import healthy

STAGES = ["01_generate", "02_build_vocab", "03_extract", "04_train", "05_benchmark"]
SECTION = dict(zip(STAGES, ["generate", "build_vocab", "extract", "train", "benchmark"]))


def block(path: Path, first: str, last: str) -> str:
    text = path.read_text()
    assert text.count(first) == 1 and text.count(last) == 1, f"{path.name}: block markers missing"
    return text[text.index(first):text.index(last)]


def test_common_block_is_the_same_everywhere():
    copies = {block(ROOT / f"{name}.py", "# ---- The block below is the same in every numbered script", "# ---- end of the common block")
              for name in STAGES}
    assert len(copies) == 1


def test_server_block_is_the_same_in_its_two_places():
    copies = {block(ROOT / name, "# ---- The block below is the same in scripts/serve.py and", "# ---- end of the server block")
              for name in ("scripts/serve.py", "05_benchmark.py")}
    assert len(copies) == 1


def test_top_level_is_what_the_user_fixed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {name.split("/")[0] for name in tracked}
    assert {name for name in top if not name.startswith(".")} <= {f"{name}.py" for name in STAGES} | {
        "patches", "configs", "scripts", "tests", "pyproject.toml", "README.md"}


@pytest.mark.parametrize("name", STAGES)
def test_script_stands_alone(name):
    """Its own imports are the standard library and declared packages: nothing of ours."""
    declared = {re.match(r"[\w-]+", line)[0] for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]}
    declared |= {"yaml", "pynvml", "triton", "tensorboard"}  # pyyaml's; nvidia-ml-py's; torch's on a GPU; only with 04's --tensorboard
    text = (ROOT / f"{name}.py").read_text()
    imported = {found.split(".")[0] for found in re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.M)}
    assert imported <= declared | sys.stdlib_module_names, imported - declared - sys.stdlib_module_names


def parsed(name: str, argv: list[str], monkeypatch) -> argparse.Namespace:
    """argv as script `name` reads it: main() is stopped right after its arguments are parsed."""
    script = load_script(name)

    class Parsed(Exception):
        pass

    original = script.parse_args

    def stop(*args):
        raise Parsed(original(*args))

    monkeypatch.setattr(script, "parse_args", stop)
    with pytest.raises(Parsed) as caught:
        script.main(argv)
    return caught.value.args[0]


DESIGN_COMMANDS = [
    "--verifier-path /shared/kimi-k2.5-int4 --data-dir /data/eagle3/synth_10k_sglang/hidden_states "
    "--vocab-mapping-dir /data/eagle3/synth_10k_sglang/vocab_mapping --output-dir /data/eagle3/output_10k_sglang --epochs 5 --lr 3e-5 "
    "--max-seq-len 2048 --ttt-steps 3 --noise-std 0.05 --val-ratio 0.1 --scheduler cosine --warmup-ratio 0.01 --num-workers 4",
    "--verifier-path V --data-dir D --vocab-mapping-dir M --output-dir O --max-seq-len 4096 --finetune-from DIR",
]


@pytest.mark.parametrize("command", DESIGN_COMMANDS)
def test_the_users_training_commands_parse(command, monkeypatch):
    args = parsed("04_train", command.split(), monkeypatch)
    assert args.max_seq_len in (2048, 4096)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
@pytest.mark.parametrize("name", STAGES)
def test_run_file_parses_in_every_stage(path, name, monkeypatch):
    args = parsed(name, ["--config", str(path)], monkeypatch)
    wanted = yaml.safe_load(path.read_text())[SECTION[name]]
    assert args.output_dir and all(hasattr(args, key.replace("-", "_")) for key in wanted)


@pytest.mark.parametrize("name", STAGES)
def test_unknown_key_of_a_run_file_is_one_line_and_exit_2(name, tmp_path):
    (tmp_path / "run.yaml").write_text(f"{SECTION[name]}: {{no-such-flag: 1}}\n")
    done = subprocess.run([sys.executable, str(ROOT / f"{name}.py"), "--config", str(tmp_path / "run.yaml")], text=True, capture_output=True)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "no-such-flag" in done.stderr and done.stderr.startswith(f"{name}: ")


def test_flag_wins_over_run_file(tmp_path):
    script = load_script("02_build_vocab")
    (tmp_path / "run.yaml").write_text("run_dir: /r\nbuild_vocab: {size: 5, name: '{run_dir}/x', all: true, many: [1, 2], mode: on, body: {a: [1]}}\n")

    def parse(*argv):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--size", type=int, default=1)
        parser.add_argument("--name")
        parser.add_argument("--all", action="store_true")
        parser.add_argument("--mode", choices=["on", "off"])
        parser.add_argument("--many", action="append")
        parser.add_argument("--body", type=json.loads)
        args = script.parse_args(parser, "build_vocab", ["--config", str(tmp_path / "run.yaml"), *argv])
        return args.size, args.name, args.all, args.many, args.mode, args.body

    assert parse() == (5, "/r/x", True, ["1", "2"], "on", {"a": [1]})
    assert parse("--size", "7", "--many=3", '--body={"b": 2}') == (7, "/r/x", True, ["3"], "on", {"b": 2})


def test_open_stage_refuses_another_config_and_a_second_process(tmp_path):
    script = load_script("02_build_vocab")
    lock = script.open_stage(tmp_path / "out", {"a": 1, "urls": "x"}, {"urls"})
    with pytest.raises(script.UserError, match="another process"):
        script.open_stage(tmp_path / "out", {"a": 1, "urls": "x"}, {"urls"})
    lock.close()
    script.open_stage(tmp_path / "out", {"a": 1, "urls": "y"}, {"urls"}).close()
    with pytest.raises(script.UserError, match="a: 1 there, 2 now"):
        script.open_stage(tmp_path / "out", {"a": 2, "urls": "x"}, {"urls"})
    (tmp_path / "file").write_text("")
    with pytest.raises(script.UserError, match="file: cannot be written to"):
        script.open_stage(tmp_path / "file", {}, set())


def test_artifacts_json_says_what_the_scripts_do():
    artifacts = json.loads((ROOT / "configs/artifacts.json").read_text())
    assert set(artifacts["stages"]) == set(STAGES)
    for name in STAGES:
        script = load_script(name)
        assert script.STAGE == name and script.SCHEMA == artifacts["schema"]


@pytest.fixture
def serve(tmp_path):
    """serve(before="") starts scripts/serve.py from a shell that ends right after its server is ready; (its pid, the server's URL)."""
    (tmp_path / "stub.py").write_text("""import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Healthy).serve_forever()
""")
    port, pids = free_port(), []
    (tmp_path / "run.yaml").write_text(f'servers: {{plain: {{command: ["{{python}}", {tmp_path}/stub.py], flags: {{port: {port}}}}}}}\n')

    def start(before=""):
        command = f"{before} {sys.executable} {ROOT}/scripts/serve.py --config run.yaml --role plain --log server.log > serve.log 2>&1 & echo $!"
        # a hangup that is ignored here (tests behind nohup) would be in the shell and its children too: back to the default
        shell = subprocess.run(["bash", "-c", f"{command}; until grep -q ready serve.log; do sleep 0.1; done"],
                               cwd=tmp_path, text=True, stdout=subprocess.PIPE, timeout=60,
                               preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
        pids.append(int(shell.stdout))
        return pids[-1], f"http://127.0.0.1:{port}"

    yield start
    for pid in pids:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass


def gone(url: str, seconds: float) -> bool:
    """Whether nobody answers at `url` within so long."""
    deadline = time.monotonic() + seconds
    while healthy(url):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_server_behind_nohup_outlives_its_shell_and_a_hangup(serve):
    pid, url = serve("nohup")
    os.kill(pid, signal.SIGHUP)  # what a connection that drops sends to all jobs
    assert not gone(url, 1.5)
    os.kill(pid, signal.SIGTERM)
    assert gone(url, 15)


def test_without_nohup_a_hangup_ends_a_server(serve):
    pid, url = serve()
    os.kill(pid, signal.SIGHUP)
    assert gone(url, 15)


def test_what_quickstart_starts_ends_with_it(tmp_path):
    """Its function `bound`, in a shell that is killed by -9 and behind nohup."""
    function = re.search(r"^bound\(\) .*$", (ROOT / "scripts/quickstart.sh").read_text(), re.M)[0]
    shell = subprocess.run(["nohup", "bash", "-c", f"py={sys.executable}; {function}\n"
                            f"bound -c 'import time; open(\"here\", \"w\"); time.sleep(60)' >/dev/null & echo $!; until [ -e here ]; do sleep 0.1; done; kill -9 $$"],
                           cwd=tmp_path, text=True, stdout=subprocess.PIPE, timeout=30)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(shell.stdout)}/stat").exists() and Path(f"/proc/{int(shell.stdout)}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_serve_says_what_is_wrong_with_a_run_file(tmp_path):
    (tmp_path / "list.yaml").write_text("- a\n")
    for name in ("no.yaml", "list.yaml"):
        done = subprocess.run([sys.executable, str(ROOT / "scripts/serve.py"), "--config", str(tmp_path / name), "--role", "plain", "--log", str(tmp_path / "log")],
                              text=True, capture_output=True)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "not a readable run file" in done.stderr


@pytest.mark.parametrize("script, env, text", [
    ("quickstart.sh --python /no/python", {}, "quickstart: /no/python: no Python with this project's packages"),
    ("quickstart.sh --python {python} --config no.yaml", {}, "quickstart: no.yaml: no such run file"),
    ("quickstart.sh --python {python} --config {folder}/run.yaml", {}, "quickstart: {folder}/run.yaml: generate.output-dir is missing"),
    ("setup_venv.sh", {"PYTHON": "/no/python"}, "setup: no /no/python here"),
])
def test_shell_scripts_refuse_in_one_line(script, env, text, tmp_path):
    (tmp_path / "run.yaml").write_text(f"run_dir: {tmp_path}/run\ntarget: scripts/tiny_kimi\nextract: {{output-dir: x}}\n")
    fill = {"python": sys.executable, "folder": tmp_path}
    done = subprocess.run(["bash", *f"{ROOT}/scripts/{script}".format(**fill).split()], env={**os.environ, **env}, text=True, capture_output=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and done.stderr.startswith(text.format(**fill)), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["05_benchmark", "serve"])
def test_a_role_without_keys_is_one_line(name):
    script = load_script(name)
    with pytest.raises(script.UserError, match="servers.plain: no keys in it"):
        script.server_command({"plain": None, "extract": {"extends": "plain"}}, "extract")
