"""One-line summaries of responses, the same on every surface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.recipes.model_changes import label as model_label

__all__ = ["layout_summary", "model_label"]

DEGREES = ("tp", "pp", "vp", "cp", "ep", "etp")


NAMES = {
    ("fsdp1", "fsdp2", True): "fsdp1's full shard",
    ("fsdp1", "fsdp2", False): "fsdp1's full shard",
    ("deepspeed", "zero1", True): "ZeRO-1",
    ("deepspeed", "zero1", False): "ZeRO-1",
    ("deepspeed", "fsdp2", False): "ZeRO-2",
    ("deepspeed", "fsdp2", True): "ZeRO-3",
}
"""What an engine calls layout.strategy, with reshard_after_forward, where it has another name."""


def layout_summary(layout: Mapping[str, Any], engine: str | None = None, *, with_value: bool = False) -> str:
    """Return a layout on one line, in the engine's name of the strategy; degrees of 1 are left out.

    `with_value` adds the value of layout.strategy, where the engine's name is another one.
    """
    strategy = str(layout["strategy"])
    if name := NAMES.get((engine or "", strategy, layout.get("reshard_after_forward", True))):
        strategy = f"{strategy} ({name})" if with_value else name.partition("'")[0]
    sharded, copies = layout.get("dp_shard", -1), layout.get("dp_replicate", 1)
    data_parallel = [f"dp {sharded}" + (f" × {copies} copies" if copies > 1 else "")] if sharded > 0 else []
    steps = layout.get("gradient_accumulation")
    each = layout.get("pp_micro_batches") or steps
    passes = f", {each} per pass" if steps and each < steps and layout["pp"] > 1 else ""
    return " · ".join(
        [
            strategy,
            *(f"{name} {layout[name]}" for name in DEGREES if layout.get(name, 1) > 1),
            *([layout["pp_schedule"]] if layout["pp"] > 1 else []),
            *data_parallel,
            f"micro batch {layout['micro_batch_size']}" + (f" × {steps} accumulated{passes}" if steps else ""),
            f"recompute {layout['recompute']}",
            *([f"offload {layout['offload']}"] if layout["offload"] != "none" else []),
        ]
    )
