"""The main job with a real vLLM on the CPU instead of our own engine: the same client, server, trainer and store."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import openai
import psutil
import pytest
from e2e_run import TRAIN, choices, make_model, sample

import art_sky as art
from art_sky.demo import DemoOptions, StepRow, run_demo

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VLLM = art.EngineConfig(kind="vllm", dtype="float32", threads=1, kv_cache_mib=128)
MODULE = "vllm.entrypoints.openai.api_server"


class Quiet:
    def phase(self, text: str, done: int = 0, total: int | None = None) -> None: ...
    def note(self, text: str) -> None: ...
    def step(self, row: StepRow) -> None: ...
    def validation(self, step: int, reward: float) -> None: ...


def vllm_pids(server: int) -> list[int]:
    """vLLM's API server, without the keeper that has it as its argument."""
    children = psutil.Process(server).children(recursive=True)
    return [p.pid for p in children if p.cmdline()[1:3] == ["-m", MODULE]]


async def greedy(model: art.TrainableModel, step: int) -> list[int]:
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step),
        messages=[{"role": "user", "content": "task"}],
        max_tokens=12,
        temperature=0,
    )
    assert completion.model == f"agent@{step}"
    return list(completion.choices[0].token_ids)


async def test_a_run_with_vllm(tiny_model: Path, tmp_path: Path) -> None:
    async with art.LocalBackend(tmp_path / "run", engine=VLLM) as backend:
        model = make_model(tiny_model)
        await model.register(backend)
        groups = await sample(model, seed=1)  # 16 at once
        first = await model.train(groups, config=TRAIN)
        assert (first.step, first.updates) == (1, 1)
        assert first.metrics["policy/sampler_mismatch_abs"] < 1e-4

        # name@1 is another model than name@0, and the one that the trainer computes.
        assert await greedy(model, 1) != await greedy(model, 0)
        second = await model.train(await sample(model, seed=2, turns=2), config=TRAIN)
        assert second.metrics["policy/sampler_mismatch_abs"] < 1e-4
        assert abs(second.metrics["policy/sampler_mismatch_mean"]) < 1e-4

        with pytest.raises(openai.NotFoundError, match="has no step 9"):
            await greedy(model, 9)

        # An old step streams on while a train call is done and its step loaded.
        stream = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(0),
            messages=[{"role": "user", "content": "count"}],
            max_tokens=400,
            stream=True,
            seed=5,
        )
        pieces = [await anext(stream)]
        third = await model.train(await sample(model, seed=3), config=TRAIN)
        pieces += [piece async for piece in stream]
        assert third.step == 3 and pieces[-1].choices[0].finish_reason is not None

        status = await backend.server_status()
        assert status.engine["restarts"] == 0 and "tests/agent@3" in status.engine["adapters"]
        before = await greedy(model, 2)
        rollouts = asyncio.create_task(sample(model, seed=4, groups=4, size=4, turns=2))
        while not (await backend.server_status()).engine["running"]:
            await asyncio.sleep(0.01)
        (pid,) = vllm_pids(status.pid)
        os.kill(pid, signal.SIGKILL)
        killed = await rollouts  # the client tries again until the engine is back
        assert all(len(g.trajectories) == 4 and not g.exceptions for g in killed)
        assert await greedy(model, 2) == before
        assert (await backend.server_status()).engine["restarts"] == 1
        fourth = await model.train(killed, config=TRAIN)
        assert fourth.step == 4
        assert {c.sampling["model"] for g in killed for t in g for c in choices(t)} == {"agent@3"}
    assert not psutil.pid_exists(status.pid)


async def test_the_trainer_finds_vllms_logprobs_in_bfloat16(tmp_path: Path) -> None:
    """SmolLM2 with trained weights; the bounds are those of our own engine."""
    topics = ["the sea", "a clock", "bread", "winter", "trains"]
    async with art.LocalBackend(tmp_path / "run", engine=art.EngineConfig(kind="vllm")) as backend:
        model = art.TrainableModel(name="writer", project="tests", base_model="smollm2-135m")
        await model.register(backend)
        seen = []
        for step in range(2):

            async def write(topic: str, i: int, step: int = step) -> art.Trajectory:
                messages = [{"role": "user", "content": f"Write about {topic}."}]
                completion = await model.openai_client().chat.completions.create(
                    model=model.get_inference_name(),
                    messages=messages,
                    max_tokens=40,
                    temperature=(1.0, 0.7, 1.3)[i],
                    seed=10 * step + i,
                )
                choice = completion.choices[0]
                return art.Trajectory(messages_and_choices=[*messages, choice], reward=float(i))

            groups = [art.TrajectoryGroup(write(topic, i) for i in range(3)) for topic in topics]
            groups = await art.gather_trajectory_groups(groups, pbar_desc=None)
            seen.append((await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))).metrics)
    trained = seen[1]  # sampled with weights that the first step changed
    assert trained["data/tokens_trained"] >= 400
    assert trained["policy/sampler_mismatch_abs"] < 0.06
    assert abs(trained["policy/sampler_mismatch_mean"]) < 0.01
    assert trained["policy/sampler_mismatch_k3"] < 0.005
    print({k: v for k, v in trained.items() if "mismatch" in k or k == "data/tokens_trained"})


def test_the_demo_learns_with_vllm(tmp_path: Path) -> None:
    """The first steps of what `art-sky demo --engine vllm` does."""
    result = run_demo(DemoOptions(store=str(tmp_path / "run"), steps=3, engine="vllm"), Quiet())
    assert [row.step for row in result.steps] == [1, 2, 3]
    assert result.validation["before"] < 0.2
    assert result.validation["after"] > result.validation["before"] + 0.1
