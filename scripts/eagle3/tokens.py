"""The target's tokens: a prompt's ids, an answer's ids, and an answer read back from ids.

Ids that an engine emitted are taken as they are. A text API gives none: they are rebuilt from its text, and
`settle_ids` compares their number with what the API charged. Works for fast and slow tokenizers, without offsets.
"""
from __future__ import annotations

import functools
import hashlib
import inspect
import json
import operator
import re
from dataclasses import replace
from pathlib import Path

from eagle3.marks import CLOSED, FREE, OPEN, Marks
from eagle3.responses import Answer, Drop, message_of
from eagle3.stage import UserError, sha256_file

TOKENIZER_FILES = ("tokenizer", "tokenization", "vocab", "merges", "chat_template", "special_tokens", "added_tokens",
                   "tiktoken")  # what their names begin with
STOP, THINK = "<|im_end|>", ["<think>", "</think>"]  # Kimi's names of the tokens that a turn is made of
TOOL = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
TOOL_NAMES = ("section_begin", "section_end", "call_begin", "argument_begin", "call_end")
FILLED = {"description": None, "name": None, "parameters": None, "strict": False}
TOOL_FORMS = [  # a tool definition as SGLang's chat route hands it to the template: versions fill in different fields
    lambda tool: tool,
    lambda tool: {**tool, "defer_loading": None},  # 0.5.23
    lambda tool: {"type": "function", **tool, "function": FILLED | tool["function"], "defer_loading": None},  # 0.5.15
    lambda tool: {"type": "function", **tool, "function": FILLED | tool["function"]},  # 0.5.10
]


# ---- a tokenizer's folder ----
def tokenizer_hash(folder: Path) -> str:
    """One hash over the files that decide token ids and the template."""
    files = sorted(path for path in folder.glob("*") if path.is_file()
                   and (path.name.startswith(TOKENIZER_FILES) or path.suffix in (".model", ".tiktoken")))
    return hashlib.sha256("".join(f"{path.name} {sha256_file(path)}\n" for path in files).encode()).hexdigest()


def load_tokenizer(folder: Path, trust_remote_code: bool):
    """transformers' tokenizer of a target's folder. Raises UserError."""
    from transformers import AutoTokenizer  # imports torch: seconds
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # any failure here means: this folder holds no tokenizer that can be loaded
        raise UserError(f"{folder}: no tokenizer can be loaded ({' '.join(str(error).split())[:200]}). "
                        "Name the target's folder; Kimi's needs --trust-remote-code.") from None


def token_id(tokenizer, name: str) -> int | None:
    """The id of a token by its name; None where this tokenizer has none of that name."""
    found = tokenizer.convert_tokens_to_ids(name)  # of an unknown name: None, or the id of the unknown token
    return None if found is None or tokenizer.convert_ids_to_tokens(found) != name else found


# ---- a turn ----
def with_object(call: dict) -> dict:
    """A tool call whose arguments are an object, not its JSON text (where that can be parsed)."""
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
    except (ValueError, TypeError, KeyError):
        return call


def as_ids(encoded) -> list[int]:
    """The ids in whatever a tokenizer returns: a list, an array, a batch of one, a BatchEncoding. Raises TypeError."""
    if hasattr(encoded, "keys"):  # list() of it would be the names of its fields
        encoded = encoded["input_ids"]
    encoded = encoded.tolist() if hasattr(encoded, "tolist") else list(encoded)
    if len(encoded) == 1 and not hasattr(encoded[0], "__index__"):
        encoded = encoded[0]
    return [operator.index(token) for token in encoded]


