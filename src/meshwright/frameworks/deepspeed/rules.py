"""What DeepSpeed refuses, replaces or never reads, as far as its own keys show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import closest
from meshwright.frameworks.common import INFINITE, Ranges, as_int, is_int, range_rule
from meshwright.frameworks.deepspeed.format_override import spell
from meshwright.frameworks.deepspeed.keys import REFUSING, SECTIONS, is_section, unread_sections
from meshwright.frameworks.deepspeed.parse import BATCH, FROM_TRAINER, data_ranks, sizes
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.deepspeed import (
    DEEPSPEED_OPTIMIZERS,
    LR_SCHEDULERS,
    TORCH_OPTIMIZERS,
    UNMAPPED_LR_SCHEDULERS,
)

ZERO = "zero_optimization."
STAGE = "zero_optimization.stage"


def _stage(ctx: RuleContext) -> int | None:
    found = ctx.get(STAGE)
    return found if is_int(found) else None


def _is_on(ctx: RuleContext, key: str) -> bool:
    return str(ctx.get(key, False)).lower() == "true"


def _device(ctx: RuleContext, part: str) -> str:
    found = ctx.get(f"{ZERO}offload_{part}.device", "none")
    return str(found) if found is not None else "none"


# Batch.


def _no_batch(ctx: RuleContext) -> Problem | None:
    if any(ctx.is_set(key) for key in BATCH[:2]):
        return None
    return Problem(
        "neither train_batch_size nor train_micro_batch_size_per_gpu is said",
        (spell(BATCH[1], 1), '"train_micro_batch_size_per_gpu": "auto" under transformers or accelerate'),
    )


def _batch_arithmetic(ctx: RuleContext) -> Problem | None:
    """The product must be exact; without the number of GPUs only a remainder is certain."""
    batch, micro, steps = sizes(ctx.parsed.settings)
    said = [ctx.parsed.settings[key] for key in BATCH if ctx.is_set(key)]
    if batch is None or any(one.unresolved for one in said) or ctx.recipe.layout.tp > 1:
        return None
    world = ctx.cluster.world if ctx.cluster else ctx.parsed.gpu_request.count
    ranks = data_ranks(ctx.recipe, ctx.parsed, world) if world else 1
    each = (micro or 1) * (steps or 1) * ranks
    exact = world is not None and micro is not None and steps is not None
    if batch == each if exact else batch % each == 0:
        return None
    parts = [f"micro batch {micro}" if micro else "", f"accumulation {steps}" if steps else ""]
    product = " × ".join([part for part in (*parts, f"{ranks} data-parallel ranks" if world else "") if part])
    fix = [spell("train_batch_size", each)] if exact else []
    if exact and batch % ((micro or 1) * ranks) == 0:
        fix.append(spell("gradient_accumulation_steps", batch // ((micro or 1) * ranks)))
    return Problem(
        f"train_batch_size={batch} is not {'' if exact else 'a multiple of '}{product} = {each}",
        tuple(fix or [spell("train_batch_size", -(-batch // each) * each)]),
        key="train_batch_size",
    )


# Number formats.


def _two_formats(ctx: RuleContext) -> Problem | None:
    half = next((key for key in ("bf16.enabled", "bfloat16.enabled") if _is_on(ctx, key)), "")
    if not half or not _is_on(ctx, "fp16.enabled"):
        return None
    return Problem("bf16 and fp16 are both enabled", (spell("fp16.enabled", False),), key="fp16.enabled")


def _needs_zero(ctx: RuleContext) -> Iterator[Problem]:
    keys = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "fp16.fp16_master_weights_and_grads")
    for key in keys:
        if _is_on(ctx, key) and _stage(ctx) == 0:
            yield Problem(f"{key} needs ZeRO stage 1, 2 or 3", (spell(STAGE, 1),), key=key)
    if _is_on(ctx, keys[1]) and not _is_on(ctx, keys[0]):
        yield Problem(f"{keys[1]} needs {keys[0]}", (spell(keys[0], True),), key=keys[1])


def _gradient_format(ctx: RuleContext) -> Problem | None:
    wanted, key = ctx.get("data_types.grad_accum_dtype"), "data_types.grad_accum_dtype"
    open_ = any(ctx.is_set(each) and ctx.get(each) is None for each in ("bf16.enabled", "fp16.enabled"))
    if wanted is None or _stage(ctx) != 0 or open_:
        return None
    half = "bf16" if _is_on(ctx, "bf16.enabled") or _is_on(ctx, "bfloat16.enabled") else ""
    params = half or ("fp16" if _is_on(ctx, "fp16.enabled") else "fp32")
    if wanted == params:
        return None
    return Problem(f"{params} parameters cannot add up gradients in {wanted} without ZeRO", (spell(STAGE, 1),), key=key)


# ZeRO.


def _beyond_stage(ctx: RuleContext) -> Iterator[Problem]:
    """What only a higher stage reads."""
    stage = _stage(ctx)
    if stage is None or not 0 <= stage <= 3:
        return
    if stage < 3 and _device(ctx, "param") != "none":
        yield Problem(
            f"offload_param is read by stage 3 only; with stage {stage} parameters stay on the GPU",
            (spell(STAGE, 3), spell(f"{ZERO}offload_param.device", None)),
            key=f"{ZERO}offload_param.device",
        )
    if stage < 1 and _device(ctx, "optimizer") != "none":
        yield Problem(
            "offload_optimizer is read from stage 1 on; without ZeRO the optimizer stays on the GPU",
            (spell(STAGE, 2), spell(f"{ZERO}offload_optimizer.device", None)),
            key=f"{ZERO}offload_optimizer.device",
        )
    if 0 < stage < 3 and _device(ctx, "optimizer") == "nvme":
        yield Problem(
            f"offloading to nvme is read by stage 3 only; with stage {stage} the optimizer stays on the GPU",
            (spell(STAGE, 3), spell(f"{ZERO}offload_optimizer.device", "cpu")),
            key=f"{ZERO}offload_optimizer.device",
        )
    names = [key for key in ctx.keys_under("zero_optimization") if key.startswith(f"{ZERO}stage3_")]
    if stage < 3 and names:
        short = ", ".join(key.removeprefix(ZERO) for key in names)
        yield Problem(f"with stage {stage} nothing reads {short}", (spell(STAGE, 3),), key=names[0])


def _no_path(ctx: RuleContext) -> Iterator[Problem]:
    for part in ("param", "optimizer"):
        key = f"{ZERO}offload_{part}."
        if _device(ctx, part) == "nvme" and not ctx.get(f"{key}nvme_path") and _stage(ctx) == 3:
            yield Problem("device nvme needs nvme_path", (spell(f"{key}nvme_path", "/local_nvme"),), key=f"{key}device")


def _part_of_optimizer(ctx: RuleContext) -> Problem | None:
    key = f"{ZERO}offload_optimizer.ratio"
    ratio = ctx.get(key)
    if not isinstance(ratio, int | float) or ratio >= 1 or _stage(ctx) == 3:
        return None
    return Problem(f"a part of the optimizer ({ratio}) is offloaded with stage 3 only", (spell(key, 1.0),), key=key)


RENAMED = {
    "cpu_offload": ("offload_optimizer", '"offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_param": ("offload_param", '"offload_param": {"device": "cpu"}'),
    "stage3_gather_fp16_weights_on_model_save": (
        "stage3_gather_16bit_weights_on_model_save",
        '"stage3_gather_16bit_weights_on_model_save": true',
    ),
}


def _renamed(ctx: RuleContext) -> Iterator[Problem]:
    for old, (new, fix) in RENAMED.items():
        if not ctx.is_set(ZERO + old):
            continue
        if ctx.keys_under(ZERO + new):
            yield Problem(f"{old} is the old name of {new}; both together are refused", (fix,), ZERO + old, "error")
        else:
            yield Problem(f"{old} is the old name of {new}", (fix,), key=ZERO + old)
    for old, new in (("bfloat16", "bf16"),):
        keys = [key for key in ctx.keys_under(old) if key != old]
        if keys and ctx.keys_under(new):
            yield Problem(f"{old} is not read beside {new}", (), key=keys[0])


def _in_stages(ctx: RuleContext) -> Problem | None:
    stages, stage = ctx.get("pipeline.stages"), _stage(ctx)
    if not isinstance(stages, int) or stages < 2 or stage is None or stage < 2:
        return None
    return Problem(f"pipelines run with ZeRO stage 1 at most, not {stage}", (spell(STAGE, 1),), key=STAGE)


def _sum_of_gradients(ctx: RuleContext) -> Problem | None:
    if ctx.get("gradient_allreduce_op") != "sum" or _stage(ctx) != 3:
        return None
    return Problem("sums of gradients are not made with stage 3", (spell("gradient_allreduce_op", "mean"),))


# Optimizer and schedule.


def _optimizer(ctx: RuleContext) -> str:
    name = ctx.get("optimizer.type")
    return str(name) if isinstance(name, str) else ""


def _untested(ctx: RuleContext) -> Problem | None:
    name = _optimizer(ctx)
    fine = ("adam", "adamw", "adagrad", "lion", "muon")
    known = name in TORCH_OPTIMIZERS or name.lower() in {each.lower() for each in DEEPSPEED_OPTIMIZERS}
    if not known or name.lower() in fine or not _stage(ctx) or _is_on(ctx, "zero_allow_untested_optimizer"):
        return None
    return Problem(
        f"ZeRO refuses {name} unless it is told to take what was never tested",
        (spell("zero_allow_untested_optimizer", True), spell("optimizer.type", "AdamW")),
        key="optimizer.type",
    )


TAKES_NO = {"adagrad": ("betas",), "rmsprop": ("betas",)}
"""Arguments that an optimizer does not have, of those that Adam has."""
TAKES = {
    "lion": "lr betas weight_decay set_grad_none",
    "sgd": "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused",
}
"""Every argument of these."""
ADAM = "lr betas eps weight_decay bias_correction adam_w_mode amsgrad set_grad_none torch_adam fp32_optimizer_states"
TORCH_ADAM = "maximize foreach fused capturable differentiable decoupled_weight_decay"
WARM = "warmup_num_steps warmup_type last_batch_iteration"
SCHEDULER_TAKES = {
    "WarmupLR": f"{WARM} warmup_min_lr warmup_max_lr",
    "WarmupDecayLR": f"{WARM} warmup_min_lr warmup_max_lr total_num_steps",
    "WarmupCosineLR": f"{WARM} warmup_min_ratio cos_min_ratio total_num_steps",
    "OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
    "decay_mom_rate last_batch_iteration",
    "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
    "last_batch_iteration",
}
"""Every argument of Adam, of torch's own besides, and of the schedulers."""


