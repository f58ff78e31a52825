"""Look at this machine before a run: versions, GPUs, disk, limits, patch, ports, the target's files and token ids.

    python3 scripts/preflight.py --config configs/kimi-k2.5-10k.yaml
    python3 scripts/preflight.py --config configs/kimi-k2.5-10k.yaml --stage 04_train

Changes nothing. Use the Python that will run the stages; the patch is looked for where the run file's servers run.
With two GPUs or more an all-reduce over them is tried, killed after --all-reduce-timeout.
Each finding is one line, `preflight: <what> | <where> | <what to do>`; a warning says so. Exit 0 when nothing stands
in the way (warnings or not), 2 when something does, or the run file cannot be read.
"""
import argparse
import importlib.util
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "patches")]
from eagle3 import bench_flags, train_flags  # noqa: E402
from eagle3.findings import ROOT, Findings, one_line, read_run  # noqa: E402
from eagle3.machine_look import (check_gpus, check_limits, check_places, check_ports, check_sglang,  # noqa: E402
                                 check_versions)
from eagle3.run_file_look import check_servers, check_urls  # noqa: E402
from eagle3.stage import SCRIPTS, UserError, parse_args, raising, run  # noqa: E402
from eagle3.target_look import check_target, check_tokenizer  # noqa: E402

STAGES = list(SCRIPTS.values())
ROLES = {"01_generate": {"plain"}, "03_extract": {"extract"},
         "05_benchmark": {"plain", "speculative"}}  # the servers that a stage talks to
FLAGS = {"train": train_flags, "benchmark": bench_flags}  # the other scripts hold theirs, and import little


def flags_of(section: str):
    """(the parser, what refuses its values) of a stage."""
    if section in FLAGS:
        return FLAGS[section].build_parser(""), FLAGS[section].check_args
    spec = importlib.util.spec_from_file_location(f"stage_{section}", ROOT / f"{SCRIPTS[section]}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    check = getattr(module, "check_args", None) or getattr(module, "check_values", None)
    return module.build_parser(), check or (lambda args: None)


def check_flags(run_file: dict, found: Findings, path: Path, stages: list) -> None:
    """Each script's own parser reads its section, and refuses values, as the stage itself will."""
    for section, script in SCRIPTS.items():
        if script in stages:
            try:
                parser, check_args = flags_of(section)
                check_args(parse_args(parser, section, ["--config", str(path)]))
            except UserError as error:
                found.add(str(error), f"{path}: {section}", f"correct it; {script}.py --help has the flags")


def forecast(run_file: dict, found: Findings, path: Path) -> dict:
    """plan.py's figures; {} where the run file holds values that give none."""
    from eagle3.forecast import Forecast  # seconds: it imports torch

    try:
        return Forecast.of_run(run_file, path).figures
    except UserError as error:
        found.add(str(error), path, "correct it; scripts/plan.py --help has the settings")
    return {}


def check_settings(settings: dict) -> None:
    """What the capture will refuse."""
    import eagle3_capture  # imports torch

    eagle3_capture.check_settings(settings)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE.yaml")
    parser.add_argument("--stage", choices=STAGES, nargs="+", default=STAGES,
                        help="only what these stages need (default: all)")
    parser.add_argument("--all-reduce-timeout", type=float, default=120, metavar="S",
                        help="for an all-reduce over the GPUs; 0: do not try one")
    args = raising(parser).parse_args(argv)
    run_file, found, stages = read_run(args.config), Findings(), args.stage
    roles = set().union(*(ROLES.get(stage, set()) for stage in stages))

    def check(function, *rest):
        try:
            return function(run_file, found, *rest)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            found.add(f"a value of the wrong kind stops {function.__name__} ({one_line(error)})", args.config,
                      "correct it")
        except ImportError as error:
            found.add(f"{function.__name__} was left out ({one_line(error)})", sys.executable,
                      "run `pip install .` in this folder with that Python")

    check(check_versions)
    check(check_limits)
    check(check_flags, args.config, stages)
    figures = check(forecast, args.config) or {}
    check(check_places, figures, stages)
    version = check(check_sglang, roles) if roles else None
    if roles:
        check(check_servers, roles, check_settings)
        check(check_ports, roles)
    check(check_urls, stages)
    config = check(check_target, version)
    if config is not None and set(stages) != {"04_train"}:
        check(check_tokenizer, config)
    if roles:
        check(check_gpus, roles, figures, args.all_reduce_timeout)
    errors, warnings = found.count("error"), found.count("warning")
    print(f"preflight: {'ready' if not errors else f'{errors} to mend'}"
          f"{f', {warnings} warnings' if warnings else ''}: {args.config}")
    return 2 if errors else 0


if __name__ == "__main__":
    run(main)
