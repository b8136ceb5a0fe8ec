"""Configs of trainers that are not read: their name, and their settings as overrides of ours."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING

import msgspec

from meshwright import clusters, file_access, json_text
from meshwright.choices import FRAMEWORKS, FRONT_ENDS
from meshwright.errors import InputError, MeshwrightError
from meshwright.frameworks.common import gpu_request_of
from meshwright.frameworks.framework import Content, GpuRequest
from meshwright.frameworks.mapping import text_of
from meshwright.frameworks.model_match import local_model_path
from meshwright.frameworks.other_defaults import defaults_of
from meshwright.frameworks.other_losses import LOSSES, NOT_PLANNED, SWIFT_DEFAULT, loss_of, title_of, trains
from meshwright.frameworks.trainer_fields import NOT_PAGED, PAGED
from meshwright.models import is_path, reference
from meshwright.notes import no_notes
from meshwright.recipes import overrides
from meshwright.recipes.key_maps import ConfigKey, override_keys
from meshwright.recipes.key_maps.hugging_face import ARGUMENTS
from meshwright.recipes.replacements import WarmupShare, warmup_steps
from meshwright.recipes.types import Goal, Recipe

if TYPE_CHECKING:
    from meshwright.frameworks.front_ends.describe import FrontEnd

TRAINERS: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("base_model", "sequence_len"),
    "LLaMA-Factory": ("model_name_or_path", "finetuning_type"),
    "ms-swift": ("model", "train_type"),
    "torchtune": ("model._component_", "tokenizer._component_"),
    "NeMo": ("trainer.devices", "exp_manager"),
    "verl": ("actor_rollout_ref", "algorithm"),
    "EasyR1": ("worker", "algorithm", "trainer"),
    "NeMo-RL": ("policy", "checkpointing"),
}
"""Top-level or dotted keys that every config of a trainer has."""
WITH_REWARDS = ("NeMo-RL", "verl", "EasyR1")
MODELS = ("base_model", "model_name_or_path", "model")
METHODS = ("adapter", "finetuning_type", "tuner_type", "train_type")
ADAPTERS = ("lora", "qlora", "dora", "rslora")
FOUR_BITS = {"load_in_4bit": True, "quantization_bit": 4, "quant_bits": 4}
"""Settings that quantize the frozen weights to 4 bits: LoRA is then QLoRA."""
QUANTIZERS = ("quantization_method", "quant_method")
VARIANTS = {"use_dora": "dora", "peft_use_dora": "dora", "use_rslora": "rslora", "peft_use_rslora": "rslora"}
"""Switches that make LoRA another method."""
PEFT_SWITCH = "use_peft"
DATASETS = ("datasets[0].path", "dataset.source", "dataset.data_files", "dataset[0]", "dataset", "dataset_name",
    "train_file")  # fmt: skip
ROWS_OF_DATASET = "#"  # of ms-swift: dataset#500 are 500 samples of it
MICRO = ("micro_batch_size", "per_device_train_batch_size", "batch_size")
ACCUMULATION = ("gradient_accumulation_steps",)
SKIPPED = ("checkpoint.pretrained", "peft.method", "data.tokenizer", "data.dataset")
OTHER_KEYS = {"optimizer": "optim"}  # keys that another trainer uses for values as transformers names them
LOSS_KEYS = ("train_on_inputs", "train_on_prompt", "loss_scale")
DATASET, PACKING = "data.dataset", "data.packing"
TRUE = (True, "auto", "full")
IMPLIED: Mapping[str, tuple[object, ...]] = {"bf16": TRUE, "stage": ("sft",), "do_train": (True,)}
"""Values that hold for every command here; other values of these keys are listed, also those that are off."""
STRATEGIES = {"save_strategy": "save_steps", "eval_strategy": "eval_steps", "evaluation_strategy": "eval_steps"}
"""Keys that state when something is done, with the key of the steps."""
NO = ("no", "none", "false")
GPUS: Mapping[Goal, str] = {"peft": "1xH100", "sft": "8xH100"}
"""GPUs to assume if neither the command nor the file names any: adapters are mostly trained on one."""
SWIFT = "ms-swift"
ARGUMENT_ROWS = {row.key: row for row in ARGUMENTS}
DATASET_TYPE = re.compile(r"datasets\[\d+\]\.type")
PLAIN_TEXT = "completion"  # type of Axolotl's datasets without a conversation


class _Command(msgspec.Struct, frozen=True):
    """The command that plans the training of a file."""

    words: str
    carried: frozenset[str] = frozenset()  # keys of the file that it contains
    assumed: str = ""  # what the file leaves open


class Typed(msgspec.Struct, frozen=True):
    """What the user typed beside the file, which counts more than its settings."""

    gpus: str = ""
    options: tuple[str, ...] = ()  # words of the command
    fields: frozenset[str] = frozenset()  # that they set


class OtherTrainerError(InputError):
    """A config of a trainer that is not read, with the command that plans the same training."""

    def __init__(self, title: str, content: Content, typed: Typed = Typed()) -> None:  # noqa: B008
        command = _command(title, content, typed)
        of_check = f"; check also reads those of {', '.join(FRONT_ENDS)}"
        read, also = ("which only check reads", "") if title.lower() in FRONT_ENDS else ("which is not read", of_check)
        found = {key: setting.value for key, setting in content.settings.items() if not setting.unresolved}
        if loss := loss_of(found):
            reason = f"is a config of {title} that {loss.trains} ({loss.setting}): {NOT_PLANNED}"
        else:
            reason = f"is a config of {title}, {read}; read are configs of {', '.join(FRAMEWORKS)}{also}"
        lost = list(_not_carried_over(content, command.carried))
        reason += f"; not carried over by the fix: {', '.join(lost)}" if lost and command.carried else ""
        reason += f"; assumed by the fix: {command.assumed}" if command.assumed else ""
        super().__init__(reason, field="file", value=content.path, fix=(command.words,))
        self.title, self.content, self.typed = title, content, typed

    def on(self, gpus: str) -> OtherTrainerError:
        """Return the error with the command for the GPUs that the user typed."""
        return OtherTrainerError(self.title, self.content, msgspec.structs.replace(self.typed, gpus=gpus))

    def with_options(self, options: Sequence[str], fields: Collection[str]) -> OtherTrainerError:
        """Return the error with the command that has the user's options too; `fields` are what they set."""
        typed = msgspec.structs.replace(self.typed, options=tuple(options), fields=frozenset(fields))
        return OtherTrainerError(self.title, self.content, typed)


