"""The `Tracker` protocol: a view of the run's own history in somebody's dashboard.

The store's history is the truth; a tracker that fails warns once and never stops training (DESIGN §9).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Tracker(Protocol):
    def log(self, attempt: int, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        """Shows one row. The same (attempt, step, split) again updates it and never doubles a point."""
        ...

    def finish(self) -> None: ...


class TrackerFactory(Protocol):
    def __call__(self, project: str, name: str, config: Mapping[str, Any]) -> Tracker | None:
        """A tracker for one model, or None when it is not wanted here."""
        ...
