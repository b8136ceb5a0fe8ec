"""Recipe fields without a single AutoModel key: derived from several keys, or from missing ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.frameworks.automodel.extra_keys import BF16_NAMES, SHORT_DATASETS
from meshwright.frameworks.automodel.values import axis_size, setting_value, strategy_name, text_setting
from meshwright.frameworks.common import KEEP_ALL
from meshwright.frameworks.types import Settings
from meshwright.models import Mamba2, ModelSpec
from meshwright.recipes.adapter_targets import as_groups, target_names
from meshwright.recipes.key_maps.megatron_lm_composite_keys import validation_part
from meshwright.recipes.replacements import WarmupShare
from meshwright.recipes.types import Goal

WARMUP_STEPS = "lr_scheduler.lr_warmup_steps"
DEFAULT_WARMUP = WarmupShare(0.1, most=1000, rounds_down=True)  # min(1000, total_steps // 10)
DEFAULT_SPLIT = "900,50,50"  # of MegatronPretraining: training, validation, test

LORA_TARGETS = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "q_a_proj", "q_b_proj", "kv_b_proj"),
    "proj": ("o_proj", "dense", "out_proj"),
    "fc1": ("gate_proj", "up_proj", "gate_up_proj", "fc1", "gate_and_up_projs"),
    "fc2": ("down_proj", "fc2", "down_projs"),
    "mamba_in": ("in_proj",),
    "mamba_out": ("mixer.out_proj",),
}

DEFAULT_TARGETS = ("qkv", "proj", "fc1", "fc2")


def model_name(settings: Settings) -> str:
    """Return the Hugging Face id or path of the model."""
    keys = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config")
    return next((text for text in (text_setting(settings, place) for place in keys) if text), "")


def loads_weights(settings: Settings) -> bool:
    """Return whether the model starts from the weights that it names, and not only with their shape."""
    named = setting_value(settings, "model.load_base_model")
    by_name = text_setting(settings, "model._target_").endswith("from_pretrained")
    return named is True or (named is not False and by_name)


def is_benchmark(settings: Settings) -> bool:
    """Return whether a file is a benchmark: by its recipe, or by a benchmark block with mock data."""
    recipe = text_setting(settings, "recipe") or text_setting(settings, "recipe._target_")
    mock = "mock" in text_setting(settings, "dataset._target_").lower()
    return "enchmark" in recipe or (mock and any(key.startswith("benchmark.") for key in settings))


def assumptions(settings: Settings) -> Iterator[str]:
    if not _has_length(settings):
        yield f"no sequence length is set: {_default_length(settings)} tokens are assumed"
    if "dataloader.dynamic_batching.max_tokens_per_batch" in settings:
        yield "batches are filled by tokens: local_batch_size is not the micro batch"


def assumed_fields(settings: Settings) -> tuple[str, ...]:
    """Return the recipe fields whose values are assumed because the file does not set them."""
    return () if _has_length(settings) else ("data.seq_length",)


def _has_length(settings: Settings) -> bool:
    lengths = ("dataset.seq_len", "dataset.seq_length", "dataset.max_length")
    sizes = (settings.get(f"packed_sequence.{name}") for name in ("packed_sequence_size", "pack_size"))
    packed = any(setting is not None and (setting.unresolved or setting.value) for setting in sizes)
    return packed or any(key in settings for key in lengths)


def _default_length(settings: Settings) -> int:
    dataset = text_setting(settings, "dataset._target_").lower()
    return 512 if any(name in dataset for name in SHORT_DATASETS) else 2048


def derived_values(settings: Settings, model: ModelSpec | None, goal: Goal, recipe: str) -> Mapping[str, Any]:
    """Return the derived field values."""
    fields: dict[str, Any] = {}
    if not _has_length(settings):
        fields["data.seq_length"] = _default_length(settings)
    elif (max_length := _max_sample_length(settings)) is not None:
        fields["data.seq_length"] = max_length
    if text_setting(settings, "dataset.padding") == "max_length":
        fields["data.pad_to_max_length"] = True
    if not any(key.startswith("dataset.") for key in settings):
        fields["data.dataset"] = "unknown"
    if goal == "pretrain" and model is not None and model.moe is not None and model.moe.balance_bias:
        fields["moe.balancing"] = "bias"  # its gates update the bias that the architecture has
    if text_setting(settings, "dataset._target_").rpartition(".")[2].startswith("MegatronPretraining"):
        split = setting_value(settings, "dataset.split")
        parts = ",".join(map(str, split)) if isinstance(split, list) else text_setting(settings, "dataset.split")
        fields["data.validation_part"] = validation_part(parts or DEFAULT_SPLIT)
    if goal == "pretrain":
        fields["train.epochs"] = 0.0  # random tokens and blends are not counted
    else:
        fields["train.per_token_loss"] = True  # its recipes divide by the label tokens of the whole step
    if "VLM" in recipe:
        fields["data.images"] = True
    if "KnowledgeDistillation" in recipe and goal != "peft" and _torch_storage_open(settings):
        fields |= {"precision.master": "fp32", "precision.moments": "fp32"}
    if goal == "pretrain":  # the name also names the shape of a model without weights
        loaded = loads_weights(settings) and not is_benchmark(settings)
        fields["checkpoint.pretrained"] = model_name(settings) if loaded else ""
    elif model is not None and model_name(settings) == model.hf_id:
        fields["checkpoint.pretrained"] = ""
    if axis_size(settings, "pp") > 1 and "distributed.pipeline.pp_microbatch_size" not in settings:
        fields["layout.micro_batch_size"] = 1
    if isinstance(budget := setting_value(settings, "dataloader.dynamic_batching.max_tokens_per_batch"), int):
        fields["layout.micro_batch_size"] = max(1, budget // _length(settings))
    if axis_size(settings, "ep") > 1 and setting_value(settings, "distributed.reshard_after_forward") is None:
        fields["layout.reshard_after_forward"] = (
            setting_value(settings, "distributed.moe.reshard_after_forward") is True
        )
    if strategy_name(settings) == "fsdp2" and _reduces_in_bf16(settings):
        fields["precision.reduce"] = "bf16"
    if any(key.startswith("distributed.offload_policy") for key in settings):
        policy = settings.get("distributed.offload_policy")
        fields["layout.offload"] = "none" if policy is not None and policy.value is None else "params"
    if setting_value(settings, "checkpoint.max_recent_checkpoints") is None:
        fields["checkpoint.keep"] = KEEP_ALL
    fields |= _learning_rate_fields(settings)
    if goal == "peft":
        fields["peft.targets"] = _lora_targets(settings, model)
    if validation := _validation(settings):
        fields["data.validation"] = validation
    return fields


def _torch_storage_open(settings: Settings) -> bool:
    """Return whether a torch optimizer trains weights whose storage dtype the file leaves open."""
    stored = str(setting_value(settings, "model.torch_dtype") or "auto")
    return stored == "auto" and text_setting(settings, "optimizer._target_").startswith("torch.optim.")


def _reduces_in_bf16(settings: Settings) -> bool:
    """Return whether mp_policy leaves reduce_dtype unset: a custom policy replaces the whole default."""
    keys = [key for key in settings if key.startswith("distributed.mp_policy.")]
    is_bf16 = str(setting_value(settings, "distributed.mp_policy.param_dtype")) in BF16_NAMES
    return bool(keys) and "distributed.mp_policy.reduce_dtype" not in keys and is_bf16


def _length(settings: Settings) -> int:
    lengths = (setting_value(settings, f"dataset.{name}") for name in ("seq_length", "seq_len", "max_length"))
    return next((value for value in lengths if isinstance(value, int) and value > 0), _default_length(settings))


def _max_sample_length(settings: Settings) -> int | None:
    """Return the maximum sample length of a vision-language dataset that is not packed."""
    length = setting_value(settings, "dataset.max_length")
    overridden = "dataset.seq_length" in settings or setting_value(settings, "packed_sequence.pack_size")
    return length if isinstance(length, int) and length > 0 and not overridden else None


def _learning_rate_fields(settings: Settings) -> dict[str, Any]:
    """Return derived fields of the optimizer and the learning-rate schedule."""
    fields: dict[str, Any] = {}
    optimizer = text_setting(settings, "optimizer._target_")
    if optimizer.endswith("optim.Adam") and "optimizer.weight_decay" not in settings:
        fields["optimizer.weight_decay"] = 0.0
    if not any(key.startswith("lr_scheduler.") for key in settings):
        return {**fields, "schedule.name": "constant", "schedule.warmup_steps": 0, "schedule.min_lr": 0.0}
    if warmup := default_warmup(settings):
        steps = setting_value(settings, "step_scheduler.max_steps")
        fields["schedule.warmup_steps"] = warmup.of(steps) if isinstance(steps, int) and steps > 0 else warmup.most
    peak = setting_value(settings, "optimizer.lr")
    if "lr_scheduler.min_lr" not in settings:
        fields["schedule.min_lr"] = 0.01 * peak if isinstance(peak, float) and peak > 0 else 1e-5
    return fields


def default_warmup(settings: Settings) -> WarmupShare:
    """Return the warmup that LRSchedulerConfig.build computes from the total steps if the file sets none."""
    scheduled = any(key.startswith("lr_scheduler.") for key in settings)
    open_value = bool(getattr(settings.get(WARMUP_STEPS), "unresolved", False))
    is_set = setting_value(settings, WARMUP_STEPS) is not None or open_value
    return DEFAULT_WARMUP if scheduled and not is_set else WarmupShare()


def _lora_targets(settings: Settings, model: ModelSpec | None) -> tuple[str, ...]:
    """Return the LoRA target groups that the target_modules patterns match."""
    mamba = ("mamba_in", "mamba_out") if model is not None and any(_is_mamba(model)) else ()
    target_modules = setting_value(settings, "peft.target_modules")
    if setting_value(settings, "peft.match_all_linear") is True or not target_modules:
        return (*DEFAULT_TARGETS, *mamba)
    names = [str(name) for name in (target_modules if isinstance(target_modules, list) else [target_modules])]
    plain = tuple(name.removeprefix("*.") for name in names)
    if set(plain) <= set(target_names()) and as_groups(plain) is None:
        return plain
    patterns = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in names]

    def matches(name: str) -> bool:
        return any(pattern.fullmatch(text) for pattern in patterns for text in (name, f"model.layers.0.x.{name}"))

    groups = tuple(group for group, linears in LORA_TARGETS.items() if any(matches(name) for name in linears))
    found = tuple(group for group in groups if group in (*DEFAULT_TARGETS, *mamba))
    return found or DEFAULT_TARGETS


def _is_mamba(model: ModelSpec) -> Iterator[bool]:
    return (isinstance(layer.mixer, Mamba2) for layer in model.layers)


def _validation(settings: Settings) -> str:
    """Return the validation dataset or split."""
    for name in ("path_or_dataset_id", "path_or_dataset", "dataset_name"):
        if text := text_setting(settings, f"validation_dataset.{name}"):
            same = text == text_setting(settings, f"dataset.{name}")
            return text_setting(settings, "validation_dataset.split") if same else text
    return ""
