"""What broke other tools, tried on 01 and 02: marks in texts, inputs lost in silence, limits, proxies, keys."""
import json
import os
import random
import resource
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from api_server import ApiServer, Reply, chat
from conftest import ROOT, TINY_KIMI, run_script
from eagle3 import network
from eagle3.account import FATES
from eagle3.api import read_chat
from eagle3.prompts import as_messages, fingerprint
from eagle3.responses import Answer, Drop
from eagle3.prompt_sources import open_sources
from eagle3.stage import UserError
from eagle3.tokens import settle_ids
from test_generate import CALL, asked, dropped_of, fine, flags, prompts, rows_of, run_here, tokens_of, write_jsonl
from test_vocab import responses, build

THOUGHT = Reply(chat("fine", completion_tokens=4, reasoning="r"))
thoughtful = lambda body, nth: THOUGHT
ADD = [{"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]


@pytest.fixture(scope="module")
def tokens():
    return {mode: tokens_of(TINY_KIMI, mode) for mode in (True, False)}


def settled(tokens, thinking: bool, content, finish="stop", said=None, **message):
    """(decoded ids, the answer) of a chat completion, as 01 takes it. Raises Drop."""
    reader = tokens[thinking]
    prompt = reader.prompt_ids([{"role": "user", "content": "x"}], None)
    answer = read_chat(chat(content, finish=finish, completion_tokens=said, **message), "openai")
    ids, source = settle_ids(answer, prompt, reader, 0, "keep")
    assert source == "rebuilt"
    marks = [token for token in ids if token in reader.added]  # each mark of the structure is one id, words are none
    calls = len(answer.tool_calls)
    assert len(marks) == (finish != "length") + (thinking and reader.end_think in ids) + 3 * calls + 2 * bool(calls)
    return reader.decode(ids), answer


# ---- structure that stands in the text ----
@pytest.mark.parametrize("content, more, ids, reasoning, words", [
    ("r</think>a", {}, "r</think>a<|im_end|>", "r", "a"),
    ("<think>r</think>a", {}, "r</think>a<|im_end|>", "r", "a"),
    ("\nso:\n\n1 </think>\n\n 思 🙂\n", {}, "\nso:\n\n1 </think>\n\n 思 🙂\n<|im_end|>", "\nso:\n\n1 ", "\n\n 思 🙂\n"),
    ("</think>a", {}, "</think>a<|im_end|>", "", "a"),
    ("r</think>a<|im_end|>", {}, "r</think>a<|im_end|>", "r", "a"),
    ("a<|im_end|>", {"reasoning": "r"}, "r</think>a<|im_end|>", "r", "a"),
    ("a", {"reasoning": "<think>r"}, "r</think>a<|im_end|>", "r", "a"),
    ("a", {"reasoning": "<think>\nr\n</think>"}, "\nr\n</think>a<|im_end|>", "\nr\n", "a"),
    ("a", {"reasoning": "r</think>\n\n"}, "r</think>\n\na<|im_end|>", "r", "\n\na"),
    ("", {"reasoning": "r</think>a"}, "r</think>a<|im_end|>", "r", "a"),
    ("a", {"reasoning": "r</think>a"}, "r</think>a<|im_end|>", "r", "a"),
    ("</think>a", {"reasoning": "r"}, "r</think>a<|im_end|>", "r", "a"),
    ("\n</think>\na", {"reasoning_content": "r"}, "r\n</think>\na<|im_end|>", "r\n", "\na"),
    ("<think>r</think>a", {"reasoning": "r"}, "r</think>a<|im_end|>", "r", "a"),
    (f"r</think>{CALL}", {}, f"r</think>{CALL}<|im_end|>", "r", ""),
    (f"I add.{CALL}<|im_end|>", {"reasoning": "r"}, f"r</think>I add.{CALL}<|im_end|>", "r", "I add."),
    (CALL, {"reasoning": "r", "tool_calls": ADD}, f"r</think>{CALL}<|im_end|>", "r", ""),
    ([{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}, {"type": "text", "text": "a"}], {},
     "r</think>a<|im_end|>", "r", "a"),
    ([{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}], {}, "r</think>a<|im_end|>", "r", "a")])
def test_marks_in_the_text_become_structure(content, more, ids, reasoning, words, tokens):
    text, answer = settled(tokens, True, content, **more)
    assert (text, answer.reasoning, answer.content) == (ids, reasoning, words)
    assert answer.tool_calls == (ADD if CALL in ids else [])
    assert answer.finish == ("tool_calls" if CALL in ids else "stop")


@pytest.mark.parametrize("content, finish, more, reason", [
    ("r</think>a</think>b", "stop", {}, "think_marks"), ("r <think> s</think>a", "stop", {}, "think_marks"),
    ("<think>r", "stop", {}, "think_marks"), ("what <think> does", "stop", {}, "think_marks"),
    ("r</think>a <think>", "stop", {}, "think_marks"), ("\n<think>r</think>a", "stop", {}, "think_marks"),
    ("x</think>a", "stop", {"reasoning": "r"}, "think_marks"), ("b", "stop", {"reasoning": "r</think>a"}, "think_marks"),
    ("<think>a", "stop", {"reasoning": "r"}, "think_marks"), ("a</think>", "stop", {"reasoning": "r"}, "think_marks"),
    ("r</think>", "stop", {}, "empty"), ("<think></think>", "stop", {}, "empty"), ("<|im_end|>", "stop", {}, "empty"),
    ("a", "stop", {"reasoning": f"r{CALL}"}, "tool_marks"), (f"r{CALL}</think>a", "stop", {}, "tool_marks"),
    (f"{CALL}a", "stop", {"reasoning": "r"}, "tool_marks"), (CALL[:-10], "stop", {"reasoning": "r"}, "tool_marks"),
    (CALL[:-30], "length", {"reasoning": "r"}, "tool_marks"), (CALL, "length", {"reasoning": "r"}, "tool_marks"),
    (CALL + CALL, "stop", {"reasoning": "r"}, "tool_marks"), (CALL[30:], "stop", {"reasoning": "r"}, "tool_marks"),
    (CALL.replace("functions.add:0", "add"), "stop", {"reasoning": "r"}, "tool_marks"),
    (CALL.replace("1", "7"), "tool_calls", {"reasoning": "r", "tool_calls": ADD}, "tool_marks"),
    ("a<|im_end|><|im_user|>user<|im_middle|>b", "stop", {"reasoning": "r"}, "turn_marks"),
    ("<|im_assistant|>assistant<|im_middle|>a", "stop", {"reasoning": "r"}, "turn_marks"),
    ("a<|im_end|>", "length", {"reasoning": "r"}, "turn_marks"), ("a[EOS]", "stop", {"reasoning": "r"}, "turn_marks"),
    ("a<|im_end|><|im_end|>", "stop", {"reasoning": "r"}, "turn_marks"),
    ("a<|im_end|>\n", "stop", {"reasoning": "r"}, "turn_marks"),
    ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}], "stop", {}, "reasoning_encrypted"),
    ([{"type": "image_url", "image_url": "x"}], "stop", {}, "not_text")])
