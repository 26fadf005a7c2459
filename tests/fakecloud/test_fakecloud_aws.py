"""The simulated cloud's API, and the real SkyPilot on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fakecloud_network as network
import pytest
from fakecloud_session import API, LAPTOP_KEY, FakeCloud, remove_stale

pytestmark = pytest.mark.cloud

LAUNCH = """
import sky
from sky.skylet.autostop_lib import AutostopWaitFor
task = sky.Task.from_yaml_config({
    "name": "tiny",
    "resources": {"infra": "aws", "any_of": [{"accelerators": "L4:1"}, {"accelerators": "T4:1"}]},
    "setup": "python -c 'import torch, fastapi, transformers, peft'",
    "run": "echo hello from $(hostname); sleep 5",
})
down = {"idle_minutes_to_autostop": 1, "wait_for": AutostopWaitFor.JOBS, "down": True}
job, handle = sky.get(sky.launch(task, cluster_name="artsky-tiny", **down))
assert sky.tail_logs("artsky-tiny", job, follow=True) == 0
"""


@pytest.mark.slow
def test_skypilot_launches_fails_over_and_ends_the_machine_by_itself(fakecloud: FakeCloud) -> None:
    fakecloud.capacity_error("g6.xlarge")
    began = time.monotonic()
    done = fakecloud.run(["python", "-c", LAUNCH], timeout=280)
    print(f"launch to end of job: {time.monotonic() - began:.0f} s")
    fakecloud.clear_faults()
    (machine,) = fakecloud.instances("artsky-tiny")
    assert "hello from ip-10-77" in done.stdout
    assert machine.type.startswith("g4dn.")
    assert fakecloud.ports(machine.id) == [22]
    fakecloud.kill_laptop()
    assert fakecloud.laptop_processes() == []
    print(f"gone {fakecloud.wait_gone('artsky-tiny', 240):.0f} s later, with the laptop off")


PRICES = """
import json, sky
found = sky.list_accelerators(gpus_only=True, name_filter="H100", clouds=["aws", "gcp", "lambda"], all_regions=True)
print(json.dumps([(x.cloud, x.price, x.spot_price) for x in found["H100"]]))
"""


def test_prices_of_three_clouds(fakecloud: FakeCloud) -> None:
    printed = fakecloud.run(["python", "-c", PRICES]).stdout.splitlines()[-1]
    prices = {cloud: (price, spot) for cloud, price, spot in json.loads(printed.replace("NaN", "null"))}
    assert prices["GCP"] == pytest.approx((11.0612, 3.3184))
    assert prices["Lambda"] == (2.49, None)
    assert "AWS" in prices


def test_faults_of_the_api(fakecloud: FakeCloud) -> None:
    ec2 = fakecloud.client("ec2")
    before = len(fakecloud.instances())
    fakecloud.capacity_error("m6i.large", "us-east-1")
    with pytest.raises(ec2.exceptions.ClientError, match="InsufficientInstanceCapacity"):
        fakecloud.boot_instance()
    fakecloud.clear_faults()
    fakecloud.error_but_created()
    with pytest.raises(ec2.exceptions.ClientError, match="InternalError"):
        fakecloud.boot_instance()
    assert len(fakecloud.instances()) == before + 1
    machine = fakecloud.instances()[-1]
    fakecloud.fail_terminate(2)
    for _ in range(2):
        with pytest.raises(ec2.exceptions.ClientError, match="InternalError"):
            ec2.terminate_instances(InstanceIds=[machine.id])
    ec2.terminate_instances(InstanceIds=[machine.id])
    fakecloud.wait_gone(machine.id, 5)
    fakecloud.api_delay(1.0, "DescribeInstances")
    began = time.monotonic()
    ec2.describe_regions()
    middle = time.monotonic()
    ec2.describe_instances()
    assert middle - began < 1 <= time.monotonic() - middle
    fakecloud.clear_faults()


def test_a_bucket_swaps_conditionally_and_credentials_expire(fakecloud: FakeCloud) -> None:
    s3 = fakecloud.client("s3")
    s3.create_bucket(Bucket="swap")
    tag = s3.put_object(Bucket="swap", Key="HEAD", Body=b"1", IfNoneMatch="*")["ETag"]
    with pytest.raises(s3.exceptions.ClientError, match="PreconditionFailed"):
        s3.put_object(Bucket="swap", Key="HEAD", Body=b"2", IfNoneMatch="*")
    s3.put_object(Bucket="swap", Key="HEAD", Body=b"2", IfMatch=tag)
    with pytest.raises(s3.exceptions.ClientError, match="PreconditionFailed"):
        s3.put_object(Bucket="swap", Key="HEAD", Body=b"3", IfMatch=tag)
    listing = ["aws", "s3", "ls", "s3://swap"]
    assert "HEAD" in fakecloud.run(listing).stdout
    fakecloud.expire_credentials(LAPTOP_KEY)
    assert "ExpiredToken" in fakecloud.run(listing, check=False).stderr
    fakecloud.clear_faults()


def test_the_laptop_has_its_own_loopback_and_no_way_out(fakecloud: FakeCloud) -> None:
    serve = fakecloud.popen(["python", "-m", "http.server", "8123", "--bind", "127.0.0.1"])
    fetch = ["curl", "-sf", "--retry", "9", "--retry-connrefused", "--max-time", "20", "http://127.0.0.1:8123"]
    fakecloud.run(fetch)
    with fakecloud.inside():
        subprocess.run(fetch, check=True, capture_output=True)
    assert subprocess.run(fetch[:2] + fetch[-1:], check=False).returncode != 0
    serve.kill()
    serve.wait()
    assert fakecloud.run(["curl", "-s", "--max-time", "2", "http://1.1.1.1"], check=False).returncode != 0
    assert fakecloud.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", API + "/moto-api/"]).stdout == "200"
    fakecloud.unplug_laptop()
    assert fakecloud.run(["curl", "-s", "--max-time", "1", API + "/moto-api/"], check=False).returncode != 0
    fakecloud.plug_laptop()
    fakecloud.run(["curl", "-s", "--max-time", "5", API + "/moto-api/"])


@pytest.mark.parametrize("victim", ["starter", "both"])
def test_nothing_is_left_after_a_kill(fakecloud: FakeCloud, victim: str) -> None:
    script = "import sys, time; from fakecloud_session import FakeCloud; c = FakeCloud.start(); c.boot_instance()\n"
    script += "c.popen(['sleep', '1000']); print(c.name, c._process.pid, flush=True); time.sleep(1000)"
    here = Path(__file__).parent
    starter = subprocess.Popen([sys.executable, "-c", script], cwd=here, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    name, hypervisor = starter.stdout.readline().split()
    (host,) = FakeCloud.attach(name).instances()
    assert network.processes(network.laptop_space(name))
    if victim == "both":
        os.kill(int(hypervisor), signal.SIGKILL)
    starter.kill()
    starter.wait()
    end = time.monotonic() + 20
    while (network.RUN / name).exists() and time.monotonic() < end:
        time.sleep(0.2)
        if victim == "both":
            remove_stale()
    assert not (network.RUN / name).exists()
    assert not network.laptop_space(name).exists()
    assert not network.cloud_space(name).exists()
    while Path(f"/proc/{host.pid}").exists():  # the kernel is at it
        assert time.monotonic() < end
        time.sleep(0.1)
    assert network.processes(network.cloud_space(fakecloud.name))  # another's cloud is left alone
