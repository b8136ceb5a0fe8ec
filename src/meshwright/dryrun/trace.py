"""One rank's two steps, traced: the engine's own trainer on the pretended GPU, with marks in the book."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright.dryrun.ledger import Key, Ledger
from meshwright.dryrun.pretend import pretending
from meshwright.engine.kinds import Kind
from meshwright.engine.loop import Trainer, Watch
from meshwright.engine.mesh import Mesh, build_mesh
from meshwright.engine.metrics import optimizer_tensors
from meshwright.recipes.types import Recipe

STEPS = 2  # the first makes the optimizer's state, the second has it from the start


@dataclass(frozen=True)
class Trace:
    """What was noted of one rank."""

    ledger: Ledger
    axes: dict[str, tuple[str, int]]  # of every group: the axis it is along, and its ranks
    cpu_s: float


def trace(recipe: Recipe, kind: Kind, config: Any, world: int, rank: int, capability: tuple[int, int]) -> Trace:
    """Builds the trainer of a rank and takes its first two steps."""
    began = time.process_time()
    ledger = Ledger()
    with pretending(world, rank, ledger.saw, capability) as device, ledger.open():
        mesh = build_mesh(recipe.layout, device.type)
        source = kind.open_source(recipe, config, False, None)
        trainer = kind.trainer()(recipe, config, mesh, device, source, None)
        ledger.tag((p for stage in trainer.stages for p in stage.parameters()), "weights")
        ledger.tag((b for stage in trainer.stages for b in stage.buffers()), "weights")
        watch = Marks(ledger, trainer)
        for number in range(STEPS):
            watch.step = number
            trainer.step(number, watch, figures=False)
            ledger.tag(optimizer_tensors(trainer.optimizer.state), "optimizer")
        axes = groups_of(mesh)
        trainer.close()
        del trainer, source, watch
        gc.collect()
    return Trace(ledger, axes, time.process_time() - began)


class Marks(Watch):
    """Writes into the book which part of the step begins."""

    def __init__(self, ledger: Ledger, trainer: Trainer) -> None:
        self.ledger, self.trainer = ledger, trainer
        self.step = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if name == "optimizer":
            self.ledger.tag(_gradients(self.trainer), "gradients")
            self.ledger.mark(Key(self.step, "gradients"))
        else:
            self.ledger.mark(Key(self.step, "data" if name == "data" else "forward"))
        yield

    def hear(self, stops: torch.Tensor) -> None:
        self.ledger.mark(Key(self.step, "optimizer"))


def _gradients(trainer: Trainer) -> Iterator[Any]:
    return (p.grad for stage in trainer.stages for p in stage.parameters() if p.grad is not None)


def groups_of(mesh: Mesh) -> dict[str, tuple[str, int]]:
    """The axis and the ranks of every process group of a mesh, by the group's name."""
    found: dict[str, tuple[str, int]] = {}
    for name in ("world", "stage", "sequence", "ends", "experts", "dp", "cp", "tp", "pp"):
        axis = getattr(mesh, name)
        if axis.group is not None:
            found[axis.group.group_name] = (name, axis.size)
    for device_mesh in (mesh.state, mesh.expert_state):
        for name in device_mesh.mesh_dim_names or ():
            one = device_mesh[name]
            if one.size() > 1:
                found[one.get_group().group_name] = (name, one.size())
    return found


__all__ = ["FSDPModule", "Marks", "Trace", "groups_of", "trace"]
