"""Checks of ms-swift's SftArguments and the arguments that it derives from."""

from __future__ import annotations

from functools import partial
from typing import Any

from meshwright.frameworks.start_checks.groups import EVAL_BATCH, group_checks
from meshwright.frameworks.start_checks.trainer import FLASH_PLACE, IN_FIRST_STEP, computes_in_fp32
from meshwright.frameworks.start_checks.types import Changes, Given, StartCheck, Table, together

FLASH = ("flash_attn", "flash_attention_2", "flash_attention_3", "flash_attention_4")
ADAPTER_RATE, FULL_RATE = 1e-4, 1e-5  # defaults of learning_rate
SFT = "swift/arguments/sft_args.py: SftArguments"
BASE = "swift/arguments/base_args"


def _without_flash(given: Given, key: str) -> bool:
    return given.is_on(key) and given.text("attn_impl") not in FLASH


def _saves(key: str) -> Any:
    """Return a default that is the value of another key: evaluations follow the saves."""
    return lambda given: given.get(key)


def _has_validation_data(given: Given) -> bool:
    """Return whether there is data to evaluate; a streamed dataset is not split."""
    split = (given.number("split_dataset_ratio") or 0) > 0 and not given.is_on("streaming")
    return split or given.any_on("val_dataset", "cached_val_dataset", "eval_dataset")


def _best_without_data(given: Given) -> bool:
    evaluates = given.text("eval_strategy") not in ("no", "false")
    keeps_best = given.is_on("load_best_model_at_end") and given.text("save_strategy") != "best"
    return keeps_best and evaluates and not _has_validation_data(given)


def _with_validation_data(given: Given) -> Changes:
    if given.is_on("streaming") or given.text("save_strategy") in ("no", "false"):
        return {"load_best_model_at_end": False}
    return {"split_dataset_ratio": 0.01}


PARTLY_TRAINED = (
    *("freeze_llm", "freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio", "trainable_parameters"),
    *("trainable_parameters_regex", "optimizer", "use_galore", "external_plugins"),
)
"""Keys with which a training without adapters updates a part of the weights, or in another way."""


def _full_at_adapter_rate(given: Given) -> bool:
    """Return whether all weights are trained at ms-swift's default rate of adapters; higher rates have a rule."""
    return (
        "full" in (given.text("tuner_type"), given.text("train_type"))
        and given.number("learning_rate") == ADAPTER_RATE
        and not given.any_on(*PARTLY_TRAINED)
        and given.text("task_type") in ("", "causal_lm")
    )


def _of_grpo(given: Given, check: StartCheck) -> bool:
    runs = check.key != EVAL_BATCH or _has_validation_data(given)  # without data, ms-swift turns evaluations off
    return runs and given.text("rlhf_type") == "grpo" and check.broken(given)


MS_SWIFT = Table(
    "ms-swift",
    {"save_strategy": "steps", "save_steps": 500, "eval_strategy": _saves("save_strategy"),
        "eval_steps": _saves("save_steps"), "logging_steps": 5,
        "bf16": lambda given: given.text("torch_dtype") == "bfloat16",
        "fp16": lambda given: given.text("torch_dtype") in ("float16", "float32")},
    (
        StartCheck("load_best_model_at_end", _best_without_data,
            "{load_best_model_at_end} needs evaluations, and without val_dataset, split_dataset_ratio and eval_dataset "
            "ms-swift sets eval_strategy to no", _with_validation_data, f"{SFT}.__post_init__"),
        StartCheck("packing", lambda given: _without_flash(given, "packing"),
            "{packing} needs flash attention, not {attn_impl}", {"attn_impl": "flash_attn"},
            f"{SFT}._check_padding_free"),
        StartCheck("padding_free",
            lambda given: _without_flash(given, "padding_free") and not given.is_on("packing"),
            "{padding_free} needs flash attention, not {attn_impl}", {"attn_impl": "flash_attn"},
            f"{SFT}._check_padding_free"),
        StartCheck("torch_dtype",
            lambda given: given.is_on("bf16", "fp16") and not (given.is_stated("bf16") and given.is_stated("fp16")),
            "{torch_dtype} turns on one of bf16 and fp16, and the other one is on as well", {"torch_dtype": None},
            f"{BASE}/model_args.py: ModelArguments._init_mixed_precision"),
        StartCheck("attn_impl",
            lambda given: given.text("attn_impl") in FLASH and given.text("torch_dtype") == "float32"
            and computes_in_fp32(given),
            "{attn_impl} takes fp16 or bf16, but {torch_dtype} and mixed precision is off", {"bf16": True},
            FLASH_PLACE, effect=IN_FIRST_STEP),
        StartCheck("lazy_tokenize", together("lazy_tokenize", "packing"),
            "{packing} and {lazy_tokenize} exclude each other", {"lazy_tokenize": False},
            f"{BASE}/base_args.py: BaseArguments._init_lazy_tokenize"),
        StartCheck("lazy_tokenize", together("lazy_tokenize", "streaming"),
            "{streaming} and {lazy_tokenize} exclude each other", {"lazy_tokenize": False},
            f"{BASE}/base_args.py: BaseArguments._init_lazy_tokenize"),
        StartCheck("fsdp", together("fsdp", "deepspeed"), "{fsdp} and {deepspeed} exclude each other", {"fsdp": None},
            f"{SFT}._init_fsdp"),
        StartCheck("quant_bits",
            lambda given: given.text("quant_method") in ("bnb", "hqq", "eetq", "quanto")
            and not given.is_on("quant_bits"),
            "{quant_method} needs quant_bits", {"quant_bits": 4},
            f"{BASE}/quant_args.py: QuantizeArguments.get_quantization_config"),
        StartCheck("quant_bits",
            lambda given: given.text("quant_method") == "bnb" and given.text("quant_bits") not in ("", "4", "8"),
            "{quant_method} has 4 or 8 bits, not {quant_bits}", {"quant_bits": 4},
            f"{BASE}/quant_args.py: QuantizeArguments.get_quantization_config"),
    ),
)  # fmt: skip
GENERATED = Table(
    "ms-swift",
    {"num_generations": 8, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1},
    tuple(
        one._replace(broken=partial(_of_grpo, check=one))
        for one in group_checks("swift/rlhf_trainers/args_mixin.py: _init_generation_batch_params")
    ),
)
"""Checks of `swift rlhf`; its gradient_accumulation_steps depend on the processes if they are not set."""
FINE_TUNING = Table(
    "ms-swift",
    {},
    (
        StartCheck("learning_rate", _full_at_adapter_rate,
            "{learning_rate} is high for full fine-tuning: it is the default of adapters", {"learning_rate": FULL_RATE},
            f"{SFT}._init_override", "warning", rule="learning_rate.fine-tuning",
            effect="has 1e-5 by default if all weights are trained"),
    ),
)  # fmt: skip
"""Checks of `swift sft`, not of `swift pt`, which continues a pretraining."""
