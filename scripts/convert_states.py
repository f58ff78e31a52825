"""Make FP8 states out of the bf16 states of a folder that 03_extract.py has finished: half the disk, without a server.

    python3 scripts/convert_states.py --data-dir hidden_states/ --output-dir hidden_states_fp8/ --states fp8
    python3 scripts/convert_states.py --data-dir hidden_states/ --output-dir hidden_states_fp8/ --remove-source

The new folder is the one that `03_extract.py --states fp8` would have made, by the code that it would have made it with
(patches/eagle3_capture_files.py): 04 trains on it, and 03 with the same flags and --states goes on in it (--verify,
--redo-failed). With --remove-source each sample goes as soon as its FP8 file is on the disk, for disks that do not hold
both; there is no way back from FP8 to what it was.

Reads   --data-dir: every file whole, its checksum compared with index.jsonl; what is damaged is left
Writes  --output-dir, manifest.json last; with --remove-source, --data-dir's manifest.json becomes converting.json first
Time    the disk's, with a GPU; without one about 0.4 s of a core for 1,000 tokens of Kimi-K2.5
Memory  a whole sample for each of --num-workers: 3.8 GB for one of 65,536 tokens of Kimi-K2.5
Stop it any way, at any time; the same command goes on.
"""
import argparse
import concurrent.futures
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "patches")]
import eagle3_capture_files as capture_files  # noqa: E402
from eagle3.inputs import read_index  # noqa: E402
from eagle3.journal import Journal  # noqa: E402
from eagle3.stage import (UserError, bar, duration, lock_file, log, open_stage, raising, read_manifest,  # noqa: E402
                          run, sync_folder, write_atomic, write_manifest)
from eagle3.states import (FACTS, IN_FP8, KINDS, MORE_FACTS, StateFile, check_header, check_sample,  # noqa: E402
                           kind_of, sample_path)

STAGE = "03_extract"
NO_LIMIT = (1 << 31) - 1  # of token ids: which there are is the target's to say


@dataclass
class Row:
    """A line of index.jsonl, as the journal wants a sample."""
    id: str
    tokens: int
    prompt_len: int
    truncated: bool
    next_token: int | None
    checksum: str


class Converter:
    """convert(row) -> what is wrong with the sample, or None when its FP8 file is in place."""

    def __init__(self, source: Path, folder: Path, manifest: dict, kind: str, remove: bool):
        self.source, self.folder, self.remove, self.kind = source, folder, remove, kind
        self.before = {fact: manifest[fact] for fact in (*FACTS, *MORE_FACTS) if fact in manifest}
        self.facts = self.before | {"states": kind}
        self.journal = Journal(folder)
        if self.journal.facts is None:
            self.journal.add({"facts": self.facts})
        self.layout = capture_files.Layout(kind, len(self.before["capture_layers"]), self.before["hidden_size"],
                                           getattr(torch, self.before["dtype"]))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.incoming = folder / ".converting"
        shutil.rmtree(self.incoming, ignore_errors=True)

    def __call__(self, row: Row) -> str | None:
        path = sample_path(self.source, row.id)
        if not self.in_place(row):
            problem, tensors = check_sample(path, vars(row), self.before, NO_LIMIT, None)
            if problem:
                return problem
            with StateFile(path) as file:
                metadata = {key: value for key, value in file.metadata.items()
                            if key not in ("id", "prompt_len", "checksum")}
            self.land(row, self.write(row, tensors, metadata))
        if self.remove:
            path.unlink(missing_ok=True)
        return None

    def in_place(self, row: Row) -> bool:
        path = sample_path(self.folder, row.id)
        try:
            with StateFile(path) as file:
                check_header(file, row.id, row.tokens, row.prompt_len, self.facts)
                return self.journal.rows.get(row.id, {}).get("checksum") == file.metadata["checksum"]
        except (FileNotFoundError, ValueError):
            return False

    def write(self, row: Row, tensors: dict, metadata: dict) -> Path:
        """The sample's FP8 file, whole and on the disk, but not in place yet."""
        capture = SimpleNamespace(folder=self.folder, threads=[SimpleNamespace(rows=0)], metadata=metadata,
                                  layouts={self.kind: self.layout})
        sample = capture_files.Sample(capture, self.incoming.name, row.prompt_len, row.tokens, row.id, self.kind)
        slot = capture_files.Slot(max(capture_files.SLOT_BYTES, self.layout.row_bytes + 1), False)
        slot.lay_out(self.layout)
        slot.finite.fill_(True)  # check_sample has looked
        for first in range(0, row.tokens, slot.rows(self.layout)):
            rows = slice(first, min(first + slot.rows(self.layout), row.tokens))
            parts = {name: tensors[name][rows] for name in (*capture_files.SCALES, "input_ids")}
            for name in self.layout.in_fp8:
                found = capture_files.quantised(parts[name].to(self.device), self.layout.width)
                parts[name], parts[capture_files.SCALES[name]] = found
            for name, part in parts.items():
                slot.parts[name][:rows.stop - rows.start].copy_(part)
            sample.add(slot, rows.stop - rows.start)
        return sample.path

    def land(self, row: Row, path: Path) -> None:
        """The line first, then the file, as 03 does it."""
        with StateFile(path) as file:
            checksum = file.metadata["checksum"]
        place = sample_path(self.folder, row.id)
        place.parent.mkdir(exist_ok=True)
        self.journal.add_sample(row, checksum, row.next_token)
        os.replace(path, place)
        if self.remove:
            self.journal.sync()
            sync_folder(place.parent)


