"""Look at this machine before a run: versions, GPUs, disk, limits, patch, ports, the target's files and token ids. Changes nothing.

    python3 scripts/preflight.py --config configs/kimi-k2.5-10k.yaml
    python3 scripts/preflight.py --config configs/kimi-k2.5-10k.yaml --stage 04_train

Use the Python that will run the stages; the patch is looked for where the run file's servers run. Each finding is one line, `preflight: <what> | <where> | <what to do>`; a warning says so.
Exit 0 when nothing stands in the way (warnings or not), 2 when something does, or the run file cannot be read.
"""
import argparse
import importlib.metadata
import json
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

STAGE = "preflight"
ROOT = Path(__file__).resolve().parent.parent
STAGES = ["01_generate", "02_build_vocab", "03_extract", "04_train", "05_benchmark"]
ROLES = {"01_generate": {"plain"}, "03_extract": {"extract"}, "05_benchmark": {"plain", "speculative"}}  # servers a stage talks to
KIMI_IDS = {"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588, "<|im_system|>": 163594,
            "<|tool_calls_section_begin|>": 163595, "<|tool_calls_section_end|>": 163596, "<|tool_call_begin|>": 163597,
            "<|tool_call_argument_begin|>": 163598, "<|tool_call_end|>": 163599, "<|im_middle|>": 163601, "<think>": 163606, "</think>": 163607,
            "[PAD]": 163839}
WEIGHTS = {"embed_tokens": ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
           "lm_head": ("language_model.lm_head.weight", "lm_head.weight"),
           "final norm": ("language_model.model.norm.weight", "model.norm.weight", "model.language_model.norm.weight")}
OPEN_FILES, FEWEST_FILES = 4096, 1024
SHM = 8e9  # bytes: NCCL and SGLang's processes share memory there; containers often get 64 MB


class UserError(Exception):
    """Bad input or configuration. The message says what, where and what to do; the script ends with exit code 2."""


class Findings(list):
    """Lines (severity, text) in the order in which they were found; printed at once."""

    def add(self, what: str, where: object, remedy: str, severity: str = "error") -> None:
        self.append((severity, what))
        print(f"{STAGE}: {'warning: ' if severity == 'warning' else ''}{what} | {where} | {remedy}", flush=True)

    def count(self, severity: str) -> int:
        return sum(found == severity for found, _ in self)


