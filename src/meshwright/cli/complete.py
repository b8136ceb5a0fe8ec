"""What the shell offers when the user presses tab."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from meshwright import api

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def _from(names: Callable[[], Iterable[str]]) -> Completer:
    return lambda context, parameter, typed: [name for name in names() if name.startswith(typed)]


models = _from(api.model_names)
recipes = _from(api.recipe_names)
gpus = _from(lambda: (f"{g.gpus_per_node}x{g.name}" for g in api.gpu_catalogue()))
goals = _from(lambda: api.GOALS)
engines = _from(lambda: api.ENGINES)
