"""The bases that recipes start from: a recipe function names its model, its GPUs and what differs from the base."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from meshwright.errors import InputError, unknown
from meshwright.recipes.types import SECTIONS, Goal, Recipe, Section, recipe_fields

T = TypeVar("T")

DEFAULT_GPU = "H100"

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
"""What changes when samples carry images."""

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
"""Precisions by the short names that benchmark recipes carry."""


def pretrain(model: str, gpus: int | str, *, name: str = "", **differences: Any) -> Recipe:
    """A pretraining recipe: cosine from 3e-4 to 3e-5, 32 samples a step, mock data, unless said otherwise."""
    return _build(_base("pretrain"), differences, name=name, model=model, gpus=gpus)


def sft(model: str, gpus: int | str, *, name: str = "", **differences: Any) -> Recipe:
    """A fine-tuning recipe of all weights: 5e-6 to 0 on packed samples of 2048 tokens, unless said otherwise."""
    return _build(_base("sft"), differences, name=name, model=model, gpus=gpus)


def peft(model: str, gpus: int | str, *, name: str = "", **differences: Any) -> Recipe:
    """A fine-tuning recipe of adapters: LoRA of rank 32 at 1e-4, otherwise like sft."""
    return _build(_base("peft"), differences, name=name, model=model, gpus=gpus)


def benchmark(base: Recipe, gpus: int | str, precision: str = "bf16", *, name: str = "", **differences: Any) -> Recipe:
    """A throughput run of 50 steps on mock data, by a recipe's contract and a layout of its own.

    Given another benchmark, it keeps that one's layout too, so that only the differences need saying.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    fixed = PRECISIONS[precision] if base.benchmark else {**BENCHMARK, **PRECISIONS[precision]}
    start = base if base.benchmark else _contract_only(base)
    return _build(start, {**fixed, **differences}, name=name, model=base.model, gpus=gpus)


def cluster_name(gpus: int | str) -> str:
    """A cluster string; a number alone counts GPUs of the default type."""
    return f"{gpus}x{DEFAULT_GPU}" if isinstance(gpus, int) else gpus


@lru_cache(maxsize=1)
def field_locations() -> dict[str, tuple[str, str]]:
    """Section and field of every flat name, e.g. tp → (layout, tp)."""
    return {info.flat: (key.split(".")[0], key.split(".")[1]) for key, info in recipe_fields().items()}


@lru_cache(maxsize=3)
def _base(goal: Goal) -> Recipe:
    blank = Recipe(name="", model="", goal=goal, cluster="")
    return _with_fields(blank, {"pretrain": PRETRAIN, "sft": SFT, "peft": PEFT}[goal])


@lru_cache(maxsize=1)
def _contract_names() -> dict[str, tuple[str, ...]]:
    """By section, what a benchmark takes from a recipe for real training; number formats it chooses itself."""
    found: dict[str, tuple[str, ...]] = {section: () for section in SECTIONS if section != "precision"}
    for key, info in recipe_fields().items():
        section, field = key.split(".")
        if info.kind == "contract" and section in found:
            found[section] = (*found[section], field)
    return found


def _contract_only(base: Recipe) -> Recipe:
    """The contract of a recipe, with everything else as if it had not been said."""
    sections = {
        section: SECTIONS[section](**{field: getattr(getattr(base, section), field) for field in fields})
        for section, fields in _contract_names().items()
        if fields
    }
    return Recipe(name="", model=base.model, goal=base.goal, cluster="", benchmark=True, **sections)  # type: ignore[arg-type]  # SECTIONS gives each name its own type


def derived(base: Recipe, differences: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that follow from others unless they are given: sp from tp, the schedule from vp, …"""
    layout, given = base.layout, differences.get
    found: dict[str, Any] = {
        "sp": given("tp", layout.tp) != 1 and given("strategy", layout.strategy) != "megatron_fsdp",
        "pp_schedule": "1f1b" if given("vp", layout.vp) == 1 else "interleaved_1f1b",
        "overlap_param_gather": given("overlap_grad_reduce", base.kernels.overlap_grad_reduce) is True,
        "te_rng_tracker": given("cuda_graphs", base.kernels.cuda_graphs) != "none",
    }
    if base.benchmark:
        found["force_balance"] = given("ep", layout.ep) != 1
    elif given("images", False):
        found.update(IMAGES)
    return found


def _build(base: Recipe, differences: Mapping[str, Any], *, name: str, model: str, gpus: int | str) -> Recipe:
    made = _with_fields(base, {**derived(base, differences), **differences})
    return msgspec.structs.replace(made, name=name, model=model, cluster=cluster_name(gpus))


def change(base: Recipe, differences: Mapping[str, Any], gpus: int | str | None = None) -> Recipe:
    """A recipe with some fields, by flat name, holding other values, on other GPUs if said."""
    made = _with_fields(base, differences)
    return made if gpus is None else msgspec.structs.replace(made, cluster=cluster_name(gpus))


def _with_fields(base: Recipe, differences: Mapping[str, Any]) -> Recipe:
    """The base with some fields, by flat name, holding other values; each is checked against its type and range."""
    content: dict[str, dict[str, Any]] = {}
    where = field_locations()
    for flat, value in differences.items():
        if flat not in where:
            raise unknown("recipe field", flat, where)
        section, field = where[flat]
        content.setdefault(section, {})[field] = value
    return msgspec.structs.replace(
        base, **{section: _section(base, section, fields) for section, fields in content.items()}
    )


def _section(base: Recipe, section: str, fields: dict[str, Any]) -> Section:
    made = validate(fields, SECTIONS[section], section)
    kept: Section = getattr(base, section)
    return msgspec.structs.replace(kept, **{field: getattr(made, field) for field in fields})


def validate(content: Mapping[str, Any], kind: type[T], where: str = "") -> T:
    """A recipe or section from plain values, each checked against its type and range."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        field = ".".join(part for part in (where, path.rstrip("`")) if part)
        raise InputError(message, field=field or "recipe") from error
