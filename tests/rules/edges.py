"""The edges of every rule: its verdict at, below and above each value its condition depends on.

From a rule's broken and its sound case, each field that the rule reads is set to values around those where the verdict
changes, alone and with every other field that it reads. The verdicts are kept in edges.json, one letter per case.
`python -m tests.rules.edges` writes them anew; a change in the file is a change of what the rule refuses.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tests import kept

from meshwright.recipes.case import Case
from meshwright.recipes.types import ENGINES, recipe_fields
from meshwright.rules import RULES, Rule, message

from .cases import broken_case, sound_case

FILE = Path(__file__).with_name("edges.json")
GRID = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 100, 128, 256, 512, 1000, 4096, 8192, 65536, 10**6)
MAX_VALUES = 12  # of one field
SCALES = (0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 5.0)
MAX_PAIRS = 90  # cases with two fields changed, of one rule
ERROR = "x"  # the condition has no answer there, e.g. it divides by zero


class Reads(Case):
    """A case that records which fields a rule reads."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "__dict__").setdefault("_read", {})[name] = None
        return super().__getattribute__(name)


def fields_read(rule: Rule, case: Case) -> list[str]:
    """Return the plain fields and facts that the rule reads in this case; properties are computed from those."""
    names = _names(rule, case)
    known = {**case._recipe_values, **case._facts}
    return [name for name in names if name in known]


def verdict(rule: Rule, case: Case) -> str:
    """Return 1 where the rule is broken, 0 where it is not."""
    try:
        return str(int(bool(rule.broken(case))))
    except (ArithmeticError, ValueError, TypeError, LookupError):
        return ERROR


def constants(rule: Rule) -> set[float]:
    """Return the numbers that the rule's condition names, also as constants and in functions of its module."""
    found: set[float] = set()
    waiting, seen = [inspect.unwrap(rule.broken)], set()
    while waiting:
        function = waiting.pop()
        seen.add(function)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(node, ast.Name):
                value = function.__globals__.get(node.id)
            if inspect.isfunction(value) and value not in seen and value.__module__.startswith("meshwright.rules"):
                waiting.append(value)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.add(value)
    return found


def values_to_try(rule: Rule, case: Case, name: str) -> list[Any]:
    """Return values of a field around those where the verdict changes."""
    now = getattr(case, name)
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, str):
        return [value for value in _choices(name) if value != now][:MAX_VALUES]
    if isinstance(now, int):
        return _integers(rule, case, name, now)
    if isinstance(now, float):
        near = {now * 0.5, now * 2, *(float(c) * f for c in constants(rule) for f in (0.999, 1, 1.001))}
        return sorted(near - {now})[:MAX_VALUES]
    if isinstance(now, tuple):
        moved = list(_moved(now)) if now and isinstance(now[0], int) else []
        return [value for value in ((), now[:1], now[:-1], *moved) if value != now]
    return []


def _moved(stages: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield lists of stages with other layers: one longer or shorter, and all equal but the first."""
    for place in range(min(len(stages), 2)):
        for by in (-4, -1, 1, 4):
            yield (*stages[:place], stages[place] + by, *stages[place + 1 :])
    mean = sum(stages) // len(stages)
    for by in range(9):
        yield (mean + by, *(mean - by,) * (len(stages) - 1))


def _integers(rule: Rule, case: Case, name: str, now: int) -> list[Any]:
    grid = sorted({*GRID, now, *(int(c) for c in constants(rule) if abs(c) < 1e9 and c == int(c))})
    seen = [(value, verdict(rule, case.replace(**{name: value}))) for value in grid]
    edges: dict[int, None] = {}
    for (low, before), (high, after) in pairwise(seen):
        if before != after:
            edges |= dict.fromkeys(_bisect(rule, case, name, low, high, before))
    usual = (1, now - 1, now + 1, 2 * now, 8 * now)
    return [value for value in dict.fromkeys((*edges, *usual)) if value != now][:MAX_VALUES]


def _bisect(rule: Rule, case: Case, name: str, low: int, high: int, before: str) -> tuple[int, int, int]:
    while high - low > 1:
        middle = (low + high) // 2
        if verdict(rule, case.replace(**{name: middle})) == before:
            low = middle
        else:
            high = middle
    return low, high, high + 1


def _choices(name: str) -> tuple[Any, ...]:
    for info in recipe_fields().values():
        if info.flat == name:
            literal = next((one for one in (info.type, *get_args(info.type)) if get_origin(one) is Literal), None)
            return get_args(literal) if literal is not None else ()
    return ("pretrain", "sft", "peft") if name == "goal" else ()


def cases_of(rule: Rule) -> Iterator[tuple[str, Case]]:
    """Yield the cases around the rule's broken and sound case, with what was changed."""
    for label, base in (("broken", broken_case(rule.id)), ("sound", sound_case(rule.id))):
        yield label, base
        for engine in ENGINES:
            other = Case(base.recipe, base.model, base.cluster, engine, dict(base._columns), base._memory_of)
            yield f"{label} on {engine}", other
        singles = [(name, value) for name in fields_read(rule, base) for value in values_to_try(rule, base, name)]
        for name, value in singles:
            yield f"{label} {name}={value}", base.replace(**{name: value})
        for factor in SCALES if base._memory_of is not None and "memory" in _names(rule, base) else ():
            yield f"{label} memory x {factor}", _scaled(base, factor)
        pairs = [(a, b) for a, b in combinations(singles, 2) if a[0] != b[0]]
        stride = max(-(-len(pairs) // MAX_PAIRS), 1)
        for (name, value), (other_name, other_value) in pairs[::stride]:
            text = f"{label} {name}={value} {other_name}={other_value}"
            yield text, base.replace(**{name: value, other_name: other_value})


def _names(rule: Rule, case: Case) -> list[str]:
    """Return what a rule reads of a case, in order."""
    watched = Reads(case.recipe, case.model, case.cluster, case.engine, dict(case._columns), case._memory_of)
    verdict(rule, watched)
    return list(watched.__dict__.get("_read", ()))


def _scaled(case: Case, factor: float) -> Case:
    """Return the case with every part of its memory larger or smaller."""
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead", "host")

    def memory(one: Case) -> Any:
        assert case._memory_of is not None
        found = case._memory_of(one)
        return dataclasses.replace(found, **{name: factor * getattr(found, name) for name in parts})

    return Case(case.recipe, case.model, case.cluster, case.engine, dict(case._columns), memory)


def verdicts(rule: Rule) -> dict[str, str]:
    """Return the verdict of each case around a rule's edges."""
    return {text: verdict(rule, case) for text, case in cases_of(rule)}


def answers() -> Iterator[tuple[str, list[str]]]:
    """Yield the message of each rule's broken case, and the verdicts in order, one letter each."""
    for id in sorted(RULES):
        yield id, [message(RULES[id], broken_case(id)), "".join(verdicts(RULES[id]).values())]


if __name__ == "__main__":
    kept.write(FILE, answers)
