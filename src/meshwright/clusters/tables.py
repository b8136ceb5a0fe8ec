"""Read and validate a GPU table, from the shipped catalogue or a user's file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, get_args

from meshwright.clusters.types import Gpu, GpuArch, GpuLink
from meshwright.errors import InputError, closest
from meshwright.parsing import price_per_hour

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
MAX_GPUS = 1_000_000

UNITS = {
    "memory_gib": "in GiB",
    "hbm_gb_s": "in GB/s",
    "nvlink_gb_s": "in GB/s per GPU",
    "network_gb_s": "in GB/s per GPU: one 100 Gb/s port for each GPU is 12.5, one for 8 GPUs 1.5625",
    "network_gb_s_per_node": "in GB/s of all GPUs of a node together",
    "host_gib": "in GiB",
    "storage_gb_s": "in GB/s of all GPUs together",
}
PORT_GBIT_S = (100, 200, 400, 800, 1600, 3200)
"""Speeds of network ports in Gb/s: as GB/s without a unit, and more than such GPUs have, they are a mistake."""
_BANDWIDTHS = ("hbm_gb_s", "nvlink_gb_s", "network_gb_s")
_FABRIC = r"(?i:ethernet|infiniband|ib|roce|efa|edr|hdr|ndr|xdr|nics?|ports?|rails?|links?|hcas?)"
_BANDWIDTH = (  # patterns of cluster files are compiled when they are used
    rf"(?:([0-9]+)\s*(?:[x×*]|{_FABRIC}\s*(?:x|of|at|with)?)\s*)?"
    rf"([0-9]*\.?[0-9]+)\s*([GT])(b/s|bps|bits?/s|bits?|b[Ee]|BE|B/s)(?:\s+{_FABRIC})*"
)
_PER = r"(?i:(?P<speed>.+?)\s*(?:per|/|a)\s*(?P<what>node|gpu)s?)"
STORAGE = "storage_gb_s"
NODE_NETWORK = "network_gb_s_per_node"
SLOWEST_GB_S = 0.125  # 1 Gb/s per GPU: a smaller number without unit is probably a mistake
USABLE_MEMORY = "memory_gib (of a GPU, less what is reserved)"
OTHER_KEYS = {
    **dict.fromkeys(("num_nodes", "nodes_count", "n_node", "nnodes", "n_nodes", "node_count", "hosts"), "nodes"),
    **dict.fromkeys(
        ("nproc_per_node", "num_gpus_per_node", "gpus", "num_gpus", "gpu_per_node", "gpu_count", "n_gpus", "ngpus"),
        "gpus_per_node",
    ),
    **dict.fromkeys(("gpu_type", "gpu_name", "accelerator", "device", "model", "type"), "gpu"),
    **dict.fromkeys(
        ("interconnect", "network", "infiniband", "ib", "bandwidth", "internode_gb_s", "rdma", "net_gb_s"),
        "network_gb_s",
    ),
    **dict.fromkeys(("network_gbps", "network_gbit_s", "nic_gb_s", "ib_gb_s", "network_bandwidth"), "network_gb_s"),
    **dict.fromkeys(("network_per_node", "network_gbps_per_node", "node_network_gb_s"), NODE_NETWORK),
    **dict.fromkeys(("nvlink", "intranode_gb_s", "nvlink_bandwidth"), "nvlink_gb_s"),
    **dict.fromkeys(
        ("memory", "memory_gb", "gpu_memory", "gpu_memory_gb", "vram", "vram_gb", "hbm_gib", "hbm_gb"), "memory_gib"
    ),
    **dict.fromkeys(("reserved_gib", "reserved_gb", "reserved_memory", "usable_gib"), USABLE_MEMORY),
    **dict.fromkeys(("host_memory", "ram", "ram_gb", "cpu_memory", "cpu_memory_gb"), "host_gib"),
    **dict.fromkeys(("bf16_tflops", "tflops_bf16", "flops", "peak_bf16"), "peak_tflops"),
    **dict.fromkeys(("hbm_bandwidth", "memory_bandwidth", "memory_bandwidth_gb_s"), "hbm_gb_s"),
    **dict.fromkeys(("storage", "filesystem_gb_s", "disk_gb_s", "lustre_gb_s", "save_gb_s"), STORAGE),
    **dict.fromkeys(("cost", "price_per_hour", "price_per_gpu_hour"), "price"),
}
"""Keys that people write in cluster files, and ours."""
_UNITS_IN_KEYS = frozenset(("gb", "s", "gib", "per", "of", "gbps"))
_NUMBERS = ("capability", "memory_gib", "hbm_gb_s", "nvlink_gb_s", "network_gb_s", "host_gib")
_COUNTS = ("nvlink_domain", "nvlink_board", "gpus_per_node")
_TEXTS = ("name", "source", "note")
_CHOICES: dict[str, tuple[str, ...]] = {"arch": get_args(GpuArch), "link": get_args(GpuLink)}
_OPTIONAL = ("nvlink_board", "host_gib", "link", "source", "note", "aliases")

GPU_KEYS = (*_TEXTS, *_CHOICES, *_NUMBERS, *_COUNTS, "peak_tflops", "aliases")
REQUIRED_KEYS = tuple(key for key in GPU_KEYS if key not in _OPTIONAL)


class BadTableError(ValueError):
    """An invalid table; the file reader converts it to an InputError that names the file."""


def read_gpu(table: Mapping[str, object]) -> Gpu:
    """Return the GPU that a complete table describes."""
    missing = [key for key in REQUIRED_KEYS if key not in table]
    if missing:
        raise BadTableError(f"the GPU table is missing {', '.join(missing)}")
    return Gpu(**read_gpu_values(table))


def read_gpu_values(table: Mapping[str, object]) -> dict[str, Any]:
    """Return the validated values of a table with some or all of a GPU's keys."""
    reject_unknown_keys(table, GPU_KEYS)
    return {key: _read_value(key, value) for key, value in table.items()}