def test_marks_with_two_readings_are_dropped_by_name(content, finish, more, reason, tokens):
    with pytest.raises(Drop, match=f"^{reason}$"):
        settled(tokens, True, content, finish, **more)


@pytest.mark.parametrize("content, finish, more, ids", [
    ("write <|im_end|> to stop", "stop", {"reasoning": "r"}, "r</think>write <|im_end|> to stop<|im_end|>"),
    ("the <think> tag", "stop", {"reasoning": "r"}, "r</think>the <think> tag<|im_end|>"),
    ("</think", "stop", {"reasoning": "r"}, "r</think></think<|im_end|>"),
    ("＜/think＞ < /think> </THINK>", "stop", {"reasoning": "r"}, "r</think>＜/think＞ < /think> </THINK><|im_end|>"),
    ("a <|im_end", "stop", {"reasoning": "r"}, "r</think>a <|im_end<|im_end|>"),
    ("<think>half a thou", "length", {}, "half a thou"), ("r</think>half an ans", "length", {}, "r</think>half an ans"),
    ("", "length", {"reasoning": "<think>half"}, "half")])
def test_words_that_look_like_marks_stay(content, finish, more, ids, tokens):
    assert settled(tokens, True, content, finish, **more)[0] == ids


def test_an_answer_whose_last_words_are_the_stop_token_s_name(tokens):
    """What the API charged decides, where it fits only one of the two readings."""
    said = 3 + len(tokens[True].encode("the token is <|im_end|>"))
    text, answer = settled(tokens, True, "the token is <|im_end|>", said=said, reasoning="r")
    assert text == "r</think>the token is <|im_end|><|im_end|>" and answer.flags == ["prompt_tokens_differ"]
    text, answer = settled(tokens, True, "the token is <|im_end|>", said=said - 6, reasoning="r")
    assert text == "r</think>the token is <|im_end|>" and "stop_in_text" in answer.flags


