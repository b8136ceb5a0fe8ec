"""Both ends of a connection that NCCL reports as failed: the node that reports it, and its peer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.doctor.run import Fault, RankHosts

REPORTER = re.compile(r"(?:^|\s)([A-Za-z][\w.-]*):\d+:\d+ \[(\d+)\] ")
PEER = re.compile(r"\b(?:peer|from|to|with) \[?([\w.:-]*\w)\]?<\d+>")
DEVICE = re.compile(r"\bhca (\w+)|NET/IB ?: (\w+):\d+ Got async")
MOST_NAMED = 4


class NetworkEnd(NamedTuple):
    """One report of NCCL: its host, the GPU there, the adapter and the peer; empty where the line has none."""

    host: str
    gpu: str
    device: str
    peer: str

    @property
    def reporter(self) -> str:
        """The host with its GPU and adapter."""
        parts = [f"GPU {self.gpu}" if self.gpu else "", self.device]
        more = ", ".join(part for part in parts if part)
        return self.host + (f" ({more})" if more else "")


def ends_of(found: Sequence[Fault], hosts: RankHosts) -> tuple[NetworkEnd, ...]:
    """Return what the network faults of a run report, without duplicates; peers by host, if the log has its address."""
    ends = []
    for fault in found:
        reporter = REPORTER.search(fault.shown)
        if fault.name != "network" or reporter is None:
            continue
        peer, device = PEER.search(fault.text), DEVICE.search(fault.text)
        address = peer[1] if peer else ""
        name = hosts.addresses.get(address, "")
        ends.append(
            NetworkEnd(
                reporter[1],
                reporter[2],
                (device[1] or device[2]) if device else "",
                f"{name} ({address})" if name else address,
            )
        )
    return tuple(dict.fromkeys(ends))


def suspects(ends: Sequence[NetworkEnd]) -> tuple[str, ...]:
    """Return the nodes to look at: the one end that all reports have in common, else both ends."""
    reporters, peers = {one.host for one in ends}, {one.peer for one in ends if one.peer}
    if len(peers) == 1 and len(reporters) > 1:
        return tuple(peers)
    if len(reporters) == 1 and len(peers) > 1:
        return tuple(reporters)
    return tuple(dict.fromkeys([*(one.host for one in ends), *(one.peer for one in ends if one.peer)]))[:MOST_NAMED]
