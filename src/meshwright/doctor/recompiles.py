"""torch.compile that compiles again and again: its own lines, and what they cost."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding
from meshwright.doctor.formats.text import Line
from meshwright.doctor.run import Recompiles, Step
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.thresholds import limit

HINTS = ("_limit (", "Recompiling function")
GAVE_UP = re.compile(r"torch\._dynamo hit config\.(?:accumulated_)?(?:recompile|cache_size)_limit \((\d+)\)")
AGAIN = re.compile(r"Recompiling function (\S+) in")
FUNCTION = re.compile(r"\bfunction: '([^']{1,120})'")
REASON = re.compile(r"last reason: (.{1,200})|- \d+/\d+: (.{1,200})")
NEXT_LINES = 4  # after such a line, which name the function and the reason
MAX_TEXT = 200


def find_recompiles(lines: Sequence[Line], steps: Sequence[Step], file: str) -> Recompiles | None:
    """Return the recompilations after the warm-up of a log, and where torch.compile gave up; None if there are none."""
    warm = int(limit("warm_up_most"))
    at = [step.line for step in steps]
    found: list[tuple[int, Line]] = []
    gave_up: tuple[int, Line] | None = None
    for index, line in enumerate(lines):
        if "_limit (" in line.text and GAVE_UP.search(line.text):
            gave_up = gave_up or (index, line)
        elif "Recompiling function" not in line.text or AGAIN.search(line.text) is None:
            continue
        elif bisect_right(at, line.number) >= warm:
            found.append((index, line))
    if not found and gave_up is None:
        return None
    index, first = gave_up or found[0]
    near = " ".join(one.text for one in lines[index : index + NEXT_LINES])
    function, reason = FUNCTION.search(near), REASON.search(near)
    places = [bisect_right(at, line.number) for _, line in [*found, *([gave_up] if gave_up else [])]]
    spans = [steps[place - 1].step for place in places if place]
    return Recompiles(
        count=len(found),
        steps=(min(spans), max(spans)) if spans else None,
        file=file,
        line=first.number,
        text=first.text.strip()[:MAX_TEXT],
        gave_up=(function[1] if function else "a function") if gave_up else "",
        reason=(reason[1] or reason[2]).strip() if reason else "",
    )


def recompiles(stats: RunStats) -> Iterator[Finding]:
    """torch.compile compiles again and again after the first steps, or gives up and runs a function uncompiled."""
    found = stats.run.recompiles
    if found is None or (not found.gave_up and found.count < limit("recompiles")):
        return
    texts = []
    if found.count:
        texts.append(f"torch.compile compiled again {found.count} time{'s' * (found.count > 1)} after the first steps")
    if found.gave_up:
        texts.append(f"torch.compile gave up on {found.gave_up}, which runs without compilation from there on")
    reason = f": {found.reason}" if found.reason else ""
    yield Finding(
        id="speed.recompiles",
        severity="warning",
        message="; ".join(texts) + reason,
        steps=found.steps,
        lines=(f"{found.file}:{found.line} {found.text}",),
        evidence=(Evidence("recompilations", float(found.count), "", limit("recompiles"), "limit"),),
        remedies=(
            remedies.advice("pad or pack every batch to one length", why="each new shape is compiled again"),
            remedies.advice("torch.compile(model, dynamic=True)", why="one program for all lengths"),
            remedies.advice("TORCH_LOGS=recompiles", what="environment", why="prints what changed, for every one"),
        ),
    )
