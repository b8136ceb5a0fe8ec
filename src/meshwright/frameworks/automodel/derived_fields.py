"""Fields of ours that no single key of AutoModel's says: they follow from several, or from what is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.frameworks.automodel.extra_keys import NARROW, SHORT_SETS
from meshwright.frameworks.automodel.values import size_of, strategy_of, text_in, value_in
from meshwright.frameworks.types import Settings
from meshwright.models import Mamba2, ModelSpec
from meshwright.recipes.types import Goal

ADAPTED = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "q_a_proj", "q_b_proj", "kv_b_proj"),
    "proj": ("o_proj", "dense", "out_proj"),
    "fc1": ("gate_proj", "up_proj", "gate_up_proj", "fc1", "gate_and_up_projs"),
    "fc2": ("down_proj", "fc2", "down_projs"),
    "mamba_in": ("in_proj",),
    "mamba_out": ("mixer.out_proj",),
}

USUAL = ("qkv", "proj", "fc1", "fc2")


def model_name(settings: Settings) -> str:
    """The Hugging Face id or folder of the model, from wherever it is said."""
    places = ("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", "model.config")
    return next((text for text in (text_in(settings, place) for place in places) if text), "")


def is_benchmark(settings: Settings) -> bool:
    """Whether a file only measures speed: its recipe says so, or a block that only such recipes carry."""
    recipe = text_in(settings, "recipe") or text_in(settings, "recipe._target_")
    mock = "mock" in text_in(settings, "dataset._target_").lower()
    return "enchmark" in recipe or (mock and any(key.startswith("benchmark.") for key in settings))


def assumptions(settings: Settings) -> Iterator[str]:
    if not _says_length(settings):
        yield f"no length of a sample is said: {_usual_length(settings)} tokens were assumed"
    if "dataloader.dynamic_batching.max_tokens_per_batch" in settings:
        yield "batches are filled by tokens: local_batch_size is not what a rank holds"
    if "step_scheduler.max_steps" not in settings:
        yield "the number of steps follows from the data: it is not judged"


def _says_length(settings: Settings) -> bool:
    lengths = ("dataset.seq_len", "dataset.seq_length", "dataset.max_length")
    sizes = (settings.get(f"packed_sequence.{name}") for name in ("packed_sequence_size", "pack_size"))
    packed = any(said is not None and (said.unresolved or said.value) for said in sizes)
    return packed or any(key in settings for key in lengths)


def _usual_length(settings: Settings) -> int:
    dataset = text_in(settings, "dataset._target_").lower()
    return 512 if any(name in dataset for name in SHORT_SETS) else 2048


def follows(settings: Settings, model: ModelSpec | None, goal: Goal, recipe: str) -> Mapping[str, Any]:
    """Fields of ours that no single key says."""
    own: dict[str, Any] = {}
    if not _says_length(settings):
        own["data.seq_length"] = _usual_length(settings)
    elif (longest := _longest(settings)) is not None:
        own["data.seq_length"] = longest
    if not any(key.startswith("dataset.") for key in settings):
        own["data.dataset"] = "unsaid"
    if "VLM" in recipe:
        own["data.images"] = True
    if model is not None and model_name(settings) == model.hf_id:
        own["checkpoint.pretrained"] = ""
    if size_of(settings, "pp") > 1 and "distributed.pipeline.pp_microbatch_size" not in settings:
        own["layout.micro_batch_size"] = 1
    if isinstance(budget := value_in(settings, "dataloader.dynamic_batching.max_tokens_per_batch"), int):
        own["layout.micro_batch_size"] = max(1, budget // _length(settings))
    if size_of(settings, "ep") > 1 and value_in(settings, "distributed.reshard_after_forward") is None:
        own["layout.reshard_after_forward"] = value_in(settings, "distributed.moe.reshard_after_forward") is True
    if strategy_of(settings) == "fsdp2" and _reduces_as_it_computes(settings):
        own["precision.reduce"] = "bf16"
    if any(key.startswith("distributed.offload_policy") for key in settings):
        policy = settings.get("distributed.offload_policy")
        own["layout.offload"] = "none" if policy is not None and policy.value is None else "params"
    own |= _learning(settings)
    if goal == "peft":
        own["peft.targets"] = _targets(settings, model)
    if validation := _validation(settings):
        own["data.validation"] = validation
    return own


def _reduces_as_it_computes(settings: Settings) -> bool:
    """Whether a policy of the file's own names no format for sums: it takes the place of the whole default."""
    said = [key for key in settings if key.startswith("distributed.mp_policy.")]
    narrow = str(value_in(settings, "distributed.mp_policy.param_dtype")) in NARROW
    return bool(said) and "distributed.mp_policy.reduce_dtype" not in said and narrow


