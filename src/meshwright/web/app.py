"""The application: the API, the pages, the files they load, and what stands before them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from meshwright import __version__
from meshwright.web import assets, routes_api, routes_html
from meshwright.web.cache import Remembering
from meshwright.web.dispatcher import Dispatcher
from meshwright.web.errors import not_typed, to_error
from meshwright.web.security import Guard
from meshwright.web.settings import Settings
from meshwright.web.templates import render

__all__ = ["Settings", "create_app"]


def create_app(settings: Settings | None = None) -> FastAPI:
    """The page and the API under one roof."""
    chosen = settings or Settings()

    @asynccontextmanager
    async def open_desk(app: FastAPI) -> AsyncIterator[None]:
        await app.state.desk.start()
        try:
            yield
        finally:
            await app.state.desk.close()

    app = FastAPI(
        title="Meshwright",
        summary="Which training recipe for this model on these GPUs, whether it fits, how fast it is, and why.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=open_desk,
    )
    app.state.settings, app.state.desk = chosen, Dispatcher(chosen)
    app.include_router(routes_api.router, prefix="/api", tags=["api"])
    app.include_router(assets.router)
    app.include_router(routes_html.router)
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(HTTPException, _not_there)
    app.add_middleware(Remembering, most=chosen.remembered)
    app.add_middleware(Guard, settings=chosen)  # added last, met first
    return app


async def _not_understood(request: Request, error: Exception) -> Response:
    """What does not have the form of a question, told like any other mistake."""
    found: list[Any] = list(error.errors()) if isinstance(error, RequestValidationError) else []
    first = found[0] if found else {"loc": (), "type": "", "msg": str(error)}
    return JSONResponse(not_typed(first, 1, _see(request)), 422, {"cache-control": "no-store"})


async def _not_there(request: Request, error: Exception) -> Response:
    """An address that nobody serves, or a method that is not taken there."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    headers = error.headers if isinstance(error, HTTPException) else None
    reason = str(error.detail) if isinstance(error, HTTPException) else "not found"
    if status == 400:  # what the framework says of a body that it cannot decode
        return JSONResponse(to_error("is not JSON in UTF-8", "body", fix=_see(request)), 422, headers)
    wanted = f"{request.method} {request.url.path}"
    failed = to_error(reason.lower(), "address", wanted, _see(request), "NotThere")
    if request.url.path.startswith("/api/") or status != 404:
        return JSONResponse(failed, status, headers)
    shown = {"error": {**failed, "fix": ["choose a page above"]}, "what": "page", "back": "/"}
    return HTMLResponse(render("missing.html", version=__version__, path=request.url.path, **shown), status)


def _see(request: Request) -> list[str]:
    return [f"see {request.app.openapi_url}"]
