"""What preflight looks at in a run file: what its roles' flags must be for each other, for 03 and for the drafter.

Each check takes the run file and adds findings.
"""
from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Callable

import httpx

from eagle3.findings import Findings, existing, on_gpus, one_line, role, whole
from eagle3.machine_look import ports
from eagle3.masking import masked
from eagle3.network import cause_of, parsed, proxy_for, tls_context
from eagle3.stage import SCRIPTS, UserError

HERE = ("127.0.0.1", "localhost", "::1")
SECONDS = 5  # for a server to answer
SPELLINGS = {"attn-dp-size": "attn_dp_size", "attention-data-parallel-size": "attn_dp_size",
             "pipeline-parallel-size": "pp_size", "attention-context-parallel-size": "attn_cp_size"}
OFF = ("disable-prefill-cuda-graph", "disable-cuda-graph", "disable-piecewise-cuda-graph")
ON = ("enforce-piecewise-cuda-graph", "enable-breakable-cuda-graph")


def check_servers(run_file: dict, found: Findings, roles: set, check_settings: Callable[[dict], None]) -> None:
    """check_settings: the capture's own, which raises a RuntimeError, `what. remedy.`."""
    for name in sorted(roles - set(run_file["servers"])):
        found.add(f"the role {name} is missing", "servers",
                  f"add servers.{name} to the run file (configs/quickstart.yaml has one)")
    if "extract" in roles & set(run_file["servers"]):
        try:
            check_settings(capture_settings(role(run_file, "extract")))
        except RuntimeError as refused:
            what, remedy = str(refused).split(". ", 1)
            found.add(what, "servers.extract.flags", remedy)
        check_capture(run_file, found)
    if "speculative" in roles & set(run_file["servers"]):
        flags, train, where = role(run_file, "speculative")["flags"], run_file["train"], "servers.speculative.flags"
        steps, trained = whole(flags, "speculative-num-steps", 0), whole(train, "ttt-steps", 3)
        if steps > trained:
            found.add(f"serving with {steps} steps, training with {trained} TTT steps", where,
                      f"set train.ttt-steps to at least {steps}")
        draft, best = flags.get("speculative-draft-model-path"), f"{train.get('output-dir')}/best"
        if draft != best:
            found.add(f"the server takes the drafter {draft}, 04 writes {best}", where,
                      "make them the same unless you mean an older drafter", "warning")


def capture_settings(spec: dict) -> dict:
    """A role's flags as the capture reads a server's settings: by their names there, prefill graphs resolved."""
    flags = spec["flags"]
    found = {SPELLINGS.get(key, key).replace("-", "_"): value for key, value in flags.items()}
    for name in ("pp_size", "attn_cp_size", "attn_dp_size"):
        found[name] = whole(found, name, 1)
    found["enable_dp_attention"] = found.get("enable_dp_attention") or found["attn_dp_size"] > 1
    return found | {"cuda_graph_config": {"prefill": {"backend": prefill_backend(flags, on_gpus(spec))}}}


def prefill_backend(flags: dict, gpu: bool) -> str:
    """What replays prefill, as every SGLang from 0.5.10 to 0.5.23 resolves it: "disabled" for nothing.

    0.5.23, arg_groups/cuda_graph_hook.py: the JSON over the selector over the switches; without any it is on where
    there is a GPU (KimiK25ForConditionalGeneration is one of the models that keep it).
    """
    config = flags.get("cuda-graph-config") or {}
    try:
        config = json.loads(config) if isinstance(config, str) else config
        chosen = config.get("prefill", {}).get("backend") or flags.get("cuda-graph-backend-prefill")
    except (ValueError, AttributeError):
        raise ValueError(f"cuda-graph-config {config!r} is no JSON object of phases") from None
    if chosen:
        return str(chosen)
    if any(flags.get(name) for name in OFF):
        return "disabled"
    return "on" if gpu or any(flags.get(name) for name in ON) else "disabled"


def check_capture(run_file: dict, found: Findings) -> None:
    """The role extract captures what 03 sends, into the folder where 03 waits."""
    extract, out = role(run_file, "extract"), run_file["extract"].get("output-dir")
    context, longest = whole(extract["flags"], "context-length", 0), whole(run_file["extract"], "max-length", 0)
    if 0 < context < longest:
        found.add(f"the server takes {context} tokens, extract.max-length is {longest}", "servers.extract.flags",
                  f"set context-length to at least {longest}, or extract.max-length to at most {context}")
    capture, layers = (extract["env"].get(f"EAGLE3_CAPTURE_{name}") for name in ("DIR", "LAYERS"))
    if not capture or not layers:
        return found.add("EAGLE3_CAPTURE_DIR or EAGLE3_CAPTURE_LAYERS is not set, so nothing would be captured",
                         "servers.extract.env", "set both (configs/README.md)")
    if run_file["extract"].get("states-url"):
        return None  # states come from another host, whatever its folder is called
    wanted = run_file["extract"].get("capture-dir") or f"{out}/.incoming"
    if Path(str(capture)).absolute() != Path(str(wanted)).absolute():
        found.add(f"the server would write to {capture}, 03 waits at {wanted}", "servers.extract.env",
                  "set EAGLE3_CAPTURE_DIR to 03's folder, or extract.capture-dir to the server's")
    if existing(Path(str(capture))).stat().st_dev != existing(Path(str(out))).stat().st_dev:
        found.add(f"{capture} and {out} lie on different file systems, so samples cannot be renamed into place",
                  "servers.extract.env", "put both on the same disk")


# ---- addresses ----
def check_urls(run_file: dict, found: Findings, stages: list) -> None:
    """A stage asks where a role of the run file listens; where none does, somebody answers there already."""
    asked = {}
    for section, script in SCRIPTS.items():
        for key in ("base-url", "baseline-url"):
            urls = run_file[section].get(key) or []
            for url in (urls if isinstance(urls, list) else [urls]) if script in stages else []:
                asked.setdefault((str(url), section == "generate"), f"{section}.{key}")
    served = ports(run_file, run_file["servers"])
    for (url, proxied), where in asked.items():
        try:
            parts = parsed(url, where)
            if parts.host in HERE and (parts.port or 80) in served:
                continue
            cause = why_silent(url, proxy_for(parts) if proxied else None)
        except UserError as error:
            found.add(str(error).rstrip("."), where, "correct it")
            continue
        if cause:
            final = any(word in cause for word in ("Name or service", "getaddrinfo", "CERTIFICATE", "certificate"))
            roles = f"; no role listens there, their ports: {served}" if parts.host in HERE else ""
            found.add(f"nobody answers at {masked(url)} ({cause}){roles}", where,
                      "correct the address" if final else
                      "start that server before the stage, or correct the address" if not roles else
                      "make the port that of the server this stage asks (unless you start one yourself)",
                      "error" if final else "warning")


def why_silent(url: str, proxy: str | None) -> str | None:
    """Why no server answers at `url` within seconds; None where one does, whatever it says. Raises UserError."""
    try:
        with httpx.Client(verify=tls_context(), trust_env=False, proxy=proxy, timeout=SECONDS) as client:
            status = client.get(url.rstrip("/") + "/health").status_code
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError) as error:
        return f"no answer within {SECONDS} s" if isinstance(error, httpx.TimeoutException) else \
            one_line(cause_of(error))[:200]
    return f"HTTP {status}" if status in (502, 503, 504) else None
