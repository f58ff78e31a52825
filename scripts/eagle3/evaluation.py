"""04 --evaluate: what serving would accept of finished drafters on held-out states, without training or a server.

Every drafter sees the same samples, so that their differences are paired: the interval of a difference is narrower than
those of the two lengths, since what the samples differ by falls out of it.
"""
from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from eagle3.acceptance import Evaluation, evaluate, predicted, sampled_at
from eagle3.batches import Sample
from eagle3.bench_prompts import read_ids
from eagle3.checked import usable_samples
from eagle3.drafter import Drafter
from eagle3.drafter_files import Stored, check_layers, read_drafter, summary, weights_sha256
from eagle3.figures import BOOTSTRAP, resampled
from eagle3.metrics import listed
from eagle3.processes import Process
from eagle3.report import markdown_table
from eagle3.responses import part_files, read_jsonl
from eagle3.sampling import Sampling, expectation, expected_length, misfit, said, samplings
from eagle3.sources import Source, once, read_source
from eagle3.stage import SCHEMA, UserError, log, sha256_file, write_atomic
from eagle3.states import layer_list
from eagle3.target import Target


# ---- what there is ----
def read_fed(folder: Path, target: Target, sources: list[Source], version: str | None, meant: str | None) -> Stored:
    """A drafter that SGLang feeds these states; what there is to say of it is logged.

    version: the SGLang that serves it (None: the one that captured); meant: see target.layer_rule. Raises UserError
    where it is not whole, or is fed other states.
    """
    stored = read_drafter(folder, target)
    for source in sources:
        note = check_layers(stored, layer_list(source.facts), source.folder,
                            target.folder, version or source.facts["sglang_version"], meant)
        stored.notes += [note] if note and note not in stored.notes else []
    log(f"{folder} | {summary(stored.shape)}" + "".join(f" | {note}" for note in stored.notes))
    return stored


def read_folders(args, target: Target) -> list[Source]:
    """The folders of states, of their indexes only the wanted ids (--ids). Raises UserError.

    An id may stand with the number of its folder before it, as val_ids.json has it (sources.py).
    """
    wanted = read_ids(args.ids) if args.ids else None
    sources = [read_source(folder, target, torch.empty(0), Path()) for folder in args.data_dirs]
    if wanted is not None:
        sources = [replace(source, index=[row for row in source.index
                                          if row["id"] in wanted or f"{number}/{row['id']}" in wanted],
                           of=f"--ids {sha256_file(args.ids)} {number}")
                   for number, source in enumerate(sources, 1)]
    if not any(source.index for source in sources):
        of = f"none of the {len(wanted)} ids of {args.ids}" if wanted is not None else "no sample"
        raise UserError(f"{', '.join(map(str, args.data_dirs))}: {of} is there. Name the folder that was extracted "
                        "from them.")
    return sources


def held_out_samples(args, sources: list[Source], draft_ids: torch.Tensor, head: torch.Tensor,
                     process: Process) -> tuple[list[Sample], dict]:
    """(the usable samples of all folders, each once, {reason: dropped}) under one vocabulary map. Raises UserError."""
    parts, dropped = [], Counter()
    with tempfile.TemporaryDirectory() as cache:
        for number, source in enumerate(sources, 1):
            source = replace(source, draft_ids=draft_ids, cache=Path(cache) / str(number))
            found = usable_samples(source, args.max_seq_len, args.num_workers, head, process)
            parts.append(found.samples)
            dropped += found.dropped
    samples, repeated = once(parts, None, args.num_workers)
    dropped += Counter({"also in an earlier --data-dir": sum(map(len, repeated.values()))})
    if not samples:
        raise UserError(f"{', '.join(str(source.folder) for source in sources)}: no usable sample {dict(dropped)}.")
    return samples, dict(dropped)


def data_sources(samples: list[Sample], responses: list[Path] | None) -> dict[str, str]:
    """{sample id: where its prompt is from}. Raises UserError.

    That is the row's `source` in a responses/ folder, else the id's part before the first "-" (unknown, where hardly
    two samples share it).
    """
    names = {sample.id: sample.path.stem for sample in samples}  # without its folder's number
    if not responses:
        first_parts = {name.split("-")[0] for name in names.values()}
        tells = 2 * len(first_parts) <= len(names)
        return {sample_id: name.split("-")[0] if tells else "unknown" for sample_id, name in names.items()}
    rows = (row for folder in responses for path in part_files(folder) for row in read_jsonl(path))
    known = {row.get("id"): str(row.get("source") or "unknown") for row in rows}
    if not known.keys() & set(names.values()):
        raise UserError(f"--responses {', '.join(map(str, responses))}: has none of the {len(names)} samples. Name the "
                        "folder that they were extracted from.")
    return {sample_id: known.get(name, "unknown") for sample_id, name in names.items()}


