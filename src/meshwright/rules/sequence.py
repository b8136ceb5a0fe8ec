"""Sequence length and context parallelism."""

from __future__ import annotations

import numpy as np

from meshwright.models import MLA, Attention
from meshwright.recipes.case import Case, Column
from meshwright.recipes.model_changes import published_numerics
from meshwright.rules.rule import rule
from meshwright.rules.search_values import divisors, larger, multiples, not_, one_of, smaller
from meshwright.rules.weights import loads_weights

WITH_CP = ("meshwright", "megatron", "torchtitan", "automodel")
LONG = 32_768  # tokens per rank that rarely fit
MODERATELY_LONG = 16_384


def inner_ranks(c: Case) -> Column:
    """Return the ranks of the all-to-all: all context-parallel ranks, or the inner group of a2a+ring."""
    return np.where(c.cp_comm == "a2a+ring", np.minimum(c.cp_inner, c.cp), c.cp)


def inner_sizes(c: Case) -> list[int]:
    """Return sizes of the inner a2a+ring group, largest first."""
    return [d for d in reversed(divisors(int(c.cp))) if 1 < d < c.cp]


def memory_is_tight(c: Case) -> Column:
    """Return whether memory is short; True if there is no estimate."""
    return True if c.memory is None else c.memory.total > 0.9 * c.capacity_gib


@rule(
    "sequence.context-chunks",
    "error",
    "cp",
    engines=("meshwright", "megatron", "torchtitan"),
    message="seq_length={seq_length} is not divisible by 2 × cp = 2 × {cp}",
    symptom="sequence length must be divisible by 2 × context_parallel_size",
    cause="each rank takes one chunk from the front and one from the back, to balance causal attention",
    fixes=({"cp": smaller("cp")}, {"cp": larger("cp")}, {"seq_length": multiples("seq_length", lambda c: 2 * c.cp)}),
)
def sequence_not_divisible_by_cp(c: Case) -> Column:
    return (c.cp > 1) & (c.seq_length % (2 * c.cp) != 0)


@rule(
    "sequence.tensor-parts",
    "error",
    "sp",
    message="seq_length={seq_length} / cp={cp} is not divisible by tp={tp}, as sequence parallelism needs",
    symptom="shape error in the first scatter of the sequence, or assertion on sequence length and tensor size",
    cause="sequence parallelism gives each tensor-parallel rank an equal part of the tokens",
    fixes=(
        {"tp": smaller("tp")},
        {"sp": [False]},
        {"tp": [1], "sp": [False]},
        {"seq_length": multiples("seq_length", lambda c: 2 * c.tp * c.cp)},
    ),
)
def sequence_not_divisible_by_tp(c: Case) -> Column:
    return c.sp & (c.tp > 1) & (c.seq_length % (c.tp * c.cp) != 0)


@rule(
    "sequence.position-table",
    "error",
    "seq_length",
    message="seq_length={seq_length} exceeds the model's table of {table} learned positions",
    symptom="index out of range in the position embedding, or max_position_embeddings must be at least seq_length",
    cause="learned positions end with their table",
    fixes=({"seq_length": lambda c: [c.model.learned_positions]},),
    values={"table": lambda c: c.model.learned_positions},
)
def beyond_position_table(c: Case) -> Column:
    return (c.model.learned_positions > 0) & (c.seq_length > c.model.learned_positions)


def _published_base(c: Case) -> float | None:
    return published_numerics(c.recipe.model).rope_theta


def _longer_rope(c: Case) -> list[float]:
    """Return the RoPE base that stretches the slowest rotation over seq_length (NTK-aware scaling); none without one.

    Models with sliding windows have one base per kind of layer, which no single value replaces.
    """
    found = published_numerics(c.recipe.model)
    mixers = [m for m, _ in (*c.model.mixers(Attention), *c.model.mixers(MLA))]
    widths = [m.qk_rope if isinstance(m, MLA) else m.head_dim for m in mixers if isinstance(m, MLA | Attention)]
    dims = max(widths, default=0)
    if found.rope_theta is None or c.has_sliding or dims <= 2 or not c.max_seq_length:
        return []
    rotated = dims * found.partial_rotary_factor
    base = found.rope_theta * (int(c.seq_length) / int(c.max_seq_length)) ** (rotated / (rotated - 2))
    return [float(f"{base:.3g}")]


@rule(
    "sequence.beyond-model",
    "warning",
    "seq_length",
    message="seq_length={seq_length} exceeds the {max_seq_length} positions that the model was trained on",
    symptom="rejected by engines that size the RoPE table from the model; elsewhere quality drops beyond that length",
    cause="the model never saw such positions; a larger RoPE base (architecture.rope_theta) slows their rotation, and "
    "training on long samples adapts the weights to it",
    fixes=({"seq_length": lambda c: [c.max_seq_length]}, {"rope_theta": _longer_rope}),
)
def beyond_trained_positions(c: Case) -> Column:
    loaded = loads_weights(c) & not_(c.benchmark)
    longer = (c.max_seq_length > 0) & (c.seq_length > c.max_seq_length)
    return loaded & longer & not_(c.rope_theta is not None and c.rope_theta > (_published_base(c) or 0))


