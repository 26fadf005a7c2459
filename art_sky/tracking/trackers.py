"""Which trackers a run has, and the thread that feeds them: training never waits for a dashboard."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, cast

from art_sky.errors import InvalidConfig
from art_sky.suggest import did_you_mean
from art_sky.tracking.protocol import Tracker, TrackerFactory

TRACKERS = {"wandb": "art_sky.tracking.wandb"}  # modules with a TrackerFactory `start`
FINISH_SECONDS = 30.0
Row = tuple[int, int, str, Mapping[str, float | None]]  # attempt, step, split, metrics
_log = logging.getLogger("art_sky.tracking")


def start(
    project: str,
    name: str,
    config: Mapping[str, Any],
    report_to: str | Iterable[str] | None = None,
    history: Iterable[Row] = (),
) -> Tracking | None:
    """The tracking of one model, or None when nobody asked for any. Returns at once.

    `report_to` names trackers ("wandb"), or "none"; None means Weights & Biases if WANDB_API_KEY is set.
    `history` are the rows logged before; those not yet shown are shown first. `config` is shown with the run,
    without anything that looks like a secret. Raises InvalidConfig for an unknown tracker and nothing else: a
    tracker that cannot start warns once.
    """
    factories = {kind: _factory(kind) for kind in _wanted(report_to)}
    if not factories:
        return None
    tracking = Tracking(project, name, config, factories)
    for row in history:
        tracking.log(*row)
    return tracking


class Tracking:
    """A `Tracker` that passes rows on to others, in a thread of its own.

    A tracker that fails is dropped with one warning; the store's history has every row all the same.
    """

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], factories: Mapping[str, TrackerFactory]
    ) -> None:
        self._project, self._name, self._config = project, name, dict(config)
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._finished = False
        self._thread = threading.Thread(target=self._run, args=(dict(factories),), name="tracking", daemon=True)
        self._thread.start()
        atexit.register(self.finish)

    def log(self, attempt: int, step: int, split: str, metrics: Mapping[str, float | None]) -> None:
        """Returns at once. Rows after `finish` are not shown."""
        if not self._finished:
            self._rows.put((attempt, step, split, dict(metrics)))

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Waits until everything is shown, but no longer than `seconds`; calling it again does nothing."""
        if self._finished:
            return
        self._finished = True
        atexit.unregister(self.finish)
        self._rows.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            _log.warning(
                "the dashboard of %s/%s was not up to date after %.0f s; the rows are in the store's history, and "
                "the next start shows those that are missing", self._project, self._name, seconds,
            )  # fmt: skip

    def _run(self, factories: dict[str, TrackerFactory]) -> None:
        trackers: dict[str, Tracker] = {}
        for kind, factory in factories.items():
            try:
                tracker = factory(self._project, self._name, self._config)
            except Exception as e:
                self._warn(kind, e)
            else:
                if tracker is not None:
                    trackers[kind] = tracker
        while (row := self._rows.get()) is not None:
            for kind, tracker in list(trackers.items()):
                try:
                    tracker.log(*row)
                except Exception as e:
                    self._warn(kind, e)
                    del trackers[kind]
        for kind, tracker in trackers.items():
            try:
                tracker.finish()
            except Exception as e:
                self._warn(kind, e)

    def _warn(self, kind: str, error: Exception) -> None:
        _log.warning(
            "%s shows no more rows of %s/%s: %s: %s; training goes on, the rows are in the store's history, and "
            "the next start shows those that are missing", kind, self._project, self._name, type(error).__name__, error,
        )  # fmt: skip


def _wanted(report_to: str | Iterable[str] | None) -> list[str]:
    if report_to is None:
        return ["wandb"] if os.environ.get("WANDB_API_KEY") else []
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    for name in names:
        if name not in TRACKERS and names != ["none"]:
            raise InvalidConfig(f"report_to: no tracker {name!r}; {did_you_mean(name, [*TRACKERS, 'none'])}")
    return [name for name in names if name != "none"]


def _factory(kind: str) -> TrackerFactory:
    return cast(TrackerFactory, import_module(TRACKERS[kind]).start)
