"""Deleting so that even a process that sleeps between any two operations cannot delete what is in use.

The danger: a process decides that a blob is garbage and sleeps; another takes over, puts the same bytes again
(training is deterministic, so the same hash does come back) and commits a step that needs them; the first wakes and
deletes them. No lease helps, for the sleep may come after the last look at it, and a bucket's conditional delete
does not either, for equal bytes have equal etags there. Therefore:

1. Who deletes writes down the keys in `gc/<nonce>.json`, and only then asks whether HEAD is still its own.
2. A new writer rewrites HEAD, and only then reads those lists. So it sees the list, or the other sees its HEAD and
   deletes nothing.
3. A listed key is never relied on again: such a blob is put under `blobs/<sha256>.<nonce>`, and a manifest that is
   listed is not adopted.
4. The list is deleted when every delete was acknowledged. That of a process which died in between stays for good.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING

from art_sky.errors import LeaseLost
from art_sky.schemas import Record

if TYPE_CHECKING:
    from art_sky.store.model_store import ModelStore
    from art_sky.store.writer import Writer


class Condemned(Record):
    """`gc/<nonce>.json`: somebody may delete these keys at any time."""

    keys: list[str]


def read_condemned(model: ModelStore) -> set[str]:
    """Every key that some process may still delete. To be asked after HEAD was taken from it."""
    return {key for name in model.names("gc/") for key in model.read(Condemned, name).keys}


def delete_objects(writer: Writer, keys: Iterable[str]) -> None:
    """Deletes objects of the writer's model which nothing needs. Raises LeaseLost when another writer took over.

    After any error some are deleted and some are not; the next call with them finishes it.
    """
    model = writer.model
    doomed = sorted(set(keys))
    if not doomed:
        return
    fresh = set(doomed) - model.condemned
    model.condemned |= fresh
    name = f"gc/{uuid.uuid4().hex}.json"
    model.create_record(name, Condemned(keys=doomed))
    try:
        writer.confirm()
    except LeaseLost:
        model.store.delete(model.key(name))  # nothing was deleted, nor will be
        model.condemned -= fresh
        raise
    for key in doomed:
        writer.check()
        model.store.delete(key)
    model.store.delete(model.key(name))
    model.condemned -= fresh
