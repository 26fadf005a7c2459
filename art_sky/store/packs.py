"""A folder in a store: small files travel together in packs, and a sync in which nothing changed is one request.

    <prefix>/manifest.json.zst  for each path its hash, and which bytes of which object it is
    <prefix>/packs/<push>-<n>   small files one after the other
    <prefix>/files/<push>-<n>   one large file

Objects never change, and no two pushes write the same one. The manifest is swapped last, so that a reader sees the
folder of before or the folder of after; then what no file is in any more is deleted. A content that is there already
is not sent again. Every file is checked against its hash when it is read. Kept are contents, paths and whether a file
is executable; empty folders are not. What a killed push left, which nothing refers to, is deleted by a later push that
changes something: whoever read the manifest before that push swapped it cannot swap it any more, so that all
objects older than the new manifest which it does not name are of no use.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from art_sky.errors import Conflict, CorruptObject, InvalidInput, ObjectNotFound, PreconditionFailed, StoreError
from art_sky.store.keys import check_key
from art_sky.store.os_errors import reported
from art_sky.store.protocol import Store

FORMAT = 1
MANIFEST = "manifest.json.zst"
PACK_BELOW = 256 << 10  # bytes; a file of this size or more is an object of its own
PACK_BYTES = 4 << 20
TRANSFERS = 8  # objects in flight, each small or streamed
MAX_MANIFEST = 1 << 30
CLOCK_MARGIN_SECONDS = 60.0  # by which two machines of one store may differ when they say when an object was written
READ_TRIES = 3
_CHUNK = 1 << 20
_OBJECT = re.compile(r"(packs|files)/[0-9a-f]{32}-[0-9]{1,9}")

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A file: `size` bytes from `offset` on in the object at `key`, which is relative to the prefix."""

    sha256: str
    size: int
    key: str
    offset: int = 0
    executable: bool = False


@dataclass(frozen=True)
class Synced:
    """What a push or pull moved."""

    files: int
    objects: int
    bytes: int


def push_folder(store: Store, prefix: str, folder: str | os.PathLike[str], *, pack_below: int = PACK_BELOW) -> Synced:
    """Makes `prefix` hold exactly the files of `folder`; sends only contents that are not there yet.

    Links to files are sent as the files. Raises InvalidInput for what cannot be sent (links to folders, odd names),
    StoreError for a file that changes meanwhile, and Conflict when another push to the same prefix came between.
    """
    root = Path(folder)
    before, etag = _read_manifest(store, prefix)
    there = {entry.sha256: entry for entry in before.values()}
    with _Transfers() as transfers:
        push = _Push(store, prefix, transfers, there, pack_below)
        for path, name in _walk(root):
            push.add(path, name)
        push.flush()
        push.settle()
        transfers.wait()
    if push.files == before and etag is not None:
        return Synced(0, 0, 0)
    data = _manifest_bytes(push.files)
    key = f"{prefix}/{MANIFEST}"
    old = {entry.key for entry in before.values()}
    new = {entry.key for entry in push.files.values()}
    try:
        etag = store.create(key, data) if etag is None else store.swap(key, data, etag)
    except (PreconditionFailed, ObjectNotFound) as e:
        _delete(store, prefix, new - old)
        raise Conflict(f"{prefix!r} in {store.url} was pushed to by another process meanwhile; push again") from e
    _delete(store, prefix, (old - new) | _left_by_killed(store, prefix, etag, new))
    return push.synced


def pull_folder(store: Store, prefix: str, folder: str | os.PathLike[str]) -> Synced:
    """Makes `folder` hold every file of `prefix`; files that are right stay untouched, and others stay too.

    Each file appears whole. Raises ObjectNotFound when nothing was pushed there, CorruptObject naming the object whose
    bytes are wrong, StoreError when `folder` cannot be written.
    """
    root = Path(folder)
    for _ in range(READ_TRIES):
        files, etag = _read_manifest(store, prefix)
        if etag is None:
            raise ObjectNotFound(f"nothing was pushed to {prefix!r} in {store.url}; check the name and the store")
        wanted = {name: entry for name, entry in files.items() if not _holds(root / name, entry)}
        objects: dict[str, list[tuple[str, Entry]]] = {}
        for name, entry in wanted.items():
            objects.setdefault(entry.key, []).append((name, entry))
        try:
            with _Transfers() as transfers:
                for folder_of in {(root / name).parent for name in wanted}:
                    _make_folder(root, folder_of)
                for key, parts in objects.items():
                    transfers.start(partial(_fetch, store, f"{prefix}/{key}", parts, root))
                transfers.wait()
        except ObjectNotFound as e:
            missing = e  # the folder was pushed again, or the object is lost
        else:
            return Synced(len(wanted), len(objects), sum(e.size for e in wanted.values()))
        if _read_manifest(store, prefix)[1] == etag:
            raise CorruptObject(f"{prefix!r} in {store.url} lacks an object ({missing.message}); push it again")
    raise StoreError(f"{prefix!r} in {store.url} is pushed to all the time; pull again when that is over")


