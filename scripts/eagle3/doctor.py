"""Why a drafter that looked trained does not hit: checks of its folder, its server and its run, each with a remedy.

A check returns None, or (finding, remedy); it raises Unchecked where something that it looks at is not there, so that
none passes for want of data.
"""
from __future__ import annotations

import contextlib

import numpy as np

from eagle3 import doctor_files as of_files
from eagle3.doctor_facts import Facts, Found, Unchecked
from eagle3.drafter_files import notes, summary
from eagle3.responses import part_files, read_jsonl
from eagle3.sglang_draft import completed
from eagle3.stage import UserError
from eagle3.states import StateFile
from eagle3.target import Target


# ---- the server, the prompts, the states ----
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
            with StateFile(path) as file:
                states = file.numbers("last_hidden_states", 0, file.header["last_hidden_states"]["shape"][0])  # (T, H)
        except (OSError, ValueError, KeyError) as why:
            facts.lacks(f"{path} is not readable ({why})")
        # y = x / rms(x) * w: whatever x was, y / w has a root mean square of 1
        sizes.append((states.double() / norm).square().mean(1).sqrt().numpy())
    rms = np.concatenate(sizes)
    if not np.allclose(rms, 1, atol=0.1):  # those in FP8 are up to 0.024 off
        return (f"last_hidden_states have a root mean square of {np.median(rms):.2f} over the final norm's weight, "
                "not 1: they were taken before the final norm, so it learned wrong targets.", "Extract again.")


# ---- the diagnosis ----
CHECKS = {"eagle_config misplaced": of_files.check_eagle_config, "capture layers": of_files.check_capture_layers,
          "head_dim": of_files.check_head_dim, "RoPE": of_files.check_rope,
          "max positions below the context": of_files.check_max_positions,
          "d2t read as ids": of_files.check_d2t_offset, "stale vocabulary map": of_files.check_vocabulary_map,
          "embedding not shared": of_files.check_embedding, "quantised draft": check_quantised,
          "final state before the norm": check_final_state, "norm flags": of_files.check_norm_flags,
          "keys that SGLang ignores": of_files.check_ignored_keys,
          "keys that SGLang refuses": of_files.check_refused_keys,
          "config.json against training": of_files.check_config, "chat template or thinking mode": check_template,
          "weights": of_files.check_weights, "weights changed since training": of_files.check_trained_weights}


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
    gap, said = None, ("No comparison with training: it needs eagle3.json's prediction for this temperature, and "
                       "answers with speculative counts from a server with topk 1 and the predicted number of draft "
                       "steps.")
    if check:
        gap, said = compare(check)
    found = f"Found: {', '.join(f['cause'] for f in findings)}." if findings else \
        "Healthy." if gap is False else "No cause found."
    return {"summary": f"{said} {found}", "gap": gap, "facts": known(facts), "findings": findings,
            "unchecked": unchecked}


def known(facts: Facts) -> list[str]:
    """What this drafter is, whoever trained it: no judgement."""
    said = [] if facts.provenance else ["no eagle3.json: another trainer's drafter, and nothing tells what it was "
                                        "trained on or what it should reach"]
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, Unchecked):
        from eagle3.drafter import read_shape  # here: it imports torch

        said += [summary(read_shape(completed(facts.config))), *notes(facts.config, facts.loaded)]
    with contextlib.suppress(KeyError, TypeError, Unchecked, UserError):
        ids = facts.eagle_config.get(of_files.LAYER_IDS)
        said.append(f"its layer ids {ids} make SGLang {facts.server['version']} feed it the states entering layers "
                    f"{of_files.served_layers(facts)}")
    return said


def compare(check: dict) -> tuple[bool | None, str]:
    """Whether there is a gap between prediction and serving (None: not to be told), and a sentence."""
    gap, (low, high) = None, check["interval"] or (check["ratio"],) * 2
    word = "other prompts, which proves neither a gap nor none"
    if check["of_validation"]:
        gap = not 0.97 <= check["ratio"] <= 1.03 and not low <= 1 <= high
        word = f"its validation samples: {'a gap' if gap else 'no gap'}"
    summary = (f"Training predicted an accept_length of {check['predicted']:.3f}, serving gives {check['served']:.3f} "
               f"on {check['answers']} answers to {word}.")
    if gap and check.get("as_long_answers", check["answers"]) < 0.9 * check["answers"]:
        others = check["answers"] - check["as_long_answers"]
        summary += (f" But {others} answers are not as long as the sample, so they are other texts "
                    "(another temperature or --max-tokens than in 01): the comparison is rough.")
    return gap, summary
