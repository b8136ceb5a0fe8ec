"""Compare recipes.tsv with Megatron-Bridge's recipe functions: sequence lengths, and splits of layers nobody states.

PYTHONPATH=src:. python -m benchmarks.bridge_recipes --root CHECKOUT

The functions are read, not run: assignments to fields of the config, in the order in which a recipe and the recipes
it starts from make them. The runner copies the dataset's length into the model, so that is the length of a run.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "src/meshwright/frameworks/megatron_bridge/recipes.tsv"
FOLDERS = ("src/megatron/bridge/recipes", "src/megatron/bridge/perf_recipes")
UNKNOWN = "?"
BENCHMARK = "benchmark"
SPLITS = ("layout", "num_layers_in", "account_for")
MAX_DEPTH = 8
DEFAULT_LENGTHS = {"pretrain": 4096, "sft": 2048, "peft": 2048}  # where the table has none


Function = tuple[Path, ast.FunctionDef]


class Recipes:
    """The functions of the recipe packages, and the fields that they set."""

    def __init__(self, root: Path) -> None:
        self.source = root / "src"
        self.modules: dict[Path, ast.Module] = {}
        self.functions: dict[str, list[Function]] = {}
        for folder in FOLDERS:
            for file in sorted((root / folder).rglob("*.py")):
                self.modules[file] = ast.parse(file.read_text())
                for node in self.modules[file].body:
                    if isinstance(node, ast.FunctionDef):
                        self.functions.setdefault(node.name, []).append((file, node))

    def resolve(self, file: Path, name: str, depth: int = 0) -> Function | None:
        """Return the function that a name means in a module, which may import it under another name."""
        module = self.modules.get(file)
        if module is None or depth > MAX_DEPTH:
            return None
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return file, node
        for node in module.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                given = next((one.name for one in node.names if (one.asname or one.name) == name), "")
                place = self.source / node.module.replace(".", "/")
                files = (place.with_suffix(".py"), place / "__init__.py") if given else ()
                found = next((one for file in files if (one := self.resolve(file, given, depth + 1))), None)
                if found:
                    return found
        return None

    def settings(self, found: Function, depth: int = 0) -> dict[str, Any]:
        """Return what a recipe function sets, by field; a value that is not a literal is unknown."""
        values: dict[str, Any] = {}
        for node in _statements(found[1].body) if depth <= MAX_DEPTH else ():
            self._read(node, values, depth, found[0])
        return values

    def _read(self, node: ast.stmt, values: dict[str, Any], depth: int, file: Path) -> None:
        called = _called(getattr(node, "value", None))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            key = _path(node.targets[0])
            keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
            values |= {f"{key}.{one.arg}": _value(one.value, values) for one in keywords if one.arg}
            values[key] = UNKNOWN if called else _value(node.value, values)
        elif called:  # cfg = base_recipe(), helper(cfg), return base_recipe()
            function = self.resolve(file, called)
            values |= self.settings(function, depth + 1) if function else {}
            values[f"{called}()"] = UNKNOWN


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        found += _statements(node.body) if isinstance(node, ast.If | ast.With) else [node]
    return found


def _called(node: ast.expr | None) -> str:
    return getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""


def _path(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts))


def _value(node: ast.expr, values: dict[str, Any]) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return values.get(_path(node), UNKNOWN)


def differences(root: Path) -> list[str]:
    """Return the rows of the table that state another length than the function, or a split that it does not state."""
    recipes, found = Recipes(root), []
    for row in TABLE.read_text().splitlines()[1:]:
        name, _, goal, _, _, _, kind, marks, text = row.split("\t")
        table = dict(pair.partition("=")[::2] for pair in text.split())
        functions = [
            one for one in recipes.functions.get(name, ()) if ("perf_recipes" in str(one[0])) == (kind == BENCHMARK)
        ]
        if len(functions) != 1:
            continue
        source = recipes.settings(functions[0])
        stated = [key for key, value in source.items() if any(part in key for part in SPLITS) and value]
        if "stage_layers" in table and not stated:
            found.append(f"{name}: stage_layers={table['stage_layers']}, and the function states no split")
        model, data = source.get("model.seq_length"), source.get("dataset.seq_length")
        ours = int(table.get("seq_length", DEFAULT_LENGTHS[goal]))
        if isinstance(data, int) and data != ours:
            found.append(f"{name}: seq_length={ours}, and the dataset's length is {data}")
        mark = f"length={model}"
        if isinstance(data, int) and isinstance(model, int) and model != data and mark not in marks.split():
            found.append(f"{name}: the model's length is {model}, the dataset's {data}: mark it {mark}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="checkout of Megatron-Bridge")
    found = differences(parser.parse_args().root)
    print("\n".join([*found, f"{len(found)} rows differ"]))


if __name__ == "__main__":
    main()
