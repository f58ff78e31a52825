"""scripts/plan.py: the runs whose figures are known, 04's own arithmetic, and what does not fit."""
import json
import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT, TINY_KIMI, load_script, run_here
from eagle3 import forecast
from eagle3.drafter import Shape

plan = load_script("plan")


def run(*argv) -> subprocess.CompletedProcess:
    return run_here("plan", *argv)


def figures(*argv) -> dict:
    done = run("--json", *argv)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_known_runs_come_out_within_a_tenth():
    done = run("--known")
    assert done.returncode == 0
    rows = [line.rsplit(maxsplit=1)[1] for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 6 and all(abs(float(row.strip("%"))) < 10 for row in rows)


def test_a_known_figure_that_is_missed_fails(monkeypatch, capsys):
    what, flags, known = plan.KNOWN[1]
    monkeypatch.setattr(plan, "KNOWN", [(what, flags, {**known, "train_hours": 9.2})])
    assert plan.main(["--known"]) == 1


def test_177230_steps_are_five_epochs_of_95_percent():
    f = figures("--samples", 37312, "--val-ratio", 0.05, "--unpacked", "--train-rate", 2800)
    assert f["train_steps"] == 5 * int(37312 * 0.95) == 177230


def test_kimis_bytes_and_parameters():
    f = figures("--num-kv-heads", 64)
    assert f["hidden_states_bytes"] == 57349 * f["tokens"]
    assert round(f["draft_parameters"] / 1e6) == 1191  # fc 154, qkv 352, o 59, MLP 396, head 229
    assert 16e9 < f["checkpoint_bytes"] / 3 < 17.5e9   # 04's docstring: 17 GB
    assert 590e9 < f["target_bytes"] < 600e9


def test_fp8_states_are_counted(tmp_path):
    """By the flag, and as a run file asks 03 for them: on the disk and where 04 reads."""
    plain = figures()
    assert figures("--states", "fp8")["hidden_states_bytes"] == 28693 * plain["tokens"]
    config = tmp_path / "run.yaml"
    config.write_text("run_dir: /nowhere\nextract: {states: fp8-aux}\n")
    found = figures("--config", config, "--disk", "4T")
    assert found["hidden_states_bytes"] == 35857 * found["tokens"]
    assert found["train_read_rate"] / found["train_rate"] == pytest.approx(35857)
    assert "1 byte + 3 scales x 4 + 1 state x 7,168 x 2 bytes" in run("--states", "fp8-aux").stdout


@pytest.mark.parametrize("flags, known", [
    (["--num-kv-heads", 64], 46524), (["--num-kv-heads", 8], 54691),
    (["--num-kv-heads", 64, "--mean-length", 4096, "--max-seq-len", 4096, "--prompt-share", 0], 32924),
    (["--num-kv-heads", 64, "--mean-length", 4096, "--max-seq-len", 4096, "--prompt-share", 0, "--ttt-steps", 7], 15042),
    (["--num-kv-heads", 8, "--mean-length", 4096, "--max-seq-len", 4096, "--prompt-share", 0], 37577)])
def test_training_rate_against_what_was_measured_on_an_h200(flags, known):
    assert figures("--gpu-tflops", 989, *flags)["train_rate"] == pytest.approx(known, rel=0.1)


@pytest.mark.parametrize("kv_heads", [8, 64])
def test_drafter_is_04s_own(kv_heads):
    shape = Shape(7168, 64, kv_heads, 128, 18432, 163840, 32000, 1e-5, 5e4, 262144)
    found = forecast.drafter_shape(forecast.KIMI, 32000, kv_heads)
    assert found.weights() == shape.weights()
    assert sum(forecast.parameters(found).values()) == sum(np.prod(s) for s in shape.weights().values())
    T, query = 1500, 1000  # rows that carry loss: the last 1,000; row i of them sees 500 + i + 1 keys
    exact = shape.flops(T, query, sum(500 + i + 1 for i in range(query)), 3)
    assert forecast.token_flops(found, T, query / T, 3) * T == pytest.approx(exact, rel=0.001)


def test_a_drafter_with_latent_attention():
    """At Kimi's sizes, by hand: 576 numbers a token in its cache against 2 x 8 heads x 128, and 896M trained against 985M."""
    found, other = figures("--architecture", "mla"), figures()
    assert (found["draft_kv_bytes"], other["draft_kv_bytes"]) == (2 * (512 + 64), 2 * 2 * 8 * 128)
    assert (round(found["draft_parameters"] / 1e6), round(other["draft_parameters"] / 1e6)) == (896, 985)
    assert found["draft_step_bytes"] == 2 * (found["draft_parameters"] - 3 * 7168 ** 2) < other["draft_step_bytes"]
    assert found["train_rate"] > other["train_rate"]


def test_several_hosts_by_hand():
    """Two hosts extract and train in half the time; what goes between them, and lies on the other one, is counted."""
    one, two = figures("--train-gpus", 4), figures("--train-gpus", 4, "--hosts", 2)
    states, trained = one["hidden_states_bytes"], one["draft_parameters"]
    assert two["extract_hours"] == one["extract_hours"] / 2 and two["hidden_states_bytes"] == states
    assert two["train_hours"] == pytest.approx(figures("--train-gpus", 8)["train_hours"])
    assert two["train_read_rate"] == one["train_read_rate"]  # of each host
    assert two["states_sent_a_host"] == two["states_received"] == states / 2 and two["data_copied"] == states
    assert two["states_a_second"] == 2800 * 57349
    assert two["network_bytes_a_step"] == pytest.approx(2 * 7 / 8 * 2 * trained)
    assert two["network_bytes_a_host"] == pytest.approx(two["network_bytes_a_step"] * two["train_steps"])
    assert two["disk_bytes"] == one["disk_bytes"] and two["other_host_bytes"] == states
    assert not two.keys() - one.keys() & figures("--hosts", 1).keys() and "another host" not in run().stdout
    assert "data_copied" not in figures("--hosts", 2, "--max-disk-gb", 100)  # --follow: one folder for all
    three = figures("--hosts", 3, "--states", "fp8")
    assert three["states_received"] == pytest.approx(2 * three["states_sent_a_host"])
    assert run("--hosts", "0").stderr == "plan: --hosts 0 must be above 0.\n"
    shown = run("--train-gpus", 4, "--hosts", 2).stdout
    assert "by the first host: the shares of 1 others" in shown and "a ring over 8 GPUs" in shown


def test_the_way_of_gradients_between_ranks_is_counted():
    """Two bytes of each parameter go 2 x 3/4 times out of each of four GPUs, in each step; a rate from a log has it in it."""
    one, four = figures("--num-kv-heads", 64), figures("--num-kv-heads", 64, "--train-gpus", 4, "--link-gbps", 12)
    assert "rank_wait" not in one
    assert four["rank_wait"] == pytest.approx(four["train_steps"] * 1.5 * 2 * four["draft_parameters"] / 12e9 / 3600)
    free = figures("--num-kv-heads", 64, "--train-gpus", 4, "--link-gbps", 1e9)
    assert four["train_hours"] - four["rank_wait"] == pytest.approx(free["train_hours"], rel=1e-6)
    known = ["--num-kv-heads", 64, "--train-gpus", 4, "--train-rate", 9000]
    assert figures(*known, "--link-gbps", 1)["train_hours"] == figures(*known, "--link-gbps", 99)["train_hours"]


def test_05s_units_by_hand(tmp_path):
    """A prompt of 300 tokens read at 1,000 tok/s, 100 answered at 50: 2.3 s. Ten of them, and 4 x (0.3 + 16/50) s of warm-up: 25.48 s.
    Ten that arrive 4 s apart: 40 s, the last one's 2.3, the warm-up. Of 2k = 2,048 tokens a prompt takes 4.048 s, a warm-up 9.472."""
    flags = ["--mean-length", 900, "--extract-rate", 1000, 2000, "--stream-rate", 50, "--bench-tokens", 100, "--bench-prompts", 10,
             "--bench-levels", 2, "--bench-repeats", 1]

    def seconds(*more):
        return 3600 * figures(*flags, *more)["benchmark_hours"] / 2  # of one variant

    assert seconds() == pytest.approx(2 * 25.48)
    assert seconds("--bench-rates", 5, 0.25) == pytest.approx(3 * 25.48 + 44.78)
    assert seconds("--bench-contexts", "2k") == pytest.approx(2 * (40.48 + 9.472))
    both = 2 * 25.48 + (10 * 2.2 + 4 * (0.2 + 0.32)) * 2  # 300 tokens, then 200 of them
    assert seconds("--bench-contexts", 300, 200) == pytest.approx(both)
    assert seconds("--bench-contexts", "2k", "--bench-rates", 0.25) == pytest.approx(2 * 49.952 + 40 + 4.048 + 9.472)
    assert seconds("--bench-turns", 2) == pytest.approx(2 * (46 + 2.48))
    assert seconds("--bench-repeats", 3) == 3 * seconds()
    (tmp_path / "run.yaml").write_text("""benchmark: {context: [2k], request-rate: 0.25, limit: 10, max-tokens: 100, repeats: 1, concurrency: [1, 8]}
""")
    config = ["--config", tmp_path / "run.yaml", *flags[:7]]
    assert 3600 * figures(*config)["benchmark_hours"] == pytest.approx(2 * (2 * 49.952 + 40 + 4.048 + 9.472))
    line = next(line for line in run(*config).stdout.splitlines() if "benchmark hours" in line)
    assert "2 variants x 1 repeats x (2 levels of 2k x 50.0 s + 1 at 0.25/s of 2k x 53.5 s)" in line


def test_target_bytes_of_the_tiny_target():
    found = figures("--target-config", TINY_KIMI / "config.json")["target_bytes"]
    assert found == pytest.approx((TINY_KIMI / "model.safetensors").stat().st_size, rel=0.05)


def test_mean_after_a_cut():
    drawn = np.random.default_rng(0).lognormal(np.log(1730) - forecast.SIGMA**2 / 2, forecast.SIGMA, 200_000)
    assert forecast.cut_mean(1730, 2048) == pytest.approx(np.minimum(drawn, 2048).mean(), rel=0.01)


def test_what_does_not_fit_is_said_with_what_would():
    done = run("--samples", 10000, "--disk", "500G")
    line = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and line.startswith("does not fit | disk: ")
    fitting = int(line.split(" samples would fit")[0].split(". ")[-1].replace(",", ""))
    assert run("--samples", fitting, "--disk", "500G").stdout.splitlines()[-1].startswith("fits | ")
    assert run("--samples", fitting + 10, "--disk", "500g").stdout.splitlines()[-1].startswith("does not fit")
    assert "does not fit | target: " in run("--gpus", 6).stdout and "does not fit" not in run("--gpus", 8).stdout


def test_run_file_fills_in_and_flags_win(tmp_path):
    (tmp_path / "run.yaml").write_text(f"""run_dir: {tmp_path}/run
target: {TINY_KIMI}
generate: {{limit: 50}}
extract: {{max-length: 1000}}
train: {{epochs: 2, max-seq-len: 1000, val-ratio: 0.2, output-dir: "{{run_dir}}/out"}}
servers: {{plain: {{flags: {{tp-size: 2}}}}, extract: {{env: {{EAGLE3_CAPTURE_LAYERS: "1,2"}}}}}}
""")
    f = figures("--config", tmp_path / "run.yaml")
    assert f["tokens"] == 50 * 1000 and f["hidden_states_bytes"] == 50000 * (3 * 256 * 2 + 5) and f["disk_free"] > 0 and f["disk_there"] == 0
    assert figures("--config", tmp_path / "run.yaml", "--samples", 60)["tokens"] == 60000
    (tmp_path / "run").mkdir()
    (tmp_path / "run/x").write_bytes(b"0" * 1000)
    assert figures("--config", tmp_path / "run.yaml")["disk_there"] == 1000
    table = run("--config", tmp_path / "run.yaml").stdout
    assert "2 epochs x 40 x 1,000 tokens" in table and "on each of 2 GPUs" in table


@pytest.mark.parametrize("argv, text", [
    (["--config", "no.yaml"], "no.yaml: not a readable YAML file"), (["--samples", "0"], "must be above 0"), (["--unpacked"], "Give --train-rate"),
    (["--target-config", "no.json"], "no.json: not readable"), (["--no-such"], "unrecognized arguments"), (["--gpu-tflops", "0"], "must be above 0"),
    (["--train-rate", "-5"], "must be above 0"), (["--samples", "1"], "leave a sample to train on"), (["--disk", "5Q"], "neither a size"),
    (["--disk", "1.2.3T"], "neither a size"), (["--bench-contexts", "8m"], "'8m' is no number of tokens"),
    (["--bench-rates", "2", "0"], "must be above 0")])
def test_bad_input_is_one_line_and_exit_2(argv, text):
    done = run(*argv)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and text in done.stderr


def test_bad_input_of_the_process_is_one_line_and_exit_2():
    done = subprocess.run([sys.executable, str(ROOT / "scripts/plan.py"), "--samples", "0"], text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "plan: --samples 0 must be above 0.\n")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_run_file_can_be_planned(path):
    assert figures("--config", path)["tokens"] > 0


def test_a_bound_on_disk_counts_as_what_lies_there(tmp_path):
    f = figures("--samples", 100_000, "--max-disk-gb", 2000)
    assert f["states_on_disk"] == 2e12 and f["hidden_states_bytes"] > 9e12 and f["disk_bytes"] < 2.1e12
    assert figures("--samples", 1000, "--max-disk-gb", 2000)["states_on_disk"] < 1e11  # all of them are less than the bound
    (tmp_path / "run.yaml").write_text("run_dir: r\ntarget: t\ngenerate: {limit: 100000}\nextract: {max-disk-gb: 2000}\n")
    assert figures("--config", tmp_path / "run.yaml")["states_on_disk"] == 2e12
    assert run("--samples", 100_000, "--max-disk-gb", 2000, "--disk", "1T").stdout.endswith("or take a lower --max-disk-gb.\n")


def test_target_without_mla_is_counted_by_its_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
                                                      "intermediate_size": 128, "vocab_size": 1000}))
    done = run("--target-config", tmp_path / "config.json")
    assert done.returncode == 2 and "the size of this target is unknown" in done.stderr
    (tmp_path / "model.safetensors").write_bytes(b"0" * 12345)
    assert figures("--target-config", tmp_path / "config.json")["target_bytes"] == 12345
