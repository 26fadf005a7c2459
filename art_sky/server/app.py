"""The FastAPI application around a `Server`: routes, and every error in one shape."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from art_sky import __version__
from art_sky.errors import ArtSkyError, InvalidBody, InvalidInput, NotFound
from art_sky.server.api import api_router
from art_sky.server.chat_routes import chat_router
from art_sky.server.security import Guard
from art_sky.server.server import Server
from art_sky.server.wire_json import AsciiJSON
from art_sky.store.os_errors import full_disk

log = logging.getLogger("art_sky.server")


def create_app(server: Server) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.close()

    app = FastAPI(title="art-sky", version=__version__, lifespan=lifespan, default_response_class=AsciiJSON)
    app.include_router(api_router(server))
    app.include_router(chat_router(server))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server answers; the one route without a token."""
        return {"status": "ok", "version": __version__}

    app.add_exception_handler(ArtSkyError, _known)
    app.add_exception_handler(RequestValidationError, _unreadable)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(OSError, _system)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Guard, token=server.token, rollouts=server.rollouts)
    return app


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, ArtSkyError)
    if error.status >= 500:
        log.error("%s: %s", error.code, ascii(error.message))
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return AsciiJSON(error.to_wire(), error.status, headers)


async def _unreadable(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = []
    for e in error.errors()[:5]:
        where = ".".join(str(p) for p in e["loc"] if p != "body") or "body"
        why = str(e.get("ctx", {}).get("error") or e["msg"])
        wrong.append(f"{where[:120]}: {why[:300]}")
    return AsciiJSON(InvalidBody(f"{'; '.join(wrong)}; mend what is named").to_wire(), InvalidBody.status)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind: type[ArtSkyError] = NotFound if error.status_code == 404 else InvalidInput
    message: Any = error.detail
    if error.status_code in (404, 405):
        message = f"{request.method} {request.url.path[:200]} is not a route of this server; /openapi.json lists them"
    return AsciiJSON(kind(str(message)).to_wire(), error.status_code, error.headers)


async def _system(request: Request, error: Exception) -> Response:
    """A full disk is no defect of the server."""
    assert isinstance(error, OSError)
    known = full_disk(error)
    return await (_unexpected(request, error) if known is None else _known(request, known))


async def _unexpected(request: Request, error: Exception) -> Response:
    log.exception("%s %s", request.method, ascii(request.url.path)[:200], exc_info=error)
    message = f"the server failed ({type(error).__name__}); see its log and report it, then try again"
    return AsciiJSON(ArtSkyError(message).to_wire(), 500)