METHODS_OF_TRL = (*LOSSES, "reward")
_TRL_COMMAND = re.compile(rf"(?m)^[^#\n]*\btrl\s+({'|'.join(METHODS_OF_TRL)})\b")
_TRL_SCRIPT = re.compile(rf"(?m)^[^#\n]*[\s/.]({'|'.join(METHODS_OF_TRL)})\.py\b")
_TRL_CLASS = re.compile(r"(?m)^[^#\n]*\b(\w+)Trainer\(")
_SWIFT_COMMAND = re.compile(r"(?m)^[^#\n]*(?:\b(?:swift|megatron)\s+rlhf\b|\bswift/cli/(?:_megatron/)?rlhf\.py\b)")
_SWIFT_LOSS = re.compile(r"--rlhf_type[ =]+(\w+)")
_SWIFT_FULL = re.compile(r"--(?:train|tuner)_type[ =]+full\b")
_MODEL = re.compile(r"--model(?:_name_or_path)?[ =]+([^\s\\]+)|[\w.]*ForCausalLM\.from_pretrained\(\s*[\"']([^\"']+)")


class OtherLossError(OtherTrainerError):
    """A run with preferences or rewards, which is not read, with the command that plans the model's part."""

    def __init__(self, title: str, content: Content, gpus: str = "", library: str = "TRL") -> None:
        text = content.all_text
        found = _MODEL.search(text)
        model = (found[1] or found[2]) if found else "MODEL"
        adapts = bool(re.search(r"--use_peft|LoraConfig\(|get_peft_model\(", text))
        adapts = adapts or (library == SWIFT and not _SWIFT_FULL.search(text))  # its default is LoRA
        goal: Goal = "peft" if adapts else "sft"
        self.does = trains(title_of(title), library)
        reason = f"{self.does}: {NOT_PLANNED}"
        there = shlex.quote(_gpus(content, gpus, goal)[0])
        fix = f"meshwright recommend {shlex.quote(model)} --goal {goal} --gpus {there}"
        InputError.__init__(self, reason, field="file", value=content.path, fix=(fix,))
        self.title, self.content, self.typed, self.library = title, content, Typed(gpus), library

    def on(self, gpus: str) -> OtherLossError:
        """Return the error with the command for the GPUs that the user typed."""
        return OtherLossError(self.title, self.content, gpus, self.library)

    def with_options(self, options: Sequence[str], fields: Collection[str]) -> OtherLossError:
        """Return the error itself: its command plans another training."""
        return self


