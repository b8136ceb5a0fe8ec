"""Start the server on a free address, announce it, and stop cleanly."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshwright.errors import InputError
from meshwright.web.app import create_app
from meshwright.web.settings import LOOPBACK, Settings

KEEP_ALIVE_S = 15
IDLE_S = 20.0  # for the headers of a request; the body has its own limit
SHUTDOWN_S = 5  # for responses in flight when the server stops
PORTS_TRIED = 50
EVERY_INTERFACE = ("0.0.0.0", "::", "")


class Connection(H11Protocol):
    """A connection that is closed if it sends no request, or its headers too slowly."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn calls it with this type
        """Start the timer."""
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, self._close_if_idle, None)

    def _close_if_idle(self, before: Any) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(IDLE_S, self._close_if_idle, self.cycle)


def serve(settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve the web UI until interrupted."""
    opened = listening(settings.host, settings.port)
    settings = with_own_address(settings)
    port = int(opened.getsockname()[1])
    config = uvicorn.Config(
        create_app(settings),
        http=Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # no proxy is trusted for client or host names
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ws="none",
        lifespan="on",
    )
    announce(f"http://{address(settings.host)}:{port}/")
    for line in open_to_others(settings, port):
        print(line, file=sys.stderr, flush=True)
    try:
        uvicorn.Server(config).run(sockets=[opened])
    except KeyboardInterrupt:  # uvicorn stops cleanly, then raises
        print("\nstopped", file=sys.stderr)
    finally:
        opened.close()


def address(host: str) -> str:
    """Return a host as it is written in a URL."""
    return f"[{host}]" if ":" in host else {"0.0.0.0": "127.0.0.1"}.get(host, host)


def with_own_address(settings: Settings) -> Settings:
    """Return settings that accept this machine's address if it listens on every interface.

    An address, unlike a name, cannot be rebound to this machine by another site.
    """
    own = _own_address() if settings.host in EVERY_INTERFACE else ""
    return dataclasses.replace(settings, allow_hosts=(*settings.allow_hosts, own)) if own else settings


def open_to_others(settings: Settings, port: int) -> list[str]:
    """Return who can connect and at which addresses, if that is more than this machine; nothing on loopback."""
    if settings.host in LOOPBACK:
        return []
    names = dict.fromkeys((*settings.allow_hosts, *(() if settings.host in EVERY_INTERFACE else (settings.host,))))
    return [
        "warning: everybody who reaches this machine can use the server: it has no accounts and no encryption; "
        "--host 127.0.0.1 keeps it to this machine, and ssh -L makes that reachable from yours",
        *(f"from other machines: http://{address(name)}:{port}/" for name in names),
    ]


def _own_address() -> str:
    """Return this machine's address as other machines see it; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent, the kernel chooses a route
            return str(probe.getsockname()[0])
        except OSError:
            pass
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
    return "" if found in LOOPBACK else found


def listening(host: str, port: int) -> socket.socket:
    """Return an open socket; if the port is taken, the error names a free one."""
    opened = _socket(host)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            free = _free(host, port)
            raise InputError("the port is in use", "port", port, (f"--port {free}",)) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise InputError("the port needs administrator rights", "port", port, ("--port 8765",)) from None
        raise InputError(f"cannot listen: {error.strerror}", "host", host, ("--host 127.0.0.1",)) from None
    opened.listen(512)
    return opened


def _socket(host: str) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return opened


def _free(host: str, port: int) -> int:
    """Return the next free port."""
    for other in range(port + 1, min(port + PORTS_TRIED, 65536)):
        with _socket(host) as tried:
            try:
                tried.bind((host, other))
            except OSError:
                continue
            return other
    return 0
