"""What the server is made of and does not implement: engine, trainer, base models, store. Tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from art_sky.config import EngineConfig, TrainerConfig
from art_sky.errors import InvalidConfig
from art_sky.inference.gpus import Placement
from art_sky.inference.protocol import Engine
from art_sky.schemas import InitTask, TrainOutcome, TrainTask
from art_sky.store.protocol import Store


class Process(Protocol):
    state: Literal["stopped", "starting", "ready", "dead"]
    restarts: int
    pid: int | None


class Trainer(Protocol):
    """The trainer process as the server sees it. Its death is ChildDied; it is started again by itself."""

    @property
    def child(self) -> Process: ...

    async def init(self, task: InitTask) -> None: ...

    def train(self, task: TrainTask) -> AsyncGenerator[dict[str, Any] | TrainOutcome, None]:
        """Yields progress, then the outcome. Closing the iterator cancels between micro-batches."""
        ...

    async def close(self) -> None: ...


def _no_gpus(_: EngineConfig) -> Placement:
    return Placement()


async def _unchanged(folder: Path, *_: object) -> Path:
    return folder


@dataclass(frozen=True)
class Parts:
    make_engine: Callable[
        [Path, EngineConfig, Path, Placement, TrainerConfig], Engine
    ]  # base model's folder, settings, log file, and what trains beside it
    make_trainer: Callable[
        [Path, TrainerConfig, Literal["bfloat16", "float32"], int, Path, Placement], Trainer
    ]  # folder, settings, dtype, threads, log file
    resolve_base: Callable[[str], Path]
    open_store: Callable[[str], Store]
    place: Callable[[EngineConfig], Placement] = _no_gpus  # the GPUs of engine and trainer; blocks
    # The folder that the engine samples from, where the trainer's base is quantised, for a base model's: also takes
    # where to keep it, and the trainer's environment.
    quantised_base: Callable[[Path, Path, Mapping[str, str]], Awaitable[Path]] = _unchanged


def real_parts() -> Parts:
    from art_sky.base_models import resolve
    from art_sky.store import open_store
    from art_sky.training.quantization import dense_copy

    return Parts(
        make_engine=_make_engine,
        make_trainer=_make_trainer,
        resolve_base=resolve,
        open_store=open_store,
        place=_place,
        quantised_base=dense_copy,
    )


def _make_engine(
    folder: Path, settings: EngineConfig, log_file: Path, placement: Placement, trainer: TrainerConfig
) -> Engine:
    if settings.kind == "vllm":
        from art_sky.inference.vllm import VllmEngine

        return VllmEngine(folder, settings, log_file, placement, trainer)
    from art_sky.inference.cpu import CpuEngine

    return CpuEngine(folder, settings, log_file)


def _make_trainer(
    folder: Path,
    settings: TrainerConfig,
    dtype: Literal["bfloat16", "float32"],
    threads: int,
    log_file: Path,
    placement: Placement,
) -> Trainer:
    from art_sky.inference.gpus import visible
    from art_sky.training.process import TrainerProcess

    # Without GPUs in the placement it must not find one by itself: the memory plan is of main memory then.
    return TrainerProcess(folder, dtype, threads, log_file, visible(placement.trainer), settings)


def _place(settings: EngineConfig) -> Placement:
    """Raises InvalidConfig where vLLM is asked for and not there, or there is no GPU for it."""
    from art_sky.inference.gpus import find_gpus, place
    from art_sky.inference.vllm_install import find_vllm

    if settings.kind != "vllm":
        return Placement()
    install = find_vllm(settings)
    if install.cpu_build:
        return Placement()
    gpus = find_gpus()
    if not gpus:
        raise InvalidConfig(
            f"vLLM {install.version} of {install.python} is a build for GPUs, and nvidia-smi finds none here; use the "
            "one of `make vllm`"
        )
    return place(gpus)
