"""The responses of verbs: one struct each, whose fields are the keys of the JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import costs
from meshwright.display import Readable
from meshwright.rules import Finding as RuleFinding
from meshwright.version import SCHEMA

Severity = Literal["error", "warning", "advice"]
FieldKind = Literal["layout", "contract", "benchmark"]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A nested object of a response."""


class Response(Readable, msgspec.Struct, frozen=True, kw_only=True):
    """What a verb returns; a key that does not apply is left out."""

    schema: Literal["meshwright/2"] = SCHEMA

    @property
    def ok(self) -> bool:
        """Return whether the answer is yes; the exit code is 1 otherwise."""
        return True


class Error(Part, frozen=True, kw_only=True):
    """What is wrong with which value, and how to fix it."""

    kind: str
    field: str
    value: str | None
    message: str
    fix: list[str]
    findings: Sequence[Mapping[str, Any]] | UnsetType = UNSET


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The error object, the same on every surface."""

    schema: Literal["meshwright/2"] = SCHEMA
    error: Error


class MemoryGib(Part, frozen=True, kw_only=True):
    """Memory of the fullest GPU by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    overhead: float
    total: float
    capacity: float | UnsetType = UNSET


class StepParts(Part, frozen=True, kw_only=True):
    """Seconds of a step by part."""

    compute: float
    tp: float
    cp: float
    ep: float
    pp_bubble: float
    dp: float
    optimizer: float
    other: float


class Band(Part, frozen=True, kw_only=True):
    """Uncertainty of an estimate: a factor in percent, and the ends of the range from estimate / factor to × factor."""

    step_pct: float
    memory_pct: float
    step_low_s: float | None
    step_high_s: float | None
    memory_low_gib: float
    memory_high_gib: float


class Estimate(Part, frozen=True, kw_only=True):
    """Memory and speed of a layout; speeds are null if it cannot be built, for the reasons in the findings.

    `host_gib` is the host memory per GPU that an offload needs.
    """

    fits: bool
    memory_gib: MemoryGib
    host_gib: float | UnsetType = UNSET
    step_s: float | None
    step_parts_s: StepParts | None
    tokens_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    mfu_convention: str
    band: Band
    fit: costs.Fit
    fit_probability: float


class Finding(Part, frozen=True, kw_only=True):
    """What a rule found; `fix` lists overrides that together remove it, `no_fix` says why there are none.

    `undoes` lists the keys of the user's own settings that `fix` replaces, where no other change resolves it.
    """

    rule: str
    severity: Severity
    field: str
    message: str
    fix: Sequence[str]
    file: str | UnsetType = UNSET
    line: int | UnsetType | None = UNSET
    no_fix: str | UnsetType = UNSET
    undoes: Sequence[str] | UnsetType = UNSET


S = TypeVar("S", bound=msgspec.Struct)


def copied(to: type[S], source: object, /, **more: Any) -> S:
    """Return a struct with these fields and, for the others, the source's attributes of the same name."""
    names = [name for name in to.__struct_fields__ if name not in more and hasattr(source, name)]
    return to(**{name: getattr(source, name) for name in names}, **more)


def estimate_part(estimate: costs.Estimate, exists: bool = True) -> Estimate:
    """Return an estimate; a layout that cannot be built does not fit and has no speed, whatever is computed for it."""
    exists = exists and estimate.can_be_built
    values = costs.to_dict(estimate)
    values |= {
        "fits": values["fits"] and exists,
        "fit": estimate.fit if exists else "does not fit",
        "fit_probability": values["fit_probability"] if exists else 0.0,
        "memory_gib": MemoryGib(**values["memory_gib"]),
        "step_parts_s": StepParts(**values["step_parts_s"]),
        "band": Band(**values["band"]),
    }
    if not exists:
        values |= dict.fromkeys(("step_s", "step_parts_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"))
        values["band"] = msgspec.structs.replace(values["band"], step_low_s=None, step_high_s=None)
    return Estimate(**values)


def finding_parts(findings: Sequence[RuleFinding]) -> list[Finding]:
    """Return findings, errors first."""
    return [
        copied(
            Finding,
            f,
            file=f.file or UNSET,
            line=(f.line or None) if f.file else UNSET,
            no_fix=f.no_fix or UNSET,
            undoes=f.undoes or UNSET,
        )
        for f in findings
    ]


def to_json(response: msgspec.Struct) -> dict[str, Any]:
    """Return a response as plain values, as they are printed and sent."""
    built: dict[str, Any] = msgspec.to_builtins(response, enc_hook=str)
    return built
