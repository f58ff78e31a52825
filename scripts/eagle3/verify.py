"""--verify of 03: every file is read again and compared with its response, its index row, and the target itself.

The strongest check needs the target's head: the last states must choose response tokens as often as a target that wrote
them would, and the state at the last token must choose the very token that the engine named when it was asked. The
captured layers are compared with those of the folder's other samples (layer_stats.py) and, with --verify-again, with
samples extracted anew (again.py).

Shapes: T tokens of a sample, H hidden, V target vocabulary, K positions checked.
"""
from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from eagle3.again import Again
from eagle3.journal import Journal
from eagle3.layer_stats import Measures, judge, measure, wrong_as_a_whole
from eagle3.samples import Sample, read_ids
from eagle3.stage import UserError, bar, log, read_manifest, sha256_file, write_atomic
from eagle3.states import (FACTS, IN_FP8, MORE_FACTS, StateFile, check_header, check_ids, kind_of, layer_list,
                           normed_sizes, sample_path)
from eagle3.target import Target

STAGE = "03_extract"
# Of samples whose last state must give the token the engine itself chose (bf16 ties allow for the rest). A final state
# in FP8 chooses another one in 2 % of all positions (seen on SmolLM2-135M), another target nearly always
NEXT_TOKEN_SHARE, NEXT_TOKEN_SHARE_FP8 = 0.9, 0.8
NORM_TOLERANCE = 0.1
LEAST_CHECKED = 8       # positions of a sample before its share of greedy tokens says anything
PIECE_BYTES = 8 << 20   # of a file in memory at a time
VOCABULARY_PART = 16384


class Head:
    """The target's final norm weight (H,) and lm_head (V, H): what makes tokens out of last_hidden_states.

    Raises UserError.
    """

    def __init__(self, folder: Path):
        import torch  # only here: extraction itself stays small in memory

        target = Target(folder)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.norm, self.head = target.tensor("norm").float(), target.tensor("head").to(self.device)

    def greedy(self, last):
        """last: (K, H) after the final norm -> the token each state chooses, (K,).

        The vocabulary goes by in parts: logits stay small.
        """
        import torch

        best, token = torch.full((len(last),), -torch.inf), torch.zeros(len(last), dtype=torch.long)
        last = last.to(self.device)
        # On a CPU in float32, since bf16 there is slow; on a GPU in the file's own precision, as the engine does
        dtype = torch.float32 if self.device == "cpu" else last.dtype
        for begin in range(0, len(self.head), VOCABULARY_PART):
            logits = last.to(dtype) @ self.head[begin:begin + VOCABULARY_PART].to(dtype).T  # (K, VOCABULARY_PART)
            value, index = (part.cpu() for part in logits.float().max(dim=-1))
            token, best = torch.where(value > best, index + begin, token), torch.maximum(value, best)
        return token


# ---- one sample ----
def check_data(file: StateFile) -> None:
    """Checksum, and all states finite, in one pass. Raises ValueError."""
    import torch

    from eagle3.quantised import finite

    sha256, buffer, good, data_bytes = hashlib.sha256(), bytearray(PIECE_BYTES), True, file.size - file.begin
    floats = {name: entry["data_offsets"] for name, entry in file.header.items() if file.dtype(name).is_floating_point}
    for at in range(0, data_bytes, PIECE_BYTES):
        piece = memoryview(buffer)[:min(PIECE_BYTES, data_bytes - at)]
        file.read_bytes_into(piece, file.begin + at)
        sha256.update(piece)
        read = torch.frombuffer(buffer, dtype=torch.uint8, count=len(piece))
        for name, (first, end) in floats.items():
            good = good and finite(read[max(0, first - at):max(0, end - at)].view(file.dtype(name)))
    if f"sha256:{sha256.hexdigest()}" != file.metadata["checksum"]:
        raise ValueError("checksum")
    if not good:
        raise ValueError("not finite")


