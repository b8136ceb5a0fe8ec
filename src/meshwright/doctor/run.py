"""A run as its log describes it: steps, starts, faults and header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from meshwright.recipes.types import Engine, Recipe

if TYPE_CHECKING:  # the readers of files, which a log alone does not need
    from meshwright.frameworks.to_recipe import ImportedRecipe

LogFormat = Literal[
    "meshwright",
    "megatron",
    "nemo",
    "torchtitan",
    "automodel",
    "kempnerforge",
    "transformers",
    "json",
    "deepspeed",
    "torch",
]
ENGINE: Mapping[LogFormat, Engine] = {
    "meshwright": "meshwright",
    "megatron": "megatron",
    "nemo": "megatron",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "kempnerforge": "kempnerforge",
    "deepspeed": "deepspeed",
}
"""Log format -> engine; unknown for logs with torch's messages only."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one step, or of several that the log reports as one."""

    step: int
    line: int  # line number from 1
    file: str = ""  # file, if the run has several logs
    attempt: int = 0  # number of restarts before it
    covers: int = 1  # number of steps that the metrics average
    loss: float | None = None  # may be nan
    hides_nan: bool = False  # the log has 0 in place of a NaN loss
    epoch: float | None = None  # passes over the data
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    seconds: float | None = None  # of one step
    tokens_per_s: float | None = None  # of one GPU
    all_tokens_per_s: float | None = None  # of all
    tflops: float | None = None  # of one GPU, as the log counts them
    mfu: float | None = None  # a share, as the log counts it
    samples: int | None = None  # of one step
    memory_gib: float | None = None  # peak
    memory_parts: dict[str, float] = {}
    parts_s: dict[str, float] = {}  # data, forward_backward, optimizer, collectives, waiting (for other ranks), …
    ranks_s: dict[str, tuple[float, float]] = {}  # seconds of the fastest and slowest rank
    by_rank_s: dict[str, dict[int, float]] = {}  # seconds of every rank, if the log has them
    skipped: int = 0  # steps the optimizer skipped
    bad: int = 0  # steps with a NaN or infinite loss
    blocked_s: float = 0.0  # blocked by a checkpoint since the previous step
    at_s: float | None = None  # time of its line, in seconds since any fixed time

    @property
    def first(self) -> int:
        """The first step that the metrics cover."""
        return self.step - self.covers + 1

    @property
    def seconds_per_unit(self) -> float | None:
        """Time per unit of work: seconds per token if tokens are logged, else per sample, else per step."""
        if rate := self.tokens_per_s or self.all_tokens_per_s:
            return 1 / rate
        if self.seconds is None or self.seconds <= 0:
            return None
        return self.seconds / self.samples if self.samples else self.seconds

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are finite, as far as they are logged."""
        logged = [value for value in (self.loss, self.grad_norm) if value is not None]
        return not self.bad and all(map(math.isfinite, logged))


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """A loss on data that is not trained on."""

    step: int  # completed steps
    loss: float  # may be nan
    line: int
    name: str = ""  # of the dataset, if the log names several
    file: str = ""


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """torch's message for a failed allocation, in GiB."""

    wanted: float | None = None
    capacity: float | None = None
    free: float | None = None
    in_use: float | None = None  # by the process, on the device
    allocated: float | None = None  # of that, in tensors
    unused: float | None = None  # of that, cached in fragments

    @property
    def needed(self) -> float | None:
        """The least that the step would have needed: memory in use plus the failed request."""
        if self.wanted is None:
            return None
        held = self.in_use if self.in_use is not None else self.allocated
        return None if held is None else held + self.wanted - (self.unused or 0.0)


VALIDATION = "validation"
"""`Fault.where` of an allocation that failed while the run validated."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A log message that shows why a run ended."""

    name: str  # name of a fault pattern
    line: int
    text: str
    file: str = ""
    step: int | None = None  # latest step before it
    where: str = ""  # part of memory, from the traceback, or validation
    memory: OutOfMemory | None = None
    recorded: bool = False  # recorded by our own run
    fix: tuple[str, ...] = ()  # suggested in that record
    context: str = ""  # its line and those after it
    prefix: str = ""  # of its line, which names the rank
    rank: int | None = None  # global rank that wrote it

    @property
    def shown(self) -> str:
        """The line as it is in the log, with the rank that wrote it."""
        return f"{self.prefix} {self.text}".strip()

    @property
    def located(self) -> str:
        """The line with its place."""
        return f"{self.file}:{self.line} {self.shown}"


class CollectiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank reports about the collective that timed out."""

    rank: int
    line: int
    file: str
    group: str = ""  # process group, if the message names it
    operation: str = ""
    timed_out: int | None = None  # sequence numbers in the group
    enqueued: int | None = None
    completed: int | None = None
    lagging: bool = False  # named by torch itself as a rank that the others waited for


class RankHosts(msgspec.Struct, frozen=True):
    """The hosts that a log names."""

    ranks: dict[int, str] = {}  # by global rank
    tasks: dict[int, str] = {}  # by srun's task, which is a rank or a node
    first_failed: int | None = None  # the rank that torch's launcher saw fail first
    addresses: dict[str, str] = {}  # host by the address that NCCL prints


class NcclNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The network between nodes that NCCL reports, with the line that shows it."""

    name: str  # Socket, IB, …
    file: str
    line: int
    text: str
    nodes: int = 0  # that NCCL or the hosts of its lines show
    interface: str = ""  # of sockets
    no_device: bool = False  # NCCL found no InfiniBand or RoCE device
    forced_by: str = ""  # a variable that chose sockets, with its value


