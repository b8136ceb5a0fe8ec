"""How long a collective takes: by the cost model of a cluster, or by measured points of a network."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshwright.costs.links import all_to_all_s, gather_s, neighbor_s, start_s
from meshwright.costs.speeds import speeds
from meshwright.errors import InputError
from meshwright.recipes.case import Case

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
DATA_PARALLEL = ("fsdp", "efsdp", "dp_replicate", "dp")


class Network(Protocol):
    """The time of collectives."""

    blocks_host: bool  # whether a rank's CPU waits for each collective, as with gloo

    def seconds(self, kind: str, size: int, ranks: Sequence[int], axis: str) -> float:
        """Return the seconds of a collective over some global ranks.

        `size` are the bytes of the larger of a rank's input and output.
        """


class ClusterNetwork:
    """The links of a cluster, with the rates and latencies of the cost model."""

    blocks_host = False

    def __init__(self, case: Case) -> None:
        self.case, self.speed = case, speeds(case)

    def seconds(self, kind: str, size: int, ranks: Sequence[int], axis: str) -> float:
        """Return the seconds of a collective over some global ranks."""
        count = len(ranks)
        if count < 2:
            return 0.0
        case, speed, stride = self.case, self.speed, max(ranks[1] - ranks[0], 1)
        moved = size / speed.engine.dp_rate if axis in DATA_PARALLEL else size
        if kind == "all_to_all":
            return float(all_to_all_s(case, speed, moved, stride, count))
        if kind == "send":
            return float(neighbor_s(case, speed, moved, stride, count))
        if kind == "barrier":
            return float(start_s(case, speed, stride, count))
        times = 2 if kind == "all_reduce" else 1
        return times * float(gather_s(case, speed, moved, stride, count))


class MeasuredNetwork:
    """A network by measured points: seconds by kind of collective, number of ranks and bytes."""

    def __init__(self, points: Sequence[Mapping[str, Any]], blocks_host: bool = False, source: str = "") -> None:
        self.blocks_host, self.source = blocks_host, source
        self.tables: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for point in points:
            self.tables.setdefault((point["kind"], int(point["ranks"])), []).append((point["bytes"], point["s"]))
        for table in self.tables.values():
            table.sort()

    def seconds(self, kind: str, size: int, ranks: Sequence[int], axis: str) -> float:
        """Return the seconds of a collective, interpolated between the measured sizes."""
        count = len(ranks)
        if count < 2:
            return 0.0
        kind = "all_reduce" if kind == "barrier" else kind
        counts = [ranks_measured for name, ranks_measured in self.tables if name == kind]
        if not counts:
            known = ", ".join(sorted({name for name, _ in self.tables})) or "nothing"
            raise InputError(
                f"has no measured {kind}, which the step uses; it has {known}",
                field="network",
                value=self.source or kind,
                fix=(f'points of kind "{kind}"',),
            )
        table = self.tables[kind, min(counts, key=lambda one: (abs(one - count), one))]
        return _interpolated(table, size)


def _interpolated(table: Sequence[tuple[float, float]], size: float) -> float:
    """Return the time at a size: linear between points, constant below the first, proportional beyond the last."""
    if size <= table[0][0]:
        return table[0][1]
    if size >= table[-1][0]:
        return table[-1][1] * size / table[-1][0]
    at = bisect_right([one for one, _ in table], size)
    (low, low_s), (high, high_s) = table[at - 1], table[at]
    return low_s + (high_s - low_s) * (size - low) / (high - low)


def load_network(path: str) -> MeasuredNetwork:
    """Read a JSON file of measured collectives: {"points": [{"kind", "ranks", "bytes", "s"}, …], "blocks_host"}."""
    fix = ('{"points": [{"kind": "all_gather", "ranks": 8, "bytes": 1048576, "s": 0.00012}, …]}',)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        points = found["points"]
        for point in points:
            if point["kind"] not in KINDS:
                raise ValueError(f"kind is one of {', '.join(KINDS)}, not {point['kind']!r}")
            if not (float(point["s"]) > 0 and int(point["bytes"]) > 0 and int(point["ranks"]) > 1):
                raise ValueError(f"bytes and s must be positive and ranks at least 2: {point}")
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        reason = f"not a file of measured collectives: {error}"
        raise InputError(reason, field="network", value=path, fix=fix) from None
    if not points:
        raise InputError("has no points", field="network", value=path, fix=fix)
    return MeasuredNetwork(points, bool(found.get("blocks_host", False)), path)
