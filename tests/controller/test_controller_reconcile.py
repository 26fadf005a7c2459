"""Launch, loss, replacement and end of rented machines on a scripted cloud and a fake clock."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fake_cloud import OFFERS, FakeMachine, FakeWorld, state

from art_sky.cli.rented import notes
from art_sky.controller import money
from art_sky.controller.outcomes import AFTER, told
from art_sky.controller.rented import RentedCluster
from art_sky.controller.views import cluster_view
from art_sky.errors import BudgetTooSmall
from art_sky.node.records import REASONS
from art_sky.schemas import LeaseStatus


@pytest.fixture
def world(tmp_path: Path) -> FakeWorld:
    return FakeWorld(tmp_path / "registry.sqlite", budget=10.0, max_hours=8)


def test_launch_comes_up_and_down_leaves_nothing(world: FakeWorld) -> None:
    id = world.launch()
    cluster = world.up(id)
    assert cluster.node and cluster.node.name == f"{id}-1" and cluster.node.instance == f"i-{id}-1"
    assert set(cluster.node.phases) >= {"provision", "setup", "connect", "ready"}
    assert world.provider.machines[f"{id}-1"].secrets == 1
    world.want(id, "down")
    ended = world.over(id)
    assert world.provider.alive() == [] and world.link.calls == ["end"]
    assert ended.node and ended.node.reason == "asked" and ended.node.closed == world.clock.time
    assert world.ledger.closed == {f"{id}-1": "asked"}
    assert world.reconciler.step(id) is None


def test_down_tells_what_was_not_flushed(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.not_flushed = ["p/agent step 4"]
    world.want(id, "down")
    ended = world.over(id)
    assert ended.node and ended.node.reason == "asked: not flushed: p/agent step 4"


def test_a_node_that_cannot_flush_is_ended_in_time(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.cut = True
    world.want(id, "down")
    began = world.clock.time
    world.over(id)
    assert world.clock.time - began < world.limits.flush_minutes * 60 + 60 and world.provider.alive() == []


def test_capacity_falls_over_to_the_next_offer(world: FakeWorld) -> None:
    world.provider.script = ["none"]
    id = world.launch()
    cluster = world.up(id)
    assert cluster.node and cluster.node.offer["cloud"] == "gcp" and len(cluster.nodes) == 2
    first = cluster.nodes[0]
    assert money.billed_hours(first, world.clock.time) == 0, "a machine that never was is not billed"


def test_no_candidate_left_names_each(world: FakeWorld) -> None:
    world.provider.script = ["none", "none"]
    cluster = world.over(world.launch())
    assert cluster.error is not None
    assert "g5.xlarge on aws us-east-1" in cluster.error and "a2-highgpu-1g on gcp" in cluster.error
    assert len(world.provider.launched) == 2


def test_no_quota_falls_over_to_the_next_offer_and_is_named_at_the_end(world: FakeWorld) -> None:
    world.provider.script = ["quota"]
    cluster = world.up(world.launch())
    assert cluster.node and cluster.node.offer["cloud"] == "gcp"
    world.provider.script = ["quota", "quota"]
    error = world.over(world.launch("other")).error
    assert error and error.count("VcpuLimitExceeded; ask your cloud for more") == 2
    assert money.spent(cluster, world.clock.time) == pytest.approx(world.provider.bill(), abs=0.02)


def test_without_credentials_a_cloud_is_asked_once_and_nothing_is_waited_for(world: FakeWorld) -> None:
    """Not even whether something is there: nobody could tell."""
    aws = [dataclasses.asdict(OFFERS[0])] * 3
    id = world.launch()
    world.registry.update(id, lambda c: c.model_copy(update={"plan": aws}))
    world.provider.script, world.provider.asks_fail = ["keyless"], True
    began = world.clock.time
    cluster = world.over(id)
    assert world.clock.time - began < 5 and len(world.provider.launched) == 1 and world.provider.ends == []
    assert cluster.error == "aws: no usable credentials: none found; run `sky check`"
    assert money.spent(cluster, world.clock.time) == 0 and world.ledger.closed == {}


def test_without_credentials_of_one_cloud_another_is_taken(world: FakeWorld) -> None:
    aws, gcp = (dataclasses.asdict(offer) for offer in OFFERS)
    id = world.launch()
    world.registry.update(id, lambda c: c.model_copy(update={"plan": [aws, aws, gcp]}))
    world.provider.script = ["keyless"]
    assert [n.offer["cloud"] for n in world.up(id).nodes] == ["aws", "gcp"]


def test_a_replacement_waits_for_a_login(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.provider.script = ["keyless"] * 5
    world.provider.vanish(f"{id}-1")
    cluster = world.run(id, lambda c: c.node is not None and c.node.state == "up" and len(c.nodes) > 5)
    assert [(n.reason or "").partition(":")[0] for n in cluster.nodes[1:6]] == ["credentials"] * 5


def test_a_name_that_somebody_has_is_never_touched(world: FakeWorld) -> None:
    world.provider.script = ["taken"]
    id = world.launch()
    world.provider.machines[f"{id}-1"] = FakeMachine(None, world.clock.time)  # type: ignore[arg-type]
    for _ in range(20):
        wait = world.reconciler.step(id)
        if wait is None:
            break
    cluster = world.registry.get(id)
    assert cluster.error and "it is left alone" in cluster.error and world.provider.ends == []
    assert cluster.node and cluster.node.closed == cluster.node.billed_from


def test_skypilots_server_dies_in_a_launch_and_is_back(world: FakeWorld) -> None:
    """What it had made is ended, whenever somebody can be asked again."""
    world.provider.script = ["died"]
    id = world.launch()
    world.run(id, lambda c: c.node is not None and c.node.state == "ending")
    world.provider.asks_fail = True
    for _ in range(30):
        world.clock.time += world.reconciler.step(id) or 1.0
    assert world.provider.seen(f"{id}-1") == "running"
    world.provider.asks_fail = False
    cluster = world.over(id, seconds=240)
    assert world.provider.alive() == [] and cluster.error
    assert "SkyPilot's server does not answer; run `sky api start`" in cluster.error and "launch again" in cluster.error


@pytest.mark.parametrize("what", ["created", "broken", "died"])
def test_failed_launch_is_ended_and_not_tried_elsewhere(world: FakeWorld, what: str) -> None:
    world.provider.script = [what]
    cluster = world.over(world.launch(), seconds=240)
    assert world.provider.alive() == [] and len(world.provider.launched) == 1
    assert cluster.error and "the launch failed: " in cluster.error
    assert ("SkyPilot's server" if what == "died" else "the cloud answered 500") in cluster.error


def test_terminate_that_fails_twice_is_tried_again_and_told(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.provider.end_failures = 2
    world.want(id, "down")
    world.run(id, lambda c: c.node is not None and c.node.state == "ending" and world.provider.end_failures == 1)
    node = world.registry.get(id).node
    assert node and "ending it failed 1 times" in str(world.reconciler.seen.problem(node))
    world.over(id, seconds=180)
    assert world.provider.alive() == []


def test_hanging_launch_is_ended_at_its_deadline(world: FakeWorld) -> None:
    world.provider.script = ["hang"]
    began = world.clock.time
    cluster = world.over(world.launch(), seconds=7200)
    assert world.clock.time - began < world.limits.setup_minutes * 60 + 900 + 240
    assert cluster.error and "took longer than" in cluster.error


def test_hanging_launch_is_ended_at_once_when_asked(world: FakeWorld) -> None:
    world.provider.script = ["hang"]
    id = world.launch()
    world.run(id, lambda c: c.node is not None and c.node.state == "provisioning")
    world.want(id, "down")
    world.over(id, seconds=240)


def test_a_launch_given_up_whose_machine_comes_late_is_swept(world: FakeWorld) -> None:
    world.provider.script = ["hang"]
    id = world.launch()
    world.run(id, lambda c: c.node is not None and c.node.state == "provisioning")
    world.want(id, "down")
    world.over(id, seconds=240)
    world.provider.machines[f"{id}-1"] = world_machine(world, id)
    assert world.provider.alive() == [f"{id}-1"]
    assert world.reconciler.sweep() == [f"{id}-1"]
    world.clock.time += 60
    assert world.provider.alive() == [] and world.reconciler.sweep() == []


def world_machine(world: FakeWorld, id: str) -> object:
    from fake_cloud import FakeMachine, order

    cluster = world.registry.get(id)
    assert cluster.node
    limits = money.node_limits(cluster, cluster.node.name, world.clock.time)
    return FakeMachine(order(cluster, cluster.node, limits), world.clock.time)


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (lambda w, id: setattr(w.link, "version", None), "the server did not come up"),
        (lambda w, id: setattr(w.link, "version", "0.0.1"), "art-sky 0.0.1"),
        (lambda w, id: setattr(w.link, "refused", True), "the host key changed"),
        (lambda w, id: setattr(w.link, "cut", True), "connection refused"),
    ],
)
def test_health_that_never_passes_ends_the_launch(world: FakeWorld, break_it: object, told: str) -> None:
    id = world.launch()
    break_it(world, id)  # type: ignore[operator]
    cluster = world.over(id, seconds=world.limits.setup_minutes * 60 + 600)
    assert world.provider.alive() == [] and cluster.error and told in cluster.error


def test_setup_that_fails_on_the_node_ends_the_launch_at_once(world: FakeWorld) -> None:
    id = world.launch()
    world.link.version = None
    world.link.watchdogs[f"{id}-1"] = state("flushing", ending="setup")
    cluster = world.over(id, seconds=240)
    assert cluster.error and "setup failed" in cluster.error and world.provider.alive() == []
    assert world.ledger.logs == {f"{id}-1": f"the log of {id}-1"}


@pytest.mark.parametrize(("starts", "broken", "told"), [(0, True, "its log could not be kept"), (1, False, None)])
def test_a_log_that_cannot_be_kept_is_told_and_a_server_keeps_its_own(
    world: FakeWorld, starts: int, broken: bool, told: str | None
) -> None:
    id = world.launch()
    world.link.version, world.ledger.broken = None, broken
    world.link.watchdogs[f"{id}-1"] = state("flushing", ending="health", server_starts=starts)
    assert world.over(id, seconds=240).error
    assert world.provider.alive() == [] and world.ledger.logs == {}
    noted = [text for _, _, text in world.registry.events(id) if "its log" in text]
    assert len(noted) == (told is not None) and all(told in text for text in noted if told)


def test_a_failed_launch_may_be_kept_for_a_look(world: FakeWorld) -> None:
    id = world.launch(keep=True)
    world.link.version = "0.0.1"
    cluster = world.run(id, lambda c: c.error is not None)
    assert cluster.node and cluster.node.phase == "kept" and "kept until" in str(cluster.error)
    for _ in range(20):
        world.clock.time += world.reconciler.step(id) or 60
    assert world.provider.alive() == [f"{id}-1"]
    world.want(id, "down")
    world.over(id)
    assert world.provider.alive() == []


def test_a_vanished_machine_is_replaced_by_the_next_offer(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.served = ["p/agent"]
    world.run(id, lambda c: c.models == ["p/agent"])
    world.provider.vanish(f"{id}-1")
    cluster = world.run(id, lambda c: c.node is not None and c.node.name == f"{id}-2" and c.node.state == "up")
    assert [n.state for n in cluster.nodes] == ["gone", "up"] and cluster.nodes[1].offer["cloud"] == "gcp"
    assert (cluster.nodes[0].reason or "").startswith("vanished") and cluster.models == ["p/agent"]


def test_a_replacement_is_up_when_it_serves_the_models_again(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.served = ["p/agent"]
    world.run(id, lambda c: c.models == ["p/agent"])
    world.provider.vanish(f"{id}-1")
    world.link.served = []
    world.run(id, lambda c: len(c.nodes) == 2 and c.nodes[1].state == "connecting")
    asked = world.link.asked_models
    world.run(id, lambda c: world.link.asked_models > asked + 3)
    cluster = world.registry.get(id)
    assert cluster.node and cluster.node.state == "connecting"
    assert world.reconciler.seen.problem(cluster.node) == "waiting for p/agent"
    world.link.served = ["p/agent"]
    world.up(id)


def test_a_preempted_machine_is_replaced(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.watchdogs[f"{id}-1"] = state("flushing", ending="preempted", preemption_unix=world.clock.time + 120)
    world.run(id, lambda c: any("takes the machine back" in t for t in world.texts(id)))
    world.provider.vanish(f"{id}-1")
    cluster = world.run(id, lambda c: len(c.nodes) == 2 and c.nodes[1].state == "up")
    assert cluster.nodes[0].reason == "preempted"


def test_leases_are_shown_as_the_server_told_them_while_it_is_up(world: FakeWorld) -> None:
    held = LeaseStatus(owner="server node pid 7", generation=2, age_seconds=61.0)
    lost = held.model_copy(update={"problem": "another process took the lease"})
    world.link.served, world.link.leases = ["p/agent", "p/logged"], {"p/agent": held}
    id = world.launch()
    node = world.up(id).node
    assert node
    seen = world.reconciler.seen
    world.run(id, lambda c: seen.leases(node) == {"p/agent": held})
    world.link.leases = {"p/agent": lost}
    cluster = world.run(id, lambda c: seen.leases(node) == {"p/agent": lost})
    assert cluster.models == ["p/agent", "p/logged"]
    view = cluster_view(cluster, None, None, world.clock.time, seen.leases(node))
    assert view["leases"]["p/agent"]["problem"] == "another process took the lease"
    text = "lease of p/agent: server node pid 7, generation 2: another process took the lease"
    assert text in notes({**view, "held_requests": 0, "store_credential": None})


@pytest.mark.parametrize("how", ["told through the tunnel", "found in the ledger"])
def test_a_reason_that_is_not_known_rents_nothing_and_is_shown(world: FakeWorld, how: str) -> None:
    """As from a node of another release."""
    id = world.launch()
    world.up(id)
    if how == "found in the ledger":
        world.provider.vanish(f"{id}-1", "too warm")
    else:
        world.link.watchdogs[f"{id}-1"] = state("ended", ending="too warm")
    cluster = world.over(id)
    assert len(cluster.nodes) == 1 and world.provider.alive() == []
    assert cluster.error and "why it ended is not known: the node said 'too warm'" in cluster.error


def test_every_reason_of_the_watchdog_has_its_rule() -> None:
    assert set(REASONS) <= set(AFTER)
    assert [told(word) for word in REASONS] == list(REASONS)
    assert told(None).startswith("watchdog:") and told("too warm").startswith("unknown:")


@pytest.mark.parametrize("reason", ["idle", "budget", "max_hours", "orphan"])
def test_a_node_that_ended_by_its_limits_is_not_replaced(world: FakeWorld, reason: str) -> None:
    id = world.launch()
    world.up(id)
    world.provider.vanish(f"{id}-1", reason)
    cluster = world.over(id)
    assert len(cluster.nodes) == 1 and cluster.node and cluster.node.reason == reason
    assert cluster.error and "goes on from the last step" in cluster.error


def test_laptop_asleep_with_the_store_out_of_reach_spends_nothing_on_a_guess(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.provider.vanish(f"{id}-1", "idle")
    world.ledger.broken = True
    world.clock.time += 7 * 3600
    cluster = world.over(id)
    assert len(cluster.nodes) == 1 and ((cluster.node and cluster.node.reason) or "").startswith("unknown")


def test_asleep_for_eight_hours_the_deadline_counts(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.provider.own_end = False  # neither watchdog nor guard work
    world.clock.time += 8.2 * 3600
    cluster = world.over(id, seconds=600)
    assert world.provider.alive() == [] and cluster.node and cluster.node.reason == "max_hours"


@pytest.mark.parametrize(
    ("when", "goes_on"),
    [("provisioning", False), ("connecting", False), ("up", True), ("lost", True), ("flushing", False)],
)
def test_a_laptop_that_sleeps_at_any_moment_finds_what_became_of_it(tmp_path: Path, when: str, goes_on: bool) -> None:
    """The node's own rules go on meanwhile; here it is one with work of its own."""
    world = FakeWorld(tmp_path / "registry.sqlite", max_hours=24)
    world.provider.script = ["hang"] if when == "provisioning" else []
    world.link.version = None if when == "connecting" else world.link.version
    id = world.launch()
    if when in ("provisioning", "connecting"):
        world.run(id, lambda c: c.node is not None and c.node.state == when)
    else:
        world.up(id)
    if when == "lost":
        world.link.cut = True
        world.run(id, lambda c: c.node is not None and c.node.state == when)
    if when == "flushing":
        world.want(id, "down")
        world.reconciler.step(id)
    world.clock.time += 8 * 3600
    world.link.cut = False
    if goes_on:
        cluster = world.up(id)
        assert [n.state for n in cluster.nodes] == ["up"] and world.provider.ends == []
        world.want(id, "down")
    cluster = world.over(id, seconds=300)
    for call in world.calls.hanging:
        call.finish()  # what it still makes is swept
    world.reconciler.sweep()
    world.clock.time += 60
    assert world.provider.alive() == []
    assert cluster.error is None or "launch again" in cluster.error


