"""How the GPUs of this machine reach each other: what stands between them, and an all-reduce that is tried.

An IOMMU that translates, or PCIe Access Control Services (ACS) on a bridge above them, send what one GPU writes to
another through the CPU's root complex: slower, and on boards without NVLink (RTX PRO 6000 among them) NCCL hangs.
Sources: NCCL's troubleshooting page, "PCI Access Control Services"; PCI Express Base Specification, 7.7.8 (the ACS
extended capability); Linux, Documentation/ABI/testing/sysfs-kernel-iommu_groups.
"""
from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from eagle3.findings import Findings

SYS, COMMAND_LINE = Path("/sys"), Path("/proc/cmdline")
NVIDIA, DISPLAY, BRIDGE = 0x10DE, 0x03, 0x0604  # vendor; upper byte, upper two bytes of a PCI class
EXTENDED, ACS, CONTROL = 0x100, 0x0D, 6  # where extended capabilities begin; one's id; its control register's place
REDIRECT = 0b11100  # of that register: P2P request redirect, P2P completion redirect, upstream forwarding
HEADER = 64  # bytes of a configuration space that everybody may read
KERNEL = "boot with iommu=pt (or iommu=off) and PCIe ACS off in the BIOS"
ALL_REDUCE = Path(__file__).with_name("all_reduce.py")
LAST_WORDS = 5  # seconds for the other ranks when one has failed
WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1"}


# ---- what stands between them ----
def number(path: Path) -> int:
    try:
        return int(path.read_text(), 16)
    except (OSError, ValueError):
        return 0


def gpu_devices() -> list[Path]:
    """NVIDIA's GPUs as folders of /sys, below the bridges that they hang on."""
    return [device.resolve() for device in sorted((SYS / "bus/pci/devices").glob("*"))
            if number(device / "vendor") == NVIDIA and number(device / "class") >> 16 == DISPLAY]


def iommu_translates() -> bool:
    """By the GPUs' own groups where the kernel tells, else by its command line: on, and not passed through."""
    kinds = []
    for device in gpu_devices():
        with contextlib.suppress(OSError):
            kinds.append((device / "iommu_group/type").read_text().strip())
    if kinds:
        return any(kind != "identity" for kind in kinds)
    words = COMMAND_LINE.read_text().split() if COMMAND_LINE.exists() else []
    return any((SYS / "class/iommu").glob("*")) and not {"iommu=pt", "iommu.passthrough=1"} & set(words)


def acs_control(config: bytes) -> int:
    """The ACS control register in a PCI configuration space; 0 where the device has none."""
    at, left = EXTENDED, (4096 - EXTENDED) // 4
    while at >= EXTENDED and at + 8 <= len(config) and left:
        header, left = int.from_bytes(config[at:at + 4], "little"), left - 1
        if header & 0xFFFF == ACS:
            return int.from_bytes(config[at + CONTROL:at + CONTROL + 2], "little")
        at = header >> 20
    return 0


def acs_bridges() -> tuple[list[str], list[str]]:
    """Of the bridges above the GPUs those that redirect, and those that this user may not read: PCI addresses."""
    above = {parent for device in gpu_devices() for parent in device.parents if number(parent / "class") >> 8 == BRIDGE}
    redirecting, unread = [], []
    for bridge in sorted(above):
        try:
            config = (bridge / "config").read_bytes()
        except OSError:
            config = b""
        if len(config) <= HEADER:
            unread.append(bridge.name)
        elif acs_control(config) & REDIRECT:
            redirecting.append(bridge.name)
    return redirecting, unread


def check_between(found: Findings) -> None:
    """What stands between the GPUs."""
    if iommu_translates():
        found.add("an IOMMU translates between the GPUs, which made NCCL hang on boards without NVLink",
                  SYS / "class/iommu", f"{KERNEL}, or set NCCL_P2P_DISABLE=1 in the roles' env (slower)", "warning")
    redirecting, unread = acs_bridges()
    if redirecting:
        found.add(f"PCIe ACS redirects what the GPUs send each other, on {len(redirecting)} bridges: "
                  f"{' '.join(redirecting[:4])}{' ...' if len(redirecting) > 4 else ''}", SYS / "bus/pci/devices",
                  "switch ACS off in the BIOS, or after each boot `setpci -s <bridge> ECAP_ACS+6.w=0` for each; or "
                  "set NCCL_P2P_DISABLE=1 in the roles' env (slower)", "warning")
    if unread:
        found.add(f"whether PCIe ACS is on cannot be read without root ({len(unread)} bridges above the GPUs)",
                  SYS / "bus/pci/devices", "run this once with sudo, or look at ACSCtl in `sudo lspci -vvv`: "
                  "ReqRedir+ is on", "warning")


