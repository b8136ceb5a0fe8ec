"""Runs one kind of rank: the engine's own trainer at full world size, on the real device, with a simulated network."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from statistics import mean, median
from typing import Any

from meshwright.clusters import Gpu
from meshwright.recipes.types import Recipe
from meshwright.rehearsal.network import Network
from meshwright.rehearsal.peers import Peers

# Variants of a step: every collective takes its time, or none does, or this rank's experts are those with most tokens.
ALL, NONE, FULLEST = "all", "none", "fullest"
WARM_UP = 2  # steps: the first compiles, the second settles caches and clocks
LEAST_STEPS, MOST_STEPS = 2, 20  # timed per variant
AFTER_S = 3.0  # of timed steps: more are not needed
FEW_STEPS = 2  # of the other variants
GIB = 2**30


@dataclass(frozen=True)
class RankTask:
    """The input for rehearsing one rank."""

    recipe: Recipe  # with the micro batches to run
    config: dict[str, Any]
    world: int
    pp_rank: int
    represents: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]  # layers of each of the rank's chunks
    kept: tuple[tuple[int, ...], ...]  # of these, the layers to run
    layer_types: tuple[str, ...]  # of every layer of the model
    network: Network
    device: str
    gpu: Gpu | None
    slowdown: float  # times on the cluster's GPU over times on this one
    budget_s: float  # for the timed steps
    imbalance: float = 1.0  # tokens of the fullest expert rank over the mean
    fixed_steps: int = 0  # timed steps with the network alone; 0: as many as the budget allows, and without it
    peers: Peers | None = None  # ranks that share the device, if they are rehearsed side by side

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.pp_rank * (self.world // self.recipe.layout.pp)

    @property
    def is_shortened(self) -> bool:
        """Whether some layers do not run."""
        return self.kept != self.chunks


@dataclass
class Measured:
    """Seconds of one variant of a rank's step, of the layers and micro batches that ran."""

    step_s: float
    optimizer_s: float
    # Without a pipeline: seconds of each micro batch. With one: (kind, chunk, micro batch) -> seconds.
    micro_batches: list[float] = field(default_factory=list)
    passes: dict[tuple[str, int, int], float] = field(default_factory=dict)
    layers: dict[tuple[str, int, int], float] = field(default_factory=dict)  # (pass, chunk, layer) -> seconds
    steps: int = 0
    spread: float = 0.0


@dataclass
class RankResult:
    """What a rank measured."""

    variants: dict[str, Measured]
    allocated: float | None = None  # bytes
    reserved: float | None = None
    layer_bytes: dict[tuple[int, int], float] = field(default_factory=dict)  # (chunk, layer) -> activations
    layer_state: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)  # state, gradients
    layer_weights: dict[tuple[int, int], int] = field(default_factory=dict)  # local elements
    weights: int = 0  # local elements of all
    totals: dict[tuple[str, str], tuple[float, float, float]] = field(default_factory=dict)  # per step
    spans: list[tuple[str, str, int, float, float]] = field(default_factory=list)
    out_of_memory: str = ""
    wall_s: float = 0.0
    device: str = ""


def rehearse_rank(task: RankTask) -> RankResult:
    """Build the rank's trainer and time its step; a result without variants if it does not fit the device."""
    start = time.monotonic()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # else streams share a queue and wait for each other
    from meshwright.engine.allocator_settings import use_expandable_segments

    if task.device == "cuda":
        use_expandable_segments()
    from meshwright.dryrun.run import silence_warnings
    from meshwright.engine.warning_filters import no_needless_warnings

    no_needless_warnings()
    silence_warnings()
    import torch

    if task.peers is not None:  # each has its share of the cores, as in training
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // task.world))
    try:
        found = _run(task)
    except torch.OutOfMemoryError as error:
        found = RankResult({}, out_of_memory=str(error).splitlines()[0])
    found.wall_s = time.monotonic() - start
    return found


def _run(task: RankTask) -> RankResult:
    import torch

    from meshwright.engine.model_families import family_of
    from meshwright.engine.worker import set_determinism
    from meshwright.rehearsal.marks import Clock, StepTimer
    from meshwright.rehearsal.process_group import Simulation, simulated_rank

    device = torch.device(task.device, 0) if task.device == "cuda" else torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    recipe, family = task.recipe, family_of(task.recipe)
    set_determinism(recipe, device)
    config = family.read_config(task.config)
    hbm = task.gpu.hbm_gb_s * 1e9 if task.gpu is not None else 1e10
    simulation = Simulation(task.network, device, task.slowdown, hbm, task.peers)
    with ExitStack() as block:
        block.enter_context(simulated_rank(task.world, task.rank, simulation))
        trainer = _build(task, family, config, device, simulation)
        block.callback(trainer.close)
        clock = Clock(device)
        timer = StepTimer(trainer, clock, by_layer=task.is_shortened)
        runner = _Steps(task, timer, clock, simulation)
        found = runner.run()
        if device.type == "cuda":
            found.device = torch.cuda.get_device_name()
        _record_state(trainer, found)
        del timer, runner
    del trainer
    gc.collect()
    return found


