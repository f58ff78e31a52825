"""Why a drafter that looked trained does not hit: checks of its folder, its server and its run, each with a remedy.

A check returns None, or (finding, remedy); it raises Unchecked where something that it looks at is not there, so that
none passes for want of data.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from pathlib import Path
from typing import NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

from eagle3.responses import part_files, read_jsonl
from eagle3.stage import UserError
from eagle3.target import Target, captured_layers, text_config

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
HARMLESS = {"t2d", "embed_tokens.weight"}  # tensors that other exporters add, and SGLang takes or leaves
Found = tuple[str, str] | None


class Unchecked(Exception):
    """A cause that cannot be tested here: what is missing."""


class Facts:
    """What the checks look at. Anything that is not there raises Unchecked with its name."""

    def __init__(self, draft_path: Path, provenance: dict, server: dict | None, run_dir: Path | None,
                 prompts: list[dict]):
        """provenance: the drafter's eagle3.json; server: what the speculative one tells. Raises UserError."""
        self.config, self.provenance = json.loads((draft_path / "config.json").read_text()), provenance
        self.weights = draft_path / "model.safetensors"
        try:
            with safe_open(self.weights, "np") as file:
                self.shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
        except (OSError, SafetensorError) as why:
            raise UserError(f"--doctor: {self.weights} is not readable ({why}). Export or copy it again.") from None
        self.prompts, self._server, self._run_dir = prompts, server, run_dir

    @property
    def eagle_config(self) -> dict:
        return self.config.get("eagle_config") or {}

    @functools.cached_property
    def d2t(self) -> np.ndarray:
        """(Vd,) int64, as SGLang reads it: offsets."""
        if "d2t" not in self.shapes:
            self.lacks("the drafter has no d2t")
        with safe_open(self.weights, "np") as file:
            return file.get_tensor("d2t")

    @property
    def server(self) -> dict:
        return self._server or self.lacks("the speculative server has not been reached")

    @property
    def target(self) -> Path:
        path = Path(self.server["model_path"])
        return path if (path / "config.json").is_file() else \
            self.lacks(f"the target's folder {path} is not on this machine")

    def trained(self, key: str):
        return self.provenance[key] if key in self.provenance else self.lacks(f"eagle3.json has no `{key}`")

    def folder(self, name: str) -> Path:
        path = self._run_dir / name if self._run_dir else None
        return path if path and path.is_dir() else \
            self.lacks(f"{path or name + '/'} is not there: name its run with --run-dir")

    @staticmethod
    def lacks(why: str) -> NoReturn:
        raise Unchecked(why)


# ---- config.json ----
def served_layers(facts: Facts) -> list[int]:
    """The layers whose input this server hands to the draft, ascending: the model meets them in its own order."""
    ids = facts.eagle_config.get(LAYER_IDS)
    if ids is None:
        return captured_layers(None, "", text_config(facts.target)["num_hidden_layers"])
    try:
        return sorted(captured_layers(ids, facts.server["version"]))
    except UserError:
        facts.lacks(f"the server calls itself SGLang {facts.server['version']}, and ids mean layers by version")


def check_capture_layers(facts: Facts) -> Found:
    if not facts.eagle_config.get("use_aux_hidden_state", True):
        return "eagle_config.use_aux_hidden_state is false, so the draft is fed the final state and skips fc.", \
            "Write true."
    if LAYER_IDS not in facts.eagle_config:
        return None  # check_eagle_config's case
    served, trained = served_layers(facts), facts.trained("capture_layers")
    if served != trained:
        return (f"SGLang {facts.server['version']} feeds it layers {served}, it was trained on {trained}.",
                f"Export for this version (04_train.py --serve-sglang-version {facts.server['version']}).")


