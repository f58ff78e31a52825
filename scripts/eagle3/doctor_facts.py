"""What the doctor looks at: the drafter's folder, its server, its run. What is not there is said by name."""
from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import NoReturn

import numpy as np

from eagle3.drafter_files import DrafterFiles
from eagle3.sglang_draft import ARCHITECTURE, MLA, Loaded, eagle, is_known, loaded
from eagle3.stage import UserError

Found = tuple[str, str] | None  # of a check: (finding, remedy)


class Unchecked(Exception):
    """A cause that cannot be tested here: what is missing."""


class Facts:
    """What the checks look at. Anything that is not there raises Unchecked with its name."""

    def __init__(self, draft_path: Path, provenance: dict, server: dict | None, run_dir: Path | None,
                 prompts: list[dict]):
        """provenance: the drafter's eagle3.json; server: what the speculative one tells. Raises UserError."""
        try:
            self.files = DrafterFiles(draft_path)
        except UserError as why:
            raise UserError(f"--doctor: {why}") from None
        self.config, self.tensors, self.provenance = self.files.config, self.files.shapes, provenance
        self.prompts, self._server, self._run_dir = prompts, server, run_dir

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The tensors as this server loads them."""
        if not is_known(self.config):
            self.lacks(f"config.json names {self.config.get('architectures')}; the doctor knows {ARCHITECTURE} and "
                       f"{MLA}")
        if not self.tensors:
            self.lacks("it has no weights")
        version = (self._server or {}).get("version")
        with contextlib.suppress(UserError):  # a version without numbers: read as the newest
            return loaded(self.tensors, self.config, version)
        return loaded(self.tensors, self.config)

    @property
    def shapes(self) -> dict[str, list[int]]:
        return self.loaded.shapes

    @property
    def eagle_config(self) -> dict:
        return eagle(self.config)

    @property
    def d2t(self) -> np.ndarray:
        """(Vd,) int64, as SGLang reads it: offsets."""
        return self.lacks("the drafter has no d2t") if self.files.d2t is None else self.files.d2t

    @property
    def server(self) -> dict:
        return self._server or self.lacks("the speculative server has not been reached")

    @property
    def target(self) -> Path:
        path = Path(self.server["model_path"])
        return path if (path / "config.json").is_file() else \
            self.lacks(f"the target's folder {path} is not on this machine")

    def trained(self, key: str):
        return self.provenance[key] if key in self.provenance else self.lacks(f"eagle3.json has no `{key}`")

    def folder(self, name: str) -> Path:
        if not self.provenance:
            self.lacks("no eagle3.json says which run is its own")
        path = self._run_dir / name if self._run_dir else None
        return path if path and path.is_dir() else \
            self.lacks(f"{path or name + '/'} is not there: name its run with --run-dir")

    @staticmethod
    def lacks(why: str) -> NoReturn:
        raise Unchecked(why)
