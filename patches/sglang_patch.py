"""Patch an installed SGLang so that its server can write hidden states, look at it, or take the patch out again.

    python3 patches/sglang_patch.py apply      # the SGLang that this Python imports, for Kimi and other DeepSeeks
    python3 patches/sglang_patch.py apply --target /models/Llama-3.1-8B      # for whatever this config.json is
    python3 patches/sglang_patch.py apply --models llama,qwen3               # for what these files of SGLang's serve
    python3 patches/sglang_patch.py status --sglang-path /opt/venv/lib/python3.12/site-packages/sglang
    python3 patches/sglang_patch.py restore

Writes  one call into each chosen file of srt/models/ (the original is kept beside it), srt/eagle3_capture.py and
        srt/eagle3_capture_files.py, copies of this folder's
Reads   patches/versions.json: which files SGLang's releases came with, and whom they serve (scripts/layer_rules.py)
Exit    0; 2 with one line where the release or a file is not one of those: nothing is touched then
Start the server anew after `apply` or `restore`. Without EAGLE3_CAPTURE_DIR set, a patched server behaves as the
original. `restore` takes the call out of every file; it is refused while a server of this project runs on that SGLang:
until its first request it would miss what was taken out.
"""
import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

STAGE = "sglang_patch"
HERE = Path(__file__).resolve().parent
VERSIONS = HERE / "versions.json"
SOURCES = (HERE / "eagle3_capture.py", HERE / "eagle3_capture_files.py")
DEFAULT = ["deepseek_v2"]  # Kimi-K2.5's text model
# In the model's forward, once in every release from 0.5.10 to 0.5.23; the call goes between the two groups.
ANCHOR = re.compile("""\
(        aux_hidden_states = None
        if self.capture_aux_hidden_states:
            hidden_states, aux_hidden_states = hidden_states
)(
?        if self.pp_group.is_last_rank:
)""")
CALL = """\
        # eagle3_capture begin: inserted by sglang_patch.py, whose `restore` takes it out
        from sglang.srt import eagle3_capture

        aux_hidden_states = eagle3_capture.capture(
            self, positions, forward_batch, hidden_states, aux_hidden_states
        )
        # eagle3_capture end
"""
INSERTED = re.compile(r" *# eagle3_capture begin.*?# eagle3_capture end\n", re.S)


class UserError(Exception):
    """Bad input or configuration. The message says what, where and what to do; the script ends with exit code 2."""


def write_atomic(path: Path, data: bytes | str, like: Path) -> None:
    """Write, fsync, rename: after a crash `path` holds the old bytes or all of the new ones.

    Its permissions are those of `like`.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data.encode() if isinstance(data, str) else data)
    shutil.copymode(like, temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)  # the rename itself must survive a power cut


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, last."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def insert(original: str, path: Path) -> str:
    """`original` with the call in it, compiled once to be sure.

    Raises UserError where the anchor does not stand exactly once.
    """
    found = len(ANCHOR.findall(original))
    if found != 1:
        raise UserError(f"{path}: the place for the call stands there {found} times, expected once. "
                        "This SGLang needs a patch of its own.")
    patched = ANCHOR.sub(lambda match: match[1] + CALL + match[2], original)
    try:
        compile(patched, str(path), "exec")
    except SyntaxError as error:
        raise UserError(f"{path}: does not compile with the call in it ({error}). Nothing was changed.") from None
    return patched


class ModelFile:
    """One file of srt/models/. Raises UserError where it cannot be read."""

    def __init__(self, folder: Path, name: str):
        self.name, self.path = name, folder / f"srt/models/{name}.py"
        self.kept = self.path.with_name(f"{name}.py.eagle3_original")
        try:
            self.text = self.path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{self.path}: not readable. "
                            "Name the sglang package folder with --sglang-path.") from None
        self.original = INSERTED.sub("", self.text)  # what the file is without our call
        self.patched = self.original != self.text


class Installation:
    """One sglang package folder and what versions.json knows of its release. Raises UserError where it is none.

    chosen: names of the model files that this call is about.
    """

    def __init__(self, folder: Path, versions: dict, chosen: list[str]):
        self.folder, self.versions, self.chosen = folder, versions, chosen
        self.copies = [folder / "srt" / source.name for source in SOURCES]
        there = [name for name in versions["files"] if (folder / f"srt/models/{name}.py").exists()]
        self.files = {name: ModelFile(folder, name) for name in {**dict.fromkeys(chosen), **dict.fromkeys(there)}}
        self.version = self.read_version()

    @property
    def patched(self) -> list[ModelFile]:
        return [file for file in self.files.values() if file.patched]

    def read_version(self) -> str:
        """From the package's own files: importing SGLang takes long and needs a GPU driver in some releases."""
        try:
            return re.search(r"^__version__ = .*?'([\w.+]+)'", (self.folder / "_version.py").read_text(), re.M)[1]
        except (OSError, TypeError):
            found = [path.name.split("-")[1] for path in self.folder.parent.glob("sglang-*.dist-info")]
        if len(found) != 1:
            raise UserError(f"{self.folder}: no _version.py and {len(found)} sglang-*.dist-info folders beside it, "
                            "so its version is unknown.")
        return found[0].removesuffix(".dist")

    def known(self, file: ModelFile) -> bool:
        """A release's own file, or one that --add-version put in."""
        return self.version in self.versions["files"][file.name].get(sha256(file.original), "").split()

    def require_known(self, files: list[ModelFile]) -> None:
        releases = self.versions["releases"]
        for file in files:
            if not self.known(file):
                what = (f"its {file.name}.py is not the one that release came with" if self.version in releases
                        else f"not in {VERSIONS.name} (known: {', '.join(releases)})")
                raise UserError(f"{self.folder}: SGLang {self.version}: {what}. Nothing was changed. Install a known "
                                "release, or, if you know this file, add it with `apply --add-version`.")


