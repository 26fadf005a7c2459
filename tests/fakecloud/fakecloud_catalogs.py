"""SkyPilot's price lists for the simulated clouds: AWS from moto's data, small made-up ones for GCP and Lambda.

usage: fakecloud_catalogs.py HOME REGION ...     (in the laptop's environment)

The format is that of SkyPilot's catalogs v8; a file without a checksum beside it
counts as the user's own and is never downloaded again.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import moto
from moto.ec2.models.availability_zones_and_regions import RegionsAndZonesBackend

# List prices in $/h of what tests use; the rest gets a price from its size. Spot is 35 % of it.
PRICES = {
    "g4dn.xlarge": 0.526,
    "g5.xlarge": 1.006,
    "g6.xlarge": 0.8048,
    "g6e.xlarge": 1.861,
    "g5.12xlarge": 5.672,
    "p4d.24xlarge": 32.7726,
    "p5.48xlarge": 98.32,
    "m6i.large": 0.096,
    "m6i.xlarge": 0.192,
    "m6i.2xlarge": 0.384,
}
FAMILIES = ("m6i.", "m7i.", "c6i.", "g4dn.", "g5.", "g6.", "g6e.", "p4d.", "p4de.", "p5.", "p5en.")
# moto's data knows these by the chip's family only.
GPU_NAMES = {"p4de.24xlarge": "A100-80GB", "p5en.48xlarge": "H200"}
IMAGE_TAGS = ("custom-cpu-ubuntu", "custom-gpu-ubuntu", "custom-gpu-ubuntu-cuda13", "custom-cpu-ubuntu-arm64",
              "gpu-ubuntu-2204", "gpu-ubuntu-2004", "neuron-ubuntu-2204")  # fmt: skip
IMAGE = "ami-12c6146b"  # one that moto knows

VMS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "GpuInfo", "Price", "SpotPrice",
       "Region", "AvailabilityZone", "Arch", "LocalDiskType", "NVMeSupported", "LocalDiskSize", "LocalDiskCount",
       "MaximumEfaInterfaces")  # fmt: skip
# type, GPU, count, vCPUs, GiB, GPU's GiB, $/h, spot $/h. GCP sells its GPUs apart from the machines that hold them.
GCP = (
    ("n2-standard-8", "", 0, 8, 32, 0, 0.3885, 0.0942),
    ("g2-standard-4", "", 0, 4, 16, 0, 0.1467, 0.0587),
    ("", "L4", 1, "", "", 24, 0.5600, 0.2240),
    ("a2-highgpu-1g", "", 0, 12, 85, 0, 0.7392, 0.2957),
    ("", "A100", 1, "", "", 40, 2.9339, 1.1735),
    ("a2-ultragpu-1g", "", 0, 12, 170, 0, 1.1214, 0.4486),
    ("", "A100-80GB", 1, "", "", 80, 3.9473, 1.5789),
    ("a3-highgpu-1g", "", 0, 26, 234, 0, 1.2587, 0.3776),
    ("", "H100", 1, "", "", 80, 9.8025, 2.9408),
)
LAMBDA = (
    ("gpu_1x_a10", "A10", 1, 30, 200, 24, 0.75, None),
    ("gpu_1x_a100_sxm4", "A100", 1, 30, 200, 40, 1.29, None),
    ("gpu_1x_h100_pcie", "H100", 1, 26, 200, 80, 2.49, None),
)


def write(home: Path, regions: Iterable[str]) -> None:
    """Writes the catalogs into `home`, where a SkyPilot client and its API server look for them."""
    root = home / ".sky" / "catalogs" / "v8"
    aws = _aws(list(regions))
    gcp = [_row(r, region, f"{region}-a") for r in GCP for region in ("us-central1", "europe-west4")]
    lambda_ = [_row(r, region, "") for r in LAMBDA for region in ("us-east-1", "us-west-1")]
    gpus: dict[str, float] = {}
    clouds: dict[str, list[str]] = {}
    for cloud, rows in (("AWS", aws), ("GCP", gcp), ("Lambda", lambda_)):
        _table(root / cloud.lower() / "vms.csv", VMS, [[row[key] for key in VMS] for row in rows])
        for row in rows:
            if name := row["AcceleratorName"]:
                clouds[name] = sorted({*clouds.get(name, ()), cloud})
                gpus[name] = _info(row["GpuInfo"])
    images = [
        [f"skypilot:{tag}", region, "ubuntu", "22.04", IMAGE, "20250101", ""]
        for region in regions
        for tag in IMAGE_TAGS
    ]
    _table(
        root / "aws/images.csv", ("Tag", "Region", "OS", "OSVersion", "ImageId", "CreationDate", "BaseImageId"), images
    )
    _table(root / "aws/instance_quota_mapping.csv", ("InstanceType", "OnDemandInstanceCode", "SpotInstanceCode"), [])
    _table(root / "gcp/images.csv", ("Tag", "Region", "OS", "OSVersion", "ImageId", "CreationDate"), [])
    _table(root / "gcp/accelerator_quota_mapping.csv", ("Accelerator", "OnDemandInstanceCode", "SpotInstanceCode"), [])
    names = [[name, ",".join(on)] for name, on in sorted(clouds.items())]
    _table(root / "common/accelerators.csv", ("AcceleratorName", "Clouds"), names)
    memory = [[name, "NVIDIA", round(gib)] for name, gib in sorted(gpus.items())]
    _table(root / "common/metadata.csv", ("GPU", "Manufacturer", "MemoryGB"), memory)


def _aws(regions: list[str]) -> list[dict[str, Any]]:
    data = Path(moto.__file__).parent / "ec2" / "resources"
    types = json.loads(gzip.decompress((data / "instance_types.json.gz").read_bytes()))
    rows = []
    for region in regions:
        offers = json.loads(
            gzip.decompress((data / f"instance_type_offerings/availability-zone/{region}.json.gz").read_bytes())
        )
        zone_ids = {zone.name: zone.zone_id for zone in RegionsAndZonesBackend.zones[region]}
        for offer in sorted(offers, key=lambda o: (o["InstanceType"], o["Location"])):
            kind, zone = offer["InstanceType"], zone_ids.get(offer["Location"])
            if not kind.startswith(FAMILIES) or zone is None or kind not in types:
                continue
            spec = types[kind]
            gpu = (spec.get("GpuInfo") or {"Gpus": [None]})["Gpus"][0]
            cpus, count = spec["VCpuInfo"]["DefaultVCpus"], gpu["Count"] if gpu else 0
            disk = (spec.get("InstanceStorageInfo") or {}).get("Disks", [{}])[0]
            price = PRICES.get(kind, round(cpus * 0.048 + count * 1.5, 4))
            rows.append(
                dict.fromkeys(VMS, "")
                | {
                    "InstanceType": kind,
                    "AcceleratorName": GPU_NAMES.get(kind, gpu["Name"]) if gpu else "",
                    "AcceleratorCount": float(count) if gpu else "",
                    "vCPUs": float(cpus),
                    "MemoryGiB": spec["MemoryInfo"]["SizeInMiB"] / 1024,
                    "GpuInfo": repr(spec["GpuInfo"]) if gpu else "",
                    "Price": price,
                    "SpotPrice": round(price * 0.35, 4),
                    "Region": region,
                    "AvailabilityZone": zone,
                    "Arch": spec["ProcessorInfo"]["SupportedArchitectures"][0],
                    "LocalDiskType": disk.get("Type", ""),
                    "NVMeSupported": bool(disk),
                    "LocalDiskSize": disk.get("SizeInGB", ""),
                    "LocalDiskCount": disk.get("Count", ""),
                }
            )
    return rows


def _row(spec: tuple[Any, ...], region: str, zone: str) -> dict[str, Any]:
    kind, gpu, count, cpus, memory, gpu_memory, price, spot = spec
    info = {
        "Gpus": [
            {"Name": gpu, "Manufacturer": "NVIDIA", "Count": count, "MemoryInfo": {"SizeInMiB": gpu_memory * 1024}}
        ]
    }
    return dict.fromkeys(VMS, "") | {
        "InstanceType": kind,
        "AcceleratorName": gpu,
        "AcceleratorCount": float(count) if gpu else "",
        "vCPUs": cpus,
        "MemoryGiB": memory,
        "GpuInfo": repr(info) if gpu else "",
        "Price": price,
        "SpotPrice": "" if spot is None else spot,
        "Region": region,
        "AvailabilityZone": zone,
    }


def _info(gpu_info: str) -> float:
    return float(ast.literal_eval(gpu_info)["Gpus"][0]["MemoryInfo"]["SizeInMiB"]) / 1024


def _table(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        csv.writer(f).writerows([list(header), *rows])


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2:])
