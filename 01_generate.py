"""Stage 01: ask the target for answers and write them down with the exact token ids, each answer paid for once.

Reads   prompts: JSONL rows {"id", "messages"} or {"id", "prompt"} (also "tools", "system"), or data sets through
        `datasets`.
Writes  <output-dir>/part-*.jsonl (one row per assistant turn, schema in configs/artifacts.json), dropped.jsonl (id,
        reason), report.json (lengths, finish reasons, cost), manifest.json (last: the folder is complete).
Needs   the target's tokenizer folder and a server: SGLang, or any OpenAI-compatible API.

    python3 -u 01_generate.py --prompts prompts.jsonl --base-url http://127.0.0.1:30000 --model kimi-k2.5 \\
      --tokenizer /shared/kimi-k2.5-int4 --trust-remote-code --output-dir /data/eagle3/run/responses --concurrency 64

Time and size: the server sets the pace (this client does over 200 answers/s on one core); about 10 bytes a token.

Token ids. One rule for every SGLang from 0.5.10 to 0.5.23: the prompt is rendered here with the target's own template
and sent as `input_ids` to the native /generate, whose `output_ids` are what the sampler emitted, the stop token
included (ids_source "server"). The chat route returns ids only in later versions, and cuts them through parsers that
depend on server flags.
A text API gives no ids: they are rebuilt from its text (ids_source "rebuilt"), compared with usage.completion_tokens,
and
  - equal: kept; short by just the stop token, which some APIs do not count: kept, flagged "stop_not_counted";
  - usage larger by more than max(4, 2 %): the text lacks tokens the model emitted (hidden reasoning): dropped,
    "ids_missing";
  - any other difference: kept, flagged "ids_mismatch". `--on-mismatch keep|drop` does one thing with every difference.
Marks that stand in the text (`reasoning</think>answer`, a tool section, the stop token) become the answer's structure
where only one reading is possible; any other such answer is dropped. When thinking is on and none of the first 200
answers holds reasoning, the run stops.

Every row is accounted for: rows read = kept + dropped + set aside, by source, at the end and in report.json.

Exactly once. A row is written and fsynced before its worker asks for the next answer, so a kill -9 loses at most
`--concurrency` answers that were in flight or not yet on disk; whatever is on disk is never asked for again.
"""
import argparse
import array
import asyncio
import contextlib
import importlib.metadata
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
from eagle3.account import Account, over_half  # noqa: E402
from eagle3.api import discover  # noqa: E402
from eagle3.asking import Session, room_needed  # noqa: E402
from eagle3.growth import finish_grown, noted, set_back  # noqa: E402
from eagle3.masking import clean, masked  # noqa: E402
from eagle3.network import ensure_open_files, read_key  # noqa: E402
from eagle3.responses import drop_row, part_files  # noqa: E402
from eagle3.prompt_sources import Source, open_sources  # noqa: E402
from eagle3.prompts import rows_before, with_prompts_of  # noqa: E402
from eagle3.stage import UserError, log, open_stage, parse_args, read_manifest, run, write_atomic  # noqa: E402
from eagle3.store import (DISK_ERRORS, OFFSET_BITS, Store, cannot_write, check_room, holds_nothing,  # noqa: E402
                          how_reasoned, mended_rows, sort_rows, write_dropped)
from eagle3.tokens import Tokens, load_tokenizer, tokenizer_hash  # noqa: E402
from eagle3.turn_tokens import find_turn_tokens  # noqa: E402

STAGE = "01_generate"
MAY_CHANGE = {  # flags that may differ when a run is resumed
    "base_url", "concurrency", "api_key_env", "log_interval", "config", "output_dir", "prompts", "dataset", "tokenizer",
    "limit", "max_cost_usd", "max_tokens_total", "usd_per_mtok", "timeout_s", "outage_s", "max_attempts", "backoff_s",
    "max_failed_share", "trust_remote_code", "check_template"}
FINITE = ("temperature", "top_p", "max_cost_usd", "timeout_s", "outage_s", "backoff_s", "max_failed_share",
          "log_interval")


