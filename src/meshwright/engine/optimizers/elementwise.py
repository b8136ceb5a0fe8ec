"""Update rules that treat every element alone: AdamW, Lion, SGD and schedule-free AdamW.

Arithmetic is fp32 whatever the formats of weights, gradients and state. Weight decay is decoupled in all of them:
a step first shrinks the weight by lr * weight_decay.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from meshwright.engine.kernels.device_caps import on_gpu
from meshwright.engine.kernels.optimizer_kernels import adamw_
from meshwright.engine.optimizers.base import (
    Group,
    LocalOptimizer,
    buckets,
    local,
    shrink,
    store,
    weights_and_gradients,
    widened,
)


class AdamW(LocalOptimizer):
    """AdamW; torch's fused kernel where weights, gradients and moments share a format."""

    def __init__(
        self, groups: list[Group], lr: float, betas: tuple[float, float], eps: float, moments: torch.dtype
    ) -> None:
        super().__init__(groups, lr)
        self.betas, self.eps, self.moments = betas, eps, moments

    def fresh_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        # A second moment moves by 1 - beta2, which nears bf16's resolution: only bf16 weights (the recipe's choice of
        # memory over digits) have it in bf16.
        second = self.moments if parameter.dtype == self.moments else torch.float32
        return {
            "exp_avg": torch.zeros_like(parameter, dtype=self.moments),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=second),
        }

    @property
    def takes_factor(self) -> bool:
        return all(on_gpu(local(one)) for group in self.param_groups for one in group["params"])

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        if self.takes_factor:
            self._in_one_pass(group, [one for one in parameters if local(one).numel()])
            return
        fused = [one for one in parameters if self._one_format(one)]
        mixed = [one for one in parameters if not self._one_format(one)]
        self._fused(group, [one for one in fused if local(one).numel()])
        for bucket in buckets(mixed):
            self._mixed(group, bucket)

    def _in_one_pass(self, group: Group, parameters: list[Parameter]) -> None:
        """Any mix of formats in one pass over memory, the clipping included; 1.3 times torch's fused kernel's speed."""
        if not parameters:
            return
        weights, gradients = weights_and_gradients(parameters)
        factor = self.factor if self.factor is not None else torch.ones((), device=weights[0].device)
        state = self.locals(parameters, "exp_avg"), self.locals(parameters, "exp_avg_sq")
        for weight, gradient, first, second in zip(weights, gradients, *state, strict=True):
            adamw_(
                weight,
                gradient.contiguous(),
                first,
                second,
                factor,
                step=group["step"],
                lr=group["lr"],
                betas=self.betas,
                eps=self.eps,
                weight_decay=group["weight_decay"],
            )

    def _one_format(self, parameter: Parameter) -> bool:
        state, gradient = self.state[parameter], parameter.grad
        used = {state["exp_avg"].dtype, state["exp_avg_sq"].dtype, parameter.dtype}
        return gradient is not None and used == {gradient.dtype}

    def _fused(self, group: Group, parameters: list[Parameter]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[Parameter]] = {}
        for one in parameters:
            kinds.setdefault((one.device, one.dtype), []).append(one)
        for (device, _), members in kinds.items():
            weights, gradients = weights_and_gradients(members)
            torch._fused_adamw_(
                weights,
                gradients,
                self.locals(members, "exp_avg"),
                self.locals(members, "exp_avg_sq"),
                [],
                [torch.full((), float(group["step"]), device=device)] * len(members),
                lr=group["lr"],
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )

    def _mixed(self, group: Group, parameters: list[Parameter]) -> None:
        beta1, beta2 = self.betas
        lr, step = group["lr"], group["step"]
        weights, gradients = weights_and_gradients(parameters)
        firsts, seconds = self.locals(parameters, "exp_avg"), self.locals(parameters, "exp_avg_sq")
        weight, gradient = widened(weights), widened(gradients)
        first, second = widened(firsts), widened(seconds)
        torch._foreach_lerp_(first, gradient, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradient, gradient, 1 - beta2)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(root, self.eps)
        shrink(weight, group)
        torch._foreach_addcdiv_(weight, first, root, -lr / (1 - beta1**step))
        store([*weights, *firsts, *seconds], [*weight, *first, *second])


