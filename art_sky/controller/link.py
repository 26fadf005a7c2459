"""The `Link` protocol: what the controller does with a node over SSH. Tests bring one without a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from art_sky.controller.provider import Machine
from art_sky.controller.rented import RentedCluster
from art_sky.node.records import NodeLimits, WatchdogState
from art_sky.schemas import LeaseStatus


@dataclass(frozen=True)
class LinkStatus:
    """`refused`: the machine at that address is not the one that was there before; nothing is sent to it."""

    state: Literal["closed", "connecting", "open", "refused"]
    problem: str | None = None


class Link(Protocol):
    """One tunnel per cluster, to its newest node. `connect` and `close` only say what is wanted and return at once;
    the other calls block, have deadlines, and raise ServerUnreachable when the node does not answer."""

    def connect(self, cluster: RentedCluster, machine: Machine) -> None:
        """Idempotent; another machine than before replaces the tunnel."""
        ...

    def close(self, cluster: RentedCluster) -> None: ...

    def status(self, cluster: RentedCluster) -> LinkStatus: ...

    def health(self, cluster: RentedCluster) -> str | None:
        """The version of the server that answers through the tunnel; None while none does."""
        ...

    def models(self, cluster: RentedCluster) -> dict[str, LeaseStatus | None]:
        """The models that the server has, by `project/name`, with the lease of those that it trains."""
        ...

    def watchdog(self, machine: Machine) -> WatchdogState: ...

    def log(self, machine: Machine) -> str:
        """The newest part of what watchdog and installation wrote there, without secrets."""
        ...

    def send_secrets(self, cluster: RentedCluster, machine: Machine) -> None: ...

    def send_limits(self, machine: Machine, limits: NodeLimits) -> None: ...

    def send_end(self, machine: Machine) -> None:
        """Asks the node to flush and end, as `asked`."""
        ...
