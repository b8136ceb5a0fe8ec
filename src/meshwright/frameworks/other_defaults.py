"""What a front end trains with where its file has no key for it, as overrides of a command's recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from meshwright import clusters, models, planner
from meshwright.errors import MeshwrightError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.mapping import text_of
from meshwright.notes import no_notes
from meshwright.planner.match import find_baseline_recipe
from meshwright.recipes.types import Goal, Recipe, field_value

if TYPE_CHECKING:
    from meshwright.frameworks.front_ends.describe import FrontEnd

ADAPTERS = ("peft.rank", "peft.alpha", "peft.dropout", "peft.targets")
TRAINING = ("train.epochs", "optimizer.lr", "optimizer.weight_decay", "optimizer.beta1", "optimizer.beta2",
    "optimizer.eps", "optimizer.clip_grad", "schedule.name", "data.seq_length", "data.truncation")  # fmt: skip
WARMUP = "schedule.warmup_steps"
WARMUPS = ("warmup_steps", "warmup_ratio")


def defaults_of(
    front: FrontEnd, content: Content, found: Mapping[str, object], base: tuple[str, Goal, str], stated: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the fields that change what is learned and that only the front end's defaults set, with their values.

    `base` is model, goal and GPUs of the command: values that its recipe has too are left out, if it is known.
    `stated` are the fields that the command sets.
    """
    from meshwright.frameworks.front_ends import front_end
    from meshwright.frameworks.to_recipe import import_recipe

    theirs = ours = None
    with no_notes(), suppress(MeshwrightError):  # a file with an error of its own: check reports it
        theirs = import_recipe(front_end(front.name, content), content).recipe
        ours = _base(*base)
    if theirs is None:
        return
    fields = (*(ADAPTERS if base[1] == "peft" else ()), *TRAINING)
    steps = () if front.warmup or any(key in found for key in WARMUPS) else (WARMUP,)
    for field in (*fields, *steps):
        value = field_value(theirs, field)
        if field not in stated and (ours is None or value != field_value(ours, field)):
            yield field, f"[{','.join(value)}]" if isinstance(value, tuple) else text_of(value)


def _base(model: str, goal: Goal, gpus: str) -> Recipe:
    spec, cluster = models.find(model), clusters.cluster(gpus)
    return find_baseline_recipe(planner.Question(model=spec, model_ref=model, cluster=cluster, goal=goal))[0]
