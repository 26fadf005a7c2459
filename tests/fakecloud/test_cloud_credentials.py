"""Logins on the simulated cloud: none at all, a named role, one for the store that ends; and a disk that is full."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_harness import AGENT, END_SECONDS, launch, ledger, live_machines, machine_of, steps_of, store_of, train, wait
from fakecloud_session import FakeCloud, Instance

pytestmark = [pytest.mark.cloud, pytest.mark.timeout(2400)]
SKYPILOTS_ROLE = "skypilot-v1"


@pytest.fixture
def keyless(fakecloud: FakeCloud) -> Iterator[dict[str, str]]:
    """The laptop without any key; the environment of an art-sky that knows nothing yet."""
    keys, aside = fakecloud.home / ".aws", fakecloud.home / ".aws-aside"
    environment = {"ART_SKY_HOME": str(fakecloud.home / "keyless")}
    keys.rename(aside)
    try:
        yield environment
    finally:
        aside.rename(keys)
        stop = "from art_sky.controller.control import ControlClient as C; C(start=False).stop()"
        fakecloud.run(["python", "-c", stop], env=environment, check=False)


@pytest.mark.parametrize("clouds", [["--cloud", "aws"], pytest.param([], marks=pytest.mark.slow)])
def test_no_credentials_at_all(fakecloud: FakeCloud, keyless: dict[str, str], clouds: list[str]) -> None:
    before, began = len(fakecloud.instances()), time.monotonic()
    command = ["art-sky", "launch", "keyless", "--gpu", "L4", *clouds, "--store", "s3://artsky-keyless/runs", "--yes"]
    done = fakecloud.run(command, env=keyless, check=False)
    last = done.stderr.strip().splitlines()[-1]
    print(f"\nafter {time.monotonic() - began:.0f} s: {last}")
    assert done.returncode == 1 and last.startswith("error: ") and "sky check" in last
    assert "Traceback" not in done.stderr and len(fakecloud.instances()) == before


@pytest.fixture
def named_role(fakecloud: FakeCloud) -> Iterator[str]:
    """An instance profile as infra/aws makes it, and no role of SkyPilot's own meanwhile."""
    iam = fakecloud.client("iam")
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [trust]})

    def make(profile: str, role: str) -> None:
        iam.create_role(RoleName=role, AssumeRolePolicyDocument=policy)
        iam.create_instance_profile(InstanceProfileName=profile)
        iam.add_role_to_instance_profile(InstanceProfileName=profile, RoleName=role)

    def remove(profile: str, role: str) -> None:
        for attached in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
            iam.detach_role_policy(RoleName=role, PolicyArn=attached["PolicyArn"])
        iam.remove_role_from_instance_profile(InstanceProfileName=profile, RoleName=role)
        iam.delete_instance_profile(InstanceProfileName=profile)
        iam.delete_role(RoleName=role)

    remove(SKYPILOTS_ROLE, SKYPILOTS_ROLE)
    make("art-sky-node", "role-of-the-node")
    try:
        yield "art-sky-node"
    finally:
        remove("art-sky-node", "role-of-the-node")
        make(SKYPILOTS_ROLE, SKYPILOTS_ROLE)


@pytest.mark.slow
def test_a_node_has_the_named_role_and_no_other(fakecloud: FakeCloud, named_role: str) -> None:
    view = launch(fakecloud, "role", "--node-role", named_role)
    machine = machine_of(fakecloud, view)
    reservation = fakecloud.client("ec2").describe_instances(InstanceIds=[machine.id])["Reservations"][0]
    assert reservation["Instances"][0]["IamInstanceProfile"]["Arn"].endswith("/art-sky-node")
    roles = [r["RoleName"] for r in fakecloud.client("iam").list_roles()["Roles"]]
    assert "role-of-the-node" in roles and SKYPILOTS_ROLE not in roles, roles
    asked = "http://169.254.169.254/latest/meta-data/iam/security-credentials/"
    assert fakecloud.on_host(machine.id, ["curl", "-s", asked]).stdout == "role-of-the-node"
    train(fakecloud, "role", 1)
    # The store is reached by that role: without its keys nothing is written.
    fakecloud.expire_credentials("ASIANODEROLE")
    assert "credentials have expired" in failed_train(fakecloud, "role", 2)
    fakecloud.clear_faults()
    train(fakecloud, "role", 2)
    fakecloud.run(["art-sky", "down", "role"], timeout=600)
    assert live_machines(fakecloud, view["id"]) == []


