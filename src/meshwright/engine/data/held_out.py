"""Which data a recipe holds out for validation: a dataset of its own, a split, or a share."""

from __future__ import annotations

import msgspec

from meshwright.recipes.types import Recipe


class HeldOutSet(msgspec.Struct, frozen=True):
    """The validation data of a recipe by name."""

    dataset: str  # file, folder or name
    part: str = ""  # of the dataset, such as "split validation" or "2% held out"; empty: all of it

    def __str__(self) -> str:
        return f"{self.dataset} ({self.part})" if self.part else self.dataset


def part_of(shown: str) -> str:
    """Return the part in the text of a HeldOutSet; empty if it is all of its dataset."""
    return shown.rpartition(" (")[2] if shown.endswith(")") and " (" in shown else ""


def held_out_set(recipe: Recipe) -> HeldOutSet | None:
    """Return the validation data of a recipe; None if the recipe trains on all its data."""
    from meshwright.engine.data.instructions import names_a_dataset
    from meshwright.engine.data.registered import REGISTRY
    from meshwright.engine.diffusion.config import is_diffusion

    data = recipe.data
    names = list(data.blend) or [data.dataset]
    shown = ", ".join(names)
    if data.validation:
        own = recipe.goal == "pretrain" or is_diffusion(recipe) or names_a_dataset(data.validation)
        return HeldOutSet(data.validation) if own else HeldOutSet(shown, f"split {data.validation}")
    if data.validation_part and not all(is_mock(name) for name in names):
        return HeldOutSet(shown, f"{100 * data.validation_part:g}% held out")
    if all(is_mock(name) for name in names):
        return HeldOutSet(shown, "generated")
    known = [REGISTRY.get(name) for name in names]
    if recipe.goal != "pretrain" and all(one is not None and one.held_out for one in known):
        splits = dict.fromkeys(one.held_out for one in known if one is not None)
        return HeldOutSet(shown, f"split {', '.join(splits)}")
    return None


def is_mock(name: str) -> bool:
    """Return whether a dataset name means generated data."""
    return name == "mock" or name.endswith("-mock")
