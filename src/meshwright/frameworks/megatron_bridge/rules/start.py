"""The recipe, its flags and the GPUs that its name speaks of."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import closest
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge import bridge_recipes, keys
from meshwright.frameworks.megatron_bridge.format_override import spell
from meshwright.frameworks.megatron_bridge.rules.common import command, number, recipe_key, rule, shipped
from meshwright.frameworks.megatron_bridge.runner import least_gpus


def _unknown_recipe(look: RuleContext) -> Problem | None:
    key = recipe_key(look)
    said = look.parsed.settings.get(key)
    if said is None or said.unresolved or str(said.value).startswith("_") or bridge_recipes.find(str(said.value)):
        return None
    name = str(said.value)
    near = closest(name, bridge_recipes.names(), 2)
    hint = f"; did you mean {near[0]}?" if near else ""
    fix = tuple(spell("--recipe", one) if command(look) else f"{one}()" for one in near)
    return Problem(f"Megatron-Bridge has no recipe {name}{hint}", fix, key=key)


def _refused_recipe(look: RuleContext) -> Problem | None:
    row = shipped(look)
    if row is None or not row.raises:
        return None
    other = next(
        iter(closest(row.name.replace("peft", "sft"), [n for n in bridge_recipes.names() if "_sft_" in n], 1)), ""
    )
    fix = (spell("--recipe", other),) if other else ()
    return Problem(f"{look.parsed.name} exists and raises NotImplementedError", fix, key=recipe_key(look))


def _no_recipe(look: RuleContext) -> Iterator[Problem]:
    if look.says("--recipe") and look.says("--model"):
        yield Problem("--recipe and --model exclude each other", key="--model")
    said = look.parsed.settings.get("--recipe")
    if said is not None and not said.unresolved and not str(said.value).endswith("_config"):
        mode = look.parsed.settings.get("--mode")
        if mode is None and bridge_recipes.find(f"{said.value}_pretrain_config"):
            yield Problem("--model needs --mode", ("--mode pretrain", "--mode sft", "--mode lora"), key="--recipe")


def _unknown_flag(look: RuleContext) -> Iterator[Problem]:
    accepted = {*keys.RUNNER.values(), "--deterministic"}
    for key in look.parsed.settings:
        if key.startswith("-") and key not in accepted:
            instead = keys.INSTEAD.get(key)
            near = closest(key, [*keys.FLAGS, *keys.RUNNER], 1) if instead is None and key.startswith("--") else []
            fix = (instead,) if instead else tuple(near)
            word = key if key.startswith("--") or len(key) < 5 else key[1:]
            yield Problem(f"the runner refuses {word}" + (f"; say {fix[0]}" if fix else ""), fix, key=key)


def _dropped(look: RuleContext) -> Iterator[Problem]:
    for key in look.parsed.settings:
        if key.startswith("+"):
            near = [name for name in closest(key[1:], _names(), 1) if _alike(name, key[1:])]
            fix = (spell(near[0], look(key)),) if near else ()
            yield Problem(f"{key} is accepted and dropped: there is no {key[1:]}", fix, key=key)


def _alike(one: str, other: str) -> bool:
    from rapidfuzz import fuzz

    return fuzz.ratio(one, other) >= keys.ALIKE


def _names() -> list[str]:
    sections = [*keys.SECTIONS, "model", "dataset"]
    return [f"{section}.{name}" for section in sections for name in keys.fields(section)]


def _length_replaced(look: RuleContext) -> Problem | None:
    data, effective = number(look, "dataset.seq_length"), look.recipe.data.seq_length
    if not (command(look) or look.says("recipe") or data is not None):
        return None
    for key in ("model.seq_length", "dataset.sequence_length"):
        said = number(look, key)
        if said is None or said == effective:
            continue
        fix = (spell("dataset.seq_length", said),)
        if command(look) or key != "model.seq_length":
            return Problem(f"{key}={said} is overwritten by dataset.seq_length={effective}", fix, key=key)
        return Problem(f"{key}={said} and dataset.seq_length={effective} must be the same", fix, key=key)
    return None


def _name_against_launcher(look: RuleContext) -> Problem | None:
    encoded, asked, row = bridge_recipes.gpus_in(look.parsed.name), look.parsed.asked, shipped(look)
    if row is None or row.benchmark or encoded is None or asked.count is None or asked.said is None:
        return None  # a benchmark's batch is scaled by the runner
    if asked.said is look.parsed.settings.get(recipe_key(look)) or asked.count % encoded[0] == 0:
        return None
    if asked.count % least_gpus(look.recipe) and least_gpus(look.recipe) > asked.count:
        return None  # our own rule says that the layout does not fit
    return Problem(
        f"the name says {encoded[0]} GPUs, the launcher starts {asked.count}",
        (spell("--recipe", _alias(row)),) if row.aliases else (),
        key="--recipe",
    )


def _alias(row: bridge_recipes.Upstream) -> str:
    return row.aliases[0]


def _batch_does_not_scale(look: RuleContext) -> Problem | None:
    row, asked = shipped(look), look.parsed.asked
    if row is None or not row.benchmark or not row.gpus or asked.count is None or look.says("train.global_batch_size"):
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
