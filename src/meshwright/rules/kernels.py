"""Attention kernels, compilation and the loss."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import not_, one_of

ATTENTION: dict[str, tuple[str, ...]] = {
    "megatron": ("auto", "flash", "te", "cudnn", "eager"),
    "torchtitan": ("auto", "flash", "sdpa", "flex", "cudnn"),
    "kempnerforge": ("auto", "flash", "sdpa", "cudnn", "eager"),
    "automodel": ("auto", "flash", "te", "cudnn", "sdpa", "flex", "eager"),
    "deepspeed": ("auto", "flash", "sdpa", "eager"),
    "fsdp1": ("auto", "flash", "sdpa", "flex", "eager"),
}


@rule(
    "kernels.attention-supported",
    "error",
    "attention",
    engines=tuple(ATTENTION),
    message="{engine} has no {attention} attention",
    symptom="an unknown attention backend",
    cause="engines bring different kernels",
    fixes=({"attention": ["auto"]},),
)
def attention_is_offered(c: Case) -> Column:
    return not_(one_of(c.attention, ATTENTION.get(c.engine, (c.attention,))))


@rule(
    "kernels.eager-attention",
    "warning",
    "attention",
    message="eager attention stores the scores of {seq_length} × {seq_length} tokens",
    symptom="out of memory, or attention takes most of the step",
    cause="without a fused kernel memory and traffic grow with the square of the sequence",
    fixes=({"attention": ["auto"]},),
)
def attention_is_fused(c: Case) -> Column:
    return (c.attention == "eager") & (c.seq_length / c.cp > 2048) & (c.heads > 0)


@rule(
    "kernels.compiled-experts",
    "warning",
    "compile",
    engines=("kempnerforge",),
    message="compiling a mixture of experts breaks the graph at every router",
    symptom="a warning at start, long compilation and little gain",
    cause="the number of tokens per expert is known only when the step runs",
    fixes=({"compile": [False]},),
)
def experts_are_not_compiled(c: Case) -> Column:
    return c.is_moe & c.compile


@rule(
    "kernels.deterministic-loss",
    "error",
    "loss",
    engines=("megatron",),
    message="deterministic kernels cannot use the {loss} loss",
    symptom="deterministic mode refuses the fused cross-entropy",
    cause="its fused backward adds in an order that is not fixed",
    fixes=({"loss": ["vocab_parallel"]}, {"deterministic": [False]}),
)
def loss_is_repeatable(c: Case) -> Column:
    return c.deterministic & (c.loss == "fused_linear")


@rule(
    "kernels.loss-supported",
    "error",
    "loss",
    engines=("kempnerforge",),
    message="{engine} has no {loss} loss",
    symptom="an unknown loss function name",
    cause="it offers plain and chunked cross-entropy",
    fixes=({"loss": ["chunked"]},),
)
def loss_is_offered(c: Case) -> Column:
    return c.loss == "fused_linear"


@rule(
    "kernels.whole-logits",
    "advice",
    "loss",
    message="the plain loss keeps {logits:.0f} GiB of logits on one rank",
    symptom="a memory peak at the end of the forward pass that recompute does not touch",
    cause="logits of every token over the whole vocabulary, in 32 bits, with their gradient",
    fixes=({"loss": ["chunked", "vocab_parallel"]}, {"micro_batch_size": [1], "loss": ["chunked"]}),
    values={"logits": lambda c: _logits_gib(c)},
)
def logits_are_cut(c: Case) -> Column:
    return (c.loss == "plain") & (_logits_gib(c) > 8)


def _logits_gib(c: Case) -> Column:
    """Logits in 16 and 32 bits and the gradient in 32, as the plain loss holds them."""
    return c.micro_batch_size * c.seq_length / c.cp * c.vocab * 10 / 2**30
