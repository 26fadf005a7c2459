"""Trajectories survive JSON with everything in them, and refuse what cannot be trained."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

import art_sky as art
from art_sky.client.capture import trajectory_of
from art_sky.client.summary import summarize
from art_sky.errors import InvalidInput, InvalidReward
from art_sky.schemas import Exchange
from art_sky.store.batches import decode_batch, encode_batch, is_choice
from art_sky.trajectories import WITH_ARRAYS, plain

TOOL_CALL = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

text = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates included
leaf = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text
)
value = st.recursive(leaf, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=6)
extras = st.dictionaries(
    st.sampled_from(["reasoning_content", "vendor", "cache_control", "x\ud800"]), value, max_size=2
)
tool_calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": text,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": text, "arguments": text}, optional={"vendor": value}),
        }
    ),
    max_size=2,
)
messages = st.builds(
    lambda base, more: {**more, **base},
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.none() | text | st.lists(value, max_size=2),
        },
        optional={"tool_calls": tool_calls, "tool_call_id": text, "name": text},
    ),
    extras,
)
answers = st.builds(
    lambda base, more: {**more, **base},
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.none() | text},
        optional={"tool_calls": tool_calls, "refusal": st.none() | text},
    ),
    extras,
)
choices = st.fixed_dictionaries(
    {
        "index": st.integers(0, 7),
        "finish_reason": st.sampled_from(["stop", "length", "tool_calls", "odd"]),
        "message": answers,
    },
    optional={
        "logprobs": st.none(),
        "prompt_token_ids": st.lists(st.integers(0, 10**6), max_size=3),
        "token_ids": st.lists(st.integers(0, 10**6), max_size=3),
        "token_logprobs": st.lists(st.floats(-50, 0), max_size=3),
        "sampling": st.fixed_dictionaries({"completion_id": text, "temperature": st.floats(0, 2)}),
        "stop_reason": value,
    },
)
items = st.lists(messages | choices, max_size=4)
tools = st.none() | st.lists(st.dictionaries(text, value, max_size=2), max_size=2)
metrics = st.dictionaries(
    text, st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False), max_size=3
)
history = st.fixed_dictionaries({"messages_and_choices": items, "tools": tools})
trajectories = st.fixed_dictionaries(
    {
        "messages_and_choices": items,
        "tools": tools,
        "additional_histories": st.lists(history, max_size=2),
        "reward": st.floats(allow_nan=False, allow_infinity=False),
        "metrics": metrics,
        "metadata": st.dictionaries(text, value, max_size=2),
        "logs": st.lists(text, max_size=2),
    }
)
groups = st.fixed_dictionaries(
    {
        "trajectories": st.lists(trajectories, max_size=3),
        "exceptions": st.lists(st.fixed_dictionaries({"type": text, "message": text, "traceback": text}), max_size=2),
        "metadata": st.dictionaries(text, value, max_size=2),
        "metrics": metrics,
        "logs": st.lists(text, max_size=2),
    }
)


@settings(max_examples=100, deadline=None)
@given(groups)
def test_groups_round_trip_exactly(written: dict[str, Any]) -> None:
    group = art.TrajectoryGroup.model_validate(json.loads(json.dumps(written)))
    assert group.model_dump() == written
    for trajectory, source in zip(group, written["trajectories"], strict=True):
        for item, raw in zip(trajectory.messages_and_choices, source["messages_and_choices"], strict=True):
            assert isinstance(item, Choice) == is_choice(raw)
    assert art.TrajectoryGroup.model_validate_json(group.model_dump_json()) == group
    for dumped in (group.model_dump(), group.model_dump(context=WITH_ARRAYS)):
        stored = decode_batch(encode_batch([dumped]))
        assert plain(stored) == [written]
        assert art.TrajectoryGroup.model_validate(stored[0]) == group


def test_only_whole_lists_of_numbers_are_dumped_as_arrays() -> None:
    numbers = {"prompt_token_ids": [1, 2], "token_ids": array("i", [3]), "token_logprobs": [-0.5]}
    others: dict[str, Any] = {"prompt_token_ids": [1, None], "token_ids": [True], "token_logprobs": [float("nan")]}
    message = {"role": "assistant", "content": "hi"}
    history = art.History(messages_and_choices=[{"message": message, **numbers}, {"message": message, **others}])
    (dumped, odd) = history.model_dump(context=WITH_ARRAYS)["messages_and_choices"]
    expected = {
        "prompt_token_ids": array("i", [1, 2]),
        "token_ids": array("i", [3]),
        "token_logprobs": array("d", [-0.5]),
    }
    assert {name: dumped[name] for name in numbers} == expected
    assert repr({name: odd[name] for name in others}) == repr(others)
    assert json.loads(history.model_dump_json())["messages_and_choices"][0]["token_ids"] == [3]


def a_choice(**message: Any) -> Choice:
    return Choice.construct(
        index=0, finish_reason="stop", message={"role": "assistant", "content": "hi", **message}, token_ids=[1]
    )


def test_what_agent_code_appends_is_understood() -> None:
    completion = ChatCompletion.construct(
        id="chatcmpl-1", object="chat.completion", created=1, model="m", choices=[json.loads(a_choice().to_json())]
    )
    message = ChatCompletionMessage.construct(role="assistant", tool_calls=[TOOL_CALL], reasoning_content="hm")
    t = art.Trajectory(messages_and_choices=({"role": "user", "content": c} for c in "ab"))
    t.messages_and_choices.append(completion)  # type: ignore[arg-type]  # appended raw, as agent code does
    t.messages_and_choices.append({"role": "assistant", "content": None, "tool_calls": message.tool_calls})
    t.messages_and_choices.append(message)  # type: ignore[arg-type]
    written = json.loads(json.dumps(t.model_dump()))["messages_and_choices"]
    assert [is_choice(i) for i in written] == [False, False, True, False, False]
    assert written[2]["completion_id"] == "chatcmpl-1" and written[2]["token_ids"] == [1]
    assert written[3]["tool_calls"] == [TOOL_CALL] == written[4]["tool_calls"]
    assert written[4]["content"] is None and written[4]["reasoning_content"] == "hm"
    assert [m["role"] for m in t.messages()] == ["user", "user", "assistant", "assistant", "assistant"]
    as_dict = json.loads(completion.to_json())
    (only,) = art.Trajectory(messages_and_choices=[as_dict]).messages_and_choices
    assert isinstance(only, Choice) and only.completion_id == "chatcmpl-1"  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", [3, None, {"content": "no role"}, {"choices": []}, object()])
def test_other_things_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="neither a message with a role nor a Choice"):
        art.Trajectory(messages_and_choices=[wrong])
    with pytest.raises(InvalidInput):
        art.Trajectory(messages_and_choices="text")  # type: ignore[arg-type]  # the point


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), None, "1", [1], 1j])
def test_rewards_are_finite_numbers(wrong: Any) -> None:
    t = art.Trajectory(reward=0.5)
    for attempt in (lambda: art.Trajectory(reward=wrong), lambda: setattr(t, "reward", wrong)):
        with pytest.raises(InvalidReward, match="is not a finite number"):
            attempt()
    assert t.reward == 0.5
    with pytest.raises(InvalidReward, match="of trajectory 1"):
        art.TrajectoryGroup.model_validate({"trajectories": [{"reward": 0}, {"reward": wrong}]})


def test_numbers_of_other_types_count() -> None:
    import numpy as np

    t = art.Trajectory(reward=True, metrics={"a": np.float32(0.5), "b": np.int64(2), "c": True})
    assert t.reward == 1.0 and isinstance(t.reward, float)
    t.reward = np.float32(0.25)
    t.metrics["d"] = np.float64(1)
    assert json.loads(t.model_dump_json())["metrics"] == {"a": 0.5, "b": 2, "c": True, "d": 1.0}
    with pytest.raises(InvalidInput, match="'x' is 'high'"):
        art.Trajectory(metrics={"x": "high"})  # type: ignore[dict-item]  # the point


async def test_methods_of_a_trajectory() -> None:
    t = art.Trajectory(messages_and_choices=[{"role": "user", "content": "q"}, a_choice(tool_calls=[TOOL_CALL])])
    with pytest.raises(LookupError):
        async with t.track_duration("tool"):
            raise LookupError
    first = t.metrics["tool_duration"]
    async with t.track_duration("tool"):
        pass
    assert t.metrics["tool_duration"] >= first >= 0
    assert t.finish() is t and t.metrics["duration"] >= t.metrics["tool_duration"]
    t.log("looked twice")
    shown = t.for_logging()
    assert [m["trainable"] for m in shown["messages"]] == [False, True] and shown["logs"] == ["looked twice"]
    assert "token_ids" not in json.dumps(shown)
    assert t.messages()[1] == {"role": "assistant", "content": "hi", "tool_calls": [TOOL_CALL]}
    assert str(t).startswith("Trajectory(reward=0.0, metrics={")


def test_groups_take_exceptions() -> None:
    group = art.TrajectoryGroup([art.Trajectory(), ValueError("x")], exceptions=[KeyError("y")], metadata={"a": 1})
    assert [str(e) for e in group.exceptions] == ["ValueError: x", "KeyError: 'y'"]
    assert len(group) == 1 and list(group) == group.trajectories and bool(art.TrajectoryGroup([]))
    group.log("hello")
    assert art.TrajectoryGroup.model_validate(group.model_dump()) == group


def test_summary() -> None:
    def one(reward: float, **metrics: float) -> art.Trajectory:
        return art.Trajectory(reward=reward, metrics=metrics)

    row = summarize(
        [
            art.TrajectoryGroup([one(0, acc=1), one(1), ValueError()], metrics={"judge": 3}),
            art.TrajectoryGroup([one(2, acc=0)]),
        ]
    )
    assert row == pytest.approx(
        {
            "reward": 1, "reward_std_dev": 0.5, "reward_std_dev_overall": (2 / 3) ** 0.5, "exception_rate": 0.25,
            "trajectories": 3, "groups": 2, "acc": 0.5, "group/judge": 3,
        }
    )  # fmt: skip
    assert summarize([]) == {"trajectories": 0, "groups": 0}


# --- rollouts by address --------------------------------------------------------------------------------


def call(number: int, messages: list[Any], *answers: str, tools: Any = None) -> Exchange:
    made = [
        {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": a}, "token_ids": [number, i]}
        for i, a in enumerate(answers)
    ]
    return Exchange(
        completion_id=f"c{number}", created=float(number), project="p", model="m@0", messages=messages, tools=tools,
        choices=made,
    )  # fmt: skip


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def shape(history: art.History) -> list[str]:
    return ["*" if isinstance(i, Choice) else i["role"][0] for i in history.messages_and_choices]


def test_a_conversation_becomes_one_history() -> None:
    parts = [{"type": "text", "text": "b"}]
    exchanges = [
        call(1, [user("a")], "A"),
        call(2, [user("a"), answer([{"type": "text", "text": "A"}], refusal=None), user(parts)], "B"),
        call(3, [user("a"), answer("A"), user("b"), answer("B", tool_calls=[]), user("c")], "C"),
    ]
    t = trajectory_of(list(reversed(exchanges)))
    assert shape(t) == ["u", "*", "u", "*", "u", "*"] and t.additional_histories == []
    assert t.messages()[2]["content"] == parts


def test_other_conversations_become_histories_of_their_own() -> None:
    t = trajectory_of(
        [
            call(1, [user("a")], "A"),
            call(2, [user("sub-agent")], "S"),
            call(3, [user("a"), answer("A"), user("b")], "B"),
            call(4, [user("sub-agent"), answer("S"), user("more")], "T"),
            call(5, [user("a")], "A"),  # the same prompt again
            call(6, [user("a"), answer("A, edited"), user("b")], "B"),  # a past that was rewritten
            call(7, [user("a"), answer("A"), user("b"), answer("B"), user("c")], "C", tools=[{"type": "function"}]),
        ]
    )
    assert [shape(h) for h in t.histories()] == [
        ["u", "*", "u", "*"], ["u", "*", "u", "*"], ["u", "*"], ["u", "a", "u", "*"], ["u", "a", "u", "a", "u", "*"],
    ]  # fmt: skip
    assert t.additional_histories[-1].tools == [{"type": "function"}]


def test_of_several_choices_each_is_trained_once() -> None:
    t = trajectory_of(
        [
            call(1, [user("a")], "A"),
            call(2, [user("a"), answer("A"), user("b")], "B0", "B1"),
            call(3, [user("a"), answer("A"), user("b"), answer("B1"), user("c")], "C"),
        ]
    )
    assert [shape(h) for h in t.histories()] == [["u", "*", "u", "*"], ["u", "a", "u", "*", "u", "*"]]
    sampled = [i.token_ids for h in t.histories() for i in h.messages_and_choices if isinstance(i, Choice)]  # type: ignore[attr-defined]
    assert sorted(sampled) == [[1, 0], [2, 0], [2, 1], [3, 0]]


def test_no_exchange_is_an_empty_trajectory() -> None:
    assert trajectory_of([]) == art.Trajectory()
