"""A folder that was complete and goes on: with a higher limit, more prompts or responses, or after `--close`.

What it was stays beside it: before/<n>/ holds the manifest.json and index.jsonl that stood there (hard links, which
take no room), and each later manifest names them in `grown_from`. So who began on the smaller folder finds it again: 02
says what its map covers of the larger one, a run of 04 goes on with the samples that it began with.
"""
from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from eagle3.stage import read_json, read_manifest, sha256_file, sync_folder, write_atomic, write_manifest

KEPT = ("manifest.json", "index.jsonl")


def set_back(folder: Path, stage: str) -> None:
    """`folder` is not complete any more; what it was is kept. A kill leaves it as before, or as afterwards."""
    number = len(read_manifest(folder, stage).get("grown_from", [])) + 1
    place = folder / "before" / str(number)
    if not place.exists():
        temporary = place.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name in KEPT:
            if (folder / name).exists():
                link(folder / name, temporary / name)
        sync_folder(temporary)
        os.rename(temporary, place)
        sync_folder(place.parent)
    (folder / "manifest.json").unlink()


def link(path: Path, place: Path) -> None:
    """Every file of a stage is replaced as a whole and never changed, so that a second name holds what it was."""
    try:
        os.link(path, place)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, place)
        sync_folder(place)


def noted(folder: Path) -> dict:
    """The config with which this folder was begun, and completed; {} where there is none.

    The manifest's first: a later begin with more prompts of which nothing has come holds nobody to them.
    """
    for name, key in (("manifest.json", "config"), ("stage.json", None)):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads((folder / name).read_text())
            return dict(found[key] if key else found)
    return {}


def earlier(folder: Path) -> list[Path]:
    """The folders before/<n>/, the oldest first."""
    places = [place for place in folder.glob("before/*") if place.name.isdecimal()]
    return sorted(places, key=lambda place: int(place.name))


def grown_from(folder: Path) -> dict:
    """What a manifest says of the folder's earlier states: nothing where there are none. Raises UserError."""
    found = [{"manifest": sha256_file(place / "manifest.json"),
              "kept": read_json(place / "manifest.json").get("counts", {}).get("kept")} for place in earlier(folder)]
    return {"grown_from": found} if found else {}


def finish_grown(folder: Path, stage: str, **content) -> None:
    """manifest.json of a folder that may have been set back. Where nothing came of that it is the one of before again.

    Later stages take another manifest for a folder that has grown.
    """
    write_manifest(folder, stage, **content, **grown_from(folder))
    states, now = earlier(folder), read_json(folder / "manifest.json")
    before = now | {"grown_from": now["grown_from"][:-1]} if states else {}
    if states and {"grown_from": [], **read_json(states[-1] / "manifest.json")} == before:
        write_atomic(folder / "manifest.json", (states[-1] / "manifest.json").read_bytes())
        os.rename(states[-1], states[-1].with_suffix(".tmp"))  # at once: a kill leaves all of it or none
        shutil.rmtree(states[-1].with_suffix(".tmp"))


def wants_more(section: dict, folder: Path, responses: Path) -> bool:
    """Whether 01 or 03 with a run file's `section` has more to do in `folder`: it is not complete for that --limit.

    responses: what 03 reads; of 01 `folder` itself. 01 may have been given more prompts, too.
    """
    if not (folder / "manifest.json").exists():
        return True
    manifest = read_json(folder / "manifest.json")
    limit = manifest.get("limit") if folder == responses else manifest.get("config", {}).get("limit", 0)
    reads = manifest.get("inputs", {})
    grown = more_prompts(section, reads) if folder == responses else (
        reads.get("responses") != sha256_file(responses / "manifest.json"))
    ended = manifest.get("closed") or manifest.get("stopped")  # 03 by --close, 01 by a budget that may be larger now
    return grown or (limit or 0) != (section.get("limit") or 0) or bool(ended)


def more_prompts(section: dict, reads: dict) -> bool:
    """Whether 01's run file names prompts that its folder has not read. reads: its manifest's hashes."""
    files, sets = ([words] if isinstance(words, str) else words or []
                   for words in (section.get("prompts"), section.get("dataset")))
    paths = [Path(spec.split(",")[0]) for spec in files]
    return len(files) + len(sets) != len(reads.keys() - {"tokenizer"}) or any(
        path.is_file() and sha256_file(path) not in reads.values() for path in paths)


def as_of(folder: Path, manifest_sha256: str) -> Path:
    """Where the manifest with this hash lies: in `folder`, or in that one of before/; `folder` where nowhere."""
    for place in (folder, *earlier(folder)):
        if (place / "manifest.json").exists() and sha256_file(place / "manifest.json") == manifest_sha256:
            return place
    return folder
