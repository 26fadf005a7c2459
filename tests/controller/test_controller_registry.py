"""The registry's file: what it keeps, and files that it refuses."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from fake_cloud import FakeWorld

from art_sky.controller.registry import Registry, moved
from art_sky.controller.rented import NODE_TRANSITIONS
from art_sky.errors import CorruptObject, NotFound, StoreError, VersionMismatch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A registry with one cluster."""
    world = FakeWorld(tmp_path / "registry.sqlite")
    world.up(world.launch())
    world.registry.close()
    return tmp_path / "registry.sqlite"


def test_records_and_events_outlive_the_process(file: Path) -> None:
    cluster = Registry(file).named("run")
    assert cluster.node and cluster.node.state == "up" and cluster.request.store == "s3://b/p"
    registry = Registry(file)
    events = registry.events(cluster.id)
    assert "asking for A10G:1 on aws us-east-1 (g5.xlarge, $1.00/h)" in events[0][2]
    assert registry.events(cluster.id, after=events[-1][0]) == []
    assert oct(file.stat().st_mode & 0o777) == "0o600"


def test_an_unknown_name_is_answered_with_a_near_one(file: Path) -> None:
    with pytest.raises(NotFound, match=r"no rented cluster 'rum'.*run"):
        Registry(file).named("rum")


def test_a_new_run_of_a_name_hides_the_old_one_and_keeps_it(file: Path) -> None:
    registry = Registry(file)
    old = registry.named("run")
    registry.add(old.model_copy(update={"id": "artsky-new", "created": old.created + 1}))
    assert registry.named("run").id == "artsky-new" and [c.id for c in registry.newest()] == ["artsky-new"]
    assert [c.id for c in registry.all()] == [old.id, "artsky-new"]


def test_a_record_that_cannot_be_read_ends_nothing_and_says_what_to_do(file: Path) -> None:
    sqlite3.connect(file, isolation_level=None).execute("UPDATE clusters SET record = '{\"name\": 1}'")
    with pytest.raises(CorruptObject, match=r"nothing was ended.*art-sky gc --clouds"):
        Registry(file).all()


@pytest.mark.parametrize("content", [b"no database at all, " * 100, b"SQLite format 3\0" + b"x" * 5000])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(CorruptObject, match="nothing was ended"):
        Registry(tmp_path / "r")
    assert (tmp_path / "r").read_bytes() == content


def test_a_damaged_page_is_found_at_once(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(file.read_bytes())
    data[4096 + 100 :] = b"\xff" * (len(data) - 4196)
    file.write_bytes(data)
    with pytest.raises(CorruptObject, match="nothing was ended"):
        Registry(file)


def test_a_newer_format_is_refused_with_the_mend(file: Path) -> None:
    sqlite3.connect(file, isolation_level=None).execute("PRAGMA user_version = 2")
    with pytest.raises(VersionMismatch, match="pip install -U art-sky"):
        Registry(file)


def test_a_file_that_another_program_has_locked_is_read_and_its_writers_are_told(file: Path) -> None:
    registry = Registry(file, busy_seconds=0.05)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    id = registry.named("run").id
    assert registry.get(id).name == "run" and registry.events(id) and Registry(file).newest()
    with pytest.raises(StoreError, match=r"another program has locked .*\(`fuser .*` names it\), then call again"):
        registry.note(id, 1.0, "x")
    other.execute("ROLLBACK")
    registry.note(id, 1.0, "x")
    assert registry.events(id)[-1][2] == "x"


def test_a_full_disk_is_told_and_ends_nothing(file: Path) -> None:
    registry = Registry(file)
    registry._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(StoreError, match="free some space"):
        for _ in range(100):
            registry.note("x", 1.0, "y" * 4000)
    assert registry.named("run").node is not None


def test_records_of_earlier_releases_are_read(file: Path) -> None:
    """As they were written before nodes had credentials: what came later has its default."""
    old = json.loads(Registry(file).named("run").model_dump_json())
    for later in ("store_profile", "store_credential"):
        del old["request"][later]
    sqlite3.connect(file, isolation_level=None).execute("UPDATE clusters SET record = ?", (json.dumps(old),))
    assert Registry(file).named("run").request.store_profile is None


def test_an_older_format_is_no_newer_one(file: Path) -> None:
    """A file from before the tables that this release needs: refused with the next step, and nothing is ended."""
    sqlite3.connect(file, isolation_level=None).execute("DROP TABLE events")
    registry = Registry(file)
    assert registry.named("run").name == "run"
    with pytest.raises(CorruptObject, match=r"no such table: events\); nothing was ended.*art-sky gc --clouds"):
        registry.note("x", 1.0, "y")


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "r", isolation_level=None).execute("CREATE TABLE t (x)")
    with pytest.raises(CorruptObject, match="of another program"):
        Registry(tmp_path / "r")


def test_states_move_by_the_table_only(file: Path) -> None:
    cluster = Registry(file).named("run")
    assert cluster.node
    for state in NODE_TRANSITIONS:
        if state in NODE_TRANSITIONS[cluster.node.state]:
            assert moved(cluster, state, 1.0).node.state == state  # type: ignore[union-attr]
        else:
            with pytest.raises(AssertionError, match=f"cannot go from up to {state}"):
                moved(cluster, state, 1.0)
