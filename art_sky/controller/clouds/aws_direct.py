"""The few things about EC2 that SkyPilot does not do or cannot be trusted to know, through boto3.

Instances are found by the label `art-sky-node`, which is on them from their first moment: it is part of RunInstances,
so that a machine whose creation was answered by an error is found too. Credentials and endpoint are those that boto3
finds on this computer. botocore's errors are raised as they are.
"""

from __future__ import annotations

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
# What costs most or is most alive comes first, should one name have several.
_ORDER = ["running", "pending", "stopped", "ending", "absent"]


def find(node: str, region: str) -> dict[str, Any]:
    """The machine of this name as EC2 knows it now; `seen` is "absent" where there is none."""
    found = sorted(_instances(region, NODE_LABEL, node), key=lambda m: _ORDER.index(m["seen"]))
    return found[0] if found else {"node": node, "cloud": "aws", "region": region, "seen": "absent"}


def machines() -> list[dict[str, Any]]:
    """All instances and left volumes that carry our label, in all regions of the account."""
    regions = [r["RegionName"] for r in _ec2(None).describe_regions()["Regions"]]
    with ThreadPoolExecutor(8) as pool:
        return [machine for found in pool.map(_ours_in, regions) for machine in found]


def terminate(node: str, region: str) -> list[str]:
    """Asks for the end of every instance of this name that is not at its end; returns their ids."""
    alive = [m["instance"] for m in _instances(region, NODE_LABEL, node) if m["seen"] not in ("absent", "ending")]
    if alive:
        _ec2(region).terminate_instances(InstanceIds=alive)
    return alive


def end_on_power_off(node: str, region: str) -> None:
    """The guard's power-off must end the bill; EC2's default only stops the machine and goes on billing its disk."""
    for machine in _instances(region, NODE_LABEL, node):
        if machine["seen"] in ("pending", "running"):
            _ec2(region).modify_instance_attribute(
                InstanceId=machine["instance"], InstanceInitiatedShutdownBehavior={"Value": "terminate"}
            )


def _ours_in(region: str) -> list[dict[str, Any]]:
    found = [m for m in _instances(region, OURS_LABEL, "1") if m["seen"] != "absent"]
    pages = _ec2(region).get_paginator("describe_volumes").paginate(
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


def _instances(region: str, label: str, value: str) -> Iterator[dict[str, Any]]:
    pages = _ec2(region).get_paginator("describe_instances").paginate(
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


def _ec2(region: str | None) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 5})
    return boto3.session.Session().client("ec2", region_name=region or "us-east-1", config=config)
