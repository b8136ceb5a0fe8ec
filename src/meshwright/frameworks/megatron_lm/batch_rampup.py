"""The batch that grows to the global batch: --rampup-batch-size START INCREMENT SAMPLES."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.clusters import Cluster
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_lm.accessors import get_text, is_on
from meshwright.frameworks.megatron_lm.arguments import format_flag
from meshwright.frameworks.megatron_lm.required_args import ITERATIONS, in_other_unit
from meshwright.frameworks.types import Settings, as_int
from meshwright.recipes.types import Recipe

KEY = "rampup_batch_size"
DEGREES = ("micro_batch_size", *(f"{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context")))


def rampup(ctx: RuleContext) -> Iterator[Problem]:
    """Start and increment must be shared by all data-parallel ranks and reach the global batch."""
    setting = ctx.parsed.settings.get(KEY)
    if setting is None or setting.unresolved or get_text(ctx, KEY) == "None":
        return
    given = setting.value if isinstance(setting.value, list | tuple) else [setting.value]
    if ctx.is_set("train_iters"):
        units = [key for key in ITERATIONS if ctx.is_set(key) and get_text(ctx, key) not in ("0", "None")]
        fix = tuple(text for key in units for text in in_other_unit(ctx, key))
        message = f"{format_flag(KEY, True)} cannot be combined with --train-iters: it counts samples"
        yield Problem(message, fix, key=KEY)
    if len(given) != 3 or not all(str(one).isdigit() for one in given):
        text = " ".join(map(str, given))
        yield Problem(f"{format_flag(KEY, text)}: expected three integers, START INCREMENT SAMPLES", key=KEY)
        return
    batch = ctx.recipe.train.global_batch_size
    if not batch or _is_open(ctx, "global_batch_size"):
        return
    start, increment, samples = (int(str(one)) for one in given)
    part = _part(ctx)
    problems = list(_problems(start, increment, batch, part, is_on(ctx, "decrease_batch_size_if_needed")))
    if problems:
        fixed = repaired(start, increment, batch, part)
        fix_text = format_flag(KEY, [*fixed, samples] if fixed else None)
        yield Problem(f"{format_flag(KEY, [start, increment, samples])}: {'; '.join(problems)}", (fix_text,), key=KEY)


def _is_open(ctx: RuleContext, key: str) -> bool:
    setting = ctx.parsed.settings.get(key)
    return setting is not None and bool(setting.unresolved)


def _part(ctx: RuleContext) -> int:
    """Return the samples of one micro batch on all data-parallel ranks; 1 if they are unknown."""
    if ctx.cluster is None or any(_is_open(ctx, key) for key in DEGREES):
        return 1
    return _samples_at_once(ctx.recipe, ctx.cluster)


def _samples_at_once(recipe: Recipe, cluster: Cluster) -> int:
    layout = recipe.layout
    return layout.micro_batch_size * max(1, cluster.world // (layout.tp * layout.pp * layout.cp))


def for_batch(settings: Settings, recipe: Recipe, cluster: Cluster) -> Sequence[int] | None:
    """Return a file's ramp-up for the batch and layout of a recipe: as many steps to it; empty if it cannot grow.

    None if the file has none that is valid, or it needs no change.
    """
    given, before = settings.get(KEY), as_int(settings.get("global_batch_size"))
    values = given.value if given is not None and not given.unresolved else None
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(str(one).isdigit() for one in values):
        return None
    start, increment, samples = (int(str(one)) for one in values)
    batch, part = recipe.train.global_batch_size, _samples_at_once(recipe, cluster)
    if not before or start >= before:
        return None
    if batch == before and not list(_problems(start, increment, batch, part, decreases=False)):
        return None
    share = batch / before
    first, step = max(1, round(start * share)), max(1, round(increment * share))
    if not list(_problems(first, step, batch, part, decreases=False)):
        return first, step, round(samples * share)
    found = repaired(first, step, batch, part)
    return (*found, round(samples * share)) if found else ()


def _problems(start: int, increment: int, batch: int, part: int, decreases: bool) -> Iterator[str]:
    if not start or not increment:
        yield "start and increment must be positive"
        return
    if start >= batch:
        yield f"the start {start} is not below the global batch {batch}"
    elif (batch - start) % increment:
        yield f"{batch} - {start} = {batch - start} is not divisible by the increment {increment}"
    wrong = {"start": start, "increment": increment}
    for name, size in wrong.items() if not decreases else ():
        if size % part and (name == "start" or start + size < batch):
            yield f"the {name} {size} is not divisible by micro batch × dp = {part}"


def repaired(start: int, increment: int, batch: int, part: int) -> Sequence[int]:
    """Return the start and increment nearest to these that the batch and its ranks allow; none if it does not grow."""
    if start >= batch or batch % part or batch < 2 * part:
        return ()
    units = batch // part
    first = min(max(1, round(start / part)), units - 1)
    steps = [one for one in range(1, units - first + 1) if (units - first) % one == 0]
    return first * part, min(steps, key=lambda one: abs(one * part - increment)) * part
