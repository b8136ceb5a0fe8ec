"""The recipe, its flags and the GPUs that its name speaks of."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import closest
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge import bridge_recipes, keys
from meshwright.frameworks.megatron_bridge.format_override import spell
from meshwright.frameworks.megatron_bridge.rules.common import command, number, recipe_key, rule, shipped
from meshwright.frameworks.megatron_bridge.runner import least_gpus


def _unknown_recipe(ctx: RuleContext) -> Problem | None:
    key = recipe_key(ctx)
    setting = ctx.parsed.settings.get(key)
    if (
        setting is None
        or setting.unresolved
        or str(setting.value).startswith("_")
        or bridge_recipes.find(str(setting.value))
    ):
        return None
    name = str(setting.value)
    near = closest(name, bridge_recipes.names(), 2)
    hint = f"; did you mean {near[0]}?" if near else ""
    fix = tuple(spell("--recipe", one) if command(ctx) else f"{one}()" for one in near)
    return Problem(f"Megatron-Bridge has no recipe {name}{hint}", fix, key=key)


def _refused_recipe(ctx: RuleContext) -> Problem | None:
    row = shipped(ctx)
    if row is None or not row.raises:
        return None
    other = next(
        iter(closest(row.name.replace("peft", "sft"), [n for n in bridge_recipes.names() if "_sft_" in n], 1)), ""
    )
    fix = (spell("--recipe", other),) if other else ()
    return Problem(f"{ctx.parsed.name} exists and raises NotImplementedError", fix, key=recipe_key(ctx))


def _no_recipe(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.is_set("--recipe") and ctx.is_set("--model"):
        yield Problem("--recipe and --model exclude each other", key="--model")
    setting = ctx.parsed.settings.get("--recipe")
    if setting is not None and not setting.unresolved and not str(setting.value).endswith("_config"):
        mode = ctx.parsed.settings.get("--mode")
        if mode is None and bridge_recipes.find(f"{setting.value}_pretrain_config"):
            yield Problem("--model needs --mode", ("--mode pretrain", "--mode sft", "--mode lora"), key="--recipe")


def _unknown_flag(ctx: RuleContext) -> Iterator[Problem]:
    accepted = {*keys.RUNNER.values(), "--deterministic"}
    for key in ctx.parsed.settings:
        if key.startswith("-") and key not in accepted:
            instead = keys.INSTEAD.get(key)
            near = closest(key, [*keys.FLAGS, *keys.RUNNER], 1) if instead is None and key.startswith("--") else []
            fix = (instead,) if instead else tuple(near)
            word = key if key.startswith("--") or len(key) < 5 else key[1:]
            yield Problem(f"the runner refuses {word}" + (f"; say {fix[0]}" if fix else ""), fix, key=key)


def _dropped(ctx: RuleContext) -> Iterator[Problem]:
    for key in ctx.parsed.settings:
        if key.startswith("+"):
            near = [name for name in closest(key[1:], _names(), 1) if _alike(name, key[1:])]
            fix = (spell(near[0], ctx.get(key)),) if near else ()
            yield Problem(f"{key} is accepted and dropped: there is no {key[1:]}", fix, key=key)


def _alike(one: str, other: str) -> bool:
    from rapidfuzz import fuzz

    return fuzz.ratio(one, other) >= keys.ALIKE


def _names() -> list[str]:
    sections = [*keys.SECTIONS, "model", "dataset"]
    return [f"{section}.{name}" for section in sections for name in keys.fields(section)]


def _length_replaced(ctx: RuleContext) -> Problem | None:
    data, effective = number(ctx, "dataset.seq_length"), ctx.recipe.data.seq_length
    if not (command(ctx) or ctx.is_set("recipe") or data is not None):
        return None
    for key in ("model.seq_length", "dataset.sequence_length"):
        setting = number(ctx, key)
        if setting is None or setting == effective:
            continue
        fix = (spell("dataset.seq_length", setting),)
        if command(ctx) or key != "model.seq_length":
            return Problem(f"{key}={setting} is overwritten by dataset.seq_length={effective}", fix, key=key)
        return Problem(f"{key}={setting} and dataset.seq_length={effective} must be the same", fix, key=key)
    return None


def _name_against_launcher(ctx: RuleContext) -> Problem | None:
    encoded, asked, row = bridge_recipes.gpus_in(ctx.parsed.name), ctx.parsed.gpu_request, shipped(ctx)
    if row is None or row.benchmark or encoded is None or asked.count is None or asked.source is None:
        return None  # a benchmark's batch is scaled by the runner
    if asked.source is ctx.parsed.settings.get(recipe_key(ctx)) or asked.count % encoded[0] == 0:
        return None
    if asked.count % least_gpus(ctx.recipe) and least_gpus(ctx.recipe) > asked.count:
        return None  # our own rule says that the layout does not fit
    return Problem(
        f"the name says {encoded[0]} GPUs, the launcher starts {asked.count}",
        (spell("--recipe", _alias(row)),) if row.aliases else (),
        key="--recipe",
    )


def _alias(row: bridge_recipes.Upstream) -> str:
    return row.aliases[0]


def _batch_does_not_scale(ctx: RuleContext) -> Problem | None:
    row, asked = shipped(ctx), ctx.parsed.gpu_request
    if row is None or not row.benchmark or not row.gpus or asked.count is None or ctx.is_set("train.global_batch_size"):
        return None
    batch = row.recipe().train.global_batch_size
    if batch * asked.count % row.gpus == 0:
        return None
    return Problem(
        f"{batch} samples for {row.gpus} GPUs are no whole number on {asked.count}",
        (spell("train.global_batch_size", max(batch * asked.count // row.gpus, 1)),),
        key="--recipe",
    )


RULES = (
    rule(
        "unknown-recipe", "error", ("--recipe", "recipe"), _unknown_recipe,
        "the recipe is not found, before anything is built",
        "recipes are functions: the name must be one that the packages export, to the letter",
    ),
    rule(
        "refused-recipe", "error", ("--recipe", "recipe"), _refused_recipe,
        "NotImplementedError as soon as the recipe is built",
        "the function is there as a place holder",
    ),
    rule(
        "recipe-or-model", "error", ("--model", "--recipe"), _no_recipe,
        "the runner prints its usage and ends",
        "a run is chosen by one complete recipe, or by a model and a mode",
    ),
    rule(
        "unknown-flag", "error", (), _unknown_flag,
        "the runner prints its usage and ends",
        "it takes a short list of flags; everything else is a trailing KEY=VALUE",
    ),
    rule(
        "dropped-key", "warning", (), _dropped,
        "nothing: the run goes on without it",
        "+ adds the key to a copy of the config, and only known fields are copied back",
    ),
    rule(
        "length-replaced", "error", ("model.seq_length",), _length_replaced,
        "the run trains on the recipe's length; without the runner, an assertion that both lengths match",
        "after all overrides the length of the data is copied into the model",
    ),
    rule(
        "name-against-launcher", "warning", ("--recipe",), _name_against_launcher,
        "runs, with another batch per GPU than the recipe was made for",
        "the number in a recipe's name is the number of GPUs its layout and batch were chosen for",
    ),
    rule(
        "batch-does-not-scale", "error", ("--recipe",), _batch_does_not_scale,
        "the runner refuses to scale the global batch",
        "benchmarks keep their samples per GPU on any number of GPUs",
    ),
)  # fmt: skip
