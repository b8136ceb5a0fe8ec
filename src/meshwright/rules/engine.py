"""What an engine does not have at all."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_CP, NO_EP, NO_PP, NO_TP


class MissingAxis(NamedTuple):
    """A mesh axis, the engines that lack it, and how to do without."""

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


def _refuse(absent: MissingAxis) -> None:
    def used(c: Case) -> Column:
        return getattr(c, absent.axis) > 1

    rule(
        f"engine.no-{absent.axis}",
        "error",
        absent.axis,
        engines=absent.engines,
        message=f"{{engine}} has no {absent.name} ({absent.axis}={{{absent.axis}}})",
        symptom="an unknown option; or the degree counts in the arithmetic and nothing is parallelised by it",
        cause=f"{absent.name} is not implemented in this engine",
        fixes=(absent.fix,),
    )(used)


for _absent in MISSING_AXES:
    _refuse(_absent)
