"""A target that is no Kimi: the tokens of its turns are found, its own KV heads are taken, and all five stages run on it."""
import argparse
import json
import shutil
from pathlib import Path

import pytest

from conftest import ROOT, TINY_KIMI, load_script, run_here
from eagle3.drafter import read_shape
from eagle3.figures import beyond_answer
from eagle3.inputs import draft_shape
from eagle3.prefill_server import Server
from eagle3.recipe import usual_kv_heads
from eagle3.responses import part_files, read_jsonl
from eagle3.servers import needs_patch
from eagle3.stage import UserError, read_run_file
from eagle3.tokens import Tokens, load_tokenizer
from eagle3.turn_tokens import find_turn_tokens
from test_serving import SUBJECTS, doctor, served

CHATML = ("{% for m in messages %}<|im_system|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_assistant|>assistant\n@{% endif %}")
SWITCHED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
ROLES_END_TURNS = ("{% for m in messages %}<|im_{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
                   "{% if add_generation_prompt %}<|im_assistant|>{% endif %}{# <think> #}")
TEMPLATES = {  # name: template, (stop, reasons), whether answers must hold reasoning
    "kimi": ((TINY_KIMI / "chat_template.jinja").read_text(), ("<|im_end|>", True), True),
    "no reasoning": (CHATML.replace("@", ""), ("<|im_end|>", False), False),
    "the target opens its reasoning itself": (CHATML.replace("@", SWITCHED), ("<|im_end|>", True), True),
    "a next turn ends an answer, no switch": (ROLES_END_TURNS, ("<|im_user|>", True), False)}


def target_with(folder: Path, template: str, **tokenizer_config) -> Path:
    """A folder with tiny Kimi's tokenizer and another template."""
    folder.mkdir()
    shutil.copy(TINY_KIMI / "tokenizer.json", folder)
    config = json.loads((TINY_KIMI / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | tokenizer_config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_of_a_turn_are_found_in_its_template(name, tmp_path):
    template, (stop, reasons), demanded = TEMPLATES[name]
    folder = target_with(tmp_path / "target", template)
    tokenizer = load_tokenizer(folder, False)
    found = find_turn_tokens(tokenizer, folder)
    assert (found.stop, found.think, len(found.tool)) == (stop, ["<think>", "</think>"] if reasons else [], 5 if name == "kimi" else 0)
    for thinking in (True, False):  # no mode is refused where the template does not open or close the reasoning otherwise
        tokens = Tokens(tokenizer, found.stop, found.think, found.tool, thinking)
        assert tokens.prompt_ids([{"role": "user", "content": "x"}], None)
        assert tokens.must_reason() == (thinking and demanded)


def test_the_end_of_text_token_ends_a_turn_where_engines_stop_at_that(tmp_path):
    """gpt-oss closes a turn of the past with one token and its own answer with another."""
    folder = target_with(tmp_path / "target", CHATML.replace("@", ""), eos_token="[EOT]")
    tokenizer = load_tokenizer(folder, False)
    assert find_turn_tokens(tokenizer, folder).stop == "<|im_end|>"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.convert_tokens_to_ids("[EOT]")]}))
    assert find_turn_tokens(tokenizer, folder).stop == "[EOT]"


def test_all_that_is_named_wrong_is_said_at_once():
    with pytest.raises(UserError) as caught:
        find_turn_tokens(load_tokenizer(TINY_KIMI, False), TINY_KIMI, "<|e|>", ["<a>"], ["<b>"] * 5)
    said = str(caught.value)
    assert all(word in said for word in ("<|e|>", "<a>", "<b>", "--stop-token", "--think-tokens", "--tool-tokens", "</think>")), said
    assert find_turn_tokens(load_tokenizer(TINY_KIMI, False), TINY_KIMI, think=[], tool=[]).all() == ["<|im_end|>"]


def test_kv_heads_are_the_targets_own_but_for_mla():
    kimi = json.loads((TINY_KIMI / "config.json").read_text())["text_config"]
    assert usual_kv_heads(kimi | {"num_attention_heads": 64, "num_key_value_heads": 64}, 64) == 8
    assert usual_kv_heads({"num_key_value_heads": 3}, 9) == 3 and usual_kv_heads({"num_key_value_heads": 32}, 32) == 32
    assert usual_kv_heads({"num_key_value_heads": 3}, 16) == 8 and usual_kv_heads({}, 9) == 9


