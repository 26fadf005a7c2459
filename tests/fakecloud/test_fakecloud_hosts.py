"""The simulated machines: what survives a reboot, what a power-off does, what the network lets through."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from fakecloud_session import FakeCloud, Instance

pytestmark = pytest.mark.cloud

COUNTER = """
[Unit]
Description=counts its starts
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'date +%%s >> /var/lib/counter'
"""
EVERY_SECOND = """
[Timer]
OnBootSec=1s
OnUnitActiveSec=1s
[Install]
WantedBy=timers.target
"""
DAEMON = """
[Service]
ExecStart=/usr/bin/sleep 1000
Restart=always
RestartSec=200ms
[Install]
WantedBy=multi-user.target
"""


def eventually(what: Callable[[], object], bound: float = 60) -> None:
    end = time.monotonic() + bound
    while not what():
        assert time.monotonic() < end, f"did not happen in {bound:.0f} s"
        time.sleep(0.1)


def write_unit(cloud: FakeCloud, host: Instance, name: str, text: str) -> None:
    cloud.on_host(host.id, ["sh", "-c", f"cat > /etc/systemd/system/{name} <<'END'\n{text.replace('%%', '%')}END"])


def metadata(cloud: FakeCloud, host: Instance, path: str) -> str:
    """A page of the metadata service, by its second version; empty when there is none."""
    ask = "curl -s -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token"
    get = f'curl -sf -H "X-aws-ec2-metadata-token: $({ask})" http://169.254.169.254/latest/{path}'
    return cloud.on_host(host.id, ["sh", "-c", get], check=False).stdout


@pytest.fixture(scope="module")
def host(fakecloud: FakeCloud) -> Instance:
    with fakecloud.adjustable_clocks():
        return fakecloud.boot_instance()


def test_enabled_units_survive_a_reboot_and_others_do_not(fakecloud: FakeCloud, host: Instance) -> None:
    for name, text in (("counter.service", COUNTER), ("counter.timer", EVERY_SECOND), ("daemon.service", DAEMON)):
        write_unit(fakecloud, host, name, text)
    write_unit(fakecloud, host, "visitor.service", DAEMON)
    fakecloud.on_host(host.id, ["systemctl", "enable", "--now", "counter.timer", "daemon"])
    fakecloud.on_host(host.id, ["systemctl", "start", "visitor"])
    # The one that dies is started again.
    first = fakecloud.on_host(host.id, ["systemctl", "show", "--property=MainPID", "--value", "daemon"]).stdout
    fakecloud.on_host(host.id, ["kill", "-9", first.strip()])
    eventually(lambda: fakecloud.on_host(host.id, ["systemctl", "is-active", "daemon"], check=False).returncode == 0)
    count = "cat /var/lib/counter 2> /dev/null | wc -l; cat /proc/sys/kernel/random/boot_id"
    eventually(lambda: int(fakecloud.on_host(host.id, ["sh", "-c", count]).stdout.split()[0]) > 2)
    before = fakecloud.on_host(host.id, ["sh", "-c", count]).stdout.split()

    fakecloud.on_host(host.id, ["touch", "/tmp/scratch"])

    fakecloud.reboot(host.id)
    eventually(lambda: {i.id: i.pid for i in fakecloud.instances()}[host.id] not in (None, host.pid))
    fakecloud.wait_host(host.id)
    eventually(lambda: int(fakecloud.on_host(host.id, ["sh", "-c", count]).stdout.split()[0]) > int(before[0]) + 1)
    after = fakecloud.on_host(host.id, ["sh", "-c", count]).stdout.split()
    assert after[1] != before[1]
    assert fakecloud.on_host(host.id, ["systemctl", "is-active", "daemon"]).stdout == "active\n"
    assert fakecloud.on_host(host.id, ["systemctl", "is-active", "visitor"], check=False).stdout == "inactive\n"
    assert fakecloud.on_host(host.id, ["test", "-e", "/tmp/scratch"], check=False).returncode == 1
    uptime = float(fakecloud.on_host(host.id, ["cat", "/proc/uptime"]).stdout.split()[0])
    assert uptime < 60


def test_a_unit_with_an_unknown_option_is_refused(fakecloud: FakeCloud, host: Instance) -> None:
    write_unit(fakecloud, host, "odd.service", "[Service]\nExecStart=/bin/true\nWatchdogSec=5\n")
    refused = fakecloud.on_host(host.id, ["systemctl", "start", "odd"], check=False)
    assert refused.returncode == 1
    assert "WatchdogSec" in refused.stderr


def test_only_root_manages_units(fakecloud: FakeCloud, host: Instance) -> None:
    refused = fakecloud.on_host(host.id, ["systemctl", "stop", "ssh"], user="ubuntu", check=False)
    assert refused.returncode == 1
    assert "authentication required" in refused.stderr
    sudo = fakecloud.on_host(host.id, ["sudo", "-n", "id", "-u"], user="ubuntu")
    assert sudo.stdout == "0\n"


def test_a_clock_jump_is_seen_on_one_host_only(fakecloud: FakeCloud, host: Instance) -> None:
    read = "import time, psutil; print(time.time(), time.monotonic(), psutil.boot_time())"
    python = ["/home/ubuntu/sky-user-env/bin/python", "-c", read]
    other = fakecloud.boot_instance()
    before = [float(x) for x in fakecloud.on_host(host.id, python, user="ubuntu").stdout.split()]
    fakecloud.jump_clock(host.id, 3600)
    after = [float(x) for x in fakecloud.on_host(host.id, python, user="ubuntu").stdout.split()]
    assert after[0] - before[0] == pytest.approx(3600, abs=30)
    assert after[1] - before[1] < 30
    assert after[2] - before[2] == pytest.approx(3600, abs=2)
    elsewhere = float(fakecloud.on_host(other.id, python, user="ubuntu").stdout.split()[0])
    assert elsewhere == pytest.approx(time.time(), abs=30)
    with pytest.raises(RuntimeError, match="adjustable_clocks"):
        fakecloud.jump_clock(other.id, 60)


WATCH = """
import os, threading, time
start, waiting = time.time(), threading.Condition()
open("/opt/old", "w").close()
while time.time() - start < 600:
    time.sleep(0.05)