_ONE_NODE = re.compile(r"^1x(?=[0-9]+x)")  # the ranks of a run on this machine are 1x1xH100


def _gpus(content: Content, typed: str, goal: Goal) -> tuple[str, bool]:
    """Return the GPUs of a command and whether they are assumed: those typed, with the count of the script's launch."""
    typed = _ONE_NODE.sub("", typed)
    if typed and not clusters.is_known(typed.strip()):
        return typed, False
    stated = gpu_request_of(content.launches[0]) if len(content.launches) == 1 else GpuRequest()
    found = stated.text(typed.strip() or stated.gpu or clusters.DEFAULT_GPU) or typed
    return found or GPUS[goal], not found


RL_PROGRAMS: Mapping[str, re.Pattern[str]] = {
    "OpenRLHF": re.compile(r"(?m)^[^#\n]*\b(openrlhf\.cli\.\w+)"),
    "verl": re.compile(r"(?m)^[^#\n]*\b(verl\.trainer\.\w+|recipe\.\w+\.main_\w+)"),
}
"""Programs that train with rewards, in a script: their flags and overrides are not read."""
_RL_MODEL = re.compile(r"--pretrain[ =]+([^\s\\]+)|model\.(?:path|partial_pretrain)=([^\s\\]+)")


def rl_command(content: Content) -> InputError | None:
    """Return the error for a script that starts a trainer with rewards; else None."""
    text = content.all_text
    found = {title: one for title, pattern in RL_PROGRAMS.items() if (one := pattern.search(text))}
    if content.format != "shell" or not found:
        return None
    title, program = next((title, one[1]) for title, one in found.items())
    named = _RL_MODEL.search(text)
    model = (named[1] or named[2]).strip("\"'") if named else "MODEL"
    model = "MODEL" if "$" in model else model
    reason = f"starts {program}: files of {title} are not read; the fix plans supervised fine-tuning of the same model"
    fix = (shlex.join(["meshwright", "recommend", model, "--goal", "sft", "--gpus", GPUS["sft"]]),)
    return InputError(reason, field="file", value=content.path, fix=fix)


def other_loss(content: Content) -> OtherLossError | None:
    """Return the error for a script or program that trains with preferences or rewards; else None."""
    if content.format == "python":
        names = (found[1].lower() for found in _TRL_CLASS.finditer(content.text))
        title = next((name for name in names if name in METHODS_OF_TRL), "")
        return OtherLossError(title, content) if title and "trl" in content.text else None
    text = content.all_text
    if content.format == "shell" and _SWIFT_COMMAND.search(text):
        named = _SWIFT_LOSS.search(text)
        return OtherLossError(named[1] if named else SWIFT_DEFAULT, content, library=SWIFT)
    if content.format != "shell" or ("trl" not in text and ".py" not in text):
        return None
    found = _TRL_COMMAND.search(text)
    script = None if found else _TRL_SCRIPT.search(text)
    if script is not None and not any(word in text for word in ("trl", "accelerate", "deepspeed")):
        return None
    found = found or script
    return OtherLossError(found[1], content) if found else None


