"""Patterns in a log that show why a run ended, for any trainer."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.doctor.formats.text import Line, has_any
from meshwright.doctor.hang import global_rank
from meshwright.doctor.run import VALIDATION, Fault, OutOfMemory
from meshwright.rules.messages import search

MAX_TEXT = 300  # characters kept of a line
BEFORE = 80  # lines around the message that may hold its traceback
AFTER = 5
MESSAGE_LINES = 6
MAX_FAULTS = 64  # latest faults kept per kind: every rank may report the same
UNITS = {"B": 1 / 1024**3, "bytes": 1 / 1024**3, "KiB": 1 / 1024**2, "MiB": 1 / 1024, "GiB": 1.0, "TiB": 1024.0}

TRACEBACK, OURS = "Traceback (most recent call last)", "error: "  # prefixes of an error: Python's and ours


class FaultPattern(NamedTuple):
    """A way a run can end, and the text that shows it."""

    name: str
    regex: re.Pattern[str]
    meaning: str
    fix: tuple[str, ...]

    @property
    def has_own_diagnosis(self) -> bool:
        """Whether a diagnosis of its own reports it."""
        return self.name in ("out_of_memory", "loss_not_a_number", "loss_scale")


FAULT_PATTERNS = (
    FaultPattern(
        "out_of_memory",
        re.compile(
            r"(CUDA|HIP)( error:)? out of memory|Cuda failure .*out of memory|torch\.(cuda\.)?OutOfMemoryError"
            r"|CUBLAS_STATUS_ALLOC_FAILED"
        ),
        "the GPU ran out of memory",
        (),
    ),
    FaultPattern(
        "loss_not_a_number",
        re.compile(
            r"the (loss|gradient norm) is (nan|-?inf) in step|found NaN in local (forward|grad)|Rank \d+: found NaN"
            r"|[Uu]nexpected result (nan|-?inf)|is NaN\b.*(abort|exit|stop)"
            r"|(Error|Exception): .*\b([Ll]oss|[Gg]rad\w*)\b.{0,20}\b(is|became|was|to) ([Nn]a[Nn]|-?[Ii]nf)"
        ),
        "the run ended on a NaN or infinite loss",
        (
            "half the learning rate, or a longer warmup: optimizer.lr, schedule.warmup_steps",
            "optimizer.clip_grad=1.0 limits outlier gradients; bf16 does not overflow where fp16 does",
            "meshwright doctor LOG finds the first bad step and what came before it",
        ),
    ),
    FaultPattern(
        "loss_scale",
        re.compile(r"Current loss scale already at minimum"),
        "the run ended because the fp16 loss scale reached its minimum",
        ("train in bf16: precision.compute=bf16", "half the learning rate, or a longer warmup"),
    ),
    FaultPattern(
        "node_failure",
        re.compile(r"DUE TO NODE FAILURE|[Nn]ode failure on |\bNODE_FAIL\b|Node \S+ not responding"),
        "a node failed, and the scheduler ended the run",
        (
            "scontrol show node NODE and sinfo -R show the reason",
            "sbatch --exclude=NODE until the node is repaired",
            "restart the run from its last checkpoint; SLURM requeues a job with --requeue by itself",
        ),
    ),
    FaultPattern(
        "time_limit",
        re.compile(r"DUE TO TIME LIMIT|has exceeded its time limit|\bDUE TO TIMEOUT\b"),
        "the scheduler ended the run at its time limit",
        ("restart the run from its last checkpoint", "request more time from the scheduler"),
    ),
    FaultPattern(
        "preemption",
        re.compile(r"DUE TO PREEMPTION|Shutdown requested at step \d+ — saving emergency checkpoint"),
        "the scheduler preempted the run: another job needed its nodes",
        (
            "restart the run from its last checkpoint; SLURM requeues it if PreemptMode=REQUEUE",
            "use a partition or QOS that is not preempted",
        ),
    ),
    FaultPattern(
        "host_memory",
        re.compile(
            r"oom-kill|Out of memory: Killed process|Detected \d+ oom[-_]kill|OOM Killed|DataLoader worker .* is killed"
            r"|\(SIGKILL\)|exitcode\s*: -9\b|Cannot allocate memory|srun: error: \S+: tasks? [\d,-]+: Out Of Memory"
            r"|Exceeded (?:job|step) memory limit|\bOUT_OF_MEMORY\b"
        ),
        "the host ran out of memory, or a rank was killed for another reason",
        ("data.workers=0", "layout.offload=none", "run fewer ranks per node"),
    ),
    FaultPattern(
        "hang",
        re.compile(
            r"Watchdog caught collective operation timeout|collective operation timeout|hangs in step"
            r"|Timed out waiting \d+ms|wait timeout after|NCCL health check failed at step"
            r"|failed to pass monitoredBarrier|watchdog got stuck for \d+ seconds|[Hh]eartbeat monitor timed out"
        ),
        "a collective timed out: some ranks never reached it",
        ("check the rank that lags behind", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 records the last collectives"),
    ),
    FaultPattern(
        "network",
        re.compile(
            r"ncclRemoteError|ncclSystemError|NCCL WARN .*(failed|error|[Tt]imed? ?out|refused|reset)|ibv_poll_cq"
            r"|Connection reset by peer|Got completion (from peer|with error)|Connection closed by remote peer"
            r"|ncclInternalError|NET/IB\b.*async fatal|ibv_\w+ failed|no socket interface found"
        ),
        "the network between ranks failed",
        ("NCCL_DEBUG=INFO names the device", "exclude the node that it names"),
    ),
    FaultPattern(
        "gpu_fault",
        re.compile(
            r"uncorrectable ECC|NVRM: Xid|CUDA error: (an illegal memory|unspecified launch|device-side assert)"
            r"|fallen off the bus|ncclUnhandledCudaError|NVLink [Ee]rror|[Cc]ontained ECC error"
        ),
        "a GPU failed, or a kernel crashed on it",
        ("CUDA_LAUNCH_BLOCKING=1 names the operation", "run nvidia-smi -q -d ECC on the node"),
    ),
    FaultPattern(
        "disk_full",
        re.compile(r"No space left on device|Disk quota exceeded"),
        "the disk is full",
        ("free space, then restart the run", "checkpoint.keep=1"),
    ),
    FaultPattern(
        "scheduler",
        re.compile(r"CANCELLED AT .* DUE TO "),
        "the scheduler ended the run",
        ("restart the run from its last checkpoint", "the message names the reason; sacct -j JOB shows the state"),
    ),
    FaultPattern(
        "cancelled",
        re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ (?:BY \S+ )?\*\*\*|CANCELLED by \d+"),
        "a user or an administrator cancelled the run",
        ("restart the run from its last checkpoint", "sacct -j JOB -o State%40 shows who cancelled it"),
    ),
    FaultPattern(
        "terminated",
        re.compile(r"Received (?:15|SIGTERM) death signal|Process \d+ got signal: 15\b"),
        "the run received SIGTERM: it was preempted, cancelled or at its time limit",
        ("restart the run from its last checkpoint", "sacct -j JOB -o State%40 shows why the scheduler ended it"),
    ),
    FaultPattern(
        "error",
        re.compile(rf"^\s*(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?::|$)|^{OURS}"),
        "the run ended with an error",
        ("read the traceback above that line",),
    ),
)
AMBIGUOUS = ("network", "scheduler", "time_limit", "preemption", "cancelled", "terminated", "node_failure", "error")
"""Completed runs can print these while they shut down."""
SCHEDULER = ("time_limit", "preemption", "cancelled", "terminated", "scheduler")
"""Ends by the scheduler: errors after them are consequences."""
NODE = re.compile(r"[Nn]ode failure on ([\w.,\[\]-]+\w\]?)|Node (\S+) not responding")
PEER = re.compile(r"remote peer ([A-Za-z][\w.-]*?)<")
STEP_NODE = re.compile(r"\*\*\* STEP \S+ ON (\S+) CANCELLED")

HINTS = (
    "ut of memory", "OutOfMemory", "ALLOC_FAILED", "NaN", "the loss is", "the gradient norm is", "nexpected result",
    "oom", "OOM", "is killed", "SIGKILL", "exitcode", "annot allocate", "timeout", "hangs in", "Timed out", "nccl",
    "NCCL", "ibv_", "onnection reset", "emote peer", "ompletion from peer", "ompletion with", "fallen off", "NVLink",
    "NET/IB", "no socket", "ECC", "Xid", "CUDA error", "No space left", "quota", "Shutdown requested",
    "DUE TO", "CANCELLED", "ode failure", "NODE_FAIL", "not responding", "time limit", "Out Of Memory", "emory limit",
    "OUT_OF_MEMORY", "monitoredBarrier", "loss scale already", "death signal", "got signal", "eartbeat monitor",
    "Error", "Exception", OURS, TRACEBACK,
)  # fmt: skip
"""Every line that matches a pattern contains one of these; checked first because it is much faster."""

MEMORY = (
    ("wanted", re.compile(r"Tried to allocate ([\d.]+) (\w+)")),
    ("capacity", re.compile(r"total capacity of ([\d.]+) (\w+)|([\d.]+) (\w+) total capacity")),
    ("free", re.compile(r"of which ([\d.]+) (\w+) is free|([\d.]+) (\w+) free")),
    ("in_use", re.compile(r"this process has ([\d.]+) (\w+) memory in use|([\d.]+) (\w+) reserved in total")),
    ("allocated", re.compile(r"([\d.]+) (\w+) is allocated by PyTorch|([\d.]+) (\w+) already allocated")),
    ("unused", re.compile(r"([\d.]+) (\w+) is reserved by PyTorch but unallocated")),
)
"""The figures of torch's message, in the formats of several versions."""

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
"""The part of memory that grows in some code, matched against the traceback from its end."""


