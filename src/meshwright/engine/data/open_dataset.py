"""Opens a dataset or blend by name."""

from __future__ import annotations

from pathlib import Path

import msgspec

from meshwright.engine.data.blend import Blend, apply_temperature
from meshwright.engine.data.corpus_reader import SUFFIXES
from meshwright.engine.data.finite import MAX_BATCHES, Union
from meshwright.engine.data.megatron_files import megatron_prefix, open_megatron
from meshwright.engine.data.missing_column import MissingColumnError
from meshwright.engine.data.mock import VALIDATION_SEED_OFFSET, Mock
from meshwright.engine.data.sample_types import Source, no_validation_data
from meshwright.engine.data.shards import (
    Stream,
    StreamCorpus,
    is_shard_folder,
    open_shards,
    split_spans,
    token_out_of_vocab,
)
from meshwright.engine.data.shuffle import Shuffled
from meshwright.engine.data.text_errors import bad_lines, bad_lines_error, text_column
from meshwright.errors import InputError, closest
from meshwright.notes import note
from meshwright.recipes.types import Recipe

SAME_SHARE = 0.1  # by which the held-out share may differ from the requested one without a note
MOCK = "mock"
MOCK_NAMES = (MOCK, "llm-pretrain-mock")


def open_dataset(recipe: Recipe, vocab: int, held_out: bool, pretrained: Path | None) -> Source:
    """Open a recipe's dataset or blend, or its held-out part."""
    data = recipe.data
    if not data.blend and not (data.anneal_steps and data.anneal_blend):
        return _open_one(recipe, data.dataset, vocab, held_out, pretrained)
    if data.group_by_length:
        raise InputError(
            "grouping by length works within one dataset, not in a blend",
            field="data.group_by_length",
            value=True,
            fix=("data.group_by_length=false",),
        )
    if held_out and data.validation and (recipe.goal == "pretrain" or _names_a_dataset(data.validation)):
        return _open_one(recipe, data.dataset, vocab, held_out, pretrained)
    return _blend(recipe, vocab, held_out, pretrained)


def _blend(recipe: Recipe, vocab: int, held_out: bool, pretrained: Path | None) -> Blend | Union:
    data, train = recipe.data, recipe.train
    weights = apply_temperature(data.blend or {data.dataset: 1.0}, data.temperature)
    anneal = apply_temperature(data.anneal_blend, data.temperature, "data.anneal_blend") if data.anneal_blend else {}
    if bool(anneal) != bool(data.anneal_steps):
        raise InputError(
            "annealing needs both data.anneal_steps and data.anneal_blend",
            field="data.anneal_steps",
            value=data.anneal_steps,
            fix=("data.anneal_steps=0 without data.anneal_blend", "or set both"),
        )
    if data.anneal_steps > train.steps:
        raise InputError(f"exceeds train.steps={train.steps}", field="data.anneal_steps", value=data.anneal_steps)
    names = list(dict.fromkeys([*weights, *anneal]))
    sources = [_open_one(recipe, name, vocab, held_out, pretrained) for name in names]
    if held_out:
        return Union(sources, train.seed, (train.eval_steps or MAX_BATCHES) * train.global_batch_size)
    base_weights = [weights.get(name, 0.0) for name in names]
    if not anneal:
        return Blend(sources, base_weights)
    return Blend(
        sources,
        base_weights,
        [anneal.get(name, 0.0) for name in names],
        (train.steps - data.anneal_steps) * train.global_batch_size,
    )


def _names_a_dataset(validation: str) -> bool:
    from meshwright.engine.data.instructions import names_a_dataset

    return names_a_dataset(validation)


def _open_one(recipe: Recipe, name: str, vocab: int, held_out: bool, pretrained: Path | None) -> Source:
    """Open one dataset."""
    if name in MOCK_NAMES and Path(name).exists():
        note(f"dataset {name} is random data; write ./{name} for the file or folder of that name")
    if recipe.goal != "pretrain":
        from meshwright.engine.data.instructions import open_instructions

        data = msgspec.structs.replace(recipe.data, dataset=MOCK if name in MOCK_NAMES else name)
        return open_instructions(msgspec.structs.replace(recipe, data=data), vocab, pretrained, held_out)
    if name in MOCK_NAMES and not (held_out and recipe.data.validation):
        return Mock(vocab, recipe.data.seq_length, recipe.train.seed + VALIDATION_SEED_OFFSET * held_out)
    corpus = _corpus(recipe, name, vocab, held_out, pretrained)
    return Shuffled(corpus, recipe.train.seed)


