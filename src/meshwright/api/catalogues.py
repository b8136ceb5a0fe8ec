"""What there is: recipes, models and rules; and recipes as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright import models, rules
from meshwright.api.resolve import recipe_from, write_text
from meshwright.errors import InputError, OutputError, unknown
from meshwright.models import ModelSpec
from meshwright.parsing import one_of
from meshwright.planner import Plan
from meshwright.recipes import files, index, types
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe
from meshwright.rules import Rule


def recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or one from a TOML, YAML or JSON file, with overrides applied."""
    return override.apply(recipe_from(name), list(overrides))


def find_recipes(
    query: str | None = None, *, goal: str | None = None, family: str | None = None, benchmark: bool | None = None
) -> list[index.IndexEntry]:
    """The index: recipes by name, family, size or goal; fuzzy when nothing matches to the letter."""
    wanted = None if goal is None else one_of("goal", goal, types.GOALS)
    return index.search(query, goal=wanted, family=family, benchmark=benchmark)


def recipe_text(found: Recipe, format: str = "toml") -> str:
    """A recipe as TOML, YAML, JSON or the Python that builds it."""
    return files.to_text(found, one_of("format", format, files.FORMATS))


def verification_reports() -> dict[str, dict[str, Any]]:
    """Return the verification report of each shipped recipe; empty outside a checkout of the sources."""
    from meshwright.dryrun import verification

    reports = verification.read()
    return {name: msgspec.to_builtins(report) for name, report in reports.items() if index.is_known(name)}


def save_recipe(plan: Plan, path: str) -> None:
    """Writes the plan's recipe as a TOML file that `check` and `recipe` read back."""
    if Path(path).suffix.lower() != ".toml":
        raise InputError("a recipe is saved as TOML", field="save", value=path, fix=(f"--save {Path(path).stem}.toml",))
    named = msgspec.structs.replace(plan.recipe, name=Path(path).stem)
    write_text(path, files.to_text(named, "toml"), "save")


def save_files(files: Mapping[str, str], folder: str) -> None:
    """Writes files into a folder, which is made if need be; never over a file that says something else."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot be made: {error.strerror}", field="out", value=folder) from error
    for name, text in files.items():
        there = place / name
        if there.exists() and (not there.is_file() or there.read_bytes() != text.encode()):
            raise OutputError("is there already and says something else", field="out", value=str(there))
        write_text(str(there), text, "out")


def model_catalogue(query: str | None = None) -> list[ModelSpec]:
    """Models whose name contains the query; all of them without one; a config.json is read."""
    if query is None:
        return list(models.all_specs())
    return [models.find(name) for name in models.search(query)] or [models.find(query)]


def rule_catalogue(query: str | None = None, *, pitfalls: bool = False) -> list[Rule]:
    """Rules by part of their id, those of other frameworks' files too; all of our own without one."""
    found = [r for r in rules.all_rules().values() if r.pitfall or not pitfalls]
    if query is None:
        return found
    named = [r for r in found if query.lower() in r.id.lower()]
    if not named and not pitfalls:
        from meshwright.frameworks import rule_catalog

        named = rule_catalog.find_rules(query)
    if not named:
        raise unknown("rule", query, rules.all_rules())
    return named
