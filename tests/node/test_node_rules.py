"""Why a node ends, as a table over facts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_sky.node import records, rules
from art_sky.node.records import PHASES, REASONS, NodeLimits

LIMITS = NodeLimits(
    idle_minutes=30, max_hours=2, orphan_minutes=15, flush_minutes=5, setup_minutes=20, budget=3.0
)  # fmt: skip
SERVING = rules.Facts(
    phase="serving", in_phase=60.0, age=600.0, spent=1.0, idle=0.0, silence=0.0, pending=0, served=True
)  # fmt: skip
COMING = dataclasses.replace(SERVING, served=False)
MINUTE = 60.0


@pytest.mark.parametrize(
    ("facts", "changes", "reason"),
    [
        (SERVING, {}, None),
        (SERVING, {"idle": 30 * MINUTE - 1}, None),
        (SERVING, {"idle": 30 * MINUTE}, "idle"),
        (SERVING, {"idle": 30 * MINUTE, "pending": 3}, "idle"),  # jobs that merely exist
        (SERVING, {"spent": 2.99}, None),
        (SERVING, {"spent": 3.0}, "budget"),
        (SERVING, {"age": 7200.0}, "max_hours"),
        (SERVING, {"idle": 15 * MINUTE, "silence": 14 * MINUTE}, None),
        (SERVING, {"idle": 14 * MINUTE, "silence": 1000 * MINUTE}, None),  # busy: it goes on without its controller
        (SERVING, {"idle": 15 * MINUTE, "silence": 15 * MINUTE}, "orphan"),
        (SERVING, {"idle": 15 * MINUTE, "silence": 15 * MINUTE, "pending": 1}, None),
        (SERVING, {"failures": 3}, None),
        (SERVING, {"failures": 4}, "server"),
        (SERVING, {"autostop_failures": 4}, None),
        (SERVING, {"autostop_failures": 5}, "autostop"),
        (SERVING, {"preempted": True, "asked": True, "spent": 9.0}, "preempted"),
        (SERVING, {"asked": True, "stopped": True}, "asked"),
        (SERVING, {"stopped": True}, "stopped"),
        (COMING, {"phase": "installing", "in_phase": 20 * MINUTE - 1}, None),
        (COMING, {"phase": "installing", "in_phase": 20 * MINUTE}, "setup"),
        (COMING, {"phase": "installing", "install_failed": True}, "setup"),
        (COMING, {"phase": "installing", "spent": 3.0}, "budget"),  # limits hold in every phase
        (COMING, {"phase": "waiting for secrets", "in_phase": 599.0}, None),
        (COMING, {"phase": "waiting for secrets", "in_phase": 600.0}, "secrets"),
        (COMING, {"phase": "starting", "in_phase": 20 * MINUTE}, "health"),
        (COMING, {"phase": "starting", "failures": 4}, "health"),
        (SERVING, {"phase": "starting", "in_phase": 20 * MINUTE}, None),  # restarts are counted, not timed
        (SERVING, {"phase": "starting", "idle": 30 * MINUTE}, "idle"),
    ],
)
def test_reason(facts: rules.Facts, changes: dict[str, Any], reason: str | None) -> None:
    assert rules.reason_to_end(dataclasses.replace(facts, **changes), LIMITS) == reason


def test_without_a_budget_money_alone_ends_nothing() -> None:
    limits = dataclasses.replace(LIMITS, budget=None)
    assert rules.reason_to_end(dataclasses.replace(SERVING, spent=1e6), limits) is None


@given(
    st.builds(
        rules.Facts,
        phase=st.sampled_from(PHASES[:4]),
        in_phase=st.floats(0, 1e5), age=st.floats(0, 1e5), spent=st.floats(0, 10), idle=st.floats(0, 1e5),
        silence=st.floats(0, 1e5), pending=st.integers(0, 3), served=st.booleans(), install_failed=st.booleans(),
        failures=st.integers(0, 6), autostop_failures=st.integers(0, 6), preempted=st.booleans(), asked=st.booleans(),
        stopped=st.booleans(),
    )
)  # fmt: skip
def test_every_reason_has_words_and_the_limits_always_hold(facts: rules.Facts) -> None:
    reason = rules.reason_to_end(facts, LIMITS)
    assert reason is None or reason in REASONS
    if facts.spent >= 3.0 or facts.age >= 7200 or (facts.served and facts.idle >= 1800):
        assert reason is not None


def test_the_phases_are_those_of_the_records_and_each_leads_to_the_end() -> None:
    assert set(rules.TRANSITIONS) == set(PHASES) and set(rules.PHASE_LIMITS) <= set(PHASES)
    for phase in PHASES[:4]:
        assert "flushing" in rules.TRANSITIONS[phase]
    assert rules.TRANSITIONS["flushing"] == {"ended"} and rules.TRANSITIONS["ended"] == set()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(NodeLimits)])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1, "2", True, None, 0])
def test_limits_that_bound_nothing_are_refused(field: str, value: Any) -> None:
    limits = dataclasses.replace(LIMITS, **{field: value})
    if field == "budget" and (value is None or value == 0) and value is not False:
        records.check_limits(limits)
        return
    with pytest.raises(ValueError, match=field):
        records.check_limits(limits)
