"""The servers that a benchmark measures: where each variant is served, whether it is what it should be, and probes."""
from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import subprocess
import urllib.parse
from pathlib import Path

import httpx

from eagle3.drafter_files import first_release
from eagle3.masking import hide, masked, secrets_in
from eagle3.server_log import check_writable, why_ended
from eagle3.servers import (NO_ANSWER, ServerGone, call, flag_value, healthy, server_command, start_server,
                            stop_server)
from eagle3.sglang_draft import is_known
from eagle3.stage import UserError, log
from eagle3.target import version_numbers
from eagle3.variants import DraftFolder, drafter_hashes

SERVER_KEYS = ["version", "model_path", "dtype", "quantization", "kv_cache_dtype", "tp_size", "attention_backend",
               "context_length", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
               "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_draft_model_quantization",
               "speculative_use_rejection_sampling", "speculative_accept_threshold_single",
               "speculative_accept_threshold_acc", "incremental_streaming_output"]


# ---- keys ----
def read_key(variable: str | None) -> str | None:
    """The API key in that environment variable; from here on no line shows it. Raises UserError, without the key."""
    if not variable:
        return None
    if variable not in os.environ and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,40}", variable):
        hide(variable)  # likely the key itself
        raise UserError("--api-key-env takes the name of an environment variable, not a key, and there is none of the "
                        "name that was given. Put the key into a variable, say SGLANG_API_KEY, and name that.")
    key = os.environ.get(variable, "")
    hide(key)
    if not key:
        raise UserError(f"--api-key-env: the environment variable {variable} is not set.")
    check_key(key, f"--api-key-env: the key in {variable}")
    return key


def check_key(key: str, where: str) -> None:
    """Raises UserError: HTTP has no place for it."""
    if odd := next((at for at, sign in enumerate(key, 1) if not "!" <= sign <= "~"), None):
        raise UserError(f"{where}: its character {odd} can stand in no HTTP header (a space, a line end, not ASCII). "
                        "Set it without that.")


def split_login(flag: str, url: str | None) -> tuple[str | None, str | None]:
    """(the URL without `user:password@`, the header Authorization that says the same). Raises UserError."""
    if not url:
        return None, None
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        parts = port = None
    if not parts or parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        hide(*secrets_in(url if "://" in url else f"http://{url}"))
        raise UserError(f"--{flag}: {masked(url)!r} is no URL, as in http://127.0.0.1:30000.")
    if parts.query or parts.fragment:
        raise UserError(f"--{flag}: a URL without `?` or `#` is needed, as in http://127.0.0.1:30000. A key goes into "
                        "an environment variable: --api-key-env.")
    login, _, host = parts.netloc.rpartition("@")
    hide(*secrets_in(url))
    plain = urllib.parse.urlunsplit(parts._replace(netloc=host)).rstrip("/")
    header = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
    hide(header)
    return plain, f"Basic {header}" if login else None