def _no_such_argument(ctx: RuleContext) -> Iterator[Problem]:
    optimizer, scheduler = _optimizer(ctx), ctx.get("scheduler.type")
    refused = {f"optimizer.params.{name}": optimizer for name in TAKES_NO.get(optimizer.lower(), ())}
    if optimizer.lower() in ("adam", "adamw"):
        more = TORCH_ADAM if _is_on(ctx, "optimizer.params.torch_adam") else ""
        refused |= dict.fromkeys(_besides(ctx, "optimizer.params.", f"{ADAM} {more}"), optimizer)
    if optimizer.lower() in TAKES:
        refused |= dict.fromkeys(_besides(ctx, "optimizer.params.", TAKES[optimizer.lower()]), optimizer)
    if scheduler in SCHEDULER_TAKES:
        refused |= dict.fromkeys(_besides(ctx, "scheduler.params.", SCHEDULER_TAKES[scheduler]), scheduler)
    for key, name in refused.items():
        if ctx.is_set(key):
            yield Problem(f"{name} takes no {key.rpartition('.')[2]}", (spell(key, None),), key=key)


def _besides(ctx: RuleContext, prefix: str, taken: str) -> list[str]:
    """Keys below a prefix that exist for others, and not among those that are taken."""
    rows = {key for key, word in config_keys("deepspeed").items() if word.status == "read"}
    return [key for key in ctx.keys_under(prefix[:-1]) if key in rows and key.removeprefix(prefix) not in taken.split()]


