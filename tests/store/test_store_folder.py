"""What is particular to the folder: errors of the operating system, leftovers, locks, URLs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_sky.errors import (
    CorruptObject,
    InvalidConfig,
    InvalidInput,
    LeaseLost,
    NoDiskSpace,
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
)
from art_sky.store import folder, open_store
from art_sky.store.folder import FolderStore


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "s")


@pytest.fixture
def as_nobody() -> Iterator[Callable[[], None]]:
    """Drops root's power to ignore permissions; a no-op for other users."""
    root = os.geteuid() == 0
    yield lambda: os.seteuid(65534) if root else None
    if root:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which those of pytest's are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def leftovers(store: FolderStore) -> list[Path]:
    return list((store.root / ".store" / "tmp").iterdir())


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in {
        "file:///abs/a%20b": "/abs/a b", "/plain/a%20b": "/plain/a%20b", "file://.art-sky": str(tmp_path / ".art-sky"),
        "rel/x": str(tmp_path / "rel/x"), "file://rel/é#?": str(tmp_path / "rel/é#?"),
    }.items():  # fmt: skip
        opened = open_store(url)
        assert opened.root == Path(path)  # type: ignore[attr-defined]
        assert open_store(opened.url).url == opened.url
    for url, words in {
        "s3://": "names no bucket",
        "gs://b": "unknown scheme",
        "": "no folder",
        "file://": "no ",
    }.items():
        with pytest.raises(InvalidConfig, match=words):
            open_store(url)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not a folder"):
        open_store("file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_keys_are_paths_and_the_stores_own_folder_is_not_a_key(store: FolderStore) -> None:
    store.put("p/m/HEAD", b"x")
    assert (store.root / "p/m/HEAD").read_bytes() == b"x"
    for key in (".store/lock", ".STORE/lock", ".store"):
        with pytest.raises(InvalidInput, match="own"):
            store.get(key)
    assert [i.key for i in store.list("")] == ["p/m/HEAD"]


def test_a_key_cannot_be_the_folder_of_another(store: FolderStore) -> None:
    store.put("a/b", b"1")
    store.put("c", b"2")
    for call in (lambda: store.put("a", b""), lambda: store.create("a", b""), lambda: store.put("c/d", b"")):
        with pytest.raises(StoreError, match="choose another name") as caught:
            call()
        assert type(caught.value) is StoreError
    assert not leftovers(store)


@pytest.mark.parametrize("call", ["put", "create", "swap", "put_file"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("where", ["fsync", "pwrite"])
def test_a_failed_write_changes_nothing(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, where: str
) -> None:
    etag = store.put("k", b"old")
    (tmp_path / "f").write_bytes(b"new")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    calls = {
        "put": lambda: store.put("k", b"new"), "create": lambda: store.create("k2", b"new"),
        "swap": lambda: store.swap("k", b"new", etag), "put_file": lambda: store.put("k", tmp_path / "f"),
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(os, where, fail)
        kind = StoreError if code == errno.EIO else NoDiskSpace
        with pytest.raises(kind, match=r"try again|check the disk") as caught:
            calls[call]()
    assert "\n" not in caught.value.message and str(store.root) in caught.value.message
    assert store.get("k").data == b"old" and store.get("k").etag == etag
    assert [i.key for i in store.list("")] == ["k"]
    assert not leftovers(store)
    calls[call]()


def test_permission_denied_is_never_absence(open_folder: Path, as_nobody: Callable[[], None]) -> None:
    store = FolderStore(open_folder / "s")
    store.put("p/m/HEAD", b"x")
    store.put("q/x", b"x")
    (store.root / "p").chmod(0)
    as_nobody()
    calls = [
        lambda: store.get("p/m/HEAD"), lambda: store.open("p/m/HEAD"), lambda: store.info("p/m/HEAD"),
        lambda: store.list("p/m/"), lambda: store.list(""), lambda: store.create("p/m/HEAD", b""),
        lambda: store.put("p/m/HEAD", b""), lambda: store.delete("p/m/HEAD"), lambda: store.acquire("p/m/l", "me"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError, match=r"Permission denied.*; run as the user") as caught:
            call()
        assert not isinstance(caught.value, ObjectNotFound | PreconditionFailed | LeaseLost)
    if os.geteuid() == 65534:
        (open_folder / "locked").mkdir(mode=0o000)
        with pytest.raises(StoreError, match="Permission denied"):
            FolderStore(open_folder / "locked" / "s")
        (open_folder / "locked").chmod(0o700)
    else:
        (store.root / "p").chmod(0o700)


def test_reading_needs_no_write_permission_and_creates_nothing(
    open_folder: Path, as_nobody: Callable[[], None]
) -> None:
    root = open_folder / "s"
    FolderStore(root).put("p/m/HEAD", b"x")
    shutil.rmtree(root / ".store")  # as after copying only what is visible
    for path in (root / "p/m", root / "p", root):
        path.chmod(0o555)
    as_nobody()
    store = FolderStore(root)
    assert store.get("p/m/HEAD").data == b"x"
    assert store.info("p/m/HEAD").size == 1
    assert [i.key for i in store.list("")] == ["p/m/HEAD"]
    with pytest.raises(ObjectNotFound):
        store.get("p/m/other")
    with pytest.raises(StoreError, match="Permission denied"):
        store.put("p/m/HEAD", b"y")
    assert sorted(p.name for p in root.iterdir()) == ["p"]
    if os.geteuid() != 65534:
        for path in (root, root / "p", root / "p/m"):
            path.chmod(0o755)


def test_read_only_file_system_has_its_own_words(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("k", b"x")

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="mount it writable"):
        store.put("k", b"y")


def test_etags_are_unique_on_file_systems_with_coarse_stamps_and_clocks_that_jump(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.utime

    def coarse(fd: int, ns: tuple[int, int]) -> None:
        real(fd, ns=(ns[0] // 10**9 * 10**9,) * 2)

    monkeypatch.setattr(os, "utime", coarse)
    etags = [store.put("k", b"same") for _ in range(5)]
    monkeypatch.setattr(time, "time_ns", lambda: 1_000)  # the clock was set back
    etags += [store.put("k", b"same") for _ in range(5)]
    (store.root / ".store" / "lock").write_bytes(b"")  # the count was lost with the power: the clock does
    monkeypatch.undo()
    etags += [store.put("k", b"same")]
    assert len({e.split("-")[0] for e in etags[:-1]}) == 10 and len(set(etags)) == 11


def test_leftovers_of_killed_writers_are_swept_and_never_listed(store: FolderStore) -> None:
    code = (
        "import os, signal, sys\nfrom art_sky.store import folder, open_store\n"
        "folder._stamp = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "open_store(sys.argv[1]).put('k', b'new' * 1000)\n"
    )
    store.put("k", b"old")
    assert subprocess.run([sys.executable, "-c", code, store.url], check=False).returncode == -9
    (left,) = leftovers(store)
    assert left.read_bytes() == b"new" * 1000
    assert store.get("k").data == b"old" and [i.key for i in store.list("")] == ["k"]
    store.put("k", b"3")  # killed while it held the lock: the kernel has released it
    FolderStore(store.root).put("k", b"4")
    assert leftovers(store) == [left], "a young file may belong to a writer that has not locked it yet"
    os.utime(left, (0, 0))
    FolderStore(store.root).put("k", b"5")
    assert not leftovers(store)


def test_a_temporary_file_in_use_is_not_swept(store: FolderStore) -> None:
    store.put("k", b"")
    with store._temporary(b"slow upload") as (_, path):
        os.utime(path, (0, 0))
        FolderStore(store.root).put("k", b"")
        assert path.exists()


def test_a_stopped_process_with_the_lock_gives_an_error_not_a_hang(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"x")
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.05)
    with store._locked(), pytest.raises(StoreError, match="is stopped; continue or kill it"):
        FolderStore(store.root).put("k", b"y")
    assert store.get("k").data == b"x"
    store.put("k", b"y")


def test_the_folder_may_be_deleted_under_a_live_store(store: FolderStore) -> None:
    store.put("p/m/k", b"x")
    shutil.rmtree(store.root)
    with pytest.raises(ObjectNotFound):
        store.get("p/m/k")
    store.create("p/m/k", b"y")
    assert store.get("p/m/k").data == b"y"


def test_foreign_files_do_no_harm(store: FolderStore) -> None:
    store.put("a", b"x")
    (store.root / os.fsdecode(b"not-utf8-\xff")).write_text("")
    (store.root / "new\nline").write_text("")
    (store.root / "loop").symlink_to(store.root / "nowhere")
    assert [i.key for i in store.list("")] == ["a"]


def test_linked_folders_are_followed(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "bigger-disk").mkdir()
    store.put("k", b"")
    (store.root / "p").symlink_to(tmp_path / "bigger-disk")
    store.put("p/x", b"x")
    assert [i.key for i in store.list("p/")] == ["p/x"]


def test_names_that_fold_together_are_refused(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that ignores case, where `readme` is found at `README`."""
    store.put("p/README", b"x")
    real = Path.stat
    monkeypatch.setattr(store, "_folds_names", True)
    monkeypatch.setattr(Path, "stat", lambda self: real(self.with_name("README") if self.name == "readme" else self))
    for call in (lambda: store.put("p/readme", b""), lambda: store.create("p/readme", b"")):
        with pytest.raises(StoreError, match="differs only in case"):
            call()
    with pytest.raises(ObjectNotFound):
        store.get("p/readme")
    assert store.get("p/README").data == b"x"


def test_a_lease_ends_with_its_process_and_its_generation_does_not(store: FolderStore) -> None:
    code = (
        "import sys\nfrom art_sky.store import open_store\n"
        "print(open_store(sys.argv[1]).acquire('l', 'the child').generation, flush=True)\nsys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, store.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline() == "1\n"
    with pytest.raises(LeaseLost, match=rf"the child \(process {child.pid}\)"):
        store.acquire("l", "parent")
    child.kill()
    child.communicate()
    assert store.acquire("l", "parent").generation == 2


def test_a_lease_notices_a_deleted_lock_and_a_fork(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = store.acquire("l", "me")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(LeaseLost, match="fork"):
        lease.check()
    monkeypatch.undo()
    lease.check()
    shutil.rmtree(store.root)
    with pytest.raises(LeaseLost, match="deleted"):
        lease.check()
    second = store.acquire("l", "me again")
    with pytest.raises(LeaseLost):
        lease.check()
    second.check()


def test_a_damaged_lease_record_is_named(store: FolderStore) -> None:
    store.put("l", b"{")
    with pytest.raises(CorruptObject, match="delete that file"):
        store.acquire("l", "me")
    store.delete("l")
    store.acquire("l", "me").check()
