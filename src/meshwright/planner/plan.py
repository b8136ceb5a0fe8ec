"""The question a user asks and the plan that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from meshwright.choices import ENGINES
from meshwright.clusters import Assumption, Cluster, Gpu
from meshwright.costs import Estimate, Fit
from meshwright.display import Readable, Row, titled
from meshwright.models import ModelSpec, same_model, same_shape
from meshwright.planner.budget import Budget
from meshwright.recipes.case import Case
from meshwright.recipes.model_changes import beyond_positions, unknown_numerics
from meshwright.recipes.types import Engine, FieldKind, Goal, Recipe, recipe_fields
from meshwright.rules import Finding, can_be_built


def calibration_notes(calibration: Any, on: Gpu, engine: str) -> tuple[str, ...]:
    """Return whether the user's calibration applies; the module is imported only if there is one."""
    if calibration is None:
        return ()
    from meshwright.costs import calibrate

    return calibrate.applied(calibration, on, engine)


OPEN_LENGTH = "train.steps"  # field of the assumption that nothing says how long a file trains
Match = Literal["exact", "resized", "closest", "derived"]
Approach = Literal[
    "use the recipe directly",
    "use the recipe directly; data parallelism fills the GPUs",
    "recipe with its layout adjusted",
    "recipe with its contract changed: a new experiment",
    "recipe as a starting point for another architecture",
]


class Question(msgspec.Struct, frozen=True):
    """What to train, on which cluster, for which goal."""

    model: ModelSpec
    model_ref: str  # catalogue name, or path of the user's config.json
    cluster: Cluster
    goal: Goal
    cluster_ref: str = ""  # path of the cluster file, if the cluster is not a catalogue one
    seq_length: int | None = None
    engine: Engine = "meshwright"
    benchmark: bool = False
    calibration: Any = None  # costs.Calibration of a machine
    mtbf_hours: float | None = None  # mean hours between failures of one GPU, if the user set them
    assumed: tuple[Assumption, ...] = ()  # what the cluster argument or a file leaves open
    recipe_words: tuple[str, ...] = ()  # arguments that name the user's recipe or file on the command line
    options: tuple[str, ...] = ()  # others of the user that change an answer, as typed: --calibration FILE
    recipe_engine: Engine = "meshwright"  # that this recipe or file is for
    stated: tuple[str, ...] = ()  # contract fields that this recipe or file sets, by flat name
    file_error: str = ""  # why no command runs the user's file before it is corrected


class Change(msgspec.Struct, frozen=True):
    """One field that differs from the recipe the plan started from."""

    field: str
    old: Any
    new: Any
    kind: FieldKind
    why: str


class Suggestion(msgspec.Struct, frozen=True):
    """Overrides the plan suggests but does not apply."""

    title: str
    overrides: tuple[str, ...]
    why: str
    kind: FieldKind = "contract"


class Option(msgspec.Struct, frozen=True):
    """A way to make a training fit that does not fit as asked, estimated and checked."""

    title: str
    kind: FieldKind  # layout: the trained weights stay the same; contract: they differ
    overrides: tuple[str, ...]
    goal: Goal
    fits: bool
    total_gib: float  # per GPU
    host_gib: float  # host memory per GPU that offloading needs
    step_s: float
    slowdown: float  # step time over that of the fastest layout on these GPUs if memory were unlimited
    cost: str  # what the user gives up
    command: str
    fit: Fit = "fits"  # the verdict in words

    @property
    def likely(self) -> bool:
        """Whether it fits with a chance of at least 70 %."""
        return self.fit in ("fits", "probably fits")


class Reason(msgspec.Struct, frozen=True):
    """The reason for one layout value."""

    field: str
    value: Any
    why: str


class Repair(msgspec.Struct, frozen=True):
    """The smallest joint change that removes every error."""

    overrides: tuple[str, ...]
    removes: tuple[str, ...]  # rules whose findings it removes
    leaves: tuple[str, ...]  # rules of severity warning that stay broken
    contract: bool  # whether it changes the trained weights
    step_s: float | None  # None: the GPUs are unknown
    total_gib: float | None  # per GPU
    undoes: tuple[str, ...] = ()  # keys of the user's own settings that it replaces: no other change removes the errors
    planned: bool = False  # whether the commands of the plan include it


