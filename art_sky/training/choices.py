"""What a choice and a reward must be before anything is trained on them (rule R1).

Plain Python on the JSON form, so that the client can refuse a bad batch before it is sent.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from art_sky.errors import InvalidInput, InvalidReward, MissingTokens
from art_sky.store import number_lists
from art_sky.store.batches import is_choice

_MAX_ID = 2**31 - 1
_MAX_REWARD = 1e30  # squares of it still add up, and float32 holds it


def check_groups(groups: list[Mapping[str, Any]]) -> None:
    """Raises InvalidReward, MissingTokens or InvalidInput naming group, trajectory and message of the first fault."""
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group["trajectories"]):
            check_reward(trajectory.get("reward"), f"group {g}, trajectory {t}")
            for where, choice in choices(trajectory, f"group {g}, trajectory {t}"):
                check_choice(choice, where)


def check_examples(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidInput naming the first trajectory in which no assistant speaks, or the turn that says nothing."""
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group["trajectories"]):
            where, turns = f"group {g}, trajectory {t}", 0
            for history, items in histories(trajectory):
                for m, item in enumerate(items):
                    if is_assistant(item):
                        turns += 1
                        message = item.get("message", item)
                        if not any(message.get(k) for k in ("content", "tool_calls")) and not item.get("token_ids"):
                            raise InvalidInput(
                                f"{where}{history}, message {m}: the assistant says nothing; give it content or "
                                f"tool_calls, or leave the message out"
                            )
            if not turns:
                raise InvalidInput(f"{where}: no assistant speaks, so there is nothing to learn; leave it out")


def is_assistant(item: Mapping[str, Any]) -> bool:
    """Whether an entry of `messages_and_choices` is what a model said, sampled here or not."""
    return is_choice(item) or item.get("role") == "assistant"


def check_reward(reward: object, where: str) -> float:
    """The reward as a float; raises InvalidReward unless it is a finite number."""
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not abs(reward) <= _MAX_REWARD:
        raise InvalidReward(f"{where}: the reward is {str(reward)[:40]}; assign a finite number before training")
    return float(reward)


def check_choice(choice: Mapping[str, Any], where: str) -> None:
    """Raises MissingTokens when ids or logprobs are absent or do not belong together, InvalidInput for bad values."""
    prompt, ids, logprobs = (_list(choice, k, where) for k in ("prompt_token_ids", "token_ids", "token_logprobs"))
    if len(ids) != len(logprobs):
        raise MissingTokens(
            f"{where}: {len(ids)} token_ids but {len(logprobs)} token_logprobs; append the Choice as this server "
            f"returned it"
        )
    # Nearly all lists are right, and are seen to be without a step for each number; the others' faults are looked for.
    for token in (t for tokens in (prompt, ids) if not number_lists.are_token_ids(tokens) for t in tokens):
        if type(token) is not int or not 0 <= token <= _MAX_ID:
            raise InvalidInput(f"{where}: {token!r} is not a token id; append the Choice as this server returned it")
    for logprob in logprobs if number_lists.to_array(logprobs, "d") is None else ():
        if isinstance(logprob, bool) or not isinstance(logprob, (int, float)) or not math.isfinite(logprob):
            raise InvalidInput(f"{where}: the logprob {logprob!r} is not a finite number; sample this choice again")
    sampling = choice.get("sampling")
    temperature = sampling.get("temperature") if isinstance(sampling, Mapping) else None
    if (
        not isinstance(sampling, Mapping)
        or isinstance(temperature, bool)
        or not isinstance(temperature, (int, float))
        or not (math.isfinite(temperature) and temperature >= 0)
        or not isinstance(sampling.get("comparable"), bool)
    ):
        raise MissingTokens(
            f"{where}: the choice does not say how it was sampled (`sampling` with temperature and comparable); "
            f"append the Choice as this server returned it"
        )


def histories(trajectory: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The main history, then the additional ones, each with a name for error messages."""
    yield "", trajectory.get("messages_and_choices") or []
    for h, history in enumerate(trajectory.get("additional_histories") or []):
        yield f", additional history {h}", history.get("messages_and_choices") or []


def choices(trajectory: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every choice of a trajectory with the words that say where it stands."""
    for history, items in histories(trajectory):
        for m, item in enumerate(items):
            if is_choice(item):
                yield f"{where}{history}, message {m}", item


def _list(choice: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    value = choice.get(name)
    if not isinstance(value, list | array) or not value:
        raise MissingTokens(
            f"{where}: the choice has no {name}, so it is not known what was sampled; append the Choice as this "
            f"server returned it, or a dict message if it is only context"
        )
    return value
