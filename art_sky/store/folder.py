"""A store in a local folder. Keys are paths under it, so that a run can be read with `ls`, `cat` and `zstdcat`.

How it keeps its promises:

- An object is written to `.store/tmp`, fsynced, and renamed into place; then its folder is fsynced. A reader sees
  the old version or the new one, also after kill -9 or a power loss.
- Conditions are checked and the rename is made under one `flock` on `.store/lock`, which the kernel releases when
  the process ends, however it ends. Nothing slow happens under it.
- An etag is the file's time stamp, inode and size. The stamp is not the clock's: each write sets one that is greater
  than every stamp given before in this store (kept in `.store/lock`), so two versions never share an etag, be their
  bytes equal and their writes within one tick. After a power loss the count may be lost, but then no process is left
  that holds an etag.
- A temporary file is locked by its writer while it is in use; those that nobody locks are leftovers of killed
  processes and are swept by the next one that writes.
- A lease is a `flock` on a file that is never removed, and its generation an ordinary object.

Reading creates nothing. The folder belongs on a local disk: `flock` is not reliable on every network file system.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from art_sky.errors import CorruptObject, InvalidInput, LeaseLost, ObjectNotFound, PreconditionFailed, StoreError
from art_sky.store.keys import check_key, check_prefix, is_key
from art_sky.store.os_errors import reported
from art_sky.store.progress import Moved
from art_sky.store.protocol import ObjectInfo, StoredObject

INTERNAL = ".store"
_BLOCK = 1 << 20
LOCK_SECONDS = 60.0  # for a lock that is held for microseconds: only a stopped process keeps it longer
SWEEP_AGE_SECONDS = 60.0  # a younger temporary file may not be locked yet


class FolderStore:
    """Implements `art_sky.store.protocol.Store`. Instances are cheap and may be shared by threads."""

    lease_wait_seconds = 15.0  # a dead one's are free at once: this is for one that is ending

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path).absolute()
        self.url = self.root.as_uri()
        self._internal = self.root / INTERNAL
        self._durable: set[Path] = set()  # folders whose own entry was fsynced
        self._swept = False
        self._folds_names: bool | None = None
        with reported("open the store", self.root):
            if not stat.S_ISDIR(_mode(self.root, default=stat.S_IFDIR)):
                raise StoreError(f"{self.root} is not a folder: give the store a folder of its own")

    def get(self, key: str) -> StoredObject:
        with self.open(key) as file, reported(f"read {key!r}", self.root):
            etag = _etag(os.fstat(file.fileno()))
            return StoredObject(file.read(), etag)

    def open(self, key: str) -> BinaryIO:
        path = self._path(key)
        with reported(f"read {key!r}", self.root):
            try:
                self._stat(path)
                return path.open("rb")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise self._absent(key) from None

    def info(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with reported(f"read {key!r}", self.root):
            try:
                return _info(key, self._stat(path))
            except (FileNotFoundError, NotADirectoryError):
                raise self._absent(key) from None

    def put(self, key: str, data: bytes | Path, moved: Moved | None = None) -> str:
        return self._write(key, data, moved=moved)

    def create(self, key: str, data: bytes) -> str:
        path = self._path(key)
        with reported(f"write {key!r}", self.root):
            if self._exists(path):  # asked again under the lock; here it saves writing in vain
                raise self._taken(key)
        return self._write(key, data, absent=True)

    def swap(self, key: str, data: bytes, etag: str) -> str:
        return self._write(key, data, etag=etag)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        found: dict[str, ObjectInfo] = {}
        with reported(f"list {prefix!r}", self.root):
            self._walk(self.root / folder, folder + "/" if folder else "", prefix, found)
        return iter([found[key] for key in sorted(found)])

    def delete(self, key: str) -> None:
        path = self._path(key)
        with reported(f"delete {key!r}", self.root):
            if not self._exists(path):
                return
            self._prepare(path.parent)
            with self._locked():
                path.unlink(missing_ok=True)
            _fsync_folder(path.parent)

    def abort_uploads(self, prefix: str, before: float) -> int:
        """Deletes temporary files of writers that were killed, if they are from before the Unix time `before`.

        Such a file does not tell its key: they are deleted for every `prefix`. Returns how many.
        """
        with reported(f"delete temporary files of {check_prefix(prefix)!r}", self.root):
            return self._sweep(before) if (self._internal / "tmp").is_dir() else 0

    def acquire(self, key: str, owner: str, wait_seconds: float = 0.0) -> FolderLease:
        check_key(key)
        with reported(f"take the lease {key!r}", self.root):
            self._prepare(self._internal / "leases")
            path = self._internal / "leases" / hashlib.sha256(key.encode()).hexdigest()
            fd = _flock(path, wait_seconds)
        if fd is None:
            raise LeaseLost(
                f"{key!r} in {self.root} is held by {self._holder(key)}; stop that process (art-sky down), or wait"
            )
        try:
            generation = self._generation(key) + 1
            record = {"owner": owner, "pid": os.getpid(), "generation": generation, "taken": time.time()}
            self.put(key, json.dumps(record).encode())
            return FolderLease(key, generation, path, fd)
        except BaseException:
            _unlock(fd)
            raise

    def _write(
        self,
        key: str,
        source: bytes | Path,
        *,
        absent: bool = False,
        etag: str | None = None,
        moved: Moved | None = None,
    ) -> str:
        path = self._path(key)
        with reported(f"write {key!r}", self.root):
            self._prepare(path.parent)
            with self._temporary(source, moved) as (fd, temporary):
                with self._locked() as clock:
                    current = self._current(path, key)
                    if absent and current is not None:
                        raise self._taken(key)
                    if etag is not None and current is None:
                        raise self._absent(key)
                    if etag is not None and current != etag:
                        raise PreconditionFailed(
                            f"{key!r} in {self.root} is at another version: somebody else wrote it; read it again"
                        )
                    written = _stamp(fd, clock)
                    temporary.rename(path)
                _fsync_folder(path.parent)
            return written

    def _current(self, path: Path, key: str) -> str | None:
        """The etag of what stands at `path`, under the lock."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(found.st_mode):
            raise StoreError(f"{key!r} in {self.root} is the folder of other keys: choose another name")
        if not self._spelled_so(path):
            raise StoreError(
                f"{key!r} in {self.root} differs only in case or Unicode form from another key, and this file "
                "system cannot hold both: choose another name"
            )
        return _etag(found)

    @contextmanager
    def _temporary(self, source: bytes | Path, moved: Moved | None = None) -> Iterator[tuple[int, Path]]:
        """A file with the bytes of `source` on the disk, gone at the end unless it was renamed."""
        path = self._internal / "tmp" / uuid.uuid4().hex
        with path.open("xb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as original:
                    while block := original.read(_BLOCK):
                        file.write(block)
                        if moved is not None:
                            moved(len(block))
                file.flush()
                _fsync(file.fileno())
                yield file.fileno(), path
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        fd = _flock(self._internal / "lock", LOCK_SECONDS)
        if fd is None:
            raise StoreError(
                f"{self._internal / 'lock'} stayed locked for {LOCK_SECONDS:.0f} s: a process that writes to this "
                "store is stopped; continue or kill it, then try again"
            )
        try:
            yield fd
        finally:
            _unlock(fd)

    def _prepare(self, folder: Path) -> None:
        """Makes `folder` and the store's own folders, durably."""
        self._make_folder(self._internal / "tmp")
        if not self._swept:
            self._swept = True
            self._sweep(time.time() - SWEEP_AGE_SECONDS)
        self._make_folder(folder)

    def _make_folder(self, folder: Path) -> None:
        existed = folder.is_dir()
        if existed and folder in self._durable:
            return
        if folder == self.root:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
        # Also when another process made it: that one may die before its own fsync.
        if folder != self.root or not existed:
            _fsync_folder(folder.parent)
        self._durable.add(folder)

    def _sweep(self, before: float) -> int:
        """Deletes temporary files whose writers were killed; returns how many."""
        count = 0
        for path in (self._internal / "tmp").iterdir():
            try:
                if path.stat().st_mtime > before:
                    continue
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    count += 1
            except (FileNotFoundError, BlockingIOError, PermissionError):
                continue  # its writer is alive, or another user's to sweep
        return count

    def _walk(self, folder: Path, base: str, prefix: str, found: dict[str, ObjectInfo]) -> None:
        try:
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing there, or deleted since it was seen
        for entry in entries:
            key = base + entry.name
            if base == "" and entry.name.casefold() == INTERNAL:
                continue
            if entry.is_dir():
                if prefix.startswith(key + "/") or (key + "/").startswith(prefix):
                    self._walk(folder / entry.name, key + "/", prefix, found)
            elif key.startswith(prefix) and is_key(key):
                try:
                    found[key] = _info(key, entry.stat())
                except FileNotFoundError:
                    continue  # deleted since it was seen

    def _path(self, key: str) -> Path:
        if check_key(key).split("/")[0].casefold() == INTERNAL:
            raise InvalidInput(f"key {key!r}: {INTERNAL!r} is the store's own; choose another name")
        return self.root / key

    def _stat(self, path: Path) -> os.stat_result:
        """Raises FileNotFoundError or NotADirectoryError when there is no object."""
        found = path.stat()
        if stat.S_ISDIR(found.st_mode) or not self._spelled_so(path):
            raise FileNotFoundError(path)
        return found

    def _exists(self, path: Path) -> bool:
        try:
            self._stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _spelled_so(self, path: Path) -> bool:
        """Whether an existing path has exactly this name, on file systems that ignore case or Unicode form."""
        if self._folds_names is None:
            if not self._internal.exists():
                return True  # nothing was written by a store yet
            self._folds_names = (self.root / INTERNAL.upper()).exists()
        if not self._folds_names:
            return True
        parts = path.relative_to(self.root).parts
        folders = [self.root.joinpath(*parts[:i]) for i in range(len(parts))]
        return all(folder / part in folder.iterdir() for folder, part in zip(folders, parts, strict=True))

    def _generation(self, key: str) -> int:
        try:
            return int(json.loads(self.get(key).data)["generation"])
        except ObjectNotFound:
            return 0
        except (ValueError, KeyError, TypeError) as e:
            raise CorruptObject(f"the lease {self._path(key)} cannot be read ({e}); delete that file") from e

    def _holder(self, key: str) -> str:
        try:
            record = json.loads(self.get(key).data)
            return f"{record['owner']} (process {record['pid']})"
        except (ObjectNotFound, ValueError, KeyError, TypeError):
            return "another process"  # one that has the lock and has not signed yet

    def _absent(self, key: str) -> ObjectNotFound:
        return ObjectNotFound(f"there is no {key!r} in {self.root}; check the name and the store's path")

    def _taken(self, key: str) -> PreconditionFailed:
        return PreconditionFailed(f"{key!r} exists already in {self.root}; read it, or choose another name")


class FolderLease:
    """A claim that ends with the process, however that ends."""

    def __init__(self, key: str, generation: int, path: Path, fd: int) -> None:
        self.key = key
        self.generation = generation
        self._path = path
        self._fd: int | None = fd
        self._pid = os.getpid()

    def recover(self) -> None:
        return  # the kernel keeps it, whatever happens

    def check(self) -> None:
        if self._fd is None:
            raise LeaseLost(f"the lease {self.key!r} was released; open the writer again")
        if self._pid != os.getpid():
            raise LeaseLost(f"the lease {self.key!r} belongs to process {self._pid}; a fork must not use it")
        if not _same_file(self._fd, self._path):
            raise LeaseLost(
                f"the lock {self._path} was deleted under this process, so another may own {self.key!r} now: "
                "restart this one"
            )

    def release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            _unlock(fd)


def _flock(path: Path, seconds: float) -> int | None:
    """The descriptor of an exclusively locked file, or None when another holds it for `seconds`."""
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(fd, path):
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def _unlock(fd: int) -> None:
    # Said, not only closed: a child forked in between shares the lock through its copy of the descriptor.
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _stamp(fd: int, clock: int) -> str:
    """Gives the open file a time stamp that no other file of the store ever had; returns the etag."""
    try:
        last = int(os.pread(clock, 20, 0))
    except ValueError:
        last = 0  # a new store, or a count lost with the power
    wanted = max(time.time_ns(), last + 1)
    for coarse in (0, 1_000, 1_000_000, 1_000_000_000, 2_000_000_000):  # what some file systems round down to
        os.utime(fd, ns=(wanted + coarse, wanted + coarse))
        found = os.fstat(fd)
        if found.st_mtime_ns > last:
            os.pwrite(clock, b"%020d" % found.st_mtime_ns, 0)
            return _etag(found)
    raise StoreError("this file system keeps no usable time stamps: choose a folder on a local disk")


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}"


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)


def _mode(path: Path, default: int) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return default


def _fsync(fd: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone leaves the bytes in the drive's cache
    if full is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
