"""What 04's flags name, read and found to fit together: data, vocabulary map, target, and the sizes of the drafter."""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eagle3.drafter import Shape, aux_norm_of, draft_config, served_from
from eagle3.drafter_files import Stored, check_layers, differing, read_drafter, summary, weights_sha256
from eagle3.growth import as_of
from eagle3.journal import read_facts
from eagle3.mla import Latent, latent_of, read_latent
from eagle3.recipe import fill_kind, old_config, usual_kv_heads
from eagle3.rope import rope_of, rope_scaling
from eagle3.sglang_draft import completed
from eagle3.stage import SCHEMA, UserError, read_json, read_manifest, sha256_file
from eagle3.states import layer_list
from eagle3.target import Target, layer_rule, version_numbers
from eagle3.vocabulary import read_mapping


@dataclass
class Inputs:
    """What the flags name. `read_inputs` makes it."""
    facts: dict  # what 03 says of all its samples (states.FACTS): its manifest, or its first lines
    index: Sequence  # index.jsonl's rows; none with --follow
    target: Target
    draft_ids: torch.Tensor  # (Vd,) ascending target ids
    shape: Shape
    config_json: dict  # the drafter's
    hashes: dict  # of what was read
    begin_with: Stored | None = None  # --finetune-from

    @property
    def layers(self) -> list[int]:
        return layer_list(self.facts)

    def provenance(self, args, step: int, prediction: dict | None, agreement: float) -> dict:
        """eagle3.json: what the drafter was made from, and what serving it should show (05_benchmark compares).

        args: serve_sglang_version, layer_id_rule, max_seq_len; agreement: share of response tokens that are the
        target's argmax.
        """
        offsets = self.draft_ids - torch.arange(len(self.draft_ids))
        captured_by = self.facts["sglang_version"]
        return {"schema": SCHEMA, "step": step, "prediction": prediction, "capture_layers": self.layers,
                "target": self.facts["target"], "sglang_version": captured_by,
                "serve_sglang_version": args.serve_sglang_version or captured_by,
                **({"layer_id_rule": args.layer_id_rule} if args.layer_id_rule else {}),
                "served_from": served_from(self.shape),
                "hidden_states_manifest": self.hashes.get("hidden_states"),
                "vocab_mapping_manifest": self.hashes["vocab_mapping"], "hidden_size": self.shape.hidden,
                "draft_vocab_size": self.shape.draft_vocab, "max_seq_len": args.max_seq_len,
                "target_argmax_share": agreement, "config": self.config_json,
                "d2t_sha256": hashlib.sha256(offsets.numpy().tobytes()).hexdigest()}


def draft_shape(args, target: dict, draft_vocab: int, aux_states: int = 3) -> Shape:
    """The drafter's sizes: flags, else those of --finetune-from, else the target's. Raises UserError.

    A folder that was begun goes on with its KV heads: their default was another one once.

    target: its text config; aux_states: how many layers were captured.
    """
    old = completed(read_json(args.finetune_from / "config.json")) if args.finetune_from else {}
    heads = args.num_heads or old.get("num_attention_heads") or target["num_attention_heads"]
    latent = draft_latent(args, old, target) if args.architecture == "mla" else None
    begun = ((old_config(args.output_dir) if args.output_dir else None) or {}).get("draft") or {}
    kv_heads = (args.num_kv_heads or begun.get("kv_heads") or old.get("num_key_value_heads")
                or usual_kv_heads(target, heads))
    positions = args.max_position_embeddings or old.get("max_position_embeddings")
    head_dim = args.head_dim or old.get("head_dim") or target.get("v_head_dim") or target.get("head_dim")
    shape = Shape(
        hidden=target["hidden_size"], heads=heads, kv_heads=heads if latent else kv_heads, latent=latent,
        head_dim=latent.head_dim if latent else head_dim or target["hidden_size"] // heads,
        intermediate=args.intermediate_size or old.get("intermediate_size") or target["intermediate_size"],
        vocab=target["vocab_size"], draft_vocab=draft_vocab,
        rms_norm_eps=old.get("rms_norm_eps") or target.get("rms_norm_eps", 1e-5),
        rope_theta=float(args.rope_theta or old.get("rope_theta") or rope_of(target)[1]),
        max_positions=positions or target["max_position_embeddings"], layers=args.draft_layers, aux_states=aux_states,
        aux_norm=aux_norm_of(vars(args)), norm_output=args.norm_output, rope_scaling=rope_scaling(old),
        o_bias=not latent and bool(old.get("attention_bias") or old.get("bias")), fc_bias=bool(old.get("bias")))
    if shape.heads % shape.kv_heads or shape.rope_dim % 2:
        raise UserError(f"{shape.heads} heads, {shape.kv_heads} kv heads, head_dim {shape.head_dim}: kv heads must "
                        "divide the heads, head_dim must be even.")
    return shape


