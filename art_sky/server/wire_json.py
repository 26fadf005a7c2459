"""JSON as the server speaks it: strict when read, ASCII when written.

Read: NaN, infinities, numbers beyond floats, endless digits and deep nesting are refused, since they cannot be
stored or sent on. Written: escapes only, so that lone surrogates cross every file, log and socket.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from art_sky.errors import InvalidBody

MAX_BODY = 64 << 20
MAX_DEPTH = 100


def loads(data: bytes | str) -> Any:
    """Raises InvalidBody with what is wrong."""
    try:
        value = json.loads(data, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as e:
        raise InvalidBody(f"the body is not JSON that can be read ({e}); send one JSON object in UTF-8") from None
    if _deeper_than(value, MAX_DEPTH):
        raise InvalidBody(f"the body nests deeper than {MAX_DEPTH} levels; send a flatter one")
    return value


def dumps(value: Any) -> str:
    """ASCII JSON in one line; NaN and infinities (only our own metrics can hold them) become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_without_nan(value), allow_nan=False, separators=(",", ":"))


class AsciiJSON(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


class StrictRequest(Request):
    """Bounds the body, and reads it by `loads`."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await read_body(self, MAX_BODY)
        return self._body

    async def json(self) -> Any:
        try:
            return loads(await self.body())
        except InvalidBody as e:  # the one type that FastAPI reports as 422
            raise json.JSONDecodeError(e.message, "", 0) from None


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


async def read_body(request: Request, limit: int) -> bytes:
    """Raises HTTPException 413 as soon as more than `limit` bytes came."""
    chunks, size = [], 0
    async for chunk in Request.stream(request):
        size += len(chunk)
        if size > limit:
            raise HTTPException(413, f"the body is over {limit >> 20} MiB; send less at once")
        chunks.append(chunk)
    return b"".join(chunks)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    while level and depth >= 0:
        depth -= 1
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return bool(level)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return value
