"""Leases on objects. No two machines' clocks are compared.

    absent ----------- create ----------> held
    held ------------- swap: new beat --> held        by its holder, every ttl / 4
    held ------------- swap ------------> released    by its holder
    released --------- swap ------------> held        by anyone, at once
    held ------------- swap ------------> held        by another, who saw the same beat for a whole ttl

Each transition but the first is a compare-and-swap, every record has a beat of its own (else two could have equal
etags), and each taking adds 1 to the generation. A holder relies on the lease for ttl / 2 from the moment at which it
began its last successful renewal; so it has stopped for ttl / 2 before another may take it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from typing import Literal, Protocol

from pydantic import Field

from art_sky.errors import LeaseLost, ObjectNotFound, PreconditionFailed, StoreError
from art_sky.schemas import Record
from art_sky.store.protocol import Store
from art_sky.store.records import Records, to_json

log = logging.getLogger(__name__)


class LeaseRecord(Record):
    owner: str
    host: str
    pid: int
    holder: str  # of one taking
    state: Literal["held", "released"] = "held"
    generation: int = Field(ge=1)
    ttl: float = Field(gt=0, le=3600)
    beat: str

    @property
    def who(self) -> str:
        return f"{self.owner} (process {self.pid}) on {self.host}"


class Clock(Protocol):
    """Seconds from any beginning."""

    def awake(self) -> float: ...

    def elapsed(self) -> float:
        """Also counts what a laptop slept: for the holder, whom others do not wait for meanwhile."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def awake(self) -> float:
        return time.monotonic()

    def elapsed(self) -> float:
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def take(store: Store, key: str, owner: str, ttl: float, wait_seconds: float, clock: Clock) -> BucketLease:
    """Waits at most `wait_seconds` for another holder; else raises LeaseLost that names it."""
    deadline = clock.awake() + wait_seconds
    seen, since = "", 0.0
    while True:
        began = clock.elapsed()
        try:
            found = store.get(key)
        except ObjectNotFound:
            found = None
        old = _parse(store, key, found.data) if found else None
        if old is not None and old.beat != seen:
            seen, since = old.beat, clock.awake()
        if old is None or old.state == "released" or clock.awake() - since >= old.ttl:
            record = LeaseRecord(
                owner=owner,
                host=socket.gethostname(),
                pid=os.getpid(),
                holder=uuid.uuid4().hex,
                generation=1 if old is None else old.generation + 1,
                ttl=ttl,
                beat=uuid.uuid4().hex,
            )
            try:
                if found is None:
                    etag = store.create(key, to_json(record))
                else:
                    etag = store.swap(key, to_json(record), found.etag)
                return BucketLease(store, key, record, etag, began, clock)
            except (PreconditionFailed, ObjectNotFound):
                continue  # another was faster, or its holder lives
        left = deadline - clock.awake()
        if left <= 0:
            raise LeaseLost(
                f"{key!r} in {store.url} is held by {old.who}; stop that process (art-sky down), or wait: if it is "
                f"dead, the lease is free {old.ttl:.0f} s after its last sign of life"
            )
        clock.sleep(min(left, old.ttl / 10, 1.0))


class BucketLease:
    """Made by `take`; `keep` starts the renewals."""

    def __init__(self, store: Store, key: str, record: LeaseRecord, etag: str, began: float, clock: Clock) -> None:
        self.key = key
        self.generation = record.generation
        self._store, self._record, self._etag = store, record, etag
        self._clock = clock
        self._renewed = began  # when the last successful renewal began
        self._lost: str | None = None
        self._failed = ""  # why the last renewal did
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self) -> None:
        """Renews every ttl / 4, in a thread that ends with the process or with `release`."""
        self._thread = threading.Thread(target=self._renewals, name=f"lease {self.key}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._stop.is_set():
            raise LeaseLost(f"the lease {self.key!r} was released; open the writer again")
        if self._pid != os.getpid():
            raise LeaseLost(f"the lease {self.key!r} belongs to process {self._pid}; a fork must not use it")
        if self._lost is not None:
            raise LeaseLost(f"{self._lost}; stop one of the two, then start again")
        silent = self._clock.elapsed() - self._renewed
        if silent > self._record.ttl / 2:
            why = self._failed or "check the network and whether this machine slept, then start again"
            raise LeaseLost(
                f"the lease {self.key!r} in {self._store.url} could not be renewed for {silent:.0f} s, so another "
                f"process may take it: {why}"
            )

    def recover(self) -> None:
        try:
            self.renew()
        except StoreError as e:
            self._failed = e.message

    def renew(self) -> None:
        """Shows a sign of life. Raises StoreError when it is not known to have been seen."""
        with self._lock:
            if self._stop.is_set() or self._lost is not None:
                return
            began = self._clock.elapsed()
            record = self._record.model_copy(update={"beat": uuid.uuid4().hex})
            try:
                self._etag = self._store.swap(self.key, to_json(record), self._etag)
            except (PreconditionFailed, ObjectNotFound):
                self._look()
                return
            self._renewed, self._failed = began, ""

    def release(self) -> None:
        """The next one need not wait. When that cannot be written down, it has to wait for a ttl."""
        if self._stop.is_set() or self._pid != os.getpid():
            return
        self._stop.set()
        with self._lock:
            if self._lost is not None:
                return
            record = self._record.model_copy(update={"beat": uuid.uuid4().hex, "state": "released"})
            try:
                self._store.swap(self.key, to_json(record), self._etag)
            except (PreconditionFailed, ObjectNotFound):
                return  # another has it
            except StoreError as e:
                log.warning("the lease %r was not given back, so the next holder has to wait: %s", self.key, e)

    def _renewals(self) -> None:
        while not self._stop.wait(self._record.ttl / 4) and self._lost is None:
            try:
                self.renew()
            except StoreError as e:
                self._failed = e.message
                log.warning("the lease %r was not renewed: %s", self.key, e)  # `check` counts the time

    def _look(self) -> None:
        """After a refused renewal: is it another's, or an earlier renewal of our own that came late?"""
        try:
            found = self._store.get(self.key)
        except ObjectNotFound:
            self._lost = f"the lease {self.key!r} in {self._store.url} was deleted"
            return
        record = _parse(self._store, self.key, found.data)
        if record.holder == self._record.holder:
            self._etag = found.etag  # the next renewal goes on from there
        else:
            self._lost = f"another process took the lease {self.key!r} in {self._store.url}: {record.who}"


def _parse(store: Store, key: str, data: bytes) -> LeaseRecord:
    folder, _, name = key.rpartition("/")
    return Records(store, folder or ".").parse(LeaseRecord, name, data)
