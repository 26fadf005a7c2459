"""What is S3's own: URLs, logins and what goes wrong with them, large objects, the server's refusals."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_servers
from s3_stub import STATUS, Stub, open_stub, serving

from art_sky.errors import CorruptObject, InvalidConfig, InvalidInput, NoDiskSpace, ObjectNotFound, StoreError
from art_sky.node.records import RENTED
from art_sky.store import open_store, s3, s3_transfer
from art_sky.store.model_store import ModelStore
from art_sky.store.s3_client import Timing

BRIEF = Timing(
    deadline=0.3, conditional=0.3, first_contact=0.3, connect=1, read=2, first_pause=0.01, longest_pause=0.05
)


@pytest.fixture(autouse=True)
def login(aws_environment: None) -> None:
    return


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(Stub()) as stub:
        yield stub


def test_urls_open_the_same_place_again() -> None:
    for url in (
        "s3://bucket",
        "s3://my.bucket-1/a/b%20c/%C3%A9",
        "s3://bucket/p?endpoint_url=https://host:9000&region=eu-west-1&lease_ttl=2",
    ):
        assert open_store(url).url == url
    assert open_store("s3://bucket/p/").url == "s3://bucket/p"
    assert open_store("s3://bucket?lease_ttl=60").url == "s3://bucket"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "names no bucket"), ("s3:///x", "names no bucket"), ("s3://b/x", "names no bucket"),
        ("s3://key:hunter2@bucket/x", "login"), ("s3://bucket/a//b", "not usable"), ("s3://bucket/../x", "not usable"),
        ("s3://bucket?secret=hunter2", "unknown option 'secret'"), ("s3://bucket?region=", "empty"),
        ("s3://bucket?region=a&region=b", "twice"), ("s3://bucket?endpoint_url=host:9000", "not a URL"),
        ("s3://bucket?endpoint_url=https://me:hunter2@host", "no more than a host"),
        ("s3://bucket?endpoint_url=http://host:x", "not a URL"), ("s3://bucket?lease_ttl=nan", "lease_ttl"),
        ("s3://bucket?lease_ttl=0", "lease_ttl"), ("s3://bucket?profile=nobody", "profile"),
    ],
)  # fmt: skip
def test_urls_that_are_refused_and_secrets_that_are_not_repeated(url: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_without_boto3_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from art_sky.errors import InvalidConfig\n"
        "from art_sky.store import open_store\n"
        "try: open_store('s3://bucket')\n"
        "except InvalidConfig as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "a store in a bucket needs boto3: pip install 'art-sky[s3]'\n"


def test_a_key_that_is_too_long_with_its_prefix(stub: Stub) -> None:
    store = open_stub(stub)
    key = "/".join(["x" * 203] * 5)
    assert len(key) + len("runs/") == 1024
    store.put(key, b"")
    with pytest.raises(InvalidInput, match="1024"):
        store.put(key + "x", b"")
    assert len(stub.seen) == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("AccessDenied", "s3:ListBucket"), ("NoSuchBucket", "make the bucket"), ("ExpiredToken", "log in again"),
        ("InvalidAccessKeyId", "not known there"), ("SignatureDoesNotMatch", "not known there"),
        ("PermanentRedirect", r"another region.*\?region=eu-north-1"),
        ("AuthorizationHeaderMalformed", "another region"), ("Elsewhere", "another region"),
        ("RequestTimeTooSkewed", "clock"), ("NotImplemented", "art-sky check"), ("QuotaExceeded", "make room"),
    ],
)  # fmt: skip
def test_refusals_are_never_absence(stub: Stub, code: str, words: str, tmp_path: Path) -> None:
    assert code in STATUS
    store = s3.S3Store(f"s3://art-sky-tests/runs?endpoint_url={stub.endpoint}", BRIEF)
    store.put("p/m/HEAD", b"x")
    stub.refuse_all = code
    model = ModelStore(store, "p", "m")
    calls = [
        lambda: store.get("k"), lambda: store.open("k"), lambda: store.info("k"), lambda: store.put("k", b""),
        lambda: store.create("k", b""), lambda: store.swap("k", b"", '"e"'), lambda: store.delete("k"),
        lambda: list(store.list("")), lambda: store.acquire("k", "me"), model.exists, model.head, model.steps,
        lambda: model.find_committed("r"), lambda: model.open_writer("me"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError, match=words) as caught:
            call()
        assert not isinstance(caught.value, ObjectNotFound)
        assert isinstance(caught.value, NoDiskSpace) == (code == "QuotaExceeded")
        assert "art-sky-tests" in str(caught.value) and s3_servers.SECRET_KEY not in str(caught.value)


@pytest.mark.parametrize("code", ["AccessDenied", "ExpiredToken", "InvalidAccessKeyId"])
def test_on_a_rented_machine_nobody_is_told_to_log_in(stub: Stub, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RENTED, "1")
    stub.refuse_all = code
    with pytest.raises(StoreError, match=r"launch again with --store-profile, --store-credential or --node-role"):
        open_stub(stub).get("k")


def test_whether_a_server_compares_checksums(seaweedfs: str, moto: str) -> None:
    careful, careless = (s3.S3Store(s3_servers.store_url(endpoint)) for endpoint in (seaweedfs, moto))
    assert careful.refuses_wrong_checksum("k")
    with pytest.raises(ObjectNotFound):
        careful.info("k")
    assert not careless.refuses_wrong_checksum("k")


def test_real_refusals(seaweedfs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/x/k: NoSuchBucket .*make the bucket"):
        open_store(f"s3://no-such-bucket/x?endpoint_url={seaweedfs}").info("k")
    url = s3_servers.store_url(seaweedfs)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = open_store(url)
    for call in (store.get, store.info, lambda k: store.put(k, b""), lambda k: store.create(k, b"")):
        with pytest.raises(StoreError, match="credentials are not known there"):
            call("k")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreError, match="log in"):
        open_store(url).get("k")


def test_nobody_there(stub: Stub) -> None:
    begin = time.monotonic()
    for call in (lambda s: s.get("k"), lambda s: s.create("k", b"")):
        store = s3.S3Store("s3://bucket/x?endpoint_url=http://127.0.0.1:9", BRIEF)
        with pytest.raises(StoreError, match="check the network and the address"):
            call(store)
    assert time.monotonic() - begin < 10


def test_an_unknown_outcome_is_said_to_be_unknown(stub: Stub) -> None:
    store = s3.S3Store(f"s3://art-sky-tests/runs?endpoint_url={stub.endpoint}", BRIEF)
    etag = store.create("k", b"1")
    stub.rates = {"refused": 1.0}
    with pytest.raises(StoreError, match=r"'k' in s3://.* was written is unknown .*PreconditionFailed|Conflict"):
        store.swap("k", b"2", etag)
    stub.rates = {"503": 1.0}
    for call in (lambda: store.swap("k", b"2", etag), lambda: store.create("n", b"")):
        with pytest.raises(StoreError, match="unknown"):
            call()
    with pytest.raises(StoreError, match="try again later"):
        store.get("k")
    stub.settle()
    assert store.get("k").data == b"1"


def test_a_server_without_checksums_is_written_to_without(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    do = stub.do

    def refuse(request):  # type: ignore[no-untyped-def]
        if "x-amz-checksum-sha256" in request.headers or "x-amz-checksum-algorithm" in request.headers:
            return s3_stub_error("NotImplemented")
        return do(request)

    from s3_stub import error as s3_stub_error

    monkeypatch.setattr(stub, "do", refuse)
    for begin in (lambda s: s.create("k", b"1"), lambda s: s.put("k", b"1")):
        stub.objects.clear()
        store = open_stub(stub)
        begin(store)
        store.put("k", b"2")
        assert store.get("k").data == b"2"


def test_bytes_that_were_changed_in_the_bucket(endpoint: str) -> None:
    url = s3_servers.store_url(endpoint)
    store = open_store(url)
    store.put("k", b"good")
    name = url.removeprefix("s3://").split("?")[0].split("/", 1)[1].replace("%20", " ") + "/k"
    client = s3_servers.client(endpoint)
    labels = client.head_object(Bucket=s3_servers.BUCKET, Key=name)["Metadata"]
    client.put_object(Bucket=s3_servers.BUCKET, Key=name, Body=b"evil", Metadata=labels)
    with pytest.raises(CorruptObject, match="k does not hold the bytes"):
        store.get("k")
    client.put_object(Bucket=s3_servers.BUCKET, Key=name, Body=b"by hand")
    assert store.get("k").data == b"by hand"


def test_large_objects_go_in_parts(endpoint: str, tmp_path: Path) -> None:
    store = open_store(s3_servers.store_url(endpoint))
    data = random.Random(0).randbytes((37 << 20) + 1)
    path = tmp_path / "large"
    path.write_bytes(data)
    etag = store.put("large", path)
    assert store.info("large").size == len(data) and store.info("large").etag == etag
    assert store.get("large").data == data and store.get("large").etag == etag
    with store.open("large") as stream:
        assert stream.read(10) == data[:10]
        assert hashlib.sha256(stream.read()).digest() == hashlib.sha256(data[10:]).digest()
    assert store.put("large", data[: 17 << 20]) != etag
    assert store.info("large").size == 17 << 20


def test_reading_asks_for_no_byte_twice(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_transfer, "DOWNLOAD_PART", 50_000)
    store = open_stub(stub)
    for size, requests in ((0, 2), (1, 1), (50_000, 1), (50_001, 2), (1_000_000, 20)):  # an empty one has no ranges
        data = random.Random(size).randbytes(size)
        store.put("k", data)
        stub.seen.clear()
        sent = 0
        real = stub.do

        def counted(request, real=real):  # type: ignore[no-untyped-def]
            nonlocal sent
            reply = real(request)
            sent += len(reply.body) if reply.is_object else 0
            return reply

        monkeypatch.setattr(stub, "do", counted)
        assert store.get("k").data == data
        monkeypatch.setattr(stub, "do", real)
        assert (len(stub.seen), sent) == (requests, size)


def test_a_server_that_knows_no_ranges(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_stub(stub)
    store.put("k", b"x" * 100)
    real = stub.do

    def whole(request):  # type: ignore[no-untyped-def]
        request.headers.pop("range", None)
        return real(request)

    monkeypatch.setattr(stub, "do", whole)
    assert store.get("k").data == b"x" * 100


def test_parts_through_faults(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "UPLOAD_PART", 100_000)
    monkeypatch.setattr(s3_transfer, "UPLOAD_PART", 100_000)
    monkeypatch.setattr(s3_transfer, "DOWNLOAD_PART", 50_000)
    store = open_stub(stub)
    data = random.Random(0).randbytes((3 << 20) + 77)
    for seed in range(4):
        stub.rates = dict.fromkeys(("503", "reset", "lost reply", "silence", "truncated"), 0.05)
        etag = store.put("large", data)
        assert store.info("large").etag == etag
        assert store.get("large").data == data, seed
        stub.settle()
        # An upload whose id was lost with the reply stays until gc; no other does.
        assert len(stub.uploads) <= stub.injected["lost reply"] + stub.injected["silence"]
    assert stub.injected["truncated"] and stub.injected["lost reply"]


def test_an_upload_that_fails_leaves_nothing(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "UPLOAD_PART", 100_000)
    store = open_stub(stub)
    store.put("k", b"before")
    path = tmp_path / "large"
    path.write_bytes(b"x" * 5_000_000)
    real = stub.do

    def shrink(request):  # type: ignore[no-untyped-def]
        if "uploads" in request.query:
            path.write_bytes(b"x")
        return real(request)

    monkeypatch.setattr(stub, "do", shrink)
    with pytest.raises(StoreError, match="shorter"):
        store.put("k", path)
    assert store.get("k").data == b"before" and not stub.uploads


def test_an_object_that_changes_while_it_is_read(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_transfer, "DOWNLOAD_PART", 50_000)
    store = open_stub(stub)
    for change, error in (
        (lambda: store.put("k", b"other" * 100_000), "written again"),
        (lambda: store.delete("k"), "deleted"),
    ):
        store.put("k", b"x" * 1_000_000)
        with store.open("k") as stream:
            change()
            with pytest.raises(StoreError, match=error):
                stream.read()


def test_what_interrupted_uploads_left_is_found(seaweedfs: str) -> None:
    url = s3_servers.store_url(seaweedfs)
    store = open_store(url)
    name = url.removeprefix("s3://").split("?")[0].split("/", 1)[1].replace("%20", " ")
    client = s3_servers.client(seaweedfs)
    for n in range(3):
        client.create_multipart_upload(Bucket=s3_servers.BUCKET, Key=f"{name}/blobs/{n}")
    assert store.abort_uploads("blobs/", time.time() - 3600) == 0
    assert store.abort_uploads("other/", time.time() + 3600) == 0
    assert store.abort_uploads("blobs/", time.time() + 3600) == 3
    assert store.abort_uploads("blobs/", time.time() + 3600) == 0


@pytest.mark.slow
def test_two_gib_in_300_mb(seaweedfs: str, tmp_path: Path) -> None:
    path = tmp_path / "large"
    block = random.Random(0).randbytes(1 << 20)
    with path.open("wb") as file:
        for n in range(2048):
            file.write(n.to_bytes(8, "big") + block[8:])
    code = (
        "import hashlib, re, sys\n"
        "from pathlib import Path\n"
        "from art_sky.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.put('large', Path(sys.argv[2]))\n"
        "digest = hashlib.sha256()\n"
        "with store.open('large') as stream:\n"
        "    while block := stream.read(1 << 20): digest.update(block)\n"
        # Not ru_maxrss: that begins with the size of the process that started this one.
        "print(digest.hexdigest(), re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
    )
    command = [sys.executable, "-c", code, s3_servers.store_url(seaweedfs), str(path)]
    digest, kib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    with path.open("rb") as file:
        assert digest == hashlib.file_digest(file, "sha256").hexdigest()
    assert int(kib) * 1024 < 300_000_000


def test_a_store_is_opened_whatever_of_the_package_was_imported() -> None:
    code = (
        "import gc, pkgutil, art_sky.store\n"
        "for module in pkgutil.iter_modules(art_sky.store.__path__): __import__(f'art_sky.store.{module.name}')\n"
        "print(art_sky.store.open_store('s3://bucket').url, gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "s3://bucket True\n"
