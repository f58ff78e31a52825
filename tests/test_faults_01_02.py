"""What broke other tools, tried on 01 and 02: marks in texts, inputs lost in silence, limits, proxies, keys."""
import asyncio
import json
import os
import random
import resource
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from api_server import ApiServer, Reply, chat
from conftest import ROOT, TINY_KIMI
from eagle3 import network
from eagle3.account import FATES
from eagle3.api import context_of, read_chat
from eagle3.prompts import as_messages, fingerprint
from eagle3.responses import Answer, Drop
from eagle3.prompt_sources import open_sources
from eagle3.stage import UserError
from eagle3.tokens import settle_ids
from test_generate import CALL, FINE, asked, dropped_of, fine, flags, prompts, rows_of, run_here, tokens_of, write_jsonl
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
    ("x</think>a", "stop", {"reasoning": "r"}, "think_marks"),
    ("b", "stop", {"reasoning": "r</think>a"}, "think_marks"),
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


@pytest.mark.parametrize("content, expected",
                         [("r</think>a", "reasoning_unasked"), ("<think>r</think>a", "reasoning_unasked"),
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
        assert run_here([*argv, "--output-dir", tmp_path / "off", "--thinking", "off", "--on-mismatch", "keep"],
                        capsys)[0] == 0


def test_an_engine_whose_ids_never_reason_is_no_exception(tmp_path, tokens):
    """The same rule for rows of both sources of ids; a row that says how its reasoning came counts as reasoning."""
    from eagle3.store import how_reasoned
    row = {"ids_source": "server", "flags": [], "reasoning": ""}
    assert how_reasoned(row) == "bare" and how_reasoned({**row, "reasoning": "r"}) == "parsed"
    assert how_reasoned({**row, "ids_source": "rebuilt", "flags": ["reasoning_from_text"]}) == "marked"


def test_one_answer_with_reasoning_and_the_run_goes_on(tmp_path, capsys):
    answer = lambda body, nth: THOUGHT if asked(body) == "question 5" else fine(body, nth)
    with ApiServer(answer) as api:
        code, out, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 250), tmp_path / "out"), capsys)
    assert code == 0 and len(rows_of(tmp_path / "out")) == 250, err
    assert "WARNING: thinking is on, and no reasoning came: 249 of 250 kept rows" in out


# ---- warnings ----
def test_a_flag_or_a_reason_over_half_of_the_rows_is_a_warning(tmp_path, capsys):
    answer = lambda body, nth: Reply(chat("fine", reasoning="r", completion_tokens=4 if asked(body) == "question 0"
                                          else 6))
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
    ({"prompt": [{"role": "user", "content": "x"}]}, {}, "x"),
    ({"messages": '[{"role": "user", "content": "x"}]'}, {}, "x"),
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
    rows = [{"id": nan, "prompt": "a", "system": nan}, {"id": "", "prompt": "b", "tools": nan},
            {"id": 7, "prompt": "c"}]
    source, = sources_of(tmp_path, rows)
    assert [source.id_of(number, source[number]) for number in range(3)] == ["p-0", "p-1", "7"]
    assert as_messages(source[0], {}, "be brief")[0][0] == {"role": "system", "content": "be brief"}
    with pytest.raises(ValueError):
        as_messages({"prompt": "x", "tools": [{"function": {"parameters": {"maximum": nan}}}]}, {}, None)