def other_trainer(content: Content) -> OtherTrainerError | None:
    """Return the error for a known trainer's config; else None."""
    title = _title(content)
    return OtherTrainerError(title, content) if title else None


def rl_trainer(content: Content) -> OtherTrainerError | None:
    """Return the error for a config of a trainer with rewards, whose parts look like those of other frameworks."""
    title = _title(content)
    return OtherTrainerError(title, content) if title in WITH_REWARDS else None


def _title(content: Content) -> str:
    """Return the trainer whose keys a config has; empty if none is known."""
    keys = {*content.settings, *content.top_level_keys()}
    return next((name for name, needed in TRAINERS.items() if all(one in keys for one in needed)), "")


def _command(title: str, content: Content, typed: Typed) -> _Command:
    """Return the command with the model, the goal, the data and the settings that our recipes have, and their keys."""
    found = {key: setting.value for key, setting in content.settings.items() if not setting.unresolved}
    named = next((str(found[key]) for key in MODELS if key in found), "")
    try:
        model = local_model_path(named, content) or reference(named) or named
    except MeshwrightError:
        model = named
    if not model:
        gpus, _ = _gpus(content, typed.gpus, "sft")
        return _Command(f"meshwright recommend MODEL --goal sft --gpus {gpus} KEY=VALUE")
    front = _front_end(title)
    adapter, of_adapter = _adapter(found, front)
    goal: Goal = "peft" if adapter else "sft"
    gpus, is_assumed = _gpus(content, typed.gpus, goal)
    fetch = ""
    if _is_unknown(model):  # its shape is in its config.json
        folder = model.rpartition("/")[2]
        fetch = f"hf download {shlex.quote(model)} config.json --local-dir {shlex.quote(folder)} && "
        model = f"{folder}/config.json"
    words = [f"{fetch}meshwright recommend {shlex.quote(model)} --goal {goal} --gpus {shlex.quote(gpus)}"]
    dataset = next((key for key in DATASETS if set("/.") & set(str(found.get(key, "")))), "")  # no name of a registry
    data, _, rows = (str(found[dataset]) if dataset else _registered(content, found)).partition(ROWS_OF_DATASET)
    words += [f"--dataset {shlex.quote(data)}"] if data and DATASET not in typed.fields else []
    dataset = dataset or ("dataset" if data else "")
    words += ["peft.method=" + adapter] if adapter and "peft.method" not in typed.fields else []
    kept = _overrides(found, goal, typed.fields)
    ours: dict[str, object] = {"data.split": f"train[:{rows}]"} if data and rows.isdecimal() else {}
    ours, of_ours = {**ours, **dict(_answers(found, front))}, _of_strategies(found, kept)
    ours |= {"checkpoint.save_every": 0} if "save_strategy" in of_ours and "save_steps" not in of_ours else {}
    if front is not None and not any(f"{PACKING}=" in text or _field(key) == PACKING for key, text in kept.items()):
        ours[PACKING] = "false"  # what it does without the key
    batch, of_batch = _global_batch(found, gpus, _is_one_process(content, front))
    words += [shlex.quote(text) for text in kept.values()]
    ours |= {"train.global_batch_size": batch} if batch else {}
    warmup, of_warmup = _warmup(found, kept, _of_file(goal, kept, ours, data))
    ours |= {"schedule.warmup_steps": warmup} if of_warmup else {}
    stated = {*map(_field, kept), *ours, *typed.fields, *(("optimizer.name",) if "optim" in kept else ())}
    ours |= {} if front is None else dict(defaults_of(front, content, found, (model, goal, gpus), stated))
    words += [shlex.quote(f"{key}={value}") for key, value in ours.items() if key not in typed.fields]
    words += map(shlex.quote, typed.options)
    of_loss = LOSS_KEYS if "data.train_on" in ours else ()
    replaced = {key for key in found if _field(key) in typed.fields}
    carried = {*MODELS, dataset, *of_adapter, *kept, *of_ours, *of_batch, *of_warmup, *of_loss, *replaced}
    assumed = ""
    if is_assumed:
        product = " × ".join(f"{key} {found[key]}" for key in of_batch)
        assumed = f"--gpus {gpus}" + (f" (global batch {batch}: {product} on each GPU)" if batch else "")
    return _Command(" ".join(words), frozenset(carried), assumed)


