"""Global and micro batch size."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import divisors, divisors_of, larger, multiples, nearest_first

BENCHMARK_STEPS = 50
MIN_TOKENS_PER_GPU = 1024
"""Tokens per GPU and step below which matmuls no longer fill a GPU and communication dominates the step."""


def _fed_gpus(c: Case) -> int:
    """Return how many GPUs the tokens of one step can keep busy."""
    return max(int(c.global_batch_size * c.seq_length) // MIN_TOKENS_PER_GPU, 1)


def _filling_batches(c: Case) -> list[int]:
    """Return the smallest global batch that gives every GPU enough tokens."""
    unit = int(c.micro_batch_size * c.dp)
    wanted = -(-MIN_TOKENS_PER_GPU * int(c.world) // int(c.seq_length))
    return [-(-wanted // unit) * unit]


def _micro_batches(c: Case) -> list[int]:
    """Return micro batch sizes that divide the samples of one data-parallel rank."""
    per_rank = max(int(c.global_batch_size) // int(c.dp), 1)
    return nearest_first(divisors(per_rank), int(c.micro_batch_size))


@rule(
    "batch.divides",
    "error",
    "micro_batch_size",
    message="global_batch_size={global_batch_size} is not divisible by micro_batch_size={micro_batch_size} × dp={dp}",
    symptom="global batch size is not divisible by micro batch size × data-parallel size",
    cause="every data-parallel rank runs the same integer number of micro batches per step",
    fixes=(
        {"micro_batch_size": _micro_batches},
        {"tp": larger("tp")},
        {"global_batch_size": multiples("global_batch_size", lambda c: c.micro_batch_size * c.dp)},
        {"global_batch_size": multiples("global_batch_size", lambda c: c.dp), "micro_batch_size": [1]},
    ),
)
def global_batch_not_divisible(c: Case) -> Column:
    return (c.global_batch_size >= c.dp) & (c.global_batch_size % (c.micro_batch_size * c.dp) != 0)


@rule(
    "batch.smaller-than-data-parallel",
    "error",
    "global_batch_size",
    message="global_batch_size={global_batch_size} gives some of the {dp} data-parallel ranks no sample",
    symptom="global batch size is smaller than the data-parallel size; some ranks have no work",
    cause="the cluster has more data-parallel ranks than the batch has samples",
    fixes=(
        {"cp": larger("cp")},
        {"tp": larger("tp")},
        {"pp": larger("pp")},
        {"global_batch_size": multiples("global_batch_size", lambda c: c.dp * c.micro_batch_size)},
    ),
)
def global_batch_smaller_than_dp(c: Case) -> Column:
    return c.global_batch_size < c.dp


@rule(
    "batch.too-few-tokens",
    "warning",
    "global_batch_size",
    message="each of {world} GPUs gets only {each:.0f} tokens per step; beyond {fed} GPUs, twice as many are not twice "
    "as fast",
    symptom="low MFU, and a step time that falls less than the number of GPUs grows",
    cause="matmuls over a few hundred tokens do not fill a GPU, and the communication per step stays the same",
    fixes=({"global_batch_size": _filling_batches},),
    values={"each": lambda c: c.global_batch_size * c.seq_length / c.world, "fed": _fed_gpus},
)
def too_few_tokens_per_gpu(c: Case) -> Column:
    return (c.world > 1) & (c.global_batch_size * c.seq_length < MIN_TOKENS_PER_GPU * c.world)


@rule(
    "batch.benchmark-as-production",
    "warning",
    "steps",
    message="a benchmark recipe trains on {dataset!r} for {steps} steps",
    symptom="runs fast, but the loss curve cannot be trusted",
    cause="benchmark recipes take shortcuts that change training: forced routing, no NaN checks, bf16 reductions",
    fixes=({"steps": [BENCHMARK_STEPS], "dataset": ["mock"]},),
)
def benchmark_used_for_training(c: Case) -> Column:
    return c.benchmark & ((c.steps > BENCHMARK_STEPS) | (c.dataset != "mock"))


@rule(
    "batch.one-huge-micro-batch",
    "advice",
    "micro_batch_size",
    message="micro_batch_size={micro_batch_size} × seq_length={seq_length} at cp={cp}: {tokens} tokens per forward",
    symptom="activation memory grows with the micro batch, but speed does not",
    cause="matmuls stop getting faster beyond some tens of thousands of tokens",
    fixes=({"micro_batch_size": divisors_of("micro_batch_size", "micro_batch_size")},),
    values={"tokens": lambda c: c.micro_batch_size * c.seq_length // c.cp},
)
def micro_batch_too_large(c: Case) -> Column:
    return (c.micro_batch_size > 1) & (c.micro_batch_size * c.seq_length // c.cp > 131_072)
