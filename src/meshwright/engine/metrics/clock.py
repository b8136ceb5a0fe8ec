"""Times a step and its parts without synchronizing with the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch

PARTS = ("data", "forward_backward", "optimizer", "other")


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of one step and of its parts, which sum to it."""

    step_s: float
    parts_s: dict[str, float]


class Timing:
    """The time stamps of one step: CUDA events, recorded when the GPU reaches them, or clock readings on a CPU."""

    def __init__(self, begin: Any) -> None:
        self.begin, self.end = begin, begin
        self.spans: list[tuple[str, Any, Any]] = []

    def ready(self) -> bool:
        """Whether the GPU has passed all events, so that reading them does not block."""
        return isinstance(self.end, float) or bool(self.end.query())

    def read(self) -> StepTime:
        """Return the seconds; blocks until the GPU has finished the step."""
        if not isinstance(self.end, float):
            self.end.synchronize()
        parts = dict.fromkeys(PARTS, 0.0)
        for name, begin, end in self.spans:
            parts[name] += _between(begin, end)
        step_s = _between(self.begin, self.end)
        parts["other"] = max(0.0, step_s - sum(parts.values()))
        return StepTime(step_s, parts)


class Clock:
    """Times steps and their parts.

    On a GPU a part is the time its stream spends in it: loading data is free while the GPU still has work queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._now: Timing | None = None

    def start(self) -> None:
        """Start a step."""
        self._now = Timing(self._mark())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the step: data, forward_backward or optimizer; repeated parts are summed."""
        if name not in PARTS[:-1]:
            raise ValueError(f"unknown part {name!r}; one of {', '.join(PARTS[:-1])}")
        begin = self._mark()
        yield
        if self._now is not None:
            self._now.spans.append((name, begin, self._mark()))

    def finish(self) -> Timing:
        """End the step and return its timing, to be read when it is ready."""
        if self._now is None:
            raise ValueError("finish() without start()")
        done, self._now = self._now, None
        done.end = self._mark()
        return done

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's stubs
        event.record()
        return event


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    return float(begin.elapsed_time(end)) / 1e3
