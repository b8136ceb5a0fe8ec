"""The values that the files of Accelerate and DeepSpeed do not have, as arguments of the Trainer, TRL and PEFT.

All of them are written: the defaults of those libraries differ from ours (linear decay, no weight decay, LoRA alpha 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.common import KEEP_ALL
from meshwright.frameworks.trl_rows import rows_of
from meshwright.frameworks.types import UnmappedField
from meshwright.recipes.adapter_targets import ALL_LINEAR, REGEX, STANDARD
from meshwright.recipes.key_maps.accelerate import uses_deepspeed
from meshwright.recipes.key_maps.hugging_face import TRUNCATIONS, WSD_STYLES
from meshwright.recipes.key_maps.wsd_keys import decay_length, style_in
from meshwright.recipes.model_changes import changes
from meshwright.recipes.types import Recipe, field_value

OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw8bit": "adamw_bnb_8bit",
    "lion": "lion_32bit",
    "sgd": "sgd",
    "schedule_free_adamw": "schedule_free_adamw",
}
POLYNOMIAL, WSD = "polynomial", "warmup_stable_decay"
Arguments = Mapping[str, Any]


def _plain(name: str, field: str) -> Callable[[Recipe], Arguments]:
    return lambda recipe: {name: field_value(recipe, field)}


def _length(recipe: Recipe) -> Arguments:
    epochs = recipe.train.epochs
    return {"num_train_epochs": epochs} if epochs else {"max_steps": recipe.train.steps}


def _schedule(recipe: Recipe) -> Arguments:
    schedule, key, options = recipe.schedule, "lr_scheduler_type", "lr_scheduler_kwargs"
    if schedule.name == "cosine" and schedule.min_lr:
        return {key: "cosine_with_min_lr", options: {"min_lr": schedule.min_lr}}
    if schedule.name == "linear" and schedule.min_lr:  # linear itself ends at 0
        return {key: POLYNOMIAL, options: {"lr_end": schedule.min_lr, "power": 1.0}}
    if schedule.name == "wsd":
        return {key: WSD, options: _stable_phase(recipe)}
    names = {"cosine": "cosine", "linear": "linear", "inverse_sqrt": "inverse_sqrt", "constant": "constant_with_warmup"}
    if schedule.name not in names:
        raise InputError("the Trainer has no such decay, and its own is linear to 0: pass your own lr_scheduler")
    return {key: names[schedule.name]}


def _stable_phase(recipe: Recipe) -> Arguments:
    """Return the options of a warmup-stable-decay schedule."""
    schedule = recipe.schedule
    if recipe.train.epochs and not schedule.wsd_decay_steps:
        raise InputError("the steps of its decay follow from the data: set schedule.wsd_decay_steps=N")
    return {
        "num_decay_steps": decay_length(recipe),
        "decay_type": style_in(recipe, WSD_STYLES),
        "min_lr_ratio": float(f"{schedule.min_lr / recipe.optimizer.lr:.12g}"),
    }


def _optimizer(recipe: Recipe) -> Arguments:
    if recipe.optimizer.name not in OPTIMIZERS:
        raise InputError("the Trainer has no such optimizer, and its own is AdamW: pass your own optimizers")
    return {"optim": OPTIMIZERS[recipe.optimizer.name]}


def _saves(recipe: Recipe) -> Arguments:
    every = recipe.checkpoint.save_every
    return {"save_strategy": "steps", "save_steps": every} if every else {"save_strategy": "no"}


def _evaluations(recipe: Recipe) -> Arguments:
    every = recipe.train.eval_every
    best = {"metric_for_best_model": "eval_loss"} if stops_early(recipe) else {}  # EarlyStoppingCallback needs it
    return {"eval_strategy": "steps", "eval_steps": every, **best} if every else {}


def stops_early(recipe: Recipe) -> bool:
    """Return whether validations may end the training, for which the Trainer has a callback."""
    return bool(recipe.train.eval_every and recipe.train.early_stop_patience)


def _callbacks(recipe: Recipe) -> list[str]:
    patience, delta = recipe.train.early_stop_patience, recipe.train.early_stop_delta
    threshold = f", early_stopping_threshold={delta}" if delta else ""
    return [f"{CALLBACKS} = [EarlyStoppingCallback(early_stopping_patience={patience}{threshold})]"]


def _kept(recipe: Recipe) -> Arguments:
    keep = recipe.checkpoint.keep
    return {} if keep == KEEP_ALL else {"save_total_limit": keep}


def _token_loss(recipe: Recipe) -> Arguments:
    if recipe.train.per_token_loss or recipe.goal == "pretrain":
        return {}  # what the Trainer does
    raise InputError("the Trainer averages the loss over target tokens")


def _loss(recipe: Recipe) -> Arguments:
    if recipe.kernels.loss == "chunked":
        raise InputError(
            "the Trainer computes the loss of all logits, as kernels.loss=vocab_parallel, or one fused with the output "
            "layer (use_liger_kernel), which materializes none: kernels.loss=fused_linear"
        )
    return {"use_liger_kernel": True} if recipe.kernels.loss == "fused_linear" else {}


def _targets(recipe: Recipe) -> Arguments:
    targets = recipe.peft.targets
    if ALL_LINEAR in targets:
        return {"target_modules": ALL_LINEAR}
    if any(REGEX.search(one) for one in targets):
        if len(targets) > 1:
            raise InputError("PEFT takes one regular expression")
        return {"target_modules": targets[0]}
    return {"target_modules": list(dict.fromkeys(name for one in targets for name in STANDARD.get(one, (one,))))}


def _loss_tokens(recipe: Recipe) -> Arguments:
    """Return which tokens TRL's loss counts: it has an argument for conversations, and one for completions."""
    answers, rows = recipe.data.train_on != "all", rows_of(recipe.data.dataset)
    if rows == "completions":
        return {"completion_only_loss": answers}
    if rows == "texts" and answers:
        raise InputError("the rows are texts without answers: TRL's loss counts every token of them")
    return {"assistant_only_loss": answers}


