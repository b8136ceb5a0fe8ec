"""Pipeline schedules and their bubble."""

from __future__ import annotations

from math import ceil

import numpy as np

from meshwright.recipes.capabilities import ONE_CHUNK, SEVERAL_CHUNKS, V_SHAPED
from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import PLAIN_1F1B, divisors, divisors_of, even_stages, not_, one_of, smaller

ZERO_BUBBLE = ("interleaved_zero_bubble", *V_SHAPED)
MAX_BUBBLE = 0.15
VISIBLE_BUBBLE = 0.05
IDLE_BUBBLE = 0.25
"""Idle over busy time above which a pipeline wastes a fifth of the step: of 173 tuned published runs with a pipeline,
nine of ten are below 0.10, and of 26 sources 22 have a median below 0.25."""


def bubble(c: Case) -> Column:
    """Return idle over busy time of a step: (pp - 1) / (vp × micro batches)."""
    return (c.pp - 1) / (c.vp * c.pass_micro_batches)


def _chunk_counts(c: Case) -> list[int]:
    """Return chunk counts that divide a stage's layers, fewest first."""
    return [d for d in divisors(max(int(c.layers) // int(c.pp), 1)) if d > 1]


def _interleave(chunks: Fix | None = None) -> Fix:
    return {"vp": _chunk_counts, "pp_schedule": ["interleaved_1f1b"], **(chunks or {})}


LARGER_GLOBAL_BATCH: Fix = {"global_batch_size": lambda c: [int(c.micro_batch_size * c.dp * c.pp)]}


def _more_per_pass(c: Case) -> list[int]:
    """Return larger numbers of micro batches per pass that divide those of the step, fewest first; 0 means all."""
    if int(c.pipeline_passes) == 1:
        return []
    every = int(c.accumulation)
    return [count % every for count in divisors(every) if count > int(c.pass_micro_batches)]


MORE_PER_PASS: Fix = {"pp_micro_batches": _more_per_pass}
SMALLER_MICRO_BATCH: Fix = {"micro_batch_size": divisors_of("micro_batch_size", "micro_batch_size")}
FILLS_THE_STAGES: tuple[Fix, ...] = (
    MORE_PER_PASS,
    SMALLER_MICRO_BATCH,
    {"pp": smaller("pp")},
    {"pp": smaller("pp"), **PLAIN_1F1B},
    LARGER_GLOBAL_BATCH,
)


@rule(
    "schedule.one-chunk",
    "error",
    "pp_schedule",
    message="{pp_schedule} supports one chunk of layers per stage, but vp={vp}",
    symptom="a single-stage schedule got several stages per rank",
    cause="only interleaved schedules run several chunks per stage",
    fixes=({"pp_schedule": ["interleaved_1f1b"]}, {"vp": [1], "stage_layers": [()]}),
)
def too_many_chunks(c: Case) -> Column:
    return (c.pp > 1) & one_of(c.pp_schedule, ONE_CHUNK) & (c.vp > 1)


@rule(
    "schedule.several-chunks",
    "error",
    "pp_schedule",
    message="{pp_schedule} needs at least two chunks of layers per stage, but vp={vp}",
    symptom="a multi-stage schedule needs two or more stages per rank",
    cause="these schedules interleave chunks",
    fixes=({"pp_schedule": ["1f1b"]}, {"vp": _chunk_counts}),
)
def too_few_chunks(c: Case) -> Column:
    return (c.pp > 1) & one_of(c.pp_schedule, SEVERAL_CHUNKS) & (c.vp < 2)


@rule(
    "schedule.v-shaped",
    "error",
    "vp",
    message="{pp_schedule} needs exactly two chunks of layers per stage, but vp={vp}",
    symptom="the schedule requires exactly 2 stages per rank",
    cause="each rank holds one chunk of the V's descending arm and one of its ascending arm",
    fixes=({"vp": [2]}, {"pp_schedule": ["interleaved_1f1b"]}, PLAIN_1F1B),
)
def not_two_chunks(c: Case) -> Column:
    return (c.pp > 1) & one_of(c.pp_schedule, V_SHAPED) & (c.vp != 2)


@rule(
    "schedule.micro-batches",
    "error",
    "micro_batch_size",
    engines=("meshwright", "automodel"),
    message="{pass_micro_batches} micro batches cannot fill pp={pp} stages",
    symptom="assertion that the local batch has at least as many micro batches as stages",
    cause="each stage needs a micro batch to work on",
    fixes=FILLS_THE_STAGES,
)
def too_few_micro_batches(c: Case) -> Column:
    return (c.pp > 1) & (c.pass_micro_batches < c.pp)


@rule(
    "schedule.idle-stages",
    "warning",
    "micro_batch_size",
    engines=("megatron", "torchtitan", "kempnerforge", "deepspeed"),
    message="{pass_micro_batches} micro batches leave some of pp={pp} stages idle at all times",
    symptom="runs at a fraction of its speed; some engines log that the bubble will be large",
    cause="a pipeline with fewer micro batches than stages is never full",
    fixes=FILLS_THE_STAGES,
)
def stages_idle(c: Case) -> Column:
    return too_few_micro_batches(c)


@rule(
    "schedule.dualpipe-micro-batches",
    "error",
    "pp_schedule",
    engines=("meshwright", "torchtitan"),
    message="dualpipe_v needs at least as many micro batches ({pass_micro_batches}) as stage chunks ({stages})",
    symptom="ValueError about the number of micro batches when the schedule is built",
    cause="its steady state overlaps a forward and a backward of different micro batches",
    fixes=(MORE_PER_PASS, SMALLER_MICRO_BATCH, {"pp_schedule": ["zbv", "interleaved_1f1b"]}),
)
def dualpipe_not_filled(c: Case) -> Column:
    return (c.pp > 1) & (c.pp_schedule == "dualpipe_v") & (c.pass_micro_batches < c.stages)


@rule(
    "schedule.compiled-split-backward",
    "error",
    "pp_schedule",
    engines=("torchtitan", "automodel"),
    message="{pp_schedule} splits the backward pass in two, but torch cannot split the backward pass of compiled "
    "blocks",
    symptom="RuntimeError about donated buffers and retain_graph, or a segmentation fault, in the first step",
    cause="a compiled backward pass is one graph: it frees its buffers when it has computed the input gradients "
    "(pytorch issue 161904, open)",
    fixes=({"pp_schedule": ["interleaved_1f1b"]}, {"compile": [False]}),
)
def split_backward_compiled(c: Case) -> Column:
    return (c.pp > 1) & one_of(c.pp_schedule, ZERO_BUBBLE) & c.compile


@rule(
    "schedule.uneven-passes",
    "error",
    "pp_micro_batches",
    engines=("torchtitan", "automodel"),
    message="{accumulation} micro batches per step are not a multiple of the {pp_micro_batches} of one pipeline pass",
    symptom="assertion that the global batch size is a multiple of local batch size × data-parallel ranks",
    cause="every pass through the pipeline runs one local batch, and a step consists of whole local batches",
    fixes=({"pp_micro_batches": divisors_of("accumulation", "pp_micro_batches")},),
)
def uneven_passes(c: Case) -> Column:
    uneven = c.accumulation % np.maximum(c.pp_micro_batches, 1) != 0
    return (c.pp > 1) & (c.pp_micro_batches > 0) & uneven & _batch_divides(c)


def _batch_divides(c: Case) -> Column:
    """Whether every rank has the same integer number of micro batches per step; `batch.divides` reports the others."""
    return c.global_batch_size % (c.micro_batch_size * c.dp) == 0


@rule(
    "schedule.micro-batch-groups",
    "error",
    "vp",
    engines=("megatron",),
    message="interleaving needs micro batches in groups of pp={pp}; {pass_micro_batches} leave a partial group",
    symptom="number of micro batches is not divisible by the pipeline size with the interleaved schedule",
    cause="each chunk runs groups of pp micro batches; a smaller last group cannot run",
    fixes=(MORE_PER_PASS, SMALLER_MICRO_BATCH, PLAIN_1F1B, {"pp": smaller("pp")}, {"pp": smaller("pp"), **PLAIN_1F1B}),
)
def partial_micro_batch_group(c: Case) -> Column:
    return (c.pp > 1) & (c.vp > 1) & (c.pass_micro_batches % c.pp != 0) & _batch_divides(c)


@rule(
    "schedule.micro-batch-rounds",
    "error",
    "vp",
    engines=("meshwright", "torchtitan", "automodel", "kempnerforge"),
    message="{pass_micro_batches} micro batches do not divide into {rounds} equal rounds over pp={pp} stages",
    symptom="ValueError: interleaved 1F1B needs a number of micro batches that is a multiple of its rounds",
    cause="interleaving runs micro batches in equal rounds of at least pp",
    fixes=(MORE_PER_PASS, SMALLER_MICRO_BATCH, PLAIN_1F1B, {"pp": smaller("pp")}, {"pp": smaller("pp"), **PLAIN_1F1B}),
    values={"rounds": lambda c: int(_rounds(c))},
)
def unequal_rounds(c: Case) -> Column:
    interleaved = one_of(c.pp_schedule, ("interleaved_1f1b", "interleaved_zero_bubble"))
    return (c.pp > 1) & interleaved & (c.pass_micro_batches % _rounds(c) != 0) & _batch_divides(c)


def _rounds(c: Case) -> Column:
    return np.maximum(c.pass_micro_batches // c.pp, 1)


@rule(
    "schedule.no-interleaving",
    "warning",
    "vp",
    engines=("meshwright", "megatron", "torchtitan", "automodel", "kempnerforge"),
    message="pp={pp} without interleaving leaves a bubble of {bubble:.0%} of the step's compute",
    symptom="low throughput: stages idle while the pipeline fills and drains",
    cause="the bubble is (pp - 1) / micro batches; vp chunks per stage divide it by vp",
    fixes=(
        MORE_PER_PASS,
        _interleave(),
        _interleave(SMALLER_MICRO_BATCH),
        SMALLER_MICRO_BATCH,
        {"pp": smaller("pp")},
        {"vp": [2], "pp_schedule": ["zbv"]},
    ),
    pitfall="PP without VP",
    values={"bubble": bubble},
)
def no_interleaving(c: Case) -> Column:
    plain = (c.pp > 1) & (c.vp == 1) & not_(one_of(c.pp_schedule, ZERO_BUBBLE))
    return plain & (bubble(c) > VISIBLE_BUBBLE) & (c.listed_stages == 0)


@rule(
    "schedule.bubble",
    "advice",
    "micro_batch_size",
    message="the pipeline bubble is {bubble:.0%} of step compute "
    "(pp={pp}, vp={vp}, {pass_micro_batches} micro batches)",
    symptom="low throughput that gets worse with more GPUs",
    cause="too few micro batches per step for this many stages",
    fixes=(
        MORE_PER_PASS,
        _interleave(),
        SMALLER_MICRO_BATCH,
        {"pp": smaller("pp")},
        {"pp": smaller("pp"), **PLAIN_1F1B},
    ),
    values={"bubble": bubble},
)
def bubble_too_large(c: Case) -> Column:
    no_other_rule = (c.vp > 1) | (c.listed_stages > 0) | (c.engine == "deepspeed")
    large = (bubble(c) > MAX_BUBBLE) & (bubble(c) <= IDLE_BUBBLE)
    return (c.pp > 1) & no_other_rule & not_(one_of(c.pp_schedule, ZERO_BUBBLE)) & large


def _batches_that_fill(c: Case) -> list[int]:
    """Return the global batch whose micro batches bring the bubble down to MAX_BUBBLE."""
    micro_batches = ceil((int(c.pp) - 1) / (int(c.vp) * MAX_BUBBLE) / int(c.pp)) * int(c.pp)
    return [int(c.micro_batch_size * c.dp) * micro_batches]


@rule(
    "schedule.idle-pipeline",
    "warning",
    "pp",
    message="stages idle {idle:.0%} of the step (pp={pp}, vp={vp}, {pass_micro_batches} micro batches)",
    symptom="low throughput: a fifth of the step or more is spent filling and draining the pipeline",
    cause="the bubble is (pp - 1) / (vp × micro batches) of the compute: too few micro batches for this many stages",
    fixes=(
        MORE_PER_PASS,
        _interleave(),
        SMALLER_MICRO_BATCH,
        _interleave(SMALLER_MICRO_BATCH),
        {"pp": smaller("pp"), **PLAIN_1F1B},
        {"pp": smaller("pp"), "stage_layers": even_stages},
        {"global_batch_size": _batches_that_fill},
    ),
    values={"idle": lambda c: bubble(c) / (1 + bubble(c))},
)
def pipeline_idle(c: Case) -> Column:
    no_other_rule = not_(no_interleaving(c)) | (c.engine == "deepspeed")
    large = (bubble(c) > IDLE_BUBBLE) & (c.pass_micro_batches >= c.pp)
    return (c.pp > 1) & no_other_rule & not_(one_of(c.pp_schedule, ZERO_BUBBLE)) & large
