"""What a long computation is doing now, for whoever shows it; without a listener nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Call a function with every stage that is named inside."""
    before = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(before)


def stage(text: str) -> None:
    """Name what is being done."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(text)
