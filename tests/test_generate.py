"""01_generate.py: against the real SGLang on a CPU, and against an API server with bad manners."""
import asyncio
import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from api_server import ApiServer, CountingProxy, Reply, chat
import preloaded
from conftest import ROOT, TINY_KIMI, load_script, post
from eagle3 import stage, store
from eagle3.api import Retry, Service, read_chat, read_native, retry_after
from eagle3.asking import Session
from eagle3.prompts import as_messages, fingerprint, mix, plan_turns
from eagle3.responses import Answer, Drop, read_jsonl
from eagle3.prompt_sources import safe_id, split_spec
from eagle3.stage import UserError
from eagle3.store import Store, place_sorted
from eagle3.tokens import STOP, THINK, TOOL, Tokens, load_tokenizer, settle_ids

generate = load_script("01_generate")
MANNERS = [json.loads(line) for line in (Path(__file__).parent / "data/api_manners.jsonl").read_text().splitlines()]


FINE = Reply(chat("fine", completion_tokens=3))
fine = lambda body, nth: FINE
asked = lambda body: body["messages"][-1]["content"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY_KIMI, False)


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(path: Path, n: int) -> Path:
    return write_jsonl(path, [{"id": f"p{i}", "prompt": f"question {i}"} for i in range(n)])


def rows_of(folder: Path) -> dict[str, dict]:
    rows = [row for path in sorted(folder.glob("part-*.jsonl")) for row in read_jsonl(path)]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def dropped_of(folder: Path) -> dict[str, str]:
    return {row["id"]: row["reason"] for row in map(json.loads, (folder / "dropped.jsonl").read_text().splitlines())}


def run_here(argv: list, capsys) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of 01 in this process (its start alone costs seconds)."""
    try:
        code = generate.main([str(word) for word in argv])
    except UserError as error:
        code = 2
        print(error, file=sys.stderr)
    return code, *capsys.readouterr()


def flags(api_url: str | None, prompts: Path, out: Path, *more) -> list:
    return ["--prompts", prompts, *(["--base-url", api_url, "--model", "m"] if api_url else []), "--tokenizer",
            TINY_KIMI, "--output-dir", out,
            "--concurrency", 4, "--backoff-s", 0.05, *more]


# ---- bad manners: one test per line of data/api_manners.jsonl

RETRIED = {"rate limited with Retry-After", "rate limited, no Retry-After", "HTTP 200 that carries an error",
           "upstream down",
           "overloaded, HTML body", "truncated JSON"}
DROPPED = {"bad request for this sample": "http_400", "reasoning encrypted": "reasoning_encrypted",
           "content null, no error": "empty",
           "filtered": "content_filter", "usage says more tokens than the rebuilt ids": "ids_missing"}
CALL = ('<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": 2}'
        '<|tool_call_end|><|tool_calls_section_end|>')
KEPT = {  # case -> (reasoning, content, what the ids decode to, flags that must be there)
    "reasoning in `reasoning`": ("2+2 is 4", "4", "2+2 is 4</think>4<|im_end|>", ()),
    "reasoning in `reasoning_content`": ("2+2 is 4", "4", "2+2 is 4</think>4<|im_end|>", ()),
    "reasoning only in `reasoning_details`": ("2+2 is 4", "4", "2+2 is 4</think>4<|im_end|>", ()),
    "cut at the limit": (None, "The answer is", "</think>The answer is", ()),
    "limit spent on reasoning, content empty": ("let me think", "", "let me think", ()),
    "no usage": (None, "hello", "</think>hello<|im_end|>", ("ids_not_compared",)),
    "tool call, no content": (None, "", f"</think>{CALL}<|im_end|>", ()),
    "unknown finish reason": (None, "hello", "</think>hello", ("finish_unknown",)),
    "answer holds a special token's text": (None, "write <|im_end|> to stop",
                                            "</think>write <|im_end|> to stop<|im_end|>", ()),
    "leading and trailing white space": (None, "\n\n  four \n", "</think>\n\n  four \n<|im_end|>", ()),
}


@pytest.mark.parametrize("manner", MANNERS, ids=lambda manner: manner["case"].replace(" ", "_"))
def test_manner(manner, tmp_path, capsys, monkeypatch, tokenizer):
    case, bad = manner["case"], Reply(manner["body"], manner["status"], manner["headers"])
    good = chat("fine", completion_tokens=3)
    monkeypatch.setenv("A_KEY", "secret")
    # p0 is asked first and answered well: what is there before the trouble must stay; p1 meets the bad manner
    answer = lambda body, nth: Reply(good) if asked(body) == "question 0" or case in RETRIED and nth else bad
    with ApiServer(answer) as api:
        code, out, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out", "--concurrency", 1,
                                        "--api-key-env", "A_KEY"), capsys)
    rows = rows_of(tmp_path / "out")
    assert rows["p0-t0"]["content"] == "fine"
    if case == "out of credit":
        assert code == 1 and "402" in err and set(rows) == {"p0-t0"} and not (tmp_path / "out/manifest.json").exists()
    elif case == "key refused":
        assert code == 2 and "A_KEY" in err and "secret" not in out + err and api.asked["question 1"] == 1
    elif case in RETRIED:
        assert code == 0 and rows["p1-t0"]["content"] == "fine" and api.asked == {"question 0": 1, "question 1": 2}
        first, second = [when for when, content, *_ in api.requests if content == "question 1"]
        assert second - first >= (2 if "Retry-After" in manner["headers"] else 0.02)
        assert ("asks to wait 2 s" in out) == ("Retry-After" in manner["headers"])  # else a long wait looks like a hang
    elif case in DROPPED:
        assert code == 0 and dropped_of(tmp_path / "out") == {"p1-t0": DROPPED[case]} and set(rows) == {"p0-t0"}
        assert api.asked["question 1"] == 1
    else:
        reasoning, content, text, flagged = KEPT[case]
        row = rows["p1-t0"]
        assert code == 0 and (row["reasoning"], row["content"]) == (reasoning, content)
        assert row["ids_source"] == "rebuilt"
        assert tokenizer.decode(row["response_ids"]) == text and set(flagged) <= set(row["flags"])
        stopped = row["response_ids"][-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert stopped == (row["finish_reason"] in ("stop", "tool_calls"))
        specials = {"<|im_end|>", "</think>"} | (set(re.findall(r"<\|\w+\|>", CALL)) if row["tool_calls"] else set())
        assert {tokenizer.convert_ids_to_tokens(i) for i in row["response_ids"] if i >= 2400} <= specials
        assert row["response_ids"].count(tokenizer.convert_tokens_to_ids("<|im_end|>")) <= 1


def test_connection_cut_in_the_middle_and_timeouts_are_retried(tmp_path, capsys):
    """Cut after 40 bytes; silent for 3 s; and one byte every 0.3 s, which a timeout between bytes would never end."""
    first = {"question 0": {"cut": 40}, "question 1": {"delay": 3}, "question 2": {"drip": 0.3}}
    answer = lambda body, nth: Reply(chat("fine", completion_tokens=3), **({} if nth else first[asked(body)]))
    with ApiServer(answer) as api:
        code, out, _ = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 3), tmp_path / "out", "--timeout-s", 1),
                                capsys)
    assert code == 0 and len(rows_of(tmp_path / "out")) == 3 and set(api.asked.values()) == {2}
    assert "timeout 2" in out and "connection_cut 1" in out


@pytest.mark.parametrize("choice", [
    {"message": {"content": 5}, "finish_reason": "stop"},
    {"message": {"content": "x"}, "finish_reason": {"type": "stop"}},
    {"message": {"content": "x", "reasoning_details": ["y"]}, "finish_reason": "stop"}, {"message": "x"}, None])
def test_an_answer_of_unknown_form_is_asked_again(choice):
    with pytest.raises(Retry, match="bad_answer"):
        read_chat({"choices": [choice]}, "openai")


def test_retry_after_in_seconds_and_as_a_date():
    assert [retry_after({"retry-after": value}) for value in ("2", "0.5", "soon")] == [2, 0.5, None]
    assert retry_after({"retry-after": formatdate(time.time() + 30, usegmt=True)}) == pytest.approx(30, abs=2)
    assert retry_after({}) is None and retry_after({"retry-after-ms": "250"}) == 0.25


def test_a_sample_that_always_fails_is_set_aside(tmp_path, capsys):
    answer = lambda body, nth: Reply("oops", 500) if asked(body) == "question 1" else FINE
    with ApiServer(answer) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 3), tmp_path / "out", "--max-attempts", 2)
        code, _, err = run_here(argv, capsys)
        assert code == 1 and "1 samples got no answer (http_500 1)" in err and len(rows_of(tmp_path / "out")) == 2
        assert not (tmp_path / "out/manifest.json").exists()
        code, *_ = run_here([*argv, "--max-failed-share", 1], capsys)
        assert code == 0 and dropped_of(tmp_path / "out") == {"p1-t0": "no_answer_http_500"}
    assert api.asked == {"question 0": 1, "question 1": 4, "question 2": 1}  # the good ones were not asked again


def test_a_key_that_runs_dry_does_not_drop_the_rest_in_silence(tmp_path, capsys):
    """OpenRouter says 403 when a key's limit is reached: such samples are set aside like failures, not dropped."""
    def answer(body, nth):
        return FINE if len(api.asked) <= 5 else Reply({"error": {"code": 403, "message": "Key limit exceeded"}}, 403)
    with ApiServer(answer) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 60), tmp_path / "out", "--concurrency", 1, "--max-attempts",
                     1)
        code, _, err = run_here(argv, capsys)
    assert code == 1 and "http_403 11" in err and len(rows_of(tmp_path / "out")) == 5
    assert not (tmp_path / "out/manifest.json").exists()


