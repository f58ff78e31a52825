"""One session of asking in 01_generate: workers that take prompt after prompt, ask for its turns and keep the answers.

An answer is on the disk before its worker asks for the next one. Where a request fails, the sample is asked again, of
another server if there is one; a server that cannot be reached, or gives only errors, gets no more than a probe now and
then.
"""
from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter

from eagle3.account import Account, fate_of
from eagle3.api import Retry, Server, Service, check_template, read_chat, read_native, request_body
from eagle3.budget import Amount, Budget, Halt
from eagle3.network import tls_context
from eagle3.prompts import Prompt, mixed, read_prompts
from eagle3.responses import Answer, Drop, Question, answer_row, content_of, drop_row, message_of, text_calls
from eagle3.prompt_sources import Source
from eagle3.stage import UserError, bar, log
from eagle3.store import Store, cannot_write, writable
from eagle3.tokens import Tokens, settle_ids

PROBE_S = 2.0  # between two tries at a server that cannot be reached
FRUITLESS = 20  # so many samples from the first one on, none of them answered in a usable way: it is not the samples
BARE = 200  # so many answers, none of them with reasoning although thinking is on: its marks were lost on the way
# Reasons that say nothing of the server
PROMPTS_FAULT = ("after_", "template", "not_utf8", "bad_prompt", "no_answer_", "beyond_context")


def room_needed(args) -> int:
    """Bytes of the answers that may be in flight at once, at 12 a token; 256 MB are enough to end in good order."""
    return min(args.concurrency * args.max_tokens * 12, 256_000_000)


def given_answer(message: dict | None) -> Answer:
    """The answer that stands in the prompt row itself (--answers given). Raises Drop."""
    if message is None:
        raise Drop("no_answer_given")
    content, reasoning = content_of(message.get("content"))
    try:
        calls = text_calls(message.get("tool_calls") or [])
    except Drop as drop:
        raise Drop("bad_prompt", drop.detail) from None
    if not content and not calls:
        raise Drop("empty")
    finish = "tool_calls" if calls else "stop"
    return Answer(content, message.get("reasoning_content") or reasoning, calls, finish, None, provider="given")


