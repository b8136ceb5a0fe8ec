"""Complete the names that a user types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from meshwright import clusters, frameworks, models
from meshwright.api import requests
from meshwright.api.responses import Response
from meshwright.api.verb_function import verb
from meshwright.errors import closest
from meshwright.recipes import index
from meshwright.recipes.types import ENGINES, GOALS

_COUNT = re.compile(r"\s*(\d{1,6}(?:\s*[x×*]\s*\d{1,6})?)(?:\s*[x×*]\s*|\s+|$)(.*)", re.IGNORECASE)


def _clusters(typed: str) -> list[str]:
    """Return GPU types after the typed count, or after the size of their usual node."""
    counted = _COUNT.fullmatch(typed)
    if counted is None:
        return [f"{gpu.gpus_per_node}x{gpu.name}" for gpu in clusters.gpus()]
    count = re.sub(r"\s*[x×*]\s*", "x", counted[1], flags=re.IGNORECASE)
    return [f"{count}x{gpu.name}" for gpu in clusters.gpus()]


def _models(typed: str) -> Sequence[str]:
    """Return catalogue names, or Hugging Face ids if an organization was typed."""
    return models.hub_ids() if "/" in typed else models.names()


ADAPTER_GOALS = ("lora", "qlora", "dora")
NAMES: dict[str, Callable[[str], Iterable[str]]] = {
    "models": _models,
    "recipes": lambda _: index.names(),
    "targets": lambda typed: (*_models(typed), *index.names()),
    "gpus": lambda _: (gpu.name for gpu in clusters.gpus()),
    "clusters": _clusters,
    "goals": lambda _: (*GOALS, *ADAPTER_GOALS),
    "engines": lambda _: ENGINES,
    "frameworks": lambda _: frameworks.NAMES,
}
"""The names to complete, by kind."""


def starting_with(kind: str, typed: str) -> list[str]:
    """Return the names of a kind that start with what was typed, as shells complete them."""
    found = [name for name in NAMES[kind](typed) if name.startswith(typed)]
    if kind in ("models", "targets") and "-" in typed:  # a model's name is read with either separator
        found += [dashed for name in models.names() if (dashed := name.replace("_", "-")).startswith(typed)]
    return list(dict.fromkeys(found))


class CompleteResponse(Response, frozen=True, kw_only=True):
    """Names that match."""

    kind: str
    names: Sequence[str]


@verb(requests.Complete)
def complete_names(request: requests.Complete) -> CompleteResponse:
    """Return names that start with the query or contain all its words, else the closest, else those with most words."""
    names = list(NAMES[request.kind](request.query))
    typed = _plain(request.query)
    words = [word for word in re.split(r"[\s\-_]+", request.query.lower()) if word]
    starting = [name for name in names if _plain(name).startswith(typed)]
    matches = {name: sum(_plain(word) in _plain(name) for word in words) for name in names if name not in starting}
    containing = [name for name, count in matches.items() if count == len(words)]
    found = starting + containing or closest(request.query, names, request.limit)
    if not found:  # a word that no name has, such as the organization of a Hugging Face id
        most = max(matches.values(), default=0)
        found = [name for name, count in matches.items() if count == most > 0]
    return CompleteResponse(kind=request.kind, names=found[: request.limit])


def _plain(text: str) -> str:
    return re.sub(r"[\s\-_.×*]+", "", text.lower())
