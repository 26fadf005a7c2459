"""The rest of how a rented cluster may end or go on: minutes each, run by `make fakecloud-full`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

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
from fakecloud_session import FakeCloud

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("phase", ["provision", "runtime", "files", "connect"])
def test_ctrl_c_in_each_phase(fakecloud: FakeCloud, phase: str, tmp_path: Path) -> None:
    word = {"provision": "Launching on", "runtime": "Instance is up", "files": "Syncing files",
            "connect": "; connecting"}[phase]  # fmt: skip
    log = (tmp_path / "log").open("w+")
    process = fakecloud.popen(launch_command(fakecloud, f"ctrl-{phase}"), log=log)
    wait(word, lambda: word in Path(log.name).read_text(), 300)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(END_SECONDS) == 130, Path(log.name).read_text()[-2000:]
    (cluster,) = (c for c in views(fakecloud) if c["name"] == f"ctrl-{phase}")
    assert cluster["state"] == "down"
    assert live_machines(fakecloud, cluster["id"]) == []
    print(f"\n{phase}: nothing is billed {time.monotonic() - began:.0f} s after Ctrl-C")


@pytest.mark.parametrize("notice", [120, 0])
def test_a_spot_machine_is_taken_away(fakecloud: FakeCloud, notice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"spot-{notice}"
    view = launch(fakecloud, name, "--spot-only")
    machine = machine_of(fakecloud, view)
    assert machine.spot
    with (fakecloud.home / f"{name}.log").open("w+") as log:
        agent = fakecloud.popen(["python", AGENT, name, "4"], log=log)
        wait("a step", lambda: '"step": 1' in Path(log.name).read_text(), 300)
        fakecloud.preempt(machine.id, notice)
        began = time.monotonic()
        assert agent.wait(900) == 0, Path(log.name).read_text()[-3000:]
        print(f"\nnotice of {notice} s: the agent ended normally {time.monotonic() - began:.0f} s later")
        print(Path(log.name).read_text())
    store = store_of(fakecloud, name, monkeypatch)
    assert [m.step for m in steps_of(store)] == [0, 1, 2, 3, 4]
    (now,) = (c for c in views(fakecloud) if c["name"] == name)
    assert now["base_url"] == view["base_url"] and now["nodes"] == 2
    fakecloud.run(["art-sky", "down", name], timeout=600)
    entries = ledger(store, view["id"])
    assert len(entries) == 2 and sum(e.dollars(time.time()) for e in entries) < view["worst_case"]


def test_a_killed_controller_is_followed_by_another(fakecloud: FakeCloud) -> None:
    view = launch(fakecloud, "killed")
    control = json.loads((fakecloud.home / ".art-sky/controller/control.json").read_text())
    os.kill(control["pid"], signal.SIGKILL)
    train(fakecloud, "killed", 1)  # starts one
    (now,) = (c for c in views(fakecloud) if c["name"] == "killed")
    assert now["base_url"] == view["base_url"] and now["node"]["name"] == view["node"]["name"]
    fakecloud.run(["art-sky", "down", "killed"], timeout=600)
    assert live_machines(fakecloud, view["id"]) == []


def test_a_stranger_on_the_address_hears_nothing(fakecloud: FakeCloud) -> None:
    view = launch(fakecloud, "stranger")
    stranger = fakecloud.take_over(machine_of(fakecloud, view).id)
    token = Path(view["token_file"]).read_text().strip()
    asked = ["curl", "-s", "-m", "10", "-K", "-", f"{view['base_url']}/v1/models"]
    secret = f'header = "Authorization: Bearer {token}"\nheader = "X-Question: only for the node"'
    log = fakecloud.home / ".art-sky/controller/controller.log"

    def refused() -> bool:
        fakecloud.run(asked, input=secret, check=False)  # held, or cut with the tunnel
        return "has another SSH host key" in log.read_text() + json.dumps(views(fakecloud))

    wait("the refusal", refused, 300)
    heard = fakecloud.heard(stranger)
    assert "command:" not in heard and token not in heard and "only for the node" not in heard
    fakecloud.run(["art-sky", "down", "stranger"], timeout=600)
    assert live_machines(fakecloud, view["id"]) == []
