"""What is wanted against what is there: one small step for one cluster at a time, until both agree.

A step loads the record, looks, writes what it will do, and does it. Steps of one cluster never overlap; whatever kills
the controller between two operations, the next one goes on from the record. Memory (`Observer`) only saves questions.
"""

from __future__ import annotations

from collections.abc import Callable

from art_sky import __version__
from art_sky.controller import money
from art_sky.controller.calls import Calls
from art_sky.controller.ledger import Ledger
from art_sky.controller.link import Link
from art_sky.controller.observe import Observer, Ticks
from art_sky.controller.outcomes import described, is_refused, next_launch, offer_text, refused, told
from art_sky.controller.provider import Machine, NodeOrder, Provider
from art_sky.controller.registry import Registry, moved, with_node
from art_sky.controller.renewal import Credentials
from art_sky.controller.rented import Node, RentedCluster
from art_sky.errors import ArtSkyError, BudgetTooSmall, ServerUnreachable, StoreError
from art_sky.node.records import NodeLimits

# Seconds. The deadlines of calls; of the first a little above the provider's own:
END_SECONDS, LOG_SECONDS = 330.0, 60.0
# Between looks:
SOON, OFTEN, SELDOM = 1.0, 5.0, 15.0
# A launch that neither ends nor fails is given up after the setup limit and this.
PROVISION_SECONDS = 900.0
# A launch that was cut off may still make its machine: absence is believed when it lasts.
SETTLE_SECONDS, ABANDONED_SECONDS = 20.0, 120.0
# A tunnel that is down for this long is a lost node; one that runs and does not answer for this long is ended. Not
# counted is the time in which its provider did not answer either: then this computer had no network.
LOST_AFTER_SECONDS, SILENT_SECONDS = 20.0, 900.0
LONGEST_ASK_SECONDS = 60.0  # a lost node's provider is asked ever less often: it costs a process and 2 s of CPU
MODELS_SECONDS = 300.0  # a server that answers has so long to serve again what was served before
END_RETRY_SECONDS, END_AGAIN_SECONDS = (5.0, 10.0, 20.0, 40.0, 60.0), 60.0


Order = Callable[[RentedCluster, Node, NodeLimits], NodeOrder]


