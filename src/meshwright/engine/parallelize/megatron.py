"""Megatron-FSDP: NVIDIA's fully sharded data parallelism, an optional package in the place of torch's own.

It keeps weights, gradients and master weights in flat buffers cut over the fsdp ranks. It both shards a stage and fills
it, one module at a time: what `share` and `materialise` do for the other strategies. A stage has two sets of
parameters: the cut ones, which everybody sees between steps (norm, clipping and optimizers work on those), and the
whole ones, which are in their place from a step's first forward pass to the end of its last backward pass.
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

from meshwright.engine.hf_io.layout_map import Place
from meshwright.engine.hf_io.read import Weights
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.init import InitSpec, fill_initial
from meshwright.engine.model.stage import Stage
from meshwright.engine.parallelize.fsdp import DTYPES, storage_dtype
from meshwright.engine.parallelize.init_weights import fill_buffers, places_in, recorded_name
from meshwright.errors import InputError
from meshwright.recipes.types import Precision, Recipe

WRAPPER = "megatron_fsdp"  # the stage's attribute; among its modules the wrapper would make a circle
TP_MODES = {0: "column", 1: "row"}  # Megatron's words for the dimension that tp cuts


def require(device: torch.device) -> None:
    """Refuses to start where the package or the GPU that it needs is missing."""
    reason, fix = "", ["layout.strategy=fsdp2"]
    if device.type != "cuda":
        reason = f"Megatron-FSDP needs NVIDIA GPUs (it works with CUDA streams and NCCL), and this run is on {device}"
    elif find_spec("megatron_fsdp") is None:
        reason = "this strategy is the work of the package megatron-fsdp, which is not installed"
        fix.insert(0, "pip install 'meshwright[megatron_fsdp]'")
    if reason:
        raise InputError(reason, field="layout.strategy", value="megatron_fsdp", fix=fix)


def shard_and_init(
    stage: Stage,
    mesh: Mesh,
    recipe: Recipe,
    initial: dict[str, InitSpec],
    device: torch.device,
    weights: Weights | None = None,
) -> None:
    """Shards a stage with one unit for each layer, and fills it from a folder or as the seed and the names say."""
    from megatron_fsdp import fully_shard_model  # type: ignore[import-not-found]  # optional

    layout, kernels = recipe.layout, recipe.kernels
    modules = add_reset_parameters(stage, recipe, initial, weights)
    wrapper = fully_shard_model(
        stage,
        device_mesh=mesh.state,
        dp_shard_dim="fsdp",
        tp_dim="tp",
        **_copies(mesh),
        expt_device_mesh=mesh.state,  # it finds experts by their names; without ep they lie like all else
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
    """Says before a micro batch whether the cut parameters get their gradients, and their places, at its end.

    Gradients are summed over the ranks in every micro batch: what is kept of them is cut.
    """
    wrapper = stage.__dict__.get(WRAPPER)
    if wrapper is not None:
        wrapper.is_last_microbatch = wrapper.model_auto_sync = last


def _before_forward(stage: nn.Module, args: Any) -> None:
    """Puts whole parameters in their places, with the values that the cut ones have by now."""
    wrapper = stage.__dict__[WRAPPER]
    if wrapper.is_param_fsdp_distributed:
        wrapper.install_optimized_model_weights()
        wrapper.zero_grad_buffer()
        wrapper._replace_param_with_raw_if_needed()


def _after_forward(stage: nn.Module, args: Any, output: Any) -> None:
    """Puts the cut parameters back where no backward pass will do it."""
    if not torch.is_grad_enabled():
        stage.__dict__[WRAPPER]._replace_param_with_distributed_if_needed()


def _copies(mesh: Mesh) -> dict[str, Any]:
    """The axis along which whole sets of shards are copied, where there is one."""
    if mesh.state["dp_replicate"].size() == 1:
        return {}
    return {"dp_outer_dim": "dp_replicate", "hybrid_fsdp_group": mesh.fsdp._flatten().get_group()}


def _policy(precision: Precision, mesh: Mesh) -> Any:
    from megatron_fsdp import MixedPrecisionPolicy

    compute, master = DTYPES[precision.compute], storage_dtype(precision)
    exact = compute == torch.float32
    # Shards of one rank are not summed; a format for it would make version 0.6 count gradients twice.
    reduced = mesh.state["fsdp"].size() > 1
    return MixedPrecisionPolicy(
        main_params_dtype=None if compute == master else master,
        main_grads_dtype=torch.float32 if exact else DTYPES[precision.grads],
        grad_comm_dtype=None if exact or not reduced else DTYPES[precision.reduce],
    )


@dataclass(frozen=True)
class _Stored:
    """A parameter on the meta device before it was made plain, and where it is."""

    owner: nn.Module
    attribute: str
    name: str  # in the stage
    before: torch.Tensor
    sharers: tuple[tuple[nn.Module, str], ...]  # all modules that hold it: more than one where weights are tied


def add_reset_parameters(
    stage: nn.Module, recipe: Recipe, initial: dict[str, InitSpec], weights: Weights | None = None
) -> list[nn.Module]:
    """Makes parameters plain and gives the modules that have some a `reset_parameters` to start them as ours do."""
    own: dict[nn.Module, list[_Stored]] = {}
    where = places_in(stage, weights)
    for one in _make_plain(stage, DTYPES[recipe.precision.compute]):
        own.setdefault(one.owner, []).append(one)
    for module, stored in own.items():
        module.reset_parameters = partial(_fill, stored, initial, recipe, weights, where)  # type: ignore[assignment]
    return list(own)


def _make_plain(stage: nn.Module, compute: torch.dtype) -> Iterator[_Stored]:
    """Replaces parameters by plain ones in the format of the computation; those cut over tp say so in Megatron's way.

    Megatron-FSDP takes DTensors too, but gives parts that are cut along their second dimension a wrong shape.
    """
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    before: dict[int, nn.Parameter] = {}
    for path, module in stage.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                before[id(parameter)] = parameter
                places.setdefault(id(parameter), []).append((module, attribute, f"{path}.{attribute}"))
    for key, parameter in before.items():
        plain = _plain(parameter, compute)
        sharers = tuple((module, attribute) for module, attribute, _ in places[key])
        for module, attribute in sharers:
            module._parameters[attribute] = plain
        for module, attribute, _ in places[key]:
            yield _Stored(module, attribute, places[key][0][2], parameter.detach(), sharers)


def _plain(parameter: nn.Parameter, compute: torch.dtype) -> nn.Parameter:
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    plain = nn.Parameter(torch.empty_like(part, dtype=compute), parameter.requires_grad)
    for place in parameter.placements if isinstance(parameter, DTensor) else ():
        if isinstance(place, Shard):
            plain._tensor_parallel_mode = TP_MODES[place.dim]  # type: ignore[attr-defined]
    return plain


@torch.no_grad()
def _fill(
    own: list[_Stored],
    initial: dict[str, InitSpec],
    recipe: Recipe,
    weights: Weights | None,
    where: dict[str, Place],
) -> None:
    """Fills the parameters of one module, which have just been allocated."""
    precision = recipe.precision
    for one in own:
        parameter: Any = one.owner._parameters[one.attribute]
        value = torch.empty(parameter.shape, dtype=storage_dtype(precision), device=parameter.device)
        cut = _as_cut(value, one.before)
        if weights is None or not weights.fill(cut, one.name, where.get(one.name)):
            fill_initial(cut, one.name, initial[recorded_name(one.name, initial)], recipe.train.seed)
        parameter.copy_(value)
        if parameter.requires_grad and value.dtype != parameter.dtype:
            # Megatron-FSDP's way to fill master weights with more digits than those of the computation.
            parameter.get_high_precision_init_val = partial(_same, value)
            parameter.clear_high_precision_init_val = partial(parameter.__dict__.pop, "get_high_precision_init_val")
        for module, attribute in one.sharers:
            module._parameters[attribute] = parameter


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _as_cut(value: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, as the part of the whole that it is."""
    if not isinstance(before, DTensor):
        return value
    return DTensor.from_local(
        value, before.device_mesh, before.placements, run_check=False, shape=before.shape, stride=before.stride()
    )
