"""The four checks of a verification report, each a function of a recipe."""

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
    CollectiveTotal,
    DryRunResult,
    EstimateResult,
    Outcome,
    RulesResult,
    TinyRunResult,
    TracedRank,
    VerificationReport,
)
from meshwright.errors import InputError, MeshwrightError
from meshwright.recipes import index
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import Recipe
from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.dryrun.types import DryRun, RankDryRun

TOLERANCE = 1e-5  # relative, for losses and gradient norms; the parity tests use the same
DIGITS = 6  # significant digits of every figure in a report
REASON_LETTERS = 600

CheckResult = tuple[Outcome, str, Any]  # the outcome, the reason if it is not ok, the figures


def run_check(name: str, recipe: Recipe) -> Check[Any]:
    """Run one check of a recipe; an exception inside it becomes the outcome "failed"."""
    start, check = time.monotonic(), _CHECKS[name]
    try:
        outcome, reason, figures = check(recipe)
    except MeshwrightError as error:
        outcome, reason, figures = "failed", f"{type(error).__name__}: {error.message}", None
    except Exception as error:  # any fault of the engine belongs in the report
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome, figures = "failed", None
        reason = (
            f"{type(error).__name__}: {error} ({where.name}, line {where.lineno} of {where.filename.split('/')[-1]})"
        )
    seconds = round(time.monotonic() - start, 1)
    return Check(outcome, date.today().isoformat(), versions(name, recipe), seconds, reason[:REASON_LETTERS], figures)


def crashed(name: str, recipe: Recipe, exit_code: int | None, seconds: float) -> Check[Any]:
    """Return the check of a process that exited without sending a result."""
    reason = f"its process exited with code {exit_code}"
    if exit_code == -9:
        reason += ": killed, most likely because the machine ran out of memory"
    return Check("failed", date.today().isoformat(), versions(name, recipe), round(seconds, 1), reason)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions(name: str, recipe: Recipe) -> dict[str, str]:
    """Return the package versions that the result of a check depends on."""
    base = {"meshwright": VERSION, "python": ".".join(platform.python_version_tuple()[:2])}
    if name not in ENGINE_CHECKS:
        return base
    library = "diffusers" if model_of(recipe).kind == "diffusion" else "transformers"
    return base | {package: _version(package) for package in ("torch", library)}


def rounded(value: float, digits: int = DIGITS) -> float:
    """Round a figure to the significant digits that reports keep."""
    return float(f"{value:.{digits}g}")


def _rounded_values(values: dict[str, float]) -> dict[str, float]:
    return {name: rounded(value) for name, value in values.items()}


def _case(recipe: Recipe) -> Case:
    return Case(recipe, model_of(recipe), clusters.cluster(recipe.cluster), memory_of=costs.memory)


def _rules(recipe: Recipe) -> CheckResult:
    """Pass if no rule finds an error; warnings and advice are only listed."""
    found = rules.check(_case(recipe))
    findings: dict[str, tuple[str, ...]] = {
        severity: tuple(sorted({finding.rule for finding in found if finding.severity == severity}))
        for severity in rules.SEVERITIES
    }
    errors = [f"{finding.message} ({finding.rule})" for finding in found if finding.severity == "error"]
    return "failed" if errors else "ok", "; ".join(errors), RulesResult(findings)


def _estimate(recipe: Recipe) -> CheckResult:
    found = costs.to_dict(costs.estimate(_case(recipe)))
    figures = EstimateResult(
        fits=found["fits"],
        memory_gib=_rounded_values(found["memory_gib"]),
        step_s=rounded(found["step_s"]),
        tokens_per_s_per_gpu=rounded(found["tokens_per_s_per_gpu"]),
        mfu=rounded(found["mfu"]),
        band=_rounded_values(found["band"]),
    )
    return _memory_outcome(figures.fits, figures.memory_gib, figures)


def _memory_outcome(fits: bool, memory_gib: dict[str, float], figures: Any) -> CheckResult:
    reason = f"needs {memory_gib['total']:.1f} of {memory_gib['capacity']:.1f} GiB"
    return ("ok", "", figures) if fits else ("failed", reason, figures)


def unsupported_model(recipe: Recipe) -> str:
    """Return why the engine cannot build the recipe's model; empty if it can."""
    from meshwright.engine.model_families import family_of

    try:
        family_of(recipe).config_for(recipe)
    except InputError as error:
        return error.message
    return ""