QUANTIZED = {"qlora": 4, "lora8bit": 8}
"""Bits of frozen weights, by the adapter methods that are LoRA on a quantized model."""
BITS = ("quantization_bit", "quant_bits")  # keys of front ends for the number of bits


def _method(recipe: Recipe) -> Arguments:
    plain = recipe.peft.method in ("lora", *QUANTIZED)
    return {} if plain else {f"use_{recipe.peft.method}": True}


def _quantization(recipe: Recipe, sharded: bool) -> list[str]:
    """Return the lines of a run with quantized weights; FSDP shards weights that are stored in their own format."""
    kind = "torch.bfloat16" if recipe.precision.compute == "bf16" else "torch.float16"
    options = quantization_options(recipe.peft.method, kind, sharded)
    if len(options) == 1:
        return [f"quantization_config = BitsAndBytesConfig({options[0]})"]
    return ["quantization_config = BitsAndBytesConfig(", *(f"    {one}," for one in options), ")"]


def quantization_options(method: str, dtype: str, sharded: bool) -> list[str]:
    """Return the keywords of BitsAndBytesConfig for an adapter method."""
    if method == "lora8bit":
        return ["load_in_8bit=True"]
    options = ["load_in_4bit=True", 'bnb_4bit_quant_type="nf4"', f"bnb_4bit_compute_dtype={dtype}"]
    return [*options, *([f"bnb_4bit_quant_storage={dtype}"] if sharded else [])]


