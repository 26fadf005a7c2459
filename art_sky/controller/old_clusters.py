"""What rented clusters that ended long ago keep in a store: logs go, entries of the ledger become one total.

    _clusters/<cluster>/logs/<node>/...        deleted
    _clusters/<cluster>/costs/<node>.json      deleted, once their sum stands in
    _clusters/<cluster>/total.json             `Total`

A cluster is over when each of its machines has an entry and each entry is closed: until then it may cost something, or
its controller may still want to know why it ended. Deleting may be broken off and done again at any point.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from art_sky.errors import ObjectNotFound, StoreError
from art_sky.node.records import LedgerEntry, parse
from art_sky.store.protocol import ObjectInfo, Store

ROOT = "_clusters/"
KEEP_DAYS = 30.0


@dataclass(frozen=True)
class Total:
    """`total.json`: what a cluster cost, in dollars by machine, and when the last of them ended."""

    nodes: dict[str, float] = field(default_factory=dict)
    closed_unix: float = 0.0


@dataclass
class OldCluster:
    id: str
    costs: list[ObjectInfo] = field(default_factory=list)
    logs: list[ObjectInfo] = field(default_factory=list)
    dollars: dict[str, float] = field(default_factory=dict)  # by node, of those that are to be deleted
    closed: float = 0.0  # Unix seconds of the last end

    @property
    def size(self) -> int:
        return sum(info.size for info in (*self.costs, *self.logs))


def find_old_clusters(store: Store, days: float, now: float) -> list[OldCluster]:
    """Those that ended more than `days` before the Unix time `now` and left more than a total.

    Raises StoreError, also for an entry that cannot be read.
    """
    clusters: dict[str, OldCluster] = {}
    for info in store.list(ROOT):
        id, _, rest = info.key.removeprefix(ROOT).partition("/")
        cluster = clusters.setdefault(id, OldCluster(id))
        if rest.startswith("costs/"):
            cluster.costs.append(info)
        elif rest.startswith("logs/"):
            cluster.logs.append(info)
    limit = now - days * 86400
    return [c for c in clusters.values() if (c.costs or c.logs) and _is_old(store, c, limit)]


def forget(store: Store, cluster: OldCluster) -> None:
    """Raises StoreError."""
    if cluster.costs:
        before = _total(store, cluster.id)
        total = Total({**before.nodes, **cluster.dollars}, max(before.closed_unix, cluster.closed))
        store.put(_total_key(cluster.id), json.dumps(asdict(total)).encode())
    for info in (*cluster.logs, *cluster.costs):
        store.delete(info.key)


def _is_old(store: Store, cluster: OldCluster, limit: float) -> bool:
    """Reads the entries, unless what is there is younger anyway."""
    newest = max(info.modified for info in (*cluster.costs, *cluster.logs))
    if newest > limit:
        return False
    for info in cluster.costs:
        entry = _entry(store, info.key)
        if entry is None or entry.closed_unix is None or entry.closed_unix > limit:
            return False
        cluster.dollars[entry.node] = entry.dollars(entry.closed_unix)
        cluster.closed = max(cluster.closed, entry.closed_unix)
    total = _total(store, cluster.id)
    cluster.closed = max(cluster.closed, total.closed_unix)
    return {info.key.split("/")[3] for info in cluster.logs} <= {*cluster.dollars, *total.nodes}


def _entry(store: Store, key: str) -> LedgerEntry | None:
    try:
        return parse(store.get(key).data.decode(), LedgerEntry, key)
    except ObjectNotFound:
        return None  # deleted by another one meanwhile
    except ValueError as e:
        raise StoreError(f"{e}; look at {key} in {store.url}") from e


def _total(store: Store, id: str) -> Total:
    try:
        found = json.loads(store.get(_total_key(id)).data)
        return Total(dict(found["nodes"]), float(found["closed_unix"]))
    except ObjectNotFound:
        return Total()
    except (ValueError, KeyError, TypeError) as e:
        raise StoreError(f"{_total_key(id)} in {store.url} cannot be read ({e}); look at it") from e


def _total_key(id: str) -> str:
    return f"{ROOT}{id}/total.json"
