"""05 at a temperature above 0: what SGLang refuses or does instead, and training's expectation beside what was served.

What its verify does: sampling.py.
"""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from eagle3.figures import acceptance, beyond_answer, resampled
from eagle3.sampling import Sampling, by_position, expected_length
from eagle3.stage import UserError
from eagle3.target import text_config

REJECTION = "--speculative-use-rejection-sampling"
WARM = 0.5  # a temperature at which no server would repeat its answers by chance


# ---- before anything is served ----
def check_rejection_sampling(argv: list[str], target: str, draft: str) -> None:
    """Of the command that starts a server. Raises UserError where SGLang would refuse it after loading the target."""
    if REJECTION not in argv or not all((Path(folder) / "config.json").is_file() for folder in (target, draft)):
        return
    vocabulary = text_config(Path(target))["vocab_size"]
    drafted = json.loads((Path(draft) / "config.json").read_text()).get("draft_vocab_size") or vocabulary
    if drafted != vocabulary:
        raise UserError(f"servers.speculative: SGLang refuses {REJECTION} for a drafter of {drafted:,} of the target's "
                        f"{vocabulary:,} tokens. Leave it out: served instead is target-only sampling, where the "
                        "drafter's likeliest token counts with the target's own probability of it (04 --temperature "
                        "predicts that).")


# ---- what was served ----
def sampled_check(prediction: dict | None, records: list[dict], server: dict, setting: Sampling,
                  repeated: tuple[float | None, float | None]) -> tuple[dict | None, str | None]:
    """(training's expectation beside the served accept_length, or None; why there is none, in a sentence, or None).

    On the validation samples among `records`, else on all. The answers are other ones than training's, several to a
    prompt where there were several runs. repeated: the shares of answers that this server, and the plain one, give
    again in another run.
    """
    entry = next((entry for entry in (prediction or {}).get("sampled") or ()
                  if Sampling(entry["temperature"], entry["top_p"]) == setting), None)
    counted = [record for record in records if record.get("spec")]
    same = [record for record in counted if entry and record["id"] in entry["samples"]]
    served = acceptance(same or counted)
    note = served_instead(setting, server, repeated) or not_foretold(setting, prediction, entry, server)
    if note or not entry or not served:
        return None, note
    total, sums = np.sum(list(entry["samples"].values()), 0), {}
    for record in same or counted:
        here = record["spec"]["verify_steps"], record["spec"]["correct_drafts"] - beyond_answer(record)
        row = np.array([*here, *(entry["samples"][record["id"]] if same else total)], float)
        sums[record["id"]] = sums.get(record["id"], 0) + row
    values = np.stack(list(sums.values()))
    predicted, value = float(expected_length(values.sum(0)[2:])), served["accept_length_in_answer"]
    return {"predicted": predicted, "served": value, "ratio": value / predicted, "answers": len(same or counted),
            "of_validation": bool(same), "verify_steps": served["verify_steps"],
            "interval": resampled(values, lambda s: (1 + s[1] / s[0]) / expected_length(s[2:])),  # of the ratio
            "temperature": setting.temperature, "top_p": setting.top_p, "text_fits": entry["text_fits"],
            "predicted_by_position": by_position(values.sum(0)[2:]).tolist(),
            "served_by_position": served["accept_by_position"]}, None


def served_instead(setting: Sampling, server: dict, repeated: tuple[float | None, float | None]) -> str | None:
    """A sentence, where this server does not verify as sampling.py has it."""
    own, usual = repeated
    if own == 1 and (setting.temperature >= WARM if usual is None else usual < 0.9):
        return (f"asked at {setting}, it repeats its own answers word for word"
                + (f" (plain: {usual:.0%} of them)" if usual is not None else "")
                + ": served instead is the argmax, as SGLang verifies on a CPU, an XPU and, without rejection "
                "sampling, an AMD GPU. Its acceptance is that of greedy serving.")
    if server.get("speculative_use_rejection_sampling"):
        return ("served by rejection sampling, which accepts a draft with sum min(p, q): 04 predicts target-only "
                "sampling.")
    thresholds = [server.get(f"speculative_accept_threshold_{name}") for name in ("single", "acc")]
    if any(threshold not in (None, 1, 1.0) for threshold in thresholds):
        return (f"served with accept thresholds {thresholds[0]} and {thresholds[1]}, which accept more than the "
                "target's own sampling and change the answers: nothing is predicted for them.")
    return None


def not_foretold(setting: Sampling, prediction: dict | None, entry: dict | None, server: dict) -> str | None:
    """Why training's expectation is not about this; None where it is."""
    if not prediction:
        return None  # another trainer's drafter, or none was named
    if not entry:
        told = [str(Sampling(own["temperature"], own["top_p"])) for own in prediction.get("sampled") or ()]
        return (f"no prediction for {setting} in eagle3.json" + (f" (there: {'; '.join(told)})" if told else "")
                + f". 04 --temperature {setting.temperature:g} makes one.")
    steps, topk = server.get("speculative_num_steps"), server.get("speculative_eagle_topk")
    if (steps, topk) != (entry["num_steps"], 1):
        return (f"the prediction is for topk 1 and {entry['num_steps']} draft steps, the server has topk {topk} and "
                f"{steps}: nothing is compared.")
    return None


def sampled_sentence(check: dict) -> str:
    """Of sampled_check."""
    whose = "its validation samples" if check["of_validation"] else "other prompts than its validation samples"
    interval = " (95 % interval {:.3f} to {:.3f})".format(*check["interval"]) if check["interval"] else ""
    return (f"At {Sampling(check['temperature'], check['top_p'])} training expected {check['predicted']:.3f}, served "
            f"{check['served']:.3f} in {check['verify_steps']:,} verify steps of {check['answers']} answers to "
            f"{whose}, drafts beyond the end of an answer left out: ratio {check['ratio']:.3f}{interval}."
            + ("" if check["text_fits"] else " Training's own answers were not drawn so: the expectation is rough."))
