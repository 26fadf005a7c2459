"""The ledger's durable copy."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from fake_cloud import FakeWorld

from art_sky.controller.ledger import StoreLedger
from art_sky.controller.stored_logs import last_lines, pull_logs
from art_sky.errors import NotFound, StoreError
from art_sky.node.records import LedgerEntry, ledger_key
from art_sky.store import open_store


def test_entries_are_closed_and_the_node_s_own_reason_counts(tmp_path: Path) -> None:
    world = FakeWorld(tmp_path / "registry.sqlite")
    cluster = world.up(world.launch())
    cluster = cluster.model_copy(update={"request": cluster.request.model_copy(update={"store": f"file://{tmp_path}"})})
    assert cluster.node
    ledger, store = StoreLedger(), open_store(f"file://{tmp_path}")
    assert ledger.reason(cluster, cluster.node) is None
    ledger.close(cluster, cluster.node, cluster.node.billed_from + 3600, "vanished")
    key = ledger_key(cluster.id, cluster.node.name)
    entry = LedgerEntry(**json.loads(store.get(key).data))
    assert (entry.reason, entry.dollars(9e9), entry.instance) == ("vanished", 1.0, cluster.node.instance)

    said = dataclasses.replace(entry, closed_unix=None, reason="idle")
    store.put(key, json.dumps(dataclasses.asdict(said)).encode())
    assert ledger.reason(cluster, cluster.node) == "idle"
    ledger.close(cluster, cluster.node, cluster.node.billed_from + 7200, "asked")
    assert json.loads(store.get(key).data)["reason"] == "idle"

    store.put(key, b"{nonsense")
    with pytest.raises(StoreError, match="cannot be read"):
        ledger.reason(cluster, cluster.node)


def test_a_kept_log_is_found_from_any_computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path / "home"))
    world = FakeWorld(tmp_path / "registry.sqlite")
    cluster = world.up(world.launch())
    assert cluster.node
    url = f"file://{tmp_path / 'store'}"
    request = cluster.request.model_copy(update={"store": url})
    StoreLedger().keep_log(cluster.model_copy(update={"request": request}), cluster.node, "pip\nno such package\n")
    shutil.rmtree(tmp_path / "home")
    folder, _ = pull_logs(url, cluster.id, cluster.node.name)
    assert list(last_lines(folder, 1)) == [("node.log", "no such package\n")]
    shutil.rmtree(tmp_path / "store")  # as if it could not be written: the copy here is left
    assert pull_logs(url, cluster.id, cluster.node.name)[0] == folder
    shutil.rmtree(folder)
    with pytest.raises(NotFound, match="left no log"):
        pull_logs(url, cluster.id, cluster.node.name)
