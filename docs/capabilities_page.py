"""The page of what each engine executes, from the table that rules, estimate and planner read."""

from __future__ import annotations

from tables import table

from meshwright.choices import ENGINES
from meshwright.recipes.capabilities import CAPABILITIES, FP8_PARTS, describe
from meshwright.recipes.types import keys_by_flat_name

INTRO = """# Capabilities

What each engine executes. A value that an engine **refuses** is an error. One that it **ignores** is a warning that
says what runs instead, is never priced, and is replaced in the recipes that `recommend` prints. Fields that are not
listed are executed with every value by every engine; rules may still refuse combinations ([rules](rules.md)).

`meshwright explain FIELD` prints the row of one field; the table is `recipes/capabilities.py`.
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
    return (
        f"{INTRO}\n{table(('field', *ENGINES), rows)}\n"
        "`layout.offload=optimizer` of our engine moves weights and gradients to the host too: FSDP2 keeps them in one "
        "place, so it runs, and is priced, as `params`.\n\n"
        f"## Where fp8 applies\n\nWith `precision.matmul` other than same, these compute in the low format; attention, "
        f"routers, embeddings and heads never do.\n\n{table(('engine', 'computed in the format'), parts)}\n"
        f"## What is ignored, and why\n\n{table(('field', 'engine', 'where', 'why', 'rule'), ignored)}"
    )