def check_eagle_config(facts: Facts) -> Found:
    if LAYER_IDS in facts.eagle_config:
        return None
    where = f"`{LAYER_IDS}` stands in config.json where SGLang ignores it" \
        if LAYER_IDS in json.dumps(facts.config) else f"config.json has no `{LAYER_IDS}`"
    with contextlib.suppress(Unchecked):
        if served_layers(facts) == facts.trained("capture_layers"):
            return None  # the defaults are the trained layers
        where += f", so the default layers {served_layers(facts)} are fed"
    return f"{where}.", "Put it under `eagle_config`."


def check_head_dim(facts: Facts) -> Found:
    heads, hidden = facts.config["num_attention_heads"], facts.config["hidden_size"]
    rows, given = facts.shapes["midlayer.self_attn.q_proj.weight"][0], facts.config.get("head_dim")
    if (given or hidden // heads) * heads != rows:
        said = f"says head_dim {given}" if given else f"has no head_dim, so {hidden // heads} is taken"
        return f"config.json {said}, the weights have {rows // heads} a head.", f"Write head_dim {rows // heads}."


def check_rope(facts: Facts) -> Found:
    config = facts.config
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000))
    if kind != "default":
        return f"config.json asks for {kind} RoPE; the draft is trained with plain RoPE.", "Remove rope_scaling."
    trained = facts.trained("config").get("rope_theta", 10000)
    if theta != trained:
        return f"rope_theta is {theta:g}, it was trained with {trained:g}.", f"Write rope_theta {trained:g}."


def check_max_positions(facts: Facts) -> Found:
    served = facts.server["context_length"] or text_config(facts.target)["max_position_embeddings"]
    has = facts.config.get("max_position_embeddings", 2048)  # transformers' default
    if has < served:
        return (f"max_position_embeddings is {has}, the server takes contexts of {served}.",
                f"Write at least {served} (the weights do not depend on it), or serve with --context-length {has}.")


def check_embedding(facts: Facts) -> Found:
    if facts.config.get("tie_word_embeddings"):
        return "tie_word_embeddings is true: its lm_head is overwritten by the embedding.", "Write false."
    given, hidden = facts.config.get("target_hidden_size"), facts.config["hidden_size"]
    if given is not None and given != hidden:
        return (f"target_hidden_size {given} differs from hidden_size {hidden}, so SGLang does not share the target's "
                "embedding.", "Remove target_hidden_size.")


def check_norm_flags(facts: Facts) -> Found:
    found = [key for key in ("norm_output", "norm_before_fc", "norm_before_residual")
             if facts.config.get(key) or facts.eagle_config.get(key)]
    if found:
        return f"config.json sets {', '.join(found)}; the draft is trained without.", "Remove it."


# ---- the vocabulary map ----
def run_map(facts: Facts) -> np.ndarray:
    """(Vd,) the run's own offsets."""
    path = facts.folder("vocab_mapping") / "d2t.npy"
    return np.load(path) if path.is_file() else facts.lacks(f"{path} is not there")


def is_trained_map(facts: Facts, d2t: np.ndarray) -> bool:
    """Whether it was trained with these offsets: by their hash in eagle3.json, else by the run's vocab_mapping."""
    known = facts.provenance.get("d2t_sha256")
    if known:
        return hashlib.sha256(d2t.astype("<i8").tobytes()).hexdigest() == known
    return np.array_equal(d2t, run_map(facts))


def check_d2t_offset(facts: Facts) -> Found:
    d2t, remedy = facts.d2t, "Store offsets: d2t[i] = target_id - i."
    ids = d2t + np.arange(len(d2t))  # what SGLang reads
    with contextlib.suppress(Unchecked):
        if is_trained_map(facts, d2t):
            return None
        if is_trained_map(facts, d2t - np.arange(len(d2t))):
            return "d2t holds target ids; SGLang adds the draft id to each, so every token is shifted.", remedy
    unordered = (np.diff(ids) < 1).any()
    if ids.max() >= facts.config["vocab_size"] or unordered:
        return (f"read as offsets, as SGLang does, d2t leads to ids up to {ids.max()} of {facts.config['vocab_size']}, "
                f"{'not ' if unordered else ''}in ascending order.", remedy)


