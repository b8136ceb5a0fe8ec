"""How the web server is started, and the limits on what one client may cost."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api.inputs import BODY_BYTES

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Settings:
    """The settings of a server."""

    host: str = "127.0.0.1"
    port: int = 8765
    allow_hosts: tuple[str, ...] = ()  # accepted Host headers besides this machine's names
    hub: bool = False  # whether hub ids outside the catalogue are read from this machine's cache, or downloaded
    workers: int = 2  # processes that search; 0 uses threads of this one, which cannot be stopped
    max_pending: int = 200  # requests that may wait for a worker
    time_limit_s: float = 30.0  # of one request
    body_bytes: int = BODY_BYTES
    query_bytes: int = 32_000  # of a URL: a link may contain a config.json
    cache_entries: int = 4_000  # a GET has two: its request and its address
