"""Deleting what no step, ref or waiting train request of a model needs: what crashes and `delete_checkpoints` left."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from art_sky.errors import ObjectNotFound
from art_sky.store.deletion import delete_objects
from art_sky.store.failed import failed_requests
from art_sky.store.model_store import ModelStore, blob_hash
from art_sky.store.protocol import ObjectInfo
from art_sky.store.reachable import find_reachable, need_adoptable
from art_sky.store.writer import Writer

GRACE_SECONDS = 24 * 3600.0


@runtime_checkable
class KeepsUploads(Protocol):
    """A store in which a write that was broken off may leave something behind."""

    def abort_uploads(self, prefix: str, before: float) -> int:
        """Deletes what is left of writes below `prefix` begun before the Unix time `before`; returns how many."""
        ...


@dataclass(frozen=True)
class Garbage:
    objects: list[ObjectInfo]  # deleted, or to be deleted
    young: list[ObjectInfo]  # as little needed, but within the grace period
    uploads: int = 0  # writes broken off that were cleaned up

    @property
    def size(self) -> int:
        return sum(info.size for info in self.objects)


def find_garbage(model: ModelStore, grace_seconds: float = GRACE_SECONDS, now: float | None = None) -> Garbage:
    """What `collect` would delete now: blobs and manifests that nothing leads to. Writes nothing, needs no lease.

    `now` is by the store's clock. Raises CorruptObject when a record on the way cannot be read: mend it first.
    """
    # Listed before the roots are read: what comes in between is not in the list.
    listed = [info for kind in ("blobs/", "manifests/") for info in model.store.list(model.key(kind))]
    found = find_reachable(model)
    need_adoptable(model, found)
    unneeded = [i for i in listed if i.key not in found.manifests and blob_hash(i.key) not in found.blobs]
    limit = (time.time() if now is None else now) - grace_seconds
    # Its batch may be older than the failure: it waited, and was tried several times.
    replayable = {f.record.batch.sha256 for f in failed_requests(model) if f.ended > limit}
    young = [i for i in unneeded if i.modified > limit or blob_hash(i.key) in replayable]
    kept = {i.key for i in young}
    return Garbage([i for i in unneeded if i.key not in kept], young)


def collect(writer: Writer, grace_seconds: float = GRACE_SECONDS) -> Garbage:
    """Deletes the garbage of the writer's model, and what is left of writes broken off in its store.

    The grace period is for those who put blobs without the lease, such as a client that uploads a batch, and for the
    batches of failed requests, which `art-sky replay` may train again. Raises LeaseLost when another writer took over.
    """
    model = writer.model
    with writer.exclusive():
        now = _now(model)
        garbage = find_garbage(model, grace_seconds, now)
        delete_objects(writer, (info.key for info in garbage.objects))
        uploads = 0
        if isinstance(model.store, KeepsUploads):
            uploads = model.store.abort_uploads(f"{model.prefix}/", now - grace_seconds)
        return Garbage(garbage.objects, garbage.young, uploads)


def _now(model: ModelStore) -> float:
    """By the store's clock: HEAD was written by this writer, later than anything it may delete was.

    It is earlier than now, which only spares more.
    """
    try:
        return model.store.info(model.key("HEAD")).modified
    except ObjectNotFound:
        return 0.0  # somebody deleted it; the deletion will refuse
