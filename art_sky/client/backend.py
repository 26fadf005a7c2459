"""The `Backend` protocol: what a `TrainableModel` is registered with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from art_sky.client.model import Model, TrainableModel
    from art_sky.config import SFTConfig, TrainConfig
    from art_sky.schemas import (
        Checkpoint,
        Exchange,
        HistoryRow,
        LogResult,
        ModelStatus,
        RolloutAddress,
        RolloutExchanges,
        TrainResult,
    )
    from art_sky.trajectories import TrajectoryGroup


class Backend(Protocol):
    """All methods raise typed `ArtSkyError`s; waits have deadlines and can be cancelled."""

    async def register(self, model: Model[Any]) -> ModelStatus: ...

    async def train_request(
        self,
        model: TrainableModel[Any],
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | SFTConfig,
        request_id: str,
    ) -> TrainResult:
        """Applies one batch at most once per `request_id` (rule R3), however often it is called."""
        ...

    async def log(
        self,
        model: Model[Any],
        groups: Iterable[TrajectoryGroup],
        split: str,
        step: int | None,
        metrics: Mapping[str, float | None],
    ) -> LogResult: ...

    async def status(self, model: Model[Any]) -> ModelStatus: ...

    async def checkpoints(self, model: Model[Any]) -> list[Checkpoint]: ...

    async def history(self, model: Model[Any]) -> list[HistoryRow]: ...

    async def delete_checkpoints(self, model: Model[Any], best_metric: str) -> list[int]: ...

    async def read_state(self, model: Model[Any]) -> dict[str, Any] | None: ...

    async def merge_state(self, model: Model[Any], values: Mapping[str, Any]) -> dict[str, Any]: ...

    async def overwrite_state(self, model: Model[Any], values: Mapping[str, Any]) -> None: ...

    async def exchange(self, completion_id: str) -> Exchange: ...

    async def open_rollout(self, model: TrainableModel[Any]) -> RolloutAddress: ...

    async def rollout_exchanges(self, rollout: str) -> RolloutExchanges: ...

    async def close_rollout(self, rollout: str) -> None: ...

    def inference(self) -> tuple[str, str]:
        """(base URL ending in /v1, API key) for an OpenAI client."""
        ...

    async def close(self) -> None: ...
