"""Optimizers and their settings."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import NO_TP, not_, one_of


def _real_pretraining(c: Case) -> Column:
    return (c.goal == "pretrain") & not_(c.benchmark)


@rule(
    "optimizer.muon-sharded-parameters",
    "error",
    "optimizer_name",
    engines=("megatron",),
    message="muon does not support parameters sharded by {strategy}",
    symptom="assertion that Muon does not support FSDP",
    cause="it orthogonalizes full matrices",
    fixes=({"strategy": ["zero1"]}, {"optimizer_name": ["adamw"]}),
)
def muon_with_sharded_parameters(c: Case) -> Column:
    return (c.optimizer_name == "muon") & one_of(c.strategy, ("fsdp2", "megatron_fsdp"))


@rule(
    "optimizer.muon-tensor-parallel",
    "advice",
    "tp",
    message="muon gathers every matrix over tp={tp} ranks to orthogonalize it",
    symptom="a slow optimizer step that does not shrink with more GPUs",
    cause="Newton-Schulz iterations need the full matrix",
    fixes=(NO_TP,),
)
def muon_with_tensor_parallel(c: Case) -> Column:
    return (c.optimizer_name == "muon") & (c.tp > 1)


@rule(
    "optimizer.no-clipping",
    "warning",
    "clip_grad",
    message="clip_grad=0: gradients are not clipped",
    symptom="a single bad batch makes the loss jump or diverge",
    cause="clipping to norm 1 keeps rare large gradients harmless",
    fixes=({"clip_grad": [1.0]},),
)
def no_gradient_clipping(c: Case) -> Column:
    return (c.clip_grad == 0) & _real_pretraining(c)


@rule(
    "optimizer.slow-second-moment",
    "advice",
    "beta2",
    message="beta2={beta2} averages squared gradients over {window:.0f} steps",
    symptom="loss spikes in large pretraining runs",
    cause="the second moment adapts too slowly; pretraining usually takes 0.95",
    fixes=({"beta2": [0.95]},),
    values={"window": lambda c: 1 / (1 - c.beta2)},
)
def beta2_too_high(c: Case) -> Column:
    adam = one_of(c.optimizer_name, ("adamw", "adamw8bit", "schedule_free_adamw"))
    return adam & (c.beta2 > 0.99) & _real_pretraining(c) & (c.params_total > 1e9)


@rule(
    "optimizer.no-weight-decay",
    "advice",
    "weight_decay",
    message="weight_decay=0 in pretraining",
    symptom="weights grow, and the final loss is slightly worse",
    cause="nearly every published pretraining run uses a decay of 0.1",
    fixes=({"weight_decay": [0.1]},),
)
def no_weight_decay(c: Case) -> Column:
    return (c.weight_decay == 0) & _real_pretraining(c) & not_(c.is_diffusion)


@rule(
    "optimizer.plain-sgd",
    "warning",
    "optimizer_name",
    message="plain sgd for a model of {size:.1f} billion parameters",
    symptom="the loss barely decreases",
    cause="gradient scales of transformer layers differ by orders of magnitude; adaptive updates even them out",
    fixes=({"optimizer_name": ["adamw"]},),
    values={"size": lambda c: c.params_total / 1e9},
)
def plain_sgd(c: Case) -> Column:
    return (c.optimizer_name == "sgd") & not_(c.benchmark)
