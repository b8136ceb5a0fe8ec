"""A process group without peers whose collectives take the time of a simulated network.

A collective sends nothing. Its outputs are filled from this rank's own data, so that later kernels compute with values
of usual size: a gathered tensor repeats the rank's shard, a reduced one stays as it is, a received one gets random
values. Kernels on zeros would draw less power and run faster than in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from meshwright.dryrun.fake_device import assume_static_shapes
from meshwright.rehearsal.delays import Collective, FinishedWork, HostDelays, StreamDelays
from meshwright.rehearsal.network import DATA_PARALLEL, Network
from meshwright.rehearsal.peers import Peers

BACKEND = "simulated"
RANDOM_VALUES = 1 << 20  # random numbers kept per dtype for received tensors
CONTROL_BYTES = 1024
HBM_SHARE = 0.8  # of the memory bandwidth that fills reach
REPORTED_AXES = {
    "tp": "tp",
    "sequence": "tp",
    "cp": "cp",
    "ep": "ep",
    "experts": "ep",
    "etp": "ep",
    "pp": "pp",
    "fsdp": "dp",
    "efsdp": "dp",
    "dp_replicate": "dp",
    "dp": "dp",
}  # others: control


class Simulation:
    """The network that the groups of this process use, what of it is switched off, and what was recorded."""

    def __init__(
        self,
        network: Network,
        device: torch.device,
        slowdown: float = 1.0,
        hbm_bytes_s: float = 1e12,
        peers: Peers | None = None,
    ) -> None:
        """`slowdown`: factor from times on this GPU to times on the cluster's, by which delays are divided."""
        self.network, self.device, self.slowdown = network, device, slowdown
        self.delays: StreamDelays | HostDelays = (
            StreamDelays(HBM_SHARE * hbm_bytes_s)
            if device.type == "cuda" and not network.blocks_host
            else HostDelays(device.type == "cuda", peers)
        )
        self.axes: dict[str, tuple[str, int]] = {}  # group name -> mesh axis, size
        self.silent: frozenset[str] = frozenset()  # reported axes whose collectives take no time
        self.all_silent = False
        self.imbalance = 1.0  # tokens that this rank's experts receive over those that it sends
        self.recording: list[tuple[str, str, int, Any, Any]] | None = None  # axis, kind, bytes, start, end
        self.totals: dict[tuple[str, str], list[float]] = {}  # axis, kind -> count, bytes, seconds
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._seconds: dict[tuple[str, int, str], float] = {}
        self._random: dict[torch.dtype, torch.Tensor] = {}

    def collective(
        self,
        group: SimulatedGroup,
        kind: str,
        size: int,
        fill: Callable[[], int],
        result: Any,
        on: torch.device,
        is_async: bool,
    ) -> FinishedWork:
        """Place a collective of `size` bytes; `fill` writes its outputs and returns the bytes written."""
        if on.type != self.device.type or group.size() == 1:
            fill()
            return FinishedWork(result)
        name = group.group_name
        axis = self.axes.get(name, ("other", 0))[0]
        # Losses and gradient norm are summed over all ranks; the group of the shards may be the same.
        is_control = kind == "all_reduce" and size <= CONTROL_BYTES and axis in DATA_PARALLEL
        reported = "control" if is_control else reported_axis(axis)
        seconds, members = self._seconds.get((kind, size, name)), self._members(group, name)
        if seconds is None:
            seconds = self.network.seconds(kind if kind != "receive" else "send", size, members, axis)
            self._seconds[kind, size, name] = seconds
        if self.all_silent or reported in self.silent:
            seconds = 0.0
        entry = self.totals.setdefault((reported, kind), [0, 0, 0.0])
        entry[0], entry[1], entry[2] = entry[0] + 1, entry[1] + size, entry[2] + seconds
        lane = (name, kind if kind in ("send", "receive") else "")
        what, record = Collective(kind, size, members, is_async), self.recording is not None
        work, (start, end) = self.delays.place(lane, seconds / self.slowdown, fill, result, record, what)
        if self.recording is not None:
            self.recording.append((reported, kind, size, start, end))
        return work

    def _members(self, group: SimulatedGroup, name: str) -> tuple[int, ...]:
        if name not in self._ranks:
            self._ranks[name] = tuple(sorted(dist.get_process_group_ranks(group)))
        return self._ranks[name]

    def random_like(self, tensor: torch.Tensor) -> int:
        """Fill a received tensor; return the bytes written."""
        with torch.no_grad():
            flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else None
            if not tensor.is_floating_point() or flat is None or tensor.dtype.itemsize == 1:
                tensor.detach().zero_()
                return _bytes(tensor)
            values = self._random.get(tensor.dtype)
            if values is None:
                values = torch.randn(RANDOM_VALUES, device=tensor.device).to(tensor.dtype)
                self._random[tensor.dtype] = values
            full = flat.numel() // RANDOM_VALUES
            if full:
                flat[: full * RANDOM_VALUES].view(full, RANDOM_VALUES).copy_(values.expand(full, RANDOM_VALUES))
            flat[full * RANDOM_VALUES :].copy_(values[: flat.numel() - full * RANDOM_VALUES])
        return _bytes(tensor)


