"""An output folder that an earlier version of 04 left behind goes on, and a finished one is left alone.

tests/data/old_folders was written by the 04_train.py of revision fc7ad90, on the target, map and states of output_inputs/:
    output_half/   killed while it wrote checkpoint-4: checkpoint-2 is whole, checkpoint-4.tmp is not
    output_done/   the same command at one stretch (without its training state and plot)
"""
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import load_script

OLD = Path(__file__).parent / "data/old_folders"


@pytest.fixture
def old(tmp_path) -> Path:
    return shutil.copytree(OLD, tmp_path / "run")


def train(old: Path, output: str, *more) -> None:
    """The command with which the folders were begun."""
    inputs = old / "output_inputs"
    load_script("04_train").main([str(word) for word in [
        "--verifier-path", inputs / "target", "--data-dir", inputs / "hidden_states", "--vocab-mapping-dir",
        inputs / "vocab_mapping", "--output-dir", old / output, "--epochs", 2, "--lr", 1e-3, "--max-seq-len", 64,
        "--batch-tokens", 80, "--num-workers", 1, "--log-every", 1, "--save-every", 2, "--noise-std", 0.05,
        "--keep-checkpoints", 1, "--layer-id-rule", "add-one-if-first-is-1", *more]])  # its target names no architecture


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_output_goes_on_from_its_checkpoint(old, capsys):
    """To the drafter and the figures that the earlier version came to, as far as another machine's sums agree."""
    begun = (old / "output_half/metrics.jsonl").read_text().splitlines()
    train(old, "output_half")
    said = capsys.readouterr().out
    # What that version kept of its check does not say of which files: they are read once more
    assert f"resume {old}/output_half/checkpoint-2" in said and "0 samples known from an earlier check, 14 read" in said
    wanted, found = rows(old / "output_done"), rows(old / "output_half")
    assert (old / "output_half/metrics.jsonl").read_text().splitlines()[:3] == begun[:3]
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for left, right in zip(wanted, found):
        assert {key: right[key] or 0 for key in left} == pytest.approx(left, rel=1e-4)
    for name in ("best", "checkpoint-8"):
        before, after = (load_file(old / output / name / "model.safetensors") for output in ("output_done", "output_half"))
        for tensor in before:
            torch.testing.assert_close(after[tensor], before[tensor], rtol=0.02, atol=1e-3)  # bfloat16
    manifests = [json.loads((old / output / "manifest.json").read_text()) for output in ("output_done", "output_half")]
    assert manifests[0]["counts"] == manifests[1]["counts"] and manifests[0]["inputs"] == manifests[1]["inputs"]
    assert (old / "output_half/val_ids.json").read_bytes() == (old / "output_done/val_ids.json").read_bytes()
    assert not list((old / "output_half").glob("*.tmp"))


def test_output_that_is_complete_stays(old, capsys):
    before = contents(old / "output_done")
    train(old, "output_done")
    assert "complete already" in capsys.readouterr().out and contents(old / "output_done") == before