TRAINER: Mapping[str, Callable[[Recipe], Arguments]] = {
    "train.epochs": _length,
    "train.seed": _plain("seed", "train.seed"),
    "optimizer.name": _optimizer,
    "optimizer.lr": _plain("learning_rate", "optimizer.lr"),
    "optimizer.weight_decay": _plain("weight_decay", "optimizer.weight_decay"),
    "optimizer.beta1": _plain("adam_beta1", "optimizer.beta1"),
    "optimizer.beta2": _plain("adam_beta2", "optimizer.beta2"),
    "optimizer.eps": _plain("adam_epsilon", "optimizer.eps"),
    "optimizer.clip_grad": _plain("max_grad_norm", "optimizer.clip_grad"),
    "schedule.name": _schedule,
    "schedule.warmup_steps": _plain("warmup_steps", "schedule.warmup_steps"),
    "train.log_every": _plain("logging_steps", "train.log_every"),
    "train.eval_every": _evaluations,
    "train.per_token_loss": _token_loss,
    "kernels.loss": _loss,
    "checkpoint.save_every": _saves,
    "checkpoint.keep": _kept,
    "data.workers": _plain("dataloader_num_workers", "data.workers"),
    "data.group_by_length": lambda recipe: (
        {"train_sampling_strategy": "group_by_length"} if recipe.data.group_by_length else {}
    ),
}
"""Arguments of transformers.TrainingArguments, by the field of a recipe."""
CHATS: Mapping[str, Callable[[Recipe], Arguments]] = {
    "data.seq_length": _plain("max_length", "data.seq_length"),
    "data.packing": _plain("packing", "data.packing"),
    "data.train_on": _loss_tokens,
    "data.truncation": lambda recipe: {"truncation_mode": "keep_end"} if recipe.data.truncation == "start" else {},
    "data.chat_template": lambda recipe: (
        {"chat_template_path": recipe.data.chat_template} if recipe.data.chat_template else {}
    ),
}
"""Arguments of trl.SFTConfig."""
ADAPTER: Mapping[str, Callable[[Recipe], Arguments]] = {
    "peft.rank": _plain("r", "peft.rank"),
    "peft.alpha": _plain("lora_alpha", "peft.alpha"),
    "peft.dropout": _plain("lora_dropout", "peft.dropout"),
    "peft.targets": _targets,
    "peft.method": _method,
}
"""Arguments of peft.LoraConfig."""
NEAREST: Mapping[str, tuple[Callable[[Recipe], bool], str]] = {
    "schedule.wsd_decay_style": (
        lambda recipe: recipe.schedule.name == "wsd" and recipe.schedule.wsd_decay_style not in WSD_STYLES.values(),
        "the Trainer has no such decay: it would be linear",
    ),
    "data.train_on": (
        lambda recipe: recipe.goal != "pretrain" and recipe.data.train_on == "last_answer",
        "TRL has no such loss: it would count all answers",
    ),
    "data.truncation": (
        lambda recipe: recipe.goal != "pretrain" and recipe.data.truncation not in TRUNCATIONS.values(),
        "TRL would cut the end of longer samples: filter them before",
    ),
}
"""Values that the arguments cannot say, by field: where, and what the nearest value that is written does."""
WITH = {
    "train.epochs": ("train.steps",),
    "train.eval_every": ("train.early_stop_patience", "train.early_stop_delta"),
    "schedule.name": ("schedule.min_lr", "schedule.wsd_decay_steps", "schedule.wsd_decay_style"),
}
"""Fields that an argument contains besides its own."""
ARGUMENT_FIELDS = tuple(
    field for table in (TRAINER, CHATS, ADAPTER) for one in table for field in (one, *WITH.get(one, ()))
)
"""Recipe fields that the arguments of the program set."""
SAMPLE_LENGTH = "block_size"
CALLBACKS = "callbacks"
WRITTEN = "written by meshwright export"
PROGRAM = "train.py"
BATCH = ("train.global_batch_size", "layout.micro_batch_size")


