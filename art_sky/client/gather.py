"""Runs rollouts: many at once, within bounds, with every failure accounted for.

A rollout that raises an Exception becomes a `RolloutError` of its group and stays out of the group's baseline.
Cancellation and Ctrl-C are never counted as failures: they end the gather at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from openai.types.chat.chat_completion import Choice

from art_sky.client.progress import Bar, progress_bar
from art_sky.errors import InvalidInput, TooManyFailures
from art_sky.trajectories import RolloutError, Trajectory, TrajectoryGroup, close_unused

T = TypeVar("T")
AfterEach: TypeAlias = Callable[[TrajectoryGroup], Coroutine[Any, Any, TrajectoryGroup | list[TrajectoryGroup] | None]]
log = logging.getLogger("art_sky")

# A cancelled gather waits this long for its rollouts to clean up, then leaves them: Ctrl-C must not hang.
CANCEL_GRACE_SECONDS = 0.75
# Before an error is raised the siblings are waited for longer, so that they no longer use what the caller frees.
FAILURE_GRACE_SECONDS = 30.0


async def gather_trajectory_groups(
    groups: Iterable[TrajectoryGroup | Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int = 0,
    max_exception_rate: float | None = None,
    max_concurrency: int | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  # of each rollout, not of this call
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Runs the rollouts of all groups and returns the groups in order.

    Rollouts may fail as long as no more than `max_exceptions` of them, or, where that is more,
    `max_exception_rate` of all of them, do. At most `max_concurrency` rollouts run at once; each may take
    `timeout` seconds. `after_each` is awaited for every group with at least one trajectory as soon as its rollouts
    are done, and returns what takes its place: a group, a list of groups, or None to drop it.

    Raises TooManyFailures, after all other rollouts were cancelled and have ended; what `after_each` raises; and
    InvalidInput for wrong arguments.
    """
    run = _Run(
        limits=_Limits(max_exceptions, max_exception_rate),
        slots=_slots(max_concurrency),
        timeout=_positive("timeout", timeout),
        count_tokens=pbar_total_completion_tokens,
    )
    return await _gather(run, list(groups), pbar_desc, after_each)


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int = 0,
    max_exception_rate: float | None = None,
    max_concurrency: int | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  # of each rollout, not of this call
) -> list[Trajectory]:
    """Like `gather_trajectory_groups`, for rollouts that belong to no group; failed ones are left out."""
    (group,) = await gather_trajectory_groups(
        [TrajectoryGroup(trajectories)],
        pbar_desc=pbar_desc,
        pbar_total_completion_tokens=pbar_total_completion_tokens,
        max_exceptions=max_exceptions,
        max_exception_rate=max_exception_rate,
        max_concurrency=max_concurrency,
        timeout=timeout,
    )
    return group.trajectories


