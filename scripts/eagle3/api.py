"""Servers that answer, in four dialects.

SGLang's /generate (ids in, ids out), and chat completions as SGLang and vLLM ("openai"), Moonshot and OpenRouter
speak them. Whatever goes wrong with a request becomes one of four exceptions, and with it what happens next:

    Drop       this sample cannot be used; the next one is asked
    Retry      this attempt failed; the sample is asked again, perhaps of another server
    Halt       the run ends, everything is kept (out of credit)
    UserError  the run ends: the flags are wrong (key, model, route)
"""
from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import re
import ssl
import time
from dataclasses import dataclass

import httpx
import openai

from eagle3.budget import Halt
from eagle3.masking import masked
from eagle3.network import cause_of, client_for, parsed, proxy_for, tls_context
from eagle3.responses import Answer, Drop, Question, content_of, printable, reasoning_of, text_calls
from eagle3.stage import UserError, log
from eagle3.tokens import TOOL_FORMS, Tokens

NAMED = {"rate_limit_exceeded": 429, "insufficient_quota": 402, "invalid_api_key": 401, "model_not_found": 404,
         "context_length_exceeded": 400, "invalid_request_error": 400}  # codes and types of errors that are words
BUSY = {408, 409, 425, 429, 502, 503, 504, 520, 522, 524, 529}  # says nothing about the sample: no limit on attempts


class Retry(Exception):
    """This attempt failed. str(): the kind of failure.

    after: seconds the server asked for; blame: counts against the sample; billed: it may have cost.
    """

    def __init__(self, kind: str, detail: object = "", after: float | None = None, blame: bool = True,
                 billed: bool = False):
        super().__init__(kind)
        self.detail, self.after, self.blame, self.billed = printable(detail), after, blame, billed


