"""DeepSpeed's rules on the optimizer and the learning-rate scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import closest
from meshwright.frameworks.deepspeed.format_override import format_setting
from meshwright.frameworks.deepspeed.keys import TYPED_SECTIONS
from meshwright.frameworks.deepspeed.rules.common import is_on, offload_device, stage_of
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.other_versions import MAY_ACCEPT
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.deepspeed import (
    DEEPSPEED_OPTIMIZERS,
    LR_SCHEDULERS,
    TORCH_OPTIMIZERS,
    UNMAPPED_LR_SCHEDULERS,
)
from meshwright.rules.learning_rate import short_warmup


def _optimizer(ctx: RuleContext) -> str:
    name = ctx.get("optimizer.type")
    return str(name) if isinstance(name, str) else ""


def _untested_optimizer(ctx: RuleContext) -> Problem | None:
    name = _optimizer(ctx)
    tested = ("adam", "adamw", "adagrad", "lion", "muon")
    known = name in TORCH_OPTIMIZERS or name.lower() in {each.lower() for each in DEEPSPEED_OPTIMIZERS}
    if not known or name.lower() in tested or not stage_of(ctx) or is_on(ctx, "zero_allow_untested_optimizer"):
        return None
    return Problem(
        f"ZeRO rejects {name} unless zero_allow_untested_optimizer is set",
        (format_setting("zero_allow_untested_optimizer", True), format_setting("optimizer.type", "AdamW")),
        key="optimizer.type",
    )


UNSUPPORTED_ARGUMENTS = {"adagrad": ("betas",), "rmsprop": ("betas",)}
"""Adam arguments that an optimizer does not accept."""
OPTIMIZER_ARGUMENTS = {
    "lion": "lr betas weight_decay set_grad_none",
    "sgd": "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused",
}
"""All arguments of these optimizers."""
ADAM_ARGUMENTS = (
    "lr betas eps weight_decay bias_correction adam_w_mode amsgrad set_grad_none torch_adam fp32_optimizer_states"
)
TORCH_ADAM_ARGUMENTS = "maximize foreach fused capturable differentiable decoupled_weight_decay"
WARMUP_ARGUMENTS = "warmup_num_steps warmup_type last_batch_iteration"
WARMUP_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
SCHEDULER_ARGUMENTS = {
    "WarmupLR": f"{WARMUP_ARGUMENTS} warmup_min_lr warmup_max_lr",
    "WarmupDecayLR": f"{WARMUP_ARGUMENTS} warmup_min_lr warmup_max_lr total_num_steps",
    "WarmupCosineLR": f"{WARMUP_ARGUMENTS} warmup_min_ratio cos_min_ratio total_num_steps",
    "OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
    "decay_mom_rate last_batch_iteration",
    "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
    "last_batch_iteration",
}
"""All arguments of the schedulers."""


def _unknown_argument(ctx: RuleContext) -> Iterator[Problem]:
    optimizer, scheduler = _optimizer(ctx), ctx.get("scheduler.type")
    unsupported = {f"optimizer.params.{name}": optimizer for name in UNSUPPORTED_ARGUMENTS.get(optimizer.lower(), ())}
    if optimizer.lower() in ("adam", "adamw"):
        more = TORCH_ADAM_ARGUMENTS if is_on(ctx, "optimizer.params.torch_adam") else ""
        unsupported |= dict.fromkeys(_unsupported_keys(ctx, "optimizer.params.", f"{ADAM_ARGUMENTS} {more}"), optimizer)
    if optimizer.lower() in OPTIMIZER_ARGUMENTS:
        unsupported |= dict.fromkeys(
            _unsupported_keys(ctx, "optimizer.params.", OPTIMIZER_ARGUMENTS[optimizer.lower()]), optimizer
        )
    if scheduler in SCHEDULER_ARGUMENTS:
        unsupported |= dict.fromkeys(
            _unsupported_keys(ctx, "scheduler.params.", SCHEDULER_ARGUMENTS[scheduler]), scheduler
        )
    for key, name in unsupported.items():
        if ctx.is_set(key):
            yield Problem(f"{name} does not accept {key.rpartition('.')[2]}", (format_setting(key, None),), key=key)


def _unsupported_keys(ctx: RuleContext, prefix: str, accepted: str) -> list[str]:
    """Return the known keys under a prefix that are not in `accepted`."""
    known = {key for key, row in config_keys("deepspeed").items() if row.status == "read"}
    return [
        key for key in ctx.keys_under(prefix[:-1]) if key in known and key.removeprefix(prefix) not in accepted.split()
    ]


def _slow_cpu_optimizer(ctx: RuleContext) -> Problem | None:
    """Only some optimizers have a CPU implementation."""
    name = _optimizer(ctx).lower()
    if not name or not stage_of(ctx) or offload_device(ctx, "optimizer") == "none":
        return None
    if name == "lamb":
        return Problem(
            "Lamb has no CPU implementation and cannot be offloaded",
            (format_setting("optimizer.type", "AdamW"),),
            "optimizer.type",
            "error",
        )
    if name in ("adam", "adamw") and is_on(ctx, "optimizer.params.torch_adam"):
        return Problem(
            "torch_adam runs the offloaded optimizer with torch's Adam; DeepSpeed's CPUAdam is several times faster",
            (format_setting("optimizer.params.torch_adam", None),),
            key="optimizer.params.torch_adam",
        )
    if name in {each.lower() for each in TORCH_OPTIMIZERS}:
        return Problem(
            f"{_optimizer(ctx)} has no fast CPU implementation: the offloaded optimizer runs torch's, slowly",
            (format_setting("optimizer.type", "AdamW"),),
            key="optimizer.type",
        )
    return None


def _scheduler(ctx: RuleContext) -> Iterator[Problem]:
    name, params = ctx.get("scheduler.type"), "scheduler.params."
    if not isinstance(name, str):
        return
    torch = name.endswith(("LR", "Scheduler", "Restarts", "OnPlateau")) and name not in LR_SCHEDULERS
    if name not in LR_SCHEDULERS and name not in UNMAPPED_LR_SCHEDULERS and not torch:
        near = closest(name, (*LR_SCHEDULERS, *UNMAPPED_LR_SCHEDULERS), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield Problem(
            f"unknown scheduler {name}{hint}",
            tuple(format_setting("scheduler.type", each) for each in near),
            "scheduler.type",
        )
    if name in ("WarmupDecayLR", "WarmupCosineLR") and not ctx.is_set(f"{params}total_num_steps"):
        yield Problem(
            f"{name} requires total_num_steps",
            (
                format_setting(f"{params}total_num_steps", 10000),
                '"total_num_steps": "auto" under transformers or accelerate',
            ),
            key="scheduler.type",
        )
    low, high = ctx.get(f"{params}warmup_min_lr"), ctx.get(f"{params}warmup_max_lr")
    if _is_number(low) and _is_number(high) and low > high:
        yield Problem(
            f"warmup_min_lr={low} is above warmup_max_lr={high}",
            (format_setting(f"{params}warmup_min_lr", 0),),
            key=f"{params}warmup_min_lr",
        )
    steps, warmup = ctx.get(f"{params}total_num_steps"), ctx.get(f"{params}warmup_num_steps")
    if _is_number(steps) and _is_number(warmup) and steps < warmup:
        yield Problem(
            f"total_num_steps={steps} is less than warmup_num_steps={warmup}: the peak is never reached",
            (format_setting(f"{params}warmup_num_steps", short_warmup(int(steps))),),
            f"{params}total_num_steps",
            "warning",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lr_overridden(ctx: RuleContext) -> Iterator[Problem]:
    """The scheduler overrides the optimizer's learning rate."""
    name, key = ctx.get("scheduler.type"), "scheduler.params.warmup_max_lr"
    rate, peak = ctx.get("optimizer.params.lr"), ctx.get(key)
    if name not in ("WarmupLR", "WarmupDecayLR") or not _is_number(rate):
        return
    if ctx.is_set(key) and _is_number(peak) and peak != rate:
        yield Problem(
            f"optimizer.params.lr={rate} is overridden by warmup_max_lr={peak}",
            (format_setting(key, rate),),
            key="optimizer.params.lr",
        )
    elif name == "WarmupDecayLR" and not ctx.is_set(key) and rate != 0.001:
        yield Problem(
            f"optimizer.params.lr={rate} is overridden: without warmup_max_lr, WarmupDecayLR peaks at 0.001",
            (format_setting(key, rate),),
            key="optimizer.params.lr",
        )


