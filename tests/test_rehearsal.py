"""scripts/make_wide_kimi.py at toy width: a target whose greedy answers are those written down, and samples of the real length mix;
scripts/rehearsal_table.py on the logs and reports of a rehearsal."""
import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from conftest import ROOT, load_script, run_here

wide = load_script("make_wide_kimi")


def make(folder, *argv, code=0):
    run = yaml.safe_load((ROOT / "configs/rehearsal-toy.yaml").read_text()) | {"run_dir": str(folder), "target": str(folder / "target")}
    run["servers"]["plain"]["flags"]["port"] = 1  # not used here
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    done = run_here("make_wide_kimi", "--config", folder / "run.yaml", "--toy", "--samples", "6", "--longest", "512", "--device", "cpu", *argv)
    assert done.returncode == code, done.stderr
    if code:
        return done.stderr
    return folder / "target", folder / "responses"


def test_the_target_gives_the_answers_that_were_written_down(tmp_path):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # here: each worker reads all files, one runs this

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
    # a table of 8 samples must not be made from 6
    assert "holds 6 samples, --samples says 8" in make(tmp_path, "--samples", "8", code=2)


def test_samples_have_the_real_length_mix():
    rows = list(wide.samples(200, 4096, 32000, wide.followers(163840).numpy()))
    lengths = np.array([len(prompt) + len(response) for prompt, response in rows])
    assert abs(lengths.mean() / 1730 - 1) < 0.1 and lengths.max() <= 4096
    assert 0.30 < sum(len(prompt) for prompt, _ in rows) / lengths.sum() < 0.35
    emitted = {token for _, response in rows for token in response}
    assert len(emitted) <= 32000 - 8 and max(emitted) < 163584  # the draft vocabulary can hold them all, no special token among them


@pytest.mark.parametrize("equal", [4, 3])
def test_the_table_stands_beside_the_forecast(tmp_path, equal):
    config = ROOT / "configs/rehearsal-toy.yaml"
    for name, data in {
            "timings.tsv": "".join(f"{stage}\t{n}\t-\n" for n, stage in enumerate(("target", "02_build_vocab", "03_extract", "04_train", "05_benchmark"))),
            "logs/03_extract.log": "t extract extracted 24 samples | 1,234 tok/s\nt extract kept 24 | dropped 0 | tokens 5,190\n",
            "logs/04_train.log": "".join(f"t train step {n}/9 | {rate} tok/s | 1.5 GiB\n" for n, rate in enumerate(("9", "1,000", "1,100", "1,200"))),
            "output/checkpoint-9/model.safetensors": "x" * 10_000_000, "hidden_states/ab/r0.safetensors": "x" * 20_000_000,
            "target/model.safetensors": "x" * 30_000_000,
            "report/report.json": json.dumps({
                "levels": {"1": {"plain": {"tok_s": 50.0}, "speculative": {"tok_s": 60.0, "same_text": {
                    "equal": equal, "compared": 4, "differences": [{"id": "r1", "gap": 0.2}] * (4 - equal)}}}},
                "variants": {"speculative": {"accept": {"accept_length": 1.5}, "prediction": {"predicted": 1.25}}}})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(data)
    done = run_here("rehearsal_table", "--config", config, "--timings", tmp_path / "timings.tsv", "--samples", 24, "--longest", 512)
    lines = done.stdout.splitlines()
    assert done.returncode == (equal != 4) and lines[-1] == f"greedy answers equal to plain's: {equal} of 4"
    assert [line.split(" | ")[0].strip("| ") for line in lines[:6]] == ["stage", "target", "02_build_vocab", "03_extract", "04_train", "05_benchmark"]
    assert "0.03 GB" in lines[1] and "1,234 tok/s" in lines[3] and "0.02 GB" in lines[3] and "1,100 tok/s, 1.5 GiB" in lines[4]
    assert "plain / speculative 50 / 60 tok/s at 1" in lines[5] and "24 samples, 5,190 tokens (forecast 5,190)" in lines[6]
    assert sum(line.startswith("differs: ") for line in lines) == 4 - equal
