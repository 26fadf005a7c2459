"""Who may ask: the token file, and the check in front of every route but the health check (rule R5)."""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import time
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_sky.errors import ArtSkyError, InvalidInput, StoreError, Unauthorized
from art_sky.server.rollouts import Rollouts
from art_sky.server.wire_json import AsciiJSON

log = logging.getLogger("art_sky.server")

_LOOPBACK = re.compile(r"(?:https?://)?(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?")
_ROLLOUT = re.compile(r"/rollouts/([^/]+)/v1(?:/.*)?")
_FREE = {"/health"}
_POLLED = {"/health", "/api/v1/status"}  # every few seconds, by watchdog and controller


def load_token(file: Path) -> str:
    """The token in `file`, made with mode 0600 when absent. Raises StoreError when others may read it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if file.stat().st_mode & 0o077:
            raise StoreError(f"{file} can be read by other users; run `chmod 600 {file}`") from None
        if token := file.read_text().strip():
            return token
        raise StoreError(f"{file} is empty; delete it, then start the server again") from None
    except OSError as e:
        raise StoreError(f"cannot write {file}: {e.strerror}; give a state folder that can be written") from e
    with os.fdopen(fd, "w") as f:
        token = secrets.token_urlsafe(32)
        f.write(token + "\n")
    return token


class Guard:
    """Checks Host and Origin (a web page must not reach a loopback server through a name it controls), then the
    bearer token; a rollout's key opens that rollout's dialect only. Writes the access log, without queries."""

    def __init__(self, app: ASGIApp, token: str, rollouts: Rollouts) -> None:
        self._app, self._token, self._rollouts = app, token, rollouts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no websockets here
        began, status = time.monotonic(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
        except ArtSkyError as e:
            await AsciiJSON(e.to_wire(), e.status)(scope, receive, watched)
        else:
            await self._app(scope, receive, watched)
        finally:
            path = scope["path"].encode("ascii", "backslashreplace").decode()[:300]
            seconds = time.monotonic() - began
            level = logging.DEBUG if path in _POLLED and status == 200 else logging.INFO
            log.log(level, "%s %s -> %d in %.3f s", scope["method"], path, status, seconds)

    def _check(self, path: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if not _LOOPBACK.fullmatch(headers.get("host", "")) or (origin and not _LOOPBACK.fullmatch(origin)):
            raise InvalidInput("this server answers only to 127.0.0.1 and localhost; use its loopback address")
        if path in _FREE:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode()):
            return
        rollout = _ROLLOUT.fullmatch(path)
        if rollout and self._rollouts.admits(given, rollout[1]):
            return
        what = "has no bearer token" if not given else "has a wrong token"
        raise Unauthorized(f"the request {what}; send `Authorization: Bearer` with the content of the token file")
