"""What a dry run finds out, as values."""

from __future__ import annotations

import msgspec

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")  # of what torch allocates
PHASES = ("build", "data", "forward", "backward", "gradients", "optimizer")


class Holder(msgspec.Struct, frozen=True):
    """Blocks of memory alive at the peak that one line of code made."""

    part: str
    operation: str  # e.g. aten.mm
    source: str  # e.g. transformers/models/llama/modeling_llama.py:172 in LlamaMLP.forward
    blocks: int
    gib: float


class Collective(msgspec.Struct, frozen=True):
    """All collectives of one kind over one axis in one phase of a step."""

    axis: str  # tp, cp, dp, fsdp, ep, etp, pp, world, …
    kind: str  # all_gather, reduce_scatter, all_reduce, all_to_all, send, receive, broadcast
    phase: str
    ranks: int  # that take part in each
    count: int  # per step
    gib: float  # per step: the sum of the larger of what this rank gives and what it gets


class Moment(msgspec.Struct, frozen=True):
    """The highest point of a stretch of the step, in the order of time."""

    phase: str
    label: str  # e.g. "micro batch 2, layer 17"
    gib: dict[str, float]  # by part


class Placement(msgspec.Struct, frozen=True):
    """How one parameter lies on the ranks; parameters of like layers are one row."""

    name: str  # with {} for the number of a layer
    count: int
    shape: tuple[int, ...]
    held: tuple[int, ...]  # by this rank
    format: str
    placement: str  # e.g. "tp: Shard(0), fsdp: Shard(0)"
    trained: bool
    gib: float  # of all of them, on this rank


class RankDryRun(msgspec.Struct, frozen=True):
    """What one rank of the cluster does in a step, and what it holds."""

    rank: int
    pp_rank: int
    represents: tuple[int, ...]  # pipeline ranks that do the same
    layers: tuple[int, ...]  # of the model, held by this rank
    memory_gib: dict[str, float]  # by part at the peak; they add up to allocated_gib
    allocated_gib: float  # what torch would report as max_memory_allocated
    reserved_gib: float  # what its allocator would hold
    peak_phase: str
    peak_at: str  # the label of the moment
    phases: dict[str, dict[str, float]]  # the peak of every phase by part
    timeline: tuple[Moment, ...]
    holders: tuple[Holder, ...]  # the largest first
    flops: dict[str, float]  # of a step: forward, recompute, backward, total
    collectives: tuple[Collective, ...]
    placement: tuple[Placement, ...]
    traced: str  # what was traced and what was replayed of it, in words
    exact: bool  # whether nothing was replayed
    cpu_s: float


class DryRun(msgspec.Struct, frozen=True):
    """A recipe executed at its full size on tensors without data."""

    recipe: str
    model: str
    cluster: str
    world: int
    ranks: tuple[RankDryRun, ...]
    worst: int  # which of them needs most
    memory_gib: dict[str, float]  # of the worst rank: its parts, overhead, total, capacity
    fits: bool
    estimate_gib: dict[str, float]  # the cost model's parts of the same layout
    versions: dict[str, str]
    cpu_s: float
    wall_s: float

    @property
    def difference_gib(self) -> dict[str, float]:
        """Dry run minus estimate, part by part."""
        return {name: self.memory_gib[name] - self.estimate_gib[name] for name in self.memory_gib if name != "capacity"}