def _front_end(title: str) -> FrontEnd | None:
    from meshwright.frameworks.front_ends import FRONT_ENDS as DESCRIBED  # imports a reader of this package

    return DESCRIBED.get(title.lower())


def _adapter(found: Mapping[str, object], front: FrontEnd | None) -> tuple[str, list[str]]:
    """Return the adapters of a file, empty if it trains all weights, and the keys that they follow from."""
    methods = [key for key in METHODS if key in found]
    named = next((str(found[key] or "") for key in methods), "").lower()
    adapter = front.adapters(found) if front else named
    adapter = "lora" if adapter == "lora8bit" else adapter  # the bits are listed as not carried over
    bits = [key for key, value in FOUR_BITS.items() if found.get(key) == value] if adapter in ("lora", "qlora") else []
    adapter = "qlora" if bits else adapter
    bits += [key for key in QUANTIZERS if bits and found.get(key) in ("bnb", "bitsandbytes")]
    variants = [key for key in VARIANTS if found.get(key) is True and adapter == "lora"]
    adapter = VARIANTS[variants[0]] if variants else adapter
    if adapter in ADAPTERS:
        return adapter, [*methods, PEFT_SWITCH, *bits, *variants[:1]]
    return "", methods if not adapter or adapter in ("full", "none") else []


def _answers(found: Mapping[str, object], front: FrontEnd | None) -> Iterator[tuple[str, object]]:
    """Yield which tokens count in the loss, if a front end's own keys state it."""
    if front is not None and front.all_tokens is not None and "train_on_inputs" not in found:
        if front.all_tokens(found):
            yield "data.train_on", "all"
        elif any(key in found for key in LOSS_KEYS):
            yield "data.train_on", "last_answer" if found.get("loss_scale") == "last_round" else "answers"


def _of_strategies(found: Mapping[str, object], kept: dict[str, str]) -> list[str]:
    """Return the strategies that a command states; remove the steps of what is not done by steps from it."""
    stated: list[str] = []
    for key, steps in STRATEGIES.items():
        value = found.get(key)
        if value is None:
            continue
        if str(value).lower() == "steps":
            stated += [key] if steps in kept else []
        else:
            kept.pop(steps, None)
            stated += [key] if str(value).lower() in NO else []
    return stated


def _of_file(goal: Goal, kept: Mapping[str, str], ours: Mapping[str, object], data: str) -> Recipe:
    """Return a recipe with what the command carries over, from which the steps of its epochs follow."""
    texts = [*kept.values(), *(f"{key}={value}" for key, value in ours.items())]
    with no_notes(), suppress(MeshwrightError):
        return overrides.apply(_blank(goal), [*texts, *([f"data.dataset={data}"] if data else [])])
    return _blank(goal)


def _blank(goal: Goal) -> Recipe:
    return Recipe(name="", model="", goal=goal, cluster=GPUS[goal])


def _warmup(found: Mapping[str, object], kept: Mapping[str, str], recipe: Recipe) -> tuple[int, list[str]]:
    """Return the steps of the warmup and the keys they follow from; no key if a share's steps are not known."""
    given = {key: value for key in ("warmup_steps", "warmup_ratio") if (value := _number(found.get(key))) is not None}
    share = given.get("warmup_ratio", 0.0)
    if (steps := given.get("warmup_steps", 0.0)) >= 1:
        return int(steps), list(given)  # transformers ignores a share beside steps
    share = steps or share  # transformers 5 has shares in warmup_steps too
    if not share:
        return 0, list(given)
    has_length = any(_field(key) in ("train.steps", "train.epochs") for key in kept)
    if "max_samples" in found or not has_length:  # the steps of the epochs are those of fewer samples, or not stated
        return 0, []
    known = warmup_steps(WarmupShare(share), recipe)
    return (0, []) if known is None else (known, list(given))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _is_unknown(model: str) -> bool:
    """Return whether a model is a hub id that the catalogue does not have, and no path."""
    with suppress(MeshwrightError):
        return not is_path(model) and reference(model) is None
    return not is_path(model)


