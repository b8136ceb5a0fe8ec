"""Mesh axes that an engine does not implement."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_CP, NO_EP, NO_PP, NO_TP


class MissingAxis(NamedTuple):
    """A mesh axis, the engines without it, and the fix that turns it off."""

    axis: str
    name: str
    engines: tuple[str, ...]
    fix: Fix


MISSING_AXES = (
    MissingAxis("tp", "tensor parallelism", ("fsdp1",), NO_TP),
    MissingAxis("pp", "pipeline parallelism", ("fsdp1",), NO_PP),
    MissingAxis("cp", "context parallelism", ("kempnerforge", "fsdp1", "deepspeed"), NO_CP),
    MissingAxis("ep", "expert parallelism", ("fsdp1",), NO_EP),
    MissingAxis(
        "etp",
        "tensor parallelism inside experts",
        ("torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"),
        {"etp": [1]},
    ),
    MissingAxis("vp", "interleaved stages", ("deepspeed",), {"vp": [1], "pp_schedule": ["1f1b"], "stage_layers": [()]}),
)


def _register(absent: MissingAxis) -> None:
    def used(c: Case) -> Column:
        return getattr(c, absent.axis) > 1

    rule(
        f"engine.no-{absent.axis}",
        "error",
        absent.axis,
        engines=absent.engines,
        message=f"{{engine}} does not support {absent.name} ({absent.axis}={{{absent.axis}}})",
        symptom="unknown option; or the degree is used in the arithmetic but nothing is parallelized",
        cause=f"{absent.name} is not implemented in this engine",
        fixes=(absent.fix,),
    )(used)


for _absent in MISSING_AXES:
    _register(_absent)
