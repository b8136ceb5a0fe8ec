"""Builds the process groups and device meshes of a layout.

Ranks are ordered with tensor parallelism innermost (it communicates most), then context, sharded data and replicated
data parallelism, and the pipeline outermost (it communicates least). Expert parallelism divides the ranks of a
pipeline stage differently: the dense mesh and the expert mesh cover the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.engine.shared_gpu import sends_through_host
from meshwright.errors import InputError
from meshwright.recipes.types import Layout


@dataclass(frozen=True)
class GroupInfo:
    """A process group and this rank's position in it."""

    size: int
    rank: int
    group: Any = None  # a process group; None for a group of one rank
    ranks: tuple[int, ...] = (0,)  # global ranks, in order
    through_host: bool = False  # whether collectives of GPU tensors copy them through host memory (gloo)


SOLO = GroupInfo(1, 0)


@dataclass(frozen=True)
class Mesh:
    """All groups of a layout, seen from one rank."""

    device_type: str
    world: GroupInfo
    pp: GroupInfo
    dp: GroupInfo  # replicas and shards: ranks with different samples
    cp: GroupInfo
    tp: GroupInfo
    stage: GroupInfo  # all ranks of this rank's pipeline stage
    sequence: GroupInfo  # cp × tp: ranks with parts of the same samples
    experts: GroupInfo  # ep × etp, ep major
    ends: GroupInfo  # this rank's peers on the first and last stage; SOLO for middle stages
    state: DeviceMesh  # pp, dp_replicate, fsdp, tp: of dense parameters
    expert_state: DeviceMesh  # pp, dp_replicate, efsdp, ep, etp: of experts
    cp_groups: tuple[tuple[int, ...], ...]  # the global ranks of every context-parallel group

    @property
    def fsdp(self) -> DeviceMesh:
        """The FSDP mesh of dense parameters, with the replicate axis first if there are replicas."""
        return self.state["dp_replicate", "fsdp"] if self.state["dp_replicate"].size() > 1 else self.state["fsdp"]

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """The FSDP mesh of experts, with the replicate axis first if there are replicas."""
        mesh = self.expert_state
        return mesh["dp_replicate", "efsdp"] if mesh["dp_replicate"].size() > 1 else mesh["efsdp"]

    @property
    def etp(self) -> GroupInfo:
        """The ranks with slices of the same experts."""
        mesh = self.expert_state["etp"]
        group = mesh.get_group() if mesh.size() > 1 else None
        through_host = sends_through_host(self.device_type, group)
        return GroupInfo(mesh.size(), mesh.get_local_rank(), group, through_host=through_host)


def sizes(layout: Layout, world: int) -> dict[str, int]:
    """Return the size of every axis, with data parallelism inferred; raise InputError if an axis does not divide."""
    model = layout.tp * layout.pp * layout.cp
    if world % model:
        raise InputError(
            f"{world} processes are not a multiple of tp × pp × cp = {layout.tp} × {layout.pp} × {layout.cp} = {model}",
            field="world size",
            value=world,
            fix=(f"start a multiple of {model} processes", "or change layout.tp, layout.pp or layout.cp"),
        )
    dp, replicate = world // model, layout.dp_replicate
    shard = dp // replicate if layout.dp_shard == -1 else layout.dp_shard
    if shard * replicate != dp:
        raise InputError(
            f"dp_replicate × dp_shard = {replicate} × {shard} does not equal the {dp} remaining data-parallel ranks",
            field="layout.dp_shard",
            value=layout.dp_shard,
            fix=("layout.dp_shard=-1", f"layout.dp_replicate={1}"),
        )
    stage, expert = shard * layout.cp * layout.tp, layout.ep * layout.etp
    if stage % expert:
        raise InputError(
            f"ep × etp = {layout.ep} × {layout.etp} does not divide the {stage} ranks of a pipeline stage and replica",
            field="layout.ep",
            value=layout.ep,
            fix=("layout.ep=1 layout.etp=1",),
        )
    return {
        "pp": layout.pp,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "cp": layout.cp,
        "tp": layout.tp,
        "efsdp": stage // expert,
        "ep": layout.ep,
        "etp": layout.etp,
    }


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Build the mesh of this process group; a collective that every rank calls with the same layout."""
    world, rank = dist.get_world_size(), dist.get_rank()
    n = sizes(layout, world)
    data = n["dp_replicate"] * n["dp_shard"]
    grid = np.arange(world).reshape(n["pp"], data, n["cp"], n["tp"])
    experts = np.arange(world).reshape(-1, n["ep"] * n["etp"])
    first_and_last = [(int(a), int(b)) for a, b in zip(grid[0].ravel(), grid[-1].ravel(), strict=True)]
    through_host = sends_through_host(device_type, dist.group.WORLD)

    def group(rows: np.ndarray[Any, Any]) -> GroupInfo:
        return replace(_group(rank, rows), through_host=through_host)

    return Mesh(
        device_type=device_type,
        world=GroupInfo(world, rank, dist.group.WORLD, tuple(range(world)), through_host),
        pp=group(np.moveaxis(grid, 0, -1).reshape(-1, n["pp"])),
        dp=group(np.moveaxis(grid, 1, -1).reshape(-1, data)),
        cp=group(np.moveaxis(grid, 2, -1).reshape(-1, n["cp"])),
        tp=group(grid.reshape(-1, n["tp"])),
        stage=group(grid.reshape(n["pp"], -1)),
        sequence=group(grid.reshape(-1, n["cp"] * n["tp"])),
        experts=group(experts),
        ends=group(np.array(first_and_last)) if n["pp"] > 1 else SOLO,
        state=init_device_mesh(
            device_type,
            (n["pp"], *_shard_sizes(layout, n["dp_replicate"], n["dp_shard"] * n["cp"]), n["tp"]),
            mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
        ),
        expert_state=init_device_mesh(
            device_type,
            (n["pp"], *_shard_sizes(layout, n["dp_replicate"], n["efsdp"]), n["ep"], n["etp"]),
            mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep", "etp"),
        ),
        cp_groups=tuple(tuple(map(int, row)) for row in np.moveaxis(grid, 2, -1).reshape(-1, n["cp"])),
    )


def _shard_sizes(layout: Layout, replicas: int, shards: int) -> tuple[int, int]:
    """Return the number of replicas and the shards of each; DDP has a replica on every rank."""
    return (replicas * shards, 1) if layout.strategy == "ddp" else (replicas, shards)


def _group(rank: int, rows: np.ndarray[Any, Any]) -> GroupInfo:
    """Return this rank's group among rows of ranks; all ranks create all groups, in the same order."""
    mine = SOLO
    for row in rows:
        members = [int(r) for r in row]
        group = dist.new_group(members) if len(members) > 1 else None
        if rank in members:
            mine = GroupInfo(len(members), members.index(rank), group, tuple(members))
    return mine
