"""Traces two steps of one rank: the engine's own trainer on the fake GPU, with hooks that write the allocation log."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from meshwright.dryrun.allocation_log import AllocationLog
from meshwright.dryrun.compiled import simulate_inductor
from meshwright.dryrun.fake_data import dry_recipe, open_samples
from meshwright.dryrun.fake_device import fake_rank
from meshwright.dryrun.pipeline import can_skip_micro_batches, trace_pipeline
from meshwright.dryrun.placements import placements
from meshwright.dryrun.trace_hooks import TraceHooks, shortened_batch
from meshwright.dryrun.types import Placement
from meshwright.engine.mesh import Mesh, build_mesh
from meshwright.engine.metrics import optimizer_tensors
from meshwright.engine.model_families import ModelFamily
from meshwright.engine.trainer import Trainer
from meshwright.recipes.types import Recipe

STEPS = 2  # the second starts with everything that the first leaves


@dataclass(frozen=True)
class LayerGroups:
    """The layers of a pipeline chunk: all, those that were traced, and for each the one that represents it."""

    layers: list[int]
    kept: list[int]
    representative: list[int]


@dataclass(frozen=True)
class Trace:
    """What was recorded of one rank."""

    log: AllocationLog
    axes: dict[str, tuple[str, int]]  # process group -> its mesh axis and size
    chunks: list[LayerGroups]
    micro_batches: int  # per step
    traced_micro_batches: list[int]
    pipelined: bool
    placement: tuple[Placement, ...]
    cpu_s: float

    @property
    def left_out(self) -> tuple[int, int]:
        """Number of layers and micro batches that were not traced."""
        layers = sum(len(chunk.layers) - len(chunk.kept) for chunk in self.chunks)
        return layers, self.micro_batches - len(self.traced_micro_batches)


def trace(
    recipe: Recipe,
    family: ModelFamily,
    config: Any,
    world: int,
    rank: int,
    capability: tuple[int, int],
    shortened: bool = True,
    state_first: bool = True,
) -> Trace:
    """Build the trainer of a rank and run its first two steps, complete or shortened.

    `state_first`: the optimizer state is allocated before the first step, as worker.py does, not in its update.
    """
    start = time.process_time()
    recipe = dry_recipe(recipe)
    log = AllocationLog(capability=capability)
    with ExitStack() as block:
        device = block.enter_context(fake_rank(world, rank, log.record, capability))
        block.enter_context(log.patch_torch())
        if recipe.kernels.compile:
            block.enter_context(simulate_inductor())
        mesh = build_mesh(recipe.layout, device.type)
        source = open_samples(recipe, config)
        trainer = family.trainer()(recipe, config, mesh, device, source, None)
        chunks, kept = run_steps(trainer, log, shortened, state_first)
        axes = axes_by_group(mesh)
        count, pipelined = trainer.micro_batches, trainer.pipeline is not None
        placed = placements(trainer.stages)
        trainer.close()
        del trainer, source
        gc.collect()
    return Trace(log, axes, chunks, count, kept, pipelined, placed, time.process_time() - start)


def run_steps(
    trainer: Trainer, log: AllocationLog, shortened: bool = False, state_first: bool = True
) -> tuple[list[LayerGroups], list[int]]:
    """Run the first steps of a new trainer with trace hooks; return its layers and the micro batches that ran."""
    log.tag((p for stage in trainer.stages for p in stage.parameters()), "weights")
    log.tag((b for stage in trainer.stages for b in stage.buffers()), "weights")
    if state_first:
        trainer.optimizer.allocate_state()
        log.tag(optimizer_tensors(trainer.optimizer.state), "optimizer")
    hooks = TraceHooks(log, trainer, shortened)
    kept = hooks.micro_batches
    if kept is None or not (trainer.pipeline is None or can_skip_micro_batches(trainer)):
        kept = list(range(trainer.micro_batches))
    if trainer.pipeline is not None:
        trace_pipeline(trainer, hooks, kept)
    else:
        _skip_micro_batches(trainer, hooks)
    for number in range(STEPS):
        hooks.step = number
        trainer.step(number, hooks, figures=False)
        log.tag(optimizer_tensors(trainer.optimizer.state), "optimizer")
    return [LayerGroups(chunk.numbers, chunk.kept, chunk.representative) for chunk in hooks.chunks], kept


def _skip_micro_batches(trainer: Trainer, hooks: TraceHooks) -> None:
    full_batch = trainer.loader.batch
    trainer.loader.batch = lambda step: shortened_batch(full_batch(step), hooks.traced(step))


def axes_by_group(mesh: Mesh) -> dict[str, tuple[str, int]]:
    """Return the mesh axis and size of every process group of a mesh, by group name."""
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