class Contradiction(msgspec.Struct, frozen=True):
    """The smallest set of the user's overrides that cannot be combined."""

    overrides: tuple[str, ...]
    reason: str
    fix: tuple[str, ...]  # any one of them resolves it


class PublishedLayout(msgspec.Struct, frozen=True):
    """The layout that the recipe was published with for this cluster, and what it costs."""

    recipe: str
    kept: bool  # whether the plan uses it
    measured: str  # source of a measured step time; empty if there is none
    layout: dict[str, Any]
    overrides: tuple[str, ...]  # what returns to it; none if it breaks a rule here
    fits: bool
    step_s: float
    total_gib: float  # per GPU
    why: str  # why it is kept or not


class Plan(Readable, msgspec.Struct, frozen=True):
    """A recipe on a cluster, with its estimate, findings, and all changes with their reasons."""

    question: Question
    base: Recipe  # the shipped recipe it started from
    recipe: Recipe  # what will run
    match: Match
    case: Case
    estimate: Estimate
    changes: tuple[Change, ...]
    findings: tuple[Finding, ...]
    suggestions: tuple[Suggestion, ...] = ()
    options: tuple[Option, ...] = ()  # if no layout of the contract fits without a lever
    repair: Repair | None = None  # if there are errors, or several fixes
    budget: Budget | None = None  # days and cost, if tokens, a price or epochs were given
    contradiction: Contradiction | None = None  # of the user's overrides
    published: PublishedLayout | None = None  # if the recipe was made for this cluster
    repaired: Plan | None = None  # the plan with its repair, if commands run that
    fewer_nodes: Plan | None = None  # the plan on fewer nodes that are as fast, if they are suggested
    executed: tuple[str, ...] = ()  # keys set for the plan's engine: it ignores the recipe's value, or runs faster so

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing about the calibration, the sequence length, and the model's numbers and weights."""
        question, length, longest = self.question, self.recipe.data.seq_length, self.question.model.max_seq_length
        notes = calibration_notes(question.calibration, question.cluster.gpu, question.engine)
        if longer := beyond_positions(self.recipe, question.model):
            notes += (longer,)
        kept = question.seq_length is None and length == self.base.data.seq_length
        if longest and length < longest and self.match == "derived" and self.recipe.goal == "pretrain" and kept:
            notes += (
                f"samples of {length:,} tokens, as in the recipe {self.base.name}; {question.model.name} has "
                f"{longest:,} positions: --seq {longest} trains on all of them",
            )
        if question.engine == ENGINES[0] and (unknown := unknown_numerics(self.recipe, question.model)):
            notes += (unknown,)
        found = question.model.quantization
        if found is None or found.reason:
            return notes
        return (*notes, f"the folder's weights are {found.method}: they are read as bf16, and the training saves bf16")

    def summary(self) -> Sequence[Row]:
        """Return what the plan trains, its layout, memory, speed, changes and findings."""
        question, recipe, estimate = self.question, self.recipe, self.estimate
        layout = self.layout_dict()
        degrees = [f"{name} {layout[name]}" for name in ("tp", "pp", "vp", "cp", "ep", "etp") if layout[name] > 1]
        parts = (layout["strategy"], *degrees, f"dp {layout['dp_shard']}", f"micro batch {layout['micro_batch_size']}")
        memory, band = estimate.memory, estimate.band
        method = f" ({recipe.peft.method})" if recipe.goal == "peft" else ""
        figures = [
            (
                "Memory",
                f"{float(memory.total):.1f} of {float(memory.capacity):.1f} GiB per GPU "
                f"(±{float(band.memory_pct):.0f} %): {estimate.fit}",
            ),
            (
                "Speed",
                f"{float(estimate.step_s):.2f} s per step (±{float(band.step_pct):.0f} %), "
                f"{float(estimate.tokens_per_s_per_gpu):,.0f} tokens/s/GPU, MFU {float(estimate.mfu):.0%}",
            ),
        ]
        no_figures = [("Memory", "no figures: this layout cannot be built (see the findings)")]
        return [
            ("Recipe", f"{self.base.name}: {self.approach} ({self.match})"),
            (
                "Train",
                f"{question.model_ref} · {recipe.goal}{method} · {recipe.data.seq_length:,} tokens × "
                f"{recipe.train.global_batch_size:,} per step · on {question.cluster}",
            ),
            ("Layout", " · ".join((*parts, f"recompute {layout['recompute']}"))),
            *(figures if self.exists else no_figures),
            *titled(
                "Changed", [f"{c.field} {c.old} → {c.new} ({c.kind})  {c.why}" for c in self.changes] or ["nothing"]
            ),
            *titled("Findings", [f"{f.severity}: {f.message}" for f in self.findings] or ["none"]),
        ]

    @property
    def ok(self) -> bool:
        """Whether the plan has no errors and fits in memory."""
        return bool(self.estimate.fits) and not any(f.severity == "error" for f in self.findings)

    @property
    def exists(self) -> bool:
        """Whether the layout can be built: our rules have no errors except memory, whatever else is wrong in a file."""
        return can_be_built(self.findings)

    @property
    def approach(self) -> Approach:
        """How much the plan differs from the shipped recipe."""
        is_other = not same_model(self.recipe.model, self.base.model)
        if (is_other and not same_shape(self.case.model, self.base.model)) or any(
            c.field.startswith("architecture.") for c in self.changes
        ):
            return "recipe as a starting point for another architecture"
        if is_other or any(c.kind != "layout" for c in self.changes):
            return "recipe with its contract changed: a new experiment"
        if any(c.field not in self.executed for c in self.changes):
            return "recipe with its layout adjusted"
        same = self.match == "exact"
        return "use the recipe directly" if same else "use the recipe directly; data parallelism fills the GPUs"

    def layout_dict(self) -> dict[str, Any]:
        """Return the layout with derived values filled in."""
        layout = self.recipe.layout
        return {
            "strategy": layout.strategy,
            **{name: getattr(layout, name) for name in ("tp", "pp", "vp", "cp", "ep", "etp")},
            "dp_shard": int(self.case.shard),
            "dp_replicate": layout.dp_replicate,
            "sp": layout.sp,
            "micro_batch_size": layout.micro_batch_size,
            "gradient_accumulation": int(self.case.accumulation),
            "pp_micro_batches": int(self.case.pass_micro_batches),
            "recompute": layout.recompute,
            "pp_schedule": layout.pp_schedule,
            "stage_layers": list(layout.stage_layers),
            "cp_comm": layout.cp_comm,
            "offload": layout.offload,
            "reshard_after_forward": layout.reshard_after_forward,
        }

    @property
    def has_length(self) -> bool:
        """Whether the recipe says how long it trains; the steps of a file that does not are the default of a recipe."""
        is_open = any(one.field == OPEN_LENGTH for one in self.question.assumed)
        return (
            not is_open
            or self.recipe.train.steps != recipe_fields()[OPEN_LENGTH].default
            or self.recipe.train.epochs > 0
        )

    def contract_dict(self) -> dict[str, Any]:
        """Return the fields that determine the trained weights."""
        r = self.recipe
        return {
            "seq_length": r.data.seq_length,
            "global_batch_size": r.train.global_batch_size,
            "precision": r.precision.compute if r.precision.matmul == "same" else r.precision.matmul,
            "optimizer": r.optimizer.name,
            "lr": r.optimizer.lr,
            "min_lr": r.schedule.min_lr,
            "schedule": r.schedule.name,
            "warmup_steps": r.schedule.warmup_steps,
            "steps": r.train.steps if self.has_length and not r.train.epochs else None,
            "epochs": r.train.epochs or None,
            "dataset": r.data.dataset,
            "packing": r.data.packing,
            "peft": None if r.goal != "peft" else {"method": r.peft.method, "rank": r.peft.rank, "alpha": r.peft.alpha},
        }
