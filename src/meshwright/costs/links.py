"""How long a collective takes over NVLink or over the network."""

from __future__ import annotations

import numpy as np

from meshwright.costs.columns import Column
from meshwright.costs.constants import ALL_TO_ALL_EFFICIENCY, COLLECTIVE_LATENCY_S, LINK_EFFICIENCY
from meshwright.recipes.case import Case


def group_rate(case: Case, stride: Column, size: Column) -> Column:
    """Bytes per second and GPU of a ring over `size` ranks that stand `stride` apart.

    Inside one fast domain it is NVLink. Beyond, every domain has domain / stride members of the ring, which share the
    traffic between domains over that many network ports.
    """
    gpu, domain = case.cluster.gpu, case.nvlink_domain
    members = np.clip(domain // np.maximum(stride, 1), 1, size)
    across = np.minimum(members * gpu.network_gb_s, gpu.nvlink_gb_s)
    return np.where(stride * size <= domain, gpu.nvlink_gb_s, across) * 1e9 * LINK_EFFICIENCY


def gather_s(case: Case, whole_bytes: Column, stride: Column, size: Column) -> Column:
    """An all-gather (or reduce-scatter) that ends with (or starts from) `whole_bytes` on every rank."""
    moved = whole_bytes * (size - 1) / size
    return (size > 1) * (moved / group_rate(case, stride, size) + COLLECTIVE_LATENCY_S)


def all_to_all_s(case: Case, sent_bytes: Column, stride: Column, size: Column) -> Column:
    """An all-to-all in which every rank sends `sent_bytes`, the part for other domains over its own network port."""
    gpu, domain = case.cluster.gpu, case.nvlink_domain
    near = np.clip(domain // np.maximum(stride, 1), 1, size)
    inside = sent_bytes * (near - 1) / size / (gpu.nvlink_gb_s * 1e9)
    outside = sent_bytes * (size - near) / size / (gpu.network_gb_s * 1e9)
    return (size > 1) * (np.maximum(inside, outside) / ALL_TO_ALL_EFFICIENCY + COLLECTIVE_LATENCY_S)


def neighbour_s(case: Case, sent_bytes: Column, stride: Column, size: Column) -> Column:
    """A send to the next rank; the slowest hop of the ring counts."""
    gpu = case.cluster.gpu
    rate = np.where(stride * size <= case.nvlink_domain, gpu.nvlink_gb_s, gpu.network_gb_s)
    return sent_bytes / (rate * 1e9 * LINK_EFFICIENCY) + COLLECTIVE_LATENCY_S
