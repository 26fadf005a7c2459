"""What `check_store` finds out about stores that are not what they should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from art_sky.errors import StoreError
from art_sky.store import open_store
from art_sky.store.check import StoreCheck, check_store
from art_sky.store.folder import FolderStore


class NoCreateOnly(FolderStore):
    """As some servers: If-None-Match is ignored."""

    def create(self, key: str, data: bytes) -> str:
        return self.put(key, data)


class NoSwap(FolderStore):
    def swap(self, key: str, data: bytes, etag: str) -> str:
        return self.put(key, data)


class ReadOnly(FolderStore):
    def put(self, key: str, data: bytes | Path) -> str:
        raise StoreError("access denied; ask the owner")


class Unreadable(FolderStore):
    def list(self, prefix: str):  # type: ignore[no-untyped-def]
        raise StoreError("no such bucket; make it")


class Checking(FolderStore):
    refuses = True

    def refuses_wrong_checksum(self, key: str) -> bool:
        return self.refuses


class NotChecking(Checking):
    refuses = False


def failed(check: StoreCheck) -> list[str]:
    return [t.name for t in check.trials if not t.ok]


def test_a_folder_is_safe_and_left_clean(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    store.put("a", b"mine")
    check = check_store(store)
    assert failed(check) == [] and check.safe_to_train and check.safe_to_read and check.next_step == ""
    assert [i.key for i in store.list("")] == ["a"]


@pytest.mark.parametrize(
    ("kind", "trials", "read", "train", "next_step"),
    [
        (NoCreateOnly, ["create only once", "one winner of 8 who create at once"], True, False, "do not train here"),
        (NoSwap, ["a stale swap is refused"], True, False, "conditional writes"),
        (Unreadable, ["list", "list what was written", "clean up"], False, False, "then check again"),
        (Checking, [], True, True, ""),
        (NotChecking, ["a wrong checksum is refused"], True, True, ""),
    ],
)
def test_what_is_found(
    tmp_path: Path, kind: type[FolderStore], trials: list[str], read: bool, train: bool, next_step: str
) -> None:
    check = check_store(kind(tmp_path))
    assert failed(check) == trials
    assert (check.safe_to_read, check.safe_to_train) == (read, train)
    assert next_step in check.next_step and bool(check.next_step) == bool(next_step)


def test_a_store_for_reading_only(tmp_path: Path) -> None:
    check = check_store(ReadOnly(tmp_path))
    assert (check.safe_to_read, check.safe_to_train) == (True, False)
    assert "access denied" in next(t.detail for t in check.trials if t.name == "write")
    assert "not tried" in next(t.detail for t in check.trials if t.name == "delete")
    assert "to train, get permission to write" in check.next_step
