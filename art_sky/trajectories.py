"""Trajectories and their groups: what agent code hands over to be trained on.

The JSON form that `model_dump` gives is the form of a stored batch (`art_sky.store.batches`) and survives a round
trip with everything in it. A list `messages_and_choices` holds OpenAI `Choice` objects, which are trained, and
message dicts, which are context. Agent code may append anything that OpenAI's client returns: a whole completion
counts as its first choice, a message object as its dict.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import numbers
import time
import traceback as tracebacks
from array import array
from collections.abc import AsyncIterator, Awaitable, Generator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, Self, TypeAlias

from openai import BaseModel as OpenAIModel
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SerializationInfo,
)

from art_sky.errors import InvalidInput, InvalidReward
from art_sky.store import batches, number_lists

MessageOrChoice: TypeAlias = Choice | dict[str, Any]
MessagesAndChoices: TypeAlias = list[MessageOrChoice]

# The `context` of a `model_dump` for `art_sky.store.batches`: token ids and logprobs come as arrays, not as lists.
WITH_ARRAYS = {"arrays": True}


def as_item(value: Any) -> MessageOrChoice:
    """A Choice, or a message as a dict of plain values. Raises InvalidInput for anything else."""
    if isinstance(value, Choice):
        return value
    if isinstance(value, ChatCompletion):
        return _first_choice(value)
    if isinstance(value, BaseModel):
        value = plain(value)
        if value.get("role") == "assistant":
            value.setdefault("content", None)  # templates and APIs want the key
    if isinstance(value, Mapping):
        if "role" in value:
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value.get("message"), Mapping):
            return choice_from_json(value)
        if isinstance(value.get("choices"), list | tuple) and value["choices"]:
            return _first_choice(ChatCompletion.construct(**value))
    raise InvalidInput(
        f"messages_and_choices holds {_shown(value)}, which is neither a message with a role nor a Choice; "
        "append a dict like {'role': 'user', 'content': ...} or completion.choices[0]"
    )


def choice_from_json(value: Mapping[str, Any]) -> Choice:
    """A typed Choice with every field of `value`, known to OpenAI's client or not. Nothing is validated, as in
    OpenAI's own client, so that what a newer or odd server sends is kept."""
    return Choice.construct(**{str(k): plain(v) for k, v in value.items()})


def item_to_json(value: Any, *, arrays: bool = False) -> dict[str, Any]:
    """The dict of a message or Choice, with the fields that were set and no others; with `arrays`, token ids and
    logprobs as `art_sky.store.batches` holds them."""
    item = as_item(value)
    if isinstance(item, dict):
        return item  # made just now, of plain values
    return {str(k): (_array(k, v) if arrays else None) or plain(v) for k, v in _fields(item)}


def _array(name: str, value: Any) -> array[Any] | None:
    return number_lists.to_array(value, batches.NUMBERS[name]) if name in batches.NUMBERS else None


def plain(value: Any) -> Any:
    """`value` with pydantic objects, tuples and other iterables replaced by dicts and lists."""
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, OpenAIModel):
        return {name: plain(v) for name, v in _fields(value)}
    if isinstance(value, BaseModel):
        return plain(value.model_dump(exclude_unset=True, warnings=False))
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, numbers.Real):  # numpy's numbers
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, Iterable):
        # Token ids and logprobs are nearly all of a batch: no call for each of them.
        return [v if type(v) in _LEAVES else plain(v) for v in value]
    return value


_LEAVES = frozenset({int, float, str, bool, type(None)})


def _fields(model: OpenAIModel) -> Iterator[tuple[str, Any]]:
    """The fields that were set, as they are. Not `model_dump`, which fails for keys with lone surrogates."""
    fields, extra = type(model).model_fields, model.__pydantic_extra__ or {}
    for name, value in model.__dict__.items():
        if name in model.model_fields_set:
            yield fields[name].alias or name, value
    yield from extra.items()


def check_reward(value: Any, where: str = "") -> float:
    """`value` as a float. Raises InvalidReward, which says `where`, unless it is a finite number (or a bool)."""
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise InvalidReward(
        f"the reward {_shown(value)}{where} is not a finite number; set a float, or raise an exception in the rollout "
        "if it has no reward"
    )


