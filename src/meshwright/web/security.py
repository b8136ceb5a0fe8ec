"""The guard in front of every request: Host header, sizes and times, and what a browser may do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.web.errors import to_error
from meshwright.web.settings import LOOPBACK, Settings

POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
BODY_S = 20.0  # for a body to arrive
MAX_PATH = 500


class Rejected(Exception):  # noqa: N818  # a response, not a bug
    """A request that is not passed on."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body["error"]["message"])
        self.status, self.body = status, body


class Guard:
    """Rejects requests that are not allowed, and adds security headers to responses."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.hosts = frozenset(name.lower() for name in (*LOOPBACK, settings.host, *settings.allow_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or send the reason why not."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no web sockets

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(one for one in _HEADERS if one[0] not in present)]
            await send(message)

        try:
            self._check(scope, {name.lower(): value.decode("latin-1") for name, value in scope["headers"]})
            body = await _read_body(receive, self.settings.body_bytes)
        except Rejected as rejected:
            await _send(rejected, send)
            return
        if body is not None:
            await _while_connected(receive, lambda rest: self.app(scope, _after(body, rest), guarded))

    def _check(self, scope: Scope, headers: Mapping[bytes, str]) -> None:
        host = headers.get(b"host", "")
        if _name(host) not in self.hosts:
            fix = f"meshwright web --allow-host {_name(host) or 'NAME'}"
            raise Rejected(421, to_error("unknown Host header", "Host", host, (fix,), "WrongHost"))
        if headers.get(b"sec-fetch-site") == "cross-site" and headers.get(b"sec-fetch-mode") != "navigate":
            reason = "requests from other sites are not allowed"
            raise Rejected(
                403, to_error(reason, "Sec-Fetch-Site", "cross-site", ("open the web UI itself",), "OtherSite")
            )
        limit = self.settings.query_bytes
        if len(scope.get("query_string", b"")) > limit:
            reason = f"the query is longer than {limit:,} bytes"
            raise Rejected(414, to_error(reason, "query", fix=("send it as the body of a POST",), kind="TooLarge"))
        if len(scope["path"]) > MAX_PATH:
            raise Rejected(414, to_error(f"the path is longer than {MAX_PATH} characters", "path", kind="TooLarge"))
        length = headers.get(b"content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > self.settings.body_bytes:
            raise _too_large(self.settings.body_bytes)


def _name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body; reject it if it is too large or too slow. None if the client disconnected."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Rejected(408, to_error(f"the body did not arrive within {BODY_S:g} s", kind="TooLong")) from None


def _after(body: bytes, rest: Receive) -> Receive:
    """Return a receive function that gives the body, then the messages after it."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return parts.pop() if parts else await rest()

    return receive


async def _while_connected(receive: Receive, application: Callable[[Receive], Awaitable[None]]) -> None:
    """Run the application until it is done or the client disconnects."""
    disconnected = asyncio.ensure_future(receive())

    async def rest() -> Message:
        return await asyncio.shield(disconnected)

    running = asyncio.ensure_future(application(rest))
    try:
        await asyncio.wait((running, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    finally:
        disconnected.cancel()
        running.cancel()


def _too_large(limit: int) -> Rejected:
    reason = f"the body is larger than {limit:,} bytes"
    return Rejected(413, to_error(reason, "body", fix=("send only the config or script itself",), kind="TooLarge"))


async def _send(rejected: Rejected, send: Send) -> None:
    body = msgspec.json.encode(rejected.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_HEADERS]
    if rejected.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": rejected.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
