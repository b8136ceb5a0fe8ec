"""Read a Python file that sets fields of a recipe config; it is parsed, never executed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.megatron_bridge.parsed_config import ParsedRun, infer_goal, parse_value
from meshwright.frameworks.megatron_bridge.precision import PRESETS
from meshwright.frameworks.megatron_bridge.snippet_options import option_defaults, parsed_names
from meshwright.frameworks.program_values import ENVIRONMENT, OPERATORS
from meshwright.frameworks.types import SourcedValue
from meshwright.recipes.types import Goal

RUNTIME_ONLY = "known only at run time"
CONDITION = "set under a condition"
COMMON = {"_pretrain_common": "pretrain", "_sft_common": "sft", "_peft_common": "peft"}
CONFIG_NAMES = ("cfg", "config")
TRAINERS = ("pretrain", "finetune")
RECIPES = "megatron.bridge.recipes"
MAX_NUMBER = 10**15
MAX_DEPTH = 60
MAX_STATEMENTS = 10_000  # with those of unrolled loops and called functions, which grow exponentially when nested
CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}


class _Unresolved(Exception):  # noqa: N818  control flow, not a user error
    """The value is known only at run time."""


def read(content: Content) -> ParsedRun:
    """Return the settings that the file assigns."""
    try:
        tree = ast.parse(content.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InputError(f"is not valid Python{line}", field="file", value=content.path) from None
    reader = _Reader(content.path, tree)
    try:
        reader.block(tree.body, "")
    except RecursionError:
        raise InputError("is nested too deeply", field="file", value=content.path) from None
    run = reader.result()
    if run is None:
        raise InputError("uses no Megatron-Bridge recipe and sets no config field", field="file", value=content.path)
    return _with_assigned(run, content) if content.assigned else run


def _with_assigned(run: ParsedRun, content: Content) -> ParsedRun:
    """Return the run with what fixes assign at the end of the file."""
    settings = {key: one for key, one in run.settings.items() if content.assigned.get(key, "") is not None}
    for key, text in content.assigned.items():
        if text is not None:
            line = settings[key].line if key in settings else 0
            settings[key] = SourcedValue(parse_value(text), line, content.path)
    return msgspec.structs.replace(run, settings=settings)


class _Config:
    """A config object in the file."""

    def __init__(self) -> None:
        self.settings: dict[str, SourcedValue] = {}
        self.recipe: SourcedValue | None = None
        self.model = ""


_Section = tuple[_Config, str]
"""A config and the key of one of its sections; the key is empty for the config itself."""


class _Reader:
    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self.names: dict[str, Any] = {}
        self.imported: dict[str, str] = {}  # local name → imported name
        self.modules: dict[str, str] = {}  # imported name → its module
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.assigned = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.options = option_defaults(tree)
        self.parsed = parsed_names(tree)
        self.configs: dict[str, _Config] = {}
        self.aliases: dict[str, _Section] = {}  # other names of configs and their sections
        self.visited = 0  # statements
        self.entered: list[str] = []  # functions whose call is being visited
        self.trained: str | _Config = ""  # the config passed to the training function, or its name
        self.goal: Goal | None = None

    def result(self) -> ParsedRun | None:
        """Return the trained config, else the first one, else None."""
        named_one = self.configs.get(self.trained) if isinstance(self.trained, str) else self.trained
        one = named_one or next((c for c in self.configs.values() if c.recipe or c.settings), None)
        if one is None or not (one.recipe or one.settings):
            return None
        if one.recipe is not None:
            one.settings["recipe"] = one.recipe
        named = str(one.recipe.value) if one.recipe else ""
        goal = COMMON.get(named) or infer_goal(named)
        if goal is None and self.goal == "sft" and any(key.startswith("peft") for key in one.settings):
            goal = "peft"
        found: Goal | None = goal or self.goal  # type: ignore[assignment]  # COMMON maps to goals
        return ParsedRun("python", one.settings, one.recipe, found, one.model)

    # Statements.

    def block(self, body: Iterable[ast.stmt], reason: str) -> None:
        """Visit statements in order; `reason` says why they may not execute."""
        for statement in body:
            self.statement(statement, reason)

    def statement(self, node: ast.stmt, reason: str) -> None:
        self.visited += 1
        if self.visited > MAX_STATEMENTS:
            raise InputError("repeats too many statements to be read", field="file", value=self.path)
        if isinstance(node, ast.ImportFrom | ast.Import):
            self.imported |= {alias.asname or alias.name: alias.name.rsplit(".", 1)[-1] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.modules |= {alias.name: module for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            for one in node.args.args:
                if one.arg in CONFIG_NAMES:
                    self.configs.setdefault(one.arg, _Config())
            self.block(node.body, reason)
        elif isinstance(node, ast.ClassDef):
            self.block(node.body, reason)
        elif isinstance(node, ast.If):
            inner = reason if _is_main(node.test) else CONDITION
            self.block(node.body, inner)
            self.block(node.orelse, CONDITION)
        elif isinstance(node, ast.For) and (elements := _elements(node)):
            for element in elements:
                self.assign(node.target, element, reason)
                self.block(node.body, reason)
            self.block(node.orelse, reason)
        elif isinstance(node, ast.For | ast.While):
            self.block([*node.body, *node.orelse], CONDITION)
        elif isinstance(node, ast.Try):
            self.block(node.body, reason)
            self.block([one for handler in node.handlers for one in handler.body], CONDITION)
            self.block([*node.orelse, *node.finalbody], reason)
        elif isinstance(node, ast.With):
            self.block(node.body, reason)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, node.value, reason)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value, reason)
        elif isinstance(node, ast.AugAssign):
            self.assign(node.target, node.value, RUNTIME_ONLY)
        elif isinstance(node, ast.Expr | ast.Return) and isinstance(node.value, ast.Call):
            self.call(node.value, reason)

    def assign(self, target: ast.expr, value: ast.expr, reason: str) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, value, reason)
            return
        if isinstance(target, ast.Tuple | ast.List):
            self.unpack(target.elts, value, reason)
            return
        config, path = self.path_of(target)
        if config is not None and path:
            self.put(config, path, value, reason)

    def unpack(self, targets: list[ast.expr], value: ast.expr, reason: str) -> None:
        """Assign the elements of `a, b = x, y`; without elements of their own, targets are known at run time."""
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if len(values) != len(targets) or any(isinstance(one, ast.Starred) for one in (*targets, *values)):
            values, reason = [value] * len(targets), reason or RUNTIME_ONLY
        for target, one in zip(targets, values, strict=True):
            self.assign(target, one, reason)

    def bind(self, name: str, value: ast.expr, reason: str) -> None:
        """Bind a name to a config, a section of one, or a constant; parsed arguments are none of them."""
        if name in self.parsed:
            return
        called = self.called(value)
        section = self.section(value)
        self.aliases.pop(name, None)
        if section is not None:
            self.aliases[name] = section
        elif called in self.functions and isinstance(value, ast.Call):
            self.configs[name] = self.enter(self.functions[called], value, reason)
        elif called in COMMON or (called.endswith("_config") and isinstance(value, ast.Call)):
            config = self.configs[name] = _Config()
            elsewhere = called in self.assigned or not self.modules.get(called, RECIPES).startswith(RECIPES)
            elsewhere = elsewhere and called not in COMMON
            unknown = reason or (f"{called} is no recipe of {RECIPES}" if elsewhere else "")
            config.recipe = SourcedValue(called, value.lineno, self.path, unknown)
            for keyword in value.keywords if isinstance(value, ast.Call) else ():
                if keyword.arg in ("peft_scheme", "peft") and not _is_none(keyword.value):
                    self.put(config, "--mode", keyword.value, reason)
        elif called == "ConfigContainer" and isinstance(value, ast.Call):
            self.configs[name] = _Config()
            self.fields(self.configs[name], "", value, reason)
        else:
            if called[:1].isupper():  # an object of another class: its attributes are no settings
                self.configs.pop(name, None)
            try:
                config_of = called == "from_pretrained" and self.text(value)  # config = AutoConfig.from_pretrained(ID)
                self.names[name] = (config_of or self.value(value)) if not reason else _fail()
            except _Unresolved:
                self.names.pop(name, None)

    def is_config(self, name: str) -> bool:
        return name in self.configs or name in self.aliases

    def section(self, node: ast.expr) -> _Section | None:
        """Return the config or section that an expression names; None for a value that the file sets."""
        config, key = self.path_of(node)
        return None if config is None or key in config.settings else (config, key)

    def enter(self, function: ast.FunctionDef, node: ast.Call, reason: str) -> _Config:
        """Visit a function with the configs and sections that a call passes to it; return the config it returns."""
        parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        passed = dict(zip(parameters, node.args, strict=False))
        passed |= {one.arg: one.value for one in node.keywords if one.arg}
        given = {name: section for name, value in passed.items() if (section := self.section(value)) is not None}
        if not given or function.name in self.entered:
            return self.returned(function)
        outer, self.aliases = self.aliases, self.aliases | given
        self.entered.append(function.name)
        self.block(function.body, reason)
        config = self.returned(function)
        self.entered.pop()
        self.aliases = outer
        return config

    def returned(self, function: ast.FunctionDef) -> _Config:
        """Return the config that a function of the file returns, as far as it is known."""
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
                config, key = self.path_of(node.value)
                if config is not None and not key:
                    return config
            if isinstance(node, ast.Return) and self.called(node.value) == "ConfigContainer":  # type: ignore[arg-type]
                config = _Config()
                self.fields(config, "", node.value, "")  # type: ignore[arg-type]
                return config
        return _Config()

    def call(self, node: ast.Call, reason: str) -> None:
        called = self.called(node)
        if called in TRAINERS:
            self.goal = self.goal or ("pretrain" if called == "pretrain" else "sft")
            named = [one.value for one in node.keywords if one.arg in CONFIG_NAMES]
            first = node.args[0] if node.args else named[0] if named else None
            if isinstance(first, ast.Call):
                self.bind("", first, reason)
            name = first.id if isinstance(first, ast.Name) else ""
            self.trained = self.aliases[name][0] if name in self.aliases else name
        elif called in self.functions:
            self.enter(self.functions[called], node, reason)
        elif called == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
            (config, path), name = self.path_of(node.args[0]), str(node.args[1].value)
            if config is not None:
                self.put(config, f"{path}.{name}".lstrip("."), node.args[2], reason)

    # Keys and values.

    def path_of(self, node: ast.expr) -> tuple[_Config | None, str]:
        """Return the config of an attribute path, and the key below it."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None, ""
        config, section = self.aliases.get(node.id) or (self.configs.get(node.id), "")
        return config, ".".join(one for one in (section, *reversed(parts)) if one)

    def put(self, config: _Config, key: str, node: ast.expr, reason: str) -> None:
        """Record an assignment to a config key."""
        if isinstance(node, ast.Call) and not reason and self.object(config, key, node):
            return
        try:
            value, unresolved = self.value(node), reason
        except _Unresolved:
            value, unresolved = ast.unparse(node)[:80], reason or RUNTIME_ONLY
        config.settings[key] = SourcedValue(value, node.lineno, self.path, unresolved)

    def object(self, config: _Config, key: str, node: ast.Call) -> bool:
        """Record a constructor call as config fields; return whether it was one."""
        called = self.called(node)
        if called == "to_megatron_provider":
            config.model = self.model_id(node) or config.model
            return key == "model"
        if called == "get_mixed_precision_config" and node.args:
            self.put(config, key, node.args[0], "")
            return True
        if called in PRESETS:
            config.settings[key] = SourcedValue(called, node.lineno, self.path)
            return True
        if called.endswith(("Config", "Provider", "Specs", "LoRA", "DoRA")):
            config.settings[f"{key}._target_"] = SourcedValue(called, node.lineno, self.path)
            self.fields(config, key, node, "")
            return True
        return False

    def fields(self, config: _Config, prefix: str, node: ast.Call, reason: str) -> None:
        for keyword in node.keywords:
            if keyword.arg is not None:
                self.put(config, f"{prefix}.{keyword.arg}".lstrip("."), keyword.value, reason)

    def model_id(self, node: ast.Call) -> str:
        """Return the id in AutoBridge.from_hf_pretrained(ID).to_megatron_provider(…)."""
        inner: ast.expr = node
        for _ in range(MAX_DEPTH):
            if isinstance(inner, ast.Call) and self.called(inner) in ("from_hf_pretrained", "from_hf_config"):
                return self.text(inner.args[0]) if inner.args else ""
            if isinstance(inner, ast.Call):
                inner = inner.func
            elif isinstance(inner, ast.Attribute):
                inner = inner.value
            else:
                break
        return ""

    def text(self, node: ast.expr) -> str:
        """Return a hub id or path, also the one in AutoConfig.from_pretrained(ID); empty if it is unknown."""
        if isinstance(node, ast.Call) and self.called(node) == "from_pretrained" and node.args:
            node = node.args[0]
        try:
            return str(self.value(node))
        except _Unresolved:
            return ""

    def called(self, node: ast.expr) -> str:
        """Return the original name of a called function."""
        if not isinstance(node, ast.Call):
            return ""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return self.imported.get(name, name)

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Evaluate a literal, a named constant, arithmetic, or a name such as torch.bfloat16."""
        if depth > MAX_DEPTH:
            raise _Unresolved
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float | str)):
            return _bounded(node.value)
        if isinstance(node, ast.Name) and node.id in self.names:
            return self.names[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(one, depth + 1) for one in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return _bounded(-_number(self.value(node.operand, depth + 1)))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = (_number(self.value(one, depth + 1)) for one in (node.left, node.right))
            try:
                return _bounded(OPERATORS[type(node.op)](left, right))
            except (ZeroDivisionError, OverflowError):
                raise _Unresolved from None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not self.is_config(node.value.id):
            owner = node.value.id
            if owner in self.parsed:
                return self.options[node.attr] if self.options.get(node.attr) is not None else _fail()
            is_name = owner in self.imported or owner[:1].isupper()  # a module, or an enum such as AttnBackend.flash
            return f"torch.{node.attr}" if owner == "torch" else node.attr if is_name else _fail()
        if isinstance(node, ast.JoinedStr):
            return _bounded("".join(str(self.value(one, depth + 1)) for one in node.values))
        if isinstance(node, ast.FormattedValue) and node.format_spec is None:
            return self.value(node.value, depth + 1)
        if isinstance(node, ast.Call):
            return self.call_value(node, depth)
        if isinstance(node, ast.Attribute):
            config, path = self.path_of(node)
            setting = config.settings.get(path) if config else None
            return _fail() if setting is None or setting.unresolved else setting.value
        raise _Unresolved

    def call_value(self, node: ast.Call, depth: int) -> Any:
        """Evaluate os.environ.get("NAME", DEFAULT) and os.getenv as the default, and int, float and str of values."""
        function = ast.unparse(node.func)
        if function in ENVIRONMENT and not node.keywords and len(node.args) == 2:
            return self.value(node.args[1], depth + 1)
        if function in CONVERSIONS and not node.keywords and len(node.args) == 1:
            try:
                return _bounded(CONVERSIONS[function](self.value(node.args[0], depth + 1)))
            except (TypeError, ValueError, OverflowError):
                raise _Unresolved from None
        raise _Unresolved


def _elements(loop: ast.For) -> list[ast.expr]:
    """Return the written elements of `for one in (x, y)`; none if the loop may end early."""
    ends_early = any(isinstance(one, ast.Break | ast.Continue) for one in ast.walk(loop))
    written = isinstance(loop.iter, ast.Tuple | ast.List) and len(loop.iter.elts) <= MAX_DEPTH
    return loop.iter.elts if written and not ends_early else []  # type: ignore[attr-defined]  # written


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _fail() -> Any:
    raise _Unresolved


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unresolved
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) <= MAX_NUMBER:
        raise _Unresolved
    return value


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