def test_refusals_of_what_is_left_do_not_end_a_resumed_run(tmp_path, capsys):
    """Everything answerable is answered; after a kill only samples that the API refuses are left and come first."""
    bad = {f"question {i}" for i in range(5, 30)}
    answer = lambda body, nth: Reply({"error": {"message": "too long"}}, 400) if asked(body) in bad else FINE
    with ApiServer(answer) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 30), tmp_path / "out")
        assert run_here(argv, capsys)[0] == 0
        for name in ("manifest.json", "dropped.jsonl"):
            (tmp_path / "out" / name).unlink()  # as a kill before the end leaves it
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 5
        assert len(dropped_of(tmp_path / "out")) == 25


def test_half_a_surrogate_pair_in_a_server_s_message(tmp_path, capsys):
    bad = lambda status: Reply('{"error": {"message": "bad \\ud800 text"}}', status)
    with ApiServer(lambda body, nth: FINE if nth else bad(400 if asked(body) == "question 1" else 500)) as api:
        code, out, _ = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out"), capsys)
    assert code == 0 and dropped_of(tmp_path / "out") == {"p1-t0": "http_400"} and "http_500" in out
    assert "\ud800" not in out


def test_server_that_refuses_everything_or_is_not_there(tmp_path, capsys):
    with ApiServer(lambda body, nth: Reply({"error": {"message": "unknown field"}}, 400)) as api:
        code, _, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 40), tmp_path / "a"), capsys)
        assert code == 2 and "refuses every request" in err and "unknown field" in err and sum(api.asked.values()) <= 24
        code, _, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 3), tmp_path / "b"), capsys)
        assert code == 2 and "not one answer" in err and not (tmp_path / "b/manifest.json").exists()
    code, _, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 3), tmp_path / "c"), capsys)
    assert code == 2 and api.url in err and len(err.splitlines()) == 1


def test_failover_and_outage(tmp_path, capsys):
    """One of two servers dies in the middle: the other takes over. The only one stays away: exit 2, everything kept."""
    def dying(after):  # a server whose `after`-th answer is its last
        def answer(body, nth):
            if len(api.requests) >= after and not api.dead:
                threading.Thread(target=api.die).start()
            return Reply(chat("fine", completion_tokens=3), delay=0.02)
        api = ApiServer(answer)
        return api
    slow = lambda body, nth: Reply(chat("fine", completion_tokens=3), delay=0.02)
    with ApiServer(slow) as healthy, dying(10) as first:
        code, out, _ = run_here(flags(first.url, prompts(tmp_path / "p.jsonl", 60), tmp_path / "out", "--base-url",
                                      healthy.url), capsys)
    assert code == 0 and len(rows_of(tmp_path / "out")) == 60 and "cannot be reached" in out
    assert 10 <= sum(first.asked.values()) <= 14 and sum(healthy.asked.values()) >= 46
    with dying(10) as api:
        code, _, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 60), tmp_path / "gone", "--outage-s", 1),
                                capsys)
    assert code == 2 and api.url in err and "no answer for 1 s" in err and 6 <= len(rows_of(tmp_path / "gone")) <= 14


@pytest.mark.parametrize("bad",
                         [Reply("slow down", 429, {"Retry-After": "60"}), Reply("busy", 503), Reply("oops", 500)],
                         ids=lambda reply: str(reply.status))
def test_a_server_that_gives_only_errors_does_not_draw_every_request(bad, tmp_path, capsys):
    """It has nothing in flight, so it is always the least busy one."""
    with ApiServer(lambda body, nth: bad) as broken, ApiServer(fine) as healthy:
        began = time.monotonic()
        argv = flags(broken.url, prompts(tmp_path / "p.jsonl", 20), tmp_path / "out", "--base-url", healthy.url)
        code, *_ = run_here(argv, capsys)
    assert code == 0 and len(rows_of(tmp_path / "out")) == 20 and sum(broken.asked.values()) <= 10
    assert time.monotonic() - began < 30


def test_sglang_behind_a_gateway_that_is_not_up_yet_is_no_text_api(tmp_path, capsys):
    with ApiServer(fine) as api:
        api.probe_status = 503
        code, _, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out"), capsys)
        assert code == 2 and "HTTP 503" in err and not api.requests
        assert run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out", "--api", "openai"),
                        capsys)[0] == 0


def test_a_busy_server_does_not_skip_the_template_check(tmp_path, capsys):
    class Stub:
        url, free, down, down_until, failures, in_flight = "http://stub", [1], False, 0.0, 0, 0

        async def post(self, path, body, key_env):
            reply = replies.pop(0)
            if isinstance(reply, Exception):
                raise reply
            return reply

    def check(*more):
        args = generate.build_parser().parse_args(["--tokenizer", "x", "--output-dir", "x", "--backoff-s", "0.01",
                                                   "--max-attempts", "3"])
        session = Session(args, None, Service("sglang", None, []), tokens, Store(tmp_path, None), [])
        session.servers = [Stub()]
        asyncio.run(session.check_kind([{"role": "user", "content": "x"}], None))
        return bool(session.checked)
    tokens, busy, broken = tokens_of(TINY_KIMI), Retry("http_503", blame=False), Retry("http_500")
    ids = tokens.prompt_ids([{"role": "user", "content": "x"}], None)
    good = {"choices": [{"prompt_token_ids": ids}], "usage": {"prompt_tokens": len(ids)}}
    replies = [*[busy] * 5, {"choices": []}, good]
    assert check() and not replies
    replies = [busy, {"choices": [{"prompt_token_ids": [1, *ids]}], "usage": {"prompt_tokens": len(ids) + 1}}]
    with pytest.raises(UserError, match="renders a prompt of user"):
        check()
    # says nothing about the template: the next prompt of this kind is compared
    replies = [Drop("http_400", "context too long")]
    assert not check()
    replies = [broken] * 3
    with pytest.raises(UserError, match="--no-check-template"):
        check()


# ---- requests in each API's own terms

