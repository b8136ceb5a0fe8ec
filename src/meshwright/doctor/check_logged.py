"""Compares what a log states with what is assumed about its run: TFLOP/s, MFU, tokens per second, sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Literal, NamedTuple

from meshwright.costs import flops_per_token
from meshwright.doctor.run import Run, Step
from meshwright.doctor.run_stats import RunStats
from meshwright.recipes.case import Case

LENGTHS = tuple(sorted(size << shift for size in (512, 768) for shift in range(12)))  # 512, 768, 1024, … 1.5 Mi
CONVENTIONS: dict[str, tuple[Literal["causal", "full"], ...]] = {"torchtitan": ("full",), "kempnerforge": ("full",)}
"""How a framework counts attention; Megatron counted all of it before it counted half."""
CLOSE_SAMPLE = 0.08  # error of the FLOPs of a sample; the next length differs by a third
CLOSE_TOKEN = 0.015  # error of the FLOPs of a token, in which the length shows only in attention
APART = 3  # times by which the second-best length must be further away
LEAST_STEPS = 5
CONTRADICTS = 0.25  # conventions differ by less
PEAK_DIFFERS = 0.1


class Length(NamedTuple):
    """A sequence length and what it is computed from."""

    tokens: int
    source: str


class LoggedWork(NamedTuple):
    """The FLOPs of a token or of a sample that a log's TFLOP/s imply."""

    flops: float
    of_sample: bool
    source: str

    @property
    def error(self) -> float:
        """The relative error within which a length fits."""
        return CLOSE_SAMPLE if self.of_sample else CLOSE_TOKEN


def implied_length(run: Run, case: Case) -> Length | None:
    """Return the sequence length that the TFLOP/s of a log imply for a model; None if they fit none well."""
    work = _logged_work(run, case)
    found = None if work is None else _closest(case, work)
    return None if found is None or work is None else Length(found, work.source)


def fits_length(run: Run, case: Case) -> bool:
    """Return whether a log's TFLOP/s fit the sequence length of the case, however its framework counts attention."""
    work = _logged_work(run, case)
    if work is None:
        return True
    tokens = int(case.seq_length) if work.of_sample else 1
    counted = [float(flops_per_token(case, one)) * tokens for one in ("causal", "full")]
    return any(abs(work.flops / flops - 1) <= 2 * work.error for flops in counted)


def _logged_work(run: Run, case: Case) -> LoggedWork | None:
    rows = [step for step in run.steps[1:] if step.tflops]
    if len(rows) < LEAST_STEPS or case.goal == "peft":  # frozen weights: frameworks count them in different ways
        return None
    tflops = median(float(step.tflops or 0.0) for step in rows)
    per_token = _ratio(rows, "tokens_per_s")
    if per_token is not None:
        return LoggedWork(per_token, False, f"{tflops:.4g} TFLOP/s/GPU and the tokens per second")
    samples = [step for step in rows if step.seconds and step.samples]
    if len(samples) < LEAST_STEPS:
        return None
    work = median(float(s.tflops or 0) * 1e12 * float(s.seconds or 0) / int(s.samples or 1) for s in samples)
    source = f"{tflops:.4g} TFLOP/s/GPU, the step times and the global batch size"
    return LoggedWork(work * int(case.world), True, source)


def contradictions(stats: RunStats) -> Iterator[str]:
    """Yield where the log's own TFLOP/s and MFU contradict the figures computed for the case."""
    ours, theirs, convention = stats.mfu, stats.logged_mfu, stats.run.header.mfu_convention
    if stats.run.kind == "meshwright" or stats.peak_flops is None or stats.estimate is None:
        return
    stated = [one.tflops / one.mfu for one in stats.steady if one.tflops and one.mfu]
    peak = median(stated) * 1e12 if stated else None
    if peak is not None and abs(peak / stats.peak_flops - 1) > PEAK_DIFFERS and stats.case is not None:
        yield (
            f"the log's MFU refers to a peak of {peak / 1e12:.4g} TFLOP/s; {stats.case.cluster.gpu.name} has "
            f"{stats.peak_flops / 1e12:.4g}: check --gpus"
        )
        return
    if ours is None or theirs is None or stats.slower is None or stats.case is None or not stats.enough:
        return
    whole = float(flops_per_token(stats.case, "full")) / float(flops_per_token(stats.case))  # attention not halved
    if not ours / (1 + CONTRADICTS) <= theirs <= ours * whole * (1 + CONTRADICTS):
        lower = f" ({convention})" if theirs > ours else ", however attention is counted"
        yield (
            f"MFU is {ours:.1%} for this model, sequence length and batch, but {theirs:.1%} by the log{lower}: "
            "one of them is not what ran; check --model, --gpus and data.seq_length"
        )


def _ratio(rows: list[Step], name: str) -> float | None:
    """Return the FLOPs per token that TFLOP/s and a speed in tokens imply."""
    found = [float(step.tflops or 0) * 1e12 / rate for step in rows if (rate := getattr(step, name))]
    return median(found) if len(found) >= LEAST_STEPS else None


def _closest(case: Case, work: LoggedWork) -> int | None:
    """Return the length whose FLOPs are those that were done; None if none is close, or several are."""
    conventions = CONVENTIONS.get(case.engine, ("causal", "full"))
    errors: dict[int, float] = {}
    for length in LENGTHS:
        other = case.replace(seq_length=length)
        for convention in conventions:
            flops = float(flops_per_token(other, convention)) * (length if work.of_sample else 1)
            errors[length] = min(errors.get(length, 1e9), abs(work.flops / flops - 1))
    ranked = sorted(errors, key=lambda one: errors[one])
    if not ranked or errors[ranked[0]] > work.error:
        return None
    if len(ranked) > 1 and errors[ranked[1]] < APART * max(errors[ranked[0]], work.error / APART):
        return None
    return ranked[0]
