"""The baseline of a plan: the recipe for a question on its cluster and engine, with overrides applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.clusters import Cluster, cluster, is_missing_file
from meshwright.costs.stages import chunk_layers
from meshwright.display import plural
from meshwright.errors import InputError
from meshwright.models import ModelSpec, same_model
from meshwright.planner.match import BaselineSource, find_baseline_recipe
from meshwright.planner.plan import Question
from meshwright.planner.search import LAYOUT_NAMES, SEARCHED_NAMES
from meshwright.recipes import overrides as override
from meshwright.recipes.build import goal_data
from meshwright.recipes.capabilities import ENGINE_STRATEGY, adapted, executed_values, limited_fields
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.index import architecture_class
from meshwright.recipes.types import ENGINES, Architecture, Data, Recipe, field_value, keys_by_flat_name, recipe_fields
from meshwright.rules.model_families import is_qwen3_next
from meshwright.rules.pipeline import SPLITS_UNEVENLY

MAX_ADAPTATIONS = 5
FAST_ENGINES = (ENGINES[0], "torchtitan")  # whose kernels the planner chooses: users of both compile


class Baseline(msgspec.Struct, frozen=True):
    """The recipe of a question, the same recipe with the user's requests, and why its fields changed."""

    question: Question
    base: Recipe
    source: BaselineSource
    requested: Recipe
    case: Case
    pinned: Mapping[str, Any]  # layout values the user fixed, by flat name
    reasons: Mapping[str, str]  # by key
    executed: Mapping[str, str] = {}  # fields set to what the engine runs, and why, by key
    adapted: frozenset[str] = frozenset()  # keys of fields that a rule refuses in the recipe's layout
    fast: bool = False  # whether the planner chooses the kernels (planner/faster_step.py)

    @property
    def on_reference_cluster(self) -> bool:
        """Whether the recipe was made for this cluster, and neither its contract nor its layout is changed."""
        contract = any(recipe_fields()[key].kind != "layout" for key in self.reasons)
        return self.source == "same_model" and self.same_gpus and not contract and not self.pinned

    @property
    def same_gpus(self) -> bool:
        """Whether the recipe was made for the same number of the same GPUs."""
        reference, requested = self.base_cluster, self.question.cluster
        return reference is not None and (reference.world, reference.gpu) == (requested.world, requested.gpu)

    @property
    def base_cluster(self) -> Cluster | None:
        """The cluster the recipe was made for; None if its cluster file is not on this machine."""
        if is_missing_file(self.base.cluster):
            return None
        return cluster(self.base.cluster)


def baseline_for(question: Question, overrides: Sequence[str] = (), recipe: Recipe | None = None) -> Baseline:
    """Return the baseline of a question, or of the given recipe, with overrides and required adaptations applied.

    A recipe that the planner chooses for an engine that compiles blocks gets them; one that the user names keeps its
    kernels.
    """
    source: BaselineSource = "same_model"
    overrides, _ = override.split_auto(overrides)  # the search chooses what is not fixed
    base = recipe
    if base is None:
        base, source = _matched(question, overrides)
    requested, reasons = bind(base, question)
    if recipe is None:  # a recipe that the user names stays as it is; a rule reports what its GPU lacks
        requested, older = _with_supported_precision(requested, question.cluster)
        reasons = {**reasons, **older}
    wanted = override.requested(requested, overrides)
    if question.seq_length is not None and wanted.get("data.seq_length", question.seq_length) != question.seq_length:
        raise InputError(
            f"--seq is {question.seq_length}, but data.seq_length={wanted['data.seq_length']} is set; use one",
            field="seq",
            value=question.seq_length,
            fix=(f"data.seq_length={question.seq_length}",),
        )
    requested, _ = override.change(requested, wanted)
    reasons = {**reasons, **{key: _requested_reason(key) for key in wanted}}
    if override.MIN_LR in wanted and not _names(override.MIN_LR, overrides) and override.LR in wanted:
        share = wanted[override.MIN_LR] / wanted[override.LR]
        reasons[override.MIN_LR] = f"follows lr: {share:.3g} of it, as in the recipe; a new experiment"
    if recipe is None and (warmup := _longer_warmup(base, requested, frozenset(wanted))) is not None:
        requested, _ = override.change(requested, {WARMUP: warmup})
        reasons[WARMUP] = (
            f"follows steps: {base.schedule.warmup_steps:,} were for {plural(base.train.steps, 'step')}; "
            f"a long run warms up for 1% of its steps, at most {LONGEST_WARMUP:,}; a new experiment"
        )
    if wanted.get(override.IMAGES) is False and not _names(override.IMAGES, overrides):
        reasons[override.IMAGES] = "the dataset has no images: the language model is trained on text; a new experiment"
    model = model_of(requested) if any(key.startswith("architecture.") for key in wanted) else question.model
    requested, executed = _as_executed(requested, model, question, frozenset(wanted), is_named=recipe is not None)
    requested, fixed = _adapt(requested, model, question, frozenset(wanted))
    fast = recipe is None and question.engine in FAST_ENGINES and not question.benchmark
    if fast and "kernels.compile" not in wanted:
        requested = _compiled(requested, model, question)
    return Baseline(
        question=question,
        base=base,
        source=source,
        requested=requested,
        case=_case(requested, model, question),
        pinned={flat: value for key, value in wanted.items() if _is_searched(key, flat := recipe_fields()[key].flat)},
        reasons={**reasons, **fixed},
        executed=executed,
        adapted=frozenset(fixed),
        fast=fast,
    )


