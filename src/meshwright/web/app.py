"""The application: the API, the web UI, its assets, and the guard in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from meshwright import __version__
from meshwright.web import api_page, assets, routes_api, routes_compare, routes_doctor, routes_html
from meshwright.web.cache import CacheMiddleware
from meshwright.web.dispatcher import Dispatcher
from meshwright.web.errors import to_error
from meshwright.web.head import HeadAsGet
from meshwright.web.security import Guard
from meshwright.web.settings import Settings
from meshwright.web.templates import render

__all__ = ["Settings", "create_app"]
PACKED_BYTES = 1_000  # smaller responses fit a packet as they are


def create_app(settings: Settings | None = None) -> FastAPI:
    """Return the web UI and the API as one application."""
    settings = settings or Settings()
    dispatcher = Dispatcher(settings)

    @asynccontextmanager
    async def run_dispatcher(app: FastAPI) -> AsyncIterator[None]:
        await dispatcher.start()
        try:
            yield
        finally:
            await dispatcher.close()

    app = FastAPI(
        title="Meshwright",
        summary="Plan, check and size the training of large models.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=run_dispatcher,
    )
    app.state.dispatcher = dispatcher
    app.include_router(routes_api.router, prefix="/api", tags=["api"])
    app.include_router(api_page.router)
    app.add_api_route("/openapi.json", _to_schema, include_in_schema=False)
    for path in ("/docs", "/redoc", "/api", "/api/"):
        app.add_api_route(path, _to_docs, include_in_schema=False)
    app.include_router(assets.router)
    app.include_router(routes_html.router)
    for pages in (routes_compare, routes_doctor):
        app.include_router(pages.router)
    app.openapi = lambda: routes_api.openapi(app)  # type: ignore[method-assign]  # as FastAPI documents it
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(routes_html.UnknownFieldError, routes_html.show_unknown_field)
    app.add_middleware(CacheMiddleware, cache=dispatcher.cache)
    app.add_middleware(GZipMiddleware, minimum_size=PACKED_BYTES, compresslevel=4)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, settings=settings)  # added last, runs first
    return app


async def _to_schema(request: Request) -> Response:
    """Send the usual address of an API's description to ours."""
    return RedirectResponse(str(request.app.openapi_url))


async def _to_docs(request: Request) -> Response:
    """Send the usual addresses of an API's documentation to ours."""
    return RedirectResponse("/api/docs")


async def _not_found(request: Request, error: Exception) -> Response:
    """Return the error for an unknown path or a method that it does not support."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    headers = error.headers if isinstance(error, HTTPException) else None
    reason = str(error.detail) if isinstance(error, HTTPException) else "not found"
    target = f"{request.method} {request.url.path}"
    allowed = next((value for name, value in (headers or {}).items() if name.lower() == "allow"), "")
    fix = (f"{allowed} {request.url.path}",) if allowed else ("see /api/docs",)
    kind = "WrongMethod" if status == 405 else "NotFound"
    failed = to_error(reason.lower(), "address", target, fix, kind)
    if request.url.path.startswith("/api/") or status != 404:
        return JSONResponse(failed, status, headers)
    shown = {"error": {**failed["error"], "fix": ["choose a page above"]}, "what": "page", "back": "/"}
    return HTMLResponse(render("missing.html", version=__version__, path=request.url.path, **shown), status)