async def trajectory_group_batches(
    groups: Iterable[TrajectoryGroup | Awaitable[TrajectoryGroup]],
    *,
    batch_size: int,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    max_batch_exceptions: int = 0,
    max_batch_exception_rate: float | None = None,
    max_concurrency: int | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  # of each rollout, not of this call
    pbar_desc: str | None = "batch",
    pbar_total_completion_tokens: bool = False,
    after_each: AfterEach | None = None,
) -> AsyncIterator[list[TrajectoryGroup]]:
    """Yields batches of `batch_size` groups in order, while the rollouts of later batches run already.

    `max_concurrent_batches` bounds how many batches are run at once, the one that is waited for included, and so
    how old the policy of a rollout can be when it is trained on. `skip_batches` passes over batches that were
    trained on before, without running them; with the same `groups` a run is resumed by
    `skip_batches=await model.get_step()`. The last batch may be smaller. The other options are those of
    `gather_trajectory_groups`, and hold for each batch; `max_concurrency` holds for all together.
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("max_concurrent_batches", max_concurrent_batches, 1),
        ("skip_batches", skip_batches, 0),
    ):
        if value < least:
            raise InvalidInput(f"{name}={value} is too small; give at least {least}")
    limits = _Limits(max_batch_exceptions, max_batch_exception_rate)
    slots, seconds = _slots(max_concurrency), _positive("timeout", timeout)
    rest = iter(groups)
    for group in islice(rest, batch_size * skip_batches):
        group.discard() if isinstance(group, TrajectoryGroup) else close_unused(group)
    running: list[asyncio.Task[list[TrajectoryGroup]]] = []
    number = skip_batches
    try:
        while True:
            while len(running) < max_concurrent_batches and (batch := list(islice(rest, batch_size))):
                run = _Run(limits, slots, seconds, pbar_total_completion_tokens)
                description = None if pbar_desc is None else f"{pbar_desc} {number}"
                running.append(asyncio.create_task(_gather(run, batch, description, after_each)))
                number += 1
            if not running:
                return
            # Popped only when done, so that `finally` sees it if this wait is cancelled.
            done = await running[0]
            running.pop(0)
            yield done
    finally:
        await _end(running, CANCEL_GRACE_SECONDS)


async def run_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """Runs what `group` has not run yet, within the gather that surrounds this call, if any."""
    run = _current.get()
    if run is not None:
        return await run.finish_group(group, index=None)
    run = _Run(_Limits(0, None), contextlib.nullcontext(), None, False)
    async with run.ending_all():
        return await run.finish_group(group, index=None)


# --- the machinery --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Limits:
    count: int
    rate: float | None

    def __post_init__(self) -> None:
        if isinstance(self.count, float):
            raise InvalidInput(
                f"max_exceptions={self.count} is a count of rollouts and must be an int; for a fraction write "
                f"max_exception_rate={self.count if 0 <= self.count <= 1 else 0.1}"
            )
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise InvalidInput(f"max_exceptions={self.count!r} is not a count; give an int of at least 0")
        if self.rate is not None and not 0 <= self.rate <= 1:
            raise InvalidInput(f"max_exception_rate={self.rate!r} is not a fraction; give a number from 0 to 1")

    def allowed(self, total: int) -> int:
        return max(self.count, int((self.rate or 0.0) * total + 1e-9))

    def __str__(self) -> str:
        rate = "" if self.rate is None else f" and max_exception_rate={self.rate}"
        return f"max_exceptions={self.count}{rate}"


@dataclass
class _Run:
    """What the rollouts of one gather share: limits, counts, and the bar that shows them."""

    limits: _Limits
    slots: contextlib.AbstractAsyncContextManager[Any]
    timeout: float | None
    count_tokens: bool
    total: int = 0
    all_known: bool = True  # False while a group given as a plain awaitable may still bring rollouts
    done: int = 0
    failures: list[tuple[str, Exception]] = field(default_factory=list)
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    tokens: int = 0
    bar: Bar | None = None
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def ending_all(self) -> AsyncIterator[None]:
        """Whatever ends the block, no task of this run outlives it (within the graces above)."""
        grace = CANCEL_GRACE_SECONDS
        try:
            yield
        except Exception:
            grace = FAILURE_GRACE_SECONDS
            raise
        finally:
            await _end(self.tasks, grace)

    async def run_all(self, coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Results in order. The first error or cancellation cancels the others and is raised."""
        tasks = [asyncio.create_task(c) for c in coroutines]
        self.tasks += tasks
        # asyncio.wait, asked again after each of n tasks, would take n * n steps.
        over: asyncio.Future[asyncio.Task[T]] = asyncio.get_running_loop().create_future()
        left = len(tasks)

        def ended(task: asyncio.Task[T]) -> None:
            nonlocal left
            left -= 1
            if not over.done() and (left == 0 or task.cancelled() or task.exception() is not None):
                over.set_result(task)

        for task in tasks:
            task.add_done_callback(ended)
        try:
            if tasks:
                (await over).result()  # the first that failed, or the last
            return [task.result() for task in tasks]
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def finish_group(self, group: TrajectoryGroup, index: int | None) -> TrajectoryGroup:
        rollouts = group.take_pending()
        if index is None:
            self.add(len(rollouts))
        place = "" if index is None else f" of group {index}"
        try:
            results = await self.run_all([self._rollout(r, f"rollout {i}{place}") for i, r in enumerate(rollouts)])
        finally:
            for rollout in rollouts:  # those that never began
                close_unused(rollout)
        group.trajectories.extend(r for r in results if isinstance(r, Trajectory))
        group.exceptions.extend(r for r in results if isinstance(r, RolloutError))
        return group

    def add(self, rollouts: int) -> None:
        self.total += rollouts
        self.show()

    def check(self) -> None:
        if len(self.failures) <= self.limits.allowed(self.total):
            return
        first = "; ".join(f"{where}: {RolloutError.of(e)}" for where, e in self.failures[:3])
        raise TooManyFailures(
            f"{len(self.failures)} of {self.total} rollouts failed, {self.limits} allows "
            f"{self.limits.allowed(self.total)}; {first}; mend the rollout, or allow more failures"
        ) from self.failures[0][1]

    def show(self) -> None:
        if self.bar is None:
            return
        means = [f"{name} {total / n:.3g}" for name, (total, n) in list(self.sums.items())[:5]]
        if self.count_tokens:
            means.append(f"{self.tokens} tokens")
        if self.failures:
            means.append(f"{len(self.failures)} failed")
        self.bar.update(done=self.done, total=self.total, text="  ".join(means))

    async def _rollout(self, rollout: Awaitable[Trajectory], where: str) -> Trajectory | RolloutError:
        # A group that a rollout awaits is its own affair; it must not wait for a slot that this rollout holds.
        _current.set(None)
        try:
            async with self.slots:
                trajectory = await self._timed(rollout)
            if not isinstance(trajectory, Trajectory):
                raise InvalidInput(f"the rollout returned {type(trajectory).__name__}; return a Trajectory")
        except Exception as e:
            self.done += 1
            self.failures.append((where, e))
            self.show()
            if self.all_known or self.limits.rate is None:
                self.check()
            return RolloutError.of(e)
        self.done += 1
        self._count(trajectory)
        self.show()
        return trajectory

    async def _timed(self, rollout: Awaitable[Trajectory]) -> Trajectory:
        try:
            async with asyncio.timeout(self.timeout) as deadline:
                return await rollout
        except TimeoutError as e:
            if deadline.expired():
                raise TimeoutError(f"the rollout took longer than timeout={self.timeout:g} s") from e
            raise

    def _count(self, trajectory: Trajectory) -> None:
        for name, value in [("reward", trajectory.reward), *trajectory.metrics.items()]:
            total, n = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + float(value), n + 1)
        if self.count_tokens:
            for history in trajectory.histories():
                for item in history.messages_and_choices:
                    if isinstance(item, Choice):
                        self.tokens += len(getattr(item, "token_ids", None) or ())


