"""The servers of `test_store_machine`, and processes that sleep between any two operations, for any time.

A sleeper commits, collects garbage, deletes checkpoints, tags or forks. It does some operations, sleeps while others
take the model over and go on, and then does the rest, believing that it still owns the model. Blobs come from few
contents, so that the same hash is garbage, deleted and committed again at once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from test_store_machine import FAULTS, REQUEST, SERVER, Died, FragileStore, Servers, no_waiting

from art_sky.config import LoRAConfig
from art_sky.errors import ArtSkyError, Conflict, NotFound, StoreError
from art_sky.schemas import FileRef, Manifest, ModelRecord, TrainRequestRecord
from art_sky.store.fork import fork_model
from art_sky.store.gc import collect
from art_sky.store.model_store import ModelStore
from art_sky.store.protocol import ObjectInfo, StoredObject
from art_sky.store.refs import add_ref, find_step
from art_sky.store.retention import delete_checkpoints
from art_sky.store.writer import Writer

__all__ = ["no_waiting"]  # a fixture
CONTENTS = st.sampled_from(["x", "y", "z"])
RECORD = ModelRecord(project="p", name="m", base_model="tiny", lora=LoRAConfig(), created=1.0, created_by="test")


class Sleeper:
    """A process that runs only when it is told to, for so many operations of the store."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._left = 0
        self._killed = False
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, daemon=True)
        self.done = False
        self.error: BaseException | None = None

    def run(self, operations: int | None) -> None:
        """None: to its end."""
        self._left = -1 if operations is None else operations
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
        self._stopped.acquire()

    def kill(self) -> None:
        self._killed = True
        self.run(0)

    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def before_operation(self) -> None:
        while self._left == 0:
            self._stopped.release()
            self._go.acquire()
            if self._killed:
                raise Died
        self._left -= 1

    def _main(self) -> None:
        self._go.acquire()
        try:
            self._action()
        except BaseException as e:
            self.error = e
        self.done = True
        self._stopped.release()


