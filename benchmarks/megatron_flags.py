"""Write the table of Megatron-LM's flags from its source: argument parsers, and dataclasses that it makes flags of.

PYTHONPATH=src:. python -m benchmarks.megatron_flags --root CHECKOUT

Nothing of the checkout is imported or run. A flag that only some programs add (extra_args_provider) names them.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "src/meshwright/recipes/key_maps/megatron_lm_flags.tsv"
ARGUMENTS = "megatron/training/arguments.py"
START = "add_megatron_arguments"
FOLDERS = ("megatron/core", "megatron/training")  # of the dataclasses
PROGRAMS = ("*.py", "examples/**/*.py", "megatron/elastification/*.py")
NOT_TRAINING = (
    "inference",
    "export",
    "mmlu",
    "generate",
    "quantize",
    "validate",
    "convert",
    "text_generation",
    "tester",
    "prune",
    "feature_extract",
    "benchmark",
)
PLAIN = {"int": "int", "float": "float", "str": "str"}


@dataclass(frozen=True)
class Flag:
    """A flag that the parser accepts."""

    name: str  # with underscores, without dashes
    type: str  # flag, int, float, str or list
    choices: tuple[str, ...] = ()
    argument: str = ""  # that it sets; NAME=False for a flag that turns one off


class Source:
    """The modules of a checkout, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, ast.Module] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        for folder in FOLDERS:
            for file in sorted((root / folder).rglob("*.py")):
                for node in self.module(str(file.relative_to(root))).body:
                    if isinstance(node, ast.ClassDef):
                        self.classes.setdefault(node.name, node)

    def module(self, path: str) -> ast.Module:
        """Return a module of the checkout."""
        if path not in self.modules:
            self.modules[path] = ast.parse((self.root / path).read_text())
        return self.modules[path]

    def function(self, path: str, name: str) -> tuple[str, ast.FunctionDef] | None:
        """Return a function by its name in a module, which may import it, and the module that has it."""
        for node in ast.walk(self.module(path)):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return path, node
        for node in ast.walk(self.module(path)):
            if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
                for start in (self.root, (self.root / path).parent, self.root / "examples" / "multimodal"):
                    file = start / f"{(node.module or '').replace('.', '/')}.py"
                    if file.is_file():
                        return self.function(str(file.relative_to(self.root)), name)
        return None


