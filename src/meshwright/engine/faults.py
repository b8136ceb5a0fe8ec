"""How a run fails: one cause, named with its rank, step and remedy, and no rank left waiting."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar

from meshwright.engine.metrics.jsonl import Lines, spelled, warn
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError, MeshwrightError

if TYPE_CHECKING:
    import torch

Answer = TypeVar("Answer")

TRACEBACK_LINES = 8  # the end of a traceback, where the mistake is
MESSAGE_CHARACTERS = 600
FAULT_KEY = "meshwright/fault"  # set in the ranks' store by the first rank that fails


class RunError(MeshwrightError):
    """A run that was started and could not be finished (exit code 3)."""

    exit_code = 3


class StoppedError(RunError):
    """A run that was asked to end from outside, has saved and wants to be started again (exit code 75)."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later

    def __init__(self, reason: str, field: str = "", value: object = None, fix: Sequence[str] = ()) -> None:
        super().__init__(reason, field, value, fix or AGAIN)


class Remedy(NamedTuple):
    """What the text of an error means, and what to do about it."""

    sign: str  # regular expression over "TypeName: message"
    meaning: str
    fix: tuple[str, ...]


LESS_GPU_MEMORY = ("layout.micro_batch_size=1", "layout.recompute=full")
LESS_HOST_MEMORY = ("data.workers=0", "layout.offload=none", "a smaller --nproc")
AGAIN = ("start the run again: it goes on from the last checkpoint",)
OTHER_RANK = ("read what the other rank said first",)

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
    Remedy(
        r"No space left on device|Disk quota exceeded", "the disk is full", ("free space, then start the run again",)
    ),
    Remedy(
        r"device-side assert|index out of range in self",
        "an index lies outside its table, usually a token id beyond the vocabulary",
        ("data.tokenizer=the model's own tokenizer", "CUDA_LAUNCH_BLOCKING=1 names the operation"),
    ),
    Remedy(
        r"[Tt]imed out waiting|[Tt]imeout waiting|collective operation timeout|Wait timeout",
        "another rank did not answer in time",
        OTHER_RANK,
    ),
    Remedy(
        r"Connection (closed|reset|refused)|Broken pipe|^DistNetworkError|remote process exited|ncclRemoteError"
        r"|NCCL communicator was aborted|socketPoll",
        "another rank went away",
        OTHER_RANK,
    ),
    Remedy(
        r"'_input_metadata' is invalid",
        "this torch cannot compute gradients of weights apart from those of inputs, as a zero-bubble schedule asks",
        ("a newer torch (2.13 can)", "layout.pp_schedule=1f1b"),
    ),
    Remedy(
        r"Duplicate GPU detected",
        "two ranks use one GPU",
        ("start as many ranks as there are GPUs", "srun --gpus-per-task=1"),
    ),
)

SIGNALS = {
    signal.SIGKILL: ("killed, usually because the machine ran out of memory", LESS_HOST_MEMORY),
    signal.SIGBUS: ("ended, usually because /dev/shm is full", ("data.workers=0", "a larger /dev/shm")),
    signal.SIGTERM: ("asked to end from outside", AGAIN),
    signal.SIGSEGV: ("ended by a crash in native code", ("kernels.compile=false", "PYTHONFAULTHANDLER=1 shows where")),
    signal.SIGABRT: ("ended by native code that gave up", ("read what it said above",)),
}


def explain(error: BaseException, process: Process) -> MeshwrightError:
    """What went wrong on a rank, as the error a user reads; a user's own mistake stays what it is."""
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
    """What the exit code of a rank that ended without a word says."""
    if exit_code >= 0:
        return RunError(f"{named(rank, world)} ended with exit code {exit_code} before its work was done")
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return RunError(f"{named(rank, world)} was ended by signal {-exit_code}")
    meaning, fix = SIGNALS.get(number, ("ended", ()))
    return RunError(f"{named(rank, world)} was {meaning} ({number.name})", fix=fix)


def interrupted() -> RunError:
    """The run was ended from the keyboard."""
    return RunError("interrupted", fix=AGAIN)


def blames_another(error: MeshwrightError) -> bool:
    """Whether a rank only noticed that another one had failed."""
    return tuple(error.fix) == OTHER_RANK


def named(rank: int, world: int) -> str:
    """A rank as messages name it."""
    return f"rank {rank} of {world}" if world > 1 else "the run"


def _remedy(text: str) -> Remedy | None:
    return next((remedy for remedy in REMEDIES if re.search(remedy.sign, text)), None)