WITHOUT_TYPE = {"optimizer": "the run has no optimizer", "scheduler": "the learning rate has no warmup and no decay"}


def _zero_warmup(ctx: RuleContext) -> Problem | None:
    """The schedulers of 0.19 refuse a warmup of no steps; those before it warm up for two."""
    key = "scheduler.params.warmup_num_steps"
    if ctx.get("scheduler.type") not in WARMUP_TYPES or not ctx.is_set(key) or ctx.get(key) != 0:
        return None
    return Problem(
        f"warmup_num_steps=0: DeepSpeed 0.19 needs a positive integer; {MAY_ACCEPT}", (format_setting(key, 1),), key=key
    )


def _no_type(ctx: RuleContext) -> Iterator[Problem]:
    """A section without a type: the Trainer leaves its part to DeepSpeed, and DeepSpeed creates nothing."""
    for section in TYPED_SECTIONS:
        inside = [key for key in ctx.parsed.settings if key == section or key.startswith(f"{section}.")]
        if inside and not ctx.is_set(f"{section}.type"):
            yield Problem(
                f"{section} has no type: DeepSpeed creates none, and the Trainer leaves it to DeepSpeed because the "
                f"config has the section: {WITHOUT_TYPE[section]}; name a type, or remove the section",
                (format_setting(section, None),),
                key=inside[0],
            )


