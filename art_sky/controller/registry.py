"""What the controller must not forget: every rented cluster with its nodes, in SQLite.

A record is on the disk before the call that it announces. Rows are never deleted: what was spent, and the names of
machines that must not exist any more, are of use later.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from art_sky.config import home
from art_sky.controller.rented import NODE_TRANSITIONS, Node, NodeState, RentedCluster
from art_sky.errors import CorruptObject, NotFound, StoreError, VersionMismatch
from art_sky.suggest import did_you_mean

SCHEMA = 1
_APPLICATION = 0x41525453  # "ARTS": a SQLite file of another program is not taken for ours
_TABLES = """
CREATE TABLE clusters (id TEXT PRIMARY KEY, name TEXT NOT NULL, created REAL NOT NULL, record TEXT NOT NULL);
CREATE INDEX clusters_by_name ON clusters (name, created);
CREATE TABLE events (n INTEGER PRIMARY KEY AUTOINCREMENT, time REAL, cluster TEXT NOT NULL, text TEXT NOT NULL);
CREATE INDEX events_by_cluster ON events (cluster, n);
"""


def registry_file() -> Path:
    return home() / "controller" / "registry.sqlite"


class Registry:
    """May be used from any thread; each method is one transaction. What only reads waits for nobody who writes.

    All methods raise StoreError while the file cannot be used, and CorruptObject.
    """

    def __init__(self, path: Path, busy_seconds: float = 10.0) -> None:
        """Raises CorruptObject for a file that is damaged or not a registry, VersionMismatch for a newer one.

        Another program that writes into the file is waited for `busy_seconds`.
        """
        self.path, self._busy = path, busy_seconds
        self._writing, self._reading = threading.Lock(), threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._explained():
            self._db = self._connect()
            try:
                self._prepare()
                self._reader = self._connect()
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        with self._writing, self._reading:
            self._reader.close()
            self._db.close()

    def add(self, cluster: RentedCluster) -> None:
        """A new run; an earlier one of the same name stays on record and is no longer found by its name."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO clusters (id, name, created, record) VALUES (?, ?, ?, ?)",
                (cluster.id, cluster.name, cluster.created, cluster.model_dump_json()),
            )

    def update(self, id: str, change: Callable[[RentedCluster], RentedCluster]) -> RentedCluster:
        """Reads, changes and writes one record in one transaction; returns the new one."""
        with self._transaction() as db:
            row = db.execute("SELECT record FROM clusters WHERE id = ?", (id,)).fetchone()
            if row is None:
                raise NotFound(f"there is no cluster {id}; see `art-sky status`")
            changed = change(self._parse(id, row[0]))
            db.execute("UPDATE clusters SET record = ? WHERE id = ?", (changed.model_dump_json(), id))
        return changed

    def get(self, id: str) -> RentedCluster:
        rows = self._select("SELECT record FROM clusters WHERE id = ?", id)
        if not rows:
            raise NotFound(f"there is no cluster {id}; see `art-sky status`")
        return self._parse(id, rows[0][0])

    def find(self, name: str) -> RentedCluster | None:
        """The newest run of this name."""
        return next((c for c in self.newest() if c.name == name), None)

    def named(self, name: str) -> RentedCluster:
        """Raises NotFound with a near name."""
        found = self.find(name)
        if found is None:
            near = did_you_mean(name, [c.name for c in self.newest()])
            raise NotFound(f"there is no rented cluster {name!r} ({near}); see `art-sky status`")
        return found

    def newest(self) -> list[RentedCluster]:
        """The newest run of each name, in the order of their making."""
        return list({c.name: c for c in self.all()}.values())

    def all(self) -> list[RentedCluster]:
        """Every run that there ever was, oldest first."""
        rows = self._select("SELECT id, record FROM clusters ORDER BY created, rowid")
        return [self._parse(id, record) for id, record in rows]

    def note(self, id: str, now: float, text: str) -> None:
        """Appends to the cluster's log of events."""
        with self._transaction() as db:
            db.execute("INSERT INTO events (time, cluster, text) VALUES (?, ?, ?)", (now, id, text))

    def events(self, id: str, after: int = 0) -> list[tuple[int, float, str]]:
        """(number, Unix seconds, text) of the events with a number above `after`."""
        return self._select("SELECT n, time, text FROM events WHERE cluster = ? AND n > ? ORDER BY n", id, after)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=self._busy)

    def _select(self, query: str, *values: object) -> list[Any]:
        with self._reading, self._explained():
            return self._reader.execute(query, values).fetchall()

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
            with self._transaction() as db:
                for statement in filter(str.strip, _TABLES.split(";")):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION}")
                db.execute(f"PRAGMA user_version = {SCHEMA}")
            self.path.chmod(0o600)
            return
        if self._db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
            raise CorruptObject(f"{self.path} is a database of another program; move it away and call again")
        if version > SCHEMA:
            raise VersionMismatch(
                f"{self.path} was written by a newer art-sky (format {version}, this one reads {SCHEMA}); "
                "run `pip install -U art-sky`"
            )
        # A damaged page shows itself here and not in the middle of a teardown.
        problem = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)

    def _parse(self, id: str, record: str) -> RentedCluster:
        try:
            return RentedCluster.model_validate_json(record)
        except ValidationError as e:
            raise CorruptObject(_unreadable(self.path, f"the record of {id}: {e.errors()[0]['msg']}")) from e

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing, self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as e:
            if "no such" in str(e):  # a table or column of ours is missing
                raise CorruptObject(_unreadable(self.path, str(e))) from e
            if "locked" in str(e):
                raise StoreError(
                    f"another program has locked {self.path} for more than {self._busy:g} s; end that one (`fuser "
                    f"{self.path}` names it), then call again"
                ) from e
            raise StoreError(
                f"{self.path} cannot be used now: {e}; free some space or mend that, and call again"
            ) from e
        except sqlite3.DatabaseError as e:
            raise CorruptObject(_unreadable(self.path, str(e))) from e


def moved(cluster: RentedCluster, state: NodeState, now: float, **changes: object) -> RentedCluster:
    """The cluster with its newest node one step along NODE_TRANSITIONS, which no caller may leave."""
    node = cluster.node
    if node is None or state not in NODE_TRANSITIONS[node.state]:
        there = f"{node.name} cannot go from {node.state}" if node else f"{cluster.name} has no node that could go"
        raise AssertionError(f"{there} to {state}")
    return with_node(cluster, state=state, since=now, **changes)


def with_node(cluster: RentedCluster, **changes: object) -> RentedCluster:
    """The cluster with other fields in its newest node."""
    last: Node = cluster.nodes[-1]
    return cluster.model_copy(update={"nodes": [*cluster.nodes[:-1], last.model_copy(update=changes)]})


def _unreadable(path: Path, why: str) -> str:
    return (
        f"the registry of rented machines {path} cannot be read ({why}); nothing was ended. Move it away, then "
        "`art-sky gc --clouds` lists the machines that exist"
    )
