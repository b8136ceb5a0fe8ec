"""Asking for what is missing when a person sits at the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from meshwright import api
from meshwright.errors import InputError, MeshwrightError

EXAMPLE = "meshwright recommend llama3-8b --gpus 8xH100 --goal sft"


def ask_missing(model: str | None, gpus: str | None, goal: str | None) -> tuple[str, str, str]:
    """Model, GPUs and goal, asked for one by one on a terminal; elsewhere what is missing is an error."""
    missing = [name for name, value in (("MODEL", model), ("--gpus", gpus), ("--goal", goal)) if not value]
    if missing and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InputError(f"{', '.join(missing)} not given", field=missing[0], fix=(EXAMPLE,))
    model = model or _ask("Which model? (name, Hugging Face id, or config.json)", api.find_model)
    gpus = gpus or _ask("Which GPUs? (8xH100, 4x8xH100, auto, …)", api.find_cluster)
    goal = goal or _ask("Which goal? (pretrain, sft, peft)", api.find_goal)
    return model, gpus, goal


def _ask(question: str, understand: Callable[[str], object]) -> str:
    """Asks until the answer is understood; each misunderstanding is told with its did-you-mean."""
    while True:
        answer = str(click.prompt(question))
        try:
            understand(answer)
        except MeshwrightError as error:
            click.echo(f"  {error}", err=True)
        else:
            return answer
