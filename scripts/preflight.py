"""Look at this machine before a run: versions, GPUs, disk, limits, patch, ports, the target's files and token ids.

    python3 scripts/preflight.py --config configs/kimi-k2.5-10k.yaml
    python3 scripts/preflight.py --config configs/kimi-k2.5-10k.yaml --stage 04_train

Changes nothing. Use the Python that will run the stages; the patch is looked for where the run file's servers run.
Each finding is one line, `preflight: <what> | <where> | <what to do>`; a warning says so. Exit 0 when nothing stands
in the way (warnings or not), 2 when something does, or the run file cannot be read.
"""
import argparse
import importlib.metadata
import importlib.util
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "patches")]
import eagle3_capture  # noqa: E402  what the server will refuse
from eagle3.forecast import Forecast  # noqa: E402
from eagle3.servers import role_settings  # noqa: E402
from eagle3.stage import SCRIPTS, UserError, parse_args, read_json, read_run_file, run  # noqa: E402
from eagle3.target import TENSORS, Target, layer_rule, text_config  # noqa: E402
from eagle3.tokens import load_tokenizer, token_id  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
STAGES = list(SCRIPTS.values())
ROLES = {"01_generate": {"plain"}, "03_extract": {"extract"},
         "05_benchmark": {"plain", "speculative"}}  # the servers that a stage talks to
KIMI_IDS = {"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588,
            "<|im_system|>": 163594, "<|tool_calls_section_begin|>": 163595, "<|tool_calls_section_end|>": 163596,
            "<|tool_call_begin|>": 163597, "<|tool_call_argument_begin|>": 163598, "<|tool_call_end|>": 163599,
            "<|im_middle|>": 163601, "<think>": 163606, "</think>": 163607, "[PAD]": 163839}
KIMI_VOCABULARY = 163840
OPEN_FILES, FEWEST_FILES = 4096, 1024
SHM = 8e9  # bytes: NCCL and SGLang's processes share memory there; containers often get 64 MB
IOMMU = Path("/sys/class/iommu")
OTHER_TOKENIZER = "use the tokenizer that came with the target"


class Findings(list):
    """(severity, text), in the order in which they were found; each is printed at once, each text once."""

    def add(self, what: str, where: object, remedy: str, severity: str = "error") -> None:
        if (severity, what) not in self:  # roles share most of their flags
            self.append((severity, what))
            sign = "warning: " if severity == "warning" else ""
            print(f"preflight: {sign}{what} | {where} | {remedy}", flush=True)

    def count(self, severity: str) -> int:
        return sum(found == severity for found, _ in self)


def read_run(path: Path) -> dict:
    """The run file, each section at least {}. Raises UserError."""
    document = read_run_file(path)
    if missing := {"run_dir", "target"} - set(document):
        raise UserError(f"{path}: not a readable run file with run_dir and target (no {' and no '.join(missing)}).")
    return {**document, **{name: document.get(name) or {} for name in (*SCRIPTS, "servers")}}


def role(run_file: dict, name: str) -> dict:
    """{"command", "flags", "env"} of a role, empty of one that the run file lacks. Raises UserError."""
    there = name in run_file["servers"]
    return role_settings(run_file["servers"], name) if there else {"command": [], "flags": {}, "env": {}}


def existing(path: Path) -> Path:
    """The nearest folder or file at or above `path` that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def iommu_translates() -> bool:
    """Whether an IOMMU stands between the GPUs, by the kernel's own words: on, and not passed through."""
    words = Path("/proc/cmdline").read_text().split() if Path("/proc/cmdline").exists() else []
    return any(IOMMU.glob("*")) and not {"iommu=pt", "iommu.passthrough=1"} & set(words)


