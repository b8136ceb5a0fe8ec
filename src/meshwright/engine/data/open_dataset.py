"""From the name of a data set to its samples."""

from __future__ import annotations

from pathlib import Path

import msgspec

from meshwright.engine.data.blend import Blend, tempered
from meshwright.engine.data.corpus_reader import ENDINGS
from meshwright.engine.data.megatron_files import open_megatron, prefix_of
from meshwright.engine.data.mock import HELD_OUT, Mock
from meshwright.engine.data.sampler import Source, nothing_held_out
from meshwright.engine.data.shards import Stream, StreamCorpus, foreign_tokens, is_shards, open_shards, spans
from meshwright.engine.data.shuffle import Shuffled
from meshwright.errors import InputError, closest
from meshwright.recipes.types import Recipe

MOCK = "mock"
MOCK_NAMES = (MOCK, "llm-pretrain-mock")


def opened(recipe: Recipe, vocab: int, held_out: bool, pretrained: Path | None) -> Source:
    """The samples of a recipe's data set or blend, or those held out from it."""
    data = recipe.data
    if not data.blend and not (data.anneal_steps and data.anneal_blend):
        return _one(recipe, data.dataset, vocab, held_out, pretrained)
    if data.group_by_length:
        raise InputError(
            "samples of like length are found within one data set, not in a blend",
            field="data.group_by_length",
            value=True,
            fix=("data.group_by_length=false",),
        )
    if held_out and data.validation:
        return _one(recipe, data.dataset, vocab, held_out, pretrained)
    return _blend(recipe, vocab, held_out, pretrained)


def _blend(recipe: Recipe, vocab: int, held_out: bool, pretrained: Path | None) -> Blend:
    data, train = recipe.data, recipe.train
    weights = tempered(data.blend or {data.dataset: 1.0}, data.temperature)
    anneal = tempered(data.anneal_blend, data.temperature, "data.anneal_blend") if data.anneal_blend else {}
    if bool(anneal) != bool(data.anneal_steps):
        raise InputError(
            "annealing needs both the number of its steps and the weights it draws by",
            field="data.anneal_steps",
            value=data.anneal_steps,
            fix=("data.anneal_steps=0 without data.anneal_blend", "or both"),
        )
    if data.anneal_steps > train.steps:
        raise InputError(f"the training has {train.steps} steps", field="data.anneal_steps", value=data.anneal_steps)
    names = list(dict.fromkeys([*weights, *anneal]))
    sources = [_one(recipe, name, vocab, held_out, pretrained) for name in names]
    before = [weights.get(name, 0.0) for name in names]
    if not anneal or held_out:
        return Blend(sources, before)
    return Blend(
        sources,
        before,
        [anneal.get(name, 0.0) for name in names],
        (train.steps - data.anneal_steps) * train.global_batch_size,
    )


def _one(recipe: Recipe, name: str, vocab: int, held_out: bool, pretrained: Path | None) -> Source:
    """The samples of one data set."""
    if recipe.goal != "pretrain":
        from meshwright.engine.data.instructions import open_instructions

        data = msgspec.structs.replace(recipe.data, dataset=MOCK if name in MOCK_NAMES else name)
        return open_instructions(msgspec.structs.replace(recipe, data=data), vocab, pretrained, held_out)
    if name in MOCK_NAMES:
        return Mock(vocab, recipe.data.seq_length, recipe.train.seed + HELD_OUT * held_out)
    corpus = _corpus(recipe, name, vocab, held_out, pretrained)
    return Shuffled(corpus, recipe.train.seed)


def _corpus(recipe: Recipe, name: str, vocab: int, held_out: bool, pretrained: Path | None) -> StreamCorpus:
    data = recipe.data
    if recipe.train.eval_every and not data.validation and not data.validation_part:
        raise nothing_held_out(recipe)
    apart = bool(data.validation)  # what is evaluated on is a data set of its own
    field = "data.validation" if held_out and apart else "data.dataset"
    stream = _stream(recipe, data.validation if held_out and apart else name, vocab, pretrained, field)
    trained, outside = spans(stream, 0.0 if apart else data.validation_part)
    span = trained if apart or not held_out else outside
    if span[1] - span[0] <= data.seq_length and not apart and data.validation_part:
        raise InputError(
            f"{'of' if held_out else 'after'} the last documents {span[1] - span[0]:,} tokens are left, "
            f"less than one sample of {data.seq_length + 1:,}",
            field="data.validation_part",
            value=data.validation_part,
            fix=("more data", "a shorter data.seq_length", "data.validation=FILE or FOLDER"),
        )
    return StreamCorpus(stream, data.seq_length, vocab=vocab, packing=data.packing, span=span)


def _stream(recipe: Recipe, name: str, vocab: int, pretrained: Path | None, field: str) -> Stream:
    """The tokens of a folder of shards, of Megatron's files, or of text that is tokenised first."""
    path = Path(name).expanduser()
    prefix = prefix_of(path)
    if prefix is not None:
        return open_megatron(prefix).stream()
    if is_shards(path):
        stream, manifest = open_shards(path)
        if manifest.max_token >= vocab:
            raise foreign_tokens(name, manifest.max_token, vocab)
        return stream
    if path.exists() and (path.is_dir() or path.name.lower().endswith(ENDINGS)):
        return _tokenised(recipe, path, vocab, pretrained)
    raise _nowhere(name, path, field)


def _tokenised(recipe: Recipe, path: Path, vocab: int, pretrained: Path | None) -> Stream:
    from meshwright.engine.data.tokenize import tokenised_once
    from meshwright.engine.data.tokenizers import check_ids, load_tokenizer

    tokenizer = load_tokenizer(recipe, pretrained)
    check_ids(tokenizer, vocab)
    return tokenised_once(path, tokenizer, recipe.data.columns.get("text", "text"))


def _nowhere(name: str, path: Path, field: str) -> InputError:
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = [str(path.parent / found) for found in closest(path.name, {n.removesuffix(".idx") for n in beside})]
    near += closest(name, MOCK_NAMES)
    reason = "no folder of shards, no pair of .bin and .idx files and no text is found there"
    if near:
        reason += f"; did you mean {' or '.join(near)}?"
    return InputError(
        reason,
        field=field,
        value=name,
        fix=(
            *(f"{field}={found}" for found in near[:1]),
            f"meshwright tokenize corpus.jsonl --tokenizer FOLDER --out {name}",
            "--dataset mock",
        ),
    )