WARMUP = "schedule.warmup_steps"
LONGEST_WARMUP = 2000  # of published pretraining runs, however long


def _longer_warmup(base: Recipe, requested: Recipe, wanted: frozenset[str]) -> int | None:
    """Return the warmup of a pretraining that is longer than the recipe's; None if the recipe's may stay."""
    longer = requested.train.steps > base.train.steps and not requested.train.epochs
    usual = min(requested.train.steps // 100, LONGEST_WARMUP)
    if base.goal != "pretrain" or base.benchmark or not longer or WARMUP in wanted:
        return None
    return usual if 0 < 2 * requested.schedule.warmup_steps < usual else None


def _names(key: str, overrides: Sequence[str]) -> bool:
    """Return whether the overrides set one of our keys themselves."""
    return any(override.native_key(text.partition("=")[0].strip()) == key for text in overrides)


def _matched(question: Question, overrides: Sequence[str]) -> tuple[Recipe, BaselineSource]:
    """Return the recipe for the question; one in fp8 or for another length if the overrides ask for it."""
    base, source = find_baseline_recipe(question)
    if not overrides:
        return base, source
    there = msgspec.structs.replace(base, cluster=question.cluster_ref or str(question.cluster))
    return find_baseline_recipe(question, override.requested(there, overrides))


def baseline_recipe(question: Question, overrides: Sequence[str]) -> Recipe:
    """Return the recipe that the baseline of a question starts from."""
    return _matched(question, override.split_auto(overrides)[0])[0]


def _is_searched(key: str, flat: str) -> bool:
    """Return whether a search would otherwise choose this field."""
    return key.startswith("layout.") or flat in SEARCHED_NAMES


def case_of(recipe: Recipe, model: ModelSpec, on: Cluster, engine: Any = "meshwright") -> Case:
    """Return a case with a memory estimate, so that memory rules apply."""
    return Case(recipe, model, on, engine, memory_of=costs.memory)


def _case(recipe: Recipe, model: ModelSpec, question: Question) -> Case:
    case = case_of(recipe, model, question.cluster, question.engine)
    known = {"calibration": question.calibration, "mtbf_hours": question.mtbf_hours}
    given = {name: value for name, value in known.items() if value is not None}
    return case.replace(**given) if given else case


def with_engine_strategy(recipe: Recipe, engine: str) -> Recipe:
    """Return the recipe with fsdp2 replaced by the engine's equivalent."""
    if recipe.layout.strategy != "fsdp2" or engine not in ENGINE_STRATEGY:
        return recipe
    return msgspec.structs.replace(
        recipe, layout=msgspec.structs.replace(recipe.layout, strategy=ENGINE_STRATEGY[engine])
    )


def moved_to(recipe: Recipe, engine: str) -> Recipe:
    """Return a recipe that was made for another engine with this engine's equivalents.

    The strategy is another one if the engine does not have it, or not with the recipe's degrees; the format of the
    weights that the optimizer updates is another one if the engine refuses the recipe's.
    """
    found = _with_engine_master(with_engine_strategy(recipe, engine), engine)
    layout, known = found.layout, executed_values("strategy", engine)
    limits = [name for name in limited_fields(layout.strategy, engine) if getattr(layout, name) not in (1, False)]
    if not known or (layout.strategy in known and not limits):
        return _without_gather(found) if engine == "megatron" else found
    equivalent = ENGINE_STRATEGY.get(engine, "fsdp2")
    return msgspec.structs.replace(found, layout=msgspec.structs.replace(found.layout, strategy=equivalent))


def _without_gather(recipe: Recipe) -> Recipe:
    """Return a recipe of replicas without the overlap of a gather that they do not have, which Megatron refuses."""
    if recipe.layout.strategy != "ddp" or not recipe.kernels.overlap_param_gather:
        return recipe
    kernels = msgspec.structs.replace(recipe.kernels, overlap_param_gather=False)
    return msgspec.structs.replace(recipe, kernels=kernels)


def _with_engine_master(recipe: Recipe, engine: str) -> Recipe:
    known = executed_values("master", engine)
    if not known or recipe.precision.master in known:
        return recipe
    return msgspec.structs.replace(recipe, precision=msgspec.structs.replace(recipe.precision, master=known[0]))


def with_listed_stages(recipe: Recipe, model: ModelSpec, source: str, engine: str) -> Recipe:
    """Return a recipe made for the `source` engine with the stages that it makes unequal, as a list for `engine`.

    Ours and some others split layers evenly or as they are listed.
    """
    layout = recipe.layout
    layers, chunks = model.num_layers + layout.embedding_as_layer + layout.head_as_layer, layout.pp * layout.vp
    if source not in SPLITS_UNEVENLY or engine in SPLITS_UNEVENLY:
        return recipe
    if layout.stage_layers or layout.pp == 1 or layers % chunks == 0 or chunks > layers:
        return recipe
    ends = (int(layout.embedding_as_layer), int(layout.head_as_layer))
    listed = tuple(int(one) for one in chunk_layers(model.num_layers, (), chunks, *ends))
    split = msgspec.structs.replace(layout, stage_layers=listed, embedding_as_layer=False, head_as_layer=False)
    return msgspec.structs.replace(recipe, layout=split)


def bind(base: Recipe, question: Question) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe for the question's model, cluster, length and engine, and why its fields changed."""
    adapted = with_engine_strategy(base, question.engine)
    why: dict[str, str] = {}
    if not same_model(question.model_ref, base.model):
        adapted, why = _without_foreign_settings(adapted, question)
    data = adapted.data
    if question.seq_length is not None and question.seq_length != data.seq_length:
        data = msgspec.structs.replace(data, seq_length=question.seq_length)
        why["data.seq_length"] = _requested_reason("data.seq_length")
    recipe = msgspec.structs.replace(
        adapted,
        model=question.model_ref,
        cluster=question.cluster_ref or str(question.cluster),
        data=data,
        layout=msgspec.structs.replace(adapted.layout, dp_shard=-1),
    )
    return recipe, why


def _without_foreign_settings(base: Recipe, question: Question) -> tuple[Recipe, dict[str, str]]:
    """Return another model's recipe without what belongs to that model: data, architecture, weights and MTP loss.

    Batch, optimizer, schedule, precision, adapters and kernels stay: they are the reason to start from it.
    """
    model = question.model
    train, checkpoint = base.train, base.checkpoint
    own: dict[str, Any] = {"data": _own_data(base, question), "architecture": Architecture()}
    own["checkpoint"] = msgspec.structs.replace(checkpoint, pretrained="")
    own["train"] = train if model.mtp_layers else msgspec.structs.replace(train, mtp_loss=0.0)
    own["moe"] = msgspec.structs.replace(base.moe, balancing=_own_balancing(base, model))
    longest = model.max_seq_length
    if longest and own["data"].seq_length > longest and question.seq_length is None:
        own["data"] = msgspec.structs.replace(own["data"], seq_length=longest)
    recipe = msgspec.structs.replace(base, **own)
    why = {
        key: f"the default of {base.goal}, not the setting of {base.model}; a new experiment"
        for key in recipe_fields()
        if field_value(base, key) != field_value(recipe, key)
    }
    if "moe.balancing" in why:
        why["moe.balancing"] = (
            f"the routers of {model.name} {_ROUTERS[recipe.moe.balancing == 'bias']}; a new experiment"
        )
    if "data.seq_length" in why and recipe.data.seq_length == longest:
        why["data.seq_length"] = f"the model has {longest} positions; a new experiment"
    elif "data.seq_length" in why and base.goal == "pretrain" and recipe.data.seq_length < longest <= LONG:
        why["data.seq_length"] = (
            f"the default of {base.goal}, not the setting of {base.model}; {model.name} has {longest:,} positions: "
            f"--seq {longest} trains on all; a new experiment"
        )
    return recipe, why


LONG = 16_384  # positions of models that are usually pretrained at full length
_ROUTERS = {True: "have a bias that balances them in pretraining", False: "have no bias that could balance them"}


def _own_balancing(base: Recipe, model: ModelSpec) -> str:
    """Return how the routers of a model are balanced: by their bias in pretraining, if the architecture has one."""
    bias = model.moe is not None and model.moe.balance_bias
    if base.moe.balancing == "bias":
        return "bias" if bias else recipe_fields()["moe.balancing"].default
    return "bias" if bias and base.goal == "pretrain" else base.moe.balancing


def _own_data(base: Recipe, question: Question) -> Data:
    """Return the goal's data settings; latents of a diffusion model, and hybrids without packing, as in the recipe."""
    model = question.model
    if model.kind == "diffusion":
        return base.data
    data = goal_data(base.goal, images=model.kind == "vision_language" and base.data.images)
    hybrid = architecture_class(model)[2] == "hybrid"  # packing must reset the state between documents
    return msgspec.structs.replace(data, packing=data.packing and (base.data.packing or not hybrid))


def _with_supported_precision(recipe: Recipe, on: Cluster) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe in fp16 on GPUs older than bf16, and why."""
    gpu = on.gpu
    if recipe.precision.compute != "bf16" or "bf16" in gpu.peak_tflops or "fp16" not in gpu.peak_tflops:
        return recipe, {}
    why = f"{gpu.name} does not support bf16; fp16 needs loss scaling: a new experiment"
    precision = msgspec.structs.replace(recipe.precision, compute="fp16")
    return msgspec.structs.replace(recipe, precision=precision), {"precision.compute": why}


def _requested_reason(key: str) -> str:
    return "requested" + ("; a new experiment" if recipe_fields()[key].kind == "contract" else "")


def _as_executed(
    recipe: Recipe, model: ModelSpec, question: Question, keep: frozenset[str], is_named: bool
) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe with ignored layout fields set to what the engine runs, and why, by key.

    One that the user names keeps its fields. On another engine than its own it has kernels that the engine's files can
    say: the memory and the time of others are not those of the run.
    """
    if is_named and question.recipe_engine == question.engine:
        return recipe, {}
    found = adapted(recipe, _case(recipe, model, question), keep)
    found = {key: one for key, one in found.items() if not is_named or key.startswith("kernels.")}
    changed, _ = override.change(recipe, {key: value for key, (value, _why) in found.items()})
    return changed, {key: why for key, (_value, why) in found.items()}


def _compiled(recipe: Recipe, model: ModelSpec, question: Question) -> Recipe:
    """Return the recipe with compiled blocks, unless the engine cannot compile the model or a rule refuses it."""
    case = _case(recipe, model, question)
    if case.compile or case.is_diffusion or is_qwen3_next(case):  # torch cannot trace the gates of Qwen3-Next
        return recipe
    changed, _ = override.change(recipe, {"kernels.compile": True})
    trial = _case(changed, model, question)
    checked = [one for one in rules.applicable(trial, ("error",)) if one.subject != "memory"]
    refused = any(bool(one.broken(trial)) and not bool(one.broken(case)) for one in checked)
    return recipe if refused else changed


def _adapt(
    recipe: Recipe, model: ModelSpec, question: Question, fixed: frozenset[str]
) -> tuple[Recipe, dict[str, str]]:
    """Fix settings that this cluster or engine rejects at any degree; return the recipe and the reasons.

    Only layout fields outside the search change (a dispatcher, CUDA graphs, a kernel), never those the user set.
    """
    reasons: dict[str, str] = {}
    for _ in range(MAX_ADAPTATIONS):
        case = _case(recipe, model, question)
        change = next((c for c in _layout_fixes(case) if not fixed & set(c[0])), None)
        if change is None:
            break
        values, why = change
        recipe, _log = override.change(recipe, values)
        reasons |= dict.fromkeys(values, why)
    return recipe, reasons


def is_adaptable(rule: rules.Rule) -> bool:
    """Return whether some fix of a rule may change only layout fields outside the search."""
    changes = rule.subject != "memory" and rule.field not in LAYOUT_NAMES
    return changes and any(_outside_the_search() & fix.keys() for fix in rule.fixes)


@cache
def _outside_the_search() -> frozenset[str]:
    """Return the layout fields that no search changes, by flat name."""
    fields, keys = recipe_fields(), keys_by_flat_name()
    return frozenset(n for n, key in keys.items() if fields[key].kind == "layout" and n not in LAYOUT_NAMES)


def _layout_fixes(case: Case) -> Any:
    """Yield fixes of broken error rules that change only layout fields outside the search, with the rule's message."""
    searched = {f"layout.{name}" for name in LAYOUT_NAMES}
    fields = recipe_fields()
    for rule in rules.applicable(case, ("error",)):
        if not is_adaptable(rule) or not bool(rule.broken(case)):
            continue
        values = override.requested(case.recipe, rules.try_fixes(rule, case))
        if values and all(fields[key].kind == "layout" and key not in searched for key in values):
            yield values, rules.message(rule, case)
