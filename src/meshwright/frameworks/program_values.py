"""Values of expressions in a program that is not executed: literals, constants and the defaults of its options.

Options are those of argparse, click, typer and fire, and fields of dataclasses. A value that the command gives replaces
the default. An expression with anything else has no value here.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from meshwright.frameworks.types import SourcedValue

MAX_DEPTH = 12  # of names that are assigned from names: a cycle ends here
ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
CASTS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool}
SWITCHES = {"store_true": False, "store_false": True}  # actions of argparse, and the default of their option
OPTION_CALLS = (
    "Option",
    "Argument",
    "field",
    "Field",
    "option",
)  # typer, dataclasses, pydantic, click: they have a default
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
}
STARTS = (
    "Fire",
    "run",
    "cli",
    "CLI",
    "call",
    "from_cli",
    "wrap",
)  # fire, typer, tyro, plac, chz: functions of a command
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class _UnknownValueError(Exception):
    """The value is known only when the program runs."""


class ProgramValue(msgspec.Struct, frozen=True):
    """The value of an expression, and the options whose defaults make it."""

    value: Any
    options: tuple[str, ...] = ()


class ProgramValues:
    """The names of a program and what each one is, by its syntax."""

    def __init__(
        self, tree: ast.Module, given: Mapping[str, SourcedValue] | None = None, *, started: bool = False
    ) -> None:
        """`given` are the arguments of the command that starts the program, by name.

        `started`: they are all of them, so other options without a default are None; a variable of the environment is
        unknown.
        """
        self.given, self.started = given or {}, started
        nodes = list(ast.walk(tree))
        self.constants = constants(nodes)
        self.assigned: dict[str, list[ast.expr]] = {}
        for name, value in _assignments(nodes):
            self.assigned.setdefault(name, []).append(value)
        self.changed = {ast.unparse(one) for one in _targets(nodes) if not isinstance(one, ast.Name)}
        self.functions = [node for node in nodes if isinstance(node, Function)]
        self.calls: dict[str, list[ast.Call]] = {}
        self.commands: set[str] = set()  # functions whose parameters are options
        for node in nodes:
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                self.calls.setdefault(name, []).append(node)
                if name in STARTS:
                    self.commands |= {one.id for one in node.args if isinstance(one, ast.Name)}
            elif isinstance(node, ast.FunctionDef) and node.decorator_list:
                self.commands.add(node.name)
        self.options = _options(nodes)
        self.fields = _fields(nodes)
        self.classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}

    def find(self, node: ast.expr) -> ProgramValue | None:
        """Return the value of an expression; None if only the running program knows it."""
        options: list[str] = []
        try:
            value = self._value(node, options, 0)
        except (_UnknownValueError, ArithmeticError, ValueError, TypeError, KeyError, IndexError):
            return None
        return ProgramValue(value, tuple(dict.fromkeys(options)))

    def _value(self, node: ast.expr, options: list[str], depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _UnknownValueError
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            pass
        if isinstance(node, ast.Name):
            return self._named(node, options, depth + 1)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, options, depth + 1)
        if isinstance(node, ast.Call):
            return self._called(node, options, depth + 1)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = (self._value(one, options, depth + 1) for one in (node.left, node.right))
            return OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._value(node.operand, options, depth + 1)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            left, right = (self._value(one, options, depth + 1) for one in (node.left, node.comparators[0]))
            return COMPARISONS[type(node.ops[0])](left, right)
        if isinstance(node, ast.BoolOp):
            return self._either(node, options, depth + 1)
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test, options, depth + 1) else node.orelse, options, depth)
        if isinstance(node, ast.Subscript) and ast.unparse(node) not in self.changed:
            return self._value(node.value, options, depth + 1)[self._value(node.slice, options, depth + 1)]
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(one, options, depth + 1) for one in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {
                self._value(key, options, depth + 1): self._value(value, options, depth + 1)
                for key, value in pairs
                if key is not None
            }
        raise _UnknownValueError

    def _either(self, node: ast.BoolOp, options: list[str], depth: int) -> Any:
        """Return the value of `and` or `or`, up to the operand that decides it."""
        ends = isinstance(node.op, ast.Or)
        for one in node.values[:-1]:
            value = self._value(one, options, depth)
            if bool(value) is ends:
                return value
        return self._value(node.values[-1], options, depth)

    def _named(self, node: ast.Name, options: list[str], depth: int) -> Any:
        if node.id in self.constants:
            return self._value(self.constants[node.id], options, depth)
        holder = self._function_with(node)
        if holder is None:
            raise _UnknownValueError
        option = _decorated(holder, node.id)
        if option is not None:
            return self._default(option, options, depth)
        return self._one_of(list(self._passed(holder, node.id)), options, depth)

    def _attribute(self, node: ast.Attribute, options: list[str], depth: int) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "torch":  # torch.bfloat16
            return node.attr
        if ast.unparse(node) in self.changed or not isinstance(node.value, ast.Name):
            raise _UnknownValueError
        name = node.value.id
        made = self.constants.get(name)
        word = next((one.value for one in getattr(made, "keywords", ()) if one.arg == node.attr), None)
        if word is not None:
            return self._value(word, options, depth)
        holds = name in self.classes or self._function_with(node.value) is not None
        if not (all(map(self._is_parsed, self.assigned[name])) if name in self.assigned else holds):
            raise _UnknownValueError
        own = name in self.classes or ast.unparse(getattr(made, "func", node)) in self.classes  # not from the command
        candidates = [*self.options.get(node.attr, ()), *self.fields.get(node.attr, ())]
        return self._one_of(candidates, [] if own else options, depth)

    def _is_parsed(self, node: ast.expr) -> bool:
        """Return whether an expression is what a parser returns, or an object of a class of the program."""
        call = node.value if isinstance(node, ast.Subscript) else node
        if not isinstance(call, ast.Call):
            return False
        name = ast.unparse(call.func).rpartition(".")[2]
        own = {getattr(one, "name", "") for one in self.functions} | self.classes
        return "parse" in name.lower() or name in own or name in STARTS

    def _called(self, node: ast.Call, options: list[str], depth: int) -> Any:
        name = ast.unparse(node.func)
        if name in ENVIRONMENT and len(node.args) == 2 and not self.started:  # it holds unless the variable is set
            return self._value(node.args[1], options, depth)
        if name in CASTS and len(node.args) == 1 and not node.keywords:
            return CASTS[name](self._value(node.args[0], options, depth))
        if name == "dict" and not node.args and all(word.arg for word in node.keywords):
            return {word.arg: self._value(word.value, options, depth) for word in node.keywords}
        raise _UnknownValueError

    def _one_of(self, found: list[_Option | ast.expr], options: list[str], depth: int) -> Any:
        """Return the value that all candidates have."""
        values: list[tuple[Any, list[str]]] = []
        for one in found:
            named: list[str] = []
            if isinstance(one, _Option):
                values.append((self._default(one, named, depth), named))
            else:
                values.append((self._value(one, named, depth), named))
        if not values or any(repr(value) != repr(values[0][0]) for value, _ in values):
            raise _UnknownValueError
        options += values[0][1]
        return values[0][0]

    def _default(self, option: _Option, options: list[str], depth: int) -> Any:
        setting = self.given.get(option.name)
        if setting is not None:
            if setting.unresolved:
                raise _UnknownValueError
            text = setting.value
            return _literal(text) if isinstance(text, str) else text
        if option.default is None:
            if not self.started or option.is_positional or any(option.name.startswith(one) for one in self.given):
                raise _UnknownValueError
            options.append(f"--{option.name}")
            return None
        value = self._value(option.default, options, depth)
        if isinstance(value, str) and option.kind in ("int", "float"):  # argparse converts texts
            value = CASTS[option.kind](value)
        options.append(f"--{option.name}")
        return value

    def _function_with(self, node: ast.Name) -> Function | None:
        """Return the innermost function around a name that has it as a parameter."""
        around = [one for one in self.functions if one.lineno <= node.lineno <= (one.end_lineno or one.lineno)]
        for one in sorted(around, key=lambda one: -one.lineno):
            if any(parameter.arg == node.id for parameter in _parameters(one)):
                return one
        return None

    def _passed(self, function: Function, name: str) -> Iterator[_Option | ast.expr]:
        """Yield what calls pass for a parameter; its default, an option of fire or typer, if nothing calls it."""
        default = _parameter_default(function, name)
        own = getattr(function, "name", "")
        calls = self.calls.get(own, [])
        position = next((at for at, one in enumerate(_parameters(function)) if one.arg == name), None)
        for call in calls:
            if any(isinstance(one, ast.Starred) for one in call.args) or any(
                word.arg is None for word in call.keywords
            ):
                raise _UnknownValueError
            word = next((one.value for one in call.keywords if one.arg == name), None)
            if word is None and position is not None and position < len(call.args):
                word = call.args[position]
            word = default if word is None else word
            if word is None:
                raise _UnknownValueError
            yield word
        if not calls and own in self.commands:
            yield _Option(name, default)
        elif not calls and default is not None:
            yield default


class _Option(msgspec.Struct, frozen=True):
    """An option of a program and the expression of its default."""

    name: str
    default: ast.expr | None
    kind: str = ""
    is_switch: bool = False  # whether it has no value
    is_positional: bool = False  # whether the command gives it without its name


def constants(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """Return the names that are assigned once, with the expression."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = [*found[node.target.id], node.value]  # its value is another one
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _assignments(nodes: list[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield every name that is assigned with the expression; each one of several (a, b = parse())."""
    for node in nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for one in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(one, ast.Name) and isinstance(node, ast.Assign):
                    yield one.id, node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def _targets(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target


def _options(nodes: list[ast.AST]) -> dict[str, list[_Option]]:
    """Return the options of argparse by the attribute that holds them."""
    found: dict[str, list[_Option]] = {}
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        words = {word.arg: word.value for word in node.keywords if word.arg}
        if node.func.attr == "set_defaults":
            for name, value in words.items():
                found.setdefault(str(name), [])[:] = [_Option(str(name), value)]
        if node.func.attr == "add_argument" and (flags := _texts(node.args)):
            flag = next((one for one in flags if one.startswith("--")), flags[0]).lstrip("-").replace("-", "_")
            name = next(iter(_texts([words["dest"]])), flag) if "dest" in words else flag
            action = next(iter(_texts([words["action"]])), "") if "action" in words else ""
            default = words.get("default", ast.Constant(SWITCHES[action]) if action in SWITCHES else None)
            if default is not None and ast.unparse(default) == "None":
                default = None  # the program decides
            kind = ast.unparse(words["type"]) if "type" in words else ""
            is_positional = not any(one.startswith("-") for one in flags)
            found.setdefault(name, []).append(_Option(flag, default, kind, action in SWITCHES, is_positional))
    return found


def _fields(nodes: list[ast.AST]) -> dict[str, list[_Option]]:
    """Return the fields of the program's classes with a default: options of HfArgumentParser, tyro and others."""
    found: dict[str, list[_Option]] = {}
    for node in nodes:
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            targets = [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [])
            value = line.value if isinstance(line, ast.AnnAssign | ast.Assign) else None
            for target in targets:
                if isinstance(target, ast.Name) and value is not None:
                    found.setdefault(target.id, []).append(_Option(target.id, _inner_default(value)))
    return found


def _inner_default(value: ast.expr) -> ast.expr | None:
    """Return the default of typer.Option(8), field(default=8) and the like; other expressions are it themselves."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func).rpartition(".")[2] not in OPTION_CALLS:
        return value
    word = next((one.value for one in value.keywords if one.arg == "default"), None)
    found = word or (value.args[0] if value.args else None)
    return None if found is None or ast.unparse(found) in ("None", "...") else found


def _decorated(function: Function, name: str) -> _Option | None:
    """Return the option of click that is a parameter of a command."""
    for one in getattr(function, "decorator_list", ()):
        if isinstance(one, ast.Call) and ast.unparse(one.func).rpartition(".")[2] in ("option", "argument"):
            texts = _texts(one.args)
            plain = [text for text in texts if not text.startswith("-")]
            flag = next((text for text in texts if text.startswith("--")), "").lstrip("-").partition("/")[0]
            flag = flag.replace("-", "_")
            if name in plain or (not plain and flag == name):
                words = {word.arg: word.value for word in one.keywords}
                default = words.get("default")
                if default is None and ast.unparse(words.get("is_flag", ast.Constant(False))) == "True":
                    default = ast.Constant(False)
                return _Option(flag or name, default, ast.unparse(words["type"]) if "type" in words else "")
    return None


def _parameters(function: Function) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _parameter_default(function: Function, name: str) -> ast.expr | None:
    plain = [*function.args.posonlyargs, *function.args.args]
    pairs = [*zip(reversed(plain), reversed(function.args.defaults), strict=False)]
    pairs += [
        (one, value) for one, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if value
    ]
    found = next((value for parameter, value in pairs if parameter.arg == name), None)
    return None if found is None else _inner_default(found)


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text.lower(), text)
