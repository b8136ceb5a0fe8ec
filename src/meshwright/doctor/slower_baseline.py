"""The diagnosis of a run that is slower than a baseline run on as many GPUs or more."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run_stats import RunStats, median_of
from meshwright.doctor.slowdown import PART_CAUSES, checks_of_part, ranks_apart, slower_part, throttling
from meshwright.doctor.thresholds import share
from meshwright.doctor.throughput import check_ranks
from meshwright.recipes.types import field_value, recipe_fields

MAX_SHOWN = 4  # settings that differ
UNTIMED = (
    *("train.steps", "train.log_every", "train.eval", "checkpoint.", "schedule.", "optimizer.lr"),
    *("data.dataset", "data.blend", "data.validation", "data.seed", "--save", "--load", "--log", "--tensorboard"),
    *("--wandb", "--data-path", "--train-data", "--valid-data", "--test-data", "--exit", "--rank", "--local-rank"),
    *("--master", "--eval", "--train-iters", "--train-samples", "--lr", "--min-lr", "--seed", "--ckpt", "--pretrained"),
    *("--timing", "--iteration", "--consumed"),
)
"""Settings that differ between two starts of one job, or that do not change the time of a step."""


def is_larger(stats: RunStats, baseline: RunStats) -> bool:
    """Return whether a run is on more GPUs than its baseline, so that their speeds show how it scales."""
    return bool(stats.world and baseline.world and stats.world > baseline.world)


def slower_than_baseline(stats: RunStats) -> Iterator[Finding]:
    """Steps take longer than those of a baseline run on as many GPUs or more."""
    other = stats.baseline
    if other is None or is_larger(stats, other) or not stats.enough or not other.enough:
        return
    paces = stats.tokens_per_s, other.tokens_per_s
    times, unit = (paces[1] or 0.0) / (paces[0] or 1.0), "tokens/s/GPU"
    if None in paces:
        paces = stats.step_s, other.step_s
        times, unit = (paces[0] or 0.0) / (paces[1] or 1.0), "step time"
    if None in paces or times <= 1 + share("shift"):
        return
    text, fixes = _difference(stats, other)
    yield Finding(
        id="speed.slower-than-baseline",
        severity="warning",
        message=f"{_same(stats, other)}: a token takes {times - 1:.0%} longer than in {other.run.path}. {text}",
        evidence=(Evidence(unit, paces[0] or 0.0, "s" if unit == "step time" else "", paces[1], "baseline"),),
        remedies=fixes,
    )


def _same(stats: RunStats, other: RunStats) -> str:
    if not stats.world or not other.world:
        return "the logs do not show on how many GPUs both ran"
    gpus = f"{stats.world:,} GPUs" + ("" if stats.world == other.world else f", {other.world:,} in the baseline")
    changed = _changed_settings(stats, other)
    if not changed:
        known = _settings(stats) and _settings(other)
        return f"{gpus}, and no setting in the logs differs" if known else gpus
    more = f" and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
    return f"{gpus}, and settings differ from the baseline's: {', '.join(changed[:MAX_SHOWN])}{more}"


def _settings(stats: RunStats) -> dict[str, str]:
    """Return what a log states about the settings that may change the time of a step."""
    header = stats.run.header
    found = {key: str(value) for key, value in header.overrides.items()}
    if header.recipe is not None:
        found |= {key: str(field_value(header.recipe, key)) for key in recipe_fields()}
    for text in header.arguments:
        flag, _, value = text.partition(" ")
        found[flag] = value or "on"
    return {key: value for key, value in found.items() if not key.startswith(UNTIMED)}


def _changed_settings(stats: RunStats, other: RunStats) -> list[str]:
    ours, theirs = _settings(stats), _settings(other)
    keys = [key for key in ours if key in theirs]
    if stats.run.header.arguments and other.run.header.arguments:  # flags that only one of them has
        keys += [key for key in {**ours, **theirs} if key.startswith("--") and not (key in ours and key in theirs)]
    return [
        f"{key} {theirs.get(key, 'off')} → {ours.get(key, 'off')}" for key in keys if theirs.get(key) != ours.get(key)
    ]


def _difference(stats: RunStats, other: RunStats) -> tuple[str, tuple[Remedy, ...]]:
    """Return which part of a step is slower, as far as both logs measure parts, and the checks that follow."""
    texts: list[str] = []
    fixes: list[Remedy] = []
    part = slower_part(other.steady, stats.steady)
    if part is not None:
        name, extra, share_of_extra = part
        texts.append(f"{share_of_extra:.0%} of the extra time ({extra:.3g} s) is in {PART_CAUSES[name]}")
        fixes += checks_of_part(stats, name)
    apart = [median_of(ranks_apart(step) for step in one.steady) for one in (other, stats)]
    if apart[0] and apart[1] and apart[1] > apart[0] * (1 + share("shift")):
        texts.append(f"the slowest rank takes {apart[1]:.2f} times as long as the fastest, before {apart[0]:.2f}")
        fixes += check_ranks(stats)
    if not texts:
        texts.append("The logs do not split steps into parts, so they do not show why")
        if stats.run.kind == "megatron":
            why = "logs the parts of a step and the times of every rank: compare them in both runs"
            fixes.append(remedies.advice("--timing-log-level 2 --timing-log-option all", why=why))
        fixes += [*throttling(stats), *check_ranks(stats)]
    fixes.insert(0, remedies.advice("compare the node lists of both runs", why="one slow node slows all ranks"))
    return "; ".join(texts), tuple({one.try_: one for one in fixes}.values())
