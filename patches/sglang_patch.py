"""Patch an installed SGLang so that its server can write hidden states, look at it, or take the patch out again.

    python3 patches/sglang_patch.py apply      # the SGLang that this Python imports
    python3 patches/sglang_patch.py status --sglang-path /opt/venv/lib/python3.12/site-packages/sglang
    python3 patches/sglang_patch.py restore

Writes  one call into srt/models/deepseek_v2.py (the original is kept beside it), srt/eagle3_capture.py and
        srt/eagle3_capture_files.py, copies of this folder's
Reads   patches/versions.json: SGLang release -> sha256 of the deepseek_v2.py it came with
Exit    0; 2 with one line where the release or the file is not one of those: nothing is touched then
Start the server anew after `apply` or `restore`. Without EAGLE3_CAPTURE_DIR set, a patched server behaves as the
original. `restore` is refused while a server of this project runs on that SGLang: until its first request it would miss
what was taken out.
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
# In DeepseekV2ForCausalLM.forward, once in every release from 0.5.10 to 0.5.23; the call goes between these two.
ANCHOR = """\
        aux_hidden_states = None
        if self.capture_aux_hidden_states:
            hidden_states, aux_hidden_states = hidden_states
"""
AFTER = """
        if self.pp_group.is_last_rank:
"""
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
    found = original.count(ANCHOR + AFTER)
    if found != 1:
        raise UserError(f"{path}: the place for the call stands there {found} times, expected once. "
                        "This SGLang needs a patch of its own.")
    patched = original.replace(ANCHOR + AFTER, ANCHOR + CALL + AFTER)
    try:
        compile(patched, str(path), "exec")
    except SyntaxError as error:
        raise UserError(f"{path}: does not compile with the call in it ({error}). Nothing was changed.") from None
    return patched


class Installation:
    """One sglang package folder. Raises UserError where it is none."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.target = folder / "srt/models/deepseek_v2.py"
        self.kept = self.target.with_name("deepseek_v2.py.eagle3_original")
        self.copies = [folder / "srt" / source.name for source in SOURCES]
        try:
            self.text = self.target.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{self.target}: not readable. "
                            "Name the sglang package folder with --sglang-path.") from None
        self.version = self.read_version()
        self.original = INSERTED.sub("", self.text)  # what the file is without our call
        self.patched = self.original != self.text

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

    def known(self, versions: dict[str, str]) -> bool:
        """A release's own file, or one that --add-version put in as `<release>+<hash>`."""
        here = sha256(self.original)
        return any(key.split("+eagle3.")[0] == self.version and known == here for key, known in versions.items())

    def require_known(self, versions: dict[str, str]) -> None:
        if not self.known(versions):
            releases = {key.split("+eagle3.")[0] for key in versions}
            what = ("its deepseek_v2.py is not the one that release came with" if self.version in releases
                    else f"not in {VERSIONS.name} (known: {', '.join(sorted(releases, key=release_order))})")
            raise UserError(f"{self.folder}: SGLang {self.version}: {what}. Nothing was changed. "
                            "Install a known release, or, if you know this file, add it with `apply --add-version`.")


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


def apply(there: Installation, versions: dict[str, str], add_version: bool) -> str:
    patched = insert(there.original, there.target)
    if add_version and not there.known(versions):
        key = there.version if there.version not in versions else f"{there.version}+eagle3.{sha256(there.original)[:8]}"
        versions[key] = sha256(there.original)
        in_order = dict(sorted(versions.items(), key=lambda item: release_order(item[0])))
        write_atomic(VERSIONS, json.dumps(in_order, indent=1) + "\n", VERSIONS)
    there.require_known(versions)
    for copy, source in zip(there.copies, SOURCES):  # first: the call must never stand there without them
        write_atomic(copy, source.read_bytes(), there.target)
    write_atomic(there.kept, there.original, there.target)
    if there.text != patched:
        write_atomic(there.target, patched, there.target)
    return status(Installation(there.folder), versions)


def restore(there: Installation, versions: dict[str, str]) -> str:
    if there.patched:
        there.require_known(versions)
        write_atomic(there.target, there.original, there.target)
    elif there.kept.exists():
        there.require_known(versions)  # a leftover beside a file that is neither: somebody else's business
    for path in (there.kept, *there.copies, *(there.folder / "srt/__pycache__").glob("eagle3_capture*.pyc")):
        if path.exists():  # where nothing may be written, that nothing is there is no error
            path.unlink()
    return "original"


def status(there: Installation, versions: dict[str, str]) -> str:
    there.require_known(versions)
    if not there.patched:
        return "original"
    copied = all(copy.exists() and copy.read_bytes() == source.read_bytes()
                 for copy, source in zip(there.copies, SOURCES))
    if there.text != insert(there.original, there.target) or not copied:
        return "patched by another state of this patch. Run `apply` again"
    patch = sha256("".join(source.read_text() for source in SOURCES))[:12]  # as in the files of samples: `patch_hash`
    return f"patched (patch {patch}, the original is kept as {there.kept.name})"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("apply", "restore", "status"))
    parser.add_argument("--sglang-path", type=Path, metavar="DIR",
                        help="the sglang package folder (default: the one this Python imports)")
    parser.add_argument("--add-version", action="store_true",
                        help=f"apply: put this file's hash into {VERSIONS.name} first")
    args = parser.parse_args(argv)
    folder = args.sglang_path
    if folder is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"{sys.executable} imports no sglang. Name its package folder with --sglang-path.")
        folder = Path(spec.submodule_search_locations[0])
    there, versions = Installation(folder), json.loads(VERSIONS.read_text())
    try:
        if args.command != "status":
            locked(folder, alone=args.command == "restore" and there.patched)  # until this process ends
            there = Installation(folder)
        outcome = apply(there, versions, args.add_version) if args.command == "apply" \
            else restore(there, versions) if args.command == "restore" else status(there, versions)
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
