"""Whether the training fits in memory. All but memory.replicated-state need an estimate (Case.memory)."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.recipes.capabilities import can_export, executed_values
from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_TP, Values, divisors, larger, not_

GIB = 2**30
TIGHT_SHARE = 0.92
IDLE_SHARE = 0.5
LIKELY, CERTAIN = 0.7, 0.9  # chances of fitting: below, it may not fit; above, the band ends below capacity


def host_memory_gib(c: Case) -> Column:
    """Return GiB of host memory that one rank's offloaded state or activations need."""
    return 0.0 if c.memory is None else c.memory.host


def offloads(*values: str) -> Values:
    """Return the offload values that fit in host memory."""
    return lambda c: [value for value in values if not bool(host_is_full(c.replace(offload=value)))]


def host_is_full(c: Case) -> Column:
    """Return where offloading needs more host memory than the node has per GPU."""
    return host_memory_gib(c) > c.host_gib


def shareable(values: Values) -> Values:
    """Return the values unless the state is too large even if all GPUs share it equally: trying them costs time."""
    return lambda c: [] if c.memory is not None and c.memory.least_state > c.capacity_gib else list(values(c))


def four_bits(c: Case) -> list[str]:
    """Return qlora for adapters on base weights in the compute format or in 8 bits; nothing for other trainings."""
    return ["qlora"] if c.goal == "peft" and c.method in ("lora", "rslora", "lora8bit") else []


CHUNKED_LOSSES = ("fused_linear", "chunked")
"""Losses without all logits at once, the leaner and faster one first."""


def chunked_losses(c: Case) -> list[str]:
    """Return the leaner losses that the engine has."""
    executed = executed_values("loss", c.engine)
    known = [loss for loss in CHUNKED_LOSSES if not executed or loss in executed]
    return [loss for loss in known if c.loss not in CHUNKED_LOSSES and can_export("loss", c.engine, loss)]


REDUCES_AT_WILL = ("meshwright", "automodel")
"""Engines whose config has a switch for layout.defer_grad_sync, so that a fix or a search may turn it.

Not derived from `recipes.capabilities`: its row says where our engine ignores the switch, and an engine without a row
executes every value that a recipe states, also those for which its config has no key a planner could write."""


def frozen_as_computed(c: Case) -> list[str]:
    """Return the value that stores frozen weights in the format of the computation, where they are wider."""
    return ["same"] if c.goal == "peft" and c.frozen != "same" else []


def reduced_at_once(c: Case) -> list[bool]:
    """Return the value that reduces gradients after every micro batch, where they wait unsharded on the GPU."""
    waits = c.defer_grad_sync and c.strategy == "fsdp2" and c.pp == 1 and c.accumulation > 1
    return [False] if waits and c.engine in REDUCES_AT_WILL else []


def resharded(c: Case) -> list[bool]:
    """Return the value that frees gathered weights after the forward pass, where FSDP keeps them: ZeRO's stage 3."""
    return [True] if c.strategy == "fsdp2" and not c.reshard_after_forward else []


def smaller_micro_batches(c: Case) -> list[int]:
    """Return smaller micro batches that leave headroom, the largest first, then 1."""
    smaller = divisors(max(int(c.micro_batch_size), 1))[-2::-1]
    changed = {size: c.replace(micro_batch_size=size) for size in smaller if size > 1}
    return [size for size in smaller if size == 1 or not bool(_is_tight(changed[size]))]


def _is_tight(c: Case) -> Column:
    """Return whether the memory may not suffice, whether or not the peak fits."""
    return (_total(c) > TIGHT_SHARE * c.capacity_gib) | (_fit_probability(c) < LIKELY)


