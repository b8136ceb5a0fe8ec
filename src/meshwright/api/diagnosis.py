"""What is wrong with a run, from its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.plan import estimate
from meshwright.errors import InputError
from meshwright.serialize import SCHEMA

if TYPE_CHECKING:
    from meshwright.doctor import Checkup, Run
    from meshwright.recipes.case import Case


def diagnose(
    path: str | Path,
    *,
    recipe: str | None = None,
    gpus: str | int | None = None,
    goal: str | None = None,
    baseline: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Checkup:
    """What is wrong with a run, by its folder or its log, with what to try.

    `recipe` (or a model), `gpus` and overrides say what ran where the log does not; `baseline` is a run of the same
    training on fewer GPUs.
    """
    from meshwright import doctor

    run = doctor.read(path)
    case, note = _case(run, recipe, gpus, goal, overrides)
    notes = [note] if note else []
    baseline_stats = None
    if baseline is not None:
        small = doctor.read(baseline)
        baseline_stats = doctor.RunStats(small, _case(small, None, None, None, ())[0])
    return doctor.examine(run, case, baseline_stats, tuple(notes))


def _case(
    run: Run, recipe: str | None, gpus: str | int | None, goal: str | None, overrides: Sequence[str]
) -> tuple[Case | None, str]:
    """What ran: as it is given, or as the log says."""
    from meshwright import doctor
    from meshwright.doctor.match_recipe import gpus_of, logged_overrides

    where = None if gpus is None else str(gpus)
    if recipe is None:
        case, note = doctor.case_of_run(run, where, tuple(overrides))
        if case is None and overrides:
            raise InputError(f"changes nothing: {note}", field="override", value=" ".join(overrides))
    else:
        engine = doctor.ENGINE.get(run.kind, "meshwright")
        asked = logged_overrides(run, tuple(overrides))
        made = estimate(recipe, gpus=where or gpus_of(run), goal=goal, engine=engine, overrides=asked)
        case, note = made.case, ""
    if case is not None and run.header.world not in (None, case.world):
        raise InputError(
            f"the log is of {run.header.world} GPUs",
            field="gpus",
            value=str(case.cluster),
            fix=(f"--gpus {run.header.world}x{case.cluster.gpu.name}",),
        )
    return case, note


def checkup_to_dict(found: Checkup) -> dict[str, Any]:
    """The doctor's object: what was found, by which figures, and what to try, cheapest first."""
    built = found.to_dict()
    findings = [
        {"rule": one.pop("id"), "severity": one.pop("severity"), **one, "fix": _first_fix(one)}
        for one in built.pop("findings")
    ]
    return {"schema": SCHEMA, "ok": found.ok, **built, "findings": findings}


def _first_fix(finding: dict[str, Any]) -> list[str]:
    """The overrides of the cheapest remedy that consists of such."""
    return next((list(one["try"]) for one in finding["remedies"] if one["what"] in ("layout", "contract")), [])
