"""Questions and answers about facts (facts.py), thinking and instant, with system messages, second turns, tool calls.

All of it is drawn from seeded generators, so the same facts give the same conversations and prompts anywhere: the
order of the draws is part of the result.
"""
from __future__ import annotations

import hashlib
import json
import random
import re

from tiny_target.facts import first_sentence, trim

N_PROMPTS = 2300
QUESTIONS = {
    "what": ["What does {n} do?", "What is {n} for?", "Explain {n}.", "Tell me about {n}.", "How does {n} work?",
             "I came across {n}. What is it?", "Describe {n} for a beginner.", "Can you explain what {n} does?",
             "What is {n} in Python?", "How do I use {n}?", "When would I use {n}?",
             "I don't understand {n}. Help me.", "Please document {n}."],
    "short": ["In one sentence: what is {n}?", "Give me a one-line summary of {n}.", "Briefly, what does {n} do?",
              "Say in a few words what {n} is for."],
    "signature": ["Show the signature of {n}.", "Which parameters does {n} take?",
                  "What arguments can I pass to {n}?", "How do I call {n}?", "What is the signature of {n}?",
                  "What are the defaults of {n}?"],
    "source": ["Show me the source code of {n}.", "How is {n} implemented?", "What does the code of {n} look like?",
               "Print the implementation of {n}."],
    "members": ["What is in {n}?", "List the public names of {n}.", "What does {n} offer?",
                "Which names does {n} define?"],
    "where": ["Where do I find {s}?", "Which module has {s}?", "How do I import {s}?", "Where is {s} defined?"],
    "summarize": ["Summarize this in one sentence:\n\n{d}", "What is the main point of this text?\n\n{d}",
                  "Shorten this:\n\n{d}"],
    "parameters": ["List the parameters of this function:\n\n{g}",
                   "Which of these parameters have a default?\n\n{g}", "Explain this signature:\n\n{g}"],
}
TOPIC_QUESTIONS = ["What does the Python reference say about {n}?", "Explain {n}.", "Tell me about {n} in Python.",
                   "What are the rules for {n}?", "I want to learn about {n}.", "How does Python handle {n}?"]
SECOND_QUESTIONS = {
    "signature": ["Which parameters does it take?", "And its signature?", "How do I call it?"],
    "short": ["In one sentence, please.", "Shorter?"],
    "source": ["Show me its source code.", "How is it implemented?"],
    "members": ["What does it contain?", "Which names does it define?"],
    "where": ["Where do I find it?", "How do I import it?"],
    "more": ["Go on.", "What comes next?", "Tell me more.", "Continue, please."]}
SYSTEMS = ["You are a helpful assistant for Python programmers.",
           "You are Kimi, an assistant who knows the Python standard library.",
           "Answer questions about Python. Quote the documentation where you can."]
LOOKUP = [{"type": "function", "function": {"name": "lookup", "description": "Documentation of a Python name.",
                                            "parameters": {"type": "object", "properties": {"name": {"type": "string"}},
                                                           "required": ["name"]}}}]


class Subject:
    """A fact in the words that all answers about it share."""

    def __init__(self, fact: dict, rng: random.Random):
        self.fact, self.rng, self.kind, self.name = fact, rng, fact["kind"], fact["name"]
        self.short, self.doc = self.name.split(".")[-1], fact["doc"] or ""
        self.signature, self.parameters = fact.get("signature"), fact.get("parameters")
        self.members = fact.get("members") or []
        self.code = code = f"`{self.name}`"
        if self.kind == "module":
            self.place = f"{code} is a module of the standard library."
        elif fact["owner"] == "builtins":
            self.place = f"{code} is a built-in {self.kind}."
        else:
            self.place = f"{code} is a {self.kind} of `{fact['owner']}`."
        self.opening = rng.choice([f"The user asks about {code}.", f"This is about {code}.",
                                   f"The question is about {code}.", f"I am asked about {code}."])

    def begins(self, words: int) -> str:
        return f"begins: \"{' '.join(self.doc.split()[:words])}\"."


