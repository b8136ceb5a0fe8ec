"""What a cluster argument leaves open: which variant of a GPU, which nodes, which links."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.clusters.catalogue import normalize_name
from meshwright.clusters.types import Assumption, Cluster

MEMORY_VARIANTS = {
    "A100": "the SXM4 card with 80 GB; write A100-40 for 40 GB, A100-PCIe-40 or A100-PCIe-80 for a PCIe card",
    "A100-SXM": "the card with 80 GB; write A100-40 for 40 GB",
    "A100-SXM4": "the card with 80 GB; write A100-40 for 40 GB",
    "A100-PCIe": "the card with 80 GB; write A100-PCIe-40 for 40 GB",
    "V100": "the SXM2 card with 16 GB; write V100-32 for 32 GB",
    "V100-SXM2": "the card with 16 GB; write V100-32 for 32 GB",
    "GH200": "the version with 96 GB; write GH200-144 for 144 GB",
    "Grace-Hopper": "GH200 with 96 GB; write GH200-144 for 144 GB",
    "RTX6000": "RTX 6000 Ada with 48 GB; write RTX-PRO-6000 for the Blackwell card, A6000 for the Ampere card",
    "3080": "the card with 10 GB",
    "RTX3080": "the card with 10 GB",
    "4060-Ti": "the card with 16 GB",
    "RTX-4060-Ti": "the card with 16 GB",
}
"""Names that several cards share, which differ in memory."""
CARDS = {
    "H100": "the SXM5 card with 80 GB; write H100-PCIe, H100-NVL (94 GB) or H100-96 for another",
    "H200": "the SXM5 card; write H200-NVL for the PCIe card",
}
"""Boards that come as full nodes; fewer GPUs may also be PCIe cards under the same name."""
_MEMORY_VARIANTS = {normalize_name(name): f"{name} means {text}" for name, text in MEMORY_VARIANTS.items()}
_CARDS = {normalize_name(name): f"{name} means {text}" for name, text in CARDS.items()}


def variant_assumed(name: str, found: Cluster) -> Iterator[Assumption]:
    """Yield the variant that was taken if several GPUs have this name."""
    text = _MEMORY_VARIANTS.get(normalize_name(name))
    if text is None and found.world % found.gpu.gpus_per_node:
        text = _CARDS.get(normalize_name(name))
    if text is not None:
        yield Assumption("variant", found.gpu.name, text)


def nodes_assumed(found: Cluster) -> Iterator[Assumption]:
    """Yield the nodes that were taken for a count of GPUs that needs several."""
    count, usual, name = found.world, found.gpu.gpus_per_node, found.gpu.name
    board = found.gpu.nvlink_board
    if found.nodes == 1 or (usual == 1 and not board):
        return
    shape = f"{found.nodes} nodes of {found.gpus_per_node}"
    if usual == 1:
        other = f"{-(-count // board)}x{board}x{name} for boards of {board} that NVLink connects"
        text = f"{shape} GPU, the usual {name} node; write {other}"
    elif found.gpus_per_node == usual:
        text = f"{shape} GPUs, the usual {name} node; write NODESxGPUSx{name} for other nodes"
    else:
        full = [n for n in (count // usual * usual, -(-count // usual) * usual) if n]
        text = (
            f"{count} GPUs do not fill nodes of {usual}, the usual {name} node: taken as {shape}; "
            f"write NODESxGPUSx{name} for other nodes; full nodes: {' or '.join(f'{n}x{name}' for n in full)}"
        )
    yield Assumption("nodes", f"{found.nodes}x{found.gpus_per_node}", text)


def network_assumed(found: Cluster) -> Iterator[Assumption]:
    """Yield the network of each GPU where several nodes need one: that of the cluster file, or the usual one."""
    if found.nodes == 1 or found.world <= found.nvlink_domain:
        return
    each, known = found.gpus_per_node, found.gpu
    value = f"{8 * known.network_gb_s:g} Gb/s per GPU"
    node = f" ({8 * known.network_gb_s * each:,g} Gb/s per node)" if each > 1 else ""
    if found.own_network:
        unit = f"; {found.network_unit}" if found.network_unit else ""
        yield Assumption("network", value, f"a network of {value}{node}, from {found.file}{unit}")
        return
    other = 'network_gb_s_per_node = "200 Gb/s", or network_gb_s for one GPU'
    text = f"a network of {value}{node}, as usual with {known.name}; for another set {other}, in a cluster file"
    yield Assumption("network", value, text)


def host_assumed(found: Cluster) -> Iterator[Assumption]:
    """Yield the host memory of each GPU, for plans that use it, and how to write another."""
    if not found.own_host:
        value = f"{found.gpu.host_gib:g} GiB per GPU"
        text = f"{found.gpu.host_gib:g} GiB of host memory per GPU, as usual with {found.gpu.name}"
        where = f"in {found.file}" if found.file else "in a cluster file"
        yield Assumption("host_memory", value, f"{text}; for another set host_gib {where}")


def links_assumed(found: Cluster) -> Iterator[Assumption]:
    """Yield which GPUs fast links are taken to connect, where systems with the same GPU differ."""
    text, known = _links(found), found.gpu
    if text:
        keys = "nvlink_domain, nvlink_gb_s and link" if known.link == "pcie" else "nvlink_domain (1 for none)"
        hint = f"for other links set {keys} in a cluster file"
        if _are_bridged(found):
            hint = "for cards without bridges set nvlink_domain = 1 in a cluster file"
        rates = f"({known.nvlink_gb_s:g} GB/s per GPU)"
        if found.nvlink_domain < found.gpus_per_node:
            rates += f", PCIe the others ({known.pcie_gb_s:g} GB/s)"
        yield Assumption("links", str(found.nvlink_domain), f"{text} {rates}; {hint}")


def _links(found: Cluster) -> str:
    """Return what connects which GPUs in one clause; empty for one GPU, and for whole nodes of the usual kind."""
    domain, each, known = found.nvlink_domain, found.gpus_per_node, found.gpu
    if known.link == "pcie":
        return f"no NVLink: PCIe connects the {each} GPUs of a node" if each > 1 else ""
    if domain > each:
        return (
            f"NVLink connects {f'all {domain} GPUs: one rack' if domain == found.world else f'{domain} GPUs: a rack'}"
        )
    link = "NVLink" if known.link == "nvlink" else "Infinity Fabric"
    some = f"the {each}" if domain == each else f"{domain} of the {each}"
    if each > known.gpus_per_node and known.nvlink_board:
        return f"{link} connects {some} GPUs of a node, as on a board of {known.nvlink_board} {known.name}"
    if _are_bridged(found):
        return f"{link} bridges connect {some} GPUs of a node"
    return f"{link} connects {some} GPUs of a node" if domain < each else ""


def _are_bridged(found: Cluster) -> bool:
    """Return whether all GPUs of a node are cards that bridges join, which are bought separately."""
    known, each = found.gpu, found.gpus_per_node
    return known.link == "nvlink" and 1 < each == found.nvlink_domain <= known.nvlink_domain < known.gpus_per_node
