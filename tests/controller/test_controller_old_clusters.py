"""What is deleted of clusters that ended long ago, and what stays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from art_sky.controller.old_clusters import find_old_clusters, forget
from art_sky.errors import StoreError
from art_sky.node.records import LedgerEntry, ledger_key, logs_prefix
from art_sky.store import open_store
from art_sky.store.packs import push_folder
from art_sky.store.protocol import Store

DAY = 86400.0
ENTRY = LedgerEntry(
    cluster="artsky-00000001", node="artsky-00000001-1", instance="i-1", cloud="aws", region="us-east-1",
    instance_type="p5.4xlarge", spot=False, price_per_hour=6.0, billed_from_unix=0.0, seen_unix=7200.0,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def leave(store: Store, tmp_path: Path, entry: LedgerEntry, log: bool = True) -> None:
    store.put(ledger_key(entry.cluster, entry.node), json.dumps(dataclasses.asdict(entry)).encode())
    if log:
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / "node.log").write_text("installed\n")
        push_folder(store, logs_prefix(entry.cluster, entry.node), tmp_path / "logs")


def now_of(store: Store) -> float:
    """The present by the store's clock, by which its objects are dated."""
    return max(info.modified for info in store.list(""))


def test_a_cluster_that_ended_long_ago_leaves_what_it_cost(store: Store, tmp_path: Path) -> None:
    first = dataclasses.replace(ENTRY, closed_unix=3600.0)
    second = dataclasses.replace(ENTRY, node="artsky-00000001-2", closed_unix=7200.0)
    leave(store, tmp_path, first)
    leave(store, tmp_path, second)
    now = now_of(store)
    assert find_old_clusters(store, 30, now + 29 * DAY) == []  # its objects are younger
    (old,) = find_old_clusters(store, 30, now + 31 * DAY)
    assert (old.dollars, old.closed) == ({first.node: 6.0, second.node: 12.0}, 7200.0)
    assert old.size == sum(info.size for info in store.list(""))
    forget(store, old)
    (left,) = store.list("")
    assert left.key == "_clusters/artsky-00000001/total.json"
    assert json.loads(store.get(left.key).data) == {"nodes": old.dollars, "closed_unix": 7200.0}
    assert find_old_clusters(store, 30, now + 99 * DAY) == []


def test_a_deletion_that_was_broken_off_is_finished_and_counts_nothing_twice(store: Store, tmp_path: Path) -> None:
    leave(store, tmp_path, dataclasses.replace(ENTRY, closed_unix=3600.0))
    leave(store, tmp_path, dataclasses.replace(ENTRY, node="artsky-00000001-2", closed_unix=7200.0))
    later = now_of(store) + 31 * DAY
    (old,) = find_old_clusters(store, 30, later)
    forget(store, dataclasses.replace(old, costs=old.costs[:1], logs=old.logs[:1]))  # then the process was killed
    (rest,) = find_old_clusters(store, 30, later)
    assert rest.dollars == {"artsky-00000001-2": 12.0}
    forget(store, rest)
    (left,) = store.list("")
    assert json.loads(store.get(left.key).data)["nodes"] == {"artsky-00000001-1": 6.0, "artsky-00000001-2": 12.0}


def test_what_may_still_cost_something_stays(store: Store, tmp_path: Path) -> None:
    leave(store, tmp_path, dataclasses.replace(ENTRY, closed_unix=3600.0))
    leave(store, tmp_path, dataclasses.replace(ENTRY, node="artsky-00000001-2"))  # open
    later = now_of(store) + 99 * DAY
    assert find_old_clusters(store, 30, later) == []
    store.delete(ledger_key(ENTRY.cluster, "artsky-00000001-2"))  # its log is there, and who knows whether it ended
    assert find_old_clusters(store, 30, later) == []


def test_an_entry_that_cannot_be_read_is_named(store: Store) -> None:
    store.put(ledger_key("artsky-00000001", "artsky-00000001-1"), b"{")
    with pytest.raises(StoreError, match=r"_clusters/artsky-00000001/costs/artsky-00000001-1\.json"):
        find_old_clusters(store, 30, now_of(store) + 31 * DAY)