def reject_unknown_keys(
    table: Mapping[str, object], known: tuple[str, ...], others: Mapping[str, str] | None = None
) -> None:
    """Raise for the first unknown key, with did-you-mean; `others` are names that other tools use."""
    for key in table:
        if key not in known:
            same = (others or {}).get(key.lower().replace("-", "_"))
            near = [same] if same else closest(key, known) or _sharing_words(key, known)
            if same == "network_gb_s" and NODE_NETWORK in known:
                near = [f"{NODE_NETWORK} (of all GPUs of a node)", "network_gb_s (of one GPU)"]
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise BadTableError(f"unknown key {key[:80]}; {hint}")


def _sharing_words(key: str, known: tuple[str, ...]) -> list[str]:
    """Return the known keys with a word of this one that is no unit: nvlink_size is about nvlink_gb_s or its domain."""
    words = set(key.lower().replace("-", "_").split("_")) - _UNITS_IN_KEYS
    return [one for one in known if words & set(one.split("_"))][:3]


def read_count(key: str, value: object) -> int:
    """Return the value if it is an integer from 1 to MAX_GPUS."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_GPUS:
        raise BadTableError(f"{key} = {format_value(value)}: must be an integer from 1 to {MAX_GPUS}")
    return value


def read_price(value: object, currency: object) -> tuple[float | None, str]:
    """Return the price per GPU-hour of a cluster file and its currency, which a text such as "2.40 EUR" may name."""
    named = "" if currency is None else _read_text("currency", currency)
    if not isinstance(value, str):
        return None if value is None else _read_number("price", value), named
    try:
        found = price_per_hour(value, named or None)
    except InputError as error:
        example = 'write price = 2.40 and currency = "EUR"'
        raise BadTableError(f"price = {format_value(value)}: {error.reason}; {example}") from None
    return found if found is not None else (None, named)


def _read_value(key: str, value: object) -> object:
    if key in _BANDWIDTHS:
        return _read_bandwidth(key, value)
    if key in _NUMBERS:
        return _read_number(key, value)
    if key in _COUNTS:
        return read_count(key, value)
    if key in _CHOICES:
        return _read_choice(key, value)
    if key == "peak_tflops":
        return _read_peaks(value)
    if key == "aliases":
        return _read_aliases(value)
    return _read_text(key, value)


def _read_number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9 or not math.isfinite(value):
        unit = f" {UNITS[key]}" if key in UNITS else ""
        raise BadTableError(f"{key} = {format_value(value)}: must be a positive number{unit}")
    return float(value)


def _read_bandwidth(key: str, value: object) -> float:
    """Return GB/s from a number or a text with its unit, e.g. "400 Gb/s"."""
    if not isinstance(value, str):
        return _read_number(key, value)
    read = re.fullmatch(_BANDWIDTH, value.strip())
    if read is None:
        raise BadTableError(
            f"{key} = {format_value(value)}: must be a positive number {UNITS[key]}; "
            + ('or "20 GB/s"' if key == STORAGE else 'or "400 Gb/s", or "4x400 Gb/s" for 4 ports')
        )
    ports, size, prefix, unit = read.groups()
    return _read_number(
        key, int(ports or 1) * float(size) * (1000 if prefix == "T" else 1) / (1 if unit == "B/s" else 8)
    )


def read_network(table: Mapping[str, object], usual_gb_s: float, gpus_per_node: int) -> float | None:
    """Return the network of one GPU in GB/s from a cluster file, which may give a node's; None without one."""
    given = [key for key in ("network_gb_s", NODE_NETWORK) if key in table]
    if len(given) > 1:
        raise BadTableError(f"{given[0]} is of one GPU, {given[1]} of all GPUs of a node: write one of both")
    if not given:
        return None
    key, value = given[0], table[given[0]]
    per = re.fullmatch(_PER, value.strip()) if isinstance(value, str) else None
    of_node = key == NODE_NETWORK
    if per is not None:
        if of_node and per["what"].lower() == "gpu":
            raise BadTableError(f'{key} = {format_value(value)}: write network_gb_s = "{per["speed"]}" for one GPU')
        of_node, value = of_node or per["what"].lower() == "node", per["speed"]
    elif not of_node and isinstance(value, str):
        _reject_ports(key, value)
    gpus = gpus_per_node if of_node else 1
    _reject_unlikely_speed(key, value, usual_gb_s * gpus, SLOWEST_GB_S * gpus, "node" if of_node else "GPU")
    return _read_bandwidth(key, value) / gpus


