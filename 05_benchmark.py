"""Measure a drafter in SGLang against plain decoding: is it worth serving, with which flags, and if not, why.

    python3 -u 05_benchmark.py --config configs/quickstart.yaml     # starts the run file's two servers, one by one
    python3 -u 05_benchmark.py --base-url http://127.0.0.1:30001 --baseline-url http://127.0.0.1:30000 \\
      --draft-path output/best --prompts responses --ids output/val_ids.json --concurrency 1 8 64 --max-tokens 1024 \\
      --output-dir report

Reads   prompts (JSONL, a folder of it, a responses/ folder, data sets by name), the drafter's folder, and what
        SGLang's /generate answers
Writes  <output-dir>/raw.jsonl (one row a request: ids, times, counts), report.json, report.md, report.html, *.png,
        manifest.json
Time    each prompt once per variant, level and repeat: 100 of 512 tokens at 90 tok/s take 10 minutes at one stream
Resume  the same command goes on with the first unit that is not finished; with more --repeats it measures more

Words. variant: plain, speculative, one point of --sweep, or one of several drafters. level: requests in flight at a
time, or requests that arrive a second (--request-rate). unit: all prompts once (of one length of --context), of one
variant at one level. repeat: all units once, the variants in turned order (plain, speculative, speculative, plain):
two runs of the same differ by more than their prompts tell, so one repeat gives no verdict. A unit in which the server
stood still, as when it compiles kernels for its first batch of a size, is measured again at once.
accept_length: 1 + correct drafts / verify steps, summed over requests first, as SGLang counts. A request's last step
also counts drafts that were right *beyond* the stop token or --max-tokens; accept_length_in_answer leaves those out:
training can predict it.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
from eagle3 import adaptive, bench_flags, binding, break_even, simulated  # noqa: E402
from eagle3.answers import answer_chapter, answer_figures, answer_lines, check_prompts  # noqa: E402
from eagle3.bench_prompts import (check_ids, contexts_of, load_prompts, prompts_of_training,  # noqa: E402
                                  request_ids)
from eagle3.endpoints import Endpoints, contact  # noqa: E402
from eagle3.figures import count, pooled  # noqa: E402
from eagle3.html_report import html_report  # noqa: E402
from eagle3.masking import clean, cleaned, masked  # noqa: E402
from eagle3.measured import Measured  # noqa: E402
from eagle3.measuring import Benchmark, measure, plan, probe_differences, settle  # noqa: E402
from eagle3.plots import draw_plots, no_plots  # noqa: E402
from eagle3.report import build_report, figures_table, prediction_sentence, report_markdown  # noqa: E402
from eagle3.sampled_serving import check_rejection_sampling  # noqa: E402
from eagle3.servers import ServerGone, command_line  # noqa: E402
from eagle3.stage import (duration, log, open_stage, parse_args, read_json, read_manifest, read_run_file,  # noqa: E402
                          run, write_atomic, write_manifest)
from eagle3.text_chart import text_charts  # noqa: E402
from eagle3.traffic import add_traffic  # noqa: E402
from eagle3.traffic_report import rate_verdict, traffic_chapters, traffic_tables  # noqa: E402
from eagle3.turns import Conversation  # noqa: E402
from eagle3.variants import (DraftFolder, drafter_hashes, drafter_variants, flags_of_drafters,  # noqa: E402
                             sweep_variants)

STAGE = "05_benchmark"
RESTATED = ("slo-ttft-ms", "slo-itl-ms", "usd-per-hour", "check-answers", "run-code")  # of the report alone
UNTOLD = {"base-url", "baseline-url", "api-key-env", "launch-timeout", "request-timeout", "usd-per-hour", "run-dir",
          "config", "trust-remote-code"}  # of the manifest


def build_parser() -> argparse.ArgumentParser:
    return bench_flags.build_parser(__doc__)


# ---- 1. what to send, and where ----
def chosen(args: argparse.Namespace, document: dict) -> tuple[dict[str, DraftFolder], dict[str, dict]]:
    """({name: drafter}, {variant: the flags that its server has besides}). document: the run file. Raises UserError."""
    variants = {"plain": {}} if args.launch or args.baseline_url else {}
    if args.break_even:
        drafters = simulated.set_up(args, document)
        return drafters, variants | simulated.variants(args, drafters)
    drafters = drafter_variants(args.draft_path, args.doctor)
    return drafters, variants | (sweep_variants(args.sweep_grid) if args.sweep else flags_of_drafters(drafters))


def choose_tokenizer(bench: Benchmark) -> str:
    """The folder of the tokenizer that renders prompts. Raises UserError."""
    args, endpoints = bench.args, bench.endpoints
    if args.tokenizer:
        return args.tokenizer
    if args.launch:
        return endpoints.flag(bench.variants[0], "--model-path")
    variant = bench.variants[-1]
    url = endpoints.use(variant)
    return contact(url, variant, endpoints.headers, bench.drafter(variant))["model_path"]


def hashes_of(bench: Benchmark) -> dict[str, str]:
    """What may not change between a run and its resumption."""
    def digest(value) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    found = {"prompts": digest([{key: prompt[key] for key in prompt if key not in ("check", "question")}
                                for prompt in bench.prompts])}
    drafters = simulated.bound(bench.drafters) if bench.args.break_even else bench.drafters
    for variant, drafter in (drafters or {"": bench.drafter("")}).items():
        hashes = {"prediction": digest(drafter.about), **(drafter_hashes(drafter.folder) if drafter.folder else {})}
        found |= hashes if len(drafters) < 2 else {f"{variant}/{name}": value for name, value in hashes.items()}
    return found


def prepare(bench: Benchmark) -> None:
    """What has to be here, before hours of measuring; and what to expect. Raises UserError."""
    args, prompts, units = bench.args, bench.prompts, len(bench.planned)
    todo = bench.unfinished()
    contexts = contexts_of(prompts)
    log(f"{len(prompts)} prompts | {units} units: {len(bench.variants)} variants x "
        f"{len(args.concurrency) + len(args.request_rate)} levels x {len(contexts)} contexts x {bench.repeats} repeats "
        f"| {units - len(todo)} finished before")
    most = max(len(bench.prompts_at(context)) for context in contexts)
    for level in args.concurrency:
        if most < 2 * level:
            log(f"note: {most} prompts at {level} streams: the ramp up and down is a large part of that "
                "level's tok/s")
    for rate in args.request_rate:
        log(f"{bench_flags.rate_name(rate)}: {most} prompts arrive over {duration(most / rate)}, once per variant and "
            "repeat")
    if bench.repeats == 1 and "plain" in bench.variants and not args.break_even:
        log("note: measured once, nothing tells how far two runs of the same differ: no verdict. --repeats 2 gives one")
    bench_flags.check_descriptors(most if args.request_rate else min(max(args.concurrency), most))
    bench_flags.check_disk(args.output_dir, [prompt for unit in todo for prompt in bench.prompts_at(unit.context)],
                           args.max_tokens)
    if why := no_plots():
        log(f"note: no plots will be drawn ({why}). Install matplotlib meanwhile, or do without")
    bench.endpoints.check_logs()


# ---- 2. say it ----
def write_report(bench: Benchmark, plots: bool) -> dict:
    """report.json, report.md and report.html of what has been measured so far."""
    args, out = bench.args, bench.args.output_dir
    predictions = {variant: bench.drafter(variant).prediction for variant in bench.variants}
    found = build_report(bench.measured, bench.prompts, predictions, bench.config)
    add_traffic(found, bench.measured, bench.prompts, list(bench.drafters), with_groups=plots)
    found |= {"units_planned": len(bench.planned), "units_done": len(bench.measured.units)}
    if args.sweep:
        found["left_out"] = bench.unable
        found["sweep"] = {level: best_flags(bench, row) for level, row in found["levels"].items()}
        found["adaptive"] = adaptive_of(bench)
    if args.doctor:
        found["doctor"] = examine_drafter(bench, found["variants"])
    if args.check_answers and plots:  # at the end: code of answers may take long
        found["answers"] = answer_figures(bench.measured, bench.prompts, bench.tokenizer, args)
    if args.break_even:
        earlier = out.parent / "report.json"  # of a drafter that was measured there
        break_even.added(found, bench.measured.units, predictions,
                         {str(earlier): read_json(earlier)} if earlier.is_file() else {})
    drawn, found["not_drawn"] = draw_plots(found, out) if plots else ([], {})
    write_atomic(out / "report.json", json.dumps(cleaned(found), indent=1) + "\n")
    chapters = break_even.chapters(found) if args.break_even else [
        *(adaptive.chapter(found["adaptive"]) if found.get("adaptive") else ()), *traffic_chapters(found),
        *answer_chapter(found)]
    text = break_even.markdown(found, drawn) if args.break_even else report_markdown(found, drawn, chapters)
    write_atomic(bench.report_path, clean(text))
    write_atomic(out / "report.html", html_report(found, chapters))
    return found


def table_of(found: dict) -> str:
    """The report's first table."""
    return break_even.table(found) if found.get("break_even") else figures_table(found)


