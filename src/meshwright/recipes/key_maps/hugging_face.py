"""Argument names of transformers' Trainer, TRL and peft: accepted as overrides, never written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.recipes.key_maps.key import ConfigKey, Values
from meshwright.similar import misspelled

_HUB_KERNEL = re.compile(r"^(?:paged\|)?[^/:]+/[^/:]+(?::[^/:]+)?$")  # owner/name@version:function
_FLASH = re.compile(r"(?:flash\D*|fa(?=[-_]?\d)[-_]?)(\d?)")

OPTIMIZERS: Values = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit", "paged_adamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw8bit"),
    "lion_32bit": "lion",
}
SCHEDULES: Values = {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}

ATTENTION: Values = {
    **dict.fromkeys(("flash_attention_2", "flash_attention_3", "flash_attention_4"), "flash"),
    "flex_attention": "flex",
}
ATTENTION_KERNELS = ("sdpa", *ATTENTION, "eager")
"""Names that attn_implementation of from_pretrained takes; the first is its default."""
OTHER_KERNEL_NAMES: Values = {
    **dict.fromkeys(("auto", "default", "torch", "math"), ATTENTION_KERNELS[0]),
    **dict.fromkeys(("flash", "flash_attn", "flash_attention", "fa2", "fa"), "flash_attention_2"),
    "fa3": "flash_attention_3",
    "flex": "flex_attention",
    "disabled": "eager",
}
"""What other programs call these kernels."""

ALL_LAYERS: Values = {"all": "all-linear"}
"""What programs of their own, and LLaMA-Factory, call peft's all-linear."""
LIGER: Values = {"true": "fused_linear", "false": "vocab_parallel"}
"""Liger's kernels contain a loss fused with the output layer: no full logits are materialized."""

WSD_STYLES: Values = {"1-sqrt": "minus_sqrt", "linear": "linear", "cosine": "cosine"}
"""Shapes of the decay of transformers' warmup_stable_decay."""
TRUNCATIONS: Values = {"keep_start": "end", "keep_end": "start"}
"""Where TRL cuts samples that are too long."""


def is_attention_kernel(name: str, known: Sequence[str] = ATTENTION_KERNELS) -> bool:
    """Return whether from_pretrained takes a name of attn_implementation: known, paged, or a kernel on the Hub."""
    return name.removeprefix("paged|") in known or _HUB_KERNEL.search(name) is not None


def refused_kernel(name: str, known: Sequence[str] = ATTENTION_KERNELS) -> tuple[str, str] | None:
    """Return why a name of attn_implementation is refused, and the name instead; None if it is taken.

    `known` are the names of a program that has others than transformers, the default first.
    """
    if is_attention_kernel(name, known):
        return None
    near = meant_kernel(name, known)
    takes = f"takes {', '.join(known)}, or a kernel on the Hub (OWNER/NAME)"
    return f"did you mean {near}? It {takes}" if near else f"it {takes}", near or known[0]


