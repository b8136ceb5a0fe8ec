"""The four checks of a verification card, each as a function of a recipe."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
import traceback
from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import clusters, costs, rules
from meshwright.dryrun.verification import (
    Check,
    Estimated,
    Executed,
    Judged,
    Outcome,
    Sent,
    Traced,
    Trained,
    VerificationReport,
)
from meshwright.errors import InputError, MeshwrightError
from meshwright.recipes import index
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import Recipe
from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.dryrun.types import DryRun, RankDryRun

TOLERANCE = 1e-5  # relative, of losses and gradient norms: that of the parity tests
DIGITS = 6  # significant ones, of every figure on a card
REASON_LETTERS = 600

Tried = tuple[Outcome, str, Any]  # the outcome, the reason where it is not ok, the figures


def make(name: str, recipe: Recipe) -> Check[Any]:
    """Makes one check of a recipe; what goes wrong in it is its outcome, not an error."""
    began, maker = time.monotonic(), _MAKERS[name]
    try:
        outcome, reason, figures = maker(recipe)
    except MeshwrightError as error:
        outcome, reason, figures = "failed", f"{type(error).__name__}: {error}", None
    except Exception as error:  # a card must be able to say it
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome, figures = "failed", None
        reason = (
            f"{type(error).__name__}: {error} ({where.name}, line {where.lineno} of {where.filename.split('/')[-1]})"
        )
    seconds = round(time.monotonic() - began, 1)
    return Check(outcome, date.today().isoformat(), versions(name, recipe), seconds, reason[:REASON_LETTERS], figures)


def died(name: str, recipe: Recipe, exit_code: int | None, seconds: float) -> Check[Any]:
    """The check whose process ended without an answer."""
    reason = f"its process ended with exit code {exit_code}"
    if exit_code == -9:
        reason += ": killed, most likely because the machine ran out of memory"
    return Check("failed", date.today().isoformat(), versions(name, recipe), round(seconds, 1), reason)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions(name: str, recipe: Recipe) -> dict[str, str]:
    """What a check of a recipe runs on."""
    own = {"meshwright": VERSION, "python": ".".join(platform.python_version_tuple()[:2])}
    if name not in EXECUTED:
        return own
    library = "diffusers" if model_of(recipe).kind == "diffusion" else "transformers"
    return own | {package: _version(package) for package in ("torch", library)}


def rounded(value: float, digits: int = DIGITS) -> float:
    """A figure as a card tells it."""
    return float(f"{value:.{digits}g}")


def _parts(values: dict[str, float]) -> dict[str, float]:
    return {name: rounded(value) for name, value in values.items()}


def _case(recipe: Recipe) -> Case:
    return Case(recipe, model_of(recipe), clusters.cluster(recipe.cluster), memory_of=costs.memory)


def _rules(recipe: Recipe) -> Tried:
    """Clean is a recipe without errors; warnings and advice are told."""
    found = rules.judge(_case(recipe))
    findings: dict[str, tuple[str, ...]] = {
        severity: tuple(sorted({finding.rule for finding in found if finding.severity == severity}))
        for severity in rules.SEVERITIES
    }
    errors = [f"{finding.message} ({finding.rule})" for finding in found if finding.severity == "error"]
    return "failed" if errors else "ok", "; ".join(errors), Judged(findings)


def _estimate(recipe: Recipe) -> Tried:
    found = costs.to_dict(costs.estimate(_case(recipe)))
    figures = Estimated(
        fits=found["fits"],
        memory_gib=_parts(found["memory_gib"]),
        step_s=rounded(found["step_s"]),
        tokens_per_s_per_gpu=rounded(found["tokens_per_s_per_gpu"]),
        mfu=rounded(found["mfu"]),
        band=_parts(found["band"]),
    )
    return _fitting(figures.fits, figures.memory_gib, figures)


def _fitting(fits: bool, memory_gib: dict[str, float], figures: Any) -> Tried:
    reason = f"needs {memory_gib['total']:.1f} of {memory_gib['capacity']:.1f} GiB"
    return ("ok", "", figures) if fits else ("failed", reason, figures)


def no_class(recipe: Recipe) -> str:
    """Why the model of a recipe cannot be built here at all; empty where it can."""
    from meshwright.engine.model_families import kind_of

    try:
        kind_of(recipe).config_for(recipe)
    except InputError as error:
        return str(error)
    return ""


def _dryrun(recipe: Recipe) -> Tried:
    if reason := no_class(recipe):
        return "not applicable", reason, None
    from meshwright.dryrun.run import prove

    # One process for all its ranks: whoever makes many cards runs many checks at a time.
    figures = executed(prove(recipe, clusters.cluster(recipe.cluster), processes=1))
    return _fitting(figures.fits, figures.memory_gib, figures)


def executed(proof: DryRun) -> Executed:
    """What a card keeps of a dry run."""
    worst = proof.ranks[proof.worst]
    return Executed(
        world=proof.world,
        fits=proof.fits,
        worst=worst.rank,
        pp_rank=worst.pp_rank,
        memory_gib=_parts(proof.memory_gib),
        reserved_gib=rounded(worst.reserved_gib),
        peak_phase=worst.peak_phase,
        peak_at=worst.peak_at,
        flops=_parts(worst.flops),
        collectives=_sent(worst),
        ranks=tuple(
            Traced(
                one.rank, one.stands_for, rounded(one.allocated_gib), rounded(one.reserved_gib), one.exact, one.traced
            )
            for one in proof.ranks
        ),
        cpu_s=round(proof.cpu_s, 1),
        difference_gib=_difference(_parts(proof.memory_gib), _parts(proof.estimate_gib)),
    )


def _difference(found: dict[str, float], expected: dict[str, float]) -> dict[str, float]:
    return {name: round(found[name] - expected[name], 4) for name in found if name in expected and name != "capacity"}


def compared(card: VerificationReport) -> VerificationReport:
    """The card whose dry run is compared with what the cost model says of the same pipeline rank today."""
    check = card.checks.dryrun
    if check is None or check.figures is None:
        return card
    memory = costs.memory_by_stage(_case(index.load(card.recipe)))[check.figures.pp_rank]
    estimate = {name: rounded(float(getattr(memory, name))) for name in (*costs.PARTS, "total")}
    difference = _difference(check.figures.memory_gib, estimate)
    figures = msgspec.structs.replace(check.figures, difference_gib=difference)
    return card.with_check("dryrun", msgspec.structs.replace(check, figures=figures))


def _sent(rank: RankDryRun) -> tuple[Sent, ...]:
    """Collectives of a step, whatever phase they belong to."""
    found: dict[tuple[str, str, int], tuple[int, float]] = {}
    for one in rank.collectives:
        count, gib = found.get((one.axis, one.kind, one.ranks), (0, 0.0))
        found[one.axis, one.kind, one.ranks] = (count + one.count, gib + one.gib)
    return tuple(
        Sent(axis, kind, ranks, count, rounded(gib)) for (axis, kind, ranks), (count, gib) in sorted(found.items())
    )


def _comparable(difference: float) -> float | None:
    return rounded(difference, 2) if math.isfinite(difference) else None


def _tiny(recipe: Recipe) -> Tried:
    if reason := no_class(recipe):
        return "not applicable", reason, None
    from meshwright.dryrun import tiny

    run = tiny.run(recipe)
    figures = Trained(
        layout=run.layout,
        losses=tuple(map(rounded, run.losses)),
        grad_norms=tuple(map(rounded, run.grad_norms)),
        loss_difference=_comparable(run.loss_difference),
        norm_difference=_comparable(run.norm_difference),
        tolerance=TOLERANCE,
        learns=run.learns,
    )
    wrong = [] if figures.learns else ["the loss does not fall"]
    for what, difference in (("losses", run.loss_difference), ("gradient norms", run.norm_difference)):
        if not difference <= TOLERANCE:
            wrong.append(f"{what} on two processes and on one differ by {difference:.2g}, more than {TOLERANCE:g}")
    return "failed" if wrong else "ok", "; ".join(wrong), figures


_MAKERS: dict[str, Callable[[Recipe], Tried]] = {
    "rules": _rules,
    "estimate": _estimate,
    "dryrun": _dryrun,
    "tiny": _tiny,
}
EXECUTED = ("dryrun", "tiny")  # checks that run the engine: minutes, in a process of their own