def check_meaning(file: StateFile, ids: list[int], row: dict, head: Head, positions: int) -> dict:
    """What the last states of one sample say: {"checked", "right", "next_right", "norm"}.

    checked: how many of its response tokens were looked at (`positions`, 0: all); right: how many of them they
    choose; next_right: whether the engine's next token too; norm: root mean square of (state / norm weight), 1 at
    every position after the final norm by its definition.
    """
    import torch

    T, prompt_len = row["tokens"], row["prompt_len"]
    predicting = torch.arange(max(0, prompt_len - 1), T - 1)  # position p predicts token p+1
    if positions and len(predicting) > positions:
        predicting = predicting[torch.linspace(0, len(predicting) - 1, positions).long()]
    picked = torch.cat([predicting, torch.tensor([T - 1])])
    width = file.header["last_hidden_states"]["shape"][1]
    states = file.empty("last_hidden_states", len(picked))  # (K + 1, H)
    for number, position in enumerate(picked.tolist()):
        file.read_into("last_hidden_states", states[number:number + 1], position)
    states = states.to("cpu", file.engine_dtype)
    if width != len(head.norm):
        raise UserError(f"--verifier-path: its hidden size is {len(head.norm)}, the files have {width}. "
                        "Name the target they came from.")
    token = head.greedy(states)
    norms = normed_sizes(states.float(), head.norm)
    norm = norms[(norms - 1).abs().argmax()].item()  # the farthest off: before the norm, sizes differ from row to row
    right = int((token[:-1] == torch.tensor(ids)[predicting + 1]).sum())
    # A line made anew from its file knows of no next token
    next_right = None if row["next_token"] is None else bool(token[-1] == row["next_token"])
    return {"checked": len(predicting), "right": right, "next_right": next_right, "norm": norm}


@dataclass
class Found:
    """Of one sample: what is wrong with it; what its last states say; its layers. Each None where there is none."""
    problem: str | None
    result: dict | None = None
    measures: Measures | None = None


class Check:
    """check(sample) -> Found."""

    def __init__(self, args, rows: dict[str, dict], facts: dict, parts: list[Path], folder: Path):
        self.args, self.rows, self.facts, self.parts, self.folder = args, rows, facts, parts, folder
        self.head = Head(args.verifier_path) if args.verifier_path else None

    def __call__(self, sample: Sample) -> Found:
        row, result = self.rows[sample.id], None
        try:
            with StateFile(sample_path(self.folder, sample.id)) as file:
                check_header(file, sample.id, sample.tokens, sample.prompt_len, self.facts)
                ids = read_ids(self.parts, sample)
                check_data(file)
                check_ids(file, ids, sample.prompt_len)
                if file.metadata["checksum"] != row["checksum"]:
                    raise ValueError("checksum differs from index")
                measures = measure(file)
                if self.head:
                    result = check_meaning(file, ids, row, self.head, self.args.verify_positions)
                    self.judge(result)
        except (ValueError, OSError) as error:
            return Found(str(error), result)
        return Found(None, result, measures)

    def judge(self, result: dict) -> None:
        if abs(result["norm"] - 1) > NORM_TOLERANCE:
            raise ValueError(f"last states are not after the final norm (size {result['norm']:.3f}, expected 1)")
        if result["checked"] >= LEAST_CHECKED and result["right"] < self.args.min_agreement * result["checked"]:
            raise ValueError(f"last states choose {result['right']} of {result['checked']} response tokens")


# ---- a folder ----
def verify(args, samples: list[Sample], rows: dict[str, dict], facts: dict, parts: list[Path], folder: Path,
           again: Again | None) -> None:
    """Re-read every file, compare it with its row, and write verify.json.

    Raises UserError when a sample or the whole fails.
    """
    check = Check(args, rows, facts, parts, folder)
    checks = "checksum, shapes, finite, ids, mask, layers" + (", greedy tokens, final norm" if check.head else
                                                               " (greedy tokens and final norm need --verifier-path)")
    log(f"verify {len(samples):,} samples: {checks}")
    began = time.monotonic()
    found = read_all(check, samples)
    failed = {sample_id: one.problem for sample_id, one in found.items() if one.problem}
    report = {"samples": len(samples), "checks": checks}
    measures = {sample_id: one.measures for sample_id, one in found.items() if one.measures}
    if measures:
        foreign, report["layers"] = judge(measures, layer_list(facts))
        failed |= foreign
        if whole := wrong_as_a_whole(report["layers"]):
            report["failed_as_a_whole"] = f"{whole}: mend the server, and begin a new --output-dir"
    results = {sample_id: one.result for sample_id, one in found.items() if one.result}
    if results:
        report |= agreement(results, "last_hidden_states" in IN_FP8[kind_of(facts)])
    if again:
        report["again"] = again.run(set(failed))
        failed |= again.failed
    report["failed"] = dict(sorted(failed.items()))
    conclude(report, folder)
    total = sum(sample_path(folder, sample.id).stat().st_size for sample in samples)
    log(f"verify all {len(samples):,} samples good | {total / 1e9:.3f} GB in {time.monotonic() - began:.1f} s")


