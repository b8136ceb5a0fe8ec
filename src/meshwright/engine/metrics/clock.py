"""Where the time of a step goes, measured without making the GPU wait."""

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
    """Seconds of one step and of its parts, which add up to it."""

    step_s: float
    parts_s: dict[str, float]


class Timing:
    """The marks of one step: CUDA events, which the GPU stamps when it gets there, or clock readings on the CPU."""

    def __init__(self, begin: Any) -> None:
        self.begin, self.end = begin, begin
        self.spans: list[tuple[str, Any, Any]] = []

    def ready(self) -> bool:
        """Whether all marks are stamped, so that reading them makes nobody wait."""
        return isinstance(self.end, float) or bool(self.end.query())

    def read(self) -> StepTime:
        """The seconds; waits for the GPU where it has not come to the end of the step."""
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

    On a GPU a part is the time its stream spends there: loading data costs nothing while the GPU still has work.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._now: Timing | None = None

    def start(self) -> None:
        """Begins a step."""
        self._now = Timing(self._mark())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a part of the step: data, forward_backward or optimizer, as often as it comes."""
        if name not in PARTS[:-1]:
            raise ValueError(f"unknown part {name!r}; one of {', '.join(PARTS[:-1])}")
        begin = self._mark()
        yield
        if self._now is not None:
            self._now.spans.append((name, begin, self._mark()))

    def finish(self) -> Timing:
        """Ends the step: its timing, to be read when it is ready."""
        if self._now is None:
            raise ValueError("a step ends that did not begin")
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
