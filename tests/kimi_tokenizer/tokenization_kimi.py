"""A slow, tiktoken-style tokenizer with Kimi-K2.5's ids: 163,584 byte ranks, then 256 special ids. Pure Python, no offsets.

Its manners are those of Kimi's own class: `encode(text, allow_special_tokens=...)` reads ranks itself and leaves to transformers what
comes with other keywords; ids without a name are `<|reserved_token_N|>`. The ranks are made up (make.py).
"""
import base64
import re
from pathlib import Path

from transformers import AddedToken, PreTrainedTokenizer

N_RANKS, N_SPECIAL = 163584, 256
# White space goes with the word behind it, as in tiktoken's patterns; the rest only keeps pieces short.
PIECES = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\s\w]+|\s+|_+")
ALPHABET = {byte: chr(byte) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174 else None for byte in range(256)}
for n, byte in enumerate(byte for byte, char in list(ALPHABET.items()) if char is None):
    ALPHABET[byte] = chr(256 + n)  # GPT-2's table: every byte has a printable character
BYTE_OF = {char: byte for byte, char in ALPHABET.items()}


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        self.bytes_of = [base64.b64decode(line.split()[0]) for line in Path(vocab_file).read_bytes().splitlines()]
        assert len(self.bytes_of) == N_RANKS
        self.rank_of = {piece: rank for rank, piece in enumerate(self.bytes_of)}
        named = {int(at): token.content if isinstance(token, AddedToken) else str(token) for at, token in (added_tokens_decoder or {}).items()}
        self.special_of = {named.get(at, f"<|reserved_token_{at}|>"): at for at in range(N_RANKS, N_RANKS + N_SPECIAL)}
        self.name_of = {at: name for name, at in self.special_of.items()}
        self.splitter = re.compile("(" + "|".join(map(re.escape, self.special_of)) + ")")
        super().__init__(added_tokens_decoder=added_tokens_decoder or {}, **kwargs)

    @property
    def vocab_size(self):
        return N_RANKS + N_SPECIAL

    def get_vocab(self):
        return {self._convert_id_to_token(at): at for at in range(self.vocab_size)}

    def merge(self, piece: bytes) -> list[int]:
        """Byte-pair encoding as tiktoken does it: of all neighbours join those with the lowest rank, until none are known."""
        parts = [piece[i:i + 1] for i in range(len(piece))]
        while len(parts) > 1:
            rank, at = min((self.rank_of.get(parts[i] + parts[i + 1], N_RANKS), i) for i in range(len(parts) - 1))
            if rank == N_RANKS:
                break
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        return [self.rank_of[part] for part in parts]

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs:
            return super().encode(text, **kwargs)
        ids = []
        for part in self.splitter.split(text) if allow_special_tokens else [text]:
            if allow_special_tokens and part in self.special_of:
                ids.append(self.special_of[part])
                continue
            for piece in PIECES.findall(part):
                ids += self.merge(piece.encode("utf-8", "surrogatepass"))
        return ids

    def decode(self, token_ids, **kwargs):
        if kwargs:
            return super().decode(token_ids, **kwargs)
        return self.convert_tokens_to_string([self._convert_id_to_token(at) for at in ([token_ids] if isinstance(token_ids, int) else token_ids)])

    def _tokenize(self, text, **kwargs):
        return [self._convert_id_to_token(at) for at in self.encode(text, allow_special_tokens=False)]

    def _convert_token_to_id(self, token):
        if token in self.special_of:
            return self.special_of[token]
        try:
            return self.rank_of.get(bytes(BYTE_OF[char] for char in token))
        except KeyError:
            return None

    def _convert_id_to_token(self, index):
        return self.name_of[index] if index >= N_RANKS else "".join(ALPHABET[byte] for byte in self.bytes_of[index])

    def convert_tokens_to_string(self, tokens):
        text, raw = [], b""
        for token in tokens:
            if token in self.special_of:
                text, raw = [*text, raw.decode("utf-8", "replace"), token], b""
            else:
                raw += bytes(BYTE_OF[char] for char in token)
        return "".join([*text, raw.decode("utf-8", "replace")])