@pytest.mark.parametrize("content, expected", [("r</think>a", "reasoning_unasked"), ("<think>r</think>a", "reasoning_unasked"),
                                               ("<think>\n\n</think>\n\na", "reasoning_unasked"),
                                               ("the <think> tag", "the <think> tag<|im_end|>"),
                                               (CALL, CALL + "<|im_end|>")])
def test_marks_in_instant_mode(content, expected, tokens):
    if "<|" in expected:
        assert settled(tokens, False, content)[0] == expected
    else:
        with pytest.raises(Drop, match=expected):
            settled(tokens, False, content)


def test_any_text_with_marks_gives_the_target_s_ids_or_none(tokens):
    """Random answers of a server without parsers: text = decoded ids. What is kept has those ids, each mark one id."""
    reader, pick, kept = tokens[True], random.Random(0), 0
    prompt = reader.prompt_ids([{"role": "user", "content": "x"}], None)
    words = [reader.encode(text) for text in ("a", " b", "\n\n", "</thin", "{}", "functions.add:0", "思")]
    section = reader.tokenizer.encode(CALL, add_special_tokens=False)
    pieces = [*words, *words, [reader.think], [reader.end_think], section, [reader.tool["call_end"]]]
    for _ in range(3000):
        ids = [*sum((pick.choice(words) for _ in range(pick.randrange(3))), []), reader.end_think,
               *sum((pick.choice(pieces) for _ in range(pick.randrange(4))), []),
               *(section if pick.random() < 0.3 else []), reader.stop]
        finish = pick.choice(["stop", "tool_calls", "length"])
        text = reader.decode(ids[:-1] if pick.random() < 0.5 or finish == "length" else ids)
        try:
            answer = read_chat(chat(text, finish=finish), "openai")
            got = settle_ids(answer, prompt, reader, 0, "keep")[0]
        except Drop:
            continue
        kept += 1
        assert got == (ids[:-1] if finish == "length" else ids), (text, finish)
    assert kept > 500


@pytest.mark.parametrize("think, text", [(["<think>", "</think>"], "[THINK]r[/THINK]a"), ([], "<think>r</think>a"),
                                         ([], "a<tool_call>{}</tool_call>")])
def test_another_model_s_marks_that_this_tokenizer_knows(think, text):
    from eagle3.marks import OPEN, Marks
    marks = Marks("<|im_end|>", think, [], {"[THINK]": True, "[/THINK]": True, "<think>": False, "</think>": False,
                                            "<tool_call>": False, "<h1>": False, "  ": False})
    with pytest.raises(Drop, match="foreign_marks"):
        marks.read(Answer(text, "r" if think else None, [], "stop", None), OPEN)
    page = Answer("<h1>x</h1>", "r", [], "stop", None)  # a token of some vocabularies, and words all the same
    marks.read(page, OPEN)
    assert page.content == "<h1>x</h1>" and not page.flags


