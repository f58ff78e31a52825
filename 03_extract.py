"""Have the target, served by a patched SGLang, compute the hidden states of every response; keep them as safetensors.

    python3 -u 03_extract.py --data-dir responses/ --base-url http://127.0.0.1:30000 --output-dir hidden_states/ \\
      --concurrency 32 --max-length 4096 --verify --verifier-path /shared/kimi-k2.5-int4 > extract.log 2>&1 &

The server: patches/sglang_patch.py apply, then start it with EAGLE3_CAPTURE_DIR=<output-dir>/.incoming,
EAGLE3_CAPTURE_LAYERS=3,31,59 and --disable-radix-cache. It sees this machine's output folder (one machine, or a shared
file system), or scripts/offer_states.py beside it hands out its own (--states-url). It writes each sample whole; this
script sends token ids, checks what arrives and renames it into place.

More data than disk: with --max-disk-gb the samples present never take more than that; when they do, 03 waits until a
`04_train.py --follow` beside it has trained on some and released them (released.jsonl). What was released counts as
extracted and is not asked for again.

Reads   responses/ (part-*.jsonl, manifest.json); with --verify, lm_head and the final norm of --verifier-path
Writes  <output-dir>/<2 hex>/<id>.safetensors, plan.jsonl (all samples in the order of one pass), landed.jsonl,
        quarantine.jsonl, index.jsonl, verify.json, manifest.json (last)
Size    (capture layers + 1) * hidden_size * bytes per element + 5 bytes a token: 57,349 for Kimi-K2.5 and 3 layers,
        5.0 TB for 87.8M tokens; with --states fp8 28,693 and 2.5 TB.
        Time: the prefill's.
Stop it any way, at any time; the same command goes on. Exit 2 with one line for what you can mend (server away, ...).
"""
import argparse
import json
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
from eagle3.again import Again  # noqa: E402
from eagle3.bounded import write_bound  # noqa: E402
from eagle3.extraction import FULL, Extraction  # noqa: E402
from eagle3.growth import grown_from  # noqa: E402
from eagle3.incoming import clean_incoming, free_bytes, settle  # noqa: E402
from eagle3.journal import Journal  # noqa: E402
from eagle3.limits import Limits, leave_out_too_long, read_limits  # noqa: E402
from eagle3.prefill_server import wait_until_ready  # noqa: E402
from eagle3.reopening import CLOSED, STAGE, is_complete, open_folder  # noqa: E402
from eagle3.restart import Rows  # noqa: E402
from eagle3.samples import Sample, read_ids  # noqa: E402
from eagle3.stage import (UserError, bar, duration, log, parse_args, read_manifest, run, sha256_file,  # noqa: E402
                          write_manifest)
