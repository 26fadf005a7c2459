"""The `Backend` that talks to a server over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

from pydantic import ValidationError

import art_sky
from art_sky.client import routes
from art_sky.client.capture import prepare
from art_sky.client.checkpoints import write_file
from art_sky.client.jobs import JobFollower
from art_sky.client.model import Model, TrainableModel, as_groups, new_request_id
from art_sky.client.progress import progress_bar
from art_sky.client.refused import refuse_unknown
from art_sky.client.transport import Transport
from art_sky.config import SFTConfig, TrainConfig, explain
from art_sky.errors import InvalidInput, NotFound, VersionMismatch
from art_sky.schemas import (
    Checkpoint,
    Exchange,
    HistoryRow,
    Job,
    LogRequest,
    LogResult,
    Manifest,
    ModelStatus,
    RegisterRequest,
    RolloutAddress,
    RolloutExchanges,
    ServerStatus,
    TrainRequest,
    TrainResult,
    Wire,
)
from art_sky.store.batches import encode_batch
from art_sky.trajectories import Trajectory, TrajectoryGroup

log = logging.getLogger("art_sky")

REGISTER_SECONDS = 1800.0  # the first registration fetches the base model and starts the engine
T = TypeVar("T")
WireT = TypeVar("WireT", bound=Wire)


class HttpBackend:
    """All of `Backend` over a `Transport`; how the server comes about is the subclasses' affair."""

    def __init__(self, transport: Transport | None, *, cancel_jobs: bool = True) -> None:
        self._transport = transport
        self._cancel_jobs = cancel_jobs
        self._registered: dict[str, dict[str, Any]] = {}  # by route: what to send again to a server that forgot
        self._uploaded: set[tuple[str, str]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; the server and its jobs go on."""
        if self._transport is not None:
            await self._transport.close()

    def inference(self) -> tuple[str, str]:
        """(base URL ending in /v1, API key) for an OpenAI client."""
        transport = self._connected()
        return f"{transport.base_url}/v1", transport.token

    async def register(self, model: Model[Any]) -> ModelStatus:
        """Raises Conflict when the model exists with another base model, LoRA or options; VersionMismatch."""
        body = _register_request(model)
        with progress_bar(f"register {model.run_name}", None):
            http = await self._http()
            found = await http.json("POST", routes.MODELS, body, read_seconds=REGISTER_SECONDS)
        status = ModelStatus.model_validate(found)
        if status.server_version != art_sky.__version__:
            raise VersionMismatch(
                f"the server is art-sky {status.server_version} and this client {art_sky.__version__}; run "
                f"`pip install art-sky=={status.server_version}` here, or launch the server again"
            )
        self._registered[_route(model)] = body
        return status

    async def train(
        self,
        model: TrainableModel[Any],
        groups: Iterable[TrajectoryGroup],
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> TrainResult:
        """Trains one step and commits it; logs nothing (see `model.log`). `options` are the fields of TrainConfig:
        learning_rate, loss_fn and so on; raises InvalidConfig for others, by name."""
        known = {*TrainConfig.model_fields, "beta"}
        refuse_unknown("train", {k: v for k, v in options.items() if k not in known}, sorted(known))
        config: TrainConfig = TrainConfig.parse(options)
        return await self.train_request(model, groups, config, request_id or new_request_id())

    async def train_sft(
        self,
        model: TrainableModel[Any],
        groups: Iterable[TrajectoryGroup] | Iterable[Trajectory],
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> TrainResult:
        """Like `train`, but supervised; `options` are the fields of SFTConfig."""
        known = set(SFTConfig.model_fields) - {"method"}
        refuse_unknown("train_sft", {k: v for k, v in options.items() if k not in known}, sorted(known))
        config: SFTConfig = SFTConfig.parse(options)
        return await self.train_request(model, as_groups(groups), config, request_id or new_request_id())

    async def train_request(
        self,
        model: TrainableModel[Any],
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | SFTConfig,
        request_id: str,
    ) -> TrainResult:
        """Applies one batch at most once per `request_id`, however often it is called.

        Raises MissingTokens, InvalidReward and InvalidInput before anything is sent; TrainFailed, Cancelled and
        Conflict (the id was used with another batch) from the server.
        """
        sft = isinstance(config, SFTConfig)
        batch = await self._upload(model, list(groups), check=not sft, examples=sft)
        return await self.train_stored(model, batch, config, request_id)

    async def train_stored(
        self, model: TrainableModel[Any], batch: str, config: TrainConfig | SFTConfig, request_id: str
    ) -> TrainResult:
        """`train_request` with a batch that the model's store has already, by its hash; raises NotFound when not."""
        request = _wire(TrainRequest, request_id=request_id, batch=batch, config=config).model_dump()
        http, path = await self._http(), routes.under(_route(model), "train")

        async def submit() -> Job:
            return Job.model_validate(await self._call(model, "POST", path, request))

        follower = JobFollower(http, request_id, submit, f"train {model.run_name}")
        try:
            return await follower.result()
        except asyncio.CancelledError:
            if self._cancel_jobs:
                await follower.cancel()
            raise

    async def log(
        self,
        model: Model[Any],
        groups: Iterable[TrajectoryGroup],
        split: str,
        step: int | None,
        metrics: Mapping[str, float | None],
    ) -> LogResult:
        groups = list(groups)
        request = _wire(LogRequest, split=split, step=step, metrics=dict(metrics))
        if groups:
            request.batch = await self._upload(model, groups, check=model.trainable)
        path = routes.under(_route(model), "log")
        return LogResult.model_validate(await self._call(model, "POST", path, request.model_dump()))

    async def status(self, model: Model[Any]) -> ModelStatus:
        return ModelStatus.model_validate(await self._call(model, "GET", _route(model)))

    async def server_status(self) -> ServerStatus:
        return ServerStatus.model_validate(await (await self._http()).json("GET", f"{routes.API}/status"))

    async def checkpoints(self, model: Model[Any]) -> list[Checkpoint]:
        found = await self._call(model, "GET", routes.under(_route(model), "checkpoints"))
        return [Checkpoint.model_validate(c) for c in found]

    async def history(self, model: Model[Any]) -> list[HistoryRow]:
        rows = await self._call(model, "GET", routes.under(_route(model), "history"))
        return [HistoryRow.model_validate(r) for r in rows]

    async def delete_checkpoints(self, model: Model[Any], best_metric: str) -> list[int]:
        """Deletes the files of all steps but the newest and the best by our own history; returns their steps."""
        path = f"{routes.under(_route(model), 'checkpoints')}?{urlencode({'best_metric': best_metric})}"
        return [int(step) for step in await self._call(model, "DELETE", path)]

    async def download_checkpoint(
        self, model: Model[Any], step: int | None, folder: str | Path, *, optimizer: bool = False
    ) -> Path:
        """Writes the files of a step (None: the newest) into `folder`, checked against their hashes, and returns
        the folder of its adapter in PEFT's format. `optimizer` brings the trainer's state too."""
        if step is None:
            step = (await self.status(model)).step
        path = routes.under(_route(model), "checkpoints", step)
        manifest = Manifest.model_validate(await self._call(model, "GET", path))
        http = await self._http()
        target = await asyncio.to_thread(Path(folder).expanduser)
        for name, ref in manifest.files.items():
            if optimizer or name.startswith("adapter/"):
                data = await http.get(routes.under(_route(model), "blobs", ref.sha256))
                await asyncio.to_thread(write_file, target, name, data, ref)
        return target / "adapter"

    async def read_state(self, model: Model[Any]) -> dict[str, Any] | None:
        state = await self._call(model, "GET", routes.under(_route(model), "state"))
        return None if state is None else dict(state)

    async def merge_state(self, model: Model[Any], values: Mapping[str, Any]) -> dict[str, Any]:
        path = routes.under(_route(model), "state")
        return dict(await self._call(model, "PATCH", path, _json_values("the state", values)))

    async def overwrite_state(self, model: Model[Any], values: Mapping[str, Any]) -> None:
        await self._call(model, "PUT", routes.under(_route(model), "state"), _json_values("the state", values))

    async def exchange(self, completion_id: str) -> Exchange:
        """Raises NotFound when the server no longer has it."""
        found = await (await self._http()).json("GET", routes.under(routes.EXCHANGES, completion_id))
        return Exchange.model_validate(found)

    async def open_rollout(self, model: TrainableModel[Any]) -> RolloutAddress:
        return RolloutAddress.model_validate(await self._call(model, "POST", routes.under(_route(model), "rollouts")))

    async def rollout_exchanges(self, rollout: str) -> RolloutExchanges:
        found = await (await self._http()).json("GET", routes.under(routes.ROLLOUTS, rollout, "exchanges"))
        return RolloutExchanges.model_validate(found)

    async def close_rollout(self, rollout: str) -> None:
        await (await self._http()).json("DELETE", routes.under(routes.ROLLOUTS, rollout))

    # --- machinery --------------------------------------------------------------------------------------

    async def _http(self) -> Transport:
        """The connection; a backend that starts its server does so here."""
        return self._connected()

    def _connected(self) -> Transport:
        if self._transport is None:
            raise InvalidInput("the server has not been started yet; register a model first")
        return self._transport

    async def _call(
        self,
        model: Model[Any],
        method: str,
        path: str,
        body: Any = None,
    ) -> Any:
        http = await self._http()
        return await self._knowing(model, lambda: http.json(method, path, body))

    async def _knowing(self, model: Model[Any], call: Callable[[], Awaitable[T]]) -> T:
        """A call about a model. A server that was restarted may not know the model: it is told again, once."""
        try:
            return await call()
        except NotFound:
            again = self._registered.get(_route(model))
            if again is None:
                raise
        await (await self._http()).json("POST", routes.MODELS, again, read_seconds=REGISTER_SECONDS)
        return await call()

    async def _upload(
        self, model: Model[Any], groups: list[TrajectoryGroup], *, check: bool, examples: bool = False
    ) -> str:
        """Stores the groups as one blob and returns its hash; what was stored before is not sent again."""
        written = await prepare(groups, self.exchange if check else None, examples=examples)
        data = await asyncio.to_thread(encode_batch, written)
        sha256 = hashlib.sha256(data).hexdigest()
        base = _route(model)
        if (base, sha256) not in self._uploaded:
            http = await self._http()
            await self._knowing(model, lambda: http.put(routes.under(base, "blobs", sha256), data))
            self._uploaded.add((base, sha256))
        return sha256


class ServerBackend(HttpBackend):
    """A server at `base_url`, such as `http://127.0.0.1:8080`, with its token.

    A call is repeated for `patience` seconds while the server does not answer; then it raises ServerUnreachable. A
    train call whose caller is cancelled (Ctrl-C) cancels its job, unless `cancel_jobs=False`: then the job goes on,
    and the same call with the same `request_id` gets its result.
    """

    def __init__(self, base_url: str, token: str, *, patience: float = 60.0, cancel_jobs: bool = True) -> None:
        super().__init__(Transport(base_url, token, patience=patience), cancel_jobs=cancel_jobs)


def _route(model: Model[Any]) -> str:
    return routes.model(model.project, model.run_name)


def _register_request(model: Model[Any]) -> dict[str, Any]:
    trained: dict[str, Any] = {"base_model": model.inference_model_name or model.name, "trainable": False}
    if isinstance(model, TrainableModel):
        trained = {"base_model": model.base_model, "lora": model.lora, "options": model.options}
    return _wire(
        RegisterRequest,
        project=model.project,
        name=model.run_name,
        config=_json_values("config", model.config_values),
        client_version=art_sky.__version__,
        **trained,
    ).model_dump()


def _json_values(what: str, values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(values := dict(values), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise InvalidInput(f"{what} cannot be written as JSON: {e}; give plain values") from e
    return values


def _wire(kind: type[WireT], **fields: Any) -> WireT:
    try:
        return kind(**fields)
    except ValidationError as e:
        raise InvalidInput(f"{explain(e, kind.__name__, sorted(kind.model_fields))}; mend the value") from e
