"""Make a training fit that does not fit as asked: levers in the order of what they cost.

Levers of kind layout keep the trained weights: a loss without full logits, gradients reduced in every micro batch,
state or activations in host memory. The planner applies them by itself. Contract changes give other weights: narrower
optimizer state, adapters, 4-bit base weights, a shorter sequence. They are only listed, each with a layout that the
rules accept and that fits by the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright import costs, rules
from meshwright.clusters import Cluster
from meshwright.costs.state import least_state_gib, reduction_saves_memory
from meshwright.errors import MeshwrightError
from meshwright.models import ModelSpec
from meshwright.planner.baseline import Baseline, baseline_for
from meshwright.planner.faster_step import fast_values
from meshwright.planner.plan import Option, Question
from meshwright.planner.printed_commands import command_for_model, command_for_target, is_override
from meshwright.planner.search import (
    COSTS_LITTLE,
    LEVER_NAMES,
    MAY_NOT_FIT,
    SURELY_FITS,
    Candidate,
    ScoredBatch,
    as_overrides,
    best,
    changed_values,
    choose,
    grown,
    score,
    scored_layouts,
)
from meshwright.planner.space import FREE_SPACE, LEVER_SPACE, Space, candidates
from meshwright.recipes import overrides as override
from meshwright.recipes.capabilities import can_export
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.model_changes import argument
from meshwright.recipes.types import FieldKind, Recipe, field_value, recipe_fields
from meshwright.rules.memory import CHUNKED_LOSSES, REDUCES_AT_WILL

ALWAYS_TYPED = ("tp", "pp", "vp", "cp", "ep", "micro_batch_size", "recompute")
"""Fields that an option's overrides always name, so that its command gives exactly its layout."""
SMALL = 8  # GPUs up to which stages may be uneven
SHORTEST = 512  # tokens of a sample below which no shorter sequence is proposed
MOST_HOST_GIB = 2048  # host memory per GPU beyond which no node is sold
WORTH = 0.8  # of the step time of a plan that fits on the GPUs; another change must be that much faster
FASTER = 0.95  # of the step time of an option that costs less; another one must be that much faster
SLOW = 1.5  # times the step time with unlimited memory: host memory may be faster
SLOWED = 1.2  # the same if a layout does not surely fit: what needs less memory may be faster
GOOD_MFU = 0.35  # above it, host memory gains little
GROWS_UP_TO = 2.0  # times the fastest step time with a small micro batch: degrees for which larger ones are tried
MAX_GROWN = 64  # layouts with a small micro batch that decide which degrees those are
COST_OF = {
    "chunked": "the loss computes logits chunk by chunk",
    "fused_linear": "the loss computes logits chunk by chunk",
    "vocab_parallel": "the loss keeps one copy of the logits",
    "defer_grad_sync": "gradients are reduced after every micro batch",
    "activations": "activations are copied to host memory and back",
    "optimizer": "the host keeps and updates the weights; the GPU copies them layer by layer",
    "params": "the host keeps the weights; the GPU copies them layer by layer",
}
ADAPTERS_COST = "adapters are trained instead of all weights"
STATES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bf16 moments", "the optimizer's first moment loses precision", {"precision.moments": "bf16"}),
    ("8-bit moments", "the optimizer's moments are quantized to 8 bits", {"optimizer.name": "adamw8bit"}),
    (
        "bf16 weights and moments",
        "updates smaller than the last bit of a bf16 weight are lost",
        {"precision.master": "bf16", "precision.moments": "bf16"},
    ),
    (
        "bf16 weights, 8-bit moments",
        "updates smaller than the last bit of a bf16 weight are lost, and moments are quantized",
        {"precision.master": "bf16", "optimizer.name": "adamw8bit"},
    ),
)
"""Narrower optimizer state, in the order of what it costs: title, cost, values."""

Values = dict[str, Any]  # by flat name


def without_offload(case: Case, pinned: Mapping[str, Any]) -> list[Values]:
    """Return changes of layout kind that need no host memory, the leanest last."""
    known, key = case.cached(_known_levers), repr(sorted(pinned.items()))  # asked for at every stage of an answer
    if key not in known:
        known[key] = _without_offload(case, pinned)
    return known[key]


