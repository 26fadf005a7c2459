"""Trying out what a store can do, before a run relies on it. Everything happens below a random prefix."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from art_sky.errors import ArtSkyError, LeaseLost, ObjectNotFound, PreconditionFailed, StoreError
from art_sky.store.protocol import Store

RACERS = 8

Need = Literal["read", "train", "nothing"]


@runtime_checkable
class ChecksChecksums(Protocol):
    """A store whose server may compare a write with the SHA-256 that came with it."""

    def refuses_wrong_checksum(self, key: str) -> bool:
        """Tries to write `key` with a wrong checksum; whether the server refused."""
        ...


@dataclass(frozen=True)
class Trial:
    name: str
    ok: bool
    detail: str  # of a failure: what happened
    need: Need  # what is not safe when it fails


@dataclass
class StoreCheck:
    """`next_step` is empty when everything is fine."""

    url: str
    trials: list[Trial] = field(default_factory=list)
    next_step: str = ""

    @property
    def safe_to_read(self) -> bool:
        return all(t.ok for t in self.trials if t.need == "read")

    @property
    def safe_to_train(self) -> bool:
        return all(t.ok for t in self.trials if t.need in ("read", "train"))


class _Failed(Exception):
    """The store answered, but otherwise than it must."""


def check_store(store: Store) -> StoreCheck:
    """Tries every operation that training relies on, and deletes what it wrote. Raises nothing for what fails."""
    prefix = f"art-sky-check-{secrets.token_hex(8)}"
    check = StoreCheck(store.url)
    tries = _Tries(store, prefix)
    steps: list[tuple[str, Need, Callable[[], None]]] = [
        ("list", "read", tries.list_nothing),
        ("write", "train", tries.write),
        ("read", "read", tries.read),
        ("absence is told", "read", tries.absence),
        ("list what was written", "train", tries.list_written),
        ("create only once", "train", tries.create_twice),
        (f"one winner of {RACERS} who create at once", "train", tries.create_race),
        ("compare and swap", "train", tries.swap),
        ("a stale swap is refused", "train", tries.stale_swap),
        ("lease", "train", tries.lease),
        ("delete", "train", tries.delete),
    ]
    if isinstance(store, ChecksChecksums):
        steps.insert(-1, ("a wrong checksum is refused", "nothing", tries.checksum))
    for name, need, attempt in steps:
        if name == "read" and not tries.written:
            continue  # there is nothing of ours to read; what is listed can still be read
        if need == "train" and name != "write" and not tries.written:
            check.trials.append(Trial(name, False, "not tried: nothing can be written", need))
            continue
        check.trials.append(_try(name, need, attempt))
    left = _clean(store, prefix) if tries.written else None
    if left is not None:
        check.trials.append(Trial("clean up", False, left, "nothing"))
    check.next_step = _next_step(check)
    return check


class _Tries:
    def __init__(self, store: Store, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self.written = False

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def list_nothing(self) -> None:
        _expect(not list(self.store.list(f"{self.prefix}/")), "a prefix that nobody uses is not empty")

    def write(self) -> None:
        self.store.put(self.key("object"), b"one")
        self.written = True

    def read(self) -> None:
        self.store.put(self.key("object"), b"two")
        with self.store.open(self.key("object")) as stream:
            _expect(stream.read() == b"two", "another content came back than was written last")
        _expect(self.store.info(self.key("object")).size == 3, "another size came back than was written")

    def absence(self) -> None:
        with _must_raise(ObjectNotFound, "an object that is not there was read"):
            self.store.get(self.key("absent"))

    def list_written(self) -> None:
        listed = [info.key for info in self.store.list(f"{self.prefix}/")]
        _expect(listed == [self.key("object")], f"listed {listed} after one write")

    def create_twice(self) -> None:
        self.store.create(self.key("once"), b"first")
        with _must_raise(PreconditionFailed, "the second create was accepted: it overwrites"):
            self.store.create(self.key("once"), b"second")
        _expect(self.store.get(self.key("once")).data == b"first", "the second create was refused, but it overwrote")

    def create_race(self) -> None:
        barrier = threading.Barrier(RACERS)

        def race(number: int) -> bool:
            barrier.wait(60)
            try:
                self.store.create(self.key("race"), b"%d" % number)
                return True
            except PreconditionFailed:
                return False

        with ThreadPoolExecutor(RACERS) as pool:
            winners = [n for n, won in enumerate(pool.map(race, range(RACERS))) if won]
        _expect(len(winners) == 1, f"{len(winners)} of {RACERS} were told that they created one object")
        _expect(
            self.store.get(self.key("race")).data == b"%d" % winners[0], "another than the winner's bytes are there"
        )

    def swap(self) -> None:
        etag = self.store.create(self.key("swapped"), b"1")
        self.store.swap(self.key("swapped"), b"2", etag)
        _expect(self.store.get(self.key("swapped")).data == b"2", "the swap was accepted, but not made")

    def stale_swap(self) -> None:
        stale = self.store.create(self.key("stale"), b"1")
        self.store.put(self.key("stale"), b"2")
        with _must_raise(PreconditionFailed, "it was accepted: one server would overwrite another's step"):
            self.store.swap(self.key("stale"), b"3", stale)
        _expect(self.store.get(self.key("stale")).data == b"2", "it was refused, but it overwrote")

    def lease(self) -> None:
        lease = self.store.acquire(self.key("lease"), "art-sky check")
        try:
            lease.check()
            with _must_raise(LeaseLost, "two had it at once"):
                self.store.acquire(self.key("lease"), "art-sky check, second").release()
        finally:
            lease.release()
        again = self.store.acquire(self.key("lease"), "art-sky check")
        again.release()
        _expect(again.generation > lease.generation, "its generation did not grow")

    def checksum(self) -> None:
        assert isinstance(self.store, ChecksChecksums)
        refused = self.store.refuses_wrong_checksum(self.key("checksum"))
        _expect(refused, "accepted: damage on the way is only noticed when it is read")

    def delete(self) -> None:
        self.store.delete(self.key("object"))
        with _must_raise(ObjectNotFound, "the object is still there"):
            self.store.get(self.key("object"))
        self.store.delete(self.key("object"))


def _try(name: str, need: Need, attempt: Callable[[], None]) -> Trial:
    try:
        attempt()
    except ArtSkyError as e:
        return Trial(name, False, e.message, need)
    except _Failed as e:
        return Trial(name, False, str(e), need)
    return Trial(name, True, "", need)


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _Failed(otherwise)


@contextmanager
def _must_raise(kind: type[StoreError], otherwise: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise _Failed(otherwise)


def _clean(store: Store, prefix: str) -> str | None:
    try:
        for info in store.list(f"{prefix}/"):
            store.delete(info.key)
    except StoreError as e:
        return f"what the check wrote below {prefix}/ is still there: {e.message}"
    return None


def _next_step(check: StoreCheck) -> str:
    failed = {t.name: t.detail for t in check.trials if not t.ok}
    if not check.safe_to_read:
        return "mend what failed first above (address, login, permissions), then check again"
    if "write" in failed:
        return "read models here (models, steps, fork, pull); to train, get permission to write, or use another store"
    if not check.safe_to_train:
        return (
            "do not train here: two servers could overwrite each other's steps; use a store with conditional writes "
            "(AWS S3, R2, GCS, MinIO, SeaweedFS or a local folder), and pull what you need from this one"
        )
    return ""
