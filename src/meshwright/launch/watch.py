"""Watches a SLURM job to its end: its states, its log, and its requeues."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.launch.submit import SubmitError, slurm_tool

QUERY_S = 60.0
INTERVAL_S = 2.0
MAX_FAILURES = 60  # consecutive failed queries; a restarting controller is back by then
DONE = "COMPLETED"
FAILED = (
    "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED",
    "LAUNCH_FAILED",
)  # fmt: skip
LOG_BYTES = 1 << 20  # bytes per read
Report = Callable[[str], None]


class JobState(msgspec.Struct, frozen=True):
    """The state of a job as SLURM reports it."""

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
    number: str, report: Report, log: Report, every_s: float = INTERVAL_S, pause: Callable[[float], None] = time.sleep
) -> JobState:
    """Report every state change of a job and every new line of its log until it has ended."""
    reported, failures = "", 0
    tail: Tail | None = None
    while True:
        try:
            state, failures = inspect(number), 0
        except MeshwrightError as error:
            failures += 1
            if failures > MAX_FAILURES:
                raise SubmitError(
                    f"the final state of job {number} is unknown: {error.reason}",
                    field="--watch",
                    fix=(f"sacct --jobs={number}", f"scontrol show job {number}"),
                ) from error
            pause(every_s)
            continue
        if str(state) != reported:
            reported = str(state)
            report(f"job {number}: {reported}")
        if tail is None and state.log:
            tail = Tail(Path(state.log))
        for line in tail.new(last=state.ended) if tail else ():
            log(line)
        if state.ended:
            return state
        pause(every_s)


def inspect(number: str) -> JobState:
    """Return the state of the job from the controller, or from accounting once the controller has forgotten it."""
    done = slurm_tool(["scontrol", "show", "job", "--oneliner", number], QUERY_S)
    if done.returncode == 0 and (state := from_scontrol(done.stdout)):
        return state
    error_text = (done.stderr or done.stdout).strip() or f"scontrol exited with code {done.returncode}"
    with suppress(MeshwrightError):
        accounting = slurm_tool(
            ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={number}"],
            QUERY_S,
        )
        if accounting.returncode == 0 and (state := from_sacct(accounting.stdout)):
            return state
    raise SubmitError(error_text, field="--watch")


def from_scontrol(text: str) -> JobState | None:
    """Parse the output of `scontrol show job`; values may contain spaces, names never do."""
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
    return JobState(
        state=state,
        reason=found.get("Reason", ""),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        exit_code=code[0] if code[0] != "0" or len(code) < 2 else f"0, signal {code[1]}" if code[1] != "0" else "0",
        log="" if found.get("StdOut", "(null)") in ("(null)", "/dev/null") else found["StdOut"],
    )


def from_sacct(text: str) -> JobState | None:
    """Parse the output of `sacct`; the last line is the latest run of the job."""
    lines = [line for line in text.splitlines() if "|" in line]
    if not lines:
        return None
    state, code = lines[-1].split("|")[:2]
    return JobState(state=state.split(" ")[0].rstrip("+"), exit_code=code.split(":")[0])


class Tail:
    """New lines of a growing file, which may not exist yet or may be truncated."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._rest = path, 0, b""

    def new(self, last: bool = False) -> Iterator[str]:
        """Yield complete lines since the last call; with `last`, also an incomplete one."""
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
