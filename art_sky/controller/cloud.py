"""The `Cloud` protocol: where a server runs and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from art_sky.config import ServerConfig, Settings
from art_sky.schemas import Wire

ClusterState = Literal["starting", "up", "down", "failed"]
CLUSTER_TRANSITIONS: dict[ClusterState, frozenset[ClusterState]] = {
    "starting": frozenset({"up", "failed", "down"}),
    "up": frozenset({"down", "failed"}),
    "failed": frozenset({"down"}),
    "down": frozenset(),
}


class LaunchConfig(Settings):
    """What `art-sky launch` was asked for. Money limits come with the clouds that cost money."""

    name: str
    cloud: Literal["local"] = "local"
    server: ServerConfig


class Cluster(Wire):
    """One launched server and how to reach it. The token itself stays in `token_file` (mode 0600)."""

    name: str
    cloud: str
    state: ClusterState
    base_url: str | None  # http://127.0.0.1:PORT
    token_file: str
    log_file: str
    store: str
    created: float
    details: dict[str, Any] = {}


class Cloud(Protocol):
    def launch(self, config: LaunchConfig, progress: Callable[[str], None]) -> Cluster:
        """Brings a server up and waits until it answers; on any failure and on Ctrl-C nothing is left running."""
        ...

    def list(self) -> list[Cluster]:
        """What exists, as observed now."""
        ...

    def down(self, name: str) -> Cluster:
        """Ends the server, after a flush; idempotent."""
        ...
