"""Object stores to test against, each on a loopback port, with a bucket of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ACCESS_KEY, SECRET_KEY = "ci", "cisecret123"
READER = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "readersecret123"}  # may only read, in SeaweedFS
BUCKET = "art-sky-tests"
START_SECONDS = 60.0
# What the tests' own processes find, instead of the developer's login.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
FOREIGN = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")


def client(endpoint: str, secret: str = SECRET_KEY) -> Any:
    """A plain boto3 client, for what tests do behind the store's back."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=secret,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            connect_timeout=2,
            read_timeout=20,
        ),
    )


def store_url(endpoint: str, **options: object) -> str:
    """A prefix that nobody used before."""
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/a%20prefix?endpoint_url={endpoint}{more}"


def weed() -> str | None:
    """The server's program; it is installed beside Python's own."""
    return shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """The endpoint of a SeaweedFS server: it checks logins, conditions and checksums."""
    master, volume, filer, s3 = _ports(4)
    identity = {
        "name": "ci",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    reader = {
        "name": "reader",
        "credentials": [{"accessKey": READER["AWS_ACCESS_KEY_ID"], "secretKey": READER["AWS_SECRET_ACCESS_KEY"]}],
        "actions": ["Read", "List"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity, reader]}))
    log = folder / "log"
    command = [
        str(weed()), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}",
        f"-volume.port={volume}", "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", f"-s3.config={config}",
        # Fixed ports, and volumes so large that few fit, unless it is told otherwise.
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=200", "-master.volumeSizeLimitMB=128",
        "-master.volumePreallocate=false",
    ]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(folder)}  # for its sockets
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        endpoint = f"http://127.0.0.1:{s3}"
        _make_bucket(endpoint, process, log)
        yield endpoint
    finally:
        process.send_signal(signal.SIGKILL)  # it takes half a minute to end by itself
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def moto() -> Iterator[str]:
    """The endpoint of moto in this process. It checks neither logins nor checksums."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()  # moto reads a condition and then writes, without a lock

    def locked(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with one_at_a_time:
            return [b"".join(app(environ, start_response))]

    server = make_server("127.0.0.1", 0, locked, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.port}"
        client(endpoint).create_bucket(Bucket=BUCKET)
        yield endpoint
    finally:
        server.shutdown()
        thread.join()


def _make_bucket(endpoint: str, process: subprocess.Popen[bytes], log: Path) -> None:
    s3 = client(endpoint)
    end = time.monotonic() + START_SECONDS
    made = False
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"weed ended: {log.read_text(errors='replace')[-2000:]}")
        try:
            if not made:
                s3.create_bucket(Bucket=BUCKET)
                made = True
            s3.put_object(Bucket=BUCKET, Key="begin", Body=b"x" * 10_000)  # the first one takes seconds
            return
        except (BotoCoreError, ClientError) as e:
            made = made or (isinstance(e, ClientError) and e.response["Error"]["Code"] == "BucketAlreadyExists")
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _ports(count: int) -> list[int]:
    """Free ports whose number + 10000 is free too: SeaweedFS takes that one for gRPC."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            port = 20_000 + any_port.getsockname()[1] % 20_000
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
