"""Prefetching to a GPU: the same batches, and a step waits neither for reading nor for the copy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from meshwright.engine.data.mock import Mock
from meshwright.engine.data.sample_types import Samples
from meshwright.engine.data.sampler import Loader
from meshwright.engine.mesh import SOLO, Mesh

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SEQ, BATCH = 4096, 8


class Slow(Mock):
    """A slow source."""

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        time.sleep(0.02)
        return super().samples(numbers)


def loader(prefetch: int) -> Loader:
    """Return a loader on a single rank."""
    state: Any = None
    return Loader(
        Slow(1000, SEQ, 1),
        Mesh("cuda", SOLO, SOLO, SOLO, SOLO, SOLO, SOLO, SOLO, SOLO, SOLO, state, state, ((0,),)),
        global_batch=BATCH,
        micro_batch=1,
        positions=torch.arange(SEQ),
        per_token=True,
        device=torch.device("cuda", torch.cuda.current_device()),
        prefetch=prefetch,
        readers=2,
    )


def test_batches_are_the_same_while_the_device_is_busy() -> None:
    plain, ahead = loader(0), loader(3)
    busy = torch.randn(4096, 4096, device="cuda")
    for step in (*range(6), 20, 21):
        expected, found = plain.batch(step), ahead.batch(step)
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        assert torch.equal(expected.tokens, found.tokens)
        assert expected.target_tokens == found.target_tokens
        for name, value in expected.model_kwargs.items():
            assert torch.equal(value, found.model_kwargs[name])
    ahead.close()


def test_a_step_does_not_wait_for_its_samples() -> None:
    waits = {}
    for prefetch in (0, 2):
        data_loader, found = loader(prefetch), []
        for step in range(8):
            start = time.perf_counter()
            data_loader.batch(step)
            found.append(time.perf_counter() - start)
            time.sleep(0.1)
        data_loader.close()
        waits[prefetch] = sorted(found[1:])[len(found) // 2]
    assert waits[0] > 0.02
    assert waits[2] < waits[0] / 4
