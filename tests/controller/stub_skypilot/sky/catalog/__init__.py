from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

NAMES = ("A10G", "A100", "A100-80GB", "H100", "H200", "L4", "L40S", "T4")


def list_accelerators(
    gpus_only: bool,
    clouds: list[str],
    name_filter: str = "",
    case_sensitive: bool = True,
    all_regions: bool = False,
) -> dict[str, list[Any]]:
    """One machine with one of each, at a dollar an hour."""
    found = [n for n in NAMES if re.search(name_filter, n, 0 if case_sensitive else re.IGNORECASE)]
    return {
        name: [
            SimpleNamespace(
                cloud=clouds[0], instance_type=f"box-{name}", accelerator_name=name, accelerator_count=1, cpu_count=8,
                device_memory=80.0, memory=64, price=1.0, spot_price=0.5, region="us-east-1",
            )
        ]
        for name in found
    }  # fmt: skip
