"""Megatron-FSDP: NVIDIA's fully sharded data parallelism, an optional package in place of FSDP2.

It keeps weights, gradients and master weights in flat buffers sharded over the fsdp ranks. It shards a stage and
initializes it module by module, as `apply_fsdp` and `init_weights` do for the other strategies. A stage has two sets of
parameters: the sharded ones, which are visible between steps (gradient norm, clipping and optimizers use those), and
the full ones, which replace them from a step's first forward pass to the end of its last backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from meshwright.engine.hf_io.layout_map import TensorLocation
from meshwright.engine.hf_io.read import FolderWeights
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.init import InitSpec, fill_initial
from meshwright.engine.model.stage import Stage
from meshwright.engine.parallelize.fsdp import DTYPES, storage_dtype
from meshwright.engine.parallelize.init_weights import fill_buffers, places_in, recorded_name
from meshwright.errors import InputError
from meshwright.extras import install_command
from meshwright.recipes.types import Precision, Recipe

WRAPPER = "megatron_fsdp"  # key in the stage's __dict__: as a submodule the wrapper would form a cycle
TP_MODES = {0: "column", 1: "row"}  # Megatron's names of the sharded dimension


def require(device: torch.device) -> None:
    """Raise if the package or the GPU it needs is missing."""
    reason, fix = "", ["layout.strategy=fsdp2"]
    if device.type != "cuda":
        reason = f"Megatron-FSDP needs NVIDIA GPUs (CUDA streams and NCCL), and this run is on {device}"
    elif find_spec("megatron_fsdp") is None:
        reason = "the package megatron-fsdp is not installed"
        fix.insert(0, install_command("megatron-fsdp"))
    if reason:
        raise InputError(reason, field="layout.strategy", value="megatron_fsdp", fix=fix)


def shard_and_init(
    stage: Stage,
    mesh: Mesh,
    recipe: Recipe,
    initial: dict[str, InitSpec],
    device: torch.device,
    weights: FolderWeights | None = None,
) -> None:
    """Shard a stage with one unit per layer, and fill it from a checkpoint or from seed and names."""
    from megatron_fsdp import fully_shard_model  # type: ignore[import-not-found]  # optional

    layout, kernels = recipe.layout, recipe.kernels
    modules = add_reset_parameters(stage, recipe, initial, weights)
    wrapper = fully_shard_model(
        stage,
        device_mesh=mesh.state,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        **_hsdp_settings(mesh),
        expt_device_mesh=mesh.state,  # it recognizes experts by name; without ep they are sharded like the rest
        fsdp_unit_modules=list({type(layer) for layer in stage.layers.values()}),
        zero_dp_strategy="optim_grads_params" if layout.reshard_after_forward else "optim_grads",
        init_model_with_meta_device=True,
        mixed_precision_policy=_policy(recipe.precision, mesh),
        overlap_grad_reduce=kernels.overlap_grad_reduce,
        overlap_param_gather=kernels.overlap_param_gather,
        sync_model_each_microbatch=False,
        calculate_per_token_loss=True,  # gradients are summed, never averaged
    )
    for module in modules:
        del module.reset_parameters
    fill_buffers(stage, initial, recipe.train.seed, device, weights)
    stage.__dict__[WRAPPER] = wrapper
    stage.register_forward_pre_hook(_before_forward, prepend=True)
    stage.register_forward_hook(_after_forward)


def wait_for_gradients(stage: nn.Module, last: bool) -> None:
    """Set before a micro batch whether the sharded parameters and their gradients are installed after it.

    Gradients are reduce-scattered in every micro batch, so only shards are accumulated.
    """
    wrapper = stage.__dict__.get(WRAPPER)
    if wrapper is not None:
        wrapper.is_last_microbatch = wrapper.model_auto_sync = last


def _before_forward(stage: nn.Module, args: Any) -> None:
    """Install the full parameters with the current values of the shards."""
    wrapper = stage.__dict__[WRAPPER]
    if wrapper.is_param_fsdp_distributed:
        wrapper.install_optimized_model_weights()
        wrapper.zero_grad_buffer()
        wrapper._replace_param_with_raw_if_needed()


def _after_forward(stage: nn.Module, args: Any, output: Any) -> None:
    """Install the sharded parameters again if no backward pass will do it."""
    if not torch.is_grad_enabled():
        stage.__dict__[WRAPPER]._replace_param_with_distributed_if_needed()


def _hsdp_settings(mesh: Mesh) -> dict[str, Any]:
    """Return the arguments for HSDP: the mesh axis over which shards are replicated, if any."""
    if mesh.state["dp_replicate"].size() == 1:
        return {}
    return {"dp_outer_dim": "dp_replicate", "hybrid_fsdp_group": mesh.fsdp._flatten().get_group()}


def _policy(precision: Precision, mesh: Mesh) -> Any:
    from megatron_fsdp import MixedPrecisionPolicy

    compute, master = DTYPES[precision.compute], storage_dtype(precision)
    exact = compute == torch.float32
    # Gradients of one rank are not reduced; a reduce dtype would make version 0.6 count them twice.
    reduced = mesh.state["fsdp"].size() > 1
    return MixedPrecisionPolicy(
        main_params_dtype=None if compute == master else master,
        main_grads_dtype=torch.float32 if exact else DTYPES[precision.grads],
        grad_comm_dtype=None if exact or not reduced else DTYPES[precision.reduce],
    )


@dataclass(frozen=True)
class _Stored:
    """A parameter before it was replaced by a plain one, and the modules that have it."""

    owner: nn.Module
    attribute: str
    name: str  # in the stage
    before: torch.Tensor
    owners: tuple[tuple[nn.Module, str], ...]  # more than one for tied weights


def add_reset_parameters(
    stage: nn.Module, recipe: Recipe, initial: dict[str, InitSpec], weights: FolderWeights | None = None
) -> list[nn.Module]:
    """Replace parameters by plain ones and give their modules a `reset_parameters`, which Megatron-FSDP calls."""
    by_module: dict[nn.Module, list[_Stored]] = {}
    places = places_in(stage, weights)
    for one in _make_plain(stage, DTYPES[recipe.precision.compute]):
        by_module.setdefault(one.owner, []).append(one)
    for module, stored in by_module.items():
        module.reset_parameters = partial(_fill, stored, initial, recipe, weights, places)  # type: ignore[assignment]
    return list(by_module)


def _make_plain(stage: nn.Module, compute: torch.dtype) -> Iterator[_Stored]:
    """Replace parameters by plain ones in the compute dtype; tensor-parallel ones get Megatron's attribute.

    Megatron-FSDP accepts DTensors, but gives shards along the second dimension a wrong shape.
    """
    uses: dict[int, list[tuple[nn.Module, str, str]]] = {}
    before: dict[int, nn.Parameter] = {}
    for path, module in stage.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                before[id(parameter)] = parameter
                uses.setdefault(id(parameter), []).append((module, attribute, f"{path}.{attribute}"))
    for key, parameter in before.items():
        plain = _plain(parameter, compute)
        owners = tuple((module, attribute) for module, attribute, _ in uses[key])
        for module, attribute in owners:
            module._parameters[attribute] = plain
        for module, attribute, _ in uses[key]:
            yield _Stored(module, attribute, uses[key][0][2], parameter.detach(), owners)


def _plain(parameter: nn.Parameter, compute: torch.dtype) -> nn.Parameter:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    plain = nn.Parameter(torch.empty_like(local, dtype=compute), parameter.requires_grad)
    for placement in parameter.placements if isinstance(parameter, DTensor) else ():
        if isinstance(placement, Shard):
            plain._tensor_parallel_mode = TP_MODES[placement.dim]  # type: ignore[attr-defined]
    return plain


@torch.no_grad()
def _fill(
    stored: list[_Stored],
    initial: dict[str, InitSpec],
    recipe: Recipe,
    weights: FolderWeights | None,
    places: dict[str, TensorLocation],
) -> None:
    """Fill the parameters of one module, which have just been allocated."""
    precision = recipe.precision
    for one in stored:
        parameter: Any = one.owner._parameters[one.attribute]
        value = torch.empty(parameter.shape, dtype=storage_dtype(precision), device=parameter.device)
        sharded = _as_dtensor(value, one.before)
        if weights is None or not weights.fill(sharded, one.name, places.get(one.name)):
            fill_initial(sharded, one.name, initial[recorded_name(one.name, initial)], recipe.train.seed)
        parameter.copy_(value)
        if parameter.requires_grad and value.dtype != parameter.dtype:
            # Megatron-FSDP reads master weights in higher precision than the compute dtype from these two methods.
            parameter.get_high_precision_init_val = partial(_same, value)
            parameter.clear_high_precision_init_val = partial(parameter.__dict__.pop, "get_high_precision_init_val")
        for module, attribute in one.owners:
            module._parameters[attribute] = parameter


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _as_dtensor(value: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return a local shard as the DTensor it is part of."""
    if not isinstance(before, DTensor):
        return value
    return DTensor.from_local(
        value, before.device_mesh, before.placements, run_check=False, shape=before.shape, stride=before.stride()
    )
