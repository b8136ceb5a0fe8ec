"""The order of streams and events of a simulated collective, with CUDA replaced by a record of its calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshwright.rehearsal import delays


class FakeStream:
    def __init__(self, gpu: FakeCuda, name: str) -> None:
        self.gpu, self.name, self.at = gpu, name, 0.0  # when the work issued so far ends

    def wait_stream(self, other: FakeStream) -> None:
        self.at = max(self.at, other.at)

    def wait_event(self, event: FakeEvent) -> None:
        self.at = max(self.at, event.at)

    def record_event(self, event: FakeEvent) -> FakeEvent:
        event.record(self)
        return event


class FakeEvent:
    def __init__(self, gpu: FakeCuda, enable_timing: bool = False) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        self.at = (stream or self.gpu.current).at

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


class FakeCuda:
    """A GPU whose kernels take the time that they are asked to."""

    def __init__(self) -> None:
        self.current = FakeStream(self, "compute")

    def current_stream(self) -> FakeStream:
        return self.current

    def Stream(self, priority: int = 0) -> FakeStream:  # noqa: N802
        return FakeStream(self, "side")

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, enable_timing)

    def synchronize(self) -> None: ...

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _compile_kernel(self, source: str, name: str) -> Any:
        assert name in source

        def launch(grid: Any, block: Any, args: list[int]) -> None:
            assert 0 < args[0] < 2**31
            self.current.at += args[0] / 1e9

        return launch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(delays, "cuda", fake)
    return fake


def test_a_collective_hides_behind_compute_until_it_is_waited_for(gpu: FakeCuda) -> None:
    found = delays.StreamDelays(bytes_per_s=1e9)
    gpu.current.at = begin = gpu.current.at
    work, (start, end) = found.place(("dp", ""), 3.0, lambda: 0, None, record=True)
    gpu.current.at += 2.0  # kernels beside it
    work.wait()
    assert gpu.current.at == pytest.approx(begin + 3.0, abs=1e-6)  # one second is exposed
    assert start.elapsed_time(end) == pytest.approx(3e3)


def test_collectives_of_one_group_follow_each_other_and_those_of_two_do_not(gpu: FakeCuda) -> None:
    found = delays.StreamDelays(bytes_per_s=1e9)
    begin = gpu.current.at
    works = [found.place((name, ""), 1.0, lambda: 0, None, record=False)[0] for name in ("dp", "dp", "tp")]
    works[2].wait()
    assert gpu.current.at == pytest.approx(begin + 1.0)
    works[1].wait()
    assert gpu.current.at == pytest.approx(begin + 2.0)


def test_the_time_of_a_fill_is_part_of_the_collective(gpu: FakeCuda) -> None:
    found = delays.StreamDelays(bytes_per_s=1e9)
    begin = gpu.current.at

    def fill() -> int:
        gpu.current.at += 0.4
        return int(0.4e9)

    found.place(("dp", ""), 1.0, fill, None, record=False)[0].wait()
    assert gpu.current.at == pytest.approx(begin + 1.0)


def test_a_wait_longer_than_the_kernels_argument_is_several_kernels(gpu: FakeCuda) -> None:
    begin = gpu.current.at
    delays.waiting_kernel()(5.0)
    assert gpu.current.at - begin == pytest.approx(5.0, abs=0.01)


def test_the_next_kernel_is_tried_if_one_does_not_wait_as_long_as_asked(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_slow() -> Any:
        return lambda seconds: setattr(gpu.current, "at", gpu.current.at + 2 * seconds)

    monkeypatch.setattr(delays, "_nvrtc_wait", too_slow)
    monkeypatch.setattr(delays, "_triton_wait", too_slow)
    monkeypatch.setattr(delays, "_cycles_wait", too_slow)
    with pytest.raises(RuntimeError, match="in a trial of 1 ms"):
        delays.waiting_kernel()
