"""Configs of trainers that are not read: their name, and their settings as overrides of ours."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod

from meshwright import clusters, file_access, json_text
from meshwright.choices import FRAMEWORKS, FRONT_ENDS
from meshwright.errors import InputError, MeshwrightError
from meshwright.frameworks.common import gpu_request_of
from meshwright.frameworks.framework import Content, GpuRequest
from meshwright.frameworks.mapping import text_of
from meshwright.frameworks.other_losses import LOSSES, NOT_PLANNED, SWIFT_DEFAULT, loss_of, title_of, trains
from meshwright.frameworks.trainer_fields import NOT_PAGED, PAGED
from meshwright.models import is_path, reference
from meshwright.notes import no_notes
from meshwright.recipes import overrides
from meshwright.recipes.key_maps import override_keys
from meshwright.recipes.replacements import warmup_steps
from meshwright.recipes.types import Goal, Recipe

TRAINERS: Mapping[str, tuple[str, ...]] = {
    "Axolotl": ("base_model", "sequence_len"),
    "LLaMA-Factory": ("model_name_or_path", "finetuning_type"),
    "ms-swift": ("model", "train_type"),
    "torchtune": ("model._component_", "tokenizer._component_"),
    "NeMo": ("trainer.devices", "exp_manager"),
    "verl": ("actor_rollout_ref", "algorithm"),
}
"""Top-level or dotted keys that every config of a trainer has."""
MODELS = ("base_model", "model_name_or_path", "model")
METHODS = ("adapter", "finetuning_type", "tuner_type", "train_type")
ADAPTERS = ("lora", "qlora", "dora")
FOUR_BITS = {"load_in_4bit": True, "quantization_bit": 4, "quant_bits": 4}
"""Settings that quantize the frozen weights to 4 bits: LoRA is then QLoRA."""
QUANTIZERS = ("quantization_method", "quant_method")
DATASETS = ("datasets[0].path", "dataset.source", "dataset.data_files", "dataset[0]", "dataset", "train_file")
MICRO = ("micro_batch_size", "per_device_train_batch_size", "batch_size")
ACCUMULATION = ("gradient_accumulation_steps",)
SKIPPED = ("checkpoint.pretrained", "peft.method", "data.tokenizer", "data.dataset")
OTHER_KEYS = {"optimizer": "optim"}  # keys that another trainer uses for values as transformers names them
IMPLIED = ("load_in_4bit", "bf16", "datasets[0].type", "stage", "do_train")  # by the goal, or true of every run here
GPUS = "8xH100"
SWIFT = "ms-swift"


class OtherTrainerError(InputError):
    """A config of a trainer that is not read, with the command that plans the same training."""

    def __init__(self, title: str, content: Content, gpus: str = "") -> None:
        words, carried = _command(content, _gpus(content, gpus))
        read = "which only check reads" if title.lower() in FRONT_ENDS else "which is not read"
        found = {key: setting.value for key, setting in content.settings.items() if not setting.unresolved}
        if loss := loss_of(found):
            reason = f"is a config of {title} that {loss.trains} ({loss.setting}): {NOT_PLANNED}"
        else:
            reason = f"is a config of {title}, {read}; read are configs of {', '.join(FRAMEWORKS)}"
        lost = list(_not_carried_over(content, carried))
        reason += f"; not carried over by the fix: {', '.join(lost)}" if lost and carried else ""
        super().__init__(reason, field="file", value=content.path, fix=(words,))
        self.title, self.content = title, content

    def on(self, gpus: str) -> OtherTrainerError:
        """Return the error with the command for the GPUs that the user typed."""
        return OtherTrainerError(self.title, self.content, gpus)


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
        found = _MODEL.search(content.text)
        model = (found[1] or found[2]) if found else "MODEL"
        adapts = bool(re.search(r"--use_peft|LoraConfig\(|get_peft_model\(", content.text))
        adapts = adapts or (library == SWIFT and not _SWIFT_FULL.search(content.text))  # its default is LoRA
        goal = "peft" if adapts else "sft"
        reason = f"{trains(title_of(title), library)}: {NOT_PLANNED}"
        fix = f"meshwright recommend {shlex.quote(model)} --goal {goal} --gpus {shlex.quote(_gpus(content, gpus))}"
        InputError.__init__(self, reason, field="file", value=content.path, fix=(fix,))
        self.title, self.content, self.library = title, content, library

    def on(self, gpus: str) -> OtherLossError:
        """Return the error with the command for the GPUs that the user typed."""
        return OtherLossError(self.title, self.content, gpus, self.library)


def _gpus(content: Content, typed: str) -> str:
    """Return the GPUs of a command: as typed, with the count of the script's launch if a type was typed or nothing."""
    if typed and not clusters.is_known(typed.strip()):
        return typed
    stated = gpu_request_of(content.launches[0]) if len(content.launches) == 1 else GpuRequest()
    return stated.text(typed.strip() or stated.gpu or clusters.DEFAULT_GPU) or typed or GPUS