def _known_levers(case: Case) -> dict[str, list[Values]]:
    return {}


def _without_offload(case: Case, pinned: Mapping[str, Any]) -> list[Values]:
    losses = [] if "loss" in pinned or not case.vocab else _lean_losses(case, pinned)
    changes: list[Values] = [{"loss": loss} for loss in losses]
    if "defer_grad_sync" not in pinned and case.defer_grad_sync and case.engine in REDUCES_AT_WILL:
        changes += [{**one, "defer_grad_sync": False} for one in changes or [{}]]
    return changes


def _lean_losses(case: Case, pinned: Mapping[str, Any]) -> list[str]:
    """Return the losses that may need less memory than the recipe's, the leanest one for few tokens last.

    Chunks save most with many tokens per micro batch; with few, the logits are smaller than what chunks add.
    """
    lean = case.replace(**{"micro_batch_size": 1, "recompute": "full", "recompute_modules": (), **pinned})

    @cache
    def gib(loss: str) -> float:
        return float(costs.memory(lean.replace(loss=loss)).total)

    written = [loss for loss in ("vocab_parallel", *CHUNKED_LOSSES) if can_export("loss", case.engine, loss)]
    known = [loss for loss in written if _is_supported(case, "loss", loss)]
    chunked = [loss for loss in CHUNKED_LOSSES if loss in known and case.loss not in CHUNKED_LOSSES][:1]
    leanest = [loss for loss in (min(known, key=gib, default=case.loss),) if gib(loss) < gib(case.loss)]
    return [*(loss for loss in chunked if loss not in leanest), *leanest]


def with_offload(case: Case, pinned: Mapping[str, Any]) -> list[Values]:
    """Return changes of layout kind that use host memory, each with the leanest other settings."""
    if "offload" in pinned or case.offload != "none":
        return []
    both = ("optimizer", "params") if case.engine != "meshwright" else ("optimizer",)  # the same in our engine
    state = ("params",) if case.goal == "peft" else both
    activations = ("activations",) if may_fit(case) else ()
    kinds = [kind for kind in (*state, *activations) if _is_supported(case, "offload", kind)]
    lean = without_offload(case, pinned)
    return [{**one, "offload": kind} for kind in kinds for one in ({}, *(lean[:1] if kind == "activations" else lean))]


def _is_supported(case: Case, name: str, value: Any) -> bool:
    """Return whether no error rule about this field itself refuses the value for this engine and model."""
    changed = case.replace(**{name: value}, strategy=case.strategy, recompute="none", recompute_layers=0)
    about = [r for r in rules.applicable(case, ("error",)) if r.field == name and r.subject != "memory"]
    return not any(bool(np.all(r.broken(changed))) for r in about)


def with_levers(case: Case, pinned: Mapping[str, Any], found: Candidate, offloads: bool = True) -> Candidate:
    """Return the best layout with levers of layout kind if the one found has no headroom, may not fit or is slow.

    Host memory is used if nothing else fits or if it is faster, and not at all without `offloads`.
    """
    sure = found.has_headroom and found.chance >= MAY_NOT_FIT
    plain = (
        choose(faster_on_the_gpus(case, pinned, found), case) or found if sure else _on_the_gpus(case, pinned, found)
    )
    return choose(faster_with_offload(case, pinned, plain), case) or plain if offloads else plain


def _on_the_gpus(case: Case, pinned: Mapping[str, Any], found: Candidate) -> Candidate:
    """Return the best layout with levers that need no host memory; the one found if they do not help."""
    if found.has_headroom and found.chance >= MAY_NOT_FIT:
        return choose(faster_on_the_gpus(case, pinned, found), case) or found
    batches = lever_layouts(case, pinned, offloads=False)
    if found.has_headroom:  # but the error band of its estimate is wide
        lean = choose(_surer_than(found, batches), case)
        return found if lean is None else msgspec.structs.replace(lean, faster=found)
    lean = choose(batches, case)
    if lean is not None and lean.fits and (lean.has_headroom or not found.fits):
        return lean
    return choose(better_than(found, batches), case) or found if found.fits else found