# Cheapest first: reducing in every micro batch or a smaller one costs a little, recompute a fifth of the speed, tensor
# parallelism most.
RECOMPUTE: Fix = {"recompute": ["selective", "full"], "recompute_modules": [()]}
MEMORY_FIXES: tuple[Fix, ...] = (
    {"frozen": frozen_as_computed},
    {"defer_grad_sync": reduced_at_once},
    {"micro_batch_size": smaller_micro_batches},
    {"loss": chunked_losses},
    {"reshard_after_forward": resharded},
    RECOMPUTE,
    {"defer_grad_sync": reduced_at_once, **RECOMPUTE},
    {"micro_batch_size": [1], **RECOMPUTE},
    {"frozen": frozen_as_computed, "micro_batch_size": [1], **RECOMPUTE},
    {"defer_grad_sync": reduced_at_once, "micro_batch_size": [1], **RECOMPUTE},
    {"dp_replicate": [1], "reshard_after_forward": [True]},
    {"ep": larger("ep")},
    {"cp": larger("cp"), "micro_batch_size": [1]},
    {"pp": larger("pp"), "micro_batch_size": [1]},
    {"offload": offloads("optimizer")},
    {"tp": larger("tp"), "sp": [True], "micro_batch_size": [1]},
    {"micro_batch_size": [1], "recompute": ["full"], "recompute_modules": [()], "cp": larger("cp")},
    {"micro_batch_size": [1], "recompute": ["full"], "recompute_modules": [()], "pp": larger("pp")},
    {"micro_batch_size": [1], "recompute": ["full"], "recompute_modules": [()], "tp": larger("tp"), "sp": [True]},
    {
        "micro_batch_size": [1],
        "recompute": ["full"],
        "recompute_modules": [()],
        "offload": offloads("optimizer", "params"),
    },
    {"method": four_bits, "micro_batch_size": [1], "recompute": ["full"], "recompute_modules": [()]},
    {"frozen": frozen_as_computed, "method": four_bits, "micro_batch_size": [1], **RECOMPUTE},
)
STATE_FIXES: tuple[Fix, ...] = (
    {"frozen": frozen_as_computed},
    {"frozen": frozen_as_computed, "micro_batch_size": [1], **RECOMPUTE},
    {"frozen": frozen_as_computed, "method": four_bits},
    {"defer_grad_sync": reduced_at_once},
    {"reshard_after_forward": shareable(resharded)},
    {"strategy": shareable(lambda c: ["fsdp2", "zero1", "megatron_fsdp"])},
    {"dp_replicate": shareable(lambda c: [1]), "dp_shard": [-1]},
    {"ep": shareable(larger("ep"))},
    {"offload": offloads("optimizer")},
    {"pp": shareable(larger("pp"))},
    {"tp": shareable(larger("tp")), "sp": [True]},
    {"tp": shareable(larger("tp")), "sp": [True], "pp": larger("pp")},
    {"offload": offloads("params")},
    {"offload": offloads("params"), "micro_batch_size": [1], "recompute": ["full"], "recompute_modules": [()]},
    {"method": four_bits},
    {"method": four_bits, "micro_batch_size": [1], "recompute": ["full"], "recompute_modules": [()]},
)


def _state(c: Case) -> Column:
    memory = c.memory
    return 0.0 if memory is None else memory.weights + memory.gradients + memory.optimizer


def _total(c: Case) -> Column:
    memory = c.memory
    return 0.0 if memory is None else memory.total


def _usable(c: Case) -> Column:
    memory = c.memory
    return c.capacity_gib if memory is None else memory.usable


def _high(c: Case) -> Column:
    """Return the upper end of the error band of the total."""
    memory = c.memory
    return 0.0 if memory is None else memory.total * (1 + memory.band_pct / 100)


def _fit_probability(c: Case) -> Column:
    memory = c.memory
    return 1.0 if memory is None else memory.fit_probability


def _verdict(c: Case) -> str:
    return "it may not fit" if _fit_probability(c) < LIKELY else "little headroom"


def _fits(c: Case) -> Column:
    memory = c.memory
    return True if memory is None else memory.fits


def replicated_state_gib(c: Case) -> Column:
    """Return GiB of weights, gradients, master weights and two moments on one rank without sharding."""
    bytes_each = (2 + 2 * (c.frozen == "fp32")) if c.goal == "peft" else 18
    dense = (c.params_total - c.params_routed) / (c.tp * c.pp)
    return (dense + c.params_routed / (c.ep * c.etp * c.pp)) * bytes_each / GIB


@rule(
    "memory.replicated-state",
    "error",
    "strategy",
    message="ddp keeps {state:.0f} GiB of weights and optimizer state on every GPU of {capacity_gib:.0f} GiB",
    symptom="out of memory while the optimizer is built or in the first step",
    cause="plain data parallelism shards nothing: 18 bytes per parameter on every rank",
    fixes=({"strategy": ["fsdp2", "zero1", "megatron_fsdp"]},),
    values={"state": replicated_state_gib},
)
def replicated_state_too_large(c: Case) -> Column:
    return c.memory is None and (c.strategy == "ddp") & (replicated_state_gib(c) > c.capacity_gib)


@rule(
    "memory.state",
    "error",
    "strategy",
    message="weights, gradients and optimizer state alone need {state:.0f} GiB of {capacity_gib:.0f} GiB",
    symptom="out of memory before or in the first optimizer step, at any batch size",
    cause="the state is sharded over too few GPUs",
    fixes=STATE_FIXES,
    values={"state": _state},
)
def state_too_large(c: Case) -> Column:
    return _state(c) > c.capacity_gib


@rule(
    "memory.host",
    "error",
    "offload",
    message="offload={offload} needs {needed:.0f} GiB of host memory per GPU, but there are {host_gib:.0f} GiB",
    symptom="the OOM killer ends a process, or the host swaps, while the optimizer is built",
    cause="all GPUs of a node share its host memory, which is only as large as that of a few GPUs; how much there is "
    "per GPU is assumed from usual systems unless a cluster file sets host_gib",
    fixes=(
        {"offload": ["none", "optimizer"]},
        {"dp_replicate": [1], "dp_shard": [-1]},
        {"ep": larger("ep")},
        {"pp": larger("pp")},
        {"tp": larger("tp"), "sp": [True]},
        {"tp": larger("tp"), "sp": [True], "pp": larger("pp")},
    ),
    values={"needed": host_memory_gib},
)
def host_memory_too_small(c: Case) -> Column:
    return host_is_full(c)


