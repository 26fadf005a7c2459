from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import art_sky
from art_sky.config import Limits
from art_sky.controller.cloud_table import CLOUDS, cloud_facts
from art_sky.controller.plan import GUARD_MINUTES, check_store, make_plan, worst_case
from art_sky.controller.provider import Offer
from art_sky.controller.rented import LaunchRequest
from art_sky.errors import BudgetTooSmall, InvalidConfig, NoCapacity


def offer(cloud: str, price: float, spot: bool = False) -> Offer:
    return Offer(cloud, "somewhere", f"{cloud}-box", {"H100": 1}, spot, price)


def request(**given: object) -> LaunchRequest:
    return LaunchRequest.parse({"name": "agent", "gpus": ["H100"], "store": "s3://bucket/p", **given})


def test_candidates_come_cheapest_first_with_their_worst_case() -> None:
    plan = make_plan(request(limits=Limits(budget=20)), [offer("gcp", 4.0), offer("aws", 2.0), offer("aws", 3.0)])
    assert [(c.offer.cloud, c.offer.price) for c in plan.usable] == [("aws", 2.0), ("aws", 3.0), ("gcp", 4.0)]
    # 20 dollars, then 5 minutes of flush and the guard's 15 at each price
    assert [c.worst for c in plan.usable] == pytest.approx([20 + 2 / 3, 21.0, 20 + 4 / 3])
    assert plan.worst == pytest.approx(20 + 4 / 3)


def test_without_a_budget_the_hours_bound_the_bill() -> None:
    assert worst_case(Limits(max_hours=2, flush_minutes=5), 3.0) == pytest.approx(6.0 + 3.0 * (5 + GUARD_MINUTES) / 60)


def test_guarantees_are_those_of_the_cloud() -> None:
    plan = make_plan(request(allow_cloud_key_on_node=True), [offer("aws", 1.0), offer("lambda", 2.0)])
    assert [c.guarantees for c in plan.candidates] == [
        ("watchdog", "node agent", "guard", "gc by label"),
        ("watchdog", "node agent", "guard"),
    ]


def test_a_cheaper_candidate_that_needs_the_key_is_shown_and_not_taken() -> None:
    plan = make_plan(request(), [offer("lambda", 1.0), offer("aws", 2.0)])
    assert [c.offer.cloud for c in plan.usable] == ["aws"]
    assert [c.offer.cloud for c in plan.candidates] == ["lambda", "aws"]
    assert "--allow-cloud-key-on-node" in (plan.candidates[0].refused or "")


@pytest.mark.parametrize(("cloud", "option"), [("lambda", "--allow-cloud-key-on-node"), ("vast", "--allow-unsafe")])
def test_only_unsafe_clouds_are_an_error_that_names_the_option(cloud: str, option: str) -> None:
    with pytest.raises(InvalidConfig, match=option):
        make_plan(request(), [offer(cloud, 1.0)])
    assert make_plan(request(allow_unsafe=True), [offer(cloud, 1.0)]).usable


def test_a_budget_under_the_shortest_useful_run_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        BudgetTooSmall, match=r"\$0\.50 does not pay for 15 minutes .* \$4\.00 an hour: that is \$1\.00"
    ):
        make_plan(request(limits=Limits(budget=0.5)), [offer("aws", 4.0)])


def test_a_dearer_candidate_that_the_budget_does_not_pay_is_left_out() -> None:
    plan = make_plan(request(limits=Limits(budget=1.0)), [offer("aws", 2.0), offer("aws", 40.0)])
    assert [c.offer.price for c in plan.candidates] == [2.0]


def test_a_ceiling_under_every_price_names_the_cheapest() -> None:
    with pytest.raises(NoCapacity, match=r"at most \$1\.00 .* aws at \$2\.00; raise --max-price"):
        make_plan(request(max_price=1.0), [offer("aws", 2.0), offer("gcp", 3.0)])
    with pytest.raises(NoCapacity, match="offer no H100"):
        make_plan(request(clouds=["aws"]), [])


def test_an_image_id_leaves_out_clouds_that_take_none() -> None:
    wanted = request(image_id="ami-1", regions=["us-east-1"], allow_cloud_key_on_node=True)
    assert [c.offer.cloud for c in make_plan(wanted, [offer("lambda", 1.0), offer("aws", 2.0)]).usable] == ["aws"]


def test_an_image_of_one_region_is_taken_there_alone() -> None:
    with pytest.raises(InvalidConfig, match="--image-id REGION=ami-1"):
        make_plan(request(image_id="ami-1"), [offer("aws", 2.0)])
    of_region = request(image_id={"somewhere": "ami-1"})
    assert of_region.wanted().regions == ["somewhere"]
    elsewhere = dataclasses.replace(offer("aws", 1.0), region="eu-west-1")
    plan = make_plan(of_region, [elsewhere, offer("aws", 2.0)])
    assert [c.offer.region for c in plan.usable] == ["somewhere"]
    assert "no --image-id for eu-west-1" in str(plan.candidates[0].refused)


def test_disks_are_listed_apart() -> None:
    aws, lambda_ = make_plan(
        request(disk_gib=730, allow_cloud_key_on_node=True), [offer("aws", 1.0), offer("lambda", 1.5)]
    ).candidates
    assert aws.disk_per_hour == pytest.approx(0.08)
    assert lambda_.disk_per_hour == 0


@given(
    price=st.floats(0.01, 200), budget=st.none() | st.floats(0.01, 1e4), hours=st.floats(0.1, 720),
    flush=st.floats(0.1, 60),
)  # fmt: skip
def test_the_worst_case_is_over_every_limit_by_the_way_out_at_most(
    price: float, budget: float | None, hours: float, flush: float
) -> None:
    limits = Limits(budget=budget, max_hours=hours, flush_minutes=flush)
    worst = worst_case(limits, price)
    way_out = price * (flush + GUARD_MINUTES) / 60
    assert way_out < worst <= min(budget or 1e9, price * hours) + way_out + 1e-9


def test_every_cloud_of_the_table_is_safe_with_its_key_or_says_why_not() -> None:
    for facts in CLOUDS.values():
        assert facts.is_safe(key_on_node=True), facts.name
        assert facts.is_safe(key_on_node=False) or facts.note
    assert not cloud_facts("nowhere").is_safe(key_on_node=True)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (None, "needs a store that outlives it"),
        ("file:///runs", r"needs a store that outlives it: --store s3://"),
        ("s3://bucket/p?profile=lab", r"give --store-profile lab"),
    ],
)
def test_a_store_that_no_machine_could_reach_is_refused(url: str | None, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        check_store(url, shares_files=False)
    check_store("s3://bucket/p?region=eu-west-1", shares_files=False)
    check_store("file:///runs", shares_files=True)


async def test_nor_is_one_taken_from_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ART_SKY_HOME", str(tmp_path))
    with pytest.raises(InvalidConfig, match="needs a store that outlives it"):
        await art_sky.SkyPilotBackend.initialize_cluster(cluster_name="run", store="file:///runs", clouds=["aws"])
    assert list(tmp_path.iterdir()) == [], "no controller, no intent"
