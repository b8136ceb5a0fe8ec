"""What AutoModel refuses or replaces in the model, its kernels, its optimizer and its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import closest, some
from meshwright.frameworks.automodel.accessors import as_int, size, text
from meshwright.frameworks.automodel.derived_fields import is_benchmark
from meshwright.frameworks.automodel.extra_keys import ARGUMENTS, NARROW
from meshwright.frameworks.automodel.format_override import spell
from meshwright.frameworks.automodel.values import strategy_of
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext

SCOPES = ("all", "language", "vision", "audio", "multimodal")

TORCH_ADAM = ("torch.optim.adam", "torch.optim.adamw")

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def _router_recomputed(ctx: RuleContext) -> Problem | None:
    if ctx.get("distributed.moe.ignore_router_for_ac") is not False or ctx.recipe.layout.recompute == "none":
        return None
    return Problem(
        "the router is recomputed and may choose other experts the second time",
        (spell("distributed.moe.ignore_router_for_ac", True),),
    )


def _expert_plan(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.case is None or not ctx.case.is_moe or ctx.get("model.force_hf") is True:
        return
    fresh = text(ctx, "model._target_").endswith("from_config") and ctx.get("model.load_base_model") is not True
    if size(ctx, "tp") > 1 and fresh:
        yield Problem(
            "tensor parallelism of a mixture of experts needs pretrained weights: from_config is refused",
            (spell("distributed.tp_size", 1),),
            key="distributed.tp_size",
        )
    key = "distributed.moe.wrap_outer_model"
    if ctx.get(key) is False and bool(ctx.case.tied) and ctx.is_set(key):
        yield Problem(
            "wrap_outer_model=false is refused where head and embedding are one", (spell(key, True),), key=key
        )


PACKED = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")


def _packs(ctx: RuleContext) -> bool:
    return any(as_int(ctx, key) for key in PACKED)


def _context_packed(ctx: RuleContext) -> Problem | None:
    if size(ctx, "cp") == 1 or not _packs(ctx):
        return None
    kernel, hugging = text(ctx, "model.backend.attn"), ctx.get("model.force_hf") is True
    if kernel in ("te", "magi", "tilelang") and not hugging:
        return None
    if not kernel and not hugging and (ctx.case is None or bool(ctx.case.is_moe)):
        return None  # a model of its own may take te by itself
    why = "a model of transformers packs with cp_size=1 only" if hugging or not kernel else f"{kernel} cannot do it"
    return Problem(f"packing over context ranks: {why}", (spell("packed_sequence.packed_sequence_size", 0),))


def _context_kernel(ctx: RuleContext) -> Problem | None:
    if size(ctx, "cp") == 1:
        return None
    kernel = text(ctx, "model.backend.attn")
    case = ctx.case
    own = case is not None and bool(case.is_moe) and ctx.get("model.force_hf") is not True
    plain = case is not None and not case.mamba_heads and not case.delta_v_heads
    if own and plain and kernel in ("sdpa", "flex", "eager"):
        return Problem(
            f"this model's {kernel} attention cannot run over cp_size={size(ctx, 'cp')} ranks",
            (spell("model.backend.attn", "te"),),
        )
    asked = text(ctx, "model.attn_implementation")
    if not kernel and asked and asked != "sdpa":
        key = "model.attn_implementation"
        return Problem(f"cp_size above 1 replaces {asked} by sdpa", (spell(key, "sdpa"),), key=key, severity="warning")
    return None


def _packing_disabled(ctx: RuleContext) -> Problem | None:
    strategy = ctx.get("packed_sequence.packing_strategy", "thd")
    if ctx.get("model.force_hf") is not True or strategy != "thd" or not as_int(ctx, PACKED[0]) or size(ctx, "cp") > 1:
        return None
    return Problem(
        "a model of transformers takes no seq_lens: its data are not packed",
        (spell("packed_sequence.packing_strategy", "neat"),),
        key=PACKED[0],
    )


SWITCHED_OFF = {
    "peft.use_triton": ("tp", "pp"),
    "model.use_liger_kernel": ("tp", "cp"),
    "model.backend.rope_fusion": ("cp",),
}
"""Kernels, and the degrees that turn them off."""


def _switched_off(ctx: RuleContext) -> Iterator[Problem]:
    for key, degrees in SWITCHED_OFF.items():
        name = next((name for name in degrees if size(ctx, name) > 1), "")
        if ctx.get(key) is True and name:
            message = f"{key.rpartition('.')[2]} is turned off by {name}_size={size(ctx, name)}"
            yield Problem(message, (spell(key, False),), key=key)


def _consolidation(ctx: RuleContext) -> Problem | None:
    key, kind = "checkpoint.save_consolidated", ctx.get("checkpoint.model_save_format")
    if kind != "torch_save" or ctx.recipe.goal == "peft" or not ctx.is_set(key):
        return None
    if str(ctx.get(key)).lower() == "false" or ctx.get("checkpoint.enabled") is False:
        return None
    return Problem(
        "nothing is consolidated of torch_save checkpoints",
        (spell("checkpoint.model_save_format", "safetensors"),),
        key=key,
    )


def _optimizer_argument(ctx: RuleContext) -> Iterator[Problem]:
    name = text(ctx, "optimizer._target_")
    if name not in ARGUMENTS:
        return
    known = ARGUMENTS[name]
    for key in ctx.keys_under("optimizer"):
        argument = key.removeprefix("optimizer.").split(".")[0].split("[")[0]
        if argument not in (*known, "_target_", "param_group_overrides"):
            near = closest(argument, known, 1)
            fix = (spell(f"optimizer.{near[0]}", ctx.get(key)),) if near else ()
            yield Problem(f"{name} takes no {argument}; it takes {some(known, 6)}", fix, key=key)


def _narrow_moments(ctx: RuleContext) -> Problem | None:
    stored = str(ctx.get("model.torch_dtype") or ctx.get("model.dtype") or "").lower()
    torch_adam = text(ctx, "optimizer._target_").lower() in TORCH_ADAM
    if ctx.recipe.goal == "peft" or not torch_adam or stored not in NARROW:
        return None
    if is_benchmark(ctx.parsed.settings):
        return None
    key = "model.torch_dtype" if ctx.is_set("model.torch_dtype") else "model.dtype"
    return Problem(
        "torch's Adam keeps its moments as the weights are stored, in bf16", (spell(key, "float32"),), key=key
    )


def _experts_replaced(ctx: RuleContext) -> Problem | None:
    kernel, dispatcher = text(ctx, "model.backend.experts"), text(ctx, "model.backend.dispatcher")
    if kernel not in ("te", "gmm") or dispatcher != "torch":
        return None
    return Problem(
        f"experts={kernel} needs the deepep or hybridep dispatcher: torch_mm is used instead",
        (spell("model.backend.dispatcher", "deepep"),),
        key="model.backend.experts",
    )


def _te_fp8(ctx: RuleContext) -> Problem | None:
    asks = [key for key in ctx.keys_under("model.backend.te_fp8") if ctx.get(key) is not None]
    linear, experts = ctx.get("model.backend.linear", "te"), ctx.get("model.backend.experts")
    if not asks or linear == "te" or experts == "te":
        return None
    return Problem("te_fp8 needs linear or experts of te", (spell("model.backend.linear", "te"),), key=asks[0])


def _warm_up(ctx: RuleContext) -> Iterator[Problem]:
    if not ctx.keys_under("lr_scheduler"):
        return
    warm = as_int(ctx, "lr_scheduler.lr_warmup_steps")
    end = as_int(ctx, "lr_scheduler.lr_decay_steps") or as_int(ctx, "step_scheduler.max_steps")
    if warm is not None and end is not None and warm >= end:
        yield Problem(
            f"{warm} warm-up steps, and the decay ends at step {end}",
            (spell("lr_scheduler.lr_warmup_steps", end // 10),),
            key="lr_scheduler.lr_warmup_steps",
        )
    style, key = ctx.get("lr_scheduler.lr_decay_style"), "lr_scheduler.lr_decay_style"
    if isinstance(style, str) and style not in STYLES and style.lower() in {name.lower() for name in STYLES}:
        meant = next(name for name in STYLES if name.lower() == style.lower())
        yield Problem(f"there is no decay style {style}: case matters", (spell(key, meant),), key=key)
    elif style == "WSD" and ctx.get("lr_scheduler.wsd_decay_steps") is None:
        last = max(1, end // 5) if end else 1000
        yield Problem("WSD needs wsd_decay_steps", (spell("lr_scheduler.wsd_decay_steps", last),), key=key)


def _not_sharded(ctx: RuleContext) -> Problem | None:
    value = ctx.get("distributed.zero_dp_strategy")
    if strategy_of(ctx.parsed.settings) != "megatron_fsdp" or value == 3 or not isinstance(value, int):
        return None
    return Problem(f"zero_dp_strategy={value} does not shard parameters", (spell("distributed.zero_dp_strategy", 3),))


def _nan_check(ctx: RuleContext) -> Problem | None:
    key = "distributed.check_for_nan_in_grad"
    if not ctx.is_set(key) or ctx.get(key) is not True or strategy_of(ctx.parsed.settings) != "megatron_fsdp":
        return None
    return Problem("nothing is checked any more", (spell("distributed.report_nan_in_param_grad", True),), key=key)


def _packing_unseen(ctx: RuleContext) -> Problem | None:
    key = "distributed.patch_is_packed_sequence"
    if ctx.get(key) is not True or not _packs(ctx):
        return None
    return Problem("attention is told that nothing is packed, and the data are", (spell(key, False),), key=key)


def _scope(ctx: RuleContext) -> Problem | None:
    value: Any = ctx.get("distributed.activation_checkpointing_scope")
    parts = [str(part).strip().lower() for part in (value if isinstance(value, list) else str(value).split(","))]
    wrong = [part for part in parts if part not in (*SCOPES, "default", "auto", "none", "")]
    if not wrong and not ("all" in parts and len(set(parts)) > 1):
        return None
    key = "distributed.activation_checkpointing_scope"
    message = f"there is no scope {wrong[0]}" if wrong else "the scope all cannot be combined with others"
    return Problem(f"{message}; there are {', '.join(SCOPES)}", (spell(key, "all"),), key=key)


MODEL = (
    FrameworkRule(
        "automodel.router-recomputed",
        "warning",
        ("distributed.moe.ignore_router_for_ac",),
        _router_recomputed,
        symptom="a CheckpointError in the backward pass when ties are broken differently",
        cause="guides still show the old default",
    ),
    FrameworkRule(
        "automodel.expert-plan",
        "error",
        ("distributed.tp_size", "distributed.moe.wrap_outer_model"),
        _expert_plan,
        symptom="ValueError once the model is built",
        cause="its own mixtures of experts support only part of what the sections can say",
    ),
    FrameworkRule(
        "automodel.cp-packing",
        "error",
        PACKED,
        _context_packed,
        symptom="ValueError: packed sequences need a context-parallel size of 1",
        cause="only kernels that know where documents end can cut packed ones over ranks",
        supersedes=("sequence.packing-over-context",),
    ),
    FrameworkRule(
        "automodel.cp-attention",
        "error",
        ("model.backend.attn",),
        _context_kernel,
        symptom="an error that names the attention backends for context parallelism",
        cause="models of transformers are moved to sdpa, its own ones need te or magi",
        supersedes=("sequence.attention-kernel",),
    ),
    FrameworkRule(
        "automodel.packing-disabled",
        "warning",
        ("packed_sequence.packed_sequence_size",),
        _packing_disabled,
        symptom="one line in the log, and padded samples",
        cause="thd packing hands over lengths that only its own models take",
    ),
    FrameworkRule(
        "automodel.kernel-disabled",
        "warning",
        tuple(SWITCHED_OFF),
        _switched_off,
        symptom="the speed of the plain kernels",
        cause="these kernels do not know cut tensors",
    ),
    FrameworkRule(
        "automodel.not-consolidated",
        "warning",
        ("checkpoint.save_consolidated",),
        _consolidation,
        symptom="a warning, and no folder that transformers can load",
        cause="only safetensors are put together again",
    ),
    FrameworkRule(
        "automodel.optimizer-argument",
        "error",
        (),
        _optimizer_argument,
        symptom="TypeError: unexpected keyword argument, after the model was loaded",
        cause="the section goes to the optimizer as it is",
    ),
    FrameworkRule(
        "automodel.bf16-moments",
        "warning",
        ("model.torch_dtype", "model.dtype"),
        _narrow_moments,
        symptom="a loss that flattens early",
        cause="there is no second copy in fp32; TE's FusedAdam with master_weights has one",
        supersedes=("precision.bf16-master",),
    ),
    FrameworkRule(
        "automodel.experts-replaced",
        "warning",
        ("model.backend.experts",),
        _experts_replaced,
        symptom="one line in the log",
        cause="these kernels expect tokens as DeepEP hands them over",
    ),
    FrameworkRule(
        "automodel.te-fp8",
        "error",
        ("model.backend.te_fp8.recipe",),
        _te_fp8,
        symptom="ValueError when the backend is read",
        cause="only layers of Transformer Engine compute in its 8-bit formats",
    ),
    FrameworkRule(
        "automodel.learning-rate",
        "error",
        ("lr_scheduler.lr_warmup_steps", "lr_scheduler.lr_decay_style"),
        _warm_up,
        symptom="an assertion without a message, or an exception at the first step after the warm-up",
        cause="the scheduler checks its numbers by assertions and its names exactly",
        supersedes=("learning_rate.warmup-too-long", "learning_rate.decay-inside-warmup"),
    ),
    FrameworkRule(
        "automodel.not-sharded",
        "warning",
        ("distributed.zero_dp_strategy",),
        _not_sharded,
        symptom="a printed warning, and far more memory per GPU",
        cause="only strategy 3 shards parameters",
    ),
    FrameworkRule(
        "automodel.nan-check",
        "warning",
        ("distributed.check_for_nan_in_grad",),
        _nan_check,
        symptom="gradients that are not numbers go unnoticed",
        cause="Megatron-FSDP 0.5.0 took the check out and kept the switch",
    ),
    FrameworkRule(
        "automodel.packing-undetected",
        "error",
        ("distributed.patch_is_packed_sequence",),
        _packing_unseen,
        symptom="documents of one sample see each other; the loss looks right",
        cause="the patch saves a synchronisation by answering no whenever transformers asks",
    ),
    FrameworkRule(
        "automodel.checkpointing-scope",
        "error",
        ("distributed.activation_checkpointing_scope",),
        _scope,
        symptom="ValueError while the section is read",
        cause="scopes are names of parts of a model, and all is all of them",
    ),
)
