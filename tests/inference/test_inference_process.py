"""The engine in its own process: streams, cancels, dies and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inference_engines import prompt

from art_sky.config import EngineConfig
from art_sky.errors import ChildDied, InvalidInput, PromptTooLong
from art_sky.inference.cpu import CpuEngine
from art_sky.inference.protocol import GenerateEnd, GenerateRequest, TokenDelta
from art_sky.schemas import AdapterRef


@pytest.fixture
async def cpu_engine(tiny_model: Path, tmp_path: Path) -> AsyncIterator[CpuEngine]:
    engine = CpuEngine(tiny_model, EngineConfig(dtype="float32", threads=1), tmp_path / "engine.log")
    await engine.start()
    yield engine
    await engine.close()


async def answer(engine: CpuEngine, request: GenerateRequest) -> tuple[list[TokenDelta], GenerateEnd]:
    events = [event async for event in engine.generate(request)]
    end = events.pop()
    assert isinstance(end, GenerateEnd)
    return [e for e in events if isinstance(e, TokenDelta)], end


async def test_streams_errors_cancel_and_recovery(
    cpu_engine: CpuEngine, adapters: list[AdapterRef], tmp_path: Path
) -> None:
    def ask(length: int = 20, max_tokens: int = 5, which: int = 0) -> GenerateRequest:
        return GenerateRequest(prompt_ids=prompt(length), adapter=adapters[which], max_tokens=max_tokens, seed=1)

    # Made before the child is ready, they wait for it.
    (first, end), (other, _) = await asyncio.gather(answer(cpu_engine, ask()), answer(cpu_engine, ask(which=1)))
    assert len(first) == len(other) == 5 and end == GenerateEnd(finish_reason="length", cached_tokens=0)
    assert await cpu_engine.context_length() == 512

    with pytest.raises(PromptTooLong, match="512"):
        await answer(cpu_engine, ask(length=600))
    bad = AdapterRef(name="p/agent@8", path=str(tmp_path))
    with pytest.raises(InvalidInput, match="p/agent@8"):
        await cpu_engine.prepare(bad)
    await cpu_engine.prepare(adapters[2])

    stream = cpu_engine.generate(ask(max_tokens=400))
    assert isinstance(await anext(stream), TokenDelta)
    assert (await cpu_engine.status()).running == 1
    await stream.aclose()
    while (status := await cpu_engine.status()).running:
        pass
    assert status.tokens_sampled < 400
    assert set(status.adapters) == {a.name for a in adapters[:3]}

    stream = cpu_engine.generate(ask(max_tokens=400))
    await anext(stream)
    assert cpu_engine.pid is not None
    os.kill(cpu_engine.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="engine"):
        async for _ in stream:
            pass
    again, _ = await answer(cpu_engine, ask())
    assert [t.token_id for t in again] == [t.token_id for t in first]
    assert (await cpu_engine.status()).restarts == 1
