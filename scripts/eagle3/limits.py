"""What the running servers take of one request, read of them before 03 sends the first: context, KV pool, vocabulary.

SGLang 0.5.10 to 0.5.23 refuses a prompt that does not leave room for a token in its context (`max_model_len` of
/v1/models), or that reaches `max_req_input_len` of /server_info, which hangs on the context and on the KV pool
(`max_total_num_tokens`): a request must lie in the pool as a whole.
"""
from __future__ import annotations

from dataclasses import dataclass

from eagle3.extraction import Extraction
from eagle3.prefill_server import Server
from eagle3.stage import UserError, log

TOO_LONG = "longer than the server takes"  # reason of a quarantined sample


@dataclass
class Limits:
    """Of one server; None: it does not say. longest: tokens of one sample that it still takes."""
    url: str
    context: int | None
    pool: int | None
    longest: int | None
    vocab: int | None

    def __str__(self) -> str:
        told = {"context": self.context, "KV pool": self.pool, "longest sample that it takes": self.longest,
                "vocabulary": self.vocab}
        return ", ".join(f"{name} {value:,}" for name, value in told.items() if value) or "it does not say"


def a_count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def read_limits(server: Server) -> Limits:
    """Raises OSError, UserError (no right)."""
    told, models = server.describe("/server_info"), server.describe("/v1/models").get("data")
    model = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    context = a_count(model.get("max_model_len")) or a_count(told.get("context_length"))
    pool, most = a_count(told.get("max_total_num_tokens")), a_count(told.get("max_req_input_len"))
    bounds = [bound - 1 for bound in (context, most or pool) if bound]
    return Limits(server.url, context, pool, min(bounds, default=None), server.vocab_size())


def leave_out_too_long(job: Extraction, limits: list[Limits]) -> None:
    """Quarantine what one of the servers would refuse. Raises UserError where that is more than --max-failed allows."""
    for one in limits:
        log(f"limits of {one.url} | {one}")
    least = min((one for one in limits if one.longest), key=lambda one: one.longest, default=None)
    if not least:
        return
    bad = [sample for sample in job.to_do if sample.tokens > least.longest]
    if len(bad) > max(1, job.args.max_failed * job.total):
        most = max(bad, key=lambda sample: sample.tokens)
        raise UserError(f"{least.url} takes samples of up to {least.longest:,} tokens ({least}); {len(bad):,} of "
                        f"{job.total:,} are longer, {most.id} with {most.tokens:,} the longest. Serve with a larger "
                        f"--context-length and KV pool (--mem-fraction-static), or cut with --max-length "
                        f"{least.longest} (in a folder without samples).")
    for sample in bad:
        job.put_aside(sample, TOO_LONG, f"{sample.tokens:,} tokens, {least.url} takes {least.longest:,}")
    job.to_do = [sample for sample in job.to_do if sample.tokens <= least.longest]