def faster_on_the_gpus(case: Case, pinned: Mapping[str, Any], found: Candidate) -> list[ScoredBatch]:
    """Return layouts with levers that need no host memory if memory makes a layout with headroom slower than these."""
    if not found.has_headroom or not _is_slow(case, pinned, found, sure=False):
        return []
    batches = lever_layouts(case, pinned, offloads=False)
    least = min(found.chance, SURELY_FITS)
    kept = [b.has_headroom & (b.chance >= least) & (b.step_s <= FASTER * found.step_s) for b in batches]
    return [batch.rows(rows) for batch, rows in zip(batches, kept, strict=True) if rows.any()]


def faster_with_offload(case: Case, pinned: Mapping[str, Any], plain: Candidate) -> list[ScoredBatch]:
    """Return the layouts in host memory that fit, if the best one without does not or is slower.

    A layout with headroom on the GPUs is replaced only for a clear gain, or for a gain and a layout that surely fits.
    Both are searched for only where memory makes it slow.
    """
    sure = plain.chance >= SURELY_FITS
    if plain.has_headroom and not (_may_offload(case, pinned, plain) and _is_slow(case, pinned, plain, sure)):
        return []
    batches = lever_layouts(case, pinned, offloads=True)
    if plain.has_headroom:
        worth = (np.where(sure | (b.chance < SURELY_FITS), WORTH, FASTER) for b in batches)
        kept = [b.has_headroom & (b.step_s <= gain * plain.step_s) for b, gain in zip(batches, worth, strict=True)]
    else:
        kept = [batch.fits & (batch.step_s <= plain.step_s) for batch in batches]
    return [batch.rows(rows) for batch, rows in zip(batches, kept, strict=True) if rows.any()]


def _may_offload(case: Case, pinned: Mapping[str, Any], plain: Candidate) -> bool:
    return plain.layout["offload"] == "none" and "offload" not in pinned and may_fit(case, offloads=True)


def _is_slow(case: Case, pinned: Mapping[str, Any], plain: Candidate, sure: bool) -> bool:
    """Return whether memory limits make a layout slow, by more if it surely fits; the cheaper question comes first."""
    if float(costs.estimate(case.replace(**plain.layout)).mfu) > GOOD_MFU:
        return False
    return plain.step_s > (SLOW if sure else SLOWED) * unlimited_s(case, pinned)


def _surer_than(found: Candidate, batches: list[ScoredBatch]) -> list[ScoredBatch]:
    """Return the layouts that fit at least probably and cost little more than one that may not fit."""
    kept = [b.has_headroom & (b.chance >= MAY_NOT_FIT) & (b.step_s <= COSTS_LITTLE * found.step_s) for b in batches]
    return [batch.rows(rows) for batch, rows in zip(batches, kept, strict=True) if rows.any()]


def better_than(found: Candidate, batches: list[ScoredBatch]) -> list[ScoredBatch]:
    """Return the layouts that need less memory than the one found and are not slower."""
    better = [batch.rows((batch.total_gib < found.total_gib) & (batch.step_s <= found.step_s)) for batch in batches]
    return [batch for batch in better if len(batch)]


def levers_of(found: Candidate, case: Case) -> Values:
    """Return the levers of layout kind that a layout uses and the case does not, by flat name."""
    changed = changed_values(found.layout, case, ("offload", *LEVER_NAMES))
    return {name: value for name, value in changed.items() if value != "none"}  # a recipe's offload may be dropped


def host_needed(case: Case) -> tuple[str, float] | None:
    """Return what to offload, and the least GiB of host memory per GPU with which that fits.

    None if no layout fits however large the host is, or only with more memory than hosts have.
    """
    if case.optimizer_name == "adamw8bit" or least_state_gib(case) > MOST_HOST_GIB:
        return None
    free = case.replace(host_gib=np.inf)
    leanest = {one["offload"]: one for one in with_offload(free, {})}  # the last of a kind needs the least GPU memory
    changed = [free.replace(**one) for one in leanest.values()]
    batches = (
        [batch for one in changed for batch in score(one, {}, _for_cluster(LEVER_SPACE, case))]
        if case.offload == "none"
        else scored_layouts(free, {"offload": case.offload})
    )
    needed = [
        (
            float(np.min(np.broadcast_to(costs.memory(fitting.case).host, fitting.fits.shape))),
            fitting.row(0).layout["offload"],
        )
        for fitting in (batch.rows(batch.fits) for batch in batches if batch.fits.any())
    ]
    gib, kind = min(needed, default=(np.inf, ""))
    return (kind, gib) if gib <= MOST_HOST_GIB else None


