"""Values of a cluster file that no GPU has, and those that are far from the GPU that the file names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from meshwright.clusters.catalogue import gpus
from meshwright.clusters.tables import BadTableError
from meshwright.clusters.types import Assumption, Gpu

BEYOND = 4.0  # times the largest value of the catalogue, or below its smallest: not a GPU but another unit
LARGEST_HOST_GIB = 6144.0  # host memory of a node


class _Fact(NamedTuple):
    """A fact of a GPU: its unit, other units that are written for it, and how far a variant is from the known GPU."""

    unit: str
    mistakes: tuple[tuple[float, str], ...]  # factor to our unit, and the unit
    least: float  # share of the known GPU's value that a variant of it has
    most: float
    doubled: str = ""  # what a data sheet's value that is twice ours counts


_RATES = ((1000.0, "TB/s"), (0.001, "MB/s"), (1e-9, "B/s"))
_SIZES = ((1 / 1024, "MiB"), (1024.0, "TiB"), (2.0**-20, "KiB"), (2.0**-30, "bytes"))
_PEAKS = ((1000.0, "PFLOP/s"), (0.001, "GFLOP/s"), (1e-12, "FLOP/s"))
_FACTS = {
    "memory_gib": _Fact("GiB", _SIZES, 0.4, 2.1),
    "hbm_gb_s": _Fact("GB/s", _RATES, 0.4, 2.1),
    "nvlink_gb_s": _Fact("GB/s", _RATES, 0.02, 1.5, "both directions together"),  # PCIe in place of NVLink is 0.07
    "network_gb_s": _Fact("GB/s", (), 0.0, float("inf")),  # of the machine: any for a GPU
    "host_gib": _Fact("GiB", _SIZES, 0.0, float("inf")),
    "capability": _Fact("", ((0.1, "of an sm_ name"),), 0.0, float("inf")),
    "peak_tflops": _Fact("TFLOP/s", _PEAKS, 0.3, 1.5, "sparse matrices"),
}


def reject_impossible(values: Mapping[str, object]) -> None:
    """Raise for values of a GPU that are far from those of every known GPU, with the unit that was probably meant."""
    every = _every()
    for key, value, fact in _numbers(values):
        low, high = min(every.get(key, (value,))), max(every.get(key, (value,)))
        if (low / BEYOND <= value or key == "network_gb_s") and value <= high * BEYOND:  # 1 Gb Ethernet exists
            continue
        meant = (
            f"; {value:g} {unit} are {key} = {value * factor:g}"
            for factor, unit in fact.mistakes
            if low <= round(value * factor, 9) <= high
        )
        known = f"{low:g} to {high:g} {fact.unit}".strip()
        raise BadTableError(f"{key} = {value:g}: no GPU has that, known ones have {known}{next(meant, '')}")


def unlikely(changed: Mapping[str, object], known: Gpu, gpus_per_node: int) -> Iterator[Assumption]:
    """Yield the values by which a file changes a known GPU to what no variant of it has."""
    if changed.get("link") or known.link == "pcie":  # other links than the known GPU's
        changed = {key: value for key, value in changed.items() if key != "nvlink_gb_s"}
    usual = {key: value for key, value, _ in _numbers({name: getattr(known, name) for name in _FACTS})}
    for key, value, fact in _numbers(changed):
        if key not in usual or fact.least <= value / usual[key] <= fact.most:
            continue
        text = f"{key} = {value:g} is {value / usual[key]:.2g} times the {usual[key]:g} {fact.unit} of {known.name}"
        yield Assumption(key, f"{value:g}", f"{text}; {_meant(key, value, usual[key], fact)}")
    node = changed.get("host_gib", 0.0)
    if isinstance(node, float) and node * gpus_per_node > LARGEST_HOST_GIB:
        text = f"host_gib = {node:g} is of one GPU: {node * gpus_per_node:,g} GiB for the {gpus_per_node} of a node"
        fix = f"for {node:g} GiB per node write host_gib = {node / gpus_per_node:g}"
        yield Assumption("host_gib", f"{node:g}", f"{text}; {fix}")


def _meant(key: str, value: float, usual: float, fact: _Fact) -> str:
    """Return what was probably meant: another value of a data sheet, or another decimal point."""
    if fact.doubled and abs(value / usual / 2 - 1) < 0.05:
        return f"a data sheet's value counts {fact.doubled}: {key} = {value / 2:g}"
    shifted = next((value * factor for factor in (10.0, 0.1) if 0.5 <= value * factor / usual <= fact.most), None)
    if shifted is not None:
        return f"was {key} = {shifted:g} meant?"
    return "a part of a GPU (MIG) or another GPU also has another memory_gib, hbm_gb_s and peak_tflops"


def _every() -> dict[str, list[float]]:
    """Return the values of all known GPUs by key."""
    found: dict[str, list[float]] = {}
    for one in gpus():
        for key, value, _ in _numbers({name: getattr(one, name) for name in _FACTS}):
            found.setdefault(key, []).append(value)
    return found


def _numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float, _Fact]]:
    """Yield the numbers of a GPU's facts by key; peaks by precision."""
    for key, fact in _FACTS.items():
        value = values.get(key)
        if isinstance(value, Mapping):
            yield from ((f"{key}.{precision}", float(peak), fact) for precision, peak in value.items())
        elif isinstance(value, int | float):
            yield key, float(value), fact
