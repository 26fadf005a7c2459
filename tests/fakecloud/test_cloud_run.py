"""Whole runs on rented machines: `art-sky launch`, an agent on the laptop, and an end that nobody asks for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from cloud_harness import END_SECONDS, launch, ledger, machine_of, steps_of, store_of, train, wait
from fakecloud_session import FakeCloud, Instance

pytestmark = [pytest.mark.cloud, pytest.mark.timeout(1500)]
IDLE_SECONDS = 180.0
REBOOT_SECONDS = 900.0


@dataclass(frozen=True)
class LeftAlone:
    """Two machines: the power of one was cut for a moment, then the laptop was switched off, at two Unix times."""

    cloud: FakeCloud
    view: dict[str, Any]  # of the idle one, which made three steps
    idle: Instance
    printed: list[dict[str, Any]]
    status: str
    rebooted: Instance  # as it was before
    cut: float
    off: float


@pytest.fixture(scope="session")
def left_alone(fakecloud: FakeCloud) -> Iterator[LeftAlone]:
    """On a cloud of their own, whose laptop nobody else needs."""
    with FakeCloud.start() as cloud:
        rebooted = machine_of(cloud, launch(cloud, "reboot"))
        cloud.reboot(rebooted.id)
        cut = time.time()
        view = launch(cloud, "idle", "--idle-minutes", f"{IDLE_SECONDS / 60:g}", "--orphan-minutes", "30")
        printed = train(cloud, "idle", 3)
        status = cloud.run(["art-sky", "status", "--json"]).stdout
        cloud.kill_laptop()
        yield LeftAlone(cloud, view, machine_of(cloud, view), printed, status, rebooted, cut, time.time())


@pytest.mark.first
def test_from_launch_to_three_steps(left_alone: LeftAlone) -> None:
    print("\nlaunch:", left_alone.view["node"]["phases"])
    print("agent:", left_alone.printed)
    assert [line["step"] for line in left_alone.printed[1:]] == [1, 2, 3]
    assert left_alone.idle.id in json.dumps(json.loads(left_alone.status))
    assert left_alone.cloud.laptop_processes() == []


@pytest.mark.first
def test_the_guard_comes_back_after_a_reboot(left_alone: LeftAlone) -> None:
    cloud, before = left_alone.cloud, left_alone.rebooted
    wait("the reboot", lambda: now(cloud, before.id).pid not in (None, before.pid), 60)
    cloud.wait_host(before.id)
    assert cloud.on_host(before.id, ["systemctl", "is-active", "art-sky-guard.timer"]).stdout == "active\n"


@pytest.mark.last
def test_an_idle_machine_ends_itself(left_alone: LeftAlone, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = gone_after(left_alone.cloud, left_alone.idle, left_alone.off, IDLE_SECONDS + END_SECONDS)
    print(f"\ngone {seconds:.0f} s after the laptop was switched off; idle limit {IDLE_SECONDS:.0f} s")
    store = store_of(left_alone.cloud, "idle", monkeypatch)
    assert [m.step for m in steps_of(store)] == [0, 1, 2, 3]
    (entry,) = ledger(store, left_alone.view["id"])
    assert entry.reason == "idle" and entry.instance == left_alone.idle.id
    assert 0 < entry.dollars(time.time()) < left_alone.view["worst_case"]


@pytest.mark.last
def test_a_rebooted_machine_ends_itself(left_alone: LeftAlone) -> None:
    """SkyPilot does not start the job again and forgets its autodown; the guard, which starts with the machine, ends
    it."""
    seconds = gone_after(left_alone.cloud, left_alone.rebooted, left_alone.cut, REBOOT_SECONDS)
    print(f"\ngone {seconds:.0f} s after the reboot")


def now(cloud: FakeCloud, id: str) -> Instance:
    return next(i for i in cloud.instances() if i.id == id)


def gone_after(cloud: FakeCloud, machine: Instance, began: float, bound: float) -> float:
    """Seconds from a Unix time to the machine's end. AssertionError beyond the bound."""
    cloud.wait_gone(machine.id, began + bound - time.time())
    ended = now(cloud, machine.id).ended
    assert ended is not None and ended - began < bound
    return ended - began
