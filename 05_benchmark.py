"""Measure a drafter in SGLang against plain decoding: is it worth serving, with which flags, and if not, why.

    python3 -u 05_benchmark.py --config configs/quickstart.yaml     # starts the run file's two servers, one by one
    python3 -u 05_benchmark.py --base-url http://127.0.0.1:30001 --baseline-url http://127.0.0.1:30000 \\
      --draft-path output/best --prompts responses --ids output/val_ids.json --concurrency 1 8 64 --max-tokens 1024 \\
      --output-dir report

Reads   prompts (JSONL, a folder of it, a responses/ folder, data sets by name), the drafter's folder, and what
        SGLang's /generate answers
Writes  <output-dir>/raw.jsonl (one row a request: ids, times, counts), report.json, report.md, *.png, manifest.json
Time    each prompt once per variant, level and repeat: 100 of 512 tokens at 90 tok/s take 10 minutes at one stream
Resume  the same command goes on with the first unit that is not finished

Words. variant: plain, speculative, or one point of --sweep. level: requests in flight at a time. unit: all prompts
once, of one variant at one level. accept_length: 1 + correct drafts / verify steps, summed over requests first, as
SGLang counts. A request's last step also counts drafts that were right *beyond* the stop token or --max-tokens;
accept_length_in_answer leaves those out: training can predict it.
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
from eagle3.bench_prompts import DATASETS, load_prompts, prompts_of_training  # noqa: E402
from eagle3.endpoints import (Endpoints, contact, drafter_hashes, flush_cache, headers_of,  # noqa: E402
                              probe_difference, read_provenance, sweep_variants)
from eagle3.figures import count, difference_key, level_figures, same_text  # noqa: E402
from eagle3.load import Connection, Power, run_unit  # noqa: E402
from eagle3.measured import Measured  # noqa: E402
from eagle3.plots import draw_plots  # noqa: E402
from eagle3.report import build_report, figures_table, prediction_sentence, report_markdown  # noqa: E402
from eagle3.servers import ServerGone, command_line  # noqa: E402
from eagle3.stage import (UserError, log, open_stage, parse_args, read_json, read_manifest, read_run_file,  # noqa: E402
                          run, write_atomic, write_manifest)

STAGE = "05_benchmark"
DEFAULT_SWEEP = ["1,1,2", "2,1,3", "3,1,4", "4,1,5", "5,1,6", "3,2,6", "3,4,8", "5,4,16"]  # steps,topk,draft tokens
MAY_CHANGE = {"base-url", "baseline-url", "api-key-env", "launch-timeout", "request-timeout", "usd-per-hour", "run-dir",
              "config"}
MAX_PROBES = 200


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", metavar="URL", help="running server with EAGLE3")
    add("--baseline-url", metavar="URL", help="running server without speculation")
    add("--launch", action="store_true",
        help="start the roles `plain` and `speculative` of --config one after the other, and stop them")
    add("--draft-path", type=Path, metavar="DIR",
        help="the drafter that is served (its eagle3.json holds training's prediction)")
    add("--prompts", type=Path, action="append", default=[], metavar="PATH",
        help="JSONL file, folder of them, or responses/; repeatable")
    add("--dataset", action="append", default=[], metavar="NAME[=FILE]", help=f"{', '.join(DATASETS)}; repeatable")
    add("--ids", type=Path, metavar="FILE", help='only these ids: {"ids": [...]} or one a line (val_ids.json)')
    add("--limit", type=int, metavar="N", help="at most N prompts of each source")
    add("--tokenizer", metavar="DIR", help="renders messages; default: the served model's")
    add("--thinking", nargs="+", choices=["on", "off"], default=["on"],
        help="mode of rendered prompts; both: each prompt twice")
    add("--concurrency", nargs="+", type=int, default=[1, 8, 64], metavar="N")
    add("--max-tokens", type=int, default=512, metavar="N")
    add("--fixed-length", action="store_true", help="ignore stop tokens: every answer has --max-tokens")
    add("--temperature", type=float, default=0.0, metavar="F")
    add("--top-p", type=float, default=1.0, metavar="F")
    add("--repeats", type=int, default=1, metavar="N",
        help="measure all N times, the order of the variants turned round each time")
    add("--warmup", type=int, default=4, metavar="N", help="unrecorded requests before each level")
    add("--output-dir", type=Path, default=Path("report"), metavar="DIR")
    add("--sweep", action="store_true", help="with --launch: try --sweep-grid and name the best flags of each level")
    add("--sweep-grid", nargs="+", default=DEFAULT_SWEEP, metavar="STEPS,TOPK,DRAFTS")
    add("--doctor", action="store_true",
        help="compare the served acceptance with training's prediction and look for the cause of a gap")
    add("--run-dir", type=Path, metavar="DIR", help="for --doctor: holds responses/, vocab_mapping/, hidden_states/")
    add("--usd-per-hour", type=float, metavar="F", help="price of the machine, for the cost of a million tokens")
    add("--api-key-env", metavar="VAR", help="environment variable with the servers' API key")
    add("--launch-timeout", type=float, default=3600, metavar="S")
    add("--request-timeout", type=float, default=3600, metavar="S")
    return parser


def check_args(args: argparse.Namespace) -> None:
    if args.launch and (args.base_url or args.baseline_url):
        raise UserError("--launch starts its own servers: leave out --base-url and --baseline-url.")
    if not args.launch and not args.base_url:
        raise UserError("name the running server with --base-url (and --baseline-url), or use --launch with --config.")
    if args.launch and not args.config:
        raise UserError("--launch needs --config: the run file's `servers` say what to start.")
    if args.doctor and not args.draft_path:
        raise UserError("--doctor examines a drafter: name it with --draft-path.")
    if args.sweep and not args.launch:
        raise UserError("--sweep restarts the server with other flags, so it needs --launch.")
    if min(args.concurrency) < 1 or args.max_tokens < 1 or args.repeats < 1 or args.warmup < 0:
        raise UserError("--concurrency, --max-tokens and --repeats must be at least 1, --warmup at least 0.")
    for flag, values in (("concurrency", args.concurrency), ("sweep-grid", args.sweep_grid)):
        if len(set(values)) < len(values):
            raise UserError(f"--{flag}: a value stands twice in {' '.join(map(str, values))}. "
                            "Use --repeats to measure it again.")
    for flag, url in (("base-url", args.base_url), ("baseline-url", args.baseline_url)):
        if url and not url.startswith(("http://", "https://")):
            raise UserError(f"--{flag}: {url!r} is no URL, as in http://127.0.0.1:30000.")


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
    headers: dict[str, str]
    variants: list[str]
    provenance: dict  # the drafter's eagle3.json
    config: dict  # flag: value
    prompts: list[dict] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # hashes
    planned: list[Unit] = field(default_factory=list)
    measured: Measured | None = None
    met: str | None = None  # the variant whose server has been looked at
    unable: dict[str, str] = field(default_factory=dict)  # sweep points that were left out, and why

    @property
    def report_path(self) -> Path:
        return self.args.output_dir / "report.md"


# ---- 1. what to send, and where ----
def choose_tokenizer(bench: Benchmark) -> str:
    """The folder of the tokenizer that renders prompts. Raises UserError."""
    args = bench.args
    if args.tokenizer:
        return args.tokenizer
    if args.launch:
        return bench.endpoints.flag(bench.variants[0], "--model-path")
    return contact(bench.endpoints.use("speculative"), "speculative", bench.headers, args.draft_path,
                   bench.provenance)["model_path"]


def hashes_of(bench: Benchmark) -> dict[str, str]:
    """What may not change between a run and its resumption."""
    def digest(value) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    drafter = drafter_hashes(bench.args.draft_path) if bench.args.draft_path else {}
    return {"prompts": digest(bench.prompts), "prediction": digest(bench.provenance), **drafter}


def plan(bench: Benchmark) -> None:
    """The order of the units. Each repeat turns the variants round, so that a drift of the machine hits both."""
    args, prompts = bench.args, bench.prompts
    bench.planned = [Unit(variant, level, repeat) for repeat in range(args.repeats)
                     for variant in (bench.variants if repeat % 2 == 0 else reversed(bench.variants))
                     for level in args.concurrency]
    log(f"{len(prompts)} prompts | {len(bench.planned)} units: {len(bench.variants)} variants x "
        f"{len(args.concurrency)} levels x {args.repeats} repeats | {len(bench.measured.units)} finished before")
    for level in args.concurrency:
        if len(prompts) < 2 * level:
            log(f"note: {len(prompts)} prompts at {level} streams: the ramp up and down is a large part of that "
                "level's tok/s")


# ---- 2. measure, unit by unit ----
def measure(bench: Benchmark) -> None:
    """All units that are not finished. Raises UserError, ServerGone."""
    finished = {Unit(unit["variant"], unit["level"], unit["repeat"]) for unit in bench.measured.units}
    for unit in bench.planned:
        if unit in finished or unit.variant in bench.unable:
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
            leave_out(bench, unit.variant, error)


def leave_out(bench: Benchmark, variant: str, error: Exception) -> None:
    """Go on without a point of --sweep whose server does not start or dies; raises `error` for any other variant, and
    where no point has been measured yet: then the cause is not the point."""
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
    info = contact(url, variant, bench.headers, bench.args.draft_path, bench.provenance)
    for name, known in servers.items():
        if Path(known["model_path"]).name != Path(info["model_path"]).name:
            raise UserError(f"{bench.endpoints}: serves {info['model_path']}, {name} {known['model_path']}: "
                            "not one target.")
    differs = sorted(key for key in info if servers.get(variant, info)[key] != info[key])
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
    connection = Connection(url, bench.headers, bool(info["incremental_streaming_output"]), args.request_timeout,
                            bench.endpoints)
    power = Power(url)
    if args.warmup:
        short = {**sampling, "max_new_tokens": min(16, args.max_tokens)}
        asyncio.run(run_unit(connection, prompts[:args.warmup], unit.level, short, f"{unit} warm-up"))
    flush_cache(url, bench.headers)
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
    log(f"{unit} finished | {figures['tok_s']:,.1f} tok/s | ttft p50 {figures['ttft_s']['p50'] * 1000:.0f} ms"
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
            near_tie = 1e-3 if measured.servers["plain"]["dtype"] == "float32" else 0.25
            common = answers[difference["id"]]["output_ids"][:difference["position"]]
            context = about[difference["id"]]["prompt_ids"] + common
            measured.add_probe(key, probe_difference(url, bench.headers, context, difference["tokens"], near_tie))


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
    drawn = draw_plots(found, out) if plots else []
    write_atomic(out / "report.json", json.dumps(found, indent=1) + "\n")
    write_atomic(bench.report_path, report_markdown(found, drawn))
    return found


def best_flags(bench: Benchmark, row: dict) -> dict:
    """The fastest variant of a level and the line that starts it."""
    name = max((name for name in row if row[name]["tok_s"]), key=lambda name: row[name]["tok_s"])
    return {"variant": name, "tok_s": row[name]["tok_s"], "command": command_line(*bench.endpoints.command(name))}


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
        config={key: value for key, value in sorted(bench.config.items()) if key not in MAY_CHANGE},
        inputs=bench.inputs,
        counts={"kept": len(bench.prompts), "units": len(bench.measured.units),
                "failed": count(request["error"] for request in requests if "error" in request)},
        versions={"python": sys.version.split()[0], "numpy": np.__version__,
                  "sglang": sorted({info["version"] for info in bench.measured.servers.values()})})


def measure_and_report(bench: Benchmark) -> None:
    args = bench.args
    # 1. what to send, and where
    tokenizer = choose_tokenizer(bench)
    bench.endpoints.check_drafter()
    bench.prompts = load_prompts(args, tokenizer)
    bench.inputs = hashes_of(bench)
    begun_with = {**bench.config, "inputs": bench.inputs, "servers": bench.endpoints.servers if args.launch else None}
    lock = open_stage(args.output_dir, begun_with, MAY_CHANGE)
    log(f"config {json.dumps(bench.config)}")
    log(f"inputs {json.dumps(bench.inputs)}")
    if (args.output_dir / "manifest.json").exists():
        read_manifest(args.output_dir, STAGE)
        log("complete already")
        print(figures_table(read_json(args.output_dir / "report.json")), flush=True)
        log(f"done: {bench.report_path}")
        return
    bench.measured = Measured(args.output_dir / "raw.jsonl")
    plan(bench)
    if args.doctor:  # before any server runs: a faulty folder may keep it from starting
        log_findings(examine_drafter(bench, {}))
    measure(bench)  # 2.
    probe_differences(bench)  # 3.
    bench.endpoints.close()
    say(bench)  # 4.
    finish(bench)
    lock.close()
    log(f"done: {bench.report_path}")


def main(argv: list[str]) -> int | None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `kill` also stops the servers
    args = parse_args(build_parser(), "benchmark", argv)
    check_args(args)
    document = read_run_file(args.config) if args.config else {}
    provenance = read_provenance(args.draft_path, args.doctor)
    args.run_dir = args.run_dir or (Path(document["run_dir"]) if document.get("run_dir") else None)
    if args.doctor and not args.prompts and not args.dataset and args.run_dir:
        prompts_of_training(args)
    variants = {"plain": {}} if args.launch or args.baseline_url else {}
    variants |= sweep_variants(args.sweep_grid) if args.sweep else {"speculative": {}}
    config = json.loads(json.dumps({key.replace("_", "-"): value for key, value in vars(args).items()}, default=str))
    endpoints = Endpoints(args, document, variants)
    try:
        measure_and_report(Benchmark(args, endpoints, headers_of(args), list(variants), provenance, config))
    except ServerGone as error:
        print(f"{STAGE}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        endpoints.close()


if __name__ == "__main__":
    run(main)
