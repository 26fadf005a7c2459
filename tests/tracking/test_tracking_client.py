"""What the client logs is shown, by the tracker that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from art_sky.client.model import TrainableModel
from art_sky.errors import InvalidConfig
from art_sky.schemas import HistoryRow, LogResult
from art_sky.tracking import trackers


class Remembers:
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, str, Mapping[str, float | None]]] = []

    def log(self, attempt: int, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        self.rows.append((attempt, step, split, metrics))

    def finish(self) -> None:
        pass


class Backend:
    """As much of a backend as logging needs; step 1 of an earlier process is in its history."""

    async def register(self, model: Any) -> Any:
        return SimpleNamespace(inference_name="agent")

    async def history(self, model: Any) -> list[HistoryRow]:
        return [HistoryRow(attempt=1, step=1, split="train", time=0.0, metrics={"reward": 0.25})]

    async def log(self, model: Any, groups: Iterable[Any], split: str, step: int | None, metrics: Any) -> LogResult:
        return LogResult(attempt=1, step=step or 2, split=split)

    def inference(self) -> tuple[str, str]:
        return "http://127.0.0.1:1/v1", "key"


async def test_rows_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, given = Remembers(), []

    def factory(project: str, name: str, config: Mapping[str, Any]) -> Remembers:
        given.append((project, name, config))
        return seen

    monkeypatch.setattr(trackers, "_factory", lambda kind: factory)
    model = TrainableModel(name="agent", project="proj", base_model="org/base", config={"games": 8}, report_to="wandb")
    backend: Any = Backend()
    await model.register(backend)
    await model.register(backend)
    await model.log(metrics={"reward": 0.5}, split="val", step=2)
    assert model._tracking is not None
    model._tracking.finish()
    assert given == [("proj", "agent", {"base_model": "org/base", "lora": model.lora.model_dump(), "games": 8})]
    assert seen.rows == [(1, 1, "train", {"reward": 0.25}), (1, 2, "val", {"reward": 0.5})]


async def test_nothing_is_tracked_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    backend: Any = Backend()
    model = TrainableModel(name="agent", project="proj", base_model="org/base")
    await model.register(backend)
    assert model._tracking is None
    with pytest.raises(InvalidConfig, match="report_to: no tracker 'wandp'"):
        await TrainableModel(name="a", project="p", base_model="b", report_to="wandp").register(backend)
