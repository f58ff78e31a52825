"""What each release of SGLang has for measuring and switching speculation: simulated acceptance, adaptive steps.

Read in their wheels, 0.5.10 to 0.5.23 (srt/environ.py, speculative/spec_utils.py, adaptive_spec_params.py).

| release | simulated acceptance | --speculative-adaptive |
|---|---|---|
| 0.5.10 | SGLANG_SIMULATE_ACC_LEN, _METHOD; every accepted token is id 100 | none |
| 0.5.11, 0.5.12 | the same | one list of steps for all batch sizes: cannot switch off |
| 0.5.13 | the same | steps by batch size, at least 1 |
| 0.5.14 | the same | 0 steps too: one token a step, as plain decoding |
| from 0.5.15 on | _TOKEN_MODE real-draft-token: the drafter's own tokens pass (topk 1 only) | the same |

The file of --speculative-adaptive-config: {"8": {"candidate_steps": [0, 1, 3]}, ...}. A batch takes the entry of the
largest key that is not above its size (padded to the next CUDA graph), a smaller one the first entry. Within an entry
SGLang goes up and down by the average of the drafts accepted; with one candidate there is nothing to choose. Only
EAGLE and EAGLE3 with topk 1, without attention DP, two-batch overlap and pdmux: else it warns in its log and serves
the fixed steps. --speculative-num-steps must be one of the candidates.
"""
from __future__ import annotations

from eagle3.stage import UserError
from eagle3.target import version_numbers

REAL_DRAFTS_FROM = "0.5.15"
BY_BATCH_SIZE_FROM, ZERO_STEPS_FROM = "0.5.13", "0.5.14"
# With 0 steps SGLang still runs the drafter over each new token, for when drafting begins again. Without that, plain
# decoding costs what it costs; requests that were begun at 0 steps draft worse after the switch
SKIP_AT_ZERO = {"SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": "1"}


def has(version: str | None, since: str) -> bool:
    """Whether a server that calls itself `version` has what came with release `since`; unreadable ones count as new."""
    try:
        return version_numbers(version or "") >= version_numbers(since)
    except UserError:
        return True


def simulating(accept_length: float) -> dict[str, str]:
    """Environment of a server that emits so many tokens a verify step, whatever it drafts.

    All requests of a batch get the same number in a step: the one below or above, so that the mean comes out.
    """
    return {"SGLANG_SIMULATE_ACC_LEN": f"{accept_length:g}", "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}


def why_not_adaptive(version: str | None) -> str | None:
    """Why this release takes no steps by batch size; None where it does."""
    if has(version, BY_BATCH_SIZE_FROM):
        return None
    return f"SGLang {version} has no steps by batch size (--speculative-adaptive of {BY_BATCH_SIZE_FROM} and newer)"


def fewest_steps(version: str | None) -> int:
    """Of an entry of the adaptive file: 0 is plain decoding."""
    return 0 if has(version, ZERO_STEPS_FROM) else 1
