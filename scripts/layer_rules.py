"""Read in SGLang's own sources which layers each release captures for which ids; for whoever maintains this project.

    python3 scripts/layer_rules.py --wheels /tmp/wheels                   # is patches/versions.json what they say?
    python3 scripts/layer_rules.py --wheels /tmp/wheels --write           # make it so
    python3 scripts/layer_rules.py --wheels /tmp/wheels --write 0.5.24    # with another release

Reads   the wheels of every release in patches/versions.json; pip downloads those that --wheels does not hold (17 MB
        each, into that folder)
Writes  patches/versions.json: `files`, the hashes by which sglang_patch.py knows a model file, and `layer_rules`: model
        file -> {first release: "<rule>: <architectures that it serves>"}, up to the next release named there (null: no
        longer). What a rule means: RULES in scripts/eagle3/target.py
Exit    0; 1 where the file is not what the wheels say; 2 bad input

SGLang hands the ids of a drafter's config to its target's set_eagle3_layers_to_capture(layer_ids). That method is
followed here statement by statement, through base classes and wrappers that hand the ids on. What is none of the forms
known here is listed as not understood and left out of the table.
"""
import argparse
import ast
import functools
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "patches")]
import sglang_patch  # noqa: E402
from eagle3.stage import UserError, run  # noqa: E402

METHOD = "set_eagle3_layers_to_capture"
PACKAGE = "sglang.srt.models."
# Files that get the call of the capture: a toy of each is compared with transformers (tests/test_capture.py)
PATCHED = ("deepseek_v2", "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
LAST_RANK = ("self.pp_group.is_last_rank", "get_pp_group().is_last_rank", "get_parallel().pp_group.is_last_rank")
LAYER_COUNTS = ("self.config.num_hidden_layers", "self.config.text_config.num_hidden_layers", "len(self.model.layers)")
NO_IDS, IDS = ("ids is None", True), ("ids is None", False)
DEFAULT, ADDED = "[2, N // 2, N - 3]", "[i + 1 for i in ids]"
STORED = {((), "ids")}  # an inner model, which is handed layers
# {(conditions, layers)}, one for each way through the method; N: the number of layers
RULES = {
    "add-one": {((NO_IDS,), DEFAULT), ((IDS,), ADDED)},
    "add-one-if-first-is-1": {((NO_IDS,), DEFAULT), ((IDS, ("ids and ids[0] == 1", True)), ADDED),
                              ((IDS, ("ids and ids[0] == 1", False)), "list(ids)")},
    "add-one-unless-max-is-N": {((NO_IDS,), DEFAULT), ((IDS, ("ids and max(ids) == N", True)), "list(ids)"),
                                ((IDS, ("ids and max(ids) == N", False)), ADDED)},
    "add-one-default-too": {((NO_IDS,), f"[i + 1 for i in {DEFAULT}]"), ((IDS,), ADDED)},
}
Class = tuple[str, str]  # (model file without .py, name)


class NotUnderstood(Exception):
    """A statement, class or form that is none of those known here."""


# ---- one method, statement by statement ----
class Canonical(ast.NodeTransformer):
    """An expression with local names resolved, the number of layers as N, the variable of a comprehension as i."""

    def __init__(self, names: dict[str, ast.expr]):
        self.names = names

    def visit(self, node: ast.AST) -> ast.AST:
        node = super().visit(node)
        return ast.Name("N") if isinstance(node, ast.expr) and ast.unparse(node) in LAYER_COUNTS else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.names.get(node.id, node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        own = {part.target.id: ast.Name("i") for part in node.generators if isinstance(part.target, ast.Name)}
        return Canonical({**self.names, **own}).generic_visit(node)


@dataclass(frozen=True)
class Way:
    """One way through the method."""
    names: dict[str, ast.expr]  # locals
    conditions: tuple = ()
    layers: str | None = None  # captured on this way
    owner: str | None = None  # whom it calls with `layers`: "self.language_model"

    def resolve(self, node: ast.expr) -> ast.expr:
        return Canonical(self.names).visit(ast.parse(ast.unparse(node), mode="eval").body)

    def captures(self, node: ast.expr, owner: ast.expr | None = None) -> "Way":
        if self.layers is not None:
            raise NotUnderstood(f"line {node.lineno}: layers are set twice")
        return replace(self, layers=ast.unparse(self.resolve(node)), owner=owner and ast.unparse(owner))


def ways(statements: list[ast.stmt], way: Way) -> Iterator[Way]:
    """Every way on from `way` to the end of the method. Raises NotUnderstood."""
    if not statements:
        yield way
        return
    first, rest = statements[0], statements[1:]
    match first:
        case ast.Return(value=None):
            yield way
        case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Attribute(attr="capture_aux_hidden_states")],
                                                         value=ast.Constant(value=True)):
            yield from ways(rest, way)
        case ast.If(test=test, body=body, orelse=orelse):
            condition = ast.unparse(way.resolve(test))
            if isinstance(body[0], ast.Raise) or condition in [f"not {rank}" for rank in LAST_RANK]:
                yield from ways(orelse + rest, way)  # nothing is served there
            elif condition.startswith("hasattr(") and condition.endswith(f"'{METHOD}')"):
                for branch in filter(None, (body, orelse)):  # without the method nothing is served
                    yield from ways(branch + rest, way)
            else:
                for branch, holds in ((body, True), (orelse, False)):
                    yield from ways(branch + rest, replace(way, conditions=(*way.conditions, (condition, holds))))
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield from ways(rest, replace(way, names={**way.names, name: way.resolve(value)}))
        case ast.Assign(targets=[ast.Attribute(attr="layers_to_capture")], value=value):
            yield from ways(rest, way.captures(value))
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=called), args=[value], keywords=[])) \
                if called == METHOD:
            yield from ways(rest, way.captures(value, owner))
        case ast.For() if way.layers is not None and marks_layers(first):
            yield from ways(rest, way)
        case _:
            raise NotUnderstood(f"line {first.lineno}: {ast.unparse(first).splitlines()[0]}")


