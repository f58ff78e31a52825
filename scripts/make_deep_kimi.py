"""Make "deep Kimi": tiny Kimi with as many layers as Kimi-K2.5, which answers in the same tokens but takes longer.

    python3 scripts/make_deep_kimi.py --output-dir .run/deep/tiny_kimi        # seconds; 71 MB

Tiny Kimi's 8 layers, then copies of its last one whose attention and MLP add nothing to the stream (their output
projections are zero). A server computes them all the same, so a drafter trained on tiny Kimi has its acceptance here,
beside a target that costs more than the drafter does: what speculation gains can be measured without a large target.
On a GPU a step of tiny Kimi itself is nothing but overhead, and no drafter pays. The folder keeps the name: by that 05
knows the target for which a drafter was trained.
"""
import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.stage import UserError, log, read_json, run  # noqa: E402

TINY_KIMI = Path(__file__).resolve().parent / "tiny_kimi"
PREFIX = "language_model.model.layers."
ADDS = ("o_proj.weight", "down_proj.weight")  # what a layer adds to the stream comes out of these


def deepened(tensors: dict[str, torch.Tensor], before: int, layers: int) -> dict[str, torch.Tensor]:
    """`tensors` of `before` layers, and those of as many more as make `layers`."""
    last = f"{PREFIX}{before - 1}."
    of_last = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    return tensors | {f"{PREFIX}{layer}.{name}": tensor * 0 if name.endswith(ADDS) else tensor.clone()
                      for layer in range(before, layers) for name, tensor in of_last.items()}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=61, help="of all (default: Kimi-K2.5's 61)")
    args = parser.parse_args(argv)
    config = read_json(TINY_KIMI / "config.json")
    before = config["text_config"]["num_hidden_layers"]
    if args.layers <= before:
        raise UserError(f"--layers {args.layers}: tiny Kimi has {before} itself. Name more.")
    shutil.copytree(TINY_KIMI, args.output_dir, dirs_exist_ok=True)
    config["text_config"]["num_hidden_layers"] = args.layers
    tensors = deepened(load_file(TINY_KIMI / "model.safetensors"), before, args.layers)
    save_file(tensors, args.output_dir / "model.safetensors", {"format": "pt"})
    (args.output_dir / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    log(f"{args.layers} layers, {before} of them add to the stream | done: {args.output_dir}")


if __name__ == "__main__":
    run(main)
