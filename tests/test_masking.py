"""scripts/eagle3/masking.py: what is a secret, and that nothing shows one."""
import json
import shlex
import urllib.parse

import pytest
import yaml

from conftest import ROOT
from eagle3 import masking
from eagle3.masking import MASK, clean, cleaned, hide, is_secret, masked, secrets_in
from eagle3.stage import UserError, log, parse_args, read_run_file


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    monkeypatch.setattr(masking, "_hidden", set())


@pytest.mark.parametrize("name",
                         ["api-key", "--api-key", "api_key", "admin-api-key", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
                                  "token", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "ssl-keyfile-password",
                                  "GITHUB_PAT",
                                  "AZURE_CLIENT_SECRET", "HF_TOKEN_2"])
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max-total-tokens", "max-prefill-tokens", "speculative-token-map", "stop-token",
                                  "ssl-keyfile",
                                  "TOKENIZERS_PARALLELISM", "tokenizer", "api-key-env", "keep-checkpoints",
                                  "num-kv-heads",
                                  "AWS_ACCESS_KEY_ID", "monkey", "", "speculative-num-draft-tokens", "HF_TOKEN_PATH"])
def test_names_of_other_things(name):
    assert not is_secret(name)


def test_no_flag_and_no_key_of_the_shipped_run_files_is_taken_for_a_secret():
    files = sorted((ROOT / "configs").glob("*.yaml"))
    assert len(files) >= 4
    for path in files:
        assert secrets_in(yaml.safe_load(path.read_text())) == set()


def test_secrets_wherever_a_run_file_can_hold_them():
    document = {
        "servers": {"plain": {
            "flags": {"api-key": "sk-flag-1", "port": 30000, "max-total-tokens": 16384, "admin-api-key": ["sk-list-1"]},
            "env": {"HF_TOKEN": "hf_env_1", "NCCL_ALGO": "Ring", "http_proxy": "http://user:pr0xy-word@proxy:3128"},
            "command": ["env", "HF_TOKEN=hf_word_1", "{python}", "serve.py", "--api-key", "sk-word-1",
                        "--api-key=sk-word-2"]}},
        "benchmark": {"base-url": "https://me:p@ss-w0rd@host:30000/v1", "api-key-env": "MY_KEY"}}
    assert secrets_in(document) == {"sk-flag-1", "sk-list-1", "hf_env_1", "user:pr0xy-word", "pr0xy-word", "hf_word_1",
                                    "sk-word-1",
                                    "sk-word-2", "me:p@ss-w0rd", "p@ss-w0rd"}
    shown = masked(document)
    assert shown["servers"]["plain"] == {
        "flags": {"api-key": MASK, "port": 30000, "max-total-tokens": 16384, "admin-api-key": MASK},
        "env": {"HF_TOKEN": MASK, "NCCL_ALGO": "Ring", "http_proxy": f"http://{MASK}@proxy:3128"},
        "command": ["env", f"HF_TOKEN={MASK}", "{python}", "serve.py", "--api-key", MASK, f"--api-key={MASK}"]}
    assert shown["benchmark"] == {"base-url": f"https://{MASK}@host:30000/v1", "api-key-env": "MY_KEY"}
    assert masked({"api-key": None, "HF_TOKEN": ""}) == {"api-key": None, "HF_TOKEN": ""}
    assert masked("Authorization: Bearer abc.def") == f"Authorization: Bearer {MASK}"
    assert masked("see http://host/a@b and mail me@host") == "see http://host/a@b and mail me@host"


def test_hidden_values_are_found_in_every_spelling_but_placeholders_are_left():
    secret = "p\"q'r\\s t/ü"
    hide(secret, "EMPTY", "test")
    for said in (secret, json.dumps({"key": secret}), json.dumps({"key": secret}, ensure_ascii=False),
                 repr({"key": secret}),
                 shlex.quote(secret), urllib.parse.quote(secret, safe="")):
        assert MASK in clean(said) and "q'r" not in clean(said) and "s t/" not in clean(said), said
    assert clean("EMPTY test") == "EMPTY test"
    hide("abcdefgh", "abcdefghij")
    assert clean("x abcdefghij y") == f"x {MASK} y"  # not "***ij"


def test_a_run_file_hides_its_secrets_from_the_log_and_a_broken_one_is_not_repeated(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("run_dir: x\nservers:\n  plain:\n    flags: {api-key: sk-of-the-run}\n")
    read_run_file(path)
    log("the server said: key sk-of-the-run is wrong")
    assert "sk-of-the-run" not in capsys.readouterr().out
    for text in ("servers:\n  plain: {flags: {api-key: sk-other: x}}\n", "api-key: \"sk-other\n",
                 "- api-key: sk-other\n",
                 "api-key sk-other\n"):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_run_file(path)
        assert "sk-other" not in str(caught.value) and len(str(caught.value).splitlines()) == 1
    path.write_text("servers:\n  plain: {flags: {port: 1: x}}\n")
    with pytest.raises(UserError, match="in line 2"):
        read_run_file(path)


def test_keys_of_what_is_stored_are_never_garbled():
    hide("variant", "p-secret")
    assert cleaned({"variant": "a variant of p-secret", "ids": [1, 2], "rows": [{"variant": 1}, "p-secret"]}) == {
        "variant": "a *** of ***", "ids": [1, 2], "rows": [{"variant": 1}, "***"]}


def test_a_key_on_the_command_line_by_mistake_is_not_repeated():
    import argparse
    with pytest.raises(UserError) as caught:
        parse_args(argparse.ArgumentParser(), "benchmark", ["--api-key", "sk-on-the-line"])
    assert "unrecognized arguments: --api-key ***" in clean(str(caught.value))
