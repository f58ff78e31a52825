"""The tiny target in scripts/tiny_kimi: Kimi's ids, turn format and architecture, whole and loadable."""
import json
import random

import pytest
import torch
from safetensors.torch import load_file

from conftest import TINY_KIMI, load_script, run_here
from test_capture import text_model
from tiny_target.architecture import build_model
from tiny_target.facts import trim

maker = load_script("make_tiny_kimi")


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer  # here: each worker reads all files, one runs this

    return AutoTokenizer.from_pretrained(TINY_KIMI)


def config():
    return json.loads((TINY_KIMI / "config.json").read_text())


# ---- tokenizer ----
def test_special_tokens_have_kimis_order_and_one_id_each(tokenizer):
    kimi = {"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588, "<|im_system|>": 163594,
            "<|tool_calls_section_begin|>": 163595, "<|tool_calls_section_end|>": 163596, "<|tool_call_begin|>": 163597,
            "<|tool_call_argument_begin|>": 163598, "<|tool_call_end|>": 163599, "<|im_middle|>": 163601, "<|media_begin|>": 163602,
            "<|media_content|>": 163603, "<|media_end|>": 163604, "<|media_pad|>": 163605, "<think>": 163606, "</think>": 163607}
    first = tokenizer.encode("[BOS]", add_special_tokens=False)[0]
    for name, at in kimi.items():
        assert tokenizer.encode(f"a{name}b", add_special_tokens=False)[1:-1] == [first + at - 163584]
    assert len(tokenizer) == config()["text_config"]["vocab_size"] == first + 32
    assert tokenizer.pad_token_id == first + 31
    assert tokenizer.eos_token_id == config()["eos_token_id"] == first + 2  # <|im_end|> ends generation


def test_any_text_comes_back(tokenizer):
    rng = random.Random(0)
    texts = ["", "\n\n", " \t x  y\r\n", "naïve 中文 🙂 ½", "def f(x):\n    return {'a': [x, 1.5]}\n", "<think", "<|im_nothing|>",
             *("".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(160, 0xD800), rng.randrange(0x1F300, 0x1F600)]))
                       for _ in range(50)) for _ in range(20))]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_think_and_tool_marks_survive_skip_special_tokens(tokenizer):
    ids = tokenizer.encode("a</think>b<|tool_call_begin|>c<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a</think>b<|tool_call_begin|>c"


# ---- chat template, written out by hand ----
def render(tokenizer, messages, generate=True, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **kwargs)


USER = {"role": "user", "content": "hi"}
END = "<|im_assistant|>assistant<|im_middle|>"


def test_template_thinking_and_instant(tokenizer):
    turn = "<|im_user|>user<|im_middle|>hi<|im_end|>"
    assert render(tokenizer, [USER]) == render(tokenizer, [USER], thinking=True) == turn + END + "<think>"
    assert render(tokenizer, [USER], thinking=False) == turn + END + "<think></think>"
    assert render(tokenizer, [USER], generate=False) == turn


def test_template_empties_earlier_reasoning(tokenizer):
    talk = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "reasoning_content": "r1", "content": "a1"},
            {"role": "user", "content": "more"}]
    before = ("<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>hi<|im_end|>" + END + "<think></think>a1<|im_end|>"
              "<|im_user|>user<|im_middle|>more<|im_end|>" + END)
    assert render(tokenizer, talk) == before + "<think>"
    assert render(tokenizer, talk, thinking=False) == before + "<think></think>"


def test_template_tools(tokenizer):
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"role": "assistant", "reasoning_content": "r", "content": "",
            "tool_calls": [{"id": "functions.f:0", "function": {"name": "f", "arguments": '{"x": 1}'}},
                           {"id": "functions.f:1", "function": {"name": "f", "arguments": {"x": 2}}}]}
    talk = [USER, call, {"role": "tool", "tool_call_id": "functions.f:0", "content": "one"}]
    assert render(tokenizer, talk, tools=tools) == (
        '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"f"}}]<|im_end|>'
        "<|im_user|>user<|im_middle|>hi<|im_end|>" + END + "<think>r</think><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>'
        '<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{"x": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\none<|im_end|>" + END + "<think>")


def test_trained_responses_continue_the_prompt_as_the_template_would(tokenizer):
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "reasoning_content": "r", "content": "c", "tool_calls": [call]}
    for thinking in (True, False):  # with tool calls the template keeps the reasoning, so both sides can be compared
        assert render(tokenizer, [USER], thinking=thinking) + maker.response_text(message, thinking) == \
            render(tokenizer, [USER, message], generate=False, thinking=thinking)


