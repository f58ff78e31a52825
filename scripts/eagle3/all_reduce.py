"""One rank of the all-reduce that preflight tries, as a process: `python -c <this text> BACKEND RANK WORLD FILE`.

It imports nothing but torch, so that the servers' own Python can run it. FILE: where the ranks meet; not there yet.
Exit 0 when every sum is right, 3 when one is not.
"""
import ctypes
import os
import sys

import torch
import torch.distributed as dist

SIZES = (1 << 10, 1 << 24)  # float32: NCCL takes another way for short messages than for long ones
ROUNDS = 3


def main(backend: str, rank: int, world: int, meeting: str) -> None:
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: a rank that hangs goes with who started it
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
    for size in SIZES:
        numbers = (torch.arange(size, device=device) % 251).float()
        for _ in range(ROUNDS):
            own = numbers * (rank + 1)
            dist.all_reduce(own)
            wrong = int((own != numbers * (world * (world + 1) // 2)).sum())  # waits for the GPU
            if wrong:
                print(f"{wrong:,} of {size:,} sums are wrong", flush=True)
                os._exit(3)
    os._exit(0)  # without a farewell, in which a rank could hang


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
