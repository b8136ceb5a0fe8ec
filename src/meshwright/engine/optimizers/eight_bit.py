"""AdamW with 8-bit moments: torchao's dynamic map, one scale per block of a row (Dettmers et al., arXiv 2110.02861).

A block never spans two rows, so codes and scales are sharded like the parameter, and a checkpoint loads in any layout.
Vectors and small matrices keep fp32 moments, as in torchao. Arithmetic is fp32.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from meshwright import extras
from meshwright.engine.kernels.device_caps import is_dry
from meshwright.engine.optimizers.base import Group, local
from meshwright.engine.optimizers.elementwise import AdamW
from meshwright.errors import InputError

BLOCK = 256  # values along a row that share a scale; torchao's block size
MIN_BLOCK = 32
MIN_ELEMENTS = 4096  # smaller parameters keep fp32 moments; torchao's limit
CHUNK = 1 << 22  # elements updated at once: bounds the temporaries, about 40 bytes per element
MOMENTS = ("exp_avg", "exp_avg_sq")


def block_length(parameter: Tensor) -> int:
    """Return how many values share a scale; 0 if the moments stay in fp32."""
    block = gcd(parameter.shape[-1], BLOCK) if parameter.ndim > 1 else 0
    return block if block >= MIN_BLOCK and parameter.numel() >= MIN_ELEMENTS else 0


class AdamW8bit(AdamW):
    """AdamW whose moments are stored as 8-bit codes."""

    def __init__(self, groups: list[Group], lr: float, betas: tuple[float, float], eps: float) -> None:
        extras.require("optimizer.name=adamw8bit", "torchao")
        super().__init__(groups, lr, betas, eps, torch.float32)

    @property
    def takes_factor(self) -> bool:
        return False  # the trainer clips gradients before the step

    def init_state(self, parameter: Parameter, group: Group) -> dict[str, Tensor]:
        block = block_length(parameter)
        if not block:
            return super().init_state(parameter, group)
        state: dict[str, Tensor] = {}
        for name in MOMENTS:  # a scale of zero makes every code a zero
            state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{name}_scales"] = _zero_scales(parameter, block)
        return state

    def update(self, group: Group, parameters: list[Parameter]) -> None:
        super().update(group, [one for one in parameters if not block_length(one)])
        for parameter in parameters:
            block = block_length(parameter)
            if block and local(parameter).numel():
                self._update_codes(group, parameter, block)

    def _update_codes(self, group: Group, parameter: Parameter, block: int) -> None:
        assert parameter.grad is not None
        width = local(parameter).shape[-1]
        tensors = [local(parameter), local(parameter.grad), *self._stored(parameter)]
        weight, gradient, *moments = [one.reshape(-1, one.shape[-1]) for one in tensors]
        rows = max(1, CHUNK // width)
        # A dry run needs one chunk: the others would allocate and free the same again.
        for first in range(0, min(rows, weight.shape[0]) if is_dry(weight) else weight.shape[0], rows):
            part = slice(first, first + rows)
            codes = [one[part] for one in moments]
            updated = self._updated(group, weight[part].float(), gradient[part].float(), codes, block)
            for target, value in zip((weight[part], *codes), updated, strict=True):
                target.copy_(value)

    def _stored(self, parameter: Parameter) -> list[Tensor]:
        names = (f"{name}_{part}" for name in MOMENTS for part in ("codes", "scales"))
        return [local(self.state[parameter][name]) for name in names]

    def _updated(
        self, group: Group, weight: Tensor, gradient: Tensor, moments: list[Tensor], block: int
    ) -> tuple[Tensor, ...]:
        """Return the weights, codes and scales of some rows after the step."""
        beta1, beta2 = self.betas
        step, lr = group["step"], group["lr"]
        first = dequantize(moments[0], moments[1], True, block).lerp_(gradient, 1 - beta1)
        second = dequantize(moments[2], moments[3], False, block).mul_(beta2)
        second.addcmul_(gradient, gradient, value=1 - beta2)
        root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(self.eps)
        weight = weight * (1 - lr * group["weight_decay"])
        weight.addcdiv_(first, root, value=-lr / (1 - beta1**step))
        return weight, *quantize(first, True, block), *quantize(second, False, block)


def quantize(values: Tensor, signed: bool, block: int) -> tuple[Tensor, Tensor]:
    """Return the codes of rows of values, and one scale per block."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor  # type: ignore[import-untyped]

    scaled, scales = scale_tensor(values.contiguous(), block)
    return quantize_8bit_with_qmap(scaled, _levels(values, signed)), scales.view(values.shape[0], -1)


def dequantize(codes: Tensor, scales: Tensor, signed: bool, block: int) -> Tensor:
    """Return the fp32 values of codes."""
    blocks = _levels(codes, signed)[codes.int()].view(*scales.shape, block)
    return (blocks * scales.unsqueeze(-1)).view(codes.shape)


def _levels(like: Tensor, signed: bool) -> Tensor:
    if is_dry(like):  # no cached tensor may outlive a dry run
        return like.new_empty(BLOCK, dtype=torch.float32)
    return _levels_on(like.device, signed)


@cache
def _levels_on(device: torch.device, signed: bool) -> Tensor:
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed), dtype=torch.float32, device=device)


def _zero_scales(parameter: Parameter, block: int) -> Tensor:
    """Return zeros in the shape of a parameter's scales, sharded like the parameter."""
    shape = (*parameter.shape[:-1], parameter.shape[-1] // block)
    part = local(parameter.detach())
    if part.shape[-1] % block:
        raise InputError(
            f"a row of {part.shape[-1]} values on this rank does not split into blocks of {block}",
            field="optimizer.name",
            value="adamw8bit",
            fix=("optimizer.name=adamw", "a smaller layout.tp"),
        )
    zeros = part.new_zeros((*part.shape[:-1], part.shape[-1] // block), dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return zeros
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
