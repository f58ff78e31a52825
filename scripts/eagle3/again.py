"""--verify-again of 03: some samples are extracted anew, each alone, and compared with the files in place.

What was extracted among others and what is extracted alone differ in the last bits, since the shape of a batch decides
in which order numbers are added up; rows of another position, layer or model differ by as much as they are long.

Shapes: T tokens of a sample, H hidden, A captured layers.
"""
from __future__ import annotations

import argparse
import time
from pathlib import Path

from eagle3.extraction import Extraction
from eagle3.incoming import clean_incoming
from eagle3.journal import Journal, plan_order
from eagle3.samples import Sample
from eagle3.stage import UserError, log
from eagle3.states import IN_FP8, StateFile, check_header, check_ids, kind_of, layer_list, sample_path

# Median over a sample's rows of |new - old| / |old|: far above what another batch changes, far below what another
# layer or model does
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
# Of FP8 states: a number that moves by a share d goes to its neighbour, up to an eighth away, in 8 d of all cases
FP8_TOLERANCE = {name: 1.5 * (value / 8) ** 0.5 for name, value in TOLERANCE.items()}


class Again(Extraction):
    """An Extraction whose files are compared, not kept.

    failed: {id: problem}; errors: {id: relative error of each stream, (A + 1,)}; same: samples whose bytes are those
    in place.
    """

    def __init__(self, args, samples: list[Sample], facts: dict, parts: list[Path], journal: Journal, incoming: Path):
        """samples: those in place; facts: theirs."""
        alone = argparse.Namespace(**vars(args) | {"concurrency": 1, "max_disk_gb": None})
        super().__init__(alone, [], parts, journal, incoming)
        self.samples, self.facts, self.name = samples, facts, f"{self.name}-again"
        self.failed: dict[str, str] = {}
        self.errors: dict[str, list[float]] = {}
        self.same = 0
        self.one_at_a_time = False

    def put_aside(self, sample: Sample, reason: str, detail: str) -> None:
        self.sweep(sample)
        self.failed[sample.id] = f"extracted again: {reason}: {detail}"

    def land(self, path: Path, sample: Sample, ids: list[int], next_token: int) -> None:
        """Compare a whole file with the one in place, and remove it. Raises UserError: the server is another."""
        try:
            with StateFile(path) as new:
                check_header(new, sample.id, sample.tokens, sample.prompt_len, self.facts)
                check_ids(new, ids, sample.prompt_len)
                with StateFile(sample_path(self.folder, sample.id)) as old:
                    self.compare(sample, old, new)
        except ValueError as error:
            raise UserError(f"{path}: {error}. Start the server as the run began.") from None
        except OSError as error:
            self.failed[sample.id] = f"extracted again: the file in place cannot be read ({error.strerror})"
        path.unlink()
        self.done_samples += 1

    def compare(self, sample: Sample, old: StateFile, new: StateFile) -> None:
        tolerance = (FP8_TOLERANCE if IN_FP8[kind_of(self.facts)] else TOLERANCE)[self.facts["dtype"]]
        errors = relative_errors(old, new)
        self.errors[sample.id] = errors
        names = [f"layer {layer}" for layer in layer_list(self.facts)] + ["the final state"]
        worst = max(range(len(errors)), key=errors.__getitem__)
        same = old.metadata["checksum"] == new.metadata["checksum"] and not errors[worst]
        self.same += same
        if not errors[worst] <= tolerance:
            self.failed[sample.id] = (f"extracted again {names[worst]} is another (relative error "
                                      f"{errors[worst]:.3g}, batches make {tolerance:.3g})")
        elif not same and self.one_at_a_time:
            self.failed[sample.id] = (f"extracted again it has other bytes (relative error {errors[worst]:.3g}), "
                                      "though the server runs one request at a time (max_running_requests 1)")

    def run(self, leave_out: set[str]) -> dict:
        """Extract and compare, but none of `leave_out`. Returns what verify.json says of it. Raises UserError."""
        chosen = sorted((sample for sample in self.samples if sample.id not in leave_out),
                        key=lambda sample: plan_order(sample.id))
        self.to_do = chosen[:self.args.verify_again]
        self.total = len(self.to_do)
        log(f"verify {self.total} samples again, each extracted alone")
        self.one_at_a_time = all(server.describe("/server_info").get("max_running_requests") == 1
                                 for server in self.servers)
        with self.working() as threads:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.05)
                self.check_away()
        if self.stop is not None:
            raise self.stop
        clean_incoming(self.incoming, self.folder)
        self.tidy()
        self.deaths.forget()
        names = [str(layer) for layer in layer_list(self.facts)] + ["last"]
        largest = {name: round(max((errors[at] for errors in self.errors.values()), default=0.0), 6)
                   for at, name in enumerate(names)}
        log(f"verify again {self.same} of {self.total} samples have the same bytes, {len(self.failed)} failed | "
            f"largest relative error by layer {largest}")
        return {"samples": self.total, "same_bytes": self.same, "one_request_at_a_time": self.one_at_a_time,
                "largest_relative_error": largest}


def relative_errors(old: StateFile, new: StateFile, piece: int = 512) -> list[float]:
    """(A + 1,) medians over the rows of |new - old| / |old|, of each captured layer and the final state.

    Infinite where they are not finite. Raises OSError.
    """
    import torch

    T, width = old.header["last_hidden_states"]["shape"]
    found = []
    for first in range(0, T, piece):
        rows = min(piece, T - first)
        streams = []
        for file in (old, new):
            parts = []
            for name in ("aux_hidden_states", "last_hidden_states"):
                parts.append(file.numbers(name, first, rows).view(rows, -1, width))
            streams.append(torch.cat(parts, 1))  # (rows, A + 1, H)
        before, after = streams
        found.append((after - before).norm(dim=2) / (before.norm(dim=2) + 1e-30))
    errors = torch.cat(found).median(0).values
    return torch.where(errors.isfinite(), errors, torch.inf).tolist()
