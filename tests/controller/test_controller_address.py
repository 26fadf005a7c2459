"""The stable address: bytes both ways, requests held, cut and never sent twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from art_sky.controller import address as module
from art_sky.controller.address import Address
from art_sky.errors import Conflict

COMPLETION = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "agent@0",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
}  # fmt: skip


class Node:
    """A server behind a Unix socket. `cut`: how many of the next requests end without a whole answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[str] = []
        self.cut_before_answer = 0
        self.cut_in_answer = 0
        self.healthy = True
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path, length = line.split()[1].decode(), 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = await reader.readexactly(length)
                if not self._answer(path, body, writer):
                    return
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if path == "/health":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" if self.healthy else b"HTTP/1.1 503 no\r\n\r\n")
            return False
        self.requests.append(path)
        if self.cut_before_answer:
            self.cut_before_answer -= 1
            return False
        if path == "/v1/chat/completions":
            data = json.dumps(COMPLETION).encode()
        else:
            data = hashlib.sha256(body).hexdigest().encode() + b"x" * (3 << 20 if path == "/large" else 0)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        if self.cut_in_answer:
            self.cut_in_answer -= 1
            writer.write(head + data[: len(data) // 2])
            return False
        writer.write(head + data)
        return True


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path / "s")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def address(node: Node, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Address]:
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.01)
    made = Address("run", 0, node.path)
    await made.start()
    made.open()
    yield made
    await made.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_bytes_go_through_both_ways_and_connections_stay(address: Address, node: Node) -> None:
    async with httpx.AsyncClient(base_url=address.base_url, trust_env=False, timeout=30) as client:
        for size in (0, 10, 5 << 20):
            body = bytes(size)
            reply = await client.post("/echo", content=body)
            assert reply.text == hashlib.sha256(body).hexdigest()
        assert len((await client.get("/large")).content) == 64 + (3 << 20)
        assert len(address._clients) == 1, "one connection for all"


async def test_a_request_is_held_until_a_node_is_up(address: Address, node: Node) -> None:
    address.hold("a machine")
    async with httpx.AsyncClient(base_url=address.base_url, trust_env=False, timeout=30) as client:
        asked = asyncio.create_task(client.post("/echo", content=b"a" * (3 << 20)))
        await until(lambda: address.held == 1)
        assert node.requests == []
        address.open()
        assert (await asked).status_code == 200 and node.requests == ["/echo"]


async def test_held_too_long_is_503_with_the_next_step(node: Node) -> None:
    address = Address("run", 0, node.path, hold_seconds=0.05)
    await address.start()
    address.hold("a machine on aws")
    async with httpx.AsyncClient(base_url=address.base_url, trust_env=False, timeout=30) as client:
        reply = await client.get("/echo")
        assert reply.status_code == 503 and reply.headers["retry-after"] == "15"
        error = reply.json()["error"]
        assert error["code"] == "server_unreachable" and error["retryable"] is True
        assert "waits for a machine on aws" in error["message"] and "art-sky status" in error["message"]
        assert node.requests == []
        address.open()
        assert (await client.get("/echo")).status_code == 200
    await address.close()


async def test_a_silent_connection_is_not_held_and_one_that_left_is_not_sent(address: Address, node: Node) -> None:
    address.hold("a machine")
    silent = await asyncio.open_connection("127.0.0.1", address.port)
    _, leaving = await asyncio.open_connection("127.0.0.1", address.port)
    leaving.write(b"GET /left HTTP/1.1\r\n\r\n")
    await until(lambda: address.held == 1)
    leaving.close()
    await until(lambda: address.held == 0 and len(address._clients) == 1)
    address.open()
    async with httpx.AsyncClient(base_url=address.base_url, trust_env=False) as client:
        await client.get("/echo")
    assert node.requests == ["/echo"]
    silent[1].close()


@pytest.mark.parametrize("how", ["cut_before_answer", "cut_in_answer"])
async def test_a_request_cut_in_flight_is_an_error_and_is_not_sent_again(
    address: Address, node: Node, how: str
) -> None:
    setattr(node, how, 1)
    async with httpx.AsyncClient(base_url=address.base_url, trust_env=False, timeout=30) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/echo")
        assert node.requests == ["/echo"]
        assert (await client.get("/echo")).status_code == 200


async def test_after_a_request_without_answer_new_ones_wait_for_the_health_check(address: Address, node: Node) -> None:
    node.cut_before_answer, node.healthy = 1, False
    async with httpx.AsyncClient(base_url=address.base_url, trust_env=False, timeout=30) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/echo")
        asked = asyncio.create_task(client.get("/echo"))
        await until(lambda: address.held == 1)
        assert node.requests == ["/echo"]
        node.healthy = True
        assert (await asked).status_code == 200


async def test_openai_client_survives_the_replacement_of_the_node(address: Address, node: Node, tmp_path: Path) -> None:
    """Its normal retries are enough: cut in flight, held while no node is up, answered by the next one."""
    node.cut_in_answer = 1
    client = openai.AsyncOpenAI(
        base_url=f"{address.base_url}/v1", api_key="k", http_client=httpx.AsyncClient(trust_env=False)
    )
    asked = asyncio.create_task(
        client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}])
    )
    await until(lambda: node.requests)
    address.hold("another machine")
    await node.stop()
    await until(lambda: address.held == 1)
    await node.start()
    address.open()
    assert (await asked).choices[0].message.content == "hello"
    assert len(node.requests) == 2
    await client.close()


async def test_the_port_belongs_to_the_address(address: Address, node: Node) -> None:
    other = Address("other", address.port, node.path)
    with pytest.raises(Conflict, match=f"127.0.0.1:{address.port} of cluster 'other' is in use"):
        await other.start()


async def test_only_loopback_listens_and_nagle_is_off(address: Address) -> None:
    assert address._server is not None
    assert [s.getsockname()[0] for s in address._server.sockets] == ["127.0.0.1"]
    _, writer = await asyncio.open_connection("127.0.0.1", address.port)
    await until(lambda: address._clients)
    inside = next(iter(address._clients)).transport.get_extra_info("socket")
    assert inside.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    writer.close()
