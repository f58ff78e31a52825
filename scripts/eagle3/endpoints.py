"""The servers that a benchmark measures: where each variant is served, whether it is what it should be, and probes."""
from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import httpx

from eagle3.servers import (NO_ANSWER, ServerGone, call, flag_value, healthy, server_command, start_server,
                            stop_server)
from eagle3.stage import UserError, log, sha256_file

SERVER_KEYS = ["version", "model_path", "dtype", "quantization", "kv_cache_dtype", "tp_size", "attention_backend",
               "context_length", "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
               "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_draft_model_quantization",
               "incremental_streaming_output"]


def headers_of(args: argparse.Namespace) -> dict[str, str]:
    key = os.environ.get(args.api_key_env, "") if args.api_key_env else ""
    if args.api_key_env and not key:
        raise UserError(f"--api-key-env: the environment variable {args.api_key_env} is not set.")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def drafter_hashes(folder: Path) -> dict[str, str]:
    """What a drafter's figures hang on; one trained further differs in nothing but the bytes of its weights."""
    names = ("config.json", "model.safetensors")
    return {name: sha256_file(folder / name) for name in names if (folder / name).is_file()}


def sweep_variants(grid: list[str]) -> dict[str, dict]:
    """{variant: its server's flags} of --sweep-grid. Raises UserError."""
    variants = {}
    for point in grid:
        try:
            steps, topk, drafts = map(int, point.split(","))
        except ValueError:
            raise UserError(f"--sweep-grid: {point!r} is not STEPS,TOPK,DRAFTS, as in 3,1,4.") from None
        most = steps + 1 if topk == 1 else 1 + topk + (steps - 1) * topk * topk
        if min(steps, topk) < 1 or not 2 <= drafts <= most or topk == 1 and drafts != most:
            raise UserError(f"--sweep-grid: {point}: DRAFTS must be {'' if topk == 1 else 'at most '}{most} "
                            "for these STEPS and TOPK.")
        variants[f"steps{steps}-topk{topk}-drafts{drafts}"] = {
            "speculative-num-steps": steps, "speculative-eagle-topk": topk, "speculative-num-draft-tokens": drafts}
    return variants


def read_provenance(draft_path: Path | None, with_weights: bool) -> dict:
    """eagle3.json of the drafter; {} without one. Raises UserError when --draft-path holds no drafter."""
    if not draft_path:
        return {}
    if not (draft_path / "config.json").is_file():
        raise UserError(f"--draft-path: {draft_path} holds no config.json. "
                        "Name a folder that 04_train.py exported (output/best).")
    if with_weights and not (draft_path / "model.safetensors").is_file():
        raise UserError(f"--doctor: {draft_path} holds no model.safetensors.")
    path = draft_path / "eagle3.json"
    try:
        json.loads((draft_path / "config.json").read_text())
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"--draft-path: config.json or eagle3.json in {draft_path} is not readable as JSON "
                        f"({error}).") from None


class Endpoints:
    """Where each variant is served: the given URLs, or one server of the run file at a time, started when it is needed.

    variants: {name: the flags that it lays over its role}. `plain` is served by the role plain, all others by the role
    speculative.
    """

    def __init__(self, args: argparse.Namespace, document: dict, variants: dict[str, dict]):
        """document: the run file."""
        self.args, self.servers, self.variants = args, document.get("servers") or {}, variants
        self.process = self.variant = self.url = self.log = None
        self.logs = Path(document["run_dir"]) / "logs" if document.get("run_dir") else args.output_dir

    def role(self, variant: str) -> tuple[dict, str]:
        """The run file's servers with the variant's flags laid over its role, and that role. Raises UserError."""
        role = "plain" if variant == "plain" else "speculative"
        if role not in self.servers:
            raise UserError(f"--launch: the run file has no servers.{role}. Add it, "
                            "or give --base-url and --baseline-url.")
        spec = self.servers[role]
        flags = {**(spec.get("flags") or {}), **self.variants[variant]}
        return {**self.servers, role: {**spec, "flags": flags}}, role

    def command(self, variant: str) -> tuple[list[str], dict[str, str]]:
        """argv and added environment of a variant's server. Raises UserError."""
        return server_command(*self.role(variant))

    def flag(self, variant: str, flag: str) -> str:
        """A flag's value in that command; "" without it. Raises UserError."""
        return flag_value(self.command(variant)[0], flag, "")

    def check_drafter(self) -> None:
        """--launch must serve the drafter that --draft-path names. Raises UserError."""
        named = self.args.draft_path
        for variant in self.variants if self.args.launch else ():
            served = self.flag(variant, "--speculative-draft-model-path")
            if variant != "plain" and named and Path(served).resolve() != named.resolve():
                raise UserError(f"servers.speculative serves the drafter {served or '(none)'}, --draft-path names "
                                f"{named}. Make them equal.")

    def use(self, variant: str) -> str:
        """The URL of a variant's server, started if need be. Raises UserError."""
        if not self.args.launch:
            self.url = (self.args.baseline_url if variant == "plain" else self.args.base_url).rstrip("/")
        elif self.variant != variant:
            self.close()
            self.log = self.logs / f"server_{variant}.log"
            self.process, self.url = start_server(*self.role(variant), self.log, self.args.launch_timeout)
        self.variant = variant
        return self.url

    def alive(self) -> bool:
        return (self.process is None or self.process.poll() is None) and healthy(self.url, timeout=20)

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


def contact(url: str, variant: str, headers: dict, draft_path: Path | None, provenance: dict) -> dict:
    """SERVER_KEYS of a server that fits `variant`. provenance: the drafter's eagle3.json.

    Raises UserError: with EAGLE3 or without, where it should be the other; another model, another drafter.
    """
    info = server_info(url, headers)
    target, served = provenance.get("target"), Path(info["model_path"]).name
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
    return {key: info.get(key) for key in SERVER_KEYS}


# ---- single calls to it ----
def flush_cache(url: str, headers: dict) -> None:
    """Empty the radix cache: else a level finds prompts of its warm-up and of the level before in it, and its time to
    the first token is too good."""
    try:
        call(f"{url}/flush_cache?timeout=30", headers, {})  # the last step of the warm-up may still run
    except NO_ANSWER as error:
        log(f"note: {url}/flush_cache: {error}; prompts may be cached from before")


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
    logprobs = [told[token] for token in tokens]
    gap = abs(logprobs[0] - logprobs[1])
    return {"gap": gap, "kind": "near-tie" if gap <= near_tie else "fault", "logprobs": logprobs}
