"""Environment variables whose value slows a training down, hides its failures or does not parse."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshwright.clusters import Cluster
from meshwright.frameworks.allocator_options import corrected_options, invalid_option


class Variable(NamedTuple):
    """An environment variable with a value that slows a training down or breaks it."""

    name: str
    purpose: str
    bad_value: str
    is_bad: Callable[[str], bool]
    effect: str  # {link} is what connects the GPUs of a node, {reason} what is wrong with options of the allocator
    several_nodes: bool = True  # whether it matters only there
    corrected: Callable[[str], str] | None = None  # the value that was meant; None if the variable is to be unset
    stops: bool = False  # whether the training cannot start

    def effect_on(self, given: Cluster | None = None, value: str = "") -> str:
        """Return the effect of a value, with what connects the GPUs of a node directly."""
        names = {"nvlink": "NVLink", "pcie": "peer-to-peer over PCIe"}
        link = "NVLink or PCIe peer-to-peer" if given is None else names.get(given.gpu.link, "Infinity Fabric")
        return self.effect.format(link=link, reason=invalid_option(value or self.bad_value))

    def fix(self, value: str) -> str:
        """Return the line of a script that resolves it."""
        meant = self.corrected(value) if self.corrected is not None else ""
        return f"export {self.name}={meant}" if meant and not self.is_bad(meant) else f"unset {self.name}"


def bad_variables(env: Mapping[str, str], nodes: int) -> list[Variable]:
    """Return the variables of an environment that have such a value; `nodes` is 0 or 1 where one node is used."""
    found = [one for one in VARIABLES if one.name in env and one.is_bad(env[one.name].strip())]
    return [one for one in found if nodes > 1 or not one.several_nodes]


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _none_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() not in values


_on = _one_of("1", "true", "yes", "on")
_BRIDGE = re.compile(r"lo|(?:docker|virbr|veth|cni|podman)\w*")
_off = _one_of("0", "false", "no", "off")


def _on_one_machine(value: str) -> bool:
    """Return whether all interfaces of a list are of the machine itself: loopback, or bridges of containers."""
    names = [one.strip() for one in value.strip().lstrip("=").split(",") if one.strip()]
    return not value.startswith("^") and bool(names) and all(_BRIDGE.fullmatch(one) for one in names)


def _at_most(number: int) -> Callable[[str], bool]:
    return lambda value: value.strip().isdigit() and int(value) <= number


NCCL_ALGORITHMS = ("ring", "tree", "collnet", "collnetchain", "collnetdirect", "nvls", "nvlstree", "pat")
NCCL_PROTOCOLS = ("ll", "ll128", "simple")


def _choices(value: str) -> list[str]:
    """Return the names in a list of NCCL: Ring,Tree or ^Tree or allreduce:tree,ring;broadcast:ring."""
    lists = [one.rpartition(":")[2].lstrip("^") for one in value.lower().split(";")]
    return [name for names in lists for one in names.split(",") if (name := one.strip())]


def _is_unknown_algorithm(value: str) -> bool:
    return any(one not in NCCL_ALGORITHMS for one in _choices(value))


def _known_algorithms(value: str) -> str:
    """Return the list without unknown names; empty if it has several parts."""
    known = [one.strip() for one in value.split(",") if one.strip().lower() in NCCL_ALGORITHMS]
    return "" if set(value) & set(":;^") else ",".join(known)


def _is_slow_protocol(value: str) -> bool:
    """Return whether every transfer uses the protocol for small messages, or a name is unknown."""
    names = _choices(value)
    only_small = "^" not in value and bool(names) and set(names) == {"ll"}
    return only_small or any(one not in NCCL_PROTOCOLS for one in names)


_TCP = "nodes communicate over TCP sockets, not InfiniBand or RoCE"
_HANGS = "a collective that fails or times out is not aborted: the job hangs until its time limit"
_ALLOCATOR = "torch stops at the first allocation: {reason}"
_UNCOMPILED = "what is to be compiled runs as plain PyTorch: slower, with more memory"
VARIABLES = (
    Variable("NCCL_IB_DISABLE", "turns InfiniBand and RoCE off", "1", _on, _TCP),
    Variable("NCCL_NET", "chooses NCCL's network by name: IB, Socket or that of a plugin", "Socket", _one_of("socket"),
             _TCP),
    Variable("NCCL_SOCKET_IFNAME", "chooses the network interface of NCCL's sockets (ip addr lists them)", "lo",
             _on_one_machine, "it does not reach other nodes: NCCL cannot connect"),
    Variable("GLOO_SOCKET_IFNAME", "chooses the network interface of Gloo (ip addr lists them)", "lo",
             _on_one_machine, "it does not reach other nodes: Gloo cannot connect"),
    Variable("FI_PROVIDER", "chooses libfabric's network, which NCCL's plugins for EFA and Slingshot use: efa, cxi",
             "tcp", _one_of("tcp", "sockets", "tcp;ofi_rxm", "udp", "udp;ofi_rxd"),
             "NCCL's plugin for libfabric communicates over TCP or UDP, not EFA or Slingshot"),
    Variable("NCCL_NET_GDR_LEVEL", "sets how far a GPU may be from its adapter for GPUDirect RDMA: LOC, PIX, PXB, PHB, "
             "SYS", "LOC", _one_of("loc", "0"), "no GPUDirect RDMA: what is sent is copied through host memory first"),
    Variable("NCCL_CROSS_NIC", "lets rings use different adapters on different nodes: 0, 1 or 2 (NCCL decides)", "3",
             _none_of("0", "1", "2"), "NCCL has only 0, 1 and 2"),
    Variable("NCCL_ALGO", "chooses NCCL's algorithms: Ring, Tree, CollnetDirect, CollnetChain, NVLS, NVLSTree, PAT",
             "Foo", _is_unknown_algorithm, "NCCL has no such algorithm: it refuses the list or ignores it", False,
             _known_algorithms),
    Variable("NCCL_PROTO", "chooses NCCL's protocols: LL, LL128, Simple", "LL", _is_slow_protocol,
             "LL is for small messages: large ones get at most half the bandwidth; another name is unknown to NCCL",
             False),
    Variable("NCCL_P2P_DISABLE", "turns direct access between GPUs off", "1", _on,
             "the GPUs of a node communicate through host memory, not {link}", False),
    Variable("NCCL_P2P_LEVEL", "sets how far GPUs may be apart to access each other directly: LOC (never), NVL, PIX, "
             "PXB, PHB, SYS", "LOC", _one_of("loc", "0"),
             "the GPUs of a node communicate through host memory, not {link}", False),
    Variable("NCCL_SHM_DISABLE", "turns communication through shared memory off", "1", _on,
             "GPUs without peer access communicate over the network", False),
    Variable("NCCL_MAX_NCHANNELS", "is the most channels that NCCL uses, each a block of the GPU", "1", _at_most(2),
             "one or two channels reach a part of the bandwidth of NVLink or the network", False),
    Variable("NCCL_MAX_CTAS", "is the most blocks of the GPU that NCCL uses", "1", _at_most(2),
             "one or two blocks reach a part of the bandwidth of NVLink or the network", False),
    Variable("NCCL_BUFFSIZE", "is the size of NCCL's buffers in bytes (4 MiB by default)", "65536", _at_most(262144),
             "pieces of less than 256 KiB reach a part of the bandwidth", False),
    Variable("NCCL_IB_TIMEOUT", "sets how long InfiniBand waits for an answer: 4.096 µs × 2^value, 20 by default", "5",
             _at_most(13), "a congested network ends the run: an answer may take longer than 34 ms"),
    Variable("NCCL_DEBUG", "sets what NCCL prints: VERSION, WARN, INFO, TRACE", "TRACE", _one_of("trace"),
             "every rank prints a line for every call", False),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "sets what torch does with a failed collective", "0", _off, _HANGS,
             False),
    Variable("NCCL_ASYNC_ERROR_HANDLING", "is the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", _off, _HANGS,
             False),
    Variable("TORCH_NCCL_BLOCKING_WAIT", "makes the host wait for every collective", "1", _on,
             "the host waits for every collective: nothing overlaps", False),
    Variable("NCCL_BLOCKING_WAIT", "is the old name of TORCH_NCCL_BLOCKING_WAIT", "1", _on,
             "the host waits for every collective: nothing overlaps", False),
    Variable("TORCH_DISTRIBUTED_DEBUG", "makes torch check collectives: OFF, INFO, DETAIL", "DETAIL", _one_of("detail"),
             "all ranks compare their shapes before every collective", False),
    Variable("CUDA_LAUNCH_BLOCKING", "makes every kernel launch wait, to find the one that fails", "1", _on,
             "every kernel waits for the one before: nothing overlaps", False),
    Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", "turns torch's memory cache off", "1", _on,
             "every tensor is a cudaMalloc and a cudaFree, which wait for the GPU", False),
    Variable("TORCH_COMPILE_DISABLE", "turns torch.compile off", "1", _on, _UNCOMPILED, False),
    Variable("TORCHDYNAMO_DISABLE", "turns torch.compile off", "1", _on, _UNCOMPILED, False),
    Variable("CUDA_VISIBLE_DEVICES", "lists the GPUs that a process sees", "-1", _one_of("", "-1"),
             "no GPU is visible", False),
    *(Variable(name, "sets the options of torch's GPU memory allocator", "expandable_segments=True",
               lambda value: bool(invalid_option(value)), _ALLOCATOR, False, corrected_options, stops=True)
      for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")),
)  # fmt: skip
