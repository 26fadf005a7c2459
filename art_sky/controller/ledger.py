"""What the controller adds to the cluster's store: it closes each node's entry of the ledger, and keeps the log of a
node on which the installation failed."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Protocol

from art_sky.controller import money
from art_sky.controller.rented import Node, RentedCluster
from art_sky.controller.stored_logs import keep_log
from art_sky.errors import InvalidConfig, ObjectNotFound, StoreError
from art_sky.node.records import LedgerEntry, ledger_key, parse

if TYPE_CHECKING:
    from art_sky.store.protocol import Store


class Ledger(Protocol):
    """All block and raise StoreError."""

    def reason(self, cluster: RentedCluster, node: Node) -> str | None:
        """Why the node ended by itself, a key of REASONS; None when it did not say."""
        ...

    def close(self, cluster: RentedCluster, node: Node, closed: float, reason: str) -> None:
        """The provider said that the machine is gone."""
        ...

    def keep_log(self, cluster: RentedCluster, node: Node, text: str) -> None:
        """For `art-sky logs`, when the machine is gone; on this computer also where the store cannot be written."""
        ...


class StoreLedger:
    """Implements `Ledger`. What a node never wrote is made from the controller's own record."""

    def reason(self, cluster: RentedCluster, node: Node) -> str | None:
        entry = self._read(cluster, node)
        return entry.reason if entry is not None else None

    def close(self, cluster: RentedCluster, node: Node, closed: float, reason: str) -> None:
        entry = self._read(cluster, node) or LedgerEntry(
            cluster=cluster.id,
            node=node.name,
            instance=node.instance,
            cloud=str(node.offer["cloud"]),
            region=str(node.offer["region"]),
            instance_type=str(node.offer["instance_type"]),
            spot=bool(node.offer["spot"]),
            price_per_hour=money.price(node),
            billed_from_unix=node.billed_from,
            seen_unix=closed,
        )
        entry = dataclasses.replace(entry, closed_unix=closed, reason=entry.reason or reason)
        store = _open(cluster)
        store.put(ledger_key(cluster.id, node.name), json.dumps(dataclasses.asdict(entry)).encode())

    def keep_log(self, cluster: RentedCluster, node: Node, text: str) -> None:
        keep_log(_open(cluster), cluster.id, node.name, text)

    def _read(self, cluster: RentedCluster, node: Node) -> LedgerEntry | None:
        key = ledger_key(cluster.id, node.name)
        try:
            return parse(_open(cluster).get(key).data.decode(), LedgerEntry, key)
        except ObjectNotFound:
            return None
        except ValueError as e:
            raise StoreError(f"{e}; look at {key} in {cluster.request.store}") from e


def _open(cluster: RentedCluster) -> Store:
    from art_sky.store import open_store

    try:
        return open_store(cluster.request.store_here)
    except InvalidConfig as e:
        raise StoreError(e.message) from e
