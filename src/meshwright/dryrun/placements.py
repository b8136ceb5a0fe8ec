"""How parameters are sharded over the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from meshwright.dryrun.types import GIB, Placement


def placements(stages: Iterable[Any]) -> tuple[Placement, ...]:
    """Return every parameter of a rank; those of identical layers are one row."""
    rows: dict[tuple[Any, ...], Placement] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            row = _row(re.sub(r"\.\d+\.", ".{}.", name), parameter)
            key = row.name, row.shape, row.held, row.placement
            known = rows.get(key)
            if known is not None:
                row = msgspec.structs.replace(known, count=known.count + 1, gib=known.gib + row.gib)
            rows[key] = row
    return tuple(rows.values())


def _row(name: str, parameter: Any) -> Placement:
    mesh = getattr(parameter, "device_mesh", None)
    local = parameter.to_local() if mesh is not None else parameter
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    placed = zip(names, getattr(parameter, "placements", ()), strict=True)
    by_axis = [f"{axis}: {_describe(one)}" for axis, one in placed]
    return Placement(
        name=name,
        count=1,
        shape=tuple(parameter.shape),
        held=tuple(local.shape),
        format=str(local.dtype).removeprefix("torch."),
        placement=", ".join(by_axis) or "not sharded",
        trained=bool(parameter.requires_grad),
        gib=local.numel() * local.element_size() / GIB,
    )


def _describe(placement: Any) -> str:
    return f"Shard({placement.dim})" if hasattr(placement, "dim") else "Replicate"
