"""The catalogues of recipes, models, GPUs and rules; and recipes as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, models, rules
from meshwright.api import requests
from meshwright.api.resolve import model_named, write_text
from meshwright.api.responses import Part, Response, Severity, copied
from meshwright.api.verb_function import verb
from meshwright.choices import GOALS
from meshwright.clusters import Gpu
from meshwright.display import Listing
from meshwright.errors import InputError, OutputError, closest, unknown
from meshwright.models import ModelSpec
from meshwright.notes import note
from meshwright.parsing import one_of
from meshwright.planner import Plan
from meshwright.recipes import files, index
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe
from meshwright.rules import Rule

RECIPE_COLUMNS: Mapping[str, Callable[[index.IndexEntry], object]] = {
    "recipe": lambda one: one.name,
    "goal": lambda one: one.goal,
    "model": lambda one: one.model,
    "GPUs": lambda one: f"{one.gpus}x{one.gpu}",
    "tokens": lambda one: one.seq_length,
}
GPU_COLUMNS: Mapping[str, Callable[[Gpu], object]] = {
    "GPU": lambda one: one.name,
    "GiB": lambda one: one.memory_gib,
    "bf16 TFLOP/s": lambda one: one.peak_tflops.get("bf16", "-"),
    "fp8 TFLOP/s": lambda one: one.peak_tflops.get("fp8", "-"),
    "HBM GB/s": lambda one: one.hbm_gb_s,
    "link GB/s": lambda one: one.nvlink_gb_s,
    "network GB/s": lambda one: one.network_gb_s,
}
RULE_COLUMNS: Mapping[str, Callable[[Rule], object]] = {
    "rule": lambda one: one.id,
    "severity": lambda one: one.severity,
    "symptom": lambda one: one.symptom,
}


def architecture(model: ModelSpec) -> str:
    """Return what a list says of a model's kind: dense or MoE, vision or diffusion."""
    sparse = "MoE" if model.moe else "dense"
    return {"vision_language": f"{sparse}, vision", "diffusion": "diffusion"}.get(model.kind, sparse)


ARCHITECTURE_WORDS = {"moe": "MoE", "sparse": "MoE", "dense": "dense", "vision": "vision", "diffusion": "diffusion"}
"""Words of a search that name a kind of model, with what `architecture` calls it."""


def goals_of(model: str) -> list[str]:
    """Return the goals with a shipped recipe for a model."""
    return [goal for goal in GOALS if (model, goal) in _shipped()]


@cache
def _shipped() -> frozenset[tuple[str, str]]:
    """Return models and goals of the recipes that are no throughput recipes."""
    return frozenset((entry.model, entry.goal) for entry in index.entries(False))


MODEL_COLUMNS: Mapping[str, Callable[[ModelSpec], object]] = {
    "model": lambda one: one.name,
    "total B": lambda one: f"{one.params.total / 1e9:.3f}",
    "active B": lambda one: f"{one.params.active / 1e9:.3f}",
    "kind": architecture,
    "recipes": lambda one: " ".join(goals_of(one.name)) or "-",
    "Hugging Face id": lambda one: one.hf_id,
}


@verb(requests.RecipeRequest)
def recipe(request: requests.RecipeRequest) -> Recipe:
    """Return a shipped recipe, one from a file, or another framework's file as one, with overrides applied."""
    from meshwright.api.resolve import is_recipe
    from meshwright.api.targets import job_for  # the catalogue alone needs no planner

    if not is_recipe(request.name):
        index.load(request.name)  # raises with did-you-mean
    options = {"framework": request.framework, "model": request.model}
    job = job_for(request.name, request.goal, request.gpus, request.overrides, **options)
    found = override.apply(job.recipe if job.imported is None else job.runnable(), list(request.overrides))
    return found if request.gpus is None else msgspec.structs.replace(found, cluster=str(request.gpus))


@verb(requests.Recipes)
def find_recipes(request: requests.Recipes) -> list[index.IndexEntry]:
    """Return recipes by name, family, size or goal; by fuzzy match if no name contains the query."""
    goal: Any = request.goal
    found = index.search(request.query, goal=goal, family=request.family, benchmark=request.benchmark)
    _note_models_without(request, found)
    if not (request.query or request.goal or request.family or request.benchmark):
        others = len(index.search(benchmark=True))
        note(f"{others} more are throughput benchmarks of published runs: meshwright recipes --benchmark")
    return Listing(found, RECIPE_COLUMNS)


def _note_models_without(request: requests.Recipes, found: Sequence[index.IndexEntry]) -> None:
    """Note how to derive a recipe for the models that a query names, if none is listed and none exists."""
    named = index.models_named(request.query) if request.query else []
    if not named or {one.model for one in found} & set(named) or any(goals_of(name) for name in named):
        return
    goal = request.goal or next((g for g, w in index.SAME_GOAL.items() if {g, *w} & set(_words(request.query))), "sft")
    shown = ", ".join(named[:6]) + (" …" if len(named) > 6 else "")
    ask = f"meshwright recommend {named[-1]} --goal {goal} --gpus 8xH100"
    note(f"no shipped recipe for {shown}; one is derived from the closest: {ask}")