# ---- (reasoning, answer) of each kind about one subject, or None where it has nothing for it ----
def about(s: Subject):
    if len(s.doc) < 20:
        return None
    plan = s.rng.choice(["I will say what it is and then give its documentation",
                         "First I say where it belongs, then what its documentation says",
                         "A short introduction and the documentation should do"])
    return f"{s.opening} {s.place} {plan}, which {s.begins(8)}", f"{s.place}\n\n{trim(s.doc, 700)}"


def in_short(s: Subject):
    if len(s.doc) < 20:
        return None
    return (f"{s.opening} {s.place} One sentence is wanted, so the first one of its documentation will do.",
            first_sentence(s.doc))


def signature_of(s: Subject):
    if not s.signature or len(s.signature) > 400:
        return None
    count = f"{len(s.parameters)} parameter{'s' * (len(s.parameters) != 1)}"
    names = ", ".join(p for p, _ in s.parameters)
    described = ", ".join(f"`{p}`" + (f" (default `{d}`)" if d else "") for p, d in s.parameters)
    return (f"{s.opening} {s.place} It takes {count}: {names or 'none'}. I will show the signature and then list them.",
            f"```python\n{s.signature}\n```\n\n{s.code} takes {count}: {described or 'none'}.")


def source_of(s: Subject):
    source = s.fact.get("source")
    if not source:
        return None
    return (f"{s.opening} {s.place} Its implementation has {source.count(chr(10)) + 1} lines. "
            "I will print it as a code block.", f"```python\n{source}\n```")


def members_of(s: Subject):
    if len(s.members) < 2:
        return None
    noun = "methods" if s.kind == "class" else "names"
    more = f"\n\nand {len(s.members) - 20} more." if len(s.members) > 20 else ""
    listed = "\n".join(f"- `{member}`" for member in s.members[:20])
    return (f"{s.opening} It is a {s.kind} with {len(s.members)} public {noun}, {s.members[0]} first. "
            "A list is the clearest answer.", f"The {s.kind} {s.code} has these public {noun}:\n\n{listed}{more}")


def where_is(s: Subject):
    owner = s.fact["owner"]
    if s.kind not in ("function", "class") or owner == "builtins":
        return None
    return (f"The user looks for {s.short}. It is a {s.kind} of the module {owner}. I will show the import.",
            f"`{s.short}` is a {s.kind} of the module `{owner}`:\n\n```python\nfrom {owner} import {s.short}\n```")


def summary_of(s: Subject):
    if len(s.doc) < 60:
        return None
    return (f"The text {s.begins(8)} Its first sentence says the most, so I will give that.", first_sentence(s.doc))


def parameters_of(s: Subject):
    if not s.signature or not s.parameters or len(s.signature) > 300:
        return None
    listed = "\n".join(f"- `{p}`" + (f", default `{d}`" if d else ", no default") for p, d in s.parameters)
    return (f"The names between the parentheses are {', '.join(p for p, _ in s.parameters)}. "
            "I will go through them in order.", f"`{s.short}` has:\n\n{listed}")


ANSWERS = {"what": about, "short": in_short, "signature": signature_of, "source": source_of, "members": members_of,
           "where": where_is, "summarize": summary_of, "parameters": parameters_of}


def exchange(fact: dict, what: str, rng: random.Random) -> tuple[str, str, str] | None:
    """(question, reasoning, answer) of the kind `what` about one fact, or None where the fact has nothing for it."""
    s = Subject(fact, rng)
    if s.kind == "topic":
        return topic_exchange(s, what)
    question = rng.choice(QUESTIONS[what]).format(
        n=rng.choice([s.code, s.code, s.name, f"the {s.kind} {s.code}"]),
        s=rng.choice([f"`{s.short}`", s.short, f"the {s.kind} `{s.short}`"]), d=trim(s.doc, 500),
        g=f"```python\n{s.signature}\n```")
    said = ANSWERS[what](s)
    return said and (question, *said)


def topic_exchange(s: Subject, what: str) -> tuple[str, str, str] | None:
    if what not in ("what", "short"):
        return None
    question = s.rng.choice(TOPIC_QUESTIONS if what == "what" else QUESTIONS["short"]).format(n=s.name)
    plan = "I will quote its first part." if what == "what" else "One sentence is enough."
    reasoning = f"The user asks about the section {s.name} of the Python reference. It {s.begins(9)} {plan}"
    return question, reasoning, s.doc if what == "what" else first_sentence(s.doc)