def _traceback_end(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(f"    {line}" for line in lines[:-1][-TRACEBACK_LINES:] if "^^^" not in line)


# One rank among those of torchrun or SLURM


@contextmanager
def guard(process: Process) -> Iterator[None]:
    """Runs one rank's work: a failure is told once, ends the other ranks and leaves with the exit code of its error.

    Ranks of torchrun and SLURM leave from here, at once: the interpreter's own way out waits for collectives that
    will never come. Otherwise the explained error is raised.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        explained = explain(error, process)
        if process.how in ("alone", "nproc"):
            if explained is error:
                raise
            raise explained from error
        if isinstance(explained, StoppedError):  # all ranks leave together, and none of them failed
            if process.rank == 0:
                tell(explained, process)
        elif announce(explained):
            tell(explained, process)
        leave(explained.exit_code)


def announce(error: MeshwrightError) -> bool:
    """Says in the ranks' store that the run has failed; whether this rank is the first to say so."""
    store = ranks_store()
    if store is None:
        return True
    first = within(5.0, lambda: int(store.add(FAULT_KEY, 1)) == 1)
    return first if first is not None else not blames_another(error)


def tell(error: MeshwrightError, process: Process) -> None:
    """The error on stderr, with its rank and its fix."""
    rank = "" if isinstance(error, RunError) or process.world == 1 else f"{named(process.rank, process.world)}: "
    lines = [f"error: {rank}{error}", *(["fix:   " + " | ".join(error.fix)] if error.fix else [])]
    with suppress(OSError, ValueError):
        print("\n".join(lines), file=sys.stderr, flush=True)


def ran_out_of_grace(process: Process, name: str, grace_s: float) -> NoReturn:
    """Ends a rank that was asked to end and could not save in time."""
    error = RunError(
        f"{named(process.rank, process.world)} was asked to end ({name}) and could not save within {grace_s:g} s",
        fix=("a larger checkpoint.grace_s", *AGAIN),
    )
    if process.how == "nproc":
        with suppress(OSError):
            process.last_words.write_text(error.reason)
    elif announce(error):
        tell(error, process)
    leave(error.exit_code)


def leave(code: int) -> NoReturn:
    """Ends this process now, after what it has said is out."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def ranks_store() -> Any:
    """The store in which the ranks of this run met, or None where there is no process group."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def within(seconds: float, work: Callable[[], Answer]) -> Answer | None:
    """What `work` gives, or None when it fails or takes longer."""
    answers: list[Answer] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


# A loss that is not a number

Policy = Literal["stop", "skip"]


class LossGuard:
    """Keeps a loss or gradient norm that is not finite from reaching the weights, on all ranks alike.

    `stop` ends the run; `skip` leaves the step out, and ends the run when more than `limit` steps in a row are bad.
    Either way the samples behind it are recorded in `bad_batches.jsonl`.
    """

    def __init__(self, policy: Policy, limit: int, folder: Path, device: torch.device) -> None:
        if policy not in ("stop", "skip"):
            raise InputError("must be stop or skip", field="nan policy", value=policy, fix=("stop", "skip"))
        if limit < 1:
            raise InputError("must be at least 1", field="limit of skipped steps", value=limit)
        self.policy, self.limit, self.path = policy, limit, Path(folder) / "bad_batches.jsonl"
        self.skipped_in_a_row = 0
        self._device = device

    def allows(
        self, step: int, loss: torch.Tensor | float, grad_norm: torch.Tensor | float, samples: Sequence[int] = ()
    ) -> bool:
        """Whether the optimizer may take this step; every rank calls it and gets the same answer."""
        if not self._any_rank_is_bad(loss, grad_norm):
            self.skipped_in_a_row = 0
            return True
        bad = self._record(step, float(_local(loss)), float(_local(grad_norm)), samples)
        self.skipped_in_a_row += 1
        if self.policy == "skip" and self.skipped_in_a_row <= self.limit:
            return False
        raise self._stopped(step, bad)

    def _any_rank_is_bad(self, *values: torch.Tensor | float) -> bool:
        import torch
        import torch.distributed as dist

        finite = [torch.as_tensor(_local(value), device=self._device).isfinite().all() for value in values]
        bad = (~torch.stack(finite).all()).to(torch.int32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return bool(bad.item())

    def _record(self, step: int, loss: float, grad_norm: float, samples: Sequence[int]) -> list[dict[str, Any]]:
        """Writes the bad ranks' batches down; the lines, on every rank."""
        from meshwright.engine.object_collectives import gathered, rank

        mine = {
            "step": step,
            "rank": rank(),
            "loss": spelled(loss),
            "grad_norm": spelled(grad_norm),
            "samples": [*samples],
        }
        bad = [line for line in gathered(mine) if isinstance(line["loss"], str) or isinstance(line["grad_norm"], str)]
        if rank() == 0:
            self._write(bad)
        return bad

    def _write(self, bad: list[dict[str, Any]]) -> None:
        try:
            file = Lines(self.path)
        except InputError as error:  # no record is better than no verdict
            warn(str(error))
            return
        for line in bad:
            file.write({**line, "policy": self.policy})
        file.close()

    def _stopped(self, step: int, bad: list[dict[str, Any]]) -> RunError:
        first = bad[0]
        what = "loss" if isinstance(first["loss"], str) else "gradient norm"
        value = first[what.replace("gradient ", "grad_")]
        often = f", after {self.limit} skipped steps in a row" if self.policy == "skip" else ""
        ranks = ", ".join(str(line["rank"]) for line in bad[:8]) + (" …" if len(bad) > 8 else "")
        return RunError(
            f"the {what} is {value} in step {step} on rank {ranks}{often}; the batches are in {self.path}",
            fix=("a lower optimizer.lr", "a longer schedule.warmup_steps", "look at the samples it names"),
        )


def _local(value: Any) -> Any:
    """This rank's part of a tensor that is cut over ranks: if any part is not finite, neither is the whole."""
    if isinstance(value, float | int):
        return value
    plain = value.detach()
    return plain.to_local() if hasattr(plain, "to_local") else plain
