"""Gated RMS norms of state-space and delta-rule mixers that save only their inputs.

transformers computes norm(x · silu(gate)), or norm(x) · silu(gate), in fp32 operations that save five times the input.
Here blocks of rows are processed one after another, and the backward pass recomputes what it needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.engine.kernels.chunked_scan import first_and_last, slices
from meshwright.engine.kernels.device_caps import DECOMPOSITIONS, is_dry
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
BLOCK_ELEMENTS = 2**24  # in the rows that are processed together
INPUTS = "Tensor x, Tensor gate, Tensor weight, int group, float epsilon, bool gate_first"


def fuse_gated_norms(model: nn.Module) -> int:
    """Patch every gated norm of Nemotron-H and Qwen to save only its inputs; return how many."""
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


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, group: int, epsilon: float, gate_first: bool = True) -> Tensor:
    """Return norm(x · silu(gate)) over groups of columns, times the weight; or norm(x) times weight and silu(gate)."""
    out: Tensor = _norm(x.flatten(0, -2), gate.flatten(0, -2), weight, group, epsilon, gate_first)
    return out.view(*x.shape[:-1], -1)


def _norm_forward(x: Tensor, gate: Tensor, weight: Tensor, group: int, epsilon: float, gate_first: bool) -> Tensor:
    out = _like_output(x, weight, gate_first)
    for rows in _blocks(x):
        activated = functional.silu(gate[rows].float())
        normed = _normed(x[rows].float() * activated if gate_first else x[rows].float(), group, epsilon)[0]
        if gate_first:
            torch.mul(weight, normed.to(x.dtype), out=out[rows])
        else:
            torch.mul(weight * normed.to(x.dtype), activated, out=out[rows])
    return out


_norm = torch.library.custom_op(
    "meshwright::gated_norm", _norm_forward, mutates_args=(), schema=f"({INPUTS}) -> Tensor"
)


@_norm.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, group: int, epsilon: float, gate_first: bool) -> Tensor:
    return _like_output(x, weight, gate_first)


def _like_output(x: Tensor, weight: Tensor, gate_first: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype) if gate_first else x.dtype)


def _norm_backward_impl(
    gradient: Tensor, x: Tensor, gate: Tensor, weight: Tensor, group: int, epsilon: float, gate_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, gate and weight, the last in fp32."""
    grad_x, grad_gate = x.new_empty(x.shape), gate.new_empty(gate.shape)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    for rows in _blocks(x):
        into, wide_gate = x[rows].float(), gate[rows].float()
        activated = functional.silu(wide_gate)
        normed, scale = _normed(into * activated if gate_first else into, group, epsilon)
        grad_out = gradient[rows].float()
        grad_scaled = grad_out if gate_first else grad_out * activated
        grad_weight += (grad_scaled * normed).sum(0)
        grad_normed = grad_scaled * weight
        shared = _grouped(grad_normed * normed, group).mean(-1, keepdim=True)
        grad_into = _grouped(grad_normed, group).sub(_grouped(normed, group) * shared).mul_(scale).flatten(1)
        grad_x[rows] = grad_into * activated if gate_first else grad_into
        grad_activated = grad_into.mul_(into) if gate_first else normed.mul_(grad_out * weight)
        grad_gate[rows] = torch.ops.aten.silu_backward(grad_activated, wide_gate)
    return grad_x, grad_gate, grad_weight


_norm_backward = torch.library.custom_op(
    "meshwright::gated_norm_backward",
    _norm_backward_impl,
    mutates_args=(),
    schema=f"(Tensor gradient, {INPUTS}) -> (Tensor, Tensor, Tensor)",
)


@_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), torch.empty_like(weight, dtype=torch.float32)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[3:]
    ctx.save_for_backward(*inputs[:3])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, weight = ctx.saved_tensors  # read once: with recompute every access would recompute them
    grad_x, grad_gate, grad_weight = _norm_backward(gradient, x, gate, weight, *ctx.settings)
    return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None, None


_norm.register_autograd(_gradients, setup_context=_save_inputs)

DECOMPOSITIONS[torch.ops.meshwright.gated_norm.default] = _norm_forward
DECOMPOSITIONS[torch.ops.meshwright.gated_norm_backward.default] = _norm_backward_impl


def _blocks(x: Tensor) -> list[slice]:
    """Return the rows of each block; in a dry run only the first and last, the others are equal."""
    rows, width = x.shape
    step = max(1, BLOCK_ELEMENTS // width)
    blocks = slices(rows, step)
    return first_and_last(blocks) if is_dry(x) else blocks


def _grouped(rows: Tensor, group: int) -> Tensor:
    return torch.unflatten(rows, 1, (-1, group))


def _normed(rows: Tensor, group: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return rows normalized by group, and the factor of each group."""
    groups = _grouped(rows, group)
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + epsilon)
    return (groups * scale).flatten(1), scale
