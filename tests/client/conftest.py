"""A fake server for each test, and a backend whose waits take no time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from client_fake_server import TOKEN, FakeServer, running

import art_sky as art
from art_sky.client.http_backend import HttpBackend
from art_sky.client.transport import Transport


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with running(FakeServer()) as server:
        yield server


async def no_wait(seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def backend(server: FakeServer) -> AsyncIterator[HttpBackend]:
    async with HttpBackend(Transport(server.base_url, TOKEN, sleep=no_wait)) as backend:
        yield backend


@pytest.fixture
async def model(backend: HttpBackend) -> art.TrainableModel[None]:
    model: art.TrainableModel[None] = art.TrainableModel(name="agent", project="p", base_model="tiny")
    await model.register(backend)
    return model
