"""Checks of transformers' TrainingArguments and Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.frameworks.start_checks.types import OFF, Changes, Given, StartCheck, Table, together
from meshwright.frameworks.trainer_fields import NO_VALIDATION_DATA
from meshwright.models.linear_layers import ALL, LINEAR_LAYERS, missing_targets
from meshwright.recipes.adapter_targets import STANDARD, groups_of, is_known_target, meant_targets, names_same_layers
from meshwright.similar import closest, misspelled

PLACE = "transformers/training_args.py: TrainingArguments._validate_args"
FLASH_PLACE = "transformers/integrations/flash_attention.py: get_target_dtype"
TRAINER_PLACE = "transformers/trainer.py: Trainer.__init__"
EARLY_PLACE = "transformers/trainer_callback.py: EarlyStoppingCallback.on_train_begin"
EARLY_STOPS = ("early_stopping_patience", "early_stopping_steps")  # of the callback, and of LLaMA-Factory
TUNERS = ("tuner_type", "train_type", "finetuning_type")  # keys of front ends that may train all weights
BLOCK = "block_size"  # of transformers' examples of language modeling
AT_TRAINING = "stops with an AssertionError when the training begins"


def _eval_strategy(given: Given) -> str:
    return given.text("evaluation_strategy") or "no"


def _eval_steps(given: Given) -> float:
    return given.number("logging_steps") or 500


def _keeps_best(given: Given) -> bool:
    return given.is_on("load_best_model_at_end") and given.text("save_strategy") != "best"


def _never_evaluates(given: Given) -> bool:
    return given.text("eval_strategy") in ("no", "false")


def _differing_strategies(given: Given) -> bool:
    return _keeps_best(given) and given.text("eval_strategy") != given.text("save_strategy")


def _differing_steps(given: Given) -> bool:
    save, every = given.number("save_steps"), given.number("eval_steps")
    by_steps = given.text("save_strategy") == given.text("eval_strategy") == "steps"
    if not _keeps_best(given) or not by_steps or not save or not every:
        return False
    if save < 1 and every < 1:
        return round(save * 1_000_000) % max(1, round(every * 1_000_000)) != 0
    return save < 1 or every < 1 or save % every != 0


def _strategy_name(given: Given) -> str:
    return "evaluation_strategy" if given.is_stated("evaluation_strategy") else "eval_strategy"


def _has_no_data(given: Given) -> bool:
    """Return whether there is nothing to evaluate; LLaMA-Factory takes it from two keys."""
    is_factory = given.is_stated("finetuning_type")
    return given.is_on(NO_VALIDATION_DATA) or (is_factory and not given.any_on("eval_dataset", "val_size"))


def _without_evaluations(given: Given) -> Changes:
    """Keep no best checkpoint and stop at the end, as both follow evaluations."""
    best = {"load_best_model_at_end": False} if given.is_on("load_best_model_at_end") else {}
    return {**best, **{key: None for key in EARLY_STOPS if given.is_stated(key)}}


def _no_evaluations(given: Given) -> Changes:
    """Evaluate nothing, and keep no best checkpoint."""
    return {_strategy_name(given): "no", **_without_evaluations(given)}


def _same_strategy(given: Given) -> Changes:
    """Evaluate as often as checkpoints are saved; without saves, or without data to evaluate, keep no best one."""
    name = _strategy_name(given)
    saves = given.text("save_strategy")
    if saves in ("no", "false") or _has_no_data(given):
        return _without_evaluations(given)
    steps = given.number("save_steps")
    return {name: saves, **({"eval_steps": _plain(steps)} if saves == "steps" and steps else {})}


def _multiple_below(given: Given) -> Changes:
    """Save at the last evaluation before the stated steps: a later one may be after the end of the run."""
    save, every = given.number("save_steps") or 0, given.number("eval_steps") or 1
    if save < 1 or every < 1:
        return {"eval_steps": _plain(save), "save_steps": _plain(save)}
    return {"save_steps": _plain(max(1, save // every) * every)}


def _plain(number: float | None) -> float | int | None:
    return int(number) if number is not None and number == int(number) else number


def _evaluates(given: Given) -> Changes:
    if given.is_on(NO_VALIDATION_DATA):
        return {"lr_scheduler_type": "cosine"}
    return {"eval_strategy": "steps", "eval_steps": _plain(given.number("save_steps") or 500)}


def _stops_early(key: str) -> tuple[StartCheck, StartCheck]:
    """Return the checks of EarlyStoppingCallback, whose patience is the value of a key."""

    def is_given(given: Given) -> bool:
        return given.is_on(key) and given.is_stated("output_dir") and not _differing_strategies(given)

    def has_metric(given: Given) -> bool:
        by_loss = given.text("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy")
        return by_loss or given.any_on("metric_for_best_model", "load_best_model_at_end")

    def evaluates(given: Given) -> Changes:
        if _has_no_data(given):
            return _without_evaluations(given)
        return {"eval_strategy": "steps", "eval_steps": 100, **({} if has_metric(given) else by_the_loss)}

    by_the_loss = {"metric_for_best_model": "eval_loss"}
    return (
        StartCheck(key, lambda given: is_given(given) and _never_evaluates(given),
            f"{{{key}}} compares evaluations, and {{eval_strategy}} has none", evaluates, EARLY_PLACE,
            effect=AT_TRAINING),
        StartCheck(key, lambda given: is_given(given) and not _never_evaluates(given) and not has_metric(given),
            f"{{{key}}} needs metric_for_best_model or load_best_model_at_end", by_the_loss, EARLY_PLACE,
            effect=AT_TRAINING),
    )  # fmt: skip


def wrong_direction(place: str) -> StartCheck:
    """Return the check of greater_is_better for a loss: nothing refuses it, and the worst checkpoint is the best."""

    def broken(given: Given) -> bool:
        keeps = given.any_on("load_best_model_at_end", *EARLY_STOPS) or given.text("save_strategy") == "best"
        metric = given.text("metric_for_best_model") or "loss"
        return keeps and given.is_on("greater_is_better") and metric.endswith("loss")

    return StartCheck("greater_is_better", broken,
        "{greater_is_better} takes the highest {metric_for_best_model} for the best", {"greater_is_better": False},
        place, "warning", effect="keeps the worst checkpoint, and stops early while the loss falls")  # fmt: skip


def unknown_targets(key: str, fix: Changes) -> StartCheck:
    """Return the check of peft that the modules to adapt are in the model."""

    def broken(given: Given) -> bool:
        return bool(missing := _missing(given, key)) and missing == given.names(key)

    def corrected(given: Given) -> Changes:
        named = given.names(key)
        return fix if any(map(is_known_target, named)) else _corrected(given, key, named) or fix

    return StartCheck(key, broken,
        f"{{{key}}} names none of the model's linear layers ({', '.join(LINEAR_LAYERS)})", corrected,
        "peft/tuners/tuners_utils.py: BaseTuner.inject_adapter",
        effect="stops when the adapters are added: target modules not found")  # fmt: skip


def skipped_targets(key: str) -> StartCheck:
    """Return the check of the modules that peft skips in silence: the model has the others of the list, but not these.

    Lists for several model families name the same layers twice (q_proj and c_attn): those are in order.
    """

    def found(given: Given) -> list[str]:
        missing = _missing(given, key)
        present = [one for one in given.names(key) if one not in missing]
        unique = (
            one
            for one in missing
            if _meant(one) and (not is_known_target(one) or not names_same_layers((one,), present))
        )
        return [*unique] if present else []

    def message(given: Given) -> str:
        near = [f"{one} (did you mean {', '.join(_meant(one))}?)" for one in found(given)]
        return f"{key} names {' and '.join(near)}, which the model does not have"

    return StartCheck(key, lambda given: bool(found(given)), message,
        lambda given: _corrected(given, key, found(given)),
        "peft/tuners/tuners_utils.py: BaseTuner.inject_adapter", "warning",
        effect="trains adapters on the other layers only")  # fmt: skip


def _missing(given: Given, key: str) -> list[str]:
    """Return the targets that the model does not have; of a model with unknown layers, names that are misspelled."""
    if not given.is_on(key) or "full" in (given.text(one) for one in TUNERS):
        return []
    named = given.names(key)
    found = missing_targets(given.model, named) if given.model is not None else []
    return found or [one for one in named if not is_known_target(one) and one not in ALL and _meant(one)]


def _corrected(given: Given, key: str, wrong: Sequence[str]) -> Changes:
    """Return the targets with the layers that the wrong ones misspell; nothing if one is like none."""
    if not all(map(_meant, wrong)):
        return {}
    parts = ([*_meant(one)] if one in wrong else [one] for one in given.names(key))
    names = [*dict.fromkeys(name for part in parts for name in part)]
    return {key: names if isinstance(given.get(key), list) else ",".join(names)}


def _meant(target: str) -> tuple[str, ...]:
    """Return the layers that a target misspells, or that another family joins or names so: qkv_proj for q_proj, …"""
    if is_known_target(target):
        return tuple(name for group in groups_of((target,)) for name in STANDARD[group] if name in LINEAR_LAYERS)
    return tuple([*misspelled(target, LINEAR_LAYERS), *meant_targets(target)][:1])


def _fraction(key: str) -> StartCheck:
    def broken(given: Given) -> bool:
        number, by_steps = given.number(key), given.text(key.replace("steps", "strategy")) == "steps"
        return by_steps and given.is_stated(key) and number is not None and number > 1 and number != int(number)

    def rounded(given: Given) -> Changes:
        return {key: int(given.number(key) or 1)}

    return StartCheck(
        key, broken, f"{{{key}}} is neither a number of steps nor a share of the training", rounded, PLACE
    )


def _at_least_one(key: str) -> StartCheck:
    def broken(given: Given) -> bool:
        number = given.number(key) if given.is_stated(key) else None
        return number is not None and number < 1

    return StartCheck(key, broken, f"{{{key}}} must be at least 1", {key: 1}, TRAINER_PLACE)


def _no_length(key: str) -> StartCheck:
    def broken(given: Given) -> bool:
        number = given.number(key) if given.is_stated(key) else None
        return number is not None and number < 1 and (number != -1 or key == BLOCK)  # -1: as long as the model can

    return StartCheck(key, broken, f"{{{key}}}: a sample has at least one token", {key: 2048}, TRAINER_PLACE,
        effect="stops when the data is prepared")  # fmt: skip


def _trains_nothing(given: Given) -> bool:
    epochs = given.number("num_train_epochs") if given.is_stated("num_train_epochs") else None
    is_set = epochs is not None and (epochs < 0 or (epochs == 0 and given.is_on("do_train")))
    return is_set and (given.number("max_steps") or 0) <= 0


def _no_share(given: Given) -> bool:
    number = given.number("warmup_ratio") if given.is_stated("warmup_ratio") else None
    return number is not None and not 0 <= number <= 1


REPORTERS = ("all", "none", "azure_ml", "comet_ml", "mlflow", "neptune", "tensorboard", "trackio", "wandb",
    "codecarbon", "clearml", "dagshub", "flyte", "dvclive", "swanlab", "kubeflow")  # fmt: skip
"""Values of report_to: INTEGRATION_TO_CALLBACK of transformers."""
FSDP_OPTIONS = ("true", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload",
    "auto_wrap")  # fmt: skip
NOT_FP32 = ("load_in_4bit", "load_in_8bit", "deepspeed", "deepspeed_config")  # set a compute dtype of their own
IN_FIRST_STEP = "fails in the first step"


def _unknown_reporter(given: Given) -> str:
    return next((one for one in given.items("report_to") if one not in REPORTERS), "")


def _known_reporter(given: Given) -> Changes:
    near = closest(_unknown_reporter(given), REPORTERS, 1)
    return {"report_to": near[0] if near else "none"}


def _unknown_fsdp(given: Given) -> str:
    """Return a mistyped option; front ends have names and files of their own."""
    words = [word for one in given.items("fsdp") for word in one.split()] if given.is_on("fsdp") else []
    unknown = (one for one in words if one not in FSDP_OPTIONS)
    return next((one for one in unknown if misspelled(one, FSDP_OPTIONS)), "")


def _known_fsdp(given: Given) -> Changes:
    unknown = _unknown_fsdp(given)
    return {"fsdp": given.text("fsdp").replace(unknown, misspelled(unknown, FSDP_OPTIONS)[0])}


def computes_in_fp32(given: Given) -> bool:
    """Return whether neither the Trainer's flags nor Accelerate's config turn mixed precision on."""
    return not given.any_on("bf16", "fp16") and not given.is_on("mixed_precision")


def flash_in_fp32(given: Given, dtype: str) -> bool:
    """Return whether flash attention would get queries in fp32: weights of this dtype, and no mixed precision."""
    is_flash = "flash" in given.text("attn_implementation")
    in_fp32 = dtype.removeprefix("torch.") in ("float32", "float", "fp32")
    return is_flash and in_fp32 and computes_in_fp32(given) and not given.any_on(*NOT_FP32)


def _choice(key: str, choices: tuple[str, ...]) -> StartCheck:
    def is_unknown(given: Given) -> bool:
        return given.text(key) not in (*choices, *(OFF if "no" in choices else NOT_SET))

    def nearest(given: Given) -> Changes:
        near = closest(given.text(key), choices, 1)
        return {key: near[0] if near else None}

    message = f"{{{key}}} is none of {', '.join(choices)}"
    return StartCheck(key, is_unknown, message, nearest, "transformers/training_args.py: TrainingArguments")


INTERVALS = ("no", "steps", "epoch")
LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
NOT_SET = ("", "none", "null")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "save_strategy": (*INTERVALS, "best"),
    "eval_strategy": INTERVALS,
    "evaluation_strategy": INTERVALS,
    "logging_strategy": INTERVALS,
    "hub_strategy": ("end", "every_save", "checkpoint", "all_checkpoints"),
    "log_level": LOG_LEVELS,
    "log_level_replica": LOG_LEVELS,
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
    "ddp_backend": ("nccl", "gloo", "mpi", "ccl", "xccl", "hccl", "cncl", "mccl"),
}
"""Arguments of transformers.TrainingArguments that are one of a few words."""
TRAINER_CHOICES = Table("transformers' Trainer", {}, tuple(_choice(key, choices) for key, choices in CHOICES.items()))
TRAINER = Table(
    "transformers' Trainer",
    {
        "save_strategy": "steps",
        "save_steps": 500,
        "logging_strategy": "steps",
        "logging_steps": 500,
        "eval_strategy": _eval_strategy,
        "eval_steps": _eval_steps,
        "dataloader_num_workers": 0,
    },
    (
        StartCheck("eval_strategy", lambda given: given.is_on(NO_VALIDATION_DATA) and not _never_evaluates(given),
            "{eval_strategy} needs eval_dataset, which the trainer does not get (pass one, or evaluate nothing)",
            _no_evaluations, TRAINER_PLACE),
        StartCheck("load_best_model_at_end", lambda given: _differing_strategies(given) and _never_evaluates(given),
            "{load_best_model_at_end} needs an evaluation before every save, but nothing is evaluated", _same_strategy,
            PLACE),
        StartCheck("eval_strategy", lambda given: _differing_strategies(given) and not _never_evaluates(given),
            "{load_best_model_at_end} needs the same strategy of evaluations and saves, not {eval_strategy} and "
            "{save_strategy}", _same_strategy, PLACE),
        StartCheck("save_steps", _differing_steps,
            "{load_best_model_at_end} needs {save_steps} to be a multiple of {eval_steps}", _multiple_below, PLACE),
        *(check for key in EARLY_STOPS for check in _stops_early(key)),
        wrong_direction("transformers/trainer_callback.py: EarlyStoppingCallback.check_metric_value"),
        *(unknown_targets(key, {key: "all-linear"}) for key in ("target_modules", "lora_target_modules")),
        unknown_targets("lora_target", {"lora_target": "all"}),
        *(skipped_targets(key) for key in ("target_modules", "lora_target_modules", "lora_target")),
        StartCheck("warmup_ratio", _no_share, "{warmup_ratio} is no share of the steps: it is between 0 and 1",
            {"warmup_ratio": 0.03}, PLACE),
        *(_at_least_one(key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps")),
        StartCheck("num_train_epochs", _trains_nothing, "{num_train_epochs} is no training", {"num_train_epochs": 1},
            "transformers/trainer.py: Trainer.set_initial_training_values", effect="ends without a step"),
        *(_no_length(key) for key in (BLOCK, "max_seq_length", "model_max_length", "max_seq_len")),
        *(_fraction(key) for key in ("logging_steps", "eval_steps", "save_steps")),
        StartCheck("logging_steps",
            lambda given: given.text("logging_strategy") == "steps" and given.number("logging_steps") == 0,
            "{logging_steps} is no number of steps", {"logging_steps": 10}, PLACE),
        StartCheck("lr_scheduler_type",
            lambda given: given.text("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy")
            and _never_evaluates(given),
            "{lr_scheduler_type} follows the validation loss, but nothing is evaluated", _evaluates, PLACE),
        StartCheck("warmup_steps", lambda given: (given.number("warmup_steps") or 0) < 0,
            "{warmup_steps} is negative", {"warmup_steps": 0}, PLACE),
        StartCheck("dataloader_prefetch_factor",
            lambda given: given.is_on("dataloader_prefetch_factor") and given.number("dataloader_num_workers") == 0,
            "{dataloader_prefetch_factor} needs worker processes", {"dataloader_num_workers": 4}, PLACE),
        StartCheck("fp16", together("bf16", "fp16"), "{bf16} and {fp16} exclude each other", {"fp16": False}, PLACE),
        StartCheck("attn_implementation",
            lambda given: flash_in_fp32(given, given.text("dtype") or given.text("torch_dtype")),
            "{attn_implementation} takes fp16 or bf16, but weights are in float32 and mixed precision is off",
            {"bf16": True}, FLASH_PLACE, effect=IN_FIRST_STEP),
        StartCheck("eval_steps",
            lambda given: given.text("eval_strategy") == "steps" and not given.is_on("eval_steps")
            and given.text("logging_strategy") != "steps" and given.text("logging_steps") in ("0", "0.0"),
            "{eval_strategy} needs eval_steps or logging_steps", {"eval_steps": 100}, PLACE),
        StartCheck("report_to", lambda given: bool(_unknown_reporter(given)),
            "{report_to} names no tracker that transformers has", _known_reporter,
            "transformers/integrations/integration_utils.py: get_reporting_integration_callbacks"),
        StartCheck("fsdp", lambda given: bool(_unknown_fsdp(given)), "{fsdp} is no option of FSDP",
            _known_fsdp,
            "transformers/training_args.py: TrainingArguments._apply_legacy_fsdp_to_config"),
        StartCheck("bf16_full_eval", together("bf16_full_eval", "fp16_full_eval"),
            "{bf16_full_eval} and {fp16_full_eval} exclude each other", {"fp16_full_eval": False}, PLACE),
        StartCheck("torch_empty_cache_steps",
            lambda given: given.is_stated("torch_empty_cache_steps")
            and (given.number("torch_empty_cache_steps") or 0) <= 0,
            "{torch_empty_cache_steps} must be above 0", {"torch_empty_cache_steps": None}, PLACE),
        StartCheck("fsdp", together("fsdp", "deepspeed"), "fsdp and deepspeed exclude each other", {"fsdp": None},
            "transformers/trainer.py: Trainer.create_accelerator_and_postprocess"),
        StartCheck("save_strategy",
            lambda given: given.text("save_strategy") == "best"
            and not given.any_on("metric_for_best_model", "load_best_model_at_end"),
            "{save_strategy} needs metric_for_best_model", {"metric_for_best_model": "eval_loss"}, TRAINER_PLACE),
        StartCheck("save_only_model",
            lambda given: given.is_on("save_only_model", "load_best_model_at_end") and given.any_on("deepspeed",
            "fsdp"),
            "{save_only_model} and {load_best_model_at_end} exclude each other with sharded weights",
            {"save_only_model": False}, "transformers/trainer.py: Trainer.create_accelerator_and_postprocess"),
    ),
)  # fmt: skip