@pytest.mark.parametrize("api, on, off", [
    ("openai", {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}},
     {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}),
    ("moonshot", {"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}),
    ("openrouter", {"reasoning": {"enabled": True}, "provider": {"order": ["moonshotai"], "allow_fallbacks": False}},
     {"reasoning": {"enabled": False}})])
@pytest.mark.parametrize("thinking", ["on", "off"])
def test_thinking_in_the_api_s_terms(api, on, off, thinking, tmp_path, capsys):
    with ApiServer(lambda body, nth: Reply(chat("fine", completion_tokens=2))) as server:
        argv = flags(server.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out", "--api", api, "--thinking",
                     thinking, "--temperature", 0.6, "--max-tokens", 7)
        assert run_here([*argv, *(["--provider", "moonshotai"] if api == "openrouter" else [])], capsys)[0] == 0
    _, _, body, headers = server.requests[0]
    assert (on if thinking == "on" else off).items() <= body.items()
    assert body["temperature"] == 0.6 and body["max_tokens"] == 7 and body["model"] == "m"
    assert isinstance(body["seed"], int)


def test_instant_mode_and_text_apis(tmp_path, capsys, tokenizer):
    """<think></think> is prompt, never loss; reasoning that comes although it was switched off cannot be placed."""
    def answer(body, nth):
        more = {"reasoning": "hm"} if asked(body) == "question 1" else {}
        return Reply(chat("fine", completion_tokens=2, **more))
    with ApiServer(answer) as api:
        assert run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out", "--thinking", "off"),
                        capsys)[0] == 0
    row = rows_of(tmp_path / "out")["p0-t0"]
    assert tokenizer.decode(row["prompt_ids"]).endswith("<think></think>")
    assert tokenizer.decode(row["response_ids"]) == "fine<|im_end|>"
    assert dropped_of(tmp_path / "out") == {"p1-t0": "reasoning_unasked"}


# ---- exactly once: kills, torn lines, two processes, full disks

def start(argv: list, log: Path, **more) -> subprocess.Popen:
    begin = subprocess.Popen if more else preloaded.popen
    return begin([sys.executable, "-u", str(ROOT / "01_generate.py"), *map(str, argv)], cwd=ROOT, stdout=open(log, "ab"),
                 stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, **more)


def files_of(folder: Path) -> dict[str, bytes]:
    """What must not depend on kills: all but the cost (answers in flight at a kill may have cost) and the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.name not in (".lock", ".unsettled", "report.json")}


def finished_rows(folder: Path) -> set[str]:
    """Ids of the rows that are on the disk right now, complete to their newline."""
    return {json.loads(line)["id"] for path in folder.glob("part-*.jsonl")
            for line in path.read_bytes().split(b"\n")[:-1]}


def killed_and_resumed(argv, server, capsys, kills: int, n: int, concurrency: int) -> list[set[str]]:
    """Run 01, kill -9 it `kills` times, then let it end. What was on the disk at each kill.

    The server kills it, in place of a random one of its answers: so it dies with requests in flight on any machine.
    """
    pick, on_disk, out = random.Random(n), [], Path(argv[argv.index("--output-dir") + 1])
    argv, log = [*argv, "--concurrency", concurrency], out.with_suffix(".log")
    for left in range(kills, 0, -1):
        before = len(finished_rows(out)) if out.exists() else 0
        at = pick.randint(1, max(1, 2 * (n - before) // (left + 2)))
        process = start(argv, log)
        server.kill_at(at if before else max(at, concurrency + 1), process)  # the first time after a row is on the disk
        assert process.wait() == -9, log.read_text()[-2000:]
        on_disk.append(finished_rows(out))
        server.session += 1
        last = sorted(out.glob("part-*.jsonl"))[-1]
        with open(last, "ab") as file:  # and a row torn in its middle, which a kill leaves now and then
            file.write(last.read_bytes().split(b"\n")[0][:pick.randint(1, 60)])
    code, out, err = run_here(argv, capsys)
    assert code == 0 and "\r" not in out + log.read_text(), err
    return on_disk


@pytest.mark.parametrize("n, kills, tokens", [(32, 2, 12), pytest.param(2000, 10, 48, marks=pytest.mark.slow)])
def test_killed_ten_times_equals_unkilled_on_the_real_engine(n, kills, tokens, engine, tmp_path, capsys):
    """Promised: an answer on the disk is never asked for again; a kill costs at most --concurrency requests, those in
    flight or not yet on the disk; the folder ends in the same bytes."""
    server = engine()
    questions = [json.loads(line) for line in open(ROOT / "configs/quickstart_prompts.jsonl")][:n]
    questions += [{"id": f"extra{i}", "prompt": f"What is item {i} of the list?"} for i in range(n - len(questions))]
    file, concurrency = write_jsonl(tmp_path / "p.jsonl", questions), 16
    with CountingProxy(server.url) as proxy:
        common = ["--prompts", file, "--base-url", proxy.url, "--tokenizer", TINY_KIMI, "--max-tokens", tokens,
                  "--temperature", 0,
                  "--no-dedup"]  # a few questions differ only in case
        code, _, err = run_here([*common, "--concurrency", concurrency, "--output-dir", tmp_path / "whole"], capsys)
        assert code == 0, err
        assert len(proxy.asked) == n
        proxy.asked.clear()
        began = time.monotonic()
        on_disk = killed_and_resumed([*common, "--output-dir", tmp_path / "killed"], proxy, capsys, kills, n,
                                     concurrency)
    whole, killed = files_of(tmp_path / "whole"), files_of(tmp_path / "killed")
    assert whole.keys() == killed.keys() and rows_of(tmp_path / "whole").keys() == rows_of(tmp_path / "killed").keys()
    different = [i for i, row in rows_of(tmp_path / "whole").items()
                 if row != rows_of(tmp_path / "killed")[i]] if n < 100 else []
    assert not different and whole == killed
    ids = {tuple(row["prompt_ids"]): row_id for row_id, row in rows_of(tmp_path / "killed").items()}
    for session, prompt_ids in proxy.asked:  # none of those that were on the disk when this session began
        assert session == 0 or ids[prompt_ids] not in on_disk[session - 1]
    again = len(proxy.asked) - n
    assert 0 <= again <= kills * concurrency
    print(f"{n} prompts, {kills} kills -9: equal bytes; {again} requests in flight at a kill were asked again; "
          f"{time.monotonic() - began:.0f} s")


def test_kill_loses_only_what_was_in_flight_at_an_api(tmp_path, capsys):
    """The same count where requests cost money and answers come at once: the rows' fsync is the bottleneck."""
    answer = Reply(chat("fine", completion_tokens=4, reasoning="r"))
    with ApiServer(lambda body, nth: answer) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 240), tmp_path / "out")
        killed_and_resumed(argv, api, capsys, kills=2, n=240, concurrency=8)
    assert len(rows_of(tmp_path / "out")) == 240 and sum(api.asked.values()) <= 240 + 2 * 8


def test_a_torn_line_is_cut_off_and_other_damage_is_named(tmp_path, capsys):
    with ApiServer(fine) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 5), tmp_path / "out")
        assert run_here(argv, capsys)[0] == 0
        part, whole = tmp_path / "out/part-00000.jsonl", (tmp_path / "out/part-00000.jsonl").read_bytes()
        (tmp_path / "out/manifest.json").unlink()
        part.write_bytes(whole[:-30])
        code, out, _ = run_here(argv, capsys)
        assert code == 0 and "torn last line" in out and part.read_bytes() == whole and sum(api.asked.values()) == 6
        (tmp_path / "out/manifest.json").unlink()
        part.write_bytes(whole.replace(b'{"id":"p2', b'{"id:"p2'))
        code, _, err = run_here(argv, capsys)
        assert code == 2 and "part-00000.jsonl: the row at byte" in err


def test_killed_while_sorting(tmp_path, capsys, monkeypatch):
    """finish() dies before and in the middle of placing the sorted copy; the next run ends in the same bytes."""
    monkeypatch.setattr(store, "ROWS_PER_PART", 4)
    with ApiServer(fine) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 10), tmp_path / "out")
        assert run_here(argv, capsys)[0] == 0
        whole = files_of(tmp_path / "out")
        assert [name for name in whole if name.startswith("part")] and len(rows_of(tmp_path / "out")) == 10
        for dies_at in range(4):
            (tmp_path / "out/manifest.json").unlink()
            part = tmp_path / "out/part-00001.jsonl"
            part.write_bytes(b"".join(reversed(part.read_bytes().splitlines(True))))
            calls, replace = [], os.replace

            def dying(source, target):
                if "part-" in str(source):
                    calls.append(source)
                    if len(calls) > dies_at:
                        raise KeyboardInterrupt
                replace(source, target)
            monkeypatch.setattr(os, "replace", dying)
            if dies_at < 3:
                with pytest.raises(KeyboardInterrupt):
                    generate.main([str(word) for word in argv])
            monkeypatch.setattr(os, "replace", replace)
            assert run_here(argv, capsys)[0] == 0
            assert files_of(tmp_path / "out") == whole
    assert sum(api.asked.values()) == 10


