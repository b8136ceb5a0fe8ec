"""Prefetching: the same batches for any request order; errors are raised in their step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine import parity
from tests.engine.families import FAMILIES
from tests.engine.ranks import run
from tests.engine.test_data import loader

from meshwright.engine.data.mock import Mock
from meshwright.engine.data.prefetch import Prefetcher
from meshwright.engine.data.sample_types import Samples
from meshwright.engine.data.sampler import Batch, Loader
from meshwright.engine.faults import RunError
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types

SEQ = 16
BROKEN = 13  # the sample that cannot be read
REQUESTED_STEPS = [0, 1, 2, 3, 9, 10, 2, 3, 4]  # with jumps, as after a resume


class Ragged:
    """Samples with different numbers of target tokens; one of them may be unreadable."""

    def __init__(self, seed: int = 0, broken: int | None = None) -> None:
        self.inner, self.broken = Mock(50, SEQ, seed), broken

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        if self.broken in numbers:
            raise OSError("the disk is gone")
        found = self.inner.samples(numbers)
        loss_mask = np.arange(SEQ) < np.array(numbers)[:, None] % SEQ + 1
        return Samples(found.tokens, loss_mask)


class InOrder(Ragged):
    """The same as a source that must be read in order by one thread."""

    in_order = True

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        self.threads.add(threading.get_ident())
        return super().samples(numbers)


def summary(batch: Batch) -> tuple[Any, ...]:
    """Return the compared fields of a batch."""
    model_kwargs = {name: value.tolist() for name, value in sorted(batch.model_kwargs.items())}
    return batch.tokens.tolist(), model_kwargs, batch.numbers, batch.target_tokens


def _requested_batches(rank: int, world: int, source: Any, prefetch: int, readers: int) -> list[Any]:
    data_loader = loader(types.Layout(), source, prefetch=prefetch, readers=readers, mtp=True)
    kept, found = data_loader.source, []
    for i, step in enumerate(REQUESTED_STEPS):
        if i == 5:  # an evaluation in between
            data_loader.source = Ragged(seed=9)
            found += [summary(data_loader.batch(n)) for n in range(3)]
            data_loader.source = kept
        found.append(summary(data_loader.batch(step)))
    data_loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("meshwright-data")]
    return found


@pytest.mark.parametrize(("prefetch", "readers"), [(1, 1), (3, 4)])
def test_batches_do_not_depend_on_prefetching(prefetch: int, readers: int) -> None:
    plain = run(2, _requested_batches, Ragged(), 0, 1)
    assert plain[0] != plain[1]
    assert run(2, _requested_batches, Ragged(), prefetch, readers) == plain
    assert run(2, _requested_batches, InOrder(), prefetch, readers) == plain
    alone = run(1, _requested_batches, Ragged(), prefetch, readers)[0]
    assert [batch[3] for batch in alone] == [batch[3] for batch in plain[0]]  # target tokens over all ranks


def _reader_threads(rank: int, world: int) -> int:
    source = InOrder()
    data_loader = loader(types.Layout(), source, prefetch=2, readers=4)
    for step in range(6):
        data_loader.batch(step)
    data_loader.close()
    return len(source.threads)


def test_in_order_source_is_read_by_one_thread() -> None:
    assert run(1, _reader_threads) == [1]


def _broken(rank: int, world: int, prefetch: int) -> tuple[int, str, str]:
    """Return the failed step on this rank and its error; global batches of 4 in micro batches of 1 on two ranks."""
    data_loader = loader(types.Layout(), Ragged(broken=BROKEN), prefetch=prefetch, readers=2)
    for step in range(6):
        try:
            data_loader.batch(step)
        except (OSError, RunError) as error:
            data_loader.batch(step + 1)  # later steps still work
            return step, type(error).__name__, str(error)
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_in_its_step_on_every_rank(prefetch: int) -> None:
    first, second = run(2, _broken, prefetch)
    assert first == (
        BROKEN // 4,
        "RunError",
        "another rank could not read its samples of step 4; see that rank's error",
    )
    assert second == (BROKEN // 4, "OSError", "the disk is gone")


def test_next_step_is_read_while_the_current_one_is_used() -> None:
    started, release = threading.Event(), threading.Event()

    def read(source: Any, step: int) -> int:
        if step == 1:
            started.set()
            release.wait(10)
        return step

    prefetcher: Prefetcher[int, Any] = Prefetcher(read, lambda step, found: found, steps=1, readers=1)
    assert prefetcher.get(Mock(5, 4, 0), 0) == 0
    assert started.wait(10)  # without a request for step 1
    release.set()
    prefetcher.close()


def _losses(rank: int, world: int, prefetch: int) -> list[float]:
    given = parity.recipe(types.Layout(micro_batch_size=1))
    config = transformers_config(parity.shallow(FAMILIES["llama"], given.layout))
    mesh = build_mesh(given.layout, "cpu")
    source = parity.Ragged(Mock(config.vocab_size, given.data.seq_length, 1), packed=True)
    trainer = Trainer(given, config, mesh, torch.device("cpu"), source)
    trainer.loader = Loader(
        source,
        mesh,
        global_batch=given.train.global_batch_size,
        micro_batch=1,
        positions=torch.arange(given.data.seq_length),
        per_token=True,
        device=torch.device("cpu"),
        prefetch=prefetch,
        readers=2,
    )
    losses = [trainer.step(step).loss for step in range(2)]
    losses.append(trainer.evaluate(Mock(config.vocab_size, given.data.seq_length, 2), 2))
    losses += [trainer.step(step).loss for step in range(2, 4)]
    trainer.loader.close()
    return losses


def _both_losses(rank: int, world: int) -> tuple[list[float], list[float]]:
    return _losses(rank, world, 2), _losses(rank, world, 0)


def test_training_and_evaluation_do_not_depend_on_prefetching() -> None:
    for with_prefetching, without in run(2, _both_losses):
        assert with_prefetching == without
