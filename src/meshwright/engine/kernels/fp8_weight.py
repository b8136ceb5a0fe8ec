"""A weight that FSDP gathered in fp8: autograd sees the compute dtype, memory has fp8 codes and one scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
# Views and slices of the codes: the scale does not change.
VIEW_OPS = {
    aten.detach.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.view.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.narrow.default,
}


class Fp8Weight(torch.Tensor):
    """fp8 codes and their scale. fp8 linear layers use both; other operations get the dequantized weight."""

    codes: Tensor
    unit: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, unit: Tensor, dtype: torch.dtype) -> Fp8Weight:
        weight: Any = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, codes.stride(), codes.storage_offset(), dtype=dtype, device=codes.device
        )
        return weight  # type: ignore[no-any-return]  # torch's

    def __init__(self, codes: Tensor, unit: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.unit = codes, unit

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # its argument is not used
        return f"Fp8Weight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "unit"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Fp8Weight:
        return Fp8Weight(inner["codes"], inner["unit"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for a method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in VIEW_OPS:
            weight = args[0]
            viewed = func(weight.codes, *args[1:], **(kwargs or {}))
            return tree_map_only(Tensor, lambda codes: cls(codes, weight.unit, weight.dtype), viewed)
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs or {}))
        return func(*args, **kwargs)

    def dequantized(self) -> Tensor:
        """Return the weight in the compute dtype."""
        return (self.codes.float() * self.unit).to(self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way
