"""What a report folder holds a benchmark to once something has been measured there: its stage.json.

The servers count as they are started, not as they are spelled: roles merged, paths made absolute, secrets masked, and
without what has no part in any figure.
"""
from __future__ import annotations

from pathlib import Path

from eagle3.bench_flags import MAY_CHANGE, YOUNGER
from eagle3.masking import masked
from eagle3.servers import role_settings
from eagle3.stage import UserError

ROLES = ("plain", "speculative")
# Where a server listens and what it logs; the drafter's bytes are hashed by themselves
WITHOUT_PART = {"host", "port", "nccl-port", "dist-init-addr", "grpc-port", "log-level", "log-level-http",
                "log-requests", "speculative-draft-model-path", "api-key", "admin-api-key"}


def bound(config: dict, inputs: dict, servers: dict | None) -> dict:
    """stage.json of this run. config: flag -> value; inputs: hashes; servers: the run file's, None without --launch."""
    asked = {key: value for key, value in config.items() if key not in YOUNGER or value != YOUNGER[key]}
    return {**asked, "inputs": inputs, "servers": servers and settings(servers)}


def settings(servers: dict) -> dict:
    """{role: its command, flags and environment} of the roles that 05 starts. Idempotent."""
    found = {}
    for role in ROLES:
        if role in servers:
            merged = role_settings(servers, role)
            merged["command"] = [located(word) for word in merged["command"]]
            merged["flags"] = {key: located(value) for key, value in merged["flags"].items() if key not in WITHOUT_PART}
            found[role] = masked(merged)
    return found


def located(value):
    """The one spelling of a file or folder that is there; any other value as it is."""
    try:
        return str(Path(value).resolve()) if isinstance(value, str) and value and Path(value).exists() else value
    except (OSError, ValueError):
        return value


def renewed(old: dict, folder: Path) -> dict | None:
    """The stage.json of before as it counts now; None where no unit was finished, so that nothing hangs on it."""
    raw = folder / "raw.jsonl"
    if not (folder / "manifest.json").exists() and b'"kind":"unit"' not in (raw.read_bytes() if raw.exists() else b""):
        raw.unlink(missing_ok=True)
        return None
    old = {key: value for key, value in old.items() if key not in MAY_CHANGE}
    if old.get("servers"):
        try:
            old["servers"] = settings(old["servers"])
        except UserError:
            old["servers"] = masked(old["servers"])
    return old
