"""05's flags: what they are, which values cannot be, and what this machine must have for them before hours of work."""
from __future__ import annotations

import argparse
import math
import resource
import shutil
from pathlib import Path

from eagle3.bench_prompts import DATASETS
from eagle3.contexts import context_tokens
from eagle3.stage import UserError, log

DEFAULT_SWEEP = ["1,1,2", "2,1,3", "3,1,4", "4,1,5", "5,1,6", "3,2,6", "3,4,8", "5,4,16"]  # steps,topk,draft tokens
REPEATS, REPEATS_OF_SWEEP = 2, 1  # two tell how far runs differ; a sweep first of all ranks its points
BYTES_PER_TOKEN, BYTES_PER_REQUEST, BYTES_PER_ID = 20, 400, 7  # of raw.jsonl
WARM_UP, SHORT = 4, 16  # requests before each unit, and at most so many tokens of their answers
SPARE_FILES = 64  # descriptors besides the streams
MOST_STEPS, MOST_POINTS = 16, 5  # of --break-even
# What may differ between a run and its resumption. Files and folders: `inputs` has the hashes of what was read there
MAY_CHANGE = {"base-url", "baseline-url", "api-key-env", "launch-timeout", "request-timeout", "usd-per-hour", "run-dir",
              "config", "repeats", "trust-remote-code", "draft-path", "prompts", "dataset", "ids", "tokenizer",
              "output-dir", "context-text", "slo-ttft-ms", "slo-itl-ms", "break-even", "steps",
              "accept-points", "adaptive", "check-answers", "run-code"}
# Flags that older folders lack, and the values that change nothing: with those a folder is not bound to the flag
YOUNGER = {"turns": 1, "context": [], "request-rate": []}


def build_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", nargs="+", default=[], metavar="URL",
        help="running server with EAGLE3; of several drafters one each, in their order")
    add("--baseline-url", metavar="URL", help="running server without speculation")
    add("--launch", action="store_true",
        help="start the roles `plain` and `speculative` of --config one after the other, and stop them")
    add("--draft-path", type=Path, nargs="+", default=[], metavar="DIR",
        help="the drafter that is served (its eagle3.json holds training's prediction); several: all in one report, "
             "with their differences to the first")
    add_prompt_flags(add)
    add("--concurrency", nargs="+", type=int, default=[1, 8, 64], metavar="N",
        help="requests in flight, the next one sent when one is answered (default 1 8 64)")
    add("--request-rate", nargs="+", type=float, default=[], metavar="R",
        help="besides, R requests a second that arrive at random (Poisson), however many are in flight; the same "
             "arrivals for every variant")
    add("--slo-ttft-ms", type=float, metavar="F",
        help="goodput: a request counts whose first token comes within F ms ...")
    add("--slo-itl-ms", type=float, metavar="F", help="... and whose later ones take F ms each on average")
    add("--max-tokens", type=int, default=512, metavar="N")
    add("--fixed-length", action="store_true", help="ignore stop tokens: every answer has --max-tokens")
    add("--temperature", type=float, default=0.0, metavar="F")
    add("--top-p", type=float, default=1.0, metavar="F")
    add("--check-answers", action="store_true",
        help='hold answers against the "answer" (a number) or "tests" (Python) of their rows, as of --dataset gsm8k '
             "and humaneval: how often they are right, plain and speculative")
    add("--run-code", action="store_true",
        help="with --check-answers: run the code of answers for their tests, as this user, in processes with limits on "
             "time, memory and files; a model wrote it, so do that in a container")
    add("--repeats", type=int, metavar="N",
        help="measure all N times, the order of the variants turned round each time; one run gives no verdict, as "
             f"two runs of the same differ (default {REPEATS}; of --sweep and --doctor {REPEATS_OF_SWEEP}). May be "
             "raised later")
    add("--warmup", type=int, default=WARM_UP, metavar="N", help="unrecorded requests before each level")
    add("--output-dir", type=Path, default=Path("report"), metavar="DIR")
    add("--sweep", action="store_true", help="with --launch: try --sweep-grid and name the best flags of each level")
    add("--adaptive", action="store_true",
        help="with --sweep: also measure the steps by batch size that it ends in (adaptive.json, for SGLang's "
             "--speculative-adaptive) beside plain decoding and the best fixed setting of each level, twice")
    add("--sweep-grid", nargs="+", default=DEFAULT_SWEEP, metavar="STEPS,TOPK,DRAFTS")
    add("--break-even", action="store_true",
        help="with --launch, before anything is trained: the accept_length from which speculation pays, for each level "
             "and number of --steps, from a random drafter and SGLang's simulated acceptance; into "
             "--output-dir/break_even. With --draft-path also how well that predicts a trained drafter's speed-up")
    add("--steps", nargs="+", type=int, default=[1, 2, 3, 4, 5], metavar="N", help="--break-even: draft steps")
    add("--accept-points", type=int, default=2, metavar="N",
        help="--break-even: accept_lengths simulated for each number of steps, from 1 up; a server start each. With 3 "
             "the report says how straight the line through them is")
    add("--doctor", action="store_true",
        help="compare the served acceptance with training's prediction and look for the cause of a gap")
    add("--run-dir", type=Path, metavar="DIR", help="for --doctor: holds responses/, vocab_mapping/, hidden_states/")
    add("--usd-per-hour", type=float, metavar="F", help="price of the machine, for the cost of a million tokens")
    add("--api-key-env", metavar="VAR", help="environment variable with the servers' API key")
    add("--launch-timeout", type=float, default=3600, metavar="S")
    add("--request-timeout", type=float, default=3600, metavar="S")
    return parser


