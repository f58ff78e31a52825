"""scripts/make_wide_kimi.py at toy width: a target whose greedy answers are those written down, and samples of the real length mix."""
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from conftest import ROOT, load_script

wide = load_script("make_wide_kimi")


def make(folder, *argv):
    run = yaml.safe_load((ROOT / "configs/rehearsal-toy.yaml").read_text()) | {"run_dir": str(folder), "target": str(folder / "target")}
    run["servers"]["plain"]["flags"]["port"] = 1  # not used here
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    subprocess.run([sys.executable, str(ROOT / "scripts/make_wide_kimi.py"), "--config", str(folder / "run.yaml"), "--toy", "--samples", "6", "--longest", "512",
                    "--device", "cpu", *argv], check=True, capture_output=True)
    return folder / "target", folder / "responses"


def test_the_target_gives_the_answers_that_were_written_down(tmp_path):
    target, responses = make(tmp_path)
    config = json.loads((target / "config.json").read_text())["text_config"]
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{key: value for key, value in config.items() if key != "dtype"})).float().eval()
    weights = {}
    for path in sorted(target.glob("*.safetensors")):
        weights |= {name.removeprefix("language_model."): value.float() for name, value in load_file(path).items() if name.startswith("language_model.")}
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name.removeprefix("language_model.") for name in index if name.startswith("language_model.")} == set(weights)
    for layer in range(1, 8):  # transformers keeps the experts of a layer in one tensor
        name = f"model.layers.{layer}.mlp.experts."
        weights[name + "gate_up_proj"] = torch.stack([torch.cat([weights.pop(f"{name}{e}.gate_proj.weight"), weights.pop(f"{name}{e}.up_proj.weight")]) for e in range(8)])
        weights[name + "down_proj"] = torch.stack([weights.pop(f"{name}{e}.down_proj.weight") for e in range(8)])
    model.load_state_dict(weights)
    rows = [json.loads(line) for line in (responses / "part-00000.jsonl").read_text().splitlines()]
    with torch.no_grad():
        for row in rows[:3]:
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            out = model(ids, output_hidden_states=True)
            assert out.logits[0, len(row["prompt_ids"]) - 1:-1].argmax(-1).tolist() == row["response_ids"]
            sizes = [float(state.square().mean().sqrt()) for state in out.hidden_states]
            assert 1.2 < sizes[-2] < 5  # the layers matter, and nothing explodes
    again = (target / "config.json").stat().st_mtime_ns
    make(tmp_path)
    assert (target / "config.json").stat().st_mtime_ns == again  # complete: left alone
    with pytest.raises(subprocess.CalledProcessError) as refused:  # a table of 8 samples must not be made from 6
        make(tmp_path, "--samples", "8")
    assert refused.value.returncode == 2 and b"holds 6 samples, --samples says 8" in refused.value.stderr


def test_samples_have_the_real_length_mix():
    rows = list(wide.samples(200, 4096, 32000, wide.followers(163840).numpy()))
    lengths = np.array([len(prompt) + len(response) for prompt, response in rows])
    assert abs(lengths.mean() / 1730 - 1) < 0.1 and lengths.max() <= 4096
    assert 0.30 < sum(len(prompt) for prompt, _ in rows) / lengths.sum() < 0.35
    emitted = {token for _, response in rows for token in response}
    assert len(emitted) <= 32000 - 8 and max(emitted) < 163584  # the draft vocabulary can hold them all, no special token among them
