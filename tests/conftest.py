"""Shared by all tests: numbered scripts as modules, and the real SGLang on the CPU as a fixture.

Three workers share the tests (scripts/test.sh), each file whole on one of them, and in an order in which tests that want the same server
follow each other.
"""
import contextlib
import functools
import gc
import importlib.util
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on a CPU; must be set before anything imports triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "patches"))  # eagle3_capture finds its other half there, as with --forward-hooks
from eagle3.stage import UserError  # noqa: E402
import preloaded  # noqa: E402

TINY_KIMI = ROOT / "scripts" / "tiny_kimi"
SAVEFIG, Figure.savefig = Figure.savefig, preloaded.undrawn  # see the fixture `drawn`
CAPTURE_LAYERS = [2, 4, 6]  # the tiny target has 8 layers


def load_script(name: str):
    """The numbered script `name` ("04_train") as a module; loaded once."""
    if name not in sys.modules:
        path = next(folder / f"{name}.py" for folder in (ROOT, ROOT / "scripts", ROOT / "patches") if (folder / f"{name}.py").is_file())
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run_script(name: str, *args, env=None, timeout=600) -> subprocess.CompletedProcess:
    """A numbered script as its users run it: a process of its own, output redirected."""
    return preloaded.run([sys.executable, "-u", ROOT / f"{name}.py", *args], timeout, cwd=ROOT,
                         env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})})


def run_here(name: str, *args) -> subprocess.CompletedProcess:
    """The same in this process, without a process's start of seconds: main() ended as eagle3.stage.run() ends it."""
    out, error, code = io.StringIO(), "", 0
    with contextlib.redirect_stdout(out):
        try:
            code = load_script(name).main([str(arg) for arg in args]) or 0
        except UserError as why:
            code, error = 2, f"{name}: {why}\n"
    return subprocess.CompletedProcess([name, *args], code, out.getvalue(), error)


def free_port() -> int:
    """A free port below the range that the kernel hands out by itself (Linux: 32768 and up).

    A server takes half a minute to bind what it was given; a port of that range can go to any other socket meanwhile, one of the
    server's own gloo and zmq sockets included.
    """
    for port in random.SystemRandom().sample(range(10_000, 30_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("100 ports below 30000 are all taken")


def post(url: str, body: dict, timeout=300) -> dict | list:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=timeout))


def sglang_package() -> Path:
    return Path(importlib.util.find_spec("sglang").submodule_search_locations[0])


@pytest.fixture(autouse=True)
def drawn(request, monkeypatch):
    """Pictures are drawn in tests marked so."""
    if request.node.get_closest_marker("drawn"):
        monkeypatch.setattr(Figure, "savefig", SAVEFIG)


@pytest.fixture(scope="session")
def tiny_kimi() -> Path:
    return TINY_KIMI


@pytest.fixture(scope="session")
def patched_sglang(tmp_path_factory):
    """A copy of the installed sglang with the patch in every model file that takes it; the folder to put first on PYTHONPATH.

    The original stays as it is.
    """
    source = sglang_package()
    models = list(json.loads((ROOT / "patches/versions.json").read_text())["files"])
    original = {name: (source / f"srt/models/{name}.py").read_bytes() for name in models}
    overlay = tmp_path_factory.mktemp("overlay")
    shutil.copytree(source, overlay / "sglang")  # with its compiled files: 1,500 modules would have to be compiled again
    for info in source.parent.glob("sglang-*.dist-info"):
        shutil.copytree(info, overlay / info.name)  # the version is read from it
    patch = [sys.executable, str(ROOT / "patches/sglang_patch.py")]
    subprocess.run([*patch, "apply", "--models", ",".join(models), "--sglang-path", str(overlay / "sglang")], check=True)
    yield overlay
    subprocess.run([*patch, "restore", "--sglang-path", str(overlay / "sglang")], check=True)
    for folder in (source, overlay / "sglang"):
        assert {name: (folder / f"srt/models/{name}.py").read_bytes() for name in models} == original
    assert not (overlay / "sglang/srt/eagle3_capture.py").exists()


@functools.cache
def sglang(python_path: str) -> preloaded.Preloaded:
    return preloaded.Preloaded("sglang", python_path)


