"""Ends a rank that hangs, and reports which rank it waits for."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from meshwright.engine.faults import FAULT_KEY, RunError, end_rank, leave, named, print_error, ranks_store, within
from meshwright.engine.rank_env import Process

EXCHANGE_S = 3.0  # how long a hanging rank waits for the positions of the other ranks
POSITION_KEY = "meshwright/position"
SHOWN_RANKS = 8


class Position(NamedTuple):
    """The step and phase that a rank is in."""

    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


class Watchdog:
    """Ends a rank with exit code 3 if it starts no new phase for `timeout_s`, and reports where it hangs.

    Also ends a rank of torchrun or SLURM soon after another one has failed. The first step includes compilation and
    may take `first_s`.
    """

    def __init__(
        self, process: Process, timeout_s: float = 600.0, first_s: float | None = None, poll_s: float = 5.0
    ) -> None:
        self._process, self._timeout_s = process, timeout_s
        self._first_s = max(timeout_s, first_s or 3 * timeout_s)
        self._poll_s = min(poll_s, timeout_s / 4)
        self._last = (Position(0, "start"), time.monotonic())  # replaced atomically: the thread reads it without a lock
        self._first_step: int | None = None
        self._done = threading.Event()
        self._store: Any = None
        self._thread = threading.Thread(target=self._watch, name="meshwright-watchdog", daemon=True)

    def phase(self, step: int, name: str) -> None:
        """Record that this rank enters a phase of a step, such as data, forward, backward or optimizer."""
        if self._first_step is None:
            self._first_step = step
        self._last = (Position(step, name), time.monotonic())

    def __enter__(self) -> Watchdog:
        store = ranks_store()
        with suppress(Exception):  # some stores cannot be shared between threads
            self._store = store.clone() if store is not None else None
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(self._poll_s)
        if error is not None:
            error.add_note(f"in {self._last[0]}")

    @property
    def limit_s(self) -> float:
        """Seconds that the current phase may take."""
        return self._timeout_s if self._last[0].step != self._first_step else self._first_s

    def _watch(self) -> None:
        while not self._done.wait(self._poll_s):
            position, since = self._last
            if time.monotonic() - since > self.limit_s:
                self._give_up(position)
            elif self._process.how in ("torchrun", "slurm"):
                self._check_other_ranks(position)

    def _give_up(self, position: Position) -> None:
        error = RunError(
            f"{named(self._process.rank, self._process.world)} hangs in {position}: no progress for "
            f"{self.limit_s:g} s. {self._others(position)}".strip(),
            fix=("inspect the rank that is behind", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 records the collectives"),
        )
        end_rank(error, self._process)

    def _check_other_ranks(self, position: Position) -> None:
        if self._store is None:
            return
        try:
            failed = self._store.check([FAULT_KEY])
        except Exception:  # the process that hosts the store is gone
            if not self._done.wait(self._poll_s):  # unless this run is just ending
                rank = named(self._process.rank, self._process.world)
                print_error(
                    RunError(f"{rank} in {position}: lost the connection to the store of rank 0"), self._process
                )
                leave(RunError.exit_code)
            return
        if failed and not self._done.wait(self._poll_s):  # it may be about to raise its own error
            leave(RunError.exit_code)

    def _others(self, position: Position) -> str:
        """Describe where the other ranks are, as far as they answer: their time runs out at about the same moment."""
        world = self._process.world
        if world == 1 or self._store is None:
            return ""
        positions: dict[int, str] = {self._process.rank: str(position)}
        within(2 * EXCHANGE_S, lambda: self._exchange(positions))
        silent = [rank for rank in range(world) if rank not in positions]
        found = [f"rank {rank} is in {where}" for rank, where in sorted(positions.items()) if where != str(position)]
        if silent:
            found.append(f"no answer from rank {_listed(silent)}")
        return "; ".join(found[:SHOWN_RANKS]) or "All ranks are in the same phase."

    def _exchange(self, positions: dict[int, str]) -> None:
        self._store.set(f"{POSITION_KEY}/{self._process.rank}", str(self._last[0]))
        until = time.monotonic() + EXCHANGE_S
        while time.monotonic() < until:  # the full time: the other ranks read this rank's answer too
            for rank in [rank for rank in range(self._process.world) if rank not in positions]:
                if self._store.check([f"{POSITION_KEY}/{rank}"]):
                    positions[rank] = self._store.get(f"{POSITION_KEY}/{rank}").decode()
            self._done.wait(0.2)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:SHOWN_RANKS])) + (" …" if len(ranks) > SHOWN_RANKS else "")