def test_nulls_in_a_tool_s_schema_stay(tmp_path, capsys):
    schema = {"type": "object",
              "properties": {"unit": {"enum": ["C", None], "default": None, "type": ["string", "null"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    file = write_jsonl(tmp_path / "p.jsonl",
                       [{"prompt": "a", "tools": [tool]}, {"prompt": "b", "tools": json.dumps([tool])},
                                              {"prompt": "c", "tools": [tool], "system": float("nan")},
                                              {"prompt": "d", "tools": [{"function": {"maximum": float("inf")}}]}])
    with ApiServer(thoughtful) as api:
        assert run_here(flags(api.url, file, tmp_path / "out"), capsys)[0] == 0
    assert [body["tools"] for _, _, body, _ in api.requests] == [[tool]] * 3
    assert dropped_of(tmp_path / "out") == {"p-3-t0": "bad_prompt"}


@pytest.mark.parametrize("spec",
                         ["id=uid", "tools=functions", "system=sys", "messages=talk", "prompt=q", "input=context"])
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
        assert told["duplicates_that_differ_in"] == {"context": 4}
        assert told["columns"]["not_read"] == ["context", "lang"]
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
    assert sum(source["turns"]["dropped"] + source["turns"]["set_aside"]
               for source in told.values()) == len(dropped_of(folder))
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
        noted, manifest = (json.loads((tmp_path / "out" / name).read_text()) for name in ("stage.json", "manifest.json"))
        noted["inputs"]["0:data"] = open_sources([], [f"{tmp_path}/data,prompt=q"])[0].older_digest
        (tmp_path / "out/stage.json").write_text(json.dumps(noted))
        (tmp_path / "out/manifest.json").write_text(json.dumps(manifest | {"config": noted, "inputs": noted["inputs"]}))
        assert "complete already" in run_here([*argv, "--limit", 1], capsys)[1]
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 2


def test_a_prompt_file_that_changes_or_is_no_file(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.jsonl")
    code, _, err = run_here(flags(None, tmp_path / "pipe.jsonl", tmp_path / "out", "--answers", "given"), capsys)
    assert code == 2 and "not a regular file" in err
    source, = sources_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    (tmp_path / "p.jsonl").write_text('{"prompt": "longer than it was"}\n')
    with pytest.raises(UserError, match="changed while it was read"):
        source[1]


# ---- refusals ----
def error(status, message="no", **more):
    return Reply({"error": {"code": status, "message": message, **more}}, status)


@pytest.mark.parametrize("status", [400, 404, 405, 413, 422])
def test_one_refused_request_is_one_dropped_sample(status, tmp_path, capsys):
    """A route that lacks tools, say: also when it comes first, at every repeat, and behind a busy server."""
    answer = lambda body, nth: error(status, "no tools here") if asked(body) in ("question 0",
                                                                                 "question 3") else THOUGHT
    with ApiServer(answer) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 6), tmp_path / "out", "--concurrency", 1)
        code, out, _ = run_here(argv, capsys)
        assert code == 0 and dropped_of(tmp_path / "out") == dict.fromkeys(("p0-t0", "p3-t0"), f"http_{status}")
        assert len(rows_of(tmp_path / "out")) == 4 and set(api.asked.values()) == {1}
        assert f"dropped p0-t0: http_{status}: no tools here" in out
        assert "complete already" in run_here(argv, capsys)[1]


def test_twenty_refusals_from_the_first_request_on_end_the_run(tmp_path, capsys):
    """Their reasons may differ; answers that are of no use count too, and one good answer ends the count."""
    kinds = [error(400, "bad field"), error(404, "no route"), error(422, "odd"), Reply(chat("", completion_tokens=0))]
    bad = lambda body: kinds[int(asked(body).split()[1]) % 4]
    with ApiServer(lambda body, nth: bad(body)) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 60), tmp_path / "out")
        code, out, err = run_here(argv, capsys)
        assert code == 2 and sum(api.asked.values()) <= 24 and len(err.splitlines()) == 1
        assert "refuses every request" in err and "http_404" in err and "empty" in err
        assert "bad field" in out and "no route" in out
    good = lambda body, nth: THOUGHT if asked(body) == "question 10" else bad(body)
    with ApiServer(good) as api:
        code, *_ = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 60), tmp_path / "one", "--concurrency", 1),
                            capsys)
        assert code == 0 and sum(api.asked.values()) == 60 and set(rows_of(tmp_path / "one")) == {"p10-t0"}


