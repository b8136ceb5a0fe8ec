"""Generate the pages of recipes, of their fields, and of those that differ from what was published."""

from __future__ import annotations

from collections.abc import Sequence

from tables import table

from meshwright import clusters, rules
from meshwright.planner import case_of
from meshwright.recipes import index
from meshwright.recipes.case import model_of
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import override_keys
from meshwright.recipes.types import Recipe, field_value, recipe_fields


def recipe_rows(entries: Sequence[index.IndexEntry]) -> list[tuple[object, ...]]:
    rows = []
    for e in entries:
        r = index.load(e.name)
        lay = r.layout
        rows.append(
            (
                f"`{e.name}`",
                e.goal,
                f"{e.gpus}x{e.gpu}",
                *(getattr(lay, a) for a in ("tp", "pp", "vp", "cp", "ep")),
                f"{r.data.seq_length:,}",
                r.train.global_batch_size,
                lay.micro_batch_size,
                r.precision.compute if r.precision.matmul == "same" else r.precision.matmul,
                lay.recompute,
            )
        )
    return rows


RECIPE_HEADERS = (
    "recipe",
    "goal",
    "GPUs",
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "tokens",
    "batch",
    "micro",
    "precision",
    "recompute",
)


def recipes_page(benchmark: bool) -> str:
    found = index.search(benchmark=benchmark)
    title = "Benchmark recipes" if benchmark else "Recipes"
    text = f"# {title}\n\n{len(found)} recipes. "
    text += (
        "Upper-bound throughput: 50 steps on mock data, balanced routing forced. Never a production setting.\n"
        if benchmark
        else "`meshwright recipe NAME` prints one in full; `meshwright recommend` sizes it to other GPUs.\n"
    )
    for family in sorted({e.family for e in found}):
        text += f"\n## {family}\n\n" + table(RECIPE_HEADERS, recipe_rows([e for e in found if e.family == family]))
    return text


def adapted_page() -> str:
    rows = []
    for e in index.entries():
        shipped, published = index.load(e.name), index.published_recipe(e.name)
        if published == shipped:
            continue
        case = case_of(published, model_of(published), clusters.cluster(published.cluster))
        why = "; ".join(f.message for f in rules.check(case, ("error",), fixes=False))
        rows.append((f"`{e.name}`", _layout(published), _differences(published, shipped), why))
    text = f"# Adapted recipes\n\n{len(rows)} recipes differ from the layout they were published with, because a rule "
    text += "refuses that layout or it does not fit on its GPUs. The reason is what the rules report today "
    text += "for the published layout; the shipped layout is the nearest one that passes.\n\n"
    return text + table(("recipe", "published", "shipped with", "why"), rows)


def _layout(r: Recipe) -> str:
    degrees = [f"{a}{getattr(r.layout, a)}" for a in ("tp", "pp", "vp", "cp", "ep") if getattr(r.layout, a) > 1]
    return f"{r.cluster}, {r.data.seq_length:,} tokens: {' '.join(degrees) or 'data parallel only'}"


def _differences(published: Recipe, shipped: Recipe) -> str:
    changes = [f"{published.cluster} → {shipped.cluster}"] if published.cluster != shipped.cluster else []
    for key in recipe_fields():
        old, new = field_value(published, key), field_value(shipped, key)
        if old != new:
            changes.append(format_override(f"`{key}", new) + "`")
    return ", ".join(changes)


def fields_page() -> str:
    foreign: dict[str, list[str]] = {}
    for word in override_keys().values():
        foreign.setdefault(word.field, []).append(f"`{word.key}`")
    text = "# Recipe fields\n\nAny field can be overridden as `key=value`, with our key or another framework's.\n\n"
    rows = [
        (f"`{key}`", f.kind, f.text, f"`{f.default}`", ", ".join(sorted(set(foreign.get(key, [])))))
        for key, f in recipe_fields().items()
    ]
    return text + table(("key", "kind", "meaning", "default", "other frameworks' keys"), rows)
