"""How a run fails: one error with the rank, step and fix, and no rank left waiting."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from meshwright.engine.rank_env import Launcher, Process
from meshwright.engine.stop_request import StopSignal
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    pass

T = TypeVar("T")

TRACEBACK_LINES = 8  # from the end of a traceback
MESSAGE_CHARACTERS = 600
SHOW_CURSOR = "\x1b[?25h"
FAULT_KEY = "meshwright/fault"  # in the ranks' store, set by the first rank that fails


class RunError(MeshwrightError):
    """A run started and failed (exit code 3)."""

    exit_code = 3


class StoppedError(RunError):
    """A run was preempted and has saved a checkpoint; restart to resume (exit code 75)."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later
    next_step = "resume with"  # before the fix, on the line that reports the error

    def __init__(self, reason: str, field: str = "", value: object = None, fix: Sequence[str] = ()) -> None:
        super().__init__(reason, field, value, fix or RESTART)


class RunInterruptedError(RunError):
    """A run was ended by Ctrl-C before anything was saved (exit code 130)."""

    exit_code = 128 + signal.SIGINT
    next_step = "start again with"


class Remedy(NamedTuple):
    """The meaning of a library's error message, and its fix."""

    pattern: str  # regular expression over "TypeName: message"
    meaning: str
    fix: tuple[str, ...]


LESS_GPU_MEMORY = ("layout.micro_batch_size=1", "layout.recompute=full")
LESS_HOST_MEMORY = ("data.workers=0", "layout.offload=none", "a smaller --nproc")
RESTART = ("restart the run: it resumes from the last checkpoint",)
OTHER_RANK = ("read the first error of the other rank",)

REMEDIES = (
    Remedy(
        r"^OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED", "the GPU ran out of memory", LESS_GPU_MEMORY
    ),
    Remedy(
        r"^MemoryError|Cannot allocate memory|can't allocate memory", "the machine ran out of memory", LESS_HOST_MEMORY
    ),
    Remedy(
        r"[Bb]us error|insufficient shared memory|/dev/shm",
        "the shared memory for data loading is too small",
        ("data.workers=0", "a larger /dev/shm (docker run --shm-size=16g)"),
    ),
    Remedy(r"No space left on device|Disk quota exceeded", "the disk is full", ("free space, then restart the run",)),
    Remedy(
        r"device-side assert|index out of range in self",
        "an index is out of range, usually a token id beyond the vocabulary",
        ("data.tokenizer=the model's tokenizer", "CUDA_LAUNCH_BLOCKING=1 names the operation"),
    ),
    Remedy(
        r"[Tt]imed out waiting|[Tt]imeout waiting|collective operation timeout|Wait timeout",
        "another rank did not respond in time",
        OTHER_RANK,
    ),
    Remedy(
        r"Connection (closed|reset|refused)|Broken pipe|^DistNetworkError|remote process exited|ncclRemoteError"
        r"|NCCL communicator was aborted|socketPoll",
        "another rank exited",
        OTHER_RANK,
    ),
    Remedy(
        r"'_input_metadata' is invalid",
        "this torch cannot compute weight gradients separately from input gradients, which zero-bubble schedules need",
        ("torch 2.13 or newer", "layout.pp_schedule=1f1b"),
    ),
    Remedy(
        r"Duplicate GPU detected",
        "two ranks use the same GPU",
        ("start at most one rank per GPU", "srun --gpus-per-task=1"),
    ),
)

SIGNALS = {
    signal.SIGKILL: ("killed, usually because the machine ran out of memory", LESS_HOST_MEMORY),
    signal.SIGBUS: ("ended, usually because /dev/shm is full", ("data.workers=0", "a larger /dev/shm")),
    signal.SIGTERM: ("stopped from outside", RESTART),
    signal.SIGSEGV: ("ended by a crash in native code", ("kernels.compile=false", "PYTHONFAULTHANDLER=1 shows where")),
    signal.SIGABRT: ("aborted by native code", ("read its output above",)),
}


