"""A pipeline has receive buffers only for micro batches in flight, not for all of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.parity import SEQ, recipe
from tests.engine.ranks import run

from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.parallelize.pipeline import SCHEDULES
from meshwright.engine.trainer import Trainer
from meshwright.recipes import types

MICRO_BATCHES = 10
RANKS = 2
ONE_CHUNK = ("1f1b", "gpipe")
ALL_FORWARD_FIRST = ("gpipe", "looped_bfs")  # all micro batches are in flight before the first backward pass
BATCHES = 2  # of an evaluation


def layout(schedule: str) -> types.Layout:
    chunks = 1 if schedule in ONE_CHUNK else 2
    return types.Layout(pp=RANKS, vp=chunks, pp_schedule=schedule, micro_batch_size=1)


def trainer_of(given: types.Layout) -> Trainer:
    made = recipe(given, train=types.Train(global_batch_size=MICRO_BATCHES, steps=100))
    mesh = build_mesh(given, "cpu")
    config = transformers_config(FAMILIES["llama"])
    return Trainer(made, config, mesh, torch.device("cpu"), Mock(config.vocab_size, SEQ, 0))


class Received:
    """Tracks the tensors that stages receive, and the largest number alive at once."""

    def __init__(self, stages: list[Any]) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.count = self.most = 0
        for stage in stages:
            for name in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
                setattr(stage, name, self.tracked(getattr(stage, name)))

    def tracked(self, receive: Callable[[int], Any]) -> Callable[[int], Any]:
        def receives(number: int) -> Any:
            found = receive(number)
            self.count += len(found)
            self.alive.update(one.tensor.untyped_storage() for one in found)
            self.most = max(self.most, len(self.alive))
            return found

        return receives


def received(rank: int, world: int, schedule: str) -> dict[str, Any]:
    """Count tensors received in a step, the most alive in it and in an evaluation, and those left in between."""
    trainer = trainer_of(layout(schedule))
    assert trainer.pipeline is not None
    made: Any = trainer.pipeline.schedule
    watch = Received(getattr(made, "_stages", None) or [made._stage])
    trainer.step(0)
    found = {"count": watch.count, "most": watch.most, "left": len(watch.alive)}
    watch.most = 0
    loss = trainer.evaluate(trainer.loader.source, BATCHES)
    return {**found, "evaluated": watch.most, "loss": loss}


def received_by_schedule(rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {schedule: received(rank, world, schedule) for schedule in SCHEDULES}


@cache
def every_schedule() -> list[dict[str, dict[str, Any]]]:
    """Return what all schedules received, by rank: the ranks are started once."""
    return run(RANKS, received_by_schedule)


def loss_alone(rank: int, world: int) -> float:
    trainer = trainer_of(types.Layout(micro_batch_size=1))
    trainer.step(0)
    return trainer.evaluate(trainer.loader.source, BATCHES)


@cache
def expected_loss() -> float:
    loss: float = run(1, loss_alone)[0]
    return loss


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_receive_buffers_live_only_while_their_micro_batch_is_in_flight(schedule: str) -> None:
    given = layout(schedule)
    for found in (by_schedule[schedule] for by_schedule in every_schedule()):
        assert found["count"] >= MICRO_BATCHES
        assert found["left"] == 0
        if schedule not in ALL_FORWARD_FIRST:
            assert found["most"] <= 2 * RANKS * given.vp < MICRO_BATCHES
        assert found["evaluated"] <= (MICRO_BATCHES if schedule == "looped_bfs" else RANKS)
        assert found["loss"] == pytest.approx(expected_loss(), rel=1e-5)