def marks_layers(loop: ast.For) -> bool:
    """Whether it only sets the flag of the layers that were stored just before."""
    calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "setattr"]
    return (ast.unparse(loop.iter) in ("self.layers_to_capture", "self.model.layers_to_capture") and len(marks) == 1
            and ast.unparse(marks[0]).endswith("[layer_id], '_is_layer_to_capture', True)")
            and {ast.unparse(call.func) for call in calls} <= {"setattr", "len"}
            and not any(isinstance(node, ast.stmt) and not isinstance(node, (ast.If, ast.Expr))
                        for statement in loop.body for node in ast.walk(statement)))


@dataclass(frozen=True)
class Method:
    """What a class's method does: {(conditions, layers)}, and to whom it hands the ids as they are, if it does."""
    forms: set
    hands_on_to: str | None
    inner: bool  # called by a model, with layers: it has no default

    @property
    def rule(self) -> str:
        found = [name for name, forms in RULES.items() if forms == self.forms]
        if not found:
            raise NotUnderstood(f"it captures {sorted(self.forms, key=str)}")
        return found[0]


def read_method(function: ast.FunctionDef) -> Method:
    """Raises NotUnderstood."""
    arguments = function.args
    if len(arguments.args) != 2 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
        raise NotUnderstood(f"line {function.lineno}: its arguments")
    found = list(ways(function.body, Way({arguments.args[1].arg: ast.Name("ids")})))
    if None in {way.layers for way in found}:
        raise NotUnderstood(f"line {function.lineno}: a way through it sets no layers")
    owners = {way.owner for way in found if way.layers == "ids"}
    if len(owners) > 1 or owners and len(found) > 1:
        raise NotUnderstood(f"line {function.lineno}: it hands the ids on in one way and not in another")
    return Method({(way.conditions, way.layers) for way in found}, next(iter(owners), None), not arguments.defaults)


# ---- the model files of one release ----
@functools.lru_cache(maxsize=None)  # most files stay the same from release to release
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


class Release:
    """texts: {model file without .py: source}, of srt/models/ itself, where SGLang's registry looks."""

    def __init__(self, texts: dict[str, str]):
        self.texts, self.classes, self.imported, self.entries = texts, {}, {}, {}
        for stem in self.concerned():
            for node in parsed(texts[stem]).body:
                if isinstance(node, ast.ClassDef):
                    self.classes[stem, node.name] = node
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                    self.entries[stem] = [ast.unparse(entry) for entry in getattr(node.value, "elts", [node.value])]
            for node in ast.walk(parsed(texts[stem])):  # a wrapper may import in its __init__
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                    module = node.module.removeprefix(PACKAGE)
                    self.imported |= {(stem, alias.asname or alias.name): (module, alias.name) for alias in node.names}
        self.methods = {}
        for owner, node in self.classes.items():
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == METHOD:
                    self.methods[owner] = function

    def concerned(self) -> set[str]:
        """Files that hold the method, and those that import from them, and so on."""
        found = {stem for stem, text in self.texts.items() if METHOD in text}
        while True:
            wanted = re.compile(rf"{re.escape(PACKAGE)}(?:{'|'.join(sorted(found))}) import")
            more = {stem for stem, text in self.texts.items() if wanted.search(text)} - found
            if not more:
                return found
            found |= more

    def resolve(self, stem: str, name: str) -> Class | None:
        found = (stem, name) if (stem, name) in self.classes else self.imported.get((stem, name))
        return found if found in self.classes else None

    def lineage(self, which: Class) -> list[Class]:
        """A class and those it inherits from, nearest first."""
        found = [which]
        for base in self.classes[which].bases:
            parent = self.resolve(which[0], ast.unparse(base))
            found += [ancestor for ancestor in self.lineage(parent) if ancestor not in found] if parent else []
        return found

    def definer(self, which: Class, name: str) -> Class | None:
        """The class whose method `name` an object of class `which` has; None where no model file gives it one."""
        return next((owner for owner in self.lineage(which) for node in self.classes[owner].body
                     if getattr(node, "name", None) == name), None)

    def served_by(self, which: Class) -> tuple[Class, Class, str] | None:
        """(the class that computes, the one whose method turns ids into layers, its rule). Raises NotUnderstood."""
        definer = self.definer(which, METHOD)
        if definer is None:
            return None
        method = read_method(self.methods[definer])
        if method.hands_on_to:
            return self.served_by(self.built_as(which, method.hands_on_to))
        self.check_inner_models()
        return which, definer, method.rule

    def built_as(self, which: Class, attribute: str) -> Class:
        """The class of `self.language_model`. Raises NotUnderstood unless it is one."""
        found = {self.resolve(owner[0], ast.unparse(node.value.func)) for owner in self.lineage(which)
                 for node in ast.walk(self.classes[owner])
                 if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute
                 and isinstance(node.value, ast.Call)}
        if len(found) != 1 or None in found:
            raise NotUnderstood(f"{which[1]}: which class {attribute} has")
        return found.pop()

    def check_inner_models(self) -> None:
        """What a model's method hands to an inner one are layers, and that one stores them."""
        for owner, function in self.methods.items():
            method = read_method(function) if not function.args.defaults else None
            if method and method.forms != STORED:
                raise NotUnderstood(f"{owner[1]} is handed layers and stores others")

    def table(self) -> tuple[dict[str, str], dict[str, str]]:
        """({model file: "<rule>: <architectures>"}, {architecture: why it is not understood}).

        In brackets: architectures that take the rule, but compute in another file, where no call of the capture is.
        """
        found, unclear = {}, {}
        for stem, names in self.entries.items():
            for name in names:
                try:
                    which = self.resolve(stem, name)
                    served = which and self.served_by(which)
                    if served:
                        computes, definer, rule = served
                        elsewhere = (self.definer(computes, "forward") or "?")[0] != definer[0]
                        found.setdefault((definer[0], rule), ([], []))[elsewhere].append(name)
                except NotUnderstood as why:
                    unclear[name] = f"{stem}.py: {why}"
        if len({stem for stem, _ in found}) != len(found):
            raise UserError("a model file has two rules: give `layer_rules` another form.")
        return {stem: f"{rule}: {' '.join(sorted(own))}" + (f" ({' '.join(sorted(others))})" if others else "")
                for (stem, rule), (own, others) in sorted(found.items())}, unclear


