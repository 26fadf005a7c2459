"""The reconcile loop under every order of events, with the controller killed between any two operations.

Finally no machine exists that no record names, and none that is not wanted; the bill stays under its bound; states
move by the table only (`moved` raises otherwise).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fake_cloud import OFFERS, Crash, FakeWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from art_sky.controller import money

PRICE = max(o.price for o in OFFERS)
SCRIPT = ["ok", "none", "quota", "keyless", "created", "died", "broken", "hang"]


class Clouds(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = FakeWorld(Path(self.folder.name) / "registry.sqlite", budget=6.0, max_hours=5)
        self.ids: list[str] = []
        self.late: set[str] = set()  # nodes whose launch returned after it had been given up

    def teardown(self) -> None:
        self.settle()
        self.world.registry.close()
        self.folder.cleanup()

    @initialize(up=st.booleans())
    def begin(self, up: bool) -> None:
        self.launch()
        if up:
            self.world.up(self.ids[0])

    @precondition(lambda self: len(self.ids) < 2)
    @rule()
    def launch(self) -> None:
        self.ids.append(self.world.launch(f"run{len(self.ids)}"))

    @rule(
        script=st.lists(
            st.sampled_from(["ok", "none", "quota", "keyless", "created", "died", "broken", "hang"]), max_size=4
        )
    )
    def script(self, script: list[str]) -> None:
        self.world.provider.script = script

    @rule(n=st.integers(1, 25), pick=st.integers(0, 1))
    def steps(self, n: int, pick: int) -> None:
        for _ in range(n):
            if self.ids:
                self.step(self.ids[pick % len(self.ids)])

    @rule(n=st.integers(0, 30), pick=st.integers(0, 1))
    def killed_in_the_middle(self, n: int, pick: int) -> None:
        if self.ids:
            self.world.fuse.left = n
            for _ in range(8):
                self.step(self.ids[pick % len(self.ids)])
            self.world.fuse.left = None

    @rule(minutes=st.sampled_from([1, 10, 60, 300]))
    def time_passes(self, minutes: int) -> None:
        self.world.clock.time += minutes * 60

    @rule(pick=st.integers(0, 5), reason=st.sampled_from([None, "preempted", "idle", "guard"]))
    def machine_vanishes(self, pick: int, reason: str | None) -> None:
        alive = self.world.provider.alive()
        if alive:
            self.world.provider.vanish(alive[pick % len(alive)], reason)

    @rule(cut=st.booleans(), asks_fail=st.booleans(), ledger=st.booleans(), ends=st.integers(0, 3))
    def outages(self, cut: bool, asks_fail: bool, ledger: bool, ends: int) -> None:
        world = self.world
        world.link.cut, world.provider.asks_fail, world.ledger.broken = cut, asks_fail, ledger
        world.provider.end_failures = ends

    @rule(pick=st.integers(0, 1))
    def down(self, pick: int) -> None:
        if self.ids:
            self.world.want(self.ids[pick % len(self.ids)], "down")

    @rule()
    def late_launch_returns(self) -> None:
        before = set(self.world.provider.machines)
        for call in self.world.calls.hanging:
            if not call.done():
                call.finish()
        self.late |= set(self.world.provider.machines) - before

    @invariant()
    def every_machine_is_on_record(self) -> None:
        named = {n.name for c in self.world.registry.all() for n in c.nodes}
        assert set(self.world.provider.machines) <= named

    @invariant()
    def what_is_gone_on_record_is_gone(self) -> None:
        gone = {n.name for c in self.world.registry.all() for n in c.nodes if n.state == "gone"} - self.late
        assert gone.isdisjoint(self.world.provider.alive())

    @invariant()
    def the_bill_is_under_its_bound(self) -> None:
        limits = self.world.limits
        assert limits.budget is not None
        bound = limits.budget + PRICE * (limits.flush_minutes + 15) / 60
        self.world.provider.alive()
        for id in self.ids:
            machines = {k: m for k, m in self.world.provider.machines.items() if m.order.config.cluster == id}
            now = self.world.clock.time
            bill = sum(((m.died or now) - m.born) / 3600 * m.order.offer.price for m in machines.values())
            assert bill <= bound + 1e-6, (bill, bound)

    def step(self, id: str) -> None:
        try:
            wait = self.world.reconciler.step(id)
            self.world.clock.time += min(wait or 0.0, 60.0)
        except Crash:
            self.world.start()

    def settle(self) -> None:
        """Everything is asked to end, all outages are over: within an hour nothing is left."""
        world = self.world
        world.fuse.left = None
        self.outages(False, False, False, 0)
        world.provider.script = []
        for id in self.ids:
            world.want(id, "down")
            world.over(id)
        self.late_launch_returns()
        world.reconciler.sweep()
        world.clock.time += 60
        assert world.provider.alive() == []
        for cluster in world.registry.all():
            # Each is closed, and the registry's sums are no less than the bill.
            assert all(n.closed is not None for n in cluster.nodes)
        total = sum(money.spent(c, world.clock.time) for c in world.registry.all())
        late = sum(bool(c.done()) for c in world.calls.hanging)
        assert late or total >= world.provider.bill() - 1e-6


TestClouds = Clouds.TestCase
TestClouds.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
