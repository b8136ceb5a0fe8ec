"""A diagnosis to share: figures and the names of findings, without paths, log lines, messages or private names."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

import msgspec

from meshwright import clusters, doctor, models
from meshwright.choices import ENGINES
from meshwright.doctor.run import LogFormat
from meshwright.errors import InputError, MeshwrightError

MAX_TOKEN, MAX_BYTES = 8_000, 40_000
_WORDS = re.compile(r"[\w /%().,:×+-]{1,60}")
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Name = Annotated[str, msgspec.Meta(max_length=80)]


class SharedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A measured figure with its estimate."""

    name: Name
    unit: Name
    measured: float
    estimate: float | None = None


class SharedFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding by the name of its diagnosis, and the steps that show it."""

    rule: Name
    severity: Name
    steps: tuple[Count, Count] | None = None

    @property
    def meaning(self) -> str:
        """Return what the diagnosis means."""
        return doctor.meanings().get(self.rule, "")


class SharedDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What may be shared of a diagnosis."""

    kind: Name
    engine: Name | None
    model: Name | None
    gpus: Name | None
    steps: Count
    last_step: Count
    total_steps: Count | None
    starts: Count
    figures: Annotated[Sequence[SharedFigure], msgspec.Meta(max_length=40)]
    findings: Annotated[Sequence[SharedFinding], msgspec.Meta(max_length=40)]

    @property
    def token(self) -> str:
        """Return it as the part of a link that contains it: nothing is stored."""
        return base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(self), 9)).decode().rstrip("=")

    @property
    def text(self) -> str:
        """Return it as plain text to paste into an issue or a chat."""
        ran = [f"{self.kind} log", self.model and f"model {self.model}", self.gpus and f"on {self.gpus}"]
        of = f" of {self.total_steps:,}" if self.total_steps else ""
        lines = [", ".join(filter(None, ran)) + f", step {self.last_step:,}{of}, {self.starts} start(s)"]
        for one in self.figures:
            estimate = "" if one.estimate is None else f" (estimate {one.estimate:.4g})"
            lines.append(f"- {one.name}: {one.measured:.4g} {one.unit}".rstrip() + estimate)
        for found in self.findings:
            at = f", steps {found.steps[0]:,} to {found.steps[1]:,}" if found.steps else ""
            lines.append(f"- {found.severity} {found.rule}{at}: {found.meaning}")
        return "\n".join(lines)


def shareable(diagnosis: Mapping[str, Any]) -> SharedDiagnosis:
    """Return what may be shared of a doctor's response: a model only by its catalogue name, GPUs only by their type."""
    return _public(
        SharedDiagnosis(
            **{name: diagnosis[name] for name in ("kind", "engine", "model", "gpus", "steps", "last_step")},
            total_steps=diagnosis["total_steps"],
            starts=diagnosis["starts"],
            figures=msgspec.convert([*diagnosis["figures"]], list[SharedFigure]),
            findings=[
                SharedFinding(rule=one["rule"], severity=one["severity"], steps=one["steps"] and tuple(one["steps"]))
                for one in diagnosis["findings"]
            ],
        )
    )


def read_shared(token: str) -> SharedDiagnosis:
    """Return the diagnosis in a link; raise InputError for anything else."""
    try:
        packed = base64.urlsafe_b64decode(token[:MAX_TOKEN] + "=" * (-len(token) % 4))
        text = zlib.decompressobj().decompress(packed, MAX_BYTES)
        return _public(msgspec.json.decode(text, type=SharedDiagnosis))
    except (binascii.Error, zlib.error, ValueError) as error:
        reason = "is not the link of a diagnosis, or it was cut off"
        raise InputError(reason, field="shared", value=token[:40], fix=("copy the whole link",)) from error


def _public(found: SharedDiagnosis) -> SharedDiagnosis:
    """Return it without names that a person may have chosen and without unknown findings."""
    known = doctor.meanings()
    return msgspec.structs.replace(
        found,
        kind=found.kind if found.kind in get_args(LogFormat) else "other",
        engine=found.engine if found.engine in ENGINES else None,
        model=_catalogue_model(found.model),
        gpus=_cluster(found.gpus),
        figures=[one for one in found.figures if _WORDS.fullmatch(one.name) and _WORDS.fullmatch(one.unit or "-")],
        findings=[
            one for one in found.findings if one.rule in known and one.severity in ("error", "warning", "advice")
        ],
    )


def _catalogue_model(name: str | None) -> str | None:
    return name if name in models.names() else None


def _cluster(text: str | None) -> str | None:
    try:
        return None if text is None or text.endswith(".toml") else str(clusters.cluster(text))
    except MeshwrightError:
        return None
