"""Heads, widths and vocabulary that tensor parallelism must divide."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import ENGINES
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_TP, divisors_of

REPLICATING_KV = ("megatron", "meshwright")
STRICT_KV = ("torchtitan", "automodel", "kempnerforge", "deepspeed")
PADDING_VOCABULARY = tuple(engine for engine in ENGINES if engine != "meshwright")
TP_PITFALL = "TP > num_kv_heads"


def _tp_dividing(of: str) -> tuple[Fix, ...]:
    """Return fixes: tp degrees that divide one of the model's numbers, or no tensor parallelism."""
    return ({"tp": divisors_of(of, "tp")}, NO_TP)


FUSED_PROJECTIONS = ("phi3",)
"""Model types that slice fused projections by the full model's widths; our engine does not shard them."""


@rule(
    "heads.fused-projections",
    "error",
    "tp",
    engines=("meshwright",),
    message="tp={tp}: our engine does not shard the fused projections of {model_type} models",
    symptom="every tensor-parallel rank would compute the whole layer, so that tp saves nothing",
    cause="qkv_proj and gate_up_proj are sliced by the full model's widths inside the model's own code",
    fixes=(NO_TP,),
    values={"model_type": lambda c: c.model.model_type},
)
def fused_projections(c: Case) -> Column:
    return (c.model.model_type in FUSED_PROJECTIONS) & (c.tp > 1)


@rule(
    "heads.attention",
    "error",
    "tp",
    message="{heads} attention heads are not divisible by tp={tp}",
    symptom="num_attention_heads must be divisible by tensor_model_parallel_size (or a view of the wrong shape)",
    cause="each tensor-parallel rank computes complete heads",
    fixes=_tp_dividing("heads"),
)
def heads_not_divisible(c: Case) -> Column:
    return c.heads % c.tp != 0


@rule(
    "heads.kv-groups",
    "error",
    "tp",
    engines=REPLICATING_KV,
    message="{kv_heads} key/value heads are neither a multiple nor a divisor of tp={tp}",
    symptom="num_query_groups must be a multiple or a divisor of tensor_model_parallel_size",
    cause="each rank holds complete key/value heads, or several ranks replicate one",
    fixes=_tp_dividing("kv_heads"),
    pitfall=TP_PITFALL,
)
def kv_heads_not_divisible_or_replicable(c: Case) -> Column:
    return (c.kv_heads % c.tp != 0) & (c.tp % max(c.kv_heads, 1) != 0)


@rule(
    "heads.kv-heads",
    "error",
    "tp",
    engines=STRICT_KV,
    message="{kv_heads} key/value heads are not divisible by tp={tp}",
    symptom="n_kv_heads must be divisible by the tensor-parallel degree",
    cause="this engine does not replicate key/value heads; each rank needs at least one of its own",
    fixes=_tp_dividing("kv_heads"),
    pitfall=TP_PITFALL,
)
def kv_heads_not_divisible(c: Case) -> Column:
    return c.kv_heads % c.tp != 0


@rule(
    "heads.kv-copies",
    "advice",
    "tp",
    engines=REPLICATING_KV,
    message="tp={tp} exceeds the {kv_heads} key/value heads, so each head is replicated",
    symptom="runs, but key/value projections stop shrinking and their gradients need one more reduction",
    cause="beyond the number of key/value heads, tensor parallelism replicates them",
    fixes=({"tp": lambda c: [d for d in divisors_of("kv_heads", "tp")(c) if d <= c.kv_heads]},),
    pitfall=TP_PITFALL,
)
def kv_heads_replicated(c: Case) -> Column:
    return (c.kv_heads > 0) & (c.tp > c.kv_heads) & (c.tp % max(c.kv_heads, 1) == 0)


@rule(
    "heads.ffn-width",
    "error",
    "tp",
    engines=("megatron", "deepspeed"),
    message="the feed-forward width {ffn} is not divisible by tp={tp}",
    symptom="… is not divisible by … from the first column-parallel layer",
    cause="column-parallel layers give every rank the same number of columns",
    fixes=_tp_dividing("ffn"),
)
def ffn_not_divisible(c: Case) -> Column:
    return c.ffn % c.tp != 0


@rule(
    "heads.vocabulary",
    "advice",
    "tp",
    engines=PADDING_VOCABULARY,
    message="the vocabulary of {vocab} is padded, because it is not divisible by tp={tp}",
    symptom="the embeddings of checkpoint and model differ by a few rows",
    cause="the vocabulary is sharded over the tensor-parallel ranks and padded to divide evenly",
    fixes=_tp_dividing("vocab"),
)
def vocab_padded(c: Case) -> Column:
    return c.vocab % c.tp != 0


@rule(
    "heads.vocabulary-parts",
    "error",
    "tp",
    engines=("meshwright",),
    message="the vocabulary of {vocab} is not divisible by tp={tp}",
    symptom="rejected when the embedding is sharded, before weights are allocated",
    cause="rows are split by tp and then sharded; nothing is padded, so that checkpoints fit",
    fixes=_tp_dividing("vocab"),
)
def vocab_not_divisible(c: Case) -> Column:
    return c.vocab % c.tp != 0


@rule(
    "heads.mamba",
    "error",
    "tp",
    message="{mamba_heads} Mamba heads in {mamba_groups} groups are not divisible by tp={tp}",
    symptom="assertion in the Mamba mixer on heads or groups and the tensor-parallel size",
    cause="each rank computes complete Mamba heads and groups",
    fixes=({"tp": divisors_of("mamba_groups", "tp")}, NO_TP),
)
def mamba_heads_not_divisible(c: Case) -> Column:
    return (c.mamba_heads % c.tp != 0) | (c.mamba_groups % c.tp != 0)


@rule(
    "heads.mamba-context",
    "error",
    "cp",
    engines=("megatron", "meshwright"),
    message="{mamba_heads} Mamba heads are not divisible by tp × cp = {tp} × {cp}",
    symptom="assertion in the Mamba mixer on heads and the context-parallel size",
    cause="with context parallelism, each rank scans the full sequence for a subset of the heads",
    fixes=({"cp": divisors_of("mamba_heads", "cp")}, {"cp": [1]}),
)
def mamba_heads_not_divisible_by_cp(c: Case) -> Column:
    return (c.cp > 1) & (c.mamba_heads % (c.tp * c.cp) != 0)


@rule(
    "heads.gated-delta",
    "error",
    "tp",
    message="{delta_k_heads} key and {delta_v_heads} value heads of linear attention are not divisible by tp={tp}",
    symptom="shape error or assertion in the gated-delta layer",
    cause="each rank computes complete linear-attention heads",
    fixes=({"tp": divisors_of("delta_k_heads", "tp")}, NO_TP),
)
def delta_heads_not_divisible(c: Case) -> Column:
    return (c.delta_k_heads % c.tp != 0) | (c.delta_v_heads % c.tp != 0)


@rule(
    "heads.gated-delta-context",
    "error",
    "cp",
    engines=("megatron", "meshwright"),
    message="{delta_k_heads} key and {delta_v_heads} value heads are not divisible by tp × cp = {tp} × {cp}",
    symptom="linear_num_key_heads must be a multiple of tensor × context parallel size",
    cause="with context parallelism, each rank runs the recurrence over the full sequence for a subset of the heads",
    fixes=({"cp": divisors_of("delta_k_heads", "cp")}, {"cp": [1]}),
)
def delta_heads_not_divisible_by_cp(c: Case) -> Column:
    ranks = c.tp * c.cp
    return (c.cp > 1) & ((c.delta_k_heads % ranks != 0) | (c.delta_v_heads % ranks != 0))