def _words(query: str | None) -> list[str]:
    return (query or "").lower().split()


def models_named(query: str | None) -> list[ModelSpec]:
    """Return models whose name contains the query, or the model of a config.json; all of them without a query."""
    if query is None:
        return list(models.all_specs())
    words = query.lower().split()
    kinds = [word for word in words if word in ARCHITECTURE_WORDS and len(words) > 1]
    rest = " ".join(word for word in query.split() if word.lower() not in kinds) or None
    if kinds:
        found = models_named(rest)
        return [one for one in found if all(ARCHITECTURE_WORDS[kind] in architecture(one) for kind in kinds)] or found
    if query.strip().lower() in ARCHITECTURE_WORDS:
        wanted = ARCHITECTURE_WORDS[query.strip().lower()]
        return [one for one in models.all_specs() if wanted in architecture(one)]
    return [models.find(name) for name in models.search(query)] or [model_named(query, trained=False)[0]]


@verb(requests.ModelRequest)
def find_model(request: requests.ModelRequest) -> ModelSpec:
    """Return one model."""
    return model_named(request.name, trained=False)[0]


@verb(requests.GpuCatalogue, name="list_gpus")
def gpu_catalogue(request: requests.GpuCatalogue) -> list[Gpu]:
    """Return GPUs whose name contains the query; all of them without one."""
    query = request.query
    if query is None:
        return Listing(clusters.gpus(), GPU_COLUMNS)
    part = clusters.normalize_name(query)
    named = [gpu for gpu in clusters.gpus() if part and part in clusters.normalize_name(gpu.name)]
    return Listing(named or [_gpu_of(query)], GPU_COLUMNS)


def _gpu_of(query: str) -> Gpu:
    """Return the GPU of a name in any spelling, of a cloud instance, or of a cluster."""
    try:
        return clusters.gpu(query)
    except InputError as error:
        try:
            return clusters.cluster(query).gpu
        except InputError:
            raise error from None


@verb(requests.Rules, name="list_rules")
def rule_catalogue(request: requests.Rules) -> list[Rule]:
    """Return rules by part of their id, other frameworks' rules included; all of ours without a query."""
    query = request.query
    found = [r for r in rules.all_rules().values() if r.pitfall or not request.pitfalls]
    if query is None:
        return Listing(found, RULE_COLUMNS)
    named = [r for r in found if query.lower() in r.id.lower()]
    if not named and not request.pitfalls:
        from meshwright.frameworks import rule_catalog

        named = rule_catalog.find_rules(query)
    if not named:
        text = query.lower()
        named = [r for r in found if text in f"{r.symptom} {r.cause}".lower()]
    if not named and closest(query, rules.all_rules()):
        raise unknown("rule", query, rules.all_rules())
    return Listing(named, RULE_COLUMNS)


def recipe_text(found: Recipe, format: str = "toml") -> str:
    """Return a recipe as TOML, YAML, JSON or the Python that builds it."""
    return files.to_text(found, one_of("format", format, files.FORMATS))


def verification_reports() -> dict[str, dict[str, Any]]:
    """Return the verification report of each shipped recipe."""
    from meshwright.dryrun import verification

    reports = verification.read()
    return {name: msgspec.to_builtins(report) for name, report in reports.items() if index.is_known(name)}


def save_recipe(plan: Plan, path: str, comments: Sequence[str] = ()) -> None:
    """Write the plan's recipe as a TOML file, below the comments."""
    if Path(path).suffix.lower() != ".toml":
        raise InputError("must end in .toml", field="save", value=path, fix=(f"--save {Path(path).stem}.toml",))
    named = msgspec.structs.replace(plan.recipe, name=Path(path).stem, engine=plan.question.engine)
    text = "".join(f"# {' '.join(one.split())}\n" for one in comments)
    write_text(path, text + files.to_text(files.with_relative_cluster(named, Path(path).parent), "toml"), "save")


def save_files(contents: Mapping[str, str], folder: str) -> tuple[str, ...]:
    """Write files into a folder, return their paths; raise OutputError rather than replace a file that differs."""
    place = Path(folder)
    try:
        for inside in (place, *((place / name).parent for name in contents)):
            inside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot be created: {error.strerror}", field="out", value=folder) from error
    for name, text in contents.items():
        path = place / name
        if path.exists() and (not path.is_file() or path.read_bytes() != text.encode()):
            fix = (f"another name than {path}", f"rm {path}")
            raise OutputError("already exists with other contents", field="out", value=str(path), fix=fix)
        write_text(str(path), text, "out")
    return tuple(str(place / name) for name in contents)


