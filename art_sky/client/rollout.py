"""A rollout by address: whatever calls its URL is captured and becomes its trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from art_sky.client.capture import trajectory_of
from art_sky.errors import ArtSkyError, InvalidInput
from art_sky.trajectories import Trajectory, check_reward

if TYPE_CHECKING:
    from art_sky.client.model import TrainableModel

log = logging.getLogger("art_sky")


class Rollout:
    """`async with model.rollout() as r:` gives an address of its own; use it as any OpenAI-compatible server.

    Inside: `base_url` (ends in /v1) and `api_key`. `reward`, `metrics`, `metadata` and `logs` may be set at any
    time. After the block, `trajectory` holds all calls with their exact tokens. If the block raises, the address is
    closed and there is no trajectory.

    A rented machine that is replaced meanwhile takes what it had recorded with it, and the log of a server keeps no
    more than its newest calls (256 MiB). The rollout goes on, and its trajectory, which holds the later calls, has the
    metric `lost_exchanges`; leave it out of training where that matters.
    """

    def __init__(self, model: TrainableModel[Any]) -> None:
        self._model = model
        self._reward = 0.0
        self._trajectory: Trajectory | None = None
        self.id = self.base_url = self.api_key = ""
        self.metrics: dict[str, float | int | bool] = {}
        self.metadata: dict[str, Any] = {}
        self.logs: list[str] = []

    @property
    def reward(self) -> float:
        return self._reward

    @reward.setter
    def reward(self, value: float) -> None:
        self._reward = check_reward(value)
        if self._trajectory is not None:
            self._trajectory.reward = self._reward

    @property
    def trajectory(self) -> Trajectory:
        """Raises InvalidInput until the block has ended."""
        if self._trajectory is None:
            raise InvalidInput("the rollout has no trajectory yet; take r.trajectory after the `async with` block")
        return self._trajectory

    async def __aenter__(self) -> Rollout:
        address = await self._model.backend.open_rollout(self._model)
        self.id, self.base_url, self.api_key = address.rollout, address.base_url, address.api_key
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        backend = self._model.backend
        if kind is not None:
            # The error on its way is the one that matters; an address that stays open costs next to nothing.
            with contextlib.suppress(TimeoutError):
                try:
                    async with asyncio.timeout(0.5):
                        await backend.close_rollout(self.id)
                except ArtSkyError as e:
                    log.warning("the rollout %s could not be closed: %s", self.id, e)
            return
        # Closed first: a call that comes later must fail at its caller rather than be missing here.
        await backend.close_rollout(self.id)
        record = await backend.rollout_exchanges(self.id)
        made = trajectory_of(record.exchanges)
        made.reward, made.metrics, made.metadata, made.logs = self._reward, self.metrics, self.metadata, self.logs
        if not made.messages_and_choices and record.complete:
            made.log(f"no call reached {self.base_url} during this rollout")
            log.warning("no call reached %s during the rollout; give its base_url and api_key to the agent", self.id)
        if not record.complete:
            # What was sampled since is as good as ever, and trains; that a part is missing must be seen.
            made.metrics["lost_exchanges"] = True
            made.log("its machine was replaced, or its log was full: earlier calls are no part of this trajectory")
            log.warning("earlier calls of the rollout %s are lost: its machine was replaced, or its log full", self.id)
        self._trajectory = made