def adaptive_of(bench: Benchmark) -> dict | None:
    """What a finished sweep settled, and how it did; None before that."""
    if not bench.settled:
        return None
    line = None if bench.settled.none else command_line(*bench.endpoints.command(adaptive.VARIANT))
    return bench.settled.found(pooled(bench.measured.units, contexts_of(bench.prompts)), line)


def best_flags(bench: Benchmark, row: dict) -> dict | None:
    """The fastest variant of a level and the line that starts it; None where no token came back."""
    started = [name for name in row if row[name]["tok_s"] and name in bench.endpoints.variants]
    name = max(started, key=lambda name: row[name]["tok_s"], default=None)
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
    drafter = bench.drafter(variant)
    facts = Facts(drafter.folder, drafter.about, server, bench.args.run_dir, bench.prompts)
    return diagnose(facts, about.get("accept"), about.get("prediction"))


def log_findings(diagnosis: dict) -> None:
    for finding in diagnosis["findings"]:
        log(f"doctor: {finding['cause']}: {finding['finding']} {finding['remedy']}")


def say(bench: Benchmark) -> None:
    """The report, and its short form in the log. Raises ServerGone where points of a sweep are missing."""
    found = write_report(bench, plots=True)
    for name, why in found["not_drawn"].items():
        log(f"note: {name} is not drawn: {why}")
    print(table_of(found), flush=True)
    for head, table in traffic_tables(found, with_groups=False):
        print(f"{head}\n{table}", flush=True)
    print(text_charts(found, sys.stdout), flush=True)
    for said in break_even.remarks(found) if found.get("break_even") else ():
        log(said)
    for variant, served in found["variants"].items():
        if served["prediction"]:
            log(f"{variant}: {prediction_sentence(served['prediction'])}")
        if served["sampling_note"]:
            log(f"{variant}: {served['sampling_note']}")
    for level, said in found["verdict"].items():
        log(f"verdict at {level} stream(s): {said}")
    if rows := (found.get("adaptive") or {}).get("rows"):
        for row in rows:
            log(f"adaptive at {row['level']} stream(s): {adaptive.said_of(row)}")
        log(adaptive.summary(rows))
    for rate, row in found["rates"].items():
        log(f"verdict at {rate}: {rate_verdict(row)}")
    for sentence in answer_lines(found):
        log(sentence)
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
    bench.tokenizer = tokenizer = choose_tokenizer(bench)
    bench.endpoints.check_drafter(bench.drafters)
    for variant in bench.variants if args.launch else ():
        named = [bench.endpoints.flag(variant, f"--{name}") for name in ("model-path", "speculative-draft-model-path")]
        check_rejection_sampling(bench.endpoints.command(variant)[0], *named)
    bench.prompts = load_prompts(args, tokenizer)
    if args.break_even:
        bench.prompts = simulated.some(bench.prompts, max(args.concurrency), args.max_tokens)
    check_ids(bench.prompts, [*args.draft_path, tokenizer])
    if args.check_answers:
        check_prompts(bench.prompts, args.run_code)
    if any("turns" in prompt for prompt in bench.prompts):
        bench.next_turn = Conversation(tokenizer, args.trust_remote_code).next_turn
    bench.inputs = hashes_of(bench)
    begun_with = binding.bound(bench.config, bench.inputs, bench.endpoints.servers if args.launch else None)
    with open_stage(out, begun_with, bench_flags.MAY_CHANGE, lambda old: binding.renewed(old, out)):
        fill(bench)


