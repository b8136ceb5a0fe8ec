"""The training step: forward and backward of all micro batches, gradient sums, clipping, update; for every layout."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.engine import attention, experts, gradients
from meshwright.engine.data.finite import FiniteSource
from meshwright.engine.data.sample_types import Source
from meshwright.engine.data.sampler import Batch, Loader
from meshwright.engine.epochs import EndedSource
from meshwright.engine.hooks import NO_HOOKS, Hooks
from meshwright.engine.kernels.device_caps import has_data
from meshwright.engine.kernels.dropout_keys import token_keys
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.stage import Stage
from meshwright.engine.optimizers import build_optimizer
from meshwright.engine.parallelize import parallelize, sequence_layout
from meshwright.engine.parallelize.expert_parallel import masks_padding
from meshwright.engine.parallelize.fsdp import DTYPES
from meshwright.engine.parallelize.megatron import wait_for_gradients
from meshwright.engine.parallelize.pipeline import Pipeline
from meshwright.engine.scaling import LossScale
from meshwright.engine.schedules import learning_rate
from meshwright.recipes.types import Recipe

BIAS_RATE = 1e-3  # per-step change of a router's balancing bias (DeepSeek-V3)


@dataclass(frozen=True)
class StepResult:
    """The results of a step, the same on every rank; tensors stay on the device until they are read."""

    step: int
    losses: torch.Tensor  # cross entropy and z-loss over the global batch
    mtp: torch.Tensor  # cross entropy of multi-token prediction, without its weight
    norm: torch.Tensor  # of the gradients, before clipping
    lr: float
    tokens: int  # in the loss
    computed: int  # tokens that went through the model, for throughput
    skipped: bool = False
    router: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Cross entropy and z-loss of the next tokens, comparable between runs with and without mtp_loss."""
        return float(self.losses.sum())

    @property
    def mtp_loss(self) -> float:
        """Cross entropy of multi-token prediction, without its weight; 0 if it is not trained."""
        return float(self.mtp)

    @property
    def grad_norm(self) -> float:
        return float(self.norm)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    loss: float
    tokens: int  # in the loss
    samples: int = 0  # with tokens in the loss


class StepCallbacks:
    """Hooks into a running step; these do nothing."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context around a part of the step: data, forward_backward or optimizer."""
        return nullcontext()

    def allows(self, step: int, losses: torch.Tensor, norm: torch.Tensor, samples: list[int]) -> bool:
        """Whether the optimizer may take the step."""
        return True

    def wants_to_stop(self) -> bool:
        """Whether this rank received a stop request."""
        return False

    def on_stop_vote(self, stops: torch.Tensor) -> None:
        """Receive the number of ranks that want to stop, the same on all ranks and still on the device."""


NO_CALLBACKS = StepCallbacks()


