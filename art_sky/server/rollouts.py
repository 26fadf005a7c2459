"""Rollouts by address: a base URL and a key that open one rollout and nothing else.

The key is an HMAC of the rollout's id under the server's token, so that addresses survive a restart and no file
holds a second secret.
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

_ID = re.compile(r"r-[0-9a-f]{24}")


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
        self._open: dict[str, Rollout] = {}
        if self._path.exists():
            self._load()
        self._path.write_text("".join(_line("open", r) for r in self._open.values()))
        self._file = self._path.open("a")

    def open(self, project: str, name: str) -> tuple[Rollout, str]:
        """A new rollout and its key."""
        rollout = Rollout("r-" + secrets.token_hex(12), project, name)
        self._open[rollout.id] = rollout
        self._append("open", rollout)
        return rollout, self.key(rollout.id)

    def get(self, id: str) -> Rollout:
        """Raises NotFound for one that was never opened here or is closed."""
        if id not in self._open:
            raise NotFound(f"rollout {id[:80]!r} is not open here; open one with model.rollout()")
        return self._open[id]

    def close_rollout(self, id: str) -> None:
        """Idempotent: its key opens nothing any more; what it recorded stays."""
        rollout = self._open.pop(id, None)
        if rollout is not None:
            self._append("close", rollout)

    def key(self, id: str) -> str:
        return "rk-" + hmac.new(self._token, id.encode(), hashlib.sha256).hexdigest()

    def opens(self, key: str, id: str) -> bool:
        return _ID.fullmatch(id) is not None and hmac.compare_digest(key.encode(), self.key(id).encode())

    def close(self) -> None:
        self._file.close()

    def _append(self, event: str, rollout: Rollout) -> None:
        self._file.write(_line(event, rollout))
        self._file.flush()

    def _load(self) -> None:
        for line in self._path.read_text(errors="replace").splitlines():
            try:
                event, id, project, name = json.loads(line)
            except ValueError:
                continue  # a line half written when the server died
            if event == "open":
                self._open[id] = Rollout(id, project, name)
            else:
                self._open.pop(id, None)


def _line(event: str, rollout: Rollout) -> str:
    return dumps([event, rollout.id, rollout.project, rollout.name]) + "\n"
