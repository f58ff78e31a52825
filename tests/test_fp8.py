"""FP8 states: quantised as a slow, obvious reference does it; written, checked, verified, trained on as the others."""
import contextlib
import io
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import eagle3_capture_files as capture_files
from conftest import load_script
from eagle3 import checked, doctor, extraction
from eagle3.journal import Journal, plan_order
from eagle3.quantised import FP8, Quantised, finite
from eagle3.states import (FACTS, IN_FP8, KINDS, MORE_FACTS, SCALES, StateFile, check_header, check_ids, check_sample,
                           facts_token_bytes, sample_path, token_bytes)
from eagle3.stage import UserError
from eagle3.verify import check_data
from stand_in import let_go
from test_capture import H, batch, module, rid, wait_for  # noqa: F401  module: a fixture
from test_extract import ORDER, contents, damage, restamp, rewrite, stage  # noqa: F401  stage: a fixture
from test_extract_faults import CHANGES, speaking  # noqa: F401  speaking: a fixture
from test_loop import trained
from train_reference import learnable_samples, write_hidden_states, write_learnable_run

KINDS_IN_FP8 = KINDS[1:]


# ---- numbers ----
def e4m3() -> np.ndarray:
    """(127,) the numbers of e4m3 from 0 up, by its definition: 4 bits of exponent (bias 7), 3 of mantissa."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def reference(rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """rows (N, S*H) float32 -> (codes (N, S*H) uint8, scales (N, S) float32), number by number."""
    table, codes = e4m3(), np.zeros(rows.shape, np.uint8)
    scales = np.ones((len(rows), rows.shape[1] // width), np.float32)
    for row in range(len(rows)):
        for state in range(scales.shape[1]):
            part = rows[row, state * width:(state + 1) * width]
            largest = np.float32(max(abs(value) for value in part))
            if largest:
                scales[row, state] = min(max(largest * np.float32(1 / 448), np.float32(2.0 ** -126)), np.float32(7.5e35))
            for at, value in enumerate(part):
                size = min(abs(value / scales[row, state]), np.float32(448))
                away = np.abs(table - np.float64(size))
                nearest = np.flatnonzero(away == away.min())
                code = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
                codes[row, state * width + at] = code | (0x80 if np.signbit(value) else 0)
    return codes, scales


def hard_rows(dtype: torch.dtype, width: int, states: int) -> torch.Tensor:
    """Rows as models have them (a channel a thousand times the others), and rows as only a fault would make them."""
    generator, limits = torch.Generator().manual_seed(0), torch.finfo(dtype)
    rows = torch.randn(12, states, width, generator=generator)
    rows[:4, :, 3] *= 1000
    rows[1, 1] = 0  # one layer
    rows[2] = 0  # all
    rows[3, 0, 5], rows[3, 1] = limits.max, -limits.max
    rows[4], rows[5, 0] = rows[4] * limits.tiny, limits.smallest_normal / 4  # some of these are no normal numbers
    rows[6, 0, :8] = torch.tensor([448.0, 17.0, 18.0, 19.0, 2.0 ** -9, 1.5 * 2.0 ** -9, 2.0 ** -10, -0.0])  # ties
    rows[6, 0, 8:] = 1.0
    return rows.to(dtype).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantising_is_the_slow_obvious_one(dtype):
    """Bit for bit; nothing is NaN, zeros stay zeros, each number is off by at most a sixteenth of itself."""
    rows = hard_rows(dtype, H, 3)
    before = rows.clone()
    values, scales = capture_files.quantised(rows, H)
    assert torch.equal(rows, before)  # which SGLang goes on with
    codes, expected = reference(rows.float().numpy(), H)
    assert np.array_equal(scales.numpy(), expected) and np.array_equal(values.view(torch.uint8).numpy(), codes)
    found = Quantised(values, scales, dtype).to("cpu", dtype)
    assert found.dtype == dtype and found.isfinite().all() and finite(values) and finite(scales)
    exact, by_hand = rows.double(), found.double()
    floor = (scales.double() * 2.0 ** -10).repeat_interleave(H, 1)  # half of e4m3's smallest step
    assert ((by_hand - exact).abs() <= torch.maximum(exact.abs() / 16, floor)).all()
    assert (found[2] == 0).all() and (found[1, H:2 * H] == 0).all() and (scales[2] == 1).all()
    numbers = torch.from_numpy(e4m3()[codes & 0x7F] * np.where(codes & 0x80, -1, 1))
    products = (numbers * scales.double().repeat_interleave(H, 1)).float()
    assert torch.equal(found, products.to(dtype))  # rounded to float32, then to what it was


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_quantises_and_dequantises_to_the_same_bits(dtype):
    rows = torch.cat([hard_rows(dtype, 64, 3), torch.randn(3000, 192).to(dtype)])
    values, scales = capture_files.quantised(rows, 64)
    on_gpu, its_scales = (part.cpu() for part in capture_files.quantised(rows.cuda(), 64))
    assert torch.equal(on_gpu.view(torch.uint8), values.view(torch.uint8)) and torch.equal(its_scales, scales)
    states = Quantised(values.pin_memory(), scales.pin_memory(), dtype)
    assert torch.equal(states.to("cuda", dtype, non_blocking=True).cpu(), states.to("cpu", dtype))


def test_both_sides_say_the_same_of_kinds():
    """patches/ imports nothing of the rooms."""
    assert capture_files.IN_FP8 == IN_FP8 and capture_files.SCALES == SCALES and tuple(IN_FP8) == KINDS
    assert [token_bytes(7168, "bfloat16", 3, kind) for kind in KINDS] == [57349, 28693, 35857]


# ---- the capture ----
@pytest.mark.parametrize("kind", KINDS_IN_FP8)
@pytest.mark.parametrize("slot_bytes", [4 << 10, 32 << 20])
def test_an_fp8_file_is_the_other_one_quantised(module, monkeypatch, kind, slot_bytes):
    """One server writes both kinds at a time; several slots a sample and two chunks."""
    monkeypatch.setattr(module.capture.files, "SLOT_BYTES", slot_bytes)
    as_is = rid("r", range(80), "a", 5)
    asked = as_is.replace("eagle3:", f"eagle3-{kind}:")[:-1] + "b"
    rows = hard_rows(torch.bfloat16, H, 4).repeat(7, 1)[:80]
    aux, last = rows[:, :3 * H], rows[:, 3 * H:]
    for part in (slice(0, 33), slice(33, 80)):
        count = part.stop - part.start
        module.feed(batch((as_is, part.start, count), (asked, part.start, count)),
                    aux[part].repeat(2, 1), last[part].repeat(2, 1))
    plain, found = (load_file(wait_for(module.folder / f"{name}.safetensors")) for name in "ab")
    assert torch.equal(plain["aux_hidden_states"], aux) and torch.equal(plain["last_hidden_states"], last)
    for name, columns in (("aux_hidden_states", 3), ("last_hidden_states", 1)):
        if name not in IN_FP8[kind]:
            assert torch.equal(found[name], plain[name]) and SCALES[name] not in found
            continue
        codes, scales = reference(plain[name].float().numpy(), H)
        assert found[name].dtype == FP8 and found[SCALES[name]].shape == (80, columns)
        assert np.array_equal(found[name].view(torch.uint8).numpy(), codes)
        assert np.array_equal(found[SCALES[name]].numpy(), scales)
    assert torch.equal(found["input_ids"], plain["input_ids"]) and torch.equal(found["loss_mask"], plain["loss_mask"])
    with StateFile(module.folder / "b.safetensors") as file:
        facts = check_header(file, "b", 80, 5, None)
        assert facts["states"] == kind and facts["dtype"] == "bfloat16"
        assert file.size - file.begin == 80 * facts_token_bytes(facts)
        check_ids(file, found["input_ids"].tolist(), 5)
        check_data(file)
    row = {"id": "b", "tokens": 80, "checksum": file.metadata["checksum"]}
    problem, tensors = check_sample(module.folder / "b.safetensors", row, facts, 10**6, None)
    assert problem is None and all(isinstance(tensors[name], Quantised) == (name in IN_FP8[kind]) for name in SCALES)


@pytest.mark.parametrize("kind", KINDS_IN_FP8)
@pytest.mark.parametrize("where", ["aux", "last"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_refused_as_ever(module, kind, where, value):
    states = {"aux": torch.randn(5, 3 * H), "last": torch.randn(5, H)}
    states[where][3, 2] = value
    name = rid("r", range(5), "a").replace("eagle3", f"eagle3-{kind}")
    module.feed(batch((name, 0, 5)), states["aux"], states["last"])
    assert wait_for(module.folder / "a.error").read_text() == "data: a hidden state at positions 0 to 4 is not finite\n"


def test_rows_that_no_scale_fits_are_refused_in_words(module):
    name = rid("r", range(5), "a").replace("eagle3", "eagle3-fp8")
    for chunk in (slice(0, 3), slice(3, 5)):
        rows = chunk.stop - chunk.start
        module.feed(batch((name, chunk.start, rows)), torch.randn(rows, 18), torch.randn(rows, 6))
        said = wait_for(module.folder / "a.error").read_text()
    as_is = rid("r", range(5), "b")
    module.feed(batch((as_is, 0, 5)), torch.randn(5, 18), torch.randn(5, 6))
    wait_for(module.folder / "b.safetensors")  # what is told of the second chunk would be told by now
    assert said.startswith("refused: FP8 states need a hidden size that 4 divides")
    assert (module.folder / "a.error").read_text() == said


# ---- through 03 ----
@pytest.mark.parametrize("kind", KINDS_IN_FP8)
def test_through_03_and_verify_again(stage, kind):
    assert stage("--states", kind, "--verify-again", 3) == "" and stage.complete()
    assert f"({token_bytes(8, 'float32', 3, kind)} bytes a token)" in stage.out and "all 20 samples good" in stage.out
    manifest = json.loads((stage.folder / "manifest.json").read_text())
    assert manifest["states"] == json.loads((stage.folder / "stage.json").read_text())["states"] == kind
    assert json.loads((stage.folder / "verify.json").read_text())["again"]["same_bytes"] == 3
    assert stage("--states", kind) == "" and "complete already" in stage.out


def test_a_folder_holds_one_kind(stage, monkeypatch):
    """Begun with one it does not go on with another, whoever is to blame: the flag, or a server."""
    server = stage.servers[0]
    server.before = lambda name, folder: (400, {}) if name in ORDER[10:] else None
    assert "of 20 samples failed" in stage("--concurrency", 1)
    assert "begun with --states bf16, now fp8. One folder cannot hold both" in stage("--states", "fp8", "--redo-failed")
    server.before = lambda name, folder: None
    server.kind = "fp8-aux"
    said = stage("--redo-failed")
    assert "holds fp8-aux states, the folder bf16: one folder cannot hold both" in said and not stage.complete()
    shutil.rmtree(stage.folder)
    server.kind = "bf16"
    assert "holds bf16 states, --states fp8 was asked for" in stage("--states", "fp8") and not stage.complete()
    server.kind, server.before = None, lambda name, folder: "silent"  # as an older patch is
    monkeypatch.setattr(extraction, "FIRST_FILE_S", 0.3)
    assert "A patch from before there was --states fp8 knows nothing of it" in stage("--states", "fp8")
    server.kind, server.before = "fp4", lambda name, folder: None
    assert "holds fp4 states, of which these scripts know nothing" in stage("--states", "fp8")


def test_a_file_of_another_kind_in_a_finished_folder_is_found(stage):
    assert stage("--states", "fp8") == ""
    rewrite(sample_path(stage.folder, "s08"), lambda tensors, metadata: metadata.pop("states"))
    restamp(stage.folder)
    assert "1 of 20 samples failed" in stage("--states", "fp8", "--verify")
    failed = json.loads((stage.folder / "verify.json").read_text())["failed"]
    assert failed == {"s08": "holds bf16 states, the folder fp8: one folder cannot hold both"}


@pytest.mark.parametrize("kind", KINDS_IN_FP8)
def test_verify_finds_in_fp8_what_it_finds_in_the_others(speaking, kind):
    """Layers zeroed, swapped, shifted, ...; a torn file, a flipped byte; and nothing in what is well."""
    assert speaking("--states", kind, "--verify") == ""
    path, manifest = sample_path(speaking.folder, "s08"), (speaking.folder / "manifest.json").read_bytes()
    good = path.read_bytes()

    def written(change):
        def plant():
            rewrite(path, change)
            restamp(speaking.folder)
        return plant

    faults = [*((written(change), words) for change, words in CHANGES.items()),
              (lambda: path.write_bytes(good[:-40]), "its header says"), (lambda: damage(path), "checksum")]
    for plant, words in faults:
        (speaking.folder / "manifest.json").write_bytes(manifest)
        path.write_bytes(good)
        restamp(speaking.folder)
        plant()
        assert "1 of 20 samples failed" in speaking("--states", kind, "--verify"), words
        failed = json.loads((speaking.folder / "verify.json").read_text())["failed"]
        assert list(failed) == ["s08"] and words in failed["s08"], failed
    assert speaking("--states", kind, "--redo-failed") == "" and speaking("--states", kind, "--verify") == ""


# ---- converted ----
def convert(source, folder, *more) -> None:
    """scripts/convert_states.py in this process, both folders free again afterwards."""
    error = None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            load_script("convert_states").main([*map(str, ("--data-dir", source, "--output-dir", folder, *more))])
    except (UserError, KeyboardInterrupt) as caught:
        error = caught.with_traceback(None)  # which holds the locks
    for one in (source, folder):
        let_go(one)
    if error:
        raise error


@pytest.fixture
def finished(speaking, tmp_path):
    """(a stage, a folder of its samples in bf16, by `stage` in FP8 again); both complete."""
    assert speaking() == ""
    source = shutil.copytree(speaking.folder, tmp_path / "source")
    shutil.rmtree(speaking.folder)
    return speaking, source


@pytest.mark.parametrize("kind", KINDS_IN_FP8)
def test_a_converted_folder_is_the_one_that_03_makes(finished, tmp_path, kind):
    """Byte for byte, also when it was killed on the way; 03 goes on in it."""
    stage, source = finished
    assert stage("--states", kind) == ""
    before, landed, left = contents(source), Journal.add_sample, [7]

    def killed(*args):
        landed(*args)
        left[0] -= 1
        if left[0] <= 0:
            raise KeyboardInterrupt  # between a line and its file

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "add_sample", killed)
        convert(source, tmp_path / "converted", "--states", kind, "--num-workers", 1)
    assert len(list((tmp_path / "converted").glob("??/*.safetensors"))) == 6
    convert(source, tmp_path / "converted", "--states", kind)
    assert contents(tmp_path / "converted") == contents(stage.folder) and contents(source) == before
    stage.folder = tmp_path / "converted"
    assert stage("--states", kind, "--verify-again", 2) == ""
    sample_path(stage.folder, "s03").unlink()
    assert "1 of 20 samples failed" in stage("--states", kind, "--verify")
    assert stage("--states", kind, "--redo-failed") == ""


def test_a_source_that_is_removed_is_in_one_of_both_at_any_time(finished, tmp_path):
    stage, source = finished
    folder, all_of_it, real = tmp_path / "converted", {f"s{number:02d}" for number in range(20)}, shutil.os.replace

    def seen():
        return {path.stem for place in (source, folder) for path in place.glob("??/*.safetensors")}

    for last in (5, 9, None):
        moves = []

        def replace(path, place):
            assert seen() == all_of_it
            moves.append(place)
            if last and sum(".safetensors" in str(move) and ".converting" not in str(move) for move in moves) >= last:
                raise KeyboardInterrupt
            real(path, place)

        ends = pytest.raises(KeyboardInterrupt) if last else contextlib.nullcontext()
        with pytest.MonkeyPatch.context() as patch, ends:
            patch.setattr(shutil.os, "replace", replace)
            convert(source, folder, "--remove-source", "--num-workers", 1)
        assert seen() == all_of_it and not (source / "manifest.json").exists()
        if last:
            with pytest.raises(UserError, match="Go on with --remove-source"):
                convert(source, folder)
    assert not list(source.glob("??/*.safetensors")) and stage("--states", "fp8") == ""
    assert contents(folder) == contents(stage.folder)
    with pytest.raises(UserError, match="holds fp8 states. Name a folder of bf16 states"):
        convert(folder, tmp_path / "again")


def test_a_closed_folder_stays_closed(stage, tmp_path):
    """So that 03 goes on in the converted one where it would in the other."""
    stage.servers[0].before = lambda name, folder: (400, {}) if name in ORDER[10:] else None
    assert "of 20 samples failed" in stage("--concurrency", 1)
    (stage.folder / "quarantine.jsonl").unlink()
    stage.servers[0].before = lambda name, folder: None
    assert stage("--close") == ""
    source, stage.folder = stage.folder, tmp_path / "converted"
    convert(source, stage.folder)
    assert json.loads((stage.folder / "manifest.json").read_text())["closed"] == 10
    assert stage("--states", "fp8") == "" and "to do 10 " in stage.out


@pytest.mark.parametrize("more", [[], ["--remove-source"]])
def test_what_is_damaged_is_not_converted_and_extracted_anew(finished, tmp_path, more):
    stage, source = finished
    damage(sample_path(source, "s04"))
    with pytest.raises(UserError, match=r"1 of 20 samples are bad \(the first: .*s04.safetensors: checksum\)"):
        convert(source, tmp_path / "converted", *more)
    assert sample_path(source, "s04").exists() and not (tmp_path / "converted/manifest.json").exists()
    assert stage("--states", "fp8") == ""
    whole, stage.folder = stage.folder, tmp_path / "converted"
    assert stage("--states", "fp8") == "" and "to do 1 " in stage.out
    assert contents(stage.folder) == contents(whole)


# ---- trained on ----
def stored(sample: dict, kind: str) -> dict:
    """The tensors of a sample's file of this kind; sample: in bfloat16."""
    tensors, width = dict(sample), sample["last_hidden_states"].shape[1]
    for name in IN_FP8[kind]:
        tensors[name], tensors[SCALES[name]] = capture_files.quantised(tensors[name], width)
    return tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with the same samples as bf16/, and as each kind in FP8: <kind>/, and <kind>-numbers/ in bf16."""
    root = write_learnable_run(tmp_path_factory.mktemp("run"), {})
    tensors = load_file(root / "target/model.safetensors")
    embed, head = (tensors[f"language_model.{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    samples = {name: sample | {state: sample[state].bfloat16() for state in SCALES}
               for name, sample in learnable_samples(embed, head, 40).items()}
    write_hidden_states(root / "bf16", samples, dtype="bfloat16")
    for kind in KINDS_IN_FP8:
        files = {name: stored(sample, kind) for name, sample in samples.items()}
        write_hidden_states(root / kind, files, dtype="bfloat16", states=kind)
        numbers = {name: sample | {state: Quantised(files[name][state], files[name][SCALES[state]], torch.bfloat16)
                                   .to("cpu", torch.bfloat16) for state in IN_FP8[kind]}
                   for name, sample in samples.items()}
        write_hidden_states(root / f"{kind}-numbers", numbers, dtype="bfloat16")
    return root


@pytest.mark.parametrize("kind", KINDS_IN_FP8)
def test_training_on_fp8_is_training_on_the_numbers_that_it_stands_for(run, tmp_path, kind):
    """To the bit; and it is another training than on the states that it was made of."""
    weights, masses = {}, {}
    for data in (kind, f"{kind}-numbers", "bf16"):
        trained(run, tmp_path / data, "--noise-std", 0.05, "--max-steps", 4, data=(data,))
        weights[data] = (tmp_path / data / "best/model.safetensors").read_bytes()
        masses[data] = load_file(next((run / data).glob("checked/*/00000000-*.safetensors")))["mass"]
    assert weights[kind] == weights[f"{kind}-numbers"] != weights["bf16"]
    assert torch.equal(masses[kind], masses[f"{kind}-numbers"])


def test_following_03_in_fp8_is_the_ordinary_run_in_its_order(run, tmp_path):
    data = shutil.copytree(run / "fp8", tmp_path / "data")
    manifest = json.loads((data / "manifest.json").read_text())
    facts = {fact: manifest[fact] for fact in (*FACTS, *MORE_FACTS) if fact in manifest}
    rows = [json.loads(line) for line in (data / "index.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: plan_order(row["id"]))
    plan = [{"id": row["id"], "tokens": 40, "prompt_len": 8} for row in rows]
    for name, lines in (("landed.jsonl", [{"facts": facts}, *rows]), ("plan.jsonl", plan)):
        (data / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for output, flags in (("ordinary", ["--order", "plan"]), ("following", ["--follow"])):
        trained(run, tmp_path / output, *flags, data=(data,))
    ordinary, following = (tmp_path / output / "best/model.safetensors" for output in ("ordinary", "following"))
    assert ordinary.read_bytes() == following.read_bytes()


@pytest.mark.parametrize("change, words", [(lambda last: -last, "are the argmax of lm_head"),
                                           (lambda last: 3 * last, "states from before the final norm")])
def test_final_states_that_are_none_stop_the_training(run, tmp_path, change, words):
    samples = {}
    for path in (run / "bf16").glob("??/*.safetensors"):
        tensors = load_file(path)
        samples[path.stem] = stored(tensors | {"last_hidden_states": change(tensors["last_hidden_states"])}, "fp8")
    write_hidden_states(tmp_path / "wrong", samples, dtype="bfloat16", states="fp8")
    with pytest.raises(UserError, match=words):
        trained(run, tmp_path / "output", data=(tmp_path / "wrong",))


@pytest.mark.parametrize("kind", KINDS)
def test_the_doctor_reads_final_states_of_any_kind(run, tmp_path, kind):
    def lacks(what):
        raise AssertionError(what)

    facts = SimpleNamespace(target=run / "target", folder=lambda name: run / kind, lacks=lacks)
    assert doctor.check_final_state(facts) is None
    samples = {}
    for path in (run / "bf16").glob("??/*.safetensors"):
        tensors = load_file(path)
        samples[path.stem] = stored(tensors | {"last_hidden_states": 3 * tensors["last_hidden_states"]}, kind)
    write_hidden_states(tmp_path / "wrong", samples, dtype="bfloat16", states=kind)
    facts.folder = lambda name: tmp_path / "wrong"
    assert "before the final norm" in doctor.check_final_state(facts)[0]


def test_kinds_do_not_mix_in_training(run, tmp_path, monkeypatch):
    """Neither in two folders nor in one."""
    with pytest.raises(UserError, match="kind of states bf16, .* has fp8. One drafter cannot be fed both"):
        trained(run, tmp_path / "two", data=("fp8", "bf16"))
    mixed = shutil.copytree(run / "fp8", tmp_path / "mixed")
    shutil.copy(sample_path(run / "fp8-aux", "r1"), sample_path(mixed, "r1"))
    monkeypatch.setattr(checked, "MAX_BAD", 0.1)  # however few they are
    with pytest.raises(UserError, match="1 of 40 samples are bad .*another kind: fp8-aux states, the folder has fp8"):
        trained(run, tmp_path / "one", data=(mixed,))
