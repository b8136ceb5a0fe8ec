"""Tokenize data, and work on checkpoints: generate, evaluate, convert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.api import run_requests as requests
from meshwright.api.paths import check_folder
from meshwright.api.responses import Response, copied
from meshwright.api.verb_function import verb
from meshwright.display import plural
from meshwright.errors import InputError
from meshwright.extras import ENGINE
from meshwright.file_access import missing_path
from meshwright.notes import note
from meshwright.stages import stage


class TokenizeResponse(Response, frozen=True, kw_only=True):
    """What was tokenized."""

    folder: str
    documents: int
    tokens: int
    shards: int
    dtype: str
    text_bytes: int
    seconds: float
    skipped: int
    skipped_lines: Sequence[str]
    empty: int


class GenerateResponse(Response, frozen=True, kw_only=True):
    """Generated text."""

    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    chat: bool
    device: str
    step: int | None
    best_step: int | None


class EvaluateResponse(Response, frozen=True, kw_only=True):
    """The perplexity of a model on a dataset."""

    source: str
    step: int | None
    best_step: int | None
    dataset: str
    part: str
    perplexity: float | None
    loss: float
    samples: int
    available: int | None
    tokens: int
    seq_length: int | None
    held_out: bool
    ranks: int
    base: str | None


class ConvertResponse(Response, frozen=True, kw_only=True):
    """The Hugging Face folder that was written."""

    source: str
    folder: str
    files: int
    bytes: int
    dtype: str
    step: int | None
    best_step: int | None


@verb(requests.Tokenize, ENGINE)
def tokenize(request: requests.Tokenize) -> TokenizeResponse:
    """Tokenize text, JSON lines or Parquet into shards that training reads from disk."""
    check_folder(request.tokenizer, "tokenizer")
    for name in request.inputs:
        if not Path(name).expanduser().exists():
            raise missing_path(name, "inputs")
    from meshwright.engine.data.tokenize import SHARD_TOKENS
    from meshwright.engine.data.tokenize import tokenize as write_shards

    done = write_shards(
        request.inputs,
        request.tokenizer,
        request.out,
        text_column=request.column,
        workers=request.workers,
        shard_tokens=request.shard_tokens or SHARD_TOKENS,
        bad_lines="skip" if request.skip_bad_lines else "refuse",
        format=request.format,  # type: ignore[arg-type]  # one of its choices, as validated
        documents=request.documents,  # type: ignore[arg-type]  # as above
    )
    return copied(TokenizeResponse, done)


@verb(requests.Generate, ENGINE)
def generate(request: requests.Generate) -> GenerateResponse:
    """Generate text from a prompt with a trained model."""
    check_folder(request.source, "source")
    from meshwright.engine.post_training.generate import GenerateOptions
    from meshwright.engine.post_training.generate import generate as sample

    asking = GenerateOptions(
        request.max_tokens, request.temperature, request.top_p, request.seed, request.chat, request.system
    )
    prompt = _prompt_text(request.prompt)
    done = sample(request.source, prompt, asking, request.checkpoint)
    if not done.text.strip():
        tokens = plural(done.new_tokens, "token")
        note(f"the model generated {tokens} without visible text (the end of the text, other special tokens or blanks)")
    return copied(GenerateResponse, done, prompt=prompt)


def _prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text: messages as JSON, as the command line takes them."""
    if not isinstance(prompt, list):
        return str(prompt)
    if not prompt or not all(isinstance(one, dict) and "role" in one for one in prompt):
        reason, fix = "a list must have messages with role and content", '[{"role": "user", "content": "Hi"}]'
        raise InputError(reason, field="prompt", value=str(prompt), fix=(fix,))
    return msgspec.json.encode(prompt).decode()


@verb(requests.Evaluate, ENGINE)
def evaluate(request: requests.Evaluate) -> EvaluateResponse:
    """Measure the perplexity of a trained model."""
    check_folder(request.source, "source")
    if request.base and request.checkpoint is not None:
        reason = "has no effect with --base, which evaluates the model before the run's first step"
        raise InputError(reason, "--checkpoint", request.checkpoint, ("without --checkpoint", "without --base"))
    stage("evaluate: importing torch and transformers")
    from meshwright.engine.post_training.perplexity import evaluate as measure

    done = measure(
        request.source,
        dataset=request.dataset,
        samples=request.samples,
        nproc=request.nproc,
        answers=request.answers,
        overrides=request.overrides,
        which=request.checkpoint,
        base=request.base,
    )
    return copied(EvaluateResponse, done, source=request.source)


@verb(requests.Convert, ENGINE)
def convert(request: requests.Convert) -> ConvertResponse:
    """Write the model of a checkpoint as a Hugging Face folder."""
    check_folder(request.source, "source")
    stage("convert: importing torch and transformers")
    from meshwright.engine.post_training.convert import convert as write

    done = write(
        request.source,
        request.out,
        dtype=request.dtype,
        shard_gib=request.shard_gib,
        consolidated=request.consolidated,
        merge=request.merge,
        which=request.checkpoint,
        model=request.model,
    )
    return copied(ConvertResponse, done, source=request.source, folder=str(done.folder))
