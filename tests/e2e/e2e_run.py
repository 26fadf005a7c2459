"""Whole runs through the real client, server, engine, trainer and store, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

import art_sky as art
from art_sky.schemas import Manifest
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore

ENGINE = art.EngineConfig(dtype="float32", threads=1)
TRAIN = art.TrainConfig(learning_rate=1e-2, micro_batch_tokens=64)


def make_backend(path: Path, store: str | None = None) -> art.LocalBackend:
    return art.LocalBackend(path, store=store, engine=ENGINE)


def make_model(base: Path) -> art.TrainableModel:
    return art.TrainableModel(name="agent", project="tests", base_model=base)


def reward(text: str) -> float:
    """Share of digits: a tiny untrained model gives every value, so groups have a spread."""
    return sum(c.isdigit() for c in text) / max(len(text), 1)


async def rollout(model: art.TrainableModel, task: str, seed: int, turns: int = 1, tokens: int = 12) -> art.Trajectory:
    client = model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=[], reward=0.0)
    for turn in range(turns):
        trajectory.messages_and_choices.append({"role": "user", "content": f"{task}{turn}"})
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_tokens=tokens,
            seed=seed * 100 + turn,
        )
        trajectory.messages_and_choices.append(completion.choices[0])
        trajectory.reward += reward(completion.choices[0].message.content or "")
    return trajectory


async def sample(model: art.TrainableModel, seed: int, groups: int = 4, size: int = 4, turns: int = 1):
    """`groups` groups of `size` rollouts, the same for the same seed and adapter."""
    return await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(model, f"task {g} ", seed * 1000 + g * size + i, turns=turns) for i in range(size))
        for g in range(groups)
    )


def choices(trajectory: art.Trajectory) -> list[Any]:
    return [item for item in trajectory.messages_and_choices if not isinstance(item, dict)]


def stored(store: Path | str) -> ModelStore:
    """The run as the store tells it, without a server."""
    return ModelStore(open_store(str(store)), "tests", "agent")


def manifests(path: Path | str) -> list[Manifest]:
    """The steps that HEAD reaches, from 0 on."""
    store = stored(path)
    return [m for _, m in store.chain(store.head().manifest)][::-1]


def files_of(path: Path | str) -> list[dict[str, str]]:
    """Hash by file name, for every step from 0 on."""
    return [{name: ref.sha256 for name, ref in m.files.items()} for m in manifests(path)]


def child_pid(server_pid: int, module: str) -> int:
    """The process of the server's engine or trainer."""
    for child in psutil.Process(server_pid).children(recursive=True):
        if module in child.cmdline():
            return child.pid
    raise AssertionError(f"no {module} under the server")
