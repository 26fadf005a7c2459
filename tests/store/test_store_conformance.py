"""What every store must do. A new store is added to `STORES` and passes the same tests."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import s3_servers
from store_workers import count_up, create_race

from art_sky.errors import InvalidInput, LeaseLost, ObjectNotFound, PreconditionFailed
from art_sky.store import open_store
from art_sky.store.protocol import Store


def folder_url(tmp_path: Path) -> str:
    return (tmp_path / "a store, é").as_uri()


def folding_folder_url(tmp_path: Path) -> str:
    """As on a file system that ignores case: each name is compared with the folder's listing."""
    root = tmp_path / "folding"
    (root / ".store").mkdir(parents=True)
    (root / ".STORE").symlink_to(".store")
    return root.as_uri()


STORES = ["folder", "folding-folder", "seaweedfs", "moto"]

ODD_KEYS = [
    "with space/and  two",
    "percent%20/%2e%2e/+plus",
    "ünïcödé/日本語/🙂",
    "e\u0301 decomposed",
    "quote'\"`$HOME;&|<>(){}[]*?!#~^",
    "-dash/--rf",
    ".hidden/..dots../...",
    "trailing. /x.",
    "HEAD",
    "con/nul.txt",
    "a" * 255,
    "/".join(["deep" * 10] * 20),
    "日" * 85,
]

HOSTILE_KEYS = [
    "", "/abs", "a/", "a//b", "..", "../x", "a/../../etc/passwd", "a/./b", ".", "nul\0byte", "line\nbreak", "\x7f",
    "back\\slash",
    "lone \ud800", "a" * 256, "日" * 86, "/".join(["x" * 100] * 11),
]  # fmt: skip


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return folder_url(tmp_path)
    if request.param == "folding-folder":
        return folding_folder_url(tmp_path)
    return s3_servers.store_url(request.getfixturevalue(request.param))


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url)


@pytest.fixture
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def test_reads_back_what_was_written(store: Store, tmp_path: Path) -> None:
    etag = store.put("a/b", b"one")
    assert store.get("a/b").data == b"one" and store.get("a/b").etag == etag
    info = store.info("a/b")
    assert (info.key, info.size, info.etag) == ("a/b", 3, etag)
    assert abs(info.modified - time.time()) < 60
    with store.open("a/b") as stream:
        assert stream.read(2) == b"on" and stream.read() == b"e"
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * 20_000)
    assert store.put("a/b", big) != etag
    assert store.get("a/b").data == big.read_bytes()
    assert store.put("empty", b"") and store.get("empty").data == b""


def test_a_put_tells_how_many_bytes_it_moved(store: Store, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes((17 << 20) + 1))
    for data, size in ((b"", 0), (b"one", 3), (big, (17 << 20) + 1)):
        moved: list[int] = []
        store.put("a", data, moved.append)
        assert sum(moved) == size
    assert len(moved) > 1, "a large one tells several times"


def test_absence_is_object_not_found(store: Store) -> None:
    for call in (store.get, store.open, store.info):
        for key in ("nothing", "no/thing"):
            with pytest.raises(ObjectNotFound, match="there is no"):
                call(key)
    with pytest.raises(ObjectNotFound):
        store.swap("nothing", b"", "etag")
    assert list(store.list("")) == []
    store.delete("nothing")
    store.put("a", b"")
    for call in (store.get, store.open, store.info):
        with pytest.raises(ObjectNotFound):
            call("a/b")
    store.delete("a/b")
    store.put("f/x", b"")
    for call in (store.get, store.open, store.info):
        with pytest.raises(ObjectNotFound):
            call("f")


def test_create_only(store: Store) -> None:
    etag = store.create("k", b"1")
    for data in (b"1", b"2"):
        with pytest.raises(PreconditionFailed, match="exists"):
            store.create("k", data)
    assert store.get("k").data == b"1" and store.get("k").etag == etag
    store.delete("k")
    store.create("k", b"2")
    assert store.get("k").data == b"2"


def test_compare_and_swap(store: Store) -> None:
    first = store.create("k", b"1")
    second = store.swap("k", b"2", first)
    with pytest.raises(PreconditionFailed, match="another version"):
        store.swap("k", b"3", first)
    assert store.get("k").data == b"2" and store.get("k").etag == second
    store.delete("k")
    with pytest.raises(ObjectNotFound):
        store.swap("k", b"3", second)
    store.create("k", b"other")
    with pytest.raises(PreconditionFailed):
        store.swap("k", b"3", second)


def test_every_version_has_its_own_etag(store: Store) -> None:
    """Also within one clock tick, and after a delete."""
    etags = [store.create("k", b"0")]
    for n in range(1, 40):
        data = str(n).encode()
        if n % 10 == 9:
            store.delete("k")
            etags.append(store.create("k", data))
        elif n % 2:
            etags.append(store.put("k", data))
        else:
            etags.append(store.swap("k", data, etags[-1]))
        assert store.info("k").etag == store.get("k").etag == etags[-1]
    assert len(set(etags)) == len(etags)