def _first_choice(completion: ChatCompletion) -> Choice:
    if not completion.choices:
        raise InvalidInput(f"the completion {completion.id!r} has no choices; append a Choice or a message")
    # The id finds the sampled tokens again if a library dropped them on the way.
    return completion.choices[0].model_copy(update={"completion_id": completion.id})


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _text(value: Any) -> str:
    """Any str, lone surrogates included, which pydantic's own str refuses."""
    if not isinstance(value, str):
        raise InvalidInput(f"{_shown(value)} is not text; convert it with str()")
    return value


def _metrics(values: Any) -> dict[str, float | int | bool]:
    if not isinstance(values, Mapping):
        raise InvalidInput(f"metrics are a dict of numbers, not {_shown(values)}")
    return {_text(k): _metric(k, v) for k, v in values.items()}


def _metric(name: Any, value: Any) -> float | int | bool:
    if isinstance(value, numbers.Real):
        number: float | int | bool = plain(value)
        return number
    raise InvalidInput(f"the metric {name!r} is {_shown(value)}; metrics are numbers, other values go into metadata")


def _items(values: Any) -> MessagesAndChoices:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidInput(f"messages_and_choices is a list of messages and choices, not {_shown(values)}")
    return [as_item(v) for v in values]


def _items_to_json(values: Iterable[Any], info: SerializationInfo) -> list[dict[str, Any]]:
    return [item_to_json(v, arrays=info.context == WITH_ARRAYS) for v in values]


Text = Annotated[str, PlainValidator(_text), PlainSerializer(_text)]
Reward = Annotated[float, PlainValidator(check_reward)]
Metrics = Annotated[dict[str, float | int | bool], PlainValidator(_metrics), PlainSerializer(_metrics)]
# `plain` again when written: agent code appends to these after they were validated.
Free = Annotated[dict[str, Any], BeforeValidator(plain), PlainSerializer(plain)]
Items = Annotated[MessagesAndChoices, PlainValidator(_items), PlainSerializer(_items_to_json)]
Tools = Annotated[list[dict[str, Any]] | None, BeforeValidator(plain), PlainSerializer(plain)]


class _Written(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    def model_dump_json(self, **options: Any) -> str:
        """ASCII, so that lone surrogates survive. Options are those of `model_dump`, and `indent`."""
        indent = options.pop("indent", None)
        return json.dumps(self.model_dump(**options), indent=indent)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        return cls.model_validate(json.loads(json_data), **options)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, BaseModel) and self.model_dump() == other.model_dump()


class RolloutError(_Written):
    """A rollout that failed. `type` is the exception's class name."""

    type: Text
    message: Text
    traceback: Text = ""

    @classmethod
    def of(cls, error: BaseException) -> RolloutError:
        text = "".join(tracebacks.format_exception(error))
        return cls(type=type(error).__name__, message=str(error), traceback=text)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class History(_Written):
    """One conversation. A trajectory has more than one when its agent started others, or rewrote its past."""

    messages_and_choices: Items = Field(default_factory=list)
    tools: Tools = None

    def messages(self) -> list[dict[str, Any]]:
        """OpenAI messages; a choice is the assistant message that it brought."""
        return [message_of(item) for item in self.messages_and_choices]


def message_of(item: Any) -> dict[str, Any]:
    """The OpenAI message of an entry of `messages_and_choices`."""
    item = as_item(item)
    if isinstance(item, dict):
        return item
    sent: dict[str, Any] = plain(item.message)
    kept = {k: v for k, v in sent.items() if v is not None and k not in ("role", "content")}
    return {"role": "assistant", "content": sent.get("content"), **kept}


