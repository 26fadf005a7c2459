"""What the server is made of and does not implement: engine, trainer, base models, store. Tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from art_sky.config import EngineConfig
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


@dataclass(frozen=True)
class Parts:
    make_engine: Callable[[Path, EngineConfig, Path], Engine]  # base model's folder, settings, log file
    make_trainer: Callable[
        [Path, Literal["bfloat16", "float32"], int, Path], Trainer
    ]  # folder, dtype, threads, log file
    resolve_base: Callable[[str], Path]
    open_store: Callable[[str], Store]


def real_parts() -> Parts:
    from art_sky.base_models import resolve
    from art_sky.inference.cpu import CpuEngine
    from art_sky.store import open_store
    from art_sky.training.process import TrainerProcess

    return Parts(make_engine=CpuEngine, make_trainer=TrainerProcess, resolve_base=resolve, open_store=open_store)