def lever_batches(case: Case, pinned: Mapping[str, Any]) -> list[ScoredBatch]:
    """Return layouts with levers of layout kind, scored; those that use host memory only if no other fits."""
    lean = lever_layouts(case, pinned, offloads=False)
    return lean if any(batch.fits.any() for batch in lean) else [*lean, *lever_layouts(case, pinned, offloads=True)]


def lever_layouts(case: Case, pinned: Mapping[str, Any], offloads: bool, unchanged: bool = False) -> list[ScoredBatch]:
    """Return layouts with and without a lever, scored; none if the state is too large for any of them."""
    if not may_fit(case, offloads):
        return []
    changed = _changed_cases(case, pinned, offloads)
    tried = [case, *changed] if unchanged and not offloads else changed
    found: list[ScoredBatch] = []
    for space in _lever_spaces(case, pinned):
        scored = _scored_in(tried, pinned, space)
        found = [*(() if pinned else found), *(batch for batches in scored.values() for batch in batches)]
        if any(batch.fits.any() for batch in found):
            more = (_grown(tried[place], pinned, space, batches) for place, batches in scored.items())
            return [*found, *(batch for batches in more for batch in batches)]
    return found


def _promising_s(batches: list[ScoredBatch]) -> float:
    """Return the step time up to which degrees may be the fastest with other micro batches: those of few layouts.

    The layouts have one lever: larger micro batches make copies from host memory rarer, so levers are not comparable.
    """
    timed = np.sort(np.concatenate([batch.step_s for batch in batches] or [np.full(1, np.inf)]))
    return float(min(GROWS_UP_TO * timed[0], timed[min(MAX_GROWN, len(timed)) - 1]))


def _grown(case: Case, pinned: Mapping[str, Any], space: Space, batches: list[ScoredBatch]) -> list[ScoredBatch]:
    """Return the layouts of a case with larger micro batches, scored once."""
    known, key = case.cached(_known_grown), (repr(sorted(pinned.items())), space)
    if key not in known:
        known[key] = list(grown(case, pinned, space, batches, _promising_s(batches)))
    return known[key]


def _known_grown(case: Case) -> dict[tuple[str, Space], list[ScoredBatch]]:
    return {}


def _lever_spaces(case: Case, pinned: Mapping[str, Any]) -> tuple[Space, ...]:
    """Return the spaces that are searched in turn until a layout fits: on many GPUs, even stages come first."""
    first = _for_cluster(LEVER_SPACE, case)
    if case.cluster.world <= SMALL:
        return (first,)
    # Typed values may have no layout of even stages; then both spaces leave the usual degrees.
    return (first, msgspec.structs.replace(first, uneven=True, even=bool(pinned)))


def _changed_cases(case: Case, pinned: Mapping[str, Any], offloads: bool) -> list[Case]:
    """Return the case with each lever; the same cases when asked again, as several parts of an answer search them."""
    known, key = case.cached(_known_cases), (repr(sorted(pinned.items())), offloads)
    if key not in known:
        changes = with_offload(case, pinned) if offloads else without_offload(case, pinned)
        known[key] = [case.replace(**one) for one in changes]
    return known[key]


def _known_cases(case: Case) -> dict[tuple[str, bool], list[Case]]:
    return {}


def _scores(case: Case, pinned: Mapping[str, Any], space: Space) -> list[ScoredBatch]:
    """Return all layouts of a case in a space, scored once."""
    known, key = case.cached(_known_scores), (repr(sorted(pinned.items())), space)
    if key not in known:
        known[key] = list(score(case, pinned, space))
    return known[key]


def _known_scores(case: Case) -> dict[tuple[str, Space], list[ScoredBatch]]:
    return {}


def fits_with_levers(case: Case, pinned: Mapping[str, Any], offloads: bool) -> bool:
    """Return whether a layout of `with_levers` fits: with levers that use host memory, or with the others."""
    if not may_fit(case, offloads):
        return False
    spaces, changed = _lever_spaces(case, pinned), _changed_cases(case, pinned, offloads)
    found = (batch for space in spaces for one in changed for batch in score(one, pinned, space, timed=False))
    return any(batch.fits.any() for batch in found)


