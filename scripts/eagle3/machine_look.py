"""What preflight looks at on the machine: packages, SGLang and its patch, limits, folders and disks, GPUs, ports.

Each check takes the run file and adds findings.
"""
from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from eagle3.findings import ROOT, Findings, existing, on_gpus, one_line, role, whole
from eagle3.gpu_links import check_all_reduce, check_between
from eagle3.servers import python_of

OPEN_FILES, FEWEST_FILES = 4096, 1024
SHM = 8e9  # bytes: NCCL and SGLang's processes share memory there; containers often get 64 MB
FREE_GB = 2  # of a GPU's memory, for an all-reduce


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
    """Its version, of the Python that serves; None of one that this project does not know."""
    extract, target = role(run_file, "extract"), Path(str(run_file["target"]))
    python = python_of(extract["command"])
    command = [python, str(ROOT / "patches/sglang_patch.py"), "status"]
    if "extract" in roles and "forward-hooks" not in extract["flags"] and (target / "config.json").is_file():
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
    version = re.search(r"(?i)\bsglang (\d+\.\d[\w.+]*)", said)
    return version[1] if version and "not in versions.json" not in said else None


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
    for place, need in ((out, figures.get("responses_bytes", 0) + figures.get("states_on_disk", 0)),
                        (output, figures.get("checkpoint_bytes", 0))):
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


# ---- GPUs ----
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


def check_gpus(run_file: dict, found: Findings, roles: set, figures: dict, seconds: float) -> None:
    """seconds: for an all-reduce over the GPUs; 0 leaves it out."""
    names = [name for name in sorted(roles & set(run_file["servers"])) if on_gpus(role(run_file, name))]
    there = gpus() if names else []
    for name in names:
        if there:
            check_role_on_gpus(role(run_file, name)["flags"], f"servers.{name}.flags", there, found, figures)
        else:
            found.add("no CUDA GPU is seen (nvidia-smi lists none)", f"servers.{name}",
                      "run this on the machine with the GPUs, or install the driver")
    if not there:
        return
    widest = role(run_file, max(names, key=lambda name: whole(role(run_file, name)["flags"], "tp-size", 1)))
    env = {str(key): str(value) for key, value in widest["env"].items() if value is not None}
    visible = {**os.environ, **env}.get("CUDA_VISIBLE_DEVICES")
    count = len(there) if visible is None else min(len(there), len([word for word in visible.split(",") if word]))
    needed = whole(widest["flags"], "tp-size", 1) > 1
    if needed:
        check_between(found)
    if count > 1 and seconds:
        if any(gpu["gb"] - gpu["used_gb"] < FREE_GB for gpu in there):
            found.add("a GPU is too full to try an all-reduce", "nvidia-smi",
                      "run this again before the server starts", "warning")
        else:
            check_all_reduce(found, python_of(widest["command"]), count, env, seconds, needed)


def check_role_on_gpus(flags: dict, where: str, there: list[dict], found: Findings, figures: dict) -> None:
    """One role's flags against the GPUs that are there."""
    first, backend = there[0], flags.get("attention-backend")
    count, fraction = whole(flags, "tp-size", 1), float(flags.get("mem-fraction-static", 0.88))
    if not 0 < count or not 0 < fraction < 1:
        return found.add(f"tp-size {count}, mem-fraction-static {fraction:g}", where,
                         "set tp-size to at least 1, mem-fraction-static between 0 and 1")
    if len(there) < count:
        found.add(f"{len(there)} GPUs, tp-size is {count}", where, f"set tp-size to at most {len(there)}")
    share = figures.get("target_bytes", 0) / count / 1e9
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
    if count > 1:
        check_shared_memory(found, count)


def check_shared_memory(found: Findings, count: int) -> None:
    remedy = "start the container with --shm-size 16g, or `mount -o remount,size=16G /dev/shm`"
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return found.add(f"no shared memory ({error.strerror})", "/dev/shm", remedy)
    if free < SHM:
        found.add(f"/dev/shm has {free / 1e9:.2f} GB free, {SHM / 1e9:.0f} are wanted for {count} ranks", "/dev/shm",
                  remedy, "error" if free < SHM / 8 else "warning")


# ---- ports ----
def ports(run_file: dict, names) -> list[int]:
    """Where these roles listen."""
    return sorted({whole(role(run_file, name)["flags"], "port", 30000) for name in names})


def check_ports(run_file: dict, found: Findings, roles: set) -> None:
    for port in ports(run_file, roles & set(run_file["servers"])):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OverflowError:
                found.add(f"port {port} is no port", "servers", "name one from 1 to 65535")
            except OSError as error:
                found.add(f"port {port} is taken ({one_line(error.strerror)})", "servers", "stop what listens there, "
                          "or set another port in the run file (if it is this run's own server, all is well)")
