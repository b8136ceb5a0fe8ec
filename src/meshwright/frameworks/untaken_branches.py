"""Calls of a program that do not run with the options it is started with: those in branches that a known test skips."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import msgspec

from meshwright.frameworks.program_values import ProgramValues


class Test(msgspec.Struct, frozen=True):
    """The test that skips a branch."""

    text: str
    options: tuple[str, ...] = ()  # whose defaults decide it
    switch: str = ""  # the option that is the whole test: giving it runs the branch


def untaken_calls(tree: ast.Module, program: ProgramValues) -> dict[ast.Call, Test]:
    """Return the calls that do not run, each with the test that skips it.

    A test whose value only the running program knows skips nothing. A function that only skipped calls name is skipped
    with them.
    """
    found: dict[ast.Call, Test] = {}
    for node in ast.walk(tree):
        for branch, test in _skipped(node, program):
            found |= {call: test for call in _calls(branch) if call not in found}
    functions = {one.name: one for one in program.functions if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    for name, function in functions.items() if found else ():
        calls = [one for one in program.calls.get(name, ()) if isinstance(one.func, ast.Name)]
        if calls and all(one in found for one in calls) and not _is_passed(name, tree):
            found |= {call: found[calls[0]] for call in _calls([function]) if call not in found}
    return found


def _skipped(node: ast.AST, program: ProgramValues) -> Iterator[tuple[list[ast.AST], Test]]:
    """Yield the branch of a condition that its test skips."""
    if not isinstance(node, ast.If | ast.IfExp):
        return
    known = program.find(node.test)
    if known is None:
        return
    branch = node.orelse if known.value else node.body
    nodes: list[ast.AST] = [*branch] if isinstance(branch, list) else [branch]
    if nodes:
        yield nodes, skipping(node, known.options, bool(known.value))


def skipping(node: ast.If | ast.IfExp, options: tuple[str, ...], is_true: bool = False) -> Test:
    """Return the test of a condition as what its other branch needs; `options` decide it by their defaults."""
    text = ast.unparse(node.test)
    is_switch = not is_true and isinstance(node.test, ast.Name | ast.Attribute) and len(options) == 1
    return Test(f"not ({text})" if is_true else text, options, options[0] if is_switch else "")


def _calls(nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    yield from (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Call))


def _is_passed(name: str, tree: ast.Module) -> bool:
    """Return whether a function is used other than by calling it."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)
    return any(id(node) not in called for node in names)
