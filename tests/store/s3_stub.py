"""An S3 server in memory that misbehaves as told: what `S3Store` uses of the protocol, and faults drawn from a seed.

It checks conditions under a lock and the SHA-256 of what it receives, as S3 does. A list has no checksum in the
protocol, so its text is cut short but never changed.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import random
import re
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from s3_servers import BUCKET

from art_sky.store.s3 import S3Store
from art_sky.store.s3_client import Timing

FAULTS = (
    "503",
    "silence",  # no answer, and nothing is done
    "reset",  # likewise, and the connection ends
    "lost reply",  # it is done, and the connection ends
    "late",  # the connection ends, and it is done some requests later
    "truncated",
    "flipped",
    "refused",  # 412 or 409 for a conditional write, whatever the condition
)
LATE_BY = 12  # requests, at most
QUICK = Timing(deadline=30, conditional=15, first_contact=10, read=0.06, first_pause=0.0005, longest_pause=0.005)
SILENCE_SECONDS = 5.0  # for a client that waits longer than it should
STATUS = {
    "AccessDenied": 403, "InvalidAccessKeyId": 403, "SignatureDoesNotMatch": 403, "ExpiredToken": 400,
    "NoSuchBucket": 404, "NoSuchKey": 404, "NoSuchUpload": 404, "PreconditionFailed": 412, "SlowDown": 503,
    "ConditionalRequestConflict": 409, "XAmzContentSHA256Mismatch": 400, "BadDigest": 400, "PermanentRedirect": 301,
    "Elsewhere": 301,
    "AuthorizationHeaderMalformed": 400, "NotImplemented": 501, "InvalidRange": 416, "InternalError": 500,
    "QuotaExceeded": 403, "RequestTimeTooSkewed": 403,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    data: bytes
    etag: str
    metadata: Mapping[str, str]
    modified: float


@dataclass
class Request:
    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def conditional(self) -> bool:
        return self.method == "PUT" and bool({"if-match", "if-none-match"} & set(self.headers))

    @property
    def writes(self) -> bool:
        return self.method in ("PUT", "POST", "DELETE")


@dataclass
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    is_object: bool = False


@dataclass
class Stub:
    """`rates` maps a fault to its probability for each request that it can happen to."""

    rates: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    refuse_all: str | None = None  # the code with which every request is refused
    endpoint: str = ""
    page: int = 1000

    def __post_init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = {}
        self.injected: Counter[str] = Counter()
        self.seen: list[tuple[str, str]] = []  # (method, key)
        self.planned: list[str] = []  # faults for the next requests that they can happen to, before any by chance
        self._late: list[tuple[int, Request]] = []
        self._names = itertools.count(1)
        self._random = random.Random(self.seed)
        self._lock = threading.RLock()

    def arrive(self, request: Request) -> str:
        """Counts the request, does what is due, and draws the fault of this one; "" for none."""
        with self._lock:
            self.seen.append((request.method, request.key))
            due = [r for at, r in self._late if at <= len(self.seen)]
            self._late = [(at, r) for at, r in self._late if at > len(self.seen)]
            for late in due:
                self.do(late)
            fault = self._draw(request)
            if fault:
                self.injected[fault] += 1
            if fault == "late":
                self._late.append((len(self.seen) + self._random.randint(1, LATE_BY), request))
            return fault

    def settle(self) -> None:
        """No more faults; what was late arrives."""
        with self._lock:
            self.rates, late, self._late = {}, self._late, []
            for _, request in late:
                self.do(request)

    def flip(self, data: bytes) -> bytes:
        with self._lock:
            at = self._random.randrange(len(data) * 8)
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        return bytes(changed)

    def pick(self, *values: str) -> str:
        with self._lock:
            return self._random.choice(values)

    def do(self, request: Request) -> Reply:
        with self._lock:
            if self.refuse_all is not None:
                return error(self.refuse_all)
            sent = request.headers.get("x-amz-content-sha256", "")
            if re.fullmatch("[0-9a-f]{64}", sent) and hashlib.sha256(request.body).hexdigest() != sent:
                return error("XAmzContentSHA256Mismatch")
            given = request.headers.get("x-amz-checksum-sha256")
            if given and base64.b64encode(hashlib.sha256(request.body).digest()).decode() != given:
                return error("BadDigest")
            return getattr(self, f"_{request.method.lower()}")(request)  # type: ignore[no-any-return]

    def _draw(self, request: Request) -> str:
        if self.planned and _possible(self.planned[0], request):
            return self.planned.pop(0)
        at, total = self._random.random(), 0.0
        for fault, rate in self.rates.items():
            if _possible(fault, request):
                total += rate
                if at < total:
                    return fault
        return ""

    def _get(self, request: Request) -> Reply:
        if not request.key:
            return self._list(request.query)
        found = self.objects.get(request.key)
        if found is None:
            return error("NoSuchKey")
        if request.headers.get("if-match", found.etag) != found.etag:
            return error("PreconditionFailed")
        headers = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.modified, usegmt=True),
            **{f"x-amz-meta-{name}": value for name, value in found.metadata.items()},
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if wanted is None:
            return Reply(200, found.data, headers, is_object=True)
        begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(found.data))
        if begin >= len(found.data):
            return error("InvalidRange")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(found.data)}"
        return Reply(206, found.data[begin:end], headers, is_object=True)

    _head = _get

    def _put(self, request: Request) -> Reply:
        if "uploadId" in request.query:
            if request.query["uploadId"] not in self.uploads:
                return error("NoSuchUpload")
            self.uploads[request.query["uploadId"]][2][int(request.query["partNumber"])] = request.body
            return Reply(200, headers={"ETag": _etag(request.body)})
        old = self.objects.get(request.key)
        if "if-none-match" in request.headers and old is not None:
            return error("PreconditionFailed")
        if "if-match" in request.headers and old is None:
            return error("NoSuchKey")
        if "if-match" in request.headers and old is not None and old.etag != request.headers["if-match"]:
            return error("PreconditionFailed")
        return self._store(request.key, request.body, _etag(request.body), _metadata(request))

    def _post(self, request: Request) -> Reply:
        if "uploads" in request.query:
            name = f"upload-{next(self._names)}"
            self.uploads[name] = (request.key, _metadata(request), {})
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        upload = self.uploads.pop(request.query["uploadId"], None)
        if upload is None:
            return error("NoSuchUpload")
        numbers = [
            int(e.text or 0) for e in ElementTree.fromstring(request.body).iter() if e.tag.endswith("PartNumber")
        ]
        assert numbers == list(range(1, len(upload[2]) + 1))
        parts = [upload[2][n] for n in numbers]
        etag = f'"{hashlib.md5(b"".join(hashlib.md5(p).digest() for p in parts)).hexdigest()}-{len(parts)}"'
        self._store(request.key, b"".join(parts), etag, upload[1])
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(etag)}</ETag>")

    def _delete(self, request: Request) -> Reply:
        if "uploadId" in request.query:
            return Reply(204) if self.uploads.pop(request.query["uploadId"], None) else error("NoSuchUpload")
        self.objects.pop(request.key, None)
        return Reply(204)

    def _list(self, query: dict[str, str]) -> Reply:
        after = query.get("continuation-token", "")
        keys = sorted(k for k in self.objects if k.startswith(query.get("prefix", "")) and k > after)
        text = "".join(
            f"<Contents><Key>{escape(k)}</Key><Size>{len(self.objects[k].data)}</Size><ETag>{escape(self.objects[k].etag)}"
            f"</ETag><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for k in keys[: self.page]
        )
        more = len(keys) > self.page
        text += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            text += f"<NextContinuationToken>{escape(keys[self.page - 1])}</NextContinuationToken>"
        return _xml("ListBucketResult", text)

    def _store(self, key: str, data: bytes, etag: str, metadata: dict[str, str]) -> Reply:
        self.objects[key] = Stored(data, etag, metadata, time.time())
        return Reply(200, headers={"ETag": etag})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # a reply is one packet, or an acknowledgement is waited for
    disable_nagle_algorithm = True
    stub: Stub

    def handle_one(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        request = Request(self.command, key, query, {k.lower(): v for k, v in self.headers.items()}, body)
        fault = self.stub.arrive(request)
        if fault == "503":
            self._answer(error("SlowDown"))
        elif fault == "refused":
            self._answer(error(self.stub.pick("PreconditionFailed", "ConditionalRequestConflict")))
        elif fault == "silence":
            select.select([self.connection], [], [], SILENCE_SECONDS)  # until the client ends it
            self.close_connection = True
        elif fault in ("reset", "late"):
            self._reset()
        elif fault == "lost reply":
            self.stub.do(request)
            self._reset()
        elif fault == "flipped" and request.writes:
            request.body = self.stub.flip(request.body)
            self._answer(self.stub.do(request))
        else:
            reply = self.stub.do(request)
            if fault == "flipped" and reply.is_object and reply.body:
                reply.body = self.stub.flip(reply.body)
            self._answer(reply, cut=fault == "truncated")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _answer(self, reply: Reply, cut: bool = False) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.status != 204:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[: len(reply.body) // 2] if cut else reply.body)
        if cut:
            self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        return


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients that give up are what this is for
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    handler = type("StubHandler", (Handler,), {"stub": stub})
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    stub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()


def open_stub(stub: Stub, timing: Timing = QUICK, lease_ttl: float = 3600) -> S3Store:
    """By default no renewal of a lease comes in between, so that the seed decides everything."""
    return S3Store(f"s3://{BUCKET}/runs?endpoint_url={stub.endpoint}&lease_ttl={lease_ttl:g}", timing)


def error(code: str) -> Reply:
    said = "PermanentRedirect" if code == "Elsewhere" else code  # with and without the bucket's region
    reply = _xml("Error", f"<Code>{said}</Code><Message>as the test wants it</Message>")
    where = {"x-amz-bucket-region": "eu-north-1"} if code == "PermanentRedirect" else {}
    return Reply(STATUS[code], reply.body, reply.headers | where)


def _possible(fault: str, request: Request) -> bool:
    if fault == "refused":
        return request.conditional
    if fault in ("late", "lost reply"):
        return request.writes
    if fault == "truncated":
        return request.method == "GET"
    if fault == "flipped":
        return (request.method == "GET" and bool(request.key)) or (request.method == "PUT" and bool(request.body))
    return True


def _metadata(request: Request) -> dict[str, str]:
    start = "x-amz-meta-"
    return {name.removeprefix(start): v for name, v in request.headers.items() if name.startswith(start)}


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _xml(tag: str, text: str) -> Reply:
    body = f'<?xml version="1.0" encoding="UTF-8"?><{tag}>{text}</{tag}>'.encode()
    return Reply(200, body, {"Content-Type": "application/xml"})
