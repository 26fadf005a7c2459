"""What one controller knows of one node besides its record. It saves questions; nothing depends on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from art_sky.controller.calls import Call
from art_sky.controller.provider import Machine
from art_sky.node.records import NodeLimits, WatchdogState
from art_sky.schemas import LeaseStatus


@dataclass
class Live:
    """Times are the controller's clock, Unix seconds."""

    call: Call[Machine] | None = None
    given_up: bool = False
    phase_since: float = 0.0
    machine: Machine | None = None
    secrets_sent: bool = False
    end_sent: bool = False
    watchdog: WatchdogState | None = None
    looked: float = float("-inf")
    contact: float | None = None
    healthy: float | None = None
    down_since: float | None = None
    next_ask: float = float("-inf")  # while the node is lost: of the provider
    answers_since: float | None = None  # while the node is lost: since when the provider answers
    next_end: float = float("-inf")
    failed_ends: int = 0
    seen: bool = False
    absent_since: float | None = None
    limits: NodeLimits | None = None  # as the node has them
    credential: dict[str, str] | None = None  # for the store, as it should have it
    credential_sent: dict[str, str] | None = None  # as it has it
    credential_end: float | None = None
    credential_problem: str | None = None
    asked: float = float("-inf")  # for a fresh one
    asking: Call[dict[str, str]] | None = None
    source_problem: str | None = None  # why it gave none
    leases: dict[str, LeaseStatus] = field(default_factory=dict)
    problem: str | None = None
    said: set[str] = field(default_factory=set)
