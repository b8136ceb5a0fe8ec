"""Measures the perplexity of a trained model on held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.engine import processes
from meshwright.engine.build_trainer import build_trainer
from meshwright.engine.checkpoint.metadata import read_state
from meshwright.engine.data.files import find_rows, longest_suffix
from meshwright.engine.data.finite import GENERATED_SAMPLES, FiniteSource, known_size
from meshwright.engine.data.held_out import held_out_set, is_mock
from meshwright.engine.data.open_dataset import is_text
from meshwright.engine.diffusion.config import is_diffusion
from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.metrics.record import perplexity
from meshwright.engine.post_training.convert import as_model_folder
from meshwright.engine.post_training.open_checkpoint import (
    FoundCheckpoint,
    base_model_of,
    find_checkpoint,
    initial_weights_of,
    recipe_of,
    require_tokenizer,
    resolve_checkpoint,
)
from meshwright.engine.rank_env import Process, detect
from meshwright.engine.run_spec import RankSpec
from meshwright.engine.train import preloaded
from meshwright.engine.validate import data_ranks, validate
from meshwright.errors import InputError
from meshwright.models import find as find_model
from meshwright.notes import no_notes, note
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Architecture, Checkpoint, Data, Kernels, Layout, Precision, Recipe, Train
from meshwright.stages import stage

if TYPE_CHECKING:
    from meshwright.recipes.types import Goal

SAMPLES_PER_STEP = 8  # for each rank
MAX_SAMPLES = 4096  # of a large dataset, unless --samples is given


class EvaluateResult(msgspec.Struct, frozen=True):
    """Measured perplexity."""

    dataset: str  # the file or dataset that was evaluated
    part: str  # of the dataset; empty: all of it
    perplexity: float | None  # None for models that predict no tokens
    loss: float  # nats per token
    samples: int  # that were evaluated, each once
    available: int | None  # samples of the dataset; None for generated data
    tokens: int
    seq_length: int | None  # tokens per sample; None for models that predict no tokens
    held_out: bool  # whether the samples were held out from training
    ranks: int
    step: int | None  # of the checkpoint; None for a model folder
    best_step: int | None = None  # of a run's checkpoint with a lower validation loss than the one evaluated
    base: str | None = None  # the model that the run started from, if that was evaluated


def evaluate(
    path: str,
    *,
    dataset: str | None = None,
    samples: int | None = None,
    nproc: int | None = None,
    answers: bool = False,
    overrides: Sequence[str] = (),
    which: str | None = None,
    base: bool = False,
) -> EvaluateResult:
    """Evaluate a run, a checkpoint or a model folder on a dataset; by default on a run's held-out data.

    With `base`, the model is the one that the run started from.
    """
    found = find_checkpoint(path, which or ("latest" if base else None))
    with ExitStack() as stack:
        recipe, step = _recipe_of(found, path, dataset, answers, overrides)
        is_held_out = dataset is None or _is_validation_of(recipe.data, dataset)
        source = _base_folder(found, recipe, path) if base else found.path
        stage(f"evaluate: reading the weights of {source}")
        folder = stack.enter_context(as_model_folder(str(source), merged=True)).resolve()
        process = detect()
        world = nproc or (process.world if process else 1)
        recipe = _for_evaluation(recipe, folder, world)
        if dataset is not None:
            recipe = _on_all_of(recipe, dataset)
        recipe = override.apply(recipe, overrides)
        if dataset is not None:
            _refuse_other_data(recipe.data, dataset)
        _require_tokenizer(recipe, folder, path)
        held_out = held_out_set(recipe)
        if held_out is None:
            raise _no_held_out_data(recipe.data, path)
        if found.type == "checkpoint" and not base:
            _note_merged(recipe_of(resolve_checkpoint(found))[0])
        _warn_beyond_positions(recipe)
        stage(f"evaluate: loading the model and measuring its loss on {held_out.dataset}")
        measured = _measure(recipe, folder, world, nproc, samples)
        return EvaluateResult(
            dataset=held_out.dataset,
            part="" if recipe.data.validation_part == 1 and not is_mock(held_out.dataset) else held_out.part,
            perplexity=None if is_diffusion(recipe) else perplexity(measured.loss),
            loss=measured.loss,
            samples=measured.samples,
            available=measured.available,
            tokens=measured.tokens,
            seq_length=None if is_diffusion(recipe) else recipe.data.seq_length,
            held_out=is_held_out,
            ranks=data_ranks(recipe.layout, world),
            step=None if base else step,
            best_step=None if base else found.best_step,
            base=str(source) if base else None,
        )


def _recipe_of(
    found: FoundCheckpoint, path: str, dataset: str | None, answers: bool, overrides: Sequence[str]
) -> tuple[Recipe, int | None]:
    """Return the recipe of a run or checkpoint and its step, or a recipe for a model folder."""
    if found.type == "checkpoint":
        trained = recipe_of(resolve_checkpoint(found))[0]
        if dataset is None and held_out_set(trained) is None:
            raise _no_held_out_data(trained.data, path)
        return trained, read_state(found.path).step
    if dataset is None:
        raise InputError("a model folder has no dataset to evaluate on", field="dataset", fix=("--dataset DATA",))
    data = Data(dataset=dataset)
    plain = Recipe(name="evaluation", model=path, goal="pretrain", cluster="1xH100", data=data)
    with no_notes():  # the overrides are applied to the evaluation, which prints their notes
        columns = override.apply(plain, overrides).data.columns
    goal: Goal = "sft" if answers or has_conversations(dataset, columns) else "pretrain"
    if limit := _positions(found.path if found.type == "model" else base_model_of(found.path)):
        data = msgspec.structs.replace(data, seq_length=min(data.seq_length, limit))
    return msgspec.structs.replace(plain, goal=goal, data=data), None


def _require_tokenizer(recipe: Recipe, folder: Path, path: str) -> None:
    """Raise if text is to be evaluated, and neither the model nor an override has a tokenizer."""
    names = [name for name in recipe.data.blend or (recipe.data.dataset,) if not is_mock(name)]
    reads_text = not is_diffusion(recipe) and any(is_text(name) for name in names)
    if reads_text and recipe.data.tokenizer == str(folder):
        require_tokenizer(folder, path, "data.tokenizer=FOLDER with tokenizer.json and tokenizer_config.json")


def _note_merged(trained: Recipe) -> None:
    """Say that adapters trained beside weights in 4 bits are evaluated in the model that `convert --merge` writes."""
    if trained.goal == "peft" and trained.peft.method == "qlora":
        note(
            "adapters are evaluated merged into the weights before their rounding to 4 bits, as convert --merge writes "
            "them; the run's own validation loss is that of the rounded weights"
        )


def _positions(folder: Path) -> int:
    """Return the number of tokens that a folder's model was made for; 0 if its config does not say."""
    return find_model(str(folder.resolve())).max_seq_length  # a path, not a catalogue name