def locked(folder: Path, alone: bool) -> int:
    """A descriptor that locks an sglang folder while it is open: shared with others who use it, or alone.

    Whoever starts a server on it shares such a lock (scripts/eagle3/servers.py, scripts/quickstart.sh). Raises
    UserError.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        raise UserError(f"{folder} stays patched: {users(folder) or 'another process'} needs it. "
                        "Stop that server, then run this again.") from None
    except OSError:
        pass  # a file system without locks
    return handle


def users(folder: Path) -> str:
    """Who holds a lock on it, as far as the kernel tells: `python3 scripts/serve.py ... (pid 4711)`."""
    found = {}
    locks = Path("/proc/locks").read_text() if Path("/proc/locks").exists() else ""
    for words in map(str.split, locks.splitlines()):
        if words[1] == "FLOCK" and words[5].endswith(f":{os.stat(folder).st_ino}"):  # not "->", who waits for it
            with contextlib.suppress(OSError):  # gone: it took the lock for a shell, which holds it
                command = Path(f"/proc/{words[4]}/cmdline").read_bytes().decode(errors="replace")
                found[words[4]] = " ".join(command.split("\0")).strip()
    return ", ".join(f"{command[:120]} (pid {pid})" for pid, command in found.items() if pid != str(os.getpid()))


def release_order(version: str) -> list[int]:
    """0.5.9 < 0.5.10 < 0.5.10.post1 < 0.5.11."""
    return [int(number) for number in re.findall(r"\d+", version)]


def model_of(target: Path, versions: dict, version: str) -> str:
    """The file of srt/models/ in which this release computes `target`. Raises UserError where none is patched."""
    try:
        architectures = json.loads((target / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{target}/config.json: no architectures to be read there ({error}). "
                        "Name the target's folder, or the file with --models.") from None
    for name in versions["files"]:
        entries = [entry for since, entry in versions["layer_rules"].get(name, {}).items()
                   if release_order(since) <= release_order(version)]
        if entries and entries[-1] and architectures[0] in re.sub(r"\(.*\)", "", entries[-1].split(": ")[1]).split():
            return name
    unknown = "" if version in versions["releases"] else f", which is not in {VERSIONS.name},"
    raise UserError(f"{target}: SGLang {version}{unknown} computes {architectures[0]} in no file that this patch knows "
                    f"({', '.join(versions['files'])}). Capture with --forward-hooks: patches/README.md.")


def write_versions(versions: dict) -> None:
    write_atomic(VERSIONS, json.dumps(versions, indent=1) + "\n", VERSIONS)


# ---- the three commands ----
def apply(there: Installation, add_version: bool) -> str:
    files = [file for file in there.files.values() if file.patched or file.name in there.chosen]
    patched = {file.name: insert(file.original, file.path) for file in files}
    if add_version:
        for file in files:
            if not there.known(file):
                known, here = there.versions["files"][file.name], sha256(file.original)
                known[here] = f"{known.get(here, '')} {there.version}".lstrip()
        write_versions(there.versions)
    there.require_known(files)
    for copy, source in zip(there.copies, SOURCES):  # first: the call must never stand there without them
        write_atomic(copy, source.read_bytes(), files[0].path)
    for file in files:
        write_atomic(file.kept, file.original, file.path)
        if file.text != patched[file.name]:
            write_atomic(file.path, patched[file.name], file.path)
    return status(Installation(there.folder, there.versions, there.chosen))


def restore(there: Installation) -> str:
    # A leftover beside a file that is neither: somebody else's business
    there.require_known([file for file in there.files.values() if file.patched or file.kept.exists()])
    for file in there.patched:
        write_atomic(file.path, file.original, file.path)
    for path in (*(file.kept for file in there.files.values()), *there.copies,
                 *(there.folder / "srt/__pycache__").glob("eagle3_capture*.pyc")):
        if path.exists():  # where nothing may be written, that nothing is there is no error
            path.unlink()
    return "original"


def status(there: Installation) -> str:
    """Of the chosen files; others that are patched are named."""
    there.require_known([file for file in there.files.values() if file.patched or file.name in there.chosen])
    names = ", ".join(file.name for file in there.patched)
    if not all(there.files[name].patched for name in there.chosen):
        return "original" if not names else f"original in {', '.join(there.chosen)} (patched in {names})"
    copied = all(copy.exists() and copy.read_bytes() == source.read_bytes()
                 for copy, source in zip(there.copies, SOURCES))
    if any(file.text != insert(file.original, file.path) for file in there.patched) or not copied:
        return "patched by another state of this patch. Run `apply` again"
    patch = sha256("".join(source.read_text() for source in SOURCES))[:12]  # as in the files of samples: `patch_hash`
    return f"patched (patch {patch}, in {names}; the original is kept beside each as *.eagle3_original)"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("apply", "restore", "status"))
    parser.add_argument("--sglang-path", type=Path, metavar="DIR",
                        help="the sglang package folder (default: the one this Python imports)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--models", metavar="NAME,NAME", help="model files of SGLang's (default: deepseek_v2)")
    which.add_argument("--target", type=Path, metavar="DIR", help="the model file that serves this target")
    parser.add_argument("--add-version", action="store_true",
                        help=f"apply: put the hashes of these files into {VERSIONS.name} first")
    args = parser.parse_args(argv)
    folder = args.sglang_path
    if folder is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"{sys.executable} imports no sglang. Name its package folder with --sglang-path.")
        folder = Path(spec.submodule_search_locations[0])
    versions = json.loads(VERSIONS.read_text())
    chosen = args.models.split(",") if args.models else DEFAULT
    if unknown := [name for name in chosen if name not in versions["files"]]:
        raise UserError(f"--models {','.join(unknown)}: this patch knows {', '.join(versions['files'])}.")
    there = Installation(folder, versions, chosen)
    if args.target:
        chosen = there.chosen = [model_of(args.target, versions, there.version)]
    try:
        if args.command != "status":
            locked(folder, alone=args.command == "restore" and bool(there.patched))  # until this process ends
            there = Installation(folder, versions, chosen)
        outcome = apply(there, args.add_version) if args.command == "apply" \
            else restore(there) if args.command == "restore" else status(there)
    except OSError as error:
        remedy = ("Run this as the user who owns that SGLang" if isinstance(error, PermissionError)
                  else "Mend that and run this again")
        raise UserError(f"{error.filename or folder}: {error.strerror}. {remedy}.") from None
    print(f"sglang {there.version} at {folder}: {outcome}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"{STAGE}: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # it is done, and nobody wants to hear it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
