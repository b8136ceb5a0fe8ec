"""Read a cluster from a TOML file: a known GPU with overrides, or a custom GPU."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright import file_access
from meshwright.clusters.catalogue import gpu, is_known
from meshwright.clusters.plausible import reject_impossible, unlikely
from meshwright.clusters.tables import (
    GPU_KEYS,
    MAX_GPUS,
    NODE_NETWORK,
    OTHER_KEYS,
    STORAGE,
    BadTableError,
    format_value,
    read_count,
    read_gpu,
    read_gpu_values,
    read_network,
    read_price,
    read_storage,
    reject_unknown_keys,
    unit_assumed,
)
from meshwright.clusters.types import Cluster, Gpu, nodes_of_racks
from meshwright.errors import InputError

NETWORK = "network_gb_s"
_OWN_KEYS = ("gpu", "nodes", "gpus_per_node", "price", "currency", NODE_NETWORK, STORAGE)
_OF_THE_GPU = ("arch", "capability", "memory_gib", "hbm_gb_s", "peak_tflops")
"""Facts that make another GPU: with one of them, `name` is the GPU's, else the cluster's."""
_OVERRIDES = tuple(key for key in GPU_KEYS if key not in ("gpus_per_node", "nvlink_board", "aliases"))
FILE_LOOKS = 'a cluster file is TOML, with lines such as gpu = "H100", nodes = 2, gpus_per_node = 8, network_gb_s = 50'
_CLUSTER = re.compile(r"(?:(\d+) ?x ?)?(\d+) ?x ?([A-Za-z][\w-]*)")
FILE_KEYS = (*_OWN_KEYS, *_OVERRIDES)


def looks_like_path(text: str) -> bool:
    """Return whether a cluster argument is a file path."""
    return text.lower().endswith(".toml") or "/" in text or "\\" in text


def file_of_cluster(text: str) -> str:
    """Return the full path of the file that a cluster argument names; empty if it names none."""
    return str(file_access.resolved(_counted(text)[1])) if looks_like_path(text) else ""


def is_missing_file(text: str) -> bool:
    """Return whether a cluster argument names a file that is not on this machine, such as that of a moved recipe."""
    return looks_like_path(text) and not file_access.closed() and not os.path.isfile(_counted(text)[1])


def file_as_typed(text: str) -> str:
    """Return the path in a cluster argument that names a file, without a number of nodes before it."""
    return _counted(text)[1]


def with_file(text: str, path: str) -> str:
    """Return a cluster argument with another file, and its number of nodes."""
    return _argument(_counted(text)[0], path)


def cluster_reference(text: str) -> str:
    """Return a cluster argument that names a file with the file's full path; empty if it names none."""
    nodes, path = _counted(text)
    return "" if not path.endswith(".toml") else _argument(nodes, str(file_access.resolved(path)))


def _argument(nodes: int | None, path: str) -> str:
    return path if nodes is None else f"{nodes}x{path}"


def _counted(text: str) -> tuple[int | None, str]:
    """Return the nodes and the path in `16xuni.toml`: the cluster of a file with another number of nodes."""
    found = re.fullmatch(r"([0-9]{1,7}) ?[x×*] ?(.+\.toml)", text, re.IGNORECASE)
    if found is None or file_access.exists(text):
        return None, text
    return int(found[1]), found[2]


def read_cluster_file(text: str) -> Cluster:
    """Return the cluster that a TOML file describes, with a number of nodes that is typed before the path."""
    nodes, path = _counted(text)
    sent = file_access.text_of(path, "gpus")
    try:
        table = _load(path, sent)
        if nodes is not None:
            table["nodes"] = nodes
        own_host = "host_gib" in table or isinstance(table.get("gpu"), dict)
        found = _cluster_of(table)
        return msgspec.structs.replace(
            found, file=str(file_access.resolved(path)), own_host=own_host, nodes_typed=nodes is not None
        )
    except BadTableError as error:
        raise InputError(str(error), field="gpus", value=path[:200]) from None
    except InputError as error:  # an unknown GPU name inside the file
        raise InputError(
            error.reason, field="gpus", value=path[:200], fix=[f'gpu = "{name}"' for name in error.fix]
        ) from None


