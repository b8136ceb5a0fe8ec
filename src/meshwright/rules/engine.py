"""What an engine does not have at all."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_CONTEXT, NO_EXPERT, NO_PIPELINE, NO_TENSOR


class Absent(NamedTuple):
    """A mesh axis, the engines that lack it, and how to do without."""

    axis: str
    name: str
    engines: tuple[str, ...]
    fix: Fix


ABSENT = (
    Absent("tp", "tensor parallelism", ("fsdp1",), NO_TENSOR),
    Absent("pp", "pipeline parallelism", ("fsdp1",), NO_PIPELINE),
    Absent("cp", "context parallelism", ("kempnerforge", "fsdp1", "deepspeed"), NO_CONTEXT),
    Absent("ep", "expert parallelism", ("fsdp1",), NO_EXPERT),
    Absent(
        "etp",
        "tensor parallelism inside experts",
        ("torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"),
        {"etp": [1]},
    ),
    Absent("vp", "interleaved stages", ("deepspeed",), {"vp": [1], "pp_schedule": ["1f1b"], "stage_layers": [()]}),
)


def _refuse(absent: Absent) -> None:
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


for _absent in ABSENT:
    _refuse(_absent)
