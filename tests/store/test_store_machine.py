"""Two servers, one model, and everything that can go wrong between them, found by a state machine.

The store is in memory. Every operation may be where the process dies (before or after it took effect) or where its
reply is lost. Leases are worth nothing here: each server believes forever that it holds its own, so what is tested
is the fencing by HEAD.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from deaf_lease import DeafLease
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from art_sky.errors import (
    Conflict,
    InvalidInput,
    LeaseLost,
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
)
from art_sky.schemas import Manifest, TrainRequestRecord
from art_sky.store import writer
from art_sky.store.model_store import ModelStore
from art_sky.store.progress import Moved
from art_sky.store.protocol import ObjectInfo, StoredObject
from art_sky.store.retention import delete_checkpoints
from art_sky.store.writer import Writer


class Died(BaseException):
    """The process was killed here."""


class Bucket:
    """What all servers share. With `content_etags` equal bytes have equal etags, as in S3."""

    def __init__(self, content_etags: bool) -> None:
        self.content_etags = content_etags
        self.objects: dict[str, StoredObject] = {}
        self.versions = itertools.count(1)
        self.generations = itertools.count(1)


class FragileStore:
    """One server's view of the bucket. `faults` counts down operations to what happens then."""

    url = "memory:"

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.faults: list[tuple[int, str]] = []

    def get(self, key: str) -> StoredObject:
        if key not in self.bucket.objects:
            raise ObjectNotFound(f"no {key}")
        return self.bucket.objects[key]

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.get(key).data)

    def info(self, key: str) -> ObjectInfo:
        found = self.get(key)
        return ObjectInfo(key, len(found.data), found.etag, 0.0)

    def put(self, key: str, data: bytes | Path, moved: Moved | None = None) -> str:
        assert isinstance(data, bytes)
        return self._write(key, data)

    def create(self, key: str, data: bytes) -> str:
        if key in self.bucket.objects:
            raise PreconditionFailed(f"{key} exists")
        return self._write(key, data)

    def swap(self, key: str, data: bytes, etag: str) -> str:
        if self.get(key).etag != etag:
            raise PreconditionFailed(f"{key} changed")
        return self._write(key, data)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([self.info(k) for k in sorted(self.bucket.objects) if k.startswith(prefix)])

    def delete(self, key: str) -> None:
        self._step(lambda: self.bucket.objects.pop(key, None))

    def acquire(self, key: str, owner: str, wait_seconds: float = 0.0) -> DeafLease:
        return DeafLease(next(self.bucket.generations))

    def _write(self, key: str, data: bytes) -> str:
        etag = hashlib.md5(data).hexdigest() if self.bucket.content_etags else str(next(self.bucket.versions))
        self._step(lambda: self.bucket.objects.update({key: StoredObject(data, etag)}))
        return etag

    def _step(self, effect) -> None:  # type: ignore[no-untyped-def]
        fault = ""
        self.faults = [(n - 1, kind) for n, kind in self.faults]
        if self.faults and self.faults[0][0] < 0:
            fault = self.faults.pop(0)[1]
        if fault == "die before":
            raise Died
        if fault == "no answer, not done":
            raise StoreError("no answer")
        effect()
        if fault == "die after":
            raise Died
        if fault == "no answer, done":
            raise StoreError("no answer")
        if fault == "412 for our own":  # a retry below the store saw what its first try had written
            raise PreconditionFailed("exists")


FAULTS = st.lists(
    st.tuples(
        st.integers(0, 8),
        st.sampled_from(["die before", "die after", "no answer, not done", "no answer, done", "412 for our own"]),
    ),
    max_size=2,
)
SERVER = st.sampled_from([0, 1])
REQUEST = st.sampled_from(["a", "b", "c", "d"])


