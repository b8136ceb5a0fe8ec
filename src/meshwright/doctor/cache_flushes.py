"""Flushes of the allocator's cache that DeepSpeed reports at a step, in its own logs and in those of a trainer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshwright.doctor.formats.text import Line
from meshwright.doctor.run import Run

HINT = "allocator cache flushes since last step"
FLUSHES = re.compile(rf"(\d+) pytorch {HINT}")


def flushes(lines: Sequence[Line], run: Run) -> dict[str, Any]:
    """Return the fields of the run that count flushed caches: of one rank, where several report them."""
    found = [(line, match) for line in lines if HINT in line.text and (match := FLUSHES.search(line.text))]
    of_rank: dict[str, int] = {}
    for line, match in found:
        of_rank[line.rank] = of_rank.get(line.rank, 0) + int(match[1])
    most = max(of_rank.values(), default=0)
    return {"retries": most, "retry_line": found[0][0].number} if most > run.retries else {}
