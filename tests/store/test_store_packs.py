"""A folder in a store: what comes back, how few requests it takes, and what damage is noticed."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import s3_servers
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_sky.errors import Conflict, CorruptObject, InvalidInput, ObjectNotFound, StoreError
from art_sky.store import open_store, packs
from art_sky.store.folder import FolderStore
from art_sky.store.packs import pull_folder, push_folder
from art_sky.store.protocol import StoredObject

MANIFEST = "p/manifest.json.zst"


class Counted(FolderStore):
    """Counts requests by kind."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.requests: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("get", "open", "info", "put", "create", "swap", "list", "delete"):
            self.requests[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def store(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "store")


def write(folder: Path, **files: bytes | str) -> Path:
    for name, data in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    folder.mkdir(exist_ok=True)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_small_files_travel_together_and_no_change_is_one_request(store: Counted, tmp_path: Path) -> None:
    source = write(tmp_path / "a", **{f"d{i % 3}__f{i}": f"content {i}" for i in range(100)})
    (source / "d1" / "f1").chmod(0o755)
    assert push_folder(store, "p", source).objects == 1
    # the packs, and the manifest; FolderStore.get opens
    assert store.requests["put"] == 1 and store.requests["create"] == 1 and store.requests["list"] == 1
    store.requests.clear()
    assert push_folder(store, "p", source) == packs.Synced(0, 0, 0)
    assert store.requests == {"get": 1, "open": 1}
    target = tmp_path / "b"
    assert pull_folder(store, "p", target).files == 100
    assert contents(target) == contents(source)
    assert os.access(target / "d1" / "f1", os.X_OK) and not os.access(target / "d1" / "f4", os.X_OK)
    store.requests.clear()
    assert pull_folder(store, "p", target) == packs.Synced(0, 0, 0)
    assert store.requests == {"get": 1, "open": 1}


def test_large_files_are_objects_of_their_own(store: Counted, tmp_path: Path) -> None:
    source = write(tmp_path / "a", big=os.urandom(packs.PACK_BELOW), small="s", twin__big=b"", twin__small="s")
    (source / "twin" / "big").write_bytes((source / "big").read_bytes())
    write(source, unlike=bytes(packs.PACK_BELOW))  # of the same size
    assert push_folder(store, "p", source).objects == 3
    pull_folder(store, "p", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(source)
    (source / "moved").write_bytes((source / "big").read_bytes())
    (source / "big").unlink()
    assert push_folder(store, "p", source).objects == 0
    pull_folder(store, "p", tmp_path / "c")
    assert contents(tmp_path / "c") == contents(source)


def test_packs_are_bounded(store: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 1000)
    source = write(tmp_path / "a", **{f"f{i}": bytes([i]) * 300 for i in range(50)})
    assert push_folder(store, "p", source).objects == 13
    assert pull_folder(store, "p", tmp_path / "b").objects == 13
    assert contents(tmp_path / "b") == contents(source)
    assert push_folder(store, "unpacked", source, pack_below=0).objects == 50


def test_only_what_changed_is_sent_and_what_nobody_needs_is_deleted(store: Counted, tmp_path: Path) -> None:
    source = write(tmp_path / "a", same="1", changed="2", gone="3")
    push_folder(store, "p", source)
    first = {info.key for info in store.list("p/packs/")}
    target = tmp_path / "b"
    pull_folder(store, "p", target)
    (source / "gone").unlink()
    write(source, changed="new", moved__same="1")
    assert push_folder(store, "p", source) == packs.Synced(1, 1, 3)
    assert pull_folder(store, "p", target) == packs.Synced(2, 2, 4)
    assert contents(target) == {**contents(source), "gone": b"3"}  # what is not in the store stays
    assert first < {info.key for info in store.list("p/packs/")}  # `same` still needs it
    write(source, same="4", moved__same="5")
    push_folder(store, "p", source)
    assert first.isdisjoint({info.key for info in store.list("p/packs/")})
    assert pull_folder(store, "p", tmp_path / "c").files == 3 and contents(tmp_path / "c") == contents(source)


def test_an_empty_folder_is_not_an_absent_one(store: Counted, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="nothing was pushed"):
        pull_folder(store, "p", tmp_path / "b")
    push_folder(store, "p", write(tmp_path / "a"))
    assert pull_folder(store, "p", tmp_path / "b").files == 0
    with pytest.raises(InvalidInput, match="not a folder"):
        push_folder(store, "p", tmp_path / "mistyped")


def test_a_bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "CLOCK_MARGIN_SECONDS", -3600.0)  # a bucket tells whole seconds
    store = open_store(s3_servers.store_url(endpoint))
    store.put(f"p/packs/{'a' * 32}-1", b"left by a killed push")
    with pytest.raises(ObjectNotFound):
        pull_folder(store, "p", tmp_path / "b")
    source = write(tmp_path / "a", big=os.urandom(packs.PACK_BELOW), d__small="s", ä="")
    for files in (3, 0):
        assert push_folder(store, "p", source).files == files
        assert pull_folder(store, "p", tmp_path / "b").files == files
    assert contents(tmp_path / "b") == contents(source)
    assert len(list(store.list("p/"))) == 3


names = st.text("abä .", min_size=1, max_size=3).filter(lambda n: n not in (".", ".."))
trees = st.dictionaries(names | st.tuples(names, names).map("/".join), st.binary(max_size=6), max_size=6)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(trees, min_size=1, max_size=3))
def test_any_folder_after_any_other(tmp_path_factory: pytest.TempPathFactory, versions: list[dict[str, bytes]]) -> None:
    base = tmp_path_factory.mktemp("packs")
    store = FolderStore(base / "store")
    for n, tree in enumerate(versions):
        source = base / f"a{n}"
        source.mkdir()
        for name, data in tree.items():
            path = source / name
            if path.is_dir() or any(p.is_file() for p in path.parents):
                continue
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        push_folder(store, "p", source, pack_below=4)
        pull_folder(store, "p", base / f"b{n}")
        assert contents(base / f"b{n}") == contents(source)