def program_file(
    recipe: Recipe, micro: int, steps: int, recomputes: bool, deepspeed: str = "", sharded: bool = False
) -> tuple[str, tuple[str, ...], tuple[UnmappedField, ...]]:
    """Return a Python file with the arguments, the fields that they set, and those that have none.

    `recomputes` is whether the Trainer does: it refuses to if the YAML does, and TRL's default is to. `deepspeed` is
    the config that the Trainer passes on; it refuses values that differ from its own. `sharded` is whether weights are.
    """
    lost: dict[str, UnmappedField] = {}
    batch: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": steps,
        "gradient_checkpointing": recomputes,
    }
    chats = recipe.goal != "pretrain"
    if deepspeed:
        batch |= {"deepspeed": deepspeed}
    if deepspeed or chats or uses_deepspeed(recipe):  # SFTConfig's default is bf16; DeepSpeed's must be the config's
        eight = recipe.precision.matmul != "same" and not deepspeed  # set by the config of Accelerate
        batch |= {kind: recipe.precision.compute == kind and not eight for kind in ("bf16", "fp16")}
    if deepspeed and recipe.kernels.compile:  # Accelerate's YAML has a key for it
        batch |= {"torch_compile": True}
    trainer = {**batch, **_arguments(recipe, {**TRAINER, **(CHATS if chats else {})}, lost)}
    config, stops = "SFTConfig" if chats else "TrainingArguments", stops_early(recipe)
    lines = [f'"""Arguments of {recipe.name or "a recipe"}, {WRITTEN}: import them in train.py."""', ""]
    quantized = recipe.goal == "peft" and recipe.peft.method in QUANTIZED
    lines += ["import torch"] if quantized and recipe.peft.method == "qlora" else []
    lines += ["from peft import LoraConfig"] if recipe.goal == "peft" else []
    classes = [*(["BitsAndBytesConfig"] if quantized else []), *(["EarlyStoppingCallback"] if stops else [])]
    classes += [config] if not chats else []
    lines += [f"from transformers import {', '.join(classes)}"] if classes else []
    lines += ["from trl import SFTConfig"] if chats else []
    lines += ["", f"args = {config}("]
    lines += [*_lines({"output_dir": recipe.checkpoint.folder or recipe.name or "output", **trainer}), ")"]
    lines += _callbacks(recipe) if stops else []
    if not chats:  # TrainingArguments has no length of a sample
        lines.append(f"{SAMPLE_LENGTH} = {recipe.data.seq_length}  # tokens of a sample, for the data of your program")
    if changed := _changed_model(recipe):
        lines.append(f"# {changed}")
    if recipe.goal == "peft":
        adapter = _arguments(recipe, ADAPTER, lost)
        lines += ["peft_config = LoraConfig(", *_lines({"task_type": "CAUSAL_LM", **adapter}), ")"]
    lines += _quantization(recipe, sharded) if quantized else []
    lost |= {
        field: UnmappedField(field, field_value(recipe, field), reason)
        for field, (is_lost, reason) in NEAREST.items()
        if is_lost(recipe) and field not in lost
    }
    tables = (TRAINER, CHATS if chats else {}, ADAPTER if recipe.goal == "peft" else {})
    fields = [one for table in tables for field in table for one in (field, *WITH.get(field, ()))]
    carried = (
        *BATCH,
        "checkpoint.folder",
        *(("layout.recompute",) if recomputes else ()),
        *(("kernels.compile",) if "torch_compile" in batch else ()),
        *(() if chats else ("data.seq_length",)),
        *(field for field in fields if field not in lost),
    )
    return "\n".join((*lines, "")), carried, tuple(lost.values())


def file_name(recipe: Recipe) -> str:
    """Return the name of the file, which is that of a module."""
    return file_of(recipe.name or "recipe")


def file_of(name: str) -> str:
    """Return the name of the file of arguments of a recipe or job of this name."""
    return f"{name.replace('-', '_').replace('.', '_')}_args.py"


def _arguments(
    recipe: Recipe, table: Mapping[str, Callable[[Recipe], Arguments]], lost: dict[str, UnmappedField]
) -> dict[str, Any]:
    """Return the arguments of a table, and add the fields that have none to `lost`."""
    found: dict[str, Any] = {}
    for field, arguments in table.items():
        try:
            found |= arguments(recipe)
        except InputError as error:
            lost[field] = UnmappedField(field, field_value(recipe, field), error.reason)
    return found


def _lines(arguments: Arguments) -> Iterator[str]:
    for name, value in arguments.items():
        plain = int(value) if isinstance(value, float) and value.is_integer() and name == "lora_alpha" else value
        text = f'"{plain}"' if isinstance(plain, str) else repr(plain).replace("'", '"')
        yield f"    {name}={text},"


def _changed_model(recipe: Recipe) -> str:
    """Return what the training program has to build if the model is not the published one; else an empty string."""
    given = ", ".join(f"{key}={value}" for key, value in changes(recipe).items())
    return f"the model is {recipe.model} with {given}: your program builds it with that config" if given else ""


def program_notes(recipe: Recipe, written: bool = False) -> Iterator[str]:
    """Yield what the training program has to do besides passing its arguments; a `written` one does some of it."""
    if changed := _changed_model(recipe):
        yield changed
    if recipe.goal == "peft" and recipe.peft.method in QUANTIZED and not written:
        bits = QUANTIZED[recipe.peft.method]
        yield f"pass quantization_config to from_pretrained: the frozen weights are loaded in {bits} bits"
    if recipe.goal != "pretrain" and recipe.data.packing and not written:
        yield (
            'packing needs attn_implementation="flash_attention_2" (or 3) in from_pretrained: '
            "otherwise packed documents attend to each other"
        )
    if recipe.goal != "pretrain" and recipe.data.train_on != "all" and rows_of(recipe.data.dataset) in ("", "other"):
        yield (
            "assistant_only_loss needs a chat template with {% generation %}: TRL has those of the families it knows, "
            "for others set one on the tokenizer"
        )
