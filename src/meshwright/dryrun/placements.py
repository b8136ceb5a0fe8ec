"""How parameters lie on the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from meshwright.dryrun.types import Placement

GIB = 2**30


def placements(stages: Iterable[Any]) -> tuple[Placement, ...]:
    """Every parameter of a rank, those of like layers in one row."""
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
    said = [f"{axis}: {_words(one)}" for axis, one in zip(names, getattr(parameter, "placements", ()), strict=True)]
    return Placement(
        name=name,
        count=1,
        shape=tuple(parameter.shape),
        held=tuple(local.shape),
        format=str(local.dtype).removeprefix("torch."),
        placement=", ".join(said) or "whole on every rank",
        trained=bool(parameter.requires_grad),
        gib=local.numel() * local.element_size() / GIB,
    )


def _words(placement: Any) -> str:
    return f"cut along {placement.dim}" if hasattr(placement, "dim") else "copied"