class Trainer:
    """A model, its optimizer and its data, on one rank of a mesh."""

    def __init__(
        self,
        recipe: Recipe,
        config: Any,
        mesh: Mesh,
        device: torch.device,
        source: Source,
        weights: Path | None = None,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        self.recipe, self.config, self.mesh, self.device, self.hooks = recipe, config, mesh, device, hooks
        self.weights = weights  # Hugging Face folder with the initial weights
        self.samples_per_epoch: int | None = None  # different samples of the data, if known
        # with_steps replaced the epochs of the recipe: only the source knows that it ends
        self.padded_end = isinstance(source, EndedSource) and source.size % recipe.train.global_batch_size > 0
        self.stages: list[Stage] = self._make_stages()
        self.routers = [state for stage in self.stages for state in experts.router_states(stage)]
        self.optimizer = build_optimizer(
            [(stage.shared_name(name), p) for stage in self.stages for name, p in stage.named_parameters()],
            recipe.optimizer,
            recipe.precision,
            "cpu" if recipe.layout.offload in ("params", "optimizer") else device.type,
        )
        self.scale = LossScale() if recipe.precision.compute == "fp16" else None
        train, layout = recipe.train, recipe.layout
        self.micro_batches = train.global_batch_size // (layout.micro_batch_size * mesh.dp.size)
        self.loader = self._make_loader(source)
        self.pipeline = self._pipeline() if layout.pp > 1 else None

    # Overridden by other model families: stages and data.

    def _make_stages(self) -> list[Stage]:
        return parallelize(self.config, self.recipe, self.mesh, self.device, self.weights, self.hooks, self.padded_end)

    def _make_loader(self, source: Any) -> Any:
        train, layout = self.recipe.train, self.recipe.layout
        context = sequence_layout(self.recipe, self.mesh)[1]
        return Loader(
            source,
            self.mesh,
            global_batch=train.global_batch_size,
            micro_batch=layout.micro_batch_size,
            positions=attention.positions(self.recipe.data.seq_length, context),
            per_token=train.per_token_loss,
            device=self.device,
            mtp=train.mtp_loss > 0,
            token_mask=bool(self.routers) and masks_padding(self.recipe, self.padded_end),
            prefetch=self.recipe.data.prefetch,
            readers=max(self.recipe.data.workers, 1),
        )

    def close(self) -> None:
        """Stop the prefetching of samples; call it before the process group is destroyed."""
        self.loader.close()

    def _pipeline(self) -> Pipeline:
        layout, width = self.recipe.layout, self.config.get_text_config().hidden_size
        tokens = self.recipe.data.seq_length // layout.cp
        sent = tokens // layout.tp if layout.sp else tokens  # per sample between stages
        size = layout.micro_batch_size
        return Pipeline(
            self.stages,
            layout,
            self.mesh.pp,
            self.micro_batches,
            hidden=torch.empty(
                (size, sent, width), dtype=DTYPES[self.recipe.precision.compute], device="meta", requires_grad=True
            ),
            tokens=torch.empty(size, tokens, dtype=torch.int64, device="meta"),
            device=self.device,
        )

    def step(self, number: int, watch: StepCallbacks = NO_CALLBACKS, figures: bool = True) -> StepResult:
        """Train on one global batch; `figures` also reads the router statistics, which synchronizes with the GPU."""
        with watch.part("data"):
            batch = self.loader.batch(number)
        with watch.part("forward_backward"):
            losses, stops = self._reduce_losses(self.forward_backward(batch), watch)
        with watch.part("optimizer"):
            norm = self.finish_gradients()
            lr = learning_rate(self.recipe.schedule, self.recipe.optimizer.lr, self.recipe.train.steps, number)
            taken = self._scale_allows(norm) and watch.allows(number, losses, norm, batch.numbers)
            watch.on_stop_vote(stops)
            if taken:
                self.update(norm, lr)
            self.optimizer.zero_grad(set_to_none=True)
        router = experts.statistics(self.routers, self.mesh.stage.group) if figures else {}
        experts.reset(self.routers)
        return StepResult(
            number, losses[:2], losses[2], norm, lr, batch.target_tokens, batch.computed_tokens, not taken, router
        )

    def _scale_allows(self, norm: torch.Tensor) -> bool:
        if self.scale is None:
            return True
        finite = not has_data(norm) or bool(torch.isfinite(norm))
        self.scale.update(finite)
        return finite

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Compute the gradients of all micro batches; return this rank's losses (see Stage), zero without a head."""
        for state in self.routers:
            state.scale = self._multiplier() / (self.micro_batches * self.mesh.dp.size)
        batch = self._with_dropout_keys(batch)
        if self.pipeline is not None:
            self.pipeline.step(batch.tokens, batch.model_kwargs, self._multiplier())
        else:
            self._accumulate(batch)
        return self._take_losses()

    def _with_dropout_keys(self, batch: Batch) -> Batch:
        """Add the dropout keys of its tokens to the batch, if adapters have dropout."""
        if self.recipe.goal != "peft" or not self.recipe.peft.dropout:
            return batch
        width = batch.tokens.shape[1] * self.mesh.cp.size
        places = attention.positions(width, sequence_layout(self.recipe, self.mesh)[1])
        keys = token_keys(self.recipe.train.seed, batch.numbers, places)
        return replace(
            batch, model_kwargs={**batch.model_kwargs, "dropout_keys": keys.to(self.device, non_blocking=True)}
        )

    def _accumulate(self, batch: Batch) -> None:
        stage, layout = self.stages[0], self.recipe.layout
        parts = batch.micro_batches(layout.micro_batch_size)
        for i, (tokens, kwargs) in enumerate(parts):
            last = i == len(parts) - 1
            if isinstance(stage, FSDPModule):
                stage.set_requires_gradient_sync(last or not layout.defer_grad_sync)
            wait_for_gradients(stage, last)
            (stage(tokens, **kwargs) * self._multiplier()).backward()

    def _multiplier(self) -> float:
        return self.scale.value if self.scale is not None else 1.0

    def _take_losses(self) -> torch.Tensor:
        found = [part for stage in self.stages if stage.last for part in stage.losses]
        for stage in self.stages:
            if stage.last:
                stage.losses.clear()
        return torch.stack(found).sum(0) if found else torch.zeros(3, device=self.device)

    def finish_gradients(self) -> torch.Tensor:
        """Sum partial gradients and remove the loss scale; return the norm of the model's gradients."""
        gradients.finish(self.stages, self.mesh)
        if self.scale is not None:
            self.scale.unscale(gradients.local_gradients(self.stages))
        return gradients.norm(self.stages, self.mesh)

    def update(self, norm: torch.Tensor, lr: float) -> None:
        """Clip the gradients, take the optimizer step and update the routers' balancing biases."""
        factor = gradients.clip_factor(norm, self.recipe.optimizer.clip_grad)
        if self.optimizer.takes_factor:
            self.optimizer.factor = factor
        elif self.recipe.optimizer.clip_grad:
            gradients.scale(self.stages, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self.optimizer.step()
        experts.update_biases(self.routers, self.mesh.stage.group, BIAS_RATE)

    def _reduce_losses(self, losses: torch.Tensor, watch: StepCallbacks) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses summed over ranks with different tokens, and the number of ranks that want to stop."""
        stops = torch.full(
            (1,), float(watch.wants_to_stop()), device=losses.device
        )  # part of the same all-reduce, at no extra cost
        both = torch.cat([losses / self.mesh.tp.size, stops])  # every tp rank computed the same losses
        if self.mesh.world.size > 1:
            dist.all_reduce(both)
        return both[:-1], both[-1]

    def evaluate(self, source: Source, steps: int, watch: StepCallbacks = NO_CALLBACKS) -> float | None:
        """Return the mean loss over some steps of another source; None after a stop request."""
        found = self.measure(source, steps, watch)
        return found.loss if found is not None else None

    @torch.no_grad()
    def measure(self, source: Source, steps: int, watch: StepCallbacks = NO_CALLBACKS) -> Evaluation | None:
        """Return the mean loss and what it is over; None after a stop request.

        Steps of a finite source, and all with train.per_token_loss, are weighted by their number of tokens.
        """
        per_token = bool(getattr(source, "per_token", self.recipe.train.per_token_loss))
        kept, self.loader.source = self.loader.source, source
        self.optimizer.eval_mode()
        for stage in self.stages:
            stage.eval()
        total, shares, counted, samples, stopped = 0.0, 0, 0, 0, False
        for number in range(steps):
            batch = self.loader.batch(number)
            share = batch.target_tokens if per_token else 1
            counted, samples = counted + batch.target_tokens, samples + batch.target_samples
            if self.pipeline is not None:
                self.pipeline.evaluate(batch.tokens, batch.model_kwargs)
            else:
                parts = batch.micro_batches(self.recipe.layout.micro_batch_size)
                for tokens, kwargs in parts[: self._filled_micro_batches(source, number)]:
                    self.stages[0](tokens, **kwargs)
            losses, stops = self._reduce_losses(self._take_losses(), watch)
            watch.on_stop_vote(stops)
            total, shares, stopped = total + float(losses[0]) * share, shares + share, bool(stops)
            if stopped:
                break
        for stage in self.stages:
            stage.train()
            for module in stage.modules():  # drop gathered copies of the evaluated weights
                if isinstance(module, FSDPModule):
                    module.reshard()
        self.optimizer.train_mode()
        self.loader.source = kept
        return None if stopped else Evaluation(total / max(shares, 1), counted, samples)

    def _filled_micro_batches(self, source: Source, step: int) -> int:
        """Return the micro batches of a step that are not padding on all ranks, the same number on every rank."""
        if not isinstance(source, FiniteSource):
            return self.micro_batches
        batch = self.recipe.train.global_batch_size
        return -(-source.valid(step * batch, batch) // (self.recipe.layout.micro_batch_size * self.mesh.dp.size))
