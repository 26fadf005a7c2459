"""200 train steps by the real server and trainer on a store that misbehaves, against the same on a good one.

The client sends each request until it is told that the step is committed. A server that lost its lease, or cannot
know whether HEAD was written, is replaced by one on another machine: a new state folder and a new writer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from s3_stub import FAULTS, QUICK, Stub, open_stub, serving
from server.server_fakes import BASE, FakeChild, FakeEngine
from training.make_batch import make_groups

from art_sky import __version__
from art_sky.config import LoRAConfig, ServerConfig, TrainConfig
from art_sky.schemas import InitTask, TrainOutcome, TrainTask
from art_sky.server.app import create_app
from art_sky.server.parts import Parts
from art_sky.server.server import Server
from art_sky.store import open_store, s3_lease, writer
from art_sky.store.batches import encode_batch
from art_sky.store.model_store import ModelStore
from art_sky.store.protocol import Store
from art_sky.store.verify import verify_model
from art_sky.training.worker import Worker

SKIPPED = range(3, 200, 50)  # steps whose groups teach nothing
TRIES = 100
API = "/api/v1/models/p/agent"
CONFIG = TrainConfig(learning_rate=1e-3).model_dump()
# A silent server is longer silent than a conditional write is tried: its outcome is then unknown.
IMPATIENT = replace(QUICK, conditional=0.03)


class InProcessTrainer:
    """The trainer's own code, without the process around it; on one thread, so that numbers repeat bit for bit."""

    def __init__(self, folder: Path) -> None:
        self.child = FakeChild()
        self._worker = Worker(folder, "float32", threads=1)
        self._thread = ThreadPoolExecutor(1)

    async def init(self, task: InitTask) -> None:
        await self._run(self._worker.init, task)

    async def train(self, task: TrainTask) -> AsyncGenerator[dict[str, Any] | TrainOutcome, None]:
        yield TrainOutcome.model_validate(await self._run(self._worker.train, task))

    async def close(self) -> None: ...  # the next server has it too

    async def _run(self, method: Callable[[Any], dict[str, Any]], task: InitTask | TrainTask) -> dict[str, Any]:
        nobody = SimpleNamespace(beat=0)
        cancelled = SimpleNamespace(is_set=lambda: False)
        call = SimpleNamespace(params=task.model_dump(), channel=nobody, cancelled=cancelled, event=lambda _: None)
        return await asyncio.get_running_loop().run_in_executor(self._thread, method, call)


class HastyClock:
    """Of one lease: waiting for a dead holder takes no time, and a holder's time stands still."""

    def __init__(self) -> None:
        self._now = 0.0

    def awake(self) -> float:
        return self._now

    elapsed = awake

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class Run:
    """A client, and one server after the other."""

    def __init__(self, open_it: Callable[[], Store], base: Path, root: Path) -> None:
        self._open, self._base, self._root = open_it, base, root
        self._trainer = InProcessTrainer(base)
        self.servers = 0
        self.errors = 0

    async def start(self) -> None:
        """A server that has the model; it finishes what the one before began."""
        body = {"project": "p", "name": "agent", "base_model": "tiny", "client_version": __version__}
        lora = LoRAConfig(rank=1, target_modules=["q_proj", "v_proj"]).model_dump()
        for _ in range(TRIES):
            self.servers += 1
            parts = Parts(
                lambda *_: FakeEngine(self._base),
                lambda *_: self._trainer,
                lambda _: self._base,
                lambda _: self._open(),
            )
            state = self._root / f"machine-{self.servers}"
            self._server = Server(ServerConfig(store="s3://unused", state_dir=str(state)), parts, lambda: None)
            await self._server.start()
            headers = {"authorization": f"Bearer {self._server.token}"}
            transport = httpx.ASGITransport(create_app(self._server))
            self._http = httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, timeout=60)
            reply = await self._http.post("/api/v1/models", json={**body, "lora": lora})
            if reply.status_code == 200:
                return
            assert reply.status_code >= 500, reply.text
            self.errors += 1
            await self.stop()
        raise AssertionError(reply.text)

    async def stop(self) -> None:
        await self._http.aclose()
        await self._server.close()

    async def ask(self, method: str, path: str, **content: Any) -> Any:
        for _ in range(TRIES):
            reply = await self._http.request(method, path, **content)
            if reply.status_code < 400:
                return reply.json()
            assert reply.status_code >= 500, reply.text
            self.errors += 1
        raise AssertionError(reply.text)

    async def train(self, step: int, groups: list[Any]) -> None:
        data = encode_batch(groups)
        sha = hashlib.sha256(data).hexdigest()
        await self.ask("PUT", f"{API}/blobs/{sha}", content=data)
        request = {"request_id": f"r{step}", "batch": sha, "config": CONFIG}
        for _ in range(TRIES):
            await self.ask("POST", f"{API}/train", json=request)
            await self._http.get(f"/api/v1/jobs/r{step}/events")  # until it has ended
            job = await self.ask("GET", f"/api/v1/jobs/r{step}")
            if job["state"] == "committed":
                assert job["result"]["step"] == step
                break
            assert job["state"] == "failed", job
            self.errors += 1
            if job["error"]["code"] == "lease_lost" or "restart the server" in job["error"]["message"]:
                await self.stop()
                await self.start()
        else:
            raise AssertionError(job)
        row = {"split": "train", "step": step, "metrics": {"reward": job["result"]["metrics"]["reward"]}, "batch": sha}
        await self.ask("POST", f"{API}/log", json=row)


