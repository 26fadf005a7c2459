"""When a node ends: phases, their deadlines, and the reasons, as tables over plain facts. No clock, no process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from art_sky.node.records import NodeLimits

TRANSITIONS = {
    "installing": {"waiting for secrets", "flushing"},
    "waiting for secrets": {"starting", "flushing"},
    "starting": {"serving", "flushing"},
    "serving": {"starting", "flushing"},  # back: the server is started again
    "flushing": {"ended"},
    "ended": set(),
}

SECRETS_SECONDS = 600.0
RESTARTS = 3  # of the server, within RESTART_WINDOW_SECONDS
RESTART_WINDOW_SECONDS = 1800.0
RESTART_SECONDS = 120.0  # until a server that served before answers again
AUTOSTOP_FAILURES = 5  # minutes in a row in which SkyPilot's autodown could not be armed
UNWRITTEN_SECONDS = 60.0  # without a heartbeat on the disk; the guard waits for 5 minutes


@dataclass(frozen=True)
class Facts:
    """What is known at one moment. Times are seconds."""

    phase: str
    in_phase: float
    age: float  # since the machine is billed
    spent: float  # dollars
    idle: float  # since the last progress; 0 before the server served
    silence: float  # since the controller's last beat
    pending: int  # train jobs that were accepted and have not ended
    served: bool = False  # a server answered once
    install_failed: bool = False
    failures: int = 0  # of the server, within RESTART_WINDOW_SECONDS
    autostop_failures: int = 0
    unwritten: float = 0.0  # since the first of the heartbeats in a row that the disk did not take
    preempted: bool = False
    asked: bool = False
    stopped: bool = False  # by a signal


# How long a phase may take. Serving has no limit of its own: the reasons below end it.
PHASE_LIMITS: dict[str, Callable[[NodeLimits], float]] = {
    "installing": lambda limits: limits.setup_minutes * 60,
    "waiting for secrets": lambda limits: SECRETS_SECONDS,
    "starting": lambda limits: limits.setup_minutes * 60,
    "flushing": lambda limits: limits.flush_minutes * 60,
}


def reason_to_end(facts: Facts, limits: NodeLimits) -> str | None:
    """The first reason that holds, a key of records.REASONS."""
    return next((reason for reason, holds in _REASONS if holds(facts, limits)), None)


def _overdue(facts: Facts, limits: NodeLimits, phase: str) -> bool:
    return facts.phase == phase and facts.in_phase >= PHASE_LIMITS[phase](limits)


_REASONS: tuple[tuple[str, Callable[[Facts, NodeLimits], bool]], ...] = (
    ("preempted", lambda f, _: f.preempted),
    ("asked", lambda f, _: f.asked),
    ("stopped", lambda f, _: f.stopped),
    ("budget", lambda f, lim: lim.budget is not None and f.spent >= lim.budget),
    ("max_hours", lambda f, lim: f.age >= lim.max_hours * 3600),
    ("setup", lambda f, lim: f.install_failed or _overdue(f, lim, "installing")),
    ("secrets", lambda f, lim: _overdue(f, lim, "waiting for secrets")),
    ("health", lambda f, lim: not f.served and (f.failures > RESTARTS or _overdue(f, lim, "starting"))),
    ("server", lambda f, _: f.served and f.failures > RESTARTS),
    ("autostop", lambda f, _: f.autostop_failures >= AUTOSTOP_FAILURES),
    ("disk", lambda f, _: f.unwritten >= UNWRITTEN_SECONDS),
    ("idle", lambda f, lim: f.served and f.idle >= lim.idle_minutes * 60),
    # Accepted train jobs are finished first; without progress `idle` bounds that.
    (
        "orphan",
        lambda f, lim: f.served and not f.pending and min(f.idle, f.silence) >= lim.orphan_minutes * 60,
    ),
)