@pytest.mark.slow
def test_a_credential_for_the_store_ends_in_a_run(fakecloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh one reaches the server as it runs. Without one nothing is written, and the machine ends as ever."""
    file = fakecloud.home / "store-key"
    write_key(file, "ASIASTOREONE")
    options = ("--store-credential", str(file), "--idle-minutes", "3", "--orphan-minutes", "30")
    view = launch(fakecloud, "credential", *options)
    machine = machine_of(fakecloud, view)
    train(fakecloud, "credential", 1)
    server = server_pid(fakecloud, machine)

    fakecloud.expire_credentials("ASIASTOREONE")
    assert "credentials have expired" in failed_train(fakecloud, "credential", 2)
    write_key(file, "ASIASTORETWO")
    began = time.monotonic()
    wait("the fresh one", lambda: fakecloud.grep_disk(machine.id, "ASIASTORETWO"), 120)
    print(f"\non the node after {time.monotonic() - began:.0f} s")
    train(fakecloud, "credential", 2)
    assert server_pid(fakecloud, machine) == server, "without a restart"
    shown = fakecloud.run(["art-sky", "status"]).stdout
    assert "by a credential without an end" in shown
    for where in ("ASIASTORETWO", "secret-of-ASIASTORETWO"):
        modes = {fakecloud.on_host(machine.id, ["stat", "-c", "%a", f]).stdout.strip()
                 for f in fakecloud.grep_disk(machine.id, where)}  # fmt: skip
        assert modes == {"600"}, where

    fakecloud.expire_credentials("ASIASTORETWO")
    fakecloud.kill_laptop()
    began = time.monotonic()
    fakecloud.wait_gone(machine.id, 180 + END_SECONDS)
    print(f"gone {time.monotonic() - began:.0f} s after the second one ended; idle limit 180 s")
    assert [m.step for m in steps_of(store_of(fakecloud, "credential", monkeypatch))] == [0, 1, 2]
    fakecloud.clear_faults()


@pytest.mark.slow
def test_a_full_disk_ends_the_node(fakecloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    view = launch(fakecloud, "disk", "--orphan-minutes", "30")
    machine = machine_of(fakecloud, view)
    train(fakecloud, "disk", 1)
    fakecloud.kill_laptop()  # it would rent another
    # The disks of all hosts are one: this one's folder gets a small disk of its own.
    fakecloud.on_host(machine.id, ["sh", "-ec", SMALL_DISK])
    began = time.monotonic()
    fakecloud.wait_gone(machine.id, 60 + END_SECONDS)
    print(f"\ngone {time.monotonic() - began:.0f} s after the disk was full")
    store = store_of(fakecloud, "disk", monkeypatch)
    assert [m.step for m in steps_of(store)] == [0, 1]
    (entry,) = ledger(store, view["id"])
    assert entry.reason == "disk"


SMALL_DISK = """
folder=/home/ubuntu/.art-sky-node
mkdir -p /mnt/small
size=$(( $(du -sk $folder | cut -f1) + 4096 ))
mount -t tmpfs -o size=${size}k small /mnt/small
cp -a --sparse=never $folder/. /mnt/small
chown ubuntu /mnt/small
mount --move /mnt/small $folder
dd if=/dev/zero of=$folder/fill bs=4k 2>/dev/null || true
df $folder
"""


def write_key(file: Path, key: str) -> None:
    scratch = file.with_suffix(".new")
    scratch.write_text(f"AWS_ACCESS_KEY_ID={key}\nAWS_SECRET_ACCESS_KEY=secret-of-{key}\nAWS_SESSION_TOKEN=t\n")
    scratch.replace(file)


def failed_train(cloud: FakeCloud, name: str, steps: int) -> str:
    """What the agent said of a train call that must fail."""
    done = cloud.run(["python", AGENT, name, str(steps)], timeout=900, check=False)
    assert done.returncode != 0, done.stdout
    said: str = done.stderr.strip().splitlines()[-1]
    print(f"\nthe agent: {said}")
    return said


def server_pid(cloud: FakeCloud, machine: Instance) -> int:
    found: dict[str, Any] = json.loads(
        cloud.on_host(machine.id, ["cat", "/home/ubuntu/.art-sky-node/state/server.json"]).stdout
    )
    return int(found["pid"])