def test_given_answers_with_marks(tmp_path, capsys, tokens):
    talk = lambda text, answer: [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    file = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "messages": talk("1", "<think>\nr\n</think>\n\n4")},
                                              {"id": "b", "messages": talk("2", "r</think>4</think>5")}])
    assert run_here(flags(None, file, tmp_path / "out", "--answers", "given"), capsys)[0] == 0
    row = rows_of(tmp_path / "out")["a-t0"]
    assert (row["reasoning"], row["content"]) == ("\nr\n", "\n\n4") and row["flags"] == [
        "ids_not_compared", "reasoning_from_text"]
    assert tokens[True].decode(row["response_ids"]) == "\nr\n</think>\n\n4<|im_end|>"
    assert dropped_of(tmp_path / "out") == {"b-t0": "think_marks"}


def test_a_server_without_a_parser_loses_the_rows_whose_mark_never_came(tmp_path, capsys):
    """Cut inside the reasoning, such a row reads like an answer; the others of this server tell that it is none."""
    said = {"question 0": ("r</think>a", "stop"), "question 1": ("half a thought", "length"),
            "question 2": ("r</think>a", "stop")}
    answer = lambda body, nth: Reply(chat(said[asked(body)][0], finish=said[asked(body)][1]))
    for concurrency in (1, 3):
        out = tmp_path / str(concurrency)
        with ApiServer(answer) as api:
            code, log, _ = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 3), out, "--concurrency", concurrency),
                                    capsys)
        assert code == 0 and set(rows_of(out)) == {"p0-t0", "p2-t0"} and dropped_of(out) == {"p1-t0": "think_marks"}
        told = json.loads((out / "report.json").read_text())["by_source"]["0:p"]
        assert told["kept"] == 2 and told["dropped"] == 1 and told["turns"] == {
            "planned": 3, "kept": 2, "dropped": 1, "set_aside": 0, "not_answered": 0}
        with ApiServer(answer) as api:
            assert "complete already" in run_here(flags(api.url, tmp_path / "p.jsonl", out), capsys)[1]


@pytest.mark.parametrize("given", [False, True])
def test_never_any_reasoning_in_200_answers_stops_the_run(given, tmp_path, capsys):
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "a"}]}
            for i in range(300)]
    file = write_jsonl(tmp_path / "p.jsonl", rows)
    with ApiServer(fine) as api:
        argv = flags(None if given else api.url, file, tmp_path / "out", *(["--answers", "given"] if given else []))
        code, out, err = run_here(argv, capsys)
        assert code == 2 and "not one of 200 answers holds reasoning" in err and "--thinking off" in err
        assert len(err.splitlines()) == 1 and len(api.requests) <= (0 if given else 204)
        n = len(api.requests)
        assert run_here(argv, capsys)[0] == 2 and len(api.requests) <= n + 4  # the same folder does not pay 200 again
        file = write_jsonl(tmp_path / "p.jsonl", rows[:199])
        assert run_here([*argv, "--output-dir", tmp_path / "fewer"], capsys)[0] == 0
        assert run_here([*argv, "--output-dir", tmp_path / "off", "--thinking", "off", "--on-mismatch", "keep"], capsys)[0] == 0


def test_one_answer_with_reasoning_and_the_run_goes_on(tmp_path, capsys):
    answer = lambda body, nth: THOUGHT if asked(body) == "question 5" else fine(body, nth)
    with ApiServer(answer) as api:
        code, out, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 250), tmp_path / "out"), capsys)
    assert code == 0 and len(rows_of(tmp_path / "out")) == 250, err
    assert "WARNING: thinking is on, and no reasoning came: 249 of 250 kept rows" in out


# ---- warnings ----
def test_a_flag_or_a_reason_over_half_of_the_rows_is_a_warning(tmp_path, capsys):
    answer = lambda body, nth: Reply(chat("fine", reasoning="r", completion_tokens=4 if asked(body) == "question 0" else 6))
    with ApiServer(answer) as api:
        code, out, _ = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 4), tmp_path / "flag"), capsys)
        assert code == 0 and "WARNING: the flag ids_mismatch is on 3 of 4 kept rows" in out
        assert out.splitlines()[-1].endswith(f"done: {tmp_path / 'flag'}")
        write_jsonl(tmp_path / "p.jsonl", [{"prompt": "same"}] * 4)
        code, out, _ = run_here(flags(api.url, tmp_path / "p.jsonl", tmp_path / "reason"), capsys)
        assert code == 0 and "WARNING: duplicate dropped 3 of 4 rows" in out
    with ApiServer(thoughtful) as api:
        code, out, _ = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 4), tmp_path / "none"), capsys)
        assert code == 0 and "WARNING: the flag prompt_tokens_differ" in out and "ids_mismatch" not in out


