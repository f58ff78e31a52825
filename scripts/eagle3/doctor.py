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
from eagle3.sglang_draft import (ARCHITECTURE, MLA, MLA_SIZES, Loaded, aux_states, completed, is_known, is_mla,
                                 loaded, norms, wanted, weight_files)
from eagle3.stage import UserError, sha256_file
from eagle3.target import Target, captured_layers, text_config

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORM_TENSORS = ("fc_norm.", "input_norm.", "aux_norm_")
OF_THE_WEIGHTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                  "vocab_size", "draft_vocab_size", "rms_norm_eps", "hidden_act", "attention_bias", "bias")
Found = tuple[str, str] | None


class Unchecked(Exception):
    """A cause that cannot be tested here: what is missing."""


class Facts:
    """What the checks look at. Anything that is not there raises Unchecked with its name."""

    def __init__(self, draft_path: Path, provenance: dict, server: dict | None, run_dir: Path | None,
                 prompts: list[dict]):
        """provenance: the drafter's eagle3.json; server: what the speculative one tells. Raises UserError."""
        self.config, self.provenance = json.loads((draft_path / "config.json").read_text()), provenance
        self.folder_path, self.files = draft_path, weight_files(draft_path)
        self.tensors, self.holders = {}, {}  # shape and file of each tensor
        for path in self.files if self.files and self.files[0].suffix == ".safetensors" else ():
            try:
                with safe_open(path, "np") as file:
                    for name in file.keys():
                        self.tensors[name], self.holders[name] = file.get_slice(name).get_shape(), path
            except (OSError, SafetensorError) as why:
                raise UserError(f"--doctor: {path} is not readable ({why}). Export or copy it again.") from None
        self.prompts, self._server, self._run_dir = prompts, server, run_dir

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The tensors as this server loads them."""
        if not is_known(self.config):
            self.lacks(f"config.json names {self.config.get('architectures')}; the doctor knows {ARCHITECTURE} and "
                       f"{MLA}")
        if not self.tensors:
            self.lacks("its weights are no safetensors")
        version = (self._server or {}).get("version")
        with contextlib.suppress(UserError):  # a version without numbers: read as the newest
            return loaded(self.tensors, self.config, version)
        return loaded(self.tensors, self.config)

    @property
    def shapes(self) -> dict[str, list[int]]:
        return self.loaded.shapes

    @property
    def eagle_config(self) -> dict:
        return self.config.get("eagle_config") or {}

    @functools.cached_property
    def d2t(self) -> np.ndarray:
        """(Vd,) int64, as SGLang reads it: offsets."""
        name = next((name for name in self.tensors if "d2t" in name), None) or self.lacks("the drafter has no d2t")
        with safe_open(self.holders[name], "np") as file:
            return file.get_tensor(name).astype(np.int64)

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
    if LAYER_IDS not in json.dumps(facts.config) and "capture_layers" not in facts.provenance:
        facts.lacks(f"{where}; eagle3.json has no `capture_layers` to hold against that")
    return f"{where}.", "Put it under `eagle_config`."


def check_head_dim(facts: Facts) -> Found:
    if is_mla(facts.config):
        return None  # check_weights's case: its sizes are keys of their own
    heads, hidden = facts.config["num_attention_heads"], facts.config["hidden_size"]
    rows, given = facts.shapes["layers.0.self_attn.q_proj.weight"][0], facts.config.get("head_dim")
    if (given or hidden // heads) * heads != rows:
        said = f"says head_dim {given}" if given else f"has no head_dim, so {hidden // heads} is taken"
        return f"config.json {said}, the weights have {rows // heads} a head.", f"Write head_dim {rows // heads}."


def rope_of(config: dict) -> tuple[str, float, dict]:
    """(kind, theta, what else a scaled one hangs on) as transformers 4 or 5 write them."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = given.pop("rope_type", given.pop("type", "default"))
    theta = given.pop("rope_theta", config.get("rope_theta") or 10000)
    given.pop("type", None)
    return kind, theta, given if kind != "default" else {}


def check_rope(facts: Facts) -> Found:
    (kind, theta, rest), (old_kind, old_theta, old_rest) = map(rope_of, (facts.config, facts.trained("config")))
    if (kind, rest) != (old_kind, old_rest):
        return (f"config.json asks for {kind} RoPE {rest or ''}; the draft is trained with "
                f"{'plain' if old_kind == 'default' else old_kind} RoPE {old_rest or ''}".rstrip() + ".",
                "Remove rope_scaling." if old_kind == "default" else "Write the trained one.")
    if theta != old_theta:
        return f"rope_theta is {theta:g}, it was trained with {old_theta:g}.", f"Write rope_theta {old_theta:g}."


def check_max_positions(facts: Facts) -> Found:
    served = facts.server["context_length"] or text_config(facts.target)["max_position_embeddings"]
    has, scaling = facts.config.get("max_position_embeddings", 2048), facts.config.get("rope_scaling") or {}
    if "original_max_position_embeddings" not in scaling and scaling.get("rope_type") != "llama3":
        has = int(has * scaling.get("factor", 1))  # as SGLang's get_context_length
    if has < served:
        return (f"max_position_embeddings is {has}, the server takes contexts of {served}.",
                f"Write at least {served} (the weights do not depend on it), or serve with --context-length {has}.")


