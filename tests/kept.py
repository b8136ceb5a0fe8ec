"""Kept answers: what decides an answer, without its wording, as lines that a file keeps and a test compares.

A line has every number, choice and override of one part of the answer, and of a sentence its first words and numbers:
another wording changes nothing, another number or another reason does. `python -m tests.kept` writes all files anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # answers on unknown hub ids must not depend on the network
SAME = 2e-4  # relative; other platforms round differently
MODULES = (
    "rules.edges",
    "costs.kept_estimates",
    "costs.kept_schedules",
    "planner.kept_answers",
    "planner.kept_parts",
    "models.kept_models",
)
Answers = Mapping[str, Any]


def tokens(value: Any, name: str = "") -> Iterator[str]:
    """Yield what decides a value: its names, numbers and choices, and the first words and the numbers of a text."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from tokens(one, f"{name}.{key}" if name else str(key))
        return
    if name:
        yield f"{name}:"
    if isinstance(value, list | tuple):
        yield f"[{len(value)}]"
        for one in value:
            yield from tokens(one)
    elif isinstance(value, str):
        words = value.split()
        yield from (word for place, word in enumerate(words) if place < 2 or re.search(r"\d", word))
    elif isinstance(value, float):
        yield number(value)
    else:
        yield str(value)


def number(value: float) -> str:
    """Return a number that may differ by rounding, unlike a count."""
    text = f"{value:.6g}"
    return text if re.search(r"[.en]", text) else f"{text}."


def lines(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return an answer as one line per part."""
    return {str(name): " ".join(tokens(part)) for name, part in answer.items()}


def difference(kept: Any, now: Any) -> list[str]:
    """Return the parts of an answer that changed by more than rounding."""
    if not isinstance(kept, Mapping) or not isinstance(now, Mapping):
        return [] if same(str(kept), str(now)) else [f"{kept} before, {now} now"]
    names = dict.fromkeys((*kept, *now))
    return [f"{name}: {text}" for name in names for text in difference(kept.get(name), now.get(name))]


def first_difference(file: Path, answers: Iterable[tuple[str, Any]]) -> list[str]:
    """Return how the first answer that is not the kept one differs; answers after it are not computed."""
    known = load(file)
    for name, answer in answers:
        changed = difference(known.pop(name, "nothing"), answer)
        if changed:
            return [f"{name}: {text}" for text in changed]
    return [f"{name}: has no answer now" for name in known]


def same(kept: str, now: str) -> bool:
    """Return whether two lines differ by rounding only."""
    if kept == now:
        return True
    pairs = list(zip(kept.split(), now.split(), strict=False))
    return len(kept.split()) == len(now.split()) and all(a == b or _close(a, b) for a, b in pairs)


def _close(a: str, b: str) -> bool:
    if not re.search(r"[.e]", a + b):  # counts are equal or not
        return False
    try:
        return abs(float(a) - float(b)) <= SAME * abs(float(a))
    except ValueError:
        return False


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def write(path: Path, answers: Callable[[], Iterable[tuple[str, Any]]]) -> None:
    path.write_text(json.dumps(dict(answers()), indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for name in MODULES:
        module = import_module(f"tests.{name}")
        write(module.FILE, module.answers)
        print(module.FILE)
