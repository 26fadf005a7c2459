"""A login that ends while a store is open: a fresh one is used when it is there, and what is wrong is said when not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from s3_servers import BUCKET
from s3_stub import Reply, Request, Stub, error, serving
from store_workers import make_files

from art_sky.config import LoRAConfig
from art_sky.errors import LeaseLost, StoreError
from art_sky.node import credentials
from art_sky.node.records import Secrets
from art_sky.schemas import ModelRecord
from art_sky.store.model_store import ModelStore
from art_sky.store.s3 import S3Store
from art_sky.store.s3_client import Timing

pytestmark = pytest.mark.usefixtures("quick_threads")
PATIENT = Timing(deadline=20, conditional=20, first_contact=20, read=10, first_pause=0.01, longest_pause=0.05)


class Guarded(Stub):
    """Takes only requests that are signed with `key`."""

    key = "first"

    def do(self, request: Request) -> Reply:
        signed = f"Credential={self.key}/" in request.headers["authorization"]
        return super().do(request) if signed else error("ExpiredToken")


@pytest.fixture
def stub() -> Iterator[Guarded]:
    with serving(Guarded()) as made:
        assert isinstance(made, Guarded)
        yield made


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process a credential as a node has it; called again it is the file that changes."""

    def give(key: str, hours: float | None) -> None:
        store_env = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
        if hours is not None:
            store_env["AWS_CREDENTIAL_EXPIRATION"] = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
        made = credentials.environment(Secrets(token="t", store_env=store_env), tmp_path, {})
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in made.items():
            monkeypatch.setenv(name, value)

    return give


def use(store: S3Store, key: str) -> None:
    """Everything that a store does."""
    etag = store.create(f"p/{key}", b"1")
    store.swap(f"p/{key}", b"2", etag)
    store.put(f"p/{key}-large", b"x" * (17 << 20))
    assert store.get(f"p/{key}-large").data == b"x" * (17 << 20)
    assert f"p/{key}" in [info.key for info in store.list("p/")]
    store.abort_uploads("p/", 0.0)
    store.delete(f"p/{key}")


@pytest.mark.parametrize("hours", [1.0, None])
def test_a_fresh_credential_reaches_an_open_store(
    stub: Guarded, give: Callable[..., None], hours: float | None
) -> None:
    """Whether or not it was known when the old one would end."""
    give("first", hours)
    store = S3Store(f"s3://{BUCKET}/runs?endpoint_url={stub.endpoint}", PATIENT)
    use(store, "a")
    stub.key = "second"
    with pytest.raises(
        StoreError, match=r"ExpiredToken.*credentials have expired.*renew the credential where it was launched"
    ):
        store.put("p/b", b"1")
    with pytest.raises(StoreError, match="credentials have expired"):
        store.create("p/b", b"1")
    give("second", hours)
    use(store, "b")
    stub.key = "third"
    give("third", hours)
    assert store.get("p/a-large").etag, "no call fails where the fresh one was there in time"


def test_a_credential_whose_time_is_over_is_told_as_such(stub: Guarded, give: Callable[..., None]) -> None:
    """botocore notices it by itself and then raises no error of its own."""
    give("first", -0.1)
    store = S3Store(f"s3://{BUCKET}/runs?endpoint_url={stub.endpoint}", PATIENT)
    with pytest.raises(
        StoreError, match=r"still expired; the credentials have expired; this rented machine needs other rights"
    ):
        store.put("p/a", b"1")
    with pytest.raises(StoreError, match="credentials have expired"):
        store.create("p/a", b"1")
    with pytest.raises(StoreError, match="credentials have expired"):
        store.info("p/a")
    assert stub.seen == []
    give("first", 1.0)
    use(store, "a")


def test_a_writer_commits_again_as_soon_as_the_fresh_one_is_there(
    stub: Guarded, give: Callable[..., None], tmp_path: Path
) -> None:
    """Its lease could not be renewed meanwhile; nobody took it."""
    give("first", 1.0)
    model = ModelStore(S3Store(f"s3://{BUCKET}/runs?endpoint_url={stub.endpoint}&lease_ttl=4", PATIENT), "p", "m")
    record = {"project": "p", "name": "m", "base_model": "b", "lora": LoRAConfig(), "created": 1.0, "created_by": "t"}
    model.create(ModelRecord(**record))
    with model.open_writer("server") as writer:
        writer.commit(step=0, request="r0", files=make_files(tmp_path / "r0", "0"), updates=0)
        stub.key = "second"
        time.sleep(2.2)  # over half of what it was given
        with pytest.raises(LeaseLost, match=r"could not be renewed for .*the credentials have expired"):
            writer.commit(step=1, request="r1", files=make_files(tmp_path / "r1", "1"), updates=1)
        give("second", 1.0)
        writer.commit(step=1, request="r1", files=make_files(tmp_path / "r1", "1"), updates=1)
        assert model.head().step == 1
