"""Errors that a message names by a code: NVIDIA's Xid numbers, completion states of InfiniBand, results of NCCL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from meshwright.rules.messages.message import KnownError, Message

XID_SOURCE = "NVIDIA/open-gpu-kernel-modules src/common/sdk/nvidia/inc/nverror.h"
VERBS_SOURCE = "linux-rdma/rdma-core libibverbs/verbs.h"
NCCL_SOURCE = "NVIDIA/nccl src/nccl.h.in"

_REPLACE = ("drain the node: exclude it from the next job", "nvidia-smi -q and dmesg of the node belong in the ticket")
_APPLICATION = (
    "CUDA_LAUNCH_BLOCKING=1 names the operation",
    "compute-sanitizer finds the access; one GPU that fails in every job is broken instead",
)


class Xid(NamedTuple):
    """An error of NVIDIA's driver by number: its name, what happened and what to do."""

    name: str
    cause: str
    fix: tuple[str, ...]


XIDS: dict[int, Xid] = {
    13: Xid("Graphics Engine Exception", "a kernel raised an exception, mostly an access out of bounds", _APPLICATION),
    31: Xid("MMU Fault", "a kernel used an address that is not mapped: mostly a bug of the program", _APPLICATION),
    43: Xid("GPU stopped processing", "the program's channel was reset after an error of the program", _APPLICATION),
    45: Xid(
        "Preemptive Channel Removal",
        "the driver ended the program's work: it was killed, or an earlier Xid on this GPU made it",
        ("read the Xid before it", "look for the signal that ended the process"),
    ),
    48: Xid("Double Bit ECC Error", "GPU memory has an error that ECC cannot correct", ("reset the GPU", *_REPLACE)),
    62: Xid("Internal micro-controller halt", "the GPU's own controller stopped", ("reset the GPU", *_REPLACE)),
    63: Xid(
        "Row remapper: recorded",
        "the GPU replaced a bad row of its memory; it takes effect at the next reset, and the data is not lost",
        ("let the run end, then reset the GPU", "many of them on one GPU: have it replaced"),
    ),
    64: Xid("Row remapper: failed", "a bad row of GPU memory could not be replaced", ("reset the GPU", *_REPLACE)),
    74: Xid(
        "NVLink Error",
        "a link between GPUs or to an NVSwitch failed",
        ("nvidia-smi nvlink --status and -e show the link", "reset the GPUs of the node together", *_REPLACE),
    ),
    79: Xid(
        "GPU has fallen off the bus",
        "the GPU no longer answers on PCIe: power, heat, its slot or the GPU itself",
        ("reboot the node: a reset cannot reach the GPU", *_REPLACE),
    ),
    92: Xid("High single-bit ECC error rate", "ECC corrects many errors of this GPU's memory", ("plan a replacement",)),
    94: Xid(
        "Contained ECC Error",
        "an uncorrectable memory error hit this program only; other programs on the GPU are not affected",
        ("restart the run from its last checkpoint", "reset the GPU before the next job"),
    ),
    95: Xid(
        "Uncontained ECC Error",
        "an uncorrectable memory error may have hit every program on the GPU",
        ("restart from a checkpoint after a reset of the GPU, or a reboot", *_REPLACE),
    ),
    109: Xid("Context Switch Timeout", "the GPU did not switch between programs in time", ("reset the GPU", *_REPLACE)),
    119: Xid("GSP RPC Timeout", "the GPU's system processor does not answer the driver", ("reset the GPU", *_REPLACE)),
    120: Xid("GSP Error", "the GPU's system processor failed", ("reset the GPU", *_REPLACE)),
    121: Xid("C2C Link Error", "the link between CPU and GPU had an error", ("reset the GPU", *_REPLACE)),
    140: Xid("Unrecovered ECC Error", "a memory error could not be contained", ("reset the GPU", *_REPLACE)),
    154: Xid(
        "GPU Recovery Action Changed",
        "the driver states what the GPU needs after an earlier Xid: a reset, a drain or a reboot",
        ("do what the message names", "read the Xid before it"),
    ),
}