def other_loss(content: Content) -> OtherLossError | None:
    """Return the error for a script or program that trains with preferences or rewards; else None."""
    if content.format == "python":
        names = (found[1].lower() for found in _TRL_CLASS.finditer(content.text))
        title = next((name for name in names if name in METHODS_OF_TRL), "")
        return OtherLossError(title, content) if title and "trl" in content.text else None
    if content.format == "shell" and _SWIFT_COMMAND.search(content.text):
        named = _SWIFT_LOSS.search(content.text)
        return OtherLossError(named[1] if named else SWIFT_DEFAULT, content, library=SWIFT)
    if content.format != "shell" or ("trl" not in content.text and ".py" not in content.text):
        return None
    found = _TRL_COMMAND.search(content.text)
    script = None if found else _TRL_SCRIPT.search(content.text)
    if script is not None and not any(word in content.text for word in ("trl", "accelerate", "deepspeed")):
        return None
    found = found or script
    return OtherLossError(found[1], content) if found else None


def other_trainer(content: Content) -> OtherTrainerError | None:
    """Return the error for a known trainer's config; else None."""
    keys = {*content.settings, *content.top_level_keys()}
    title = next((name for name, needed in TRAINERS.items() if all(one in keys for one in needed)), "")
    return OtherTrainerError(title, content) if title else None


def _command(content: Content, gpus: str) -> tuple[str, set[str]]:
    """Return the command with the model, the goal, the data and the settings that our recipes have, and their keys."""
    found = {key: setting.value for key, setting in content.settings.items() if not setting.unresolved}
    named = next((str(found[key]) for key in MODELS if key in found), "")
    try:
        model = reference(named) or named
    except MeshwrightError:
        model = named
    if not model:
        return f"meshwright recommend MODEL --goal sft --gpus {gpus} KEY=VALUE", set()
    adapter = next((str(found[key]) for key in METHODS if key in found), "").lower()
    goal: Goal = "peft" if adapter in ADAPTERS else "sft"
    in_4_bits = [key for key, value in FOUR_BITS.items() if adapter in ("lora", "qlora") and found.get(key) == value]
    adapter = "qlora" if in_4_bits else adapter
    in_4_bits += [key for key in QUANTIZERS if in_4_bits and found.get(key) in ("bnb", "bitsandbytes")]
    dataset = next((key for key in DATASETS if set("/.") & set(str(found.get(key, "")))), "")  # no name of a registry
    fetch = ""
    if _is_unknown(model):  # its shape is in its config.json
        folder = model.rpartition("/")[2]
        fetch = f"hf download {shlex.quote(model)} config.json --local-dir {shlex.quote(folder)} && "
        model = f"{folder}/config.json"
    words = [f"{fetch}meshwright recommend {shlex.quote(model)} --goal {goal} --gpus {shlex.quote(gpus)}"]
    data = str(found[dataset]) if dataset else _registered(content, found)
    words += [f"--dataset {shlex.quote(data)}"] if data else []
    dataset = dataset or ("dataset" if data else "")
    words += ["peft.method=" + adapter] if goal == "peft" else []
    kept = _overrides(found, goal)
    batch, of_batch = _global_batch(found, gpus)
    words += [shlex.quote(one) for one in kept.values()]
    ours = {"train.global_batch_size": batch} if batch else {}
    warmup, of_warmup = _warmup(found, _of_file(goal, kept, ours, data))
    ours |= {"schedule.warmup_steps": warmup} if of_warmup else {}
    words += [f"{key}={value}" for key, value in ours.items()]
    return " ".join(words), {*MODELS, *METHODS, dataset, *in_4_bits, *kept, *of_batch, of_warmup}