def _build(task: RankTask, family: Any, config: Any, device: Any, simulation: Any) -> Any:
    from meshwright.dryrun.trace import axes_by_group
    from meshwright.engine.mesh import build_mesh

    recipe = task.recipe
    mesh = build_mesh(recipe.layout, device.type)
    simulation.axes = axes_by_group(mesh)
    simulation.all_silent = True  # building has its own collectives
    source = family.open_source(recipe, config, False, None)
    with _stages_of(task):
        trainer = family.trainer()(recipe, config, mesh, device, source, None)
    trainer.optimizer.allocate_state()
    return trainer


def _stages_of(task: RankTask) -> ExitStack:
    """Let the engine build stages of the kept layers only."""
    from meshwright.engine import parallelize as package
    from meshwright.engine.parallelize import pipeline

    undo = ExitStack()
    if not task.is_shortened:
        return undo
    real: Callable[..., Any] = pipeline.stage_layers
    kept = dict(zip(task.chunks, task.kept, strict=True))

    def shortened(layout: Any, layers: int) -> list[Any]:
        found = real(layout, layers)
        return [range(run[0], run[-1] + 1) if (run := kept.get(tuple(one))) else one for one in found]

    for module in (pipeline, package):
        if getattr(module, "stage_layers", None) is real:
            undo.callback(setattr, module, "stage_layers", real)
            module.stage_layers = shortened  # type: ignore[attr-defined]
    return undo


class _Steps:
    """Runs the steps of all variants."""

    def __init__(self, task: RankTask, timer: Any, clock: Any, simulation: Any) -> None:
        self.task, self.timer, self.clock, self.simulation = task, timer, clock, simulation
        self.number = 0

    def run(self) -> RankResult:
        """Warm up, time every variant, and read the memory."""
        import torch

        simulation, clock = self.simulation, self.clock
        self._set(ALL)
        on_one_clock = not simulation.network.blocks_host
        for number in range(WARM_UP):
            is_last = number == WARM_UP - 1
            simulation.recording = [] if is_last and on_one_clock else None
            recorded = self._step()
        clock.synchronize()
        if clock.cuda:
            torch.cuda.reset_peak_memory_stats()
        spans = [(*one[:3], *(self._since(recorded.begin, at) for at in one[3:])) for one in simulation.recording or ()]
        simulation.recording = None
        simulation.totals.clear()
        if self.task.peers is not None:
            self.task.peers.barrier.wait()
        started, fixed = time.monotonic(), self.task.fixed_steps
        steps, marks = self._timed(fixed or LEAST_STEPS, fixed or MOST_STEPS, min(AFTER_S, self.task.budget_s))
        found = RankResult({ALL: _measured(steps, clock)}, spans=spans)
        found.totals = {key: tuple(one / len(steps) for one in entry) for key, entry in simulation.totals.items()}
        if clock.cuda:
            found.allocated = float(torch.cuda.max_memory_allocated())
            found.reserved = float(torch.cuda.max_memory_reserved())
        if fixed:
            self._set(NONE)
            found.variants[NONE] = _measured(self._timed(fixed, fixed, self.task.budget_s)[0], clock)
            return found
        axes = sorted({axis for (axis, _), (_, _, seconds) in found.totals.items() if seconds > 0})
        variants = [NONE] if axes else []
        variants += axes if len(axes) > 1 else []
        variants += [FULLEST] if self.task.imbalance > 1 else []
        left = max(self.task.budget_s - (time.monotonic() - started), 0.0)
        for name in variants:
            self._set(name)
            if name == FULLEST:
                with suppress(torch.OutOfMemoryError):  # the balanced step fits
                    found.variants[name] = _measured(self._timed(2, 2 * FEW_STEPS, left / len(variants) / 2)[0], clock)
                continue
            steps, _ = self._timed(1, FEW_STEPS if len(variants) > 2 else 2 * FEW_STEPS, left / len(variants) / 2)
            found.variants[name] = _measured(steps, clock)
        if not axes:
            found.variants[NONE] = found.variants[ALL]
        found.layer_bytes = _layer_bytes(marks)
        return found

    def _since(self, begin: Any, at: Any) -> float:
        """Return when a collective started or ended, in seconds from the start of the step."""
        return float(self.clock.seconds(begin, at))

    def _set(self, variant: str) -> None:
        self.simulation.all_silent = variant == NONE
        # Sends between stages are placed when the stages are put together: their receivers would wait here for nobody.
        self.simulation.silent = frozenset(("pp",)) | ({variant} - {ALL, NONE, FULLEST})
        self.simulation.imbalance = self.task.imbalance if variant == FULLEST else 1.0

    def _step(self) -> Any:
        marks = self.timer.step(self.number)
        self.number += 1
        return marks

    def _timed(self, least: int, most: int, enough_s: float) -> tuple[list[Any], Any]:
        """Run steps until there are enough; the CPU may run ahead of the device as in training."""
        self.clock.synchronize()
        begin, steps = time.monotonic(), list[Any]()
        while len(steps) < least or (len(steps) < most and time.monotonic() - begin < enough_s):
            steps.append(self._step())
            if len(steps) >= least and len(steps) % 2 == 0:
                steps[-2].end.synchronize() if self.clock.cuda else None
        self.clock.synchronize()
        return steps, steps[-1]


