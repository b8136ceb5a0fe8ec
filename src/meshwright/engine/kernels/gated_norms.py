"""Gated RMS norms of state-space and delta-rule mixers that keep their inputs alone.

Written out in fp32, as transformers has it, a norm of x · silu(gate), or one of x times silu(gate), keeps five times
its input. Here rows are worked through in blocks, and the backward pass makes what it needs again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.engine.kernels.chunked_scan import ends, parts
from meshwright.engine.kernels.device_caps import STEPS, is_dry
from meshwright.engine.patching import Patch, apply, base_class, symbol

MODELING = "transformers.models.{0}.modeling_{0}"
# Classes of gated norms by model type, and whether the gate comes before the norm.
GATED_NORMS = {
    "nemotron_h": ("Zamba2RMSNormGated", True),
    "zamba2": ("Zamba2RMSNormGated", True),
    "qwen3_next": ("Qwen3NextRMSNormGated", False),
    "qwen3_5": ("Qwen3_5RMSNormGated", False),
    "qwen3_5_moe": ("Qwen3_5MoeRMSNormGated", False),
}
BLOCK_NUMBERS = 2**24  # of the rows that are worked on together
INPUTS = "Tensor x, Tensor gate, Tensor weight, int group, float epsilon, bool first"


def fuse_gated_norms(model: nn.Module) -> int:
    """Makes every gated norm of Nemotron-H's and Qwen's kinds keep its inputs alone; says how many were changed."""
    patch_of = _patches_for(model)
    chosen = [m for m in model.modules() if base_class(m) in patch_of and not isinstance(m, GatedNorm)]
    for module in chosen:
        apply(module, patch_of[base_class(module)])
    return len(chosen)


class GatedNorm(Patch):
    """A gated norm that saves only its inputs; the norm is applied to x · silu(gate)."""

    tag = "GatedNorm"
    gate_first = True

    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None or torch.compiler.is_compiling():  # compiled code is fused and saves no more than this
            out: Tensor = super().forward(hidden_states, gate)
            return out
        group = getattr(self, "group_size", hidden_states.shape[-1])
        return gated_norm(hidden_states, gate, self.weight, group, self.variance_epsilon, self.gate_first)


class NormThenGate(GatedNorm):
    """The same for a norm of x that is multiplied by silu(gate) afterwards."""

    gate_first = False


def _patches_for(model: nn.Module) -> dict[type[nn.Module], type[Patch]]:
    """Return the patches by class of norm, of the model types whose modules the model has."""
    used = {base_class(module).__module__ for module in model.modules()}
    return {
        symbol(module, name): GatedNorm if gate_first else NormThenGate
        for model_type, (name, gate_first) in GATED_NORMS.items()
        if (module := MODELING.format(model_type)) in used
    }


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, group: int, epsilon: float, first: bool = True) -> Tensor:
    """The norm of x · silu(gate) over groups of so many columns, times the weight; or of x, times silu(gate)."""
    out: Tensor = _norm(x.flatten(0, -2), gate.flatten(0, -2), weight, group, epsilon, first)
    return out.view(*x.shape[:-1], -1)


def _norm_steps(x: Tensor, gate: Tensor, weight: Tensor, group: int, epsilon: float, first: bool) -> Tensor:
    out = _like_output(x, weight, first)
    for rows in _blocks(x):
        opened = functional.silu(gate[rows].float())
        normed = _normed(x[rows].float() * opened if first else x[rows].float(), group, epsilon)[0]
        if first:
            torch.mul(weight, normed.to(x.dtype), out=out[rows])
        else:
            torch.mul(weight * normed.to(x.dtype), opened, out=out[rows])
    return out


_norm = torch.library.custom_op("meshwright::gated_norm", _norm_steps, mutates_args=(), schema=f"({INPUTS}) -> Tensor")


@_norm.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, group: int, epsilon: float, first: bool) -> Tensor:
    return _like_output(x, weight, first)


def _like_output(x: Tensor, weight: Tensor, first: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype) if first else x.dtype)


def _backward_steps(
    gradient: Tensor, x: Tensor, gate: Tensor, weight: Tensor, group: int, epsilon: float, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gate and weight, the last in fp32."""
    by_x, by_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    by_weight = torch.zeros_like(weight, dtype=torch.float32)
    for rows in _blocks(x):
        into, wide_gate = x[rows].float(), gate[rows].float()
        opened = functional.silu(wide_gate)
        normed, scale = _normed(into * opened if first else into, group, epsilon)
        by_out = gradient[rows].float()
        by_scaled = by_out if first else by_out * opened
        by_weight += (by_scaled * normed).sum(0)
        by_normed = by_scaled * weight
        shared = _grouped(by_normed * normed, group).mean(-1, keepdim=True)
        by_into = _grouped(by_normed, group).sub(_grouped(normed, group) * shared).mul_(scale).flatten(1)
        by_x[rows] = by_into * opened if first else by_into
        by_opened = by_into.mul_(into) if first else normed.mul_(by_out * weight)
        by_gate[rows] = torch.ops.aten.silu_backward(by_opened, wide_gate)
    return by_x, by_gate, by_weight


_norm_backward = torch.library.custom_op(
    "meshwright::gated_norm_backward",
    _backward_steps,
    mutates_args=(),
    schema=f"(Tensor gradient, {INPUTS}) -> (Tensor, Tensor, Tensor)",
)


@_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), torch.empty_like(weight, dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[3:]
    ctx.save_for_backward(*inputs[:3])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, weight = ctx.saved_tensors  # asked for once: where they are computed again, they are there once
    by_x, by_gate, by_weight = _norm_backward(gradient, x, gate, weight, *ctx.settings)
    return by_x, by_gate, by_weight.to(weight.dtype), None, None, None


_norm.register_autograd(_gradients, setup_context=_remember)

STEPS[torch.ops.meshwright.gated_norm.default] = _norm_steps
STEPS[torch.ops.meshwright.gated_norm_backward.default] = _backward_steps


def _blocks(x: Tensor) -> list[slice]:
    """The rows of each block. In a dry run the first and last alone: those between are alike."""
    rows, width = x.shape
    step = max(1, BLOCK_NUMBERS // width)
    every = parts(rows, step)
    return ends(every) if is_dry(x) else every


def _grouped(rows: Tensor, group: int) -> Tensor:
    return torch.unflatten(rows, 1, (-1, group))


def _normed(rows: Tensor, group: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Rows normed by groups, and what each group was multiplied by."""
    groups = _grouped(rows, group)
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + epsilon)
    return (groups * scale).flatten(1), scale
