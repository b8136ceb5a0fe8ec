"""A GPU type and a cluster of them."""

from __future__ import annotations

from shlex import quote
from typing import Literal

import msgspec

from meshwright.display import Entry, Readable, Row

GpuArch = Literal["volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin", "cdna3", "cdna4"]
AMD_ARCHS: tuple[GpuArch, ...] = ("cdna3", "cdna4")
GpuLink = Literal["nvlink", "xgmi", "pcie"]
PCIE_GB_S: dict[GpuArch, float] = {  # x16 in one direction, of the generation of each architecture's data center cards
    **dict.fromkeys(("volta", "turing"), 15.75),
    **dict.fromkeys(("ampere", "ada"), 31.5),
    **dict.fromkeys(("hopper", "blackwell", "rubin", "cdna3", "cdna4"), 63.0),
}


class Gpu(Entry, msgspec.Struct, frozen=True):
    """One GPU type; peaks are dense (no sparsity), bandwidths are per GPU and unidirectional."""

    name: str
    arch: GpuArch
    capability: float  # CUDA compute capability; 9.4 (gfx942) for MI300X, 9.5 (gfx950) for MI350X
    memory_gib: float  # total, as the driver reports it
    peak_tflops: dict[str, float]  # by precision: fp32, tf32, fp16, bf16, fp8, fp4 (absent = not supported)
    hbm_gb_s: float
    nvlink_gb_s: float  # GPU to GPU inside the domain (the PCIe x16 rate without NVLink)
    nvlink_domain: int  # GPUs connected at nvlink_gb_s (the node without NVLink)
    network_gb_s: float  # per GPU between domains, in typical systems
    gpus_per_node: int
    nvlink_board: int = 0  # GPUs that the links of a node connect if it has more than gpus_per_node; 0: nvlink_domain
    host_gib: float = 128.0  # host memory per GPU, in typical systems
    link: GpuLink = "nvlink"  # what nvlink_gb_s is
    source: str = ""
    note: str = ""  # announced, assumed or disputed values
    aliases: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)  # a dict of peaks has no hash

    @property
    def pcie_gb_s(self) -> float:
        """GPU to GPU over PCIe x16, which connects the GPUs of a node that NVLink does not."""
        return self.nvlink_gb_s if self.link == "pcie" else PCIE_GB_S[self.arch]


class Assumption(msgspec.Struct, frozen=True):
    """Something that a cluster argument leaves open, the value taken for it, and how to choose another."""

    field: str  # gpu, count, variant, nodes, links, network or instance; of a dry run, a recipe field
    value: str
    message: str


class Cluster(Readable, msgspec.Struct, frozen=True):
    """GPUs of one type in equal nodes."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    price: float | None = None  # of one GPU for one hour, if the cluster file has one
    currency: str = ""
    own_links: bool = False  # whether the cluster file gives nvlink_domain
    own_network: bool = False  # whether the cluster file gives the network
    name: str = ""  # of the whole cluster, if its file has one
    file: str = ""  # path of the file that describes it
    nodes_typed: bool = False  # whether the number of nodes was typed before the file
    own_host: bool = False  # whether the cluster file gives host_gib
    racks: int = 0  # if its file counts racks as nodes
    storage_gb_s: float | None = None  # of checkpoints, from all GPUs together, if its file says so
    network_unit: str = ""  # how the network was read and how to write another unit, if its file gives no unit
    unlikely: tuple[Assumption, ...] = ()  # values of its file that no variant of the GPU has

    @property
    def world(self) -> int:
        """Number of GPUs, one rank each."""
        return self.nodes * self.gpus_per_node

    @property
    def nvlink_domain(self) -> int:
        """GPUs of this cluster in one fast-link domain."""
        if self.gpu.nvlink_domain > self.gpu.gpus_per_node:  # racks: the domain spans nodes
            return min(self.gpu.nvlink_domain, self.world)
        return min(self._domain_of_node, self.gpus_per_node)

    @property
    def _domain_of_node(self) -> int:
        """GPUs that the links of one node connect; a node without NVLink is as large as the user says."""
        if self.own_links:
            return self.gpu.nvlink_domain
        node = self.gpus_per_node if self.gpu.link == "pcie" else self.gpu.nvlink_board
        return max(self.gpu.nvlink_domain, node)

    @property
    def argument(self) -> str:
        """What to type for it on the command line: its file, which has its links and host memory, or its counts."""
        if not self.file:
            return str(self)
        return f"{self.racks or self.nodes}x{self.file}" if self.nodes_typed else self.file

    @property
    def nodes_setting(self) -> str:
        """How to get this number of nodes: of its file if it has one, which keeps its links."""
        if not self.file:
            return f"--gpus {self}"
        if self.racks:
            return f"nodes = {self.nodes} and gpus_per_node = {self.gpus_per_node} in {self.file}"
        return f"--gpus {quote(f'{self.nodes}x{self.file}')}"

    def summary(self) -> list[Row]:
        """Return the cluster as it is typed, its links and its price."""
        links = f"{self.gpu.nvlink_gb_s:,.0f} GB/s among {self.nvlink_domain}, {self.gpu.network_gb_s:,.0f} GB/s beyond"
        price = [] if self.price is None else [("Price", f"{self.price:g} {self.currency} per GPU hour")]
        counts = f"{self.nodes:,} × {self.gpus_per_node} {self.gpu.name}, {self.gpu.memory_gib:.1f} GiB each"
        named = f"{self.name}, {self}" if self.name else str(self)
        return [("Cluster", named), ("GPUs", counts), ("Links", links), *price]

    def __str__(self) -> str:
        # `16xH100` means two nodes of 8, so one unusually large node keeps its node count: `1x16xH100`
        if self.nodes == 1 and self.gpus_per_node <= self.gpu.gpus_per_node:
            return f"{self.gpus_per_node}x{self.gpu.name}"
        return f"{self.nodes}x{self.gpus_per_node}x{self.gpu.name}"


LARGEST_NODE = 8  # GPUs that NVLink connects in one node


def nodes_of_racks(known: Gpu, racks: int, each: int) -> tuple[int, int] | None:
    """Return the nodes of racks whose GPUs NVLink connects, as a job runs on them; None if these are no racks.

    As many GPUs as a usual node has are a node, also of a superchip: a board of four GH200 runs one operating system.
    """
    is_rack = each == known.nvlink_domain > max(known.gpus_per_node, LARGEST_NODE)
    if not is_rack or each % known.gpus_per_node:
        return None
    return racks * each // known.gpus_per_node, known.gpus_per_node
