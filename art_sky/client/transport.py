"""HTTP to a server that may be restarted, or be out of reach for a while."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import httpx

from art_sky.client.model import is_loopback
from art_sky.errors import ArtSkyError, InvalidConfig, ServerUnreachable, from_wire

T = TypeVar("T")

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds between attempts, doubled each time and jittered


class Backoff:
    """The waits between attempts, until `patience` seconds have gone without an answer."""

    def __init__(
        self,
        patience: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience, self._sleep, self._clock = patience, sleep, clock
        self.reset()

    def reset(self) -> None:
        """There was an answer."""
        self._began, self._wait = self._clock(), FIRST_WAIT

    async def wait(self, error: ArtSkyError) -> None:
        """Waits, or raises `error` when the next attempt would come too late."""
        seconds = self._wait * random.uniform(0.5, 1.0)
        if self._clock() - self._began + seconds > self._patience:
            raise error
        await self._sleep(seconds)
        self._wait = min(self._wait * 2, LONGEST_WAIT)


class Transport:
    """Requests to one server. Only calls that may be repeated go through it, and all of them may.

    A call is repeated for `patience` seconds while there is no answer, or one that says to try again. `handler`
    answers instead of a network, in tests.
    """

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        patience: float = 60.0,
        handler: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise InvalidConfig(f"{base_url!r} is no address of a server; give one like http://127.0.0.1:8080")
        self.base_url, self.token = base_url.rstrip("/"), token
        self._patience, self._sleep, self._clock = patience, sleep, clock
        self._handler = handler
        # A connection belongs to its event loop; a notebook or a test may have one loop after another.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        read_seconds: float = READ_SECONDS,
    ) -> Any:
        """The JSON of the reply. `body` is any JSON value. Raises the server's typed error, or ServerUnreachable."""
        # In ASCII, so that lone surrogates cross; httpx would refuse them.
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        reply = await self._send(method, path, content, headers, read_seconds)
        return json.loads(reply.content) if reply.content else None

    async def put(self, path: str, content: bytes) -> None:
        # The server may write to a slow store before it answers.
        await self._send("PUT", path, content, {"Content-Type": "application/octet-stream"}, 600.0)

    async def get(self, path: str) -> bytes:
        return (await self._send("GET", path, None, {}, READ_SECONDS)).content

    @asynccontextmanager
    async def lines(self, path: str, params: Mapping[str, str]) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a stream, once: raises ServerUnreachable when the connection fails or breaks."""
        try:
            async with self._client().stream("GET", self.base_url + path, params=dict(params)) as reply:
                if reply.is_error:
                    raise _error(reply.status_code, await reply.aread())
                yield reply.aiter_lines()
        except httpx.TransportError as e:
            raise self._unreachable(e) from e

    def backoff(self, patience: float | None = None) -> Backoff:
        return Backoff(self._patience if patience is None else patience, self._sleep, self._clock)

    async def close(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        read_seconds: float,
    ) -> httpx.Response:
        timeout = httpx.Timeout(read_seconds, connect=CONNECT_SECONDS)
        backoff = self.backoff()
        while True:
            try:
                reply = await self._client().request(
                    method, self.base_url + path, content=content, headers=headers, timeout=timeout
                )
                if not reply.is_error:
                    return reply
                error = _error(reply.status_code, reply.content)
                if not error.retryable:
                    raise error
            except httpx.TransportError as e:
                error = self._unreachable(e)
            await backoff.wait(error)

    def _unreachable(self, e: httpx.TransportError) -> ServerUnreachable:
        detail = f"{type(e).__name__}: {e}" if str(e) else type(e).__name__
        return ServerUnreachable(
            f"no answer from the server at {self.base_url} ({detail}); see `art-sky status` and the server's log, then "
            "call again: what was sent before is not applied twice"
        )

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
                transport=self._handler,
                trust_env=not is_loopback(self.base_url),
            )
        return client


def _error(status: int, content: bytes) -> ArtSkyError:
    try:
        body = json.loads(content)
    except ValueError:
        body = content.decode("utf-8", "replace")
    error = from_wire(body, status)
    if type(error) is ArtSkyError and status in (502, 503, 504):
        return ServerUnreachable(f"{error.message}; the server is not ready, call again")
    return error
