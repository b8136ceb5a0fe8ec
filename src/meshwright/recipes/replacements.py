"""What to write for a key of another trainer that is no recipe field: computed for the recipe and the typed command."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from math import ceil
from pathlib import Path

import msgspec

from meshwright import file_access
from meshwright.clusters import cluster
from meshwright.display import plural
from meshwright.errors import InputError
from meshwright.recipes.key_maps import REMOVED_KEYS
from meshwright.recipes.types import Recipe

OFF = ("false", "no", "none", "null", "0", "")
ON = ("true", "yes", "1")
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("float16", "half", "16-mixed", "16", "fp16-mixed"), "fp16"),
    **dict.fromkeys(("float32", "float", "32-true", "32"), "fp32"),
}
PER_EPOCH = ("_per_epoch", "_every_n_epoch")  # ends of names of numbers of times per epoch, or of epochs
RUN_OPTIONS = {"azure_ml": "", "all": "wandb"}
LINES = (".jsonl", ".ndjson")
BYTES_PER_TOKEN = 4.0  # of English text and JSON, with the tokenizers of current models
NEW_RUN = "runs/my-run"
VALIDATION_SECTIONS = ("val", "valid", "validate", "validation", "validator", "eval", "evaluation", "holdout", "dev")
"""Words of other tools for a section of settings of the validation: validation.dataset, eval.interval."""
VALIDATION_WORDS = (
    *("val", "valid", "eval", "validate", "validation", "holdout", "hold_out", "held_out", "dev"),
    *(
        f"{start}_{end}"
        for start in (*VALIDATION_SECTIONS, "test")
        for end in (
            *("split", "share", "ratio", "fraction", "frac", "percent", "part", "data", "set", "dataset", "datasets"),
            *("file", "files", "path", "data_path", "data_file", "dataset_path", "dataset_name"),
        )
    ),
)
"""Words of other tools for the data to validate on; the value shows whether it is a share or a file."""
_CHECKPOINT = re.compile(r"(^|/)(checkpoints(/[^/]+)?|checkpoint-\d+|step-\d+|epoch[-_]\d+)/*$")


class _CommandError(InputError):
    """Wrong overrides; which replacement is valid depends on the options of the typed command."""

    def for_options(self, options: Collection[str]) -> InputError:
        """Return the error with replacements that a command with these options accepts."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, object]:
        """Return the error as every invalid input is printed."""
        return super().to_dict() | {"kind": InputError.__name__}


class RemovedKeyError(_CommandError):
    """A key that is something else here, with its replacements in order of preference."""

    def __init__(
        self, key: str, text: str, reason: str, choices: Sequence[str], options: Collection[str] | None = None
    ) -> None:
        self.explained, self.choices = reason, choices
        fitting = [one for one in choices if options is None or not one.startswith("--") or one.split()[0] in options]
        what = f"use {fitting[0]}" if fitting else "leave it out"
        super().__init__(f"{reason}; {what}", key, text, fitting[:1] or [f"without {key}"])

    def for_options(self, options: Collection[str]) -> InputError:
        """Return the error with the first replacement that a command with these options accepts."""
        return RemovedKeyError(self.field, str(self.value), self.explained, self.choices, options)


class OverridesError(_CommandError):
    """Several wrong overrides in one error, so that they are corrected at once."""

    def __init__(self, errors: Sequence[InputError]) -> None:
        self.errors = errors
        first, *others = errors
        more = [f"{one.field}={one.value}: {one.reason}" for one in others]
        fix = list(dict.fromkeys(fix for error in errors for fix in error.fix[:1]))
        written = _joined([one for one in fix if not one.startswith(("without ", "meshwright "))])
        commands = [one for one in fix if one.startswith("meshwright ")]
        left_out = " ".join(one.removeprefix("without ") for one in fix if one.startswith("without "))
        whole = [written] if written else [f"without {left_out}"] if left_out else []
        super().__init__("; ".join([first.reason, *more]), first.field, first.value, [*whole, *commands])

    def for_options(self, options: Collection[str]) -> InputError:
        """Return the errors with replacements that a command with these options accepts."""
        return OverridesError([for_options(one, options) for one in self.errors])


def _joined(fixes: Sequence[str]) -> str:
    """Return several fixes as one, in which the last one of a field counts."""
    words = [word for one in fixes for word in (one.split() if not one.startswith("--") else [one])]
    if not all("=" in word or word.startswith("--") for word in words):
        return " ".join(fixes)
    return " ".join({word.partition("=")[0] if "=" in word else word: word for word in words}.values())


def for_options(error: InputError, options: Collection[str]) -> InputError:
    """Return an error of overrides with replacements that a command with these options accepts."""
    return error.for_options(options) if isinstance(error, _CommandError) else error


