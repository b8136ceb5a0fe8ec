"""Steps prepared ahead: the same batches, whatever is asked for and in which order; errors where they belong."""

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
from meshwright.engine.data.sampler import Batch, Loader, Samples
from meshwright.engine.faults import RunError
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types

SEQ = 16
BROKEN = 13  # the sample that cannot be read
ASKED = [0, 1, 2, 3, 9, 10, 2, 3, 4]  # with jumps, as after a resume


class Ragged:
    """Samples of which a different number of predictions counts; one of them may not be readable."""

    def __init__(self, seed: int = 0, broken: int | None = None) -> None:
        self.inner, self.broken = Mock(50, SEQ, seed), broken

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        if self.broken in numbers:
            raise OSError("the disk is gone")
        found = self.inner.samples(numbers)
        counted = np.arange(SEQ) < np.array(numbers)[:, None] % SEQ + 1
        return Samples(found.tokens, counted)


class OneByOne(Ragged):
    """The same, for a source that must be read in order and by one thread."""

    in_order = True

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        self.threads.add(threading.get_ident())
        return super().samples(numbers)


def summary(batch: Batch) -> tuple[Any, ...]:
    """What is compared of a batch."""
    told = {name: value.tolist() for name, value in sorted(batch.told.items())}
    return batch.tokens.tolist(), told, batch.numbers, batch.counted


def _asked(rank: int, world: int, source: Any, prefetch: int, readers: int) -> list[Any]:
    made = loader(types.Layout(), source, prefetch=prefetch, readers=readers, mtp=True)
    kept, found = made.source, []
    for i, step in enumerate(ASKED):
        if i == 5:  # an evaluation in between
            made.source = Ragged(seed=9)
            found += [summary(made.batch(n)) for n in range(3)]
            made.source = kept
        found.append(summary(made.batch(step)))
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("meshwright-data")]
    return found


@pytest.mark.parametrize(("prefetch", "readers"), [(1, 1), (3, 4)])
def test_batches_do_not_depend_on_what_is_prepared_ahead(prefetch: int, readers: int) -> None:
    plain = run(2, _asked, Ragged(), 0, 1)
    assert plain[0] != plain[1]
    assert run(2, _asked, Ragged(), prefetch, readers) == plain
    assert run(2, _asked, OneByOne(), prefetch, readers) == plain
    alone = run(1, _asked, Ragged(), prefetch, readers)[0]
    assert [batch[3] for batch in alone] == [batch[3] for batch in plain[0]]  # counted over all ranks


def _read_by(rank: int, world: int) -> int:
    source = OneByOne()
    made = loader(types.Layout(), source, prefetch=2, readers=4)
    for step in range(6):
        made.batch(step)
    made.close()
    return len(source.threads)


def test_a_source_in_order_is_read_by_one_thread() -> None:
    assert run(1, _read_by) == [1]


def _broken(rank: int, world: int, prefetch: int) -> tuple[int, str, str]:
    """The step that failed on this rank and how; global batches of 4 in micro batches of 1 on two ranks."""
    made = loader(types.Layout(), Ragged(broken=BROKEN), prefetch=prefetch, readers=2)
    for step in range(6):
        try:
            made.batch(step)
        except (OSError, RunError) as error:
            made.batch(step + 1)  # the others are not lost with it
            return step, type(error).__name__, str(error)
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_in_its_step_on_every_rank(prefetch: int) -> None:
    first, second = run(2, _broken, prefetch)
    assert first == (BROKEN // 4, "RunError", "another rank could not read its samples of step 4; its message says why")
    assert second == (BROKEN // 4, "OSError", "the disk is gone")


def test_steps_are_read_while_an_earlier_one_is_used() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def read(source: Any, step: int) -> int:
        if step == 1:
            begun.set()
            go_on.wait(10)
        return step

    ahead: Prefetcher[int, Any] = Prefetcher(read, lambda step, found: found, steps=1, readers=1)
    assert ahead.get(Mock(5, 4, 0), 0) == 0
    assert begun.wait(10)  # without anybody asking for step 1
    go_on.set()
    ahead.close()


def _trained(rank: int, world: int, prefetch: int) -> list[float]:
    given = parity.recipe(types.Layout(micro_batch_size=1))
    config = transformers_config(FAMILIES["llama"])
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


def test_training_and_evaluation_are_the_same_with_it() -> None:
    assert run(2, _trained, 2) == run(2, _trained, 0)
