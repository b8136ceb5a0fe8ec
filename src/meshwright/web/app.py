"""The application: the API, the pages, the assets, and what stands before them."""

from __future__ import annotations

from fastapi import FastAPI

from meshwright import __version__
from meshwright.web import data, pages
from meshwright.web.settings import Settings

__all__ = ["Settings", "create_app"]


def create_app(settings: Settings | None = None) -> FastAPI:
    """The page and the API under one roof."""
    app = FastAPI(
        title="Meshwright", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json"
    )
    app.state.settings = settings or Settings()
    app.include_router(data.router, prefix="/api")
    app.include_router(pages.router)
    return app