def test_the_server_s_own_words_reach_the_user(tmp_path, capsys):
    """Also when the run fails, where few were refused; what was not paid for is tried again by the same command."""
    words = ["context length is 4096", "unknown field top_p", "wie bitte? ü"]
    answers = [lambda i: error(400, words[i]), lambda i: Reply({"detail": words[i]}, 400),
               lambda i: Reply(words[i], 400),
               lambda i: Reply({"message": words[i], "object": "error"}, 400),
               lambda i: error(400, "Provider returned error", metadata={"raw": words[i]})]
    for which, form in enumerate(answers):
        folder = tmp_path / str(which)
        with ApiServer(lambda body, nth: form(int(asked(body).split()[1]))) as api:
            argv = flags(api.url, prompts(tmp_path / "p.jsonl", 3), folder)
            code, out, err = run_here(argv, capsys)
            assert code == 2 and "not one answer was kept" in err and words[0] in err and len(err.splitlines()) == 1
            rows = [json.loads(line) for line in (folder / "dropped.jsonl").read_text().splitlines()]
            assert all(word in out and any(word in row["detail"] for row in rows) for word in map(
                lambda word: word if which not in (1,) else json.dumps(word)[1:-1], words))
            assert run_here(argv, capsys)[0] == 2 and set(api.asked.values()) == {2}
        with ApiServer(thoughtful) as api:  # mended, in the same folder, with another wish
            code, *_ = run_here(flags(api.url, tmp_path / "p.jsonl", folder, "--temperature", 0.5), capsys)
            assert code == 0 and len(rows_of(folder)) == 3 and dropped_of(folder) == {}


def test_words_of_refusals_after_a_failure_in_the_middle(tmp_path, capsys):
    def answer(body, nth):
        number = int(asked(body).split()[1])
        return error(402, "no money") if number == 5 else error(400, "too long") if number == 2 else THOUGHT
    with ApiServer(answer) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 9), tmp_path / "out", "--concurrency", 1)
        code, out, err = run_here(argv, capsys)
        assert code == 1 and "no money" in err
        row, = map(json.loads, (tmp_path / "out/dropped.jsonl").read_text().splitlines())
        assert (row["id"], row["reason"], row["detail"], row["again"]) == ("p2-t0", "http_400", "too long", True)
        assert "source 0:p: 6 of 9 rows read = 4 kept + 1 dropped + 0 set aside + 1 not answered" in out


@pytest.mark.parametrize("arguments", [{"a": 1}, [1], 5, True])
def test_call_arguments_that_are_no_text_are_paid_once(arguments, tmp_path, capsys):
    call = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    answer = lambda body, nth: THOUGHT if asked(body) == "question 0" else Reply(chat(None, tool_calls=call,
                                                                                      reasoning="r"))
    with ApiServer(answer) as api:
        assert run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out"), capsys)[0] == 0
    assert dropped_of(tmp_path / "out") == {"p1-t0": "bad_tool_calls"} and set(api.asked.values()) == {1}


@pytest.mark.parametrize("calls", [["f"], [{}], [None], "f", {"name": "f"}, [{"function": "f"}],
                                   [{"function": {"name": None, "arguments": "{}"}}]])
def test_malformed_calls_are_dropped(calls):
    with pytest.raises(Drop, match="bad_tool_calls"):
        read_chat(chat("x", tool_calls=calls), "openai")


def test_a_function_call_of_the_older_form(tokens):
    text, answer = settled(tokens, True, None, reasoning="r", function_call=ADD[0]["function"])
    assert text == f"r</think>{CALL}<|im_end|>" and answer.flags == ["tool_id_rebuilt", "ids_not_compared"]


@pytest.mark.parametrize("body, kind, after", [
    ({"error": {"code": "²", "message": "x"}}, "http_500", None), ({"error": "words"}, "http_500", None),
    ({"error": {"code": "rate_limit_exceeded"}}, "http_429", None), ({"error": ["x"]}, "http_500", None),
    ({"error": {"code": 1301, "message": "x"}}, "http_500", None), ("[" * 100_000, "bad_json", None)])
def test_errors_in_a_200_that_are_tried_again(body, kind, after, tmp_path, capsys):
    body = body if isinstance(body, str) else json.dumps(body)
    with ApiServer(lambda _, nth: THOUGHT if nth else Reply(body)) as api:
        code, out, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out"), capsys)
    assert code == 0 and f"errors {kind} 1" in out and set(api.asked.values()) == {2}, err


@pytest.mark.parametrize("body, status, code, says", [
    ({"error": {"code": "insufficient_quota", "message": "pay"}}, 429, 1, "out of credit"),
    ({"error": {"type": "insufficient_quota", "message": "pay"}}, 200, 1, "out of credit"),
    ({"error": {"code": "invalid_api_key", "message": "who"}}, 200, 2, "refused the key"),
    ({"error": {"type": "invalid_request_error", "message": "bad"}}, 200, 2, "http_400"),
    ({"error": {"code": "context_length_exceeded", "message": "bad"}}, 200, 2, "http_400")])
