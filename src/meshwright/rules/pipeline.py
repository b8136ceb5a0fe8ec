"""Splitting layers into pipeline stages."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_PP, degrees, divisors_of, even_stages

EVEN_ONLY = ("megatron", "meshwright", "deepspeed")
SPLITS_UNEVENLY = ("torchtitan", "automodel", "kempnerforge")

NO_UNEVEN: Fix = {"stage_layers": [()], "embedding_as_layer": [False], "head_as_layer": [False]}
INTERLEAVED: Fix = {"vp": divisors_of("layers", "vp"), "pp_schedule": ["1f1b", "interleaved_1f1b"]}
EVEN: tuple[Fix, ...] = (
    {"embedding_as_layer": [True], "head_as_layer": [True]},
    {"embedding_as_layer": [False, True], "head_as_layer": [False, True]},
    INTERLEAVED,
    {"stage_layers": even_stages, "embedding_as_layer": [False], "head_as_layer": [False]},
    {"pp": degrees("pp"), "vp": [1], "pp_schedule": ["1f1b"]},
    NO_PP,
)


def _uneven(c: Case) -> Column:
    return (c.listed_stages == 0) & (c.split_layers % c.stages != 0) & (c.stages <= c.split_layers)


@rule(
    "pipeline.more-stages-than-layers",
    "error",
    "pp",
    message="pp × vp = {pp} × {vp} stage chunks, but only {layers} layers: some would be empty",
    symptom="the number of stages exceeds the number of layers; or a stage without parameters hangs",
    cause="every stage chunk needs at least one layer",
    fixes=({"vp": [1], "pp_schedule": ["1f1b"]}, {"pp": degrees("pp"), "vp": [1], "pp_schedule": ["1f1b"]}, NO_PP),
)
def more_stages_than_layers(c: Case) -> Column:
    return c.stages > c.split_layers


@rule(
    "pipeline.even-split",
    "error",
    "pp",
    engines=EVEN_ONLY,
    message="{split_layers} layers are not divisible by pp × vp = {pp} × {vp} stage chunks",
    symptom="number of layers is not divisible by pipeline size × virtual stages, before the model is built",
    cause="without stage_layers, every stage chunk gets the same number of layers",
    fixes=EVEN,
)
def uneven_split_unsupported(c: Case) -> Column:
    return _uneven(c)


@rule(
    "pipeline.uneven-split",
    "advice",
    "pp",
    engines=SPLITS_UNEVENLY,
    message="{split_layers} layers are not divisible by pp × vp = {pp} × {vp}; {engine} makes some stages longer",
    symptom="runs, but every stage waits for the longest",
    cause="the slowest stage sets the step time",
    fixes=({"pp": degrees("pp"), "vp": [1], "pp_schedule": ["1f1b"]}, INTERLEAVED, NO_PP),
)
def uneven_split(c: Case) -> Column:
    return _uneven(c)


@rule(
    "pipeline.stage-count",
    "error",
    "stage_layers",
    message="stage_layers lists {listed} chunks, but pp × vp = {pp} × {vp} needs {stages}",
    symptom="the pipeline layout has a different number of stages than pipeline size × virtual stages",
    cause="stage_layers lists the layers of every stage chunk, in order",
    fixes=({"stage_layers": [()]}, {"stage_layers": even_stages}, NO_PP),
    values={"listed": lambda c: c.listed_stages},
)
def wrong_stage_count(c: Case) -> Column:
    return (c.listed_stages > 0) & (c.stages != c.listed_stages)


@rule(
    "pipeline.stage-sum",
    "error",
    "stage_layers",
    message="stage_layers adds up to {listed}, but the model has {layers} layers",
    symptom="the pipeline layout does not cover all layers of the model",
    cause="every layer must be in exactly one stage chunk",
    fixes=({"stage_layers": [()]}, {"stage_layers": even_stages}, NO_PP),
    values={"listed": lambda c: c.listed_layers},
)
def wrong_stage_sum(c: Case) -> Column:
    return (c.listed_stages > 0) & (c.listed_layers != c.layers)


@rule(
    "pipeline.conflicting-splits",
    "error",
    "stage_layers",
    message="stage_layers and embedding_as_layer/head_as_layer are both set",
    symptom="a pipeline layout cannot be combined with counting the embedding or the loss as a layer",
    cause="the split is either listed or derived",
    fixes=({"embedding_as_layer": [False], "head_as_layer": [False]},),
)
def conflicting_splits(c: Case) -> Column:
    return (c.listed_stages > 0) & (c.embedding_as_layer | c.head_as_layer)


@rule(
    "pipeline.unbalanced",
    "advice",
    "stage_layers",
    message="the longest stage has {longest} layers, the mean is {mean:.1f}",
    symptom="all stages wait for the longest, whose rank also uses the most memory",
    cause="the slowest stage sets the step time, for every micro batch",
    fixes=({"stage_layers": even_stages}, {"stage_layers": [()]}),
    values={"longest": lambda c: int(_longest(c)), "mean": lambda c: c.layers / c.pp},
)
def stages_unbalanced(c: Case) -> Column:
    stated = (c.listed_stages > 0) & (c.stages == c.listed_stages)
    return stated & (_longest(c) > 1.5 * c.layers / c.pp)


def _longest(c: Case) -> Column:
    """Return the layers of the longest pipeline rank; chunk i runs on rank i modulo pp."""
    if np.ndim(c.pp) or not c.stage_layers:
        return 0
    return max(sum(c.stage_layers[rank :: int(c.pp)]) for rank in range(int(c.pp)))


@rule(
    "pipeline.chunks-need-stages",
    "error",
    "vp",
    message="vp={vp} interleaves pipeline stages, but pp=1",
    symptom="the interleaved schedule needs a pipeline size above 1",
    cause="virtual stages reduce the pipeline bubble; without a pipeline there is none",
    fixes=({"vp": [1], "pp_schedule": ["1f1b"], "stage_layers": [()]},),
)
def chunks_without_stages(c: Case) -> Column:
    return (c.vp > 1) & (c.pp == 1)


@rule(
    "pipeline.tied-embeddings",
    "error",
    "pp",
    engines=("kempnerforge", "torchtitan", "automodel"),
    message="embedding and head share one weight, but pp={pp} puts them on different stages",
    symptom="tied embeddings are not supported with pipeline parallelism (ValueError or NotImplementedError)",
    cause="this engine cannot keep one weight in sync on two stages",
    fixes=(NO_PP,),
)
def tied_embeddings_split(c: Case) -> Column:
    return c.tied & (c.pp > 1)


@rule(
    "pipeline.experts",
    "error",
    "pp",
    engines=("kempnerforge",),
    message="{engine} does not support MoE layers with pp={pp}",
    symptom="ValueError: MoE with pipeline parallelism is not supported",
    cause="its pipeline stages need static shapes, but routing is data dependent",
    fixes=(NO_PP,),
)
def moe_pipelined(c: Case) -> Column:
    return c.is_moe & (c.pp > 1)


@rule(
    "pipeline.vision",
    "error",
    "pp",
    engines=("kempnerforge",),
    message="{engine} does not support vision-language models with pp={pp}",
    symptom="ValueError: VLM with pipeline parallelism is rejected",
    cause="its vision encoder has no pipeline stage",
    fixes=(NO_PP,),
)
def vision_pipelined(c: Case) -> Column:
    return c.has_vision & (c.pp > 1)