def _registered(content: Content, found: Mapping[str, object]) -> str:
    """Return the file of a dataset that LLaMA-Factory's dataset_info.json beside the config names; empty without."""
    name, folder = str(found.get("dataset", "")).strip(), content.folder
    if not name or folder is None or file_access.closed():
        return ""
    registry = folder / str(found.get("dataset_dir", "data")) / "dataset_info.json"
    try:
        entry = json_text.loads(registry.read_text(encoding="utf-8"))[name]
        path = registry.parent / str(entry["file_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return os.path.normpath(path) if path.exists() else ""


def _is_one_process(content: Content, front: FrontEnd | None) -> bool:
    """Return whether a script starts one process whose layers are on several GPUs."""
    from meshwright.frameworks.front_ends.commands import rank_env, spreads_layers  # import a reader of this package

    return front is not None and len(content.launches) == 1 and spreads_layers(front, rank_env(content.launches[0]))


def _global_batch(found: Mapping[str, object], gpus: str, is_one_process: bool) -> tuple[int, tuple[str, ...]]:
    """Return the samples of a step, micro batch × accumulation × ranks, and the keys they follow from; 0 if unknown."""
    used = [next((key for key in keys if (_number(found.get(key)) or 0) >= 1), "") for keys in (MICRO, ACCUMULATION)]
    if not used[0]:
        return 0, ()
    try:
        world = 1 if is_one_process else clusters.cluster(gpus).world
    except MeshwrightError:  # its own error names the wrong cluster
        return 0, ()
    return prod(int(_number(found[key]) or 1) for key in used if key) * world, tuple(key for key in used if key)


def _row(key: str) -> ConfigKey | None:
    """Return what a key of a trainer's file sets: its meaning in transformers, TRL and peft comes first."""
    name = OTHER_KEYS.get(key, key)
    return ARGUMENT_ROWS.get(name) or override_keys().get(name)


def _field(key: str) -> str:
    row = _row(key)
    return row.field if row else ""


def _overrides(found: Mapping[str, object], goal: Goal, typed: Collection[str]) -> dict[str, str]:
    """Return the settings that a recipe of this goal accepts, by the keys of the file; `typed` fields are replaced."""
    blank = _blank(goal)
    kept: dict[str, str] = {}
    for key, value in found.items():
        name, row = OTHER_KEYS.get(key, key), _row(key)
        if row is None or not row.field or row.field in (*SKIPPED, *typed) or value is None:
            continue
        if goal != "peft" and row.field.startswith("peft."):
            continue
        text = f"{name}={text_of(value)}"
        if name in ARGUMENT_ROWS:  # as an override, the name means something else
            text = f"{row.field}={row.to_recipe_value(text_of(value))}"
        try:
            with no_notes():  # the overrides are applied one more at a time, so a note may miss a later one
                overrides.apply(blank, [*kept.values(), text])
        except MeshwrightError:
            continue
        kept[key] = text
    return kept


def _not_carried_over(content: Content, carried: frozenset[str]) -> Iterator[str]:
    """Yield the settings of a file that the command does not have, except those that are implied or change nothing."""
    for key, setting in content.settings.items():
        value = setting.value
        if key in carried:
            if text_of(value).startswith(PAGED):
                yield f"the paging of {key}={text_of(value)} ({NOT_PAGED})"
        elif value not in (None, "", [], {}) and value not in IMPLIED.get(key, ()) and not _is_off(key, value):
            yield f"{key}={text_of(value)}"


def _is_off(key: str, value: object) -> bool:
    """Return whether a setting turns off what no recipe does, or names the format of data, which is detected."""
    if DATASET_TYPE.fullmatch(key):
        return not str(value).startswith(PLAIN_TEXT)
    field = _field(key)
    return value is False and key not in IMPLIED and (not field or field in SKIPPED)