class RecipeRow(Part, frozen=True, kw_only=True):
    """A row of the recipe index."""

    name: str
    family: str
    model: str
    goal: str
    gpus: int
    gpu: str
    seq_length: int
    benchmark: bool


class RecipesResponse(Response, frozen=True, kw_only=True):
    """Recipes that match; `left_out` counts those beyond the limit."""

    recipes: Sequence[RecipeRow]
    left_out: int | UnsetType = UNSET
    notes: Sequence[str] | UnsetType = UNSET

    @property
    def ok(self) -> bool:
        """Return whether a recipe matches."""
        return bool(self.recipes)


class RecipeResponse(Response, frozen=True, kw_only=True):
    """One recipe with every field, and as text in the requested format."""

    recipe: Recipe
    format: str | UnsetType = UNSET
    text: str | UnsetType = UNSET


class ParameterCounts(Part, frozen=True, kw_only=True):
    """Exact parameter counts."""

    total: int
    active: int
    embedding: int
    head: int
    routed_experts: int
    vision: int
    mtp: int


class ModelPart(Part, frozen=True, kw_only=True):
    """A model's shape and parameter counts."""

    name: str
    family: str
    kind: str
    hf_id: str
    layers: int
    hidden: int
    vocab: int
    experts: int
    max_seq_length: int
    parameters: ParameterCounts
    source: str


class ModelResponse(Response, frozen=True, kw_only=True):
    """One model."""

    model: ModelPart


class GpuPart(Part, frozen=True, kw_only=True):
    """A GPU's facts and their source."""

    name: str
    arch: str
    memory_gib: float
    peak_tflops_dense: Mapping[str, float]
    hbm_gb_s: float
    link: str
    nvlink_gb_s_per_direction: float
    nvlink_domain: int
    network_gb_s: float
    gpus_per_node: int
    host_gib_per_gpu: float
    source: str
    note: str


class GpusResponse(Response, frozen=True, kw_only=True):
    """GPUs."""

    gpus: Sequence[GpuPart]


class RulePart(Part, frozen=True, kw_only=True):
    """A rule with symptom and cause."""

    id: str
    subject: str
    severity: Severity
    field: str
    engines: Sequence[str]
    symptom: str
    cause: str
    fix_fields: Sequence[str]
    pitfall: str


class RulesResponse(Response, frozen=True, kw_only=True):
    """Rules; `left_out` counts those beyond the limit."""

    rules: Sequence[RulePart]
    left_out: int | UnsetType = UNSET


def recipes_response(
    entries: Sequence[index.IndexEntry],
    request: requests.Recipes = requests.Recipes(),  # noqa: B008  # immutable
) -> RecipesResponse:
    """Return the response of recipes."""
    rows = [copied(RecipeRow, one) for one in entries[: request.limit]]
    return RecipesResponse(recipes=rows, left_out=len(entries) - len(rows) or UNSET)


def recipe_response(found: Recipe, request: requests.RecipeRequest | None = None) -> RecipeResponse:
    """Return the response of recipe, with its text if a format was requested."""
    format = None if request is None else request.format
    if format is None:
        return RecipeResponse(recipe=found)
    return RecipeResponse(recipe=found, format=format, text=recipe_text(found, format))


def model_part(model: ModelSpec) -> ModelPart:
    """Return a model's shape and parameter counts."""
    return copied(
        ModelPart,
        model,
        layers=model.num_layers,
        experts=model.moe.experts if model.moe else 0,
        parameters=copied(ParameterCounts, model.params, routed_experts=model.params.routed),
    )


def model_response(found: ModelSpec, request: requests.ModelRequest | None = None) -> ModelResponse:
    """Return the response of model."""
    return ModelResponse(model=model_part(found))


def gpus_response(found: Sequence[Gpu], request: requests.GpuCatalogue | None = None) -> GpusResponse:
    """Return the response of gpus."""
    return GpusResponse(gpus=[_gpu_part(gpu) for gpu in found])


def _gpu_part(gpu: Gpu) -> GpuPart:
    return copied(
        GpuPart,
        gpu,
        peak_tflops_dense=gpu.peak_tflops,
        nvlink_gb_s_per_direction=gpu.nvlink_gb_s,
        host_gib_per_gpu=gpu.host_gib,
    )


def rule_part(rule: Rule) -> RulePart:
    """Return a rule with symptom and cause."""
    return copied(RulePart, rule, fix_fields=sorted({name for fix in rule.fixes for name in fix}))


def rules_response(found: Sequence[Rule], request: requests.Rules = requests.Rules()) -> RulesResponse:  # noqa: B008  # immutable
    """Return the response of rules."""
    rows = [rule_part(one) for one in found[: request.limit]]
    return RulesResponse(rules=rows, left_out=len(found) - len(rows) or UNSET)
