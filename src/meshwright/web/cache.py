"""What was answered before is answered again without looking: an address always has the same answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 128 << 20
LARGEST = 4 << 20  # bytes of one answer
API, HEALTH = "/api/", "/api/health"


Address = tuple[str, bytes]  # path and query


class Sized(Protocol):
    """What takes room."""

    @property
    def size(self) -> int:
        """In bytes."""


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Sized)


class LRUCache(Generic[K, V]):
    """The things used last, up to a count and a size."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self.most, self.most_bytes, self.bytes = most, most_bytes, 0
        self.held: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The thing, if it is remembered."""
        found = self.held.get(key)
        if found is not None:
            self.held.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Remembers a thing and forgets those used longest ago."""
        if key in self.held:
            self.bytes -= self.held.pop(key).size
        self.held[key] = value
        self.bytes += value.size
        while self.held and (len(self.held) > self.most or self.bytes > self.most_bytes):
            self.bytes -= self.held.popitem(last=False)[1].size


@dataclass(frozen=True)
class Sent:
    """An answer as it went over the wire."""

    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.body) + 1000

    @property
    def tag(self) -> bytes | None:
        """What changes when the answer does."""
        return next((value for name, value in self.headers if name == b"etag"), None)


class Remembering:
    """Answers an address of the API that was answered before; pages may show a passing error and are not kept."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.remembered: LRUCache[Address, Sent] = LRUCache(most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or lets it be answered and remembers."""
        if scope["type"] != "http" or scope["method"] != "GET" or not _lasting(scope["path"]):
            await self.app(scope, receive, send)
            return
        said, key = dict(scope["headers"]), (scope["path"], scope["query_string"])
        found = self.remembered.get(key)
        if found is None:
            await self.app(scope, receive, _Noted(self.remembered, key, send))
        else:
            await _again(found, said.get(b"if-none-match", b""), send)


def _lasting(path: str) -> bool:
    return path.startswith(API) and path != HEALTH


async def _again(found: Sent, known: bytes, send: Send) -> None:
    tag = found.tag
    if tag is not None and tag in known:
        headers = [one for one in found.headers if one[0] not in (b"content-length", b"content-type")]
        await send({"type": "http.response.start", "status": 304, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return
    await send({"type": "http.response.start", "status": 200, "headers": list(found.headers)})
    await send({"type": "http.response.body", "body": found.body})


class _Noted:
    """Sends an answer on, and remembers it when it is a whole one."""

    def __init__(self, remembered: LRUCache[Address, Sent], key: Address, send: Send) -> None:
        self.remembered, self.key, self.send = remembered, key, send
        self.status, self.headers, self.body = 0, list[tuple[bytes, bytes]](), bytearray()

    async def __call__(self, message: Message) -> None:
        """One part of an answer."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        elif self.status == 200 and message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            if not message.get("more_body", False) and len(self.body) <= LARGEST:
                self.remembered.put(self.key, Sent(tuple(self.headers), bytes(self.body)))
        await self.send(message)