def test_errors_by_name_are_not_waited_out(body, status, code, says, tmp_path, capsys):
    with ApiServer(lambda _, nth: Reply(body, status)) as api:
        got, _, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out"), capsys)
    assert got == code and says in err and set(api.asked.values()) == {1}


@pytest.mark.parametrize("usage",
                         [{"completion_tokens": float("nan"), "cost": float("nan")}, {"completion_tokens": True},
                                   {"completion_tokens": -4, "cost": -1},
                                   {"completion_tokens": 1e300, "cost": float("inf")},
                                   {"completion_tokens": "four"}, []])
def test_usage_that_cannot_be_is_no_usage(usage, tmp_path, capsys):
    body = {**chat("fine", reasoning="r"), "usage": usage}
    with ApiServer(lambda _, nth: Reply(body)) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 3), tmp_path / "out", "--max-tokens-total", 100_000)
        assert run_here(argv, capsys)[0] == 0
    assert all("ids_not_compared" in row["flags"] for row in rows_of(tmp_path / "out").values())


@pytest.mark.parametrize("header", [{"Retry-After": "3600"}, {"Retry-After": "9" * 400}, {"retry-after-ms": "inf"},
                                    {"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}])
def test_a_long_retry_after_does_not_outlast_the_outage(header, tmp_path, capsys):
    with ApiServer(lambda body, nth: Reply({"error": {"message": "come back tomorrow"}}, 429, header)) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out", "--outage-s", 1)
        code, out, err = run_here(argv, capsys)
    assert code == 2 and "no answer for 1 s" in err and "come back tomorrow" in err and "asks to wait" in err
    assert len(err.splitlines()) == 1 and sum(api.asked.values()) <= 3


@pytest.mark.parametrize("header", [{"Retry-After": "-5"}, {"Retry-After": "²"}, {"Retry-After": "1.2.3"},
                                    {"Retry-After": "nan"}, {"retry-after-ms": "nan"}, {"Retry-After": ""},
                                    {"Retry-After": "Fri, 99 Foo 2099 99:99:99 GMT"}])
def test_an_odd_retry_after_is_none(header, tmp_path, capsys):
    header = {name: value.encode().decode("latin-1") for name, value in header.items()}
    with ApiServer(lambda body, nth: THOUGHT if nth else Reply("busy", 503, header)) as api:
        assert run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out"), capsys)[0] == 0


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_that_keeps_the_question_is_followed(status, tmp_path, capsys):
    with ApiServer(thoughtful) as there, ApiServer(
            lambda body, nth: Reply("", status, {"Location": f"{there.url}/chat/completions"})) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 3), tmp_path / "out")
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 3 and len(there.requests) == 3


@pytest.mark.parametrize("status, target, says", [
    (301, "http://there.example/v1", "has moved to http://there.example/v1 (301). Name that as --base-url"),
    (302, "/login", "has moved to /login (302)"),
    (303, "https://u:secret@x.example/", "has moved to https://***@x.example/"),
    (308, "http://there.example/v1", "where the key is not sent"), (307, "SELF", "redirects in a circle")])
def test_other_redirects_end_the_run_at_once(status, target, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    reply = lambda: Reply("", status, {"Location": target.replace("SELF", f"{api.url}/chat/completions")})
    with ApiServer(lambda body, nth: reply()) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 3), tmp_path / "out", "--concurrency", 1, "--api-key-env",
                     "A_KEY")
        code, out, err = run_here(argv, capsys)
    assert code == 2 and says in err and len(err.splitlines()) == 1 and "secret" not in out + err


# ---- limits, before anything is paid ----
MODELS = {"data": [{"id": "other", "max_model_len": 5}, {"id": "m", "max_model_len": 60}]}


def test_what_the_context_does_not_hold_is_not_asked(tmp_path, capsys):
    """A prompt that leaves no room for the answer is dropped by name, unpaid; with shorter answers it is asked."""
    rows = [{"id": f"p{i}", "prompt": "word " * (200 if i == 3 else i)} for i in range(1, 6)]
    with ApiServer(lambda body, nth: FINE) as api:
        api.models = MODELS
        argv = flags(api.url, write_jsonl(tmp_path / "p.jsonl", rows), tmp_path / "out", "--max-tokens")
        code, _, err = run_here([*argv, 60], capsys)
        assert code == 2 and "--max-tokens 60: the context of" in err and "is 60 tokens, prompt included" in err
        assert run_here([*argv, 8], capsys)[0] == 0 and dropped_of(tmp_path / "out") == {"p3-t0": "beyond_context"}
        said = json.loads((tmp_path / "out/dropped.jsonl").read_text())["detail"]
        assert "prompt tokens and --max-tokens 8 are more than the server's context of 60" in said
        assert len(rows_of(tmp_path / "out")) == 4 == len(api.requests)


