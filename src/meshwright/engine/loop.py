"""The step: forward and backward of all micro batches, sums, norm, clipping, update. The same for every layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.engine import attention, experts, gradients
from meshwright.engine.data.source import Batch, Loader, Source
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.stage import Stage
from meshwright.engine.optimizers import build_optimizer
from meshwright.engine.parallelize import parallelize, spread_sequence
from meshwright.engine.parallelize.data import DTYPES
from meshwright.engine.parallelize.pipeline import Pipeline
from meshwright.engine.scaling import LossScale
from meshwright.engine.schedules import learning_rate
from meshwright.recipes.types import Recipe

BIAS_RATE = 1e-3  # how far the balancing bias of a router moves in a step (DeepSeek-V3)


@dataclass(frozen=True)
class StepResult:
    """What a step says about itself; the same on every rank."""

    step: int
    loss: float
    cross_entropy: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int  # predictions that counted
    skipped: bool = False
    samples: list[int] = field(default_factory=list)  # of this rank
    router: dict[str, float] = field(default_factory=dict)


class Trainer:
    """A model, its optimizer and its data, on one rank of a mesh."""

    def __init__(self, recipe: Recipe, config: Any, mesh: Mesh, device: torch.device, source: Source) -> None:
        self.recipe, self.config, self.mesh, self.device = recipe, config, mesh, device
        self.stages: list[Stage] = parallelize(config, recipe, mesh, device)
        self.routers = [state for stage in self.stages for state in experts.router_states(stage)]
        self.optimizer = build_optimizer(
            [item for stage in self.stages for item in stage.named_parameters()],
            recipe.optimizer,
            recipe.precision,
            "cpu" if recipe.layout.offload in ("params", "optimizer") else device.type,
        )
        self.scale = LossScale() if recipe.precision.compute == "fp16" else None
        train, layout = recipe.train, recipe.layout
        self.micro_batches = train.global_batch_size // (layout.micro_batch_size * mesh.dp.size)
        context = spread_sequence(recipe, mesh)[1]
        self.loader = Loader(
            source,
            mesh,
            global_batch=train.global_batch_size,
            micro_batch=layout.micro_batch_size,
            positions=attention.positions(recipe.data.seq_length, context),
            per_token=train.per_token_loss,
            device=device,
        )
        self.pipeline = self._pipeline() if layout.pp > 1 else None

    def _pipeline(self) -> Pipeline:
        layout, width = self.recipe.layout, self.config.hidden_size
        tokens = self.recipe.data.seq_length // layout.cp
        between = tokens // layout.tp if layout.sp else tokens
        size = layout.micro_batch_size
        return Pipeline(
            self.stages,
            layout,
            self.mesh.pp,
            self.micro_batches,
            hidden=torch.empty(
                (size, between, width), dtype=DTYPES[self.recipe.precision.compute], device="meta", requires_grad=True
            ),
            tokens=torch.empty(size, tokens, dtype=torch.int64, device="meta"),
        )

    def step(self, number: int) -> StepResult:
        """Trains on the samples of one step."""
        batch = self.loader.batch(number)
        loss = self.forward_backward(batch)
        norm = self.finish_gradients()
        skipped = self.scale is not None and not bool(torch.isfinite(norm))
        if self.scale is not None:
            self.scale.update(finite=not skipped)
        lr = learning_rate(self.recipe.schedule, self.recipe.optimizer.lr, self.recipe.train.steps, number)
        if not skipped:
            self.update(norm, lr)
        result = self._result(number, batch, loss, norm, lr, skipped)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Gradients of all micro batches; this rank's part of cross entropy and z-loss, zero where it has no head."""
        for state in self.routers:
            state.scale = self._multiplier() / (self.micro_batches * self.mesh.dp.size)
        if self.pipeline is not None:
            self.pipeline.step(batch.tokens, batch.told, self._multiplier())
        else:
            self._accumulate(batch)
        return self._take_losses()

    def _accumulate(self, batch: Batch) -> None:
        stage, layout = self.stages[0], self.recipe.layout
        parts = batch.micro_batches(layout.micro_batch_size)
        for i, (tokens, told) in enumerate(parts):
            if isinstance(stage, FSDPModule):
                stage.set_requires_gradient_sync(i == len(parts) - 1 or not layout.defer_grad_sync)
            (stage(tokens, **told) * self._multiplier()).backward()

    def _multiplier(self) -> float:
        return self.scale.value if self.scale is not None else 1.0

    def _take_losses(self) -> torch.Tensor:
        found = [part for stage in self.stages if stage.last for part in stage.losses]
        for stage in self.stages:
            if stage.last:
                stage.losses.clear()
        return torch.stack(found).sum(0) if found else torch.zeros(2, device=self.device)

    def finish_gradients(self) -> torch.Tensor:
        """Sums what is left to sum and takes the loss scale back; the norm of the whole model's gradients."""
        gradients.finish(self.stages, self.mesh)
        if self.scale is not None:
            self.scale.unscale(gradients.local_gradients(self.stages))
        return gradients.norm(self.stages, self.mesh)

    def update(self, norm: torch.Tensor, lr: float) -> None:
        """Clips and takes the optimizer's step; routers' biases move too."""
        if self.recipe.optimizer.clip_grad:
            gradients.clip(self.stages, norm, self.recipe.optimizer.clip_grad)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()
        experts.update_biases(self.routers, self.mesh.stage.group, BIAS_RATE)

    def _result(
        self, number: int, batch: Batch, loss: torch.Tensor, norm: torch.Tensor, lr: float, skipped: bool
    ) -> StepResult:
        cross_entropy, z = self._everywhere(loss)
        router = experts.statistics(self.routers, self.mesh.stage.group)
        experts.reset(self.routers)
        return StepResult(
            step=number,
            loss=cross_entropy + z,
            cross_entropy=cross_entropy,
            z_loss=z,
            grad_norm=float(norm),
            lr=lr,
            tokens=batch.counted,
            skipped=skipped,
            samples=batch.numbers,
            router=router,
        )

    def _everywhere(self, loss: torch.Tensor) -> tuple[float, float]:
        """The step's losses, summed over the ranks that hold different tokens and known to all."""
        loss = loss / self.mesh.tp.size  # every tp rank computed the same
        if self.mesh.world.size > 1:
            dist.all_reduce(loss)
        cross_entropy, z = loss.tolist()
        return cross_entropy, z

    @torch.no_grad()
    def evaluate(self, source: Source, steps: int) -> float:
        """The mean loss over some steps of another source, without training."""
        kept, self.loader.source = self.loader.source, source
        for stage in self.stages:
            stage.eval()
        total = 0.0
        for number in range(steps):
            batch = self.loader.batch(number)
            if self.pipeline is not None:
                self.pipeline.evaluate(batch.tokens, batch.told)
            else:
                for tokens, told in batch.micro_batches(self.recipe.layout.micro_batch_size):
                    self.stages[0](tokens, **told)
            total += self._everywhere(self._take_losses())[0]
        for stage in self.stages:
            stage.train()
        self.loader.source = kept
        return total / steps
