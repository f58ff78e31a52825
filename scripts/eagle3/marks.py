"""Marks in a text: structure of an answer that an API, or a data set, left standing among its words.

A server without a parser for the target sends `reasoning</think>answer` as content; another leaves a tool section or
the stop token in it. Encoded as they stand, such characters would be trained on as words, although the target emitted
one token. Where only one reading is possible the marks are taken out and become the answer's fields; any other answer
is dropped by name. A mark in the midst of a sentence ("write <|im_end|> to stop") is text and stays.
"""
from __future__ import annotations

import re
from typing import Iterable

from eagle3.responses import Answer, Drop

STRUCTURAL = re.compile(r"think|thought|reason|tool|channel|func|call", re.IGNORECASE)  # in names of other marks
OPEN, CLOSED, FREE = "open", "closed", "free"  # where a prompt leaves the reasoning; FREE: the answer brings both marks
STOPPED = ("stop", "tool_calls")


def pattern(names: Iterable[str]) -> re.Pattern | None:
    """Any of the names, the longest first; None when there are none."""
    names = sorted(set(names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


class Marks:
    """How one target's marks are spelled.

    think: begin and end of reasoning, or nothing; tool: names of section begin, section end, call begin, argument
    begin, call end, or nothing; added: {every token of the tokenizer beside its pieces of text: is it marked
    special}.
    """

    def __init__(self, stop: str, think: list[str], tool: list[str], added: dict[str, bool]):
        self.stop, self.think, self.tool = stop, tuple(think), tuple(tool)
        own = {stop, *think, *tool}
        names = {name for name in added if name and not name[0].isalnum() and not name.isspace()}  # <h1> is one, say
        turns = own | {name for name in names if added[name]}  # <|im_user|>, [EOS]
        self.foreign = pattern(name for name in names - own if STRUCTURAL.search(name))
        self.any, self.tools = pattern(names | own), pattern(tool)
        self.runs_on = re.compile(f"{re.escape(stop)}(?:{pattern(turns).pattern})")
        turns = pattern(turns - {*think, *tool}).pattern
        self.begins, self.ends = re.compile(rf"\s*(?:{turns})"), re.compile(rf"(?:{turns})\s*\Z")

    def read(self, answer: Answer, opening: str, prefix: str = "") -> None:
        """Put the marks in the text of `answer` into its fields, in place, and flag it. Raises Drop.

        opening: OPEN, CLOSED or FREE; prefix: what the prompt has behind an open `<think>`.
        """
        if not self.any.search(answer.content) and not self.any.search(answer.reasoning or ""):
            return
        self.take_stop(answer)
        if self.think:
            self.take_reasoning(answer, opening, prefix)
        if self.tool:
            self.take_calls(answer)
        for text in (answer.reasoning or "", answer.content):
            if self.foreign and (found := self.foreign.search(text)):
                raise Drop("foreign_marks", f"the text holds {found[0]}, a token of this tokenizer")
            if self.begins.match(text) or self.ends.search(text):
                raise Drop("turn_marks",
                           f"the text begins or ends with a token's name: {text[:40]!r} ... {text[-40:]!r}")

    # ---- the end of the turn ----
    def take_stop(self, answer: Answer) -> None:
        """The stop token spelled out at the very end of an answer that stopped."""
        for text in (answer.reasoning or "", answer.content):
            if found := self.runs_on.search(text):
                raise Drop("turn_marks", f"the answer runs on into another turn: {found[0]}")
        field = "content" if answer.content else "reasoning"
        text, ends_in_calls = getattr(answer, field) or "", bool(self.tool) and self.tool[0] in answer.content
        if answer.finish in STOPPED and text.endswith(self.stop) and (ends_in_calls or not answer.tool_calls):
            setattr(answer, field, text.removesuffix(self.stop))
            answer.flags.append("stop_in_text")

    # ---- reasoning ----
    def take_reasoning(self, answer: Answer, opening: str, prefix: str) -> None:
        begin, end = self.think
        text, begins = answer.content, answer.content.startswith(begin)
        if not any(mark in part for mark in self.think for part in (answer.reasoning or "", text)):
            return
        if answer.reasoning:
            self.mend_reasoning(answer)
            return
        if opening != OPEN and end not in text and not text.lstrip().startswith(begin):
            return  # "use the <think> tag", in an answer that reasons nowhere
        if opening == CLOSED:
            raise Drop("reasoning_unasked", "reasoning came in the text although the prompt closed it")
        if opening == FREE and not begins:
            raise Drop("think_marks", f"the text holds {end} and does not begin with {begin}")
        if begins:
            text = text.removeprefix(begin).removeprefix(prefix)
        reasoning, ended, content = text.partition(end)
        if begin in text or end in content:
            raise Drop("think_marks", "marks of reasoning stand in the text more than once")
        if ended and not content and answer.finish not in STOPPED:
            raise Drop("empty", f"cut right behind {end}")
        if not ended and answer.finish in STOPPED:
            raise Drop("think_marks", f"the reasoning has no {end}")
        answer.reasoning, answer.content = reasoning, content
        answer.flags.append("reasoning_from_text")

    def mend_reasoning(self, answer: Answer) -> None:
        """A parser was at work, but a mark is left in one of its two parts."""
        begin, end = self.think
        reasoning, content = answer.reasoning, answer.content
        if reasoning.lstrip().startswith(begin):
            reasoning = reasoning.lstrip().removeprefix(begin)
        head, in_reasoning, tail = reasoning.partition(end)
        if in_reasoning:  # `r</think>`, or all of it: `r</think>answer`
            if not tail.strip():
                reasoning, content = head, tail + content
            elif not content.strip() or content.strip() == tail.strip():
                reasoning, content = head, tail
            else:
                raise Drop("think_marks", f"{end} stands within the reasoning")
        head, in_content, tail = content.removeprefix(begin).partition(end)
        if in_content and not in_reasoning:  # `</think>answer`, or the reasoning once more: `<think>r</think>answer`
            if not head.strip() and not content.startswith(begin):
                reasoning, content = reasoning + head, tail
            elif head.strip() == reasoning.strip():
                reasoning, content = head, tail
        if end in content or end in reasoning or content.lstrip().startswith(begin):
            raise Drop("think_marks", "marks of reasoning stand in the answer, whose reasoning came by itself")
        if (reasoning, content) != (answer.reasoning, answer.content):
            answer.reasoning, answer.content = reasoning, content
            answer.flags.append("think_marks_removed")

    # ---- tool calls ----
    def take_calls(self, answer: Answer) -> None:
        """A tool section at the end of the content becomes the calls; it may repeat those that came by themselves."""
        if self.tools.search(answer.reasoning or ""):
            raise Drop("tool_marks", "a tool call stands within the reasoning")
        for call in answer.tool_calls:
            if self.tools.search(call["function"]["name"] + call["function"]["arguments"]):
                raise Drop("tool_marks", "marks of tool calls stand within a call")
        if not self.tools.search(answer.content):
            return
        content, _, section = answer.content.partition(self.tool[0])
        calls = self.read_section(section)
        if not calls or answer.finish not in STOPPED or self.tools.search(content):
            raise Drop("tool_marks", f"no whole tool section: {answer.content[len(content):][:80]!r}")
        said = [(call["function"]["name"], call["function"]["arguments"]) for call in answer.tool_calls]
        if said and said != [(call["function"]["name"], call["function"]["arguments"]) for call in calls]:
            raise Drop("tool_marks", "the tool section in the text is not the calls that came by themselves")
        answer.content, answer.tool_calls, answer.finish = content, calls, "tool_calls"
        answer.flags.append("tool_calls_from_text")

    def read_section(self, section: str) -> list[dict]:
        """The calls of a tool section without its begin; [] unless it is whole and in Kimi's form."""
        _, section_end, call_begin, argument_begin, call_end = self.tool
        if not section.endswith(call_end + section_end):
            return []
        calls = []
        for part in section.removesuffix(section_end).split(call_end)[:-1]:
            call_id, middle, arguments = part.removeprefix(call_begin).partition(argument_begin)
            name = re.fullmatch(r"\s*functions\.(.+):\d+\s*", call_id)
            if not part.startswith(call_begin) or not middle or not name or self.tools.search(call_id + arguments):
                return []
            calls.append({"id": call_id, "type": "function", "function": {"name": name[1], "arguments": arguments}})
        return calls