def read_run(path: Path) -> dict:
    try:
        text = path.read_text()
        document = yaml.safe_load(text)
        for key in ("run_dir", "target"):
            text = text.replace(f"{{{key}}}", str(document[key]))
        document = yaml.safe_load(text)
        return {**document, **{name: document.get(name) or {} for name in ("generate", "build_vocab", "extract", "train", "benchmark", "servers")}}
    except (OSError, yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not a readable run file with run_dir and target ({' '.join(str(error).split())}).") from None


def role(servers: dict, name: str, below: tuple = ()) -> dict:
    """{"command", "flags", "env"} of a role, what it extends merged in. Raises UserError."""
    if name in below:
        raise UserError(f"servers.{below[0]}: `extends` goes in a circle.")
    spec = servers.get(name) or {}
    above = spec.get("extends")
    base = role(servers, above, (*below, name)) if above in servers else {"command": None, "flags": {}, "env": {}}
    return {"command": spec.get("command", base["command"]), **{key: {**base[key], **(spec.get(key) or {})} for key in ("flags", "env")}}


def existing(path: Path) -> Path:
    """The nearest folder or file at or above `path` that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def gpus() -> list[dict]:
    """[{"name", "gb" (memory), "used_gb", "capability" (12.0)}]; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,compute_cap", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip().splitlines()
        rows = [[cell.strip() for cell in line.rsplit(",", 3)] for line in lines]
        return [{"name": name, "gb": float(total) * 2**20 / 1e9, "used_gb": float(used) * 2**20 / 1e9, "capability": float(capability)}
                for name, total, used, capability in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


# ---- the checks: each takes the run file and adds findings ----
def check_versions(run: dict, found: Findings) -> None:
    if sys.version_info < (3, 11):
        found.add(f"Python {sys.version.split()[0]} is too old", sys.executable, "use Python 3.11 or newer")
    wanted = re.search(r"dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.S)[1]
    for name in re.findall(r'"([A-Za-z0-9_-]+)', wanted):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.add(f"the package {name} is missing", sys.executable, "run `pip install .` in this folder with that Python")


def check_sglang(run: dict, found: Findings, roles: set) -> None:
    """Of the Python that serves: the one that the role's command names, or this one."""
    python = (role(run["servers"], "extract")["command"] or ["{python}"])[0]
    python = python if Path(python).name.startswith("python") else sys.executable
    try:
        done = subprocess.run([python, str(ROOT / "patches/sglang_patch.py"), "status"], capture_output=True, text=True)
    except OSError as error:
        return found.add(f"the servers' Python cannot be run ({error.strerror})", python, "correct servers.plain.command")
    said = (done.stdout or done.stderr).strip()
    if done.returncode:
        found.add("SGLang cannot be patched: " + said.removeprefix("sglang_patch: "), python,
                  "install one of the releases in patches/versions.json, unchanged")
    elif "another state" in said:
        found.add(said, ROOT / "patches/sglang_patch.py", "run `python3 patches/sglang_patch.py apply` again and restart servers")
    elif "extract" in roles and ": original" in said:
        found.add(said, "role extract", "run `python3 patches/sglang_patch.py apply` before its server starts (quickstart.sh does it itself)",
                  "warning")


def check_servers(run: dict, found: Findings, roles: set) -> None:
    """What the roles' flags must be for each other, for 03 and for the drafter."""
    train, extract = run["train"], role(run["servers"], "extract")
    for name in sorted(roles - set(run["servers"])):
        found.add(f"the role {name} is missing", "servers", f"add servers.{name} to the run file (configs/quickstart.yaml has one)")
    if "extract" in roles & set(run["servers"]):
        if not extract["flags"].get("disable-radix-cache"):
            found.add("the radix cache is on, so shared prefixes would not be captured", "servers.extract.flags", "set disable-radix-cache: true")
        capture, out = extract["env"].get("EAGLE3_CAPTURE_DIR"), run["extract"].get("output-dir")
        layers = extract["env"].get("EAGLE3_CAPTURE_LAYERS")
        wanted = run["extract"].get("capture-dir") or f"{out}/.incoming"
        if not capture or not layers:
            found.add("EAGLE3_CAPTURE_DIR or EAGLE3_CAPTURE_LAYERS is not set, so nothing would be captured", "servers.extract.env",
                      "set both (README, 03_extract.py)")
        else:
            if Path(capture).absolute() != Path(wanted).absolute():
                found.add(f"the server would write to {capture}, 03 waits at {wanted}", "servers.extract.env",
                          "set EAGLE3_CAPTURE_DIR to 03's folder, or extract.capture-dir to the server's")
            if existing(Path(capture)).stat().st_dev != existing(Path(str(out))).stat().st_dev:
                found.add(f"{capture} and {out} lie on different file systems, so samples cannot be renamed into place",
                          "servers.extract.env", "put both on the same disk")
    speculative = role(run["servers"], "speculative")["flags"]
    if "speculative" in roles & set(run["servers"]):
        steps, trained = int(speculative.get("speculative-num-steps", 0)), int(train.get("ttt-steps", 3))
        if steps > trained:
            found.add(f"serving with {steps} steps, training with {trained} TTT steps", "servers.speculative.flags",
                      f"set train.ttt-steps to at least {steps}")
        draft, best = speculative.get("speculative-draft-model-path"), f"{train.get('output-dir')}/best"
        if draft != best:
            found.add(f"the server takes the drafter {draft}, 04 writes {best}", "servers.speculative.flags",
                      "make them the same unless you mean an older drafter", "warning")


def on_gpu(spec: dict) -> bool:
    return not any("cpu_engine" in str(word) for word in spec["command"] or [])


def check_gpus(run: dict, found: Findings, roles: set, plan: dict) -> None:
    there, said = gpus(), set()

    def add(what, *rest):
        if what not in said:  # roles share most flags: once is enough
            said.add(what)
            found.add(what, *rest)

    for name in sorted(roles & set(run["servers"])):
        spec, where = role(run["servers"], name), f"servers.{name}.flags"
        if not on_gpu(spec):
            continue
        if not there:
            add("no CUDA GPU is seen (nvidia-smi lists none)", f"servers.{name}", "run this on the machine with the GPUs, or install the driver")
            continue
        flags, first = spec["flags"], there[0]
        count, fraction = int(flags.get("tp-size", 1)), float(flags.get("mem-fraction-static", 0.88))
        if len(there) < count:
            add(f"{len(there)} GPUs, tp-size is {count}", where, f"set tp-size to at most {len(there)}")
        share = plan["target_bytes"] / count / 1e9
        if share > first["gb"] * fraction:
            add(f"{share:.1f} GB of weights on each GPU do not fit into {fraction:g} of {first['gb']:.0f} GB", where,
                "raise tp-size or mem-fraction-static")
        if first["capability"] >= 12 and flags.get("attention-backend") != "triton":
            add(f"attention-backend {flags.get('attention-backend')} on SM120 ({first['name']})", where,
                "set attention-backend: triton, whose block sizes fit its 100 KB of shared memory", "warning")
        used = max(gpu["used_gb"] for gpu in there[:count])
        if used > 2:
            add(f"{used:.1f} GB of a GPU are in use already", "nvidia-smi", "stop what runs there before the server starts", "warning")
        if count > 1 and (shm := shutil.disk_usage("/dev/shm").free) < SHM:
            add(f"/dev/shm has {shm / 1e9:.2f} GB free, {SHM / 1e9:.0f} are wanted for {count} ranks", "/dev/shm",
                "start the container with --shm-size 16g, or `mount -o remount,size=16G /dev/shm`", "error" if shm < SHM / 8 else "warning")


def check_limits(run: dict, found: Findings) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        found.add(f"{soft} open files are allowed (hard limit {hard})", "ulimit -n", f"`ulimit -n {max(65536, OPEN_FILES)}` in the shell that starts the stages",
                  "error" if soft < FEWEST_FILES else "warning")


def check_places(run: dict, found: Findings, plan: dict, stages: list) -> None:
    """Folders can be written, and what plan.py counts fits on their disks."""
    needs: dict[int, list] = {}
    out, output = Path(str(run["run_dir"])), Path(str(run["train"].get("output-dir", run["run_dir"])))
    for place, need in ((out, plan["responses_bytes"] + plan["states_on_disk"]), (output, plan["checkpoint_bytes"])):
        near = existing(place)
        try:
            with tempfile.NamedTemporaryFile(dir=near, prefix=".preflight"):
                pass
        except OSError as error:
            found.add(f"nothing can be written there ({error.strerror})", near, f"give this user a writable {place}")
            continue
        needs.setdefault(near.stat().st_dev, []).append((near, need))
    if not {"01_generate", "03_extract", "04_train"} & set(stages) or not (Path(str(run["target"])) / "config.json").is_file():
        return  # without the target the plan would count with Kimi-K2.5's sizes
    there = plan.get("disk_there", 0)  # counted as lying on the first disk: it is nearly all hidden states
    for disk in needs.values():
        need, free = sum(need for _, need in disk) - there, shutil.disk_usage(disk[0][0]).free
        there = 0
        if need > free:
            found.add(f"{need / 1e9:,.1f} GB more will be written, {free / 1e9:,.1f} GB are free", disk[0][0],
                      "lower generate.limit, or use a larger disk: `scripts/plan.py --config ...` says how many samples fit")


def check_ports(run: dict, found: Findings, roles: set) -> None:
    for port in sorted({int(role(run["servers"], name)["flags"].get("port", 30000)) for name in roles & set(run["servers"])}):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                found.add(f"port {port} is taken", "servers",
                          "stop what listens there, or set another port in the run file (if it is this run's own server, all is well)")


def check_target(run: dict, found: Findings) -> dict | None:
    """config.json, if it is there; findings for shards that are missing, cut short or hold no plain embedding and head."""
    folder = Path(str(run["target"]))
    try:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config
        layers, vocab = text["num_hidden_layers"], text["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        return found.add(f"no readable config.json of a target ({' '.join(str(error).split())})", folder, "set `target` in the run file to the model's folder")
    index = folder / "model.safetensors.index.json"
    try:
        names = json.loads(index.read_text())["weight_map"] if index.exists() else None
    except (OSError, ValueError, KeyError):
        found.add("not a readable index", index, "download that file again")
        return config
    shards = sorted(set(names.values())) if names is not None else sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        found.add("no *.safetensors", folder, "download the weights")
    dtypes = {}
    for name in shards:
        path = folder / name
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length < 1 << 28 else {}
            end = 8 + length + max(tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__")
            if path.stat().st_size != end:
                found.add(f"{path.stat().st_size:,} bytes, its header says {end:,}", path, "download that file again")
            dtypes |= {key: tensor["dtype"] for key, tensor in header.items() if key != "__metadata__"}
        except FileNotFoundError:
            found.add("missing, though the index names it", path, "download that file")
        except (OSError, ValueError, KeyError, TypeError):
            found.add("no safetensors header", path, "download that file again")
    for what, spellings in WEIGHTS.items():
        name = next((name for name in spellings if name in dtypes), None)
        if name is None and not (what == "lm_head" and text.get("tie_word_embeddings")):
            packed = [key for key in dtypes if spellings[1].rsplit(".", 1)[0] in key]
            found.add(f"no {what}" + (f", but {packed[0]}: quantised?" if packed else " in its shards"), folder,
                      "04 needs it in bf16, fp16 or fp32: use a checkpoint that keeps it so")
        elif name and dtypes[name] not in ("BF16", "F16", "F32"):
            found.add(f"{name} is {dtypes[name]}", folder,
                      "04 needs it in bf16, fp16 or fp32: use a checkpoint that keeps it so")
    wanted = role(run["servers"], "extract")["env"].get("EAGLE3_CAPTURE_LAYERS", "")
    if any(not 0 < int(layer) < layers for layer in re.findall(r"-?\d+", str(wanted))):
        found.add(f"capture layers {wanted}, the target has {layers}", "servers.extract.env", f"name layers from 1 to {layers - 1}")
    if int(run["build_vocab"].get("draft-vocab-size", 0)) > vocab:
        found.add(f"draft vocabulary {run['build_vocab']['draft-vocab-size']}, the target's is {vocab}", "build_vocab", f"set draft-vocab-size to at most {vocab}")
    return config


def check_tokenizer(run: dict, found: Findings, config: dict | None) -> None:
    """Special tokens are one id each (Kimi-K2.5's own ids in its vocabulary), and the template writes Kimi's turns in both modes."""
    folder = Path(str(run["generate"].get("tokenizer") or run["target"]))
    trust = bool(run["generate"].get("trust-remote-code"))
    try:
        from transformers import AutoTokenizer  # slow to import
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:  # remote code can raise anything
        return found.add(f"no tokenizer can be loaded ({' '.join(str(error).split())[:160]})", folder,
                         "download the tokenizer's files" if trust else "download the tokenizer's files; Kimi's needs generate.trust-remote-code: true")
    vocab = ((config or {}).get("text_config") or config or {}).get("vocab_size")
    ids = {}
    for name, kimi in KIMI_IDS.items():
        ids[name] = at = tokenizer.convert_tokens_to_ids(name)
        if at is None or tokenizer.encode(name, add_special_tokens=False) != [at]:
            found.add(f"{name} is not one id", folder, "use the tokenizer that came with the target")
        elif vocab == 163840 and at != kimi:
            found.add(f"{name} is {at}, in Kimi-K2.5 it is {kimi}", folder, "use the tokenizer that came with the target")
    for thinking in (True, False):
        try:
            shown = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False, thinking=thinking)
        except Exception as error:  # jinja, or a tokenizer without a template
            found.add(f"the chat template fails ({' '.join(str(error).split())[:160]})", folder, "download chat_template.jinja of the target")
            break
        wanted = f"<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>{'' if thinking else '</think>'}"
        if not shown.endswith(wanted):
            found.add(f"the template writes {shown!r}, expected ...{wanted!r} (thinking {'on' if thinking else 'off'})", folder,
                      "download chat_template.jinja of the target")
    try:
        stops = json.loads((Path(str(run["target"])) / "generation_config.json").read_text()).get("eos_token_id")
        if ids["<|im_end|>"] not in (stops if isinstance(stops, list) else [stops]):
            found.add(f"generation stops at {stops}, <|im_end|> is {ids['<|im_end|>']}", Path(str(run["target"])) / "generation_config.json",
                      "add it to eos_token_id, or answers will run on past the end of their turn", "warning")
    except (OSError, ValueError):
        pass  # SGLang then takes config.json's


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.yaml")
    parser.add_argument("--stage", choices=STAGES, nargs="+", default=STAGES, help="only what these stages need (default: all)")
    args = parser.parse_args(argv)
    run, found, stages = read_run(args.config), Findings(), args.stage
    roles = set().union(*(ROLES.get(stage, set()) for stage in stages))
    planned = subprocess.run([sys.executable, str(ROOT / "scripts/plan.py"), "--json", "--config", str(args.config)], capture_output=True, text=True)
    if planned.returncode:
        raise UserError(planned.stderr.strip().removeprefix("plan: "))
    plan = json.loads(planned.stdout)

    def check(function, *rest):
        try:
            return function(run, found, *rest)
        except (TypeError, ValueError, AttributeError) as error:
            found.add(f"a value of the wrong kind stops {function.__name__} ({' '.join(str(error).split())})", args.config, "correct it")

    check(check_versions)
    check(check_limits)
    check(check_places, plan, stages)
    if roles:
        check(check_sglang, roles)
        check(check_servers, roles)
        check(check_gpus, roles, plan)
        check(check_ports, roles)
    config = check(check_target)
    if config is not None and set(stages) != {"04_train"}:
        check(check_tokenizer, config)
    errors, warnings = found.count("error"), found.count("warning")
    print(f"{STAGE}: {'ready' if not errors else f'{errors} to mend'}{f', {warnings} warnings' if warnings else ''}: {args.config}")
    return 2 if errors else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"{STAGE}: {error}", file=sys.stderr)
        sys.exit(2)
