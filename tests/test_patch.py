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
CAPTURES = ("srt/eagle3_capture.py", "srt/eagle3_capture_files.py")


def run(folder: Path, *argv) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", str(ROOT / "patches/sglang_patch.py"), *map(str, argv), "--sglang-path",
               str(folder)]
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
    """The installed sglang's version and the files that are patched, nothing else of it."""
    folder = tmp_path / "sglang"
    (folder / TARGET).parent.mkdir(parents=True)
    for name in ("_version.py", *(f"srt/models/{name}.py" for name in VERSIONS["files"])):
        shutil.copy(sglang_package() / name, folder / name)
    return folder


def rules_of(release: str) -> dict[str, str]:
    """{model file: "<rule>: <architectures>"} of versions.json for one release."""
    order = load_script("sglang_patch").release_order
    found = {stem: [entry for first, entry in since.items() if order(first) <= order(release)][-1:]
             for stem, since in VERSIONS["layer_rules"].items()}
    return {stem: entries[0] for stem, entries in found.items() if entries and entries[0]}


def test_versions_have_their_form_and_hold_the_installed_one():
    patcher, releases = load_script("sglang_patch"), VERSIONS["releases"]
    assert {"0.5.15.post1", "0.5.23"} <= set(releases) and releases == sorted(releases, key=patcher.release_order)
    assert all(re.fullmatch(r"0\.5\.\d+(\.post\d+)?", release) for release in releases)
    for name, known in VERSIONS["files"].items():
        assert all(re.fullmatch(r"[0-9a-f]{64}", sha256) for sha256 in known)
        of = [release for said in known.values() for release in said.split()]
        assert of == releases[releases.index(of[0]):], name  # each release from the first on, once
    installed = patcher.Installation(sglang_package(), VERSIONS, list(VERSIONS["files"]))
    assert installed.version == "0.5.23" and all(map(installed.known, installed.files.values())), \
        "the SGLang of this Python is not the release's own: was it patched in place?"


def test_layer_rules_are_those_of_the_installed_sources():
    """Those of every release: test_every_release_from_the_package_index."""
    rules = load_script("layer_rules")
    found, unclear = rules.Release(rules.read_texts(sglang_package())).table()
    assert found == rules_of("0.5.23") and list(unclear) == ["MindSporeForCausalLM"]


METHOD = """
class Toy:
    def __init__(self):
        self.language_model = {built}

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if not self.pp_group.is_last_rank:
            return
        self.capture_aux_hidden_states = True
        {body}

    def forward(self):
        pass


class Child(Toy):
    pass

EntryClass = [Child]
"""
BRANCHES = """if layer_ids is None:
            layers = self.config.num_hidden_layers
            self.model.layers_to_capture = [2, layers // 2, layers - 3]
        else:
            self.model.layers_to_capture = {}"""
HANDED_ON = "self.language_model.set_eagle3_layers_to_capture(layer_ids)"


@pytest.mark.parametrize("body, built, rule", [
    (BRANCHES.format("[val + 1 for val in layer_ids]"), "None", "add-one: Child"),
    (BRANCHES.format("[number + 1 for number in layer_ids]"), "None", "add-one: Child"),
    (BRANCHES.format("[val + 2 for val in layer_ids]"), "None", None),
    (BRANCHES.format("[val - 1 for val in layer_ids]"), "None", None),
    (BRANCHES.format("list(layer_ids)"), "None", None),  # of a model that is asked: none did so far
    (BRANCHES.format("self.mend([val + 1 for val in layer_ids])"), "None", None),
    (BRANCHES.format("[val + 1 for val in layer_ids]") + "\n        self.model.layers_to_capture.sort()", "None", None),
    (BRANCHES.format("[val + 1 for val in layer_ids]").replace("// 2", "// 3"), "None", None),
    (BRANCHES.format("[val + 1 for val in layer_ids]").replace("is None", "== []"), "None", None),
    ("if layer_ids is not None:\n            self.model.layers_to_capture = layer_ids", "None", None),
    (HANDED_ON, "Other()", "add-one: Child"), (HANDED_ON, "Other() if small else Child()", None),
    (HANDED_ON, "choose()", None),
    ("while True:\n            pass", "None", None)])
def test_what_the_sources_do_is_followed_or_not_understood(body, built, rule):
    rules = load_script("layer_rules")
    other = METHOD.format(built="None", body=BRANCHES.format("[val + 1 for val in layer_ids]")).replace("Toy", "Other")
    texts = {"toy": METHOD.format(body=body, built=built), "other": other.replace("EntryClass = [Child]", "")}
    texts["toy"] = "from sglang.srt.models.other import Other\n" + texts["toy"]
    found, unclear = rules.Release(texts).table()
    if rule is None:
        assert not found and list(unclear) == ["Child"], found
    else:
        assert list(found.values()) == [rule] and list(found) == ["other" if built != "None" else "toy"], unclear