def json_object(text: str) -> dict:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # what JSON has no word for cannot be sent
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    if taken := value.keys() & {"max_tokens", "max_completion_tokens", "max_new_tokens", "n", "stream"}:
        raise argparse.ArgumentTypeError(f"{sorted(taken)} would break the budgets or the reading of answers")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", action="append", default=[], metavar="FILE.jsonl[,key=value]",
        help="prompt rows; may be repeated, and grow behind their end later; keys as for --dataset")
    add("--dataset", action="append", default=[], metavar="NAME[,key=value]",
        help="folder, file or hub name for `datasets`; may be repeated. Keys: split (train), config, revision, weight "
             "(default: its rows), and the columns id (none: by number), messages, prompt, input (behind it), system, "
             "tools")
    add("--shuffle", action=argparse.BooleanOptionalAction, default=False, help="shuffle each source by --seed")
    add("--dedup", action=argparse.BooleanOptionalAction, default=True,
        help="drop prompts equal to an earlier one but for case, width, space")
    add("--system", metavar="TEXT", help="system prompt for rows without one")
    add("--limit", type=int, metavar="N", help="take the first N prompts of the mix; may grow later")
    add_servers(add)
    add("--tokenizer", required=True, type=Path, metavar="DIR", help="the target's folder")
    add("--trust-remote-code", action="store_true",
        help="run the tokenizer code that lies in that folder (Kimi-K2.5 needs it)")
    add("--output-dir", required=True, type=Path)
    add("--concurrency", type=int, default=64, metavar="N")
    add("--max-tokens", type=int, default=4096, metavar="N", help="most tokens of one answer")
    add("--temperature", type=float, default=1.0, metavar="F")
    add("--top-p", type=float, default=0.95, metavar="F")
    add("--seed", type=int, default=0, metavar="N",
        help="order of the mix, and a sampling seed per row for servers that take one")
    add("--thinking", choices=["on", "off"], default="on")
    add("--answers", choices=["generate", "given"], default="generate",
        help="given: ask nobody, take the assistant turns of the prompt rows")
    add("--on-mismatch", choices=["rule", "keep", "drop"], default="rule",
        help="rebuilt ids that differ from usage; see above")
    add("--stop-token", metavar="NAME", help="ends a turn (default: what the template puts behind an answer)")
    add("--think-tokens", nargs="*", metavar="NAME",
        help="begin and end of reasoning; nothing: the target has none (default: the pair that the template names)")
    add("--tool-tokens", nargs="*", metavar="NAME",
        help="five marks, or nothing (default: Kimi's where the template names them, else nothing)")
    add_bounds(add)
    return parser


def add_servers(add) -> None:
    add("--base-url", action="append", default=[], metavar="URL",
        help="server; may be repeated: the least busy healthy one is asked")
    add("--api", choices=["auto", "sglang", "openai", "moonshot", "openrouter"], default="auto",
        help="auto: by host, then by SGLang's /server_info")
    add("--model", metavar="NAME", help="model name to ask for; with SGLang it must be the served name")
    add("--api-key-env", metavar="VAR", help="environment variable that holds the key")
    add("--provider", action="append", default=[], metavar="NAME",
        help="openrouter: only these providers, in this order")
    add("--extra-body", type=json_object, default={}, metavar="JSON",
        help="fields for the request body (sglang: for sampling_params)")


def add_bounds(add) -> None:
    """Of cost, time and failures."""
    add("--max-cost-usd", type=float, metavar="F",
        help="stop before this is passed, earlier sessions and requests in flight included")
    add("--max-tokens-total", type=int, metavar="N", help="the same for prompt + answer tokens")
    add("--usd-per-mtok", nargs=2, type=float, metavar=("IN", "OUT"),
        help="prices, for an API whose usage holds no cost")
    add("--timeout-s", type=float, default=1800, help="for one answer")
    add("--outage-s", type=float, default=600, help="stop when nothing has succeeded for so long")
    add("--max-attempts", type=int, default=6,
        help="failures of one sample before it is set aside (busy servers do not count)")
    add("--backoff-s", type=float, default=1.0,
        help="first pause after a failure; doubles up to 60 s, with jitter; Retry-After wins")
    add("--max-failed-share", type=float, default=0.01,
        help="samples set aside: up to this share is dropped, more ends the run with exit 1")
    add("--check-template", action=argparse.BooleanOptionalAction, default=True,
        help="sglang: compare the ids of each kind of prompt with its chat route")
    add("--log-interval", type=float, default=5.0, metavar="S")