def check_vocabulary_map(facts: Facts) -> Found:
    d2t = facts.d2t
    if check_d2t_offset(facts) or is_trained_map(facts, d2t):
        return None  # the first is check_d2t_offset's case
    if facts.provenance.get("d2t_sha256"):
        return "its d2t is not the one it was trained with.", "Export again."
    truth = run_map(facts)
    same = np.isin(d2t + np.arange(len(d2t)), truth + np.arange(len(truth))).mean()
    return (f"its d2t ({len(d2t)} tokens) is not the run's vocab_mapping ({len(truth)} tokens; "
            f"{same:.0%} of the drafter's are in it).",
            "Train and export with one map, or name the drafter's own run with --run-dir.")


# ---- the server, the prompts, the states, the weights ----
def check_quantised(facts: Facts) -> Found:
    told = facts.server["speculative_draft_model_quantization"]
    if told and not facts.config.get("quantization_config"):
        return (f"the server quantises the draft ({told}), inherited from the target's flag.",
                "Serve with --speculative-draft-model-quantization unquant.")


def check_template(facts: Facts) -> Found:
    """Two tokens tell the mode: Kimi's thinking prompts end in <think>, the instant ones in <think></think>."""
    parts = part_files(facts.folder("responses")) or facts.lacks("responses/ holds no part-*.jsonl")
    ends, unseen = set(), {tuple(prompt["prompt_ids"][-2:]) for prompt in facts.prompts}
    for part in parts:  # all of them: the rows may be in the order of their ids, one mode after the other
        for row in read_jsonl(part):
            end = tuple(row["prompt_ids"][-2:])
            ends.add(end)
            unseen.discard(end)
            if not unseen:
                return None
    odd = [prompt["prompt_ids"][-2:] for prompt in facts.prompts if tuple(prompt["prompt_ids"][-2:]) in unseen]
    return (f"{len(odd)} of {len(facts.prompts)} prompts end in tokens {odd[0]}, the training prompts in "
            f"{', '.join(map(str, map(list, sorted(ends)[:3])))}.",
            "Use the training data's --thinking mode and chat template.")


def check_final_state(facts: Facts) -> Found:
    try:
        norm = Target(facts.target).final_norm()  # (H,)
    except UserError as why:
        facts.lacks(str(why))
    if norm is None:
        facts.lacks("no model.norm.weight in the target")
    files = sorted(facts.folder("hidden_states").glob("*/*.safetensors"))[:4] or \
        facts.lacks("hidden_states/ holds no samples")
    sizes = []
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                states = file.get_tensor("last_hidden_states").double()  # (T, H)
        except (OSError, SafetensorError) as why:
            facts.lacks(f"{path} is not readable ({why})")
        # y = x / rms(x) * w: whatever x was, y / w has a root mean square of 1
        sizes.append((states / norm).square().mean(1).sqrt().numpy())
    rms = np.concatenate(sizes)
    if not np.allclose(rms, 1, atol=0.05):
        return (f"last_hidden_states have a root mean square of {np.median(rms):.2f} over the final norm's weight, "
                "not 1: they were taken before the final norm, so it learned wrong targets.", "Extract again.")


