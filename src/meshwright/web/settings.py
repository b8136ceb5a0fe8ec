"""How the page is served: where, for whom, and the limits on what one asker may cost."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """What a server is started with."""

    host: str = "127.0.0.1"
    port: int = 8765
    allow_hosts: tuple[str, ...] = ()  # names other than this machine's own that a request may call it by
    workers: int = 2  # processes that search; 0 answers in threads of this one, where no search can be stopped
    waiting: int = 200  # questions that may wait for a worker
    search_s: float = 30.0  # what one question may take
    body_bytes: int = 2_000_000  # a posted text with its question
    query_bytes: int = 32_000  # the part of an address after the question mark: a config.json may be in a link
    remembered: int = 2_000  # answers kept