def main(argv: list[str]) -> int:
    args = parse_args(build_parser(), "generate", argv)
    check_values(args)
    key = read_key(args.api_key_env)

    # 1. what to ask, and whether this folder was begun with the same wish
    sources = open_sources(args.prompts, args.dataset)
    if not sources:
        raise UserError("nothing to ask: name --prompts or --dataset.")
    begun = noted(args.output_dir)
    name_turn_tokens(args, begun)
    inputs, before = {"tokenizer": tokenizer_hash(args.tokenizer)}, begun.get("inputs") or {}
    for number, source in enumerate(sources):
        name = f"{number}:{source.name}"
        inputs[name] = source.digest if before.get(name) in (None,
                                                             source.digest) else source.older_digest or source.digest
    earlier = rows_before(sources, begun, inputs, args)
    config = {name: value for name, value in vars(args).items() if name not in MAY_CHANGE} | {
        "columns": [source.options for source in sources], "inputs": inputs} | ({"grown": earlier} if earlier else {})
    log("config "
        + json.dumps({**vars(args), "base_url": masked(args.base_url), "inputs": inputs}, default=str))
    with open_stage(args.output_dir, config, set(), lambda old: with_prompts_of(config, old, begun, args.output_dir)):
        code = 0 if complete_already(args, inputs) else work_in(args, key, sources, config)
    if not code:
        log(f"done: {args.output_dir}")
    return code


def work_in(args, key: str | None, sources: list[Source], config: dict) -> int:
    """Everything in the locked folder; the exit code. Raises UserError."""
    try:
        check_room(args.output_dir, room_needed(args))
        ensure_open_files(args.concurrency, len(args.base_url) if args.answers == "generate" else 0)
        return answer_all(args, key, Store(args.output_dir, args.usd_per_mtok), sources, config)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return fail(cannot_write(args.output_dir, error), 1)
    finally:
        if not (args.output_dir / "manifest.json").exists() and holds_nothing(args.output_dir):
            with contextlib.suppress(OSError):
                (args.output_dir / "stage.json").unlink()  # so another config may begin here


def name_turn_tokens(args, begun: dict) -> None:
    """--stop-token, --think-tokens and --tool-tokens where flags leave them open: as `begun`, else the target's own."""
    names = ("stop_token", "think_tokens", "tool_tokens")
    given = [begun.get(name) if getattr(args, name) is None else getattr(args, name) for name in names]
    if None in given or given != [begun.get(name) for name in names]:
        tokenizer = load_tokenizer(args.tokenizer, args.trust_remote_code)
        found = find_turn_tokens(tokenizer, args.tokenizer, *given)
        log(f"turn tokens: {found}")
        given = [found.stop, found.think, found.tool]
    args.stop_token, args.think_tokens, args.tool_tokens = given


def check_values(args) -> None:
    for name in ("concurrency", "max_tokens", "max_attempts", "limit", "max_tokens_total"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1.")
    for name in ("max_cost_usd", "timeout_s", "outage_s", "backoff_s", "log_interval"):
        if (value := getattr(args, name)) is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0.")
    if args.concurrency > 100_000:
        raise UserError(f"--concurrency {args.concurrency}: must be at most 100,000.")
    for name in FINITE:
        if (value := getattr(args, name)) is not None and not 0 <= value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {value}: must be a number that is not negative.")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p {args.top_p}: must lie above 0 and be at most 1.")
    if args.usd_per_mtok and not all(0 <= price < float("inf") for price in args.usd_per_mtok):
        raise UserError(f"--usd-per-mtok {args.usd_per_mtok}: prices must not be negative.")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: must not be negative.")
    if not args.tokenizer.is_dir():
        raise UserError(f"{args.tokenizer}: no such folder. Name the target's folder with --tokenizer.")


