"""A whole history written through a server that misbehaves, compared with one written through a good one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from s3_stub import FAULTS, Stub, open_stub, serving
from store_workers import make_files

from art_sky.config import LoRAConfig
from art_sky.errors import LeaseLost, ObjectNotFound, StoreError
from art_sky.schemas import ModelRecord, TrainRequestRecord
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore
from art_sky.store.protocol import Store

T = TypeVar("T")
pytestmark = pytest.mark.usefixtures("quick_threads")


class Run:
    """What a server does with its requests, again and again until it is told that it was done."""

    def __init__(self, store: Store, scratch: Path) -> None:
        self.scratch = scratch
        self.model = ModelStore(store, "p", "m")
        self.reopened = 0
        again(lambda: self.model.create(ModelRecord(
            project="p", name="m", base_model="b", lora=LoRAConfig(), created=1.0, created_by="t"
        )))  # fmt: skip
        self.writer = again(lambda: self.model.open_writer("server"))

    def train(self, step: int) -> None:
        model, request = self.model, f"r{step}"
        batch = again(lambda: model.put_blob(f"batch {step}".encode()))
        record = TrainRequestRecord(
            request=request, batch=batch, config={"lr": step}, head_step=step, head_manifest="", created=float(step)
        )
        again(lambda: model.begin_request(record))
        attempt = again(lambda: model.begin_attempt(request, self.writer.generation))
        files = make_files(self.scratch / request, f"step {step}")

        while True:
            try:
                self.writer.commit(
                    step=step, request=request, files=files, updates=1, batch=batch, metrics={"reward": step / 200}
                )
                break
            except LeaseLost:
                raise
            except StoreError:
                if self.writer._unknown is not None:  # as a restarted server does
                    self.reopened += 1
                    self.writer.close()
                    self.writer = again(lambda: self.model.open_writer("server"))
                    if self.writer.adopt(request):
                        break
        again(lambda: model.end_attempt(attempt, "committed"))
        again(lambda: model.log_row(1, step, "train", {"reward": step / 200}))

    def history(self) -> list[object]:
        """Everything but the times; reads and checks every blob."""
        model = ModelStore(self.model.store, "p", "m")
        told: list[object] = []
        for step in model.steps():
            m = step.manifest
            for ref in (*m.files.values(), m.batch):
                assert ref is not None
                model.read_blob(ref)
            # Not their numbers: whether attempt 1 was written may be unknown, and then the caller begins attempt 2.
            attempts = [a.outcome for a in model.attempts(m.request) if a.outcome]
            told.append((m.step, m.request, m.updates, m.files, m.batch, m.metrics, attempts))
        told += [(row.step, row.split, row.metrics) for row in model.history()]
        assert model.pending_requests() == []
        return told


def again(call: Callable[[], T]) -> T:
    """As the callers of a store do for an outcome that is said to be unknown. Rare: the store itself tries for long."""
    for _ in range(20):
        try:
            return call()
        except LeaseLost:
            raise
        except StoreError as e:
            error = e
    raise error


def compare(steps: int, rate: float, seed: int, tmp_path: Path) -> Stub:
    with serving(Stub(seed=seed)) as stub:
        stub.rates = dict.fromkeys(FAULTS, rate)
        faulty = Run(open_stub(stub), tmp_path / "faulty")
        good = Run(open_store(str(tmp_path / "good store")), tmp_path / "good")
        for step in range(steps + 1):
            faulty.train(step)
            good.train(step)
        stub.settle()
        told = faulty.history()
        assert [row[0] for row in told[: steps + 1]] == list(range(steps + 1))  # type: ignore[index]
        assert told == good.history()
        faulty.writer.check()
        faulty.writer.close()
    return stub


def test_two_hundred_steps_through_every_fault(tmp_path: Path) -> None:
    stub = compare(200, 0.05, seed=1, tmp_path=tmp_path)
    assert set(stub.injected) == set(FAULTS) and min(stub.injected.values()) > 20, stub.injected


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 5, 7])
def test_other_seeds_and_more_faults(tmp_path: Path, seed: int) -> None:
    compare(200, 0.02 * seed / 2, seed, tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_ten_of_one_fault_in_a_row(fault: str) -> None:
    with serving(Stub()) as stub:
        store = open_stub(stub)
        store.put("before", b"x" * 1000)
        for n in range(3):
            stub.planned = [fault] * 10
            key = f"k{n}"
            etag = store.create(key, b"one")
            etag = store.swap(key, b"two", etag)
            assert store.put(key, b"three") != etag
            assert store.get(key).data == b"three"
            assert store.info("before").size == 1000
            assert [i.key for i in store.list("")] == ["before", *(f"k{i}" for i in range(n + 1))]
        store.delete("before")
        stub.planned = []
        stub.settle()
        assert "runs/before" not in stub.objects
        assert stub.injected[fault] >= 10


def test_an_absence_told_in_half_a_sentence() -> None:
    with serving(Stub()) as stub:
        store = open_stub(stub)
        for call in (store.get, store.info):
            stub.planned = ["truncated"] * 3
            with pytest.raises(ObjectNotFound):
                call("absent")
            assert stub.planned == []
