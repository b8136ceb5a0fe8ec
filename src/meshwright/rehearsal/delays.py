"""Places the time of a simulated collective: on a CUDA stream, or on the host's clock.

On a GPU a collective is a kernel that waits on a stream of its process group. That stream waits for the caller's, as
NCCL's does, and the caller's stream waits for it when the collective's result is waited for. So compute kernels
overlap with it exactly as far as the engine's own order of streams and events allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from meshwright.rehearsal.peers import Peers

cuda: Any = torch.cuda  # largely untyped
SHORTEST_S = 2e-6  # a kernel launch takes as long
SPIN_S = 5e-4  # time.sleep is not more precise
OVERSLEEP_S = 1e-4  # by which time.sleep is usually late
MOST_NS = 2_000_000_000  # of one waiting kernel: its argument has 32 bits
TOLERANCE = 0.1  # of a trial wait of 1 ms
GLOO_THREADS = 2  # of a process group, by torch's default
_WAIT_SOURCE = """
extern "C" __global__ void wait_ns(int ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(250);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < (unsigned long long) ns);
}
"""


@dataclass(frozen=True)
class Collective:
    """What a collective is, and the global ranks of its group."""

    kind: str = ""
    size: int = 0  # bytes of the larger of a rank's input and output
    ranks: tuple[int, ...] = ()
    is_async: bool = True  # the caller may do something else before it waits


UNNAMED = Collective()


class FinishedWork(Work):
    """A collective that takes no time."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.result_tensors = result

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return True

    def is_success(self) -> bool:
        """Whether it has succeeded."""
        return True

    def get_future(self) -> Any:
        """Return a completed future, which C++ callers wait for."""
        future: Any = torch.futures.Future()
        future.set_result(self.result_tensors)
        return future


class StreamWork(FinishedWork):
    """A collective whose end is an event on a stream."""

    def __init__(self, end: Any, stream: Any, result: Any) -> None:
        super().__init__(result)
        self.end, self.stream = end, stream

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the end."""
        cuda.current_stream().wait_event(self.end)
        return True

    def is_completed(self) -> bool:
        """Whether the GPU has passed its end."""
        return bool(self.end.query())

    def get_future(self) -> Any:
        """Return a future that makes the streams of its readers wait."""
        future: Any = torch.futures.Future(devices=[torch.device("cuda", cuda.current_device())])
        with cuda.stream(self.stream):
            future.set_result(self.result_tensors)
        return future


class HostWork(FinishedWork):
    """A collective that ends at a time of the host's clock."""

    def __init__(self, end_s: float, result: Any) -> None:
        super().__init__(result)
        self.end_s = end_s

    def wait(self, timeout: Any = None) -> bool:
        """Sleep until its end."""
        sleep_until(self.end_s)
        return True

    def is_completed(self) -> bool:
        """Whether its end has passed."""
        return time.perf_counter() >= self.end_s


def sleep_until(end_s: float) -> None:
    """Sleep until a time of the performance counter, the last part of it spinning."""
    while (left := end_s - time.perf_counter()) > 0:
        if left > SPIN_S:
            time.sleep(left - SPIN_S)


class StreamDelays:
    """Delays on CUDA streams, one per process group and direction."""

    def __init__(self, bytes_per_s: float) -> None:
        self.streams: dict[tuple[str, str], Any] = {}
        self.wait = waiting_kernel()
        self.bytes_per_s = bytes_per_s  # of the fills, which take part of a collective's time

    def place(
        self,
        lane: tuple[str, str],
        seconds: float,
        fill: Callable[[], int],
        result: Any,
        record: bool,
        what: Collective = UNNAMED,
    ) -> tuple[FinishedWork, Any]:
        """Place a collective after the work of the current stream; return it and its start and end if recorded."""
        current = cuda.current_stream()
        stream = self.streams.get(lane)
        if stream is None:
            # Kernels that fill the GPU keep a stream of equal priority waiting, as they do not with NCCL's.
            stream = self.streams[lane] = cuda.Stream(priority=-1)
        stream.wait_stream(current)
        with cuda.stream(stream):
            start = stream.record_event(cuda.Event(enable_timing=True)) if record else None
            left = seconds - fill() / self.bytes_per_s
            if left > SHORTEST_S:
                self.wait(left)
            end = cuda.Event(enable_timing=record)
            end.record(stream)
        return StreamWork(end, stream, result), (start, end)


class ThreadWork(FinishedWork):
    """A collective that a thread of the host carries out."""

    def __init__(self, done: Future[None], result: Any) -> None:
        super().__init__(result)
        self.done = done

    def wait(self, timeout: Any = None) -> bool:
        """Block the caller until its end."""
        self.done.result()
        return True

    def is_completed(self) -> bool:
        """Whether its end has passed."""
        return self.done.done()


