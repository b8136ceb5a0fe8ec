"""What the letters somebody has typed may become."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from meshwright import clusters, frameworks, models
from meshwright.errors import closest, unknown
from meshwright.recipes import index
from meshwright.recipes.types import ENGINES, GOALS

_COUNT = re.compile(r"\s*((?:\d{1,6}\s*[x×*]\s*){1,2})(.*)", re.IGNORECASE)


def _clusters(typed: str) -> list[str]:
    """GPU types behind the count that was typed, or behind that of their usual node."""
    counted = _COUNT.fullmatch(typed)
    if counted is None:
        return [f"{gpu.gpus_per_node}x{gpu.name}" for gpu in clusters.gpus()]
    count = re.sub(r"\s*[x×*]\s*", "x", counted[1].strip(), flags=re.IGNORECASE)
    return [f"{count}{gpu.name}" for gpu in clusters.gpus()]


COMPLETED: dict[str, Callable[[str], Iterable[str]]] = {
    "models": lambda _: models.names(),
    "recipes": lambda _: index.names(),
    "targets": lambda _: (*models.names(), *index.names()),
    "gpus": lambda _: (gpu.name for gpu in clusters.gpus()),
    "clusters": _clusters,
    "goals": lambda _: GOALS,
    "engines": lambda _: ENGINES,
    "frameworks": lambda _: frameworks.NAMES,
}
"""The names there are to complete, by their kind."""


def complete(kind: str, typed: str, limit: int = 12) -> list[str]:
    """Names that begin as typed, then those that hold all its words, then those that are near."""
    if kind not in COMPLETED:
        raise unknown("kind", kind, COMPLETED)
    names = list(COMPLETED[kind](typed))
    asked = _plain(typed)
    words = [word for word in re.split(r"[\s\-_]+", typed.lower()) if word]
    begin = [name for name in names if _plain(name).startswith(asked)]
    hold = [name for name in names if name not in begin and all(_plain(word) in _plain(name) for word in words)]
    found = begin + hold
    return (found or closest(typed, names, limit))[:limit]


def _plain(text: str) -> str:
    return re.sub(r"[\s\-_.×*]+", "", text.lower())