def _measured(steps: Sequence[Any], clock: Any) -> Measured:
    """Return the medians over some steps."""
    read = [_read(one, clock) for one in steps]
    times = [one.step_s for one in read]
    middle = median(times)
    return Measured(
        step_s=middle,
        optimizer_s=median(one.optimizer_s for one in read),
        micro_batches=[median(values) for values in zip(*(one.micro_batches for one in read), strict=True)],
        passes={key: median(one.passes[key] for one in read) for key in read[0].passes},
        layers={key: median(one.layers[key] for one in read if key in one.layers) for key in read[0].layers},
        steps=len(read),
        spread=(max(times) - min(times)) / 2 / middle if middle else 0.0,
    )


def _read(marks: Any, clock: Any) -> Measured:
    start, end = marks.parts["optimizer"]
    ends = [*marks.micro_batches[1:], start] if marks.micro_batches else []
    layers: dict[tuple[str, int, int], list[float]] = {}
    for (kind, chunk, layer, at, _), (next_kind, next_chunk, _, until, _) in pairwise(marks.layers):
        if layer >= 0 and (kind, chunk) == (next_kind, next_chunk):
            layers.setdefault((kind, chunk, layer), []).append(clock.seconds(at, until))
    return Measured(
        step_s=clock.seconds(marks.begin, marks.end),
        optimizer_s=clock.seconds(start, end),
        micro_batches=[clock.seconds(a, b) for a, b in zip(marks.micro_batches, ends, strict=True)],
        passes={(kind, chunk, number): clock.seconds(a, b) for kind, chunk, number, a, b in marks.passes},
        layers={key: median(values) for key, values in layers.items()},
    )


def _layer_bytes(marks: Any) -> dict[tuple[int, int], float]:
    """Return the activations that each layer keeps after its forward pass."""
    found: dict[tuple[int, int], list[int]] = {}
    for (kind, chunk, layer, _, at), (next_kind, next_chunk, _, _, until) in pairwise(marks.layers):
        if layer >= 0 and kind == next_kind == "F" and chunk == next_chunk:
            found.setdefault((chunk, layer), []).append(until - at)
    return {key: mean(values) for key, values in found.items()}


def _record_state(trainer: Any, found: RankResult) -> None:
    """Record the local weights, and the bytes of weights, optimizer state and gradients of every layer."""
    from meshwright.engine.metrics import optimizer_tensors

    def local(tensor: Any) -> Any:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    found.weights = sum(local(p).numel() for stage in trainer.stages for p in stage.parameters())
    deferred = _deferred_bytes(trainer)
    for chunk, stage in enumerate(trainer.stages):
        for number, layer in dict(getattr(stage, "layers", {})).items():
            module = getattr(stage.body, stage.names.layers)[str(number)] if not hasattr(layer, "parameters") else layer
            parameters = list(module.parameters())
            weights = [local(p) for p in parameters]
            state = {p: trainer.optimizer.state.get(p, {}) for p in parameters}
            held = sum(one.numel() * one.element_size() for one in (*weights, *map(local, optimizer_tensors(state))))
            trained = ((p, w) for p, w in zip(parameters, weights, strict=True) if p.requires_grad)
            grads = sum(w.numel() * (deferred * _fsdp_ranks(p) or w.element_size()) for p, w in trained)
            found.layer_state[chunk, number] = float(held), float(grads)
            found.layer_weights[chunk, number] = sum(w.numel() for w in weights)


def _deferred_bytes(trainer: Any) -> int:
    """Return the bytes per element of gradients that FSDP2 sums unsharded until the last micro batch; 0 if none."""
    from meshwright.engine.parallelize.fsdp import reduce_dtype

    layout = trainer.recipe.layout
    waits = trainer.micro_batches > 1 and (layout.defer_grad_sync or layout.pp > 1)
    return reduce_dtype(trainer.recipe.precision).itemsize if waits and layout.strategy == "fsdp2" else 0


def _fsdp_ranks(parameter: Any) -> int:
    """Return the number of ranks over which FSDP2 shards a parameter."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 1
    placed = zip(mesh.mesh_dim_names, mesh.shape, parameter.placements, strict=True)
    return prod(size for name, size, place in placed if name in ("fsdp", "efsdp") and place.is_shard())
