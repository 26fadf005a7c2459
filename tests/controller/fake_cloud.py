"""A cloud, the way to its machines, a ledger and a clock in memory, scripted, for the reconcile loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from art_sky import __version__
from art_sky.config import Limits
from art_sky.controller.link import LinkStatus
from art_sky.controller.provider import Machine, NodeOrder, Offer, Seen, Wanted
from art_sky.controller.reconcile import Reconciler
from art_sky.controller.registry import Registry
from art_sky.controller.rented import LaunchRequest, Node, RentedCluster
from art_sky.errors import (
    CloudError,
    LaunchFailed,
    NoCapacity,
    NoCredentials,
    NoQuota,
    NotOurs,
    ProviderUnavailable,
    ServerUnreachable,
    StoreError,
)
from art_sky.node.records import NodeConfig, NodeLimits, WatchdogState
from art_sky.schemas import LeaseStatus

T = TypeVar("T")
OFFERS = [
    Offer("aws", "us-east-1", "g5.xlarge", {"A10G": 1}, False, 1.0),
    Offer("gcp", "us-central1", "a2-highgpu-1g", {"A100": 1}, False, 3.0),
]


class Crash(BaseException):
    """The controller is killed here."""


class Fuse:
    """Kills the controller before or after the n-th operation from now."""

    def __init__(self) -> None:
        self.left: int | None = None

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Crash


class FakeClock:
    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def now(self) -> float:
        return self.time


class Never:
    """A call that does not end until `finish`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._done = call, False
        self._value: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._done

    def finish(self) -> None:
        try:
            self._value = self._call()
        except Exception as e:
            self._error = e
        self._done = True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class InlineCalls:
    """Calls without threads. A launch whose script begins with `hang` is kept in `hanging`."""

    def __init__(self, provider: FakeProvider) -> None:
        self._provider = provider
        self.hanging: list[Never] = []

    def begin(self, call: Callable[[], T], name: str) -> Any:
        made = Never(call)
        if self._provider.script and self._provider.script[0] == "hang":
            self._provider.script.pop(0)
            self.hanging.append(made)
        else:
            made.finish()
        return made

    def within(self, seconds: float, what: str, call: Callable[[], T]) -> T:
        return call()


@dataclass
class FakeMachine:
    order: NodeOrder
    born: float
    seen: Seen = "running"
    ending_since: float | None = None
    died: float | None = None
    reason: str | None = None
    secrets: int = 0


class FakeProvider:
    """`script`: one word a launch: ok, none (no capacity), quota, keyless (no login), taken (a stranger has the name),
    created (an error although it was created), died (the provider's server, after that), hang, broken.
    `end_failures`: so many calls of `end` fail. `asks_fail`: `find` and `list` fail while it is set."""

    shares_files = False

    def __init__(self, clock: FakeClock, fuse: Fuse) -> None:
        self._clock, self._fuse = clock, fuse
        self.machines: dict[str, FakeMachine] = {}
        self.script: list[str] = []
        self.end_failures = 0
        self.asks_fail = False
        self.asked = 0  # calls of `find`
        self.ends: list[str] = []
        self.launched: list[NodeOrder] = []
        self.own_end = True  # machines end themselves at their limits, as watchdog and guard see to

    def check(self) -> dict[str, str | None]:
        return {"aws": None}

    def offers(self, wanted: Wanted) -> list[Offer]:
        return OFFERS

    def launch(self, order: NodeOrder, progress: Callable[[str, str], None]) -> Machine:
        self._fuse.burn()
        self.launched.append(order)
        what = self.script.pop(0) if self.script else "ok"
        progress("provision", "asking for a machine")
        if what == "none":
            raise NoCapacity(f"{order.offer.region} has no {order.offer.instance_type} now")
        if what == "quota":
            raise NoQuota("VcpuLimitExceeded; ask your cloud for more")
        if what == "keyless":
            raise NoCredentials("no usable credentials: none found; run `sky check`", untouched=True)
        if what == "taken":
            raise NotOurs("there is a machine already; it is left alone, see `sky status`", untouched=True)
        if what == "broken":
            raise LaunchFailed("the cloud answered 500; nothing was made")
        self.machines[order.config.node] = FakeMachine(order, self._clock.now())
        self._fuse.burn()
        if what == "created":
            raise LaunchFailed("the cloud answered 500")
        if what == "died":
            raise ProviderUnavailable("SkyPilot's server does not answer; run `sky api start`, then try again")
        progress("setup", "installing")
        return self.find(order.config.node)

    def find(self, node: str) -> Machine:
        self._fuse.burn()
        self.asked += 1
        if self.asks_fail:
            raise CloudError("the cloud does not answer")
        self._age()
        m = self.machines.get(node)
        if m is None or m.seen == "absent":
            return Machine(node, "absent", "aws")
        return Machine(
            node, m.seen, m.order.offer.cloud, instance=f"i-{node}", host="127.0.0.1", user="u", key_file="k"
        )

    def list(self) -> list[Machine]:
        return [self.find(name) for name in self.machines]

    def end(self, node: str) -> None:
        self._fuse.burn()
        self.ends.append(node)
        if self.end_failures > 0 or self.asks_fail:
            self.end_failures = max(self.end_failures - 1, 0)
            raise CloudError("the cloud answered 503")
        self.vanish(node, "asked", seconds=10)
        self._fuse.burn()

    def vanish(self, node: str, reason: str | None = None, seconds: float = 0.0) -> None:
        """Begins to end; absent after `seconds`."""
        m = self.machines.get(node)
        if m is not None and m.seen == "running":
            m.seen, m.ending_since, m.reason = "ending", self._clock.now() + seconds, reason
        self._age()

    def seen(self, node: str) -> Seen:
        """The truth, whoever may be asked."""
        self._age()
        return self.machines[node].seen if node in self.machines else "absent"

    def alive(self) -> list[str]:
        self._age()
        return [name for name, m in self.machines.items() if m.seen != "absent"]

    def bill(self) -> float:
        self._age()
        return sum(
            ((m.died or self._clock.now()) - m.born) / 3600 * m.order.offer.price for m in self.machines.values()
        )

    def _age(self) -> None:
        now = self._clock.now()
        for m in self.machines.values():
            limits = m.order.config.limits
            until = m.order.config.billed_from_unix + limits.max_hours * 3600
            why = "max_hours"
            if limits.budget is not None:
                by_budget = m.order.config.billed_from_unix + limits.budget / m.order.offer.price * 3600
                if by_budget < until:
                    until, why = by_budget, "budget"
            until += limits.flush_minutes * 60 + 60
            if self.own_end and m.seen == "running" and now >= until:
                m.seen, m.ending_since, m.reason = "ending", until, why
            if m.seen == "ending" and m.ending_since is not None and now >= m.ending_since:
                m.seen, m.died = "absent", max(m.ending_since, m.born)

    def _of(self, machine: Machine) -> FakeMachine:
        m = self.machines.get(machine.node)
        self._age()
        if m is None or m.seen != "running":
            raise ServerUnreachable("no route to host; see `art-sky status`")
        return m