# ---- figures ----
def counts(walks: dict[str, list[int]], ids: list[str]) -> np.ndarray:
    """(N, 2) verify steps and correct drafts of each sample."""
    return np.array([[sum(walks[name]), sum(k * n for k, n in enumerate(walks[name]))] for name in ids], float)


def lengths(sums: np.ndarray) -> np.ndarray:
    """accept_length of summed counts (2, ...)."""
    return 1 + sums[1] / np.maximum(sums[0], 1)


def accept_figures(walks: dict[str, list[int]]) -> dict:
    """accept_length of some samples, its 95 % bootstrap interval over them (None for fewer than 5), and by position."""
    whole = predicted(walks)
    return {"samples": len(walks), **{key: whole[key] for key in ("accept_length", "verify_steps", "correct_drafts",
                                                                   "histogram", "accept_by_position")},
            "interval": resampled(counts(walks, list(walks)), lengths)}


def difference(first: dict[str, list[int]], other: dict[str, list[int]]) -> dict:
    """accept_length of `other` less that of `first` on the samples that both could read, and its 95 % interval.

    In a resample both have the same samples.
    """
    ids = [name for name in first if name in other]
    both = np.hstack([counts(first, ids), counts(other, ids)])

    def statistic(sums):
        return lengths(sums[2:]) - lengths(sums[:2])

    return {"accept_length": float(statistic(both.sum(0))), "interval": resampled(both, statistic)}


