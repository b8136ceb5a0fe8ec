"""What the engine builds from a recipe: a trainer on a fake GPU with a fake process group, as comparable values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.dryrun.fake_data import dry_recipe, open_samples
from meshwright.dryrun.fake_device import fake_rank
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model_families import family_of
from meshwright.engine.tiny import tiny_recipe
from meshwright.recipes import load, overrides

PLAIN = (bool, int, float, str, tuple, torch.dtype)


@cache
def built(name: str, changes: tuple[str, ...], world: int) -> dict[str, Any]:
    """Return the trainer of rank 0 of a recipe's tiny model with overrides, as values by part."""
    base = load(name)
    pinned = {"precision.compute": "bf16", **overrides.requested(base, changes)}
    recipe = overrides.apply(base, changes)
    family = family_of(recipe)
    small, config = tiny_recipe(recipe, family.config_for(recipe), world, pinned)
    small = dry_recipe(small)
    with fake_rank(world, 0, None, (9, 0)) as device:
        mesh = build_mesh(small.layout, device.type)
        trainer = family.trainer()(small, config, mesh, device, open_samples(small, config), None)
        found = dict(_parts(trainer))
        found["mesh"] = {axis: getattr(mesh, axis).size for axis in ("dp", "cp", "tp", "pp", "stage", "experts")}
        found["shards"] = (tuple(mesh.fsdp.shape), tuple(mesh.expert_fsdp.shape))
        trainer.close()
    return found


def _parts(trainer: Any) -> Iterator[tuple[str, Any]]:
    stages = trainer.stages
    yield "modules", [(path, _module(module)) for stage in stages for path, module in stage.named_modules()]
    yield "parameters", [(name, _tensor(one)) for stage in stages for name, one in stage.named_parameters()]
    yield "layers", [list(stage.layers) for stage in stages]
    yield "partial gradients", [sorted(stage.partial_grads) for stage in stages]
    yield "routers", [_values(state.settings) for state in trainer.routers]
    yield "micro batches", (trainer.micro_batches, trainer.scale is not None)
    yield "loader", _values(trainer.loader)
    optimizer = trainer.optimizer
    yield "optimizer", (type(optimizer).__name__, _values(optimizer), [_group(g) for g in optimizer.param_groups])
    yield "schedule", type(trainer.pipeline.schedule).__name__ if trainer.pipeline else ""


def _module(module: Any) -> Any:
    """Return the class of a module with its patches, and the settings that it was given."""
    marks = {name: str(value) for name, value in module.__dict__.items() if name in MARKS}
    axis = module.__dict__.get("context")
    marks["context"] = str((axis.comm, axis.inner, axis.ring) if axis is not None else None)
    marks["sequence"] = str(getattr(module.__dict__.get("tp_sequence"), "gathers", None))
    if "loss" in module.__dict__ and hasattr(module.loss, "head"):
        marks["loss"] = str((module.loss.head["method"], module.loss.z_loss, module.loss.mtp_loss))
    compiled = module.__dict__.get("_compiled_call_impl") is not None
    return (type(module).__name__, marks, compiled, _fsdp(module))


MARKS = ("kernel", "recompute_core", "recompute_activation", "lora_scale", "lora_dropout", "force_balance", "balanced")


def _fsdp(module: Any) -> Any:
    if not isinstance(module, FSDPModule):
        return None
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return ()
    return (str(group.mp_policy), str(group.offload_policy), group.post_forward_mesh_info is None)


def _tensor(one: Any) -> Any:
    local = one.to_local() if isinstance(one, DTensor) else one
    casts = hasattr(getattr(one, "_local_tensor", one), "fsdp_pre_all_gather")
    return (tuple(local.shape), str(one.dtype), str(local.device.type), one.requires_grad, casts)


def _group(group: dict[str, Any]) -> Any:
    return {name: value for name, value in group.items() if isinstance(value, PLAIN)}


def _values(thing: Any) -> Any:
    values = msgspec.structs.asdict(thing) if isinstance(thing, msgspec.Struct) else vars(thing)
    return {name: str(value) for name, value in values.items() if isinstance(value, PLAIN)}
