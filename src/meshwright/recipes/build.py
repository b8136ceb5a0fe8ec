"""Builders of recipes: a recipe function passes its model, its GPUs and the differences from a base."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from meshwright.clusters import DEFAULT_GPU
from meshwright.errors import InputError, unknown
from meshwright.recipes.types import (
    ENGINES,
    SECTIONS,
    Data,
    Engine,
    Goal,
    Recipe,
    Section,
    keys_by_flat_name,
    recipe_fields,
)

T = TypeVar("T")

PRETRAIN: dict[str, Any] = {"global_batch_size": 32}
SFT: dict[str, Any] = {
    "dataset": "squad",
    "packing": True,
    "seq_length": 2048,
    "global_batch_size": 128,
    "steps": 1000,
    "lr": 5e-6,
    "min_lr": 0.0,
    "warmup_steps": 50,
    "beta2": 0.98,
    "per_token_loss": True,
    "save_every": 100,
}
PEFT: dict[str, Any] = {**SFT, "lr": 1e-4}
SHORT_FINETUNE: dict[str, Any] = {"warmup_steps": 10, "steps": 100, "beta2": 0.95}
"""Fine-tuning of 100 steps, as several families publish it."""

IMAGES: dict[str, Any] = {"dataset": "cord-v2", "packing": False}
"""Changed defaults for samples with images."""

BENCHMARK: dict[str, Any] = {
    "dataset": "mock",
    "steps": 50,
    "check_nan": False,
    "warmup_steps": 10,
    "log_every": 1,
    "save_every": 0,
    "grads": "bf16",
    "reduce": "bf16",
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"matmul": "same", "fp8_gather": False},
    "fp8cs": {"matmul": "fp8_tensor", "fp8_gather": True},
    "fp8mx": {"matmul": "mxfp8", "fp8_gather": True},
    "fp8sc": {"matmul": "fp8_block", "fp8_gather": False},
    "fp8ds": {"matmul": "fp8_delayed", "fp8_gather": True},
    "nvfp4": {"matmul": "nvfp4", "fp8_gather": False},
}
"""Precisions by the short names in benchmark recipe names."""
BIAS_BALANCED = ("deepseek_v3", "glm45", "kimi_k2", "moonlight", "nemotron_3_")
"""Models whose routers are pretrained with a bias on the choice of experts, which no gradient trains."""


def pretrain(model: str, gpus: int | str, *, name: str = "", engine: Engine = ENGINES[0], **differences: Any) -> Recipe:
    """Build a pretraining recipe; default: cosine from 3e-4 to 3e-5, 32 samples per step, mock data."""
    return _build(_base("pretrain"), differences, name=name, model=model, gpus=gpus, engine=engine)


def sft(model: str, gpus: int | str, *, name: str = "", engine: Engine = ENGINES[0], **differences: Any) -> Recipe:
    """Build a full fine-tuning recipe; default: 5e-6 to 0 on packed samples of 2048 tokens."""
    return _build(_base("sft"), differences, name=name, model=model, gpus=gpus, engine=engine)


def peft(model: str, gpus: int | str, *, name: str = "", engine: Engine = ENGINES[0], **differences: Any) -> Recipe:
    """Build an adapter recipe; default: LoRA of rank 32 at 1e-4, otherwise like sft."""
    return _build(_base("peft"), differences, name=name, model=model, gpus=gpus, engine=engine)


def benchmark(
    base: Recipe,
    gpus: int | str,
    precision: str = "bf16",
    *,
    name: str = "",
    engine: Engine = ENGINES[0],
    **differences: Any,
) -> Recipe:
    """Build a throughput recipe of 50 steps on mock data, with a recipe's contract and its own layout.

    If the base is a benchmark, its layout is kept too.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    fixed = PRECISIONS[precision] if base.benchmark else {**BENCHMARK, **PRECISIONS[precision]}
    kept = base if base.benchmark else _contract_only(base)
    return _build(kept, {**fixed, **differences}, name=name, model=base.model, gpus=gpus, engine=engine)


def balanced_by_bias(model: str, goal: Goal) -> bool:
    """Return whether the routers of a catalogue model are balanced by their bias: in pretraining."""
    return goal == "pretrain" and model.startswith(BIAS_BALANCED)


def cluster_name(gpus: int | str) -> str:
    """Return a cluster string; an integer means GPUs of the default type."""
    return f"{gpus}x{DEFAULT_GPU}" if isinstance(gpus, int) else gpus


