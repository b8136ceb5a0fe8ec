"""The loader: positions, padding, documents and extras per rank; and the shuffle."""

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
from meshwright.engine.data.sample_types import Sample, Samples
from meshwright.engine.data.sampler import Loader, pad_samples, positions_in_documents
from meshwright.engine.data.shuffle import Shuffled, permute_index
from meshwright.engine.mesh import build_mesh
from meshwright.engine.parallelize import sequence_layout
from meshwright.recipes import types

SEQ = 16


class FixedSource:
    """A source that cycles through fixed samples."""

    def __init__(self, samples: Samples) -> None:
        self.given = samples

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        at = np.array(numbers) % len(self.given.tokens)
        documents = self.given.documents
        extras = {name: value[at] for name, value in self.given.extras.items()}
        return Samples(
            self.given.tokens[at], self.given.loss_mask[at], None if documents is None else documents[at], extras
        )


def make_samples(width: int, n: int = 4, documents: bool = False) -> Samples:
    """Return samples whose token values are their positions."""
    tokens = np.arange(n * (width + 1)).reshape(n, width + 1)
    loss_mask = np.ones((n, width), dtype=bool)
    if not documents:
        return Samples(tokens, loss_mask)
    ids = np.stack([np.arange(width) // (3 + i) for i in range(n)])
    loss_mask[:, :-1] = ids[:, 1:] == ids[:, :-1]
    return Samples(tokens, loss_mask, ids)


def loader(layout: types.Layout, source: Any, pass_context: bool = True, **changes: Any) -> Loader:
    """Return a loader for this rank, as the trainer builds it."""
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
        context=context if pass_context else None,
        **changes,
    )


def _batch(rank: int, world: int, layout: types.Layout, samples: Samples, pass_context: bool = True) -> dict[str, Any]:
    batch = loader(layout, FixedSource(samples), pass_context).batch(0)
    model_kwargs = {name: value.numpy() for name, value in batch.model_kwargs.items()}
    return {
        "tokens": batch.tokens.numpy(),
        "numbers": batch.numbers,
        "target_tokens": batch.target_tokens,
        **model_kwargs,
    }


def test_positions_restart_in_every_document() -> None:
    documents = np.array([[4, 4, 4, 7, 7, 1], [0, 1, 2, 2, 2, 2]])
    assert positions_in_documents(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]


def test_loader_returns_positions_within_documents() -> None:
    samples = make_samples(SEQ, documents=True)
    (batch,) = run(1, _batch, types.Layout(), samples)
    assert samples.documents is not None
    assert (batch["positions"] == positions_in_documents(samples.documents)).all()
    assert (batch["labels"] == np.where(samples.loss_mask, samples.tokens[:, 1:], -100)).all()
    assert batch["weights"].sum() == pytest.approx(1)


@pytest.mark.parametrize("width", [SEQ, 8])
@pytest.mark.parametrize("comm", ["ring", "a2a"])
def test_cp_ranks_have_every_token_once_with_its_position(width: int, comm: str) -> None:
    samples = make_samples(width, documents=True)
    ranks = run(2, _batch, types.Layout(cp=2, cp_comm=comm), samples)
    tokens = np.concatenate([rank["tokens"] for rank in ranks], 1)
    order = tokens[0].argsort()
    assert (tokens[:, order] == samples.tokens[:, :-1]).all()
    assert samples.documents is not None
    for name, extras in (("documents", samples.documents), ("positions", positions_in_documents(samples.documents))):
        assert (np.concatenate([rank[name] for rank in ranks], 1)[:, order] == extras).all()


@pytest.mark.parametrize("layout", [types.Layout(pp=2, pp_schedule="gpipe"), types.Layout(cp=2)])
def test_narrow_samples_are_padded_where_shapes_are_fixed(layout: types.Layout) -> None:
    samples = make_samples(6, documents=True)
    ranks = run(2, _batch, layout, samples, False)
    assert ranks[0]["tokens"].shape == (4, SEQ // layout.cp)
    assert ranks[0]["target_tokens"] == samples.loss_mask.sum()
    assert sum(rank["weights"].sum() for rank in ranks) == pytest.approx(layout.pp)


def test_narrow_samples_are_padded_to_a_multiple_of_tp() -> None:
    ranks = run(2, _batch, types.Layout(tp=2), make_samples(7))
    assert ranks[0]["tokens"].shape == (4, 8)
    assert (ranks[0]["labels"][:, 7:] == -100).all()


def test_padding_is_a_document_of_its_own() -> None:
    samples = make_samples(6, documents=True)
    wide = pad_samples(samples, 9)
    assert wide.documents is not None
    assert samples.documents is not None
    assert (wide.documents[:, 6:] > samples.documents.max(1, keepdims=True)).all()
    assert not wide.loss_mask[:, 6:].any()
    assert (wide.tokens[:, :7] == samples.tokens).all()


def _refused(rank: int, world: int, samples: Samples) -> str:
    with pytest.raises(ValueError, match="crosses a document boundary") as error:
        loader(types.Layout(), FixedSource(samples)).batch(0)
    return str(error.value)


def test_targets_across_documents_are_rejected() -> None:
    samples = make_samples(SEQ, documents=True)
    samples.loss_mask[2, 4] = True
    assert "sample 2: the target at 4" in run(1, _refused, samples)[0]


def test_extras_are_not_split_by_cp() -> None:
    images = np.random.default_rng(0).random((4, 3, 5), dtype=np.float32)
    samples = make_samples(SEQ)
    ranks = run(2, _batch, types.Layout(cp=2), Samples(samples.tokens, samples.loss_mask, extras={"images": images}))
    for rank in ranks:
        assert rank["images"].dtype == np.float32
        assert (rank["images"] == images).all()


@given(size=st.integers(1, 700), key=st.integers(0, 2**64 - 1))
@settings(max_examples=30, deadline=None)
def test_shuffle_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute_index(position, size, key) for position in range(size)) == list(range(size))


@given(
    size=st.integers(10**9, 10**13),
    key=st.integers(0, 2**64 - 1),
    positions=st.sets(st.integers(0, 10**9 - 1), min_size=2),
)
@settings(max_examples=30, deadline=None)
def test_shuffle_of_billions_is_computed_per_position(size: int, key: int, positions: set[int]) -> None:
    found = {permute_index(position, size, key) for position in positions}
    assert len(found) == len(positions)
    assert all(0 <= position < size for position in found)


@pytest.mark.parametrize("size", [2, 3, 5, 12, 97])
def test_shuffle_is_uniform(size: int) -> None:
    keys = 4000
    for position in {0, size // 2, size - 1}:
        found = np.bincount(
            [permute_index(position, size, key * 0x9E3779B97F4A7C15) for key in range(keys)], minlength=size
        )
        chi_square = ((found - keys / size) ** 2 / (keys / size)).sum()
        assert chi_square < size - 1 + 5 * np.sqrt(2 * size) + 5


class Numbers:
    """A corpus whose sample tokens are their index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def sample(self, index: int) -> Sample:
        """Return the sample with this index."""
        return Sample(np.full(3, index), np.ones(2, dtype=bool))


def test_every_epoch_visits_each_sample_once_in_a_new_order() -> None:
    source = Shuffled(Numbers(50), seed=3)
    shown = source.samples(range(150)).tokens[:, 0].reshape(3, 50)
    assert (np.sort(shown, axis=1) == np.arange(50)).all()
    assert len({tuple(epoch) for epoch in shown}) == 3
    assert (source.samples([149, 7]).tokens[:, 0] == [shown[2, 49], shown[0, 7]]).all()
    assert (Shuffled(Numbers(50), seed=4).samples(range(50)).tokens[:, 0] != shown[0]).any()