def draft_latent(args, old: dict, target: dict) -> Latent:
    """Sizes of latent attention: those of --finetune-from (its config `old`), else the target's. Raises UserError."""
    if args.num_kv_heads or args.head_dim:
        raise UserError("--architecture mla has the target's latent sizes. Leave out --num-kv-heads and --head-dim.")
    return read_latent(old) if old else latent_of(target, "the target's config.json")


def begun_with(args, folder: Path, key: str, number: int, say) -> Path:
    """Where the manifest and index lie that --output-dir began with: `folder`, or what it was before it grew.

    key, number: which hash of the run's inputs it is. A run goes on with the samples that it began with, to the same
    bytes; a new output takes all. args: output_dir.
    """
    known = ((old_config(args.output_dir) or {}).get("inputs") or {}).get(key) or []
    known = [known] if isinstance(known, str) else known
    place = as_of(folder, known[number]) if number < len(known) else folder
    if place != folder:
        kept = read_manifest(place, "03_extract")["counts"]["kept"]
        say(f"{folder} has grown since {args.output_dir} began: this run goes on with the {kept:,} samples that it "
            "began with. Another --output-dir trains on all; with --finetune-from it begins at what was learnt here")
    return place


def read_inputs(args, say) -> Inputs:
    """Raises UserError when something is missing or does not fit. say: logs a line."""
    read_manifest(args.vocab_mapping_dir, "02_build_vocab")
    place = args.data_dir if args.follow else begun_with(args, args.data_dir, "hidden_states", 0, say)
    facts = wait_for_facts(args.data_dir, say) if args.follow else read_manifest(place, "03_extract")
    if facts.get("bounded"):
        raise UserError(f"{args.data_dir}: extracted in bounded mode, so most of its samples are gone. "
                        "Only the --follow run that trained on them can go on.")
    target = Target(args.verifier_path)
    if target.config["hidden_size"] != facts["hidden_size"]:
        raise UserError(f"{args.data_dir}: states of hidden size {facts['hidden_size']}, the target at "
                        f"{args.verifier_path} has {target.config['hidden_size']}.")
    draft_ids = torch.from_numpy(read_mapping(args.vocab_mapping_dir, target.config["vocab_size"]))
    layers = layer_list(facts)
    version = args.serve_sglang_version or facts["sglang_version"]
    begin_with = read_start(args, target, layers, draft_ids, version) if args.finetune_from else None
    shape = find_shape(args, target.config, len(draft_ids), len(layers), version, begin_with, say)
    ids = layer_rule(args.verifier_path, version, args.layer_id_rule).ids(layers)
    if version_numbers(version) < version_numbers(served_from(shape)):
        raise UserError(f"SGLang {version} does not serve a drafter of this kind ({len(layers)} aux states, "
                        f"{shape.layers} layers, norms {shape.aux_norm or 'none'} / output {shape.norm_output}): it "
                        f"would ignore the difference in silence. {served_from(shape)} does: name the server's with "
                        "--serve-sglang-version, or leave out --architecture, --fc-norm, --norm-before-fc, "
                        "--norm-output, --draft-layers.")
    source = {"plan": "plan.jsonl"} if args.follow else {"hidden_states": "manifest.json"}
    hashes = {**{name: sha256_file(place / file) for name, file in source.items()},
              "vocab_mapping": sha256_file(args.vocab_mapping_dir / "manifest.json"),
              "target_config": sha256_file(args.verifier_path / "config.json")}
    if begin_with:
        hashes["finetune_from"] = weights_sha256(args.finetune_from)
    index = [] if args.follow else read_index(place, facts["index_sha256"])
    config_json = draft_config(shape, target.config, ids, args.export_dtype)
    return Inputs(facts, index, target, draft_ids, shape, config_json, hashes, begin_with)


