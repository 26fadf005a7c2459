"""However a rented cluster ends, its machine is gone within its bound and the store is whole."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cloud_harness import (
    END_SECONDS,
    launch,
    launch_command,
    ledger,
    live_machines,
    machine_of,
    steps_of,
    store_of,
    train,
    wait,
)
from fakecloud_session import LAPTOP_KEY, LAPTOP_SECRET, FakeCloud

from art_sky.node import guard

pytestmark = [pytest.mark.cloud, pytest.mark.timeout(2400)]


def test_setup_that_fails(fakecloud: FakeCloud) -> None:
    """vLLM cannot be had there."""
    began = time.monotonic()
    done = fakecloud.run(launch_command(fakecloud, "setup", "--engine", "vllm"), check=False, timeout=900)
    print(f"\ntold after {time.monotonic() - began:.0f} s:\n{done.stderr}")
    assert done.returncode == 1 and "setup failed" in done.stderr.splitlines()[-1]
    assert "art-sky logs setup" in done.stderr.splitlines()[-1]
    nodes = {i.id: i.tags.get("art-sky-node") for i in fakecloud.instances()}
    (machine,) = (id for id, node in nodes.items() if node is not None and node in done.stderr)
    print(f"gone {fakecloud.wait_gone(machine, END_SECONDS):.0f} s later")
    assert "the installation failed" in fakecloud.run(["art-sky", "logs", "setup"]).stdout


@pytest.mark.parametrize("armed", [False, True])
def test_a_machine_whose_launch_died_before_setup_ends_itself(fakecloud: FakeCloud, armed: bool) -> None:
    """By what SkyPilot hands to cloud-init; half an hour is three seconds here."""
    assert f"={guard.FIRST_BOOT_MINUTES}min " in guard.FIRST_BOOT
    soon = guard.FIRST_BOOT.replace(f"={guard.FIRST_BOOT_MINUTES}min ", "=3s ")
    state = [f"mkdir -p /{Path(guard.STATE).parent}", f"touch /{guard.STATE}"] if armed else []
    data = "#cloud-config\n" + json.dumps({"runcmd": [*state, soon]})
    machine = fakecloud.boot_instance(UserData=data, InstanceInitiatedShutdownBehavior="terminate")
    if not armed:
        fakecloud.wait_gone(machine.id, 20)
        return
    wait("the look", lambda: "art-sky-first-boot.service ended with 0" in fakecloud.console(machine.id), 20)
    assert machine.id in [i.id for i in fakecloud.instances(live=True)]
    fakecloud.client("ec2").terminate_instances(InstanceIds=[machine.id])


def test_nobody_else_gets_in_and_down_ends_it_although_two_terminations_fail(
    fakecloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = launch(fakecloud, "down")
    machine = machine_of(fakecloud, view)
    train(fakecloud, "down", 1)

    assert fakecloud.ports(machine.id) == [22]
    token = Path(view["token_file"]).read_text().strip()
    url = view["base_url"]
    for header, code in (([], "401"), (["-H", "Authorization: Bearer wrong"], "401"), (["-K", "-"], "200")):
        done = fakecloud.run(
            ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *header, f"{url}/v1/models"],
            input=f'header = "Authorization: Bearer {token}"' if "-K" in header else None,
        )
        assert done.stdout == code, header
    assert fakecloud.grep_disk(machine.id, LAPTOP_KEY) == fakecloud.grep_disk(machine.id, LAPTOP_SECRET) == []
    # Where the server and its watchdog read it, and nowhere else.
    found = {Path(f).name for f in fakecloud.grep_disk(machine.id, token)}
    assert found <= {"secrets.json", "token"}, found
    for argv in (fakecloud.on_host(machine.id, ["ps", "axeww", "-o", "args"]).stdout, laptop_argv(fakecloud)):
        assert token not in argv
    logs = [f for f in fakecloud.home.rglob("*") if f.is_file() and token in f.read_text(errors="replace")]
    assert {f.name for f in logs} <= {"token", "secrets.json"}, logs
    store = store_of(fakecloud, "down", monkeypatch)
    assert not [i.key for i in store.list("") if token.encode() in store.get(i.key).data]

    fakecloud.fail_terminate(2)
    began = time.monotonic()
    fakecloud.run(["art-sky", "down", "down"], timeout=600)
    fakecloud.clear_faults()
    assert live_machines(fakecloud, view["id"]) == []
    took = time.monotonic() - began
    print(f"\ndown took {took:.0f} s with two terminations that failed")
    assert took < END_SECONDS + 180
    assert [m.step for m in steps_of(store)] == [0, 1]
    assert [e.closed_unix is not None for e in ledger(store, view["id"])] == [True]


def laptop_argv(cloud: FakeCloud) -> str:
    commands = (Path(f"/proc/{pid}/cmdline") for pid in cloud.laptop_processes())
    return " ".join(c.read_text() for c in commands if c.exists())