def _corpus(recipe: Recipe, name: str, vocab: int, held_out: bool, pretrained: Path | None) -> StreamCorpus:
    data = recipe.data
    if recipe.train.eval_every and not data.validation and not data.validation_part:
        raise no_validation_data(recipe)
    separate = bool(data.validation)  # validation has its own dataset
    field = "data.validation" if held_out and separate else "data.dataset"
    stream = _stream(recipe, data.validation if held_out and separate else name, vocab, pretrained, field)
    train_span, held_out_span = split_spans(stream, 0.0 if separate else data.validation_part)
    span = train_span if separate or not held_out else held_out_span
    least = 1 if held_out else data.seq_length  # an incomplete held-out sample is padded, one for training dropped
    if span[1] - span[0] <= least and not separate and data.validation_part:
        raise InputError(
            f"the {'held-out' if held_out else 'training'} documents have {span[1] - span[0]:,} tokens, "
            f"fewer than one sample of {least + 1:,}",
            field="data.validation_part",
            value=data.validation_part,
            fix=("more data", "a shorter data.seq_length", "data.validation=FILE or FOLDER"),
        )
    if held_out and not separate and data.validation_part:
        _note_real_share(stream, name, held_out_span, data.validation_part)
    return StreamCorpus(
        stream, data.seq_length, vocab=vocab, packing=data.packing, span=span, keep_last=held_out, field=field
    )


def _note_real_share(stream: Stream, name: str, span: tuple[int, int], requested: float) -> None:
    """Note the share that is held out if it is far from the requested one: only whole documents are held out."""
    share = (span[1] - span[0]) / len(stream)
    if abs(share - requested) > SAME_SHARE * requested:
        held, total = (len(stream.ends(start, len(stream))) for start in (span[0], 0))
        note(
            f"{name}: data.validation_part={requested:g} holds out whole documents, the last {held:,} of {total:,}: "
            f"{share:.1%} of the tokens"
        )


def _stream(recipe: Recipe, name: str, vocab: int, pretrained: Path | None, field: str) -> Stream:
    """Open a token stream: a shard folder, Megatron files, or text that is tokenized first."""
    path = Path(name).expanduser()
    prefix = megatron_prefix(path)
    if prefix is not None:
        return open_megatron(prefix).stream()
    if is_shard_folder(path):
        stream, manifest = open_shards(path)
        if manifest.max_token >= vocab:
            raise token_out_of_vocab(name, manifest.max_token, vocab)
        return stream
    if path.exists() and (path.is_dir() or path.name.lower().endswith(SUFFIXES)):
        return _tokenize_stream(recipe, path, vocab, pretrained, field)
    raise _not_found(name, path, field)


def is_text(name: str) -> bool:
    """Return whether a dataset is text that needs a tokenizer, not tokens."""
    path = Path(name).expanduser()
    return megatron_prefix(path) is None and not is_shard_folder(path)


def named_vocab(recipe: Recipe, name: str, published: int) -> int:
    """Return the token ids that a dataset needs: of its shards or tokenizer; of the published model if unknown."""
    from meshwright.engine.data.tokenizers import highest_id, load_tokenizer

    path = Path(name).expanduser()
    if recipe.goal == "pretrain" and not is_text(name):
        return open_shards(path)[1].max_token + 1 if is_shard_folder(path) else published
    if not recipe.data.tokenizer:  # fine-tuning: the tiny model's own
        return 0
    return highest_id(load_tokenizer(recipe)) + 1


def _tokenize_stream(recipe: Recipe, path: Path, vocab: int, pretrained: Path | None, field: str) -> Stream:
    from meshwright.engine.data.tokenize import BadLineError, tokenize_cached
    from meshwright.engine.data.tokenizers import check_ids, load_tokenizer

    tokenizer = load_tokenizer(recipe, pretrained)
    check_ids(tokenizer, vocab)
    try:
        return tokenize_cached(path, tokenizer, text_column(recipe.data), recipe.data.documents)
    except (BadLineError, MissingColumnError) as error:  # the options of tokenize are not those of a training
        lines = bad_lines(path, recipe.data) or [error.reason]
        raise bad_lines_error(lines, path, recipe.data, field) from None


def _not_found(name: str, path: Path, field: str) -> InputError:
    if path.exists():
        return InputError(
            f"a {path.suffix or 'file of this type'} file has no documents to pretrain on ({', '.join(SUFFIXES)})",
            field=field,
            value=name,
            fix=("--goal sft or --goal peft, if its rows are conversations", f"{field}=FILE.jsonl with a text column"),
        )
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    suggestions = [str(path.parent / found) for found in closest(path.name, {n.removesuffix(".idx") for n in siblings})]
    suggestions += closest(name, MOCK_NAMES)
    reason = "not found: no shard folder, no pair of .bin and .idx files and no text file"
    if suggestions:
        reason += f"; did you mean {' or '.join(suggestions)}?"
    return InputError(
        reason,
        field=field,
        value=name,
        fix=(
            *(f"{field}={found}" for found in suggestions[:1]),
            f"meshwright tokenize corpus.jsonl --tokenizer FOLDER --out {name}",
            "--dataset mock",
        ),
    )
