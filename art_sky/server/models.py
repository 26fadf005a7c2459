"""The models that this server has: registration, names and steps, and the one base model behind them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_sky import __version__, base_models
from art_sky.capabilities import CPU, GPU, require
from art_sky.config import ServerConfig, TrainerConfig
from art_sky.errors import BaseMismatch, Busy, Conflict, InvalidConfig, InvalidInput, NotFound, VersionMismatch
from art_sky.inference.gpus import Placement, visible
from art_sky.inference.protocol import Engine
from art_sky.names import check_name, split_step
from art_sky.schemas import AdapterRef, BaseShape, InitTask, Manifest, ModelRecord, ModelStatus, RegisterRequest
from art_sky.server.adapters import AdapterFolders
from art_sky.server.parts import Parts, Trainer
from art_sky.server.render import ChatTemplate
from art_sky.server.rollouts import Rollout
from art_sky.server.vocabulary import DEFAULT_CONTEXT, Vocabulary
from art_sky.store.model_store import ModelStore
from art_sky.store.writer import Writer
from art_sky.training.quantization import check_bitsandbytes

INIT_SECONDS = 900.0  # loading the base model included
INIT_REQUEST = "init"
RESTORE_SECONDS = 540.0  # below the 10 minutes that OpenAI's client waits for a reply
STEP_FILES = ("adapter/", "trainer/")


@dataclass
class KnownModel:
    """A registered model. By itself: a prompted model that lives elsewhere and is only logged."""

    project: str
    name: str
    record: ModelRecord
    store: ModelStore

    @property
    def step(self) -> int:
        return 0

    @property
    def attempt(self) -> int:
        return 1

    def check_step(self, step: int) -> int:
        """Raises NotFound for a step that cannot be logged to."""
        if step < 0:
            raise NotFound(f"{self.store.prefix} has no step {step}; steps count from 0")
        return step


@dataclass
class ServedModel(KnownModel):
    """A model that is sampled from and trained here."""

    writer: Writer
    template: ChatTemplate
    steps: list[tuple[str, Manifest]] = field(default_factory=list)  # (key, manifest) by step number

    @property
    def step(self) -> int:
        return len(self.steps) - 1

    @property
    def head_key(self) -> str:
        return self.steps[-1][0]

    @property
    def head_manifest(self) -> Manifest:
        return self.steps[-1][1]

    @property
    def attempt(self) -> int:
        head = self.writer.head
        return head.attempt if head else 1

    def check_step(self, step: int) -> int:
        """Raises NotFound for a step that HEAD does not reach."""
        if not 0 <= step <= self.step:
            raise NotFound(f"{self.store.prefix} has no step {step}; its steps are 0 to {self.step}")
        return step

    def reload(self) -> None:
        """Reads the steps that HEAD reaches; blocks."""
        head = self.writer.head
        self.steps = list(self.store.chain(head.manifest))[::-1] if head else []


class Registry:
    """Owns engine and trainer, which start with the first registered model's base model."""

    engine: Engine
    trainer: Trainer
    vocabulary: Vocabulary
    context_length: int

    def __init__(self, config: ServerConfig, parts: Parts, state: Path) -> None:
        self._config, self._parts, self._state = config, parts, state
        self.store = parts.open_store(config.store)
        self._models: dict[tuple[str, str], KnownModel] = {}
        self._returning: dict[tuple[str, str], asyncio.Event] = {}
        self._adapters = AdapterFolders(state / "adapters")
        self._lock = asyncio.Lock()
        self.base_model: str | None = None
        self._base_shape: BaseShape | None = None
        self._max_rank: int | None = None

    def all(self) -> list[KnownModel]:
        return list(self._models.values())

    def served(self) -> list[ServedModel]:
        return [m for m in self._models.values() if isinstance(m, ServedModel)]

    def get_served(self, project: str, name: str) -> ServedModel:
        """Like `get`; raises InvalidInput for a model that is only logged."""
        model = self.get(project, name)
        if not isinstance(model, ServedModel):
            raise InvalidInput(f"{project}/{name} is only logged here; train and sample a TrainableModel")
        return model

    def get(self, project: str, name: str) -> KnownModel:
        """Raises InvalidName, or NotFound for a model that is not registered with this server."""
        check_name("project", project)
        check_name("model", name)
        model = self._models.get((project, name))
        if model is None:
            known = ", ".join(f"{p}/{n}" for p, n in self._models) or "none yet"
            raise NotFound(f"the model {project}/{name} is not registered here (registered: {known}); register it")
        return model

    async def register(self, request: RegisterRequest) -> tuple[KnownModel, bool]:
        """The model, and whether it is new to this server. Idempotent.

        Raises VersionMismatch, InvalidName, Conflict (another base model, LoRA or options than it was made with, or
        than this server runs), BaseMismatch when the base model of that name is not what it was, LeaseLost when
        another server has it.
        """
        if request.client_version != __version__:
            raise VersionMismatch(
                f"the client is art-sky {request.client_version}, this server {__version__}; run "
                f"`pip install art-sky=={__version__}` on the client's side, or restart the server with the client's"
            )
        check_name("project", request.project)
        check_name("model", request.name)
        async with self._lock:
            registered = self._models.get((request.project, request.name))
            if registered is not None:
                _compare(registered.record, request)
                return registered, False
            if request.trainable and self.base_model not in (None, request.base_model):
                raise Conflict(
                    f"this server runs {self.base_model!r}, not {request.base_model!r}; start another server for it "
                    "(another state folder and port)"
                )
            store = ModelStore(self.store, request.project, request.name)
            record = await asyncio.to_thread(_find_record, store)
            if record is not None:
                _compare(record, request)
            known: KnownModel
            if request.trainable:
                await self._start_base(request)
                if record is not None and record.base_shape not in (None, self._base_shape):
                    raise BaseMismatch(
                        f"the adapters of {record.project}/{record.name} were made for {record.base_model!r} as a "
                        f"{record.base_shape}; here {request.base_model!r} is a {self._base_shape}; start the server "
                        "with the former, or register under another name"
                    )
                self._check_rank(request.lora.rank)
                options = (record or request).options
                template = await asyncio.to_thread(ChatTemplate, self.vocabulary, options.chat_template)
                known = await self._open(store, request, record, template)
            else:
                if record is None:
                    record = await asyncio.to_thread(_create, store, request, None)
                known = KnownModel(request.project, request.name, record, store)
            self._models[request.project, request.name] = known
            return known, True

    def expect(self, project: str, name: str) -> None:
        """The model was registered before a restart and will be again: calls of it wait for `returned`."""
        self._returning[project, name] = asyncio.Event()

    def returned(self, project: str, name: str) -> None:
        """It is registered again, or will not be."""
        event = self._returning.pop((project, name), None)
        if event is not None:
            event.set()

    async def resolve(self, name: str, rollout: Rollout | None = None) -> tuple[ServedModel, int]:
        """`name`, `name@step` or `project/name...`; a bare name is the newest step, looked up now.

        Waits for a model that is expected back after a restart. Raises NotFound for unknown names and steps,
        InvalidInput for a name that two projects have, Busy when one is not back in time.
        """
        base, step = split_step(name)
        project, slash, short = base.rpartition("/")
        wanted = short if slash else base
        try:
            async with asyncio.timeout(RESTORE_SECONDS):
                for (owner, returning), event in list(self._returning.items()):
                    if returning == wanted and (not slash or owner == project):
                        await event.wait()
        except TimeoutError:
            raise Busy(
                f"{wanted} is not back yet, {RESTORE_SECONDS:.0f} s after the server was restarted; see its log, then "
                "send the request again"
            ) from None
        found = [m for m in self.served() if m.name == wanted and (not slash or m.project == project)]
        if rollout is not None and len(found) > 1:
            found = [m for m in found if m.project == rollout.project]
        if not found:
            known = ", ".join(m.name for m in self.served()) or "none yet"
            raise NotFound(
                f"there is no model {ascii(name)[:200]} here (registered: {known}); register it, or mend `model`"
            )
        if len(found) > 1:
            forms = " or ".join(f"{m.project}/{m.name}" for m in found)
            raise InvalidInput(f"two projects have a model {base!r}; write {forms}")
        model = found[0]
        return model, model.step if step is None else model.check_step(step)

    @contextlib.asynccontextmanager
    async def adapter(self, model: ServedModel, step: int) -> AsyncIterator[AdapterRef]:
        async with self._adapters.use(model.store, model.steps[step][1]) as ref:
            yield ref

    def inference_name(self, model: KnownModel) -> str:
        twins = sum(m.name == model.name for m in self.served())
        return model.name if twins <= 1 else f"{model.project}/{model.name}"

    def status(self, model: KnownModel) -> ModelStatus:
        return ModelStatus(
            project=model.project,
            name=model.name,
            base_model=model.record.base_model,
            inference_name=self.inference_name(model),
            step=model.step,
            manifest=model.head_key if isinstance(model, ServedModel) else "",
            lora=model.record.lora,
            server_version=__version__,
            context_length=self.context_length if isinstance(model, ServedModel) else 0,
            lease=model.writer.lease() if isinstance(model, ServedModel) else None,
        )

    async def close(self) -> None:
        if self.base_model is not None:
            await asyncio.gather(self.engine.close(), self.trainer.close())
        for model in self.served():
            await asyncio.to_thread(model.writer.close)

    async def _start_base(self, request: RegisterRequest) -> None:
        if self.base_model is not None:
            return
        folder = await asyncio.to_thread(self._parts.resolve_base, request.base_model)
        self._base_shape = await asyncio.to_thread(base_models.shape, folder)
        self.vocabulary = await asyncio.to_thread(Vocabulary, folder)
        settings = self._config.engine
        limit = settings.context_length or min(self.vocabulary.max_context, DEFAULT_CONTEXT)
        self.context_length = min(limit, self.vocabulary.max_context)
        threads = settings.threads or os.cpu_count() or 1
        logs = self._state / "logs"
        settings = settings.model_copy(update={"context_length": self.context_length})
        if settings.kind == "vllm" and settings.max_lora_rank is None:
            settings = settings.model_copy(update={"max_lora_rank": request.lora.rank})
        placement = await asyncio.to_thread(self._parts.place, settings)
        if placement.engine:
            require(f"engine {settings.kind}", "sampling", GPU, self._config.allow_untested)
        trainer = self._config.trainer
        _check_trainer(trainer, settings.dtype, placement, self._config.allow_untested)
        sampled = folder
        if trainer.quantization == "nf4":  # sampler and trainer compute with the same numbers
            where = self._state / "quantised"
            sampled = await self._parts.quantised_base(folder, where, visible(placement.trainer))
        self.engine = self._parts.make_engine(sampled, settings, logs / "engine.log", placement, trainer)
        self.trainer = self._parts.make_trainer(
            folder, trainer, settings.dtype, threads, logs / "trainer.log", placement
        )
        await self.engine.start()
        self._max_rank = settings.max_lora_rank
        self.base_model = request.base_model

    def _check_rank(self, rank: int) -> None:
        if self._max_rank is not None and rank > self._max_rank:
            raise Conflict(
                f"LoRA rank {rank} is more than the {self._max_rank} that the engine was started for; start the server "
                f"with max_lora_rank {rank}, or give a lower rank"
            )

    async def _open(
        self, store: ModelStore, request: RegisterRequest, record: ModelRecord | None, template: ChatTemplate
    ) -> ServedModel:
        """Takes the model's lease and makes sure of step 0, the untrained adapter."""
        out = self._state / "work" / f"init-{uuid.uuid4().hex}"
        writer: Writer | None = None
        try:
            if record is None:  # what the trainer refuses must leave nothing behind
                await self._init(record, request, out)
                record = await asyncio.to_thread(_create, store, request, self._base_shape)
            owner = f"server {socket.gethostname()} pid {os.getpid()}"
            writer = await asyncio.to_thread(store.open_writer, owner, self.store.lease_wait_seconds)
            if writer.head is None and record.forked_from is not None:
                # Not to be filled with an untrained adapter.
                raise Conflict(
                    f"{store.prefix} is a fork of {record.forked_from} that was broken off; make it again with "
                    "the same `art-sky fork`, then register it"
                )
            model = ServedModel(record.project, record.name, record, store, writer, template)
            if writer.head is None and await asyncio.to_thread(writer.adopt, INIT_REQUEST) is None:
                if not out.exists():
                    await self._init(record, request, out)
                await asyncio.to_thread(_commit_first, writer, out)
            await asyncio.to_thread(model.reload)
            return model
        except BaseException:
            if writer is not None:
                await asyncio.to_thread(writer.close)
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, out, ignore_errors=True)

    async def _init(self, record: ModelRecord | None, request: RegisterRequest, out: Path) -> None:
        lora = (record or request).lora
        await asyncio.to_thread(out.mkdir, parents=True)
        try:
            async with asyncio.timeout(INIT_SECONDS):
                await self.trainer.init(InitTask(base_model=request.base_model, lora=lora, out_dir=str(out)))
        except TimeoutError:
            what = f"the trainer did not make the first adapter within {INIT_SECONDS:.0f} s"
            raise Busy(f"{what}; see its log in {self._state / 'logs'}, then register again") from None


