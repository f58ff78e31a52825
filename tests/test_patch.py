"""The patcher: original bytes come back, what it does not know it leaves alone, and a patched server is the original
until asked."""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import ROOT, TINY_KIMI, Engine, load_script, post, sglang_package

VERSIONS = json.loads((ROOT / "patches/versions.json").read_text())
TARGET = "srt/models/deepseek_v2.py"


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", str(ROOT / "patches/sglang_patch.py"), *argv, "--sglang-path", str(folder)]
    return subprocess.run(command, text=True, capture_output=True)


def refused(folder: Path, *argv: str) -> str:
    """Runs a command that must end in one line and exit code 2, touching no file; returns the line."""
    before = files(folder)
    done = run(folder, *argv)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done
    assert files(folder) == before
    return done.stderr


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def sglang(tmp_path) -> Path:
    """The installed sglang's version and target file, nothing else of it."""
    folder = tmp_path / "sglang"
    (folder / TARGET).parent.mkdir(parents=True)
    for name in (TARGET, "_version.py"):
        shutil.copy(sglang_package() / name, folder / name)
    return folder


def test_versions_have_their_form_and_hold_the_installed_one():
    assert {"0.5.15.post1", "0.5.23"} <= set(VERSIONS)
    assert all(re.fullmatch(r"0\.5\.\d+(\.post\d+)?", version) for version in VERSIONS)
    assert all(re.fullmatch(r"[0-9a-f]{64}", known) for known in VERSIONS.values())
    patcher = load_script("sglang_patch")
    assert list(VERSIONS) == sorted(VERSIONS, key=patcher.release_order)
    installed = patcher.Installation(sglang_package())
    assert VERSIONS[installed.version] == hashlib.sha256((sglang_package() / TARGET).read_bytes()).hexdigest(), \
        "the SGLang of this Python is not the release's own: was it patched in place?"


def test_apply_status_restore(sglang):
    before = files(sglang)
    assert run(sglang, "status").stdout.endswith("sglang: original\n")
    applied = run(sglang, "apply")
    assert applied.returncode == 0
    assert re.search(r": patched \(patch [0-9a-f]{12}, the original is kept as .*\)\n$", applied.stdout)
    assert run(sglang, "status").stdout == applied.stdout
    patched = files(sglang)
    names = ("eagle3_capture.py", "eagle3_capture_files.py")
    assert set(patched) - set(before) == {*(f"srt/{name}" for name in names), f"{TARGET}.eagle3_original"}
    assert all(patched[f"srt/{name}"] == (ROOT / "patches" / name).read_bytes() for name in names)
    assert patched[f"{TARGET}.eagle3_original"] == before[TARGET]
    added = set(patched[TARGET].decode().splitlines()) - set(before[TARGET].decode().splitlines())
    assert len(added) <= 6 and patched[TARGET].decode().count("eagle3_capture.capture(") == 1
    assert run(sglang, "apply").stdout == applied.stdout and files(sglang) == patched  # once more changes nothing
    assert run(sglang, "restore").stdout.endswith(": original\n")
    assert files(sglang) == before
    assert run(sglang, "restore").returncode == 0 and files(sglang) == before


def test_a_changed_file_is_refused(sglang):
    path = sglang / TARGET
    path.write_text(path.read_text() + "\n# somebody's own line\n")
    for command in ("apply", "status"):
        line = refused(sglang, command)
        assert "is not the one that release came with" in line and "--add-version" in line
    refused(sglang, "apply")
    assert run(sglang, "restore").returncode == 0  # nothing of ours there: nothing to do


def test_a_file_changed_after_apply_is_not_restored(sglang):
    run(sglang, "apply")
    path = sglang / TARGET
    path.write_text(path.read_text() + "\n# somebody's own line\n")
    for command in ("restore", "apply", "status"):
        assert "is not the one that release came with" in refused(sglang, command)


def test_an_unknown_version_is_refused(sglang):
    version = sglang / "_version.py"
    version.write_text(version.read_text().replace("0.5.23", "0.9.1"))
    for command in ("apply", "status"):
        line = refused(sglang, command)
        assert "SGLang 0.9.1: not in versions.json (known: 0.5.10, " in line and "--add-version" in line


def test_no_sglang_there(tmp_path):
    assert "Name the sglang package folder" in refused(tmp_path, "status")


def test_a_file_without_the_anchor_or_that_would_not_compile_is_refused(sglang):
    path = sglang / TARGET
    text = path.read_text()
    anchor = "        aux_hidden_states = None\n        if self.cap"
    path.write_text(text.replace(anchor, anchor.replace("None", "0")))
    assert "stands there 0 times" in refused(sglang, "apply", "--add-version")
    path.write_text("def broken(:\n" + text)
    assert "does not compile" in refused(sglang, "apply", "--add-version")