def _scored_in(tried: list[Case], pinned: Mapping[str, Any], space: Space) -> dict[int, list[ScoredBatch]]:
    """Return the layouts by place of their case, scored.

    If none fits that reduces gradients in every micro batch, only those.
    """
    lean = [place for place, one in enumerate(tried) if not one.defer_grad_sync and reduction_saves_memory(one)]
    found = {place: _scores(tried[place], pinned, space) for place in lean}
    batches = [batch for place in lean for batch in found[place]]
    if batches and not any(batch.fits.any() for batch in batches):
        return found
    found |= {place: _scores(one, pinned, space) for place, one in enumerate(tried) if place not in found}
    return {place: found[place] for place in range(len(tried))}


def _for_cluster(space: Space, case: Case) -> Space:
    """Return the space with uneven stages on few GPUs, where even ones leave few degrees."""
    return msgspec.structs.replace(space, uneven=True) if case.cluster.world <= SMALL else space


def may_fit(case: Case, offloads: bool = False) -> bool:
    """Return whether the state would fit if all GPUs, or their hosts, shared it equally; searches cost more.

    Quantizing 8-bit moments on the host takes minutes per step, so they are never offloaded.
    """
    if offloads and case.optimizer_name == "adamw8bit":
        return False
    return least_state_gib(case) <= float(case.host_gib if offloads else case.capacity_gib)


def options_for(
    baseline: Baseline, found: Candidate, typed: Sequence[str], verb: str = "recommend"
) -> tuple[Option, ...]:
    """Return the options of a training that fits only with a lever, or not at all, in the order of what they cost.

    `found` is the best layout with levers, `typed` are the user's overrides, `verb` is that of the commands about a
    recipe that the user named. If it fits, it is the first option, and contract changes are listed only if they are
    faster.
    """
    asked = Asked(baseline.base, typed, verb, unlimited_s(baseline.case, baseline.pinned))
    if not found.fits:
        return tuple(_contract_options(baseline, asked, np.inf))
    applied = _option("layout", _layout_variant(baseline, found), found, asked)
    sure = found.layout["offload"] == "none" and found.has_headroom and found.chance >= MAY_NOT_FIT
    below = WORTH if sure else 1.0
    return (applied, *_contract_options(baseline, asked, below * found.step_s))


def options_of_fixed(baseline: Baseline, typed: Sequence[str]) -> tuple[Option, ...]:
    """Return the options of a layout that does not fit: with its own degrees if possible, else with others."""
    case = baseline.case
    degrees = {name: getattr(case, name) for name in ("tp", "pp", "cp", "ep", "etp", "strategy", "dp_replicate")}
    for pinned in ({**degrees, **baseline.pinned}, baseline.pinned):
        found = best(case, pinned)
        if found is None:
            continue
        chosen = with_levers(case, pinned, found)
        if chosen.fits or pinned is baseline.pinned:
            return options_for(baseline, chosen, typed, "estimate")
    return ()


