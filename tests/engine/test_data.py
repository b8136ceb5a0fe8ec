"""Samples dealt out to ranks: positions, padding, documents, what goes along whole, and the shuffle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.parity import recipe
from tests.engine.ranks import run

from meshwright.engine import attention
from meshwright.engine.data.sampler import Loader, Sample, Samples, padded, places_in_documents
from meshwright.engine.data.shuffle import Shuffled, shuffled
from meshwright.engine.mesh import build_mesh
from meshwright.engine.parallelize import sequence_layout
from meshwright.recipes import types

SEQ = 16


class Given:
    """A source that gives the same samples again and again, cut from what it was made with."""

    def __init__(self, samples: Samples) -> None:
        self.given = samples

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        at = np.array(numbers) % len(self.given.tokens)
        documents = self.given.documents
        whole = {name: value[at] for name, value in self.given.whole.items()}
        return Samples(
            self.given.tokens[at], self.given.counted[at], None if documents is None else documents[at], whole
        )


def made(width: int, n: int = 4, documents: bool = False) -> Samples:
    """Samples whose token values tell where they were."""
    tokens = np.arange(n * (width + 1)).reshape(n, width + 1)
    counted = np.ones((n, width), dtype=bool)
    if not documents:
        return Samples(tokens, counted)
    ids = np.stack([np.arange(width) // (3 + i) for i in range(n)])
    counted[:, :-1] = ids[:, 1:] == ids[:, :-1]
    return Samples(tokens, counted, ids)


def loader(layout: types.Layout, source: Any, tell: bool = True, **changes: Any) -> Loader:
    """A loader of this rank, as the trainer makes it."""
    mesh = build_mesh(layout, "cpu")
    context = sequence_layout(recipe(layout, data=types.Data(seq_length=SEQ)), mesh)[1]
    return Loader(
        source,
        mesh,
        global_batch=4,
        micro_batch=1,
        positions=attention.positions(SEQ, context),
        per_token=True,
        device=torch.device("cpu"),
        context=context if tell else None,
        **changes,
    )


def _batch(rank: int, world: int, layout: types.Layout, samples: Samples, tell: bool = True) -> dict[str, Any]:
    batch = loader(layout, Given(samples), tell).batch(0)
    told = {name: value.numpy() for name, value in batch.told.items()}
    return {"tokens": batch.tokens.numpy(), "numbers": batch.numbers, "counted": batch.counted, **told}


def test_positions_begin_anew_in_every_document() -> None:
    documents = np.array([[4, 4, 4, 7, 7, 1], [0, 1, 2, 2, 2, 2]])
    assert places_in_documents(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


def test_a_loader_tells_positions_of_documents() -> None:
    samples = made(SEQ, documents=True)
    (batch,) = run(1, _batch, types.Layout(), samples)
    assert samples.documents is not None
    assert (batch["positions"] == places_in_documents(samples.documents)).all()
    assert (batch["labels"] == np.where(samples.counted, samples.tokens[:, 1:], -100)).all()
    assert batch["weights"].sum() == pytest.approx(1)


@pytest.mark.parametrize("width", [SEQ, 8])
@pytest.mark.parametrize("comm", ["ring", "a2a"])
def test_cp_ranks_hold_every_token_once_with_its_position(width: int, comm: str) -> None:
    samples = made(width, documents=True)
    ranks = run(2, _batch, types.Layout(cp=2, cp_comm=comm), samples)
    tokens = np.concatenate([rank["tokens"] for rank in ranks], 1)
    order = tokens[0].argsort()
    assert (tokens[:, order] == samples.tokens[:, :-1]).all()
    assert samples.documents is not None
    for name, whole in (("documents", samples.documents), ("positions", places_in_documents(samples.documents))):
        assert (np.concatenate([rank[name] for rank in ranks], 1)[:, order] == whole).all()


@pytest.mark.parametrize("layout", [types.Layout(pp=2, pp_schedule="gpipe"), types.Layout(cp=2)])
def test_narrow_samples_are_padded_where_shapes_are_fixed(layout: types.Layout) -> None:
    samples = made(6, documents=True)
    ranks = run(2, _batch, layout, samples, False)
    assert ranks[0]["tokens"].shape == (4, SEQ // layout.cp)
    assert ranks[0]["counted"] == samples.counted.sum()
    assert sum(rank["weights"].sum() for rank in ranks) == pytest.approx(layout.pp)


def test_narrow_samples_are_padded_to_equal_parts_alone() -> None:
    ranks = run(2, _batch, types.Layout(tp=2), made(7))
    assert ranks[0]["tokens"].shape == (4, 8)
    assert (ranks[0]["labels"][:, 7:] == -100).all()


def test_padding_is_a_document_of_its_own() -> None:
    samples = made(6, documents=True)
    wide = padded(samples, 9)
    assert wide.documents is not None
    assert samples.documents is not None
    assert (wide.documents[:, 6:] > samples.documents.max(1, keepdims=True)).all()
    assert not wide.counted[:, 6:].any()
    assert (wide.tokens[:, :7] == samples.tokens).all()


def _refused(rank: int, world: int, samples: Samples) -> str:
    with pytest.raises(ValueError, match="another document") as error:
        loader(types.Layout(), Given(samples)).batch(0)
    return str(error.value)


def test_predictions_across_documents_are_refused() -> None:
    samples = made(SEQ, documents=True)
    samples.counted[2, 4] = True
    assert "sample 2 counts the prediction at 4" in run(1, _refused, samples)[0]


def test_whole_values_go_along_uncut() -> None:
    images = np.random.default_rng(0).random((4, 3, 5), dtype=np.float32)
    samples = made(SEQ)
    ranks = run(2, _batch, types.Layout(cp=2), Samples(samples.tokens, samples.counted, whole={"images": images}))
    for rank in ranks:
        assert rank["images"].dtype == np.float32
        assert (rank["images"] == images).all()


@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_shuffle_is_one_to_one(size: int, key: int) -> None:
    assert sorted(shuffled(place, size, key) for place in range(size)) == list(range(size))


@given(
    size=st.integers(10**9, 10**13),
    key=st.integers(0, 2**64 - 1),
    places=st.sets(st.integers(0, 10**9 - 1), min_size=2),
)
@settings(max_examples=60, deadline=None)
def test_a_shuffle_of_billions_is_computed_place_by_place(size: int, key: int, places: set[int]) -> None:
    found = {shuffled(place, size, key) for place in places}
    assert len(found) == len(places)
    assert all(0 <= place < size for place in found)


@pytest.mark.parametrize("size", [2, 3, 5, 12, 97])
def test_a_shuffle_sends_a_place_anywhere_alike(size: int) -> None:
    keys = 4000
    for place in {0, size // 2, size - 1}:
        found = np.bincount([shuffled(place, size, key * 0x9E3779B97F4A7C15) for key in range(keys)], minlength=size)
        chi_square = ((found - keys / size) ** 2 / (keys / size)).sum()
        assert chi_square < size - 1 + 5 * np.sqrt(2 * size) + 5


class Numbers:
    """A corpus whose samples hold their own index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Sample:
        """The sample with this index."""
        return Sample(np.full(3, index), np.ones(2, dtype=bool))


def test_every_epoch_shows_each_sample_once_in_another_order() -> None:
    source = Shuffled(Numbers(50), seed=3)
    shown = source.samples(range(150)).tokens[:, 0].reshape(3, 50)
    assert (np.sort(shown, axis=1) == np.arange(50)).all()
    assert len({tuple(epoch) for epoch in shown}) == 3
    assert (source.samples([149, 7]).tokens[:, 0] == [shown[2, 49], shown[0, 7]]).all()
    assert (Shuffled(Numbers(50), seed=4).samples(range(50)).tokens[:, 0] != shown[0]).any()
