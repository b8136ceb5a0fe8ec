"""Recipe fields from the arguments of transformers' Trainer, TRL and peft, and the arguments that no field carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from meshwright import json_text
from meshwright.errors import InputError
from meshwright.frameworks.adapter_defaults import LIBRARY
from meshwright.frameworks.common import KEEP_ALL
from meshwright.frameworks.mapping import text_of
from meshwright.frameworks.trainer_args import POLYNOMIAL, WSD
from meshwright.frameworks.types import ProgramArguments, Settings, SourcedValue, as_int
from meshwright.recipes.key_maps.hugging_face import ARGUMENTS, KEYS, WSD_STYLES
from meshwright.recipes.key_maps.hugging_face_removed import REMOVED
from meshwright.recipes.overrides import translate_value
from meshwright.recipes.replacements import WarmupShare
from meshwright.recipes.types import Goal, recipe_fields
from meshwright.recipes.values import parse

ROWS = {row.key: row for row in (*KEYS, *ARGUMENTS)}
LISTS = ("lora_target_modules", "target_modules")  # arguments with several values
DATASETS = ("datasets", "dataset_name", "train_file", "dataset_path", "train_data_path", "data_path", "dataset")
STEPS, EPOCHS = ("max_steps", "max_train_steps"), ("num_train_epochs", "num_epochs")
WARMUPS, SHARE = ("warmup_steps", "num_warmup_steps"), "warmup_ratio"
SAVES, EVALUATIONS = ("save_strategy",), ("eval_strategy", "evaluation_strategy")
SCHEDULE, SCHEDULE_OPTIONS = "lr_scheduler_type", "lr_scheduler_kwargs"
MIN_LR_SCHEDULE = "cosine_with_min_lr"
COSINE_SHARE = "cosine_min_lr_ratio"  # of Axolotl: where its cosine ends, as a share of the peak
ENDS = {MIN_LR_SCHEDULE: ("min_lr", "min_lr_rate"), POLYNOMIAL: ("lr_end", ""), WSD: ("", "min_lr_ratio")}
"""Options of a schedule that state where it ends: as a learning rate, or as a share of the peak."""
POLYNOMIAL_END = 1e-7  # lr_end of transformers' function
LIGER_OPTIONS = "liger_kernel_config"
COMBINED = (
    *DATASETS,
    *STEPS,
    *EPOCHS,
    *WARMUPS,
    SHARE,
    *SAVES,
    *EVALUATIONS,
    SCHEDULE,
    SCHEDULE_OPTIONS,
    LIGER_OPTIONS,
)
"""Arguments that are read together."""
LANGUAGE_MODELING = "run_clm"  # transformers' examples, whose loss counts every token of a text
CONCATENATES = "group_texts"  # the function of run_clm, also in programs made from it, that cuts texts into blocks
PLAIN_TEXT = "plain_text"  # an exported program that pretrains, also from existing weights
SAMPLE_LENGTHS = "sample_lengths"  # different lengths that a program tokenizes with
UNUSED_ADAPTERS = "unused_peft_config"  # the change that would use a LoraConfig that a program passes to nothing
ADAPTERS_OFF = "adapters"  # the test that skips the only LoraConfig of a program with the options it is started with
STORED_IN_BYTES = "uint8_storage"  # a program's BitsAndBytesConfig that leaves 4-bit weights in uint8 tensors
NO_VALIDATION_DATA = "no_eval_dataset"  # the trainer that a program constructs without data for evaluations
OPEN_ARGUMENTS = "open_arguments"  # arguments of the Trainer that a program passes as a dictionary or sets later
LOADED_BY_TRL = "model_init_kwargs"  # a model that TRL's trainer gets by name, and loads in fp32 without a dtype
LOAD_OPTIONS = "load_options"  # model_init_kwargs as the program writes them: texts of the keys and of their values
LOADED_BY_UNSLOTH = "fast_model"  # Unsloth's class that loads a model: without a dtype in that of the GPU
OWN = (
    LIBRARY,
    LANGUAGE_MODELING,
    LOADED_BY_UNSLOTH,
    LOADED_BY_TRL,
    LOAD_OPTIONS,
    CONCATENATES,
    NO_VALIDATION_DATA,
    OPEN_ARGUMENTS,
    UNUSED_ADAPTERS,
    ADAPTERS_OFF,
    STORED_IN_BYTES,
    SAMPLE_LENGTHS,
    "deepspeed",
    "deepspeed_config",
    "do_train",
    "do_eval",
    "local_rank",
)  # name the config, or what is done
OFF = ("", "none", "no", "false", "null")
NO_FIELD = "no field in our recipes"
FOLDER = "checkpoints of another framework stay apart: name a folder with checkpoint.folder=DIR, or train --out DIR"
KEEPS_BEST = "is done with every validation: the checkpoint with the lowest validation loss is kept"
PAGED = "paged_"  # start of the names of optimizers whose states move to host memory when the GPU is full
NOT_PAGED = "paged optimizer states have no field: they stay in GPU memory, and the optimizer is otherwise the same"
NESTED = ("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quantization")
NOT_NESTED = "double quantization has no field: the scales of 4-bit weights stay in fp32, 0.4 bits more per weight"
FROZEN = "precision.frozen"
WEIGHT_DTYPES = ("dtype", "torch_dtype")  # of from_pretrained; the second is its former name
TRL_LOSSES = ("assistant_only_loss", "completion_only_loss")
MARKS = ("output_dir", "per_device_train_batch_size", *EPOCHS[:1])
TRAINER_DEFAULTS: Mapping[str, Any] = {
    "optimizer.lr": 5e-5,
    "optimizer.weight_decay": 0.0,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-8,
    "optimizer.clip_grad": 1.0,
    "schedule.name": "linear",
    "schedule.warmup_steps": 0,
    "schedule.min_lr": 0.0,
    "train.seed": 42,
    "train.log_every": 500,
    "train.eval_every": 0,
    "train.per_token_loss": True,
    "checkpoint.save_every": 500,
    "checkpoint.keep": KEEP_ALL,
}
"""Values of transformers.TrainingArguments that a command does not set."""
TRL_DEFAULTS: Mapping[str, Any] = {
    "optimizer.lr": 2e-5,
    "train.log_every": 10,
    "data.seq_length": 1024,
    "data.packing": False,
    "layout.recompute": "full",
}
"""Values of trl.SFTConfig that differ from those of TrainingArguments or that only it has."""
TRL_MARKS = ("packing", "packing_strategy", "dataset_text_field", "dataset_train_split", "padding_free", *TRL_LOSSES)
"""Arguments that only TRL's programs have."""
DEFAULT_EPOCHS = 3.0