def read_texts(where: Path) -> dict[str, str]:
    """{model file without .py: source} of a wheel, or of an sglang package folder. Raises UserError."""
    folder = "srt/models"
    if where.is_dir():
        found = {path.name: path.read_bytes() for path in (where / folder).glob("*.py")}
    else:
        with zipfile.ZipFile(where) as archive:
            names = [name for name in archive.namelist() if re.fullmatch(rf"sglang/{folder}/[^/]+\.py", name)]
            found = {name.rsplit("/", 1)[1]: archive.read(name) for name in names}
    if not found:
        raise UserError(f"{where}: no {folder} there.")
    return {name.removesuffix(".py"): data.decode("utf-8-sig") for name, data in found.items()}


def wheel(release: str, folder: Path) -> Path:
    """The release's wheel in `folder`, downloaded when it is not there. Raises UserError."""
    found = list(folder.glob(f"sglang-{release}-*.whl"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                               "-d", str(folder), f"sglang=={release}"], capture_output=True, text=True)
        found = list(folder.glob(f"sglang-{release}-*.whl"))
        if not found:
            raise UserError(f"sglang {release}: no wheel came ({done.stderr.strip().splitlines()[-1:]}). "
                            f"Put it into {folder}.")
    return found[0]


# ---- the whole table ----
def read_releases(texts: Iterator[tuple[str, dict[str, str]]], say=print) -> dict:
    """versions.json of so many (release, texts), oldest first."""
    document = {"releases": [], "files": {stem: {} for stem in PATCHED}, "layer_rules": {}}
    for release, sources in texts:
        document["releases"].append(release)
        for stem in PATCHED:
            if stem in sources and len(sglang_patch.ANCHOR.findall(sources[stem])) == 1:
                known, sha256 = document["files"][stem], hashlib.sha256(sources[stem].encode()).hexdigest()
                known[sha256] = f"{known.get(sha256, '')} {release}".lstrip()
        rules, unclear = Release(sources).table()
        for stem in sorted({*document["layer_rules"], *rules}):
            since = document["layer_rules"].setdefault(stem, {})
            if next(reversed(since.values()), None) != rules.get(stem):
                since[release] = rules.get(stem)
        say(f"{release}: {len(rules)} model files; not understood: {unclear or 'none'}")
    document["layer_rules"] = dict(sorted(document["layer_rules"].items()))
    return document


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help="read besides those in versions.json")
    parser.add_argument("--wheels", type=Path, required=True, metavar="DIR")
    parser.add_argument("--write", action="store_true", help="put what the wheels say into patches/versions.json")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    known = json.loads(sglang_patch.VERSIONS.read_text())
    releases = sorted({*known["releases"], *args.releases}, key=sglang_patch.release_order)
    found = read_releases((release, read_texts(wheel(release, args.wheels))) for release in releases)
    if args.write:
        sglang_patch.write_versions(found)
    elif found != known:
        print(f"{sglang_patch.VERSIONS} is not what the wheels say: --write makes it so.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run(main)
