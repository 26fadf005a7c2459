"""The few things about EC2 that SkyPilot does not do or cannot be trusted to know, through boto3.

Instances are found by the label `art-sky-node`, which is on them from their first moment: it is part of RunInstances,
so that a machine whose creation was answered by an error is found too. Credentials and endpoint are those that boto3
finds on this computer. botocore's errors are raised as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NODE_LABEL, OURS_LABEL = "art-sky-node", "art-sky"
_SEEN = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "ending",
    "stopping": "stopped",
    "stopped": "stopped",
    "terminated": "absent",
}
# SkyPilot's own mark on the machine that it uses.
_HEAD_LABEL = "skypilot-head-node"
# What costs most or is most alive comes first, should one name have several.
_ORDER = ["running", "pending", "stopped", "ending", "absent"]


def find(node: str, region: str) -> dict[str, Any]:
    """The machine of this name as EC2 knows it now; `seen` is "absent" where there is none."""
    found = sorted(_instances(region, _ec2(region), NODE_LABEL, node), key=_most_alive)
    return found[0] if found else {"node": node, "cloud": "aws", "region": region, "seen": "absent"}


def machines() -> list[dict[str, Any]]:
    """All instances and left volumes that carry our label, in all regions of the account."""
    regions = [r["RegionName"] for r in _ec2(None).describe_regions()["Regions"]]
    clients = [_ec2(region) for region in regions]  # here: making one is slow and not safe in threads
    with ThreadPoolExecutor(16) as pool:
        return [machine for found in pool.map(_ours_in, regions, clients) for machine in found]


def terminate(node: str, region: str) -> list[str]:
    """Asks for the end of every instance of this name that is not at its end; returns their ids."""
    ec2 = _ec2(region)
    found = _instances(region, ec2, NODE_LABEL, node)
    alive = [m["instance"] for m in found if m["seen"] not in ("absent", "ending")]
    if alive:
        ec2.terminate_instances(InstanceIds=alive)
    return alive


def terminate_strays(node: str, region: str) -> list[str]:
    """An answer of EC2 that was lost or wrong makes SkyPilot create the machine again: ends all of this name but the
    one that SkyPilot uses; returns their ids."""
    ec2 = _ec2(region)
    found = [m for m in _instances(region, ec2, NODE_LABEL, node) if m["seen"] in ("pending", "running", "stopped")]
    strays = [m["instance"] for m in found if _HEAD_LABEL not in m["labels"]]
    if strays and len(strays) < len(found):
        ec2.terminate_instances(InstanceIds=strays)
        return strays
    return []


def end_on_power_off(node: str, region: str) -> None:
    """The guard's power-off must end the bill; EC2's default only stops the machine and goes on billing its disk."""
    ec2 = _ec2(region)
    for machine in _instances(region, ec2, NODE_LABEL, node):
        if machine["seen"] in ("pending", "running"):
            ec2.modify_instance_attribute(
                InstanceId=machine["instance"], Attribute="instanceInitiatedShutdownBehavior", Value="terminate"
            )


def has_role(name: str, region: str) -> bool:
    """Whether the account has this instance profile; True also where these keys may not ask."""
    import botocore.exceptions

    try:
        _session().client("iam", region_name=region, config=_config()).get_instance_profile(InstanceProfileName=name)
    except botocore.exceptions.ClientError as e:
        return bool(e.response["Error"]["Code"] != "NoSuchEntity")
    return True


def _most_alive(machine: dict[str, Any]) -> tuple[int, bool]:
    return _ORDER.index(machine["seen"]), _HEAD_LABEL not in machine["labels"]


def _ours_in(region: str, ec2: Any) -> list[dict[str, Any]]:
    found = [m for m in _instances(region, ec2, OURS_LABEL, "1") if m["seen"] != "absent"]
    pages = ec2.get_paginator("describe_volumes").paginate(
        Filters=[{"Name": f"tag:{OURS_LABEL}", "Values": ["1"]}, {"Name": "status", "Values": ["available"]}]
    )  # fmt: skip
    for page in pages:
        for volume in page["Volumes"]:
            labels = _labels(volume)
            name = labels.get(NODE_LABEL, volume["VolumeId"])
            found.append(
                {"node": name, "cloud": "aws", "region": region, "seen": "stopped", "instance": volume["VolumeId"],
                 "instance_type": "volume", "labels": labels}
            )  # fmt: skip
    return found


def _instances(region: str, ec2: Any, label: str, value: str) -> Iterator[dict[str, Any]]:
    pages = ec2.get_paginator("describe_instances").paginate(
        Filters=[{"Name": f"tag:{label}", "Values": [value]}]
    )  # fmt: skip
    for page in pages:
        for reservation in page["Reservations"]:
            for instance in reservation["Instances"]:
                labels = _labels(instance)
                yield {
                    "node": labels.get(NODE_LABEL, ""),
                    "cloud": "aws",
                    "region": region,
                    "seen": _SEEN[instance["State"]["Name"]],
                    "instance": instance["InstanceId"],
                    "instance_type": instance["InstanceType"],
                    "spot": instance.get("InstanceLifecycle") == "spot",
                    "labels": labels,
                }


def _labels(resource: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", [])}


@functools.cache
def _session() -> Any:
    """One for all clients: it reads EC2's service description once."""
    import boto3

    return boto3.session.Session()


def _ec2(region: str | None) -> Any:
    return _session().client("ec2", region_name=region or "us-east-1", config=_config())


def _config() -> Any:
    from botocore.config import Config

    return Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 5})
