"""Config functions of torchtitan's main, read from their syntax: `def llama3_8b() -> Trainer.Config`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.frameworks.framework import Content
from meshwright.frameworks.types import SourcedValue
from meshwright.recipes.key_maps import config_keys

CONFIG, REGISTRY, LEARNING_RATE = "Config", "model_registry", "optimizer.param_groups.0.optimizer_kwargs.lr"
RECOMPUTE = {"FullAC": "full", "SelectiveAC": "selective", "NoAC": "none"}
CHECKED = ("training", "parallelism", "lr_scheduler", "checkpoint", "compile", "activation_checkpoint", "comm")
"""Parts of a config with one class each; those of other parts are the user's choice."""
TRAINER = "Trainer.Config"  # other trainers have parts of their own
COMPUTED = "it is computed by the function"
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
LIMIT = 2**53  # values that arithmetic may reach
_MARK = re.compile(r"^def \w+\([^)]*\) -> [\w.\"']*Config\b", re.MULTILINE)


class ConfigFunction(msgspec.Struct, frozen=True):
    """A function that returns a config: its settings by dotted key, and the flavor of its model."""

    name: str
    line: int
    settings: Mapping[str, SourcedValue]
    flavor: SourcedValue | None = None
    own: bool = True  # a config of torchtitan's Trainer
    complete: bool = True  # False: it changes the config of a function of another file
    dispatcher: str = ""  # of the experts, if the model's registry is called with one


def has_config_functions(content: Content) -> bool:
    """Return whether a Python file defines configs of torchtitan."""
    return content.format == "python" and REGISTRY in content.text and _MARK.search(content.text) is not None


def module_of(content: Content) -> str:
    """Return the module that a registry belongs to: its folder."""
    return Path(content.path).resolve().parent.name


def config_functions(content: Content) -> dict[str, ConfigFunction]:
    """Return the configs of a file by name; a function that changes another's config has both settings."""
    try:
        tree = ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    found: dict[str, ConfigFunction] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and _returns_config(node):
            one = _Reader(content.path, found).read(node)
            found |= {node.name: one} if one is not None else {}
    return found


def _returns_config(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).strip("'\"").endswith(CONFIG)


class _Reader:
    """Collects the settings of one function."""

    def __init__(self, path: str, others: Mapping[str, ConfigFunction]) -> None:
        self.path, self.others = path, others
        self.settings: dict[str, SourcedValue] = {}
        self.flavor: SourcedValue | None = None
        self.names: dict[str, ast.expr] = {}
        self.known, self.own, self.complete, self.dispatcher = False, False, True, ""

    def read(self, function: ast.FunctionDef) -> ConfigFunction | None:
        """Return the config of a function; None if it builds it in another way."""
        for statement in function.body:
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], statement.value)
            elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call):
                self._config(statement.value)
        return _function(function, self) if self.known else None

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
            if isinstance(value, ast.Call):
                self._config(value)
            return
        path = ast.unparse(target).split(".")
        if isinstance(target, ast.Attribute) and len(path) > 1 and path[0] in self.names:
            self._set(".".join(path[1:]), value)

    def _config(self, call: ast.Call) -> None:
        """Read a call of Trainer.Config, or of another config function of the file."""
        name = ast.unparse(call.func)
        if name in self.others:
            base = self.others[name]
            self.settings, self.flavor, self.known, self.own = dict(base.settings), base.flavor, True, base.own
            self.complete, self.dispatcher = base.complete, base.dispatcher
        elif any(isinstance(one, ast.Call) and not one.args and not one.keywords for one in call.args):
            self.known, self.complete = True, False  # wraps the config of another function
        elif name.endswith(CONFIG) and any(one.arg == "model_spec" for one in call.keywords):
            self.known, self.own = True, name == TRAINER
            for keyword in call.keywords:
                if keyword.arg is not None:
                    self._set(keyword.arg, keyword.value)

    def _set(self, key: str, value: ast.expr) -> None:
        node = self.names.get(value.id, value) if isinstance(value, ast.Name) else value
        if key == "model_spec" and isinstance(node, ast.Call):
            first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "flavor"), None)
            self.flavor = None if first is None else self._value(first)
            backend = next((k.value for k in node.keywords if k.arg == "moe_comm_backend"), None)
            self.dispatcher = "" if backend is None else str(self._value(backend).value)
        elif key == "optimizer" and isinstance(node, ast.Call):
            rate = next((one.value for one in node.keywords if one.arg == "lr"), None)
            if rate is not None:
                self.settings[LEARNING_RATE] = self._value(rate)
        elif key == "activation_checkpoint":
            name = ast.unparse(node).split(".")[0].split("(")[0]
            mode = "none" if name == "None" else RECOMPUTE.get(name)
            if mode is not None:
                self.settings["activation_checkpoint.mode"] = SourcedValue(mode, node.lineno, self.path)
        elif isinstance(node, ast.Call) and "." not in key:
            for keyword in node.keywords:
                name = f"{key}.{keyword.arg}"
                if keyword.arg is not None and self._is_read(name):
                    self._set_value(name, keyword.value)
        elif self._is_read(key):
            self._set_value(key, node)

    def _is_read(self, key: str) -> bool:
        """Return whether a key is checked: those of other trainers only if they are also torchtitan's."""
        return key.split(".")[0] in CHECKED and (self.own or key in config_keys("torchtitan"))

    def _set_value(self, key: str, node: ast.expr) -> None:
        found = self._value(node)
        if not found.unresolved or key in config_keys("torchtitan"):
            self.settings[key] = found

    def _value(self, node: ast.expr) -> SourcedValue:
        value = _evaluate(self.names.get(node.id, node) if isinstance(node, ast.Name) else node)
        if value is None and not (isinstance(node, ast.Constant) and node.value is None):
            return SourcedValue(ast.unparse(node), node.lineno, self.path, COMPUTED)
        return SourcedValue(list(value) if isinstance(value, tuple) else value, node.lineno, self.path)


def _function(node: ast.FunctionDef, reader: _Reader) -> ConfigFunction:
    facts = (reader.own, reader.complete, reader.dispatcher)
    return ConfigFunction(node.name, node.lineno, reader.settings, reader.flavor, *facts)


def _evaluate(node: ast.expr) -> Any:
    """Return a literal, or integer arithmetic of literals; None for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(left, int) and isinstance(right, int) and max(abs(left), abs(right)) < LIMIT and right:
            return OPERATORS[type(node.op)](left, right)
        return None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
