"""Large objects in parts: several at a time, none held whole in memory."""

from __future__ import annotations

import base64
import hashlib
import io
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import botocore.exceptions

from art_sky.errors import CorruptObject, ObjectNotFound, StoreError
from art_sky.store.os_errors import reported
from art_sky.store.progress import Moved
from art_sky.store.s3_client import TRANSFERS, Client
from art_sky.store.s3_errors import CALL_ERRORS, BrokenBody, code_of, explained, status_of

UPLOAD_PART = 16 << 20  # an object up to this size is one put
MAX_PARTS = 10_000
DOWNLOAD_PART = 8 << 20
READ_BLOCK = 1 << 20  # bytes taken from a connection at a time, and what readers of streams ask for
# User metadata of an object: who wrote it, and what it must hash to.
WRITE, SHA256 = "art-sky-write", "art-sky-sha256"


def checksum(data: bytes) -> str:
    """As S3 wants it: base64 of the SHA-256."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def metadata(reply: dict[str, Any], name: str) -> str | None:
    """Some servers capitalise the names."""
    return next((v for k, v in reply.get("Metadata", {}).items() if k.lower() == name), None)


@contextmanager
def part_source(data: bytes | Path) -> Iterator[tuple[int, Callable[[int, int], bytes]]]:
    """The size, and a function of (offset, length) that threads may call."""
    if isinstance(data, bytes):
        yield len(data), lambda offset, length: data[offset : offset + length]
        return
    with reported("read a file", data), data.open("rb") as file:
        size = file.seek(0, io.SEEK_END)

        def read(offset: int, length: int) -> bytes:
            with reported("read a file", data), data.open("rb") as part:
                part.seek(offset)
                found = part.read(length)
            if len(found) != length:
                raise StoreError(f"{data} became shorter while it was sent; try again when nobody writes it")
            return found

        yield size, read


def upload_parts(
    client: Client, name: str, size: int, read: Callable[[int, int], bytes], moved: Moved | None = None
) -> str:
    """Replaces the object when all parts are there, else leaves nothing; returns the etag."""
    write = uuid.uuid4().hex
    place = {"Bucket": client.at.bucket, "Key": name}

    def begin() -> tuple[dict[str, Any], bool]:
        checksums = client.checksums
        more = {"ChecksumAlgorithm": "SHA256"} if checksums else {}
        reply = client.raw.create_multipart_upload(**place, Metadata={WRITE: write}, **more)
        return {**place, "UploadId": reply["UploadId"]}, checksums

    upload, checksums = client.retry("write", name, begin)
    try:
        parts = _send_parts(client, name, upload, size, read, checksums, moved)
        return _complete(client, name, upload, parts, write)
    except BaseException:
        _abort(client, name, upload)
        raise


def _send_parts(
    client: Client,
    name: str,
    upload: dict[str, Any],
    size: int,
    read: Callable[[int, int], bytes],
    checksums: bool,
    moved: Moved | None,
) -> list[dict[str, Any]]:
    length = max(UPLOAD_PART, -(-size // MAX_PARTS))

    def send(number: int) -> dict[str, Any]:
        offset = (number - 1) * length
        data = read(offset, min(length, size - offset))
        more = {"ChecksumSHA256": checksum(data)} if checksums else {}
        reply = client.retry(
            "write", name, lambda: client.raw.upload_part(**upload, PartNumber=number, Body=data, **more)
        )
        if moved is not None:
            moved(len(data))
        return {"PartNumber": number, "ETag": reply["ETag"], **more}

    tasks = [client.pool.submit(send, n + 1) for n in range(-(-size // length))]
    try:
        wait(tasks, return_when=FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()  # the first error is raised, not the cancellations that it causes
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        wait(tasks)


def _complete(client: Client, name: str, upload: dict[str, Any], parts: list[dict[str, Any]], write: str) -> str:
    def attempt() -> str:
        try:
            return str(client.raw.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})["ETag"])
        except botocore.exceptions.ClientError as e:
            if code_of(e) != "NoSuchUpload":
                raise
            # An earlier try may have done it, and its reply was lost.
            found = client.raw.head_object(Bucket=upload["Bucket"], Key=name)
            if metadata(found, WRITE) != write:
                raise
            return str(found["ETag"])

    return client.retry("write", name, attempt)


def _abort(client: Client, name: str, upload: dict[str, Any]) -> None:
    try:
        client.retry("clean up", name, lambda: client.raw.abort_multipart_upload(**upload))
    except (StoreError, botocore.exceptions.ClientError):
        return  # what made the upload fail is what matters; `abort_uploads` finds the parts later


def open_object(client: Client, name: str) -> tuple[BinaryIO, str]:
    """A stream and the etag. What is small was read whole and checked when this returns; absence is a ClientError."""

    wrong: set[str] = set()

    def attempt() -> tuple[list[bytes], int, str]:
        reply = _get_beginning(client, name)
        size, etag = _size(reply), str(reply["ETag"])
        blocks: list[bytes] = []
        with reply["Body"] as body:
            _read(body, min(size, DOWNLOAD_PART), blocks)
        expected = metadata(reply, SHA256)
        if size <= DOWNLOAD_PART and expected is not None:
            digest = hashlib.sha256()
            for block in blocks:
                digest.update(block)
            found = digest.hexdigest()
            if found != expected and found in wrong:  # what the network does to bytes it does not do twice
                raise CorruptObject(
                    f"s3://{client.at.bucket}/{name} does not hold the bytes that were put; restore it from a backup"
                )
            wrong.add(found)
            if found != expected:
                raise BrokenBody("its bytes do not match the hash that they were stored with")
        return blocks, size, etag

    blocks, size, etag = client.retry("read", name, attempt)
    return cast(BinaryIO, _PartsReader(client, name, blocks, size, etag)), etag


def _get_beginning(client: Client, name: str) -> dict[str, Any]:
    """Asks for no more than is read at once: to break off a longer answer costs the connection and what was sent."""
    place = {"Bucket": client.at.bucket, "Key": name}
    try:
        return dict(client.raw.get_object(**place, Range=f"bytes=0-{DOWNLOAD_PART - 1}"))
    except botocore.exceptions.ClientError as e:
        if status_of(e) != 416:
            raise
        return dict(client.raw.get_object(**place))  # it is empty: no range is in it


def _size(reply: dict[str, Any]) -> int:
    """Of the whole object; a server may ignore that a range was asked for."""
    _, slash, total = str(reply.get("ContentRange", "")).rpartition("/")
    return int(total) if slash and total.isdigit() else int(reply["ContentLength"])


class _PartsReader(io.BufferedIOBase):
    """Gives the bytes in order while the next parts are on their way; READ_BLOCK at a time it copies nothing."""

    def __init__(self, client: Client, name: str, first: list[bytes], size: int, etag: str) -> None:
        self._client, self._name, self._size, self._etag = client, name, size, etag
        self._blocks, self._given = deque(first), 0  # what is here, and how much of the first block was given out
        self._asked = sum(map(len, first))  # bytes that were received or asked for
        self._coming: deque[Future[list[bytes]]] = deque()

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        left = self._size if size is None or size < 0 else size
        found: list[bytes] = []
        while left and (piece := self._next(left)):
            found.append(piece)
            left -= len(piece)
        return found[0] if len(found) == 1 else b"".join(found)

    def close(self) -> None:
        for task in self._coming:
            task.cancel()
        self._coming.clear()
        self._blocks.clear()
        super().close()

    def _next(self, most: int) -> bytes:
        while len(self._coming) < TRANSFERS and self._asked < self._size:
            end = min(self._asked + DOWNLOAD_PART, self._size)
            self._coming.append(self._client.pool.submit(self._fetch, self._asked, end))
            self._asked = end
        if not self._blocks and self._coming:
            self._blocks.extend(self._coming.popleft().result())
        if not self._blocks:
            return b""
        block = self._blocks[0]
        piece = block[self._given : self._given + most]  # no copy when it is the whole
        self._given += len(piece)
        if self._given == len(block):
            self._blocks.popleft()
            self._given = 0
        return piece

    def _fetch(self, begin: int, end: int) -> list[bytes]:
        """The bytes [begin, end), from where it broke off when a connection ends early."""
        blocks: list[bytes] = []

        def attempt() -> list[bytes]:
            at = begin + sum(map(len, blocks))
            reply = self._client.raw.get_object(
                Bucket=self._client.at.bucket, Key=self._name, Range=f"bytes={at}-{end - 1}", IfMatch=self._etag
            )
            with reply["Body"] as body:
                if reply["ETag"] != self._etag:
                    raise self._changed()
                if int(reply["ContentLength"]) != end - at:
                    raise BrokenBody(f"{reply['ContentLength']} bytes came where {end - at} were asked for")
                _read(body, end - at, blocks)
            return blocks

        try:
            return self._client.retry("read", self._name, lambda: self._unchanged(attempt))
        except botocore.exceptions.ClientError as e:
            raise ObjectNotFound(f"{self._where()} was deleted while it was read; ask for another step") from e

    def _unchanged(self, attempt: Callable[[], list[bytes]]) -> list[bytes]:
        try:
            return attempt()
        except botocore.exceptions.ClientError as e:
            if status_of(e) == 412:
                raise self._changed() from e
            raise

    def _changed(self) -> StoreError:
        return StoreError(f"{self._where()} was written again while it was read; read it again")

    def _where(self) -> str:
        return f"s3://{self._client.at.bucket}/{self._name}"


def _read(body: Any, size: int, into: list[bytes]) -> None:
    """`size` bytes, which are in `into` as far as they came when this raises."""
    left = size
    while left:
        block = body.read(min(left, READ_BLOCK))
        if not block:
            raise BrokenBody(f"the connection ended {left} bytes too early")
        into.append(block)
        left -= len(block)


def abort_uploads(client: Client, prefix: str, before: float) -> int:
    """Deletes the parts of uploads below `prefix` that began before the Unix time `before`; returns how many."""
    place = {"Bucket": client.at.bucket, "Prefix": prefix}
    count = 0
    while True:
        page = client.retry("list", prefix, partial(_list_uploads, client, place))
        for found in page.get("Uploads", []):
            if found["Initiated"].timestamp() < before:
                upload = {"Bucket": client.at.bucket, "Key": found["Key"], "UploadId": found["UploadId"]}
                try:
                    client.raw.abort_multipart_upload(**upload)
                except CALL_ERRORS as e:
                    if code_of(e) != "NoSuchUpload":
                        raise explained(e, "clean up", client.at, found["Key"]) from e
                count += 1
        if not page.get("IsTruncated"):
            return count
        place |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def _list_uploads(client: Client, place: dict[str, str]) -> dict[str, Any]:
    return dict(client.raw.list_multipart_uploads(**place))