def is_trainer(args: Settings) -> bool:
    """Return whether arguments are those of the Trainer, or of a program with the same."""
    return any(name in args for name in MARKS)


def is_trl(args: Settings, script: str = "") -> bool:
    """Return whether a program is one of TRL's SFTTrainer: by its path, or by arguments that only TRL has."""
    path = PurePath(script)
    return (
        "trl" in path.parts
        or script.startswith("trl.")
        or path.name in ("sft.py", "trl")
        or any(name in args for name in TRL_MARKS)
    )


def default_length(values: Mapping[str, Any], open_fields: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the Trainer's length if no argument sets one."""
    if not {"train.steps", "train.epochs"} & {*values, *open_fields}:
        yield "train.epochs", DEFAULT_EPOCHS


def read_arguments(args: Settings, goal: Goal) -> ProgramArguments:
    """Return the recipe fields that arguments set, and those that are lost."""
    reader = _Reader(args, goal)
    for name, setting in args.items():
        if name not in COMBINED and name not in OWN:
            reader.read(name, setting)
    reader.read_liger()
    reader.read_dataset()
    reader.read_length()
    reader.read_schedule()
    share = WarmupShare(reader.read_warmup())
    reader.read_interval(SAVES, "checkpoint.save_every", by_default=True)
    reader.read_interval(EVALUATIONS, "train.eval_every", by_default=False)
    open_fields = tuple(reader.open_fields)
    return ProgramArguments(args, reader.values, reader.sources, reader.lost, open_fields, share, reader.per_epoch)


class _Reader:
    """Collects recipe fields from arguments."""

    def __init__(self, args: Settings, goal: Goal) -> None:
        self.args, self.goal = args, goal
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self.open_fields: list[str] = []
        self.per_epoch: dict[str, str] = {}

    def read(self, name: str, setting: SourcedValue) -> None:
        """Read one argument by the table."""
        row = ROWS.get(name)
        if row is not None and row.field.startswith("peft.") and self.goal != "peft":
            row = None
        if row is not None:
            is_off = setting.value is False and row.values and "false" not in row.values
            if not is_off:
                self.set(row.field, name, setting, translate_value(row, text_of(setting.value)))
            if row.field == "optimizer.name" and text_of(setting.value).startswith(PAGED):
                self.lost[name] = NOT_PAGED
        elif str(setting.value).lower() not in OFF:
            own = {"output_dir": FOLDER, **dict.fromkeys(NESTED, NOT_NESTED)}
            reason, *choices = (own[name],) if name in own else REMOVED.get(name, (NO_FIELD,))
            if reason != "is not needed here":
                write = choices[0].replace("{value}", str(setting.value)) if choices and not setting.unresolved else ""
                self.lost[name] = f"{reason}; write {write}" if write else reason

    def set(self, field: str, name: str, setting: SourcedValue, text: str) -> None:
        """Set a field to the value of an argument, or list why it cannot be."""
        if setting.unresolved:
            self.open_fields.append(field)
            self.lost[name] = f"known only when it runs: {setting.unresolved}; write {field}=VALUE"
            return
        try:
            self.values[field] = parse(recipe_fields()[field], text, name)
            self.sources[field] = name
        except InputError as error:
            self.lost[name] = error.reason

    def first(self, names: tuple[str, ...]) -> tuple[str, SourcedValue] | None:
        """Return the first of some arguments that is given."""
        return next(((name, self.args[name]) for name in names if name in self.args), None)

    def read_dataset(self) -> None:
        """Read the data: programs prefer a dataset by name to files."""
        if found := self.first(DATASETS):
            self.set("data.dataset", found[0], found[1], str(found[1].value))

    def read_liger(self) -> None:
        """Read liger_kernel_config, which can leave out the loss that is fused with the output layer."""
        found = self.args.get(LIGER_OPTIONS)
        if argument_options(found).get("fused_linear_cross_entropy") is False:
            self.values.pop("kernels.loss", None)
            self.sources.pop("kernels.loss", None)

    def read_length(self) -> None:
        """Read the length: steps above zero replace epochs."""
        steps, epochs = self.first(STEPS), self.first(EPOCHS)
        if steps and (steps[1].unresolved or as_int(steps[1])):
            self.set("train.steps", *steps, str(steps[1].value))
        elif epochs:
            self.set("train.epochs", *epochs, str(epochs[1].value))

    def read_schedule(self) -> None:
        """Read the decay, and where cosine_with_min_lr ends."""
        found = self.args.get(SCHEDULE)
        if found is None:
            return
        name, options = str(found.value), self.args.get(SCHEDULE_OPTIONS)
        given = argument_options(options)
        straight = name == POLYNOMIAL and given.get("power", 1) == 1
        ours = "linear" if straight else translate_value(ROWS[SCHEDULE], name.removesuffix("_with_min_lr"))
        self.set("schedule.name", SCHEDULE, found, ours)
        end = self._end_of_decay(name, given)
        if end is not None:
            self.values["schedule.min_lr"] = end
        elif options is not None and options.value not in ("{}", {}) and not (straight or name == WSD):
            self.lost[SCHEDULE_OPTIONS] = NO_FIELD
        if name == WSD:
            style = str(given.get("decay_type", "cosine"))  # as transformers' function has it
            self.set("schedule.wsd_decay_style", SCHEDULE, found, WSD_STYLES.get(style, style))
            if isinstance(steps := given.get("num_decay_steps"), int):
                self.values["schedule.wsd_decay_steps"] = steps

    def _end_of_decay(self, name: str, given: Mapping[str, Any]) -> float | None:
        """Return the learning rate at the end of a decay whose options state it."""
        absolute, share = ENDS.get(name, ("", ""))
        if name == "cosine" and COSINE_SHARE in self.args:
            share, given = COSINE_SHARE, {COSINE_SHARE: _number(self.args[COSINE_SHARE].value)}
        if isinstance(given.get(absolute), int | float):
            return float(given[absolute])
        if isinstance(given.get(share), int | float):
            return float(f"{given[share] * self.values.get('optimizer.lr', 5e-5):.12g}")
        return POLYNOMIAL_END if name == POLYNOMIAL else None

    def read_warmup(self) -> float:
        """Read the warmup; return its share of the steps if it is given as one. Steps above zero replace a share."""
        steps, share = self.first(WARMUPS), self.args.get(SHARE)
        if str(getattr(self.args.get(SCHEDULE), "value", "")) == "constant":  # has none
            return 0.0
        number = None if steps is None or steps[1].unresolved else _number(steps[1].value)
        if steps and (steps[1].unresolved or number is None or number >= 1):
            self.set("schedule.warmup_steps", *steps, str(steps[1].value))
            return 0.0
        found = number or (0.0 if share is None or share.unresolved else _number(share.value) or 0.0)
        if share is not None and share.unresolved:
            self.set("schedule.warmup_steps", SHARE, share, "")
        elif share is not None and not 0 <= found < 1:
            self.lost[SHARE] = "is not a share of the steps"
            return 0.0
        return found

    def read_interval(self, strategies: tuple[str, ...], field: str, by_default: bool) -> None:
        """Read when a run saves or validates: in steps, never, or at the end of an epoch, which no field carries."""
        found = self.first(strategies)
        strategy = str(found[1].value).lower() if found else "steps" if by_default else "no"
        strategy = "no" if strategy in OFF else strategy
        if strategy == "steps":
            if field == "train.eval_every" and field not in self.values:  # as often as it logs
                self.values[field] = self.values.get("train.log_every", TRAINER_DEFAULTS["train.log_every"])
            return
        self.values[field] = 0
        self.sources.pop(field, None)
        if found and strategy == "best":
            self.lost[found[0]] = KEEPS_BEST
        elif found and strategy != "no":
            self.per_epoch[field] = found[0]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def argument_options(setting: SourcedValue | None) -> Mapping[str, Any]:
    """Return an argument with options, such as lr_scheduler_kwargs, which a command states as JSON."""
    if setting is None or setting.unresolved or isinstance(setting.value, Mapping):
        return setting.value if setting is not None and isinstance(setting.value, Mapping) else {}
    try:
        found = json_text.loads(str(setting.value).replace("'", '"'))
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}