class Servers(RuleBasedStateMachine):
    @initialize(content_etags=st.booleans())
    def begin(self, content_etags: bool) -> None:
        self.bucket = Bucket(content_etags)
        self.stores = [FragileStore(self.bucket) for _ in range(2)]
        self.writers: list[Writer | None] = [None, None]
        self.newest = -1  # the server that took the model last
        self.acknowledged: dict[str, Manifest] = {}
        self.names = itertools.count()
        self.longest = 0

    def model(self, server: int) -> ModelStore:
        """Without the cache, so that every read is of the store."""
        return ModelStore(self.stores[server], "p", "m")

    @rule(server=SERVER, faults=FAULTS)
    def start(self, server: int, faults: list[tuple[int, str]]) -> None:
        """Takes the model from whoever has it, who will not notice."""
        self.stores[server].faults = list(faults)
        try:
            self.writers[server] = self.model(server).open_writer(f"server {server}")
            self.newest = server
        except (Died, StoreError):
            self.writers[server] = None
            self.newest = -1  # it may have fenced the other before it died
        finally:
            self.stores[server].faults = []

    @rule(server=SERVER, request=REQUEST, adopt=st.booleans(), skip=st.booleans(), faults=FAULTS)
    def train(self, server: int, request: str, adopt: bool, skip: bool, faults: list[tuple[int, str]]) -> None:
        writer = self.writers[server]
        if writer is None:
            return
        self.stores[server].faults = list(faults)
        step = writer.head.step + 1 if writer.head else 0
        blob = f"{request} at {step}, computed {next(self.names)}".encode()
        try:
            manifest = writer.adopt(request) if adopt else None
            if manifest is None and skip and writer.head:
                files = writer.model.manifest(writer.head.manifest).files
                manifest = writer.commit(step=step, request=request, files=files, updates=0)
            elif manifest is None:
                ref = writer.model.put_blob(blob)
                manifest = writer.commit(step=step, request=request, files={"f": ref}, updates=1)
            assert manifest.request == request
            self.acknowledged[request] = manifest
        except Died:
            self.writers[server] = None
        except LeaseLost:
            assert server != self.newest, "only one that was taken over may be told so"
        except (StoreError, Conflict):
            pass  # said to the caller, who asks again
        finally:
            self.stores[server].faults = []

    @precondition(lambda self: self.newest >= 0)
    @rule(request=REQUEST)
    def a_healthy_newest_writer_succeeds(self, request: str) -> None:
        writer = self.writers[self.newest]
        if writer is None or writer._unknown is not None:
            return
        manifest = writer.adopt(request)
        if manifest is None:
            step = writer.head.step + 1 if writer.head else 0
            ref = writer.model.put_blob(f"{request} {next(self.names)}".encode())
            manifest = writer.commit(step=step, request=request, files={"f": ref}, updates=1)
        self.acknowledged[request] = manifest

    @rule(server=SERVER, request=REQUEST, lr=st.sampled_from([1.0, 2.0]), faults=FAULTS)
    def ask(self, server: int, request: str, lr: float, faults: list[tuple[int, str]]) -> None:
        """The request's record never changes, whatever is asked and whoever dies."""
        model = self.model(server)
        batch = model.put_blob(b"batch")
        before = self.bucket.objects.get(f"p/m/requests/{request}.json")
        record = TrainRequestRecord(
            request=request, batch=batch, config={"lr": lr}, head_step=0, head_manifest="", created=0.0
        )
        self.stores[server].faults = list(faults)
        try:
            stored = model.begin_request(record)
            assert stored.config == {"lr": lr}
        except Conflict:
            assert before is not None
        except (Died, StoreError):
            pass
        finally:
            self.stores[server].faults = []
        if before is not None:
            assert self.bucket.objects[f"p/m/requests/{request}.json"] == before

    @rule(server=SERVER, step=st.integers(0, 3), value=st.floats(0, 1), faults=FAULTS)
    def clean(self, server: int, step: int, value: float, faults: list[tuple[int, str]]) -> None:
        """Only the owner deletes here: that one is a matter of the lease, not of HEAD."""
        writer = self.writers[server]
        if writer is None or server != self.newest:
            return
        writer.model.log_row(1, step, "val", {"reward": value})
        for key in [k for k in self.bucket.objects if k.startswith("p/m/requests/")]:
            del self.bucket.objects[key]
        self.stores[server].faults = list(faults)
        try:
            delete_checkpoints(writer)
        except Died:
            self.writers[server] = None
        except (StoreError, InvalidInput) as e:
            assert isinstance(e, StoreError) or "nothing was deleted" in str(e)
        finally:
            self.stores[server].faults = []

    @invariant()
    def head_loads_and_nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "bucket"):
            return
        model = self.model(0)
        steps = model.steps()
        assert [s.manifest.step for s in steps] == list(range(len(steps)))
        requests = [s.manifest.request for s in steps]
        assert len(set(requests)) == len(requests)
        reachable = {s.manifest.request: s.manifest for s in steps}
        for request, manifest in self.acknowledged.items():
            assert reachable.get(request) == manifest, "an acknowledged step stays"
        assert len(steps) >= self.longest, "HEAD never goes back"
        self.longest = len(steps)
        for step in steps:
            if not step.deleted:
                for ref in step.manifest.files.values():
                    model.read_blob(ref)
        assert not steps or not steps[-1].deleted


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.time, "sleep", lambda _: None)
    monkeypatch.setattr(writer, "SETTLE_SECONDS", 0.2)


Servers.TestCase.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestServers = pytest.mark.usefixtures("no_waiting")(Servers.TestCase)