from eagle3.states import KINDS, facts_token_bytes, token_bytes  # noqa: E402
from eagle3.target import Target, text_config  # noqa: E402
from eagle3.verify import complete_rows, read_report, redo_failed, verify  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, help="responses/ of 01_generate (needed)")
    add("--output-dir", type=Path, help="hidden_states/ (needed)")
    add("--base-url", action="append", help="a patched SGLang server; repeat for several (needed)")
    add("--capture-dir", type=Path, help="the servers' EAGLE3_CAPTURE_DIR (default: <output-dir>/.incoming)")
    add("--states-url", action="append", metavar="URL",
        help="states come from scripts/offer_states.py at this address, on a server's host, instead of through a "
             "shared folder; one for each --base-url, in their order, or one for all")
    add("--states-token-env", metavar="VAR", help="environment variable that holds the token of offer_states.py")
    add("--api-key-env", metavar="VAR", help="environment variable that holds the servers' key (their --api-key)")
    add("--concurrency", type=int, default=32, help="requests in flight, over all servers")
    add("--max-length", type=int, default=0, metavar="T",
        help="cut longer samples to their first T tokens, and say so (0: never cut)")
    add("--limit", type=int, default=0,
        help="only the first N samples (0: all). May change between calls, except with --max-disk-gb; a 04_train.py "
             "--follow that has begun keeps the plan that it read")
    add("--states", choices=KINDS, default=KINDS[0],
        help="how states are stored. bf16: as the target computes them; fp8: e4m3 with a scale for each layer of each "
             "token, half the bytes; fp8-aux: the captured layers so, the final state as it is. One kind a folder")
    add("--close", action="store_true",
        help="ask nobody: end the folder with what has landed; the rest counts as left out (closed). The same command "
             "without --close goes on")
    add("--server-wait", type=float, default=1800, metavar="S",
        help="how long all servers may load, be away, hang or be busy (a restart, a full queue)")
    add("--request-timeout", type=float, default=900, metavar="S")
    add("--max-failed", type=float, default=0.01, metavar="SHARE",
        help="stop when more than this share of the samples, and more than one, is quarantined")
    add("--disk-check", action=argparse.BooleanOptionalAction, default=True,
        help="refuse to begin what does not fit on the disk")
    add("--max-disk-gb", type=float, metavar="F",
        help="bounded mode: never more than F GB (10^9 bytes) of samples on the disk, those on their way included; "
             "04_train.py --follow trains on them as they land and releases them. F may change between calls, the mode "
             "may not")
    add("--log-interval", type=float, default=10, metavar="S")
    add("--verify", action=argparse.BooleanOptionalAction, default=False,
        help="afterwards, or on a complete folder: re-read and check everything")
    add("--verify-again", type=int, default=0, metavar="N",
        help="--verify, and N samples extracted anew, each alone, and compared with those in place")
    add("--verifier-path", type=Path, metavar="DIR",
        help="the target's folder: --verify then also recomputes greedy tokens; its vocabulary is that of all token "
             "ids")
    add("--verify-positions", type=int, default=64, metavar="K",
        help="response positions a sample to recompute (0: all)")
    add("--min-agreement", type=float, default=0.2, metavar="SHARE",
        help="--verify: least share of a sample's checked response tokens that the target would choose greedily")
    add("--redo-failed", action="store_true",
        help="first drop the samples that the last --verify found bad, and those in quarantine")
    return parser


def check_args(args) -> None:
    args.base_url = args.base_url or []
    for flag in ("data_dir", "output_dir", "base_url"):
        if not getattr(args, flag) and not (flag == "base_url" and args.close and not args.verify_again):
            raise UserError(f"--{flag.replace('_', '-')} is needed. See --help.")
    if args.concurrency < 1 or min(args.max_length, args.limit, args.verify_positions, args.verify_again) < 0:
        raise UserError("--concurrency must be at least 1, --max-length, --limit, --verify-positions and "
                        "--verify-again at least 0.")
    args.verify = args.verify or args.verify_again > 0
    if not (args.request_timeout > 0 and args.log_interval > 0 and args.server_wait >= 0 and args.max_failed >= 0):
        raise UserError("--request-timeout and --log-interval must be above 0, "
                        "--server-wait and --max-failed at least 0.")
    if args.max_disk_gb is not None and args.close:
        raise UserError("--close is not for --max-disk-gb: 04_train.py --follow has planned its steps by all samples, "
                        "and its checkpoints hold what was released.")
    if args.max_disk_gb is not None and (not 0 < args.max_disk_gb < math.inf or args.verify):
        raise UserError("--max-disk-gb must be above 0, and --verify is not for it: "
                        "04_train.py --follow checks each sample before it trains on it.")


# ---- before anything is sent ----
def bytes_a_token(facts: dict | None, target: Path | None, kind: str) -> int | None:
    """What the files so far take, else what the target's config lets expect; None when neither is there."""
    if facts is not None:
        return facts_token_bytes(facts)
    try:
        return token_bytes(text_config(target)["hidden_size"], "bfloat16", kind=kind) if target else None
    except (UserError, KeyError):
        return None


