"""The `Backend` protocol: what a `TrainableModel` is registered with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from art_sky.client.model import Model, TrainableModel
    from art_sky.trajectories import TrajectoryGroup

    from art_sky.config import TrainConfig
    from art_sky.schemas import (
        Checkpoint,
        Exchange,
        HistoryRow,
        LogResult,
        ModelStatus,
        RolloutAddress,
        TrainResult,
    )


class Backend(Protocol):
    """All methods raise typed `ArtSkyError`s; waits have deadlines and can be cancelled."""

    async def register(self, model: Model) -> ModelStatus: ...

    async def train_request(
        self, model: TrainableModel, groups: Iterable[TrajectoryGroup], config: TrainConfig, request_id: str
    ) -> TrainResult:
        """Applies one batch at most once per `request_id` (rule R3), however often it is called."""
        ...

    async def log(
        self,
        model: Model,
        groups: Iterable[TrajectoryGroup],
        split: str,
        step: int | None,
        metrics: Mapping[str, float],
    ) -> LogResult: ...

    async def status(self, model: Model) -> ModelStatus: ...

    async def checkpoints(self, model: Model) -> list[Checkpoint]: ...

    async def history(self, model: Model) -> list[HistoryRow]: ...

    async def delete_checkpoints(self, model: Model, best_metric: str) -> list[int]: ...

    async def read_state(self, model: Model) -> dict[str, Any] | None: ...

    async def merge_state(self, model: Model, values: Mapping[str, Any]) -> dict[str, Any]: ...

    async def exchange(self, completion_id: str) -> Exchange: ...

    async def open_rollout(self, model: TrainableModel) -> RolloutAddress: ...

    async def rollout_exchanges(self, rollout: str) -> list[Exchange]: ...

    async def close_rollout(self, rollout: str) -> None: ...

    def inference(self) -> tuple[str, str]:
        """(base URL ending in /v1, API key) for an OpenAI client."""
        ...

    async def close(self) -> None: ...