def _warn_beyond_positions(recipe: Recipe) -> None:
    """Warn of samples that are longer than the model's context; a table of learned positions refuses them later."""
    limit = 0 if is_diffusion(recipe) else _positions(Path(recipe.model))
    if limit and recipe.data.seq_length > limit:
        warn(
            f"data.seq_length={recipe.data.seq_length} exceeds the {limit} positions of the model, which raises the "
            f"loss; fix: data.seq_length={limit}"
        )


def has_conversations(dataset: str, typed: Mapping[str, str]) -> bool:
    """Return whether rows are conversations: of those the answers are evaluated; `typed` is data.columns."""
    from meshwright.engine.data.conversations import CONVERSATION_KEYS, detect_columns

    path, columns = Path(dataset).expanduser(), typed
    if path.is_file() and longest_suffix(path):
        columns = detect_columns(find_rows(path, "train").first(), typed, dataset)
    if "text" in columns or not CONVERSATION_KEYS & columns.keys():
        return False
    note(f"{dataset} has conversations: the loss is that of their answers, with the model's chat template")
    return True


def _on_all_of(recipe: Recipe, dataset: str) -> Recipe:
    """Return the recipe with all of a dataset held out; overrides may change that."""
    data = msgspec.structs.replace(recipe.data, dataset=dataset, blend={}, validation="", validation_part=1.0)
    return msgspec.structs.replace(recipe, data=data)