def forecast(job: Extraction, tokens: int) -> None:
    """Say how many bytes are still to come and how many fit; refuse what does not fit. Raises UserError."""
    size = bytes_a_token(job.journal.facts, job.args.verifier_path, job.args.states)
    if size is None:
        return
    need, free = tokens * size, free_bytes(job.folder)
    if job.room:
        need = max(0, min(need, job.room.limit - sum(job.room.sizes.values())))
    log(f"forecast {need / 1e9:,.2f} GB ({size:,} bytes a token) | disk free {free / 1e9:,.2f} GB")
    if need > free and job.args.disk_check:
        fewer = ("take fewer samples (--limit), " if job.journal.rows else
                 "take fewer or shorter samples (--limit, --max-length), ")
        raise UserError(f"{job.folder}: {need / 1e9:,.1f} GB are to come, {free / 1e9:,.1f} GB are free. Make room, "
                        f"{'' if job.room else fewer}or begin anyway with --no-disk-check.")


def check_servers(job: Extraction) -> list[Limits]:
    """All of them are there (one that loads is waited for) and take the key, and still nothing of an earlier process.

    Returns what each of them takes. Raises UserError.
    """
    limits = []
    wait_until_ready(job.servers, job.args.server_wait)
    job.greet_sources()
    for server in job.servers:
        try:
            limits.append(read_limits(server))
        except OSError as error:
            raise UserError(f"{server.url}: no server answers there ({type(error).__name__}). "
                            "Start it, or mend --base-url.") from None
    if job.room:
        try:
            settle(job.servers, job.incoming, job.folder, read_ids(job.parts, job.to_do[0])[0], job.left_there)
            job.tidy()
        except OSError as error:
            raise UserError(f"{', '.join(server.url for server in job.servers)}: no answer ({type(error).__name__}). "
                            "Start the server again, then run the same command.") from None
    return limits


def leave_out_unfit(job: Extraction, limits: list[Limits]) -> None:
    """Of what is to do: what no server would take. Raises UserError where that is much."""
    leave_out_too_long(job, limits)
    sizes = [one.vocab for one in limits]
    sizes += [text_config(job.args.verifier_path).get("vocab_size")] if job.args.verifier_path else []
    vocab_size = min((size for size in sizes if isinstance(size, int)), default=None)
    if vocab_size is None:
        log("token ids are not checked: no server says where its model lies. Name the target with --verifier-path")
    else:
        job.leave_out_unknown_ids(vocab_size)


# ---- while it runs ----
class Progress:
    """How far a job is: a log line every --log-interval seconds. `began`: when the first sample was sent."""

    def __init__(self, job: Extraction):
        self.job, self.began = job, time.monotonic()
        self.last_log = self.began
        self.tokens_to_do = sum(sample.tokens for sample in job.to_do)
        self.in_place = job.total - len(job.to_do) - len(job.quarantine.reasons)  # at the start
        self.size = bytes_a_token(job.journal.facts, job.args.verifier_path, job.args.states)

    def tokens_left(self) -> int:
        return self.tokens_to_do - self.job.done_tokens

    def look(self, away: int) -> None:
        """Called many times a second; away: servers. Raises UserError where what is to come does not fit any more."""
        job, now = self.job, time.monotonic()
        # The first file may say otherwise than the target's config
        if job.journal.facts is not None and self.size != (size := facts_token_bytes(job.journal.facts)):
            self.size = size
            forecast(job, self.tokens_left())
        if now - self.last_log >= job.args.log_interval:
            job.journal.sync()
            self.say(now, away)
            self.last_log = now

    def say(self, now: float, away: int) -> None:
        job, room = self.job, self.job.room
        speed = job.done_tokens / (now - self.began)
        eta = duration(self.tokens_left() / speed) if speed else "unknown"
        bound = f"{room.status()} | " if room else ""
        to_come = ("" if room or self.size is None else
                   f", {self.tokens_left() * self.size / 1e9:,.1f} GB to come")
        if room and room.waiting and not room.coming and now - room.last_release > job.args.log_interval:
            log(f"waiting for 04_train.py --follow to release samples | next {room.waiting} | {bound}nothing was "
                f"released for {duration(now - room.last_release)}")
        log(f"sample {self.in_place + job.done_samples:,}/{job.total:,} | {speed:,.0f} tok/s | "
            f"{job.done_bytes / 1e9 / (now - self.began):.2f} GB/s | {bound}"
            f"disk free {free_bytes(job.folder) / 1e9:,.1f} GB{to_come} | quarantined {len(job.quarantine.reasons)} | "
            f"servers {len(job.servers) - away}/{len(job.servers)} | eta {eta}")

    def end(self) -> None:
        job, seconds = self.job, time.monotonic() - self.began
        log(f"extracted {job.done_tokens:,} tokens, {job.done_bytes / 1e9:.3f} GB in {seconds:.1f} s | "
            f"{job.done_tokens / seconds:,.0f} tok/s | {job.done_bytes / 1e9 / seconds:.3f} GB/s")


