"""What all scripts share: the rules of the house, flags and run files, the contract for machines, servers that end when they should."""
import argparse
import ast
import fcntl
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

from conftest import ROOT, free_port, load_script, run_here
from eagle3 import stage
from eagle3.drafter import Shape, exported_names
from eagle3.mla import Latent
from eagle3.servers import healthy, server_command

STAGES = ["01_generate", "02_build_vocab", "03_extract", "04_train", "05_benchmark"]
SECTION = dict(zip(STAGES, ["generate", "build_vocab", "extract", "train", "benchmark"]))


def test_top_level_is_what_the_user_fixed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {name.split("/")[0] for name in tracked}
    assert {name for name in top if not name.startswith(".")} <= {f"{name}.py" for name in STAGES} | {
        "patches", "configs", "scripts", "tests", "pyproject.toml", "README.md"}


# ---- the house ----
TRACKED = [ROOT / name for name in subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                                                  check=True).stdout.split() if (ROOT / name).is_file()]
HOUSE = [path for path in TRACKED if path.suffix in (".py", ".sh") and ROOT / "tests" not in path.parents]
ROOMS = {path.stem: path for path in HOUSE if path.parent == ROOT / "scripts/eagle3" and path.stem != "__init__"}


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, wherever in it: "numpy", "eagle3.stage"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            found |= {f"eagle3.{alias.name}" for alias in node.names} if node.module == "eagle3" else {node.module}
    return found


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    # pyyaml's; nvidia-ml-py's; torch's on a GPU; httpx's; only with 04's --tensorboard
    return packages | {"yaml", "pynvml", "triton", "certifi", "tensorboard"}


@pytest.mark.parametrize("path", [*(ROOT / f"{name}.py" for name in STAGES), *ROOMS.values()], ids=lambda path: path.stem)
def test_script_stands_alone(path):
    """It imports the standard library, declared packages and rooms: no other script, nothing of tests/; no file by its path either."""
    packages = {name.split(".")[0] for name in imports(path)}
    assert packages <= declared() | sys.stdlib_module_names | {"eagle3"}, packages - declared() - sys.stdlib_module_names
    assert {name.split(".")[1] for name in imports(path) if name.startswith("eagle3.")} <= set(ROOMS)
    assert not re.search(r"spec_from_file_location|import_module|run_path|SourceFileLoader", path.read_text())


def test_rooms_import_one_way():
    """No circle: from the ground floor up, each room finds all that it imports below it."""
    above = {name: {found.split(".")[1] for found in imports(path) if found.startswith("eagle3.")} for name, path in ROOMS.items()}
    built = set()
    while above:
        floor = {name for name, needs in above.items() if needs <= built}
        assert floor, f"a circle among {sorted(above)}"
        built |= floor
        above = {name: needs for name, needs in above.items() if name not in floor}


