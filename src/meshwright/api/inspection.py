"""Inspect a model: its layers, parameters by part, FLOPs, cache, how it can be split, and who trains it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from meshwright import clusters, costs, frameworks, models
from meshwright.api import requests
from meshwright.api.catalogues import architecture
from meshwright.api.resolve import referenced_model, typed_model
from meshwright.api.responses import Part, Response, copied
from meshwright.api.verb_function import verb
from meshwright.choices import ENGINES
from meshwright.display import Readable, Row, titled
from meshwright.errors import InputError
from meshwright.models import ModelSpec, parts
from meshwright.notes import no_notes
from meshwright.parsing import sequence_length
from meshwright.planner import splits
from meshwright.planner.baseline import with_engine_strategy
from meshwright.recipes.case import Case
from meshwright.recipes.engine_models import lacking
from meshwright.recipes.types import Data, Engine, Layout, Recipe

CACHE_BYTES = 2  # of an element of the cache in bf16
SPLIT_ENGINES: tuple[Engine, ...] = ("meshwright", "megatron")
Way = Literal["table", "inspected"]
COUNTS = ("total", "active")  # of all parts


class LayerGroup(Part, frozen=True, kw_only=True):
    """Equal layers: their blocks, and what one of them has and costs."""

    group: int  # number in `runs`
    layers: int
    kind: str
    mixer: Sequence[str]
    ffn: Sequence[str]
    norm_vectors: float  # norms of the model's width in one layer; a LayerNorm with bias counts as two
    parameters: int  # of one layer
    active_parameters: int
    forward_flops: float  # of one layer, per token
    first: int
    last: int


class LayerRun(Part, frozen=True, kw_only=True):
    """Consecutive layers: a sequence of groups, and how often it repeats."""

    times: int
    groups: Sequence[int]


class FlopCounts(Part, frozen=True, kw_only=True):
    """Model FLOPs per token at a sequence length; training is forward and backward without recomputation."""

    seq_length: int
    forward: float
    training: float
    attention_share: float  # of the forward FLOPs: the part that grows with the sequence, and scans
    convention: str


class CacheBytes(Part, frozen=True, kw_only=True):
    """Bytes that generation keeps of one sequence in bf16."""

    per_token: int
    windows: int
    state: int
    at_length: int


class SplitPart(Part, frozen=True, kw_only=True):
    """The degrees of one axis that the model allows on one engine, other limits aside."""

    engine: str
    axis: str
    largest: int
    degrees: Sequence[int]
    limit: str | None
    rule: str | None


class Trainer(Part, frozen=True, kw_only=True):
    """Whether a framework trains the model, and why not."""

    name: str
    trains: bool
    why: str | None


class Inspected(Readable, msgspec.Struct, frozen=True):
    """A model and what was found about it."""

    model: ModelSpec
    groups: tuple[LayerGroup, ...]
    runs: tuple[LayerRun, ...]
    parameters: Mapping[str, int]
    flops: FlopCounts
    cache: CacheBytes
    splits: tuple[SplitPart, ...]
    trainers: tuple[Trainer, ...]
    way: Way
    assumed: tuple[str, ...]

    def _parts(self) -> Iterable[tuple[str, int]]:
        return ((name, count) for name, count in self.parameters.items() if name not in COUNTS)

    def summary(self) -> list[Row]:
        """Return sizes, layers, parameters, FLOPs, cache, splits and trainers, a line or a few each."""
        model, flops, cache = self.model, self.flops, self.cache
        found = [f"{one.axis} {one.largest}" for one in self.splits if one.engine == ENGINES[0]]
        trained = ", ".join(one.name for one in self.trainers if one.trains) or "none"
        return [
            *model.summary(),
            *titled("Layers", picture(self.groups, self.runs)),
            *titled("Parts", [f"{name} {count:,}" for name, count in self._parts() if count]),
            ("FLOPs", f"{flops.forward:.4g} forward, {flops.training:.4g} training, per token at {flops.seq_length:,}"),
            ("Cache", f"{cache.per_token:,} bytes per token, {cache.at_length:,} at {flops.seq_length:,}"),
            ("Splits", ", ".join(found)),
            ("Trainers", trained),
            ("Read", self.way),
            *titled("Assumed", self.assumed),
        ]


def picture(groups: Sequence[LayerGroup], runs: Sequence[LayerRun]) -> list[str]:
    """Return the layers from the first to the last, e.g. "8 × [5 × [sliding attention, dense MLP], …]"."""
    return [_run_text(run, {one.group: one.kind for one in groups}) for run in runs]


def _run_text(run: LayerRun, kinds: Mapping[int, str]) -> str:
    inner: list[tuple[int, int]] = []
    for group in run.groups:
        if inner and inner[-1][1] == group:
            inner[-1] = (inner[-1][0] + 1, group)
        else:
            inner.append((1, group))
    blocks = [f"{f'{times} × ' if times > 1 else ''}[{kinds[group]}]" for times, group in inner]
    if len(blocks) == 1:
        times = run.times * inner[0][0]
        return f"{times} × [{kinds[inner[0][1]]}]"
    return f"{run.times} × ({' '.join(blocks)})"


@verb(requests.Inspect)
def inspect(request: requests.Inspect) -> Inspected:
    """Return a model's layers, parameters, FLOPs, cache sizes, possible splits and the frameworks that train it."""
    with models.collect_defaults() as defaults:
        model, reference = referenced_model(typed_model(request.model), trained=False)
    longest = model.max_seq_length or requests.INSPECTED_SEQ
    seq = sequence_length(request.seq) or min(requests.INSPECTED_SEQ, longest)
    recipe = Recipe(
        name=model.name, model=reference, goal="pretrain", cluster="8xH100", data=Data(seq_length=seq), layout=Layout()
    )
    size = parts.cache_size(model, seq)
    width = 0 if model.kind == "diffusion" else CACHE_BYTES
    found = {name: getattr(size, name) * width for name in CacheBytes.__struct_fields__}
    return Inspected(
        model=model,
        groups=_groups(model, seq),
        runs=tuple(LayerRun(times=times, groups=groups) for times, groups in parts.layer_runs(model)),
        parameters={"total": model.params.total, "active": model.params.active, **parts.parameters_by_part(model)},
        flops=_flops(recipe, model, seq),
        cache=CacheBytes(**found),
        splits=tuple(_splits(recipe, model, seq)),
        trainers=tuple(_trainers(recipe, model)),
        way="inspected" if model.inspected_by else "table",
        assumed=(*model.assumed, *_defaults(defaults if models.is_path(reference) else {})),
    )


