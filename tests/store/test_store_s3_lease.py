"""Leases in a bucket, on a clock that the test moves."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from s3_stub import Stub, open_stub, serving

from art_sky.errors import CorruptObject, LeaseLost, StoreError
from art_sky.store import open_store
from art_sky.store.s3 import S3Store
from art_sky.store.s3_lease import BucketLease, take

KEY, TTL = "p/m/leases/server", 60.0


class FakeClock:
    """`meanwhile` is what others do during a sleep."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.asleep = 0.0  # the machine's lid was closed
        self.meanwhile: Callable[[], None] = lambda: None

    def awake(self) -> float:
        return self.now

    def elapsed(self) -> float:
        return self.now + self.asleep

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def stub(aws_environment: None) -> Iterator[Stub]:
    with serving(Stub()) as stub:
        yield stub


@pytest.fixture
def store(stub: Stub) -> S3Store:
    return open_stub(stub)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def lease(store: S3Store, clock: FakeClock, owner: str = "one", wait: float = 0.0) -> BucketLease:
    return take(store, KEY, owner, TTL, wait, clock)


def test_one_holder_at_a_time_and_released_means_at_once(store: S3Store, clock: FakeClock) -> None:
    one = lease(store, clock)
    one.check()
    assert one.generation == 1
    with pytest.raises(LeaseLost, match=r"held by one \(process \d+\) on .*stop that process.*60 s"):
        lease(store, clock, "two")
    one.release()
    one.release()
    with pytest.raises(LeaseLost, match="released"):
        one.check()
    before = clock.now
    two = lease(store, clock, "two")
    assert two.generation == 2 and clock.now == before
    one.renew()  # a thread that comes late
    two.check()


def test_a_dead_holder_is_waited_for_a_whole_ttl(store: S3Store, clock: FakeClock) -> None:
    lease(store, clock)
    clock.now += 10_000  # however long ago it died: the taker compares no clocks
    begin = clock.now
    with pytest.raises(LeaseLost, match="held by one"):
        lease(store, clock, "two", wait=TTL - 1)
    assert clock.now == begin + TTL - 1
    assert lease(store, clock, "two", wait=TTL + 15).generation == 2
    assert clock.now - begin - (TTL - 1) == pytest.approx(TTL, abs=1)


def test_every_beat_begins_the_wait_again(store: S3Store, clock: FakeClock) -> None:
    one = lease(store, clock)
    begin = clock.now
    last = begin + 5 * TTL

    def beat() -> None:
        if clock.now < last:
            one.renew()

    clock.meanwhile = beat
    two = lease(store, clock, "two", wait=100 * TTL)
    assert last + TTL - 2 <= clock.now <= last + TTL + 1
    assert two.generation == 2
    with pytest.raises(LeaseLost, match="not be renewed for 6"):
        one.check()
    clock.meanwhile = lambda: None
    one.renew()
    with pytest.raises(LeaseLost, match=r"another process took .* two \(process"):
        one.check()
    one.release()
    two.check()
    two.renew()


def test_the_holder_stops_half_a_ttl_before_another_may_take_it(store: S3Store, stub: Stub, clock: FakeClock) -> None:
    one = lease(store, clock)
    clock.now += TTL / 2
    one.check()
    clock.now += 0.01
    with pytest.raises(LeaseLost, match="could not be renewed"):
        one.check()
    one.renew()  # nobody took it
    one.check()

    def slow(_key: str, data: bytes, etag: str) -> str:
        clock.now += TTL / 4
        return S3Store.swap(store, KEY, data, etag)

    store.swap = slow  # type: ignore[method-assign]
    one.renew()  # it counts from when it began
    clock.now += TTL / 4 + 0.01
    with pytest.raises(LeaseLost):
        one.check()


def test_after_an_outage_it_is_still_the_holder_s_unless_somebody_took_it(store: S3Store, clock: FakeClock) -> None:
    one, real = lease(store, clock), store.swap

    def refused(*_: object) -> str:
        raise StoreError("ExpiredToken; the credentials have expired: log in again")

    store.swap = refused  # type: ignore[method-assign]
    clock.now += TTL
    one.recover()
    with pytest.raises(LeaseLost, match=r"not be renewed for .* ExpiredToken; the credentials have expired"):
        one.check()
    store.swap = real  # type: ignore[method-assign]
    one.recover()
    one.check()
    lease(store, clock, "two", wait=100 * TTL)
    one.recover()
    with pytest.raises(LeaseLost, match="another process took"):
        one.check()


def test_a_machine_that_slept_has_lost_it(store: S3Store, clock: FakeClock) -> None:
    one = lease(store, clock)
    clock.asleep = 8 * 3600
    with pytest.raises(LeaseLost, match="slept"):
        one.check()


def test_a_renewal_that_came_late_is_our_own(store: S3Store, clock: FakeClock) -> None:
    one = lease(store, clock)
    real, late = store.swap, []

    def unanswered(key: str, data: bytes, etag: str) -> str:
        late.append((key, data, etag))
        raise StoreError("no answer")

    store.swap = unanswered  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        one.renew()
    store.swap = real  # type: ignore[method-assign]
    real(*late[0])
    one.renew()
    one.check()
    clock.now += TTL / 4
    one.renew()
    clock.now += TTL / 2
    one.check()


def test_sixteen_takers_of_a_free_lease(stub: Stub, store: S3Store) -> None:
    def race() -> BucketLease:
        taken: list[BucketLease] = []
        refused: list[LeaseLost] = []
        start = threading.Barrier(16)

        def work(name: str) -> None:
            start.wait()
            try:
                taken.append(take(store, KEY, name, TTL, 0.0, FakeClock()))
            except LeaseLost as e:
                refused.append(e)

        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1 and len(refused) == 15
        return taken[0]

    first = race()
    first.release()
    assert race().generation == first.generation + 1 == 2


def test_deleted_and_damaged_records(store: S3Store, clock: FakeClock) -> None:
    one = lease(store, clock)
    good = json.loads(store.get(KEY).data)
    store.delete(KEY)
    one.renew()
    with pytest.raises(LeaseLost, match="deleted"):
        one.check()
    for junk in (b"", b"{}", json.dumps({**good, "ttl": -1}).encode(), json.dumps({**good, "generation": 0}).encode()):
        store.put(KEY, junk)
        with pytest.raises(CorruptObject, match="leases/server"):
            lease(store, clock)
    store.put(KEY, json.dumps({**good, "format": 2}).encode())
    with pytest.raises(StoreError, match="newer art-sky"):
        lease(store, clock)


def test_a_fork_does_not_hold_it(store: S3Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lease(store, clock)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(LeaseLost, match="fork"):
        one.check()


def test_renewals_run_by_themselves_and_end_with_the_release(stub: Stub) -> None:
    url = f"s3://art-sky-tests/x?endpoint_url={stub.endpoint}&lease_ttl=0.4"
    one = open_store(url).acquire("l", "one")
    with pytest.raises(LeaseLost):
        open_store(url).acquire("l", "two", wait_seconds=1.0)
    one.check()
    one.release()
    assert open_store(url).acquire("l", "two").generation == 2


def test_how_long_a_successor_must_be_ready_to_wait(stub: Stub) -> None:
    assert open_store(f"s3://b-b/x?endpoint_url={stub.endpoint}").lease_wait_seconds == 75
    assert open_store(f"s3://b-b/x?endpoint_url={stub.endpoint}&lease_ttl=2").lease_wait_seconds == 17
