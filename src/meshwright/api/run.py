"""Trainings and what is done with their models; what runs imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import serialize
from meshwright.api.checks import check_recipe, export
from meshwright.api.resolve import model_named, recipe_from
from meshwright.engine.run_spec import RunSpec
from meshwright.errors import InputError
from meshwright.parsing import one_of
from meshwright.recipes import overrides as override
from meshwright.recipes.types import ENGINES, Recipe

if TYPE_CHECKING:
    from meshwright.engine.train import TrainResult
    from meshwright.launch.build_job import Started


BENCH_OVERRIDES = ("train.steps=50", "train.check_nan=false", "train.log_every=10", "train.eval_every=0")


def train(
    target: str | Recipe,
    *,
    dataset: str | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
    **run: Any,
) -> TrainResult:
    """Train a recipe on the meshwright engine; imports torch. `run` are fields of RunSpec.

    If the folder `out` contains checkpoints, training resumes from the latest one.
    """
    return _run(target, dataset, model, RunSpec(**run), overrides)


def bench(target: str | Recipe, *, model: str | None = None, overrides: Sequence[str] = (), **run: Any) -> TrainResult:
    """Measure a recipe's throughput: 50 steps of mock data; imports torch. `run` are fields of RunSpec."""
    spec = RunSpec(**run, checkpoints=False, random_weights=True)
    return _run(target, "mock", model, spec, overrides, BENCH_OVERRIDES)


def _run(
    target: str | Recipe,
    dataset: str | None,
    model: str | None,
    run: RunSpec,
    overrides: Sequence[str],
    defaults: Sequence[str] = (),
) -> TrainResult:
    from meshwright.engine import train

    found = target if isinstance(target, Recipe) else recipe_from(target)
    if model is not None:
        found = msgspec.structs.replace(found, model=model_named(model)[1])
    automatic = [text for text in overrides if text.replace(" ", "").endswith("micro_batch_size=auto")]
    given = [text for text in overrides if text not in automatic]
    set_first = override.requested(found, defaults)
    found = override.change(found, set_first)[0]
    given += [f"data.dataset={dataset}"] if dataset else []
    asked = override.apply(found, given)
    pinned = set_first | override.requested(found, given)
    return train.train(asked, msgspec.structs.replace(run, find_micro_batch=bool(automatic)), pinned)


def launch(
    target: str,
    on: str,
    *,
    gpus: str | int | None = None,
    dataset: str | None = None,
    model: str | None = None,
    tiny: bool = False,
    out: str | None = None,
    to: str | None = None,
    submit: bool = False,
    write: str | None = None,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    **options: Any,
) -> Started:
    """A recipe as a job for a scheduler, checked before anything is written; submitted where that is asked for.

    `to` names the framework that runs it; our own engine does otherwise.
    """
    from meshwright.launch import build_job, native_job

    found = recipe_from(target)
    if to is not None:
        only = [name for name, value in (("--tiny", tiny), ("--out", out), ("--model", model)) if value]
        if only:
            raise InputError("is an option of our own engine", field=only[0], value=to, fix=("without --to",))
        given = [*overrides, *([f"data.dataset={dataset}"] if dataset else [])]
        written, checked = export(target, to, gpus=gpus, overrides=given)
        asked = build_job.exported(written, checked)
        return build_job.launch(asked, on, submits=submit, folder=write, overwrite=overwrite, options=options)
    found = found if model is None else msgspec.structs.replace(found, model=model_named(model)[1])
    training = native_job.Training(target, dataset, model, tiny, out, overrides)

    def judged() -> native_job.Checked:
        checked = check_recipe(found, gpus, ENGINES[0], training.known_overrides)
        return checked.recipe, checked.cluster, checked.findings

    asked = native_job.request_for(training, on, found, gpus, judged)
    return build_job.launch(asked, on, submits=submit, folder=write, overwrite=overwrite, options=options)


def watch(started: Started, say: Callable[[str], None], log: Callable[[str], None]) -> Started:
    """Follows a submitted job to its end; `say` gets the changes of its state, `log` the lines of its log."""
    from meshwright.launch import watch as watching

    return msgspec.structs.replace(started, final_state=watching.watch(str(started.number), say, log))


def tokenize(
    inputs: Sequence[str],
    tokenizer: str,
    out: str,
    *,
    column: str = "text",
    workers: int | None = None,
    shard_tokens: int | None = None,
    skip_bad_lines: bool = False,
    format: str = "shards",
) -> dict[str, Any]:
    """Turns text, JSON lines or Parquet into tokens that training reads from disk."""
    from meshwright.engine.data.tokenize import SHARD_TOKENS, tokenize

    made = tokenize(
        inputs,
        tokenizer,
        out,
        text_column=column,
        workers=workers,
        shard_tokens=shard_tokens or SHARD_TOKENS,
        bad_lines="skip" if skip_bad_lines else "refuse",
        format=one_of("format", format, ("shards", "megatron")),
    )
    return serialize.to_json(made)


def generate(
    checkpoint: str,
    prompt: str,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool | None = None,
) -> dict[str, Any]:
    """Lets a trained model go on from a prompt; imports torch."""
    from meshwright.engine.post_training.generate import Asking
    from meshwright.engine.post_training.generate import generate as ask

    said = ask(checkpoint, prompt, Asking(max_tokens, temperature, top_p, seed, chat))
    return serialize.to_json(said, prompt=prompt)


def evaluate(
    checkpoint: str,
    *,
    dataset: str | None = None,
    samples: int = 256,
    nproc: int | None = None,
    answers_only: bool = False,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """The perplexity of a trained model; imports torch."""
    from meshwright.engine.post_training.perplexity import evaluate as measure

    found = measure(
        checkpoint, dataset=dataset, samples=samples, nproc=nproc, answers=answers_only, overrides=overrides
    )
    return serialize.to_json(found, checkpoint=checkpoint)


def convert(
    checkpoint: str,
    out: str,
    *,
    dtype: str | None = None,
    shard_gib: float = 5.0,
    consolidated: bool = False,
    merge: bool = False,
) -> dict[str, Any]:
    """Writes the model of a checkpoint as a Hugging Face folder; imports torch."""
    from meshwright.engine.post_training.convert import convert as write

    made = write(checkpoint, out, dtype=dtype, shard_gib=shard_gib, consolidated=consolidated, merge=merge)
    return serialize.to_json(made, checkpoint=checkpoint)