def _defaults(taken: Mapping[str, object]) -> list[str]:
    shown = [f"{key}={value}" for key, value in taken.items()]
    return [f"defaults of the architecture for keys that the file does not have: {', '.join(shown)}"] if shown else []


def _groups(model: ModelSpec, seq: int) -> tuple[LayerGroup, ...]:
    found = []
    for number, group in enumerate(model.groups):
        layer = group.layer
        matmul, core = costs.layer_flops(layer, model, seq, "causal")
        beside = [parts.kind_of_mixer(layer.cross), *parts.sizes_of_mixer(layer.cross)] if layer.cross else []
        found.append(
            LayerGroup(
                group=number,
                layers=group.count,
                kind=parts.kind_of_layer(layer),
                mixer=[*parts.sizes_of_mixer(layer.mixer), *beside],
                ffn=parts.sizes_of_ffn(layer.ffn),
                norm_vectors=round(layer.norm_params / model.hidden, 2),
                parameters=layer.params(model.hidden),
                active_parameters=layer.active_params(model.hidden),
                forward_flops=float(matmul + core),
                first=group.places[0],
                last=group.places[-1],
            )
        )
    return tuple(found)


def _flops(recipe: Recipe, model: ModelSpec, seq: int) -> FlopCounts:
    case = Case(recipe, model, clusters.cluster(recipe.cluster))
    matmul, core = costs.forward_flops(case)
    forward = float(matmul + core)
    return FlopCounts(
        seq_length=seq,
        forward=forward,
        training=float(costs.flops_per_token(case)),
        attention_share=float(core) / forward,
        convention="causal attention counts the unmasked half; routers, norms and embeddings do not count",
    )


def _splits(recipe: Recipe, model: ModelSpec, seq: int) -> list[SplitPart]:
    return [
        copied(SplitPart, one, engine=engine, limit=one.limit or None, rule=one.rule or None)
        for engine in SPLIT_ENGINES
        for one in splits.splits(recipe, model, engine, seq)
    ]


def _trainers(recipe: Recipe, model: ModelSpec) -> list[Trainer]:
    """Return our engine and every framework that exports are written for, with the reason of those that cannot."""
    lacks = lacking(model)
    ours = Trainer(name=ENGINES[0], trains=not lacks, why=f"it lacks {lacks}" if lacks else None)
    return [ours, *(_trainer(name, recipe, model) for name in frameworks.NAMES)]


def _trainer(name: str, recipe: Recipe, model: ModelSpec) -> Trainer:
    framework = frameworks.framework(name)
    ready = with_engine_strategy(recipe, framework.engine)
    try:
        with no_notes():
            frameworks.write(framework, ready, model, clusters.cluster(recipe.cluster))
    except InputError as error:
        return Trainer(name=name, trains=False, why=error.reason)
    return Trainer(name=name, trains=True, why=None)


class InspectedModel(Part, frozen=True, kw_only=True):
    """The sizes of a model."""

    name: str
    hf_id: str
    source: str
    family: str
    kind: str
    architecture: str
    model_type: str
    hf_class: str
    hidden: int
    layers: int
    vocab: int
    tied: bool
    activation: str
    max_seq_length: int
    mtp_layers: int


class PartCounts(Part, frozen=True, kw_only=True):
    """Parameters by part; the parts add up to the total, of which one token uses the active ones."""

    total: int
    active: int
    embedding: int
    attention: int
    linear_mixers: int
    mlp: int
    experts: int
    shared_experts: int
    router: int
    norms: int
    head: int
    vision: int
    other: int
    mtp: int  # multi-token-prediction modules, not part of the total


class InspectResponse(Response, frozen=True, kw_only=True):
    """A model: layers in order, parameters by part, FLOPs, cache, splits and trainers; how it was read."""

    model: InspectedModel
    way: Way
    inspected_by: str | None
    assumed: Sequence[str]
    picture: Sequence[str]
    groups: Sequence[LayerGroup]
    runs: Sequence[LayerRun]
    parameters: PartCounts
    flops_per_token: FlopCounts
    cache_bytes: CacheBytes
    splits: Sequence[SplitPart]
    trainers: Sequence[Trainer]


def inspect_response(found: Inspected, request: requests.Inspect | None = None) -> InspectResponse:
    """Return the response of inspect."""
    model, counts = found.model, found.model.params
    shape = {"layers": model.num_layers, "architecture": architecture(model)}
    return InspectResponse(
        model=copied(InspectedModel, model, **shape),
        way=found.way,
        inspected_by=model.inspected_by or None,
        assumed=found.assumed,
        picture=picture(found.groups, found.runs),
        groups=found.groups,
        runs=found.runs,
        parameters=PartCounts(mtp=counts.mtp, **found.parameters),
        flops_per_token=found.flops,
        cache_bytes=found.cache,
        splits=found.splits,
        trainers=found.trainers,
    )