@dataclass
class FakeLink:
    """The network to the machines. `cut`: nothing comes through; `version`: what the server says, None for nothing."""

    provider: FakeProvider
    fuse: Fuse
    cut: bool = False
    version: str | None = __version__
    refused: bool = False
    watchdogs: dict[str, WatchdogState] = field(default_factory=dict)
    not_flushed: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    asked_models: int = 0
    leases: dict[str, LeaseStatus] = field(default_factory=dict)
    to: dict[str, Machine] = field(default_factory=dict)

    def connect(self, cluster: RentedCluster, machine: Machine) -> None:
        self.to[cluster.id] = machine

    def close(self, cluster: RentedCluster) -> None:
        self.to.pop(cluster.id, None)

    def status(self, cluster: RentedCluster) -> LinkStatus:
        machine = self.to.get(cluster.id)
        if machine is None:
            return LinkStatus("closed")
        if self.refused:
            return LinkStatus("refused", "the host key changed")
        return LinkStatus("connecting", "connection refused") if self._unreachable(machine) else LinkStatus("open")

    def health(self, cluster: RentedCluster) -> str | None:
        self.fuse.burn()
        return self.version if self.status(cluster).state == "open" else None

    def models(self, cluster: RentedCluster) -> dict[str, LeaseStatus | None]:
        self.asked_models += 1
        return {name: self.leases.get(name) for name in self.served}

    def watchdog(self, machine: Machine) -> WatchdogState:
        self.fuse.burn()
        self._reach(machine)
        return self.watchdogs.get(machine.node, state("serving"))

    def log(self, machine: Machine) -> str:
        self._reach(machine)
        return f"the log of {machine.node}"

    def send_secrets(self, cluster: RentedCluster, machine: Machine) -> None:
        self.fuse.burn()
        self._reach(machine).secrets += 1

    def send_limits(self, machine: Machine, limits: NodeLimits) -> None:
        self._reach(machine)
        self.calls.append("limits")

    def send_end(self, machine: Machine) -> None:
        self.fuse.burn()
        self._reach(machine)
        self.calls.append("end")
        self.watchdogs[machine.node] = state("ended", ending="asked", not_flushed=self.not_flushed)

    def _unreachable(self, machine: Machine) -> bool:
        return self.cut or self.provider.seen(machine.node) != "running"

    def _reach(self, machine: Machine) -> FakeMachine:
        if self.cut:
            raise ServerUnreachable("no route to host; see `art-sky status`")
        return self.provider._of(machine)