class _Push:
    def __init__(
        self, store: Store, prefix: str, transfers: _Transfers, there: dict[str, Entry], pack_below: int
    ) -> None:
        self.files: dict[str, Entry] = {}
        self.synced = Synced(0, 0, 0)
        self._store, self._prefix, self._transfers = store, prefix, transfers
        self._there = dict(there)  # by content
        self._pack_below = pack_below
        self._sizes = {entry.size for entry in there.values()}
        self._hashing: list[tuple[str, Entry, Future[str]]] = []  # path, entry without its hash
        self._id = uuid.uuid4().hex  # two pushes never write the same object, so that one may delete its own
        self._named = 0
        self._pack: dict[str, bytes] = {}  # small contents that are not there yet, by hash
        self._packed: list[tuple[str, str, bool]] = []  # path, hash and mode of the files that wait for the pack
        self._pack_size = 0

    def add(self, path: Path, name: str) -> None:
        with reported("read a file", path), path.open("rb") as file:
            found = os.fstat(file.fileno())
            executable = bool(found.st_mode & stat.S_IXUSR)
            if found.st_size < self._pack_below:
                data = file.read()
                sha256 = hashlib.sha256(data).hexdigest()
            elif found.st_size in self._sizes:
                self.settle()
                data, sha256 = b"", hashlib.file_digest(file, "sha256").hexdigest()
            else:
                # Nothing that could be the same: it is hashed while it is sent.
                self._send_file(path, name, found, None)
                return
        known = self._there.get(sha256)
        if known is not None:
            self.files[name] = Entry(sha256, known.size, known.key, known.offset, executable)
        elif found.st_size >= self._pack_below:
            self._send_file(path, name, found, sha256)
        else:
            self._packed.append((name, sha256, executable))
            if sha256 not in self._pack:
                self._pack[sha256] = data
                self._pack_size += len(data)
            if self._pack_size >= PACK_BYTES:
                self.flush()

    def settle(self) -> None:
        """Waits for the hashes of the large files that are on their way, and enters them."""
        for name, entry, hashing in self._hashing:
            self.files[name] = self._there[hashing.result()] = replace(entry, sha256=hashing.result())
        self._hashing = []

    def flush(self) -> None:
        """Sends the pack that was collected."""
        if not self._packed:
            return
        data = b"".join(self._pack.values())
        key = self._name("packs")
        offset = 0
        for sha256, content in self._pack.items():
            self._there[sha256] = Entry(sha256, len(content), key, offset)
            offset += len(content)
        for name, sha256, executable in self._packed:
            at = self._there[sha256]
            self.files[name] = Entry(sha256, at.size, key, at.offset, executable)
        self._count(len(self._packed), 1, len(data))
        self._transfers.start(partial(self._store.put, f"{self._prefix}/{key}", data))
        self._pack, self._packed, self._pack_size = {}, [], 0

    def _send_file(self, path: Path, name: str, read: os.stat_result, sha256: str | None) -> None:
        entry = Entry(sha256 or "", read.st_size, self._name("files"), 0, bool(read.st_mode & stat.S_IXUSR))
        self._sizes.add(entry.size)
        hashing = None
        if sha256 is None:
            hashing = self._transfers.start(partial(_hash, path))
            self._hashing.append((name, entry, hashing))
        else:
            self.files[name] = self._there[sha256] = entry
        self._count(1, 1, entry.size)
        self._transfers.start(partial(self._put_file, path, entry.key, read, hashing))

    def _put_file(self, path: Path, key: str, read: os.stat_result, hashing: Future[str] | None) -> None:
        self._store.put(f"{self._prefix}/{key}", path)
        if hashing is not None:
            hashing.result()  # it began before this
        with reported("read a file", path):
            after = path.stat()
        if (after.st_mtime_ns, after.st_size) != (read.st_mtime_ns, read.st_size):
            self._store.delete(f"{self._prefix}/{key}")
            raise StoreError(f"{path} changed while it was sent; push again when nobody writes it")

    def _name(self, kind: str) -> str:
        self._named += 1
        return f"{kind}/{self._id}-{self._named}"

    def _count(self, files: int, objects: int, size: int) -> None:
        before = self.synced
        self.synced = Synced(before.files + files, before.objects + objects, before.bytes + size)


