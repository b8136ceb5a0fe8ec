"""Measures the perplexity of a trained model on held-out data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.engine import processes
from meshwright.engine.build_trainer import build_trainer
from meshwright.engine.post_training.convert import as_model_folder
from meshwright.engine.post_training.open_checkpoint import inspect, recipe_of, resolve_checkpoint
from meshwright.engine.rank_env import Process, detect
from meshwright.engine.run_spec import RankSpec
from meshwright.engine.train import preloaded
from meshwright.engine.validate import data_ranks, validate
from meshwright.errors import InputError
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Architecture, Checkpoint, Data, Kernels, Layout, Precision, Recipe, Train

if TYPE_CHECKING:
    from meshwright.recipes.types import Goal

SAMPLES_PER_STEP = 8  # for each rank


class EvaluateResult(msgspec.Struct, frozen=True):
    """Measured perplexity."""

    dataset: str
    perplexity: float
    loss: float  # nats per token
    samples: int
    tokens: int
    held_out: bool  # whether the samples were held out from training
    ranks: int


def evaluate(
    path: str,
    *,
    dataset: str | None = None,
    samples: int = 256,
    nproc: int | None = None,
    answers: bool = False,
    overrides: Sequence[str] = (),
) -> EvaluateResult:
    """Evaluate a run, a checkpoint or a model folder on a dataset; by default on a run's held-out data."""
    with ExitStack() as stack:
        recipe, held_out = _resolve_data(path, dataset, answers)
        folder = stack.enter_context(as_model_folder(path, merged=True))
        process = detect()
        world = nproc or (process.world if process else 1)
        recipe = override.apply(_for_evaluation(recipe, folder, world), overrides)
        return _measure(recipe, folder, world, nproc, samples, held_out)


def _resolve_data(path: str, dataset: str | None, answers: bool) -> tuple[Recipe, bool]:
    """Return a recipe with the evaluation data, and whether it is the run's held-out data."""
    found = inspect(path)
    goal: Goal = "sft" if answers else "pretrain"
    if found.type in ("run", "checkpoint"):
        trained = recipe_of(resolve_checkpoint(found))[0]
        if dataset is None:
            _require_held_out_data(trained.data, path)
            return trained, True
        named = msgspec.structs.replace(trained.data, dataset=dataset, blend={})
        return msgspec.structs.replace(trained, data=named), False
    if dataset is None:
        raise InputError("a model folder has no dataset to evaluate on", field="dataset", fix=("--dataset DATA",))
    return Recipe(name="evaluation", model=path, goal=goal, cluster="1xH100", data=Data(dataset=dataset)), False


def _require_held_out_data(data: Data, path: str) -> None:
    """Raise if the run trained on all of a dataset."""
    from meshwright.engine.data.dataset_registry import REGISTRY
    from meshwright.engine.data.open_dataset import MOCK_NAMES

    for name in data.blend or (data.dataset,):
        known = REGISTRY.get(name)
        if name in MOCK_NAMES or data.validation or data.validation_part or (known and known.held_out):
            continue
        raise InputError(
            f"the run has no held-out data: it was trained on all of {name}",
            field="checkpoint",
            value=path,
            fix=("--dataset DATA", "train with data.validation_part=0.02"),
        )


def _for_evaluation(recipe: Recipe, folder: Path, world: int) -> Recipe:
    """Return the recipe with a folder's weights, sharded over the ranks, with equal weight per token."""
    import torch

    compute: Any = "bf16" if torch.cuda.is_available() else "fp32"
    data = recipe.data
    return msgspec.structs.replace(
        recipe,
        model=str(folder),
        goal="sft" if recipe.goal == "peft" else recipe.goal,
        architecture=Architecture(),
        layout=Layout(),
        kernels=Kernels(),
        precision=Precision(compute=compute, master=compute),
        data=msgspec.structs.replace(data, tokenizer=data.tokenizer or str(folder), anneal_blend={}, anneal_steps=0),
        train=Train(global_batch_size=SAMPLES_PER_STEP * world, steps=1, per_token_loss=True, seed=recipe.train.seed),
        checkpoint=Checkpoint(pretrained=str(folder)),
    )


def _measure(
    recipe: Recipe, folder: Path, world: int, nproc: int | None, samples: int, held_out: bool
) -> EvaluateResult:
    from meshwright.engine.model_families import family_of

    family = family_of(recipe)
    config = family.config_for(recipe)
    case = validate(recipe, config, detect(), world)
    step = recipe.train.global_batch_size
    steps = max(1, math.ceil(samples / step))
    spec = RankSpec(recipe=recipe, config=config.to_dict(), case=case, folder="", weights=str(folder))
    results = processes.start(_evaluate_rank, spec, steps, held_out, nproc=nproc, preload=preloaded(family, config))
    loss, tokens = next(result for result in results if result is not None)
    ranks = data_ranks(recipe.layout, world)
    name = ", ".join(recipe.data.blend) or recipe.data.dataset
    return EvaluateResult(name, math.exp(loss), loss, steps * step, tokens, held_out, ranks)


def _evaluate_rank(process: Process, spec: RankSpec, steps: int, held_out: bool) -> tuple[float, int] | None:
    """Evaluate on one rank."""
    from meshwright.engine.model_families import family_of

    trainer = build_trainer(spec, process.device)
    source: Any = trainer.loader.source
    if held_out:
        source = family_of(spec.recipe).open_source(spec.recipe, trainer.config, True, trainer.weights)
    found = trainer.measure(source, steps)
    trainer.close()
    return (found.loss, found.tokens) if found is not None and process.rank == 0 else None
