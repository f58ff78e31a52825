"""Write a tokenizer folder of Kimi-K2.5's size and special ids into DIR (2.5 MB); transformers loads it with trust_remote_code.

    python3 tests/kimi_tokenizer/make.py DIR

The ranks are made up: all bytes, all pairs of bytes, then triples, those of letters and spaces first. So any bytes can be encoded, words merge, and the
vocabulary is full. The turn template is that of scripts/tiny_kimi.
"""
import base64
import itertools
import json
import shutil
import string
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
N_RANKS = 163584
SPECIAL = {  # Kimi-K2.5's
    163584: "[BOS]", 163585: "[EOS]", 163586: "<|im_end|>", 163587: "<|im_user|>", 163588: "<|im_assistant|>", 163590: "<|start_header_id|>",
    163591: "<|end_header_id|>", 163593: "[EOT]", 163594: "<|im_system|>", 163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>", 163597: "<|tool_call_begin|>", 163598: "<|tool_call_argument_begin|>", 163599: "<|tool_call_end|>",
    163601: "<|im_middle|>", 163602: "<|media_begin|>", 163603: "<|media_content|>", 163604: "<|media_end|>", 163605: "<|media_pad|>",
    163606: "<think>", 163607: "</think>", 163838: "[UNK]", 163839: "[PAD]",
}


def ranks():
    yield from (bytes([byte]) for byte in range(256))
    yield from map(bytes, itertools.product(range(256), repeat=2))
    usual = (" " + string.ascii_letters).encode()
    rest = bytes(byte for byte in range(256) if byte not in usual)
    yield from itertools.islice(map(bytes, itertools.product(usual + rest, repeat=3)), N_RANKS - 256 - 65536)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text("".join(f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(ranks())))
    shutil.copyfile(HERE / "tokenization_kimi.py", folder / "tokenization_kimi.py")
    shutil.copyfile(HERE.parent.parent / "scripts/tiny_kimi/chat_template.jinja", folder / "chat_template.jinja")
    kept = ("think", "tool_call")  # these survive skip_special_tokens, as Kimi's do
    decoder = {str(at): {"content": name, "special": not any(word in name for word in kept), "normalized": False, "lstrip": False, "rstrip": False,
                         "single_word": False} for at, name in SPECIAL.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "<|im_end|>", "unk_token": "[UNK]", "pad_token": "[PAD]", "model_max_length": 262144,
        "clean_up_tokenization_spaces": False, "added_tokens_decoder": decoder}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