class Endpoints:
    """Where each variant is served: the given URLs, or one server of the run file at a time, started when it is needed.

    variants: {name: the flags that it lays over its role}. `plain` is served by the role plain, all others by the role
    speculative.
    """

    def __init__(self, args: argparse.Namespace, document: dict, variants: dict[str, dict],
                 environments: dict[str, dict] | None = None):
        """document: the run file; environments: {variant: what it lays over its role's `env`}."""
        self.args, self.servers, self.variants = args, document.get("servers") or {}, variants
        self.environments = environments or {}
        self.process = self.variant = self.url = self.log = None
        self.logs = Path(document["run_dir"]) / "logs" if document.get("run_dir") else args.output_dir
        self.key = read_key(args.api_key_env)
        bases = [split_login("base-url", url) for url in args.base_url or ()]
        baseline = split_login("baseline-url", args.baseline_url)
        args.base_url, args.baseline_url = [url for url, _ in bases], baseline[0]
        self.given = {"plain": baseline, **dict(zip([name for name in variants if name != "plain"], bases))}
        if self.key and any(login for _, login in self.given.values()):
            raise UserError("--api-key-env and a `user:password@` in a URL both set the header Authorization. "
                            "Leave out one of them.")

    @property
    def headers(self) -> dict[str, str]:
        """Of requests to the server of the variant in use; a launched one's key is the run file's `api-key`."""
        login = self.given.get(self.variant, (None, None))[1]
        key = self.key or (self.flag(self.variant, "--api-key") if self.args.launch and self.variant else "")
        check_key(key, "servers.*.flags.api-key")
        authorization = f"Bearer {key}" if key else login
        return {"Content-Type": "application/json", **({"Authorization": authorization} if authorization else {})}

    def role(self, variant: str) -> tuple[dict, str]:
        """The run file's servers with the variant's flags laid over its role, and that role. Raises UserError."""
        role = "plain" if variant == "plain" else "speculative"
        if role not in self.servers:
            raise UserError(f"--launch: the run file has no servers.{role}. Add it, "
                            "or give --base-url and --baseline-url.")
        spec = self.servers[role]
        flags = {**(spec.get("flags") or {}), **self.variants[variant]}
        env = {**(spec.get("env") or {}), **self.environments.get(variant, {})}
        return {**self.servers, role: {**spec, "flags": flags, "env": env}}, role

    def command(self, variant: str) -> tuple[list[str], dict[str, str]]:
        """argv and added environment of a variant's server. Raises UserError."""
        return server_command(*self.role(variant))

    def flag(self, variant: str, flag: str) -> str:
        """A flag's value in that command; "" without it. Raises UserError."""
        return flag_value(self.command(variant)[0], flag, "")

    def check_drafter(self, drafters: dict[str, DraftFolder]) -> None:
        """--launch must serve the drafters that --draft-path names. Raises UserError."""
        for variant in self.variants if self.args.launch else ():
            named = drafters[variant].folder if variant in drafters else None
            served = self.flag(variant, "--speculative-draft-model-path")
            if variant != "plain" and named and Path(served).resolve() != named.resolve():
                raise UserError(f"servers.speculative serves the drafter {served or '(none)'}, --draft-path names "
                                f"{named}. Make them equal.")

    def check_logs(self) -> None:
        """That launched servers can write their logs. Raises UserError."""
        if self.args.launch:
            check_writable(self.logs)

    def use(self, variant: str) -> str:
        """The URL of a variant's server, started if need be. Raises UserError."""
        if not self.args.launch:
            self.url = self.given[variant][0]
        elif self.variant != variant:
            self.close()
            self.log = self.logs / f"server_{variant}.log"
            self.process, self.url = start_server(*self.role(variant), self.log, self.args.launch_timeout)
        self.variant = variant
        return self.url

    def alive(self) -> bool:
        return (self.process is None or self.process.poll() is None) and healthy(self.url, 20, self.headers)

    def reason(self) -> str:
        """What a launched server that is gone said last; "" of others."""
        code = None
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(timeout=5)  # its scheduler dies before it does
        return f" It ended with code {code}{why_ended(self.log, code)}." if code is not None else ""

    def __str__(self) -> str:
        return self.url + (f" (log: {self.log})" if self.log else "")

    def close(self) -> None:
        if self.process:
            stop_server(self.process)
        self.process = self.variant = None


# ---- is it the right server ----
def server_info(url: str, headers: dict) -> dict:
    """What an SGLang server tells of itself. Raises UserError: nobody there, no SGLang, API key refused."""
    for route in ("/server_info", "/get_server_info"):  # the second: before 0.5.10
        try:
            info = call(url + route, headers)
            if isinstance(info, dict) and "model_path" in info:
                return info
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise UserError(f"{url}: refuses the API key ({status}). "
                                "Name its variable with --api-key-env.") from None
        except NO_ANSWER as error:
            raise UserError(f"{url}: no SGLang answers there ({error}). Start it, or use --launch.") from None
    raise UserError(f"{url}: answers, but not as SGLang does (no /server_info).")


