"""Argument names of transformers' Trainer, TRL and peft: accepted as overrides, never written."""

from __future__ import annotations

from meshwright.recipes.key_maps.key import ConfigKey, RemovedKey, Values

OPTIMIZERS: Values = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw8bit"),
    "lion_32bit": "lion",
}
SCHEDULES: Values = {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}

KEYS = (
    ConfigKey("learning_rate", "optimizer.lr"),
    ConfigKey("optim", "optimizer.name", OPTIMIZERS),
    ConfigKey("adam_epsilon", "optimizer.eps"),
    ConfigKey("max_grad_norm", "optimizer.clip_grad"),
    ConfigKey("lr_scheduler_type", "schedule.name", SCHEDULES),
    ConfigKey("num_train_epochs", "train.epochs"),
    ConfigKey("num_epochs", "train.epochs"),
    ConfigKey("max_steps", "train.steps"),
    ConfigKey("logging_steps", "train.log_every"),
    ConfigKey("early_stopping_patience", "train.early_stop_patience"),
    ConfigKey("early_stopping_threshold", "train.early_stop_delta"),
    ConfigKey("per_device_train_batch_size", "layout.micro_batch_size"),
    ConfigKey("gradient_checkpointing", "layout.recompute", {"true": "full", "false": "none"}),
    ConfigKey("max_seq_length", "data.seq_length"),
    ConfigKey("max_length", "data.seq_length"),
    ConfigKey("model_max_length", "data.seq_length"),
    ConfigKey("dataloader_num_workers", "data.workers"),
    ConfigKey("save_steps", "checkpoint.save_every"),
    ConfigKey("save_total_limit", "checkpoint.keep"),
    ConfigKey("r", "peft.rank"),
    ConfigKey("lora_r", "peft.rank"),
    ConfigKey("lora_rank", "peft.rank"),
    ConfigKey("lora_alpha", "peft.alpha"),
    ConfigKey("lora_dropout", "peft.dropout"),
    ConfigKey("target_modules", "peft.targets"),
    ConfigKey("lora_target_modules", "peft.targets"),
    ConfigKey("lora_target_linear", "peft.targets", {"true": "all-linear"}),
    ConfigKey("sample_packing", "data.packing"),
    ConfigKey("sequence_len", "data.seq_length"),
    ConfigKey("cutoff_len", "data.seq_length"),
    ConfigKey("val_set_size", "data.validation_part"),
    ConfigKey("val_size", "data.validation_part"),
    ConfigKey("train_on_inputs", "data.train_on", {"true": "all", "false": "answers"}),
    ConfigKey("assistant_only_loss", "data.train_on", {"true": "answers", "false": "all"}),
    ConfigKey("completion_only_loss", "data.train_on", {"true": "answers", "false": "all"}),
)

_VALIDATION = ("is a number of steps here; 0 turns validation off", "train.eval_every=…")
REMOVED: dict[str, RemovedKey] = {
    "gradient_accumulation_steps": (
        "is derived from the batch size and the GPU count; set the global batch size",
        "train.global_batch_size=…",
    ),
    "warmup_ratio": ("is a share of the training; set the steps", "schedule.warmup_steps=…"),
    "eval_strategy": _VALIDATION,
    "evaluation_strategy": _VALIDATION,
    "save_strategy": ("is a number of steps here; 0 saves only at the end", "checkpoint.save_every=…"),
    "load_best_model_at_end": (
        "is chosen afterwards: the best checkpoint is kept, and generate, evaluate and convert take it",
        "--checkpoint best",
    ),
    "output_dir": ("is an option of the command", "--out {value}"),
}
"""Arguments that are something else here, with the reason and the replacement."""
