"""What gather promises: bounds, typed failures, and cancellation that is never swallowed."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

import art_sky as art
from art_sky.client import gather
from art_sky.errors import InvalidInput, TooManyFailures


def trajectory(reward: float = 0.0, **metrics: float) -> art.Trajectory:
    return art.Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}], reward=reward, metrics=metrics)


async def ok(reward: float = 0.0) -> art.Trajectory:
    await asyncio.sleep(0)
    return trajectory(reward)


async def fail(message: str = "boom") -> art.Trajectory:
    await asyncio.sleep(0)
    raise ValueError(message)


class Forever:
    """Rollouts that wait until they are cancelled, and how they fared."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.running = self.ended = 0

    async def __call__(self) -> art.Trajectory:
        self.running += 1
        self.started.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")
        finally:
            await asyncio.sleep(0)  # an orderly rollout cleans up, which takes a moment
            self.running -= 1
            self.ended += 1


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """No test may leave a task running, nor a coroutine that was never awaited."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [t for t in asyncio.all_tasks() if "rollout" in repr(t.get_coro())] == []
    assert [str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)] == []


async def test_groups_and_trajectories_keep_their_order() -> None:
    async def slow_first(i: int) -> art.Trajectory:
        for _ in range(5 - i):
            await asyncio.sleep(0)
        return trajectory(i)

    groups = await art.gather_trajectory_groups(art.TrajectoryGroup(slow_first(i) for i in range(4)) for _ in range(3))
    assert [[t.reward for t in g] for g in groups] == [[0, 1, 2, 3]] * 3
    assert [t.reward for t in await art.gather_trajectories(slow_first(i) for i in range(3))] == [0, 1, 2]


async def test_empty_groups_are_fine() -> None:
    assert await art.gather_trajectory_groups([]) == []
    (group,) = await art.gather_trajectory_groups([art.TrajectoryGroup([])])
    assert len(group) == 0
    assert await art.gather_trajectories([]) == []


async def test_a_group_is_awaitable_on_its_own() -> None:
    group = art.TrajectoryGroup((ok(i) for i in range(2)), metadata={"task": 7})
    with pytest.raises(InvalidInput, match="2 rollouts of this group have not run"):
        len(group)
    assert await group is group
    assert [t.reward for t in group] == [0, 1] and group.metadata == {"task": 7}
    with pytest.raises(TooManyFailures, match="ValueError: boom"):
        await art.TrajectoryGroup([ok(), fail()])


async def test_failures_within_the_limit_are_typed_records() -> None:
    (group,) = await art.gather_trajectory_groups([art.TrajectoryGroup([ok(1), fail("x"), ok(2)])], max_exceptions=1)
    assert [t.reward for t in group] == [1, 2]
    (error,) = group.exceptions
    assert (error.type, error.message) == ("ValueError", "x") and "in fail" in error.traceback
    # a group in which everything failed is still a group
    (group,) = await art.gather_trajectory_groups([art.TrajectoryGroup([fail(), fail()])], max_exception_rate=1.0)
    assert len(group) == 0 and len(group.exceptions) == 2


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, 0),
        ({"max_exceptions": 2}, 2),
        ({"max_exception_rate": 0.25}, 2),
        ({"max_exception_rate": 0.25, "max_exceptions": 3}, 3),
        ({"max_exception_rate": 0.5, "max_exceptions": 3}, 4),
    ],
)
async def test_limits(options: dict[str, Any], allowed: int) -> None:
    def groups(failing: int) -> list[art.TrajectoryGroup]:
        rollouts = [fail(str(i)) for i in range(failing)] + [ok() for _ in range(8 - failing)]
        return [art.TrajectoryGroup(rollouts[:4]), art.TrajectoryGroup(rollouts[4:])]

    done = await art.gather_trajectory_groups(groups(allowed), **options)
    assert sum(len(g.exceptions) for g in done) == allowed
    with pytest.raises(TooManyFailures) as caught:
        await art.gather_trajectory_groups(groups(allowed + 1), **options)
    assert f"{allowed + 1} of 8 rollouts failed" in str(caught.value)
    assert "rollout 0 of group 0: ValueError: 0" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("value", [0.5, 1.0, 0.0])
async def test_a_float_count_is_refused_with_the_name_of_the_rate(value: float) -> None:
    with pytest.raises(InvalidInput, match=f"max_exception_rate={value}"):
        await art.gather_trajectory_groups([], max_exceptions=value)  # type: ignore[arg-type]  # the point


@pytest.mark.parametrize(
    "options",
    [
        {"max_exceptions": -1},
        {"max_exceptions": True},
        {"max_exception_rate": 2.0},
        {"max_exception_rate": float("nan")},
        {"max_concurrency": 0},
        {"timeout": 0},
        {"timeout": float("nan")},
    ],
)
async def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        await art.gather_trajectories([], **options)


async def test_siblings_are_cancelled_and_awaited_before_the_error() -> None:
    forever = Forever()

    async def fail_later() -> art.Trajectory:
        await forever.started.wait()
        raise ValueError("boom")

    with pytest.raises(TooManyFailures):
        await art.gather_trajectory_groups(
            [art.TrajectoryGroup([forever(), forever()]), art.TrajectoryGroup([fail_later(), forever()])]
        )
    assert forever.running == 0 and forever.ended == 3


@pytest.mark.parametrize("options", [{}, {"max_exceptions": 100}, {"max_concurrency": 1, "max_exceptions": 100}])
async def test_cancelling_the_gather_ends_it_at_once(options: dict[str, Any]) -> None:
    forever = Forever()
    task = asyncio.create_task(  # noqa: RUF006  # cancelled below
        art.gather_trajectory_groups([art.TrajectoryGroup(forever() for _ in range(3)) for _ in range(2)], **options)
    )
    await forever.started.wait()
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 1
    assert forever.running == 0


async def test_cancelling_before_the_first_rollout_has_begun() -> None:
    forever = Forever()
    task = asyncio.create_task(art.gather_trajectory_groups([art.TrajectoryGroup([forever()])]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert forever.running == 0


async def test_a_rollout_that_swallows_cancellation_does_not_hold_up_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gather, "CANCEL_GRACE_SECONDS", 0.02)
    release, started = asyncio.Event(), asyncio.Event()

    async def stubborn() -> art.Trajectory:
        started.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return trajectory()

    task = asyncio.create_task(art.gather_trajectories([stubborn()]))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "did not end" in caplog.text
    release.set()
    await asyncio.sleep(0.01)


async def test_a_rollout_that_is_cancelled_is_no_failure() -> None:
    async def cancelled() -> art.Trajectory:
        raise asyncio.CancelledError

    forever = Forever()
    with pytest.raises(asyncio.CancelledError):
        await art.gather_trajectories([cancelled(), forever()], max_exceptions=10)
    assert forever.running == 0


def test_keyboard_interrupt_of_a_rollout_ends_everything() -> None:
    ended = []

    async def forever() -> art.Trajectory:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    async def interrupt() -> art.Trajectory:
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(art.gather_trajectories([forever(), interrupt()], max_exceptions=10))
    assert ended == [True]


async def test_concurrency_is_bounded_over_all_groups() -> None:
    running = most = 0

    async def rollout() -> art.Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return trajectory()

    await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout() for _ in range(4)) for _ in range(3)), max_concurrency=2
    )
    assert most == 2


async def test_a_group_awaited_inside_a_rollout_needs_no_slot() -> None:
    async def outer() -> art.Trajectory:
        inner = await art.TrajectoryGroup([ok(1)])
        return inner.trajectories[0]

    (only,) = await art.gather_trajectories([outer()], max_concurrency=1)
    assert only.reward == 1


async def test_a_timeout_is_a_failure_with_the_limit_in_it() -> None:
    forever = Forever()
    (group,) = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([forever(), ok()])], timeout=0.01, max_exceptions=1
    )
    assert len(group) == 1 and forever.running == 0
    assert str(group.exceptions[0]) == "TimeoutError: the rollout took longer than timeout=0.01 s"


async def test_a_rollout_must_return_a_trajectory() -> None:
    async def wrong() -> Any:
        return 3

    with pytest.raises(TooManyFailures, match="the rollout returned int"):
        await art.gather_trajectories([wrong()])


async def test_groups_of_an_async_function_count_in_the_same_limits() -> None:
    async def group() -> art.TrajectoryGroup:
        await asyncio.sleep(0)
        return await art.TrajectoryGroup([ok(), fail()])

    done = await art.gather_trajectory_groups([group(), group()], max_exception_rate=0.5)
    assert [(len(g), len(g.exceptions)) for g in done] == [(1, 1), (1, 1)]
    with pytest.raises(TooManyFailures, match="of 4 rollouts failed"):
        await art.gather_trajectory_groups([group(), group()], max_exceptions=1)


async def test_after_each_keeps_drops_and_splits() -> None:
    seen: list[float] = []

    async def after_each(group: art.TrajectoryGroup) -> art.TrajectoryGroup | list[art.TrajectoryGroup] | None:
        first = group.trajectories[0].reward
        seen.append(first)
        if first == 0:
            return None
        if first == 1:
            return [art.TrajectoryGroup([t]) for t in group]
        return group

    done = await art.gather_trajectory_groups(
        [art.TrajectoryGroup([ok(i), ok(i + 10)]) for i in range(3)] + [art.TrajectoryGroup([fail()])],
        after_each=after_each,
        max_exceptions=1,
    )
    assert [[t.reward for t in g] for g in done] == [[1], [11], [2, 12], []]
    assert sorted(seen) == [0, 1, 2]  # once each, and not for the group without trajectories


async def test_an_error_in_after_each_ends_the_gather() -> None:
    forever = Forever()

    async def judge(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        raise LookupError("no judge")

    with pytest.raises(LookupError):
        await art.gather_trajectory_groups(
            [art.TrajectoryGroup([ok()]), art.TrajectoryGroup([forever()])], after_each=judge
        )
    assert forever.running == 0

    async def wrong(group: art.TrajectoryGroup) -> Any:
        return "group"

    with pytest.raises(InvalidInput, match="after_each returned str"):
        await art.gather_trajectory_groups([art.TrajectoryGroup([ok()])], after_each=wrong)


async def test_batches_come_in_order_and_only_so_many_run_ahead() -> None:
    started: list[int] = []

    async def rollout(i: int) -> art.Trajectory:
        started.append(i)
        await asyncio.sleep(0)
        return trajectory(i)

    groups = (art.TrajectoryGroup([rollout(i)]) for i in range(11))
    batches = art.trajectory_group_batches(groups, batch_size=2, max_concurrent_batches=2, skip_batches=1)
    seen = []
    async for batch in batches:
        seen.append([g.trajectories[0].reward for g in batch])
        assert max(started) <= 2 + 2 * (len(seen) + 1)
    assert seen == [[2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert started == list(range(2, 11))


async def test_leaving_the_batches_early_ends_what_runs() -> None:
    forever = Forever()

    def groups() -> Any:
        yield art.TrajectoryGroup([ok()])
        while True:
            yield art.TrajectoryGroup([forever()])

    batches = art.trajectory_group_batches(groups(), batch_size=1, max_concurrent_batches=3)
    assert len(await anext(batches)) == 1
    await batches.aclose()  # type: ignore[attr-defined]  # an async generator
    assert forever.running == 0

    failing = art.trajectory_group_batches([art.TrajectoryGroup([fail()])], batch_size=1)
    with pytest.raises(TooManyFailures):
        await anext(failing)
    allowed = art.trajectory_group_batches([art.TrajectoryGroup([fail()])], batch_size=1, max_batch_exceptions=1)
    assert len((await anext(allowed))[0].exceptions) == 1


async def test_the_bar_shows_means_and_failures(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")

    async def scored() -> art.Trajectory:
        return trajectory(0.5, accuracy=0.25)

    await art.gather_trajectories([scored(), scored(), fail()], max_exceptions=1, pbar_desc="rollouts")
    out, err = capsys.readouterr()
    assert out == ""
    for text in ("rollouts", "reward 0.5", "accuracy 0.25", "1 failed", "3/3"):
        assert text in err
    monkeypatch.delenv("FORCE_COLOR")
    await art.gather_trajectories([scored()])
    assert capsys.readouterr().err == ""


def test_iterate_dataset_is_repeatable_and_leaves_global_random_alone() -> None:
    import random

    random.seed(1)
    state = random.getstate()
    data = list("abcdefg")
    batches = list(art.iterate_dataset(data, groups_per_step=3, num_epochs=2))
    assert random.getstate() == state
    assert [(b.step, b.epoch, b.epoch_step, len(b.items)) for b in batches] == [
        (0, 0, 0, 3), (1, 0, 1, 3), (2, 0, 2, 1), (3, 1, 0, 3), (4, 1, 1, 3), (5, 1, 2, 1),
    ]  # fmt: skip
    for epoch in (0, 1):
        assert sorted(x for b in batches if b.epoch == epoch for x in b.items) == data
    assert [b.items for b in batches[:3]] != [b.items for b in batches[3:]]
    assert list(art.iterate_dataset(data, 3, 2, initial_step=4)) == batches[4:]
    assert list(art.iterate_dataset(data, 3, 2, initial_step=6)) == list(art.iterate_dataset([], 3, 2)) == []
    for items, epoch, step, epoch_step in batches:
        assert batches[step].items == items and (batches[step].epoch, batches[step].epoch_step) == (epoch, epoch_step)
    with pytest.raises(InvalidInput):
        art.iterate_dataset(data, groups_per_step=0)


async def test_limit_concurrency_by_key() -> None:
    running: dict[str, int] = {}
    most: dict[str, int] = {}

    @art.limit_concurrency(2, derive_key=lambda key: key)
    async def call(key: str) -> str:
        running[key] = running.get(key, 0) + 1
        most[key] = max(most.get(key, 0), running[key])
        await asyncio.sleep(0)
        running[key] -= 1
        return key

    assert await asyncio.gather(*(call(k) for k in "aaaaabbb")) == list("aaaaabbb")
    assert most == {"a": 2, "b": 2}


def test_limit_concurrency_works_in_one_event_loop_after_another() -> None:
    @art.limit_concurrency(1)
    async def call() -> int:
        await asyncio.sleep(0)
        return 1

    async def both() -> list[int]:
        return await asyncio.gather(call(), call())

    assert asyncio.run(both()) == asyncio.run(both()) == [1, 1]


async def test_retry_async(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("art_sky.client.flow.asyncio.sleep", sleep)
    attempts: list[int] = []
    heard: list[tuple[str, int]] = []

    @art.retry(max_attempts=4, delay=1, backoff_factor=3, on_retry=lambda e, n: heard.append((str(e), n)))
    async def flaky(until: int) -> int:
        attempts.append(1)
        if len(attempts) < until:
            raise ValueError(f"no {len(attempts)}")
        return len(attempts)

    assert await flaky(3) == 3
    assert slept == [1, 3] and heard == [("no 1", 1), ("no 2", 2)]
    attempts.clear()
    with pytest.raises(ValueError, match="no 4"):
        await flaky(9)

    @art.retry(exceptions=(BaseException,))
    async def cancelled() -> None:
        attempts.append(1)
        raise asyncio.CancelledError

    attempts.clear()
    with pytest.raises(asyncio.CancelledError):
        await cancelled()
    assert len(attempts) == 1


def test_retry_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_sky.client.flow.time.sleep", lambda s: None)
    attempts: list[int] = []

    @art.retry(exceptions=(KeyError,))
    def flaky(error: type[Exception]) -> None:
        attempts.append(1)
        raise error

    with pytest.raises(KeyError):
        flaky(KeyError)
    with pytest.raises(ValueError):
        flaky(ValueError)
    assert len(attempts) == 3 + 1


async def test_yielded_trajectories() -> None:
    async def agent() -> str:
        art.yield_trajectory(trajectory(1))

        async def nested() -> None:
            art.yield_trajectory(trajectory(2))

        await asyncio.create_task(nested())
        return "answer"

    assert (await art.capture_yielded_trajectory(agent())).reward == 2
    assert await agent() == "answer"  # without a capture around it

    async def silent() -> None: ...

    with pytest.raises(InvalidInput, match="never called yield_trajectory"):
        await art.capture_yielded_trajectory(silent())
