"""The process that calls SkyPilot, with a stand-in for SkyPilot and moto for EC2: what is refused before anything is
asked for, and what its errors mean. tests/fakecloud runs the real one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from test_controller_skypilot import order

import art_sky
from art_sky.controller.clouds import sky_catalog
from art_sky.controller.clouds.skypilot import SkyPilotProvider
from art_sky.controller.provider import NodeOrder, Offer, Wanted
from art_sky.errors import CloudError, InvalidInput, NoCapacity, NoCredentials, NoQuota, NotOurs, ProviderUnavailable
from art_sky.node import guard

STUB = Path(__file__).parent / "stub_skypilot"
NODE = "artsky-00c0ffee-1"


@pytest.fixture
def sky(tmp_path: Path) -> Callable[..., SkyPilotProvider]:
    """`sky(environment, clusters=[...], launch=[error, text])`."""

    def made(environment: dict[str, str] | None = None, **stub: Any) -> SkyPilotProvider:
        path = os.pathsep.join([str(STUB), str(Path(art_sky.__file__).parents[1])])
        base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": path, "AWS_EC2_METADATA_DISABLED": "1"}
        own = {"STUB_SKYPILOT": json.dumps(stub), "STUB_CALLS": str(tmp_path / "calls")}
        return SkyPilotProvider(tmp_path / "controller", {**base, **own, **(environment or {})})

    return made


@pytest.fixture
def ec2(moto: str) -> Iterator[dict[str, str]]:
    """The environment in which moto is EC2."""
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}
    yield {**keys, "AWS_ENDPOINT_URL": moto}
    client = boto3.client("ec2", "us-east-1", endpoint_url=moto)
    for reservation in client.describe_instances()["Reservations"]:
        client.terminate_instances(InstanceIds=[i["InstanceId"] for i in reservation["Instances"]])


def calls(tmp_path: Path) -> list[str]:
    file = tmp_path / "calls"
    return file.read_text().split() if file.exists() else []


def on_gcp(tmp_path: Path) -> NodeOrder:
    made = order(tmp_path)
    offer = Offer("gcp", "us-central1", "g2-standard-4", {"L4": 1}, False, 0.7)
    return dataclasses.replace(made, offer=offer)


def refused(sky: SkyPilotProvider, wanted: NodeOrder) -> CloudError | InvalidInput:
    with pytest.raises((CloudError, InvalidInput)) as e:
        sky.launch(wanted, lambda *_: None)
    assert "\n" not in e.value.message
    return e.value


def test_no_credentials_at_all_and_nothing_is_begun(sky: Callable[..., SkyPilotProvider], tmp_path: Path) -> None:
    error = refused(sky(), order(tmp_path))
    assert isinstance(error, NoCredentials) and error.details == {"untouched": True}
    assert "Unable to locate credentials; run `sky check`" in error.message and calls(tmp_path) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"AWS_PROFILE": "nobody"}, "nobody"),
        ({"AWS_ACCESS_KEY_ID": "half"}, "Partial credentials"),
    ],
)
def test_credentials_that_are_none_are_told_as_such(
    sky: Callable[..., SkyPilotProvider], tmp_path: Path, settings: dict[str, str], says: str
) -> None:
    error = refused(sky(settings), order(tmp_path))
    assert isinstance(error, NoCredentials) and says in error.message and error.details["untouched"]


def test_a_cluster_of_that_name_that_is_not_ours_is_never_touched(
    sky: Callable[..., SkyPilotProvider], tmp_path: Path
) -> None:
    error = refused(sky(clusters=[NODE]), on_gcp(tmp_path))
    assert isinstance(error, NotOurs) and error.details == {"untouched": True}
    assert f"there is a machine {NODE} already that this launch did not make" in error.message
    assert calls(tmp_path) == ["status"]


def test_nor_is_an_instance_that_carries_its_label(
    sky: Callable[..., SkyPilotProvider], ec2: dict[str, str], tmp_path: Path
) -> None:
    client = boto3.client("ec2", "us-east-1", endpoint_url=ec2["AWS_ENDPOINT_URL"])
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "art-sky-node", "Value": NODE}]}]
    client.run_instances(ImageId="ami-12c6146b", MinCount=1, MaxCount=1, TagSpecifications=tags)
    assert isinstance(refused(sky(ec2), order(tmp_path)), NotOurs) and calls(tmp_path) == []
    found = client.describe_instances(Filters=[{"Name": "tag:art-sky-node", "Values": [NODE]}])["Reservations"]
    assert [i["State"]["Name"] for r in found for i in r["Instances"]] == ["running"]


def test_a_role_that_is_not_there_is_told_before_anything_is_begun(
    sky: Callable[..., SkyPilotProvider], ec2: dict[str, str], tmp_path: Path
) -> None:
    error = refused(sky(ec2), order(tmp_path, node_role="art-sky-nod"))
    assert isinstance(error, InvalidInput) and "no instance profile 'art-sky-nod'; infra/aws makes one" in error.message
    assert error.details["untouched"] and calls(tmp_path) == []
    iam = boto3.client("iam", "us-east-1", endpoint_url=ec2["AWS_ENDPOINT_URL"])
    iam.create_instance_profile(InstanceProfileName="art-sky-node")
    sky(ec2).launch(order(tmp_path, node_role="art-sky-node"), lambda *_: None)
    assert calls(tmp_path) == ["status", "launch"]


@pytest.mark.parametrize("own", [{}, {"aws": {"vpc_names": "v", "post_provision_runcmd": ["mine"]}}])
def test_a_machine_ends_itself_from_its_first_boot_and_runs_the_users_commands(
    sky: Callable[..., SkyPilotProvider], ec2: dict[str, str], tmp_path: Path, own: dict[str, dict[str, Any]]
) -> None:
    sky(ec2, config=own).launch(order(tmp_path), lambda *_: None)
    config = json.loads((tmp_path / "calls.config").read_text())
    mine = own.get("aws", {}).get("post_provision_runcmd", [])
    assert config == {"aws": {**own.get("aws", {}), "post_provision_runcmd": [*mine, guard.FIRST_BOOT]}}


@pytest.mark.parametrize(
    ("kind", "text", "type_", "says", "untouched"),
    [
        ("ResourcesUnavailableError", "Task requires GCP which is not enabled. To enable access ... run: sky check gcp",
         NoCredentials, "run `sky check`", True),
        ("NoCloudAccessError", "No infra is enabled", NoCredentials, "run `sky check`", False),
        ("ResourcesUnavailableError", "Quota 'NVIDIA_L4_GPUS' exceeded", NoQuota, "ask your cloud for more", False),
        ("ResourcesUnavailableError", "ZONE_RESOURCE_POOL_EXHAUSTED", NoCapacity, "the next candidate", False),
        ("ApiServerConnectionError", "refused", ProviderUnavailable, "run `sky api start`", False),
    ],
)  # fmt: skip
def test_what_a_launch_may_say(
    sky: Callable[..., SkyPilotProvider],
    tmp_path: Path,
    kind: str,
    text: str,
    type_: type[CloudError],
    says: str,
    untouched: bool,
) -> None:
    error = refused(sky(launch=[kind, text]), on_gcp(tmp_path))
    assert type(error) is type_ and says in error.message and bool(error.details.get("untouched")) is untouched


def test_a_server_that_does_not_answer_is_an_outage(sky: Callable[..., SkyPilotProvider], tmp_path: Path) -> None:
    """After which the same launch would work, so that it is not taken for refused."""
    error = refused(sky(status=["ApiServerConnectionError", "refused"]), on_gcp(tmp_path))
    assert isinstance(error, ProviderUnavailable) and error.details == {}


def test_an_unknown_gpu_is_answered_with_near_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(STUB))
    try:
        for name, near in (("H1000", "H100"), ("a100-80g", "A100-80GB"), ("L40", "L40S"), ("H200:x", None)):
            with pytest.raises(InvalidInput) as e:
                sky_catalog.offers(Wanted(gpus=[name]), ["aws"])
            says = f"has a GPU {name!r}; did you mean '{near}'" if near else "write a GPU as H100"
            assert says in e.value.message
        with pytest.raises(InvalidInput, match="has a GPU 'zzz'; known: A100, A100-80GB, A10G"):
            sky_catalog.offers(Wanted(gpus=["zzz"]), ["aws"])
        (offer,) = sky_catalog.offers(Wanted(gpus=["h100"]), ["aws"])
        assert offer.accelerators == {"H100": 1}
    finally:
        for module in [m for m in sys.modules if m == "sky" or m.startswith("sky.")]:
            del sys.modules[module]
