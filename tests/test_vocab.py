"""02_build_vocab.py on rows as 01_generate.py writes them."""
import hashlib
import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conftest import TINY_KIMI, load_script, run_script
from eagle3.stage import UserError
from eagle3.tokens import STOP, THINK, TOOL, tokenizer_hash

vocab = load_script("02_build_vocab")
SIZE = json.loads((TINY_KIMI / "config.json").read_text())["text_config"]["vocab_size"]


def responses(folder: Path, answers: list[list[int]], prompts: list[list[int]] | None = None, rows_per_part: int = 1000,
              spacing=(",", ":"), **more) -> Path:
    """A finished responses/ folder with these ids."""
    folder.mkdir()
    files = {}
    for start in range(0, len(answers), rows_per_part):
        name = f"part-{start // rows_per_part:05d}.jsonl"
        with open(folder / name, "w") as file:
            for i in range(start, min(start + rows_per_part, len(answers))):
                row = {"id": f"r{i}-t0", "source": "x",
                       "messages": [{"role": "user", "content": 'a trap: "response_ids":[999999,1]'}],
                       "reasoning": None,
                       "content": '"response_ids":[7]', "tool_calls": [], "finish_reason": "stop", "model": "m",
                       "provider": "sglang", "usage": None,
                       "prompt_ids": prompts[i] if prompts else [1, 2], "response_ids": answers[i],
                       "ids_source": "server", "flags": ['"response_ids":[8]']}
                file.write(json.dumps(row, separators=spacing) + "\n")
        files[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    manifest = {"schema": 1, "stage": "01_generate", "inputs": {"tokenizer": tokenizer_hash(TINY_KIMI)},
                "counts": {"kept": len(answers), "dropped": {}}, "files": files}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **more}))
    return folder


def build(capsys, data: Path, out: Path, *more) -> tuple[int, str, str]:
    try:
        vocab.main([str(word) for word in ("--data-dir", data, "--tokenizer", TINY_KIMI, "--output-dir", out,
                                           "--workers", 1, *more)])
        code, err = 0, ""
    except UserError as error:
        code, err = 2, str(error)
    text = capsys.readouterr()
    return code, text.out, err


def maps(out: Path) -> tuple[np.ndarray, np.ndarray, dict]:
    d2t, t2d = np.load(out / "d2t.npy"), np.load(out / "t2d.npy")
    assert d2t.dtype == np.int64 and t2d.dtype == np.bool_ and t2d.shape == (SIZE,)
    assert np.array_equal(np.flatnonzero(t2d), np.arange(len(d2t)) + d2t) and (np.diff(d2t) >= 0).all()
    return d2t, t2d, json.loads((out / "vocab_mapping.json").read_text())


def specials() -> set[int]:
    return set(vocab.special_ids(TINY_KIMI, False, [STOP, *THINK, *TOOL]).values())


@pytest.mark.parametrize("spacing, rows_per_part", [((",", ":"), 1000), ((", ", ": "), 1000), ((",", ":"), 7)])
def test_against_a_slow_obvious_count(spacing, rows_per_part, tmp_path, capsys):
    generator = random.Random(0)
    answers = [[min(int(generator.expovariate(1 / 300)), SIZE - 1) for _ in range(generator.randint(0, 200))]
               for _ in range(50)]
    data = responses(tmp_path / "responses", answers, spacing=spacing, rows_per_part=rows_per_part)
    assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", 512)[0] == 0
    counts = Counter(i for ids in answers for i in ids)
    wanted = set(specials())
    for token_id, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(wanted) == 512:
            break
        wanted.add(token_id)
    _, t2d, said = maps(tmp_path / "out")
    assert set(np.flatnonzero(t2d)) == wanted
    total = sum(counts.values())
    assert said["tokens"] == total and said["distinct_tokens"] == len(counts)
    assert said["coverage"] == sum(counts[i] for i in wanted) / total
    held_out = [ids for i, ids in enumerate(answers)
                if int.from_bytes(hashlib.sha256(f"0:r{i}-t0".encode()).digest()[:8], "big") < 0.05 * 2**64]
    assert said["held_out_tokens"] == sum(map(len, held_out))
    assert said["table"][-1] == {"size": SIZE, "coverage": 1.0, "held_out": 1.0}
    assert [row["size"] for row in said["table"]] == sorted(row["size"] for row in said["table"])


def test_ten_tokens_and_a_draft_vocabulary_of_32(tmp_path, capsys):
    data = responses(tmp_path / "responses", [[100 + i for i in range(10)]] * 3)
    assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", 32)[0] == 0
    _, t2d, said = maps(tmp_path / "out")
    kept = set(np.flatnonzero(t2d))
    assert len(kept) == 32 and kept >= specials() | set(range(100, 110)) and said["coverage"] == 1.0
    assert kept - specials() - set(range(100, 110)) == set(range(14))  # 32 - 8 special - 10 seen: the lowest ids


