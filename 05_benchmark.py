"""Measure a drafter in SGLang against plain decoding: is it worth serving, with which flags, and if not, why.

    python3 -u 05_benchmark.py --config configs/quickstart.yaml     # starts the run file's two servers, one by one
    python3 -u 05_benchmark.py --base-url http://127.0.0.1:30001 --baseline-url http://127.0.0.1:30000 \\
      --draft-path output/best --prompts responses --ids output/val_ids.json --concurrency 1 8 64 --max-tokens 1024 \\
      --output-dir report

Reads   prompts (JSONL, a folder of it, a responses/ folder, data sets by name), the drafter's folder, and what
        SGLang's /generate answers
Writes  <output-dir>/raw.jsonl (one row a request: ids, times, counts), report.json, report.md, *.png, manifest.json
Time    each prompt once per variant, level and repeat: 100 of 512 tokens at 90 tok/s take 10 minutes at one stream
Resume  the same command goes on with the first unit that is not finished; with more --repeats it measures more

Words. variant: plain, speculative, or one point of --sweep. level: requests in flight at a time. unit: all prompts
once, of one variant at one level. repeat: all units once, the variants in turned order (plain, speculative,
speculative, plain): two runs of the same differ by more than their prompts tell, so one repeat gives no verdict.
accept_length: 1 + correct drafts / verify steps, summed over requests first, as SGLang counts. A request's last step
also counts drafts that were right *beyond* the stop token or --max-tokens; accept_length_in_answer leaves those out:
training can predict it.
"""
from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
from eagle3 import bench_flags, binding  # noqa: E402
from eagle3.bench_prompts import check_ids, load_prompts, prompts_of_training  # noqa: E402
from eagle3.endpoints import (Endpoints, contact, drafter_hashes, flush_cache, probe_difference,  # noqa: E402
                              read_provenance, same_folder, sweep_variants)
from eagle3.figures import count, difference_key, level_figures, same_text  # noqa: E402
from eagle3.load import Connection, Power, run_unit  # noqa: E402
from eagle3.masking import clean, cleaned, masked  # noqa: E402
from eagle3.measured import Measured  # noqa: E402
from eagle3.plots import draw_plots, no_plots  # noqa: E402
from eagle3.report import build_report, figures_table, prediction_sentence, report_markdown  # noqa: E402
from eagle3.servers import ServerGone, command_line  # noqa: E402
from eagle3.stage import (UserError, log, open_stage, parse_args, read_json, read_manifest, read_run_file,  # noqa: E402
                          run, write_atomic, write_manifest)

STAGE = "05_benchmark"
MAX_PROBES = 200
UNTOLD = {"base-url", "baseline-url", "api-key-env", "launch-timeout", "request-timeout", "usd-per-hour", "run-dir",
          "config", "trust-remote-code"}  # of the manifest
FOLDERS = ("model_path", "speculative_draft_model_path")  # of what a server tells


def build_parser() -> argparse.ArgumentParser:
    return bench_flags.build_parser(__doc__)


@dataclass(frozen=True)
class Unit:
    """All prompts once, of one variant at one level."""
    variant: str
    level: int
    repeat: int

    def __str__(self) -> str:
        return f"{self.variant} c{self.level} r{self.repeat}"


@dataclass
class Benchmark:
    """What is measured, and where; the rest is filled in as it becomes known."""
    args: argparse.Namespace
    endpoints: Endpoints
    variants: list[str]
    provenance: dict  # the drafter's eagle3.json
    config: dict  # flag: value
    prompts: list[dict] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # hashes
    planned: list[Unit] = field(default_factory=list)
    repeats: int = 1
    measured: Measured | None = None
    met: str | None = None  # the variant whose server has been looked at
    unable: dict[str, str] = field(default_factory=dict)  # sweep points that were left out, and why

    @property
    def report_path(self) -> Path:
        return self.args.output_dir / "report.md"

    def unfinished(self) -> list[Unit]:
        finished = {Unit(unit["variant"], unit["level"], unit["repeat"]) for unit in self.measured.units}
        return [unit for unit in self.planned if unit not in finished]

    def unmet(self) -> list[str]:
        """Variants of whose server nothing is known: its line was damaged."""
        return [variant for variant in dict.fromkeys(unit["variant"] for unit in self.measured.units)
                if variant not in self.measured.servers]


