"""GPU specifications and cluster descriptions."""

from meshwright.clusters.assumptions import host_assumed
from meshwright.clusters.catalogue import gpu, gpus, is_known, normalize_name
from meshwright.clusters.detect import read_nvidia_smi
from meshwright.clusters.file import (
    FILE_KEYS,
    cluster_reference,
    file_as_typed,
    file_of_cluster,
    is_cluster_file,
    is_missing_file,
    with_file,
)
from meshwright.clusters.parse import DEFAULT_GPU, assumptions, cluster, default_nodes, usual_node
from meshwright.clusters.tables import MAX_GPUS
from meshwright.clusters.types import AMD_ARCHS, Assumption, Cluster, Gpu, GpuArch, GpuLink

__all__ = [
    "AMD_ARCHS",
    "DEFAULT_GPU",
    "FILE_KEYS",
    "MAX_GPUS",
    "Assumption",
    "Cluster",
    "Gpu",
    "GpuArch",
    "GpuLink",
    "assumptions",
    "cluster",
    "cluster_reference",
    "default_nodes",
    "file_as_typed",
    "file_of_cluster",
    "gpu",
    "gpus",
    "host_assumed",
    "is_cluster_file",
    "is_known",
    "is_missing_file",
    "normalize_name",
    "read_nvidia_smi",
    "usual_node",
    "with_file",
]
