"""One clock for limits and deadlines: it counts the hours that a laptop sleeps, and no clock step moves it."""

from __future__ import annotations

import time

# On Linux CLOCK_MONOTONIC stands still during sleep and CLOCK_BOOTTIME does not; on macOS CLOCK_MONOTONIC goes on.
_COUNTS_SLEEP = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock:
    """`now` is Unix seconds as they were when this process began, plus what has passed since, sleep included.

    Setting the machine's clock meanwhile changes nothing. Two controllers one after the other may differ by what
    was set between them.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.clock_gettime(_COUNTS_SLEEP)

    def now(self) -> float:
        return self._offset + time.clock_gettime(_COUNTS_SLEEP)
