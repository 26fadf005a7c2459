"""One server: its parts put together, started and ended in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_sky import __version__
from art_sky.config import ServerConfig
from art_sky.errors import ArtSkyError, StoreError
from art_sky.schemas import JOB_TERMINAL, Job, ModelStatus, RegisterRequest, ServerStatus
from art_sky.server.activity import Activity
from art_sky.server.exchange_log import ExchangeLog
from art_sky.server.gateway import Gateway
from art_sky.server.jobs import Jobs
from art_sky.server.models import Registry, ServedModel
from art_sky.server.parts import Parts
from art_sky.server.rollouts import Rollouts
from art_sky.server.security import load_token
from art_sky.store.model_store import ModelStore
from art_sky.whole_file import write_whole

log = logging.getLogger("art_sky.server")

SHOWN_JOBS = 50  # in the status, beside those that have not ended


class Server:
    """`stop` is called when the server should end: POST /shutdown, or no work for `idle_minutes`."""

    def __init__(self, config: ServerConfig, parts: Parts, stop: Callable[[], None]) -> None:
        """Raises StoreError or InvalidConfig when the state folder or the store cannot be used."""
        self.config = config
        self.stop = stop
        self.state = Path(config.state_dir)
        try:
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise StoreError(f"cannot make {self.state}: {e.strerror}; give a state_dir that can be written") from e
        self.token = load_token(self.state / "token")
        self.activity = Activity()
        self.rollouts = Rollouts(self.state, self.token)
        self.exchanges = ExchangeLog(self.state, fsync_each=config.fsync_each_reply)
        self.registry = Registry(config, parts, self.state)
        self.jobs = Jobs(self.registry, self.activity, self.state)
        self.gateway = Gateway(self.registry, self.exchanges, self.activity)
        self._started = time.time()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.jobs.start()
        names = await asyncio.to_thread(self._remembered_models)
        for project, name in names:
            self.registry.expect(project, name)
        self._tasks = [asyncio.create_task(self._restore_models(names), name="restore models")]
        if self.config.idle_minutes is not None:
            self._tasks.append(asyncio.create_task(self._watch_idle(self.config.idle_minutes * 60), name="idle limit"))

    async def close(self) -> None:
        """Ends children and gives leases back; what was accepted and not ended is finished by the next server."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.jobs.close()
        await asyncio.to_thread(self._tell_unfinished)
        await self.registry.close()
        await self.exchanges.close()
        self.rollouts.close()

    def drain(self, seconds: float) -> None:
        """Ends the server as soon as all accepted train requests have ended, at the latest after `seconds`."""

        async def drained() -> None:
            await self.jobs.drain(seconds)
            self.stop()

        self._tasks.append(asyncio.create_task(drained(), name="drain"))

    async def register(self, request: RegisterRequest) -> ModelStatus:
        model, new = await self.registry.register(request)
        if new:
            await asyncio.to_thread(self._remember_models)
            if isinstance(model, ServedModel):
                await self.jobs.recover(model)
        return self.registry.status(model)

    async def status(self) -> ServerStatus:
        registry, limit = self.registry, self.config.idle_minutes
        engine: dict[str, Any] = {"state": "stopped"}
        trainer: dict[str, Any] = {"state": "stopped"}
        if registry.base_model is not None:
            engine = {"base_model": registry.base_model, **(await registry.engine.status()).model_dump()}
            child = registry.trainer.child
            trainer = {"state": child.state, "restarts": child.restarts, "pid": child.pid}
        return ServerStatus(
            version=__version__,
            pid=os.getpid(),
            store=registry.store.url,
            started=self._started,
            idle_seconds=self.activity.idle_seconds(),
            idle_limit_seconds=None if limit is None else limit * 60,
            engine={**engine, **self.gateway.stats()},
            trainer=trainer,
            models=[registry.status(m) for m in registry.all()],
            jobs=self._shown_jobs(),
        )

    def _shown_jobs(self) -> list[Job]:
        """All that have not ended, and the newest of the others."""
        jobs = self.jobs.all()
        return [job for n, job in enumerate(jobs, SHOWN_JOBS - len(jobs)) if n >= 0 or job.state not in JOB_TERMINAL]

    def _tell_unfinished(self) -> None:
        """For whoever ends this machine: what it would lose, if no server followed."""
        names = [f"{job.model.project}/{job.model.name} {job.record.request}" for job in self.jobs.unfinished()]
        try:
            (self.state / "unfinished.json").write_text(json.dumps({"pid": os.getpid(), "requests": names}))
        except OSError as e:
            log.error("unfinished train requests: %s (cannot be written down: %s)", ", ".join(names) or "none", e)

    @property
    def _models_file(self) -> Path:
        return self.state / "models.json"

    def _remember_models(self) -> None:
        names = [[m.project, m.name] for m in self.registry.all()]
        write_whole(self._models_file, json.dumps(names))

    def _remembered_models(self) -> list[tuple[str, str]]:
        """(project, name) of what was registered before a restart, here or on the machine before this one."""
        names = [model.split("/", 1) for model in self.config.models]
        if self._models_file.exists():
            try:
                names += json.loads(self._models_file.read_text())
            except ValueError as e:
                log.error("%s cannot be read (%s): models come back when their clients ask", self._models_file, e)
        return list(dict.fromkeys((project, name) for project, name in names))

    async def _restore_models(self, names: list[tuple[str, str]]) -> None:
        """Agents and jobs go on without their client."""
        for project, name in names:
            try:
                record = await asyncio.to_thread(ModelStore(self.registry.store, project, name).record)
                await self.register(
                    RegisterRequest(
                        project=project,
                        name=name,
                        base_model=record.base_model,
                        lora=record.lora,
                        options=record.options,
                        trainable=getattr(record, "trainable", True),
                        client_version=__version__,
                    )
                )
            except ArtSkyError as e:
                log.warning("%s/%s, registered before the restart, is not back: %s", project, name, e.message)
            finally:
                self.registry.returned(project, name)

    async def _watch_idle(self, limit: float) -> None:
        while (left := limit - self.activity.idle_seconds()) > 0:  # noqa: ASYNC110  # time passes without an event
            await asyncio.sleep(left)
        log.warning("no work for %.1f minutes: the server ends; launch it again to go on from HEAD", limit / 60)
        self.stop()
