"""Arguments of transformers' Trainer, TRL, peft, axolotl and torchtune that are something else here, or nothing."""

from __future__ import annotations

from meshwright.recipes.key_maps.key import RemovedKey

_VALIDATION = (
    "is a number of steps here (0 turns validation off; train.eval_steps is the length of a validation)",
    "train.eval_every={value}",
)
_SAVING = ("is a number of steps here; 0 saves only at the end", "checkpoint.save_every={value}")
_FIRST_ROWS = ("is part of the split, as in Hugging Face datasets", "data.split=train[:{value}]")
_RESUMING = (
    "is not needed: train resumes from the latest checkpoint if its run folder (--out) contains one",
    "--out {value}",
)
_HUB = ("is not done here: meshwright convert RUN FOLDER writes a Hugging Face folder, which hf upload sends",)
_BEST = ("is not chosen here: the best checkpoint is the one with the lowest validation loss",)
_ADAPTED_ONLY = (
    "has no equivalent: adapters train linear layers only (peft.targets), and an sft recipe trains all weights",
)
_TRACKERS = ("is set by environment variables of the tracker, such as WANDB_PROJECT and WANDB_NAME",)
_PREFERENCES = (
    "is for preference training (DPO, KTO, ORPO, RLHF), which is not done here: sft and peft train on answers",
)
_TOKENIZER = ("is a setting of the tokenizer folder (tokenizer_config.json), which data.tokenizer names",)
_FOUR_BITS = ("is fixed: QLoRA (peft.method=qlora) stores frozen weights in NF4 and computes in precision.compute",)
_REMOTE_CODE = ("is not supported: models are transformers' own classes, and no code of a folder is executed",)
_PLACEMENT = ("is not set: ranks and layout decide which GPU holds what",)
_NOT_NEEDED = ("is not needed here",)
_RAMP = (
    "has no equivalent here, the batch does not grow: every step has train.global_batch_size samples; a resumed run "
    "can have a larger one (--accept-changes)",
    "train.global_batch_size=N",
)
_RAMPS = (
    *("batch_ramp", "batch_rampup", "batch_size_ramp", "batch_size_rampup", "batch_size_warmup", "batch_warmup"),
    *("train.rampup_batch_size", "train.batch_ramp", "train.batch_size_rampup", "train.batch_size_warmup"),
)
_VERB = ("is the command itself: train trains, evaluate evaluates",)

REMOVED: dict[str, RemovedKey] = {
    "gradient_accumulation_steps": (
        "is derived from the batch size and the GPU count; set the global batch size",
        "train.global_batch_size={value}",
    ),
    "warmup_ratio": ("is a share of the training; set the steps", "schedule.warmup_steps={value}"),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "evals_per_epoch", "check_val_every_n_epoch"), _VALIDATION
    ),
    "eval_steps": (  # also the short name of train.eval_steps
        "is the number of steps between two validations in other trainers; train.eval_steps is the length of one",
        "train.eval_every={value}",
    ),
    **dict.fromkeys(("save_strategy", "saves_per_epoch"), _SAVING),
    "logging_strategy": ("is a number of steps here", "train.log_every={value}"),
    "load_best_model_at_end": (
        "is chosen afterwards: training keeps the checkpoint with the lowest validation loss, and generate, evaluate "
        "and convert take it with --checkpoint best",
        "--checkpoint best",
    ),
    **dict.fromkeys(_RAMPS, _RAMP),
    "output_dir": ("is an option of the command", "--out {value}"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_from"), _RESUMING),
    "overwrite_output_dir": ("is not done here: a run resumes in its folder; a new run needs a new --out",),
    "report_to": ("is an option of train and bench: --wandb, --mlflow, --tensorboard", "--{value}"),
    "auto_find_batch_size": ("is a value of the micro batch", "layout.micro_batch_size=auto"),
    "batch_size": ("is the samples of one GPU in other trainers", "layout.micro_batch_size={value}"),
    **dict.fromkeys(("max_samples", "max_train_samples", "num_samples", "num_examples"), _FIRST_ROWS),
    "max_steps_per_epoch": ("has no equivalent; set the steps of the whole run", "train.steps={value}"),
    "max_eval_samples": ("is an option of evaluate; a run limits its validation by steps", "--samples {value}"),
    "per_device_eval_batch_size": ("is the same as in training", "layout.micro_batch_size={value}"),
    "flash_attention": ("is chosen by kernels.attention", "kernels.attention=auto"),
    "use_flash_attention_2": ("is chosen by kernels.attention", "kernels.attention=auto"),
    "tf32": ("has no switch: matmuls are in precision.compute, and fp32 stays fp32",),
    "fsdp": ("is a strategy of the layout", "layout.strategy=fsdp2"),
    **dict.fromkeys(
        ("deepspeed", "deepspeed_config", "fsdp_config"), ("is read as a file", "meshwright import {value}")
    ),
    "use_peft": ("is a goal: a peft recipe trains adapters", "meshwright recipes --goal peft"),
    **dict.fromkeys(("load_in_8bit", "quantization"), _FOUR_BITS),
    **dict.fromkeys(("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"), _FOUR_BITS),
    **dict.fromkeys(("modules_to_save", "lora_modules_to_save", "bias", "lora_bias"), _ADAPTED_ONLY),
    "use_rslora": ("scales by alpha / sqrt(rank): set peft.alpha to lora_alpha * sqrt(rank)",),
    "task_type": _NOT_NEEDED,
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), _BEST),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"), _HUB),
    **dict.fromkeys(("run_name", "wandb_project", "wandb_name", "wandb_entity"), _TRACKERS),
    **{
        f"{section}{name}": ("is an option of train and bench", f"--{name}")
        for section in ("", "metrics.", "logging.", "train.")
        for name in ("tensorboard", "wandb", "mlflow")
    },
    "logging_dir": ("is the run folder, with --tensorboard",),
    **dict.fromkeys(("beta", "loss_type", "max_prompt_length", "rl", "ref_model"), _PREFERENCES),
    **dict.fromkeys(("pad_token", "eos_token", "padding_side", "special_tokens", "add_eos_token"), _TOKENIZER),
    "response_template": ("is found by the chat template: the loss counts answers only", "data.train_on=answers"),
    "formatting_func": ("is a setting of the data: data.columns names the columns, data.chat_template the format",),
    "dataset_text_field": ("is a column of the data", "data.columns.text={value}"),
    "remove_unused_columns": ("is not needed: data.columns names the columns that are read",),
    "trust_remote_code": _REMOTE_CODE,
    **dict.fromkeys(("device_map", "local_rank", "ddp_find_unused_parameters", "no_cuda", "use_cpu"), _PLACEMENT),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _VERB),
    **dict.fromkeys(("neftune_noise_alpha", "label_smoothing_factor"), ("is not supported by this engine",)),
    **dict.fromkeys(
        (
            *("save_safetensors", "save_only_model", "use_cache", "gradient_checkpointing_kwargs"),
            *("dataloader_pin_memory", "dataloader_drop_last", "pad_to_sequence_len", "eval_accumulation_steps"),
            *("prediction_loss_only", "disable_tqdm", "ddp_timeout", "dataset_prepared_path", "strict"),
            *("logging_first_step", "include_tokens_per_second", "length_column_name", "tokenizer_type"),
        ),
        _NOT_NEEDED,
    ),
    "data_seed": ("is the seed of the run", "train.seed={value}"),
    "dtype": ("is the precision of the computation", "precision.compute={value}"),
    "torch_dtype": ("is the precision of the computation", "precision.compute={value}"),
}
"""Arguments with the reason and what to write; the values that follow from a recipe are computed."""