RULES = (
    FrameworkRule("deepspeed.zero-warmup", "warning", ("scheduler.params.warmup_num_steps",), _zero_warmup,
        symptom="ValueError: warmup_num_steps must be a positive integer",
        cause="its schedulers validate the warmup since 0.19; before, they warmed up for two steps"),
    FrameworkRule("deepspeed.no-type", "error", (), _no_type,
        symptom="the learning rate stays constant, or the engine has no optimizer",
        cause="DeepSpeed builds an optimizer and a scheduler only if their sections name a type"),
    FrameworkRule("deepspeed.untested-optimizer", "error", ("optimizer.type",), _untested_optimizer,
        symptom="AssertionError: You are using an untested ZeRO Optimizer",
        cause="ZeRO shards optimizer state, which works only for some update rules"),
    FrameworkRule("deepspeed.optimizer-argument", "error", (), _unknown_argument,
        symptom="TypeError: __init__() got an unexpected keyword argument",
        cause="params are passed to the optimizer and the scheduler unchanged"),
    FrameworkRule("deepspeed.slow-cpu-optimizer", "warning", ("optimizer.type",), _slow_cpu_optimizer,
        symptom="optimizer steps are many times slower",
        cause="an offloaded optimizer runs on the CPU, where DeepSpeed has fast Adam, Adagrad and Lion"),
    FrameworkRule("deepspeed.scheduler", "error", ("scheduler.type",), _scheduler,
        symptom="a missing argument, an unknown scheduler, or a learning rate that moves the wrong way",
        cause="the scheduler is built from its type and params without checks"),
    FrameworkRule("deepspeed.lr-overridden", "warning", ("optimizer.params.lr",), _lr_overridden,
        symptom="training runs at a different learning rate than the optimizer's lr",
        cause="the scheduler sets the learning rate at every step"),
)  # fmt: skip