def flags_of(source: Source, path: str, name: str, seen: set[tuple[str, str]]) -> Iterator[Flag]:
    """Yield the flags that a function adds to a parser, with those of the functions that it calls."""
    found = source.function(path, name)
    if found is None or (found[0], name) in seen:
        return
    path, function = found
    seen.add((path, name))
    lists = {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "add_argument":
            yield from flags_added(source, node)
        elif called == "ArgumentGroupFactory" and isinstance(node.args[0], ast.Name):
            without = next((one.value for one in node.keywords if one.arg == "exclude"), None)
            if isinstance(without, ast.Name):
                without = lists.get(without.id)
            excluded = set(ast.literal_eval(without)) if without is not None else set()
            yield from _fields(source, node.args[0].id, excluded)
        elif isinstance(node.func, ast.Name) and called.startswith(("add_", "_add_")):
            yield from flags_of(source, path, called, seen)


def flags_added(source: Source, call: ast.Call) -> Iterator[Flag]:
    """Yield the flags of one add_argument call, a flag per name."""
    names = [one.value for one in call.args if isinstance(one, ast.Constant) and str(one.value).startswith("--")]
    options = {one.arg: one.value for one in call.keywords}
    action = _literal(options.get("action"))
    if "BooleanOptionalAction" in ast.unparse(call):
        yield from (Flag(_key(f"{start}{one[2:]}"), "flag") for one in names for start in ("--", "--no-"))
        return
    argument = str(_literal(options.get("dest")) or _key(names[0] if names else ""))
    argument += "=False" * (action == "store_false")
    several = _literal(options.get("nargs")) not in (None, "?")
    kind = "list" if several else PLAIN.get(getattr(options.get("type"), "id", "str"), "str")
    if action is not None and str(action).startswith("store_"):
        kind = "flag"
    choices = _literal(options.get("choices")) if "choices" in options else ()
    allowed = tuple(map(str, choices or ())) if isinstance(choices, list | tuple) else ()
    yield from (Flag(_key(name), kind, allowed, argument) for name in names)


def _fields(source: Source, name: str, excluded: set[str]) -> Iterator[Flag]:
    """Yield the flags of a dataclass and its bases, as Megatron-LM's ArgumentGroupFactory makes them."""
    node = source.classes.get(name)
    if node is None:
        return
    for base in node.bases:
        yield from _fields(source, getattr(base, "id", ""), excluded)
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if field.target.id in excluded or "ClassVar" in ast.unparse(field.annotation):
            continue
        default, meta, made = _default(field.value)
        if not made:
            continue
        flag = _typed(source, field.annotation)
        if flag is None and not meta:
            continue
        flag = flag or Flag("", "str")
        if meta.get("nargs") not in (None, "?"):
            flag = replace(flag, type="list")
        names, argument = [f"--{field.target.id}"], str(meta.get("dest", field.target.id))
        if flag.type == "flag" and default is not False:
            argument += "=False"
            names = [f"--no-{field.target.id}", f"--disable-{field.target.id}"]
        for one in meta.get("arg_names", names):
            yield replace(flag, name=_key(one), argument=argument)


def _default(value: ast.expr | None) -> tuple[Any, dict[str, Any], bool]:
    """Return the default of a field, the arguments of its flag that it sets, and whether the class sets it at all."""
    if not (isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("field", "Field")):
        return _literal(value), {}, True
    options = {one.arg: one.value for one in value.keywords}
    meta: dict[str, Any] = {}
    if isinstance(options.get("metadata"), ast.Dict):
        for key, found in zip(options["metadata"].keys, options["metadata"].values, strict=True):
            if _literal(key) == "argparse_meta" and isinstance(found, ast.Dict):
                meta = {_literal(k): _literal(v) for k, v in zip(found.keys, found.values, strict=True)}
    return _literal(options.get("default")), meta, _literal(options.get("init")) is not False


def _typed(source: Source, annotation: ast.expr) -> Flag | None:
    """Return a flag without a name for a type; None if Megatron-LM infers none."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _typed(source, ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):  # X | None
        sides = [one for one in (annotation.left, annotation.right) if _literal(one, "") is not None]
        return _typed(source, sides[0]) if len(sides) == 1 else None
    if isinstance(annotation, ast.Subscript):
        outer, inner = ast.unparse(annotation.value).rpartition(".")[2], annotation.slice
        if outer == "Optional":
            return _typed(source, inner)
        if outer in ("list", "List"):
            found = _typed(source, inner)
            return found and replace(found, type="list")
        if outer == "Literal":
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return Flag("", "str", tuple(str(_literal(one)) for one in values))
        return None
    name = ast.unparse(annotation).rpartition(".")[2]
    if name == "bool":
        return Flag("", "flag")
    if name in PLAIN:
        return Flag("", PLAIN[name])
    members = source.classes.get(name)
    if members is not None and any("Enum" in ast.unparse(base) for base in members.bases):
        found = [one.targets[0] for one in members.body if isinstance(one, ast.Assign)]
        return Flag("", "str", tuple(one.id for one in found if isinstance(one, ast.Name)))
    return None


def _literal(node: ast.expr | None, otherwise: Any = None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return otherwise


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def program_flags(source: Source) -> Iterator[tuple[str, Flag]]:
    """Yield the flags that training programs add, with the program."""
    for pattern in PROGRAMS:
        for file in sorted(source.root.glob(pattern)):
            path = str(file.relative_to(source.root))
            if any(word in path for word in NOT_TRAINING) or "extra_args_provider" not in file.read_text():
                continue
            for node in ast.walk(source.module(path)):
                if isinstance(node, ast.keyword) and node.arg == "extra_args_provider":
                    for name in (one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)):
                        yield from ((path, one) for one in flags_of(source, path, name, set()))


def rows(root: Path) -> list[tuple[str, ...]]:
    """Return the rows of the table: flag, type, choices, programs (empty: all), argument (empty: named as the flag)."""
    source = Source(root)
    everywhere = {one.name: one for one in flags_of(source, ARGUMENTS, START, set())}
    own: dict[Flag, list[str]] = {}
    for path, flag in program_flags(source):
        if flag.name not in everywhere and path not in own.setdefault(flag, []):
            own[flag].append(path)
    named = [one for one in everywhere.values() if f"no_{one.name.removeprefix('disable_')}" not in everywhere]
    named = [one for one in everywhere.values() if one in named or not one.name.startswith("disable_")]
    found = [(one, "") for one in named] + [(one, " ".join(paths)) for one, paths in own.items()]
    return sorted(
        (one.name, one.type, " ".join(one.choices), programs, one.argument if one.argument != one.name else "")
        for one, programs in found
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="checkout of Megatron-LM")
    parser.add_argument("--commit", default="", help="commit of the checkout, if it has no .git")
    options = parser.parse_args(argv)
    command = ["git", "-C", str(options.root), "rev-parse", "HEAD"]
    commit = options.commit or subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    lines = [
        f"# NVIDIA/Megatron-LM {commit}, by benchmarks/megatron_flags.py",
        "flag\ttype\tchoices\tprograms\targument",
    ]
    lines += ["\t".join(row) for row in rows(options.root)]
    TABLE.write_text("\n".join(lines) + "\n")
    print(f"{len(lines) - 2} flags in {TABLE.name}")


if __name__ == "__main__":
    main()
