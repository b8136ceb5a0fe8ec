"""Types of a rehearsal's result."""

from __future__ import annotations

import msgspec

from meshwright.clusters import Assumption
from meshwright.costs.timeline import ScheduledPass
from meshwright.display import Readable, Row
from meshwright.dryrun.types import OtherEngine

PARTS = ("compute", "tp", "cp", "ep", "dp", "control", "pp_bubble", "optimizer", "other")
"""Of a step: kernels, exposed communication by kind (control: losses, gradient norm), bubble, update, the rest."""


class Span(msgspec.Struct, frozen=True):
    """A collective of the rehearsed step, in seconds from the start of the step on its rank."""

    axis: str
    kind: str
    gib: float
    start_s: float
    end_s: float


class CollectiveTime(msgspec.Struct, frozen=True):
    """All collectives of one kind over one axis in a step, as simulated."""

    axis: str
    kind: str
    count: float
    gib: float
    seconds: float  # by the network's times, hidden or not


class RankRehearsal(msgspec.Struct, frozen=True):
    """One kind of rank: what it ran, how long it was busy, and its memory."""

    rank: int
    pp_rank: int
    represents: tuple[int, ...]  # pipeline ranks that run the same passes
    layers: int  # of the model on this rank
    layers_run: int
    micro_batches: int  # of a step
    micro_batches_run: int
    steps: int  # timed
    busy_s: float  # passes of a step with their exposed communication
    rest_s: float  # of a step outside the passes: gradient norm, update, data
    compute_s: float  # passes with a network that takes no time
    optimizer_s: float
    exposed_s: dict[str, float]  # communication that compute does not hide, by axis
    spread_pct: float  # of the timed steps: half the range over the median
    allocated_gib: float | None  # None on a CPU
    reserved_gib: float | None
    collectives: tuple[CollectiveTime, ...]
    spans: tuple[Span, ...]
    wall_s: float


class Alternative(msgspec.Struct, frozen=True):
    """Another layout, rehearsed the same way."""

    changes: tuple[str, ...]  # overrides of the recipe
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    allocated_gib: float | None
    speedup: float  # of the rehearsed recipe's step over this one's
    band_pct: float


class Rehearsal(Readable, msgspec.Struct, frozen=True):
    """What a step on a cluster takes, with kernels timed on one device and a simulated network."""

    recipe: str
    model: str
    cluster: str
    world: int
    device: str  # the device that ran the kernels
    scaled_to: str | None  # GPU type to which kernel times were scaled; None: as timed
    scale: float  # factor of kernel times
    network: str  # where the times of collectives come from
    step_s: float
    parts: dict[str, float]  # they add up to step_s
    band_pct: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None  # None on a CPU
    mfu_convention: str
    estimate_s: float  # the cost model's step
    allocated_gib: float | None  # of the fullest rank
    reserved_gib: float | None
    capacity_gib: float
    fits: bool
    limits: tuple[str, ...]  # what limits the step
    ranks: tuple[RankRehearsal, ...]
    schedule: str
    passes: tuple[ScheduledPass, ...]  # of every pipeline rank over a step
    versions: dict[str, str]
    wall_s: float
    settings: dict[str, object]  # the recipe, so that calibrate knows what was rehearsed
    notes: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    assumed: tuple[Assumption, ...] = ()
    other_engine: OtherEngine | None = None
    other_engine_step_s: float | None = None  # of that engine: this step times the ratio of both in the cost model

    @property
    def step_range_s(self) -> tuple[float, float]:
        """The band around the step time."""
        factor = 1 + self.band_pct / 100
        return self.step_s / factor, self.step_s * factor

    def summary(self) -> list[Row]:
        """Return step time, parts and memory."""
        low, high = self.step_range_s
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.parts.items() if value > 0.0005 * self.step_s)
        rows = [
            ("Rehearsal", f"{self.recipe} ({self.model}) on {self.cluster}, kernels timed on {self.device}"),
            ("Step", f"{self.step_s:.3g} s ({low:.3g} to {high:.3g}): {parts}"),
            ("Speed", f"{self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"),
        ]
        if self.allocated_gib is not None:
            rows.append(("Memory", f"{self.allocated_gib:.1f} of {self.capacity_gib:.1f} GiB allocated"))
        return [*rows, *(("Limits", text) for text in self.limits)]
