"""Examines a run: runs every diagnosis and collects the measured and estimated figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isfinite
from typing import NamedTuple

import msgspec

from meshwright.doctor import (
    better_layout,
    check_logged,
    faults,
    flat_loss,
    gradients,
    liveness,
    loss,
    loss_curve,
    memorized,
    memory,
    recompiles,
    remedies,
    settings,
    slowdown,
    slower_baseline,
    speed,
    throughput,
    user_file,
    validation,
)
from meshwright.doctor.finding import Checkup, Figure, Finding
from meshwright.doctor.match_recipe import recipe_of
from meshwright.doctor.run import ENGINE, Run
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.their_keys import settings_there
from meshwright.doctor.thresholds import limit
from meshwright.errors import InputError
from meshwright.notes import no_notes
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.rules import SEVERITIES, all_rules

TOO_FAST = 1.3  # times the estimate's speed; beyond its errors, the run is not what was estimated
VALIDATIONS = 5  # of a run, in the setting that is suggested


class Diagnosis(NamedTuple):
    """One problem to look for, and what a log must contain for that."""

    id: str
    find: Callable[[RunStats], Iterator[Finding]]
    missing_input: Callable[[RunStats], str] = lambda stats: ""  # what the log lacks for it; empty if nothing


def _needs_steps(stats: RunStats) -> str:
    return "" if stats.enough else f"at least {limit('enough_steps'):.0f} step lines after warm-up"


def _needs_trend(stats: RunStats) -> str:
    timed = any(step.seconds_per_unit is not None for step in stats.run.steps)
    needed = f"at least {limit('enough_for_trends'):.0f} step lines" if timed else "step times in the log"
    return "" if stats.enough_for_trends else needed


def _needs_estimate(stats: RunStats) -> str:
    if not stats.run.header.on_gpu:
        return "a run on GPUs: there is no estimate for CPU runs"
    if stats.estimate is None:
        option = stats.run.header.gpus_option
        return f"the recipe{' and the GPUs' if option else ''}: --recipe NAME{option}"
    if stats.run.header.assumed_gpus:
        return f"the GPUs of the run:{stats.run.header.gpus_option or ' --gpus 8xH100'}"
    if stats.has_unlike_samples:
        return "samples of the full length: those of the log are shorter"
    if stats.has_unknown_widths and (stats.tokens_per_s is not None or stats.step_s is not None):
        return "the tokens of a step, which the log does not state: data.seq_length=N data.pad_to_max_length=true"
    if stats.tokens_per_s is not None:
        return _needs_steps(stats)
    if stats.step_s is None:
        return "step times or tokens per second in the log"
    open_ = [key for key in ("data.seq_length", "train.global_batch_size") if not stats.states(key)]
    return f"the tokens of a step, which the log does not state: {' '.join(f'{key}=N' for key in open_)}"


def _needs_part(name: str, hint: str) -> Callable[[RunStats], str]:
    def missing(stats: RunStats) -> str:
        return _needs_steps(stats) if stats.part_s(name) is not None else hint

    return missing


def _needs_network(stats: RunStats) -> str:
    if stats.baseline is not None and slower_baseline.is_larger(stats, stats.baseline):
        return _needs_steps(stats)
    hint = "collective times (Megatron: --timing-log-level 1), or a run on fewer nodes: --baseline DIR"
    return _needs_part("collectives", hint)(stats)


def _needs_baseline(stats: RunStats) -> str:
    return "an earlier run to compare with: --baseline LOG" if stats.baseline is None else _needs_steps(stats)


def _needs_nccl_lines(stats: RunStats) -> str:
    if stats.case is None or stats.case.cluster.nodes < 2:
        return ""
    return _needs_steps(stats) if stats.run.network is not None else "NCCL's own lines: NCCL_DEBUG=INFO"


def _needs_pipeline(stats: RunStats) -> str:
    if stats.case is not None and stats.case.pp == 1:
        return "pipeline parallelism: this run has pp=1"
    return "" if stats.estimate is not None else _needs_estimate(stats)


def _needs_ranks(stats: RunStats) -> str:
    logged = bool(stats.run.straggler_reports) or any(
        step.ranks_s or "waiting" in step.parts_s for step in stats.steady
    )
    return "" if logged else "per-rank times (Megatron: --timing-log-level 2 --timing-log-option all)"


def _needs_memory(stats: RunStats) -> str:
    logged = sum(step.memory_gib is not None for step in stats.steady)
    if logged >= limit("enough_for_trends"):
        return ""
    return "memory usage in every step line" if logged < len(stats.steady) or not logged else _needs_trend(stats)


def _needs_loss(stats: RunStats) -> str:
    logged = sum(step.loss is not None for step in stats.run.steps)
    return (
        ""
        if logged >= limit("enough_for_trends")
        else f"the loss in at least {limit('enough_for_trends'):.0f} step lines"
    )


def _needs_climb_or_trend(stats: RunStats) -> str:
    return "" if loss_curve.climbs(stats) else _needs_loss(stats)


def _needs_epochs(stats: RunStats) -> str:
    logged = {step.epoch for step in stats.run.steps if step.epoch is not None}
    return (
        _needs_loss(stats) if logged and max(logged) > 1 else "more than one epoch, and its number in every step line"
    )


def _needs_layout(stats: RunStats) -> str:
    if missing := _needs_estimate(stats):
        return missing
    return "" if better_layout.states_layout(stats) else "the run's layout: layout.tp=N layout.pp=N"


def _needs_some_loss(stats: RunStats) -> str:
    logged = sum(step.loss is not None for step in stats.run.steps)
    return "" if logged >= loss_curve.MIN_LINES else f"the loss in at least {loss_curve.MIN_LINES} step lines"


def _needs_norms(stats: RunStats) -> str:
    logged = sum(step.grad_norm is not None for step in stats.run.steps)
    return "" if logged >= loss_curve.MIN_LINES else f"the gradient norm in at least {loss_curve.MIN_LINES} step lines"


def _needs_validations(stats: RunStats) -> str:
    count, run = limit("validations"), stats.run
    logged = len(run.validations)
    if logged >= count:
        return ""
    text = f"validation losses of at least {count:.0f} steps, and the log has {logged or 'none'}"
    if run.kind != "meshwright":
        return text
    every = f"train.eval_every={max(1, run.last_step // VALIDATIONS)}"
    return f"{text}: {every}" if logged else f"{text}: {every} data.validation_part=0.1"


def _needs_own_recipe(stats: RunStats) -> str:
    known = stats.run.header.recipe is not None and stats.case is not None
    return "" if known else "a run of ours, whose log has the whole recipe"


def _needs_real_data(stats: RunStats) -> str:
    return "real training data: this run uses mock data" if stats.uses_mock_data else flat_loss.flat_needs(stats)


def _needs_scale(stats: RunStats) -> str:
    logged = [step.loss_scale for step in stats.run.steps if step.loss_scale is not None]
    return "" if logged and max(logged) > 1 else "a dynamic loss scale: only fp16 runs have one"


def _needs_file(stats: RunStats) -> str:
    return "" if stats.run.header.file and stats.case is not None else "the file of the run: --recipe FILE"


DIAGNOSES = (
    Diagnosis("memory.out-of-memory", memory.out_of_memory),
    Diagnosis("run.failed", liveness.failed),
    Diagnosis("loss.not-a-number", loss.not_a_number),
    Diagnosis("run.differs-from-file", user_file.differing_file, _needs_file),
    Diagnosis("loss.diverging", loss.diverging, _needs_climb_or_trend),
    Diagnosis("loss.diverged", loss.diverged, _needs_some_loss),
    Diagnosis("loss.scale-collapsed", gradients.loss_scale, _needs_scale),
    Diagnosis("loss.spikes", loss.spikes, _needs_loss),
    Diagnosis("loss.flat", flat_loss.flat, _needs_real_data),
    Diagnosis("loss.growing-gradients", gradients.growing_gradients, _needs_loss),
    Diagnosis("loss.zero-gradients", gradients.zero_gradients, _needs_norms),
    Diagnosis("loss.random-guess", memorized.random_guess, _needs_loss),
    Diagnosis("loss.repeated-data", memorized.repeated_data, _needs_epochs),
    Diagnosis("loss.overfitting", validation.overfitting, _needs_validations),
    Diagnosis("loss.validation-rises", validation.rising, _needs_validations),
    Diagnosis("speed.tcp-sockets", speed.tcp_sockets, _needs_nccl_lines),
    Diagnosis("speed.slow-data", speed.slow_data, _needs_part("data", "data-loading times")),
    Diagnosis("speed.stragglers", throughput.stragglers, _needs_ranks),
    Diagnosis("speed.slow-network", speed.slow_network, _needs_network),
    Diagnosis("speed.slower-than-baseline", slower_baseline.slower_than_baseline, _needs_baseline),
    Diagnosis("speed.recompiles", recompiles.recompiles),
    Diagnosis("speed.sustained-slowdown", slowdown.sustained_slowdown, _needs_trend),
    Diagnosis("speed.low-mfu", speed.low_mfu, _needs_estimate),
    Diagnosis("speed.better-layout", better_layout.better_layout, _needs_layout),
    Diagnosis("speed.bubbles", speed.bubbles, _needs_pipeline),
    Diagnosis("speed.uneven-steps", throughput.uneven_steps, _needs_trend),
    Diagnosis("speed.slowing-down", slowdown.slowing_down, _needs_trend),
    Diagnosis("memory.growing", memory.growing_memory, _needs_memory),
    Diagnosis("memory.jumped", memory.jumped_memory, _needs_memory),
    Diagnosis("memory.only-just-fits", memory.allocator_retries),
    Diagnosis("run.checkpoint-stalls", liveness.checkpoint_stalls),
    Diagnosis("run.restarts", liveness.restarts),
    Diagnosis("run.settings", settings.checked_settings, _needs_own_recipe),
)


def meanings() -> dict[str, str]:
    """Return what every finding means, by its id."""
    found = {one.id: (one.find.__doc__ or "").partition("\n")[0] for one in DIAGNOSES}
    ends = {
        f"run.failed-{one.name.replace('_', '-')}": one.meaning
        for one in faults.FAULT_PATTERNS
        if not one.has_own_diagnosis
    }
    return {**found, "speed.periodic-steps": found["speed.uneven-steps"], **ends}


def needed_input(finding: str) -> str:
    """Return what a log must contain so that a finding can be looked for; empty if any log will do."""
    empty = RunStats(Run(kind="megatron", path="", file=""))
    return next((one.missing_input(empty) for one in DIAGNOSES if one.id == finding), "")


def examine(
    run: Run,
    case: Case | None = None,
    baseline: RunStats | None = None,
    notes: tuple[str, ...] = (),
    stated: frozenset[str] | None = None,
) -> Checkup:
    """Return all findings of a run, most severe first, and its figures with their estimates.

    `stated` are the fields of the case that the log or the user states; None means all.
    """
    stats = RunStats(run, case, baseline, stated)
    found = [finding for one in DIAGNOSES for finding in stats.findings_of(one.find)]
    findings = [_in_their_keys(stats, _with_tried_remedies(finding, case)) for finding in found]
    findings.sort(key=lambda one: SEVERITIES.index(one.severity))
    missing = {one.id: missing_input for one in DIAGNOSES if (missing_input := one.missing_input(stats))}
    header = run.header
    return Checkup(
        kind=run.kind,
        path=run.path,
        file=run.file,
        recipe=(recipe_of(case) if case is not None else header.recipe_name) or None,
        model=(case.model.name if case is not None else header.model) or None,
        gpus=((str(case.cluster) if case is not None else header.gpus) or None) if header.on_gpu else None,
        cpu_ranks=None if header.on_gpu else header.world or 1,
        engine=(case.engine if case is not None else ENGINE.get(run.kind)),
        steps=len(run.steps),
        last_step=run.last_step,
        total_steps=header.total_steps,
        starts=max(1, len(run.attempts)),
        figures=tuple(figures(stats)),
        mfu_convention=_convention(stats),
        findings=tuple(findings),
        looked_for=tuple(one.id for one in DIAGNOSES if one.id not in missing),
        not_examined={key: value for key, value in missing.items() if not any(f.id == key for f in findings)},
        notes=(*run.notes, *notes, *liveness.stopped_early(stats), *_impossible_figures(stats)),
    )


def _with_tried_remedies(finding: Finding, case: Case | None) -> Finding:
    """Return a finding without changes that the run already has or that cannot start; fixes of rules are tried."""
    if case is None or finding.id in all_rules():
        return finding
    kept = tuple(one for one in finding.remedies if one.what not in ("layout", "contract") or _applies(case, one.try_))
    return msgspec.structs.replace(finding, remedies=kept)


def _in_their_keys(stats: RunStats, finding: Finding) -> Finding:
    """Return a finding whose overrides are also settings of the framework that ran."""
    spelled = tuple(
        msgspec.structs.replace(one, there=settings_there(stats.run, stats.case, one.try_))
        if one.what in ("layout", "contract") and not one.there
        else one
        for one in finding.remedies
    )
    return msgspec.structs.replace(finding, remedies=spelled)


def _applies(case: Case, texts: tuple[str, ...]) -> bool:
    try:
        with no_notes():
            values = override.requested(case.recipe, texts)
    except InputError:  # not overrides
        return True
    return remedies.can_start(case, values)


def _convention(stats: RunStats) -> str:
    """Return how MFU is counted: by the estimate, by the log, or both if both are shown."""
    theirs = stats.run.header.mfu_convention
    if stats.estimate is None or (stats.slower is None and stats.logged_mfu is not None):
        return theirs
    ours = stats.estimate.mfu_convention
    return f"{ours}; in the log: {theirs}" if theirs and _shows_logged_mfu(stats) else ours


def _shows_logged_mfu(stats: RunStats) -> bool:
    """Return whether the log's own MFU is a figure beside ours; our runs count as the estimate does."""
    return stats.slower is not None and stats.logged_mfu is not None and stats.run.kind != "meshwright"