@pytest.mark.parametrize("url", ["folder", "folding-folder"], indirect=True)
def test_in_a_folder_equal_bytes_too_have_etags_of_their_own(store: Store) -> None:
    etags = [store.create("k", b"same")]
    for n in range(60):
        if n % 10 == 9:
            store.delete("k")
            etags.append(store.create("k", b"same"))
        elif n % 2:
            etags.append(store.put("k", b"same"))
        else:
            etags.append(store.swap("k", b"same", etags[-1]))
        assert store.info("k").etag == store.get("k").etag == etags[-1]
    assert len(set(etags)) == len(etags)


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys(store: Store, key: str) -> None:
    etag = store.create(key, key.encode())
    with pytest.raises(PreconditionFailed):
        store.create(key, b"")
    assert store.get(key).data == key.encode()
    assert [i.key for i in store.list("")] == [i.key for i in store.list(key)] == [key]
    store.swap(key, b"2", etag)
    store.delete(key)
    assert list(store.list("")) == []


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_hostile_keys_are_refused_by_every_method(store: Store, key: str) -> None:
    calls = [
        lambda: store.get(key), lambda: store.open(key), lambda: store.info(key), lambda: store.put(key, b""),
        lambda: store.create(key, b""), lambda: store.swap(key, b"", "e"), lambda: store.delete(key),
        lambda: store.acquire(key, "me"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidInput, match="use a relative path"):
            call()
    if key not in ("", "a/"):
        with pytest.raises(InvalidInput):
            store.list(key)


def test_lists_1100_keys_sorted_by_prefix(store: Store) -> None:
    keys = [f"many/{n % 7}/{n:04d}" for n in range(1_000)]
    keys += [f"many-{n}" for n in range(50)] + [f"many.{n}/x" for n in range(50)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: store.put(key, key.encode()), keys))
    assert [i.key for i in store.list("")] == sorted(keys)
    for prefix in ("many/", "many", "many/3/", "many/3/00", "many-1", "many.4", "none", "many/3/0003/x"):
        found = list(store.list(prefix))
        assert [i.key for i in found] == sorted(k for k in keys if k.startswith(prefix))
        assert all(i.size == len(i.key) and i.etag for i in found)
    assert [i.etag for i in store.list("many/3/0003")] == [store.info("many/3/0003").etag]


def test_sixteen_writers_create_and_one_wins(store: Store, url: str, processes: ProcessPoolExecutor) -> None:
    begin = time.time() + (1.5 if url.startswith("file:") else 3.0)  # the processes import a client first
    names = [[f"writer-{p}-{t} " for t in range(4)] for p in range(4)]
    winners = [w for r in [processes.submit(create_race, url, begin, n) for n in names] for w in r.result()]
    assert len(winners) == 1
    assert store.get("race/key").data == winners[0].encode() * 1000


def test_eight_workers_count_to_two_hundred(store: Store, url: str, processes: ProcessPoolExecutor) -> None:
    store.create("counter", b"0")
    for result in [processes.submit(count_up, url, 2, 25) for _ in range(4)]:
        result.result()
    assert store.get("counter").data == b"200"


def test_readers_see_whole_versions(store: Store) -> None:
    store.put("k", b"0" * 100_000)
    stop = threading.Event()
    torn: list[bytes] = []

    def read() -> None:
        while not stop.is_set():
            data = store.get("k").data
            if len(data) != 100_000 or len(set(data)) != 1:
                torn.append(data[:10])

    thread = threading.Thread(target=read)
    thread.start()
    for n in range(60):
        store.put("k", str(n % 10).encode() * 100_000)
    stop.set()
    thread.join()
    assert not torn


def test_a_lease_has_one_holder_and_a_growing_generation(url: str) -> None:
    one, two = open_store(url), open_store(url)
    lease = one.acquire("m/leases/server", "first server")
    lease.check()
    with pytest.raises(LeaseLost, match=r"first server \(process \d+\)"):
        two.acquire("m/leases/server", "second")
    other = two.acquire("other/leases/server", "second")
    lease.release()
    lease.release()
    with pytest.raises(LeaseLost, match="released"):
        lease.check()
    again = two.acquire("m/leases/server", "second", wait_seconds=5)
    assert again.generation > lease.generation
    again.check()
    other.check()
    again.release()
    other.release()


def test_waiting_for_a_lease(url: str) -> None:
    lease = open_store(url).acquire("l", "a")
    taken = []
    thread = threading.Thread(target=lambda: taken.append(open_store(url).acquire("l", "b", wait_seconds=30)))
    thread.start()
    lease.release()
    thread.join()
    assert taken[0].generation == lease.generation + 1
    taken[0].release()
