"""The `Store` protocol: the smallest set of object operations from which commits can be built.

Keys are relative, `/`-separated, without `.` or `..` parts. An etag is opaque and identifies one version of a key;
versions with equal bytes may share one (in a bucket they do), so a record that is swapped and may go back to what it
was carries a nonce. Every method blocks and may be called from any thread. Absence is ObjectNotFound; anything that
could not be found out (no access, no disk, no answer) is another StoreError, never absence (rule R6).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from art_sky.store.progress import Moved


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    size: int
    etag: str
    modified: float  # Unix seconds by the store's clock; only for grace periods and display


@dataclass(frozen=True)
class StoredObject:
    data: bytes
    etag: str


class Lease(Protocol):
    """An exclusive claim. `generation` grows with every holder and fences the older ones (DESIGN §7)."""

    generation: int

    def check(self) -> None:
        """Raises LeaseLost when the claim can no longer be relied on."""
        ...

    def recover(self) -> None:
        """After an outage: where nobody else took it meanwhile, `check` passes again. Raises nothing."""
        ...

    def release(self) -> None: ...


class Store(Protocol):
    url: str  # file:///... or s3://bucket/prefix
    # How long a holder that ended without a word may keep the next one from its lease, with a margin.
    lease_wait_seconds: float

    def get(self, key: str) -> StoredObject: ...

    def open(self, key: str) -> BinaryIO:
        """A stream of the object's bytes, for what does not fit into memory."""
        ...

    def info(self, key: str) -> ObjectInfo: ...

    def put(self, key: str, data: bytes | Path, moved: Moved | None = None) -> str:
        """Writes whole or not at all, replacing what was there; returns the etag. `moved` hears of each byte once."""
        ...

    def create(self, key: str, data: bytes) -> str:
        """Writes only if the key is absent, else raises PreconditionFailed; one of many writers wins."""
        ...

    def swap(self, key: str, data: bytes, etag: str) -> str:
        """Writes only if the key is at `etag`, else raises PreconditionFailed (ObjectNotFound if it is gone)."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All keys that start with `prefix`, sorted. Callers must not rely on it to see concurrent writes."""
        ...

    def delete(self, key: str) -> None:
        """Deletes the key; deleting an absent key is no error."""
        ...

    def acquire(self, key: str, owner: str, wait_seconds: float = 0.0) -> Lease:
        """Takes the lease `key`, waiting at most `wait_seconds` for another holder; else raises LeaseLost that
        names the holder."""
        ...
