"""Long samples through chunked prefill: 03 on the real engine, each row beside transformers', whatever chunk it came in."""
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import CAPTURE_LAYERS, ROOT, TINY_KIMI
from eagle3.states import sample_path
from stand_in import write_responses
from test_capture import prefill_batches, random_ids, text_model

TOKENS, CHUNK, SHORT = 32_768, 2048, 300
PIECE = 1024  # queries that the reference looks at together
ORIGINAL = json.loads((TINY_KIMI / "config.json").read_text())["text_config"]["rope_scaling"]["original_max_position_embeddings"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Tiny Kimi with a context of twice TOKENS, which YaRN reaches as it reaches Kimi's own: by its factor."""
    folder = shutil.copytree(TINY_KIMI, tmp_path_factory.mktemp("long") / "tiny_kimi")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2 * TOKENS
    config["text_config"]["rope_scaling"]["factor"] = 2 * TOKENS / ORIGINAL
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_pieces(module, query, key, value, attention_mask, scaling, **_):
    """Causal attention of one sample in plain products, so few queries at a time that long ones fit into memory."""
    T, found = query.shape[2], []
    for first in range(0, T, PIECE):
        end = min(first + PIECE, T)
        scores = query[:, :, first:end] @ key[:, :, :end].transpose(2, 3) * scaling
        scores += torch.full((end - first, end), -torch.inf).triu(first + 1)
        found.append(scores.softmax(-1) @ value[:, :, :end])
    return torch.cat(found, 2).transpose(1, 2), None


def by_transformers(folder: Path, target: Path, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(aux (T, 3H), last (T, H))"""
    from transformers import AttentionInterface

    AttentionInterface.register("in_pieces", in_pieces)
    model = text_model(folder, target)
    model.set_attn_implementation("in_pieces")
    with torch.no_grad():
        states = model.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[layer][0] for layer in CAPTURE_LAYERS], dim=-1), states[-1][0]


def peak(pid: int | str) -> int:
    """MiB that a process has taken at most; 0 where it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
    return 0


def group_of(process: Path) -> int:
    """The process group of /proc/<pid>."""
    try:
        return os.getpgid(int(process.name))
    except OSError:
        return 0


def extract(log: Path, *argv) -> tuple[str, int]:
    """03 in a process of its own: (what it says, MiB that it takes at most)."""
    most = 0
    with open(log, "w") as out:
        process = subprocess.Popen([sys.executable, "-u", ROOT / "03_extract.py", *map(str, argv)], cwd=ROOT, stdout=out,
                                   stderr=out)
        while process.poll() is None:
            most = max(most, peak(process.pid))
            time.sleep(0.02)
    assert process.returncode == 0, log.read_text()
    return log.read_text(), most


@pytest.mark.slow
def test_a_long_sample_comes_through_chunks(engine, target, tmp_path):
    """And a short one with the same beginning. --verify has the head choose the engine's own next token after all of it."""
    server = engine(model=target, capture_dir=True, chunked_prefill_size=CHUNK, max_running_requests=1,
                    max_total_tokens=TOKENS + 64)
    ids = random_ids(TOKENS, 64)
    write_responses(tmp_path / "responses", [{"id": name, "prompt_ids": some[:100], "response_ids": some[100:]}
                                             for name, some in (("long", ids), ("short", ids[:SHORT]))])
    here = ["--data-dir", tmp_path / "responses", "--output-dir", tmp_path / "states", "--base-url", server.url,
            "--capture-dir", server.capture_dir, "--concurrency", 1]
    before = len(prefill_batches(server.log))
    said, extracting = extract(tmp_path / "log", *here)
    assert [count for _, count in prefill_batches(server.log)[before:]].count(CHUNK) == TOKENS // CHUNK
    _, verifying = extract(tmp_path / "log", *here, "--verify", "--verifier-path", target, "--min-agreement", 0)  # its answers are no model's
    report = json.loads((tmp_path / "states/verify.json").read_text())
    assert report["failed"] == {} and report["engine_next_token_share"] == 1.0
    serving = max(peak(path.name) for path in Path("/proc").glob("[0-9]*") if group_of(path) == server.process.pid)
    print(f"{TOKENS} tokens | {said.splitlines()[-3][20:]} | MiB at most: server {serving}, 03 {extracting}, --verify {verifying}")

    aux, last = by_transformers(tmp_path / "hf", target, ids)
    for name, rows in (("long", TOKENS), ("short", SHORT)):
        found = load_file(sample_path(tmp_path / "states", name))
        assert found["input_ids"].tolist() == ids[:rows] and int(found["loss_mask"].sum()) == rows - 100
        for state, wanted in (("aux_hidden_states", aux), ("last_hidden_states", last)):
            off = (found[state] - wanted[:rows]).norm(dim=1) / wanted[:rows].norm(dim=1)
            assert off.max() < 1e-4, (name, state, int(off.argmax()), float(off.max()))
