"""The stages on a tokenizer of Kimi-K2.5's kind (tests/kimi_tokenizer): slow, byte ranks in Python, 163,840 ids, no
offsets."""
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT, load_script
from eagle3.bench_prompts import render
from eagle3.responses import Answer
from eagle3.stage import UserError
from eagle3.tokens import STOP, THINK as THINK_NAMES, TOOL, Tokens, load_tokenizer, tokenizer_hash
from test_vocab import responses

generate, vocab = load_script("01_generate"), load_script("02_build_vocab")
VT = 163840
IM_END, USER, ASSISTANT, SYSTEM, MIDDLE, THINK, END_THINK = 163586, 163587, 163588, 163594, 163601, 163606, 163607
SECTION, END_SECTION, CALL, ARGUMENT, END_CALL = range(163595, 163600)
TOOL_CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("kimi")
    subprocess.run([sys.executable, str(ROOT / "tests/kimi_tokenizer/make.py"), str(path)], check=True)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer  # here: each worker reads all files, one runs this

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def tokens(folder):
    """{thinking: 01's reader of this tokenizer}, loaded and set up as 01 does it."""
    loaded = load_tokenizer(folder, True)
    return {mode: Tokens(loaded, STOP, THINK_NAMES, TOOL, mode) for mode in (True, False)}


def test_it_is_of_kimis_kind(tokenizer):
    assert not tokenizer.is_fast and len(tokenizer) == tokenizer.vocab_size == VT
    assert "offset_mapping" not in tokenizer("text", return_offsets_mapping=True)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (163839, IM_END, 163584)
    assert tokenizer.convert_ids_to_tokens(163700) == "<|reserved_token_163700|>"
    assert len(tokenizer.encode("hello world")) < len("hello world")  # it merges


def test_any_text_and_any_bytes_come_back(tokenizer):
    rng = random.Random(0)
    texts = ["", "\n\n", " \t x  y\r\n", "naïve 中文 🙂 ½", "def f(x):\n    return {'a': [x, 1_000.5]}\n", "<think",
             "_a__b_",
             *("".join(chr(rng.choice([rng.randrange(1, 127), rng.randrange(160, 0xD800),
                                       rng.randrange(0x1F300, 0x1F600)]))
                       for _ in range(60)) for _ in range(20))]
    for text in texts:
        for ids in (tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)):
            assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False) == text
    for _ in range(50):
        piece = rng.randbytes(40)
        assert b"".join(tokenizer.bytes_of[at] for at in tokenizer.merge(piece)) == piece


def test_text_of_a_special_token_stays_text(tokens, tokenizer):
    ids = tokens[True].encode("a<|im_end|>b</think>")
    assert max(ids) < 163584 and tokenizer.decode(ids) == "a<|im_end|>b</think>"


@pytest.mark.parametrize("thinking", [True, False])
def test_a_prompt_written_out_by_hand(tokens, thinking):
    plain = tokens[thinking].encode
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"},
                {"role": "assistant", "reasoning_content": "forgotten", "content": "1"},
                {"role": "user", "content": "two"}]
    assert tokens[thinking].prompt_ids(messages, None) == [
        SYSTEM, *plain("system"), MIDDLE, *plain("be brief"), IM_END, USER, *plain("user"), MIDDLE, *plain("one"),
        IM_END,
        ASSISTANT, *plain("assistant"), MIDDLE, THINK, END_THINK, *plain("1"), IM_END,
        USER, *plain("user"), MIDDLE, *plain("two"), IM_END,
        ASSISTANT, *plain("assistant"), MIDDLE, THINK, *([] if thinking else [END_THINK])]


