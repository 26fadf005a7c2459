"""Rented clusters as the controller's registry keeps them, and the two tables that say how they may move.

A cluster has a name that the user gave, an id (`artsky-<8 hex>`) and a stable address; it is served by one node at a
time, `<id>-1`, `<id>-2` ..., each a machine at a provider. What is wanted stands in the cluster, what is there in the
node. Every record is written before the call that it announces, so that a controller which was killed finishes it.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote

from art_sky.config import Limits, Settings
from art_sky.controller.provider import Wanted
from art_sky.schemas import Wire

ClusterWanted = Literal["up", "down"]

NodeState = Literal["intended", "provisioning", "connecting", "up", "lost", "ending", "gone"]
NODE_TRANSITIONS: dict[NodeState, frozenset[NodeState]] = {
    "intended": frozenset({"provisioning", "gone"}),  # nothing was asked of a cloud yet
    # A machine may exist from here on; "gone" is for a provider that says it was not asked for one.
    "provisioning": frozenset({"connecting", "ending", "gone"}),
    "connecting": frozenset({"up", "lost", "ending"}),  # tunnel, secrets, first answer of the server
    "up": frozenset({"lost", "ending"}),
    "lost": frozenset({"up", "ending"}),  # does not answer; the provider is being asked
    "ending": frozenset({"gone"}),  # `end` was asked for, again and again until the provider says absent
    "gone": frozenset(),
}


class LaunchRequest(Settings):
    """What `art-sky launch` asks of the controller for a rented cluster; every field is shown by `--dry-run`."""

    name: str
    clouds: list[str] = []
    regions: list[str] = []
    gpus: list[str] = []
    spot: Literal["no", "only", "prefer"] = "no"
    cpus: str | None = None
    memory: str | None = None
    max_price: float | None = None
    disk_gib: int = 100
    image_id: str | dict[str, str] | None = None  # one for wherever it is, or region -> id
    node_role: str | None = None  # AWS: the instance profile; else SkyPilot's own
    # Where the credential for the store comes from, and is looked for again: a profile of this computer, or a file.
    store_profile: str | None = None
    store_credential: str | None = None
    limits: Limits = Limits()
    store: str
    server: dict[str, Any] = {}
    allow_unsafe: bool = False
    allow_cloud_key_on_node: bool = False
    keep: bool = False  # a machine whose launch failed is kept for a look, until its own limits end it

    def image_in(self, region: str) -> str | None:
        return self.image_id.get(region) if isinstance(self.image_id, dict) else self.image_id

    @property
    def store_here(self) -> str:
        """The store's URL as this computer opens it: what may reach it from a machine may from here."""
        if self.store_profile is None or not self.store.startswith("s3://"):
            return self.store
        return f"{self.store}{'&' if '?' in self.store else '?'}profile={quote(self.store_profile)}"

    def wanted(self) -> Wanted:
        regions = self.regions or (list(self.image_id) if isinstance(self.image_id, dict) else [])
        return Wanted(self.gpus, self.clouds, regions, self.spot, self.max_price, self.cpus, self.memory)


class Node(Wire):
    """One machine of a cluster, from the intent to its end."""

    name: str
    state: NodeState
    offer: dict[str, Any]  # provider.Offer
    since: float  # Unix seconds of the last move
    billed_from: float  # Unix seconds before the first cloud call
    instance: str = ""
    phase: str = ""
    phases: dict[str, float] = {}  # seconds each phase took
    reason: str | None = None  # why it ended or was lost
    closed: float | None = None  # Unix seconds when the provider said that it is gone


class RentedCluster(Wire):
    """The registry's row. The token lies in a file of its own (0600), never here."""

    name: str
    id: str
    wanted: ClusterWanted
    created: float
    request: LaunchRequest
    plan: list[dict[str, Any]]  # offers in the order in which they are tried
    next_offer: int = 0
    port: int  # of the stable address
    nodes: list[Node] = []
    error: str | None = None  # why the last launch failed, one line with the next step
    extended_hours: float = 0.0
    models: list[str] = []  # project/name of those that its server had; the next node serves them again

    @property
    def node(self) -> Node | None:
        """The newest one."""
        return self.nodes[-1] if self.nodes else None