class Trajectory(History):
    """The record of one rollout. `reward` is a finite number, checked whenever it is set; a bool counts as 0 or 1.

    All histories share the reward. Times that the methods put into `metrics` are in seconds.
    """

    additional_histories: list[History] = Field(default_factory=list)
    reward: Reward = 0.0
    metrics: Metrics = Field(default_factory=dict)
    metadata: Free = Field(default_factory=dict)
    logs: list[Text] = Field(default_factory=list)
    _started: float = PrivateAttr(default_factory=time.monotonic)

    def histories(self) -> list[History]:
        """The main conversation first, then `additional_histories`."""
        return [self, *self.additional_histories]

    def log(self, message: str) -> None:
        self.logs.append(_text(message))

    def finish(self) -> Trajectory:
        """Sets `metrics["duration"]` to the time since this object was made."""
        self.metrics["duration"] = time.monotonic() - self._started
        return self

    @asynccontextmanager
    async def track_duration(self, name: str) -> AsyncIterator[None]:
        """Adds the time of the block to `metrics["<name>_duration"]`, also when the block raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - began

    def for_logging(self) -> dict[str, Any]:
        """A readable dict: messages without token ids, each with `trainable`."""

        def shown(history: History) -> dict[str, Any]:
            items = [as_item(i) for i in history.messages_and_choices]
            messages = [{**message_of(i), "trainable": isinstance(i, Choice)} for i in items]
            return {"messages": messages, "tools": plain(history.tools)}

        main, *others = [shown(h) for h in self.histories()]
        return {
            "reward": self.reward,
            "metrics": _metrics(self.metrics),
            "metadata": plain(self.metadata),
            **main,
            **({"additional_histories": others} if others else {}),
            "logs": list(self.logs),
        }

    def __str__(self) -> str:
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"


class TrajectoryGroup(_Written):
    """Trajectories of the same task, compared with each other; failed rollouts stand in `exceptions`.

    `trajectories` may also hold awaitables, usually calls of an async rollout function, and exceptions. A group
    with awaitables must be awaited, or given to `gather_trajectory_groups`, which run them; awaiting gives the same
    object. Awaited on its own, a group raises TooManyFailures for its first failed rollout.
    """

    trajectories: list[Trajectory] = Field(default_factory=list)
    exceptions: list[RolloutError] = Field(default_factory=list)
    metadata: Free = Field(default_factory=dict)
    metrics: Metrics = Field(default_factory=dict)
    logs: list[Text] = Field(default_factory=list)
    _pending: list[Awaitable[Trajectory]] = PrivateAttr(default_factory=list)

    __hash__ = object.__hash__  # asyncio.gather(*groups) keeps its awaitables in a dict

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException | Awaitable[Trajectory]] = (),
        *,
        metadata: Mapping[str, Any] | None = None,
        exceptions: Iterable[RolloutError | BaseException] = (),
        metrics: Mapping[str, float | int | bool] | None = None,
        logs: Iterable[str] = (),
    ) -> None:
        done: list[Any] = []
        failed: list[RolloutError] = []
        pending: list[Awaitable[Trajectory]] = []
        for index, item in enumerate(trajectories):
            if isinstance(item, Awaitable):
                pending.append(item)
            elif isinstance(item, BaseException):
                failed.append(RolloutError.of(item))
            else:
                if isinstance(item, Mapping) and "reward" in item:
                    check_reward(item["reward"], f" of trajectory {index}")
                done.append(item)
        failed += [RolloutError.of(e) if isinstance(e, BaseException) else e for e in exceptions]
        BaseModel.__init__(
            self, trajectories=done, exceptions=failed, metadata=metadata or {}, metrics=metrics or {}, logs=list(logs)
        )
        self._pending = pending

    @property
    def pending(self) -> int:
        """Rollouts that have not been awaited yet."""
        return len(self._pending)

    def take_pending(self) -> list[Awaitable[Trajectory]]:
        """Hands the rollouts over to whoever runs them."""
        pending, self._pending = self._pending, []
        return pending

    def discard(self) -> None:
        """Drops rollouts that will not be run, so that Python does not warn about them."""
        for rollout in self.take_pending():
            close_unused(rollout)

    def log(self, message: str) -> None:
        self.logs.append(_text(message))

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        from art_sky.client.gather import run_group

        return run_group(self).__await__()

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]  # a group is a list, as in ART, not its fields
        self._refuse_pending()
        return iter(self.trajectories)

    def __len__(self) -> int:
        self._refuse_pending()
        return len(self.trajectories)

    def __bool__(self) -> bool:
        return True  # a group is a record, also an empty one

    def _refuse_pending(self) -> None:
        if self._pending:
            raise InvalidInput(
                f"{len(self._pending)} rollouts of this group have not run; await the group or give it to "
                "gather_trajectory_groups first"
            )


def close_unused(rollout: Awaitable[Any]) -> None:
    """Ends an awaitable that nobody will await: closes a coroutine that never began, cancels a task or future."""
    if inspect.iscoroutine(rollout):
        if inspect.getcoroutinestate(rollout) == inspect.CORO_CREATED:
            rollout.close()
    elif isinstance(rollout, asyncio.Future):
        rollout.cancel()