open("/opt/new", "w").close()
with waiting:
    began = time.monotonic()
    waiting.wait(0.2)
print(os.stat("/opt/old").st_mtime - start, os.stat("/opt/new").st_mtime - start, time.monotonic() - began)
"""


def test_a_running_process_sees_the_jump_in_waits_and_files_too(fakecloud: FakeCloud, host: Instance) -> None:
    fakecloud.on_host(host.id, ["sh", "-c", f"cat > /opt/watch.py <<'END'\n{WATCH}\nEND"])
    write_unit(fakecloud, host, "watch.service", "[Service]\nExecStart=/usr/bin/python3 /opt/watch.py\n")
    fakecloud.on_host(host.id, ["systemctl", "start", "watch"])
    eventually(lambda: fakecloud.on_host(host.id, ["test", "-e", "/opt/old"], check=False).returncode == 0)
    fakecloud.jump_clock(host.id, 3600)
    log = ["cat", "/var/log/units/watch.service"]
    eventually(lambda: len(fakecloud.on_host(host.id, log).stdout.split()) == 3)
    old, new, waited = map(float, fakecloud.on_host(host.id, log).stdout.split())
    assert -5 < old < 5
    assert new == pytest.approx(3600, abs=30)
    assert waited < 5
    age = ["sh", "-c", "touch /opt/now; find /opt/now -mmin -1; find /opt/old -mmin +50"]
    assert fakecloud.on_host(host.id, age).stdout.split() == ["/opt/now", "/opt/old"]


@pytest.mark.parametrize("command", ["poweroff", "sudo shutdown -h now", "sudo systemctl poweroff --force"])
def test_power_off_terminates_where_that_is_arranged(fakecloud: FakeCloud, command: str) -> None:
    machine = fakecloud.boot_instance(InstanceInitiatedShutdownBehavior="terminate")
    fakecloud.on_host(machine.id, ["sh", "-c", command], check=False)
    assert fakecloud.wait_gone(machine.id, 10) < 10


def test_power_off_only_stops_by_default_and_the_disk_stays(fakecloud: FakeCloud) -> None:
    machine = fakecloud.boot_instance()
    fakecloud.on_host(machine.id, ["sh", "-c", "echo kept > /opt/kept"])
    fakecloud.on_host(machine.id, ["poweroff"], check=False)
    state = lambda: next(i for i in fakecloud.instances() if i.id == machine.id).state  # noqa: E731
    eventually(lambda: state() == "stopped")
    fakecloud.client("ec2").start_instances(InstanceIds=[machine.id])
    fakecloud.wait_host(machine.id)
    assert fakecloud.on_host(machine.id, ["cat", "/opt/kept"]).stdout == "kept\n"
    fakecloud.client("ec2").terminate_instances(InstanceIds=[machine.id])
    fakecloud.wait_gone(machine.id, 5)


def test_a_spot_machine_is_announced_and_taken(fakecloud: FakeCloud) -> None:
    machine = fakecloud.boot_instance("g6.xlarge", spot=True)
    assert machine.spot
    assert metadata(fakecloud, machine, "meta-data/spot/instance-action") == ""
    fakecloud.preempt(machine.id, notice=5)
    notice = json.loads(metadata(fakecloud, machine, "meta-data/spot/instance-action"))
    assert notice["action"] == "terminate"
    assert fakecloud.wait_gone(machine.id, 8) > 3


def test_a_dead_host_is_still_running_for_the_api(fakecloud: FakeCloud) -> None:
    machine = fakecloud.boot_instance()
    fakecloud.kill_host(machine.id)
    time.sleep(0.5)
    (found,) = (i for i in fakecloud.instances(live=True) if i.id == machine.id)
    assert (found.state, found.pid) == ("running", None)
    fakecloud.client("ec2").terminate_instances(InstanceIds=[machine.id])
    fakecloud.wait_gone(machine.id, 5)


def test_security_groups_are_enforced(fakecloud: FakeCloud, host: Instance) -> None:
    serve = "[Service]\nExecStart=/usr/bin/python3 -m http.server 8000\n"
    write_unit(fakecloud, host, "serve.service", serve)
    fakecloud.on_host(host.id, ["systemctl", "start", "serve"])
    eventually(lambda: "8000" in fakecloud.on_host(host.id, ["ss", "-ltn"]).stdout)
    assert fakecloud.ports(host.id) == [22]
    ec2 = fakecloud.client("ec2")
    (group, *_) = ec2.describe_instances(InstanceIds=[host.id])["Reservations"][0]["Instances"][0]["SecurityGroups"]
    rule = {"IpProtocol": "tcp", "FromPort": 8000, "ToPort": 8000, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[rule])
    eventually(lambda: fakecloud.ports(host.id) == [22, 8000])
    ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[rule])


def test_what_a_host_wrote_is_found_and_the_machine_below_is_not_seen(fakecloud: FakeCloud, host: Instance) -> None:
    for path in ("/home/ubuntu/a", "/etc/b", "/opt/c", "/dev/shm/d"):
        fakecloud.on_host(host.id, ["sh", "-c", f"echo a-needle > {path}"])
    assert fakecloud.grep_disk(host.id, "a-needle") == ["/dev/shm/d", "/etc/b", "/home/ubuntu/a", "/opt/c"]
    assert fakecloud.on_host(host.id, ["ls", "/root", "/old", "/mnt"]).stdout.split() == ["/mnt:", "/old:", "/root:"]


def test_a_stranger_on_the_same_address_has_another_key_and_notes_what_it_hears(fakecloud: FakeCloud) -> None:
    machine = fakecloud.boot_instance()
    key = fakecloud.home / "key"
    fakecloud.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    keys = "/home/ubuntu/.ssh/authorized_keys"
    fakecloud.on_host(machine.id, ["sh", "-c", f"echo '{key.with_suffix('.pub').read_text()}' > {keys}"])
    target = ["-i", key, f"ubuntu@{machine.public_ip}", "hostname"]
    pinned = ["ssh", "-o", f"UserKnownHostsFile={fakecloud.home}/known", "-o", f"HostKeyAlias={machine.id}"]
    pinned += ["-o", "StrictHostKeyChecking=accept-new", *target]
    assert fakecloud.run(pinned).stdout.startswith("ip-10-77")

    stranger = fakecloud.take_over(machine.id)
    refused = fakecloud.run(pinned, check=False)
    assert refused.returncode != 0
    assert "HOST IDENTIFICATION HAS CHANGED" in refused.stderr
    assert "command:" not in fakecloud.heard(stranger)
    careless = ["ssh", "-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no", *target]
    fakecloud.run(careless, input="a secret")
    assert "command: hostname" in fakecloud.heard(stranger)
    assert "a secret" in fakecloud.heard(stranger)