def convert_all(converter: Converter, rows: list[Row], workers: int) -> dict[str, str]:
    """{id: what is wrong with it} of the samples that could not be converted."""
    bad, done, begun = {}, 0, time.monotonic()
    told = begun
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    try:
        with bar(len(rows), "sample") as progress:
            for row, problem in zip(rows, pool.map(converter, rows)):
                done += row.tokens
                progress.update()
                if problem:
                    bad[row.id] = problem
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    rate = done / (told - begun)
                    log(f"tokens {done:,} | {rate:,.0f} tok/s | bad {len(bad)} | "
                        f"eta {duration(sum(row.tokens for row in rows) / rate - (told - begun))}")
    finally:
        pool.shutdown(cancel_futures=True)
    return bad


def read_source(folder: Path, remove: bool) -> dict:
    """The manifest of the folder to convert. Raises UserError."""
    begun = folder / "converting.json"
    if begun.exists() and not (folder / "manifest.json").exists():
        if not remove:
            raise UserError(f"{begun}: some samples have been removed from there. Go on with --remove-source.")
        manifest = json.loads(begun.read_text())
    else:
        manifest = read_manifest(folder, STAGE)
    if manifest.get("bounded") or IN_FP8[kind_of(manifest)]:
        there = "what a bounded run has left" if manifest.get("bounded") else f"{kind_of(manifest)} states"
        raise UserError(f"{folder}: holds {there}. Name a folder of bf16 states.")
    if manifest["hidden_size"] % 4:
        raise UserError(f"{folder}: hidden size {manifest['hidden_size']}; FP8 states need one that 4 divides.")
    return manifest


def main(argv: list[str]) -> None:
    parser = raising(argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                             formatter_class=argparse.RawDescriptionHelpFormatter))
    parser.add_argument("--data-dir", type=Path, required=True, help="hidden_states/ of 03_extract.py, complete")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--states", choices=KINDS[1:], default="fp8", help="fp8-aux: the final state stays as it is")
    parser.add_argument("--remove-source", action="store_true", help="each sample of --data-dir once it is converted")
    parser.add_argument("--num-workers", type=int, default=min(8, os.cpu_count() or 1))
    args = parser.parse_args(argv)
    source, folder = args.data_dir.absolute(), args.output_dir.absolute()
    if source.resolve() == folder.resolve():
        raise UserError(f"--output-dir {folder}: is --data-dir. Name a new folder.")
    manifest = read_source(source, args.remove_source)
    source_lock = lock_file(source / ".lock")
    if not source_lock:
        raise UserError(f"{source}: another process is writing there. Wait for it.")
    config = {**manifest["config"], "inputs": manifest["inputs"], "states": args.states}
    lock = open_stage(folder, config, set())  # noqa: F841  held until this returns
    if (folder / "manifest.json").exists():
        log("complete already")
    else:
        rows = [Row(**row) for row in read_index(source, manifest["index_sha256"])]
        for name in ("plan.jsonl", "quarantine.jsonl"):
            if (source / name).exists():
                write_atomic(folder / name, (source / name).read_bytes())
        if args.remove_source and (source / "manifest.json").exists():
            os.replace(source / "manifest.json", source / "converting.json")
            sync_folder(source)
        converter = Converter(source, folder, manifest, args.states, args.remove_source)
        log(f"samples {len(rows):,} | tokens {sum(row.tokens for row in rows):,} | {args.states} on {converter.device}")
        bad = convert_all(converter, rows, max(1, args.num_workers))
        if bad:
            name, problem = min(bad.items())
            raise UserError(f"{source}: {len(bad)} of {len(rows)} samples are bad (the first: "
                            f"{sample_path(source, name)}: {problem}). All others are in place: 03_extract.py with "
                            f"--states {args.states} --output-dir {folder} extracts these and completes it.")
        index_sha256 = converter.journal.write_index([row.id for row in rows])
        shutil.rmtree(converter.incoming, ignore_errors=True)
        write_manifest(folder, STAGE, **{key: manifest[key] for key in ("config", "inputs", "counts", "versions")},
                       **converter.facts, index_sha256=index_sha256,
                       **({"closed": manifest["closed"]} if "closed" in manifest else {}))
    log(f"done: {folder}")


if __name__ == "__main__":
    run(main)
