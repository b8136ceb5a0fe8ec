"""What a log tells of a run: its steps, how often it was started, what it failed of, and what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec

from meshwright.recipes.types import Engine, Recipe

Kind = Literal["meshwright", "megatron", "torchtitan", "automodel", "torch"]
ENGINE: Mapping[Kind, Engine] = {
    "meshwright": "meshwright",
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
}
"""What ran it; nothing is known of a log that shows torch's own words alone."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step as its log tells it, or several that the log tells as one."""

    step: int
    line: int  # where it stands, counted from 1
    file: str = ""  # and in which, where a run has several
    attempt: int = 0  # how often the run had been started again before
    covers: int = 1  # steps that the figures are the mean of
    loss: float | None = None  # nan where the log says so
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    seconds: float | None = None  # of one step
    tokens_per_s: float | None = None  # of one GPU
    all_tokens_per_s: float | None = None  # of all
    tflops: float | None = None  # of one GPU, as the log counts them
    mfu: float | None = None  # a share, as the log counts it
    samples: int | None = None  # of one step
    memory_gib: float | None = None  # the most that was held at once
    memory_parts: dict[str, float] = {}
    parts_s: dict[str, float] = {}  # data, forward_backward, optimizer, collectives, …
    ranks_s: dict[str, tuple[float, float]] = {}  # the fastest and the slowest rank's seconds
    skipped: int = 0  # steps that the optimizer did not take
    bad: int = 0  # steps whose loss was not a number
    blocked_s: float = 0.0  # that training waited for a checkpoint since the step before

    @property
    def first(self) -> int:
        """The first step that the figures are of."""
        return self.step - self.covers + 1

    @property
    def pace(self) -> float | None:
        """Time for one unit of work: seconds per token where tokens are told, else per sample, else per step."""
        if rate := self.tokens_per_s or self.all_tokens_per_s:
            return 1 / rate
        if self.seconds is None or self.seconds <= 0:
            return None
        return self.seconds / self.samples if self.samples else self.seconds

    @property
    def is_number(self) -> bool:
        """Whether loss and gradients are finite, as far as they are told."""
        told = [value for value in (self.loss, self.grad_norm) if value is not None]
        return not self.bad and all(map(math.isfinite, told))


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What torch said when an allocation failed, in GiB."""

    wanted: float | None = None
    capacity: float | None = None
    free: float | None = None
    in_use: float | None = None  # by the process, on the device
    allocated: float | None = None  # of that, in tensors
    unused: float | None = None  # of that, held by the allocator in pieces too small

    @property
    def needed(self) -> float | None:
        """What the step would have needed at least: what was in tensors or in use, and what was asked for."""
        if self.wanted is None:
            return None
        held = self.in_use if self.in_use is not None else self.allocated
        return None if held is None else held + self.wanted - (self.unused or 0.0)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Words in a log that say why a run ended."""

    name: str  # of faults.SIGNS
    line: int
    text: str
    file: str = ""
    step: int | None = None  # the one before it, where steps are told
    where: str = ""  # the part of the step, where the words around it say
    memory: OutOfMemory | None = None
    written_down: bool = False  # by our own run when it failed
    fix: tuple[str, ...] = ()  # that it wrote beside it


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says of the run besides its steps."""

    recipe: Recipe | None = None  # in full; our own runs alone tell it
    recipe_name: str = ""
    started: str = ""  # the last time, as ISO 8601 in UTC
    model: str = ""
    gpus: str = ""  # as a cluster string
    gpu: str = ""
    world: int | None = None
    capacity_gib: float | None = None
    seq_length: int | None = None
    tokens_per_step: int | None = None
    total_steps: int | None = None
    overrides: dict[str, Any] = {}  # values of our fields
    arguments: tuple[str, ...] = ()  # Megatron's, as they would be typed
    mfu_convention: str = ""
    on_gpu: bool = True
    mock_data: bool = False


class Run(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A run as its log tells it."""

    kind: Kind
    path: str
    file: str  # where the steps were read
    steps: tuple[Step, ...] = ()
    starts: tuple[int, ...] = ()  # the first step of every start
    faults: tuple[Fault, ...] = ()
    earlier: tuple[str, ...] = ()  # logs of starts before the last
    told: RunHeader = RunHeader()
    retries: int = 0  # allocations that succeeded only after the allocator's cache was emptied
    retry_line: int = 0
    notes: tuple[str, ...] = ()

    @cached_property
    def attempts(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of every start."""
        count = max((step.attempt for step in self.steps), default=-1) + 1
        return tuple(tuple(step for step in self.steps if step.attempt == number) for number in range(count))

    @property
    def is_done(self) -> bool:
        """Whether it has taken all the steps it was to take."""
        return bool(self.told.total_steps) and self.last_step >= (self.told.total_steps or 0)

    @property
    def last_step(self) -> int:
        """The furthest step."""
        return max((step.step for step in self.steps), default=0)