def test_scripts_readme_lists_the_rooms_ground_floor_first():
    rooms = (ROOT / "scripts/README.md").read_text().split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)\.py` \|", rooms, re.M)
    assert sorted(listed) == sorted(ROOMS)
    for at, name in enumerate(listed):
        assert {found.split(".")[1] for found in imports(ROOMS[name]) if found.startswith("eagle3.")} <= set(listed[:at]), name


@pytest.mark.parametrize("path", HOUSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_can_be_read(path):
    """At most 450 lines (a numbered script 400), functions of at most 60 (main 80), lines of at most 120 columns."""
    lines = path.read_text().splitlines()
    assert len(lines) <= (400 if path.stem in STAGES else 450)
    if path.suffix == ".py":
        assert not [number for number, line in enumerate(lines, 1) if len(line) > 120]
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        assert not [node.name for node in functions if node.end_lineno - node.lineno + 1 > (80 if node.name == "main" else 60)]


def test_the_lines_of_a_readme_fit_a_terminal():
    """Tables and blocks; prose is wrapped by whoever reads it."""
    for path in TRACKED:
        if path.name == "README.md":
            wide = [line for line in path.read_text().splitlines() if len(line) > 120 and line.startswith(("|", "    "))]
            assert not wide, (path, wide)
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


# ---- flags and run files ----
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
    argv = ["--config", str(tmp_path / "run.yaml")]
    if name in ("04_train", "05_benchmark"):  # their imports take seconds
        done = run_here(name, *argv)
    else:
        done = subprocess.run([sys.executable, str(ROOT / f"{name}.py"), *argv], text=True, capture_output=True)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "no-such-flag" in done.stderr and done.stderr.startswith(f"{name}: ")


@pytest.mark.parametrize("name, some", [
    ("01_generate", {"--temperature F": "1.0", "--dedup, --no-dedup": "on"}), ("02_build_vocab", {"--held-out F": "0.05"}),
    ("03_extract", {"--concurrency CONCURRENCY": "32"}), ("04_train", {"--epochs EPOCHS": "5", "--lr LR": "by width"}),
    ("05_benchmark", {"--steps N [N ...]": "1 2 3 4 5", "--fixed-length": None})])
def test_help_says_the_defaults(name, some, capsys):
    with pytest.raises(SystemExit):
        load_script(name).main(["--help"])
    flags = re.split(r"(?m)^  (?=-)", capsys.readouterr().out)
    for flag, default in some.items():
        said, = (" ".join(text.split()) for text in flags if text.startswith(flag))
        assert f"default: {default}" in said if default else "default" not in said


def test_flag_wins_over_run_file(tmp_path):
    (tmp_path / "run.yaml").write_text("run_dir: /r\nbuild_vocab: {size: 5, name: '{run_dir}/x', all: true, many: [1, 2], mode: on, body: {a: [1]}}\n")

    def parse(*argv):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--size", type=int, default=1)
        parser.add_argument("--name")
        parser.add_argument("--all", action="store_true")
        parser.add_argument("--mode", choices=["on", "off"])
        parser.add_argument("--many", action="append")
        parser.add_argument("--body", type=json.loads)
        args = stage.parse_args(parser, "build_vocab", ["--config", str(tmp_path / "run.yaml"), *argv])
        return args.size, args.name, args.all, args.many, args.mode, args.body

    assert parse() == (5, "/r/x", True, ["1", "2"], "on", {"a": [1]})
    assert parse("--size", "7", "--many=3", '--body={"b": 2}') == (7, "/r/x", True, ["3"], "on", {"b": 2})


def test_open_stage_refuses_another_config_and_a_second_process(tmp_path):
    lock = stage.open_stage(tmp_path / "out", {"a": 1, "urls": "x"}, {"urls"})
    with pytest.raises(stage.UserError, match="another process"):
        stage.open_stage(tmp_path / "out", {"a": 1, "urls": "x"}, {"urls"})
    lock.close()
    stage.open_stage(tmp_path / "out", {"a": 1, "urls": "y"}, {"urls"}).close()
    with pytest.raises(stage.UserError, match="a: 1 there, 2 now"):
        stage.open_stage(tmp_path / "out", {"a": 2, "urls": "x"}, {"urls"})
    (tmp_path / "file").write_text("")
    with pytest.raises(stage.UserError, match="file: cannot be written to"):
        stage.open_stage(tmp_path / "file", {}, set())


def test_artifacts_json_says_what_the_scripts_do():
    artifacts = json.loads((ROOT / "configs/artifacts.json").read_text())
    assert set(artifacts["stages"]) == set(STAGES)
    for name in STAGES:
        script = load_script(name)
        assert script.STAGE == name and stage.SCHEMA == artifacts["schema"]


@pytest.mark.parametrize("kind", [{}, {"aux_norm": "each", "aux_states": 5, "norm_output": True}, {"aux_norm": "all"},
                                  {"layers": 2, "o_bias": True, "fc_bias": True}, {"latent": Latent(20, 12, 6, 4, 7)}], ids=str)
def test_artifacts_json_names_the_tensors_of_every_kind_of_drafter(kind):
    shape = Shape(hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=99, draft_vocab=61, rms_norm_eps=1e-5, rope_theta=1e4,
                  max_positions=64, **kind)
    contract = json.loads((ROOT / "configs/artifacts.json").read_text())["stages"]["04_train"]
    plain, others = set(contract["weights"]), [re.escape(name).replace(r"<aux\ state>", r"\d").replace(r"\*", ".*") for name in contract["of_some_kinds"]]
    names = exported_names(shape)
    if shape.latent:
        plain = plain - set(contract["of_mla"].pop("instead of")) | set(contract["of_mla"])
    assert plain <= names and all(any(re.fullmatch(other, name) for other in others) for name in names - plain)
    assert kind.keys() & {"aux_norm", "layers"} or names == plain


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


def run_file(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(f"run_dir: {folder}/run\ntarget: some\ngenerate: {{output-dir: '{{run_dir}}/01'}}\n"
                    "extract: {output-dir: '{run_dir}/03'}\n")
    return path


def test_a_second_quickstart_of_a_run_is_refused(tmp_path):
    (tmp_path / "run/logs").mkdir(parents=True)
    with open(tmp_path / "run/logs/quickstart.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(["bash", "scripts/quickstart.sh", "--python", sys.executable, "--config", run_file(tmp_path)],
                              cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 2 and "another quickstart is at work on this run" in done.stderr, done.stderr


def test_serve_says_what_is_wrong_with_a_run_file(tmp_path):
    (tmp_path / "list.yaml").write_text("- a\n")
    for name, text in (("no.yaml", "not a readable YAML file"), ("list.yaml", "no sections in it, but a list")):
        done = subprocess.run([sys.executable, str(ROOT / "scripts/serve.py"), "--config", str(tmp_path / name), "--role", "plain", "--log", str(tmp_path / "log")],
                              text=True, capture_output=True)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and text in done.stderr


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


def test_a_role_without_keys_is_one_line():
    with pytest.raises(stage.UserError, match="servers.plain: no keys in it"):
        server_command({"plain": None, "extract": {"extends": "plain"}}, "extract")
