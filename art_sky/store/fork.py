"""A new model that begins with a step of another one.

The fork's step 0 has the files of the forked step (adapter and trainer state), so that its own steps count from 0
without a gap; its record and the step's `reason` say where it comes from. No bytes are copied where the fork can
read the source for good: it names the source in its files (`FileRef.root`), and a ref in the source
(`refs/fork-...`, see `art_sky.store.refs`) keeps them there. Otherwise they are copied.

The order matters: the ref comes first, then the files are read, then the fork is written. So whoever cleans up the
source meanwhile either sees the ref or is seen (`add_ref`, `delete_checkpoints`).
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from art_sky.errors import Conflict, CorruptObject, NotFound, ObjectNotFound, StoreError
from art_sky.schemas import BlobRoot, FileRef, Manifest
from art_sky.store.copy import copy_blob
from art_sky.store.model_store import ModelStore, Step
from art_sky.store.progress import Meter, Progress
from art_sky.store.refs import FORK, add_ref, find_step


@dataclass(frozen=True)
class Forked:
    manifest: Manifest  # the fork's step 0
    origin: str  # "project/name@step in store"
    copied: str | None  # why the bytes were copied; None: they were not


def fork_model(
    source: ModelStore,
    step: int | None,
    destination: ModelStore,
    owner: str,
    *,
    created_by: str,
    copy: bool = False,
    wait_seconds: float = 0.0,
    progress: Progress | None = None,
) -> Forked:
    """Makes `destination` from a step of `source` (None: the newest). `copy` copies the bytes in any case.

    A fork that was broken off may be made again. Raises NotFound for a step that is not there or whose files were
    deleted, Conflict when the destination exists, CorruptObject for damaged bytes: nothing is forked then.
    """
    record = source.record()
    found = find_step(source, step)
    origin = f"{source.prefix}@{found.manifest.step} in {source.store.url}"
    begun = _is_begun(destination, origin)
    why = "it was asked for" if copy else _unreadable(source, destination)
    if why is None:
        why = _keep(source, found, destination)
    else:
        source.refuse_deleted(found.manifest)
    # Again, without what this process remembers.
    manifest = ModelStore(source.store, source.project, source.name).manifest(found.key)
    if not begun:
        place = {"project": destination.project, "name": destination.name, "forked_from": origin}
        destination.create(record.model_copy(update={**place, "created": time.time(), "created_by": created_by}))
    with destination.open_writer(owner, wait_seconds) as writer:
        files: dict[str, Path | FileRef] = {}
        meter = Meter(sum(ref.size for ref in manifest.files.values()), progress, passes=2)
        for name, ref in manifest.files.items():
            if why is None:
                files[name] = _rooted(source, destination, ref)
            else:
                files[name] = copy_blob(source, destination, ref, meter.add)
        made = writer.commit(  # reads every byte and checks it
            step=0,
            request=f"fork-{uuid.uuid4().hex}",
            files=files,
            updates=0,
            reason=f"forked from {origin}",
            config=manifest.config,
            versions=manifest.versions,
        )
    return Forked(made, origin, why)


def _is_begun(destination: ModelStore, origin: str) -> bool:
    """Whether the destination is what the same fork left when it was broken off. Raises Conflict when it is more."""
    try:
        known = destination.record()
    except NotFound:
        return False
    try:
        destination.head()
    except NotFound:
        if known.forked_from == origin:
            return True
    raise Conflict(f"{destination.prefix} exists already in {destination.store.url}; choose another name for the fork")


def _unreadable(source: ModelStore, destination: ModelStore) -> str | None:
    """Why the fork could not count on reading the source."""
    if source.store.url == destination.store.url or source.store.url.startswith("s3://"):
        return None
    if destination.store.url.startswith("file://"):
        return None
    return f"{source.store.url} cannot be read from every machine that reads {destination.store.url}"


def _keep(source: ModelStore, step: Step, destination: ModelStore) -> str | None:
    """Makes the ref; None, or why that could not be done."""
    name = f"{FORK}{destination.name[:40]}-{uuid.uuid4().hex[:12]}"
    try:
        url = destination.store.url
        place = BlobRoot(store=None if url == source.store.url else url, model=destination.prefix)
        add_ref(source, name, step, place)
    except (ObjectNotFound, CorruptObject):
        raise
    except StoreError as e:
        return f"no ref could be written into the source ({e.message})"
    return None


def _rooted(source: ModelStore, destination: ModelStore, ref: FileRef) -> FileRef:
    """`ref` as the destination must name it; a fork of a fork names the model that has the bytes."""
    holder, store = (source.prefix, None) if ref.root is None else (ref.root.model, ref.root.store)
    url = store or source.store.url
    root = BlobRoot(store=None if url == destination.store.url else url, model=holder)
    return FileRef(sha256=ref.sha256, size=ref.size, root=root)