@pytest.mark.parametrize("models", [None, {}, {"data": None}, {"data": ["m"]}, {"data": [{"id": "m"}]}, ["m"],
                                    {"data": [{"id": "m", "max_model_len": "many"}]}])
def test_a_server_that_does_not_tell_its_context(models):
    with ApiServer(lambda body, nth: FINE) as api:
        api.models = models
        assert asyncio.run(context_of(api.url, None, network.tls_context(), "m")) is None


def in_a_process(argv, limits=(), env=None) -> subprocess.CompletedProcess:
    def lower():
        for what, value in limits:
            resource.setrlimit(what, value)
    return subprocess.run([sys.executable, "-u", str(ROOT / "01_generate.py"), *map(str, argv)], cwd=ROOT, text=True,
                          capture_output=True, preexec_fn=lower,
                          env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})})


def test_too_few_open_files_are_said_before_the_first_request(tmp_path):
    with ApiServer(thoughtful) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 40), tmp_path / "out", "--concurrency", 1024)
        done = in_a_process(argv, [(resource.RLIMIT_NOFILE, (1024, 1024))])
        assert done.returncode == 2 and "--concurrency 1024: needs 1,088 open files" in done.stderr
        assert "Lower it to 960" in done.stderr and len(done.stderr.splitlines()) == 1 and not api.requests
        argv[argv.index(1024)] = 960  # that remedy works, in the same folder; and a soft limit is raised
        done = in_a_process(argv, [(resource.RLIMIT_NOFILE, (256, 1024))])
        assert done.returncode == 0 and "open files: the limit" in done.stdout, done.stderr
        assert len(rows_of(tmp_path / "out")) == 40


def test_a_folder_that_cannot_be_written_is_said_before_the_first_request(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere/deep")
    with ApiServer(thoughtful) as api:
        for out in ("file/out", "/proc/out", "/sys/out", "x" * 300, "file"):
            code, _, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / out), capsys)
            assert code == 2 and len(err.splitlines()) == 1 and not api.requests, out
        full = os.statvfs(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path: os.statvfs_result((*full[:4], 0, *full[5:])))
            argv = flags(api.url, tmp_path / "p.jsonl", tmp_path / "out")
            code, _, err = run_here(argv, capsys)
            assert code == 2 and "cannot write" in err and "less is free" in err and not api.requests
        argv += ["--temperature", 0.1]  # nothing holds to the first wish
        (tmp_path / "out/part-00000.jsonl").mkdir()
        code, _, err = run_here(argv, capsys)
        assert code == 2 and "cannot write (Is a directory)" in err and not api.requests
        (tmp_path / "out/part-00000.jsonl").rmdir()
        assert run_here(argv, capsys)[0] == 0


def test_a_disk_that_fills_up_ends_the_run_before_answers_are_lost(tmp_path, capsys, monkeypatch):
    full, began = os.statvfs(tmp_path), []
    left = lambda path: full if len(began.append(1) or began) < 3 else os.statvfs_result((*full[:4], 0, *full[5:]))
    with ApiServer(lambda body, nth: Reply(THOUGHT.body, delay=0.1)) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 100), tmp_path / "out", "--log-interval", 0.2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", left)
            code, _, err = run_here(argv, capsys)
        assert code == 1 and "the disk is full but for what is in flight" in err
        assert run_here(argv, capsys)[0] == 0 and set(api.asked.values()) == {1}  # none was lost


@pytest.mark.parametrize("words", [["--temperature", "nan"], ["--temperature", "-1"], ["--top-p", 0], ["--top-p", 1.5],
                                   ["--timeout-s", "inf"], ["--outage-s", "nan"], ["--max-failed-share", "nan"],
                                   ["--usd-per-mtok", "-1", 2], ["--backoff-s", "inf"], ["--concurrency", 10 ** 9], ["--extra-body", '{"a": NaN}'],
                                   ["--base-url", "http://[::1"], ["--base-url", "http://h:99999"],
                                   ["--base-url", "http://a..b"], ["--base-url", "http://"], ["--base-url", "ftp://x"]])
