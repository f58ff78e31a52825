"""Serve a model with the real SGLang 0.5.23 on a machine without a GPU.

SGLang runs unmodified. What a CPU without AMX lacks stands in here: `sgl_kernel` (beside this file, plain torch),
triton and torchvision (import stubs; nothing of theirs is called). One choice of SGLang's is another: where it has no
kernel for verifying by sampling it emits the argmax at any temperature, and here it has one. Meant for small models:
tests, the quickstart. Seen on 2 cores, shared with other work: ready in 13 s, 1 GB of memory. All of SGLang's flags
are accepted; those in DEFAULTS are filled in unless given.

    python scripts/cpu_engine/serve.py --model-path scripts/tiny_kimi --port 30000
    python scripts/cpu_engine/serve.py --model-path scripts/tiny_kimi --port 30000 --speculative-algorithm EAGLE3 \
      --speculative-draft-model-path DRAFT --speculative-num-steps 3 --speculative-eagle-topk 1 \
      --speculative-num-draft-tokens 4

Bad input (another SGLang version, no model there, port taken, unknown flag) ends in one line and exit code 2.
"""
import argparse
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import re
import socket
import sys
import types
from pathlib import Path

# sgl_kernel follows internal signatures, which change between releases: only what was tried is let in.
SGLANG_VERSIONS = {"0.5.23"}
# attention: the backend whose kernels sgl_kernel has. float32: on a CPU bf16 is slower, and hides errors behind
# rounding. Radix cache, chunking and scheduling stay SGLang's own defaults.
DEFAULTS = {
    "--device": "cpu", "--dtype": "float32", "--attention-backend": "intel_amx", "--sampling-backend": "pytorch",
    "--grammar-backend": "none", "--cuda-graph-backend-decode": "disabled", "--cuda-graph-backend-prefill": "disabled",
    "--skip-server-warmup": True, "--trust-remote-code": True,
    "--sleep-on-idle": True,  # an idle server would keep a core busy
    "--mem-fraction-static": "0.2", "--max-total-tokens": "32768", "--max-running-requests": "32",
}