class CallerWork(FinishedWork):
    """A synchronous collective, carried out by the thread that waits for it.

    Handing it to another thread and back took longer than small collectives of gloo do.
    """

    def __init__(self, carry_out: Callable[[], None], result: Any) -> None:
        super().__init__(result)
        self.carry_out: Callable[[], None] | None = carry_out

    def wait(self, timeout: Any = None) -> bool:
        """Take its time."""
        carry_out, self.carry_out = self.carry_out, None
        if carry_out is not None:
            carry_out()
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self.carry_out is None


class HostDelays:
    """Delays on the host: a collective occupies a thread of its group, as with gloo, and waiting blocks the CPU."""

    def __init__(self, on_gpu: bool, peers: Peers | None = None) -> None:
        self.on_gpu, self.peers = on_gpu, peers
        self.free_s: dict[tuple[str, str], list[float]] = {}
        self.lanes: dict[tuple[str, str], _Lane] = {}

    def place(
        self,
        lane: tuple[str, str],
        seconds: float,
        fill: Callable[[], int],
        result: Any,
        record: bool,
        what: Collective = UNNAMED,
    ) -> tuple[FinishedWork, Any]:
        """Place a collective after the work of the current stream, on the next free thread of its group."""
        fill()
        if self.on_gpu or self.peers is not None:
            return self._submit(lane, seconds, result, what), (None, None)
        free_s = self.free_s.setdefault(lane, [0.0] * GLOO_THREADS)
        start = max(time.perf_counter(), min(free_s))
        free_s[free_s.index(min(free_s))] = end = start + seconds
        return HostWork(end, result), (start, end)

    def _submit(self, name: tuple[str, str], seconds: float, result: Any, what: Collective) -> FinishedWork:
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = _Lane(len(self.lanes))
        ready = cuda.current_stream().record_event() if self.on_gpu else None
        carry_out = partial(self._carry_out, ready, lane.number, lane.placed, seconds, what.ranks)
        lane.placed += 1
        if not what.is_async:
            return CallerWork(partial(carry_out, sleep_until), result)
        return ThreadWork(lane.threads.submit(carry_out, yield_until), result)

    def _carry_out(
        self, ready: Any, lane: int, number: int, seconds: float, ranks: tuple[int, ...], until: Callable[[float], None]
    ) -> None:
        """Take some seconds from the time at which the devices of all members have the data."""
        if ready is not None:
            ready.synchronize()
        start = time.perf_counter() if self.peers is None else self.peers.meet(lane, number, ranks)
        until(start + seconds)


class _Lane:
    """The threads of a process group, and how many collectives they were given."""

    def __init__(self, number: int) -> None:
        self.number, self.placed = number, 0
        self.threads = ThreadPoolExecutor(GLOO_THREADS)


def yield_until(end_s: float) -> None:
    """Sleep until a time; the last part yields to the rank's own thread, which spinning would keep from its work."""
    while (left := end_s - time.perf_counter()) > 0:
        time.sleep(max(left - OVERSLEEP_S, 0.0))


def waiting_kernel() -> Callable[[float], None]:
    """Return a function that makes the current CUDA stream wait for some seconds, checked by a trial.

    The GPU's clock in nanoseconds is used: cycles last longer when a loaded GPU lowers its frequency.
    """
    tried: list[str] = []
    for make in (_nvrtc_wait, _triton_wait, _cycles_wait):
        try:
            wait = make()
            error = _trial_error(wait)
        except Exception as failure:
            tried.append(f"{make.__name__}: {type(failure).__name__}: {failure}")
            continue
        if error <= TOLERANCE:
            return wait
        tried.append(f"{make.__name__}: {error:+.0%} in a trial of 1 ms")
    raise RuntimeError(f"no kernel that waits works on this GPU: {'; '.join(tried)}")


def _trial_error(wait: Callable[[float], None]) -> float:
    """Return by how much a wait of 1 ms misses it, at best of three."""
    errors = []
    for _ in range(4):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        wait(1e-3)
        end.record()
        cuda.synchronize()
        errors.append(abs(float(start.elapsed_time(end)) - 1.0))
    return min(errors[1:])


def _nvrtc_wait() -> Callable[[float], None]:
    kernel = cuda._compile_kernel(_WAIT_SOURCE, "wait_ns")

    def wait(seconds: float) -> None:
        left = int(seconds * 1e9)
        while left > 0:
            kernel(grid=(1, 1, 1), block=(1, 1, 1), args=[min(left, MOST_NS)])
            left -= MOST_NS

    return wait


def _triton_wait() -> Callable[[float], None]:
    from meshwright.rehearsal._triton_wait import wait_ns

    def wait(seconds: float) -> None:
        left = int(seconds * 1e9)
        while left > 0:
            wait_ns[(1,)](min(left, MOST_NS), num_warps=1)
            left -= MOST_NS

    return wait


def _cycles_wait() -> Callable[[float], None]:
    """Return a wait in clock cycles, calibrated at the frequency of the moment."""
    cycles = 20_000_000
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(cycles)
    start.record()
    cuda._sleep(cycles)
    end.record()
    cuda.synchronize()
    per_s = cycles / (float(start.elapsed_time(end)) / 1e3)
    return lambda seconds: cuda._sleep(int(seconds * per_s))
