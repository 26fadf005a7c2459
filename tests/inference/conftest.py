from __future__ import annotations

from pathlib import Path

import pytest
from inference_engines import MakeScheduler, make_adapter

from art_sky.config import EngineConfig
from art_sky.inference.scheduler import Scheduler
from art_sky.inference.worker import make_scheduler
from art_sky.schemas import AdapterRef


@pytest.fixture
def engine(tiny_model: Path) -> MakeScheduler:
    def make(model: Path = tiny_model, **config: object) -> Scheduler:
        options = {"dtype": "float32", "threads": 1, "kv_cache_mib": 64, **config}
        return make_scheduler(model, EngineConfig(**options))

    return make


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    """Three trained adapters of different rank, then an untrained one."""
    folder = tmp_path_factory.mktemp("adapters")
    made = [make_adapter(tiny_model, folder / str(i), i, rank=r) for i, r in ((1, 4), (2, 8), (3, 2))]
    made.append(make_adapter(tiny_model, folder / "0", 0, b_std=0.0))
    return [AdapterRef(name=f"p/agent@{path.name}", path=str(path)) for path in made]
