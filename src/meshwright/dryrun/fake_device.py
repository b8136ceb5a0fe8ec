"""A GPU and a cluster that do not exist: a device without memory, and a process group that nobody else is in.

Tensors on the device have shapes and formats and no data (torch's fake tensors); collectives return at once. Everything
that is changed in torch for it is changed inside `pretending` and put back after it. Only the device's name stays
registered, which cannot be undone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.engine.kernels.device_caps import CPU, DRY, PRETENDED, STEPS
from meshwright.engine.kernels.dry import register_operations

Seen = Callable[[Any, Any, Any, Any], None]


class Stream:
    """A queue of a device that does nothing."""

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
    """A moment on a device where everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> Event:
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Backend:
    """What torch asks of a kind of device, as `torch.cuda` answers it for NVIDIA's."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event
        self._streams = [Stream()]  # those entered, the current one last

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
    """Makes the device's name known to torch; once in a process."""
    from torch.utils import backend_registration

    # The first backward pass of a process starts a thread for each device it knows, and with such threads no ranks can
    # be forked from it. Ours needs none.
    torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    register_operations()
    backend_registration._setup_privateuseone_for_python_backend(DRY, backend_module=Backend())


@contextmanager
def pretending(
    world: int, rank: int, seen: Seen | None = None, capability: tuple[int, int] = (9, 0)
) -> Iterator[torch.device]:
    """The device of one rank among many: inside, tensors have no data and collectives no partners.

    `seen` is told every operation that is carried out there: (operation, args, kwargs, result). With the capability
    (0, 0) the device computes as a CPU does.
    """
    register_device()
    with ExitStack() as undo:
        _group(world, rank, undo)
        for owner, name, value in _changes(capability):
            undo.callback(setattr, owner, name, owner.__dict__[name] if name in vars(owner) else getattr(owner, name))
            setattr(owner, name, value)
        threads = torch.autograd.is_multithreading_enabled()
        torch.autograd.set_multithreading_enabled(False)
        undo.callback(torch.autograd.set_multithreading_enabled, threads)
        undo.callback(setattr, PRETENDED, "capability", PRETENDED.capability)
        PRETENDED.capability = capability
        undo.enter_context(NoDataMode(seen))
        yield torch.device(DRY)


@runtime_checkable
class AllocationLog(Protocol):
    """Who is told can also note an operation of many steps once, and write it again."""

    def steps(self, carry_out: Callable[[], Any]) -> tuple[Any, Any]: ...

    def steps_again(self, known: Any, result: Any) -> None: ...


class NoDataMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors on the pretended device alone: what is computed on the host is computed."""

    def __init__(self, seen: Seen | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.seen = seen
        self._inside = False  # of an operation: what torch makes of it there is not carried out one by one
        self._known: dict[Any, Any] = {}  # what operations of many steps do, by the operation and its shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:  # what a copy to the host is made of has no data either
            return self.dispatch(func, types, args, kwargs)
        if (
            FakeTensor not in types
            and not _goes_there(kwargs.get("device"))
            and not _waits_on_the_host(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        if func in STEPS:
            return self._in_steps(func, types, args, kwargs)
        result = self._at_once(func, types, args, kwargs)
        if self.seen is not None and result is not NotImplemented:
            self.seen(func, args, kwargs, result)
        return result

    def _at_once(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._inside = True
        try:
            return self.dispatch(func, types, args, kwargs)
        finally:
            self._inside = False

    def _in_steps(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """An operation of ours, step by step; once the book knows the like of it, its entries are written again."""

        def carry_out() -> Any:
            with self:
                return STEPS[func](*args, **kwargs)

        book = getattr(self.seen, "__self__", None)
        if not isinstance(book, AllocationLog):
            return carry_out()
        like = func, _shapes(args), _shapes(tuple(kwargs.values()))
        if like not in self._known:
            result, self._known[like] = book.steps(carry_out)
            return result
        result = self._at_once(func, types, args, kwargs)
        book.steps_again(self._known[like], result)
        return result


def _shapes(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What operations of ours depend on: shapes, strides and formats of tensors, and other values as they are."""
    return tuple((one.shape, one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one for one in values)


def _goes_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DRY


def _waits_on_the_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host's memory is asked for something that has no data: weights that are kept there."""
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


def _changes(capability: tuple[int, int]) -> Iterator[tuple[Any, str, Any]]:
    """What torch does otherwise inside: (owner, name, value)."""
    from torch.distributed.pipelining import schedules

    # torch.tensor(…, device=…) makes the tensor on the host and moves it: the device has no memory to write to.
    yield FakeTensorMode, "avoid_device_init", property(lambda _: True)
    yield torch.Tensor, "record_stream", lambda *_: None
    yield torch.accelerator, "current_stream", lambda *_: Stream()
    yield dist, "new_group", _fake_group(dist.new_group)
    # From 2.12 on pipelines first ask their neighbours whether shapes are known; here they are, and nobody answers.
    pipeline: Any = schedules._PipelineSchedule
    if hasattr(pipeline, "_warmup_p2p"):
        yield pipeline, "_warmup_p2p", _shapes_are_known
    if capability == CPU:
        yield schedules, "_batch_p2p", _keeping_what_is_sent(schedules._batch_p2p)


class _Sent:
    """Keeps what is sent: gloo does as long as anybody knows of the sending, NCCL until it has arrived."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> None: ...


def _keeping_what_is_sent(batch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def sent(operations: list[Any], desc: str | None = None) -> list[Any]:
        works = batch(operations, desc)
        return [*works, _Sent([one.tensor for one in operations])] if operations else works

    return sent


def _fake_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Groups of the host, too, have nobody in them."""

    def made(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": None})

    return made


def _shapes_are_known(schedule: Any, stages: Any, *_: Any) -> None:
    from torch.distributed.pipelining import schedules

    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]  # of 2.12 and later