# ---- 1. what to send, and where ----
def choose_tokenizer(bench: Benchmark) -> str:
    """The folder of the tokenizer that renders prompts. Raises UserError."""
    args, endpoints = bench.args, bench.endpoints
    if args.tokenizer:
        return args.tokenizer
    if args.launch:
        return endpoints.flag(bench.variants[0], "--model-path")
    url = endpoints.use("speculative")
    return contact(url, "speculative", endpoints.headers, args.draft_path, bench.provenance)["model_path"]


def hashes_of(bench: Benchmark) -> dict[str, str]:
    """What may not change between a run and its resumption."""
    def digest(value) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    drafter = drafter_hashes(bench.args.draft_path) if bench.args.draft_path else {}
    return {"prompts": digest(bench.prompts), "prediction": digest(bench.provenance), **drafter}


def plan(bench: Benchmark, complete: bool) -> None:
    """The order of the units. Each repeat turns the variants round, so that a drift of the machine hits both.

    complete: a finished report is asked for more only by more --repeats.
    """
    args = bench.args
    few = args.sweep or args.doctor
    bench.repeats = args.repeats or (bench_flags.REPEATS_OF_SWEEP if few else bench_flags.REPEATS)
    if complete and not args.repeats:
        bench.repeats = 1 + max((unit["repeat"] for unit in bench.measured.units), default=0)
    bench.config["repeats"] = bench.repeats
    bench.planned = [Unit(variant, level, repeat) for repeat in range(bench.repeats)
                     for variant in (bench.variants if repeat % 2 == 0 else reversed(bench.variants))
                     for level in args.concurrency]


def prepare(bench: Benchmark) -> None:
    """What has to be here, before hours of measuring; and what to expect. Raises UserError."""
    args, prompts, units = bench.args, bench.prompts, len(bench.planned)
    todo = bench.unfinished()
    log(f"{len(prompts)} prompts | {units} units: {len(bench.variants)} variants x "
        f"{len(args.concurrency)} levels x {bench.repeats} repeats | {units - len(todo)} finished before")
    for level in args.concurrency:
        if len(prompts) < 2 * level:
            log(f"note: {len(prompts)} prompts at {level} streams: the ramp up and down is a large part of that "
                "level's tok/s")
    if bench.repeats == 1 and "plain" in bench.variants:
        log("note: measured once, nothing tells how far two runs of the same differ: no verdict. --repeats 2 gives one")
    bench_flags.check_descriptors(min(max(args.concurrency), len(prompts)))
    bench_flags.check_disk(args.output_dir, len(todo) * len(prompts), args.max_tokens)
    if why := no_plots():
        log(f"note: no plots will be drawn ({why}). Install matplotlib meanwhile, or do without")
    bench.endpoints.check_logs()


# ---- 2. measure, unit by unit ----
def measure(bench: Benchmark) -> None:
    """All units that are not finished. Raises UserError, ServerGone."""
    for unit in bench.unfinished():
        if unit.variant in bench.unable:
            continue
        try:
            url = bench.endpoints.use(unit.variant)
        except UserError as error:
            leave_out(bench, unit.variant, error)
            continue
        meet(bench, unit.variant, url)
        try:
            measure_unit(bench, unit, url)
        except ServerGone as error:
            leave_out(bench, unit.variant, ServerGone(f"{error}{bench.endpoints.reason()}"))
    for variant in bench.unmet():
        meet(bench, variant, bench.endpoints.use(variant))