def _slow_on_host(ctx: RuleContext) -> Problem | None:
    """Only some optimizers have a version for the host."""
    name = _optimizer(ctx).lower()
    if not name or not _stage(ctx) or _device(ctx, "optimizer") == "none":
        return None
    if name == "lamb":
        return Problem("Lamb runs on GPUs only", (spell("optimizer.type", "AdamW"),), "optimizer.type", "error")
    if name in ("adam", "adamw") and _is_on(ctx, "optimizer.params.torch_adam"):
        return Problem(
            "torch's Adam updates the offloaded optimizer on the host; DeepSpeed's own is several times as fast",
            (spell("optimizer.params.torch_adam", None),),
            key="optimizer.params.torch_adam",
        )
    if name in {each.lower() for each in TORCH_OPTIMIZERS}:
        return Problem(
            f"{_optimizer(ctx)} has no version for the host: torch's runs there, slowly",
            (spell("optimizer.type", "AdamW"),),
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
            f"there is no scheduler {name}{hint}",
            tuple(spell("scheduler.type", each) for each in near),
            "scheduler.type",
        )
    if name in ("WarmupDecayLR", "WarmupCosineLR") and not ctx.is_set(f"{params}total_num_steps"):
        yield Problem(
            f"{name} needs total_num_steps",
            (spell(f"{params}total_num_steps", 10000), '"total_num_steps": "auto" under transformers or accelerate'),
            key="scheduler.type",
        )
    least, most = ctx.get(f"{params}warmup_min_lr"), ctx.get(f"{params}warmup_max_lr")
    if _number(least) and _number(most) and least > most:
        yield Problem(
            f"the warm-up falls: warmup_min_lr={least} is above warmup_max_lr={most}",
            (spell(f"{params}warmup_min_lr", 0),),
            key=f"{params}warmup_min_lr",
        )
    steps, warm = ctx.get(f"{params}total_num_steps"), ctx.get(f"{params}warmup_num_steps")
    if _number(steps) and _number(warm) and steps < warm:
        yield Problem(
            f"total_num_steps={steps} is less than warmup_num_steps={warm}: the peak is never reached",
            (spell(f"{params}warmup_num_steps", max(1, int(steps) // 100)),),
            f"{params}total_num_steps",
            "warning",
        )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _two_peaks(ctx: RuleContext) -> Iterator[Problem]:
    """The scheduler sets the learning rate, whatever the optimizer's own."""
    name, key = ctx.get("scheduler.type"), "scheduler.params.warmup_max_lr"
    rate, peak = ctx.get("optimizer.params.lr"), ctx.get(key)
    if name not in ("WarmupLR", "WarmupDecayLR") or not _number(rate):
        return
    if ctx.is_set(key) and _number(peak) and peak != rate:
        yield Problem(
            f"the peak is warmup_max_lr={peak}; optimizer.params.lr={rate} is overwritten",
            (spell(key, rate),),
            key="optimizer.params.lr",
        )
    elif name == "WarmupDecayLR" and not ctx.is_set(key) and rate != 0.001:
        yield Problem(
            f"without warmup_max_lr WarmupDecayLR peaks at 0.001; optimizer.params.lr={rate} is overwritten",
            (spell(key, rate),),
            key="optimizer.params.lr",
        )


# Other sections.


def _contiguous(ctx: RuleContext) -> Iterator[Problem]:
    part = "activation_checkpointing."
    if not _is_on(ctx, f"{part}contiguous_memory_optimization"):
        return
    key = f"{part}contiguous_memory_optimization"
    if not _is_on(ctx, f"{part}partition_activations"):
        yield Problem("one block of memory needs cut activations", (spell(f"{part}partition_activations", True),), key)
    if not ctx.get(f"{part}number_checkpoints"):
        layers = ctx.case.layers if ctx.case else 32
        yield Problem(
            "one block of memory needs the number of checkpoints", (spell(f"{part}number_checkpoints", layers),), key
        )


def _shared_sequence(ctx: RuleContext) -> Iterator[Problem]:
    key = "sequence_parallel_size"
    size = as_int(ctx.parsed.settings.get(key))
    if not size:
        return
    world = ctx.cluster.world if ctx.cluster else ctx.parsed.gpu_request.count
    if world and world % size:
        yield Problem(f"{size} ranks per sequence do not divide {world} GPUs", (spell(key, 1),), key=key)
    if ctx.case is not None and ctx.case.heads and ctx.case.heads % size:
        yield Problem(f"{size} ranks per sequence do not divide {ctx.case.heads} heads", (spell(key, 1),), key=key)


def _cut_with_stage_3(ctx: RuleContext) -> Problem | None:
    size = ctx.get("tensor_parallel.autotp_size")
    if not isinstance(size, int) or size < 2 or _stage(ctx) != 3:
        return None
    return Problem(
        f"autotp_size={size} together with stage 3 was never shown to work: stages 0 to 2 are", (spell(STAGE, 2),)
    )


def _not_a_section(ctx: RuleContext) -> Iterator[Problem]:
    for key, said in ctx.parsed.settings.items():
        empty = said.value is None and (key in ("aio", "datastates_ckpt") or key.startswith(ZERO))
        if not is_section(key) or isinstance(said.value, dict) or empty or said.unresolved:
            continue
        fix = f'"{key.rsplit(".", 1)[-1]}": {{"enabled": {"true" if said.value else "false"}}}'
        yield Problem(f"{key} is a section, not {said.value!r}", (fix,) if key in REFUSING else (), key=key)


def _unread(ctx: RuleContext) -> Iterator[Problem]:
    from difflib import get_close_matches

    for section, key in unread_sections(ctx.parsed.settings).items():
        near = get_close_matches(section, SECTIONS, 1, 0.75)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield Problem(f"DeepSpeed reads the section {section} nowhere{hint}", key=key)


RAW_TRUTHS = (
    "prescale_gradients", "dump_state", "disable_allgather", "wall_clock_breakdown", "memory_breakdown",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "torch_autocast.enabled",
    "activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.contiguous_memory_optimization",
)  # fmt: skip
RAW_NUMBERS = (
    *BATCH, "gradient_clipping", "gradient_predivide_factor", "optimizer.params.lr", "optimizer.params.eps",
    "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "sequence_parallel_size",
)  # fmt: skip
"""Values that are taken as they stand; the other sections turn a text into what they need."""


def _quoted(ctx: RuleContext) -> Iterator[Problem]:
    for key in (*RAW_TRUTHS, *RAW_NUMBERS):
        said = ctx.parsed.settings.get(key)
        if said is None or said.unresolved or not isinstance(said.value, str) or not said.file.endswith(".json"):
            continue
        text = said.value.strip().lower()
        if key in RAW_TRUTHS and text == "false":
            yield Problem(
                f'{key} is the text "{said.value}", and any text counts as true', (_bare(key, text),), key=key
            )
        elif key in RAW_NUMBERS and _is_number(text):
            yield Problem(f'{key} is the text "{said.value}", not a number', (_bare(key, text),), key=key)


def _bare(key: str, text: str) -> str:
    return f'"{key.rsplit(".", 1)[-1]}": {text}'


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


FILLED = {
    *BATCH,
    *(key for keys in FROM_TRAINER.values() for key in keys),
    "optimizer.params.betas",
    "scheduler.params.warmup_min_lr",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "data_types.keep_in_fp32_modules",
}


def _nobody_fills(ctx: RuleContext) -> Iterator[Problem]:
    for key, said in ctx.parsed.settings.items():
        if (
            said.value == "auto"
            and said.unresolved
            and key not in FILLED
            and not key.startswith(("expert_parallel", "zero_optimization.zenflow", "autotuning"))
        ):
            yield Problem(f"neither transformers nor accelerate fills in auto for {key}", key=key)


AT_LEAST_0 = (0.0, INFINITE, False)
RANGES: Ranges = {
    "scheduler.params.warmup_num_steps": (0.0, INFINITE, True),
    "zero_optimization.reduce_bucket_size": (0.0, INFINITE, True),
    "fp16.loss_scale": AT_LEAST_0,
    **dict.fromkeys(
        (
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.sub_group_size",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance",
            "zero_optimization.zero_hpz_partition_size",
        ),
        AT_LEAST_0,
    ),
    "zero_optimization.offload_optimizer.ratio": (0.0, 1.0, False),
}

REFUSED = "ValidationError while the config is read"
RULES = (
    FrameworkRule(
        "deepspeed.no-batch-size",
        "error",
        BATCH[:2],
        _no_batch,
        symptom="AssertionError: either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
        cause="the third of batch, micro batch and accumulation can be told from two of them, not from none",
    ),
    FrameworkRule(
        "deepspeed.batch-arithmetic",
        "error",
        BATCH,
        _batch_arithmetic,
        symptom="AssertionError: train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size",
        cause="every data-parallel rank works through accumulation micro batches per step; nothing is rounded",
        supersedes=("batch.divides", "batch.smaller-than-data-parallel"),
    ),
    range_rule("deepspeed", RANGES, spell, "an assertion or a ValidationError while the config is read"),
    FrameworkRule(
        "deepspeed.two-formats",
        "error",
        ("fp16.enabled",),
        _two_formats,
        symptom="AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled",
        cause="parameters have one format",
    ),
    FrameworkRule(
        "deepspeed.format-needs-zero",
        "error",
        (),
        _needs_zero,
        symptom="AssertionError: … is only supported with ZeRO Stage 1, 2, or 3",
        cause="ZeRO's optimizers keep the master copy; without ZeRO it is always fp32",
    ),
    FrameworkRule(
        "deepspeed.gradient-format",
        "error",
        ("data_types.grad_accum_dtype",),
        _gradient_format,
        symptom="NotImplementedError: unsupported mix of model_dtype and grad_accum_dtype",
        cause="without ZeRO gradients are those of torch, in the format of the parameters",
    ),
    FrameworkRule(
        "deepspeed.beyond-its-stage",
        "warning",
        (),
        _beyond_stage,
        symptom="none: the keys are accepted and memory is as without them",
        cause="each stage reads its own part of zero_optimization",
    ),
    FrameworkRule(
        "deepspeed.no-nvme-path",
        "error",
        (),
        _no_path,
        symptom="an assertion or TypeError about nvme_path when the model or the optimizer is set up",
        cause="there is no usual place for a fast local disk",
    ),
    FrameworkRule(
        "deepspeed.part-of-optimizer",
        "error",
        ("zero_optimization.offload_optimizer.ratio",),
        _part_of_optimizer,
        symptom="AssertionError: Partial offloading only supported for ZeRO Stage 3",
        cause="only stage 3 updates in groups, of which some can stay on the GPU",
    ),
    FrameworkRule(
        "deepspeed.renamed",
        "warning",
        (),
        _renamed,
        symptom="a line in the log that the parameter is deprecated",
        cause="the key got a new name",
    ),
    FrameworkRule(
        "deepspeed.pipeline-with-gradients-shared",
        "error",
        (STAGE,),
        _in_stages,
        symptom="AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        cause="gradients of a pipeline stage stay whole until the last micro batch",
        supersedes=("strategy.deepspeed-pipeline",),
    ),
    FrameworkRule(
        "deepspeed.sum-of-gradients",
        "error",
        ("gradient_allreduce_op",),
        _sum_of_gradients,
        symptom="ValueError: gradient_allreduce_op='sum' is not supported with ZeRO stage 3",
        cause="stage 3 averages inside its own reduction",
    ),
    FrameworkRule(
        "deepspeed.untested-optimizer",
        "error",
        ("optimizer.type",),
        _untested,
        symptom="AssertionError: You are using an untested ZeRO Optimizer",
        cause="ZeRO cuts the optimizer's state, which only some update rules bear",
    ),
    FrameworkRule(
        "deepspeed.optimizer-argument",
        "error",
        (),
        _no_such_argument,
        symptom="TypeError: __init__() got an unexpected keyword argument",
        cause="params are handed to the optimizer and to the scheduler as they stand",
    ),
    FrameworkRule(
        "deepspeed.slow-on-host",
        "warning",
        ("optimizer.type",),
        _slow_on_host,
        symptom="a step that takes many times as long, in the optimizer",
        cause="an offloaded optimizer runs on the host's cores, for which DeepSpeed has Adam, Adagrad and Lion",
    ),
    FrameworkRule(
        "deepspeed.scheduler",
        "error",
        ("scheduler.type",),
        _scheduler,
        symptom="a missing argument, an unknown name, or a learning rate that runs the wrong way",
        cause="the scheduler is made from its type and params as they stand",
    ),
    FrameworkRule(
        "deepspeed.two-peaks",
        "warning",
        ("optimizer.params.lr",),
        _two_peaks,
        symptom="training at another learning rate than the optimizer's",
        cause="the scheduler sets the learning rate of every step",
    ),
    FrameworkRule(
        "deepspeed.contiguous-checkpoints",
        "error",
        (),
        _contiguous,
        symptom="AssertionError when activation checkpointing is configured",
        cause="the block is laid out before the first layer runs",
    ),
    FrameworkRule(
        "deepspeed.shared-sequence",
        "error",
        ("sequence_parallel_size",),
        _shared_sequence,
        symptom="an assertion on the number of heads or ranks when the groups are built",
        cause="the ranks of one sequence exchange it for whole heads",
    ),
    FrameworkRule(
        "deepspeed.cut-with-stage-3",
        "warning",
        ("tensor_parallel.autotp_size",),
        _cut_with_stage_3,
        symptom="errors about shapes, or a loss that is wrong",
        cause="both would cut the same matrices",
    ),
    FrameworkRule(
        "deepspeed.not-a-section",
        "error",
        (),
        _not_a_section,
        symptom="TypeError or AttributeError while the config is read",
        cause="the parts of a section are looked up by name",
    ),
    FrameworkRule(
        "deepspeed.unread-section",
        "warning",
        (),
        _unread,
        symptom="none: unknown names at the top are skipped",
        cause="only known names are looked up",
    ),
    FrameworkRule(
        "deepspeed.quoted",
        "error",
        (),
        _quoted,
        symptom="TypeError: '>' not supported between instances of 'str' and 'int'; or a switch that is always on",
        cause="JSON tells texts from numbers, and this value is used as it stands",
    ),
    FrameworkRule(
        "deepspeed.nobody-fills",
        "error",
        (),
        _nobody_fills,
        symptom="ValueError: … not found in kwargs. Please specify … without auto",
        cause="auto is a word of transformers and accelerate, for a fixed list of keys",
    ),
)
