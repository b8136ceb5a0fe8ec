"""Packed documents are isolated in every model family; losses over answers are the same in every layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine import parity
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from tests.engine.tiny_tokenizer import write_tiny_tokenizer

from meshwright.engine.data.instructions import open_instructions
from meshwright.engine.data.prompt_response import MockConversations
from meshwright.engine.data.sample_types import Samples
from meshwright.engine.data.sampler import positions_in_documents
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.parallelize import parallelize
from meshwright.engine.parallelize.document_isolation import document_rows
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types

LENGTHS = (10, 13, 9)  # of the documents in a sample
WIDTH = sum(LENGTHS)
PACKED = types.Data(seq_length=WIDTH, packing=True)


def document_losses(rank: int, world: int, family: str) -> dict[str, Any]:
    """Return the loss of the middle document in a packed sample: as is, with other neighbors, and alone."""
    recipe = parity.recipe(types.Layout(micro_batch_size=1), data=PACKED)
    config = transformers_config(FAMILIES[family])
    stage = parallelize(config, recipe, build_mesh(recipe.layout, "cpu"), torch.device("cpu"))[0]
    stage.eval()
    random = np.random.default_rng(5)
    tokens = random.integers(config.vocab_size, size=(1, WIDTH + 1))
    documents = np.repeat(np.arange(3), LENGTHS)[None]
    begin, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]

    def loss(tokens: Any, documents: Any, first: int, last: int) -> float:
        weights = torch.zeros(1, tokens.shape[1] - 1)
        weights[:, first : last - 1] = 1.0
        model_kwargs = {"labels": torch.from_numpy(tokens[:, 1:]), "weights": weights}
        model_kwargs["positions"] = torch.from_numpy(positions_in_documents(documents))
        model_kwargs["documents"] = torch.from_numpy(documents)
        with torch.no_grad():
            return float(stage(torch.from_numpy(tokens[:, :-1]), **model_kwargs))

    others = tokens.copy()
    others[:, :begin] = random.integers(config.vocab_size, size=begin)
    others[:, end:] = random.integers(config.vocab_size, size=WIDTH + 1 - end)
    alone, one = tokens[:, begin : end + 1], np.zeros((1, LENGTHS[1]), dtype=np.int64)
    joined = np.zeros_like(documents)
    return {
        "packed": loss(tokens, documents, begin, end),
        "others changed": loss(others, documents, begin, end),
        "alone": loss(alone, one, 0, LENGTHS[1]),
        "in one document": loss(tokens, joined, begin, end),
        "in one document, others changed": loss(others, joined, begin, end),
    }


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "nemotron_h", "qwen3_next", "qwen3_5", "gpt2"])
def test_packed_documents_are_isolated(family: str) -> None:
    found = run(1, document_losses, family)[0]
    assert found["packed"] == found["others changed"]  # bitwise
    assert found["packed"] == pytest.approx(found["alone"], rel=1e-5)
    # Control: without document boundaries the previous document does change the loss.
    assert abs(found["in one document"] - found["in one document, others changed"]) > 1e-4


def test_documents_are_grouped_into_rows_of_equal_length() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]])
    rows = [part.tolist() for part in document_rows(documents)]
    assert rows == [[[3], [6]], [[4, 5]], [[0, 1, 2]], [[7, 8, 9, 10, 11]]]


class MockAnswers:
    """Mock conversations for the parity tests, with their vocabulary and length."""

    def __init__(self, inner: Any, packed: bool) -> None:
        self.source = MockConversations(inner.vocab, inner.seq_length, inner.seed, packing=packed)

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        return self.source.samples(numbers)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2 accumulating": (2, {"micro_batch_size": 1}),
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2, "micro_batch_size": 1}),
    "cp2": (2, {"cp": 2}),
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in ("dp2 accumulating", "tp2 sp", "pp2")),
        *(pytest.param("llama", name, marks=pytest.mark.slow) for name in ("dp2", "tp2", "cp2")),
        pytest.param("nemotron_h", "tp2 sp", marks=pytest.mark.slow),
        ("nemotron_h", "cp2"),
    ],
)
def test_losses_and_gradients_over_answers_match_one_process(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "Ragged", MockAnswers)  # before ranks are forked
    world, layout = LAYOUTS[name]
    given = parity.recipe(
        types.Layout(**{"micro_batch_size": 2, **layout}),
        data=types.Data(seq_length=32, packing=True),
        train=types.Train(global_batch_size=8, steps=100, per_token_loss=True),
        moe=types.Moe(aux_loss=0.0),
    )
    worst = parity.differences(family, world, given, steps=1)
    assert max(worst.values()) < 1e-5, worst


def train_losses(rank: int, world: int, recipe: types.Recipe) -> list[float | None]:
    """Return the losses of a tiny model over the steps of a recipe, and its validation loss."""
    config = transformers_config({**FAMILIES["llama"], "vocab_size": 256})
    source = open_instructions(recipe, config.vocab_size)
    trainer = Trainer(recipe, config, build_mesh(recipe.layout, "cpu"), torch.device("cpu"), source)
    losses = [trainer.step(step).loss for step in range(recipe.train.steps)]
    return [*losses, trainer.evaluate(open_instructions(recipe, config.vocab_size, held_out=True), 1)]


@pytest.mark.parametrize("option", ["packing", "group_by_length"])
def test_model_learns_the_answers_of_a_file(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    chats = [
        {"messages": [{"role": "user", "content": "x" * i}, {"role": "assistant", "content": "yes" + "s" * (i % 7)}]}
        for i in range(1, 65)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer")
    data = types.Data(
        dataset=str(file), tokenizer=str(tokenizer), seq_length=128, workers=0, validation_part=0.2, **{option: True}
    )
    recipe = parity.recipe(
        types.Layout(micro_batch_size=2),
        data=data,
        optimizer=types.Optimizer(lr=1e-2, weight_decay=0.0),
        train=types.Train(global_batch_size=4, steps=12, per_token_loss=True, eval_every=12),
    )
    losses = run(1, train_losses, recipe)[0]
    assert losses[0] > 4.0
    assert max(losses[-2:]) < 2.0  # the last step and the validation loss
