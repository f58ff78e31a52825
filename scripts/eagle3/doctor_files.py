"""The doctor's checks of a drafter's folder: config.json, tensors, vocabulary map. What a check returns: doctor.py."""
from __future__ import annotations

import contextlib
import hashlib
import json

import numpy as np

from eagle3.doctor_facts import Facts, Found, Unchecked
from eagle3.drafter_files import weight_files
from eagle3.rope import given_rope, rope_of
from eagle3.sglang_draft import (LAYER_IDS, MLA_SIZES, aux_states, completed, ignored, is_mla, misshapen, norms,
                                 wanted)
from eagle3.stage import UserError, sha256_file
from eagle3.target import layer_rule, text_config

NORM_TENSORS = ("fc_norm.", "input_norm.", "aux_norm_")
OF_THE_WEIGHTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                  "vocab_size", "draft_vocab_size", "rms_norm_eps", "hidden_act", "attention_bias", "bias")


# ---- config.json ----
def served_layers(facts: Facts) -> list[int]:
    """The layers whose input this server hands to the draft, ascending: the model meets them in its own order."""
    return fed_by(facts, facts.eagle_config.get(LAYER_IDS))


def fed_by(facts: Facts, ids: list[int] | None) -> list[int]:
    """The layers that these ids stand for, ascending."""
    try:
        rule = layer_rule(facts.target, facts.server["version"], facts.provenance.get("layer_id_rule"))
        return sorted(rule.captured(ids))
    except UserError as why:
        facts.lacks(f"the server calls itself SGLang {facts.server['version']}: {why}")


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
        if misplaced := facts.config.get(LAYER_IDS):
            if fed_by(facts, misplaced) == served_layers(facts):
                return None  # they are SGLang's own
        if served_layers(facts) == facts.provenance.get("capture_layers"):
            return None  # the defaults are the trained layers
        where += f", so the default layers {served_layers(facts)} are fed"
    if LAYER_IDS not in json.dumps(facts.config) and "capture_layers" not in facts.provenance:
        facts.lacks(f"{where}; eagle3.json has no `capture_layers` to hold against that")
    return f"{where}.", "Put it under `eagle_config`."


def check_head_dim(facts: Facts) -> Found:
    if is_mla(facts.config):
        return None  # check_weights' case: its sizes are keys of their own
    heads, hidden = facts.config["num_attention_heads"], facts.config["hidden_size"]
    rows, given = facts.shapes["layers.0.self_attn.q_proj.weight"][0], facts.config.get("head_dim")
    if (given or hidden // heads) * heads != rows:
        said = f"says head_dim {given}" if given else f"has no head_dim, so {hidden // heads} is taken"
        return f"config.json {said}, the weights have {rows // heads} a head.", f"Write head_dim {rows // heads}."


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
    has, scaling = facts.config.get("max_position_embeddings", 2048), given_rope(facts.config)
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
    if ignored(facts.config):
        return None  # check_ignored_keys' case
    unread = [name for name in facts.loaded.dropped if any(part in name for part in NORM_TENSORS)]
    if unread:
        return (f"it holds {', '.join(unread)}, which SGLang drops: config.json does not set the flag of that norm.",
                "Set fc_norm or norm_before_fc, whichever it was trained with.")
    return differing(norms(facts.config), norms(facts.trained("config")))


def check_ignored_keys(facts: Facts) -> Found:
    if lost := ignored(facts.config):
        return (f"config.json sets {', '.join(lost)}, which SGLang ignores in silence.",
                "Train without it, or write it where SGLang looks.")


def check_refused_keys(facts: Facts) -> Found:
    """What a server does not start with."""
    config = facts.config
    if "draft_vocab_size" not in config and not config.get("tie_word_embeddings"):
        return "config.json has no draft_vocab_size, without which SGLang does not start.", \
            "Write it; null where the draft has the target's whole vocabulary."
    if config.get("target_hidden_size", 0) is None:
        return "target_hidden_size is null, with which SGLang does not start.", "Remove it."


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


def check_weights(facts: Facts) -> Found:
    """Whether every parameter is filled, by a tensor of its shape."""
    if facts.config.get("quantization_config"):
        facts.lacks("its weights are quantised")
    if check_refused_keys(facts):
        return None  # its own case
    found = facts.loaded
    unknown = [name for name in found.dropped if not any(part in name for part in NORM_TENSORS)]
    if found.missing or unknown:
        return (f"missing {found.missing}, unknown {unknown}: SGLang drops unknown names and leaves missing weights as "
                "they come, in silence.", "Export again.")
    if found.twice:
        return f"two tensors fill each of {found.twice}: the one that SGLang reads last counts.", "Export again."
    # head_dim and target_hidden_size have checks of their own
    config = dict(facts.config)
    if not is_mla(config):
        config["head_dim"] = found.shapes["layers.0.self_attn.q_proj.weight"][0] // config["num_attention_heads"]
    if check_embedding(facts):
        config.pop("target_hidden_size", None)
    wrong = misshapen(found, config)
    if wrong:
        return f"{'; '.join(wrong)}.", "Mend config.json, or export again."


def check_trained_weights(facts: Facts) -> Found:
    """The bytes that 04 exported."""
    known = facts.trained("weights_sha256")
    files = weight_files(facts.files.folder)
    if len(files) != 1 or sha256_file(files[0]) != known:
        return (f"{', '.join(path.name for path in files)} is not the file that training exported (sha256 "
                f"{known[:12]}...): changed since, or copied from another checkpoint.", "Copy or export it again.")


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