class Engine:
    """One real SGLang server on the CPU, in a process group of its own.

    cold: it imports SGLang itself, as a user's does; else it begins as a copy of a process that has done so.
    """

    def __init__(self, log: Path, model: Path, flags: dict, env: dict, cold: bool = False):
        self.port, self.log = free_port(), log
        self.capture_dir = Path(env["EAGLE3_CAPTURE_DIR"]) if "EAGLE3_CAPTURE_DIR" in env else None
        self.url = f"http://127.0.0.1:{self.port}"
        argv = ["--model-path", str(model), "--port", str(self.port), "--dtype", "float32"]
        for flag, value in flags.items():
            argv += [f"--{flag}", *([] if value is True else map(str, value) if isinstance(value, list) else [str(value)])]
        self.argv, self.env, self.cold = argv, {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}, cold
        self.start()

    def start(self):
        with open(self.log, "ab") as out:
            kept = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "env": self.env, "start_new_session": True}
            if self.cold:
                self.process = subprocess.Popen([sys.executable, str(ROOT / "scripts/cpu_engine/serve.py"), *self.argv], **kept)
            else:
                self.process = sglang(self.env.get("PYTHONPATH", "")).popen(self.argv, **kept)
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except (OSError, urllib.error.URLError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    pytest.fail(f"server did not start: {self.log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.1)

    def kill(self):
        """kill -9 of the whole group, as a machine that dies does it."""
        try:
            os.killpg(self.process.pid, 9)
        except ProcessLookupError:
            pass
        self.process.wait()


@pytest.fixture(scope="session")
def engine(tmp_path_factory, request):
    """engine(model=..., draft=None, capture_dir=None, **flags) -> Engine; the same arguments give the same running server.

    capture_dir: a folder, or True for one that goes with the other arguments (the server's `capture_dir`), so that several files can
    share a capturing server. At most one server of a worker runs at a time: asking for another one stops the one before.
    """
    running, folders = {}, {}

    def start(model: Path = TINY_KIMI, draft: Path | None = None, capture_dir: Path | bool | None = None, **flags) -> Engine:
        flags = {key.replace("_", "-"): value for key, value in flags.items()}
        flags = {"reasoning-parser": "kimi_k2", "tool-call-parser": "kimi_k2"} | flags  # of the chat route alone, as Kimi is served
        env = {}
        if draft:
            flags |= {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": draft, "speculative-num-steps": 3,
                      "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 4} | flags
        if capture_dir:
            flags |= {"disable-radix-cache": True}
            if capture_dir is True:
                capture_dir = folders.setdefault(str([model, flags]), tmp_path_factory.mktemp("incoming") / "made_by_the_server")
            env = {"EAGLE3_CAPTURE_DIR": str(capture_dir), "EAGLE3_CAPTURE_LAYERS": ",".join(map(str, CAPTURE_LAYERS)),
                   "PYTHONPATH": str(request.getfixturevalue("patched_sglang"))}
        key = json.dumps([str(model), flags, env], default=str, sort_keys=True)
        if key in running and running[key].process.poll() is None:
            return running[key]
        for other in running.values():
            other.kill()
        running.clear()
        running[key] = Engine(tmp_path_factory.mktemp("server") / "server.log", model, flags, env)
        return running[key]

    yield start
    for server in running.values():
        server.kill()


# One request a prefill: the last bits of a float depend on what else is in the batch, and tests of 03 compare bytes
ONE_AT_A_TIME = {"max_running_requests": 1, "chunked_prefill_size": 128}


@pytest.fixture(scope="session")
def extracted(engine, tmp_path_factory) -> Path:
    """A run folder as 01 and an undisturbed 03 leave it: responses/ of the engine itself, 8 tokens each, and hidden_states/.

    Some of its 120 samples are longer than the prefill chunk of 128. `incoming` is where the server captures into.
    """
    from stand_in import write_responses

    root, server, chance = tmp_path_factory.mktemp("extracted"), engine(capture_dir=True, **ONE_AT_A_TIME), random.Random(0)
    (root / "incoming").symlink_to(server.capture_dir)
    prompts = [[chance.randrange(300, 2000) for _ in range(chance.choice([4, 9, 30, 140, 150]))] for _ in range(120)]
    answers = post(f"{server.url}/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}})
    write_responses(root / "responses", [{"id": f"p{number:03d}-t0", "prompt_ids": prompt, "response_ids": answer["output_ids"]}
                                         for number, (prompt, answer) in enumerate(zip(prompts, answers))])
    done = run_script("03_extract", "--data-dir", root / "responses", "--output-dir", root / "hidden_states", "--base-url", server.url,
                      "--capture-dir", server.capture_dir, "--concurrency", 4, "--log-interval", 1)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith(f"done: {root / 'hidden_states'}"), done
    return root


# ---- which worker runs a test, and when ----
STARTS_SGLANG = {"engine", "patched_sglang", "workplace"}  # fixtures: what uses them gets the marker `engine`
# Files, or the tests of one with a fixture: the long ones first
ENGINE_ORDER = ["test_benchmark", "test_generate", "test_follow", "test_extract", "test_capture capturing", "test_serving", "test_llama",
                "test_capture", "test_capture_families", "test_patch"]
# Of the files without servers: a long one that begins last would run alone
SLOWEST_FIRST = ["test_train", "test_preflight", "test_train_faults", "test_benchmark_faults", "test_extract_faults"]


def engine_turn(item) -> int:
    """Where a test that starts SGLang stands in ENGINE_ORDER; last, if its file is not named there."""
    fits = [number for number, name in enumerate(ENGINE_ORDER)
            if item.path.stem == name.split()[0] and set(name.split()[1:]) <= set(item.fixturenames)]
    return min(fits, default=len(ENGINE_ORDER) - 1)


def turn(item) -> tuple[bool, int]:
    """Sorts tests: those that start SGLang first, by the server that they want; then the slowest files."""
    if item.get_closest_marker("engine"):
        return False, engine_turn(item)
    file = item.path.stem
    return True, SLOWEST_FIRST.index(file) if file in SLOWEST_FIRST else len(SLOWEST_FIRST)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config, items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))
        if STARTS_SGLANG & set(item.fixturenames):
            item.add_marker("engine")
    items.sort(key=turn)


FROZEN_BEFORE = [None]  # the file whose tests run


def pytest_runtest_setup(item):
    """What was imported so far is set apart from the garbage collector: tests ask it for the locks of runs in this process that ended,
    some hundred times, and would look through all of torch each time."""
    if item.path != FROZEN_BEFORE[0]:
        FROZEN_BEFORE[0] = item.path
        gc.collect()
        gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or Triton's binding would name all that is left as leaks
