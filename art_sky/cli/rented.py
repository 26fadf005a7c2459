"""What the commands say about rented clusters."""

from __future__ import annotations

import time
from typing import Any

from art_sky.cli.output import duration, stderr, table
from art_sky.controller.control import rented_views
from art_sky.errors import NotFound
from art_sky.suggest import did_you_mean

COLUMNS = ["name", "state", "address", "machine", "#$/h", "#spent", "#at most", "#time left", "#idle", "lease"]


def rented_clusters(*, over: bool = False) -> list[dict[str, Any]]:
    """Views of rented clusters, of each name the newest; those that are over only where asked for."""
    return [view for view in rented_views() if over or view["state"] != "down"]


def find_rented(name: str, *, over: bool = False) -> dict[str, Any] | None:
    return next((view for view in rented_clusters(over=over) if view["name"] == name), None)


def rented(name: str) -> dict[str, Any]:
    """Raises NotFound with a near name."""
    views = rented_clusters()
    found = next((view for view in views if view["name"] == name), None)
    if found is None:
        near = did_you_mean(name, [view["name"] for view in views])
        raise NotFound(f"there is no rented cluster {name!r} that is up ({near}); see `art-sky status`")
    return found


class EventLines:
    """Tells events as lines on stderr, with the time since the first."""

    def __init__(self) -> None:
        self._began = time.time()

    def __call__(self, event: dict[str, Any]) -> None:
        at = max(event["time"] - self._began, 0.0)
        stderr().print(f"{at:6.0f}s  {event['text']}", markup=False, soft_wrap=True)


def rented_table(views: list[dict[str, Any]]) -> Any:
    return table("Rented clusters", COLUMNS, [_row(view) for view in views])


def notes(view: dict[str, Any]) -> list[str]:
    """Lines below the table: what is wrong, and what it waits for."""
    lines = [f"store {view['store']}{_credential(view['store_credential'])}"]
    if view["preempted"]:
        lines.append("the cloud takes the machine back; another is rented when it has gone")
    if view["held_requests"]:
        lines.append(f"{view['held_requests']} requests wait for a machine")
    for model, lease in view["leases"].items():
        held = f"lease of {model}: {lease['owner']}, generation {lease['generation']}"
        lines.append(f"{held}: {lease['problem'] or 'for ' + duration(lease['age_seconds'])}")
    missing = (view["store_credential"] or {}).get("problem")
    return lines + [text for text in (view["problem"], missing, view["error"]) if text]


def _row(view: dict[str, Any]) -> tuple[object, ...]:
    node, price = view["node"], view["price_per_hour"]
    offer = node["offer"] if node else {"instance_type": "", "spot": False, "cloud": "", "region": ""}
    where = f"{offer['instance_type']}{' spot' if offer['spot'] else ''}, {offer['cloud']} {offer['region']}"
    idle = f"{duration(view['idle_seconds'])} of {duration(view['idle_limit_seconds'])}"
    return (
        view["name"],
        view["state"],
        view["base_url"],
        where if node else None,
        f"{price:.2f}" if price is not None else None,
        f"${view['spent']:.2f}",
        f"${view['worst_case']:.2f}",
        duration(view["seconds_left"]),
        idle if view["idle_seconds"] is not None else None,
        _lease(view["leases"]),
    )


def _credential(credential: dict[str, Any] | None) -> str:
    if credential is None:
        return ""
    end = credential["expires"]
    if end is None:
        return ", by a credential without an end"
    left = end - time.time()
    return f", by a credential that {'ends in ' + duration(left) if left > 0 else 'has ended'}"


def _lease(leases: dict[str, Any]) -> str | None:
    """Whether the server may commit; which model is meant stands below the table."""
    if not leases:
        return None
    return "lost" if any(lease["problem"] for lease in leases.values()) else "held"