def history(store: Store) -> list[object]:
    """All that a run leaves but times, and the numbers of attempts: whether one was written may be unknown."""
    model = ModelStore(store, "p", "agent")
    assert verify_model(model).damages == [] and model.pending_requests() == []
    told: list[object] = []
    for step in model.steps():
        m = step.manifest
        metrics = {name: value for name, value in m.metrics.items() if not name.startswith("time/")}
        outcomes = [a.outcome for a in model.attempts(m.request)]
        assert set(outcomes) <= {"committed", "interrupted", None}, outcomes
        told.append((m.step, m.request, m.updates, m.reason, m.files, m.batch, m.config, metrics))
    told += [(row.attempt, row.step, row.split, row.metrics) for row in model.history()]
    told += [(info.key, store.get(info.key).data) for info in store.list(model.key("trajectories/"))]
    return told


async def run_through(open_it: Callable[[], Store], base: Path, root: Path, batches: list[list[Any]]) -> Run:
    run = Run(open_it, base, root)
    await run.start()
    for step, groups in enumerate(batches, start=1):
        await run.train(step, groups)
    await run.stop()
    return run


async def compare(
    steps: int, seed: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Stub, Run]:
    monkeypatch.setattr(s3_lease, "SystemClock", HastyClock)
    monkeypatch.setattr(writer, "SETTLE_SECONDS", 0.0)
    batches = [
        make_groups(base, groups=1, size=3, tokens=3, seed=step, reward=_reward(step)) for step in range(1, steps + 1)
    ]
    with serving(Stub(seed=seed)) as stub:
        stub.rates = dict.fromkeys(FAULTS, 0.05)
        faulty = await run_through(lambda: open_stub(stub, IMPATIENT), base, tmp_path / "faulty", batches)
        stub.settle()
        told = history(open_stub(stub))
    await run_through(lambda: open_store(str(tmp_path / "s")), base, tmp_path / "good", batches)
    expected = history(open_store(str(tmp_path / "s")))
    assert len(expected) == 1 + 3 * steps
    assert told == expected
    return stub, faulty


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_threads")
async def test_two_hundred_train_steps_through_every_fault(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, faulty = await compare(200, 2, tiny_model, tmp_path, monkeypatch)
    assert set(stub.injected) == set(FAULTS) and min(stub.injected.values()) > 50, stub.injected
    assert faulty.servers > 3 and faulty.errors > 10, (faulty.servers, faulty.errors)


@pytest.mark.usefixtures("quick_threads")
async def test_a_few_train_steps_through_faults(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, _ = await compare(5, 1, tiny_model, tmp_path, monkeypatch)
    assert stub.injected.total() > 20


def _reward(step: int) -> Callable[[list[int]], float]:
    return lambda ids: 0.5 if step in SKIPPED else sum(ids) / 100