def test_sorting_leaves_no_part_behind_that_is_not_needed(tmp_path, monkeypatch):
    """A part may hold fewer rows than it could (a line deleted by hand, a full disk): sorted they need fewer parts."""
    monkeypatch.setattr(store, "ROWS_PER_PART", 4)
    row = lambda i: json.dumps({"id": f"p{i}-t0", "source": "p", "finish_reason": "stop", "prompt_ids": [1],
                                "response_ids": [2],
                                "ids_source": "server", "flags": []}) + "\n"
    for dies in (False, True):
        folder = tmp_path / str(dies)
        folder.mkdir()
        (folder / "part-00000.jsonl").write_text(row(3) + row(1) + row(2))
        (folder / "part-00001.jsonl").write_text(row(0))
        if dies:  # before the copy is put in place
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(store, "place_sorted", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
                generate.finish(folder, {}, {}, {})
            place_sorted(folder)
        generate.finish(folder, {}, {}, {})
        assert {path.name for path in folder.glob("part-*")} == {"part-00000.jsonl"}
        assert (folder / "part-00000.jsonl").read_text() == "".join(map(row, range(4)))


def test_disk_full_while_sorting_is_one_line(tmp_path, capsys, monkeypatch):
    with ApiServer(fine) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 3), tmp_path / "out")
        with monkeypatch.context() as patch:
            def full(*names):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            patch.setattr(os, "rename", full)
            code, _, err = run_here(argv, capsys)
        assert code == 1 and "cannot write (No space left on device)" in err and len(err.splitlines()) == 1
        assert run_here(argv, capsys)[0] == 0 and set(api.asked.values()) == {1}


def test_second_process_on_one_folder_refuses(tmp_path, capsys):
    refused = threading.Event()
    with ApiServer(lambda body, nth: refused.wait() and FINE) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 24), tmp_path / "out")
        first = start(argv, tmp_path / "log")
        while not api.requests:
            time.sleep(0.05)
        code, _, err = run_here(argv, capsys)
        refused.set()
        assert code == 2 and "another process is writing there" in err and len(err.splitlines()) == 1
        assert first.wait() == 0 and max(api.asked.values()) == 1


def test_full_disk_ends_in_one_line_and_resumes(tmp_path, capsys):
    """The files may not grow beyond 4,000 bytes in the first run: the write fails as on a full disk."""
    with ApiServer(fine) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 40), tmp_path / "out")
        limited = start(argv, tmp_path / "log",
                        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)))
        assert limited.wait() == 1 and "cannot write" in (tmp_path / "log").read_text().splitlines()[-1]
        n = len(finished_rows(tmp_path / "out"))
        assert 0 < n < 40
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 40
    assert sum(api.asked.values()) <= 40 + 2 * 4


def test_order_of_completion_leaves_no_trace(tmp_path, capsys):
    delays = {f"question {i}": (7 * i % 10) / 50 for i in range(10)}
    folders = []
    for name, concurrency in (("one", 1), ("many", 10)):
        with ApiServer(lambda body, nth: Reply(chat("fine", completion_tokens=3), delay=delays[asked(body)])) as api:
            assert run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 10), tmp_path / name, "--concurrency",
                                  concurrency), capsys)[0] == 0
        folders.append(files_of(tmp_path / name))
    assert folders[0] == folders[1]


def test_limit_grows_and_a_changed_wish_is_refused(tmp_path, capsys):
    with ApiServer(fine) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 9), tmp_path / "out")
        assert run_here([*argv, "--limit", 4], capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 4
        assert "complete already" in run_here([*argv, "--limit", 4], capsys)[1]
        small = (tmp_path / "out/manifest.json").read_bytes()
        assert run_here(argv, capsys)[0] == 0 and len(rows_of(tmp_path / "out")) == 9 and set(api.asked.values()) == {1}
        grown = json.loads((tmp_path / "out/manifest.json").read_text())
        assert grown["grown_from"] == [{"manifest": hashlib.sha256(small).hexdigest(), "kept": 4}]
        assert run_here(flags(api.url, tmp_path / "p.jsonl", tmp_path / "at once"), capsys)[0] == 0
        once = json.loads((tmp_path / "at once/manifest.json").read_text())
        assert once["files"] == grown["files"] and once == {key: grown[key] for key in grown if key != "grown_from"}
        code, _, err = run_here([*argv, "--temperature", 0.3], capsys)
        assert code == 2 and "temperature: 1.0 there, 0.3 now" in err
        write_jsonl(tmp_path / "p.jsonl", [{"id": "x", "prompt": "other"}])
        code, _, err = run_here(argv, capsys)
        assert code == 2 and "begun with other prompts" in err and "p.jsonl is not the old file" in err


def test_a_folder_of_the_version_before_goes_on(tmp_path, capsys):
    """tests/data/old_folders: half a run and the whole one, as an older version wrote them."""
    old = Path(__file__).parent / "data/old_folders"
    said = {row["messages"][-1]["content"]: row for row in rows_of(old / "responses").values()}

    def answer(body, nth):
        row = said[asked(body)]
        return Reply(chat(row["content"], **row["usage"]))
    for name in ("responses", "responses_half"):
        shutil.copytree(old / name, tmp_path / name)
        with ApiServer(answer) as api:
            code, out, err = run_here(flags(api.url, old / "prompts.jsonl", tmp_path / name), capsys)
        assert code == 0, err
        assert ("complete already" in out) == (name == "responses")
        assert len(api.requests) == (0 if name == "responses" else 3)
        now, then = files_of(tmp_path / name), files_of(old / "responses")
        manifests = [json.loads(files.pop("manifest.json")) for files in (now, then)]
        assert now == then
        now, then = manifests
        assert now | {"versions": None} == then | {"versions": None}


@pytest.mark.parametrize("wrong", [["--stop-token", "<|e|>"], ["--think-tokens", "<a>", "<b>"], ["--model", "other"]])
def test_a_wish_that_nothing_was_answered_for_may_be_mended(wrong, tmp_path, capsys):
    with ApiServer(lambda body, nth: FINE if body["model"] == "m" else Reply("no such model", 404)) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out")
        assert run_here([*argv, *wrong], capsys)[0] == 2
        assert run_here(argv, capsys)[0] == 0
        assert run_here([*argv, "--stop-token", "<think>"], capsys)[0] == 2  # but not under which there are answers
    assert len(rows_of(tmp_path / "out")) == 2


def test_a_finished_folder_stays_finished_when_no_server_answers(tmp_path, capsys):
    with ApiServer(fine) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 4), tmp_path / "out")
        assert run_here([*argv, "--limit", 2], capsys)[0] == 0
    assert run_here(argv, capsys)[0] == 2 and (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize("words, says", [
    (["--limit", -1], "--limit -1"), (["--max-cost-usd", 0], "--max-cost-usd 0"),
    (["--max-tokens-total", 0], "--max-tokens-total 0"),
    (["--log-interval", 0], "--log-interval 0"), (["--seed", -1, "--shuffle"], "--seed -1"),
    (["--extra-body", "[]"], "not a JSON object"),
    (["--extra-body", '{"max_tokens": 9}'], "['max_tokens'] would break the budgets"),
    (["--base-url", "http://h:abc"], "not an http(s) URL"), (["--tokenizer", "nowhere"], "nowhere: no such folder")])
def test_bad_flags_are_one_line(words, says, tmp_path, capsys):
    code, _, err = run_here([*flags(None, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out", "--model", "m"), *words],
                            capsys)
    assert code == 2 and says in err and len(err.splitlines()) == 1 and not (tmp_path / "out/stage.json").exists()


def test_white_space_around_a_key_is_not_sent(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret\r\n")
    with ApiServer(fine) as api:
        assert run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out", "--api-key-env", "A_KEY"),
                        capsys)[0] == 0
    assert api.requests[0][3]["Authorization"] == "Bearer secret"


# ---- budgets

@pytest.mark.parametrize("how", ["tokens", "cost told by the API", "cost from prices"])
def test_budget_stops_before_it_is_passed(how, tmp_path, capsys):
    """Answers take 0.05 s, 8 are in flight, each may cost up to 100 tokens and costs 20 + its prompt."""
    body = chat("fine " * 6, prompt_tokens=10, completion_tokens=20, cost=3e-5 if "told" in how else None)
    with ApiServer(lambda _, nth: Reply(body, delay=0.05)) as api:
        limit = {"tokens": ["--max-tokens-total", 1500], "cost told by the API": ["--max-cost-usd", 0.0015],
                 "cost from prices": ["--max-cost-usd", 0.0015, "--usd-per-mtok", 1, 1]}[how]
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 200), tmp_path / "out", "--concurrency", 8, "--max-tokens",
                     100, "--on-mismatch", "keep")
        code, out, _ = run_here([*argv, *limit], capsys)
        n = len(rows_of(tmp_path / "out"))
        assert code == 0 and "stopped: --max-" in out and n == sum(api.asked.values())
        assert n * 30 <= 1500 and n * 30 >= 1500 - 30 - 190  # what is left could not pay the dearest next request
        assert json.loads((tmp_path / "out/manifest.json").read_text())["stopped"] == limit[0]
        code, *_ = run_here([*argv, *(["--max-tokens-total", 3000] if how == "tokens"
                                      else ["--max-cost-usd", 0.003, *limit[2:]])], capsys)
        assert code == 0 and n < len(rows_of(tmp_path / "out")) <= 100 and max(api.asked.values()) == 1


def test_cost_bound_without_any_price_is_refused(tmp_path, capsys):
    with ApiServer(fine) as api:
        code, _, err = run_here(flags(api.url, prompts(tmp_path / "p.jsonl", 20), tmp_path / "out", "--max-cost-usd",
                                      1), capsys)
    assert code == 2 and "--usd-per-mtok" in err and sum(api.asked.values()) == 1


def test_a_model_that_costs_nothing_is_not_asked_one_by_one(tmp_path, capsys):
    with ApiServer(lambda body, nth: Reply(chat("fine", completion_tokens=3, cost=0.0), delay=0.5)) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 9), tmp_path / "out", "--max-cost-usd", 1, "--concurrency",
                     8)
        code, *_ = run_here(argv, capsys)
    times = [when for when, *_ in api.requests]
    assert code == 0 and times[-1] - times[0] < 2.5  # one by one: 4; the first alone, then 8 at once


