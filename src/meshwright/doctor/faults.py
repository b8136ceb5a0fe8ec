"""Words that tell why a run ended, in the log of any trainer."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from meshwright.doctor.formats.text import Line, has_any
from meshwright.doctor.run import Fault, OutOfMemory

SHOWN = 300  # characters of a line that are kept
AROUND = 80  # lines before the words in which a traceback may stand, and 5 behind
BEHIND = 5
MOST = 64  # of one kind that are kept, the last: every rank may say the same
UNITS = {"B": 1 / 1024**3, "bytes": 1 / 1024**3, "KiB": 1 / 1024**2, "MiB": 1 / 1024, "GiB": 1.0, "TiB": 1024.0}

TRACEBACK, OURS = "Traceback (most recent call last)", "error: "  # what stands before an error, theirs and ours


class Sign(NamedTuple):
    """A kind of end, by the words it is known from."""

    name: str
    words: re.Pattern[str]
    meaning: str
    fix: tuple[str, ...]

    @property
    def told_elsewhere(self) -> bool:
        """Whether a finding of its own speaks of it."""
        return self.name in ("out_of_memory", "loss_not_a_number")


SIGNS = (
    Sign(
        "out_of_memory",
        re.compile(
            r"(CUDA|HIP)( error:)? out of memory|Cuda failure .*out of memory|torch\.(cuda\.)?OutOfMemoryError"
            r"|CUBLAS_STATUS_ALLOC_FAILED"
        ),
        "the GPU ran out of memory",
        (),
    ),
    Sign(
        "loss_not_a_number",
        re.compile(
            r"the (loss|gradient norm) is (nan|-?inf) in step|found NaN in local (forward|grad)|Rank \d+: found NaN"
            r"|[Uu]nexpected result (nan|-?inf)|is NaN\b.*(abort|exit|stop)",
        ),
        "a loss that is not a number ended the run",
        (),
    ),
    Sign(
        "host_memory",
        re.compile(
            r"oom-kill|Out of memory: Killed process|Detected \d+ oom[-_]kill|OOM Killed|DataLoader worker .* is killed"
            r"|\(SIGKILL\)|exitcode\s*: -9\b|Cannot allocate memory",
        ),
        "the machine ran out of memory, or killed a rank for another reason",
        ("data.workers=0", "layout.offload=none", "fewer ranks on the machine"),
    ),
    Sign(
        "hang",
        re.compile(
            r"Watchdog caught collective operation timeout|collective operation timeout|hangs in step"
            r"|Timed out waiting \d+ms|wait timeout after",
        ),
        "a rank waited for others that never came",
        ("look at the rank that is behind", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 records the collectives"),
    ),
    Sign(
        "network",
        re.compile(
            r"ncclRemoteError|ncclSystemError|NCCL WARN .*(failed|error|[Tt]imed? ?out|refused|reset)|ibv_poll_cq"
            r"|Connection reset by peer|Got completion from peer",
        ),
        "the network between ranks failed",
        ("NCCL_DEBUG=INFO names the device", "leave out the node that it names"),
    ),
    Sign(
        "gpu_fault",
        re.compile(
            r"uncorrectable ECC|NVRM: Xid|CUDA error: (an illegal memory|unspecified launch|device-side assert)"
        ),
        "a GPU failed, or a kernel went wrong on it",
        ("CUDA_LAUNCH_BLOCKING=1 names the operation", "run nvidia-smi -q -d ECC on the node"),
    ),
    Sign(
        "disk_full",
        re.compile(r"No space left on device|Disk quota exceeded"),
        "the disk is full",
        ("free space, then start the run again", "checkpoint.keep=1"),
    ),
    Sign(
        "scheduler",
        re.compile(r"CANCELLED AT .* DUE TO |DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE)"),
        "the scheduler ended the run",
        ("start it again from its last checkpoint", "ask the scheduler for more time"),
    ),
    Sign(
        "error",
        re.compile(rf"^\s*(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?::|$)|^{OURS}"),
        "the run ended with an error",
        ("read the traceback above that line",),
    ),
)
UNSURE = ("network", "scheduler", "error")
"""Words of these are also said by runs that are done and go down."""

HINTS = (
    "ut of memory", "OutOfMemory", "ALLOC_FAILED", "NaN", "the loss is", "the gradient norm is", "nexpected result",
    "oom", "OOM", "is killed", "SIGKILL", "exitcode", "annot allocate", "timeout", "hangs in", "Timed out", "nccl",
    "NCCL", "ibv_", "onnection reset", "ompletion from peer", "ECC", "Xid", "CUDA error", "No space left", "quota",
    "DUE TO", "Error", "Exception", OURS, TRACEBACK,
)  # fmt: skip
"""One of these stands in every line that is a sign."""

MEMORY = (
    ("wanted", re.compile(r"Tried to allocate ([\d.]+) (\w+)")),
    ("capacity", re.compile(r"total capacity of ([\d.]+) (\w+)|([\d.]+) (\w+) total capacity")),
    ("free", re.compile(r"of which ([\d.]+) (\w+) is free|([\d.]+) (\w+) free")),
    ("in_use", re.compile(r"this process has ([\d.]+) (\w+) memory in use|([\d.]+) (\w+) reserved in total")),
    ("allocated", re.compile(r"([\d.]+) (\w+) is allocated by PyTorch|([\d.]+) (\w+) already allocated")),
    ("unused", re.compile(r"([\d.]+) (\w+) is reserved by PyTorch but unallocated")),
)
"""The figures of torch's message, in the words of its versions."""

