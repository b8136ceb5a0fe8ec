"""The block tables that all layers of a micro batch share: one set per window, built outside compiled layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.engine.attention.flex import BlockTables, block_tables
from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.engine.kernels.device_caps import is_dry, on_gpu

SINKS = "sinks"
SOFTCAP = "attn_logit_softcapping"


def flex_windows(modules: Iterable[nn.Module], masked: bool) -> frozenset[int]:
    """Return the windows (0: none) for which attention modules need block tables; none if torch's SDPA is enough.

    `masked`: samples have documents or images, so every attention is masked.
    """
    found = [(module, _windows(module)) for module in modules if getattr(module, "kernel", "auto") != "eager"]
    needed = masked or any(max(windows) or _scores_differ(module) for module, windows in found)
    return frozenset(window for _, windows in found for window in windows) if needed else frozenset()


def _windows(module: Any) -> set[int]:
    """Return the windows that a module may pass to attention: its own, or its config's."""
    own = getattr(module, "sliding_window", None) if hasattr(module, "sliding_window") else _config_window(module)
    # Some families keep the window on modules that do not use it.
    return {own or 0, 0} if hasattr(module, "is_sliding") else {own or 0}


def _config_window(module: Any) -> int | None:
    return getattr(module.config, "sliding_window", None)


def _scores_differ(module: Any) -> bool:
    return getattr(module, SINKS, None) is not None or getattr(module, SOFTCAP, None) is not None


def shared_tables(
    windows: Iterable[int], seq_length: int, device: torch.device, documents: Tensor | None, groups: Tensor | None
) -> dict[int, BlockTables]:
    """Return the block tables of causal masks by window (0: none or at least as long as the sequence)."""
    specs = {AttentionSpec(1.0, True, window or None).for_length(seq_length) for window in windows}
    return {spec.window or 0: block_tables(seq_length, spec, documents, device, groups) for spec in specs}


def uses_tables(hidden: Tensor) -> bool:
    """Return whether attention of these hidden states runs flex attention: on a GPU, not in a dry run."""
    return on_gpu(hidden) and not is_dry(hidden)