def step_files(folder: Path) -> dict[str, Path]:
    """The files of a step that the trainer wrote, by their names in the manifest."""
    found = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    files = {name: path for name, path in found.items() if name.startswith(STEP_FILES)}
    if not files:
        raise Busy(f"the trainer wrote no files into {folder}; look at its log, then try again")
    return files


def _check_trainer(trainer: TrainerConfig, dtype: str, placement: Placement, allow_untested: bool) -> None:
    """Raises InvalidConfig for what this machine cannot do, or what was never tried unless that is allowed."""
    gpus = len(placement.trainer)
    where = GPU if gpus else CPU
    check_bitsandbytes(trainer, dtype, gpu=gpus > 0)
    if trainer.optimizer == "adamw_8bit":
        require("trainer", "8-bit optimizer", where, allow_untested)
    if trainer.quantization == "nf4":
        part = "trainer unsloth" if trainer.kind == "unsloth" else "trainer"
        require(part, "4-bit base (NF4)", where, allow_untested)
    if trainer.kind != "native":
        require(f"trainer {trainer.kind}", "training", where, allow_untested)
    if trainer.processes > 1:
        if gpus and trainer.processes > gpus:
            raise InvalidConfig(
                f"the trainer has {gpus} GPUs here, not {trainer.processes}; give processes={gpus} or fewer"
            )
        require("trainer", "several processes", where, allow_untested)


def versions() -> dict[str, str]:
    return {"art-sky": __version__}


def _commit_first(writer: Writer, out: Path) -> None:
    writer.commit(step=0, request=INIT_REQUEST, files=step_files(out), updates=0, versions=versions())


def _find_record(store: ModelStore) -> ModelRecord | None:
    try:
        return store.record()
    except NotFound:
        return None


def _create(store: ModelStore, request: RegisterRequest, base: BaseShape | None) -> ModelRecord:
    values: dict[str, Any] = request.model_dump(exclude={"client_version"})
    by = f"art-sky {__version__}"
    return store.create(ModelRecord(**values, base_shape=base, created=time.time(), created_by=by))


def _compare(record: ModelRecord, request: RegisterRequest) -> None:
    for name in ("base_model", "lora", "options", "trainable"):
        stored, asked = getattr(record, name, True), getattr(request, name)
        if stored != asked:
            raise Conflict(
                f"{record.project}/{record.name} was made with {name} {_short(stored)}, not {_short(asked)}; give the "
                "same, or register under another name"
            )


def _short(value: Any) -> str:
    text = str(value)
    return ascii(text if len(text) <= 200 else text[:200] + "...")