# ---- the folder ----
def test_folder_is_small_and_its_prompts_are_usable(tokenizer):
    assert sum(path.stat().st_size for path in TINY_KIMI.iterdir()) <= 12_000_000
    rows = [json.loads(line) for line in (TINY_KIMI.parent.parent / "configs/quickstart_prompts.jsonl").read_text().splitlines()]
    card = json.loads((TINY_KIMI / "card.json").read_text())
    assert len(rows) == len({row["id"] for row in rows}) == 2300
    assert sum(row["id"].startswith("t-") for row in rows) == card["prompts"]["trained_subjects"]
    assert sum(row["id"].startswith("h-") for row in rows) == card["prompts"]["held_out_subjects"]
    for row in rows:
        assert len(row["id"]) <= 120 and not set(row["id"]) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
        assert row["messages"][-1]["role"] == "user"


def test_transformers_loads_the_text_model(tokenizer, tmp_path):
    """Every tensor of the text model is there and no other; the loss of a trained turn is far below chance (log 2432 = 7.8)."""
    from transformers import DeepseekV3ForCausalLM
    prefix = "language_model."
    tensors = {name[len(prefix):]: tensor for name, tensor in load_file(TINY_KIMI / "model.safetensors").items() if name.startswith(prefix)}
    from safetensors.torch import save_file
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config()["text_config"]))
    model, info = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    prompt = render(tokenizer, [{"role": "user", "content": "What does `math.perm` do?"}], thinking=False)
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, "`math.perm` is a function of `math`.\n\n"))
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1:-1]
    assert torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item() < 2.0


def test_deep_kimi_computes_what_tiny_kimi_does(tmp_path):
    assert run_here("make_deep_kimi", "--output-dir", tmp_path / "deep", "--layers", 11).returncode == 0
    assert "Name more" in run_here("make_deep_kimi", "--output-dir", tmp_path / "d", "--layers", 8).stderr
    ids = torch.arange(300, 340)[None]
    found = []
    for folder, layers in ((TINY_KIMI, 8), (tmp_path / "deep", 11)):
        model = text_model(tmp_path / f"text{layers}", folder)
        assert len(model.model.layers) == layers
        with torch.no_grad():
            found.append(model(ids).logits)
    assert torch.equal(*found)


# ---- the maker's own parts ----
def test_the_folder_is_what_the_maker_writes(tmp_path):
    """All of it that does not hang on the standard library's version (tokenizer, prompts) or on a GPU (weights)."""
    class Tokenizer:
        save = staticmethod(lambda path, pretty: None)

    maker.write_static_files(tmp_path, Tokenizer)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(written) == {path.name for path in TINY_KIMI.iterdir()} - {"model.safetensors", "tokenizer.json", "card.json"}
    assert all((TINY_KIMI / name).read_bytes() == data for name, data in written.items())


def test_trim_keeps_whole_paragraphs_and_sentences():
    assert trim("one\n\ntwo\n\nthree", 9) == "one\n\ntwo"
    assert trim("One is long. Two is longer.\n\nthree", 20) == "One is long."
    assert trim("abcdefghij", 4) == "abcd"


def test_packed_rows_compute_each_sample_alone():
    model = build_model("cpu", dropout=0.1).eval()
    samples = [(list(range(5, 15)), list(range(20, 40))), ([7, 8], [9, 10, 11]), (list(range(50, 80)), [3])]
    with torch.no_grad():
        packed = maker.row_loss(model, *maker.pack(samples, 48))
        alone = [maker.row_loss(model, *maker.pack([sample], 48)) for sample in samples]
    assert packed[1] == sum(count for _, count in alone) == 24
    assert torch.allclose(packed[0], sum(loss for loss, _ in alone), rtol=1e-5)


def test_dense_experts_equal_the_stock_ones():
    moe = build_model("cpu", dropout=0.0).eval().model.layers[1].mlp
    x = torch.randn(1, 9, 256)
    with torch.no_grad():
        dense = moe(x)
        del moe.experts.forward
        assert torch.allclose(dense, moe(x), atol=1e-5)
