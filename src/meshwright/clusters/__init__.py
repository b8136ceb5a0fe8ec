"""GPU facts, and clusters as people write them."""

from meshwright.clusters.catalogue import gpu, gpus, knows
from meshwright.clusters.detect import read_nvidia_smi
from meshwright.clusters.parse import DEFAULT_GPU, cluster, usual_nodes
from meshwright.clusters.types import Cluster, Gpu, GpuArch, GpuLink

__all__ = [
    "DEFAULT_GPU",
    "Cluster",
    "Gpu",
    "GpuArch",
    "GpuLink",
    "cluster",
    "gpu",
    "gpus",
    "knows",
    "read_nvidia_smi",
    "usual_nodes",
]