class Session:
    """The workers of one session and what they share.

    unpaid: row id -> drop row of samples that cost nothing (unusable prompt, refused with 4xx, no answer). They are
    written only at the end, so a resumed run tries them again; answers and drops that were paid for are on the disk at
    once.
    halt: what ended the session before its prompts did. earlier: of `prompts.rows_before`.
    """

    def __init__(self, args, key: str | None, service: Service, tokens: Tokens, store: Store, sources: list[Source],
                 earlier: list[list[int]] = ()):
        self.args, self.api, self.tokens, self.store = args, service.api, tokens, store
        self.context = service.context
        self.budget, self.unpaid, self.halt = Budget(args, store), {}, None
        tls = tls_context()  # one for all clients
        self.servers = [Server(url, key, args.concurrency, args.timeout_s, tls) for url in service.urls]
        self.account = Account(sources)
        self.prompts = read_prompts(sources, args, self.account, earlier)
        self.n_rows = sum(1 for _ in mixed(sources, args.seed, False, earlier))
        self.failed, self.errors = Counter(), Counter()  # kinds of error: of samples given up, of all attempts
        self.n_prompts = self.n_answers = self.n_tokens = 0
        self.fruitless = Counter()  # why samples gave no row, until one of this folder did
        self.n_skipped = 0  # rows that cannot be asked
        self.n_old = 0  # prompts that an earlier session finished
        self.started, self.failing_since = time.monotonic(), None
        self.checked, self.checking = set(), asyncio.Lock()  # kinds of prompt whose template was compared

    # ---- what the user sees ----
    @property
    def total(self) -> int:
        """Prompts to answer, as far as is known: rows further on may turn out to be duplicates."""
        left = self.n_rows - self.n_skipped
        return left if self.args.limit is None else min(left, self.args.limit)

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(self.args.log_interval)
            self.progress()
            if not self.halt and not writable(self.store.folder, room_needed(self.args)):
                self.halt = Halt(f"{self.store.folder}: the disk is full but for what is in flight. Make room; "
                                 "the same command goes on.", code=1)

    def progress(self) -> None:
        took = time.monotonic() - self.started
        new = self.n_prompts - self.n_old
        left = int((self.total - self.n_prompts) * took / new) if new else 0
        known = new or self.n_prompts == self.total
        eta = f"{left // 3600}h{left % 3600 // 60:02d}m{left % 60:02d}s" if known else "unknown"
        spent = self.budget.spent()
        errors = ", ".join(f"{kind} {n}" for kind, n in self.errors.most_common()) or "none"
        log(f"{self.n_prompts}/{self.total} prompts | {self.n_answers / took:.1f} answers/s | "
            f"{self.n_tokens / took:,.0f} tok/s | in flight {self.budget.in_flight} | "
            f"dropped {len(self.store.dropped.keys() | self.unpaid.keys())} | errors {errors} | "
            f"{spent.tokens:,.0f} tokens in all | ${spent.usd:.4f} | eta {eta}")

    def failure_text(self) -> str:
        kinds = ", ".join(f"{kind} {n}" for kind, n in self.failed.most_common())
        return (f"{self.failed.total()} samples got no answer ({kinds}). Everything else is kept; the same command "
                "tries them again, with --max-failed-share 1 it drops those that fail again.")

    def too_many_failed(self) -> Halt | None:
        """Asked at the end: were more samples given up than --max-failed-share allows?"""
        many = self.failed.total() > self.args.max_failed_share * self.total
        return Halt(self.failure_text(), code=1) if many else None

    # ---- workers ----
    async def work(self) -> None:
        """Ask until the prompts end or something halts the session."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.interrupt)
        background = [asyncio.create_task(self.store.writer()), asyncio.create_task(self.tick())]
        with bar(self.total, " prompts") as self.bar:
            await asyncio.gather(*(self.worker() for _ in range(self.args.concurrency)))
        for task in background:
            task.cancel()
        for server in self.servers:
            await server.close()
        self.progress()

    def interrupt(self) -> None:
        if isinstance(self.halt, Halt) and self.halt.code == 130:
            os._exit(130)  # every finished row is on the disk
        self.halt = Halt("interrupted. The same command goes on from here.", code=130)
        log(f"interrupted: waiting for {self.budget.in_flight} requests in flight; once more to leave them")

    async def worker(self) -> None:
        try:
            for prompt in self.prompts:  # one iterator for all workers
                if prompt.drop:
                    self.unpaid[prompt.drop["id"]] = prompt.drop
                    if prompt.drop["reason"] != "duplicate":
                        self.account.note(prompt.drop["reason"], prompt.drop["detail"], prompt.drop["id"])
                    self.account.settle(prompt.source, ["dropped"])
                    self.n_skipped += 1
                    self.bar.total = self.total
                else:
                    fates = ["not_answered"] * len(prompt.turns)
                    try:
                        await self.converse(prompt, fates)
                    finally:
                        self.account.settle(prompt.source, fates)
                    if self.halt:
                        return
                    self.n_prompts += 1
                    self.bar.update()
                await asyncio.sleep(0)  # thousands of prompts that are done already must not keep the log from ticking
        except (Halt, UserError) as error:  # the other workers finish what is in flight and paid for
            self.halt = self.halt or error

    async def converse(self, prompt: Prompt, fates: list[str]) -> None:
        """All turns of one prompt in order; those on the disk are read, not asked.

        What became of each goes to `fates`.
        """
        ids = [f"{prompt.id}-t{turn}" for turn in range(len(prompt.turns))]
        if all(map(self.store.knows, ids)):
            fates[:] = [fate_of(self.store.dropped.get(row_id, {})) for row_id in ids]
            self.n_old += 1
            return
        messages, ended = [], None  # ended: why no later turn can follow
        for turn, (before, given) in enumerate(prompt.turns):
            messages = messages + [self.tokens.with_structure(message) for message in before]
            if self.store.knows(ids[turn]):
                row = self.store.row(ids[turn])
            else:
                question = Question(ids[turn], prompt.source_name, messages, prompt.tools)
                row, reserved = await self.turn(question, given, ended)
                if row is None:
                    return
                await self.keep(row, reserved)
            fates[turn] = fate_of(row)
            self.look_at_start(row)
            if "reason" in row:
                ended = ended or "after_dropped_turn"
                continue
            messages = messages + [message_of(row)]
            if row["tool_calls"] or row["finish_reason"] != "stop":  # some APIs end calls with "stop"
                ended = "after_tool_call" if row["tool_calls"] else "after_cut_turn"

    async def keep(self, row: dict, reserved: Amount | None) -> None:
        """Write what was paid for, then settle it; a drop row that cost nothing waits for the end. Raises Halt."""
        if "reason" in row:
            self.account.note(row["reason"], row["detail"], row["id"])
        if "reason" in row and reserved is None:
            self.unpaid[row["id"]] = row
            return
        try:
            await self.store.put(row)
        except OSError as error:
            if reserved is not None:
                await self.budget.settle(reserved, billed=True)
            raise Halt(cannot_write(self.store.folder, error), code=1) from None
        if reserved is not None:
            await self.budget.settle(reserved, row)

    def look_at_start(self, row: dict) -> None:
        """Raises UserError when from the first sample on none was answered usefully, or none with reasoning."""
        given, n_rows = self.args.answers == "given", self.store.n_rows
        if n_rows:
            bare = sum(n for (_, how), n in self.store.thought.items() if how == "bare")
            if bare == n_rows >= BARE and self.tokens.must_reason():
                raise UserError(
                    f"thinking is on, and not one of {n_rows} answers holds reasoning"
                    + (". Use --thinking off" if given
                       else ": it was lost, or stands unmarked among the words. Start the "
                       "server with the target's reasoning parser, or use --thinking off")
                    + ", and another --output-dir: these rows are not to be trained on.")
        elif not given and not row["reason"].startswith(PROMPTS_FAULT):
            self.fruitless[row["reason"]] += 1
            if self.fruitless.total() >= FRUITLESS:
                urls = ", ".join(server.url for server in self.servers)
                raise UserError(f"{urls} refuses every request or answers it uselessly: {dict(self.fruitless)}; the "
                                f"last: {row['reason']}: {row['detail']}. Check --model, --max-tokens, --thinking and "
                                "--api.")

    async def turn(self, question: Question, given: dict | None,
                   ended: str | None) -> tuple[dict | None, Amount | None]:
        """(answer or drop row, what to settle once it is written or None). (None, None): the session was halted."""
        reserved = usage = None
        try:
            if ended:
                raise Drop(ended)
            if self.api == "sglang" and self.args.check_template:
                await self.check_kind(question.messages, question.tools)
            question.prompt_ids = self.tokens.prompt_ids(question.messages, question.tools)
            if self.args.answers == "given":
                answer = given_answer(given)
            else:
                self.check_length(question)
                answer, reserved = await self.ask(question)
                if answer is None:
                    return None, None
            usage = answer.usage
            if isinstance(answer, Drop):
                raise answer
            calls_before = sum(len(message.get("tool_calls") or []) for message in question.messages)
            ids, ids_source = settle_ids(answer, question.prompt_ids, self.tokens, calls_before, self.args.on_mismatch)
        except Drop as drop:
            return drop_row(question.row_id, str(drop), drop.detail, usage), reserved
        self.n_answers, self.n_tokens = self.n_answers + 1, self.n_tokens + len(ids)
        answer.model = answer.model or self.args.model
        return answer_row(question, answer, ids, ids_source), reserved

    def check_length(self, question: Question) -> None:
        """Raises Drop where prompt and answer do not fit the servers' context: they would refuse it."""
        n_prompt, n_answer = len(question.prompt_ids), self.args.max_tokens
        if self.context and n_prompt + n_answer > self.context:
            raise Drop("beyond_context", f"{n_prompt:,} prompt tokens and --max-tokens {n_answer:,} are more than the "
                                         f"server's context of {self.context:,}")

    async def check_kind(self, messages: list[dict], tools: list | None) -> None:
        """check_template() once for each kind of prompt: roles in it, tools, calls, reasoning, content in parts."""
        kind = bool(tools), *sorted({(m["role"], "tool_calls" in m, "reasoning_content" in m,
                                      isinstance(m.get("content"), list)) for m in messages})
        if kind in self.checked:
            return
        failures = 0
        async with self.checking:
            while kind not in self.checked and (server := await self.pick(retry=True)):
                try:
                    await check_template(server, self.args, self.tokens, messages, tools)
                    self.checked.add(kind)
                except Drop as drop:  # the next prompt of this kind is tried
                    if str(drop) == "http_404":
                        raise UserError(f"{server.url}: no chat route to compare the template with (404: "
                                        f"{drop.detail}). Check --base-url, or pass --no-check-template.") from None
                    log(f"template not compared with the chat route of {server.url}: {drop} {drop.detail}")
                    return
                except Retry as retry:
                    self.note_failure(server, retry)
                    failures += retry.blame
                    if failures >= self.args.max_attempts:
                        raise UserError(f"{server.url}: the chat route cannot be compared with the template "
                                        f"({retry}: {retry.detail}). Mend the server, or pass --no-check-template."
                                        ) from None
                    await self.sleep(self.args.backoff_s)

    # ---- one request, through as many attempts and servers as it takes ----
    async def ask(self, question: Question) -> tuple[Answer | Drop | None, Amount | None]:
        """(answer or why there is none, what is reserved for it or None: nothing was paid). (None, None): halted."""
        path, body = request_body(self.api, self.args, self.tokens.stop, question)
        attempts = blamed = 0
        while True:
            reserved = await self.budget.reserve(len(question.prompt_ids))
            server = await self.pick(retry=attempts > 0)
            if server is None:
                await self.budget.settle(reserved)
                return None, None
            try:
                answer = await server.post(path, body, self.args.api_key_env)
                if self.api == "sglang":
                    answer = read_native(answer, question.prompt_ids, self.tokens)
                else:
                    answer = read_chat(answer, self.api)
            except Drop as drop:
                answer = drop
                if str(drop).startswith("http_") or str(drop) == "bad_prompt":  # refused, or not sent: nothing was paid
                    await self.budget.settle(reserved)
                    reserved = None
            except Retry as retry:
                await self.budget.settle(reserved, billed=retry.billed)
                attempts, blamed = attempts + 1, blamed + retry.blame
                pause = self.pause(server, retry, attempts)
                self.note_failure(server, retry)
                if blamed >= self.args.max_attempts:
                    return self.give_up(retry), None
                await self.sleep(pause)
                continue
            except BaseException:
                await self.budget.settle(reserved)
                raise
            self.failing_since, server.failures = None, 0
            if server.down:
                server.down = False
                log(f"{server.url} answers again")
            return answer, reserved

    def pause(self, server: Server, error: Retry, attempts: int) -> float:
        """Seconds to the next attempt. What a server asked for counts for that server; another may be asked sooner."""
        pause = min(60.0, self.args.backoff_s * 2 ** min(attempts - 1, 16)) * random.uniform(0.5, 1.0)
        if error.after is not None:
            now = time.monotonic()
            patience = self.args.outage_s - (now - (self.failing_since or now))  # then one more try decides
            after = min(error.after, max(0.0, patience) + 0.1)
            server.down_until = max(server.down_until, now + after)
            if all(other.down or other.down_until > now for other in self.servers):
                pause = after * random.uniform(1.0, 1.1)
        return pause

    def give_up(self, error: Retry) -> Drop:
        """Of one sample. Raises Halt when these have become too many."""
        self.failed[str(error)] += 1
        if self.failed.total() > max(10, self.args.max_failed_share * self.total):
            raise Halt(self.failure_text(), code=1) from None
        return Drop(f"no_answer_{error}")

    def note_failure(self, server: Server, error: Retry) -> None:
        """Count it; leave a server alone that cannot be reached. Raises UserError: no success for --outage-s."""
        kind, now = str(error), time.monotonic()
        if kind not in self.errors:
            log(f"first {kind} from {server.url}: {error.detail}"
                + (f" (asks to wait {error.after:.0f} s)" if error.after else ""))
        self.errors[kind] += 1
        server.failures += 1
        # one that answers only errors has nothing in flight, so it would draw every request
        broken = server.failures >= 3 and any(not other.down for other in self.servers if other is not server)
        if kind == "unreachable" or broken:
            if not server.down:
                what = "cannot be reached" if kind == "unreachable" else f"gives only errors ({kind})"
                log(f"{server.url} {what}; trying on")
            server.down, server.down_until = True, max(server.down_until, now + PROBE_S)
        self.failing_since = self.failing_since or now
        if now - self.failing_since > self.args.outage_s:
            urls = ", ".join(server.url for server in self.servers)
            waits = f", it asks to wait {error.after:,.0f} s" if error.after else ""
            raise UserError(f"{urls}: no answer for {self.args.outage_s:.0f} s (last: {kind}: {error.detail}{waits}). "
                            "Start the server or check --base-url; the same command goes on from here.")

    async def pick(self, retry: bool) -> Server | None:
        """The least busy healthy server; waits for one. None: the session was halted.

        A server that is down (not reached, or errors only) gets one request every PROBE_S, and no second attempt of a
        sample while another one answers.
        """
        while not self.halt:
            now = time.monotonic()
            able = [server for server in self.servers if server.down_until <= now and server.free]
            healthy = [server for server in able if not server.down]
            answering = any(not server.failures for server in healthy)
            for server in able:
                if server.down and not (retry and answering):
                    server.down_until = now + PROBE_S
                    return server
            if healthy:
                return min(healthy, key=lambda server: server.in_flight)
            await self.sleep(min(server.down_until for server in self.servers) - now + random.uniform(0.01, 0.1))
        return None

    async def sleep(self, seconds: float) -> None:
        """So long, or until the session is halted."""
        end = time.monotonic() + seconds
        while not self.halt and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.5))