def _length(settings: Settings) -> int:
    said = (value_in(settings, f"dataset.{name}") for name in ("seq_length", "seq_len", "max_length"))
    return next((value for value in said if isinstance(value, int) and value > 0), _usual_length(settings))


def _longest(settings: Settings) -> int | None:
    """The longest sample of a vision-language set, where it is not packed into something longer."""
    said = value_in(settings, "dataset.max_length")
    other = "dataset.seq_length" in settings or value_in(settings, "packed_sequence.pack_size")
    return said if isinstance(said, int) and said > 0 and not other else None


def _learning(settings: Settings) -> dict[str, Any]:
    """The learning rate over time, where it follows from the rest."""
    own: dict[str, Any] = {}
    optimizer = text_in(settings, "optimizer._target_")
    if optimizer.endswith("optim.Adam") and "optimizer.weight_decay" not in settings:
        own["optimizer.weight_decay"] = 0.0
    if not any(key.startswith("lr_scheduler.") for key in settings):
        return {**own, "schedule.name": "constant", "schedule.warmup_steps": 0, "schedule.min_lr": 0.0}
    steps = value_in(settings, "step_scheduler.max_steps")
    if "lr_scheduler.lr_warmup_steps" not in settings:
        own["schedule.warmup_steps"] = min(1000, steps // 10) if isinstance(steps, int) and steps > 0 else 1000
    peak = value_in(settings, "optimizer.lr")
    if "lr_scheduler.min_lr" not in settings:
        own["schedule.min_lr"] = 0.01 * peak if isinstance(peak, float) and peak > 0 else 1e-5
    return own


def _targets(settings: Settings, model: ModelSpec | None) -> tuple[str, ...]:
    """Which of our groups of linears get adapters; names with wildcards reach every linear that they match."""
    mamba = ("mamba_in", "mamba_out") if model is not None and any(_is_mamba(model)) else ()
    wanted = value_in(settings, "peft.target_modules")
    if value_in(settings, "peft.match_all_linear") is True or not wanted:
        return (*USUAL, *mamba)
    names = [str(name) for name in (wanted if isinstance(wanted, list) else [wanted])]
    patterns = [re.compile(re.escape(name).replace(r"\*", ".*")) for name in names]

    def reached(name: str) -> bool:
        return any(pattern.fullmatch(text) for pattern in patterns for text in (name, f"model.layers.0.x.{name}"))

    groups = tuple(group for group, linears in ADAPTED.items() if any(reached(name) for name in linears))
    found = tuple(group for group in groups if group in (*USUAL, *mamba))
    return found or USUAL


def _is_mamba(model: ModelSpec) -> Iterator[bool]:
    return (isinstance(layer.mixer, Mamba2) for layer in model.layers)


def _validation(settings: Settings) -> str:
    """The set or split that is only evaluated on."""
    for name in ("path_or_dataset_id", "path_or_dataset", "dataset_name"):
        if text := text_in(settings, f"validation_dataset.{name}"):
            same = text == text_in(settings, f"dataset.{name}")
            return text_in(settings, "validation_dataset.split") if same else text
    return ""
