"""The teardown matrix: whatever befalls a rented machine, it is gone within its bound and its store is whole.

A machine a row. All are begun at once, each cloud's one after the other, so that their waits overlap; each test then
waits for one. Those of `ALONE` belong to a laptop of their own, which is switched off before anything befalls them:
nothing but the machine itself can end them. The others have their controller all the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import fakecloud_network as network
import pytest
from cloud_harness import (
    AGENT,
    END_SECONDS,
    launch,
    launch_command,
    ledger,
    live_machines,
    machine_of,
    steps_of,
    store_of,
    train,
    views,
    wait,
)
from fakecloud_session import FakeCloud, Instance

from art_sky.node.records import LedgerEntry

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.timeout(3600)]

BROKEN_SECONDS = 900.0  # from a hung server, a dead watchdog or a step of the clock to the machine's end
NODE = "/home/ubuntu/.art-sky-node"
# A Python of the node that runs this module does nothing, for ever.
HANG = 'import sys, time; "{module}" in sys.orig_argv and time.sleep(1e6)\n'
HANG_FILE = "/home/ubuntu/sky-user-env/lib/python3.11/site-packages/hang.pth"
# Whichever server comes up is stopped at once.
STOP_SERVERS = f"""[Service]
ExecStart=/bin/sh -c 'while sleep 0.2; do kill -STOP $(sed -n "s/.*pid. *: *\\\\([0-9]*\\\\).*/\\\\1/p" {NODE}/state/server.json); done'
"""  # noqa: E501


@dataclass(frozen=True)
class Begun:
    """A machine that will end. `due` is the Unix time from which its bound counts."""

    cloud: FakeCloud
    id: str  # of its cluster
    machine: Instance
    due: float
    view: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """`befall` does it to the machine and returns when the bound begins. `reason` is what the ledger must say."""

    options: tuple[str, ...]
    befall: Callable[[FakeCloud, dict[str, Any], Instance], float]
    bound: float
    reason: str | None


def budget_is_used_up(cloud: FakeCloud, view: dict[str, Any], machine: Instance) -> float:
    return float(view["node"]["billed_from"] + view["limits"]["budget"] / view["price_per_hour"] * 3600)


def hours_are_used_up(cloud: FakeCloud, view: dict[str, Any], machine: Instance) -> float:
    return float(view["node"]["billed_from"] + view["limits"]["max_hours"] * 3600)


def servers_hang(cloud: FakeCloud, view: dict[str, Any], machine: Instance) -> float:
    cloud.on_host(machine.id, ["tee", "/etc/systemd/system/stop.service"], input=STOP_SERVERS)
    cloud.on_host(machine.id, ["systemctl", "start", "stop"])
    return time.time()


def watchdog_is_killed(cloud: FakeCloud, view: dict[str, Any], machine: Instance) -> float:
    state = json.loads(cloud.on_host(machine.id, ["cat", f"{NODE}/watchdog.json"]).stdout)
    cloud.on_host(machine.id, ["kill", "-9", str(state["pid"])])
    return time.time()


def clock_is_set(seconds: float) -> Callable[[FakeCloud, dict[str, Any], Instance], float]:
    def befall(cloud: FakeCloud, view: dict[str, Any], machine: Instance) -> float:
        cloud.jump_clock(machine.id, seconds)
        return time.time()

    return befall


def nothing(cloud: FakeCloud, view: dict[str, Any], machine: Instance) -> float:
    return time.time()


ALONE = {
    "budget": Row(("--budget", "0.21"), budget_is_used_up, END_SECONDS, "budget"),
    "watchdog-killed": Row((), watchdog_is_killed, BROKEN_SECONDS, None),
    "server-hung": Row((), servers_hang, BROKEN_SECONDS, "server"),
    "clock-forward": Row(("--orphan-minutes", "3"), clock_is_set(3600), BROKEN_SECONDS, "orphan"),
    "clock-back": Row(("--orphan-minutes", "3"), clock_is_set(-3600), BROKEN_SECONDS, "orphan"),
    "busy": Row(("--orphan-minutes", "1"), nothing, 0, "orphan"),
    "hours": Row(("--max-hours", "0.1"), hours_are_used_up, END_SECONDS, "max_hours"),
}
BATCH = 4  # of them are on one laptop: a machine that has trained takes 2 GB of memory
# Far off where a row sets none.
LIMITS = ("--idle-minutes", "60", "--orphan-minutes", "60")


@pytest.fixture(scope="module")
def begun(fakecloud: FakeCloud, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Begun]]]:
    """By row, those that are tested. What goes wrong with one fails its own test alone."""
    tests = [i for i in request.session.items if isinstance(i, pytest.Function) and "begun" in i.fixturenames]
    rows = {i.callspec.params["row"] for i in tests}
    found: dict[str, Future[Begun]] = {}
    alone = [row for row in ALONE if row in rows]
    with ExitStack() as clouds, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for row, begin in ATTENDED.items():
            if row in rows:
                found[row] = other.submit(begin, fakecloud, row)
        for batch in (alone[n : n + BATCH] for n in range(0, len(alone), BATCH)):
            cloud = one.submit(lambda: clouds.enter_context(FakeCloud.start()))
            up = {row: one.submit(launched, cloud, row) for row in batch}
            off = one.submit(laptop_is_switched_off, cloud, up.get("busy"))
            found |= {row: one.submit(befallen, cloud, row, up[row], off) for row in batch}
            for row in batch:
                one.submit(is_gone, found[row])
        try:
            yield found
        finally:
            for pool in (one, other):
                pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("row", [row for row in ALONE if row != "busy"])
def test_a_machine_left_alone_ends_itself(
    begun: dict[str, Future[Begun]], row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, bound, reason = begun[row].result(), ALONE[row].bound, ALONE[row].reason
    seconds = gone_after(end, end.due, bound)
    print(f"\n| {row} | {bound:.0f} s | {seconds:.0f} s |")
    if reason in ("budget", "max_hours"):
        assert seconds >= -1, "it ended before its limit"
    if reason == "orphan":
        assert seconds > 120, "the step of the clock ended it"
    check_store(end, reason, monkeypatch)


@pytest.mark.parametrize("row", ["busy"])
def test_a_busy_machine_left_alone_goes_on_and_then_ends(
    begun: dict[str, Future[Begun]], row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller was killed with the whole laptop, in the middle of a train call."""
    end, bound = begun[row].result(), 60 + END_SECONDS
    store = store_of(end.cloud, row, monkeypatch)
    wait("the step", lambda: len(steps_of(store)) == 2, 1200)
    done = steps_of(store)[-1].created
    assert done - end.due > 60, "the work was over before orphan_minutes"
    seconds = gone_after(end, done, bound)
    print(f"\n| {row} | {bound:.0f} s | {seconds:.0f} s after its work, which went on for {done - end.due:.0f} s |")
    check_store(end, "orphan", monkeypatch)