def find(lines: Sequence[Line], steps_by_line: Sequence[tuple[int, int]] = (), file: str = "") -> Iterator[Fault]:
    """Yield every fault in a log in order; equal lines from different ranks are separate faults."""
    indices: dict[str, deque[int]] = {one.name: deque(maxlen=MAX_FAULTS) for one in FAULT_PATTERNS}
    failing = False
    unproven: deque[int] = deque(maxlen=MAX_FAULTS)  # errors without a traceback: some are only logged
    for index, line in enumerate(lines):
        if not has_any(line.text, HINTS):
            continue
        failing = failing or TRACEBACK in line.text
        pattern = next((one for one in FAULT_PATTERNS if one.regex.search(line.text)), None)
        if pattern is not None and (failing or pattern.name != "error" or line.text.startswith(OURS)):
            indices[pattern.name].append(index)
        elif pattern is not None and not steps_by_line:
            unproven.append(index)
    if not any(indices.values()):
        indices["error"].extend(index for index in unproven if search_sure(_message(lines, index)))
    for index, name in sorted((index, name) for name, some in indices.items() for index in some):
        line, is_memory = lines[index], name == "out_of_memory"
        context = [one.text for one in lines[max(0, index - BEFORE) : index + AFTER]]
        yield Fault(
            name=name,
            line=line.number,
            text=line.text.strip()[:MAX_TEXT],
            file=file,
            step=_before(steps_by_line, line.number),
            context=_message(lines, index),
            prefix=line.prefix,
            rank=global_rank(line),
            where=_part_of_memory(context) if is_memory else "",
            memory=out_of_memory(" ".join(one.text for one in lines[index : index + AFTER])) if is_memory else None,
        )


