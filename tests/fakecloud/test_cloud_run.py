"""Whole runs on a rented machine: `art-sky launch`, an agent on the laptop, and an end that nobody asks for."""

from __future__ import annotations

import json
import time

import pytest
from cloud_harness import END_SECONDS, launch, ledger, machine_of, steps_of, store_of, train
from fakecloud_session import FakeCloud

pytestmark = [pytest.mark.cloud, pytest.mark.timeout(1500)]


def test_from_launch_to_idle_with_the_laptop_off(fakecloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    view = launch(fakecloud, "idle", "--idle-minutes", "3", "--orphan-minutes", "30")
    print("\nlaunch:", view["node"]["phases"])
    machine = machine_of(fakecloud, view)
    print("agent:", train(fakecloud, "idle", 3))

    status = json.loads(fakecloud.run(["art-sky", "status", "--json"]).stdout)
    assert machine.id in json.dumps(status)
    fakecloud.kill_laptop()
    assert fakecloud.laptop_processes() == []
    began = time.monotonic()
    fakecloud.wait_gone(machine.id, 180 + END_SECONDS)
    print(f"gone {time.monotonic() - began:.0f} s after the laptop was switched off; idle limit 180 s")
    store = store_of(fakecloud, "idle", monkeypatch)
    assert [m.step for m in steps_of(store)] == [0, 1, 2, 3]
    (entry,) = ledger(store, view["id"])
    assert (
        entry.reason == "idle" and entry.instance == machine.id and 0 < entry.dollars(time.time()) < view["worst_case"]
    )
