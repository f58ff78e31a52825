"""Prompts with several turns: each later question stands behind what the server itself answered to those before."""
from __future__ import annotations

from pathlib import Path

from eagle3.bench_prompts import render
from eagle3.responses import message_of
from eagle3.tokens import Tokens, load_tokenizer
from eagle3.turn_tokens import find_turn_tokens


class Conversation:
    """Renders later turns as a client would that keeps the conversation: the template decides what stays of them."""

    def __init__(self, tokenizer_path: str, trust_remote_code: bool):
        """Raises UserError."""
        self.tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
        names = find_turn_tokens(self.tokenizer, Path(tokenizer_path))
        self.tokens = Tokens(self.tokenizer, names.stop, names.think, names.tool, thinking=True)

    def next_turn(self, prompt: dict, before: list[dict]) -> list[int]:
        """Ids of the next question to a prompt of bench_prompts. before: the records of its turns so far, all answers.

        Raises UserError.
        """
        messages, ids = list(prompt["messages"]), prompt["prompt_ids"]
        for question, record in zip(prompt["turns"], before):
            reasoning, content, _, _ = self.tokens.read(record.get("prompt_ids") or ids, record["output_ids"])
            answer = {"content": content, "reasoning": reasoning, "tool_calls": []}
            messages += [message_of(answer), {"role": "user", "content": question}]
        return render(self.tokenizer, {**prompt, "messages": messages}, prompt["thinking"])
