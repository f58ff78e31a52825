"""Writing beside the steps: a copy of the tensors in host memory, and a thread that writes it."""
from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Callable

import torch

from eagle3.stage import OutputGone, log

SPARE = 10 ** 9  # bytes of host memory that stay free


def host_memory_left() -> int:
    """Bytes of host memory to be had: of the machine, and of the control groups that this process is in.

    Pages of files count as free: they go when room is needed.
    """
    left = [rows_of(Path("/proc/meminfo")).get("MemAvailable:", 0) * 1024]
    group = ""
    with contextlib.suppress(OSError):
        group = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "")
    own = Path("/sys/fs/cgroup", group.lstrip("/"))
    for folder in [own, *own.parents][:len(own.parts) - 3]:  # up to /sys/fs/cgroup
        with contextlib.suppress(OSError, ValueError):  # no limit: "max"
            limit = int((folder / "memory.max").read_text())
            used = rows_of(folder / "memory.stat")
            pages = used.get("file", 0) - used.get("shmem", 0)
            left.append(limit - int((folder / "memory.current").read_text()) + pages)
    return max(0, min(left))


def rows_of(path: Path) -> dict[str, int]:
    """{first word: number behind it} of a file of such lines; {} where it is not there."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdecimal()}


class Snapshot:
    """Host memory for a copy of some tensors; pinned where they lie on a GPU.

    It is taken once for the whole run: pinning 14 GB takes seconds. (torch's own pinned tensors take the next power of
    two: 8 GB for 4.8.)
    """

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        on_gpu = all(tensor.is_cuda for tensor in tensors.values())
        self.registered = [own.data_ptr() for own in self.tensors.values() if on_gpu and self.register(own)]
        self.pinned = len(self.registered) == len(tensors)
        if on_gpu and not self.pinned:
            with contextlib.suppress(RuntimeError):  # CUDA keeps the error, and torch raises it after the next kernel
                torch.ones(1, device=next(iter(tensors.values())).device).add_(1)

    @staticmethod
    def register(own: torch.Tensor) -> bool:
        return int(torch.cuda.cudart().cudaHostRegister(own.data_ptr(), own.numel() * own.itemsize, 0)) == 0

    def free(self) -> None:
        """Before the memory is given back: another tensor in its place would be taken for pinned."""
        for pointer in self.registered:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self.registered, self.tensors = [], {}

    def take(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The copy, whole when this returns. It holds until the next one is taken."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return self.tensors


class Behind:
    """One piece of work at a time, on a thread. What it raises is logged at once, and raised by `check` and `wait`."""

    def __init__(self):
        self.thread: threading.Thread | None = None
        self.failed: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.failed = error
                with contextlib.suppress(OutputGone):
                    log(f"stopping: {error or type(error).__name__}")

        self.wait()
        self.thread = threading.Thread(target=run)  # no daemon: whatever ends the process, it waits for this
        self.thread.start()

    def check(self) -> None:
        """Raises what the work raised."""
        if self.failed:
            failed, self.failed = self.failed, None
            raise failed

    def wait(self) -> None:
        """Until it is done. Raises what it raised."""
        if self.thread:
            self.thread.join()
            self.thread = None
        self.check()