@rule(
    "sequence.long-without-context-parallel",
    "warning",
    "cp",
    engines=WITH_CP,
    message="each rank holds {tokens:.0f} tokens of one sequence (seq_length={seq_length}, cp={cp})",
    symptom="out of memory on activations in the first step",
    cause="activations grow with the tokens per rank; context parallelism divides them",
    fixes=(
        {"cp": larger("cp")},
        {"recompute": ["full"], "cp": larger("cp")},
        {"seq_length": lambda c: [LONG * int(c.cp)]},
    ),
    pitfall="Long context without CP",
    values={"tokens": lambda c: c.seq_length / c.cp},
)
def long_sequence_per_rank(c: Case) -> Column:
    return (c.seq_length / c.cp > LONG) & memory_is_tight(c)


@rule(
    "sequence.consider-context-parallel",
    "advice",
    "cp",
    engines=WITH_CP,
    message="seq_length={seq_length} without context parallelism",
    symptom="high activation memory, which forces full recompute or micro batch 1",
    cause="activations grow with the tokens per rank; context parallelism divides them",
    fixes=({"cp": larger("cp")}, {"recompute": ["full"], "cp": larger("cp")}),
    pitfall="Long context without CP",
)
def moderately_long_sequence_per_rank(c: Case) -> Column:
    return (c.cp == 1) & (c.dp > 1) & (c.seq_length > MODERATELY_LONG) & (c.seq_length <= LONG) & memory_is_tight(c)


@rule(
    "sequence.context-parallel-not-needed",
    "advice",
    "cp",
    engines=WITH_CP,
    message="cp={cp} splits a sequence of only {seq_length} tokens",
    symptom="runs, but ranks exchange keys and values in every layer to save little memory",
    cause="at this length data parallelism or a larger shard group uses the same GPUs better",
    fixes=({"cp": [1]},),
)
def unneeded_context_parallel(c: Case) -> Column:
    return (c.cp > 1) & (c.seq_length <= 4096) & not_(c.is_diffusion)


@rule(
    "sequence.all-to-all-heads",
    "error",
    "cp_comm",
    message="{heads} heads and {kv_heads} key/value heads are not divisible by {inner} all-to-all ranks × tp={tp}",
    symptom="assertion that the number of heads is divisible by the context-parallel size",
    cause="all-to-all trades sequence chunks for heads: every rank needs complete query and key/value heads",
    fixes=({"cp_comm": ["ring"]}, {"cp_comm": ["a2a+ring"], "cp_inner": inner_sizes}, {"cp": smaller("cp")}),
    values={"inner": lambda c: int(inner_ranks(c))},
)
def all_to_all_heads_not_divisible(c: Case) -> Column:
    ranks = c.tp * inner_ranks(c)
    lacking = (c.heads % ranks != 0) | ((c.kv_heads > 0) & (c.kv_heads % ranks != 0))
    return (c.cp > 1) & one_of(c.cp_comm, ("a2a", "a2a+ring")) & lacking


@rule(
    "sequence.hierarchy",
    "error",
    "cp_inner",
    message="cp_inner={cp_inner} does not split cp={cp} into an inner and an outer group for a2a+ring",
    symptom="the hierarchical context-parallel sizes must multiply to the context-parallel size",
    cause="cp_inner ranks exchange heads, cp / cp_inner such groups form the ring; both must be at least 2",
    fixes=({"cp_inner": inner_sizes}, {"cp_comm": ["ring"], "cp_inner": [1]}),
)
def cp_hierarchy_invalid(c: Case) -> Column:
    valid = (c.cp % c.cp_inner == 0) & (c.cp_inner > 1) & (c.cp_inner < c.cp)
    return (c.cp > 1) & (c.cp_comm == "a2a+ring") & not_(valid)


@rule(
    "sequence.sliding-window-ring",
    "error",
    "cp_comm",
    engines=("megatron",),
    message="sliding-window attention does not support cp_comm={cp_comm}",
    symptom="assertion in the attention layer: sliding window needs all-gather or all-to-all context parallelism",
    cause="the ring kernels do not implement a window",
    fixes=({"cp_comm": ["a2a", "allgather"]}, {"cp": [1]}),
)
def sliding_window_with_ring(c: Case) -> Column:
    # DeepSeek-V4's window is part of a kernel of its own, which gathers keys whatever cp_comm says
    return c.has_sliding & not_(c.has_compressed_keys) & (c.cp > 1) & one_of(c.cp_comm, ("ring", "a2a+ring"))


@rule(
    "sequence.packing-over-context",
    "error",
    "packing",
    engines=("automodel",),
    message="packed sequences with cp={cp} need attention=te on {engine}, not {attention}",
    symptom="ValueError: packed sequences are only supported with context-parallel size 1",
    cause="the other attention paths ignore document boundaries once the sequence is split",
    fixes=({"attention": ["te"]}, {"cp": [1]}, {"packing": [False]}),
)
def packing_with_context_parallel(c: Case) -> Column:
    return c.packing & (c.cp > 1) & (c.attention != "te")


@rule(
    "sequence.loss-per-token",
    "error",
    "per_token_loss",
    engines=("megatron",),
    message="fine-tuning with cp={cp} needs per_token_loss=true",
    symptom="calculate_per_token_loss must be true with context parallelism in fine-tuning",
    cause="target tokens are spread unevenly over the context-parallel ranks, so a mean of means is wrong",
    fixes=({"per_token_loss": [True]}, {"cp": [1]}),
)
def sample_loss_with_context_parallel(c: Case) -> Column:
    return (c.goal != "pretrain") & (c.cp > 1) & not_(c.per_token_loss) & not_(c.is_diffusion)