def test_apply_again_mends_an_older_patch(sglang):
    before = files(sglang)
    run(sglang, "apply")
    path = sglang / TARGET
    path.write_text(path.read_text().replace("        aux_hidden_states = eagle3_capture.capture(\n            self,",
                                             "        aux_hidden_states = eagle3_capture.older(\n            self,"))
    (sglang / "srt/eagle3_capture.py").write_text("# older\n")
    assert "Run `apply` again" in run(sglang, "status").stdout
    run(sglang, "apply")
    assert ": patched (" in run(sglang, "status").stdout and "capture.older" not in path.read_text()
    run(sglang, "restore")
    assert files(sglang) == before


def test_a_version_can_be_added(sglang, tmp_path):
    """With a copy of the patcher, whose list is the one that grows."""
    patches = shutil.copytree(ROOT / "patches", tmp_path / "patches", ignore=shutil.ignore_patterns("__pycache__"))
    path = sglang / TARGET
    path.write_text(path.read_text() + "\n# somebody's own line\n")
    before = files(sglang)

    def own(*argv):
        command = [sys.executable, "-B", str(patches / "sglang_patch.py"), *argv, "--sglang-path", str(sglang)]
        return subprocess.run(command, text=True, capture_output=True)

    assert own("apply", "--add-version").returncode == 0
    assert set(json.loads((patches / "versions.json").read_text())) - set(VERSIONS) == {
        f"0.5.23+eagle3.{hashlib.sha256(before[TARGET]).hexdigest()[:8]}"}
    assert ": patched (" in own("status").stdout
    assert own("restore").returncode == 0 and files(sglang) == before


@pytest.mark.parametrize("error, words", [
    (PermissionError(13, "Permission denied", "/there"),
     "/there: Permission denied. Run this as the user who owns that SGLang."),
    (OSError(28, "No space left on device"), "sglang: No space left on device. Mend that")])
def test_not_able_to_write_is_one_line(sglang, monkeypatch, error, words):
    patcher = load_script("sglang_patch")

    def fail(*args):
        raise error

    monkeypatch.setattr(patcher, "write_atomic", fail)
    with pytest.raises(patcher.UserError, match=words):
        patcher.main(["apply", "--sglang-path", str(sglang)])


def test_who_could_read_the_original_can_read_what_is_written(sglang):
    """Also when it is patched by a user whose umask lets nobody else read."""
    (sglang / TARGET).chmod(0o644)
    old = os.umask(0o077)
    try:
        run(sglang, "apply")
        written = (TARGET, "srt/eagle3_capture.py", f"{TARGET}.eagle3_original")
        assert {oct((sglang / name).stat().st_mode & 0o777) for name in written} == {"0o644"}
        run(sglang, "restore")
        assert oct((sglang / TARGET).stat().st_mode & 0o777) == "0o644"
    finally:
        os.umask(old)


def test_a_patched_server_without_the_variable_is_the_original(engine, patched_sglang, tmp_path):
    def answers(url: str) -> list:
        prompts = [[300 + n * k for n in range(40)] for k in (1, 2, 3)]
        request = {"return_logprob": True, "logprob_start_len": 0,
                   "sampling_params": {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}}
        given = [post(f"{url}/generate", {**request, "input_ids": ids}) for ids in prompts]
        return [(answer["output_ids"], answer["meta_info"]["input_token_logprobs"],
                 answer["meta_info"]["output_token_logprobs"]) for answer in given]

    original = answers(engine().url)
    server = Engine(tmp_path / "log", TINY_KIMI, {}, {"PYTHONPATH": str(patched_sglang)})
    try:
        assert answers(server.url) == original
    finally:
        server.kill()
    assert "eagle3_capture" not in (tmp_path / "log").read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_every_release_from_the_package_index(version, tmp_path):
    """Run when versions.json or the patcher changes: each release's wheel, apply -> compile -> status -> restore."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                    "-d", str(tmp_path), f"sglang=={version}"], check=True)
    wheel, = tmp_path.glob("sglang-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name in (f"sglang/{TARGET}", "sglang/_version.py", "sglang/srt/server_args.py") \
                    or name.startswith("sglang/srt/arg_groups/fields/"):
                archive.extract(name, tmp_path)
    wheel.unlink()
    folder = tmp_path / "sglang"
    before = files(folder)
    assert hashlib.sha256(before[TARGET]).hexdigest() == VERSIONS[version]
    assert f"sglang {version} at" in run(folder, "apply").stdout
    assert ": patched (" in run(folder, "status").stdout
    compile((folder / TARGET).read_text(), TARGET, "exec")
    assert run(folder, "restore").returncode == 0 and files(folder) == before
    # How layer ids become layers, from the release's own source: the capture module and 04's exporter rely on it
    text = before[TARGET].decode()
    adds_always = "if layer_ids and layer_ids[0] == 1" not in text
    assert adds_always == (load_script("sglang_patch").release_order(version) < [0, 5, 13])
    # Flags the capture module refuses by: a release that renames one would not be refused any more
    names = "".join(before[name].decode() for name in before if name == "srt/server_args.py" or "/fields/" in name)
    for name in ("disable_radix_cache", "enable_dp_attention", "pp_size", "enable_two_batch_overlap", "attn_cp_size",
                 "speculative_algorithm"):
        assert f"{name}:" in names