def test_numbers_and_addresses_that_cannot_be(words, tmp_path, capsys):
    argv = flags(None, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out", "--model", "m", "--base-url",
                 "http://127.0.0.1:9")
    code, _, err = run_here([*argv, *words], capsys)
    assert code == 2 and str(words[0]) in err and len(err.splitlines()) == 1


# ---- the environment ----
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
           "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture
def env(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("host, port, no_proxy, direct", [
    ("api.x.com", 443, "x.com", True), ("api.x.com", 443, ".x.com", True), ("api.x.com", 443, "*.x.com", True),
    ("x.com", 443, "api.x.com", False), ("ax.com", 443, "x.com", False), ("X.com", 443, "x.COM.", True),
    ("x.com", 8000, "x.com:8000", True), ("x.com", 8000, "x.com:80", False), ("x.com", 80, "a, b ,x.com", True),
    ("x.com", 80, "*", True), ("x.com", 80, "", False), ("x.com", 80, ",, ", False), ("x.com", 80, ".", False),
    ("127.0.0.1", 80, "127.0.0.0/8", True), ("10.1.2.3", 80, "10.0.0.0/8,::1", True),
    ("11.1.2.3", 80, "10.0.0.0/8", False),
    ("127.0.0.1", 30000, "127.0.0.1:30000", True), ("127.0.0.1", 30001, "127.0.0.1:30000", False),
    ("::1", 80, "::1", True), ("::1", 80, "[::1]", True), ("::1", 80, "[::1]:80", True), ("::1", 81, "[::1]:80", False),
    ("fe80::5", 80, "fe80::/10", True), ("fd00::5", 80, "fe80::/10,fd00::/8", True),
    ("::1", 80, "0:0:0:0:0:0:0:1", True),
    ("2001:db8::1", 80, "2001:db8::2", False), ("localhost", 80, "http://localhost", True),
    ("0.0.1", 80, ".0.1", True)])
def test_no_proxy(host, port, no_proxy, direct):
    assert network.not_proxied(host, port, no_proxy) == direct


@pytest.mark.parametrize("name, proxy, says", [
    ("ALL_PROXY", "socks5://127.0.0.1:9", "pip install 'httpx[socks]'"),
    ("http_proxy", "socks5h://u:pw@p:1", "SOCKS proxy"),
    ("HTTP_PROXY", "http://[::1", "HTTP_PROXY http://[::1: not an http(s) URL"),
    ("HTTP_PROXY", "ftp://x", "not an http(s)"),
    ("HTTP_PROXY", "http://u:pw@127.0.0.1:9", "through the proxy http://***@127.0.0.1:9"),
    ("all_proxy", "127.0.0.1:9", "through the proxy http://127.0.0.1:9")])
def test_a_proxy_that_does_not_serve_is_one_line(name, proxy, says, tmp_path, capsys, env):
    env.setenv(name, proxy)
    with ApiServer(thoughtful) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out")
        code, out, err = run_here(argv, capsys)
        assert code == 2 and says in err and "NO_PROXY" in err and len(err.splitlines()) == 1 and "pw" not in out + err
        env.setenv("NO_PROXY", "fe80::/10,[::1]:80,127.0.0.0/8")  # this remedy works
        assert run_here(argv, capsys)[0] == 0


def test_a_proxy_is_used(tmp_path, capsys, env):
    """The whole URL of a host that this machine cannot resolve goes to the proxy."""
    with ApiServer(thoughtful) as proxy:
        env.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        argv = flags("http://api.example:8000/v1", prompts(tmp_path / "p.jsonl", 1), tmp_path / "out")
        assert run_here(argv, capsys)[0] == 0 and len(proxy.requests) == 1


@pytest.mark.parametrize("name, value, says", [
    ("SSL_CERT_FILE", "nowhere.pem", "SSL_CERT_FILE nowhere.pem: no readable certificates (No such file"),
    ("SSL_CERT_FILE", __file__, "no readable certificates"),
    ("SSL_CERT_DIR", "nowhere", "SSL_CERT_DIR nowhere: no such")])
def test_certificates_that_are_not_there(name, value, says, tmp_path, capsys, env):
    env.setenv(name, value)
    code, _, err = run_here(flags("https://127.0.0.1:9/v1", prompts(tmp_path / "p.jsonl", 1), tmp_path / "out"), capsys)
    assert code == 2 and says in err and len(err.splitlines()) == 1


def test_a_certificate_that_nobody_vouches_for_is_named(tmp_path, capsys, env):
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
                           "/CN=localhost",
                           "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key.pem", "-out",
                           tmp_path / "cert.pem"], capture_output=True)
    if made.returncode:
        pytest.skip("no openssl here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with ApiServer(thoughtful) as api:
        api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
        argv = flags(api.url.replace("http:", "https:"), prompts(tmp_path / "p.jsonl", 2), tmp_path / "out")
        code, _, err = run_here(argv, capsys)
        assert code == 2 and "CERTIFICATE_VERIFY_FAILED" in err and "SSL_CERT_FILE" in err
        assert len(err.splitlines()) == 1
        env.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 2


@pytest.mark.parametrize("key, what",
                         [("sec\nret", "a line break at place 4"), ("geheim-ü", "outside of ASCII at place 8"),
                                       ("\ufeffsecret", "outside of ASCII at place 1"),
                                       ("sec\tret", "a control character"), ("secret\u200b", "outside of ASCII"),
                                       ("  \n", "is empty")])
def test_a_key_that_no_request_can_carry(key, what, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("A_KEY", key)
    with ApiServer(thoughtful) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out", "--api-key-env", "A_KEY")
        code, out, err = run_here(argv, capsys)
    assert code == 2 and "A_KEY" in err and what in err and len(err.splitlines()) == 1 and not api.requests
    assert not key.strip() or key not in out + err and "ret" not in out + err.replace("secret", "")


def test_passwords_in_addresses_are_not_shown(tmp_path, capsys, env):
    with ApiServer(lambda body, nth: THOUGHT if nth else Reply("oops", 500)) as api:
        url = api.url.replace("http://", "http://user:hunter2@")
        code, out, err = run_here(flags(url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out"), capsys)
        assert code == 0 and "hunter2" not in out + err and "Basic " in api.requests[0][3]["Authorization"]
    code, out, err = run_here(flags(url, tmp_path / "p.jsonl", tmp_path / "down"), capsys)
    assert code == 2 and "hunter2" not in out + err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


@pytest.mark.parametrize("form", ["BatchEncoding", "dict", "batch", "array", "tensor", "text"])
def test_a_tokenizer_that_returns_no_list(form, tmp_path, capsys, monkeypatch):
    import numpy as np
    import torch
    from transformers import BatchEncoding, PreTrainedTokenizerFast
    real = PreTrainedTokenizerFast.apply_chat_template
    forms = {"BatchEncoding": lambda ids: BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)}),
             "dict": lambda ids: {"input_ids": [ids]}, "batch": lambda ids: [ids], "array": np.array,
             "tensor": lambda ids: torch.tensor([ids]), "text": lambda ids: "<think>"}
    with ApiServer(thoughtful) as api:
        assert run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "list"), capsys)[0] == 0
        monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template",
                            lambda self, *words, **more: forms[form](real(self, *words, **more)))
        code, _, err = run_here(flags(api.url, tmp_path / "p.jsonl", tmp_path / "other"), capsys)
    if form == "text":
        assert code == 2 and "gives no token ids but '<think>'" in err and len(err.splitlines()) == 1
    else:
        assert code == 0 and rows_of(tmp_path / "other") == rows_of(tmp_path / "list")


