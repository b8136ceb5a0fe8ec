"""Follows a SLURM job to its end: its states, its log, and its requeues."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.launch.submit import SubmitError, slurm_tool

ANSWER_S = 60.0
EVERY_S = 2.0
PATIENCE = 60  # answers in a row that may fail to come: a controller that restarts is back by then
DONE = "COMPLETED"
FAILED = (
    "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED",
    "LAUNCH_FAILED",
)  # fmt: skip
LOG_BYTES = 1 << 20  # read at once
Say = Callable[[str], None]


class Seen(msgspec.Struct, frozen=True):
    """A job as SLURM describes it at one moment."""

    state: str
    reason: str = ""
    restarts: int = 0
    exit_code: str = ""
    log: str = ""

    @property
    def ended(self) -> bool:
        """Whether it will not run again."""
        return self.state == DONE or self.state in FAILED

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason and self.reason != "None" else ""
        code = f", exit code {self.exit_code}" if self.state == "FAILED" and self.exit_code else ""
        again = f", requeued {self.restarts} times" if self.restarts > 1 else ", requeued once" if self.restarts else ""
        return f"{self.state.lower().replace('_', ' ')}{reason}{code}{again}"


def watch(
    number: str, say: Say, log: Say, every_s: float = EVERY_S, pause: Callable[[float], None] = time.sleep
) -> Seen:
    """Tells every change of a job's state and every new line of its log until it has ended for good."""
    told, unanswered = "", 0
    tail: Tail | None = None
    while True:
        try:
            seen, unanswered = inspect(number), 0
        except MeshwrightError as error:
            unanswered += 1
            if unanswered > PATIENCE:
                raise SubmitError(
                    f"the end of job {number} is unknown: {error.reason}",
                    field="--watch",
                    fix=(f"sacct --jobs={number}", f"scontrol show job {number}"),
                ) from error
            pause(every_s)
            continue
        if str(seen) != told:
            told = str(seen)
            say(f"job {number}: {told}")
        if tail is None and seen.log:
            tail = Tail(Path(seen.log))
        for line in tail.new(last=seen.ended) if tail else ():
            log(line)
        if seen.ended:
            return seen
        pause(every_s)


def inspect(number: str) -> Seen:
    """The job now: from the controller, which knows it until minutes after its end, else from the accounting."""
    done = slurm_tool(["scontrol", "show", "job", "--oneliner", number], ANSWER_S)
    if done.returncode == 0 and (seen := from_scontrol(done.stdout)):
        return seen
    said = (done.stderr or done.stdout).strip() or f"scontrol ended with exit code {done.returncode}"
    with suppress(MeshwrightError):
        kept = slurm_tool(
            ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={number}"],
            ANSWER_S,
        )
        if kept.returncode == 0 and (seen := from_sacct(kept.stdout)):
            return seen
    raise SubmitError(said, field="--watch")


def from_scontrol(text: str) -> Seen | None:
    """What `scontrol show job` says; values may hold spaces, names never do."""
    found = dict(
        re.findall(
            r"(?:^|\s)([A-Za-z]\w*)=(.*?)(?=\s+[A-Za-z][\w:/]*=|\s*$)",
            text.strip().splitlines()[0] if text.strip() else "",
        )
    )
    state = found.get("JobState", "").split("+")[0].split(" ")[0]
    if not state:
        return None
    restarts = found.get("Restarts", "0")
    code = found.get("ExitCode", "").split(":")
    return Seen(
        state=state,
        reason=found.get("Reason", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        exit_code=code[0] if code[0] != "0" or len(code) < 2 else f"0, signal {code[1]}" if code[1] != "0" else "0",
        log="" if found.get("StdOut", "(null)") in ("(null)", "/dev/null") else found["StdOut"],
    )


def from_sacct(text: str) -> Seen | None:
    """What `sacct` says; the last line is the last time the job ran."""
    lines = [line for line in text.splitlines() if "|" in line]
    if not lines:
        return None
    state, code = lines[-1].split("|")[:2]
    return Seen(state=state.split(" ")[0].rstrip("+"), exit_code=code.split(":")[0])


class Tail:
    """The lines that a file gains; a file that is not there yet, or is shorter than it was, is no fault."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._rest = path, 0, b""

    def new(self, last: bool = False) -> Iterator[str]:
        """Whole lines since the last call; at the end also one that was not finished."""
        while data := self._read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        if last and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at = 0
                file.seek(self._at)
                data = file.read(LOG_BYTES)
        except OSError:
            return b""
        self._at += len(data)
        return data