# ---- an all-reduce ----
def try_all_reduce(python: str, ranks: list[int], world: int, env: dict, seconds: float, backend: str = "nccl",
                   script: Path = ALL_REDUCE) -> str | None:
    """None when all `ranks` of `world` get every sum right within so long; else what went wrong, in a few words.

    One process each, all in one process group, which is killed as a whole at the end. `env` comes on top.
    """
    python = str(Path(shutil.which(python) or python).absolute())
    with tempfile.TemporaryDirectory(prefix="preflight-", ignore_cleanup_errors=True) as folder:
        processes: list[subprocess.Popen] = []
        try:
            for rank in ranks:
                argv = [python, "-c", script.read_text(), backend, str(rank), str(world), f"{folder}/meeting"]
                with open(f"{folder}/{rank}", "wb") as said:
                    processes.append(subprocess.Popen(
                        argv, cwd=folder, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                        process_group=processes[0].pid if processes else 0))
            codes = wait_for(processes, seconds)
        finally:
            end(processes)
        failed = [rank for rank, code in zip(ranks, codes) if code]
        if failed:
            return f"failed ({last_words(Path(folder), failed) or f'exit code {codes[ranks.index(failed[0])]}'})"
        return f"hung for {seconds:.0f} s" if None in codes else None


def wait_for(processes: list[subprocess.Popen], seconds: float) -> list[int | None]:
    """Their exit codes; None of one that does not end in time, or soon after another has failed."""
    until = time.monotonic() + seconds
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + LAST_WORDS)
        time.sleep(0.05)
    return codes


def end(processes: list[subprocess.Popen]) -> None:
    """Kill the group. One that hangs in the driver cannot die yet, and is not waited for."""
    if processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(processes[0].pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=LAST_WORDS)


def last_words(folder: Path, ranks: list[int]) -> str:
    """Of the ranks that failed: a wrong sum, an error with its cause, else the last line."""
    lines = [line.strip() for rank in ranks for line in (folder / str(rank)).read_text(errors="replace").splitlines()
             if line.strip()]
    told = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b|[\d,]+ of [\d,]+ sums", line)]
    causes = [line for line in lines if "NCCL WARN" in line]
    return " ".join([*(told or lines)[-1:], *causes[-1:]])[:300]


def check_all_reduce(found: Findings, python: str, count: int, env: dict, seconds: float, needed: bool) -> None:
    """Over `count` GPUs, with the `env` of a role. needed: some role spreads over GPUs, so a failure is an error."""
    where, severity = "servers: env", "error" if needed else "warning"
    ranks = list(range(count))
    try:
        wrong = try_all_reduce(python, ranks, count, env, seconds)
    except OSError as error:
        return found.add(f"no all-reduce could be tried ({error.strerror})", python, "mend that", "warning")
    if not wrong:
        return print(f"preflight: an all-reduce over {count} GPUs works", flush=True)
    what = f"an all-reduce over {count} GPUs {wrong}"
    if env.get("NCCL_P2P_DISABLE") == "1":
        return found.add(what, where, "set NCCL_DEBUG=INFO there and run this again: its last lines name the cause",
                         severity)
    if try_all_reduce(python, ranks, count, {**env, **WITHOUT_P2P}, seconds):
        found.add(f"{what}; with NCCL_P2P_DISABLE=1 too", where, "set NCCL_DEBUG=INFO there and run this again; look "
                  "at the driver (nvidia-smi, dmesg) and at /dev/shm; a container needs --shm-size 16g", severity)
    else:
        level = env.get("NCCL_P2P_LEVEL")
        found.add(f"{what}; with NCCL_P2P_DISABLE=1 it works", where,
                  f"{KERNEL}; until then set NCCL_P2P_DISABLE=1 (slower) in every role's env"
                  + (f", or NCCL_P2P_LEVEL=PHB instead of {level}" if level else ""), severity)
