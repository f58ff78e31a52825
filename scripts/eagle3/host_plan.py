"""What several hosts add to a run, for plan.py: bytes on the disk of each, and between them.

Each of N hosts serves a copy of the target in 03 and trains in 04 with as many GPUs as the others. The first one runs
03 itself and is the host of rank 0, whose disk the table's other rows are of.
"""
from __future__ import annotations

GRADIENT = 2  # bytes of a trained parameter's in an all-reduce: bfloat16


def gradient_bytes(parameters: int, ranks: int) -> float:
    """What a ring of `ranks` GPUs sends out of each one, and into it, in a step."""
    return 2 * (ranks - 1) / ranks * GRADIENT * parameters


def host_figures(a, f: dict, per_token: float) -> list[tuple[str, str, float, str]]:
    """(stage, key, bytes, formula) of each row; none for a single host.

    a: settings (hosts, train_gpus, extract_rate); f: figures by name so far; per_token: bytes of states.
    """
    N = a.hosts
    if N == 1:
        return []
    states, ranks = f["hidden_states_bytes"], N * a.train_gpus
    share = states / N
    step = gradient_bytes(f["draft_parameters"], ranks)
    rows = [
        ("03", "states_sent_a_host", share, f"hidden states / {N} hosts, each to the first one over HTTP "
         "(offer_states.py); nothing where they share a file system"),
        ("03", "states_received", (N - 1) * share, f"by the first host: the shares of {N - 1} others"),
        ("03", "states_a_second", (N - 1) * a.extract_rate[1] * per_token,
         f"{N - 1} hosts x {a.extract_rate[1]:,.0f} tok/s x {per_token:,} bytes: what its network must carry, or 03 "
         "waits for it"),
        ("04", "network_bytes_a_step", step, f"out of each host, and into it: 2 x {ranks - 1}/{ranks} x {GRADIENT} "
         f"bytes x {f['draft_parameters'] / 1e6:,.0f}M gradients, a ring over {ranks} GPUs"),
        ("04", "network_bytes_a_host", step * f["train_steps"], f"x {f['train_steps']:,} steps"),
    ]
    if f["states_on_disk"] == states:  # else 04 --follow, for which all hosts share one folder
        rows += [
            ("04", "data_copied", (N - 1) * states, f"a copy of the hidden states to each of {N - 1} other hosts; with "
             "one shared file system instead every epoch's reads"),
            ("all", "other_host_bytes", states, "that copy; checkpoints and responses lie on the first host"),
        ]
    return rows