_current: ContextVar[_Run | None] = ContextVar("art_sky_gather", default=None)


async def _gather(
    run: _Run,
    groups: Sequence[TrajectoryGroup | Awaitable[TrajectoryGroup]],
    description: str | None,
    after_each: AfterEach | None,
) -> list[TrajectoryGroup]:
    run.total = sum(g.pending for g in groups if isinstance(g, TrajectoryGroup))
    open_groups = sum(not isinstance(g, TrajectoryGroup) for g in groups)
    run.all_known = open_groups == 0

    async def one(index: int, given: TrajectoryGroup | Awaitable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        nonlocal open_groups
        if isinstance(given, TrajectoryGroup):
            group = await run.finish_group(given, index)
        else:
            group = await given
            open_groups -= 1
            run.all_known = open_groups == 0
        if not isinstance(group, TrajectoryGroup):
            raise InvalidInput(f"group {index} is {type(group).__name__}; give TrajectoryGroup(...)")
        if after_each is None or not group.trajectories:
            return [group]
        return _replacement(await after_each(group))

    token = _current.set(run)  # inherited by the tasks, seen by groups that are awaited inside them
    try:
        with progress_bar(description, run.total) as run.bar:
            async with run.ending_all():
                results = await run.run_all([one(i, g) for i, g in enumerate(groups)])
                run.check()
                return [group for groups_of_one in results for group in groups_of_one]
    finally:
        _current.reset(token)
        for given in groups:  # those that never began
            given.discard() if isinstance(given, TrajectoryGroup) else close_unused(given)


def _replacement(result: Any) -> list[TrajectoryGroup]:
    groups = [] if result is None else result if isinstance(result, list) else [result]
    for group in groups:
        if not isinstance(group, TrajectoryGroup):
            raise InvalidInput(
                f"after_each returned {type(group).__name__}; return a TrajectoryGroup, a list of them, or None to drop"
            )
    return groups


async def _end(tasks: Sequence[asyncio.Task[Any]], seconds: float) -> None:
    """Cancels the tasks that still run and waits for them, at most so long."""
    running = {t for t in tasks if not t.done()}
    for task in running:
        task.cancel()
    if running:
        _, left = await asyncio.wait(running, timeout=seconds)
        if left:
            log.warning(
                "%d rollouts did not end within %g s of being cancelled and were left running; let CancelledError "
                "pass through your rollout",
                len(left),
                seconds,
            )
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen: asyncio must not report it a second time


def _slots(max_concurrency: int | None) -> contextlib.AbstractAsyncContextManager[Any]:
    if max_concurrency is None:
        return contextlib.nullcontext()
    if max_concurrency < 1:
        raise InvalidInput(f"max_concurrency={max_concurrency} is too small; give at least 1, or None for no limit")
    return asyncio.Semaphore(max_concurrency)


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise InvalidInput(f"{name}={value} is not a time; give seconds above 0, or None for no limit")
    return value
