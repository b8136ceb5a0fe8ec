"""Types of a dry run's result."""

from __future__ import annotations

import msgspec

from meshwright.clusters import Assumption
from meshwright.display import Readable, Row, titled

GIB = 2**30
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")  # of torch's allocations
PHASES = ("build", "data", "forward", "backward", "gradients", "optimizer")


class Holder(msgspec.Struct, frozen=True):
    """Allocations alive at the peak that one line of code made."""

    part: str
    operation: str  # e.g. aten.mm
    source: str  # e.g. transformers/models/llama/modeling_llama.py:172 in LlamaMLP.forward
    blocks: int
    gib: float


class Collective(msgspec.Struct, frozen=True):
    """All collectives of one kind over one mesh axis in one phase of a step."""

    axis: str  # tp, cp, dp, fsdp, ep, etp, pp, world, …
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send, receive, broadcast
    phase: str
    ranks: int  # size of the group
    count: int  # per step
    gib: float  # per step: sum over collectives of the larger of this rank's input and output


class Moment(msgspec.Struct, frozen=True):
    """The memory peak of a segment of the step, in chronological order."""

    phase: str
    label: str  # e.g. "micro batch 2, layer 17"
    gib: dict[str, float]  # by part


class Placement(msgspec.Struct, frozen=True):
    """How a parameter is sharded over the ranks; parameters of identical layers are one row."""

    name: str  # {} in place of the layer number
    count: int
    shape: tuple[int, ...]
    held: tuple[int, ...]  # shape of this rank's shard
    format: str
    placement: str  # e.g. "tp: Shard(0), fsdp: Shard(0)"
    trained: bool
    gib: float  # all of them, on this rank


class RankDryRun(msgspec.Struct, frozen=True):
    """What one rank of the cluster runs in a step, and its memory."""

    rank: int
    pp_rank: int
    represents: tuple[int, ...]  # pipeline ranks that run the same passes
    layers: tuple[int, ...]  # layers of the model on this rank
    memory_gib: dict[str, float]  # by part at the peak; they add up to allocated_gib
    allocated_gib: float  # torch would report it as max_memory_allocated
    reserved_gib: float  # torch would report it as max_memory_reserved
    peak_phase: str
    peak_at: str  # label of the moment
    phases: dict[str, dict[str, float]]  # peak of every phase, by part
    timeline: tuple[Moment, ...]
    holders: tuple[Holder, ...]  # largest first
    flops: dict[str, float]  # of a step: forward, recompute, backward, total
    collectives: tuple[Collective, ...]
    placement: tuple[Placement, ...]
    traced: str  # text: what was traced and what was replayed
    exact: bool  # True if nothing was replayed
    cpu_s: float


class OtherEngine(msgspec.Struct, frozen=True):
    """The engine that a recipe or file is for, in place of which ours was executed."""

    engine: str
    changed: tuple[str, ...]  # what was changed for our engine
    estimate_gib: float  # of that engine, per GPU
    capacity_gib: float
    fits: bool  # by that estimate
    fit: str  # the verdict in words

    def lines(self) -> tuple[str, ...]:
        """Return what was executed, and the estimate for the engine that was not."""
        changed = f", with {', '.join(self.changed)}" if self.changed else ""
        return (
            f"our engine was executed in place of {self.engine}{changed}: its figures say nothing about {self.engine}",
            f"{self.engine} itself, as recommend, estimate and check have it: {self.estimate_gib:.1f} of "
            f"{self.capacity_gib:.1f} GiB, an estimate: {self.fit}",
        )


class DryRun(Readable, msgspec.Struct, frozen=True):
    """The result of running a recipe at full size on fake tensors."""

    recipe: str
    model: str
    cluster: str
    world: int
    ranks: tuple[RankDryRun, ...]
    worst: int  # index in ranks of the one that needs most memory
    memory_gib: dict[str, float]  # worst rank: its parts, overhead, total, capacity
    fits: bool
    estimate_gib: dict[str, float]  # the cost model's estimate for the same layout, by part
    versions: dict[str, str]
    cpu_s: float
    wall_s: float
    assumed: tuple[Assumption, ...] = ()  # where it models something else than what would run
    other_engine: OtherEngine | None = None  # if the recipe or file is for another engine than ours

    def summary(self) -> list[Row]:
        """Return the memory of the worst rank against capacity and estimate."""
        memory, estimate = self.memory_gib, self.estimate_gib
        parts = ", ".join(f"{name} {gib:.2f}" for name, gib in memory.items() if name not in ("total", "capacity"))
        return [
            *titled("Engine", self.other_engine.lines() if self.other_engine is not None else ()),
            ("Dry run", f"{self.recipe} ({self.model}) on {self.cluster}: {'fits' if self.fits else 'does not fit'}"),
            ("Memory", f"{memory['total']:.2f} of {memory['capacity']:.2f} GiB per GPU: {parts}"),
            ("Estimate", f"{estimate['total']:.2f} GiB"),
            ("Ranks", f"{len(self.ranks)} traced of {self.world:,}, {self.wall_s:.1f} s"),
        ]

    @property
    def difference_gib(self) -> dict[str, float]:
        """Dry run minus estimate, part by part."""
        return {name: self.memory_gib[name] - self.estimate_gib[name] for name in self.memory_gib if name != "capacity"}