@pytest.mark.parametrize("kind", ["packs", "files"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damage_is_noticed_and_never_written(store: Counted, tmp_path: Path, kind: str, damage: str) -> None:
    source = write(tmp_path / "a", small="content", big=os.urandom(packs.PACK_BELOW))
    push_folder(store, "p", source)
    (key,) = (info.key for info in store.list(f"p/{kind}/"))
    data = store.get(key).data
    store.put(key, {"flip": data[:3] + bytes([data[3] ^ 1]) + data[4:], "cut": data[:-1], "empty": b""}[damage])
    with pytest.raises(CorruptObject, match=key):
        pull_folder(store, "p", tmp_path / "b")
    left = contents(tmp_path / "b")
    assert left.items() <= contents(source).items() and len(left) < 2


def test_a_lost_object_is_corruption_not_absence(store: Counted, tmp_path: Path) -> None:
    push_folder(store, "p", write(tmp_path / "a", f="x"))
    (key,) = (info.key for info in store.list("p/packs/"))
    store.delete(key)
    with pytest.raises(CorruptObject, match="push it again"):
        pull_folder(store, "p", tmp_path / "b")


def test_a_pull_goes_on_with_what_was_pushed_meanwhile(store: Counted, tmp_path: Path) -> None:
    source = write(tmp_path / "a", f="old")
    push_folder(store, "p", source)

    class Interrupted(FolderStore):
        def get(self, key: str) -> StoredObject:
            if "/packs/" in key and (source / "f").read_bytes() == b"old":
                push_folder(store, "p", write(source, f="new"))
            return super().get(key)

    pull_folder(Interrupted(store.root), "p", tmp_path / "b")
    assert contents(tmp_path / "b") == {"f": b"new"}


def test_two_pushes_at_once_do_not_mix(store: Counted, tmp_path: Path) -> None:
    source, other = write(tmp_path / "a", f="1"), write(tmp_path / "o", f="2")

    class Slow(FolderStore):
        def put(self, key: str, data: bytes | Path) -> str:
            push_folder(store, "p", other)
            return super().put(key, data)

    for turn in ("first", "second"):  # nothing there before, and something
        write(source, f=f"mine, {turn}")
        write(other, f=f"theirs, {turn}")
        with pytest.raises(Conflict, match="push again"):
            push_folder(Slow(store.root), "p", source)
        pull_folder(store, "p", tmp_path / "b")
        assert contents(tmp_path / "b") == contents(other)
        assert len(list(store.list("p/packs/"))) == 1  # the loser took back what it had sent


def test_what_a_killed_push_left_goes_with_the_next_one(
    store: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a", small="1", big=os.urandom(packs.PACK_BELOW))
    with monkeypatch.context() as patch:
        patch.setattr(store, "create", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            push_folder(store, "p", source)
    left = {info.key for info in store.list("p/")}
    assert len(left) == 2
    store.put("p/packs/notes", b"not ours")
    push_folder(store, "p", source)
    assert left < {info.key for info in store.list("p/")}, "they may be another push's, by a clock that is ahead"
    monkeypatch.setattr(packs, "CLOCK_MARGIN_SECONDS", 0.0)
    write(source, small="2")
    push_folder(store, "p", source)
    after = {info.key for info in store.list("p/")}
    assert left.isdisjoint(after) and "p/packs/notes" in after and len(after) == 4
    pull_folder(store, "p", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(source)


def test_a_push_that_began_later_keeps_its_objects(
    store: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "CLOCK_MARGIN_SECONDS", 0.0)
    source, other = write(tmp_path / "a", f="1"), write(tmp_path / "o", f="2")
    push_folder(store, "p", source)
    real = packs._left_by_killed

    def meanwhile(*args: Any) -> set[str]:
        monkeypatch.setattr(packs, "_left_by_killed", real)
        push_folder(store, "p", other)
        return real(*args)

    monkeypatch.setattr(packs, "_left_by_killed", meanwhile)
    write(source, f="3")
    push_folder(store, "p", source)
    pull_folder(store, "p", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(other)


def test_a_file_that_changes_while_it_is_sent(store: Counted, tmp_path: Path) -> None:
    source = write(tmp_path / "a", big=os.urandom(packs.PACK_BELOW))

    class Changing(FolderStore):
        def put(self, key: str, data: bytes | Path) -> str:
            (source / "big").write_bytes(b"shorter")
            return super().put(key, data)

    with pytest.raises(StoreError, match="changed while it was sent"):
        push_folder(Changing(store.root), "p", source)
    assert list(store.list("p/")) == []


def test_links_cannot_lead_out(store: Counted, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", f="kept")
    source = write(tmp_path / "a", d__f="new")
    (source / "linked").symlink_to(source / "d" / "f")
    push_folder(store, "p", source)
    target = write(tmp_path / "b")
    (target / "d").symlink_to(outside)
    with pytest.raises(StoreError, match="link to another place"):
        pull_folder(store, "p", target)
    assert contents(outside) == {"f": b"kept"}
    (target / "d").unlink()
    pull_folder(store, "p", target)
    assert contents(target) == {"d/f": b"new", "linked": b"new"} and not (target / "linked").is_symlink()
    (source / "folder").symlink_to(outside)
    with pytest.raises(InvalidInput, match="link to a folder"):
        push_folder(store, "p", source)
    (source / "folder").unlink()
    (source / "folder").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="leads nowhere"):
        push_folder(store, "p", source)


ENTRY = {"sha256": "a" * 64, "size": 1, "key": f"packs/{'a' * 32}-1", "offset": 0, "executable": False}


@pytest.mark.parametrize(
    "value",
    [
        [], {}, {"format": 1}, {"format": 1, "files": []}, {"format": 1, "files": {"../f": ENTRY}},
        {"format": 1, "files": {"/f": ENTRY}}, {"format": 1, "files": {"f": {}}},
        *({"format": 1, "files": {"f": {**ENTRY, **bad}}} for bad in (
            {"size": -1}, {"offset": -1}, {"size": "1"}, {"size": True}, {"key": "HEAD"}, {"key": "../x"}, {"more": 1},
            {"key": None}, {"sha256": 3},
        )),
    ],
)  # fmt: skip
def test_a_manifest_edited_by_hand_is_corrupt(store: Counted, tmp_path: Path, value: Any) -> None:
    store.put(MANIFEST, zstandard.ZstdCompressor().compress(json.dumps(value).encode()))
    for call in (
        lambda: pull_folder(store, "p", tmp_path / "b"),
        lambda: push_folder(store, "p", write(tmp_path / "a")),
    ):
        with pytest.raises(CorruptObject, match="manifest"):
            call()


def test_a_manifest_of_a_newer_release(store: Counted, tmp_path: Path) -> None:
    store.put(MANIFEST, zstandard.ZstdCompressor().compress(b'{"format": 2}'))
    with pytest.raises(StoreError, match="newer art-sky"):
        pull_folder(store, "p", tmp_path / "b")
    store.put(MANIFEST, b"noise")
    with pytest.raises(CorruptObject):
        pull_folder(store, "p", tmp_path / "b")