def sampled_figures(setting: Sampling, sums: dict[str, list[float]], first: dict[str, list[float]]) -> dict:
    """What serving answers drawn so is expected to accept, with the interval over the samples and the difference.

    sums, first: {sample id: sampling.reach()}, of this drafter and of the one that it is held against.
    """
    entry, both = expectation(setting, sums), [name for name in first if name in sums]
    pairs = np.array([[*first[name], *sums[name]] for name in both])

    def statistic(total):
        return expected_length(total[len(total) // 2:]) - expected_length(total[:len(total) // 2])

    return {key: value for key, value in entry.items() if key != "samples"} | {
        "interval": resampled(np.array(list(sums.values())), expected_length),
        "difference": None if sums is first else {"accept_length": float(statistic(pairs.sum(0))),
                                                  "interval": resampled(pairs, statistic)}}


def drafter_figures(evaluation: Evaluation, first: Evaluation, source_of: dict[str, str]) -> dict:
    """Everything about one drafter. first: of the drafter that the others are held against."""
    groups = {}
    for name, walk in sorted(evaluation.walks.items()):
        groups.setdefault(source_of[name], {})[name] = walk
    return {**accept_figures(evaluation.walks), "metrics": evaluation.metrics,
            "difference": None if evaluation is first else difference(first.walks, evaluation.walks),
            "sampled": [sampled_figures(setting, sums, first.sampled[setting])
                        for setting, sums in evaluation.sampled.items()],
            "by_source": {source: accept_figures(walks) for source, walks in sorted(groups.items())},
            "walks": dict(sorted(evaluation.walks.items()))}


# ---- tables ----
def with_interval(figures: dict | None, form: str) -> str:
    if not figures:
        return "-"
    interval = figures["interval"]
    return format(figures["accept_length"], form) + (f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval
                                                     else "")


def tables(found: dict[str, dict]) -> str:
    """found: {drafter's folder: drafter_figures}."""
    whole = [["drafter", "accept_length", "difference to the first", "by draft position"]]
    whole += [[name, with_interval(figures, ".3f"), with_interval(figures["difference"], "+.3f"),
               " ".join(f"{share:.3f}" for share in figures["accept_by_position"])] for name, figures in found.items()]
    sampled = [["serving sampled answers", "drafter", "accept_length", "difference to the first", "by draft position"]]
    sampled += [[str(Sampling(own["temperature"], own["top_p"])), name, with_interval(own, ".3f"),
                 with_interval(own["difference"], "+.3f"),
                 " ".join(f"{share:.3f}" for share in own["accept_by_position"])]
                for name, figures in found.items() for own in figures["sampled"]]
    by_source = [["source", "samples", *found]]
    for source, own in next(iter(found.values()))["by_source"].items():
        by_source.append([source, str(own["samples"]),
                          *(with_interval(figures["by_source"][source], ".3f") for figures in found.values())])
    return "\n\n".join(markdown_table(table) for table in (whole, sampled, by_source) if len(table) > 1)


# ---- the command ----
def make_drafter(stored: Stored, embed: torch.Tensor, head: torch.Tensor, positions: int,
                 process: Process) -> Drafter:
    draft_ids = torch.from_numpy(stored.draft_ids)
    draft = Drafter(stored.shape, process.dtype, process.device, embed, head[draft_ids], draft_ids, positions)
    draft.load(stored.tensors(head))
    return draft


def trained_on(stored: Stored) -> list[str]:
    """sha256 of the manifests of its hidden_states/, as far as they are known."""
    known = stored.about.get("hidden_states_manifest") or []
    return [known] if isinstance(known, str) else known


def evaluate_drafters(args, process: Process) -> None:
    """Logs a line a drafter, prints the tables, and writes evaluate.json into --output-dir if one is given.

    args: evaluate (folders), verifier_path, data_dirs, ids, responses, serve_sglang_version, output_dir, and what
    `evaluate` takes. Raises UserError.
    """
    if process.world > 1:
        raise UserError("--evaluate computes in one process. Start it without torchrun.")
    target = Target(args.verifier_path)
    sources = read_folders(args, target)
    drafters = [read_fed(folder, target, sources, args.serve_sglang_version, args.layer_id_rule)
                for folder in dict.fromkeys(args.evaluate)]
    embed, head, by_map, evaluations = target.tensor("embed"), target.tensor("head"), {}, []
    known = {source.manifest_sha256 for source in sources}
    known |= {entry["manifest"] for source in sources for entry in source.facts.get("grown_from", [])}
    for stored in drafters:
        if not args.ids and known & set(trained_on(stored)):
            log(f"{stored.folder} was trained on these states: the figures are no held-out ones, unless --ids names "
                "its val_ids.json")
        vocabulary = tuple(stored.draft_ids.tolist())  # the loss hangs on it
        if vocabulary not in by_map:
            by_map[vocabulary] = held_out_samples(args, sources, torch.from_numpy(stored.draft_ids), head,
                                                  process)
        samples, dropped = by_map[vocabulary]
        draft = make_drafter(stored, embed, head, args.max_seq_len + args.ttt_steps, process)
        evaluations.append(evaluate(draft, samples, args, process, sampled_at(samplings(args), head, draft)))
        metrics, K = evaluations[-1].metrics, args.ttt_steps
        log(f"{stored.folder} | {len(samples)} samples, {sum(dropped.values())} skipped | loss_k "
            f"{listed(metrics, 'loss', K)} | full_acc {listed(metrics, 'full_acc', K)} | cond_acc "
            f"{listed(metrics, 'cond_acc', K)} | accept_length {metrics['accept_length']:.3f}"
            + "".join(f" | {said(entry)}" for entry in evaluations[-1].prediction.get("sampled", ())))
    source_of = data_sources(samples, args.responses)
    found = {str(stored.folder): drafter_figures(evaluation, evaluations[0], source_of)
             for stored, evaluation in zip(drafters, evaluations)}
    print(tables(found), flush=True)
    for sentence in filter(None, (misfit(own) for own in next(iter(found.values()))["sampled"])):
        log(sentence)
    if args.output_dir:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        path = args.output_dir / "evaluate.json"
        write_atomic(path, json.dumps(report(args, sources, found, dropped)) + "\n")
        log(f"done: {path}")


def report(args, sources: list[Source], found: dict[str, dict], dropped: dict) -> dict:
    """evaluate.json."""
    config = {"num_draft_steps": args.num_draft_steps, "max_seq_len": args.max_seq_len, "bootstrap": BOOTSTRAP,
              "ids": str(args.ids) if args.ids else None}
    weights = {name: weights_sha256(Path(name)) for name in found}
    return {"schema": SCHEMA, "config": config, "dropped": dropped,
            "hidden_states": {str(source.folder): source.manifest_sha256 for source in sources},
            "drafters": {name: {"weights_sha256": weights[name], **figures} for name, figures in found.items()}}