def read_storage(value: object) -> float | None:
    """Return what all GPUs together write to the file system of checkpoints in GB/s; None if the file does not say."""
    return None if value is None else _read_bandwidth(STORAGE, value)


def unit_assumed(table: Mapping[str, object]) -> str:
    """Return how a network without unit was read, and how to write it with one; empty if it has a unit."""
    key = next((key for key in ("network_gb_s", NODE_NETWORK) if key in table), "")
    value = table.get(key)
    if isinstance(value, str) or value is None:
        return ""
    return f'{value} is read as GB/s, "{value} Gb/s" would be Gb/s'


def _reject_ports(key: str, value: str) -> None:
    """Raise for several ports of one GPU: they are usually a node's."""
    read = re.fullmatch(_BANDWIDTH, value.strip())
    if read is not None and int(read[1] or 1) > 1:
        one = f"{read[2]} {read[3]}{read[4]}"
        raise BadTableError(
            f'{key} = {format_value(value)} is of one GPU; write {NODE_NETWORK} = "{value.strip()}" if a node has '
            f'{read[1]} ports, or {key} = "{one}" for one port per GPU'
        )


def _reject_unlikely_speed(key: str, value: object, usual_gb_s: float, slowest_gb_s: float, what: str) -> None:
    """Raise for a number without unit that is a port's speed in Gb/s, or slower than any cluster's network."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return
    if (value in PORT_GBIT_S and value > usual_gb_s) or value < slowest_gb_s:
        raise BadTableError(
            f"{key} = {value} is {8 * value:,g} Gb/s for each {what}, and usual are {8 * usual_gb_s:g}; "
            f'write the unit: {key} = "{value} Gb/s" (that is {value / 8:g} GB/s), or "{value} GB/s"'
        )


def _read_choice(key: str, value: object) -> str:
    if not isinstance(value, str) or value not in _CHOICES[key]:
        raise BadTableError(f"{key} = {format_value(value)}: must be one of {', '.join(_CHOICES[key])}")
    return value


def _read_peaks(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise BadTableError("peak_tflops must be a table such as { bf16 = 989.5, fp8 = 1979 }")
    reject_unknown_keys(value, PRECISIONS)
    return {precision: _read_number(f"peak_tflops.{precision}", peak) for precision, peak in value.items()}


def _read_aliases(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise BadTableError(f"aliases = {format_value(value)}: must be a list of names")
    return tuple(_read_text("aliases", alias) for alias in value)


def _read_text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadTableError(f"{key} = {format_value(value)}: must be a non-empty string")
    return value


def format_value(value: object) -> str:
    """Return a value as text for an error message."""
    if isinstance(value, int) and abs(value) >= 10**18:  # Python refuses to print integers of thousands of digits
        return "a huge number"
    return repr(value)[:80]