def _message(lines: Sequence[Line], index: int) -> str:
    """Return a line and those after it of the same rank: a message may have several lines."""
    rank = lines[index].rank
    return "\n".join(one.text for one in lines[index : index + MESSAGE_LINES] if one.rank == rank)


def failed_nodes(found: Sequence[Fault]) -> tuple[str, ...]:
    """Return the nodes that failure messages name; a step's message names the node that it ended on."""
    texts = [one.text for one in found if one.name == "node_failure"]
    named = [match[1] or match[2] for text in texts if (match := NODE.search(text))]
    ended = [match[1] for text in texts if (match := STEP_NODE.search(text))]
    return tuple(dict.fromkeys(named or ended))


def lost_peers(found: Sequence[Fault]) -> tuple[str, ...]:
    """Return the nodes to which ranks lost their connections, as NCCL names them."""
    return tuple(dict.fromkeys(match[1] for one in found if (match := PEER.search(one.text))))


def pattern(name: str) -> FaultPattern:
    """Return the fault pattern with this name."""
    return next(one for one in FAULT_PATTERNS if one.name == name)


def out_of_memory(text: str) -> OutOfMemory:
    """Parse torch's out-of-memory message, in GiB; missing figures are None."""
    figures = {}
    for name, regex in MEMORY:
        found = regex.search(text)
        if found is None:
            continue
        amount, unit = [part for part in found.groups() if part is not None][:2]
        if unit in UNITS:
            figures[name] = float(amount.rstrip(".")) * UNITS[unit]
    return OutOfMemory(**figures)


VALIDATES = re.compile(
    r'File ".*", line \d+, in (?:evaluat(?:e|ion_loop)|_evaluate|prediction_step|validat(?:e|ion_step)'
    r"|evaluate_and_print_results|_run_validation_epoch)\b"
)
"""A line of a traceback in the validation of a trainer."""


def _part_of_memory(context: Sequence[str]) -> str:
    """Return the part of memory that the last recognizable line of a traceback points to; or validation."""
    start = max((index for index, text in enumerate(context) if TRACEBACK in text), default=0)
    if any(VALIDATES.search(text) for text in context[start:]):
        return VALIDATION
    for text in reversed(list(context)):
        for part, regex in PLACES:
            if regex.search(text):
                return part
    return ""


def _before(steps_by_line: Sequence[tuple[int, int]], line: int) -> int | None:
    """Return the last step logged above a line."""
    return next((step for at, step in reversed(steps_by_line) if at <= line), None)


def ends_run(text: str) -> str | None:
    """Return the finding for a line with which a scheduler or the host ends a run; None for other texts."""
    names = ("node_failure", "host_memory", *SCHEDULER)
    found = next((one for one in FAULT_PATTERNS if one.name in names and one.regex.search(text)), None)
    return None if found is None else f"run.failed-{found.name.replace('_', '-')}"


def search_sure(text: str) -> bool:
    """Return whether a text contains a known error message."""
    return any(one.sure for one in search(text))


def fix_of(finding: str) -> tuple[str, ...]:
    """Return what to do about a failure, by the id of its finding; empty for other findings."""
    name = finding.removeprefix("run.failed-").replace("-", "_").replace("loss.", "loss_")
    return next((one.fix for one in FAULT_PATTERNS if one.name == name), ())