def goal_data(goal: Goal, images: bool = False) -> Data:
    """Return the data settings that a goal has without a recipe of the model."""
    return _with_fields(_base(goal), {**IMAGES, "images": True, "seq_length": 4096} if images else {}).data


@lru_cache(maxsize=3)
def _base(goal: Goal) -> Recipe:
    blank = Recipe(name="", model="", goal=goal, cluster="")
    return _with_fields(blank, {"pretrain": PRETRAIN, "sft": SFT, "peft": PEFT}[goal])


@lru_cache(maxsize=1)
def _contract_names() -> dict[str, tuple[str, ...]]:
    """Return, by section, the fields a benchmark takes from a training recipe; precision is its own."""
    found: dict[str, tuple[str, ...]] = {section: () for section in SECTIONS if section != "precision"}
    for key, info in recipe_fields().items():
        section, field = key.split(".")
        if info.kind == "contract" and section in found:
            found[section] = (*found[section], field)
    return found


def _contract_only(base: Recipe) -> Recipe:
    """Return the contract of a recipe, with defaults for everything else."""
    sections = {
        section: SECTIONS[section](**{field: getattr(getattr(base, section), field) for field in fields})
        for section, fields in _contract_names().items()
        if fields
    }
    return Recipe(name="", model=base.model, goal=base.goal, cluster="", benchmark=True, **sections)  # type: ignore[arg-type]  # SECTIONS gives each name its own type


def derived(base: Recipe, differences: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields derived from others unless they are set: sp from tp, the schedule from vp, …"""
    layout, get = base.layout, differences.get
    found: dict[str, Any] = {
        "sp": get("tp", layout.tp) != 1 and get("strategy", layout.strategy) != "megatron_fsdp",
        "pp_schedule": "1f1b" if get("vp", layout.vp) == 1 else "interleaved_1f1b",
        "overlap_param_gather": get("overlap_grad_reduce", base.kernels.overlap_grad_reduce) is True,
        "te_rng_tracker": get("cuda_graphs", base.kernels.cuda_graphs) != "none",
    }
    if base.benchmark:
        found["force_balance"] = get("ep", layout.ep) != 1
    elif get("images", False):
        found.update(IMAGES)
    return found


def _build(
    base: Recipe, differences: Mapping[str, Any], *, name: str, model: str, gpus: int | str, engine: Engine
) -> Recipe:
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    balanced = {"balancing": "bias"} if balanced_by_bias(model, base.goal) else {}
    built = _with_fields(base, {**derived(base, differences), **balanced, **differences})
    return msgspec.structs.replace(built, name=name, model=model, cluster=cluster_name(gpus), engine=engine)


def change(base: Recipe, differences: Mapping[str, Any], gpus: int | str | None = None) -> Recipe:
    """Return the recipe with some fields changed, by flat name, optionally on other GPUs."""
    changed = _with_fields(base, differences)
    return changed if gpus is None else msgspec.structs.replace(changed, cluster=cluster_name(gpus))


def _with_fields(base: Recipe, differences: Mapping[str, Any]) -> Recipe:
    """Return the base with some fields changed, by flat name; types and ranges are validated."""
    content: dict[str, dict[str, Any]] = {}
    keys = keys_by_flat_name()
    for flat, value in differences.items():
        if flat not in keys:
            raise unknown("recipe field", flat, keys)
        section, field = keys[flat].split(".")
        old = getattr(getattr(base, section), field)
        if type(old) is not type(value) or old != value:  # the index builds 200 recipes, mostly of default values
            content.setdefault(section, {})[field] = value
    return msgspec.structs.replace(
        base, **{section: _section(base, section, fields) for section, fields in content.items()}
    )


def _section(base: Recipe, section: str, fields: dict[str, Any]) -> Section:
    converted = validate(fields, SECTIONS[section], section)
    old: Section = getattr(base, section)
    return msgspec.structs.replace(old, **{field: getattr(converted, field) for field in fields})


def validate(content: Mapping[str, Any], struct: type[T], where: str = "") -> T:
    """Convert plain values to a recipe or section; raise for a wrong type or range."""
    try:
        return msgspec.convert(content, struct)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        field = ".".join(part for part in (where, path.rstrip("`")) if part)
        raise InputError(message, field=field or "recipe") from error
