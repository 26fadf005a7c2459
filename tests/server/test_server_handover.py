"""Which replies are part of their rollout, over real connections: those that left this process whole, and no others."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from server_fakes import Harness, harness, until

from art_sky.server.app import create_app
from art_sky.server.connection import Connection, Handover, Protocol


@pytest.fixture
async def listening(tiny_model: Path, tmp_path: Path) -> AsyncIterator[tuple[Harness, int]]:
    """A server behind uvicorn as it really runs, with small buffers; and its port."""
    async with harness(tiny_model, tmp_path) as h:
        assert (await h.register()).status_code == 200
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        config = uvicorn.Config(create_app(h.server), http=Protocol, lifespan="off", log_config=None, ws="none")
        http = uvicorn.Server(config)
        serving = asyncio.create_task(http._serve([sock]))
        await until(lambda: http.started)
        try:
            yield h, sock.getsockname()[1]
        finally:
            http.should_exit = http.force_exit = True
            await serving


class Agent:
    """A client that reads when it is told to."""

    def __init__(self, h: Harness, port: int) -> None:
        self.h, self.port = h, port
        self.exchanges = self.path = ""

    async def open(self) -> None:
        id = (await self.h.client.post("/api/v1/models/p/agent/rollouts")).json()["rollout"]
        self.path, self.exchanges = f"/rollouts/{id}/v1/chat/completions", f"/api/v1/rollouts/{id}/exchanges"

    async def ask(self, *headers: str, **fields: Any) -> socket.socket:
        """Sends a request whose reply is long, and reads nothing."""
        body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}], "n": 8, "logprobs": True, **fields}
        data = json.dumps(body).encode()
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(made, ("127.0.0.1", self.port))
        head = [f"POST {self.path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", "Content-Type: application/json",
                f"Authorization: Bearer {self.h.server.token}", f"Content-Length: {len(data)}", *headers]  # fmt: skip
        await loop.sock_sendall(made, "\r\n".join([*head, "", ""]).encode() + data)
        return made

    async def recorded(self) -> list[Any]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as client:
            headers = {"authorization": f"Bearer {self.h.server.token}"}
            found = (await client.get(self.exchanges, headers=headers)).json()
        assert found["complete"] is True
        return list(found["exchanges"])


@pytest.fixture
async def agent(listening: tuple[Harness, int]) -> Agent:
    h, port = listening
    h.engine.script = lambda _: ["x" * 400]  # with logprobs, and eight of them: more than the buffers take
    made = Agent(h, port)
    await made.open()
    return made


async def read_all(made: socket.socket) -> bytes:
    """As much as belongs to the reply."""
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(30):
        while piece := await loop.sock_recv(made, 65536):
            data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            length = next((int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length")), None)
            if (length is not None and len(body) == length) or data.endswith(b"0\r\n\r\n"):
                break
    return data


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_was_not_read_is_no_part_of_its_rollout(agent: Agent, stream: bool) -> None:
    """All of it was sent, as far as the application can tell; then the connection breaks."""
    made = await agent.ask(stream=stream)
    if stream:
        await asyncio.sleep(0.2)
    else:
        await until(lambda: agent.h.server.gateway.replies == 1)
        await asyncio.sleep(0.05)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()
    assert await agent.recorded() == []
    # Asked again without a word about it, as by a client that is not OpenAI's: the only one that counts.
    again = await agent.ask(stream=stream)
    assert (b"[DONE]" if stream else b"x" * 400) in await read_all(again)
    again.close()
    assert len(await agent.recorded()) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [[], ["Connection: close"]])
async def test_a_reply_that_is_read_late_is_part_of_it_at_once(agent: Agent, stream: bool, headers: list[str]) -> None:
    made = await agent.ask(*headers, stream=stream)
    await asyncio.sleep(0.3)
    assert len(await read_all(made)) > 200_000
    assert len(await agent.recorded()) == 1, "known by the time at which the agent may ask"
    made.close()


async def test_a_retry_takes_the_place_of_one_that_is_still_on_its_way(agent: Agent) -> None:
    first = await agent.ask()
    await until(lambda: agent.h.server.gateway.replies == 1)
    second = await agent.ask("x-stainless-retry-count: 1")
    reply = await read_all(second)
    await read_all(first)  # late, and nobody waits for it any more
    (found,) = await agent.recorded()
    assert found["completion_id"].encode() in reply
    for made in (first, second):
        made.close()


class Transport:
    """What asyncio's tells."""

    def __init__(self) -> None:
        self.closing, self.size = False, 0

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.size


async def test_what_uvicorn_drops_without_a_word_is_known() -> None:
    async def send(message: str) -> None:
        if message == "ends in between":
            connection.ended = True
        if message == "closes":
            transport.closing = True  # by itself, as the reply ends the connection

    for messages, whole in (
        (["start", "body"], True),
        (["start", "ends in between"], False),
        (["start", "closes"], True),
        (["closes", "body"], False),
    ):
        transport = Transport()
        connection = Connection(transport)  # type: ignore[arg-type]
        handover = Handover({"state": {"art_sky.connection": connection}}, send)
        for message in messages:
            await handover.send(message)
        assert await handover.whole() is whole, messages
    # What is left in the buffer when the connection breaks was never sent.
    transport = Transport()
    connection, transport.size = Connection(transport), 1  # type: ignore[arg-type]
    handover = Handover({"state": {"art_sky.connection": connection}}, send)
    await handover.send("body")
    waiting = asyncio.create_task(handover.whole())
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    connection.ended = connection.failed = True
    assert await waiting is False
    assert await Handover({}, send).whole(), "of another server it is not known"
