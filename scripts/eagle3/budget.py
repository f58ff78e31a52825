"""Upper bounds on what a run of 01_generate may cost, in tokens and in dollars, that hold with requests in flight."""
from __future__ import annotations

import asyncio
import os
import struct
from typing import NamedTuple

from eagle3.stage import UserError
from eagle3.store import Store

UNBOUNDED = float("inf")


class Halt(Exception):
    """The run ends early. str(): why; code: the exit code (0: a budget is reached, the folder is finished)."""

    def __init__(self, why: str, code: int):
        super().__init__(why)
        self.code = code


class Amount(NamedTuple):
    """Prompt and answer tokens together, and dollars."""
    tokens: float
    usd: float

    def plus(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.usd + other.usd)

    def minus(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.usd - other.usd)


NOTHING = Amount(0.0, 0.0)


class Budget:
    """What is left of --max-tokens-total and --max-cost-usd, across kills.

    A request's worst case (prompt + --max-tokens) is reserved before it is sent. What is reserved, and what failed
    requests may have cost (`lost`), is kept in the file `.unsettled`: after a kill it counts as spent. Without
    --usd-per-mtok the price is learnt from usage.cost: the first request runs alone, and later ones reserve for every
    token the dearest price per answer token seen so far.
    """

    def __init__(self, args, store: Store):
        self.store, self.max_tokens, self.prices, self.in_flight = store, args.max_tokens, args.usd_per_mtok, 0
        limits = (args.max_tokens_total, args.max_cost_usd)
        self.limits = Amount(*(UNBOUNDED if limit is None else limit for limit in limits))
        self.file = os.open(store.folder / ".unsettled", os.O_RDWR | os.O_CREAT, 0o644)
        self.lost = Amount(*struct.unpack("<2d", os.pread(self.file, 16, 0).ljust(16, b"\0")))
        self.reserved, self.changed = NOTHING, asyncio.Condition()
        self.rate: float | None = None  # $ per answer token, learnt
        self.save()

    def save(self) -> None:
        os.pwrite(self.file, struct.pack("<2d", *self.lost.plus(self.reserved)), 0)

    def spent(self) -> Amount:
        return self.lost.plus(Amount(self.store.tokens, self.store.usd))

    def worst_case(self, n_prompt: int) -> Amount:
        """Of a request with so many prompt tokens, at the price known now."""
        if self.prices:
            usd = (n_prompt * self.prices[0] + self.max_tokens * self.prices[1]) / 1e6
        else:
            usd = (self.rate or 0.0) * (n_prompt + self.max_tokens)
        return Amount(n_prompt + self.max_tokens, usd)

    async def reserve(self, n_prompt: int) -> Amount:
        """The worst case, reserved; waits while requests in flight may still leave room. Raises Halt: there is none."""
        async with self.changed:
            while True:
                need, spent = self.worst_case(n_prompt), self.spent()
                learning = self.limits.usd < UNBOUNDED and not self.prices and self.rate is None
                after = spent.plus(self.reserved).plus(need)
                fits = after.tokens <= self.limits.tokens and after.usd <= self.limits.usd
                if fits and not (learning and self.in_flight):
                    break
                if not self.in_flight:
                    flag = "--max-tokens-total" if spent.tokens + need.tokens > self.limits.tokens else "--max-cost-usd"
                    raise Halt(f"{flag} would be passed by the next request: {spent.tokens:,.0f} tokens, "
                               f"${spent.usd:.4f} spent", code=0)
                await self.changed.wait()
            self.in_flight += 1
            self.reserved = self.reserved.plus(need)
            self.save()
            return need

    async def settle(self, need: Amount, row: dict | None = None, billed: bool = False) -> None:
        """The request has ended; `row` is what it gave, written by now. billed: it gave no row, but it may have cost.

        Where its cost is not known, the worst case counts. Raises UserError when dollars are bounded and nothing tells
        what a token costs.
        """
        usage = row["usage"] or {} if row else {}
        untold = row is not None and self.limits.usd < UNBOUNDED and not self.prices and "cost" not in usage
        async with self.changed:
            self.in_flight -= 1
            self.reserved = self.reserved.minus(need) if self.in_flight else NOTHING  # no rounding is left over
            if billed or row is not None and "reason" in row and not usage:
                self.lost = self.lost.plus(need)
            elif untold:
                self.lost = self.lost.plus(Amount(0.0, need.usd))
            if "cost" in usage and usage.get("completion_tokens"):
                self.rate = max(self.rate or 0.0, usage["cost"] / usage["completion_tokens"])
            self.save()
            self.changed.notify_all()
        if untold and self.rate is None:
            raise UserError("--max-cost-usd: this API's usage holds no cost. "
                            "Give the prices with --usd-per-mtok IN OUT.")
