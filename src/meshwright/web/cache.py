"""The one cache of responses: by request, and by the address of a GET that was answered before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BYTES = 128 << 20
MAX_REPLY_BYTES = 4 << 20
RETRY_S = 2
Key = bytes | tuple[str, bytes]  # digest of a request, or path and query


@dataclass(frozen=True)
class Reply:
    """A response before it is sent: status and JSON."""

    status: int
    body: bytes
    cacheable: bool = False  # the same request always gets this reply

    @property
    def ok(self) -> bool:
        """Return whether the request was answered."""
        return self.status == 200

    @cached_property
    def data(self) -> dict[str, Any]:
        """Return the decoded object; it is shared, so do not change it."""
        found: dict[str, Any] = msgspec.json.decode(self.body)
        return found

    @cached_property
    def tag(self) -> str:
        """Return the entity tag, which changes with the body."""
        return f'"{hashlib.blake2b(self.body, digest_size=12).hexdigest()}"'

    def to_response(self, known_tags: str = "") -> Response:
        """Return the HTTP response; without a body if the client already has it."""
        headers = {"etag": self.tag, "cache-control": "no-cache"} if self.ok else {"cache-control": "no-store"}
        if self.status == 429:
            headers["retry-after"] = str(RETRY_S)
        if self.ok and self.tag in known_tags:
            return Response(status_code=304, headers=headers)
        return Response(self.body, self.status, headers, media_type="application/json")


class LRUCache:
    """The most recently used replies, up to a number and a size."""

    def __init__(self, max_entries: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_entries, self.max_bytes, self.bytes = max_entries, max_bytes, 0
        self.entries: OrderedDict[Key, Reply] = OrderedDict()

    def get(self, key: Key) -> Reply | None:
        """Return a reply if it is cached."""
        found = self.entries.get(key)
        if found is not None:
            self.entries.move_to_end(key)
        return found

    def put(self, key: Key, reply: Reply) -> None:
        """Cache a reply and evict the least recently used ones."""
        if len(reply.body) > MAX_REPLY_BYTES:
            return
        if key in self.entries:
            self.bytes -= len(self.entries.pop(key).body)
        self.entries[key] = reply
        self.bytes += len(reply.body)
        while self.entries and (len(self.entries) > self.max_entries or self.bytes > self.max_bytes):
            self.bytes -= len(self.entries.popitem(last=False)[1].body)


def address(scope: Scope) -> tuple[str, bytes]:
    """Return the cache key of a GET."""
    return scope["path"], scope["query_string"]


class CacheMiddleware:
    """Answers a GET that was answered before without parsing it again."""

    def __init__(self, app: ASGIApp, cache: LRUCache) -> None:
        self.app, self.cache = app, cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the cached reply, or pass the request on."""
        found = self.cache.get(address(scope)) if scope["type"] == "http" and scope["method"] == "GET" else None
        if found is None:
            await self.app(scope, receive, send)
            return
        known = dict(scope["headers"]).get(b"if-none-match", b"")
        await found.to_response(known.decode("latin-1"))(scope, receive, send)