def check_weights(facts: Facts) -> Found:
    from eagle3.drafter import exported_names, read_shape  # here: it imports torch
    wanted = exported_names(read_shape(facts.config))
    missing, unknown = sorted(wanted - set(facts.shapes)), sorted(set(facts.shapes) - wanted - HARMLESS)
    if missing or unknown:
        return (f"missing {missing}, unknown {unknown}: SGLang drops unknown names and leaves missing weights as they "
                "come, in silence.", "Export again.")
    config, rows = facts.config, {name: shape[0] for name, shape in facts.shapes.items()}
    head_dim = rows["midlayer.self_attn.q_proj.weight"] // config["num_attention_heads"]
    wanted = {"midlayer.self_attn.k_proj.weight": ("num_key_value_heads", head_dim),
              "midlayer.mlp.gate_proj.weight": ("intermediate_size", 1), "fc.weight": ("hidden_size", 1),
              "lm_head.weight": ("draft_vocab_size", 1), "d2t": ("draft_vocab_size", 1)}
    wrong = [f"{name} has {rows[name]} rows, {key} is {config[key]}"
             for name, (key, each) in wanted.items() if rows[name] != config[key] * each]
    if wrong:
        return f"{'; '.join(wrong)}.", "Mend config.json, or export again."


# ---- the diagnosis ----
CHECKS = {"eagle_config misplaced": check_eagle_config, "capture layers": check_capture_layers,
          "head_dim": check_head_dim, "RoPE": check_rope, "max positions below the context": check_max_positions,
          "d2t read as ids": check_d2t_offset, "stale vocabulary map": check_vocabulary_map,
          "embedding not shared": check_embedding, "quantised draft": check_quantised,
          "final state before the norm": check_final_state, "norm flags": check_norm_flags,
          "chat template or thinking mode": check_template, "weights": check_weights}


def examine(facts: Facts) -> tuple[list[dict], dict[str, str]]:
    """(findings, what could not be checked and why)."""
    findings, unchecked = [], {}
    for cause, check in CHECKS.items():
        try:
            found = check(facts)
        except Unchecked as why:
            unchecked[cause] = str(why)
            continue
        except (KeyError, TypeError) as error:  # a key of config.json, a weight, or what this server does not tell
            unchecked[cause] = f"what it looks at is missing ({error})"
            continue
        if found:
            findings.append({"cause": cause, "finding": found[0], "remedy": found[1]})
    return findings, unchecked


def diagnose(facts: Facts, accept: dict | None, check: dict | None) -> dict:
    """The doctor's chapter of the report: does serving fall behind training's prediction, and which cause explains it?

    accept: figures.acceptance, check: figures.prediction_check of what was served; None where nothing was yet.
    """
    findings, unchecked = examine(facts)
    if accept and accept["correct_drafts"] == 0 and not findings:
        findings.append({"cause": "accept_length exactly 1.00",
                         "finding": f"not one draft was right in {accept['verify_steps']} verify steps, "
                                    "and no listed cause explains it.",
                         "remedy": "If training's own cond_acc was good, compare one drafted token by hand."})
    gap, summary = None, ("No comparison with training: it needs eagle3.json's prediction, temperature 0, and answers "
                          "with speculative counts from a server with topk 1 and the predicted number of draft steps.")
    if check:
        gap, summary = compare(check)
    found = f"Found: {', '.join(f['cause'] for f in findings)}." if findings else \
        "Healthy." if gap is False else "No cause found."
    return {"summary": f"{summary} {found}", "gap": gap, "findings": findings, "unchecked": unchecked}


def compare(check: dict) -> tuple[bool | None, str]:
    """Whether there is a gap between prediction and serving (None: not to be told), and a sentence."""
    gap, (low, high) = None, check["interval"] or (check["ratio"],) * 2
    word = "other prompts, which proves neither a gap nor none"
    if check["of_validation"]:
        gap = not 0.97 <= check["ratio"] <= 1.03 and not low <= 1 <= high
        word = f"its validation samples: {'a gap' if gap else 'no gap'}"
    summary = (f"Training predicted an accept_length of {check['predicted']:.3f}, serving gives {check['served']:.3f} "
               f"on {check['answers']} answers to {word}.")
    if gap and check["as_long_answers"] < 0.9 * check["answers"]:
        others = check["answers"] - check["as_long_answers"]
        summary += (f" But {others} answers are not as long as the sample, so they are other texts "
                    "(another temperature or --max-tokens than in 01): the comparison is rough.")
    return gap, summary