def watch(job: Extraction, progress: Progress) -> None:
    """Until every sample is in place or in quarantine. Raises UserError."""
    with job.working() as threads, bar(job.total, "sample", progress.in_place) as shown:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            if job.stop is not None:
                job.journal.sync()
                raise job.stop
            job.check_failed()
            progress.look(job.check_away())
            shown.update(progress.in_place + job.done_samples - shown.n)
    if job.stop is not None:
        raise job.stop
    job.check_failed()


def left_out(job: Extraction) -> set[str]:
    """Of --close: the ids of what is not in place and shall not come. Raises UserError where nothing has landed."""
    ids = {sample.id for sample in job.to_do}
    log(f"closing with {job.total - len(ids) - len(job.quarantine.reasons):,} of {job.total:,} samples | quarantined "
        f"{len(job.quarantine.reasons):,} | left out {len(ids):,}")
    if len(ids) + len(job.quarantine.reasons) == job.total:
        raise UserError(f"{job.folder}: no sample has landed, so there is nothing to close with. Run this without "
                        "--close.")
    return ids


def extract_missing(job: Extraction) -> None:
    """Extract what is not in place yet. Raises UserError."""
    progress = Progress(job)
    truncated = sum(sample.truncated for sample in job.samples)
    log(f"samples {job.total:,} | in place {progress.in_place:,} | quarantined {len(job.quarantine.reasons):,} "
        f"| to do {len(job.to_do):,} | tokens to do {progress.tokens_to_do:,} | truncated {truncated:,}")
    job.check_failed()
    if not job.to_do:
        return
    leave_out_unfit(job, check_servers(job))
    progress = Progress(job)
    forecast(job, progress.tokens_to_do)
    progress.began = progress.last_log = time.monotonic()
    watch(job, progress)
    progress.end()


# ---- the stage ----
def complete_manifest(args, job: Extraction, samples: list[Sample], dropped, inputs: dict, index_sha256: str) -> None:
    """The last file of the stage. samples: those in place; dropped: a counter by reason."""
    facts = job.journal.facts
    counts = {"kept": len(samples), "dropped": dict(sorted(dropped.items())),
              "truncated": sum(sample.truncated for sample in samples),
              "tokens": sum(sample.tokens for sample in samples)}
    # In bounded mode index.jsonl names what was extracted; most of it has been released
    write_manifest(job.folder, STAGE, config={"max_length": args.max_length, "limit": args.limit},
                   inputs=inputs, counts=counts,
                   versions={"sglang": facts["sglang_version"], "patch": facts["patch_hash"]}, **facts,
                   index_sha256=index_sha256, **({"bounded": True} if args.max_disk_gb else {}),
                   **({"closed": dropped[CLOSED]} if dropped[CLOSED] else {}), **grown_from(job.folder))
    log(f"kept {counts['kept']:,} | dropped {dict(dropped)} | truncated {counts['truncated']:,} | "
        f"tokens {counts['tokens']:,}")