def meant_kernel(name: str, known: Sequence[str] = ATTENTION_KERNELS) -> str:
    """Return the kernel that a name may mean; empty if there is none."""
    name = name.strip().lower()
    meant = name if name in known else OTHER_KERNEL_NAMES.get(name, "")
    if meant not in known and (flash := _FLASH.match(name)):
        numbered = f"flash_attention_{flash[1]}"
        meant = numbered if numbered in known else OTHER_KERNEL_NAMES["flash"]
    return meant if meant in known else next(iter(misspelled(name, known)), "")


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
    ConfigKey("gradient_checkpointing", "layout.recompute", {"true": "full", "false": "none", "unsloth": "full"}),
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
    ConfigKey("target_modules", "peft.targets", ALL_LAYERS),
    ConfigKey("lora_target_modules", "peft.targets", ALL_LAYERS),
    ConfigKey("lora_target", "peft.targets", ALL_LAYERS),
    ConfigKey("lora_target_linear", "peft.targets", {"true": "all-linear"}),
    ConfigKey("sample_packing", "data.packing"),
    ConfigKey("sequence_len", "data.seq_length"),
    ConfigKey("cutoff_len", "data.seq_length"),
    ConfigKey("val_set_size", "data.validation_part"),
    ConfigKey("val_size", "data.validation_part"),
    ConfigKey("test_size", "data.validation_part"),
    ConfigKey("test_split_size", "data.validation_part"),
    ConfigKey("eval_split", "data.validation_part"),
    ConfigKey("validation_split", "data.validation_part"),
    *(ConfigKey(key, "data.validation_part") for key in ("val_fraction", "validation_fraction", "holdout")),
    ConfigKey("train_on_inputs", "data.train_on", {"true": "all", "false": "answers"}),
    ConfigKey("assistant_only_loss", "data.train_on", {"true": "answers", "false": "all"}),
    ConfigKey("completion_only_loss", "data.train_on", {"true": "answers", "false": "all"}),
    ConfigKey("per_gpu_train_batch_size", "layout.micro_batch_size"),
    ConfigKey("total_batch_size", "train.global_batch_size"),
    ConfigKey("train_batch_size", "train.global_batch_size"),
    ConfigKey("num_warmup_steps", "schedule.warmup_steps"),
    ConfigKey("lr_scheduler.num_warmup_steps", "schedule.warmup_steps"),
    ConfigKey("lr_scheduler", "schedule.name", SCHEDULES),
    ConfigKey("log_every_n_steps", "train.log_every"),
    ConfigKey("enable_activation_checkpointing", "layout.recompute", {"true": "full", "false": "none"}),
    ConfigKey("torch_compile", "kernels.compile"),
    ConfigKey("use_liger_kernel", "kernels.loss", LIGER),
    ConfigKey("use_liger", "kernels.loss", LIGER),
    ConfigKey("enable_liger_kernel", "kernels.loss", LIGER),
    ConfigKey("liger_fused_linear_cross_entropy", "kernels.loss", LIGER),
    ConfigKey("tokenizer.max_seq_len", "data.seq_length"),
    ConfigKey("dataset.packed", "data.packing"),
    ConfigKey("dataset_num_proc", "data.workers"),
    ConfigKey("train_file", "data.dataset"),
    ConfigKey("validation_file", "data.validation"),
    ConfigKey("val_file", "data.validation"),
    ConfigKey("train_split", "data.split"),
    ConfigKey("model_name_or_path", "checkpoint.pretrained"),
    ConfigKey("base_model", "checkpoint.pretrained"),
    ConfigKey("adapter", "peft.method"),
)

ARGUMENTS = (
    ConfigKey("weight_decay", "optimizer.weight_decay"),
    ConfigKey("adam_beta1", "optimizer.beta1"),
    ConfigKey("adam_beta2", "optimizer.beta2"),
    ConfigKey("seed", "train.seed"),
    ConfigKey("eval_steps", "train.eval_every"),
    ConfigKey("packing", "data.packing"),
    ConfigKey("pad_to_max_length", "data.pad_to_max_length"),
    ConfigKey("group_by_length", "data.group_by_length"),
    ConfigKey("train_sampling_strategy", "data.group_by_length", {"group_by_length": "true", "random": "false"}),
    ConfigKey("truncation_mode", "data.truncation", TRUNCATIONS),
    ConfigKey("chat_template_path", "data.chat_template"),
    ConfigKey("streaming", "data.streaming"),
    ConfigKey("dataset_train_split", "data.split"),
    ConfigKey("tokenizer_name", "data.tokenizer"),
    ConfigKey("tokenizer_name_or_path", "data.tokenizer"),
    ConfigKey("attn_implementation", "kernels.attention", ATTENTION, written={"auto": ATTENTION_KERNELS[0]}),
    ConfigKey("load_in_4bit", "peft.method", {"true": "qlora"}),
    ConfigKey("load_in_8bit", "peft.method", {"true": "lora8bit"}),
    ConfigKey("use_dora", "peft.method", {"true": "dora"}),
    ConfigKey("use_rslora", "peft.method", {"true": "rslora"}),
)
"""Arguments that programs accept besides: as overrides they would mean one of our fields, or another framework's."""
