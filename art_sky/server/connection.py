"""Whether a reply was handed over whole. ASGI does not say: uvicorn drops what is sent to a client that has gone, and
keeps in this process what the client has not read yet."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

POLL_SECONDS = 0.005
_KEY = "art_sky.connection"  # in the `state` of a request's scope


class Connection:
    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.ended = False
        self.failed = False  # it ended before all that was written had left this process


class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses its implementation at run time
    """Uvicorn's, whose requests know their connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._connection = Connection(transport)
        self.app_state: dict[str, Any] = {**self.app_state, _KEY: self._connection}

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.ended, self._connection.failed = True, exc is not None
        super().connection_lost(exc)


class Handover:
    """One reply on its way: `send` is what it is sent with. Of another server than ours it knows what `send` raises."""

    def __init__(self, scope: Any, send: Any) -> None:
        self._connection: Connection | None = scope.get("state", {}).get(_KEY)
        self._send, self._dropped = send, False

    async def send(self, message: Any) -> None:
        connection = self._connection
        closing = connection is not None and connection.transport.is_closing()
        await self._send(message)
        # Ended in there, it dropped the message without a word; ended by this very message, it is so a moment later.
        self._dropped = self._dropped or closing or (connection is not None and connection.ended)

    async def whole(self) -> bool:
        """To be asked right after the last message; waits until all has left this process."""
        connection = self._connection
        if self._dropped or connection is None:
            return not self._dropped
        while not connection.ended and connection.transport.get_write_buffer_size() > 0:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        return not connection.failed
