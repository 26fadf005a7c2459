"""A stand-in for SkyPilot: what `sky_worker` and `sky_catalog` call of it. `STUB_SKYPILOT` is JSON: `clusters` (names
that its state has), `launch` and `status` ([name of an error, its text] that they raise). Calls go to `$STUB_CALLS`."""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sky import exceptions


class StatusRefreshMode(enum.Enum):
    NONE = "none"
    FORCE = "force"


class Task:
    @classmethod
    def from_yaml_config(cls, config: dict[str, Any]) -> Task:
        return cls()


def get(request: Any) -> Any:
    return request


def status(names: list[str] | None, refresh: StatusRefreshMode, _include_credentials: bool = False) -> Any:
    _call("status")
    made = {"handle": None, "credentials": None, "status": SimpleNamespace(value="UP"), "cloud": "gcp", "region": "r"}
    return [{"name": n, "labels": {}, **made} for n in _stub().get("clusters", []) if names is None or n in names]


def launch(task: Task, cluster_name: str) -> str:
    _call("launch")
    return "r-1"


def stream_and_get(request: Any, output_stream: Any) -> None:
    output_stream.write("Launching on GCP\n")


def down(name: str) -> str:
    _call("down")
    return "r-2"


def api_cancel(requests: list[str], silent: bool) -> None:
    _call("api_cancel")


def _stub() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ.get("STUB_SKYPILOT", "{}"))
    return found


def _call(name: str) -> None:
    with Path(os.environ["STUB_CALLS"]).open("a") as file:
        file.write(f"{name}\n")
    if name in _stub():
        kind, text = _stub()[name]
        raise getattr(exceptions, kind)(text)