def _of_file(goal: Goal, kept: Mapping[str, str], ours: Mapping[str, int], data: str) -> Recipe:
    """Return a recipe with what the command carries over, from which the steps of its epochs follow."""
    texts = [*kept.values(), *(f"{key}={value}" for key, value in ours.items())]
    with no_notes(), suppress(MeshwrightError):
        return overrides.apply(_blank(goal), [*texts, *([f"data.dataset={data}"] if data else [])])
    return _blank(goal)


def _blank(goal: Goal) -> Recipe:
    return Recipe(name="", model="", goal=goal, cluster=GPUS)


def _warmup(found: Mapping[str, object], recipe: Recipe) -> tuple[int, str]:
    """Return the steps of the warmup and the key they follow from; no key if a share's steps are not known."""
    for key in ("warmup_steps", "warmup_ratio"):
        value = found.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            continue
        if key == "warmup_steps" and (value >= 1 or not value):
            return int(value), key
        if "max_samples" in found:  # the steps of the epochs are those of fewer samples
            continue
        steps = warmup_steps(float(value), recipe)  # transformers 5 has shares in warmup_steps too
        if steps is not None:
            return steps, key
    return 0, ""


def _is_unknown(model: str) -> bool:
    """Return whether a model is a hub id that the catalogue does not have, and no path."""
    with suppress(MeshwrightError):
        return not is_path(model) and reference(model) is None
    return not is_path(model)


def _registered(content: Content, found: Mapping[str, object]) -> str:
    """Return the file of a dataset that LLaMA-Factory's dataset_info.json beside the config names; empty without."""
    name, folder = str(found.get("dataset", "")).split(",")[0].strip(), content.folder
    if not name or folder is None or file_access.closed():
        return ""
    registry = folder / str(found.get("dataset_dir", "data")) / "dataset_info.json"
    try:
        entry = json_text.loads(registry.read_text(encoding="utf-8"))[name]
        path = registry.parent / str(entry["file_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return os.path.normpath(path) if path.exists() else ""


def _global_batch(found: Mapping[str, object], gpus: str) -> tuple[int, tuple[str, ...]]:
    """Return the samples of a step, micro batch × accumulation × GPUs, and the keys they follow from; 0 if unknown."""
    used = [next((key for key in keys if isinstance(found.get(key), int)), "") for keys in (MICRO, ACCUMULATION)]
    if not used[0]:
        return 0, ()
    try:
        world = clusters.cluster(gpus).world
    except MeshwrightError:  # its own error names the wrong cluster
        return 0, ()
    return prod(int(str(found[key])) for key in used if key) * world, tuple(key for key in used if key)


def _overrides(found: Mapping[str, object], goal: Goal) -> dict[str, str]:
    """Return the settings that a recipe of this goal accepts, by the keys of the file."""
    blank = _blank(goal)
    kept: dict[str, str] = {}
    for key, value in found.items():
        name = OTHER_KEYS.get(key, key)
        row = override_keys().get(name)
        if row is None or not row.field or row.field in SKIPPED or value is None:
            continue
        if goal != "peft" and row.field.startswith("peft."):
            continue
        text = f"{name}={text_of(value)}"
        try:
            with no_notes():  # the overrides are applied one more at a time, so a note may miss a later one
                overrides.apply(blank, [*kept.values(), text])
        except MeshwrightError:
            continue
        kept[key] = text
    return kept


def _not_carried_over(content: Content, carried: set[str]) -> Iterator[str]:
    """Yield the settings of a file that the command does not have, except those that are off or implied."""
    for key, setting in content.settings.items():
        if key not in carried and key not in IMPLIED and setting.value not in (None, False, "", [], {}):
            yield f"{key}={text_of(setting.value)}"
        elif key in carried and text_of(setting.value).startswith(PAGED):
            yield f"{key}={text_of(setting.value)} ({NOT_PAGED})"
