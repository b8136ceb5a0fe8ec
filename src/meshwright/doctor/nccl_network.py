"""The network between nodes that NCCL reports in a log (NCCL_DEBUG=INFO)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.doctor import remedies
from meshwright.doctor.finding import Remedy
from meshwright.doctor.formats.text import Line, has_any
from meshwright.doctor.run import NcclNetwork

SOCKET = "Socket"
HINTS = ("etwork", "NET/", "NET plugin", "nNodes", "set by environment", "via NET")
CHOSEN = re.compile(r"\b(?:Using network |Assigned NET plugin |via NET/)([\w.-]+)")
"""NCCL chose a network, or a channel uses it."""
FOUND = re.compile(r"\bNET/([\w.-]+) ?: (?:Using \S|Selected provider)|\bNET/(OFI) Selected [Pp]rovider")
"""A network has devices; NCCL may still prefer another one."""
INTERFACE = re.compile(r"\bNET/Socket ?: Using (?:\[\d+\])?([\w.-]+)")
NO_DEVICE = re.compile(r"\bNET/IB ?: No device found")
NODES = re.compile(r"\bnNodes (\d+)")
HOST = re.compile(r"(?:^|\s)([\w.-]+):\d+:\d+ \[\d+\] NCCL ")
FORCED = re.compile(
    r"\b(?:(NCCL_IB_DISABLE) set by environment to ([1-9]\d*)|(NCCL_NET) set by environment to (Socket))"
)
MAX_TEXT = 200


def find_network(lines: Sequence[Line], file: str) -> NcclNetwork | None:
    """Return the last network that NCCL reports; None if the log has no such line."""
    chosen: tuple[str, Line] | None = None
    found: tuple[str, Line] | None = None
    hosts: set[str] = set()
    nodes, interface, missing, forced = 0, "", False, ""
    for line in lines:
        text = line.text
        if "NCCL" not in text or not has_any(text, HINTS):
            continue
        if host := HOST.search(text):
            hosts.add(host[1])
        if count := NODES.search(text):
            nodes = max(nodes, int(count[1]))
        if one := INTERFACE.search(text):
            interface = one[1]
        if one := FORCED.search(text):
            forced = f"{one[1] or one[3]}={one[2] or one[4]}"
        missing = missing or NO_DEVICE.search(text) is not None
        if one := CHOSEN.search(text):
            chosen = one[1], line
        elif one := FOUND.search(text):
            found = one[1] or one[2], line
    last = chosen or found
    if last is None:
        return None
    name, at = last
    return NcclNetwork(
        name=name, file=file, line=at.number, text=at.text.strip()[:MAX_TEXT], nodes=max(nodes, len(hosts)),
        interface=interface if name == SOCKET else "", no_device=missing, forced_by=forced,
    )  # fmt: skip


def names_sockets(text: str) -> bool:
    """Return whether a text is a line in which NCCL reports that it uses TCP sockets."""
    return NO_DEVICE.search(text) is not None or any(
        one[1] == SOCKET for pattern in (CHOSEN, FOUND) if (one := pattern.search(text))
    )


def joined(networks: Sequence[NcclNetwork]) -> NcclNetwork | None:
    """Return what several logs of a run show together: sockets only if all of them show sockets."""
    others = [one for one in networks if one.name != SOCKET]
    return others[-1] if others else max(networks, key=lambda one: one.nodes, default=None)


def socket_remedies(forced_by: str = "") -> tuple[Remedy, ...]:
    """Return how to make NCCL use InfiniBand or RoCE."""
    name = forced_by.partition("=")[0]
    unset = remedies.advice(f"unset {name}", what="environment", why=f"{forced_by} forces sockets")
    usual = remedies.advice(
        "unset NCCL_IB_DISABLE NCCL_NET", what="environment", why="NCCL_IB_DISABLE=1 or NCCL_NET=Socket forces sockets"
    )
    return (
        unset if name else usual,
        remedies.advice(
            "ibv_devinfo on every node, inside the container",
            why="without a device: start the container with --device=/dev/infiniband --ulimit memlock=-1, or request "
            "the RDMA resource in Kubernetes",
        ),
        remedies.advice(
            "NCCL_IB_HCA=mlx5", what="environment", why="names the adapters; a wrong name hides all of them"
        ),
        remedies.advice(
            "NCCL_IB_GID_INDEX=3", what="environment", why="RoCE: an index of a RoCEv2 GID on every node (show_gids)"
        ),
        remedies.advice("install the network plugin of the cloud", why="AWS EFA needs aws-ofi-nccl"),
        remedies.advice("run nccl-tests all_reduce_perf over the same nodes", why="measures the links in isolation"),
    )