def test_budget_counts_what_was_in_flight_at_a_kill(tmp_path, capsys):
    delay = lambda: 3 if 4 < len(api.requests) <= 8 else 0
    with ApiServer(lambda body, nth: Reply(chat("fine", prompt_tokens=10, completion_tokens=20), delay=delay())) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 40), tmp_path / "out", "--max-tokens", 100, "--on-mismatch",
                     "keep", "--max-tokens-total", 700)
        first = start(argv, tmp_path / "log")
        while len(api.requests) < 8:
            time.sleep(0.02)
        first.kill(), first.wait()
        code, out, _ = run_here(argv, capsys)
        assert code == 0
        # at the kill: 4 answers of 30 tokens written, 4 requests in flight, each up to 100 + its prompt of some 20
        assert 700 - 4 * 130 - 4 * 30 <= 700 - 30 * len(rows_of(tmp_path / "out")) and len(api.requests) <= 8 + 2
        assert "tokens of failed requests" in out


def test_failed_requests_that_may_have_cost_count(tmp_path, capsys):
    whole = chat("fine", prompt_tokens=10, completion_tokens=20)
    with ApiServer(lambda body, nth: Reply(whole, cut=30 if nth == 0 else None)) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 40), tmp_path / "out", "--concurrency", 1, "--max-tokens",
                     100, "--on-mismatch", "keep")
        code, out, _ = run_here([*argv, "--max-tokens-total", 400], capsys)
    assert code == 0 and 1 <= len(rows_of(tmp_path / "out")) <= 3 and "connection_cut" in out


# ---- token ids: tokenizers fast and slow, text that is not canonical

SLOW_TOKENIZER = '''
from transformers import PreTrainedTokenizer

class ByteTokenizer(PreTrainedTokenizer):
    """Like Kimi's: no offsets, an encode() of its own; ids 0-255 are bytes, 256 is two newlines, then special ones."""
    vocab_files_names = {}

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return 257

    def get_vocab(self):
        return {self._convert_id_to_token(i): i for i in range(257)} | dict(self.added_tokens_encoder)

    def _tokenize(self, text, **kwargs):
        return [self._convert_id_to_token(i) for i in self.bytes_to_ids(text)]

    @staticmethod
    def bytes_to_ids(text):
        ids, data = [], text.encode()
        while data:
            step = 2 if data[:2] == b"\\n\\n" else 1
            ids.append(256 if step == 2 else data[0])
            data = data[step:]
        return ids

    def _convert_token_to_id(self, token):
        return 256 if token == "<256>" else int(token[1:-1], 16)

    def _convert_id_to_token(self, index):
        return "<256>" if index == 256 else f"<{index:02x}>"

    def convert_tokens_to_string(self, tokens):
        return b"".join(b"\\n\\n" if token == "<256>" else bytes([int(token[1:3], 16)]) if len(token) == 4
                        else token.encode() for token in tokens).decode(errors="replace")

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs or allow_special_tokens:
            return super().encode(text, **kwargs)
        return self.bytes_to_ids(text)

    def _encode_plus(self, *args, return_offsets_mapping=False, **kwargs):
        if return_offsets_mapping:
            raise NotImplementedError("return_offset_mapping is not available when using Python tokenizers")
        return super()._encode_plus(*args, **kwargs)
'''


@pytest.fixture(scope="module")
def slow_tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    (folder / "tokenization_bytes.py").write_text(SLOW_TOKENIZER)
    special = json.loads((TINY_KIMI / "tokenizer.json").read_text())["added_tokens"]
    names = [token["content"] for token in special]
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "ByteTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_bytes.ByteTokenizer", None]},
        "eos_token": "<|im_end|>", "unk_token": "[UNK]", "pad_token": "[PAD]", "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(300 + i): {"content": name, "special": "think" not in name, "normalized": False,
                                                "lstrip": False, "rstrip": False,
                                                "single_word": False} for i, name in enumerate(names)}}))
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "vocab_size": 340}))
    shutil.copy(TINY_KIMI / "chat_template.jinja", folder)
    return folder


def tokens_of(folder: Path, thinking=True, trust=True) -> Tokens:
    return Tokens(load_tokenizer(folder, trust), STOP, THINK, TOOL, thinking)


def test_slow_tokenizer_without_offsets(slow_tokenizer, tmp_path, capsys):
    tokens = tokens_of(slow_tokenizer)
    assert not tokens.tokenizer.is_fast
    with pytest.raises(NotImplementedError):
        tokens.tokenizer("a", return_offsets_mapping=True)
    reply = Reply(chat("é <|im_end|> <think>\n\n", reasoning="hm", completion_tokens=26))
    with ApiServer(lambda body, nth: reply) as api:
        argv = flags(api.url, prompts(tmp_path / "p.jsonl", 2), tmp_path / "out", "--tokenizer", slow_tokenizer,
                     "--trust-remote-code")
        code, *_ = run_here(argv, capsys)
    row = rows_of(tmp_path / "out")["p0-t0"]
    text = b"\xc3\xa9 <|im_end|> <think>"
    assert code == 0 and row["response_ids"] == [*b"hm", tokens.end_think, *text, 256, tokens.stop]
    assert row["flags"] == ["prompt_tokens_differ"]
    assert row["prompt_ids"][-1] == tokens.think
    assert tokens.decode(row["prompt_ids"]).startswith("<|im_user|>user<|im_middle|>question 0<|im_end|>")