def leave_out(bench: Benchmark, variant: str, error: Exception) -> None:
    """Go on without a point of --sweep whose server does not start or dies.

    Raises `error` for any other variant, and where no point has been measured yet: then the cause is not the point.
    """
    if not bench.args.sweep or variant == "plain" or all(unit["variant"] == "plain" for unit in bench.measured.units):
        raise error
    log(f"note: {variant} is left out: {error}")
    bench.unable[variant] = str(error)
    bench.endpoints.close()


def meet(bench: Benchmark, variant: str, url: str) -> None:
    """Look at a server before the first unit there: is it the one it should be, and was? Raises UserError."""
    if variant == bench.met:
        return
    bench.met, servers = variant, bench.measured.servers
    info = contact(url, variant, bench.endpoints.headers, bench.args.draft_path, bench.provenance)
    for name, known in servers.items():
        if Path(known["model_path"]).name != Path(info["model_path"]).name:
            raise UserError(f"{bench.endpoints}: serves {info['model_path']}, {name} {known['model_path']}: "
                            "not one target.")
    before = servers.get(variant, info)
    differs = sorted(key for key in info if before.get(key) != info[key] and not (
        key in FOLDERS and before.get(key) and info[key] and same_folder(before[key], info[key])))
    if differs:
        raise UserError(f"{bench.endpoints}: other {', '.join(differs)} than in {bench.measured.path}. "
                        "Start it as it was, or use another --output-dir.")
    bench.measured.add_server(variant, info)
    log(f"{variant} at {url} | " + " | ".join(f"{key} {value}" for key, value in info.items() if value is not None))


def measure_unit(bench: Benchmark, unit: Unit, url: str) -> None:
    """Warm up, empty the cache, measure, and report what there is so far. Raises UserError, ServerGone."""
    args, prompts, info = bench.args, bench.prompts, bench.measured.servers[unit.variant]
    sampling = {"max_new_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p,
                "ignore_eos": args.fixed_length}
    connection = Connection(url, bench.endpoints.headers, bool(info["incremental_streaming_output"]),
                            args.request_timeout, bench.endpoints)
    power = Power(url)
    if args.warmup:
        short = {**sampling, "max_new_tokens": min(16, args.max_tokens)}
        asyncio.run(run_unit(connection, prompts[:args.warmup], unit.level, short, f"{unit} warm-up"))
    flush_cache(url, bench.endpoints.headers)
    with power:
        requests, wall = asyncio.run(run_unit(connection, prompts, unit.level, sampling, str(unit)))
    if all("error" in request for request in requests):
        raise UserError(f"{bench.endpoints}: all {len(requests)} requests of {unit} failed; the first with "
                        f"{requests[0]['error']}: {' '.join(requests[0]['message'].split())}")
    bench.measured.add_unit({"variant": unit.variant, "level": unit.level, "repeat": unit.repeat},
                            {"wall_s": wall, "watts": power.watts}, requests)
    write_report(bench, plots=False)  # a killed run says what it has
    figures = level_figures([bench.measured.units[-1]])
    accept = figures["accept"]
    spoken = f"{figures['tok_s']:,.1f} tok/s | ttft p50 {figures['ttft_s']['p50'] * 1000:.0f} ms" \
        if figures["tok_s"] else "no token came back"
    log(f"{unit} finished | {spoken}"
        + (f" | accept_length {accept['accept_length']:.3f}" if accept else "")
        + f" | failed {sum(figures['failed'].values())} | {wall:.1f} s")
    if unit.variant != "plain" and not accept:
        log(f"note: the answers of SGLang {info['version']} carry no speculative counts: no accept_length")