@pytest.mark.parametrize("thinking", [True, False])
def test_answers_come_apart_and_together_again(tokens, thinking):
    """ids -> reasoning, content, tool calls -> the same ids."""
    reader = tokens[thinking]
    prompt = reader.prompt_ids([{"role": "user", "content": "1+1"}], TOOLS)
    assert prompt[:1] == [SYSTEM]  # tools are declared first
    for content, calls, finish in (("2", [], "stop"), ("", [TOOL_CALL], "tool_calls"), ("cut o", [], "length"),
                                   ("\n 2 \n", [TOOL_CALL], "tool_calls")):
        answer = Answer(content, "so:\n\n1+1 " if thinking else None, json.loads(json.dumps(calls)), finish, None)
        ids = reader.rebuilt_ids(answer, prompt, 0)
        assert (ids[-1] == IM_END) == (finish != "length") and (END_THINK in ids) == thinking
        if calls:
            section = ids[ids.index(SECTION):]
            assert section == [SECTION, CALL, *reader.encode("functions.add:0"), ARGUMENT, *reader.encode('{"a": 1}'),
                               END_CALL, END_SECTION, IM_END]
        reasoning, text, found, flags = reader.read(prompt, ids)
        assert (reasoning, text, found, flags) == (answer.reasoning, content, calls, [])


@pytest.mark.parametrize("mode", ["on", "off"])
def test_05_renders_what_01_renders(tokens, tokenizer, mode):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"}]
    for row in ({"prompt": "q"}, {"messages": messages}):
        wanted = tokens[mode == "on"].prompt_ids(row.get("messages") or [{"role": "user", "content": row["prompt"]}],
                                                 None)
        assert render(tokenizer, row, mode) == wanted


@pytest.mark.parametrize("mode", ["on", "off"])
def test_01_writes_given_conversations_with_it(folder, tmp_path, capsys, mode):
    """Multi-turn, with tools and reasoning, through the whole of 01; no server is asked."""
    reasoning = {"reasoning_content": "add them"} if mode == "on" else {}
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", **reasoning, "content": "2"},
            {"role": "user", "content": "and with the tool?"},
            {"role": "assistant", **reasoning, "content": "", "tool_calls": [TOOL_CALL]}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "p", "messages": talk, "tools": TOOLS}) + "\n")
    generate.main(["--prompts", str(tmp_path / "prompts.jsonl"), "--answers", "given", "--tokenizer", str(folder),
                   "--trust-remote-code",
                   "--thinking", mode, "--output-dir", str(tmp_path / "out")])
    rows = [json.loads(line) for line in (tmp_path / "out/part-00000.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["p-t0", "p-t1"]
    for row in rows:
        assert row["prompt_ids"][-1] == (THINK if mode == "on" else END_THINK) and row["response_ids"][-1] == IM_END
        assert (END_THINK in row["response_ids"]) == (mode == "on") and row["ids_source"] == "rebuilt"
    assert CALL in rows[1]["response_ids"]


def test_02_counts_over_the_whole_vocabulary(folder, tmp_path):
    rng = random.Random(0)
    answers = [[rng.randrange(VT) for _ in range(200)] + [IM_END] for _ in range(40)]
    data = responses(tmp_path / "responses", answers, inputs={"tokenizer": tokenizer_hash(folder)})
    flags = ["--data-dir", str(data), "--tokenizer", str(folder), "--trust-remote-code", "--target-vocab-size", str(VT),
             "--workers", "1",
             "--draft-vocab-size", "32000", "--output-dir"]
    vocab.main([*flags, str(tmp_path / "map")])
    d2t, t2d = np.load(tmp_path / "map/d2t.npy"), np.load(tmp_path / "map/t2d.npy")
    assert t2d.shape == (VT,) and d2t.shape == (32000,) and np.array_equal(np.flatnonzero(t2d), np.arange(32000) + d2t)
    # the special ones that a target emits
    assert t2d[[THINK, END_THINK, SECTION, END_SECTION, CALL, ARGUMENT, END_CALL, IM_END]].all()
    assert t2d[[token for answer in answers for token in answer]].all()  # 8,000 of 32,000: all of them fit
    answers[3][5] = VT
    broken = responses(tmp_path / "broken", answers, inputs={"tokenizer": tokenizer_hash(folder)})
    flags[1] = str(broken)
    with pytest.raises(UserError, match="token id 163840 is outside"):
        vocab.main([*flags, str(tmp_path / "map2")])