def test_full_vocabulary_and_one_token_too_many(tmp_path, capsys):
    data = responses(tmp_path / "responses", [[5, 6]])
    assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", SIZE)[0] == 0
    d2t, t2d, said = maps(tmp_path / "out")
    assert t2d.all() and not d2t.any() and said["coverage"] == 1.0
    code, _, err = build(capsys, data, tmp_path / "more", "--draft-vocab-size", SIZE + 1)
    assert code == 2 and f"1..{SIZE}" in err


def test_prompt_tokens_count_only_on_request(tmp_path, capsys):
    data = responses(tmp_path / "responses", [[5, 6]], prompts=[[7, 7, 7]])
    assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", 16)[0] == 0
    assert maps(tmp_path / "out")[2]["tokens"] == 2
    assert build(capsys, data, tmp_path / "all", "--draft-vocab-size", 16, "--count", "all")[0] == 0
    assert maps(tmp_path / "all")[2]["tokens"] == 5 and maps(tmp_path / "all")[1][7]


def test_reuse_takes_the_older_map_and_says_what_it_covers(tmp_path, capsys):
    first = responses(tmp_path / "first", [[100, 101, 102, 103]])
    second = responses(tmp_path / "second", [[100, 101, 900, 901]])
    assert build(capsys, first, tmp_path / "old", "--draft-vocab-size", 12)[0] == 0
    code, out, _ = build(capsys, second, tmp_path / "new", "--draft-vocab-size", 12, "--reuse", tmp_path / "old")
    assert code == 0 and "reused map covers 50.000 % of 4 tokens" in out
    for name in ("d2t.npy", "t2d.npy"):
        assert (tmp_path / "old" / name).read_bytes() == (tmp_path / "new" / name).read_bytes()
    assert maps(tmp_path / "new")[2]["reused"] and maps(tmp_path / "new")[2]["coverage"] == 0.5
    code, _, err = build(capsys, second, tmp_path / "size", "--draft-vocab-size", 13, "--reuse", tmp_path / "old")
    assert code == 2 and "maps 12 draft tokens" in err
    np.save(tmp_path / "old/d2t.npy", np.flatnonzero(np.load(tmp_path / "old/t2d.npy")))  # ids where offsets belong
    code, _, err = build(capsys, second, tmp_path / "broken", "--draft-vocab-size", 12, "--reuse", tmp_path / "old")
    assert code == 2 and "contradict each other" in err
    (tmp_path / "old/d2t.npy").write_bytes(b"no array")
    assert build(capsys, second, tmp_path / "torn", "--draft-vocab-size", 12, "--reuse", tmp_path / "old")[0] == 2
    (tmp_path / "old/d2t.npy").write_bytes(b"")
    assert build(capsys, second, tmp_path / "torn", "--draft-vocab-size", 12, "--reuse", tmp_path / "old")[0] == 2
    code, _, err = build(capsys, second, tmp_path / "none", "--draft-vocab-size", 12, "--reuse", tmp_path / "nowhere")
    assert code == 2 and "02_build_vocab" in err


def test_reuse_of_a_map_for_another_tokenizer(tmp_path, capsys):
    data = responses(tmp_path / "responses", [[100, 101]])
    assert build(capsys, data, tmp_path / "old", "--draft-vocab-size", 12)[0] == 0
    manifest = json.loads((tmp_path / "old/manifest.json").read_text())
    manifest["inputs"]["tokenizer"] = "0" * 64
    (tmp_path / "old/manifest.json").write_text(json.dumps(manifest))
    code, _, err = build(capsys, data, tmp_path / "new", "--draft-vocab-size", 12, "--reuse", tmp_path / "old")
    assert code == 2 and "another tokenizer" in err


@pytest.mark.parametrize("harm, says", [
    (lambda data: (data / "manifest.json").unlink(), "Run 01_generate.py first"),
    (lambda data: (data / "part-00000.jsonl").unlink(), "missing, though the manifest names it"),
    (lambda data: (data / "part-00000.jsonl").write_text((data / "part-00000.jsonl").read_text() + "\n"),
     "sha256 differs|not a row"),
    (lambda data: (data / "part-00000.jsonl").write_text((data / "part-00000.jsonl").read_text().replace("5,6", "5,7")),
     "sha256 differs"),
    (lambda data: (data / "part-00000.jsonl").write_text((data / "part-00000.jsonl").read_text()[:-40]),
     "sha256 differs|not a row")])
def test_harmed_input_is_named(harm, says, tmp_path, capsys):
    data = responses(tmp_path / "responses", [[5, 6]])
    harm(data)
    code, _, err = build(capsys, data, tmp_path / "out", "--draft-vocab-size", 16)
    assert code == 2 and any(word in err for word in says.split("|")) and str(data) in err
    assert not (tmp_path / "out/manifest.json").exists()


def test_wrong_tokenizer_size_and_empty_input(tmp_path, capsys):
    other = responses(tmp_path / "other", [[5]], inputs={"tokenizer": "0" * 64})
    assert "another tokenizer" in build(capsys, other, tmp_path / "a", "--draft-vocab-size", 16)[2]
    beyond = responses(tmp_path / "beyond", [[5, SIZE]])
    assert f"token id {SIZE} is outside" in build(capsys, beyond, tmp_path / "b", "--draft-vocab-size", 16)[2]
    empty = responses(tmp_path / "empty", [[]])
    assert "holds no tokens" in build(capsys, empty, tmp_path / "c", "--draft-vocab-size", 16)[2]
    assert "do not fit" in build(capsys, responses(tmp_path / "ok", [[5]]), tmp_path / "d", "--draft-vocab-size", 7)[2]
    assert "<|nope|>" in build(capsys, tmp_path / "ok", tmp_path / "e", "--draft-vocab-size", 16, "--special-tokens",
                               "<|nope|>")[2]