def test_tunnel_cut_while_the_machine_runs_reconnects(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.cut = True
    world.run(id, lambda c: c.node is not None and c.node.state == "lost")
    world.link.cut = False
    cluster = world.up(id)
    assert len(cluster.nodes) == 1 and world.provider.ends == []


def test_a_provider_that_cannot_be_asked_says_nothing_about_a_machine(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.cut = world.provider.asks_fail = True
    world.run(id, lambda c: c.node is not None and c.node.state == "lost")
    began = world.clock.time
    while world.clock.time - began < 2000:
        world.clock.time += world.reconciler.step(id) or 1
    assert world.registry.get(id).node.state == "lost" and len(world.provider.launched) == 1  # type: ignore[union-attr]
    world.link.cut = world.provider.asks_fail = False
    assert len(world.up(id).nodes) == 1


def test_a_computer_that_was_without_a_network_ends_no_machine_when_it_has_one_again(world: FakeWorld) -> None:
    """The provider can be asked a moment before the tunnel is open."""
    id = world.launch()
    world.up(id)
    world.link.cut = world.provider.asks_fail = True
    world.run(id, lambda c: c.node is not None and c.node.state == "lost")
    lost = world.clock.time
    while world.clock.time - lost < 2000:
        world.clock.time += world.reconciler.step(id) or 1
    world.provider.asks_fail = False
    online = world.clock.time
    while world.clock.time - online < 120:
        world.clock.time += world.reconciler.step(id) or 1
    world.link.cut = False
    assert len(world.up(id).nodes) == 1 and world.provider.ends == []


def test_the_provider_of_a_lost_machine_is_asked_ever_less_often(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.cut = True
    world.run(id, lambda c: c.node is not None and c.node.state == "lost")
    asked = []
    for _ in range(2):
        before, began = world.provider.asked, world.clock.time
        while world.clock.time - began < 400:
            world.clock.time += world.reconciler.step(id) or 1
        asked.append(world.provider.asked - before)
    assert 10 <= asked[0] <= 25 and 6 <= asked[1] <= 8


def test_a_machine_that_runs_and_stays_silent_is_replaced(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.cut = True
    world.run(id, lambda c: len(c.nodes) == 2 and c.nodes[1].state == "connecting", seconds=1800)
    assert world.provider.alive() == [f"{id}-2"]


def test_replacements_share_one_budget(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    for n in range(1, 4):
        world.clock.time += 2 * 3600
        world.provider.vanish(f"{id}-{n}")
        cluster = world.run(id, lambda c: (c.node.state == "up" and len(c.nodes) == n + 1) or c.wanted == "down")  # type: ignore[union-attr]  # noqa: B023
        if cluster.wanted == "down":
            break
    given = [o.config.limits for o in world.provider.launched]
    assert [round(g.budget or 0) for g in given] == [10, 8, 2] and [round(g.max_hours) for g in given] == [8, 6, 4]
    world.over(id, seconds=9 * 3600)
    assert world.provider.bill() <= 10.0 + 3.0 * (world.limits.flush_minutes + 15) / 60


def test_a_replacement_is_one_that_the_rest_of_the_budget_pays_for(world: FakeWorld) -> None:
    world.limits = world.limits.model_copy(update={"budget": 1.0})
    id = world.launch()
    world.up(id)
    world.clock.time += 1800  # $0.50 are left: 10 minutes of the next offer, 30 of the one before it
    world.provider.vanish(f"{id}-1")
    cluster = world.run(id, lambda c: len(c.nodes) == 2 and c.nodes[1].state == "up")
    assert cluster.nodes[1].offer == cluster.nodes[0].offer
    world.clock.time += 1000
    world.provider.vanish(f"{id}-2")
    assert "less than 15 minutes at $1.00 an hour" in (world.over(id).error or "")


def test_a_server_that_fails_everywhere_is_not_rented_for_ever(world: FakeWorld) -> None:
    id = world.launch()
    for n in range(1, 10):
        world.link.watchdogs[f"{id}-{n}"] = state("ended", ending="server")
    cluster = world.over(id)
    assert len(cluster.nodes) == 3 and cluster.error and "three times" in cluster.error


def test_no_capacity_for_a_replacement_waits_and_gives_up(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.provider.script = ["none"] * 1000
    world.provider.vanish(f"{id}-1")
    began = world.clock.time
    cluster = world.over(id, seconds=4 * 3600)
    assert 2 * 3600 < world.clock.time - began < 2.5 * 3600 and len(world.provider.launched) < 60
    assert cluster.error and "no candidate could be rented" in cluster.error
    assert money.spent(cluster, world.clock.time) == pytest.approx(world.provider.bill(), abs=0.02)


def test_controller_killed_during_the_launch_ends_that_machine_and_rents_another(world: FakeWorld) -> None:
    id = world.launch()
    world.provider.script = ["hang"]
    world.run(id, lambda c: c.node is not None and c.node.state == "provisioning")
    world.start()
    cluster = world.up(id)
    assert [n.reason for n in cluster.nodes] == ["restarted", None]
    assert cluster.nodes[1].offer == cluster.nodes[0].offer and world.provider.alive() == [f"{id}-2"]


def test_controller_killed_while_the_node_serves_goes_on_with_it(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.start()
    assert world.reconciler.step(id) is not None
    world.run(id, lambda c: world.link.status(c).state == "open")
    assert world.provider.ends == [] and len(world.registry.get(id).nodes) == 1


def test_limits_of_nothing_left_are_refused_with_the_numbers() -> None:
    cluster = RentedCluster.model_validate(
        {
            "name": "run", "id": "artsky-1", "wanted": "up", "created": 0.0, "plan": [], "port": 1,
            "request": {"name": "run", "store": "s3://b", "limits": {"budget": 0.2}},
        }
    )  # fmt: skip
    with pytest.raises(BudgetTooSmall, match=r"\$0.20 of the budget of \$0.20 are left.*larger --budget"):
        money.check_useful(cluster, money.node_limits(cluster, "n", 0.0), 1.0)


def test_extended_limits_reach_the_node_and_the_next_one(world: FakeWorld) -> None:
    id = world.launch()
    world.up(id)
    world.link.cut = True
    cluster = world.registry.update(id, lambda c: c.model_copy(update={"extended_hours": 4.0}))
    assert cluster.node and not world.reconciler.seen.has_limits(cluster, cluster.node)
    world.link.cut = False
    world.run(id, lambda c: "limits" in world.link.calls)
    assert world.reconciler.seen.has_limits(cluster, cluster.node)
    world.provider.vanish(f"{id}-1")
    world.run(id, lambda c: len(c.nodes) == 2 and c.nodes[1].state == "up")
    assert world.provider.launched[-1].config.limits.max_hours == pytest.approx(12, abs=0.1)
