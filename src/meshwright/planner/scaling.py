"""Suggest contract changes for other hardware; each is a new experiment, so none is applied."""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import ceil, lcm
from typing import Any, NamedTuple

import msgspec

from meshwright import costs, rules
from meshwright.notes import no_notes
from meshwright.planner.batch_rate import LAWS, high_lr_rules, is_too_high, lr_of_batch, scaled_lr
from meshwright.planner.divisors import divided_batch
from meshwright.planner.plan import Suggestion
from meshwright.planner.search import as_overrides, best, changed_values, score
from meshwright.planner.space import QUICK_SPACE
from meshwright.recipes.case import Case
from meshwright.recipes.overrides import apply
from meshwright.recipes.types import Recipe
from meshwright.rules import SEVERITIES

SCALED = "scale the batch"
MAX_TOKENS = 16 * 2**20  # per step; about the largest published
MAX_BATCH_GROWTH = 16  # of the batch; learning-rate scaling is untested beyond
MIN_BATCH_GROWTH = 1.25  # below this, a larger batch is not worth a new experiment
MAX_BATCH_SHIFT = 1 / 8  # of the batch; the learning rate can stay
MAX_HALVED = 1.5  # times the batch, or its inverse: a batch that is suggested for its divisors
MIN_TOKENS_PER_GPU = 4096  # per GPU and step
MIN_FP8_GAIN = 0.03  # of the step time
MIN_SLOWDOWN = 1.1  # of the time per sample in a batch that divides into few layouts
MIN_BATCH_GAIN = 0.03  # of the time per sample: less is not worth a new experiment


def scaled_batch(old_batch: int, old_gpus: int, new_gpus: int) -> int:
    """Return the global batch that keeps the samples per GPU (or per data-parallel rank)."""
    return max(round(old_batch / old_gpus * new_gpus), 1)


def batch_for_tokens(old_batch: int, old_seq: int, new_seq: int) -> int:
    """Return the global batch that keeps the tokens per step when the sequence length changes."""
    return max(round(old_batch * old_seq / new_seq), 1)


def divisible_batches(batch: int, world: int) -> list[int]:
    """Return the batches next to this one that divide by the GPUs, or by half of them, and so on; none if it does."""
    step = world
    while True:
        below = batch // step * step
        if below == batch:
            return []
        near = [one for one in (below, below + step) if one > 0 and abs(one - batch) <= MAX_BATCH_SHIFT * batch]
        if near or step % 2:
            return near
        step //= 2


