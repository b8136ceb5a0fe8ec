"""Write the page of the verification reports from docs/data/verification.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tables import table

from meshwright.dryrun import verification
from meshwright.dryrun.verification import VerificationReport

CHECKS = {
    "rules": "no rule finds an error in the recipe on its reference cluster",
    "estimate": "the estimated memory fits",
    "dryrun": "the engine's step, executed at full size on the reference cluster without GPUs, fits",
    "tiny": "a tiny model of the same structure trains: 2 processes take the same steps as 1, and the loss falls",
}
HEADERS = (
    "recipe",
    "GPUs",
    "rules",
    "estimate GiB",
    "dry run GiB",
    "of",
    "peak in",
    "step s",
    "MFU",
    "tiny layout",
    "loss",
    "differs by",
    "date",
)


def page() -> str:
    """Return the page: outcomes of all checks, what is not ok, and one row per recipe."""
    reports = list(verification.read().values())
    text = f"""# Verification reports

Each of the {len(reports)} shipped recipes has a generated report. `make verify` reruns what is missing or out of date.
All figures, dates and versions are in [`data/verification.jsonl`](data/verification.jsonl), one line per recipe;
`meshwright.api.verification_reports()` reads them.

"""
    text += _outcomes(reports) + _versions(reports) + _not_ok(reports) + _differences(reports)
    text += """
## How to read the rows

Rules: clean, or the number of errors (e), warnings (w) and pieces of advice (a). Estimate and dry run: memory of the
GPU that needs most, and its capacity. Step and MFU are estimates. Tiny: the recipe's layout on 2 processes, its first
and last loss in fp32, and the largest relative difference of a loss or gradient norm to 1 process with the same
samples.
"""
    for family in sorted({report.family for report in reports}):
        text += f"\n## {family}\n\n" + table(HEADERS, [_row(one) for one in reports if one.family == family])
    return text


def _outcomes(reports: Sequence[VerificationReport]) -> str:
    outcomes = ("ok", "failed", "not applicable")
    rows = []
    for name, meaning in CHECKS.items():
        found = [check.outcome for report in reports if (check := report.check(name)) is not None]
        rows.append((name, meaning, *(found.count(one) or "" for one in outcomes), (len(reports) - len(found)) or ""))
    return table(("check", "ok means", *outcomes, "not run yet"), rows)


def _versions(reports: Sequence[VerificationReport]) -> str:
    known: dict[str, set[str]] = {}
    for report in reports:
        for name in verification.CHECKS:
            check = report.check(name)
            for package, version in check.versions.items() if check is not None else ():
                known.setdefault(package, set()).add(version)
    packages = [f"{package} {' and '.join(sorted(versions))}" for package, versions in sorted(known.items())]
    return f"\nRun with {', '.join(packages)}.\n"


def _not_ok(reports: Sequence[VerificationReport]) -> str:
    """List the checks that failed or do not apply, with the reason and whether the recipe is withdrawn."""
    rows = []
    for report in reports:
        for name in verification.CHECKS:
            check = report.check(name)
            if check is not None and check.outcome != "ok":
                outcome = "withdrawn: " + report.withdrawn if report.withdrawn else check.outcome
                rows.append((f"`{report.recipe}`", name, outcome, check.reason))
    return "\n## What is not ok\n\n" + (table(("recipe", "check", "outcome", "reason"), rows) if rows else "Nothing.\n")


def _differences(reports: Sequence[VerificationReport]) -> str:
    """Compare dry runs with estimates over all reports, part by part."""
    dry_runs = [check.figures for report in reports if (check := report.checks.dryrun) and check.figures]
    if not dry_runs:
        return ""
    rows = []
    for part in dry_runs[0].difference_gib:
        values = [figures.difference_gib[part] for figures in dry_runs]
        rows.append((part, f"{min(values):+.2f}", f"{median(values):+.2f}", f"{max(values):+.2f}"))
    shares = [100 * one.difference_gib["total"] / one.memory_gib["total"] for one in dry_runs]
    within = sum(abs(share) <= 10 for share in shares)
    text = "\n## Dry run minus estimate, in GiB\n\n" + table(("part", "least", "median", "most"), rows)
    return text + f"\n{within} of {len(shares)} estimates are within 10 % of the dry run's total.\n"


def _row(report: VerificationReport) -> tuple[object, ...]:
    checks = report.checks
    estimate = checks.estimate.figures if checks.estimate else None
    dry_run = checks.dryrun.figures if checks.dryrun else None
    tiny = checks.tiny.figures if checks.tiny else None
    memory = estimate.memory_gib if estimate else None
    return (
        f"`{report.recipe}`",
        report.cluster,
        _rules(report),
        f"{memory['total']:.1f}" if memory else _outcome(report, "estimate"),
        f"{dry_run.memory_gib['total']:.1f}" if dry_run else _outcome(report, "dryrun"),
        f"{memory['capacity']:.1f}" if memory else "",
        dry_run.peak_phase if dry_run else "",
        f"{estimate.step_s:.3g}" if estimate else "",
        f"{estimate.mfu:.0%}" if estimate else "",
        tiny.layout if tiny else _outcome(report, "tiny"),
        f"{tiny.losses[0]:.2f} → {tiny.losses[-1]:.2f}" if tiny else "",
        _largest_difference(tiny) if tiny else "",
        report.date,
    )


def _outcome(report: VerificationReport, name: str) -> str:
    check = report.check(name)
    return "" if check is None else check.outcome


def _rules(report: VerificationReport) -> str:
    result = report.checks.rules.figures if report.checks.rules else None
    if result is None:
        return ""
    counts = {severity: len(names) for severity, names in result.findings.items()}
    shown = [f"{counts[severity]}{severity[0]}" for severity in ("error", "warning", "advice") if counts.get(severity)]
    return " ".join(shown) or "clean"


def _largest_difference(tiny: verification.TinyRunResult) -> str:
    if tiny.loss_difference is None or tiny.norm_difference is None:
        return "not finite"
    return f"{max(tiny.loss_difference, tiny.norm_difference):.0e}"
