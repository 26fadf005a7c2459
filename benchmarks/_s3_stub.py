"""An S3 server in memory that does as little as a client needs, so that the client is what is measured.

It knows objects, listings (v2), multipart uploads and conditional puts, and checks no signatures. `GET /` with the
header `x-stub: requests` answers how many requests came since the last time it was asked. Its argument is how many
milliseconds each answer takes, as over a network; 0 by default.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
import uuid
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
Reply = tuple[int, dict[str, str], bytes]


@dataclass
class Stored:
    data: bytes
    etag: str
    headers: dict[str, str]
    time: float = field(default_factory=time.time)


class Stub:
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds  # that an answer takes
        self.objects: dict[str, Stored] = {}  # by bucket/key
        self.uploads: dict[str, tuple[dict[str, str], dict[int, Stored]]] = {}
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                method, target, _ = first.split(" ")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines if ": " in line)}
                if headers.get("expect", "").lower() == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if self.seconds:
                    await asyncio.sleep(self.seconds)
                status, more, answer = self.answer(method, target, headers, _plain(body, headers))
                shown = {"Content-Length": str(len(answer)), "Date": formatdate(usegmt=True), **more}
                writer.write(
                    f"HTTP/1.1 {status} X\r\n".encode()
                    + "".join(f"{k}: {v}\r\n" for k, v in shown.items()).encode("latin-1")
                    + b"\r\n"
                )
                if method != "HEAD":
                    writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done
        finally:
            writer.close()

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        path, _, text = target.partition("?")
        query = dict(parse_qsl(text, keep_blank_values=True))
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        if headers.get("x-stub") == "requests":
            count, self.requests = self.requests, 0
            return 200, {}, str(count).encode()
        self.requests += 1
        if not key:
            return self.listing(bucket, query) if method == "GET" else (200, {}, b"")
        name = f"{bucket}/{key}"
        if "uploads" in query or "uploadId" in query:
            return self.multipart(method, name, query, headers, body)
        if method == "PUT":
            return self.put(name, headers, body)
        if method == "DELETE":
            self.objects.pop(name, None)
            return 204, {}, b""
        return self.get(name, headers, method)

    def put(self, name: str, headers: dict[str, str], body: bytes) -> Reply:
        old = self.objects.get(name)
        if (headers.get("if-none-match") == "*" and old) or headers.get("if-match", old and old.etag) != (
            old and old.etag
        ):
            return _error(412, "PreconditionFailed")
        stored = self.objects[name] = Stored(body, f'"{hashlib.md5(body).hexdigest()}"', _kept(headers))
        return 200, {"ETag": stored.etag}, b""

    def get(self, name: str, headers: dict[str, str], method: str) -> Reply:
        found = self.objects.get(name)
        if found is None:
            return _error(404, "NoSuchKey")
        shown = {"ETag": found.etag, "Last-Modified": formatdate(found.time, usegmt=True), **found.headers}
        if method == "HEAD":
            return 200, {**shown, "Content-Length": str(len(found.data))}, b""
        if "range" not in headers:
            return 200, shown, found.data
        first, last = headers["range"].removeprefix("bytes=").split("-")
        end = min(int(last or len(found.data)), len(found.data) - 1)
        shown["Content-Range"] = f"bytes {first}-{end}/{len(found.data)}"
        return 206, shown, found.data[int(first) : end + 1]

    def multipart(self, method: str, name: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Reply:
        bucket, _, key = name.partition("/")
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.uploads[upload] = _kept(headers), {}
            where = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            return _xml("InitiateMultipartUploadResult", where)
        kept, parts = self.uploads[query["uploadId"]]
        if method == "PUT":
            part = Stored(body, f'"{hashlib.md5(body).hexdigest()}"', {})
            parts[int(query["partNumber"])] = part
            return 200, {"ETag": part.etag}, b""
        del self.uploads[query["uploadId"]]
        if method == "DELETE":
            return 204, {}, b""
        ordered = [parts[n] for n in sorted(parts)]
        digest = hashlib.md5(b"".join(bytes.fromhex(p.etag.strip('"')) for p in ordered)).hexdigest()
        stored = Stored(b"".join(p.data for p in ordered), f'"{digest}-{len(ordered)}"', kept)
        self.objects[name] = stored
        where = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>{escape(stored.etag)}</ETag>"
        return _xml("CompleteMultipartUploadResult", where)

    def listing(self, bucket: str, query: dict[str, str]) -> Reply:
        if "location" in query:
            return _xml("LocationConstraint", "")
        prefix, after = query.get("prefix", ""), query.get("continuation-token", query.get("start-after", ""))
        limit = int(query.get("max-keys", 1000))
        keys = sorted(n.partition("/")[2] for n in self.objects if n.startswith(f"{bucket}/{prefix}"))
        delimiter = query.get("delimiter", "")
        entries, folders = [], set()
        for key in keys:
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            shown = key[: cut + 1] if cut >= 0 else key
            if key <= after or shown == after or (cut >= 0 and after.startswith(shown)):
                continue
            if len(entries) + len(folders) >= limit and shown not in folders:
                break
            if cut >= 0:
                folders.add(shown)
            else:
                entries.append(key)
        else:
            shown = ""
        last = max([*entries, *folders], default="")
        body = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys>"
        body += f"<KeyCount>{len(entries) + len(folders)}</KeyCount>"
        body += f"<IsTruncated>{'true' if shown else 'false'}</IsTruncated>"
        if shown:
            body += f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
        for key in entries:
            found = self.objects[f"{bucket}/{key}"]
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.time))
            body += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>{escape(found.etag)}</ETag>"
                f"<Size>{len(found.data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
        body += "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders))
        return _xml("ListBucketResult", body)


def _plain(body: bytes, headers: dict[str, str]) -> bytes:
    """The body without the framing of aws-chunked."""
    if not headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        return body
    found, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].partition(b";")[0], 16)
        if size == 0:
            return b"".join(found)
        found.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def _kept(headers: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k.startswith("x-amz-meta-")}


def _xml(root: str, inner: str) -> Reply:
    text = f'{XML}<{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{root}>'
    return 200, {"Content-Type": "application/xml"}, text.encode()


def _error(status: int, code: str) -> Reply:
    return status, {"Content-Type": "application/xml"}, f"{XML}<Error><Code>{code}</Code></Error>".encode()


async def _main() -> None:
    seconds = float(sys.argv[1]) / 1000 if len(sys.argv) > 1 else 0.0
    server = await asyncio.start_server(Stub(seconds).serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
