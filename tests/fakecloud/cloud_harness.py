"""Our provider and our commands on the simulated cloud's laptop, and what they leave in the store."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakecloud_session import FakeCloud, Instance

from art_sky.config import Limits
from art_sky.controller.clouds.skypilot import SkyPilotProvider
from art_sky.controller.order import make_order
from art_sky.controller.provider import Machine, NodeOrder
from art_sky.controller.rented import LaunchRequest, Node, RentedCluster
from art_sky.node.records import LedgerEntry, NodeLimits, parse
from art_sky.schemas import Manifest
from art_sky.store import open_store
from art_sky.store.model_store import ModelStore
from art_sky.store.protocol import Store

CPU_OFFER = {"cloud": "aws", "region": "us-east-1", "instance_type": "m6i.large", "accelerators": {}, "spot": False,
             "price": 0.096}  # fmt: skip
GPU_OFFER = {"cloud": "aws", "region": "us-east-1", "instance_type": "g6.xlarge", "accelerators": {"L4": 1},
             "spot": True, "price": 0.28168}  # fmt: skip
AGENT = Path(__file__).with_name("cloud_agent.py")
END_SECONDS = 240.0  # from the trigger of a limit to the machine's end
LIMITS = NodeLimits(idle_minutes=30, max_hours=2, orphan_minutes=15, flush_minutes=5, setup_minutes=20, budget=5)


def provider(cloud: FakeCloud, folder: Path, **environment: str) -> SkyPilotProvider:
    """As on the laptop: its network, its HOME, its SkyPilot."""
    worker = cloud.enter([cloud.environment.laptop / "bin/python", "-m", "art_sky.controller.clouds.sky_worker"])
    return SkyPilotProvider(folder, cloud.laptop_env(environment), worker=worker)


def order(folder: Path, cluster: str, offer: dict[str, Any], n: int = 1, **request: Any) -> NodeOrder:
    asked = LaunchRequest.parse(
        {"name": "agent", "store": "s3://artsky/test", "limits": Limits(max_hours=2), "disk_gib": 30, **request}
    )
    node = Node(name=f"{cluster}-{n}", state="intended", offer=offer, since=time.time(), billed_from=time.time())
    rented = RentedCluster(
        name="agent", id=cluster, wanted="up", created=0, request=asked, plan=[offer], port=1, nodes=[node]
    )
    return make_order(rented, node, LIMITS, folder / "wheels")


class Progress:
    """What a launch said, with the second at which each phase began."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.lines: list[str] = []
        self.phases: dict[str, float] = {}

    def __call__(self, phase: str, text: str) -> None:
        self.lines.append(text)
        if phase:
            self.phases.setdefault(phase, round(time.monotonic() - self.began, 1))


def ssh(cloud: FakeCloud, machine: Machine, command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Plain ssh with what the provider said of the machine."""
    argv = ["ssh", "-i", machine.key_file, "-p", str(machine.port), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
            "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=10",
            f"{machine.user}@{machine.host}", command]  # fmt: skip
    return cloud.run(argv, **options)


def wait(what: str, done: Callable[[], Any], bound: float) -> Any:
    """Polls until `done` is true; its value. Raises AssertionError after `bound` seconds."""
    end = time.monotonic() + bound
    while not (value := done()):
        assert time.monotonic() < end, f"{what}: not within {bound:g} s"
        time.sleep(0.3)
    return value


def launch_command(cloud: FakeCloud, name: str, *options: str) -> list[str]:
    """A cluster of one L4 with the CPU engine, and a bucket of its own."""
    cloud.client("s3").create_bucket(Bucket=f"artsky-{name}")
    return ["art-sky", "launch", name, "--gpu", "L4", "--cloud", "aws", "--region", "us-east-1", "--store",
            f"s3://artsky-{name}/runs", "--budget", "5", "--disk", "30", "--yes", "--json", *options]  # fmt: skip


def launch(cloud: FakeCloud, name: str, *options: str) -> dict[str, Any]:
    """Its view (`art_sky.controller.views`)."""
    view: dict[str, Any] = json.loads(cloud.run(launch_command(cloud, name, *options), timeout=900).stdout)
    return view


def views(cloud: FakeCloud) -> list[dict[str, Any]]:
    """Of all rented clusters, those that are over too."""
    found: list[dict[str, Any]] = json.loads(cloud.run(["art-sky", "status", "--all", "--json"]).stdout)["rented"]
    return found


def machine_of(cloud: FakeCloud, view: dict[str, Any]) -> Instance:
    (machine,) = (i for i in cloud.instances(live=True) if i.tags.get("art-sky-node") == view["node"]["name"])
    return machine


def live_machines(cloud: FakeCloud, cluster: str) -> list[Instance]:
    """Those of a cluster's id that may cost something."""
    return [i for i in cloud.instances(live=True) if i.tags.get("art-sky-id") == cluster]


def train(cloud: FakeCloud, name: str, steps: int) -> list[dict[str, Any]]:
    """What the agent printed."""
    done = cloud.run(["python", AGENT, name, str(steps)], timeout=900)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def store_of(cloud: FakeCloud, name: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    for key, value in (("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")):
        monkeypatch.setenv(key, value)
    return open_store(f"s3://artsky-{name}/runs?endpoint_url={cloud.api}&region=us-east-1")


def steps_of(store: Store) -> list[Manifest]:
    """The steps that HEAD reaches, oldest first, each of whose files is there whole."""
    model = ModelStore(store, "tests", "agent")
    found = [manifest for _, manifest in model.chain(model.head().manifest)][::-1]
    for manifest in found:
        for ref in manifest.files.values():
            assert len(model.read_blob(ref)) == ref.size
    return found


def ledger(store: Store, cluster: str) -> list[LedgerEntry]:
    keys = [info.key for info in store.list(f"_clusters/{cluster}/costs/")]
    return [parse(store.get(key).data.decode(), LedgerEntry, key) for key in keys]
