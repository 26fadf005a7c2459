"""Rollouts by address: a base URL and a key that open one rollout and nothing else.

The key names the rollout's model and holds an HMAC of both under the server's token, so that no file holds a second
secret, and an address survives a restart as well as its machine: the next one has the same token, and goes on with the
rollout when its key first comes. What the machine before had recorded is not there; `opened_here` tells.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from art_sky.errors import NotFound
from art_sky.server.wire_json import dumps

_ID = re.compile(r"r-([0-9a-f]{8})[0-9a-f]{16}")  # the state folder that opened it, and a number
_KEY = re.compile(r"rk-[0-9a-f]{64}\.([^/]+)/([^/]+)")


@dataclass(frozen=True)
class Rollout:
    id: str
    project: str
    name: str


class Rollouts:
    """Open rollouts; `rollouts.jsonl` brings them back after a restart."""

    def __init__(self, folder: Path, token: str) -> None:
        self._token = token.encode()
        self._path = folder / "rollouts.jsonl"
        self._here = secrets.token_hex(4)
        self._open: dict[str, Rollout] = {}
        # Only of those that were opened elsewhere: one of our own that is not open was closed.
        self._closed: dict[str, Rollout] = {}
        if self._path.exists():
            self._load()
        kept = [("open", r) for r in self._open.values()] + [("close", r) for r in self._closed.values()]
        lines = [_line("here", Rollout(self._here, "", "")), *(_line(event, r) for event, r in kept)]
        self._path.write_text("".join(lines))
        self._file = self._path.open("a")

    def open(self, project: str, name: str) -> tuple[Rollout, str]:
        """A new rollout and its key."""
        rollout = Rollout(f"r-{self._here}{secrets.token_hex(8)}", project, name)
        self._keep_open(rollout)
        return rollout, self._key(rollout)

    def get(self, id: str) -> Rollout:
        """Raises NotFound for one that is not open here."""
        if id not in self._open:
            raise NotFound(f"rollout {id[:80]!r} is not open here; open one with model.rollout()")
        return self._open[id]

    def opened_here(self, id: str) -> bool:
        """False: what another machine recorded of it is lost."""
        parsed = _ID.fullmatch(id)
        return parsed is not None and parsed[1] == self._here

    def close_rollout(self, id: str) -> None:
        """Idempotent: its key opens nothing any more; what it recorded stays."""
        rollout = self._open.pop(id, None)
        if not self.opened_here(id) and _ID.fullmatch(id) is not None and id not in self._closed:
            rollout = self._closed[id] = Rollout(id, "", "")
        if rollout is not None:
            self._append("close", rollout)

    def admits(self, key: str, id: str) -> bool:
        """Whether this is the key of that rollout. One that another machine opened is open here from now on."""
        named = _KEY.fullmatch(key)
        if named is None or _ID.fullmatch(id) is None:
            return False
        rollout = Rollout(id, named[1], named[2])
        if not hmac.compare_digest(key.encode(), self._key(rollout).encode()):
            return False
        if id not in self._open and id not in self._closed and not self.opened_here(id):
            self._keep_open(rollout)
        return True

    def close(self) -> None:
        self._file.close()

    def _key(self, rollout: Rollout) -> str:
        model = f"{rollout.project}/{rollout.name}"
        return f"rk-{hmac.new(self._token, f'{rollout.id} {model}'.encode(), hashlib.sha256).hexdigest()}.{model}"

    def _keep_open(self, rollout: Rollout) -> None:
        self._open[rollout.id] = rollout
        self._append("open", rollout)

    def _append(self, event: str, rollout: Rollout) -> None:
        self._file.write(_line(event, rollout))
        self._file.flush()

    def _load(self) -> None:
        closed: set[str] = set()
        for line in self._path.read_text(errors="replace").splitlines():
            try:
                event, id, project, name = json.loads(line)
            except ValueError:
                continue  # a line half written when the server died
            if event == "here":
                self._here = id
            elif event == "open":
                self._open[id] = Rollout(id, project, name)
            else:
                self._open.pop(id, None)
                closed.add(id)
        self._closed = {id: Rollout(id, "", "") for id in closed if not self.opened_here(id)}


def _line(event: str, rollout: Rollout) -> str:
    return dumps([event, rollout.id, rollout.project, rollout.name]) + "\n"