@pytest.mark.parametrize(("row", "reason"), [("installation-hangs", "setup"), ("server-hangs", "health")])
def test_a_setup_that_hangs_ends_at_its_deadline(
    begun: dict[str, Future[Begun]], row: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = begun[row].result()
    seconds = gone_after(end, end.due, END_SECONDS)
    print(f"\n| {row} | {END_SECONDS:.0f} s | {seconds:.0f} s |")
    wait("the controller to know", lambda: current(end.cloud, row, 2)["state"] == "down", 120)
    store = store_of(end.cloud, row, monkeypatch)
    assert [(e.reason, e.closed_unix is not None) for e in ledger(store, end.id)] == [(reason, True)]


@pytest.mark.parametrize("row", ["tunnel-cut"])
def test_a_machine_behind_a_cut_tunnel_ends_itself(
    begun: dict[str, Future[Begun]], row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, bound = begun[row].result(), 120 + END_SECONDS
    seconds = gone_after(end, end.due, bound)
    print(f"\n| {row} | {bound:.0f} s | {seconds:.0f} s |")
    wait("the controller to know", lambda: current(end.cloud, row, 2)["state"] == "down", 120)
    assert check_store(end, "orphan", monkeypatch).closed_unix is not None


@pytest.mark.parametrize("row", ["replaced"])
def test_two_replacements_stay_within_the_bill_that_was_printed(
    begun: dict[str, Future[Begun]], row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = begun[row].result()
    seconds = gone_after(end, end.due, END_SECONDS)
    wait("the controller to know", lambda: current(end.cloud, row, 2)["state"] == "down", 120)
    assert live_machines(end.cloud, end.id) == []
    store = store_of(end.cloud, row, monkeypatch)
    entries = ledger(store, end.id)
    total, worst = sum(e.dollars(time.time()) for e in entries), end.view["worst_case"]
    print(f"\n| {row} | {END_SECONDS:.0f} s | {seconds:.0f} s | ${total:.4f} of at most ${worst:.4f} |")
    assert [e.reason for e in entries] == ["vanished", "vanished", "budget"]
    assert all(e.closed_unix is not None for e in entries)
    assert total < worst
    assert [m.step for m in steps_of(store)] == [0, 1]


def launched(alone: Future[FakeCloud], row: str) -> dict[str, Any]:
    cloud = alone.result()
    with cloud.adjustable_clocks() if row.startswith("clock") else nullcontext():
        view = launch(cloud, row, *LIMITS, *ALONE[row].options)
    if row != "busy":
        train(cloud, row, 1)
    return view


def laptop_is_switched_off(alone: Future[FakeCloud], busy: Future[dict[str, Any]] | None) -> None:
    """While the busy machine has a train call of minutes, which it has accepted."""
    cloud = alone.result()
    try:
        if busy is not None:
            busy.result()
            with (cloud.home / "busy.log").open("w") as log:
                cloud.popen(["python", AGENT, "busy", "1", "100", "4"], log=log)
            s3 = cloud.client("s3")
            requests = {"Bucket": "artsky-busy", "Prefix": "runs/tests/agent/requests/"}
            wait("a train request", lambda: s3.list_objects_v2(**requests)["KeyCount"], 300)
    finally:
        cloud.kill_laptop()


def befallen(alone: Future[FakeCloud], row: str, up: Future[dict[str, Any]], off: Future[None]) -> Begun:
    cloud, view = alone.result(), up.result()
    off.result()
    (machine,) = (i for i in cloud.instances() if i.tags.get("art-sky-node") == view["node"]["name"])
    return Begun(cloud, view["id"], machine, ALONE[row].befall(cloud, view, machine), view)


def is_gone(begun: Future[Begun]) -> None:
    """Before the next batch; how long it may take is for the tests."""
    begun.result().cloud.wait_gone(begun.result().machine.id, 1800)


def setup_hangs(module: str, phase: str) -> Callable[[FakeCloud, str], Begun]:
    """In this module. The deadline is a minute after the watchdog's phase began."""

    def begin(cloud: FakeCloud, row: str) -> Begun:
        before = {i.id for i in cloud.instances()}
        cloud.popen(launch_command(cloud, row, *LIMITS, "--setup-minutes", "1"))
        (machine,) = wait("a machine", lambda: [i for i in cloud.instances(live=True) if i.id not in before], 300)
        cloud.wait_host(machine.id)
        cloud.on_host(machine.id, ["tee", HANG_FILE], input=HANG.format(module=module))
        reached = ["grep", "-q", f'"phase": "{phase}"', f"{NODE}/watchdog.json"]
        wait(phase, lambda: cloud.on_host(machine.id, reached, check=False).returncode == 0, 300)
        view = current(cloud, row)
        return Begun(cloud, view["id"], machine, time.time() + 60, view)

    return begin


def tunnel_is_cut(cloud: FakeCloud, row: str) -> Begun:
    """Nothing of the laptop's reaches the machine any more. Its work is over."""
    view = launch(cloud, row, *LIMITS, "--orphan-minutes", "2")
    train(cloud, row, 1)
    machine = machine_of(cloud, view)
    drop = (
        f"table ip cut {{\nchain input {{\ntype filter hook input priority -1\nip saddr {network.LAPTOP} drop\n}}\n}}\n"
    )
    cloud.on_host(machine.id, ["nft", "-f", "-"], input=drop)
    return Begun(cloud, view["id"], machine, time.time(), view)


def replaced_twice(cloud: FakeCloud, row: str) -> Begun:
    """Two spot machines of a cluster vanish; the third lives until the budget of all three is used up."""
    done = cloud.run(launch_command(cloud, row, *LIMITS, "--spot-only", "--budget", "0.17"), timeout=900)
    view = json.loads(done.stdout)
    assert f"${view['worst_case']:.2f}" in done.stderr, done.stderr
    train(cloud, row, 1)
    for n in (2, 3):
        cloud.preempt(machine_of(cloud, current(cloud, row)).id, 0)
        name = f"{view['id']}-{n}"
        wait(f"{name} up", lambda: (c := current(cloud, row, 5))["node"]["name"] == name and c["state"] == "up", 1200)  # noqa: B023
    last = current(cloud, row)
    return Begun(cloud, view["id"], machine_of(cloud, last), time.time() + last["seconds_left"], view)


ATTENDED: dict[str, Callable[[FakeCloud, str], Begun]] = {
    "replaced": replaced_twice,
    "installation-hangs": setup_hangs("art_sky.node.install", "installing"),
    "server-hangs": setup_hangs("art_sky.server", "starting"),
    "tunnel-cut": tunnel_is_cut,
}


def current(cloud: FakeCloud, name: str, pause: float = 0) -> dict[str, Any]:
    """A cluster's view, `pause` seconds from now."""
    time.sleep(pause)
    return next(v for v in views(cloud) if v["name"] == name)


def gone_after(end: Begun, due: float, bound: float) -> float:
    """Seconds from `due` to the machine's end in the cloud. AssertionError beyond the bound."""
    end.cloud.wait_gone(end.machine.id, due + bound - time.time())
    (machine,) = (i for i in end.cloud.instances() if i.id == end.machine.id)
    assert machine.ended is not None
    assert machine.ended - due <= bound
    return machine.ended - due


def check_store(end: Begun, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> LedgerEntry:
    """HEAD is whole, and the ledger says why the machine ended; its entry."""
    store = store_of(end.cloud, end.view["name"], monkeypatch)
    assert [m.step for m in steps_of(store)] == [0, 1]
    (entry,) = ledger(store, end.id)
    assert entry.instance == end.machine.id and entry.reason == reason
    return entry