def fail(message):
    print(f"cpu_engine: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def sglang_version():
    """Version and folder of the SGLang that an import would take, read without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        fail("SGLang is not installed. Run: pip install -r scripts/requirements-cpu.txt, "
             "then pip install --no-deps -r scripts/requirements-cpu-nodeps.txt")
    folder = Path(spec.submodule_search_locations[0])
    file = folder / "_version.py"
    found = re.search(r"^__version__ = version = '([^']+)'", file.read_text() if file.exists() else "", re.M)
    return found[1] if found else "unknown", folder


def check_model(path, flag):
    """A folder with config.json and weights; names without a folder are left to SGLang (hub ids)."""
    folder = Path(path)
    if not folder.exists():
        if os.sep in path or path.startswith("."):
            fail(f"{flag} {path}: no such folder.")
        return
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        fail(f"{flag} {path}: no readable config.json there ({' '.join(str(error).split())}).")
    if not config.get("architectures"):
        fail(f"{flag} {path}: config.json names no architectures, so this is no model for SGLang.")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        fail(f"{flag} {path}: no *.safetensors there.")
    from safetensors import SafetensorError, safe_open
    for file in weights:  # SGLang would take a minute to die of a file that a full disk or a broken copy cut short
        try:
            with safe_open(file, "np"):
                pass  # its header is whole, and so long is the file
        except (OSError, SafetensorError):
            fail(f"{flag} {path}: {file.name} is damaged or incomplete.")


def check_port(host, port):
    with socket.socket() as probe:
        # A port that only waits out an old connection is free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            fail(f"{host}:{port} cannot be used ({error}). Stop what listens there or set another --port.")


def stub_triton(sglang_folder):
    """SGLang's own import stub for triton, which it installs by itself only on macOS.

    Loaded by path: `import sglang` needs it already.
    """
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", sglang_folder / "_platform_stubs.py")
    stubs = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    sys.meta_path.insert(0, stubs._TritonFinder())
    triton = stubs._make_mock("triton")
    triton.__version__, triton.Config = "3.0.0", stubs._Config
    triton.cdiv, triton.next_power_of_2 = stubs._cdiv, stubs._next_power_of_2
    triton.language = stubs._make_mock("triton.language")
    init = {"__init__": lambda self, value=None: setattr(self, "value", value)}
    triton.language.constexpr = type("constexpr", (), init)


def stub_torchvision():
    """SGLang imports InterpolationMode and `functional` for models that are not served here.

    Transformers must go on believing that torchvision is absent, or it would build image processors on the stub: its
    answer is asked for, and so cached, beforehand.
    """
    # Hides an installed one too: the usual wheel does not load beside a CPU build of torch
    sys.modules["torchvision"] = None
    from transformers.utils import import_utils
    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        if getattr(import_utils, name, bool)():
            raise RuntimeError(f"transformers.{name}() is true although torchvision is hidden.")
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
    transforms = sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
    transforms.functional = sys.modules["torchvision.transforms.functional"]
    modes = types.SimpleNamespace(NEAREST="nearest", BILINEAR="bilinear", BICUBIC="bicubic", LANCZOS="lanczos")
    transforms.InterpolationMode = transforms.functional.InterpolationMode = modes


def stand_in_for_mla_drafters():
    """What models/kimi_k25_eagle3.py meets on a CPU: DeepSeek's attention asks for YaRN, and CUDA is waited for."""
    import torch
    from sglang.srt.layers.rotary_embedding import factory
    torch.cuda.synchronize = lambda device=None: None
    yarn = factory.get_rope_cpu
    # args[5] is the scaling, the last one the device
    factory.get_rope_cpu = lambda *args: yarn(*args) if args[5] else factory.get_rope(*args[:-1])


def stand_in_for_sampled_verification():
    """SGLang has no kernel for it on a CPU, and so emits the argmax there and ignores the temperature; here is one."""
    import sgl_kernel
    from sglang.srt.speculative import eagle_utils
    for name in ("tree_speculative_sampling_target_only", "top_k_renorm_prob", "top_p_renorm_prob"):
        setattr(eagle_utils, name, getattr(sgl_kernel, name))
    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **platform: is_all_greedy


def prepare():
    """Everything that must stand before SGLang is imported."""
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", CUDA_VISIBLE_DEVICES="", TORCHDYNAMO_DISABLE="1")
    # Small products gain little from threads, and stall when cores are shared
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    version, folder = sglang_version()
    if version not in SGLANG_VERSIONS:
        fail(f"SGLang {version} at {folder}: this engine was tried with {', '.join(sorted(SGLANG_VERSIONS))} only. "
             "Install that one, or check sgl_kernel against the new release and add it to SGLANG_VERSIONS.")
    stub_triton(folder)
    stub_torchvision()
    import sgl_kernel  # noqa: F401  the stand-in; registers its operators
    from sglang.srt.runtime_context import override_platform
    # Lets the server arguments keep attention_backend=intel_amx; cpu_has_amx_support() itself stays False, so that no
    # AMX layer is chosen.
    override_platform(has_amx=True).install()
    stand_in_for_mla_drafters()
    stand_in_for_sampled_verification()


def fork_instead_of_spawn():
    """SGLang's scheduler and detokenizer begin as copies of this process.

    Spawned, as SGLang wants it for CUDA's sake, each of them would import everything anew: 12 more seconds of
    processor time, 1 GB more of memory.
    """
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_start_method("fork", force=True)


def main(argv):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    known, _ = parser.parse_known_args(argv)
    check_model(known.model_path, "--model-path")
    if known.speculative_draft_model_path:
        check_model(known.speculative_draft_model_path, "--speculative-draft-model-path")
    check_port(known.host, known.port)
    given = {word.split("=")[0] for word in argv}
    for flag, value in DEFAULTS.items():
        if flag not in given:
            argv = argv + ([flag] if value is True else [flag, value])
    prepare()
    argparse.ArgumentParser.error = lambda parser, message: fail(
        f"{message}. `python -m sglang.launch_server --help` lists the flags.")
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree
    fork_instead_of_spawn()
    try:
        server_args = prepare_server_args(argv)
        server_args.resolve_once()
    except (ValueError, AssertionError) as error:  # a flag, a combination or a model that SGLang refuses
        fail(" ".join(str(error).split()))
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
