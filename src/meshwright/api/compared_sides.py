"""One engine, recipe or file of a comparison: its plan, and what it cannot do or express."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.display import Readable, Row, titled
from meshwright.frameworks import UnmappedField
from meshwright.planner import Plan
from meshwright.recipes.types import recipe_fields
from meshwright.rules import Finding as RuleFinding


class Limitation(msgspec.Struct, frozen=True):
    """A setting of the job that an engine does not execute."""

    field: str
    value: Any
    effect: str  # refused or ignored
    instead: Any  # what runs in its place; None if it is refused
    why: str


class Side(Readable, msgspec.Struct, frozen=True):
    """One engine, or one recipe or file, of a comparison."""

    name: str
    plan: Plan | None = None  # None: the error says why there is none
    error: str = ""
    cannot: tuple[Limitation, ...] = ()
    lost: tuple[UnmappedField, ...] = ()
    export_error: str = ""  # why the engine's framework cannot be given this job
    refused: tuple[RuleFinding, ...] = ()  # errors that the framework's own rules find in its config
    sized: bool = False  # whether the layout was chosen for the GPUs: that of a model, not of a recipe or file

    def summary(self) -> Sequence[Row]:
        """Return the plan, or why there is none."""
        why = self.error or self.export_error
        return [
            ("Side", self.name),
            *(() if self.plan is None else self.plan.summary()),
            *titled("Error", [why] * bool(why)),
        ]

    @property
    def shape(self) -> tuple[float, ...]:
        """The sizes of the model: files of other frameworks may name the same one differently."""
        if self.plan is None:
            return ()
        model = self.plan.case.model
        return (model.num_layers, model.hidden, model.vocab, round(model.params.total / 1e6))

    @property
    def model(self) -> str:
        """The model that is trained; empty if there is no plan."""
        return "" if self.plan is None else self.plan.question.model.name

    @property
    def runs(self) -> bool:
        """Whether the training can start there; it may still need too much memory."""
        return self.plan is not None and self.plan.exists and not self.export_error and not self.refused

    @property
    def ok(self) -> bool:
        """Whether the training can run and fits there."""
        return self.runs and self.plan is not None and self.plan.ok

    @property
    def rate(self) -> float:
        """Tokens per second of the whole cluster."""
        return 0.0 if self.plan is None else float(self.plan.estimate.tokens_per_s_per_gpu) * self.plan.case.world

    @property
    def lost_contract(self) -> list[str]:
        """Fields that determine the trained weights and are lost in the framework's config."""
        kinds = {key: info.kind for key, info in recipe_fields().items()}
        made_up = ("data.dataset", "mock")  # random data is nothing to lose
        lost = [one for one in self.lost if (one.field, one.value) != made_up]
        return [one.field for one in lost if kinds.get(one.field) == "contract"]