def retry_after(headers) -> float | None:
    """Seconds that a Retry-After header (seconds or date) or retry-after-ms asks for."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        text = headers.get("retry-after")
        if text is None:
            return None
        if re.fullmatch(r"\s*[0-9.]+\s*", text):
            return float(text)
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def error_of(error: object, status: int | None = None) -> tuple[int, str]:
    """(status, message) of the `error` in a body. status: HTTP's own; None where that was 200.

    HTTP's own counts, but for a quota that is used up: OpenAI says 429, and no waiting mends it.
    """
    if not isinstance(error, dict):
        return status or 500, printable(error)
    told = [error.get(key) for key in ("code", "type", "status", "status_code")]
    codes = [NAMED[word] for word in told if isinstance(word, str) and word in NAMED]
    if status is None:
        codes += [int(word) for word in told if re.fullmatch("[45][0-9][0-9]", str(word))]
        status = codes[0] if codes else 500
    elif 402 in codes:
        status = 402
    more = error.get("metadata")
    raw = more.get("raw") if isinstance(more, dict) else None  # a gateway's provider, in its own words
    return status, printable(": ".join(f"{text}" for text in (error.get("message"), raw) if text) or json.dumps(error))


def refuse(status: int, message: str, headers, key_env: str | None):
    """Raises what an error status (of HTTP, or inside a body) means: Retry, Drop, Halt or UserError."""
    if status == 401:
        raise UserError(f"the server refused the key (401: {message}). "
                        + (f"It came from the variable {key_env}." if key_env
                           else "None was sent: name its variable with --api-key-env."))
    if status == 402:
        raise Halt(f"out of credit (402: {message}). Everything so far is kept; the same command goes on.", code=1)
    if status in BUSY:
        raise Retry(f"http_{status}", message, retry_after(headers), blame=False)
    if status >= 500 or status == 403:  # 403: refused by moderation or, at OpenRouter, a key whose limit is reached
        raise Retry(f"http_{status}", message, retry_after(headers))
    raise Drop(f"http_{status}", message)


class Server:
    """One base URL, its connections and how it has been doing.

    Connections are spread over several clients: httpx searches its pool linearly on each request, which with 256 of
    them in one pool costs more than the request itself (one core: 296 requests/s; with 8 connections a pool 886).
    """
    CONNECTIONS = 8

    def __init__(self, url: str, key: str | None, concurrency: int, timeout: float, tls: ssl.SSLContext):
        self.url, self.timeout, self.in_flight, self.failures = masked(url), timeout, 0, 0  # failures: since an answer
        self.down, self.down_until = False, 0.0  # before down_until (monotonic) it is left alone
        timeouts = httpx.Timeout(timeout, connect=20)
        self.clients = [openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=timeouts,
                                           http_client=client_for(url, tls, timeouts))
                        for _ in range(-(-concurrency // self.CONNECTIONS))]
        for client in self.clients:  # what OPENAI_ORG_ID and OPENAI_PROJECT_ID say is not for this server
            client.organization = client.project = None
        self.free = [client for client in self.clients for _ in range(self.CONNECTIONS)][:concurrency]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    async def post(self, path: str, body: dict, key_env: str | None) -> dict:
        """The JSON object that came back with status 200 and no error in it. Raises Retry, Drop, Halt, UserError."""
        way = self.free.pop(0)  # first in, first out spreads the requests over the clients
        self.in_flight += 1
        try:
            async with asyncio.timeout(self.timeout):  # the client's own timeout starts anew with every byte
                response = await way.post(path, cast_to=httpx.Response, body=body)
        except TimeoutError:
            raise Retry("timeout", billed=True) from None
        except openai.APIStatusError as error:
            detail = error.body if isinstance(error.body, dict) else {}
            status, message = error_of(detail.get("error", detail) or error.response.text, error.status_code)
            refuse(status, message, error.response.headers, key_env)
        except openai.APITimeoutError as error:
            sent = not isinstance(error.__cause__, (httpx.ConnectTimeout, httpx.PoolTimeout))
            raise Retry("timeout" if sent else "unreachable", cause_of(error), blame=sent, billed=sent) from None
        except openai.APIConnectionError as error:
            raise self.broken(error.__cause__) from None
        except (ValueError, TypeError) as error:  # raised before anything is sent: what JSON cannot say
            raise Drop("bad_prompt", f"cannot be sent: {error}") from None
        finally:
            self.in_flight -= 1
            self.free.append(way)
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError) as error:  # truncated JSON or broken UTF-8
            raise Retry("bad_json", error, billed=True) from None
        if not isinstance(answer, dict):
            raise Retry("bad_json", f"not an object but {type(answer).__name__}", billed=True)
        if answer.get("error"):  # some gateways send 200 and put the status here
            refuse(*error_of(answer["error"]), response.headers, key_env)
        return answer

    def broken(self, cause: BaseException | None) -> Retry:
        """What a connection that failed means. Raises UserError where no second try would mend it."""
        if isinstance(cause, UserError):  # a redirect
            raise cause
        if isinstance(cause, httpx.TooManyRedirects):
            raise UserError(f"{self.url} redirects in a circle. Check --base-url.")
        sent = not isinstance(cause, (httpx.ConnectError, httpx.ProxyError, httpx.LocalProtocolError,
                                      httpx.UnsupportedProtocol))
        return Retry("connection_cut" if sent else "unreachable", cause_of(cause), blame=sent, billed=sent)


# ---- requests and answers ----
def request_body(api: str, args, stop: int, question: Question) -> tuple[str, dict]:
    """(path, body): the same wish in each API's own terms. stop: id of the token that ends a turn."""
    digest = hashlib.sha256(f"{args.seed}:{question.row_id}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big") >> 1
    if api == "sglang":
        return "/generate", {"input_ids": question.prompt_ids, "sampling_params": {
            "max_new_tokens": args.max_tokens, "temperature": args.temperature, "top_p": args.top_p,
            "stop_token_ids": [stop], "sampling_seed": seed, "skip_special_tokens": False, **args.extra_body}}
    on, messages = args.thinking == "on", question.messages
    if api == "openrouter":  # its name for the reasoning of earlier turns
        messages = [{"reasoning" if key == "reasoning_content" else key: value for key, value in message.items()}
                    for message in messages]
    terms = {"openai": {"chat_template_kwargs": thinking_switch(on), "separate_reasoning": True},  # SGLang's and vLLM's
             "moonshot": {"thinking": {"type": "enabled" if on else "disabled"}},
             "openrouter": {"reasoning": {"enabled": on}, "usage": {"include": True}}}[api]
    if args.provider:
        terms["provider"] = {"order": args.provider, "allow_fallbacks": False}
    if question.tools:
        terms["tools"] = question.tools
    return "/chat/completions", {"model": args.model, "messages": messages, "max_tokens": args.max_tokens,
                                 "temperature": args.temperature, "top_p": args.top_p, "seed": seed,
                                 **terms, **args.extra_body}


