"""A store in a bucket: AWS S3, or any server that speaks its protocol and has conditional writes.

How it keeps its promises:

- Every write carries a random name of its own in the object's metadata, the same one in all tries of a call. A
  conditional write that was answered with 412, 409, 5xx or not at all may have been made or not; the metadata tells:
  our name = success, another's = lost, unchanged = tried again until a deadline, after which the outcome is reported
  as unknown. So two callers that create a key with the same bytes are told apart, and one of them loses.
- A try that reaches the server after its caller gave up does no harm: its condition no longer holds, as long as no
  two versions of a record have equal bytes, and thus equal etags. HEAD and leases carry nonces for this.
- Calls without a condition are made again, with jitter, until a deadline. What they may do twice or late is harmless:
  blobs are named by their content.
- The metadata also holds the SHA-256 of small objects, which every read checks, whatever the server can do.
- An answer that does not say "no such object" is never taken for absence.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import botocore.exceptions

from art_sky.errors import ObjectNotFound, PreconditionFailed, StoreError
from art_sky.store.keys import check_key, check_prefix, is_key
from art_sky.store.progress import Moved
from art_sky.store.protocol import ObjectInfo, StoredObject
from art_sky.store.s3_client import Client, Timing
from art_sky.store.s3_errors import CALL_ERRORS, BrokenBody, code_of, explained, kind_of, status_of
from art_sky.store.s3_location import parse_location
from art_sky.store.s3_transfer import (
    SHA256,
    UPLOAD_PART,
    WRITE,
    abort_uploads,
    checksum,
    metadata,
    open_object,
    part_source,
    upload_parts,
)

if TYPE_CHECKING:
    from art_sky.store.s3_lease import BucketLease

LEASE_MARGIN_SECONDS = 15.0


@dataclass(frozen=True)
class _Found:
    info: ObjectInfo
    write: str | None  # the name of the write that made it


class S3Store:
    """Implements `art_sky.store.protocol.Store`. May be shared by threads; makes no request when it is opened."""

    def __init__(self, url: str, timing: Timing | None = None) -> None:
        self._at = parse_location(url)
        self.url = self._at.url
        self.lease_wait_seconds = self._at.lease_ttl + LEASE_MARGIN_SECONDS
        self._client = Client(self._at, timing or Timing())

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def get(self, key: str) -> StoredObject:
        stream, etag = self._open(key)
        with stream:
            return StoredObject(stream.read(), etag)

    def open(self, key: str) -> BinaryIO:
        return self._open(key)[0]

    def info(self, key: str) -> ObjectInfo:
        found = self._look(key)
        if found is None:
            raise self._absent(key)
        return found.info

    def put(self, key: str, data: bytes | Path, moved: Moved | None = None) -> str:
        name = self._name(key)
        with part_source(data) as (size, read):
            if size > UPLOAD_PART:
                return upload_parts(self._client, name, size, read, moved)
            body, write = read(0, size), uuid.uuid4().hex
        etag = self._client.retry("write", name, lambda: self._put(name, body, write))
        if moved is not None:
            moved(size)
        return etag

    def create(self, key: str, data: bytes) -> str:
        return self._write_if(key, data, None)

    def swap(self, key: str, data: bytes, etag: str) -> str:
        return self._write_if(key, data, etag)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        name = self._at.prefix and f"{self._at.prefix}/"
        place = {"Bucket": self._at.bucket, "Prefix": name + check_prefix(prefix)}
        found: dict[str, ObjectInfo] = {}
        while True:
            page = self._client.retry("list", place["Prefix"], partial(self._list, place))
            for entry in page.get("Contents", []):
                key = entry["Key"].removeprefix(name)
                if is_key(key):
                    found[key] = _info(key, entry["Size"], entry)
            if not page.get("IsTruncated"):
                break
            place["ContinuationToken"] = page["NextContinuationToken"]
        return iter([found[key] for key in sorted(found)])  # servers differ in their order

    def delete(self, key: str) -> None:
        name = self._name(key)
        try:
            self._client.retry("delete", name, lambda: self._client.raw.delete_object(Bucket=self._at.bucket, Key=name))
        except botocore.exceptions.ClientError:
            return  # it was absent

    def acquire(self, key: str, owner: str, wait_seconds: float = 0.0) -> BucketLease:
        from art_sky.store.s3_lease import SystemClock, take  # its record's schema: not for what only copies files

        lease = take(self, check_key(key), owner, self._at.lease_ttl, wait_seconds, SystemClock())
        lease.keep()
        return lease

    def abort_uploads(self, prefix: str, before: float) -> int:
        """Deletes what interrupted uploads of large objects left, if they began before the Unix time `before`."""
        name = self._at.prefix and f"{self._at.prefix}/"
        return abort_uploads(self._client, name + check_prefix(prefix), before)

    def refuses_wrong_checksum(self, key: str) -> bool:
        """Tries to write `key` with a wrong checksum; whether the server refused."""
        name = self._name(key)
        try:
            self._client.raw.put_object(
                Bucket=self._at.bucket, Key=name, Body=b"right", ChecksumSHA256=checksum(b"wrong")
            )
        except botocore.exceptions.ClientError as e:
            if status_of(e) == 400:
                return True
            raise explained(e, "write", self._at, name) from e
        except CALL_ERRORS as e:
            raise explained(e, "write", self._at, name) from e
        return False

    def _open(self, key: str) -> tuple[BinaryIO, str]:
        try:
            return open_object(self._client, self._name(key))
        except botocore.exceptions.ClientError:
            raise self._absent(key) from None

    def _list(self, place: dict[str, str]) -> dict[str, Any]:
        return dict(self._client.raw.list_objects_v2(**place))

    def _put(self, name: str, data: bytes, write: str, **condition: str) -> str:
        more = {"ChecksumSHA256": checksum(data)} if self._client.checksums else {}
        labels = {WRITE: write, SHA256: hashlib.sha256(data).hexdigest()}
        reply = self._client.raw.put_object(
            Bucket=self._at.bucket, Key=name, Body=data, Metadata=labels, **condition, **more
        )
        return str(reply["ETag"])

    def _write_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Writes if the object is at `etag`, or absent for None."""
        name, write = self._name(key), uuid.uuid4().hex
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        pauses = self._client.pauses(self._client.timing.conditional)
        while True:
            try:
                return self._put(name, data, write, **condition)
            except CALL_ERRORS as e:
                error: Exception = e
            if pauses.adapt(error):
                continue
            if kind_of(error) == "final":
                raise explained(error, "write", self._at, name) from error
            try:
                found = self._look(key)
            except StoreError as e:
                raise self._unknown(key, e.message) from error
            if found is not None and found.write == write:
                return found.info.etag
            if etag is None and found is not None:
                raise PreconditionFailed(f"{key!r} exists already in {self.url}; read it, or choose another name")
            if etag is not None and found is None:
                raise self._absent(key)
            if etag is not None and found is not None and found.info.etag != etag:
                raise PreconditionFailed(
                    f"{key!r} in {self.url} is at another version: somebody else wrote it; read it again"
                )
            if not pauses.another():
                raise self._unknown(key, explained(error, "write", self._at, name).message) from error

    def _look(self, key: str) -> _Found | None:
        name = self._name(key)

        def attempt() -> dict[str, Any]:
            try:
                return dict(self._client.raw.head_object(Bucket=self._at.bucket, Key=name))
            except botocore.exceptions.ClientError as e:
                if not code_of(e).isdigit():
                    raise
            # A reply to HEAD has no body, so a missing bucket or an expired login looks like a missing object.
            reply = self._client.raw.get_object(Bucket=self._at.bucket, Key=name, Range="bytes=0-0")
            reply["Body"].close()
            raise BrokenBody("two readings differ")

        try:
            reply = self._client.retry("read", name, attempt)
        except botocore.exceptions.ClientError:
            return None
        return _Found(_info(key, reply["ContentLength"], reply), metadata(reply, WRITE))

    def _name(self, key: str) -> str:
        return self._at.name(check_key(key))

    def _absent(self, key: str) -> ObjectNotFound:
        return ObjectNotFound(f"there is no {key!r} in {self.url}; check the name and the store's URL")

    def _unknown(self, key: str, why: str) -> StoreError:
        return StoreError(f"whether {key!r} in {self.url} was written is unknown ({why}); read it before going on")


def _info(key: str, size: int, reply: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(key, int(size), str(reply["ETag"]), reply["LastModified"].timestamp())
