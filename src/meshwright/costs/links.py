"""Seconds of collectives over NVLink, PCIe or the network."""

from __future__ import annotations

import numpy as np

from meshwright.costs.speeds import Speeds
from meshwright.costs.vectorize import Column, larger, smaller, where
from meshwright.recipes.case import Case


def _members(case: Case, stride: Column, size: Column) -> Column:
    """Return the ranks of a group that share one NVLink domain; ranks of the group are `stride` apart."""
    return larger(smaller(case.nvlink_domain // larger(stride, 1), size), 1)


def _beyond(case: Case, speed: Speeds, stride: Column, size: Column) -> Column:
    """Return bytes per second and GPU between NVLink domains: over PCIe inside a node, else over the network."""
    return where(stride * size <= case.gpus_per_node, speed.pcie, speed.network)


def group_rate(case: Case, speed: Speeds, stride: Column, size: Column) -> Column:
    """Return bytes per second and GPU of a ring over `size` ranks that are `stride` apart.

    Inside one NVLink domain it is NVLink. Beyond, every domain has domain / stride members of the ring, which share the
    traffic between domains over that many PCIe links or network ports.
    """
    across = smaller(_members(case, stride, size) * _beyond(case, speed, stride, size), speed.link)
    return where(stride * size <= case.nvlink_domain, speed.link, across)


def start_s(case: Case, speed: Speeds, stride: Column, size: Column) -> Column:
    """Return the latency of a ring, which grows with the ranks and domains it passes."""
    near = _members(case, stride, size)
    far = np.ceil(size / near) if isinstance(size, np.ndarray) or isinstance(near, np.ndarray) else -(-size // near)
    shared = speed.shared
    return shared.latency_s + shared.hop_s * (near - 1) + shared.far_hop_s * (far - 1)


def gather_s(
    case: Case, speed: Speeds, full_bytes: Column, stride: Column, size: Column, messages: Column = 1
) -> Column:
    """Return seconds of an all-gather (or reduce-scatter) with `full_bytes` on every rank at its end (start)."""
    if isinstance(size, int) and size == 1:
        return 0.0
    moved = full_bytes * (size - 1) / size
    one = moved / group_rate(case, speed, stride, size) + messages * start_s(case, speed, stride, size)
    return (size > 1) * one


def all_to_all_s(case: Case, speed: Speeds, sent_bytes: Column, stride: Column, size: Column) -> Column:
    """Return seconds of an all-to-all of `sent_bytes` per rank; other domains are reached over its own port."""
    near = _members(case, stride, size)
    inside = sent_bytes * (near - 1) / size / speed.link
    outside = sent_bytes * (size - near) / size / _beyond(case, speed, stride, size)
    return (size > 1) * (larger(inside / speed.chip.all_to_all, outside) + start_s(case, speed, stride, near))


def forwarding_all_to_all_s(
    case: Case, speed: Speeds, to_ranks: Column, to_domains: Column, stride: Column, size: Column
) -> Column:
    """Return seconds of an all-to-all that sends one copy to each domain, where NVLink forwards it to the ranks.

    `to_ranks` are the bytes of one rank with a copy for every rank that needs it, all of which NVLink carries at the
    receivers; `to_domains` those with a copy for every domain, which the network carries.
    """
    near = _members(case, stride, size)
    inside = to_ranks * (size - 1) / size / speed.link
    outside = to_domains * (size - near) / size / _beyond(case, speed, stride, size)
    return (size > 1) * (larger(inside / speed.chip.all_to_all, outside) + start_s(case, speed, stride, near))


def neighbor_s(case: Case, speed: Speeds, sent_bytes: Column, stride: Column, size: Column) -> Column:
    """Return seconds of a send to the next rank; the slowest hop of the ring counts."""
    rate = where(stride * size <= case.nvlink_domain, speed.link, _beyond(case, speed, stride, size))
    return sent_bytes / rate + speed.shared.latency_s
