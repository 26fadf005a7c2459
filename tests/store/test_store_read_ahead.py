"""Many small records are read several at a time, in order; nothing is read far ahead of who takes it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from art_sky.config import LoRAConfig
from art_sky.errors import CorruptObject
from art_sky.schemas import ModelRecord
from art_sky.store.folder import FolderStore
from art_sky.store.model_store import ModelStore
from art_sky.store.protocol import StoredObject
from art_sky.store.read_ahead import READERS, WORTH_IT, read_ahead

STEPS = 20


class Meeting(FolderStore):
    """Reading waits until four readers are there."""

    kind = "no kind"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._barrier = threading.Barrier(4, timeout=30)

    def get(self, key: str) -> StoredObject:
        if f"/{self.kind}/" in key:
            self._barrier.wait()
        return super().get(key)


@pytest.fixture
def model(tmp_path: Path) -> ModelStore:
    model = ModelStore(Meeting(tmp_path), "p", "m")
    model.create(ModelRecord(project="p", name="m", base_model="b", lora=LoRAConfig(), created=1.0, created_by="t"))
    with model.open_writer("test") as writer:
        for step in range(STEPS):
            writer.commit(step=step, request=f"r{step}", files={"f": model.put_blob(b"")}, updates=0)
            model.log_row(1, step, "train", {"n": step})
    return model


@pytest.mark.parametrize("kind", ["history", "manifests"])
def test_records_of_many_steps_are_read_together(model: ModelStore, kind: str) -> None:
    fresh = ModelStore(model.store, "p", "m")
    assert isinstance(model.store, Meeting)
    model.store.kind = kind
    if kind == "history":
        assert [row.metrics["n"] for row in fresh.history()] == list(range(STEPS))
    else:
        assert [step.manifest.step for step in fresh.steps()] == list(range(STEPS))


def test_what_a_crash_left_among_the_manifests_disturbs_nobody(model: ModelStore) -> None:
    model.store.put("p/m/manifests/00000003-x-9.json", b"{")
    assert len(ModelStore(model.store, "p", "m").steps()) == STEPS
    model.store.put(model.steps()[3].key, b"{")
    with pytest.raises(CorruptObject, match="00000003-r3"):
        ModelStore(model.store, "p", "m").steps()


def test_order_bound_and_errors() -> None:
    begun: list[int] = []

    def read(n: int) -> int:
        begun.append(n)
        if n == 30:
            raise CorruptObject("it; mend it")
        return n * n

    found = read_ahead(read, range(100))
    assert [next(found) for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(begun) <= 5 + READERS
    with pytest.raises(CorruptObject):
        list(found)
    assert len(begun) <= 31 + READERS
    assert list(read_ahead(read, range(WORTH_IT - 1))) == [n * n for n in range(WORTH_IT - 1)]