def _dryrun(recipe: Recipe) -> CheckResult:
    if reason := unsupported_model(recipe):
        return "not applicable", reason, None
    from meshwright.dryrun.run import dry_run

    # One process for all its ranks: benchmarks/verify.py already runs several checks in parallel.
    figures = summarize(dry_run(recipe, clusters.cluster(recipe.cluster), processes=1))
    return _memory_outcome(figures.fits, figures.memory_gib, figures)


def summarize(result: DryRun) -> DryRunResult:
    """Return the figures of a dry run that a report keeps."""
    worst = result.ranks[result.worst]
    return DryRunResult(
        world=result.world,
        fits=result.fits,
        worst=worst.rank,
        pp_rank=worst.pp_rank,
        memory_gib=_rounded_values(result.memory_gib),
        reserved_gib=rounded(worst.reserved_gib),
        peak_phase=worst.peak_phase,
        peak_at=worst.peak_at,
        flops=_rounded_values(worst.flops),
        collectives=_collective_totals(worst),
        ranks=tuple(
            TracedRank(
                one.rank, one.represents, rounded(one.allocated_gib), rounded(one.reserved_gib), one.exact, one.traced
            )
            for one in result.ranks
        ),
        cpu_s=round(result.cpu_s, 1),
        difference_gib=_difference(_rounded_values(result.memory_gib), _rounded_values(result.estimate_gib)),
    )


def _difference(found: dict[str, float], expected: dict[str, float]) -> dict[str, float]:
    return {name: round(found[name] - expected[name], 4) for name in found if name in expected and name != "capacity"}


def with_current_estimate(report: VerificationReport) -> VerificationReport:
    """Return the report with its dry run compared with the current estimate of the same pipeline rank."""
    check = report.checks.dryrun
    if check is None or check.figures is None:
        return report
    memory = costs.memory_by_stage(_case(index.load(report.recipe)))[check.figures.pp_rank]
    estimate = {name: rounded(float(getattr(memory, name))) for name in (*costs.PARTS, "total")}
    difference = _difference(check.figures.memory_gib, estimate)
    figures = msgspec.structs.replace(check.figures, difference_gib=difference)
    return report.with_check("dryrun", msgspec.structs.replace(check, figures=figures))


def _collective_totals(rank: RankDryRun) -> tuple[CollectiveTotal, ...]:
    """Sum the collectives of a step over its phases."""
    found: dict[tuple[str, str, int], tuple[int, float]] = {}
    for one in rank.collectives:
        count, gib = found.get((one.axis, one.kind, one.ranks), (0, 0.0))
        found[one.axis, one.kind, one.ranks] = (count + one.count, gib + one.gib)
    return tuple(
        CollectiveTotal(axis, kind, ranks, count, rounded(gib))
        for (axis, kind, ranks), (count, gib) in sorted(found.items())
    )


def _finite(difference: float) -> float | None:
    return rounded(difference, 2) if math.isfinite(difference) else None


def _tiny(recipe: Recipe) -> CheckResult:
    if reason := unsupported_model(recipe):
        return "not applicable", reason, None
    from meshwright.dryrun import tiny

    run = tiny.run(recipe)
    figures = TinyRunResult(
        layout=run.layout,
        losses=tuple(map(rounded, run.losses)),
        grad_norms=tuple(map(rounded, run.grad_norms)),
        loss_difference=_finite(run.loss_difference),
        norm_difference=_finite(run.norm_difference),
        tolerance=TOLERANCE,
        learns=run.learns,
    )
    wrong = [] if figures.learns else ["the loss does not fall"]
    for what, difference in (("losses", run.loss_difference), ("gradient norms", run.norm_difference)):
        if not difference <= TOLERANCE:
            wrong.append(f"{what} on two processes and on one differ by {difference:.2g}, more than {TOLERANCE:g}")
    return "failed" if wrong else "ok", "; ".join(wrong), figures


_CHECKS: dict[str, Callable[[Recipe], CheckResult]] = {
    "rules": _rules,
    "estimate": _estimate,
    "dryrun": _dryrun,
    "tiny": _tiny,
}
ENGINE_CHECKS = ("dryrun", "tiny")  # they run the engine: minutes, in a process of their own