# ---- input lost in silence ----
def sources_of(tmp_path, rows, options="", name="p"):
    return open_sources([f"{write_jsonl(tmp_path / f'{name}.jsonl', rows)}{options}"], [])


@pytest.mark.parametrize("row, options, says", [
    ({"instruction": "Sort", "input": "3 1", "output": "1 3"}, {}, "Sort\n\n3 1"),
    ({"instruction": "Sort", "input": ""}, {}, "Sort"), ({"instruction": "Sort", "input": None}, {}, "Sort"),
    ({"instruction": "Sort", "input": "<noinput>"}, {}, "Sort"), ({"instruction": "", "input": "x"}, {}, "x"),
    ({"instruction": "Sort", "input": "x"}, {"prompt": "instruction"}, "Sort\n\nx"),
    ({"prompt": "Sort", "input": "x"}, {}, "Sort"),  # nobody said that it belongs to the prompt
    ({"prompt": "Sort", "context": "x"}, {"input": "context"}, "Sort\n\nx"),
    ({"messages": None, "prompt": "x"}, {}, "x"), ({"prompt": float("nan"), "question": "x"}, {}, "x"),
    ({"conversations": [{"from": "Human", "value": "x"}]}, {}, "x"),
    ({"conversation": {"role": ["user"], "content": ["x"]}}, {}, "x"),
    ({"prompt": [{"role": "user", "content": "x"}]}, {}, "x"), ({"messages": '[{"role": "user", "content": "x"}]'}, {}, "x"),
    ({"messages": [{"role": "user", "content": "x", "name": None, "tool_calls": None}]}, {}, "x")])
def test_rows_of_many_forms(row, options, says):
    assert as_messages(row, options, None)[0] == [{"role": "user", "content": says}]


@pytest.mark.parametrize("row, reason", [
    ({"instruction": "x", "input": {"a": 1}}, "bad_prompt"), ({"prompt": "x", "system": 5}, "bad_prompt"),
    ({"prompt": "x", "tools": {"a": 1}}, "bad_prompt"), ({"prompt": "x", "tools": '["a"]'}, "bad_prompt"),
    ({"prompt": None}, "bad_prompt"), ({"messages": [{"role": "user", "content": 5}]}, "bad_prompt"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "bad_prompt"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "empty_prompt"), ({"messages": []}, "empty_prompt")])
def test_odd_rows_have_a_reason(row, reason):
    with pytest.raises(Drop, match=f"^{reason}$"):
        as_messages(row, {}, None)


def test_nothing_but_not_a_number_is_taken_for_a_missing_cell(tmp_path):
    nan = float("nan")
    rows = [{"id": nan, "prompt": "a", "system": nan}, {"id": "", "prompt": "b", "tools": nan}, {"id": 7, "prompt": "c"}]
    source, = sources_of(tmp_path, rows)
    assert [source.id_of(number, source[number]) for number in range(3)] == ["p-0", "p-1", "7"]
    assert as_messages(source[0], {}, "be brief")[0][0] == {"role": "system", "content": "be brief"}
    with pytest.raises(ValueError):
        as_messages({"prompt": "x", "tools": [{"function": {"parameters": {"maximum": nan}}}]}, {}, None)


