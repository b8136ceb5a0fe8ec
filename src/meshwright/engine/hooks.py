"""What a Python program may bring to a training: its own loss, model class, and plan for the modules of that class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

LOSS_FIELD = "kernels.loss"
METHOD = "plain"  # the method that computes all logits, which a function of them needs


class Hooks(msgspec.Struct, frozen=True):
    """The hooks of one run; without them the recipe alone determines it."""

    loss: Callable[..., Any] | None = None  # (logits [n, vocab], labels [n]) -> loss per token [n]
    tp_plan: Mapping[str, str] | None = None  # path of a linear layer -> colwise, colwise_kv or rowwise
    model_class: type | None = None  # built in place of transformers' class for the model's config


NO_HOOKS = Hooks()


LOSS_KEY, CLASS_KEY = "loss function", "model class"


def hook_contract(hooks: Hooks) -> dict[str, str]:
    """Return the names of what determines the trained weights, by which a resumed run recognizes it."""
    named = {LOSS_KEY: hooks.loss, CLASS_KEY: hooks.model_class}
    return {key: _name(value) for key, value in named.items() if value is not None}


def _name(value: Any) -> str:
    named = getattr(value, "func", value)  # a functools.partial
    module = getattr(named, "__module__", "").replace("__mp_main__", "__main__")
    return f"{module}.{getattr(named, '__qualname__', type(named).__qualname__)}"


def with_loss(recipe: Recipe, loss: object, pinned: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the method that a loss function needs; raise if it cannot have one."""
    from meshwright.engine.diffusion.config import is_diffusion

    if loss is None:
        return recipe
    if not callable(loss):
        reason = "must be a function of logits and labels that returns the loss of every token"
        raise InputError(reason, field="loss", value=type(loss).__name__, fix=("loss=function",))
    if is_diffusion(recipe):
        raise InputError(f"{recipe.model} predicts no tokens; a loss function is for language models", field="loss")
    if pinned.get(LOSS_FIELD, METHOD) != METHOD:
        raise InputError(
            "never computes all logits, which a loss function takes",
            field=LOSS_FIELD,
            value=pinned[LOSS_FIELD],
            fix=(f"{LOSS_FIELD}={METHOD}", "without loss="),
        )
    return msgspec.structs.replace(recipe, kernels=msgspec.structs.replace(recipe.kernels, loss=METHOD))
