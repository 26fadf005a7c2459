"""The `Provider` protocol: all that the controller asks of clouds. SkyPilot is one, tests bring another.

Every method blocks, may be called from any thread, has a deadline of its own and raises a typed CloudError. Absence
is only what a provider said: a call that failed never means that a machine is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from art_sky.node.records import NodeConfig

# What a machine is, as its provider sees it now.
Seen = Literal["absent", "pending", "running", "stopped", "ending"]


@dataclass(frozen=True)
class Offer:
    """One way to rent one machine. `price` is dollars per hour, without disk and egress."""

    cloud: str
    region: str
    instance_type: str
    accelerators: dict[str, int]
    spot: bool
    price: float
    vcpus: float | None = None
    memory_gib: float | None = None
    gpu_memory_gib: float | None = None


@dataclass(frozen=True)
class Wanted:
    """What to look for. A GPU is `H100` or `H100:2`; an empty list means a machine without one."""

    gpus: list[str] = field(default_factory=list)
    clouds: list[str] = field(default_factory=list)  # empty: all that are enabled
    regions: list[str] = field(default_factory=list)
    spot: Literal["no", "only", "prefer"] = "no"
    max_price: float | None = None
    cpus: str | None = None
    memory: str | None = None


@dataclass(frozen=True)
class NodeOrder:
    """One machine to rent. `config.node` is its name at the provider; `labels` go onto it where the cloud has any."""

    offer: Offer
    config: NodeConfig
    wheel: str  # path on this machine
    labels: dict[str, str]
    disk_gib: int = 100
    image_id: str | None = None
    node_role: str | None = None
    cloud_key_on_node: bool = False  # only where the cloud has no other node-side teardown


@dataclass(frozen=True)
class Machine:
    """A machine that exists or may exist. `host_key_alias` names it for SSH: addresses are reused by strangers."""

    node: str
    seen: Seen
    cloud: str
    region: str = ""
    instance: str = ""
    instance_type: str = ""
    spot: bool = False
    host: str | None = None
    port: int = 22
    user: str = ""
    key_file: str = ""
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def host_key_alias(self) -> str:
        return self.instance or self.node


class Provider(Protocol):
    shares_files: bool  # its machines see the files of this computer, so that a folder may be the store

    def check(self) -> dict[str, str | None]:
        """Enabled clouds; a value is why one cannot be used, with the next step. Raises ProviderUnavailable."""
        ...

    def offers(self, wanted: Wanted) -> list[Offer]:
        """Cheapest first. Raises InvalidInput for a GPU that nobody has, naming near ones."""
        ...

    def launch(self, order: NodeOrder, progress: Callable[[str, str], None]) -> Machine:
        """Rents the machine and starts the watchdog on it; `progress(phase, text)`.

        Raises NoCapacity (nothing is billed, try the next offer), NoQuota, NoCredentials, or LaunchFailed (a
        machine may exist: `end` must follow). An error whose details say `untouched` came before the cloud was asked
        for a machine: nothing of that name is ours, and `end` must not follow. Interrupting it leaves what exists to
        `end`.
        """
        ...

    def find(self, node: str) -> Machine:
        """As the cloud itself says now, not from a cache. Raises ProviderUnavailable when it cannot be asked."""
        ...

    def list(self) -> list[Machine]:
        """All machines whose name or labels are ours, stopped ones and left disks included, in all enabled clouds."""
        ...

    def end(self, node: str) -> None:
        """Begins to end the machine and all that belongs to it; idempotent. `find` tells when it is gone."""
        ...

    def logs(self, node: str, follow: bool, write: Callable[[str], None]) -> None:
        """What provisioning, setup and the node's job wrote, as far as it can be had."""
        ...
