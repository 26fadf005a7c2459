"""`python -m art_sky.node.ledger FOLDER`: once a minute writes into the store what this machine costs.

A process of its own beside the server, so that a store that hangs stops neither server nor watchdog. Its last entry is
written when the watchdog closes its stdin. It needs the installed package, for the store.
"""

from __future__ import annotations

import dataclasses
import json
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from art_sky.node import records
from art_sky.node.clock import Clock
from art_sky.node.metadata import Instance, Metadata

if TYPE_CHECKING:
    from art_sky.store.protocol import Store

EVERY_SECONDS = 60.0


def main(argv: list[str]) -> int:
    from art_sky.store import open_store

    folder = Path(argv[0])
    config = records.read(folder / "node.json", records.NodeConfig)
    instance = Metadata(config.cloud, Clock()).instance()
    keep(folder, config, instance, lambda: open_store(config.store), stdin_closed)
    return 0


def keep(
    folder: Path,
    config: records.NodeConfig,
    instance: Instance,
    connect: Callable[[], Store],
    closed: Callable[[float], bool],
) -> None:
    """Writes an entry, waits with `closed(seconds)`, and so on; one more when that is True. Failures are tried again
    with a new connection and never end it."""
    from art_sky.errors import ArtSkyError

    store, last = None, False
    while True:
        try:
            store = store or connect()
            text = json.dumps(dataclasses.asdict(entry(folder, config, instance, time.time())))
            store.put(records.ledger_key(config.cluster, config.node), text.encode())
        except (ArtSkyError, OSError, ValueError) as e:
            store = None
            print(f"art-sky: the ledger could not be written, next try in a minute: {e}", flush=True)
        if last:
            return
        last = closed(EVERY_SECONDS)


def entry(folder: Path, config: records.NodeConfig, instance: Instance, unix: float) -> records.LedgerEntry:
    """What is known now. Raises OSError or ValueError when the watchdog's state or the limits cannot be read."""
    state = records.read(folder / "watchdog.json", records.WatchdogState)
    extended = folder / "extend.json"
    limits = records.read(extended, records.NodeLimits) if extended.exists() else config.limits
    left = limits.max_hours * 3600 - state.age_seconds
    if limits.budget is not None and config.price_per_hour > 0:
        left = min(left, (limits.budget - state.spent) / config.price_per_hour * 3600)
    return records.LedgerEntry(
        cluster=config.cluster,
        node=config.node,
        instance=instance.id,
        cloud=config.cloud,
        region=instance.region,
        instance_type=instance.type,
        spot=config.spot,
        price_per_hour=config.price_per_hour,
        billed_from_unix=config.billed_from_unix,
        seen_unix=unix,
        reason=state.ending,
        until_unix=unix + max(left, 0.0) + limits.flush_minutes * 60,
    )


def stdin_closed(seconds: float) -> bool:
    """Waits for that, at most `seconds`: how the watchdog asks for the last work of a program beside it."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])  # nothing is ever written to it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