def fill(bench: Benchmark) -> None:
    """The report's folder, which is locked for this process. Raises UserError, ServerGone, OSError."""
    args, out = bench.args, bench.args.output_dir
    complete = (out / "manifest.json").exists() and bool(read_manifest(out, STAGE))
    bench.measured = Measured(out / "raw.jsonl", {
        context: [name for prompt in bench.prompts_at(context) for name in request_ids(prompt)]
        for context in contexts_of(bench.prompts)}, bench.most_at)
    plan(bench, complete)
    settle(bench)
    log(f"config {json.dumps(bench.config)}")
    log(f"inputs {json.dumps(bench.inputs)}")
    if complete and not bench.unfinished() and not bench.unmet():
        log("complete already")
        before = read_json(out / "report.json")
        if any(before["config"].get(flag) != bench.config[flag] for flag in RESTATED):
            say(bench)  # of the same measurements
        else:
            print(table_of(before), flush=True)
        log(f"done: {bench.report_path}")
        return
    (out / "manifest.json").unlink(missing_ok=True)  # there is more to do
    prepare(bench)
    if args.doctor:  # before any server runs: a faulty folder may keep it from starting
        log_findings(examine_drafter(bench, {}))
    measure(bench, lambda begun: write_report(begun, plots=False))  # a killed run says what it has
    settle(bench)
    measure(bench, lambda begun: write_report(begun, plots=False))
    if not args.break_even:
        probe_differences(bench)
    bench.endpoints.close()
    say(bench)
    finish(bench)
    log(f"done: {bench.report_path}")


def main(argv: list[str]) -> int | None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `kill` also stops the servers
    args = parse_args(build_parser(), "benchmark", argv)
    bench_flags.check_args(args)
    document = read_run_file(args.config) if args.config else {}
    args.run_dir = args.run_dir or (Path(document["run_dir"]) if document.get("run_dir") else None)
    if args.doctor and not args.prompts and not args.dataset and args.run_dir:
        prompts_of_training(args)
    drafters, variants = chosen(args, document)
    # takes the logins out of the URLs
    endpoints = Endpoints(args, document, variants, simulated.environments(list(variants)))
    config = json.loads(json.dumps({key.replace("_", "-"): value for key, value in vars(args).items()}, default=str))
    try:
        measure_and_report(Benchmark(args, endpoints, list(variants), drafters, masked(config)))
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