def complete_already(args, inputs: dict) -> bool:
    """Finished with these prompts, with this --limit and no budget in its way."""
    if not (args.output_dir / "manifest.json").exists():
        return False
    manifest = read_manifest(args.output_dir, STAGE)
    complete = (manifest.get("stopped", "") is None and manifest.get("limit", "") == args.limit
                and manifest.get("inputs") == inputs)
    if complete:
        log(f"complete already: {manifest['counts']}")
    return complete


def answer_all(args, key: str | None, store: Store, sources: list[Source], config: dict) -> int:
    """Ask whatever is not on the disk and finish the folder; the exit code. Raises UserError."""
    # 2. the servers and the target's tokens
    service = asyncio.run(discover(args, key))
    args.model = service.model
    if other := store.kinds - {("server", args.model) if service.api == "sglang" else ("rebuilt", None)}:
        raise UserError(f"{args.output_dir}: holds rows with (ids_source, model) {sorted(other, key=str)}, "
                        f"api {service.api} with model {args.model} gives others. Use another folder.")
    tokenizer = load_tokenizer(args.tokenizer, args.trust_remote_code)
    tokens = Tokens(tokenizer, args.stop_token, args.think_tokens, args.tool_tokens, args.thinking == "on")
    versions = {"python": sys.version.split()[0], "sglang": service.version} | {
        name: importlib.metadata.version(name) for name in ("openai", "transformers")}
    log(f"versions {versions} | api {service.api} | model {args.model} | "
        f"{len(store.done)} rows here already, {len(store.dropped)} dropped")

    # 3. ask
    if (args.output_dir / "manifest.json").exists():  # of fewer prompts, a smaller --limit or budget: it goes on
        set_back(args.output_dir, STAGE)
    session = Session(args, key, service, tokens, store, sources, config.get("grown", []))
    asyncio.run(session.work())
    halt = session.halt or session.too_many_failed()
    if not isinstance(halt, UserError) and not (halt and halt.code):
        try:
            finish_folder(args, session, {"config": config, "inputs": config["inputs"], "versions": versions,
                                          "limit": args.limit, "stopped": str(halt).split()[0] if halt else None})
            return 0
        except (UserError, OSError):
            say_where_it_stands(args.output_dir, session)
            raise
    say_where_it_stands(args.output_dir, session)
    if isinstance(halt, UserError):
        raise halt
    return fail(str(halt), halt.code)


def say_where_it_stands(folder: Path, session: Session) -> None:
    """What became of the rows, and why the dropped ones were dropped, of a run that does not finish its folder."""
    for line in session.account.lines():
        log(line)
    if not (folder / "manifest.json").exists():
        with contextlib.suppress(OSError):
            write_dropped(folder, session.store.dropped, session.unpaid)


def finish_folder(args, session: Session, about: dict) -> None:
    """The finished folder and what the user is told of it. about: what the manifest says of this run."""
    if session.halt:
        log(f"stopped: {session.halt}. The folder is finished with what is there; a larger budget goes on from it.")
    spent = session.budget.spent()
    cost = {"usd": round(spent.usd, 6), "tokens": int(spent.tokens),
            "tokens of failed requests, at most": int(session.budget.lost.tokens)}
    thinks = session.tokens.must_reason()
    finish(args.output_dir, session.store.dropped | session.unpaid, about, cost, session.account,
           session.store.unmarked() if thinks else None)


def fail(why: str, code: int) -> int:
    print(f"{STAGE}: {clean(why)}", file=sys.stderr, flush=True)
    return code