def test_a_folder_goes_on_with_the_kv_heads_that_it_began_with(tmp_path):
    """Once the default was 8 for every target."""
    target = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 99,
              "max_position_embeddings": 512}
    args = argparse.Namespace(output_dir=tmp_path / "output", finetune_from=None, architecture="llama", draft_layers=1, norm_output=False, fc_norm=False,
                              norm_before_fc=False, **dict.fromkeys("num_heads num_kv_heads head_dim intermediate_size rope_theta "
                                                                    "max_position_embeddings".split()))
    assert draft_shape(args, target, 32).kv_heads == 2
    (tmp_path / "output/checkpoint-3").mkdir(parents=True)
    (tmp_path / "output/stage.json").write_text(json.dumps({"draft": {"kv_heads": 8}}))
    assert draft_shape(args, target, 32).kv_heads == 8


def test_only_a_run_that_captures_by_the_patch_patches_sglang(monkeypatch):
    monkeypatch.delenv("EAGLE3_CAPTURE_DIR", raising=False)
    servers = read_run_file(ROOT / "configs/llama-cpu.yaml")["servers"]
    extract = servers["extract"]
    assert needs_patch(servers)
    assert not needs_patch(servers | {"extract": extract | {"flags": {"forward-hooks": "[]"}}})
    assert not needs_patch(servers | {"extract": {"extends": "plain"}})


@pytest.mark.parametrize("told, advice", [({}, "sglang_patch.py apply)"), ({"model_path": "/m/llama"}, "apply --target /m/llama)"),
                                          ({"forward_hooks": [{}], "model_path": "/m"}, "PYTHONPATH")])
def test_what_03_advises_fits_the_way_in_which_the_server_captures(told, advice, monkeypatch):
    server = object.__new__(Server)
    monkeypatch.setattr(Server, "describe", lambda self, path: told)
    assert advice in server.how_to_capture()


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """The tiny Llama with random weights."""
    folder = tmp_path_factory.mktemp("target") / "tiny_llama"
    load_script("make_tiny_llama").main(["--output-dir", str(folder), "--steps", "0"])
    return folder


def run_stage(name: str, *args) -> None:
    done = run_here(name, *args)
    assert done.returncode == 0, (done.stderr, done.stdout[-2000:])


@pytest.mark.engine
def test_a_llama_from_prompts_to_a_drafter_that_serves_as_predicted(llama, engine, tmp_path):
    """No flag says that it is one. Served counts are the predicted ones, request by request; the doctor finds nothing."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"id": f"q{n}", "prompt": f"What is {subject}?"}) + "\n"
                                                    for n, subject in enumerate(SUBJECTS[:16])))
    responses, vocabulary, states, output = (tmp_path / name for name in ("responses", "vocab_mapping", "hidden_states", "output"))
    server = engine(model=llama, capture_dir=True)
    run_stage("01_generate", "--prompts", tmp_path / "prompts.jsonl", "--base-url", server.url, "--tokenizer", llama,
              "--output-dir", responses, "--max-tokens", 32, "--temperature", 0, "--top-p", 1)
    run_stage("02_build_vocab", "--data-dir", responses, "--tokenizer", llama, "--output-dir", vocabulary, "--draft-vocab-size", 512)
    special = json.loads((vocabulary / "vocab_mapping.json").read_text())["special_tokens"]
    assert list(special) == ["[EOT]"]
    run_stage("03_extract", "--data-dir", responses, "--base-url", server.url, "--output-dir", states, "--capture-dir", server.capture_dir,
              "--verify", "--verifier-path", llama)
    train = ["--verifier-path", llama, "--data-dir", states, "--vocab-mapping-dir", vocabulary, "--output-dir", output, "--epochs", 40,
             "--max-seq-len", 256, "--val-ratio", 0.5, "--batch-tokens", 256, "--num-workers", 0, "--export-dtype", "float32"]
    run_stage("04_train", *train)
    config = json.loads((output / "best/config.json").read_text())
    assert read_shape(config).kv_heads == 2 and config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert "complete already" in run_here("04_train", *train).stdout  # with the KV heads that it began with

    server = engine(model=llama, draft=output / "best")
    rows = {row["id"]: row for part in part_files(responses) for row in read_jsonl(part)}
    prediction = json.loads((output / "best/eagle3.json").read_text())["prediction"]
    assert len(prediction["samples"]) == 8 and prediction["accept_length"] > 1.1
    for name, (verify, correct) in prediction["samples"].items():
        record = {"id": name, **served(server, rows[name], 32)}
        assert (record["spec"]["verify_steps"], record["spec"]["correct_drafts"] - beyond_answer(record)) == (verify, correct), name
    found = doctor(tmp_path, output / "best", server, tmp_path / "report")
    assert found["findings"] == [] and found["gap"] is False, found