def contact(url: str, variant: str, headers: dict, drafter: DraftFolder) -> dict:
    """SERVER_KEYS of a server that fits `variant`; drafter: the one that it should serve.

    Raises UserError: with EAGLE3 or without, where it should be the other; another model, another drafter.
    """
    info, draft_path = server_info(url, headers), drafter.folder
    target, served = drafter.about.get("target"), Path(info["model_path"]).name
    if target and target != served:
        raise UserError(f"{url}: serves {served}, but the drafter in {draft_path} was trained for {target}.")
    algorithm = info.get("speculative_algorithm")
    if variant == "plain" and algorithm:
        raise UserError(f"{url}: runs with --speculative-algorithm {algorithm}, so it is no baseline. "
                        "Start it without.")
    if variant != "plain" and algorithm != "EAGLE3":
        raise UserError(f"{url}: runs without EAGLE3 (speculative_algorithm: {algorithm}). "
                        "Start it with --speculative-algorithm EAGLE3.")
    there = Path(info.get("speculative_draft_model_path") or "")
    known = variant != "plain" and draft_path and (there / "config.json").is_file()
    if known and there.resolve() != draft_path.resolve() and drafter_hashes(there) != drafter_hashes(draft_path):
        raise UserError(f"{url}: serves the drafter {there}, which is not --draft-path {draft_path}.")
    if variant != "plain" and draft_path:
        check_release(url, info.get("version"), drafter)
    return {key: info.get(key) for key in SERVER_KEYS}


def check_release(url: str, version: str | None, drafter: DraftFolder) -> None:
    """An older SGLang computes another drafter than was trained, in silence. Raises UserError."""
    draft_path = drafter.folder
    config = json.loads((draft_path / "config.json").read_text())
    needed = drafter.about.get("served_from") or (first_release(config) if is_known(config) else None)
    try:
        old = bool(needed) and version_numbers(version or "") < version_numbers(needed)
    except UserError:
        return log(f"note: {url} calls itself SGLang {version}; the drafter in {draft_path} needs {needed} or newer")
    if old:
        raise UserError(f"{url}: is SGLang {version}; the drafter in {draft_path} is of a kind that {needed} and newer "
                        "serve. An older one leaves parts of it out in silence. Update SGLang, or train without them.")


# ---- single calls to it ----
def flush_cache(url: str, headers: dict) -> bool:
    """Empty the radix cache; whether the server did.

    Else a level finds prompts of its warm-up and of the level before in it, and its time to the first token is too
    good.
    """
    try:
        call(f"{url}/flush_cache?timeout=30", headers, {})  # the last step of the warm-up may still run
        return True
    except NO_ANSWER as error:
        log(f"note: {url}/flush_cache: {error}; prompts may be cached from before")
        return False


def probe_difference(url: str, headers: dict, context: list[int], tokens: list[int | None], near_tie: float) -> dict:
    """How far apart the target itself holds the two tokens at which two answers part: one prefill of what both share.

    context: ids of prompt and common part; near_tie: a gap in log-probability below which two answers may part.
    Raises ServerGone.
    """
    if None in tokens:
        return {"kind": "one answer is the beginning of the other"}
    body = {"input_ids": context, "return_logprob": True, "token_ids_logprob": tokens,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
    try:
        answer = call(f"{url}/generate", headers, body, timeout=600)
        told = {row[1]: row[0] for row in answer["meta_info"]["output_token_ids_logprobs"][0]}
    except httpx.HTTPStatusError as error:
        return {"kind": f"not probed: http {error.response.status_code}"}
    except (KeyError, TypeError, IndexError):
        return {"kind": "not probed: this server gives no log-probabilities"}
    except NO_ANSWER as error:
        raise ServerGone(f"{url}: the server went away during the probes ({error}). Start it again; "
                         "the same command goes on.") from None
    if not all(token in told for token in tokens):
        return {"kind": "not probed: this server gives other log-probabilities"}
    logprobs = [told[token] for token in tokens]
    gap = abs(logprobs[0] - logprobs[1])
    return {"gap": gap, "kind": "near-tie" if gap <= near_tie else "fault", "logprobs": logprobs}