# ---- 3. where greedy answers part: a near-tie or a fault ----
def probe_differences(bench: Benchmark) -> None:
    """Ask a server for the target's own log-probabilities of the two tokens. Raises UserError, ServerGone."""
    measured, about = bench.measured, {prompt["id"]: prompt for prompt in bench.prompts}
    pairs = [(unit, plain) for plain in measured.units if plain["variant"] == "plain" and bench.args.temperature == 0
             for unit in measured.units if unit["variant"] != "plain" and unit["level"] == plain["level"]]
    for unit, plain in pairs:
        answers = {record["id"]: record for record in plain["requests"]}
        for difference in same_text([plain], [unit])["differences"]:
            key = difference_key(difference)
            if key in measured.probes or len(measured.probes) >= MAX_PROBES:
                continue
            url = bench.endpoints.use(bench.endpoints.variant or "plain")  # any server will do: take the one that runs
            near_tie = 1e-3 if measured.servers["plain"].get("dtype") == "float32" else 0.25
            common = answers[difference["id"]]["output_ids"][:difference["position"]]
            context = about[difference["id"]]["prompt_ids"] + common
            measured.add_probe(key, probe_difference(url, bench.endpoints.headers, context, difference["tokens"],
                                                     near_tie))


# ---- 4. say it ----
def write_report(bench: Benchmark, plots: bool) -> dict:
    """report.json and report.md of what has been measured so far."""
    args, out = bench.args, bench.args.output_dir
    found = build_report(bench.measured, bench.prompts, bench.provenance.get("prediction"), bench.config)
    found |= {"units_planned": len(bench.planned), "units_done": len(bench.measured.units)}
    if args.sweep:
        found["left_out"] = bench.unable
        found["sweep"] = {level: best_flags(bench, row) for level, row in found["levels"].items()}
    if args.doctor:
        found["doctor"] = examine_drafter(bench, found["variants"])
    drawn, found["not_drawn"] = draw_plots(found, out) if plots else ([], {})
    write_atomic(out / "report.json", json.dumps(cleaned(found), indent=1) + "\n")
    write_atomic(bench.report_path, clean(report_markdown(found, drawn)))
    return found


def best_flags(bench: Benchmark, row: dict) -> dict | None:
    """The fastest variant of a level and the line that starts it; None where no token came back."""
    name = max((name for name in row if row[name]["tok_s"]), key=lambda name: row[name]["tok_s"], default=None)
    return name and {"variant": name, "tok_s": row[name]["tok_s"],
                     "command": command_line(*bench.endpoints.command(name))}


def examine_drafter(bench: Benchmark, found: dict[str, dict]) -> dict:
    """The doctor on the variant that training's prediction is about, else on the last one. found: the report's."""
    from eagle3.doctor import Facts, diagnose
    endpoints, last = bench.endpoints, bench.variants[-1]
    variant = next((name for name, about in found.items() if about["prediction"]), last)
    about, server = found.get(variant, {}), bench.measured.servers.get(variant)
    if bench.args.launch and not server:  # not met yet: what its command says
        length = endpoints.flag(last, "--context-length")
        server = {"model_path": endpoints.flag(last, "--model-path"),
                  "context_length": int(length) if length.isdigit() else None}
    facts = Facts(bench.args.draft_path, bench.provenance, server, bench.args.run_dir, bench.prompts)
    return diagnose(facts, about.get("accept"), about.get("prediction"))


def log_findings(diagnosis: dict) -> None:
    for finding in diagnosis["findings"]:
        log(f"doctor: {finding['cause']}: {finding['finding']} {finding['remedy']}")


def say(bench: Benchmark) -> None:
    """The report, and its short form in the log. Raises ServerGone where points of a sweep are missing."""
    found = write_report(bench, plots=True)
    for name, why in found["not_drawn"].items():
        log(f"note: {name} is not drawn: {why}")
    print(figures_table(found), flush=True)
    for variant, served in found["variants"].items():
        if served["prediction"]:
            log(f"{variant}: {prediction_sentence(served['prediction'])}")
    for level, said in found["verdict"].items():
        log(f"verdict at {level} stream(s): {said}")
    if bench.args.doctor:
        log_findings(found["doctor"])
        log(f"doctor: {found['doctor']['summary']}")
    if bench.unable:
        raise ServerGone(f"{bench.report_path} lacks {len(bench.unable)} of {len(bench.variants) - 1} sweep points "
                         f"({', '.join(bench.unable)}). The same command tries them again; what it has measured stays.")