class Lion(LocalOptimizer):
    """Lion (Chen et al., arXiv 2302.06675): steps of one size, in the direction of a momentum's sign."""

    def __init__(self, groups: list[Group], lr: float, betas: tuple[float, float], moments: torch.dtype) -> None:
        super().__init__(groups, lr)
        self.betas, self.moments = betas, moments

    def fresh_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(parameter, dtype=self.moments)}

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        for bucket in buckets(parameters):
            weights, gradients = weights_and_gradients(bucket)
            moments = self.locals(bucket, "exp_avg")
            weight, gradient, moment = widened(weights), widened(gradients), widened(moments)
            direction = torch._foreach_lerp(moment, gradient, 1 - self.betas[0])
            torch._foreach_sign_(direction)
            shrink(weight, group)
            torch._foreach_add_(weight, direction, alpha=-group["lr"])
            torch._foreach_lerp_(moment, gradient, 1 - self.betas[1])
            store([*weights, *moments], [*weight, *moment])


class Sgd(LocalOptimizer):
    """Gradient descent, with momentum unless it is 0."""

    def __init__(self, groups: list[Group], lr: float, momentum: float, moments: torch.dtype) -> None:
        super().__init__(groups, lr)
        self.momentum, self.moments = momentum, moments

    def fresh_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=self.moments)} if self.momentum else {}

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        for bucket in buckets(parameters):
            weights, gradients = weights_and_gradients(bucket)
            weight, step = widened(weights), widened(gradients)
            if self.momentum:
                moments = self.locals(bucket, "momentum_buffer")
                moment = widened(moments)
                torch._foreach_mul_(moment, self.momentum)
                torch._foreach_add_(moment, step)
                store(moments, moment)
                step = moment
            shrink(weight, group)
            torch._foreach_add_(weight, step, alpha=-group["lr"])
            store(weights, weight)


class ScheduleFreeAdamW(LocalOptimizer):
    """Schedule-free AdamW (Defazio et al., arXiv 2405.15682), the authors' form with weights lr² in the average.

    The parameters hold the point y where gradients are taken; state "z" holds the fast iterate. The average x to
    evaluate and to export is made from both by `eval_mode`, and undone by `train_mode`. Use it with a constant
    schedule: warm-up is welcome, decay is what it replaces. Checkpoints are taken in train mode.
    """

    def __init__(self, groups: list[Group], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__([{**group, "lr_max": 0.0, "weight_sum": 0.0} for group in groups], lr)
        self.betas, self.eps = betas, eps
        self._evaluating = False

    def fresh_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        return {
            "z": parameter.detach().clone(),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
        }

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        if self._evaluating:
            raise RuntimeError("the parameters hold the average to evaluate: call train_mode() before a step")
        group["lr_max"] = max(group["lr_max"], group["lr"])
        weight_of_step = group["lr_max"] ** 2
        group["weight_sum"] += weight_of_step
        share = weight_of_step / group["weight_sum"] if group["weight_sum"] else 0.0
        for bucket in buckets(parameters):
            self._bucket(group, bucket, share)

    def _bucket(self, group: Group, parameters: list[Parameter], share: float) -> None:
        beta1, beta2 = self.betas
        weights, gradients = weights_and_gradients(parameters)
        fasts, seconds = self.locals(parameters, "z"), self.locals(parameters, "exp_avg_sq")
        weight, gradient, fast = widened(weights), widened(gradients), widened(fasts)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradient, gradient, 1 - beta2)
        root = torch._foreach_sqrt(seconds)
        torch._foreach_div_(root, (1 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(root, self.eps)
        direction = torch._foreach_div(gradient, root)
        torch._foreach_add_(direction, weight, alpha=group["weight_decay"])
        torch._foreach_lerp_(weight, fast, share)
        torch._foreach_add_(weight, direction, alpha=group["lr"] * (beta1 * (1 - share) - 1))
        torch._foreach_add_(fast, direction, alpha=-group["lr"])
        store([*weights, *fasts], [*weight, *fast])

    def eval_mode(self) -> None:
        if not self._evaluating:
            self._move(1 - 1 / self.betas[0])
        self._evaluating = True

    def train_mode(self) -> None:
        if self._evaluating:
            self._move(1 - self.betas[0])
        self._evaluating = False

    @torch.no_grad()
    def _move(self, towards_z: float) -> None:
        for bucket in buckets([one for group in self.param_groups for one in group["params"] if one in self.state]):
            weights, fasts = [local(one) for one in bucket], self.locals(bucket, "z")
            weight = widened(weights)
            torch._foreach_lerp_(weight, widened(fasts), towards_z)
            store(weights, weight)