def gpus() -> list[dict]:
    """[{"name", "gb" (memory), "used_gb", "capability" (12.0)}]; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        rows = [[cell.strip() for cell in line.rsplit(",", 3)] for line in done.stdout.strip().splitlines()]
        return [{"name": name, "gb": float(total) * 2**20 / 1e9, "used_gb": float(used) * 2**20 / 1e9,
                 "capability": float(capability)} for name, total, used, capability in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


# ---- the checks: each takes the run file and adds findings ----
def check_versions(run_file: dict, found: Findings) -> None:
    if sys.version_info < (3, 11):
        found.add(f"Python {sys.version.split()[0]} is too old", sys.executable, "use Python 3.11 or newer")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in (re.match(r"[\w-]+", line)[0] for line in wanted):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.add(f"the package {name} is missing", sys.executable,
                      "run `pip install .` in this folder with that Python")


def check_sglang(run_file: dict, found: Findings, roles: set) -> str | None:
    """Its version, of the Python that serves: the one that the role's command names, or this one."""
    python = (role(run_file, "extract")["command"] or [""])[0]
    python = python if Path(python).name.startswith("python") else sys.executable
    command = [python, str(ROOT / "patches/sglang_patch.py"), "status"]
    target, by_hooks = Path(str(run_file["target"])), "forward-hooks" in role(run_file, "extract")["flags"]
    if "extract" in roles and not by_hooks and (target / "config.json").is_file():
        command += ["--target", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return found.add(f"the servers' Python cannot be run ({error.strerror})", python,
                         "correct servers.plain.command")
    said = (done.stdout or done.stderr).strip()
    if done.returncode:
        found.add("SGLang cannot be patched: " + said.removeprefix("sglang_patch: "), python,
                  "install one of the releases in patches/versions.json, unchanged")
    elif "another state" in said:
        found.add(said, ROOT / "patches/sglang_patch.py",
                  "run `python3 patches/sglang_patch.py apply` again and restart servers")
    elif "extract" in roles and ": original" in said:
        found.add(said, "role extract", f"run `{' '.join(['python3 patches/sglang_patch.py apply', *command[3:]])}` "
                  "before its server starts (quickstart.sh does it itself)", "warning")
    version = re.search(r"\bsglang ([\w.+]+) at ", said)
    return version and version[1]


def check_servers(run_file: dict, found: Findings, roles: set) -> None:
    """What the roles' flags must be for each other, for 03 and for the drafter."""
    for name in sorted(roles - set(run_file["servers"])):
        found.add(f"the role {name} is missing", "servers",
                  f"add servers.{name} to the run file (configs/quickstart.yaml has one)")
    if "extract" in roles & set(run_file["servers"]):
        check_capture(run_file, found)
    if "speculative" in roles & set(run_file["servers"]):
        flags, train, where = role(run_file, "speculative")["flags"], run_file["train"], "servers.speculative.flags"
        steps, trained = int(flags.get("speculative-num-steps", 0)), int(train.get("ttt-steps", 3))
        if steps > trained:
            found.add(f"serving with {steps} steps, training with {trained} TTT steps", where,
                      f"set train.ttt-steps to at least {steps}")
        draft, best = flags.get("speculative-draft-model-path"), f"{train.get('output-dir')}/best"
        if draft != best:
            found.add(f"the server takes the drafter {draft}, 04 writes {best}", where,
                      "make them the same unless you mean an older drafter", "warning")


def check_capture(run_file: dict, found: Findings) -> None:
    """The role extract captures, into the folder where 03 waits."""
    extract, out = role(run_file, "extract"), run_file["extract"].get("output-dir")
    try:
        eagle3_capture.check_settings({key.replace("-", "_"): value for key, value in extract["flags"].items()})
    except eagle3_capture.Refused as refused:
        what, remedy = str(refused).split(". ", 1)
        found.add(what, "servers.extract.flags", remedy)
    context, longest = (int(part.get(key) or 0) for part, key in ((extract["flags"], "context-length"),
                                                                   (run_file["extract"], "max-length")))
    if 0 < context < longest:
        found.add(f"the server takes {context} tokens, extract.max-length is {longest}", "servers.extract.flags",
                  f"set context-length to at least {longest}, or extract.max-length to at most {context}")
    capture, layers = (extract["env"].get(f"EAGLE3_CAPTURE_{name}") for name in ("DIR", "LAYERS"))
    if not capture or not layers:
        return found.add("EAGLE3_CAPTURE_DIR or EAGLE3_CAPTURE_LAYERS is not set, so nothing would be captured",
                         "servers.extract.env", "set both (configs/README.md)")
    wanted = run_file["extract"].get("capture-dir") or f"{out}/.incoming"
    if Path(capture).absolute() != Path(wanted).absolute():
        found.add(f"the server would write to {capture}, 03 waits at {wanted}", "servers.extract.env",
                  "set EAGLE3_CAPTURE_DIR to 03's folder, or extract.capture-dir to the server's")
    if existing(Path(capture)).stat().st_dev != existing(Path(str(out))).stat().st_dev:
        found.add(f"{capture} and {out} lie on different file systems, so samples cannot be renamed into place",
                  "servers.extract.env", "put both on the same disk")


def check_gpus(run_file: dict, found: Findings, roles: set, figures: dict) -> None:
    there = gpus()
    for name in sorted(roles & set(run_file["servers"])):
        spec = role(run_file, name)
        if any("cpu_engine" in str(word) for word in spec["command"]):
            continue
        if there:
            check_role_on_gpus(spec["flags"], f"servers.{name}.flags", there, found, figures)
        else:
            found.add("no CUDA GPU is seen (nvidia-smi lists none)", f"servers.{name}",
                      "run this on the machine with the GPUs, or install the driver")


def check_role_on_gpus(flags: dict, where: str, there: list[dict], found: Findings, figures: dict) -> None:
    """One role's flags against the GPUs that are there."""
    first, backend = there[0], flags.get("attention-backend")
    count, fraction = int(flags.get("tp-size", 1)), float(flags.get("mem-fraction-static", 0.88))
    if len(there) < count:
        found.add(f"{len(there)} GPUs, tp-size is {count}", where, f"set tp-size to at most {len(there)}")
    share = figures["target_bytes"] / count / 1e9
    if share > first["gb"] * fraction:
        found.add(f"{share:.1f} GB of weights on each GPU do not fit into {fraction:g} of {first['gb']:.0f} GB", where,
                  "raise tp-size or mem-fraction-static")
    if first["capability"] >= 12 and backend != "triton":
        found.add(f"attention-backend {backend} on SM120 ({first['name']})", where,
                  "set attention-backend: triton, whose block sizes fit its 100 KB of shared memory", "warning")
    used = max(gpu["used_gb"] for gpu in there[:count])
    if used > 2:
        found.add(f"{used:.1f} GB of a GPU are in use already", "nvidia-smi",
                  "stop what runs there before the server starts", "warning")
    if count > 1 and iommu_translates():
        found.add("an IOMMU translates between the GPUs, which made NCCL hang on boards without NVLink", IOMMU,
                  "boot with iommu=pt and PCIe ACS off in the BIOS, or set NCCL_P2P_DISABLE=1 (slower)", "warning")
    if count > 1 and (shm := shutil.disk_usage("/dev/shm").free) < SHM:
        found.add(f"/dev/shm has {shm / 1e9:.2f} GB free, {SHM / 1e9:.0f} are wanted for {count} ranks", "/dev/shm",
                  "start the container with --shm-size 16g, or `mount -o remount,size=16G /dev/shm`",
                  "error" if shm < SHM / 8 else "warning")


def check_flags(run_file: dict, found: Findings, path: Path, stages: list) -> None:
    """Each script's own parser reads its section, as the stage itself will."""
    for section, script in SCRIPTS.items():
        if script in stages:
            spec = importlib.util.spec_from_file_location(f"stage_{section}", ROOT / f"{script}.py")
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
            spec.loader.exec_module(module)
            try:
                parse_args(module.build_parser(), section, ["--config", str(path)])
            except UserError as error:
                found.add(str(error), f"{path}: {section}", f"correct it; {script}.py --help has the flags")


def check_limits(run_file: dict, found: Findings) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        found.add(f"{soft} open files are allowed (hard limit {hard})", "ulimit -n",
                  "`ulimit -n 65536` in the shell that starts the stages",
                  "error" if soft < FEWEST_FILES else "warning")


def check_places(run_file: dict, found: Findings, figures: dict, stages: list) -> None:
    """Folders can be written, and what the forecast counts fits on their disks."""
    needs: dict[int, list] = {}
    out, output = Path(str(run_file["run_dir"])), Path(str(run_file["train"].get("output-dir", run_file["run_dir"])))
    for place, need in ((out, figures["responses_bytes"] + figures["states_on_disk"]),
                        (output, figures["checkpoint_bytes"])):
        near = existing(place)
        try:
            with tempfile.NamedTemporaryFile(dir=near, prefix=".preflight"):
                pass
        except OSError as error:
            found.add(f"nothing can be written there ({error.strerror})", near, f"give this user a writable {place}")
            continue
        needs.setdefault(near.stat().st_dev, []).append((near, need))
    writes = {"01_generate", "03_extract", "04_train"} & set(stages)
    if not writes or not (Path(str(run_file["target"])) / "config.json").is_file():
        return  # without the target the forecast counted with Kimi-K2.5's sizes
    there = figures.get("disk_there", 0)  # counted as lying on the first disk: it is nearly all hidden states
    for disk in needs.values():
        need, free = sum(need for _, need in disk) - there, shutil.disk_usage(disk[0][0]).free
        there = 0
        if need > free:
            found.add(f"{need / 1e9:,.1f} GB more will be written, {free / 1e9:,.1f} GB are free", disk[0][0],
                      "lower generate.limit, or use a larger disk: `scripts/plan.py --config ...` says how many "
                      "samples fit")


def ports(run_file: dict, names) -> list[int]:
    """Where these roles listen."""
    return sorted({int(role(run_file, name)["flags"].get("port", 30000)) for name in names})


def check_ports(run_file: dict, found: Findings, roles: set) -> None:
    for port in ports(run_file, roles & set(run_file["servers"])):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                found.add(f"port {port} is taken", "servers", "stop what listens there, or set another port in the "
                          "run file (if it is this run's own server, all is well)")


def check_urls(run_file: dict, found: Findings, stages: list) -> None:
    """A stage asks where a role of its own listens, as far as that is this machine."""
    for section, script in SCRIPTS.items():
        urls = run_file[section].get("base-url") or []
        for url in [urls] if isinstance(urls, str) else urls:
            parts = urllib.parse.urlsplit(url)
            served = ports(run_file, run_file["servers"])
            if script in stages and parts.hostname in ("127.0.0.1", "localhost") and parts.port not in served:
                found.add(f"no role listens at {parts.netloc}; their ports: {served}", f"{section}.base-url",
                          "make the port that of the server this stage asks (unless you start one yourself)", "warning")


def check_target(run_file: dict, found: Findings, sglang: str | None) -> dict | None:
    """The text config, if it can be read.

    Findings: shards that are missing or cut short, tensors that are missing or quantised, what the run file asks of a
    smaller target, and layers that no ids of a drafter's name to the release that serves it (sglang: the one here).
    """
    folder = Path(str(run_file["target"]))
    try:
        config = text_config(folder)
        layers, vocab = config["num_hidden_layers"], config["vocab_size"]
    except (UserError, KeyError) as error:
        return found.add(f"no readable config.json of a target ({one_line(error)})", folder,
                         "set `target` in the run file to the model's folder")
    try:
        check_tensors(Target(folder), found)
    except UserError as error:
        found.add(str(error), folder, "download the target's files again")
    wanted = str(role(run_file, "extract")["env"].get("EAGLE3_CAPTURE_LAYERS", ""))
    numbers, train = [int(layer) for layer in re.findall(r"-?\d+", wanted)], run_file["train"]
    if any(not 0 < layer < layers for layer in numbers):
        found.add(f"capture layers {wanted}, the target has {layers}", "servers.extract.env",
                  f"name layers from 1 to {layers - 1}")
    elif numbers and (version := train.get("serve-sglang-version") or sglang):
        try:
            layer_rule(folder, str(version), train.get("layer-id-rule")).ids(numbers)
        except UserError as error:
            what, remedy = str(error).split(". ", 1)
            found.add(what, "train", remedy)
    draft_vocab = int(run_file["build_vocab"].get("draft-vocab-size", 0))
    if draft_vocab > vocab:
        found.add(f"draft vocabulary {draft_vocab}, the target's is {vocab}", "build_vocab",
                  f"set draft-vocab-size to at most {vocab}")
    return config


def check_tensors(target: Target, found: Findings) -> None:
    """Every shard is whole, and the three tensors that 04 reads are there as floats."""
    from safetensors import SafetensorError, safe_open

    damaged = set()
    for name in sorted(set(target.files.values())):
        try:
            with safe_open(target.folder / name, "np"):
                pass  # its header is whole, and so long is the file
        except FileNotFoundError:
            damaged.add(name)
            found.add("missing, though the index names it", target.folder / name, "download that file")
        except (OSError, SafetensorError) as error:
            damaged.add(name)
            found.add(f"damaged or cut short ({one_line(error)})", target.folder / name, "download that file again")
    for what in TENSORS:
        try:
            if target.files.get(target.name(what)) not in damaged:
                target.place(what)
        except UserError as error:
            found.add(str(error).removeprefix(f"{target.folder}: "), target.folder,
                      "04 needs it in bf16, fp16 or fp32: use a checkpoint that keeps it so")


def check_tokenizer(run_file: dict, found: Findings, config: dict) -> None:
    """Special tokens are one id each, turns are Kimi's in both modes, and generation ends where a turn does.

    In Kimi-K2.5's vocabulary the ids are its own.
    """
    folder = Path(str(run_file["generate"].get("tokenizer") or run_file["target"]))
    trust = bool(run_file["generate"].get("trust-remote-code"))
    try:
        tokenizer = load_tokenizer(folder, trust)
    except UserError as error:
        return found.add(str(error).removeprefix(f"{folder}: "), folder, "download the tokenizer's files"
                         + ("" if trust else "; Kimi's needs generate.trust-remote-code: true"))
    for name, kimi in KIMI_IDS.items():
        at = token_id(tokenizer, name)
        if at is None or tokenizer.encode(name, add_special_tokens=False) != [at]:
            found.add(f"{name} is not one id", folder, OTHER_TOKENIZER)
        elif config.get("vocab_size") == KIMI_VOCABULARY and at != kimi:
            found.add(f"{name} is {at}, in Kimi-K2.5 it is {kimi}", folder, OTHER_TOKENIZER)
    check_template(tokenizer, folder, found)
    try:
        stops = read_json(Path(str(run_file["target"])) / "generation_config.json").get("eos_token_id")
    except UserError:
        return  # SGLang then takes config.json's
    end = token_id(tokenizer, "<|im_end|>")
    if end not in (stops if isinstance(stops, list) else [stops]):
        found.add(f"generation stops at {stops}, <|im_end|> is {end}",
                  Path(str(run_file["target"])) / "generation_config.json",
                  "add it to eos_token_id, or answers will run on past the end of their turn", "warning")


def check_template(tokenizer, folder: Path, found: Findings) -> None:
    remedy = "download chat_template.jinja of the target"
    for thinking in (True, False):
        try:
            shown = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True,
                                                  tokenize=False, thinking=thinking)
        except Exception as error:  # jinja, or a tokenizer without a template
            return found.add(f"the chat template fails ({one_line(error)[:160]})", folder, remedy)
        wanted = "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
        wanted += "" if thinking else "</think>"
        if not shown.endswith(wanted):
            found.add(f"the template writes {shown!r}, expected ...{wanted!r} (thinking {'on' if thinking else 'off'})",
                      folder, remedy)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.yaml")
    parser.add_argument("--stage", choices=STAGES, nargs="+", default=STAGES,
                        help="only what these stages need (default: all)")
    args = parser.parse_args(argv)
    run_file, found, stages = read_run(args.config), Findings(), args.stage
    figures = Forecast.of_run(run_file, args.config).figures
    roles = set().union(*(ROLES.get(stage, set()) for stage in stages))

    def check(function, *rest):
        try:
            return function(run_file, found, *rest)
        except (TypeError, ValueError, AttributeError) as error:
            found.add(f"a value of the wrong kind stops {function.__name__} ({one_line(error)})", args.config,
                      "correct it")

    check(check_flags, args.config, stages)
    check(check_versions)
    check(check_limits)
    check(check_places, figures, stages)
    version = check(check_sglang, roles) if roles else None
    if roles:
        check(check_servers, roles)
        check(check_gpus, roles, figures)
        check(check_ports, roles)
    check(check_urls, stages)
    config = check(check_target, version)
    if config is not None and set(stages) != {"04_train"}:
        check(check_tokenizer, config)
    errors, warnings = found.count("error"), found.count("warning")
    print(f"preflight: {'ready' if not errors else f'{errors} to mend'}"
          f"{f', {warnings} warnings' if warnings else ''}: {args.config}")
    return 2 if errors else 0


if __name__ == "__main__":
    run(main)