class _Transfers:
    """Runs a bounded number of transfers at a time; the first error ends the others that have not begun."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="folder-sync")
        self._running: list[Future[Any]] = []

    def __enter__(self) -> _Transfers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, transfer: Callable[[], T]) -> Future[T]:
        """Waits for a place, so that no more than TRANSFERS packs are in memory; raises what an earlier one raised."""
        if len(self._running) >= TRANSFERS:
            self._running.pop(0).result()
        future = self._pool.submit(transfer)
        self._running.append(future)
        return future

    def wait(self) -> None:
        for transfer in self._running:
            transfer.result()
        self._running = []


def _hash(path: Path) -> str:
    with reported("read a file", path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _delete(store: Store, prefix: str, keys: set[str]) -> None:
    for key in sorted(keys):
        store.delete(f"{prefix}/{key}")


def _left_by_killed(store: Store, prefix: str, etag: str, new: set[str]) -> set[str]:
    """Objects that the manifest at `etag`, which names `new`, does not, and that are no later push's."""
    found = {info.key.removeprefix(f"{prefix}/"): info for info in store.list(f"{prefix}/")}
    manifest = found.get(MANIFEST)
    if manifest is None or manifest.etag != etag:
        return set()  # somebody pushed meanwhile, and cleans up
    limit = manifest.modified - CLOCK_MARGIN_SECONDS
    return {key for key, info in found.items() if info.modified < limit and _OBJECT.fullmatch(key)} - new


def _fetch(store: Store, key: str, parts: list[tuple[str, Entry]], root: Path) -> None:
    """Writes the files that are in one object."""
    if key.rpartition("/")[0].endswith("packs"):
        pack = memoryview(store.get(key).data)
        for name, entry in parts:
            _write(root / name, entry, [pack[entry.offset : entry.offset + entry.size]], key, store)
    else:
        for name, entry in parts:
            with store.open(key) as source:
                _write(root / name, entry, iter(partial(source.read, _CHUNK), b""), key, store)


def _write(path: Path, entry: Entry, blocks: Iterable[bytes | memoryview], key: str, store: Store) -> None:
    digest = hashlib.sha256()
    scratch = path.with_name(f".{path.name[:80]}.{uuid.uuid4().hex}")
    with reported("write a file", path):
        try:
            with scratch.open("xb") as out:
                for block in blocks:
                    digest.update(block)
                    out.write(block)
                if entry.executable:
                    os.fchmod(out.fileno(), os.fstat(out.fileno()).st_mode | 0o111)
            if digest.hexdigest() != entry.sha256:
                raise CorruptObject(f"{key!r} in {store.url} does not hold {path.name!r} as it was sent: push it again")
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """(path, name in the manifest) of all files, sorted."""
    with reported("read a folder", root):
        if not root.is_dir():
            raise InvalidInput(f"{root} is not a folder; give the folder to push")
        folders = [root]
        while folders:
            for path in sorted(folders.pop().iterdir()):
                name = check_key(path.relative_to(root).as_posix())
                if path.is_dir():
                    if path.is_symlink():
                        raise InvalidInput(f"{path} is a link to a folder; remove it, or put the folder itself there")
                    folders.append(path)
                elif path.is_file():
                    yield path, name
                else:
                    raise InvalidInput(f"{path} is no file, or a link that leads nowhere; remove it")


def _holds(path: Path, entry: Entry) -> bool:
    """Whether the file is there already, contents and mode."""
    with reported("read a file", path):
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size != entry.size or bool(found.st_mode & stat.S_IXUSR) != entry.executable:
                    return False
                return not path.is_symlink() and hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
        except (FileNotFoundError, NotADirectoryError):
            return False


def _make_folder(root: Path, folder: Path) -> None:
    """Refuses to leave `root` through a link that is in the way."""
    with reported("make a folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not folder.resolve().is_relative_to(root.resolve()):
            raise StoreError(f"{folder} is a link to another place; remove it, then pull again")


def _read_manifest(store: Store, prefix: str) -> tuple[dict[str, Entry], str | None]:
    """The files and the manifest's etag, None when nothing was pushed yet."""
    key = f"{prefix}/{MANIFEST}"
    try:
        found = store.get(key)
    except ObjectNotFound:
        return {}, None
    try:
        size = zstandard.frame_content_size(found.data)
        if not 0 <= size <= MAX_MANIFEST:
            raise ValueError("its size is not one that a manifest has")
        value = json.loads(zstandard.ZstdDecompressor().decompress(found.data))
        if value["format"] != FORMAT:
            raise StoreError(f"{key!r} in {store.url} was written by a newer art-sky; upgrade this one")
        files = {check_key(name): _entry(Entry(**fields)) for name, fields in value["files"].items()}
    except (zstandard.ZstdError, ValueError, TypeError, LookupError, AttributeError, InvalidInput) as e:
        raise CorruptObject(f"{key!r} in {store.url} cannot be read: {e}; delete it and push again") from e
    return files, found.etag


def _entry(entry: Entry) -> Entry:
    kinds = (type(entry.sha256), type(entry.size), type(entry.key), type(entry.offset), type(entry.executable))
    if kinds != (str, int, str, int, bool) or min(entry.size, entry.offset) < 0 or not _OBJECT.fullmatch(entry.key):
        raise ValueError(f"{entry} is no entry of a manifest")
    return entry


def _manifest_bytes(files: dict[str, Entry]) -> bytes:
    value = {"format": FORMAT, "files": {name: vars(entry) for name, entry in sorted(files.items())}}
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(json.dumps(value).encode())