# ---- 02 ----
@pytest.mark.parametrize("harm, code, says", [
    ("picture", 0, "no coverage.png: RuntimeError: no fonts"), ("disk", 2, "cannot write (No space left on device)"),
    ("process", 2, "Use fewer --workers"), ("room", 2, "less is free"), ("manifest", 2, "no files, counts in it"),
    ("part", 2, "cannot be read (Is a directory)"), ("size", 2, "below 2^24")])
def test_02_ends_in_one_line_and_may_be_mended(harm, code, says, tmp_path, capsys, monkeypatch):
    from concurrent.futures.process import BrokenProcessPool
    import test_vocab
    data = responses(tmp_path / "responses", [[5, 6]])
    fails = {"picture": ("plot", RuntimeError("no fonts")), "disk": ("write_mapping", OSError(28, os.strerror(28))),
             "process": ("count_files", BrokenProcessPool())}

    def fail(error):
        raise error
    more = ["--draft-vocab-size", 16, *(["--target-vocab-size", 10 ** 13] if harm == "size" else [])]
    with monkeypatch.context() as patch:
        if harm in fails:
            patch.setattr(test_vocab.vocab, fails[harm][0], lambda *words, **named: fail(fails[harm][1]))
        if harm == "room":
            full = os.statvfs(tmp_path)
            patch.setattr(os, "statvfs", lambda path: os.statvfs_result((*full[:4], 0, *full[5:])))
        whole = (data / "manifest.json").read_text()
        if harm == "manifest":
            (data / "manifest.json").write_text(json.dumps({**json.loads(whole), "files": None, "counts": 3}))
        if harm == "part":
            (data / "part-00000.jsonl").rename(data / "kept")
            (data / "part-00000.jsonl").mkdir()
        got, out, err = build(capsys, data, tmp_path / "out", *more)
        assert got == code and says in out + err and len(err.splitlines()) <= 1
    (data / "manifest.json").write_text(whole)
    if harm == "part":
        (data / "part-00000.jsonl").rmdir(), (data / "kept").rename(data / "part-00000.jsonl")
    if code:
        # nothing holds to the first wish
        assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", 17)[0] == 0
    assert (tmp_path / "out/manifest.json").exists()


