"""What is measured beside plain decoding: the drafter's folder, and the points of a sweep."""
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.drafter_files import weight_files
from eagle3.stage import UserError, sha256_file


@dataclass(frozen=True)
class DraftFolder:
    """A drafter that is measured. about: its eagle3.json, {} without one."""
    folder: Path
    about: dict = field(default_factory=dict)

    @property
    def prediction(self) -> dict | None:
        """Training's."""
        return self.about.get("prediction")


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


def drafter_variants(folders: list[Path], with_weights: bool = False) -> dict[str, DraftFolder]:
    """{variant: a drafter of --draft-path}: `speculative` of one, else each under the end of its path that only it has.

    Raises UserError: no drafter there, or one folder twice.
    """
    places = [folder.resolve() for folder in folders]
    if twice := next((folder for folder, place in zip(folders, places) if places.count(place) > 1), None):
        raise UserError(f"--draft-path: {twice} stands there twice. Name each drafter once.")
    found = [DraftFolder(folder, read_provenance(folder, with_weights)) for folder in folders]
    return dict(zip(names_of(places) if len(folders) > 1 else ["speculative"], found))


def flags_of_drafters(drafters: dict[str, DraftFolder]) -> dict[str, dict]:
    """{variant: its server's flags}; one drafter is the run file's own."""
    if len(drafters) < 2:
        return {"speculative": {}}
    return {name: {"speculative-draft-model-path": str(drafter.folder.resolve())} for name, drafter in drafters.items()}


def names_of(places: list[Path]) -> list[str]:
    """For each folder as many names from the end of its path as tell them all apart, joined by "-"."""
    for depth in range(1, max(len(place.parts) for place in places)):
        names = ["-".join(place.parts[1:][-depth:]) for place in places]
        if len({*names, "plain"}) > len(names):
            break
    return names


def read_provenance(draft_path: Path, with_weights: bool) -> dict:
    """eagle3.json of a drafter; {} without one. Raises UserError when there is no drafter."""
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