def read_native(body: dict, prompt_ids: list[int], tokens: Tokens) -> Answer:
    """Answer from SGLang's /generate. Raises Retry, Drop, UserError."""
    meta, ids = body.get("meta_info") or {}, body.get("output_ids")
    finish = meta.get("finish_reason") or {}
    finish = finish if isinstance(finish, dict) else {"type": str(finish)}
    if finish.get("type") == "abort":
        refuse(*error_of({**finish, "type": None}), {}, None)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise UserError(f"/generate gave no output_ids (fields {sorted(body)}). SGLang 0.5.10 to 0.5.23 gives them: "
                        "check --base-url.")
    if meta.get("prompt_tokens", len(prompt_ids)) != len(prompt_ids):
        raise UserError(f"the engine read {meta['prompt_tokens']} prompt tokens of {len(prompt_ids)} sent. "
                        "Start it without --allow-auto-truncate.")
    if not ids:
        raise Drop("empty")
    reasoning, content, calls, flags = tokens.read(prompt_ids, ids)
    reason = "tool_calls" if calls and finish.get("type") == "stop" else finish.get("type") or "unknown"
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
    return Answer(content, reasoning, calls, reason, usage, ids, provider="sglang", flags=flags)


def read_chat(body: dict, api: str) -> Answer:
    """Answer from /chat/completions, whatever of it came. Raises Retry, Drop."""
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    usage = {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "cost")
             if type(usage.get(key)) in (int, float) and 0 <= usage[key] < 1e12} or None
    try:
        choice = body["choices"][0]
        message, finish = choice["message"] or {}, choice.get("finish_reason") or "unknown"
        if finish == "error":
            raise Retry("finish_error", billed=True)
        if finish == "content_filter":
            raise Drop("content_filter")
        content, among_parts = content_of(message.get("content"))
        reasoning = reasoning_of(message) or among_parts
        calls = message.get("tool_calls") or [{"function": call} for call in [message.get("function_call")] if call]
        if not content and not calls and not reasoning:
            raise Drop("empty")
        calls = text_calls(calls)
        if not isinstance(finish, str):
            raise TypeError(f"finish_reason is {type(finish).__name__}")
    except Drop as drop:
        raise Drop(str(drop), drop.detail, usage) from None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Retry("bad_answer", repr(error), billed=True) from None
    flags = [] if finish in ("stop", "length", "tool_calls") else ["finish_unknown"]  # counts as cut: no stop token
    return Answer(content, reasoning, calls, finish, usage, model=body.get("model"),
                  provider=body.get("provider") or api, flags=flags)


# ---- which servers these are ----
@dataclass
class Service:
    """What stands behind --base-url. model: the name to ask for; version: SGLang's, where it is one.

    context: the most tokens of prompt and answer together, where the servers say it.
    """
    api: str
    model: str | None
    urls: list[str]
    version: str | None = None
    context: int | None = None


async def server_info(url: str, key: str | None, tls: ssl.SSLContext, asks_sglang: bool) -> dict:
    """/server_info of an SGLang; {} of any other server that answers. Raises ConnectionError, in words."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    proxy = proxy_for(parsed(url, "--base-url"))
    through = f", through the proxy {masked(proxy)}" if proxy else ""
    try:
        async with client_for(url, tls, httpx.Timeout(20), headers=headers) as asking:
            response = await asking.get(native_url(url) + "/server_info" if asks_sglang else url)
        if response.status_code >= 500 and asks_sglang:  # a gateway whose SGLang is not up yet is no text API
            raise ConnectionError(f"HTTP {response.status_code}{through}")
        if response.status_code == 407:
            raise ConnectionError(f"HTTP 407: the proxy wants a password{through}")
        info = response.json() if response.status_code == 200 and asks_sglang else {}
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OverflowError) as error:
        raise ConnectionError(printable(cause_of(error)) + through) from None
    except (ValueError, RecursionError):  # a page, no JSON
        info = {}
    return info if isinstance(info, dict) and {"version", "served_model_name"} <= set(info) else {}


async def context_of(url: str, key: str | None, tls: ssl.SSLContext, model: str) -> int | None:
    """What /v1/models says of this model: SGLang's and vLLM's max_model_len, OpenRouter's context_length; None else."""
    try:
        async with client_for(url, tls, httpx.Timeout(20),
                              headers={"Authorization": f"Bearer {key}"} if key else {}) as asking:
            found = (await asking.get(f"{url.rstrip('/')}/models")).json()["data"]
        told = [one.get("max_model_len") or one.get("context_length") for one in found if one.get("id") == model]
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OverflowError, ValueError, TypeError, KeyError,
            AttributeError, RecursionError):
        return None
    return told[0] if told and type(told[0]) is int and told[0] > 0 else None


