"""The computation of the local experts: two grouped GEMMs around the model's activation."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwright.engine.experts.expert_params import adapter_of, first_proj, fused, packed_experts
from meshwright.engine.kernels import fp8_grouped
from meshwright.engine.kernels.nf4 import unpack

ALIGNMENT = 16  # bytes: required by the grouped kernels for the rows of both matrices


def run_experts(
    experts: Any,
    rows: torch.Tensor,
    ends: torch.Tensor,
    adds_down_bias: bool = True,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the experts' outputs for rows sorted by expert; the rows of expert i end before `ends[i]`.

    With the routing `weights` of the rows, outputs are multiplied by them and have no bias of the down projection:
    `down_bias_by_token` returns it. Only one of the etp ranks of an expert adds that bias.
    """
    first = first_proj(experts)
    inner = _biased(experts, first, _linear(experts, first, rows, ends), ends)
    if getattr(experts, "recompute_activation", False):
        # Includes the second GEMM, which would otherwise save the activation as its input. The GEMM itself is not
        # recomputed, because recompute stops at the last tensor that the backward pass needs.
        out: torch.Tensor = checkpoint(
            _activate_and_project, experts, inner, ends, adds_down_bias, weights,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        return out
    return _activate_and_project(experts, inner, ends, adds_down_bias, weights)


def _activate_and_project(
    experts: Any, inner: torch.Tensor, ends: torch.Tensor, adds_down_bias: bool, weights: torch.Tensor | None
) -> torch.Tensor:
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    if weights is not None:
        return _linear(experts, "down_proj", (inner * weights[:, None]).to(inner.dtype), ends)
    return _biased(experts, "down_proj", _linear(experts, "down_proj", inner, ends), ends, adds_down_bias)


def down_bias_by_token(experts: Any, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Return each token's weighted sum of its experts' biases of the down projection, [T, H]."""
    bias = fused(experts, "down_proj_bias")
    weights = top_k_weights.new_zeros((top_k_index.shape[0], bias.shape[0]))
    return weights.scatter_add(1, top_k_index, top_k_weights).to(bias.dtype) @ bias


def _linear(experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    packed = packed_experts(experts, name)
    if packed is None:
        weight = fused(experts, name)
        dtype = _compute_dtype(weight)
        columns = weight if experts.is_transposed else weight.transpose(-2, -1)
        rows, columns = rows.to(dtype), columns.to(dtype)
        in_fp8 = getattr(experts, "fp8_rows", False) and fp8_grouped.fits(columns)
        out = fp8_grouped.fp8_grouped_mm(rows, columns, ends) if in_fp8 else grouped_mm(rows, columns, ends)
    else:
        dtype = _compute_dtype(packed[1])
        out = _PackedGrouped.apply(rows.to(dtype), *packed, ends, bool(experts.is_transposed))  # type: ignore[no-untyped-call]  # torch's
    adapter = adapter_of(experts, name)
    if adapter is not None:
        first, second = (part.to(dtype).transpose(-2, -1) for part in adapter)
        out = out + grouped_mm(grouped_mm(rows.to(dtype), first, ends) * experts.lora_scale, second, ends)
    return out


def _biased(experts: Any, name: str, out: torch.Tensor, ends: torch.Tensor, adds: bool = True) -> torch.Tensor:
    if not experts.has_bias:
        return out
    return out + _bias_of_rows(fused(experts, f"{name}_bias").to(out.dtype), ends, out.shape[0], adds)


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the GEMMs: autocast's if enabled, because autocast does not cover the grouped GEMM."""
    device = weight.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else weight.dtype


def _bias_of_rows(bias: torch.Tensor, ends: torch.Tensor, rows: int, adds: bool) -> torch.Tensor:
    expert = torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)
    # Ranks that do not add it still compute its full gradient (the gradient of the sum reaches all of them), so the
    # replicas of the bias stay equal without a reduction over etp.
    return functional.embedding(expert, bias if adds else bias - bias.detach())


def grouped_mm(rows: torch.Tensor, columns: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows of [N, in] by its matrix of [E, in, out]."""
    if _fits_grouped_kernel(columns):
        return functional.grouped_mm(rows, columns, offs=ends)
    out: torch.Tensor = one_by_one(rows, columns, ends)
    return out


@torch.library.custom_op("meshwright::unpack_experts", mutates_args=())
def unpack_experts(codes: torch.Tensor, scales: torch.Tensor, again: bool) -> torch.Tensor:
    """Unpack four-bit experts.

    `again` is True in the backward pass: without it the compiler would merge both calls and save the unpacked weights.
    """
    return unpack(codes, scales)


@unpack_experts.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, again: bool) -> torch.Tensor:
    return scales.new_empty(*codes.shape[:-1], 2 * codes.shape[-1])


class _PackedGrouped(torch.autograd.Function):
    """Grouped GEMM with frozen four-bit experts: each pass unpacks them, nothing unpacked is saved."""

    @staticmethod
    def forward(
        rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, ends: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        weight = unpack_experts(codes, scales, False).to(rows.dtype)
        return grouped_mm(rows, weight if transposed else weight.transpose(-2, -1), ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, codes, scales, ends, ctx.transposed = inputs
        ctx.save_for_backward(codes, scales, ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        codes, scales, ends = ctx.saved_tensors
        weight = unpack_experts(codes, scales, True).to(grad.dtype)
        return grouped_mm(grad, weight.transpose(-2, -1) if ctx.transposed else weight, ends), None, None, None, None


def _fits_grouped_kernel(columns: torch.Tensor) -> bool:
    # fp32 has a grouped kernel on CPUs only, and no fake implementation for compile and dry runs.
    aligned = all(width * columns.element_size() % ALIGNMENT == 0 for width in columns.shape[1:])
    return columns.dtype == torch.bfloat16 and aligned


@torch.library.custom_op("meshwright::one_by_one", mutates_args=())
def one_by_one(rows: torch.Tensor, columns: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Run one GEMM per expert where no grouped kernel fits; synchronizes with the host for the group sizes."""
    out = rows.new_empty((rows.shape[0], columns.shape[2]))
    for e, part in enumerate(_row_slices(ends)):
        out[part] = rows[part] @ columns[e]
    return out


@one_by_one.register_fake
def _(rows: torch.Tensor, columns: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], columns.shape[2]))


@torch.library.custom_op("meshwright::one_by_one_columns", mutates_args=())
def _columns_gradient(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch.stack([rows[part].T @ grad[part] for part in _row_slices(ends)])


@_columns_gradient.register_fake
def _(rows: torch.Tensor, grad: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((ends.shape[0], rows.shape[1], grad.shape[1]))


def _save_inputs(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    rows, columns, ends = ctx.saved_tensors
    needs_rows, needs_columns, _ = ctx.needs_input_grad
    return (
        one_by_one(grad, columns.transpose(-2, -1), ends) if needs_rows else None,
        _columns_gradient(rows, grad, ends) if needs_columns else None,
        None,
    )


one_by_one.register_autograd(_gradients, setup_context=_save_inputs)


def _row_slices(ends: torch.Tensor) -> list[slice]:
    stops: list[int] = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
