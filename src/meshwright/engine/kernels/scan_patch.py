"""State-space and delta-rule mixers of transformers with our scan; the rest of their code runs unchanged.

A mixer's forward calls its scan by a global name. Without third-party kernels transformers has a reference under that
name, which saves matrices of tokens × chunk × heads. Here a copy of the forward's code runs with other globals, in
which the name is our scan: for the mixers of one model, not for all of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from meshwright.engine.kernels.delta_rule import gated_delta_rule
from meshwright.engine.kernels.state_space import state_space_scan
from meshwright.engine.patching import Patch, apply, base_class, symbol


def use_chunked_scans(model: nn.Module) -> int:
    """Patch every Mamba-2 and gated-delta mixer of a model with our scan; return how many."""
    changed = 0
    for modeling in {base_class(module).__module__ for module in model.modules()} & SCANS.keys():
        symbol(modeling, SCANS[modeling])  # if renamed, the reference would run, which needs many times the memory
    for module in list(model.modules()):
        mixer: Any = type(module)
        patch = None if isinstance(module, ChunkedScan) else _scan_patch(mixer, _heads_per_key(module))
        if patch is not None:
            apply(module, patch)
            changed += 1
    return changed


def _heads_per_key(module: nn.Module) -> int:
    """Return how many value heads of a delta mixer share a key head, which its code repeats for each."""
    keys = getattr(module, "num_k_heads", None)
    return int(getattr(module, "num_v_heads", keys)) // keys if isinstance(keys, int) else 1


class ChunkedScan(Patch):
    """A mixer whose scan runs chunk by chunk; the forward of each class of mixer is made by `_scan_patch`."""

    tag = "ChunkedScan"


@cache
def _scan_patch(mixer: Any, copies: int) -> type[Patch] | None:
    """Return a patch with the mixer's own forward, which finds our scan under the name it calls; None without one."""
    forward: Any = inspect.unwrap(mixer.forward)
    called = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    found = {
        name: forward.__globals__[name]
        for name in called & REPLACEMENTS.keys() & getattr(forward, "__globals__", {}).keys()
    }
    if not found:
        return None
    names = {
        **forward.__globals__,
        **{name: partial(REPLACEMENTS[name], reference, copies) for name, reference in found.items()},
    }
    names.pop("__name__")  # torch.compile would look names up in the module of this name
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    copied.__qualname__ = f"ChunkedScan({forward.__qualname__})"  # in a traceback: transformers' line, our scan
    return type("ChunkedScan", (ChunkedScan,), {"forward": copied})


def _mamba2(
    reference: Callable[..., Any],
    _: int,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    **options: Any,
) -> Any:
    if options.get("initial_states") is not None or options.get("return_final_states"):  # generation with a cache
        return reference(x, dt, a, b, c, chunk_size, **options)
    settings = (options.get("D"), options.get("dt_bias"), options.get("dt_softplus", False))
    return state_space_scan(x, dt, a, b, c, *settings, options.get("dt_limit", (0.0, float("inf"))))


def _delta(
    reference: Callable[..., Any],
    copies: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: Any,
) -> Any:
    if options.get("initial_state") is not None or options.get("output_final_state"):  # generation with a cache
        return reference(query, key, value, g=g, beta=beta, **options)
    query, key = query[:, :, ::copies], key[:, :, ::copies]  # undo the repetition: our scan shares keys between heads
    return gated_delta_rule(query, key, value, g, beta, options.get("use_qk_l2norm_in_kernel", False)), None


_MODELING = "transformers.models.{0}.modeling_{0}".format
# The scan that the mixers of a model type call.
SCANS = {
    _MODELING("nemotron_h"): "mamba2_chunk_scan",
    **dict.fromkeys(map(_MODELING, ("qwen3_next", "qwen3_5", "qwen3_5_moe")), "torch_chunk_gated_delta_rule"),
}
# By the name under which mixers call them.
REPLACEMENTS: dict[str, Callable[..., Any]] = {"mamba2_chunk_scan": _mamba2, "torch_chunk_gated_delta_rule": _delta}
