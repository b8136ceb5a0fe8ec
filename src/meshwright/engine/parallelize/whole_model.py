"""Parallelism of models that run transformers' own forward pass: data parallelism, recompute, compile and adapters.

Tensor, context and expert parallelism need to know what every module computes; the rules refuse them for these models
(rules/engine.py), and `require_supported` does for callers that skip the rules.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from meshwright.engine.hooks import NO_HOOKS, Hooks
from meshwright.engine.losses import TokenLoss, logits_loss
from meshwright.engine.mesh import Mesh
from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.model.behaviour import behaviour_of, mixed_documents
from meshwright.engine.model.block_split import BlockOrder
from meshwright.engine.model.transformers_stage import LogitTransform, TransformersStage, find_logit_transform
from meshwright.engine.parallelize.fsdp import (
    fsdp_settings,
    needs_fsdp,
    reduce_in_place,
    shard_module,
    storage_dtype,
    use_one_stream,
)
from meshwright.engine.parallelize.lm_loss import LossSettings, loss_of_head
from meshwright.engine.parallelize.recompute import OPERATIONS
from meshwright.engine.patching import Patch, apply
from meshwright.errors import InputError
from meshwright.recipes.engine_models import WHOLE_MODEL_LIMITS
from meshwright.recipes.other_names import ARCHITECTURE_NAMES
from meshwright.recipes.types import Recipe, field_value


def require_supported(recipe: Recipe, config: Any, hooks: Hooks = NO_HOOKS) -> None:
    """Raise for what needs the engine's own layers, and for packed samples that the model does not keep apart."""
    model_type = config.model_type
    for field, (plain, what) in WHOLE_MODEL_LIMITS.items():
        value = field_value(recipe, field)
        if value not in plain:
            raise InputError(
                f"{model_type} runs transformers' own forward pass, which has no {what}",
                field=field,
                value=value,
                fix=(f"{field}={plain[0]}",),
            )
    _require_stages(recipe, config)
    if recipe.data.packing and not behaviour_of(config).isolates:
        raise mixed_documents(config)
    if hooks.tp_plan is not None:
        raise InputError(f"{model_type} runs transformers' own forward pass, which tp does not shard", field="tp_plan")


def _require_stages(recipe: Recipe, config: Any) -> None:
    """Raise for pipeline stages of a model whose balancing loss needs all layers."""
    if recipe.layout.pp == 1:
        return
    if _balances(config.get_text_config(), recipe):
        reason = f"transformers computes the balancing loss of {config.model_type} from the routers of all layers"
        raise InputError(
            f"{reason}, and layout.pp={recipe.layout.pp} puts them on several stages",
            field="moe.aux_loss",
            value=recipe.moe.aux_loss,
            fix=("moe.aux_loss=0", "layout.pp=1"),
        )


def with_known_recompute(recipe: Recipe) -> Recipe:
    """Return the recipe with selective recompute by operation: the modules of the model are not known by name."""
    layout = recipe.layout
    if layout.recompute != "selective" or layout.recompute_modules in ((), (OPERATIONS,)):
        return recipe
    if dist.get_rank() == 0:
        named = ",".join(layout.recompute_modules)
        warn(f"layout.recompute_modules={named} → {OPERATIONS}: transformers runs the model, its modules are not known")
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(layout, recompute_modules=(OPERATIONS,)))


def build_stage(
    model: Any, recipe: Recipe, hooks: Hooks, blocks: range | None = None, order: BlockOrder | None = None
) -> TransformersStage:
    """Return a model, or some blocks of it, as a stage; the last one returns the loss of a micro batch."""
    transform = find_logit_transform(model)
    stage = TransformersStage(model, blocks, order)
    if stage.last:
        _apply_loss(stage, transform, recipe, hooks.loss)
    _add_balancing(stage, recipe)
    return stage


def _apply_loss(
    stage: TransformersStage, transform: LogitTransform | None, recipe: Recipe, loss: TokenLoss | None
) -> None:
    z_loss = recipe.train.z_loss
    if transform is None:  # the model changes logits in another way, or has another head: it returns all of them
        stage.logits_loss = partial(_loss_of_logits, stage.losses, z_loss, loss)
        return
    settings: dict[str, Any] = {"method": recipe.kernels.loss, "softcap": transform.softcap, "function": loss}
    head = stage.head
    head.loss = LossSettings(settings, z_loss, 0.0, None, False, stage.losses)
    head.loss_targets, head.logit_scale = stage.targets, transform.scale
    apply(head, HeadLoss)


def _loss_of_logits(
    losses: list[torch.Tensor],
    z_loss: float,
    function: TokenLoss | None,
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    found = logits_loss(logits.flatten(0, 1).float(), labels.flatten(), weights.flatten(), z_loss, function)
    losses.append(torch.stack([found.cross_entropy, found.z, torch.zeros_like(found.z)]))
    return found.total


class HeadLoss(Patch):
    """A head inside a model's forward pass: it computes the loss and returns it in place of logits."""

    tag = "Loss"

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        targets = self.loss_targets
        if targets.labels is None:  # logits are wanted
            logits: torch.Tensor = super().forward(hidden)
            return logits
        if self.logit_scale != 1.0:
            hidden = hidden * self.logit_scale
        # The same tensor is this module's output, so that FSDP sees where its backward pass starts.
        loss = loss_of_head(self, hidden, targets.labels, targets.weights).reshape(1, 1, 1)
        targets.loss = loss
        return loss


def _balances(config: Any, recipe: Recipe) -> bool:
    """Return whether the routers of a model are to be balanced."""
    has_experts = any(getattr(config, name, None) for name in ARCHITECTURE_NAMES["experts"])
    return has_experts and recipe.moe.balancing != "none" and bool(recipe.moe.aux_loss)


def _add_balancing(stage: TransformersStage, recipe: Recipe) -> None:
    """Add the model's own balancing loss of its routers, where it has one, with the weight of the recipe."""
    config: Any = stage.transformers_model.config.get_text_config()
    if not any(getattr(config, name, None) for name in ARCHITECTURE_NAMES["experts"]) or recipe.moe.balancing == "none":
        return
    settings = hasattr(config, "output_router_logits") and hasattr(config, "router_aux_loss_coef")
    code = sys.modules[type(stage.transformers_model).__module__]
    has_loss = settings and hasattr(code, "load_balancing_loss_func")  # some have the settings only
    if recipe.moe.aux_loss and has_loss:
        config.output_router_logits = True
        micro_batches = recipe.train.global_batch_size // recipe.layout.micro_batch_size  # of all ranks
        stage.aux_loss_weight = recipe.moe.aux_loss / micro_batches
    if (recipe.moe.aux_loss and not has_loss) or recipe.moe.balancing != "aux_loss":
        own, none = "only its own balancing loss trains its routers", "nothing balances its experts"
        kept = own if stage.aux_loss_weight else none
        if dist.get_rank() == 0:
            warn(f"moe.balancing={recipe.moe.balancing}: transformers runs {config.model_type}, and {kept}")


def shard_stage(stage: TransformersStage, mesh: Mesh, recipe: Recipe) -> None:
    """Shard every layer as one FSDP unit; embedding, head and shared layers belong to the model's unit."""
    if not needs_fsdp(mesh, recipe):
        return
    settings = fsdp_settings(recipe, mesh)
    for layer in stage.layers_of_their_own():
        shard_module(layer, mesh.fsdp, settings)
    shard_module(stage, mesh.fsdp, settings)
    if mesh.stage.size == 1:
        use_one_stream(stage)
        reduce_in_place(stage, storage_dtype(recipe.precision))
