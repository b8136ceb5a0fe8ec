"""Checks of trainers that compare the answers to a prompt: a batch must hold all answers of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import gcd
from typing import Any

from meshwright.frameworks.start_checks.types import Given, StartCheck

COUNTS = (*range(1, 9), *range(16, 129, 8))
"""Processes of a training whose launch does not state them: one is enough that fits."""
USUAL = (1, 2, 4, 8, 16, 32, 64, 128)
AXOLOTL_KEYS = ("trl.num_generations", "micro_batch_size", "gradient_accumulation_steps", "trl.generation_batch_size")
NUMBER, EVALUATED = "num_generations", "num_generations_eval"
BATCH, EVAL_BATCH = "per_device_train_batch_size", "per_device_eval_batch_size"
ROUNDS, ACCUMULATED = "steps_per_generation", "gradient_accumulation_steps"
TOTAL = "generation_batch_size"
MESSAGE = f"{{{NUMBER}}} must divide the answers of a generation: {{{BATCH}}} × {{%s}} × {{processes}}"


def _whole(given: Given, key: str) -> int | None:
    """Return a positive integer; None for anything else."""
    number = given.number(key)
    return int(number) if number is not None and number >= 1 and number == int(number) else None


def _never_divides(given: Given, answers: int | None, *factors: int | None, unstated: Sequence[int] = COUNTS) -> bool:
    """Return whether a number of answers divides the product of these factors and of the processes in no case."""
    if answers is None or answers < 2:
        return False
    product = 1
    for one in factors:
        if one is None:  # its default depends on the launch
            return False
        product *= one
    counts = unstated if given.processes is None else (given.processes,)
    return all(product * count % answers != 0 for count in counts)


def _splits(given: Given, rounds: str, unstated: Sequence[int] = COUNTS) -> bool:
    if given.is_stated(ROUNDS) != (rounds == ROUNDS) or given.is_on(TOTAL):
        return False
    return _never_divides(given, _whole(given, NUMBER), _whole(given, BATCH), _whole(given, rounds), unstated=unstated)


def _splits_usually(given: Given, rounds: str) -> bool:
    return _splits(given, rounds, USUAL) and not _splits(given, rounds)


def _splits_evaluation(given: Given) -> bool:
    answers = _whole(given, EVALUATED if given.is_on(EVALUATED) else NUMBER)
    evaluates = given.is_stated("eval_strategy") and given.text("eval_strategy") not in ("no", "false", "none")
    return evaluates and _never_divides(given, answers, _whole(given, EVAL_BATCH))


def _fitting(given: Given, keys: Sequence[str]) -> Mapping[str, Any]:
    """Return the smallest change of the last key with which the answers divide the batch."""
    answers, processes = _whole(given, NUMBER) or 1, given.processes or 1
    sizes = [_whole(given, key) or 1 for key in keys]
    rest = processes
    for one in sizes[:-1]:
        rest *= one
    return {keys[-1]: next(size for size in range(sizes[-1], sizes[-1] + answers) if rest * size % answers == 0)}


def group_checks(place: str) -> tuple[StartCheck, ...]:
    """Return the checks of a batch that would split the answers to a prompt."""
    return (
        *(
            StartCheck(NUMBER, partial(_splits, rounds=rounds), MESSAGE % rounds,
                partial(_fitting, keys=(BATCH, rounds)), place)
            for rounds in (ACCUMULATED, ROUNDS)
        ),
        *(
            StartCheck(NUMBER, partial(_splits_usually, rounds=rounds), MESSAGE % rounds,
                partial(_fitting, keys=(BATCH, rounds)), place, "warning",
                effect="refuses to start on 1, 2, 4, 8 or 16 GPUs")
            for rounds in (ACCUMULATED, ROUNDS)
        ),
        StartCheck(EVAL_BATCH, _splits_evaluation,
            f"{{{NUMBER}}} must divide the answers of an evaluation: {{{EVAL_BATCH}}} × {{processes}}",
            partial(_fitting, keys=(EVAL_BATCH,)), place),
        StartCheck(TOTAL,
            lambda given: given.is_on(TOTAL) and (given.number(TOTAL) or 0) % max(1, given.number(NUMBER) or 1) != 0,
            f"{{{TOTAL}}} must be a multiple of {{{NUMBER}}}", {TOTAL: None}, place),
    )  # fmt: skip


def axolotl_group_checks(place: str) -> tuple[StartCheck, ...]:
    """Return Axolotl's checks: TRL refuses what fits no number of processes, and Axolotl itself counts those of one."""
    number, batch, rounds, total = AXOLOTL_KEYS

    def broken(given: Given, processes: int | None) -> bool:
        sizes = (_whole(given, total),) if given.is_on(total) else (_whole(given, batch), _whole(given, rounds))
        counts = given._replace(processes=1 if given.is_on(total) else processes)
        return given.text("rl") in ("grpo", "gdpo") and _never_divides(counts, _whole(given, number), *sizes)

    def fitting(given: Given) -> Mapping[str, Any]:
        if given.is_on(total):
            return {total: None}
        answers, size = _whole(given, number) or 1, _whole(given, batch) or 1
        return {rounds: answers // gcd(answers, size)}

    message = f"{{{number}}} must divide the answers of a generation: {{{batch}}} × {{{rounds}}}"
    return (
        StartCheck(number, lambda given: broken(given, None), message, fitting, place),
        StartCheck(number, lambda given: broken(given, 1) and not broken(given, None), message, fitting, place,
            since="0.17"),
    )  # fmt: skip
