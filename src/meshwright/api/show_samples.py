"""Show samples of a dataset as training sees them, with their loss mask."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from meshwright.api import run_requests as requests
from meshwright.api.paths import check_run_paths
from meshwright.api.responses import Part, Response, copied
from meshwright.api.targets import depends_on_gpus, recipe_for
from meshwright.api.verb_function import verb
from meshwright.display import Row
from meshwright.errors import InputError
from meshwright.extras import ENGINE
from meshwright.recipes import overrides as override
from meshwright.recipes.dataset_file import is_dataset_file
from meshwright.recipes.types import Recipe

ANY_GPU = "1xH100"  # a recommended recipe is for some GPU; the data do not depend on it


class SpanPart(Part, frozen=True, kw_only=True):
    """Consecutive tokens of a conversation that are all in the loss, or all not."""

    text: str
    tokens: int
    in_loss: bool


class SamplePart(Part, frozen=True, kw_only=True):
    """A conversation as tokens; `dropped` says why it is not trained on."""

    where: str
    tokens: int
    target_tokens: int
    truncated_tokens: int
    spans: Sequence[SpanPart]
    dropped: str


class SamplesResponse(Response, frozen=True, kw_only=True):
    """The first conversations with their loss mask, and the statistics of all."""

    recipe: str
    dataset: str
    tokenizer: str
    mask_source: str
    train_on: str
    seq_length: int
    packing: bool
    rows: int
    kept: int
    dropped: int
    dropped_rows: Sequence[str]  # the first of them, with the reason
    duplicates: int
    truncated: int  # conversations that lost tokens and are used
    longest: int
    tokens: int
    target_tokens: int
    samples_per_epoch: int
    real_tokens: float
    samples: Sequence[SamplePart]

    def summary(self) -> list[Row]:
        """Return the spans of every conversation, and the statistics."""
        shown = [
            ("loss" if span.in_loss else "context", repr(span.text)) for sample in self.samples for span in sample.spans
        ]
        return [("Samples", f"{self.dataset} with {self.tokenizer}: {self.mask_source}"), *shown]


def _of_model(request: requests.Samples) -> requests.Samples:
    """Return a request that names a dataset and --model as one that names the model and --dataset."""
    if request.dataset or not is_dataset_file(request.recipe):
        return request
    if not request.model:
        fix = (shlex.join(["meshwright", "samples", str(request.recipe), "--model", "qwen3-0.6b"]),)
        raise InputError("is a dataset: name the model too", field="recipe", value=request.recipe, fix=fix)
    goal = request.goal or "sft"
    return msgspec.structs.replace(request, recipe=request.model, model=None, goal=goal, dataset=request.recipe)


@verb(requests.Samples, ENGINE)
def samples(request: requests.Samples) -> SamplesResponse:
    """Return the first conversations of a dataset as training sees them."""
    request = _of_model(request)
    options = {"framework": request.framework, "model": request.model}
    gpus = ANY_GPU if depends_on_gpus(request.recipe) else None
    changes = [*request.overrides, *([f"data.dataset={request.dataset}"] if request.dataset else [])]
    recipe = override.apply(recipe_for(request.recipe, request.goal, gpus, changes, **options), changes)
    if recipe.goal == "pretrain" or recipe.data.images or "mock" in (recipe.data.blend or (recipe.data.dataset,)):
        reason = "shows the conversations of fine-tuning datasets; in pretraining every token is in the loss"
        fix = (
            ("--goal sft --dataset FILE", "data.images=false") if recipe.data.images else ("--goal sft --dataset FILE",)
        )
        raise InputError(reason, field="samples", value=recipe.data.dataset, fix=fix)
    check_run_paths(recipe, None)
    from meshwright.engine.data.rendered import render
    from meshwright.engine.data.tokenization_stats import total_stats

    parts = [_part(recipe, name) for name in recipe.data.blend] or [recipe]
    all_found = [render(part, request.count) for part in parts]
    found, stats = all_found[0], total_stats([one.stats for one in all_found])
    count = sum(one.samples for one in all_found)
    real = sum(one.real_tokens * one.samples for one in all_found) / max(count, 1)
    return copied(
        SamplesResponse,
        found,
        recipe=recipe.name,
        dataset=", ".join(part.data.dataset for part in parts),
        real_tokens=real,
        train_on=recipe.data.train_on,
        seq_length=recipe.data.seq_length,
        packing=recipe.data.packing,
        rows=stats.rows,
        kept=stats.kept,
        dropped=stats.rows - stats.kept,
        dropped_rows=stats.dropped_rows,
        duplicates=stats.duplicates,
        truncated=stats.used_truncated,
        longest=stats.max_length,
        tokens=stats.tokens,
        target_tokens=stats.target_tokens,
        samples_per_epoch=count,
        samples=[
            copied(SamplePart, one, spans=[copied(SpanPart, span) for span in one.spans])
            for part in all_found
            for one in part.rendered
        ],
    )


def _part(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with one dataset of its blend."""
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, dataset=name, blend={}))