def test_what_failed_may_be_mended_in_the_same_folder(tmp_path, capsys):
    """Its errors tell which flag to change; nothing of the first try is worth keeping."""
    data = responses(tmp_path / "responses", [[5, 6]])
    for wrong in (["--special-tokens", "<|nope|>"], ["--draft-vocab-size", 7],
                  ["--target-vocab-size", 6, "--draft-vocab-size", 6]):
        assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", 16, *wrong)[0] == 2
    assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", 16)[0] == 0
    assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", 17)[0] == 2  # a finished map stays what it is
    assert len(maps(tmp_path / "out")[0]) == 16


def test_ids_beyond_the_vocabulary_name_the_flag_that_decides_it(tmp_path, capsys):
    data = responses(tmp_path / "responses", [[5, 600]])
    code, _, err = build(capsys, data, tmp_path / "out", "--draft-vocab-size", 16, "--target-vocab-size", 500)
    assert code == 2 and "token id 600 is outside" in err and "--target-vocab-size" in err


@pytest.mark.parametrize("config", ["{", "[]", '{"text_config": 1}', '{"vocab_size": "many"}'])
def test_a_broken_config_of_the_target_is_one_line(config, tmp_path, capsys):
    target = tmp_path / "target"
    target.mkdir()
    (target / "tokenizer.json").write_text("{}")
    (target / "config.json").write_text(config)
    data = responses(tmp_path / "responses", [[5]], inputs={"tokenizer": tokenizer_hash(target)})
    code, _, err = build(capsys, data, tmp_path / "out", "--tokenizer", target)
    assert code == 2 and "config.json" in err and "--target-vocab-size" in err


def test_without_held_out_tokens_nothing_is_said_about_them(tmp_path, capsys):
    data = responses(tmp_path / "responses", [[5, 6]])
    code, out, _ = build(capsys, data, tmp_path / "out", "--draft-vocab-size", 16, "--held-out", 0)
    said = maps(tmp_path / "out")[2]
    assert code == 0 and "held-out" not in out
    assert said["held_out_tokens"] == 0 and said["held_out_coverage"] is None
    assert {row["held_out"] for row in said["table"]} == {None}


def test_counts_of_finished_files_are_not_kept(tmp_path, capsys):
    """2.6 MB a file at Kimi's vocabulary: a run of ten million rows has a thousand files."""
    data = responses(tmp_path / "responses", [[i] for i in range(60)], rows_per_part=1)
    tracemalloc.start()
    try:
        assert build(capsys, data, tmp_path / "out", "--draft-vocab-size", 32, "--target-vocab-size", 163840)[0] == 0
        assert tracemalloc.get_traced_memory()[1] < 90e6  # all of them: 157 MB
    finally:
        tracemalloc.stop()


def test_as_a_process_twice_and_with_another_size(tmp_path, capsys):
    """Complete already; another size in the same folder refuses; two workers give the bytes of one; no "\\r"."""
    data = responses(tmp_path / "responses", [[i % 300, i % 7] for i in range(40)], rows_per_part=15)
    argv = ["--data-dir", data, "--tokenizer", TINY_KIMI, "--output-dir", tmp_path / "out", "--draft-vocab-size", 64]
    first = run_script("02_build_vocab", *argv, "--workers", 2)
    assert first.returncode == 0 and "\r" not in first.stdout + first.stderr
    assert first.stdout.splitlines()[-1].endswith(f"done: {tmp_path / 'out'}")
    assert (tmp_path / "out/coverage.png").read_bytes().startswith(b"\x89PNG")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    code, out, _ = build(capsys, data, tmp_path / "out", "--draft-vocab-size", 64)
    assert code == 0 and "complete already" in out
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    code, _, err = build(capsys, data, tmp_path / "out", "--draft-vocab-size", 32)
    assert code == 2 and "draft_vocab_size: 64 there, 32 now" in err and len(err.splitlines()) == 1
    code, *_ = build(capsys, data, tmp_path / "one", "--draft-vocab-size", 64)
    assert code == 0
    assert all((tmp_path / "one" / name).read_bytes() == data for name, data in before.items() if name != ".lock")


def test_counting_without_shared_memory(tmp_path, monkeypatch, capsys):
    """Processes share their locks in /dev/shm."""
    def pool(workers):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(vocab, "ProcessPoolExecutor", pool)
    code, said, _ = build(capsys, responses(tmp_path / "responses", [[1, 2, 3], [2, 3], [3]]), tmp_path / "out", "--draft-vocab-size", 64)
    assert code == 0 and "counting in this process: " in said and (tmp_path / "out/manifest.json").exists()
