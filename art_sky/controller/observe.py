"""What is there: machines as their provider says, and what a node tells of itself. Memory of one controller."""

from __future__ import annotations

from typing import Any, Protocol

from art_sky.controller import money
from art_sky.controller.calls import Calls
from art_sky.controller.link import Link
from art_sky.controller.live import Live
from art_sky.controller.provider import Machine, Provider
from art_sky.controller.registry import Registry
from art_sky.controller.renewal import Credentials, Renewals
from art_sky.controller.rented import Node, RentedCluster
from art_sky.errors import ArtSkyError
from art_sky.node.records import WatchdogState
from art_sky.schemas import LeaseStatus

FIND_SECONDS = 150.0  # a little above the provider's own deadline


class Ticks(Protocol):
    def now(self) -> float: ...


class Observer:
    """Like the reconciler that has it: any thread, for one cluster one at a time. What was seen may be read by all."""

    def __init__(
        self, registry: Registry, provider: Provider, link: Link, clock: Ticks, calls: Calls, credentials: Credentials
    ) -> None:
        self._registry, self._provider, self._link = registry, provider, link
        self._clock, self._calls = clock, calls
        self._renewals = Renewals(credentials, clock, calls)
        self._live: dict[str, Live] = {}

    # --- as last seen -------------------------------------------------------------------------------------

    def watchdog(self, node: Node) -> WatchdogState | None:
        return self._live[node.name].watchdog if node.name in self._live else None

    def running(self, node: Node) -> Machine | None:
        return self._live[node.name].machine if node.name in self._live else None

    def leases(self, node: Node) -> dict[str, LeaseStatus]:
        """By project/name, of the models that its server trains."""
        return self._live[node.name].leases if node.name in self._live else {}

    def has_limits(self, cluster: RentedCluster, node: Node) -> bool:
        """Whether the node was told the limits as they stand."""
        live = self._live.get(node.name)
        return live is not None and live.limits == money.node_limits(cluster, node.name, self._clock.now())

    def has_credential(self, node: Node, store_env: dict[str, str]) -> bool:
        """Whether the node was sent this one."""
        return node.name in self._live and self._live[node.name].credential_sent == store_env

    def credential(self, node: Node) -> dict[str, Any] | None:
        """`expires` (Unix seconds, None where it says nothing) and `problem` of the credential for the store; None
        where the node has none."""
        live = self._live.get(node.name)
        if live is None or live.credential is None:
            return None
        return {"expires": live.credential_end, "problem": live.credential_problem}

    def problem(self, node: Node) -> str | None:
        """What a teardown or a connection is waiting for, one line."""
        return self._live[node.name].problem if node.name in self._live else None

    # --- looking ------------------------------------------------------------------------------------------

    def of(self, node: Node) -> Live:
        return self._live.setdefault(node.name, Live())

    def forget(self, node: Node) -> None:
        self._live.pop(node.name, None)

    def ask(self, node: Node) -> Machine:
        """The provider, now. Raises CloudError when it cannot be asked."""
        return self._calls.within(FIND_SECONDS, "the provider", lambda: self._provider.find(node.name))

    def machine(self, node: Node) -> Machine | None:
        """The node's machine; None while the provider cannot be asked."""
        live = self.of(node)
        if live.machine is None:
            try:
                live.machine = self.ask(node)
            except ArtSkyError as e:
                live.problem = e.message
                return None
            if live.machine.seen == "pending":
                found, live.machine = live.machine, None  # its address is not known yet
                return found
        return live.machine

    def send_secrets(self, cluster: RentedCluster, node: Node, machine: Machine) -> bool:
        """False while a fresh credential for them is waited for. Raises ServerUnreachable."""
        live = self.of(node)
        self._renewals.look(cluster, node, live, lambda text: self._note(cluster, f"{node.name}: {text}"))
        if self._renewals.awaited(live):
            return False
        self._link.send_secrets(cluster, machine)
        live.credential_sent = live.credential
        return True

    def look(self, cluster: RentedCluster, node: Node, machine: Machine) -> None:
        """What the node says of itself; one that is up is told its limits where they have changed."""
        live = self.of(node)
        live.looked = self._clock.now()
        try:
            live.watchdog = self._link.watchdog(machine)
            live.contact = self._clock.now()
            limits = money.node_limits(cluster, node.name, live.contact)
            if node.state == "up" and live.limits != limits:
                self._link.send_limits(machine, limits)
                live.limits = limits
                self._note(cluster, f"{node.name}: has its limits: {limits.max_hours:.2f} h, budget {limits.budget}")
            if node.state == "up":
                self._renewals.look(cluster, node, live, lambda text: self._note(cluster, f"{node.name}: {text}"))
                if live.credential != live.credential_sent:
                    self._link.send_secrets(cluster, machine)
                    live.credential_sent = live.credential
                    self._note(cluster, f"{node.name}: has the credential for the store")
            models = self._link.models(cluster) if node.state == "up" else None
        except ArtSkyError as e:
            live.problem = e.message
            return
        if models is not None:
            live.leases = {name: lease for name, lease in models.items() if lease is not None}
            if sorted(models) != cluster.models:
                self._registry.update(cluster.id, lambda c: c.model_copy(update={"models": sorted(models)}))
        if live.watchdog.preemption_unix is not None and "preempted" not in live.said:
            live.said.add("preempted")
            self._note(cluster, f"{node.name}: the cloud takes the machine back; another is rented when it has gone")

    def _note(self, cluster: RentedCluster, text: str) -> None:
        self._registry.note(cluster.id, self._clock.now(), text)