PLACES = (
    ("logits", re.compile(r"cross_entropy|logits|lm_head|output_layer|log_softmax|loss_fn|/losses?\.py")),
    ("optimizer", re.compile(r"optimizer\.step|optim/|exp_avg|_init_group|adam|multi_tensor|in step \d+, optimizer")),
    ("buffers", re.compile(r"all_gather|reduce_scatter|foreach_all_gather|param_and_grad_buffer|a2a|all_to_all")),
    ("weights", re.compile(r"load_state_dict|from_pretrained|to_empty|init_weights|in step \d+, build")),
    (
        "activations",
        re.compile(r"backward|forward|attention|mlp|checkpoint\.py|in step \d+, forward_backward|layernorm"),
    ),
)
"""Which part of memory grows where: the first whose words stand in the traceback nearest to its end."""


def find(lines: Sequence[Line], steps_by_line: Sequence[tuple[int, int]] = (), file: str = "") -> Iterator[Fault]:
    """Every fault in a log, in order; what several ranks say alike is told once for each line."""
    places: dict[str, deque[int]] = {one.name: deque(maxlen=MOST) for one in SIGNS}
    failing = False
    for place, line in enumerate(lines):
        if not has_any(line.text, HINTS):
            continue
        failing = failing or TRACEBACK in line.text
        sign = next((one for one in SIGNS if one.words.search(line.text)), None)
        if sign is not None and (failing or sign.name != "error" or line.text.startswith(OURS)):
            places[sign.name].append(place)
    for place, name in sorted((place, name) for name, some in places.items() for place in some):
        line, is_memory = lines[place], name == "out_of_memory"
        near = [one.text for one in lines[max(0, place - AROUND) : place + BEHIND]]
        yield Fault(
            name=name,
            line=line.number,
            text=line.text.strip()[:SHOWN],
            file=file,
            step=_before(steps_by_line, line.number),
            where=_place(near) if is_memory else "",
            memory=out_of_memory(" ".join(one.text for one in lines[place : place + BEHIND])) if is_memory else None,
        )


def sign(name: str) -> Sign:
    """The kind of end of that name."""
    return next(one for one in SIGNS if one.name == name)


def out_of_memory(text: str) -> OutOfMemory:
    """The figures in torch's words, in GiB; those it does not tell are None."""
    figures = {}
    for name, words in MEMORY:
        found = words.search(text)
        if found is None:
            continue
        amount, unit = [part for part in found.groups() if part is not None][:2]
        if unit in UNITS:
            figures[name] = float(amount.rstrip(".")) * UNITS[unit]
    return OutOfMemory(**figures)


def _place(near: Iterable[str]) -> str:
    """The part of memory that the last telling line of a traceback speaks of."""
    for text in reversed(list(near)):
        for part, words in PLACES:
            if words.search(text):
                return part
    return ""


def _before(steps_by_line: Sequence[tuple[int, int]], line: int) -> int | None:
    """The last step told above a line."""
    return next((step for at, step in reversed(steps_by_line) if at <= line), None)