@pytest.mark.parametrize("models", ["deepseek_v2", "llama,qwen3_moe", ",".join(VERSIONS["files"])])
def test_apply_status_restore(sglang, models):
    before, names = files(sglang), [f"srt/models/{name}.py" for name in models.split(",")]
    which = ("--models", models) if models != "deepseek_v2" else ()  # that is the default
    assert run(sglang, "status", *which).stdout.endswith("sglang: original\n")
    applied = run(sglang, "apply", *which)
    assert applied.returncode == 0
    assert re.search(rf": patched \(patch [0-9a-f]{{12}}, in {models.replace(',', ', ')}; .*\)\n$", applied.stdout)
    assert run(sglang, "status", *which).stdout == applied.stdout
    patched = files(sglang)
    assert set(patched) - set(before) == {*CAPTURES, *(f"{name}.eagle3_original" for name in names)}
    assert all(patched[name] == (ROOT / "patches" / Path(name).name).read_bytes() for name in CAPTURES)
    assert {name for name in before if patched[name] != before[name]} == set(names)
    for name in names:
        assert patched[f"{name}.eagle3_original"] == before[name]
        added = set(patched[name].decode().splitlines()) - set(before[name].decode().splitlines())
        assert len(added) <= 6 and patched[name].decode().count("eagle3_capture.capture(") == 1
    assert run(sglang, "apply", *which).stdout == applied.stdout and files(sglang) == patched  # again changes nothing
    assert run(sglang, "restore").stdout.endswith(": original\n")
    assert files(sglang) == before
    assert run(sglang, "restore").returncode == 0 and files(sglang) == before


def target(folder: Path, architecture: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return folder


def test_the_files_are_chosen_by_the_targets_config(sglang, tmp_path):
    before = files(sglang)
    mistral = target(tmp_path / "mistral", "MistralForCausalLM")  # inherits Llama's forward
    assert ": original\n" in run(sglang, "status", "--target", mistral).stdout
    assert ", in llama; " in run(sglang, "apply", "--target", mistral).stdout
    assert ": original in deepseek_v2 (patched in llama)\n" in run(sglang, "status").stdout
    assert ", in deepseek_v2, llama; " in run(sglang, "apply", "--target", TINY_KIMI).stdout
    for chosen in (("--models", "llama"), ("--target", mistral), ()):
        assert ": patched (" in run(sglang, "status", *chosen).stdout
    patched = files(sglang)
    (sglang / "srt/models/llama.py").write_bytes(patched["srt/models/llama.py"] + b"# somebody's own line\n")
    assert "its llama.py is not the one" in refused(sglang, "restore")  # neither file is touched
    (sglang / "srt/models/llama.py").write_bytes(patched["srt/models/llama.py"])
    assert run(sglang, "restore").returncode == 0 and files(sglang) == before


@pytest.mark.parametrize("architecture, words", [
    ("Gemma3ForCausalLM", "in no file that this patch knows (deepseek_v2, "),  # its file has another anchor
    ("MellumForCausalLM", "in no file that this patch knows"),  # Qwen3-MoE's rule, a forward of its own
    ("NobodysForCausalLM", "Capture with --forward-hooks")])
def test_a_target_of_another_file_is_refused(sglang, tmp_path, architecture, words):
    assert words in refused(sglang, "apply", "--target", target(tmp_path / "target", architecture))
    assert "no architectures to be read there" in refused(sglang, "apply", "--target", tmp_path)
    assert "--models llama2: this patch knows deepseek_v2, " in refused(sglang, "apply", "--models", "llama,llama2")


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
    known, here = json.loads((patches / "versions.json").read_text()), hashlib.sha256(before[TARGET]).hexdigest()
    assert known["files"]["deepseek_v2"].pop(here) == "0.5.23" and known == VERSIONS
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
        written = (TARGET, CAPTURES[0], f"{TARGET}.eagle3_original")
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
@pytest.mark.parametrize("version", VERSIONS["releases"])
def test_every_release_from_the_package_index(version, tmp_path):
    """Run when versions.json or the patcher changes: each release's wheel, its rules, apply -> compile -> restore."""
    rules = load_script("layer_rules")
    wheel = rules.wheel(version, tmp_path)
    found, unclear = rules.Release(rules.read_texts(wheel)).table()
    assert found == rules_of(version) and list(unclear) == ["MindSporeForCausalLM"]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"sglang/(srt/models/\w+|_version|srt/server_args|srt/arg_groups/fields/\w+)\.py", name):
                archive.extract(name, tmp_path)
    wheel.unlink()
    folder = tmp_path / "sglang"
    before = files(folder)
    there = [name for name in VERSIONS["files"] if f"srt/models/{name}.py" in before and name in found]
    assert set(VERSIONS["files"]) - set(there) <= {"glm4_moe_lite"}  # deepseek_v2 served it up to 0.5.12
    assert f"sglang {version} at" in run(folder, "apply", "--models", ",".join(there)).stdout
    assert ": patched (" in run(folder, "status", "--models", ",".join(there)).stdout
    for name in there:
        compile((folder / f"srt/models/{name}.py").read_text(), name, "exec")
    assert run(folder, "restore").returncode == 0 and files(folder) == before
    # Flags the capture module refuses by: a release that renames one would not be refused any more
    names = "".join(before[name].decode() for name in before if name == "srt/server_args.py" or "/fields/" in name)
    for name in ("disable_radix_cache", "enable_dp_attention", "pp_size", "enable_two_batch_overlap", "attn_cp_size",
                 "speculative_algorithm"):
        assert f"{name}:" in names