class SleepyStore(FragileStore):
    """Lets the sleeper that asks sleep before each operation."""

    sleepers: list[Sleeper]

    def get(self, key: str) -> StoredObject:
        self._pause()
        return super().get(key)

    def open(self, key: str) -> BinaryIO:
        self._pause()
        return super().open(key)

    def info(self, key: str) -> ObjectInfo:
        self._pause()
        return super().info(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._pause()
        found = [key for key in sorted(self.bucket.objects) if key.startswith(prefix)]
        return iter([ObjectInfo(k, len(o.data), o.etag, 0.0) for k in found for o in [self.bucket.objects[k]]])

    def _step(self, effect: Any) -> None:
        self._pause()
        super()._step(effect)

    def create(self, key: str, data: bytes) -> str:
        self._pause()
        return self._atomic(lambda: FragileStore.create(self, key, data))

    def swap(self, key: str, data: bytes, etag: str) -> str:
        self._pause()
        return self._atomic(lambda: FragileStore.swap(self, key, data, etag))

    def _atomic(self, operation: Callable[[], str]) -> str:
        """The condition and the write are one operation of the store: nobody sleeps in between."""
        sleepers, self.sleepers = self.sleepers, []
        try:
            return operation()
        finally:
            self.sleepers = sleepers

    def _pause(self) -> None:
        for sleeper in self.sleepers:
            if sleeper.is_here():
                sleeper.before_operation()


class Sleepers(Servers):
    @initialize(content_etags=st.booleans())
    def begin(self, content_etags: bool) -> None:
        super().begin(content_etags)
        self.stores = [self.new_store() for _ in range(2)]
        self.sleepers: list[Sleeper] = []
        self.tagged: dict[str, Manifest] = {}
        self.forks: dict[str, Manifest] = {}
        self.accepted: dict[str, FileRef] = {}  # requests that an owner took
        self.numbers = itertools.count()
        self.model(0).create(RECORD)

    def new_store(self) -> SleepyStore:
        store = SleepyStore(self.bucket)
        store.sleepers = []
        return store

    def start_sleeper(self, store: SleepyStore, action: Callable[[], object], operations: int) -> None:
        sleeper = Sleeper(action)
        store.sleepers = [*store.sleepers, sleeper]
        self.sleepers.append(sleeper)
        sleeper.run(operations)

    @rule(server=SERVER, content=CONTENTS, request=REQUEST)
    def train_the_same_again(self, server: int, content: str, request: str) -> None:
        """Training is deterministic: the bytes are those of an earlier try."""
        writer = self.writers[server]
        if writer is None or writer._unknown is not None:
            return
        try:
            self.acknowledged[request] = self.commit(writer, content, request)
        except (StoreError, Conflict):
            assert server != self.newest

    def commit(self, writer: Writer, content: str, request: str) -> Manifest:
        adopted = writer.adopt(request)
        if adopted is not None:
            return adopted
        step = writer.head.step + 1 if writer.head else 0
        ref = writer.model.put_blob(content.encode())
        return writer.commit(step=step, request=request, files={"f": ref}, updates=1)

    @rule(content=CONTENTS)
    def leave_garbage(self, content: str) -> None:
        self.model(0).put_blob(content.encode())

    @rule(server=SERVER, request=st.sampled_from(["o1", "o2"]), content=CONTENTS)
    def take_request(self, server: int, request: str, content: str) -> None:
        writer = self.writers[server]
        if writer is None or server != self.newest:
            return
        batch = writer.model.put_blob(content.encode())
        record = TrainRequestRecord(request=request, batch=batch, config={}, head_step=0, head_manifest="", created=0.0)
        try:
            self.accepted[request] = writer.model.begin_request(record).batch
        except Conflict:
            assert request in self.accepted  # with another content

    @rule(server=SERVER, faults=FAULTS)
    def collect_garbage(self, server: int, faults: list[tuple[int, str]]) -> None:
        writer = self.writers[server]
        if writer is None:
            return
        self.stores[server].faults = list(faults)
        try:
            collect(writer, 0)
        except Died:
            self.writers[server] = None
        except StoreError:
            pass
        finally:
            self.stores[server].faults = []

    @rule(
        server=SERVER,
        kind=st.sampled_from(["collect", "delete", "train"]),
        content=CONTENTS,
        request=REQUEST,
        operations=st.integers(0, 40),
    )
    def owner_falls_asleep(self, server: int, kind: str, content: str, request: str, operations: int) -> None:
        """In the middle of what it does; another server may then take the model."""
        writer = self.writers[server]
        if writer is None or writer._unknown is not None:
            return
        self.writers[server] = None
        if self.newest == server:
            self.newest = -1
        store = self.new_store()
        writer.model.store = store
        if kind == "delete":
            writer.model.log_row(1, 0, "val", {"reward": 0.5})
        actions: dict[str, Callable[[], object]] = {
            "collect": lambda: collect(writer, 0),
            "delete": lambda: delete_checkpoints(writer),
            "train": lambda: self.commit(writer, content, request),
        }
        self.start_sleeper(store, actions[kind], operations)

    @rule(step=st.integers(0, 3), fork=st.booleans(), operations=st.integers(0, 40))
    def reader_falls_asleep(self, step: int, fork: bool, operations: int) -> None:
        """One who tags or forks, without the lease."""
        store = self.new_store()
        source = ModelStore(store, "p", "m")
        number = next(self.numbers)

        def tag() -> None:
            found = find_step(source, step)
            add_ref(source, f"tag{number}", found)
            self.tagged[found.key] = found.manifest

        def make_fork() -> None:
            child = ModelStore(store, "p", f"fork{number}")
            self.forks[child.prefix] = fork_model(source, step, child, "forker", created_by="test").manifest

        self.start_sleeper(store, make_fork if fork else tag, operations)

    @precondition(lambda self: getattr(self, "sleepers", []))
    @rule(data=st.data(), operations=st.one_of(st.none(), st.integers(1, 20)))
    def wake(self, data: st.DataObject, operations: int | None) -> None:
        sleeper = data.draw(st.sampled_from([s for s in self.sleepers if not s.done] or self.sleepers))
        if not sleeper.done:
            sleeper.run(operations)

    @invariant()
    def nothing_that_is_needed_was_deleted(self) -> None:
        for sleeper in getattr(self, "sleepers", []):
            error = sleeper.error
            assert error is None or isinstance(error, ArtSkyError | Died), repr(error)
        for manifest in getattr(self, "tagged", {}).values():
            assert self.model(0).read_blob(manifest.files["f"])
        for prefix in getattr(self, "forks", {}):
            child = ModelStore(self.stores[0], *prefix.split("/"))
            assert child.read_blob(child.manifest(child.head().manifest).files["f"])
        for request, batch in getattr(self, "accepted", {}).items():
            if request in {r.request for r in self.model(0).pending_requests()}:
                assert self.model(0).read_blob(batch)

    def teardown(self) -> None:
        for sleeper in getattr(self, "sleepers", []):
            if not sleeper.done:
                sleeper.kill()


def test_a_garbage_collector_that_sleeps_before_it_deletes(no_waiting: None) -> None:
    """The story of `art_sky.store.deletion`, told once without chance, for every place where it may sleep."""
    for operations in range(60):
        machine = Sleepers()
        machine.begin(True)
        machine.start(0, [])
        machine.train_the_same_again(0, "x", "a")
        machine.leave_garbage("y")
        machine.owner_falls_asleep(0, "collect", "x", "a", operations)
        machine.start(1, [])
        machine.train_the_same_again(1, "y", "b")
        machine.sleepers[0].done or machine.sleepers[0].run(None)
        machine.head_loads_and_nothing_is_lost_or_doubled()
        machine.nothing_that_is_needed_was_deleted()
        assert len(machine.model(0).steps()) == 2
        if machine.sleepers[0].error is None and operations == 59:
            return
    raise AssertionError("60 operations are not enough to collect: give more")


def test_a_fork_while_checkpoints_are_deleted(no_waiting: None) -> None:
    """Whoever sleeps, and wherever: a fork that was made can be read, and its source knows that the files are kept."""
    made = refused = 0
    for before, between in itertools.product(range(0, 24), range(0, 60, 2)):
        machine = Sleepers()
        machine.begin(True)
        machine.start(0, [])
        for content, request in (("x", "a"), ("y", "b")):
            machine.train_the_same_again(0, content, request)
        machine.model(0).log_row(1, 1, "val", {"reward": 1.0})
        machine.reader_falls_asleep(0, True, before)
        machine.owner_falls_asleep(0, "delete", "x", "a", between)
        for sleeper in machine.sleepers:
            if not sleeper.done:
                sleeper.run(None)
        machine.nothing_that_is_needed_was_deleted()
        if machine.forks:
            made += 1
            assert not machine.model(0).steps()[0].deleted
        else:
            refused += 1
            assert isinstance(machine.sleepers[0].error, NotFound) and not machine.model(0).refs()
    assert made and refused


Sleepers.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSleepers = pytest.mark.usefixtures("no_waiting")(Sleepers.TestCase)