def reported_axis(axis: str) -> str:
    """Return the part of a step to which the collectives of a mesh axis belong."""
    return REPORTED_AXES.get(axis, "control")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_ProcessGroup: Any = dist.ProcessGroup  # its methods have names and overloads of several versions of torch


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group of one rank; no other rank exists."""

    simulation: Simulation  # set while a rank is simulated

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._simulated = rank, size

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._simulated[0]

    def size(self) -> int:
        """Return the ranks of the group."""
        return self._simulated[1]

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the backend's name."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """The registered name of the group."""
        found: str = dist.distributed_c10d._world.pg_names[self]
        return found

    def _place(
        self, kind: str, size: int, fill: Callable[[], int], result: Any, on: torch.Tensor, opts: Any = None
    ) -> FinishedWork:
        is_async = bool(getattr(opts, "asyncOp", True))
        return self.simulation.collective(self, kind, size, fill, result, on.device, is_async)

    def allreduce(self, tensors: Any, opts: Any = None) -> FinishedWork:
        """Leave the tensors as they are."""
        return self._place("all_reduce", sum(map(_bytes, tensors)), _nothing, tensors, tensors[0], opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> FinishedWork:
        """Leave the tensors as they are."""
        return self._place("broadcast", sum(map(_bytes, tensors)), _nothing, tensors, tensors[0], opts)

    def all_gather_single(self, output: torch.Tensor, part: torch.Tensor, opts: Any = None) -> FinishedWork:
        """Repeat this rank's part."""
        size = self.size()

        def fill() -> int:
            if size == 1 and output.data_ptr() == part.data_ptr():
                return 0
            with torch.no_grad():
                output.detach().view(size, -1).copy_(part.detach().reshape(1, -1).expand(size, -1))
            return _bytes(output)

        return self._place("all_gather", _bytes(output), fill, [output], output, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, parts: Any, opts: Any = None) -> FinishedWork:
        """Gather several tensors."""
        works = [self.all_gather_single(output, part) for output, part in zip(outputs, parts, strict=True)]
        return works[-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, parts: Any, opts: Any = None) -> FinishedWork:
        """Copy this rank's part to all outputs."""

        def fill() -> int:
            with torch.no_grad():
                for output in outputs[0]:
                    output.detach().copy_(parts[0].detach())
            return sum(map(_bytes, outputs[0]))

        return self._place("all_gather", sum(map(_bytes, outputs[0])), fill, outputs, parts[0], opts)

    def reduce_scatter_single(self, output: torch.Tensor, full: torch.Tensor, opts: Any = None) -> FinishedWork:
        """Keep this rank's part of the input."""

        def fill() -> int:
            with torch.no_grad():
                part = full.detach().reshape(self.size(), -1)[self.rank()]
                output.detach().view(-1).copy_(part)
            return _bytes(output)

        return self._place("reduce_scatter", _bytes(full), fill, [output], full, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> FinishedWork:
        """Reduce and scatter several tensors."""
        works = [self.reduce_scatter_single(output, full) for output, full in zip(outputs, inputs, strict=True)]
        return works[-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> FinishedWork:
        """Keep this rank's part of the inputs."""

        def fill() -> int:
            with torch.no_grad():
                outputs[0].detach().copy_(inputs[0][self.rank()].detach())
            return _bytes(outputs[0])

        return self._place("reduce_scatter", sum(map(_bytes, inputs[0])), fill, outputs, outputs[0], opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        output_sizes: Any = None,
        input_sizes: Any = None,
        opts: Any = None,
    ) -> FinishedWork:
        """Receive what this rank sends: every rank sends and receives as many rows as this one sends."""

        def fill() -> int:
            with torch.no_grad():
                target, source = output.detach().reshape(-1), sent.detach().reshape(-1)
                count = min(target.numel(), source.numel())
                target[:count].copy_(source[:count])
                if not output.is_floating_point() and self.simulation.imbalance > 1:  # the number of tokens to expect
                    target.copy_((target * self.simulation.imbalance).round())
                elif count < target.numel():
                    self.simulation.random_like(target[count:])  # tokens of other ranks
            return _bytes(output)

        return self._place("all_to_all", max(_bytes(sent), _bytes(output)), fill, [output], output, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> FinishedWork:
        """Receive what this rank sends, as lists."""

        def fill() -> int:
            with torch.no_grad():
                for output, sent in zip(outputs, inputs, strict=True):
                    if output.shape == sent.shape:
                        output.detach().copy_(sent.detach())
            return sum(map(_bytes, outputs))

        return self._place("all_to_all", sum(map(_bytes, inputs)), fill, outputs, inputs[0], opts)

    def send(self, tensors: Any, to: int, tag: int = 0) -> FinishedWork:
        """Send nothing."""
        return self._place("send", sum(map(_bytes, tensors)), _nothing, tensors, tensors[0])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> FinishedWork:
        """Receive random values."""

        def fill() -> int:
            return sum(self.simulation.random_like(tensor) for tensor in tensors)

        return self._place("receive", sum(map(_bytes, tensors)), fill, tensors, tensors[0])

    def barrier(self, opts: Any = None) -> FinishedWork:
        """Wait for nobody."""
        return FinishedWork()


def _nothing() -> int:
    return 0


def _create(store: Any, rank: int, size: int, timeout: Any) -> SimulatedGroup:
    return SimulatedGroup(rank, size)


@contextmanager
def simulated_rank(world: int, rank: int, simulation: Simulation) -> Iterator[None]:
    """Be one rank of `world`: process groups exist, their collectives take the simulation's time."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    SimulatedGroup.simulation = simulation
    with ExitStack() as undo:
        for owner, name, value in _patches():
            if name in vars(owner):
                undo.callback(setattr, owner, name, vars(owner)[name])
            else:  # inherited
                undo.callback(delattr, owner, name)
            setattr(owner, name, value)
        dist.init_process_group(BACKEND, rank=rank, world_size=world, store=dist.HashStore())  # type: ignore[attr-defined]
        undo.callback(_leave)
        yield


def _leave() -> None:
    with suppress(RuntimeError):  # the process ends with its rank
        dist.destroy_process_group()


def _patches() -> Sequence[tuple[Any, str, Any]]:
    from torch._dynamo.variables import distributed
    from torch.distributed.pipelining import schedules

    found: list[tuple[Any, str, Any]] = [(dist, "new_group", _simulated_group(dist.new_group))]
    pipeline: Any = schedules._PipelineSchedule
    if hasattr(pipeline, "_warmup_p2p"):  # torch 2.12 and later: no peer would answer
        found.append((pipeline, "_warmup_p2p", assume_static_shapes))
    variable: Any = getattr(distributed, "ProcessGroupVariable", None)
    if variable is not None and hasattr(
        variable, "is_process_group"
    ):  # before 2.13 the compiler knows torch's own only
        found.append((variable, "is_process_group", staticmethod(_is_group)))
    return found


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)


def _simulated_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Create groups of other backends as simulated ones too."""

    def simulated(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": None})

    return simulated