@rule(
    "memory.peak",
    "error",
    "micro_batch_size",
    message="the estimated peak is {total:.1f} GiB of {usable:.1f} GiB usable",
    symptom="out of memory in the first or second step",
    cause="activations and buffers do not fit next to the state",
    fixes=MEMORY_FIXES,
    values={"total": _total, "usable": _usable},
)
def peak_too_large(c: Case) -> Column:
    return not_(_fits(c)) & (_state(c) <= c.capacity_gib)


@rule(
    "memory.tight",
    "warning",
    "micro_batch_size",
    message="the estimated peak is {total:.1f} of {capacity_gib:.1f} GiB (up to {high:.1f} GiB): {verdict}",
    symptom="may run out of memory on a long sample, in an unbalanced expert step or after hours",
    cause="estimates have an error band, and memory fragments",
    fixes=MEMORY_FIXES,
    values={"total": _total, "high": _high, "verdict": _verdict},
)
def peak_without_headroom(c: Case) -> Column:
    return np.asarray(_fits(c)) & _is_tight(c)


@rule(
    "memory.uncertain",
    "advice",
    "micro_batch_size",
    message="the estimated peak is {total:.1f} of {capacity_gib:.1f} GiB, but up to {high:.1f} GiB are within its band",
    symptom="may run out of memory in the first steps",
    cause="few runs of this kind were measured, so the error band of the estimate is wide",
    fixes=MEMORY_FIXES,
    values={"total": _total, "high": _high},
)
def peak_uncertain(c: Case) -> Column:
    crosses = (_fit_probability(c) < CERTAIN) & (_high(c) > _usable(c))
    return np.asarray(_fits(c)) & crosses & not_(peak_without_headroom(c))


def _with(c: Case, **change: Any) -> Column:
    """Return the total memory of the changed case as a share of the GPU's memory."""
    changed = c.replace(**change).memory
    return np.inf if changed is None else changed.total / c.capacity_gib


def _leaves_headroom(c: Case, **change: Any) -> Column:
    """Return whether the changed case would leave enough headroom."""
    return _with(c, **change) < TIGHT_SHARE - 0.07


@rule(
    "memory.recompute-not-needed",
    "advice",
    "recompute",
    message="full recompute is not needed, less also fits ({total:.0f} GiB of {capacity_gib:.0f} GiB used now)",
    symptom="a quarter to a third of the step is spent on recomputing activations",
    cause="there is enough memory to keep them",
    fixes=({"recompute": ["none", "selective"], "recompute_layers": [0]},),
    values={"total": _total},
)
def unneeded_recompute(c: Case) -> Column:
    return (c.recompute == "full") & _leaves_headroom(
        c, recompute="selective", recompute_modules=(), recompute_layers=0
    )


@rule(
    "memory.tensor-parallel-not-needed",
    "advice",
    "tp",
    engines=("meshwright", "torchtitan", "automodel", "kempnerforge"),
    message="tp={tp} is not needed, sharded data parallelism alone fits",
    symptom="communication in every layer that a purely sharded run does not have",
    cause="sharding alone is faster wherever it fits",
    fixes=(NO_TP,),
)
def unneeded_tensor_parallel(c: Case) -> Column:
    fed = c.global_batch_size >= c.dp * c.tp
    return (c.tp > 1) & (c.strategy == "fsdp2") & fed & _leaves_headroom(c, tp=1, sp=False, tp_comm_overlap=False)


@rule(
    "memory.offload-not-needed",
    "advice",
    "offload",
    message="offload={offload} is not needed, everything fits on the GPU",
    symptom="the GPU waits for the host link",
    cause="there is enough GPU memory without it",
    fixes=({"offload": ["none"]},),
)
def unneeded_offload(c: Case) -> Column:
    return (c.offload != "none") & _leaves_headroom(c, offload="none")


@rule(
    "memory.underused",
    "advice",
    "micro_batch_size",
    message="only {total:.0f} GiB of {capacity_gib:.0f} GiB are used, with {accumulation} micro batches per step",
    symptom="small matmuls, more kernel launches and more gathers than needed",
    cause="a larger micro batch would fit",
    fixes=({"micro_batch_size": lambda c: [int(c.micro_batch_size) * times for times in (2, 4, 8, 16, 32)]},),
    values={"total": _total},
)
def memory_underused(c: Case) -> Column:
    known = _total(c) > 0
    doubled = _leaves_headroom(c, micro_batch_size=c.micro_batch_size * 2)
    idle = (_total(c) < IDLE_SHARE * c.capacity_gib) & (c.accumulation % 2 == 0) & (c.pp == 1)
    return known & idle & doubled & not_(c.packing)
