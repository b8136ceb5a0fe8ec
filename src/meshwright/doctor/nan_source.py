"""Where a NaN appeared first, by the line of the framework that stopped on it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.doctor import remedies
from meshwright.doctor.finding import Remedy
from meshwright.doctor.run import Fault

_RANK = re.compile(r"\bRank (\d+)\b")
_NODE = re.compile(r"\bnode:? ([\w.-]*\w)")
_DEVICE = re.compile(r"\b[Dd]evice:? (?:cuda:)?(\d+)\b")
_ITERATION = re.compile(r"\biteration (\d+)\b")


class NanSource(NamedTuple):
    """The step, rank, node and GPU whose loss or gradients are named as not finite; None where the line lacks one."""

    step: int | None
    rank: int | None
    node: str | None
    gpu: int | None

    @property
    def sentence(self) -> str:
        """What the line names, as the end of a sentence; empty without a rank."""
        if self.rank is None:
            return ""
        where = ", ".join(
            filter(None, (self.node and f"node {self.node}", "" if self.gpu is None else f"GPU {self.gpu}"))
        )
        return f", first reported by rank {self.rank}" + (f" ({where})" if where else "")

    def remedies(self) -> Iterator[Remedy]:
        """Yield how to tell a GPU that computes wrong numbers from a bad batch."""
        if self.node:
            why = "NaN on that node again, and not elsewhere, is a faulty GPU"
            yield remedies.advice(f"repeat the step from the same checkpoint without {self.node}", why=why)


def nan_source(faults: Sequence[Fault]) -> NanSource:
    """Return the source that the first line names: Megatron's checks of the loss and of local gradients do."""
    text = faults[0].text if faults else ""
    step, rank, gpu = (_number(pattern, text) for pattern in (_ITERATION, _RANK, _DEVICE))
    node = _NODE.search(text)
    return NanSource(step, rank, None if node is None else node[1], gpu)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(found[1])