class Reconciler:
    """`step` may be called from any thread, for one cluster by one thread at a time."""

    def __init__(
        self,
        registry: Registry,
        provider: Provider,
        link: Link,
        ledger: Ledger,
        order: Order,
        clock: Ticks,
        calls: Calls,
        credentials: Credentials,
    ) -> None:
        self._registry, self._provider, self._link, self._ledger = registry, provider, link, ledger
        self._order, self._clock, self._calls = order, clock, calls
        self.seen = Observer(registry, provider, link, clock, calls, credentials)

    def step(self, id: str) -> float | None:
        """Does the next thing for a cluster; seconds until it should be called again, None when nothing is left."""
        cluster = self._registry.get(id)
        node = cluster.node
        if node is None or node.state == "gone":
            return self._without_node(cluster)
        handler = {
            "intended": self._intended,
            "provisioning": self._provisioning,
            "connecting": self._connecting,
            "up": self._up,
            "lost": self._lost,
            "ending": self._ending,
        }[node.state]
        return handler(cluster, node)

    def sweep(self) -> list[str]:
        """Ends machines that a record says are gone: a launch that was given up may have made one late.

        Returns their names. Raises CloudError.
        """
        gone = {n.name: (c, n) for c in self._registry.all() for n in c.nodes if n.state == "gone"}
        found = [m.node for m in self._provider.list() if m.node in gone and m.seen not in ("absent", "ending")]
        for name in found:
            self._note(gone[name][0], f"{name} should be gone and exists; it is ended again")
            self._provider.end(name)
        return found

    # --- one handler a state ------------------------------------------------------------------------------

    def _without_node(self, cluster: RentedCluster) -> float | None:
        now = self._clock.now()
        if cluster.wanted == "down":
            self._link.close(cluster)
            return None
        name = f"{cluster.id}-{len(cluster.nodes) + 1}"
        limits = money.node_limits(cluster, name, now)
        decision = next_launch(cluster, now, money.payable(cluster, limits))
        if decision.error is not None:
            return self._give_up(cluster, decision.error)
        if decision.wait > 0:
            return decision.wait
        offer = cluster.plan[decision.offer % len(cluster.plan)]
        try:
            money.check_useful(cluster, limits, float(offer["price"]))
        except BudgetTooSmall as e:
            return self._give_up(cluster, e.message)
        node = Node(name=name, state="intended", offer=offer, since=now, billed_from=now, phase="intended")
        self._registry.update(
            cluster.id,
            lambda c: c.model_copy(update={"nodes": [*c.nodes, node], "next_offer": decision.offer}),
        )
        self._note(cluster, f"{name}: asking for {offer_text(offer)}")
        return 0.0

    def _intended(self, cluster: RentedCluster, node: Node) -> float:
        now = self._clock.now()
        if cluster.wanted == "down":
            return self._to_gone(cluster, "asked", now)
        begun = node.model_copy(update={"billed_from": now})
        limits = money.node_limits(cluster, node.name, now)
        try:
            order = self._order(cluster, begun, limits)
        except ArtSkyError as e:
            return self._to_gone(cluster, f"launch: {e.message}", now)
        self._registry.update(cluster.id, lambda c: moved(c, "provisioning", now, billed_from=now, phase="provision"))
        live = self.seen.of(node)
        live.phase_since, live.limits = now, limits
        live.call = self._calls.begin(
            lambda: self._provider.launch(order, lambda phase, text: self._progress(cluster.id, node, phase, text)),
            f"launch {node.name}",
        )
        return 0.0

    def _provisioning(self, cluster: RentedCluster, node: Node) -> float:
        live, now = self.seen.of(node), self._clock.now()
        if cluster.wanted == "down":
            return self._to_ending(cluster, "asked")
        if node.phase == "kept":
            return self._kept(cluster, node)
        if live.call is None:
            return self._to_ending(cluster, "restarted")
        if not live.call.done():
            if now - node.since > cluster.request.limits.setup_minutes * 60 + PROVISION_SECONDS:
                return self._failed(cluster, node, f"launch: it took longer than {(now - node.since) / 60:.0f} minutes")
            return SOON
        try:
            machine = live.call.result()
        except Exception as e:  # whatever it was, a machine may exist
            reason = refused(e) if isinstance(e, ArtSkyError) else None
            if reason is None:
                return self._failed(cluster, node, f"launch: {e}")
            self._note(cluster, f"{node.name}: {e}")
            untouched = isinstance(e, ArtSkyError) and e.details.get("untouched")
            return self._to_gone(cluster, reason, now) if untouched else self._to_ending(cluster, reason)
        live.machine = machine
        phases = {**node.phases, node.phase: round(now - live.phase_since, 1)}
        live.phase_since = now
        self._registry.update(
            cluster.id,
            lambda c: moved(c, "connecting", now, instance=machine.instance, phases=phases, phase="connect"),
        )
        self._note(cluster, f"{node.name}: {machine.instance or 'the machine'} is there; connecting")
        return 0.0

    def _connecting(self, cluster: RentedCluster, node: Node) -> float:
        live, now = self.seen.of(node), self._clock.now()
        if cluster.wanted == "down":
            return self._to_ending(cluster, "asked")
        if node.phase == "kept":
            return self._kept(cluster, node)
        if now - node.since > cluster.request.limits.setup_minutes * 60 + 120:
            why = live.problem or self._link.status(cluster).problem or "the server never answered"
            return self._failed(cluster, node, f"health: {why}")
        machine = self.seen.machine(node)
        if machine is None or machine.seen in ("pending", "running"):
            if machine is not None and machine.host is not None:
                return self._come_up(cluster, node, machine)
            return OFTEN
        return self._ended_by_itself(cluster, node, machine)

    def _come_up(self, cluster: RentedCluster, node: Node, machine: Machine) -> float:
        live, now = self.seen.of(node), self._clock.now()
        self._link.connect(cluster, machine)
        status = self._link.status(cluster)
        live.problem = status.problem
        if status.state == "refused":
            return self._failed(cluster, node, f"health: {status.problem}")
        if status.state != "open":
            if live.down_since is None:
                live.down_since = now
            elif now - live.down_since > LOST_AFTER_SECONDS:
                live.machine, live.down_since = None, None  # asked again: the machine may be gone
            return SOON
        live.down_since = None
        try:
            if not live.secrets_sent:
                if not self.seen.send_secrets(cluster, node, machine):
                    return SOON
                live.secrets_sent = True
            version = self._link.health(cluster)
            if version is None:
                return self._still_starting(cluster, node, machine)
            if version != __version__:
                return self._failed(
                    cluster, node, f"health: the server is art-sky {version} and this is {__version__}; launch again"
                )
            live.healthy = now if live.healthy is None else live.healthy
            # Until then an agent would be told that there is no such model, and not ask again.
            missing = set(cluster.models) - set(self._link.models(cluster)) if cluster.models else set()
            if missing and now - live.healthy < MODELS_SECONDS:
                live.problem = f"waiting for {', '.join(sorted(missing))}"
                return SOON
        except ServerUnreachable as e:
            live.problem = e.message
            return OFTEN
        took = round(now - node.billed_from, 1)
        phases = {**node.phases, node.phase: round(now - live.phase_since, 1), "ready": took}
        self._registry.update(
            cluster.id,
            lambda c: moved(c, "up", now, phases=phases, phase="ready").model_copy(update={"error": None}),
        )
        live.contact = now
        self._note(cluster, f"{node.name}: ready after {took:.0f} s")
        return 0.0

    def _up(self, cluster: RentedCluster, node: Node) -> float:
        live, now = self.seen.of(node), self._clock.now()
        if cluster.wanted == "down":
            return self._to_ending(cluster, "asked", flush=True)
        deadline, why = money.controller_deadline(cluster, node, now)
        if now > deadline:
            return self._to_ending(cluster, why, flush=True)
        machine = self.seen.machine(node)
        if machine is not None and machine.seen == "running":
            self._link.connect(cluster, machine)
        status = self._link.status(cluster)
        live.problem = status.problem
        if status.state != "open":
            live.down_since = now if live.down_since is None else live.down_since
            if status.state == "refused" or now - live.down_since > LOST_AFTER_SECONDS:
                live.next_ask, live.answers_since = now, None
                self._registry.update(cluster.id, lambda c: moved(c, "lost", now))
                self._note(cluster, f"{node.name}: lost ({status.problem or 'the tunnel is down'})")
            return SOON
        live.down_since = None
        if machine is not None and now - live.looked >= SELDOM:
            self.seen.look(cluster, node, machine)
        state = live.watchdog
        if state is not None and state.phase == "ended":
            return self._to_ending(cluster, told(state.ending))
        return OFTEN

    def _lost(self, cluster: RentedCluster, node: Node) -> float:
        live, now = self.seen.of(node), self._clock.now()
        if cluster.wanted == "down":
            return self._to_ending(cluster, "asked")
        deadline, why = money.controller_deadline(cluster, node, now)
        if now > deadline:
            return self._to_ending(cluster, why)
        if now >= live.next_ask:
            live.next_ask = now + min(max(OFTEN, (now - node.since) / 6), LONGEST_ASK_SECONDS)
            live.machine = None
            answers = self.seen.machine(node) is not None
            live.answers_since = (live.answers_since or now) if answers else None
        machine = live.machine
        if machine is None:
            return OFTEN  # the provider cannot be asked, so that nothing is known
        if machine.seen not in ("running", "pending"):
            return self._ended_by_itself(cluster, node, machine)
        self._link.connect(cluster, machine)
        status = self._link.status(cluster)
        live.problem = status.problem
        if status.state == "open" and self._link.health(cluster) is not None:
            live.down_since, live.contact = None, now
            self._registry.update(cluster.id, lambda c: moved(c, "up", now))
            self._note(cluster, f"{node.name}: back")
            return 0.0
        if now - max(node.since, live.answers_since or now) > SILENT_SECONDS:
            return self._to_ending(cluster, f"silent: {status.problem or 'no answer'}")
        return OFTEN

    def _ending(self, cluster: RentedCluster, node: Node) -> float:
        live, now = self.seen.of(node), self._clock.now()
        live.given_up = True
        if node.phase == "flushing":
            if not self._flushed(cluster, node):
                return 2.0
            self._registry.update(cluster.id, lambda c: with_node(c, phase="ending"))
        if now >= live.next_end:
            self._end(cluster, node)
        try:
            machine = self.seen.ask(node)
        except ArtSkyError as e:
            live.problem = f"whether it is gone is not known: {e.message}"
            return OFTEN
        if machine.seen != "absent":
            live.seen, live.absent_since = True, None
            if machine.seen != "ending":  # it came after it was ended, or was not touched
                live.next_end = min(live.next_end, now + END_RETRY_SECONDS[0])
            return OFTEN
        live.absent_since = now if live.absent_since is None else live.absent_since
        settle = 0.0 if node.instance else SETTLE_SECONDS
        if live.call is not None and not live.call.done():
            settle = ABANDONED_SECONDS
        left = live.absent_since + settle - now
        if left > 0:
            return left
        return self._to_gone(cluster, node.reason or "asked", now)

    # --- parts of them ------------------------------------------------------------------------------------

    def _end(self, cluster: RentedCluster, node: Node) -> None:
        live = self.seen.of(node)
        try:
            self._calls.within(END_SECONDS, f"ending {node.name}", lambda: self._provider.end(node.name))
        except ArtSkyError as e:
            wait = END_RETRY_SECONDS[min(live.failed_ends, len(END_RETRY_SECONDS) - 1)]
            live.failed_ends += 1
            live.problem = f"ending it failed {live.failed_ends} times ({e.message}); tried again in {wait:.0f} s"
            self._note(cluster, f"{node.name}: {live.problem}")
        else:
            wait, live.problem = END_AGAIN_SECONDS, None
        live.next_end = self._clock.now() + wait

    def _flushed(self, cluster: RentedCluster, node: Node) -> bool:
        """Whether the node has flushed, or cannot, or had its time."""
        live, now = self.seen.of(node), self._clock.now()
        if now - node.since > cluster.request.limits.flush_minutes * 60 + 30:
            self._note(cluster, f"{node.name}: did not say in time that it had flushed; what it had not is not known")
            return True
        machine = self.seen.machine(node)
        if machine is None or machine.seen != "running":
            return machine is not None
        try:
            if not live.end_sent:
                self._link.send_end(machine)
                live.end_sent = True
            state = live.watchdog = self._link.watchdog(machine)
        except ServerUnreachable as e:
            live.problem = f"waiting for its last flush: {e.message}"
            return False
        if state.phase != "ended":
            live.problem = "waiting for its last flush"
            return False
        lost = ", ".join(state.not_flushed)
        self._note(cluster, f"{node.name}: {'not flushed: ' + lost if lost else 'all is in the store'}")
        if lost:
            reason = f"{(node.reason or 'asked').partition(':')[0]}: not flushed: {lost}"
            self._registry.update(cluster.id, lambda c: with_node(c, reason=reason))
        return True

    def _still_starting(self, cluster: RentedCluster, node: Node, machine: Machine) -> float:
        live, now = self.seen.of(node), self._clock.now()
        if now - live.looked >= OFTEN:
            self.seen.look(cluster, node, machine)
        state = live.watchdog
        if state is not None:
            if state.ending is not None:
                return self._failed(cluster, node, told(state.ending))
            if state.phase != node.phase:
                self._progress(cluster.id, node, state.phase, state.phase)
        return SOON

    def _kept(self, cluster: RentedCluster, node: Node) -> float:
        """A failed launch whose machine the user wanted to keep for a look."""
        live, now = self.seen.of(node), self._clock.now()
        deadline, why = money.controller_deadline(cluster, node, now)
        live.machine = None
        machine = self.seen.machine(node)
        if now > deadline or (machine is not None and machine.seen not in ("running", "pending")):
            return self._to_ending(cluster, node.reason or why)
        return SELDOM

    def _ended_by_itself(self, cluster: RentedCluster, node: Node, machine: Machine) -> float:
        """The machine is gone or going, and it was not the controller that ended it: why?"""
        live, now = self.seen.of(node), self._clock.now()
        if live.watchdog is not None and live.watchdog.ending is not None:
            return self._to_ending(cluster, told(live.watchdog.ending))
        try:
            reason = self._ledger.reason(cluster, node)
        except StoreError as e:
            # One that answered a moment ago did not end for want of work or of a controller; of another nothing
            # is known, and money is not spent on a guess.
            quiet = min(cluster.request.limits.orphan_minutes, cluster.request.limits.idle_minutes) * 60
            recent = live.contact is not None and now - live.contact < quiet
            return self._to_ending(cluster, "vanished" if recent else f"unknown: {e.message}")
        return self._to_ending(cluster, told(reason) if reason else f"vanished: the provider says {machine.seen}")

    def _failed(self, cluster: RentedCluster, node: Node, reason: str) -> float:
        self._keep_log(cluster, node)
        if cluster.request.keep and not any("ready" in n.phases for n in cluster.nodes):
            self._registry.update(
                cluster.id,
                lambda c: with_node(c, phase="kept", reason=reason).model_copy(
                    update={"error": f"{described(reason)}; the machine is kept until `art-sky down {c.name}`"}
                ),
            )
            self._note(cluster, f"{node.name}: {described(reason)}; kept")
            return SELDOM
        return self._to_ending(cluster, reason)

    def _keep_log(self, cluster: RentedCluster, node: Node) -> None:
        """Of a machine on which no server was started: nothing there brings its log into the store."""
        live = self.seen.of(node)
        machine = live.machine
        if machine is None or machine.host is None or (live.watchdog is not None and live.watchdog.server_starts):
            return
        try:
            text = self._calls.within(LOG_SECONDS, f"the log of {node.name}", lambda: self._link.log(machine))
            self._calls.within(LOG_SECONDS, "the store", lambda: self._ledger.keep_log(cluster, node, text))
        except ArtSkyError as e:
            self._note(cluster, f"{node.name}: its log could not be kept: {e.message}")
        else:
            self._note(cluster, f"{node.name}: its log is kept for `art-sky logs {cluster.name}`")

    def _to_ending(self, cluster: RentedCluster, reason: str, *, flush: bool = False) -> float:
        phase = "flushing" if flush else "ending"
        changed = self._registry.update(
            cluster.id, lambda c: moved(c, "ending", self._clock.now(), reason=reason, phase=phase)
        )
        assert changed.node is not None
        if not flush:
            self._link.close(cluster)
        self._note(cluster, f"{changed.node.name}: ending ({described(reason)})")
        return 0.0

    def _to_gone(self, cluster: RentedCluster, reason: str, now: float) -> float:
        node = cluster.node
        assert node is not None
        live = self.seen.of(node)
        # Where nothing was asked for, or the provider had none and none was ever seen, nothing was billed.
        unbilled = node.state in ("intended", "provisioning") or (is_refused(reason) and not live.seen)
        billed_from = now if unbilled else node.billed_from
        self._link.close(cluster)
        if not unbilled:
            try:
                self._ledger.close(cluster, node, now, reason.partition(":")[0])
            except StoreError as e:
                self._note(cluster, f"{node.name}: its entry of the ledger in the store stays open: {e.message}")
        self._registry.update(
            cluster.id,
            lambda c: moved(c, "gone", now, reason=reason, closed=now, billed_from=billed_from, phase="gone"),
        )
        self._note(cluster, f"{node.name}: gone ({described(reason)})")
        if live.call is None or live.call.done():
            self.seen.forget(node)
        return 0.0

    def _give_up(self, cluster: RentedCluster, error: str) -> float:
        self._registry.update(cluster.id, lambda c: c.model_copy(update={"wanted": "down", "error": error}))
        self._note(cluster, error)
        return 0.0

    def _progress(self, id: str, node: Node, phase: str, text: str) -> None:
        """Called from the launch's thread too; raises there when the launch is no longer wanted."""
        live, now = self.seen.of(node), self._clock.now()
        if live.given_up:
            raise ServerUnreachable(f"the launch of {node.name} was given up; it is being ended")

        def change(c: RentedCluster) -> RentedCluster:
            current = c.node
            if current is None or current.name != node.name or current.phase in (phase, "kept"):
                return c
            phases = {**current.phases, current.phase: round(now - live.phase_since, 1)}
            live.phase_since = now
            return with_node(c, phase=phase, phases=phases)

        self._note(self._registry.update(id, change), f"{node.name}: {text}")

    def _note(self, cluster: RentedCluster, text: str) -> None:
        self._registry.note(cluster.id, self._clock.now(), " ".join(text.split()))
