"""Which tokens a turn of this target is made of: its end, reasoning, tool calls, found in tokenizer and template.

Flags that name them win. What is not named is found: the end of a turn is the token that the chat template puts behind
an answer; reasoning is a pair of tokens like `<think>` and `</think>` that the template names; tool calls are Kimi's
five marks where the template names them, since no other form of calls is read here. A target whose template names
none has none.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eagle3.stage import UserError, log, read_json
from eagle3.tokens import THINK, TOOL, as_ids, token_id

REASONS = re.compile(r"think|thought|reason", re.IGNORECASE)  # in the names of tokens
OTHERS = re.compile(r"think|thought|reason|channel", re.IGNORECASE)  # marks of reasoning that are no such pair
LIKE_MARKS = re.compile(OTHERS.pattern + r"|eot|eos|end|/s>", re.IGNORECASE)  # worth showing a user
ANSWER = "Answer 42"  # stands in the rendered answer, so that what follows it can be found


@dataclass(frozen=True)
class TurnTokens:
    """Names. think: begin and end of reasoning, or nothing; tool: Kimi's five, or nothing."""
    stop: str
    think: list[str]
    tool: list[str]

    def all(self) -> list[str]:
        return [self.stop, *self.think, *self.tool]

    def __str__(self) -> str:
        return (f"end of a turn {self.stop} | reasoning {' '.join(self.think) or 'none'} | "
                f"tool calls {self.tool[0] + ' ...' if self.tool else 'none'}")


def find_turn_tokens(tokenizer, folder: Path, stop: str | None = None, think: list[str] | None = None,
                     tool: list[str] | None = None) -> TurnTokens:
    """The names given, and for None what is found. folder: the target's, with its generation_config.json.

    Raises UserError, one for all: names that are no single token here, and what cannot be found.
    """
    template = template_of(tokenizer)
    names = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    names = {name for name in names if name.strip()}  # some tokenizers add white space
    stop_found = stop or find_stop(tokenizer, folder, names)
    think_found = find_think(tokenizer, names, template) if think is None else list(think)
    tool_found = find_tool(tokenizer, template) if tool is None else list(tool)
    wrong = [] if stop_found else ["the template puts no token behind an answer: name the one that ends a turn with "
                                   "--stop-token"]
    if len(think_found) not in (0, 2):
        wrong.append(f"--think-tokens takes 2 names or none, not {think_found}")
    if len(tool_found) not in (0, 5):
        wrong.append(f"--tool-tokens takes 5 names or none, not {tool_found}")
    for flag, found in (("--stop-token", [stop_found] if stop_found else []), ("--think-tokens", think_found),
                        ("--tool-tokens", tool_found)):
        if missing := [name for name in found if not is_one_id(tokenizer, name)]:
            wrong.append(f"{flag}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} no single id")
    if wrong:
        near = sorted(name for name in names if LIKE_MARKS.search(name))[:12]
        raise UserError(f"{folder}: the tokens of a turn: {'; '.join(wrong)}. An empty list says that the target has "
                        f"none; tokens of this tokenizer that look like such marks: {' '.join(near) or 'none'}.")
    return TurnTokens(stop_found, think_found, tool_found)


def is_one_id(tokenizer, name: str) -> bool:
    found = token_id(tokenizer, name)
    return found is not None and as_ids(tokenizer.encode(name, add_special_tokens=False)) == [found]


def template_of(tokenizer) -> str:
    """The chat template's source, of several all; "" where there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, dict(template).values()))


def stops_of(folder: Path) -> set[int]:
    """Ids at which an engine stops for this target, as its generation_config.json says; none where it does not."""
    path = folder / "generation_config.json"
    said = read_json(path).get("eos_token_id") if path.is_file() else None
    return {said} if isinstance(said, int) else set(said or ())


def find_stop(tokenizer, folder: Path, names: set[str]) -> str | None:
    """The token behind an answer in the midst of a conversation; the end-of-text token where engines stop at that."""
    end, stops = tokenizer.eos_token, stops_of(folder)
    talk = [{"role": role, "content": text} for role, text in (("user", "x"), ("assistant", ANSWER), ("user", "y"))]
    try:
        behind = tokenizer.apply_chat_template(talk, tokenize=False).partition(ANSWER)[2]
    except Exception:  # a template raises what it likes, and there may be none: 01 says so of the first prompt
        behind = ""
    marks = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None
    found = marks.search(behind) if marks and behind else None
    if found and not (stops and token_id(tokenizer, found[0]) not in stops and token_id(tokenizer, end or "") in stops):
        return found[0]
    return end or None


def find_think(tokenizer, names: set[str], template: str) -> list[str]:
    """The pair of tokens that the template names, the end with a slash more than the begin; [] without one.

    Of several pairs all: which is the target's is for the user to say.
    """
    ends = [name for name in sorted(names) if "/" in name and REASONS.search(name) and name in template]
    pairs = [[name.replace("/", "", 1), name] for name in ends if name.replace("/", "", 1) in names]
    if not pairs and not template:  # nothing to go by but the names
        pairs = [THINK] if all(is_one_id(tokenizer, name) for name in THINK) else []
    if not pairs and (others := sorted(name for name in names if OTHERS.search(name) and name in template)):
        log(f"reasoning: the template names {' '.join(others)}, no pair that is read here; what the target reasons "
            "stays in the answers' text")
    return [name for pair in pairs for name in pair]


def find_tool(tokenizer, template: str) -> list[str]:
    """Kimi's five marks where the template names the first of them; [] else."""
    if template and TOOL[0] not in template:
        return []
    return TOOL if template or all(is_one_id(tokenizer, name) for name in TOOL) else []
