"""One rank's two steps, traced: the engine's own trainer on the pretended GPU, with marks in the book."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from meshwright.dryrun.allocation_log import AllocationLedger
from meshwright.dryrun.compiled import compiling_as_inductor_would
from meshwright.dryrun.fake_data import dry_recipe, open_samples
from meshwright.dryrun.fake_device import pretending
from meshwright.dryrun.pipeline import can_leave_out, follow_pipeline
from meshwright.dryrun.placements import placements
from meshwright.dryrun.trace_hooks import Marks, shortened_batch
from meshwright.dryrun.types import Placement
from meshwright.engine.mesh import Mesh, build_mesh
from meshwright.engine.metrics import optimizer_tensors
from meshwright.engine.model_families import ModelFamily
from meshwright.engine.trainer import Trainer
from meshwright.recipes.types import Recipe

STEPS = 2  # the first makes the optimizer's state, the second has it from the start


@dataclass(frozen=True)
class LayerGroups:
    """The layers of one of the rank's pipeline chunks: all, those that were traced, and for each who stands for it."""

    layers: list[int]
    kept: list[int]
    like: list[int]


@dataclass(frozen=True)
class Trace:
    """What was noted of one rank."""

    ledger: AllocationLedger
    axes: dict[str, tuple[str, int]]  # of every group: the axis it is along, and its ranks
    chunks: list[LayerGroups]
    micro_batches: int  # of a step
    traced_micro_batches: list[int]
    pipelined: bool
    placement: tuple[Placement, ...]
    cpu_s: float

    @property
    def left_out(self) -> tuple[int, int]:
        """Layers and micro batches that were not traced."""
        layers = sum(len(cut.layers) - len(cut.kept) for cut in self.chunks)
        return layers, self.micro_batches - len(self.traced_micro_batches)


def trace(
    recipe: Recipe,
    kind: ModelFamily,
    config: Any,
    world: int,
    rank: int,
    capability: tuple[int, int],
    shortened: bool = True,
) -> Trace:
    """Builds the trainer of a rank and takes its first two steps, all of them or shortened."""
    began = time.process_time()
    recipe = dry_recipe(recipe)
    ledger = AllocationLedger(capability=capability)
    with ExitStack() as block:
        device = block.enter_context(pretending(world, rank, ledger.saw, capability))
        block.enter_context(ledger.open())
        if recipe.kernels.compile:
            block.enter_context(compiling_as_inductor_would())
        mesh = build_mesh(recipe.layout, device.type)
        source = open_samples(recipe, config)
        trainer = kind.trainer()(recipe, config, mesh, device, source, None)
        chunks, kept = take_steps(trainer, ledger, shortened)
        axes = groups_of(mesh)
        count, pipelined = trainer.micro_batches, trainer.pipeline is not None
        placed = placements(trainer.stages)
        trainer.close()
        del trainer, source
        gc.collect()
    return Trace(ledger, axes, chunks, count, kept, pipelined, placed, time.process_time() - began)


def take_steps(
    trainer: Trainer, ledger: AllocationLedger, shortened: bool = False
) -> tuple[list[LayerGroups], list[int]]:
    """The first steps of a new trainer with marks in the book: its layers, and the micro batches that were run."""
    ledger.tag((p for stage in trainer.stages for p in stage.parameters()), "weights")
    ledger.tag((b for stage in trainer.stages for b in stage.buffers()), "weights")
    watch = Marks(ledger, trainer, shortened)
    kept = watch.micro_batches
    if kept is None or not (trainer.pipeline is None or can_leave_out(trainer)):
        kept = list(range(trainer.micro_batches))
    if trainer.pipeline is not None:
        follow_pipeline(trainer, watch, kept)
    else:
        _shorten_batches(trainer, watch)
    for number in range(STEPS):
        watch.step = number
        trainer.step(number, watch, figures=False)
        ledger.tag(optimizer_tensors(trainer.optimizer.state), "optimizer")
    return [LayerGroups(chunk.numbers, chunk.kept, chunk.like) for chunk in watch.chunks], kept


def _shorten_batches(trainer: Trainer, watch: Marks) -> None:
    whole = trainer.loader.batch
    trainer.loader.batch = lambda step: shortened_batch(whole(step), watch.traced(step))


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