def begin_again(args, samples: list[Sample], facts: dict, parts: list[Path], journal: Journal, incoming: Path):
    """What --verify-again is done with; None without it. Raises UserError: its servers are not there."""
    if not args.verify_again:
        return None
    again = Again(args, samples, facts, parts, journal, incoming)
    check_servers(again)
    return again


def extract(args) -> None:
    folder = args.output_dir.absolute()
    read = Rows(args.data_dir, folder, args.max_length, args.limit)
    parts, inputs = read.parts, {"responses": sha256_file(args.data_dir / "manifest.json")}
    incoming = (args.capture_dir or folder / ".incoming").absolute()
    lock = open_folder(args, folder, inputs, parts)  # noqa: F841  held until this returns
    log(f"config {json.dumps(vars(args), default=str)}")
    kept = read_manifest(args.data_dir, "01_generate").get("counts", {}).get("kept")
    log(f"inputs {json.dumps(inputs)} | responses {kept}")
    if args.verify and args.verifier_path:  # said now, not when days of extraction are over
        target = Target(args.verifier_path)
        target.place("norm"), target.place("head")
    incoming.mkdir(parents=True, exist_ok=True)
    if args.max_disk_gb:
        write_bound(folder, incoming, args.max_disk_gb)
    journal = Journal(folder)
    if args.redo_failed:
        redo_failed(journal)
    complete = is_complete(args, folder, inputs)
    if complete and not args.verify:
        log("complete already")
        return
    report = read_report(folder)
    if not args.verify and (report.get("failed") or "failed_as_a_whole" in report):
        raise UserError(f"{folder / 'verify.json'}: the last --verify failed. "
                        "Extract what it names with --redo-failed, or --verify once more.")
    samples, dropped = read.read()
    if not samples:
        raise UserError(f"{args.data_dir}: no sample to extract (dropped: {dict(dropped)}).")
    if complete:  # nothing is extracted on the way: what is damaged is reported
        rows, facts = complete_rows(folder)
        samples = [sample for sample in samples if sample.id in rows]
        verify(args, samples, rows, facts, parts, folder, begin_again(args, samples, facts, parts, journal, incoming))
        return

    read.write_plan(samples, dropped)
    clean_incoming(incoming, folder)
    job = Extraction(args, samples, parts, journal, incoming)
    closed = left_out(job) if args.close else set()
    if not args.close:
        extract_missing(job)
    clean_incoming(incoming, folder)
    job.tidy()

    samples = [sample for sample in samples if sample.id not in job.quarantine.reasons.keys() | closed]
    if not samples:
        raise UserError(f"{job.quarantine.path}: every sample failed. "
                        "Mend the cause, then run this with --redo-failed.")
    index_sha256 = journal.write_index([sample.id for sample in samples])
    if args.verify:
        again = begin_again(args, samples, journal.facts, parts, journal, incoming)
        verify(args, samples, journal.rows, journal.facts, parts, folder, again)
    dropped.update([*job.quarantine.reasons.values(), *[CLOSED] * len(closed)])
    if not closed:
        job.deaths.forget()
    complete_manifest(args, job, samples, dropped, inputs, index_sha256)


def main(argv: list[str]) -> None:
    args = parse_args(build_parser(), "extract", argv)
    check_args(args)
    try:
        extract(args)
    except OSError as error:
        if error.errno in FULL:
            raise UserError(f"{args.output_dir}: the disk is full. Make room and run the same command again.") from None
        if isinstance(error, PermissionError):
            raise UserError(f"{error.filename}: {error.strerror}. "
                            "Give this user the right to it, or run 03 as the server's user.") from None
        raise UserError(f"{error.filename or args.output_dir}: {error.strerror or error}. "
                        "Mend that and run the same command again.") from None
    log(f"done: {args.output_dir.absolute()}")


if __name__ == "__main__":
    run(main)
