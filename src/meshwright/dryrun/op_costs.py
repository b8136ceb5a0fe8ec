"""FLOPs of matrix products and bytes of collectives, per operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

# Operations of torch.distributed, then those of compiled graphs and DTensors.
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
    "irecv": "receive",
}


def counts_flops(operation: Any) -> bool:
    """Return whether the FLOPs of an operation are counted."""
    return operation._overloadpacket.__name__ in FLOP_FORMULAS or operation._overloadpacket in flop_registry


def flops_of(operation: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of a matrix product, two per multiply-add; causal attention counts half."""
    formula = FLOP_FORMULAS.get(operation._overloadpacket.__name__)
    if formula is not None:
        return formula(operation, args, kwargs)
    return int(flop_registry[operation._overloadpacket](*args, **kwargs, out_val=result))


def _attention(passes: tuple[int, int], first: int) -> Callable[[Any, Any, Any], int]:
    """Return the formula of attention whose queries are argument `first`, by products over key and value width."""

    def count(operation: Any, args: Any, kwargs: Any) -> int:
        q, k, v = args[first : first + 3]
        tokens_first = "_flash_attention_" in operation._overloadpacket.__name__ and "scaled" not in str(operation)
        heads, rows = (q.shape[2], q.shape[1]) if tokens_first else (q.shape[1], q.shape[2])
        columns = k.shape[1] if tokens_first else k.shape[2]
        full = 2 * q.shape[0] * heads * rows * columns * (passes[0] * q.shape[3] + passes[1] * v.shape[3])
        return int(full // 2 if _argument(operation, args, kwargs, "is_causal") else full)

    return count


def _argument(operation: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return the value of an argument, positional or keyword."""
    if name in kwargs:
        return kwargs[name]
    names = [one.name for one in operation._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else None


def _grouped_product(operation: Any, args: Any, kwargs: Any) -> int:
    """Every token meets one expert's matrix; for weight gradients, every row of one side one row of the other."""
    left, right = args[:2]
    return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])


def _product(first: int) -> Callable[[Any, Any, Any], int]:
    """Return the formula of a matrix product, or a batch of them, whose left side is argument `first`."""
    return lambda _, args, __: int(2 * args[first].numel() * args[first + 1].shape[-1])


def _convolution_backward(operation: Any, args: Any, kwargs: Any) -> int:
    """Count the forward FLOPs for each required gradient. (torch's formula ignores groups.)"""
    gradient, inputs, weight = args[:3]
    outside = inputs if _argument(operation, args, kwargs, "transposed") else gradient
    required = _argument(operation, args, kwargs, "output_mask")[:2]
    return int(2 * outside.numel() * weight[0].numel() * sum(required))


FLOP_FORMULAS: dict[str, Callable[[Any, Any, Any], int]] = {
    "mm": _product(0),
    "bmm": _product(0),
    "addmm": _product(1),
    "baddbmm": _product(1),
    "_scaled_mm": _product(0),
    "_scaled_dot_product_flash_attention": _attention((1, 1), 0),
    "_scaled_dot_product_cudnn_attention": _attention((1, 1), 0),
    "_scaled_dot_product_efficient_attention": _attention((1, 1), 0),
    "_flash_attention_forward": _attention((1, 1), 0),
    # Recomputed scores, then gradients of values, probabilities, queries and keys.
    "_scaled_dot_product_flash_attention_backward": _attention((3, 2), 1),
    "_scaled_dot_product_cudnn_attention_backward": _attention((3, 2), 1),
    "_scaled_dot_product_efficient_attention_backward": _attention((3, 2), 1),
    "_flash_attention_backward": _attention((3, 2), 1),
    "convolution_backward": _convolution_backward,
    "_grouped_mm": _grouped_product,
    "one_by_one": _grouped_product,
    "one_by_one_columns": lambda operation, args, kwargs: int(
        2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
    ),
}


def is_communication(operation: Any) -> bool:
    """Return whether an operation belongs to torch.distributed, in its plain or its functional form."""
    return operation.namespace in ("c10d", "_c10d_functional")


def collective_of(operation: Any, args: Any, result: Any) -> tuple[str, str, int] | None:
    """Return group, kind and bytes of a collective: the larger of its input and its output."""
    name = operation._schema.name.split("::")[1]
    if name not in COLLECTIVES:
        return None
    functional = operation.namespace == "_c10d_functional"  # its output is a result, not an argument
    group = args[-1] if functional else next((arg for arg in args if _is_group(arg)), "")
    sides = [_bytes(arg) for arg in (*args, *((result,) if functional else ())) if not _is_script(arg)]
    return _group_name(group), COLLECTIVES[name], max(sides, default=0)


def _is_script(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject)


def _is_group(value: Any) -> bool:
    return _is_script(value) and "ProcessGroup" in str(value._type())


def _group_name(value: Any) -> str:
    """Return the name of a process group: functional collectives take the name or the group itself."""
    if isinstance(value, str):
        return value
    return str((dist.ProcessGroup.unbox(value) if _is_script(value) else value).group_name)


def _bytes(value: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tree_iter(value) if isinstance(one, torch.Tensor))
