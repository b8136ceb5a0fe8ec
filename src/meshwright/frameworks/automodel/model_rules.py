"""AutoModel's rules on the model, its kernels, the optimizer and the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import closest, some
from meshwright.frameworks.automodel.accessors import positive_int, size, text_value
from meshwright.frameworks.automodel.derived_fields import is_benchmark
from meshwright.frameworks.automodel.extra_keys import BF16_NAMES, OPTIMIZER_ARGUMENTS, OWN_PACKED_KERNELS
from meshwright.frameworks.automodel.format_override import format_setting
from meshwright.frameworks.automodel.values import strategy_name
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext

SCOPES = ("all", "language", "vision", "audio", "multimodal")

TORCH_ADAM = ("torch.optim.adam", "torch.optim.adamw")

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


def _router_recomputed(ctx: RuleContext) -> Problem | None:
    if ctx.get("distributed.moe.ignore_router_for_ac") is not False or ctx.recipe.layout.recompute == "none":
        return None
    return Problem(
        "the router is recomputed and may select different experts the second time",
        (format_setting("distributed.moe.ignore_router_for_ac", True),),
    )


def _expert_plan(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.case is None or not ctx.case.is_moe or ctx.get("model.force_hf") is True:
        return
    fresh = text_value(ctx, "model._target_").endswith("from_config") and ctx.get("model.load_base_model") is not True
    if size(ctx, "tp") > 1 and fresh:
        yield Problem(
            "tensor parallelism of an MoE model requires pretrained weights, not from_config",
            (format_setting("distributed.tp_size", 1),),
            key="distributed.tp_size",
        )
    key = "distributed.moe.wrap_outer_model"
    if ctx.get(key) is False and bool(ctx.case.tied) and ctx.is_set(key):
        yield Problem("wrap_outer_model=false does not support tied embeddings", (format_setting(key, True),), key=key)


TRAINERS = ("RecipeForNextTokenPrediction", "FinetuneRecipeForVLM", "RecipeForSequenceClassification")
"""Ends of the recipe classes that read model, dataset and optimizer as attributes of the config."""
MODEL_NAME = "model.pretrained_model_name_or_path"


def _missing(ctx: RuleContext) -> Iterator[Problem]:
    recipe = text_value(ctx, "recipe") or text_value(ctx, "recipe._target_")
    settings = ctx.parsed.settings
    if not recipe.endswith(TRAINERS) or not settings:
        return
    for block in ("model", "dataset", "optimizer"):
        if not any(key == block or key.startswith((f"{block}.", f"{block}[")) for key in settings):
            yield Problem(f"{recipe.rpartition('.')[2]} requires the block {block}", key="recipe")
    pretrained = text_value(ctx, "model._target_").endswith("from_pretrained")
    if pretrained and MODEL_NAME not in settings and f"{MODEL_NAME}_or_config" not in settings:
        yield Problem(f"from_pretrained requires {MODEL_NAME.partition('.')[2]}", key="model._target_")


PACKING_KEYS = ("packed_sequence.packed_sequence_size", "packed_sequence.pack_size")


def _is_packed(ctx: RuleContext) -> bool:
    return any(positive_int(ctx, key) for key in PACKING_KEYS)


def _longer_than_pack(ctx: RuleContext) -> Problem | None:
    """Samples longer than a pack are dropped, or stop the packing."""
    pack = next((found for key in PACKING_KEYS if (found := positive_int(ctx, key))), None)
    length = positive_int(ctx, "dataset.seq_length")
    if not pack or not length or length <= pack:
        return None
    return Problem(
        f"samples have up to {length:,} tokens, but a pack holds {pack:,}: longer samples are dropped",
        (format_setting("dataset.seq_length", pack),),
        key="dataset.seq_length",
    )


def _cp_packing(ctx: RuleContext) -> Problem | None:
    if size(ctx, "cp") == 1 or not _is_packed(ctx):
        return None
    kernel, is_transformers = text_value(ctx, "model.backend.attn"), ctx.get("model.force_hf") is True
    if kernel in ("te", "magi", "tilelang") and not is_transformers:
        return None
    model = ctx.parsed.model
    if not is_transformers and (model is None or model.hf_class.startswith(OWN_PACKED_KERNELS)):
        return None  # the model decides
    if not kernel and not is_transformers and (ctx.case is None or bool(ctx.case.is_moe)):
        return None  # AutoModel's own models may use te by default
    reason = (
        "transformers models require cp_size=1" if is_transformers or not kernel else f"{kernel} does not support it"
    )
    return Problem(
        f"packing with context parallelism: {reason}", (format_setting("packed_sequence.packed_sequence_size", 0),)
    )


def _cp_attention(ctx: RuleContext) -> Problem | None:
    if size(ctx, "cp") == 1:
        return None
    kernel = text_value(ctx, "model.backend.attn")
    case = ctx.case
    is_own_model = case is not None and bool(case.is_moe) and ctx.get("model.force_hf") is not True
    attention_only = case is not None and not case.mamba_heads and not case.delta_v_heads
    if is_own_model and attention_only and kernel in ("sdpa", "flex", "eager"):
        return Problem(
            f"{kernel} attention of this model does not support cp_size={size(ctx, 'cp')}",
            (format_setting("model.backend.attn", "te"),),
        )
    implementation = text_value(ctx, "model.attn_implementation")
    if not kernel and implementation and implementation != "sdpa":
        key = "model.attn_implementation"
        return Problem(
            f"cp_size above 1 replaces {implementation} with sdpa",
            (format_setting(key, "sdpa"),),
            key=key,
            severity="warning",
        )
    return None


def _packing_disabled(ctx: RuleContext) -> Problem | None:
    strategy = ctx.get("packed_sequence.packing_strategy", "thd")
    if (
        ctx.get("model.force_hf") is not True
        or strategy != "thd"
        or not positive_int(ctx, PACKING_KEYS[0])
        or size(ctx, "cp") > 1
    ):
        return None
    return Problem(
        "transformers models do not accept seq_lens: the data is not packed",
        (format_setting("packed_sequence.packing_strategy", "neat"),),
        key=PACKING_KEYS[0],
    )


DISABLED_BY = {
    "peft.use_triton": ("tp", "pp"),
    "model.use_liger_kernel": ("tp", "cp"),
    "model.backend.rope_fusion": ("cp",),
}
"""Kernels, and the axes that disable them."""


def _kernel_disabled(ctx: RuleContext) -> Iterator[Problem]:
    for key, degrees in DISABLED_BY.items():
        name = next((name for name in degrees if size(ctx, name) > 1), "")
        if ctx.get(key) is True and name:
            message = f"{key.rpartition('.')[2]} is disabled by {name}_size={size(ctx, name)}"
            yield Problem(message, (format_setting(key, False),), key=key)


def _not_consolidated(ctx: RuleContext) -> Problem | None:
    key, save_format = "checkpoint.save_consolidated", ctx.get("checkpoint.model_save_format")
    if save_format != "torch_save" or ctx.recipe.goal == "peft" or not ctx.is_set(key):
        return None
    if str(ctx.get(key)).lower() == "false" or ctx.get("checkpoint.enabled") is False:
        return None
    return Problem(
        "save_consolidated has no effect on torch_save checkpoints",
        (format_setting("checkpoint.model_save_format", "safetensors"),),
        key=key,
    )


def _optimizer_argument(ctx: RuleContext) -> Iterator[Problem]:
    name = text_value(ctx, "optimizer._target_")
    if name not in OPTIMIZER_ARGUMENTS:
        return
    known = OPTIMIZER_ARGUMENTS[name]
    for key in ctx.keys_under("optimizer"):
        argument = key.removeprefix("optimizer.").split(".")[0].split("[")[0]
        if argument not in (*known, "_target_", "param_group_overrides"):
            near = closest(argument, known, 1)
            fix = (format_setting(f"optimizer.{near[0]}", ctx.get(key)),) if near else ()
            hint = f"did you mean {near[0]}?" if near else f"it accepts {some(known, 6)}"
            yield Problem(f"{name} does not accept {argument}; {hint}", fix, key=key)


def _bf16_moments(ctx: RuleContext) -> Problem | None:
    stored = str(ctx.get("model.torch_dtype") or ctx.get("model.dtype") or "").lower()
    torch_adam = text_value(ctx, "optimizer._target_").lower() in TORCH_ADAM
    if ctx.recipe.goal == "peft" or not torch_adam or stored not in BF16_NAMES:
        return None
    if is_benchmark(ctx.parsed.settings):
        return None
    key = "model.torch_dtype" if ctx.is_set("model.torch_dtype") else "model.dtype"
    return Problem(
        "torch's Adam keeps its moments in the storage dtype, bf16", (format_setting(key, "float32"),), key=key
    )


def _experts_replaced(ctx: RuleContext) -> Problem | None:
    kernel, dispatcher = text_value(ctx, "model.backend.experts"), text_value(ctx, "model.backend.dispatcher")
    if kernel not in ("te", "gmm") or dispatcher != "torch":
        return None
    return Problem(
        f"experts={kernel} requires the deepep or hybridep dispatcher: torch_mm is used instead",
        (format_setting("model.backend.dispatcher", "deepep"),),
        key="model.backend.experts",
    )


def _te_fp8(ctx: RuleContext) -> Problem | None:
    keys = [key for key in ctx.keys_under("model.backend.te_fp8") if ctx.get(key) is not None]
    linear, experts = ctx.get("model.backend.linear", "te"), ctx.get("model.backend.experts")
    if not keys or linear == "te" or experts == "te":
        return None
    return Problem(
        "te_fp8 requires model.backend.linear or model.backend.experts to be te",
        (format_setting("model.backend.linear", "te"),),
        key=keys[0],
    )


def _learning_rate(ctx: RuleContext) -> Iterator[Problem]:
    if not ctx.keys_under("lr_scheduler"):
        return
    warmup = positive_int(ctx, "lr_scheduler.lr_warmup_steps")
    end = positive_int(ctx, "lr_scheduler.lr_decay_steps") or positive_int(ctx, "step_scheduler.max_steps")
    if warmup is not None and end is not None and warmup >= end:
        yield Problem(
            f"lr_warmup_steps={warmup} is not below the end of the decay at step {end}",
            (format_setting("lr_scheduler.lr_warmup_steps", end // 10),),
            key="lr_scheduler.lr_warmup_steps",
        )
    style, key = ctx.get("lr_scheduler.lr_decay_style"), "lr_scheduler.lr_decay_style"
    if (
        isinstance(style, str)
        and style not in DECAY_STYLES
        and style.lower() in {name.lower() for name in DECAY_STYLES}
    ):
        meant = next(name for name in DECAY_STYLES if name.lower() == style.lower())
        yield Problem(f"unknown decay style {style}: names are case-sensitive", (format_setting(key, meant),), key=key)
    elif style == "WSD" and ctx.get("lr_scheduler.wsd_decay_steps") is None:
        last = max(1, end // 5) if end else 1000
        yield Problem("WSD requires wsd_decay_steps", (format_setting("lr_scheduler.wsd_decay_steps", last),), key=key)


def _not_sharded(ctx: RuleContext) -> Problem | None:
    value = ctx.get("distributed.zero_dp_strategy")
    if strategy_name(ctx.parsed.settings) != "megatron_fsdp" or value == 3 or not isinstance(value, int):
        return None
    return Problem(
        f"zero_dp_strategy={value} does not shard parameters", (format_setting("distributed.zero_dp_strategy", 3),)
    )


def _nan_check(ctx: RuleContext) -> Problem | None:
    key = "distributed.check_for_nan_in_grad"
    if not ctx.is_set(key) or ctx.get(key) is not True or strategy_name(ctx.parsed.settings) != "megatron_fsdp":
        return None
    return Problem(
        "check_for_nan_in_grad has no effect", (format_setting("distributed.report_nan_in_param_grad", True),), key=key
    )


def _packing_undetected(ctx: RuleContext) -> Problem | None:
    key = "distributed.patch_is_packed_sequence"
    if ctx.get(key) is not True or not _is_packed(ctx):
        return None
    return Problem(
        "patch_is_packed_sequence disables the packing detection, but the data is packed",
        (format_setting(key, False),),
        key=key,
    )


def _checkpointing_scope(ctx: RuleContext) -> Problem | None:
    value: Any = ctx.get("distributed.activation_checkpointing_scope")
    parts = [str(part).strip().lower() for part in (value if isinstance(value, list) else str(value).split(","))]
    wrong = [part for part in parts if part not in (*SCOPES, "default", "auto", "none", "")]
    if not wrong and not ("all" in parts and len(set(parts)) > 1):
        return None
    key = "distributed.activation_checkpointing_scope"
    message = f"unknown scope {wrong[0]}" if wrong else "the scope all cannot be combined with others"
    return Problem(f"{message}; allowed: {', '.join(SCOPES)}", (format_setting(key, "all"),), key=key)


MODEL_RULES = (
    FrameworkRule("automodel.router-recomputed", "warning", ("distributed.moe.ignore_router_for_ac",),
        _router_recomputed, symptom="CheckpointError in the backward pass when routing ties are broken differently",
        cause="guides still show the old default"),
    FrameworkRule("automodel.expert-plan", "error", ("distributed.tp_size", "distributed.moe.wrap_outer_model"),
        _expert_plan, symptom="ValueError after the model is built",
        cause="AutoModel's MoE models support only some of the options"),
    FrameworkRule("automodel.cp-packing", "error", PACKING_KEYS, _cp_packing,
        symptom="ValueError: packed sequences need a context-parallel size of 1",
        cause="only kernels that know the document boundaries can split packed sequences over ranks",
        supersedes=("sequence.packing-over-context",)),
    FrameworkRule("automodel.cp-attention", "error", ("model.backend.attn",), _cp_attention,
        symptom="an error that lists the attention backends for context parallelism",
        cause="transformers models are switched to sdpa; AutoModel's own models need te or magi",
        supersedes=("sequence.attention-kernel",)),
    FrameworkRule("automodel.packing-disabled", "warning", ("packed_sequence.packed_sequence_size",),
        _packing_disabled, symptom="a log message, and padded samples",
        cause="thd packing passes seq_lens, which only AutoModel's own models accept"),
    FrameworkRule("automodel.kernel-disabled", "warning", tuple(DISABLED_BY), _kernel_disabled,
        symptom="the speed of the default kernels", cause="these kernels do not support sharded tensors"),
    FrameworkRule("automodel.not-consolidated", "warning", ("checkpoint.save_consolidated",), _not_consolidated,
        symptom="a warning, and no checkpoint that transformers can load",
        cause="only safetensors checkpoints are consolidated"),
    FrameworkRule("automodel.optimizer-argument", "error", (), _optimizer_argument,
        symptom="TypeError: unexpected keyword argument, after loading the model",
        cause="the section is passed to the optimizer unchanged"),
    FrameworkRule("automodel.missing", "error", ("recipe", "model._target_"), _missing,
        symptom="AttributeError or TypeError when the recipe is set up",
        cause="the recipe reads these blocks without a default"),
    FrameworkRule("automodel.longer-than-pack", "warning", ("dataset.seq_length",), _longer_than_pack,
        symptom="fewer samples than expected, or no packs at all", cause="a sample is never split over two packs"),
    FrameworkRule("automodel.bf16-moments", "warning", ("model.torch_dtype", "model.dtype"), _bf16_moments,
        symptom="a loss that flattens early",
        cause="there are no fp32 master weights; TE's FusedAdam with master_weights keeps them",
        supersedes=("precision.bf16-master",)),
    FrameworkRule("automodel.experts-replaced", "warning", ("model.backend.experts",), _experts_replaced,
        symptom="a log message", cause="these kernels expect DeepEP's token layout"),
    FrameworkRule("automodel.te-fp8", "error", ("model.backend.te_fp8.recipe",), _te_fp8,
        symptom="ValueError when the backend is read", cause="only Transformer Engine layers support its FP8 recipes"),
    FrameworkRule("automodel.learning-rate", "error", ("lr_scheduler.lr_warmup_steps", "lr_scheduler.lr_decay_style"),
        _learning_rate, symptom="AssertionError without a message, or an exception at the first step after the warmup",
        cause="the scheduler asserts its step counts and compares names exactly",
        supersedes=("learning_rate.warmup-too-long", "learning_rate.decay-inside-warmup")),
    FrameworkRule("automodel.not-sharded", "warning", ("distributed.zero_dp_strategy",), _not_sharded,
        symptom="a warning, and far more memory per GPU", cause="only strategy 3 shards parameters"),
    FrameworkRule("automodel.nan-check", "warning", ("distributed.check_for_nan_in_grad",), _nan_check,
        symptom="NaN gradients go unnoticed", cause="Megatron-FSDP 0.5.0 removed the check and kept the option"),
    FrameworkRule("automodel.packing-undetected", "error", ("distributed.patch_is_packed_sequence",),
        _packing_undetected, symptom="packed documents attend to each other; the loss looks normal",
        cause="the patch avoids a device sync by always returning False from transformers' packing check"),
    FrameworkRule("automodel.checkpointing-scope", "error", ("distributed.activation_checkpointing_scope",),
        _checkpointing_scope, symptom="ValueError while the section is read",
        cause="scopes name parts of the model, and all already includes every part"),
)  # fmt: skip
