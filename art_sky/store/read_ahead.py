"""Reading many small objects: several are on their way at a time, for each costs a round trip to the bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

READERS = 16
WORTH_IT = 8  # fewer are read one after the other

K = TypeVar("K")
T = TypeVar("T")


def read_ahead(
    read: Callable[[K], T], items: Sequence[K], readers: int = READERS, worth_it: int = WORTH_IT
) -> Iterator[T]:
    """`read(item)` of each, in their order; at most `readers` results wait to be taken. Raises what `read` raises.

    `worth_it`: from how many items on threads are started for it; few, where one item is several requests.
    """
    if len(items) < worth_it:
        yield from map(read, items)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(readers, thread_name_prefix="read-ahead") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(read, item))
                if len(waiting) >= readers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
