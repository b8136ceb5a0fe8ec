"""What a check of a file leaves open: values known only at run time, unknown models and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright import costs
from meshwright.clusters import DEFAULT_GPU, Cluster
from meshwright.frameworks.framework import NOT_ESTIMATED, Content
from meshwright.frameworks.mapping import text_of
from meshwright.frameworks.model_match import OWN_MODEL, find_model, model_option
from meshwright.frameworks.result import UnresolvedValue
from meshwright.frameworks.to_recipe import ImportedRecipe, alternatives, complete
from meshwright.planner import case_of
from meshwright.recipes import overrides as override
from meshwright.recipes.types import field_value


def unresolved_values(imported: ImportedRecipe) -> Iterator[UnresolvedValue]:
    for key, setting in imported.parsed.settings.items():
        if setting.unresolved:
            yield UnresolvedValue(key, str(setting.value), setting.unresolved, setting.file, setting.line)


def open_memory_fields(imported: ImportedRecipe, on: Cluster) -> tuple[str, ...]:
    """Return the fields that are known only at run time and on which the memory depends."""
    if imported.model is None:
        return ()
    model, recipe, open_fields = imported.model, complete(imported, on), []
    for field in imported.mapped.unresolved:
        if field in imported.typed or field in imported.unknown_fields:
            continue
        changed = [override.change(recipe, {field: value})[0] for value in alternatives(field)]
        totals = {float(costs.estimate(case_of(one, model, on, imported.engine)).memory.total) for one in changed}
        open_fields += [field] if len(totals) > 1 else []
    return (*imported.unknown_fields, *open_fields)


def _unknown_gpus(imported: ImportedRecipe, candidates: Sequence[Cluster]) -> str:
    """Return what is not known of the GPUs, their number or their type, and how to say it."""
    request, types = imported.parsed.gpu_request, {one.gpu.name for one in candidates}
    gpu = next(iter(types)) if len(types) == 1 else ""
    if request.count is not None:
        what, tried = f"the type of the {request.count} GPUs is unknown", "type"
    elif gpu:
        what, tried = f"the number of {gpu} is unknown", "number"
    else:
        what, tried = "the GPUs are unknown", "count and type"
    gpus = request.text(gpu or DEFAULT_GPU) or f"8x{gpu or DEFAULT_GPU}"
    return f"{what}: only findings that hold for every common {tried} are reported (--gpus {gpus})"


def notes_on_unchecked(
    content: Content, imported: ImportedRecipe, candidates: Sequence[Cluster], open_fields: Sequence[str]
) -> Iterator[str]:
    """Yield what was not checked; `candidates` are the clusters tried in place of unknown GPUs."""

    def examples(fields: Sequence[str]) -> str:
        return " ".join(f"{field}={text_of(field_value(imported.recipe, field))}" for field in dict.fromkeys(fields))

    run_time = [field for field in open_fields if field not in imported.unknown_fields]
    named = imported.named_model
    if imported.model is not None and imported.recipe.goal == "peft" and imported.recipe.peft.method == "lora8bit":
        yield (
            "frozen weights of linear layers in 8 bits (LLM.int8): 1 byte each, embeddings and head in 16 bits; no "
            "step of it was measured, and it is mostly slower than in 16 bits"
        )
    if imported.model is None and named and find_model(named) is not None:
        if not any(NOT_ESTIMATED in note for note in imported.parsed.notes):
            yield f"{named}: architecture and memory were not checked"
    elif imported.model is None:
        what = f"{named} is not in the catalogue" if named else "the file does not name its model"
        own = model_option(content)
        option = own if named or own != OWN_MODEL else "--model NAME"
        yield f"{what}: architecture and memory were not checked ({option})"
    elif imported.unknown_fields:
        example = examples((*imported.unknown_fields, *run_time))
        yield f"the training program sets some fields: memory is checked if you pass them, e.g. {example}"
    elif run_time:
        yield f"some values are known only when it runs: memory is checked if you pass them, e.g. {examples(run_time)}"
    if imported.model is not None and candidates:
        yield _unknown_gpus(imported, candidates)