def finish(folder: Path, dropped: dict[str, dict], about: dict, cost: dict, account: Account | None = None,
           unmarked: set[str] | None = None) -> None:
    """Sort the rows by id, so that the order of completion leaves no trace; then dropped.jsonl, report, manifest.

    unmarked: providers whose rows hold reasoning only where its marks stood in the text, so that a row without any has
    lost its marks; None: the target does not think.
    """
    ids, locations, prompt_lens, response_lens = [], array.array("q"), array.array("i"), array.array("i")
    seen, bare, lost = {name: Counter() for name in ("finish_reasons", "flags", "sources", "ids_source")}, 0, set()
    for number, path in enumerate(part_files(folder)):
        for offset, row in mended_rows(path):
            if why := lost_marks(row, unmarked, lost):
                dropped[row["id"]] = drop_row(row["id"], *why, row["usage"])
                if account:
                    account.unkeep(row["source"], row["id"])
                continue
            ids.append(row["id"])
            locations.append(number << OFFSET_BITS | offset)
            prompt_lens.append(len(row["prompt_ids"]))
            response_lens.append(len(row["response_ids"]))
            bare += unmarked is not None and not row["reasoning"]
            seen["finish_reasons"][row["finish_reason"]] += 1
            seen["flags"].update(row["flags"])
            seen["sources"][row["source"]] += 1
            seen["ids_source"][row["ids_source"]] += 1
    reasons = Counter(row["reason"] for row in dropped.values())
    if not ids:
        raise UserError(f"{folder}: not one answer was kept; dropped: {dict(reasons)}{in_words(dropped)}.")
    assert len(set(ids)) == len(ids), "an id was written twice"
    write_dropped(folder, dropped)  # before the rows that are left out are gone
    files = sort_rows(folder, [locations[i] for i in sorted(range(len(ids)), key=ids.__getitem__)])
    lengths = {name: {f"p{q}": int(np.percentile(values, q)) for q in (1, 10, 50, 90, 99, 100)}
               | {"mean": round(float(np.mean(values)), 1)}
               for name, values in (("prompt", prompt_lens), ("response", response_lens)) if values}
    counts = {"kept": len(ids), "dropped": dict(sorted(reasons.items()))}
    report = {name: dict(sorted(counter.items())) for name, counter in seen.items()} | {
        "tokens": {"prompt": sum(prompt_lens), "response": sum(response_lens)}, "lengths": lengths}
    balance = {"by_source": account.report(), "without_reasoning": bare} if account else {}
    write_atomic(folder / "report.json",
                 json.dumps({"counts": counts, **report, "cost": cost, **balance}, indent=1) + "\n")
    finish_grown(folder, STAGE, **about, counts=counts, **report, files=files)
    say_what_was_kept(counts, report, cost)
    for line in [*(account.lines() if account else ()), *over_half(counts["dropped"], report["flags"], len(ids), bare)]:
        log(line)
    more = len(ids) - account.turns["kept"].total() if account and not about["stopped"] else 0
    if more:
        log(f"WARNING: {more:,} rows of an earlier, higher --limit are here besides: later stages take them. For fewer "
            "rows use another folder")


def lost_marks(row: dict, unmarked: set[str] | None, lost: set[str]) -> tuple[str, str] | None:
    """(reason, detail) where a row is to be left out: its server leaves marks of reasoning in the text; else None.

    Here none stood, so nobody can tell reasoning from answer; or the row followed on such a one. lost: prompts of
    such rows so far.
    """
    if not unmarked:
        return None
    prompt = row["id"].rpartition("-t")[0]
    if prompt in lost:
        return "after_dropped_turn", ""
    if row["provider"] in unmarked and how_reasoned(row) == "bare":
        lost.add(prompt)
        return "think_marks", "other answers of this server hold marks of reasoning in their text, this one none"
    return None


def in_words(dropped: dict[str, dict]) -> str:
    """What was said about the first few drops: the user must not have to look for it."""
    words = dict.fromkeys(f"{row['reason']}: {row['detail']}" for row in dropped.values() if row["detail"])
    return "".join(f"; {word}" for word in list(words)[:3])


def say_what_was_kept(counts: dict, report: dict, cost: dict) -> None:
    log(f"kept {counts['kept']:,} | dropped {sum(counts['dropped'].values()):,} {counts['dropped']} "
        f"| finish {report['finish_reasons']} | flags {report['flags']}")
    for name, values in report["lengths"].items():
        log(f"{name} tokens: " + " | ".join(f"{key} {value:,}" for key, value in values.items()))
    log("cost: " + " | ".join(f"{key} {value}" for key, value in cost.items()))
    if n := report["ids_source"].get("server"):
        same = n - report["flags"].get("rebuild_differs", 0)
        log(f"ids rebuilt from text would equal the engine's in {same:,} of {n:,} rows ({100 * same / n:.2f} %)")


if __name__ == "__main__":
    run(main)