def test_nulls_in_a_tool_s_schema_stay(tmp_path, capsys):
    schema = {"type": "object", "properties": {"unit": {"enum": ["C", None], "default": None, "type": ["string", "null"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "tools": [tool]}, {"prompt": "b", "tools": json.dumps([tool])},
                                              {"prompt": "c", "tools": [tool], "system": float("nan")},
                                              {"prompt": "d", "tools": [{"function": {"maximum": float("inf")}}]}])
    with ApiServer(thoughtful) as api:
        assert run_here(flags(api.url, file, tmp_path / "out"), capsys)[0] == 0
    assert [body["tools"] for _, _, body, _ in api.requests] == [[tool]] * 3
    assert dropped_of(tmp_path / "out") == {"p-3-t0": "bad_prompt"}


@pytest.mark.parametrize("spec", ["id=uid", "tools=functions", "system=sys", "messages=talk", "prompt=q", "input=context"])
@pytest.mark.parametrize("kind", ["--prompts", "--dataset"])
def test_a_column_that_no_row_has_is_refused(spec, kind, tmp_path, capsys):
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "id": 1, "functions": None}, {"prompt": "b", "id": 2}])
    with ApiServer(thoughtful) as api:
        argv = flags(api.url, file, tmp_path / "out")[2:]
        code, _, err = run_here([kind, f"{file},{spec}", *argv], capsys)
        assert code == 2 and spec.split("=")[1] in err and len(err.splitlines()) == 1 and not api.requests


@pytest.mark.parametrize("spec, says", [("split=test", "a JSONL file has no split"), ("prompt=", "names nothing"),
                                        ("prompt", "names nothing"), ("id=a,id=b", "given twice"),
                                        ("messages=m,input=i", "input= belongs to prompt=")])
def test_keys_without_a_use_are_refused(spec, says, tmp_path, capsys):
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}])
    code, _, err = run_here(flags(None, f"{file},{spec}", tmp_path / "out", "--answers", "given"), capsys)
    assert code == 2 and says in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("one, other, equal", [
    ("2²=4", "22=4", False), ("H₂O", "H2O", False), ("x³", "x3", False), ("½", "1⁄2", False), ("①", "1", False),
    ("Ｔｅｌｌ　me", "tell ME", True), ("ｶﾞ", "ガ", True), ("é", "e\u0301", True), ("a\u00a0 b", "A b", True)])
def test_what_counts_as_the_same_words(one, other, equal):
    keys = {fingerprint([{"role": "user", "content": text}], None) for text in (one, other)}
    assert len(keys) == (1 if equal else 2)


def test_prompts_that_differ_in_a_call_that_stays_are_two():
    talk = lambda arguments: [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "functions.f:0", "function": {"name": "f", "arguments": arguments}}]}, {"role": "tool", "content": "ok"}]
    assert fingerprint(talk("{}"), None) != fingerprint(talk('{"a": 1}'), None)
    asked_anew = [[{"role": "user", "content": "x"}, {"role": "assistant", "content": text}] for text in "ab"]
    assert fingerprint(asked_anew[0], None) == fingerprint(asked_anew[1], None)
    assert fingerprint(asked_anew[0], None, True) != fingerprint(asked_anew[1], None, True)  # --answers given


def test_duplicates_that_differ_where_nobody_looked(tmp_path, capsys):
    file = write_jsonl(tmp_path / "p.jsonl", [{"id": i, "prompt": "Sum up", "context": f"text {i}", "lang": "en"}
                                              for i in range(5)])
    with ApiServer(thoughtful) as api:
        code, out, _ = run_here(flags(api.url, file, tmp_path / "out"), capsys)
        assert code == 0 and len(api.requests) == 1 and out.count("in the column 'context', which is not read") == 1
        told = json.loads((tmp_path / "out/report.json").read_text())["by_source"]["0:p"]
        assert told["duplicates_that_differ_in"] == {"context": 4} and told["columns"]["not_read"] == ["context", "lang"]
        assert "not read: context, lang" in out
        assert run_here(flags(api.url, f"{file},input=context", tmp_path / "mapped"), capsys)[0] == 0
        assert len(rows_of(tmp_path / "mapped")) == 5 and api.requests[-1][1].startswith("Sum up\n\ntext")