def check_embedding(facts: Facts) -> Found:
    config = facts.config
    if config.get("tie_word_embeddings") and ("lm_head.weight" in facts.tensors or "d2t" in facts.shapes):
        return "tie_word_embeddings is true: its lm_head is overwritten by the embedding.", "Write false."
    given, hidden = config.get("target_hidden_size"), config["hidden_size"]
    if given is not None and given != hidden and "embed_tokens.weight" not in facts.shapes:  # it may bring its own
        return (f"target_hidden_size {given} differs from hidden_size {hidden}, so SGLang does not share the target's "
                "embedding.", "Remove target_hidden_size.")


def check_norm_flags(facts: Facts) -> Found:
    """The norms that SGLang will compute against the tensors that are there and against training."""
    config, eagle, served = facts.config, facts.eagle_config, norms(facts.config)
    if config.get("norm_before_residual") or eagle.get("norm_before_residual"):
        return "config.json sets norm_before_residual, which SGLang ignores in silence.", "Train without it."
    lost = [key for key in ("fc_norm", "norm_output") if eagle.get(key) and not config.get(key)]
    if lost:
        return f"eagle_config sets {', '.join(lost)}, which SGLang reads at the top of config.json.", "Move it there."
    unread = [name for name in facts.loaded.dropped if any(part in name for part in NORM_TENSORS)]
    if unread:
        return (f"it holds {', '.join(unread)}, which SGLang drops: config.json does not set the flag of that norm.",
                "Set fc_norm or norm_before_fc, whichever it was trained with.")
    trained = norms(facts.trained("config"))
    return differing(served, trained)


def differing(now: dict, then: dict) -> Found:
    wrong = [f"{key} is {now[key]}, it was trained with {then[key]}" for key in now if now[key] != then[key]]
    if wrong:
        return f"config.json: {'; '.join(wrong)}.", "Write what it was trained with, as eagle3.json has it."


def check_config(facts: Facts) -> Found:
    """What the weights mean hangs on these keys."""
    now, then = ({**{key: completed(config)[key] for key in OF_THE_WEIGHTS}, "aux states": aux_states(config),
                  "architectures": config.get("architectures"), **mla_keys(config)}
                 for config in (facts.config, facts.trained("config")))
    return differing(now, then)


def mla_keys(config: dict) -> dict:
    """What multi-head latent attention hangs on: its sizes, and whether rotated columns lie in pairs."""
    if not is_mla(config):
        return dict.fromkeys((*MLA_SIZES, "rope_interleave"))
    return {**{key: config.get(key) for key in MLA_SIZES}, "rope_interleave": config.get("rope_interleave", True)}


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


def has_whole_vocabulary(facts: Facts) -> bool:
    """Whether it needs no map: it drafts any token of the target's."""
    return "d2t" not in facts.shapes and "d2t" not in wanted(facts.config) and "d2t_sha256" not in facts.provenance


def check_d2t_offset(facts: Facts) -> Found:
    if has_whole_vocabulary(facts):
        return None
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
    if has_whole_vocabulary(facts):
        return None
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
    """Whether every parameter is filled, by a tensor of its shape."""
    if facts.config.get("quantization_config"):
        facts.lacks("its weights are quantised")
    if "draft_vocab_size" not in facts.config and not facts.config.get("tie_word_embeddings"):
        return "config.json has no draft_vocab_size, without which SGLang does not start.", \
            "Write it; null where the draft has the target's whole vocabulary."
    found = facts.loaded
    unknown = [name for name in found.dropped if not any(part in name for part in NORM_TENSORS)]
    if found.missing or unknown:
        return (f"missing {found.missing}, unknown {unknown}: SGLang drops unknown names and leaves missing weights as "
                "they come, in silence.", "Export again.")
    # head_dim and target_hidden_size have checks of their own
    config = dict(facts.config)
    if not is_mla(config):
        config["head_dim"] = found.shapes["layers.0.self_attn.q_proj.weight"][0] // config["num_attention_heads"]
    if check_embedding(facts):
        config.pop("target_hidden_size", None)
    wrong = [f"{name} is {found.shapes[name]}, config.json asks for {shape}"
             for name, shape in wanted(config).items() if found.shapes[name] != shape]
    whole = [config["vocab_size"]]
    if config.get("draft_vocab_size") is None and not wrong and found.shapes.get("d2t", whole) != whole:
        wrong = [f"d2t has {found.shapes['d2t'][0]} rows, and without draft_vocab_size SGLang gives the draft the "
                 "target's whole lm_head"]
    if wrong:
        return f"{'; '.join(wrong)}.", "Mend config.json, or export again."


def check_trained_weights(facts: Facts) -> Found:
    """The bytes that 04 exported."""
    known = facts.trained("weights_sha256")
    if len(facts.files) != 1 or sha256_file(facts.files[0]) != known:
        return (f"{', '.join(path.name for path in facts.files)} is not the file that training exported (sha256 "
                f"{known[:12]}...): changed since, or copied from another checkpoint.", "Copy or export it again.")


# ---- the diagnosis ----
CHECKS = {"eagle_config misplaced": check_eagle_config, "capture layers": check_capture_layers,
          "head_dim": check_head_dim, "RoPE": check_rope, "max positions below the context": check_max_positions,
          "d2t read as ids": check_d2t_offset, "stale vocabulary map": check_vocabulary_map,
          "embedding not shared": check_embedding, "quantised draft": check_quantised,
          "final state before the norm": check_final_state, "norm flags": check_norm_flags,
          "config.json against training": check_config, "chat template or thinking mode": check_template,
          "weights": check_weights, "weights changed since training": check_trained_weights}


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
