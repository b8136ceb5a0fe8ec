"""The static files, read once from the package: a request names one of them, never a path."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}
PACKED = (".css", ".js", ".svg")
FOREVER = "public, max-age=31536000, immutable"
router = APIRouter()


@dataclass(frozen=True)
class Asset:
    """One file."""

    name: str
    content: bytes

    @property
    def suffix(self) -> str:
        """Return the ending of its name."""
        last = self.name.rpartition("/")[2]
        return f".{last.rpartition('.')[2]}" if "." in last else ""

    @cached_property
    def version(self) -> str:
        """Return a digest, which changes with the file."""
        return hashlib.blake2b(self.content, digest_size=8).hexdigest()

    @cached_property
    def packed(self) -> bytes:
        """Return the file compressed."""
        return gzip.compress(self.content, 6, mtime=0)


@cache
def assets() -> dict[str, Asset]:
    """Return all files by name."""
    return {name: Asset(name, file.read_bytes()) for name, file in _below(resources.files(__package__) / "static", "")}


def _below(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for one in sorted(folder.iterdir(), key=lambda file: file.name):
        if one.is_dir():
            found += _below(one, f"{prefix}{one.name}/")
        elif not one.name.startswith("."):
            found.append((prefix + one.name, one))
    return found


def asset_url(name: str) -> str:
    """Return the URL of a file; it changes with the content, so browsers may cache it forever."""
    return f"/static/{name}?v={assets()[name].version}"


@router.get("/static/{name:path}", include_in_schema=False)
async def static(request: Request, name: str) -> Response:
    """Send a static file."""
    found = assets().get(name)
    if found is None:
        return Response("no such file\n", 404, media_type="text/plain")
    tag = f'"{found.version}"'
    headers = {"etag": tag, "vary": "accept-encoding"}
    headers["cache-control"] = FOREVER if request.query_params.get("v") == found.version else "no-cache"
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    body, kind = found.content, TYPES.get(found.suffix, "application/octet-stream")
    if found.suffix in PACKED and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["content-encoding"] = found.packed, "gzip"
    return Response(body, headers=headers, media_type=kind)