def _impossible_figures(stats: RunStats) -> Iterator[str]:
    header = stats.run.header
    per_rank = any(one.tokens_per_s for one in stats.run.steps)
    if header.data_ranks and per_rank and header.world is None and stats.case is None:
        yield (
            f"the log's tokens per second per GPU are per data-parallel rank ({header.data_ranks}): with tp or pp "
            "above 1 they are too high; --gpus with --recipe or --model divides by all GPUs"
        )
    if stats.has_short_samples and stats.case is not None:
        logged = header.logged_tokens(stats.world) or 0
        tokens = stats.sample_tokens or round(logged / int(stats.case.global_batch_size))
        found = f"samples have {tokens:,} tokens on average, in a batch of {stats.case.global_batch_size}"
        if stats.sample_tokens:
            yield f"{found}: step times are estimated for that, memory for {stats.case.seq_length:,} tokens"
        else:
            theirs = f"so its speed is not compared: data.seq_length={max(tokens, 1)} estimates theirs"
            yield f"{found}; the estimate is for {stats.case.seq_length:,}, {theirs}"
    if stats.estimate is not None and (stats.mfu or 0.0) > 1:
        yield f"an MFU of {stats.mfu:.0%} is impossible: the run and the estimate differ in model, batch size or GPU"
    elif stats.comparable and stats.slower and stats.enough and stats.case is not None and stats.estimate is not None:
        times, most = 1 / stats.slower, max(TOO_FAST, 1 + stats.estimate.band.step_pct / 100)
        if times > most:
            yield (
                f"the run is {times:.1f} times as fast as the estimate, more than its error of {most:.2f} times: check "
                f"that it ran on {stats.case.cluster} (--gpus), and its model, sequence length and batch size"
            )
    yield from check_logged.contradictions(stats)