def finish(bench: Benchmark) -> None:
    requests = [request for unit in bench.measured.units for request in unit["requests"]]
    write_manifest(
        bench.args.output_dir, STAGE,
        config={key: value for key, value in sorted(bench.config.items()) if key not in UNTOLD},
        inputs=bench.inputs,
        counts={"kept": len(bench.prompts), "units": len(bench.measured.units),
                "failed": count(request["error"] for request in requests if "error" in request)},
        versions={"python": sys.version.split()[0], "numpy": np.__version__,
                  "sglang": sorted({info["version"] for info in bench.measured.servers.values()})})


def measure_and_report(bench: Benchmark) -> None:
    args, out = bench.args, bench.args.output_dir
    # 1. what to send, and where
    tokenizer = choose_tokenizer(bench)
    bench.endpoints.check_drafter()
    bench.prompts = load_prompts(args, tokenizer)
    check_ids(bench.prompts, [args.draft_path, tokenizer])
    bench.inputs = hashes_of(bench)
    begun_with = binding.bound(bench.config, bench.inputs, bench.endpoints.servers if args.launch else None)
    with open_stage(out, begun_with, bench_flags.MAY_CHANGE, lambda old: binding.renewed(old, out)):
        fill(bench)


def fill(bench: Benchmark) -> None:
    """The report's folder, which is locked for this process. Raises UserError, ServerGone, OSError."""
    args, out = bench.args, bench.args.output_dir
    complete = (out / "manifest.json").exists() and bool(read_manifest(out, STAGE))
    bench.measured = Measured(out / "raw.jsonl", [prompt["id"] for prompt in bench.prompts])
    plan(bench, complete)
    log(f"config {json.dumps(bench.config)}")
    log(f"inputs {json.dumps(bench.inputs)}")
    if complete and not bench.unfinished() and not bench.unmet():
        log("complete already")
        print(figures_table(read_json(out / "report.json")), flush=True)
        log(f"done: {bench.report_path}")
        return
    (out / "manifest.json").unlink(missing_ok=True)  # there is more to do
    prepare(bench)
    if args.doctor:  # before any server runs: a faulty folder may keep it from starting
        log_findings(examine_drafter(bench, {}))
    measure(bench)  # 2.
    probe_differences(bench)  # 3.
    bench.endpoints.close()
    say(bench)  # 4.
    finish(bench)
    log(f"done: {bench.report_path}")


def main(argv: list[str]) -> int | None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `kill` also stops the servers
    args = parse_args(build_parser(), "benchmark", argv)
    bench_flags.check_args(args)
    document = read_run_file(args.config) if args.config else {}
    provenance = read_provenance(args.draft_path, args.doctor)
    args.run_dir = args.run_dir or (Path(document["run_dir"]) if document.get("run_dir") else None)
    if args.doctor and not args.prompts and not args.dataset and args.run_dir:
        prompts_of_training(args)
    variants = {"plain": {}} if args.launch or args.baseline_url else {}
    variants |= sweep_variants(args.sweep_grid) if args.sweep else {"speculative": {}}
    endpoints = Endpoints(args, document, variants)  # takes the logins out of the URLs
    config = json.loads(json.dumps({key.replace("_", "-"): value for key, value in vars(args).items()}, default=str))
    try:
        measure_and_report(Benchmark(args, endpoints, list(variants), provenance, masked(config)))
    except (ServerGone, OSError) as error:
        why = str(error) if isinstance(error, ServerGone) else (
            f"{error.filename or args.output_dir}: {error.strerror or error}. What was measured stays; the same "
            "command goes on.")
        print(f"{STAGE}: {clean(why)}", file=sys.stderr, flush=True)
        return 1
    finally:
        endpoints.close()


if __name__ == "__main__":
    run(main)
