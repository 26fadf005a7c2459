"""The stable local address of a cluster: `127.0.0.1:PORT` here, whichever machine serves behind it.

Bytes go through as they come, unread. While no node is up, a connection that has sent something is held, then
answered 503; a request that was cut in flight is an error to its client (the connection closes) and is never sent
again from here: whether it took effect is not known, and its client's retry is a new turn.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from art_sky.errors import Conflict, ServerUnreachable

log = logging.getLogger("art_sky.controller")

HOLD_SECONDS = 540.0  # below the 10 minutes that OpenAI's client waits for a reply
RETRY_AFTER_SECONDS = 15
PROBE_SECONDS = 0.5
_MOST_HELD = 1 << 20  # bytes of a held request that are read ahead


class Address:
    """Lives in one event loop."""

    def __init__(self, name: str, port: int, upstream: Path, *, hold_seconds: float = HOLD_SECONDS) -> None:
        self.name, self.port = name, port
        self.upstream, self.hold_seconds = upstream, hold_seconds
        self.waits_for = "a machine to come up"
        self._gate = asyncio.Event()  # set while requests go through
        self._up = False
        self._server: asyncio.Server | None = None
        self._probe: asyncio.Task[None] | None = None
        self._clients: set[_Client] = set()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def held(self) -> int:
        """Connections that wait for a node."""
        return sum(c.waiting for c in self._clients)

    async def start(self) -> None:
        """Port 0 becomes any free one. Raises Conflict when the port is another program's."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Client(self), "127.0.0.1", self.port, backlog=1024)
        except OSError as e:
            raise Conflict(
                f"the address 127.0.0.1:{self.port} of cluster {self.name!r} is in use by another program; end that, "
                "and it comes back by itself"
            ) from e
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Ends what is in flight, too."""
        self.hold("nothing: the cluster is down")
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.cut()

    def open(self) -> None:
        """A node is up: requests go through."""
        if not self._up:
            self._up = True
            self._gate.set()

    def hold(self, waits_for: str) -> None:
        """No node is up: new requests wait for `waits_for`."""
        self.waits_for = waits_for
        self._up = False
        self._gate.clear()

    def doubt(self) -> None:
        """A request got no answer at all. New ones wait until the server answers its health check again."""
        if self._up and self._probe is None:
            self._gate.clear()
            self._probe = asyncio.get_running_loop().create_task(self._until_healthy())

    async def wait_until_open(self) -> bool:
        """False after `hold_seconds`."""
        try:
            async with asyncio.timeout(self.hold_seconds):
                await self._gate.wait()
            return True
        except TimeoutError:
            return False

    async def _until_healthy(self) -> None:
        while self._up and not await _is_healthy(self.upstream):  # noqa: ASYNC110  # what is waited for is elsewhere
            await asyncio.sleep(PROBE_SECONDS)
        self._probe = None
        if self._up:
            self._gate.set()


class _Client(asyncio.Protocol):
    """A connection from an agent, joined to one to the node when it has sent something."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._held = bytearray()
        self._joining: asyncio.Task[None] | None = None
        self._node: _Node | None = None
        self.transport: asyncio.Transport

    @property
    def waiting(self) -> bool:
        return self._joining is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._address._clients.add(self)

    def data_received(self, data: bytes) -> None:
        if self._node is not None:
            self._node.send(data)
            return
        self._held += data
        if len(self._held) > _MOST_HELD:
            self.transport.pause_reading()
        if self._joining is None:
            self._joining = asyncio.get_running_loop().create_task(self._join())

    def eof_received(self) -> bool:
        """A client that shuts its sending side while it is held has left; later, it may still read."""
        if self._node is None:
            return False
        self._node.end()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._address._clients.discard(self)
        if self._joining is not None:
            self._joining.cancel()
        if self._node is not None:
            self._node.transport.abort()

    def pause_writing(self) -> None:
        if self._node is not None:
            self._node.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._node is not None:
            self._node.transport.resume_reading()

    def cut(self) -> None:
        self.transport.abort()

    async def _join(self) -> None:
        loop = asyncio.get_running_loop()
        while await self._address.wait_until_open():
            path = str(self._address.upstream)
            try:
                _, node = await loop.create_unix_connection(lambda: _Node(self, self._address), path)
            except OSError:
                self._address.doubt()
                await asyncio.sleep(PROBE_SECONDS)
                continue
            self._node, self._joining = node, None
            node.send(bytes(self._held))
            self._held.clear()
            self.transport.resume_reading()
            return
        self._joining = None
        log.warning("%s: a request was held for %.0f s and refused", self._address.name, self._address.hold_seconds)
        self.transport.write(_refusal(self._address))
        self.transport.close()


class _Node(asyncio.Protocol):
    """The same connection on its way through the tunnel."""

    def __init__(self, client: _Client, address: Address) -> None:
        self._client, self._address = client, address
        self._unanswered = False  # something was sent since the last byte came back
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, data: bytes) -> None:
        self._unanswered = True
        self.transport.write(data)

    def end(self) -> None:
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def data_received(self, data: bytes) -> None:
        self._unanswered = False
        self._client.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._unanswered:
            self._address.doubt()
        # After what came is out; a reply that was cut is then too short, which its client sees.
        self._client.transport.close()

    def pause_writing(self) -> None:
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client.transport.resume_reading()


async def _is_healthy(upstream: Path) -> bool:
    try:
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_unix_connection(upstream)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _refusal(address: Address) -> bytes:
    error = ServerUnreachable(
        f"no machine of cluster {address.name!r} was up within {address.hold_seconds / 60:g} minutes; it waits for "
        f"{address.waits_for}: see `art-sky status`, then send the request again"
    )
    body = json.dumps(error.to_wire()).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: {RETRY_AFTER_SECONDS}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
