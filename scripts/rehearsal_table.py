"""The table of a rehearsal: what each stage took, beside scripts/plan.py's forecast. Called by scripts/rehearse.sh.

    python3 scripts/rehearsal_table.py --config configs/rehearsal.yaml --timings .run/rehearsal/timings.tsv --samples 200 --longest 4096

Reads   timings.tsv (stage, seconds, peak GPU memory in MiB), the stages' logs and folders, report.json
Exit    0; 1 when a greedy answer of the speculative server differs from the plain one's (each is shown with its log-probability gap)
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import yaml

PEAKS = {"H200": 989, "H100": 989, "RTX PRO 6000": 504}  # dense bf16 TFLOP/s, data sheets


def folder_bytes(folder: Path) -> int:
    found = {}
    for place, _, files in os.walk(folder, followlinks=True):
        for name in files:
            state = os.stat(os.path.join(place, name))
            found[state.st_ino] = state.st_size
    return sum(found.values())


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers of the pattern's group in every place it stands."""
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--timings", type=Path, required=True)
    parser.add_argument("--samples", required=True)
    parser.add_argument("--longest", type=int, required=True)
    args = parser.parse_args()
    run = args.timings.parent
    timings = {name: (int(seconds), peak) for name, seconds, peak in (line.split("\t") for line in args.timings.read_text().splitlines())}
    config = yaml.safe_load(args.config.read_text())
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    tflops = next((peak for name, peak in PEAKS.items() if gpu and name in gpu), None)
    forecast = json.loads(subprocess.run(
        [sys.executable, str(Path(__file__).with_name("plan.py")), "--json", "--config", str(args.config), "--samples", args.samples,
         "--mean-length", str(1730 * args.longest / 4096), *(["--gpu-tflops", str(tflops)] if tflops else [])],
        check=True, capture_output=True, text=True).stdout)
    logs = {name: (run / "logs" / f"{name}.log").read_text() for name in ("03_extract", "04_train")}
    extract = numbers(r"extracted .*\| ([\d,]+) tok/s", logs["03_extract"])[-1]
    train = statistics.median(numbers(r"train step .*\| ([\d,]+) tok/s", logs["04_train"])[1:])  # the first one compiles
    memory = (numbers(r"\| ([\d.]+) GiB", logs["04_train"]) or [None])[-1]
    tokens = int(re.findall(r"kept .*\| tokens ([\d,]+)", logs["03_extract"])[-1].replace(",", ""))
    report = json.loads((run / "report" / "report.json").read_text())

    def gb(value):
        return f"{value / 1e9:.2f} GB"

    checkpoint = next(iter((run / "output").glob("checkpoint-*")))
    rate = f"{forecast['train_rate']:,.0f} tok/s" if tflops else "- (no GPU known to the plan)"
    levels = [(level, variants) for level, variants in report["levels"].items()]
    speeds = ", ".join(f"{variants['plain']['tok_s']:.0f} / {variants['speculative']['tok_s']:.0f} tok/s at {level}" for level, variants in levels)
    accept = report["variants"]["speculative"]["accept"]
    rows = [("stage", "seconds", "GPU peak", "bytes", "forecast", "speed", "forecast"),
            ("target", "target", gb(folder_bytes(run / "target")), gb(forecast["target_bytes"]), "-", "-"),
            ("02_build_vocab", "02_build_vocab", "-", "-", "-", "-"),
            ("03_extract", "03_extract", gb(folder_bytes(run / "hidden_states")), gb(forecast["hidden_states_bytes"]), f"{extract:,.0f} tok/s",
             "1,700-2,800 (Kimi, 8 GPUs, one at a time)"),
            ("04_train", "04_train", gb(folder_bytes(checkpoint)), gb(forecast["checkpoint_bytes"] / (config["train"]["keep-checkpoints"] + 1)),
             f"{train:,.0f} tok/s" + (f", {memory} GiB" if memory else ""), rate),
            ("05_benchmark", "05_benchmark", "-", "-", f"plain / speculative {speeds}", "-")]
    table = [rows[0]] + [(name, f"{timings[key][0]:,}", f"{timings[key][1]} MiB" if timings[key][1] != "-" else "-", *rest) for name, key, *rest in rows[1:]]
    widths = [max(len(str(row[i])) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("| " + " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths)) + " |")
    print(f"{args.samples} samples, {tokens:,} tokens (forecast {forecast['tokens']:,.0f}) | drafter {forecast['draft_parameters'] / 1e6:,.0f}M trained | "
          f"{gpu or 'CPU'} | accept_length {accept['accept_length']:.2f} (training predicted "
          f"{report['variants']['speculative']['prediction']['predicted']:.2f} over the whole responses)")
    same = [variants["speculative"]["same_text"] for _, variants in levels]
    for difference in (found for text in same for found in text["differences"]):
        print(f"differs: {json.dumps(difference)}")
    equal, compared = sum(text["equal"] for text in same), sum(text["compared"] for text in same)
    print(f"greedy answers equal to plain's: {equal} of {compared}")
    return 0 if equal == compared else 1


if __name__ == "__main__":
    sys.exit(main())
