from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from server_fakes import Harness, harness


@pytest.fixture
async def bare(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Harness]:
    """A server that knows no model yet."""
    async with harness(tiny_model, tmp_path) as h:
        yield h


@pytest.fixture
async def server(bare: Harness) -> Harness:
    """A server with the model p/agent."""
    reply = await bare.register()
    assert reply.status_code == 200, reply.text
    return bare
