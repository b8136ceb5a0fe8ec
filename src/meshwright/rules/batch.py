"""Global batch, micro batch and what they are used for."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import divisors, divisors_of, larger, multiples, nearest_first

BENCHMARK_STEPS = 50
MIN_TOKENS_PER_GPU = 1024
"""Tokens per GPU and step below which matrix products no longer fill a GPU, and every step waits for its traffic."""


def _fed_gpus(c: Case) -> int:
    """GPUs that the tokens of a step can keep busy."""
    return max(int(c.global_batch_size * c.seq_length) // MIN_TOKENS_PER_GPU, 1)


def _filling_batches(c: Case) -> list[int]:
    """The smallest global batch that gives every GPU enough tokens."""
    unit = int(c.micro_batch_size * c.dp)
    wanted = -(-MIN_TOKENS_PER_GPU * int(c.world) // int(c.seq_length))
    return [-(-wanted // unit) * unit]


def _micro_batches(c: Case) -> list[int]:
    """Micro batches that divide what one data-parallel rank gets of the global batch."""
    per_rank = max(int(c.global_batch_size) // int(c.dp), 1)
    return nearest_first(divisors(per_rank), int(c.micro_batch_size))


@rule(
    "batch.divides",
    "error",
    "micro_batch_size",
    message="a global batch of {global_batch_size} is not a multiple of micro batch {micro_batch_size} × dp {dp}",
    symptom="global batch size is not divisible by micro batch size × data-parallel size",
    cause="every data-parallel rank works through the same whole number of micro batches",
    fixes=(
        {"micro_batch_size": _micro_batches},
        {"tp": larger("tp")},
        {"global_batch_size": multiples("global_batch_size", lambda c: c.micro_batch_size * c.dp)},
        {"global_batch_size": multiples("global_batch_size", lambda c: c.dp), "micro_batch_size": [1]},
    ),
)
def global_batch_divides(c: Case) -> Column:
    return (c.global_batch_size >= c.dp) & (c.global_batch_size % (c.micro_batch_size * c.dp) != 0)


@rule(
    "batch.smaller-than-data-parallel",
    "error",
    "global_batch_size",
    message="a global batch of {global_batch_size} cannot give {dp} data-parallel ranks one sample each",
    symptom="global batch size is smaller than the data-parallel size, so that some ranks have nothing to do",
    cause="the cluster is larger than the batch can feed",
    fixes=(
        {"cp": larger("cp")},
        {"tp": larger("tp")},
        {"pp": larger("pp")},
        {"global_batch_size": multiples("global_batch_size", lambda c: c.dp * c.micro_batch_size)},
    ),
)
def global_batch_feeds_every_rank(c: Case) -> Column:
    return c.global_batch_size < c.dp


@rule(
    "batch.too-few-tokens",
    "warning",
    "global_batch_size",
    message="a step gives each of {world} GPUs only {each:.0f} tokens; beyond {fed} GPUs more do not make it faster",
    symptom="many GPUs, a low share of their peak, and a step that hardly gets shorter with more of them",
    cause="matrix products over a few hundred tokens do not fill a GPU, and the traffic of a step stays the same",
    fixes=({"global_batch_size": _filling_batches},),
    values={"each": lambda c: c.global_batch_size * c.seq_length / c.world, "fed": _fed_gpus},
)
def every_gpu_has_tokens(c: Case) -> Column:
    return (c.world > 1) & (c.global_batch_size * c.seq_length < MIN_TOKENS_PER_GPU * c.world)


@rule(
    "batch.benchmark-as-production",
    "warning",
    "steps",
    message="a benchmark recipe is asked to train on {dataset!r} for {steps} steps",
    symptom="runs fast, and the loss curve cannot be trusted",
    cause="benchmark recipes take shortcuts that change the training: forced routing, no checks, low-precision sums",
    fixes=({"steps": [BENCHMARK_STEPS], "dataset": ["mock"]},),
)
def benchmark_is_not_production(c: Case) -> Column:
    return c.benchmark & ((c.steps > BENCHMARK_STEPS) | (c.dataset != "mock"))


@rule(
    "batch.one-huge-micro-batch",
    "advice",
    "micro_batch_size",
    message="micro batch {micro_batch_size} × sequence {seq_length} at cp={cp}: {tokens} tokens in one forward",
    symptom="activation memory grows with the micro batch, while kernels were full long before",
    cause="beyond some tens of thousands of tokens a larger micro batch no longer makes matrix products faster",
    fixes=({"micro_batch_size": divisors_of("micro_batch_size", "micro_batch_size")},),
    values={"tokens": lambda c: c.micro_batch_size * c.seq_length // c.cp},
)
def micro_batch_is_not_huge(c: Case) -> Column:
    return (c.micro_batch_size > 1) & (c.micro_batch_size * c.seq_length // c.cp > 131_072)
