"""05 at a temperature above 0: training's expectation beside what was served, and what SGLang refuses or serves instead."""
import json

import numpy as np
import pytest

from eagle3.sampled_serving import check_rejection_sampling, sampled_check, sampled_sentence
from eagle3.sampling import Sampling, expectation
from eagle3.stage import UserError

CHAIN = {"speculative_num_steps": 2, "speculative_eagle_topk": 1}
SUMS = {f"p{n}": [10, 6, 3, 6.0, 3.0] for n in range(6)}  # of 10 verify steps 6 and 3 have 1 and 2 drafts: 1.9
PREDICTION = {"accept_length": 2.5, "num_steps": 2, "samples": {}, "sampled": [expectation(Sampling(1.0), SUMS)]}


def record(name, verify=20, correct=18, tokens=38):
    return {"id": name, "completion_tokens": tokens, "spec": {"verify_steps": verify, "correct_drafts": correct, "histogram": [8, 6, 6]}}


def test_expected_and_served_on_the_same_prompts():
    """Served 0.9 drafts a step, as expected; of two answers to a prompt both count, and one of another prompt does not."""
    records = [record(f"p{n}") for n in range(6)] * 2 + [record("other", 10, 0, 10)]
    check, note = sampled_check(PREDICTION, records, CHAIN, Sampling(1.0), (0.1, 0.1))
    assert note is None and check["predicted"] == pytest.approx(1.9) and check["served"] == pytest.approx(1.9)
    assert (check["answers"], check["verify_steps"], check["of_validation"]) == (12, 240, True)
    assert check["interval"] == pytest.approx([1, 1]) and check["predicted_by_position"] == pytest.approx([0.6, 0.3])
    said = sampled_sentence(check)
    assert "At temperature 1 training expected 1.900, served 1.900 in 240 verify steps of 12 answers to its validation samples" in said
    assert "not drawn so" not in said and "drawn so: the expectation is rough" in sampled_sentence(check | {"text_fits": False})


def test_drafts_behind_the_end_do_not_count_and_prompts_weigh_by_their_steps():
    records = [record("p0", 10, 9, 18), record("p1", 30, 5, 35)]
    check, _ = sampled_check(PREDICTION, records, CHAIN, Sampling(1.0), (None, None))
    assert check["served"] == pytest.approx(1 + (9 - 1 + 5) / 40) and check["interval"] is None
    others, _ = sampled_check(PREDICTION, [record("x")], CHAIN, Sampling(1.0), (None, None))
    assert not others["of_validation"] and others["predicted"] == pytest.approx(1.9) and "other prompts" in sampled_sentence(others)


@pytest.mark.parametrize("setting, server, repeated, said", [
    (Sampling(0.6), CHAIN, (0, 0), "no prediction for temperature 0.6 in eagle3.json (there: temperature 1). 04 --temperature 0.6 makes one"),
    (Sampling(1.0, 0.9), CHAIN, (0, 0), "no prediction for temperature 1, top-p 0.9"),
    (Sampling(1.0), CHAIN | {"speculative_num_steps": 3}, (0, 0), "topk 1 and 2 draft steps, the server has topk 1 and 3"),
    (Sampling(1.0), CHAIN | {"speculative_eagle_topk": 4}, (0, 0), "the server has topk 4"),
    (Sampling(1.0), CHAIN, (1.0, 0.05), "word for word (plain: 5% of them): served instead is the argmax"),
    (Sampling(1.0), CHAIN, (1.0, None), "served instead is the argmax"),
    (Sampling(1.0), CHAIN | {"speculative_use_rejection_sampling": True}, (0, 0), "rejection sampling"),
    (Sampling(1.0), CHAIN | {"speculative_accept_threshold_acc": 0.5}, (0, 0), "accept thresholds None and 0.5")])
def test_why_nothing_is_compared(setting, server, repeated, said):
    check, note = sampled_check(PREDICTION, [record("p0")], server, setting, repeated)
    assert check is None and said in note


def test_where_there_is_nothing_to_say():
    for prediction, records in ((None, [record("p0")]), (PREDICTION, [{"id": "p0", "completion_tokens": 3, "spec": None}])):
        assert sampled_check(prediction, records, CHAIN, Sampling(1.0), (1.0, 1.0)) == (None, None)  # a short answer repeats itself, plain too
    server = CHAIN | {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0, "speculative_use_rejection_sampling": False}
    assert sampled_check(PREDICTION, [record("p0")], server, Sampling(1.0), (None, None))[0]


def test_the_interval_holds_what_prompts_differ_by():
    records = [record(f"p{n}", 20, 12 + 2 * n, 60) for n in range(6)]
    check, _ = sampled_check(PREDICTION, records, CHAIN, Sampling(1.0), (None, None))
    assert check["interval"][0] < check["ratio"] < check["interval"][1] and np.diff(check["interval"]) > 0.05


def test_rejection_sampling_is_refused_before_the_target_is_loaded(tmp_path):
    for name, config in (("target", {"vocab_size": 2048}), ("draft", {"draft_vocab_size": 1024}), ("whole", {"draft_vocab_size": None})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    flag = ["serve", "--speculative-use-rejection-sampling"]
    with pytest.raises(UserError, match="1,024 of the target's 2,048 tokens. Leave it out: served instead is target-only sampling"):
        check_rejection_sampling(flag, str(tmp_path / "target"), str(tmp_path / "draft"))
    check_rejection_sampling(flag, str(tmp_path / "target"), str(tmp_path / "whole"))
    check_rejection_sampling(["serve"], str(tmp_path / "target"), str(tmp_path / "draft"))
    check_rejection_sampling(flag, "some/hub-name", str(tmp_path / "draft"))