def removed_key(
    key: str, text: str, recipe: Recipe, accepts: Callable[[str], bool], typed: str = ""
) -> RemovedKeyError:
    """Return the error for a key, `typed` so, that is something else here; `accepts`: whether an override is valid."""
    reason, *choices = REMOVED_KEYS[key]
    if text.lower() in OFF and not _counts(key):
        return RemovedKeyError(typed or key, text, reason, ())
    try:
        value, why = _value(key, text, recipe)
    except (ValueError, ZeroDivisionError, InputError):
        value, why = "", ""
    written = [_filled(one, value, text) for one in choices] if value else []
    return RemovedKeyError(typed or key, text, reason + why, [one for one in written if _valid(one, accepts)])


def computed_after(key: str) -> int:
    """Return the place of a key in the order of computation: batch and data, then intervals, then shares of the run."""
    name = key.rpartition(".")[2]
    return 3 if name == "warmup_ratio" else 2 if name.endswith("_strategy") else 1 if name.endswith(PER_EPOCH) else 0


def _counts(key: str) -> bool:
    """Return whether "no" and 0 are values of a key, not its absence."""
    name = key.rpartition(".")[2]
    return name.endswith(("_strategy", *PER_EPOCH, "_ratio", "_factor")) or name in ("gpus", "model", "goal")


def _filled(choice: str, value: str, text: str) -> str:
    numbers = [int(one) for one in re.findall(r"[0-9]+(?=x|$)", text.lower())] or [1]
    ranks = numbers[0] if len(numbers) == 1 else numbers[0] * numbers[1]
    return choice.replace("{value}", value).replace("{ranks}", str(ranks))


def _valid(choice: str, accepts: Callable[[str], bool]) -> bool:
    if choice.startswith(("--", "meshwright ")) or choice.endswith("=auto"):
        return True
    return all(accepts(one) for one in choice.split())


