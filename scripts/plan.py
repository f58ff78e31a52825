"""What a run takes: bytes, hours, money, and what of it does not fit. Every figure stands beside its formula.

    python3 scripts/plan.py --config configs/kimi-k2.5-10k.yaml --train-gpus 4
    python3 scripts/plan.py --samples 37312 --mean-length 2353 --train-gpus 4 --disk 4T
    python3 scripts/plan.py --config configs/kimi-k2.5-100k.yaml --hosts 2 --train-gpus 4    # machines like each other
    python3 scripts/plan.py --known          # against two runs whose figures are known; exit 1 where one is 10 % off

Flags win over the run file, the run file over the defaults (Kimi-K2.5 on 8x RTX PRO 6000). Rates are flags too: their
help says where each default was measured. `--json` prints the figures alone. Exit 0, also when something does not
fit: scripts/preflight.py refuses, this tells.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from eagle3.forecast import Forecast, build_parser, check_settings, run_file_settings, run_folders, size  # noqa: E402
from eagle3.stage import raising, read_run_file, run  # noqa: E402

TOLERANCE = 0.10
KNOWN = [  # (what, flags, known figures)
    ("10K run", ["--samples", "10000", "--mean-length", "1730"],
     {"tokens": 17.3e6, "hidden_states_bytes": 924 * 2**30}),
    ("37,312 samples, 4 GPUs, unpacked trainer",
     ["--samples", "37312", "--mean-length", "2353", "--train-gpus", "4", "--epochs", "5", "--val-ratio", "0.05",
      "--max-seq-len", "4096", "--unpacked", "--train-rate", "2800"],
     {"tokens": 87.8e6, "hidden_states_bytes": 4.6 * 2**40, "train_steps": 177230, "train_hours": 10.8}),
]


def check_known() -> bool:
    print(f"{'run':<42} {'figure':<20} {'known':>20} {'plan':>20}   off by")
    good = True
    for what, flags, known in KNOWN:
        found = Forecast(build_parser(__doc__).parse_args(flags)).figures
        for key, value in known.items():
            off = found[key] / value - 1
            good &= abs(off) <= TOLERANCE
            print(f"{what:<42} {key:<20} {value:>20,.1f} {found[key]:>20,.1f}   {off:+.1%}")
    return good


def show(forecast: Forecast, disk: str | None) -> None:
    for stage, what, figure, formula in forecast.rows:
        print(f"{stage:<4} {what:<20} {figure:>26}   {formula}")
    for problem in forecast.problems:
        print(f"does not fit | {problem}")
    if not forecast.problems:
        figures = forecast.figures
        print(f"fits | {size(figures['disk_bytes'] - figures['disk_there'])} more are needed, "
              f"{size(figures['disk_free'])} are free at {disk}" if disk else
              "fits | no --disk given, so only the GPUs were looked at")


def main(argv: list[str]) -> int:
    parser = raising(build_parser(__doc__))
    parser.add_argument("--known", action="store_true")
    parser.add_argument("--json", action="store_true")
    args, folders = parser.parse_args(argv), ()
    if args.known:
        return 0 if check_known() else 1
    if args.config:
        run_file = read_run_file(args.config)
        parser.set_defaults(**run_file_settings(run_file, args.config))
        args = parser.parse_args(argv)
        folders = run_folders(run_file)
    check_settings(args)
    forecast = Forecast(args, folders)
    if args.json:
        print(json.dumps({**forecast.figures, "problems": forecast.problems}))
    else:
        show(forecast, args.disk)
    return 0


if __name__ == "__main__":
    run(main)