def add_prompt_flags(add) -> None:
    add("--prompts", type=Path, action="append", default=[], metavar="PATH",
        help="JSONL file, folder of them, or responses/; repeatable")
    add("--dataset", action="append", default=[], metavar="NAME[=FILE]", help=f"{', '.join(DATASETS)}; repeatable")
    add("--ids", type=Path, metavar="FILE", help='only these ids: {"ids": [...]} or one a line (val_ids.json)')
    add("--limit", type=int, metavar="N", help="at most N prompts of each source")
    add("--tokenizer", metavar="DIR", help="renders messages; default: the served model's")
    add("--trust-remote-code", action="store_true",
        help="let the tokenizer's folder run its own Python code (Kimi's needs it where prompts are rendered)")
    add("--thinking", nargs="+", choices=["on", "off"], default=["on"],
        help="mode of rendered prompts; both: each prompt twice")
    add("--turns", type=int, default=1, metavar="N",
        help="ask the first N questions of prompts with `turns` (2: MT-Bench as it is), each behind the server's own "
             "answers to those before")
    add("--context", nargs="+", default=[], metavar="N",
        help="each prompt at each of these lengths in tokens, say 1k 8k 32k, with other prompts' text laid before it")
    add("--context-text", type=Path, nargs="+", default=[], metavar="FILE", help="text files to take that text from")


def check_args(args: argparse.Namespace) -> None:
    """Raises UserError."""
    if args.launch and (args.base_url or args.baseline_url):
        raise UserError("--launch starts its own servers: leave out --base-url and --baseline-url.")
    if not args.launch and not args.base_url:
        raise UserError("name the running server with --base-url (and --baseline-url), or use --launch with --config.")
    if args.launch and not args.config:
        raise UserError("--launch needs --config: the run file's `servers` say what to start.")
    if args.doctor and not args.draft_path:
        raise UserError("--doctor examines a drafter: name it with --draft-path.")
    if args.check_answers and args.break_even:
        raise UserError("--check-answers: with --break-even the drafts are made up, and so are the answers. Leave out "
                        "one of them.")
    if args.run_code and not args.check_answers:
        raise UserError("--run-code is for --check-answers: alone it checks nothing.")
    if args.sweep and not args.launch:
        raise UserError("--sweep restarts the server with other flags, so it needs --launch.")
    if args.adaptive and not args.sweep:
        raise UserError("--adaptive measures what a sweep chose: give --sweep too.")
    if len(args.draft_path) > 1 and (args.sweep or args.doctor):
        raise UserError("--sweep and --doctor take one drafter: name one with --draft-path.")
    if not args.launch and len(args.base_url) != max(1, len(args.draft_path)):
        raise UserError(f"--base-url: {len(args.base_url)} servers for {len(args.draft_path)} drafters. Name a server "
                        "for each --draft-path, in their order.")
    if args.break_even:
        check_break_even(args)
    repeats = 1 if args.repeats is None else args.repeats
    if min(args.concurrency) < 1 or args.max_tokens < 1 or repeats < 1 or args.warmup < 0:
        raise UserError("--concurrency, --max-tokens and --repeats must be at least 1, --warmup at least 0.")
    if args.limit is not None and args.limit < 1:
        raise UserError("--limit must be at least 1.")
    if not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1:
        raise UserError("--temperature must be 0 or more, --top-p above 0 and at most 1.")
    if not min(args.launch_timeout, args.request_timeout) > 0 or args.usd_per_hour is not None and not (
            0 <= args.usd_per_hour < math.inf):
        raise UserError("--launch-timeout and --request-timeout must be above 0, --usd-per-hour 0 or more.")
    check_traffic(args)
    for flag, values in (("concurrency", args.concurrency), ("sweep-grid", args.sweep_grid), ("steps", args.steps),
                         ("thinking", args.thinking), ("request-rate", list(map(rate_name, args.request_rate))),
                         ("context", list(map(context_tokens, args.context)))):
        if len(set(values)) < len(values):
            raise UserError(f"--{flag}: a value stands twice in {' '.join(map(str, values))}. "
                            "Use --repeats to measure it again.")


