"""Copying a model between two stores: a laptop's folder and a bucket, either way.

Nothing is taken from the destination: its HEAD moves only forward, history and state are merged, and an object that
differs from the one of the same name is a Conflict. HEAD comes last, through a `Writer`, so that a copy that is
broken off leaves the destination's steps as they were, and the next one begins again.

The destination remembers in `copies/<hash>.json` which version of each object it has from a source. So the next copy
reads that one record and lists the source, and when nothing is new it is done.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from art_sky.errors import Conflict, CorruptObject, NotFound, ObjectNotFound, PreconditionFailed
from art_sky.schemas import AttemptRecord, FileRef, Head, HistoryRow, Record
from art_sky.store.history import STATE
from art_sky.store.model_store import ModelStore
from art_sky.store.os_errors import reported
from art_sky.store.progress import Meter, Moved, Progress
from art_sky.store.reachable import find_reachable

THREADS = 8
IN_MEMORY_BYTES = 8 << 20  # a larger blob goes through a temporary file
READ_TRIES = 3  # of a blob whose bytes came wrong: the network may have changed them

RECORDS = ("requests/", "history/", "trajectories/", "deleted/", "refs/", STATE)

T = TypeVar("T")


class Seen(Record):
    """`copies/<hash of the source's URL>.json`."""

    source: str
    etags: dict[str, str]  # name -> version in the source


@dataclass(frozen=True)
class Copied:
    step: int | None = None  # the newest; None when there is none yet, or nothing was new
    blobs: int = 0
    bytes: int = 0
    records: int = 0
    unchanged: bool = False


def copy_model(
    source: ModelStore,
    destination: ModelStore,
    owner: str,
    *,
    wait_seconds: float = 0.0,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> Copied:
    """Brings `destination` to where `source` is: all that its HEAD, refs and waiting requests lead to, and its logs.

    Raises Conflict when the destination has steps that the source has not, or another object under the same name;
    LeaseLost, naming the holder, when a server has the destination; CorruptObject for damaged bytes.
    """
    if source.prefix != destination.prefix:
        raise Conflict(f"{source.prefix} cannot become {destination.prefix}; fork it, which gives it another name")
    record = f"copies/{hashlib.sha256(source.store.url.encode()).hexdigest()[:32]}.json"
    seen, there = _seen(destination, record), _listed(source)
    if there and seen == there:
        return Copied(unchanged=True)
    head = _head(source)  # what it leads to does not change any more
    _check_follows(source, head, destination)
    _create(source, destination)
    changed = sorted(name for name, etag in there.items() if name != "HEAD" and seen.get(name) != etag)
    with destination.open_writer(owner, wait_seconds) as writer, ThreadPoolExecutor(threads) as pool:

        def copy_all(items: Iterable[T], copy: Callable[[T], object]) -> None:
            def checked(item: T) -> None:
                writer.check()
                copy(item)

            futures = [pool.submit(checked, item) for item in items]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

        needed = find_reachable(source, also_deleted=destination.names("deleted/"))
        kept = find_reachable(destination).blobs.keys()  # nobody may delete them; any other may be about to go
        blobs = [blob.ref for sha256, blob in needed.blobs.items() if sha256 not in kept]
        meter = Meter(sum(ref.size for ref in blobs), progress, passes=2)
        copy_all(blobs, lambda ref: copy_blob(source, destination, ref, meter.add))
        copy_all((n for n in changed if not n.startswith("refs/")), lambda n: _copy_record(source, destination, n))
        stored = {destination.key(name) for name in destination.names("manifests/")}
        manifests = [source.name_of(key) for key in needed.manifests if key not in stored]
        copy_all(manifests, lambda name: _copy_once(source, destination, name))
        if head is not None:
            writer.fast_forward(head)
        copy_all((n for n in changed if n.startswith("refs/")), lambda n: _copy_once(source, destination, n))
        now_seen = Seen(source=source.store.url, etags=there).model_dump()
        destination.update(record, lambda _: now_seen)
    return Copied(
        step=head.step if head else None,
        blobs=len(blobs),
        bytes=meter.total,
        records=len(changed) + len(manifests),
    )


def copy_blob(source: ModelStore, destination: ModelStore, ref: FileRef, moved: Moved = lambda _: None) -> FileRef:
    """Copies a blob into the destination's own, once its bytes are known to be right.

    `moved` hears of each byte twice, when it is read and when it is written.

    Raises ObjectNotFound, CorruptObject.
    """
    for left in reversed(range(READ_TRIES)):
        try:
            _copy_verified(source, destination, ref, moved)
            break
        except CorruptObject:
            if not left:
                raise
    return FileRef(sha256=ref.sha256, size=ref.size)


def _copy_verified(source: ModelStore, destination: ModelStore, ref: FileRef, moved: Moved) -> None:
    key = destination.new_blob_key(ref.sha256)
    blocks = _counted(source.blob_blocks(ref), moved)
    if ref.size <= IN_MEMORY_BYTES:
        destination.store.put(key, b"".join(blocks), moved)
        return
    with reported("copy a blob", Path(tempfile.gettempdir())), tempfile.NamedTemporaryFile(prefix="art-sky-") as file:
        file.writelines(blocks)
        file.flush()
        destination.store.put(key, Path(file.name), moved)


def _counted(blocks: Iterator[bytes], moved: Moved) -> Iterator[bytes]:
    count = 0
    try:
        for block in blocks:
            moved(len(block))
            count += len(block)
            yield block
    except CorruptObject:
        moved(-count)  # they are read again
        raise


def _seen(destination: ModelStore, name: str) -> dict[str, str]:
    try:
        return destination.read(Seen, name).etags
    except ObjectNotFound:
        return {}


def _listed(source: ModelStore) -> dict[str, str]:
    """Name -> version of HEAD and of all records that are copied as they are."""
    found = {source.name_of(info.key): info.etag for info in source.store.list(f"{source.prefix}/")}
    return {name: etag for name, etag in found.items() if name == "HEAD" or name.startswith(RECORDS)}


def _head(model: ModelStore) -> Head | None:
    try:
        return model.head()
    except NotFound:
        return None


def _create(source: ModelStore, destination: ModelStore) -> None:
    record = source.record()
    try:
        known = destination.record()
    except NotFound:
        destination.create(record)
        return
    if known != record:
        raise Conflict(
            f"{destination.where('model.json')} is not the model of that name in {source.store.url} (base "
            f"{known.base_model} and {record.base_model}); nothing was changed; fork one under another name"
        )


def _check_follows(source: ModelStore, head: Head | None, destination: ModelStore) -> None:
    """Raises Conflict, before anything is written, unless the source continues the destination."""
    there = _head(destination)
    if there is None or (head is not None and there.manifest == head.manifest):
        return
    if head is not None and any(key == there.manifest for key, _ in source.chain(head.manifest)):
        return
    if head is None or any(key == head.manifest for key, _ in destination.chain(there.manifest)):
        newest = "no step yet" if head is None else f"step {head.step}"
        raise Conflict(
            f"{destination.store.url} is ahead: it has {source.prefix} at step {there.step}, {source.store.url} at "
            f"{newest}; nothing was changed; copy it the other way"
        )
    raise Conflict(
        f"step {head.step} of {source.prefix} in {source.store.url} does not continue step {there.step} in "
        f"{destination.store.url}: both were trained on; nothing was changed; fork one of them under another name"
    )


def _copy_record(source: ModelStore, destination: ModelStore, name: str) -> None:
    if name.startswith("history/"):
        _merge(source, destination, name, _newer_row)
    elif name == STATE:
        _merge(source, destination, name, lambda ours, theirs: {**ours, **theirs})
    elif name.startswith("requests/") and name.count(".") == 2:
        _merge(source, destination, name, _ended_attempt)
    else:
        _copy_once(source, destination, name)


def _merge(
    source: ModelStore,
    destination: ModelStore,
    name: str,
    merge: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]],
) -> None:
    theirs = source.parse_dict(name, source.store.get(source.key(name)).data)
    destination.update(name, lambda ours: theirs if ours is None else merge(ours, theirs))


def _newer_row(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """All metrics of both; where both have one, that of the row which was written last."""
    rows = sorted((ours, theirs), key=lambda row: HistoryRow.model_validate(row).time)
    metrics = {**rows[0]["metrics"], **rows[1]["metrics"]}
    return {**rows[0], **rows[1], "metrics": metrics, "nonfinite": sum(v is None for v in metrics.values())}


def _ended_attempt(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    mine, other = AttemptRecord.model_validate(ours), AttemptRecord.model_validate(theirs)
    if mine.outcome is not None and other.outcome is not None and mine != other:
        raise Conflict(
            f"attempt {mine.attempt} of request {mine.request} ended as {mine.outcome} in one store and as "
            f"{other.outcome} in the other: both were trained on; fork one of them under another name"
        )
    return theirs if mine.outcome is None else ours


def _copy_once(source: ModelStore, destination: ModelStore, name: str) -> None:
    """An object that never changes. Raises Conflict when another one has the name."""
    data = source.store.get(source.key(name)).data
    try:
        destination.store.create(destination.key(name), data)
    except PreconditionFailed as e:
        # Of two marks of one deletion only the time differs.
        if not name.startswith("deleted/") and not destination.holds(name, data, e):
            raise Conflict(
                f"{destination.where(name)} is another object than the one in {source.store.url}; nothing was "
                "overwritten; delete the one that is wrong, or fork one of the models under another name"
            ) from e