def halved_batches(batch: int, world: int) -> list[int]:
    """Return the samples per GPU that are a power of two, next to those of a batch that the GPUs do not divide.

    Such a batch halves as often as possible: into many micro batches, stages and accumulated steps.
    """
    if batch % world == 0 or batch < world:
        return []
    below = world << ((batch // world).bit_length() - 1)
    near = {*divisible_batches(batch, world)}
    return [one for one in (below, 2 * below) if one not in near and 1 / MAX_HALVED <= one / batch <= MAX_HALVED]


def lr_of_shifted_batch(case: Case, batch: int) -> float | None:
    """Return the learning rate of another batch, if it is so far from the case's that the rate should change."""
    if abs(batch / int(case.global_batch_size) - 1) <= MAX_BATCH_SHIFT:
        return None
    rate = lr_of_batch(case, batch)
    return None if rate == float(case.lr) else rate


class FittingBatch(NamedTuple):
    """A batch near a recipe's that divides into more layouts, with the best of them."""

    overrides: tuple[str, ...]
    slower: float  # time per token of the recipe's batch over its own

    def note(self, case: Case, step_s: float, words: str) -> str:
        """Return the gain in words; `words` is how the overrides are written."""
        return (
            f"{step_s:.2f} s per step is {self.slower:.1f}× the time per token of {words}: "
            f"{int(case.global_batch_size)} divides into few layouts of {int(case.world)} GPUs; "
            "a contract change: a new experiment"
        )


def fitting_batch(case: Case, step_s: float) -> FittingBatch | None:
    """Return a batch that divides by the GPUs, with its best layout and its gain over this step time."""
    batch, scored = int(case.global_batch_size), []
    for other in divisible_batches(batch, int(case.world)):
        found = best(case.replace(global_batch_size=other), {}, quick=True)
        if found is not None and found.fits:
            scored.append((found.step_s / other, other, found.layout))
    if not scored:
        return None
    per_sample, other, layout = min(scored, key=lambda row: row[:2])
    slower = step_s / batch / per_sample
    if slower < MIN_SLOWDOWN:
        return None
    return FittingBatch((f"train.global_batch_size={other}", *as_overrides(changed_values(layout, case))), slower)


def suggestions(
    base: Recipe, base_world: int, case: Case, pinned: Mapping[str, Any] | None = None, typed: Container[str] = ()
) -> tuple[Suggestion, ...]:
    """Return suggested contract changes for this cluster; each is legal and fits.

    `typed` are the flat names that the user set: no other batch is suggested in place of a typed one.
    """
    own_batch = "global_batch_size" in typed
    candidates = (
        *(() if own_batch else _batch_suggestions(base, base_world, case, pinned or {}, typed)),
        *_fp8_suggestions(case),
    )
    valid = tuple(suggestion for suggestion in candidates if _is_valid(suggestion, case))
    lengths = [] if own_batch else _length_suggestions(base, case, pinned or {})
    return (*valid, *(one for one in lengths if not _new_contract_findings(_with(one, case), case)))


def _with(suggestion: Suggestion, case: Case) -> Case:
    with no_notes():
        return case.rebuild(apply(case.recipe, suggestion.overrides))


def _is_valid(suggestion: Suggestion, case: Case) -> bool:
    tried = _with(suggestion, case)
    return bool(rules.legal(tried)) and bool(tried.memory.fits) and not _new_contract_findings(tried, case)


def _new_contract_findings(tried: Case, case: Case) -> set[str]:
    """Return the findings on the training that the suggestion would add; those of the layout are of another search."""
    related = [r for r in rules.applicable(tried, SEVERITIES) if r.subject in ("learning_rate", "optimizer", "batch")]
    return {r.id for r in related if bool(r.broken(tried)) and not bool(r.broken(case))}


def _whole_steps(batch: int, case: Case) -> int:
    """Round the batch down to full micro batches on every data-parallel rank."""
    step = int(case.micro_batch_size) * int(case.dp)
    return max(batch // step, 1) * step


def _divided(batch: int, case: Case) -> int:
    """Round the batch down to one that divides by the GPUs, so that most layouts can have it."""
    step = lcm(int(case.world), int(case.micro_batch_size) * int(case.dp))
    return divided_batch(batch, step) if batch >= step else _whole_steps(batch, case)


def _batch_suggestions(
    base: Recipe, base_world: int, case: Case, pinned: Mapping[str, Any], typed: Container[str]
) -> list[Suggestion]:
    """Suggest a larger batch if there are more GPUs or each has too few tokens, up to MAX_TOKENS per step.

    It must train a sample in less time, with the best layout for it.
    """
    old, world = base.train.global_batch_size, int(case.world)
    per_gpu = case.global_batch_size * case.seq_length / world
    if world > base_world:
        wanted, why = scaled_batch(old, base_world, world), f"{world} GPUs instead of {base_world}"
    elif per_gpu < MIN_TOKENS_PER_GPU:
        wanted, why = (ceil(MIN_TOKENS_PER_GPU * world / case.seq_length), f"{per_gpu:,.0f} tokens per GPU and step")
    else:
        return []
    batch = _divided(min(wanted, MAX_TOKENS // case.seq_length, MAX_BATCH_GROWTH * old), case)
    if batch < MIN_BATCH_GROWTH * case.global_batch_size:
        return []
    gain = _gain_of_batch(case, batch, pinned)
    if gain < MIN_BATCH_GAIN:
        return []
    own = "lr" in typed
    whose, known = ("your", case.recipe.optimizer.lr) if own else ("the recipe's", base.optimizer.lr)
    at = case.recipe.train.global_batch_size if own else old
    advised = _advised_lr(case)
    if advised is not None and not own:
        whose, known, at = "the advised", advised, int(case.global_batch_size)
    lr, linear = (scaled_lr(known, at, batch, law) for law in LAWS)
    why += f": global batch {batch} takes an estimated {gain:.0%} less time per token, with "
    words = (f"train.global_batch_size={batch}", f"optimizer.lr={lr:g}")
    if is_too_high(_with(Suggestion("", words, ""), case), lr):  # for the goal or the size
        kept = case.recipe.optimizer.lr if advised is None or own else advised
        why += f"lr {kept:g}: {lr:g}, {whose} {known:g} at batch {at} with sqrt scaling, is too high"
        more = () if kept == case.recipe.optimizer.lr else (f"optimizer.lr={kept:g}",)
        return [Suggestion(SCALED, (*words[:1], *more), why)]
    why += f"lr {lr:g}: {whose} {known:g} at batch {at} with sqrt scaling ({linear:g} with linear scaling)"
    return [Suggestion(SCALED, words, why)]


def _advised_lr(case: Case) -> float | None:
    """Return the learning rate that the findings of the case advise; None if its own is usual."""
    values = [fix["lr"] for one in high_lr_rules(case) for fix in one.fixes if "lr" in fix]
    return next((float((one(case) if callable(one) else one)[0]) for one in values), None)


def _gain_of_batch(case: Case, batch: int, pinned: Mapping[str, Any]) -> float:
    """Return the share of the time per sample that another batch saves: in this layout, or in the best one for it."""
    now = float(costs.step_time(case).step_s) / int(case.global_batch_size)
    other = case.replace(global_batch_size=batch)
    found = best(other, pinned, quick=True)
    times = [float(costs.step_time(other).step_s), *([found.step_s] if found is not None and found.fits else [])]
    return 1 - min(times) / batch / now


def _length_suggestions(base: Recipe, case: Case, pinned: Mapping[str, Any]) -> list[Suggestion]:
    """Suggest the batch that keeps the tokens per step; one near it if that fits no layout, none if it is another."""
    if case.seq_length == base.data.seq_length:
        return []
    exact = batch_for_tokens(base.train.global_batch_size, base.data.seq_length, case.seq_length)
    near = [one for one in (exact, _whole_steps(exact, case)) if abs(one - exact) <= MAX_BATCH_SHIFT * exact]
    if case.global_batch_size in near:
        return []
    batch = next((one for one in near if _fits_a_layout(case, one, pinned)), None)
    if batch is None:
        return []
    why = (
        f"seq_length changed from {base.data.seq_length} to {case.seq_length}; global batch {batch} has "
        f"{batch * int(case.seq_length):,} tokens per step, the plan's {int(case.global_batch_size)} has "
        f"{int(case.global_batch_size) * int(case.seq_length):,}, the recipe "
        f"{base.train.global_batch_size * base.data.seq_length:,}"
    )
    return [Suggestion("keep the tokens per step", (f"train.global_batch_size={batch}",), why)]


def _fits_a_layout(case: Case, batch: int, pinned: Mapping[str, Any]) -> bool:
    """Return whether the cluster has a layout for another batch, which asking again would find."""
    other = case.rebuild(apply(case.recipe, [f"train.global_batch_size={batch}"]))
    if bool(rules.legal(other)) and bool(other.memory.fits):
        return True
    return any(batch.fits.any() for batch in score(other, pinned, QUICK_SPACE, timed=False))


def _new_findings(before: Case, after: Case) -> set[str]:
    """Return the errors and warnings that a change brings: what a rule warns about is not suggested."""
    first, then = ({r.id for r in rules.applicable(c, SEVERITIES[:2]) if bool(r.broken(c))} for c in (before, after))
    return then - first


def _fp8_suggestions(case: Case) -> list[Suggestion]:
    peaks = case.cluster.gpu.peak_tflops
    if case.matmul != "same" or "fp8" not in peaks or case.goal == "peft" or case.is_diffusion:
        return []
    formats = ("mxfp8", "fp8_tensor") if case.gpu_arch in ("blackwell", "rubin") else ("fp8_tensor",)
    matmul = next((one for one in formats if not _new_findings(case, case.replace(matmul=one))), None)
    if matmul is None:
        return []
    suggestion = Suggestion("compute linear layers in fp8", (f"precision.matmul={matmul}",), "")
    gain = 1 - float(costs.step_time(_with(suggestion, case)).step_s) / float(costs.step_time(case).step_s)
    if gain < MIN_FP8_GAIN:
        return []
    why = f"estimated {gain:.0%} less step time in this layout; the trained weights differ: compare loss curves first"
    return [msgspec.structs.replace(suggestion, why=why)]
