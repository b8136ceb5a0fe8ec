"""A fake GPU and a fake cluster: a device without memory, and process groups without other ranks.

Tensors on the device have shapes and dtypes but no data (torch's fake tensors); collectives return immediately.
`fake_rank` patches torch and restores it on exit. Only the device's name stays registered, which cannot be undone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.engine.kernels.device_caps import CPU, DECOMPOSITIONS, DRY, FAKE_GPU
from meshwright.engine.kernels.dry import register_operations

OpCallback = Callable[[Any, Any, Any, Any], None]


class Stream:
    """A stream that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """An event that has always completed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> Event:
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Backend:
    """The device module that torch calls, in place of `torch.cuda`."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event
        self._streams = [Stream()]  # entered streams; the last is current

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, *_: Any) -> None: ...

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, _: int) -> None: ...

    def manual_seed_all(self, _: int) -> None: ...

    def current_stream(self, *_: Any) -> Stream:
        return self._streams[-1]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        self._streams.append(stream or self._streams[-1])
        try:
            yield
        finally:
            self._streams.pop()

    def synchronize(self, *_: Any) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None: ...

    def empty_cache(self) -> None: ...


@functools.cache
def register_device() -> None:
    """Register the fake device with torch, once per process."""
    from torch.utils import backend_registration

    # The first backward pass starts one thread per registered device, and a process with such threads cannot fork
    # ranks. Run it before the fake device is registered, which needs no thread.
    torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    register_operations()
    backend_registration._setup_privateuseone_for_python_backend(DRY, backend_module=Backend())


@contextmanager
def fake_rank(
    world: int, rank: int, on_op: OpCallback | None = None, capability: tuple[int, int] = (9, 0)
) -> Iterator[torch.device]:
    """Yield the fake device of one rank: inside, tensors have no data and collectives no peers.

    `on_op` is called for every operation on the device: (operation, args, kwargs, result). With capability (0, 0) the
    device computes as a CPU does.
    """
    register_device()
    with ExitStack() as undo:
        _group(world, rank, undo)
        for owner, name, value in _patches(capability):
            undo.callback(setattr, owner, name, owner.__dict__[name] if name in vars(owner) else getattr(owner, name))
            setattr(owner, name, value)
        threads = torch.autograd.is_multithreading_enabled()
        torch.autograd.set_multithreading_enabled(False)
        undo.callback(torch.autograd.set_multithreading_enabled, threads)
        undo.callback(setattr, FAKE_GPU, "capability", FAKE_GPU.capability)
        FAKE_GPU.capability = capability
        undo.enter_context(NoDataMode(on_op))
        yield torch.device(DRY)


@runtime_checkable
class OpRecorder(Protocol):
    """An `on_op` owner that can also record a composite operation once and replay its entries."""

    def record_composite(self, run_op: Callable[[], Any]) -> tuple[Any, Any]: ...

    def replay_composite(self, known: Any, result: Any) -> None: ...


class NoDataMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors on the fake device only; operations on CPU tensors run for real."""

    def __init__(self, on_op: OpCallback | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.on_op = on_op
        self._dispatching = False  # inside an operation: its parts are not separate operations
        self._composites: dict[Any, Any] = {}  # log entries of composite operations, by operation and shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dispatching:  # the steps of a device-to-host copy have no data either
            return self.dispatch(func, types, args, kwargs)
        if (
            FakeTensor not in types
            and not _is_fake_device(kwargs.get("device"))
            and not _is_offloaded(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        if func in DECOMPOSITIONS:
            return self._composite(func, types, args, kwargs)
        result = self._dispatch_once(func, types, args, kwargs)
        if self.on_op is not None and result is not NotImplemented:
            self.on_op(func, args, kwargs, result)
        return result

    def _dispatch_once(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._dispatching = True
        try:
            return self.dispatch(func, types, args, kwargs)
        finally:
            self._dispatching = False

    def _composite(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a composite operation of ours step by step; replay its log entries for shapes that were seen before."""

        def run_op() -> Any:
            with self:
                return DECOMPOSITIONS[func](*args, **kwargs)

        recorder = getattr(self.on_op, "__self__", None)
        if not isinstance(recorder, OpRecorder):
            return run_op()
        signature = func, _shapes(args), _shapes(tuple(kwargs.values()))
        if signature not in self._composites:
            result, self._composites[signature] = recorder.record_composite(run_op)
            return result
        result = self._dispatch_once(func, types, args, kwargs)
        recorder.replay_composite(self._composites[signature], result)
        return result


def _shapes(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what our operations' allocations depend on: shapes, strides and dtypes of tensors, and other values."""
    return tuple((one.shape, one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one for one in values)


def _is_fake_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == DRY


def _is_offloaded(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation allocates CPU memory for meta tensors: weights that are offloaded."""
    return func is torch.ops.aten.empty_like.default and args[0].is_meta and _is_host(kwargs.get("device"))


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _group(world: int, rank: int, undo: ExitStack) -> None:
    from torch.testing._internal.distributed import fake_pg

    known = dist.Backend.backend_capability["fake"]
    if DRY not in known:
        known.append(DRY)
        dist.Backend.default_device_backend_map[DRY] = "fake"
    dist.init_process_group("fake", rank=rank, world_size=world, store=fake_pg.FakeStore())
    undo.callback(dist.destroy_process_group)


def _patches(capability: tuple[int, int]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the attributes to patch as (owner, name, value)."""
    from torch.distributed.pipelining import schedules

    # torch.tensor(…, device=…) must create the tensor on the CPU and move it: the device has no memory to write to.
    yield FakeTensorMode, "avoid_device_init", property(lambda _: True)
    yield torch.Tensor, "record_stream", lambda *_: None
    yield torch.accelerator, "current_stream", lambda *_: Stream()
    yield dist, "new_group", _fake_group(dist.new_group)
    # From torch 2.12 on, pipeline stages first exchange whether shapes are known; no peer would answer here.
    pipeline: Any = schedules._PipelineSchedule
    if hasattr(pipeline, "_warmup_p2p"):
        yield pipeline, "_warmup_p2p", assume_static_shapes
    if capability == CPU:
        yield schedules, "_batch_p2p", _keep_sent_tensors(schedules._batch_p2p)


class _PendingSend:
    """Keeps sent tensors alive: gloo does while the work handle lives, NCCL until the data has arrived."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None: ...


def _keep_sent_tensors(batch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def send(operations: list[Any], desc: str | None = None) -> list[Any]:
        works = batch(operations, desc)
        return [*works, _PendingSend([one.tensor for one in operations])] if operations else works

    return send


def _fake_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Create CPU groups with the fake backend too."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": None})

    return fake


def assume_static_shapes(schedule: Any, stages: Any, *_: Any) -> None:
    """Skip the exchange of whether shapes are known: they are, and no peer would answer."""
    from torch.distributed.pipelining import schedules

    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]  # torch 2.12 and later
