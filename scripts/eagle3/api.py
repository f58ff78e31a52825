"""Servers that answer, in four dialects: SGLang's /generate (ids in, ids out), and chat completions as SGLang and vLLM
("openai"), Moonshot and OpenRouter speak them.

Whatever goes wrong with a request becomes one of four exceptions, and with it what happens next:
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
from eagle3.responses import Answer, Drop, Question, printable, reasoning_of, text_calls
from eagle3.stage import UserError, log
from eagle3.tokens import TOOL_FORMS, Tokens

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
        if re.fullmatch(r"\s*[\d.]+\s*", text):
            return float(text)
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def refuse(status: int, message: str, headers, key_env: str | None):
    """Raises what an error status (of HTTP, or inside a body) means: Retry, Drop, Halt or UserError."""
    if status == 401:
        raise UserError(f"the server refused the key (401: {message}). "
                        + (f"It came from the variable {key_env}." if key_env
                           else "None was sent: name its variable with --api-key-env."))
    if status == 402:
        raise Halt(f"out of credit (402: {message}). Everything so far is kept; the same command goes on.", code=1)
    if status == 404:
        raise UserError(f"the server knows no such route or model (404: {message}). "
                        "Check --base-url, --api and --model.")
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
        self.url, self.timeout, self.in_flight, self.failures = url, timeout, 0, 0  # failures: since its last answer
        self.down, self.down_until = False, 0.0  # before down_until (monotonic) it is left alone
        timeouts = httpx.Timeout(timeout, connect=20)
        self.clients = [openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=timeouts,
                                           http_client=httpx.AsyncClient(verify=tls, timeout=timeouts))
                        for _ in range(-(-concurrency // self.CONNECTIONS))]
        self.free = [client for client in self.clients for _ in range(self.CONNECTIONS)][:concurrency]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    async def post(self, path: str, body: dict, key_env: str | None) -> dict:
        """The JSON object that came back with status 200 and no error in it. Raises Retry, Drop, Halt, UserError."""
        client = self.free.pop(0)  # first in, first out spreads the requests over the clients
        self.in_flight += 1
        try:
            async with asyncio.timeout(self.timeout):  # the client's own timeout starts anew with every byte
                response = await client.post(path, cast_to=httpx.Response, body=body)
            answer = json.loads(response.content)
        except TimeoutError:
            raise Retry("timeout", billed=True) from None
        except openai.APIStatusError as error:
            detail = error.body if isinstance(error.body, dict) else {}
            detail = detail.get("error", detail)
            message = detail.get("message") if isinstance(detail, dict) else detail
            refuse(error.status_code, printable(message or error.response.text), error.response.headers, key_env)
        except openai.APITimeoutError as error:
            sent = not isinstance(error.__cause__, (httpx.ConnectTimeout, httpx.PoolTimeout))
            raise Retry("timeout" if sent else "unreachable", repr(error.__cause__), blame=sent, billed=sent) from None
        except openai.APIConnectionError as error:
            sent = not isinstance(error.__cause__, httpx.ConnectError)
            kind = "connection_cut" if sent else "unreachable"
            raise Retry(kind, repr(error.__cause__), blame=sent, billed=sent) from None
        except ValueError as error:  # truncated JSON or broken UTF-8
            raise Retry("bad_json", error, billed=True) from None
        finally:
            self.in_flight -= 1
            self.free.append(client)
        if not isinstance(answer, dict):
            raise Retry("bad_json", f"not an object but {type(answer).__name__}", billed=True)
        if error := answer.get("error"):  # some gateways send 200 and put the status here
            error = error if isinstance(error, dict) else {"message": error}
            code = error.get("code")
            code = int(code) if str(code).isdigit() else 500
            refuse(code, printable(error.get("message")), response.headers, key_env)
        return answer


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
    if finish.get("type") == "abort":
        refuse(int(finish.get("status_code") or 500), str(finish.get("message")), {}, None)
    if not isinstance(ids, list):
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
             if isinstance(usage.get(key), (int, float))} or None
    try:
        choice = body["choices"][0]
        message, finish = choice["message"] or {}, choice.get("finish_reason") or "unknown"
        if finish == "error":
            raise Retry("finish_error", billed=True)
        if finish == "content_filter":
            raise Drop("content_filter")
        content, reasoning = message.get("content") or "", reasoning_of(message)
        calls = message.get("tool_calls") or []
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content)
        if not content and not calls and not (reasoning and finish == "length"):
            raise Drop("empty")  # reasoning alone is kept only where the limit cut it
        calls = text_calls(calls)
        if not isinstance(content, str) or not isinstance(finish, str):
            raise TypeError(f"content is {type(content).__name__}, finish_reason {type(finish).__name__}")
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
    """What stands behind --base-url. model: the name to ask for; version: SGLang's, where it is one."""
    api: str
    model: str | None
    urls: list[str]
    version: str | None = None