def _value(key: str, text: str, recipe: Recipe) -> tuple[str, str]:
    """Return the value of the replacement, and what it was computed from."""
    name, layout, train = key.rpartition(".")[2], recipe.layout, recipe.train
    if name == "warmup_ratio":
        if train.epochs or not train.steps:
            in_epoch, about = _epoch_steps_or_about(recipe)
            own, steps = recipe.schedule.warmup_steps, ceil(round((train.epochs or 0) * (in_epoch or 0), 6))
            if steps:
                warmup = round(float(text) * steps)
                return str(
                    warmup
                ), f" ({text} of {about or 'the '}{plural(steps, 'step')} of train.epochs={train.epochs:g})"
            return str(own), f" (the steps of train.epochs follow from the data; {own} is the recipe's own)"
        return str(max(round(float(text) * train.steps), 0)), f" ({text} of train.steps={train.steps})"
    if name in ("gradient_accumulation_steps", "grad_accum_steps"):
        ranks = max(cluster(recipe.cluster).world // (layout.tp * layout.pp * layout.cp), 1)
        size = layout.micro_batch_size
        return str(size * int(text) * ranks), f" ({text} × micro batch {size} × {ranks} data-parallel ranks)"
    if name in ("min_lr_ratio", "min_lr_factor"):
        return f"{float(text) * recipe.optimizer.lr:g}", ""
    if name.endswith(("_strategy", *PER_EPOCH)):
        return _every(name, text, recipe)
    if name == "hierarchical_context_parallel_sizes":
        return re.findall(r"[0-9]+", text)[0] if re.findall(r"[0-9]+", text) else "", ""
    if name.startswith("resume"):
        return run_folder(text), ""
    if name == "report_to":
        first = re.sub(r"[\[\]'\" ]", "", text).split(",")[0].lower()
        return RUN_OPTIONS.get(first, first), ""
    if "data.split=train[:{value}]" in REMOVED_KEYS[key]:
        return str(int(text)), ""
    return DTYPES.get(text.lower().rpartition(".")[2], text), ""


def _every(name: str, text: str, recipe: Recipe) -> tuple[str, str]:
    """Return how many steps are between validations, checkpoints or log lines, and how they follow from an epoch."""
    if text.lower() in OFF:
        return "0" if not name.startswith("logging") else str(recipe.train.log_every), ""
    data = recipe.data
    validates = name.startswith(("eval", "check_val"))
    held_out = data.validation or data.validation_part or data.dataset == "mock" or not validates
    if not held_out:
        recipe = msgspec.structs.replace(recipe, data=msgspec.structs.replace(data, validation_part=0.1))
    own = {"save": recipe.checkpoint.save_every, "logg": recipe.train.log_every}.get(name[:4], recipe.train.eval_every)
    steps, about = _epoch_steps_or_about(recipe)
    whole = recipe.train.epochs * (steps or 0) or recipe.train.steps
    every, why = own or max(int(whole) // 10, 1), ""
    count = int(text) if name.endswith(PER_EPOCH) else 1 if text.lower() == "epoch" else 0
    per_epoch = 1 / count if count and name.endswith("_n_epoch") else count
    if per_epoch and steps:
        every, why = max(round(steps / per_epoch), 1), f" ({about}{steps:.4g} steps are an epoch of {data.dataset})"
    elif per_epoch:
        why = " (the steps of an epoch follow from the data: train prints its samples at the start)"
    return f"{every}" if held_out else f"{every} data.validation_part=0.1", why


def _epoch_steps_or_about(recipe: Recipe) -> tuple[float | None, str]:
    """Return the steps of an epoch of a local file and "about " if its samples are packed; None if unknown."""
    if (exact := _epoch_steps(recipe)) is not None:
        return exact, ""
    path, data = _local_lines(recipe), recipe.data
    if path is None or not data.packing:
        return None, ""
    tokens = path.stat().st_size / bytes_per_token(recipe)
    kept = max(1.0, tokens * (1 - data.validation_part) / data.seq_length)
    return ceil(kept) / recipe.train.global_batch_size, "about "


def bytes_per_token(recipe: Recipe) -> float:
    """Return the bytes of a text file per token, for lengths that are not counted with the tokenizer."""
    return 1.0 if recipe.data.tokenizer == "bytes" else BYTES_PER_TOKEN


def _local_lines(recipe: Recipe) -> Path | None:
    """Return the file of fine-tuning samples on this machine that a recipe trains on, one per line; None without."""
    path = Path(recipe.data.dataset).expanduser()
    if recipe.goal == "pretrain" or recipe.data.blend or path.suffix.lower() not in LINES:
        return None
    return None if file_access.closed() or not path.is_file() else path


def _epoch_steps(recipe: Recipe) -> float | None:
    """Return the steps of an epoch of a file with one sample per line; None for other data, and packed samples."""
    path = _local_lines(recipe)
    if path is None or recipe.data.packing:
        return None
    with path.open("rb") as file:
        rows = sum(bool(line.strip()) for line in file)
    return rows * (1 - recipe.data.validation_part) / recipe.train.global_batch_size or None


class WarmupShare(msgspec.Struct, frozen=True):
    """A warmup as a share of the steps of the training, as transformers rounds it unless stated."""

    share: float = 0.0  # 0: the warmup is not a share
    most: int = 0  # steps that it does not exceed; 0: no limit
    rounds_down: bool = False

    def __bool__(self) -> bool:
        """Return whether the warmup is a share."""
        return self.share > 0

    def __str__(self) -> str:
        """Return the share in percent, with its limit."""
        return f"{self.share * 100:g} %" + (f" (at most {self.most:,})" if self.most else "")

    def of(self, steps: float) -> int:
        """Return the steps of the warmup of a training of so many steps."""
        found = int(self.share * steps + 1e-9) if self.rounds_down else ceil(self.share * steps)
        return min(found, self.most) if self.most else found


def warmup_steps(share: WarmupShare, recipe: Recipe) -> int | None:
    """Return the steps of a warmup that is a share of the training; None without one, or if the steps are unknown."""
    epochs = recipe.train.epochs
    steps = epochs * (_epoch_steps(recipe) or 0) if epochs else recipe.train.steps
    return share.of(steps) if share and steps else None


def names_validation_data(key: str) -> bool:
    """Return whether a key of another tool means the data to validate on: val_data, validation.dataset, data.eval."""
    section, _, name = key.partition(".")
    return key.replace(".", "_") in VALIDATION_WORDS or (
        section in ("data", "dataset", "datasets") and name.replace(".", "_") in VALIDATION_WORDS
    )


def sets_validation(key: str) -> bool:
    """Return whether a key is in a section of another tool for the validation: validation.every."""
    section, dot, _ = key.partition(".")
    return bool(dot) and section in VALIDATION_SECTIONS


def held_out_data(text: str) -> str:
    """Return the override for data to validate on: a share of the samples (0.1, 10%), or a dataset of its own."""
    share = as_share(text)
    return f"data.validation={text or 'FILE'}" if share is None else f"data.validation_part={share:g}"


def as_share(text: str) -> float | None:
    """Return a share of the samples as a number below 1; None for what is no share, such as a file."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        return None
    return share if 0 < share < 1 else None


def run_folder(text: str) -> str:
    """Return the run folder that a checkpoint or a value of resume_from_checkpoint means."""
    return NEW_RUN if text.lower() in (*ON, "latest", "auto", "last") else _CHECKPOINT.sub("", text).rstrip("/") or "."


def together(errors: Iterable[InputError]) -> InputError:
    """Return several wrong overrides as one error."""
    first, *others = errors
    return OverridesError([first, *others]) if others else first
