"""Attention kernels, compilation and the loss."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.memory import GIB
from meshwright.rules.rule import rule
from meshwright.rules.search_values import one_of


@rule(
    "kernels.attention-gpu",
    "error",
    "attention",
    message="{gpu} (compute capability {capability}) does not support attention={attention}",
    symptom="FlashAttention only supports Ampere GPUs or newer; or no available kernel",
    cause="flash, Transformer Engine and cuDNN attention need compute capability 8.0",
    fixes=({"attention": ["auto"]}, {"attention": ["sdpa"]}),
)
def attention_unsupported_gpu(c: Case) -> Column:
    return one_of(c.attention, ("flash", "te", "cudnn")) & (c.capability < 8)


@rule(
    "kernels.eager-attention",
    "warning",
    "attention",
    message="eager attention stores {seq_length} × {seq_length} scores per head",
    symptom="out of memory, or attention takes most of the step",
    cause="without a fused kernel, memory and traffic grow with the square of the sequence length",
    fixes=({"attention": ["auto"]},),
)
def eager_attention_on_long_sequence(c: Case) -> Column:
    return (c.attention == "eager") & (c.seq_length / c.cp > 2048) & (c.heads > 0)


@rule(
    "kernels.compiled-experts",
    "warning",
    "compile",
    engines=("kempnerforge",),
    message="compile=true breaks the graph at every MoE router",
    symptom="a warning at startup, long compilation and little gain",
    cause="the number of tokens per expert is known only at run time",
    fixes=({"compile": [False]},),
)
def moe_compiled(c: Case) -> Column:
    return c.is_moe & c.compile


@rule(
    "kernels.deterministic-loss",
    "error",
    "loss",
    engines=("megatron",),
    message="deterministic=true does not support loss={loss}",
    symptom="deterministic mode rejects the fused cross-entropy",
    cause="its fused backward accumulates in an order that is not fixed",
    fixes=({"loss": ["vocab_parallel"]}, {"deterministic": [False]}),
)
def deterministic_fused_loss(c: Case) -> Column:
    return c.deterministic & (c.loss == "fused_linear")


@rule(
    "kernels.deterministic-scan",
    "error",
    "scan",
    engines=("meshwright",),
    message="deterministic=true does not support scan=fla",
    symptom="two runs of the same recipe have different losses",
    cause="fla chooses tile sizes by timing them in each process, and other tiles sum in another order",
    fixes=({"scan": ["auto", "torch"]}, {"deterministic": [False]}),
)
def deterministic_fla_scan(c: Case) -> Column:
    return c.deterministic & (c.scan == "fla")


@rule(
    "kernels.full-logits",
    "advice",
    "loss",
    message="loss=plain keeps {logits:.0f} GiB of logits on one rank",
    symptom="a memory peak at the end of the forward pass that recompute does not reduce",
    cause="it stores fp32 logits of every token over the full vocabulary, and their gradient",
    fixes=({"loss": ["chunked", "vocab_parallel"]}, {"micro_batch_size": [1], "loss": ["chunked"]}),
    values={"logits": lambda c: _kept_logits_gib(c)},
)
def full_logits_stored(c: Case) -> Column:
    return (c.loss == "plain") & (_logits_gib(c) > 8) & (_kept_logits_gib(c) > 8)


def _kept_logits_gib(c: Case) -> Column:
    """Return the logits at the estimated peak, or by bytes per logit without an estimate."""
    return _logits_gib(c) if c.memory is None else c.memory.logits


def _logits_gib(c: Case) -> Column:
    """Return the logits memory of the plain loss: 16-bit and 32-bit logits and a 32-bit gradient."""
    return c.micro_batch_size * c.seq_length / c.cp * c.vocab * 10 / GIB
