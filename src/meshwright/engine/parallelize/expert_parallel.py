"""Expert parallelism: experts sharded over ep (by expert) and etp (inside each expert), and router balancing."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.engine import experts
from meshwright.engine.mesh import Mesh
from meshwright.engine.parallelize.tensor_parallel import shard_parameter
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

SIGMOID_ROUTERS = ("deepseek_v3", "glm4_moe", "glm4v_moe_text", "nemotron_h")


def split_expert_params(layer: nn.Module) -> None:
    """Store fused gate and up weights as two dimensions that can be sharded; done in every layout."""
    for block in experts.expert_blocks(layer):
        experts.reshape_experts(block.experts)


def shard_experts(layer: nn.Module, mesh: Mesh, recipe: Recipe) -> None:
    """Shard the experts of a layer and set the group over which their tokens are dispatched."""
    layout = recipe.layout
    axis = experts.ExpertAxis(
        layout.ep, layout.etp, mesh.experts.group, mesh.experts.rank, force_balance=recipe.moe.force_balance
    )
    for block in experts.expert_blocks(layer):
        block.experts.axis = axis  # type: ignore[assignment]
        if axis.size > 1:
            for name, spec in experts.shard_specs(block.experts).items():
                _check_divisible(block.experts, name, spec, layout.etp)
                shard_parameter(block.experts, name, mesh.expert_state["ep", "etp"], spec.ep_dim, spec.etp_dim)


def _check_divisible(owner: nn.Module, name: str, spec: experts.ExpertShardSpec, etp: int) -> None:
    """Raise if shards would be uneven; for four-bit weights also if a shard would split a block with one scale."""
    width = 0 if spec.etp_dim is None else getattr(owner, name).shape[spec.etp_dim]
    if width % etp:
        raise InputError(
            f"{name} has a width of {width}, which etp={etp} does not divide", field="layout.etp", value=etp
        )


def masks_padding(recipe: Recipe, padded_end: bool) -> bool:
    """Return whether the balancing losses leave out padding: fine-tuning pads samples, epochs may pad the last step."""
    has_loss = recipe.moe.router_z_loss > 0 or (recipe.moe.aux_loss > 0 and recipe.moe.balancing in experts.LOSSES)
    return has_loss and recipe.goal != "peft" and (recipe.goal == "sft" or padded_end)


def balance_routers(layer: nn.Module, mesh: Mesh, recipe: Recipe, config: Any) -> None:
    """Attach the balancing of the recipe to every router."""
    moe, layout = recipe.moe, recipe.layout
    # A frozen router is not balanced; its load is still recorded.
    trained = recipe.goal != "peft" and "language" not in recipe.train.freeze
    same_samples = mesh.sequence if layout.sp else mesh.cp
    for block in experts.expert_blocks(layer):
        experts.attach_router(
            block.router,
            block.block,
            experts.Balancing(
                kind=moe.balancing if trained else "none",
                experts=int(block.experts.num_experts),  # type: ignore[arg-type]
                topk=int(block.router.top_k),  # type: ignore[arg-type]
                score="sigmoid" if config.model_type in SIGMOID_ROUTERS else "softmax",
                aux_loss=moe.aux_loss if trained else 0.0,
                router_z_loss=moe.router_z_loss if trained else 0.0,
                samples=layout.micro_batch_size,
                group=same_samples.group,
                dp_group=mesh.dp.group,
                router_in_fp32=moe.router_dtype == "fp32",
            ),
        )