def options_for_recipe(
    recipe: Recipe,
    model: ModelSpec,
    on: Cluster,
    engine: Any,
    words: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> tuple[Option, ...]:
    """Return the options of a recipe that does not fit on a cluster.

    `words` name it on the command line, with the user's overrides; without a name, commands name its model. They
    repeat the user's `options`.
    """
    typed = [one for one in words if is_override(one)]
    question = Question(
        model=model,
        model_ref=recipe.model,
        cluster=on,
        goal=recipe.goal,
        engine=engine,
        recipe_words=words if len(typed) < len(words) else (),
        options=options,
    )
    return options_of_fixed(baseline_for(question, (), recipe), typed)


def unlimited_s(case: Case, pinned: Mapping[str, Any]) -> float:
    """Return the step time of the fastest legal layout if memory were unlimited."""
    free = {name: value for name, value in pinned.items() if name not in ("recompute", "offload")}
    space, fastest = _for_cluster(FREE_SPACE, case), np.inf
    for one in (space, msgspec.structs.replace(space, uneven=True)):  # few counts have no layout of even stages
        for batch in candidates(case.replace(offload="none"), one, free):
            ok = np.broadcast_to(rules.legal(batch), batch.tp.shape)
            if ok.any():
                fastest = min(fastest, float(np.min(costs.step_time(batch.rows(ok)).step_s)))
        if np.isfinite(fastest):
            break
    return float(fastest)


class Asked(NamedTuple):
    """What the user typed, and the step time that options are compared with."""

    base: Recipe
    overrides: Sequence[str]
    verb: str  # of commands about the recipe, if the user named one
    free_s: float


class Variant(NamedTuple):
    """A change of the training: its name, what it costs, the baseline with it, and its overrides."""

    title: str
    cost: str
    baseline: Baseline
    overrides: tuple[str, ...] = ()


def _layout_variant(baseline: Baseline, found: Candidate) -> Variant:
    changed = levers_of(found, baseline.case)
    reasons = [COST_OF[name if name == "defer_grad_sync" else str(value)] for name, value in changed.items()]
    title = "offload to host memory" if "offload" in changed else "a leaner step"
    return Variant(title, "; ".join((*reasons, "the trained weights stay the same")), baseline)


def _contract_options(baseline: Baseline, asked: Asked, below_s: float) -> Iterator[Option]:
    """Yield contract changes that make the training fit in less than this step time, one of each type."""
    found = [
        option
        for variants in (_narrow_states(baseline), _adapters(baseline, asked.overrides))
        for option in _first_certain(list(variants), asked, below_s)
    ]
    yield from found
    if not found and below_s == np.inf:
        shorter = (_first_fitting([variant], asked, below_s) for variant in _shorter(baseline))
        yield from islice((option for option in shorter if option is not None), 1)


def _first_certain(variants: list[Variant], asked: Asked, below_s: float) -> Iterator[Option]:
    """Yield the first variant that fits, and the next one that surely does if that one only may, or is slower."""
    first = _first_fitting(variants, asked, below_s)
    if first is None:
        return
    yield first
    rest = variants[[one.title for one in variants].index(first.title) + 1 :]
    next_one = _first_fitting(rest, asked, below_s if not first.likely else min(below_s, FASTER * first.step_s))
    if next_one is not None and next_one.likely:
        yield next_one


def _first_fitting(variants: list[Variant], asked: Asked, below_s: float) -> Option | None:
    """Return the first variant that fits without host memory, else, if nothing else fits, the first that needs it."""
    for offloads in (False, True) if below_s == np.inf else (False,):
        for variant in variants:
            case = variant.baseline.case
            found = choose(lever_layouts(case, variant.baseline.pinned, offloads, unchanged=True), case)
            if found is not None and found.fits and found.step_s < below_s:
                return _option("contract", variant, _as_recommended(variant.baseline, found, offloads), asked)
    return None


def _as_recommended(baseline: Baseline, found: Candidate, offloads: bool) -> Candidate:
    """Return the layout that recommending the variant gives: the space of levers leaves out layouts with much room."""
    searched = best(baseline.case, baseline.pinned) if found.has_headroom and not offloads else None
    return found if searched is None or not searched.has_headroom else searched


def _narrow_states(baseline: Baseline) -> Iterator[Variant]:
    """Yield narrower optimizer state; AdamW alone has an 8-bit variant."""
    if baseline.case.goal == "peft":
        return
    for title, cost, values in STATES:
        without = {"adamw": "", "adamw8bit": "precision.moments"}.get(baseline.case.optimizer_name, "optimizer.name")
        changed = None if without in values else changed_contract(baseline, values)
        if changed is not None:
            yield Variant(title, cost, changed, tuple(format_override(*one) for one in values.items()))


def _adapters(baseline: Baseline, typed: Sequence[str]) -> Iterator[Variant]:
    """Yield LoRA for a full fine-tuning, and QLoRA for either."""
    case = baseline.case
    if case.goal == "peft" and case.method in ("lora", "rslora", "lora8bit"):
        changed = changed_contract(baseline, {"peft.method": "qlora"})
        if changed is not None:
            yield Variant("QLoRA", "base weights are rounded to 4 bits", changed, ("peft.method=qlora",))
    if case.goal != "sft":
        return
    kept = (f"train.global_batch_size={int(case.global_batch_size)}", *_own_data(baseline))
    question = msgspec.structs.replace(baseline.question, goal="peft", seq_length=int(case.seq_length))
    for title, cost, extra in (
        ("LoRA", ADAPTERS_COST, kept),
        ("QLoRA", f"{ADAPTERS_COST}, on base weights rounded to 4 bits", (*kept, "peft.method=qlora")),
    ):
        try:
            yield Variant(title, cost, baseline_for(question, override.merged(typed, extra)), extra)
        except MeshwrightError:  # no recipe trains adapters of this kind of model
            return


def _own_data(baseline: Baseline) -> Iterator[str]:
    """Yield the data and the length of a recipe or file that the user named: a recipe for adapters has others."""
    if not baseline.question.recipe_words:
        return
    recipe, fields = baseline.requested, recipe_fields()
    length = ("train.epochs",) if recipe.train.epochs else ("train.steps",)
    for key in ("data.dataset", "data.validation", "data.validation_part", "data.tokenizer", *length):
        value = field_value(recipe, key)
        if value and value != fields[key].default:
            yield format_override(key, value)


def _shorter(baseline: Baseline) -> Iterator[Variant]:
    """Yield half the sequence length, a quarter and so on."""
    length = int(baseline.case.seq_length)
    while (length := length // 2) >= SHORTEST:
        changed = changed_contract(baseline, {"data.seq_length": length})
        if changed is not None:
            cost = f"samples of more than {length:,} tokens are cut"
            yield Variant("shorter samples", cost, changed, (f"data.seq_length={length}",))


def changed_contract(baseline: Baseline, values: Mapping[str, Any]) -> Baseline | None:
    """Return the baseline with other contract values; None if they are its own already."""
    recipe, log = override.change(baseline.requested, values)
    if not log:
        return None
    known, key = baseline.case.cached(_known_changes), repr(sorted(values.items()))
    case = known.setdefault(key, baseline.case.rebuild(recipe))  # the same case, so that it is searched once
    return msgspec.structs.replace(baseline, requested=recipe, case=case)


def _known_changes(case: Case) -> dict[str, Case]:
    return {}


def _option(kind: FieldKind, variant: Variant, found: Candidate, asked: Asked) -> Option:
    """Return an option with the overrides of its layout and the command that plans it."""
    case, pinned = variant.baseline.case, variant.baseline.pinned
    names = dict.fromkeys((*ALWAYS_TYPED, *changed_values(found.layout, case)))
    unused = {"ep": not case.is_moe, "vp": found.layout["pp"] == 1 == case.vp}
    values = {n: found.layout[n] for n in names if n not in pinned and not unused.get(n)}
    overrides = (*variant.overrides, *as_overrides(values))
    planned = case.replace(**found.layout)
    typed = msgspec.structs.replace(variant.baseline, pinned={**pinned, **values})
    if quick := fast_values(typed, planned):  # as the plan of its command has
        planned = planned.replace(**quick)
        found = msgspec.structs.replace(
            found, total_gib=float(costs.memory(planned).total), step_s=float(costs.step_time(planned).step_s)
        )
    return Option(
        title=variant.title,
        kind=kind,
        overrides=overrides,
        goal=variant.baseline.requested.goal,
        fits=found.fits,
        total_gib=found.total_gib,
        host_gib=float(costs.memory(planned).host),
        step_s=found.step_s,
        # The search without memory has fewer micro batches: what is faster than its best is as fast as the best.
        slowdown=1.0 if np.isinf(asked.free_s) else max(1.0, found.step_s / asked.free_s),
        cost=variant.cost,
        command=_command(variant.baseline, asked, overrides),
        fit=costs.fit_words(costs.memory(planned)),
    )


def _command(baseline: Baseline, asked: Asked, overrides: Sequence[str]) -> str:
    """Return the command of an option: of the recipe or file that the user named, else `recommend` of its model."""
    question, merged = baseline.question, override.merged(asked.overrides, overrides)
    if question.recipe_words and baseline.base == asked.base:
        return command_for_target(question, asked.verb, merged)
    model = argument(asked.base) if question.model_ref == asked.base.model else question.model_ref
    return command_for_model(question, "recommend", model, baseline.requested.goal, merged)