def test_a_key_that_a_server_repeats_is_not_stored(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("A_KEY", "sk-hunter2-hunter2")
    words = "your key sk-hunter2-hunter2 \x1b[31m may not"
    answer = lambda body, nth: THOUGHT if asked(body) == "question 0" else error(400 if nth else 500, words)
    with ApiServer(answer) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out", "--api-key-env", "A_KEY")
        code, out, err = run_here(argv, capsys)
    assert code == 0 and dropped_of(tmp_path / "out") == {"p1-t0": "http_400"} and "your key *** ?[31m may not" in out
    assert "hunter2" not in out + err + "".join(
        path.read_text() for path in (tmp_path / "out").glob("*.json*"))


def test_calls_that_an_api_lost(tokens):
    with pytest.raises(Drop, match="tool_calls_lost"):
        settled(tokens, True, "I add.", "tool_calls", reasoning="r")


def test_marks_in_the_messages_of_a_prompt(tokens):
    give = tokens[True].with_structure
    talk = lambda content, **more: {"role": "assistant", "content": content, **more}
    assert give(talk("<think>r</think>a")) == talk("a", reasoning_content="r")
    assert give(talk(CALL)) == talk("", tool_calls=ADD)
    for message in (talk("r</think>a"), talk("plain"), talk(None), talk(CALL, tool_calls=ADD),
                    {"role": "user", "content": "<think>r</think>a"}):
        assert give(message) == message


@pytest.mark.parametrize("line, says", [('{"id": "x"}', "lacks keys of a row"), ("[]", "lacks keys"), ("{", "is not JSON")])
def test_a_foreign_row_in_the_folder_is_named(line, says, tmp_path, capsys):
    with ApiServer(thoughtful) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out")
        assert run_here([*argv, "--limit", 1], capsys)[0] == 0
        for name in ("part-00000.jsonl", "dropped.jsonl"):
            whole = (tmp_path / "out" / name).read_text()
            (tmp_path / "out" / name).write_text(whole + line + "\n")
            code, _, err = run_here(argv, capsys)
            assert code == 2 and f"{name}: the row at byte {len(whole.encode())} {says}" in err
            (tmp_path / "out" / name).write_text(whole)
        (tmp_path / "out/.unsettled").write_bytes(b"torn")
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 2


def test_words_that_the_terminal_cannot_show(tmp_path):
    with ApiServer(lambda body, nth: error(400, "zu lang: ü 思") if asked(body) == "question 1" else THOUGHT) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out")
        done = in_a_process(argv, env={"PYTHONIOENCODING": "ascii", "OPENAI_ORG_ID": "ü", "OPENAI_PROJECT_ID": "mine"})
        assert done.returncode == 0 and "zu lang: \\xfc" in done.stdout, done.stderr
        assert not any("openai-" in name.lower() for name in api.requests[0][3])
