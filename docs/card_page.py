"""The page of the verification cards, made from the cards themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tables import table

from meshwright.dryrun import verification
from meshwright.dryrun.verification import VerificationReport

FOLDER = Path(__file__).parent / "cards"
CHECKS = {
    "rules": "no rule finds an error in the recipe on its own cluster",
    "estimate": "its memory fits by the cost model",
    "dryrun": "the engine's own step, executed at full size on its own cluster without GPUs, fits",
    "tiny": "its model's structure at laptop size trains: 2 processes take the same steps as 1, and the loss falls",
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
    """All cards: how they stand together, what is wrong, and a row for each."""
    found = verification.read_all(FOLDER)
    text = f"""# Verification cards

{len(found)} recipes, each with a card made by machine: `make verify` makes what is missing or old again. A name below
leads to its card, which has all figures, the day and the versions of every check.

"""
    text += _outcomes(found) + _versions(found) + _troubles(found) + _differences(found)
    text += """
## How to read the rows

Rules: clean, or how many warnings (w) and pieces of advice (a) they give; the card names them. Estimate and dry run:
memory of the GPU that needs most, and what it has. Step and MFU are estimates. Tiny: the recipe's layout on 2
processes, its first and last loss in fp32, and the largest relative difference of a loss or gradient norm to 1 process
with the same samples.
"""
    for family in sorted({card.family for card in found}):
        text += f"\n## {family}\n\n" + table(HEADERS, [_row(card) for card in found if card.family == family])
    return text


def _outcomes(found: Sequence[VerificationReport]) -> str:
    kinds = ("ok", "failed", "not applicable")
    rows = []
    for name, meaning in CHECKS.items():
        made = [check.outcome for card in found if (check := card.check(name)) is not None]
        rows.append((name, meaning, *(made.count(kind) or "" for kind in kinds), (len(found) - len(made)) or ""))
    return table(("check", "ok means", *kinds, "not made yet"), rows)


def _versions(found: Sequence[VerificationReport]) -> str:
    known: dict[str, set[str]] = {}
    for card in found:
        for name in verification.CHECKS:
            check = card.check(name)
            for package, version in check.versions.items() if check is not None else ():
                known.setdefault(package, set()).add(version)
    told = ", ".join(f"{package} {' and '.join(sorted(versions))}" for package, versions in sorted(known.items()))
    return f"\nMade with {told}.\n"


def _troubles(found: Sequence[VerificationReport]) -> str:
    """What failed or cannot be tried, with the reason and whether the recipe is withdrawn for it."""
    rows = []
    for card in found:
        for name in verification.CHECKS:
            check = card.check(name)
            if check is not None and check.outcome != "ok":
                outcome = "withdrawn: " + card.withdrawn if card.withdrawn else check.outcome
                rows.append((_link(card), name, outcome, check.reason))
    return "\n## What is not ok\n\n" + (table(("recipe", "check", "outcome", "reason"), rows) if rows else "Nothing.\n")


def _differences(found: Sequence[VerificationReport]) -> str:
    """Dry run minus estimate over all cards, part by part."""
    executed = [check.figures for card in found if (check := card.checks.dryrun) and check.figures]
    if not executed:
        return ""
    rows = []
    for part in executed[0].difference_gib:
        values = [figures.difference_gib[part] for figures in executed]
        low, middle, high = min(values), median(values), max(values)
        rows.append((part, f"{low:+.2f}", f"{middle:+.2f}", f"{high:+.2f}"))
    shares = [100 * one.difference_gib["total"] / one.memory_gib["total"] for one in executed]
    within = sum(abs(share) <= 10 for share in shares)
    text = "\n## Dry run minus estimate, in GiB\n\n" + table(("part", "least", "median", "most"), rows)
    return text + f"\n{within} of {len(shares)} estimates are within 10 % of the dry run's total.\n"


def _link(card: VerificationReport) -> str:
    return f"[`{card.recipe}`](cards/{card.recipe}.json)"


def _row(card: VerificationReport) -> tuple[object, ...]:
    checks = card.checks
    estimated = checks.estimate.figures if checks.estimate else None
    executed = checks.dryrun.figures if checks.dryrun else None
    trained = checks.tiny.figures if checks.tiny else None
    memory = estimated.memory_gib if estimated else None
    return (
        _link(card),
        card.cluster,
        _rules(card),
        f"{memory['total']:.1f}" if memory else _unsaid(card, "estimate"),
        f"{executed.memory_gib['total']:.1f}" if executed else _unsaid(card, "dryrun"),
        f"{memory['capacity']:.1f}" if memory else "",
        executed.peak_phase if executed else "",
        f"{estimated.step_s:.3g}" if estimated else "",
        f"{estimated.mfu:.0%}" if estimated else "",
        trained.layout if trained else _unsaid(card, "tiny"),
        f"{trained.losses[0]:.2f} → {trained.losses[-1]:.2f}" if trained else "",
        _largest(trained) if trained else "",
        card.date,
    )


def _unsaid(card: VerificationReport, name: str) -> str:
    check = card.check(name)
    return "" if check is None else check.outcome


def _rules(card: VerificationReport) -> str:
    judged = card.checks.rules.figures if card.checks.rules else None
    if judged is None:
        return ""
    counts = {severity: len(names) for severity, names in judged.findings.items()}
    told = [f"{counts[severity]}{severity[0]}" for severity in ("error", "warning", "advice") if counts.get(severity)]
    return " ".join(told) or "clean"


def _largest(trained: verification.Trained) -> str:
    if trained.loss_difference is None or trained.norm_difference is None:
        return "no number"
    return f"{max(trained.loss_difference, trained.norm_difference):.0e}"