class Recompiles(msgspec.Struct, frozen=True, kw_only=True):
    """How often torch.compile compiled again after the first steps, and whether it gave up."""

    count: int
    steps: tuple[int, int] | None  # before the first and the last of them
    file: str
    line: int
    text: str
    gave_up: str = ""  # function that runs without compilation since then
    reason: str = ""  # of the last one


class FieldDifference(msgspec.Struct, frozen=True):
    """A recipe field whose value in the log is not that in the file that the user names as what ran."""

    field: str
    logged: Any
    stated: Any  # in the file

    @property
    def name(self) -> str:
        """The field without its section."""
        return self.field.partition(".")[2]


class StragglerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report of a straggler detector: the ranks that it calls slow, and the scores that it prints."""

    line: int
    step: int | None  # latest step before it
    slow: dict[int, str] = {}  # rank to node
    scores: dict[int, float] = {}  # 1 for the fastest rank, 0.5 for one that takes twice as long


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a log states about the run besides its steps."""

    recipe: Recipe | None = None  # only our own logs have it
    recipe_name: str = ""
    started: str = ""  # latest start, ISO 8601 in UTC
    versions: Mapping[str, str] = {}  # packages that ran, as our own logs record them
    model: str = ""
    gpus: str = ""  # as a cluster string
    gpu: str = ""
    gpus_per_node: int = 0  # 0 if unknown
    world: int | None = None
    data_ranks: int | None = None  # dp × cp, if the log shows them without the number of GPUs
    capacity_gib: float | None = None
    seq_length: int | None = None
    tokens_per_step: int | None = None
    rank_tokens_per_step: int | None = None  # those of one GPU, if the log has no total
    sample_tokens: int | None = None  # of a padded sample on average, as counted in the data or as the user says
    total_steps: int | None = None
    parameters: int | None = None  # of the whole model
    trainable_parameters: int | None = None
    overrides: dict[str, Any] = {}  # values of our fields
    states_layout: bool = False  # the overrides contain the degrees of parallelism
    arguments: tuple[str, ...] = ()  # Megatron's, as command-line flags
    off_arguments: tuple[str, ...] = ()  # names of Megatron's that are None, False or empty
    config: str = ""  # Megatron-Bridge's, as YAML
    file: str = ""  # that the user names as what ran
    file_fields: frozenset[str] = frozenset()  # fields of ours that it sets
    file_differences: tuple[FieldDifference, ...] = ()  # settings that the log states otherwise
    framework: str = ""  # of that file
    program: str = ""  # the framework that wrote the log, if others write the same format
    front_end: str = ""  # of the Trainer, whose messages the log has
    settings: Mapping[str, Any] = {}  # of that file
    imported: ImportedRecipe | None = None  # that file, with the arguments of its program
    options: Mapping[str, str] = {}  # of the user besides the file and the GPUs, which printed commands repeat
    typed: tuple[str, ...] = ()  # overrides of the user
    mfu_convention: str = ""
    on_gpu: bool = True
    assumed_gpus: bool = False  # neither the log nor the user names them
    mock_data: bool = False
    tiny: bool = False  # random weights of a small model, from --tiny or bench

    @property
    def states_settings(self) -> bool:
        """Whether the log has the settings of its framework, as arguments or as a config."""
        return bool(self.arguments or self.config)

    @property
    def gpus_option(self) -> str:
        """The option that names the GPUs, with as many as the log states; empty if they are known."""
        known = self.gpus or (self.gpu and self.world)
        return "" if known else f" --gpus {self.world or self.data_ranks or 8}x{self.gpu or 'H100'}"

    def logged_tokens(self, world: int | None) -> int | None:
        """Return the tokens of a step on all GPUs that the log states or implies; None if it does not."""
        ranks = self.world or world
        return self.tokens_per_step or ((self.rank_tokens_per_step or 0) * (ranks or 0) or None)


class Run(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A run as its log describes it."""

    kind: LogFormat
    path: str
    file: str  # log with the steps
    steps: tuple[Step, ...] = ()
    starts: tuple[int, ...] = ()  # the first step of every start
    numbered: bool = True  # False if the log has no step numbers: then a step is one logged record
    validations: tuple[Validation, ...] = ()  # in order of the log
    faults: tuple[Fault, ...] = ()
    collectives: tuple[CollectiveReport, ...] = ()  # of a timeout
    hosts: RankHosts = RankHosts()  # if the run has faults
    ending: str = ""  # what the trainer printed as it ended
    earlier: tuple[str, ...] = ()  # logs of earlier starts
    network: NcclNetwork | None = None  # if NCCL_DEBUG=INFO was set
    header: RunHeader = RunHeader()
    retries: int = 0  # allocations that succeeded only after the allocator's cache was flushed
    retry_line: int = 0
    recompiles: Recompiles | None = None  # of torch.compile
    straggler_reports: tuple[StragglerReport, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def attempts(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of every start."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.attempt, []).append(step)
        return tuple(tuple(found.get(number, ())) for number in range(max(found, default=-1) + 1))

    @property
    def is_done(self) -> bool:
        """Whether the run has completed all its steps."""
        return bool(self.header.total_steps) and self.last_step >= (self.header.total_steps or 0)

    @property
    def peak_rate(self) -> float | None:
        """The highest learning rate of the step lines: the peak, once the warm-up is over."""
        return max((step.lr for step in self.steps if step.lr), default=None)

    @property
    def last_step(self) -> int:
        """The latest step."""
        return max((step.step for step in self.steps), default=0)