def _load(path: str, sent: str | None) -> dict[str, Any]:
    # os.path.isfile returns False for invalid paths (NUL bytes), where Path.is_file raises
    if sent is None and not os.path.isfile(path):
        if "," in path:
            raise BadTableError(f"names several clusters; pass one, or meshwright size MODEL --goal GOAL --gpu {path}")
        raise BadTableError("file not found; pass the path of a TOML file, or a cluster such as 8xH100")
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig") if sent is None else sent)
    except OSError as error:
        raise BadTableError(f"the file cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadTableError(f"the file is not valid TOML: {str(error)[:200]}; {FILE_LOOKS}") from None


def _reject_cluster_string(table: Mapping[str, Any]) -> None:
    """Raise if a key has a cluster as --gpus takes it: a file has its parts."""
    for key in ("gpus", "cluster", "gpu"):
        found = _CLUSTER.fullmatch(str(table.get(key, "")))
        if found is None or not is_known(found[3]):
            continue
        node, each, nodes = gpu(found[3]).gpus_per_node, int(found[2]), found[1]
        if nodes is None and each > node and each % node == 0:
            nodes, each = each // node, node
        parts = "".join((f'gpu = "{found[3]}"', f", nodes = {nodes}" if nodes else "", f", gpus_per_node = {each}"))
        raise BadTableError(f"{key} has a cluster as --gpus takes it; a file has its parts: {parts}")


def _reject_section(table: Mapping[str, Any]) -> None:
    """Raise if the keys are in a section: they are at the top of the file."""
    for key, value in table.items():
        if key not in FILE_KEYS and isinstance(value, dict) and {*value} & {*FILE_KEYS, *OTHER_KEYS}:
            raise BadTableError(f"its keys are in a section, and a cluster file has none: remove the line [{key}]")


def _cluster_of(table: Mapping[str, Any]) -> Cluster:
    _reject_section(table)
    _reject_cluster_string(table)
    reject_unknown_keys(table, FILE_KEYS, OTHER_KEYS)
    base = _gpu_of(table)
    overrides = read_gpu_values({key: value for key, value in table.items() if key in _OVERRIDES and key != NETWORK})
    if "peak_tflops" in overrides:
        overrides["peak_tflops"] = base.peak_tflops | overrides["peak_tflops"]
    nodes = read_count("nodes", table.get("nodes", 1))
    gpus_per_node = read_count("gpus_per_node", table.get("gpus_per_node", base.gpus_per_node))
    if nodes * gpus_per_node > MAX_GPUS:
        raise BadTableError(f"{nodes} nodes of {gpus_per_node} GPUs exceed the maximum of {MAX_GPUS} GPUs")
    if (network := read_network(table, base.network_gb_s, gpus_per_node)) is not None:
        overrides[NETWORK] = network
    reject_impossible(overrides)
    name = "" if overrides.keys() & _OF_THE_GPU or isinstance(table["gpu"], dict) else overrides.pop("name", "")
    price, currency = read_price(table.get("price"), table.get("currency"))
    own_links = "nvlink_domain" in table or isinstance(table["gpu"], dict)
    own_network = network is not None or isinstance(table["gpu"], dict)
    known = msgspec.structs.replace(base, **overrides)
    if table.get("nvlink_domain") == 1 < min(gpus_per_node, base.gpus_per_node):  # no NVLink, which superchips need
        known = msgspec.structs.replace(known, link="pcie", nvlink_gb_s=known.pcie_gb_s, nvlink_domain=gpus_per_node)
    unit = unit_assumed(table)
    counts, racks = (nodes, gpus_per_node), 0
    if (inside := nodes_of_racks(known, nodes, gpus_per_node)) is not None:
        counts, racks = inside, nodes
    found = Cluster(known, *counts, price, currency, own_links, own_network, name, racks=racks, network_unit=unit)
    far = () if isinstance(table["gpu"], dict) else tuple(unlikely(overrides, base, gpus_per_node))
    return msgspec.structs.replace(found, storage_gb_s=read_storage(table.get(STORAGE)), unlikely=far)


def _gpu_of(table: Mapping[str, Any]) -> Gpu:
    match table.get("gpu"):
        case str(name):
            return gpu(name)
        case dict(custom):
            reject_unknown_keys(custom, GPU_KEYS, OTHER_KEYS)
            reject_impossible(read_gpu_values(custom))
            return read_gpu({"gpus_per_node": table.get("gpus_per_node", 8), **custom})
        case None:
            raise BadTableError('gpu is missing; write gpu = "H100", or a [gpu] table for a custom GPU')
        case other:
            raise BadTableError(f"gpu = {format_value(other)}: must be the name of a GPU or a [gpu] table")


def is_cluster_file(path: str) -> bool:
    """Return whether this is a TOML file with only keys of a cluster file."""
    if not path.endswith(".toml") or file_access.closed() or not os.path.isfile(path):
        return False
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return "gpu" in table and table.keys() <= {*FILE_KEYS}