def explain(error: BaseException, process: Process) -> MeshwrightError:
    """Return a rank's exception as an error with meaning and fix; MeshwrightErrors are returned unchanged."""
    if isinstance(error, MeshwrightError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return interrupted()
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    remedy = _remedy(text)
    meaning = f"{remedy.meaning}: " if remedy else ""
    where = "".join(f" {note}" for note in getattr(error, "__notes__", ()) if note.startswith("in step"))
    shown = text if len(text) <= MESSAGE_CHARACTERS else text[:MESSAGE_CHARACTERS] + "…"
    reason = f"{named(process.rank, process.world)} failed{where}: {meaning}{shown}\n{_traceback_end(error)}"
    return RunError(reason.rstrip(), fix=remedy.fix if remedy else ())


def explain_death(rank: int, world: int, exit_code: int) -> RunError:
    """Return the error of a rank that exited without a message, by its exit code."""
    if exit_code >= 0:
        return RunError(f"{named(rank, world)} exited with code {exit_code} before it had finished")
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return RunError(f"{named(rank, world)} was ended by signal {-exit_code}")
    meaning, fix = SIGNALS.get(number, ("ended", ()))
    return RunError(f"{named(rank, world)} was {meaning} ({number.name})", fix=fix)


def interrupted() -> RunError:
    """Return the error of a run ended by Ctrl-C."""
    return RunInterruptedError("interrupted")


def stopped_early(name: str, checkpoint: int | None, fix: Sequence[str]) -> RunError:
    """Return the error of a run that a signal stopped before its first step; `checkpoint`: the newest one's step."""
    by = signal_label(name)
    if checkpoint is not None:
        return StoppedError(f"{by} before the first step; the checkpoint of step {checkpoint} is unchanged", fix=fix)
    if name == signal.SIGINT.name:
        return RunInterruptedError(f"{by} before the first step; nothing was saved", fix=fix)
    return StoppedError(f"{by} before the first step; there was nothing to save", fix=fix)


def quit_error(checkpoint: int | None, fix: Sequence[str]) -> RunError:
    """Return the error of a run whose user did not wait for its checkpoint."""
    lost = f"what was trained after step {checkpoint} is lost" if checkpoint is not None else "nothing was saved"
    return RunInterruptedError(f"interrupted (Ctrl-C pressed three times); {lost}", fix=fix)


def newest_checkpoint(run: Path) -> int | None:
    """Return the step of the newest checkpoint in a run folder; imports no torch, which may be half imported."""
    with suppress(OSError):
        steps = [int(one.name[5:]) for one in (run / "checkpoints").glob("step-*") if one.name[5:].isdecimal()]
        return max(steps, default=None)
    return None


def restart_command(command: Sequence[str], folder: str | None, how: Launcher) -> tuple[str, ...]:
    """Return the command that resumes a run in its folder, as exactly as this process knows it."""
    named_out = any(word == "--out" or word.startswith("--out=") for word in command)
    named_run = folder is not None and any(Path(word).expanduser() == Path(folder).expanduser() for word in command)
    out = () if folder is None or named_out or named_run else ("--out", folder)
    if how in ("torchrun", "slurm"):
        return (f"the command that started the ranks{', and ' if out else ''}{shlex.join(out)}",)
    return (shlex.join([*command, *out]),) if command else RESTART


def signal_label(name: str) -> str:
    """Return how a run was stopped, by the name of the signal."""
    return "interrupted (Ctrl-C)" if name == signal.SIGINT.name else f"preempted{f' ({name})' if name else ''}"


def blames_another(error: MeshwrightError) -> bool:
    """Whether the error is only the consequence of another rank's failure."""
    return tuple(error.fix) == OTHER_RANK


def named(rank: int, world: int) -> str:
    """Return the rank's name for messages."""
    return f"rank {rank} of {world}" if world > 1 else "the run"


def _remedy(text: str) -> Remedy | None:
    return next((remedy for remedy in REMEDIES if re.search(remedy.pattern, text)), None)


def _traceback_end(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(f"    {line}" for line in lines[:-1][-TRACEBACK_LINES:] if "^^^" not in line)


# Ranks of torchrun and SLURM


@contextmanager
def guard(process: Process) -> Iterator[None]:
    """Report a failure of this rank once, end the other ranks, and exit with the error's exit code.

    Ranks of torchrun and SLURM exit here immediately: a normal interpreter exit waits for collectives that will never
    finish. Otherwise the explained error is raised.
    """
    try:
        yield
    except (SystemExit, StopSignal):
        raise
    except BaseException as error:
        explained = explain(error, process)
        if process.how in ("alone", "nproc"):
            if explained is error or isinstance(error, KeyboardInterrupt):
                raise
            raise explained from error
        if isinstance(explained, StoppedError | RunInterruptedError):  # all ranks stop together, and none failed
            if process.rank == 0:
                print_error(explained, process)
        elif announce(explained):
            print_error(explained, process)
        leave(explained.exit_code)


def announce(error: MeshwrightError) -> bool:
    """Record in the ranks' store that the run failed; return whether this rank is the first to do so."""
    store = ranks_store()
    if store is None:
        return True
    first = within(5.0, lambda: int(store.add(FAULT_KEY, 1)) == 1)
    return first if first is not None else not blames_another(error)


def print_error(error: MeshwrightError, process: Process) -> None:
    """Print an error to stderr with its rank and fix."""
    rank = "" if isinstance(error, RunError) or process.world == 1 else f"{named(process.rank, process.world)}: "
    lines = [f"error: {rank}{error.message}", *(["fix:   " + " | ".join(error.fix)] if error.fix else [])]
    if isinstance(error, StoppedError | RunInterruptedError):
        lines = [f"{error.message}; {error.next_step}: {' | '.join(error.fix)}" if error.fix else error.message]
    with suppress(OSError, ValueError):
        print("\n".join(lines), file=sys.stderr, flush=True)


def ran_out_of_grace(process: Process, name: str, grace_s: float) -> NoReturn:
    """End a rank that could not save within the grace period after a stop request."""
    end_rank(
        RunError(
            f"{named(process.rank, process.world)} could not save within {grace_s:g} s after the stop request ({name})",
            fix=("a larger checkpoint.grace_s", *RESTART),
        ),
        process,
    )


def end_rank(error: RunError, process: Process) -> NoReturn:
    """Report an error and end this rank at once, from any thread."""
    if process.how == "nproc":
        with suppress(OSError):
            process.exit_reason.write_bytes(pickle.dumps(error))
    elif isinstance(error, StoppedError | RunInterruptedError):
        if process.rank == 0:
            print_error(error, process)
    elif announce(error):
        print_error(error, process)
    leave(error.exit_code)


def leave(code: int) -> NoReturn:
    """End this process immediately, after flushing its output and showing the cursor that a live panel hides."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            if stream.isatty():
                stream.write(SHOW_CURSOR)
            stream.flush()
    os._exit(code)


def ranks_store() -> Any:
    """Return the store of the default process group, or None without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`, or None if it raises or takes longer than `seconds`."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
