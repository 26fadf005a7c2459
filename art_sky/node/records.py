"""The files between controller, watchdog, guard and ledger, and the words they use.

All lie in one folder of the node, `~/.art-sky-node`; each is JSON, written to a scratch name and renamed. Times that
only one machine compares are CLOCK_BOOTTIME seconds (they count sleep and no clock step moves them) beside the boot
id they belong to; `unix` times are for people and for the ledger.

| file | mode | who writes | what |
|---|---|---|---|
| node.json | 0644 | the launch, as a file mount | NodeConfig: limits, price, store; no secrets |
| secrets.json | 0600 | the controller, over SSH stdin | Secrets: tokens and a store credential |
| beat | 0644 | the tunnel's session channel, each 15 s | its time of change is the controller's beat |
| watchdog.json | 0644 | the watchdog, each 10 s | WatchdogState: heartbeat, phase, why it ends |
| extend.json | 0600 | the controller, over SSH stdin | NodeLimits that replace those of node.json |
| end | 0644 | `receive end` and the hooks of the task | its being there asks the watchdog to end |
| python.json | 0644 | the installation | which Python runs the server, and from where |
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, TypeVar

from art_sky.whole_file import write_whole

FORMAT = 1
FOLDER = Path("~/.art-sky-node")
# In the environment of what runs on a node: nobody can log in there, and the store's errors advise otherwise.
RENTED = "ART_SKY_RENTED_MACHINE"

# What the watchdog does; each phase has a deadline (`PHASE_LIMITS` of the watchdog), so that nothing hangs unseen.
PHASES = ("installing", "waiting for secrets", "starting", "serving", "flushing", "ended")

# Why a node ends. The words stand in logs, in the ledger and in `art-sky status`.
REASONS = {
    "idle": "no work for idle_minutes",
    "budget": "the budget is used up",
    "max_hours": "max_hours is reached",
    "orphan": "the controller is gone and there was no work for orphan_minutes",
    "preempted": "the cloud takes the machine back",
    "asked": "`art-sky down` or `sky down`",
    "stopped": "its job was told to stop, by SkyPilot or by its machine",
    "setup": "setup failed or took too long",
    "secrets": "the controller never sent the tokens",
    "health": "the server did not come up",
    "server": "the server failed three times in 30 minutes",
    "guard": "the guard found no living watchdog",
    "autostop": "SkyPilot's autodown cannot be armed any more",
    "disk": "the machine's disk is full, --disk asks for a larger one",
    "watchdog": "the watchdog itself failed",
}


@dataclasses.dataclass(frozen=True)
class NodeLimits:
    """When a node ends by itself; `budget` is in dollars, what earlier nodes of the cluster spent already taken off."""

    idle_minutes: float
    max_hours: float
    orphan_minutes: float
    flush_minutes: float
    setup_minutes: float
    budget: float | None = None


@dataclasses.dataclass(frozen=True)
class NodeConfig:
    """What a node must know before it holds a secret."""

    cluster: str  # artsky-<8 hex>, the run whose budget this is
    node: str  # SkyPilot's cluster name, artsky-<8 hex>-<n>
    cloud: str  # aws, gcp, lambda ...
    price_per_hour: float
    spot: bool
    store: str
    limits: NodeLimits
    wheel: str  # file name beside node.json
    version: str
    packages: list[str]  # beside the wheel, as pip takes it: what server, engine and trainer need
    server: dict[str, Any]  # the ServerConfig, without state_dir and idle_minutes
    billed_from_unix: float  # when the launch was asked for: the earliest moment that may be billed
    vllm_packages: list[str] = dataclasses.field(default_factory=list)  # for an environment of its own; empty: none
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class Secrets:
    """Never in an environment, an argv, a job spec or a log. `store_env` is for boto3 in the server alone."""

    token: str  # of the stable address, also the server's
    store_env: dict[str, str] = dataclasses.field(default_factory=dict)
    hf_token: str | None = None
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class WatchdogState:
    boot_id: str
    boottime: float  # of this heartbeat
    pid: int
    phase: str
    server_url: str | None = None  # http://127.0.0.1:PORT once it answers
    server_starts: int = 0
    age_seconds: float = 0.0  # since the machine is billed, counted over reboots
    spent: float = 0.0
    idle_seconds: float = 0.0
    ending: str | None = None  # a key of REASONS
    ending_boottime: float | None = None
    not_flushed: list[str] = dataclasses.field(default_factory=list)
    preemption_unix: float | None = None
    poweroff: bool = False  # SkyPilot will not tear the machine down: the guard shall, at once when this has ended
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class LedgerEntry:
    """`_clusters/<cluster>/costs/<node>.json` in the store. An entry without `closed_unix` counts until its provider
    says that the machine is gone."""

    cluster: str
    node: str
    instance: str
    cloud: str
    region: str
    instance_type: str
    spot: bool
    price_per_hour: float
    billed_from_unix: float
    seen_unix: float
    closed_unix: float | None = None
    reason: str | None = None
    until_unix: float | None = None  # the latest end by the limits as they stand
    format: int = FORMAT

    def dollars(self, now_unix: float) -> float:
        """Spent until it was closed, or until now."""
        end = now_unix if self.closed_unix is None else self.closed_unix
        return max(end - self.billed_from_unix, 0.0) / 3600 * self.price_per_hour


def ledger_key(cluster: str, node: str) -> str:
    return f"_clusters/{cluster}/costs/{node}.json"


def logs_prefix(cluster: str, node: str) -> str:
    """Where a node's logs are, as a folder of `art_sky.store.packs`."""
    return f"_clusters/{cluster}/logs/{node}"


def check_limits(limits: NodeLimits) -> None:
    """Raises ValueError for a limit that would never be reached, or at once."""
    for field in dataclasses.fields(NodeLimits):
        value = getattr(limits, field.name)
        if field.name == "budget" and value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and field.name != "budget"):
            raise ValueError(f"{field.name} must be a number above 0, not {value!r}")


Kind = TypeVar("Kind", NodeConfig, Secrets, WatchdogState, NodeLimits, LedgerEntry)


def write(path: Path, record: Any, mode: int = 0o644) -> None:
    """A reader sees the old file or the new one, also after power was cut."""
    write_whole(path, json.dumps(dataclasses.asdict(record)), mode)


def read(path: Path, kind: type[Kind]) -> Kind:
    """Raises OSError where there is no such file, ValueError that names the file where it cannot be understood."""
    return parse(path.read_text(), kind, str(path))


def parse(text: str, kind: type[Kind], where: str) -> Kind:
    """Fields of a newer release are ignored, a newer format is refused. Raises ValueError."""
    try:
        values = json.loads(text)
        if values.get("format", FORMAT) > FORMAT:
            raise ValueError("it was written by a newer release")
        names = {field.name for field in dataclasses.fields(kind)}
        known = {name: value for name, value in values.items() if name in names}
        if isinstance(known.get("limits"), dict):
            known["limits"] = NodeLimits(**known["limits"])
        return kind(**known)
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(f"{where} cannot be read as {kind.__name__}: {e}") from e