def native_url(url: str) -> str:
    """SGLang's own routes are not under /v1."""
    return url.rstrip("/").removesuffix("/v1")


async def discover(args, key: str | None) -> Service:
    """Ask every --base-url what it is. Raises UserError when no server answers, or when they are not alike."""
    if args.answers == "given":
        return Service("given", args.model, [])
    if not args.base_url:
        raise UserError("no server: name at least one --base-url.")
    api, found, down = args.api, {}, {}  # url -> /server_info of an SGLang, or {}; url -> error
    tls = tls_context()
    for url in args.base_url:
        host = parsed(url, "--base-url").host
        if api == "auto":
            api = next((name for name in ("openrouter", "moonshot") if name in host), "auto")
        try:
            found[url] = await server_info(url, key, tls, asks_sglang=api in ("auto", "sglang"))
        except ConnectionError as error:
            down[url] = str(error)
    words = ", ".join(f"{masked(url)} ({error})" for url, error in down.items())
    if not found:
        hints = {"CERTIFICATE_VERIFY": " Name the file of its authority in SSL_CERT_FILE.",
                 "the proxy": " Add its host to NO_PROXY if it needs no proxy."}
        raise UserError(f"no server answers: {words}. Start it or check --base-url and --api."
                        + "".join(hint for sign, hint in hints.items() if sign in words))
    if down:
        log(f"not up yet, will be tried: {words}")
    served = {(info.get("version"), info.get("served_model_name")) for info in found.values()}
    if api == "sglang" and (None, None) in served or api == "auto" and len(served) > 1:
        raise UserError("--base-url: not all of them are the same SGLang and model: "
                        f"{sorted(served, key=str)} (None: no /server_info there).")
    version, model = served.pop()
    if api == "auto":
        api = "sglang" if version else "openai"
    if version and args.model not in (None, model):
        raise UserError(f"{masked(next(iter(found)))} serves {model}, not {args.model}. "
                        "Give the served name as --model.")
    model = model or args.model
    if not model:
        raise UserError("--model is needed: this API serves several models.")
    chat_urls = {url: url if httpx.URL(url).path.strip("/") else f"{url.rstrip('/')}/v1" for url in args.base_url}
    told = [await context_of(chat_urls[url], key, tls, model) for url in found]
    context = min((size for size in told if size), default=None)
    if context and args.max_tokens >= context:
        raise UserError(f"--max-tokens {args.max_tokens}: the context of {masked(next(iter(found)))} is {context:,} "
                        "tokens, prompt included. Ask for shorter answers, or serve with a larger --context-length.")
    log(f"context of prompt and answer: {f'{context:,} tokens' if context else 'the server does not say'}")
    return Service(api, model, [native_url(url) if api == "sglang" else chat_urls[url] for url in args.base_url],
                   version, context)


def thinking_switch(on: bool) -> dict:
    """For the chat template: Kimi's name for it and Qwen's."""
    return {"thinking": on, "enable_thinking": on}


async def check_template(server: Server, args, tokens: Tokens, messages: list[dict], tools: list | None) -> None:
    """SGLang's chat route must read this prompt as the ids we send. Raises UserError, Drop, Retry.

    It returns them from 0.5.15 on; before, their number has to do. Settles tokens.tool_form by trying.
    """
    body = {"model": args.model, "messages": messages, "max_tokens": 1, "temperature": 0,
            "return_prompt_token_ids": True, "chat_template_kwargs": thinking_switch(args.thinking == "on"),
            **({"tools": tools} if tools else {})}
    answer = await server.post("/v1/chat/completions", body, args.api_key_env)
    try:
        theirs, count = answer["choices"][0].get("prompt_token_ids"), answer["usage"]["prompt_tokens"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Retry("bad_answer", repr(error)) from None
    what = "+".join(dict.fromkeys(message["role"] for message in messages)) + (" with tools" if tools else "")
    for form in (tokens.tool_form, *TOOL_FORMS):
        tokens.tool_form = form
        ours = tokens.prompt_ids(messages, tools)
        if count == len(ours) and theirs in (None, ours):
            log(f"template: {server.url} reads a prompt of {what} as the same {count} ids"
                + ("" if theirs else " (as many; it does not return them)"))
            return
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs or [])) if a != b), None)
    raise UserError(f"{server.url} renders a prompt of {what} as {count} ids, {args.tokenizer} as {len(ours)}"
                    + (f", different from position {at} on" if at is not None else "")
                    + ". Name the folder that the server serves with --tokenizer, or pass --no-check-template "
                    "if the difference is wanted.")
