"""What is measured beside plain decoding: the drafter's folder, and the points of a sweep."""
from __future__ import annotations

import json
from pathlib import Path

from eagle3.drafter_files import weight_files
from eagle3.stage import UserError, sha256_file


# ---- drafters ----
def drafter_hashes(folder: Path) -> dict[str, str]:
    """What a drafter's figures hang on; one trained further differs in nothing but the bytes of its weights."""
    files = [folder / "config.json", *weight_files(folder)]
    try:
        return {path.name: sha256_file(path) for path in files if path.is_file()}
    except OSError as error:
        raise UserError(f"{error.filename}: not readable ({error.strerror}).") from None


def same_folder(one: str, other: str) -> bool:
    """Whether two names of a model mean one: by what lies there, where both are here, not by how they are spelled."""
    here = [Path(name) for name in (one, other) if (Path(name) / "config.json").is_file()]
    if one == other or len(here) < 2:
        return one == other
    return here[0].resolve() == here[1].resolve() or drafter_hashes(here[0]) == drafter_hashes(here[1])


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
    if with_weights and not weight_files(draft_path):
        raise UserError(f"--doctor: {draft_path} holds no weights (*.safetensors, *.bin).")
    path = draft_path / "eagle3.json"
    try:
        found = [json.loads(file.read_text()) for file in (draft_path / "config.json", path) if file.exists()]
    except (OSError, ValueError) as error:
        raise UserError(f"--draft-path: config.json or eagle3.json in {draft_path} is not readable as JSON "
                        f"({error}).") from None
    if not all(isinstance(part, dict) for part in found):
        raise UserError(f"--draft-path: config.json or eagle3.json in {draft_path} is no JSON object.")
    return found[1] if len(found) > 1 else {}