def check_sums(folder: Path) -> dict:
    """Of report.json: rows read = kept + dropped + set aside + not answered, turns as well, and against the files."""
    told = json.loads((folder / "report.json").read_text())["by_source"]
    for source in told.values():
        assert source["read"] == sum(source[fate] for fate in FATES) <= source["rows"]
        assert source["turns"]["planned"] == sum(source["turns"][fate] for fate in FATES)
        assert set(source["columns"]["named"]) <= {name.split(" ")[0] for name in source["columns"]["found"]} | (
            {"id"} if source["columns"]["named"].get("id") == "none" else set())
    assert sum(source["turns"]["kept"] for source in told.values()) == len(rows_of(folder))
    assert sum(source["turns"]["dropped"] + source["turns"]["set_aside"] for source in told.values()) == len(dropped_of(folder))
    return told


def test_every_row_is_accounted_for(tmp_path, capsys):
    """Two files of one stem, a data set, several turns, rows of every fate, over three sessions: the sums hold."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    talk = lambda *texts: [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, texts)]
    first = write_jsonl(tmp_path / "a/p.jsonl", [{"prompt": "good 0"}, {"prompt": "GOOD  0"}, {"prompt": ""},
                                                 {"messages": talk("good 1", "x", "good 2", "x", "bad 3")},
                                                 {"messages": talk("bad 4", "x", "good 5")}, {"prompt": "never 6"},
                                                 {"messages": [*talk("x"), {"role": "system", "content": "s"}]}])
    second = write_jsonl(tmp_path / "b/p.jsonl", [{"prompt": "good 7"}, {"prompt": "empty 8"}])
    third = write_jsonl(tmp_path / "data.json", [{"q": "good 9", "key": 1}, {"q": None, "key": 2}])

    def answer(body, nth):
        kind = asked(body).split()[0]
        return {"good": THOUGHT, "bad": Reply({"error": {"message": "too long for me"}}, 400),
                "never": Reply("oops", 500), "empty": Reply(chat("", completion_tokens=0))}[kind]
    with ApiServer(answer) as api:
        argv = flags(api.url, first, tmp_path / "out", "--prompts", second, "--dataset", f"{third},prompt=q,id=key",
                     "--max-attempts", 2)
        code, out, err = run_here(argv, capsys)
        assert code == 1 and "1 samples got no answer" in err  # the sums and the reasons are there all the same
        assert "source 0:p: 7 of 7 rows read = 2 kept + 4 dropped + 1 set aside" in out
        drops = {row["id"]: row for row in map(json.loads, (tmp_path / "out/dropped.jsonl").read_text().splitlines())}
        assert drops["p-4-t0"]["detail"] == "too long for me" and "http_400: too long for me" in out
        code, out, _ = run_here([*argv, "--max-failed-share", 1], capsys)
        assert code == 0
    told = check_sums(tmp_path / "out")
    assert {name: [source[fate] for fate in ("rows", "read", *FATES)] for name, source in told.items()} == {
        "0:p": [7, 7, 2, 4, 1, 0], "1:p-2": [2, 2, 1, 1, 0, 0], "2:data": [2, 2, 1, 1, 0, 0]}
    assert told["0:p"]["turns"] == {"planned": 10, "kept": 3, "dropped": 6, "set_aside": 1, "not_answered": 0}
    assert dropped_of(tmp_path / "out") == {
        "p-1-t0": "duplicate", "p-2-t0": "empty_prompt", "p-3-t2": "http_400", "p-4-t0": "http_400",
        "p-4-t1": "after_dropped_turn", "p-5-t0": "no_answer_http_500", "p-6-t0": "no_turn", "p-2-1-t0": "empty",
        "2-t0": "empty_prompt"}
    assert "source 2:data: 2 of 2 rows read = 1 kept + 1 dropped + 0 set aside" in out


def test_sums_hold_with_limits_and_budgets(tmp_path, capsys):
    reply = Reply(chat("fine", reasoning="r", prompt_tokens=10, completion_tokens=4))
    with ApiServer(lambda body, nth: reply) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 30), tmp_path / "out", "--max-tokens", 50)
        assert run_here([*argv, "--max-tokens-total", 200], capsys)[0] == 0
        told = check_sums(tmp_path / "out")["0:p"]
        assert told["not_answered"] > 0 and told["read"] < 30
        assert run_here([*argv, "--limit", 20], capsys)[0] == 0
        told = check_sums(tmp_path / "out")["0:p"]
        assert (told["read"], told["kept"], told["not_answered"]) == (20, 20, 0) and set(api.asked.values()) == {1}


# ---- names and digests ----
def test_two_files_of_one_stem_and_two_splits(tmp_path, capsys):
    import datasets
    for name in "ab":
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "p.jsonl", [{"prompt": f"{name} {i}"} for i in range(2)])
        write_jsonl(tmp_path / name / "q.jsonl", [{"id": i, "prompt": f"{name} {i}"} for i in range(2)])
    splits = {name: datasets.Dataset.from_dict({"q": [f"{name} {i}" for i in range(3)]}) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "data")
    files = [["--prompts", tmp_path / name / "p.jsonl"] for name in "ab"]
    both = [["--dataset", f"{tmp_path}/data,prompt=q,split={name}"] for name in splits]
    with ApiServer(thoughtful) as api:
        argv = [*sum(files + both, []), *flags(api.url, "", tmp_path / "out")[2:], "--no-dedup"]
        assert run_here(argv, capsys)[0] == 0
        ids = {"p-0", "p-1", "p-2-0", "p-2-1", *(f"data-{i}" for i in range(3)), *(f"data-test-{i}" for i in range(3))}
        assert set(rows_of(tmp_path / "out")) == {f"{name}-t0" for name in ids}
        assert "complete already" in run_here(argv, capsys)[1]
        files = [["--prompts", f"{tmp_path / name / 'q.jsonl'}"] for name in "ab"]
        argv = flags(api.url, "", tmp_path / "ids")[2:]
        code, _, err = run_here([*sum(files, []), *argv], capsys)
        assert code == 2 and "the id 0 appears twice" in err and ",id=none" in err  # and that remedy works:
        assert run_here([*files[0], "--prompts", f"{tmp_path}/b/q.jsonl,id=none", *argv], capsys)[0] == 0
        assert set(rows_of(tmp_path / "ids")) == {"0-t0", "1-t0", "q-0-t0", "q-1-t0"}


def test_a_folder_merely_touched_goes_on(tmp_path, capsys):
    import datasets
    for i in range(2):
        datasets.Dataset.from_dict({"q": [f"{i} {n}" for n in range(3)]}).to_parquet(tmp_path / f"data/{i}.parquet")
    with ApiServer(thoughtful) as api:
        argv = ["--dataset", f"{tmp_path}/data,prompt=q", *flags(api.url, "", tmp_path / "out")[2:]]
        assert run_here([*argv, "--limit", 4], capsys)[0] == 0
        for file in (tmp_path / "data").iterdir():
            os.utime(file, (1, 1))
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 6
        datasets.Dataset.from_dict({"q": ["other"]}).to_parquet(tmp_path / "data/0.parquet")
        assert run_here(argv, capsys)[0] == 2


def test_a_folder_begun_with_a_fingerprint_goes_on(tmp_path, capsys):
    import datasets
    datasets.Dataset.from_dict({"q": ["a", "b"]}).to_parquet(tmp_path / "data/0.parquet")
    with ApiServer(thoughtful) as api:
        argv = ["--dataset", f"{tmp_path}/data,prompt=q", *flags(api.url, "", tmp_path / "out")[2:]]
        assert run_here([*argv, "--limit", 1], capsys)[0] == 0
        noted = json.loads((tmp_path / "out/stage.json").read_text())
        noted["inputs"]["0:data"] = open_sources([], [f"{tmp_path}/data,prompt=q"])[0].older_digest
        (tmp_path / "out/stage.json").write_text(json.dumps(noted))
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 2


def test_a_prompt_file_that_changes_or_is_no_file(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.jsonl")
    code, _, err = run_here(flags(None, tmp_path / "pipe.jsonl", tmp_path / "out", "--answers", "given"), capsys)
    assert code == 2 and "not a regular file" in err
    source, = sources_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    (tmp_path / "p.jsonl").write_text('{"prompt": "longer than it was"}\n')
    with pytest.raises(UserError, match="changed while it was read"):
        source[1]