_LINK = ("ibstat and the switch's counters show the port", "NCCL_DEBUG=INFO names the device", "exclude the node")
CODE_ERRORS: dict[str, KnownError] = {
    **{
        f"error.xid-{number}": KnownError(f"Xid {number}, {one.name}: {one.cause}", one.fix, fault="gpu_fault")
        for number, one in XIDS.items()
    },
    "error.ib-retries": KnownError(
        "InfiniBand status 12: the other side did not acknowledge after all retries; its rank has ended, or a link, "
        "switch or path between them is down",
        (
            "find the rank that ended first: the others only lost their peer",
            *_LINK,
            "NCCL_IB_TIMEOUT=22 waits longer on a busy network",
        ),
        fault="network",
    ),
    "error.ib-flushed": KnownError(
        "InfiniBand status 5: requests were dropped because the connection had failed already",
        ("read the first error of this connection", *_LINK),
        fault="network",
    ),
    "error.ib-access": KnownError(
        "InfiniBand refused access to memory: GPUDirect RDMA is not set up, or a buffer was freed",
        ("lsmod | grep nvidia_peermem on every node", "NCCL_NET_GDR_LEVEL=LOC copies through host memory, slower"),
        fault="network",
    ),
    "error.ib-not-ready": KnownError(
        "InfiniBand status 13: the receiver had no buffer for too long; its rank hangs or has ended",
        ("find the rank that stopped first", *_LINK),
        fault="network",
    ),
    "error.nccl-system": KnownError(
        "a system call of NCCL failed: a socket, memory, or a library such as libibverbs; or a rank ended",
        (
            "NCCL_DEBUG=INFO prints the call above this line",
            "NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose the network if several exist",
            "ulimit -l unlimited for InfiniBand; /dev/shm of at least 1 GB in containers",
        ),
        fault="network",
    ),
    "error.nccl-remote": KnownError(
        "another rank ended, or the network to it failed: this rank only noticed",
        ("find the rank that ended first and read its log", *_LINK),
        fault="network",
    ),
    "error.nccl-cuda": KnownError(
        "a CUDA call of NCCL failed: the GPU has no memory left for NCCL's buffers, failed, or an earlier kernel did",
        (
            "NCCL_DEBUG=WARN prints the CUDA error above this line",
            "out of memory there: leave about 1 GiB of the GPU free",
            "dmesg | grep Xid on the node shows whether the GPU failed",
        ),
        fault="gpu_fault",
    ),
    "error.nccl-internal": KnownError(
        "a check inside NCCL failed: mostly ranks that call different collectives, or nodes with different versions",
        ("NCCL_DEBUG=INFO prints the check", "use the same NCCL, driver and topology on all nodes"),
        fault="network",
    ),
    "error.nccl-usage": KnownError(
        "a call of NCCL is not allowed: mostly two ranks on one GPU, or ranks that call different collectives",
        (
            "each rank must call torch.cuda.set_device(LOCAL_RANK) before the first collective",
            "NCCL_DEBUG=WARN prints the reason",
        ),
        fault="network",
    ),
}
"""Id → cause and fix."""

_IB_STATUS = {
    4: "error.ib-access",
    5: "error.ib-flushed",
    10: "error.ib-access",
    12: "error.ib-retries",
    13: "error.ib-not-ready",
}
_NCCL_RESULTS = {
    "ncclunhandledcudaerror": "error.nccl-cuda",
    "ncclsystemerror": "error.nccl-system",
    "ncclinternalerror": "error.nccl-internal",
    "ncclinvalidusage": "error.nccl-usage",
    "ncclinvalidargument": "error.nccl-usage",
    "ncclremoteerror": "error.nccl-remote",
}
_XID = re.compile(r"(?<![A-Za-z])Xid\s*(?:error\s*)?(?:\([^)]*\))?\s*[:=#]?\s*(\d{1,3})\b", re.IGNORECASE)
_IB = re.compile(r"Got completion\b.*?\b(?:status=(?:IBV_WC_\w+\()?|error )(\d+)", re.IGNORECASE)
_NCCL = re.compile(r"\bnccl(?:\w+Error|InvalidUsage|InvalidArgument)\b", re.IGNORECASE)


_NOT_A_NUMBER = re.compile(
    r"""(?:\b|['"])(?:\w*loss|\w*grad(?:ient)?s?(?:[_ ]norm)?)['"]?\s*(?:[:=]|is|are|was|became|to be)\s*['"]?[-+]?"""
    r"""(?:nan|inf(?:inity)?)(?:\b|['"])""",
    re.IGNORECASE,
)
TRAINER_SOURCE = "huggingface/transformers src/transformers/trainer_callback.py"


def _of_nan(found: re.Match[str]) -> Message:
    return Message(found[0].strip(), TRAINER_SOURCE, ("loss.not-a-number",))


def _of_xid(found: re.Match[str]) -> Message:
    number = int(found[1])
    name = XIDS[number].name if number in XIDS else "GPU error"
    return Message(f"Xid {number}: {name}", XID_SOURCE, (f"error.xid-{number}",) if number in XIDS else _GPU)


def _of_infiniband(found: re.Match[str]) -> Message | None:
    id = _IB_STATUS.get(int(found[1]))
    return None if id is None else Message(f"Got completion with status {found[1]}", VERBS_SOURCE, (id,))


def _of_nccl(found: re.Match[str]) -> Message | None:
    id = _NCCL_RESULTS.get(found[0].lower())
    return None if id is None else Message(found[0], NCCL_SOURCE, (id,))


_GPU = ("run.failed-gpu-fault",)
SPECIFIC: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Message | None]], ...] = (
    (_XID, _of_xid),
    (_IB, _of_infiniband),
    (_NOT_A_NUMBER, _of_nan),
)
GENERAL = ((_NCCL, _of_nccl),)
"""A result of NCCL says less than the message beside it."""


def coded(line: str, patterns: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Message | None]], ...],
          ) -> Iterator[Message]:  # fmt: skip
    """Yield the errors that a line names by code."""
    for pattern, message in patterns:
        for found in pattern.finditer(line):
            if (one := message(found)) is not None:
                yield one
