"""Time as the node's programs see it. Tests bring a clock of their own."""

from __future__ import annotations

import time

from art_sky.node import guard


class Clock:
    def now(self) -> guard.Moment:
        """CLOCK_BOOTTIME: counts sleep, and no step of the wall clock moves it."""
        return guard.this_moment()

    def unix(self) -> float:
        """For people and for the ledger, never to decide by."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def timeout(self, seconds: float) -> float:
        """What to give a socket or a process as a timeout."""
        return seconds