@pytest.fixture(scope="module")
def newline_tokenizer(tmp_path_factory) -> Path:
    """Tiny Kimi's tokenizer (fast) with Kimi's own habit of one token for two newlines."""
    folder = tmp_path_factory.mktemp("newline") / "target"
    shutil.copytree(TINY_KIMI, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["ĊĊ"] = 5000
    spec["model"]["merges"].append(["Ċ", "Ċ"])
    spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize("name", ["newline_tokenizer", "slow_tokenizer"])
def test_two_newline_ids_that_encode_to_one_are_caught(name, request):
    """The engine emitted \\n and \\n; their text encodes to the one id \\n\\n. From the engine: ids kept, flagged.
    From a text API: usage counts one token more than the rebuilt ids: flagged."""
    tokens = tokens_of(request.getfixturevalue(name), thinking=False)
    newline, = tokens.encode("\n")
    two = tokens.encode("\n\n")
    assert len(two) == 1 and two != [newline]
    prompt, emitted = tokens.prompt_ids([{"role": "user", "content": "x"}], None), [newline, newline, tokens.stop]
    body = {"output_ids": emitted,
            "meta_info": {"finish_reason": {"type": "stop", "matched": tokens.stop}, "prompt_tokens": len(prompt)}}
    answer = read_native(body, prompt, tokens)
    ids, source = settle_ids(answer, prompt, tokens, 0, "rule")
    assert (ids, source, answer.content, answer.flags) == (emitted, "server", "\n\n", ["rebuild_differs"])
    answer = read_chat(chat("\n\n", prompt_tokens=len(prompt), completion_tokens=3), "openai")
    ids, source = settle_ids(answer, prompt, tokens, 0, "rule")
    assert (ids, source) == ([*two, tokens.stop], "rebuilt") and answer.flags == ["ids_mismatch"]
    with pytest.raises(Drop, match="ids_missing"):
        settle_ids(read_chat(chat("\n\n", completion_tokens=3), "openai"), prompt, tokens, 0, "drop")


@pytest.mark.parametrize("said, rule", [(4, []), (3, ["stop_not_counted"]), (8, ["ids_mismatch"]), (9, "ids_missing"),
                                        (2, ["ids_mismatch"]), (None, ["ids_not_compared"])])
def test_the_rule_for_ids_that_differ_from_usage(said, rule):
    """Rebuilt here: </think> + 2 tokens + stop = 4. An API may not count the stop token; max(4, 2 %) may be missing."""
    tokens = tokens_of(TINY_KIMI)
    prompt = tokens.prompt_ids([{"role": "user", "content": "x"}], None)
    text = next(text for text in ("ab", "qz", "a!", "x\n") if len(tokens.encode(text)) == 2)
    answer = read_chat(chat(text, prompt_tokens=len(prompt), completion_tokens=said), "openai")
    if isinstance(rule, str):
        with pytest.raises(Drop, match=rule):
            settle_ids(answer, prompt, tokens, 0, "rule")
    else:
        assert len(settle_ids(answer, prompt, tokens, 0, "rule")[0]) == 4 and answer.flags == rule


def test_answers_that_stand_in_the_prompt_rows_keep_their_reasoning(tmp_path, capsys, tokenizer):
    """[user, assistant with reasoning]: the template would empty it; the answer never passes through the template."""
    file = write_jsonl(tmp_path / "p.jsonl", [
        {"id": "a", "messages": [{"role": "user", "content": "2+2?"},
                                 {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
                                 {"role": "user", "content": "3+3?"},
                                 {"role": "assistant", "content": "6", "reasoning": "three and three"}]},
        {"id": "b", "messages": [{"role": "user", "content": "no answer here"}]}])
    assert run_here(flags(None, file, tmp_path / "out", "--answers", "given"), capsys)[0] == 0
    rows = rows_of(tmp_path / "out")
    answers = [tokenizer.decode(rows[i]["response_ids"]) for i in ("a-t0", "a-t1")]
    assert answers == ["two and two</think>4<|im_end|>", "three and three</think>6<|im_end|>"]
    second = tokenizer.decode(rows["a-t1"]["prompt_ids"])
    # as Kimi's template serves turn 2
    assert "two and two" not in second and "<think></think>4<|im_end|>" in second and second.endswith("<think>")
    assert dropped_of(tmp_path / "out") == {"b-t0": "no_answer_given"}


def test_given_calls_that_are_no_text_are_dropped(tmp_path, capsys):
    talk = lambda text, **answer: [{"role": "user", "content": text}, {"role": "assistant", **answer}]
    file = write_jsonl(tmp_path / "p.jsonl", [
        {"id": "good", "messages": talk("a", content="b")},
        {"id": "object",
         "messages": talk("c", tool_calls=[{"id": "x", "function": {"name": "f", "arguments": {"a": 1}}}])},
        {"id": "bare", "messages": talk("d", tool_calls=[{}])},
        {"id": "no_id", "messages": talk("e", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])}])
    assert run_here(flags(None, file, tmp_path / "out", "--answers", "given"), capsys)[0] == 0
    assert set(rows_of(tmp_path / "out")) == {"good-t0", "no_id-t0"}
    assert dropped_of(tmp_path / "out") == {"object-t0": "bad_prompt", "bare-t0": "bad_prompt"}


def test_special_tokens_must_be_one_id(tmp_path, capsys):
    code, _, err = run_here(flags(None, prompts(tmp_path / "p.jsonl", 1), tmp_path / "out", "--answers", "given",
                                  "--stop-token", "<|end|>"), capsys)
    assert code == 2 and "<|end|>" in err and "--stop-token" in err


def test_tool_calls_read_from_ids_and_rebuilt_are_the_same():
    tokens = tokens_of(TINY_KIMI)
    prompt = tokens.prompt_ids([{"role": "user", "content": "x"}], None)
    calls = [{"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
             for i, (name, arguments) in enumerate([("add", '{"a": 1}'), ("get-weather", '{"city": "Köln"}')])]
    answer = Answer("I call.", "think", calls, "tool_calls", None)
    ids = tokens.rebuilt_ids(answer, prompt, 0)
    assert tokens.read(prompt, ids) == ("think", "I call.", calls, [])
    assert tokens.read(prompt, ids[:-2])[3] == ["tool_calls_malformed"]
    assert tokens.read(prompt, ids[:-8])[2] == calls[:1]
    half = {**calls[1], "function": {"name": "get-weather", "arguments": '{"ci'}}
    cut = Answer("I call.", "think", [calls[0], half], "length", None)
    # it did not emit the call's end
    assert tokens.decode(tokens.rebuilt_ids(cut, prompt, 0)).endswith('<|tool_call_argument_begin|>{"ci')
    made_up = Answer("", None, [{"id": "call_8f3", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
                     "tool_calls", None)
    assert "functions.add:5" in tokens.decode(tokens.rebuilt_ids(made_up, prompt, 5))
    assert made_up.flags == ["tool_id_rebuilt"]


def test_calls_of_the_engine_stay_as_emitted():
    """An id that is not of Kimi's form is rewritten only where ids are rebuilt."""
    tokens = tokens_of(TINY_KIMI)
    prompt, mark = tokens.prompt_ids([{"role": "user", "content": "x"}], None), tokens.tool
    call = [mark["call_begin"], *tokens.encode("add:0"), mark["argument_begin"], *tokens.encode("{}"), mark["call_end"]]
    ids = [tokens.end_think, mark["section_begin"], *call, mark["section_end"], tokens.stop]
    answer = read_native({"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop"}}}, prompt, tokens)
    assert settle_ids(answer, prompt, tokens, 3, "rule") == (ids, "server")
    assert answer.tool_calls[0]["id"] == "add:0" and answer.flags == ["rebuild_differs"]


def test_a_summary_is_no_reasoning_wherever_it_stands():
    for kind, reason in (("reasoning.summary", "reasoning_summary"), ("reasoning.encrypted", "reasoning_encrypted")):
        with pytest.raises(Drop, match=reason):
            read_chat(chat("4", completion_tokens=5, reasoning="in short: 4", reasoning_details=[{"type": kind}]),
                      "openrouter")


# ---- prompts

def test_turns_of_a_conversation():
    u, a, t = ({"role": role, "content": role} for role in ("user", "assistant", "tool"))
    call = {"role": "assistant", "tool_calls": [{}]}
    plan = plan_turns
    assert plan([u]) == [([u], None)]
    assert plan([u, a, u]) == [([u], a), ([u], None)]
    assert plan([u, a]) == [([u], a)]
    assert plan([u, call, t]) == [([u, call, t], None)]  # the tool's result answers this very call: it stays
    assert plan([u, call, t, a, u]) == [([u, call, t], a), ([u], None)]
    assert plan([a, u]) == [([a, u], None)]  # a greeting stays
    assert plan([u, call]) == [([u], call)]


def test_multi_turn_asks_in_order_with_what_the_target_said(tmp_path, capsys, tokenizer):
    file = write_jsonl(tmp_path / "p.jsonl", [
        {"id": "talk/1", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"},
                                      {"role": "assistant", "content": "old"},
                                      {"role": "user", "content": "two"}]},
        {"id": "cut", "messages": [{"role": "user", "content": "cut me"}, {"role": "assistant", "content": "x"},
                                   {"role": "user", "content": "three"}]}])
    answer = lambda body, nth: Reply(chat(f"new {body['messages'][-1]['content']}", completion_tokens=4, reasoning="r",
                                          finish="length" if asked(body) == "cut me" else "stop"))
    with ApiServer(answer) as api:
        assert run_here(flags(api.url, file, tmp_path / "out", "--on-mismatch", "keep"), capsys)[0] == 0
    rows, name = rows_of(tmp_path / "out"), safe_id("talk/1")
    assert name.startswith("talk_1-") and set(rows) == {f"{name}-t0", f"{name}-t1", "cut-t0"}
    assert [m["content"] for m in rows[f"{name}-t1"]["messages"]] == ["Be brief.", "one", "new one", "two"]
    assert dropped_of(tmp_path / "out") == {"cut-t1": "after_cut_turn"} and api.asked["three"] == 0
    order = [content for _, content, *_ in api.requests]
    assert order.index("one") < order.index("two")


def test_no_turn_follows_a_call_whose_result_is_not_known(tmp_path, capsys):
    call = [{"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    talk = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    file = write_jsonl(tmp_path / "p.jsonl", [{"id": "x", "messages": talk}])
    for finish in ("stop", "tool_calls"):
        with ApiServer(lambda body, nth: Reply(chat(None, finish=finish, tool_calls=call))) as api:
            assert run_here(flags(api.url, file, tmp_path / finish), capsys)[0] == 0
        assert len(api.requests) == 1 and dropped_of(tmp_path / finish) == {"x-t1": "after_tool_call"}


@pytest.mark.parametrize("options, says", [("prompt=q", "mapped"), ("", "usual"), ("messages=talk", "talked")])
def test_a_mapped_column_wins(options, says):
    row = {"q": "mapped", "messages": [{"role": "user", "content": "usual"}],
           "talk": [{"role": "user", "content": "talked"}]}
    options = split_spec(f"x.jsonl,{options}")[1] if options else {}
    assert as_messages(row, options, None)[0] == [{"role": "user", "content": says}]


@pytest.mark.parametrize("weight", ["abc", "0", "-1", "nan", "inf", ""])
def test_a_weight_is_a_number(weight):
    with pytest.raises(UserError, match="weight"):
        split_spec(f"x.jsonl,weight={weight}")


def test_the_log_counts_prompts_that_will_be_asked(tmp_path, capsys):
    """The mix ends with the first exhausted source, duplicates are not asked, no eta before a prompt is finished."""
    few = write_jsonl(tmp_path / "few.jsonl", [{"prompt": f"a {i}"} for i in range(10)])
    many = write_jsonl(tmp_path / "many.jsonl", [{"prompt": f"b {i // 2}"} for i in range(100)])
    delay = lambda: 0.3 if len(api.requests) == 1 else 0
    with ApiServer(lambda body, nth: Reply(chat("fine", completion_tokens=3), delay=delay())) as api:
        argv = flags(api.url, f"{few},weight=3", tmp_path / "out", "--prompts", f"{many},weight=1", "--concurrency", 1)
        code, out, _ = run_here([*argv, "--log-interval", 0.1], capsys)
    lines = [line for line in out.splitlines() if " prompts | " in line]
    assert code == 0 and " 0/13 prompts" in lines[0] and lines[0].endswith("eta unknown")
    assert " 12/12 prompts" in lines[-1] and lines[-1].endswith("eta 0h00m00s")


def test_the_same_words_with_other_tools_are_another_prompt():
    tools = [[{"type": "function", "function": {"name": name}}] for name in "ab"]
    key = lambda text, given: fingerprint([{"role": "user", "content": text}], given)
    keys = [key("x", tools[0]), key("X ", tools[0]), key("x", tools[1]), key("x", None)]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_mix_holds_its_weights_in_every_prefix():
    order = list(mix([100, 1000], [3.0, 1.0], seed=0, shuffle=True))
    again, other = (list(mix([100, 1000], [3.0, 1.0], seed=seed, shuffle=True)) for seed in (0, 1))
    assert order == again != other
    for n in (4, 40, 101):
        assert abs(sum(source == 0 for source, _ in order[:n]) - 0.75 * n) <= 1
    assert len(set(order)) == len(order) and len(order) in range(130, 136)  # ends with the first exhausted source
    assert sorted(mix([3, 5], [None, None], 0, False)) == [(0, i) for i in range(3)] + [(1, i) for i in range(5)]


def test_datasets_columns_weights_and_duplicates(tmp_path, capsys):
    """A parquet with its own columns and ShareGPT roles, a save_to_disk folder, a JSONL; duplicates go, in any case."""
    import datasets
    talk = [[{"from": "human", "value": f"Tell me {i}"}, {"from": "gpt", "value": "old"}] for i in range(6)]
    datasets.Dataset.from_dict({"talk": talk,
                                "uid": [f"u{i}" for i in range(6)]}).to_parquet(tmp_path / "share.parquet")
    datasets.Dataset.from_dict({"q": [f"Ask {i}" for i in range(6)] + ["  tell ME\n0"],
                                "sys": ["Be kind."] * 6 + [""]}).save_to_disk(tmp_path / "disk")
    file = write_jsonl(tmp_path / "own.jsonl", [{"id": "w", "prompt": "ＴＥＬＬ me 1"}, {"prompt": "third"}])
    with ApiServer(fine) as api:
        argv = ["--dataset", f"{tmp_path}/share.parquet,messages=talk,id=uid", "--dataset",
                f"{tmp_path}/disk,prompt=q,system=sys", "--prompts", file,
                "--base-url", api.url, "--model", "m", "--tokenizer", TINY_KIMI, "--output-dir", tmp_path / "out"]
        code, out, err = run_here(argv, capsys)
        assert code == 0, err
    rows, dropped = rows_of(tmp_path / "out"), dropped_of(tmp_path / "out")
    assert len(rows) == 13 and sorted(dropped.values()) == ["duplicate", "duplicate"]
    assert {row["source"] for row in rows.values()} == {"share", "disk", "own"} and "u3-t0" in rows
    assert "own-1-t0" in rows
    assert rows["disk-2-t0"]["messages"] == [{"role": "system", "content": "Be kind."},
                                             {"role": "user", "content": "Ask 2"}]
    code, _, err = run_here(["--dataset", f"{tmp_path}/share.parquet", *argv[2:]], capsys)
    assert code == 2 and "no prompt among the columns ['talk', 'uid']" in err


def test_a_data_set_file_is_its_bytes_and_its_split(tmp_path, capsys):
    import datasets
    file = tmp_path / "x.parquet"
    datasets.Dataset.from_dict({"q": ["one", "two"], "id": ["a", "a"]}).to_parquet(file)
    with ApiServer(fine) as api:
        argv = [*flags(api.url, file, tmp_path / "out")[2:], "--dataset"]
        assert "the id a appears twice" in run_here([*argv, f"{file},prompt=q"], capsys)[2] and not api.requests
        assert run_here([*argv, f"{file},prompt=q,id=none,split=train[:1]"], capsys)[0] == 0
        assert len(rows_of(tmp_path / "out")) == 1
        os.utime(file, (1, 1))
        assert "complete already" in run_here([*argv, f"{file},prompt=q,id=none,split=train[:1]"], capsys)[1]


def test_ids_are_compared_before_anything_is_paid(tmp_path, capsys):
    """The prompts of a folder cannot be changed any more once it is begun."""
    file = write_jsonl(tmp_path / "p.jsonl", [{"id": f"p{i}", "prompt": f"question {i}"} for i in (*range(12), 0)])
    with ApiServer(fine) as api:
        code, _, err = run_here(flags(api.url, file, tmp_path / "out"), capsys)
        assert code == 2 and "p.jsonl:13: the id p0 appears twice" in err and not api.requests
        # what a row without an id in p.jsonl is called
        other = write_jsonl(tmp_path / "q.jsonl", [{"id": "p-1", "prompt": "x"}])
        file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
        code, _, err = run_here(flags(api.url, other, tmp_path / "out", "--prompts", file), capsys)
        assert code == 2 and "p.jsonl:2: the id p-1 appears twice" in err and not api.requests


@pytest.mark.parametrize("line, says", [("{", "p.jsonl:2"), ('{"id": "x"}', "no prompt among the columns ['id']"),
                                        ('{"id": "p0", "prompt": "y"}', "appears twice"), ("[]", "not an object")])
def test_bad_prompt_files_are_one_line_and_cost_nothing(line, says, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"id": "p0", "prompt": "x"}\n' + line + "\n")
    code, _, err = run_here(flags(None, tmp_path / "p.jsonl", tmp_path / "out", "--answers", "given"), capsys)
    assert code == 2 and says in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("row, reason", [({"prompt": ""}, "empty_prompt"),
                                         ({"messages": [{"role": "boss", "content": "x"}]}, "bad_prompt"),
                                         ({"messages": "nope"}, "bad_prompt"),
                                         ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                                          "not_text"), ({"prompt": "\ud800"}, "not_utf8")])
def test_prompts_that_cannot_be_asked_are_dropped(row, reason, tmp_path, capsys):
    file = write_jsonl(tmp_path / "p.jsonl", [{"id": "good", "prompt": "x"}, {"id": "bad", **row}])
    with ApiServer(fine) as api:
        assert run_here(flags(api.url, file, tmp_path / "out"), capsys)[0] == 0
    assert dropped_of(tmp_path / "out") == {"bad-t0": reason} and len(api.requests) == 1


def test_ids_are_safe_file_names():
    for prompt_id in ("a", "a b", "../x", "x" * 300, "ü", ""):
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,120}", f"{safe_id(prompt_id)}-t1000")
    assert safe_id("a b") != safe_id("a/b") and safe_id("q-1.x_2") == "q-1.x_2"


# ---- the real engine

ADDER = {"type": "function", "function": {"name": "add", "description": "Adds.",
                                          "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_rows_hold_what_the_engine_read_and_emitted(thinking, engine, tmp_path, tokenizer, capsys, monkeypatch):
    """One row a turn; prompt ids == template; response ids == what /generate emits; equal to the rebuilt or flagged."""
    server = engine()
    call = {"role": "assistant", "content": "",
            "tool_calls": [{"id": "functions.add:0", "type": "function",
                            "function": {"name": "add", "arguments": '{"a": 1}'}}]}
    file = write_jsonl(tmp_path / "p.jsonl",
                       [{"id": f"q{i}", "prompt": f"What does list item {i} hold?"} for i in range(10)] + [
        {"id": "turns", "messages": [{"role": "user", "content": "What is a list?"},
                                     {"role": "assistant", "content": "old"},
                                     {"role": "user", "content": "And a dict?"}]},
        {"id": "tools", "tools": [ADDER],
         "messages": [{"role": "user", "content": "add 1"}, call,
                      {"role": "tool", "tool_call_id": "functions.add:0", "content": "1"}]}])
    monkeypatch.setattr(stage, "PROGRAM", "01_generate")  # as when it is the process
    code, out, err = run_here(["--prompts", file, "--base-url", server.url, "--tokenizer", TINY_KIMI, "--output-dir",
                               tmp_path / "out",
                               "--max-tokens", 24, "--temperature", 0, "--thinking", thinking, "--concurrency", 8,
                               "--log-interval", 0.5], capsys)
    assert code == 0, err
    lines = out.splitlines()
    assert "\r" not in out + err and lines[-1].endswith(f"done: {tmp_path / 'out'}")
    assert all(" generate " in line for line in lines)
    for what in ("user", "user+assistant+tool with tools"):  # the server's own chat route reads them so
        assert any(f"reads a prompt of {what} as the same" in line for line in lines), lines
    assert any("ids rebuilt from text would equal" in line for line in lines)
    rows, tokens = rows_of(tmp_path / "out"), tokens_of(TINY_KIMI, thinking == "on")
    assert {f"q{i}-t0" for i in range(10)} | {"turns-t0", "tools-t0"} <= set(rows)
    artifacts = json.loads((ROOT / "configs/artifacts.json").read_text())["stages"]["01_generate"]
    equal = 0
    for row in rows.values():
        assert list(row) == artifacts["row"] and row["ids_source"] == "server"
        # as SGLang 0.5.23 renders a tool
        tools = [{**ADDER, "defer_loading": None}] if row["id"].startswith("tools") else None
        assert row["prompt_ids"] == tokenizer.apply_chat_template(row["messages"], tools=tools,
                                                                  add_generation_prompt=True, tokenize=True,
                                                                  return_dict=False,
                                                                  thinking=thinking == "on")
        assert tokenizer.decode(row["prompt_ids"]).endswith("<think>" if thinking == "on" else "<think></think>")
        engine_says = post(f"{server.url}/generate",
                           {"input_ids": row["prompt_ids"],
                            "sampling_params": {"max_new_tokens": 24, "temperature": 0}})
        assert row["response_ids"] == engine_says["output_ids"]
        assert (row["response_ids"][-1] == tokens.stop) == (row["finish_reason"] != "length")
        again = Answer(row["content"], row["reasoning"], row["tool_calls"], row["finish_reason"], None)
        try:
            same = tokens.rebuilt_ids(again, row["prompt_ids"], 0) == row["response_ids"]
        except Drop:
            same = False
        assert same != ("rebuild_differs" in row["flags"])
        equal += same
    if "turns-t1" in rows:
        assert rows["turns-t1"]["messages"][1]["content"] == rows["turns-t0"]["content"]
    else:
        assert dropped_of(tmp_path / "out")["turns-t1"].startswith("after_")
    print(f"thinking {thinking}: {equal} of {len(rows)} rows would be rebuilt from text to the engine's ids, "
          "the others are flagged")


def test_the_text_route_of_the_same_engine(engine, tmp_path, tokenizer, capsys):
    """/v1/chat/completions of the real SGLang, text only: rebuilt ids equal the engine's or are flagged."""
    server = engine()
    file = prompts(tmp_path / "p.jsonl", 12)
    common = ["--prompts", file, "--tokenizer", TINY_KIMI, "--max-tokens", 24, "--temperature", 0, "--concurrency", 8,
              "--base-url", server.url]
    for name, more in (("ids", []), ("text", ["--api", "openai", "--model", "tiny", "--on-mismatch", "keep"])):
        code, _, err = run_here([*common, "--output-dir", tmp_path / name, *more], capsys)
        assert code == 0, err
    ids, text = rows_of(tmp_path / "ids"), rows_of(tmp_path / "text")
    assert {row["ids_source"] for row in text.values()} == {"rebuilt"} and set(text) == set(ids)
    for row_id, row in text.items():
        assert row["prompt_ids"] == ids[row_id]["prompt_ids"] and "prompt_tokens_differ" not in row["flags"]
        differs = "rebuild_differs" in ids[row_id]["flags"]
        assert row["response_ids"] == ids[row_id]["response_ids"] or row["flags"] or differs
        assert ("ids_mismatch" in row["flags"]) <= differs
    assert run_here([*common, "--output-dir", tmp_path / "text"], capsys)[0] == 2  # ids of two kinds in one folder


def test_another_template_than_the_server_s_is_refused(engine, tmp_path, capsys):
    server = engine()
    other = tmp_path / "other"
    shutil.copytree(TINY_KIMI, other, ignore=shutil.ignore_patterns("*.safetensors"))
    template = (TINY_KIMI / "chat_template.jinja").read_text()
    assert "<|im_assistant|>assistant<|im_middle|><think>" in template
    (other / "chat_template.jinja").write_text(template.replace("<|im_assistant|>assistant<|im_middle|><think>",
                                                                "<|im_assistant|>robot<|im_middle|><think>"))
    argv = ["--prompts", prompts(tmp_path / "p.jsonl", 2), "--base-url", server.url, "--tokenizer", other,
            "--output-dir", tmp_path / "out", "--max-tokens", 4]
    code, _, err = run_here(argv, capsys)
    assert code == 2 and "renders a prompt of user" in err and len(err.splitlines()) == 1
    assert run_here([*argv, "--no-check-template"], capsys)[0] == 0