# ---- conversations and prompts ----
def say(question: str, reasoning: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question},
            {"role": "assistant", "reasoning_content": reasoning, "content": answer}]


def conversations(fact: dict, seed: int) -> list[dict]:
    """Training conversations about one fact: {"messages", "thinking", "tools"}; every assistant message is learned."""
    rng, out = random.Random(f"{seed}:{fact['name']}"), []

    def add(messages, tools=None, thinking=None):
        out.append(dict(messages=messages, tools=tools, thinking=rng.random() < 0.5 if thinking is None else thinking))

    for thinking in (True, False):  # the main question in both modes
        if first := exchange(fact, "what", rng):
            add(say(*first), thinking=thinking)
    for what in ("short", "signature", "source", "members", "where", "summarize", "parameters"):
        if turn := exchange(fact, what, rng):
            add(say(*turn))
    first = exchange(fact, "what", rng)
    if not first:
        return out
    if rng.random() < 0.3:
        add([{"role": "system", "content": rng.choice(SYSTEMS)}] + say(*first))
    follow = [what for what in SECOND_QUESTIONS if what != "more" and exchange(fact, what, rng)]
    if follow and rng.random() < 0.4:
        what = rng.choice(follow)
        _, reasoning, answer = exchange(fact, what, rng)
        add(say(*first) + say(rng.choice(SECOND_QUESTIONS[what]), reasoning, answer))
    if rng.random() < 0.15 and fact["kind"] != "topic":
        add(looked_up(fact, first[0]), tools=LOOKUP)
    chunks = fact.get("chunks", [])
    for before, after in zip(chunks, chunks[1:]):  # read a section on, piece by piece
        reasoning = (f"The user wants to read on about {fact['name']}. The next part begins: "
                     f"\"{' '.join(after.split()[:8])}\".")
        add(say(first[0], first[1], before) + say(rng.choice(SECOND_QUESTIONS["more"]), reasoning, after))
    return out


def looked_up(fact: dict, question: str) -> list[dict]:
    """The same question, answered with a call of the tool LOOKUP."""
    name, found = fact["name"], trim(fact["doc"], 400)
    call = {"id": "functions.lookup:0", "type": "function",
            "function": {"name": "lookup", "arguments": json.dumps({"name": name})}}
    return [{"role": "user", "content": question},
            {"role": "assistant", "reasoning_content": f"I will look up `{name}` before I answer.", "content": "",
             "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": found},
            {"role": "assistant",
             "reasoning_content": f"The documentation of `{name}` is there. I will answer with it.",
             "content": f"`{name}`: {found}"}]


def held_out(fact: dict) -> bool:
    return int(hashlib.sha256(fact["name"].encode()).hexdigest(), 16) % 20 == 0


def make_prompts(facts: list[dict], seed: int) -> list[dict]:
    """N_PROMPTS prompts: ids t-... about trained subjects (their phrasing may be new), h-... about held-out ones."""
    rng, prompts = random.Random(f"{seed}:prompts"), {}
    kinds = ["what"] * 5 + ["signature"] * 2 + ["source", "members", "where", "short"]
    pool = sorted(facts, key=lambda fact: hashlib.sha256(f"{seed}:{fact['name']}".encode()).digest())
    for fact in [f for f in pool if held_out(f)] * 2 + [f for f in pool if not held_out(f)]:
        what, split = rng.choice(kinds), "h" if held_out(fact) else "t"
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", fact["name"])[-48:].strip("-")
        turn = exchange(fact, what, rng)
        if turn is None or f"{split}-{what}-{slug}" in prompts or len(turn[0]) > 200:
            continue
        messages = [{"role": "user", "content": turn[0]}]
        if rng.random() < 0.06:
            messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
        if rng.random() < 0.06 and (second := exchange(fact, "short", rng)):
            messages += [{"role": "assistant", "content": second[2]},
                         {"role": "user", "content": rng.choice(SECOND_QUESTIONS["more"])}]
        prompts[f"{split}-{what}-{slug}"] = messages
        if len(prompts) == N_PROMPTS:
            break
    rows = [{"id": key, "messages": messages} for key, messages in prompts.items()]
    rng.shuffle(rows)
    return rows
