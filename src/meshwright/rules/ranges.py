"""Values that are legal but far outside what any training uses."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from meshwright.recipes.case import UNKNOWN_STEPS, Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import not_


def _always(c: Case) -> Column:
    return not_(c.benchmark)


def _with_adapters(c: Case) -> Column:
    return c.goal == "peft"


def _with_experts(c: Case) -> Column:
    return c.is_moe


class Range(NamedTuple):
    """A field, the values that make sense, and what happens outside."""

    id: str
    field: str
    low: float
    high: float
    usual: float
    what: str  # of a value outside, completing "eps=1.0 …"
    symptom: str
    cause: str
    applies: Callable[[Case], Column] = _always


RANGES = (
    Range("eps", "eps", 0, 1e-3, 1e-8, "outweighs the gradients in the denominator",
          "the loss barely decreases", "updates shrink to gradient / eps; 1e-8 is usual"),
    Range("clip-grad-high", "clip_grad", 0, 1000, 1.0, "clips nothing",
          "a single bad batch makes the loss jump or diverge", "gradient norms rarely exceed 100; 1.0 is usual"),
    Range("beta1", "beta1", 0, 0.999, 0.9, "averages gradients over more than 1000 steps",
          "slow, oscillating training", "the direction of the update lags behind the gradient; 0.9 is usual"),
    Range("beta2", "beta2", 0.5, 0.9999, 0.95, "does not estimate the second moment",
          "loss spikes or no progress", "step sizes follow single batches, or never adapt; 0.95 to 0.999 is usual"),
    Range("z-loss", "z_loss", 0, 0.1, 1e-4, "outweighs the cross-entropy",
          "the loss is dominated by the z-loss; the model learns slowly", "1e-4 is usual"),
    Range("mtp-loss", "mtp_loss", 0, 2, 0.1, "outweighs the next-token loss",
          "the next-token loss barely decreases", "0.1 to 0.3 is usual"),
    Range("aux-loss", "aux_loss", 0, 1, 1e-3, "outweighs the cross-entropy",
          "experts are balanced, but the model learns slowly", "1e-4 to 1e-2 is usual", _with_experts),
    Range("router-z-loss", "router_z_loss", 0, 1, 1e-3, "outweighs the cross-entropy",
          "router scores collapse to zero", "1e-3 is usual", _with_experts),
    Range("capacity", "capacity_factor", 0, 16, 1.0, "reserves memory for tokens that never arrive",
          "out of memory in the experts", "1.0 to 2.0 is usual", _with_experts),
    Range("temperature", "temperature", 0.05, 20, 1.0, "leaves nothing of the blend's weights",
          "one source, or all sources alike, whatever their weights", "1 keeps the weights; 1 to 5 is usual"),
    Range("short-samples", "seq_length", 16, inf, 2048, "gives samples of a few tokens",
          "the model learns no context, and the GPU is idle", "a sample needs at least a sentence"),
    Range("adapter-dropout", "dropout", 0, 0.5, 0.05, "drops most of the adapter's input",
          "adapters learn little", "0 to 0.1 is usual", _with_adapters),
    Range("validation-part", "validation_part", 0, 0.5, 0.01, "holds out most of the data",
          "little is left to train on", "0.01 to 0.05 is usual"),
    Range("workers", "workers", 0, 256, 4, "starts more threads than a node has cores",
          "slow start, host memory fills up", "each loader thread of each rank needs a core and memory"),
    Range("prefetch", "prefetch", 0, 1000, 2, "holds that many batches in host memory",
          "host memory fills up", "two steps ahead hide the loading"),
    Range("newton-schulz", "muon_ns_steps", 1, 20, 5, "repeats the orthogonalization long after it converged",
          "a slow optimizer step", "5 iterations are enough"),
)  # fmt: skip


def _register(row: Range) -> None:
    @rule(
        f"ranges.{row.id}",
        "warning",
        row.field,
        message=f"{row.field}={{{row.field}}} {row.what}",
        symptom=row.symptom,
        cause=row.cause,
        fixes=({row.field: [row.usual if isinstance(row.usual, int) else float(row.usual)]},),
    )
    def outside(c: Case) -> Column:
        value = getattr(c, row.field)
        return row.applies(c) & ((value < row.low) | (value > row.high))


for _row in RANGES:
    _register(_row)


@rule(
    "ranges.clip-grad-low",
    "warning",
    "clip_grad",
    message="clip_grad={clip_grad} scales every gradient down to almost nothing",
    symptom="with plain SGD nothing is learned; with Adam the clipping hides bad batches",
    cause="gradient norms are around 1; 1.0 is usual, 0 turns clipping off",
    fixes=({"clip_grad": [1.0]},),
)
def clips_everything(c: Case) -> Column:
    return (c.clip_grad > 0) & (c.clip_grad < 1e-4) & not_(c.benchmark)


@rule(
    "ranges.weight-decay",
    "warning",
    "weight_decay",
    message="weight_decay={weight_decay} pulls the weights to zero faster than they are trained",
    symptom="the loss stays near that of random weights",
    cause="every step shrinks the weights by lr × weight_decay; 0.01 to 0.1 is usual",
    fixes=({"weight_decay": [0.1]},),
)
def weight_decay_too_high(c: Case) -> Column:
    return (c.weight_decay > 2) & (c.lr * c.weight_decay < 1) & not_(c.benchmark)


@rule(
    "ranges.weight-decay-diverges",
    "error",
    "weight_decay",
    message="lr × weight_decay = {lr} × {weight_decay}: every step removes all weights or more",
    symptom="weights flip their sign every step; the loss is NaN within a few steps",
    cause="decoupled weight decay multiplies the weights by 1 - lr × weight_decay, which must stay above 0",
    fixes=({"weight_decay": [0.1]}, {"weight_decay": [0.1], "lr": [3e-4], "min_lr": lambda c: [min(c.min_lr, 3e-5)]}),
)
def weight_decay_diverges(c: Case) -> Column:
    return c.lr * c.weight_decay >= 1


@rule(
    "ranges.adapter-rank",
    "warning",
    "rank",
    message="rank={rank} exceeds half the model's width of {hidden}",
    symptom="adapters as large as the layers they adapt",
    cause="an adapter of that rank has as many parameters as the weight; 8 to 64 is usual",
    fixes=({"rank": [32], "alpha": lambda c: [float(32 * max(c.alpha / c.rank, 1))]}, {"rank": [32]}),
)
def adapter_rank_too_high(c: Case) -> Column:
    return (c.goal == "peft") & (c.rank > c.hidden // 2)


@rule(
    "ranges.adapter-scale",
    "warning",
    "alpha",
    message="alpha / rank = {alpha} / {rank} is far from the usual scale of 1 to 2",
    symptom="adapters diverge if the scale is too large, learn nothing if too small",
    cause="the adapter's output is multiplied by alpha / rank",
    fixes=({"alpha": lambda c: [float(c.rank)]},),
)
def adapter_scale_unusual(c: Case) -> Column:
    scale = c.alpha / c.rank
    return (c.goal == "peft") & ((scale > 64) | (scale < 1 / 64)) & (c.rank <= c.hidden // 2)


def _samples_of_tokens(c: Case) -> int:
    """Return the samples of a batch that was given in tokens, on all data-parallel ranks."""
    each = int(c.micro_batch_size * c.dp)
    return max(round(int(c.global_batch_size) / (int(c.seq_length) * each)), 1) * each


@rule(
    "ranges.batch-in-tokens",
    "error",
    "global_batch_size",
    message="global_batch_size={global_batch_size} counts samples: × seq_length={seq_length} it is {tokens:.1f} "
    "billion tokens per step",
    symptom="the first step takes hours or days",
    cause="the batch was given in tokens: divide it by the sequence length",
    fixes=({"global_batch_size": lambda c: [_samples_of_tokens(c)]},),
    values={"tokens": lambda c: c.global_batch_size * c.seq_length / 1e9},
)
def batch_in_tokens(c: Case) -> Column:
    return (c.global_batch_size * c.seq_length > 5e9) & (c.global_batch_size >= c.seq_length) & not_(c.benchmark)


def _steps_of_tokens(c: Case, tokens: Column) -> int:
    return -(-int(tokens) // int(c.global_batch_size * c.seq_length))


@rule(
    "ranges.steps-in-tokens",
    "error",
    "steps",
    message="steps={steps} × {per_step} tokens per step are {tokens:.2g} tokens",
    symptom="a training that never ends, with the learning rate of its first steps",
    cause="the tokens of the training were given as steps: divide them by the tokens of a step",
    fixes=(
        {
            "steps": lambda c: [_steps_of_tokens(c, c.steps)],
            "decay_steps": lambda c: [_steps_of_tokens(c, c.decay_steps)],
            "wsd_decay_steps": lambda c: [_steps_of_tokens(c, c.wsd_decay_steps)],
        },
    ),
    values={
        "per_step": lambda c: c.global_batch_size * c.seq_length,
        "tokens": lambda c: float(c.steps) * c.global_batch_size * c.seq_length,
    },
)
def steps_in_tokens(c: Case) -> Column:
    per_step = c.global_batch_size * c.seq_length
    known = c.steps > UNKNOWN_STEPS  # of epochs whose samples are not counted yet
    return known & (c.steps > 1e15 / per_step) & (c.steps >= per_step) & not_(c.benchmark)


@rule(
    "ranges.huge-batch",
    "warning",
    "global_batch_size",
    message="global_batch_size={global_batch_size} × seq_length={seq_length} is {tokens:.1f} billion tokens per step",
    symptom="few optimizer steps per day, and no better loss per token",
    cause="beyond some tens of millions of tokens per step, larger batches train no faster",
    fixes=(
        {"global_batch_size": lambda c: [max(int(2**26 // (c.seq_length * c.dp)), 1) * int(c.dp)]},
        {"global_batch_size": lambda c: [int(c.dp)], "micro_batch_size": [1]},
    ),
    values={"tokens": lambda c: c.global_batch_size * c.seq_length / 1e9},
)
def batch_too_large(c: Case) -> Column:
    return (c.global_batch_size * c.seq_length > 5e8) & not_(batch_in_tokens(c)) & not_(c.benchmark)


@rule(
    "ranges.anneal",
    "warning",
    "anneal_steps",
    message="anneal_steps={anneal_steps}, but training has only {steps} step{s}",
    symptom="the whole run samples from anneal_blend",
    cause="anneal_steps are the final steps; about a tenth of the run is usual",
    fixes=({"anneal_steps": lambda c: [int(c.steps) // 10]},),
    values={"s": lambda c: "s" * bool(c.steps != 1)},
)
def anneals_from_the_start(c: Case) -> Column:
    return (c.anneal_steps > 0) & (c.anneal_steps >= c.steps)