def figures(stats: RunStats) -> Iterator[Figure]:
    """Yield the main figures of a run, with the estimate if there is one."""
    estimate = stats.estimate
    if stats.step_s is not None:
        expected = stats.estimated_step_s if stats.comparable else None
        yield Figure(f"step time{stats.assumed_batch}", "s", stats.step_s, expected)
    if stats.tokens_per_s is not None:
        yield Figure(
            "tokens/s/GPU" if stats.run.header.on_gpu else "tokens/s/rank",
            "",
            stats.tokens_per_s,
            float(estimate.tokens_per_s_per_gpu) if estimate is not None and stats.comparable else None,
        )
    if stats.mfu is not None:
        yield Figure("MFU", "", stats.mfu, float(estimate.mfu) if estimate is not None and stats.comparable else None)
    if _shows_logged_mfu(stats) and stats.logged_mfu is not None:
        yield Figure("MFU in the log", "", stats.logged_mfu)
    if stats.tflops is not None:
        yield Figure("TFLOP/s/GPU in the log", "", stats.tflops)
    if stats.peak_gib is not None:
        yield Figure("peak memory", "GiB", stats.peak_gib, stats.estimated_peak_gib)
    for name in ("data", "forward_backward", "optimizer", "collectives", "other"):
        share = stats.part_share(name)
        if share is not None:
            yield Figure(f"{speed.NAMES.get(name, name)}, share of a step", "", share)
    rows = [step for step in stats.steady if step.seconds_per_unit and not step.blocked_s]
    if stats.enough and rows:
        yield Figure("spread of step times", "", throughput.step_spread(rows))
    first = next((step.loss for step in stats.run.steps if step.loss is not None and isfinite(step.loss)), None)
    if first is not None:
        yield Figure("first loss", "", first)
    yield from _last_of(stats, "loss", "last loss")
    yield from _last_of(stats, "grad_norm", "last gradient norm")
    yield from validation.figures(stats)


def _last_of(stats: RunStats, field: str, name: str) -> Iterator[Figure]:
    """Yield the last value of a field that the log has; if NaN follows, its name says which step it is from."""
    logged = [step for step in stats.run.steps if getattr(step, field) is not None]
    finite = [step for step in logged if isfinite(getattr(step, field))]
    if finite:
        where = f", step {finite[-1].step:,} (NaN or infinite after it)" if finite[-1] is not logged[-1] else ""
        yield Figure(name + where, "", getattr(finite[-1], field))
