"""A real vLLM on the CPU, with the tiny model in float32: numbers, adapters, pauses, deaths. One process for all."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
import torch
from inference_engines import Reference, make_adapter, prompt
from safetensors.torch import load_file, save_file

from art_sky.config import EngineConfig
from art_sky.errors import ChildDied, InvalidInput
from art_sky.inference.protocol import GenerateEnd, GenerateRequest, TokenDelta
from art_sky.inference.vllm import VllmEngine
from art_sky.schemas import AdapterRef

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    config = EngineConfig(
        kind="vllm", dtype="float32", context_length=512, kv_cache_mib=128, max_adapters=2, max_lora_rank=8
    )
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # so that sleep can be asked for, which on a CPU is a pause
    engine = VllmEngine(tiny_model, config, tmp_path_factory.mktemp("vllm") / "engine.log")
    await engine.start()
    yield engine
    await engine.close()
    del os.environ["VLLM_SERVER_DEV_MODE"]


def ask(adapter: AdapterRef, length: int = 20, *, seed: int = 1, max_tokens: int = 12, **options: object):
    return GenerateRequest(
        prompt_ids=prompt(length, seed), adapter=adapter, max_tokens=max_tokens, seed=seed, **options
    )


async def answer(engine: VllmEngine, request: GenerateRequest) -> tuple[list[TokenDelta], GenerateEnd]:
    events = [event async for event in engine.generate(request)]
    end = events.pop()
    assert isinstance(end, GenerateEnd)
    return [e for e in events if isinstance(e, TokenDelta)], end


def off(reference: Reference, request: GenerateRequest, tokens: list[TokenDelta]) -> torch.Tensor:
    """|difference| of each sampled token's logprob from a plain PEFT forward's."""
    ids = [t.token_id for t in tokens]
    rows = reference.logprobs(request.prompt_ids + ids, request.temperature or 1.0)[len(request.prompt_ids) - 1 : -1]
    return (rows.gather(1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor([t.logprob for t in tokens])).abs()


async def test_sixteen_streams_of_three_adapters(
    engine: VllmEngine, adapters: list[AdapterRef], tiny_model: Path
) -> None:
    """More adapters at once than there are places for; logprobs are the trainer's at every temperature."""
    temperatures = (1.0, 0.7, 1.3, 0.0)
    requests = [ask(adapters[i % 3], 10 + i, seed=i, temperature=temperatures[i // 3 % 4]) for i in range(16)]
    answers = await asyncio.gather(*(answer(engine, r) for r in requests))
    references = {a.name: Reference(tiny_model, Path(a.path)) for a in adapters[:3]}
    differences = [off(references[r.adapter.name], r, t) for r, (t, _) in zip(requests, answers, strict=True)]
    assert torch.cat(differences).mean() < 1e-5 and torch.cat(differences).max() < 1e-4
    assert all(len(t) == 12 and end.finish_reason == "length" for t, end in answers)
    again = await asyncio.gather(*(answer(engine, r) for r in requests[:4]))
    assert [[t.token_id for t in tokens] for tokens, _ in again] == [
        [t.token_id for t in tokens] for tokens, _ in answers[:4]
    ]


async def test_greedy_top_logprobs_and_stops(engine: VllmEngine, adapters: list[AdapterRef], tiny_model: Path) -> None:
    reference = Reference(tiny_model, Path(adapters[0].path))
    request = ask(adapters[0], temperature=0, max_tokens=6, top_logprobs=20)
    tokens, _ = await answer(engine, request)
    ids = [t.token_id for t in tokens]
    assert ids == reference.greedy(request.prompt_ids, 6)
    rows = reference.logprobs(request.prompt_ids + ids)[len(request.prompt_ids) - 1 : -1]
    for row, token in zip(rows, tokens, strict=True):
        best = row.topk(20)
        assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert {i for i, _ in token.top} == set(best.indices.tolist())
    sampled, _ = await answer(engine, ask(adapters[0], seed=8, max_tokens=30, top_logprobs=1))
    assert all(len(t.top) == 1 and t.top[0][1] >= t.logprob for t in sampled)
    stopped, end = await answer(engine, request.model_copy(update={"stop_token_ids": [ids[2]]}))
    assert [t.token_id for t in stopped] == ids[: ids.index(ids[2]) + 1] and end.finish_reason == "stop"
    # No end-of-turn of the model's own ends a sequence.
    long, end = await answer(engine, ask(adapters[0], seed=5, max_tokens=400))
    assert len(long) == 400 and end.finish_reason == "length"


async def test_the_prefix_cache_knows_the_step(
    engine: VllmEngine, adapters: list[AdapterRef], tiny_model: Path
) -> None:
    requests = [ask(a, 300, temperature=0) for a in (*adapters[:2], *adapters[:2])]
    answers = [await answer(engine, r) for r in requests]
    assert [end.cached_tokens > 0 for _, end in answers] == [False, False, True, True]
    for request, (tokens, _) in zip(requests, answers, strict=True):
        assert off(Reference(tiny_model, Path(request.adapter.path)), request, tokens).max() < 1e-4


async def test_an_old_step_is_served_while_newer_ones_come_and_go(
    engine: VllmEngine, adapters: list[AdapterRef]
) -> None:
    request = ask(adapters[0], max_tokens=200)
    alone, _ = await answer(engine, request)
    stream = engine.generate(request)
    got = [await anext(stream)]
    for other in adapters[1:4]:
        await answer(engine, ask(other))
    assert adapters[0].name in (await engine.status()).adapters
    got += [event async for event in stream]
    assert [t.token_id for t in got if isinstance(t, TokenDelta)] == [t.token_id for t in alone]


async def test_broken_adapters_are_refused_and_the_old_one_stays(
    engine: VllmEngine, adapters: list[AdapterRef], tiny_model: Path, tmp_path: Path
) -> None:
    await engine.prepare(adapters[0])

    def broken(name: str, change: Callable[[Path], object]) -> AdapterRef:
        folder = tmp_path / name
        shutil.copytree(adapters[0].path, folder)
        change(folder / "adapter_model.safetensors")
        return AdapterRef(name=f"p/agent@{name}", path=str(folder))

    def wrong_shape(file: Path) -> None:
        save_file({k: v[:, :7].contiguous() if "lora_A" in k else v for k, v in load_file(file).items()}, file)

    def not_numbers(file: Path) -> None:
        save_file({k: v * float("nan") for k, v in load_file(file).items()}, file)

    high = make_adapter(tiny_model, tmp_path / "high", 1, rank=16)
    for bad in (
        broken("cut", lambda f: f.write_bytes(f.read_bytes()[:1000])),
        broken("gone", Path.unlink),
        broken("shape", wrong_shape),
        broken("nan", not_numbers),
        AdapterRef(name="p/agent@high", path=str(high)),
    ):
        with pytest.raises(InvalidInput, match=f"{bad.name} cannot be used"):
            await engine.prepare(bad)
    assert adapters[0].name in (await engine.status()).adapters
    assert len((await answer(engine, ask(adapters[0])))[0]) == 12
    assert (await engine.status()).restarts == 0


async def test_closing_a_stream_ends_it_in_vllm(engine: VllmEngine, adapters: list[AdapterRef]) -> None:
    stream = engine.generate(ask(adapters[0], max_tokens=450))
    await anext(stream)
    assert (await engine.status()).running == 1
    await stream.aclose()
    async with asyncio.timeout(5):
        while (await engine.status()).running:
            pass


async def test_running_requests_survive_sleep(engine: VllmEngine, adapters: list[AdapterRef]) -> None:
    """What one shared GPU does around training, but for the memory, which vLLM does not free on a CPU."""
    request = ask(adapters[0], max_tokens=300)
    alone, _ = await answer(engine, request)
    assert engine._process is not None and engine._process.client is not None
    client = engine._process.client
    got: list[TokenDelta | GenerateEnd] = []

    async def collect() -> None:
        async for event in engine.generate(request):
            got.append(event)

    running = asyncio.create_task(collect())
    while len(got) < 20:
        await asyncio.sleep(0.005)
    await client.sleep()
    await asyncio.sleep(0.3)  # what was on its way has arrived
    count = len(got)
    late = asyncio.create_task(answer(engine, ask(adapters[0], max_tokens=5)))
    await asyncio.sleep(0.5)
    assert len(got) == count < 300 and not late.done()
    await client.wake_up()
    await running
    assert len((await late)[0]) == 5
    assert [t.token_id for t in got if isinstance(t, TokenDelta)] == [t.token_id for t in alone]


@pytest.mark.parametrize("victim", ["api_server", "VLLM::EngineCore"])
async def test_killed_and_back(victim: str, engine: VllmEngine, adapters: list[AdapterRef]) -> None:
    before = (await engine.status()).restarts
    alone, _ = await answer(engine, ask(adapters[1]))
    stream = engine.generate(ask(adapters[0], max_tokens=450))
    await anext(stream)
    assert engine.pid is not None
    group = psutil.Process(engine.pid).children(recursive=True)
    pid = next(p.pid for p in group if victim in " ".join(p.cmdline()))
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ChildDied, match="call again"):
        async for _ in stream:
            pass
    while (await engine.status()).state == "ready":
        await asyncio.sleep(0.02)
    assert time.monotonic() - began < 2
    again, _ = await answer(engine, ask(adapters[1]))  # waits, and brings its adapter
    assert [t.token_id for t in again] == [t.token_id for t in alone]
    assert (await engine.status()).restarts == before + 1
    assert not [p for p in group if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
