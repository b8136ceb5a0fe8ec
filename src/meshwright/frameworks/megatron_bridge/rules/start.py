"""Rules for the recipe name, the runner's flags and the GPUs in the name."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import closest, some
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge import bridge_recipes, keys
from meshwright.frameworks.megatron_bridge.format_override import format_override
from meshwright.frameworks.megatron_bridge.rules.common import bridge_recipe, get_int, recipe_key, rule, uses_runner
from meshwright.frameworks.megatron_bridge.runner import SEQUENCE_LENGTH, min_gpus


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
    near = closest(name, bridge_recipes.names(), 1)
    family = [one for one in bridge_recipes.names() if one.partition("_")[0] == name.partition("_")[0]]
    hint = f"; did you mean {near[0]}?" if near else f"; it has {some(family)}" if family else ""
    fix = tuple(format_override("--recipe", one) if uses_runner(ctx) else f"{one}()" for one in near)
    return Problem(f"Megatron-Bridge has no recipe {name}{hint}", fix, key=key)


def _unimplemented_recipe(ctx: RuleContext) -> Problem | None:
    row = bridge_recipe(ctx)
    if row is None or not row.raises:
        return None
    other = next(
        iter(closest(row.name.replace("peft", "sft"), [n for n in bridge_recipes.names() if "_sft_" in n], 1)), ""
    )
    fix = (format_override("--recipe", other),) if other else ()
    return Problem(f"{ctx.parsed.name} raises NotImplementedError", fix, key=recipe_key(ctx))


def _no_recipe(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.is_set("--recipe") and ctx.is_set("--model"):
        yield Problem("--recipe and --model are exclusive", key="--model")
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
            value = True if ctx.get(key) is None else ctx.get(key)
            fix = (instead,) if instead else tuple(format_override(one, value) for one in near)
            word = key if key.startswith("--") or len(key) < 5 else key[1:]
            yield Problem(f"the runner rejects {word}" + (f"; use {fix[0]}" if fix else ""), fix, key=key)


def _dropped(ctx: RuleContext) -> Iterator[Problem]:
    for key in ctx.parsed.settings:
        if key.startswith("+"):
            near = [name for name in closest(key[1:], _names(), 1) if _is_similar(name, key[1:])]
            fix = (format_override(near[0], ctx.get(key)),) if near else ()
            yield Problem(f"{key} is accepted and dropped: {key[1:]} does not exist", fix, key=key)


def _is_similar(one: str, other: str) -> bool:
    from rapidfuzz import fuzz

    return fuzz.ratio(one, other) >= keys.SIMILARITY


def _names() -> list[str]:
    sections = [*keys.SECTIONS, "model", "dataset"]
    return [f"{section}.{name}" for section in sections for name in keys.fields(section)]


def _length_replaced(ctx: RuleContext) -> Problem | None:
    data, effective = get_int(ctx, "dataset.seq_length"), ctx.recipe.data.seq_length
    if not (uses_runner(ctx) or ctx.is_set("recipe") or data is not None):
        return None
    if data is None and (found := _older_length(ctx)) is not None:
        return found
    for key in ("model.seq_length", SEQUENCE_LENGTH):
        length = get_int(ctx, key)
        if length is None or length == effective:
            continue
        fix = (format_override("dataset.seq_length", length),)
        if uses_runner(ctx) or key != "model.seq_length":
            message = f"{key}={length} is overwritten by dataset.seq_length={effective}"
            return Problem(message, fix, key=key, severity="warning")
        return Problem(f"{key}={length} must equal dataset.seq_length={effective}", fix, key=key)
    return _recipe_lengths(ctx)


def _older_length(ctx: RuleContext) -> Problem | None:
    """dataset.sequence_length, assigned after the recipe: the length before 0.6; since then overwritten."""
    length, base = get_int(ctx, SEQUENCE_LENGTH), ctx.parsed.base
    if base is None or length is None or length != ctx.recipe.data.seq_length or length == base.data.seq_length:
        return None
    if ctx.is_set("dataset._target_") or get_int(ctx, "model.seq_length") not in (None, length):
        return None  # the constructor copies it; or another problem
    return Problem(
        f"{SEQUENCE_LENGTH}={length} sets the length before Megatron-Bridge 0.6; later versions overwrite it with the "
        f"recipe's dataset.seq_length={base.data.seq_length}",
        (format_override("dataset.seq_length", length),),
        key=SEQUENCE_LENGTH,
        severity="warning",
    )


def _recipe_lengths(ctx: RuleContext) -> Problem | None:
    """A recipe whose model and dataset have different lengths, where the file sets neither."""
    row = bridge_recipe(ctx)
    lengths = ("model.seq_length", "dataset.seq_length", "dataset.sequence_length")
    if row is None or row.model_length is None or any(map(ctx.is_set, lengths)):
        return None
    data = ctx.recipe.data.seq_length
    fix = (format_override("dataset.seq_length", row.model_length),)
    if uses_runner(ctx):
        message = f"the recipe's model.seq_length={row.model_length} is overwritten by its dataset.seq_length={data}"
        return Problem(message, fix, key=recipe_key(ctx), severity="warning")
    message = f"the recipe's model.seq_length={row.model_length} must equal its dataset.seq_length={data}"
    return Problem(message, fix, key=recipe_key(ctx))


def _name_against_launcher(ctx: RuleContext) -> Problem | None:
    encoded, request, row = bridge_recipes.gpus_in_name(ctx.parsed.name), ctx.parsed.gpu_request, bridge_recipe(ctx)
    if row is None or row.benchmark or encoded is None or request.count is None or request.source is None:
        return None  # the runner scales the batch of benchmarks
    if request.source is ctx.parsed.settings.get(recipe_key(ctx)) or request.count % encoded[0] == 0:
        return None
    if request.count % min_gpus(ctx.recipe) and min_gpus(ctx.recipe) > request.count:
        return None  # our own rule reports that the layout does not fit
    return Problem(
        f"the recipe is for {encoded[0]} GPUs, the launcher starts {request.count}",
        (format_override("--recipe", _alias(row)),) if row.aliases else (),
        key="--recipe",
    )


def _alias(row: bridge_recipes.BridgeRecipe) -> str:
    return row.aliases[0]


def _batch_does_not_scale(ctx: RuleContext) -> Problem | None:
    row, request = bridge_recipe(ctx), ctx.parsed.gpu_request
    if (
        row is None
        or not row.benchmark
        or not row.gpus
        or request.count is None
        or ctx.is_set("train.global_batch_size")
    ):
        return None
    batch = row.recipe().train.global_batch_size
    if batch * request.count % row.gpus == 0:
        return None
    return Problem(
        f"a global batch of {batch} on {row.gpus} GPUs does not scale to an integer on {request.count}",
        (format_override("train.global_batch_size", max(batch * request.count // row.gpus, 1)),),
        key="--recipe",
    )


RULES = (
    rule(
        "unknown-recipe", "error", ("--recipe", "recipe"), _unknown_recipe,
        "recipe not found at start-up",
        "recipes are functions: the name must match an exported function exactly",
    ),
    rule(
        "unimplemented-recipe", "error", ("--recipe", "recipe"), _unimplemented_recipe,
        "NotImplementedError when the recipe is built",
        "the function is a placeholder",
    ),
    rule(
        "recipe-or-model", "error", ("--model", "--recipe"), _no_recipe,
        "the runner prints its usage and exits",
        "a run is selected by a full recipe name, or by a model and a mode",
    ),
    rule(
        "unknown-flag", "error", (), _unknown_flag,
        "the runner prints its usage and exits",
        "the runner takes few flags; everything else is a trailing KEY=VALUE",
    ),
    rule(
        "dropped-key", "warning", (), _dropped,
        "the setting has no effect",
        "+ adds the key to a copy of the config, and only known fields are copied back",
    ),
    rule(
        "length-replaced", "error", ("model.seq_length",), _length_replaced,
        "training uses the recipe's length; without the runner, AssertionError that both lengths match",
        "after all overrides the runner copies the dataset length into the model",
    ),
    rule(
        "gpu-count-mismatch", "warning", ("--recipe",), _name_against_launcher,
        "training runs with a different batch per GPU than the recipe was tuned for",
        "the number in a recipe name is the GPU count its layout and batch were tuned for",
    ),
    rule(
        "batch-does-not-scale", "error", ("--recipe",), _batch_does_not_scale,
        "the runner cannot scale the global batch",
        "benchmarks keep their samples per GPU on any number of GPUs",
    ),
)  # fmt: skip