def check_traffic(args: argparse.Namespace) -> None:
    """Raises UserError."""
    if args.request_rate and not 1e-3 <= min(args.request_rate) <= max(args.request_rate) <= 1e4:
        raise UserError("--request-rate must be 0.001 to 10000 requests a second.")
    for flag, value in (("slo-ttft-ms", args.slo_ttft_ms), ("slo-itl-ms", args.slo_itl_ms)):
        if value is not None and not value > 0:
            raise UserError(f"--{flag} must be above 0 milliseconds.")
    if args.turns < 1:
        raise UserError("--turns must be at least 1.")
    for name in args.context:
        try:
            context_tokens(name)
        except ValueError:
            raise UserError(f"--context: {name!r:.40} is no number of tokens, as in 8192 or 8k.") from None
    if args.context_text and not args.context:
        raise UserError("--context-text is laid before prompts by --context: name lengths there, or leave it out.")


def rate_name(rate: float) -> str:
    """As raw.jsonl and the report have it."""
    return f"{rate:g}/s"


def check_break_even(args: argparse.Namespace) -> None:
    """Raises UserError."""
    if not args.launch:
        raise UserError("--break-even starts a server for each number of --steps, so it needs --launch.")
    if args.request_rate or args.turns > 1:
        raise UserError("--break-even times steps at --concurrency and --context: leave out --request-rate and "
                        "--turns.")
    if args.sweep or args.doctor:
        raise UserError("--break-even is before training, --sweep and --doctor are after it. Leave them out.")
    if min(args.steps) < 1 or max(args.steps) > MOST_STEPS or not 2 <= args.accept_points <= MOST_POINTS:
        raise UserError(f"--steps must be from 1 to {MOST_STEPS}, --accept-points from 2 to {MOST_POINTS}.")


# ---- what has to be here before it begins ----
def check_lengths(prompts: list[dict], max_tokens: int, context_length: int | None, where: str) -> None:
    """That a server takes prompts that were padded, and an answer to each. Raises UserError."""
    longest = max((len(prompt["prompt_ids"]) for prompt in prompts if prompt.get("context")), default=0)
    if longest and context_length and longest + max_tokens > context_length:
        raise UserError(f"{where}: takes contexts of {context_length:,} tokens; --context asks for prompts of "
                        f"{longest:,} and --max-tokens for {max_tokens:,} more. Serve it with a greater "
                        "--context-length, or ask for less.")


def check_descriptors(streams: int) -> None:
    """One a stream; the soft limit is raised as far as that needs. Raises UserError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = streams + SPARE_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(f"--concurrency: {streams} streams need {needed} open files, the limit here is {hard} "
                        "(ulimit -Hn). Raise it"
                        + (f", or use at most {hard - SPARE_FILES} streams." if hard > SPARE_FILES else "."))
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_disk(folder: Path, prompts: list[dict], max_tokens: int) -> None:
    """For the rows of these prompts. Raises UserError where not even short answers would fit."""
    most, free = 0, shutil.disk_usage(folder).free
    for prompt in prompts:
        later = len(prompt.get("turns", ()))
        most += (1 + later) * (BYTES_PER_REQUEST + max_tokens * BYTES_PER_TOKEN)
        most += later * BYTES_PER_ID * (len(prompt["prompt_ids"]) + max_tokens)  # its row holds its context
    if free < most / 20:
        raise UserError(f"{folder}: {free / 1e6:,.1f} MB are free, raw.jsonl takes up to {most / 1e6:,.1f} MB. "
                        "Free some, or name another --output-dir.")
    if free < most:
        log(f"note: {free / 1e6:,.0f} MB are free at {folder}, raw.jsonl takes up to {most / 1e6:,.0f} MB")
