"""The page of what each engine executes, from the table that rules, estimate and planner read."""

from __future__ import annotations

from tables import table

from meshwright.choices import ENGINES, FRAMEWORKS, GOALS
from meshwright.recipes.capabilities import CAPABILITIES, FP8_PARTS, FRAMEWORK_GOALS, STRATEGY_LIMITS, describe
from meshwright.recipes.types import keys_by_flat_name

INTRO = """# Capabilities

What each engine executes. A value that an engine **refuses** is an error. One that it **ignores** is a warning that
says what runs instead, is never priced, and is replaced in the recipes that `recommend` prints. Fields that are not
listed are executed with every value by every engine; rules may still refuse combinations ([rules](rules.md)).

`meshwright explain FIELD` prints the row of one field, `meshwright explain capabilities ENGINE` the table of one
engine; the table is `recipes/capabilities.py`.
"""


def page() -> str:
    """Return the page."""
    keys = keys_by_flat_name()
    fields = list(dict.fromkeys(row.field for row in CAPABILITIES))
    rows = [(f"`{keys[field]}`", *describe(field).values()) for field in fields]
    parts = [(engine, ", ".join(FP8_PARTS[engine])) for engine in ENGINES]
    ignored = [
        (f"`{keys[row.field]}`", engine, row.where or "always", row.why[engine], f"`{row.warning}`")
        for row in CAPABILITIES
        for engine in row.ignoring
    ]
    limits = [(row.strategy, f"`{keys[row.field]}`", ", ".join(row.engines), row.cause) for row in STRATEGY_LIMITS]
    goals = [(name, ", ".join(FRAMEWORK_GOALS.get(name, GOALS))) for name in FRAMEWORKS]
    return (
        f"{INTRO}\n{table(('field', *ENGINES), rows)}\n"
        "`layout.offload=optimizer` of our engine moves weights and gradients to the host too: FSDP2 keeps them in one "
        "place, so it runs, and is priced, as `params`.\n\n"
        f"## Where fp8 applies\n\nWith `precision.matmul` other than same, these compute in the low format; attention, "
        f"routers, embeddings and heads never do.\n\n{table(('engine', 'computed in the format'), parts)}\n"
        f"## Strategies\n\nWhat a strategy does not combine with is an error.\n\n"
        f"{table(('strategy', 'does not support', 'engines', 'why'), limits)}\n"
        f"## Goals\n\nWhat `export --to` can write.\n\n{table(('framework', 'goals'), goals)}\n"
        f"## What is ignored, and why\n\n{table(('field', 'engine', 'where', 'why', 'rule'), ignored)}"
    )