def plain_encoder(tokenizer):
    """text -> ids. `<|im_end|>` in a text is characters, as the model wrote it: the id would have ended its turn."""
    if tokenizer.is_fast:  # split_special_tokens spares only tokens marked special; <think> is often not
        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        spec["added_tokens"] = []
        plain = type(tokenizer.backend_tokenizer).from_str(json.dumps(spec))
        return lambda text: plain.encode(text, add_special_tokens=False).ids
    if "allow_special_tokens" in inspect.signature(tokenizer.encode).parameters:  # Kimi's own
        return lambda text: as_ids(tokenizer.encode(text, allow_special_tokens=False))
    return lambda text: as_ids(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


class Tokens:
    """A tokenizer, its chat template and the special ids that a turn is made of.

    stop: the name of the token that ends a turn; think: begin and end of reasoning, or nothing; tool: TOOL_NAMES, or
    nothing; one id each (`find_turn_tokens` sees to that). Text never becomes a special id (`encode`).
    """

    def __init__(self, tokenizer, stop: str, think: list[str], tool: list[str], thinking: bool):
        self.tokenizer, self.thinking, self.tool_form = tokenizer, thinking, TOOL_FORMS[0]
        self.stop = token_id(tokenizer, stop)
        self.think, self.end_think = [token_id(tokenizer, name) for name in think] or (None, None)
        self.tool = {key: token_id(tokenizer, name) for key, name in zip(TOOL_NAMES, tool)}
        self.added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        self.marks = Marks(stop, think, tool, added | dict.fromkeys(tokenizer.all_special_tokens, True))
        self.encode_plain = plain_encoder(tokenizer)

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()  # fast tokenizers raise a TypeError for half a surrogate pair
        except UnicodeEncodeError:
            raise Drop("not_utf8") from None
        ids = self.encode_plain(text)
        if not self.added.isdisjoint(ids):
            raise Drop("special_in_text", "the text of a special token, which this tokenizer cannot encode as text")
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt_ids(self, messages: list[dict], tools: list | None) -> list[int]:
        """Ids up to where the answer begins, the prefilled `<think>` or `<think></think>` included.

        As SGLang's chat route renders them: it hands call arguments to the template as objects, no content as "", and
        tools as its own classes print them (`tool_form`). Raises Drop, UserError.
        """
        switch = {"thinking": self.thinking, "enable_thinking": self.thinking}  # Kimi's and Qwen's name for it
        try:
            json.dumps(messages, ensure_ascii=False).encode()
            served = [{"content": "", **message} for message in messages]
            for message in served:
                if message.get("tool_calls"):
                    message["tool_calls"] = [with_object(call) for call in message["tool_calls"]]
            encoded = self.tokenizer.apply_chat_template(
                served, tools=tools and [self.tool_form(tool) for tool in tools],
                add_generation_prompt=True, tokenize=True, return_dict=False, **switch)
        except UnicodeEncodeError:
            raise Drop("not_utf8") from None
        except Exception as error:  # jinja raises what the template asks for, and TypeErrors for odd messages
            raise Drop("template", f"{type(error).__name__}: {error}") from None
        try:
            ids = as_ids(encoded)
        except TypeError:
            raise UserError(f"the tokenizer's apply_chat_template gives no token ids but {encoded!r:.80}. "
                            "Name a tokenizer that transformers can use with --tokenizer.") from None
        if self.opening(ids) == (CLOSED if self.thinking else OPEN):
            raise UserError(f"--thinking {'on' if self.thinking else 'off'}, but the template's prompt ends in "
                            f"{self.decode(ids[-4:])!r}. Use the other mode, or name the target's --think-tokens.")
        return ids

    @functools.cache  # asked of each answer of a target that never reasons
    def must_reason(self) -> bool:
        """Whether each answer to a prompt of this mode holds reasoning: the prompt opens it, or the switch counts.

        A template that says the same in both modes and opens nothing leaves it to the target.
        """
        if self.think is None or not self.thinking:
            return False
        ask = [{"role": "user", "content": "x"}]
        try:
            on, off = (as_ids(self.tokenizer.apply_chat_template(
                ask, add_generation_prompt=True, return_dict=False, thinking=mode, enable_thinking=mode))
                for mode in (True, False))
        except Exception:  # a template raises what it likes; it wants more than a question
            return True
        return self.leaves_think_open(on) or on != off

    def opening(self, prompt_ids: list[int]) -> str:
        """Where the prompt's end (perhaps with a newline behind the mark) leaves the reasoning: OPEN, CLOSED, FREE."""
        marks = [i for i in prompt_ids[-4:] if i in (self.think, self.end_think)] if self.think is not None else []
        return FREE if not marks else OPEN if marks[-1] == self.think else CLOSED

    def leaves_think_open(self, prompt_ids: list[int]) -> bool:
        """True when the answer begins inside the reasoning."""
        return self.opening(prompt_ids) == OPEN

    def read_marks(self, answer: Answer, prompt_ids: list[int]) -> None:
        """Structure that stands in the text of `answer` becomes its fields, in place. Raises Drop."""
        opening = self.opening(prompt_ids)
        prefix = ""
        if opening == OPEN:
            at = max(place for place, token in enumerate(prompt_ids) if token == self.think)
            prefix = self.decode(prompt_ids[at + 1:])
        self.marks.read(answer, opening, prefix)

    def read(self, prompt_ids: list[int], ids: list[int]) -> tuple[str | None, str, list, list[str]]:
        """(reasoning, content, tool_calls, flags) of emitted ids; the split is by id, never by text."""
        body, reasoning, calls, flags = ids[:-1] if ids[-1:] == [self.stop] else ids, None, [], []
        if self.leaves_think_open(prompt_ids) or (self.think is not None and body[:1] == [self.think]):
            body = body[1:] if body[:1] == [self.think] else body
            end = body.index(self.end_think) if self.end_think in body else len(body)
            reasoning, body = self.decode(body[:end]), body[end + 1:]
        begin = self.tool.get("section_begin")
        if begin in body:
            section, body = body[body.index(begin) + 1:], body[:body.index(begin)]
            calls, rest = self.read_calls(section)
            if rest != [self.tool["section_end"]]:
                flags.append("tool_calls_malformed")
        return reasoning, self.decode(body) if body else "", calls, flags

    def read_calls(self, section: list[int]) -> tuple[list[dict], list[int]]:
        """(tool calls, the ids behind the last whole one) of a tool section without its begin."""
        calls = []
        while section[:1] == [self.tool["call_begin"]] and self.tool["call_end"] in section:
            end = section.index(self.tool["call_end"])
            call, section = section[1:end], section[end + 1:]
            has_arguments = self.tool["argument_begin"] in call
            middle = call.index(self.tool["argument_begin"]) if has_arguments else len(call)
            call_id = self.decode(call[:middle])
            name = re.sub(r":\d+$", "", call_id.strip()).removeprefix("functions.")
            calls.append({"id": call_id, "type": "function",
                          "function": {"name": name, "arguments": self.decode(call[middle + 1:])}})
        return calls, section

    def with_structure(self, message: dict) -> dict:
        """An assistant message of a prompt, its marked reasoning or its tool section out of the text and in fields.

        Any other message as it is, for what its marks mean is not ours to say.
        """
        if message["role"] != "assistant" or message.get("tool_calls") or not isinstance(message.get("content"), str):
            return message
        answer = Answer(message["content"], message.get("reasoning_content"), [], "stop", None)
        try:
            self.marks.read(answer, FREE)
        except Drop:
            return message
        return {**message, **message_of(vars(answer))} if answer.flags else message

    def rebuilt_ids(self, answer: Answer, prompt_ids: list[int], n_calls_before: int) -> list[int]:
        """Ids of an answer given as text: reasoning + </think> + content + tool section + stop. Strips nothing.

        The stop token only after finish stop or tool_calls; a cut answer ends neither reasoning that nothing follows
        nor its last call. n_calls_before: tool calls in the prompt, for Kimi numbers them through. Call ids that the
        API made up are put right in `answer`, and flagged. Raises Drop.
        """
        ids, cut = [], answer.finish not in ("stop", "tool_calls")
        if self.leaves_think_open(prompt_ids):
            ids += self.encode(answer.reasoning or "")
            if not (cut and not answer.content and not answer.tool_calls):
                ids.append(self.end_think)
        elif answer.reasoning:
            if self.think is None or self.opening(prompt_ids) == CLOSED:
                raise Drop("reasoning_unasked", "reasoning came although the prompt closed it")
            ids += [self.think, *self.encode(answer.reasoning)]
            if not (cut and not answer.content and not answer.tool_calls):
                ids.append(self.end_think)
        ids += self.encode(answer.content)
        if answer.tool_calls:
            ids += self.tool_section(answer, n_calls_before)
            if cut:  # somewhere in the last call: its end was not emitted
                return ids[:-2]
        return ids if cut else [*ids, self.stop]

    def tool_section(self, answer: Answer, n_calls_before: int) -> list[int]:
        if not self.tool:
            raise Drop("tool_calls_without_marks")
        ids = [self.tool["section_begin"]]
        for n, call in enumerate(answer.tool_calls, n_calls_before):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not re.fullmatch(rf"\s*functions\.{re.escape(name)}:\d+\s*", call["id"]):
                call["id"] = f"functions.{name}:{n}"  # Kimi's own form; the API made up another id
                answer.flags.append("tool_id_rebuilt")
            ids += [self.tool["call_begin"], *self.encode(call["id"]), self.tool["argument_begin"],
                    *self.encode(arguments), self.tool["call_end"]]
        return [*ids, self.tool["section_end"]]


def settle_ids(answer: Answer, prompt_ids: list[int], tokens: Tokens, n_calls_before: int,
               on_mismatch: str) -> tuple[list[int], str]:
    """(response_ids, ids_source); what is odd about them goes to answer.flags. Raises Drop.

    on_mismatch: what becomes of rebuilt ids whose number differs from usage.completion_tokens: "keep", "drop", or
    "rule": more than max(4, 2 %) missing is hidden reasoning and dropped, any other difference is kept and flagged.
    """
    if answer.ids is not None:
        text = replace(answer, tool_calls=[dict(call) for call in answer.tool_calls], flags=[])  # `answer` stays as is
        try:
            if tokens.rebuilt_ids(text, prompt_ids, n_calls_before) != answer.ids:
                answer.flags.append("rebuild_differs")  # how far a text API could be trusted with this target
        except Drop:
            answer.flags.append("rebuild_differs")
        return answer.ids, "server"
    said = (answer.usage or {}).get("completion_tokens")
    written = replace(answer, flags=list(answer.flags))
    tokens.read_marks(answer, prompt_ids)
    if answer.finish == "tool_calls" and not answer.tool_calls:
        raise Drop("tool_calls_lost", "it ended with tool calls, and none came")
    if not answer.content and not answer.tool_calls and not (answer.reasoning and answer.finish == "length"):
        raise Drop("empty")  # reasoning alone is kept only where the limit cut it
    ids = tokens.rebuilt_ids(answer, prompt_ids, n_calls_before)
    if set(answer.flags) - set(written.flags) == {"stop_in_text"} and said != len(ids):
        as_words = tokens.rebuilt_ids(written, prompt_ids, n_calls_before)
        if said == len(as_words):  # the answer's last words are the name of the token
            answer.reasoning, answer.content, answer.flags, ids = (written.reasoning, written.content, written.flags,
                                                                   as_words)
    if said is None:
        answer.flags.append("ids_not_compared")
    elif said == len(ids) - 1 and ids[-1] == tokens.stop:
        answer.flags.append("stop_not_counted")
    elif said != len(ids):
        if on_mismatch == "drop" or on_mismatch == "rule" and said - len(ids) > max(4, said // 50):
            raise Drop("ids_missing" if said > len(ids) else "ids_mismatch",
                       f"usage says {said} tokens, the text has {len(ids)}")
        answer.flags.append("ids_mismatch")
    said_prompt = (answer.usage or {}).get("prompt_tokens")
    if said_prompt is not None and said_prompt != len(prompt_ids):
        answer.flags.append("prompt_tokens_differ")
    return ids, "rebuilt"
