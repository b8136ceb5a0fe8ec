"""What an operation computes and sends: floating-point operations of products, bytes of collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

KINDS = {
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
}


def counts_flops(operation: Any) -> bool:
    """Whether an operation is a product whose floating-point operations are counted."""
    return operation._overloadpacket.__name__ in OWN or operation._overloadpacket in flop_registry


def flops_of(operation: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of a product, two for each multiplication and addition; causal attention is halved."""
    own = OWN.get(operation._overloadpacket.__name__)
    if own is not None:
        return own(operation, args, kwargs)
    return int(flop_registry[operation._overloadpacket](*args, **kwargs, out_val=result))


def _attention(passes: tuple[int, int], first: int) -> Callable[[Any, Any, Any], int]:
    """Attention whose queries are argument `first`: so many products as wide as keys, and as wide as values."""

    def count(operation: Any, args: Any, kwargs: Any) -> int:
        q, k, v = args[first : first + 3]
        tokens_first = "_flash_attention_" in operation._overloadpacket.__name__ and "scaled" not in str(operation)
        heads, rows = (q.shape[2], q.shape[1]) if tokens_first else (q.shape[1], q.shape[2])
        columns = k.shape[1] if tokens_first else k.shape[2]
        whole = 2 * q.shape[0] * heads * rows * columns * (passes[0] * q.shape[3] + passes[1] * v.shape[3])
        return int(whole // 2 if _said(operation, args, kwargs, "is_causal") else whole)

    return count


def _said(operation: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value of an argument, wherever it stands."""
    if name in kwargs:
        return kwargs[name]
    names = [one.name for one in operation._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else None


def _rows_by_expert(operation: Any, args: Any, kwargs: Any) -> int:
    """Every row meets one expert's matrix; or, for the matrices' gradients, every row of one the row of the other."""
    left, right = args[:2]
    return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])


def _product(first: int) -> Callable[[Any, Any, Any], int]:
    """A product, or a batch of them, whose left side is argument `first`."""
    return lambda _, args, __: int(2 * args[first].numel() * args[first + 1].shape[-1])


def _convolution_backward(operation: Any, args: Any, kwargs: Any) -> int:
    """As much as the forward pass for each gradient asked for. (torch takes every channel to see every other.)"""
    gradient, given, weight = args[:3]
    outside = given if _said(operation, args, kwargs, "transposed") else gradient
    wanted = _said(operation, args, kwargs, "output_mask")[:2]
    return int(2 * outside.numel() * weight[0].numel() * sum(wanted))


OWN: dict[str, Callable[[Any, Any, Any], int]] = {
    "mm": _product(0),
    "bmm": _product(0),
    "addmm": _product(1),
    "baddbmm": _product(1),
    "_scaled_mm": _product(0),
    "_scaled_dot_product_flash_attention": _attention((1, 1), 0),
    "_scaled_dot_product_cudnn_attention": _attention((1, 1), 0),
    "_scaled_dot_product_efficient_attention": _attention((1, 1), 0),
    "_flash_attention_forward": _attention((1, 1), 0),
    # Scores again, then gradients of values, probabilities, queries and keys.
    "_scaled_dot_product_flash_attention_backward": _attention((3, 2), 1),
    "_scaled_dot_product_cudnn_attention_backward": _attention((3, 2), 1),
    "_scaled_dot_product_efficient_attention_backward": _attention((3, 2), 1),
    "_flash_attention_backward": _attention((3, 2), 1),
    "convolution_backward": _convolution_backward,
    "_grouped_mm": _rows_by_expert,
    "one_by_one": _rows_by_expert,
    "one_by_one_columns": lambda operation, args, kwargs: int(
        2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
    ),
}


def collective_of(operation: Any, args: Any) -> tuple[str, str, int] | None:
    """The group, kind and bytes of a collective: of the larger of what goes in and what comes out."""
    name = operation._schema.name.split("::")[1]
    if name not in KINDS:
        return None
    group = next((_name(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg)), "")
    sides = [_bytes(arg) for arg in args if not isinstance(arg, torch.ScriptObject)]
    return group, KINDS[name], max(sides, default=0)


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


def _name(value: Any) -> str:
    return str(dist.ProcessGroup.unbox(value).group_name)


def _bytes(value: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tree_iter(value) if isinstance(one, torch.Tensor))
