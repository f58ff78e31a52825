"""What preflight finds, and how it reads a run file before anything runs."""
from __future__ import annotations

from pathlib import Path

from eagle3.masking import clean
from eagle3.servers import role_settings
from eagle3.stage import SCRIPTS, UserError, read_run_file

ROOT = Path(__file__).resolve().parents[2]  # the project's folder


class Findings(list):
    """(severity, text), in the order in which they were found; each is printed at once, each text once."""

    def add(self, what: str, where: object, remedy: str, severity: str = "error") -> None:
        if (severity, what) not in self:  # roles share most of their flags
            self.append((severity, what))
            sign = "warning: " if severity == "warning" else ""
            print(f"preflight: {sign}{clean(one_line(f'{what} | {where} | {remedy}'))}", flush=True)

    def count(self, severity: str) -> int:
        return sum(found == severity for found, _ in self)


def one_line(words: object) -> str:
    return " ".join(str(words).split())


def read_run(path: Path) -> dict:
    """The run file, each section at least {}. Raises UserError."""
    document = read_run_file(path)
    if missing := {"run_dir", "target"} - set(document):
        raise UserError(f"{path}: not a readable run file with run_dir and target (no {' and no '.join(missing)}).")
    return {**document, **{name: document.get(name) or {} for name in (*SCRIPTS, "servers")}}


def role(run_file: dict, name: str) -> dict:
    """{"command", "flags", "env"} of a role, empty of one that the run file lacks. Raises UserError."""
    there = name in run_file["servers"]
    return role_settings(run_file["servers"], name) if there else {"command": [], "flags": {}, "env": {}}


def on_gpus(spec: dict) -> bool:
    """Whether a role needs GPUs."""
    return spec["flags"].get("device") != "cpu" and not any("cpu_engine" in str(word) for word in spec["command"])


def whole(section: dict, key: str, default: int) -> int:
    """A whole number of a run file. Raises ValueError, which names the key."""
    value = section.get(key, default)
    try:
        if isinstance(value, bool) or value != value or int(value) != float(value):
            raise ValueError
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} {value!r} is no whole number") from None


def existing(path: Path) -> Path:
    """The nearest folder or file at or above `path` that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
