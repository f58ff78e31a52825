"""Facts: what the standard library of this Python says about itself, read from its source, docstrings and topics.

A fact: {"kind", "name", "owner", "doc"} and, where there is one, "signature", "parameters" [[name, default or None]],
"source", "members", "bases", "chunks" (a topic's text in pieces short enough for an answer).
"""
from __future__ import annotations

import ast
import importlib
import inspect
import platform
import re
import sysconfig
from pathlib import Path
from typing import Iterator

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "ensurepip", "pydoc_data",
                   "distutils", "tkinter", "encodings", "__pycache__"}
# The Python versions of modules that C implements are the documented ones.
PUBLIC_NAME = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io", "_collections_abc": "collections.abc"}
C_MODULES = ["builtins", "math", "cmath", "itertools", "time", "sys", "functools", "collections", "array", "zlib",
             "binascii", "struct", "gc"]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def trim(text: str, limit: int) -> str:
    """Whole paragraphs up to `limit` characters; of a first paragraph that is longer, whole sentences."""
    kept = ""
    for paragraph in text.strip("\n").split("\n\n"):
        if kept and len(kept) + len(paragraph) > limit:
            break
        kept += ("\n\n" if kept else "") + paragraph
    if len(kept) <= limit:
        return kept
    end = max(kept.rfind(mark, 0, limit) for mark in (". ", ".\n", "\n"))
    return kept[:end + 1].rstrip() or kept[:limit]


def first_sentence(text: str) -> str:
    flat = " ".join(text.split("\n\n")[0].split())
    sentence = re.match(r".{20,}?[.!?](?= [A-Z]|$)", flat)
    return (sentence[0] if sentence else flat)[:300]


def parameters_of(arguments: ast.arguments) -> list:
    """[[name, default or None]] of an ast.arguments, without self."""
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(plain, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    named = [[argument.arg, default and ast.unparse(default)] for argument, default in pairs
             if argument.arg not in ("self", "cls", "type", "module")]
    starred = (("*", arguments.vararg), ("**", arguments.kwarg))
    return named + [[stars + rest.arg, None] for stars, rest in starred if rest]


def python_facts(root: Path) -> Iterator[dict]:
    """Modules, classes, methods and functions of the source files below `root`, read by ast: nothing is imported."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(PUBLIC_NAME.get(part, part) for part in parts if part != "__init__")
        private = any(part.startswith("_") for part in module.split("."))
        if SKIPPED_FOLDERS & set(parts) or parts[0].startswith("config-") or private:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        public = [node for node in tree.body
                  if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")]
        yield dict(kind="module", name=module, owner=module, doc=ast.get_docstring(tree),
                   members=[node.name for node in public])
        for node in public:
            yield from facts_of_node(node, module)


def facts_of_node(node, module: str) -> Iterator[dict]:
    """A function; or a class and its methods."""
    if isinstance(node, FUNCTIONS):
        yield callable_fact(node, module, "function")
        return
    methods = [item for item in node.body if isinstance(item, FUNCTIONS) and not item.name.startswith("_")]
    yield dict(kind="class", name=f"{module}.{node.name}", owner=module, doc=ast.get_docstring(node),
               members=[item.name for item in methods], bases=[ast.unparse(base) for base in node.bases])
    for method in methods:
        yield callable_fact(method, f"{module}.{node.name}", "method")


def callable_fact(item, owner: str, kind: str) -> dict:
    doc = ast.get_docstring(item)
    if doc is not None:
        item.body = item.body[1:] or [ast.Pass()]
    item.decorator_list = []
    source = ast.unparse(item)
    return dict(kind=kind, name=f"{owner}.{item.name}", owner=owner, doc=doc,
                signature=source.split(":\n")[0] if "\n" in source else source, parameters=parameters_of(item.args),
                source=source if len(source) <= 700 else None)


def compiled_facts() -> Iterator[dict]:
    """Functions and methods without Python source: their docstrings and text signatures."""
    for module_name in C_MODULES:
        for name, value in sorted(vars(importlib.import_module(module_name)).items()):
            python = inspect.isfunction(value) or inspect.ismodule(value)
            if name.startswith("_") or python or not callable(value):
                continue
            prefix = "" if module_name == "builtins" else f"{module_name}."
            things = [("class" if inspect.isclass(value) else "function", prefix + name, module_name, value)]
            if inspect.isclass(value) and not issubclass(value, BaseException):
                things += [("method", f"{prefix}{name}.{key}", prefix + name, item)
                           for key, item in sorted(vars(value).items())
                           if not key.startswith("_") and inspect.ismethoddescriptor(item)]
            for kind, full, owner, thing in things:
                text = getattr(thing, "__text_signature__", None)
                fact = dict(kind=kind, name=full, owner=owner, doc=inspect.getdoc(thing))
                if text and "<" not in text and kind != "class":  # <unrepresentable> defaults parse as nothing
                    signature = f"def {full.split('.')[-1]}{text.replace('$', '')}"
                    parsed = ast.parse(f"{signature}: pass").body[0]
                    fact |= dict(signature=signature, parameters=parameters_of(parsed.args))
                yield fact


def topic_facts() -> Iterator[dict]:
    """Sections of the language reference that pydoc ships, each in pieces short enough for an answer."""
    from pydoc_data.topics import topics
    for name, text in sorted(topics.items()):
        # text, (title, rule, text)*
        pieces = re.split(r"(?m)^([^\n]+)\n([*=~^\-])\2{2,}\n", text.strip() + "\n")
        for title, body in zip(pieces[1::3], pieces[3::3]):
            chunks, rest = [], body.strip("\n")
            while rest.strip():
                chunks.append(trim(rest, 700))
                rest = rest[len(chunks[-1]):].strip("\n")
            if chunks:
                yield dict(kind="topic", name=title.replace('"', "`").strip(), owner=name, doc=chunks[0], chunks=chunks)


def collect_facts() -> dict:
    """One fact a name, sorted; those with nothing to say left out."""
    facts = {}
    for fact in [*python_facts(Path(sysconfig.get_paths()["stdlib"])), *compiled_facts(), *topic_facts()]:
        if fact["kind"] != "topic" and fact.get("doc"):
            fact["doc"] = inspect.cleandoc(fact["doc"])
        useful = len(fact["doc"] or "") >= 20 or fact.get("source") or len(fact.get("members", [])) >= 2
        if useful and not fact["name"].startswith(("antigravity", "this")):
            facts.setdefault(fact["name"], fact)
    return dict(python=platform.python_version(), facts=[facts[name] for name in sorted(facts)])
