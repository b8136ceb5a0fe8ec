"""How long a collective takes over NVLink or over the network."""

from __future__ import annotations

import numpy as np

from meshwright.costs.speeds import Speeds
from meshwright.costs.vectorize import Column, larger, smaller, where
from meshwright.recipes.case import Case


def _members(case: Case, stride: Column, size: Column) -> Column:
    """Ranks of a group that share one fast domain; ranks of the group stand `stride` apart."""
    return larger(smaller(case.nvlink_domain // larger(stride, 1), size), 1)


def group_rate(case: Case, speed: Speeds, stride: Column, size: Column) -> Column:
    """Bytes per second and GPU of a ring over `size` ranks that stand `stride` apart.

    Inside one fast domain it is NVLink. Beyond, every domain has domain / stride members of the ring, which share the
    traffic between domains over that many network ports.
    """
    across = smaller(_members(case, stride, size) * speed.network, speed.link)
    return where(stride * size <= case.nvlink_domain, speed.link, across)


def start_s(case: Case, speed: Speeds, stride: Column, size: Column) -> Column:
    """Seconds before a ring delivers its first byte everywhere: it grows with the ranks and domains it passes."""
    near = _members(case, stride, size)
    far = np.ceil(size / near) if isinstance(size, np.ndarray) or isinstance(near, np.ndarray) else -(-size // near)
    shared = speed.shared
    return shared.latency_s + shared.hop_s * (near - 1) + shared.far_hop_s * (far - 1)


def gather_s(
    case: Case, speed: Speeds, whole_bytes: Column, stride: Column, size: Column, messages: Column = 1
) -> Column:
    """An all-gather (or reduce-scatter) that ends with (or starts from) `whole_bytes` on every rank."""
    if isinstance(size, int) and size == 1:
        return 0.0
    moved = whole_bytes * (size - 1) / size
    one = moved / group_rate(case, speed, stride, size) + messages * start_s(case, speed, stride, size)
    return (size > 1) * one


def all_to_all_s(case: Case, speed: Speeds, sent_bytes: Column, stride: Column, size: Column) -> Column:
    """An all-to-all in which every rank sends `sent_bytes`, the part for other domains over its own network port."""
    near = _members(case, stride, size)
    inside = sent_bytes * (near - 1) / size / speed.link
    outside = sent_bytes * (size - near) / size / speed.network
    reached = speed.chip.all_to_all
    return (size > 1) * (larger(inside, outside) / reached + start_s(case, speed, stride, near))


def neighbour_s(case: Case, speed: Speeds, sent_bytes: Column, stride: Column, size: Column) -> Column:
    """A send to the next rank; the slowest hop of the ring counts."""
    rate = where(stride * size <= case.nvlink_domain, speed.link, speed.network)
    return sent_bytes / rate + speed.shared.latency_s
