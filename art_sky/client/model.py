"""Models as agent code sees them: a name, an OpenAI client, and train and log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from pydantic import BaseModel

from art_sky import tracking
from art_sky.client.refused import refuse_unknown
from art_sky.client.rollout import Rollout
from art_sky.client.summary import storable, summarize
from art_sky.config import LoRAConfig, ModelOptions, SFTConfig, TrainConfig
from art_sky.errors import InvalidConfig, InvalidInput
from art_sky.names import check_name
from art_sky.schemas import LogResult, TrainResult
from art_sky.trajectories import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from art_sky.client.backend import Backend
    from art_sky.tracking import Tracking

ConfigT = TypeVar("ConfigT")

REQUEST_SECONDS = 1200.0  # one completion, waiting for a place in the batch included
CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 100_000  # bounded by gather's max_concurrency, never by the client
RETRIES = 5  # with openai's backoff, about 20 s: longer than an engine takes to come back


class Model(Generic[ConfigT]):
    """A model that is prompted, not trained, and logged beside those that are.

    `inference_model_name`, `inference_base_url` and `inference_api_key` say where it answers. `config` is the user's
    own: a pydantic model or a dict, kept with the model's record. `report_to="wandb"` shows what is logged in Weights
    & Biases, "none" does not; without it, WANDB_API_KEY decides. Raises InvalidName before anything is made.
    """

    trainable = False

    def __init__(
        self,
        *,
        name: str,
        project: str,
        config: ConfigT | None = None,
        inference_model_name: str | None = None,
        inference_base_url: str | None = None,
        inference_api_key: str | None = None,
        report_to: str | list[str] | None = None,
        **unknown: Any,
    ) -> None:
        known = ["name", "project", "config", "inference_model_name", "inference_base_url", "inference_api_key"]
        refuse_unknown("Model", unknown, [*known, "report_to"])
        self.name = check_name("model", name)
        self.project = check_name("project", project)
        self.run_name = self.name
        self.config = config
        self.inference_model_name = inference_model_name
        self.inference_base_url = inference_base_url
        self.inference_api_key = inference_api_key
        self.report_to = report_to
        self._tracking: Tracking | None = None
        self._backend: Backend | None = None
        self._client: tuple[Any, AsyncOpenAI] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.project}/{self.run_name})"

    @property
    def backend(self) -> Backend:
        """Raises InvalidInput before `register`."""
        if self._backend is None:
            raise InvalidInput(f"{self!r} is not registered; call `await model.register(backend)` first")
        return self._backend

    @property
    def config_values(self) -> dict[str, Any]:
        """`config` as a dict of JSON values."""
        if self.config is None:
            return {}
        if isinstance(self.config, BaseModel):
            return self.config.model_dump(mode="json")
        if isinstance(self.config, Mapping):
            return dict(self.config)
        raise InvalidConfig(f"config is {type(self.config).__name__}; give a pydantic model or a dict")

    async def register(self, backend: Backend, **unknown: Any) -> None:
        """Makes the model known to `backend`, or finds it there with its newest step."""
        refuse_unknown("register", unknown, ["backend"])
        await backend.register(self)
        self._backend = backend
        await self._start_tracking({})

    def openai_client(self) -> AsyncOpenAI:
        """An OpenAI client for this model, made once for an event loop. Choices from a trainable model carry
        what training needs, whatever is asked for."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if self._client is None or self._client[0] is not loop:
            self._client = (loop, self._make_client())
        return self._client[1]

    def get_inference_name(self, step: int | None = None) -> str:
        """What goes into `model=`: the newest step, or the one that is asked for, as `name@step`."""
        name = self.inference_model_name or self.run_name
        return name if step is None else f"{name}@{step}"

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """Keyword arguments for `litellm.completion` and `acompletion`."""
        base_url, api_key = self._address()
        model = f"hosted_vllm/{self.get_inference_name(step)}"
        return {"model": model, "base_url": base_url, "api_key": api_key}

    async def log(
        self,
        trajectories: Iterable[TrajectoryGroup] | Iterable[Trajectory] | TrajectoryGroup | None = None,
        split: str = "val",
        *,
        metrics: Mapping[str, float | None] | None = None,
        step: int | None = None,
    ) -> LogResult:
        """Fills the history row of (`step`, `split`); the newest step by default.

        Trajectories are stored, and their means (see `art_sky.client.summary`) become the row's metrics;
        `metrics` come on top. Logged twice, a row is updated and never doubled.
        """
        groups = as_groups(trajectories)
        row: dict[str, float | None] = {**(summarize(groups) if groups else {}), **storable(metrics or {})}
        result = await self.backend.log(self, groups, split, step, row)
        if self._tracking is not None:
            self._tracking.log(result.attempt, result.step, result.split, row)
        return result

    async def read_state(self) -> dict[str, Any] | None:
        """What `merge_state` and `overwrite_state` kept in the store; None before the first."""
        return await self.backend.read_state(self)

    async def merge_state(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sets these keys and keeps the others; returns the whole."""
        return await self.backend.merge_state(self, values)

    async def overwrite_state(self, values: Mapping[str, Any]) -> None:
        """Replaces the whole."""
        await self.backend.overwrite_state(self, values)

    async def _start_tracking(self, about: Mapping[str, Any]) -> None:
        """Shows the rows logged before, which another process may have left unshown, and those to come."""
        if self._tracking is not None:
            return
        config = {**about, **self.config_values}
        self._tracking = tracking.start(self.project, self.run_name, config, self.report_to)
        if self._tracking is not None:
            for row in await self.backend.history(self):
                self._tracking.log(row.attempt, row.step, row.split, row.metrics)

    def _address(self) -> tuple[str, str]:
        if self.inference_base_url is None or self.inference_api_key is None:
            what = "register it first" if self.trainable else "give inference_base_url and inference_api_key"
            raise InvalidInput(f"{self!r} has no address yet; {what}")
        return self.inference_base_url, self.inference_api_key

    def _make_client(self) -> AsyncOpenAI:
        import openai

        base_url, api_key = self._address()
        # The Limits of whichever httpx this release of openai is built on.
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
        )
        timeout = openai.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS)
        http = openai.DefaultAsyncHttpxClient(timeout=timeout, limits=limits, trust_env=not is_loopback(base_url))
        return openai.AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http, timeout=timeout, max_retries=RETRIES
        )


class TrainableModel(Model[ConfigT]):
    """A base model with a LoRA adapter that is trained.

    `base_model` is a Hugging Face id, a local folder or `smollm2-135m`. `run_name` names the state in the store
    (default: `name`), so that a run can be repeated under the same name. Raises InvalidName or InvalidConfig before
    anything is made.
    """

    trainable = True

    def __init__(
        self,
        *,
        name: str,
        project: str,
        base_model: str | Path,
        run_name: str | None = None,
        config: ConfigT | None = None,
        lora: LoRAConfig | None = None,
        options: ModelOptions | None = None,
        report_to: str | list[str] | None = None,
        **unknown: Any,
    ) -> None:
        known = ["name", "project", "base_model", "run_name", "config", "lora", "options", "report_to"]
        refuse_unknown("TrainableModel", unknown, known)
        super().__init__(name=name, project=project, config=config, report_to=report_to)
        if run_name is not None:
            self.run_name = check_name("run", run_name)
        self.base_model = _base_model(base_model)
        self.lora = _settings("lora", lora, LoRAConfig)
        self.options = _settings("options", options, ModelOptions)

    async def register(self, backend: Backend, **unknown: Any) -> None:
        """Makes the model with its untrained step 0, or goes on from its newest step; raises Conflict when it
        exists with another base model or LoRA."""
        refuse_unknown("register", unknown, ["backend"])
        status = await backend.register(self)
        self._backend, self._client = backend, None
        self.inference_model_name = status.inference_name
        self.inference_base_url, self.inference_api_key = backend.inference()
        await self._start_tracking({"base_model": self.base_model, "lora": self.lora.model_dump()})

    async def train(
        self,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        request_id: str | None = None,
        **unknown: Any,
    ) -> TrainResult:
        """Trains one step on `groups` and logs them with the result's metrics as split "train".

        With the same `request_id` a repeated call applies the batch at most once. Raises MissingTokens and
        InvalidReward before anything is sent, TrainFailed when nothing was committed.
        """
        for name in unknown:
            if name in TrainConfig.model_fields:
                raise InvalidConfig(f"train takes {name} in its config; write config=TrainConfig({name}=...)")
        refuse_unknown("train", unknown, ["groups", "config", "request_id"])
        config = _settings("config", config, TrainConfig)
        groups = as_groups(groups)
        result = await self.backend.train_request(self, groups, config, request_id or new_request_id())
        await self.log(groups, "train", metrics=result.metrics, step=result.step)
        return result

    async def train_sft(
        self,
        trajectories: Iterable[TrajectoryGroup] | Iterable[Trajectory] | TrajectoryGroup,
        config: SFTConfig | None = None,
        *,
        request_id: str | None = None,
        **unknown: Any,
    ) -> TrainResult:
        """Trains one step on what assistants say in `trajectories`, and logs its metrics as split "sft".

        Messages are rendered with the model's chat template; a Choice from this server keeps its tokens. Rewards play
        no part. With the same `request_id` a repeated call applies the batch at most once. Raises InvalidInput naming
        the turn that cannot be rendered exactly, TrainFailed when nothing was committed.
        """
        for name in unknown:
            if name in SFTConfig.model_fields:
                raise InvalidConfig(f"train_sft takes {name} in its config; write config=SFTConfig({name}=...)")
        refuse_unknown("train_sft", unknown, ["trajectories", "config", "request_id"])
        config = _settings("config", config, SFTConfig)
        groups = as_groups(trajectories)
        result = await self.backend.train_request(self, groups, config, request_id or new_request_id())
        await self.log(split="sft", metrics=result.metrics, step=result.step)
        return result

    def rollout(self) -> Rollout:
        """An address of its own for one rollout, for agents in any language or framework."""
        return Rollout(self)

    async def get_step(self) -> int:
        """The newest step; 0 is untrained."""
        return (await self.backend.status(self)).step

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward") -> list[int]:
        """Deletes the files of all steps but the newest and the best one; returns the deleted steps."""
        return await self.backend.delete_checkpoints(self, best_checkpoint_metric)


def new_request_id() -> str:
    return uuid4().hex


def is_loopback(url: str) -> bool:
    """Whether the host is this machine; such an address is never reached through a proxy."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def as_groups(
    given: Iterable[TrajectoryGroup] | Iterable[Trajectory] | TrajectoryGroup | None,
) -> list[TrajectoryGroup]:
    """What train and log take, as groups. Raises InvalidInput for anything else."""
    if given is None:
        return []
    items: list[Any] = [given] if isinstance(given, TrajectoryGroup) else list(given)
    if any(isinstance(i, Trajectory) for i in items):
        return [TrajectoryGroup(items)]
    for i, item in enumerate(items):
        if not isinstance(item, TrajectoryGroup):
            raise InvalidInput(f"group {i} is {type(item).__name__}; give TrajectoryGroup objects")
    return items


SettingsT = TypeVar("SettingsT", LoRAConfig, ModelOptions, TrainConfig, SFTConfig)


def _settings(name: str, given: SettingsT | None, kind: type[SettingsT]) -> SettingsT:
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given
    raise InvalidConfig(f"{name} is {type(given).__name__}; write {name}={kind.__name__}(...)")


def _base_model(given: str | Path) -> str:
    # The server may run elsewhere in the file system; a hub id like "org/model" stays as it is.
    if isinstance(given, Path) or given.startswith((".", "/", "~")):
        return str(Path(given).expanduser().resolve())
    return given