async def server_info(url: str, key: str | None, asks_sglang: bool) -> dict:
    """/server_info of an SGLang; {} of any other server that answers. Raises ConnectionError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(timeout=20, headers=headers) as client:
            response = await client.get(native_url(url) + "/server_info" if asks_sglang else url)
        if response.status_code >= 500 and asks_sglang:  # a gateway whose SGLang is not up yet is no text API
            raise ConnectionError(f"HTTP {response.status_code}")
        info = response.json() if response.status_code == 200 and asks_sglang else {}
    except httpx.TransportError as error:
        raise ConnectionError(type(error).__name__) from None
    except ValueError:  # a page, no JSON
        info = {}
    return info if isinstance(info, dict) and {"version", "served_model_name"} <= set(info) else {}


def native_url(url: str) -> str:
    """SGLang's own routes are not under /v1."""
    return url.rstrip("/").removesuffix("/v1")


def host_of(url: str) -> str:
    try:
        parsed = httpx.URL(url)
        host, scheme = parsed.host, parsed.scheme
    except httpx.InvalidURL:
        host = scheme = None
    if scheme not in ("http", "https") or not host:
        raise UserError(f"--base-url {url}: not an http(s) URL.")
    return host


async def discover(args, key: str | None) -> Service:
    """Ask every --base-url what it is. Raises UserError when no server answers, or when they are not alike."""
    if args.answers == "given":
        return Service("given", args.model, [])
    if not args.base_url:
        raise UserError("no server: name at least one --base-url.")
    api, found, down = args.api, {}, {}  # url -> /server_info of an SGLang, or {}; url -> error
    for url in args.base_url:
        host = host_of(url)
        if api == "auto":
            api = next((name for name in ("openrouter", "moonshot") if name in host), "auto")
        try:
            found[url] = await server_info(url, key, asks_sglang=api in ("auto", "sglang"))
        except ConnectionError as error:
            down[url] = str(error)
    if not found:
        raise UserError(f"no server answers: {', '.join(f'{url} ({error})' for url, error in down.items())}. "
                        "Start it or check --base-url and --api.")
    if down:
        log(f"not up yet, will be tried: {', '.join(down)}")
    served = {(info.get("version"), info.get("served_model_name")) for info in found.values()}
    if api == "sglang" and (None, None) in served or api == "auto" and len(served) > 1:
        raise UserError("--base-url: not all of them are the same SGLang and model: "
                        f"{sorted(served, key=str)} (None: no /server_info there).")
    version, model = served.pop()
    if api == "auto":
        api = "sglang" if version else "openai"
    if version and args.model not in (None, model):
        raise UserError(f"{next(iter(found))} serves {model}, not {args.model}. Give the served name as --model.")
    model = model or args.model
    if not model:
        raise UserError("--model is needed: this API serves several models.")
    urls = [native_url(url) if api == "sglang" else url if httpx.URL(url).path.strip("/") else f"{url.rstrip('/')}/v1"
            for url in args.base_url]
    return Service(api, model, urls, version)


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