class FakeLedger:
    def __init__(self, provider: FakeProvider) -> None:
        self.provider = provider
        self.broken = False
        self.closed: dict[str, str] = {}
        self.logs: dict[str, str] = {}

    def reason(self, cluster: RentedCluster, node: Node) -> str | None:
        if self.broken:
            raise StoreError("the bucket does not answer; try again")
        m = self.provider.machines.get(node.name)
        return m.reason if m is not None else None

    def close(self, cluster: RentedCluster, node: Node, closed: float, reason: str) -> None:
        if self.broken:
            raise StoreError("the bucket does not answer; try again")
        self.closed[node.name] = reason

    def keep_log(self, cluster: RentedCluster, node: Node, text: str) -> None:
        if self.broken:
            raise StoreError("the bucket does not answer; try again")
        self.logs[node.name] = text


class FakeCredentials:
    """`kept` is what the node is sent, `source` what is found where it came from, or the error of looking there."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.source: dict[str, str] | Exception = {}
        self.asked = 0

    def current(self, cluster: RentedCluster) -> dict[str, str]:
        return self.kept

    def fresh(self, cluster: RentedCluster) -> dict[str, str]:
        self.asked += 1
        if isinstance(self.source, Exception):
            raise self.source
        return self.source

    def keep(self, cluster: RentedCluster, store_env: dict[str, str]) -> None:
        self.kept = store_env


class FakeWorld:
    """Everything together, and the controller that can be killed and started again."""

    def __init__(self, path: Any, **limits: Any) -> None:
        self.path = path
        self.fuse, self.clock = Fuse(), FakeClock()
        self.provider = FakeProvider(self.clock, self.fuse)
        self.ledger = FakeLedger(self.provider)
        self.credentials = FakeCredentials()
        self.limits = Limits(**limits)
        self.start()

    def start(self) -> None:
        """A new controller on the same registry; whatever the old one was doing is cut off."""
        self.registry = FusedRegistry(self.path, self.fuse)
        self.link = FakeLink(self.provider, self.fuse)
        self.calls = InlineCalls(self.provider)
        self.reconciler = Reconciler(
            self.registry, self.provider, self.link, self.ledger, order, self.clock, self.calls, self.credentials
        )

    def launch(self, name: str = "run", **request: Any) -> str:
        id = f"artsky-{len(self.registry.all()):08x}"
        self.registry.add(
            RentedCluster(
                name=name,
                id=id,
                wanted="up",
                created=self.clock.now(),
                request=LaunchRequest(name=name, store="s3://b/p", limits=self.limits, **request),
                plan=[asdict(o) for o in OFFERS],
                port=1,
            )
        )
        return id

    def want(self, id: str, wanted: str) -> None:
        self.registry.update(id, lambda c: c.model_copy(update={"wanted": wanted}))

    def run(self, id: str, until: Callable[[RentedCluster], bool], seconds: float = 3600.0) -> RentedCluster:
        """Steps, and lets as much time pass as each step asks for, until the condition holds."""
        end = self.clock.time + seconds
        while self.clock.time <= end:
            wait = self.reconciler.step(id)
            cluster = self.registry.get(id)
            if until(cluster):
                return cluster
            self.clock.time += 60.0 if wait is None else wait
        raise AssertionError(f"not within {seconds:.0f} s: {cluster.node} {self.texts(id)}")

    def up(self, id: str) -> RentedCluster:
        return self.run(id, lambda c: c.node is not None and c.node.state == "up")

    def over(self, id: str, seconds: float = 3600.0) -> RentedCluster:
        return self.run(id, lambda c: c.wanted == "down" and (c.node is None or c.node.state == "gone"), seconds)

    def texts(self, id: str) -> list[str]:
        return [text for _, _, text in self.registry.events(id)]


class FusedRegistry(Registry):
    def __init__(self, path: Any, fuse: Fuse) -> None:
        self.fuse = fuse
        super().__init__(path)
        self._db.execute("PRAGMA synchronous = OFF")  # these controllers are killed, the machine is not

    def update(self, id: str, change: Callable[[RentedCluster], RentedCluster]) -> RentedCluster:
        self.fuse.burn()
        changed = super().update(id, change)
        self.fuse.burn()
        return changed


def order(cluster: RentedCluster, node: Node, limits: NodeLimits) -> NodeOrder:
    config = NodeConfig(
        cluster.id, node.name, "aws", float(node.offer["price"]), False, cluster.request.store, limits,
        "art_sky.whl", __version__, [], {}, node.billed_from,
    )  # fmt: skip
    return NodeOrder(Offer(**node.offer), config, "art_sky.whl", {"art-sky": "1"})


def state(phase: str, **fields: Any) -> WatchdogState:
    return WatchdogState(boot_id="b", boottime=1.0, pid=1, phase=phase, **fields)
