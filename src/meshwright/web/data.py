"""The JSON API: the same functions as the command line, under /api."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, bool]:
    """Whether the server answers."""
    return {"ok": True}
