"""Small helpers around rollout functions: how many at once, again after an error, and a second way out."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from art_sky.errors import InvalidInput
from art_sky.trajectories import Trajectory

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("art_sky")


def limit_concurrency(
    n: int, derive_key: Callable[..., Hashable] | None = None
) -> Callable[[Callable[P, Coroutine[Any, Any, R]]], Callable[P, Coroutine[Any, Any, R]]]:
    """A decorator: at most `n` calls of the async function run at once, or `n` for each key that `derive_key`
    makes of the call's arguments."""
    if n < 1:
        raise InvalidInput(f"limit_concurrency({n}) lets nothing run; give at least 1")

    def decorate(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        # A semaphore belongs to one event loop. One that nobody uses is dropped, however many keys there are.
        slots: WeakKeyDictionary[Any, dict[Hashable, list[Any]]] = WeakKeyDictionary()

        @functools.wraps(function)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            key = None if derive_key is None else derive_key(*args, **kwargs)
            here = slots.setdefault(asyncio.get_running_loop(), {})
            slot = here.setdefault(key, [asyncio.Semaphore(n), 0])
            slot[1] += 1
            try:
                async with slot[0]:
                    return await function(*args, **kwargs)
            finally:
                slot[1] -= 1
                if slot[1] == 0:
                    del here[key]

        return limited

    return decorate


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[BaseException], ...] = (Exception,),
    on_retry: Callable[[BaseException, int], None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for functions, async or not: calls again after an error of the given types.

    Waits `delay` seconds before the second attempt and `backoff_factor` times longer before each further one.
    `on_retry(error, attempt)` is called before each wait. Cancellation, Ctrl-C and exit are never retried.
    """
    if max_attempts < 1:
        raise InvalidInput(f"retry(max_attempts={max_attempts}) never calls; give at least 1")

    def wait_after(error: BaseException, attempt: int) -> float:
        """Seconds to wait before the next attempt; raises `error` when there is none."""
        if attempt >= max_attempts or not isinstance(error, exceptions) or isinstance(error, _NEVER_RETRIED):
            raise error
        if on_retry is None:
            log.info("attempt %d of %d failed: %s", attempt, max_attempts, error)
        else:
            on_retry(error, attempt)
        return float(delay * backoff_factor ** (attempt - 1))

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def again_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                attempt = 1
                while True:
                    try:
                        return await function(*args, **kwargs)
                    except BaseException as e:
                        seconds = wait_after(e, attempt)
                    await asyncio.sleep(seconds)
                    attempt += 1

            return cast("Callable[P, R]", again_async)

        @functools.wraps(function)
        def again(*args: P.args, **kwargs: P.kwargs) -> R:
            attempt = 1
            while True:
                try:
                    return function(*args, **kwargs)
                except BaseException as e:
                    seconds = wait_after(e, attempt)
                time.sleep(seconds)
                attempt += 1

        return again

    return decorate


_NEVER_RETRIED = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
_yielded: ContextVar[list[Trajectory] | None] = ContextVar("art_sky_yielded", default=None)


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hands a trajectory to the `capture_yielded_trajectory` around this call, for functions whose return value
    is taken. The last one counts. Without such a call around it does nothing, so that agent code runs as usual."""
    box = _yielded.get()
    if box is not None:
        box[:] = [trajectory]


async def capture_yielded_trajectory(rollout: Awaitable[Any]) -> Trajectory:
    """Runs `rollout` and returns what it gave to `yield_trajectory`. Raises InvalidInput if it gave nothing."""
    box: list[Trajectory] = []
    token = _yielded.set(box)
    try:
        await rollout
    finally:
        _yielded.reset(token)
    if not box:
        raise InvalidInput("the rollout never called yield_trajectory; call it with the Trajectory before returning")
    return box[0]