def read_start(args, target: Target, layers: list[int], draft_ids: torch.Tensor, version: str) -> Stored:
    """The drafter to start from. Raises UserError where it is fed other layers or drafts other tokens than this run's.

    args: finetune_from, data_dir, vocab_mapping_dir, layer_id_rule; draft_ids (Vd,) of that map; version: the SGLang
    that serves.
    """
    found = read_drafter(args.finetune_from, target)
    note = check_layers(found, layers, args.data_dir, target.folder, version, args.layer_id_rule)
    found.notes += [note] if note else []
    own = torch.from_numpy(found.draft_ids)
    if not torch.equal(own, draft_ids):
        shared = int(torch.isin(own, draft_ids).sum())
        raise UserError(f"{found.folder}: drafts {len(own):,} tokens, {shared:,} of them "
                        f"among the {len(draft_ids):,} of {args.vocab_mapping_dir}: another vocabulary map. Take its "
                        f"own: 02_build_vocab.py --from-drafter {found.folder}.")
    return found


def find_shape(args, target: dict, draft_vocab: int, aux_states: int, version: str, start: Stored | None, say) -> Shape:
    """The drafter's sizes and kind; what is to be known of one to start from is said. Raises UserError."""
    fresh = argparse.Namespace(**vars(args) | {"finetune_from": None, "output_dir": None})
    fill_kind(args, version)
    shape = draft_shape(args, target, draft_vocab, aux_states)
    if not start:
        return shape
    changed = differing(shape, start.shape)
    if shape.weights() != start.shape.weights():
        raise UserError(f"{start.folder}: the flags ask for another drafter than it is: {', '.join(changed)} (what it "
                        "is in brackets). Leave them out, or start without --finetune-from.")
    fill_kind(fresh, version)
    own = differing(start.shape, draft_shape(fresh, target, draft_vocab, aux_states))
    lines = [summary(start.shape), *start.notes, "of the kind and sizes of a fresh drafter of this run" if not own else
             f"not as a fresh drafter of this run would be (in brackets): {', '.join(own)}"]
    lines += [f"flags change it, so it does not begin at what it serves: {', '.join(changed)}"] if changed else []
    for line in lines:
        say(f"finetune from {start.folder} | {line}")
    return shape


class Index(Sequence):
    """index.jsonl's rows {"id", "tokens", "checksum", ...}, read when they are asked for: 8 bytes each.

    Raises UserError unless the file has the hash of the manifest. It is held open: the one that 03 puts in its place
    later is another one.
    """

    def __init__(self, path: Path, sha256: str):
        try:
            self.file = open(path, "rb")
            good = hashlib.file_digest(self.file, "sha256").hexdigest() == sha256
        except OSError:
            good = False
        if not good:
            raise UserError(f"{path}: missing, or not the one that manifest.json was written for. Run 03_extract.py "
                            "again.")
        self.file.seek(0)
        self.ends = np.cumsum(np.fromiter(map(len, self.file), np.int64))  # bytes

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, at):
        first, last, _ = at.indices(len(self)) if isinstance(at, slice) else (range(len(self))[at],) * 2 + (1,)
        if not isinstance(at, slice):
            return self[first:first + 1][0]
        if first >= last:
            return []
        begin = int(self.ends[first - 1]) if first else 0
        data = os.pread(self.file.fileno(), int(self.ends[last - 1]) - begin, begin)
        return [json.loads(line) for line in data.splitlines()]

    def __iter__(self) -> Iterator[dict]:
        return (row for start in range(0, len(self), 1000) for row in self[start:start + 1000])


def read_index(folder: Path, sha256: str) -> Index:
    return Index(folder / "index.jsonl", sha256)


def wait_for_facts(folder: Path, say) -> dict:
    """What 03 says of all its samples, as soon as it has its first one. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Start 03_extract.py first.")
    told = time.monotonic() - 25  # the first line comes soon
    while not (facts := read_facts(folder)) or not (folder / "plan.jsonl").exists():
        if time.monotonic() - told > 30:
            told = time.monotonic()
            say(f"waiting for the first sample in {folder}: 03_extract has not written one yet")
        time.sleep(0.2)
    return facts
