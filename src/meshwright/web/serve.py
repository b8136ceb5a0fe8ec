"""Starting the server: an address that is free, said once it is open, and a clean end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from meshwright.errors import InputError
from meshwright.web.app import create_app
from meshwright.web.settings import Settings

KEEP_ALIVE_S = 15
QUIET_S = 20.0  # until a connection has asked something; its body has a limit of its own
LEAVE_S = 5  # for answers that are on their way when the server ends
TRIED = 50


class Connection(H11Protocol):
    """A connection that is closed when it asks nothing, or asks so slowly that its headers do not arrive."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as it is called
        """Starts to watch."""
        super().connection_made(transport)
        self.loop.call_later(QUIET_S, self._still_asking, None)

    def _still_asking(self, before: Any) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is before and (before is None or before.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(QUIET_S, self._still_asking, self.cycle)


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serves the page until it is told to end."""
    opened = listening(settings.host, settings.port)
    port = int(opened.getsockname()[1])
    config = uvicorn.Config(
        create_app(settings),
        http=Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # nobody tells us who asks or under which name
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LEAVE_S,
        ws="none",
        lifespan="on",
    )
    say(f"http://{address(settings.host)}:{port}/")
    try:
        uvicorn.Server(config).run(sockets=[opened])
    except KeyboardInterrupt:  # uvicorn ends in order first, then says that it was asked to
        pass
    finally:
        opened.close()


def address(host: str) -> str:
    """A host as it is written in an address."""
    return f"[{host}]" if ":" in host else {"0.0.0.0": "127.0.0.1"}.get(host, host)


def listening(host: str, port: int) -> socket.socket:
    """An open socket; a port that is taken is told with one that is free."""
    made = _socket(host)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            free = _free(host, port)
            raise InputError("another program uses this port", "port", port, (f"--port {free}",)) from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise InputError("this port needs the rights of an administrator", "port", port, ("--port 8765",)) from None
        raise InputError(f"cannot be listened on: {error.strerror}", "host", host, ("--host 127.0.0.1",)) from None
    made.listen(512)
    return made


def _socket(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _free(host: str, port: int) -> int:
    """The next port that nobody uses."""
    for other in range(port + 1, min(port + TRIED, 65536)):
        with _socket(host) as tried:
            try:
                tried.bind((host, other))
            except OSError:
                continue
            return other
    return 0