def read_all(check: Check, samples: list[Sample]) -> dict[str, Found]:
    """{id: what was found} of all samples, by a few threads, with a log line now and then."""
    import torch

    workers = min(8, os.cpu_count() or 1)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    found, failed, done_bytes = {}, 0, 0
    began = last_log = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
        with bar(len(samples), "sample") as progress:
            for number, (sample, one) in enumerate(zip(samples, pool.map(check, samples)), 1):
                path = sample_path(check.folder, sample.id)
                done_bytes += path.stat().st_size if path.exists() else 0
                failed += one.problem is not None
                found[sample.id] = one
                progress.update()
                if time.monotonic() - last_log >= check.args.log_interval:
                    last_log = time.monotonic()
                    log(f"verify {number:,}/{len(samples):,} | {done_bytes / 1e9 / (last_log - began):.2f} GB/s | "
                        f"failed {failed}")
    finally:
        pool.shutdown(cancel_futures=True)
    return found


def agreement(results: dict[str, dict], in_fp8: bool) -> dict:
    """Of verify.json: how the last states agree with the response tokens and with the engine.

    results: by sample id; in_fp8: whether these states are.
    """
    least = NEXT_TOKEN_SHARE_FP8 if in_fp8 else NEXT_TOKEN_SHARE
    shares = sorted(result["right"] / result["checked"] for result in results.values() if result["checked"])
    known = [result["next_right"] for result in results.values() if result["next_right"] is not None]
    next_share = sum(known) / len(known) if known else 1.0
    quantiles = {f"p{at}": shares[min(len(shares) - 1, len(shares) * at // 100)]
                 for at in (0, 5, 25, 50, 75, 95)} if shares else {}
    found = {"positions_checked": sum(result["checked"] for result in results.values()),
             "engine_next_token_share": next_share, "agreement": quantiles,
             "agreement_by_sample": {sample_id: round(result["right"] / max(1, result["checked"]), 4)
                                     for sample_id, result in sorted(results.items())}}
    log(f"verify greedy agreement with the response tokens, by sample {quantiles} | "
        f"with the engine's own next token {next_share:.4f}")
    if next_share < least:
        found["failed_as_a_whole"] = (
            f"the last states choose the engine's next token in {next_share:.1%} of the samples, expected over "
            f"{least:.0%}: they are not the states that its logits come from. Mend --verifier-path if it "
            "names another target, else the server, and begin a new --output-dir")
    return found


def conclude(report: dict, folder: Path) -> None:
    """Write verify.json; a folder found bad is no longer complete. Raises UserError then."""
    failed, path = report["failed"], folder / "verify.json"
    bad = failed or "failed_as_a_whole" in report
    if bad:
        (folder / "manifest.json").unlink(missing_ok=True)
    write_atomic(path, json.dumps(report, indent=1) + "\n")
    if bad:
        kinds = collections.Counter(reason.split(" (")[0] for reason in failed.values()).most_common(4)
        counts = ", ".join(f"{reason}: {count}" for reason, count in kinds)
        raise UserError(f"{path}: " + (report.get("failed_as_a_whole") or
                        f"{len(failed)} of {report['samples']} samples failed ({counts}). "
                        "Run the same command with --redo-failed to extract them again") + ".")


def complete_rows(folder: Path) -> tuple[dict[str, dict], dict]:
    """({id: row}, facts) of a folder that is complete, as its index and manifest say. Raises UserError."""
    manifest, path = read_manifest(folder, STAGE), folder / "index.jsonl"
    if not path.is_file() or sha256_file(path) != manifest["index_sha256"]:
        raise UserError(f"{path}: not the file that manifest.json names. "
                        "Remove manifest.json and run the same command: it writes both anew.")
    rows = {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
    return rows, {fact: manifest[fact] for fact in (*FACTS, *MORE_FACTS) if fact in manifest}


def read_report(folder: Path) -> dict:
    """verify.json of the last --verify; empty when there was none."""
    try:
        return json.loads((folder / "verify.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}


def redo_failed(journal: Journal) -> None:
    """Forget what --verify found bad and what was quarantined, so that it is extracted again."""
    folder = journal.folder
    failed = read_report(folder).get("failed", {})
    if failed or (folder / "quarantine.jsonl").exists():
        (folder / "manifest.json").unlink(missing_ok=True)  # first: killed here, the folder must not look complete
        for sample_id in failed:
            journal.add({"id": sample_id, "redo": True})
            sample_path(folder, sample_id).unlink(missing_ok=True)
        for name in ("verify.json", "quarantine.jsonl"):
            (folder / name).unlink(missing_ok=True)
    (folder / "deaths.jsonl").unlink(missing_ok=True)  # each may try again
    log(f"redo: {len(failed)} samples that --verify found bad, and all that were quarantined")
