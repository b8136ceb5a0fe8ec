"""What to try against a full GPU if there is no estimate: cheapest first, without what the log already has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from meshwright.doctor import remedies
from meshwright.doctor.finding import Remedy
from meshwright.doctor.logged_settings import logged_values
from meshwright.doctor.run import Run
from meshwright.doctor.their_keys import general_settings
from meshwright.recipes.format_override import format_override

REMEDIES: tuple[tuple[str, Any, str], ...] = (
    ("layout.recompute", "selective", "recomputes some activations"),
    ("layout.micro_batch_size", 1, "fewer samples in flight; keep the global batch size as it was"),
    ("kernels.loss", "fused_linear", "never materializes all logits"),
    ("layout.recompute", "full", "keeps only the input of every layer"),
    ("layout.reshard_after_forward", True, "frees gathered weights after the forward pass"),
    ("layout.sp", True, "also shards norms and residuals over the tp ranks"),
    ("layout.offload", "optimizer", "keeps optimizer state in host memory"),
)
ORDERS: Mapping[str, tuple[Any, ...]] = {
    "layout.recompute": ("none", "selective", "full"),
    "kernels.loss": ("plain", "vocab_parallel", "chunked", "fused_linear"),
}
"""Values of a field, each of which saves what those before it save; other fields have the value or have it not."""
OF_FRONT_ENDS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "unsloth": (
        ("peft.method", "qlora", "stores the frozen weights in 4 bits, if they are not yet"),
        ("data.seq_length", "<half of now>", "shorter samples: their activations are proportional to it"),
    )
}
"""Front ends that mostly train adapters -> what their users change besides; a value in words follows that of now."""
IF_STATED = ("layout.reshard_after_forward", "layout.sp")  # only if the log has them off
DOUBLED = (
    ("layout.tp", "shards every matrix further"),
    ("layout.cp", "shards every sequence further"),
    ("layout.pp", "spreads layers over more stages"),
)
"""Degrees that shard further, if the log states them."""
FEW = 2  # remedies, below which the degrees are offered too


def general_remedies(run: Run) -> Iterator[Remedy]:
    """Yield what the log does not have in place, as settings of the framework that ran if it has them.

    Where little is left, further sharding is offered, and where nothing is: more GPUs.
    """
    stated, found = logged_values(run), list[Remedy]()
    for field, value, why in REMEDIES:
        if not _is_in_place(stated, field, value):
            found += _as_settings(run, field, value, why)
    for field, value, why in OF_FRONT_ENDS.get(run.header.front_end, ()):
        found += _as_settings(run, field, value, why)
    if len(found) < FEW and run.kind != "transformers":
        ranks = prod(int(stated.get(field, 1)) for field, _ in DOUBLED)
        for field, why in DOUBLED if run.header.world and run.header.world % (2 * ranks) == 0 else ():
            if field in stated:
                found += _as_settings(run, field, 2 * int(stated[field]), why)
    yield from found
    if not found:
        yield remedies.advice(
            "more GPUs, over which the state is sharded (ZeRO-3, FSDP, the distributed optimizer), or shorter samples",
            why="the log has recompute, the smallest micro batch and all else that saves memory without them",
        )


def _is_in_place(stated: Mapping[str, Any], field: str, value: Any) -> bool:
    """Return whether a log states a value, or one that saves more."""
    if field not in stated:
        return field in IF_STATED
    order, now = ORDERS.get(field, ()), stated[field]
    if field == "layout.sp" and stated.get("layout.tp", 1) == 1:
        return True
    if field == "layout.offload":
        return bool(now != "none")
    return order.index(now) >= order.index(value) if now in order else bool(now == value)


def _as_settings(run: Run, field: str, value: Any, why: str) -> Iterator[Remedy]:
    """Yield a remedy with its settings in the framework that ran; none if that has no such setting."""
    in_words = isinstance(value, str) and value.startswith("<")
    text = f"{field}={value}" if in_words else format_override(field, value)
    there = general_settings(run, text)
    if there is not None:
        yield Remedy(try_=(text,), what=remedies.change_kind((field,)), why=why, there=there)
