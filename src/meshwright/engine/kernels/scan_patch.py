"""State-space and delta-rule mixers of transformers with another scan; the rest of their code runs unchanged.

A mixer's forward calls its scan by a global name. Without third-party kernels transformers has a reference under that
name, which saves matrices of tokens × chunk × heads. Here a copy of the forward's code runs with other globals, in
which the name is our scan (in torch operations or Triton), or fla's: for the mixers of one model, not for all of
transformers.

With fla and with our Triton kernels the convolution is replaced too, and both take document ids: the mixer isolates
packed documents itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from meshwright.engine.kernels import causal_conv, delta_rule_triton, fla_scan, state_space_triton
from meshwright.engine.kernels.delta_rule import gated_delta_rule
from meshwright.engine.kernels.state_space import state_space_scan
from meshwright.engine.patching import Patch, apply, base_class, symbol
from meshwright.errors import InputError


def use_chunked_scans(model: nn.Module, kernel: str = "torch", required: bool = False) -> int:
    """Patch every Mamba-2 and gated-delta mixer of a model with our scan or, where it fits, fla's; return how many.

    `required` refuses a mixer that does not fit instead of running it with our scan.
    """
    changed = 0
    for modeling in {base_class(module).__module__ for module in model.modules()} & SCANS.keys():
        symbol(modeling, SCANS[modeling])  # if renamed, the reference would run, which needs many times the memory
    for module in list(model.modules()):
        mixer: Any = type(module)
        if isinstance(module, ChunkedScan) or not _scans(mixer):
            continue
        reason = FITS[kernel](module) if kernel in FITS else ""
        if reason and required:
            reason = f"{base_class(module).__name__} cannot run {NAMES[kernel]} kernels: {reason}"
            raise InputError(reason, field=fla_scan.FIELD, value=kernel, fix=(f"{fla_scan.FIELD}=torch",))
        apply(module, _scan_patch(mixer, _heads_per_key(module), "torch" if reason else kernel))
        changed += 1
    return changed


def _heads_per_key(module: nn.Module) -> int:
    """Return how many value heads of a delta mixer share a key head, which its code repeats for each."""
    keys = getattr(module, "num_k_heads", None)
    return int(getattr(module, "num_v_heads", keys)) // keys if isinstance(keys, int) else 1


class ChunkedScan(Patch):
    """A mixer whose scan runs chunk by chunk; the forward of each class of mixer is made by `_scan_patch`."""

    tag = "ChunkedScan"


class PackedScan(ChunkedScan):
    """A mixer whose scan and convolution take the document ids of packed samples (`documents`)."""


class TritonScan(PackedScan):
    """A mixer whose scan and convolution are our Triton kernels."""

    tag = "TritonScan"


class FlaScan(PackedScan):
    """A mixer whose scan and convolution are fla's."""

    tag = "FlaScan"


PATCHES: dict[str, type[ChunkedScan]] = {"torch": ChunkedScan, "triton": TritonScan, "fla": FlaScan}


def _fits_triton(mixer: Any) -> str:
    if mixer.activation not in causal_conv.ACTIVATIONS:
        return f"its activation is {mixer.activation}, and the convolution has silu only"
    return state_space_triton.fits(mixer) or delta_rule_triton.fits(mixer)


NAMES = {"triton": "our Triton", "fla": "fla's"}
# Why a kernel does not run a mixer; empty if it does.
FITS: dict[str, Callable[[nn.Module], str]] = {"triton": _fits_triton, "fla": fla_scan.fits}


def _called(mixer: Any) -> set[str]:
    """Return the global names that a mixer's forward uses."""
    forward: Any = inspect.unwrap(mixer.forward)
    used = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
    return used & getattr(forward, "__globals__", {}).keys()


@cache
def _scans(mixer: Any) -> bool:
    """Return whether a module's forward calls one of the scans."""
    return bool(_called(mixer) & REPLACEMENTS["torch"].keys())


@cache
def _scan_patch(mixer: Any, copies: int, kernel: str) -> type[Patch]:
    """Return a patch with the mixer's own forward, which finds another scan under the name it calls."""
    forward: Any = inspect.unwrap(mixer.forward)
    replacements = REPLACEMENTS[kernel]
    names = {
        **forward.__globals__,
        **{
            name: partial(replacements[name], forward.__globals__[name], copies)
            for name in _called(mixer) & replacements.keys()
        },
    }
    names.pop("__name__")  # torch.compile would look names up in the module of this name
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    base = PATCHES[kernel]
    copied.__qualname__ = f"{base.__name__}({forward.__qualname__})"  # in a traceback: transformers' line, our scan
    return type(base.__name__, (base,), {"forward": copied})


def _mamba2(
    scan: Callable[..., Tensor],
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
    return scan(x, dt, a, b, c, *settings, options.get("dt_limit", (0.0, float("inf"))), **_documents(options))


def _delta(
    rule: Callable[..., Tensor],
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
    query, key = query[:, :, ::copies], key[:, :, ::copies]  # undo the repetition: the scans share keys between heads
    norm = options.get("use_qk_l2norm_in_kernel", False)
    return rule(query, key, value, g, beta, norm, **_documents(options)), None


def _convolution(
    convolution: Callable[..., Tensor],
    reference: Callable[..., Any],
    _: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Any:
    """The causal convolution of x [rows, channels, tokens]."""
    out = convolution(x.transpose(1, 2), weight, bias, activation, **_documents(options))
    return out.transpose(1, 2)


def _documents(options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the document ids that a mixer was called with, if any."""
    return {"documents": options["documents"]} if options.get("documents") is not None else {}


_MODELING = "transformers.models.{0}.modeling_{0}".format
# The scan that the mixers of a model type call.
SCANS = {
    _MODELING("nemotron_h"): "mamba2_chunk_scan",
    **dict.fromkeys(map(_MODELING, ("qwen3_next", "qwen3_5", "qwen3_5_moe")), "torch_chunk_gated_delta_rule"),
}
# By kernel, and by the name under which mixers call them.
REPLACEMENTS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch": {
        "mamba2_chunk_scan": partial(_mamba2, state_space_scan),
        "torch_chunk_gated_delta_rule": partial(_delta, gated_delta_rule),
    },
    "triton": {
        "mamba2_chunk_scan": partial(_mamba2, state_space_triton.state_space_scan),
        "torch_chunk_gated_delta_rule": partial(_delta, delta_rule_triton.gated_delta_rule),
        "causal_conv1d_fn": partial(_convolution, causal_conv.causal_convolution),
    },
    "fla": {
        "mamba2_chunk_scan": partial(_mamba2, fla_scan.state_space_scan),
        "torch_chunk_gated_delta_rule": partial(_delta, fla_scan.gated_delta_rule),
        "causal_conv1d_fn": partial(_convolution, fla_scan.causal_convolution),
    },
}
