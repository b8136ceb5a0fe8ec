"""What stands before every request: who may ask by which name, how much may be sent, and what a browser may do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.web.errors import to_error
from meshwright.web.settings import LOOPBACK, Settings

POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
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
BODY_S = 20.0  # until a body has arrived
LONGEST_PATH = 500


class Refused(Exception):  # noqa: N818  # not a fault: the answer is no
    """A request that goes no further."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body["reason"])
        self.status, self.body = status, body


class Guard:
    """Refuses what may not be asked, and adds the headers that bind a browser."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.hosts = frozenset(name.lower() for name in (*LOOPBACK, settings.host, *settings.allow_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or tells why not."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # nothing here speaks over web sockets

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                said = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(one for one in _HEADERS if one[0] not in said)]
            await send(message)

        try:
            self._judge(scope, {name.lower(): value.decode("latin-1") for name, value in scope["headers"]})
            body = await _whole_body(receive, self.settings.body_bytes)
        except Refused as refused:
            await _tell(refused, send)
            return
        if body is not None:
            await _while_asker_stays(receive, lambda rest: self.app(scope, _after(body, rest), guarded))

    def _judge(self, scope: Scope, headers: Mapping[bytes, str]) -> None:
        host = headers.get(b"host", "")
        if _name(host) not in self.hosts:
            fix = f"meshwright web --allow-host {_name(host) or 'NAME'}"
            raise Refused(
                421, to_error("this server does not answer under that name", "Host", host, (fix,), "WrongHost")
            )
        if headers.get(b"sec-fetch-site") == "cross-site" and headers.get(b"sec-fetch-mode") != "navigate":
            reason = "another site's page may not ask here"
            raise Refused(403, to_error(reason, "Sec-Fetch-Site", "cross-site", ("open the page itself",), "OtherSite"))
        most = self.settings.query_bytes
        if len(scope.get("query_string", b"")) > most:
            reason = f"the query has more than {most:,} bytes"
            raise Refused(414, to_error(reason, "query", fix=("send it as the body of a POST",), error="TooLarge"))
        if len(scope["path"]) > LONGEST_PATH:
            raise Refused(414, to_error(f"the path has more than {LONGEST_PATH} characters", "path", error="TooLarge"))
        length = headers.get(b"content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > self.settings.body_bytes:
            raise _too_large(self.settings.body_bytes)


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


async def _whole_body(receive: Receive, most: int) -> bytes | None:
    """The body of a request, refused when it is too large or takes too long to arrive; None when the asker left."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > most:
                    raise _too_large(most)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refused(408, to_error(f"the body did not arrive within {BODY_S:g} s", error="TooLong")) from None


def _after(body: bytes, rest: Receive) -> Receive:
    """What the application receives: the body at once, then what comes after it."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return parts.pop() if parts else await rest()

    return receive


async def _while_asker_stays(receive: Receive, answer: Callable[[Receive], Awaitable[None]]) -> None:
    """Answers, and stops when the asker leaves: nobody would read it."""
    leaving = asyncio.ensure_future(receive())

    async def rest() -> Message:
        return await asyncio.shield(leaving)

    answering = asyncio.ensure_future(answer(rest))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering
    finally:
        leaving.cancel()
        answering.cancel()


def _too_large(most: int) -> Refused:
    reason = f"a request has at most {most:,} bytes"
    return Refused(413, to_error(reason, "body", fix=("send only the config or script itself",), error="TooLarge"))


async def _tell(refused: Refused, send: Send) -> None:
    body = msgspec.json.encode(refused.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_HEADERS]
    if refused.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