def _refuse_other_data(data: Data, dataset: str) -> None:
    """Raise if an override names other data than --dataset."""
    if data.blend or data.dataset != dataset:
        field, value = ("data.blend", ",".join(data.blend)) if data.blend else ("data.dataset", data.dataset)
        fix = ("without --dataset", f"without {field}")
        raise InputError(f"--dataset {dataset} names other data", field=field, value=value, fix=fix)


def _base_folder(found: FoundCheckpoint, recipe: Recipe, path: str) -> Path:
    """Return the folder with the weights that a run or adapters started from."""
    if found.type == "adapters":
        return base_model_of(found.path)
    if found.type != "checkpoint":
        reason = "a model folder does not name the model that it was trained from"
        raise InputError(reason, field="--base", value=path, fix=("use the --out folder of `meshwright train`",))
    folder = initial_weights_of(resolve_checkpoint(found), recipe)
    if folder is None:
        reason = "the run started from random weights, not from a model"
        raise InputError(reason, field="--base", value=path, fix=("without --base",))
    return folder


def _is_validation_of(data: Data, dataset: str) -> bool:
    """Return whether a dataset is the one on which the run validated."""
    own, named = (Path(one).expanduser().resolve() for one in (data.validation, dataset))
    return bool(data.validation) and own == named


def _no_held_out_data(data: Data, path: str) -> InputError:
    names = [name for name in data.blend or (data.dataset,) if not is_mock(name)]
    return InputError(
        f"the run has no held-out data: it was trained on all of {', '.join(names)}",
        field="source",
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
        data=msgspec.structs.replace(
            data, tokenizer=data.tokenizer or str(folder), anneal_blend={}, anneal_steps=0, streaming=False
        ),
        train=Train(global_batch_size=SAMPLES_PER_STEP * world, steps=1, per_token_loss=True, seed=recipe.train.seed),
        checkpoint=Checkpoint(pretrained=str(folder)),
    )


class _Measured(msgspec.Struct, frozen=True):
    """The result of an evaluation and the number of samples there were."""

    loss: float
    tokens: int
    samples: int
    available: int | None


def _measure(recipe: Recipe, folder: Path, world: int, nproc: int | None, samples: int | None) -> _Measured:
    from meshwright.engine.model_families import family_of

    family = family_of(recipe)
    config = family.config_for(recipe)
    case = validate(recipe, config, detect(), world)
    spec = RankSpec(recipe=recipe, config=config.to_dict(), case=case, folder="", weights=str(folder))
    results = processes.start(_evaluate_rank, spec, samples, nproc=nproc, preload=preloaded(family, config))
    measured: _Measured = next(result for result in results if result is not None)
    return measured


def _evaluate_rank(process: Process, spec: RankSpec, samples: int | None) -> _Measured | None:
    """Evaluate on one rank."""
    trainer = build_trainer(spec, process.device, held_out=True)
    source: Any = trainer.loader.source
    limit = samples or MAX_SAMPLES
    available = known_size(source, limit)
    size = min(limit, available) if available is not None else samples or GENERATED_SAMPLES
    batch = spec.recipe.train.global_batch_size
    found = trainer.measure(FiniteSource(source, size, batch), -(-size // batch))
    trainer.close()
    if found is None or process.rank != 0:
        return None
    return _Measured(found.loss, found.tokens, found.samples, available)
