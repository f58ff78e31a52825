"""The table of a rehearsal: what each stage took, beside the forecast. Called by scripts/rehearse.sh.

    python3 scripts/rehearsal_table.py --config configs/rehearsal.yaml \\
      --timings .run/rehearsal/timings.tsv --samples 200 --longest 4096

Reads   timings.tsv (stage, seconds, peak GPU memory in MiB), the stages' logs and folders, report.json
Exit    0; 1 when a greedy answer of the speculative server differs from the plain one's (each is shown with its
        log-probability gap)
"""
import argparse
import json
import re
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.forecast import MEAN_LENGTH, Forecast, bytes_there, build_parser, run_file_settings  # noqa: E402
from eagle3.stage import read_json, read_run_file, run  # noqa: E402

PEAKS = {"H200": 989, "H100": 989, "RTX PRO 6000": 504}  # dense bf16 TFLOP/s, data sheets
STAGES = ("target", "02_build_vocab", "03_extract", "04_train", "05_benchmark")


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers of the pattern's group in every place it stands."""
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


def gb(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


def forecast_of(run_file: dict, args: argparse.Namespace, tflops: float | None) -> dict:
    """The figures that scripts/plan.py gives for this rehearsal."""
    parser = build_parser("")
    parser.set_defaults(**run_file_settings(run_file, args.config))
    more = ["--gpu-tflops", str(tflops)] if tflops else []
    return Forecast(parser.parse_args(["--samples", str(args.samples), "--mean-length",
                                       str(MEAN_LENGTH * args.longest / 4096), *more])).figures


def measured(folder: Path) -> dict:
    """What the logs of 03 and 04 say."""
    extract, train = ((folder / "logs" / f"{name}.log").read_text() for name in ("03_extract", "04_train"))
    return {"extract": numbers(r"extracted .*\| ([\d,]+) tok/s", extract)[-1],
            "tokens": int(numbers(r"kept .*\| tokens ([\d,]+)", extract)[-1]),
            "train": statistics.median(numbers(r"train step .*\| ([\d,]+) tok/s", train)[1:]),  # the first compiles
            "memory": (numbers(r"\| ([\d.]+) GiB", train) or [None])[-1]}


def columns_of(folder: Path, run_file: dict, found: dict, forecast: dict, rate: str, levels: dict) -> dict:
    """{stage: (bytes, forecast, speed, forecast)}."""
    checkpoint = next(iter((folder / "output").glob("checkpoint-*")))
    kept = run_file["train"]["keep-checkpoints"] + 1
    speeds = ", ".join(f"{variants['plain']['tok_s']:.0f} / {variants['speculative']['tok_s']:.0f} tok/s at {level}"
                       for level, variants in levels.items())
    memory = f", {found['memory']} GiB" if found["memory"] else ""
    return {"target": (gb(bytes_there((folder / "target").resolve())), gb(forecast["target_bytes"]), "-", "-"),
            "02_build_vocab": ("-", "-", "-", "-"),
            "03_extract": (gb(bytes_there(folder / "hidden_states")), gb(forecast["hidden_states_bytes"]),
                           f"{found['extract']:,.0f} tok/s", "1,700-2,800 (Kimi, 8 GPUs, one at a time)"),
            "04_train": (gb(bytes_there(checkpoint)), gb(forecast["checkpoint_bytes"] / kept),
                         f"{found['train']:,.0f} tok/s{memory}", rate),
            "05_benchmark": ("-", "-", f"plain / speculative {speeds}", "-")}


def show(rows: list[tuple]) -> None:
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("| " + " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths)) + " |")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--timings", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--longest", type=int, required=True)
    args = parser.parse_args(argv)
    folder, run_file = args.timings.parent, read_run_file(args.config)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    tflops = next((peak for name, peak in PEAKS.items() if gpu and name in gpu), None)
    forecast, found = forecast_of(run_file, args, tflops), measured(folder)
    report = read_json(folder / "report" / "report.json")
    levels, speculative = report["levels"], report["variants"]["speculative"]
    rate = f"{forecast['train_rate']:,.0f} tok/s" if tflops else "- (no GPU known to the plan)"
    columns = columns_of(folder, run_file, found, forecast, rate, levels)

    timings = dict(line.split("\t", 1) for line in args.timings.read_text().splitlines())
    rows = [("stage", "seconds", "GPU peak", "bytes", "forecast", "speed", "forecast")]
    for stage in STAGES:
        seconds, peak = timings[stage].split("\t")
        rows.append((stage, f"{int(seconds):,}", f"{peak} MiB" if peak != "-" else "-", *columns[stage]))
    show(rows)
    print(f"{args.samples} samples, {found['tokens']:,} tokens (forecast {forecast['tokens']:,.0f}) | drafter "
          f"{forecast['draft_parameters'] / 1e6:,.0f}M trained | {gpu or 'CPU'} | accept_length "
          f"{speculative['accept']['accept_length']:.2f} (training predicted "
          f"{speculative['prediction']['predicted']:.2f} over the whole responses)")
    same = [variants["speculative"]["same_text"] for variants in levels.values()]
    for difference in (each for text in same for each in text["differences"]):
        print(f"differs: {json.dumps(difference)}")
    equal, compared = sum(text["equal"] for text in same), sum(text["compared"] for text in same)
    print(f"greedy answers equal to plain's: {equal} of {compared}")
    return 0 if equal == compared else 1


if __name__ == "__main__":
    run(main)
